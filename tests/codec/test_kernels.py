"""The kernels give the reference's bits: in Triton's interpreter where there is no GPU, compiled where there is one (`-m gpu`)."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from paredown.codec import reference
from paredown.codec.reference import Encoding, PackedParts
from paredown.formats.element import Element, ElementKind
from paredown.formats.format import Format
from paredown.formats.rounding import Overflow, Rounding, Seed
from tests.support.compare import assert_same_bits, assert_same_parts
from tests.support.paths import SEED, make_encoding, mixed_rows, tensor_scale
from tests.support.values import OVERFLOWS, ROUNDINGS, gap_probes, listed, normal, specials, wide_floats

pytest.importorskip("triton", reason="Triton is not installed")
from paredown.codec import kernels

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy warns in the interpreter; a GPU does not
INTERPRETED = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled here")
DEVICES = [pytest.param("cpu", marks=INTERPRETED), pytest.param("cuda", marks=pytest.mark.gpu)]
every_device = pytest.mark.parametrize("device", DEVICES)

ELEMENTS = listed("""
    e4m3fn e5m2 e4m3 e3m4 e4m3fnuz e5m2fnuz e4m3b11fnuz e2m1fn e2m3fn e3m2fn bf16 fp16 fp32 e8m0 nf4
    int1 int2 int4 int8 int16 uint1 uint2 uint4 uint8 uint16 int6 int5 int11
    e4m3b8fns e3m1b4fns e8m7fns e6m9f e5m2f e8m3fn e1m3 e4m0fn e5m0fns e5m23 e5m2b120 e2m21fn
""")
BLOCKS = listed("""
    int8/64@bf16 int4/64@bf16 int2/64@e8m0 uint8/64@bf16 uint4/64@bf16+fp32 uint2/32@fp32+bf16 uint1/64@e8m0+fp32
    e4m3fn/64@bf16 e2m1fn/32@e8m0 e5m2/32@e8m0 e3m2fn/32@e8m0 e2m1fn/16@e4m3fn nf4/64@fp32 int16/128@fp32
    e4m3fnuz/8@bf16 e4m3b8fns/32@bf16 bf16/16@bf16 int4/256@bf16 e4m3fn/1@fp32 uint4/16@e4m3fn+fp32
""")


def rounded_by_reference(x: Tensor, encoding: Encoding, given: PackedParts | None) -> tuple[PackedParts, Tensor, Tensor]:
    """(packed, decoded, round_trip) of the reference."""
    bits = reference.random_bits(encoding.seed, encoding.seed.first_index, x.numel(), x.device).view(x.shape)
    packed = reference.encode_rows(x, encoding, given, bits)
    decoded = reference.decode_rows(packed, encoding.format, x.shape[1], x.dtype)
    return packed, decoded, reference.round_trip_rows(x, encoding, given, bits)


def assert_kernels_agree(x: Tensor, encoding: Encoding, device: str, given: PackedParts | None = None) -> None:
    """round_trip and, where the kernels pack this width, encode and decode."""
    packed, decoded, round_trip = rounded_by_reference(x, encoding, given)
    here, there = x.to(device), given and given.mapped(lambda part: part.to(device))
    out = torch.empty_like(here)
    if kernels.covers(encoding, "round_trip"):
        assert_same_bits(kernels.round_trip_rows(here, encoding, there, out).cpu(), round_trip)
    if kernels.covers(encoding, "encode"):
        made = kernels.encode_rows(here, encoding, there)
        assert_same_parts(made, packed)
        assert_same_bits(kernels.decode_rows(made, encoding, torch.empty_like(here)).cpu(), decoded)


@every_device
@pytest.mark.parametrize("text", ELEMENTS)
def test_elements(text: str, device: str) -> None:
    x = torch.cat([gap_probes(text, 25), specials(), wide_floats(120, seed=3)])[None]
    for rounding in ROUNDINGS:
        for overflow in OVERFLOWS:
            encoding = make_encoding(text, rounding, overflow)
            if encoding.format.element.nan_code is None:  # encode refuses NaN, and round_trip keeps it
                kept = kernels.round_trip_rows(
                    torch.full((1, 3), torch.nan, device=device), encoding, None, torch.empty(1, 3, device=device)
                )
                assert kept.isnan().all()
                x = x[~x.isnan()][None]
            assert_kernels_agree(x, encoding, device)


@every_device
@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("text", BLOCKS)
def test_blocks(text: str, rounding: str, device: str) -> None:
    cases = ((4, 75, torch.float32, "saturate"), (1, 1100, torch.bfloat16, "nonfinite"), (4, 64, torch.float16, "saturate"))
    for rows, cols, dtype, overflow in cases:
        x, encoding = mixed_rows(rows, cols, dtype), make_encoding(text, rounding, overflow)
        assert_kernels_agree(x, encoding, device, tensor_scale(x, encoding))


@every_device
def test_a_block_longer_than_a_tile(device: str) -> None:
    assert_kernels_agree(mixed_rows(1, 5000), make_encoding("int4/4096@bf16", "nearest_even", "saturate"), device)


@every_device
@pytest.mark.parametrize("text", ["int8/64@e8m0", "uint8/16@bf16+bf16", "e4m3fn/32@bf16", "int4/16@e4m3fn", "e2m1fn/32@e8m0"])
def test_given_scales_and_ocp(text: str, device: str) -> None:
    x = mixed_rows(4, 96)
    for overflow in OVERFLOWS:
        encoding = make_encoding(text, "nearest_even", overflow)
        given = reference.encode_rows(normal(4, 96, seed=8), encoding, tensor_scale(x, encoding), None)
        assert_kernels_agree(x, replace(encoding, rule="given"), device, replace(given, codes=None))
        if text.endswith("e8m0"):
            assert_kernels_agree(x, replace(encoding, rule="ocp"), device)


@every_device
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_short_blocks_away_from_zero(sign: float, device: str) -> None:
    """What lies beyond the end of a row is no value: it has no part in minimums, nor in what is past the end."""
    x = sign * torch.linspace(5, 6, 40)[None]
    for text in ("uint4/64@bf16+fp32", "uint8/16@e8m0+bf16", "int4/64@bf16"):
        for overflow in OVERFLOWS:
            assert_kernels_agree(x, make_encoding(text, "nearest_even", overflow), device)


@every_device
@pytest.mark.parametrize("text", ["e2m1fn/2@e8m0", "e2m1b5fn/2@e8m0", "e2m1b40fn/2@e8m0", "int8/2@e8m0"])
def test_ocp_at_the_ends_of_float32(text: str, device: str) -> None:
    x = torch.tensor([[0.0, -0.0, 3e38, 1.0, 1e-40, 3e-42, 1e-38, 1e-39, 2e-38, 1.0]])
    assert_kernels_agree(x, replace(make_encoding(text, "nearest_even", "saturate"), rule="ocp"), device)


@every_device
@pytest.mark.parametrize("scale", [0.0, 1e-45, 1e-39, -1.0, float("nan"), float("inf")])
def test_given_scales_without_an_inverse(scale: float, device: str) -> None:
    x = normal(4, 64)
    x[1] = 0.0
    for text in ("int8/64@fp32", "e4m3fn/64@fp32", "uint4/64@fp32+fp32", "nf4/64@fp32"):
        given = PackedParts(None, torch.full((4, 1), scale), torch.full((4, 1), -2.0) if "+" in text else None)
        for overflow in OVERFLOWS:
            encoding = replace(make_encoding(text, "nearest_even", overflow), rule="given")
            assert_kernels_agree(x, encoding, device, given)
            if scale == 0.0 and overflow == "nonfinite" and "+" not in text:
                assert reference.round_trip_rows(x, encoding, given, None)[[0, 2, 3]].isnan().any(1).all()


@every_device
@pytest.mark.parametrize("first_index", [2**32 - 500, 2**33 + 7])
def test_indices_past_32_bits(first_index: int, device: str) -> None:
    seed = replace(SEED, first_index=first_index)
    for text in ("e4m3fn", "int4/64@bf16"):
        assert_kernels_agree(normal(3, 512), make_encoding(text, "stochastic", "saturate", seed), device)


@every_device
def test_the_step_may_be_in_memory(device: str) -> None:
    x = normal(1, 700)
    for text in ("e4m3fn", "int8/64@bf16"):
        plain = make_encoding(text, "stochastic", "saturate", Seed(3, tensor=2, step=41))
        in_memory = replace(plain, seed=replace(plain.seed, step=torch.tensor([41], dtype=torch.int32, device=device)))
        assert_same_parts(*(kernels.encode_rows(x.to(device), e, None) for e in (in_memory, plain)))


@every_device
def test_one_spec_in_memory_serves_every_element(device: str) -> None:
    x, spec = torch.cat([normal(300), specials()])[None], torch.zeros(12, dtype=torch.int32, device=device)
    for text in ("e4m3fn", "int8", "e3m1b4fns", "bf16", "uint4"):
        encoding = make_encoding(text, "stochastic", "nonfinite")
        spec.copy_(kernels.device_spec(encoding.format.element, Overflow.NONFINITE, spec.device))
        out = kernels.round_trip_at_run_time(
            x.to(device), spec, Rounding.STOCHASTIC, encoding.seed, torch.empty_like(x, device=device)
        )
        assert_same_bits(out.cpu(), rounded_by_reference(x.nan_to_num(0.0), encoding, None)[2].where(~x.isnan(), x))


@every_device
def test_largest_finite(device: str) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        x = mixed_rows(8, 70, dtype)
        assert kernels.largest_finite(x.to(device)).item() == x[x.isfinite()].float().abs().max().item()
    assert kernels.largest_finite(torch.zeros(0, 4, device=device)).item() == 0.0


def test_what_the_kernels_cover() -> None:
    """Every element from float32's smallest normal value up in round_trip; packed, six widths with every kind of scale."""
    assert not kernels.covers(make_encoding("e8m3fnuz", "nearest_even", "saturate"), "round_trip")
    for text in ELEMENTS:
        assert kernels.covers(make_encoding(text, "stochastic", "saturate"), "round_trip"), text
    for element in ("uint1", "int2", "int4", "e2m1fn", "nf4", "e3m2fn", "int6", "int8", "e4m3fn", "int16", "bf16", "fp16"):
        for scale in ("fp32", "bf16", "e8m0", "e4m3fn"):
            assert kernels.covers(make_encoding(f"{element}/64@{scale}", "nearest_even", "saturate"), "encode"), (element, scale)
    assert not kernels.covers(make_encoding("int3/64@bf16", "nearest_even", "saturate"), "encode")
    assert Element.parse("nf4").kind is ElementKind.TABLE and Format.parse("nf4").block is None
