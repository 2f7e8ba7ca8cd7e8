"""Kernels and launches for flat tensors, of which a step has many: encode, and decode with recomputation.

Everything that depends on the size and the format alone is computed once and cached.

Recomputation: decode, apply a norm and an activation function, in one pass over memory. `codec/recompute.py` has the formulas.

codes   [ c0 c1 c2 c3 c4 c5 c6 c7 ]      one program decodes a tile of TILE values,
norm    [ n0 n1 n2 n3 n0 n1 n2 n3 ]      normalises each by its channel (here 4 of them, next to each other),
bits    [ b7..b0                  ]      and zeroes the values that ReLU zeroed
"""

from __future__ import annotations

from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from paredown.codec.kernels.launch import (
    AS_INTEGERS,
    NOT_RANDOM,
    Direct,
    Launch,
    block_constants,
    covers,
    decodes,
    element_constants,
    empty_flat,
    empty_row,
    empty_strided,
    encodes,
    random_of,
    run_direct,
    shared_of,
)
from paredown.codec.kernels.masks import load_bits
from paredown.codec.kernels.pack import NONE, decode_blocks, load_codes, load_shared, store_values
from paredown.codec.packed import PackedTensor
from paredown.codec.recompute import DecodeSteps
from paredown.codec.reference import Encoding, PackedParts
from paredown.formats.element import ElementKind
from paredown.formats.format import Format
from paredown.formats.rounding import Overflow, Rounding, Seed

# --- Codes to values to what follows from them ---

NO_NORM = tl.constexpr(0)
CHANNELS = tl.constexpr(1)
ROWS = tl.constexpr(2)
IDENTITY = tl.constexpr(0)
RELU = tl.constexpr(1)
GELU = tl.constexpr(2)
GELU_TANH = tl.constexpr(3)
SILU = tl.constexpr(4)


@triton.jit
def tanh(x):
    """tanh by way of exp, which does not overflow for these arguments."""
    t = tl.exp(-2.0 * tl.abs(x))
    y = (1.0 - t) / (1.0 + t)
    return tl.where(x < 0.0, -y, y)


@triton.jit
def erf(x):
    """Abramowitz and Stegun 7.1.26: within 1.5e-7, with half the instructions of the library function."""
    a = tl.abs(x)
    t = 1.0 / (1.0 + 0.3275911 * a)
    tail = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))))
    y = 1.0 - tail * tl.exp(-a * a)
    return tl.where(x < 0.0, -y, y)


@triton.jit
def activated(x, ACTIVATION: tl.constexpr):
    """GELU, its approximation by tanh, or SiLU."""
    if ACTIVATION == GELU:
        return 0.5 * x * (1.0 + erf(x * 0.7071067811865476))
    elif ACTIVATION == GELU_TANH:
        return 0.5 * x * (1.0 + tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))
    elif ACTIVATION == SILU:
        return x / (1.0 + tl.exp(-x))
    else:
        return x


@triton.jit
def channel_of(start, CHANNEL_COUNT: tl.constexpr, INNER: tl.constexpr, TILE: tl.constexpr):
    """The channel of each value of a tile, as a contiguous range if the tile and the channels allow it."""
    if INNER == 1 and TILE % CHANNEL_COUNT == 0:
        return tl.arange(0, TILE) % CHANNEL_COUNT
    elif INNER == 1 and CHANNEL_COUNT % TILE == 0:
        return (start % CHANNEL_COUNT).to(tl.int32) + tl.arange(0, TILE)
    else:
        place = (start % (CHANNEL_COUNT * INNER)).to(tl.int32) + tl.arange(0, TILE)
        return (place // INNER) % CHANNEL_COUNT


@triton.jit
def affine(x, weight_ptr, bias_ptr, channel, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr):
    """x scaled and shifted by the weight and bias of its channel."""
    if HAS_WEIGHT:
        x = x * tl.load(weight_ptr + channel)
    if HAS_BIAS:
        x = x + tl.load(bias_ptr + channel)
    return x


@triton.jit
def normed(
    x, start, weight_ptr, bias_ptr, mean_ptr, deviation_ptr, inside, NORM: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr,
    CHANNEL_COUNT: tl.constexpr, INNER: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """x normalized by the statistics of its channel or row, then scaled and shifted by the weight and bias of its channel."""
    channel = channel_of(start, CHANNEL_COUNT, INNER, TILE)
    if NORM == CHANNELS:
        x = (x - tl.load(mean_ptr + channel)) * tl.load(deviation_ptr + channel)
    else:
        if CHANNEL_COUNT % TILE == 0:
            row = start // CHANNEL_COUNT
            x = (x - tl.load(mean_ptr + row)) * tl.load(deviation_ptr + row)
        else:
            rows = start // CHANNEL_COUNT + ((start % CHANNEL_COUNT).to(tl.int32) + tl.arange(0, TILE)) // CHANNEL_COUNT
            x = (x - tl.load(mean_ptr + rows, mask=inside, other=0.0)) * tl.load(deviation_ptr + rows, mask=inside, other=0.0)
    return affine(x, weight_ptr, bias_ptr, channel, HAS_WEIGHT, HAS_BIAS)


@triton.jit
def normed_by_groups(
    x, start, weight_ptr, bias_ptr, mean_ptr, deviation_ptr, numel, NORM: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr,
    CHANNEL_COUNT: tl.constexpr, GROUP: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """`normed` of x (TILE / GROUP, GROUP), where GROUP channels lie next to each other: their loads are vectors."""
    PER_ROW: tl.constexpr = CHANNEL_COUNT // GROUP
    group = ((start // GROUP) % PER_ROW).to(tl.int32) + tl.arange(0, TILE // GROUP)
    channel = ((group % PER_ROW) * GROUP)[:, None] + tl.arange(0, GROUP)[None, :]
    if NORM == CHANNELS:
        x = (x - tl.load(mean_ptr + channel)) * tl.load(deviation_ptr + channel)
    else:
        row = start // CHANNEL_COUNT + group // PER_ROW
        exists = row < numel // CHANNEL_COUNT
        mean = tl.load(mean_ptr + row, mask=exists, other=0.0)
        x = (x - mean[:, None]) * tl.load(deviation_ptr + row, mask=exists, other=0.0)[:, None]
    return affine(x, weight_ptr, bias_ptr, channel, HAS_WEIGHT, HAS_BIAS)


@triton.jit
def recompute_kernel(
    codes_ptr, out_ptr, scales_ptr, minimums_ptr, weight_ptr, bias_ptr, mean_ptr, deviation_ptr, bits_ptr, first_tile, numel, num_bytes,
    num_blocks, ELEMENT: tl.constexpr, BLOCK_LEN: tl.constexpr, SCALE: tl.constexpr, MINIMUM: tl.constexpr, NORM: tl.constexpr,
    HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr, CHANNEL_COUNT: tl.constexpr, INNER: tl.constexpr, ACTIVATION: tl.constexpr,
    GROUP: tl.constexpr, MASKED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Kernel of `recompute` for a tile of one long row, drawn above."""
    tile = tl.program_id(0).to(tl.int64) + first_tile
    start = tile * TILE
    inside = tl.arange(0, TILE) < numel - start
    BLOCKS: tl.constexpr = TILE // BLOCK_LEN
    at = tile * BLOCKS + tl.arange(0, BLOCKS)
    code_start = tile * (TILE * ELEMENT[1] // 8)
    codes = load_codes(codes_ptr + code_start, num_bytes - code_start, ELEMENT[1], TILE, MASKED).reshape(BLOCKS, BLOCK_LEN)
    scale = load_shared(scales_ptr, at, at < num_blocks, SCALE)
    minimum = load_shared(minimums_ptr, at, at < num_blocks, MINIMUM) if MINIMUM != NONE else scale
    x = decode_blocks(codes, scale, minimum, 1.0, codes_ptr, ELEMENT, SCALE, MINIMUM, False).reshape(TILE)
    if NORM != NO_NORM and GROUP > 0:
        x = normed_by_groups(
            x.reshape(TILE // GROUP, GROUP), start, weight_ptr, bias_ptr, mean_ptr, deviation_ptr, numel, NORM, HAS_WEIGHT, HAS_BIAS,
            CHANNEL_COUNT, GROUP, TILE,
        ).reshape(TILE)  # fmt: skip
    elif NORM != NO_NORM:
        x = normed(
            x, start, weight_ptr, bias_ptr, mean_ptr, deviation_ptr, inside, NORM, HAS_WEIGHT, HAS_BIAS, CHANNEL_COUNT, INNER, TILE
        )
    if ACTIVATION == RELU:
        x = tl.where(load_bits(bits_ptr, start, numel, MASKED, TILE) != 0, x, 0.0)
    else:
        x = activated(x, ACTIVATION)
    store_values(out_ptr + start, x, inside, MASKED)


# --- Launches for flat tensors, many of them in a step ---

STEPS = {
    "": IDENTITY,
    "relu": RELU,
    "gelu": GELU,
    "gelu_tanh": GELU_TANH,
    "silu": SILU,
}


class Flat(NamedTuple):
    """Cached data to encode and decode one row of this length: sizes, dtypes of scales and minimums, launches."""

    num_bytes: int
    num_blocks: int
    scale: torch.dtype
    minimum: torch.dtype | None
    launches: list[Launch]


def encode_flat(x: Tensor, how: Any, seed: Seed) -> PackedParts:
    """Flat `x` encoded; `how`: format, rounding, overflow and "cover". The format has blocks and no tensor scale."""
    random = random_of(seed, x.numel(), how[1])
    flat = _flat(x.numel(), how, random.step_in_memory, random.wide)
    parts, pointers = _parts_and_pointers(flat, x, random.step)
    for launch in flat.launches:
        launch(pointers, random.scalars)
    return PackedParts(*(part.view(1, -1) for part in parts))


class FlatEncoder:
    """Encodes flat tensors of `numel` values, with a step in memory: [codes, scales] or [codes, scales, minimums].

    The parts are flat, or have one row with `is_row`. `how`: format, rounding, overflow and "cover".
    """

    __slots__ = ("_direct", "_is_random", "_is_row", "_with_bits", "flat")

    def __init__(self, numel: int, how: Any, seed: Seed, *, is_row: bool = False) -> None:
        random = random_of(seed, numel, how[1])
        self._is_random, self._is_row = random is not NOT_RANDOM, is_row
        k0, k1 = (key - (1 << 32) if key >> 31 else key for key in seed.base_keys()) if self._is_random else (0, 0)
        self.flat = _flat(numel, how, self._is_random, random.wide)
        self._direct = Direct(self.flat.launches, (seed.first_index, k0, k1))
        with_bits = encodes(1, numel, how, True, self._is_random, random.wide, True)
        self._with_bits = Direct(with_bits, self._direct.scalars)

    def __call__(self, x: Tensor, step: Tensor, bits: Tensor | None = None) -> list[Tensor]:
        """The parts of the values that begin at the address of `x`, whatever its shape; `step`: one int32 on its device.

        `bits` is filled with the mask of values above 0.
        """
        index, source = x.get_device(), x.data_ptr()
        direct, bits_at = (self._direct, source) if bits is None else (self._with_bits, bits.data_ptr())
        key = (index, x.dtype, torch.uint8)
        compiled = direct.find(key, source | bits_at)
        if compiled is None:
            return self._first(direct, key, x, step if self._is_random else None, bits)
        flat, empty = self.flat, empty_row if self._is_row else empty_flat
        codes = empty(flat.num_bytes, torch.uint8, x)
        scales = lowest = empty(flat.num_blocks, flat.scale, x)
        parts = [codes, scales]
        if flat.minimum is not None:
            lowest = empty(flat.num_blocks, flat.minimum, x)
            parts.append(lowest)
        step_at = step.data_ptr() if self._is_random else None
        addresses = (source, codes.data_ptr(), scales.data_ptr(), lowest.data_ptr(), source, source, step_at, bits_at)
        run_direct(compiled, index, addresses)
        return parts

    def _first(self, direct: Direct, key: Any, x: Tensor, step: Tensor | None, bits: Tensor | None) -> list[Tensor]:
        parts, pointers = _parts_and_pointers(self.flat, x, step)
        direct.launch(key, pointers if bits is None else (*pointers[:-1], bits))
        return [part.view(1, -1) for part in parts] if self._is_row else parts


class FlatDecoder:
    """Decodes parts of `numel` values of one format into flat tensors; `Direct` with the pointers of `decode_kernel`."""

    __slots__ = ("_direct",)

    def __init__(self, numel: int, format: Format) -> None:
        self._direct = Direct(decodes(1, numel, format))

    def __call__(self, parts: PackedParts, out: Tensor) -> Tensor:
        """`out`, filled with decoded values."""
        codes, scales, minimums = parts.codes, parts.scales, parts.minimums
        assert codes is not None and scales is not None
        index, target, code_at = out.get_device(), out.data_ptr(), codes.data_ptr()
        key, scale_at = (index, torch.uint8, out.dtype), scales.data_ptr()
        minimum_at = scale_at if minimums is None else minimums.data_ptr()
        compiled = self._direct.find(key, code_at | target | scale_at | minimum_at)
        if compiled is not None:
            run_direct(compiled, index, (code_at, target, scale_at, minimum_at, target, target))
            return out
        scales = scales.view(AS_INTEGERS[scales.dtype])
        minimums = scales if minimums is None else minimums.view(AS_INTEGERS[minimums.dtype])
        self._direct.launch(key, (codes, out, scales, minimums, out, out))
        return out

    def strided(self, parts: PackedParts, size: torch.Size, stride: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A new dense tensor with these sizes and strides, filled with decoded values in the order of memory."""
        assert parts.codes is not None
        return self(parts, empty_strided(size, stride, dtype, parts.codes))


def _parts_and_pointers(flat: Flat, x: Tensor, step: Tensor | None) -> tuple[list[Tensor], tuple[Tensor | None, ...]]:
    """[codes, scales] or [codes, scales, minimums] for flat `x`, each flat and empty, and the pointers of `encode_kernel`."""
    device = x.device
    codes = torch.empty(flat.num_bytes, dtype=torch.uint8, device=device)
    scales = torch.empty(flat.num_blocks, dtype=flat.scale, device=device)
    parts, lowest = [codes, scales], scales
    if flat.minimum is not None:
        lowest = torch.empty(flat.num_blocks, dtype=flat.minimum, device=device)
        parts.append(lowest)
    source = x.view(torch.int16) if x.dtype is torch.bfloat16 else x
    shared = (scales.view(AS_INTEGERS[scales.dtype]), lowest.view(AS_INTEGERS[lowest.dtype]))
    return parts, (source, codes, *shared, source, source, step, source)


def decode_flat(parts: PackedParts, format: Format, out: Tensor) -> Tensor:
    """Flat `out`, filled with decoded values; the format has blocks and no tensor scale."""
    return _decoder(out.numel(), format)(parts, out)


@lru_cache(maxsize=4096)
def _decoder(numel: int, format: Format) -> FlatDecoder:
    return FlatDecoder(numel, format)


@lru_cache(maxsize=4096)
def _flat(numel: int, how: Any, step_in_memory: bool, wide: bool) -> Flat:
    format: Format = how[0]
    stored = {"fp32": torch.float32, "bf16": torch.bfloat16}
    assert format.scale is not None
    minimum = stored[format.minimum.name] if format.minimum else None
    scale = stored.get(format.scale.name, torch.uint8)
    return Flat(
        format.row_bytes(numel), format.blocks_per_row(numel), scale, minimum, encodes(1, numel, how, True, step_in_memory, wide)
    )


@cache
def covers_recompute(format: Format) -> bool:
    """Whether the kernels for flat tensors cover a format: blocks of a float or an integer."""
    encoding = Encoding(format, Rounding.NEAREST_EVEN, Overflow.SATURATE)
    return (
        format.block is not None
        and format.element.kind is not ElementKind.TABLE
        and not format.has_tensor_scale
        and covers(encoding, "decode")
    )


def recompute(packed: PackedTensor, steps: DecodeSteps, out: Tensor) -> Tensor:
    """`out`, dense: the recomputed output from flat packed values, in the order of memory; see `codec/recompute.py`."""
    norm, parts, numel, dtype = steps.norm, packed.parts, packed.shape.numel(), out.dtype
    shape = (norm.channels, norm.inner, norm.by_row, norm.weight is not None, norm.bias is not None) if norm else None
    direct = _recomputes(numel, packed.format, shape, steps.activation)
    given = (norm.weight, norm.bias, norm.mean, norm.rstd) if norm else (None,) * 4
    tensors = (packed.codes, out, parts.scales, parts.minimums, *given, steps.bits)
    target, index = out.data_ptr(), out.get_device()
    scale_at = parts.scales.data_ptr() if parts.scales is not None else target
    addresses = [target if t is None else t.data_ptr() for t in tensors]
    key, together = (index, torch.uint8, dtype), scale_at
    for address in addresses:
        together |= address
    compiled = direct.find(key, together)
    if compiled is not None:
        run_direct(compiled, index, tuple(addresses))
    else:
        direct.launch(key, (packed.codes, out, *shared_of(parts, out)[:2], *(out if t is None else t for t in tensors[4:])))
    return out


@lru_cache(maxsize=1024)
def _recomputes(numel: int, format: Format, norm: tuple[int, int, bool, bool, bool] | None, activation: str) -> Direct:
    """Launches for full tiles and for the rest; `norm`: channels, inner, by_row, has a weight, has a bias."""
    channels, inner, by_row, has_weight, has_bias = norm or (1, 1, False, False, False)
    kind = NO_NORM if norm is None else ROWS if by_row else CHANNELS
    tile, group = _recompute_tile(format, norm)
    constants = {
        "ELEMENT": element_constants(format.element, Overflow.SATURATE), **block_constants(format), "NORM": kind.value,
        "HAS_WEIGHT": has_weight, "HAS_BIAS": has_bias, "CHANNEL_COUNT": channels, "INNER": inner,
        "ACTIVATION": STEPS[activation].value, "GROUP": group, "TILE": tile, "num_warps": max(1, tile // 1024),
    }  # fmt: skip
    del constants["HAS_TENSOR_SCALE"]
    sizes = (numel, format.row_bytes(numel), format.blocks_per_row(numel))
    parts = ((0, numel // tile, False), (numel // tile, int(numel % tile > 0), True))
    return Direct(
        [
            Launch(recompute_kernel, count, (first, *sizes), {**constants, "MASKED": masked})
            for first, count, masked in parts
            if count
        ]
    )


def _recompute_tile(format: Format, norm: tuple[int, int, bool, bool, bool] | None) -> tuple[int, int]:
    """(values per tile, channels of a group or 0): a tile lies within a row, or holds all channels a whole number of times, or has groups.

    On one H200 2^27.6 values of bf16 with 64 channels took 0.196 ms in tiles of 4096 and 0.21 in tiles of 2048, and with 160 channels
    0.29 ms in groups and 1.0 ms in tiles of 128, which lie within a row (docs/log.md, 2026-11-17).
    """
    channels, inner, by_row = norm[:3] if norm is not None else (1, 2, False)
    divisor = channels & -channels  # its largest power-of-two divisor
    if inner != 1:
        tile, group = 2048, 0
    elif divisor == channels and not by_row:
        tile, group = 4096, 0
    elif by_row and divisor >= 1024:
        tile, group = min(divisor, 2048), 0
    else:
        tile, group = (2048, min(divisor, 64)) if divisor >= 16 else (128, 0)
    return max(tile, format.block or 0), group
