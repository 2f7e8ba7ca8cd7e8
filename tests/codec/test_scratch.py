"""The CPU path takes no scratch memory in compiled loops, and little in pieces, however large the tensor is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from paredown.codec import cpu
from paredown.codec.packed import encode, encode_flat, round_trip
from paredown.formats.format import Format
from paredown.formats.rounding import Seed, default_rounding
from paredown.study.tasks.evaluate import MemoryMeter
from tests.support.memory import MIB, scratch_bytes
from tests.support.paths import loops_or_none, no_loops
from tests.support.values import listed

LIMIT = 64 * MIB
LARGE = (64, 1 << 18)  # 64 MiB of float32: a temporary of the whole tensor is already too much
# each kind of scale, widths that are packed bit by bit, and the widest element
TEXTS = listed("""
    int8/64@bf16 uint8/64@bf16+bf16 e4m3fn/64@bf16 int4/64@bf16 uint2/64@bf16+bf16 bf16 e4m3fn uint4/64@bf16+fp32 e8m22 nf4/64@fp32
""")
DIRECT = [
    ("e4m3fn", "nearest_even"),
    ("e4m3fn", "stochastic"),
    ("e3m1b4fns", "nearest_even"),
    ("e8m7fns", "stochastic"),
    ("fp16", "toward_zero"),
]


def a_tensor(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Numbers in -1..1 with a NaN, so that the way for special values is taken too."""
    x = torch.linspace(-1, 1, 4096).repeat(-(-torch.Size(shape).numel() // 4096))[: torch.Size(shape).numel()].view(shape).to(dtype)
    x[0, 0] = float("nan")
    return x


@pytest.mark.parametrize(("text", "rounding"), DIRECT)
def test_round_trip_of_a_large_tensor(text: str, rounding: str, tmp_path: Path) -> None:
    x = a_tensor(LARGE)
    assert scratch_bytes(lambda: round_trip(x, text, rounding=rounding), x.nbytes, tmp_path) < LIMIT


@pytest.mark.parametrize("text", ["int8/65535@bf16", "int5/65535@e8m0", "uint3/65531@bf16+fp32"])
def test_blocks_of_odd_length(text: str, tmp_path: Path) -> None:
    """Eight of these blocks end on a byte, so a piece has to cut between them or hold half a million values."""
    x = a_tensor((1, 1 << 20))
    for rounding in ("nearest_even", "stochastic"):
        used = scratch_bytes(
            lambda rounding=rounding: encode(x, text, rounding=rounding), Format.parse(text).nbytes(x.shape), tmp_path
        )
        assert used < LIMIT, rounding


@pytest.mark.parametrize("numel", [20_000, 1 << 17, (1 << 18) + 64, 1 << 20])
@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_compiled", [True, False])
def test_plans_count_no_scratch_memory(
    text: str, numel: int, dtype: torch.dtype, is_compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By torch's profiler: none in compiled loops, less than half a MiB in pieces of the reference."""
    if is_compiled and not cpu.has_numba():
        pytest.skip("numba is not installed")
    monkeypatch.setattr(cpu, "find_loops", loops_or_none if is_compiled else no_loops)
    numel, limit = (numel, 1024) if is_compiled else (min(numel, 1 << 17), MIB // 2)
    x, format = torch.linspace(-1, 1, numel).to(dtype), Format.parse(text)
    rounding = default_rounding(format.element.width, is_sum=False)
    encode_flat(x, format, rounding, None, Seed(0, 0, 0)).decode()  # tables that are made once
    used, packed = allocated(lambda: encode_flat(x, format, rounding, None, Seed(0, 0, 0)))
    assert used - format.nbytes((numel,)) <= limit
    used, _ = allocated(packed.decode)
    assert used - x.nbytes <= limit


def allocated(call: Callable[[], Any]) -> tuple[int, Any]:
    """The peak of allocated bytes while `call` runs, and its result."""
    meter = MemoryMeter(torch.device("cpu"))
    meter.start()
    result = call()
    meter.stop()
    assert meter.bytes is not None
    return meter.bytes, result


def test_a_path_that_is_not_in_pieces_would_be_seen(tmp_path: Path) -> None:
    x = a_tensor(LARGE)
    assert scratch_bytes(lambda: x.abs() + 1, x.nbytes, tmp_path) >= LIMIT
