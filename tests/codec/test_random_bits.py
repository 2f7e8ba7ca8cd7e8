"""The random bits of stochastic rounding: even, and independent of their neighbours and of other seeds, steps and tensors.

Rounding reads a number from the top, so it is the upper 16 bits that are held to independence; the lower ones have to be even,
so that rare events have their odds.

Every statistic is brought to a standard normal z, and z beyond LIMIT = 6 fails. True randomness does so once in 5e8
statistics; about 5000 are looked at here, so an alarm is false with odds of 1 in 100 000, once for all, as seeds are fixed.
"""

from __future__ import annotations

from itertools import pairwise
from math import sqrt

import pytest
import torch
from torch import Tensor

from paredown.codec import cpu
from paredown.codec.reference import random_bits
from paredown.formats.rounding import Seed
from tests.support.paths import loops_or_none, no_loops

CPU = torch.device("cpu")
COUNT = 1 << 16
LIMIT = 6.0
STREAMS = {
    "first": Seed(0),
    "next seed": Seed(1),
    "next step": Seed(0, step=1),
    "next tensor": Seed(0, tensor=1),
    "step after": Seed(0, step=2),
    "far seed": Seed(1 << 40),
    "another": Seed(123456789, tensor=77, step=4096),
}


def stream(name: str, start: int = 0, count: int = COUNT) -> Tensor:
    return random_bits(STREAMS[name], start, count, CPU)


def z_of_ones(bits: Tensor) -> Tensor:
    """How far the share of ones in bool `bits` (count, ...) is from one half, in standard deviations."""
    return (bits.sum(0).double() / len(bits) - 0.5) * 2 * sqrt(len(bits))


def z_of_correlation(a: Tensor, b: Tensor) -> float:
    """Of two uniform streams over 0..2^32-1: the mean of the product has variance 1/144 once centred and scaled to 1."""
    a, b = a.double() / 2**32 - 0.5, b.double() / 2**32 - 0.5
    return ((a * b).mean() * 12 * sqrt(len(a))).item()


def z_of_counts(values: Tensor, num_bins: int) -> float:
    """The chi-square of equal bins, made normal by the cube root of Wilson and Hilferty."""
    counts = torch.bincount(values, minlength=num_bins).double()
    expected, freedom = len(values) / num_bins, num_bins - 1
    ratio = ((counts - expected).square() / expected).sum().item() / freedom
    return (ratio ** (1 / 3) - (1 - 2 / (9 * freedom))) / sqrt(2 / (9 * freedom))


def as_bits(words: Tensor, lowest: int = 16) -> Tensor:
    """(count,) words as (count, 32 - lowest) bool."""
    return ((words[:, None] >> torch.arange(lowest, 32)) & 1).bool()


@pytest.mark.parametrize("name", STREAMS)
def test_every_bit_is_one_half_of_the_time(name: str) -> None:
    assert z_of_ones(as_bits(stream(name), lowest=0)).abs().max() < LIMIT


@pytest.mark.parametrize("name", STREAMS)
def test_every_byte_is_uniform(name: str) -> None:
    words = stream(name)
    for shift in range(0, 32, 8):
        assert abs(z_of_counts((words >> shift) & 255, 256)) < LIMIT
    assert abs(z_of_counts(words >> 20, 4096)) < LIMIT


@pytest.mark.parametrize("exponent", [8, 12, 16, 18])
def test_rare_events_have_their_odds(exponent: int) -> None:
    """A fraction of 2^-k rounds up once in 2^k: the count among 2^23 numbers is that of Poisson, 32 for the rarest."""
    count = sum((random_bits(Seed(9, step=s), 0, 1 << 21, CPU) >= 2**32 - 2 ** (32 - exponent)).sum().item() for s in range(4))
    expected = 2.0 ** (23 - exponent)
    assert abs(count - expected) < LIMIT * sqrt(expected)


@pytest.mark.parametrize("name", STREAMS)
def test_pairs_of_neighbours_are_uniform(name: str) -> None:
    words = stream(name) >> 26
    assert abs(z_of_counts(words[::2] * 64 + words[1::2], 4096)) < LIMIT


@pytest.mark.parametrize("lag", [1, 2, 3, 4, 7, 16, 64, 256, 1000, 1024, 4096])
def test_indices_that_lie_near_or_a_row_apart_are_not_correlated(lag: int) -> None:
    for name in ("first", "next step", "another"):
        words = stream(name)
        assert abs(z_of_correlation(words[:-lag], words[lag:])) < LIMIT
        assert z_of_ones(as_bits(words[:-lag] ^ words[lag:])).abs().max() < LIMIT


@pytest.mark.parametrize(
    ("one", "other"), [*pairwise(STREAMS), ("first", "next step"), ("first", "next tensor"), ("next step", "step after")]
)
def test_other_seeds_steps_and_tensors_are_not_correlated(one: str, other: str) -> None:
    a, b = stream(one), stream(other)
    assert abs(z_of_correlation(a, b)) < LIMIT
    for shift in (1, 64):
        assert abs(z_of_correlation(a[shift:], b[:-shift])) < LIMIT
    signs = [as_bits(words).float() * 2 - 1 for words in (a, b)]
    every_bit_with_every_bit = signs[0].T @ signs[1] / sqrt(COUNT)  # (16, 16), each a z
    assert every_bit_with_every_bit.abs().max() < LIMIT


def test_one_index_over_many_seeds_and_steps_is_uniform() -> None:
    """What unbiasedness over steps rests on: element 5 of a tensor, step after step."""
    for seeds in ([Seed(0, step=s) for s in range(2048)], [Seed(s) for s in range(2048)], [Seed(0, tensor=s) for s in range(2048)]):
        words = torch.cat([random_bits(seed, 5, 1, CPU) for seed in seeds])
        assert z_of_ones(as_bits(words)).abs().max() < LIMIT
        assert abs(z_of_counts(words >> 26, 64)) < LIMIT
        assert abs(z_of_correlation(words[:-1], words[1:])) < LIMIT


def test_flipping_a_bit_of_the_index_flips_half_of_the_bits() -> None:
    words, index = stream("another"), torch.arange(COUNT)
    for bit in range(32):
        flipped = words[index ^ (1 << bit)] if 1 << bit < COUNT else stream("another", start=1 << bit)
        assert z_of_ones(as_bits(words ^ flipped)).abs().max() < LIMIT, f"bit {bit}"


@pytest.mark.parametrize("start", [0, 1, 2**31 - 5, 2**32 - 1000, 2**32, 2**33 - 7, 2**40 + 3])
@pytest.mark.parametrize("is_compiled", [True, False])
def test_the_cpu_draws_the_same_bits(start: int, is_compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "find_loops", loops_or_none if is_compiled else no_loops)
    fast = cpu.random_bits(STREAMS["another"], start, 2100, CPU)
    assert torch.equal(fast.long() & 0xFFFFFFFF, random_bits(STREAMS["another"], start, 2100, CPU))


def test_indices_past_2_to_the_32_are_another_stream() -> None:
    low, high = stream("first", 0), stream("first", 2**32)
    assert abs(z_of_correlation(low, high)) < LIMIT
    assert not (low == high).all()


def test_the_statistics_see_what_is_not_random() -> None:
    counter = torch.arange(COUNT) << 15
    assert abs(z_of_correlation(counter[:-1], counter[1:])) > LIMIT
    assert abs(z_of_counts((stream("first") | 1) & 255, 256)) > LIMIT
    assert z_of_ones(as_bits(stream("first") | 4, lowest=0)).abs().max() > LIMIT
    assert abs(z_of_correlation(stream("first"), stream("first"))) > LIMIT
