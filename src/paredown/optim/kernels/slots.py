"""Device functions load, encode and store a tile of a slot, which is a weight, moment or gradient.

Loaded tiles are float32 (NB, BLOCK). SLOT is a compile-time tuple, made in `launch.py`; ELEMENT is that of `codec/kernels/numbers.py`:

    0 storage  1 rounding  2 roots  3 scale  4 is_sticky  5 max_value  6 half of a step in a binade of 1  7 0.2 max_value  8 1 / max_value
"""

from __future__ import annotations

import triton
import triton.language as tl

from paredown.codec.kernels.numbers import (
    E8M0,
    FP32,
    INF_BITS,
    INT,
    NEAREST_EVEN,
    STOCHASTIC,
    UINT,
    as_bits,
    as_float,
    decode_values,
    encode_covered,
    encode_grid,
    inverse_scale,
    load_scale,
    store_scale,
)
from paredown.codec.kernels.pack import INTERPRETED, nan_max
from paredown.optim.kernels.arithmetic import RUN, USES_PTX, expanded, fused, load_2d, load_scales, places, reciprocal, store_2d

ABSENT = tl.constexpr(0)
BLOCKS = tl.constexpr(1)
PLAIN_FP32 = tl.constexpr(2)
PLAIN_BF16 = tl.constexpr(3)
PLAIN_FP16 = tl.constexpr(4)

SMALLEST_STICKY_CODE = tl.constexpr(27)


# --- reading ----------------------------------------------------------------------------------------------------------


@triton.jit
def shifted_bytes(packed, FLIP: tl.constexpr):
    """Return 2^15 + (byte ^ FLIP) as float32 for each byte of `packed`, by writing bytes into the bits of floats.

    FLIP is the sign bit of signed codes, so that subtracting 2^15 + FLIP gives their values, and 0 for unsigned codes.
    """
    if USES_PTX:
        bits = tl.inline_asm_elementwise(
            f"""{{ .reg .b32 t; xor.b32 t, $4, {FLIP * 0x01010101}; prmt.b32 $0, t, 0x47000000, 0x7404;
            prmt.b32 $1, t, 0x47000000, 0x7414; prmt.b32 $2, t, 0x47000000, 0x7424; prmt.b32 $3, t, 0x47000000, 0x7434; }}""",
            "=r,=r,=r,=r,r", [packed], tl.int32, True, 4,
        )  # fmt: skip
    else:
        bits = ((packed.to(tl.int32) ^ FLIP) << 8) | 0x47000000
    return as_float(bits)


@triton.jit
def shifted_halves(packed, FLIP: tl.constexpr):
    """Return what `shifted_bytes` returns, for the lower and for the upper 4 bits of each byte: two tensors of float32."""
    if USES_PTX:
        low, high = tl.inline_asm_elementwise(
            f"""{{ .reg .b32 s, t; xor.b32 t, $8, {FLIP * 0x11111111}; shr.b32 s, t, 4; and.b32 t, t, 0x0F0F0F0F; and.b32 s, s, 0x0F0F0F0F;
            prmt.b32 $0, t, 0x47000000, 0x7404; prmt.b32 $1, t, 0x47000000, 0x7414;
            prmt.b32 $2, t, 0x47000000, 0x7424; prmt.b32 $3, t, 0x47000000, 0x7434;
            prmt.b32 $4, s, 0x47000000, 0x7404; prmt.b32 $5, s, 0x47000000, 0x7414;
            prmt.b32 $6, s, 0x47000000, 0x7424; prmt.b32 $7, s, 0x47000000, 0x7434; }}""",
            "=r,=r,=r,=r,=r,=r,=r,=r,r", [packed], (tl.int32, tl.int32), True, 4,
        )  # fmt: skip
    else:
        both = packed.to(tl.int32)
        low = (((both & 15) ^ FLIP) << 8) | 0x47000000
        high = (((both >> 4) ^ FLIP) << 8) | 0x47000000
    return as_float(low), as_float(high)


@triton.jit
def load_blocks(codes_ptr, scale, at, IS_SHORT: tl.constexpr, ELEMENT: tl.constexpr, TILE: tl.constexpr):
    """Return the decoded values of a tile, code value * scale, as float32 (blocks, values of a block).

    IS_SHORT: the scale has at most 8 significant bits, so that one fused operation is exact.
    """
    WIDTH: tl.constexpr = ELEMENT[1]
    packed = load_2d(codes_ptr, at, 8 // WIDTH, TILE)
    if ELEMENT[0] == INT or ELEMENT[0] == UINT:
        FLIP: tl.constexpr = (1 << (WIDTH - 1)) if ELEMENT[0] == INT else 0
        if WIDTH == 4:
            low, high = shifted_halves(packed, FLIP)
            x = tl.join(low, high).reshape(TILE[1], TILE[2])
        else:
            x = shifted_bytes(packed, FLIP)
        if IS_SHORT:
            return tl.fma(x, scale[:, None], (scale * -(32768.0 + FLIP))[:, None])
        else:
            return (x - (32768.0 + FLIP)) * scale[:, None]
    else:
        codes = packed.to(tl.int32)
        if WIDTH == 4:
            codes = tl.join(codes & 15, codes >> 4).reshape(TILE[1], TILE[2])
        return decode_values(codes, codes_ptr, ELEMENT) * scale[:, None]


@triton.jit
def load_slot(
    codes_ptr, scales_ptr, factor, at, SLOT: tl.constexpr, ELEMENT: tl.constexpr, HAS_FACTOR: tl.constexpr, TILE: tl.constexpr
):
    """Return the values of a tile of a weight, moment or gradient, decoded, times `factor` if HAS_FACTOR, as float32.

    The result is (blocks, values of a block). SLOT and ELEMENT are constants that tell how the tensor is stored.
    """
    if SLOT[0] == BLOCKS:
        scale = load_scale(load_scales(scales_ptr, at, SLOT[3], TILE), SLOT[3])
        if HAS_FACTOR:
            scale = scale * factor
        is_short: tl.constexpr = not HAS_FACTOR and SLOT[3] != FP32
        x = load_blocks(codes_ptr, scale, at, is_short, ELEMENT, TILE)
    else:
        x = load_plain(codes_ptr, at, SLOT[0], TILE)
        if HAS_FACTOR:
            x = x * factor
    if SLOT[2] == 2:
        x = expanded(x)
    if SLOT[2] >= 1:
        x = x * x
    return x


@triton.jit
def load_plain(ptr, at, STORAGE: tl.constexpr, TILE: tl.constexpr):
    """Return the values of a tile of an unpacked tensor as float32, (blocks, values of a block).

    bf16 is loaded as int16, since a cast is wrong in Triton's interpreter below 2^-126.
    """
    if STORAGE == PLAIN_FP32:
        return load_2d(ptr.to(tl.pointer_type(tl.float32)), at, 1, TILE)
    elif STORAGE == PLAIN_BF16:
        bits = load_2d(ptr.to(tl.pointer_type(tl.int16)), at, 1, TILE)
        return as_float(bits.to(tl.int32) << 16)
    else:
        x = load_2d(ptr.to(tl.pointer_type(tl.float16)), at, 1, TILE)
        return x.to(tl.float32)


@triton.jit
def load_weight(
    codes_ptr, scales_ptr, residue_ptr, at, SLOT: tl.constexpr, ELEMENT: tl.constexpr, HAS_RESIDUE: tl.constexpr, TILE: tl.constexpr
):
    """Return the values of a tile of a weight as float32; if HAS_RESIDUE, with 8 more bits each from `residue_ptr`."""
    p = load_slot(codes_ptr, scales_ptr, 1.0, at, SLOT, ELEMENT, False, TILE)
    if HAS_RESIDUE:
        low = load_2d(residue_ptr.to(tl.pointer_type(tl.int8)), at, 1, TILE)
        p = as_float(as_bits(p) + (low.to(tl.int32) << 8))
    return p


# --- storing ----------------------------------------------------------------------------------------------------------


@triton.jit
def largest_of(x):
    """Return the largest magnitude of each block, a row of `x`; NaN if the block has a NaN."""
    return tl.reduce(tl.abs(x), 1, nan_max)


@triton.jit
def over_max_value(largest, SLOT: tl.constexpr):
    """Return largest / max_value of the format that SLOT describes, correctly rounded, but rounded down below 2^-126."""
    if INTERPRETED or (SLOT[3] == E8M0 and not SLOT[4]):
        return tl.div_rn(largest, tl.zeros_like(largest) + SLOT[5])
    else:
        quotient = largest * SLOT[8]
        return tl.fma(tl.fma(quotient, -SLOT[5], largest), SLOT[8], quotient)


@triton.jit
def cover_scale(largest, SLOT: tl.constexpr):
    """Return for each block the smallest scale, as it is stored, with which no value exceeds the largest value of a code."""
    return store_scale(over_max_value(largest, SLOT), SLOT[3])


@triton.jit
def sticky_scale(largest, old, SLOT: tl.constexpr):
    """Return the e8m0 scale of each of a weight's blocks after an update: `old` as long as it fits the `largest` value."""
    cover = tl.maximum((as_bits(over_max_value(largest, SLOT)) + 0x7FFFFF) >> 23, SMALLEST_STICKY_CODE)
    enough = largest >= SLOT[7] * load_scale(old, E8M0)
    return tl.where((largest == 0.0) | ((cover <= old) & enough), old, cover)


@triton.jit
def inverse_of(stored, SLOT: tl.constexpr):
    """Return 1 / scale as float32 for each stored scale; a scale of 0 gets some finite number."""
    if SLOT[4]:
        return as_float((254 - tl.maximum(stored, SMALLEST_STICKY_CODE)) << 23)
    elif SLOT[3] == E8M0:
        return inverse_scale(load_scale(stored, E8M0))
    else:
        scale = load_scale(stored, SLOT[3])
        return tl.where(scale > 0.0, reciprocal(scale), 0.0)


@triton.jit
def codes_of(x, stored, random, SLOT: tl.constexpr, ELEMENT: tl.constexpr):
    """Return the codes (int32) to which an update rounds `x`, in blocks whose new scales are `stored`, as bits or codes."""
    IS_INTEGER: tl.constexpr = ELEMENT[0] == INT or ELEMENT[0] == UINT
    if IS_INTEGER and (SLOT[1] == STOCHASTIC or SLOT[1] == NEAREST_EVEN):
        codes = whole_codes(x, inverse_of(stored, SLOT), random, SLOT, ELEMENT)
    else:
        codes = encoded(x, stored, random, SLOT, ELEMENT)
    if SLOT[2] >= 1:
        codes = tl.maximum(codes, 1)
    return codes & ((1 << ELEMENT[1]) - 1)


@triton.jit
def whole_codes(x, inverse, random, SLOT: tl.constexpr, ELEMENT: tl.constexpr):
    """Return x * inverse rounded to whole numbers, stochastically or to nearest, as SLOT says; `inverse` is 1 / scale."""
    if ELEMENT[0] == UINT and SLOT[2] == 0:
        x = tl.maximum(x, 0.0)
    if SLOT[1] == NEAREST_EVEN:
        y = fused(inverse[:, None], x, 12582912.0)  # 1.5 * 2^23: the addition rounds
        return as_bits(y) - 0x4B400000
    else:
        if SLOT[3] != E8M0:
            inverse = inverse * 0.9999997615814209  # 1 - 2^-22
        return floored(x, inverse[:, None], random)


@triton.jit
def floored(x, inverse, random):
    """Return floor(x * inverse + u), which is stochastic rounding: u in [0, 1) is the top 23 bits of `random` / 2^23.

    Rounding down twice gives the floor of the exact sum.
    """
    if USES_PTX:
        above = as_float(((random >> 9) + 0x3F800000).to(tl.int32, bitcast=True))  # 1 + u
        y = tl.inline_asm_elementwise(
            "{ .reg .f32 t; fma.rm.f32 t, $1, $2, $3; add.rm.f32 $0, t, 0f4B3FFFFF; }",  # 1.5 * 2^23 - 1
            "=f,f,f,f", [x, inverse, above], tl.float32, True, 1,
        )  # fmt: skip
        return as_bits(y) - 0x4B400000
    else:
        y = x.to(tl.float64) * inverse.to(tl.float64)
        floor = tl.floor(y)
        missing = 1.0 - (random >> 9).to(tl.float64) * 1.1920928955078125e-07
        return floor.to(tl.int32) + tl.where(y >= floor + missing, 1, 0)


@triton.jit
def encoded(x, stored, random, SLOT: tl.constexpr, ELEMENT: tl.constexpr):
    """Return the codes that the codec gives to `x` in blocks, with the scales `stored`, which must cover all values."""
    y = x * inverse_of(stored, SLOT)[:, None]
    if (ELEMENT[0] == INT or ELEMENT[0] == UINT) and SLOT[1] == STOCHASTIC:
        return stochastic(y, random, ELEMENT)
    else:
        return encode_covered(y, random, False, ELEMENT, SLOT[1])


@triton.jit
def stochastic(y, random, ELEMENT: tl.constexpr):
    """Return `y` rounded stochastically to whole numbers, as codes of an integer element, by the top bits of `random`.

    Magnitudes are rounded: below zero the shift rounds down, and adding the complement of the random bits gives the same.
    """
    KEPT: tl.constexpr = 30 - ELEMENT[2]
    steps = (y * (1 << KEPT)).to(tl.int32)
    if ELEMENT[0] == INT:
        random = random ^ (steps >> 31).to(tl.uint32, bitcast=True)
    codes = tl.minimum((steps + (random >> (32 - KEPT)).to(tl.int32)) >> KEPT, ELEMENT[5])
    if ELEMENT[0] == INT:
        codes = tl.maximum(codes, -ELEMENT[5])
    return codes & ((1 << ELEMENT[1]) - 1)


@triton.jit
def store_codes(ptr, codes, broken, at, WIDTH: tl.constexpr, TILE: tl.constexpr):
    """Store a tile's codes of WIDTH (8 or 4) bits, except for blocks that `broken` marks; padding at the end of a row gets 0."""
    if WIDTH == 4:
        if TILE[0] != RUN:
            _, inside = places(at, 1, TILE)
            codes = tl.where(inside, codes, 0)
        low, high = tl.split(codes.reshape(TILE[1], TILE[2] // 2, 2))
        codes = low | (high << 4)
    store_2d(ptr, codes.to(tl.uint8), broken, at, 8 // WIDTH, TILE)


@triton.jit
def rounded_plain(x, random, SLOT: tl.constexpr, ELEMENT: tl.constexpr):
    """Return the bits (int32) of a finite `x` after rounding to the dtype in which an unpacked tensor is stored."""
    bits = as_bits(x)
    if SLOT[0] == PLAIN_FP32:
        return bits
    elif SLOT[0] == PLAIN_BF16 and SLOT[1] == STOCHASTIC:
        return (bits + (random >> 16).to(tl.int32)) >> 16
    elif SLOT[0] == PLAIN_BF16 and SLOT[1] == NEAREST_EVEN:
        return (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    else:
        codes, _ = encode_grid(x, random, ELEMENT, SLOT[1])
        return codes


@triton.jit
def decoded_plain(x, bits, STORAGE: tl.constexpr):
    """Return as float32 what `rounded_plain` has rounded `x` to: for 16-bit dtypes the values of `bits`, otherwise `x`."""
    if STORAGE == PLAIN_FP32:
        return x
    elif STORAGE == PLAIN_BF16:
        return as_float(bits << 16)
    else:
        return bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def store_plain(ptr, x, bits, broken, at, STORAGE: tl.constexpr, TILE: tl.constexpr):
    """Store a tile of an unpacked tensor, `x` in float32 or `bits` in a 16-bit dtype, except for blocks that `broken` marks."""
    if STORAGE == PLAIN_FP32:
        store_2d(ptr.to(tl.pointer_type(tl.float32)), x, broken, at, 1, TILE)
    else:
        store_2d(ptr.to(tl.pointer_type(tl.int16)), bits.to(tl.int16), broken, at, 1, TILE)


@triton.jit
def half_step(p, scale, SLOT: tl.constexpr, ELEMENT: tl.constexpr):
    """Return half the distance between neighbouring values of a weight's format at each `p`; `scale` has the blocks' scales."""
    if SLOT[0] == BLOCKS:
        p = p * inverse_scale(scale)[:, None]
    binade = as_float(tl.maximum(as_bits(p) & INF_BITS, (ELEMENT[3] + 127) << 23)) * SLOT[6]
    return binade * scale[:, None] if SLOT[0] == BLOCKS else binade
