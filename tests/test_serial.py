"""Files are written whole or not at all: a full disk, an error or a folder that cannot be written leaves what was there."""

from __future__ import annotations

import os
import resource
import stat
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

import pytest
from torch import nn

from paredown import Plan
from paredown.cli.inputs import write_json
from paredown.cli.train_verb import write_weights
from paredown.errors import ParedownError, PlanError
from paredown.serial import replaced_file, save_json, save_text
from paredown.study.report.page import write as write_page
from paredown.study.report.record import Record

LIMIT = 64  # bytes that a file may have on the full disk
PLAN = Plan.uniform(activation="e4m3fn", weight="int8/64@bf16")
WRITERS: dict[str, Callable[[Path], None]] = {
    "plan.json": PLAN.save,
    "value.json": lambda path: save_json(path, list(range(1000)), PlanError),
    "cli.json": lambda path: write_json(path, {"a": list(range(1000))}),
    "record.json": Record("title " * 30).save,
    "page.html": lambda path: write_page(Record("title"), path),
    "weights.pt": lambda path: write_weights(nn.Linear(8, 8), path),
    "weights.safetensors": lambda path: write_weights(nn.Linear(8, 8), path),
}


@contextmanager
def full_disk() -> Generator[None]:
    """Writes past LIMIT bytes of a file fail, as on a disk without space."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("name", WRITERS)
def test_a_full_disk_leaves_the_file_that_was_there(name: str, tmp_path: Path) -> None:
    if name.endswith("safetensors"):
        pytest.importorskip("safetensors")
    path = tmp_path / name
    for before in (b"as it was", None):
        path.write_bytes(before) if before is not None else path.unlink()
        with full_disk(), pytest.raises(ParedownError, match="cannot be written: ") as error:
            WRITERS[name](path)
        assert name in str(error.value)
        assert [(one.name, one.read_bytes()) for one in tmp_path.iterdir()] == ([(name, before)] if before is not None else [])
    WRITERS[name](path)
    assert path.stat().st_size > LIMIT and list(tmp_path.iterdir()) == [path]


def test_a_reader_never_sees_a_part(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_text("old")
    with replaced_file(path, PlanError) as part:
        part.write_text("n")
        assert path.read_text() == "old" and part.parent == tmp_path
        part.write_text("new")
    assert path.read_text() == "new"
    with pytest.raises(KeyboardInterrupt), replaced_file(path, PlanError) as part:
        part.write_text("newer")
        raise KeyboardInterrupt
    assert path.read_text() == "new" and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("name", "age", "is_removed"),
    [
        (".123-0123abcd.part", 2 * 3600, True),
        (".123-0123abcd.part", 60, False),  # its writer may be at work, here or on another machine
        (".mine.part", 2 * 3600, False),
        ("123-0123abcd.part", 2 * 3600, False),
    ],
)
def test_parts_of_killed_writers_are_removed_by_the_next_one(name: str, age: float, is_removed: bool, tmp_path: Path) -> None:
    part = tmp_path / name
    part.write_text("half of a pl")
    os.utime(part, (time.time() - age,) * 2)
    Plan().save(tmp_path / "plan.json")
    assert part.exists() != is_removed
    assert Plan.load(tmp_path / "plan.json") == Plan()


def test_permissions_and_links_stay(tmp_path: Path) -> None:
    path, link = tmp_path / "a", tmp_path / "link"
    save_text(path, "1", PlanError)
    plain = tmp_path / "plain"
    plain.write_text("1")
    assert path.stat().st_mode == plain.stat().st_mode
    path.chmod(0o600)
    link.symlink_to(path)
    save_text(link, "2", PlanError)
    assert link.is_symlink() and path.read_text() == "2" and stat.S_IMODE(path.stat().st_mode) == 0o600


def test_devices_are_written_directly() -> None:
    save_text("/dev/null", "text", PlanError)
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)
    with pytest.raises(PlanError, match=r"/dev/full cannot be written: No space left on device\. The file that had this name"):
        save_text("/dev/full", "text", PlanError)


def test_errors_say_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PlanError, match=r"cannot be written: No such file or directory\. There is no folder .*missing: create it"):
        PLAN.save(tmp_path / "missing" / "plan.json")
    with pytest.raises(PlanError, match=r"cannot be written: Is a directory\. It is a folder: give the path of a file"):
        PLAN.save(tmp_path)
    with pytest.raises(PlanError, match="cannot be the path of a file"):
        PLAN.save("a\0b")

    def refuse(self: Path, data: bytes) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "write_bytes", refuse)  # root may write everywhere
    with pytest.raises(
        PlanError, match=r"Permission denied\. A new file is written and renamed, and this user may not create one in"
    ):
        PLAN.save(tmp_path / "plan.json")
