"""`Sensitivities` are the gradient errors when one slot alone is quantized, measured by `probe`; the role table predicts such errors.

An error is the sum over parameters of |difference|^2 / |gradient|^2: relative for each parameter, squared, and additive over slots
(the errors of single tensors added up to 0.99 of the error of all of them together, on a ResNet and on a GPT).

The error of a format that was not probed is interpolated: errors fall as 4^-bits, with the significant bits of the element (int8
has 7, e4m3 4, int4 3; plan/storage.py), and between two measured formats on the line through their logarithms.

>>> measured = Sensitivities({"fc1:input": {"int4/64@bf16": 0.08}, "fc2:input": {"int4/64@bf16": 0.004, "int8/64@bf16": 0.00001}})
>>> measured.of("fc1:input", "int4/64@bf16"), measured.of("fc1:input", "int2/64@bf16"), measured.of("fc3:input", "int4/64@bf16")
(0.08, 1.28, None)
>>> measured
Sensitivities of 2 slots at step 0, the worst first
             int8/64@bf16  int4/64@bf16
  fc1:input             -          0.08
  fc2:input         1e-05         0.004

The role table has a factor for each operation; the error is the factor times 4^-bits, and less for integers whose blocks are shorter
than 64 values or have a minimum (`step_factor`). It does not grow with the size of the tensor: the input of a linear layer enters the
gradient of that layer's weight alone, whatever its length, so that at equal error the larger tensor is the better one to quantize.

The factors of activations are medians over six networks of `paredown.models` after 60 steps, one slot in int8 at a time
(docs/decisions/013). They differ little: slots differ more by pins, by size, and by what `probe` measures.

>>> slot_error([Saver("fc:input", "linear", "input", Use.VALUE)], Format.parse("int8/64@bf16")) == 0.55 * 4.0**-7
True
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from math import exp, log
from os import PathLike
from statistics import NormalDist
from types import MappingProxyType
from typing import Any

from paredown.autograd.operations import Use
from paredown.errors import FormatError, PlanError
from paredown.formats.catalog import find_format
from paredown.formats.element import ElementKind
from paredown.formats.format import Format
from paredown.plan.storage import BLOCK, significant_bits
from paredown.plan.trace import Saver
from paredown.roles import Role
from paredown.serial import COUNT, LARGEST, brief, check_fields, is_text, load_json, object_parts, save_json
from paredown.tables import Table

VERSION = 1  # of the JSON
NUM_SHOWN_SLOTS = 12  # slots that repr shows
NAN = float("nan")
OTHER_FACTOR = 1.0  # factor of an operation without a row
OP_FACTORS: Mapping[str, float] = MappingProxyType(
    {
        "conv": 0.6,
        "linear": 0.55,
        "matmul": 0.6,
        "mul": 0.65,
        "batch_norm": 1.1,
        "layer_norm": 0.5,
        "group_norm": 0.5,
        "rms_norm": 0.5,
        "gelu": 0.55,
        "silu": 0.55,
        "scaled_dot_product_attention": 0.15,  # for each operand; errors grow with the logits, which is why it is pinned
    }
)
# Backward subtracts a sum over the output from the gradient of every logit, and after some training the difference is small
# (measured factors of 1 to 8 in 2 bits).
OPERAND_FACTORS: Mapping[tuple[str, str], float] = MappingProxyType({("scaled_dot_product_attention", "output"): 3.0})
# For parameters, not measured: the error of a weight enters every later forward pass, that of a moment the next updates; a frozen weight
# has the same error in all steps, and what is trained adapts to it.
ROLE_FACTORS: Mapping[Role, float] = MappingProxyType(
    {Role.WEIGHT: 16.0, Role.FROZEN: 4.0, Role.MOMENT1: 4.0, Role.MOMENT2: 4.0, Role.GRADIENT: 1.0}
)
RESIDUE_BITS = 8  # significant bits that a residue adds to its weight


@dataclass(frozen=True, repr=False)
class Sensitivities:
    """The gradient errors, squared and relative, that quantizing one saved tensor alone causes, by name and format.

    `probe` measures them, and `assign` and guards choose formats by them. Names are those of the trace's slots; a name of a parameter's
    tensor has its role as a prefix ("moment1=fc.weight").
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
        """Return the gradient error of tensor `name` in `format`, measured or interpolated; None if not probed."""
        row = self.errors.get(name)
        if not row:
            return None
        text = str(find_format(format))
        return row[text] if text in row else _interpolated(row, text)

    def known(self, names: Iterable[str]) -> list[str]:
        """Return those of `names` (tensors of a trace) whose errors were probed."""
        return [name for name in names if self.errors.get(name)]

    def __len__(self) -> int:
        return len(self.errors)

    def __repr__(self) -> str:
        formats = sorted({text for row in self.errors.values() for text in row}, key=lambda text: (-_bits(text), text))
        worst = sorted(self.errors, key=lambda name: -max(self.errors[name].values(), default=0.0))
        rows = [(name, self.errors[name]) for name in worst[:NUM_SHOWN_SLOTS]]
        cells = [[name, *(f"{row[text]:.3g}" if text in row else "-" for text in formats)] for name, row in rows]
        lines = Table(["", *formats], cells, right=range(1, len(formats) + 1)).lines()
        more = [f"  ... {len(worst) - NUM_SHOWN_SLOTS} more"] if len(worst) > NUM_SHOWN_SLOTS else []
        head = f"Sensitivities of {len(worst)} slot{'s' * (len(worst) != 1)} at step {self.step}, the worst first"
        return "\n".join([head, *(f"  {line}" for line in lines), *more])

    def to_json(self) -> dict[str, Any]:
        """Return the sensitivities as a JSON value: version, step and errors."""
        return {"version": VERSION, "step": self.step, "errors": {name: dict(row) for name, row in self.errors.items()}}

    @staticmethod
    def from_json(value: Any) -> Sensitivities:
        """Return the sensitivities that `to_json` wrote as `value`; raise PlanError for any other value."""
        parts = object_parts(value, "file of sensitivities", ("step", "errors"), ("version", "errors"), VERSION, PlanError)
        return Sensitivities(parts["errors"], parts.get("step", 0))

    def save(self, path: str | PathLike[str]) -> None:
        """Write the sensitivities to a file, as JSON."""
        save_json(path, self.to_json(), PlanError, indent=1)

    @staticmethod
    def load(path: str | PathLike[str]) -> Sensitivities:
        """Return the sensitivities that `save` wrote to this file."""
        hint = "They are written by sensitivities.save(path)."
        return load_json(path, "file of sensitivities", PlanError, Sensitivities.from_json, hint=hint)


def _row(name: str, row: Any) -> dict[str, float]:
    """Return the checked gradient errors of the tensor `name` by format, in the canonical text of each format."""
    if not is_text(name):
        raise PlanError(f"sensitivities are {{slot: {{format: error}}}}; the name of a slot is text, not {brief(name)}.")
    if not isinstance(row, Mapping):
        raise PlanError(f"sensitivities of {name!r} are {{format: error}}, not {type(row).__name__}.")
    errors: dict[str, float] = {}
    for text, error in row.items():
        try:
            format = str(find_format(text))
        except (FormatError, TypeError) as reason:
            raise PlanError(f"sensitivities of {brief(name)}, {brief(text)}: {reason}") from None
        errors[format] = _error(error, f"sensitivities of {brief(name)}: the error of {brief(text)}")
    return errors


def _error(error: Any, what: str) -> float:
    """Return a squared error read from a file as a float; raise PlanError unless it is a number from 0 up.

    Infinity becomes LARGEST. `what` is the subject of the error message's sentence.
    """
    try:
        value = NAN if isinstance(error, str | bytes | bool) else float(error)  # accepts scalars of numpy and torch
    except (TypeError, ValueError, OverflowError):
        value = NAN
    if not value >= 0:
        raise PlanError(f"{what} is {brief(error)}; a squared error is a float64 from 0 up. Probe the slot again.")
    return min(value, LARGEST)


@cache
def _bits(text: str) -> int:
    return significant_bits(find_format(text))


def _interpolated(row: Mapping[str, float], text: str) -> float:
    """Return the error of a saved tensor in the format `text`, which was not measured, from errors in other formats.

    `row` maps formats to measured errors. The error is interpolated between the two formats of the nearest bits; outside of all measured
    ones it grows 4 times with each bit less.
    """
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


# --- the role table ----------------------------------------------------------------------------------------------------


def slot_error(savers: Iterable[Saver], format: Format) -> float:
    """Return the predicted gradient error of an activation in `format`, summed over `savers`, which saved it."""
    factors = [
        OPERAND_FACTORS.get((saver.op, saver.operand)) or OP_FACTORS.get(saver.op, OTHER_FACTOR)
        for saver in savers
        if saver.use is Use.VALUE
    ]
    return sum(factors) * 4.0 ** -significant_bits(format) * step_factor(format)


@cache
def step_factor(format: Format) -> float:
    """Return the squared rounding step of `format`, as a multiple of that of symmetric integers in blocks of 64.

    It is below 1 for integers in shorter blocks or with a minimum. A step is the range of a block over the number of steps. The largest of
    n values is at about the quantile (n - 3/8) / (n + 1/4); the largest magnitude is that of 2 n values. Measured on 20 networks: 0.75 and
    0.54 of the squared gradient error for the first two formats here (docs/log.md, 2026-11-19):

    >>> [round(step_factor(Format.parse(text)), 2) for text in ("uint4/64@bf16+bf16", "uint4/32@bf16+bf16", "int8/64@bf16")]
    [0.71, 0.56, 1.0]
    """
    element, n = format.element, format.block
    if n is None or element.kind not in (ElementKind.INT, ElementKind.UINT):
        return 1.0
    magnitude = _largest_normal(2 * BLOCK) / (2.0 ** significant_bits(format) - 1)
    if format.minimum is None:
        return (_largest_normal(2 * n) / _largest_normal(2 * BLOCK)) ** 2
    return (2 * _largest_normal(n) / (2.0**element.width - 1) / magnitude) ** 2


def _largest_normal(n: int) -> float:
    """Return the expected largest of n normally distributed values, in standard deviations, by Blom's approximation."""
    return NormalDist().inv_cdf((n - 0.375) / (n + 0.25)) if n > 1 else 0.0


def parameter_error(formats: Mapping[Role, Format]) -> float:
    """Return the predicted gradient error if a parameter's weight, gradient and moments have these formats."""
    residue = RESIDUE_BITS * (Role.RESIDUE in formats)
    bits = {role: significant_bits(format) + residue * (role is Role.WEIGHT) for role, format in formats.items()}
    return sum(ROLE_FACTORS.get(role, 0.0) * 4.0**-count for role, count in bits.items())
