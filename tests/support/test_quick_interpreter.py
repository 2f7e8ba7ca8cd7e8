"""The quick interpreter gives numpy's values for reductions, and leaves `triton.language` as it was."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed")
import triton
import triton.language as tl

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled here")


@triton.jit
def nan_max(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def first_of_largest(value, index, other, other_index):
    stays = (value > other) | ((value == other) & (index < other_index))
    return tl.where(stays, value, other), tl.where(stays, index, other_index)


@triton.jit
def largest_kernel(x_ptr, out_ptr, ROWS: tl.constexpr, COLS: tl.constexpr, AXIS: tl.constexpr, KEEP: tl.constexpr):
    at = tl.arange(0, ROWS)[:, None] * COLS + tl.arange(0, COLS)[None, :]
    found = tl.reduce(tl.load(x_ptr + at), AXIS, nan_max, keep_dims=KEEP)
    if KEEP:
        tl.store(out_ptr + at, tl.broadcast_to(found, (ROWS, COLS)))
    else:
        tl.store(out_ptr + tl.arange(0, COLS if AXIS == 0 else ROWS), found)


@triton.jit
def where_largest_kernel(x_ptr, out_ptr, COLS: tl.constexpr):
    at = tl.arange(0, COLS)
    _, index = tl.reduce((tl.load(x_ptr + at), at), 0, first_of_largest)
    tl.store(out_ptr, index)


def values(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("shape", [(4, 8), (1, 16), (16, 1)])
def test_largest(shape: tuple[int, int], keep: bool, axis: int) -> None:
    x = values(*shape)
    x[0, 0] = torch.nan
    expected = np.max(x.numpy(), axis, keepdims=keep)  # NaN where there is one
    out = torch.zeros(shape if keep else shape[1 - axis])
    largest_kernel[(1,)](x, out, *shape, AXIS=axis, KEEP=keep)
    np.testing.assert_array_equal(out.numpy(), np.broadcast_to(expected, out.shape))


def test_two_tensors_are_reduced_together() -> None:
    x = values(32).round()  # with ties
    out = torch.zeros(1, dtype=torch.int32)
    where_largest_kernel[(1,)](x, out, COLS=32)
    assert x.unique().numel() < 32 and out.item() == int(np.argmax(x.numpy()))


def test_the_language_is_restored_after_each_launch() -> None:
    before = tl.load, tl.arange, tl.tensor.__add__
    for _ in range(2):
        out = torch.zeros(1, dtype=torch.int32)
        where_largest_kernel[(1,)](torch.tensor([1.0, 2.0]), out, COLS=2)
        assert out.item() == 1 and (tl.load, tl.arange, tl.tensor.__add__) == before
