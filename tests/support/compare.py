"""Two comparisons of tensors: bit for bit, and within so many steps of a format.

A step is the distance between the two neighbours that a value lies between, so `steps=0.5` is what rounding to nearest
promises and `steps=1` what any rounding does. In blocks the step is that of the element times the block's scale, which
`tests/oracles` works out; there a few roundings to float32 lie between a value and its code, and 2^-22 of the block's largest
magnitude is allowed for them.

>>> assert_within(torch.tensor([1.0]), torch.tensor([1.24]), "e2m1fn")
>>> assert_within(torch.tensor([1.0]), torch.tensor([1.26]), "e2m1fn")
Traceback (most recent call last):
    ...
AssertionError: 1 of 1 values further than 0.5 steps of e2m1fn; the first at 0: 1.0 for 1.2599999904632568, 0.52 steps of 0.5.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

import torch
from torch import Tensor

from paredown.codec.packed import PackedTensor
from paredown.codec.reference import PackedParts
from tests.oracles.blocks import affine_parts, covering_scale, tensor_scale
from tests.oracles.exact import Exact, element

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
FLOAT32_SLACK = 2.0**-22
ROUNDING_OF_DTYPE = {torch.float32: 0.0, torch.float64: 0.0, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}  # relative
SMALLEST_OF_DTYPE = {torch.float16: 2.0**-25}  # half a step of its subnormals


def assert_same_bits(a: Tensor, b: Tensor) -> None:
    """Same shape, dtype and bits. Any NaN equals any NaN, and -0.0 differs from 0.0."""
    assert a.shape == b.shape, f"shapes differ: {tuple(a.shape)} and {tuple(b.shape)}."
    assert a.dtype == b.dtype, f"dtypes differ: {a.dtype} and {b.dtype}."
    integer = INTEGERS[a.dtype.itemsize]
    same = a.contiguous().view(integer) == b.contiguous().view(integer)
    if a.is_floating_point():
        same |= a.isnan() & b.isnan()
    _report(~same, lambda i: f"{a.flatten()[i].item()!r} and {b.flatten()[i].item()!r}", "values differ")


def assert_same_parts(a: PackedTensor | PackedParts, b: PackedTensor | PackedParts) -> None:
    """The same bits in codes, scales, minimums and tensor scale, on whatever devices."""
    mine, theirs = ((x.parts if isinstance(x, PackedTensor) else x).tensors() for x in (a, b))
    for one, other in zip(mine, theirs, strict=True):
        assert_same_bits(one.cpu(), other.cpu())


def assert_within(actual: Tensor, expected: Tensor, fmt: object, steps: float = 0.5) -> None:
    """`actual` is no further from `expected` than `steps` steps of the format; NaN and inf are where they are expected.

    `expected` are the values before rounding, blocks along its rows in logical order.
    """
    assert actual.shape == expected.shape, f"shapes differ: {tuple(actual.shape)} and {tuple(expected.shape)}."
    step, slack = steps_of(expected, str(fmt))
    slack = slack + expected.double().abs() * ROUNDING_OF_DTYPE[actual.dtype] + SMALLEST_OF_DTYPE.get(actual.dtype, 0.0)
    distance = (actual.double() - expected.double()).abs()
    finite = expected.isfinite()
    wrong = torch.where(finite, ~(distance <= steps * step + slack), actual.double() != expected.double())
    wrong &= ~(actual.isnan() & expected.isnan())

    def describe(i: int) -> str:
        a, e, d, s = (t.flatten()[i].item() for t in (actual, expected, distance, step))
        return f"{a} for {e}, {d / s:.2f} steps of {s:g}"

    _report(wrong, describe, f"values further than {steps:g} steps of {fmt}")


def steps_of(values: Tensor, text: str) -> tuple[Tensor, Tensor]:
    """The step of the format around each value, and the slack of block arithmetic; float64, of the shape of `values`."""
    name, _, shared = text.partition("/")
    exact = element(name)
    if not shared:
        return _gap(values.double(), exact), torch.zeros(())
    block, _, kinds = shared.partition("@")
    rows = values.double().reshape(values.shape[0] if values.ndim > 1 else 1, -1)
    scale, minimum, largest = _shared_by_blocks(rows, name, int(block), kinds)
    step = _gap((rows - minimum) / scale.clamp(min=2.0**-149), exact) * scale
    return step.reshape(values.shape), (largest * FLOAT32_SLACK).reshape(values.shape)


def _shared_by_blocks(rows: Tensor, name: str, block: int, kinds: str) -> tuple[Tensor, Tensor, Tensor]:
    """Scale, minimum and largest magnitude of the block of each value."""
    scale_kind, _, minimum_kind = kinds.partition("+")
    whole = None
    if scale_kind == "e4m3fn":
        whole = tensor_scale([Fraction(v) for v in rows[rows.isfinite()].tolist()] or [Fraction(0)], name)
    scale, minimum, largest = torch.ones_like(rows), torch.zeros_like(rows), torch.zeros_like(rows)
    for r in range(rows.shape[0]):
        for c in range(0, rows.shape[1], block):
            here = (r, slice(c, c + block))
            numbers = [Fraction(v) for v in rows[here].tolist()] if rows[here].isfinite().all() else [Fraction(0)]
            if minimum_kind:
                parts = affine_parts(numbers, name, scale_kind, minimum_kind)
                scale[here], minimum[here] = float(parts.scale), float(parts.minimum)
            else:
                scale[here] = float(covering_scale(numbers, name, scale_kind, tensor_scale=whole))
            largest[here] = float(max(abs(number) for number in numbers))
    return scale, minimum, largest


def _gap(y: Tensor, exact: Exact) -> Tensor:
    """The distance between the neighbours of `y` in the element."""
    if exact.table:
        values = torch.tensor([float(v) for v in exact.table], dtype=torch.float64)
        low = (torch.searchsorted(values, y.contiguous(), right=True) - 1).clamp(0, len(values) - 2)
        return values[low + 1] - values[low]
    if exact.kind != "float":
        return torch.ones_like(y)
    least = 1 - exact.bias
    exponent = torch.where(y == 0, least, torch.frexp(y.nan_to_num(0.0)).exponent - 1).clamp(min=least)
    in_hole = (y.abs() < 2.0**least) & exact.hole
    return torch.where(in_hole, 2.0**least, torch.ldexp(torch.ones_like(y), exponent - exact.mantissa_bits))


def _report(wrong: Tensor, describe: Callable[[int], str], what: str) -> None:
    places = wrong.flatten().nonzero().flatten().tolist()
    assert not places, f"{len(places)} of {wrong.numel()} {what}; the first at {places[0]}: {describe(places[0])}."
