"""The benchmark of step times runs and continues; its verdicts are those of the definition."""

from __future__ import annotations

import json
from argparse import Namespace
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


def test_each_network_has_a_process_that_adds_to_the_run_of_the_first(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Stand-ins for processes and the file; the second process dies."""
    ran: list[tuple[list[str], bool]] = []

    class Process:
        def __init__(self, target: Any, args: tuple[Namespace]) -> None:
            assert target is bench.run_one
            self.options = args[0]

        def start(self) -> None:
            ran.append((self.options.model, self.options.resume))
            self.exitcode = 9 if self.options.model == ["b"] else 0

        def join(self) -> None:
            assert self.options.seconds <= 60

    monkeypatch.setattr(bench.multiprocessing, "get_context", lambda kind: Namespace(Process=Process))
    monkeypatch.setattr(bench, "Log", lambda *args, continues: Namespace(rows=[{"job": "a", "way": "baseline", "size": 1}]))
    options = Namespace(model=["a", "b", "c"], resume=False, seconds=60.0)
    assert [row.job for row in bench.run_in_processes(options, options.model)] == ["a"]
    assert ran == [(["a"], False), (["b"], True), (["c"], True)] and not options.resume
    assert capsys.readouterr().out == "b: its process ended with status 9, and what it had not written is lost\n"


class Planned:
    """What `Network` needs of a planner to judge rows: the job's name."""

    job = type("Job", (), {"name": "net", "size": 1})


def runner(bench: ModuleType, way: str, peak: int, *turns: float) -> Any:
    made = bench.Runner(way, lambda: None, lambda: None, columns={"peak_bytes": peak})
    made.turns, made.speeds = [[seconds / 2, seconds / 2] for seconds in turns], [1.0]
    return made


def test_a_plan_is_held_against_the_quickest_way_without_formats_in_its_budget_round_by_round(bench: ModuleType) -> None:
    """The host is half as fast in the last two of five rounds; the plan is slower than checkpointing in four of them."""
    network = bench.Network(Planned, None, None)
    ways = {
        "baseline": (100, [10, 10, 10, 20, 20]),
        "checkpointing": (50, [14, 14, 14, 28, 28]),
        "checkpointing, every second": (70, [12, 12, 12, 24, 24]),
        "int8/64@bf16": (10, [1, 1, 1, 2, 2]),
        "speed at 60%": (75, [13, 13, 11, 26, 26]),
    }
    network.runners = {way: runner(bench, way, peak, *turns) for way, (peak, turns) in ways.items()}
    rows = {way: bench.Row("net", way, 1, peak_bytes=peak, median_seconds=turns[0]) for way, (peak, turns) in ways.items()}
    row = replace(rows["speed at 60%"], budget_bytes=75)
    found = network.judged(row, rows)
    assert (found.against, found.against_ratio, found.is_slower) == ("checkpointing, every second", 13 / 12, True)
    assert not found.is_over and network.judged(replace(row, peak_bytes=76), rows).is_over
    network.runners["speed at 60%"].turns[0] = [5.0, 5.0]
    assert not network.judged(row, rows).is_slower, "in three of five rounds"
    assert "1 of 1 plans slower" in bench.summary([found]) and "above their budgets: none" in bench.summary([found])


def test_the_speed_of_a_turn_is_the_mean_of_those_before_and_after_it(bench: ModuleType) -> None:
    import turns  # type: ignore[import-not-found]

    speeds, calls = iter([1.0, 3.0, 2.0, 2.0, 4.0]), list[str]()
    made = [bench.Runner(name, lambda name=name: calls.append(name), lambda: None) for name in "ab"]
    assert list(turns.take_turns(made, lambda: next(speeds), "cpu", num_rounds=2, num_steps=2)) == []
    assert [one.speeds for one in made] == [[2.0, 2.0], [2.5, 3.0]]
    assert "".join(calls) == "aaabbbaaabbb", "one step before two that are timed"
    assert [len(turn) for turn in made[0].turns] == [2, 2] and made[0].times["host_speed"] == 2.0

    def fails() -> None:
        raise ValueError("too large")

    made = [bench.Runner("a", fails, lambda: None), bench.Runner("b", lambda: None, lambda: None)]
    failed = list(turns.take_turns(made, lambda: 1.0, "cpu", num_rounds=2, num_steps=2))
    assert [(one.name, str(error)) for one, error in failed] == [("a", "too large")] and len(made[1].turns) == 2


def test_a_turn_is_compared_with_the_prediction_for_the_speed_of_the_host_in_it(bench: ModuleType) -> None:
    """The host is the limit: 2 s as at calibration, of which 0.5 s do not follow its speed. The second turn is mispredicted."""
    from paredown.plan.step_time import StepTime

    made = runner(bench, "int8", 1, 4.0, 10.0, 7.0)  # two steps of 2, 5 and 3.5 s
    made.speeds = [1.0, 2.0, 2.0]
    assert bench.median_ratio(made, StepTime(0.0, 2.0), StepTime(0.0, 3.5)) == 1.0
    made.speeds = [1.0, 1.0, 1.0]
    assert bench.median_ratio(made, StepTime(0.0, 2.0), StepTime(0.0, 3.5)) == 2.0 / 3.5


def quick_planner(name: str) -> Any:
    import assign_times  # type: ignore[import-not-found]
    import bench_session  # type: ignore[import-not-found]

    return assign_times.Planner(next(one for one in bench_session.quick_jobs() if one.name == name), "", "cpu")


def test_predictions_are_for_the_speed_that_the_host_has_beside_a_way(bench: ModuleType) -> None:
    from tests.support.calibrations import calibration

    network = bench.Network(quick_planner("graph"), calibration("cpu"), calibration("cpu"), plans={"int8": (None, None)})
    slow, start = (network.predicted("int8", speed) for speed in (3.0, 1.0))
    assert slow.predicted_host_seconds == pytest.approx(3 * start.predicted_host_seconds) and slow.host_speed == 3.0
    assert slow.predicted_device_seconds == start.predicted_device_seconds
    assert slow.predicted_seconds_at_start == start.predicted_seconds == start.predicted_seconds_at_start
    row = bench.with_ratios(replace(slow, median_seconds=2 * slow.predicted_seconds))
    assert row.ratio == 0.5 and row.ratio_at_start == pytest.approx(0.5 * start.predicted_seconds / slow.predicted_seconds)
    plain = bench.Row("net", "baseline", 1, median_seconds=4.0, ratio=0.5)
    row = bench.Row("net", "int8", 1, median_seconds=8.0, ratio=0.625, ratio_at_start=0.9)
    assert bench.beside_baseline(row, plain).relative_ratio == 1.25 and bench.beside_baseline(row, None) == row
    text = bench.summary([replace(row, relative_ratio=1.25)])
    assert "host as calibrated at the start: 1 of 1 within 15%; relative to the baseline: 0 of 1" in text


def test_checkpointing_by_hand_is_predicted_without_chunks_of_the_loss(bench: ModuleType) -> None:
    from tests.support.calibrations import calibration

    planner = quick_planner("scan")
    larger = type(planner)(replace(planner.job, size=2 * planner.job.size), "", "cpu")
    planner.__dict__["trace"] = replace(planner.trace, unmodified=larger.trace)  # a larger batch stands for all logits
    costs, plan = calibration("cpu"), planner.checkpointing
    row = bench.Network(planner, costs, costs, plans={"checkpointing": (plan, None)}).predicted("checkpointing", 1.0)
    expected = bench.predict_step(planner.trace.unmodified, plan, calibration=costs)
    assert row.predicted_seconds == expected.seconds != bench.predict_step(planner.trace, plan, calibration=costs).seconds
    assert row.predicted_peak_bytes == bench.pare.footprint(planner.trace.unmodified, plan).peak_bytes
