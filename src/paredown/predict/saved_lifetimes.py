"""Records when each tensor that autograd saves would be packed, decoded and released, by packing hooks on a step of fake tensors.

In a traced step, every saved tensor that can be packed is packed: the fake tensor is dropped, and a new one is allocated when backward
unpacks it. So one step records when the original is freed if only its packed copy is stored, and `footprint` can replay the step under any
plan. The units of storage are those of a session: one `SavedStorage` for each storage and version (or for a view that is a small part of
its storage), with one `StoredPart` for each use. Weights, and casts of weights, are recorded in the same way: if a weight is stored packed,
backward gets it decoded.

What an operation's backward needs of the tensors that it saves is the table of autograd/operations.py.
"""

# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from paredown.autograd.graph import Saved, covers_storage
from paredown.autograd.operations import CHECKPOINT, MIN_PACKED_NUMEL, SMALL, Use, input_operand, max_left_bytes
from paredown.autograd.rematerialization import SOURCE_OPS, Rematerialization, rematerialization_of
from paredown.autograd.second_passes import CapturedHooks, Store, stored_operand
from paredown.plan.trace import Part, Saver, Slot, index_bytes
from paredown.predict.timeline import RANDOM_BITS, Allocation, Timeline
from paredown.roles import Role
from paredown.sizes import FLOAT_BYTES

# reasons why a slot cannot be packed
HELD = "it is held outside of autograd as well: by the caller, or by an operation that needs it unmodified"
UNSEEN = "something other than autograd's graph holds it, such as a checkpoint or the model itself"
OUTSIDE = "it is outside of the model"


@dataclass(eq=False)
class StoredPart:
    """The packed data of a saved tensor for one use in backward, such as values or signs, in a traced step.

    `handles` counts how often autograd holds it. `packed` and `released` are the times (ticks) at which it is packed and freed. If it is
    integers, all are below `bound`, which is None if unknown.
    """

    use: Use
    packed: int
    bound: int | None
    handles: int = 0
    released: int = -1
    decoded: list[Allocation] = field(default_factory=list)


@dataclass(eq=False)
class SavedStorage:
    """A torch storage, or a small view of one, that operations saved for backward: one saved tensor of the trace."""

    allocation: Allocation
    shape: tuple[int, ...]
    dtype: torch.dtype
    numel: int
    is_whole: bool
    savers: list[Saver] = field(default_factory=list)
    modules: list[str] = field(default_factory=list)
    parts: dict[Use, StoredPart] = field(default_factory=dict)
    stays: str = ""
    recomputed_from: SavedStorage | None = None
    in_second_pass: bool = False  # whether the second forward pass of a checkpointed layer saved it, in backward

    @property
    def packable_bytes(self) -> int:
        """Return the bytes of the unpacked values that a plan could pack."""
        return self.numel * self.dtype.itemsize

    @property
    def becomes_result(self) -> bool:
        """Return whether the operation that reads the decoded copy in backward writes its result into it."""
        return self.in_second_pass and [saver.op for saver in self.savers] == ["mul"]

    @property
    def first(self) -> int:
        """Return the index in `savers` of the operation that names the tensor: the first that needs values, else 0."""
        return next((i for i, saver in enumerate(self.savers) if saver.use is Use.VALUE), 0)


class SavedHandle:
    """What autograd holds in place of a saved tensor while a step is traced, as if the tensor were packed."""

    def __init__(self, recorder: Recorder, unit: SavedStorage, part: StoredPart, tensor: Tensor) -> None:
        self._recorder, self.unit, self._part = recorder, unit, part
        self._view = (tensor.size(), tensor.stride(), tensor.storage_offset() if unit.is_whole else 0)
        if not unit.is_whole:
            self._view = (tensor.size(), torch.empty_like(tensor, device="meta").stride(), 0)
        self.layout = tensor.size(), tensor.stride()
        part.handles += 1

    def tensor(self) -> Tensor:
        """Return the tensor that backward gets in place of the saved one: the last decoded copy, or a new one."""
        return self._recorder.decode(self.unit, self._part).as_strided(*self._view)

    def __del__(self) -> None:
        self._part.handles -= 1
        self._part.released = self._recorder.timeline.current_tick


class Recorder:
    """Records when each tensor that autograd saves in a traced step would be packed, decoded and freed.

    It holds a small object in place of each tensor. `units` become the trace's saved tensors.
    """

    def __init__(self, timeline: Timeline) -> None:
        self.timeline = timeline
        self.units: list[SavedStorage] = []
        self.weight_casts: dict[Allocation, str] = {}
        self.weights: dict[Allocation, tuple[SavedStorage, StoredPart]] = {}  # weights, and casts of weights, that backward needs
        self.hooked: Counter[str] = Counter()
        self._by_key: dict[Any, SavedStorage] = {}
        # sequence number of the node that saved it -> (node, unit, size, stride); the node too, since threads number theirs independently
        self._sources: dict[int, tuple[Any, SavedStorage, torch.Size, tuple[int, ...]]] = {}

    def saved(self, saved: Saved, *, outside: str = "") -> None:
        """Record a saved tensor, and make autograd hold a `SavedHandle` in its place.

        `outside` is a name prefix for tensors that are saved outside of the model, as by the loss; these are never packed.
        """
        if saved.tensor is None:
            self.hooked[saved.module] += 1
            return
        allocation = self.timeline.find(saved.tensor)
        if allocation is None:
            return
        name = outside + saved.name
        if saved.kind == "weight":
            self._weight(saved, saved.tensor, allocation, name, is_outside=bool(outside))
        if allocation.owner or saved.kind not in ("activation", "input"):
            return
        unit = self._unit(saved.tensor, allocation)
        use = Use.MASK if _is_float_mask(saved, allocation) else saved.use
        unit.savers.append(Saver(name, saved.op, saved.operand, use, saved.pin, saved.is_centered))
        unit.modules.append(outside or saved.module)
        unit.stays = unit.stays or (OUTSIDE if outside else reason_not_packed(saved, unit))
        if not unit.stays:
            self._pack(saved, saved.tensor, use, unit)

    def second_pass(self) -> Store:
        """Return a function that records tensors that checkpointed layers save when their forward runs again."""
        return self._saved_again

    def _saved_again(self, saved: Saved) -> SavedHandle | None:
        assert saved.tensor is not None
        captured = CapturedHooks(saved.tensor)
        self.saved(replace(saved, raw=captured))
        if captured.packed is not None:
            captured.packed.unit.in_second_pass = True
        return captured.packed

    def entered(self, path: str, args: Any) -> None:
        """Record which tensors are arguments of a call of the module `path`, as checkpointing it would store them."""
        tensors = [arg for arg in args if isinstance(arg, Tensor)]
        for number, tensor in enumerate(tensors):
            allocation = self.timeline.find(tensor) if tensor.requires_grad else None
            if allocation is not None and allocation.owner is None:
                allocation.inputs.append(f"{path}:{CHECKPOINT}.{input_operand(number)}")

    def _weight(self, saved: Saved, tensor: Tensor, allocation: Allocation, name: str, *, is_outside: bool) -> None:
        if not allocation.owner:
            self.weight_casts.setdefault(allocation, name)
        weight = allocation if allocation.owner else allocation.cast_of
        if is_outside or weight is None or weight.owner is not Role.WEIGHT:
            return
        if allocation not in self.weights:
            unit = SavedStorage(allocation, tuple(tensor.shape), tensor.dtype, allocation.nbytes // tensor.itemsize, is_whole=True)
            self.weights[allocation] = unit, StoredPart(Use.VALUE, self.timeline.current_tick, None)
        unit, part = self.weights[allocation]
        saved.raw.register_hooks(lambda tensor: SavedHandle(self, unit, part, tensor), SavedHandle.tensor)

    def weight_parts(self, allocation: Allocation | None, end: int) -> tuple[Part, ...]:
        """Return a `Part` with the times at which backward needs a weight decoded; () if it never does.

        `end` is the last tick of the step.
        """
        saved = self.weights.get(allocation) if allocation is not None else None
        return () if saved is None else (_part(saved[1], end),)

    def end_forward(self) -> None:
        """Mark saved tensors that other code still holds after forward, since packing them would free no memory."""
        for unit in self.units:
            if unit.allocation.death is None and not unit.stays:
                unit.stays = HELD

    def leave_small(self) -> None:
        """Mark the smallest saved tensors as unmodified under every plan, since sessions on a GPU do not pack them."""
        units = [unit for unit in self.units if not unit.stays and not unit.in_second_pass]
        largest = max_left_bytes([unit.packable_bytes for unit in units])
        for unit in units:
            if unit.packable_bytes <= largest:
                unit.stays = SMALL

    def _unit(self, tensor: Tensor, allocation: Allocation) -> SavedStorage:
        is_whole = covers_storage(tensor)
        view = () if is_whole else (tensor.storage_offset(), tensor.size(), tensor.stride())
        key = (allocation, tensor._version, tensor.dtype, *view)
        unit = self._by_key.get(key)
        if unit is None:
            numel = allocation.nbytes // tensor.itemsize if is_whole else tensor.numel()
            self._by_key[key] = unit = SavedStorage(allocation, tuple(tensor.shape), tensor.dtype, numel, is_whole)
            self.units.append(unit)
        return unit

    def _is_signed_by(self, node: Any, unit: SavedStorage) -> bool:
        """Return whether `node`, the autograd node of a ReLU (None: there is none), saved the storage `unit`."""
        entry = self._sources.get(node._sequence_nr()) if node is not None else None
        return entry is not None and entry[0] is node and entry[1] is unit

    def _source(self, saved: Saved, unit: SavedStorage) -> SavedStorage | None:
        """Return the stored tensor from which a session would recompute `saved`; None if there is none."""
        tensor = saved.tensor
        rematerialization = rematerialization_of(tensor) if tensor is not None and unit.is_whole else None
        while tensor is not None and rematerialization is not None:
            found = self._origin(tensor, rematerialization, unit)
            if found is not None:
                return found
            rematerialization = rematerialization.otherwise
        return None

    def _origin(self, tensor: Tensor, rematerialization: Rematerialization, unit: SavedStorage) -> SavedStorage | None:
        source = self._source_of(rematerialization.source)
        if source is None or source[0] is not rematerialization.source:
            return None
        if tensor._version and not self._is_signed_by(rematerialization.sign, unit):
            return None  # modified in place, and not by the ReLU whose output was saved last
        _, origin, size, stride = source
        if not origin.is_whole or not origin.numel == unit.numel == size.numel():
            return None
        if rematerialization.op == "layer_norm" and stride != torch.empty(size, device="meta").stride():
            return None
        if rematerialization.op == "batch_norm" and (size, stride) != (tensor.size(), tensor.stride()):
            return None
        return origin

    def _source_of(self, node: Any) -> tuple[Any, SavedStorage, torch.Size, tuple[int, ...]] | None:
        """Return the tensor that a node saved, as (node, storage, size, strides); None if it is not stored."""
        handle = stored_operand(node)
        return (node, handle.unit, *handle.layout) if handle is not None else self._sources.get(node._sequence_nr())

    def _pack(self, saved: Saved, tensor: Tensor, use: Use, unit: SavedStorage) -> None:
        part = unit.parts.get(use)
        if part is None:
            unit.recomputed_from = unit.recomputed_from or (self._source(saved, unit) if use is Use.VALUE else None)
            unit.parts[use] = part = StoredPart(use, self.timeline.tick(), saved.bound)
        if saved.node is not None and saved.op in SOURCE_OPS and saved.operand in ("input", "output"):
            self._sources[saved.node._sequence_nr()] = (saved.node, unit, tensor.size(), tensor.stride())
        saved.raw.register_hooks(lambda tensor: SavedHandle(self, unit, part, tensor), SavedHandle.tensor)

    def decode(self, unit: SavedStorage, part: StoredPart) -> Tensor:
        """Return a flat fake tensor that stands for the decoded values of `part`.

        If a decoded copy of values still exists, it is returned; bits and integers are decoded anew for each use.
        """
        last = part.decoded[-1] if part.decoded else None
        if last is not None and last.death is None and part.use is Use.VALUE:
            live_copy = last.tensor()
            if live_copy is not None:
                return live_copy
        with self.timeline.owned_by(part):
            flat = torch.empty(unit.numel, dtype=unit.dtype)
        part.decoded.append(self.timeline.allocations[-1])
        return flat


def _is_float_mask(saved: Saved, allocation: Allocation) -> bool:
    """Return whether a saved tensor is the mask of dropout on the CPU, which is random bits stored as floats."""
    return saved.op == "mul" and allocation.op == RANDOM_BITS and saved.tensor is not None and not saved.tensor.requires_grad


def reason_not_packed(saved: Saved, unit: SavedStorage) -> str:
    """Return the reason why no plan can pack a saved tensor; "" if a plan can."""
    itemsize = unit.dtype.itemsize
    if unit.numel < MIN_PACKED_NUMEL:
        return f"it has fewer than {MIN_PACKED_NUMEL} values"
    if saved.kind == "input":
        return "the caller holds it"
    if saved.use is Use.EXACT:
        return saved.reason or "backward needs it unmodified"
    if saved.use is Use.INDEX and index_bytes(saved.bound, itemsize) >= itemsize:
        return "integers without a known bound are stored unmodified"
    dtype = str(unit.dtype).removeprefix("torch.")
    if saved.use is Use.VALUE and dtype not in FLOAT_BYTES:
        return f"it is {dtype}, which no format can store"
    return ""


def slots_of(recorder: Recorder, names: dict[Allocation, str], end: int) -> list[Slot]:
    """Return the trace's entries for all saved storages, and for all casts of weights that backward needs.

    `names` maps the allocations of weights to their names. `end` is the time at which the step ends.
    """
    numbers: dict[Allocation, int] = {}
    slots = [_slot(unit, numbers.setdefault(unit.allocation, len(numbers)), end) for unit in recorder.units]
    for allocation, name in recorder.weight_casts.items():
        parts = recorder.weight_parts(allocation, end)
        death = _baseline_death(end if allocation.death is None else allocation.death, parts)
        weight = names.get(allocation.cast_of, "") if allocation.cast_of is not None and parts else ""
        module = name.partition(":")[0]
        slots.append(
            Slot(
                name,
                Role.TEMPORARY,
                module,
                allocation.shape,
                allocation.dtype,
                allocation.nbytes,
                allocation.birth,
                death,
                parts=parts,
                recomputed_from=weight,
            )
        )
    return slots


def held_slots(held: Iterable[Allocation], end: int) -> list[Slot]:
    """Return the trace's entries of the allocations `held`, which exist before backward outside of autograd's graph."""
    counts: Counter[str] = Counter()
    slots: list[Slot] = []
    for number, allocation in enumerate(held):
        counts[place := f"{allocation.module}:{allocation.op}"] += 1
        name = f"{place}#{counts[place]}.held" if counts[place] > 1 else f"{place}.held"
        death = end if allocation.death is None else allocation.death
        saver = Saver(name, allocation.op, "held", Use.EXACT)
        slots.append(
            Slot(
                name,
                Role.ACTIVATION,
                allocation.module,
                allocation.shape,
                allocation.dtype,
                allocation.nbytes,
                allocation.birth,
                death,
                storage=-2 - number,
                dropped=death,
                savers=(saver,),
                stays=UNSEEN,
            )
        )
    return slots


def _slot(unit: SavedStorage, number: int, end: int) -> Slot:
    dropped = end if unit.allocation.death is None else unit.allocation.death
    parts = tuple(_part(part, end, becomes_result=unit.becomes_result) for part in unit.parts.values())
    saver = unit.savers[unit.first]
    source = unit.recomputed_from
    return Slot(
        name=saver.name,
        role=Role.ACTIVATION,
        module=unit.modules[unit.first],
        shape=unit.shape,
        dtype=str(unit.dtype).removeprefix("torch."),
        nbytes=unit.allocation.nbytes,
        birth=unit.allocation.birth,
        death=_baseline_death(dropped, parts),
        numel=unit.numel,
        storage=number,
        dropped=dropped,
        savers=tuple(unit.savers),
        parts=parts,
        stays=unit.stays,
        recomputed_from=source.savers[source.first].name if source is not None and not source.stays else "",
        inputs=tuple(unit.allocation.inputs),
    )


def _baseline_death(dropped: int, parts: tuple[Part, ...]) -> int:
    """Return the time at which a saved tensor is freed in the baseline; `dropped` is that if it is packed."""
    return max([dropped, *(part.released for part in parts), *(end for part in parts for _, end in part.decoded)])


def _part(part: StoredPart, end: int, *, becomes_result: bool = False) -> Part:
    decoded = tuple((allocation.birth, end if allocation.death is None else allocation.death) for allocation in part.decoded)
    return Part(part.use, part.packed, end if part.handles else part.released, decoded, part.bound, becomes_result)
