"""Which repeated layers to compute again in backward, where rounding alone would not do: the third choice beside keeping and rounding.

It costs no error and the time of a forward pass of each layer, so it has a policy in place of a price (`recompute` of `assign`):

    None     where formats would be slower or their errors large (assign/checkpointed_layers.py); with a ladder of the caller's
    own, or an order to compare,
             only if no plan without it fits: then as few layers as bring the error to that of all activations at the second format of
             the ladder (int4)
    True     also if no plan without it keeps the error at or below that of all activations at the first format of the ladder (int8): as
             few layers as bring it there
    False    never

Layers that save most come first; if no number of them brings the error there, the one of least error is taken. Fewer are quicker: on
networks of real size rounding a layer took about half the time of computing it again (`benchmarks/assign_times.py`). For the same layers
more budget never means more error.

Which of the plans within a budget to take where layers may be computed again: the quickest of those with small errors.

    formats          of activations, weights and optimizer state, of least error
    layers alone     as few as fit, nothing rounded: exact
    both             formats of activations alone, with as few layers as keep the error small; looked at where formats alone would make it
                     larger, or take weights or optimizer state, which are dear in time and need an optimizer of ours

Of those whose error is at most that of all activations in the first format of the ladder (int8), the one that is foreseen to take the least
time (assign/checkpointed_layers.py); if there is none, the same with the second (int4); if there is none, the one of least
error. So a plan is never foreseen
to be slower than computing layers again alone, where that is enough.

How much time a plan adds to a step, foreseen from the trace alone, to tell two plans apart: not to be taken for seconds of your GPU.

    a packed activation    its bytes and its codes are moved twice each, plus what the host takes to issue it
    a packed weight        what the host takes around its module, in both passes; its bytes are few
    a layer again          what it saves is written and read once more, its products are made again, plus what the host takes

Optimizer state is taken to cost no time. The constants are of an H200: whether packing all in 4 bits or computing all layers again is
quicker comes out as measured on four of six networks there, as a tie on GPT-2, and wrong on a small ViT, where the host decides
(docs/decisions/013).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from math import inf, prod

from paredown.assign.options import LADDER, Ladder
from paredown.assign.problem import AssignmentProblem
from paredown.assign.strategies import AssignmentPoint, expected_error
from paredown.plan.checkpointed_trace import CALL, checkpointed_trace, is_of, modules_of, outermost
from paredown.plan.footprint import peak_of, slot_bytes
from paredown.plan.plan import Plan
from paredown.plan.replay import slot_storages
from paredown.roles import Role
from paredown.trace.operations import Use
from paredown.trace.trace import Slot, Trace

Found = tuple[AssignmentProblem, AssignmentPoint, tuple[str, ...]]
NUMBERED = re.compile(r"(.*_)?\d+")  # in a list, or as in torchvision's encoder_layer_11; not conv1, which is one of several parts


def repeated_layers(trace: Trace) -> list[str]:
    """Modules with a number for a name, outermost ones alone, that save anything when computed again; the one that saves most first."""
    numbered = [path for path in modules_of(trace) if NUMBERED.fullmatch(path.rpartition(".")[2])]
    saved = {path: _saved_bytes(trace, path) for path in outermost(numbered, numbered)}
    return sorted((path for path, nbytes in saved.items() if nbytes > 0), key=lambda path: -saved[path])


def _saved_bytes(trace: Trace, path: str) -> int:
    then = checkpointed_trace(trace, (path,))
    return sum(slot.nbytes for slot in trace.activations) - sum(slot.nbytes for slot in then.activations)


def tolerated_error(trace: Trace, ladder: Ladder, recompute: bool | None) -> float:
    """The error of all activations at the first format of the ladder, or at the second where layers are the last resort."""
    formats = [format for format in ladder if format is not None]
    slots = [slot for slot in trace.activations if not slot.stays and Use.VALUE in slot.uses]
    return sum(expected_error(slot, formats[:2][0 if recompute else -1]) for slot in slots) if formats else 0.0


def with_layers(trace: Trace, budget_bytes: int, searched: Callable[[Trace], AssignmentProblem], bearable: float) -> Found | None:
    """The plan with as few layers computed again as the policy asks for; None if none fits."""
    layers = repeated_layers(trace)

    @cache
    def found(count: int) -> Found | None:
        chosen = tuple(layers[:count])
        search = searched(checkpointed_trace(trace, chosen))
        point = search.best(budget_bytes)
        return None if point is None else (search, point, chosen)

    def is_bearable(count: int) -> bool:
        there = found(count)
        return there is not None and there[1].error <= bearable

    tried = list(_counts(len(layers)))
    enough = next((count for count in tried if is_bearable(count)), None)
    if enough is not None:
        too_few = max((count for count in tried if count < enough), default=0)
        return found(fewest_layers(is_bearable, too_few, enough))
    fitting = [there for there in map(found, tried) if there is not None]
    return min(fitting, key=lambda there: there[1].error, default=None)


def fewest_layers(is_enough: Callable[[int], bool], too_few: int, enough: int) -> int:
    """The least count above `too_few` that is enough, by halving.

    >>> fewest_layers(lambda count: count >= 7, 4, 8), fewest_layers(lambda count: True, 0, 1)
    (7, 1)
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


# --- How much time a plan adds to a step, foreseen from the trace alone, to tell two plans apart ---

BYTES_PER_SECOND = 3e12
FLOPS = {"linear": 5e14, "matmul": 5e14, "conv": 2.5e14}  # products a second, by operation
PACKED_ACTIVATION, PACKED_WEIGHT, AGAIN = 40e-6, 200e-6, 100e-6  # seconds of the host, for each


def added_seconds(trace: Trace, plan: Plan) -> float:
    """What the plan adds to a step."""
    then = checkpointed_trace(trace, plan.recompute)
    return _packing(then, plan) + _weights(trace, plan) + _again(trace, then, plan)


def _packing(trace: Trace, plan: Plan) -> float:
    chosen, slots = slot_storages(trace, plan), {slot.name: slot for slot in trace.activations}
    packed = [slots[name] for name, choice in chosen.items() if choice.packs and not choice.recomputed]
    moved = sum(2 * (slot.nbytes + slot_bytes(slot, chosen[slot.name])) for slot in packed)
    return moved / BYTES_PER_SECOND + PACKED_ACTIVATION * len(packed)


def _weights(trace: Trace, plan: Plan) -> float:
    return PACKED_WEIGHT * sum(plan.find((slot.name,), Role.WEIGHT).format is not None for slot in trace.of(Role.WEIGHT))


def _again(trace: Trace, then: Trace, plan: Plan) -> float:
    layers = outermost(modules_of(trace), plan.recompute) if plan.recompute else []
    kept = {slot.name for slot in then.activations}
    gone = [slot for slot in trace.activations if slot.name not in kept]
    products = [seconds for path, seconds in _products(trace) if any(is_of(path, layer) for layer in layers)]
    return 2 * sum(slot.nbytes for slot in gone) / BYTES_PER_SECOND + sum(products) + AGAIN * len(layers)


def _products(trace: Trace) -> list[tuple[str, float]]:
    """(module, seconds of its product in forward), for each weight whose input is saved."""
    weights = {slot.module: slot for slot in trace.of(Role.WEIGHT) if len(slot.shape) > 1}
    found: list[tuple[str, float]] = []
    for slot in trace.activations:
        for saver in slot.savers:
            path = CALL.sub("", saver.name.partition(":")[0])
            if saver.op in FLOPS and path in weights:
                found.append((path, 2 * _rows(slot, saver.op, weights[path]) * prod(weights[path].shape) / FLOPS[saver.op]))
    return found


def _rows(slot: Slot, op: str, weight: Slot) -> float:
    """How often a weight is multiplied: for every place of its input; strides of convolutions are not looked at."""
    width = slot.shape[1] if op == "conv" else slot.shape[-1]
    return slot.numel / (width if op == "conv" or width in weight.shape else weight.shape[1])


# --- Which of the plans within a budget to take where layers may be computed again ---

AS_IT_IS: Ladder = (None,)
Searched = Callable[[Trace, Ladder | None], AssignmentProblem]


def quickest_plan(trace: Trace, budget_bytes: int, searched: Searched, planned: Callable[[Found], Plan]) -> Found | None:
    """The quickest of them; None where nothing but formats of weights and optimizer state beside layers can fit."""
    small, bearable = (tolerated_error(trace, LADDER, recompute) for recompute in (True, None))
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
    chosen = tuple(layers[: fewest_layers(fits, 0, len(layers))])
    search = searched(checkpointed_trace(trace, chosen), AS_IT_IS)
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
