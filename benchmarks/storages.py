"""Bytes that a model holds after a backward pass: parameters, gradients, optimizer state, packed or plain."""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import gc
from collections.abc import Iterable

import torch
from torch import Tensor, nn

DISPATCH = "__torch_dispatch__"


def storage_bytes(device: str) -> int:
    """Bytes of all storages on `device` that tensors of Python have, each counted once."""
    found: dict[int, int] = {}
    with torch._C.DisableTorchFunctionSubclass():  # a packed parameter would give its value
        for thing in gc.get_objects():
            if issubclass(type(thing), Tensor) and has_storage(thing) and thing.device.type == device:
                try:
                    storage = thing.untyped_storage()
                except RuntimeError:  # what a packed parameter shows has no memory, and says so
                    continue
                if storage.nbytes():
                    found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())


def has_storage(tensor: Tensor) -> bool:
    """Whether its values are its own: wrappers keep them in other tensors."""
    is_wrapper = getattr(type(tensor), DISPATCH) is not getattr(Tensor, DISPATCH)
    return not is_wrapper and tensor.layout is torch.strided and tensor.device.type != "meta"


def used_bytes(device: str) -> tuple[int, int]:
    """Bytes by the storages and by the allocator (0 on a CPU)."""
    gc.collect()
    return storage_bytes(device), torch.cuda.memory_allocated() if device == "cuda" else 0


def gradient_bytes(gradients: Iterable[Tensor | None]) -> int:
    """Bytes of gradients, packed or plain."""
    return sum(getattr(gradient, "packed", gradient).nbytes for gradient in gradients if gradient is not None)


def memory(model: nn.Module, before: tuple[int, int], device: str, *, has_gradients: bool) -> dict[str, float | None]:
    """Bytes a parameter of what is there now and was not `before`, as columns of a row."""
    numel = sum(p.numel() for p in model.parameters())
    gradients = [p.grad for p in model.parameters()] if has_gradients else []  # each has an object now, which is found
    held = gradient_bytes(gradients)
    stored, allocated = (now - then for now, then in zip(used_bytes(device), before, strict=True))
    return {
        "bytes_per_parameter": stored / numel,
        "gradient_bytes_per_parameter": held / numel,
        "allocated_per_parameter": allocated / numel if device == "cuda" else None,
    }
