"""A script that runs in this process prints and ends as it does in one of its own, and leaves nothing behind."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.support.scripts import run_script

SCRIPT = """
import os, sys
import besides
print(__name__, sys.argv[1:], besides.NUMBER, os.environ["SAID"], os.path.basename(os.getcwd()), sys.stdout.isatty())
print("a complaint", file=sys.stderr)
if len(sys.argv) > 2:
    sys.exit(sys.argv[2] if sys.argv[2].isalpha() else int(sys.argv[2]))
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "scripts").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "scripts" / "besides.py").write_text("NUMBER = 7\n")
    (tmp_path / "scripts" / "script.py").write_text(SCRIPT)
    return tmp_path / "scripts" / "script.py"


@pytest.mark.parametrize("arguments", [("x",), ("x", "3"), ("x", "0"), ("x", "words")])
def test_here_as_apart(script: Path, arguments: tuple[str, ...]) -> None:
    folder = script.parent.parent / "elsewhere"
    before = list(sys.argv), list(sys.path), dict(os.environ), Path.cwd()
    here = run_script(script, *arguments, cwd=folder, SAID="yes")
    assert (sys.argv, sys.path, dict(os.environ), Path.cwd()) == before and "besides" not in sys.modules
    apart = run_script(script, *arguments, cwd=folder, SAID="yes", apart=True)
    assert (here.status, here.out, here.err.strip()) == (apart.status, apart.out, apart.err.strip())
    assert here.out == f"__main__ {list(arguments)} 7 yes elsewhere False\n"


def test_what_a_script_raises_is_the_tests(script: Path) -> None:
    script.write_text("raise RuntimeError('not today')")
    with pytest.raises(RuntimeError, match="not today"):
        run_script(script, cwd=script.parent)
