"""Blocks from their definition, in exact fractions: which scale is stored, and what each value comes back as.

    plain     scale = max |x| / max, rounded up to the scale's element      value = e(x / scale) * scale
    affine    minimum = min x, rounded down; scale = (max x - minimum) / max     value = e((x - minimum) / scale) * scale + minimum
    OCP       scale = 2^(floor(log2 max |x|) - emax), emax that of the element's largest number; elements saturate

Each single operation is rounded to float32, and a quotient is a product with the rounded reciprocal: that is part of the
definition, since values and bits depend on it. Blocks of finite numbers alone; what NaN does is tested directly.

>>> float(ocp_scale([Fraction(7)], "e2m1fn")), float(covering_scale([Fraction(7)], "e2m1fn", "e8m0"))
(1.0, 2.0)
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from tests.oracles.exact import element, float32, floor_log2

SMALLEST_NORMAL = Fraction(1, 2**126)


@dataclass(frozen=True)
class Shared:
    """What a block shares: its scale (that of the tensor included), and its minimum."""

    scale: Fraction
    minimum: Fraction = Fraction(0)


def smallest_at_least(x: Fraction, text: str) -> Fraction:
    """The smallest value of the element `text` that is at least `x` >= 0, or its largest one."""
    exact = element(text)
    if exact.table:
        return exact.table[min(bisect_left(exact.table, x), len(exact.table) - 1)]
    return exact.rung(min(bisect_left(range(exact.last_rung + 1), x, key=exact.rung), exact.last_rung))


def largest_at_most(x: Fraction, text: str) -> Fraction:
    """The largest value of the element `text` that is at most `x`."""
    if x < 0:
        return -smallest_at_least(-x, text)
    exact = element(text)
    up = bisect_left(range(exact.last_rung + 1), x, key=exact.rung)
    return exact.rung(up if up <= exact.last_rung and exact.rung(up) == x else up - 1)


def covering_scale(
    block: Sequence[Fraction], element_text: str, scale_text: str, *, tensor_scale: Fraction | None = None
) -> Fraction:
    """The smallest value of the scale's element that leaves no |x| past the end, in float32; times that of the tensor."""
    scale = float32(max(abs(x) for x in block) / element(element_text).max)
    if tensor_scale is not None:
        return float32(smallest_at_least(float32(scale / tensor_scale) if tensor_scale else Fraction(0), scale_text) * tensor_scale)
    if scale > 0 and scale_text in ("fp32", "bf16"):
        scale = max(scale, SMALLEST_NORMAL)
    return smallest_at_least(scale, scale_text)


def tensor_scale(values: Sequence[Fraction], element_text: str) -> Fraction:
    """The float32 beside block scales in e4m3fn: it brings the largest one to 448."""
    largest = max(abs(x) for x in values)
    return max(float32(largest / (448 * element(element_text).max)), SMALLEST_NORMAL) if largest else Fraction(0)


def ocp_scale(block: Sequence[Fraction], element_text: str) -> Fraction:
    """OCP Microscaling Formats (MX) 1.0, section 6.3: the power of two of the largest magnitude over that of the element."""
    largest = max(abs(x) for x in block)
    if largest == 0:
        return Fraction(2) ** -127
    exponent = floor_log2(largest) - floor_log2(element(element_text).max)
    return Fraction(2) ** min(max(exponent, -127), 127)


def affine_parts(block: Sequence[Fraction], element_text: str, scale_text: str, minimum_text: str) -> Shared:
    """The minimum rounded down, and the scale that covers what lies above it."""
    minimum = largest_at_most(min(block), minimum_text)
    return Shared(covering_scale([float32(max(block) - minimum)], element_text, scale_text), minimum)


def block_values(
    block: Sequence[Fraction], shared: Shared, element_text: str, rounding: str, bits: Sequence[int] = ()
) -> list[Fraction]:
    """What each number of the block comes back as; those past the end saturate."""
    inverse = float32(1 / shared.scale) if shared.scale else Fraction(0)
    values = []
    for position, x in enumerate(block):
        y = float32(float32(x - shared.minimum) * inverse)
        rounded = element(element_text).rounded(y, rounding, "saturate", bits[position] if bits else 0)
        values.append(float32(float32(Fraction(rounded) * shared.scale) + shared.minimum))
    return values
