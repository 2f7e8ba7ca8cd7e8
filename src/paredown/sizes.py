"""Sizes in bytes and durations, from text and back: `parse_bytes("8GiB")`, `say_bytes(1739461755)`, `parse_seconds("5min")`.

A size is an integer, a number with a unit, or a percentage of another size. `8GB` is 8 * 1000^3 bytes, `8GiB` is 8 * 1024^3. The
arithmetic is exact, and fractions of a byte are dropped, so that a budget never grows by rounding.

>>> parse_bytes("1.5GiB"), parse_bytes("8 GB"), parse_bytes("60%", whole=1001)
(1610612736, 8000000000, 600)
>>> say_bytes(1739461755)
'1.62 GiB'
"""

from __future__ import annotations

import re
from fractions import Fraction
from operator import index

from paredown.errors import BudgetError, ParedownError
from paredown.serial import brief

FLOAT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

PREFIXES = "KMGTP"
UNITS = {"": 1, "b": 1} | {
    f"{prefix}{ending}".lower(): base**power
    for power, prefix in enumerate(PREFIXES, 1)
    for ending, base in (("B", 1000), ("iB", 1024))
}
LARGEST = 1 << 200  # bytes that say_bytes prints in units; larger counts exceed a float or fill a screen with digits
TEXT = re.compile(r"\s*(?P<number>[0-9]{1,30}(?:\.[0-9]{1,30})?|\.[0-9]{1,30})\s*(?P<unit>[A-Za-z]*|%)\s*")
ALLOWED = "a size is a whole number of bytes from 0 up, or text such as '8GiB', '1.5 GB' or '60%'"


def parse_bytes(size: int | str, *, whole: int | None = None) -> int:
    """Return the number of bytes in a size such as "8GiB"; a percentage is relative to `whole`."""
    if isinstance(size, str):
        return _parse_text(size, whole)
    if isinstance(size, bool) or not hasattr(size, "__index__"):
        raise BudgetError(f"size {brief(size)} is of type {type(size).__name__}; {ALLOWED}.")
    if size < 0:
        raise BudgetError(f"size {brief(size)} is below 0; {ALLOWED}.")
    return index(size)


def _parse_text(text: str, whole: int | None) -> int:
    match = TEXT.fullmatch(text)
    if match is None:
        raise BudgetError(f"size {text!r} cannot be read; {ALLOWED}.")
    number, unit = Fraction(match["number"]), match["unit"].lower()
    if unit == "%":
        if whole is None:
            raise BudgetError(
                f"size {text!r} is a percentage, and no size is known here that it is relative to: write bytes, such as '8GiB'."
            )
        return int(number * whole / 100)
    if unit not in UNITS:
        raise BudgetError(f"size {text!r}: unit {match['unit']!r} is unknown{_hint(match['number'], unit)}; {ALLOWED}.")
    return int(number * UNITS[unit])


def _hint(number: str, unit: str) -> str:
    """Return advice for the ambiguous unit of a size such as "8G", which may be 8GiB or 8GB; "" for other units."""
    prefix = unit[:1].upper()
    return f": write {number}{prefix}iB or {number}{prefix}B" if prefix and prefix in PREFIXES else ""


def say_bytes(count: int) -> str:
    """Return `count` bytes as text in the largest binary unit that it fills, with two decimals.

    >>> say_bytes(0), say_bytes(1023), say_bytes(2**20 - 1), say_bytes(-3 * 2**29)
    ('0 B', '1023 B', '1.00 MiB', '-1.50 GiB')

    >>> say_bytes(10**6000)
    '2^19931 B or more'
    """
    if abs(count) > LARGEST:
        return f"{'-' * (count < 0)}2^{count.bit_length() - 1} B or more"
    if abs(count) < 1024:
        return f"{count} B"
    value, unit = count / 1024, PREFIXES[0]
    for prefix in PREFIXES[1:]:
        if round(abs(value), 2) < 1024:
            break
        value, unit = value / 1024, prefix
    return f"{value:.2f} {unit}iB"


def say_bytes_above(count: int) -> str:
    """Return `count` bytes as text like `say_bytes`, but rounded up, so that a budget of this text is large enough.

    >>> say_bytes_above(1025), say_bytes_above(5 * 2**30), say_bytes_above(2**20 - 1), say_bytes_above(7)
    ('1.01 KiB', '5.00 GiB', '1.00 MiB', '7 B')
    """
    text = say_bytes(count)
    if not 1024 <= count <= LARGEST or parse_bytes(text) >= count:
        return text
    number, unit = text.split()
    return f"{float(number) + 0.01:.2f} {unit}"


def say_bytes_twice(count: int) -> str:
    """Return the text of `count` bytes in binary units, as torch prints them, and in decimal units, as makers of GPUs do.

    Below 1 KiB, where both are equal, the text has the size once.

    >>> say_bytes_twice(24 * 10**9), say_bytes_twice(8 * 2**20), say_bytes_twice(100)
    ('22.35 GiB (24.00 GB)', '8.00 MiB (8.39 MB)', '100 B')
    """
    binary = say_bytes(count)
    if abs(count) < 1024 or abs(count) > LARGEST:
        return binary
    power = PREFIXES.index(binary.split()[1][0]) + 1
    return f"{binary} ({count / 1000**power:.2f} {PREFIXES[power - 1]}B)"


DURATION = re.compile(r"\s*(?P<number>[0-9]{1,9}(?:\.[0-9]{1,9})?)\s*(?P<unit>s|min|h|d|)\s*")


def parse_seconds(duration: str) -> float:
    """Return the seconds of a duration such as "1.5 min"; a number without a unit is in seconds.

    >>> parse_seconds("60s"), parse_seconds("1.5 min"), parse_seconds("2h"), parse_seconds("30")
    (60.0, 90.0, 7200.0, 30.0)
    """
    match = DURATION.fullmatch(duration)
    if match is None:
        raise ParedownError(
            f"duration {brief(duration)} cannot be read; write seconds or text such as '90s', '5min', '2h' or '1d'."
        )
    return float(match["number"]) * {unit: size for size, unit in DURATIONS}.get(match["unit"], 1)


DURATIONS = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))


def say_seconds(seconds: float) -> str:
    """Return a duration as text in its two largest units.

    >>> say_seconds(3725), say_seconds(0.4)
    ('1 h 2 min', '0 s')
    """
    left, parts = round(seconds), list[str]()
    for size, unit in DURATIONS:
        if left >= size or (unit == "s" and not parts):
            parts.append(f"{left // size} {unit}")
            left %= size
    return " ".join(parts[:2])
