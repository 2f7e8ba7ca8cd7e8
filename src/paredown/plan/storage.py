"""What one slot is given: a format, how encoding rounds, and what becomes of values past the largest one.

>>> a = Assignment.parse("int4/64@bf16")
>>> a.resolved_rounding.value, Assignment.parse("int8_block").resolved_rounding.value
('stochastic', 'nearest_even')
>>> a.say()
'int4/64@bf16, 4.25 bits a value, stochastic rounding'

The format in which an activation is stored where a plan asks for one: footprints and sessions use the same function.

Three limits hold beyond what the plan asks for:

    pin             backward needs more significant bits than the format has (`Pin`)
    is_centered     backward subtracts a mean from the values, as norms do. A format whose step grows with |x| loses the differences once
                    the mean is a few standard deviations: symmetric integers and narrow floats become unsigned integers of the same
                    width with a minimum for each block
    size            the packed tensor must be smaller than the tensor

>>> from paredown.plan.storage import Assignment
>>> from paredown.trace.operations import EXPONENT
>>> asked = Assignment.parse("int4/64@bf16")
>>> resolve_format(asked, Needs(pin=EXPONENT), dtype="bfloat16", numel=1 << 20)[0]
Format('int8/64@bf16')
>>> resolve_format(asked, Needs(is_centered=True), dtype="bfloat16", numel=1 << 20)[0]
Format('uint4/64@bf16+bf16')
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import TypeVar

from paredown.errors import FormatError, PlanError
from paredown.formats.catalog import find_format
from paredown.formats.element import ElementKind
from paredown.formats.format import Format
from paredown.formats.rounding import Overflow, Rounding, default_rounding
from paredown.roles import ACCUMULATED, Role
from paredown.serial import brief
from paredown.sizes import FLOAT_BYTES
from paredown.trace.operations import Needs, Use

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


# --- The format in which an activation is stored where a plan asks for one ---

PINNED = Format.parse("int8/64@bf16")  # 7 significant bits, the most that a format of 8 has
PINNED_WIDE = Format.parse("bf16")  # for more
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
    if element.kind is ElementKind.FLOAT:
        return element.mantissa_bits + 1
    return element.width - (element.kind is not ElementKind.UINT or format.minimum is not None)


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


def resolve_format(assignment: Assignment, needs: Needs, *, dtype: str, numel: int) -> tuple[Format | None, str]:
    """The format of `numel` values of `dtype` that were saved together, None for plain storage; and why it is not what was asked for."""
    asked = assignment.format
    if asked is None or needs.use is not Use.VALUE:
        return None, ""
    if dtype not in FLOAT_BYTES:
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
    own = numel * FLOAT_BYTES[dtype]
    packed = format.nbytes((numel,))
    if packed >= own:
        return None, f"it would take {packed:,} bytes instead of {own:,}"
    return format, reason
