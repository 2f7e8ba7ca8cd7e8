"""Predicts the memory that a convolution on a CPU allocates while it runs: oneDNN's copies of operands, or im2col columns without oneDNN.

oneDNN's kernels read and write blocks of 16 channels. An operand in torch's contiguous layout is copied into blocks, and a result out of
them. For x, w -> y, calls allocate these one after the other (x_ is x in blocks, with channels rounded up to 16):

    forward             x_ w_ y_, free x_ w_, y, free y_                 at most max(x_ + w_ + y_, y_ + y)
    gradient of x       g_ w_ dx_, free w_ g_, dx, free dx_              a stride other than 1: one more copy of dx at its end
    gradient of w       g_ x_ dw_, free g_ x_, dw, free dw_              beside dx

    x, y of 24 MiB each, 48 channels, w of 81 KiB: 24.1 MiB beside y in forward, 48 MiB beside dx and dw in backward

An input of fewer than 16 channels, as pictures have, is read as it is in forward. In channels_last the weight and its gradient alone are
copied, and operands that are not in it. The rules are what the allocator of torch 2.13 was seen to do, on AVX-512 and AVX2 (blocks of 8:
smaller where channels are no multiple of 16). Left out: sums of threads, and what some kernels add
(tests/predict/test_cpu_workspaces.py has the calls that were compared).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch._prims_common import suggest_memory_format

from paredown.predict.fake.device_ops import round_up

BLOCK, HALF = 16, 8  # channels; inputs of up to 8 have blocks of 8
PLAIN = 3  # in backward, inputs of up to this many channels are not copied
NATIVE_VALUES = 20480  # torch computes a single sample of up to this many values without oneDNN, if the kernel is
NATIVE_KERNEL = 3  # at most this wide


def forward_workspace(args: Any, out: Tensor) -> int:
    """Return the most bytes that a call of aten::convolution allocates on a CPU beside operands and result `out`."""
    x, weight, bias, stride, is_transposed, groups = *args[:4], args[6], args[8]
    if not _runs_in_onednn(x, weight, groups):
        return 0 if is_transposed else _column_bytes(weight, out)
    if not out.numel():
        return 0
    if _is_channels_last(x, weight):
        return _other_bytes(x, weight) + _weight_in_blocks(weight)
    result, operands = _in_blocks(out), 0 if _has_few_channels(weight, groups) else _weight_in_blocks(weight)
    if operands and x.shape[1] >= BLOCK:
        operands += _in_blocks(x)
    if is_transposed:  # a bias is added to a copy; a stride other than 1 makes one more
        return max(operands + result - (bias is None) * out.nbytes, result * (1 + (max(stride) > 1)))
    return max(operands + result - out.nbytes, result)


def backward_workspace(args: Any, _: Any) -> int:
    """Return the most bytes that aten::convolution_backward allocates on a CPU beside operands and results."""
    grad, x, weight, stride, is_transposed, groups, (needs_x, *_) = *args[:3], args[4], args[7], *args[9:11]
    if not _runs_in_onednn(x, weight, groups):
        return 0 if is_transposed else _column_bytes(weight, grad)
    if not x.numel():
        return 0
    weights = _weight_in_blocks(weight)
    if _is_channels_last(x, weight):
        return _other_bytes(grad, x, weight) + weights + weight.nbytes
    grads, inputs = (0, 0) if _has_few_channels(weight, groups) else (_in_blocks(grad), _input_in_blocks(x))
    sizes = [grads + inputs + weights - weight.nbytes, weights]
    if needs_x:
        result, copies = _in_blocks(x), x.nbytes * (max(stride) > 1 and not is_transposed)
        sizes += [grads + weights + result - x.nbytes - weight.nbytes, result + copies - weight.nbytes]
    return max(sizes)


def _runs_in_onednn(x: Tensor, weight: Tensor, groups: int) -> bool:
    """Return whether torch computes this convolution with oneDNN: not in float64, nor for one small sample."""
    is_small = x.shape[0] == 1 and x.numel() <= NATIVE_VALUES and groups == 1 and max(weight.shape[-2:]) <= NATIVE_KERNEL
    return x.dtype in (torch.float32, torch.bfloat16, torch.float16) and not is_small


def _is_channels_last(*operands: Tensor) -> bool:
    return any(t.dim() > 3 and suggest_memory_format(t) is _last(t) for t in operands)


def _last(t: Tensor) -> torch.memory_format:
    return torch.channels_last if t.dim() == 4 else torch.channels_last_3d


def _other_bytes(*operands: Tensor) -> int:
    """Return the bytes of channels_last copies of the operands that have another memory layout."""
    return sum(t.nbytes for t in operands if not t.is_contiguous(memory_format=_last(t)))


def _has_few_channels(weight: Tensor, groups: int) -> bool:
    """Return whether a group of the convolution has too few channels to fill a block of oneDNN."""
    num_in, num_out = weight.shape[1], weight.shape[0] // groups
    return groups > 1 and num_in * num_out > 1 and bool(num_in % HALF or num_out % HALF)


def _in_blocks(x: Tensor) -> int:
    """Return the bytes of activations (num, channels, ...) in oneDNN's layout, with channels in whole blocks."""
    return x.nbytes // x.shape[1] * round_up(x.shape[1], BLOCK)


def _input_in_blocks(x: Tensor) -> int:
    """Return the bytes of the copy of a convolution's input that oneDNN makes in backward."""
    channels = x.shape[1]
    return 0 if channels <= PLAIN else x.nbytes // channels * round_up(channels, HALF if channels <= HALF else BLOCK)


def _weight_in_blocks(weight: Tensor) -> int:
    """Return the bytes of a convolution's weight in oneDNN's layout, which rounds its channels up to whole blocks.

    A weight of few input channels, as in grouped convolutions, is not in blocks.
    """
    num_out, num_in = weight.shape[:2]
    blocked = round_up(num_out, BLOCK) * round_up(num_in, BLOCK)
    return weight.nbytes if num_in <= HALF else weight.nbytes // (num_out * num_in) * blocked


def _column_bytes(weight: Tensor, out: Tensor) -> int:
    """Return the bytes of the im2col columns (the inputs under the kernel for each output value) of a convolution."""
    window = prod(weight.shape[2:])
    return out.nbytes // out.shape[1] * weight.shape[1] * window if window > 1 and out.numel() else 0


# operation -> bytes of its workspace, from its arguments and results
CPU_WORKSPACES: Mapping[Any, Callable[[Any, Any], int]] = {
    torch.ops.aten.convolution.default: forward_workspace,
    torch.ops.aten.convolution_backward.default: backward_workspace,
}
