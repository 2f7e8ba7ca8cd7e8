"""The benchmark of picks: its ways and truths on a made-up prior, and what it takes for right."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paredown.search.earlier_made import made_up


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).parent.parent / "benchmarks"))
    import bench_pick  # type: ignore[import-not-found]

    yield bench_pick
    sys.modules.pop("bench_pick", None)


def test_the_task_and_its_kin_are_left_out(bench: Any) -> None:
    earlier = made_up(6, 12)
    found = list(bench.cases(earlier, "40%"))
    assert [case.row for case in found] == list(range(6))
    for case in found:
        assert earlier.tasks[case.row].name not in [task.name for task in case.before.tasks]
        assert np.all(earlier.memory[case.row, case.fits] <= case.budget_bytes)
        assert case.budget_bytes == int(0.4 * int(earlier.tasks[case.row].full_bytes))


def test_runs_are_looked_up(bench: Any) -> None:
    earlier = made_up(6, 12, seeds=2)
    case = next(bench.cases(earlier, "60%"))
    looked = case.looked(case.picking(), draw=0)
    assert {looked.error(3, seed) for seed in range(2)} == set(earlier.runs[0, 3].tolist()), "each run once"
    looked.runs = np.where(np.arange(2) == 0, looked.runs, np.nan)
    drawn = [looked.error(3, seed) - earlier.runs[0, 3, 0] for seed in range(400)]
    assert np.std(drawn) == pytest.approx(case.noise, rel=0.2), "one run: noise on top"


def test_rows_and_the_table(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "NUM_DRAWS", 2)
    rows = bench.rows_of(made_up(9, 12), "60%")
    assert {row["way"] for row in rows} == set(bench.WAYS) and len(rows) == 9 * len(bench.WAYS)
    assert all(0 <= row[truth]["within"] <= 1 and row[truth]["above"] >= 0 for row in rows for truth in ("matrix", "smoothed"))
    assert len(list(bench.table(rows))) == 1 + len(bench.WAYS)
