"""Memory that CUDA's operations take for themselves while they run, where it is large and follows from shapes.

A sum over all dimensions but the last, which is what the gradient of a bias is, is split over so many thread blocks that a GPU is full,
and every one of them gets room for more partial sums than it writes. Of (25216, 3072) numbers in bfloat16 that is 132 MiB on an H200.
The arithmetic is that of torch's reductions (ATen/native/cuda/Reduce.cuh, torch 2.11).
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
SUM_BYTES = 4  # of a partial sum


def sum_scratch(num_inputs: int, num_outputs: int) -> int:
    """Bytes of partial sums where each of `num_outputs` numbers that lie side by side is the sum of `num_inputs`."""
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
    return SUM_BYTES * num_outputs * blocks * width * vector if blocks > 1 else 0


def _power(number: int) -> int:
    """The largest power of two in it."""
    return 1 << (number.bit_length() - 1)


def _of_sum(args: Any) -> int:
    x, dims = args[0], args[1]
    if not isinstance(x, Tensor) or not dims or not x.is_contiguous() or not x.numel():
        return 0
    kept = x.dim() - len(dims)
    leads = sorted(dim % x.dim() for dim in dims) == list(range(len(dims)))
    return sum_scratch(prod(x.shape[: len(dims)]), prod(x.shape[len(dims) :])) if leads and kept else 0


SCRATCH: Mapping[Any, Callable[[Any], int]] = {torch.ops.aten.sum.dim_IntList: _of_sum}  # bytes, by the arguments
