"""Operations that fake tensors on a CPU do not describe: what attention, RNNs, softmax and RMSNorm are on CUDA, and oneDNN's LSTM.

Right in shapes, dtypes and memory, without numbers. Each of CUDA's is an autograd function whose `stands_for` is (the node it has on
CUDA, autograd's names of what that saves, in autograd's order), so that `Watch` names slots as it does on a GPU. Forward and
backward allocate what the kernels do: their outputs, and the scratch that matters.

Memory that CUDA's operations take for themselves while they run, where it is large and follows from shapes.

A sum over all dimensions but the last, which is what the gradient of a bias is, is split over so many thread blocks that a GPU is full,
and every one of them gets room for more partial sums than it writes. Of (25216, 3072) numbers in bfloat16 that is 132 MiB on an H200; of
eight times as many rows 295. The arithmetic is that of torch's reductions (ATen/native/cuda/Reduce.cuh, torch 2.11), which take tensors
of more than 2 GiB half by half.
"""


# pyright: reportIncompatibleMethodOverride=false, reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

# cuDNN keeps for backward, for each place, layer and direction, so many numbers of the layer's width (in the dtype of the layer): gates,
# states and, but for the last layer, outputs. Read off its own tensors on one H200 (cuDNN of torch 2.11) for 1 to 3 layers.
RNN_RESERVE = {"lstm": 6, "gru": 7, "rnn_tanh": 2, "rnn_relu": 2}
RNN_GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}
FLASH_ROWS = 128  # flash attention's scratch in backward is rounded up to so many places,
FLASH_COLUMNS = 32  # and to so many numbers of a head
EFFICIENT_ROWS = 32  # memory-efficient attention keeps a logsumexp for every place, rounded up to this
EFFICIENT_BLOCK = 64  # in backward it adds gradients of float32 queries up in blocks of 64 x 64 (seen for heads of 16),
EFFICIENT_LOCK = 4  # each with so many numbers of a lock
EFFICIENT_ALIGN = {2: 8, 4: 4}  # it wants heads that are a multiple of this, by the bytes of a number
BIAS_ALIGN = 16  # and the last dimension of a mask, which it copies to a padded one otherwise
FLASH_HEAD = 256  # flash attention takes heads up to this


def up(number: int, step: int) -> int:
    """`number` rounded up to a multiple of `step`."""
    return -(-number // step) * step


def _heads_inside(like: Tensor, *, width: int | None = None, heads: int | None = None) -> Tensor:
    """Memory of (num, heads, length, width) in which a place's heads lie side by side, as attention kernels write it."""
    num, own_heads, length, own_width = like.shape
    return like.new_empty(num, length, heads or own_heads, width or own_width).transpose(1, 2)


class Flash(Function):
    """Flash attention: what is as large as length x length never exists."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """The output, (num, heads, length, width of value)."""
        out = _heads_inside(query, width=value.shape[-1])
        logsumexp = query.new_empty(query.shape[:3], dtype=torch.float32)
        ctx.stands_for = ("ScaledDotProductFlashAttention", ("key", "logsumexp", "output", "query", "value"))
        ctx.save_for_backward(key, logsumexp, out, query, value)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of query, key and value; scratch: the query's in float32, and one number for each place."""
        key, _, _, query, value = ctx.saved_tensors
        num, heads, length, width = query.shape
        rows = up(length, FLASH_ROWS)
        scratch = [query.new_empty(num, heads, rows, dtype=torch.float32)]
        scratch.append(query.new_empty(num, heads, rows, up(width, FLASH_COLUMNS), dtype=torch.float32))
        if key.shape[1] != heads:  # grouped queries: gradients of key and value for every head, summed afterwards
            scratch += [_heads_inside(key, heads=heads), _heads_inside(value, heads=heads)]
        grads = _heads_inside(query), _heads_inside(key), _heads_inside(value)
        del scratch
        return grads


class Efficient(Function):
    """Memory-efficient attention: takes float32 and masks."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> Tensor:
        """The output, (num, heads, length, width of value)."""
        out = _heads_inside(query, width=value.shape[-1])
        num, heads, length, _ = query.shape
        logsumexp = query.new_empty(num, heads, up(length, EFFICIENT_ROWS), dtype=torch.float32)
        names = ("key", "log_sumexp", "output", "query", "value")
        ctx.has_bias = bias is not None
        ctx.stands_for = ("ScaledDotProductEfficientAttention", ("attn_bias", *names) if ctx.has_bias else names)
        ctx.save_for_backward(*((bias,) if ctx.has_bias else ()), key, logsumexp, out, query, value)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of query, key, value, and of the mask where it wants one."""
        *bias, key, logsumexp, _, query, value = ctx.saved_tensors
        scratch = [torch.empty_like(logsumexp)]
        if query.itemsize < 4:
            scratch.append(torch.empty_like(query, dtype=torch.float32))
        else:
            blocks = [-(-size // EFFICIENT_BLOCK) for size in query.shape[2:]]
            scratch.append(query.new_empty(*query.shape[:2], *blocks, EFFICIENT_BLOCK**2 + EFFICIENT_LOCK))
        grads = _heads_inside(query), _heads_inside(key), _heads_inside(value)
        del scratch
        return *grads, torch.empty_like(bias[0]) if bias and ctx.needs_input_grad[3] else None


class Softmax(Function):
    """softmax and log_softmax of float16 into float32, in one kernel; bfloat16 is cast before."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, node: str) -> Tensor:
        """Float32 of the shape of `x`."""
        out = torch.empty_like(x, dtype=torch.float32)
        ctx.stands_for, ctx.dtype = (node, ("result",)), x.dtype
        ctx.save_for_backward(out)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """The gradient, in the dtype that came in."""
        return torch.empty_like(ctx.saved_tensors[0], dtype=ctx.dtype), None


class RMSNorm(Function):
    """The fused kernel: saves its input and a number for each row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, num_dims: int) -> Tensor:
        """`x` normalised over its last `num_dims` dimensions."""
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        deviation = x.new_empty((*x.shape[: x.dim() - num_dims], *(1,) * num_dims), dtype=torch.float32)
        ctx.stands_for = ("FusedRmsNorm", ("input", "result1", "weight"))
        ctx.save_for_backward(x, deviation, *(() if weight is None else (weight,)))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of input and weight."""
        x, _, *weight = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight[0]) if weight else None, None


class Recurrent(Function):
    """All layers, places and directions of an LSTM, GRU or RNN as one call of cuDNN; time comes first."""

    @staticmethod
    def forward(ctx: Any, kind: str, sizes: tuple[int, int], x: Tensor, hx: Tensor, cx: Tensor | None, *weights: Tensor) -> Any:
        """(output, hy, cy); `sizes`: layers times directions, and the width of the gates."""
        num_layers, width = sizes
        length, num, _ = x.shape
        directions = 2 if hx.shape[0] == 2 * num_layers else 1
        out = x.new_empty(length, num, directions * hx.shape[-1])
        states = [torch.empty_like(hx), torch.empty_like(cx) if cx is not None else x.new_empty(0)]
        numbers = length * num * directions * width * (num_layers * RNN_RESERVE[kind] - 1)
        reserve = x.new_empty(numbers * x.itemsize + 256, dtype=torch.uint8)
        ctx.has_cell, ctx.num = cx is not None, len(weights)
        cells = (("cx", cx),) if cx is not None else ()
        named = (*cells, ("hx", hx), ("input", x), ("result0", out), ("result3", reserve))
        ctx.stands_for = ("CudnnRnn", tuple(name for name, _ in named) + tuple(f"weight{i + 1}" for i in range(ctx.num)))
        ctx.save_for_backward(*(tensor for _, tensor in named), *weights)
        ctx.mark_non_differentiable(*(states[1:] if cx is None else ()))
        return out, *states

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        """Gradients of input, states and weights; those of the weights are views of one tensor."""
        saved = ctx.saved_tensors
        weights = saved[len(saved) - ctx.num :]
        cx, hx, x = saved[:3] if ctx.has_cell else (None, *saved[:2])
        flat = x.new_empty(sum(w.numel() for w in weights), dtype=weights[0].dtype)
        parts = flat.split([w.numel() for w in weights])
        of_states = torch.empty_like(hx), torch.empty_like(cx) if cx is not None else None
        return None, None, torch.empty_like(x), *of_states, *(p.view(w.shape) for p, w in zip(parts, weights, strict=True))


def attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, causal: bool, grouped: bool) -> Tensor | None:
    """Scaled dot-product attention by the kernel that CUDA chooses; None where that is the plain one, which writes every product."""
    if query.dim() != 4 or any(t.numel() == 0 for t in (query, key, value)):
        return None
    width, is_half = query.shape[-1], query.itemsize == 2
    square = not causal or query.shape[2] == key.shape[2]
    if is_half and mask is None and width <= FLASH_HEAD and width == value.shape[-1] and square:
        return Flash.apply(query, key, value)
    align = EFFICIENT_ALIGN.get(query.itemsize)
    if grouped or align is None or width % align or value.shape[-1] % align:
        return None
    return Efficient.apply(query, key, value, None if mask is None else _bias(mask, query, key))


def _bias(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """A mask as the kernel takes it: numbers, the last dimension padded, expanded without memory."""
    if mask.dtype is torch.bool:
        mask = torch.empty_like(mask, dtype=query.dtype)
    length = key.shape[2]
    if mask.shape[-1] == length and length % BIAS_ALIGN:
        mask = torch.nn.functional.pad(mask, (0, up(length, BIAS_ALIGN) - length))[..., :length]
    return mask.expand(query.shape[0], query.shape[1], query.shape[2], length)


def recurrent(kind: str, x: Tensor, states: tuple[Tensor, ...], weights: list[Tensor], num_layers: int, batch_first: bool) -> Any:
    """(output, *states) of a recurrent layer; cuDNN wants time first, so batches that come first are copied."""
    placed = x.transpose(0, 1).contiguous() if batch_first else x
    width = weights[0].shape[0] // RNN_GATES[kind]
    hx, cx = states[0], states[1] if len(states) > 1 else None
    out, *left = Recurrent.apply(kind, (num_layers, width), placed, hx, cx, *weights)
    return (out.transpose(0, 1) if batch_first else out, *left[: len(states)])


ONEDNN_ALIGN, ONEDNN_AVOIDED, ONEDNN_PAGES = (
    16,
    256,
    2,
)  # floats that rows are rounded up to; a length that it avoids; pages lost at ends


def onednn_workspace(args: Any, outputs: Any) -> Any:
    """The outputs of a layer of an LSTM on the CPU with the memory that oneDNN keeps for backward, which fake tensors have as empty.

    Gates twice and the output once for each place, and three states for each place and one before; within 2 % of oneDNN 3.
    """
    x, width, trains = args[0], args[10], args[15]
    places, starts = x.shape[0] * x.shape[1], (x.shape[0] + 1) * x.shape[1]
    numbers = places * (2 * _row(4 * width) + _row(width)) + 6 * starts * _row(width)
    kept = x.new_empty(4 * numbers + 4096 * ONEDNN_PAGES if trains else 0, dtype=torch.uint8)
    return (*outputs[:3], kept)


def _row(width: int) -> int:
    rounded = up(width, ONEDNN_ALIGN)
    return rounded + ONEDNN_ALIGN if rounded % ONEDNN_AVOIDED == 0 else rounded


UNKNOWN_SIZES = {
    torch.ops.aten.mkldnn_rnn_layer.default: onednn_workspace
}  # operations whose fake outputs are smaller than the real ones


# --- Memory that CUDA's operations take for themselves while they run, where it is large and follows from shapes ---

PROCESSORS, THREADS = 132, 2048  # of an H100 or H200, and threads that one of them holds; smaller GPUs take less
BLOCK, WARP = 512, 32  # threads of a block at most; of a warp
FEWEST, MOST = 16, 256  # numbers that a thread adds up
WIDEST = 2**31 - 1  # bytes that are summed at once


def sum_workspace(num_inputs: int, num_outputs: int, dtype: torch.dtype = torch.float32) -> int:
    """Bytes of partial sums where each of `num_outputs` numbers that lie side by side is the sum of `num_inputs`."""
    while num_inputs > 1 and num_inputs * num_outputs * dtype.itemsize > WIDEST:
        num_inputs = -(-num_inputs // 2)
    sum_bytes = 4 if dtype.is_floating_point and dtype.itemsize <= 4 else 8
    vector = next(width for width in (4, 2, 1) if num_outputs % width == 0)
    most = BLOCK // vector
    across = min(_power(num_outputs // vector), most)
    height = min(_power(num_inputs), most // min(across, WARP))
    width = min(across, most // height)
    if num_inputs < min(height * FEWEST, MOST):
        return 0
    values, grid = -(-num_inputs // height), -(-num_outputs // (vector * width))
    target = PROCESSORS * (THREADS // (width * height))
    if values < MOST or grid > target:
        return 0
    blocks = max(min(-(-target // grid), -(-values // FEWEST)), -(-values // MOST))
    return sum_bytes * num_outputs * blocks * width * vector if blocks > 1 else 0


def _power(number: int) -> int:
    """The largest power of two in it."""
    return 1 << (number.bit_length() - 1)


def _of_sum(args: Any) -> int:
    x, dims = args[0], args[1]
    if not isinstance(x, Tensor) or not dims or not x.dim() or not x.numel() or not x.is_contiguous():
        return 0
    num = len(dims)
    is_leading = num < x.dim() and sorted(dim % x.dim() for dim in dims) == list(range(num))
    return sum_workspace(prod(x.shape[:num]), prod(x.shape[num:]), x.dtype) if is_leading else 0


SCRATCH: Mapping[Any, Callable[[Any], int]] = {torch.ops.aten.sum.dim_IntList: _of_sum}  # bytes, by the arguments
