"""Earlier tasks as a prior: units, kinds of tasks, plans that are in no column, bands that hold, and bad input."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from paredown import Plan
from paredown.errors import PriorError
from paredown.study.pick.candidates import features_of
from paredown.study.pick.task_prior import TaskPrior, data_set_weights, scaled
from paredown.study.priors.prior_data import MATRICES, PlanRow, PriorData, TaskRow, random_guess_error
from paredown.study.priors.prior_files import made_up_prior
from tests.study.pick.test_posterior import estimated

NINE_OF_TEN = 1.645


def columns_of(earlier: PriorData, keep: Sequence[int]) -> PriorData:
    """These plans alone; one that is there twice is called otherwise, and has no level."""
    arrays = {name: getattr(earlier, name)[:, list(keep)] for name in ("runs", *MATRICES)}
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
    return PriorData("small", "store", tuple(tasks), tuple(plans), runs)


# --- units --------------------------------------------------------------------------------------------------------------


def test_errors_are_in_parts_of_a_blind_guess() -> None:
    tasks = [TaskRow("a", "cnn", "x", "error", 10), TaskRow("b", "gpt", "y", "loss", 256), TaskRow("c", "cnn", "z", "mine", None)]
    runs = np.array([[0.45, 0.9], [np.log(256) / 2, 7.0], [3.0, 12.0]])[..., None]
    found = scaled(PriorData("units", "store", tasks, [PlanRow("p"), PlanRow("q")], runs))
    assert found[..., 0] == pytest.approx(np.array([[0.5, 1.0], [0.5, 1.0], [0.25, 1.0]])), "worse than a guess is a guess"


def test_a_task_may_say_itself_what_a_guess_has() -> None:
    assert scaled(small([[0.2, 0.1]], blind=0.4))[0, :, 0].tolist() == [0.5, 0.25]
    assert random_guess_error("error", None) is None and random_guess_error("error", 1) is None


# --- tasks ---------------------------------------------------------------------------------------------------------------


def test_superclasses_of_one_data_set_count_as_one() -> None:
    """Ten tasks, and twenty parts of an eleventh that all lie at 0.8: the mean and the spread are as if it were there once."""
    rng = np.random.default_rng(4)
    errors = np.concatenate([rng.uniform(0.1, 0.5, (10, 1)), np.full((20, 1), 0.8)]) + np.array([0.0, 0.02, 0.04])
    errors = (errors + 0.002 * rng.standard_normal(errors.shape))[..., None]
    plans = [PlanRow(f"plan {i}", Plan.uniform(activation=f"int{8 - i}/64@bf16").to_json()) for i in range(3)]
    single = [TaskRow(f"task {i}", "cnn", f"data {i}", answers=10) for i in range(10)]
    parts = [TaskRow(f"part {i}", "cnn", f"pictures/{i}", answers=10) for i in range(20)]
    prior = PriorData("parts", "store", [*single, *parts], plans, errors)
    assert data_set_weights(prior) == pytest.approx([1.0] * 10 + [0.05] * 20)
    many, one = (
        estimated(TaskPrior.of(data).prior, np.ones(3)) for data in (prior, prior.without(f"part {i}" for i in range(1, 20)))
    )
    assert many.means == pytest.approx(one.means, abs=0.03) and many.deviations == pytest.approx(one.deviations, rel=0.15)
    apart = estimated(TaskPrior.of(replace(prior, tasks=(*single, *(replace(t, data=t.name) for t in parts)))).prior, np.ones(3))
    assert (apart.means > one.means + 0.1).all(), "as tasks of their own they would decide"


def test_a_task_may_be_quieter_or_noisier_than_most() -> None:
    """The noise of a run is a tenth of the task's error: on a hard task runs count for less than on an easy one."""
    rng, height = np.random.default_rng(0), np.linspace(0.05, 0.6, 20)[:, None, None]
    prior = TaskPrior.of(small(height + 0.1 * height * rng.standard_normal((20, 3, 3)))).prior
    easy, hard = (estimated(prior, np.ones(3), {0: [error, error]}) for error in (0.1, 0.6))
    assert easy.noise[0] ** 0.5 < 0.5 * hard.noise[0] ** 0.5 and easy.deviations[0] < hard.deviations[0]


def test_a_task_unlike_all_prior_ones_widens_the_bands() -> None:
    """Earlier tasks say that plans are within 0.15 of each other; here one is far better, in three runs."""
    rng = np.random.default_rng(0)
    heights, slopes = 0.4 + 0.05 * rng.standard_normal((16, 1)), np.array([-0.15, 0.15] * 8)
    prior = TaskPrior.of(small(heights + np.column_stack([0 * slopes, slopes]) + 0.005 * rng.standard_normal((16, 2)))).prior
    like, unlike = (estimated(prior, np.ones(2), {0: [0.45] * 3, 1: [0.45 + d] * 2}) for d in (0.15, 0.8))
    assert (unlike.deviations > 1.5 * like.deviations).all() and unlike.best(1).plan == 0


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
                estimate = estimated(prior, np.ones(len(keep) + 1), measured)
                inside.append(abs(estimate.means[-1] - runs[i, out].mean()) <= NINE_OF_TEN * estimate.deviations[-1])
                wide.append(estimate.deviations[-1] / np.median(estimate.deviations[:-1]))
    assert 0.85 <= np.mean(inside) <= 0.97
    assert np.median(wide) > 1.2, "and bands of plans that were seen are narrower"


def test_an_unseen_plan_teaches_and_is_taught() -> None:
    earlier = made_up_prior()
    task_prior, points = TaskPrior.of(earlier), points_of(earlier)
    new = features_of(Plan.uniform(activation="int6/64@bf16"))
    prior = task_prior.covering(np.append(np.arange(30), -1), np.vstack([points, new]), points)
    before, after = estimated(prior, np.ones(31)), estimated(prior, np.ones(31), {30: 0.9})
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
        estimate = estimated(TaskPrior.of(earlier.without([task.name])).prior, np.ones(24))
        truth = scaled(earlier)[earlier.tasks.index(task)].mean(axis=1)
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


def test_duplicate_plans_share_what_is_known() -> None:
    earlier = made_up_prior(11, 6)
    twice = columns_of(earlier, [0, 1, 2, 3, 4, 5, 0])
    estimate = estimated(TaskPrior.of(twice).prior, np.ones(7), {6: 0.2})
    assert estimate.means[0] == pytest.approx(estimate.means[6], abs=0.05)
    assert estimate.chance_below(0)[6] == pytest.approx(0.5, abs=0.4)


def test_nothing_to_learn_from_is_a_sentence() -> None:
    with pytest.raises(PriorError, match="prior 'small' has no error in it: 1 tasks, 2 plans"):
        TaskPrior.of(small(np.full((1, 2), NAN)))
    earlier = made_up_prior(3, 4)
    with pytest.raises(PriorError, match="none of the 4 plans of prior 'made_up' has features"):
        TaskPrior.of(earlier).covering(np.array([-1]), np.zeros((1, 7)), np.full((4, 7), NAN))
