"""Scripts of examples/ and benchmarks/, run as programs: in this process, where torch is imported already, or in one of their own.

A process of its own costs about 2 s of imports. `make test-all` gives every script one; in `make test` one script of each folder has one,
and the others are run here as `python script.py` would run them: as `__main__`, with their folder first on the path, in a working
directory of the test's, and into streams that are no terminal.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import runpy
import subprocess
import sys
import warnings
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from tests.support.scale import SCALE

ROOT = Path(__file__).parent.parent.parent


@dataclass(frozen=True)
class Ran:
    """What a script printed, and its exit status."""

    status: int
    out: str
    err: str


def run_script(path: Path, *arguments: str, cwd: Path, apart: bool = False, **variables: str) -> Ran:
    """Run a script with `variables` in its environment; `apart`: in a process of its own, as all are in `make test-all`."""
    if apart or SCALE > 1:
        return _run_apart(path, arguments, cwd, {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", **variables})
    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True) for _ in range(2))
    with _as_program(path, arguments, cwd, variables), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = _status(path)
    return Ran(status, *(stream.buffer.getvalue().decode() for stream in (out, err)))  # type: ignore[attr-defined]


def _run_apart(path: Path, arguments: tuple[str, ...], cwd: Path, variables: Mapping[str, str]) -> Ran:
    command = [sys.executable, "-W", "error", str(path), *arguments]
    done = subprocess.run(command, cwd=cwd, env={**os.environ, **variables}, capture_output=True, encoding="utf-8", check=False)
    return Ran(done.returncode, done.stdout, done.stderr)


def _status(path: Path) -> int:
    """Run it; other exceptions than SystemExit are the test's."""
    try:
        runpy.run_path(str(path), run_name="__main__")
    except SystemExit as ended:
        if isinstance(ended.code, str):
            sys.stderr.write(ended.code)
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    return 0


@contextlib.contextmanager
def _as_program(path: Path, arguments: tuple[str, ...], cwd: Path, variables: Mapping[str, str]) -> Generator[None]:
    """Arguments, path, working directory and environment of a program; afterwards those of the tests, without the script's modules.

    What the script sets for all of the process is restored: the level of paredown's logger, the number of threads, filters of warnings.
    """
    before = sys.argv, list(sys.path), dict(os.environ), set(sys.modules)
    logger, num_threads = logging.getLogger("paredown"), torch.get_num_threads()
    level = logger.level
    sys.argv, sys.path[:0] = [str(path), *arguments], [str(path.parent)]
    os.environ.update(variables)
    try:
        with contextlib.chdir(cwd), warnings.catch_warnings():
            yield
    finally:
        logger.setLevel(level)
        torch.set_num_threads(num_threads)
        sys.argv, sys.path[:] = before[0], before[1]
        os.environ.clear()
        os.environ.update(before[2])
        for name in set(sys.modules) - before[3]:
            if (getattr(sys.modules[name], "__file__", None) or "").startswith(str(path.parent)):
                del sys.modules[name]
