"""Each call of a `decoder` writes what `decode` returns: in plain torch, and in kernels with cached pointers."""

from __future__ import annotations

import pytest
import torch

from paredown.codec import backend
from paredown.codec.packed import decoder, encode
from paredown.codec.reference import Encoding
from paredown.errors import CodecError
from paredown.formats.rounding import Overflow, Rounding
from tests.codec.test_masks import DEVICES

FORMATS = ("int8/64@e8m0", "int4/64@bf16", "uint4/32@fp32+bf16", "e4m3fn/16@e4m3fn", "nf4/64@fp32", "bf16", "e2m1fn")


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("shape", [(6, 4, 40), (3, 130), (77,)])
def test_decoder_is_decode(format: str, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    packed = encode(x, format, order="logical", overflow="saturate")
    decode = decoder(packed)
    for dtype in (torch.float32, torch.bfloat16):
        out = torch.empty(shape, dtype=dtype)
        decode(out)
        assert torch.equal(out, packed.decode(dtype))
    packed.codes.copy_(encode(-x, format, order="logical", overflow="saturate").codes)
    out = torch.empty(shape)
    decode(out)
    assert torch.equal(out, packed.decode())


def test_another_order_is_refused() -> None:
    x = torch.randn(8, 64, 4, 4).to(memory_format=torch.channels_last)
    with pytest.raises(CodecError, match="order of its dimensions"):
        decoder(encode(x, "int8/64@bf16"))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("format", FORMATS)
def test_kernels_decode_repeatedly(device: str, format: str) -> None:
    kernels = backend.find_kernels()
    assert kernels is not None
    shape = (6, 192) if device == "cpu" else (600, 1920)
    packed = encode(
        torch.randn(shape, generator=torch.Generator().manual_seed(1)), format, order="logical", overflow="saturate"
    ).to(device)
    decode = kernels.decoder(packed.parts, Encoding(packed.format, Rounding.NEAREST_EVEN, Overflow.SATURATE), *shape)
    for dtype in (torch.float32, torch.bfloat16, torch.float32, torch.float32):
        expected = packed.to("cpu").decode(dtype)
        assert torch.equal(decode(torch.empty(shape, dtype=dtype, device=device)).cpu(), expected)
        packed.codes.copy_(packed.codes.flip(0))
    memory = torch.empty(shape[0] * shape[1] + 1, device=device)
    assert torch.equal(decode(memory[1:].view(shape)).cpu(), packed.to("cpu").decode())  # not a multiple of 16 bytes


def test_memory_of_a_decoded_tensor_has_its_sizes_and_strides(monkeypatch: pytest.MonkeyPatch) -> None:
    launch = pytest.importorskip("paredown.codec.kernels.launch")
    monkeypatch.setattr(launch, "_empty_on_gpu", torch._C._dynamo.guards._empty_strided_cpu)  # the same checks as for a GPU
    monkeypatch.setattr(launch, "current_device", lambda: -1)
    like = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    out = launch.empty_strided(like.size(), like.stride(), torch.bfloat16, like)
    assert (out.size(), out.stride(), out.dtype) == (like.size(), like.stride(), torch.bfloat16)
