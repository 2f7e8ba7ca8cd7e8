"""These kernels pack and unpack masks of one bit per value, and zero gradients by packed masks.

A mask has one exact bit per value (`codec/recompute.py` has the definition). One program covers a tile of TILE values, eight of which make
a byte, the first one lowest:

    x      [ x0 x1 x2 x3 x4 x5 x6 x7 | x8 ... ]      bit = not (x <= low or x >= high)
    bits   [ b7b6b5b4b3b2b1b0        | ...    ]
    grad   [ g0 g1 g2 g3 g4 g5 g6 g7 | g8 ... ]      out = grad where the bit is 1, else 0
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from paredown.codec.kernels.launch import Direct, Launch
from paredown.codec.kernels.pack import load_tile, load_values, store_tile, store_values
from paredown.codec.kernels.rows import bf16_as_integers


@triton.jit
def pack_mask_kernel(x_ptr, out_ptr, numel, low, high, MASKED: tl.constexpr, TILE: tl.constexpr):
    """Store one bit for each of the TILE values of x that this program reads: 1 for values between `low` and `high`."""
    start = tl.program_id(0).to(tl.int64) * TILE
    at = tl.arange(0, TILE // 8)
    offsets = at[:, None] * 8 + tl.arange(0, 8)[None, :]
    inside = offsets < numel - start
    x = load_values(x_ptr + start, offsets, inside, MASKED)
    bits = 1 - ((x <= low) | (x >= high)).to(tl.int32)
    if MASKED:
        bits = tl.where(inside, bits, 0)
    packed = tl.sum(bits << tl.arange(0, 8)[None, :], 1).to(tl.uint8)
    store_tile(out_ptr + start // 8, at, packed, at * 8 < numel - start, MASKED)


@triton.jit
def load_bits(bits_ptr, start, numel, MASKED: tl.constexpr, TILE: tl.constexpr):
    """Return a mask's bits for the TILE values from index `start` on, as int32; 0 after the last of `numel` values."""
    at = tl.arange(0, TILE // 8)
    packed = load_tile(bits_ptr + start // 8, at, at * 8 < numel - start, MASKED).to(tl.int32)
    return ((packed[:, None] >> tl.arange(0, 8)[None, :]) & 1).reshape(TILE)


@triton.jit
def unpack_mask_kernel(bits_ptr, out_ptr, numel, inside_value, outside_value, MASKED: tl.constexpr, TILE: tl.constexpr):
    """Store, for each bit of a tile of a mask, `inside_value` if it is 1 and `outside_value` if it is 0."""
    start = tl.program_id(0).to(tl.int64) * TILE
    values = tl.where(load_bits(bits_ptr, start, numel, MASKED, TILE) != 0, inside_value, outside_value)
    store_values(out_ptr + start, values, tl.arange(0, TILE) < numel - start, MASKED)


@triton.jit
def apply_mask_kernel(grad_ptr, out_ptr, bits_ptr, numel, MASKED: tl.constexpr, TILE: tl.constexpr):
    """Store each gradient of a tile where the mask's bit is 1, and zero where it is 0: the backward pass of ReLU."""
    start = tl.program_id(0).to(tl.int64) * TILE
    offsets = tl.arange(0, TILE)
    inside = offsets < numel - start
    grad = load_tile(grad_ptr + start, offsets, inside, MASKED)
    bits = load_bits(bits_ptr, start, numel, MASKED, TILE)
    store_tile(out_ptr + start, offsets, tl.where(bits != 0, grad, tl.zeros_like(grad)), inside, MASKED)


def pack_mask(x: Tensor, low: float, high: float, out: Tensor) -> Tensor:
    """Write one bit per value of dense `x`, in memory order, into `out`, and return it: 1 where low < x < high."""
    return _launch("pack_mask_kernel", (float(low), float(high)), x.numel(), x, out)


def unpack_mask(bits: Tensor, out: Tensor, inside: float, outside: float) -> Tensor:
    """Write into flat `out` one number for each bit of the mask `bits`: `inside` for 1, `outside` for 0; return `out`."""
    return _launch("unpack_mask_kernel", (float(inside), float(outside)), out.numel(), bits, out)


def apply_mask(grad: Tensor, bits: Tensor, out: Tensor) -> Tensor:
    """Write `grad` where the mask's bit is 1, else 0, into `out`, of the same memory order, and return `out`."""
    return _launch("apply_mask_kernel", (), grad.numel(), grad, out, bits)


def _launch(name: str, values: tuple[float, ...], numel: int, source: Tensor, out: Tensor, bits: Tensor | None = None) -> Tensor:
    if not numel:
        return out
    direct = _mask_launch(name, numel, values)
    index, source_at, target_at = source.get_device(), source.data_ptr(), out.data_ptr()
    addresses = (source_at, target_at) if bits is None else (source_at, target_at, bits.data_ptr())
    key = (index, source.dtype, out.dtype)
    if not direct.run(key, source_at | target_at | addresses[-1], addresses):
        first = _as_numbers(source, stores=bits is not None)
        direct.launch(key, (first, _as_numbers(out, stores=True), *(() if bits is None else (bits,))))
    return out


def _as_numbers(x: Tensor, *, stores: bool = False) -> Tensor:
    """Return `x` in a dtype that mask kernels handle: bool as uint8, and bf16 as int16 unless the kernel `stores` values."""
    if x.dtype is torch.bool:
        return x.view(torch.uint8)
    return x if stores else bf16_as_integers(x)


# On one H200, 2^27.6 values of bf16 (docs/log.md, 2026-11-17): pack 3.54 TB/s, unpack 3.2, apply 3.8 of 3.94 for a copy.
MASK_KERNELS = {
    "pack_mask_kernel": (pack_mask_kernel, 4096, 4),
    "unpack_mask_kernel": (unpack_mask_kernel, 2048, 4),
    "apply_mask_kernel": (apply_mask_kernel, 1024, 2),
}


@lru_cache(maxsize=1024)
def _mask_launch(name: str, numel: int, values: tuple[float, ...]) -> Direct:
    kernel, tile, num_warps = MASK_KERNELS[name]
    constants = {"MASKED": numel % tile != 0, "TILE": tile, "num_warps": num_warps}
    return Direct([Launch(kernel, triton.cdiv(numel, tile), (numel,), constants)], values)
