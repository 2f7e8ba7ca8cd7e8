"""The meter of scratch memory sees what is held, and what is held for a moment only."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.memory import MIB, peak_bytes, scratch_bytes


def two_at_once() -> torch.Tensor:
    a = torch.ones(MIB // 4)
    b = a + 1
    return a + b


def one_after_the_other() -> torch.Tensor:
    a = torch.ones(MIB // 4)
    for _ in range(20):
        a = a.add(1)
    return a


@pytest.mark.parametrize(("call", "mib"), [(two_at_once, 3), (one_after_the_other, 2)])
def test_peak_is_what_is_held_at_one_time(call: object, mib: int, tmp_path: Path) -> None:
    peak = peak_bytes(call, tmp_path)  # type: ignore[arg-type]
    assert mib * MIB <= peak < mib * MIB + 4096


def test_memory_from_before_that_is_released_meanwhile_does_not_count(tmp_path: Path) -> None:
    before = [torch.ones(MIB)]

    def call() -> torch.Tensor:
        first = torch.ones(MIB // 4)
        before.clear()
        return first + 1

    assert 2 * MIB <= peak_bytes(call, tmp_path) < 2 * MIB + 4096


def test_temporaries_inside_an_operator_count(tmp_path: Path) -> None:
    x = torch.ones(2, MIB // 4).T  # sorting makes a contiguous copy, values and indices
    assert peak_bytes(lambda: torch.sort(x, 0).values[:1].clone(), tmp_path) > 4 * MIB


def test_the_result_is_no_scratch(tmp_path: Path) -> None:
    assert scratch_bytes(two_at_once, MIB, tmp_path) >= 2 * MIB
    assert scratch_bytes(lambda: torch.ones(MIB // 4), MIB, tmp_path) < 4096
