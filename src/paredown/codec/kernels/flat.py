"""Launches for flat tensors, many of them in a step: encode, one bit a value, and decode with what follows from it.

Everything that depends on the size and the format alone is worked out once and kept.
"""

from __future__ import annotations

from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from paredown.codec.kernels import masks, quick
from paredown.codec.kernels import recompute as recomputing
from paredown.codec.kernels.launch import (
    AS_INTEGERS,
    bf16_as_integers,
    block_constants,
    covers,
    decodes,
    element_constants,
    encodes,
    random_of,
    shared_of,
)
from paredown.codec.packed import PackedTensor
from paredown.codec.recompute import Steps
from paredown.codec.reference import Encoding, Parts
from paredown.formats.element import Kind
from paredown.formats.format import Format
from paredown.formats.rounding import Overflow, Rounding, Seed

STEPS = {
    "": recomputing.IDENTITY,
    "relu": recomputing.RELU,
    "gelu": recomputing.GELU,
    "gelu_tanh": recomputing.GELU_TANH,
    "silu": recomputing.SILU,
}


class Flat(NamedTuple):
    """What encoding and decoding so many values in a row takes: sizes, dtypes of scales and minimums, launches."""

    num_bytes: int
    num_blocks: int
    scale: torch.dtype
    minimum: torch.dtype | None
    launches: list[quick.Launch]


def encode_flat(x: Tensor, how: Any, seed: Seed) -> Parts:
    """Flat `x` packed; `how`: format, rounding, overflow and "cover". The format has blocks, and no scale of the tensor."""
    numel, device = x.numel(), x.device
    random = random_of(seed, numel, how[1])
    flat = _flat(numel, how, random.wide)
    codes = torch.empty((1, flat.num_bytes), dtype=torch.uint8, device=device)
    scales = torch.empty((1, flat.num_blocks), dtype=flat.scale, device=device)
    minimums = None if flat.minimum is None else torch.empty((1, flat.num_blocks), dtype=flat.minimum, device=device)
    source = x.view(torch.int16) if x.dtype is torch.bfloat16 else x
    shared = scales.view(AS_INTEGERS[flat.scale])
    pointers = (
        source,
        codes,
        shared,
        shared if minimums is None else minimums.view(AS_INTEGERS[minimums.dtype]),
        source,
        source,
        None,
    )
    for launch in flat.launches:
        launch(pointers, random.scalars)
    return Parts(codes, scales, minimums)


def decode_flat(parts: Parts, format: Format, out: Tensor) -> Tensor:
    """The values of a flat packed tensor into flat `out`; the format has blocks, and no scale of the tensor."""
    assert parts.codes is not None and parts.scales is not None
    scales = parts.scales.view(AS_INTEGERS[parts.scales.dtype])
    minimums = scales if parts.minimums is None else parts.minimums.view(AS_INTEGERS[parts.minimums.dtype])
    for launch in decodes(1, out.numel(), format):
        launch((parts.codes, out, scales, minimums, out, out))
    return out


@lru_cache(maxsize=4096)
def _flat(numel: int, how: Any, wide: bool) -> Flat:
    format: Format = how[0]
    stored = {"fp32": torch.float32, "bf16": torch.bfloat16}
    assert format.scale is not None
    minimum = stored[format.minimum.name] if format.minimum else None
    scale = stored.get(format.scale.name, torch.uint8)
    return Flat(format.row_bytes(numel), format.blocks_per_row(numel), scale, minimum, encodes(1, numel, how, True, False, wide))


def pack_mask(x: Tensor, low: float, high: float, out: Tensor) -> Tensor:
    """`out`: one bit for each value of flat `x`; see `codec/masks.py`."""
    x = x.view(torch.uint8) if x.dtype is torch.bool else bf16_as_integers(x)
    return _launch_mask(masks.pack_mask_kernel, x, out, (low, high), x.numel(), out)


def unpack_mask(bits: Tensor, out: Tensor, inside: float, outside: float) -> Tensor:
    """`out`, flat: one of two values for each bit."""
    plain = out.view(torch.uint8) if out.dtype is torch.bool else out
    _launch_mask(masks.unpack_mask_kernel, bits, plain, (inside, outside), out.numel(), out)
    return out


def _launch_mask(kernel: Any, source: Tensor, target: Tensor, values: tuple[float, float], numel: int, out: Tensor) -> Tensor:
    if numel:
        _mask_launch(kernel.__name__, numel)((source, target), (float(values[0]), float(values[1])))
    return out


@lru_cache(maxsize=1024)
def _mask_launch(name: str, numel: int) -> quick.Launch:
    tile = 4096
    constants = {"MASKED": numel % tile != 0, "TILE": tile, "num_warps": 4}
    return quick.Launch(getattr(masks, name), triton.cdiv(numel, tile), (numel,), constants)


@cache
def covers_recompute(format: Format) -> bool:
    """Whether there is a kernel that goes on from decoded values: blocks of a float or an integer."""
    encoding = Encoding(format, Rounding.NEAREST_EVEN, Overflow.SATURATE)
    return (
        format.block is not None
        and format.element.kind is not Kind.TABLE
        and not format.has_tensor_scale
        and covers(encoding, "decode")
    )


def recompute(packed: PackedTensor, steps: Steps, dtype: torch.dtype) -> Tensor:
    """What follows from flat packed values; see `codec/recompute.py`."""
    format, norm, numel = packed.format, steps.norm, packed.shape.numel()
    out = torch.empty(numel, dtype=dtype, device=packed.device)
    given = (norm.weight, norm.bias, norm.mean, norm.deviation) if norm else (None,) * 4
    pointers = (packed.codes, out, *shared_of(packed.parts, out)[:2], *(out if t is None else t for t in (*given, steps.bits)))
    shape = (norm.channels, norm.inner, norm.by_row, norm.weight is not None, norm.bias is not None) if norm else None
    for launch in _recomputes(numel, format, shape, steps.activation):
        launch(pointers)
    return out


@lru_cache(maxsize=1024)
def _recomputes(numel: int, format: Format, norm: tuple[int, int, bool, bool, bool] | None, activation: str) -> list[quick.Launch]:
    """Full tiles, and what is left; `norm`: channels, inner, whether by row, has a weight, has a bias."""
    channels, inner, by_row, has_weight, has_bias = norm or (1, 1, False, False, False)
    kind = recomputing.NO_NORM if norm is None else recomputing.ROWS if by_row else recomputing.CHANNELS
    tile = _recompute_tile(format, norm)
    constants = {
        "ELEMENT": element_constants(format.element, Overflow.SATURATE), **block_constants(format), "NORM": kind.value,
        "HAS_WEIGHT": has_weight, "HAS_BIAS": has_bias, "CHANNEL_COUNT": channels, "INNER": inner,
        "ACTIVATION": STEPS[activation].value, "TILE": tile, "num_warps": max(1, tile // 1024),
    }  # fmt: skip
    del constants["HAS_TENSOR_SCALE"]
    sizes = (numel, format.row_bytes(numel), format.blocks_per_row(numel))
    parts = ((0, numel // tile, False), (numel // tile, int(numel % tile > 0), True))
    return [
        quick.Launch(recomputing.recompute_kernel, count, (first, *sizes), {**constants, "MASKED": masked})
        for first, count, masked in parts
        if count
    ]


def _recompute_tile(format: Format, norm: tuple[int, int, bool, bool, bool] | None) -> int:
    """Values of a tile: so many that it lies within a row or holds whole sets of channels, if that can be."""
    most = 2048
    if norm is not None and norm[1] == 1:
        channels, _, by_row, _, _ = norm
        divisor = channels & -channels  # the largest power of two in it
        most = most if divisor == channels and not by_row else min(most, max(divisor, 128))
    return max(most, format.block or 0)
