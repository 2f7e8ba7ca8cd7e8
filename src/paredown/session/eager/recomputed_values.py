"""Recomputes saved tensors in backward from another stored tensor, which autograd/rematerialization.py names.

`RecomputedValues` stands for such a tensor in memory. `decode_steps_of` collects the tensors that recomputing needs, such as the
statistics of a norm, from the autograd nodes that a `Rematerialization` names.
"""

# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

from typing import Any, final

import torch
from torch import Tensor

from paredown.autograd.rematerialization import Rematerialization, function_name
from paredown.codec.recompute import DecodeSteps, Norm, recompute
from paredown.session.eager.stored_tensors import StoragePiece, StoredForm, StoredMask, StoredValues, StoredView


@final
class RecomputedValues(StoredForm):
    """Stands in memory for a saved tensor that is not stored: backward recomputes it from another tensor."""

    __slots__ = ("source", "steps")

    def __init__(self, piece: StoragePiece, source: StoredValues, steps: DecodeSteps) -> None:
        super().__init__(piece)
        self.source, self.steps = source, steps

    def _unpacked(self) -> Tensor:
        return self._recomputed((self.numel,), (1,))

    def tensor(self, size: torch.Size, stride: tuple[int, ...]) -> Tensor:
        """Return the recomputed tensor with this size and stride."""
        return self._recomputed(size, stride) if self.plain_values is None else self.values().as_strided(size, stride)

    def _recomputed(self, size: tuple[int, ...], stride: tuple[int, ...]) -> Tensor:
        source, steps = self.source, self.steps
        stored = source.on_device()
        if stored is None or not source.codec.takes_address:
            return recompute(source.packed or source.values(), steps, self.dtype, (size, stride))
        if steps.norm is not None:
            steps.norm.check()
        return source.codec.recompute(stored, steps, self.dtype, (size, stride))


def decode_steps_of(
    rule: Rematerialization, source: StoredView, signs: StoredView | None, result: StoragePiece, *, keeps_parameters: bool
) -> DecodeSteps | None:
    """Return the operations that compute `result` from the decoded `source`; None if it cannot be computed.

    `rule`: how to recompute the result. `signs`: its stored signs, if an activation function needs them. `keeps_parameters`: whether the
    model keeps its parameters until backward, so that the operations need no copies of them.
    """
    form, (size, stride, *_) = source.form, source.layout
    if not form.is_whole or form.numel != result.numel or form.numel != size.numel():
        return None
    if rule.is_copy and not _is_contiguous(source):
        return None
    if rule.op == "layer_norm":
        return _after_layer_norm(rule.source, source, keeps_parameters)
    if rule.op == "batch_norm":
        norm = _batch_norm(rule.source, source, keeps_parameters)
        if norm is None or (size, stride) != (result.tensor.size(), result.tensor.stride()):
            return None
        if rule.sign is None:
            return DecodeSteps(norm, activation_name(rule.function) if rule.function is not None else "")
        bits = signs.form if signs is not None else None
        return DecodeSteps(norm, "relu", bits.bits) if isinstance(bits, StoredMask) and bits.bits is not None else None
    return DecodeSteps(activation=activation_name(rule.source))


def activation_name(node: Any) -> str:
    """Return the name that `DecodeSteps` uses for the activation function of an autograd node."""
    name = function_name(node)
    return "gelu_tanh" if name == "gelu" and node._saved_approximate == "tanh" else name


def _after_layer_norm(node: Any, source: StoredView, keeps_parameters: bool) -> DecodeSteps | None:
    mean, rstd = node._saved_result1, node._saved_result2
    channels = source.layout.size.numel() // max(mean.numel(), 1)
    if mean.dtype is not torch.float32 or not _is_contiguous(source):
        return None
    weight, bias = _vector(node._saved_weight, keeps_parameters), _vector(node._saved_bias, keeps_parameters)
    return DecodeSteps(Norm(channels, 1, weight, bias, mean, rstd, by_row=True))


def _batch_norm(node: Any, source: StoredView, keeps_parameters: bool) -> Norm | None:
    size, stride, *_ = source.layout
    weight, bias = node._saved_weight, getattr(node.next_functions[2][0], "variable", None)
    mean, rstd = node._saved_result1, node._saved_result2
    channels = size[1]
    if (weight is None) != (bias is None) or mean is None or mean.numel() != channels or mean.dtype is not torch.float32:
        return None
    channels_last = len(size) > 2 and stride[1] == 1
    if not channels_last and not _is_contiguous(source):
        return None
    weight, bias = _vector(weight, keeps_parameters), _vector(bias, keeps_parameters)
    return Norm(channels, 1 if channels_last else size[2:].numel(), weight, bias, mean, rstd)


def _vector(parameter: Tensor | None, keeps_parameters: bool) -> Tensor | None:
    """Return a norm's parameter as a 1-D float32 tensor, which is a copy unless the parameter is kept until backward."""
    if parameter is None or (keeps_parameters and parameter.dim() == 1 and parameter.dtype is torch.float32):
        return parameter
    return parameter.detach().float().reshape(-1).clone()


def _is_contiguous(view: StoredView) -> bool:
    expected = 1
    for size, stride in zip(reversed(view.layout.size), reversed(view.layout.stride), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True
