"""Codes of any width as bytes without gaps: the first value in the lowest bits, each row on a byte of its own.

    width 4:  bytes  [v1 v0] [v3 v2] ...          width 6:  v0 | v1 << 6 | v2 << 12 | v3 << 18 as three bytes

>>> pack_bits(torch.tensor([[1, 2, 3]]), 4)
tensor([[33,  3]], dtype=torch.uint8)
>>> unpack_bits(torch.tensor([[33, 3]], dtype=torch.uint8), 4, cols=3)
tensor([[1, 2, 3]])
"""

from __future__ import annotations

from math import gcd

import torch
from torch import Tensor


def pack_bits(codes: Tensor, width: int) -> Tensor:
    """int64 codes (rows, cols) as uint8 (rows, row_bytes)."""
    if width > 8 and width % 8:
        return _pack(_to_bits(codes, width), 1)
    return _pack(codes, width)


def unpack_bits(packed: Tensor, width: int, cols: int) -> Tensor:
    """uint8 (rows, row_bytes) as int64 codes (rows, cols)."""
    if width > 8 and width % 8:
        bits = _unpack(packed, 1, cols * width).unflatten(1, (cols, width))
        return (bits << torch.arange(width, device=packed.device)).sum(2)
    return _unpack(packed, width, cols)


def _group(width: int) -> tuple[int, int]:
    """(values, bytes) of the smallest whole number of bytes that holds whole values."""
    return 8 // gcd(width, 8), width // gcd(width, 8)


def _to_bits(codes: Tensor, width: int) -> Tensor:
    return ((codes[:, :, None] >> torch.arange(width, device=codes.device)) & 1).flatten(1)


def _pack(codes: Tensor, width: int) -> Tensor:
    if width == 8:
        return codes.to(torch.uint8)
    num_values, num_bytes = _group(width)
    row_bytes = -(-codes.shape[1] * width // 8)
    codes = torch.nn.functional.pad(codes, (0, -codes.shape[1] % num_values)).unflatten(1, (-1, num_values))
    words = (codes << torch.arange(0, num_values * width, width, device=codes.device)).sum(2)
    shifts = torch.arange(0, 8 * num_bytes, 8, device=codes.device)
    return ((words[:, :, None] >> shifts) & 255).to(torch.uint8).flatten(1)[:, :row_bytes].contiguous()


def _unpack(packed: Tensor, width: int, cols: int) -> Tensor:
    if width == 8:
        return packed.long()
    num_values, num_bytes = _group(width)
    packed = torch.nn.functional.pad(packed, (0, -packed.shape[1] % num_bytes)).long().unflatten(1, (-1, num_bytes))
    words = (packed << torch.arange(0, 8 * num_bytes, 8, device=packed.device)).sum(2)
    shifts = torch.arange(0, num_values * width, width, device=packed.device)
    return ((words[:, :, None] >> shifts) & ((1 << width) - 1)).flatten(1)[:, :cols]
