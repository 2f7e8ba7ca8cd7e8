"""A `Guard` limits rounding errors and gradients during training; this file has its settings and its state from step to step.

    guard = Guard(trace, budget="6GiB", sensitivities=probe(model, batch, trace))
    session = apply(plan, model, guard=guard)

A guard skips a step whose gradients are not finite or far larger than usual. It raises slots whose rounding error became too large by one
level (to the next more precise format); if that exceeds the budget, the least sensitive other slots go down by one level. `session.actions`
lists all of it. `guard_steps.py` makes these decisions before each optimizer step, from what `session/signals.py` measures.

`GuardState` is the state of a guard; it is part of checkpoints, so that a resumed run behaves like an uninterrupted one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import isfinite
from textwrap import shorten
from typing import Any

import torch
from torch import Tensor, nn

from paredown.assignment.assignment_problem import ladder_of
from paredown.assignment.sensitivity import Sensitivities
from paredown.errors import ApplyError, BudgetError
from paredown.plan.footprint import footprint
from paredown.plan.plan import Plan
from paredown.plan.trace import Trace
from paredown.roles import Role
from paredown.session.signals import SlotSignal
from paredown.sizes import parse_bytes, say_bytes, say_bytes_twice

EVERY = 16  # forward passes between two measurements of a slot
MIN_NORMS = 10  # gradient norms that must be seen before a norm counts as unusual
MAX_RATIO = 2.0  # a larger norm enters the usual norm (a moving average) as this multiple of it
DECAY = 0.9  # weight of the previous value in the usual norm and the usual error


@dataclass(frozen=True)
class Limits:
    """The limits on rounding errors and gradients at which a `Guard` acts.

    Errors are squared and relative: |x - decoded|^2 / |x|^2. To raise a slot (a saved tensor) is to give it the next more precise format,
    to lower it the next less precise format.

    `every`: the error of a slot is measured in one of this many forward passes.
    `error`: a slot with a larger error is raised.
    `jump`: a slot is raised if its error grows by this factor, or its largest value if its format has no scales, or if its largest value
    grows by the square root of this factor and backward exponentiates it.
    `gradient_jump`: a step is skipped if its gradient norm is this many times the usual norm.
    `hold`: a raised slot is not lowered again for this many steps.
    `patience`: after this many skipped steps in a row with finite gradients, steps are no longer skipped for a large norm.
    `levels`: the formats that activations may have, the most precise first; None for unmodified, bf16, and 8, 4 and 2 bits.
    """

    every: int = EVERY
    error: float = 4.0  # errors of 2-bit formats are 0.04 to 1.4, depending on the distribution of values
    jump: float = 16.0
    gradient_jump: float = 30.0
    hold: int = 1000
    patience: int = 4
    levels: tuple[str | None, ...] | None = None

    def __post_init__(self) -> None:
        for name in ("every", "hold", "patience"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ApplyError(f"Limits: {name} is {value!r}; it must be an integer of at least 1.")
        for name in ("error", "jump", "gradient_jump"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not value > (1 if name != "error" else 0):
                raise ApplyError(f"Limits: {name} is {value!r}; it must be a number above {1 if name != 'error' else 0}.")
        if self.levels is not None:
            ladder_of(self.levels)  # raises for what is no format


@dataclass(frozen=True)
class Guard:
    """The settings of a guard, which raises the precision of saved tensors whose rounding error grows in training.

    Pass it to `apply`; it needs the trace of the step that is trained. `budget` limits the predicted peak; None: the predicted peak of the
    applied plan. `sensitivities` (the result of `probe`: the gradient error that rounding each saved tensor causes) decide which tensors
    get less precise formats so that others fit; if None, the table of roles decides. With a `batch` (and its `loss`, as for `probe`),
    sensitivities are measured after 10, 30, 100, 300, ... steps, and formats are chosen anew. A part of a batch suffices, and takes less
    memory, since a probe packs nothing.
    """

    trace: Trace
    budget: int | str | None = None
    sensitivities: Sensitivities | None = None
    limits: Limits = field(default_factory=Limits)
    batch: Any = None
    loss: Callable[..., Tensor] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.trace, Trace):
            raise ApplyError(
                f"a guard needs the Trace of the step, which has the bytes of each slot, not {type(self.trace).__name__}: "
                "Guard(trace_step(model, batch), ...)."
            )
        for name, kind in (("sensitivities", Sensitivities | None), ("limits", Limits)):
            if not isinstance(getattr(self, name), kind):
                wanted = "a Limits" if name == "limits" else "what probe(model, batch, trace) returns, or None"
                raise ApplyError(f"Guard: {name} is of type {type(getattr(self, name)).__name__}; it must be {wanted}.")
        if self.budget is not None:
            parse_bytes(self.budget, whole=1)  # raises here for what is no size, rather than in apply

    def budget_for(self, plan: Plan) -> int:
        """Return the largest predicted peak in bytes that the guard allows; raise BudgetError if `plan` exceeds it."""
        peak = footprint(self.trace, plan).peak_bytes
        if self.budget is None:
            return peak
        is_share = isinstance(self.budget, str) and "%" in self.budget
        allowed = parse_bytes(self.budget, whole=footprint(self.trace).peak_bytes if is_share else None)
        if peak > allowed:
            raise BudgetError(
                f"the plan needs {say_bytes(peak)} of a budget of {say_bytes_twice(allowed)}, before a guard changes anything. "
                "Make a plan for that budget first, such as with assign(trace, budget), or leave the guard's budget out."
            )
        return allowed


def checked_guard(guard: Any, plan: Plan) -> Guard | None:
    """Return `guard`, a Guard whose budget `plan` fits, or None; raise ApplyError or BudgetError otherwise."""
    if isinstance(guard, Guard):
        guard.budget_for(plan)
    if guard is None or isinstance(guard, Guard):
        return guard
    raise ApplyError(
        f"guard is {shorten(repr(guard), 60)}: pass Guard(trace), where trace = trace_step(model, batch, ...) is of the step that is "
        "trained. The trace has the bytes of each slot, without which a budget cannot be kept."
    )


def check_model(trace: Trace, model: nn.Module) -> None:
    """Raise ApplyError if `trace` is of another model, so that a guard could not measure the tensors of `model`."""
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    for slot in trace.of(Role.WEIGHT):
        if not slot.stays and shapes.get(slot.name) != slot.shape:
            here = f"{shapes[slot.name]} in this one" if slot.name in shapes else f"this one, a {type(model).__name__}, has none"
            raise ApplyError(
                f"the guard's trace is of another model, a {trace.model}: {slot.name!r} is {slot.shape} there, and {here}. "
                "Trace the model that is trained: Guard(trace_step(model, batch, ...))."
            )


def probe_steps() -> Iterator[int]:
    """Yield the numbers of the training steps after which the guard measures sensitivities: 10, 30, 100, 300, ...

    >>> from itertools import islice
    >>> list(islice(probe_steps(), 6))
    [10, 30, 100, 300, 1000, 3000]
    """
    step = 10
    while True:
        yield step
        yield 3 * step
        step *= 10


def total_norm(gradients: Sequence[Tensor]) -> Tensor | None:
    """Return the norm of all gradients together (infinity or NaN if a value is); None if there are none."""
    if not gradients:
        return None
    norm = torch.nn.utils.get_total_norm(gradients)
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm  # type: ignore[operator]


# --- state from step to step ------------------------------------------------------------------------------------------------------


@dataclass
class OptimizerSteps:
    """Statistics of the steps of one optimizer: gradient norms, skipped steps, and raised formats.

    A guard decides by them whether a gradient norm is unusual. `norm` is a moving average of `num_norms` gradient norms. `left_out` counts
    the steps in a row that were skipped last. `suspicions` counts how often, since the last step that was not skipped, saved tensors got a
    more precise format though their errors were small.
    """

    norm: float = 0.0
    num_norms: int = 0
    left_out: int = 0
    suspicions: int = 0

    def usual_norm(self) -> float | None:
        """Return the moving average of gradient norms; None until MIN_NORMS of them were added."""
        return self.norm if self.num_norms >= MIN_NORMS else None

    def update(self, norm: float | None, *, is_taken: bool) -> None:
        """Count one step of the optimizer; if it was not skipped, add its gradient norm (None: not measured)."""
        self.left_out = 0 if is_taken else self.left_out + 1
        if is_taken:
            self.suspicions = 0
        if is_taken and norm is not None:
            self.norm = _mixed(self.norm, min(norm, MAX_RATIO * self.norm)) if self.num_norms else norm
            self.num_norms += 1


@dataclass
class GuardState:
    """All that a guard remembers from one training step to the next; its fields have the same names in JSON.

    A slot is a saved tensor; to raise it is to give it a more precise format. `looks` has for each slot the moving average of its rounding
    error, and its largest value when it got its current format. `taken` has statistics of each optimizer, by the name of its first
    parameter, and `done` the optimizers that have run in this step. `held_until` has the step until which a slot is not lowered,
    `refused_until` that until which it is not raised because the budget did not allow it.
    """

    steps: int = 0
    done: list[str] = field(default_factory=list[str])
    taken: dict[str, OptimizerSteps] = field(default_factory=dict[str, OptimizerSteps])
    looks: dict[str, SlotSignal] = field(default_factory=dict[str, SlotSignal])
    held_until: dict[str, int] = field(default_factory=dict[str, int])
    refused_until: dict[str, int] = field(default_factory=dict[str, int])

    def begin(self, optimizer: str) -> bool:
        """Count a call of `optimizer.step()`, and return whether it begins a new training step."""
        is_new = not self.done or optimizer in self.done
        self.steps += is_new
        self.done = [optimizer] if is_new else [*self.done, optimizer]
        return is_new

    def is_held(self, name: str) -> bool:
        """Return whether saved tensor `name` must keep its bits: it got more at most `Limits.hold` steps ago."""
        return self.held_until.get(name, -1) > self.steps

    def is_refused(self, name: str) -> bool:
        """Return whether, in the last `Limits.hold` steps, the budget did not allow saved tensor `name` more bits."""
        return self.refused_until.get(name, -1) > self.steps

    def is_probe_due(self) -> bool:
        """Return whether sensitivities must be measured after this step: the 10th, 30th, 100th, 300th, ..."""
        return self.steps == next(step for step in probe_steps() if step >= self.steps)

    def update(self, measured: Mapping[str, SlotSignal]) -> None:
        """Add measured rounding errors to the moving average of each saved tensor; leave out infinity and NaN."""
        for name, signal in measured.items():
            if isfinite(signal.error) and isfinite(signal.largest):
                before = self.looks.get(name)
                self.looks[name] = signal if before is None else SlotSignal(_mixed(before.error, signal.error), before.largest)

    def forget(self, name: str, *, held_until: int | None) -> None:
        """Drop the measurements of saved tensor `name`, whose format changed.

        Until the step `held_until` the guard must not give it fewer bits; with None, it may at once.
        """
        self.looks.pop(name, None)
        if held_until is not None:
            self.held_until[name] = held_until

    def to_json(self) -> dict[str, Any]:
        """Return the state as a JSON value, with the names of the fields."""
        looks = {name: [look.error, look.largest] for name, look in self.looks.items()}
        return {**asdict(self), "looks": looks}

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> GuardState:
        """Return the state that `to_json` wrote as `value`."""
        looks = {name: SlotSignal(*pair) for name, pair in value["looks"].items()}
        taken = {name: OptimizerSteps(**row) for name, row in value["taken"].items()}
        until = {name: dict(value[name]) for name in ("held_until", "refused_until")}
        parts: dict[str, Any] = {**value, "done": list(value["done"]), "taken": taken, "looks": looks, **until}
        return GuardState(**parts)


def _mixed(average: float, value: float) -> float:
    return DECAY * average + (1 - DECAY) * value
