"""One kernel encodes rows of numbers as packed codes, or only rounds them, and one decodes, by the same tile functions.

One program covers a tile of TILE values of one row. With blocks the tile is (TILE / BLOCK_LEN, BLOCK_LEN):

    x        [ x0 x1 x2 x3 | x4 x5 x6 x7 ]     TILE = 8, BLOCK_LEN = 4, int4
    scale    [ s0          | s1          ]     s = max |x| / 7 of each block, rounded up to its stored type
    codes    [ c1c0  c3c2  | c5c4  c7c6  ]     c = x / s rounded; neighbours are joined within a thread

Rows that end on a byte and a block follow each other without gaps, and are then one long row.
"""

from __future__ import annotations

import triton
import triton.language as tl

from paredown.codec.kernels.numbers import (
    BF16,
    FP32,
    HIGH_INDEX,
    INF_BITS,
    MULTIPLIER_2,
    NAN_BITS,
    STOCHASTIC,
    TABLE,
    UINT,
    as_bits,
    as_float,
    decode_values,
    encode_covered,
    encode_values,
    inverse_scale,
    load_scale,
    nan_scale,
    random_bits,
    rounded_down_bf16,
    store_scale,
    stream_keys,
)

COVER = tl.constexpr(0)
OCP = tl.constexpr(1)
GIVEN = tl.constexpr(2)
NONE = tl.constexpr(-1)
INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))


# --- tiles ------------------------------------------------------------------------------------------------------------


@triton.jit
def load_tile(ptr, offsets, inside, MASKED: tl.constexpr):
    """Return the values at ptr + offsets; if MASKED, only those where `inside` is true are read, and others are 0."""
    if MASKED:
        return tl.load(ptr + offsets, mask=inside, other=0)
    else:
        return tl.load(ptr + offsets)


@triton.jit
def load_values(ptr, offsets, inside, MASKED: tl.constexpr):
    """Return the values at ptr + offsets as float32; if MASKED, 0 where `inside` is false.

    bf16 comes as int16, since the cast of Triton's interpreter is wrong below 2^-126.
    """
    loaded = load_tile(ptr, offsets, inside, MASKED)
    return as_float(loaded.to(tl.int32) << 16) if ptr.dtype.element_ty == tl.int16 else loaded.to(tl.float32)


@triton.jit
def store_tile(ptr, offsets, values, inside, MASKED: tl.constexpr):
    """Store `values` at `offsets`; if MASKED, only where `inside` is true."""
    if MASKED:
        tl.store(ptr + offsets, values, mask=inside)
    else:
        tl.store(ptr + offsets, values)


@triton.jit
def joined_bits(bits, inside, MASKED: tl.constexpr, TILE: tl.constexpr):
    """Return `bits`, TILE numbers 0 or 1 (int32), packed into TILE / 8 bytes, the first one in the lowest bit.

    If MASKED, bits are 0 where `inside` is false.
    """
    if MASKED:
        bits = tl.where(inside, bits, 0)
    return tl.sum(bits.reshape(TILE // 8, 8) << tl.arange(0, 8)[None, :], 1).to(tl.uint8)


@triton.jit
def random_tile(
    start, k0, k1, step_ptr, ROUNDING: tl.constexpr, STEP_IN_MEMORY: tl.constexpr, WIDE: tl.constexpr, TILE: tl.constexpr
):
    """Return the random bits of the TILE elements from index `start` on; zeros if ROUNDING is not stochastic.

    WIDE must be set if an index may be 2^32 or more.
    """
    if ROUNDING == STOCHASTIC:
        k0, k1 = stream_keys(k0, k1, step_ptr, STEP_IN_MEMORY)
        if WIDE:
            index = start + tl.arange(0, TILE)
            high = (index >> 32).to(tl.uint32) * HIGH_INDEX
            k1 = k1 ^ ((high ^ (high >> 15)) * MULTIPLIER_2)
        else:
            index = start.to(tl.uint32) + tl.arange(0, TILE).to(tl.uint32)
        return random_bits(index.to(tl.uint32), k0, k1)
    else:
        return tl.zeros((TILE,), tl.uint32)


@triton.jit
def place(first_tile, tiles_per_row, ONE_ROW: tl.constexpr):
    """Return which row, and which tile within that row, the current program (thread block) works on.

    ONE_ROW: all rows lie in memory without gaps and are treated as one long row.
    """
    pid = tl.program_id(0).to(tl.int64)
    if ONE_ROW:
        return tl.zeros((), tl.int64), pid + first_tile
    else:
        return pid // tiles_per_row, pid % tiles_per_row


@triton.jit
def packed_codes(codes, WIDTH: tl.constexpr, TILE: tl.constexpr):
    """Return TILE codes of WIDTH bits joined into larger integers, the first code in the lowest bits.

    They are joined into bytes, and codes of 6 bits, four by four, into 24 bits. Codes of 8 and 16 bits stay as they are.
    """
    if WIDTH == 1 or WIDTH == 2 or WIDTH == 4 or WIDTH == 6:
        low, high = tl.split(codes.reshape(TILE // 2, 2))
        codes = low | (high << WIDTH)
    if WIDTH == 1 or WIDTH == 2 or WIDTH == 6:
        low, high = tl.split(codes.reshape(TILE // 4, 2))
        codes = low | (high << (2 * WIDTH))
    if WIDTH == 1:
        low, high = tl.split(codes.reshape(TILE // 8, 2))
        codes = low | (high << 4)
    return codes


@triton.jit
def unpacked_codes(packed, WIDTH: tl.constexpr, TILE: tl.constexpr):
    """Return the TILE codes (int32) from which `packed_codes` made the integers `packed`."""
    if WIDTH == 1:
        packed = tl.join(packed & 15, packed >> 4).reshape(TILE // 4)
    if WIDTH == 1 or WIDTH == 2 or WIDTH == 6:
        packed = tl.join(packed & ((1 << (2 * WIDTH)) - 1), packed >> (2 * WIDTH)).reshape(TILE // 2)
    if WIDTH == 1 or WIDTH == 2 or WIDTH == 4 or WIDTH == 6:
        packed = tl.join(packed & ((1 << WIDTH) - 1), packed >> WIDTH).reshape(TILE)
    return packed


@triton.jit
def store_codes(ptr, codes, num_bytes, WIDTH: tl.constexpr, TILE: tl.constexpr, MASKED: tl.constexpr):
    """Store a tile's codes of WIDTH bits from address `ptr` on, but no more than `num_bytes`, the bytes left in the row."""
    packed = packed_codes(codes, WIDTH, TILE)
    if WIDTH == 6:
        start = tl.arange(0, TILE // 4) * 3
        for byte in tl.static_range(3):
            tl.store(ptr + start + byte, ((packed >> (8 * byte)) & 255).to(tl.uint8), mask=start + byte < num_bytes)
    elif WIDTH == 16:
        offsets = tl.arange(0, TILE)
        store_tile(ptr.to(tl.pointer_type(tl.int16)), offsets, packed.to(tl.int16), 2 * offsets < num_bytes, MASKED)
    else:
        offsets = tl.arange(0, TILE * WIDTH // 8)
        store_tile(ptr, offsets, packed.to(tl.uint8), offsets < num_bytes, MASKED)


@triton.jit
def load_codes(ptr, num_bytes, WIDTH: tl.constexpr, TILE: tl.constexpr, MASKED: tl.constexpr):
    """Return a tile's TILE codes (int32) of WIDTH bits from address `ptr` on; codes after `num_bytes` bytes are 0."""
    if WIDTH == 6:
        start = tl.arange(0, TILE // 4) * 3
        packed = tl.zeros((TILE // 4,), tl.int32)
        for byte in tl.static_range(3):
            packed |= tl.load(ptr + start + byte, mask=start + byte < num_bytes, other=0).to(tl.int32) << (8 * byte)
    elif WIDTH == 16:
        offsets = tl.arange(0, TILE)
        packed = load_tile(ptr.to(tl.pointer_type(tl.int16)), offsets, 2 * offsets < num_bytes, MASKED).to(tl.int32) & 0xFFFF
    else:
        offsets = tl.arange(0, TILE * WIDTH // 8)
        packed = load_tile(ptr, offsets, offsets < num_bytes, MASKED).to(tl.int32)
    return unpacked_codes(packed, WIDTH, TILE)


# --- blocks -----------------------------------------------------------------------------------------------------------


@triton.jit
def load_shared(ptr, offsets, inside, KIND: tl.constexpr):
    """Return scales or minimums as int32, as they are stored: float32 bits, bf16 bits, or codes of 8 bits, as KIND says."""
    stored = tl.load(ptr + offsets, mask=inside, other=0).to(tl.int32)
    return stored & 0xFFFF if KIND == BF16 else stored


@triton.jit
def store_shared(ptr, offsets, stored, inside, KIND: tl.constexpr):
    """Store scales or minimums, given as int32 as `load_shared` returns them: float32 bits, bf16 bits, or codes."""
    if KIND == BF16:
        stored = stored.to(tl.int16)
    elif KIND != FP32:
        stored = stored.to(tl.uint8)
    tl.store(ptr + offsets, stored, mask=inside)


@triton.jit
def nan_max(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def nan_min(a, b):
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def choose_minimum(x, inside, MINIMUM: tl.constexpr, MASKED: tl.constexpr):
    """Return each block's minimum, rounded down, as its stored bits, and the largest distance of a value from it."""
    low = tl.reduce(tl.where(inside, x, float("inf")) if MASKED else x, 1, nan_min)
    high = tl.reduce(tl.where(inside, x, float("-inf")) if MASKED else x, 1, nan_max)
    low = low + 0.0  # turns -0.0 into 0.0
    stored = rounded_down_bf16(low) if MINIMUM == BF16 else as_bits(low)
    return stored, high - load_scale(stored, MINIMUM) + 0.0


@triton.jit
def choose_scale(
    largest, tensor_scale, MAX_VALUE, ELEMENT: tl.constexpr, SCALE: tl.constexpr, RULE: tl.constexpr, HAS_TENSOR_SCALE: tl.constexpr
):
    """Return the scale to store (float32 bits, bf16 bits or a code) for blocks whose largest magnitude is `largest`.

    RULE: COVER (no value overflows) or OCP. MAX_VALUE is the element's largest value; `tensor_scale` multiplies all scales.
    """
    if RULE == OCP:
        exponent = as_bits(largest) >> 23
        exponent = tl.where(exponent == 0, (as_bits(largest * 16777216.0) >> 23) - 24, exponent)  # subnormal: by 2^24 first
        return tl.where(largest > 0, tl.minimum(tl.maximum(exponent - ELEMENT[10], 0), 254), 0)
    else:
        scale = tl.div_rn(largest, tl.zeros_like(largest) + MAX_VALUE)
        if HAS_TENSOR_SCALE:
            fine = tensor_scale > 0
            scale = tl.where(fine, tl.div_rn(scale, tl.zeros_like(scale) + tl.where(fine, tensor_scale, 1.0)), 0.0)
        return store_scale(scale, SCALE)


@triton.jit
def scale_of(stored, tensor_scale, SCALE: tl.constexpr, HAS_TENSOR_SCALE: tl.constexpr):
    """Return the float32 scale of each block: the value of its stored bits or code, times the tensor scale if there is one."""
    scale = load_scale(stored, SCALE)
    return scale * tensor_scale if HAS_TENSOR_SCALE else scale


@triton.jit
def encode_blocks(
    x, inside, random, at, at_inside, scales_ptr, minimums_ptr, tensor_scale, table_ptr, lowest, highest, MAX_VALUE,
    ELEMENT: tl.constexpr, ROUNDING: tl.constexpr, SCALE: tl.constexpr, MINIMUM: tl.constexpr, RULE: tl.constexpr, SAYS_NAN: tl.constexpr,
    HAS_TENSOR_SCALE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Return the codes (blocks, BLOCK_LEN) of `x`, and each block's scale and minimum as they are stored.

    A block that is not finite gets scale NaN and codes 0. `at` are the offsets of the blocks' scales, read under RULE GIVEN.
    """
    if MINIMUM == NONE or RULE == GIVEN:
        largest = tl.reduce(tl.abs(x), 1, nan_max)
        minimum = tl.zeros_like(as_bits(largest))
    else:
        minimum, largest = choose_minimum(x, inside, MINIMUM, MASKED)
    broken = ~(largest < float("inf"))
    if RULE == GIVEN:
        scale = load_shared(scales_ptr, at, at_inside, SCALE)
        if MINIMUM != NONE:
            minimum = load_shared(minimums_ptr, at, at_inside, MINIMUM)
    else:
        largest = tl.where(broken, 0.0, largest)
        scale = choose_scale(largest, tensor_scale, MAX_VALUE, ELEMENT, SCALE, RULE, HAS_TENSOR_SCALE)
    value = scale_of(scale, tensor_scale, SCALE, HAS_TENSOR_SCALE)
    broken = broken | ~(value < float("inf"))
    above = x if MINIMUM == NONE else x - load_scale(minimum, MINIMUM)[:, None]
    y = above * inverse_scale(value)[:, None]
    if RULE == GIVEN:  # a given scale may be 0, and then all values except 0 overflow
        y = tl.where((inverse_scale(value) == 0.0)[:, None] & (above != 0.0), above * float("inf"), y)
        broken = broken | (value < 0.0)
    if RULE == COVER and SAYS_NAN and ELEMENT[0] != TABLE:
        codes = encode_covered(y, random, MINIMUM != NONE, ELEMENT, ROUNDING)
    else:
        if RULE == COVER:  # y exceeds the largest value by rounding error only; values below 0 overflow uintN
            y = tl.minimum(y if ELEMENT[0] == UINT else tl.maximum(y, -MAX_VALUE), MAX_VALUE)
        codes, past = encode_values(tl.where(broken[:, None], 0.0, y), random, table_ptr, lowest, highest, ELEMENT, ROUNDING)
        if not SAYS_NAN:
            broken = broken | (tl.max((past & inside if MASKED else past).to(tl.int32), 1) > 0)
    codes = tl.where(broken[:, None], 0, codes)
    if MINIMUM != NONE:
        minimum = tl.where(broken, 0, minimum)
    return codes, tl.where(broken, nan_scale(SCALE), scale), minimum


@triton.jit
def decode_blocks(
    codes,
    scale,
    minimum,
    tensor_scale,
    table_ptr,
    ELEMENT: tl.constexpr,
    SCALE: tl.constexpr,
    MINIMUM: tl.constexpr,
    HAS_TENSOR_SCALE: tl.constexpr,
):
    """Return the float32 values of codes (blocks, BLOCK_LEN), given each block's scale and minimum as they are stored."""
    values = decode_values(codes, table_ptr, ELEMENT) * scale_of(scale, tensor_scale, SCALE, HAS_TENSOR_SCALE)[:, None]
    return values if MINIMUM == NONE else values + load_scale(minimum, MINIMUM)[:, None]


# --- kernels ----------------------------------------------------------------------------------------------------------


@triton.jit
def store_values(ptr, values, inside, MASKED: tl.constexpr):
    """Store a tile of float32 values from `ptr` on in the dtype of `ptr`; finite values stay finite in float16."""
    if ptr.dtype.element_ty == tl.float16:
        held = tl.minimum(tl.maximum(values, -65504.0), 65504.0)
        values = tl.where(tl.abs(values) < float("inf"), held, values)
    if INTERPRETED and ptr.dtype.element_ty == tl.bfloat16:  # the interpreter's cast truncates, compiled it rounds to nearest
        bits = tl.where(values == values, as_bits(values), NAN_BITS)
        rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).to(tl.int16)
        store_tile(ptr.to(tl.pointer_type(tl.int16)), tl.arange(0, values.shape[0]), rounded, inside, MASKED)
    else:
        store_tile(ptr, tl.arange(0, values.shape[0]), values.to(ptr.dtype.element_ty), inside, MASKED)


@triton.jit(do_not_specialize=["k0", "k1", "first_index"])
def encode_kernel(
    x_ptr, out_ptr, scales_ptr, minimums_ptr, tensor_scale_ptr, table_ptr, step_ptr, bits_ptr, lowest, highest, max_value,
    first_tile, tiles_per_row, cols, row_bytes, blocks_per_row, first_index, k0, k1,
    ELEMENT: tl.constexpr, ROUNDING: tl.constexpr, BLOCK_LEN: tl.constexpr, SCALE: tl.constexpr, MINIMUM: tl.constexpr, RULE: tl.constexpr,
    SAYS_NAN: tl.constexpr, HAS_TENSOR_SCALE: tl.constexpr, STEP_IN_MEMORY: tl.constexpr, STORES_CODES: tl.constexpr,
    STORES_BITS: tl.constexpr, WIDE: tl.constexpr, ONE_ROW: tl.constexpr, MASKED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Encode one tile of a (rows, cols) tensor and store its codes and scales; without STORES_CODES, store rounded values.

    STORES_BITS, only for one long row: also store a mask with one bit per value, 1 for values above 0.
    """
    row, tile = place(first_tile, tiles_per_row, ONE_ROW)
    start = row * cols + tile * TILE
    left = tl.minimum(cols - tile * TILE, TILE).to(tl.int32)
    inside = tl.arange(0, TILE) < left
    x = load_values(x_ptr + start, tl.arange(0, TILE), inside, MASKED)
    if STORES_BITS:
        at_bits = tl.arange(0, TILE // 8)
        store_tile(
            bits_ptr + start // 8,
            at_bits,
            joined_bits(1 - (x <= 0.0).to(tl.int32), inside, MASKED, TILE),
            at_bits * 8 < left,
            MASKED,
        )
    random = random_tile(first_index + start, k0, k1, step_ptr, ROUNDING, STEP_IN_MEMORY, WIDE, TILE)
    if BLOCK_LEN > 0:
        BLOCKS: tl.constexpr = TILE // BLOCK_LEN
        at = row * blocks_per_row + tile * BLOCKS + tl.arange(0, BLOCKS)
        at_inside = tile * BLOCKS + tl.arange(0, BLOCKS) < blocks_per_row
        tensor_scale = tl.load(tensor_scale_ptr) if HAS_TENSOR_SCALE else 1.0
        codes, scale, minimum = encode_blocks(
            x.reshape(BLOCKS, BLOCK_LEN), inside.reshape(BLOCKS, BLOCK_LEN), random.reshape(BLOCKS, BLOCK_LEN), at, at_inside,
            scales_ptr, minimums_ptr, tensor_scale, table_ptr, lowest, highest, max_value,
            ELEMENT, ROUNDING, SCALE, MINIMUM, RULE, SAYS_NAN, HAS_TENSOR_SCALE, MASKED,
        )  # fmt: skip
        if STORES_CODES:
            store_shared(scales_ptr, at, scale, at_inside, SCALE)
            if MINIMUM != NONE:
                store_shared(minimums_ptr, at, minimum, at_inside, MINIMUM)
            codes = codes.reshape(TILE)
        else:
            values = decode_blocks(
                codes, scale, minimum, tensor_scale, table_ptr, ELEMENT, SCALE, MINIMUM, HAS_TENSOR_SCALE
            ).reshape(TILE)
    else:
        codes, past = encode_values(x, random, table_ptr, lowest, highest, ELEMENT, ROUNDING)
        if not STORES_CODES:
            values = decode_values(codes, table_ptr, ELEMENT)
            if not SAYS_NAN:
                values = tl.where(past, as_float((as_bits(x) & -2147483648) | INF_BITS), values)
            values = tl.where(x != x, x, values)
    if STORES_CODES:
        if MASKED:
            codes = tl.where(inside, codes, 0)
        code_start = row * row_bytes + tile * (TILE * ELEMENT[1] // 8)
        num_bytes = row_bytes - tile * (TILE * ELEMENT[1] // 8)
        store_codes(out_ptr + code_start, codes, num_bytes, ELEMENT[1], TILE, MASKED)
    else:
        store_values(out_ptr + start, values, inside, MASKED)


@triton.jit
def decode_kernel(
    codes_ptr, out_ptr, scales_ptr, minimums_ptr, tensor_scale_ptr, table_ptr, first_tile, tiles_per_row, cols, row_bytes, blocks_per_row,
    ELEMENT: tl.constexpr, BLOCK_LEN: tl.constexpr, SCALE: tl.constexpr, MINIMUM: tl.constexpr, HAS_TENSOR_SCALE: tl.constexpr,
    ONE_ROW: tl.constexpr, MASKED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Decode one tile of a packed tensor from codes, scales and minimums, and store its values."""
    row, tile = place(first_tile, tiles_per_row, ONE_ROW)
    code_start = row * row_bytes + tile * (TILE * ELEMENT[1] // 8)
    codes = load_codes(codes_ptr + code_start, row_bytes - tile * (TILE * ELEMENT[1] // 8), ELEMENT[1], TILE, MASKED)
    if BLOCK_LEN > 0:
        BLOCKS: tl.constexpr = TILE // BLOCK_LEN
        at = row * blocks_per_row + tile * BLOCKS + tl.arange(0, BLOCKS)
        at_inside = tile * BLOCKS + tl.arange(0, BLOCKS) < blocks_per_row
        scale = load_shared(scales_ptr, at, at_inside, SCALE)
        minimum = load_shared(minimums_ptr, at, at_inside, MINIMUM) if MINIMUM != NONE else scale
        tensor_scale = tl.load(tensor_scale_ptr) if HAS_TENSOR_SCALE else 1.0
        codes = codes.reshape(BLOCKS, BLOCK_LEN)
        values = decode_blocks(codes, scale, minimum, tensor_scale, table_ptr, ELEMENT, SCALE, MINIMUM, HAS_TENSOR_SCALE).reshape(
            TILE
        )
    else:
        values = decode_values(codes, table_ptr, ELEMENT)
    left = tl.minimum(cols - tile * TILE, TILE).to(tl.int32)
    store_values(out_ptr + row * cols + tile * TILE, values, tl.arange(0, TILE) < left, MASKED)


@triton.jit
def largest_finite_kernel(x_ptr, out_ptr, numel, TILE: tl.constexpr):
    """Raise the float32 at `out_ptr` to the largest finite |x| of a tile, if that is larger.

    Bits of numbers >= 0 are ordered like integers, so an atomic maximum of integers does it.
    """
    offsets = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    a = as_bits(load_values(x_ptr, offsets, offsets < numel, True)) & 0x7FFFFFFF
    tl.atomic_max(out_ptr, tl.max(tl.where(a < INF_BITS, a, 0), 0))
