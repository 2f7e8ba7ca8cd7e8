"""`RecordedCall` is a function call on deferred logits that is made later, on chunks of them.

A call can be recorded if cross entropy can read its result from the hidden states: the last dimension, that of the classes, stays whole or
becomes dimension 1, and values change by casts, scales and tanh alone.
"""

# pyright: reportPrivateUsage=false, reportAttributeAccessIssue=false

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from paredown.loss.chunked_cross_entropy import CASTS, SCALES, Elementwise, elementwise_call, without_last_casts

ELEMENTWISE = CASTS | SCALES | {"tanh"}
VIEWS = frozenset(("view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "contiguous"))
SWAPS = frozenset(("transpose", "swapaxes", "swapdims", "permute", "movedim", "moveaxis"))


@dataclass(frozen=True)
class RecordedCall:
    """A function call on logits that is made later: on chunks of them by the loss, or on all if something reads them."""

    name: str
    func: Callable[..., Tensor]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def __call__(self, logits: Tensor) -> Tensor:
        """Call the recorded function on `logits`, and return its result."""
        return self.func(logits, *self.args, **self.kwargs)


@dataclass(frozen=True)
class Layout:
    """The size, strides and dtype of logits, which are known before they are computed."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    def after(self, call: RecordedCall) -> Layout:
        """Return the layout of the result of `call` on logits of this layout; torch's own error is raised if it is impossible."""
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            result = call(torch.empty_strided(self.size, self.stride, dtype=self.dtype, device="meta"))
            return Layout(tuple(result.size()), result.stride(), result.dtype)

    def class_first(self) -> Layout | None:
        """Return this layout with the classes, the last dimension, moved to dimension 1; None for fewer than three dimensions."""
        if len(self.size) < 3:
            return None
        size, stride = ((values[0], values[-1], *values[1:-1]) for values in (self.size, self.stride))
        return Layout(size, stride, self.dtype)

    @staticmethod
    def contiguous(*size: int, dtype: torch.dtype) -> Layout:
        """Return the layout of a contiguous tensor of this size."""
        strides = [1]
        for length in reversed(size[1:]):
            strides.insert(0, strides[0] * max(1, length))
        return Layout(size, tuple(strides), dtype)


def is_elementwise(call: RecordedCall) -> bool:
    """Return whether a call can be repeated chunk by chunk: a cast, a product or quotient with a Python number, or tanh."""
    if call.name in SCALES:
        return len(call.args) == 1 and type(call.args[0]) in (int, float) and not call.kwargs
    if call.name != "to":
        return not call.args and not call.kwargs
    if "copy" in call.kwargs:
        return False
    device, dtype, *_ = torch._C._nn._parse_to(*call.args, **call.kwargs)
    return device is None and dtype is not None and dtype.is_floating_point


def without_device(logits: Tensor, call: RecordedCall) -> RecordedCall:
    """Return `call`, a call of `to`, without its device argument if `logits` are on that device already."""
    if "copy" in call.kwargs:
        return call
    device, dtype, *_ = torch._C._nn._parse_to(*call.args, **call.kwargs)
    here = logits.device
    if device is None or device.type != here.type or device.index not in (None, here.index):
        return call
    return RecordedCall(call.name, call.func, (dtype or logits.dtype,), {})


def keeps_last(index: Any, num_dims: int) -> bool:
    """Return whether an index keeps the whole last dimension.

    >>> keeps_last((..., slice(None, -1), slice(None)), 3), keeps_last(0, 3), keeps_last((..., 0), 3), keeps_last((0, 0, 0), 3)
    (True, True, False, False)
    """
    items = index if isinstance(index, tuple) else (index,)
    if not all(item is None or item is ... or type(item) in (int, slice) for item in items):
        return False
    num_indexed = sum(item is not None and item is not ... for item in items)
    if items[-1:] == (...,) or (num_indexed < num_dims and ... not in items):
        return num_indexed < num_dims
    return items[-1:] == (slice(None),)


def transform_of(calls: tuple[RecordedCall, ...], dtype: torch.dtype) -> Elementwise | None:
    """Return recorded elementwise calls as one transform of logits; None if it is the identity for the loss.

    `dtype`: that of the logits before the calls. Final casts to float32 are left out, since the loss makes them.
    """
    found, layout = list[tuple[str, Any]](), Layout.contiguous(1, dtype=dtype)
    for call in calls:
        layout = layout.after(call)
        found.append(elementwise_call(call.name, call.args[0] if call.args else None, layout.dtype))
    return without_last_casts(found, dtype)
