"""Runs autocast for CUDA on fake CPU tensors, also without CUDA: torch.autocast sets CUDA's autocast state, whatever device it names.

Activation checkpointing stores the autocast state in forward and enters it again for the recomputation in backward. torch reads the
state of the device of the checkpoint's arguments, which is the CPU for fake tensors: `cuda_autocast` makes it read that of CUDA.
"""

# pyright: reportPrivateUsage=false, reportAttributeAccessIssue=false

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils import checkpoint


@contextmanager
def cuda_autocast(dtype: torch.dtype | None, free_casts: Callable[[], None]) -> Generator[None]:
    """Return a context with CUDA's autocast in `dtype` for fake CPU tensors; None turns autocast off.

    `free_casts` is called whenever torch frees its cached casts of parameters: at the end of the outermost autocast context, which is this
    one, or in backward the one around a recomputation.
    """
    enabled_before, dtype_before = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    torch.set_autocast_enabled("cuda", dtype is not None)
    torch.set_autocast_dtype("cuda", dtype or dtype_before)
    if dtype is not None:
        torch.autocast_increment_nesting()
    try:
        with _every_autocast_is_for_cuda(free_casts):
            yield
    finally:
        if dtype is not None:
            torch.autocast_decrement_nesting()
        torch.set_autocast_enabled("cuda", enabled_before)
        torch.set_autocast_dtype("cuda", dtype_before)
        free_casts()


@contextmanager
def autocast_backward() -> Generator[None]:
    """Return a context in which matrix products of autograd's backward cast their operands, if autocast for CUDA is on.

    AOTAutograd traces backward under the autocast of forward. On fake CPU tensors autograd's operations read the state of the CPU, whose
    autocast casts the same products.
    """
    before = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
    if torch.is_autocast_enabled("cuda"):
        torch.set_autocast_enabled("cpu", True)
        torch.set_autocast_dtype("cpu", torch.get_autocast_dtype("cuda"))
    try:
        yield
    finally:
        torch.set_autocast_enabled("cpu", before[0])
        torch.set_autocast_dtype("cpu", before[1])


@contextmanager
def _every_autocast_is_for_cuda(free_casts: Callable[[], None]) -> Generator[None]:
    """Return a context in which torch.autocast sets CUDA's autocast state, whatever device it names."""
    kind, common = torch.amp.autocast_mode.autocast, torch.cuda.amp.common
    before = kind.__init__, kind.__exit__, common.amp_definitely_not_available, torch.cuda.is_bf16_supported
    checkpoint_before = checkpoint._get_autocast_kwargs

    def begin(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        before[0](self, "cuda" if device_type == "cpu" else device_type, *args, **kwargs)

    def end(self: Any, *error: Any) -> Any:
        result = before[1](self, *error)
        if not _nesting():
            free_casts()
        return result

    kind.__init__, kind.__exit__, common.amp_definitely_not_available = begin, end, lambda: False
    torch.cuda.is_bf16_supported = lambda *args, **kwargs: True
    checkpoint._get_autocast_kwargs = lambda device_type="cuda": (checkpoint_before("cuda")[0],) * 2
    try:
        yield
    finally:
        kind.__init__, kind.__exit__, common.amp_definitely_not_available, torch.cuda.is_bf16_supported = before
        checkpoint._get_autocast_kwargs = checkpoint_before


def _nesting() -> int:
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()
