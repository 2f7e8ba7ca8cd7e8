"""`paredown::encode` gives the bits of `encode`, and `decode_in_graph(in_order=True)` decodes them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from paredown.codec import graph_ops as graph_ops  # defines torch.ops.paredown
from paredown.codec.graph_codec import decode_in_graph
from paredown.codec.packed import encode
from paredown.formats.format import Format
from paredown.formats.rounding import Rounding, Seed
from tests.support.compare import assert_same_bits
from tests.support.values import normal

FORMATS = (
    "int4/64@bf16",
    "int4/7@bf16",
    "uint4/64@bf16+bf16",
    "int2/16@bf16",
    "uint2/32@bf16+bf16",
    "int8/64@bf16",
    "uint8/5@e8m0+bf16",
)


def parts_of(x: Tensor, text: str, rounding: str, step: int = 7) -> list[Tensor]:
    return torch.ops.paredown.encode(x, torch.tensor([step], dtype=torch.int32), text, rounding, "saturate", 5, 6)


@pytest.mark.parametrize("rounding", ["nearest_even", "stochastic"])
@pytest.mark.parametrize("text", FORMATS)
@pytest.mark.parametrize("count", [640, 1003])
def test_encode_and_decode(text: str, rounding: str, count: int) -> None:
    x = normal(count)
    packed = encode(x, text, rounding=rounding, overflow="saturate", seed=Seed(5, tensor=6, step=7))
    expected = [part for part in (packed.codes, packed.scales, packed.minimums) if part is not None]
    parts = parts_of(x, text, rounding)
    assert len(parts) == len(expected)
    for part, other in zip(parts, expected, strict=True):
        assert part.dim() == 1
        assert_same_bits(part, other.reshape(-1))
    decoded = decode_in_graph(parts, Format.parse(text), count, torch.float32, in_order=True)
    assert_same_bits(decoded, packed.decode())


def test_the_step_decides_random_bits() -> None:
    first, again, other = (parts_of(normal(640), "int4/64@bf16", Rounding.STOCHASTIC.value, step)[0] for step in (7, 7, 8))
    assert torch.equal(first, again) and not torch.equal(first, other)


@pytest.mark.parametrize("text", FORMATS)
def test_fake_parts_have_the_sizes_of_real_ones(text: str) -> None:
    real = parts_of(normal(1003), text, "nearest_even")
    with FakeTensorMode():
        fake = parts_of(torch.empty(1003), text, "nearest_even")
    assert [(part.shape, part.dtype) for part in fake] == [(part.shape, part.dtype) for part in real]
