"""Device functions of the rules: roots, reciprocals, and one update of a number. `rules.py` defines them; values to values, no memory.

A root and a reciprocal are approximated by the special function unit and corrected by one step of Newton's method whose residual is exact,
which rounds correctly between the range that is checked or known; the compiler's own root and division also branch for what lies outside.
"""

from __future__ import annotations

import triton
import triton.language as tl

from paredown.codec.kernels.numbers import as_bits, as_float
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
    """a * b + c, rounded once. The interpreter does not fuse: see `rules.fused`."""
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
    """The correctly rounded square root of x >= 2^-100; of inf and NaN something that is not finite."""
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
    """The correctly rounded 1 / x of 2^-125 <= x <= 2^125; of 0 and beyond something that is not finite."""
    if USES_PTX:
        return tl.inline_asm_elementwise(
            """{ .reg .f32 y, e; rcp.approx.ftz.f32 y, $1; neg.f32 e, $1; fma.rn.f32 e, e, y, 0f3F800000; fma.rn.f32 $0, y, e, y; }""",
            "=f,f", [x], tl.float32, True, 1,
        )  # fmt: skip
    else:
        return tl.div_rn(tl.zeros_like(x) + 1.0, x)


@triton.jit
def companded(r):
    """`rules.stored_root` of r = root(x): half of its bits. r > 0."""
    return as_float((as_bits(r) >> 1) + HALF_BITS)


@triton.jit
def expanded(y):
    """The inverse of `companded`; of 0 it is 0."""
    return as_float(tl.maximum(as_bits(y) - HALF_BITS, 0) << 1)


@triton.jit
def momentum_step(p, g, m, h):
    """(d, m') of SGD."""
    d = fused(h[4], p, g)
    return d, fused(h[2], m, h[3] * d)


@triton.jit
def apply_rule(p, g, m, v, h, RULE: tl.constexpr):
    """(p', m', v', root(v')) of one rule; what it does not have comes back as it was. h: its numbers, but for the factor."""
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
