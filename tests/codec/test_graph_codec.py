"""The codec of compiled graphs gives the reference's bits: in eager mode, traced with fake tensors, and compiled by Inductor on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx

from paredown.codec import reference
from paredown.codec.graph_codec import (
    covers,
    decode_in_graph,
    encode_in_graph,
    keys_in_graph,
    pack_mask_in_graph,
    random_bits,
    unpack_mask_in_graph,
)
from paredown.codec.packed import PackedTensor, encode
from paredown.errors import CodecError
from paredown.formats.format import Format
from paredown.formats.rounding import Overflow, Rounding, Seed
from tests.oracles.blocks import Shared, affine_parts, block_values, covering_scale
from tests.support.compare import assert_same_bits
from tests.support.inductor import vector_instructions
from tests.support.values import gap_probes, normal, specials, wide_floats

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")  # torch's own

PLAIN = (
    "int8/64@bf16",
    "int8/5@fp32",
    "int8/32@e8m0",
    "int4/64@bf16",
    "int4/7@bf16",
    "int4/32@e8m0",
    "int2/16@bf16",
    "int2/6@fp32",
)
AFFINE = (
    *("uint8/64@bf16+bf16", "uint8/5@e8m0+bf16", "uint4/64@bf16+bf16", "uint4/9@fp32+fp32", "uint2/32@bf16+bf16"),
    "uint1/64@bf16+fp32",
)
FLOATS = ("e4m3fn/64@bf16", "e4m3fn/7@e8m0", "e5m2/32@e8m0", "e5m2/64@fp32", "e4m3fn", "e5m2", "bf16", "fp16")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SEED = Seed(5, tensor=6, step=7)


def keys() -> Tensor:
    """The words of SEED."""
    return keys_in_graph(torch.tensor(7), 5, 6)


def mixed(count: int, element: str = "e4m3fn") -> Tensor:
    """Zeros of both signs, ordinary values, values of every size, the gaps of an element, and at the end what is special."""
    x = normal(count)
    x[:70] = 0
    x[5] = -0.0
    odd = torch.cat([wide_floats(120, seed=1), gap_probes(element, 60), specials()])[-(count * 2 // 3) :]
    x[-len(odd) :] = odd
    return x


def values_of_codes(codes: Tensor, format: Format, numel: int) -> Tensor:
    """The integer codes in order, out of the layout that the module states: byte j of a block holds the values j, j + n/2."""
    width = format.element.width
    if width >= 8:
        return codes
    per_byte = 8 // width
    lanes = per_byte if format.block and format.block % per_byte == 0 else 0
    bytes_ = codes.numpy().reshape(-1, format.block // lanes if format.block and lanes else 1)
    fields = np.stack([(bytes_ >> (width * i)) & ((1 << width) - 1) for i in range(per_byte)], 1)
    return torch.from_numpy(fields.reshape(-1)[:numel])


def assert_equals_reference(x: Tensor, format: Format, rounding: Rounding, overflow: Overflow) -> None:
    parts = encode_in_graph(x, format, rounding, overflow, keys())
    expected = encode(x, format, rounding=rounding, overflow=overflow, seed=SEED)
    assert len(parts) == len(expected.parts.tensors())
    assert_same_bits(values_of_codes(parts[0], format, len(x)), reference_codes(expected, parts[0].dtype))
    for found, stored in zip(parts[1:], expected.parts.tensors()[1:], strict=True):
        assert_same_bits(found, stored[0])
    for dtype in DTYPES:
        assert_same_bits(decode_in_graph(parts, format, len(x), dtype), expected.decode(dtype))


def reference_codes(packed: PackedTensor, dtype: torch.dtype) -> Tensor:
    width = packed.format.element.width
    if width == 16:
        return packed.codes[0].view(dtype)
    return reference.unpack_bits(packed.codes, width, packed.shape[0])[0].to(torch.uint8)


@pytest.mark.parametrize("rounding", list(Rounding))
@pytest.mark.parametrize("text", [*PLAIN, *AFFINE, *FLOATS])
def test_equals_reference(text: str, rounding: Rounding) -> None:
    format = Format.parse(text)
    for count in (0, 1, 64, 1000, 1024):
        for dtype in DTYPES:
            x = mixed(count, format.element.name) if count > 64 else normal(count)
            for overflow in Overflow if format.block is None or count == 1000 else (Overflow.SATURATE,):
                assert_equals_reference(x.to(dtype), format, rounding, overflow)


@pytest.mark.parametrize("text", ["int8/64@bf16", "uint4/64@bf16+bf16", "int4/64@e8m0", "e4m3fn/64@bf16"])
def test_blocks_that_are_broken_constant_or_at_the_ends_of_float32(text: str) -> None:
    largest = torch.finfo(torch.float32).max
    ends = [0.0, -0.0, 1.0, -3.5, largest, -largest, 2.0**-149, -(2.0**-126), float("inf"), float("nan"), -float("inf"), 2.0**-120]
    x = torch.cat([torch.full((64,), end) for end in ends] + [normal(64) * end for end in ends])
    x[3::64] *= -1
    for rounding in Rounding:
        assert_equals_reference(x, Format.parse(text), rounding, Overflow.SATURATE)


def test_quotients_of_every_magnitude() -> None:
    """The float64 product rounds to the float32 quotient: with blocks of one value and fp32 scales, scales are the quotients."""
    x = torch.cat([wide_floats(20000, seed=2), gap_probes("fp32", 2000)]).abs()
    x = x[(x > 2.0**-110) & x.isfinite()]
    for text, largest in (("int8", 127), ("int4", 7), ("e4m3fn", 448), ("e5m2", 57344)):
        scales = encode_in_graph(x, Format.parse(f"{text}/1@fp32"), Rounding.NEAREST_EVEN, Overflow.SATURATE, None)[1]
        assert torch.equal(scales, torch.from_numpy(x.numpy() / np.float32(largest)))


@pytest.mark.parametrize("rounding", ["nearest_even", "stochastic"])
@pytest.mark.parametrize("text", ["int4/16@bf16", "int8/16@fp32", "uint4/16@bf16+bf16", "e4m3fn/16@e8m0"])
def test_against_fractions(text: str, rounding: str) -> None:
    format, count = Format.parse(text), 16
    x = normal(4 * count, seed=3) * 5
    parts = encode_in_graph(x, format, Rounding(rounding), Overflow.SATURATE, keys())
    found = decode_in_graph(parts, format, len(x), torch.float32)
    bits = [word(i) for i in range(len(x))] if rounding == "stochastic" else []
    name, scale = format.element.name, str(format.scale)
    for start in range(0, len(x), count):
        block = [Fraction(v) for v in x[start : start + count].tolist()]
        shared = affine_parts(block, name, scale, "bf16") if format.minimum else Shared(covering_scale(block, name, scale))
        expected = block_values(block, shared, name, rounding, bits[start : start + count])
        assert found[start : start + count].tolist() == [float(v) for v in expected]


def word(index: int) -> int:
    """The hash of `formats/rounding.py`, with Python's integers."""
    k0, k1 = SEED.keys()
    x = (index * 0x9E3779B9 + k0) % 2**32
    x = (x ^ x >> 16) * 0x7FEB352D % 2**32
    return (x ^ x >> 15 ^ k1) * 0x846CA68B % 2**32


# --- random bits ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [0, 1, 2**31 - 1, 2**31, 2**40 + 3, -1])
def test_keys(step: int) -> None:
    for seed, tensor in ((0, 0), (7, 3), (2**40 + 1, 2**63 - 1), (-5, 12)):
        expected = Seed(seed, tensor, step).keys()
        for shape in ((), (1,)):
            found = keys_in_graph(torch.full(shape, step), seed, tensor)
            assert found.shape == (2,) and tuple(k % 2**32 for k in found.tolist()) == expected


@pytest.mark.parametrize("start", [0, 2**31 - 4, 2**32 - 4, 5 * 2**32 - 4])
def test_random_bits(start: int) -> None:
    """Below 2^31 in int32, and past it in int64, across the ends of a word; keys as int32 or as int64."""
    expected = reference.random_bits(SEED, start, 8, torch.device("cpu"))
    index = torch.arange(start, start + 8)
    for words in (keys(), torch.tensor(SEED.keys())):
        assert torch.equal(random_bits(index, words).long() & 0xFFFFFFFF, expected)
    if start == 0:
        assert torch.equal(random_bits(index.int(), keys()).long() & 0xFFFFFFFF, expected)


def test_steps_draw_different_codes() -> None:
    x, format = normal(256), Format.parse("int4/64@bf16")
    first, second = (
        encode_in_graph(x, format, Rounding.STOCHASTIC, Overflow.SATURATE, keys_in_graph(torch.tensor(step), 5, 6))[0]
        for step in (7, 8)
    )
    assert not torch.equal(first, second)


# --- masks ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 64, 192, 1001])
def test_masks(count: int) -> None:
    mask = normal(count, seed=4) > 0
    bits = pack_mask_in_graph(mask)
    assert torch.equal(bits, torch.from_numpy(np.packbits(mask.numpy(), bitorder="little")))
    assert torch.equal(unpack_mask_in_graph(bits, count), mask)


# --- what is covered --------------------------------------------------------------------------------------------------


def test_covers() -> None:
    assert all(covers(Format.parse(text)) for text in (*PLAIN, *AFFINE, *FLOATS))
    others = (
        "int3/64@bf16",
        "int8",
        "uint8/64@bf16",
        "e2m1fn/32@e8m0",
        "e2m1fn/16@e4m3fn",
        "nf4/64@bf16",
        "fp32",
        "bf16/64@fp32",
        "int16/8@fp32",
    )
    assert not any(covers(Format.parse(text)) for text in others)


def test_errors() -> None:
    with pytest.raises(CodecError, match="'int3/64@bf16' has no encode for compiled graphs"):
        encode_in_graph(torch.zeros(64), Format.parse("int3/64@bf16"), Rounding.NEAREST_EVEN, Overflow.SATURATE, None)
    with pytest.raises(CodecError, match="keys_in_graph"):
        encode_in_graph(torch.zeros(64), Format.parse("int4/64@bf16"), Rounding.STOCHASTIC, Overflow.SATURATE, None)


# --- graphs -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def fresh() -> Iterator[None]:
    torch.compiler.reset()
    with vector_instructions():
        yield
    torch.compiler.reset()


def step_of(text: str, rounding: Rounding) -> Callable[[Tensor, Tensor], list[Tensor]]:
    """Encode after an operation, decode before one, and a mask. Both operations are exact: Inductor skips the rounding to bf16 between
    operations that it fuses.
    """
    format = Format.parse(text)

    def step(x: Tensor, number: Tensor) -> list[Tensor]:
        parts = encode_in_graph(x * 2, format, rounding, Overflow.SATURATE, keys_in_graph(number, 5, 6))
        bits = pack_mask_in_graph(x > 0)
        decoded = -decode_in_graph(parts, format, x.shape[0], x.dtype)
        return [*parts, bits, decoded, unpack_mask_in_graph(bits, x.shape[0])]

    return step


def assert_same(found: list[Tensor], expected: list[Tensor]) -> None:
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        assert_same_bits(a.to(torch.uint8) if a.dtype is torch.bool else a, b.to(torch.uint8) if b.dtype is torch.bool else b)


@pytest.mark.parametrize("symbolic", [False, True])
@pytest.mark.parametrize(
    "text", ["int8/64@bf16", "int4/64@bf16", "uint4/7@fp32+bf16", "int2/16@e8m0", "e4m3fn/32@e8m0", "e5m2", "bf16"]
)
def test_traces_with_fake_tensors(text: str, symbolic: bool) -> None:
    step, number = step_of(text, Rounding.STOCHASTIC), torch.tensor(7)
    graph = make_fx(step, tracing_mode="symbolic" if symbolic else "fake", decomposition_table=select_decomp_table())(
        normal(1000), number
    )
    assert not [n for n in graph.graph.nodes if n.op == "get_attr"]  # no constants to carry along
    for count in (1000, 1024, 1001) if symbolic else (1000,):
        x = mixed(count)
        assert_same(graph(x, number), step(x, number))
    made = [n.meta["val"] for n in graph.graph.nodes if isinstance(n.meta.get("val"), Tensor)]
    assert all(t.numel() <= 2 for t in made if t.dtype is torch.int64)
    assert all(t.numel() <= 1000 // 7 + 1 for t in made if t.dtype is torch.float64)  # for each block at most


def compiled(step: Callable[..., Any], *, dynamic: bool) -> Callable[..., Any]:
    return torch.compile(step, fullgraph=True, dynamic=dynamic)


@pytest.mark.parametrize(
    ("text", "rounding", "dtype"),
    [
        pytest.param("int4/64@bf16", Rounding.STOCHASTIC, torch.bfloat16, marks=pytest.mark.full),
        ("e4m3fn/32@e8m0", Rounding.NEAREST_EVEN, torch.float32),
    ],
)
@pytest.mark.usefixtures("fresh")
def test_compiled_on_the_cpu(text: str, rounding: Rounding, dtype: torch.dtype) -> None:
    """1000 values end in a short block, whose values a loop over whole blocks would miss."""
    step, x, number = step_of(text, rounding), mixed(1000).to(dtype), torch.tensor(7)
    expected = step(x, number)
    assert_same(compiled(step, dynamic=False)(x, number), expected)


@pytest.mark.usefixtures("fresh")
def test_compiled_for_any_size() -> None:
    step, number = step_of("int8/64@bf16", Rounding.NEAREST_EVEN), torch.tensor(7)
    step(mixed(1000), number)
    function = compiled(step, dynamic=True)
    function(mixed(1000), number)
    with torch.compiler.set_stance("fail_on_recompile"):
        for count in (1024, 1001, 777):
            assert_same(function(mixed(count), number), step(mixed(count), number))
