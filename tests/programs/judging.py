"""Judges random programs: exact plans bit for bit, plans of 8 and 4 bits by distances that follow from the format and the program.

Distance of a gradient: the root mean square (RMS) of its error over its own RMS, or over a tenth of the largest RMS among the gradients of
that step where that is more (the gradient of a bias before a norm is a sum that cancels: its error is that of the summands).

A format that divides the largest value of a block in n steps rounds a value by up to `noise` = 1 / (2 n) of it: 2^-8 for int8. The distance
of every gradient may be the larger of
    floor                  for int8 25 half steps, 10 %: rounding one tensor of normal numbers moves it by 1.6 half steps of its RMS (blocks
                           of 64: largest / RMS = 2.7, uniform error: / sqrt 3); those of 18 operations add up to 7, as independent ones do.
                           For formats of fewer bits that sum alone, sqrt(18) times the error of one tensor: where 3.7 times as much
                           were allowed, as for int8, a gradient of 0 would pass. Of 250 programs under uint4, 95 % are below 0.25
    FACTOR * change        what this gradient of the unmodified program changes by, as the median of NUM_DISTURBED runs, in the larger of
        in values          every value of the program, in forward and backward, and every gradient of a value carry noise of that size:
                           where that is much, no storage of 8 bits keeps the gradients
        in gradients       every gradient that one node of backward passes to another carries noise of that size, and forward none: where
                           that is much, the gradient is a sum that cancels. Backward multiplies stored tensors with gradients, and noise
                           in one factor of a product does what noise in the other does
Noise in gradients leaves the saved tensors exact. Errors that a node makes of saved tensors which do not go together (attention: decoded
queries beside an exact logsumexp; norms: a decoded input beside exact statistics) are therefore no part of what is allowed.

Noise in values alone may hide a sum that cancels: in program 1701 all rows before a batch norm are equal, and its gradients (times rstd =
316) add up to 0 over the rows. Under int8 equal rows are no longer equal, and the sum is 0.22 off. Noise in gradients makes it 0.44; noise
in values 0.03, since it raises the variance far above eps, and rstd falls.
Seeds are fixed: a verdict repeats. Of 1,630 programs under int8, 10 have a distance above the floor, 0.2 to 1.7 times the change: FACTOR
lies above.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from math import sqrt
from statistics import median

import torch

from paredown import Plan
from tests.programs.programs import MAX_LINES, Program, draw
from tests.programs.running import Noise, Outcome, run

EXACT = Plan.uniform(activation="fp32")
RECOMPUTING = EXACT.recomputing("*:*")
FACTOR, NUM_DISTURBED = 4, 5
MAX_ATTEMPTS = 40


@dataclass(frozen=True)
class Rounded:
    """A plan that rounds, the largest rounding error as a share of a block's largest value, and the distance that is always allowed."""

    name: str
    plan: Plan
    noise: float
    floor: float


def _of_many(error: float) -> float:
    """The sum of as many independent errors as a program has lines."""
    return error * sqrt(MAX_LINES)


# Errors of one tensor of normal numbers, over its RMS: 0.0252 for e4m3fn, and 0.090 for uint4 (the range of 64
# values is 4.7 standard deviations, a step 0.31, the error step / sqrt 12).
INT8 = Rounded("int8", Plan.uniform(activation="int8/64@bf16"), 2**-8, 25 * 2**-8)
E4M3 = Rounded("e4m3fn", Plan.uniform(activation="e4m3fn/64@bf16"), 2**-5, _of_many(0.0252))
UINT4 = Rounded("uint4", Plan.uniform(activation="uint4/64@bf16+bf16"), 2**-4, _of_many(0.090))
ROUNDED = {rounded.name: rounded for rounded in (INT8, E4M3, UINT4)}


def drawn(number: int, device: str = "cpu") -> tuple[Program, Outcome]:
    """The first program of this number that PyTorch runs on a device, and what comes of it unmodified."""
    for attempt in range(MAX_ATTEMPTS):
        program = draw(number, attempt)
        program = replace(program, options=replace(program.options, device=device))
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                warnings.filterwarnings("ignore", message="Attempting to run cuBLAS")  # the first use in a thread
                outcome = run(program)
        except Exception:  # a value modified in place that another operation saved, types that do not go together, no gradient
            continue
        if outcome.is_sane:
            return program, outcome
    raise AssertionError(f"program {number}: none of {MAX_ATTEMPTS} attempts runs unmodified")


def differences(expected: Outcome, actual: Outcome) -> list[str]:
    """The losses and gradients that are not the same bit for bit."""
    theirs = dict(actual.tensors())
    mine = dict(expected.tensors())
    missing = [f"{name} is in one of them only" for name in mine.keys() ^ theirs.keys()]
    return missing + [name for name, tensor in mine.items() if name in theirs and not torch.equal(tensor, theirs[name])]


def distances(expected: Outcome, actual: Outcome) -> dict[str, float]:
    """The distance of every gradient, by step and name."""
    found: dict[str, float] = {}
    for step, (mine, theirs) in enumerate(zip(expected.gradients, actual.gradients, strict=True)):
        largest = max(_rms(gradient) for gradient in mine.values())
        for name, gradient in mine.items():
            error = _rms(theirs[name].double() - gradient.double())
            size = max(_rms(gradient), largest / 10)
            found[f"step {step}: {name}"] = error / size if size else error
    return found


def changes(program: Program, expected: Outcome, noise: float) -> dict[str, float]:
    """How far the gradients of the unmodified program move under noise in values, or in gradients: the larger of two medians."""
    found: dict[str, float] = {}
    for is_in_values in (True, False):
        noises = [Noise(noise, seed, is_in_values=is_in_values, is_in_gradients=not is_in_values) for seed in range(NUM_DISTURBED)]
        runs = [distances(expected, run(program, noise=each)) for each in noises]
        for name in runs[0]:
            found[name] = max(found.get(name, 0.0), median(moved[name] for moved in runs))
    return found


def too_far(
    program: Program, expected: Outcome, actual: Outcome, rounded: Rounded, *, is_compiled: bool = False
) -> dict[str, tuple[float, float]]:
    """(distance, what is allowed) of the gradients that are too far off; what is allowed follows from runs in eager mode."""
    far = {name: distance for name, distance in distances(expected, actual).items() if not distance <= rounded.floor}
    moved = changes(program, run(program) if is_compiled else expected, rounded.noise) if far else {}
    allowed = {name: max(rounded.floor, FACTOR * moved[name]) for name in far}
    return {name: (distance, allowed[name]) for name, distance in far.items() if not distance <= allowed[name]}


def _rms(tensor: torch.Tensor) -> float:
    return float(tensor.double().square().mean().sqrt())


def faults_of_exact(program: Program, expected: Outcome, *, is_compiled: bool = False) -> list[str]:
    """What is wrong with a program under the exact plan; every second compiled one recomputes all tensors that it can."""
    actual = run(program, RECOMPUTING if is_compiled and program.number % 2 else EXACT, is_compiled=is_compiled)
    return [*(f"not bit for bit: {name}" for name in differences(expected, actual)), *_leftovers(expected, actual)]


def faults_of_rounded(program: Program, expected: Outcome, rounded: Rounded, *, is_compiled: bool = False) -> list[str]:
    """What is wrong with it under a plan that rounds."""
    actual = run(program, rounded.plan, is_compiled=is_compiled)
    far = too_far(program, expected, actual, rounded, is_compiled=is_compiled)
    found = [f"{name} is {distance:.3g} off, {allowed:.3g} is allowed" for name, (distance, allowed) in far.items()]
    losses = zip(expected.losses, actual.losses, strict=True)
    found += ["the loss is not the same bit for bit"] if not all(torch.equal(mine, theirs) for mine, theirs in losses) else []
    return found + _leftovers(expected, actual)


def _leftovers(expected: Outcome, actual: Outcome) -> list[str]:
    return [text for text in actual.leftovers if text not in expected.leftovers]
