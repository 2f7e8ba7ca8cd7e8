"""`Guard`: what a session may do when rounding goes wrong while a model trains, and from when on it does.

    guard = Guard(trace, budget="6GiB", sensitivities=probe(model, batch, trace))
    session = apply(plan, model, guard=guard)

A guard looks at what is packed and at gradients. A step whose gradients are not finite, or far larger than those before, is left out;
slots whose rounding went wrong are raised by one level, and others, the least sensitive ones, go down by one where the budget would not
hold otherwise. `session.actions` has all of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from textwrap import shorten
from typing import Any

from torch import Tensor, nn

from paredown.errors import ApplyError, BudgetError
from paredown.plan.footprint import footprint
from paredown.plan.plan import Plan
from paredown.plan.record import Trace
from paredown.plan.sizes import parse_bytes, say_bytes
from paredown.roles import Role
from paredown.search.search import ladder_of
from paredown.search.sensitivity import Sensitivities

EVERY = 16


@dataclass(frozen=True)
class Limits:
    """When a guard acts. Errors are squared and relative: |x - decoded|^2 / |x|^2.

    `every`: a slot is looked at in one forward pass of so many. `error`: a slot that loses more than this is raised. `jump`: so is one
    whose error, or whose largest value where that matters (no scale of its own; the root of it where it stands in an exponent), is so many
    times what it was. `gradient_jump`: a step whose gradient norm is so
    many times the usual one is left out. `hold`: for so many steps a slot that was raised is not lowered. `patience`: after so many steps
    in a row were left out for finite gradients, they are taken as they are. `levels`: the formats that activations may get, the best first;
    None for as it is, bf16, and 8, 4 and 2 bits.
    """

    every: int = EVERY
    error: float = 4.0  # 2 bits lose 0.04 to 1.4, by how values are spread
    jump: float = 16.0
    gradient_jump: float = 30.0
    hold: int = 1000
    patience: int = 4
    levels: tuple[str | None, ...] | None = None

    def __post_init__(self) -> None:
        for name in ("every", "hold", "patience"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ApplyError(f"Limits: {name} is {value!r}; it is a whole number from 1 up.")
        for name in ("error", "jump", "gradient_jump"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not value > (1 if name != "error" else 0):
                raise ApplyError(f"Limits: {name} is {value!r}; it is a number above {1 if name != 'error' else 0}.")
        if self.levels is not None:
            ladder_of(self.levels)  # refuses what is no format


@dataclass(frozen=True)
class Guard:
    """The settings of a guard. `budget` None is the predicted peak of the plan that is applied: a guard never takes more.

    `sensitivities` say who pays; without them the role table does. With a `batch` (and its `loss`, as for `probe`; a part of a batch will
    do, as it is not packed) they are measured anew at 10, 30, 100, 300, ... steps, and the plan is settled anew.
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
                f"a guard needs the trace of the step, to know what a slot takes: Guard(trace_step(model, batch), ...), not "
                f"{type(self.trace).__name__}."
            )
        for name, kind in (("sensitivities", Sensitivities | None), ("limits", Limits)):
            if not isinstance(getattr(self, name), kind):
                raise ApplyError(f"Guard: {name} is of type {type(getattr(self, name)).__name__}.")
        if self.budget is not None:
            parse_bytes(self.budget, whole=1)  # refuses what is no size, here where it is written

    def budget_for(self, plan: Plan) -> int:
        """The budget in bytes, which `plan` must be within."""
        peak = footprint(self.trace, plan).peak_bytes
        if self.budget is None:
            return peak
        is_share = isinstance(self.budget, str) and "%" in self.budget
        allowed = parse_bytes(self.budget, whole=footprint(self.trace).peak_bytes if is_share else None)
        if peak > allowed:
            raise BudgetError(
                f"the plan needs {say_bytes(peak)} of a budget of {say_bytes(allowed)}, before a guard changes anything. "
                "Plan for that budget first, such as with assign(trace, budget), or leave the guard's budget out."
            )
        return allowed


def checked_guard(guard: Any, plan: Plan) -> Guard | None:
    """What `apply` was given as a guard, if `plan` is within its budget."""
    if isinstance(guard, Guard):
        guard.budget_for(plan)
    if guard is None or isinstance(guard, Guard):
        return guard
    raise ApplyError(
        f"guard is {shorten(repr(guard), 60)}: give Guard(trace), where trace = trace_step(model, batch, ...) is the step that is "
        "trained. Without it nothing is known of what a slot takes, and a budget cannot be kept."
    )


def check_model(trace: Trace, model: nn.Module) -> None:
    """Refuse the trace of another model, whose slots would never be seen."""
    own = {name: tuple(p.shape) for name, p in model.named_parameters()}
    for slot in trace.of(Role.WEIGHT):
        if not slot.stays and own.get(slot.name) != slot.shape:
            there = f"{own[slot.name]} in this one" if slot.name in own else f"this one, a {type(model).__name__}, has none"
            raise ApplyError(
                f"the guard's trace is of another model, a {trace.model}: {slot.name!r} is {slot.shape} there, and {there}. "
                "Trace the model that is trained: Guard(trace_step(model, batch, ...))."
            )


def probe_steps() -> Iterator[int]:
    """When sensitivities are measured anew: 10, 30, 100, 300, ...

    >>> from itertools import islice
    >>> list(islice(probe_steps(), 6))
    [10, 30, 100, 300, 1000, 3000]
    """
    step = 10
    while True:
        yield step
        yield 3 * step
        step *= 10
