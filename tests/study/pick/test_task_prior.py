"""Earlier tasks as a prior: units, kinds of tasks, plans that are in no column, bands that hold, and bad input."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from paredown import Plan
from paredown.errors import PriorError
from paredown.formats.catalog import TIERS
from paredown.study.pick.candidates import features_of
from paredown.study.pick.posterior import Estimate
from paredown.study.pick.prior_data import PlanRow, PriorData, TaskRow
from paredown.study.pick.priors import made_up_prior
from paredown.study.pick.seed_effects import SeedRun
from paredown.study.pick.task_prior import TaskPrior, data_set_weights, noise_ratios, random_guess_error, scaled

MATRICES = ("errors", "counts", "memory", "measured", "diverged", "propensity", "step_ratio", "runs")
NINE_OF_TEN = 1.645


def columns_of(earlier: PriorData, keep: Sequence[int]) -> PriorData:
    """These plans alone; one that is there twice is called otherwise, and has no level."""
    arrays = {name: getattr(earlier, name)[:, list(keep)] for name in MATRICES}
    plans = [
        replace(earlier.plans[i], label=f"again {n}", level="") if i in keep[:n] else earlier.plans[i] for n, i in enumerate(keep)
    ]
    return replace(earlier, plans=tuple(plans), **arrays)


def points_of(earlier: PriorData) -> np.ndarray:
    return np.array([features_of(Plan.from_json(row.plan)) for row in earlier.plans])


def small(runs: np.ndarray, **rows: object) -> PriorData:
    """A prior of (tasks, plans) or (tasks, plans, seeds)."""
    runs = np.asarray(runs, dtype=float)
    runs = runs[..., None] if runs.ndim == 2 else runs
    plans = [PlanRow(f"plan {i}", Plan.uniform(activation=f"int{8 - i}/64@bf16").to_json()) for i in range(runs.shape[1])]
    tasks = [TaskRow(f"task {i}", "cnn", "x", **{"answers": 10, **rows}) for i in range(len(runs))]  # type: ignore[arg-type]
    found = PriorData.of_runs("small", "store", tasks, plans, np.where(np.isinf(runs), 0.5, runs))
    return replace(found, runs=runs, errors=runs.mean(axis=2))


# --- units --------------------------------------------------------------------------------------------------------------


def test_errors_are_in_parts_of_a_blind_guess() -> None:
    tasks = [TaskRow("a", "cnn", "x", "error", 10), TaskRow("b", "gpt", "y", "loss", 256), TaskRow("c", "cnn", "z", "mine", None)]
    runs = np.array([[0.45, 0.9], [np.log(256) / 2, 7.0], [3.0, 12.0]])[..., None]
    found = scaled(PriorData.of_runs("units", "store", tasks, [PlanRow("p"), PlanRow("q")], runs))
    assert found[..., 0] == pytest.approx(np.array([[0.5, 1.0], [0.5, 1.0], [0.25, 1.0]])), "worse than a guess is a guess"


def test_a_task_may_say_itself_what_a_guess_has() -> None:
    assert scaled(small([[0.2, 0.1]], blind=0.4))[0, :, 0].tolist() == [0.5, 0.25]
    assert random_guess_error("error", None) is None and random_guess_error("error", 1) is None


# --- kinds of tasks -----------------------------------------------------------------------------------------------------------


def of_two_kinds(num: int = 8, seed: int = 0) -> PriorData:
    """Two plans; the second is better on the even tasks and worse on the odd ones."""
    rng = np.random.default_rng(seed)
    slope = np.array([-0.15, 0.15] * num)
    height = 0.4 + 0.05 * rng.standard_normal((2 * num, 1))
    return small(height + np.column_stack([0 * slope, slope]) + 0.005 * rng.standard_normal((2 * num, 2)))


def test_kinds_of_tasks_are_found_and_named_by_their_tasks() -> None:
    """Half of the tasks have more error under the second plan, half have less; a measurement tells which of them the new task is like."""
    task_prior = TaskPrior.of(of_two_kinds())
    before = task_prior.used(Estimate.of(task_prior.prior, np.ones(2)).posterior)
    assert sum(weight for _, weight in before) == pytest.approx(1) and max(weight for _, weight in before) < 0.1
    for slope, best in ((-0.15, 1), (0.15, 0)):
        after = Estimate.of(task_prior.prior, np.ones(2), {0: 0.4 / 0.9, 1: (0.4 + slope) / 0.9})
        assert after.best(1).plan == best


def test_a_task_like_none_before_speaks_for_itself() -> None:
    """Earlier tasks say that plans are within 0.15 of each other; here one is far better, in three runs."""
    task_prior = TaskPrior.of(of_two_kinds())
    after = Estimate.of(task_prior.prior, np.ones(2), {0: [0.05, 0.06, 0.04], 1: [0.9, 0.88]})
    assert after.posterior.weights[0][-1] > 0.9 and after.best(1).plan == 0 and not after.best(1).ties
    assert after.means == pytest.approx([0.05, 0.89], abs=0.05)


def test_superclasses_of_one_data_set_count_as_one() -> None:
    """Ten tasks, and twenty parts of an eleventh that all lie at 0.8: the mean and the spread are as if it were there once."""
    rng = np.random.default_rng(4)
    errors = np.concatenate([rng.uniform(0.1, 0.5, (10, 1)), np.full((20, 1), 0.8)]) + np.array([0.0, 0.02, 0.04])
    errors = (errors + 0.002 * rng.standard_normal(errors.shape))[..., None]
    plans = [PlanRow(f"plan {i}", Plan.uniform(activation=f"int{8 - i}/64@bf16").to_json()) for i in range(3)]
    single = [TaskRow(f"task {i}", "cnn", f"data {i}", answers=10) for i in range(10)]
    parts = [TaskRow(f"part {i}", "cnn", f"pictures/{i}", answers=10) for i in range(20)]
    prior = PriorData.of_runs("parts", "store", [*single, *parts], plans, errors)
    assert data_set_weights(prior) == pytest.approx([1.0] * 10 + [0.05] * 20)
    many, one = (
        Estimate.of(TaskPrior.of(data).prior, np.ones(3)) for data in (prior, prior.without(f"part {i}" for i in range(1, 20)))
    )
    assert many.means == pytest.approx(one.means, abs=0.03) and many.deviations == pytest.approx(one.deviations, rel=0.15)
    apart = Estimate.of(TaskPrior.of(replace(prior, tasks=(*single, *(replace(t, data=t.name) for t in parts)))).prior, np.ones(3))
    assert (apart.means > one.means + 0.1).all(), "as tasks of their own they would decide"


def test_plans_of_one_format_are_alike_on_a_task_like_none_before() -> None:
    """A pick measured 2 bits at 0.4988, and took the untried plan of the same 2 bits at 0.272: prior tasks lose nothing by them."""
    rng = np.random.default_rng(0)
    names = [("int8/64@bf16", "half"), ("int8/64@bf16", "lpmm"), ("uint2/64@bf16+bf16", "half"), ("uint2/64@bf16+bf16", "lpmm")]
    plans = [PlanRow(f"{a}, {t}", Plan.uniform(**TIERS[t], activation=a).to_json()) for a, t in names]  # type: ignore[misc]
    runs = rng.uniform(0.2, 0.4, (12, 1, 1)) + 0.01 * rng.standard_normal((12, 4, 2))
    tasks = [TaskRow(f"task {i}", "cnn", f"data {i}", answers=10, blind=1.0) for i in range(12)]
    task_prior = TaskPrior.of(PriorData.of_runs("flat", "store", tasks, plans, runs))
    points = points_of(task_prior.prior_data)
    prior = task_prior.covering(np.arange(4), points, points)
    found, unlike = (Estimate.of(one, np.ones(4), {0: 0.28, 1: 0.30, 3: 0.60}) for one in (prior, task_prior.prior))
    assert found.means[2] > max(0.45, unlike.means[2] + 0.05) and found.best(1, is_cautious=False).plan == 0


def test_a_task_may_be_quieter_or_noisier_than_most() -> None:
    """Half of the tasks have a tenth of the noise: wild runs of one plan make the new task one of the noisy ones."""
    rng, sizes = np.random.default_rng(0), np.where(np.arange(20) % 2, 0.02, 0.002)
    runs = rng.uniform(0.2, 0.6, (20, 1, 1)) + sizes[:, None, None] * rng.standard_normal((20, 3, 3))
    prior = TaskPrior.of(small(runs)).prior
    noise = np.sqrt(prior.mixture.noise[:-1, 0])
    assert noise.max() / noise.min() > 5
    quiet, wild = (Estimate.of(prior, np.ones(3), {0: [0.4, 0.4 + d, 0.4 - d, 0.4 + 2 * d]}) for d in (0.002, 0.02))
    assert quiet.noise[0] < 0.6 * wild.noise[0] and quiet.deviations[0] < wild.deviations[0]


# --- plans in no column -------------------------------------------------------------------------------------------------


def test_plans_left_out_of_the_matrix_lie_in_their_bands() -> None:
    """Each level of a prior in turn is unseen, on each task in turn, after three measurements: nine of ten, 264 cases of 22 tasks."""
    inside: list[bool] = []
    wide: list[float] = []
    for seed in range(2):
        earlier = made_up_prior(11, 30, seed=seed)
        runs, points, rng = scaled(earlier), points_of(earlier), np.random.default_rng(seed)
        levels = np.array([row.level for row in earlier.plans])
        for level in np.unique(levels):
            out, keep = np.flatnonzero(levels == level), np.flatnonzero(levels != level)
            for i, task in enumerate(earlier.tasks):
                task_prior = TaskPrior.of(columns_of(earlier, keep.tolist()).without([task.name]))
                prior = task_prior.covering(
                    np.append(np.arange(len(keep)), -1), np.vstack([points[keep], points[out].mean(axis=0)]), points[keep]
                )
                measured = {int(j): float(runs[i, keep[j], 0]) for j in rng.choice(len(keep), 3, replace=False)}
                estimate = Estimate.of(prior, np.ones(len(keep) + 1), measured)
                inside.append(abs(estimate.means[-1] - runs[i, out].mean()) <= NINE_OF_TEN * estimate.deviations[-1])
                wide.append(estimate.deviations[-1] / np.median(estimate.deviations[:-1]))
    assert 0.85 <= np.mean(inside) <= 0.97
    assert np.median(wide) > 1.2, "and bands of plans that were seen are narrower"


def test_an_unseen_plan_teaches_and_is_taught() -> None:
    earlier = made_up_prior()
    task_prior, points = TaskPrior.of(earlier), points_of(earlier)
    new = features_of(Plan.uniform(activation="int6/64@bf16"))
    prior = task_prior.covering(np.append(np.arange(30), -1), np.vstack([points, new]), points)
    before, after = Estimate.of(prior, np.ones(31)), Estimate.of(prior, np.ones(31), {30: 0.9})
    assert before.deviations[30] > after.deviations[30] and after.means[30] > before.means[30]
    assert after.means[:30].mean() > before.means[:30].mean(), "a bad run of one plan is bad news for all"
    fine, coarse = (before.means[[row.label for row in earlier.plans].index(label)] for label in ("a8/64 full", "a2/64 full"))
    assert fine - 0.02 < before.means[30] < coarse, "six bits lie between two and eight"


def test_features_of_formats_for_each_slot_lie_between() -> None:
    low, high = (features_of(Plan.uniform(activation=f"{text}/64@bf16")) for text in ("int4", "int8"))
    assert low[0] > high[0] > 0 and np.array_equal(low[1:], high[1:])
    safe, half, lpmm = (features_of(Plan.preset(name)) for name in ("safe", "half", "lpmm"))
    assert lpmm[2] > half[2] >= safe[2]
    short = features_of(Plan.uniform(activation="e3m4fn"))
    assert short[-1] == 2 and low[-1] == 0, "floats without a block may lack exponents"


# --- bands --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_tasks", [6, 20])
def test_bands_hold_from_few_tasks_without_a_measurement(num_tasks: int) -> None:
    """40 tasks, each new to a prior of its own; a task's plans go together, so a share of 40 is what counts: two standard errors."""
    inside: list[float] = []
    for seed in range(40):
        earlier = made_up_prior(num_tasks + 1, 24, seed=seed)
        task = earlier.tasks[seed % (num_tasks + 1)]
        estimate = Estimate.of(TaskPrior.of(earlier.without([task.name])).prior, np.ones(24))
        truth = scaled(earlier)[earlier.row(task.name)].mean(axis=1)
        inside.append(float(np.mean(np.abs(estimate.means - truth) <= NINE_OF_TEN * estimate.deviations)))
    assert np.mean(inside) >= 0.9 - 2 * np.sqrt(0.9 * 0.1 / 40)


# --- bad input ----------------------------------------------------------------------------------------------------------

NAN = np.nan
BAD = {
    "one task": [[0.5, 0.4, 0.3]],
    "one number": [[NAN, 0.4, NAN], [NAN, NAN, NAN]],
    "fewer entries than the rank": [[0.5, NAN, NAN], [NAN, 0.4, NAN], [NAN, NAN, 0.3]],
    "constant rows": [[0.5] * 3] * 4,
    "negative": [[-0.5, -0.1, -0.2], [-0.3, -0.2, -0.1]],
    "infinite": [[np.inf, 0.4, 0.3], [0.4, -np.inf, 0.3]],
    "all at a guess": [[0.9, 0.9, 0.9], [0.95, 2.0, 1e9]],
    "ties everywhere": [[0.3, 0.3, 0.3], [0.2, 0.2, 0.2]],
}


@pytest.mark.parametrize("runs", BAD.values(), ids=BAD)
def test_poor_priors_get_an_answer_with_bands(runs: list[list[float]]) -> None:
    earlier = small(np.array(runs))
    task_prior = TaskPrior.of(earlier)
    points = points_of(earlier)
    prior = task_prior.covering(np.array([0, 1, 2, -1]), np.vstack([points, points[0] + 1]), points)
    for measured in ({}, {0: 0.4}, {0: 1.0, 1: 1.0, 2: [1.0, 1.0], 3: 1.0}, {3: NAN}):
        estimate = Estimate.of(prior, np.arange(1.0, 5.0), measured)
        assert np.isfinite(estimate.means).all() and np.isfinite(estimate.deviations).all()
        assert np.all(estimate.deviations >= 0) and estimate.best(4).plan in range(4)


def test_duplicate_plans_share_what_is_known() -> None:
    earlier = made_up_prior(11, 6)
    twice = columns_of(earlier, [0, 1, 2, 3, 4, 5, 0])
    estimate = Estimate.of(TaskPrior.of(twice).prior, np.ones(7), {6: 0.2})
    assert estimate.means[0] == pytest.approx(estimate.means[6], abs=0.05)
    assert estimate.chance_below(0)[6] == pytest.approx(0.5, abs=0.4)


def test_plans_of_an_estimated_level_differ_from_task_to_task() -> None:
    """Two kinds of 30 plans, noise 0.02 in each of three runs, and 0.03 of every plan's own on every task."""
    source = np.random.default_rng(4)
    kinds = 0.4 + 0.1 * source.standard_normal((40, 2))
    means = np.repeat(kinds, 30, axis=1) + 0.03 * source.standard_normal((40, 60))
    runs = means[..., None] + 0.02 * source.standard_normal((40, 60, 3))
    tasks = [TaskRow(f"task {i}", "cnn", f"data {i}", answers=10) for i in range(40)]
    plans = [PlanRow(f"plan {i}", template=f"assign {i + 1}% role") for i in range(60)]
    prior = TaskPrior.of(PriorData.of_runs("made", "store", tasks, plans, 0.9 * runs)).prior
    assert len(set(prior.levels.tolist())) == 2, "or this test shows nothing"
    assert np.sqrt(prior.doubt) == pytest.approx(0.03, rel=0.15), "without it a hundredth: the offsets alone"


def test_nothing_to_learn_from_is_a_sentence() -> None:
    with pytest.raises(PriorError, match="prior 'small' has no error in it: 1 tasks, 2 plans"):
        TaskPrior.of(small(np.full((1, 2), NAN)))
    earlier = made_up_prior(3, 4)
    with pytest.raises(PriorError, match="none of the 4 plans of prior 'made_up' has features"):
        TaskPrior.of(earlier).covering(np.array([-1]), np.zeros((1, 7)), np.full((4, 7), NAN))


# --- seeds --------------------------------------------------------------------------------------------------------------


def of_seeds(num_tasks: int, source: np.random.Generator) -> tuple[PriorData, np.ndarray]:
    """Eight plans, three seeds of four of them, whose seed effects deviate by 0.03 and all else by 0.006; and the means."""
    tasks = [TaskRow(f"task {i}", "cnn", f"data {i}", "error", 10, 0.9) for i in range(num_tasks)]
    means = 0.3 + 0.1 * source.standard_normal((num_tasks, 1)) + 0.02 * source.standard_normal((num_tasks, 8))
    runs = means[..., None] + 0.03 * source.standard_normal((num_tasks, 1, 3)) + 0.006 * source.standard_normal((num_tasks, 8, 3))
    runs[:, 4:, 1:] = np.nan
    return PriorData.of_runs("seeds", "store", tasks, [PlanRow(f"plan {j}") for j in range(8)], runs), means


def test_bands_hold_after_trials_of_one_seed() -> None:
    """40 new tasks, four trials each: nine of ten means are within; 320 are not independent, and 0.82 to 0.97 is three deviations or so."""
    source = np.random.default_rng(2)
    prior = TaskPrior.of(of_seeds(40, source)[0]).prior
    new, means = of_seeds(40, source)
    inside, narrow = [], []
    for runs, mean in zip(new.runs / 0.9, means / 0.9, strict=True):
        estimate = Estimate.after(prior, np.ones(8), [SeedRun(plan, float(runs[plan, 0]), 7) for plan in (0, 2, 4, 6)])
        inside.append(abs(estimate.means - mean) <= NINE_OF_TEN * estimate.deviations)
        alone = np.sqrt(estimate.deviations**2 - prior.seed_variance)
        narrow.append(abs(estimate.means - mean) <= NINE_OF_TEN * alone)
    assert 0.82 < np.mean(inside) < 0.97 and np.mean(narrow) < 0.7, "seed effects are what makes them so wide"
    assert 5 < prior.shared < 60, "25 as variances"
    assert np.sqrt(prior.seed_variance) == pytest.approx(0.03 / 0.9, rel=0.25), "40 tasks with three seeds: two deviations or so"


def test_effects_of_seeds_do_not_follow_the_noise_of_runs() -> None:
    """A task with hardly any noise of its own: a run with another seed varies as on all tasks."""
    prior = TaskPrior.of(of_seeds(40, np.random.default_rng(2))[0]).prior
    quiet = replace(prior, mixture=replace(prior.mixture, noise=prior.mixture.noise * 1e-6))
    estimate = Estimate.after(quiet, np.ones(8), [SeedRun(plan, 0.3, 7) for plan in (0, 2, 4, 6)])
    assert estimate.noise == pytest.approx(np.sqrt(prior.seed_variance), rel=1e-3)
    assert (estimate.deviations >= np.sqrt(prior.seed_variance)).all(), "one seed alone does not show its effect"
    two = Estimate.after(quiet, np.ones(8), [SeedRun(plan, 0.3, seed) for plan in (0, 2, 4, 6) for seed in (7, 8)])
    assert two.deviations[0] ** 2 == pytest.approx(prior.seed_variance / 2, rel=0.1), "two seeds have half of the variance"
    unseen = Estimate.after(replace(quiet, shared=0.0), np.ones(8), [SeedRun(0, 0.3, 7), SeedRun(0, 0.3, 8)])
    assert unseen.deviations[0] ** 2 == pytest.approx(prior.seed_variance / 2, rel=0.1), "where most tasks show no effect, too"
    assert two.tie_error < 1e-3 * np.sqrt(prior.seed_variance), "plans share the effects of seeds"


def test_what_a_run_says_of_lossier_plans() -> None:
    """Features are bits of precision lost: a plan that loses less in one role and more in another is not comparable."""
    from paredown.study.pick.task_prior import LENGTH

    points = np.array([[1.0, 0.0], [3.5, 0.0], [1.0, 2.5], [np.nan, np.nan]])
    found = TaskPrior.of(made_up_prior(3, 4)).covering(np.arange(4), points, points).lossier
    near = np.exp(-0.5 * (2.5 / LENGTH) ** 2)
    expected = [[1, 0, 0, 0], [near, 1, 0, 0], [near, 0, 1, 0], [0, 0, 0, 1]]
    np.testing.assert_allclose(found, expected, err_msg="rows: the plans that runs of the columns tell about")


def test_a_lucky_seed_makes_no_plan_better() -> None:
    """Plans 0 and 1 are as good; 1 was tried once more, with a seed that lowers all errors."""
    prior = TaskPrior.of(of_seeds(40, np.random.default_rng(4))[0]).prior
    first = [SeedRun(0, 0.4, 0), SeedRun(1, 0.4, 0)]
    apart = [
        float(np.subtract(*Estimate.after(prior, np.ones(8), runs).means[:2])) for runs in (first, [*first, SeedRun(1, 0.3, 1)])
    ]
    blunt = Estimate.after(replace(prior, shared=0.0), np.ones(8), [*first, SeedRun(1, 0.3, 1)])
    assert abs(apart[1] - apart[0]) < 0.2 * float(np.subtract(*blunt.means[:2]))


def test_a_run_that_diverged_moves_its_own_plan_alone() -> None:
    """Three plans as good; one diverges with a second seed: the others stay, and it becomes worse."""
    prior = TaskPrior.of(of_seeds(40, np.random.default_rng(4))[0]).prior
    first = [SeedRun(plan, 0.3, 0) for plan in range(3)]
    before, after = (Estimate.after(prior, np.ones(8), runs).means for runs in (first, [*first, SeedRun(0, 1.0, 1)]))
    assert abs(after[1] - before[1]) < 0.05 < after[0] - before[0]


@pytest.mark.parametrize("how", ["counted", "no better than a blind guess"])
def test_earlier_runs_that_diverged_are_no_lifts(how: str) -> None:
    """Plan 3 diverged with seed 1 on every task: plans that ran with seed 0 alone are where they would be without it."""
    whole = of_seeds(12, np.random.default_rng(5))[0]
    runs, diverged = whole.runs.copy(), np.zeros((12, 8))
    runs[:, 3, 1], diverged[:, 3] = 0.9, how == "counted"
    with_lost = PriorData.of_runs("lost", "store", whole.tasks, whole.plans, runs.copy(), diverged=diverged)
    runs[:, 3] = np.nan
    without = PriorData.of_runs("without", "store", whole.tasks, whole.plans, runs)
    found, wanted = TaskPrior.of(with_lost), TaskPrior.of(without)
    others = [0, 1, 2, 4, 5, 6, 7]
    np.testing.assert_allclose(found.sums.total[:, others], wanted.sums.total[:, others], atol=1e-9)
    assert found.prior.shared == pytest.approx(wanted.prior.shared)


def test_noise_beside_lifts_is_not_made_smaller_by_finding_them() -> None:
    """Tasks of one noise, 2 plans of 200 seeds or 30 plans of 8: of 2 plans a lift takes half of what is free."""
    source = np.random.default_rng(6)
    runs = 0.4 + 0.05 * source.standard_normal((20, 1, 200)) + 0.01 * source.standard_normal((20, 30, 200))
    runs[:10, 2:], runs[10:, :, 8:] = np.nan, np.nan
    tasks = [TaskRow(f"task {i}", "cnn", "x", "error", 10, 0.9) for i in range(20)]
    ratios = noise_ratios(PriorData.of_runs("noise", "store", tasks, [PlanRow(f"plan {j}") for j in range(30)], runs))
    assert ratios.max() / ratios.min() < 1.5
