"""`recomputed_trace`: the trace of a compiled step in which backward recomputes some saved tensors, from the trace without.

    saved         |######################################|
    recomputed    |####|                              |###|     its product runs again at the first tick of the second span
    sources      |#######################################|      stored unmodified, so that recomputed values are those of forward

Sessions edit the graphs in the same way (session/compiled/recomputed_tensors.py). A tensor whose source is recomputed itself is stored.
"""

from __future__ import annotations

from dataclasses import replace

from paredown.plan.checkpointed_trace import checkpointed_trace
from paredown.plan.offloaded_trace import offloaded_trace
from paredown.plan.plan import Plan
from paredown.plan.selectors import first_match
from paredown.plan.tiled_trace import tiled_trace
from paredown.plan.trace import Output, Slot, Trace
from paredown.roles import Role

SOURCE = "backward recomputes another tensor from it"


def planned_step(step: Trace, plan: Plan) -> Trace:
    """Return the trace of the step under the plan's `tiles`, `recompute` and `offload`.

    What is recomputed are layers of an eager step, or single tensors of a compiled one, which offloads nothing.
    """
    step = tiled_trace(step, plan.tiles)
    return recomputed_trace(step, plan) if step.is_compiled else offloaded_trace(checkpointed_trace(step, plan.checkpointed), plan)


def recomputed_slots(trace: Trace, plan: Plan) -> list[Slot]:
    """Return the slots of a compiled step that backward recomputes under `plan`."""
    chosen: dict[int, Slot] = {}
    for slot in sorted(trace.activations, key=lambda slot: slot.birth) if plan.recomputed else ():
        how = slot.recomputation
        if how is not None and plan.recomputes(slot.names) and chosen.keys().isdisjoint(how.sources):
            chosen[slot.storage] = slot
    return list(chosen.values())


def recomputed_trace(trace: Trace, plan: Plan) -> Trace:
    """Return the trace of a compiled step in which backward recomputes the slots that `plan` names."""
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
    """Return the allocations of a recomputed tensor in forward and in backward, and those of intermediate results."""
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
    """Return a sentence for each slot that the plan asks backward to recompute, but that is not recomputed."""
    named = [text for text in plan.recompute if ":" in text]
    if not step.is_compiled or not plan.recomputed:
        reason = "the step is not compiled" if not step.is_compiled else "the plan has no rule for activations"
        return [f"{text} is not recomputed: {reason}" for text in named]
    names = {name for slot in recomputed_slots(step, plan) for name in slot.names}
    return [f"{text} is not recomputed: no saved tensor of this name can be" for text in named if not first_match((text,), names)]
