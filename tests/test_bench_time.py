"""The benchmark of step times runs and continues; its verdicts are those of the definition."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.support.scripts import ROOT, run_script

SCRIPT = ROOT / "benchmarks" / "bench_time.py"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    import bench_time  # type: ignore[import-not-found]

    return bench_time


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [row for run in json.loads(path.read_text()) for row in run["rows"]]


@pytest.mark.full
def test_all_ways_are_measured_once_and_a_second_run_finds_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    traces = tmp_path / "traces"
    monkeypatch.setenv("PAREDOWN_CACHE", str(tmp_path / "cache"))  # not the folder that other tests expect to be empty
    arguments = ("--quick", "--model", "graph", "--traces", str(traces), "--resume", "--commit", "x", "--out", str(tmp_path))
    assert run_script(SCRIPT, *arguments, "--prepare", cwd=tmp_path).status == 0 and (traces / "graph.json").exists()
    for _ in range(2):
        ran = run_script(SCRIPT, *arguments, cwd=tmp_path)
        assert ran.status == 0, ran.err
        rows = rows_of(tmp_path / "time.json")
        assert len(rows) == 7 == len({row["way"] for row in rows})
        assert [row["way"] for row in rows_of(tmp_path / "session.json")] == ["baseline", "int8/64@bf16", "int4/64@bf16"]
    assert all(row["ratio"] > 0 for row in rows if not row["error"])
    late = run_script(SCRIPT, *arguments[:-1], str(tmp_path / "late"), "--seconds", "0", cwd=tmp_path)
    assert "no time left" in late.out and not (tmp_path / "late" / "time.json").exists()


def test_a_plan_is_held_against_the_quickest_way_without_formats_in_its_budget(bench: ModuleType) -> None:
    plain = [
        bench.Row("net", way, 1, peak_bytes=peak, median_seconds=ms, p20_seconds=ms, p80_seconds=ms + 1)
        for way, peak, ms in (("baseline", 100, 10.0), ("checkpointing", 50, 14.0), ("checkpointing, every second", 70, 12.0))
    ]
    network = bench.Network(None, None, None, 1, [*plain, bench.Row("net", "int8/64@bf16", 1, peak_bytes=10, median_seconds=1.0)])
    row = bench.Row("net", "speed at 60%", 1, budget_bytes=75, peak_bytes=75, median_seconds=13.0, p20_seconds=12.5)
    row = replace(row, predicted_seconds=6.5, predicted_seconds_by_rates=26.0, predicted_seconds_at_start=13.0)
    found = network.judged(row)
    assert (found.against, found.against_ratio) == ("checkpointing, every second", 13 / 12)
    assert not found.is_slower and not found.is_over
    assert (found.ratio, found.ratio_by_rates, found.ratio_at_start) == (0.5, 2.0, 1.0)
    slower = network.judged(replace(row, p20_seconds=13.1, peak_bytes=76))
    assert slower.is_slower and slower.is_over
    assert "1 of 1 plans slower" in bench.summary([slower]) and "above their budgets: net speed at 60%" in bench.summary([slower])


def test_predictions_are_for_the_speed_that_the_host_has_before_a_way(bench: ModuleType) -> None:
    import assign_times  # type: ignore[import-not-found]
    import bench_session  # type: ignore[import-not-found]

    from tests.support.calibrations import calibration

    planner = assign_times.Planner(next(one for one in bench_session.quick_jobs() if one.name == "graph"), "", "cpu")
    costs = calibration("cpu")
    slow, start = (bench.Network(planner, costs, costs, 1, host_speed=speed).blank("int8", None) for speed in (3.0, 1.0))
    assert slow.predicted_host_seconds == pytest.approx(3 * start.predicted_host_seconds) and slow.host_speed == 3.0
    assert slow.predicted_device_seconds == start.predicted_device_seconds
    assert slow.predicted_seconds_at_start == start.predicted_seconds == start.predicted_seconds_at_start
    plain = bench.Row("net", "baseline", 1, median_seconds=4.0, ratio=0.5)
    row = bench.Row("net", "int8", 1, median_seconds=8.0, ratio=0.625, ratio_at_start=0.9)
    assert bench.beside_baseline(row, plain).relative_ratio == 1.25 and bench.beside_baseline(row, None) == row
    text = bench.summary([replace(row, relative_ratio=1.25)])
    assert "host as calibrated at the start: 1 of 1 within 15%; relative to the baseline: 0 of 1" in text


def test_checkpointing_by_hand_is_predicted_without_chunks_of_the_loss(bench: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    import assign_times  # type: ignore[import-not-found]
    import bench_session  # type: ignore[import-not-found]

    from tests.support.calibrations import calibration

    job = next(one for one in bench_session.quick_jobs() if one.name == "scan")
    planner, larger = (assign_times.Planner(replace(job, size=size), "", "cpu") for size in (1, 4))
    planner.__dict__["trace"] = replace(planner.trace, unmodified=larger.trace)  # a larger batch stands for all logits
    monkeypatch.setattr(bench, "measured", lambda *arguments, **options: {})
    costs = calibration("cpu")
    network = bench.Network(planner, costs, costs, 1)
    plan = planner.checkpointing
    row, expected = network.checkpointed_row("checkpointing"), bench.predict_step(planner.trace.unmodified, plan, calibration=costs)
    assert row.predicted_seconds == expected.seconds != bench.predict_step(planner.trace, plan, calibration=costs).seconds
    assert row.predicted_peak_bytes == bench.pare.footprint(planner.trace.unmodified, plan).peak_bytes
