"""Where the values of a tile are: offsets and masks, loads and stores, scales, random bits.

A tile is NB blocks of BLOCK values that follow each other, counted along the rows. Where rows end with a block they have no gaps, and a
whole tile is one RUN of memory. Otherwise each block is found from its row, and what lies past the end of the row or the tensor is masked:
EVEN if rows have a multiple of 16 values, which are then read together, RAGGED if not.

    row 0   [ b0        | b1        | b2  ]        block b: row b // blocks_per_row, first column (b % blocks_per_row) * BLOCK
    row 1   [ b3        | b4        | b5  ]        scales are (rows, blocks_per_row): that of block b is at b
"""

from __future__ import annotations

import triton
import triton.language as tl

from paredown.codec.kernels.numbers import BF16, E8M0, HIGH_INDEX, INDEX_STEP, MULTIPLIER_2, random_bits

RUN = tl.constexpr(0)
EVEN = tl.constexpr(1)
RAGGED = tl.constexpr(2)


@triton.jit
def block_starts(at, VALUES: tl.constexpr, NB: tl.constexpr, BLOCK: tl.constexpr):
    """Where the blocks of a tile start (NB,), and how many places of the row are left there; VALUES share one place."""
    b = tile * NB + tl.arange(0, NB)
    row = b // blocks_per_row
    col = (b - row * blocks_per_row) * (BLOCK // VALUES)
    places_per_row = (cols + VALUES - 1) // VALUES
    return row * places_per_row + col, tl.where(b < num_blocks, places_per_row - col, 0).to(tl.int32)


@triton.jit
def places(
    at, VALUES: tl.constexpr, TILE: tl.constexpr
):
    """Offsets (NB, BLOCK / VALUES) from the tile's start if it is a RUN, else from the tensor's, and which are inside."""
    width = tl.arange(0, BLOCK // VALUES)[None, :]
    if SHAPE == RUN:
        offsets = tl.arange(0, NB)[:, None] * (BLOCK // VALUES) + width
        return offsets, offsets >= 0
    else:
        starts, left = block_starts(at, VALUES, NB, BLOCK)
        offsets, inside = starts[:, None] + width, width < left[:, None]
        if SHAPE == EVEN:
            offsets = tl.multiple_of(tl.max_contiguous(offsets, (1, 16 // VALUES)), (1, 16 // VALUES))
            inside = tl.max_constancy(inside, (1, 16 // VALUES))
        return offsets, inside


@triton.jit
def run_start(tile, VALUES: tl.constexpr, TILE: tl.constexpr):
    """Where the offsets of `places` start."""
    return tile * (NB * BLOCK // VALUES) if SHAPE == RUN else tl.zeros_like(tile)


@triton.jit
def load_2d(
    ptr, at, VALUES: tl.constexpr, TILE: tl.constexpr
):
    """What lies at the places of a tile, 0 outside."""
    offsets, inside = places(at, VALUES, TILE)
    ptr = ptr + run_start(tile, VALUES, TILE)
    if SHAPE != RUN:
        return tl.load(ptr + offsets, mask=inside, other=0)
    else:
        return tl.load(ptr + offsets)


@triton.jit
def store_2d(
    ptr, x, broken, at,
    VALUES: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Store at the places of a tile, but for blocks that are broken."""
    offsets, inside = places(at, VALUES, TILE)
    ptr = ptr + run_start(tile, VALUES, TILE)
    keep = tl.broadcast_to((~broken)[:, None], (NB, BLOCK // VALUES))
    tl.store(ptr + offsets, x, mask=keep if SHAPE == RUN else keep & inside)


@triton.jit
def load_scales(ptr, tile, num_blocks, SCALE: tl.constexpr, SHAPE: tl.constexpr, NB: tl.constexpr):
    """The stored scales (NB,) as int32: float32 bits, bf16 bits, or codes."""
    if SCALE == BF16:
        ptr = ptr.to(tl.pointer_type(tl.uint16))
    elif SCALE != E8M0:
        ptr = ptr.to(tl.pointer_type(tl.int32))
    at = tl.arange(0, NB)
    if SHAPE != RUN:
        return tl.load(ptr + tile * NB + at, mask=tile * NB + at < num_blocks, other=0).to(tl.int32)
    else:
        return tl.load(ptr + tile * NB + at).to(tl.int32)


@triton.jit
def store_scales(ptr, stored, broken, tile, num_blocks, SCALE: tl.constexpr, SHAPE: tl.constexpr, NB: tl.constexpr):
    """The inverse of `load_scales`, but for blocks that are broken."""
    at = tl.arange(0, NB)
    keep = ~broken if SHAPE == RUN else ~broken & (tile * NB + at < num_blocks)
    if SCALE == BF16:
        tl.store(ptr.to(tl.pointer_type(tl.int16)) + tile * NB + at, stored.to(tl.int16), mask=keep)
    elif SCALE != E8M0:
        tl.store(ptr.to(tl.pointer_type(tl.int32)) + tile * NB + at, stored, mask=keep)
    else:
        tl.store(ptr + tile * NB + at, stored.to(tl.uint8), mask=keep)


@triton.jit
def high_key(index):
    """`rounding.high_key`, on the device."""
    high = (index >> 32).to(tl.uint32) * HIGH_INDEX
    return (high ^ (high >> 15)) * MULTIPLIER_2


@triton.jit
def random_2d(
    first_index, k0, k1, at, TILE: tl.constexpr
):
    """The random bits of a tile's values. A RUN lies within one multiple of 2^32 (see `launch.py`), a block may pass into the next."""
    if SHAPE == RUN:
        offsets, _ = places(at, 1, TILE)
        start = first_index + run_start(tile, 1, TILE)
        k0 = start.to(tl.uint32) * INDEX_STEP + k0  # what is alike for the tile is multiplied once
        return random_bits(offsets.to(tl.uint32), k0, k1 ^ high_key(start))
    else:
        starts, _ = block_starts(at, 1, NB, BLOCK)
        starts = starts + first_index
        low = starts.to(tl.uint32)[:, None] + tl.arange(0, BLOCK).to(tl.uint32)[None, :]
        is_next = low < starts.to(tl.uint32)[:, None]
        k1 = tl.where(is_next, (k1 ^ high_key(starts + BLOCK))[:, None], (k1 ^ high_key(starts))[:, None])
        return random_bits(low, k0, k1)
