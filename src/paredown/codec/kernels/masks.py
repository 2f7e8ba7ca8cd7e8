"""One exact bit a value. One program covers a tile of TILE values, eight of which make a byte, the first one lowest:

x      [ x0 x1 x2 x3 x4 x5 x6 x7 | x8 ... ]      bit = not (x <= low or x >= high)
bits   [ b7b6b5b4b3b2b1b0        | ...    ]
"""

from __future__ import annotations

import triton
import triton.language as tl

from paredown.codec.kernels.pack import load_values, store_values


@triton.jit
def pack_mask_kernel(x_ptr, out_ptr, numel, low, high, MASKED: tl.constexpr, TILE: tl.constexpr):
    """Values to bits, as drawn above."""
    start = tl.program_id(0).to(tl.int64) * TILE
    offsets = tl.arange(0, TILE)
    inside = offsets < numel - start
    x = load_values(x_ptr + start, offsets, inside, MASKED)
    bits = 1 - ((x <= low) | (x >= high)).to(tl.int32)
    if MASKED:
        bits = tl.where(inside, bits, 0)
    bits = bits.reshape(TILE // 8, 8) << tl.arange(0, 8)[None, :]
    at = tl.arange(0, TILE // 8)
    packed = tl.sum(bits, 1).to(tl.uint8)
    if MASKED:
        tl.store(out_ptr + start // 8 + at, packed, mask=at * 8 < numel - start)
    else:
        tl.store(out_ptr + start // 8 + at, packed)


@triton.jit
def unpack_mask_kernel(bits_ptr, out_ptr, numel, inside_value, outside_value, MASKED: tl.constexpr, TILE: tl.constexpr):
    """Bits to two values."""
    start = tl.program_id(0).to(tl.int64) * TILE
    at = tl.arange(0, TILE // 8)
    if MASKED:
        packed = tl.load(bits_ptr + start // 8 + at, mask=at * 8 < numel - start, other=0).to(tl.int32)
    else:
        packed = tl.load(bits_ptr + start // 8 + at).to(tl.int32)
    bits = (packed[:, None] >> tl.arange(0, 8)[None, :]) & 1
    values = tl.where(bits.reshape(TILE) != 0, inside_value, outside_value)
    store_values(out_ptr + start, values, tl.arange(0, TILE) < numel - start, MASKED)
