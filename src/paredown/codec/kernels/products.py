"""These kernels quantize the rows or columns of a matrix for the products of `codec/products.py`.

    rows       scale of each row, then its codes: one program for each row
    columns    scale of each column of g * s (one pass over tiles, joined by atomic maxima), then the codes, transposed in registers
    transposed the codes of a tile, transposed in registers

A tile of the second pass, rows down, and what it writes:

    g s   [ a0 b0 ]        codes   [ a0 a1 a2 a3 ] / scale of a
          [ a1 b1 ]                [ b0 b1 b2 b3 ] / scale of b
          [ a2 b2 ]
          [ a3 b3 ]

Magnitudes are compared as the integers that their bits are, so that a NaN is the largest. Quotients are Triton's: within one unit in the
last place of the quotient, so that a code may differ from the reference's where the quotient lies beside the middle of two codes.
"""

from __future__ import annotations

from functools import lru_cache
from typing import final

import torch
import triton
import triton.language as tl
from torch import Tensor

from paredown.codec import products
from paredown.codec.kernels.launch import Direct, Launch
from paredown.codec.products import ELEMENTS, LARGEST, MIN_MAGNITUDE, MULTIPLE

TILE_ROWS, TILE_COLS = 128, 64
TILES = {"TILE_ROWS": TILE_ROWS, "TILE_COLS": TILE_COLS}
PARTS = 8  # least number of programs that share the columns of a tile in the first pass
MAX_ROW = 32768  # values of the longest row that one program can hold


@triton.jit
def coded(values, scale, LARGEST: tl.constexpr, INTEGER: tl.constexpr):
    """Return values / scale rounded to nearest: integers from -LARGEST to LARGEST if INTEGER, else e4m3fn floats."""
    y = values / scale
    y = tl.where(y > LARGEST, LARGEST, tl.where(y < -LARGEST, -LARGEST, y))  # a NaN stays
    if INTEGER:
        y = ((y + 12582912.0) - 12582912.0).to(tl.int8)  # to the nearest integer, ties to even
    else:
        y = y.to(tl.float8e4nv)
    return y


@triton.jit
def scale_of(bits, LARGEST: tl.constexpr, LEAST: tl.constexpr):
    """Return max(a, LEAST) / LARGEST, the scale of a row or column, given the float32 `bits` of its largest magnitude a."""
    magnitude = bits.to(tl.float32, bitcast=True)
    return tl.where(magnitude < LEAST, LEAST, magnitude) / LARGEST


@triton.jit
def magnitude_bits(values):
    """Return |values| as float32 bits: integers in the same order, in which NaN is the largest."""
    return values.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def rows_kernel(
    x_ptr, codes_ptr, scales_ptr, cols, LARGEST: tl.constexpr, LEAST: tl.constexpr, INTEGER: tl.constexpr, TILE: tl.constexpr
):
    """Quantize one row of the matrix x: store its codes and its scale, the largest magnitude over the largest code."""
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, TILE)
    x = tl.load(x_ptr + row * cols + at, at < cols, other=0.0).to(tl.float32)
    scale = scale_of(tl.max(magnitude_bits(x), 0), LARGEST, LEAST)
    tl.store(codes_ptr + row * cols + at, coded(x, scale, LARGEST, INTEGER), at < cols)
    tl.store(scales_ptr + row, scale)


@triton.jit
def largest_kernel(
    g_ptr, s_ptr, bits_ptr, _codes_ptr, _scales_ptr, rows, cols, stride, num_tiles, num_parts,
    TILE_ROWS: tl.constexpr, TILE_COLS: tl.constexpr,
):  # fmt: skip
    """Raise the int32 at `bits_ptr`, one per column, to the float32 bits of the largest |g * s| in the column.

    g is a matrix (rows, cols) and s has one factor for each row. `columns_kernel` reads the result.
    """
    at_col = (tl.program_id(0) // num_parts) * TILE_COLS + tl.arange(0, TILE_COLS)
    largest = tl.zeros([TILE_COLS], tl.int32)
    for tile in range(tl.program_id(0) % num_parts, num_tiles, num_parts):
        at_row = tile * TILE_ROWS + tl.arange(0, TILE_ROWS)
        inside = (at_row < rows)[:, None] & (at_col < cols)[None, :]
        g = tl.load(g_ptr + at_row.to(tl.int64)[:, None] * stride + at_col[None, :], inside, other=0.0).to(tl.float32)
        s = tl.load(s_ptr + at_row, at_row < rows, other=0.0)
        largest = tl.maximum(largest, tl.max(magnitude_bits(g * s[:, None]), 0))
    tl.atomic_max(bits_ptr + at_col, largest, at_col < cols)


@triton.jit
def columns_kernel(
    g_ptr, s_ptr, bits_ptr, codes_ptr, scales_ptr, rows, cols, stride, padded, num_tiles,
    LARGEST: tl.constexpr, LEAST: tl.constexpr, INTEGER: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_COLS: tl.constexpr,
):  # fmt: skip
    """Quantize the columns of g * s: store their scales, and their codes transposed, with zeros up to `padded` bytes a row.

    g is a matrix and s has one factor for each row; `bits_ptr` has the columns' largest magnitudes from `largest_kernel`.
    """
    tile = tl.program_id(0) % num_tiles
    at_row = tile * TILE_ROWS + tl.arange(0, TILE_ROWS)
    at_col = (tl.program_id(0) // num_tiles) * TILE_COLS + tl.arange(0, TILE_COLS)
    inside = (at_row < rows)[:, None] & (at_col < cols)[None, :]
    g = tl.load(g_ptr + at_row.to(tl.int64)[:, None] * stride + at_col[None, :], inside, other=0.0).to(tl.float32)
    s = tl.load(s_ptr + at_row, at_row < rows, other=0.0)
    scale = scale_of(tl.load(bits_ptr + at_col, at_col < cols, other=0), LARGEST, LEAST)
    codes = tl.trans(coded(g * s[:, None], scale[None, :], LARGEST, INTEGER))
    place = codes_ptr + at_col.to(tl.int64)[:, None] * padded + at_row[None, :]
    tl.store(place, codes, (at_col < cols)[:, None] & (at_row < padded)[None, :])
    if tile == 0:
        tl.store(scales_ptr + at_col, scale, at_col < cols)


@triton.jit
def transpose_kernel(codes_ptr, out_ptr, rows, cols, padded, num_tiles, TILE_ROWS: tl.constexpr, TILE_COLS: tl.constexpr):
    """Store the transpose of a (rows, cols) matrix of bytes, with zeros up to `padded` bytes in each row."""
    at_row = (tl.program_id(0) % num_tiles) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    at_col = (tl.program_id(0) // num_tiles) * TILE_COLS + tl.arange(0, TILE_COLS)
    inside = (at_row < rows)[:, None] & (at_col < cols)[None, :]
    codes = tl.load(codes_ptr + at_row.to(tl.int64)[:, None] * cols + at_col[None, :], inside, other=0)
    place = out_ptr + at_col.to(tl.int64)[:, None] * padded + at_row[None, :]
    tl.store(place, tl.trans(codes), (at_col < cols)[:, None] & (at_row < padded)[None, :])


def _constants(element: str) -> dict[str, object]:
    return {"LARGEST": LARGEST[element], "LEAST": MIN_MAGNITUDE, "INTEGER": element == "int8"}


def quantize_rows(x: Tensor, element: str) -> tuple[Tensor, Tensor]:
    """Return (codes, scales) of a matrix: codes of its shape in `element` ("int8" or "e4m3fn"), and scales (rows, 1)."""
    x, (rows, cols) = x.contiguous(), x.shape
    if cols > MAX_ROW:
        return products.quantize_rows(x, element)
    codes = torch.empty((rows, cols), dtype=ELEMENTS[element], device=x.device)
    scales = torch.empty((rows, 1), dtype=torch.float32, device=x.device)
    _rows_launch(rows, cols, element)((x, codes, scales))
    return codes, scales


@lru_cache(maxsize=4096)
def _rows_launch(rows: int, cols: int, element: str) -> Launch:
    tile = triton.next_power_of_2(cols)
    constants = {**_constants(element), "TILE": tile, "num_warps": min(16, max(1, tile // 512))}
    return Launch(rows_kernel, rows, (cols,), constants)


def quantize_columns(g: Tensor, s: Tensor, element: str) -> tuple[Tensor, Tensor]:
    """Return the columns of g * s quantized to `element`: codes (columns, rows up to a multiple of 16), scales (columns, 1).

    g is a matrix (rows, columns) and s has one factor for each row.
    """
    g = g if g.stride(1) == 1 else g.contiguous()
    rows, cols = g.shape
    codes = torch.empty((cols, -(-rows // MULTIPLE) * MULTIPLE), dtype=ELEMENTS[element], device=g.device)
    scales = torch.empty((cols, 1), dtype=torch.float32, device=g.device)
    column_quantizer(rows, cols, g.stride(0), element)(g, s, codes, scales)
    return codes, scales


@final
class ColumnQuantizer:
    """Prepared kernel launches for matrices g of one size: `self(g, s, codes, scales)` quantizes the columns of g * s.

    s has one factor for each row of g. Preparing them once saves time in every later call.
    """

    def __init__(self, rows: int, cols: int, stride: int, element: str) -> None:
        num_tiles, num_cols = triton.cdiv(rows, TILE_ROWS), triton.cdiv(cols, TILE_COLS)
        padded, num_parts = -(-rows // MULTIPLE) * MULTIPLE, min(num_tiles, max(PARTS, 2048 // num_cols))
        first = Launch(largest_kernel, num_cols * num_parts, (rows, cols, stride, num_tiles, num_parts), {**TILES, "num_warps": 2})
        num_tiles = triton.cdiv(padded, TILE_ROWS)
        second = Launch(
            columns_kernel,
            num_cols * num_tiles,
            (rows, cols, stride, padded, num_tiles),
            {**_constants(element), **TILES, "num_warps": 4},
        )
        self._cols, self._direct = cols, Direct([first, second])

    def __call__(self, g: Tensor, s: Tensor, codes: Tensor, scales: Tensor) -> None:
        bits = torch.zeros(self._cols, dtype=torch.int32, device=g.device)
        key, pointers = (g.get_device(), g.dtype, s.dtype), (g, s, bits, codes, scales)
        addresses = tuple(tensor.data_ptr() for tensor in pointers)
        if not self._direct.run(key, addresses[0] | addresses[1], addresses):
            self._direct.launch(key, pointers)


column_quantizer = lru_cache(maxsize=4096)(ColumnQuantizer)


def transposed(codes: Tensor) -> Tensor:
    """Return the transpose of a matrix of codes, whose rows are padded with zeros to a multiple of 16 columns."""
    codes, (rows, cols) = codes.contiguous(), codes.shape
    out = torch.empty((cols, -(-rows // MULTIPLE) * MULTIPLE), dtype=codes.dtype, device=codes.device)
    transposer(rows, cols)(codes, out)
    return out


@final
class Transposer:
    """Prepared kernel launches for matrices of one size: `self(codes, out)` writes the transpose of `codes` into `out`."""

    def __init__(self, rows: int, cols: int) -> None:
        padded = -(-rows // MULTIPLE) * MULTIPLE
        num_tiles = triton.cdiv(padded, TILE_ROWS)
        sizes = (rows, cols, padded, num_tiles)
        self._direct = Direct(
            [Launch(transpose_kernel, triton.cdiv(cols, TILE_COLS) * num_tiles, sizes, {**TILES, "num_warps": 4})]
        )

    def __call__(self, codes: Tensor, out: Tensor) -> None:
        key, addresses = (codes.get_device(), torch.int8, torch.int8), (codes.data_ptr(), out.data_ptr())
        if not self._direct.run(key, addresses[0] | addresses[1], addresses):
            self._direct.launch(key, (codes.view(torch.int8), out.view(torch.int8)))


transposer = lru_cache(maxsize=4096)(Transposer)
