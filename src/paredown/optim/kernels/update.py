"""These kernels update many tensors in one launch, or a single tensor, as `optim/reference.py` defines.

A program covers tiles of NB blocks of one tensor, one after the other. The tensor and its addresses are read from tables:

    owners   [ 0 0 0 1 2 2 ]        program -> tensor
    table    [ addresses of its parts | first_tile, cols, ... | keys of its random bits ]        one row of int64 for each tensor
    grads    [ addresses of its gradient's parts ]        a table of its own, since unpacked gradients are new tensors in every step
    places   [ row of `hypers`, step ]        one for each tensor, or one for all (stride 0)

    tile of 2 blocks of 4:   p p p p | p p p p        codes * scale, then the rule, then max |p'| of each block gives its next scale
                             s       | s              a block that is not finite stores nothing

Folding a gradient into a packed accumulator, in place: decode, add, encode. `optim/reference.py` defines it.

x = code value * (scale * factor) + gradient * weight        the first time: x = gradient * weight
scale, codes = codec's encode of x, stochastic               a block that is not finite gets scale NaN, and remains NaN
"""

from __future__ import annotations

import triton
import triton.language as tl

from paredown.codec.kernels.numbers import as_bits, as_float, decode_values, load_scale, mixed, nan_scale
from paredown.codec.kernels.pack import INTERPRETED
from paredown.optim.kernels.arithmetic import (
    RUN,
    apply_rule,
    companded,
    load_scales,
    places,
    random_2d,
    store_2d,
    store_scales,
    update_bits,
)
from paredown.optim.kernels.slots import (
    ABSENT,
    BLOCKS,
    codes_of,
    cover_scale,
    decoded_plain,
    encoded,
    half_step,
    largest_of,
    load_blocks,
    load_plain,
    load_slot,
    load_weight,
    rounded_plain,
    sticky_scale,
    store_codes,
    store_plain,
)

LIMIT = tl.constexpr(2.0**126)
MOMENT1_BITS = tl.constexpr(0xA13FC965)
MOMENT2_BITS = tl.constexpr(0xADB4A92D)
SAMPLED_BLOCKS = tl.constexpr(64)
SAMPLED_EVERY = tl.constexpr(16)
COLUMNS = tl.constexpr(18)  # of the table


@triton.jit
def store_moment(
    codes_ptr, scales_ptr, x, random, largest, broken, at, SLOT: tl.constexpr, ELEMENT: tl.constexpr, TILE: tl.constexpr
):
    """Encode and store a tile of a moment, except for blocks that `broken` marks; `largest` is each block's largest magnitude."""
    if SLOT[0] == BLOCKS:
        scale = cover_scale(largest, SLOT)
        store_scales(scales_ptr, scale, broken, at, SLOT[3], TILE)
        store_codes(codes_ptr, codes_of(x, scale, random, SLOT, ELEMENT), broken, at, ELEMENT[1], TILE)
    else:
        store_plain(codes_ptr, x, rounded_plain(x, random, SLOT, ELEMENT), broken, at, SLOT[0], TILE)


@triton.jit
def count(counters_ptr, p, new, stored, scale, broken, at, SLOT: tl.constexpr, ELEMENT: tl.constexpr, TILE: tl.constexpr):
    """Add a tile to the counters of diagnostics: its weights `p` became `new`, and `stored` after rounding to their format."""
    _, inside = places(at, 1, TILE)
    inside = inside & tl.broadcast_to((~broken)[:, None], (TILE[1], TILE[2]))
    moved = inside & (new != p)
    close = tl.abs(new - p) < half_step(p, scale, SLOT, ELEMENT)
    tl.atomic_add(counters_ptr, tl.sum(inside.to(tl.int32)))
    tl.atomic_add(counters_ptr + 1, tl.sum(moved.to(tl.int32)))
    tl.atomic_add(counters_ptr + 2, tl.sum((moved & (stored != p)).to(tl.int32)))
    tl.atomic_add(counters_ptr + 3, tl.sum((moved & close).to(tl.int32)))


@triton.jit
def store_weight(
    codes_ptr, scales_ptr, residue_ptr, counters_ptr, new, random, largest, broken, at,
    SLOT: tl.constexpr, ELEMENT: tl.constexpr, HAS_RESIDUE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Encode and store `new`, a tile of updated weights, except for blocks that `broken` marks; count it if it is sampled.

    Every 16th group of 64 blocks is sampled for diagnostics; its old weights are loaded a second time, which saves registers.
    """
    is_sampled = (at[0] * TILE[1] // SAMPLED_BLOCKS) % SAMPLED_EVERY == 0
    if SLOT[0] == BLOCKS:
        old = load_scales(scales_ptr, at, SLOT[3], TILE)
        scale = sticky_scale(largest, old, SLOT) if SLOT[4] else cover_scale(largest, SLOT)
        codes = codes_of(new, scale, random, SLOT, ELEMENT)
        if is_sampled:
            p = load_weight(codes_ptr, scales_ptr, residue_ptr, at, SLOT, ELEMENT, False, TILE)
            low = codes.to(tl.int32) & ((1 << ELEMENT[1]) - 1)
            stored = decode_values(low, codes_ptr, ELEMENT) * load_scale(scale, SLOT[3])[:, None]
            count(counters_ptr, p, new, stored, load_scale(old, SLOT[3]), broken, at, SLOT, ELEMENT, TILE)
        store_scales(scales_ptr, scale, broken, at, SLOT[3], TILE)
        store_codes(codes_ptr, codes, broken, at, ELEMENT[1], TILE)
    else:
        if HAS_RESIDUE:
            b = (as_bits(new) + 128) >> 8
            bits = (b + 128) >> 8
            stored = as_float(b << 8)
        else:
            bits = rounded_plain(new, random, SLOT, ELEMENT)
            stored = decoded_plain(new, bits, SLOT[0])
        if is_sampled:
            p = load_weight(codes_ptr, scales_ptr, residue_ptr, at, SLOT, ELEMENT, HAS_RESIDUE, TILE)
            count(counters_ptr, p, new, stored, largest, broken, at, SLOT, ELEMENT, TILE)
        store_plain(codes_ptr, new, bits, broken, at, SLOT[0], TILE)
        if HAS_RESIDUE:
            store_2d(residue_ptr.to(tl.pointer_type(tl.int8)), (b - (bits << 8)).to(tl.int8), broken, at, 1, TILE)


@triton.jit
def update_tile(
    w_ptr, ws_ptr, residue_ptr, m_ptr, ms_ptr, v_ptr, vs_ptr, g_ptr, gs_ptr, counters_ptr, at, first_index, k0, k1, f, h,
    RULE: tl.constexpr, W: tl.constexpr, WE: tl.constexpr, HAS_RESIDUE: tl.constexpr, M: tl.constexpr, ME: tl.constexpr,
    V: tl.constexpr, VE: tl.constexpr, G: tl.constexpr, GE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Update one tile of a parameter and its moments in place: load, apply the rule, encode and store.

    Pointers: weight, its scales and residue, two moments, gradient. `f` multiplies the gradient; `h`: the rule's other hyperparameters.
    """
    g = load_slot(g_ptr, gs_ptr, f, at, G, GE, True, TILE)
    p = load_weight(w_ptr, ws_ptr, residue_ptr, at, W, WE, HAS_RESIDUE, TILE)
    m = g
    v = g
    if M[0] != ABSENT:
        m = load_slot(m_ptr, ms_ptr, 1.0, at, M, ME, False, TILE)
    if V[0] != ABSENT:
        v = load_slot(v_ptr, vs_ptr, 1.0, at, V, VE, False, TILE)
    p, m, v, r = apply_rule(p, g, m, v, h, RULE)
    random = update_bits(first_index, k0, k1, at, TILE)
    largest = largest_of(p)
    m_largest = largest
    v_largest = largest
    broken = ~(largest < LIMIT)
    if M[0] != ABSENT:
        m_largest = largest_of(m)
        broken = broken | ~(m_largest < LIMIT)
    if V[0] != ABSENT:
        if V[2] >= 1:
            v = r
        v_largest = largest_of(v)
        broken = broken | ~(v_largest < (float("inf") if V[2] >= 1 else LIMIT))
        if V[2] >= 2:
            v = companded(v)
            v_largest = companded(v_largest)
    tl.atomic_add(counters_ptr + 4 + 0 * tl.arange(0, TILE[1]), 1, mask=broken, sem="relaxed")
    if M[0] != ABSENT:
        store_moment(m_ptr, ms_ptr, m, random * MOMENT1_BITS, m_largest, broken, at, M, ME, TILE)
    if V[0] != ABSENT:
        store_moment(v_ptr, vs_ptr, v, random * MOMENT2_BITS, v_largest, broken, at, V, VE, TILE)
    store_weight(w_ptr, ws_ptr, residue_ptr, counters_ptr, p, random, largest, broken, at, W, WE, HAS_RESIDUE, TILE)


@triton.jit
def step_key(key, step):
    """Return the key of the random bits at a training step: a hash of the parameter's `key` and the step."""
    return mixed(key.to(tl.uint32) ^ step.to(tl.uint32))


@triton.jit
def pointer(address, ALIGNED: tl.constexpr):
    """Return an address as a pointer to bytes; ALIGNED promises the compiler that it is a multiple of 16."""
    ptr = address.to(tl.pointer_type(tl.uint8))
    return tl.multiple_of(ptr, 16) if ALIGNED else ptr


@triton.jit(do_not_specialize=["places_stride", "turns"])
def update_kernel(
    owners_ptr, table_ptr, grads_ptr, places_ptr, hypers_ptr, places_stride, turns,
    RULE: tl.constexpr, W: tl.constexpr, WE: tl.constexpr, HAS_RESIDUE: tl.constexpr, M: tl.constexpr, ME: tl.constexpr,
    V: tl.constexpr, VE: tl.constexpr, G: tl.constexpr, GE: tl.constexpr, HAS_FACTOR: tl.constexpr, ALIGNED: tl.constexpr,
    NUM_HYPERS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Update one tile of one of many tensors, or `turns` tiles one after the other if they are contiguous in memory.

    Tables in memory have the tensor of each program, and the addresses, sizes, keys and hyperparameters of each tensor.
    """
    pid = tl.program_id(0)
    owner = tl.load(owners_ptr + pid)
    row_ptr = table_ptr + owner * COLUMNS
    place_ptr = places_ptr + owner * places_stride
    h_ptr = hypers_ptr + tl.load(place_ptr) * NUM_HYPERS
    step = tl.load(place_ptr + 1)
    f = tl.load(h_ptr)
    if HAS_FACTOR:
        f = tl.load(tl.load(row_ptr + 7).to(tl.pointer_type(tl.float32))) * f
    first = pid + tl.load(row_ptr + (9 if TILE[0] == RUN else 10))
    last = first + 1
    if TILE[0] == RUN:
        first = first * turns
        last = tl.minimum(first + turns, tl.load(row_ptr + 17))
    h = (
        tl.load(h_ptr + 1), tl.load(h_ptr + 2), tl.load(h_ptr + 3), tl.load(h_ptr + 4),
        tl.load(h_ptr + 5), tl.load(h_ptr + 6), tl.load(h_ptr + 7), tl.load(h_ptr + 8),
    )  # fmt: skip
    cols = tl.load(row_ptr + 11)
    blocks_per_row = tl.load(row_ptr + 12)
    num_blocks = tl.load(row_ptr + 13)
    first_index = tl.load(row_ptr + 14)
    k0 = step_key(tl.load(row_ptr + 15), step)
    k1 = step_key(tl.load(row_ptr + 16), step)
    zero = tl.zeros((), tl.int64)  # an int64, also in the interpreter
    w_ptr = pointer(tl.load(row_ptr), ALIGNED)
    ws_ptr = pointer(tl.load(row_ptr + 1), ALIGNED)
    residue_ptr = pointer(tl.load(row_ptr + 2), ALIGNED)
    m_ptr = pointer(tl.load(row_ptr + 3), ALIGNED)
    ms_ptr = pointer(tl.load(row_ptr + 4), ALIGNED)
    v_ptr = pointer(tl.load(row_ptr + 5), ALIGNED)
    vs_ptr = pointer(tl.load(row_ptr + 6), ALIGNED)
    g_ptr = pointer(tl.load(grads_ptr + 2 * owner), ALIGNED)
    gs_ptr = pointer(tl.load(grads_ptr + 2 * owner + 1), ALIGNED)
    counters_ptr = tl.load(row_ptr + 8).to(tl.pointer_type(tl.int32))
    if INTERPRETED:  # in Triton 3.6 scalars are arrays there, which range() does not accept
        while first < last:
            update_tile(
                w_ptr, ws_ptr, residue_ptr, m_ptr, ms_ptr, v_ptr, vs_ptr, g_ptr, gs_ptr, counters_ptr,
                (first + zero, cols, blocks_per_row, num_blocks), first_index, k0, k1, f, h,
                RULE, W, WE, HAS_RESIDUE, M, ME, V, VE, G, GE, TILE,
            )  # fmt: skip
            first += 1
    else:
        for tile in range(first, last):
            update_tile(
                w_ptr, ws_ptr, residue_ptr, m_ptr, ms_ptr, v_ptr, vs_ptr, g_ptr, gs_ptr, counters_ptr,
                (tile + zero, cols, blocks_per_row, num_blocks), first_index, k0, k1, f, h,
                RULE, W, WE, HAS_RESIDUE, M, ME, V, VE, G, GE, TILE,
            )  # fmt: skip


@triton.jit(do_not_specialize=["first_index", "k0", "k1"])
def update_one_kernel(
    w_ptr, ws_ptr, residue_ptr, m_ptr, ms_ptr, v_ptr, vs_ptr, g_ptr, gs_ptr, factor_ptr, counters_ptr,
    first_tile, cols, blocks_per_row, num_blocks, first_index, k0, k1, h0, h1, h2, h3, h4, h5, h6, h7, h8,
    RULE: tl.constexpr, W: tl.constexpr, WE: tl.constexpr, HAS_RESIDUE: tl.constexpr, M: tl.constexpr, ME: tl.constexpr,
    V: tl.constexpr, VE: tl.constexpr, G: tl.constexpr, GE: tl.constexpr, HAS_FACTOR: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Update one tile of a single tensor and its state; addresses, sizes and hyperparameters are arguments, not tables."""
    f = tl.load(factor_ptr) * h0 if HAS_FACTOR else h0
    zero = tl.zeros((), tl.int64)
    at = (tl.program_id(0) + first_tile + zero, cols + zero, blocks_per_row + zero, num_blocks + zero)
    byte = tl.pointer_type(tl.uint8)
    update_tile(
        w_ptr.to(byte), ws_ptr.to(byte), residue_ptr.to(byte), m_ptr.to(byte), ms_ptr.to(byte), v_ptr.to(byte), vs_ptr.to(byte),
        g_ptr.to(byte), gs_ptr.to(byte), counters_ptr, at, first_index + zero, k0.to(tl.uint32), k1.to(tl.uint32), f,
        (h1, h2, h3, h4, h5, h6, h7, h8), RULE, W, WE, HAS_RESIDUE, M, ME, V, VE, G, GE, TILE,
    )  # fmt: skip


# --- Folding a gradient into a packed accumulator, in place ---


@triton.jit(do_not_specialize=["first_index", "k0", "k1"])
def fold_kernel(
    codes_ptr, scales_ptr, grad_ptr, factor_ptr, first_tile, cols, blocks_per_row, num_blocks, first_index, k0, k1, weight,
    SLOT: tl.constexpr, ELEMENT: tl.constexpr, GRAD: tl.constexpr, HAS_FACTOR: tl.constexpr, IS_FIRST: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Add one tile of a gradient, times `weight`, to a packed sum of gradients; if IS_FIRST, replace the sum by it."""
    codes_ptr = codes_ptr.to(tl.pointer_type(tl.uint8))
    scales_ptr = scales_ptr.to(tl.pointer_type(tl.uint8))
    zero = tl.zeros((), tl.int64)
    at = (tl.program_id(0) + first_tile + zero, cols + zero, blocks_per_row + zero, num_blocks + zero)
    x = load_plain(grad_ptr, at, GRAD, TILE) * weight
    if not IS_FIRST:
        scale = load_scale(load_scales(scales_ptr, at, SLOT[3], TILE), SLOT[3])
        if HAS_FACTOR:
            scale = scale * tl.load(factor_ptr)
        x = load_blocks(codes_ptr, scale, at, False, ELEMENT, TILE) + x
    largest = largest_of(x)
    broken = ~(largest < float("inf"))
    stored = tl.where(broken, nan_scale(SLOT[3]), cover_scale(tl.where(broken, 0.0, largest), SLOT))
    random = random_2d(first_index + zero, k0.to(tl.uint32), k1.to(tl.uint32), at, TILE)
    codes = tl.where(broken[:, None], 0, encoded(x, stored, random, SLOT, ELEMENT))
    none = tl.zeros_like(broken)
    store_scales(scales_ptr, stored, none, at, SLOT[3], TILE)
    store_codes(codes_ptr, codes, none, at, ELEMENT[1], TILE)
