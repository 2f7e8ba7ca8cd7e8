"""Flat tensors are encoded by their own launch: the same bits as `encode`, in the interpreter or on a GPU."""

from __future__ import annotations

import pytest
import torch

from paredown.codec.packed import default_overflow, encode, encode_flat
from paredown.codec.reference import COVER
from paredown.formats.format import Format
from paredown.formats.rounding import Rounding, Seed

flat = pytest.importorskip("paredown.codec.kernels.flat")
FORMATS = ("int8/64@bf16", "e4m3fn/64@bf16", "int4/32@fp32", "uint4/64@bf16+bf16", "uint2/64@bf16+fp32", "e2m1fn/32@e8m0")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy warns in the interpreter; a GPU does not
SEED = Seed(7, tensor=3, step=11)


@pytest.mark.parametrize("rounding", [Rounding.NEAREST_EVEN, Rounding.STOCHASTIC])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("text", FORMATS)
def test_the_kernel_gives_the_bits_of_encode(text: str, dtype: torch.dtype, rounding: Rounding) -> None:
    x, format = torch.randn(2500, generator=torch.Generator().manual_seed(1)).to(dtype), Format.parse(text)
    expected = encode(x, format, rounding=rounding, seed=SEED).parts
    device = "cuda" if torch.cuda.is_available() else "cpu"
    actual = flat.encode_flat(x.to(device), (format, rounding, default_overflow(format), COVER), SEED)
    for mine, theirs in zip(actual.tensors(), expected.tensors(), strict=True):
        assert mine.dtype is theirs.dtype
        assert torch.equal(mine.cpu().view(torch.uint8), theirs.view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("text", FORMATS)
def test_the_kernel_decodes_as_decode_does(text: str, dtype: torch.dtype) -> None:
    packed = encode(torch.randn(2500, generator=torch.Generator().manual_seed(3)).to(dtype), text)
    there = packed.to("cuda") if torch.cuda.is_available() else packed
    out = torch.empty(2500, dtype=dtype, device=there.device)
    assert torch.equal(flat.decode_flat(there.parts, packed.format, out).cpu(), packed.decode())


@pytest.mark.parametrize("text", [*FORMATS, "bf16", "e4m3fn", "e2m1fn/16@e4m3fn"])
def test_encode_flat_is_encode(text: str) -> None:
    x = torch.randn(1000, generator=torch.Generator().manual_seed(2))
    mine = encode_flat(x, Format.parse(text), Rounding.STOCHASTIC, None, SEED)
    theirs = encode(x, text, rounding="stochastic", seed=SEED)
    assert mine.nbytes == theirs.nbytes
    assert torch.equal(mine.decode(), theirs.decode())
