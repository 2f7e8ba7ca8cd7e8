"""A traced step under a plan, as intervals: who holds how many bytes from which tick to which.

An activation that stays as it is lives from its birth to its death. One that is packed is three things: the original, until nobody
but autograd would hold it; what waits, from then until backward is done with it; and a decoded copy each time that backward asks:

    original   |#####|
    packed         |..............................|
    decoded                               |##| |##|

A packed weight waits all the time, and is decoded as long as a module that has it runs, and for each operation of backward that needs it;
what autograd holds of it, or of its cast under autocast, is nothing. A gradient is plain until it is folded into its accumulator:

    forward                               backward
    weight     |..................................................|
    decoded       |####|                            |##|
    gradient                                           |##|
    packed     |..................................................|

Everything else that the step allocates is an interval as it is.

What a parameter, its gradient and its optimizer state are given under a plan: the rules that sessions and `paredown.optim` follow.

    nothing asked     all stays as it is, and torch.optim serves it
    small             a plain weight and gradient, float32 moments, and 8 more bits of a bfloat16 weight (`formats/catalog.py`)
    others            what the plan says; a moment without a format is float32

A weight that would not become smaller stays as it is: bfloat16 parameters in "bf16" are updated where they are.

>>> from paredown.plan.plan import Plan
>>> weight = Slot("fc.weight", Role.WEIGHT, "fc", (64, 64), "float32", 16384, 0, 9, numel=4096)
>>> resolve_parameter_formats(weight, Plan.preset("safe"))
ParameterFormats(is_full=False, weight=Format('bf16'), gradient=Format('int8/64@bf16'), residue_bytes=4096)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from paredown.formats.catalog import is_small
from paredown.formats.format import Format
from paredown.plan.plan import Plan
from paredown.plan.storage import keeps_enough, resolve_format
from paredown.roles import FORMATTED, Role
from paredown.sizes import FLOAT_BYTES
from paredown.trace.operations import Use
from paredown.trace.trace import Part, Slot, Trace, index_bytes

OF_PARAMETERS = (Role.WEIGHT, Role.RESIDUE, Role.MOMENT1, Role.MOMENT2, Role.GRADIENT)
FLOAT32_BYTES = 4
WITH_RESIDUE = "bf16"  # the weights whose next 8 bits a residue holds


@dataclass(frozen=True)
class ParameterFormats:
    """What one parameter gets; None: plain."""

    is_full: bool  # nothing is asked for, not even for its moments
    weight: Format | None = None
    gradient: Format | None = None
    residue_bytes: int = 0


FULL = ParameterFormats(True)


def resolve_parameter_formats(weight: Slot, plan: Plan) -> ParameterFormats:
    """What `plan` makes of the parameter whose slot is `weight`."""
    wanted = {role: plan.find((weight.name,), role).format for role in OF_PARAMETERS} if plan.rules else {}
    if weight.stays or weight.dtype not in FLOAT_BYTES or not any(wanted.values()):
        return FULL
    if is_small(weight.shape):
        return ParameterFormats(False, residue_bytes=weight.numel if weight.dtype == "bfloat16" else 0)
    format = wanted[Role.WEIGHT]
    has_residue = wanted[Role.RESIDUE] is not None and str(format) == WITH_RESIDUE
    if format is not None and format.nbytes(weight.shape) >= weight.nbytes:
        format = None
    return ParameterFormats(False, format, wanted[Role.GRADIENT], weight.numel if has_residue else 0)


def moment_bytes(moment: Slot, weight: Slot, given: ParameterFormats, plan: Plan) -> int:
    """Bytes of one moment of the parameter `weight`."""
    if given.is_full or moment.dtype not in FLOAT_BYTES:  # integers: an optimizer that packs by itself
        return moment.nbytes
    format = None if is_small(weight.shape) else plan.find((moment.name,), moment.role).format
    return moment.numel * FLOAT32_BYTES if format is None else format.nbytes(moment.shape)


def parameter_of(moment: Slot, weights: dict[str, Slot]) -> Slot | None:
    """The parameter that a moment belongs to: a third one has a name after the parameter's."""
    return weights.get(moment.name) or weights.get(moment.name.rpartition(".")[0])


# --- A traced step under a plan, as intervals ---

AS_WRITTEN = Plan()
DTYPE_BYTES = {
    "float64": 8,
    "int64": 8,
    "complex64": 8,
    "float32": 4,
    "int32": 4,
    "bfloat16": 2,
    "float16": 2,
    "int16": 2,
}  # 1 for others


class Interval(NamedTuple):
    """`nbytes` of a role, held from `birth` to `death`, both included, for a module."""

    role: Role
    module: str
    birth: int
    death: int
    nbytes: int


@dataclass(frozen=True)
class SlotStorage:
    """What a slot gets under a plan. `packs` False: it stays as it is, and `reason` says why if the plan asked for more.

    `recomputed`: its values follow from another slot that waits, and are computed again from that.
    """

    packs: bool
    format: Format | None = None
    reason: str = ""
    recomputed: bool = False


def slot_storage(slot: Slot, plan: Plan) -> SlotStorage:
    """What `plan` makes of an activation: the format of the first saver that needs values, or a later saver's if that is pinned."""
    if not plan.packs_activations:
        return SlotStorage(False)
    if slot.stays:
        return SlotStorage(False, None, slot.stays)
    format: Format | None = None
    reason = ""
    for saver in slot.savers:
        if saver.use is not Use.VALUE:
            continue
        asked = plan.find((saver.name,), Role.ACTIVATION)
        found, why = resolve_format(asked, saver.needs, dtype=slot.dtype, numel=slot.numel)
        if format is None or not keeps_enough(format, saver.needs):
            if found is None:
                return SlotStorage(False, None, why)
            format, reason = found, why
    return SlotStorage(True, format, reason)


def can_recompute(slot: Slot, source: SlotStorage) -> bool:
    """Whether what waits of `source` is precise enough for the first saver of `slot` that needs values."""
    if source.format is None or source.recomputed:
        return False
    first = next((saver for saver in slot.savers if saver.use is Use.VALUE), None)
    return first is None or keeps_enough(source.format, first.needs)


def slot_storages(trace: Trace, plan: Plan) -> dict[str, SlotStorage]:
    """What `plan` makes of every activation, by the name of its slot."""
    return with_recomputed(trace.activations, {slot.name: slot_storage(slot, plan) for slot in trace.activations})


def with_recomputed(slots: Iterable[Slot], chosen: dict[str, SlotStorage]) -> dict[str, SlotStorage]:
    """`chosen`, with those that are computed again from what waits of others told apart."""
    chosen = dict(chosen)
    for slot in slots:
        source = chosen.get(slot.recomputed_from)
        if source is not None and chosen[slot.name].packs and can_recompute(slot, source):
            chosen[slot.name] = replace(chosen[slot.name], recomputed=True)
    return chosen


def part_bytes(slot: Slot, part: Part, chosen: SlotStorage) -> int:
    """Bytes of what waits for one use of a slot."""
    if part.use is Use.VALUE:
        assert chosen.format is not None
        return 0 if chosen.recomputed else chosen.format.nbytes((slot.numel,))
    if part.use in (Use.SIGN, Use.INSIDE, Use.MASK):
        return -(-slot.numel // 8)
    if part.use is Use.INDEX:
        return slot.numel * index_bytes(part.bound, DTYPE_BYTES.get(slot.dtype, 1))
    return 0


def intervals(trace: Trace, plan: Plan) -> list[Interval]:
    """All that the step holds under `plan`."""
    return [
        *fixed_intervals(trace),
        *model_memory(trace, plan),
        *activation_intervals(trace.activations, slot_storages(trace, plan)),
    ]


def fixed_intervals(trace: Trace) -> list[Interval]:
    """What no plan changes: buffers, inputs, and whatever operations make for themselves."""
    found: list[Interval] | None = vars(trace).get("_fixed")
    if found is None:
        kept = (slot for slot in trace.slots if slot.role not in FORMATTED and not slot.recomputed_from)
        found = [Interval(s.role, s.module, s.birth, s.death, s.nbytes) for s in kept]
        rest = (made for made in trace.outputs if not made.slot and made.phase != "step")
        found += [Interval(Role.TEMPORARY, made.module, made.birth, made.death, made.nbytes) for made in rest]
        vars(trace)["_fixed"] = found
    return found


def model_memory(trace: Trace, plan: Plan) -> Iterator[Interval]:
    """Weights, gradients and optimizer state, and the plain copies of them that come and go."""
    weights = {slot.name: slot for slot in trace.of(Role.WEIGHT)}
    trained = {slot.name for slot in trace.of(Role.GRADIENT)}
    gets = {name: resolve_parameter_formats(slot, plan) for name, slot in weights.items()}
    for slot in trace.slots:
        if slot.role is Role.WEIGHT:
            yield from _weight(slot, gets[slot.name])
        elif slot.role is Role.GRADIENT:
            yield from _gradient(slot, weights[slot.name], gets[slot.name], trace.length)
        elif slot.role in (Role.MOMENT1, Role.MOMENT2):
            of = parameter_of(slot, weights)
            nbytes = slot.nbytes if of is None else moment_bytes(slot, of, gets[of.name], plan)
            yield Interval(slot.role, slot.module, slot.birth, slot.death, nbytes)
        elif slot.role is Role.TEMPORARY and slot.recomputed_from:
            of = weights[slot.recomputed_from]
            is_made_again = gets[of.name].weight is not None and of.name in trained
            yield from _cast(slot, of, trace.backward_at, is_made_again=is_made_again)
    full_bytes = sum(slot.nbytes for name, slot in weights.items() if gets[name].is_full)
    for made in (
        made for made in trace.outputs if made.phase == "step"
    ):  # what torch.optim takes for the parameters that it serves
        yield Interval(Role.TEMPORARY, made.module, made.birth, made.death, min(made.nbytes, full_bytes))


def _weight(slot: Slot, given: ParameterFormats) -> Iterator[Interval]:
    """A weight; packed, it is plain beside that while a module that has it runs, and whenever backward needs it."""
    nbytes = slot.nbytes if given.weight is None else given.weight.nbytes(slot.shape)
    yield Interval(Role.WEIGHT, slot.module, slot.birth, slot.death, nbytes)
    if given.weight is not None:
        for start, end in (*slot.running, *_decoded(slot)):
            yield Interval(Role.TEMPORARY, slot.module, start, end, slot.nbytes)


def _cast(slot: Slot, weight: Slot, backward_at: int, *, is_made_again: bool) -> Iterator[Interval]:
    """The cast of a weight waits for backward; of one that is packed and trained it is made again, in each call and in backward."""
    spans = list(slot.running) or [(slot.birth, slot.death)]
    if is_made_again:
        calls = [(max(start, slot.birth), end) for start, end in weight.running if start <= backward_at and end >= slot.birth]
        spans = [*(calls or [(slot.birth, slot.parts[0].packed)]), *(spans[1:] or _decoded(slot))]
    for start, end in spans:
        yield Interval(Role.TEMPORARY, slot.module, start, end, slot.nbytes)


def _decoded(slot: Slot) -> Iterator[tuple[int, int]]:
    return (span for part in slot.parts for span in part.decoded)


def _gradient(slot: Slot, weight: Slot, given: ParameterFormats, ends: int) -> Iterator[Interval]:
    """A gradient, and the bits that the update keeps of the weight (RESIDUE). A packed accumulator is always there: a plain gradient is
    folded into it when it is complete. One that is used at once, then, has no accumulator.
    """
    if given.residue_bytes:
        yield Interval(Role.RESIDUE, slot.module, 0, ends, given.residue_bytes)
    if given.gradient is None or slot.death < ends:
        yield Interval(Role.GRADIENT, slot.module, slot.birth, slot.death, slot.nbytes)
        return
    yield Interval(Role.GRADIENT, slot.module, slot.birth, slot.dropped, slot.nbytes)
    yield Interval(Role.GRADIENT, slot.module, 0, ends, given.gradient.nbytes(slot.shape))


def activation_intervals(held: Iterable[Slot], chosen: Mapping[str, SlotStorage]) -> Iterator[Interval]:
    """Activations as was chosen for them; slots of one storage are given together."""
    storages: dict[int, list[Slot]] = defaultdict(list)
    for slot in held:
        storages[slot.storage].append(slot)
    for slots in storages.values():
        ends = 0
        for slot in slots:
            choose = chosen[slot.name]
            ends = max(ends, slot.dropped if choose.packs else slot.death)
            if choose.packs:
                yield from _packed(slot, choose)
        yield Interval(Role.ACTIVATION, slots[0].module, slots[0].birth, ends, slots[0].nbytes)


def _packed(slot: Slot, chosen: SlotStorage) -> Iterator[Interval]:
    decoded_bytes = slot.numel * DTYPE_BYTES.get(slot.dtype, 1)
    for part in slot.parts:
        waits = part_bytes(slot, part, chosen)
        if waits:
            yield Interval(Role.ACTIVATION, slot.module, part.packed, part.released, waits)
        for start, end in part.decoded:
            yield Interval(Role.TEMPORARY, slot.module, start, end, decoded_bytes)
