"""Replays a traced step under a plan: `intervals` lists the bytes that every tensor holds, from tick to tick.

An unmodified activation is held from its birth to its death. A packed activation has three intervals: the original, until autograd would
be its only holder; the packed copy, from then until backward releases it; and a decoded copy for each time that backward reads it:

    original   |#####|
    packed         |..............................|
    decoded                               |##| |##|

A packed weight is stored all the time, and decoded while a module that owns it runs and for each operation of backward that needs it;
autograd itself then holds neither the weight nor its cast under autocast. A gradient is unpacked until it is added to its accumulator:

    forward                               backward
    weight     |..................................................|
    decoded       |####|                            |##|
    gradient                                           |##|
    packed     |..................................................|

Packed values that a plan offloads are away from the GPU for a while (`Part.away`, plan/planned_step.py).

Every other tensor that the step allocates has one interval, from its birth to its death.

Formats of activations come from plan/storage.py. `resolve_parameter_formats` decides the formats of a parameter, its gradient and its
optimizer state, by the rules that sessions and `paredown.optim` follow:

    no format requested    all are unmodified, and torch.optim updates the parameter
    small parameter        unmodified weight and gradient, float32 moments, and 8 more bits of a bfloat16 weight (`formats/catalog.py`)
    other parameters       the formats of the plan; a moment without a format is float32

A weight that would not become smaller is unmodified: bfloat16 parameters in "bf16" are updated in place.

>>> weight = Slot("fc.weight", Role.WEIGHT, "fc", (64, 64), "float32", 16384, 0, 9, numel=4096)
>>> resolve_parameter_formats(weight, Plan.preset("safe"))
ParameterFormats(is_full=False, weight=Format('bf16'), gradient=Format('int8/64@bf16'), residue_bytes=4096)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from paredown.autograd.operations import Use
from paredown.formats.catalog import is_small
from paredown.formats.format import Format
from paredown.plan.plan import Plan
from paredown.plan.storage import keeps_enough, resolve_format
from paredown.plan.trace import Part, Slot, Trace, cached_on_trace, index_bytes
from paredown.roles import FORMATTED, OF_PARAMETER, Role, weight_role
from paredown.sizes import FLOAT_BYTES

FLOAT32_BYTES = 4
MIB = 1 << 20
WITH_RESIDUE = "bf16"  # format of weights whose next 8 bits a residue stores
BASELINE = Plan()
# bytes of a value; other dtypes have 1
DTYPE_BYTES = {"float64": 8, "int64": 8, "complex64": 8, "float32": 4, "int32": 4, "bfloat16": 2, "float16": 2, "int16": 2}


class Interval(NamedTuple):
    """The bytes of memory that a tensor holds during a part of a step, from tick `birth` to tick `death`.

    A tick is the position of an operation in the step. Footprints sum the intervals of all tensors.
    """

    role: Role
    module: str
    birth: int
    death: int
    nbytes: int


@dataclass(frozen=True)
class SlotStorage:
    """How a plan stores one activation: packed (`packs`) or unmodified, and the `reason`; bytes follow from it.

    `format` is the format of the packed values; it is None if the tensor is unmodified, or if backward needs only bits or indices of it.
    `recomputed` means that the values take no memory, since backward recomputes them from another stored tensor.
    """

    packs: bool
    format: Format | None = None
    reason: str = ""
    recomputed: bool = False


@dataclass(frozen=True)
class ParameterFormats:
    """The formats in which one parameter and its gradient are stored; None means unmodified.

    `residue_bytes` is the size of the 8 extra bits that are stored for each value of the weight, 0 if there are none.
    """

    is_full: bool  # the plan requests no format for the parameter, its gradient or its moments
    weight: Format | None = None
    gradient: Format | None = None
    residue_bytes: int = 0


FULL = ParameterFormats(True)


def resolve_parameter_formats(weight: Slot, plan: Plan, *, is_compiled: bool = False) -> ParameterFormats:
    """Return the formats in which `plan` stores the parameter `weight` and its gradient.

    `is_compiled` says whether the model runs under torch.compile, where trained weights are not packed.
    """
    requested = {role: plan.find((weight.name,), role).format for role in OF_PARAMETER} if plan.rules else {}
    if weight.is_frozen and plan.rules:
        requested[Role.WEIGHT] = plan.find((weight.name,), weight_role(is_frozen=True)).format
    if weight.stays or weight.dtype not in FLOAT_BYTES or not any(requested.values()):
        return FULL
    if is_small(weight.shape):
        return ParameterFormats(False, residue_bytes=weight.numel if weight.dtype == "bfloat16" else 0)
    format = None if is_compiled and not weight.is_frozen else requested[Role.WEIGHT]
    has_residue = requested[Role.RESIDUE] is not None and str(format) == WITH_RESIDUE
    if format is not None and format.nbytes(weight.shape) >= weight.nbytes:
        format = None
    return ParameterFormats(False, format, requested[Role.GRADIENT], weight.numel if has_residue else 0)


def moment_bytes(moment: Slot, weight: Slot, formats: ParameterFormats, plan: Plan) -> int:
    """Return the bytes that the optimizer's `moment` of the parameter `weight` takes under `plan`."""
    if formats.is_full or moment.dtype not in FLOAT_BYTES:  # integers: the optimizer packs its own state
        return moment.nbytes
    format = None if is_small(weight.shape) else plan.find((moment.name,), moment.role).format
    return moment.numel * FLOAT32_BYTES if format is None else format.nbytes(moment.shape)


def parameter_of(moment: Slot, weights: dict[str, Slot]) -> Slot | None:
    """Return the weight in `weights` to which the optimizer's tensor `moment` belongs; None if there is none.

    The name of a moment must be that of its parameter, or that name with a suffix.
    """
    return weights.get(moment.name) or weights.get(moment.name.rpartition(".")[0])


def slot_storage(slot: Slot, plan: Plan) -> SlotStorage:
    """Return how `plan` stores the activation `slot`: packed, and in which format, or unmodified, and why.

    If several operations saved the tensor, the format follows from the rule for the first; if that is not precise enough for a later one,
    from the rule for that one.
    """
    if not plan.packs_activations:
        return SlotStorage(False)
    if slot.stays:
        return SlotStorage(False, None, slot.stays)
    format: Format | None = None
    reason = ""
    for saver in slot.savers:
        if saver.use is not Use.VALUE:
            continue
        requested, needs = plan.find((saver.name,), Role.ACTIVATION), plan.needs_of(saver.name, saver.needs)
        resolved, why = resolve_format(requested, needs, dtype=slot.dtype, numel=slot.numel)
        if format is None or not keeps_enough(format, needs):
            if resolved is None:
                return SlotStorage(False, None, why)
            format, reason = resolved, why
    return SlotStorage(True, format, reason)


def can_recompute(slot: Slot, source: SlotStorage) -> bool:
    """Return whether the values that `source` stores are precise enough for backward to recompute `slot` from them."""
    if source.format is None or source.recomputed:
        return False
    first = next((saver for saver in slot.savers if saver.use is Use.VALUE), None)
    return first is None or keeps_enough(source.format, first.needs)


def slot_storages(trace: Trace, plan: Plan) -> dict[str, SlotStorage]:
    """Return how `plan` stores each activation of the step, as a dict by name."""
    return with_recomputed(trace.activations, {slot.name: slot_storage(slot, plan) for slot in trace.activations})


def with_recomputed(slots: Iterable[Slot], storages: dict[str, SlotStorage]) -> dict[str, SlotStorage]:
    """Return `storages` with `recomputed` set for each activation that backward can recompute from a stored one."""
    storages = dict(storages)
    for slot in slots:
        source = storages.get(slot.recomputed_from)
        if source is not None and storages[slot.name].packs and can_recompute(slot, source):
            storages[slot.name] = replace(storages[slot.name], recomputed=True)
    return storages


def part_bytes(slot: Slot, part: Part, storage: SlotStorage) -> int:
    """Return the bytes of a saved tensor's packed data for one use in backward: values, signs, a mask or indices."""
    if part.use is Use.VALUE:
        assert storage.format is not None
        return 0 if storage.recomputed else storage.format.nbytes((slot.numel,))
    if part.use in (Use.SIGN, Use.INSIDE, Use.MASK):
        return -(-slot.numel // 8)
    if part.use is Use.INDEX:
        return slot.numel * index_bytes(part.bound, DTYPE_BYTES.get(slot.dtype, 1))
    return 0


def intervals(trace: Trace, plan: Plan) -> list[Interval]:
    """Return the intervals in which the tensors of a step hold memory under `plan`; footprints sum them."""
    return [
        *fixed_intervals(trace),
        *model_memory(trace, plan),
        *activation_intervals(trace.activations, slot_storages(trace, plan)),
    ]


def host_bytes(trace: Trace, plan: Plan, *, is_rounded: bool = False) -> int:
    """Return the bytes of packed values that are in host memory when backward begins.

    `trace` must be the result of `planned_step`. With `is_rounded`, sizes are rounded up as torch's allocator of pinned memory does.
    """
    if not plan.offload:
        return 0
    storages = slot_storages(trace, plan)
    moved = [(slot, part) for slot in trace.activations for part in slot.parts if part.away and storages[slot.name].packs]
    sizes = [part_bytes(slot, part, storages[slot.name]) for slot, part in moved]
    return sum(map(pinned_bytes, sizes)) if is_rounded else sum(sizes)


def pinned_pieces(nbytes: int) -> list[int]:
    """Return the sizes of the pinned buffers into which sessions split a tensor of `nbytes` bytes.

    torch's allocator of pinned memory rounds each size up to a power of two, so that one buffer could take twice the bytes.

    >>> [size >> 20 for size in pinned_pieces(33 << 20)], pinned_pieces(3 << 10), pinned_bytes(3 << 10)
    ([32, 1], [3072], 4096)
    """
    pieces = list[int]()
    while nbytes > MIB:
        pieces.append(1 << (nbytes.bit_length() - 1))
        nbytes -= pieces[-1]
    return [*pieces, nbytes] if nbytes else pieces


def pinned_bytes(nbytes: int) -> int:
    """Return the pinned memory in bytes that torch allocates for a tensor of `nbytes` bytes in host memory."""
    return sum(1 << (size - 1).bit_length() for size in pinned_pieces(nbytes))


@cached_on_trace
def fixed_intervals(trace: Trace) -> list[Interval]:
    """Return the intervals in which buffers, inputs and temporaries hold memory; no plan changes these."""
    kept = (slot for slot in trace.slots if slot.role not in FORMATTED and not slot.recomputed_from)
    temporaries = (output for output in trace.outputs if not output.slot and output.phase != "step")
    return [
        *(Interval(s.role, s.module, s.birth, s.death, s.nbytes) for s in kept),
        *(Interval(Role.TEMPORARY, output.module, output.birth, output.death, output.nbytes) for output in temporaries),
    ]


def model_memory(trace: Trace, plan: Plan, *, packs_gradients: bool = True) -> Iterator[Interval]:
    """Yield the intervals in which weights, decoded copies of weights, gradients and optimizer state hold memory.

    `packs_gradients` says whether gradients are stored in the plan's format; otherwise they are unmodified.
    """
    weights = {slot.name: slot for slot in trace.of(Role.WEIGHT)}
    formats = {name: resolve_parameter_formats(slot, plan, is_compiled=trace.is_compiled) for name, slot in weights.items()}
    if not packs_gradients:
        formats = {name: replace(one, gradient=None) for name, one in formats.items()}
    for slot in trace.slots:
        if slot.role is Role.WEIGHT:
            yield from _weight(slot, formats[slot.name])
        elif slot.role is Role.GRADIENT:
            yield from _gradient(slot, formats[slot.name], trace.length)
        elif slot.role in (Role.MOMENT1, Role.MOMENT2):
            weight = parameter_of(slot, weights)
            nbytes = slot.nbytes if weight is None else moment_bytes(slot, weight, formats[weight.name], plan)
            yield Interval(slot.role, slot.module, slot.birth, slot.death, nbytes)
        elif slot.role is Role.TEMPORARY and slot.recomputed_from:
            weight = weights[slot.recomputed_from]
            yield from _cast(slot, weight, trace.backward_at, is_recomputed=formats[weight.name].weight is not None)
    full_bytes = sum(slot.nbytes for name, slot in weights.items() if formats[name].is_full)
    for output in trace.outputs:
        if output.phase == "step":  # workspace of torch.optim for the parameters that it updates
            yield Interval(Role.TEMPORARY, output.module, output.birth, output.death, min(output.nbytes, full_bytes))


def _weight(slot: Slot, formats: ParameterFormats) -> Iterator[Interval]:
    """Yield the intervals in which a weight, and decoded copies of a packed weight, hold memory.

    A packed weight has a decoded copy while a module that owns it runs, and when backward needs it.
    """
    nbytes = slot.nbytes if formats.weight is None else formats.weight.nbytes(slot.shape)
    yield Interval(Role.WEIGHT, slot.module, slot.birth, slot.death, nbytes)
    if formats.weight is not None:
        for start, end in (*slot.running, *_decoded(slot)):
            yield Interval(Role.TEMPORARY, slot.module, start, end, slot.nbytes)


def _cast(slot: Slot, weight: Slot, backward_at: int, *, is_recomputed: bool) -> Iterator[Interval]:
    """Yield the intervals in which `slot`, the copy of `weight` that autocast makes in another dtype, holds memory.

    The copy is stored until backward has read it. With `is_recomputed`, which holds if the weight is packed, it is made anew in each call
    and in backward.
    """
    spans = list(slot.running) or [(slot.birth, slot.death)]
    if is_recomputed:
        calls = [(max(start, slot.birth), end) for start, end in weight.running if start <= backward_at and end >= slot.birth]
        spans = [*(calls or [(slot.birth, slot.parts[0].packed)]), *(spans[1:] or _decoded(slot))]
    for start, end in spans:
        yield Interval(Role.TEMPORARY, slot.module, start, end, slot.nbytes)


def _decoded(slot: Slot) -> Iterator[tuple[int, int]]:
    return (span for part in slot.parts for span in part.decoded)


def _gradient(slot: Slot, formats: ParameterFormats, end: int) -> Iterator[Interval]:
    """Yield the intervals in which a gradient, and the residue (extra bits) of its weight, hold memory.

    If gradients are packed, their packed sum is stored all the time, and the new gradient until it is added. A gradient that is used and
    freed inside backward has no packed sum. `end` is the last tick of the step.
    """
    if formats.residue_bytes:
        yield Interval(Role.RESIDUE, slot.module, 0, end, formats.residue_bytes)
    if formats.gradient is None or slot.death < end:
        yield Interval(Role.GRADIENT, slot.module, slot.birth, slot.death, slot.nbytes)
        return
    yield Interval(Role.GRADIENT, slot.module, slot.birth, slot.dropped, slot.nbytes)
    yield Interval(Role.GRADIENT, slot.module, 0, end, formats.gradient.nbytes(slot.shape))


def activation_intervals(activations: Iterable[Slot], storages: Mapping[str, SlotStorage]) -> Iterator[Interval]:
    """Yield the intervals in which activations hold memory if they are stored as `storages` says, by name.

    All activations that share a torch storage must be passed together, since the storage is freed with the last of them.
    """
    by_storage: dict[int, list[Slot]] = defaultdict(list)
    for slot in activations:
        by_storage[slot.storage].append(slot)
    for slots in by_storage.values():
        death = 0
        for slot in slots:
            storage = storages[slot.name]
            death = max(death, slot.dropped if storage.packs else slot.death)
            if storage.packs:
                yield from _packed(slot, storage)
        yield Interval(Role.ACTIVATION, slots[0].module, slots[0].birth, death, slots[0].nbytes)


def _packed(slot: Slot, storage: SlotStorage) -> Iterator[Interval]:
    """Yield the intervals in which an activation's packed data and decoded copies hold memory."""
    decoded_bytes = slot.numel * DTYPE_BYTES.get(slot.dtype, 1)
    if slot.beside_packed:
        yield Interval(Role.TEMPORARY, slot.module, slot.birth, slot.birth, slot.beside_packed)
    for part in slot.parts:
        packed_bytes = part_bytes(slot, part, storage)
        gone, back = part.away or (part.released, part.released)
        spans = [(part.packed, gone), (back, part.released)] if gone < back else [(part.packed, part.released)]
        for start, end in spans if packed_bytes else ():
            yield Interval(Role.ACTIVATION, slot.module, start, end, packed_bytes)
        for start, end in () if part.becomes_result else part.decoded:
            yield Interval(Role.TEMPORARY, slot.module, start, end, decoded_bytes)
