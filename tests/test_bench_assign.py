"""The benchmark of assignments runs: some steps of small models on the CPU, parts that are merged, budgets the same for all, times."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from paredown.trace import operations
from tests.support.scripts import ROOT, run_script

SCRIPT = ROOT / "benchmarks" / "bench_assign.py"
DATA = os.environ.get("PAREDOWN_DATA", "")
needs_data = pytest.mark.skipif(not DATA or not Path(DATA).exists(), reason="PAREDOWN_DATA names no folder")


def bench(*arguments: str, cwd: Path, apart: bool = False) -> str:
    """What the benchmark prints."""
    ran = run_script(SCRIPT, *arguments, cwd=cwd, apart=apart)
    assert ran.status == 0, ran.err
    return ran.out


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [row for run in json.loads(path.read_text()) for row in run["rows"]]


def test_merged_runs_are_held_against_full_seed_by_seed(tmp_path: Path) -> None:
    """Means 0.5 and 0.6 of seeds that both ended with, differences 0.2, 0.1, 0.0; seeds of full alone and lost ones are left out."""
    values = {"full": {0: 0.3, 1: 0.5, 2: 0.7, 3: 0.9, 4: 0.1}, "role": {0: 0.5, 1: 0.6, 2: 0.7, 3: None}}
    parts: list[str] = []
    for commit, seeds in (("aaa", (0, 1)), ("bbb", (2, 3, 4))):
        rows = [(way, seed, found[seed]) for way, found in values.items() for seed in seeds if seed in found]
        plain = {"task": "t", "metric": "accuracy", "num_steps": 1, "batch": 1}
        told = [{**plain, "way": w, "seed": s, "value": v, "status": "diverged" if v is None else "done"} for w, s, v in rows]
        parts.append(str(tmp_path / f"{commit}.json"))
        Path(parts[-1]).write_text(json.dumps([{"commit": commit, "rows": told}]))
    printed = bench("--merge", *parts, "--out", str(tmp_path / "all"), cwd=tmp_path, apart=True)
    run = json.loads((tmp_path / "all" / "assign.json").read_text())[0]
    found = next(row for row in run["rows"] if row["seed"] is None and row["way"] == "role")
    assert run["commit"] == "aaa, bbb" and "1 LOST" in printed
    assert (found["mean"], found["difference"]) == pytest.approx((0.6, 0.1))
    assert found["paired_error"] == pytest.approx(0.1 / 3**0.5)


@pytest.mark.full
@needs_data
def test_runs_parts_and_merges_them(tmp_path: Path) -> None:
    parts: list[str] = []
    for part in range(2):
        folder = tmp_path / str(part)
        ways = ["full", "int8/uint2 50%", "checkpointing", "guarded"]  # 1, 5, 2 and 2 of them
        bench("--quick", "--task", "gpt", "--seeds", "0", "--way", *ways, "--part", f"{part}/2", "--out", str(folder), cwd=tmp_path)
        parts.append(str(folder / "assign.json"))
    printed = bench("--merge", *parts, "--out", str(tmp_path / "all"), cwd=tmp_path)
    rows = rows_of(tmp_path / "all" / "assign.json")
    runs = [row for row in rows if row["seed"] is not None]
    assert [row["error"] for row in runs if row["error"]] == []
    assert len(runs) == 10
    assert len({row["way"] for row in rows if row["status"] == "summary"}) == 10
    assert "against full" in printed
    mixed = [row for row in runs if "int8/uint2" in row["way"]]
    assert len({row["budget_bytes"] for row in mixed}) == 1, "one budget for all methods"
    assert all(row["predicted_peak"] <= row["budget_bytes"] for row in runs if row["budget_bytes"] is not None)
    same = {row["way"]: row["value"] for row in runs}
    assert same["full"] == same["checkpointing"], "computing again is exact"


@needs_data
def test_gradients_are_those_of_full_but_for_rounding(tmp_path: Path) -> None:
    ways = ["full", "int8/uint2 25%"]
    bench("--quick", "--gradients", "--task", "gpt", "--seeds", "0", "--way", *ways, "--out", str(tmp_path), cwd=tmp_path)
    rows = [row for row in rows_of(tmp_path / "assign_gradients.json") if row["seed"] is not None]
    assert [row["error"] for row in rows if row["error"]] == []
    assert rows[0]["value"] == 0, "full beside itself"
    assert all(0 < row["value"] < 1 for row in rows[1:])
    pinned = [row for row in rows if row["way"].startswith("size+pins")]
    assert all(row["low_share"] >= 0.25 for row in pinned), "the budget is that of the largest, one by one, until a quarter is low"
    assert all(row["predicted_peak"] <= row["budget_bytes"] == pinned[0]["budget_bytes"] for row in rows[1:])


@pytest.mark.full
def test_times_are_taken_at_the_peak_of_checkpointing(tmp_path: Path) -> None:
    bench("--quick", "--timed", "--task", "gpt", "--out", str(tmp_path), cwd=tmp_path)
    rows = {row["way"]: row for row in rows_of(tmp_path / "assign_times.json")}
    assert [row["error"] for row in rows.values() if row["error"]] == []
    assert rows["checkpointing"]["num_again"] == rows["checkpointing"]["num_layers"] == 4
    assert rows["checkpointing"]["last_loss"] == rows["full"]["last_loss"], "computing again is exact"
    for way in ("assign", "assign, activations", "assign, 8 bits"):
        assert rows[way]["predicted_peak_bytes"] <= rows["checkpointing"]["predicted_peak_bytes"]
    assert rows["assign, activations"]["optimizer"].startswith("torch")


def test_pins_are_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    import assign_ways as ways  # type: ignore[import-not-found]

    def pinned() -> list[str]:
        return [
            name
            for name in operations.ROWS
            if any(operand.pin for operand in operations.row_of(f"{name}Backward0").operands.values())
        ]

    before = pinned()
    with ways.without_pins():
        assert pinned() == []
    assert pinned() == before and len(before) > 10
    assert len(ways.WAYS) == 41
