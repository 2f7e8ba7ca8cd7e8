"""Kernels of the codec, the optimizers and the loss compile for a GPU: the interpreter accepts what the compiler refuses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


def test_kernels_compile_for_capability_9(tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    variables = {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}", "TRITON_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | variables
    command = [sys.executable, "-m", "tests.support.compile_kernels"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, encoding="utf-8", check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    *jobs, broken = [json.loads(line) for line in done.stdout.splitlines()]
    assert "Cannot bitcast" in broken[2], "an error of the compiler is seen"
    assert not {name: error for name, _, error in jobs if error}
    assert all(compiled for _, compiled, _ in jobs)
