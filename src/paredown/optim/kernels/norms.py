"""Sums of squares of many packed tensors, in two launches whatever their number: one number for each tile, then one for each tensor.

    tile      squares[i] = sum over its values of (code value * scale)^2
    tensor    sum of its tiles, in their order: the same bits every time, which atomic additions would not give

A tensor is one long row here: rows that end within a block go another way.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from paredown.codec.kernels.launch import SCALES, element_constants
from paredown.codec.kernels.numbers import BF16, FP32, decode_values, load_scale
from paredown.codec.kernels.pack import load_codes, load_shared
from paredown.codec.packed import PackedTensor
from paredown.formats.format import Format
from paredown.formats.rounding import Overflow

TILE = 4096
COLUMNS = 4  # address of codes, address of scales, number of values, first tile


@triton.jit
def squares_kernel(
    owners_ptr, table_ptr, squares_ptr, ELEMENT: tl.constexpr, BLOCK_LEN: tl.constexpr, SCALE: tl.constexpr, COLS: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """One tile: [ c0 c1 c2 c3 | c4 c5 c6 c7 ] with scales [ s0 | s1 ] to (c0 s0)^2 + ... + (c7 s1)^2."""
    pid = tl.program_id(0)
    row = table_ptr + tl.load(owners_ptr + pid) * COLS
    numel = tl.load(row + 2)
    start = (pid - tl.load(row + 3)) * TILE
    codes_ptr = tl.multiple_of(tl.load(row).to(tl.pointer_type(tl.uint8)), 16)
    if SCALE == FP32:
        scales_ptr = tl.load(row + 1).to(tl.pointer_type(tl.int32))
    elif SCALE == BF16:
        scales_ptr = tl.load(row + 1).to(tl.pointer_type(tl.int16))
    else:
        scales_ptr = tl.load(row + 1).to(tl.pointer_type(tl.uint8))
    BLOCKS: tl.constexpr = TILE // BLOCK_LEN
    byte = start * ELEMENT[1] // 8
    codes = load_codes(codes_ptr + byte, tl.cdiv(numel * ELEMENT[1], 8) - byte, ELEMENT[1], TILE, True)
    at = start // BLOCK_LEN + tl.arange(0, BLOCKS)
    scale = load_scale(load_shared(scales_ptr, at, at * BLOCK_LEN < numel, SCALE), SCALE)
    values = decode_values(codes, table_ptr, ELEMENT).reshape(BLOCKS, BLOCK_LEN) * scale[:, None]
    values = tl.where((start + tl.arange(0, TILE) < numel).reshape(BLOCKS, BLOCK_LEN), values, 0.0)
    tl.store(squares_ptr + pid, tl.sum((values * values).reshape(TILE), 0))


@triton.jit
def totals_kernel(squares_ptr, ends_ptr, totals_ptr, CHUNK: tl.constexpr):
    """The sum of the squares of each tensor, whose tiles end at ends[i + 1]."""
    tensor = tl.program_id(0)
    start, end = tl.load(ends_ptr + tensor), tl.load(ends_ptr + tensor + 1)
    total = tl.zeros((CHUNK,), tl.float32)
    while start < end:
        at = start + tl.arange(0, CHUNK)
        total += tl.load(squares_ptr + at, mask=at < end, other=0.0)
        start += CHUNK
    tl.store(totals_ptr + tensor, tl.sum(total, 0))


@cache
def covers(format: Format, shape: torch.Size) -> bool:
    """Whether a tensor of this shape is one long row of blocks of integers or floats."""
    rows, cols = format.rows_and_cols(shape)
    block = format.block or 0
    return (
        0 < block <= TILE
        and block & (block - 1) == 0
        and (rows == 1 or cols % block == 0)
        and format.minimum is None
        and not format.has_tensor_scale
        and format.element.width in (4, 8)
        and format.element.table == ()
    )


def square_sums(tensors: Sequence[PackedTensor]) -> Tensor:
    """The sum of the squares of each tensor, float32; all have one format and lie on one device."""
    format, device = tensors[0].format, tensors[0].device
    counts = [-(-t.shape.numel() // TILE) for t in tensors]
    ends = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    table = np.empty((len(tensors), COLUMNS), np.int64)
    table[:, 0] = [t.codes.data_ptr() for t in tensors]
    table[:, 1] = [0 if t.scales is None else t.scales.data_ptr() for t in tensors]
    table[:, 2], table[:, 3] = [t.shape.numel() for t in tensors], ends[:-1]
    owners = np.repeat(np.arange(len(tensors), dtype=np.int64), counts)
    there = torch.from_numpy(np.concatenate([table.ravel(), ends, owners])).to(device, non_blocking=True)
    squares, totals = torch.empty(int(ends[-1]), device=device), torch.empty(len(tensors), device=device)
    constants = _constants(format)
    tables = there[: table.size], there[table.size : table.size + len(ends)], there[table.size + len(ends) :]
    with torch.cuda.device(device) if device.type == "cuda" else torch.no_grad():
        squares_kernel[(len(owners),)](tables[2], tables[0], squares, **constants, COLS=COLUMNS, TILE=TILE, num_warps=4)
        totals_kernel[(len(tensors),)](squares, tables[1], totals, CHUNK=1024, num_warps=4)
    return totals


@cache
def _constants(format: Format) -> dict[str, Any]:
    assert format.scale is not None
    return {
        "ELEMENT": element_constants(format.element, Overflow.SATURATE),
        "BLOCK_LEN": format.block,
        "SCALE": SCALES[format.scale.name].value,
    }
