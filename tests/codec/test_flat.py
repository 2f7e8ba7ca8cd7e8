"""Flat tensors are encoded by their own launch: the same bits as `encode`, in the interpreter or on a GPU."""

from __future__ import annotations

import pytest
import torch

from paredown.codec.packed import FlatEncoder, default_overflow, encode, encode_flat
from paredown.codec.recompute import pack_mask
from paredown.codec.reference import COVER, PackedParts
from paredown.formats.format import Format
from paredown.formats.rounding import Rounding, Seed

flat = pytest.importorskip("paredown.codec.kernels.flat")
masks = pytest.importorskip("paredown.codec.kernels.masks")
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


@pytest.mark.parametrize("text", [*FORMATS, "bf16", "e2m1fn/16@e4m3fn"])
def test_an_encoder_for_one_size_is_encode_in_every_step(text: str) -> None:
    x = torch.randn(1000, generator=torch.Generator().manual_seed(2))
    encoder = FlatEncoder(x, 1000, Format.parse(text), (Rounding.STOCHASTIC, None), Seed(7, tensor=3))
    for step in (1, 2):
        mine, theirs = encoder(x, step), encode(x, text, rounding="stochastic", seed=Seed(7, tensor=3, step=step))
        assert mine.nbytes == theirs.nbytes
        assert torch.equal(mine.decode(), theirs.decode())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("text", FORMATS)
def test_repeated_calls_of_the_kernels_give_the_bits_of_encode(text: str, dtype: torch.dtype) -> None:
    """On a GPU the second call and later ones pass addresses to the compiled kernel; the tensor need not be flat."""
    device, format = "cuda" if torch.cuda.is_available() else "cpu", Format.parse(text)
    how = (format, Rounding.STOCHASTIC, default_overflow(format), COVER)
    encoder = flat.FlatEncoder(2500, how, Seed(7, tensor=3), is_row=True)
    for step in (1, 2, 3):
        x = torch.randn(50, 50, generator=torch.Generator().manual_seed(step)).to(dtype)
        expected = encode(x.view(-1), format, rounding=Rounding.STOCHASTIC, seed=Seed(7, tensor=3, step=step))
        parts = encoder(x.to(device).t(), torch.tensor([step], dtype=torch.int32, device=device))
        for mine, theirs in zip(parts, expected.parts.tensors(), strict=True):
            assert mine.shape == theirs.shape and mine.dtype is theirs.dtype
            assert torch.equal(mine.cpu().view(torch.uint8), theirs.view(torch.uint8))
        out = torch.empty(2500, dtype=dtype, device=device)
        assert torch.equal(flat.decode_flat(PackedParts(*parts), format, out).cpu(), expected.decode())


def test_repeated_masks_are_those_of_other_bounds_and_values() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for number in range(3):
        x = torch.randn(2500, generator=torch.Generator().manual_seed(number))
        for low in (0.0, 0.5):
            bits = masks.pack_mask(x.to(device), low, float("nan"), torch.empty(313, dtype=torch.uint8, device=device))
            values = masks.unpack_mask(bits, torch.empty(2500, device=device), low + 1, -1.0)
            assert torch.equal(values.cpu(), torch.where(x > low, low + 1, -1.0))


@pytest.mark.parametrize("rounding", [Rounding.NEAREST_EVEN, Rounding.STOCHASTIC])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("numel", [2048, 2500])
def test_the_mask_of_the_values_beside_their_codes(numel: int, dtype: torch.dtype, rounding: Rounding) -> None:
    device, format = "cuda" if torch.cuda.is_available() else "cpu", Format.parse("int4/64@bf16")
    x = torch.randn(numel, generator=torch.Generator().manual_seed(1)).relu().to(dtype)
    x[5], x[7] = torch.nan, -0.0
    encoder = flat.FlatEncoder(numel, (format, rounding, default_overflow(format), COVER), Seed(7, 3))
    step = torch.tensor([4], dtype=torch.int32, device=device)
    for _ in range(2):
        expected = encoder(x.to(device), step)
        bits = torch.full((-(-numel // 8),), 255, dtype=torch.uint8, device=device)
        assert all(torch.equal(a, b) for a, b in zip(encoder(x.to(device), step, bits)[:1], expected[:1], strict=True))
        assert torch.equal(bits.cpu(), pack_mask(x, 0.0, float("nan")))
