"""All that `assign` knows of a trace before it looks at a budget: the items, their ledger, and the points to choose from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import inf

from paredown.errors import PlanError
from paredown.formats.format import Format
from paredown.plan.assignment import Assignment
from paredown.plan.given import significant_bits
from paredown.plan.keys import closest
from paredown.plan.record import Trace
from paredown.search.items import LADDER, Ladder, activation_items, parameter_items
from paredown.search.ledger import Ledger
from paredown.search.methods import METHODS, Method, expected_error, ladder_for, measured_error
from paredown.search.path import Point, best_within
from paredown.search.sensitivity import Sensitivities
from paredown.search.written import Formats

SERVED = frozenset({"sgd", "sgdm", "adamw", "lion", "SGD", "AdamW", "Lion"})  # optimizers that paredown.optim has


@dataclass(frozen=True, eq=False)
class Search:
    """A trace with the points that a method finds on it."""

    trace: Trace
    method: Method
    ledger: Ledger
    ladder: Ladder | None = None
    seed: int = 0

    @staticmethod
    def of(
        trace: Trace, method: Method, *, sensitivities: Sensitivities | None = None, ladder: Ladder | None = None, seed: int = 0
    ) -> Search:
        """The search of `method`; with a `ladder` activations have its formats, and parameters stay as they are."""
        formats = LADDER if ladder is None else ladder
        error_of = expected_error if sensitivities is None else measured_error(trace, sensitivities, formats)
        eligible = method.eligible(trace) if method.eligible is not None else None
        is_free = method.order is None
        items = list(activation_items(trace, ladder_for(eligible, formats), error_of, is_free=is_free))
        lowers = method.lowers_parameters and ladder is None and trace.optimizer in SERVED
        items += parameter_items(trace, is_free=lowers)
        return Search(trace, method, Ledger.of(trace, items), ladder, seed)

    @cached_property
    def points(self) -> list[Point]:
        """The points that a budget chooses from."""
        return self.method.points(self.ledger, self.seed)

    def best(self, budget_bytes: int) -> Point | None:
        """The point of least error within the budget; None if there is none."""
        return best_within(self.points, budget_bytes) if self.ledger.floor_bytes <= budget_bytes else None

    def formats(self, point: Point) -> Formats:
        """The format of each slot at a point; None for as it is."""
        rows = [option for item in self.ledger.items for option in item.options]
        return {key: format for row in point.chosen for key, format in rows[row].formats}

    @property
    def smallest(self) -> Point:
        """The point of the least peak."""
        return min(self.points, key=lambda point: (point.peak_bytes, point.error))


# --- what the caller gives -------------------------------------------------------------------------------------------------------


def method_named(name: str) -> Method:
    """The row of METHODS of this name."""
    if name not in METHODS:
        rows = "; ".join(f"{row.name} ({row.note})" for row in METHODS.values())
        raise PlanError(f"method {name!r} is unknown. Allowed: {rows}.")
    return METHODS[name]


def ladder_of(levels: Sequence[str | Format | None]) -> Ladder:
    """The formats that `levels` spell, the best first."""
    if isinstance(levels, str) or not isinstance(levels, Sequence) or not levels:
        raise PlanError(f"levels are formats, the best first, such as ('int8/64@bf16', 'int2/64@bf16'), not {levels!r}.")
    ladder = tuple(Assignment.parse(level).format for level in levels)
    bits = [inf if format is None else significant_bits(format) for format in ladder]
    for place, (better, worse) in enumerate(pairwise(bits)):
        if worse > better:
            raise PlanError(
                f"levels go from the best down, and {levels[place + 1] or 'None (as it is)'} is better than {levels[place]} before it. "
                "Turn them round."
            )
    return ladder


def check_sensitivities(trace: Trace, method: Method, sensitivities: Sensitivities | None) -> None:
    """Whether the method has the sensitivities that it needs, and they are those of this model."""
    if sensitivities is None:
        if method.needs_sensitivities:
            advice = "Give assign(..., sensitivities=probe(model, batch, trace)), or take method 'role', which needs none."
            raise PlanError(f"method {method.name!r} needs sensitivities. {advice}")
        return
    if not isinstance(sensitivities, Sensitivities):
        raise PlanError(f"sensitivities are what probe(model, batch, trace) gives, not {type(sensitivities).__name__}.")
    if not method.needs_sensitivities:
        raise PlanError(f"method {method.name!r} does not look at sensitivities. Write method='sensitivity', or leave them out.")
    names = [name for slot in trace.activations for name in slot.names]
    if not sensitivities.known(names):
        other = next(iter(sensitivities.errors), "")
        raise PlanError(
            f"the sensitivities are of another model: none of their {len(sensitivities)} slots, {other!r} the first, is among the "
            f"{len(names)} of {trace.model}; closest: {closest(other, names)}. Probe this model with this trace."
        )
