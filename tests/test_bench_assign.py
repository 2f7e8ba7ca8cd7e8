"""The benchmark of assignments runs: some steps of small models on the CPU, parts that are merged, budgets that are the same for all."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "benchmarks" / "bench_assign.py"
DATA = os.environ.get("PAREDOWN_DATA", "")
needs_data = pytest.mark.skipif(not DATA or not Path(DATA).exists(), reason="PAREDOWN_DATA names no folder")
COUNT = """
import assign_ways as ways
from paredown.plan import ops
pinned = [name for name, row in ops.ROWS.items() if any(o.pin for o in row.operands.values())]
with ways.without_pins():
    inside = [name for name in pinned if any(o.pin for o in ops.row_of(name + 'Backward0').operands.values())]
after = [name for name in pinned if any(o.pin for o in ops.row_of(name + 'Backward0').operands.values())]
print(len(pinned) > 10, inside, after == pinned, len(ways.WAYS))
"""


def python(*arguments: str) -> str:
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT / "benchmarks")])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [row for run in json.loads(path.read_text()) for row in run["rows"]]


@needs_data
def test_runs_parts_and_merges_them(tmp_path: Path) -> None:
    parts: list[str] = []
    for part in range(2):
        folder = tmp_path / str(part)
        ways = ["full", "int8/int2 50%", "checkpointing", "guarded"]
        python(str(SCRIPT), "--quick", "--task", "gpt", "--seeds", "0", "--way", *ways, "--part", f"{part}/2", "--out", str(folder))
        parts.append(str(folder / "assign.json"))
    printed = python(str(SCRIPT), "--merge", *parts, "--out", str(tmp_path / "all"))
    rows = rows_of(tmp_path / "all" / "assign.json")
    runs = [row for row in rows if row["seed"] is not None]
    assert [row["error"] for row in runs if row["error"]] == []
    assert len(runs) == 11
    assert len({row["way"] for row in rows if row["status"] == "summary"}) == 11
    assert "against full" in printed
    mixed = [row for row in runs if "int8/int2" in row["way"]]
    assert len({row["budget_bytes"] for row in mixed}) == 1, "one budget for all methods"
    assert all(row["predicted_peak"] <= row["budget_bytes"] for row in runs if row["budget_bytes"] is not None)
    same = {row["way"]: row["value"] for row in runs}
    assert same["full"] == same["checkpointing"] == same["checkpointing as int4"], "computing again is exact"


def test_pins_are_put_back() -> None:
    assert python("-c", COUNT).split() == ["True", "[]", "True", "37"]
