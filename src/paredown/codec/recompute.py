"""`recompute` returns the output of a norm and an activation function on packed input; `pack_mask` packs ReLU's mask.

    y = f((x - mean[s]) * rstd[s] * weight[c] + bias[c])      with a norm; c = (i // inner) % channels, the channel of value i
                                                              s = c, or s = i // channels for norms over rows (LayerNorm)
    y = f(x)                                                  without one

in float32, with f the identity, GELU, SiLU, or ReLU with a stored mask. On a GPU decoding and recomputation are one kernel.

A mask has one exact bit per value, whether x lies between two bounds, eight bits to a byte, the first value lowest:

    bit = not (x <= low or x >= high)      ReLU: low = 0, high = NaN (no bound);  ReLU6: 0 and 6;  booleans: 0 and NaN

NaN counts as inside, as in torch's backward of ReLU.

>>> x = torch.tensor([-1.0, 0.0, 2.0, 7.0, 3.0])
>>> mask = pack_mask(x, 0.0, 6.0)
>>> mask
tensor([20], dtype=torch.uint8)
>>> unpack_mask(mask, torch.empty(5), inside=1.0, outside=0.0)
tensor([0., 0., 1., 0., 1.])
"""

from __future__ import annotations

from dataclasses import dataclass
from math import nan
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._pytree import tree_map_only

from paredown.codec import backend, cpu
from paredown.codec.packed import PackedTensor

NO_BOUND = nan
Layout = tuple[tuple[int, ...], tuple[int, ...]]  # sizes and strides
DETACH, THRESHOLD_BACKWARD = torch.ops.aten.detach.default, torch.ops.aten.threshold_backward.default
PIECE = 1 << 16  # values at a time: 1 MiB of scratch memory, most of it indices


def pack_mask(x: Tensor, low: float, high: float) -> Tensor:
    """Return one bit for each value of dense `x`, 1 where low < x < high, packed in ceil(numel / 8) bytes in memory order."""
    kernels = backend.find_kernels() if x.is_cuda else None
    if kernels is not None:
        return kernels.pack_mask(x, low, high, empty_mask(x))
    out = empty_mask(x)
    if cpu.pack_mask(x, low, high, out):
        return out
    weights = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8, device=x.device)
    with cpu.one_thread(x):
        for start in range(0, x.numel(), PIECE):
            piece = x[start : start + PIECE]
            bits = (piece if piece.dtype is torch.bool else ~((piece <= low) | (piece >= high))).to(torch.uint8)
            bits = torch.nn.functional.pad(bits, (0, -bits.numel() % 8)).view(-1, 8)
            out[start // 8 : start // 8 + len(bits)] = (bits * weights).sum(1, dtype=torch.uint8)
    return out


def empty_mask(x: Tensor) -> Tensor:
    """Return uninitialized memory, ceil(numel / 8) bytes, for the bit mask of `x`."""
    kernels, num_bytes = backend.find_kernels() if x.is_cuda else None, -(-x.numel() // 8)
    if kernels is None:
        return torch.empty(num_bytes, dtype=torch.uint8, device=x.device)
    return kernels.empty_strided((num_bytes,), (1,), torch.uint8, x)


def unpack_mask(bits: Tensor, out: Tensor, *, inside: float, outside: float) -> Tensor:
    """Write one number for each bit of a mask into flat, contiguous `out`: `inside` for 1, `outside` for 0; return `out`."""
    kernels = backend.find_kernels() if out.is_cuda else None
    if kernels is not None:
        return kernels.unpack_mask(bits, out, inside, outside)
    if cpu.select(bits, torch.tensor([inside], dtype=out.dtype), torch.tensor([outside], dtype=out.dtype), out):
        return out
    shifts = torch.arange(8, dtype=torch.uint8, device=out.device)
    values = torch.tensor([outside, inside], dtype=out.dtype, device=out.device)
    with cpu.one_thread(out):
        for start in range(0, out.numel(), PIECE):
            piece = out[start : start + PIECE]
            codes = (bits[start // 8 : (start + PIECE) // 8, None] >> shifts) & 1
            piece.copy_(values[codes.view(-1)[: piece.numel()].int()])
    return out


def apply_mask(grad: Tensor, bits: Tensor) -> Tensor:
    """Return a new tensor with `grad` where the mask's bit is 1 and 0 elsewhere; `bits` must be in its memory order."""
    kernels = backend.find_kernels() if grad.is_cuda else None
    if kernels is not None:
        return kernels.apply_mask(grad, bits, kernels.empty_strided(grad.size(), grad.stride(), grad.dtype, grad))
    out, flat = torch.empty_like(grad), ((grad.numel(),), (1,))
    if cpu.select(bits, grad.as_strided(*flat), grad.new_zeros(1), out.as_strided(*flat)):
        return out
    is_kept = unpack_mask(bits, torch.empty(grad.numel(), dtype=torch.uint8, device=grad.device), inside=1.0, outside=0.0)
    torch.where(is_kept.bool(), grad.as_strided(*flat), grad.new_zeros(()), out=out.as_strided(*flat))
    return out


class ReluOutput(Tensor):
    """A tensor subclass for the output of a ReLU of which only the mask is stored, one bit per value.

    In bf16, torch's backward of a ReLU would read 2 bytes of an unpacked mask for each value, which unpacking has to write; the bits
    take an eighth of a byte.
    """

    _bits: Tensor

    def __new__(cls, bits: Tensor, size: torch.Size, stride: tuple[int, ...], dtype: torch.dtype) -> ReluOutput:
        """Return a tensor of this size and these strides, without memory except for its mask `bits`."""
        made = Tensor._make_wrapper_subclass(cls, size, strides=stride, dtype=dtype, device=bits.device)  # type: ignore[attr-defined]
        made._bits = bits
        return made  # type: ignore[no-any-return]

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func is DETACH:
            return args[0]  # autograd detaches what a hook returned; nothing else refers to it
        if func is THRESHOLD_BACKWARD and type(args[1]) is cls and args[2] == 0:
            grad, output = args[0], args[1]
            if type(grad) is Tensor and grad.stride() == output.stride() and grad.size() == output.size():
                return apply_mask(grad, output._bits)
        args, kwargs = tree_map_only(cls, lambda output: output._unpacked(), (args, kwargs or {}))
        return func(*args, **kwargs)

    def _unpacked(self) -> Tensor:
        flat = torch.empty(self.numel(), dtype=self.dtype, device=self._bits.device)
        return unpack_mask(self._bits, flat, inside=1.0, outside=0.0).as_strided(self.size(), self.stride())


# --- recompute --------------------------------------------------------------------------------------------------------


class Norm:
    """The statistics and parameters of a normalization layer as flat float32 tensors.

    `rstd` is 1 / standard deviation. Parameters are not copied: once one is modified in place, recomputing is wrong, and `check` raises.
    """

    __slots__ = ("bias", "by_row", "channels", "inner", "mean", "rstd", "versions", "weight")

    def __init__(
        self,
        channels: int,
        inner: int,
        weight: Tensor | None,
        bias: Tensor | None,
        mean: Tensor,
        rstd: Tensor,
        *,
        by_row: bool = False,
    ) -> None:
        self.channels, self.inner, self.by_row = channels, inner, by_row  # inner: consecutive values of one channel
        self.weight, self.bias, self.mean, self.rstd = weight, bias, mean, rstd
        self.versions = self._versions()

    @property
    def shape(self) -> tuple[int, int, bool, bool, bool]:
        """What kernels must know of the norm: channels, values per channel, if it is by row, if it has a weight, and a bias."""
        return self.channels, self.inner, self.by_row, self.weight is not None, self.bias is not None

    def _versions(self) -> tuple[int, int]:
        weight, bias = self.weight, self.bias
        return 0 if weight is None else weight._version, 0 if bias is None else bias._version

    def check(self) -> None:
        """Raise RuntimeError if the weight or bias was modified in place since the norm ran."""
        if self._versions() != self.versions:
            raise RuntimeError(
                f"the weight or bias of a norm over {self.channels} values was modified in place between forward and backward, but "
                "backward recomputes the output of the norm from it. Step the optimizer after backward, or give the norm's input no format."
            )


@dataclass(eq=False, slots=True)
class DecodeSteps:
    """The operations to apply to decoded values: a norm, then an activation function, for ReLU by its mask `bits`.

    `activation` is the name of the function: "" (none), "gelu", "gelu_tanh", "silu" or "relu".
    """

    norm: Norm | None = None
    activation: str = ""
    bits: Tensor | None = None


def recompute(packed: PackedTensor | Tensor, steps: DecodeSteps, dtype: torch.dtype, layout: Layout | None = None) -> Tensor:
    """Return the output of `steps` (a norm, an activation function) on a flat packed or ordinary tensor, in `dtype`.

    `layout`: the sizes and strides of the result.
    """
    if steps.norm is not None:
        steps.norm.check()
    size, stride = layout if layout is not None else ((packed.shape.numel(),), (1,))
    is_packed = isinstance(packed, PackedTensor)
    kernels = backend.find_kernels() if is_packed and packed.codes.is_cuda else None
    if kernels is not None and is_packed and kernels.covers_recompute(packed.format):
        return kernels.recompute(packed, steps, kernels.empty_strided(size, stride, dtype, packed.codes))
    values = packed.decode(torch.float32) if is_packed else packed.to(torch.float32, copy=True)
    if steps.norm is not None:
        _norm_(values, steps.norm)
    values = _activation(values, steps).to(dtype)
    return values if layout is None else values.as_strided(size, stride)


def _norm_(x: Tensor, norm: Norm) -> None:
    """Normalize `x` in place, because a second tensor of its size would add to the peak memory of a step."""
    rows = x.view(-1, norm.channels, norm.inner)
    shape = (-1, 1, 1) if norm.by_row else (1, -1, 1)
    rows.sub_(norm.mean.view(shape)).mul_(norm.rstd.view(shape))
    if norm.weight is not None:
        rows.mul_(norm.weight.view(1, -1, 1))
    if norm.bias is not None:
        rows.add_(norm.bias.view(1, -1, 1))


def _activation(x: Tensor, steps: DecodeSteps) -> Tensor:
    if steps.activation == "relu":
        assert steps.bits is not None
        return unpack_mask(steps.bits, torch.empty_like(x), inside=1.0, outside=0.0).mul_(x)
    if steps.activation == "silu":
        return functional.silu(x)
    if steps.activation in ("gelu", "gelu_tanh"):
        return functional.gelu(x, approximate="tanh" if steps.activation == "gelu_tanh" else "none")
    return x
