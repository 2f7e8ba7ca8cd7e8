"""One exact bit a value: whether x lies inside two bounds, packed eight to a byte, the first value lowest.

    bit = not (x <= low or x >= high)      ReLU: low = 0, high = NaN (no bound);  ReLU6: 0 and 6;  booleans: 0 and NaN

NaN lies inside, as in torch's own backward of ReLU.

>>> x = torch.tensor([-1.0, 0.0, 2.0, 7.0, 3.0])
>>> mask = pack_mask(x, 0.0, 6.0)
>>> mask
tensor([20], dtype=torch.uint8)
>>> unpack_mask(mask, torch.empty(5), inside=1.0, outside=0.0)
tensor([0., 0., 1., 0., 1.])
"""

from __future__ import annotations

from math import isnan, nan

import torch
from torch import Tensor

from paredown.codec import backend

NO_BOUND = nan
PIECE = 1 << 16  # values at a time: 1 MiB of scratch, most of it indices


def pack_mask(x: Tensor, low: float, high: float) -> Tensor:
    """The bits of flat, contiguous `x`, ceil(numel / 8) bytes."""
    out = torch.empty(-(-x.numel() // 8), dtype=torch.uint8, device=x.device)
    kernels = backend.find_kernels() if x.device.type == "cuda" else None
    if kernels is not None:
        return kernels.pack_mask(x, low, high, out)
    weights = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8, device=x.device)
    for start in range(0, x.numel(), PIECE):
        piece = x[start : start + PIECE]
        bits = (piece != 0 if piece.dtype is torch.bool else ~(piece <= low)).to(torch.uint8)
        if not isnan(high):
            bits &= ~(piece >= high)
        bits = torch.nn.functional.pad(bits, (0, -bits.numel() % 8)).view(-1, 8)
        out[start // 8 : start // 8 + len(bits)] = (bits * weights).sum(1, dtype=torch.uint8)
    return out


def unpack_mask(bits: Tensor, out: Tensor, *, inside: float, outside: float) -> Tensor:
    """`out`, flat and contiguous, filled with `inside` and `outside`."""
    kernels = backend.find_kernels() if out.device.type == "cuda" else None
    if kernels is not None:
        return kernels.unpack_mask(bits, out, inside, outside)
    shifts = torch.arange(8, dtype=torch.uint8, device=out.device)
    values = torch.tensor([outside, inside], dtype=out.dtype, device=out.device)
    for start in range(0, out.numel(), PIECE):
        piece = out[start : start + PIECE]
        codes = (bits[start // 8 : (start + PIECE) // 8, None] >> shifts) & 1
        piece.copy_(values[codes.view(-1)[: piece.numel()].int()])
    return out
