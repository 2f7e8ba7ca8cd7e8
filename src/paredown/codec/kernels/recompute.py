"""Codes to values to what follows from them: decode, a norm, an activation, one pass over memory. `codec/recompute.py` has the formulas.

codes   [ c0 c1 c2 c3 c4 c5 c6 c7 ]      one program decodes a tile of TILE values,
norm    [ n0 n1 n2 n3 n0 n1 n2 n3 ]      normalises each by its channel (here 4 of them, next to each other),
bits    [ b7..b0                  ]      and keeps what a ReLU kept
"""

from __future__ import annotations

import triton
import triton.language as tl

from paredown.codec.kernels.pack import NONE, decode_blocks, load_codes, load_shared, store_values

NO_NORM = tl.constexpr(0)
CHANNELS = tl.constexpr(1)
ROWS = tl.constexpr(2)
IDENTITY = tl.constexpr(0)
RELU = tl.constexpr(1)
GELU = tl.constexpr(2)
GELU_TANH = tl.constexpr(3)
SILU = tl.constexpr(4)


@triton.jit
def tanh(x):
    """By exp, which does not overflow here."""
    t = tl.exp(-2.0 * tl.abs(x))
    y = (1.0 - t) / (1.0 + t)
    return tl.where(x < 0.0, -y, y)


@triton.jit
def erf(x):
    """Abramowitz and Stegun 7.1.26: within 1.5e-7, and half the instructions of the library's."""
    a = tl.abs(x)
    t = 1.0 / (1.0 + 0.3275911 * a)
    tail = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))))
    y = 1.0 - tail * tl.exp(-a * a)
    return tl.where(x < 0.0, -y, y)


@triton.jit
def activated(x, ACTIVATION: tl.constexpr):
    """GELU, its approximation by tanh, or SiLU."""
    if ACTIVATION == GELU:
        return 0.5 * x * (1.0 + erf(x * 0.7071067811865476))
    elif ACTIVATION == GELU_TANH:
        return 0.5 * x * (1.0 + tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))
    elif ACTIVATION == SILU:
        return x / (1.0 + tl.exp(-x))
    else:
        return x


@triton.jit
def channel_of(start, CHANNEL_COUNT: tl.constexpr, INNER: tl.constexpr, TILE: tl.constexpr):
    """The channel of each value of a tile; next to each other where the tile and the channels allow it."""
    if INNER == 1 and TILE % CHANNEL_COUNT == 0:
        return tl.arange(0, TILE) % CHANNEL_COUNT
    elif INNER == 1 and CHANNEL_COUNT % TILE == 0:
        return (start % CHANNEL_COUNT).to(tl.int32) + tl.arange(0, TILE)
    else:
        place = (start % (CHANNEL_COUNT * INNER)).to(tl.int32) + tl.arange(0, TILE)
        return (place // INNER) % CHANNEL_COUNT


@triton.jit
def normed(
    x, start, weight_ptr, bias_ptr, mean_ptr, deviation_ptr, inside, NORM: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr,
    CHANNEL_COUNT: tl.constexpr, INNER: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """x normalised by its channel's or its row's statistics, then scaled and shifted by its channel's."""
    channel = channel_of(start, CHANNEL_COUNT, INNER, TILE)
    if NORM == CHANNELS:
        x = (x - tl.load(mean_ptr + channel)) * tl.load(deviation_ptr + channel)
    else:
        if CHANNEL_COUNT % TILE == 0:
            row = start // CHANNEL_COUNT
            x = (x - tl.load(mean_ptr + row)) * tl.load(deviation_ptr + row)
        else:
            rows = start // CHANNEL_COUNT + ((start % CHANNEL_COUNT).to(tl.int32) + tl.arange(0, TILE)) // CHANNEL_COUNT
            x = (x - tl.load(mean_ptr + rows, mask=inside, other=0.0)) * tl.load(deviation_ptr + rows, mask=inside, other=0.0)
    if HAS_WEIGHT:
        x = x * tl.load(weight_ptr + channel)
    if HAS_BIAS:
        x = x + tl.load(bias_ptr + channel)
    return x


@triton.jit
def recompute_kernel(
    codes_ptr, out_ptr, scales_ptr, minimums_ptr, weight_ptr, bias_ptr, mean_ptr, deviation_ptr, bits_ptr, first_tile, numel, num_bytes,
    num_blocks, ELEMENT: tl.constexpr, BLOCK_LEN: tl.constexpr, SCALE: tl.constexpr, MINIMUM: tl.constexpr, NORM: tl.constexpr,
    HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr, CHANNEL_COUNT: tl.constexpr, INNER: tl.constexpr, ACTIVATION: tl.constexpr,
    MASKED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """A tile of one long row, as drawn above."""
    tile = tl.program_id(0).to(tl.int64) + first_tile
    start = tile * TILE
    inside = tl.arange(0, TILE) < numel - start
    BLOCKS: tl.constexpr = TILE // BLOCK_LEN
    at = tile * BLOCKS + tl.arange(0, BLOCKS)
    code_start = tile * (TILE * ELEMENT[1] // 8)
    codes = load_codes(codes_ptr + code_start, num_bytes - code_start, ELEMENT[1], TILE, MASKED).reshape(BLOCKS, BLOCK_LEN)
    scale = load_shared(scales_ptr, at, at < num_blocks, SCALE)
    minimum = load_shared(minimums_ptr, at, at < num_blocks, MINIMUM) if MINIMUM != NONE else scale
    x = decode_blocks(codes, scale, minimum, 1.0, codes_ptr, ELEMENT, SCALE, MINIMUM, False).reshape(TILE)
    if NORM != NO_NORM:
        x = normed(
            x, start, weight_ptr, bias_ptr, mean_ptr, deviation_ptr, inside, NORM, HAS_WEIGHT, HAS_BIAS, CHANNEL_COUNT, INNER, TILE
        )
    if ACTIVATION == RELU:
        bytes_at = tl.arange(0, TILE // 8)
        packed = tl.load(bits_ptr + start // 8 + bytes_at, mask=bytes_at * 8 < numel - start, other=0).to(tl.int32)
        kept = ((packed[:, None] >> tl.arange(0, 8)[None, :]) & 1).reshape(TILE)
        x = tl.where(kept != 0, x, 0.0)
    else:
        x = activated(x, ACTIVATION)
    store_values(out_ptr + start, x, inside, MASKED)
