"""`Assignment` is what a plan requests for a tensor (slot); `resolve_format` decides the format in which the tensor is really stored.

This module alone decides the format of a saved tensor's values. Prediction (plan/byte_intervals.py, and through it footprints,
`explain_slots` and `assign`), execution (session/eager/activations.py) and probes (check/probe_passes.py) all call `resolve_format`, and
`keeps_enough` where several operations saved one tensor, so that predicted and stored bytes agree. They also share what determines storage
otherwise: the use of each operand and MIN_PACKED_NUMEL (autograd/operations.py), `is_packed_whole` (autograd/graph.py),
`rematerialization_of` (autograd/rematerialization.py), and INDEX_DTYPES, the dtypes of packed indices (plan/trace.py). Compiled graphs
call `resolve_format` as well (session/compiled/graph_packing.py). Some decisions depend on values and are made by the session alone
(session/value_bounds.py): operands of attention, inputs of norms and of sin and cos are stored unmodified where values are too large for
the format.

Three limits apply in addition to the plan's request:

    pin             backward needs more significant bits than the format has (`Pin`)
    is_centered     backward subtracts a mean from the values, as norms do, or the values from 1, as tanh does. A format whose step grows
                    with |x| loses the differences once the mean is a few standard deviations: symmetric integers and narrow floats
                    become unsigned integers of the same width with a minimum for each block
    size            the packed tensor must be smaller than the unmodified one

>>> a = Assignment.parse("int4/64@bf16")
>>> a.resolved_rounding.value, Assignment.parse("int8_block").resolved_rounding.value
('nearest_even', 'nearest_even')
>>> a.rounding_in(Role.MOMENT1).value, a.say()
('stochastic', 'int4/64@bf16, 4.25 bits a value, rounding to nearest')
>>> from paredown.autograd.operations import EXPONENT
>>> resolve_format(a, Needs(pin=EXPONENT), dtype="bfloat16", numel=1 << 20)[0]
Format('int8/64@bf16')
>>> resolve_format(a, Needs(is_centered=True), dtype="bfloat16", numel=1 << 20)[0]
Format('uint4/64@bf16+bf16')
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import TypeVar

from paredown.autograd.operations import Needs, Use
from paredown.errors import FormatError, PlanError
from paredown.formats.catalog import find_format, reason_not_to_store
from paredown.formats.element import ElementKind
from paredown.formats.format import Format
from paredown.formats.rounding import Overflow, Rounding, default_rounding
from paredown.roles import ACCUMULATED, Role
from paredown.serial import brief
from paredown.sizes import FLOAT_BYTES

FormatLike = Format | str | None  # text is a format or a name of the catalog; None: unmodified
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
PINNED = Format.parse("int8/64@bf16")  # for pins of up to 7 significant bits, the most of any 8-bit format
PINNED_WIDE = Format.parse("bf16")  # for pins of more significant bits
CENTERED = "backward subtracts a mean or 1 from it: a minimum for each block keeps small differences beside a large mean"
PRECISE_BITS = 8  # significant bits of bf16, in which the baseline may compute
# Smallest block of formats with a minimum. Blocks of 128 would have the bytes of int4/64@bf16, but two rows of 64 values would share a
# minimum: the gradient error of a small ViT was 105 % at 4 bits instead of 16 %.
BLOCK = 64


@dataclass(frozen=True)
class Assignment:
    """What a rule of a plan requests for a tensor: format (None: unmodified), rounding and overflow mode.

    If `rounding` is None, `rounding_in` chooses it: to nearest for activations, stochastic for weights, gradients and second moments and
    for other tensors of fewer than 8 bits a value, else to nearest. If `overflow` is None, large values saturate in formats with blocks,
    and become infinity or NaN in others.
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
            raise PlanError("a tensor that is stored unmodified (format None) is not rounded: leave rounding and overflow out.")

    @staticmethod
    def parse(format: FormatLike, rounding: Rounding | str | None = None, overflow: Overflow | str | None = None) -> Assignment:
        """Return the assignment of a format, rounding and overflow mode, as text or values; None is the default."""
        return Assignment(_format(format), _choice(Rounding, rounding), _choice(Overflow, overflow))

    def to_json(self) -> dict[str, str | None]:
        """Return the assignment as a JSON object: its format, rounding and overflow mode as text, or null."""
        return {
            "format": str(self.format) if self.format else None,
            "rounding": self.rounding.value if self.rounding else None,
            "overflow": self.overflow.value if self.overflow else None,
        }

    def __str__(self) -> str:
        return ", ".join(text for text in self.to_json().values() if text) or "unmodified"

    @property
    def resolved_rounding(self) -> Rounding:
        """Return the rounding for activations: the requested one, else to nearest."""
        return self.rounding_in(Role.ACTIVATION)

    def rounding_in(self, role: Role) -> Rounding:
        """Return the rounding for tensors with this role: the requested one, else the default of the role.

        Sums of small changes, such as weights, are rounded stochastically in any format. A frozen weight is encoded once, when the plan is
        applied, and always to nearest. Activations are rounded to nearest by default: the values of a step are not carried to the next one,
        so that rounding errors do not add up, and the gradient error is 0.7 of that of stochastic rounding (docs/log.md, 2026-11-19).
        """
        if role is Role.FROZEN:
            return Rounding.NEAREST_EVEN
        if self.rounding is not None:
            return self.rounding
        if self.format is None or role is Role.ACTIVATION:
            return Rounding.NEAREST_EVEN
        return default_rounding(self.format.element.width, is_sum=role in ACCUMULATED)

    def say(self, role: Role = Role.ACTIVATION) -> str:
        """Return the assignment in words, such as "int4/64@bf16, 4.25 bits a value, stochastic rounding"."""
        if self.format is None:
            return "unmodified"
        bits = f"{self.format.bits_per_value:g}"
        parts = [str(self.format), f"{bits} bit{'s' * (bits != '1')} a value", ROUNDING_IN_WORDS[self.rounding_in(role)]]
        return ", ".join([*parts, OVERFLOW_IN_WORDS[self.overflow]] if self.overflow else parts)


UNMODIFIED = Assignment()


def significant_bits(format: Format) -> int:
    """Return n such that the format divides the range from 0 to its largest magnitude into 2^n steps.

    int8 has 7 significant bits, e4m3 has 4 (for the largest values), bf16 has 8.

    Unsigned integers with a minimum divide the range from the smallest value to the largest, which is twice as long.
    """
    element = format.element
    if element.kind is ElementKind.FLOAT:
        return element.mantissa_bits + 1
    return element.width - (element.kind is not ElementKind.UINT or format.minimum is not None)


def resolves_differences(format: Format) -> bool:
    """Return whether a format keeps values distinct whose differences are small compared with their mean.

    Formats with a minimum for each block do, and formats as precise as bf16.
    """
    return format.minimum is not None or significant_bits(format) >= PRECISE_BITS


@lru_cache(maxsize=256)
def with_minimum(format: Format) -> Format:
    """Return the format of the same width that has unsigned integers and a minimum (offset) for each block.

    >>> str(with_minimum(Format.parse("e2m1fn/32@e8m0")))
    'uint4/64@bf16+bf16'
    """
    return Format.parse(f"uint{min(format.element.width, 8)}/{max(format.block or 0, BLOCK)}@bf16+bf16")


def is_same_level(format: Format | None, other: Format | None) -> bool:
    """Return whether `other` equals `format`, or is its variant with an offset (minimum) for each block."""
    return format == other or (format is not None and other is not None and other in (format, with_minimum(format)))


def keeps_enough(format: Format, needs: Needs) -> bool:
    """Return whether `format` is precise enough for what backward needs of a saved tensor, as `needs` says."""
    is_fine = needs.pin is None or significant_bits(format) >= needs.pin.significant_bits
    return is_fine and (not needs.is_centered or resolves_differences(format))


def resolve_format(assignment: Assignment, needs: Needs, *, dtype: str, numel: int) -> tuple[Format | None, str]:
    """Return the format in which a tensor's values are really stored, and why it is not the requested one.

    The format is None if the tensor must stay unmodified. `needs` says what backward needs of the tensor; `dtype` and `numel` are its own.
    """
    requested = assignment.format
    if requested is None or needs.use is not Use.VALUE:
        return None, ""
    if dtype not in FLOAT_BYTES:
        return None, f"it is {dtype}, which no format can store"
    unscaled = reason_not_to_store(requested, Role.ACTIVATION.value)
    if unscaled is not None:
        return None, unscaled
    if requested.block is None and requested.element.nan_code is None:
        limits = f"{requested.element.min_value:g} to {requested.element.max_value:g}"
        return None, f"{requested} without a block can only store values from {limits}, and no NaN: write {requested}/64@bf16"
    format, reason, pin = requested, "", needs.pin
    if pin is not None and significant_bits(requested) < pin.significant_bits:
        format = PINNED if pin.significant_bits <= significant_bits(PINNED) else PINNED_WIDE
        reason = f"pinned at {pin.significant_bits} significant bits or more: {pin.reason}"
    if needs.is_centered and not resolves_differences(format):
        format, reason = with_minimum(format), f"{reason}; {CENTERED}" if reason else CENTERED
    unmodified_bytes = numel * FLOAT_BYTES[dtype]
    packed_bytes = format.nbytes((numel,))
    if packed_bytes >= unmodified_bytes:
        return None, f"it would take {packed_bytes:,} bytes instead of {unmodified_bytes:,}"
    return format, reason


def _format(format: FormatLike) -> Format | None:
    try:
        return None if format is None else find_format(format)
    except FormatError as error:
        raise PlanError(f"{error} None stores the tensor unmodified.") from None


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
