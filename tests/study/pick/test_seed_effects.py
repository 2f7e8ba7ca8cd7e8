"""Seeds that lift all plans of a task: found by the definition of a mixed model, taken off, and left alone where nothing tells of them."""

from __future__ import annotations

import numpy as np
import pytest

from paredown.study.pick.seed_effects import (
    SeedRun,
    runs_of_task,
    seed_effects_of,
    shared_of,
    squares_of,
    variance_parts_of,
    without_effects_of_seeds,
    without_seed_effects,
)

NAN = np.nan


def made(num_plans: int, lifts: list[float], rest: float, seed: int = 0) -> np.ndarray:
    """(plans, seeds): means of plans, seed effects of seeds, noise."""
    source = np.random.default_rng(seed)
    return (
        0.3
        + 0.1 * source.standard_normal((num_plans, 1))
        + np.array(lifts)
        + rest * source.standard_normal((num_plans, len(lifts)))
    )


def test_variances_are_found() -> None:
    """2,000 plans tell the rest to 2 %; of the seed effects it is their own variance."""
    lifts = [0.05, -0.02, -0.03]
    found = variance_parts_of(made(2000, lifts, 0.01))
    assert np.sqrt(found.rest) == pytest.approx(0.01, rel=0.05)
    assert np.sqrt(found.shared) == pytest.approx(np.std(lifts, ddof=1), rel=0.02)


def test_lifts_are_those_of_the_whole_mixed_model() -> None:
    """Henderson's equations, plans fixed and seeds random, solved as one system; runs missing here and there."""
    runs, ratio = made(7, [0.04, 0.0, -0.05], 0.02), 3.0
    runs[[0, 3, 5, 5], [1, 2, 0, 1]] = NAN
    plans, seeds = np.nonzero(np.isfinite(runs))
    x, z = np.eye(7)[plans], np.eye(3)[seeds]
    system = np.block([[x.T @ x, x.T @ z], [z.T @ x, z.T @ z + np.eye(3) / ratio]])
    inverse = np.linalg.inv(system)
    solved = inverse @ np.concatenate([x.T @ runs[plans, seeds], z.T @ runs[plans, seeds]])
    found = seed_effects_of(runs_of_task(runs), ratio, 3)
    np.testing.assert_allclose(found.size, solved[7:], atol=1e-12)
    np.testing.assert_allclose(found.doubt, inverse[7:, 7:], atol=1e-12)


def test_plans_of_other_seeds_become_comparable() -> None:
    """Ten plans with three seeds, ten with the first one alone: their means are as near to the truth as one run's rest is."""
    runs = made(20, [-0.10, 0.05, 0.05], 0.004)
    means = 0.3 + 0.1 * np.random.default_rng(0).standard_normal(20)
    runs[10:, 1:] = NAN
    off = np.nanmean(runs, axis=1) - means
    level = np.nanmean(without_seed_effects(runs[None])[0], axis=1) - means
    assert abs(off[10:].mean() - off[:10].mean()) > 0.08, "unmodified, they have the luck of the seed"
    assert abs(level[10:].mean() - level[:10].mean()) < 0.005, "five deviations of the difference"


@pytest.mark.parametrize(
    "runs",
    [
        [[0.1, NAN], [0.2, NAN]],  # one seed
        [[0.1, 0.3], [0.2, NAN]],  # one plan twice
        [[0.1, NAN], [NAN, 0.2]],  # none twice
        [[NAN, NAN], [NAN, NAN]],
        [[0.1, 0.2], [0.2, 0.1]],  # seeds explain nothing
    ],
)
def test_runs_without_information_on_seeds_are_unmodified(runs: list[list[float]]) -> None:
    given = np.array([runs])
    np.testing.assert_array_equal(without_seed_effects(given), given)


def test_runs_that_do_not_vary() -> None:
    assert np.isfinite(without_seed_effects(np.full((1, 3, 2), 0.5))).all()
    flat = without_seed_effects(np.array([[[0.2, 0.4], [0.3, 0.5], [0.1, 0.3]]]))[0]
    np.testing.assert_allclose(flat[:, 0], flat[:, 1], atol=1e-4)


def test_one_seed_leaves_runs_alone_and_their_common_level_open() -> None:
    found = without_effects_of_seeds([SeedRun(0, 0.3, 5), SeedRun(4, 0.5, 5)], 2.0)
    assert found.errors.tolist() == [0.3, 0.5] and found.weights.tolist() == [1.0, 1.0] and found.common == pytest.approx(2.0)
    assert without_effects_of_seeds([], 2.0).common == 0


def test_a_second_seed_tells_less_until_several_plans_ran_with_it() -> None:
    once = [SeedRun(plan, 0.1 * plan, 0) for plan in range(6)]
    found = [without_effects_of_seeds([*once, *(SeedRun(plan, 0.1 * plan + 0.5, 1) for plan in range(num))], 9.0) for num in (1, 5)]
    assert found[0].weights[-1] < found[1].weights[-1] < 1
    np.testing.assert_allclose(found[1].errors[6:] - found[1].errors[:5], 0.0, atol=0.02)
    assert found[1].common < 9.0, "the mean of two seeds is nearer to that of all"


def test_the_ratio_of_all_tasks() -> None:
    """60 tasks of 30 plans: deviations of 0.02 and 0.01 have the ratio 4 as variances; 180 seed effects tell it to a tenth."""
    source = np.random.default_rng(3)
    tasks = np.array([made(30, list(0.02 * source.standard_normal(4)), 0.01, seed) for seed in range(60)])
    assert shared_of(tasks) == pytest.approx(4.0, rel=0.35)
    assert shared_of(tasks[:, :, :1]) == 0


# --- runs that diverge --------------------------------------------------------------------------------------------------


def test_a_run_that_diverged_is_no_lift_of_its_seed() -> None:
    """Plan 0 diverged with seed 1, with which nothing else ran: the others stay where they are, and it is believed."""
    once = [SeedRun(plan, 0.2, 0) for plan in range(3)]
    found = without_effects_of_seeds([*once, SeedRun(0, 1.0, 1)], 3.0, worst=1.0)
    assert found.errors.tolist() == [0.2, 0.2, 0.2, 1.0] and found.weights.tolist() == [1.0] * 4
    blind = without_effects_of_seeds([*once, SeedRun(0, 1.0, 1)], 3.0)
    assert blind.errors[3] < 0.9 and blind.errors[0] > 0.25, "what a lift of 0.8 would come to"


def test_lifts_are_those_of_the_plans_that_did_not_diverge() -> None:
    calm = [SeedRun(plan, 0.2 + 0.01 * plan + 0.1 * seed, seed) for plan in range(1, 5) for seed in (0, 1)]
    lost = [SeedRun(0, 0.2, 0), SeedRun(0, 1.0, 1)]
    found, alone = without_effects_of_seeds([*calm, *lost], 9.0, worst=1.0), without_effects_of_seeds(calm, 9.0)
    np.testing.assert_allclose(found.errors[:8], alone.errors, atol=1e-12)
    assert found.errors[8] == pytest.approx(0.2 + alone.errors[0] - calm[0].error), "its other run has the lift of its seed"
    assert found.errors[9] == 1.0


def test_plans_that_are_not_calm_tell_nothing_of_lifts() -> None:
    runs = made(10, [0.0, 0.04, -0.04], 0.01)[None]
    wild = runs.copy()
    wild[0, 3, 1] = 1.0
    calm = np.arange(10)[None] != 3
    others = np.delete(runs, 3, axis=1)
    np.testing.assert_allclose(
        (wild - without_seed_effects(wild, calm))[0, 0], (others - without_seed_effects(others))[0, 0], atol=1e-12
    )
    assert abs((without_seed_effects(wild) - without_seed_effects(wild, calm))[0, 0]).max() > 0.01, (
        "taken for a lift, it moves all plans"
    )


# --- plans that have some of the seeds ----------------------------------------------------------------------------------


def test_one_more_seed_of_one_plan_switches_nothing_off() -> None:
    """A run that no other plan shares is explained by its seed whatever it is: seed effects of the others stay about where they were."""
    runs = np.column_stack([made(10, [0.0, 0.04, -0.04], 0.01), np.full(10, NAN)])
    more = runs.copy()
    more[2, 3] = 0.31
    before, after = variance_parts_of(runs), variance_parts_of(more)
    assert after.rest == pytest.approx(before.rest) and after.shared > 0.3 * before.shared > 0
    steps = [np.diff((one - without_seed_effects(one[None])[0])[0, :3]) for one in (runs, more)]
    np.testing.assert_allclose(steps[1], steps[0], atol=0.001)


def test_squares_are_those_of_least_squares() -> None:
    """Plans alone, then plans and seeds, as columns; runs missing here and there."""
    runs = made(9, [0.04, 0.0, -0.05, 0.01], 0.02)
    runs[[0, 3, 5, 5, 7, 7, 7], [1, 2, 0, 1, 0, 1, 2]] = NAN
    plans, seeds = np.nonzero(np.isfinite(runs))
    errors, x, z = runs[plans, seeds], np.eye(9)[plans], np.eye(4)[seeds]
    left = [float(np.square(errors - a @ np.linalg.lstsq(a, errors)[0]).sum()) for a in (x, np.hstack([x, z]))]
    found = squares_of(runs)
    assert (found.seeds, found.rest) == pytest.approx((left[0] - left[1], left[1]))
    assert (found.free_seeds, found.free_rest) == (3, len(errors) - 9 - 3)
    project = np.eye(len(errors)) - x @ np.linalg.pinv(x)
    assert found.lifts == pytest.approx(np.trace(z.T @ project @ z))


def test_variances_are_right_on_average_where_plans_have_some_of_the_seeds() -> None:
    """3,000 tasks: the mean variance of the seed effects is known to 3 %, that of the rest to 1 %; 0.1 and 0.03 are three deviations."""
    source = np.random.default_rng(8)
    seen = source.uniform(size=(8, 4)) < 0.7
    parts = []
    for _ in range(3000):
        runs = source.standard_normal((8, 1)) + 0.05 * source.standard_normal(4) + 0.03 * source.standard_normal((8, 4))
        one = squares_of(np.where(seen, runs, NAN))
        rest = one.rest / one.free_rest
        parts.append(((one.seeds - one.free_seeds * rest) / one.lifts, rest))
    shared, rest = np.mean(parts, axis=0)
    assert shared == pytest.approx(0.05**2, rel=0.1) and rest == pytest.approx(0.03**2, rel=0.03)


def test_a_noisy_task_does_not_decide_the_ratio_of_all() -> None:
    """Ten tasks whose seeds do nothing, and one ten times as noisy whose seeds do all: between them, and nearer to the ten."""
    quiet = [made(10, [0.0, 0.0, 0.0], 0.01, seed) for seed in range(10)]
    noisy = made(10, [-0.5, 0.0, 0.5], 0.1, 11)
    alone = shared_of(noisy[None])
    assert alone > 5 and shared_of(np.array([*quiet, noisy])) < 0.2 * alone
    assert shared_of(100 * noisy[None]) == pytest.approx(alone, rel=1e-9), "whatever the unit"
