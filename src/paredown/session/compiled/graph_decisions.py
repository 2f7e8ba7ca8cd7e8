"""States how saved tensors of compiled graphs are stored, and finds the facts about fake tensors that decide it.

Sizes may be symbolic: `hint` is the size of the example that a graph was traced with.
"""

# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod

import torch
from torch import Tensor, fx

from paredown.autograd.operations import MIN_PACKED_NUMEL
from paredown.codec import graph_codec
from paredown.codec.graph_codec import pack_mask_in_graph, unpack_mask_in_graph
from paredown.codec.products import QUANTIZE
from paredown.formats.format import Format
from paredown.formats.rounding import Rounding
from paredown.plan.storage import BLOCK
from paredown.session.compiled.graph_signals import GraphSignal
from paredown.session.compiled.graph_slots import ATTENTION, GraphSlot, aten_name, hint

INPUT = "it is an input of the compiled graph: the caller holds it"
HELD = "the compiled graph returns it to the caller as well"
SOURCE = "backward recomputes another tensor from it, as the plan requests"
NOT_RECOMPUTABLE = (
    "its operations cannot run again: they are random, attention, or of dynamic sizes, or the caller holds their result"
)
OF_RECOMPUTED = "what it is computed from is recomputed too"
SHARED = "a saved tensor that is not packed shares its memory"
NOT_COVERED = "compiled graphs have no encode for {}"
STRIDES = "its elements overlap or have gaps in memory"
UNCHECKED = "its sizes are dynamic, and graphs measure whether values are small enough to be packed only where sizes are fixed"
DYNAMIC = "its sizes are dynamic, more than one of them or in a way that blocks do not divide"


@dataclass(frozen=True)
class GraphDecision:
    """States how one saved tensor of a compiled graph is stored: its format, or None and why it is not packed."""

    slot: GraphSlot
    asked: Format | None
    format: Format | None
    rounding: Rounding
    reason: str
    unmodified_bytes: int
    stored_bytes: int


@dataclass(frozen=True)
class ValueCheck:
    """Names saved tensors of a compiled graph that stay unmodified if certain measured numbers are too large.

    `first`, `count`: the position of these numbers among all that the graph measures. `reason` is a function from them to a reason not
    to pack the tensors, or "" if the numbers are small enough.
    """

    slots: tuple[GraphSlot, ...]
    first: int
    count: int
    reason: Callable[[Sequence[float]], str]


@dataclass
class GraphReport:
    """Reports on one compiled graph: how each saved tensor is stored, and which numbers the graph measures."""

    decisions: list[GraphDecision]
    mask_bytes: int = 0
    checks: list[ValueCheck] = field(default_factory=list[ValueCheck])
    signals: list[GraphSignal] = field(default_factory=list[GraphSignal])  # for a guard
    recomputed: set[str] = field(default_factory=set[str])  # names of slots that backward recomputes, as the plan requests
    not_recomputed: dict[str, str] = field(default_factory=dict[str, str])  # names of slots that it cannot recompute -> why

    @property
    def stored_bytes(self) -> int:
        """Return the bytes of codes, scales and masks that one forward pass of the graph stores."""
        return self.mask_bytes + sum(d.stored_bytes for d in self.decisions if d.format is not None)


# --- tensors ----------------------------------------------------------------------------------------------------------


def memory_order(value: Tensor) -> list[int]:
    """Return the dimensions of a tensor in the order of its memory, the largest stride first."""
    return sorted(range(value.dim()), key=lambda d: (-hint(value.stride(d)), d))


def inverse_order(order: list[int]) -> list[int]:
    """Return the permutation that undoes `order`."""
    return [order.index(d) for d in range(len(order))]


def obstacle(value: Tensor, format: Format, slot: GraphSlot) -> str:
    """Return why a compiled graph cannot pack `value`, the fake tensor of a slot, in `format`; "" if it can."""
    if not graph_codec.covers(format):
        return NOT_COVERED.format(format)
    if _gaps(value):
        return STRIDES
    dynamic = [size for size in value.shape if not isinstance(size, int)]
    if not dynamic:
        return ""
    known = prod(size for size in value.shape if isinstance(size, int))
    if len(dynamic) > 1 or known % max(format.block or 1, 8):
        return DYNAMIC
    is_attention = any(f":{ATTENTION}" in name for name in slot.names)
    return UNCHECKED if is_attention or (slot.needs.is_centered and not _has_whole_rows(value)) else ""


def _has_whole_rows(value: Tensor) -> bool:
    """Return whether each block of BLOCK values lies in one row of the last dimension."""
    size = value.shape[-1]
    return memory_order(value) == list(range(value.dim())) and isinstance(size, int) and size % BLOCK == 0


def _gaps(value: Tensor) -> bool:
    """Return whether a tensor's elements overlap or leave gaps in memory."""
    expected = 1
    for d in reversed(memory_order(value)):
        size, stride = value.shape[d], value.stride(d)
        if hint(size) != 1 and hint(stride) != hint(expected):
            return True
        expected = expected * size
    return False


def sizes_in_memory(value: Tensor, order: list[int]) -> list[int]:
    """Return the sizes of a fake tensor, its dimensions permuted to `order`; -1 for a dynamic size."""
    return [size if isinstance(size := value.shape[d], int) else -1 for d in order]


def num_values(value: Tensor, codes: Tensor, format: Format | None) -> int:
    """Return the number of values of the fake tensor `value`, computed from the number of codes or mask bytes if dynamic."""
    numel = value.numel()
    width = format.element.width if format is not None else 1
    return numel if isinstance(numel, int) else codes.shape[0] * (8 // width) if width < 8 else codes.shape[0]


def storage_of(node: fx.Node) -> int:
    """Return an integer that is equal for all nodes of a graph whose tensors share memory."""
    return node.meta["val"].untyped_storage()._cdata


def is_code(node: fx.Node) -> bool:
    """Return whether a node computes codes or scales of an 8-bit product, which are saved unmodified."""
    value: Tensor = node.meta["val"]
    return value.element_size() == 1 or aten_name(node) == QUANTIZE


def fits_bits(value: Tensor) -> bool:
    """Return whether a saved boolean tensor is stored as bits, which needs a large, dense tensor with computable sizes."""
    dynamic = [size for size in value.shape if not isinstance(size, int)]
    known = prod(size for size in value.shape if isinstance(size, int))
    is_known = not dynamic or (len(dynamic) == 1 and known % 8 == 0)
    return hint(value.numel()) >= MIN_PACKED_NUMEL and is_known and not _gaps(value)


def mask_codec(value: Tensor, order: list[int]) -> tuple[Callable[[Tensor], tuple[Tensor]], Callable[[Tensor], Tensor]]:
    """Return two functions that encode and decode a boolean tensor: as bits if `fits_bits(value)`, otherwise as a copy.

    `order`: the dimensions of the tensor, the largest stride first.
    """
    if not fits_bits(value):
        return lambda x: (x.clone(),), lambda saved: saved.clone()
    sizes, inverse = sizes_in_memory(value, order), inverse_order(order)

    def unpack(bits: Tensor) -> Tensor:
        if isinstance(value.numel(), int):  # pyright: ignore[reportUnnecessaryIsInstance]  (a SymInt is no int)
            return torch.ops.paredown.unpack_bits(bits, sizes, inverse)
        return unpack_mask_in_graph(bits, num_values(value, bits, None)).reshape(sizes).permute(inverse)

    return lambda x: (pack_mask_in_graph(x.permute(order).reshape(-1)),), unpack


def nbytes_of(node: fx.Node) -> int:
    """Return the bytes of the tensor that a node computes."""
    value: Tensor = node.meta["val"]
    return hint(value.numel()) * value.element_size()
