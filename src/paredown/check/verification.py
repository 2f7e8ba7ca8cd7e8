"""The result of `verify`: a row for each parameter, the slots at fault, the expected error of a format, and the search for slots at fault.

>>> rows = Compared.of("fc.weight", 0.0, 0.011, 0.0, 0.02), Compared.of("fc.bias", 0.0, 0.31, 0.0, 0.02)
>>> fault = Fault("act:input", "int8/64@bf16", 0.31, 0.31, "fc.bias", "plan")
>>> result = Verification("Net", rows, (fault,), 0.0, 0.02, "tolerance=0.02 was given")
>>> result.ok, result.verdict, Verification.from_json(result.to_json()) == result
(False, "outside the format's bound", True)
>>> result
Verification of Net: not ok, outside the format's bound, 1 of 2 parameters is off
parameter  exact plan  plan   verdict
fc.bias    same bits   0.31   off
fc.weight  same bits   0.011  ok
at fault   format        under  error  alone  parameter
act:input  int8/64@bf16  plan   0.31   0.31   fc.bias
exact plan: gradients must have the same bits
plan: gradients may differ by 2 % of their norm: tolerance=0.02 was given. They differ by up to 31 %

A verdict says what `ok` is worth. An error is relative to the norm of the gradient, or to a larger number, so that a gradient of zero has
an error of at most 1. A tolerance of USELESS_TOLERANCE = 1 or more therefore accepts a gradient of zero, and gradients of the wrong sign
too: it does not tell a plan that trains from one that does not. Below 1, the gradient under the plan has a positive inner product with that
of the baseline for every parameter whose error is relative to its own norm: it is a descent direction.

    same bits                      no gradient differs at all under the plan
    within the format's bound      ok, with a tolerance below USELESS_TOLERANCE
    too coarse to be useful        ok, with a tolerance of USELESS_TOLERANCE or more
    outside the format's bound     not ok

`FaultSearch` finds minimal sets of slots that fail together, by testing halves (QuickXplain, Junker 2004). A test stores a subset of the
slots, and fails if gradients are off. It finds one failing slot of n in about 2 log2(n) tests, and k of them in k times as many; slots that
fail only together, such as two that wrongly share one stored form, are found as a set.

>>> FaultSearch(100).minimal_groups(list("abcdefgh"), lambda names: "c" in names or {"a", "h"} <= set(names))
([['c'], ['a', 'h']], False)
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from math import sqrt
from os import PathLike
from typing import Any

from paredown.errors import PlanError, VerificationError
from paredown.formats.element import ElementKind
from paredown.formats.format import Format
from paredown.formats.rounding import Rounding
from paredown.serial import LARGEST, dump_dataclass, load_json, object_parts, read_dataclass, save_json
from paredown.tables import Table

VERSION = 1  # of the JSON
DERIVED = ("ok", "verdict")  # in the JSON for readers; they follow from the fields
PEAK = 3.0  # standard deviations; the largest of 64 normally distributed values is at 2.4 on average
SHOWN = 12  # parameters that repr prints
OK, OFF, WRONG = "ok", "off", "off under the exact plan"
USELESS_TOLERANCE = 1.0  # the error of a gradient of zero
SAME_BITS, WITHIN_BOUND = "same bits", "within the format's bound"
TOO_COARSE, OUTSIDE_BOUND = "too coarse to be useful", "outside the format's bound"
COARSE_ADVICE = (
    "a gradient of zero would pass too, so that ok says nothing about the plan. Read the errors, or give a tolerance below 1"
)
HEAD = ("parameter", "exact plan", "plan", "verdict")
EXACT, PLAN = "exact plan", "plan"
FAULT_HEAD = ("at fault", "format", "under", "error", "alone", "parameter")
MAX_GROUPS = 4
Fails = Callable[[Sequence[str]], bool]


@dataclass(frozen=True)
class Compared:
    """A row of the result of `verify`: the gradient errors of one parameter, and a verdict.

    `exact_error` is the error if all saved tensors are stored in float32, `error` that under the plan.
    """

    name: str
    exact_error: float
    error: float
    verdict: str

    @staticmethod
    def of(name: str, exact_error: float, error: float, exact_tolerance: float, tolerance: float) -> Compared:
        """Return the row of the parameter `name`; the verdict says which error exceeds its tolerance, if any."""
        verdict = WRONG if exact_error > exact_tolerance else OFF if error > tolerance else OK
        return Compared(name, min(exact_error, LARGEST), min(error, LARGEST), verdict)


@dataclass(frozen=True)
class Fault:
    """A saved tensor (slot) whose storage makes gradients wrong, and the parameter with the largest error.

    `error` is the parameter's error with all tensors of a failing set stored, `alone` with only this one stored. `under` is the plan that
    fails: "exact plan" (all formats replaced by fp32) or "plan".
    """

    slot: str
    format: str
    error: float
    alone: float
    parameter: str
    under: str

    def __post_init__(self) -> None:
        for name in ("error", "alone"):
            object.__setattr__(self, name, min(getattr(self, name), LARGEST))


@dataclass(frozen=True, repr=False)
class Verification:
    """The result of `verify`: the relative error of each gradient under a plan, and the saved tensors at fault.

    `reason` explains `tolerance`, the largest allowed error. `exact_tolerance` is that of the plan with all formats replaced by fp32; it is
    0 if two runs of the unmodified step give the same bits and no module runs over pieces of the sequence.
    """

    model: str
    rows: tuple[Compared, ...]
    at_fault: tuple[Fault, ...]
    exact_tolerance: float
    tolerance: float
    reason: str
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Return whether every gradient is within its tolerance."""
        return all(row.verdict == OK for row in self.rows)

    @property
    def verdict(self) -> str:
        """Return one of the four verdicts: "same bits", within or outside the format's bound, or too coarse."""
        if not self.ok:
            return OUTSIDE_BOUND
        if not any(row.error or row.exact_error for row in self.rows):
            return SAME_BITS
        return TOO_COARSE if self.tolerance >= USELESS_TOLERANCE else WITHIN_BOUND

    def check(self) -> Verification:
        """Return this verification if it is ok, with a warning if it is too coarse; raise VerificationError if not."""
        if not self.ok:
            raise VerificationError(
                f"gradients under the plan are not those of the unmodified model. Leave the slots at fault unmodified "
                f"(plan.set(slot, None)), give them a wider format, or report the slot if it is off under the exact plan.\n{self!r}"
            )
        if self.verdict == TOO_COARSE:
            warnings.warn(f"{self.summary}. {self.meaning[0].upper()}{self.meaning[1:]}.", UserWarning, stacklevel=2)
        return self

    @property
    def summary(self) -> str:
        """Return the first line of the printed result: whether it is ok, the verdict, and the number of parameters."""
        off = sum(row.verdict != OK for row in self.rows)
        num = len(self.rows)
        counts = f"{off} of {num} parameters {'is' if off == 1 else 'are'} off" if off else f"{num} parameter{'s' * (num != 1)}"
        ok = "not ok," if not self.ok else "ok, but" if self.verdict == TOO_COARSE else "ok,"
        return f"Verification of {self.model}: {ok} {self.verdict}, {counts}"

    @property
    def meaning(self) -> str:
        """Return sentences for the user on the tolerance and the errors, with a warning if formats are too coarse."""
        gradients = [row.error for row in self.rows if not row.name.startswith("weight=")]  # those are values of packed weights
        measured = max(gradients, default=0.0)
        text = f"{_say_allowed(self.tolerance)}: {self.reason}"
        text += f". They differ by up to {_percent(measured)}" if measured else ""
        return f"{text}. Too coarse: {COARSE_ADVICE}" if self.verdict == TOO_COARSE else text

    def __repr__(self) -> str:
        allowed = [f"exact plan: {_say_allowed(self.exact_tolerance)}", f"plan: {self.meaning}"]
        return "\n".join([self.summary, *self._columns(), *allowed, *self.notes])

    def _repr_html_(self) -> str:
        return self._parameters(self.rows).to_html(caption=f"{self.summary}. Plan: {self.meaning}")

    def _columns(self) -> list[str]:
        worst = sorted(self.rows, key=lambda row: (row.verdict != WRONG, row.verdict != OFF, -row.error, -row.exact_error))
        lines = self._parameters(worst[:SHOWN]).lines() if self.rows else []
        lines += [f"... {len(worst) - SHOWN} more"] if len(worst) > SHOWN else []
        faults = [(f.slot, f.format, f.under, _say(f.error), _say(f.alone), f.parameter) for f in self.at_fault]
        return lines + (Table(FAULT_HEAD, faults).lines() if faults else [])

    def _parameters(self, rows: Sequence[Compared]) -> Table:
        return Table(HEAD, [(row.name, _say(row.exact_error), _say(row.error), row.verdict) for row in rows])

    def to_json(self) -> dict[str, Any]:
        """Return the verification as a JSON value: version, `ok`, `verdict` and the fields."""
        return {"version": VERSION, "ok": self.ok, "verdict": self.verdict, **dump_dataclass(self)}

    @staticmethod
    def from_json(value: Any) -> Verification:
        """Return the verification that `to_json` wrote as `value`."""
        names = [row.name for row in fields(Verification)]
        parts = object_parts(value, "verification", [*names, *DERIVED], ("version", "model", "rows"), VERSION, PlanError)
        return read_dataclass(Verification, {name: parts[name] for name in parts if name not in DERIVED}, "verification", PlanError)

    def save(self, path: str | PathLike[str]) -> None:
        """Write the verification to `path` as JSON."""
        save_json(path, self.to_json(), PlanError, indent=1)

    @staticmethod
    def load(path: str | PathLike[str]) -> Verification:
        """Return the verification that `save` wrote to `path`."""
        hint = "Load a file that verification.save(path) wrote."
        return load_json(path, "verification", PlanError, Verification.from_json, hint=hint)


def _say(error: float) -> str:
    return f"{error:.2g}" if error else "same bits"


def _percent(error: float) -> str:
    """Return a relative error in percent, with three digits.

    >>> _percent(1.4512), _percent(0.0204), _percent(25.0), _percent(1e300)
    ('145 %', '2.04 %', '2500 %', '1e+302 %')
    """
    return f"{100 * error:.3g} %" if error < 10 or error > 1e6 else f"{100 * error:.0f} %"


def _say_allowed(tolerance: float) -> str:
    return f"gradients may differ by {_percent(tolerance)} of their norm" if tolerance else "gradients must have the same bits"


def expected_error(format: Format, rounding: Rounding) -> float:
    """Return the expected relative error (root mean square) of normally distributed values in a format.

        float    2^-(mantissa bits + 1) / sqrt(3)      rounded to nearest; stochastic rounding has sqrt(2) times that
        intN     PEAK / (2^(N-1) - 1) / sqrt(12)       the largest value of a block is at about PEAK standard deviations
        uintN    2 PEAK / (2^N - 1) / sqrt(12)         from the smallest to the largest value of a block

    >>> nearest = Rounding.NEAREST_EVEN
    >>> [f"{expected_error(Format.parse(text), nearest):.1e}" for text in ("fp32", "bf16", "int8/64@bf16", "uint4/64@bf16+bf16")]
    ['3.4e-08', '2.3e-03', '6.8e-03', '1.2e-01']
    """
    element = format.element
    if element.kind is ElementKind.FLOAT:
        nearest = 2.0 ** -(element.mantissa_bits + 1) / sqrt(3)
    else:
        steps = 2.0**element.width - 1 if element.kind is not ElementKind.INT else max(2.0**element.width - 2, 1.0)
        nearest = 2 * PEAK / steps / sqrt(12)
    return nearest * (sqrt(2) if rounding is Rounding.STOCHASTIC else 1.0 if rounding is not Rounding.TOWARD_ZERO else 2.0)


# --- the search for slots at fault ------------------------------------------------------------------------------------------------


class FaultSearch:
    """Finds the saved tensors (slots) that make gradients wrong, by runs with only some of them stored packed.

    At most `max_tests` runs are made. If they do not suffice, `is_spent` is true and the sets that are found may not be minimal.
    """

    def __init__(self, max_tests: int) -> None:
        self.num_left = max_tests
        self.is_spent = False

    def minimal_groups(self, slots: Sequence[str], fails: Fails) -> tuple[list[list[str]], bool]:
        """Return minimal groups of saved tensors that make the test fail, and whether it fails with none stored.

        `fails(names)` is the test: it must run the step with only the tensors `names` stored, and return whether gradients are wrong.
        """
        groups, rest = list[list[str]](), list(slots)
        if self._fails(fails, ()):
            return groups, True
        while rest and not self.is_spent and len(groups) < MAX_GROUPS and self._fails(fails, rest):
            group = self._minimal(fails, [], rest, is_known=True)
            groups.append(sorted(group, key=rest.index))
            rest = [slot for slot in rest if slot not in group]
        return groups, False

    def _minimal(self, fails: Fails, kept: list[str], candidates: list[str], *, is_known: bool) -> list[str]:
        """Return a minimal part of `candidates` that makes the test fail if it is stored together with `kept`.

        With `is_known`, `kept` alone is known to pass the test. Without any name in the part, the test would pass.
        """
        if not is_known and self._fails(fails, kept):
            return []
        if len(candidates) == 1 or self.is_spent:
            return candidates
        first, second = candidates[: len(candidates) // 2], candidates[len(candidates) // 2 :]
        of_second = self._minimal(fails, kept + first, second, is_known=False)
        return self._minimal(fails, kept + of_second, first, is_known=not of_second) + of_second

    def _fails(self, fails: Fails, names: Sequence[str]) -> bool:
        if self.num_left <= 0:
            self.is_spent = True
            return False
        self.num_left -= 1
        return fails(names)
