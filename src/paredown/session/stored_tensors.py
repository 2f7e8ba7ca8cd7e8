"""The forms in which a saved tensor waits for backward, each of which can make its values again.

What waits covers a flat piece of memory: all of a storage in the order of its memory, or the copy of a small view of it.
`StoredView` says where
the saved tensor lies in it. Where the original storage turns out to live on anyway, `goes_back` makes that what waits.

From a recipe, which names nodes of autograd's graph, to the tensors that computing it again takes.
"""


# pyright: reportPrivateUsage=false, reportAttributeAccessIssue=false

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from paredown.codec.packed import PackedTensor
from paredown.codec.recompute import DecodeSteps, Norm, recompute, unpack_mask
from paredown.trace.autograd_graph import is_packed_whole
from paredown.trace.saved_tensors import Rematerialization

MODIFIED = (
    "one of the variables needed for gradient computation has been modified by an inplace operation: "
    "it was saved at version {}, and is at version {} now."
)


class StoragePiece:
    """The flat piece of memory that a saved tensor is packed with: all of its storage, or a copy of a view that is a small part of it.

    `key` is the same for the same memory with the same contents, as long as somebody keeps a weak reference to the storage.
    """

    __slots__ = ("address", "is_whole", "key", "numel", "storage", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.storage = tensor.untyped_storage()
        self.address = self.storage._cdata
        held = self.storage.nbytes()
        self.is_whole = is_packed_whole(tensor, held)
        self.numel = held // tensor.itemsize if self.is_whole else tensor.numel()
        key = (self.address, tensor._version, tensor.dtype)
        self.key: tuple[Any, ...] = key if self.is_whole else (*key, tensor.storage_offset(), tensor.size(), tensor.stride())

    def flat(self) -> Tensor:
        """Its values, one after the other in memory."""
        source = self.tensor if self.is_whole else self.tensor.clone()
        return source.as_strided((self.numel,), (1,), 0)

    def layout(self) -> tuple[torch.Size, tuple[int, ...], int]:
        """Size, strides and offset of the tensor in it."""
        tensor = self.tensor
        if self.is_whole:
            return tensor.size(), tensor.stride(), int(tensor.storage_offset())
        return tensor.size(), torch.empty_like(tensor, device="meta").stride(), 0


class StoredForm(ABC):
    """Something that waits in place of a flat piece of memory."""

    __slots__ = ("__weakref__", "dtype", "is_whole", "numel", "original", "plain", "storage", "version")

    def __init__(self, piece: StoragePiece) -> None:
        self.storage = StorageWeakRef(piece.storage)  # the original's; while this is kept its address is not used again
        self.numel, self.dtype, self.is_whole = piece.numel, piece.tensor.dtype, piece.is_whole
        self.original, self.version = weakref.ref(piece.tensor), piece.tensor._version
        self.plain: Tensor | None = None

    @property
    def nbytes(self) -> int:
        """The bytes that wait here; 0 once the original took the place."""
        return self._packed_bytes() if self.plain is None else 0

    def values(self) -> Tensor:
        """The flat values."""
        if self.plain is None:
            return self._unpacked()
        if self.plain._version != self.version:
            raise RuntimeError(MODIFIED.format(self.version, self.plain._version))
        return self.plain

    def is_of(self, piece: StoragePiece) -> bool:
        """Whether this waits for the same memory."""
        return self.storage.cdata == piece.address

    def goes_back(self, holder: Tensor) -> bool:
        """Whether the original, which `holder` keeps alive, is what it was; it then waits itself."""
        if not self.is_whole or holder.dtype is not self.dtype or holder._version != self.version:
            return False
        self.plain = holder.detach().as_strided((self.numel,), (1,), 0)  # it shares the count of modifications
        self._drop()
        return True

    @abstractmethod
    def _packed_bytes(self) -> int: ...

    @abstractmethod
    def _unpacked(self) -> Tensor: ...

    @abstractmethod
    def _drop(self) -> None: ...


@final
class StoredValues(StoredForm):
    """Numbers in a format."""

    __slots__ = ("_decoded", "packed")

    def __init__(self, piece: StoragePiece, packed: PackedTensor) -> None:
        super().__init__(piece)
        self.packed: PackedTensor | None = packed
        self._decoded: StorageWeakRef | None = None

    def _packed_bytes(self) -> int:
        return self.packed.nbytes if self.packed is not None else 0

    def _unpacked(self) -> Tensor:
        """Decoded; the same tensor again as long as somebody holds what was decoded last: q, k and v are decoded once."""
        if self._decoded is not None:
            alive: torch.UntypedStorage | None = torch.UntypedStorage._new_with_weak_ptr(self._decoded.cdata)
            if alive is not None:  # pyright: ignore[reportUnnecessaryComparison]
                return as_flat(alive, self.dtype)
        assert self.packed is not None
        decoded = self.packed.decode()
        self._decoded = StorageWeakRef(decoded.untyped_storage())
        return decoded

    def _drop(self) -> None:
        self.packed = None


@final
class RecomputedValues(StoredForm):
    """Numbers that follow from others which wait: nothing of their own but what a norm is made of."""

    __slots__ = ("source", "steps")

    def __init__(self, piece: StoragePiece, source: StoredValues, steps: DecodeSteps) -> None:
        super().__init__(piece)
        self.source, self.steps = source, steps

    def _packed_bytes(self) -> int:
        return 0

    def _unpacked(self) -> Tensor:
        start = self.source.packed if self.source.packed is not None else self.source.values()
        return recompute(start, self.steps, self.dtype)

    def _drop(self) -> None:
        pass


@final
class StoredMask(StoredForm):
    """One exact bit for each value, which stands for one of two values."""

    __slots__ = ("bits", "inside", "outside")

    def __init__(self, piece: StoragePiece, bits: Tensor, values: tuple[float, float]) -> None:
        super().__init__(piece)
        self.bits: Tensor | None = bits
        self.inside, self.outside = values

    def _packed_bytes(self) -> int:
        return self.bits.nbytes if self.bits is not None else 0

    def _unpacked(self) -> Tensor:
        assert self.bits is not None
        out = torch.empty(self.numel, dtype=self.dtype, device=self.bits.device)
        return unpack_mask(self.bits, out, inside=self.inside, outside=self.outside)

    def _drop(self) -> None:
        self.bits = None


@final
class StoredIntegers(StoredForm):
    """Integers in a smaller width."""

    __slots__ = ("small",)

    def __init__(self, piece: StoragePiece, width: torch.dtype) -> None:
        super().__init__(piece)
        self.small: Tensor | None = piece.flat().to(width)

    def _packed_bytes(self) -> int:
        return self.small.nbytes if self.small is not None else 0

    def _unpacked(self) -> Tensor:
        assert self.small is not None
        return self.small.to(self.dtype)

    def _drop(self) -> None:
        self.small = None


@final
class StoredShape(StoredForm):
    """A tensor of which backward asks the shape alone: its values are memory that is not filled."""

    __slots__ = ("device",)

    def __init__(self, piece: StoragePiece) -> None:
        super().__init__(piece)
        self.device = piece.tensor.device

    def _packed_bytes(self) -> int:
        return 0

    def _unpacked(self) -> Tensor:
        return torch.empty(self.numel, dtype=self.dtype, device=self.device)

    def _drop(self) -> None:
        pass


@dataclass(eq=False, slots=True)
class StoredView:
    """What replaces a saved tensor in autograd's graph."""

    waiting: StoredForm
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def tensor(self) -> Tensor:
        """The saved tensor again."""
        return self.waiting.values().as_strided(self.size, self.stride, self.offset)


def as_flat(storage: torch.UntypedStorage, dtype: torch.dtype) -> Tensor:
    """All of a storage as a flat tensor."""
    numel = storage.nbytes() // dtype.itemsize
    return torch.empty(0, dtype=dtype, device=storage.device).set_(storage, 0, (numel,), (1,))  # type: ignore[call-overload]


# --- From a recipe, which names nodes of autograd's graph, to the tensors that computing it again takes ---


def decode_steps_of(
    recipe: Rematerialization, source: StoredView, signs: StoredView | None, result: StoragePiece, *, keeps_parameters: bool
) -> DecodeSteps | None:
    """What makes `result` of the values of `source`; None where its memory is laid out otherwise, or something is missing.

    Parameters are referred to where the model keeps them until backward, and copied where it does not.
    """
    waiting = source.waiting
    if not waiting.is_whole or waiting.numel != result.numel or waiting.numel != source.size.numel():
        return None
    if recipe.is_copy and not _is_contiguous(source):
        return None
    if recipe.op == "layer_norm":
        return _after_layer_norm(recipe.source, source, keeps_parameters)
    if recipe.op == "batch_norm":
        bits = signs.waiting if signs is not None else None
        if (
            not isinstance(bits, StoredMask)
            or bits.bits is None
            or (source.size, source.stride) != (result.tensor.size(), result.tensor.stride())
        ):
            return None
        return _after_batch_norm(recipe.source, source, bits.bits, keeps_parameters)
    return DecodeSteps(activation="gelu_tanh" if recipe.op == "gelu" and recipe.source._saved_approximate == "tanh" else recipe.op)


def _after_layer_norm(node: Any, source: StoredView, keeps_parameters: bool) -> DecodeSteps | None:
    mean, deviation = node._saved_result1, node._saved_result2
    channels = source.size.numel() // max(mean.numel(), 1)
    if mean.dtype is not torch.float32 or not _is_contiguous(source):
        return None
    weight, bias = (_vector(t, keeps_parameters) for t in (node._saved_weight, node._saved_bias))
    return DecodeSteps(Norm(channels, 1, weight, bias, mean, deviation, by_row=True))


def _after_batch_norm(node: Any, source: StoredView, bits: Tensor, keeps_parameters: bool) -> DecodeSteps | None:
    weight, bias = node._saved_weight, getattr(node.next_functions[2][0], "variable", None)
    mean, deviation = node._saved_result1, node._saved_result2
    channels = source.size[1]
    if (weight is None) != (bias is None) or mean is None or mean.numel() != channels or mean.dtype is not torch.float32:
        return None
    channels_last = len(source.size) > 2 and source.stride[1] == 1
    if not channels_last and not _is_contiguous(source):
        return None
    weight, bias = (_vector(t, keeps_parameters) for t in (weight, bias))
    return DecodeSteps(Norm(channels, 1 if channels_last else source.size[2:].numel(), weight, bias, mean, deviation), "relu", bits)


def _vector(parameter: Tensor | None, keeps_parameters: bool) -> Tensor | None:
    """A parameter of a norm as it is used, flat."""
    if parameter is None or (keeps_parameters and parameter.dim() == 1 and parameter.dtype is torch.float32):
        return parameter
    return parameter.detach().float().reshape(-1).clone()


def _is_contiguous(view: StoredView) -> bool:
    expected = 1
    for size, stride in zip(reversed(view.size), reversed(view.stride), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True
