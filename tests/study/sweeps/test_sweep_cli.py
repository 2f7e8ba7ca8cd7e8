"""`paredown sweep` and `paredown worker`: real trials, killed and started again, and the printed messages."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sqlalchemy")
pytest.importorskip("typer")

from typer.testing import CliRunner

from paredown.cli import app
from paredown.plan.plan import Plan
from paredown.study.sweeps import database, worker
from paredown.study.sweeps.engines.engine import InlineEngine, LocalEngine
from paredown.study.sweeps.engines.ray import RayOptions
from paredown.study.sweeps.export import rows
from paredown.study.sweeps.runner import TaskFolder, make_engine
from paredown.study.sweeps.status import count
from paredown.study.sweeps.store import Store
from paredown.study.sweeps.sweep import EndedTrial, TrialSpec
from paredown.study.sweeps.worker import WorkerOptions, work
from tests.support.postgres import PASSWORD
from tests.support.trials import done, draw
from tests.support.work import ROOT

TOML = """
tasks = ["digits#model=mlp,steps=5", "mine.py:small"]
seeds = [0, 1, 2, 3, 4]
[[plans]]
[[plans]]
activation = "int8/64@bf16"
"""
TASK = """
from paredown.study.tasks.lookup import find_task

def small():
    return find_task("digits#model=mlp,steps=3,width=16")
"""


def command(*arguments: str) -> list[str]:
    """The command line, as the entry point runs it."""
    return [sys.executable, "-W", "error", "-c", "from paredown.cli import main; main()", *arguments]


def environment(address: str) -> dict[str, str]:
    """The store's address travels here: what stands on a command line is seen by everybody on the machine."""
    return {**os.environ, "PYTHONPATH": str(ROOT / "src"), "PAREDOWN_STORE": address, "COLUMNS": "200"}


def start(folder: Path, address: str, *arguments: str, **options: Any) -> subprocess.Popen[str]:
    """Start `paredown`."""
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    return subprocess.Popen(command(*arguments), cwd=folder, env=environment(address), text=True, **options)


def finished(text: str) -> list[str]:
    """Keys of the trials that were announced."""
    return [line["key"] for line in map(json.loads, text.splitlines()) if line["event"] == "finished"]


def write(folder: Path, toml: str = TOML) -> Path:
    """A sweep and its task."""
    (folder / "mine.py").write_text(TASK)
    (folder / "sweep.toml").write_text(toml)
    return folder / "sweep.toml"


@pytest.mark.parametrize("num_seeds", [2, pytest.param(5, marks=pytest.mark.full)])
def test_real_trials_killed_and_started_again(tmp_path: Path, num_seeds: int) -> None:
    kill_and_go_on(tmp_path, str(tmp_path / "t.db"), num_seeds=num_seeds)


@pytest.mark.full
def test_real_trials_killed_and_started_again_on_postgresql(tmp_path: Path, new_postgres: Callable[[], str]) -> None:
    kill_and_go_on(tmp_path, new_postgres(), num_seeds=2)


def kill_and_go_on(folder: Path, address: str, *more: str, num_seeds: int) -> None:
    """`sweep run`, kill -9 after three results, the same command again: every trial once."""
    num_trials, arguments = 4 * num_seeds, ("sweep", "run", "sweep.toml", "--slots", "2", "--patience", "2", *more)
    write(folder, TOML.replace("[0, 1, 2, 3, 4]", str(list(range(num_seeds)))))
    first = start(folder, address, *arguments)
    said: list[str] = []
    assert first.stdout is not None
    while sum('"finished", "key"' in line for line in said) < 3:
        line = first.stdout.readline()
        assert line, first.communicate()
        said.append(line)
    first.send_signal(signal.SIGKILL)
    rest, errors = first.communicate()
    second = start(folder, address, *arguments)
    out, more_errors = second.communicate(timeout=600)
    assert second.returncode == 0, more_errors
    before, after = finished("".join(said) + rest), finished(out)
    with Store(address) as store:
        found = rows(store)
        assert [row["status"] for row in found] == ["done"] * num_trials
        reported, keys = before + after, {row["key"] for row in found}
        assert len(set(reported)) == len(reported) and set(reported) <= keys, "none was announced twice, nor without being there"
        assert len(keys - set(reported)) <= 2, (
            "but for those that the kill met between being written and being announced, one a slot"
        )
        assert all(row["trial"]["measured_peak_bytes"] > 0 for row in found)
    last = json.loads(out.splitlines()[-1])
    assert (last["event"], last["finished"], last["total"]) == ("progress", num_trials, num_trials)
    assert PASSWORD not in "".join([*said, rest, errors, out, more_errors])


@pytest.mark.full
def test_a_terminal_gets_a_picture(tmp_path: Path) -> None:
    """What is left of a sweep, run where stdout is a terminal."""
    write(tmp_path, TOML.replace("[0, 1, 2, 3, 4]", "[0]"))
    address = str(tmp_path / "t.db")
    master, terminal = pty.openpty()
    running = start(tmp_path, address, "sweep", "run", "sweep.toml", "--engine", "inline", stdout=terminal)
    os.close(terminal)
    shown = b""
    while chunk := read(master):
        shown += chunk
    running.communicate(timeout=600)
    text = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", shown.decode())
    assert "4 of 4 finished (4 done)" in text and "trials/min" in text
    assert "best of mine.py:small: error" in text and '"event"' not in text


def read(master: int) -> bytes:
    """What the terminal shows next; nothing at its end."""
    try:
        return os.read(master, 65536)
    except OSError:
        return b""


def test_help_imports_neither_torch_nor_the_database() -> None:
    code = """
import sys
from typer.testing import CliRunner
from paredown.cli import app
assert CliRunner().invoke(app, ["sweep", "run", "--help"]).exit_code == 0
print(sorted({"torch", "numpy", "sqlalchemy", "paredown.plan.plan"} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], env=environment(""), capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "[]", done.stderr


def invoke(*arguments: str) -> tuple[int, str, str]:
    """Exit status, stdout and stderr of a command in this process."""
    found = CliRunner().invoke(app, list(arguments))
    assert found.exception is None or isinstance(found.exception, SystemExit), found.exception
    return found.exit_code, found.stdout, found.stderr


@pytest.fixture
def finished_store(tmp_path: Path) -> str:
    address = str(tmp_path / "t.db")
    with Store(address) as store:
        store.add("s", draw("a", "b", seeds=range(3)))
        for claim in store.claim("w", 4):
            store.finish("w", EndedTrial(claim, done(claim.spec)))
        store.leave("w")
    return address


def test_status_is_text_also_in_a_pipe(finished_store: str) -> None:
    status, out, _ = invoke("sweep", "status", "--store", finished_store)
    assert status == 0 and out.splitlines() == [
        "s: 4 of 6 finished (4 done), 0 running, 2 waiting",
        "  best of a: error 0.0200 with baseline (mean of 3 seeds, standard error 0.0058)",
        "  best of b: error 0.0100 with baseline (one seed, no standard error)",
    ]


def test_status_is_a_line_of_json_if_asked_for(finished_store: str) -> None:
    status, out, _ = invoke("sweep", "status", "--store", finished_store, "--json")
    found = json.loads(out)
    assert status == 0 and (found["total"], found["finished"], found["waiting"]) == (6, 4, 2)
    assert [(best["task"], best["label"], best["seeds"]) for best in found["best"]] == [
        ("a", "baseline", [0, 1, 2]),
        ("b", "baseline", [0]),
    ]
    assert [best["standard_error"] for best in found["best"]] == [pytest.approx(0.01 / 3**0.5), None]


def test_status_of_an_empty_store_says_so(tmp_path: Path) -> None:
    Store(tmp_path / "t.db").close()
    assert invoke("sweep", "status", "--store", str(tmp_path / "t.db"))[1] == "no trials in the store\n"
    assert invoke("sweep", "status", "--store", str(tmp_path / "t.db"), "--json")[1] == ""


class Clock:
    """A clock that advances when somebody sleeps; `at` are functions to call when it reaches a time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, at: dict[float, Callable[[], object]]) -> None:
        self.now, self.at = 0.0, at
        monkeypatch.setattr(worker, "time", self)

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        for when in [when for when in self.at if when <= self.now]:
            self.at.pop(when)()


def test_a_worker_waits_for_a_store_and_its_trials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    address = str(tmp_path / "t.db")

    def add() -> None:
        with Store(address) as store:
            store.add("s", draw("digits#model=mlp,steps=1"))

    clock = Clock(monkeypatch, {12.0: lambda: (tmp_path / "t.db").touch(), 23.0: lambda: Store(address).close(), 41.0: add})
    status, out, said = invoke("worker", "--store", address, "--engine", "inline", "--wait", "1min")
    assert status == 0 and clock.now >= 41 and not clock.at
    assert [line["label"] for line in map(json.loads, out.splitlines()) if line["event"] == "finished"] == ["baseline"]
    assert said.splitlines() == [
        *(f"paredown: there is no store {address}; waiting for it, {left} left (--wait)." for left in ("1 min", "50 s", "40 s")),
        *(f"paredown: the store {address} has no trials; waiting for it, {left} left (--wait)." for left in ("37 s", "27 s")),
    ]


def test_a_worker_ends_with_an_error_when_it_has_waited_long_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    address = str(tmp_path / "t.db")
    for arguments, said in [(("--wait", "90"), "there is no store {} after 90 s. "), (("--wait", "0"), "there is no store {}. ")]:
        clock = Clock(monkeypatch, {})
        status, out, error = invoke("worker", "--store", address, *arguments)
        assert status == 1 and out == "" and clock.now == (90 if "90" in arguments else 0)
        assert said.format(address) in error.splitlines()[-1] and "wait longer" in error.splitlines()[-1]
        assert not (tmp_path / "t.db").exists()
    with Store(address) as store:
        store.add("other", draw("a"))
    Clock(monkeypatch, {})
    error = invoke("worker", "--store", address, "--sweep", "mine", "--wait", "5")[2]
    assert f"the store {address} has no trials of sweep 'mine' after 5 s." in error
    assert (
        "duration 'soon' cannot be read; write seconds or text such as '90s'"
        in invoke("worker", "--store", address, "--wait", "soon")[2]
    )


def test_a_worker_does_not_wait_for_a_file_that_is_no_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "t.db").write_bytes(b"no database" * 100)
    clock = Clock(monkeypatch, {})
    assert "the file is no SQLite database" in invoke("worker", "--store", str(tmp_path / "t.db"))[2] and clock.now == 0


def test_a_worker_waits_for_a_postgresql_database(new_postgres: Callable[[], str]) -> None:
    url = database.sql.make_url(new_postgres())
    missing = database.Database(url.set(database="not_yet").render_as_string(hide_password=False))
    closed = database.Database(url.set(port=1, host="127.0.0.1").render_as_string(hide_password=False))
    there = database.Database(url.render_as_string(hide_password=False))
    assert "the server has no such database" in str(missing.why_missing())
    assert "the server does not answer" in str(closed.why_missing())
    assert str(there.why_missing()).startswith("there is no store postgresql://")
    Store(url.render_as_string(hide_password=False)).close()
    assert there.why_missing() is None
    for opened in (missing, closed, there):
        opened.close()


def test_export_and_merge(finished_store: str, tmp_path: Path) -> None:
    assert invoke("sweep", "export", str(tmp_path / "t.csv"), "--store", finished_store)[0] == 0
    assert (tmp_path / "t.csv").read_text().count("\n") == 7
    other = str(tmp_path / "other.db")
    status, _, said = invoke("sweep", "merge", finished_store, "--store", other)
    assert status == 0 and "6 new trials" in said
    assert json.loads(invoke("sweep", "status", "--store", other, "--json")[1])["finished"] == 4


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("sweep", "status"), "which store?"),
        (("sweep", "status", "--store", "none.db"), "there is no store none.db"),
        (("worker", "--store", "none.db", "--wait", "0"), "there is no store none.db"),
        (("sweep", "run", "none.toml"), "there is no sweep file none.toml"),
        (("sweep", "merge", "none.db", "--store", "x.db"), "there is no store none.db"),
        (("sweep", "status", "--store", "mysql://u:hidden@h/d"), "this one starts with 'mysql://'"),
    ],
)
def test_what_is_wrong_is_one_sentence(
    arguments: tuple[str, ...], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PAREDOWN_STORE", raising=False)
    status, out, error = invoke(*arguments)
    assert status == 1 and out == "" and said in error and error.startswith("paredown: ") and error.count("\n") == 1
    assert "hidden" not in error and "Traceback" not in error


def test_failed_trials_run_again_when_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, TOML.replace("[0, 1, 2, 3, 4]", "[0]").replace('"digits#model=mlp,steps=5", ', ""))
    (tmp_path / "mine.py").write_text("raise RuntimeError('not yet')")
    assert invoke("sweep", "run", "sweep.toml", "--engine", "inline")[0] == 0
    with Store(tmp_path / "sweep.db") as store:
        assert count(store)[0].by_status == {"failed": 2}
        assert all("not yet" in row["reason"] for row in rows(store))
    (tmp_path / "mine.py").write_text(TASK + "print('chatter of a task')\n")
    status, out, said = invoke("sweep", "run", "sweep.toml", "--engine", "inline", "--again", "failed")
    assert status == 0 and "chatter" in said and all(json.loads(line) for line in out.splitlines())
    with Store(tmp_path / "sweep.db") as store:
        assert count(store)[0].by_status == {"done": 2}
    assert "status 'bad' is unknown" in invoke("sweep", "run", "sweep.toml", "--again", "bad")[2]


def test_a_worker_that_is_asked_to_end_gives_back_what_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, TOML.replace("[0, 1, 2, 3, 4]", "[0]").replace('"digits#model=mlp,steps=5", ', ""))
    (tmp_path / "mine.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGTERM)\n")
    status, out, said = invoke("sweep", "run", "sweep.toml", "--engine", "inline")
    assert status == 130 and "the same command runs the others" in said and '"finished", "key"' not in out
    with Store(tmp_path / "sweep.db") as store:
        assert count(store)[0].waiting == 2 and store.beats() == {}
        assert [claim.attempt for claim in store.claim("w", 2)] == [1, 1]


def test_a_password_on_the_command_line_is_warned_of_and_not_repeated(tmp_path: Path) -> None:
    shown = command("sweep", "status", "--store", f"mysql://ann:{PASSWORD}@h/d")
    found = subprocess.run(shown, env=environment(""), cwd=tmp_path, capture_output=True, text=True, check=False)
    assert found.returncode == 1 and "other users of this machine" in found.stderr
    assert PASSWORD not in found.stdout + found.stderr


@pytest.mark.full
def test_a_worker_runs_nothing_but_what_its_folder_has(tmp_path: Path) -> None:
    """The store names files elsewhere, by way up, by absolute path and through a link: none is imported."""
    inside, outside = tmp_path / "tasks", tmp_path / "outside"
    for folder in (inside, outside):
        folder.mkdir()
    mark = tmp_path / "imported"
    (outside / "evil.py").write_text(f"open({str(mark)!r}, 'w')\n{TASK}")
    (inside / "link.py").symlink_to(outside / "evil.py")
    (inside / "folder").symlink_to(outside)
    names = ["../outside/evil.py:small", f"{outside}/evil.py:small", "link.py:small", "folder/evil.py:small", "gone.py:small"]
    address = str(tmp_path / "t.db")
    with Store(address) as store:
        store.add("s", draw(*names, "text:/etc/passwd", "digits#model=mlp,steps=2"))
        for tasks in (("--tasks", str(inside)), ()):
            status, _, said = invoke("worker", "--store", address, "--engine", "inline", *tasks)
            assert status == 1 and "left to other workers" in said
            assert all(repr(name) in said for name in names)
        assert count(store)[0].by_status == {"done": 1} and count(store)[0].waiting == len(names) + 1
    folder = TaskFolder(inside)
    for name in names:
        with pytest.raises(Exception, match="tasks folder"):
            folder(TrialSpec(name, Plan(), 0))
    assert not mark.exists()


def test_task_files_that_raise_exit_or_hang_harm_nobody(tmp_path: Path) -> None:
    """Real files, imported by the processes of their trials."""
    files = {
        "raises": "raise RuntimeError('not today')",
        "quits": "import sys\nsys.exit(3)",
        "exits": "import os\nos._exit(5)",
        "hangs": "import time\ntime.sleep(600)",
        "good": TASK,
    }
    for name, code in files.items():
        (tmp_path / f"{name}.py").write_text(code)
    folder = TaskFolder(tmp_path)
    with Store(tmp_path / "t.db") as store:
        store.add("s", draw(*(f"{name}.py:small" for name in files if name != "hangs")))
        store.add("s", draw("hangs.py:small", timeout=0.5))
        assert work(store, LocalEngine(folder, slots=5), WorkerOptions(refuses=folder.refuses)) == 5
        found = {row["task"].partition(".")[0]: (row["status"], row["reason"]) for row in rows(store)}
    assert found["good"] == ("done", "")
    assert found["raises"][0] == found["quits"][0] == found["exits"][0] == "failed"
    assert "RuntimeError: not today" in found["raises"][1] and "SystemExit: 3" in found["quits"][1]
    assert found["exits"][1] == "its process ended with exit status 5 and without a result"
    assert found["hangs"] == ("killed", "no result after 0.5 s (timeout_seconds); its process was ended")


def test_engines_are_known_by_name() -> None:
    with pytest.raises(Exception, match=r"engine 'slurm' is unknown\. Allowed: local, graphs, inline, ray"):
        make_engine("slurm", done)
    with pytest.raises(Exception, match="one trial at a time, not 3"):
        make_engine("inline", done, slots=3)


def test_options_for_ray_are_read_from_a_file(finished_store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ray.json").write_text('{"gpus": 0.5, "placement": "SPREAD"}')
    words = ("worker", "--store", finished_store, "--ray", str(tmp_path / "ray.json"))
    status, _, said = invoke(*words)
    assert status == 1 and "options for Ray were given with engine 'local'" in " ".join(said.split())
    given: list[Any] = []
    monkeypatch.setattr(
        "paredown.study.sweeps.runner.RayEngine", lambda run, **options: given.append(options) or InlineEngine(done)
    )
    assert invoke(*words, "--engine", "ray", "--slots", "3")[0] == 0
    assert given == [{"slots": 3, "options": RayOptions(gpus=0.5, placement="SPREAD")}]
