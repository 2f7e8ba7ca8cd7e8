"""Which repeated layers to compute again in backward, where rounding alone would not do: the third choice beside keeping and rounding.

It costs no error and the time of a forward pass of each layer, so it has a policy in place of a price (`recompute` of `assign`):

    None     only if no plan without it fits
    True     also if no plan without it keeps the error at or below that of all activations at the first format of the ladder (int8)
    False    never

Then as few layers are taken as bring the error there, those that save most first; if none do, the number of them with the least
error. For the same layers more budget never means more error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from paredown.plan.ops import Use
from paredown.plan.recompute import modules_of, outermost, recomputed
from paredown.plan.record import Trace
from paredown.search.items import Ladder
from paredown.search.methods import expected_error
from paredown.search.path import Point
from paredown.search.search import Search

Found = tuple[Search, Point, tuple[str, ...]]


def repeated_layers(trace: Trace) -> list[str]:
    """Modules in lists, outermost ones alone, that save anything when they are computed again; the one that saves most first."""
    numbered = [path for path in modules_of(trace) if path.rpartition(".")[2].isdigit()]
    saved = {path: _saved_bytes(trace, path) for path in outermost(numbered, numbered)}
    return sorted((path for path, nbytes in saved.items() if nbytes > 0), key=lambda path: -saved[path])


def _saved_bytes(trace: Trace, path: str) -> int:
    then = recomputed(trace, (path,))
    return sum(slot.nbytes for slot in trace.activations) - sum(slot.nbytes for slot in then.activations)


def bearable_error(trace: Trace, ladder: Ladder) -> float:
    """The error of all activations at the first format of the ladder."""
    first = next((format for format in ladder if format is not None), None)
    slots = [slot for slot in trace.activations if not slot.stays and Use.VALUE in slot.uses]
    return sum(expected_error(slot, first) for slot in slots) if first is not None else 0.0


def with_layers(trace: Trace, budget_bytes: int, searched: Callable[[Trace], Search], bearable: float) -> Found | None:
    """The plan with as few layers computed again as the policy asks for; None if none fits."""
    layers = repeated_layers(trace)
    found: Found | None = None
    for count in _counts(len(layers)):
        chosen = tuple(layers[:count])
        search = searched(recomputed(trace, chosen))
        point = search.best(budget_bytes)
        if point is None:
            continue
        if found is None or point.error < found[1].error:
            found = search, point, chosen
        if point.error <= bearable:
            return found
    return found


def _counts(num: int) -> Iterator[int]:
    """1, 2, 4, 8, ... and all: few enough to try each.

    >>> list(_counts(12)), list(_counts(0))
    ([1, 2, 4, 8, 12], [])
    """
    count = 1
    while count < num:
        yield count
        count *= 2
    if num:
        yield num
