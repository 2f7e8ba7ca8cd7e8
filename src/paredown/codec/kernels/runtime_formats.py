"""These kernels round values to elements without blocks that they read from memory when they run.

An element, a float or an integer, is twelve int32 in memory (`describe`), so one compiled kernel, and one captured CUDA graph, serves
every format. Per value, in float32 bits: normals are rounded by adding below the last kept bit and clearing what is below, subnormals
by scaling to an integer; what lies past the largest value is replaced.

    x  [ x0 x1 x2 x3 x4 x5 x6 x7 ]  ->  [ r(x0) ... r(x7) ]      8 bytes move for each float32
"""

from __future__ import annotations

import struct

import triton
import triton.language as tl

from paredown.codec.kernels.numbers import INF_BITS, NEAREST_AWAY, NEAREST_EVEN, STOCHASTIC, as_bits, as_float
from paredown.codec.kernels.pack import load_values, random_tile, store_values
from paredown.formats.element import Element, ElementKind
from paredown.formats.rounding import Overflow


def float_bits(x: float) -> int:
    """Return the bits of `x` as a float32, as a signed integer of 32 bits."""
    return struct.unpack("i", struct.pack("f", x))[0]


def describe(element: Element, overflow: Overflow) -> list[int]:
    """Return twelve int32 from which kernels learn an element, a float or integer type of number, when they run."""
    sub_bits = element.mantissa_bits if element.subnormals else 0
    smallest = 2.0**element.min_exponent
    up = 30 - element.min_exponent
    past_value = float("nan" if element.inf_code is None and element.nan_code is not None else "inf")
    has_minus_zero = element.kind is ElementKind.FLOAT and element.value(element.sign_code) == 0
    return [
        23 - element.mantissa_bits,
        float_bits(smallest),
        30 - sub_bits,
        float_bits(2.0 ** min(up, 64)),
        float_bits(2.0 ** (up - min(up, 64))),
        float_bits(2.0 ** (element.min_exponent - sub_bits)),
        float_bits(2.0 ** (element.min_exponent + 23 - sub_bits)),
        float_bits(element.max_value),
        float_bits(abs(element.min_value)),
        float_bits(past_value) if overflow is Overflow.NONFINITE else -1,
        -1 if has_minus_zero else 0,
        ((126 + element.min_exponent) << element.mantissa_bits) & 1,
    ]


@triton.jit
def round_bits(a, random, spec_ptr, ROUNDING: tl.constexpr):
    """Return magnitudes, given as float32 bits `a`, rounded to the number type described at `spec_ptr`.

    The results may exceed the type's largest value.
    """
    dropped = tl.load(spec_ptr)
    smallest = tl.load(spec_ptr + 1)
    kept = tl.load(spec_ptr + 2)
    mask = (1 << dropped) - 1
    small = as_float(tl.minimum(a, smallest))
    if ROUNDING == NEAREST_EVEN:
        odd = tl.load(spec_ptr + 11)  # without a mantissa, codes and exponents may differ in parity
        normal = a + (mask >> 1) + (((a >> dropped) ^ odd) & (mask & 1))
        c = as_float(tl.load(spec_ptr + 6))
        small = (small + c) - c
    else:
        steps = (small * as_float(tl.load(spec_ptr + 3)) * as_float(tl.load(spec_ptr + 4))).to(tl.int32)
        if ROUNDING == STOCHASTIC:
            below = (random >> 2).to(tl.int32)  # 30 bits
            normal = a + (below >> (30 - dropped))
            steps += below >> (30 - kept)
        elif ROUNDING == NEAREST_AWAY:
            normal = a + ((mask + 1) >> 1)
            steps += (1 << kept) >> 1
        else:
            normal = a
        small = (steps >> kept).to(tl.float32) * as_float(tl.load(spec_ptr + 5))
    return tl.where(a < smallest, as_bits(small), normal & ~mask)


@triton.jit
def round_to_spec(x, random, spec_ptr, ROUNDING: tl.constexpr):
    """Return float32 `x` rounded to the number type that the twelve int32 at `spec_ptr` describe."""
    bits = as_bits(x)
    a = bits & 0x7FFFFFFF
    rounded = round_bits(a, random, spec_ptr, ROUNDING)
    limit = tl.where(bits < 0, tl.load(spec_ptr + 8), tl.load(spec_ptr + 7))
    past_bits = tl.load(spec_ptr + 9)
    rounded = tl.where(rounded > limit, tl.where(past_bits < 0, limit, past_bits), rounded)
    sign = tl.where(rounded == 0, bits & tl.load(spec_ptr + 10), bits) & -2147483648
    return tl.where(a > INF_BITS, x, as_float(rounded | sign))


@triton.jit(do_not_specialize=["k0", "k1", "first_index"])
def round_trip_kernel(
    x_ptr, out_ptr, spec_ptr, step_ptr, numel, first_tile, first_index, k0, k1,
    ROUNDING: tl.constexpr, STEP_IN_MEMORY: tl.constexpr, KEYS_IN_MEMORY: tl.constexpr, WIDE: tl.constexpr, MASKED: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Round each value of x to the number type that the twelve int32 at `spec_ptr` describe, and store it at `out_ptr`.

    KEYS_IN_MEMORY: the keys of the random bits follow the description in memory.
    """
    start = (tl.program_id(0).to(tl.int64) + first_tile) * TILE
    inside = tl.arange(0, TILE) < tl.minimum(numel - start, TILE).to(tl.int32)
    x = load_values(x_ptr + start, tl.arange(0, TILE), inside, MASKED)
    if KEYS_IN_MEMORY:
        k0, k1 = tl.load(spec_ptr + 12), tl.load(spec_ptr + 13)
    random = random_tile(first_index + start, k0, k1, step_ptr, ROUNDING, STEP_IN_MEMORY, WIDE, TILE)
    store_values(out_ptr + start, round_to_spec(x, random, spec_ptr, ROUNDING), inside, MASKED)


@triton.jit
def round_many_kernel(owners_ptr, table_ptr, step_ptr, ROUNDING: tl.constexpr, TILE: tl.constexpr):
    """Round a tile of one of many float32 tensors to the number type in the tensor's row of the table.

    owners   [ 0 0 0 1 2 2 ]        program -> tensor
    table    [ address of x, of out, of its element and keys | numel, first program ]        one row of int64 for each tensor
    """
    program = tl.program_id(0).to(tl.int64)
    row = table_ptr + tl.load(owners_ptr + program).to(tl.int64) * 5
    x_ptr = tl.load(row).to(tl.pointer_type(tl.float32))
    out_ptr = tl.load(row + 1).to(tl.pointer_type(tl.float32))
    spec_ptr = tl.load(row + 2).to(tl.pointer_type(tl.int32))
    start = (program - tl.load(row + 4)) * TILE
    inside = tl.arange(0, TILE) < tl.minimum(tl.load(row + 3) - start, TILE).to(tl.int32)
    x = load_values(x_ptr + start, tl.arange(0, TILE), inside, True)
    random = random_tile(start, tl.load(spec_ptr + 12), tl.load(spec_ptr + 13), step_ptr, ROUNDING, True, True, TILE)
    store_values(out_ptr + start, round_to_spec(x, random, spec_ptr, ROUNDING), inside, True)
