"""Seeds: every field makes another stream, and a shard draws the bits that its elements have in the whole tensor."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from paredown.codec.packed import encode, round_trip
from paredown.codec.reference import random_bits
from paredown.formats.rounding import Overflow, Rounding, Seed, mix
from tests.support.values import normal

CPU = torch.device("cpu")
BASE = Seed(7, tensor=3, step=5)
OTHERS = {
    "value": replace(BASE, value=8),
    "high half of the value": replace(BASE, value=7 + (1 << 32)),
    "negative value": replace(BASE, value=-7),
    "tensor": replace(BASE, tensor=4),
    "high half of the tensor": replace(BASE, tensor=3 + (1 << 32)),
    "step": replace(BASE, step=6),
    "fields change places": Seed(3, tensor=7, step=5),
    "fields change places again": Seed(5, tensor=3, step=7),
}


def hash32(x: int, *, offset: int = 0x9E3779B9) -> int:
    """The mixer "lowbias32" as its author prints it, after an offset, in Python integers."""
    x = (x + offset) % 2**32
    x ^= x >> 16
    x = x * 0x7FEB352D % 2**32
    x ^= x >> 15
    x = x * 0x846CA68B % 2**32
    return x ^ (x >> 16)


@pytest.mark.parametrize("what", OTHERS)
def test_each_field_of_a_seed_changes_both_keys(what: str) -> None:
    assert BASE.keys()[0] != OTHERS[what].keys()[0]
    assert BASE.keys()[1] != OTHERS[what].keys()[1]


def test_keys_of_many_seeds_are_all_different() -> None:
    seeds = [Seed(v, tensor=t, step=s) for v in range(20) for t in range(20) for s in range(20)]
    assert len({seed.keys() for seed in seeds}) == len(seeds)
    assert all(k0 != k1 and 0 <= k0 < 2**32 and 0 <= k1 < 2**32 for k0, k1 in (seed.keys() for seed in seeds))


def test_keys_are_a_pure_function() -> None:
    assert BASE.keys() == Seed(7, tensor=3, step=5).keys() == replace(BASE, first_index=99).keys()


def test_the_step_may_be_a_tensor() -> None:
    assert replace(BASE, step=torch.tensor([5], dtype=torch.int32)).keys() == BASE.keys()
    assert replace(BASE, step=torch.tensor(5)).keys() == BASE.keys()


def test_mix_is_the_printed_mixer() -> None:
    inputs = [0, 1, 2, 12345, 2**31, 2**32 - 1]
    assert [mix(x) for x in inputs] == [hash32(x) for x in inputs]


@pytest.mark.parametrize("start", [0, 5, 2**32 - 3, 2**33 + 1])
def test_random_bits_follow_the_written_formula(start: int) -> None:
    k0, k1 = BASE.keys()
    expected = []
    for index in range(start, start + 8):
        x = (index * 0x9E3779B9 + k0) % 2**32
        x = (x ^ x >> 16) * 0x7FEB352D % 2**32
        high = (index >> 32) * 0xC2B2AE35 % 2**32
        high = (high ^ high >> 15) * 0x846CA68B % 2**32
        expected.append((x ^ x >> 15 ^ k1 ^ high) * 0x846CA68B % 2**32)
    assert random_bits(BASE, start, 8, CPU).tolist() == expected


@pytest.mark.parametrize("text", ["e4m3fn", "int4/8@bf16", "e2m1fn/4@e8m0", "uint4/16@bf16+fp32", "e3m2fn", "nf4/8@fp32"])
@pytest.mark.parametrize("cuts", [(0, 2, 5, 9), (0, 1, 2, 3, 9), (0, 9)])
def test_shards_of_dimension_0_draw_the_bits_of_the_whole(text: str, cuts: tuple[int, ...]) -> None:
    x, seed = normal(9, 21), Seed(1, tensor=2, step=3, first_index=1000)
    whole = encode(x, text, rounding="stochastic", seed=seed)
    for start, stop in pairwise(cuts):
        shard_seed = replace(seed, first_index=1000 + start * 21)
        shard = encode(x[start:stop], text, rounding="stochastic", seed=shard_seed)
        assert torch.equal(shard.codes, whole.codes[start:stop])
        assert torch.equal(round_trip(x[start:stop], text, rounding="stochastic", seed=shard_seed), whole.decode()[start:stop])


def test_a_shard_without_its_index_draws_other_bits() -> None:
    x = normal(2, 500).abs()
    whole = round_trip(x, "int2/500@fp32", rounding="stochastic", seed=1)
    assert not torch.equal(round_trip(x[1:], "int2/500@fp32", rounding="stochastic", seed=1), whole[1:])


def test_a_number_is_a_seed() -> None:
    x = normal(100)
    number, seed = (round_trip(x, "e3m1b4fns", rounding="stochastic", seed=s) for s in (5, Seed(5)))
    assert torch.equal(number, seed)


def test_names_are_the_words_of_the_interface() -> None:
    assert {r.value for r in Rounding} == {"nearest_even", "toward_zero", "nearest_away", "stochastic"}
    assert {o.value for o in Overflow} == {"saturate", "nonfinite"}
