"""Progress in a pipe: a line every ten seconds, by a clock of the test, with the time left."""

from __future__ import annotations

import pytest

pytest.importorskip("typer")

from paredown.cli import output
from paredown.cli.output import PIPE_SECONDS, ProgressLines
from tests.cli.commands import ask


class Clock:
    """A clock that the test sets."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_line_every_ten_seconds_and_no_more() -> None:
    clock, lines = Clock(), list[str]()
    progress = ProgressLines("picking", clock=clock, write=lines.append)
    for second in range(0, 100, 4):  # reports every 4 s: lines at 12, 24, ...
        clock.now = float(second)
        progress.report(second / 10, 10, "trying lpmm")
    assert len(lines) == 8 and PIPE_SECONDS == 10
    assert lines[0] == "picking: 1.2 of 10, trying lpmm; 12 s so far, about 1 min 28 s left"
    assert lines[-1] == "picking: 9.6 of 10, trying lpmm; 1 min 36 s so far, about 4 s left"


def test_silence_is_broken_by_ticks_and_the_time_left_shrinks() -> None:
    clock, lines = Clock(), list[str]()
    progress = ProgressLines("making a plan", clock=clock, write=lines.append)
    clock.now = 9.9
    progress.tick()
    assert not lines
    clock.now = 10.0
    progress.tick()
    clock.now = 20.0
    progress.report(0, 4, "first")  # at once: no time left is known yet
    clock.now = 40.0
    progress.report(1, 4, "second")
    clock.now = 50.0
    progress.tick()
    clock.now = 500.0
    progress.tick()
    assert lines == [
        "making a plan: 10 s so far",
        "making a plan: 0 of 4, first; 20 s so far",
        "making a plan: 1 of 4, second; 40 s so far, about 1 min left",
        "making a plan: 1 of 4, second; 50 s so far, about 50 s left",
        "making a plan: 1 of 4, second; 8 min 20 s so far",
    ]


def test_commands_in_a_pipe_write_them_to_stderr(folder: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "PIPE_SECONDS", 0.0)
    status, out, err = ask("train", "tasks.py:small", "--device", "cpu")
    assert status == 0 and "so far" not in out
    lines = [line for line in err.splitlines() if line.startswith("paredown: training baseline: 4 of 4, loss ")]
    assert lines and lines[-1].endswith(" so far")


def test_a_live_screen_without_a_terminal_writes_lines_for_one_bar(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(output, "PIPE_SECONDS", 0.0)
    with output.live_screen("demo", counted="progress") as screen:
        screen.tell(["a text for terminals"])
        screen.bar("memory", 20, 10, "does not fit")
        screen.bar("progress", 3, 9, "seed 0")
    out, err = capsys.readouterr()
    assert not out and "paredown: demo: 3 of 9, seed 0; " in err and "fit" not in err and "text" not in err
