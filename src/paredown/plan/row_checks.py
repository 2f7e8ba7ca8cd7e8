"""Rows of a trace that was read from a file: numbers where numbers belong, texts where texts do, and times within the step.

>>> from paredown.plan.ops import Use
>>> check_row(Part(Use.VALUE, packed=1, released=99), length=10)
Traceback (most recent call last):
    ...
paredown.errors.TraceError: released of a part is a time from -1 to 11, not 99.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

from paredown.errors import TraceError
from paredown.plan.slots import Output, Part, Saver, Slot

MOST = 1 << 60  # bytes, values
TIMES = frozenset({"birth", "death", "dropped", "packed", "released", "used"})
SPANS = frozenset({"running", "decoded"})


def _is_whole(value: Any) -> bool:
    return type(value) is int and -1 <= value < MOST


# by the text of a field's annotation; other fields are made by their own readers
KINDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "int": (_is_whole, "a whole number"),
    "int | None": (lambda value: value is None or _is_whole(value), "a whole number, or nothing"),
    "str": (lambda value: isinstance(value, str), "text"),
    "tuple[int, ...]": (lambda value: all(map(_is_whole, value)), "whole numbers"),
}


def check_row(row: Slot | Output | Saver | Part, length: int) -> None:
    """TraceError where a field of `row` cannot be what it says."""
    what = type(row).__name__.lower()
    for field in fields(row):
        value = getattr(row, field.name)
        check, expected = KINDS.get(str(field.type), (lambda value: True, ""))
        if not check(value):
            raise TraceError(f"{field.name} of a {what} is {expected}, not {str(value)[:80]!r}.")
        times = (value,) if field.name in TIMES else [t for span in value for t in span] if field.name in SPANS else ()
        for time in times:
            if not _is_whole(time) or time > length + 1:
                raise TraceError(f"{field.name} of a {what} is a time from -1 to {length + 1}, not {str(time)[:80]}.")
    for part in (*getattr(row, "savers", ()), *getattr(row, "parts", ())):
        check_row(part, length)
