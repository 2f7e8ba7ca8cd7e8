"""`HeldLinear` keeps the operands of one call of F.linear, so that its output can be computed later, unchanged.

    the graph       an alias of each operand, made at the call: later freezing, `detach_()` and replacing of parameters change nothing
    the values      `check` raises where they are no longer those of the call: by version numbers, by the memory that a tensor has, and on a
                    CPU by fingerprints too, since writes through `.data` change no version number

The fingerprint of a matrix is its product with one fixed vector: the logits of one more row. A write that changes no bit of it changes
logits by about their rounding. On other devices the comparison would wait for the device, so it is left out (docs/limits.md).
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from paredown.autograd.graph import has_storage
from paredown.optim.packed_parameter import Decoded, view_of
from paredown.optim.packed_weight import weight_of
from paredown.optim.parameter_state import owner_of

CHANGED = (
    "the logits of {path} were not computed, because the loss reads them in chunks, and {what} changed since: they cannot be computed any "
    "more. Read them before optimizer.step(), or call paredown.apply(plan, model, chunked_loss=False)."
)
PRINTED_VALUES = 2**20  # values of a matrix that are multiplied at a time


class HeldLinear:
    """One call of F.linear whose output is computed later: its input, weight and bias, as they were at the call."""

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        self._hidden, self._weight = HeldTensor(hidden, "the input of the layer"), HeldTensor(weight, "its weight")
        self._bias = HeldTensor(bias, "its bias") if bias is not None else None
        self._all = [held for held in (self._hidden, self._weight, self._bias) if held is not None]
        self.hidden, self.has_bias, self.num_classes = self._hidden.alias, bias is not None, weight.shape[0]
        self.dtypes = [held.alias.dtype for held in self._all]

    def check(self, path: str) -> None:
        """Raise RuntimeError if input, weight or bias was modified since the call; the message names the layer by `path`."""
        for held in self._all:
            if held.has_changed():
                raise RuntimeError(CHANGED.format(path=path, what=held.name))

    def forward(self) -> Tensor:
        """Compute the output of the call of F.linear now, and return it."""
        return functional.linear(self.hidden, *self.operands())

    def operands(self) -> tuple[Tensor, Tensor | None]:
        """Return weight and bias of the call of F.linear, packed if they are stored packed; gradients flow to both."""
        return self._weight.operand(), self._bias.operand() if self._bias is not None else None

    def values(self) -> tuple[Tensor, Tensor | None]:
        """Return weight and bias of the call of F.linear, decoded if they are packed; gradients flow to both."""
        return self._weight.values(), self._bias.values() if self._bias is not None else None


class HeldTensor:
    """An argument of a call of F.linear, and an alias that keeps the memory and autograd graph that it had at the call."""

    def __init__(self, given: Tensor, name: str) -> None:
        self.given, self.name = given, name
        self._packed = weight_of(given)  # in the forward of its module, a packed parameter has the class nn.Parameter
        self._needs_grad, self._version = given.requires_grad, version_of(given)
        self._print = fingerprint(given) if self._packed is None else None
        with torch.enable_grad():
            if self._packed is None:
                self.alias = given.view_as(given)
            else:  # a view, to which gradients flow if the parameter requires them at the moment
                self.alias = PackedAlias.apply(given) if given.requires_grad else view_of(given)

    def has_changed(self) -> bool:
        """Return whether the tensor's values were modified since the call; some writes through `.data` are not noticed."""
        if version_of(self.given) != self._version:
            return True
        if (
            self._packed is None
            and has_storage(self.given)
            and self.given.untyped_storage()._cdata != self.alias.untyped_storage()._cdata
        ):
            return True  # after p.data = other, or model.half()
        now = fingerprint(self.alias) if self._print is not None else None
        return now is not None and self._print is not None and not torch.equal(now, self._print)

    def operand(self) -> Tensor:
        """Return the tensor as it was at the call of F.linear; a packed parameter is returned packed.

        If a packed parameter was frozen or unfrozen since the call, return the alias.
        """
        is_same = self._packed is not None and self.given.requires_grad == self._needs_grad
        return self.given if is_same else self.alias

    def values(self) -> Tensor:
        """Return the tensor's values as they were at the call of F.linear, decoded if the parameter is packed."""
        if self._packed is None:
            return self.alias
        if self._needs_grad and torch.is_grad_enabled():
            return Decoded.apply(self.alias)  # type: ignore[return-value]
        return self._packed.shared(self._packed.dtype)


class PackedAlias(torch.autograd.Function):
    """The autograd function that makes a view of a packed parameter, through which gradients flow, without decoding it."""

    @staticmethod
    def forward(ctx: Any, packed: Tensor) -> Tensor:
        """Return a view of the packed parameter; nothing is decoded."""
        return view_of(packed)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        """Return the gradient, unchanged, for the parameter."""
        return grad


def version_of(tensor: Tensor) -> Any:
    """Return a value that differs after every write to a tensor, except for writes through `.data`."""
    weight, owner = weight_of(tensor), owner_of(tensor)
    return tensor._version if weight is None else weight.version, owner.updates if owner is not None else 0


def fingerprint(tensor: Tensor) -> Tensor | None:
    """Return one number per row of a matrix, which shows later whether values were changed; None if they cannot be read now.

    >>> weight = nn.Parameter(torch.eye(3))
    >>> before = fingerprint(weight)
    >>> weight.data[1, 2] = 0.5
    >>> before == fingerprint(weight)
    tensor([ True, False,  True])
    """
    if type(tensor) not in (Tensor, nn.Parameter) or tensor.device.type != "cpu":
        return None
    dtype = torch.float64 if tensor.dtype is torch.float64 else torch.float32
    with torch.no_grad():
        rows = tensor.detach().reshape(-1, tensor.shape[-1] if tensor.dim() > 1 else 1)
        vector = torch.arange(1, rows.shape[1] + 1, dtype=torch.float64).sin().to(dtype)
        parts = rows.split(max(1, PRINTED_VALUES // max(1, rows.shape[1])))
        found = torch.cat([(part.to(dtype) * vector).sum(1) for part in parts])
    return found.view(torch.int64 if dtype is torch.float64 else torch.int32)  # NaN equals itself
