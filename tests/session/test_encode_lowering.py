"""What Inductor compiles `paredown::encode` to, beside the codec."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch._inductor.utils import run_and_get_code

from paredown.codec.packed import encode
from paredown.formats.rounding import Seed
from paredown.session.compiled import lowerings as lowerings  # registers the lowering
from tests.support.compare import assert_same_bits
from tests.support.inductor import vector_instructions

CASES = (("int8/64@bf16", "nearest_even"), ("uint4/32@bf16+bf16", "nearest_even"), ("int4/7@bf16", "stochastic"))
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(autouse=True)
def _with_vector_instructions() -> Iterator[None]:
    torch.compiler.reset()
    with vector_instructions():
        yield
    torch.compiler.reset()


def expected(x: Tensor, text: str, rounding: str) -> list[Tensor]:
    packed = encode(x, text, rounding=rounding, overflow="saturate", seed=Seed(5, tensor=6, step=7))
    return [part.reshape(-1) for part in (packed.codes, packed.scales, packed.minimums) if part is not None]


@pytest.mark.parametrize("device", DEVICES)
def test_compiled_encode_has_the_bits_of_the_codec_and_calls_no_operator(device: str) -> None:
    """Of a value that the graph computes, of one in another order of dimensions, and of an input; sizes that end in part of a block."""
    source = torch.Generator().manual_seed(0)
    inputs = [torch.randn(count, 15, generator=source).to(device) for count in (64, 67)]
    step = torch.tensor([7], dtype=torch.int32, device=device)

    @torch.compile(fullgraph=True)
    def run(inputs: list[Tensor], step: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        parts: list[Tensor] = []
        values: list[Tensor] = []
        for text, rounding in CASES:
            for x in inputs:
                y = x * 2
                for value, order in ((y.t().sum(1, keepdim=True).mul(y.t()), [0, 1]), (y, [1, 0]), (x, [0, 1])):
                    parts += torch.ops.paredown.encode(value, step, order, text, rounding, "saturate", 5, 6)
                    values.append(value.permute(order).reshape(-1))
        return parts, values

    (parts, values), code = run_and_get_code(run, inputs, step)
    cases = [case for case in CASES for _ in range(6)]
    wanted = [part for (text, rounding), value in zip(cases, values, strict=True) for part in expected(value, text, rounding)]
    for part, other in zip(parts, wanted, strict=True):
        assert_same_bits(part, other)
    assert "ops.paredown.encode" not in "".join(code) and "".join(code).count("= encoder(") == 6


@pytest.mark.parametrize("device", DEVICES)
def test_dynamic_sizes_go_through_the_operator(device: str) -> None:
    @torch.compile(fullgraph=True, dynamic=True)
    def run(x: Tensor, step: Tensor) -> list[Tensor]:
        return torch.ops.paredown.encode(x * 2, step, [0], "int8/64@bf16", "nearest_even", "saturate", 5, 6)

    for count in (640, 1003):
        x, step = torch.randn(count, device=device), torch.tensor([7], dtype=torch.int32, device=device)
        for part, other in zip(run(x, step), expected(x * 2, "int8/64@bf16", "nearest_even"), strict=True):
            assert_same_bits(part, other)
