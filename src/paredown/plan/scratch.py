"""Memory that CUDA's operations take for themselves while they run, where it is large and follows from shapes.

A sum over all dimensions but the last, which is what the gradient of a bias is, is split over so many thread blocks that a GPU is full,
and every one of them gets room for more partial sums than it writes. Of (25216, 3072) numbers in bfloat16 that is 132 MiB on an H200; of
eight times as many rows 295. The arithmetic is that of torch's reductions (ATen/native/cuda/Reduce.cuh, torch 2.11), which take tensors
of more than 2 GiB half by half.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import Any

import torch
from torch import Tensor

PROCESSORS, THREADS = 132, 2048  # of an H100 or H200, and threads that one of them holds; smaller GPUs take less
BLOCK, WARP = 512, 32  # threads of a block at most; of a warp
FEWEST, MOST = 16, 256  # numbers that a thread adds up
WIDEST = 2**31 - 1  # bytes that are summed at once


def sum_scratch(num_inputs: int, num_outputs: int, dtype: torch.dtype = torch.float32) -> int:
    """Bytes of partial sums where each of `num_outputs` numbers that lie side by side is the sum of `num_inputs`."""
    while num_inputs > 1 and num_inputs * num_outputs * dtype.itemsize > WIDEST:
        num_inputs = -(-num_inputs // 2)
    sum_bytes = 4 if dtype.is_floating_point and dtype.itemsize <= 4 else 8
    vector = next(width for width in (4, 2, 1) if num_outputs % width == 0)
    most = BLOCK // vector
    across = min(_power(num_outputs // vector), most)
    height = min(_power(num_inputs), most // min(across, WARP))
    width = min(across, most // height)
    if num_inputs < min(height * FEWEST, MOST):
        return 0
    values, grid = -(-num_inputs // height), -(-num_outputs // (vector * width))
    target = PROCESSORS * (THREADS // (width * height))
    if values < MOST or grid > target:
        return 0
    blocks = max(min(-(-target // grid), -(-values // FEWEST)), -(-values // MOST))
    return sum_bytes * num_outputs * blocks * width * vector if blocks > 1 else 0


def _power(number: int) -> int:
    """The largest power of two in it."""
    return 1 << (number.bit_length() - 1)


def _of_sum(args: Any) -> int:
    x, dims = args[0], args[1]
    if not isinstance(x, Tensor) or not dims or not x.dim() or not x.numel() or not x.is_contiguous():
        return 0
    num = len(dims)
    is_leading = num < x.dim() and sorted(dim % x.dim() for dim in dims) == list(range(num))
    return sum_scratch(prod(x.shape[:num]), prod(x.shape[num:]), x.dtype) if is_leading else 0


SCRATCH: Mapping[Any, Callable[[Any], int]] = {torch.ops.aten.sum.dim_IntList: _of_sum}  # bytes, by the arguments
