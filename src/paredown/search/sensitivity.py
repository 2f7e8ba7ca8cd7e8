"""How much gradients suffer when one slot alone is rounded: `Sensitivities`, measured by `probe` and read by `assign`.

An error is the sum over parameters of |difference|^2 / |gradient|^2: relative for each parameter, squared, and additive over slots
(the errors of single tensors added up to 0.99 of the error of all of them together, on a ResNet and on a GPT).

A format that was not probed is interpolated: an error falls as 4^-bits, where bits are the significant ones of the element (int8 has 7,
e4m3 4, int4 3; `plan/given.py`), between two that were measured on the line through their logarithms.

>>> measured = Sensitivities({"fc1:input": {"int4/64@bf16": 0.08}, "fc2:input": {"int4/64@bf16": 0.004, "int8/64@bf16": 0.00001}})
>>> measured.of("fc1:input", "int4/64@bf16"), measured.of("fc1:input", "int2/64@bf16"), measured.of("fc3:input", "int4/64@bf16")
(0.08, 1.28, None)
>>> measured
Sensitivities of 2 slots at step 0, the worst first
             int8/64@bf16  int4/64@bf16
  fc1:input             -          0.08
  fc2:input         1e-05         0.004
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from math import exp, log
from os import PathLike
from pathlib import Path
from typing import Any

from paredown.errors import FormatError, PlanError
from paredown.formats.catalog import find_format
from paredown.formats.format import Format
from paredown.plan.given import significant_bits
from paredown.serial import COUNT, brief, check_fields, is_text, object_parts, read_json

VERSION = 1  # of the JSON
SHOWN = 12  # slots that repr prints
NAN = float("nan")
LARGEST = 1e300  # an infinite error, so that all are numbers of JSON


@dataclass(frozen=True, repr=False)
class Sensitivities:
    """Squared gradient errors by slot and format, as they were measured at a step of training.

    A slot has the name that it has in a trace; one that is no activation has its role in front ("moment1=fc.weight").
    """

    errors: Mapping[str, Mapping[str, float]] = field(hash=False)
    step: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.errors, Mapping):
            raise PlanError(f"sensitivities are {{slot: {{format: error}}}}, not {type(self.errors).__name__}.")
        check_fields(self, {"step": COUNT}, "measurement of sensitivities", PlanError)
        errors = {name: _row(name, row) for name, row in self.errors.items()}
        object.__setattr__(self, "errors", errors)

    def of(self, name: str, format: str | Format) -> float | None:
        """The error of this slot in `format`, measured or interpolated; None for a slot that was not probed."""
        row = self.errors.get(name)
        if not row:
            return None
        text = str(find_format(format))
        return row[text] if text in row else _interpolated(row, text)

    def known(self, names: Iterable[str]) -> list[str]:
        """Those of `names` that were probed."""
        return [name for name in names if self.errors.get(name)]

    def __len__(self) -> int:
        return len(self.errors)

    def __repr__(self) -> str:
        formats = sorted({text for row in self.errors.values() for text in row}, key=lambda text: (-_bits(text), text))
        worst = sorted(self.errors, key=lambda name: -max(self.errors[name].values(), default=0.0))
        cells = [["", *formats]]
        for name in worst[:SHOWN]:
            row = self.errors[name]
            cells.append([name, *(f"{row[text]:.3g}" if text in row else "-" for text in formats)])
        widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
        lines = [
            "  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))]) for row in cells
        ]
        more = [f"  ... {len(worst) - SHOWN} more"] if len(worst) > SHOWN else []
        head = f"Sensitivities of {len(worst)} slot{'s' * (len(worst) != 1)} at step {self.step}, the worst first"
        return "\n".join([head, *(f"  {line}" for line in lines), *more])

    def to_json(self) -> dict[str, Any]:
        """The JSON value: version, step and the errors."""
        return {"version": VERSION, "step": self.step, "errors": {name: dict(row) for name, row in self.errors.items()}}

    @staticmethod
    def from_json(value: Any) -> Sensitivities:
        """The sensitivities whose `to_json` is `value`."""
        parts = object_parts(value, "file of sensitivities", ("step", "errors"), ("version", "errors"), VERSION, PlanError)
        return Sensitivities(parts["errors"], parts.get("step", 0))

    def save(self, path: str | PathLike[str]) -> None:
        """Write the JSON."""
        Path(path).write_text(json.dumps(self.to_json(), indent=1) + "\n", encoding="utf-8", newline="\n")

    @staticmethod
    def load(path: str | PathLike[str]) -> Sensitivities:
        """The sensitivities that `save` wrote."""
        value = read_json(path, "file of sensitivities", PlanError, hint="They are written by sensitivities.save(path).")
        try:
            return Sensitivities.from_json(value)
        except PlanError as error:
            raise PlanError(f"{path}: {error}") from None


def _row(name: str, row: Any) -> dict[str, float]:
    """The errors of one slot, formats in their one spelling."""
    if not is_text(name):
        raise PlanError(f"sensitivities are {{slot: {{format: error}}}}; the name of a slot is text, not {brief(name)}.")
    if not isinstance(row, Mapping):
        raise PlanError(f"sensitivities of {name!r} are {{format: error}}, not {type(row).__name__}.")
    found: dict[str, float] = {}
    for text, error in row.items():
        try:
            format = str(find_format(text))
        except (FormatError, TypeError) as reason:
            raise PlanError(f"sensitivities of {brief(name)}, {brief(text)}: {reason}") from None
        found[format] = _error(error, f"sensitivities of {brief(name)}: the error of {brief(text)}")
    return found


def _error(error: Any, what: str) -> float:
    """A squared error as a number of JSON; an infinite one is LARGEST."""
    try:
        value = NAN if isinstance(error, str | bytes | bool) else float(error)  # numbers of numpy and torch are floats too
    except (TypeError, ValueError, OverflowError):
        value = NAN
    if not value >= 0:
        raise PlanError(
            f"{what} is {brief(error)}; a squared error is a number from 0 up that a float64 holds. Probe the slot again."
        )
    return min(value, LARGEST)


@cache
def _bits(text: str) -> int:
    return significant_bits(find_format(text))


def _interpolated(row: Mapping[str, float], text: str) -> float:
    """The error of a format by its significant bits: between the nearest two that were measured, or 4 times as much for a bit less."""
    bits = _bits(text)
    points = sorted((_bits(measured), error) for measured, error in row.items())
    below = [point for point in points if point[0] <= bits]
    above = [point for point in points if point[0] >= bits]
    if not below or not above:
        at, error = above[0] if above else below[-1]
        return min(error * 4.0 ** (at - bits), LARGEST)
    (low, more), (high, less) = below[-1], above[0]
    if low == high or not 0 < less <= more:
        return more
    share = (bits - low) / (high - low)
    return exp((1 - share) * log(more) + share * log(less))
