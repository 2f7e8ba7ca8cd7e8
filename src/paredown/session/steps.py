"""From a recipe, which names nodes of autograd's graph, to the tensors that computing it again takes."""

# pyright: reportPrivateUsage=false, reportAttributeAccessIssue=false

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from paredown.codec.recompute import Norm, Steps
from paredown.plan.recipes import Recipe
from paredown.session.waiting import Bits, Piece, View


def steps_of(recipe: Recipe, source: View, signs: View | None, result: Piece, *, keeps_parameters: bool) -> Steps | None:
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
            not isinstance(bits, Bits)
            or bits.bits is None
            or (source.size, source.stride) != (result.tensor.size(), result.tensor.stride())
        ):
            return None
        return _after_batch_norm(recipe.source, source, bits.bits, keeps_parameters)
    return Steps(activation="gelu_tanh" if recipe.op == "gelu" and recipe.source._saved_approximate == "tanh" else recipe.op)


def _after_layer_norm(node: Any, source: View, keeps_parameters: bool) -> Steps | None:
    mean, deviation = node._saved_result1, node._saved_result2
    channels = source.size.numel() // max(mean.numel(), 1)
    if mean.dtype is not torch.float32 or not _is_contiguous(source):
        return None
    weight, bias = (_vector(t, keeps_parameters) for t in (node._saved_weight, node._saved_bias))
    return Steps(Norm(channels, 1, weight, bias, mean, deviation, by_row=True))


def _after_batch_norm(node: Any, source: View, bits: Tensor, keeps_parameters: bool) -> Steps | None:
    weight, bias = node._saved_weight, getattr(node.next_functions[2][0], "variable", None)
    mean, deviation = node._saved_result1, node._saved_result2
    channels = source.size[1]
    if (weight is None) != (bias is None) or mean is None or mean.numel() != channels or mean.dtype is not torch.float32:
        return None
    channels_last = len(source.size) > 2 and source.stride[1] == 1
    if not channels_last and not _is_contiguous(source):
        return None
    weight, bias = (_vector(t, keeps_parameters) for t in (weight, bias))
    return Steps(Norm(channels, 1 if channels_last else source.size[2:].numel(), weight, bias, mean, deviation), "relu", bits)


def _vector(parameter: Tensor | None, keeps_parameters: bool) -> Tensor | None:
    """A parameter of a norm as it is used, flat."""
    if parameter is None or (keeps_parameters and parameter.dim() == 1 and parameter.dtype is torch.float32):
        return parameter
    return parameter.detach().float().reshape(-1).clone()


def _is_contiguous(view: View) -> bool:
    expected = 1
    for size, stride in zip(reversed(view.size), reversed(view.stride), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True
