"""How the saved tensors of a slot are stored: decided once, and used again while they have the same layout and the plan does not change."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paredown.autograd.graph import Saved
from paredown.autograd.operations import Use
from paredown.autograd.rematerialization import SOURCE_OPS
from paredown.codec.packed import FlatCodec
from paredown.formats.format import Format
from paredown.formats.rounding import Overflow, Rounding
from paredown.session.eager.stored_tensors import StoragePiece, StoredView
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
    """How a slot is stored.

    `asked` is the plan's format, `format` the one in use (None: unmodified), `reason` why they differ.
    """

    asked: Format | None
    format: Format | None
    rounding: Rounding
    overflow: Overflow | None
    reason: str
    tensor_id: int


IN_ONE_PASS = ("cuda",)  # devices with a kernel that encodes a tensor and packs its mask
FIXED_USES = (Use.VALUE, Use.SIGN, Use.SHAPE, Use.EXACT)  # bounds and widths of the others may differ from call to call


class SlotDecisions:
    """Decisions about the saved tensors of a slot, which are made once and hold while layout and plan do not change."""

    def __init__(self, saved: Saved, piece: StoragePiece, detail: tuple[Use, Any], plan_number: int) -> None:
        tensor = piece.tensor
        self.offset, self.numel, self.is_whole, self.layout = tensor.storage_offset(), piece.numel, piece.is_whole, piece.layout()
        self.memory = memory_of(tensor, piece.storage)
        self.use, self.pin, self.is_centered, self.needs = saved.use, saved.pin, saved.is_centered, saved.needs
        self.detail = detail  # use and detail of the stored form: part of its key
        self.known, self.plan_number = (piece.is_whole, piece.numel), plan_number
        self.nbytes = piece.numel * tensor.itemsize  # that are packed
        self.is_fixed = saved.use in FIXED_USES or (tensor.is_cuda and saved.use is Use.MASK)
        if saved.use is Use.VALUE and saved.op == "mul" and not tensor.is_cuda:
            self.is_fixed = False  # its values decide
        self.checks_values = depends_on_values(saved)
        self.is_source = saved.op in SOURCE_OPS and saved.operand in ("input", "output")
        is_relu = saved.op == "relu" and saved.use is Use.SIGN
        is_in_order = tensor.device.type in IN_ONE_PASS and piece.is_whole and self.offset == 0 and tensor.numel() == piece.numel
        self.can_be_delayed = is_relu and is_in_order  # a mask that can be packed by the kernel that encodes the same tensor
        self.is_delayed = False  # whether a later operation encodes the tensor, and packs its mask too
        self.unpack = StoredView.relu_output if is_relu else StoredView.tensor  # on a GPU
        self.decision: StorageDecision | None = None
        self.is_unmodified = False  # whether the decision has no format
        self.codec: FlatCodec | None = None
        self.is_never_recomputed = False  # whether no operation before it was known to determine the tensor, in the last pass
        self.sufficient: Format | None = None  # a format that is precise enough for the operation
        self.by_address = False  # whether `codec` takes the saved tensor itself
        self.is_cuda = tensor.is_cuda

    def fits(self, saved: Saved, tensor: Tensor) -> bool:
        """Return whether the decisions hold for this saved tensor: same use and same memory layout."""
        is_same_use = saved.use is self.use and saved.pin is self.pin and saved.is_centered is self.is_centered
        return is_same_use and memory_of(tensor, tensor.untyped_storage()) == self.memory


def memory_of(tensor: Tensor, storage: torch.UntypedStorage) -> tuple[Any, ...]:
    """Return all properties of a tensor that decisions depend on: device, dtype, storage bytes, size, strides and offset."""
    return tensor.get_device(), tensor.dtype, storage.nbytes(), tensor.size(), tensor.stride(), tensor.storage_offset()
