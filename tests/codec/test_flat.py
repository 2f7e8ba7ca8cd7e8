"""Flat tensors are encoded by their own launch: the same bits as `encode`, in the interpreter or on a GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from paredown.codec.packed import default_overflow, encode, encode_flat, flat_codec
from paredown.codec.recompute import pack_mask
from paredown.codec.reference import COVER
from paredown.formats.format import Format
from paredown.formats.rounding import Rounding, Seed

pytest.importorskip("triton")
from tests.support.compare import assert_same_parts
from tests.support.emulated_gpu import emulate_gpu

flat = pytest.importorskip("paredown.codec.kernels.flat")
launch = pytest.importorskip("paredown.codec.kernels.launch")
masks = pytest.importorskip("paredown.codec.kernels.masks")
FORMATS = ("int8/64@bf16", "e4m3fn/64@bf16", "int4/32@fp32", "uint4/32@bf16+bf16", "uint2/64@bf16+fp32", "e2m1fn/32@e8m0")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy warns in the interpreter; a GPU does not
SEED = Seed(7, tensor=3, step=11)


@pytest.mark.parametrize("text", [*FORMATS, "bf16", "e4m3fn", "e2m1fn/16@e4m3fn"])
def test_encode_flat_is_encode(text: str) -> None:
    x = torch.randn(1000, generator=torch.Generator().manual_seed(2))
    mine = encode_flat(x, Format.parse(text), Rounding.STOCHASTIC, None, SEED)
    theirs = encode(x, text, rounding="stochastic", seed=SEED)
    assert mine.nbytes == theirs.nbytes
    assert torch.equal(mine.decode(), theirs.decode())


@pytest.mark.parametrize("text", [*FORMATS, "bf16", "e2m1fn/16@e4m3fn"])
def test_a_codec_for_one_size_is_encode_in_every_step(text: str) -> None:
    x = torch.randn(1000, generator=torch.Generator().manual_seed(2))
    codec = flat_codec(x, 1000, Format.parse(text), (Rounding.STOCHASTIC, None), Seed(7, tensor=3))
    for step in (1, 2):
        stored, theirs = codec.encode(x, step), encode(x, text, rounding="stochastic", seed=Seed(7, tensor=3, step=step))
        assert codec.nbytes == codec.packed(stored).nbytes == theirs.nbytes
        assert torch.equal(codec.decode(stored, (20, 50), (50, 1)), theirs.decode().view(20, 50))


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE == "cpu":
        emulate_gpu(monkeypatch)


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("text", FORMATS)
def test_repeated_calls_of_the_kernels_give_the_bits_of_encode(text: str, dtype: torch.dtype) -> None:
    """The second call and later ones pass addresses to the compiled kernel; the tensor need not be flat."""
    format = Format.parse(text)
    how = (Rounding.STOCHASTIC, default_overflow(format))
    codec, encoder = flat.BufferCodec(2500, dtype, format, how, SEED), flat.FlatEncoder(2500, (format, *how, COVER), SEED)
    for number in (1, 2, 3):
        x = torch.randn(50, 50, generator=torch.Generator().manual_seed(number)).to(dtype)
        expected = encode(x.view(-1), format, rounding=how[0], seed=Seed(7, tensor=3, step=number)).to("cpu")
        step = torch.tensor([number], dtype=torch.int32, device=DEVICE)
        stored = codec.encode(x.to(DEVICE).t(), step)
        assert stored.dtype is torch.uint8 and 0 <= stored.numel() - codec.nbytes < 32
        packed = codec.packed(stored)
        for mine, theirs in zip(packed.parts.tensors(), expected.parts.tensors(), strict=True):
            assert mine.shape == theirs.shape and mine.dtype is theirs.dtype
            assert mine.untyped_storage().data_ptr() == stored.untyped_storage().data_ptr()  # views: one allocation
            assert torch.equal(mine.cpu().view(torch.uint8), theirs.view(torch.uint8))
        for mine, theirs in zip(encoder(x.to(DEVICE), step), expected.parts.tensors(), strict=True):
            assert torch.equal(mine.cpu().view(torch.uint8), theirs.view(torch.uint8).view(-1))
        assert torch.equal(packed.decode().cpu(), expected.decode())
        decoded = codec.decode(stored, torch.Size((50, 50)), (1, 50))
        assert decoded.stride() == (1, 50) and torch.equal(decoded.cpu().t(), expected.decode().view(50, 50))


@pytest.mark.usefixtures("gpu")
def test_an_address_that_is_no_multiple_of_16_is_launched_by_triton() -> None:
    format = Format.parse("int8/64@bf16")
    codec = flat.BufferCodec(2048, torch.float32, format, (Rounding.NEAREST_EVEN, default_overflow(format)), SEED)
    step, x = torch.tensor([1], dtype=torch.int32, device=DEVICE), torch.randn(2049)
    for start in (0, 0, 1):
        part = x[start : start + 2048]
        assert torch.equal(codec.decode(codec.encode(part.to(DEVICE), step), (2048,), (1,)).cpu(), encode(part, format).decode())


def test_repeated_masks_are_those_of_other_bounds_and_values() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for number in range(3):
        x = torch.randn(2500, generator=torch.Generator().manual_seed(number))
        for low in (0.0, 0.5):
            bits = masks.pack_mask(x.to(device), low, float("nan"), torch.empty(313, dtype=torch.uint8, device=device))
            values = masks.unpack_mask(bits, torch.empty(2500, device=device), low + 1, -1.0)
            assert torch.equal(values.cpu(), torch.where(x > low, low + 1, -1.0))


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("rounding", [Rounding.NEAREST_EVEN, Rounding.STOCHASTIC])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("numel", [2048, 2500])
def test_the_mask_of_the_values_beside_their_codes(numel: int, dtype: torch.dtype, rounding: Rounding) -> None:
    format = Format.parse("int4/64@bf16")
    x = torch.randn(numel, generator=torch.Generator().manual_seed(1)).relu().to(dtype)
    x[5], x[7] = torch.nan, -0.0
    codec = flat.BufferCodec(numel, dtype, format, (rounding, default_overflow(format)), Seed(7, 3))
    step = torch.tensor([4], dtype=torch.int32, device=DEVICE)
    for _ in range(3):
        expected = codec.encode(x.to(DEVICE), step)
        bits = torch.full((-(-numel // 8),), 255, dtype=torch.uint8, device=DEVICE)
        found = codec.encode(x.to(DEVICE), step, bits)
        assert_same_parts(codec.packed(found), codec.packed(expected))
        assert torch.equal(bits.cpu(), pack_mask(x, 0.0, float("nan")).cpu())


@pytest.mark.usefixtures("gpu")
def test_decoded_values_have_their_layout_at_once() -> None:
    x, format = torch.randn(2, 16, 8, 8).to(memory_format=torch.channels_last), Format.parse("int8/64@bf16")
    codec = flat_codec(x.to(DEVICE), x.numel(), format, (Rounding.NEAREST_EVEN, None), SEED)
    stored = codec.encode(x.to(DEVICE), torch.tensor([1], dtype=torch.int32, device=DEVICE))
    for _ in range(2):
        found = codec.decode(stored, x.size(), x.stride())
        assert found.stride() == x.stride()
        assert torch.equal(found.cpu(), encode(x, format).decode().cpu())


class Launcher:
    """The launcher of a kernel in Triton 3.6, 3.9 or a later one: `launch` notes what it is called with."""

    profile_scratch_size = 0

    def __init__(self, version: str, scratch: str | None = None) -> None:
        self.version, self.scratch, self.calls = version, scratch, list[tuple[Any, ...]]()
        self.global_scratch_size = len(scratch or "")
        self.launch: Any = lambda *args: self.calls.append(args)

    def __call__(self, x: int, y: int, z: int, stream: int, function: int, metadata: Any, *args: Any) -> None:
        if self.version == "3.6":
            self.launch(x, y, z, stream, function, False, True, self.scratch, None, metadata, *args)
        elif self.version == "3.9":
            self.launch(x, y, z, stream, function, False, True, metadata, *args[:3], self.scratch, None, b"", b"", args[3:])
        elif self.version == "more":
            self.launch(x, y, z, stream, function, False, True, metadata, *args[:3], self.scratch, None, (*args[3:], 17))
        else:
            raise TypeError("it takes other arguments")


VERSIONS = [("3.6", None, True), ("3.6", "scratch", False), ("3.9", None, True), ("3.9", "scratch", False), ("more", None, False)]


@pytest.mark.parametrize(("version", "scratch", "is_direct"), VERSIONS)
def test_a_compiled_kernel_is_launched_with_the_arguments_of_triton(version: str, scratch: str | None, is_direct: bool) -> None:
    run = Launcher(version, scratch)
    kernel = SimpleNamespace(run=run, function=7, packed_metadata=(4, 1))
    function, before = launch.compiled_launch(kernel)
    assert not run.calls, "nothing is launched to find it out"
    function(20, 1, 1, 99, *before, 16, 32, 5)
    run(20, 1, 1, 99, 7, (4, 1), None, None, None, 16, 32, 5)
    assert len(run.calls) == 2 and run.calls[0] == run.calls[1]
    assert (function is not run) is is_direct


def test_a_launcher_that_takes_other_arguments_is_left_to_triton() -> None:
    kernel = SimpleNamespace(run=Launcher("other"), function=7, packed_metadata=(4, 1))
    assert launch.compiled_launch(kernel)[0] is kernel.run
