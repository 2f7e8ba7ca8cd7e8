"""How much time a plan adds to a step, foreseen from the trace alone, to tell two plans apart: not to be taken for seconds of your GPU.

    a packed activation    its bytes and its codes are moved twice each, plus what the host takes to issue it
    a packed weight        what the host takes around its module, in both passes; its bytes are few
    a layer again          what it saves is written and read once more, its products are made again, plus what the host takes

Optimizer state is taken to cost no time. The constants are of an H200: whether packing all in 4 bits or computing all layers again is
quicker comes out as measured on four of six networks there, as a tie on GPT-2, and wrong on a small ViT, where the host decides
(docs/decisions/013).
"""

from __future__ import annotations

from math import prod

from paredown.plan.footprint import slot_bytes
from paredown.plan.plan import Plan
from paredown.plan.recompute import CALL, is_of, modules_of, outermost, recomputed
from paredown.plan.record import Trace
from paredown.plan.replay import choices
from paredown.plan.slots import Slot
from paredown.roles import Role

BYTES_PER_SECOND = 3e12
FLOPS = {"linear": 5e14, "matmul": 5e14, "conv": 2.5e14}  # products a second, by operation
PACKED_ACTIVATION, PACKED_WEIGHT, AGAIN = 40e-6, 200e-6, 100e-6  # seconds of the host, for each


def added_seconds(trace: Trace, plan: Plan) -> float:
    """What the plan adds to a step."""
    then = recomputed(trace, plan.recompute)
    return _packing(then, plan) + _weights(trace, plan) + _again(trace, then, plan)


def _packing(trace: Trace, plan: Plan) -> float:
    chosen, slots = choices(trace, plan), {slot.name: slot for slot in trace.activations}
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
