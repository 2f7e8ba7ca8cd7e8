"""`FlatEncoder` and `BufferCodec` encode and decode the flat tensors of a step; `recompute` also applies a norm.

Everything that depends on the size and the format alone is computed once and cached.

Recomputation: decode, apply a norm and an activation function, in one pass over memory. `codec/recompute.py` has the formulas.

codes   [ c0 c1 c2 c3 c4 c5 c6 c7 ]      one program decodes a tile of TILE values,
norm    [ n0 n1 n2 n3 n0 n1 n2 n3 ]      normalises each by its channel (here 4 of them, next to each other),
bits    [ b7..b0                  ]      and zeroes the values that ReLU zeroed
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from typing import Any, final

import torch
import triton
import triton.language as tl
from torch import Tensor

from paredown.codec.kernels.launch import Direct, Launch, empty_strided
from paredown.codec.kernels.masks import load_bits
from paredown.codec.kernels.pack import NONE, decode_blocks, load_codes, load_shared, store_values
from paredown.codec.kernels.rows import (
    AS_INTEGERS,
    NOT_RANDOM,
    block_constants,
    covers,
    decodes,
    element_constants,
    encodes,
    random_of,
    shared_of,
)
from paredown.codec.packed import FLAT, FlatCodec, PackedTensor
from paredown.codec.recompute import DecodeSteps, Layout
from paredown.codec.reference import COVER, Encoding, PackedParts
from paredown.formats.element import ElementKind
from paredown.formats.format import Format
from paredown.formats.rounding import Overflow, Rounding, Seed, signed

# --- Decoding with a norm and an activation function ---

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
    """Return tanh of x, computed by exp of -2 |x|, which cannot overflow."""
    t = tl.exp(-2.0 * tl.abs(x))
    y = (1.0 - t) / (1.0 + t)
    return tl.where(x < 0.0, -y, y)


@triton.jit
def erf(x):
    """Return erf of x within 1.5e-7, by formula 7.1.26 of Abramowitz and Stegun, which is faster than the library's."""
    a = tl.abs(x)
    t = 1.0 / (1.0 + 0.3275911 * a)
    tail = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))))
    y = 1.0 - tail * tl.exp(-a * a)
    return tl.where(x < 0.0, -y, y)


@triton.jit
def activated(x, ACTIVATION: tl.constexpr):
    """Return GELU, its approximation by tanh, or SiLU of x, as ACTIVATION says; x itself for any other value."""
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
    """Return the number of the channel of each of TILE values from index `start` on; INNER adjacent values share a channel."""
    if INNER == 1 and TILE % CHANNEL_COUNT == 0:
        return tl.arange(0, TILE) % CHANNEL_COUNT
    elif INNER == 1 and CHANNEL_COUNT % TILE == 0:
        return (start % CHANNEL_COUNT).to(tl.int32) + tl.arange(0, TILE)
    else:
        place = (start % (CHANNEL_COUNT * INNER)).to(tl.int32) + tl.arange(0, TILE)
        return (place // INNER) % CHANNEL_COUNT


@triton.jit
def affine(x, weight_ptr, bias_ptr, channel, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr):
    """Return `x` times the weight plus the bias of each value's `channel`, where there are a weight and a bias."""
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
    """Return the output of a norm layer for `x`, the TILE values of its flat input from index `start` on.

    NORM says whether the mean and 1 / standard deviation at `mean_ptr` and `deviation_ptr` are by channel or by row.
    """
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
    """Return what `normed` returns, for `x` of shape (TILE / GROUP, GROUP), whose rows are GROUP adjacent channels.

    Their weights and biases are read as vectors, which is faster.
    """
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
    """Decode one tile of a flat tensor, apply a norm and an activation function to it, and store the result."""
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

UINT8, FLAT_STRIDE = torch.uint8, (1,)

STEPS = {
    "": IDENTITY,
    "relu": RELU,
    "gelu": GELU,
    "gelu_tanh": GELU_TANH,
    "silu": SILU,
}


class FlatEncoder:
    """An encoder for flat tensors of `numel` values, which reads the training step, for random bits, from device memory.

    It returns [codes, scales] or [codes, scales, minimums], each flat. `how`: format, rounding, overflow and the rule "cover" of scales.
    """

    __slots__ = ("_arguments", "_direct", "_is_random", "_scalars", "_with_bits", "kinds")

    def __init__(self, numel: int, how: Any, seed: Seed) -> None:
        random = random_of(seed, numel, how[1])
        self._is_random = random is not NOT_RANDOM
        k0, k1 = map(signed, seed.base_keys()) if self._is_random else (0, 0)
        self._arguments, self._scalars = (1, numel, how, True, self._is_random, random.wide), (seed.first_index, k0, k1)
        self._direct, self._with_bits = Direct(encodes(*self._arguments), self._scalars), None
        parts = Encoding(*how[:3]).empty_parts(1, numel, device=torch.device("meta"), tensor_scale=None)
        self.kinds = [(part.numel(), part.dtype) for part in parts.tensors()]  # length and dtype of codes, scales and minimums

    def __call__(self, x: Tensor, step: Tensor) -> list[Tensor]:
        """Return the codes, scales and minimums of dense `x` in memory order; `step` is one int32 on the device of `x`."""
        parts = [empty_strided((count,), FLAT_STRIDE, dtype, x) for count, dtype in self.kinds]
        self.encode_into(x, step, *parts)
        return parts

    def encode_into(self, x: Tensor, step: Tensor, *parts: Tensor) -> None:
        """Write the codes, scales and minimums of `x` into the tensors `parts`; `step`: the training step, one int32."""
        addresses = parts[0].data_ptr(), parts[1].data_ptr(), parts[-1].data_ptr()
        self.encode_at(x, step, addresses, lambda: parts)

    def encode_at(
        self, x: Tensor, step: Tensor, at: tuple[int, int, int], parts: Callable[[], Sequence[Tensor]], bits: Tensor | None = None
    ) -> None:
        """Write the codes, scales and minimums of `x` to the addresses `at`.

        `parts` returns the tensors at these addresses, and is called only if they are needed. `bits`: a tensor to fill with one bit per
        value, 1 for values above 0; None for no such mask.
        """
        source = x.data_ptr()
        direct, bits_at = (self._direct, source) if bits is None else (self._encoder_of_bits(), bits.data_ptr())
        step_at = step.data_ptr() if self._is_random else None
        key = (x.get_device(), x.dtype, UINT8)
        if not direct.run(key, source | bits_at, (source, *at, source, source, step_at, bits_at)):
            values = x.view(torch.int16) if x.dtype is torch.bfloat16 else x
            given = (step if self._is_random else None), values if bits is None else bits
            direct.launch(key, (values, *_as_integers(parts()), values, values, *given))

    def _encoder_of_bits(self) -> Direct:
        if self._with_bits is None:
            self._with_bits = Direct(encodes(*self._arguments, True), self._scalars)
        return self._with_bits


def _as_integers(parts: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes, scales and minimums as the integers that kernels read; without minimums, the scales take their place."""
    codes, scales, lowest = (part.view(AS_INTEGERS[part.dtype]) for part in (parts[0], parts[1], parts[-1]))
    return codes, scales, lowest


@final
class BufferCodec(FlatCodec):
    """A codec that stores codes, scales and minimums in one buffer: encoding takes one allocation and one launch.

        buffer   [ codes ... | scales ... | minimums ... ]      uint8; each part begins at a multiple of 16 bytes

    `how`: rounding and overflow. The step is in the memory of the GPU.
    """

    __slots__ = ("_decodes", "_encoder", "_places", "_recomputes", "_size")
    takes_address = True

    def __init__(self, numel: int, dtype: torch.dtype, format: Format, how: tuple[Rounding, Overflow], seed: Seed) -> None:
        super().__init__(numel, dtype, format)
        self._encoder, self._decodes = FlatEncoder(numel, (format, *how, COVER), seed), Direct(decodes(1, numel, format))
        self._recomputes: dict[Any, Direct] = {}  # launches by the shape of the norm and the activation function
        self._places: list[tuple[int, int, torch.dtype]] = []  # first byte, bytes and dtype of codes, scales, minimums
        end = 0
        for count, stored in self._encoder.kinds:
            start = -(-end // 16) * 16  # kernels are compiled for addresses that are multiples of 16
            end = start + count * stored.itemsize
            self._places.append((start, count * stored.itemsize, stored))
        self._size = (end,)

    def encode(self, x: Tensor, step: Tensor, bits: Tensor | None = None) -> Tensor:
        """Return a buffer with the codes, scales and minimums of the codec's number of values, which begin where `x` begins.

        `step` is one int32 on the GPU. `bits`: a tensor to fill with one bit per value, 1 for values above 0, or None.
        """
        buffer = empty_strided(self._size, FLAT_STRIDE, UINT8, x)
        self._encoder.encode_at(x, step, self._addresses(buffer), lambda: self._parts(buffer), bits)
        return buffer

    def decode(self, stored: Tensor, size: tuple[int, ...], stride: tuple[int, ...]) -> Tensor:
        """Return the values decoded from the buffer `stored`, as a tensor with these sizes and strides."""
        out = empty_strided(size, stride, self.dtype, stored)
        target, (at, scales_at, minimums_at) = out.data_ptr(), self._addresses(stored)
        key = (stored.get_device(), UINT8, self.dtype)
        if not self._decodes.run(key, at, (at, target, scales_at, minimums_at, target, target)):
            codes, *shared = _as_integers(self._parts(stored))
            self._decodes.launch(key, (codes, out, *shared, out, out))
        return out

    def recompute(self, stored: Tensor, steps: DecodeSteps, dtype: torch.dtype, layout: Layout) -> Tensor:
        """Return the output of `steps`, a norm and an activation function, on the values decoded from the buffer `stored`.

        `layout`: the sizes and strides of the result, which has the given dtype.
        """
        out, norm = empty_strided(*layout, dtype, stored), steps.norm
        key = steps.activation, None if norm is None else norm.shape
        direct = self._recomputes.get(key)
        if direct is None:
            direct = self._recomputes[key] = _recomputes(self.numel, self.format, key[1], key[0])
        if not _run_recompute(direct, self._addresses(stored), steps, out):
            recompute(self.packed(stored), steps, out)
        return out

    def packed(self, stored: Tensor) -> PackedTensor:
        """Return the contents of the buffer `stored` as a packed tensor, whose codes, scales and minimums are views of it."""
        parts = PackedParts(*(part.view(1, -1) for part in self._parts(stored)))
        return PackedTensor(self.format, torch.Size((self.numel,)), self.dtype, FLAT, parts)

    def _addresses(self, buffer: Tensor) -> tuple[int, int, int]:
        at, places = buffer.data_ptr(), self._places
        return at, at + places[1][0], at + places[-1][0]

    def _parts(self, buffer: Tensor) -> list[Tensor]:
        """Return the parts of the buffer as flat tensors: [codes, scales] or [codes, scales, minimums]."""
        return [buffer[start : start + length].view(dtype) for start, length, dtype in self._places]


@cache
def covers_recompute(format: Format) -> bool:
    """Return whether `recompute_kernel` can decode this format: only floats and integers in blocks."""
    encoding = Encoding(format, Rounding.NEAREST_EVEN, Overflow.SATURATE)
    return (
        format.block is not None
        and format.element.kind is not ElementKind.TABLE
        and not format.has_tensor_scale
        and covers(encoding, "decode")
    )


def recompute(packed: PackedTensor, steps: DecodeSteps, out: Tensor) -> Tensor:
    """Decode `packed`, apply `steps` (a norm, an activation function), and write the result into `out`, which is returned."""
    parts, numel = packed.parts, packed.shape.numel()
    assert parts.codes is not None and parts.scales is not None
    scale_at = parts.scales.data_ptr()
    addresses = parts.codes.data_ptr(), scale_at, scale_at if parts.minimums is None else parts.minimums.data_ptr()
    norm = steps.norm
    direct = _recomputes(numel, packed.format, None if norm is None else norm.shape, steps.activation)
    if not _run_recompute(direct, addresses, steps, out):
        tensors = () if norm is None else (norm.weight, norm.bias, norm.mean, norm.rstd)
        given = (out if t is None else t for t in (*(tensors or (None,) * 4), steps.bits))
        direct.launch((out.get_device(), torch.uint8, out.dtype), (packed.codes, out, *shared_of(parts, out)[:2], *given))
    return out


def _run_recompute(direct: Direct, addresses: tuple[int, int, int], steps: DecodeSteps, out: Tensor) -> bool:
    """Launch the kernels of `recompute` and return True if they are compiled; otherwise return False: Triton must do it.

    `addresses`: of codes, scales and minimums in device memory.
    """
    norm, bits, target = steps.norm, steps.bits, out.data_ptr()
    codes_at, scales_at, minimums_at = addresses
    weight_at = bias_at = mean_at = rstd_at = target
    if norm is not None:
        weight_at = weight_at if norm.weight is None else norm.weight.data_ptr()
        bias_at = bias_at if norm.bias is None else norm.bias.data_ptr()
        mean_at, rstd_at = norm.mean.data_ptr(), norm.rstd.data_ptr()
    bits_at = target if bits is None else bits.data_ptr()
    address = target | codes_at | scales_at | minimums_at | weight_at | bias_at | mean_at | rstd_at | bits_at
    given = codes_at, target, scales_at, minimums_at, weight_at, bias_at, mean_at, rstd_at, bits_at
    return direct.run((out.get_device(), torch.uint8, out.dtype), address, given)


@lru_cache(maxsize=1024)
def _recomputes(numel: int, format: Format, norm: tuple[int, int, bool, bool, bool] | None, activation: str) -> Direct:
    """Return the launches of `recompute_kernel` for `numel` values: one for full tiles and one for the rest.

    `norm`: channels, values per channel, and whether statistics are by row and there are a weight and a bias; None without a norm.
    """
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
    """Return how many values a tile of `recompute_kernel` has, and how many channels it loads as one vector (0 for none).

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
