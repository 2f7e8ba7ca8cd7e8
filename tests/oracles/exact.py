"""Elements from their definition, in exact fractions: the value of each code, and every number rounded by hand.

Nothing is taken from the package. A float of sign s, exponent field F and mantissa M (of m bits) is

    (-1)^s * 2^(F - bias) * (1 + M / 2^m),   and for F = 0:  (-1)^s * 2^(1 - bias) * M / 2^m   (or 0 without subnormals)

Encoding sees the magnitudes as an endless ladder 0 = g(0) < g(1) < ..., which goes on past the last number of the element as if
every code were one. A magnitude between g(j) and g(j + 1) takes one of the two; if it takes a rung past the last number,
it overflows. Python's bisect finds j, so that no arithmetic of the codec is repeated here.

>>> element("e2m1fn").numbers()[-3:]
[Fraction(3, 1), Fraction(4, 1), Fraction(6, 1)]
>>> element("e2m1fn").rounded(2.5, "nearest_even"), element("e2m1fn").rounded(2.5, "nearest_away")
(2.0, 3.0)
"""

from __future__ import annotations

import re
from bisect import bisect_right
from dataclasses import dataclass
from fractions import Fraction
from functools import cache, cached_property
from math import copysign, inf, isinf, isnan, nan

FLOAT32_MAX = Fraction(2) ** 128 - Fraction(2) ** 104
ALIASES = {"fp32": "e8m23", "bf16": "e8m7", "fp16": "e5m10"}
NF4 = (  # the sixteen constants of the QLoRA paper, as they are printed there
    "-1.0 -0.6961928009986877 -0.5250730514526367 -0.39491748809814453 -0.28444138169288635 -0.18477343022823334 "
    "-0.09105003625154495 0.0 0.07958029955625534 0.16093020141124725 0.24611230194568634 0.33791524171829224 "
    "0.44070982933044434 0.5626170039176941 0.7229568362236023 1.0"
)


@dataclass(frozen=True)
class Exact:
    """One element, by its letters. `table` holds the values of the kinds that are lists."""

    kind: str
    width: int
    mantissa_bits: int = 0
    bias: int = 0
    specials: str = "f"
    hole: bool = False  # no subnormals: nothing between 0 and 2^(1 - bias)
    table: tuple[Fraction, ...] = ()

    def value(self, code: int) -> Fraction | float:
        """What `code` means: a fraction, or the float inf, -inf or nan."""
        if self.kind == "table":
            return self.table[code] if code < len(self.table) else nan
        if self.kind == "int":
            return Fraction(code - 2**self.width if code >= 2 ** (self.width - 1) else code)
        return Fraction(code) if self.kind == "uint" else self._float_value(code)

    def _float_value(self, code: int) -> Fraction | float:
        sign, rest = divmod(code, 2 ** (self.width - 1))
        field, mantissa = divmod(rest, 2**self.mantissa_bits)
        last_field, last_mantissa = 2 ** (self.width - 1 - self.mantissa_bits) - 1, 2**self.mantissa_bits - 1
        if self.specials == "" and field == last_field:
            return nan if mantissa else (-inf if sign else inf)
        if self.specials == "fn" and (field, mantissa) == (last_field, last_mantissa):
            return nan
        if self.specials == "fnuz" and sign and rest == 0:
            return nan
        return (-1) ** sign * self._ladder_of_code(rest)

    def _ladder_of_code(self, code: int) -> Fraction:
        field, mantissa = divmod(code, 2**self.mantissa_bits)
        fraction = Fraction(mantissa, 2**self.mantissa_bits)
        if field == 0:
            return Fraction(0) if self.hole else fraction * Fraction(2) ** (1 - self.bias)
        return (1 + fraction) * Fraction(2) ** (field - self.bias)

    def code_of_rung(self, rung: int) -> int:
        """The magnitude code of a rung: they are the same, but without subnormals the codes in the hole are left out."""
        return rung - 1 + 2**self.mantissa_bits if self.hole and rung else rung

    def rung(self, index: int) -> Fraction:
        """g(index)."""
        if self.kind != "float":
            return Fraction(index)
        if index not in self._rungs:
            self._rungs[index] = self._ladder_of_code(self.code_of_rung(index))
        return self._rungs[index]

    @cached_property
    def _rungs(self) -> dict[int, Fraction]:
        return {}  # those already worked out: bisection comes by the same ones again and again

    @cached_property
    def last_rung(self) -> int:
        """The last rung above zero that is a number, and one that float32 can hold."""
        if self.kind != "float":
            return 2 ** (self.width - (self.kind == "int")) - 1
        codes = range(2 ** (self.width - 1))
        numbers = bisect_right(codes, False, key=lambda code: not self._is_number(code))
        return bisect_right(range(numbers), numbers - 1, key=self.code_of_rung) - 1

    def _is_number(self, code: int) -> bool:
        value = self.value(code)
        return isinstance(value, Fraction) and value <= FLOAT32_MAX

    def last_rung_below(self) -> int:
        """The last rung below zero; encoding keeps integers symmetric, but for int1, which is -1 and 0."""
        return {"uint": 0, "int": max(self.last_rung, 1)}.get(self.kind, self.last_rung)

    def numbers(self) -> list[Fraction]:
        """Every value that encoding may give, sorted; for elements that can be listed."""
        if self.kind == "table":
            return list(self.table)
        below = [-self.rung(k) for k in range(self.last_rung_below(), 0, -1)]
        return below + [self.rung(k) for k in range(self.last_rung + 1)]

    @property
    def max(self) -> Fraction:
        """The largest number."""
        return self.table[-1] if self.table else self.rung(self.last_rung)

    def code_of(self, number: float) -> int:
        """The code that encoding gives to a number that the element has; of several zeros the one with an empty mantissa."""
        if self.table:
            return self.table.index(Fraction(number))
        rung = bisect_right(range(self.last_rung_below() + self.last_rung + 1), abs(Fraction(number)), key=self.rung) - 1
        if self.kind != "float":
            return (rung if number > 0 else -rung) % 2**self.width
        return self.code_of_rung(rung) + (2 ** (self.width - 1) if copysign(1.0, number) < 0 else 0)

    def rounded(self, y: float | Fraction, rounding: str, overflow: str = "nonfinite", bits: int = 0) -> float:
        """`y` as the element says it; inf and nan where it cannot, or does so by a special code."""
        if isnan(y):
            return nan
        result = self._rounded_in_table(y, rounding, bits) if self.table else self._rounded_on_ladder(y, rounding, bits)
        if isinf(result):
            return self._end(result) if overflow == "saturate" else (nan if self._says_nan_alone() else result)
        has_negative_zero = self.kind == "float" and self.specials != "fnuz"
        return copysign(0.0, y) if result == 0 and has_negative_zero else result

    def _says_nan_alone(self) -> bool:
        """Whether there is a code for nan and none for inf. Where there is neither, decoded numbers still say inf."""
        return self.specials in ("fn", "fnuz") or 0 < len(self.table) < 2**self.width

    def _end(self, towards: float) -> float:
        if self.table:
            return float(self.table[-1] if towards > 0 else self.table[0])
        return float(self.max if towards > 0 else -self.rung(self.last_rung_below()))

    def _rounded_on_ladder(self, y: float | Fraction, rounding: str, bits: int) -> float:
        if isinf(y):
            return float(y)
        last = self.last_rung_below() if y < 0 else self.last_rung
        low, fraction, num_bits = self._place_on_ladder(y, last)
        if low <= last:
            low += goes_up(fraction, self.code_of_rung(low) % 2 == 1, rounding, bits, num_bits)
        return copysign(inf if low > last else float(self.rung(low)), y) if low else 0.0

    def _place_on_ladder(self, y: float | Fraction, last: int) -> tuple[int, Fraction, int]:
        """The rung below |y|, the fraction of the way to the next, and how many random bits decide there."""
        magnitude = abs(Fraction(y))
        low = bisect_right(range(last + 2), magnitude, key=self.rung) - 1
        below, above = self.rung(low), self.rung(low + 1)
        return low, (magnitude - below) / (above - below), 30 - (0 if self.hole and low == 0 else self.mantissa_bits)

    def _rounded_in_table(self, y: float | Fraction, rounding: str, bits: int) -> float:
        if not self._table_reaches(y, rounding):
            return inf if y > self.table[-1] else -inf
        low, fraction, stochastic_fraction = self._place_in_table(y)
        if rounding == "stochastic":  # the upper value, not the larger magnitude
            up = goes_up(stochastic_fraction, False, rounding, bits, 31)
        elif rounding == "toward_zero":
            up = fraction > 0 if y < 0 else fraction == 1
        else:
            larger_is_above = self.table[low + 1] > -self.table[low]
            upper_on_tie = larger_is_above if rounding == "nearest_away" else low % 2 == 1
            up = goes_up(fraction, upper_on_tie or self._goes_on_like_a_float(), "nearest_even", 0, 0)
        return float(self.table[low + up])

    def _place_in_table(self, y: float | Fraction) -> tuple[int, Fraction, Fraction]:
        """The place of the value below, the fraction of the way to the next, and the same in float32 steps."""
        exact = min(max(Fraction(y), self.table[0]), self.table[-1])
        low = min(bisect_right(self.table, exact), len(self.table) - 1) - 1
        below, above = self.table[low], self.table[low + 1]
        in_float32 = float32(float32(exact - below) / float32(above - below))
        return low, (exact - below) / (above - below), in_float32

    def turn(self, y: float) -> int:
        """The smallest random number for which stochastic rounding of a finite `y` takes the upper neighbour; 2^32 for none."""
        if self.table:
            fraction, num_bits = self._place_in_table(y)[2], 31
        else:
            fraction, num_bits = self._place_on_ladder(y, self.last_rung_below() if y < 0 else self.last_rung)[1:]
        return max(2**num_bits - int(fraction * 2**num_bits), 0) * 2 ** (32 - num_bits)

    def _goes_on_like_a_float(self) -> bool:
        return len(self.table) == 255  # e8m0: half-way it takes the larger, and its ends are those of a float

    def _table_reaches(self, y: float | Fraction, rounding: str) -> bool:
        if isinf(y) or not self._goes_on_like_a_float():
            return self.table[0] <= y <= self.table[-1]
        return y > 0 and (not rounding.startswith("nearest") or Fraction(y) < Fraction(2) ** 128 * 3 / 4)


def goes_up(fraction: Fraction, odd: bool, rounding: str, bits: int, num_bits: int) -> bool:
    """Whether the upper neighbour is taken, `fraction` of the way from the lower one, whose code is `odd` or not."""
    half = Fraction(1, 2)
    if rounding == "stochastic":
        return int(fraction * 2**num_bits) + bits // 2 ** (32 - num_bits) >= 2**num_bits
    return {
        "toward_zero": False,
        "nearest_even": fraction > half or (fraction == half and odd),
        "nearest_away": fraction >= half,
    }[rounding]


def floor_log2(x: Fraction) -> int:
    """The exponent of the largest power of two that is at most `x` > 0."""
    exponent = x.numerator.bit_length() - x.denominator.bit_length()
    return exponent if Fraction(2) ** exponent <= x else exponent - 1


def float32(x: Fraction) -> Fraction:
    """The float32 nearest to `x`, ties to even; `x` is within float32's range."""
    if x == 0:
        return x
    step = Fraction(2) ** (max(floor_log2(abs(x)), -126) - 23)
    return round(x / step) * step  # Python rounds halves to even


@cache
def element(text: str) -> Exact:
    """The element that `text` spells."""
    if text in ("nf4", "e8m0"):
        values = [Fraction(float(v)) for v in NF4.split()] if text == "nf4" else [Fraction(2) ** (k - 127) for k in range(255)]
        return Exact("table", 4 if text == "nf4" else 8, table=tuple(values))
    if match := re.fullmatch(r"(u?int)([0-9]+)", text):
        kind, width = match[1], int(match[2])
        return Exact(kind, width, mantissa_bits=width - (kind == "int"))
    match = re.fullmatch(r"e([0-9]+)m([0-9]+)(?:b([0-9]+))?(fnuz|fn|f)?(ns)?", ALIASES.get(text, text))
    assert match, f"{text!r} is no element"
    width, specials = 1 + int(match[1]) + int(match[2]), match[4] or ""
    middle = 2 ** (int(match[1]) - 1) - (0 if specials == "fnuz" else 1)
    if specials == "fn" and width < 8:
        specials = "f"
    return Exact("float", width, int(match[2]), int(match[3]) if match[3] else middle, specials, bool(match[5]))
