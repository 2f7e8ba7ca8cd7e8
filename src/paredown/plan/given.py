"""What an activation is given, where a plan asks for a format: the same arithmetic in a footprint and in a session.

Some tensors may not be rounded as far as was asked (`Pin`), and some would not become smaller.

>>> from paredown.plan.assignment import Assignment
>>> from paredown.plan.ops import EXPONENT
>>> given(Assignment.parse("int4/64@bf16"), use=Use.VALUE, pin=EXPONENT, dtype="bfloat16", numel=1 << 20)[0]
Format('int8/64@bf16')
"""

from __future__ import annotations

from paredown.formats.element import Element, Kind
from paredown.formats.format import Format
from paredown.plan.assignment import Assignment
from paredown.plan.ops import Pin, Use

PINNED = Format.parse("int8/64@bf16")
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def significant_bits(element: Element) -> int:
    """How finely an element divides the range below its largest value: int8 in 2^7 steps, e4m3 in 2^4 at the top, bf16 in 2^8."""
    if element.kind is Kind.FLOAT:
        return element.mantissa_bits + 1
    return element.width - (element.kind is not Kind.UINT)


def given(assignment: Assignment, *, use: Use, pin: Pin | None, dtype: str, numel: int) -> tuple[Format | None, str]:
    """The format of `numel` values of `dtype` that were saved together, None for as they are; and why it is not what was asked for."""
    asked = assignment.format
    if asked is None or use is not Use.VALUE:
        return None, ""
    if dtype not in ITEM_BYTES:
        return None, f"it is {dtype}, which formats do not hold"
    if asked.block is None and asked.element.nan_code is None:
        ends = f"{asked.element.min_value:g} to {asked.element.max_value:g}"
        return None, f"{asked} without a block holds {ends} as they are, and nothing else: write {asked}/64@bf16"
    format, reason = asked, ""
    if pin is not None and significant_bits(asked.element) < pin.significant_bits:
        format, reason = PINNED, f"pinned at {pin.significant_bits} significant bits or more: {pin.reason}"
    own = numel * ITEM_BYTES[dtype]
    packed = format.nbytes((numel,))
    if packed >= own:
        return None, f"it would take {packed:,} bytes instead of {own:,}"
    return format, reason
