"""What one update reads and writes: a `Slot` for each tensor of a parameter, a `Unit` for the parameter, and `How` it is stored.

    weight     int8/64@e8m0   codes (rows, cols) uint8, scales (rows, blocks) uint8         or plain: codes (rows, cols) bf16
    residue    plain int8     the 8 bits below a bf16 weight
    moments    int8/64@bf16   codes (rows, cols) uint8, scales (rows, blocks) bf16          or plain: codes (rows, cols) fp32
    gradient   as a moment, read only; its scales are multiplied with `factor`, a number on the device, where there is one

A slot without a format is a plain tensor in `parts.codes`: it may be the user's own parameter or gradient, seen as (rows, cols).
Units that are stored alike (one `How`) go through one launch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from paredown.codec.reference import Parts
from paredown.formats.format import Format
from paredown.formats.rounding import Rounding

PLAIN_BLOCK = 64  # values that are left as they were together, where nothing is in blocks
PLAIN_FORMATS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


class Kind(NamedTuple):
    """How one slot is stored: format, or dtype of a plain tensor; rounding; how often a root is taken first."""

    format: Format | None
    dtype: torch.dtype | None
    rounding: Rounding
    roots: int

    @property
    def stored(self) -> Format:
        """The format, or that of the plain dtype."""
        assert self.format is not None or self.dtype is not None
        return self.format or Format.parse(PLAIN_FORMATS[self.dtype])  # type: ignore[index]


@dataclass(frozen=True, eq=False)
class Slot:
    """One tensor of a parameter: `parts` in `format`, or a plain tensor in `parts.codes`, (rows, cols); written in place.

    `roots`: what is stored is the square root of the values (1), or close to the root of that (2): `rules.stored_root`. Such codes are at
    least 1.
    """

    format: Format | None
    rounding: Rounding
    parts: Parts
    roots: int = 0

    @cached_property
    def kind(self) -> Kind:
        """How it is stored."""
        return Kind(self.format, None if self.format is not None else self.codes.dtype, self.rounding, self.roots)

    @property
    def codes(self) -> Tensor:
        """The codes, or the plain tensor."""
        assert self.parts.codes is not None
        return self.parts.codes


class How(NamedTuple):
    """How a unit is stored and updated; units alike in this go through one launch."""

    rule: str
    block: int  # values that are left as they were together
    weight: Kind
    has_residue: bool
    moments: tuple[Kind, ...]
    gradient: Kind


@dataclass(frozen=True, eq=False)
class Unit:
    """A parameter's slots, and what does not change from step to step."""

    weight: Slot
    residue: Slot | None  # plain int8 beside a plain bf16 weight
    moments: tuple[Slot, ...]
    gradient: Slot
    rows: int
    cols: int
    tensor_id: int  # of its random bits
    first_index: int  # of its first value in the whole tensor
    factor: Tensor | None = None  # float32 of no dimensions, on the device
    counters: Tensor = field(default_factory=lambda: torch.zeros(5, dtype=torch.int32))  # see `reference.py`

    def how(self, rule: str) -> How:
        """How it is stored and updated."""
        return How(rule, *self._stored)

    @cached_property
    def _stored(self) -> tuple[int, Kind, bool, tuple[Kind, ...], Kind]:
        moments = tuple(m.kind for m in self.moments)
        formats = [kind.format for kind in (self.weight.kind, *moments, self.gradient.kind)]
        block = max([f.block for f in formats if f is not None and f.block] or [PLAIN_BLOCK])
        return block, self.weight.kind, self.residue is not None, moments, self.gradient.kind
