"""Arrays, pictures, texts and checkpoints from strangers: a value or a sentence; nothing in them is run."""

from __future__ import annotations

import gzip
import io
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import paredown as pare
from paredown.study.tasks import data_files
from paredown.study.tasks.data_files import read_arrays, read_folder, read_idx, read_text
from tests.strangers.mutations import answers, thousands, wrong_bytes


class Bomb:
    """Leaves a mark when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (str(self.mark), "w")


def npz(**members: Any) -> bytes:
    """The bytes of an .npz."""
    to = io.BytesIO()
    np.savez(to, **members)
    return to.getvalue()


def right_npz() -> bytes:
    """Ten pictures and their labels."""
    x, y = np.zeros((10, 4, 4), np.uint8), np.arange(10) % 2
    return npz(x_train=x, y_train=y, x_test=x, y_test=y, class_names=np.array(["a", "b"]))


def test_pictures(tmp_path: Path) -> None:
    path = tmp_path / "data.npz"
    path.write_bytes(right_npz())
    assert answers(lambda: read_arrays(path))

    @thousands(400)
    @given(wrong_bytes(right_npz()))
    def check(data: bytes) -> None:
        path.write_bytes(data)
        answers(lambda: read_arrays(path))

    check()


KINDS = [np.float64, np.complex64, np.bool_, np.uint64, "U3", "S3", "M8[s]", np.dtype([("a", np.int32)])]


@thousands(300)
@given(
    st.sampled_from(KINDS), st.lists(st.integers(0, 5), max_size=5), st.sampled_from(KINDS), st.lists(st.integers(0, 5), max_size=3)
)
def test_pictures_of_odd_types_and_shapes(
    tmp_path_factory: pytest.TempPathFactory, a: Any, shape: list[int], b: Any, other: list[int]
) -> None:
    path = tmp_path_factory.getbasetemp() / "odd.npz"
    x, y = np.zeros(shape, a), np.zeros(other, b)
    path.write_bytes(npz(x_train=x, y_train=y, x_test=x, y_test=y))
    answers(lambda: read_arrays(path))
    path.write_bytes(npz(pictures=x, labels=y))
    answers(lambda: read_arrays(path))


def test_arrays_with_objects_and_wrong_headers_are_not_run(tmp_path: Path) -> None:
    mark, path = tmp_path / "mark", tmp_path / "evil.npz"
    objects = np.array([Bomb(mark)] * 10, dtype=object)
    huge = b"\x93NUMPY\x01\x00v\x00{'descr': '<f8', 'fortran_order': False, 'shape': (99999999999, 99999), }".ljust(128)
    for data in (
        npz(x_train=objects, y_train=objects, x_test=objects, y_test=objects),
        pickle.dumps(Bomb(mark)),
        _zip(b"x_train.npy", huge),
    ):
        path.write_bytes(data)
        assert not answers(lambda: read_arrays(path))
    assert not mark.exists()


def test_files_that_swell_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A few kilobytes that would unpack to gigabytes; here to megabytes, with the bound lowered."""
    monkeypatch.setattr(data_files, "BOMB_BYTES", 1 << 20)
    text, file = tmp_path / "text.gz", tmp_path / "data.npz"
    text.write_bytes(gzip.compress(bytes(1 << 22)))
    assert not answers(lambda: read_text(text, 8))
    text.write_bytes(gzip.compress(bytes(1 << 19)))
    assert answers(lambda: read_text(text, 8)), "below the bound anything may be zipped well"
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as zipped:
        zipped.writestr("x_train.npy", bytes(1 << 22))
    with pytest.raises(pare.errors.TaskError, match="unpack to"):
        read_arrays(file)


PICTURES = (
    ("PNG", "RGB"),
    ("PNG", "P"),
    ("BMP", "RGB"),
    ("GIF", "P"),
    ("TIFF", "RGB"),
    ("JPEG", "RGB"),
    ("PPM", "RGB"),
    ("DDS", "RGB"),
)


def picture(kind: str, mode: str = "RGB") -> bytes:
    """A small picture in a file of this kind."""
    image = pytest.importorskip("PIL.Image")
    to = io.BytesIO()
    image.new("RGB", (7, 9), (200, 30, 60)).convert(mode).save(to, kind)
    return to.getvalue()


@pytest.mark.parametrize(("kind", "mode"), PICTURES, ids=lambda text: text)
def test_pictures_in_folders(kind: str, mode: str, tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        for number in range(5):
            (tmp_path / name / f"{number}.img").write_bytes(picture(kind, mode))
    assert answers(lambda: read_folder(tmp_path, side=4))

    @thousands(60)
    @given(wrong_bytes(picture(kind, mode)))
    def check(data: bytes) -> None:
        (tmp_path / "a" / "0.img").write_bytes(data)
        answers(lambda: read_folder(tmp_path, side=4))

    check()


def test_a_picture_of_unknown_pixel_format_or_of_too_many_pixels_is_a_sentence(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "0.img").write_bytes(picture("PNG"))
    unknown, bomb, large = bytearray(picture("DDS")), bytearray(picture("BMP")), bytearray(picture("BMP"))
    unknown[80:84] = (0x2000).to_bytes(4, "little")  # flags of the pixel format
    bomb[18:26] = (60_000).to_bytes(4, "little") * 2  # width and height
    large[18:26] = (10_000).to_bytes(4, "little") * 2  # Pillow itself warns of this one
    for data, said in ((unknown, "pixel format"), (bomb, "exceeds limit"), (large, "exceeds limit")):
        (tmp_path / "a" / "0.img").write_bytes(data)
        with pytest.raises(
            pare.errors.TaskError, match=rf"a/0\.img is not a readable picture: .*{said}.* Replace it, or remove it"
        ):
            read_folder(tmp_path, side=4)


def _zip(name: bytes, data: bytes) -> bytes:
    to = io.BytesIO()
    with zipfile.ZipFile(to, "w") as file:
        file.writestr(name.decode(), data)
    return to.getvalue()


def test_texts_and_idx(tmp_path: Path) -> None:
    text, folder = tmp_path / "text.gz", tmp_path / "idx"
    folder.mkdir()
    head = bytes([0, 0, 8, 3, 0, 0, 0, 2, 0, 0, 0, 2, 0, 0, 0, 2])
    pictures, labels = head + bytes(8), bytes([0, 0, 8, 1, 0, 0, 0, 2, 0, 1])
    names = {
        f"{part}-{kind}-ubyte": data
        for part in ("train", "t10k")
        for kind, data in (("images-idx3", pictures), ("labels-idx1", labels))
    }
    for name, data in names.items():
        (folder / name).write_bytes(data)
    assert answers(lambda: read_idx(folder))

    @thousands(300)
    @given(wrong_bytes(gzip.compress(b"hello " * 40)), wrong_bytes(pictures), wrong_bytes(labels))
    def check(zipped: bytes, x: bytes, y: bytes) -> None:
        text.write_bytes(zipped)
        answers(lambda: read_text(text, 8))
        (folder / "train-images-idx3-ubyte").write_bytes(x)
        (folder / "train-labels-idx1-ubyte").write_bytes(y)
        answers(lambda: read_idx(folder))

    check()


# --- checkpoints ------------------------------------------------------------------------------------------------------


def session_state() -> tuple[Any, Any]:
    """A trained model's session and optimizer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 4))
    session = pare.apply(pare.Plan.preset("lpmm").set("activation", "int8/64@bf16"), model)
    optimizer = pare.optim.AdamW(model.parameters(), lr=1e-3)
    nn.functional.cross_entropy(model(torch.randn(128, 64)), torch.zeros(128, dtype=torch.int64)).backward()
    optimizer.step()
    optimizer.zero_grad()
    return session, optimizer


ODD: list[Any] = [
    None,
    -1,
    2**70,
    float("nan"),
    "x",
    "int3/64@bf16",
    [],
    {},
    (),
    True,
    torch.zeros(3),
    torch.zeros(0),
    torch.zeros(64, 64, dtype=torch.int8),
]


@st.composite
def wrong_state(draw: st.DrawFn, right: Any) -> Any:
    """A state with up to two of its parts replaced or left out; tensors are not looked into."""
    value = _copied(right)
    for _ in range(draw(st.integers(1, 2))):
        found = list(_parts(value))
        container, key = found[draw(st.integers(0, len(found) - 1))]
        if draw(st.booleans()) and isinstance(container, dict):
            del container[key]
        else:
            container[key] = draw(st.sampled_from(ODD))
    return value


def _copied(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copied(part) for key, part in value.items()}
    return [_copied(part) for part in value] if isinstance(value, list) else value


def _parts(value: Any) -> Any:
    if isinstance(value, dict | list):
        for key in list(value) if isinstance(value, dict) else range(len(value)):
            yield value, key
            yield from _parts(value[key])


@pytest.mark.parametrize("which", [0, 1], ids=["session", "optimizer"])
def test_checkpoints(which: int) -> None:
    made = session_state()
    right = made[which].state_dict()

    @thousands(150)
    @given(wrong_state(right))
    def check(value: Any) -> None:
        answers(lambda: made[which].load_state_dict(value))

    check()
    assert answers(lambda: made[which].load_state_dict(right)), "and the right one is still taken"
    made[0].close()


def test_a_checkpoint_loads_without_unpickling_code(tmp_path: Path) -> None:
    path, (session, optimizer) = tmp_path / "state.pt", session_state()
    torch.save({"session": session.state_dict(), "optimizer": optimizer.state_dict()}, path)
    state = torch.load(path, weights_only=True)
    session.load_state_dict(state["session"])
    optimizer.load_state_dict(state["optimizer"])
    session.close()


def _reader(name: str) -> Callable[[Path], Any]:
    return {"plan": pare.Plan.load, "trace": pare.Trace.load}[name]


@pytest.mark.parametrize("name", ["plan", "trace"])
def test_a_pickle_is_not_read(name: str, tmp_path: Path) -> None:
    mark, path = tmp_path / "mark", tmp_path / "evil.json"
    path.write_bytes(pickle.dumps(Bomb(mark)))
    assert not answers(lambda: _reader(name)(path))
    assert not mark.exists()
