"""`checkpointed_trace` predicts a step's trace with activation checkpointing of some modules, from the trace without it.

A tensor that only operations inside of a checkpointed module saved lives in forward as long as forward needs it, and again from the tick
at which backward of the module begins. The module's inputs are stored until its backward is done: those that need a gradient are slots of
their own (`layers.3:checkpoint.input`), which a plan can pack unless the module compares or routes (autograd/checkpoints.py); others are
unmodified. Casts that autocast made of its weights are freed at the end of the autocast context and are recomputed. The second forward
pass ends once the last tensor exists that backward needs: the module's result is not recomputed.

    baseline        inside  |##############################|
    checkpointed    inside  |####|                   |#####|     the whole forward pass runs at the first tick of the second span
                    input  |################################|

Large tensors inside that sessions pack in the second forward pass are slots, born when that pass begins. It runs in one tick; the
bytes of that tick are those of the pass's largest moment, which is another moment if the tensors are packed (`_SecondPass`).

A module that a step calls more than once is left unmodified, with a note: a trace does not record which call a tensor belongs to.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from paredown.autograd.operations import (
    CHECKPOINT,
    COMPARES,
    MIN_PACKED_NUMEL,
    RECOMPUTES,
    TILE_INPUT,
    Use,
    is_large_in_second_pass,
    is_stored_in_second_pass,
    reason_of_ops,
)
from paredown.errors import PlanError
from paredown.plan.plan import Plan
from paredown.plan.selectors import WILDCARDS, closest
from paredown.plan.trace import Output, Part, Saver, Slot, Trace, cached_on_trace
from paredown.roles import Role
from paredown.sizes import FLOAT_BYTES

CALL = re.compile(r"@\d+")  # suffix of a path from the second call of a module on
INPUT = "it is the input of a checkpointed module"
Span = tuple[int, int]
TILES = "tiles"  # the operation of pieces of a module (plan/tiled_trace.py)


def step_under(trace: Trace, plan: Plan) -> Trace:
    """Return the trace of the step that runs under `plan`: `trace` itself, or one of the variants in its fields.

    Under a plan that changes nothing, packs no activations, or packs all of them in 4 bits or fewer in a compiled step, the step may save
    other tensors than those of `trace`.
    """
    if trace.unmodified is not None and plan.changes_nothing:
        return step_under(trace.unmodified, plan)
    if trace.without_packing is not None and not plan.packs_activations:
        return trace.without_packing
    has_few_bits = all(format is not None and format.element.width <= 4 for format in plan.activation_formats)
    return trace.in_4_bits if trace.in_4_bits is not None and has_few_bits else trace


def outermost(paths: Iterable[str], patterns: Iterable[str], *, what: str = "recompute") -> list[str]:
    """Return the paths of modules that match a pattern and are not inside of another module that matches.

    `what` names the setting in the PlanError for a pattern that matches no module.

    >>> outermost(["layers", "layers.0", "layers.0.norm", "layers.1", "head"], ["layers.*"])
    ['layers.0', 'layers.1']
    """
    known = dict.fromkeys(path for path in paths if path)
    matches: list[str] = []
    for pattern in patterns:
        is_path = not any(letter in WILDCARDS for letter in pattern)
        matched = [path for path in ([pattern] if is_path else known) if path in known and fnmatchcase(path, pattern)]
        if not matched:
            near = f"Closest of {len(known)}: {closest(pattern, known)}." if known else "There is none."
            raise PlanError(f"{what} {pattern!r} is no module. {near}")
        matches += matched
    return [path for path in dict.fromkeys(matches) if not any(is_inside(path, other) for other in matches if other != path)]


def is_inside(path: str, module: str) -> bool:
    """Return whether the module at `path` is `module` or is inside of it."""
    return path == module or path.startswith(f"{module}.")


def is_of(name: str, module: str) -> bool:
    """Return whether the saved tensor or call `name` ("layers.1@2") belongs to `module` or to a module inside of it.

    >>> is_of("layers.1.relu@2:output", "layers.1"), is_of("layers.10:input", "layers.1")
    (True, False)
    """
    return is_inside(CALL.sub("", name.partition(":")[0]), module)


@cached_on_trace
def modules_of(trace: Trace) -> list[str]:
    """Return the paths of the modules that ran operations in forward, and of the modules that contain them."""
    return with_parents(CALL.sub("", output.module) for output in trace.outputs if output.phase == "forward")


def with_parents(paths: Iterable[str]) -> list[str]:
    """Return `paths` of modules, and the paths of all modules that contain them, each once.

    >>> with_parents(["", "layers.0.norm", "layers.1"])
    ['layers', 'layers.0', 'layers.0.norm', 'layers.1']
    """
    parts = [path.split(".") for path in dict.fromkeys(paths)]
    found = dict.fromkeys(".".join(names[: end + 1]) for names in parts for end in range(len(names)))
    return [path for path in found if path]


@dataclass(frozen=True)
class CheckpointSpan:
    """The ticks (positions of operations) at which a module that will be checkpointed starts and ends.

    `start` and `end` are those in forward, `backward_start` and `backward_end` those in backward.
    """

    module: str
    start: int
    end: int
    backward_start: int
    backward_end: int

    def has(self, path: str) -> bool:
        """Return whether a module's path, or a saved tensor's name, belongs to the checkpointed module."""
        return is_of(path, self.module)


def checkpointed_trace(trace: Trace, patterns: tuple[str, ...]) -> Trace:
    """Return the trace of the same step if the modules that match `patterns` are under activation checkpointing."""
    if not patterns:
        return trace
    for module in outermost(modules_of(trace), patterns):
        trace = _with_module(trace, module)
    return trace


def _with_module(trace: Trace, module: str) -> Trace:
    """Return the trace with the module at the path `module` under activation checkpointing as well.

    The last result is cached on the trace, since `assign` adds the same modules one after the other again and again.
    """
    cached: tuple[str, Trace] | None = vars(trace).get("_with_module")
    if cached is None or cached[0] != module:
        span = _span(trace, module)
        is_span = isinstance(span, CheckpointSpan)
        cached = module, _with_checkpoint(trace, span) if is_span else replace(trace, notes=(*trace.notes, span))
        vars(trace)["_with_module"] = cached
    return cached[1]


def _span(trace: Trace, module: str) -> CheckpointSpan | str:
    """Return the first and last operations (ticks) of `module`, or a sentence on why it cannot be checkpointed."""
    outputs = [o for o in trace.outputs if o.phase == "forward" and is_inside(CALL.sub("", o.module), module)]
    start, end = min(o.birth for o in outputs), max(o.birth for o in outputs)
    weights = [slot for slot in trace.of(Role.WEIGHT) if is_inside(slot.module, module)]
    runs = (sum(first < trace.backward_at for first, _ in slot.running) for slot in weights)
    calls = min(runs, default=1)  # a call of the module runs each of its weights, and an adapter or a tied layer may run one again
    if calls > 1:
        return f"module {module!r} is called {calls} times in a step: its checkpointing is not counted"
    span = CheckpointSpan(module, start, end, trace.length, end)
    inner = [slot for slot in trace.activations if _is_inner(slot, span)]
    if not _needed_at(inner, span, trace.backward_at):
        return f"module {module!r} saves no tensor that only it needs in backward: checkpointing it frees nothing"
    backward_start = min(_needed_at(trace.activations, span, trace.backward_at))
    return replace(span, backward_start=backward_start, backward_end=max(slot.death for slot in inner))


def _needed_at(slots: Iterable[Slot], span: CheckpointSpan, backward_at: int) -> list[int]:
    """Return the operations (ticks) at which backward reads saved data of `slots` that only the module needs."""
    parts = [part for slot in slots if slot.birth >= span.start for part in _own_parts(slot, span)]
    return [first for part in parts for first, _ in part.decoded if first > backward_at]


def _own_parts(slot: Slot, span: CheckpointSpan) -> list[Part]:
    """Return those packed data of a saved tensor (one part for each use in backward) that only the module needs."""
    if not any(span.has(saver.name) for saver in slot.savers):
        return []
    others = {saver.use for saver in slot.savers if not span.has(saver.name)}
    return [part for part in slot.parts if part.use not in others]


def _is_inner(slot: Slot, span: CheckpointSpan) -> bool:
    """Return whether the checkpointed module creates the tensor, and only operations inside of the module saved it."""
    return slot.birth >= span.start and all(span.has(saver.name) for saver in slot.savers)


def _with_checkpoint(trace: Trace, span: CheckpointSpan) -> Trace:
    slots: list[Slot] = []
    complete = {slot.name: slot.dropped for slot in trace.of(Role.GRADIENT)}
    outputs = [_extended(output, span) for output in trace.outputs]
    reason = _reason_exact(trace, span)
    second = _SecondPass.of(trace, span)
    tiled = [output.module for output in outputs if output.op == TILES and is_inside(output.module, span.module)]
    for slot in trace.slots:
        if slot.role is Role.WEIGHT and is_inside(slot.module, span.module):
            is_of_tile = any(is_inside(slot.module, module) for module in tiled)  # pieces decode it themselves
            slots.append(slot if is_of_tile else _weight_used_twice(slot, span, complete.get(slot.name, span.backward_end)))
        elif slot.role is Role.TEMPORARY and slot.recomputed_from and is_inside(slot.module, span.module):
            slots.append(_cast_used_twice(trace, slot, span, is_trained=slot.recomputed_from in complete))
        elif slot.role is Role.ACTIVATION and slot.birth < span.start and _input_name(slot, span):
            slots.append(_input(slot, span, reason))
        elif slot.role is not Role.ACTIVATION or not any(span.has(saver.name) for saver in slot.savers):
            slots.append(slot)
        elif _is_inner(slot, span):
            in_forward, again = _allocated_twice(slot, span)
            read = second.packed.get(slot)
            outputs += [in_forward, again] if read is None else [replace(in_forward, death=max(slot.birth, read))]
        elif slot.birth < span.start:
            slots.append(replace(slot, stays=INPUT, death=max(slot.death, span.backward_end)))
        else:
            stored, recomputed = _returned(slot, span)
            slots.append(stored)
            outputs.append(recomputed)
    number = max((slot.storage for slot in slots), default=-1)
    for place, output in enumerate(outputs):
        number += 1
        slot = _unsaved_input(output, span, reason, number)
        if slot is not None:
            slots.append(slot)
            outputs[place] = replace(output, slot=slot.name)
    at, extra = span.backward_start, second.extra
    outputs.append(Output("recompute", span.module, "backward", (extra,), "uint8", extra, at, at))
    slots += second.slots(number)
    return replace(trace, slots=tuple(_with_frozen(slots, trace, span)), outputs=tuple(outputs))


def _with_frozen(slots: Iterable[Slot], before: Trace, span: CheckpointSpan) -> Iterator[Slot]:
    """Yield `slots`, with one more decoding of the checkpointed module's largest frozen weight in backward.

    The second forward pass is one tick and decodes frozen weights one at a time; those with which one module call runs (experts) are
    decoded together. `before` is the trace without this checkpoint.
    """
    frozen = [slot for slot in before.of(Role.WEIGHT) if slot.is_frozen and is_inside(slot.module, span.module)]
    calls: dict[tuple[Span, ...] | str, list[Slot]] = {}
    for slot in frozen:
        calls.setdefault(slot.running or slot.name, []).append(slot)
    largest = max(calls.values(), key=lambda together: sum(slot.nbytes for slot in together), default=[])
    runs = {slot.name: (*slot.running, *[(span.backward_start, span.backward_start)] * (slot in largest)) for slot in frozen}
    for slot in slots:
        yield replace(slot, running=runs[slot.name]) if slot.role is Role.WEIGHT and slot.name in runs else slot


def _reason_exact(trace: Trace, span: CheckpointSpan) -> str:
    """Return why the inputs of the checkpointed module must be stored unmodified; "" if a plan may quantize them."""
    outputs = [o for o in trace.outputs if o.phase == "forward" and o.dtype in FLOAT_BYTES and span.has(o.module)]
    signs = [s.op for slot in trace.activations for s in slot.savers if s.use in (Use.SIGN, Use.INSIDE) and span.has(s.name)]
    return reason_of_ops(o.op for o in outputs) or (COMPARES.format(signs[0]) if signs else "")


def _input_name(row: Slot | Output, span: CheckpointSpan) -> str:
    """Return the slot name that a tensor gets as an input of the checkpointed module; "" if it is not an input."""
    return next((name for name in row.inputs if name.partition(":")[0] == span.module), "")


def _input(slot: Slot, span: CheckpointSpan, reason: str) -> Slot:
    """Return the slot of a saved tensor that is also an input of the checkpointed module, as stored with checkpointing.

    It is stored until the module's backward is done. `reason` says why no plan may quantize it, "" if one may.
    """
    name, others = _input_name(slot, span), tuple(saver for saver in slot.savers if not span.has(saver.name))
    is_of_tile = slot.stays == TILE_INPUT and not any(saver.use is Use.EXACT for saver in others)  # of one inside
    stays = reason if is_of_tile else slot.stays or reason
    is_saved = len(others) < len(slot.savers)
    parts = [part for part in slot.parts if any(saver.use is part.use for saver in others)]
    if not stays:
        own = _input_part(span, span.backward_end if is_saved else span.backward_start)
        shared = next((part for part in parts if part.use is Use.VALUE), own)
        spans = tuple(sorted({*shared.decoded, *own.decoded}))
        own = replace(own, packed=min(shared.packed, own.packed), released=max(shared.released, own.released), decoded=spans)
        parts = [*(part for part in parts if part.use is not Use.VALUE), own]
    first = slot.name if any(other.name == slot.name for other in others) else name
    savers, death = (*others, _input_saver(name, stays)), max(slot.death, span.backward_end)
    return replace(slot, name=first, savers=savers, parts=tuple(parts), stays=stays, death=death)


def _input_saver(name: str, reason: str) -> Saver:
    operand = name.rpartition(".")[2]
    return Saver(name, CHECKPOINT, operand, Use.EXACT) if reason else Saver(name, CHECKPOINT, operand, Use.VALUE, RECOMPUTES)


def _input_part(span: CheckpointSpan, decoded_until: int) -> Part:
    return Part(Use.VALUE, span.end, span.backward_end, ((span.backward_start, decoded_until),))


def _unsaved_input(output: Output, span: CheckpointSpan, reason: str, storage: int) -> Slot | None:
    """Return a new slot for the tensor `output` if it is an input of the module that no operation saved, else None.

    With checkpointing it is stored. `reason` says why no plan may quantize it, "" if one may; `storage` is its storage number.
    """
    name = _input_name(output, span)
    numel = output.nbytes // FLOAT_BYTES.get(output.dtype, output.nbytes + 1)
    if not name or output.slot or output.death != span.backward_end or numel < MIN_PACKED_NUMEL:
        return None
    of_output = output.shape, output.dtype, output.nbytes, output.birth, output.death
    parts = () if reason else (_input_part(span, span.backward_start),)
    dropped, saver = max(span.end, output.birth), _input_saver(name, reason)
    lifetime = numel, storage, dropped, (saver,), parts
    return Slot(name, Role.ACTIVATION, span.module, *of_output, *lifetime, stays=reason, inputs=output.inputs)


def _allocated_twice(slot: Slot, span: CheckpointSpan) -> list[Output]:
    """Return the two allocations of a tensor inside of the checkpointed module: one for each forward pass."""
    end = min(slot.dropped, span.end) if not slot.parts else slot.dropped
    forward = Output("saved", slot.module, "forward", slot.shape, slot.dtype, slot.nbytes, slot.birth, max(end, slot.birth))
    death = max(_last_read(slot), span.backward_start)
    return [forward, replace(forward, op="recomputed", phase="backward", birth=span.backward_start, death=death)]


def _last_read(slot: Slot) -> int:
    return max((end for part in slot.parts for _, end in part.decoded), default=slot.death)


def _returned(slot: Slot, span: CheckpointSpan) -> tuple[Slot, Output]:
    """Return the stored tensor (slot) of a module's result, which later operations saved, and its copy in backward."""
    savers = tuple(saver for saver in slot.savers if not span.has(saver.name))
    own_parts = _own_parts(slot, span)
    end = max((part.released for part in own_parts), default=span.backward_start)
    death = max(end, span.backward_start)
    of_slot = slot.module, "backward", slot.shape, slot.dtype, slot.nbytes
    recomputed = Output("recomputed", *of_slot, span.backward_start, death)
    parts = tuple(part for part in slot.parts if part not in own_parts)
    end = max((part.released for part in parts), default=slot.death)
    stored = replace(slot, savers=savers, parts=parts, recomputed_from="", death=min(slot.death, max(end, slot.dropped, span.end)))
    return stored, recomputed


def _extended(output: Output, span: CheckpointSpan) -> Output:
    """Return `output`, which lives until the checkpointed module's backward is done if it is an input of the module."""
    is_before = output.phase == "forward" and not output.slot and output.birth < span.start <= output.death
    is_input = is_before and (span.start <= output.used <= span.end or (output.used < 0 and output.death <= span.end + 1))
    return replace(output, death=max(output.death, span.backward_end)) if is_input else output


def _weight_used_twice(weight: Slot, span: CheckpointSpan, complete: int) -> Slot:
    """Return the entry of a weight that the checkpointed module reads in both of its forward passes.

    If it is packed, it is decoded for the second one until the operation `complete`, at which its gradient is complete.
    """
    return replace(weight, running=(*weight.running, (span.backward_start, max(span.backward_start, complete))))


def _cast_used_twice(trace: Trace, cast: Slot, span: CheckpointSpan, *, is_trained: bool) -> Slot:
    """Return the entry of a weight's copy in autocast's dtype, which both forward passes of the module make.

    Autocast caches the copies of trained weights until its context ends; others are freed earlier.
    """
    end = trace.backward_at - 1 if is_trained else cast.parts[0].packed
    return replace(cast, running=((cast.birth, max(end, cast.birth)), (span.backward_start, max(cast.death, span.backward_start))))


SHARE_IN_8_BITS = 0.52  # of two bytes, with scales; half of that of float32


@dataclass(frozen=True)
class _SecondPass:
    """The most memory that a checkpointed module holds while its forward runs again in backward.

    `extra` is this memory in bytes if nothing is packed. `packed` has the tensors that a session may pack, each with the time at which the
    first pass reads it last. If they are packed in 8 bits, the memory is largest at the time `moment`, with `beside` more bytes of
    temporaries. Times are ticks: positions of operations in the step.
    """

    span: CheckpointSpan
    extra: int
    packed: dict[Slot, int]
    moment: int = 0
    beside: int = 0

    @staticmethod
    def of(trace: Trace, span: CheckpointSpan) -> _SecondPass:
        inner = [slot for slot in trace.activations if _is_inner(slot, span)]
        end = max(s.birth for s in trace.activations if s.birth >= span.start and any(span.has(saver.name) for saver in s.savers))
        ran = [o for o in trace.outputs if o.phase == "forward" and not o.slot and span.start <= o.birth <= end]
        temporaries = [(o.birth, o.nbytes) for o in ran] + [(o.death + 1, -o.nbytes) for o in ran]
        _, peak = _largest([*temporaries, *((slot.birth, slot.nbytes) for slot in inner)])
        extra = max(0, peak - sum(slot.nbytes for slot in inner))
        read = {(o.slot, o.birth): o.used for o in trace.outputs if o.slot and o.used >= 0}
        packed = {
            slot: min(read.get((slot.name, slot.birth), slot.dropped), slot.dropped) for slot in inner if _is_packed_again(slot)
        }
        if not packed:
            return _SecondPass(span, extra, packed)
        others = [(slot.birth, slot.nbytes) for slot in inner if slot not in packed]
        moment, _ = _largest([*temporaries, *others, *(change for pair in packed.items() for change in _in_8_bits(*pair))])
        beside = sum(o.nbytes for o in ran if o.birth <= moment <= o.death)
        return _SecondPass(span, extra, packed, moment, max(0, beside - extra))

    def slots(self, storage: int) -> Iterator[Slot]:
        """Yield a slot for each large tensor that a session may pack when the module's forward runs again.

        `storage` is the largest storage number in use.
        """
        at, names = self.span.backward_start, {slot.name for slot in self.packed}
        for place, (slot, read) in enumerate(self.packed.items()):
            is_alive = slot.birth <= self.moment <= read
            parts = tuple(self._part(slot, part, read) for part in slot.parts)
            times = {"birth": at, "dropped": at if is_alive else at - 1, "death": max(_last_read(slot), at)}
            source = slot.recomputed_from if slot.recomputed_from in names else ""
            extra = self.beside if place == 0 else 0
            yield replace(
                slot, **times, parts=parts, storage=storage + 1 + place, recomputed_from=source, beside_packed=extra, inputs=()
            )

    def _part(self, slot: Slot, part: Part, read: int) -> Part:
        """Return the packed data `part` of `slot` with the times at which the second forward pass packs and reads it.

        `read` is the time (tick) at which the first forward pass reads the tensor last.
        """
        at = self.span.backward_start
        packed = at + (min(part.packed, read) > self.moment)
        decoded = tuple((max(start, at + 1), max(end, at + 1)) for start, end in part.decoded)
        is_result = [saver.op for saver in slot.savers] == ["mul"]
        return replace(part, packed=packed, released=max(packed, part.released), decoded=decoded, becomes_result=is_result)


def _is_packed_again(slot: Slot) -> bool:
    """Return whether a session may pack a tensor that a checkpointed module saves when it runs again."""
    is_large = bool(slot.parts) and not slot.stays and is_large_in_second_pass(slot.nbytes)
    return is_large and all(is_stored_in_second_pass(saver.op, saver.needs) for saver in slot.savers)


def _in_8_bits(slot: Slot, read: int) -> list[tuple[int, int]]:
    """Return the changes of memory, as (operation, bytes), if the tensor is packed in 8 bits when it is saved.

    `read` is the operation of the module's first forward pass that reads it last.
    """
    share = SHARE_IN_8_BITS * 2 / FLOAT_BYTES.get(slot.dtype, 2)
    first = min(read, *(part.packed for part in slot.parts))
    return [(slot.birth, slot.nbytes), (read + 1, -slot.nbytes), (first, 0 if slot.recomputed_from else int(share * slot.nbytes))]


def _largest(changes: Iterable[tuple[int, int]]) -> tuple[int, int]:
    """Return the time at which the running sum of `changes`, pairs (time, bytes), is largest, and that sum.

    Changes at the same time are added before the sum is compared.

    >>> _largest([(3, 10), (5, -10), (5, 4), (6, 3)])
    (3, 10)
    """
    by_tick: dict[int, int] = {}
    for tick, change in changes:
        by_tick[tick] = by_tick.get(tick, 0) + change
    held, best = 0, (0, 0)
    for tick in sorted(by_tick):
        held += by_tick[tick]
        best = (tick, held) if held > best[1] else best
    return best
