"""A step in which some modules are computed again in backward instead of being saved, told as a trace: torch.utils.checkpoint, foreseen.

What only the inside of such a module saves is there while its forward pass needs it, and again from the tick at which its backward begins.
Its inputs wait as they are, until its backward is done. Casts that autocast made of its weights are gone when its context ends, and are
made again. The second pass ends as soon as the last tensor is there that backward needs: what the module returns is not made again.

    as written      inside  |##############################|
    computed again  inside  |####|                   |#####|     at the first tick of the second, the module's whole forward pass runs
                    input  |################################|

A module that a step calls more than once is left as it is, and a note says so: which call a tensor belongs to is not told.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from paredown.errors import PlanError
from paredown.plan.selectors import closest
from paredown.roles import Role
from paredown.trace.trace import Output, Part, Slot, Trace

CALL = re.compile(r"@\d+")  # what a path has after the first call of a module
INPUT = "a module that is computed again starts from it"


def outermost(paths: Iterable[str], patterns: Iterable[str]) -> list[str]:
    """The paths that match a pattern, without those inside of another one that does.

    >>> outermost(["layers", "layers.0", "layers.0.norm", "layers.1", "head"], ["layers.*"])
    ['layers.0', 'layers.1']
    """
    known = dict.fromkeys(path for path in paths if path)
    found: list[str] = []
    for pattern in patterns:
        matched = [path for path in known if fnmatchcase(path, pattern)]
        if not matched:
            near = f"Closest of {len(known)}: {closest(pattern, known)}." if known else "There is none."
            raise PlanError(f"recompute {pattern!r} is no module. {near}")
        found += matched
    return [path for path in dict.fromkeys(found) if not any(is_inside(path, other) for other in found if other != path)]


def is_inside(path: str, module: str) -> bool:
    """Whether a path is that of the module or of a part of it."""
    return path == module or path.startswith(f"{module}.")


def is_of(name: str, module: str) -> bool:
    """Whether the name of a slot, or the path of a call, is of the module or of a part of it.

    >>> is_of("layers.1.relu@2:output", "layers.1"), is_of("layers.10:input", "layers.1")
    (True, False)
    """
    return is_inside(CALL.sub("", name.partition(":")[0]), module)


def modules_of(trace: Trace) -> list[str]:
    """The paths of the modules in which anything happens, and of those around them."""
    paths: dict[str, None] = {}
    for path in {CALL.sub("", made.module): None for made in trace.outputs if made.phase == "forward"}:
        parts = path.split(".")
        paths |= dict.fromkeys(".".join(parts[: end + 1]) for end in range(len(parts)))
    return [path for path in paths if path]


@dataclass(frozen=True)
class CheckpointSpan:
    """When the forward pass of a module runs, when its backward begins to ask for what it saved, and when it is done with it."""

    module: str
    start: int
    end: int
    asks: int
    done: int

    def has(self, path: str) -> bool:
        """Whether a path, or the name of a slot, lies inside."""
        return is_of(path, self.module)


def checkpointed_trace(trace: Trace, patterns: tuple[str, ...]) -> Trace:
    """The trace of the same step with the modules that match `patterns` computed again."""
    if not patterns:
        return trace
    for module in outermost(modules_of(trace), patterns):
        span = _span(trace, module)
        trace = _without(trace, span) if isinstance(span, CheckpointSpan) else replace(trace, notes=(*trace.notes, span))
    return trace


def _span(trace: Trace, module: str) -> CheckpointSpan | str:
    """When a module runs; or why that cannot be told."""
    made = [o for o in trace.outputs if o.phase == "forward" and is_inside(CALL.sub("", o.module), module)]
    start, end = min(o.birth for o in made), max(o.birth for o in made)
    own = [slot for slot in trace.of(Role.WEIGHT) if is_inside(slot.module, module)]
    calls = max((sum(first < trace.backward_at for first, _ in slot.running) for slot in own), default=1)
    if calls > 1:
        return f"module {module!r} is called {calls} times in a step: that it is computed again is not counted"
    span = CheckpointSpan(module, start, end, trace.length, end)
    inner = [slot for slot in trace.activations if _is_inner(slot, span)]
    if not _asked(inner, span, trace.backward_at):
        return f"module {module!r} saves nothing of its own that backward asks for: computing it again saves nothing"
    asks = min(_asked(trace.activations, span, trace.backward_at))
    return replace(span, asks=asks, done=max(slot.death for slot in inner))


def _asked(slots: Iterable[Slot], span: CheckpointSpan, backward_at: int) -> list[int]:
    """When backward asks for what the module saved."""
    own = [part for slot in slots if slot.birth >= span.start for part in _own_parts(slot, span)]
    return [first for part in own for first, _ in part.decoded if first > backward_at]


def _own_parts(slot: Slot, span: CheckpointSpan) -> list[Part]:
    """What the module alone needs of a slot."""
    if not any(span.has(saver.name) for saver in slot.savers):
        return []
    others = {saver.use for saver in slot.savers if not span.has(saver.name)}
    return [part for part in slot.parts if part.use not in others]


def _is_inner(slot: Slot, span: CheckpointSpan) -> bool:
    return slot.birth >= span.start and all(span.has(saver.name) for saver in slot.savers)


def _without(trace: Trace, span: CheckpointSpan) -> Trace:
    slots: list[Slot] = []
    outputs = [_extended(made, span) for made in trace.outputs]
    for slot in trace.slots:
        if slot.role is Role.WEIGHT and is_inside(slot.module, span.module):
            slots.append(_run_again(trace, slot, span))
        elif slot.role is Role.TEMPORARY and slot.recomputed_from and is_inside(slot.module, span.module):
            slots.append(_cast_again(trace, slot, span))
        elif slot.role is not Role.ACTIVATION or not any(span.has(saver.name) for saver in slot.savers):
            slots.append(slot)
        elif _is_inner(slot, span):
            outputs += _twice(slot, span)
        elif slot.birth < span.start:
            slots.append(replace(slot, stays=INPUT, death=max(slot.death, span.done)))
        else:
            kept, again = _returned(slot, span)
            slots.append(kept)
            outputs += again
    outputs.append(_rerun(trace, span))
    return replace(trace, slots=tuple(slots), outputs=tuple(outputs))


def _twice(slot: Slot, span: CheckpointSpan) -> list[Output]:
    """What is saved inside: there in forward as long as somebody uses it, and again in backward."""
    ends = min(slot.dropped, span.end) if not slot.parts else slot.dropped
    forward = Output("saved", slot.module, "forward", slot.shape, slot.dtype, slot.nbytes, slot.birth, max(ends, slot.birth))
    return [forward, replace(forward, op="recomputed", phase="backward", birth=span.asks, death=max(_given_back(slot), span.asks))]


def _given_back(slot: Slot) -> int:
    """When the last operation of backward that took it is over: nobody holds it beyond, while gradients are summed."""
    return max((end for part in slot.parts for _, end in part.decoded), default=slot.death)


def _returned(slot: Slot, span: CheckpointSpan) -> tuple[Slot, list[Output]]:
    """What the module returns and others save too: theirs stays, and a second one is made when the module is computed again."""
    savers = tuple(saver for saver in slot.savers if not span.has(saver.name))
    own = _own_parts(slot, span)
    ends = max((part.released for part in own), default=span.asks)
    again = Output("recomputed", slot.module, "backward", slot.shape, slot.dtype, slot.nbytes, span.asks, max(ends, span.asks))
    parts = tuple(part for part in slot.parts if part not in own)
    ends = max((part.released for part in parts), default=slot.death)
    kept = replace(slot, savers=savers, parts=parts, recomputed_from="", death=min(slot.death, max(ends, slot.dropped, span.end)))
    return kept, [again]


def _extended(made: Output, span: CheckpointSpan) -> Output:
    """What was there before the module's forward pass, is taken inside of it and dies there is an input, and waits."""
    is_input = made.phase == "forward" and not made.slot and made.birth < span.start <= made.death <= span.end + 1
    is_input = is_input and (made.used < 0 or made.used >= span.start)
    return replace(made, death=max(made.death, span.done)) if is_input else made


def _run_again(trace: Trace, weight: Slot, span: CheckpointSpan) -> Slot:
    """A weight of the module is plain from when it is computed again until its gradient is there."""
    complete = max((s.dropped for s in trace.of(Role.GRADIENT) if s.name == weight.name), default=span.done)
    return replace(weight, running=(*weight.running, (span.asks, max(span.asks, complete))))


def _cast_again(trace: Trace, cast: Slot, span: CheckpointSpan) -> Slot:
    """The cast of a weight is made twice. Autocast keeps those of weights that are trained until its context ends, and no others."""
    is_trained = any(slot.name == cast.recomputed_from for slot in trace.of(Role.GRADIENT))
    ends = trace.backward_at - 1 if is_trained else cast.parts[0].packed
    return replace(cast, running=((cast.birth, max(ends, cast.birth)), (span.asks, max(cast.death, span.asks))))


def _rerun(trace: Trace, span: CheckpointSpan) -> Output:
    """What the second forward pass takes for a moment, beyond what it saves."""
    change: dict[int, int] = {}
    inner = [slot for slot in trace.activations if _is_inner(slot, span)]
    ends = max(s.birth for s in trace.activations if s.birth >= span.start and any(span.has(saver.name) for saver in s.savers))
    for slot in inner:
        change[slot.birth] = change.get(slot.birth, 0) + slot.nbytes
    for made in trace.outputs:
        if made.phase == "forward" and not made.slot and span.start <= made.birth <= ends:
            change[made.birth] = change.get(made.birth, 0) + made.nbytes
            change[made.death + 1] = change.get(made.death + 1, 0) - made.nbytes
    held = peak = 0
    for tick in sorted(change):
        held += change[tick]
        peak = max(peak, held)
    extra = max(0, peak - sum(slot.nbytes for slot in inner))
    return Output("recompute", span.module, "backward", (extra,), "uint8", extra, span.asks, span.asks)
