"""The benchmark of picks at low budgets: seeds that were not run, regret on seeds that no choice saw, and trials that diverge."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paredown.pick.prior_data import PriorData
from paredown.pick.priors import made_up_prior
from paredown.pick.seed_effects import without_seed_effects
from paredown.tasks.trial import Status

LOST = 2  # the plan that diverges on the first task
NUM = 400  # plans: the share of noise is then estimated to 0.05


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).parent.parent / "benchmarks"))
    import bench_low_budgets  # type: ignore[import-not-found]

    yield bench_low_budgets
    for name in ("bench_low_budgets", "bench_pick"):
        sys.modules.pop(name, None)


def made() -> PriorData:
    """Plans without levels and three seeds, of which plan LOST ran one on the first task, and diverged; plan 0 is the baseline."""
    found = made_up_prior(6, 12, seeds=3)
    plans = tuple(replace(plan, level="", label="baseline" if i == 0 else plan.label) for i, plan in enumerate(found.plans))
    runs, diverged = found.runs.copy(), np.zeros(found.errors.shape)
    runs[0, LOST], diverged[0, LOST] = (0.9, np.nan, np.nan), 1
    return PriorData.of_runs("made", "store", found.tasks, plans, runs, memory=found.memory, diverged=diverged)


def test_a_plan_that_diverged_has_that_error_with_all_seeds(bench: Any) -> None:
    earlier = made()
    whole = bench.with_all_seeds(earlier)
    assert whole.runs[0, LOST].tolist() == [0.9] * 3
    others = np.arange(12) != LOST
    np.testing.assert_array_equal(whole.runs[:, others], earlier.runs[:, others])


def test_tasks_that_do_not_train_are_told_apart(bench: Any) -> None:
    """A loss above that of random guessing counts as it: the mean of the baseline's is then 0.93 of it on the second task."""
    found = made()
    tasks = tuple(replace(task, metric="loss", blind=1.0) for task in found.tasks)
    runs = found.runs.copy()
    runs[1, 0] = (0.8, 300.0, 1.0)
    low = PriorData.of_runs("made", "store", tasks, found.plans, runs, memory=found.memory, diverged=found.diverged)
    assert bench.known(low).runs[1, 0].tolist() == [0.8, 1.0, 1.0] and bench.known(low).errors[1, 0] == pytest.approx(2.8 / 3)
    assert [task.name for task in bench.that_train(low).tasks] == [task.name for i, task in enumerate(tasks) if i != 1]


def test_regret_is_of_the_hidden_seed(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all plans in turn, and of one way that always takes the least mean: 0."""
    earlier = bench.with_all_seeds(made())
    (case, *_) = bench.cases(earlier, "1000%")
    best = int(case.fits[case.truths["seeds"][case.fits].argmin()])
    monkeypatch.setattr(bench, "WAYS", {"pick, 6 trials": (lambda case, draw, num: (best, 0), 0)})
    rows = {row["way"]: row for row in bench.regret_rows(earlier, {earlier.tasks[0].name}, "1000%")}
    runs, unit = earlier.runs[0], earlier.tasks[0].blind
    assert rows["pick, 6 trials"]["regret"] == 0
    expected = np.mean([runs[:, seed].mean() - runs[best, seed] for seed in range(3)]) / unit
    assert rows[bench.RANDOM]["regret"] == pytest.approx(expected, abs=1e-5)
    above = np.mean([runs[best, seed] - runs[0, seed] for seed in range(3)]) / unit
    assert rows["pick, 6 trials"]["above_baseline"] == pytest.approx(above, abs=1e-5)


def test_a_trial_of_a_plan_that_diverged_says_so(bench: Any) -> None:
    (case, *_) = bench.cases(bench.with_all_seeds(made()), "1000%")
    picking = case.picking()
    looked, plans = case.looked(picking, 0), {row.column: row.plan for row in picking.candidates.rows}
    (lost,), (done,) = (looked.measure(plans[column], 0) for column in (LOST, LOST + 1))
    assert (lost.status, lost.error) == (Status.DIVERGED, None)
    assert done.status is Status.DONE and done.error in case.earlier.runs[0, LOST + 1]


@pytest.mark.parametrize(("spread", "noise", "kept"), [(0.0, 0.02, 0.0), (0.05, 1e-5, 1.0), (0.02, 0.02, 0.75)])
def test_means_are_shrunk_by_the_share_of_noise(bench: Any, spread: float, noise: float, kept: float) -> None:
    """Runs have the standard deviation r, true means s: the share s^2 / (s^2 + r^2 / 3) of a difference is kept."""
    found, rng = made_up_prior(3, 4), np.random.default_rng(0)
    truths, seeds = 0.5 + spread * rng.standard_normal(NUM), 0.1 * rng.standard_normal(3)
    runs = (truths[:, None] + seeds + noise * rng.standard_normal((NUM, 3)))[None]
    runs[0, LOST], diverged = 0.9, np.zeros((1, NUM))
    diverged[0, LOST] = 1
    plans = tuple(replace(found.plans[0], label=f"plan {i}", level="") for i in range(NUM))
    earlier = PriorData.of_runs("made", "store", found.tasks[:1], plans, runs, diverged=diverged)
    calm = np.arange(NUM)[None] != LOST
    case = bench.Case(earlier, 0, 10**15, earlier, {"seeds": without_seed_effects(runs, calm)[0].mean(axis=1)})
    fits = np.arange(NUM)
    means, plain = bench.shrunken_means(case, fits), case.truths["seeds"]
    assert means[LOST] == plain[LOST]
    trained = np.delete(fits, LOST)
    slope = np.polyfit(plain[trained], means[trained], 1)[0]
    assert slope == pytest.approx(kept, abs=0.15)
    assert means[trained].mean() == pytest.approx(plain[trained].mean())
