"""The command line, asked in this process, as a program of its own, and on a terminal."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from paredown.cli import app

ROOT = Path(__file__).parent.parent.parent
CONTROL = re.compile(r"\x1b\[[\d;?]*[A-Za-z]")
NET = """
import torch
from torch import nn

def model():
    layers = nn.Conv2d(3, 16, 3, padding=1), nn.GELU(), nn.Conv2d(16, 16, 3, padding=1), nn.GELU()
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(1024, 10))

def both():
    return model(), (torch.zeros(8, 3, 8, 8), torch.zeros(8, dtype=torch.int64)), nn.functional.cross_entropy

def forgot():
    return both()[:2]

def double():
    net, (x, y), loss = both()
    return net.double(), (x.double(), y), loss

class Held(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(256, 256), nn.Linear(256, 256)
    def forward(self, x):
        hidden = self.first(x)
        return torch.tanh(self.second(hidden)), hidden

def held():
    return Held(), (torch.zeros(64, 256), torch.zeros(64, 256)), lambda outputs, y: (outputs[0] - y).square().mean()

def number():
    return 3

def broken():
    raise RuntimeError("not today")

def leaves():
    raise SystemExit(0)
"""
TASK = """
import torch
from paredown import Task
from paredown.study.tasks.lookup import find_task
from dataclasses import replace

def small(steps=4):
    return find_task(f"digits#model=mlp,steps={steps}")

class Hungry(torch.nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner
    def forward(self, x):
        if not isinstance(x, torch._subclasses.FakeTensor):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")
        return self.inner(x)

def hungry():
    task = find_task("digits#steps=4,batch=64")
    return replace(task, name="hungry", make_model=lambda seed: Hungry(task.make_model(seed)))
"""


def ask(*arguments: str) -> tuple[int, str, str]:
    """Exit status, stdout and stderr of a command in this process; anything but a sentence is an error of the test."""
    found = CliRunner().invoke(app, list(arguments), prog_name="paredown")
    assert found.exception is None or isinstance(found.exception, SystemExit), (arguments, found.exception)
    assert "Traceback" not in found.output
    return found.exit_code, found.stdout, found.stderr


def asked_json(*arguments: str, status: int = 0) -> Any:
    """The one JSON object that a command prints."""
    code, out, err = ask(*arguments, "--json")
    assert code == status, (out, err)
    assert out.count("\n") == 1
    return json.loads(out)


def program(*arguments: str) -> list[str]:
    """The command line as the entry point runs it."""
    return [sys.executable, "-c", "from paredown.cli import main; main()", *arguments]


def environment() -> dict[str, str]:
    """What a program is started with: two columns of text side by side, one thread."""
    paths = os.pathsep.join((str(ROOT / "src"), os.environ.get("PYTHONPATH", "")))
    return {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "COLUMNS": "120", "TERM": "xterm"}


def piped(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A program whose output goes into pipes."""
    return subprocess.run(
        program(*arguments), cwd=folder, env=environment(), capture_output=True, text=True, check=False, timeout=600
    )


def on_terminal(folder: Path, *arguments: str) -> tuple[int, str]:
    """Exit status and what a terminal was sent."""
    master, terminal = pty.openpty()
    running = subprocess.Popen(program(*arguments), cwd=folder, env=environment(), stdout=terminal, stderr=terminal, stdin=terminal)
    os.close(terminal)
    shown = b""
    while chunk := _read(master):
        shown += chunk
    os.close(master)
    return running.wait(timeout=600), shown.decode()


def _read(master: int) -> bytes:
    try:
        return os.read(master, 65536)
    except OSError:  # the other side is closed
        return b""
