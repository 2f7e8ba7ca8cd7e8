"""`encode` and `decode` are loops that numba compiles, with the bits of `reference.py` and without scratch tensors.

A row is read in tiles of whole blocks that fit the first cache if possible, and each step below is a loop over a tile that LLVM turns into
vector instructions:

    load  ->  scales of the tile  ->  (x - minimum) * inverse  ->  codes  ->  pack into bytes, or decode into values
    a block in which a value has no code gets scale NaN, and its tile is encoded again, with codes 0 there

Integers are rounded by one addition, y + 1.5 * 2^23, or from floor(|y| * 2^R) + r. Floats are rounded as 64-bit floats: read as an integer,
the bits of a normal number count steps, so that adding r below the last kept bit and shifting is the rounding, carry into the exponent
included; numbers below the smallest normal one have fixed steps, as integers do. R = 30 - mantissa_bits, and r is 0, the half of a step, or
random bits. Each floating-point operation is rounded on its own (no fastmath, no fused multiply-add).

Arguments are the tensors' memory as flat arrays, and numbers in the tuples below, so that one compilation serves all formats and dtypes; it
is kept on disk, beside this file or in the user's cache folder. numba is imported with this module: `cpu.py` does that on first use.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import wraps
from typing import Any, NamedTuple

import numpy as np
from numba import njit

from paredown.formats import rounding as hashing

FLOAT32, BFLOAT16, FLOAT16, BOOL = range(4)  # dtypes of values
INTEGER, GRID, TABLE = range(3)  # how codes are found
NEAREST_EVEN, TOWARD_ZERO, NEAREST_AWAY, STOCHASTIC = range(4)
COVER, OCP, GIVEN = range(3)  # rules of scales
NO_SCALE, FP32, BF16, CODE = range(4)  # what scales and minimums are stored as
TILE = 2048  # values: 60 KiB of buffers

F, U, S = np.float32, np.uint32, np.int32  # the last one signed
INF_BITS, MANTISSA = S(0x7F800000), S(0x7FFFFFFF)
MAGIC = F(1.5 * 2**23)
INF, NAN, ZERO = F(np.inf), F(np.nan), F(0)
SMALLEST_SCALE = F(2.0**-126)
LARGEST, LARGEST_FLOAT16 = F(np.finfo(np.float32).max), F(65504)
STEP, MULTIPLIER_1, MULTIPLIER_2 = U(hashing.INDEX_STEP), U(hashing.MULTIPLIER_1), U(hashing.MULTIPLIER_2)
HIGH_INDEX, WORD = U(hashing.HIGH_INDEX), np.uint64(hashing.WORD)

OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy"}
inner: Any = njit(**OPTIONS)


def entry(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function` as one that numba compiles at its first call, and keeps on disk if a folder can be written.

    After a call that compiled, garbage is collected: numba keeps its compiler's errors in reference cycles, whose tracebacks keep the
    tensors of all callers alive.
    """
    try:
        compiled: Any = njit(cache=True, **OPTIONS)(function)
    except RuntimeError:  # numba: "cannot cache function: no locator available"
        compiled = njit(**OPTIONS)(function)

    @wraps(function)
    def run(*args: Any) -> Any:
        known = len(compiled.overloads)
        result = compiled(*args)
        if len(compiled.overloads) > known:
            gc.collect()
        return result

    return run


class Call(NamedTuple):
    """What differs from call to call: shape, dtype of the values, keys of the random bits, index of the first value."""

    rows: int
    cols: int
    dtype: int
    tensor_scale: Any  # float32; 1 where there is none
    k0: int
    k1: int
    first_index: int


class Parts(NamedTuple):
    """The memory of a packed tensor's codes, scales and minimums as flat uint8 arrays; each row of codes starts at a byte."""

    codes: Any
    scales: Any
    minimums: Any


class Tables(NamedTuple):
    """Arrays that loops index by codes: the values of an element of at most 8 bits, and those of a scale that is a code.

    For an element that is a table of values, a value's code is the sum of `signs` over the `thresholds` that the value reaches. A sign is
    1, or 2^32 - 1 for -1, which toward_zero needs in a table without 0.
    """

    values: Any
    scales: Any
    thresholds: Any
    signs: Any


INTEGERS = (
    *("kind", "width", "mantissa_bits", "min_exponent"),
    "sub_bits",  # mantissa bits below the smallest normal value
    *("max_code", "min_code", "sign_code"),
    *("inf_code", "nan_code"),  # -1 where there is none
    "special",  # the code of values past the largest; -1 if they saturate or have none
    "is_nonfinite",  # whether values past the largest have no code
    *("has_minus_zero", "is_float"),
    *("rounding", "rule", "block"),
    "scale",  # what scales are stored as
    *("scale_mantissa_bits", "scale_offset", "scale_hole", "scale_most", "scale_nan"),  # how a scale becomes a code
    *("has_tensor_scale", "minimum"),
    "max_exponent",
)
FLOATS = ("max_value", "min_value", "lowest", "highest")  # the last two: the ends of the range that rounds to values of a table
DOUBLES = ("scale_smallest", "scale_steps")  # the smallest normal scale, and steps per unit below it
FIELDS = {np.int64: INTEGERS, np.float32: FLOATS, np.float64: DOUBLES}
NUMBERS = np.dtype([(name, dtype) for dtype, names in FIELDS.items() for name in names])  # an encoding
NAMES = (*INTEGERS, *FLOATS, *DOUBLES)


# --- bits of one number ----------------------------------------------------------------------------------------------


@inner
def from_bits(word):
    return np.uint32(word).view(np.float32)


@inner
def bits_of(x):
    return np.float32(x).view(np.uint32)


@inner
def wide_bits_of(x):
    return np.float64(x).view(np.int64)


@inner
def from_wide_bits(word):
    return np.int64(word).view(np.float64)


# --- values of a tile -------------------------------------------------------------------------------------------------


@inner
def load(x, dtype, start, y):
    """Write len(y) values into `y` as float32, from the bytes `x` of a tensor of this `dtype`, beginning at value `start`."""
    count = len(y)
    if dtype == FLOAT32:
        floats = x.view(np.float32)[start : start + count]
        for i in range(count):
            y[i] = floats[i]
        return
    words, bits = x.view(np.uint16)[start : start + count], y.view(np.uint32)
    if dtype == BFLOAT16:
        for i in range(count):
            bits[i] = U(U(words[i]) << U(16))
        return
    for i in range(count):
        word = U(words[i])
        magnitude = U(word & U(0x7FFF))
        normal = U(U(magnitude << U(13)) + U(112 << 23))
        special = U(U(magnitude << U(13)) | U(0x7F800000))
        subnormal = bits_of(F(F(magnitude) * F(2.0**-24)))
        value = subnormal if magnitude < U(0x400) else special if magnitude >= U(0x7C00) else normal
        bits[i] = U(value | U(U(word & U(0x8000)) << U(16)))


@inner
def store(y, out, dtype, start):
    """Write `y`, rounded to `dtype`, into the bytes `out` of a tensor, beginning at value `start`; finite values stay finite."""
    count = len(y)
    if dtype == FLOAT32:
        floats = out.view(np.float32)[start : start + count]
        for i in range(count):
            floats[i] = y[i]
        return
    words, bits = out.view(np.uint16)[start : start + count], y.view(np.uint32)
    if dtype == BFLOAT16:
        for i in range(count):
            bit = bits[i]
            rounded = U(U(bit + U(0x7FFF) + U(U(bit >> U(16)) & U(1))) >> U(16))
            words[i] = np.uint16(rounded if y[i] == y[i] else U(0x7FC0))
        return
    for i in range(count):
        sign = U(U(bits[i] >> U(16)) & U(0x8000))
        a = abs(y[i])
        finite = a if a < LARGEST_FLOAT16 else LARGEST_FLOAT16
        bit = bits_of(finite)
        normal = U(U(U(bit + U(0xFFF) + U(U(bit >> U(13)) & U(1))) >> U(13)) - U(112 << 10))
        subnormal = U(S(F(F(F(finite * F(2.0**24)) + MAGIC) - MAGIC)))
        word = subnormal if finite < F(2.0**-14) else normal
        word = U(0x7C00) if a == INF else word
        words[i] = np.uint16(U(sign | (word if a == a else U(0x7E00))))


@inner
def fill_bits(bits, call, place):
    """Fill `bits` with the random bits of as many adjacent values of a tensor, the first of which has the index `place`."""
    done, count = 0, len(bits)
    while done < count:
        index = np.uint64(call.first_index + place + done)
        high = U(U(index >> np.uint64(32)) * HIGH_INDEX)
        key = U(U(call.k1) ^ U(U(high ^ U(high >> U(15))) * MULTIPLIER_2))
        low = U(index & WORD)
        part = bits[done : done + min(count - done, (1 << 32) - np.int64(low))]
        start = U(U(low * STEP) + U(call.k0))
        for i in range(len(part)):
            x = U(U(U(i) * STEP) + start)
            x = U(U(x ^ U(x >> U(16))) * MULTIPLIER_1)
            part[i] = U(U(U(x ^ U(x >> U(15))) ^ key) * MULTIPLIER_2)
        done += len(part)


# --- codes of a tile --------------------------------------------------------------------------------------------------


@inner
def integer_codes(y, bits, codes, lost, n):
    """Write the codes to which `y` rounds in an integer element, and return how many values have no code.

    `n` has the numbers of the encoding, `bits` the random bits; `lost` gets 1 for each value without a code.
    """
    mask, nonfinite = S((1 << n.width) - 1), np.uint8(n.is_nonfinite)
    low, high = n.min_value, n.max_value
    below, above = F(low - F(1)), F(high + F(1))
    if n.rounding == NEAREST_EVEN:
        for i in range(len(y)):
            v = y[i]
            v = v if v < above else above
            v = v if v > below else below
            v = F(F(v + MAGIC) - MAGIC)
            lost[i] = np.uint8(np.uint8((v > high) | (v < low)) & nonfinite) | np.uint8(y[i] != y[i])
            v = v if v < high else high
            v = v if v > low else low
            codes[i] = U(S(v if y[i] == y[i] else ZERO) & mask)
    else:
        kept, limit = U(30 - n.mantissa_bits), F(2.0**n.mantissa_bits)
        scale, shift = F(2.0 ** (30 - n.mantissa_bits)), U(2 + n.mantissa_bits)
        largest, smallest = S(n.max_code), S(n.min_code)
        for i in range(len(y)):
            v = abs(y[i])
            v = v if v < limit else limit
            v = v if y[i] == y[i] else ZERO
            steps = U(U(S(F(v * scale))) + U(bits[i] >> shift))
            code, negative = S(steps >> kept), y[i] < ZERO
            end = smallest if negative else largest
            lost[i] = np.uint8(np.uint8(code > end) & nonfinite) | np.uint8(y[i] != y[i])
            code = code if code < end else end
            codes[i] = U(S(-code if negative else code) & mask)
    return num_lost(lost)


@inner
def num_lost(lost):
    count = 0
    for i in range(len(lost)):
        count += lost[i]
    return count


@inner
def grid_codes(y, bits, codes, lost, n):
    """Write the codes to which `y` rounds in a float element, and return how many values have no code.

    `n` has the numbers of the encoding, `bits` the random bits; `lost` gets 1 for each value without a code.
    """
    m, dropped = n.mantissa_bits, 52 - n.mantissa_bits
    offset, below_half = (n.min_exponent + 1022) << m, (1 << (dropped - 1)) - 1
    smallest, kept, shift = 2.0**n.min_exponent, 30 - n.sub_bits, 2 + n.sub_bits
    to_nearest, to_steps, hole = 2.0 ** (n.sub_bits - n.min_exponent), 2.0 ** (30 - n.min_exponent), m - n.sub_bits
    largest, least, sign_code, minus_zero = n.max_code, n.min_code, n.sign_code, n.sign_code if n.has_minus_zero else 0
    special, nan_code, mask, is_float = n.special, n.nan_code, (1 << n.width) - 1, n.is_float != 0
    past_is_lost, nan_is_lost = np.uint8(n.is_nonfinite), np.uint8(n.nan_code < 0)
    if n.rounding == NEAREST_EVEN:
        for i in range(len(y)):
            a = magnitude(y[i])
            ab, near = wide_bits_of(a), min(a, smallest)
            odd = ((ab >> dropped) - offset) & 1
            normal = ((ab + below_half + odd) >> dropped) - offset
            subnormal = np.int64(np.rint(near * to_nearest)) << hole
            codes[i] = U(normal if a >= smallest else subnormal)
    else:
        for i in range(len(y)):
            a, word = magnitude(y[i]), np.int64(bits[i])
            normal = ((wide_bits_of(a) + ((word >> (2 + m)) << 22)) >> dropped) - offset
            subnormal = ((np.int64(min(a, smallest) * to_steps) + (word >> shift)) >> kept) << hole
            codes[i] = U(normal if a >= smallest else subnormal)
    for i in range(len(y)):
        v, is_nan, negative, k = y[i], y[i] != y[i], bits_of(y[i]) >> U(31) > 0, np.int64(codes[i])
        limit = least if negative else largest
        past = (k > limit) | (abs(v) == INF)
        k = limit if past else k
        sign = sign_code if negative else 0
        code = k | (minus_zero if k == 0 else sign_code) if negative and is_float else k
        code = -code & mask if negative and not is_float else code
        code = special | sign if past and special >= 0 else code
        codes[i] = U(nan_code | sign if is_nan and nan_code >= 0 else code)
        lost[i] = (np.uint8(is_nan) & nan_is_lost) | (np.uint8(past) & past_is_lost)
    return num_lost(lost)


@inner
def magnitude(v):
    """Return |v| as a float64, but at most the largest float32, and 0 for NaN."""
    a = abs(v)
    a = a if a < LARGEST else LARGEST
    return np.float64(a if v == v else ZERO)


@inner
def table_codes(y, bits, codes, lost, n, tables):
    """Write the codes to which `y` rounds in a table of values, and return how many values have no code.

    A code is the number of thresholds that the value reaches, counted without branches. `lost` gets 1 for each value without a code.
    """
    last, lowest, highest, special, nan_code = n.max_code, n.lowest, n.highest, n.special, n.nan_code
    past_is_lost, nan_is_lost = np.uint8(n.is_nonfinite), np.uint8(n.nan_code < 0)
    codes[:] = U(0)
    for place in range(len(tables.thresholds)):
        threshold, sign = tables.thresholds[place], tables.signs[place]
        for i in range(len(y)):
            codes[i] += sign if (y[i] if y[i] == y[i] else ZERO) >= threshold else U(0)
    if n.rounding == STOCHASTIC:
        for i in range(len(y)):
            v = min(max(y[i] if y[i] == y[i] else ZERO, tables.values[0]), tables.values[last])
            below, above = tables.values[codes[i]], tables.values[codes[i] + U(1)]
            share = F(F(v - below) / F(above - below))
            codes[i] += U(np.int64(F(share * F(2.0**31))) + np.int64(bits[i] >> U(1)) >= 1 << 31)
    for i in range(len(y)):
        is_nan, past = y[i] != y[i], (y[i] < lowest) | (y[i] > highest)
        code = special if past and special >= 0 else np.int64(codes[i])
        codes[i] = U(nan_code if is_nan and nan_code >= 0 else code)
        lost[i] = (np.uint8(is_nan) & nan_is_lost) | (np.uint8(past) & past_is_lost)
    return num_lost(lost)


@inner
def codes_of(y, bits, codes, lost, n, tables):
    """Write the codes to which `y` rounds in any element, mark values without a code in `lost`, and return their number."""
    if n.kind == INTEGER:
        return integer_codes(y, bits, codes, lost, n)
    if n.kind == GRID:
        return grid_codes(y, bits, codes, lost, n)
    return table_codes(y, bits, codes, lost, n, tables)


@inner
def values_of(codes, y, n, values):
    """Write into `y` the float32 that each code stands for; `values` has them by code for elements of at most 8 bits."""
    if n.width <= 8:
        for i in range(len(y)):
            y[i] = values[codes[i] & U(255)]
        return
    if not n.is_float:
        largest, range_ = n.max_code, 1 << n.width
        for i in range(len(y)):
            code = np.int64(codes[i])
            y[i] = F(code - range_ if code > largest else code)
        return
    m, least = n.mantissa_bits, 2.0 ** (n.min_exponent - n.mantissa_bits) if n.sub_bits == n.mantissa_bits else 0.0
    sign_code, inf_code, nan_code = n.sign_code, n.inf_code, n.nan_code
    to_double, bias = 52 - m, (n.min_exponent + 1022) << 52
    for i in range(len(y)):
        code = np.int64(codes[i])
        a, is_negative = code & (sign_code - 1), code & sign_code != 0
        value = from_wide_bits((a << to_double) + bias) if a >> m else a * least
        if inf_code >= 0:
            value = value if a < inf_code else np.inf if a == inf_code else np.nan
        elif nan_code >= 0:
            value = np.nan if (code if nan_code == sign_code else a) == nan_code else value
        y[i] = F(-value if is_negative else value)


# --- bytes ------------------------------------------------------------------------------------------------------------


@inner
def pack(codes, width, out):
    """Write codes of `width` bits next to each other into the bytes `out`, each byte filled from its lowest bit on."""
    count = len(codes)
    if width == 8:
        for i in range(count):
            out[i] = np.uint8(codes[i])
        return
    if width == 16:
        words = out.view(np.uint16)
        for i in range(count):
            words[i] = np.uint16(codes[i])
        return
    whole = 0
    if width == 4:
        whole = count // 2
        for i in range(whole):
            out[i] = np.uint8(codes[2 * i] | U(codes[2 * i + 1] << U(4)))
    elif width == 2:
        whole = count // 4
        for i in range(whole):
            j = 4 * i
            low, high = U(codes[j] | U(codes[j + 1] << U(2))), U(codes[j + 2] | U(codes[j + 3] << U(2)))
            out[i] = np.uint8(low | U(high << U(4)))
    word, num_bits, place = np.uint64(0), 0, whole
    for i in range(whole * 8 // width, count):
        word |= np.uint64(codes[i]) << np.uint64(num_bits)
        num_bits += width
        while num_bits >= 8:
            out[place] = np.uint8(word & np.uint64(255))
            word >>= np.uint64(8)
            num_bits -= 8
            place += 1
    if num_bits:
        out[place] = np.uint8(word)


@inner
def unpack(packed, width, codes):
    count = len(codes)
    if width == 8:
        for i in range(count):
            codes[i] = packed[i]
        return
    if width == 16:
        words = packed.view(np.uint16)
        for i in range(count):
            codes[i] = words[i]
        return
    whole = 0
    if width == 4:
        whole = count // 2
        for i in range(whole):
            codes[2 * i], codes[2 * i + 1] = packed[i] & 15, packed[i] >> 4
    elif width == 2:
        whole = count // 4
        for i in range(whole):
            byte, j = packed[i], 4 * i
            codes[j], codes[j + 1] = byte & 3, (byte >> 2) & 3
            codes[j + 2], codes[j + 3] = (byte >> 4) & 3, byte >> 6
    word, num_bits, place, mask = np.uint64(0), 0, whole, np.uint64((1 << width) - 1)
    for i in range(whole * 8 // width, count):
        while num_bits < width:
            word |= np.uint64(packed[place]) << np.uint64(num_bits)
            num_bits += 8
            place += 1
        codes[i] = U(word & mask)
        word >>= np.uint64(width)
        num_bits -= width


# --- scales of blocks -------------------------------------------------------------------------------------------------


@inner
def place_of(b, block, begin, count):
    """Return where block `b` of a row begins and ends (exclusive) in a tile of `count` values from column `begin` on."""
    return np.uint64(max(b * block - begin, 0)), np.uint64(min((b + 1) * block - begin, count))


@inner
def largest_of_blocks(y, begin, block, first_block, top):
    """Raise each number in `top` to the largest magnitude of a block in the tile `y`, if that is larger.

    Numbers are float32 bits, so that NaN is above infinity. `y` begins at column `begin`, `top` at the row's block `first_block`.
    """
    bits, end = y.view(np.int32), begin + len(y)
    for b in range(begin // block, (end - 1) // block + 1):
        start, stop = place_of(b, block, begin, len(y))
        largest = top[b - first_block]
        for i in range(start, stop):
            a = S(bits[i] & MANTISSA)
            largest = a if a > largest else largest
        top[b - first_block] = largest


@inner
def ends_of_blocks(y, begin, block, first_block, low, high):
    """Lower `low` and raise `high` to the smallest and largest value in each block of the tile `y`, which begins at `begin`.

    Both hold integers that are ordered as the floats they stand for, from the row's block `first_block` on.
    """
    bits, end = y.view(np.int32), begin + len(y)
    for b in range(begin // block, (end - 1) // block + 1):
        start, stop = place_of(b, block, begin, len(y))
        lowest, highest = low[b - first_block], high[b - first_block]
        for i in range(start, stop):
            key = S(bits[i] ^ S(S(bits[i] >> S(31)) & MANTISSA))
            lowest = key if key < lowest else lowest
            highest = key if key > highest else highest
        low[b - first_block], high[b - first_block] = lowest, highest


@inner
def float_of_key(key):
    return from_bits(S(key ^ S(S(key >> S(31)) & MANTISSA)))


@inner
def rounded_down(x):
    """Return the largest bfloat16 that is at most x, as a float32."""
    bits = U(bits_of(x) & U(0xFFFF0000))
    down, next_down = from_bits(bits), from_bits(U(bits + U(0x10000)))
    return next_down if down > x else down


@inner
def scale_for(largest, tensor_scale, n):
    """Return the scale of a block whose largest magnitude is `largest`, before rounding; NaN if that is not finite."""
    if not largest < INF:
        return NAN
    if n.rule == OCP:
        exponent = (wide_bits_of(np.float64(largest)) >> 52) - 1022 - n.max_exponent if largest > ZERO else -127
        return F(2.0 ** min(max(exponent, -127), 127))
    scale = F(largest / n.max_value)
    if n.has_tensor_scale:
        scale = F(scale / tensor_scale) if tensor_scale > ZERO else ZERO
    return scale


@inner
def scale_code(scale, n):
    """Return the code of the smallest 8-bit float or e8m0 that is at least `scale`, which must not be NaN."""
    a, dropped = np.float64(scale), 52 - n.scale_mantissa_bits
    normal = ((wide_bits_of(a) + (1 << dropped) - 1) >> dropped) - n.scale_offset
    subnormal = np.int64(np.ceil(min(a, n.scale_smallest) * n.scale_steps)) << n.scale_hole
    return min(normal if a >= n.scale_smallest else subnormal, n.scale_most)


@inner
def choose_scales(top, low, high, tensor_scale, n, scale_values, codes, scales, minimums):
    """Write each block's scale and minimum, rounded as they are stored, and the codes of scales that are codes.

    `top` has each block's largest magnitude as float32 bits; `low` and `high` its extreme values, used only for minimums.
    """
    for b in range(len(top)):
        largest = from_bits(top[b])
        if n.minimum:
            minimum = F(float_of_key(low[b]) + ZERO)
            minimum = rounded_down(minimum) if n.minimum == BF16 else minimum
            minimums[b] = minimum
            largest = F(F(float_of_key(high[b]) - minimum) + ZERO) if largest < INF else NAN
        scale = scale_for(largest, tensor_scale, n)
        if n.scale == CODE:
            codes[b] = np.uint8(scale_code(scale, n) if scale == scale else n.scale_nan)
            scale = scale_values[codes[b]]
            scales[b] = F(scale * tensor_scale) if n.has_tensor_scale else scale
        else:
            scale = max(scale, SMALLEST_SCALE) if scale > ZERO else scale
            scales[b] = F(-rounded_down(F(-scale))) if n.scale == BF16 and scale == scale else scale


@inner
def read_floats(memory, kind, start, y):
    """Read len(y) scales or minimums into `y`; `kind` tells whether `memory` has them as float32 or as bfloat16."""
    load(memory, FLOAT32 if kind == FP32 else BFLOAT16, start, y)


@inner
def read_scales(parts, start, tensor_scale, n, scale_values, codes, scales, minimums):
    """Read the scales (with their codes, if stored as such) and minimums of len(scales) blocks, from block `start` on."""
    if n.scale == CODE:
        for b in range(len(scales)):
            codes[b] = parts.scales[start + b]
            scale = scale_values[codes[b]]
            scales[b] = F(scale * tensor_scale) if n.has_tensor_scale else scale
    else:
        read_floats(parts.scales, n.scale, start, scales)
    if n.minimum:
        read_floats(parts.minimums, n.minimum, start, minimums)


@inner
def write_scales(parts, start, n, codes, scales, minimums):
    """Store the scales, or their codes, and the minimums of len(scales) blocks in `parts`, from block `start` on."""
    if n.scale == CODE:
        for b in range(len(scales)):
            parts.scales[start + b] = codes[b]
    else:
        store(scales, parts.scales, FLOAT32 if n.scale == FP32 else BFLOAT16, start)
    if n.minimum:
        store(minimums, parts.minimums, FLOAT32 if n.minimum == FP32 else BFLOAT16, start)


@inner
def mark_broken(b, n, broken, codes, scales, minimums):
    """Mark block `b`, a value of which has no code, in `broken`; set its scale to NaN and its minimum to 0."""
    broken[b], codes[b], scales[b], minimums[b] = 1, np.uint8(n.scale_nan), NAN, ZERO


@inner
def find_broken(top, n, broken, codes, scales, minimums):
    """Mark blocks with a value or scale that is not finite in `broken`, set their scale to NaN; return whether there are any.

    `top` has each block's largest magnitude as float32 bits.
    """
    found = False
    for b in range(len(top)):
        broken[b] = 0
        if top[b] >= INF_BITS or not (scales[b] >= ZERO and scales[b] < INF):
            mark_broken(b, n, broken, codes, scales, minimums)
            found = True
    return found


@inner
def divide_by_scales(y, begin, first_block, n, scales, minimums):
    """Replace each value x in `y` by (x - minimum) / scale of its block, and by 0 in blocks whose scale is NaN.

    `y` begins at column `begin` of its row, `scales` and `minimums` at the row's block `first_block`.
    """
    block, rule, end = n.block, n.rule, begin + len(y)
    high = n.max_value if rule == COVER else INF
    low = F(-high) if n.min_value < ZERO else F(-INF)
    for b in range(begin // block, (end - 1) // block + 1):
        start, stop = place_of(b, block, begin, len(y))
        scale, minimum = scales[b - first_block], minimums[b - first_block]
        inverse = F(F(1) / scale)
        if scale != scale:
            for i in range(start, stop):
                y[i] = ZERO
        elif rule == GIVEN:
            for i in range(start, stop):
                shifted = F(y[i] - minimum)
                y[i] = shifted if shifted == ZERO else F(shifted * inverse)
        else:
            inverse = inverse if inverse < INF else ZERO
            for i in range(start, stop):
                value = F(F(y[i] - minimum) * inverse)
                value = value if value < high else high
                y[i] = value if value > low else low


@inner
def multiply_by_scales(y, begin, first_block, n, scales, minimums):
    """Replace each decoded code y by y * scale + minimum of its block; `y` begins at column `begin` of its row."""
    block, end, has_minimum = n.block, begin + len(y), n.minimum > 0
    for b in range(begin // block, (end - 1) // block + 1):
        start, stop = place_of(b, block, begin, len(y))
        scale, minimum = scales[b - first_block], minimums[b - first_block]
        if has_minimum:
            for i in range(start, stop):
                y[i] = F(F(y[i] * scale) + minimum)
        else:
            for i in range(start, stop):
                y[i] = F(y[i] * scale)


@inner
def mark_lost(codes, lost, begin, first_block, n, broken, scale_codes, scales, minimums):
    """Mark in `broken` the blocks with a value marked in `lost`, set their scale to NaN; return whether any is newly marked.

    The codes of blocks that were marked before become 0.
    """
    end, is_new = begin + len(codes), False
    for b in range(begin // n.block, (end - 1) // n.block + 1):
        start, stop = place_of(b, n.block, begin, len(codes))
        is_broken, num = broken[b - first_block], 0
        for i in range(start, stop):
            num += lost[i]
            codes[i] = U(0) if is_broken else codes[i]
        if num and not is_broken:
            mark_broken(b - first_block, n, broken, scale_codes, scales, minimums)
            is_new = True
    return is_new


# --- rows -------------------------------------------------------------------------------------------------------------


@inner
def group_len(block, cols):
    """Return how many values of a row of `cols` values are encoded at once: whole blocks and bytes, at most TILE if possible."""
    unit = max(block, 1)
    while unit % 8:
        unit *= 2
    return min(max(TILE // unit, 1) * unit, cols)


@inner
def find_ends(y, begin, first_block, n, top, low, high):
    """Write each block's largest magnitude into `top`, and for minimums its extreme values into `low` and `high`.

    All are integers that are ordered as the floats they stand for.
    """
    top[:], low[:], high[:] = S(0), S(0x7FFFFFFF), S(-0x80000000)
    largest_of_blocks(y, begin, n.block, first_block, top)
    if n.minimum:
        ends_of_blocks(y, begin, n.block, first_block, low, high)


@inner
def codes_in_blocks(y, scaled, bits, codes, lost, begin, first_block, n, tables, top, broken, scale_codes, scales, minimums):
    """Write the codes of `y`, whole blocks of a row; blocks that cannot be encoded get the scale NaN and codes 0.

    `scaled`, `lost` and `broken` are buffers; `scales` and `minimums` have been chosen, and `top` holds each block's largest magnitude.
    """
    has_broken, again = find_broken(top, n, broken, scale_codes, scales, minimums), True
    while again:
        again = False
        for i in range(len(y)):
            scaled[i] = y[i]
        divide_by_scales(scaled, begin, first_block, n, scales, minimums)
        num = codes_of(scaled, bits, codes, lost, n, tables)
        if (num or has_broken) and mark_lost(codes, lost, begin, first_block, n, broken, scale_codes, scales, minimums):
            again, has_broken = True, True


@inner
def values_without_code(y, lost, v):
    """Write NaN or infinity into `v` where a value of `y` has no code, which `lost` marks."""
    for i in range(len(y)):
        if lost[i]:
            v[i] = NAN if y[i] != y[i] else np.copysign(INF, y[i])


@entry
def encode(x, call, parts, out, n, tables, words):
    """Encode the tensor memory `x` into `parts`; if `out` is not empty, only write the rounded values into `out`.

    Under rule GIVEN, scales are read from `parts`. `n` describes the encoding; `words` are random bits, or empty to draw them.
    """
    cols, group = call.cols, group_len(n.block, call.cols)
    num_blocks, most = ((cols - 1) // n.block + 1, group // n.block + 1) if n.block else (0, 0)
    values, scaled, codes = np.empty(group, np.float32), np.empty(group, np.float32), np.empty(group, np.uint32)
    lost, bits = np.empty(group, np.uint8), np.full(group, U(1 << 31) if n.rounding == NEAREST_AWAY else U(0), np.uint32)
    ends, floats, bytes_ = np.empty((3, most), np.int32), np.zeros((2, most), np.float32), np.zeros((2, most), np.uint8)
    row_bytes, is_packed = (cols * n.width + 7) // 8, len(out) == 0
    for row in range(call.rows):
        for begin in range(0, cols, group):
            count, place = min(group, cols - begin), row * cols + begin
            y, t, c, gone = values[:count], scaled[:count], codes[:count], lost[:count]
            first, blocks, start, num = 0, 0, 0, 0
            if n.block:
                first = begin // n.block
                blocks, start = (begin + count - 1) // n.block + 1 - first, row * num_blocks + first
            top, scales, minimums = ends[0, :blocks], floats[0, :blocks], floats[1, :blocks]
            scale_codes, broken = bytes_[0, :blocks], bytes_[1, :blocks]
            load(x, call.dtype, place, y)
            if len(words):
                bits[:count] = words[place : place + count]
            elif n.rounding == STOCHASTIC:
                fill_bits(bits[:count], call, place)
            if n.block:
                find_ends(y, begin, first, n, top, ends[1, :blocks], ends[2, :blocks])
                if n.rule == GIVEN:
                    read_scales(parts, start, call.tensor_scale, n, tables.scales, scale_codes, scales, minimums)
                else:
                    low, high = ends[1, :blocks], ends[2, :blocks]
                    choose_scales(top, low, high, call.tensor_scale, n, tables.scales, scale_codes, scales, minimums)
                codes_in_blocks(y, t, bits, c, gone, begin, first, n, tables, top, broken, scale_codes, scales, minimums)
            else:
                num = codes_of(y, bits, c, gone, n, tables)
            if is_packed:
                byte = row * row_bytes + begin * n.width // 8
                pack(c, n.width, parts.codes[byte : byte + (count * n.width + 7) // 8])
                if n.block:
                    write_scales(parts, start, n, scale_codes, scales, minimums)
                continue
            values_of(c, t, n, tables.values)
            if n.block:
                multiply_by_scales(t, begin, first, n, scales, minimums)
            elif num:
                values_without_code(y, gone, t)
            store(t, out, call.dtype, place)


@entry
def decode(parts, call, out, n, tables):
    """Decode `parts` into `out`, the memory of a tensor of the shape and dtype in `call`; `n` describes the encoding."""
    cols, block = call.cols, n.block
    num_blocks, most = ((cols - 1) // block + 1, (TILE - 1) // block + 2) if block else (0, 0)
    y, codes = np.empty(TILE, np.float32), np.empty(TILE, np.uint32)
    floats, scale_codes = np.zeros((2, most), np.float32), np.empty(most, np.uint8)
    row_bytes = (cols * n.width + 7) // 8
    for row in range(call.rows):
        for begin in range(0, cols, TILE):
            count = min(TILE, cols - begin)
            t, c, byte = y[:count], codes[:count], row * row_bytes + begin * n.width // 8
            unpack(parts.codes[byte : byte + (count * n.width + 7) // 8], n.width, c)
            values_of(c, t, n, tables.values)
            if block:
                first_block = begin // block
                blocks = (begin + count - 1) // block + 1 - first_block
                scales, minimums = floats[0, :blocks], floats[1, :blocks]
                start = row * num_blocks + first_block
                read_scales(parts, start, call.tensor_scale, n, tables.scales, scale_codes, scales, minimums)
                multiply_by_scales(t, begin, first_block, n, scales, minimums)
            store(t, out, call.dtype, row * cols + begin)


@entry
def random_bits(call, out):
    """Fill `out` with the random bits of as many values, whose first index, and the keys, are in `call`."""
    fill_bits(out, call, 0)


# --- masks ------------------------------------------------------------------------------------------------------------


@entry
def pack_mask(x, dtype, low, high, out):
    """Write one bit per value of `x`, which is 1 for values between `low` and `high`, into the bytes `out`, lowest bit first.

    The bit is not (x <= low or x >= high), and so 1 for NaN; of a boolean x it is x.
    """
    count = len(x) // (1 if dtype == BOOL else 4 if dtype == FLOAT32 else 2)
    y, flags = np.empty(TILE, np.float32), np.zeros(TILE, np.uint8)
    for begin in range(0, count, TILE):
        num = min(TILE, count - begin)
        if dtype == BOOL:
            booleans = x[begin : begin + num]
            for i in range(num):
                flags[i] = booleans[i]
        else:
            t = y[:num]
            load(x, dtype, begin, t)
            for i in range(num):
                flags[i] = not ((t[i] <= low) | (t[i] >= high))
        flags[num:] = 0
        packed = out[begin // 8 : (begin + num + 7) // 8]
        for j in range(len(packed)):
            byte = U(0)
            for k in range(8):
                byte |= U(flags[8 * j + k]) << U(k)
            packed[j] = np.uint8(byte)


@entry
def select(bits, inside, outside, out):
    """Write `inside` into `out` where the mask's bit is 1, else `outside`, one value; `inside` is one value, or one per bit."""
    flags, step = np.empty(TILE, np.uint8), 0 if len(inside) == 1 else 1
    for begin in range(0, len(out), TILE):
        target = out[begin : begin + TILE]
        for j in range((len(target) + 7) // 8):
            for k in range(8):
                flags[8 * j + k] = (bits[begin // 8 + j] >> k) & 1
        if step:
            source = inside[begin : begin + TILE]
            for i in range(len(target)):
                target[i] = source[i] if flags[i] else outside[0]
        else:
            for i in range(len(target)):
                target[i] = inside[0] if flags[i] else outside[0]
