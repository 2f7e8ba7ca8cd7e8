"""Device functions turn a number into a code and back, choose scales and draw random bits, as `reference.py` defines.

Random bits are an argument wherever they are used, so each function can be compared with the reference bit for bit. Encoding
is integer arithmetic on the bits of a float32, since a cast to an 8-bit float is wrong in Triton's interpreter; division is the correctly
rounded one. ELEMENT is a compile-time tuple, made in `rows.py` from an `Element`:

    0 kind  1 width  2 mantissa_bits  3 min_exponent  4 subnormals  5 max_code  6 code for overflow, or -1 to saturate
    7 inf_code or -1  8 nan_code or -1  9 whether -0.0 exists  10 floor(log2 max_value)

    float32 bits   s eeeeeeee mmm|mmmmmmmmmmmmmmmmmmmm      e4m3: keep 3 mantissa bits
                                 + rrrrrrrrrrrrrrrrrrrr      stochastic: add the top random bits, drop what is below; a carry
    code                  e eeemmm                           walks into the exponent by itself
"""

from __future__ import annotations

import triton
import triton.language as tl

from paredown.formats import rounding as words

NEAREST_EVEN = tl.constexpr(0)
TOWARD_ZERO = tl.constexpr(1)
NEAREST_AWAY = tl.constexpr(2)
STOCHASTIC = tl.constexpr(3)

FLOAT = tl.constexpr(0)
INT = tl.constexpr(1)
UINT = tl.constexpr(2)
TABLE = tl.constexpr(3)

FP32 = tl.constexpr(0)
BF16 = tl.constexpr(1)
E8M0 = tl.constexpr(2)
E4M3 = tl.constexpr(3)

MULTIPLIER_1 = tl.constexpr(words.MULTIPLIER_1)
MULTIPLIER_2 = tl.constexpr(words.MULTIPLIER_2)
INDEX_STEP = tl.constexpr(words.INDEX_STEP)
KEY_SALT = tl.constexpr(words.KEY_SALTS[0])
HIGH_INDEX = tl.constexpr(words.HIGH_INDEX)

INF_BITS = tl.constexpr(0x7F800000)
NAN_BITS = tl.constexpr(0x7FC00000)
SMALLEST_SCALE_BITS = tl.constexpr(0x00800000)  # 2^-126


@triton.jit
def as_bits(x):
    return x.to(tl.int32, bitcast=True)


@triton.jit
def as_float(bits):
    return bits.to(tl.float32, bitcast=True)


# --- random bits ------------------------------------------------------------------------------------------------------


@triton.jit
def random_bits(index, k0, k1):
    """Return 32 random bits (uint32) for each index under the keys k0 and k1, by the hash of `formats/rounding.py`."""
    x = index.to(tl.uint32) * INDEX_STEP + k0
    x = (x ^ (x >> 16)) * MULTIPLIER_1
    return (x ^ (x >> 15) ^ k1) * MULTIPLIER_2


@triton.jit
def mixed(x):
    """Return the hash of each 32-bit integer that the function `formats.rounding.mix` returns."""
    x = x + KEY_SALT
    x = (x ^ (x >> 16)) * MULTIPLIER_1
    x = (x ^ (x >> 15)) * MULTIPLIER_2
    return x ^ (x >> 16)


@triton.jit
def stream_keys(k0, k1, step_ptr, STEP_IN_MEMORY: tl.constexpr):
    """Return the two keys of the random bits as uint32; if STEP_IN_MEMORY, hash the step at `step_ptr` into them."""
    k0 = k0.to(tl.uint32)
    k1 = k1.to(tl.uint32)
    if STEP_IN_MEMORY:
        step = tl.load(step_ptr).to(tl.uint32)
        k0 = mixed(k0 ^ step)
        k1 = mixed(k1 ^ step)
    return k0, k1


# --- one element ------------------------------------------------------------------------------------------------------


@triton.jit
def power_of_two(x, EXPONENT: tl.constexpr):
    """Return x * 2^EXPONENT, multiplied in two steps if 2^EXPONENT itself is too large for a float32."""
    if EXPONENT > 127:
        x = x * 18446744073709551616.0  # 2^64
        return x * as_float(tl.full((), (EXPONENT - 64 + 127) << 23, tl.int32))
    else:
        return x * as_float(tl.full((), (EXPONENT + 127) << 23, tl.int32))


@triton.jit
def top_bits(random, COUNT: tl.constexpr, ROUNDING: tl.constexpr):
    """Return what to add to a number before its COUNT lowest bits are dropped: random bits, one half, or 0, as ROUNDING says."""
    if ROUNDING == STOCHASTIC:
        if COUNT == 0:
            return tl.zeros_like(random).to(tl.int32)
        else:
            return (random >> (32 - COUNT)).to(tl.int32)
    elif ROUNDING == NEAREST_AWAY and COUNT > 0:
        return tl.full((), 1 << (COUNT - 1), tl.int32)
    else:
        return tl.full((), 0, tl.int32)


@triton.jit
def round_normal(a, random, MANTISSA_BITS: tl.constexpr, MIN_EXPONENT: tl.constexpr, ROUNDING: tl.constexpr):
    """Return the code to which a magnitude >= 2^MIN_EXPONENT, given as float32 bits `a`, rounds in a float element.

    The code may be above the element's largest one.
    """
    DROPPED: tl.constexpr = 23 - MANTISSA_BITS
    a = a - ((126 + MIN_EXPONENT) << 23)  # the exponent that the code has
    if DROPPED > 0:
        if ROUNDING == NEAREST_EVEN:
            a = a + ((1 << (DROPPED - 1)) - 1) + ((a >> DROPPED) & 1)
        else:
            a = a + top_bits(random, DROPPED, ROUNDING)
    return a >> DROPPED


@triton.jit
def round_subnormal(a, random, MANTISSA_BITS: tl.constexpr, MIN_EXPONENT: tl.constexpr, ROUNDING: tl.constexpr):
    """Return the code of a magnitude `a`, rounded to a multiple of 2^(MIN_EXPONENT - MANTISSA_BITS).

    `a` must be at most 2^MIN_EXPONENT; for larger values the result is undefined.
    """
    KEPT: tl.constexpr = 30 - MANTISSA_BITS
    if ROUNDING == NEAREST_EVEN:
        C: tl.constexpr = (MIN_EXPONENT + 23 - MANTISSA_BITS + 127) << 23
        return as_bits(a + as_float(tl.full((), C, tl.int32))) - C
    else:
        steps = power_of_two(a, 30 - MIN_EXPONENT).to(tl.int32)
        return (steps + top_bits(random, KEPT, ROUNDING)) >> KEPT


@triton.jit
def round_magnitude(y, random, ELEMENT: tl.constexpr, ROUNDING: tl.constexpr, COVERED: tl.constexpr):
    """Return the code to which |y| rounds in a float or integer element; it may be above the element's largest code.

    COVERED: the caller guarantees that |y| exceeds the element's largest value by rounding error at most.
    """
    MANTISSA_BITS: tl.constexpr = ELEMENT[2]
    MIN_EXPONENT: tl.constexpr = ELEMENT[3]
    SMALLEST: tl.constexpr = (MIN_EXPONENT + 127) << 23
    if ELEMENT[0] != FLOAT:  # integers are subnormal everywhere
        a = tl.abs(y)
        if not COVERED:
            a = as_float(tl.minimum(as_bits(a), SMALLEST))
        return round_subnormal(a, random, MANTISSA_BITS, MIN_EXPONENT, ROUNDING)
    else:
        a = as_bits(y) & 0x7FFFFFFF
        k = round_normal(a, random, MANTISSA_BITS, MIN_EXPONENT, ROUNDING)
        if MIN_EXPONENT != -126 or not ELEMENT[4]:  # else the steps are those of float32's own subnormals
            if ELEMENT[4]:
                small = round_subnormal(tl.abs(y), random, MANTISSA_BITS, MIN_EXPONENT, ROUNDING)
            else:
                small = round_subnormal(tl.abs(y), random, 0, MIN_EXPONENT, ROUNDING) << MANTISSA_BITS
            k = tl.where(a < SMALLEST, small, k)
        return k


@triton.jit
def encode_grid(y, random, ELEMENT: tl.constexpr, ROUNDING: tl.constexpr):
    """Return the codes (int32) of `y` in a float or integer element, and a mask of values past the element's largest one.

    The mask is False for NaN.
    """
    KIND: tl.constexpr = ELEMENT[0]
    MAX_CODE: tl.constexpr = ELEMENT[5]
    bits = as_bits(y)
    a = bits & 0x7FFFFFFF
    k = round_magnitude(y, random, ELEMENT, ROUNDING, False)
    past = k > (tl.where(bits < 0, 0, MAX_CODE) if KIND == UINT else MAX_CODE)
    if KIND == FLOAT:
        code = finish_float(k, bits, ELEMENT)
    elif KIND == INT:
        code = with_sign(tl.minimum(k, MAX_CODE), bits, ELEMENT)
    else:
        code = tl.where(bits < 0, 0, tl.minimum(k, MAX_CODE))
    return code, past & (a <= INF_BITS)


@triton.jit
def with_sign(k, bits, ELEMENT: tl.constexpr):
    """Return the code of a value, given the code `k` of its magnitude, and its float32 `bits`, from which the sign is taken.

    The sign is a bit, two's complement, or absent, as ELEMENT says.
    """
    WIDTH: tl.constexpr = ELEMENT[1]
    if ELEMENT[0] == FLOAT:
        code = k | ((bits >> (32 - WIDTH)) & (1 << (WIDTH - 1)))
        return code if ELEMENT[9] else tl.where(k == 0, 0, code)
    elif ELEMENT[0] == INT:
        return ((k ^ (bits >> 31)) - (bits >> 31)) & ((1 << WIDTH) - 1)
    else:
        return k


@triton.jit
def finish_float(k, bits, ELEMENT: tl.constexpr):
    """Return the code of a float: `k`, its magnitude's code, with the sign of `bits`, or the code of infinity or NaN.

    `bits` are those of the value as float32. A `k` past the largest code becomes infinity, NaN or the largest, as ELEMENT says.
    """
    MAX_CODE: tl.constexpr = ELEMENT[5]
    SPECIAL: tl.constexpr = ELEMENT[6]
    NAN_CODE: tl.constexpr = ELEMENT[8]
    FOLLOWS: tl.constexpr = SPECIAL == MAX_CODE + 1  # inf or NaN is what comes after the largest value
    code = with_sign(tl.minimum(k, SPECIAL if FOLLOWS else MAX_CODE), bits, ELEMENT)
    sign = (bits >> (32 - ELEMENT[1])) & (1 << (ELEMENT[1] - 1))
    if SPECIAL >= 0 and not FOLLOWS:
        code = tl.where(k > MAX_CODE, SPECIAL | sign, code)
    if NAN_CODE >= 0 and not (FOLLOWS and NAN_CODE == SPECIAL and ELEMENT[3] > -126):  # else NaN's k is large, and not wrapped
        code = tl.where((bits & 0x7FFFFFFF) > INF_BITS, NAN_CODE | sign, code)
    return code


@triton.jit
def encode_covered(y, random, HAS_MINIMUM: tl.constexpr, ELEMENT: tl.constexpr, ROUNDING: tl.constexpr):
    """Return the codes of values `y` that exceed the element's range by rounding error at most, since scales cover them.

    The code of NaN is undefined.
    """
    KIND: tl.constexpr = ELEMENT[0]
    if KIND == UINT and not HAS_MINIMUM:
        y = tl.maximum(y, 0.0)
    bits = as_bits(y)
    if KIND != FLOAT and ROUNDING == NEAREST_EVEN:  # the addition rounds, and the low bits are in two's complement
        return as_bits(y + 12582912.0) & ((1 << ELEMENT[1]) - 1)  # 1.5 * 2^23
    elif ROUNDING == NEAREST_EVEN and ELEMENT[4] and ELEMENT[2] >= 1 and ELEMENT[10] + 24 - ELEMENT[2] <= 127:
        return with_sign(nearest_by_adding(bits, ELEMENT[2], ELEMENT[3]), bits, ELEMENT)
    else:
        k = round_magnitude(y, random, ELEMENT, ROUNDING, True)
        return with_sign(tl.minimum(k, ELEMENT[5]) if ROUNDING == STOCHASTIC else k, bits, ELEMENT)


@triton.jit
def nearest_by_adding(bits, MANTISSA_BITS: tl.constexpr, MIN_EXPONENT: tl.constexpr):
    """Return the code of a magnitude, given as float32 bits, rounded to nearest_even by adding a large power of two."""
    DROPPED: tl.constexpr = 23 - MANTISSA_BITS
    SMALLEST: tl.constexpr = (MIN_EXPONENT + 127) << 23
    c = tl.maximum(bits & INF_BITS, SMALLEST) + (DROPPED << 23)
    steps = as_bits(tl.abs(as_float(bits)) + as_float(c)) - c
    return steps + (c >> DROPPED) - (((DROPPED << 23) + SMALLEST) >> DROPPED)


@triton.jit
def encode_table(y, random, table_ptr, lowest, highest, ELEMENT: tl.constexpr, ROUNDING: tl.constexpr):
    """Return the codes of `y` in an element that is a table of values, and a mask of values past the table's ends.

    `table_ptr`: 2^WIDTH thresholds, then the values of all codes; a code is the number of thresholds that a value reaches. Numbers from
    `lowest` to `highest` round to a value of the table.
    """
    WIDTH: tl.constexpr = ELEMENT[1]
    MAX_CODE: tl.constexpr = ELEMENT[5]
    code = tl.zeros_like(as_bits(y))
    for i in tl.static_range(WIDTH):
        probe = code + (1 << (WIDTH - 1 - i))
        threshold = tl.load(table_ptr + tl.minimum(probe, MAX_CODE) - 1)
        code = tl.where((probe <= MAX_CODE) & (y >= threshold), probe, code)
    if ROUNDING == STOCHASTIC:
        code = tl.minimum(code, MAX_CODE - 1)
        below = tl.load(table_ptr + (1 << WIDTH) + code)
        above = tl.load(table_ptr + (1 << WIDTH) + code + 1)
        held = tl.where(y > below, tl.minimum(y, above), below)
        steps = (tl.div_rn(held - below, above - below) * 2147483648.0).to(tl.uint32)
        code = tl.where(steps + (random >> 1) >= 2147483648, code + 1, code)
    past = (y < lowest) | (y > highest)
    if ELEMENT[6] >= 0:
        code = tl.where(past, ELEMENT[6], code)
    if ELEMENT[8] >= 0:
        code = tl.where(y != y, ELEMENT[8], code)
    return code, past


@triton.jit
def encode_values(y, random, table_ptr, lowest, highest, ELEMENT: tl.constexpr, ROUNDING: tl.constexpr):
    """Return the codes (int32) of `y` in any element, and a mask of values past the element's largest one.

    `table_ptr`, `lowest` and `highest` are read for elements that are tables.
    """
    if ELEMENT[0] == TABLE:
        return encode_table(y, random, table_ptr, lowest, highest, ELEMENT, ROUNDING)
    else:
        return encode_grid(y, random, ELEMENT, ROUNDING)


@triton.jit
def decode_values(code, table_ptr, ELEMENT: tl.constexpr):
    """Return the float32 value of each int32 code; `table_ptr` has the values of an element that is a table."""
    KIND: tl.constexpr = ELEMENT[0]
    SIGN: tl.constexpr = 1 << (ELEMENT[1] - 1)
    if KIND == TABLE:
        return tl.load(table_ptr + 2 * SIGN + code)
    elif KIND == INT:  # 2^23 + n has n as its last bits
        return as_float((code ^ SIGN) | 0x4B000000) - (8388608.0 + SIGN)
    elif KIND == UINT:
        return as_float(code | 0x4B000000) - 8388608.0
    else:
        return decode_float(code, ELEMENT)


@triton.jit
def decode_float(code, ELEMENT: tl.constexpr):
    WIDTH: tl.constexpr = ELEMENT[1]
    MANTISSA_BITS: tl.constexpr = ELEMENT[2]
    MIN_EXPONENT: tl.constexpr = ELEMENT[3]
    INF_CODE: tl.constexpr = ELEMENT[7]
    NAN_CODE: tl.constexpr = ELEMENT[8]
    magnitude = code & ((1 << (WIDTH - 1)) - 1)
    sign = (code << (32 - WIDTH)) & -2147483648
    value = as_float(magnitude << (23 - MANTISSA_BITS))  # as if the bias were float32's
    if MIN_EXPONENT != -126:
        value = power_of_two(value, MIN_EXPONENT + 126)
    if not ELEMENT[4]:
        value = tl.where(magnitude < (1 << MANTISSA_BITS), 0.0, value)
    if INF_CODE >= 0 and MIN_EXPONENT != -126:  # at -126 the codes of inf and NaN are those of float32
        value = tl.where(magnitude >= INF_CODE, as_float(tl.where(magnitude == INF_CODE, INF_BITS, NAN_BITS)), value)
    value = as_float(as_bits(value) | sign)
    if INF_CODE < 0 and NAN_CODE >= 0:
        is_nan = magnitude == NAN_CODE if ELEMENT[9] else code == NAN_CODE
        value = tl.where(is_nan, as_float(tl.full((), NAN_BITS, tl.int32)), value)
    return value


# --- scales -----------------------------------------------------------------------------------------------------------


@triton.jit
def store_scale(scale, SCALE: tl.constexpr):
    """Return a float32 scale >= 0, rounded up to the type SCALE, as it is stored: float32 bits, bf16 bits, or a code.

    A scale past the largest e8m0 or bf16 becomes inf or NaN.
    """
    bits = as_bits(scale)
    if SCALE == E8M0:
        return tl.where(bits <= 0x00400000, 0, (bits + 0x7FFFFF) >> 23)
    elif SCALE == E4M3:
        normal = ((bits + 0xFFFFF) >> 20) - (120 << 3)
        small = tl.ceil(tl.minimum(scale, 0.015625) * 512.0).to(tl.int32)
        small = tl.where(bits > 0, tl.maximum(small, 1), 0)  # ceil of a subnormal is 0 on a GPU
        return tl.minimum(tl.where(bits < 0x3C800000, small, normal), 126)
    else:
        bits = tl.where(bits > 0, tl.maximum(bits, SMALLEST_SCALE_BITS), bits)
        if SCALE == BF16:
            return (bits + 0xFFFF) >> 16
        else:
            return bits


@triton.jit
def load_scale(stored, SCALE: tl.constexpr):
    """Return the float32 value of a stored scale: float32 bits, bf16 bits, or a code, as SCALE says."""
    if SCALE == E8M0:
        bits = tl.where(stored == 0, 0x00400000, stored << 23)
        return as_float(tl.where(stored == 255, NAN_BITS, bits))
    elif SCALE == E4M3:
        value = power_of_two(as_float(stored << 20), 120)
        return tl.where(stored == 127, as_float(tl.full((), NAN_BITS, tl.int32)), value)
    elif SCALE == BF16:
        return as_float(stored << 16)
    else:
        return as_float(stored)


@triton.jit
def nan_scale(SCALE: tl.constexpr):
    """Return NaN as a scale of the type SCALE stores it: float32 bits, bf16 bits, or a code."""
    if SCALE == E8M0:
        return 255
    elif SCALE == E4M3:
        return 127
    elif SCALE == BF16:
        return 0x7FC0
    else:
        return 0x7FC00000


@triton.jit
def inverse_scale(scale):
    """Return 1 / scale; 0 where that is not finite, as for a scale of 0, and for a scale of NaN."""
    fine = scale > 2.938735877055719e-39  # 2^-128
    return tl.where(fine, tl.div_rn(tl.zeros_like(scale) + 1.0, tl.where(fine, scale, 1.0)), 0.0)


@triton.jit
def rounded_down_bf16(x):
    """Return the largest bf16 (as 16 bits) that is at most the float32 x."""
    bits = as_bits(x)
    return tl.where(bits < 0, (((bits & 0x7FFFFFFF) + 0xFFFF) >> 16) | 0x8000, bits >> 16)
