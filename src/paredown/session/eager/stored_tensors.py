"""Defines the forms in which a saved tensor is stored between forward and backward; each form can unpack its values.

    StoredValues        codes and scales in a format                  StoredMask          one bit per value
    StoredIntegers      integers of a smaller width                   StoredShape         nothing: only the shape matters
    RecomputedValues    nothing: recomputed from StoredValues (recomputed_values.py)

A `StoredForm` covers a flat `StoragePiece`: a whole storage in memory order, or a copy of a view that is a small part of its storage.
A `StoredView` has the size, strides and offset of the saved tensor in that piece. If the original storage turns out to stay alive anyway,
`restore_original` drops the packed data and makes the form refer to the original.
"""

# pyright: reportPrivateUsage=false, reportAttributeAccessIssue=false

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from paredown.autograd.graph import is_packed_whole
from paredown.codec.packed import FlatCodec, PackedTensor
from paredown.codec.recompute import NO_BOUND, ReluOutput, pack_mask, unpack_mask
from paredown.optim.packed_weight import MODIFIED

has_expired: Callable[[int], Any] = torch.UntypedStorage._expired


class StoragePiece:
    """Describes the flat memory that is packed for a saved tensor: its whole storage, or a copy of a small view.

    Two pieces have the same `key` if they are the same memory with the same contents, as long as a weak reference to the storage keeps
    `address` from being reused.
    """

    __slots__ = ("address", "is_whole", "key", "numel", "storage", "tensor")

    def __init__(self, tensor: Tensor, known: tuple[bool, int] | None = None) -> None:
        """Choose whether to pack the whole storage of `tensor`, or only a copy of `tensor`, if it is a small view.

        `known`: (is_whole, numel) of an earlier tensor with the same layout, so that they need not be computed again.
        """
        self.tensor = tensor
        self.storage = storage = tensor.untyped_storage()
        self.address = address = storage._cdata
        if known is None:
            storage_bytes = storage.nbytes()
            is_whole = is_packed_whole(tensor, storage_bytes)
            known = is_whole, storage_bytes // tensor.itemsize if is_whole else tensor.numel()
        self.is_whole, self.numel = known
        key = (address, tensor._version, tensor.dtype)
        self.key: tuple[Any, ...] = key if known[0] else (*key, tensor.storage_offset(), tensor.size(), tensor.stride())

    def flat(self) -> Tensor:
        """Return the values of the piece in memory order, shape (numel,)."""
        source = self.tensor if self.is_whole else self.tensor.clone()
        return source.as_strided((self.numel,), (1,), 0)

    def layout(self) -> ViewLayout:
        """Return size, strides and offset of the saved tensor within this piece of memory."""
        tensor = self.tensor
        if self.is_whole:
            is_all = tensor.numel() == self.numel and is_dense(tensor.size(), tensor.stride())
            return ViewLayout(tensor.size(), tensor.stride(), int(tensor.storage_offset()), is_all)
        return ViewLayout(tensor.size(), torch.empty_like(tensor, device="meta").stride(), 0, True)


class StorageRef:
    """Refers weakly to a storage; while this object exists, the address of the storage is not reused."""

    __slots__ = ("cdata",)

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.cdata: int = storage._weak_ref()

    def __del__(self, free: Callable[[int], None] = torch.UntypedStorage._free_weak_ref) -> None:
        free(self.cdata)  # bound here: modules are cleared before the last objects at exit

    def expired(self) -> bool:
        """Return whether the storage was freed."""
        return bool(has_expired(self.cdata))

    def storage(self) -> torch.UntypedStorage | None:
        """Return the storage; None if it was freed."""
        return torch.UntypedStorage._new_with_weak_ptr(self.cdata)


def no_tensor() -> Tensor | None:
    """Return None, in place of a weak reference to a tensor that was freed."""


class StoredForm(ABC):
    """Stands for a saved tensor between forward and backward; subclasses store its values, bits or nothing."""

    packed_data: tuple[str, ...] = ()  # attributes that are None once the form refers to the original

    __slots__ = (
        *(
            "__weakref__",
            "dtype",
            "is_whole",
            "name",
            "num_views",
            "numel",
            "original",
            "original_bytes",
            "plain_values",
            "version",
        ),
        "weak_storage",
    )

    def __init__(self, piece: StoragePiece) -> None:
        self.weak_storage: int = piece.storage._weak_ref()  # of the original; while it exists, the address is not reused
        tensor = piece.tensor
        self.numel, self.is_whole, self.dtype, self.version = piece.numel, piece.is_whole, tensor.dtype, tensor._version
        self.original: Callable[[], Tensor | None] = no_tensor  # a weak reference to the saved tensor, if this object stays alive
        self.plain_values: Tensor | None = None
        self.num_views = 0  # number of saved tensors that this form stands for
        self.name = ""  # the slot name of the first of them
        self.original_bytes = 0  # bytes of the storage that this form replaces

    def __del__(self, free: Callable[[int], None] = torch.UntypedStorage._free_weak_ref) -> None:
        free(self.weak_storage)  # bound here: modules are cleared before the last objects at exit

    @property
    def nbytes(self) -> int:
        """Return the bytes of the packed data; 0 once the original memory is referred to instead."""
        return self._packed_bytes() if self.plain_values is None else 0

    def values(self) -> Tensor:
        """Return the unpacked values of the stored piece of memory, shape (numel,)."""
        if self.plain_values is None:
            return self._unpacked()
        if self.plain_values._version != self.version:
            raise RuntimeError(MODIFIED.format(self.version, self.plain_values._version))
        return self.plain_values

    def is_of(self, piece: StoragePiece) -> bool:
        """Return whether this object stores the data of the memory `piece`."""
        return self.weak_storage == piece.address

    def restore_original(self, holder: Tensor) -> bool:
        """Drop the packed data and refer to the original memory again; return whether that was possible.

        `holder` is a tensor that keeps the storage alive. Restoring is impossible if the storage was modified since, or if `holder` has
        other memory by now, like a packed weight that is no longer decoded.
        """
        if not self.is_whole or holder.dtype is not self.dtype or holder._version != self.version:
            return False
        if holder.untyped_storage()._cdata != self.weak_storage:
            return False
        self.plain_values = holder.detach().as_strided((self.numel,), (1,), 0)  # shares the version counter
        for name in self.packed_data:
            setattr(self, name, None)
        return True

    def refer_to(self, values: Tensor) -> None:
        """Drop the packed data and refer to `values`, shape (numel,), from now on."""
        self.plain_values, self.version = values, values._version

    def tensor(self, size: torch.Size, stride: tuple[int, ...]) -> Tensor:
        """Unpack the whole piece of memory and return it as a tensor with these sizes and strides."""
        return self.values().as_strided(size, stride)

    @abstractmethod
    def _unpacked(self) -> Tensor: ...

    def _packed_bytes(self) -> int:
        return 0


@final
class StoredValues(StoredForm):
    """Stores the values of a saved tensor until backward, encoded in a format."""

    packed_data = ("stored", "host")
    __slots__ = ("_copies", "_copy", "codec", "host", "stored")

    def __init__(self, piece: StoragePiece, codec: FlatCodec, stored: Any, copies: DecodedCopies) -> None:
        """Store what `codec.encode` returned for `piece`; `copies` holds decoded values that tensors share."""
        super().__init__(piece)
        self.codec, self.stored, self._copies = codec, stored, copies
        self._copy: DecodedCopy | None = None  # the decoded copy, if several saved tensors share the values
        self.host: HostCopy | None = None  # set if the plan offloads; while values are in host memory alone, `stored` is None

    @property
    def is_packed(self) -> bool:
        """Return whether packed values exist, on the device or in host memory; False if the original memory is used."""
        return self.stored is not None or self.host is not None

    @property
    def packed(self) -> PackedTensor | None:
        """Return the packed values; None once the original memory is referred to instead."""
        stored = self.on_device()
        return self.codec.packed(stored) if stored is not None else None

    def on_device(self) -> Any:
        """Return the packed values on the device, copied back from host memory if they are there."""
        if self.host is not None:
            self.host.bring_back()
        return self.stored

    def replace(self, codec: FlatCodec, stored: Any) -> None:
        """Replace the packed values by `stored`: the same values, which `codec` encoded, perhaps in another format."""
        self.codec, self.stored, self.plain_values, self.host = codec, stored, None, None

    def _packed_bytes(self) -> int:
        return self.codec.nbytes if self.stored is not None else 0

    def _unpacked(self) -> Tensor:
        """Return the decoded values.

        If several saved tensors share the values, each gets the copy that was decoded last, as long as this copy is alive.
        """
        if self.num_views == 1:
            return self.codec.decode(self.on_device(), (self.numel,), (1,))
        copy = self._copy
        if copy is None:
            copy = self._copy = DecodedCopy()
        values = copy.values(self.dtype)
        copy.num_unpacked += 1
        is_last = copy.num_unpacked % self.num_views == 0
        if is_last:
            copy.held = None
        if values is None:
            values = self.codec.decode(self.on_device(), (self.numel,), (1,))
            copy.alive = StorageRef(values.untyped_storage())
            if not is_last:
                self._copies.hold(copy, values)
        return values

    def tensor(self, size: torch.Size, stride: tuple[int, ...]) -> Tensor:
        """Decode the whole piece of memory and return it as a tensor with these sizes and strides."""
        if self.num_views > 1 or self.plain_values is not None or not self.codec.takes_address:
            return self.values().as_strided(size, stride)
        return self.codec.decode(self.on_device(), size, stride)


class HostCopy(ABC):
    """Declares the methods of a copy in host memory of packed values; `is_moved`: whether the plan moves the values there."""

    __slots__ = ("is_moved", "names")
    is_moved: bool
    names: list[str]  # of the slots that share the copy

    @abstractmethod
    def bring_back(self) -> None:
        """Copy the packed values back to the GPU unless they are there, and let its current stream wait for the copy."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Return the bytes of the copy in host memory; 0 before it is made."""


class DecodedCopy:
    """Refers to the last decoded copy of values that several saved tensors share, so that it serves all of them."""

    __slots__ = ("__weakref__", "alive", "held", "num_unpacked", "stream")

    def __init__(self) -> None:
        self.alive: StorageRef | None = None
        self.held: Tensor | None = None  # set by `DecodedCopies`
        self.stream = 0  # the CUDA stream on which `held` was decoded
        self.num_unpacked = 0  # number of saved tensors that were unpacked so far

    def values(self, dtype: torch.dtype) -> Tensor | None:
        """Return the decoded values if they still exist and can be used on the current CUDA stream; otherwise None."""
        if self.held is not None:
            return self.held if current_stream(self.held.get_device()) == self.stream else None
        alive = self.alive.storage() if self.alive is not None else None
        return None if alive is None else as_flat(alive, dtype)


class DecodedCopies:
    """Holds decoded values on a GPU until all saved tensors that share them are unpacked, if memory allows it.

    At most MAX_HELD copies exist. A copy is held only if it cannot raise the peak: FREE_COPIES times its bytes must be free below the peak
    so far.
    """

    def __init__(self) -> None:
        self._held: deque[weakref.ref[DecodedCopy]] = deque()

    def hold(self, copy: DecodedCopy, values: Tensor) -> None:
        """Keep `values` alive in `copy` until the last saved tensor that shares them is unpacked, if memory allows it."""
        if not values.is_cuda or values.nbytes < MIN_HELD_BYTES:
            return
        in_use, peak = memory_in_use(values.get_device())
        if in_use + FREE_COPIES * values.nbytes > peak:
            return
        copy.held, copy.stream = values, current_stream(values.get_device())
        self._held.append(weakref.ref(copy))
        while len(self._held) > MAX_HELD:
            oldest = self._held.popleft()()
            if oldest is not None and oldest is not copy:
                oldest.held = None


MAX_HELD = 4
MIN_HELD_BYTES = 8 << 20  # to ask for the memory in use takes as long as to decode a smaller tensor
FREE_COPIES = 3  # backward of the operations until the next use may need as much as a few tensors of the same size
current_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # None in builds of torch without CUDA


def memory_in_use(index: int) -> tuple[int, int]:
    """Return the bytes allocated on GPU `index`, now and at the peak; (0, 0) if its allocator does not count."""
    try:
        counts = torch.cuda.memory_stats_as_nested_dict(index)["allocated_bytes"]["all"]
    except (KeyError, RuntimeError):
        return 0, 0
    return counts["current"], counts["peak"]


@final
class StoredMask(StoredForm):
    """Stores one exact bit for each value of a saved tensor, which is decoded as one of two values.

    `delayed`: the saved tensor itself, if a later operation is expected to encode it. The mask is then packed by the same kernel, or at the
    latest when the forward pass ends.
    """

    packed_data = ("bits", "delayed")
    __slots__ = ("bits", "bounds", "delayed", "inside", "outside")

    def __init__(
        self,
        piece: StoragePiece,
        bits: Tensor | None,
        values: tuple[float, float],
        delayed: Tensor | None = None,
        *,
        bounds: tuple[float, float] = (0.0, NO_BOUND),
    ) -> None:
        """Store `bits`: 1 (decoded as `values[0]`) for values between `bounds`, 0 (decoded as `values[1]`) for others.

        `bits` is None if `delayed` is given.
        """
        super().__init__(piece)
        self.bits, self.delayed, self.bounds = bits, delayed, bounds
        self.inside, self.outside = values

    def pack(self) -> None:
        """Pack the mask now, if a later operation was expected to pack it together with another tensor, and did not."""
        tensor, self.delayed = self.delayed, None
        if tensor is not None and tensor._version == self.version:
            self.bits = pack_mask(tensor, *self.bounds)

    def pack_again(self) -> None:
        """Pack the mask again after `restore_original` dropped it, and stop referring to the original memory."""
        if self.plain_values is not None and self.plain_values._version == self.version:
            self.bits, self.plain_values = pack_mask(self.plain_values, *self.bounds), None

    def _packed_bytes(self) -> int:
        return self.bits.nbytes if self.bits is not None else 0

    def _unpacked(self) -> Tensor:
        if self.bits is None:  # the tensor was modified before its mask was packed, and then torch raises this error too
            raise RuntimeError(MODIFIED.format(self.version, "a later one"))
        out = torch.empty(self.numel, dtype=self.dtype, device=self.bits.device)
        return unpack_mask(self.bits, out, inside=self.inside, outside=self.outside)


@final
class StoredIntegers(StoredForm):
    """Stores saved integers in a smaller dtype, without loss."""

    packed_data = ("small",)
    __slots__ = ("small",)

    def __init__(self, piece: StoragePiece, width: torch.dtype) -> None:
        super().__init__(piece)
        self.small: Tensor | None = piece.flat().to(width)

    def _packed_bytes(self) -> int:
        return self.small.nbytes if self.small is not None else 0

    def _unpacked(self) -> Tensor:
        assert self.small is not None
        return self.small.to(self.dtype)


@final
class StoredShape(StoredForm):
    """Stands for a saved tensor of which backward reads only the shape; it is unpacked as uninitialized memory."""

    __slots__ = ("device",)

    def __init__(self, piece: StoragePiece) -> None:
        super().__init__(piece)
        self.device = piece.tensor.device

    def _unpacked(self) -> Tensor:
        return torch.empty(self.numel, dtype=self.dtype, device=self.device)


class ViewLayout(NamedTuple):
    """Holds size, strides and offset of a saved tensor in a piece of memory; `is_all`: whether the tensor fills the piece."""

    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    is_all: bool


class StoredView:
    """Replaces a saved tensor in autograd's graph: refers to the stored data, and has the tensor's layout."""

    __slots__ = ("form", "layout")

    def __init__(self, form: StoredForm, layout: ViewLayout) -> None:
        self.form, self.layout = form, layout

    def __call__(self, tensor: Tensor) -> StoredView:
        """Return this view, which serves as its own pack hook."""
        return self

    def tensor(self) -> Tensor:
        """Return the unpacked saved tensor."""
        size, stride, offset, is_all = self.layout
        if is_all:
            return self.form.tensor(size, stride)
        return self.form.values().as_strided(size, stride, offset)

    def relu_output(self) -> Tensor:
        """Return the output of a ReLU for backward: a `ReluOutput` of its packed mask, or else the tensor."""
        form, layout = self.form, self.layout
        if layout.is_all and type(form) is StoredMask and form.bits is not None:
            return ReluOutput(form.bits, layout.size, layout.stride, form.dtype)
        return self.tensor()


def is_dense(size: torch.Size, stride: tuple[int, ...]) -> bool:
    """Return whether a tensor covers its memory without gaps or overlaps."""
    expected = 1
    for step, length in sorted((step, length) for step, length in zip(stride, size, strict=True) if length != 1):
        if step != expected:
            return False
        expected *= length
    return True


def as_flat(storage: torch.UntypedStorage, dtype: torch.dtype) -> Tensor:
    """Return the whole storage as a 1-D tensor of `dtype`."""
    numel = storage.nbytes() // dtype.itemsize
    return torch.empty(0, dtype=dtype, device=storage.device).set_(storage, 0, (numel,), (1,))  # type: ignore[call-overload]
