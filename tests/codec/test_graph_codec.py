"""The codec of compiled graphs gives the reference's bits: in eager mode, traced with fake tensors, and compiled by Inductor on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from paredown.codec.graph_codec import covers, decode_in_graph, largest_in_graph, pack_mask_in_graph, unpack_mask_in_graph
from paredown.codec.packed import encode
from paredown.formats.format import Format
from paredown.formats.rounding import Overflow, Rounding, Seed
from tests.support.compare import assert_same_bits
from tests.support.inductor import vector_instructions
from tests.support.values import gap_probes, listed, normal, specials, wide_floats

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")  # torch's own

PLAIN = listed("int8/64@bf16 int8/5@fp32 int8/32@e8m0 int4/64@bf16 int4/7@bf16 int4/32@e8m0 int2/16@bf16 int2/6@fp32")
AFFINE = (
    *("uint8/64@bf16+bf16", "uint8/5@e8m0+bf16", "uint4/32@bf16+bf16", "uint4/9@fp32+fp32", "uint2/32@bf16+bf16"),
    "uint1/64@bf16+fp32",
)
FLOATS = ("e4m3fn/64@bf16", "e4m3fn/7@e8m0", "e5m2/32@e8m0", "e5m2/64@fp32", "e4m3fn", "e5m2", "bf16", "fp16")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def mixed(count: int, element: str = "e4m3fn") -> Tensor:
    """Zeros of both signs, ordinary values, values of every size, the gaps of an element, and at the end what is special."""
    x = normal(count)
    x[:70] = 0
    x[5] = -0.0
    odd = torch.cat([wide_floats(120, seed=1), gap_probes(element, 60), specials()])[-(count * 2 // 3) :]
    x[-len(odd) :] = odd
    return x


def parts_of(x: Tensor, text: str, rounding: str = "nearest_even", overflow: str = "saturate", step: int = 7) -> list[Tensor]:
    return torch.ops.paredown.encode(x, torch.tensor([step], dtype=torch.int32), [0], text, rounding, overflow, 5, 6)


@pytest.mark.parametrize("rounding", [r.value for r in Rounding])
@pytest.mark.parametrize("text", [*PLAIN, *AFFINE, *FLOATS])
def test_equals_reference(text: str, rounding: str) -> None:
    format = Format.parse(text)
    for count in (0, 1, 64, 1000, 1024):
        x = mixed(count, format.element.name) if count > 64 else normal(count)
        for overflow in Overflow if format.block is None or count == 1000 else (Overflow.SATURATE,):
            packed = encode(x, text, rounding=rounding, overflow=overflow, seed=Seed(5, tensor=6, step=7))
            parts = parts_of(x, text, rounding, overflow.value)
            for part, other in zip(parts, packed.parts.tensors(), strict=True):
                assert_same_bits(part, other.reshape(-1))
            for dtype in DTYPES:
                assert_same_bits(decode_in_graph(parts, format, count, dtype), packed.decode(dtype))


def test_the_step_decides_random_bits() -> None:
    first, again, other = (parts_of(normal(640), "int4/64@bf16", "stochastic", step=step)[0] for step in (7, 7, 8))
    assert torch.equal(first, again) and not torch.equal(first, other)


@pytest.mark.parametrize("text", ["int4/7@bf16", "uint8/5@e8m0+bf16", "bf16", "e5m2"])
def test_fake_parts_have_the_sizes_of_real_ones(text: str) -> None:
    real = parts_of(normal(1003), text)
    with FakeTensorMode():
        fake = parts_of(torch.empty(1003), text)
    assert [(part.shape, part.dtype) for part in fake] == [(part.shape, part.dtype) for part in real]


@pytest.mark.parametrize("text", ["int8/64@bf16", "uint4/64@bf16+bf16", "int4/32@e8m0", "e4m3fn"])
def test_largest_is_at_most_one_step_of_a_scale_above_the_values(text: str) -> None:
    x = normal(1000) * 3
    largest = float(largest_in_graph(x, parts_of(x, text), Format.parse(text)))
    assert float(x.abs().max()) <= largest * (1 + 2.0**-8) and largest <= 2 * float(x.abs().max())
    x[7] = float("nan")
    assert largest_in_graph(x, parts_of(x, text), Format.parse(text)).isnan()


@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 64, 192, 1001])
def test_masks(count: int) -> None:
    mask = normal(count, seed=4) > 0
    bits = pack_mask_in_graph(mask)
    assert torch.equal(bits, torch.from_numpy(np.packbits(mask.numpy(), bitorder="little")))
    assert torch.equal(unpack_mask_in_graph(bits, count), mask)


def test_covers() -> None:
    assert all(covers(Format.parse(text)) for text in (*PLAIN, *AFFINE, *FLOATS))
    others = "int3/64@bf16 int8 uint8/64@bf16 e2m1fn/32@e8m0 e2m1fn/16@e4m3fn nf4/64@bf16 fp32 bf16/64@fp32 int16/8@fp32"
    assert not any(covers(Format.parse(text)) for text in listed(others))


# --- graphs -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def fresh() -> Iterator[None]:
    torch.compiler.reset()
    with vector_instructions():
        yield
    torch.compiler.reset()


def step_of(text: str, rounding: str) -> Callable[[Tensor, Tensor], list[Tensor]]:
    """Encode after an operation, decode before one, and a mask. Both operations are exact: Inductor skips the rounding to bf16 between
    operations that it fuses.
    """
    format = Format.parse(text)

    def step(x: Tensor, number: Tensor) -> list[Tensor]:
        parts = torch.ops.paredown.encode(x * 2, number, [0], text, rounding, "saturate", 5, 6)
        bits = pack_mask_in_graph(x > 0)
        decoded = -decode_in_graph(parts, format, x.shape[0], x.dtype)
        return [*parts, bits, decoded, unpack_mask_in_graph(bits, x.shape[0])]

    return step


STEP = torch.tensor([7], dtype=torch.int32)


def assert_same(found: list[Tensor], expected: list[Tensor]) -> None:
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        assert_same_bits(a.to(torch.uint8) if a.dtype is torch.bool else a, b.to(torch.uint8) if b.dtype is torch.bool else b)


@pytest.mark.parametrize("symbolic", [False, True])
@pytest.mark.parametrize(
    "text", ["int8/64@bf16", "int4/64@bf16", "uint4/7@fp32+bf16", "int2/16@e8m0", "e4m3fn/32@e8m0", "e5m2", "bf16"]
)
def test_traces_with_fake_tensors(text: str, symbolic: bool) -> None:
    step = step_of(text, "stochastic")
    graph = make_fx(step, tracing_mode="symbolic" if symbolic else "fake", decomposition_table=select_decomp_table())(
        normal(1000), STEP
    )
    assert not [n for n in graph.graph.nodes if n.op == "get_attr"]  # no constants to carry along
    for count in (1000, 1024, 1001) if symbolic else (1000,):
        x = mixed(count)
        assert_same(graph(x, STEP), step(x, STEP))
    made = [n.meta["val"] for n in graph.graph.nodes if isinstance(n.meta.get("val"), Tensor)]
    assert not [t for t in made if t.dtype in (torch.int64, torch.float64)]


@pytest.mark.parametrize(
    ("text", "rounding", "dtype"),
    [
        pytest.param("int4/64@bf16", "stochastic", torch.bfloat16, marks=pytest.mark.full),
        ("e4m3fn/32@e8m0", "nearest_even", torch.float32),
        ("bf16", "nearest_even", torch.float32),
    ],
)
@pytest.mark.usefixtures("fresh")
def test_compiled_on_the_cpu(text: str, rounding: str, dtype: torch.dtype) -> None:
    """1000 values end in a short block, whose values a loop over whole blocks would miss."""
    step, x = step_of(text, rounding), mixed(1000).to(dtype)
    function: Any = torch.compile(step, fullgraph=True, dynamic=False)
    assert_same(function(x, STEP), step(x, STEP))


@pytest.mark.usefixtures("fresh")
def test_compiled_for_any_size() -> None:
    step = step_of("int8/64@bf16", "nearest_even")
    function: Any = torch.compile(step, fullgraph=True, dynamic=True)
    function(mixed(1000), STEP)
    with torch.compiler.set_stance("fail_on_recompile"):
        for count in (1024, 1001, 777):
            assert_same(function(mixed(count), STEP), step(mixed(count), STEP))
