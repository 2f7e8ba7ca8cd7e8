"""Which of the plans within a budget to take where layers may be computed again: the quickest of those with small errors.

    formats          of activations, weights and optimizer state, of least error
    layers alone     as few as fit, nothing rounded: exact
    both             formats of activations alone, with as few layers as keep the error small; looked at where formats alone would make it
                     larger, or take weights or optimizer state, which are dear in time and need an optimizer of ours

Of those whose error is at most that of all activations in the first format of the ladder (int8), the one that is foreseen to take the least
time (seconds.py); if there is none, the same with the second (int4); if there is none, the one of least error. So a plan is never foreseen
to be slower than computing layers again alone, where that is enough.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import inf

from paredown.plan.footprint import peak_of
from paredown.plan.plan import Plan
from paredown.plan.recompute import recomputed
from paredown.plan.record import Trace
from paredown.roles import Role
from paredown.search.items import LADDER, Ladder
from paredown.search.layers import Found, bearable_error, fewest, repeated_layers, with_layers
from paredown.search.search import Search
from paredown.search.seconds import added_seconds

AS_IT_IS: Ladder = (None,)
Searched = Callable[[Trace, Ladder | None], Search]


def quickest(trace: Trace, budget_bytes: int, searched: Searched, planned: Callable[[Found], Plan]) -> Found | None:
    """The quickest of them; None where nothing but formats of weights and optimizer state beside layers can fit."""
    small, bearable = (bearable_error(trace, LADDER, recompute) for recompute in (True, None))
    search = searched(trace, None)
    point = search.best(budget_bytes)
    formats = None if point is None else (search, point, ())
    found = [formats, layers_alone(trace, budget_bytes, searched)]
    if formats is None or formats[1].error > small or _takes_parameters(formats):
        found.append(_both(trace, budget_bytes, searched, small))
    if not _within(found, small):
        found.append(_both(trace, budget_bytes, searched, bearable))
    there = _within(found, small) or _within(found, bearable)
    if there:
        return min(there, key=lambda each: (added_seconds(trace, planned(each)), each[1].error))
    return min(_within(found, inf), key=lambda each: each[1].error, default=None)


def _within(found: Iterable[Found | None], error: float) -> list[Found]:
    return [each for each in found if each is not None and each[1].error <= error]


def layers_alone(trace: Trace, budget_bytes: int, searched: Searched) -> Found | None:
    """As few layers as fit with nothing rounded; None if all of them do not."""
    layers = repeated_layers(trace)

    def fits(count: int) -> bool:
        return peak_of(trace, Plan((), recompute=tuple(layers[:count]))) <= budget_bytes

    if not layers or not fits(len(layers)):
        return None
    chosen = tuple(layers[: fewest(fits, 0, len(layers))])
    search = searched(recomputed(trace, chosen), AS_IT_IS)
    point = search.best(budget_bytes)
    return None if point is None else (search, point, chosen)


def _both(trace: Trace, budget_bytes: int, searched: Searched, bearable: float) -> Found | None:
    search = searched(trace, LADDER)
    point = search.best(budget_bytes)
    if point is not None and point.error <= bearable:
        return search, point, ()
    return with_layers(trace, budget_bytes, lambda of: searched(of, LADDER), bearable)


def _takes_parameters(found: Found) -> bool:
    search, point, _ = found
    return any(format is not None and role is not Role.ACTIVATION for (_, role), format in search.formats(point).items())
