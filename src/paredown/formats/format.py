"""`Format` says how a tensor is stored, by its element and optionally by a block length with scales and minimums.

    e4m3fn               8-bit floats without a scale
    int4/64@bf16         every 64 values share a bf16 scale; value = code value * scale
    e2m1fn/32@e8m0       MXFP4: 4-bit floats, a power of two for every 32
    e2m1fn/16@e4m3fn     NVFP4: 8-bit float scales, themselves scaled by one float32 for the whole tensor
    e2m1fn/16@e5m2       the same with other scales: any 8-bit float that has NaN
    [-1 -0.3 0 0.3 1]/64@bf16    a table of your own: its largest value stands for the largest magnitude of a block
    uint4/64@bf16+fp32   affine: value = code * scale + minimum, for tensors that lie on one side of zero

The layout in memory: a row is one index of dimension 0 (0-d and 1-d tensors are one row), the rest of the dimensions flattened.
Blocks run along the row and the last one may be short. Codes are packed without gaps, the first value in the lowest
bits, and each row starts on a byte. Rows never share a block, so any split of dimension 0 is a split of the bytes.

>>> f = Format.parse("int4/64@bf16")
>>> f.nbytes((3, 100))  # 3 rows of 50 bytes of codes and 2 scales
162
>>> Format.parse("int4/64@fp16")  # doctest: +ELLIPSIS
Traceback (most recent call last):
    ...
paredown.errors.FormatError: format 'int4/64@fp16': 'fp16' is no scale (it loses small momentum). Allowed: fp32, bf16, e8m0, e4m3fn...
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod
from typing import Any

from paredown.errors import FormatError
from paredown.formats.element import FLOAT_TEXT, Element, ElementKind

SCALES = ("fp32", "bf16", "e8m0", "e4m3fn")
MINIMUMS = ("fp32", "bf16")
MAX_BLOCK_LEN = 65536
TEXT = re.compile(r"(?P<element>[^/@+]*)(?:/(?P<block>[^/@+]*))?(?:@(?P<scale>[^/@+]*))?(?:\+(?P<minimum>[^/@+]*))?")
SHAPE_OF_TEXT = "element, or element/block@scale, or element/block@scale+minimum: e4m3fn, int4/64@bf16, uint4/64@bf16+fp32"
# names that other libraries use, each with the format that an error message suggests
NICKNAMES = {
    "fp8": "e4m3fn or e5m2",
    "fp4": "e2m1fn/32@e8m0",
    "mxfp4": "e2m1fn/32@e8m0",
    "mxfp8": "e4m3fn/32@e8m0",
    "nvfp4": "e2m1fn/16@e4m3fn",
    "float32": "fp32",
    "float": "fp32",
    "bfloat16": "bf16",
    "float16": "fp16",
    "half": "fp16",
    "float8_e4m3fn": "e4m3fn",
    "float8_e5m2": "e5m2",
}


@dataclass(frozen=True, repr=False)
class Format:
    """How a tensor is stored: the type of its codes, and optionally blocks of some length with a scale and a minimum.

    Decoding needs the format, the codes and scales, the shape and the dtype, and nothing else.
    """

    element: Element
    block: int | None = None
    scale: Element | None = None
    minimum: Element | None = None

    def __post_init__(self) -> None:
        if (self.block is None) != (self.scale is None) or (self.minimum is not None and self.block is None):
            raise FormatError(f"format {str(self)!r}: block and scale go together, and a minimum goes with them.")
        if self.block is not None and self.scale is not None:
            _block_len(str(self), str(self.block))
            _shared(str(self), str(self.scale), "scale", SCALES)
            _check_block(str(self), self.element, self.minimum)

    @staticmethod
    def parse(text: str | Format) -> Format:
        """Return the format with this text; a Format is returned unchanged."""
        if isinstance(text, Format):
            return text
        if not isinstance(text, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise FormatError(f"a format is text such as 'int4/64@bf16' or a Format, not {type(text).__name__}.")
        return _parse(text)

    @classmethod
    def from_json(cls, text: str) -> Format:
        """Return the format whose `to_json` is `text`."""
        return cls.parse(text)

    def to_json(self) -> str:
        """Return the JSON value of a format, which is its text."""
        return str(self)

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[Any, ...]:
        return Format.parse, (str(self),)

    @cached_property
    def _hash(self) -> int:
        return hash((self.element, self.block, self.scale, self.minimum))

    def __repr__(self) -> str:
        return f"Format({str(self)!r})"

    def __str__(self) -> str:
        block = f"/{self.block}@{self.scale}" if self.block is not None or self.scale is not None else ""
        return f"{self.element}{block}" + (f"+{self.minimum}" if self.minimum else "")

    @cached_property
    def has_tensor_scale(self) -> bool:
        """Whether a tensor has one more float32 scale, by which the 8-bit scales of its blocks are multiplied."""
        return self.scale is not None and self.scale.kind is ElementKind.FLOAT and self.scale.width == 8

    @property
    def bits_per_value(self) -> float:
        """The bits that this format takes for each value of a large tensor, scales included.

        >>> Format.parse("int4/64@bf16").bits_per_value
        4.25
        """
        shared = sum(e.width for e in (self.scale, self.minimum) if e)
        return self.element.width + (shared / self.block if self.block else 0.0)

    @staticmethod
    def rows_and_cols(shape: Iterable[int]) -> tuple[int, int]:
        """Return the (rows, cols) layout in which formats store a tensor of `shape`: a row is one index of dimension 0."""
        shape = tuple(shape)
        if any(not hasattr(n, "__index__") or n < 0 for n in shape):
            raise FormatError(f"a shape is whole numbers from 0 up, not {shape}.")
        return (shape[0], prod(shape[1:])) if len(shape) > 1 else (1, prod(shape))

    def row_bytes(self, cols: int) -> int:
        """Return the bytes that the codes of a row of `cols` values take, without scales."""
        return -(-cols * self.element.width // 8)

    def blocks_per_row(self, cols: int) -> int:
        """Return the number of blocks in one row of `cols` values, a short last block included; 0 without blocks."""
        return -(-cols // self.block) if self.block else 0

    def nbytes(self, shape: Iterable[int]) -> int:
        """Return the bytes of a tensor of `shape` in this format: codes, padding, scales and minimums together."""
        rows, cols = self.rows_and_cols(shape)
        per_block = sum(e.width for e in (self.scale, self.minimum) if e) // 8
        return rows * (self.row_bytes(cols) + self.blocks_per_row(cols) * per_block) + 4 * self.has_tensor_scale


@lru_cache(maxsize=4096)
def _parse(text: str) -> Format:
    match = TEXT.fullmatch(text)
    if match is None:
        raise FormatError(f"format {text!r} is not of the form {SHAPE_OF_TEXT}.")
    element = _element(text, match["element"])
    if match["block"] is None:
        return _unblocked(text, element, match)
    block = _block_len(text, match["block"])
    if match["scale"] is None:
        raise FormatError(
            f"format {text!r}: a block of {block} needs a scale: write {element}/{block}@bf16. Allowed: {', '.join(SCALES)}."
        )
    scale = _shared(text, match["scale"], "scale", SCALES)
    minimum = _shared(text, match["minimum"], "minimum", MINIMUMS) if match["minimum"] is not None else None
    _check_block(text, element, minimum)
    return Format(element, block, scale, minimum)


def _element(text: str, part: str) -> Element:
    try:
        return Element.parse(part)
    except FormatError as error:
        nickname = NICKNAMES.get(part.lower()) or (part.lower() if part != part.lower() else None)
        hint = f" Did you mean {nickname}?" if nickname else ""
        raise FormatError(f"format {text!r}: {error}{hint}") from None


def _unblocked(text: str, element: Element, match: re.Match[str]) -> Format:
    if match["scale"] is not None or match["minimum"] is not None:
        raise FormatError(
            f"format {text!r}: a scale or a minimum belongs to a block: write {element}/64@{match['scale'] or 'bf16'}."
        )
    return Format(element)


def _block_len(text: str, part: str) -> int:
    if not re.fullmatch("[1-9][0-9]{0,5}", part) or int(part) > MAX_BLOCK_LEN:
        raise FormatError(f"format {text!r}: block length {part!r} is no whole number from 1 to {MAX_BLOCK_LEN}.")
    return int(part)


def _shared(text: str, part: str, what: str, allowed: tuple[str, ...]) -> Element:
    if part in allowed:
        return Element.parse(part)
    others = " and other 8-bit floats that have NaN" if what == "scale" else ""
    if others and FLOAT_TEXT.fullmatch(part):
        element = Element.parse(part)
        if element.width == 8 and element.nan_code is not None:
            return element
    why = " (it loses small momentum)" if part == "fp16" else ""
    raise FormatError(f"format {text!r}: {part!r} is no {what}{why}. Allowed: {', '.join(allowed)}{others}.")


def _check_block(text: str, element: Element, minimum: Element | None) -> None:
    if minimum is not None and element.kind is not ElementKind.UINT:
        raise FormatError(f"format {text!r}: a minimum needs codes that start at 0: uint{min(element.width, 16)}, not {element}.")
    has_zero = element.kind is not ElementKind.TABLE or 0.0 in element.table
    if not has_zero or element.name == "int1":
        lacks = "positive value" if has_zero else "zero"
        remedy = "Add 0 to its values." if element.name.startswith("[") else "Use int2 or uint1 with a minimum."
        raise FormatError(f"format {text!r}: {element} has no {lacks}, so a block of it cannot hold a tensor. {remedy}")
