"""`pick` from task to plan: what it tries, when it stops, what it answers; trials are made up by a rule but for the first tests."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import nn

from paredown import Picked, Plan, Role, Trial, footprint, pick
from paredown.errors import TaskError
from paredown.study.pick.candidates import features_of
from paredown.study.priors.prior_data import PriorData
from paredown.study.priors.prior_files import made_up_prior
from paredown.study.sweeps import measurement
from paredown.study.tasks.task import OptimizerSettings, Task
from paredown.study.tasks.task_trace import formats_state, trace_task
from paredown.study.tasks.trial import Status
from tests.study.tasks.made import NUM_CLASSES, examples
from tests.study.tasks.made import make_task as small_task

PRIOR = made_up_prior()


def deep(seed: int) -> nn.Module:
    """A net whose activations take most of a step's memory."""
    layers = (part for _ in range(4) for part in (nn.Linear(96, 96), nn.GELU()))
    return nn.Sequential(nn.Linear(16, 96), nn.GELU(), *layers, nn.Linear(96, NUM_CLASSES))


class DeepLayers(nn.Module):
    """The same with layers that can be checkpointed."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 96), nn.Linear(96, NUM_CLASSES)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(96, 96), nn.GELU(), nn.Linear(96, 96), nn.GELU()) for _ in range(4))

    def forward(self, x: Any) -> Any:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.last(x)


def make_task(make_model: Any = deep, **changes: Any) -> Task:
    """Blobs for `deep`."""
    return small_task(make_model, **{"data": examples(512), "batch": 256, "settings": OptimizerSettings("adamw", 3e-3), **changes})


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[tuple[Plan, int]]]:
    """Trials are made up by a rule from now on; the list of those that ran."""

    def by(rule: Callable[[Plan, int], Any] | None = None) -> list[tuple[Plan, int]]:
        ran: list[tuple[Plan, int]] = []

        def evaluate(task: Task, plan: Plan, *, seed: int = 0, **_: Any) -> Trial:
            ran.append((plan, seed))
            found = (rule or as_in_prior)(plan, seed)
            changes = found if isinstance(found, dict) else {"error": found}
            whole = {"status": Status.DONE, "seconds": 1.0, "measured_peak_bytes": 1000, **changes}
            return Trial(task.name, plan, seed, **whole)

        monkeypatch.setattr(measurement, "evaluate", evaluate)
        return ran

    return by


def as_in_prior(plan: Plan, seed: int) -> float:
    """Coarser is worse, with a little noise that plan and seed decide."""
    dice = np.random.default_rng([seed, len(repr(plan.rules))])
    return 0.1 + 0.02 * float(features_of(plan)[:3].sum()) + 0.004 * float(dice.standard_normal())


def bytes_of(task: Task, plan: Plan) -> int:
    return footprint(trace_task(task, plan, "cpu"), plan).peak_bytes


# --- with real trials -----------------------------------------------------------------------------------------------------


def test_a_small_task_from_start_to_end() -> None:
    task = make_task()
    calls: list[tuple[float, int, str]] = []
    found = pick(task, "70%", 2, prior=PRIOR, device="cpu", progress=lambda *one: calls.append(one))
    assert found.plan is not None and found.point is not None
    assert bytes_of(task, found.plan) == found.point.predicted_bytes <= found.budget_bytes
    assert found.full_bytes == bytes_of(task, Plan()) and found.budget_bytes == int(0.7 * found.full_bytes)
    assert 1 <= len(found.trials) <= 2
    assert all(trial.predicted_peak_bytes <= found.budget_bytes for trial in found.trials), "nothing above the budget is"
    assert (
        found.trials[0].error
        == found.frontier.find(next(p.label for p in found.frontier.points if p.plan == found.trials[0].plan)).measured
    )
    assert calls[0] == (0, 2, calls[0][2]) and calls[-1][0] == len(found.trials), "progress begins and ends"
    assert any(0 < done < 1 for done, _, _ in calls), "and is reported within a trial"
    assert Picked.from_json(json.loads(json.dumps(found.to_json()))) == found


def test_a_task_of_the_users_own_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tried: Any) -> None:
    (tmp_path / "mine.py").write_text(
        "from tests.study.pick.test_pick import make_task\n\ndef small(steps=12):\n    return make_task(steps=steps)\n"
    )
    monkeypatch.chdir(tmp_path)
    tried()
    assert pick("mine.py:small#steps=5", "70%", 1, prior=PRIOR, device="cpu").task == "blobs"


# --- with made-up trials --------------------------------------------------------------------------------------------------


def test_without_trials_the_prior_alone_decides(tried: Any) -> None:
    ran = tried()
    found = pick(make_task(), "60%", 0, prior=PRIOR, device="cpu")
    assert not ran and not found.trials and found.plan is not None
    assert all(point.deviation > 0 and point.measured is None for point in found.frontier.points)
    assert "without a trial and from 11 prior tasks (made_up)" in found.reason
    assert found.prior == "made_up"


def test_trials_narrow_the_bands_and_find_what_is_best_here(tried: Any) -> None:
    """In this task, unlike in the prior tasks, plans that format optimizer state are bad."""

    def rule(plan: Plan, seed: int) -> float:
        return 0.1 + 0.5 * formats_state(plan) + 0.01 * float(features_of(plan)[0])

    tried(rule)
    before, after = (pick(make_task(), "100%", num, prior=PRIOR, device="cpu") for num in (0, 8))
    assert after.plan is not None and not formats_state(after.plan)
    width = {num: np.mean([p.deviation for p in found.frontier.points]) for num, found in ((0, before), (8, after))}
    assert width[8] < width[0]
    assert after.point is not None and abs(after.point.mean - rule(after.plan, 0)) < 3 * after.point.deviation


def test_it_stops_when_nothing_can_change_the_pick(tried: Any) -> None:
    ran = tried(lambda plan, seed: 0.05 if not plan.rules else 0.7)
    found = pick(make_task(), "100%", 40, prior=PRIOR, device="cpu")
    assert found.plan == Plan() and len(ran) < 40
    assert "Stopped early" in found.reason


def test_one_plan_that_fits_is_tried_once(tried: Any) -> None:
    ran = tried()
    task = make_task()
    sizes = sorted({point.predicted_bytes for point in pick(task, "100%", 0, prior=PRIOR, device="cpu").frontier.points})
    found = pick(task, sizes[0], 5, prior=PRIOR, device="cpu")
    assert len({plan for plan, _ in ran}) <= sum(point.fits is True for point in found.frontier.points)
    assert found.point is not None and found.point.predicted_bytes <= sizes[0]


@pytest.mark.parametrize("num", [1, 2, 4])
def test_the_last_trial_is_of_the_plan_that_is_about_to_be_taken(tried: Any, num: int) -> None:
    tried()
    before, after = (pick(make_task(), "60%", count, prior=PRIOR, device="cpu") for count in (num - 1, num))
    if len(after.trials) == num:
        known = {trial.plan for trial in before.trials}
        assert before.plan in known or after.trials[-1].plan == before.plan


def test_the_same_again_is_the_same(tried: Any) -> None:
    tried()
    first, second = (pick(make_task(), "60%", 4, prior=PRIOR, device="cpu") for _ in range(2))
    assert first.label == second.label and first.frontier == second.frontier and first.trials == second.trials


def test_a_plan_may_be_tried_again_from_another_seed(tried: Any) -> None:
    """Two plans that fit, alike but for noise: trials go on with new seeds, and no trial runs twice."""
    dice = np.random.default_rng(0)
    ran = tried(lambda plan, seed: float(0.3 + 0.05 * dice.standard_normal()))
    found = pick(make_task(), "60%", 12, prior=PRIOR, device="cpu", seed=5)
    keys = [(plan.key, seed) for plan, seed in ran]
    assert len(set(keys)) == len(keys) and min(seed for _, seed in ran) == 5
    assert found.ties, "the posterior does not separate them"


def test_candidates_are_of_all_kinds(tried: Any) -> None:
    tried()
    points = {point.label: point for point in pick(make_task(), "60%", 0, prior=PRIOR, device="cpu").frontier.points}
    assert {"a8/64 half", "a32/64 full", "assign 60%", "safe"} <= points.keys() and points["a32/64 full"].plan == Plan()
    assert points["a8/64 half"].source == "prior" and points["safe"].source == "features"
    rules = [point.plan.key for point in points.values()]
    assert len(set(rules)) == len(rules), "equal plans are one candidate"
    assert points["assign 60%"].fits and any(key not in tuple(Role) for key, _ in points["assign 60%"].plan.rules)


def test_a_metric_of_ones_own_is_anchored_by_the_first_trial(tried: Any) -> None:
    def mine(output: Any, answers: Any) -> Any:
        return 1000 * (output.argmax(-1) != answers).float().mean()

    tried(lambda plan, seed: 1000 * as_in_prior(plan, seed))
    task = make_task(metric=mine)
    before, after = (pick(task, "60%", num, prior=PRIOR, device="cpu") for num in (0, 3))
    assert "errors are relative to it" in " ".join(before.notes) and before.frontier.metric == "mine"
    assert after.point is not None and 50 < after.point.mean < 500 and after.point.deviation < 200


# --- the smallest plan within a margin of the baseline's error ------------------------------------------------------------


def test_a_margin_of_error_is_kept_and_a_wider_one_takes_less_memory(tried: Any) -> None:
    task, found = make_task(), list[Picked]()
    for increase in (0.01, 0.05, 1.0):
        ran = tried()
        picked = pick(task, evaluations=6, max_error_increase=increase, prior=PRIOR, device="cpu")
        assert picked.plan is not None and picked.budget_bytes == picked.full_bytes
        assert ran[0] == (Plan(), 0) and len(ran) <= 6, "the baseline is measured first"
        excess = 0.02 * float(features_of(picked.plan)[:3].sum())  # of `as_in_prior` without its noise
        assert excess <= increase + 0.004, "up to the noise of one run"
        assert f"at most {increase:g} above the baseline's with a probability of 90 % or more" in picked.reason
        found.append(picked)
    peaks = [picked.point.predicted_bytes for picked in found if picked.point is not None]
    assert peaks == sorted(peaks, reverse=True) and peaks[1] < peaks[0]
    assert peaks[2] == min(point.predicted_bytes for point in found[2].frontier.points), "anything is allowed: the smallest of all"
    assert len(found[2].trials) == 2 and "Stopped early" in found[2].reason


def test_a_margin_within_a_budget_that_the_baseline_exceeds(tried: Any) -> None:
    ran = tried()
    picked = pick(make_task(), "60%", 2, max_error_increase=0.5, confidence=0.8, prior=PRIOR, device="cpu")
    assert picked.point is not None and picked.point.predicted_bytes <= picked.budget_bytes < picked.full_bytes
    assert ran and all(not plan.changes_nothing for plan, _ in ran), "only plans that fit are tried"
    nothing = pick(make_task(), "60%", 0, max_error_increase=0.0, confidence=0.999, prior=PRIOR, device="cpu")
    assert nothing.plan is None
    assert nothing.reason == (
        "no plan that fits has an error at most 0 above the baseline's with a probability of 99.9 % or more. "
        "Raise the budget or the margin."
    )


# --- arguments ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"evaluations": -1}, "evaluations is -1; it is a whole number from 0 up"),
        ({"evaluations": 2.5}, "evaluations is 2.5"),
        ({"max_error_increase": -0.1}, "max_error_increase is -0.1; it is a number from 0 up"),
        ({"max_error_increase": "1%"}, "max_error_increase is '1%'"),
        ({"confidence": 0.5}, "confidence is 0.5; it is a probability above 0.5 and below 1"),
        ({"mode": "dream"}, "mode 'dream' is unknown. Allowed: store, simulate, peppp"),
        ({"device": "tpu"}, "device 'tpu' is not available on this machine"),
    ],
)
def test_wrong_arguments_are_sentences(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(TaskError, match=said):
        pick(make_task(), "60%", **{"prior": PRIOR, **arguments})


def test_something_else_than_a_task_is_a_sentence() -> None:
    with pytest.raises(TaskError, match="pick takes a Task, or its name, and a budget, not Plan"):
        pick(Plan(), "60%", 0, prior=PRIOR)  # type: ignore[arg-type]


# --- plans that quantize nothing ------------------------------------------------------------------------------------------


def with_baseline() -> PriorData:
    """The made-up prior, with the baseline as a plan of its own: the most accurate one."""
    columns = [PRIOR.errors.min(axis=1), *PRIOR.errors.T]
    plans = (replace(PRIOR.plans[0], label="baseline", plan=Plan().to_json(), level="baseline"), *PRIOR.plans)
    return PriorData("with baseline", "store", PRIOR.tasks, plans, np.stack(columns, axis=1)[..., None])


def test_where_checkpointing_alone_fits_it_is_taken_after_one_trial(tried: Any) -> None:
    """Others look better in their trials: by luck, since they follow the same training with rounding errors."""
    ran = tried(lambda plan, seed: 0.3 if not plan.rules else 0.2)
    task, exact = make_task(lambda seed: DeepLayers()), Plan().recomputing("layers.*")
    budget = bytes_of(task, exact)
    assert budget < 0.8 * bytes_of(task, Plan())
    found = pick(task, budget, 6, prior=with_baseline(), device="cpu")
    assert found.plan is not None and not found.plan.rules and found.plan.recompute
    assert [plan for plan, _ in ran][-1] == found.plan and "nothing is quantized under this plan" in found.reason
    assert found.frontier.best(budget) == found.point
    others = [point.mean for point in found.frontier.points if point.plan.rules and point.fits]
    assert others, "there was something else to take"


def test_a_quicker_plan_that_is_as_accurate_is_still_taken(tried: Any) -> None:
    tried(lambda plan, seed: 0.3)
    task, exact = make_task(lambda seed: DeepLayers()), Plan().recomputing("layers.*")
    budget, seconds = bytes_of(task, exact), lambda plan: 0.02 if plan.recompute else 0.01
    found = pick(task, budget, 6, prior=with_baseline(), device="cpu", step_seconds=seconds)
    assert found.plan is not None and found.plan.rules and not found.plan.recompute


def test_runs_of_a_plan_that_quantizes_nothing_are_runs_of_the_baseline(tried: Any) -> None:
    tried(lambda plan, seed: 0.15)
    task = make_task(lambda seed: DeepLayers())
    found = pick(task, bytes_of(task, Plan().recomputing("layers.*")), 1, prior=with_baseline(), device="cpu")
    exact = {point.mean for point in found.frontier.points if not point.plan.rules}
    assert len(exact) == 1 and len([point for point in found.frontier.points if not point.plan.rules]) > 1
