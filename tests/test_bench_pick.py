"""The benchmark of picks: its ways and truths on a made-up prior, and what it takes for right."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paredown.pick.priors import made_up_prior


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).parent.parent / "benchmarks"))
    import bench_pick  # type: ignore[import-not-found]

    yield bench_pick
    sys.modules.pop("bench_pick", None)


def test_the_task_and_its_kin_are_left_out(bench: Any) -> None:
    """The last two rows are parts of the first one's data, as superclasses are of CIFAR-100, and are no cases of their own."""
    made = made_up_prior(6, 12)
    first = made.tasks[0].data
    kin = tuple(replace(task, data=f"{first}/{number}") for number, task in enumerate(made.tasks[4:]))
    earlier = replace(made, tasks=(*made.tasks[:4], *kin))
    found = list(bench.cases(earlier, "40%"))
    assert [case.row for case in found] == list(range(4))
    for case in found:
        out = {task.name for task in earlier.tasks} - {task.name for task in case.before.tasks}
        assert out == {earlier.tasks[case.row].name, *(task.name for task in kin if case.row == 0)}
        assert np.all(earlier.memory[case.row, case.fits] <= case.budget_bytes)
        assert case.budget_bytes == int(0.4 * int(earlier.tasks[case.row].full_bytes))


def test_runs_are_looked_up(bench: Any) -> None:
    named = made_up_prior(6, 12, seeds=2)
    earlier = replace(named, plans=tuple(replace(plan, level="") for plan in named.plans))
    case = next(bench.cases(earlier, "60%"))
    looked = case.looked(case.picking(), draw=0)
    assert {looked.error(3, seed) for seed in range(2)} == set(earlier.runs[0, 3].tolist()), "each run once"
    first = int(looked.error(3, 0) == earlier.runs[0, 3, 1])
    assert [looked.error(column, 0) for column in range(12)] == earlier.runs[0, :, first].tolist(), "one seed for all plans"


def test_of_one_run_there_is_its_seed_and_noise_on_top(bench: Any) -> None:
    """Runs whose seeds lift all plans by -0.1 and 0.1, and vary by 0.01 beside that; plan 3 has no second one."""
    source = np.random.default_rng(5)
    runs = 0.5 + np.array([-0.1, 0.1]) + 0.01 * source.standard_normal((40, 2))
    runs[3, 1] = np.nan
    row = bench.Row(runs, np.full(40, ""), np.arange(40), 0.1, np.ones(40, dtype=bool))
    drawn = [bench.Looked("task", row, {}, draw).error(3, 0) for draw in range(400)]
    low = np.array([error for error in drawn if error < 0.5])
    assert 150 < len(low) < 250, "seeds in another order in each draw"
    assert np.mean(low) == pytest.approx(runs[3, 0], abs=0.005) and np.std(low) == pytest.approx(0.01, rel=0.3)
    assert bench.seed_means(runs, row.calm)[3] == pytest.approx(runs[3, 0] + 0.1, abs=0.005)


def test_further_runs_of_a_plan_diverge_as_often_as_its_known_ones(bench: Any) -> None:
    """Of plan 1 one run of two diverged; the others of 400 further ones are near the one that did not. Of plan 0 none, of plan 2 all."""
    runs = np.array([[0.5, 0.5, np.nan], [0.6, 1.0, np.nan], [1.0, 1.0, np.nan]])
    calm = np.array([True, False, False])
    row = bench.Row(runs, np.full(3, ""), np.arange(3), 0.01, calm, 1.0)
    looked = bench.Looked("made", row, {}, draw=0)
    further = [np.array([looked.error(column, seed) for seed in range(3, 403)]) for column in range(3)]
    assert (further[0] < 0.6).all() and (further[2] == 1.0).all()
    lost = (further[1] == 1.0).mean()
    assert lost == pytest.approx(0.5, abs=0.1), "four standard errors"
    assert further[1][further[1] < 1.0].mean() == pytest.approx(0.6, abs=0.01)


def test_runs_of_a_level_are_dealt_out_anew(bench: Any) -> None:
    """Plans 0 and 1 are twins, and with 2 of one level, which has four runs; plan 3 has none."""
    runs = np.array([[0.1, 0.2], [0.1, 0.2], [0.3, 0.4], [0.7, 0.8]])
    row = bench.Row(runs, np.array(["a", "a", "a", ""]), np.array([0, 0, 2, 3]), 0.05, np.ones(4, dtype=bool))
    np.testing.assert_allclose(row.means, [0.25, 0.25, 0.25, 0.75])
    np.testing.assert_allclose(row.noises[:3], np.std([0.1, 0.2, 0.3, 0.4], ddof=1))
    seen = set()
    for draw in range(50):
        looked = bench.Looked("task", row, {}, draw)
        found = [[looked.error(plan, seed) for seed in range(2)] for plan in range(4)]
        assert found[0] == found[1] and sorted(found[0] + found[2]) == [0.1, 0.2, 0.3, 0.4] and sorted(found[3]) == [0.7, 0.8]
        seen.add(tuple(found[0]))
    assert len(seen) == 12, "every pair of two"


def test_twins_have_each_others_runs(bench: Any) -> None:
    """All twelve plans of a level, the second six the first over again, with one of their seeds alone."""
    earlier = made_up_prior(9, 12, seeds=2)
    runs = np.concatenate([earlier.runs[:, :6], earlier.runs[:, :6]], axis=1)
    runs[:, 6:, 1] = np.nan
    plans = tuple(replace(plan, level="all") for plan in earlier.plans)
    earlier = replace(earlier, plans=plans, runs=runs)
    assert bench.twins_of(earlier).tolist() == [*range(6), *range(6)]
    case = next(bench.cases(earlier, "100%"))
    np.testing.assert_array_equal(case.truths["seeds"][:6], case.truths["seeds"][6:])


def test_twins_are_those_of_every_seed_and_count_once(bench: Any) -> None:
    runs = np.full((4, 4, 2), 0.5)
    runs[3, 1, 1] = 0.4  # with another seed, on one task
    assert bench.find_twins(runs, np.zeros(4, dtype=int)).tolist() == [0, 1, 0, 0]
    runs[:2, 3] = np.nan  # two tasks are too few to tell
    assert bench.find_twins(runs, np.zeros(4, dtype=int)).tolist() == [0, 1, 0, 3]


def test_picks_are_scored_on_a_seed_that_they_did_not_see(bench: Any) -> None:
    """A pick that takes the best plan of what it sees: its luck is not in the score. A plan that ran once has no score."""
    earlier = made_up_prior(6, 8, seeds=3)
    earlier = replace(earlier, plans=tuple(replace(plan, level="") for plan in earlier.plans))
    runs = np.array(earlier.runs)
    runs[0, 7, 1:] = np.nan
    case = next(bench.cases(replace(earlier, runs=runs), "1000%"))
    hidden = list(bench.hidden_seeds(case))
    assert len(hidden) == 3
    for seed, one in enumerate(hidden):
        np.testing.assert_array_equal(one.truths["unseen"][:7], runs[0, :7, seed])
        assert np.isnan(one.earlier.runs[0, :7, seed]).all() and np.isfinite(np.delete(one.earlier.runs[0, :7], seed, axis=1)).all()
        assert 7 not in one.fits
    best = lambda case, draw, num: (int(case.fits[np.nanmean(case.earlier.runs[0], axis=1)[case.fits].argmin()]), 0)  # noqa: E731
    expected = []
    for seed in range(3):
        taken = np.delete(runs[0, :7], seed, axis=1).mean(axis=1).argmin()
        expected.append((runs[0, taken, seed] - runs[0, :7, seed].mean()) / case.noise)
    assert bench.unseen(case, best, 0) == pytest.approx(np.mean(expected), abs=1e-3)


def test_coverage_counts_means_and_runs(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nine tasks, a task left out in turn; bands of runs and of means are both about nine of ten on a prior of known construction."""
    monkeypatch.setattr(bench, "COVERAGE_DRAWS", 1)
    rows = list(bench.both_coverages(made_up_prior(9, 12)))
    assert [(row["levels"], row["trials"]) for row in rows] == [(word, n) for word in ("given", "found") for n in bench.COUNTS]
    assert (
        all(0.5 < row[part] <= 1 for row in rows for part in ("mean_bands", "run_bands"))
        and len(list(bench.say_coverage(rows))) == 2
    )


def test_coverage_counts_runs_with_other_seeds_than_those_of_trials(bench: Any) -> None:
    named = made_up_prior(6, 12, seeds=3)
    earlier = replace(named, plans=tuple(replace(plan, level="") for plan in named.plans))
    case = next(bench.cases(earlier, "60%"))
    for draw in range(4):
        runs, looked = bench.unseen_runs(case, draw), case.looked(case.picking(), draw)
        seen = {looked.error(column, 0) for column in range(12)}
        assert np.isfinite(runs).sum(axis=1).tolist() == [2] * 12 and not seen & set(runs[np.isfinite(runs)].tolist())
    assert (
        np.isfinite(bench.unseen_runs(case, None)).all()
        and np.isfinite(bench.unseen_runs(next(bench.cases(named, "60%")), 0)).all()
    )


def test_ways_without_trials(bench: Any) -> None:
    """`assign` of the largest budget that fits, the plan that is best on the other tasks, and every plan in turn."""
    made = made_up_prior(6, 12)
    templates = {3: "assign 20% role", 5: "assign 50% role", 6: "assign 99% role", 7: "assign 55% size"}
    plans = tuple(replace(plan, plan=None, template=templates[i]) if i in templates else plan for i, plan in enumerate(made.plans))
    memory = np.full_like(made.memory, 0.5) * np.array([task.full_bytes for task in made.tasks])[:, None]
    memory[:, 6] *= 1.9
    errors = np.array(made.runs)
    errors[1:, 8] = 0.001  # best everywhere but on the task that is new
    case = next(bench.cases(replace(made, plans=plans, memory=memory, runs=errors, errors=errors.mean(axis=2)), "60%"))
    assert bench.assigned(case, 0, 0) == (5, 0) and bench.best_on_average(case, 0, 0) == (8, 0)
    assert sorted(bench.one_at_random(case, draw, 1)[0] for draw in range(11)) == [*range(6), *range(7, 12)]


def test_spreads_are_without_noise_and_seeds(bench: Any) -> None:
    """Means 0.04 apart, seeds that lift all plans by 0.1, noise of 0.02."""
    source = np.random.default_rng(3)
    means = 0.4 + 0.04 * source.standard_normal((200, 1))
    runs = means + 0.1 * source.standard_normal((1, 3)) + 0.02 * source.standard_normal((200, 3))
    made = made_up_prior(2, 2)
    tasks = (replace(made.tasks[0], full_bytes=100.0), replace(made.tasks[1], full_bytes=100.0, data="other"))
    plans = [replace(made.plans[0], label=f"plan {i}", plan=None, template=f"assign {i + 1}% role", level="") for i in range(200)]
    both = np.stack([runs, runs + source.standard_normal((200, 3)) * 0.02])
    sizes = np.full((2, 200), 10.0)
    earlier = bench.PriorData.of_runs("made", "store", tasks, plans, both, memory=sizes, measured=sizes)
    first = next(bench.spreads(earlier, "50%"))
    assert first["plans_that_fit"] == 200
    assert first["spread"] == pytest.approx(means.std(ddof=1), rel=0.1) and first["noise_of_three"] == pytest.approx(
        0.0115, rel=0.15
    )


def test_rows_and_the_table(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "NUM_DRAWS", 2)
    rows = bench.rows_of(made_up_prior(9, 12), "60%")
    assert {row["way"] for row in rows} == set(bench.WAYS) and len(rows) == 9 * len(bench.WAYS)
    assert all(0 <= row[truth]["within"] <= 1 and row[truth]["above"] >= 0 for row in rows for truth in bench.TRUTHS)
    assert len(list(bench.table(rows))) == 1 + len(bench.WAYS)


def test_the_guide_has_the_newest_table(bench: Any) -> None:
    """And both budgets that picks must hold: nine of eleven, by plain means."""
    runs = json.loads((bench.RESULTS / "pick.json").read_text())
    text = (Path(__file__).parent.parent / "docs" / "pick.md").read_text()
    for prior, budget in (("stored", "40%"), ("simulated", "22%")):
        of_pick = (
            [row for row in run["rows"] if (row["prior"], row["budget"], row["way"]) == (prior, budget, "pick")] for run in runs
        )
        *_, rows = filter(None, of_pick)  # of the newest run that has them
        within = sum(row["matrix"]["within"] for row in rows)
        assert len(rows) == 11 and within >= 9
        assert f"| **{within:.1f}** |" in text
