"""Folding a gradient into a packed accumulator, in place: decode, add, encode. `optim/reference.py` defines it.

x = code value * (scale * factor) + gradient * weight        the first time: x = gradient * weight
scale, codes = codec's encode of x, stochastic               a block that is not finite gets scale NaN, and stays so
"""

from __future__ import annotations

import triton
import triton.language as tl

from paredown.codec.kernels.numbers import load_scale, nan_scale
from paredown.optim.kernels.places import load_scales, random_2d, store_scales
from paredown.optim.kernels.slots import cover_scale, encoded, largest_of, load_blocks, load_plain, store_codes


@triton.jit(do_not_specialize=["first_index", "k0", "k1"])
def fold_kernel(
    codes_ptr, scales_ptr, grad_ptr, factor_ptr, first_tile, cols, blocks_per_row, num_blocks, first_index, k0, k1, weight,
    SLOT: tl.constexpr, ELEMENT: tl.constexpr, GRAD: tl.constexpr, HAS_FACTOR: tl.constexpr, IS_FIRST: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """One tile, as in `update.py`."""
    codes_ptr = codes_ptr.to(tl.pointer_type(tl.uint8))
    scales_ptr = scales_ptr.to(tl.pointer_type(tl.uint8))
    zero = tl.zeros((), tl.int64)
    at = (tl.program_id(0) + first_tile + zero, cols + zero, blocks_per_row + zero, num_blocks + zero)
    x = load_plain(grad_ptr, at, GRAD, TILE) * weight
    if not IS_FIRST:
        scale = load_scale(load_scales(scales_ptr, at, SLOT[3], TILE), SLOT[3])
        if HAS_FACTOR:
            scale = scale * tl.load(factor_ptr)
        x = load_blocks(codes_ptr, scale, at, False, ELEMENT, TILE) + x
    largest = largest_of(x)
    broken = ~(largest < float("inf"))
    stored = tl.where(broken, nan_scale(SLOT[3]), cover_scale(tl.where(broken, 0.0, largest), SLOT))
    random = random_2d(first_index + zero, k0.to(tl.uint32), k1.to(tl.uint32), at, TILE)
    codes = tl.where(broken[:, None], 0, encoded(x, stored, random, SLOT, ELEMENT))
    none = tl.zeros_like(broken)
    store_scales(scales_ptr, stored, none, at, SLOT[3], TILE)
    store_codes(codes_ptr, codes, none, at, ELEMENT[1], TILE)
