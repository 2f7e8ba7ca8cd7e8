"""Which parameters can wait packed, and why others stay as they are."""

# pyright: reportPrivateUsage=false, reportAttributeAccessIssue=false

from __future__ import annotations

import torch
from torch import nn

from paredown.codec.packed import DEVICES
from paredown.formats.format import Format
from paredown.optim.outside import PackedParameter
from paredown.optim.weights import DTYPES, strides_of

ALONE = 2  # holders of a storage: the tensor, and the object that asks
COMPILED = "torch.compile runs its module, where hooks cannot bring it"
SHARED = "its memory is shared with other tensors, or a graph that waits for its backward holds it"
SCRIPTED = "TorchScript runs its module"
ADDED = "it was added after the plan was applied"
LARGER = "it would not be smaller"


def reason_to_leave(parameter: nn.Parameter, format: Format) -> str | None:
    """Why a parameter cannot wait packed."""
    if type(parameter) is not nn.Parameter:
        return "another session has it" if type(parameter) is PackedParameter else f"it is a {type(parameter).__name__}"
    if parameter.device.type not in DEVICES or parameter.dtype not in DTYPES or parameter.layout is not torch.strided:
        return f"it is {parameter.dtype} in layout {parameter.layout} on {parameter.device}"
    if format.nbytes(parameter.shape) >= parameter.nbytes:
        return LARGER
    if strides_of(parameter) != parameter.stride():
        return "its memory has gaps"
    storage = parameter.untyped_storage()
    if storage.nbytes() != parameter.nbytes or torch._C._storage_Use_Count(storage._cdata) > ALONE:
        return SHARED
    return None if bool(parameter.detach().isfinite().all()) else "it holds values that are not finite"


def unreached(model: nn.Module, is_compiled: bool) -> dict[int, str]:
    """Parameters (by id) of modules whose hooks do not run."""
    found: dict[int, str] = {}
    for module in model.modules():
        compiled = hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None
        if compiled or (is_compiled and module is model):
            found.update({id(p): COMPILED for p in module.parameters()})
        if isinstance(module, torch.jit.ScriptModule):
            found.update({id(p): SCRIPTED for p in module.parameters()})
    return found
