"""`planned_step` returns the trace of a step under a plan's `tiles`, `recompute` and `offload`, given the trace without them.

plan/tiled_trace.py handles layers in tiles, plan/checkpointed_trace.py checkpointed layers. This file handles single tensors that
backward of a compiled step recomputes, and packed values that are in host memory between forward and backward.

    saved         |######################################|
    recomputed    |####|                              |###|     its matrix product runs again when the second span begins
    sources      |#######################################|      stored unmodified, so that recomputed values are those of forward

Sessions edit the graphs in the same way (session/compiled/recomputed_tensors.py). A tensor whose source is recomputed itself is stored.

Packed values of a layer move to host memory together (session/eager/host_memory.py): they are copied while the next layer computes, freed
on the GPU when the layer after that one begins, and copied back while backward of the next layer runs. At most two layers are on the GPU in
each direction, and the two that forward packs last stay there, since backward needs them first:

    layer 0, on the GPU     |#########|                                 |#########|
    layer 1                      |#########|                       |#########|
    layer 2                           |#######################################|          copied, and never freed
    layer 3                                |#############################|               not copied

A layer is a module with a number for a name, and what is inside of it; any other module is one by itself. A layer that saves values counts
as a layer even if nothing of it is packed, but only reads of packed values decide when those of the layer before are copied back.

>>> layer_of("encoder.layers.3.mlp.0:input"), layer_of("layers.3@2:checkpoint.input"), layer_of("layer1.0.bn1:input"), layer_of("fc:input")
('encoder.layers.3', 'layers.3', 'layer1.0', 'fc')
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import groupby

from paredown.autograd.operations import Use
from paredown.plan.byte_intervals import slot_storages
from paredown.plan.checkpointed_trace import CALL, checkpointed_trace
from paredown.plan.plan import Plan
from paredown.plan.selectors import first_match
from paredown.plan.tiled_trace import tiled_trace
from paredown.plan.trace import Output, Slot, Span, Trace
from paredown.roles import Role

SOURCE = "backward recomputes another tensor from it"
# an index of a ModuleList, or torchvision's encoder_layer_11; not conv1, which is part of a layer
NUMBERED = re.compile(r"(.*_)?\d+")
Layer = Sequence[tuple[int, Slot]]  # (tick at which it would be packed, slot) of each tensor whose values a layer saves
NOT_CUDA = "on a CPU all memory is the host's"
IN_GRAPHS = "torch.compile runs the model, and compiled sessions offload nothing"
READ_FIRST = "it is packed last, and backward needs it first"
NOT_PACKED = "no activation of this name is stored packed"


def planned_step(step: Trace, plan: Plan) -> Trace:
    """Return the trace of the step if modules run in tiles, are recomputed or are offloaded as `plan` says.

    Tiles are pieces of the sequence. In an eager step whole layers are recomputed; in a compiled step single tensors are, and nothing is
    offloaded (moved to host memory).
    """
    step = tiled_trace(step, plan.tiles)
    return recomputed_trace(step, plan) if step.is_compiled else offloaded_trace(checkpointed_trace(step, plan.checkpointed), plan)


# --- single tensors of a compiled step ----------------------------------------------------------------------------------------------------


def recomputed_slots(trace: Trace, plan: Plan) -> list[Slot]:
    """Return the saved tensors that backward of a compiled step recomputes under `plan`."""
    chosen: dict[int, Slot] = {}
    for slot in sorted(trace.activations, key=lambda slot: slot.birth) if plan.recomputed else ():
        how = slot.recomputation
        if how is not None and plan.recomputes(slot.names) and chosen.keys().isdisjoint(how.sources):
            chosen[slot.storage] = slot
    return list(chosen.values())


def recomputed_trace(trace: Trace, plan: Plan) -> Trace:
    """Return the trace of a compiled step if backward recomputes the tensors that `plan` names."""
    chosen = recomputed_slots(trace, plan)
    if not chosen:
        return trace
    needed: dict[int, int] = {}  # storage of a source -> the last tick at which a tensor is recomputed from it
    for slot in chosen:
        assert slot.recomputation is not None
        needed |= {source: max(needed.get(source, 0), slot.recomputation.first) for source in slot.recomputation.sources}
    gone = {slot.storage for slot in chosen}
    slots = [_source(slot, needed) for slot in trace.slots if slot.role is not Role.ACTIVATION or slot.storage not in gone]
    outputs = [output for slot in chosen for output in _outputs(slot)]
    return replace(trace, slots=tuple(slots), outputs=(*trace.outputs, *outputs))


def _source(slot: Slot, needed: dict[int, int]) -> Slot:
    if slot.storage < 0 or slot.storage not in needed:
        return slot
    death = max(slot.death, needed[slot.storage])
    return replace(slot, stays=slot.stays or SOURCE, parts=(), death=death, recomputation=None)


def _outputs(slot: Slot) -> list[Output]:
    """Return the allocations that a recomputed tensor causes: in forward, in backward, and of intermediate results."""
    how = slot.recomputation
    assert how is not None
    of_slot = slot.shape, slot.dtype, slot.nbytes
    found = [
        Output("saved", slot.module, "forward", *of_slot, slot.birth, max(slot.dropped, slot.birth)),
        Output("recomputed", slot.module, "backward", *of_slot, how.first, how.last),
    ]
    written = how.written_bytes
    return [
        *found,
        *([Output("recompute", slot.module, "backward", (written,), "uint8", written, how.first, how.last)] if written else []),
    ]


def unhonoured_recomputation(step: Trace, plan: Plan) -> list[str]:
    """Return a note, with the reason, for each tensor that `plan.recompute` names and backward cannot recompute."""
    named = [text for text in plan.recompute if ":" in text]
    if not step.is_compiled or not plan.recomputed:
        reason = "the step is not compiled" if not step.is_compiled else "the plan has no rule for activations"
        return [f"{text} is not recomputed: {reason}" for text in named]
    names = {name for slot in recomputed_slots(step, plan) for name in slot.names}
    return [f"{text} is not recomputed: no saved tensor of this name can be" for text in named if not first_match((text,), names)]


# --- packed values in host memory ---------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=4096)
def layer_of(name: str) -> str:
    """Return the layer of a saved tensor: the outermost module that is named by a number, else the tensor's module."""
    parts = CALL.sub("", name.partition(":")[0]).split(".")
    first = next((place for place, part in enumerate(parts) if NUMBERED.fullmatch(part)), len(parts) - 1)
    return ".".join(parts[: first + 1])


def saving_layers(step: Trace, plan: Plan) -> list[tuple[str, Layer]]:
    """Return (path, its saved tensors) for each layer that saves values in forward, in forward order.

    The list is empty if `plan` offloads nothing (no tensor moves to host memory) or nothing can be offloaded.
    """
    if not plan.offload or step.device != "cuda" or step.is_compiled:
        return []
    storages, rows = slot_storages(step, plan), list[tuple[int, str, Slot]]()
    for slot in step.kept_activations:
        savers = [saver for saver in slot.savers if saver.use is Use.VALUE]
        part = next((part for part in slot.parts if part.use is Use.VALUE and part.decoded), None)
        if part is not None and part.packed < step.backward_at and not storages[slot.name].recomputed:
            rows.append((part.packed, layer_of(savers[0].name if savers else slot.name), slot))
    rows.sort(key=lambda row: row[0])
    return [(path, [(at, slot) for at, _, slot in group]) for path, group in groupby(rows, key=lambda row: row[1])]


def offloaded_trace(step: Trace, plan: Plan) -> Trace:
    """Return the trace with `Part.away` set: the operations between which packed values are in host memory only.

    `plan.offload` names the values. Values that second forward passes of checkpointed layers pack, while backward runs, stay on the GPU.
    """
    layers = [layer for _, layer in saving_layers(step, plan)]
    storages, first_read = slot_storages(step, plan) if layers else {}, dict[str, int]()
    for slot in step.activations if layers else ():  # the tick at which backward decodes a slot, or one that is recomputed from it
        source = slot.recomputed_from if storages[slot.name].recomputed else slot.name
        starts = [start for part in slot.parts if part.use is Use.VALUE for start, _ in part.decoded]
        first_read[source] = min([*starts, first_read.get(source, step.length)])
    packed = [[slot for _, slot in layer if storages[slot.name].packs and storages[slot.name].format] for layer in layers]
    reads = [min((first_read[slot.name] for slot in slots), default=step.length) for slots in packed]
    away: dict[str, Span] = {}
    for place, slots in enumerate(packed[:-1]):
        gone = layers[place + 2][0][0] if place + 2 < len(layers) else step.length
        span = gone, min(reads[place : place + 2])
        away |= {slot.name: span for slot in slots if any(map(plan.offloads, slot.names))}
    return replace(step, slots=tuple(_moved(slot, away.get(slot.name)) for slot in step.slots)) if away else step


def _moved(slot: Slot, away: Span | None) -> Slot:
    if away is None or slot.role is not Role.ACTIVATION:
        return slot
    return replace(slot, parts=tuple(replace(part, away=away) if part.use is Use.VALUE else part for part in slot.parts))


def offloaded_names(step: Trace) -> set[str]:
    """Return the names of activations that move to host memory; `step` must be from `offloaded_trace`."""
    return {name for slot in step.activations if any(part.away for part in slot.parts) for name in slot.names}


def unhonoured_offload(step: Trace, plan: Plan) -> list[str]:
    """Return a note, with the reason, for each name in `plan.offload` for which nothing moves to host memory."""
    if not plan.offload:
        return []
    storages = slot_storages(step, plan)
    moved = offloaded_names(step)
    packed = {name for slot in step.activations if storages[slot.name].format for name in slot.names}
    refused = NOT_CUDA if step.device != "cuda" else IN_GRAPHS if step.is_compiled else ""
    texts = [text for text in plan.offload if not first_match((text,), moved)]
    reasons = [refused or (READ_FIRST if first_match((text,), packed) else NOT_PACKED) for text in texts]
    return [f"{text} is not in host memory: {reason}" for text, reason in zip(texts, reasons, strict=True)]
