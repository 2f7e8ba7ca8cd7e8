"""Packs the activations that a model saves for backward, and unpacks each one when backward uses it.

`autograd.module_watch.Watch` reports every saved tensor to `Activations.save`, which replaces it by hooks of autograd
(`register_hooks` of the saved tensor). What is stored depends on what backward needs (`autograd/operations.py`):

    backward needs          stored                                    unpacked
    value                   codes and scales in the plan's format     decoded values, same size and strides
                            or nothing, if another stored tensor      recomputed from that tensor (`autograd/rematerialization.py`)
                            determines them
    sign, inside, mask      one exact bit per value                   two values for which backward gives the same result
    index                   integers of the smallest sufficient width the same integers
    shape                   nothing                                   uninitialized memory of that shape
    exact                   the tensor, unmodified                    the tensor

Parameters, their views and casts, buffers and tensors of the caller are never packed. A storage is packed once, however many operations
save it. Stored data is shared by (storage object, version counter, dtype), not by data pointer: the allocator reuses addresses, and a weak
reference keeps the storage object's identity from being reused.

The caller keeps the model's outputs alive, which would be in memory twice if they were packed: when the forward pass ends, their stored
forms (what stands for them in memory) refer to the original tensors again.

On a GPU the backward of a ReLU reads the stored bits (`codec.recompute.ReluOutput`). A ReLU's output that the next operation encodes is
read once for both: from the second pass on its mask is packed by the kernel that encodes it (`StoredMask.delayed`).

Where the values of a tensor decide that it is not packed after all (large logits, constant channels): `session/value_bounds.py`.
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from paredown.autograd.graph import Saved, is_view_modified_in_place, tensors_in
from paredown.autograd.hooks import patched_attributes
from paredown.autograd.operations import MIN_PACKED_NUMEL, Use, max_left_bytes
from paredown.autograd.rematerialization import Rematerialization, rematerialization_of
from paredown.codec.packed import flat_codec
from paredown.codec.recompute import NO_BOUND, empty_mask, pack_mask
from paredown.formats.format import Format
from paredown.formats.rounding import Rounding, Seed
from paredown.plan.plan import Plan
from paredown.plan.storage import keeps_enough
from paredown.session.eager.forward_passes import ActivationBytes, ForwardCount, ForwardStorage, PackingTime, ThreadState
from paredown.session.eager.host_memory import HostMemory
from paredown.session.eager.recomputed_values import RecomputedValues, decode_steps_of
from paredown.session.eager.slot_decisions import (
    HELD_BY_CALLER,
    IN_PLACE,
    NOT_FREED,
    REASONS,
    SlotDecisions,
    StorageDecision,
    form_for,
    storage_decision,
)
from paredown.session.eager.stored_tensors import (
    DecodedCopies,
    StoragePiece,
    StoredForm,
    StoredMask,
    StoredValues,
    StoredView,
)
from paredown.session.value_bounds import ValueBounds, use_and_detail

FP32 = Format.parse("fp32")
VALUE = Use.VALUE
Observer = Callable[[Saved, StoragePiece, StoredForm], None]


class Activations:
    """Stores the saved activations of one model: packs each in forward, and unpacks it when backward uses it."""

    def __init__(self, plan: Plan, seed: int, *, min_numel: int = MIN_PACKED_NUMEL) -> None:
        """Prepare to pack as `plan` says, rounding with `seed`; tensors below `min_numel` values stay unmodified."""
        self.plan, self.seed, self.min_numel = plan, seed, min_numel
        self.host = HostMemory(plan) if plan.offload else None
        self.count = ForwardCount()
        self.is_sharded = False  # whether parameters are freed between forward and backward
        self.names: set[str] = set()  # names of all slots (saved tensors) reported so far
        self.decisions: dict[str, StorageDecision] = {}
        self.not_packed: dict[str, str] = {}  # slot name -> why it cannot be packed
        self.restored: frozenset[str] = frozenset()  # slots whose original tensor outlived the last forward pass
        self.not_freed: dict[str, str] = {}  # packed slots whose original memory outlived the last forward pass -> why
        self.largest = ActivationBytes()  # the bytes of the forward pass that saved most
        self.packing_time = PackingTime()
        self.on_packed: Observer | None = None  # called after each saved tensor is packed
        # called on a GPU with the slots that stay unmodified because they are small, and their largest bytes; None: all are packed
        self.on_small: Callable[[set[str], int], None] | None = None
        self.small: set[str] = set()  # slots of tensors that are left unmodified, up to `max_left_bytes`
        self.max_left_bytes = self._chosen_for = 0  # and the baseline bytes of the pass that they were chosen after
        self._decided: dict[tuple[Any, ...], StorageDecision] = {}
        self._slots: dict[str, SlotDecisions] = {}
        self._plan_number = 0  # of the plan and seed that slots were decided for
        self._forms: list[weakref.ref[StoredForm]] = []  # of all forward passes whose backward may still run
        self._local = ThreadState()
        self._running: list[ForwardStorage] = []  # of the forward passes that are running, in all threads
        self._bounds, self._copies = ValueBounds(), DecodedCopies()
        self._lock = threading.Lock()  # threads of one forward pass share its ForwardStorage: each storage is packed once

    @property
    def forwards(self) -> int:
        """Return the number of forward passes so far."""
        return self.count.value

    @forwards.setter
    def forwards(self, count: int) -> None:
        self.count.value = count

    @property
    def stored_bytes(self) -> int:
        """Return the bytes of all activations that are stored at this moment."""
        return sum(form.nbytes for form in self.stored_forms())

    @property
    def host_bytes(self) -> int:
        """Return the bytes of packed activations that are in host memory at this moment."""
        forms = self.stored_forms() if self.host is not None else ()
        return sum(form.host.nbytes for form in forms if type(form) is StoredValues and form.host is not None)

    def stored_forms(self) -> list[StoredForm]:
        """Return the data that is stored at this moment: one `StoredForm` for each packed piece of memory."""
        alive = [form for ref in self._forms if (form := ref()) is not None]
        self._forms = [weakref.ref(form) for form in alive]
        return alive

    @contextmanager
    def storing_exactly(self) -> Generator[None]:
        """Return a context in which saved tensors are stored in float32, so that only storing is tested, not rounding."""
        decide = self.decide

        def exact(*arguments: Any) -> StorageDecision:
            decision = decide(*arguments)
            if decision.format is None:
                return decision
            return replace(decision, format=FP32, rounding=Rounding.NEAREST_EVEN, overflow=None)

        with patched_attributes(self, decide=exact, _slots={}, _plan_number=-1, _recomputed=lambda *_: None):
            yield

    @contextmanager
    def observed_by(self, observer: Observer) -> Generator[None]:
        """Return a context in which `observer` is called after each saved tensor is packed."""
        with patched_attributes(self, on_packed=observer):
            yield

    def observe(self, observer: Observer | None) -> None:
        """Set a function that is called after each saved tensor is packed; None removes it."""
        self.on_packed = observer

    @contextmanager
    def storing_in(self, storage: ForwardStorage) -> Generator[None]:
        """Return a context in which this thread stores saved tensors in `storage`, used when backward runs a layer again."""
        with patched_attributes(self._local, storage=storage):
            yield

    @contextmanager
    def restored_after(self) -> Generator[Callable[[], None]]:
        """Return a context that restores storage decisions and the number of forward passes when it ends.

        It yields a function that resets the number at once.
        """
        forwards, restored = self.forwards, self.restored
        decisions, not_packed = dict(self.decisions), dict(self.not_packed)

        def rewind() -> None:
            self.forwards = forwards

        with self.observed_by(lambda *_: None):
            try:
                yield rewind
            finally:
                rewind()
                self.restored, self.decisions, self.not_packed = restored, decisions, not_packed

    def set_plan(self, plan: Plan) -> None:
        """Use `plan` from the next forward pass on."""
        self.plan = plan
        self._decided.clear()
        self._forget_slots()

    def report_small_to(self, on_small: Callable[[set[str], int], None]) -> None:
        """Set the function that is called with the slot names of tensors too small to pack, and their largest size in bytes."""
        self.on_small = on_small

    def resume(self, seed: int, forwards: int) -> None:
        """Continue with the random bits of `seed` after `forwards` forward passes."""
        self.seed, self.forwards = seed, forwards
        self._forget_slots()

    def _forget_slots(self) -> None:
        self._slots.clear()
        self._plan_number += 1

    def begin(self, *, is_sharded: bool) -> None:
        """Begin a forward pass; `is_sharded`: whether parameters are freed between forward and backward."""
        self.count.add()
        if self.host is not None:
            self.host.begin()
        self.packing_time.begin_step()
        self.is_sharded = is_sharded
        self.stored_forms()  # drops dead references
        self._local.storage = storage = ForwardStorage()
        self._running.append(storage)

    def begin_inside(self, arguments: list[Tensor], outputs: set[int]) -> None:
        """Record that this thread's forward pass began with a call of a submodule on results of earlier calls.

        `outputs`: storage addresses of the outputs of those earlier calls.
        """
        storage = self._current_storage()
        self._local.outputs.begin(storage, arguments, outputs)
        storage.pack_again(self.count)

    def end(self, output: Any) -> None:
        """End a forward pass that returned `output`, and drop packed copies of memory that stays allocated anyway.

        A storage stays alive if it belongs to the output, if the model or the caller holds the tensor, or if a saved tensor that is not
        packed shares it. Where unknown references keep a storage alive, packing saves nothing: `not_freed` names such slots.
        """
        storage, self._local.storage = self._local.storage, None
        assert storage is not None
        self._running = [other for other in self._running if other is not storage]
        storage.pack_delayed()
        not_packed = {address: tensor.untyped_storage().nbytes() for address, tensor in storage.unpacked.items()}
        outputs = {t.untyped_storage()._cdata: t for t in tensors_in(output) if type(t) is Tensor and not t.is_inference()}
        if storage.is_inside:
            self._local.outputs.end(storage, outputs)
        storage.unpacked.update(outputs)
        forms, (restored, alive) = storage.forms, storage.restore_held(storage.unpacked)
        self.restored = frozenset(forms[key].name for key in restored)
        unmodified = {**not_packed, **{key[0]: forms[key].original_bytes for key in (*restored, *alive)}}
        baseline = storage.baseline_bytes(unmodified)
        if baseline > self.largest.baseline:
            stored = sum(unmodified.values()) + sum(form.nbytes for form in forms.values())
            self.largest = ActivationBytes(stored, baseline, self.host_bytes)
        if self.count.on_device and output is not None and self.on_small is not None and baseline > 1.25 * self._chosen_for:
            self._choose_small(storage, {key[:-1] for key in (*restored, *alive)}, baseline, self.on_small)
        self.not_freed = dict.fromkeys(self._local.outputs.held, HELD_BY_CALLER)
        self.not_freed.update({forms[key].name: IN_PLACE if key in storage.in_place else NOT_FREED for key in alive})

    def _choose_small(
        self, storage: ForwardStorage, held: set[Any], baseline: int, leave_out: Callable[[set[str], int], None]
    ) -> None:
        """Choose the smallest saved tensors, which stay unmodified from the next forward pass on.

        If small tensors are left unmodified already, and this pass saved more than before, all of them are packed in the next pass, so that
        their sizes are known. `held`: keys of memory that stays allocated anyway. `baseline`: the bytes that the pass saves without a plan.
        `leave_out` is called with the slots of the chosen tensors and the limit in bytes.
        """
        has_changed = bool(self.small)
        if has_changed:
            self.max_left_bytes = 0
        else:
            self.max_left_bytes, self._chosen_for = max_left_bytes(storage.packable_sizes(held)), baseline
        self.small = {name for name, slot in self._slots.items() if slot.nbytes <= self.max_left_bytes}
        for name in self.small:
            self.decisions.pop(name, None)
            del self._slots[name]
        if has_changed or self.small:
            leave_out(self.small, self.max_left_bytes)

    def save(self, saved: Saved) -> None:
        """Replace a tensor that autograd saved by its packed form, if it can be packed."""
        tensor = saved.tensor
        if saved.kind != "activation" or tensor is None or type(tensor) is not Tensor or tensor.layout is not torch.strided:
            self.names.add(saved.name)
            if saved.name not in self.not_packed and saved.operand != "weight":
                self.not_packed[saved.name] = REASONS.get(saved.kind) or f"it is a {type(tensor).__name__}"
            return
        slot = self._slots.get(saved.name)
        if slot is None or not slot.fits(saved, tensor):
            slot, piece = None, StoragePiece(tensor)
            self.names.add(saved.name)
        else:
            piece = StoragePiece(tensor, slot.known)
        storage = self._current_storage()
        if piece.numel >= self.min_numel and piece.address not in storage.unpacked:
            self._store(saved, piece, slot, storage, saved.node, saved.raw)

    def saved_by(self, *ends: str) -> dict[str, tuple[torch.Size, int]]:
        """Return {slot name: (shape, bytes)} of the saved tensors whose slot names end with one of `ends`."""
        found = {name: slot.memory for name, slot in self._slots.items() if name.endswith(ends)}
        return {name: (size, nbytes) for name, (_, _, nbytes, size, *_) in found.items()}

    def save_again(self, seen: Saved, node: Any, raw: Any, tensor: Tensor, inputs: frozenset[int]) -> None:
        """Replace a saved tensor by packed data, as decided when the same operation saved a tensor in an earlier pass.

        `seen` describes that earlier tensor; its decisions are used again if nothing that they depend on has changed. `raw`: the handle
        by which the autograd node `node` exposes the new tensor. `inputs`: storage addresses of the caller's tensors.
        """
        slot: SlotDecisions | None = seen.slot
        if slot is not None and slot.plan_number == self._plan_number and self.on_packed is None and type(tensor) is Tensor:
            piece = StoragePiece(tensor, slot.known)
            place = tensor.size(), tensor.stride(), tensor.storage_offset()
            # what `memory_of` returns, without another call
            memory = (tensor.get_device(), tensor.dtype, piece.storage.nbytes(), *place)
            if memory == slot.memory and piece.address not in inputs:
                storage = self._current_storage()
                if piece.address not in storage.unpacked:
                    if slot.is_unmodified and self.host is None and piece.address not in storage.at_address:  # as by `_leave`
                        storage.left[piece.key], storage.unpacked[piece.address] = slot.nbytes, tensor
                    elif slot.is_cuda:
                        with self._lock:
                            self._replace(seen, piece, slot, storage, node, raw)
                    else:
                        self._store(seen, piece, slot, storage, node, raw)
                return
        is_input = tensor.untyped_storage()._cdata in inputs
        self.save(seen.again("input" if is_input else "activation", node, raw, tensor))
        slot = None if is_input else self._slots.get(seen.name)
        seen.slot = slot if slot is not None and slot.is_fixed else None

    def _slot(self, saved: Saved, piece: StoragePiece) -> SlotDecisions:
        """Return decisions on how to store the tensor that an operation saves, and keep them for later passes."""
        slot = SlotDecisions(saved, piece, use_and_detail(saved, piece.tensor), self._plan_number)
        self._slots[saved.name] = slot
        return slot

    def _store(
        self, saved: Saved, piece: StoragePiece, slot: SlotDecisions | None, storage: ForwardStorage, node: Any, raw: Any
    ) -> None:
        """Store a saved tensor packed, and on a CPU measure the time that this takes; if `slot` is None, decide how to store it.

        `piece`: the memory to pack. `storage`: what this forward pass stores. `raw`: the handle by which the autograd node `node` exposes
        the tensor, and on which hooks are registered.
        """
        start = self.packing_time.clock()
        with self._lock:
            self._replace(saved, piece, slot or self._slot(saved, piece), storage, node, raw)
        if not piece.tensor.is_cuda:
            self.packing_time.add_since(start)

    def _replace(
        self, saved: Saved, piece: StoragePiece, slot: SlotDecisions, storage: ForwardStorage, node: Any, raw: Any
    ) -> None:
        """Put packed data in place of a saved tensor, encoded now or shared with another tensor of the same memory.

        The arguments are those of `_store`.
        """
        tensor, forms = piece.tensor, storage.forms
        found = slot.detail if slot.is_fixed else use_and_detail(saved, tensor)
        key = (*piece.key, found)
        form = previous = forms.get(key)
        if found[0] is VALUE:
            form = self._values(saved, piece, previous, slot, storage, node)
        elif previous is None:
            form = self._sign(piece, slot, storage) if slot.can_be_delayed else form_for(*found, piece)
        if form is None:
            self._leave(saved, piece, slot, storage, found[0])
            return
        base = tensor._base
        if form is not previous:
            forms[key] = form
            storage.at_address.setdefault(piece.address, []).append(form)
            form.name, form.original_bytes = saved.name, slot.memory[2]
            self._forms.append(weakref.ref(form))
            if base is not None and is_view_modified_in_place(tensor):
                storage.in_place.add(key)
        # the output of the saving node itself arrives as a new tensor object that dies at once
        if node is None or tensor.grad_fn is not node:
            form.original = weakref.ref(tensor if base is None else base)
        form.num_views += 1
        view = StoredView(form, slot.layout)
        if slot.is_source and node is not None:
            storage.sources[node._sequence_nr()] = node, view
        raw.register_hooks(view, slot.unpack if slot.is_cuda else self.packing_time.unpacked)
        if self.on_packed is not None:
            self.on_packed(saved, piece, form)
        if self.host is not None and not storage.is_in_backward:
            self.host.add(saved.name, form)
        self.not_packed.pop(saved.name, None)

    def _leave(self, saved: Saved, piece: StoragePiece, slot: SlotDecisions, storage: ForwardStorage, use: Use) -> None:
        """Keep a saved tensor unmodified, and drop packed copies of its memory. `use`: what backward needs of the tensor."""
        if use is Use.EXACT:
            self.not_packed.setdefault(saved.name, saved.reason)
        if use is VALUE and self.host is not None and not storage.is_in_backward:
            self.host.reach(saved.name, piece.tensor.device)
        storage.left[piece.key] = slot.nbytes if use is VALUE else 0
        storage.unpacked[piece.address] = unmodified = piece.tensor
        for form in storage.at_address.get(piece.address, ()):
            form.restore_original(unmodified)
        if piece.key in storage.masks:
            storage.masks[piece.key][1].is_delayed = not slot.checks_values

    def _current_storage(self) -> ForwardStorage:
        """Return the `ForwardStorage` of this thread's forward pass; in a worker thread, of the pass started last."""
        return self._local.storage or (self._running[-1] if self._running else ForwardStorage())

    def decide(self, saved: Saved, piece: StoragePiece) -> StorageDecision:
        """Return how a saved tensor is stored: as requested, if backward's needs, its dtype and its size allow it."""
        decision = self._decided.get(key := (saved.name, piece.numel, piece.tensor.dtype, saved.use, saved.pin, saved.is_centered))
        if decision is None:
            decision = self._decided[key] = storage_decision(self.plan, saved, piece)
        self.decisions[saved.name] = decision
        return decision

    def _values(
        self,
        saved: Saved,
        piece: StoragePiece,
        previous: StoredForm | None,
        slot: SlotDecisions,
        storage: ForwardStorage,
        node: Any,
    ) -> StoredForm | None:
        decision = slot.decision
        if decision is None:
            decision = slot.decision = self.decide(saved, piece)
        self.decisions[saved.name] = decision
        if decision.format is None:
            slot.is_unmodified = True
            return previous if previous is not None and self._keeps_enough(previous, saved) else None
        if slot.checks_values:
            reason = self._bounds.known_reason(saved.name, decision.format, self.count.on_host)
            if reason is None:
                whole = saved if saved.tensor is not None else saved.again(saved.kind, node, None, piece.tensor)
                reason = self._bounds.reason_to_keep(whole, decision.format, self.count.on_host)
            if reason:
                self.decisions[saved.name] = replace(decision, format=None, reason=reason)
                return None
        if previous is None:
            form = self._determined(saved, piece, storage)
            if form is not None:
                return form
        elif self._keeps_enough(previous, saved):
            return previous
        stored = self._encoded(slot, decision, piece, storage)
        codec = slot.codec
        assert codec is not None
        if type(previous) is StoredValues:  # this operation needs more precision than the one that saved the tensor first
            previous.replace(codec, stored)
            return previous
        return StoredValues(piece, codec, stored, self._copies)

    def _encoded(self, slot: SlotDecisions, decision: StorageDecision, piece: StoragePiece, storage: ForwardStorage) -> Any:
        codec, tensor = slot.codec, piece.tensor
        if codec is None:
            assert decision.format is not None
            how, seed = (decision.rounding, decision.overflow), Seed(self.seed, decision.tensor_id)
            codec = slot.codec = flat_codec(tensor, piece.numel, decision.format, how, seed)
            slot.by_address = codec.takes_address and piece.is_whole and slot.offset == 0
        step = self.count.on_device.get(slot.memory[0])
        if step is None:
            step = self.count.at(tensor)
        if not slot.by_address:
            return codec.encode(piece.flat(), step)
        found = storage.masks.get(piece.key) if storage.masks else None
        if found is None:
            return codec.encode(tensor, step)
        mask, of_mask = found
        if mask.delayed is None:
            of_mask.is_delayed = True  # from the next pass on
            return codec.encode(tensor, step)
        mask.bits, mask.delayed = empty_mask(tensor), None
        return codec.encode(tensor, step, mask.bits)

    def _determined(self, saved: Saved, piece: StoragePiece, storage: ForwardStorage) -> StoredForm | None:
        """Return a `StoredForm` without values if backward can recompute the tensor from another stored one, else None."""
        recomputation = rematerialization_of(piece.tensor)
        while recomputation is not None:
            form = self._recomputed(saved, piece, recomputation, storage)
            if form is not None:
                return form
            recomputation = recomputation.otherwise
        return None

    def _recomputed(
        self, saved: Saved, piece: StoragePiece, rematerialization: Rematerialization, storage: ForwardStorage
    ) -> StoredForm | None:
        """Return a `StoredForm` by which backward recomputes the tensor; None if that is impossible or imprecise.

        `rematerialization`: the operation to apply, and the node that saved its input.
        """
        view = storage.source(rematerialization.source)
        if view is None or not piece.is_whole:
            return None
        source = view.form
        if type(source) is not StoredValues or not source.is_packed or not self._keeps_enough(source, saved):
            return None
        signs = storage.source(rematerialization.sign)
        if piece.tensor._version != (signs.form.version if signs is not None and signs.form.is_of(piece) else 0):
            return None  # modified in place in a way that the graph does not record
        steps = decode_steps_of(rematerialization, view, signs, piece, keeps_parameters=not self.is_sharded)
        if steps is None:
            return None
        return RecomputedValues(piece, source, steps)

    def _keeps_enough(self, form: StoredForm, saved: Saved) -> bool:
        """Return whether the decoded values of `form` are precise enough for the operation that saved the tensor."""
        values = form.source if type(form) is RecomputedValues else form
        if type(values) is not StoredValues or not values.is_packed:
            return True
        slot, format = self._slots[saved.name], values.codec.format
        if slot.sufficient is not format:
            if not keeps_enough(format, self.plan.needs_of(saved.name, slot.needs)):
                return False
            slot.sufficient = format
        return True

    def _sign(self, piece: StoragePiece, slot: SlotDecisions, storage: ForwardStorage) -> StoredForm:
        """Return a `StoredMask` of a ReLU's output; its bits may be packed later, by the kernel that encodes the same tensor."""
        x = piece.tensor
        if slot.is_delayed and self.on_packed is None:
            form = StoredMask(piece, None, (1.0, 0.0), x.detach())
        else:
            form = StoredMask(piece, pack_mask(x, 0.0, NO_BOUND), (1.0, 0.0))
        storage.masks[piece.key] = form, slot
        return form
