"""`pick(task, budget)` finds the plan to train a task with within a budget, from a prior and a few trials.

    candidates and their bytes  ->  posterior of their errors  ->  trials chosen by acquisition  ->  Pareto front and the picked plan

Only plans within the budget are tried. Acquisition chooses the trials that are worth most to the choice (study/pick/posterior.py); the
last trial runs the plan that is about to be picked, if it was not tried yet. With `evaluations=0` the prior alone decides.

>>> from paredown.study.priors.prior_files import made_up_prior
>>> picked = pick("digits#model=mlp,steps=30", "80%", evaluations=0, prior=made_up_prior(), device="cpu")
>>> picked.plan is not None, picked.point.predicted_bytes <= picked.budget_bytes, picked.trials
(True, True, ())
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from paredown.errors import CalibrationError, PlanError, TaskError
from paredown.plan.calibration import find_calibration
from paredown.plan.footprint import peak_of
from paredown.plan.plan import Plan
from paredown.plan.step_time import predict_step
from paredown.plan.trace import Trace
from paredown.roles import Role
from paredown.serial import SUMMED
from paredown.simulate.outline import Outline
from paredown.simulate.peppp import plan_bytes
from paredown.sizes import parse_bytes
from paredown.study.pick.answer import Picked
from paredown.study.pick.candidates import TaskStep, candidates
from paredown.study.pick.pick_loop import PickLoop
from paredown.study.pick.task_prior import TaskPrior
from paredown.study.priors import prior_files as priors
from paredown.study.priors.prior_data import PriorData, random_guess_error
from paredown.study.sweeps.measurement import Measurer, Runner, TrialCallback
from paredown.study.tasks.evaluate import device_name, find_device
from paredown.study.tasks.lookup import find_task
from paredown.study.tasks.task import Task
from paredown.study.tasks.task_trace import outline_task, trace_task

BUDGET = "40%"
PredictedSeconds = Mapping[Plan, float] | Callable[[Plan], float | None]
PRIOR_MODES = {"store": "store", "simulate": "simulate", "peppp": "simulate"}  # mode of `pick` -> mode of the prior that it reads


def pick(
    task: Task | str,
    budget: int | str | None = None,
    evaluations: int = 8,
    *,
    max_error_increase: float | None = None,
    confidence: float = 0.9,
    prior: str | os.PathLike[str] | PriorData | None = None,
    store: str | Path | None = None,
    mode: str = "store",
    seed: int = 0,
    device: Any = None,
    step_seconds: PredictedSeconds | None = None,
    progress: TrialCallback | None = None,
) -> Picked:
    """Return the plan of least expected error whose predicted peak is within `budget`, after at most `evaluations` trials.

    Of equally accurate plans (mean errors at most half a standard deviation of a run apart) it is the quickest.

    With `max_error_increase` it is the smallest plan whose mean error is, with the probability `confidence`, at most that much above the
    baseline's, in the task's metric: 0.01 is one percentage point of error. The budget is then 100 % unless one is given.
    `prior`: the name or file of a prior, or its data; without one, all priors of this mode are joined. `store`: path or URL of the
    database that keeps the trials; with one, an interrupted pick continues. `seed`: the seed of each plan's first trial. `step_seconds`:
    predicted step times, a mapping from plans to seconds or a function of a plan; without it, the cost model predicts them where the
    device was calibrated (`paredown calibrate`). Trials measure the step times of their plans.
    `progress` is called with (trials done, most trials, a sentence).
    """
    start = time.perf_counter()
    task = _checked_task(task, evaluations, mode)
    _check_margin(max_error_increase, confidence)
    if not isinstance(prior, PriorData):
        prior = priors.known_prior(PRIOR_MODES[mode]) if prior is None else priors.load(prior)
    torch_device = find_device(device)
    step = task_step(task, torch_device.type, mode, prior)
    limit = budget if budget is not None else BUDGET if max_error_increase is None else "100%"
    budget_bytes = parse_bytes(limit, whole=step.full_bytes)
    margin = "" if max_error_increase is None else f", error increase {max_error_increase:g} at {confidence:g}"
    sweep = f"pick {budget_bytes} bytes{margin}"  # an interrupted pick continues under this name
    source = Measurer(Runner(task, mode, None if device is None else str(torch_device)), store, sweep)
    try:
        own_trials, other_trials = source.known()
        tried_plans = [(f"trial of {trial.task}", trial.plan) for trial in (*own_trials, *other_trials)]
        rows = candidates(step, prior, BUDGET if budget is None else budget, tried_plans)
        loop = PickLoop(
            task=task.name,
            metric=task.metric if isinstance(task.metric, str) else getattr(task.metric, "__name__", "metric"),
            unit=_random_guess_error(task),
            budget_bytes=budget_bytes,
            step=step,
            candidates=rows,
            task_prior=TaskPrior.of(prior),
            device=device_name(torch_device),
            max_error_increase=max_error_increase,
            confidence=confidence,
            predict_seconds=_predictor(
                _calibrated_seconds(task, torch_device.type, mode) if step_seconds is None else step_seconds
            ),
        )
        loop.learn(own_trials, other_trials)
        loop.search(source, evaluations, seed=seed, progress=progress)
    finally:
        source.close()
    return loop.answer(time.perf_counter() - start)


def _calibrated_seconds(task: Task, device: str, mode: str) -> Callable[[Plan], float | None] | None:
    """Return a function from plans to step seconds, predicted from a calibration; None without one, or if mode is not "store"."""
    calibration = find_calibration(device)[0] if mode == "store" else None
    if calibration is None:
        return None

    def predicted(plan: Plan) -> float | None:
        try:
            return predict_step(trace_task(task, plan, device), plan, calibration=calibration).seconds
        except CalibrationError:  # this step, or a format of this plan, was not measured
            return None

    return predicted


def _predictor(step_seconds: PredictedSeconds | None) -> Callable[[Plan], float | None] | None:
    """Return `step_seconds`, a mapping or a function, as a function from plans to seconds; plans with equal rules ask once."""
    if step_seconds is None:
        return None
    by_key = {plan.key: seconds for plan, seconds in step_seconds.items()} if isinstance(step_seconds, Mapping) else {}
    known: dict[object, float | None] = {}

    def predict(plan: Plan) -> float | None:
        if plan.key not in known:
            seconds = step_seconds(plan) if callable(step_seconds) else by_key.get(plan.key)
            if seconds is not None and not (SUMMED.holds(seconds) and seconds > 0):
                raise PlanError(f"the predicted step time of {plan} is {seconds!r}; it is a number of seconds above 0, or None.")
            known[plan.key] = seconds
        return known[plan.key]

    return predict


def _checked_task(task: Any, evaluations: Any, mode: Any) -> Task:
    if not isinstance(evaluations, int) or isinstance(evaluations, bool) or evaluations < 0:
        raise TaskError(f"evaluations is {evaluations!r}; it is a whole number from 0 up (0: the prior alone decides).")
    if mode not in PRIOR_MODES:
        raise TaskError(f"mode {mode!r} is unknown. Allowed: {', '.join(PRIOR_MODES)}.")
    task = find_task(task) if isinstance(task, str) else task
    if not isinstance(task, Task):
        raise TaskError(f"pick takes a Task, or its name, and a budget, not {type(task).__name__}.")
    return task


def _check_margin(increase: Any, confidence: Any) -> None:
    if increase is not None and not (SUMMED.holds(increase) and increase >= 0):
        raise TaskError(
            f"max_error_increase is {increase!r}; it is a number from 0 up, in the task's metric: 0.01 is one point of error."
        )
    if not (SUMMED.holds(confidence) and 0.5 < confidence < 1):
        raise TaskError(f"confidence is {confidence!r}; it is a probability above 0.5 and below 1, such as 0.9.")


def _random_guess_error(task: Task) -> float | None:
    if task.metric == "loss":
        return task.blind_loss
    return random_guess_error(task.metric, task.data.num_answers) if isinstance(task.metric, str) else None


def task_step(task: Task, device: str, mode: str, prior_data: PriorData) -> TaskStep:
    """Return the TaskStep that predicts peak bytes of a task's training step under plans.

    In simulate mode, if `prior_data` has PEPPP's configurations, the bytes are those of PEPPP's memory model.
    """

    def trace_of(plan: Plan) -> Trace:
        return trace_task(task, plan, device)

    def bytes_of(plan: Plan) -> int:
        return peak_of(trace_of(plan), plan)

    if mode != "store" and any(row.plan is not None and is_peppp(Plan.from_json(row.plan)) for row in prior_data.plans):
        count_bytes = partial(_peppp_bytes, outline_task(task))
        return TaskStep(count_bytes, None, count_bytes(Plan()))
    return TaskStep(bytes_of, trace_of if mode == "store" else None, bytes_of(Plan()))


def is_peppp(plan: Plan) -> bool:
    """Return whether a plan has the form of PEPPP's configurations: one format for all weights and one for all master weights."""
    return all(plan.find(("*",), role).format is not None for role in (Role.WEIGHT, Role.MASTER))


def _peppp_bytes(outline: Outline, plan: Plan) -> int:
    if not (is_peppp(plan) or plan.changes_nothing):
        raise PlanError("PEPPP counts the memory of its own configurations.")
    plan.check(outline.slots())
    try:
        return int(plan_bytes(outline, plan))
    except IndexError:
        raise PlanError("PEPPP counts the memory of its own network.") from None
