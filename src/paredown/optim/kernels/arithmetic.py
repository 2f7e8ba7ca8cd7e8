"""Device functions update numbers by the rules of `rules.py`, and load and store the values of a tile.

A root and a reciprocal are approximated by the special function unit and corrected by one step of Newton's method whose residual is exact,
which rounds correctly within the checked range; the root and the division of the compiler also branch for values outside of it.

Tiles: offsets and masks, loads and stores, scales, random bits.

A tile is NB blocks of BLOCK values that follow each other, counted along the rows. Where rows end with a block they have no gaps, and a
whole tile is one RUN of memory. Otherwise addresses are computed from the row, and values past the end of a row or the tensor are masked:
EVEN if rows have a multiple of 16 values, which are then read together, RAGGED if not. In a RUN and in EVEN tiles the index of a block's
first value in the whole tensor is a multiple of 4.

    row 0   [ b0        | b1        | b2  ]        block b: row b // blocks_per_row, first column (b % blocks_per_row) * BLOCK
    row 1   [ b3        | b4        | b5  ]        scales are (rows, blocks_per_row): that of block b is at b

TILE is the compile-time tuple (RUN, EVEN or RAGGED; NB; BLOCK), and `at` is (number of the tile, cols, blocks_per_row, number of blocks).
"""

from __future__ import annotations

import triton
import triton.language as tl

from paredown.codec.kernels.numbers import BF16, E8M0, HIGH_INDEX, INDEX_STEP, MULTIPLIER_2, as_bits, as_float, random_bits
from paredown.codec.kernels.pack import INTERPRETED

SGD = tl.constexpr(0)
SGDM = tl.constexpr(1)
NESTEROV = tl.constexpr(2)
ADAMW = tl.constexpr(3)
LION = tl.constexpr(4)

SMALLEST_SQUARE = tl.constexpr(2.0**-100)
HALF_BITS = tl.constexpr(127 << 22)
USES_PTX = tl.constexpr(not INTERPRETED.value)


@triton.jit
def fused(a, b, c):
    """Return a * b + c, rounded once; Triton's interpreter has no such operation, so its result is computed in float64."""
    if USES_PTX:
        return tl.fma(a, b, c)
    else:
        product = tl.where(b == b, a, a).to(tl.float64) * b.to(tl.float64)  # a and c may be numbers
        c = tl.where(b == b, c, c).to(tl.float64)
        total = product + c
        back = total - product
        rest = (product - (total - back)) + (c - back)
        bits = total.to(tl.int64, bitcast=True)
        outward = tl.where((rest > 0) == (total > 0), 1, -1)
        missing = (rest != 0) & ((bits & 1) == 0) & (tl.abs(total) < float("inf"))
        return tl.where(missing, bits + outward, bits).to(tl.float64, bitcast=True).to(tl.float32)


@triton.jit
def root(x):
    """Return the correctly rounded square root of x >= 2^-100; the result is not finite for inf and NaN."""
    if USES_PTX:
        return tl.inline_asm_elementwise(
            """{ .reg .f32 y, h, s, e; rsqrt.approx.ftz.f32 y, $1; mul.rn.f32 s, $1, y; mul.rn.f32 h, y, 0f3F000000;
            neg.f32 e, s; fma.rn.f32 e, e, s, $1; fma.rn.f32 $0, e, h, s; }""",
            "=f,f", [x], tl.float32, True, 1,
        )  # fmt: skip
    else:
        return tl.sqrt_rn(x)


@triton.jit
def reciprocal(x):
    """Return the correctly rounded 1 / x for 2^-125 <= x <= 2^125; outside of that range the result is not finite."""
    if USES_PTX:
        return tl.inline_asm_elementwise(
            """{ .reg .f32 y, e; rcp.approx.ftz.f32 y, $1; neg.f32 e, $1; fma.rn.f32 e, e, y, 0f3F800000; fma.rn.f32 $0, y, e, y; }""",
            "=f,f", [x], tl.float32, True, 1,
        )  # fmt: skip
    else:
        return tl.div_rn(tl.zeros_like(x) + 1.0, x)


@triton.jit
def companded(r):
    """Return about the square root of r > 0, the root of a second moment, so that it can be stored in 4 bits."""
    return as_float((as_bits(r) >> 1) + HALF_BITS)


@triton.jit
def expanded(y):
    """Return the root of a second moment, given the number `y` that `companded` returned for it."""
    return as_float(tl.maximum(as_bits(y) - HALF_BITS, 0) << 1)


@triton.jit
def momentum_step(p, g, m, h):
    """Return (d, m'): d is gradient `g` plus weight decay, m' SGD's new momentum; `h` has the hyperparameters."""
    d = fused(h[4], p, g)
    return d, fused(h[2], m, h[3] * d)


@triton.jit
def apply_rule(p, g, m, v, h, RULE: tl.constexpr):
    """Return (p', m', v', root(v')): parameter, moments and the second one's root after an update by the rule number RULE.

    Moments that the rule does not have stay unchanged. `h` has the rule's hyperparameters except the factor of the gradient.
    """
    r = v
    if RULE == SGD:
        p = fused(-h[0], fused(h[4], p, g), p)
    elif RULE == SGDM:
        _, m = momentum_step(p, g, m, h)
        p = fused(-h[0], m, p)
    elif RULE == NESTEROV:
        d, m = momentum_step(p, g, m, h)
        p = fused(-h[0], fused(h[1], m, d), p)
    elif RULE == ADAMW:
        m = fused(h[1], m, h[2] * g)
        v = fused(h[3], v, fused(h[4] * g, g, SMALLEST_SQUARE))
        r = root(v)
        p = fused(-h[5] * m, reciprocal(fused(h[6], r, h[7])), p * h[0])
    else:
        c = fused(h[1], m, h[2] * g)
        sign = tl.where(c > 0, 1.0, tl.where(c < 0, -1.0, 0.0))
        p = fused(-h[5], sign, p * h[0])
        m = fused(h[3], m, h[4] * g)
    return p, m, v, r


# --- Where the values of a tile are ---

RUN = tl.constexpr(0)
EVEN = tl.constexpr(1)
RAGGED = tl.constexpr(2)

PLACE_1 = tl.constexpr(0x7EB9D1C9)
PLACE_2 = tl.constexpr(0x73270133)
PLACE_3 = tl.constexpr(0x60BDADCF)


@triton.jit
def block_starts(at, VALUES: tl.constexpr, TILE: tl.constexpr):
    """Return for each block of a tile where its first entry is, and how many entries its row has from there on.

    An entry is a place in memory with VALUES values: 2 for 4-bit codes, else 1. `at` has the tile's number and the tensor's sizes.
    """
    b = at[0] * TILE[1] + tl.arange(0, TILE[1])
    row = b // at[2]
    col = (b - row * at[2]) * (TILE[2] // VALUES)
    places_per_row = (at[1] + VALUES - 1) // VALUES
    return row * places_per_row + col, tl.where(b < at[3], places_per_row - col, 0).to(tl.int32)


@triton.jit
def places(at, VALUES: tl.constexpr, TILE: tl.constexpr):
    """Return the offset of each entry of a tile, (blocks, entries), and a mask of the entries inside of the tensor.

    An entry has VALUES values. Offsets count from the tile's start if it is a RUN (contiguous memory), else from the tensor's.
    """
    width = tl.arange(0, TILE[2] // VALUES)[None, :]
    if TILE[0] == RUN:
        offsets = tl.arange(0, TILE[1])[:, None] * (TILE[2] // VALUES) + width
        return offsets, offsets >= 0
    else:
        starts, left = block_starts(at, VALUES, TILE)
        offsets, inside = starts[:, None] + width, width < left[:, None]
        if TILE[0] == EVEN:
            offsets = tl.multiple_of(tl.max_contiguous(offsets, (1, 16 // VALUES)), (1, 16 // VALUES))
            inside = tl.max_constancy(inside, (1, 16 // VALUES))
        return offsets, inside


@triton.jit
def run_start(at, VALUES: tl.constexpr, TILE: tl.constexpr):
    """Return what must be added to the offsets from `places`: a tile's start if the tile is contiguous (a RUN), else 0."""
    return at[0] * (TILE[1] * TILE[2] // VALUES) if TILE[0] == RUN else tl.zeros_like(at[0])


@triton.jit
def load_2d(ptr, at, VALUES: tl.constexpr, TILE: tl.constexpr):
    """Return the entries of a tile as (blocks, entries), read from the tensor at `ptr`, and 0 for those outside of the tensor.

    An entry has VALUES values: 2 for 4-bit codes, else 1. `at` has the tile's number and the tensor's sizes.
    """
    offsets, inside = places(at, VALUES, TILE)
    ptr = ptr + run_start(at, VALUES, TILE)
    if TILE[0] == RUN:
        return tl.load(ptr + offsets)
    else:
        return tl.load(ptr + offsets, mask=inside, other=0)


@triton.jit
def store_2d(ptr, x, broken, at, VALUES: tl.constexpr, TILE: tl.constexpr):
    """Store `x`, the entries of a tile as (blocks, entries), in the tensor at `ptr`, except for blocks that `broken` marks."""
    offsets, inside = places(at, VALUES, TILE)
    ptr = ptr + run_start(at, VALUES, TILE)
    keep = tl.broadcast_to((~broken)[:, None], (TILE[1], TILE[2] // VALUES))
    tl.store(ptr + offsets, x, mask=keep if TILE[0] == RUN else keep & inside)


@triton.jit
def load_scales(ptr, at, SCALE: tl.constexpr, TILE: tl.constexpr):
    """Return the stored scales of a tile's blocks as int32: float32 bits, bf16 bits, or codes of e8m0, as SCALE says."""
    if SCALE == BF16:
        ptr = ptr.to(tl.pointer_type(tl.uint16))
    elif SCALE != E8M0:
        ptr = ptr.to(tl.pointer_type(tl.int32))
    b = at[0] * TILE[1] + tl.arange(0, TILE[1])
    if TILE[0] == RUN:
        return tl.load(ptr + b).to(tl.int32)
    else:
        return tl.load(ptr + b, mask=b < at[3], other=0).to(tl.int32)


@triton.jit
def store_scales(ptr, stored, broken, at, SCALE: tl.constexpr, TILE: tl.constexpr):
    """Store the scales of a tile's blocks, as `load_scales` returns them, except for blocks that the mask `broken` marks."""
    b = at[0] * TILE[1] + tl.arange(0, TILE[1])
    keep = ~broken if TILE[0] == RUN else ~broken & (b < at[3])
    if SCALE == BF16:
        tl.store(ptr.to(tl.pointer_type(tl.int16)) + b, stored.to(tl.int16), mask=keep)
    elif SCALE != E8M0:
        tl.store(ptr.to(tl.pointer_type(tl.int32)) + b, stored, mask=keep)
    else:
        tl.store(ptr + b, stored.to(tl.uint8), mask=keep)


@triton.jit
def high_key(index):
    """Return the number that changes the random bits' second key for element indices from 2^32 on; 0 for smaller ones."""
    high = (index >> 32).to(tl.uint32) * HIGH_INDEX
    return (high ^ (high >> 15)) * MULTIPLIER_2


@triton.jit
def random_2d(first_index, k0, k1, at, TILE: tl.constexpr):
    """Return the random bits that the codec draws for the values of a tile, from the keys k0 and k1.

    `first_index`: the index of the tensor's first value. In a contiguous tile (RUN) all indices have the same upper 32 bits.
    """
    if TILE[0] == RUN:
        offsets, _ = places(at, 1, TILE)
        start = first_index + run_start(at, 1, TILE)
        k0 = start.to(tl.uint32) * INDEX_STEP + k0  # the common part of a tile is multiplied once
        return random_bits(offsets.to(tl.uint32), k0, k1 ^ high_key(start))
    else:
        starts, _ = block_starts(at, 1, TILE)
        starts = starts + first_index
        low = starts.to(tl.uint32)[:, None] + tl.arange(0, TILE[2]).to(tl.uint32)[None, :]
        is_next = low < starts.to(tl.uint32)[:, None]
        k1 = tl.where(is_next, (k1 ^ high_key(starts + TILE[2]))[:, None], (k1 ^ high_key(starts))[:, None])
        return random_bits(low, k0, k1)


@triton.jit
def place_multiplier(place):
    """Return the odd factor that turns the hash which four adjacent values share into the random bits of value `place`.

    `place` is 0 to 3.
    """
    return tl.where(place == 0, 1, tl.where(place == 1, PLACE_1, tl.where(place == 2, PLACE_2, PLACE_3))).to(tl.uint32)


@triton.jit
def update_bits(first_index, k0, k1, at, TILE: tl.constexpr):
    """Return the random bits that an optimizer update draws for the values of a tile, from the keys k0 and k1.

    `first_index`: the index of the tensor's first value. Four adjacent values share one hash.
    """
    if TILE[0] == RUN:
        offsets, _ = places(at, 1, TILE)
        fours = (first_index + run_start(at, 1, TILE)) >> 2
        k0 = fours.to(tl.uint32) * INDEX_STEP + k0
        bits = random_bits((offsets >> 2).to(tl.uint32), k0, k1 ^ high_key(fours))
        return bits * place_multiplier(offsets & 3)
    else:
        starts, _ = block_starts(at, 1, TILE)
        starts = starts + first_index
        offsets = tl.arange(0, TILE[2])[None, :]
        if TILE[0] == RAGGED:
            offsets = offsets + (starts & 3).to(tl.int32)[:, None]
        fours = starts >> 2
        low = fours.to(tl.uint32)[:, None] + (offsets >> 2).to(tl.uint32)
        is_next = low < fours.to(tl.uint32)[:, None]
        k1 = tl.where(is_next, (k1 ^ high_key(fours + TILE[2]))[:, None], (k1 ^ high_key(fours))[:, None])
        return random_bits(low, k0, k1) * place_multiplier(offsets & 3)
