"""The format in which an activation is stored where a plan asks for one: footprints and sessions use the same function.

Three limits hold beyond what the plan asks for:

    pin             backward needs more significant bits than the format has (`Pin`)
    is_centered     backward subtracts a mean from the values, as norms do. A format whose step grows with |x| loses the differences once
                    the mean is a few standard deviations: symmetric integers and narrow floats become unsigned integers of the same
                    width with a minimum for each block
    size            the packed tensor must be smaller than the tensor

>>> from paredown.plan.assignment import Assignment
>>> from paredown.plan.ops import EXPONENT
>>> asked = Assignment.parse("int4/64@bf16")
>>> given(asked, Needs(pin=EXPONENT), dtype="bfloat16", numel=1 << 20)[0]
Format('int8/64@bf16')
>>> given(asked, Needs(is_centered=True), dtype="bfloat16", numel=1 << 20)[0]
Format('uint4/64@bf16+bf16')
"""

from __future__ import annotations

from functools import lru_cache

from paredown.formats.element import Kind
from paredown.formats.format import Format
from paredown.plan.assignment import Assignment
from paredown.plan.ops import Needs, Use

PINNED = Format.parse("int8/64@bf16")  # 7 significant bits, the most that a format of 8 has
PINNED_WIDE = Format.parse("bf16")  # for more
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
CENTERED = "backward subtracts a mean from it: a minimum for each block keeps small differences beside a large mean"
PRECISE_BITS = 8  # bf16 has 8 significant bits: what the user's own step may compute in
# Blocks of 128 would hold a minimum in the bytes of int4/64@bf16, but two rows of 64 values would share one: the gradients of a small ViT
# were 105 % off at 4 bits instead of 16 %.
BLOCK = 64


def significant_bits(format: Format) -> int:
    """How finely a format divides the range below its largest magnitude: int8 in 2^7 steps, e4m3 in 2^4 at the top, bf16 in 2^8.

    Unsigned integers with a minimum divide the range from the smallest value to the largest, twice as long as that of magnitudes.
    """
    element = format.element
    if element.kind is Kind.FLOAT:
        return element.mantissa_bits + 1
    return element.width - (element.kind is not Kind.UINT or format.minimum is not None)


def resolves_differences(format: Format) -> bool:
    """Whether values that differ little beside their mean stay apart: the step follows the range of a block, or is that of bf16."""
    return format.minimum is not None or significant_bits(format) >= PRECISE_BITS


@lru_cache(maxsize=256)
def with_minimum(format: Format) -> Format:
    """Unsigned integers of the same width with a minimum for each block; blocks have at least 64 values.

    >>> str(with_minimum(Format.parse("e2m1fn/32@e8m0")))
    'uint4/64@bf16+bf16'
    """
    return Format.parse(f"uint{min(format.element.width, 8)}/{max(format.block or 0, BLOCK)}@bf16+bf16")


def is_same_level(format: Format | None, other: Format | None) -> bool:
    """Whether two formats are one choice: equal, or one is what the other becomes where backward subtracts a mean."""
    return format == other or (format is not None and other is not None and other in (format, with_minimum(format)))


def keeps_enough(format: Format, needs: Needs) -> bool:
    """Whether values stored in `format` are precise enough for an operation that needs them."""
    is_fine = needs.pin is None or significant_bits(format) >= needs.pin.significant_bits
    return is_fine and (not needs.is_centered or resolves_differences(format))


def given(assignment: Assignment, needs: Needs, *, dtype: str, numel: int) -> tuple[Format | None, str]:
    """The format of `numel` values of `dtype` that were saved together, None for plain storage; and why it is not what was asked for."""
    asked = assignment.format
    if asked is None or needs.use is not Use.VALUE:
        return None, ""
    if dtype not in ITEM_BYTES:
        return None, f"it is {dtype}, which formats do not hold"
    if asked.block is None and asked.element.nan_code is None:
        ends = f"{asked.element.min_value:g} to {asked.element.max_value:g}"
        return None, f"{asked} without a block holds {ends} as they are, and nothing else: write {asked}/64@bf16"
    format, reason, pin = asked, "", needs.pin
    if pin is not None and significant_bits(asked) < pin.significant_bits:
        format = PINNED if pin.significant_bits <= significant_bits(PINNED) else PINNED_WIDE
        reason = f"pinned at {pin.significant_bits} significant bits or more: {pin.reason}"
    if needs.is_centered and not resolves_differences(format):
        format, reason = with_minimum(format), f"{reason}; {CENTERED}" if reason else CENTERED
    own = numel * ITEM_BYTES[dtype]
    packed = format.nbytes((numel,))
    if packed >= own:
        return None, f"it would take {packed:,} bytes instead of {own:,}"
    return format, reason
