"""Packed tensors: real bytes, the bytes themselves, moving, printing, and what round_trip promises beside its values."""

from __future__ import annotations

from math import inf, nan

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paredown.codec.packed import encode, round_trip
from paredown.errors import FormatError
from paredown.formats.format import Format
from paredown.formats.rounding import Overflow, Rounding
from tests.support.compare import assert_same_bits
from tests.support.strategies import examples, formats, shapes
from tests.support.values import ROUNDINGS, normal

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@given(text=formats(blocks=(1, 2, 3, 8, 16, 64)), shape=shapes(), dtype=st.sampled_from(DTYPES))
@examples(200)
def test_predicted_bytes_are_stored_bytes(text: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    packed = encode(torch.zeros(shape, dtype=dtype), text, overflow="saturate")
    assert packed.nbytes == Format.parse(text).nbytes(shape)
    assert sum(t.untyped_storage().nbytes() for t in packed.parts.tensors()) == packed.nbytes
    assert (packed.decode().shape, packed.decode().dtype) == (torch.Size(shape), dtype)


# (format, values, codes as bytes) worked out by hand
BY_HAND = [
    ("e4m3fn", [1.0, -3.25, 448.0, 0.001953125], [0b0_0111_000, 0b1_1000_101, 0b0_1111_110, 1]),
    ("e2m1fn", [1.0, -0.5, 6.0], [0b1001_0010, 0b0111]),
    ("int4", [1.0, -1.0, 7.0, -7.0], [0xF1, 0x97]),
    ("int2", [1.0, -1.0, 0.0, 1.0], [0b01_00_11_01]),
    ("uint1", [1.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0, 0.0, 1.0], [0b00011001, 1]),
    ("e3m2fn", [1.0, 28.0, -1.0, 0.0625], [0b11_001100, 0b1100_0111, 0b000001_10]),
    ("bf16", [1.0], [0x80, 0x3F]),
    ("fp32", [-2.0], [0, 0, 0, 0xC0]),
    ("nf4", [-1.0, 0.0, 1.0], [0x70, 0x0F]),
]


@pytest.mark.parametrize(("text", "values", "expected"), BY_HAND)
def test_bytes_by_hand(text: str, values: list[float], expected: list[int]) -> None:
    packed = encode(torch.tensor(values), text)
    assert packed.codes.tolist() == [expected]
    assert packed.decode().tolist() == values


def test_scales_are_stored_as_what_they_are() -> None:
    x = torch.full((2, 5), 127.0)
    kinds = {"fp32": (torch.float32, 1.0), "bf16": (torch.bfloat16, 1.0), "e8m0": (torch.uint8, 127)}
    for kind, (dtype, stored) in kinds.items():
        scales = encode(x, f"int8/3@{kind}").scales
        assert scales is not None and scales.dtype is dtype
        assert scales.tolist() == [[stored, stored]] * 2


def test_to_moves_every_part() -> None:
    for text in ("e4m3fn", "uint4/64@bf16+fp32", "e2m1fn/16@e4m3fn"):
        packed = encode(normal(3, 70), text)
        moved = packed.to("meta")
        assert moved.device.type == "meta" and all(t.device.type == "meta" for t in moved.parts.tensors())
        assert moved.nbytes == packed.nbytes and packed.device.type == "cpu"
        assert_same_bits(packed.to("cpu").decode(), packed.decode())


REPRS = [
    (torch.zeros(3, 100), "int4/64@bf16", "PackedTensor(int4/64@bf16, shape=(3, 100), float32 on cpu, 162 bytes, 7.4x smaller)"),
    (torch.zeros(8, dtype=torch.bfloat16), "e4m3fn", "PackedTensor(e4m3fn, shape=(8,), bfloat16 on cpu, 8 bytes, 2.0x smaller)"),
    (torch.zeros(()), "e4m3fn", "PackedTensor(e4m3fn, shape=(), float32 on cpu, 1 bytes, 4.0x smaller)"),
    (torch.zeros(0), "e4m3fn", "PackedTensor(e4m3fn, shape=(0,), float32 on cpu, 0 bytes)"),
    (torch.zeros(1, dtype=torch.float16), "fp32", "PackedTensor(fp32, shape=(1,), float16 on cpu, 4 bytes)"),
]


@pytest.mark.parametrize(("x", "text", "expected"), REPRS)
def test_repr(x: torch.Tensor, text: str, expected: str) -> None:
    assert repr(encode(x, text)) == expected


def test_decode_to_another_dtype() -> None:
    packed = encode(normal(4, 70), "e4m3fn/64@bf16")
    for dtype in DTYPES:
        assert torch.equal(packed.decode(dtype), packed.decode().to(dtype))


@pytest.mark.parametrize(
    "text", ["e4m3fn", "e5m2", "e3m1b4fns", "e2m1fn", "bf16", "fp32", "e8m11fns", "e2m1fn/16@e8m0", "e4m3fn/4@bf16"]
)
def test_minus_zero_stays_where_there_is_one(text: str) -> None:
    x = torch.tensor([-0.0, 0.0, -1e-45, 1.0])
    for rounding in ROUNDINGS:
        y = round_trip(x, text, rounding=rounding)
        assert torch.signbit(y).tolist() == [True, False, True, False]
        assert torch.signbit(encode(x, text, rounding=rounding).decode()).tolist() == [True, False, True, False]


@pytest.mark.parametrize("text", ["e4m3fnuz", "int8", "int8/16@bf16", "uint4/16@bf16+fp32", "nf4/16@fp32"])
def test_minus_zero_is_zero_where_there_is_one_zero(text: str) -> None:
    x = torch.tensor([-0.0, 0.0, 1.0])
    for rounding in ROUNDINGS:
        assert not torch.signbit(round_trip(x, text, rounding=rounding)).any()


# what becomes of 1e6, inf, -inf and nan without a block: (element, under nonfinite, under saturate)
NOT_ORDINARY = [
    ("e5m2", [inf, inf, -inf, nan], [57344.0, 57344.0, -57344.0, nan]),
    ("e4m3fn", [nan, nan, nan, nan], [448.0, 448.0, -448.0, nan]),
    ("e4m3fnuz", [nan, nan, nan, nan], [240.0, 240.0, -240.0, nan]),
    ("int8", [inf, inf, -inf, nan], [127.0, 127.0, -127.0, nan]),
    ("e2m1fn", [inf, inf, -inf, nan], [6.0, 6.0, -6.0, nan]),
    ("uint4", [inf, inf, -inf, nan], [15.0, 15.0, 0.0, nan]),
    ("nf4", [inf, inf, -inf, nan], [1.0, 1.0, -1.0, nan]),
    ("fp32", [1e6, inf, -inf, nan], [1e6, torch.finfo(torch.float32).max, -torch.finfo(torch.float32).max, nan]),
]


@pytest.mark.parametrize(("text", "rounded", "saturated"), NOT_ORDINARY)
@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_nan_inf_and_values_past_the_largest(text: str, rounded: list[float], saturated: list[float], rounding: str) -> None:
    x = torch.tensor([1e6, inf, -inf, nan])
    assert_same_bits(round_trip(x, text, rounding=rounding), torch.tensor(rounded))
    assert_same_bits(round_trip(x, text, rounding=rounding, overflow="saturate"), torch.tensor(saturated))


@pytest.mark.parametrize(
    "text", ["bf16", "e5m10f", "int8/64@e8m0", "int4/64@bf16", "e4m3fn/32@e8m0", "uint4/64@bf16+fp32", "e5m2/8@fp32"]
)
def test_float16_stays_finite(text: str) -> None:
    x = torch.tensor([65504.0, -65504.0, 65472.0, 3.0], dtype=torch.float16)
    for rounding in ROUNDINGS:
        y = round_trip(x, text, rounding=rounding, overflow="saturate")
        assert y.dtype is torch.float16 and y.isfinite().all()


def test_choices_may_be_members_or_their_names() -> None:
    x = normal(100)
    for rounding in Rounding:
        for overflow in Overflow:
            named = round_trip(x, "e3m2fn", rounding=rounding.value, overflow=overflow.value, seed=1)
            assert torch.equal(named, round_trip(x, Format.parse("e3m2fn"), rounding=rounding, overflow=overflow, seed=1))


def test_inputs_and_results_share_nothing() -> None:
    x = normal(4, 4)
    before = x.clone()
    y = round_trip(x, "fp32")
    assert y.data_ptr() != x.data_ptr()
    encode(x, "fp32").decode().zero_()
    assert torch.equal(x, before)


def test_names_of_the_catalog_are_formats() -> None:
    x = normal(4, 64)
    for name, text in {"mxfp4": "e2m1fn/32@e8m0", "int8_block": "int8/64@bf16", "nvfp4": "e2m1fn/16@e4m3fn"}.items():
        assert_same_bits(encode(x, name).decode(), encode(x, text).decode())
        assert_same_bits(round_trip(x, name), round_trip(x, text))
    with pytest.raises(FormatError, match="Similar names in the catalog: mxfp4"):
        encode(x, "mxfp5")
