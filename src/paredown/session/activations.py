"""Packs the activations that a model saves for backward, and unpacks each one when backward uses it.

`trace.module_watch.Watch` reports every saved tensor to `Activations.save`, which replaces it by hooks of autograd
(`register_hooks` of the saved tensor). What is stored depends on what backward needs (`trace/operations.py`):

    backward needs          stored                                    unpacked
    value                   codes and scales in the plan's format     decoded values, same size and strides
                            or nothing, if another stored tensor      recomputed from that tensor (`trace/rematerialization.py`)
                            determines them
    sign, inside, mask      one exact bit per value                   two values for which backward gives the same result
    index                   integers of the smallest sufficient width the same integers
    shape                   nothing                                   uninitialized memory of that shape
    exact                   the tensor, unmodified                    the tensor

Parameters, their views and casts, buffers and tensors of the caller are never packed. A storage is packed once, however many operations
save it. Forms are shared by (storage object, version counter, dtype), not by data pointer: the allocator reuses addresses, and a weak
reference keeps the storage object's identity from being reused.

The caller keeps the model's outputs alive. Packed they would be in memory twice, so their stored forms refer to the original tensor again
when the forward pass ends.

Where the values of a tensor decide that it is not packed after all (large logits, constant channels): `value_bounds.py`.
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import isfinite
from time import perf_counter
from typing import Any, NamedTuple
from zlib import crc32

import torch
from torch import Tensor

from paredown.codec.packed import encode_flat
from paredown.codec.recompute import NO_BOUND, pack_mask
from paredown.formats.format import Format
from paredown.formats.rounding import Overflow, Rounding, Seed
from paredown.plan.plan import Plan
from paredown.plan.storage import is_same_level, keeps_enough, resolve_format
from paredown.roles import Role
from paredown.session.stored_tensors import (
    RecomputedValues,
    StoragePiece,
    StoredForm,
    StoredIntegers,
    StoredMask,
    StoredShape,
    StoredValues,
    StoredView,
    decode_steps_of,
)
from paredown.session.value_bounds import ValueBounds
from paredown.trace.autograd_graph import IN_PLACE_ON_VIEW, Saved, tensors_in
from paredown.trace.operations import CANCELS, EXPONENT, MIN_PACKED_NUMEL, Use
from paredown.trace.rematerialization import SOURCE_OPS, rematerialization_of
from paredown.trace.trace import index_dtype

LOGIT_PINS = (EXPONENT, CANCELS)  # the pins of query, key and value
REASONS = {
    "hooked": "other saved-tensor hooks hold it, such as those of activation checkpointing",
    "weight": "it is a weight",
    "buffer": "it is a buffer",
    "input": "the caller holds it",
}
NOT_FREED = (
    "its memory is not freed when the forward pass ends: something refers to it, such as a view, a detached tensor or a hook. "
    "Remove that reference, or hold a clone() instead"
)
IN_PLACE = (
    "an in-place operation modified a view of it, and autograd keeps the original where no hook can replace it. "
    "Use inplace=False, or clone() before the operation"
)


@dataclass(frozen=True)
class StorageDecision:
    """How a slot is stored. `asked`: the plan's format; `format`: the one used, None if unmodified; `reason`: why they differ."""

    asked: Format | None
    format: Format | None
    rounding: Rounding
    overflow: Overflow | None
    reason: str
    tensor_id: int


class Bounds(NamedTuple):
    """How a mask is stored: the bit is `low < value < high`; `values` are decoded for 1 and 0, None if no two values serve backward."""

    low: float
    high: float
    values: tuple[float, float] | None


Observer = Callable[[Saved, StoragePiece, StoredForm], None]


@dataclass
class ForwardStorage:
    """State of one running forward pass: the stored forms so far, and the storages that are not packed."""

    forms: dict[Any, StoredForm] = field(default_factory=dict)  # by storage, version, use and detail: see `_use_and_detail`
    unpacked: dict[int, Tensor] = field(default_factory=dict)  # storage address -> a tensor that keeps the storage alive
    names: dict[Any, str] = field(default_factory=dict)  # key in `forms` -> name of the first slot that saved it
    originals: dict[int, int] = field(default_factory=dict)  # storage address -> bytes of the original that forms replace
    in_place: set[Any] = field(default_factory=set)  # keys in `forms` of tensors that are views and were modified in place
    # Sequence number of a node -> (the node, its stored operand from which other tensors can be recomputed). Threads number their nodes
    # independently, so two nodes may share a number: an entry is valid for its own node only. Keeping the node alive is cheap: its
    # saved tensor is packed, and the entry lives as long as the forward pass.
    sources: dict[int, tuple[Any, StoredView]] = field(default_factory=dict)

    def source(self, node: Any) -> StoredView | None:
        """The stored operand of `node` from which other tensors can be recomputed; None if there is none."""
        entry = self.sources.get(node._sequence_nr()) if node is not None else None
        return entry[1] if entry is not None and entry[0] is node else None


class ActivationBytes(NamedTuple):
    """Bytes of the activations that one forward pass saved: as stored, and as the unmodified model saves them."""

    stored: int = 0
    baseline: int = 0


class PackingTime:
    """The seconds that encoding and decoding took on a CPU, and those of the steps around them, by `clock`.

    A step lasts from the start of one forward pass to the start of the next one; it counts if backward decoded something in between. On a
    GPU nothing is measured: operations run after the call that starts them has returned, and waiting for them would slow every step
    down. The time in which saved tensors are found is not counted as packing.
    """

    def __init__(self, clock: Callable[[], float] = perf_counter) -> None:
        self.clock = clock
        self._steps = [0.0, 0.0]  # seconds of packing, and all seconds, of the steps that count
        self._started, self._packing, self._has_decoded = 0.0, 0.0, False  # of the current step
        self._lock = threading.Lock()  # backward may decode in several threads

    @property
    def share(self) -> float | None:
        """Packing's share of the time of the steps that count; None if there is none."""
        packing, whole = self._steps
        return packing / whole if whole > 0 else None

    def begin_step(self) -> None:
        """Start of a forward pass, which ends the step before."""
        now = self.clock()
        if self._has_decoded:
            self._steps = [self._steps[0] + self._packing, self._steps[1] + now - self._started]
        self._started, self._packing, self._has_decoded = now, 0.0, False

    def add_since(self, start: float) -> None:
        """Count the time since `start` as packing."""
        with self._lock:
            self._packing += self.clock() - start

    def unpacked(self, view: StoredView) -> Tensor:
        """The unpacked saved tensor of a view on the CPU, its time counted."""
        start = self.clock()
        tensor = view.tensor()
        self.add_since(start)
        self._has_decoded = True
        return tensor


class Activations:
    """Packs the tensors that one model saves for backward."""

    def __init__(self, plan: Plan, seed: int) -> None:
        self.plan, self.seed, self.forwards = plan, seed, 0
        self.is_sharded = False  # whether parameters are freed between forward and backward
        self.names: set[str] = set()  # of all slots reported so far
        self.decisions: dict[str, StorageDecision] = {}
        self.not_packed: dict[str, str] = {}  # slot name -> why it cannot be packed
        self.restored: frozenset[str] = frozenset()  # slots whose original tensor outlived the last forward pass
        self.not_freed: dict[str, str] = {}  # packed slots whose original memory outlived the last forward pass -> why
        self.largest = ActivationBytes()  # of the forward pass that saved most
        self.packing_time = PackingTime()
        self.min_numel = MIN_PACKED_NUMEL
        self.on_packed: Observer = lambda saved, piece, form: None  # called after each saved tensor is packed
        self._decided: dict[tuple[Any, ...], StorageDecision] = {}
        self._forms: list[weakref.ref[StoredForm]] = []  # of all forward passes whose backward may still run
        self._local = threading.local()
        self._running: list[ForwardStorage] = []  # of the forward passes that are running, in all threads
        self._bounds = ValueBounds()
        self._lock = threading.Lock()  # threads of one forward pass share its ForwardStorage: each storage is packed once

    @property
    def stored_bytes(self) -> int:
        """Bytes of all forms that are stored at this moment."""
        return sum(form.nbytes for form in self.stored_forms())

    def stored_forms(self) -> list[StoredForm]:
        """All forms that are stored at this moment."""
        alive = [form for ref in self._forms if (form := ref()) is not None]
        self._forms = [weakref.ref(form) for form in alive]
        return alive

    def set_plan(self, plan: Plan) -> None:
        """Use `plan` from the next forward pass on."""
        self.plan = plan
        self._decided.clear()

    def begin(self, *, is_sharded: bool) -> None:
        """Start of a forward pass."""
        self.forwards += 1
        self.packing_time.begin_step()
        self.is_sharded = is_sharded
        self.stored_forms()  # drops dead references
        self._local.storage = ForwardStorage()
        self._running.append(self._local.storage)

    def end(self, output: Any) -> None:
        """End of a forward pass: forms whose original storage stays alive anyway refer to it instead of a packed copy.

        It stays alive if it belongs to the output, if the model or the caller holds the tensor, or if a saved tensor that is not packed
        shares it. If other references keep the memory alive, packing saves nothing: `not_freed` has the slots.
        """
        storage: ForwardStorage = self._local.storage
        self._local.storage = None
        self._running = [other for other in self._running if other is not storage]
        not_packed = {address: tensor.untyped_storage().nbytes() for address, tensor in storage.unpacked.items()}
        held = storage.unpacked
        held.update({t.untyped_storage()._cdata: t for t in tensors_in(output) if type(t) is Tensor and not t.is_inference()})
        for key, form in storage.forms.items():
            original = form.original()
            if original is not None:
                held.setdefault(key[0], original)
        restored = [key for key, form in storage.forms.items() if key[0] in held and form.restore_original(held[key[0]])]
        self.restored = frozenset(storage.names[key] for key in restored)
        alive = [key for key, form in storage.forms.items() if key[0] not in held and not form.storage.expired()]
        self._count(storage, {**not_packed, **{key[0]: storage.originals[key[0]] for key in (*restored, *alive)}})
        self.not_freed = {storage.names[key]: IN_PLACE if key in storage.in_place else NOT_FREED for key in alive}

    def _count(self, storage: ForwardStorage, unmodified: dict[int, int]) -> None:
        """Update `largest`; `unmodified`: storage address -> bytes of the saved tensors whose original stays in memory."""
        baseline = sum({**storage.originals, **unmodified}.values())
        if baseline > self.largest.baseline:
            self.largest = ActivationBytes(sum(unmodified.values()) + sum(form.nbytes for form in storage.forms.values()), baseline)

    def save(self, saved: Saved) -> None:
        """Replace one saved tensor by its stored form, if it can be packed."""
        tensor = saved.tensor
        self.names.add(saved.name)
        if saved.kind != "activation" or tensor is None or type(tensor) is not Tensor or tensor.layout is not torch.strided:
            if saved.name not in self.not_packed and saved.operand != "weight":
                self.not_packed[saved.name] = REASONS.get(saved.kind) or f"it is a {type(tensor).__name__}"
            return
        piece = StoragePiece(tensor)
        storage = self._current_storage()
        if piece.numel < self.min_numel or piece.address in storage.unpacked:
            return
        start = self.packing_time.clock()
        with self._lock:
            self._store(saved, tensor, piece, storage)
        if tensor.device.type == "cpu":
            self.packing_time.add_since(start)

    def _store(self, saved: Saved, tensor: Tensor, piece: StoragePiece, storage: ForwardStorage) -> None:
        use, detail = _use_and_detail(saved, tensor)
        key = (*piece.key, use, detail)
        form = storage.forms.get(key)
        if form is None or use is Use.VALUE:
            previous, form = form, MAKERS[use](self, saved, piece, form, detail)
            if form is None:
                storage.unpacked[piece.address] = tensor.detach()
                return
            if form is not previous:
                storage.forms[key] = form
                storage.names[key] = saved.name
                storage.originals[piece.address] = piece.storage.nbytes()
                if is_view_modified_in_place(tensor):
                    storage.in_place.add(key)
                self._forms.append(weakref.ref(form))
        if (
            tensor.grad_fn is not saved.node
        ):  # the output of the saving node itself arrives as a new tensor object that dies at once
            form.original = weakref.ref(tensor if tensor._base is None else tensor._base)
        view = StoredView(form, *piece.layout())
        if saved.op in SOURCE_OPS and saved.operand in ("input", "output"):
            storage.sources[saved.node._sequence_nr()] = saved.node, view
        saved.raw.register_hooks(lambda _: view, self.packing_time.unpacked if tensor.device.type == "cpu" else StoredView.tensor)
        self.on_packed(saved, piece, form)
        if self.not_packed:
            self.not_packed.pop(saved.name, None)

    def _current_storage(self) -> ForwardStorage:
        """That of the forward pass of this thread; in a worker thread of a forward pass, that of the pass started last."""
        storage: ForwardStorage | None = getattr(self._local, "storage", None)
        return storage if storage is not None else self._running[-1]

    def decide(self, saved: Saved, piece: StoragePiece) -> StorageDecision:
        """The format of a slot: the plan's, limited by what backward needs and by dtype and size."""
        numel = piece.numel
        key = (saved.name, numel, piece.tensor.dtype, saved.use, saved.pin, saved.is_centered)
        decision = self._decided.get(key)
        if decision is None:
            asked = self.plan.find((saved.name,), Role.ACTIVATION)
            dtype = str(piece.tensor.dtype).removeprefix("torch.")
            format, reason = resolve_format(asked, self.plan.needs_of(saved.name, saved.needs), dtype=dtype, numel=numel)
            rounding = asked.resolved_rounding if is_same_level(asked.format, format) else Rounding.NEAREST_EVEN
            overflow = asked.overflow if format is asked.format else None
            decision = StorageDecision(asked.format, format, rounding, overflow, reason, crc32(saved.name.encode()))
            self._decided[key] = decision
        self.decisions[saved.name] = decision
        return decision

    # --- one function for each use: the stored form, None to leave the tensor unmodified -----------------------------------------

    def _values(self, saved: Saved, piece: StoragePiece, previous: StoredForm | None, detail: Any) -> StoredForm | None:
        decision = self.decide(saved, piece)
        if decision.format is None:
            return previous if previous is not None and self._keeps_enough(previous, saved) else None
        if saved.pin is not None or saved.is_centered:
            reason = self._bounds.reason_to_keep(saved, decision.format, self.forwards)
            if reason:
                self.decisions[saved.name] = replace(decision, format=None, reason=reason)
                return None
        if previous is not None and self._keeps_enough(previous, saved):
            return previous
        recomputed = self._recomputed(saved, piece) if previous is None else None
        if recomputed is not None:
            return recomputed
        seed = Seed(self.seed, decision.tensor_id, self.forwards)
        packed = encode_flat(piece.flat(), decision.format, decision.rounding, decision.overflow, seed)
        if type(previous) is StoredValues:
            previous.packed = packed  # this operation needs more precision than the one that saved the tensor first
            return previous
        return StoredValues(piece, packed)

    def _recomputed(self, saved: Saved, piece: StoragePiece) -> StoredForm | None:
        """A form that recomputes the tensor from one that is stored already; None if it cannot, or not precisely enough."""
        rematerialization = rematerialization_of(piece.tensor)
        storage = self._current_storage()
        view = storage.source(rematerialization.source) if rematerialization is not None else None
        if rematerialization is None or view is None or not piece.is_whole:
            return None
        source = view.form
        if type(source) is not StoredValues or source.packed is None or not self._keeps_enough(source, saved):
            return None
        signs = storage.source(rematerialization.sign)
        if piece.tensor._version != (signs.form.version if signs is not None and signs.form.is_of(piece) else 0):
            return None  # modified in place in a way that the graph does not record
        steps = decode_steps_of(rematerialization, view, signs, piece, keeps_parameters=not self.is_sharded)
        return RecomputedValues(piece, source, steps) if steps is not None else None

    def _keeps_enough(self, form: StoredForm, saved: Saved) -> bool:
        """Whether decoded values of `form` are precise enough for the operation of `saved`."""
        values = form.source if isinstance(form, RecomputedValues) else form
        packed = values.packed if isinstance(values, StoredValues) else None
        return packed is None or keeps_enough(packed.format, self.plan.needs_of(saved.name, saved.needs))

    def _bits(self, saved: Saved, piece: StoragePiece, previous: StoredForm | None, detail: Any) -> StoredForm | None:
        bounds: Bounds = detail
        if bounds.values is None:
            return None
        return StoredMask(piece, pack_mask(piece.flat(), bounds.low, bounds.high), bounds.values)

    def _integers(self, saved: Saved, piece: StoragePiece, previous: StoredForm | None, detail: Any) -> StoredForm | None:
        width: torch.dtype = detail
        return None if width.itemsize >= piece.tensor.itemsize or piece.tensor.is_floating_point() else StoredIntegers(piece, width)

    def _shape(self, saved: Saved, piece: StoragePiece, previous: StoredForm | None, detail: Any) -> StoredForm | None:
        return StoredShape(piece)

    def _exact(self, saved: Saved, piece: StoragePiece, previous: StoredForm | None, detail: Any) -> StoredForm | None:
        self.not_packed.setdefault(saved.name, saved.reason)
        return None


Maker = Callable[[Activations, Saved, StoragePiece, StoredForm | None, Any], StoredForm | None]
MAKERS: dict[Use, Maker] = {
    Use.VALUE: Activations._values,
    Use.SIGN: Activations._bits,
    Use.INSIDE: Activations._bits,
    Use.MASK: Activations._bits,
    Use.INDEX: Activations._integers,
    Use.SHAPE: Activations._shape,
    Use.EXACT: Activations._exact,
}


def is_view_modified_in_place(tensor: Tensor) -> bool:
    """Whether `tensor` is a view, and the last operation on the tensor behind it modified a view in place."""
    node = tensor._base.grad_fn if tensor._base is not None else None
    return node is not None and node.name() == IN_PLACE_ON_VIEW


def _use_and_detail(saved: Saved, tensor: Tensor) -> tuple[Use, Any]:
    """What backward needs of a saved tensor, and the bounds (masks) or dtype (indices) of its stored form; both are part of its key.

    Several views of one storage may be saved. What depends on values is determined for one view only, so it must be part of the key: two
    views may hold {0, 1} and {0, 2}, and they may share bits only if both decode to the same two values.
    """
    if saved.use is Use.INSIDE:
        low, high = float(saved.node._saved_min_val), float(saved.node._saved_max_val)
        return Use.INSIDE, Bounds(low, high, _inside_and_outside(low, high, tensor.dtype))
    if saved.use is Use.SIGN or (saved.use is Use.MASK and not tensor.is_floating_point()):
        return saved.use, Bounds(0.0, NO_BOUND, (1.0, 0.0))  # the same for every view: one bit, whatever the values
    if saved.use is Use.MASK or (saved.use is Use.VALUE and saved.op == "mul" and not tensor.requires_grad):
        positive = _only_positive_value(tensor)
        if positive is not None or saved.use is Use.MASK:
            return Use.MASK, Bounds(0.0, NO_BOUND, (positive, 0.0) if positive is not None else None)
    # the width follows from a bound that the operation has checked, not from the values of this tensor
    return saved.use, _index_dtype(saved, tensor) if saved.use is Use.INDEX else None


def _inside_and_outside(low: float, high: float, dtype: torch.dtype) -> tuple[float, float] | None:
    """A value between two bounds, one of which may be infinite, and a value that is not; None if `dtype` has no value between them."""
    middle = (
        0.0 if low < 0 < high else (low + high) / 2 if isfinite(low + high) else 2 * high - 1 if isfinite(high) else 2 * low + 1
    )
    rounded = torch.tensor([low, middle, high], dtype=dtype)
    return (middle, high if isfinite(high) else low) if rounded[0] < rounded[1] < rounded[2] else None


def _only_positive_value(tensor: Tensor) -> float | None:
    """The positive value of a float tensor that holds that value and 0 only: a dropout mask on the CPU, or a routing weight.

    None for all other tensors, and on a GPU, where dropout has a boolean mask and reading values would synchronize with the device. The
    answer is valid for this view: the caller keys the stored form by it. A negative zero counts as another value: one bit cannot encode it.
    """
    if tensor.device.type != "cpu" or not tensor.is_floating_point() or not tensor.numel():
        return None
    largest = float(tensor.max())
    is_two_valued = largest > 0 and bool(((tensor == 0) | (tensor == largest)).all()) and not bool(torch.signbit(tensor).any())
    return largest if is_two_valued else None


def _index_dtype(saved: Saved, tensor: Tensor) -> torch.dtype:
    """The smallest integer dtype that holds an index."""
    return getattr(torch, index_dtype(saved.bound, str(tensor.dtype).removeprefix("torch.")))
