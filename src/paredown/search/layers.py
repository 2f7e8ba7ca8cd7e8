"""Which repeated layers to compute again in backward, where rounding alone would not do: the third choice beside keeping and rounding.

It costs no error and the time of a forward pass of each layer, so it has a policy in place of a price (`recompute` of `assign`):

    None     where formats would be slower or their errors large (quicker.py); with a ladder of the caller's own, or an order to compare,
             only if no plan without it fits: then as few layers as bring the error to that of all activations at the second format of
             the ladder (int4)
    True     also if no plan without it keeps the error at or below that of all activations at the first format of the ladder (int8): as
             few layers as bring it there
    False    never

Layers that save most come first; if no number of them brings the error there, the one of least error is taken. Fewer are quicker: on
networks of real size rounding a layer took about half the time of computing it again (`benchmarks/assign_times.py`). For the same layers
more budget never means more error.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import cache

from paredown.plan.ops import Use
from paredown.plan.recompute import modules_of, outermost, recomputed
from paredown.plan.record import Trace
from paredown.search.items import Ladder
from paredown.search.methods import expected_error
from paredown.search.path import Point
from paredown.search.search import Search

Found = tuple[Search, Point, tuple[str, ...]]
NUMBERED = re.compile(r"(.*_)?\d+")  # in a list, or as in torchvision's encoder_layer_11; not conv1, which is one of several parts


def repeated_layers(trace: Trace) -> list[str]:
    """Modules with a number for a name, outermost ones alone, that save anything when computed again; the one that saves most first."""
    numbered = [path for path in modules_of(trace) if NUMBERED.fullmatch(path.rpartition(".")[2])]
    saved = {path: _saved_bytes(trace, path) for path in outermost(numbered, numbered)}
    return sorted((path for path, nbytes in saved.items() if nbytes > 0), key=lambda path: -saved[path])


def _saved_bytes(trace: Trace, path: str) -> int:
    then = recomputed(trace, (path,))
    return sum(slot.nbytes for slot in trace.activations) - sum(slot.nbytes for slot in then.activations)


def bearable_error(trace: Trace, ladder: Ladder, recompute: bool | None) -> float:
    """The error of all activations at the first format of the ladder, or at the second where layers are the last resort."""
    formats = [format for format in ladder if format is not None]
    slots = [slot for slot in trace.activations if not slot.stays and Use.VALUE in slot.uses]
    return sum(expected_error(slot, formats[:2][0 if recompute else -1]) for slot in slots) if formats else 0.0


def with_layers(trace: Trace, budget_bytes: int, searched: Callable[[Trace], Search], bearable: float) -> Found | None:
    """The plan with as few layers computed again as the policy asks for; None if none fits."""
    layers = repeated_layers(trace)

    @cache
    def found(count: int) -> Found | None:
        chosen = tuple(layers[:count])
        search = searched(recomputed(trace, chosen))
        point = search.best(budget_bytes)
        return None if point is None else (search, point, chosen)

    def is_bearable(count: int) -> bool:
        there = found(count)
        return there is not None and there[1].error <= bearable

    tried = list(_counts(len(layers)))
    enough = next((count for count in tried if is_bearable(count)), None)
    if enough is not None:
        too_few = max((count for count in tried if count < enough), default=0)
        return found(fewest(is_bearable, too_few, enough))
    fitting = [there for there in map(found, tried) if there is not None]
    return min(fitting, key=lambda there: there[1].error, default=None)


def fewest(is_enough: Callable[[int], bool], too_few: int, enough: int) -> int:
    """The least count above `too_few` that is enough, by halving.

    >>> fewest(lambda count: count >= 7, 4, 8), fewest(lambda count: count >= 12, 8, 12), fewest(lambda count: True, 0, 1)
    (7, 12, 1)
    """
    while enough - too_few > 1:
        middle = (too_few + enough) // 2
        too_few, enough = (too_few, middle) if is_enough(middle) else (middle, enough)
    return enough


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
