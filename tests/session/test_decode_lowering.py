"""What Inductor compiles `paredown::decode` and `paredown::unpack_bits` to, beside the functions of the codec that they stand for."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from paredown.codec.graph_codec import pack_mask_in_graph
from paredown.codec.packed import encode_flat
from paredown.formats.format import Format
from paredown.formats.rounding import Overflow, Rounding, Seed
from paredown.session.compiled.lowerings import lowers
from tests.support.inductor import vector_instructions

FORMATS = [f"{name}/{block}@{scale}" for name, block, scale in (
    ("int8", 64, "bf16"), ("int4", 64, "bf16"), ("int2", 32, "fp32"), ("uint8", 64, "bf16+bf16"), ("uint4", 64, "bf16+bf16"),
    ("uint2", 64, "fp32+fp32"), ("int4", 8, "fp32"),
)]  # fmt: skip
SIZES, DIMS = [4, 15, 32], [0, 2, 1]
NUMEL = 1920


@pytest.fixture(autouse=True)
def _with_vector_instructions() -> Iterator[None]:
    torch.compiler.reset()
    with vector_instructions():
        yield
    torch.compiler.reset()


def test_compiled_decode_equals_the_codec() -> None:
    """One compiled graph decodes all formats and dtypes; affine values may differ in the last bit.

    Inductor may round a + b * c once.
    """
    x = torch.randn(NUMEL, generator=torch.Generator().manual_seed(0))
    cases = [(text, dtype) for text in FORMATS for dtype in (torch.float32, torch.bfloat16)]
    packed = [encode_flat(x, Format.parse(text), Rounding.NEAREST_EVEN, Overflow.SATURATE, Seed(0)) for text, _ in cases]
    inputs = [[part.view(-1) for part in p.parts.tensors()] for p in packed]

    @torch.compile(fullgraph=True)
    def decode(inputs: list[list[Tensor]]) -> list[Tensor]:
        pairs = zip(cases, inputs, strict=True)
        return [torch.ops.paredown.decode(parts, text, dtype, SIZES, DIMS) for (text, dtype), parts in pairs]

    for (_, dtype), stored, result in zip(cases, packed, decode(inputs), strict=True):
        assert lowers(stored.format, NUMEL, dtype)
        expected = stored.decode(dtype).view(SIZES).permute(DIMS)
        assert result.dtype is dtype and result.stride() == expected.stride()
        tolerance = 2.0 * torch.finfo(dtype).eps * 4 if stored.format.minimum else 0.0
        torch.testing.assert_close(result, expected, rtol=0, atol=tolerance)


def test_compiled_bits_equal_the_mask() -> None:
    """Sizes that are no multiple of eight have a last byte of fewer flags."""
    for numel in (64, 77):
        mask = torch.rand(numel, generator=torch.Generator().manual_seed(1)) < 0.5
        unpack = torch.compile(lambda bits, numel=numel: torch.ops.paredown.unpack_bits(bits, [numel], [0]).clone(), fullgraph=True)
        assert torch.equal(unpack(pack_mask_in_graph(mask)), mask)


def test_formats_that_are_traced_instead() -> None:
    """Floating point codes, short last blocks, 16-bit floats of small range and dynamic sizes."""
    int4 = Format.parse("int4/64@bf16")
    assert not lowers(Format.parse("e4m3fn/64@bf16"), NUMEL, torch.float32)
    assert not lowers(Format.parse("int8/32@e8m0"), NUMEL, torch.float32)
    assert not lowers(int4, NUMEL + 1, torch.float32)
    assert not lowers(int4, NUMEL, torch.float16)
