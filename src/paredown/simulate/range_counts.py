"""Counts how many values of each slot leave the range of their format when a simulated session rounds them.

A slot is one tensor of the step. Each count is the number of its values that are finite before rounding and

    underflows   are not 0 and smaller than the smallest normal value of the format: they have fewer significant bits, or none
    flushed      are not 0 and become 0
    saturated    are past the largest value and become it
    nonfinite    become infinite or NaN

`kept` is sum |rounded| / sum |value|: the share of the magnitude that is left. A slot that keeps less than half of it has lost most of its
signal: if these are gradients, training stalls. Stochastic rounding keeps all on average, though it flushes most values.

In formats with a block the range follows the values: there underflows are the values that are flushed. Counting takes about as long as
rounding; it is done in the first `ALWAYS` forward passes and then in every `EVERY`th, and not in captured CUDA graphs.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from paredown.codec.runtime_formats import overflow_limit
from paredown.formats.element import ElementKind
from paredown.formats.format import Format
from paredown.roles import Role
from paredown.tables import TableRows

ALWAYS, EVERY = 8, 16  # forward passes
MIN_PASSES = 3  # counted passes before a warning
LITTLE = 0.5  # share of the magnitude: a tensor that keeps less has lost its signal
MOST_CHARS = 40  # of the text of a format in a printed table
GRADIENTS = (Role.ERROR, Role.GRADIENT)


@dataclass(frozen=True)
class SlotCounts:
    """How many values of one tensor of a step were changed by rounding because they left the range of `format`."""

    slot: str
    role: Role
    format: Format
    num_values: int
    num_nonzero: int
    num_underflows: int
    num_flushed: int
    num_saturated: int
    num_nonfinite: int
    kept: float

    def share(self, count: int) -> float:
        """Return `count` as a share of the values that are not 0."""
        return count / self.num_nonzero if self.num_nonzero else 0.0


class RangeCounts(TableRows[SlotCounts]):
    """A row for each tensor of a step about values that left the range of its format; those that lost most come first."""

    __slots__ = ()
    columns = ("slot", "role", "format", "values", "underflows", "flushed", "saturated", "nonfinite", "kept")
    if_empty = "no value was rounded in a counted forward pass"

    def cells(self, row: SlotCounts) -> tuple[str, ...]:
        """Return the texts of one row of the printed table, with counts as shares of the values that are not 0."""
        counts = (row.num_underflows, row.num_flushed, row.num_saturated, row.num_nonfinite)
        shares = [f"{row.share(count):.2%}" for count in counts]
        return row.slot, row.role.value, _brief(row.format), str(row.num_values), *shares, f"{row.kept:.1%}"


class RangeCounter:
    """Counts, on the device, how many values of each tensor of a step leave the range of their format in rounding."""

    def __init__(self) -> None:
        self.is_on = self.has_new = False  # has_new: a pass was counted after `new_warnings` read the counts
        self.num_passes = self.num_counted = 0
        self._rows: dict[tuple[int, Format], Tensor] = {}  # float64: the eight sums of `_sums`
        self._warned: set[Role] = set()

    def begin(self, *, is_captured: bool) -> None:
        """Begin a forward pass, and decide whether to count in it: in the first ones and every 16th, except in captured graphs."""
        self.num_passes += 1
        self.is_on = not is_captured and (self.num_passes <= ALWAYS or self.num_passes % EVERY == 0)
        self.num_counted += self.is_on
        self.has_new |= self.is_on

    def reset(self) -> None:
        """Set all counts to zero, because the formats changed."""
        self.__init__()

    def add(self, number: int, format: Format, before: Tensor, after: Tensor) -> None:
        """Add the counts of one rounding, of `before` to `after` in `format`, to those of tensor `number`."""
        sums, key = _sums(before.detach().float(), after.detach().float(), format), (number, format)
        self._rows[key] = sums if key not in self._rows else self._rows[key].to(sums.device) + sums

    def counts(self, slots: Iterable[tuple[int, str, Role]]) -> RangeCounts:
        """Return how many values of each of `slots` left their format's range; this waits for the device.

        Each of `slots` is a tensor of the step, (number, name, role).
        """
        named = {number: (key, role) for number, key, role in slots}
        rows: list[SlotCounts] = []
        for (number, format), sums in self._rows.items():
            before, after = sums[-2:].tolist()
            a, b, c, d, e, f = sums[:-2].long().tolist()
            rows.append(SlotCounts(*named[number], format, a, b, c, d, e, f, kept=after / before if before else 1.0))
        return RangeCounts(sorted(rows, key=lambda row: row.kept))

    def new_warnings(self, slots: Iterable[tuple[int, str, Role]]) -> list[str]:
        """Return warnings, one per role at most, about gradients whose rounding lost more than half of their magnitude."""
        if not self.has_new or self.num_counted < MIN_PASSES or len(self._warned) == len(GRADIENTS):
            return []
        self.has_new = False
        lost = [row for row in self.counts(slots) if row.kept < LITTLE and row.role in GRADIENTS and row.role not in self._warned]
        self._warned.update(row.role for row in lost)
        return [_sentence([row for row in lost if row.role is role]) for role in dict.fromkeys(row.role for row in lost)]


def _sums(x: Tensor, y: Tensor, format: Format) -> Tensor:
    """Return the counts of one rounding of x to y, and the sums of |x| and |y|, as (8,) float64."""
    low, high, smallest = _range(format)
    magnitude, is_finite = x.abs(), x.isfinite()
    stays_finite = is_finite & y.isfinite()
    is_nonzero = is_finite & (magnitude > 0)
    saturated = stays_finite & ((x >= high) | (x <= low)) & (x != y)
    flushed = is_nonzero & (y == 0) & ~saturated
    underflows = flushed if format.block else is_nonzero & (magnitude < smallest) & ~saturated
    counts = (is_finite | ~is_finite, is_nonzero, underflows, flushed, saturated, is_finite & ~y.isfinite())
    sums = [torch.where(stays_finite, values, 0.0).sum(dtype=torch.float64) for values in (magnitude, y.abs())]
    return torch.stack([*(count.sum(dtype=torch.float64) for count in counts), *sums])


def _range(format: Format) -> tuple[float, float, float]:
    """Return (low, high, smallest): values beyond low or high saturate, those below smallest lose significant bits.

    >>> _range(Format.parse("e4m3fn")), _range(Format.parse("uint8"))
    ((-464.0, 464.0, 0.015625), (-0.5, 255.5, 1.0))
    """
    element = format.element
    if format.block:
        return -torch.inf, torch.inf, 0.0
    if element.kind is ElementKind.TABLE:
        return element.table[0], element.table[-1], element.smallest
    high = overflow_limit(format)
    is_float = element.kind is ElementKind.FLOAT
    return -high if element.signed else -0.5, high, 2.0**element.min_exponent if is_float else element.smallest


def _brief(format: Format) -> str:
    """Return a format's text, in which a table of many values is replaced by their number and range.

    >>> _brief(Format.parse("[-1 0 1]")), _brief(Format.parse("[" + " ".join(str(k) for k in range(-99, 100)) + "]/64@bf16"))
    ('[-1 0 1]', '[199 values from -99 to 99]/64@bf16')
    """
    text, table = str(format), format.element.table
    short = f"[{len(table)} values from {table[0]:g} to {table[-1]:g}]" if table else ""
    return text if len(text) <= MOST_CHARS else text.replace(str(format.element), short, 1)


def _sentence(rows: list[SlotCounts]) -> str:
    worst, role = rows[0], rows[0].role.value
    who = f"1 {role} slot loses most of its" if len(rows) == 1 else f"{len(rows)} {role} slots lose most of their"
    element = worst.format.element
    name = _brief(Format(element))
    if worst.num_flushed >= worst.num_saturated:
        share = worst.share(worst.num_flushed)
        what = f"{share:.1%} of its nonzero values become 0, the smallest of {name} being {element.smallest:.3g}"
    else:
        what = f"{worst.share(worst.num_saturated):.1%} of its values become the largest of {name}, {element.max_value:.5g}"
    return (
        f"{who} magnitude, so that training stalls: {worst.slot!r} keeps {worst.kept:.1%} in {_brief(worst.format)}; {what}. "
        f"Use a format with a scale ({name}/32@e8m0) or with more exponent bits (e5m2, bf16), or scale the loss "
        "(torch.amp.GradScaler). session.counts has all slots."
    )
