"""Step times: medians of a clock set by hand, which steps count, and which trials have one. No test judges a real time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from paredown import Plan, evaluate
from paredown.study.sweeps import measurement
from paredown.study.sweeps.measurement import Runner
from paredown.study.tasks import evaluate as evaluation
from paredown.study.tasks.evaluate import FEWEST_STEPS, MOST_STEPS, NUM_WARM_UP, StepTimer, baseline_step_seconds
from paredown.study.tasks.trial import Status, Trial
from tests.study.tasks.made import make_task as small_task

CPU = torch.device("cpu")


def timed(ends: list[float]) -> StepTimer:
    """A timer whose clock shows `ends` after the warm-up."""
    timer = StepTimer(CPU, clock=iter(ends).__next__)
    for step in range(1, NUM_WARM_UP + len(ends)):
        timer.after(step)
    return timer


def test_warm_up_and_outliers_do_not_count() -> None:
    """The clock is read first at the end of the warm-up; one step of 100 seconds does not move the median."""
    assert timed([0.0, 1.0, 2.0, 102.0, 103.0, 104.0]).seconds() == 1.0


def test_too_few_steps_have_no_time() -> None:
    assert timed([float(i) for i in range(FEWEST_STEPS)]).seconds() is None
    assert timed([float(i) for i in range(FEWEST_STEPS + 1)]).seconds() == 1.0


def test_of_a_long_run_the_last_steps_count() -> None:
    """Ten slow steps, then more fast ones than are kept."""
    ends = [float(i) for i in range(10)]
    for _ in range(MOST_STEPS + 1):
        ends.append(ends[-1] + 0.25)
    assert timed(ends).seconds() == 0.25


@pytest.mark.parametrize(
    ("steps", "mode", "is_timed"), [(12, "store", True), (NUM_WARM_UP + 2, "store", False), (12, "simulate", False)]
)
def test_trials_of_enough_stored_steps_have_one(steps: int, mode: str, is_timed: bool) -> None:
    trial = evaluate(small_task(steps=steps), Plan.uniform(activation="int8/64@bf16"), device="cpu", mode=mode)
    assert (trial.step_seconds is not None) is is_timed and trial.baseline_step_seconds is None
    assert Trial.from_json(trial.to_json()) == trial


def test_old_trials_can_be_read() -> None:
    value = Trial("digits", Plan(), 0, Status.DONE, error=0.1).to_json()
    old = {name: part for name, part in value.items() if "step" not in name}
    assert Trial.from_json(old).step_seconds is None and len(old) == len(value) - 2


def test_ratios() -> None:
    trial = Trial("digits", Plan(), 0, Status.DONE, step_seconds=0.3, baseline_step_seconds=0.2)
    assert trial.step_ratio == pytest.approx(1.5) and "step 1.50x the baseline's, 300 ms" in repr(trial)
    assert replace(trial, baseline_step_seconds=0.0).step_ratio is None
    assert replace(trial, step_seconds=None).step_ratio is None


def test_the_unmodified_step_is_timed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the first trial with a time; a trial of the baseline is its own measurement."""
    seconds = {Plan().key: 0.2}
    timings: list[int] = []

    def made_up(task: Any, plan: Plan, *, seed: int, **_: Any) -> Trial:
        return Trial("t", plan, seed, Status.DONE, error=0.1, step_seconds=None if seed == 9 else seconds.get(plan.key, 0.3))

    monkeypatch.setattr(measurement, "evaluate", made_up)
    monkeypatch.setattr(measurement, "baseline_step_seconds", lambda *_: timings.append(1) or 0.25)
    run = Runner(small_task())
    assert run(Plan.preset("lpmm"), 9).baseline_step_seconds is None and not timings, "no time, nothing to compare it with"
    assert [run(Plan.preset("lpmm"), seed).step_ratio for seed in (0, 1)] == pytest.approx([1.2, 1.2]) and len(timings) == 1
    assert Runner(small_task())(Plan(), 0).step_ratio == 1.0 and len(timings) == 1


def test_a_baseline_without_memory_has_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    task = small_task()
    before = torch.random.get_rng_state()
    assert baseline_step_seconds(task, "cpu") is not None
    assert torch.equal(before, torch.random.get_rng_state()), "random numbers of the caller are the same"
    monkeypatch.setattr(evaluation.training.Loop, "step", fail)
    assert baseline_step_seconds(task, "cpu") is None
    monkeypatch.setattr(evaluation.training.Loop, "step", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        baseline_step_seconds(task, "cpu")
