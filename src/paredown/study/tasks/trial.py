"""A trial: one measured run of a plan on a task with a seed. A failed run is a trial too, with its status and reason.

>>> trial = Trial("digits", Plan.preset("lpmm"), 0, Status.DONE, error=0.025, loss=0.11, measured_peak_bytes=2**20, seconds=3.5)
>>> trial
Trial(digits, seed 0, 4 rules: done, error 0.0250, loss 0.1100, peak 1.00 MiB measured, 3.5 s)
>>> Trial.from_json(trial.to_json()) == trial
True
>>> Trial("digits", Plan(), 1, Status.DIVERGED, reason="the loss is nan at step 12 of 400")
Trial(digits, seed 1, no rules: diverged: the loss is nan at step 12 of 400)
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from statistics import median, stdev
from typing import Any

from paredown import serial
from paredown.errors import PlanError
from paredown.plan.plan import Plan
from paredown.sizes import say_bytes

VERSION = 1  # of the JSON


class Status(str, Enum):
    """Says how a trial, one training of a task under a plan, ended."""

    DONE = "done"
    DIVERGED = "diverged"
    STOPPED = "stopped"  # stopped early: no better than random guessing
    OUT_OF_MEMORY = "out_of_memory"
    KILLED = "killed"
    FAILED = "failed"  # an exception was raised
    INFEASIBLE = "infeasible"  # nothing ran: no plan for the task fits the budget; the trial's plan has no rules


@dataclass(frozen=True, repr=False)
class Trial:
    """Holds the result of training a task under a plan from one seed: error, loss, memory, times and status.

    None means unknown. Numbers are finite; `reason` describes a loss that is not.
    """

    task: str  # its name
    plan: Plan
    seed: int
    status: Status
    error: float | None = None  # the task's metric as an error: the share of wrong answers, or the loss of a text
    loss: float | None = None  # mean over the test split
    predicted_peak_bytes: int | None = None
    measured_peak_bytes: int | None = None
    seconds: float | None = None  # of the whole run
    step_seconds: float | None = None  # median of a training step (`StepTimer` in evaluate.py)
    baseline_step_seconds: float | None = None  # median of the unmodified step on the same machine
    curve: tuple[tuple[int, float], ...] = ()  # (step, training loss), steps from 1
    reason: str = ""  # why the status is not DONE
    device: str = ""
    versions: Mapping[str, str] = field(default_factory=dict[str, str], hash=False)
    commit: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.plan, Plan):
            raise PlanError(f"the plan of a trial is a Plan, not {type(self.plan).__name__}.")
        if not isinstance(self.status, str) or self.status not in tuple(Status):
            raise PlanError(
                f"status {serial.brief(self.status)} is unknown. Allowed: {', '.join(status.value for status in Status)}."
            )
        object.__setattr__(self, "status", Status(self.status))
        serial.check_fields(self, CHECKS, "trial", PlanError)
        object.__setattr__(self, "curve", tuple((int(step), float(loss)) for step, loss in self.curve))
        object.__setattr__(self, "versions", dict(self.versions))

    def __repr__(self) -> str:
        num_rules = len(self.plan.rules)
        rules = "no rules" if not num_rules else f"{num_rules} rule{'s' * (num_rules > 1)}"
        rules += ", activation checkpointing" if self.plan.recompute else ""
        outcome = f"{self.status.value}: {self.reason}" if self.reason else self.status.value
        return f"Trial({self.task}, seed {self.seed}, {rules}: {', '.join([outcome, *self._numbers()])})"

    @property
    def step_ratio(self) -> float | None:
        """Return the step time divided by that of the unmodified step on the same machine; None if one of them is unknown."""
        if self.step_seconds is None or not self.baseline_step_seconds:
            return None
        return self.step_seconds / self.baseline_step_seconds

    def _numbers(self) -> list[str]:
        texts: list[str] = []
        texts += [f"error {self.error:.4f}"] if self.error is not None else []
        texts += [f"loss {self.loss:.4f}"] if self.loss is not None else []
        texts += [f"peak {say_bytes(self.measured_peak_bytes)} measured"] if self.measured_peak_bytes is not None else []
        texts += [f"{say_bytes(self.predicted_peak_bytes)} predicted"] if self.predicted_peak_bytes is not None else []
        texts += [f"step {say_step(self.step_seconds, self.step_ratio)}"] if self.step_seconds is not None else []
        texts += [f"{self.seconds:.1f} s"] if self.seconds is not None else []
        return texts

    def to_json(self) -> dict[str, Any]:
        """Return the trial as a dict for JSON: a version, and all fields by name."""
        value: dict[str, Any] = {"version": VERSION} | {name: getattr(self, name) for name in NAMES}
        curve = [[step, loss] for step, loss in self.curve]
        return value | {"plan": self.plan.to_json(), "status": self.status.value, "curve": curve, "versions": dict(self.versions)}

    @staticmethod
    def from_json(value: Any) -> Trial:
        """Return the trial whose `to_json` is `value`; PlanError if `value` is not valid."""
        rest = serial.object_parts(value, "trial", NAMES, REQUIRED, VERSION, PlanError)
        rest["plan"] = Plan.from_json(rest["plan"])
        return Trial(**rest)


NAMES = tuple(row.name for row in fields(Trial))
REQUIRED = {"version", "task", "plan", "seed", "status"}


def _are_texts(value: Any) -> bool:
    return isinstance(value, Mapping) and all(map(serial.is_text, (*value, *value.values())))


def _is_curve(value: Any) -> bool:
    pairs = isinstance(value, list | tuple) and all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in value)
    return pairs and all(serial.is_whole(step) and serial.is_number(loss) for step, loss in value)


CHECKS: dict[str, serial.Check] = {
    "task": serial.TEXT,
    "seed": serial.WHOLE,
    **dict.fromkeys(("error", "loss", "seconds", "step_seconds", "baseline_step_seconds"), serial.or_none(serial.NUMBER)),
    **dict.fromkeys(("predicted_peak_bytes", "measured_peak_bytes"), serial.or_none(serial.COUNT)),
    "curve": serial.Check(_is_curve, "pairs of a step and a finite loss"),
    **dict.fromkeys(("reason", "device", "commit"), serial.TEXT),
    "versions": serial.Check(_are_texts, "a mapping of texts"),
}


def say_step(seconds: float | None, ratio: float | None) -> str:
    """Return a step time as text: relative to the baseline's if that is known, and in milliseconds.

    >>> say_step(0.01234, 1.0821), say_step(0.5, None), say_step(None, 1.25)
    ("1.08x the baseline's, 12.3 ms", '500 ms', "1.25x the baseline's")
    """
    parts = [] if ratio is None else [f"{ratio:.2f}x the baseline's"]
    return ", ".join([*parts, *([] if seconds is None else [f"{1000 * seconds:.3g} ms"])])


def standard_error(values: Sequence[float]) -> float | None:
    """Return the standard error of the mean of `values`; None for fewer than two.

    >>> standard_error([1.0, 3.0]), standard_error([1.0])
    (1.0, None)
    """
    return stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None


def with_baseline_steps(trials: Iterable[tuple[str, Trial]]) -> list[Trial]:
    """Return the trials of pairs (task, trial), with the baseline's step time added where it is known for task and device.

    A trial without the baseline's step time gets the median over the trials of the baseline on its task and device.
    """
    pairs = list(trials)
    seconds: dict[tuple[str, str], list[float]] = {}
    for task, trial in pairs:
        if trial.plan.changes_nothing and trial.step_seconds is not None:
            seconds.setdefault((task, trial.device), []).append(trial.step_seconds)
    known = {key: median(values) for key, values in seconds.items()}
    return [
        trial if trial.baseline_step_seconds is not None else replace(trial, baseline_step_seconds=known.get((task, trial.device)))
        for task, trial in pairs
    ]
