"""Workspaces of convolutions on a CPU: what the rules say, against what torch's allocator counts while the operation runs."""

from __future__ import annotations

import platform
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from paredown.predict.fake.cpu_workspaces import BLOCK, backward_workspace, forward_workspace
from tests.support.memory import scratch_bytes

pytestmark = pytest.mark.skipif(
    platform.machine() not in ("x86_64", "AMD64") or not torch.backends.mkldnn.is_available(),
    reason="the rules are those of oneDNN on x86",
)
ALLOWED = 0.03  # of the bytes of all operands: small scratch memory of oneDNN's kernels


@pytest.fixture(autouse=True)
def one_thread() -> Generator[None]:
    """Several threads allocate sums of their own, which the rules leave out."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@dataclass(frozen=True)
class Call:
    """A convolution of `num` pictures of `size` x `size` pixels; its padding keeps their size."""

    num_in: int
    num_out: int
    width: int = 3
    num: int = 16
    size: int = 32
    stride: int = 1
    groups: int = 1
    is_transposed: bool = False
    has_bias: bool = False
    is_last: bool = False
    dtype: torch.dtype = torch.float32

    def operands(self) -> tuple[Tensor, Tensor]:
        """Return the input and the weight."""
        layout = torch.channels_last if self.is_last else torch.contiguous_format
        rows, columns = (self.num_in, self.num_out) if self.is_transposed else (self.num_out, self.num_in)
        weight = torch.randn(rows, columns // self.groups, self.width, self.width, dtype=self.dtype)
        x = torch.randn(self.num, self.num_in, self.size, self.size, dtype=self.dtype)
        return x.to(memory_format=layout), weight.to(memory_format=layout)

    def settings(self) -> tuple[Any, ...]:
        """Return the arguments that the two operations share."""
        return [self.stride] * 2, [self.width // 2] * 2, [1, 1], self.is_transposed, [0, 0], self.groups


CALLS = (
    Call(48, 48),
    Call(16, 64),
    Call(64, 16),
    Call(64, 64, width=1),
    Call(64, 64, width=5),
    Call(3, 48),
    Call(8, 32),
    Call(12, 32),
    Call(64, 64, stride=2),
    Call(64, 64, width=1, stride=2),
    Call(512, 512, size=8),
    Call(16, 16, size=8, num=512),
    Call(64, 64, groups=64),
    Call(64, 64, groups=4),
    Call(64, 128, groups=64),
    Call(64, 64, is_transposed=True),
    Call(64, 64, is_transposed=True, has_bias=True),
    Call(64, 64, width=2, stride=2, is_transposed=True),
    Call(64, 64, is_last=True),
    Call(64, 64, stride=2, is_last=True),
    Call(16, 16, size=8, num=1),
    Call(32, 32, dtype=torch.float64),
)


@pytest.mark.parametrize("call", CALLS, ids=str)
def test_workspaces_are_those_that_the_allocator_counts(call: Call, tmp_path: Path) -> None:
    x, weight = call.operands()
    operands = x, weight, torch.zeros(call.num_out) if call.has_bias else None, *call.settings()
    out = torch.ops.aten.convolution(*operands)
    largest = ALLOWED * (x.nbytes + weight.nbytes + out.nbytes)
    taken = scratch_bytes(lambda: torch.ops.aten.convolution(*operands), out.nbytes, tmp_path)
    assert forward_workspace(operands, out) == pytest.approx(taken, abs=largest)
    for needs_x in (call.num_in >= BLOCK, False):  # gradients of fewer channels have blocks of 8 or 16, by processor
        given = torch.randn_like(out), x, weight, None, *call.settings(), [needs_x, True, False]
        results = weight.nbytes + needs_x * x.nbytes
        taken = scratch_bytes(lambda: torch.ops.aten.convolution_backward(*given), results, tmp_path)  # noqa: B023
        assert backward_workspace(given, None) == pytest.approx(taken, abs=largest)


@pytest.mark.parametrize("is_last", [False, True])
def test_an_operand_in_another_layout_is_copied(is_last: bool, tmp_path: Path) -> None:
    x, weight = Call(64, 64, is_last=is_last).operands()
    x = x.to(memory_format=torch.contiguous_format if is_last else torch.channels_last)
    operands = x, weight, None, *Call(64, 64).settings()
    out = torch.ops.aten.convolution(*operands)
    taken = scratch_bytes(lambda: torch.ops.aten.convolution(*operands), out.nbytes, tmp_path)
    assert forward_workspace(operands, out) == pytest.approx(taken, abs=ALLOWED * (x.nbytes + out.nbytes))
    assert (taken > x.nbytes / 2) == is_last, "the weight is small, the input is not"


def test_operands_without_values_need_none() -> None:
    x, weight = torch.empty(0, 16, 8, 8), torch.empty(16, 16, 3, 3)
    settings = Call(16, 16).settings()
    assert forward_workspace((x, weight, None, *settings), x) == 0
    assert backward_workspace((x, x, weight, None, *settings, [True, True, True]), None) == 0
