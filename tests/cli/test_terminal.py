"""A pipe gets plain text and nothing else; a terminal gets bars with the time left; errors of others are sentences."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path

import pytest

from tests.cli.commands import CONTROL, ask, environment, on_terminal, piped, program

MLP = "digits#model=mlp,steps=400"
ODD = """
from dataclasses import replace
from paredown.study.tasks.lookup import find_task

def loss(output, answers):
    raise ValueError("odd loss")

def task():
    return replace(find_task("digits#model=mlp,steps=4"), loss=loss)
"""


@pytest.mark.full
def test_a_pipe_gets_plain_text(folder: Path) -> None:
    done = piped(folder, "train", "digits#model=mlp,steps=4", "--plan", "lpmm", "--device", "cpu")
    assert done.returncode == 0 and "lpmm" in done.stdout
    assert all(line.endswith((" so far", " left")) for line in done.stderr.splitlines()), "progress of a slow machine, and no more"
    for text in (done.stdout, piped(folder, "estimate", "net.py:both").stdout):
        assert not CONTROL.search(text) and "\r" not in text


def test_a_terminal_gets_a_bar_and_the_time_left(folder: Path) -> None:
    status, shown = on_terminal(folder, "train", MLP, "--device", "cpu")
    assert status == 0
    text = CONTROL.sub("", shown)
    assert "training baseline" in text and "/400" in text and " left" in text and "loss " in text
    assert "baseline  done" in text.splitlines()[-1]


def test_a_terminal_that_asks_for_json_gets_json(folder: Path) -> None:
    status, shown = on_terminal(folder, "formats", "int8", "--json")
    assert status == 0 and json.loads(shown)["formats"][0]["format"] == "int8"


def test_errors_of_the_users_code_are_sentences_and_the_rest_can_be_seen(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "odd.py").write_text(ODD)
    status, _, err = ask("train", "odd.py:task", "--device", "cpu")
    assert status == 1 and "odd loss" in err and "Set PAREDOWN_TRACEBACK=1 for the traceback" in err
    monkeypatch.setenv("PAREDOWN_TRACEBACK", "1")
    with pytest.raises(AssertionError, match="odd loss"):
        ask("train", "odd.py:task", "--device", "cpu")


def heed_interrupts() -> None:
    """As a terminal's programs do, also where the tests run in the background of a script, which has them ignored."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_an_interrupt_is_exit_130(folder: Path) -> None:
    (folder / "slow.py").write_text("import time\nprint('begun', flush=True)\ntime.sleep(600)\n")
    running = subprocess.Popen(
        program("estimate", "slow.py:model"),
        cwd=folder,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=heed_interrupts,
    )
    try:
        assert running.stdout is not None and running.stdout.readline() == "begun\n"
        running.send_signal(signal.SIGINT)
        _, err = running.communicate(timeout=600)
    finally:
        running.kill()
    assert running.returncode == 130 and "Traceback" not in err


def test_a_reader_that_leaves_is_no_traceback(folder: Path) -> None:
    shell = f"{' '.join(map(repr, program('formats')))} | head -1"
    done = subprocess.run(["sh", "-c", shell], cwd=folder, env=environment(), capture_output=True, text=True, check=False)
    assert done.stdout.startswith("name") and "Traceback" not in done.stderr


def test_a_command_line_without_its_packages_says_so(folder: Path) -> None:
    code = "import sys; sys.modules['typer'] = None; from paredown.cli import main; main()"
    done = subprocess.run([program()[0], "-c", code], cwd=folder, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 1 and done.stderr == "paredown: the command line needs typer: pip install 'paredown[cli]'.\n"
