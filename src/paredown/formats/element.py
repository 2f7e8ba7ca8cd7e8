"""`Element`: the type of one stored number, which defines the value of each code.

A float such as `e4m3fn` keeps a sign bit, 4 exponent bits and 3 mantissa bits. Read left to right, 0 1000 101 is

    sign + | exponent 1000 = 8 | mantissa 101 = 5      value = + 2^(8 - bias) * (1 + 5/8) = 2 * 1.625 = 3.25

with bias 7, the middle of the exponent range. When the exponent bits are all zero the number is *subnormal*: its
leading 1 is missing, value = mantissa/8 * 2^(1 - bias), so that the steps near zero stay even instead of leaving a hole. Each
power of two holds 8 values, so the error of rounding is at most 1/16 of the value, anywhere between 2^-6 and 448.
The suffix names the codes that are not numbers, as in ml_dtypes:

    e4m3      IEEE: the largest exponent is kept for inf and NaN; the largest value is 240
    e4m3fn    finite, one NaN (all ones): the largest value is 448. Below 8 bits `fn` has no NaN: e2m1fn reaches 6
    e4m3fnuz  finite, NaN in place of -0, and a bias one higher
    e4m3f     finite: every code is a number (ml_dtypes has no such type); below 8 bits the same as `fn`
    e4m3b11   an explicit bias; it stands before the suffix: e4m3b11fnuz
    e4m3ns    no subnormals: with exponent bits all zero the value is 0, whatever the mantissa

Integers are treated as floats that are subnormal everywhere: `int8` has equal steps of 1. mantissa_bits and min_exponent describe both
kinds, and one rounding rule applies to both. `intN` is
two's complement and encoding uses the symmetric range (int8: -127..127, int2: -1, 0, 1; int1 is -1, 0); `uintN` starts at 0.
Tables (`nf4`, `e8m0`) list their values from the smallest to the largest; a code is an index into the list. A table of your own is
spelled by its values, `[-1 -0.5 0 0.5 1]`, in as many bits as their number needs; each becomes the nearest float32.

Every value is exactly representable in float32. Codes of wide elements whose value float32 cannot hold
(e8m7fn has one binade past it) are never produced.

>>> e = Element.parse("e4m3fn")
>>> e.value(0b0_1000_101), e.max_value, e.smallest
(3.25, 448.0, 0.001953125)
>>> [Element.parse("int2").value(code) for code in (0, 1, 3)]
[0.0, 1.0, -1.0]
>>> Element.of_values((-1, -0.25, 0, 0.25, 1)), Element.parse("[-1 -.25 0 .25 1]").width
(Element('[-1 -0.25 0 0.25 1]'), 3)
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from functools import cache, cached_property
from itertools import pairwise
from math import inf, ldexp, nan
from typing import Any

from paredown.errors import FormatError

FLOAT32_MIN_EXPONENT = -149  # exponent of float32's smallest subnormal
FLOAT32_MAX_EXPONENT = 127
MAX_INT_WIDTH = 16
ALLOWED = (
    "eXmY with X in 1..8 and Y in 0..23, then optionally a bias (b11), specials (fn, fnuz, f) and ns; "
    "intN or uintN with N in 1..16; e8m0, nf4, fp32, bf16, fp16; or the values of a table, [-1 -0.5 0 0.5 1]"
)
MAX_TABLE_LEN = 256


class ElementKind(str, Enum):
    """The kinds of elements, by what a code consists of: bits of a float, an integer, or an index into a table of values."""

    FLOAT = "float"  # sign bit, exponent, mantissa
    INT = "int"  # two's complement
    UINT = "uint"
    TABLE = "table"  # an index into a list of values


class Specials(str, Enum):
    """The conventions by which some codes of a float stand for infinity or NaN; a value is the suffix in elements' names."""

    IEEE = ""
    FN = "fn"
    FNUZ = "fnuz"
    NONE = "f"


@dataclass(frozen=True, repr=False)
class Element:
    """A type of number, such as `e4m3fn` or `int4`: it defines which value each code (pattern of bits) stands for.

    `Element.parse` creates an element. Elements that define the same values are equal, whatever their names are.
    """

    name: str = field(compare=False)
    kind: ElementKind
    width: int
    mantissa_bits: int = 0
    min_exponent: int = 0  # exponent of the smallest normal value, 1 - bias
    specials: Specials = Specials.NONE
    subnormals: bool = True
    table: tuple[float, ...] = ()

    @staticmethod
    def parse(text: str) -> Element:
        """Return the element named `text`; raise FormatError, with the allowed names, if there is none."""
        if not isinstance(text, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise FormatError(f"an element is text such as 'e4m3fn', not {type(text).__name__}.")
        return _parse(text)

    @staticmethod
    def of_values(values: Iterable[float]) -> Element:
        """Return the element whose values are `values`, in ascending order; its text lists them."""
        return _parse(f"[{' '.join(map(_text_of, values))}]")

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[Any, ...]:
        return Element.parse, (self.name,)

    @cached_property
    def _hash(self) -> int:
        """The element's hash, computed once, because formats are dictionary keys for every tensor of a step."""
        return hash((self.kind, self.width, self.mantissa_bits, self.min_exponent, self.specials, self.subnormals, self.table))

    def __str__(self) -> str:
        return self.name

    def __repr__(self) -> str:
        return f"Element({self.name!r})"

    @cached_property
    def signed(self) -> bool:
        """Whether the element has values below zero."""
        return self.min_value < 0

    @property
    def sign_code(self) -> int:
        """The code of a float in which only the sign bit is set; 0 for elements without a sign bit."""
        return 1 << (self.width - 1) if self.kind is ElementKind.FLOAT else 0

    @cached_property
    def max_code(self) -> int:
        """The code of the largest value that the element has."""
        if self.kind is ElementKind.TABLE:
            return len(self.table) - 1
        if self.kind is not ElementKind.FLOAT:
            return (1 << (self.width - (self.kind is ElementKind.INT))) - 1
        ones = self.sign_code - 1
        top = {Specials.IEEE: ones - (1 << self.mantissa_bits), Specials.FN: ones - 1}.get(self.specials, ones)
        fields = FLOAT32_MAX_EXPONENT - self.min_exponent + 2
        return min(top, (fields << self.mantissa_bits) - 1)

    @cached_property
    def min_code(self) -> int:
        """The code of the magnitude of the most negative value: max_code for floats and intN, 1 for int1, 0 for uintN."""
        return 0 if self.kind is ElementKind.UINT else max(self.max_code, 1)

    @cached_property
    def inf_code(self) -> int | None:
        """The code that stands for +infinity; None if the element has no infinity."""
        return self.sign_code - (1 << self.mantissa_bits) if self._is(Specials.IEEE) else None

    @cached_property
    def nan_code(self) -> int | None:
        """The code to which encoding turns NaN; None if the element has no NaN."""
        if self.kind is ElementKind.TABLE and len(self.table) < 1 << self.width:
            return len(self.table)
        if self._is(Specials.IEEE):
            return self.sign_code - (1 << self.mantissa_bits) // 2
        if self._is(Specials.FN):
            return self.sign_code - 1
        return self.sign_code if self._is(Specials.FNUZ) else None

    @cached_property
    def max_value(self) -> float:
        """The largest value that the element has."""
        return self.value(self.max_code)

    @cached_property
    def min_value(self) -> float:
        """The smallest value that encoding uses: -max_value for floats and integers (-1 for int1), 0 for uintN."""
        if self.kind is ElementKind.TABLE:
            return self.table[0]
        if self.kind is ElementKind.UINT:
            return 0.0
        return -self.max_value if self.max_code else -1.0

    @cached_property
    def smallest(self) -> float:
        """The smallest positive value that the element has."""
        if self.kind is ElementKind.TABLE:
            return min(v for v in self.table if v > 0)
        return abs(self.value(1 if self.subnormals else 1 << self.mantissa_bits))

    def value(self, code: int) -> float:
        """Return the exact value that `code` stands for, which may be infinity or NaN."""
        if not 0 <= code < 1 << self.width:
            raise FormatError(f"{self.name} has codes 0..{(1 << self.width) - 1}, not {code}.")
        if self.kind is ElementKind.TABLE:
            return self.table[code] if code < len(self.table) else nan
        if self.kind is ElementKind.INT:
            return float(code - (1 << self.width) if code >> (self.width - 1) else code)
        sign = -1.0 if code & self.sign_code else 1.0
        return sign * self._magnitude(code & ~self.sign_code, negative=sign < 0)

    def values(self) -> tuple[float, ...]:
        """Return the values of all codes, in the order of the codes; the element may have at most 16 bits."""
        return _values(self)

    def _magnitude(self, code: int, *, negative: bool) -> float:
        field_, mantissa = code >> self.mantissa_bits, code & ((1 << self.mantissa_bits) - 1)
        if self.inf_code is not None and code >= self.inf_code:
            return inf if code == self.inf_code else nan
        if (self._is(Specials.FN) and code == self.nan_code) or (self._is(Specials.FNUZ) and negative and code == 0):
            return nan
        if field_ == 0:
            return ldexp(mantissa, self.min_exponent - self.mantissa_bits) if self.subnormals else 0.0
        return ldexp((1 << self.mantissa_bits) + mantissa, field_ - 1 + self.min_exponent - self.mantissa_bits)

    def _is(self, specials: Specials) -> bool:
        return self.kind is ElementKind.FLOAT and self.specials is specials


@cache
def _values(element: Element) -> tuple[float, ...]:
    return tuple(element.value(code) for code in range(1 << element.width))


NUMBER = "(?:0|[1-9][0-9]{0,5})"
FLOAT_TEXT = re.compile(f"e(?P<x>{NUMBER})m(?P<y>{NUMBER})(?:b(?P<bias>{NUMBER}))?(?P<specials>fnuz|fn|f)?(?P<ns>ns)?")
INT_TEXT = re.compile(f"(?P<kind>u?int)(?P<width>{NUMBER})")
TABLE_TEXT = re.compile(r"\[([-0-9.e, ]{1,8192})\]")
DECIMAL = re.compile("-?(?:[0-9]{1,40}[.]?[0-9]{0,60}|[.][0-9]{1,60})(?:e-?[0-9]{1,3})?")
SAME_AS = {"fp32": "e8m23", "bf16": "e8m7", "fp16": "e5m10"}


# NF4 of QLoRA (Dettmers et al. 2023, appendix E): quantiles of a normal distribution scaled to 1, rounded to float32 in its code.
# The formula and these constants differ in the last bits; checkpoints of other libraries use the constants.
NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
TABLES = {
    "nf4": (4, NF4),
    "e8m0": (8, tuple(ldexp(1.0, k - 127) for k in range(255))),  # powers of two; code 255 is NaN
}


@cache
def _parse(text: str) -> Element:
    if text in TABLES:
        width, values = TABLES[text]
        return Element(text, ElementKind.TABLE, width, table=values)
    if match := INT_TEXT.fullmatch(text):
        return _integer(text, ElementKind(match["kind"]), int(match["width"]))
    if match := FLOAT_TEXT.fullmatch(SAME_AS.get(text, text)):
        return _float(text, match)
    if match := TABLE_TEXT.fullmatch(text):
        return _table(text, match[1].replace(",", " ").split())
    raise FormatError(f"element {text!r} is unknown. Allowed: {ALLOWED}.")


def _text_of(value: float) -> str:
    """Return a number as text without "+" (as in 1e+20), because in the text of a format "+" begins the minimum."""
    return repr(float(value)).removesuffix(".0").replace("+", "")


def _table(text: str, numbers: list[str]) -> Element:
    if not 2 <= len(numbers) <= MAX_TABLE_LEN or not all(DECIMAL.fullmatch(number) for number in numbers):
        raise FormatError(f"element {text!r}: a table has 2 to {MAX_TABLE_LEN} decimal numbers such as -0.5, separated by spaces.")
    try:
        values = tuple(struct.unpack("<f", struct.pack("<f", float(number)))[0] + 0.0 for number in numbers)
    except OverflowError:
        raise FormatError(f"element {text!r}: values are at most 3.4e38, the largest of float32.") from None
    if any(low >= high for low, high in pairwise(values)) or values[-1] <= 0:
        raise FormatError(
            f"element {text!r}: the values of a table rise, differ in float32, and end above 0. Sort them, and drop repeated ones."
        )
    name = f"[{' '.join(_text_of(value) for value in map(float, numbers))}]"
    return Element(name, ElementKind.TABLE, (len(values) - 1).bit_length(), table=values)


def _integer(text: str, kind: ElementKind, width: int) -> Element:
    if not 1 <= width <= MAX_INT_WIDTH:
        raise FormatError(f"element {text!r}: {width} bits, but {kind.value}N takes 1..{MAX_INT_WIDTH}.")
    magnitude_bits = width - (kind is ElementKind.INT)
    return Element(text, kind, width, mantissa_bits=magnitude_bits, min_exponent=magnitude_bits)


def _float(text: str, match: re.Match[str]) -> Element:
    exponent_bits, mantissa_bits = int(match["x"]), int(match["y"])
    if not (1 <= exponent_bits <= 8 and 0 <= mantissa_bits <= 23):
        raise FormatError(
            f"element {text!r}: {exponent_bits} exponent and {mantissa_bits} mantissa bits; allowed are 1..8 and 0..23."
        )
    width = 1 + exponent_bits + mantissa_bits
    specials = Specials(match["specials"] or "")
    if specials is Specials.FN and width < 8:
        specials = Specials.NONE
    half = 1 << (exponent_bits - 1)
    bias = int(match["bias"]) if match["bias"] else half - (specials is not Specials.FNUZ)
    _check_float(text, specials, bias, exponent_bits, mantissa_bits, subnormals=not match["ns"])
    subnormals = not match["ns"] or mantissa_bits == 0  # without a mantissa there are none to leave out
    return Element(text, ElementKind.FLOAT, width, mantissa_bits, 1 - bias, specials, subnormals)


def _check_float(text: str, specials: Specials, bias: int, exponent_bits: int, mantissa_bits: int, *, subnormals: bool) -> None:
    if specials is Specials.IEEE and mantissa_bits == 0:
        raise FormatError(
            f"element {text!r}: IEEE inf and NaN need at least one mantissa bit to differ. Write {text.removesuffix('ns')}fn, or f."
        )
    if specials is Specials.IEEE and exponent_bits == 1 and not subnormals:
        raise FormatError(
            f"element {text!r}: its one exponent above zero holds inf and NaN, so no value is left. Drop 'ns' or add 'fn'."
        )
    finest = 1 - bias - mantissa_bits  # the exponent of the smallest step, above or below the smallest normal value
    if finest < FLOAT32_MIN_EXPONENT:
        most = 1 - FLOAT32_MIN_EXPONENT - mantissa_bits
        raise FormatError(
            f"element {text!r}: bias {bias} puts its smallest step at 2^{finest}, below float32's 2^{FLOAT32_MIN_EXPONENT}. "
            f"Allowed with {mantissa_bits} mantissa bits: a bias of at most {most}."
        )
