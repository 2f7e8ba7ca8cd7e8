"""Moves packed activations from a GPU to host memory between forward and backward, as `plan.offload` says.

`HostMemory` collects them layer by layer (`layer_of` the slot's name). A stream of its own copies the packed values of a layer to pinned
host memory while the next layer computes; when the layer after that begins, they are freed on the GPU. When backward first reads a value
of a layer, the layer before is copied back too, so that it arrives while this layer computes. At most two layers are on the GPU in each
direction. Memory is freed after waits of streams, not when a copy happens to be done: plan/planned_step.py predicts the same bytes.

The host memory is pinned; torch's allocator keeps it for the next step. If it cannot be allocated, this layer and all later ones stay on
the GPU as a whole, with a row in `session.changes`.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from paredown.plan.byte_intervals import pinned_pieces
from paredown.plan.plan import Plan
from paredown.plan.planned_step import IN_GRAPHS, NOT_CUDA, NOT_PACKED, READ_FIRST, layer_of
from paredown.plan.selectors import first_match
from paredown.session.eager.stored_tensors import HostCopy, StoredForm, StoredValues
from paredown.session.value_bounds import is_capturing

OFFLOADING_DEVICES = ("cuda",)
OFFLOAD, NOT_OFFLOADED = "offload", "where the model is"
CAPTURED = "a CUDA graph was captured, which a copy to host memory cannot be part of"
NOT_PINNED = "pinned host memory cannot be allocated: {}"
Row = tuple[str, str, str, str]  # the fields of a row of `session.changes`


class HostMemory:
    """Moves packed activations that the plan offloads to host memory and back, layer by layer."""

    def __init__(self, plan: Plan) -> None:
        self._plan, self._copies = plan, HostCopies()
        self._layers: dict[str, tuple[str, bool]] = {}  # slot name -> path of its layer, and whether the plan offloads it
        self._filling: OffloadedLayer | None = None  # the layer whose activations are being packed
        self._leaving: OffloadedLayer | None = None  # the layer before `_filling`, which is being copied to host memory
        self._is_new_pass = True
        self._packed: set[str] = set()  # names of the slots that were packed
        self._reason = ""  # why the last slots were not moved
        self._has_failed = False  # whether there was no pinned memory
        self._was_captured = False  # whether a CUDA graph has a step, and its values on the GPU

    def begin(self) -> None:
        """Begin a forward pass: the next saved tensor begins a new layer."""
        self._is_new_pass = True

    def reach(self, name: str, device: torch.device) -> bool:
        """Begin a new layer if activation `name` is not in the current one; return whether the layer can be moved to the host.

        It cannot be moved from a device without CUDA, while a CUDA graph is captured, or after pinned memory could not be allocated.
        """
        if self._has_failed:
            return False
        if device.type not in OFFLOADING_DEVICES or is_capturing():
            self._was_captured = device.type in OFFLOADING_DEVICES
            self._reason = CAPTURED if self._was_captured else NOT_CUDA
            return False
        if name not in self._layers:
            self._layers[name] = layer_of(name), self._plan.offloads(name)
        path = self._layers[name][0]
        if self._filling is None or self._is_new_pass or (self._filling.path, self._filling.device) != (path, device):
            self._begin_layer(path, device)
        return self._filling is not None

    def add(self, name: str, form: StoredForm) -> None:
        """Add the packed values of activation `name` to its layer, to be moved with it if the plan says so."""
        if type(form) is not StoredValues or form.stored is None:
            return
        if form.host is not None:
            form.host.is_moved |= self._plan.offloads(name)
            self._packed.add(name)
            form.host.names.append(name)
        elif self.reach(name, form.stored.device) and self._filling is not None:
            self._packed.add(name)
            self._filling.add(name, form, is_moved=self._layers[name][1])

    def _begin_layer(self, path: str, device: torch.device) -> None:
        """Begin the layer `path`: start copying the last layer to the host, and free GPU memory of the layer before that."""
        before, self._is_new_pass = self._filling, False
        if self._leaving is not None:
            self._leaving.leave()
        if before is not None:
            try:
                before.copy_to_host()
            except MemoryError as error:
                before.stay()
                self._reason, self._has_failed = str(error), True
                self._leaving = self._filling = None
                return
        self._leaving, self._filling = before, OffloadedLayer(path, device, self._copies, before)

    def changes(self, *, is_compiled: bool) -> list[Row]:
        """Return `session.changes` rows for names and patterns in `plan.offload` that are not (or no longer) moved."""
        is_refused, moved = is_compiled or self._has_failed or self._was_captured, self._copies.moved

        def reason(text: str) -> str:
            other = READ_FIRST if first_match((text,), self._packed) else NOT_PACKED
            return IN_GRAPHS if is_compiled else self._reason or other

        texts = [text for text in self._plan.offload if is_refused or not first_match((text,), moved)]
        return [(text, OFFLOAD, NOT_OFFLOADED, reason(text)) for text in texts]


class OffloadedLayer:
    """Moves the packed activations of one layer to host memory and back; `before` is the layer that backward needs next."""

    def __init__(self, path: str, device: torch.device, copies: HostCopies, before: OffloadedLayer | None) -> None:
        self.path, self.device, self._copies = path, device, copies
        self._before = weakref.ref(before) if before is not None else lambda: None
        self._added: list[weakref.ref[LayerCopy]] = []
        self._copied: Any = None  # the event after which the last copy of its values is complete, in either direction
        self._is_away, self._lock = False, threading.RLock()  # backward of a model on two GPUs reads in two threads
        self._arriving: list[Any] = []  # values that were copied back and that no stream has waited for

    def __del__(self) -> None:
        if self._arriving:  # nothing has read them: their memory must not be used again before the copy is complete
            self._copies.wait(self._copied, self.device)

    def add(self, name: str, form: StoredValues, *, is_moved: bool) -> None:
        """Add the packed values of activation `name`; `is_moved`: whether they are copied to host memory."""
        form.host = copy = LayerCopy(self, form, name, is_moved=is_moved)
        self._added.append(weakref.ref(copy))

    def _present(self) -> list[tuple[LayerCopy, StoredValues]]:
        """Return the layer's host copies that backward still needs, each with the `StoredValues` it copies."""
        copies = [copy for ref in self._added if (copy := ref()) is not None]
        return [(copy, form) for copy in copies if (form := copy.form()) is not None and form.host is copy]

    def copy_to_host(self) -> None:
        """Start copying the layer's values to host memory; raise MemoryError and copy none if it cannot be pinned."""
        present = [(copy, form) for copy, form in self._present() if copy.is_moved and form.stored is not None]
        if not present:
            return
        copies, self._copied = self._copies.to_host([form.stored for _, form in present], self.device)
        for (copy, form), on_host in zip(present, copies, strict=True):
            copy.on_host, copy.num_bytes = on_host, form.codec.nbytes
            self._copies.moved.update(copy.names)

    def stay(self) -> None:
        """Keep the layer's values on the GPU until backward."""
        for _, form in self._present():
            form.host = None

    def leave(self) -> None:
        """Free the layer's values on the GPU, once their copies in host memory are complete."""
        present = [form for copy, form in self._present() if copy.on_host is not None]
        if present:
            self._copies.wait(self._copied, self.device)
        for form in present:
            form.stored, self._is_away = None, True

    def bring_back(self) -> None:
        """Start copying this layer's values and the previous layer's back to the GPU, and wait for this layer's."""
        self.fetch()
        before = self._before()
        if before is not None:
            before.fetch()
        with self._lock:
            if self._copied is not None:
                self._copies.wait(self._copied, self.device)
                self._arriving.clear()

    def fetch(self) -> None:
        """Start copying the layer's values back to the GPU, unless they are there already."""
        with self._lock:
            if not self._is_away:
                return
            present = [(copy, form) for copy, form in self._present() if form.stored is None]
            self._arriving, self._copied = self._copies.to_device([copy.on_host for copy, _ in present], self.device)
            for (_, form), stored in zip(present, self._arriving, strict=True):
                form.stored = stored
            self._is_away = False


@final
class LayerCopy(HostCopy):
    """Holds the copy of one packed activation in host memory; it is moved together with its layer."""

    __slots__ = ("__weakref__", "form", "layer", "num_bytes", "on_host")

    def __init__(self, layer: OffloadedLayer, form: StoredValues, name: str, *, is_moved: bool) -> None:
        self.layer, self.form, self.names, self.is_moved = layer, weakref.ref(form), [name], is_moved
        self.on_host: Any = None
        self.num_bytes = 0

    def bring_back(self) -> None:
        """Copy the whole layer's values back to the device if needed, and let its current stream wait for them."""
        self.layer.bring_back()

    @property
    def nbytes(self) -> int:
        """Return the bytes of the copy in host memory; 0 before it is made."""
        return self.num_bytes


# --- copies ----------------------------------------------------------------------------------------------------------------------------


class HostBytes(NamedTuple):
    """Holds a copy of a packed tensor in host memory: the bytes of each tensor in it, split as `pinned_pieces` says.

    `like` is the same packed tensor on the meta device, with shapes and dtypes alone.
    """

    like: Any
    pieces: list[list[Tensor]]  # the pieces of each tensor


def mapped(stored: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Return a copy of `stored`, a codec's buffer or a `PackedTensor`, with `function` applied to each tensor in it."""
    return function(stored) if isinstance(stored, Tensor) else stored.mapped(function)


def flat_bytes(stored: Any) -> list[Tensor]:
    """Return the bytes of each tensor in `stored`, a codec's buffer or a `PackedTensor`, as flat uint8 views."""
    parts = [stored] if isinstance(stored, Tensor) else stored.parts.tensors()
    return [part.reshape(-1).view(torch.uint8) for part in parts]


class HostCopies:
    """Copies packed values between a GPU and host memory on a separate CUDA stream; on a CPU it copies at once."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, Any] = {}
        self.moved: set[str] = set()  # slots that were copied to host memory

    def to_host(self, stored: Sequence[Any], device: torch.device) -> tuple[list[HostBytes], Any]:
        """Start copying packed values to host memory; return the copies and the CUDA event at which they are complete.

        Raise MemoryError if pinned memory cannot be allocated.
        """
        sources = [flat_bytes(one) for one in stored]
        try:
            copies = [
                HostBytes(mapped(one, lambda part: torch.empty_like(part, device="meta")), [_pieces(part) for part in parts])
                for one, parts in zip(stored, sources, strict=True)
            ]
        except RuntimeError as error:
            raise MemoryError(NOT_PINNED.format(str(error).partition("\n")[0])) from None
        pairs = [(copy.pieces, parts) for copy, parts in zip(copies, sources, strict=True)]
        return copies, self._copy([pair for pieces, parts in pairs for pair in _by_piece(pieces, parts)], device)

    def to_device(self, on_host: Sequence[HostBytes], device: torch.device) -> tuple[list[Any], Any]:
        """Start copying `on_host` to new memory on `device`; return the copies and the CUDA event at which they are complete."""
        stored = [mapped(copy.like, lambda part: torch.empty_like(part, device=device)) for copy in on_host]
        pairs = [pair for copy, one in zip(on_host, stored, strict=True) for pair in _by_piece(copy.pieces, flat_bytes(one))]
        return stored, self._copy([(target, piece) for piece, target in pairs], device)

    def wait(self, copied: Any, device: torch.device) -> None:
        """Let the current stream of `device` wait for the event `copied`, at which copies are complete."""
        if copied is not None:
            torch.cuda.current_stream(device).wait_event(copied)

    def _copy(self, pairs: list[tuple[Tensor, Tensor]], device: torch.device) -> Any:
        """Copy each pair's second tensor to its first, on the copy stream, after work queued on the current stream."""
        if device.type == "cpu":
            for target, source in pairs:
                target.copy_(source)
            return None
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        stream = self._streams[device]
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
        return stream.record_event()


def _pieces(part: Tensor) -> list[Tensor]:
    """Return uninitialized host memory for the bytes of `part`, in pieces; it is pinned if `part` is on a GPU."""
    is_pinned = part.device.type == "cuda"
    return [torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=is_pinned) for size in pinned_pieces(part.nbytes)]


def _by_piece(pieces: list[list[Tensor]], parts: list[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield each piece of host memory with the bytes of a device tensor in `parts` that it is copied from or to."""
    for of_part, part in zip(pieces, parts, strict=True):
        yield from zip(of_part, part.split([piece.numel() for piece in of_part]), strict=True)
