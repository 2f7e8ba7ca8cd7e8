"""What one slot is given: a format, how encoding rounds, and what becomes of values past the largest one.

>>> a = Assignment.parse("int4/64@bf16")
>>> a.resolved_rounding.value, Assignment.parse("int8_block").resolved_rounding.value
('stochastic', 'nearest_even')
>>> a.say()
'int4/64@bf16, 4.25 bits a value, stochastic rounding'
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TypeVar

from paredown.errors import FormatError, PlanError
from paredown.formats.catalog import find_format
from paredown.formats.format import Format
from paredown.formats.rounding import Overflow, Rounding, default_rounding
from paredown.roles import ACCUMULATED, Role
from paredown.serial import brief

FormatLike = Format | str | None  # a name of the catalog is text too; None: as it is
ROUNDING_IN_WORDS = {
    Rounding.NEAREST_EVEN: "rounding to nearest",
    Rounding.TOWARD_ZERO: "rounding toward zero",
    Rounding.NEAREST_AWAY: "rounding to nearest, ties away from zero",
    Rounding.STOCHASTIC: "stochastic rounding",
}
OVERFLOW_IN_WORDS = {
    Overflow.SATURATE: "larger values become the largest",
    Overflow.NONFINITE: "larger values become infinity or NaN",
}
Choice = TypeVar("Choice", bound=Enum)


@dataclass(frozen=True)
class Assignment:
    """Format, rounding and overflow of a slot. Without a format the tensor stays as it is.

    `rounding` None is stochastic for elements of fewer than 8 bits and for weights, gradients and second moments, and to nearest for the
    others (`rounding_in`); `overflow`
    None is the codec's own: saturate within blocks, infinity or NaN without.
    """

    format: Format | None = None
    rounding: Rounding | None = None
    overflow: Overflow | None = None

    def __post_init__(self) -> None:
        kinds = {"format": Format, "rounding": Rounding, "overflow": Overflow}
        for name, kind in kinds.items():
            value = getattr(self, name)
            if not (value is None or isinstance(value, kind)):
                raise PlanError(f"{name} {value!r} is no {kind.__name__}; Assignment.parse takes text.")
        if self.format is None and (self.rounding or self.overflow):
            raise PlanError("a tensor that stays as it is (format None) is not rounded: leave rounding and overflow out.")

    @staticmethod
    def parse(format: FormatLike, rounding: Rounding | str | None = None, overflow: Overflow | str | None = None) -> Assignment:
        """The assignment that these texts spell; None leaves the choice to the default."""
        return Assignment(_format(format), _choice(Rounding, rounding), _choice(Overflow, overflow))

    def to_json(self) -> dict[str, str | None]:
        """The JSON value: texts, or null."""
        return {
            "format": str(self.format) if self.format else None,
            "rounding": self.rounding.value if self.rounding else None,
            "overflow": self.overflow.value if self.overflow else None,
        }

    def __str__(self) -> str:
        return ", ".join(text for text in self.to_json().values() if text) or "as it is"

    @property
    def resolved_rounding(self) -> Rounding:
        """The rounding that encoding uses, the default filled in."""
        return self.rounding_in(Role.ACTIVATION)

    def rounding_in(self, role: Role) -> Rounding:
        """The same for a slot of this role: what is a sum of small changes is rounded stochastically in any format."""
        if self.rounding is not None:
            return self.rounding
        return (
            Rounding.NEAREST_EVEN
            if self.format is None
            else default_rounding(self.format.element.width, is_sum=role in ACCUMULATED)
        )

    def say(self, role: Role = Role.ACTIVATION) -> str:
        """In words, the default rounding filled in."""
        if self.format is None:
            return "as it is"
        bits = f"{self.format.bits_per_value:g}"
        parts = [str(self.format), f"{bits} bit{'s' * (bits != '1')} a value", ROUNDING_IN_WORDS[self.rounding_in(role)]]
        return ", ".join([*parts, OVERFLOW_IN_WORDS[self.overflow]] if self.overflow else parts)


AS_IS = Assignment()


def _format(format: FormatLike) -> Format | None:
    try:
        return None if format is None else find_format(format)
    except FormatError as error:
        raise PlanError(f"{error} None leaves the tensor as it is.") from None


def _choice(kind: type[Choice], value: Choice | str | None) -> Choice | None:
    if value is None:
        return None
    try:
        return kind(value)
    except ValueError:
        allowed = ", ".join(member.value for member in kind)
        raise PlanError(
            f"{kind.__name__.lower()} {brief(value)} is unknown. Allowed: {allowed}, or None for the default."
        ) from None
