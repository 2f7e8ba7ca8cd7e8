"""Scales that the caller passes: encoding decoded values returns the same bytes, and values that the scales do not cover overflow."""

from __future__ import annotations

import pytest
import torch

from paredown.codec.packed import encode, round_trip
from paredown.formats.rounding import Seed
from tests.support.compare import assert_same_parts
from tests.support.values import ROUNDINGS, normal

ELEMENTS = ("int8", "int4", "int2", "int16", "uint8", "uint1", "e4m3fn", "e2m1fn", "e5m2", "e3m1b4fns", "nf4", "e4m3fnuz")
POWERS_OF_TWO = [f"{element}/16@e8m0" for element in ELEMENTS]
AFFINE = ["uint4/16@bf16+fp32", "uint2/16@bf16+bf16", "uint4/16@e8m0+fp32"]
OTHERS = [f"{element}/16@{scale}" for element in ELEMENTS for scale in ("fp32", "bf16", "e4m3fn")] + AFFINE


@pytest.mark.parametrize("text", POWERS_OF_TWO)
@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_with_powers_of_two_decoded_values_keep_their_bytes_under_every_rounding(text: str, rounding: str) -> None:
    """Their arithmetic is exact: an unmodified weight does not drift, however often it is stored."""
    x = normal(30, 50).abs() if text.startswith("uint") else normal(30, 50)
    first = encode(x, text, rounding=rounding, seed=1)
    repacked = first
    for step in range(1, 6):
        repacked = encode(repacked.decode(), text, rounding=rounding, seed=Seed(2, step=step), scales=repacked)
        assert_same_parts(repacked, first)


@pytest.mark.parametrize("text", OTHERS)
@pytest.mark.parametrize("rounding", ["nearest_even", "nearest_away"])
def test_with_other_scales_decoded_values_keep_their_bytes_to_nearest(text: str, rounding: str) -> None:
    x = normal(30, 50).abs() if text.startswith("uint") else normal(30, 50)
    first = encode(x, text, rounding=rounding)
    repacked = encode(first.decode(), text, rounding=rounding, scales=first)
    assert_same_parts(repacked, first)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_values_decoded_to_16_bits_keep_their_bytes(dtype: torch.dtype) -> None:
    x = normal(30, 50, dtype=dtype)
    for text in ("int8/16@e8m0", "int4/16@bf16", "e2m1fn/16@e8m0"):
        first = encode(x, text)
        assert torch.equal(encode(first.decode(), text, scales=first).codes, first.codes)


# (element, what 200 becomes with a scale of 1 under nonfinite); int and nf4 have no code for it, so their block is NaN
PAST = [("int8", "block"), ("uint7", "block"), ("nf4", "block"), ("e2m1fn", "block"), ("e3m4", "inf"), ("e4m3b11fnuz", "nan")]


@pytest.mark.parametrize(("element", "becomes"), PAST)
@pytest.mark.parametrize("scale", ["e8m0", "bf16", "fp32"])
def test_values_past_the_end_of_given_scales(element: str, becomes: str, scale: str) -> None:
    text = f"{element}/4@{scale}"
    ones = {"e8m0": torch.tensor([[127, 127]], dtype=torch.uint8), "bf16": torch.ones(1, 2).bfloat16(), "fp32": torch.ones(1, 2)}
    x = torch.tensor([200.0, 1.0, 0.0, 1.0, 1.0, 1.0, 0.0, 1.0])
    largest = {"int8": 127.0, "uint7": 127.0, "nf4": 1.0, "e2m1fn": 6.0, "e3m4": 15.5, "e4m3b11fnuz": 30.0}[element]
    held = encode(x, text, scales=ones[scale], overflow="saturate")
    assert held.decode().tolist() == [largest, *x.tolist()[1:]]
    decoded = encode(x, text, scales=ones[scale], overflow="nonfinite").decode()
    assert decoded[4:].tolist() == x[4:].tolist()
    if becomes == "block":
        assert decoded[:4].isnan().all()
    else:
        assert decoded[1:4].tolist() == x[1:4].tolist()
        assert decoded[0].isnan() if becomes == "nan" else decoded[0] == torch.inf


@pytest.mark.parametrize("text", ["int8/16@e8m0", "uint4/16@bf16+fp32", "e2m1fn/16@e4m3fn", "e5m2/16@bf16"])
def test_nan_in_the_values_breaks_the_block_though_scales_are_given(text: str) -> None:
    x = normal(2, 32)
    scales = encode(x, text)
    x[1, 20] = float("nan")
    repacked = encode(x, text, scales=scales)
    expected = torch.zeros(2, 32, dtype=torch.bool)
    expected[1, 16:] = True
    assert torch.equal(repacked.decode().isnan(), expected)
    assert torch.equal(repacked.decode()[~expected], scales.decode()[~expected])


def test_a_broken_block_stays_broken() -> None:
    x = normal(1, 32)
    x[0, 0] = float("inf")
    broken = encode(x, "int8/16@bf16")
    repacked = encode(torch.zeros(1, 32), "int8/16@bf16", scales=broken)
    assert repacked.decode()[0, :16].isnan().all()
    assert repacked.decode()[0, 16:].eq(0).all()


def test_the_scales_may_be_a_packed_tensor_or_its_scales() -> None:
    x, other = normal(3, 40), normal(3, 40, seed=1)
    packed = encode(other, "int8/16@bf16")
    assert packed.scales is not None
    one, two = encode(x, "int8/16@bf16", scales=packed), encode(x, "int8/16@bf16", scales=packed.scales)
    assert torch.equal(one.codes, two.codes)
    assert one.scales is not None and torch.equal(one.scales, packed.scales)
    assert torch.equal(round_trip(x, "int8/16@bf16", scales=packed), one.decode())
    assert not torch.equal(one.codes, encode(x, "int8/16@bf16").codes)


def test_scales_bring_their_memory_order() -> None:
    plain = normal(2, 3, 4, 5)
    channels_last = plain.to(memory_format=torch.channels_last)
    packed = encode(channels_last, "int8/16@e8m0")
    repacked = encode(plain, "int8/16@e8m0", scales=packed)
    assert repacked.order == packed.order
    assert torch.equal(repacked.codes, packed.codes)


def test_given_scales_are_not_written_to() -> None:
    packed = encode(normal(4, 64), "int8/16@bf16")
    assert packed.scales is not None
    before = packed.scales.clone()
    x = normal(4, 64)
    x[0, 0] = float("nan")
    encode(x, "int8/16@bf16", scales=packed)
    assert torch.equal(packed.scales, before)
