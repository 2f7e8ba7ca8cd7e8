"""Train a task with and without a plan side by side, with the same seeds and alternating steps: a busy machine slows both down alike.

    for each seed: Training.start(baseline), Training.start(plan); then a step of one, a step of the other, ...

The seconds of a step are CPU seconds of the thread that trains, since waiting for a core that other programs use is no cost of a plan.
The error of a plan minus the baseline's is a mean over pairs of answers: both answers are to the same test example, from the same seed.

>>> baseline = torch.tensor([[True, False, False, False], [True, False, False, False]])  # 2 seeds, 4 test examples; True: wrong
>>> plan = torch.tensor([[True, True, False, False], [True, False, False, False]])
>>> difference, standard_error = paired_difference(baseline, plan)
>>> difference, round(standard_error, 3)
(0.125, 0.125)
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from statistics import median

import torch
from torch import Tensor

from paredown.codec.cpu import load_loops
from paredown.plan.plan import Plan
from paredown.study.tasks.data import Pair
from paredown.study.tasks.evaluate import NUM_MEASURED_STEPS, MemoryMeter, curve_of, empty_trial, make_setting, seeded
from paredown.study.tasks.task import Task
from paredown.study.tasks.training import Loop, LossCurve, judge, task_learning_rate, with_scores
from paredown.study.tasks.trial import Trial


@dataclass(eq=False)
class Training:
    """A training that is advanced one step at a time, so that two can take turns.

    `start` takes the first NUM_MEASURED_STEPS steps, to measure their peak memory; each call of `step` takes one more.
    """

    loop: Loop
    peak_bytes: int | None
    curve: LossCurve
    batches: Iterator[Pair]
    step_seconds: list[float] = field(default_factory=list[float])

    @staticmethod
    def start(task: Task, plan: Plan, *, seed: int, sessions: ExitStack) -> Training:
        """Start a training on the CPU and take the steps whose memory is measured; `sessions` keeps the plan applied."""
        setting = make_setting(task, plan, seed=seed, device="cpu")
        batches = task.data.batches(task.batch, seed=seed, device=setting.device)
        curve, meter = curve_of(task), MemoryMeter(setting.device)
        load_loops()
        with seeded(setting):
            meter.start()
            try:
                model = setting.placed_model()
                loop = Loop(setting, model, sessions.enter_context(setting.session(model)))
                for step, (x, answers) in zip(range(NUM_MEASURED_STEPS), batches, strict=False):
                    curve.add(loop.step(x, answers, task_learning_rate(task, step)))
            finally:
                meter.stop()
        return Training(loop, meter.bytes, curve, batches)

    @property
    def num_steps_left(self) -> int:
        """Return the number of steps until the last one of the task."""
        return self.loop.setting.task.steps - NUM_MEASURED_STEPS - len(self.step_seconds)

    def step(self) -> float:
        """Train on the next batch, record the CPU seconds that it takes, and return the newest loss of the curve (NaN if none)."""
        task = self.loop.setting.task
        lr, (x, answers) = task_learning_rate(task, task.steps - self.num_steps_left), next(self.batches)
        begun = time.thread_time()
        loss = self.loop.step(x, answers, lr)
        self.step_seconds.append(time.thread_time() - begun)
        self.curve.add(loss)
        return self.curve.points[-1][1] if self.curve.points else math.nan

    def trial(self, baseline_step_seconds: float | None) -> Trial:
        """Return the training's results as a Trial, evaluated on the test split; its step time is the median CPU time of a step."""
        head = replace(
            empty_trial(self.loop.setting),
            measured_peak_bytes=self.peak_bytes,
            curve=tuple(self.curve.points),
            step_seconds=self.median_seconds,
            baseline_step_seconds=baseline_step_seconds,
            seconds=sum(self.step_seconds),
        )
        if self.curve.verdict is not None:
            return replace(head, status=self.curve.verdict.status, reason=self.curve.verdict.reason)
        return with_scores(head, *judge(self.loop))

    @property
    def median_seconds(self) -> float | None:
        """Return the median CPU seconds of a step; None before the first one."""
        return median(self.step_seconds) if self.step_seconds else None

    @torch.no_grad()
    def wrong(self) -> Tensor:
        """Return which test examples are classified wrongly, as booleans."""
        task, setting = self.loop.setting.task, self.loop.setting
        self.loop.model.eval()
        tests = task.data.tests(task.batch, device=setting.device)
        return torch.cat([self.loop.model(x).argmax(-1) != answers for x, answers in tests])  # (num_examples,)


def paired_difference(baseline: Tensor, plan: Tensor) -> tuple[float, float]:
    """Return how much more often the plan is wrong than the baseline, as a share of all answers, and its standard error.

    Each argument has a row of booleans for each seed (True: wrong). The standard error is the larger one of two estimates. The first, from
    one mean per seed, is too small if a few seeds happen to agree. The second, from all pairs of answers, leaves out what a seed changes
    for all answers.
    """
    pairs = plan.double() - baseline.double()  # (seeds, examples): 1, 0 or -1
    by_seed = pairs.mean(1)
    errors = [float(values.std()) / math.sqrt(values.numel()) for values in (by_seed, pairs.flatten()) if values.numel() > 1]
    return float(pairs.mean()), max(errors)
