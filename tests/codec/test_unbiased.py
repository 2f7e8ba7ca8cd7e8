"""Stochastic rounding is right on average, and its spread is what the fraction left over says.

Each test brings its statistic to a standard normal z and fails beyond 5.5, which chance reaches once in 2.6e7 statistics.
There are about 600, so the odds of a false alarm are 1 in 40 000, once for all: seeds are fixed.
"""

from __future__ import annotations

from math import sqrt

import pytest
import torch
from torch import Tensor

from paredown.codec.packed import round_trip
from paredown.formats.rounding import Seed
from tests.oracles.exact import element
from tests.support.values import normal

LIMIT = 5.5
COUNT = 1 << 16
FRACTIONS = (0.5, 0.25, 1 / 3, 0.9, 0.01, 0.999)
ELEMENTS = ("e4m3fn", "e5m2", "e3m1b4fns", "e2m1fn", "int8", "uint4", "int2", "e6m9f", "bf16", "nf4", "e4m3fnuz", "e8m0", "int16")
BLOCKS = (
    *("int8/64@bf16", "int4/64@bf16", "int2/64@bf16", "int8/64@e8m0", "uint8/64@bf16", "e4m3fn/64@bf16", "e2m1fn/32@e8m0"),
    *("e2m1fn/16@e4m3fn", "nf4/64@fp32", "uint4/64@bf16+fp32", "uint2/64@bf16+bf16", "e3m2fn/32@e8m0", "int4/64@fp32"),
)


def gaps(text: str) -> list[tuple[float, float]]:
    """A few neighbouring values: near zero, in the middle, the last two, and a negative pair."""
    exact = element(text)
    if exact.table:
        values = [float(v) for v in exact.table]
        return [(values[i], values[i + 1]) for i in (0, len(values) // 2, len(values) - 2)]
    rungs = sorted({0, exact.last_rung // 2, exact.last_rung - 1})
    pairs = [(float(exact.rung(k)), float(exact.rung(k + 1))) for k in rungs]
    return pairs if exact.kind == "uint" else [*pairs, (-pairs[-1][1], -pairs[-1][0])]


def moments(text: str, x: float, seed: int) -> tuple[float, float]:
    """Mean and variance of COUNT roundings of float32 `x`, relative to it."""
    filled = torch.full((COUNT,), x)
    error = round_trip(filled, text, rounding="stochastic", seed=seed).double() - filled.double()
    return error.mean().item(), error.var().item()


@pytest.mark.parametrize("text", ELEMENTS)
def test_elements_have_the_mean_and_the_spread_of_a_coin(text: str) -> None:
    """Up with probability f: the mean is x, the variance f (1 - f) step^2, and that of the sample variance is known too."""
    for below, above in gaps(text):
        step = above - below
        for number, fraction in enumerate(FRACTIONS):
            x = torch.tensor(below + fraction * step).item()
            p = (x - below) / step  # of the float32 that x really is
            mean, variance = moments(text, x, seed=number)
            coin = p * (1 - p) * step**2
            assert abs(mean) < LIMIT * sqrt(coin / COUNT)
            fourth = coin * step**2 * (1 - 3 * p * (1 - p))
            assert abs(variance - coin) < LIMIT * sqrt((fourth - coin**2) / COUNT) + 1e-4 * coin


@pytest.mark.parametrize("text", ELEMENTS)
def test_values_of_the_element_never_move(text: str) -> None:
    for pair in gaps(text):
        for value in pair:
            assert moments(text, value, seed=1) == (0.0, 0.0)


def errors_over_seeds(x: Tensor, text: str, **options: str) -> Tensor:
    """(seeds, values): the error of each rounding."""
    rounded = [round_trip(x, text, rounding="stochastic", seed=Seed(3, tensor=1, step=s), **options) for s in range(200)]
    return torch.stack(rounded).double() - x.double()


def worst_z(errors: Tensor) -> tuple[float, float]:
    """z of the mean of all errors, and the largest z of one value's mean."""
    spread = errors.var(0) / len(errors)
    total = errors.mean(0).sum() / spread.sum().sqrt()
    moving = spread > 0
    each = errors.mean(0)[moving] / spread[moving].sqrt()
    return abs(total.item()), each.square().mean().item()


@pytest.mark.parametrize("text", BLOCKS)
def test_block_formats_are_right_on_average(text: str) -> None:
    """The z of all values together, and the mean square of z over values, which is 1 up to 5.5 * sqrt(2 / 1920) = 0.18.

    Scales follow the largest value of a block, which never moves past the end: clipping would be a bias. The mean square is
    taken over z with a sample variance of 200 seeds, which adds 2/200 to it.
    """
    x = normal(10, 192, seed=1).abs() if text.startswith("uint") else normal(10, 192, seed=1)
    together, mean_square = worst_z(errors_over_seeds(x, text))
    assert together < LIMIT
    assert abs(mean_square - 1.01) < LIMIT * sqrt(2 / 1920) * 1.5  # rare coins, of small p, have heavier tails than a normal


def test_the_check_sees_the_bias_of_clipping() -> None:
    x = normal(10, 192, seed=1).abs()
    assert worst_z(errors_over_seeds(x, "e2m1fn/32@e8m0"))[0] < LIMIT
    assert worst_z(errors_over_seeds(x, "e2m1fn/32@e8m0", scales="ocp"))[0] > LIMIT


def test_the_check_sees_a_hundredth_of_a_step() -> None:
    errors = errors_over_seeds(normal(10, 192, seed=1), "int4/64@e8m0")
    assert worst_z(errors)[0] < LIMIT < worst_z(errors + 0.01 * errors.abs().max())[0]


def test_one_step_after_another_averages_out() -> None:
    """A value between two codes, stored again at each of 1500 steps: the average is the value, not the nearer code."""
    x = torch.tensor([0.3, 1.7, -2.2, 6.95])
    total = sum(round_trip(x, "int4", rounding="stochastic", seed=Seed(1, step=s)).double() for s in range(1500))
    assert isinstance(total, Tensor)
    p = x.double() - x.double().floor()
    assert ((total / 1500 - x).abs() < LIMIT * (p * (1 - p) / 1500).sqrt()).all()
    assert not torch.equal(round_trip(x, "int4"), x)
