"""Counts a session's forward passes, and what they store; measures how long packing takes.

ForwardStorage      the stored forms of a running forward pass, and the storages that it leaves unmodified
PassOutputs         the stored outputs of calls of submodules, which later calls may get as arguments
ActivationBytes     the bytes that a finished pass saved
ForwardCount        the number of passes, on the host and in the memory of devices
PackingTime         the share of encoding and decoding in the time of steps on a CPU
"""

# pyright: reportPrivateUsage=false, reportAttributeAccessIssue=false

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paredown.session.eager.slot_decisions import SlotDecisions
from paredown.session.eager.stored_tensors import (
    StorageRef,
    StoredForm,
    StoredMask,
    StoredValues,
    StoredView,
    has_expired,
)
from paredown.session.value_bounds import check_is_warm


@dataclass
class ForwardStorage:
    """Holds, for one running forward pass, what is stored of each saved tensor, and the storages that stay unmodified."""

    is_in_backward = False  # whether backward runs a part of the model again
    forms: dict[Any, StoredForm] = field(default_factory=dict)  # by (storage, version, ..., `use_and_detail`)
    at_address: dict[int, list[StoredForm]] = field(default_factory=dict)  # the same forms by storage address
    unpacked: dict[int, Tensor] = field(default_factory=dict)  # storage address -> a tensor that keeps the storage alive
    left: dict[Any, int] = field(default_factory=dict)  # key of a piece that could be packed, but is not -> its bytes
    masks: dict[Any, tuple[StoredMask, SlotDecisions]] = field(default_factory=dict)  # of ReLUs, by the key of their piece
    is_inside: bool = False  # whether the pass began with a call of a submodule
    produced: set[int] = field(default_factory=set)  # storages of earlier calls' outputs, and of arguments made of them
    in_place: set[Any] = field(default_factory=set)  # keys in `forms` of tensors that are views and were modified in place
    # Sequence number of a node -> (the node, its stored operand from which other tensors can be recomputed). Threads number their nodes
    # independently, so two nodes may share a number: an entry is valid for its own node only. Keeping the node alive is cheap: its
    # saved tensor is packed, and the entry lives as long as the forward pass.
    sources: dict[int, tuple[Any, StoredView]] = field(default_factory=dict)

    def baseline_bytes(self, unmodified: Mapping[int, int]) -> int:
        """Return the bytes that this pass would save without a plan; `unmodified`: bytes of unmodified storages by address."""
        originals = {key[0]: form.original_bytes for key, form in self.forms.items()}
        return sum({**originals, **unmodified}.values())

    def restore_held(self, held: dict[int, Tensor]) -> tuple[list[Any], list[Any]]:
        """Drop packed data whose original memory is kept allocated by a tensor in `held`, and use the original instead.

        `held`: tensors by storage address. Return two lists of keys of `forms`: those whose data was dropped, and those whose original is
        alive although no known tensor refers to it.
        """
        forms = {key: form for key, form in self.forms.items() if key[0] not in self.produced}
        for key, form in forms.items():
            if (original := form.original()) is not None:
                held.setdefault(key[0], original)
        restored, alive = list[Any](), list[Any]()
        for key, form in forms.items():
            holder = held.get(key[0])
            if holder is not None:
                if form.restore_original(holder):
                    restored.append(key)
            elif not has_expired(form.weak_storage):
                alive.append(key)
        return restored, alive

    def packable_sizes(self, held: Iterable[Any]) -> list[int]:
        """Return the bytes of each piece of memory that packing could free; `held`: keys of pieces that stay allocated anyway."""
        packed = {key[:-1]: form.numel * form.dtype.itemsize for key, form in self.forms.items()}
        return [size for size in {**packed, **self.left, **dict.fromkeys(held, 0)}.values() if size]

    def source(self, node: Any) -> StoredView | None:
        """Return the stored tensor of the autograd node `node`, to recompute others from; None if there is none."""
        entry = self.sources.get(node._sequence_nr()) if node is not None else None
        return entry[1] if entry is not None and entry[0] is node else None

    def pack_delayed(self) -> None:
        """Pack the masks that are not packed yet, because a later operation was expected to encode the same tensor."""
        for mask, slot in self.masks.values():
            if mask.delayed is not None:
                slot.is_delayed = False
                mask.pack()

    def pack_again(self, count: ForwardCount) -> None:
        """Pack the outputs of earlier calls of submodules again, once the caller has passed them on.

        While the caller held such an output, the stored form referred to the original tensor in place of packed data.
        """
        for form in self.forms.values():
            if type(form) is StoredMask:
                form.pack_again()
            elif type(form) is StoredValues and (plain := form.plain_values) is not None and plain._version == form.version:
                form.replace(form.codec, form.codec.encode(plain, count.at(plain)))


class PassOutputs:
    """Remembers the stored outputs of submodules' calls in one thread, to recognize them as later inputs.

    All references are weak, so that they end with the graph and the tensors of the step.
    """

    def __init__(self) -> None:
        self._forms: dict[Any, weakref.ref[StoredForm]] = {}  # by the key of `ForwardStorage.forms`
        self._unmodified: dict[int, StorageRef] = {}  # outputs that are saved unmodified, by storage address
        self._arguments: list[tuple[str, weakref.ref[StoredForm], StorageRef]] = []  # packed arguments: (slot, form, original)
        self.held: set[str] = set()  # slots of packed arguments that outlived the graph of their pass: the caller holds them

    def begin(self, storage: ForwardStorage, arguments: Iterable[Tensor], outputs: Collection[int]) -> None:
        """Begin a call of a submodule, with `arguments` that earlier calls returned.

        `outputs`: storage addresses of the outputs of those earlier calls.
        """
        self._find_held()
        self._unmodified = {address: ref for address, ref in self._unmodified.items() if not ref.expired()}
        alive = {key: form for key, ref in self._forms.items() if (form := ref()) is not None}
        forms = {key: form for key, form in alive.items() if not has_expired(form.weak_storage)}
        self._forms = {key: weakref.ref(form) for key, form in forms.items()}
        storage.is_inside = True
        storage.produced.update(outputs)
        for tensor in arguments:
            address = tensor.untyped_storage()._cdata
            storage.produced.add(address)
            if address in self._unmodified:
                storage.unpacked[address] = tensor
        for key, form in forms.items():
            if key[0] in storage.produced:
                storage.forms[key] = form
                storage.at_address.setdefault(key[0], []).append(form)

    def end(self, storage: ForwardStorage, outputs: Mapping[int, Tensor]) -> None:
        """End a call of a submodule, which returned `outputs` (by storage address)."""
        for address in storage.unpacked.keys() & outputs.keys():
            self._unmodified[address] = StorageRef(outputs[address].untyped_storage())
        for key, form in storage.forms.items():
            if key[0] in outputs or key[0] in storage.produced:
                self._forms[key] = weakref.ref(form)
            if key[0] in storage.produced and form.nbytes and (original := storage_of(form)) is not None:
                self._arguments.append((form.name, weakref.ref(form), StorageRef(original)))

    def _find_held(self) -> None:
        """Record the arguments whose memory the caller still holds after their graph was freed."""
        left: list[tuple[str, weakref.ref[StoredForm], StorageRef]] = []
        for name, form, ref in self._arguments:
            if ref.expired():
                self.held.discard(name)
            elif form() is None:
                self.held.add(name)
            else:
                left.append((name, form, ref))
        self._arguments = left


def storage_of(form: StoredForm) -> torch.UntypedStorage | None:
    """Return the original memory that a `StoredForm` replaces; None if it was freed."""
    return torch.UntypedStorage._new_with_weak_ptr(form.weak_storage)


class ThreadState(threading.local):
    """Holds the state of one thread: what its running forward pass stores, and the outputs of submodules that it called."""

    def __init__(self) -> None:
        self.storage: ForwardStorage | None = None  # the storage of the running pass
        self.outputs = PassOutputs()


class ActivationBytes(NamedTuple):
    """Counts a pass's bytes of activations: as stored, as the unmodified model saves them, and in host memory."""

    stored: int = 0
    baseline: int = 0
    on_host: int = 0


class ForwardCount:
    """Counts the forward passes of a session; the count selects the random bits of stochastic rounding.

    Kernels read the count from a tensor on their device. A CUDA graph adds to that tensor at each replay, so that replays draw new bits.
    """

    def __init__(self) -> None:
        self.on_host = 0
        self.on_device: dict[int, Tensor] = {}  # index of the device -> the count as one int32
        self._is_captured = False  # whether a CUDA graph counts forward passes on the device

    @property
    def value(self) -> int:
        """Return the number of forward passes, read from the device if a CUDA graph was captured."""
        if self._is_captured:
            self.on_host = max(self.on_host, *(int(step) for step in self.on_device.values()))
        return self.on_host

    @property
    def has_run(self) -> bool:
        """Return whether a forward pass has run, known without reading from a device."""
        return self._is_captured or self.on_host > 0

    @value.setter
    def value(self, count: int) -> None:
        self.on_host = count
        for step in self.on_device.values():
            step.fill_(count)

    def add(self) -> None:
        """Add one to the number of forward passes; while a CUDA graph is captured, the graph does so at each replay."""
        if self.on_device and torch.cuda.is_current_stream_capturing():
            self._is_captured = True
            for step in self.on_device.values():
                step.add_(1)
            return
        self.value += 1

    def at(self, tensor: Tensor) -> Any:
        """Return the number of forward passes as the codec takes it: an int, or an int32 tensor on `tensor`'s GPU."""
        if not tensor.is_cuda:
            return self.on_host
        step = self.on_device.get(tensor.get_device())
        if step is None:
            check_is_warm("packs a tensor on this device")
            step = torch.full((1,), self.on_host, dtype=torch.int32, device=tensor.device)
            self.on_device[tensor.get_device()] = step
        return step


class PackingTime:
    """Measures on a CPU the seconds that encoding and decoding activations take, and the seconds of whole steps.

    A step lasts from the start of one forward pass to the start of the next one; it counts if backward decoded something in between. On a
    GPU nothing is measured: operations run after the call that starts them has returned, and waiting for them would slow every step down.
    The time in which saved tensors are found is not counted as packing.
    """

    def __init__(self, clock: Callable[[], float] = perf_counter) -> None:
        self.clock = clock
        self._steps = [0.0, 0.0]  # seconds of packing, and all seconds, of the steps that count
        self._started, self._packing, self._has_decoded = 0.0, 0.0, False  # of the current step
        self._lock = threading.Lock()  # backward may decode in several threads

    @property
    def share(self) -> float | None:
        """Return the share of the steps' time that encoding and decoding took; None if no step was measured."""
        packing, whole = self._steps
        return packing / whole if whole > 0 else None

    def begin_step(self) -> None:
        """End the measurement of the last step, and begin that of a new one."""
        now = self.clock()
        if self._has_decoded:
            self._steps = [self._steps[0] + self._packing, self._steps[1] + now - self._started]
        self._started, self._packing, self._has_decoded = now, 0.0, False

    def add_since(self, start: float) -> None:
        """Add the time since `start` to the time of packing."""
        with self._lock:
            self._packing += self.clock() - start

    def unpacked(self, view: StoredView) -> Tensor:
        """Unpack a saved tensor on the CPU and return it; the time that this takes is added to the time of packing."""
        start = self.clock()
        tensor = view.tensor()
        self.add_since(start)
        self._has_decoded = True
        return tensor
