"""What Inductor compiles `paredown::decode` and `paredown::unpack_bits` to, beside the functions of the codec that they stand for."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from paredown.codec.graph_codec import decode_in_graph, encode_in_graph, pack_mask_in_graph
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


def parts_of(x: Tensor, format: Format, in_order: bool) -> tuple[Tensor, ...]:
    """Codes, scales and minimums, in the layout of the reference or in that of compiled graphs."""
    if in_order:
        packed = encode_flat(x, format, Rounding.NEAREST_EVEN, Overflow.SATURATE, Seed(0))
        return tuple(part.view(-1) for part in packed.parts.tensors())
    return encode_in_graph(x, format, Rounding.NEAREST_EVEN, Overflow.SATURATE, None)


def test_compiled_decode_equals_the_codec() -> None:
    """One compiled graph decodes all formats, layouts and dtypes; affine values may differ in the last bit.

    Inductor may round a + b * c once.
    """
    x = torch.randn(NUMEL, generator=torch.Generator().manual_seed(0))
    orders = ((False, torch.float32), (True, torch.bfloat16))
    cases = [(f, order, dtype) for f in FORMATS for order, dtype in orders]
    inputs = [parts_of(x, Format.parse(text), order) for text, order, _ in cases]

    @torch.compile(fullgraph=True)
    def decode(inputs: list[tuple[Tensor, ...]]) -> list[Tensor]:
        found: list[Tensor] = []
        for (text, order, dtype), parts in zip(cases, inputs, strict=True):
            found.append(torch.ops.paredown.decode(list(parts), text, order, dtype, SIZES, DIMS))
        return found

    for (text, order, dtype), parts, result in zip(cases, inputs, decode(inputs), strict=True):
        format = Format.parse(text)
        assert lowers(format, NUMEL, dtype)
        expected = decode_in_graph(parts, format, NUMEL, dtype, in_order=order).view(SIZES).permute(DIMS)
        assert result.dtype is dtype and result.stride() == expected.stride()
        tolerance = 2.0 * torch.finfo(dtype).eps * 4 if format.minimum else 0.0
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
