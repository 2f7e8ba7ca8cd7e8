"""Stand-ins for CUDA operations that differ from the CPU's (attention, RNNs, softmax, RMSNorm), workspaces, TRL's loss, and oneDNN's LSTM.

The functions here are right in shapes, dtypes and memory, and compute no values. Each CUDA operation is an autograd function whose
`stands_for` is (name of its autograd node on CUDA, names of the tensors that node saves, in autograd's order), so that `Watch` names saved
tensors as it does on a GPU. Forward and backward allocate what the kernels allocate: outputs, and workspaces that are large.

`sum_workspace` is the memory that a reduction on CUDA allocates while it runs. A sum over all dimensions but the last, which is the
gradient of a bias, is split over enough thread blocks to fill the GPU, and each block gets memory for more partial sums than it writes.
For (25216, 3072) values in bfloat16 that is 132 MiB on an H200, for eight times as many rows 295 MiB. The arithmetic is that of torch's
reductions (ATen/native/cuda/Reduce.cuh, torch 2.11), which split tensors of more than 2 GiB in halves.
"""

# pyright: reportIncompatibleMethodOverride=false, reportPrivateUsage=false

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from math import prod
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

# values, in units of the layer's width, that cuDNN saves for backward for each position, layer and direction: gates, states and, except
# in the last layer, outputs. Measured by the size of its reserve tensor on one H200 (cuDNN of torch 2.11) for 1 to 3 layers.
RNN_RESERVE = {"lstm": 6, "gru": 7, "rnn_tanh": 2, "rnn_relu": 2}
RNN_GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}
RNN_BACKWARD = "rnn_backward"
FLASH_ROWS = 128  # the workspace of flash attention in backward is rounded up to a multiple of this many positions,
FLASH_COLUMNS = 32  # and of this many values of a head
EFFICIENT_ROWS = 32  # memory-efficient attention saves a logsumexp for every position, rounded up to a multiple of this
EFFICIENT_BLOCK = 64  # in backward it sums gradients of float32 queries in blocks of 64 x 64 (measured for heads of 16),
EFFICIENT_LOCK = 4  # each with a lock of this many values
EFFICIENT_ALIGN = {2: 8, 4: 4}  # itemsize -> the width of a head must be a multiple of this
BIAS_ALIGN = 16  # it pads the last dimension of a mask to a multiple of this, by a copy
FLASH_HEAD = 256  # flash attention takes heads up to this width
ONEDNN_ALIGN = 16  # oneDNN rounds the length of a row up to this many floats,
ONEDNN_AVOIDED = 256  # adds one such unit where the length is a multiple of this,
ONEDNN_PAGES = 2  # and loses this many pages at the ends of its workspace
CHANNEL_BYTES = 16  # channels of tensors in cuDNN's channels_last copies have a multiple of this many bytes
PROCESSORS, THREADS = 132, 2048  # multiprocessors of an H100 or H200, and threads of each; smaller GPUs need less workspace
BLOCK, WARP = 512, 32  # most threads of a block; threads of a warp
MIN_PER_THREAD, MAX_PER_THREAD = 16, 256  # values that a thread adds
MAX_REDUCED_BYTES = 2**31 - 1  # most bytes that one kernel sums
ATTENTION, ATTENTION_BACKWARD = "attention", "attention_backward"  # names of kernels in `Trace.operations`
TRL_LOSS = "trl.kernels.chunked_logprob"  # the loss of the trainers of TRL 1.16: logits in tiles of 4096 x 32768
TRL_KERNELS = ("_forward_tile", "_backward_tile", "_addmm_fp32")  # its functions that are kernels on CUDA


@runtime_checkable
class HasKernels(Protocol):
    """Declares what stand-ins of CUDA kernels call to record that a kernel ran; a `Timeline` has it."""

    def record_kernel(self, name: str, tensors: list[Tensor], flops: int, arguments: Any) -> None:
        """Record that one CUDA kernel ran: the tensors that it reads and writes, and its flops."""


def round_up(number: int, step: int) -> int:
    """Return `number` rounded up to a multiple of `step`."""
    return -(-number // step) * step


def record_kernel(name: str, outputs: tuple[Tensor, ...], *inputs: Any, flops: int = 0) -> None:
    """Record on the active `Timeline` that a CUDA kernel ran, with its tensors and flops; do nothing without one."""
    tensors = [value for value in (*inputs, *outputs) if isinstance(value, Tensor)]
    for mode in _get_current_dispatch_mode_stack():
        if isinstance(mode, HasKernels):
            mode.record_kernel(name, tensors, flops, inputs)


def attention_flops(query: Tensor, key: Tensor, value: Tensor, *, causal: bool) -> int:
    """Return the flops of attention's two matrix products in forward, half of them if `causal`."""
    num, heads, length, width = query.shape
    return 2 * num * heads * length * key.shape[2] * (width + value.shape[-1]) // (2 if causal else 1)


def _heads_inside(like: Tensor, *, width: int | None = None, heads: int | None = None) -> Tensor:
    """Return an empty tensor (num, heads, length, width) in which all heads of a position are adjacent in memory.

    Attention kernels write this layout. Sizes and dtype are those of `like`, unless `width` or `heads` is given.
    """
    num, like_heads, length, like_width = like.shape
    return like.new_empty(num, length, heads or like_heads, width or like_width).transpose(1, 2)


class Flash(Function):
    """Stands for CUDA's flash attention while a step is traced on fake tensors: it allocates what the kernel allocates.

    The output has the memory layout of the queries, and each gradient the layout of its tensor. So the output of nn.MultiheadAttention,
    whose queries are in the order (length, num, heads, width), is not copied for the next matrix product.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, causal: bool) -> Tensor:
        """Return an empty tensor of the shape of attention's output, (num, heads, length, width of value)."""
        out, ctx.causal = torch.empty_like(query), causal
        flops = attention_flops(query, key, value, causal=causal)
        record_kernel(ATTENTION, (out,), query, key, value, causal, flops=flops)
        logsumexp = query.new_empty(query.shape[:3], dtype=torch.float32)
        ctx.stands_for = ("ScaledDotProductFlashAttention", ("key", "logsumexp", "output", "query", "value"))
        ctx.save_for_backward(key, logsumexp, out, query, value)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return empty tensors of the shapes of the gradients of query, key and value.

        Meanwhile a workspace is allocated: the query gradient in float32, and one value for each position.
        """
        key, _, _, query, value = ctx.saved_tensors
        flops = 5 * attention_flops(query, key, value, causal=ctx.causal) // 2
        record_kernel(ATTENTION_BACKWARD, (grad, query, key, value), query, key, value, ctx.causal, flops=flops)
        num, heads, length, width = query.shape
        rows = round_up(length, FLASH_ROWS)
        workspace = [query.new_empty(num, heads, rows, dtype=torch.float32)]
        workspace.append(query.new_empty(num, heads, rows, round_up(width, FLASH_COLUMNS), dtype=torch.float32))
        if key.shape[1] != heads:  # grouped queries: gradients of key and value for every head, summed afterwards
            workspace += [_heads_inside(key, heads=heads), _heads_inside(value, heads=heads)]
        grads = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
        del workspace
        return *grads, None


class Efficient(Function):
    """Stands for CUDA's memory-efficient attention, which also takes float32 and masks, while a step is traced."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, causal: bool) -> Tensor:
        """Return an empty tensor of the shape of attention's output, (num, heads, length, width of value)."""
        out, ctx.causal = _heads_inside(query, width=value.shape[-1]), causal
        flops = attention_flops(query, key, value, causal=causal)
        record_kernel(ATTENTION, (out,), query, key, value, causal, *(() if bias is None else (bias,)), flops=flops)
        num, heads, length, _ = query.shape
        logsumexp = query.new_empty(num, heads, round_up(length, EFFICIENT_ROWS), dtype=torch.float32)
        names = ("key", "log_sumexp", "output", "query", "value")
        ctx.has_bias = bias is not None
        ctx.stands_for = ("ScaledDotProductEfficientAttention", ("attn_bias", *names) if ctx.has_bias else names)
        ctx.save_for_backward(*((bias,) if ctx.has_bias else ()), key, logsumexp, out, query, value)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return empty tensors of the shapes of the gradients of query, key, value and (if needed) mask."""
        *bias, key, logsumexp, _, query, value = ctx.saved_tensors
        flops = 5 * attention_flops(query, key, value, causal=ctx.causal) // 2
        record_kernel(ATTENTION_BACKWARD, (grad, query, key, value), query, key, value, ctx.causal, *bias, flops=flops)
        workspace = [torch.empty_like(logsumexp)]
        if query.itemsize < 4:
            workspace.append(torch.empty_like(query, dtype=torch.float32))
        else:
            blocks = [-(-size // EFFICIENT_BLOCK) for size in query.shape[2:]]
            workspace.append(query.new_empty(*query.shape[:2], *blocks, EFFICIENT_BLOCK**2 + EFFICIENT_LOCK))
        grads = _heads_inside(query), _heads_inside(key), _heads_inside(value)
        del workspace
        return *grads, torch.empty_like(bias[0]) if bias and ctx.needs_input_grad[3] else None, None


class Softmax(Function):
    """Stands for CUDA's softmax and log_softmax from float16 to float32 while a step is traced on fake tensors."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, node: str) -> Tensor:
        """Return an empty float32 tensor of the shape of `x`; `node` is the name of the kernel's autograd node."""
        out = torch.empty_like(x, dtype=torch.float32)
        record_kernel("softmax", (out,), x)
        ctx.stands_for, ctx.dtype = (node, ("result",)), x.dtype
        ctx.save_for_backward(out)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """Return an empty tensor of the gradient's shape, in the dtype of the input."""
        record_kernel("softmax_backward", (grad,), *ctx.saved_tensors)
        return torch.empty_like(ctx.saved_tensors[0], dtype=ctx.dtype), None


class RMSNorm(Function):
    """Stands for CUDA's fused RMSNorm while a step is traced; it saves its input and one value (rstd) for each row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, num_dims: int) -> Tensor:
        """Return an empty tensor of the output's shape; the kernel normalizes the last `num_dims` dimensions."""
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        rstd = x.new_empty((*x.shape[: x.dim() - num_dims], *(1,) * num_dims), dtype=torch.float32)
        record_kernel("rms_norm", (out,), x)
        ctx.stands_for = ("FusedRmsNorm", ("input", "result1", "weight"))
        ctx.save_for_backward(x, rstd, *(() if weight is None else (weight,)))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return empty tensors of the shapes of the gradients of input and weight."""
        x, _, *weight = ctx.saved_tensors
        record_kernel("rms_norm_backward", (grad, x), x)
        return torch.empty_like(x), torch.empty_like(weight[0]) if weight else None, None


class Recurrent(Function):
    """Stands for the cuDNN call that computes a whole LSTM, GRU or RNN while a step is traced; dimension 0 is time."""

    @staticmethod
    def forward(ctx: Any, kind: str, sizes: tuple[int, int], x: Tensor, hx: Tensor, cx: Tensor | None, *weights: Tensor) -> Any:
        """Return empty tensors of the shapes of output, hy and cy.

        `kind` is "lstm", "gru", "rnn_tanh" or "rnn_relu", `sizes` is (number of layers, width of a gate), and `hx` and `cx` are the states.
        """
        num_layers, width = sizes
        length, num, _ = x.shape
        directions = 2 if hx.shape[0] == 2 * num_layers else 1
        out = x.new_empty(length, num, directions * hx.shape[-1])
        states = [torch.empty_like(hx), torch.empty_like(cx) if cx is not None else x.new_empty(0)]
        ctx.described = (kind, width, num_layers, directions)  # with the input, what the call can be repeated with
        record_kernel(kind, (out,), x, *ctx.described, flops=2 * length * num * sum(weight.numel() for weight in weights))
        num_values = length * num * directions * width * (num_layers * RNN_RESERVE[kind] - 1)
        reserve = x.new_empty(num_values * x.itemsize + 256, dtype=torch.uint8)
        ctx.has_cell, ctx.num_weights = cx is not None, len(weights)
        cells = (("cx", cx),) if cx is not None else ()
        named = (*cells, ("hx", hx), ("input", x), ("result0", out), ("result3", reserve))
        ctx.stands_for = ("CudnnRnn", tuple(name for name, _ in named) + tuple(f"weight{i + 1}" for i in range(ctx.num_weights)))
        ctx.save_for_backward(*(tensor for _, tensor in named), *weights)
        ctx.mark_non_differentiable(*(states[1:] if cx is None else ()))
        return out, *states

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        """Return empty tensors of the shapes of the gradients of input, states and weights.

        The gradients of the weights are views of one tensor.
        """
        saved = ctx.saved_tensors
        weights = saved[len(saved) - ctx.num_weights :]
        cx, hx, x = saved[:3] if ctx.has_cell else (None, *saved[:2])
        flat = x.new_empty(sum(w.numel() for w in weights), dtype=weights[0].dtype)
        record_kernel(RNN_BACKWARD, (flat,), x, *ctx.described, flops=4 * x.shape[0] * x.shape[1] * flat.numel())
        parts = flat.split([w.numel() for w in weights])
        state_grads = torch.empty_like(hx), torch.empty_like(cx) if cx is not None else None
        return None, None, torch.empty_like(x), *state_grads, *(p.view(w.shape) for p, w in zip(parts, weights, strict=True))


def attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, causal: bool, grouped: bool) -> Tensor | None:
    """Return an empty tensor like the output of CUDA's fused attention; None if CUDA would use no fused kernel.

    `grouped` says whether keys and values have fewer heads than queries.
    """
    kernel = attention_kernel(query, key, value, mask, causal=causal, grouped=grouped)
    if kernel is Flash:
        return Flash.apply(query, key, value, causal)
    if kernel is Efficient:
        return Efficient.apply(query, key, value, None if mask is None else bias_of_mask(mask, query, key), causal)
    return None


def attention_kernel(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, causal: bool, grouped: bool
) -> type[Flash] | type[Efficient] | None:
    """Return the stand-in of the fused attention kernel that CUDA would select; None if it would select none.

    `grouped` says whether keys and values have fewer heads than queries.
    """
    if query.dim() != 4 or any(t.numel() == 0 for t in (query, key, value)):
        return None
    if any(t.stride(-1) != 1 for t in (query, key, value, mask) if t is not None):  # images as (num, channels, pixels), transposed
        return None
    width, is_half = query.shape[-1], query.itemsize == 2
    is_supported_mask = not causal or query.shape[2] == key.shape[2]
    if is_half and mask is None and width <= FLASH_HEAD and width == value.shape[-1] and is_supported_mask:
        return Flash
    align = EFFICIENT_ALIGN.get(query.itemsize)
    is_aligned = align is not None and width % align == 0 and value.shape[-1] % align == 0
    return Efficient if is_aligned and not grouped else None


def bias_of_mask(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """Return the attention mask in the form in which CUDA's kernel takes it: floats, padded, expanded to all heads."""
    if mask.dtype is torch.bool:
        mask = torch.empty_like(mask, dtype=query.dtype)
    length = key.shape[2]
    if mask.shape[-1] == length and length % BIAS_ALIGN:
        mask = torch.nn.functional.pad(mask, (0, round_up(length, BIAS_ALIGN) - length))[..., :length]
    return mask.expand(query.shape[0], query.shape[1], query.shape[2], length)


def recurrent(kind: str, x: Tensor, states: tuple[Tensor, ...], weights: list[Tensor], num_layers: int, batch_first: bool) -> Any:
    """Return empty tensors of the shapes of an RNN's outputs, allocated as cuDNN allocates them.

    `kind` is as for `Recurrent`. With `batch_first` the input is copied, since cuDNN needs time as dimension 0.
    """
    time_first = x.transpose(0, 1).contiguous() if batch_first else x
    width = weights[0].shape[0] // RNN_GATES[kind]
    hx, cx = states[0], states[1] if len(states) > 1 else None
    out, *new_states = Recurrent.apply(kind, (num_layers, width), time_first, hx, cx, *weights)
    return (out.transpose(0, 1) if batch_first else out, *new_states[: len(states)])


@contextmanager
def trl_kernels() -> Generator[None]:
    """Return a context in which the loss of the TRL library allocates on fake tensors what it allocates on CUDA.

    On CUDA it skips tokens without a label; a trace has no values, so here it computes all of them.
    """
    module = sys.modules.get(TRL_LOSS)
    function: Any = getattr(module, "ChunkedLogProbFunction", None)
    if function is None or not all(hasattr(module, name) for name in TRL_KERNELS):
        yield
        return
    forward, before = function.forward, {name: getattr(module, name) for name in TRL_KERNELS}

    def in_autocast(ctx: Any, *args: Any) -> Any:
        states = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
        _set_cpu_autocast(torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda"))
        try:
            return forward(ctx, *args)
        finally:
            _set_cpu_autocast(*states)

    function.forward = staticmethod(in_autocast)
    vars(module).update(dict.fromkeys(TRL_KERNELS, lambda changed, *args, **named: changed.add_(0)))
    try:
        yield
    finally:
        function.forward = staticmethod(forward)
        vars(module).update(before)


def _set_cpu_autocast(is_enabled: bool, dtype: torch.dtype) -> None:
    torch.set_autocast_enabled("cpu", is_enabled)
    torch.set_autocast_dtype("cpu", dtype)


def onednn_workspace(args: Any, outputs: Any) -> Any:
    """Return `outputs` of an LSTM on the CPU (aten::mkldnn_rnn_layer) with a workspace of oneDNN's size among them.

    The workspace for T positions of a sequence has 2 T gates, T outputs and 3 (T + 1) pairs of states; it is within 2 % of oneDNN 3.
    """
    x, width, is_training = args[0], args[10], args[15]
    num_positions, num_states = x.shape[0] * x.shape[1], (x.shape[0] + 1) * x.shape[1]
    num_values = num_positions * (2 * _row(4 * width) + _row(width)) + 6 * num_states * _row(width)
    saved = x.new_empty(4 * num_values + 4096 * ONEDNN_PAGES if is_training else 0, dtype=torch.uint8)
    return (*outputs[:3], saved)


def _row(width: int) -> int:
    """Return how many floats oneDNN's LSTM workspace has for a row of `width` values."""
    rounded = round_up(width, ONEDNN_ALIGN)
    return rounded + ONEDNN_ALIGN if rounded % ONEDNN_AVOIDED == 0 else rounded


# operation -> function of (arguments, fake outputs) that returns outputs of the real sizes
UNKNOWN_SIZES = {torch.ops.aten.mkldnn_rnn_layer.default: onednn_workspace}


# --- Workspaces of CUDA operations ---


def sum_workspace(num_inputs: int, num_outputs: int, dtype: torch.dtype = torch.float32) -> int:
    """Return the bytes that CUDA allocates for partial sums if each of `num_outputs` values sums `num_inputs`."""
    while num_inputs > 1 and num_inputs * num_outputs * dtype.itemsize > MAX_REDUCED_BYTES:
        num_inputs = -(-num_inputs // 2)
    sum_bytes = 4 if dtype.is_floating_point and dtype.itemsize <= 4 else 8
    vector = next(width for width in (4, 2, 1) if num_outputs % width == 0)
    most = BLOCK // vector
    across = min(_power_of_two(num_outputs // vector), most)
    height = min(_power_of_two(num_inputs), most // min(across, WARP))
    width = min(across, most // height)
    if num_inputs < min(height * MIN_PER_THREAD, MAX_PER_THREAD):
        return 0
    values, grid = -(-num_inputs // height), -(-num_outputs // (vector * width))
    target = PROCESSORS * (THREADS // (width * height))
    if values < MAX_PER_THREAD or grid > target:
        return 0
    blocks = max(min(-(-target // grid), -(-values // MIN_PER_THREAD)), -(-values // MAX_PER_THREAD))
    return sum_bytes * num_outputs * blocks * width * vector if blocks > 1 else 0


def _power_of_two(number: int) -> int:
    """Return the largest power of two that is not above `number`."""
    return 1 << (number.bit_length() - 1)


def _sum_op_workspace(args: Any, _: Any) -> int:
    """Return the bytes of workspace that CUDA needs for a call of aten::sum; 0 unless it sums leading dimensions."""
    x, dims = args[0], args[1]
    if not isinstance(x, Tensor) or not dims or not x.dim() or not x.numel() or not x.is_contiguous():
        return 0
    num = len(dims)
    is_leading = num < x.dim() and sorted(dim % x.dim() for dim in dims) == list(range(num))
    return sum_workspace(prod(x.shape[:num]), prod(x.shape[num:]), x.dtype) if is_leading else 0


def transposed_bytes(*operands: Tensor) -> int:
    """Return the bytes of the channels_last copies that a convolution on CUDA makes of `operands`.

    If one operand or the weight is channels_last, torch copies the others; if none is, cuDNN copies all, since its kernels for tensor cores
    read and write channels_last, with channels in multiples of 16 bytes.
    """
    images = [t.unsqueeze(2) if t.dim() == 3 else t for t in operands]
    copied = [t for t in images if t.dim() == 4 and t.numel() and not t.is_contiguous(memory_format=torch.channels_last)]
    return sum(t.numel() // t.shape[1] * round_up(t.shape[1] * t.itemsize, CHANNEL_BYTES) for t in copied)


def _is_depthwise(weight: Tensor, groups: int) -> bool:
    return groups > 1 and weight.shape[1] == 1


def _convolution_workspace(args: Any, out: Tensor) -> int:
    return 0 if _is_depthwise(args[1], args[8]) else transposed_bytes(args[0], out)


def _convolution_backward_workspace(args: Any, _: Any) -> int:
    """Return the bytes of the copies of input and output's gradient that a convolution's backward makes.

    Copies for the gradient of the input do not count, since the gradients are computed one after the other.
    """
    return 0 if _is_depthwise(args[2], args[9]) else transposed_bytes(args[0], args[1])


# operation -> bytes of its workspace, from its arguments and results
CUDA_WORKSPACES: Mapping[Any, Callable[[Any, Any], int]] = {
    torch.ops.aten.sum.dim_IntList: _sum_op_workspace,
    torch.ops.aten.convolution.default: _convolution_workspace,
    torch.ops.aten.convolution_backward.default: _convolution_backward_workspace,
}
