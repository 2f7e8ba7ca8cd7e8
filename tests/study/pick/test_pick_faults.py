"""`pick` when things go wrong: nothing fits, trials that diverge, have no memory or fail, and picks that are interrupted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from paredown import Plan, Trial, pick
from paredown.errors import TaskError
from paredown.study.priors.prior_data import MATRICES
from paredown.study.report.studies import study_of_pick
from paredown.study.sweeps.sweep import DrawnTrial, TrialSpec
from paredown.study.tasks.evaluate import device_name
from paredown.study.tasks.task_trace import formats_state
from paredown.study.tasks.trial import Status
from tests.study.pick.test_pick import PRIOR, as_in_prior, bytes_of, make_task, tried

__all__ = ["tried"]


def test_nothing_fits_is_an_answer(tried: Any) -> None:
    ran = tried()
    task = make_task()
    found = pick(task, "20%", 5, prior=PRIOR, device="cpu")
    assert found.plan is None and found.point is None and not ran
    smallest = found.frontier.points[0]
    assert smallest.predicted_bytes == bytes_of(task, smallest.plan) > found.budget_bytes
    assert found.reason.startswith("no plan of method 'role' fits") and "Largest at the peak:" in found.reason
    again = pick(task, smallest.predicted_bytes, 0, prior=PRIOR, device="cpu")
    assert again.plan is not None, "what is said to be the smallest does fit"


def test_no_budget_at_all(tried: Any) -> None:
    tried()
    assert pick(make_task(), 0, 3, prior=PRIOR, device="cpu").plan is None


def test_trials_that_all_diverge_are_results(tried: Any) -> None:
    tried(lambda plan, seed: {"status": Status.DIVERGED, "error": None, "reason": "the loss is nan at step 3 of 12"})
    found = pick(make_task(), "60%", 4, prior=PRIOR, device="cpu")
    assert found.plan is not None and found.point is not None and all(trial.status is Status.DIVERGED for trial in found.trials)
    assert found.point.mean > 0.5, "of random guessing that has 0.75"
    assert any("diverged: the loss is nan" in note for note in found.notes)


def test_plans_that_diverge_are_not_taken(tried: Any) -> None:
    def rule(plan: Plan, seed: int) -> Any:
        bad = {"status": Status.DIVERGED, "error": None, "reason": "nan"}
        return bad if plan.rules and not formats_state(plan) else as_in_prior(plan, seed)

    tried(rule)
    found = pick(make_task(), "90%", 8, prior=PRIOR, device="cpu")
    assert found.plan is not None and not (found.plan.rules and not formats_state(found.plan))


def test_a_plan_without_memory_is_not_taken(tried: Any) -> None:
    tried()
    first = pick(make_task(), "60%", 1, prior=PRIOR, device="cpu").plan

    def rule(plan: Plan, seed: int) -> Any:
        no_memory = {"status": Status.OUT_OF_MEMORY, "error": None, "reason": "out of memory after 0 of 12 steps"}
        return no_memory if plan == first else as_in_prior(plan, seed)

    ran = tried(rule)
    found = pick(make_task(), "60%", 4, prior=PRIOR, device="cpu")
    assert first in [plan for plan, _ in ran] and found.plan is not None and found.plan != first
    point = next(point for point in found.frontier.points if point.plan == first)
    assert not point.trains and not point.fits and point.measured is None
    assert [plan for plan, _ in ran].count(first) == 1, "it is not tried again"


def test_no_memory_for_any_plan(tried: Any) -> None:
    tried(lambda plan, seed: {"status": Status.OUT_OF_MEMORY, "error": None, "reason": "out of memory after 0 of 12 steps"})
    found = pick(make_task(), "55%", 40, prior=PRIOR, device="cpu")
    assert found.plan is None and "none could be trained within the budget. The last trial: out_of_memory" in found.reason


def test_code_that_always_raises_is_a_sentence() -> None:
    def broken(seed: int) -> Any:
        model = make_task().make_model(seed)
        model.register_forward_hook(lambda *_: 1 / 0)  # type: ignore[arg-type, return-value]
        return model

    with pytest.raises(Exception, match="division by zero"):
        pick(make_task(broken), "60%", 4, prior=PRIOR, device="cpu")


def test_a_plan_that_fails_is_passed_over(tried: Any) -> None:
    tried()
    first = pick(make_task(), "60%", 1, prior=PRIOR, device="cpu").trials[0].plan

    def rule(plan: Plan, seed: int) -> Any:
        if plan == first:
            raise TaskError("no optimizer for this")
        return as_in_prior(plan, seed)

    tried(rule)
    found = pick(make_task(), "60%", 4, prior=PRIOR, device="cpu")
    assert found.plan is not None and found.plan != first
    assert any("failed: TaskError: no optimizer for this" in note for note in found.notes) or first not in {
        t.plan for t in found.trials
    }


def test_every_trial_fails(tried: Any) -> None:
    def rule(plan: Plan, seed: int) -> Any:
        raise RuntimeError("the disk is gone")

    tried(rule)
    with pytest.raises(TaskError, match=r"task 'blobs': 3 trials of 3 failed. RuntimeError: the disk is gone"):
        pick(make_task(), "60%", 6, prior=PRIOR, device="cpu")


@pytest.mark.parametrize(("evaluations", "said"), [(1, "1 trial of 1"), (2, "2 trials of 2")])
def test_few_trials_that_all_fail_are_no_pick(tried: Any, evaluations: int, said: str) -> None:
    def rule(plan: Plan, seed: int) -> Any:
        raise RuntimeError("the disk is gone")

    tried(rule)
    with pytest.raises(TaskError, match=f"task 'blobs': {said} failed. RuntimeError: the disk is gone"):
        pick(make_task(), "60%", evaluations, prior=PRIOR, device="cpu")


def test_only_trials_that_came_to_an_end_are_counted(tried: Any) -> None:
    count = 0

    def rule(plan: Plan, seed: int) -> Any:
        nonlocal count
        count += 1
        if count < 3:
            raise RuntimeError("the disk is gone")
        return as_in_prior(plan, seed)

    tried(rule)
    found = pick(make_task(), "60%", 3, prior=PRIOR, device="cpu")
    assert len(found.trials) == 3 and "after 1 trial " in found.reason
    assert sum("failed: RuntimeError: the disk is gone" in note for note in found.notes) == 2


# --- stores ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("question", [{"budget": "60%"}, {"max_error_increase": 0.05}])
def test_an_interrupted_pick_goes_on(tried: Any, tmp_path: Path, question: dict[str, Any]) -> None:
    pytest.importorskip("sqlalchemy")
    tried()
    options: dict[str, Any] = {"evaluations": 5, "prior": PRIOR, "device": "cpu", **question}
    whole = pick(make_task(), **options)
    assert len(whole.trials) >= 2
    count = 0

    def rule(plan: Plan, seed: int) -> Any:
        nonlocal count
        count += 1
        if count == len(whole.trials):
            raise KeyboardInterrupt
        return as_in_prior(plan, seed)

    tried(rule)
    with pytest.raises(KeyboardInterrupt):
        pick(make_task(), **options, store=tmp_path / "trials.db")
    ran = tried()
    resumed = pick(make_task(), **options, store=tmp_path / "trials.db")
    assert len(ran) == 1, "what was measured is in the store"
    assert resumed.label == whole.label and {t.plan for t in resumed.trials} == {t.plan for t in whole.trials}
    again = tried()
    assert pick(make_task(), **options, store=tmp_path / "trials.db").label == whole.label
    assert not again, "nothing runs twice"


def finished(path: Path, plan: Plan, num: int, ended: dict[str, Any]) -> None:
    """A store with so many trials of a plan, in a sweep of the user's."""
    from paredown.study.sweeps.store import Store
    from paredown.study.sweeps.sweep import EndedTrial

    with Store(path) as store:
        store.add("mine", [DrawnTrial(TrialSpec("blobs", plan, seed), 1.0) for seed in range(num)])
        for claim in store.claim("worker", num):
            store.finish("worker", EndedTrial(claim, Trial("blobs", plan, claim.spec.seed, **ended)))


def test_trials_of_other_sweeps_are_known(tried: Any, tmp_path: Path) -> None:
    """A plan that no prior has, tried in a sweep of the user's, is one to choose from and teaches about the others."""
    pytest.importorskip("sqlalchemy")
    own = Plan.uniform(activation="e4m3fn/32@bf16").set("0.weight", "int8/64@e8m0")
    finished(tmp_path / "trials.db", own, 4, {"status": Status.DONE, "error": 0.001})
    ran = tried()
    found = pick(make_task(), "100%", 0, prior=PRIOR, device="cpu", store=tmp_path / "trials.db")
    assert not ran and found.trials == () and found.point is not None
    assert "after 0 trials of its own and 4 known" in found.reason
    point = next(point for point in found.frontier.points if point.plan == own)
    mark = next(mark for mark in study_of_pick(found).marks if mark.label == point.label)
    assert mark.num_trials == point.num_trials == 4
    assert point.source == "measured" and point.measured == pytest.approx(0.001) and point.mean < 0.1
    before = pick(make_task(), "100%", 0, prior=PRIOR, device="cpu").point
    assert before is not None and 0 <= found.point.mean < before.mean, "predicted errors are not below 0"


@pytest.mark.parametrize("status", [Status.OUT_OF_MEMORY, Status.FAILED, Status.KILLED, Status.DONE])
@pytest.mark.parametrize("is_here", [True, False])
def test_other_sweeps_and_other_devices_block_only_what_has_no_memory_here(
    tried: Any, tmp_path: Path, status: Status, is_here: bool
) -> None:
    pytest.importorskip("sqlalchemy")
    tried()
    first = pick(make_task(), "60%", 0, prior=PRIOR, device="cpu").plan
    assert first is not None
    device = device_name(torch.device("cpu")) if is_here else "another device"
    ended = {"error": 0.001 if status is Status.DONE else None, "measured_peak_bytes": 10**9, "device": device, "reason": "theirs"}
    finished(tmp_path / "trials.db", first, 1, {"status": status, **ended})
    found = pick(make_task(), "60%", 0, prior=PRIOR, device="cpu", store=tmp_path / "trials.db")
    point = next(point for point in found.frontier.points if point.plan == first)
    assert point.trains is not (is_here and status is Status.OUT_OF_MEMORY)
    assert point.measured_bytes == (10**9 if is_here and status is Status.DONE else None), "others had not got so far"
    assert point.measured == (0.001 if status is Status.DONE else None), "errors are known wherever they were measured"


def test_another_budget_knows_and_tries_its_own(tried: Any, tmp_path: Path) -> None:
    pytest.importorskip("sqlalchemy")
    first = tried()
    pick(make_task(), "60%", 3, prior=PRIOR, device="cpu", store=tmp_path / "trials.db")
    second = tried(lambda plan, seed: 0.4)
    found = pick(make_task(), "50%", 3, prior=PRIOR, device="cpu", store=tmp_path / "trials.db")
    assert found.trials and {(plan, seed) for plan, seed in first}.isdisjoint(second), "no plan and seed runs twice"
    measured = {point.plan for point in found.frontier.points if point.source == "measured"}
    assert {plan for plan, _ in first} <= measured, "what was tried for one budget is known for the other"


def test_failed_trials_of_a_store_run_again(tried: Any, tmp_path: Path) -> None:
    pytest.importorskip("sqlalchemy")

    def rule(plan: Plan, seed: int) -> Any:
        raise RuntimeError("the disk is gone")

    tried(rule)
    with pytest.raises(TaskError, match="the disk is gone"):
        pick(make_task(), "60%", 6, prior=PRIOR, device="cpu", store=tmp_path / "trials.db")
    tried()
    assert pick(make_task(), "60%", 2, prior=PRIOR, device="cpu", store=tmp_path / "trials.db").plan is not None


# --- plans that a prior does not tell apart ---------------------------------------------------------------------------


def test_plans_that_a_prior_has_twice_are_one(tried: Any) -> None:
    tried()
    names = (*MATRICES, "runs")
    wide = {name: np.concatenate([getattr(PRIOR, name)] * 2, axis=1) for name in names}
    plans = (*PRIOR.plans, *(replace(row, label=f"{row.label} again") for row in PRIOR.plans))
    found = pick(make_task(), "60%", 3, prior=replace(PRIOR, plans=plans, **wide), device="cpu")
    keys = [point.plan.key for point in found.frontier.points]
    assert len(set(keys)) == len(keys) and found.plan is not None


def test_ties_everywhere_are_called_ties(tried: Any) -> None:
    tried(lambda plan, seed: 0.3 / 0.9 * 0.75)
    found = pick(make_task(), "60%", 2, prior=replace(PRIOR, runs=0 * PRIOR.runs + 0.3), device="cpu")
    fits = sum(point.fits is True for point in found.frontier.points)
    assert len(found.ties) >= fits // 2 and "may be as good" in found.reason
    assert ", ".join(repr(label) for label in found.ties[:3]) in found.reason, "labels with commas are quoted"
