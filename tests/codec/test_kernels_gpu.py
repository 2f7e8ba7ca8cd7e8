"""On a GPU: the public functions give the CPU's bits, allocate no more than their output, and can be captured in a CUDA graph."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from paredown import CATALOG, Rounding, Seed, encode, round_trip
from paredown.codec.reference import Encoding
from paredown.formats.element import Element
from paredown.formats.rounding import Overflow
from tests.support.compare import assert_same_bits, assert_same_parts
from tests.support.values import normal

pytest.importorskip("triton", reason="Triton is not installed")
from paredown.codec import kernels

pytestmark = pytest.mark.gpu
ALLOCATION = 512  # bytes that torch's allocator rounds up to
PACKED = [name for name, f in CATALOG.items() if kernels.covers(Encoding(f, Rounding.STOCHASTIC, Overflow.SATURATE), "encode")]


def extra_bytes(make: object, *, output: int) -> int:
    """The most that `make()` had allocated beyond its output."""
    assert callable(make)
    kept = make()  # compiled, and tables made
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    kept = make()
    torch.cuda.synchronize()
    del kept
    return torch.cuda.max_memory_allocated() - before - output


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", CATALOG)
def test_gpu_equals_cpu(name: str, dtype: torch.dtype) -> None:
    x = normal(33, 3000, seed=4).abs().to(dtype)
    for rounding in ("nearest_even", "stochastic"):
        here, there = (encode(t, CATALOG[name], rounding=rounding, seed=9, overflow="saturate") for t in (x, x.cuda()))
        assert_same_parts(there, here)
        assert there.nbytes == CATALOG[name].nbytes(x.shape)
        assert_same_bits(there.decode().cpu(), here.decode())
        assert_same_bits(round_trip(x.cuda(), CATALOG[name], rounding=rounding, seed=9, overflow="saturate").cpu(), here.decode())


@pytest.mark.parametrize("name", PACKED)
def test_no_more_than_the_output_is_allocated(name: str) -> None:
    x, format = torch.rand(4096, 4096, device="cuda"), CATALOG[name]
    small = 16 * ALLOCATION  # rounding of each part, and the few numbers of a tensor scale
    packed = encode(x, format, overflow="saturate")
    assert extra_bytes(lambda: encode(x, format, overflow="saturate", rounding="stochastic", seed=1), output=packed.nbytes) <= small
    assert extra_bytes(packed.decode, output=x.nbytes) <= small
    assert extra_bytes(lambda: round_trip(x, format, overflow="saturate"), output=x.nbytes) <= small


def test_channels_last_and_odd_lengths() -> None:
    x = normal(5, 6, 7, 9).to(memory_format=torch.channels_last)
    for text in ("int4/64@bf16", "e4m3fn", "e2m1fn/16@e4m3fn"):
        there = encode(x.cuda(), text)
        assert_same_parts(there, encode(x, text))
        assert there.decode().stride() == x.stride()


def test_one_graph_serves_every_format_and_step() -> None:
    x, out = normal(1, 10_000).cuda(), torch.empty(1, 10_000, device="cuda")
    step = torch.zeros(1, dtype=torch.int32, device="cuda")
    spec = kernels.device_spec(Element.parse("e4m3fn"), Overflow.SATURATE, x.device).clone()
    seed = Seed(5, step=step)
    kernels.round_trip_at_run_time(x, spec, Rounding.STOCHASTIC, seed, out)  # compiled before it is captured
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernels.round_trip_at_run_time(x, spec, Rounding.STOCHASTIC, seed, out)
    for number, text in enumerate(("e5m2", "int8", "e3m1b4fns", "e4m3fn"), start=7):
        step.fill_(number)
        spec.copy_(kernels.device_spec(Element.parse(text), Overflow.SATURATE, x.device))
        graph.replay()
        expected = round_trip(x.cpu(), text, rounding="stochastic", overflow="saturate", seed=replace(seed, step=number))
        assert_same_bits(out.cpu(), expected)
