"""Takes what autograd saves out of its hands, as packing does, and records when each tensor is packed, decoded and released.

In a trace every activation that can be packed is: its fake tensor is dropped, and a new one is made when backward asks. So one step
tells when an original dies if only its packed copy waits, and `footprint` can replay the step under any plan. What waits follows the
same rules as in a session: one unit for a storage and version (or for a view that is a small part of its storage), in it one part
for each use. Weights, and casts of them, are taken out in the same way: where one waits packed, backward gets it decoded.

Saved tensors that follow from another one that was saved before: they need not wait, they are computed again from it.

    relu(batch_norm(x))     from x, the statistics that the norm saved, and the exact signs that the ReLU saved
    layer_norm(x)           from x and its statistics
    gelu(x), silu(x)        from x

so that of a convolution, norm and ReLU the norm's input waits and the next convolution's input does not. The result may have been cast
and seen through views since.
"""


# pyright: reportPrivateUsage=false, reportAttributeAccessIssue=false

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from paredown.roles import Role
from paredown.sizes import FLOAT_BYTES
from paredown.trace.autograd_graph import CAST_NODE, MIN_PACKED_NUMEL, VIEWS, Saved, covers_storage
from paredown.trace.operations import Use, row_of
from paredown.trace.timeline import RANDOM_BITS, Allocation, Timeline
from paredown.trace.trace import Part, Saver, Slot, index_bytes

SAME_MEMORY_ORDER = frozenset((*VIEWS, CAST_NODE))
# those whose "input", or "output" of a ReLU, others follow from
SOURCE_OPS = frozenset(("batch_norm", "layer_norm", "gelu", "silu", "relu"))
REORDERED = frozenset(f"{name}Backward0" for name in ("Transpose", "Permute", "T"))
ACTIVATIONS = frozenset(("gelu", "silu"))


@dataclass(frozen=True, eq=False)
class Rematerialization:
    """`source`: the node that saved what to start from, as its operand "input"; `sign`: that of a ReLU after it."""

    op: str
    source: Any
    sign: Any | None = None
    is_copy: bool = False  # in the logical order, then: the source must be contiguous


def rematerialization_of(tensor: Tensor) -> Rematerialization | None:
    """How `tensor` follows from what a node before it saved, if it is known to."""
    node = tensor.grad_fn
    passed: set[str] = set()
    while node is not None and node.name() in SAME_MEMORY_ORDER:
        passed.add(node.name())
        node = node.next_functions[0][0]
    is_copy = CAST_NODE in passed  # which may be of another memory order
    if node is None or (is_copy and passed & REORDERED):
        return None
    op = _op(node)
    if is_copy and op != "relu" and not tensor.is_contiguous():
        return None
    if op in ACTIVATIONS or op == "layer_norm":
        return Rematerialization(op, node, is_copy=is_copy)
    before = node.next_functions[0][0] if op == "relu" else None
    if before is not None and _op(before) == "batch_norm" and _is_training(before):
        return Rematerialization("batch_norm", before, node)
    return None


def _op(node: Any) -> str:
    return row_of(getattr(node, "stands_for", (node.name(),))[0]).op


def _is_training(norm: Any) -> bool:
    """Whether a batch norm used the statistics of the batch, and its bias can be had."""
    return bool(getattr(norm, "_saved_training", True)) and len(norm.next_functions) == 3


# --- Takes what autograd saves out of its hands, as packing does, and records when each tensor is packed, decoded and ---

HELD = "somebody holds it beside autograd: the caller, or an operation that needs it as it is"
UNSEEN = "something other than autograd's graph holds it, such as a checkpoint or the model itself"
OUTSIDE = "it is outside of the model"


@dataclass(eq=False)
class StoredPart:
    """A part of a unit: what waits for one use."""

    use: Use
    packed: int
    bound: int | None
    handles: int = 0
    released: int = -1
    decoded: list[Allocation] = field(default_factory=list)


@dataclass(eq=False)
class SavedStorage:
    """A storage, or a small view of one, that operations saved."""

    allocation: Allocation
    shape: tuple[int, ...]
    dtype: torch.dtype
    numel: int
    whole: bool
    savers: list[Saver] = field(default_factory=list)
    modules: list[str] = field(default_factory=list)
    parts: dict[Use, StoredPart] = field(default_factory=dict)
    stays: str = ""
    recomputed_from: SavedStorage | None = None

    @property
    def first(self) -> int:
        """The saver that the slot is named after: the first that needs values, else the first."""
        return next((i for i, saver in enumerate(self.savers) if saver.use is Use.VALUE), 0)


class SavedHandle:
    """What autograd holds in place of a saved tensor."""

    def __init__(self, recorder: Recorder, unit: SavedStorage, waiting: StoredPart, tensor: Tensor) -> None:
        self._recorder, self._unit, self._waiting = recorder, unit, waiting
        self._view = (tensor.size(), tensor.stride(), tensor.storage_offset() if unit.whole else 0)
        if not unit.whole:
            self._view = (tensor.size(), torch.empty_like(tensor, device="meta").stride(), 0)
        waiting.handles += 1

    def tensor(self) -> Tensor:
        """The saved tensor again: decoded anew, unless what was decoded last is still there."""
        return self._recorder.decode(self._unit, self._waiting).as_strided(*self._view)

    def __del__(self) -> None:
        self._waiting.handles -= 1
        self._waiting.released = self._recorder.timeline.now


class Recorder:
    """Collects the units of a step."""

    def __init__(self, timeline: Timeline) -> None:
        self.timeline = timeline
        self.units: list[SavedStorage] = []
        self.weight_casts: dict[Allocation, str] = {}
        self.weights: dict[Allocation, tuple[SavedStorage, StoredPart]] = {}  # those, and casts, that backward needs
        self.hooked: Counter[str] = Counter()
        self._by_key: dict[Any, SavedStorage] = {}
        # by the number of the node that saved it, and the node itself: threads number their nodes independently
        self._sources: dict[int, tuple[Any, SavedStorage, torch.Size, tuple[int, ...]]] = {}

    def saved(self, saved: Saved, *, outside: str = "") -> None:
        """Take over one saved tensor of the model; what was saved `outside` of it, as by the loss, is named after that and stays."""
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
        unit = self._unit(saved, saved.tensor, allocation)
        use = Use.MASK if _is_float_mask(saved, allocation) else saved.use
        unit.savers.append(Saver(name, saved.op, saved.operand, use, saved.pin, saved.is_centered))
        unit.modules.append(outside or saved.module)
        unit.stays = unit.stays or (OUTSIDE if outside else reason_not_packed(saved, unit))
        if not unit.stays:
            self._pack(saved, saved.tensor, use, unit)

    def _weight(self, saved: Saved, tensor: Tensor, allocation: Allocation, name: str, *, is_outside: bool) -> None:
        if not allocation.owner:
            self.weight_casts.setdefault(allocation, name)
        weight = allocation if allocation.owner else allocation.cast_of
        if is_outside or weight is None or weight.owner is not Role.WEIGHT:
            return
        if allocation not in self.weights:
            unit = SavedStorage(allocation, tuple(tensor.shape), tensor.dtype, allocation.nbytes // tensor.itemsize, whole=True)
            self.weights[allocation] = unit, StoredPart(Use.VALUE, self.timeline.now, None)
        unit, waiting = self.weights[allocation]
        saved.raw.register_hooks(lambda tensor: SavedHandle(self, unit, waiting, tensor), SavedHandle.tensor)

    def weight_parts(self, allocation: Allocation | None, ends: int) -> tuple[Part, ...]:
        """When backward needs a weight, or the cast of one."""
        found = self.weights.get(allocation) if allocation is not None else None
        return () if found is None else (_part(found[1], ends),)

    def ends(self) -> None:
        """The model's forward pass ended: what is still there is held by somebody else."""
        for unit in self.units:
            if unit.allocation.death is None and not unit.stays:
                unit.stays = HELD

    def _unit(self, saved: Saved, tensor: Tensor, allocation: Allocation) -> SavedStorage:
        whole = covers_storage(tensor)
        view = () if whole else (tensor.storage_offset(), tensor.size(), tensor.stride())
        key = (allocation, tensor._version, tensor.dtype, *view)
        unit = self._by_key.get(key)
        if unit is None:
            numel = allocation.nbytes // tensor.itemsize if whole else tensor.numel()
            self._by_key[key] = unit = SavedStorage(allocation, tuple(tensor.shape), tensor.dtype, numel, whole)
            self.units.append(unit)
        return unit

    def _source(self, saved: Saved, unit: SavedStorage) -> SavedStorage | None:
        """The unit whose values `saved` can be computed from again, under the conditions that a session has."""
        tensor = saved.tensor
        recipe = rematerialization_of(tensor) if tensor is not None and unit.whole else None
        source = self._sources.get(recipe.source._sequence_nr()) if recipe is not None else None
        if tensor is None or recipe is None or source is None or source[0] is not recipe.source:
            return None
        _, origin, size, stride = source
        if not origin.whole or not origin.numel == unit.numel == size.numel():
            return None
        if recipe.op == "layer_norm" and stride != torch.empty(size, device="meta").stride():
            return None
        if recipe.op == "batch_norm" and ((size, stride) != (tensor.size(), tensor.stride()) or recipe.sign is None):
            return None
        return origin

    def _pack(self, saved: Saved, tensor: Tensor, use: Use, unit: SavedStorage) -> None:
        waiting = unit.parts.get(use)
        if waiting is None:
            unit.recomputed_from = unit.recomputed_from or (self._source(saved, unit) if use is Use.VALUE else None)
            unit.parts[use] = waiting = StoredPart(use, self.timeline.tick(), saved.bound)
        if saved.op in SOURCE_OPS and saved.operand == "input":
            self._sources[saved.node._sequence_nr()] = (saved.node, unit, tensor.size(), tensor.stride())
        saved.raw.register_hooks(lambda tensor: SavedHandle(self, unit, waiting, tensor), SavedHandle.tensor)

    def decode(self, unit: SavedStorage, waiting: StoredPart) -> Tensor:
        """Flat memory for what waits; values are decoded once as long as somebody holds them, bits and integers each time."""
        last = waiting.decoded[-1] if waiting.decoded else None
        if last is not None and last.death is None and waiting.use is Use.VALUE:
            there = last.tensor()
            if there is not None:
                return there
        with self.timeline.owned_by(waiting):
            flat = torch.empty(unit.numel, dtype=unit.dtype)
        waiting.decoded.append(self.timeline.allocations[-1])
        return flat


def _is_float_mask(saved: Saved, allocation: Allocation) -> bool:
    """Whether this is the mask of a dropout on the CPU: random bits as floats, which no gradient flows to."""
    return saved.op == "mul" and allocation.op == RANDOM_BITS and saved.tensor is not None and not saved.tensor.requires_grad


def reason_not_packed(saved: Saved, unit: SavedStorage) -> str:
    """Why a saved tensor cannot be packed by any plan; "" where it can."""
    itemsize = unit.dtype.itemsize
    if unit.numel < MIN_PACKED_NUMEL:
        return f"it has fewer than {MIN_PACKED_NUMEL} values"
    if saved.kind == "input":
        return "the caller holds it"
    if saved.use is Use.EXACT:
        return saved.reason or "backward needs it as it is"
    if saved.use is Use.INDEX and index_bytes(saved.bound, itemsize) >= itemsize:
        return "integers without a known bound are kept as they are"
    dtype = str(unit.dtype).removeprefix("torch.")
    if saved.use is Use.VALUE and dtype not in FLOAT_BYTES:
        return f"it is {dtype}, which formats do not hold"
    return ""


def slots_of(recorder: Recorder, names: dict[Allocation, str], ends: int) -> list[Slot]:
    """A slot for each unit, and one for each cast of a weight that backward needs; `names` are those of the weights."""
    numbers: dict[Allocation, int] = {}
    slots = [_slot(unit, numbers.setdefault(unit.allocation, len(numbers)), ends) for unit in recorder.units]
    for made, name in recorder.weight_casts.items():
        parts = recorder.weight_parts(made, ends)
        death = _last(ends if made.death is None else made.death, parts)
        of = names.get(made.cast_of, "") if made.cast_of is not None and parts else ""
        module = name.partition(":")[0]
        slots.append(
            Slot(
                name,
                Role.TEMPORARY,
                module,
                made.shape,
                made.dtype,
                made.nbytes,
                made.birth,
                death,
                parts=parts,
                recomputed_from=of,
            )
        )
    return slots


def held_slots(held: Iterable[Allocation], ends: int) -> list[Slot]:
    """A slot for each allocation that waits for backward unknown to autograd's graph."""
    times: Counter[str] = Counter()
    slots: list[Slot] = []
    for number, made in enumerate(held):
        times[place := f"{made.module}:{made.op}"] += 1
        name = f"{place}#{times[place]}.held" if times[place] > 1 else f"{place}.held"
        death = ends if made.death is None else made.death
        saver = Saver(name, made.op, "held", Use.EXACT)
        slots.append(
            Slot(
                name,
                Role.ACTIVATION,
                made.module,
                made.shape,
                made.dtype,
                made.nbytes,
                made.birth,
                death,
                storage=-2 - number,
                dropped=death,
                savers=(saver,),
                stays=UNSEEN,
            )
        )
    return slots


def _slot(unit: SavedStorage, number: int, ends: int) -> Slot:
    dropped = ends if unit.allocation.death is None else unit.allocation.death
    parts = tuple(_part(waiting, ends) for waiting in unit.parts.values())
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
        death=_last(dropped, parts),
        numel=unit.numel,
        storage=number,
        dropped=dropped,
        savers=tuple(unit.savers),
        parts=parts,
        stays=unit.stays,
        recomputed_from=source.savers[source.first].name if source is not None and not source.stays else "",
    )


def _last(dropped: int, parts: tuple[Part, ...]) -> int:
    """When the last of an original and of what autograd has in its place is gone: the original's own end as the model is written."""
    return max([dropped, *(part.released for part in parts), *(end for part in parts for _, end in part.decoded)])


def _part(waiting: StoredPart, ends: int) -> Part:
    decoded = tuple((made.birth, ends if made.death is None else made.death) for made in waiting.decoded)
    return Part(waiting.use, waiting.packed, ends if waiting.handles else waiting.released, decoded, waiting.bound)
