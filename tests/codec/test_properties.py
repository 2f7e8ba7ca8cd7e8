"""What holds for every element and rounding: order is kept, rounding twice is rounding once, and errors stay within a step."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from paredown.codec import reference
from paredown.codec.packed import round_trip
from paredown.formats.element import Element
from paredown.formats.rounding import Overflow, Rounding
from tests.oracles.exact import element
from tests.support.compare import assert_same_bits, assert_within
from tests.support.strategies import examples, float_elements
from tests.support.values import ROUNDINGS, SPREAD, gap_probes, normal, specials, wide_floats, words

BLOCKS = (
    *("int8/64@bf16", "int4/64@fp32", "e4m3fn/32@e8m0", "e2m1fn/16@e4m3fn", "nf4/64@fp32", "uint4/64@bf16+fp32", "int2/7@e8m0"),
    *("uint8/64@bf16", "e3m2fn/5@bf16", "int16/16@bf16", "e5m2/64@fp32"),
)
FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)


def values_with(y: Tensor, text: str, rounding: str, bits: Tensor | None) -> Tensor:
    parsed = Element.parse(text)
    codes, _ = reference.codes_of(y, parsed, Rounding(rounding), Overflow.SATURATE, bits)
    return reference.values_of(codes, parsed)


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("text", SPREAD)
def test_order_is_kept(text: str, rounding: str) -> None:
    """x <= y gives rounded x <= rounded y; stochastic rounding too, for one and the same random number."""
    y = torch.cat([wide_floats(3000), gap_probes(text, 100), normal(2000)])
    y = y[y.isfinite()].sort().values
    for number in (0, 1 << 30, 1 << 31, (1 << 32) - 1) if rounding == "stochastic" else (0,):
        rounded = values_with(y, text, rounding, torch.full(y.shape, number))
        assert (rounded[1:] >= rounded[:-1]).all()


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("text", SPREAD)
def test_rounding_twice_is_rounding_once(text: str, rounding: str) -> None:
    y = torch.cat([wide_floats(2000), normal(2000), specials()])
    y = y[~y.isnan()]
    once = values_with(y, text, rounding, words(len(y)))
    for other in ROUNDINGS:
        assert_same_bits(values_with(once, text, other, words(len(y), seed=1)), once)


@given(text=float_elements(), x=st.lists(FINITE, min_size=1, max_size=30), rounding=st.sampled_from(ROUNDINGS))
@examples(150)
def test_any_float_element_rounds_to_itself_and_within_a_step(text: str, x: list[float], rounding: str) -> None:
    y = torch.tensor(x)
    once = round_trip(y, text, rounding=rounding, overflow="saturate", seed=3)
    assert_same_bits(round_trip(once, text, rounding=rounding, overflow="saturate", seed=4), once)
    covered = y.abs() <= float(element(text).max)
    assert_within(once[covered], y[covered], text, steps=0.5 if rounding.startswith("nearest") else 1)


@pytest.mark.parametrize("text", SPREAD)
def test_elements_round_to_nearest_within_half_a_step(text: str) -> None:
    exact = element(text)
    lowest = -float(exact.rung(exact.last_rung_below())) if not exact.table else float(exact.table[0])
    y = torch.cat([normal(3000), gap_probes(text, 200)]).clamp(lowest, float(exact.max))
    for rounding, steps in (("nearest_even", 0.5), ("nearest_away", 0.5), ("toward_zero", 1), ("stochastic", 1)):
        assert_within(round_trip(y, text, rounding=rounding), y, text, steps)


@pytest.mark.parametrize("text", BLOCKS)
def test_blocks_round_to_nearest_within_half_a_step(text: str) -> None:
    y = normal(6, 150) * torch.exp2(torch.linspace(-20, 20, 6))[:, None]
    y = y.abs() if text.startswith("uint") and "+" not in text else y
    for rounding, steps in (("nearest_even", 0.5), ("nearest_away", 0.5), ("toward_zero", 1), ("stochastic", 1)):
        assert_within(round_trip(y, text, rounding=rounding), y, text, steps)


@pytest.mark.parametrize("rule", ["cover", "ocp"])
@pytest.mark.parametrize("text", [t for t in BLOCKS if "e8m0" in t])
def test_with_powers_of_two_a_tensor_rounds_once(text: str, rule: str) -> None:
    """The second time scales are chosen anew, from the rounded values, and still nothing moves."""
    once = round_trip(normal(6, 150), text, scales=rule, rounding="stochastic", seed=1)
    for rounding in ROUNDINGS:
        assert_same_bits(round_trip(once, text, scales=rule, rounding=rounding, seed=2), once)


@pytest.mark.parametrize("text", [t for t in SPREAD if not t.startswith("uint") and t not in ("nf4", "e8m0", "int1")])
def test_negatives_mirror_positives(text: str) -> None:
    y, bits = torch.cat([normal(2000), gap_probes(text, 100)]), words(2000 + len(gap_probes(text, 100)))
    for rounding in ROUNDINGS:
        assert torch.equal(values_with(-y, text, rounding, bits), -values_with(y, text, rounding, bits))
