"""The CPU path gives the reference's bits, compiled or in pieces: elements of every kind, odd shapes, special values, ends of pieces."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from paredown.codec import cpu, reference
from paredown.codec.packed import encode
from paredown.codec.recompute import NO_BOUND, pack_mask, unpack_mask
from paredown.codec.reference import PackedParts
from paredown.formats.element import Element
from paredown.formats.rounding import Seed
from tests.support.compare import assert_same_bits
from tests.support.paths import SEED, assert_paths_agree, loops_or_none, make_encoding, mixed_rows, no_loops
from tests.support.strategies import examples, formats
from tests.support.values import OVERFLOWS, ROUNDINGS, SPREAD, gap_probes, normal, wide_floats

WIDE = [f"e{x}m{y}{suffix}" for x, y in [(2, 0), (8, 0), (2, 20), (5, 21), (8, 22), (5, 23)] for suffix in ("fn", "fns", "fnuz")]
BIASED = ["e4m3b0fn", "e4m3b126f", "e4m3b127f", "e4m3b128f", "e5m2b140fns", "e8m3b130f", "e3m2b60fnuz", "e8m7b0fns", "e2m1b100fn"]
BLOCKS = ("int4/64@bf16", "e2m1fn/16@e4m3fn", "uint3/5@bf16+fp32", "e3m2fn/7@e8m0", "nf4/32@fp32", "int8/100@e8m0", "e4m4f/3@bf16")


NO_ZERO = ["[-1 1]", "[-3 -0.5 0.25 0.75 1]", "[0.1 0.5]"]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
find_loops = cpu.find_loops  # before it is replaced below
needs_numba = pytest.mark.skipif(not cpu.has_numba(), reason="numba is not installed")


@pytest.fixture(params=["compiled", "in pieces"], autouse=True)
def path(request: pytest.FixtureRequest) -> Iterator[None]:
    """Both ways, whatever the size of a tensor."""
    if request.param == "compiled" and not cpu.has_numba():
        pytest.skip("numba is not installed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu, "find_loops", loops_or_none if request.param == "compiled" else no_loops)
        yield


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("text", sorted({*SPREAD, *WIDE, *BIASED}))
def test_elements(text: str, rounding: str) -> None:
    x = torch.cat([gap_probes(text, 60), mixed_rows(4, 61).flatten(), wide_floats(500)])
    for overflow in OVERFLOWS:
        assert_paths_agree(x[None], make_encoding(text, rounding, overflow))


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("text", NO_ZERO)
def test_tables_without_zero(text: str, rounding: str) -> None:
    for overflow in OVERFLOWS:
        assert_paths_agree(
            torch.cat([mixed_rows(4, 61).flatten(), torch.linspace(-3, 1, 300)])[None], make_encoding(text, rounding, overflow)
        )


@pytest.mark.parametrize("text", sorted(text for text in SPREAD if Element.parse(text).width <= 8))
def test_every_code(text: str) -> None:
    """Decoded to its value by the definition of the element, and encoded to itself, if it is one that encoding produces."""
    element, encoding = Element.parse(text), make_encoding(text, "nearest_even", "saturate")
    codes = torch.arange(1 << element.width)
    packed = PackedParts(reference.pack_bits(codes[None], element.width))
    values = cpu.decode_rows(packed, encoding, torch.empty(1, len(codes)))
    assert_same_bits(values, torch.tensor([[element.value(code) for code in codes.tolist()]]))
    finite = values[0][values[0].isfinite() & (values[0] >= element.min_value)][None]
    again = cpu.encode_rows(finite, encoding, None)
    assert_same_bits(cpu.decode_rows(again, encoding, torch.empty_like(finite)), finite)


@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_every_16_bit_float(dtype: torch.dtype) -> None:
    """Read from, and written to, all patterns of bfloat16 and float16."""
    x = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(dtype)[None]
    for text in ("e8m23", "fp16", "bf16", "e4m3fn"):
        assert_paths_agree(x, make_encoding(text, "nearest_even", "saturate"))


@pytest.mark.parametrize("text", ["int4/64@bf16", "uint3/5@bf16+fp32", "int5/4099@e8m0", "e2m1fn/16@e4m3fn", "int12", "e4m3fn"])
def test_ends_of_tiles(text: str) -> None:
    """Rows longer than what is encoded at a time, with a block that is broken in the middle of a row."""
    x = mixed_rows(5, 6007)
    x[0, 3000], x[2, 10] = float("nan"), float("inf")
    for rounding in ("nearest_even", "stochastic"):
        for overflow in OVERFLOWS:
            assert_paths_agree(x, make_encoding(text, rounding, overflow))


@given(
    text=formats(blocks=(1, 3, 8, 33)),
    dtype=st.sampled_from(DTYPES),
    rounding=st.sampled_from(ROUNDINGS),
    overflow=st.sampled_from(OVERFLOWS),
    rows=st.integers(1, 5),
    cols=st.integers(1, 40),
)
@examples(200)
def test_any_format(text: str, dtype: torch.dtype, rounding: str, overflow: str, rows: int, cols: int) -> None:
    assert_paths_agree(mixed_rows(rows, cols, dtype), make_encoding(text, rounding, overflow))


@pytest.mark.parametrize("shape", [(1, 1), (1, 7), (7, 1), (5, 64), (3, 1000), (1, 0), (0, 5), (64, 3), (2, 129)])
def test_odd_shapes(shape: tuple[int, int]) -> None:
    for text in (*BLOCKS, "e4m3fn", "int4"):
        for rounding in ("nearest_even", "stochastic"):
            assert_paths_agree(mixed_rows(*shape), make_encoding(text, rounding, "saturate"))


@pytest.mark.parametrize("piece", [1, 40, 64, 1000])
@pytest.mark.parametrize("text", [*BLOCKS, "e4m3fn", "int3", "e5m3f", "int12"])
def test_ends_of_pieces(text: str, piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of one value, of a few blocks, of a few rows: bytes, scales and random bits still fit together."""
    monkeypatch.setattr(cpu, "PIECE", piece)
    for rows, cols in ((1, 150), (5, 37), (20, 3)):
        for rounding in ("nearest_even", "stochastic"):
            assert_paths_agree(mixed_rows(rows, cols), make_encoding(text, rounding, "nonfinite"))


@pytest.mark.parametrize("first_index", [2**31 - 50, 2**32 - 200, 2**32 - 1, 2**32, 2**35 - 100])
@pytest.mark.parametrize("piece", [64, 1 << 17])
def test_indices_that_cross_2_to_the_32(first_index: int, piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "PIECE", piece)
    seed = replace(SEED, first_index=first_index)
    for text in ("e3m1b4fns", "int4/64@bf16"):
        assert_paths_agree(normal(3, 200), make_encoding(text, "stochastic", "saturate", seed))


@pytest.mark.parametrize("text", [*BLOCKS, "int8/64@bf16"])
@pytest.mark.parametrize("overflow", OVERFLOWS)
def test_given_scales(text: str, overflow: str) -> None:
    """Scales of a smaller tensor: many values lie past the end."""
    parts = encode(normal(4, 130), text).parts
    for rounding in ROUNDINGS:
        encoding = replace(make_encoding(text, rounding, overflow), rule="given")
        assert_paths_agree(mixed_rows(4, 130) * 3, encoding, replace(parts, codes=None))


@pytest.mark.parametrize("text", [t for t in BLOCKS if "e8m0" in t])
def test_ocp_scales(text: str) -> None:
    assert_paths_agree(mixed_rows(8, 130), replace(make_encoding(text, "nearest_even", "saturate"), rule="ocp"))


def test_inputs_are_left_alone() -> None:
    x = mixed_rows(8, 130)
    before = x.clone()
    for text in (*BLOCKS, "e4m3fn", "int4", "e3m1b4fns"):
        for rounding in ROUNDINGS:
            assert_paths_agree(x, make_encoding(text, rounding, "saturate", Seed(1)))
    assert_same_bits(x, before)


def test_largest_finite() -> None:
    x = mixed_rows(8, 130)
    assert cpu.largest_finite(x).item() == max(abs(v) for v in x.flatten().tolist() if v - v == 0)
    assert cpu.largest_finite(torch.full((1, 3), float("nan"))).item() == 0.0
    assert cpu.largest_finite(torch.zeros(0, 5)).item() == 0.0


@needs_numba
def test_small_tensors_wait_for_the_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference encodes them until it has taken as long as importing the loops, or until a larger one comes."""
    monkeypatch.setattr(cpu, "LOOPS", "not imported yet")
    monkeypatch.setattr(cpu, "_patience", cpu.Patience())
    small, num = torch.ones(1000), 0
    while find_loops(small) is None:
        num += 1
    assert (num + 1) * (1000 + cpu.CALL) >= cpu.PATIENCE > num * (1000 + cpu.CALL)
    assert find_loops(small) is find_loops(torch.ones(1 << 20))


@needs_numba
def test_a_large_tensor_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "LOOPS", "not imported yet")
    assert find_loops(torch.ones(cpu.FEW_VALUES + 1)) is not None


def test_without_numba_there_are_no_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "has_numba", lambda: False)
    assert find_loops(torch.ones(1 << 20)) is None


@needs_numba
def test_loops_compile_where_no_folder_can_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("numba.core.caching.CacheImpl._locator_classes", [])
    loops = loops_or_none(torch.ones(1))
    assert loops is not None
    assert loops.entry(lambda n: n + 1)(1) == 2


@needs_numba
def test_what_the_callers_held_is_freed_after_loops_were_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("numba.core.caching.CacheImpl._locator_classes", [])
    loops = loops_or_none(torch.ones(1))
    assert loops is not None

    def copy(words: Any, bits: Any) -> None:
        # numba makes an error message of the two shapes, in functions that it fails to compile at first
        bits[:] = words[: len(bits)]

    def call() -> weakref.ref[Tensor]:
        held = torch.ones(1)
        loops.entry(copy)(np.ones(3), np.zeros(2))
        return weakref.ref(held)

    assert call()() is None


def test_a_wrong_path_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    decode = cpu.decode_rows
    monkeypatch.setattr(cpu, "decode_rows", lambda *args: decode(*args).nextafter(torch.tensor(1.0)))
    with pytest.raises(AssertionError):
        assert_paths_agree(normal(2, 50), make_encoding("e4m3fn", "nearest_even", "saturate"))


def test_the_codec_runs_on_one_thread_and_leaves_the_number_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Operations on pieces would start threads and join them, which takes long where other programs keep the cores busy."""
    before, numbers = torch.get_num_threads(), list[int]()
    monkeypatch.setattr(cpu, "find_loops", no_loops)
    torch.set_num_threads(3)

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            numbers.append(torch.get_num_threads())
            return func(*args, **(kwargs or {}))

    try:
        x = torch.randn(1 << 17)
        packed, mask = encode(x, "int4/64@bf16", rounding="stochastic"), pack_mask(x, 0.0, NO_BOUND)
        with Seen():
            torch.abs(x)
            outside = numbers.copy()
            encode(x, "int4/64@bf16", rounding="stochastic")
            packed.decode()
            pack_mask(x, 0.0, NO_BOUND)
            unpack_mask(mask, torch.empty_like(x), inside=1.0, outside=0.0)
        assert outside == [3]
        # operations that only allocate or view do not start threads, and run before and after
        assert numbers.count(1) > 0.8 * len(numbers)
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("text", ["int8/64@bf16", "uint4/64@bf16+bf16"])
def test_memory_of_packed_and_decoded_tensors_can_be_resized(text: str) -> None:
    """FSDP2 frees gathered parts and decoded parameters by `resize_(0)`; `Tensor.numpy` would make their storages fixed."""
    x = torch.randn(64, 1024)
    packed = encode(x, text)
    decoded = packed.decode()
    for tensor in (x, decoded, packed.codes, packed.scales):
        tensor.untyped_storage().resize_(0)
        assert tensor.untyped_storage().nbytes() == 0
