"""Decides how the tensors that an operation saves are stored, once for all passes of the same layout and plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from paredown.autograd.graph import Saved
from paredown.autograd.operations import Use
from paredown.autograd.rematerialization import SOURCE_OPS
from paredown.codec.packed import FlatCodec
from paredown.codec.recompute import pack_mask
from paredown.formats.format import Format
from paredown.formats.rounding import Overflow, Rounding
from paredown.plan.plan import Plan
from paredown.plan.storage import is_same_level, resolve_format
from paredown.roles import Role
from paredown.session.eager.stored_tensors import StoragePiece, StoredForm, StoredIntegers, StoredMask, StoredShape, StoredView
from paredown.session.value_bounds import depends_on_values

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
HELD_BY_CALLER = (
    "its memory is not freed by the step that calls the modules: a variable refers to it until backward has ended. "
    "Call the modules in a function that returns the loss, or del the variable before backward"
)
IN_PLACE = (
    "an in-place operation modified a view of it, and autograd keeps the original where no hook can replace it. "
    "Use inplace=False, or clone() before the operation"
)


@dataclass(frozen=True)
class StorageDecision:
    """States in which format a saved tensor is stored, and why that differs from what the plan requests.

    `asked`: the plan's format. `format`: the format in use (None: unmodified). `reason`: why the two differ. `tensor_id`: a hash of the
    slot's name, which selects its random bits.
    """

    asked: Format | None
    format: Format | None
    rounding: Rounding
    overflow: Overflow | None
    reason: str
    tensor_id: int  # in the seed of random bits


def storage_decision(plan: Plan, saved: Saved, piece: StoragePiece) -> StorageDecision:
    """Return how a saved tensor is stored: as requested, if backward's needs, its dtype and its size allow it."""
    asked = plan.find((saved.name,), Role.ACTIVATION)
    dtype = str(piece.tensor.dtype).removeprefix("torch.")
    format, reason = resolve_format(asked, plan.needs_of(saved.name, saved.needs), dtype=dtype, numel=piece.numel)
    rounding = asked.resolved_rounding if is_same_level(asked.format, format) else Rounding.NEAREST_EVEN
    overflow = asked.overflow if format is asked.format else None
    return StorageDecision(asked.format, format, rounding, overflow, reason, crc32(saved.name.encode()))


IN_ONE_PASS = ("cuda",)  # devices with a kernel that encodes a tensor and packs its mask
FIXED_USES = (Use.VALUE, Use.SIGN, Use.SHAPE, Use.EXACT)  # bounds and widths of the others may differ from call to call


class SlotDecisions:
    """Holds decisions on how to store the tensors that one operation saves, valid while plan and memory layout stay equal."""

    def __init__(self, saved: Saved, piece: StoragePiece, detail: tuple[Use, Any], plan_number: int) -> None:
        tensor = piece.tensor
        self.offset, self.numel, self.is_whole, self.layout = tensor.storage_offset(), piece.numel, piece.is_whole, piece.layout()
        self.memory = memory_of(tensor, piece.storage)
        self.use, self.pin, self.is_centered, self.needs = saved.use, saved.pin, saved.is_centered, saved.needs
        self.detail = detail  # what `use_and_detail` returned, which is a part of the stored form's key
        self.known, self.plan_number = (piece.is_whole, piece.numel), plan_number
        self.nbytes = piece.numel * tensor.itemsize  # bytes that packing replaces
        self.is_fixed = saved.use in FIXED_USES or (tensor.is_cuda and saved.use is Use.MASK)
        if saved.use is Use.VALUE and saved.op == "mul" and not tensor.is_cuda:
            self.is_fixed = False  # the values of the factor decide whether it is stored as a mask
        self.checks_values = depends_on_values(saved)
        self.is_source = saved.op in SOURCE_OPS and saved.operand in ("input", "output")
        is_relu = saved.op == "relu" and saved.use is Use.SIGN
        is_in_order = tensor.device.type in IN_ONE_PASS and piece.is_whole and self.offset == 0 and tensor.numel() == piece.numel
        self.can_be_delayed = is_relu and is_in_order  # a mask that can be packed by the kernel that encodes the same tensor
        self.is_delayed = False  # whether a later operation encodes the tensor, and packs its mask too
        self.unpack = StoredView.relu_output if is_relu else StoredView.tensor  # the unpack hook on a GPU
        self.decision: StorageDecision | None = None
        self.is_unmodified = False  # whether the decision has no format
        self.codec: FlatCodec | None = None
        self.sufficient: Format | None = None  # a format that is precise enough for the operation
        self.by_address = False  # whether `codec` takes the saved tensor itself
        self.is_cuda = tensor.is_cuda

    def fits(self, saved: Saved, tensor: Tensor) -> bool:
        """Return whether these decisions apply to a saved tensor: it has the same use and the same memory layout."""
        is_same_use = saved.use is self.use and saved.pin is self.pin and saved.is_centered is self.is_centered
        return is_same_use and memory_of(tensor, tensor.untyped_storage()) == self.memory


def memory_of(tensor: Tensor, storage: torch.UntypedStorage) -> tuple[Any, ...]:
    """Return the properties of a tensor on which decisions depend: device, dtype, bytes, size, strides and offset."""
    return tensor.get_device(), tensor.dtype, storage.nbytes(), tensor.size(), tensor.stride(), tensor.storage_offset()


def form_for(use: Use, detail: Any, piece: StoragePiece) -> StoredForm | None:
    """Return a `StoredForm` of bits, small integers or a shape if backward needs no more of the tensor; otherwise None.

    `use`: what backward needs. `detail`: the bounds of a mask or the dtype of an index, as `use_and_detail` returns them.
    """
    if use is Use.SHAPE:
        return StoredShape(piece)
    if use is Use.INDEX:
        is_smaller = detail.itemsize < piece.tensor.itemsize and not piece.tensor.is_floating_point()
        return StoredIntegers(piece, detail) if is_smaller else None
    if use is Use.EXACT or detail.values is None:
        return None
    x, bounds = piece.tensor, (detail.low, detail.high)
    is_in_order = x.is_cuda and piece.is_whole and x.numel() == piece.numel and x.storage_offset() == 0
    return StoredMask(piece, pack_mask(x if is_in_order else piece.flat(), *bounds), detail.values, bounds=bounds)
