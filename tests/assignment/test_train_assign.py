"""The benchmark of assignments runs: a few steps of small networks on pictures that are noise, and files that are joined."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.support.scripts import ROOT, run_script


def bench(*options: str, cwd: Path) -> str:
    """What the benchmark prints."""
    ran = run_script(ROOT / "benchmarks" / "train_assign.py", *options, cwd=cwd)
    assert ran.status == 0, ran.err
    return ran.out


@pytest.fixture
def data(tmp_path: Path) -> Path:
    source = np.random.default_rng(0)
    arrays = {f"x_{part}": source.integers(0, 256, (num, 32, 32, 3), dtype=np.uint8) for part, num in (("train", 32), ("test", 16))}
    labels = {f"y_{part}": source.integers(0, 10, num) for part, num in (("train", 32), ("test", 16))}
    np.savez(tmp_path / "cifar10.npz", **arrays, **labels)
    return tmp_path


def test_processes_share_the_work_and_their_files_are_joined(data: Path, tmp_path: Path) -> None:
    paths: list[Path] = []
    for way in ("fp32", "r0.5"):
        out = tmp_path / way
        options = ("--task", "squeezenet", "--way", way, "--seeds", "0", "--out", str(out))
        bench("--quick", "--data", str(data), *options, cwd=tmp_path)
        paths.append(out / "train_assign.json")
    bench("--merge", *map(str, paths), "--out", str(tmp_path), cwd=tmp_path)
    (joined,) = json.loads((tmp_path / "train_assign.json").read_text())
    runs = [row for row in joined["rows"] if row["seed"] is not None]
    assert [row["way"] for row in runs] == ["fp32", "r0.5"] and all(row["status"] in ("done", "diverged") for row in runs)
