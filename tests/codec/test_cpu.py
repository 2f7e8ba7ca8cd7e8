"""The CPU path gives the reference's bits: elements of every kind, odd shapes, special values, and at the ends of pieces."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from paredown.codec import cpu
from paredown.codec.packed import encode
from paredown.codec.recompute import NO_BOUND, pack_mask, unpack_mask
from paredown.codec.reference import Encoding
from paredown.formats.format import Format
from paredown.formats.rounding import Seed
from tests.support.compare import assert_same_bits
from tests.support.paths import SEED, assert_paths_agree, make_encoding, mixed_rows
from tests.support.strategies import examples, formats
from tests.support.values import OVERFLOWS, ROUNDINGS, SPREAD, gap_probes, normal, wide_floats

WIDE = [f"e{x}m{y}{suffix}" for x, y in [(2, 0), (8, 0), (2, 20), (5, 21), (8, 22), (5, 23)] for suffix in ("fn", "fns", "fnuz")]
BIASED = ["e4m3b0fn", "e4m3b126f", "e4m3b127f", "e4m3b128f", "e5m2b140fns", "e8m3b130f", "e3m2b60fnuz", "e8m7b0fns", "e2m1b100fn"]
BLOCKS = ("int4/64@bf16", "e2m1fn/16@e4m3fn", "uint3/5@bf16+fp32", "e3m2fn/7@e8m0", "nf4/32@fp32", "int8/100@e8m0", "e4m4f/3@bf16")


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("text", sorted({*SPREAD, *WIDE, *BIASED}))
def test_elements(text: str, rounding: str) -> None:
    x = torch.cat([gap_probes(text, 60), mixed_rows(4, 61).flatten(), wide_floats(500)])
    for overflow in OVERFLOWS:
        assert_paths_agree(x[None], make_encoding(text, rounding, overflow))


@given(
    text=formats(blocks=(1, 3, 8, 33)),
    rounding=st.sampled_from(ROUNDINGS),
    overflow=st.sampled_from(OVERFLOWS),
    rows=st.integers(1, 5),
    cols=st.integers(1, 40),
)
@examples(200)
def test_any_format(text: str, rounding: str, overflow: str, rows: int, cols: int) -> None:
    assert_paths_agree(mixed_rows(rows, cols), make_encoding(text, rounding, overflow))


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


@pytest.mark.parametrize("piece", [1, 10, 64, 1 << 17])
@pytest.mark.parametrize(("rows", "cols", "unit"), [(3, 100, 8), (1, 1000, 64), (50, 1, 8), (7, 64, 64), (2, 129, 40)])
def test_pieces_cover_everything_once(rows: int, cols: int, unit: int, piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "PIECE", piece)
    seen = torch.zeros(rows, cols, dtype=torch.int32)
    for r, c in cpu.pieces(rows, cols, unit=unit):
        seen[r, c] += 1
        assert c.start % unit == 0
        assert (r.stop - r.start) * (c.stop - c.start) <= max(piece, unit, 1)
    assert (seen == 1).all()


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
        encoding = Encoding(
            Format.parse(text),
            make_encoding(text, rounding, overflow).rounding,
            make_encoding(text, rounding, overflow).overflow,
            SEED,
            "given",
        )
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


def test_a_wrong_path_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "_nearest", lambda x, element, out, scratch: out.copy_(x))
    with pytest.raises(AssertionError):
        assert_paths_agree(normal(2, 50), make_encoding("e4m3fn", "nearest_even", "saturate"))


def test_the_codec_runs_on_one_thread_and_leaves_the_number_unchanged() -> None:
    """Operations on pieces would start threads and join them, which takes long where other programs keep the cores busy."""
    before, numbers = torch.get_num_threads(), list[int]()
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
