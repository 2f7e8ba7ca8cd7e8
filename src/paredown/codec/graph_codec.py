"""Operations that encode, decode and pack masks in graphs of torch.compile, with the bits of `reference.py`.

    paredown::encode        the codec of eager mode: Triton kernels on a GPU, compiled loops on a CPU. Compiled code calls it without the
                            dispatcher of torch. The step of the random bits is a tensor, which is read when it runs
    paredown::decode        `decode_in_graph` as one node, which Inductor fuses into its readers
    paredown::unpack_bits   the same for `unpack_mask_in_graph`; some twenty nodes for each would take longer to compile
    paredown::cast_all      casts of many tensors to one dtype, which Inductor makes one kernel of
    paredown::in_memory     a copy of a tensor that Inductor writes to memory once for all of its readers

The lowerings of these operations are in session/compiled/lowerings.py; where they do not cover a format or symbolic sizes, the functions
are traced into aten operations. Parts are 1-D, in the layout of the reference. Triton contracts value * scale + minimum into one fused
multiply-add, so on a GPU the last bit of an affine value may differ from the reference.

>>> step = torch.zeros(1, dtype=torch.int32)
>>> codes, scales = torch.ops.paredown.encode(torch.arange(8.0), step, [0], "int4/8@bf16", "nearest_even", "saturate", 0, 0)
>>> [hex(byte) for byte in codes.tolist()], scales.tolist()
(['0x10', '0x32', '0x54', '0x76'], [1.0])
>>> decode_in_graph((codes, scales), Format.parse("int4/8@bf16"), 8, torch.float32).tolist()
[0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]
>>> pack_mask_in_graph(torch.tensor([True, False, True])).tolist()
[5]
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import inf, nan, prod
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.nn.functional import pad

from paredown.codec import backend
from paredown.codec.packed import encode_flat
from paredown.codec.reference import COVER, Encoding
from paredown.formats.element import Element, ElementKind
from paredown.formats.format import Format
from paredown.formats.rounding import Overflow, Rounding, Seed

CASTS = {
    Element.parse("e4m3fn"): torch.float8_e4m3fn,
    Element.parse("e5m2"): torch.float8_e5m2,
    Element.parse("bf16"): torch.bfloat16,
    Element.parse("fp16"): torch.float16,
}
DIVIDES_BYTE = (1, 2, 4, 8)
SCALES = ("fp32", "bf16", "e8m0")

_LIBRARY = torch.library.Library("paredown", "DEF")
_LIBRARY.define(
    "encode(Tensor x, Tensor step, int[] order, str format, str rounding, str overflow, int seed, int tensor_id) -> Tensor[]"
)
_LIBRARY.define("decode(Tensor[] parts, str format, ScalarType dtype, int[] sizes, int[] dims) -> Tensor")
_LIBRARY.define("unpack_bits(Tensor bits, int[] sizes, int[] dims) -> Tensor")
_LIBRARY.define("cast_all(Tensor[] tensors, ScalarType dtype) -> Tensor[]")
_LIBRARY.define("in_memory(Tensor x) -> Tensor")


def covers(format: Format) -> bool:
    """Return whether `decode_in_graph`, the decoding in plain torch that torch.compile traces, supports this format."""
    element = format.element
    if format.block is None or format.scale is None:
        return element in CASTS
    if format.scale.name not in SCALES:
        return False
    if element.kind is ElementKind.UINT:
        return format.minimum is not None and element.width in DIVIDES_BYTE
    return element.width in DIVIDES_BYTE if element.kind is ElementKind.INT else element in CASTS and element.width == 8


# --- encode -----------------------------------------------------------------------------------------------------------


def encode(x: Tensor, step: Tensor, order: list[int], *how_and_seed: Any) -> list[Tensor]:
    """Encode `x` after permuting its dimensions to `order`; return [codes, scales] or [codes, scales, minimums], each 1-D.

    `step`, the training step, is one int32 on the device of `x`; `how_and_seed`: the last five arguments of `encode_flattened`.
    """
    return encode_flattened(x.permute(order).reshape(-1), step, *how_and_seed)


def encode_flattened(x: Tensor, step: Tensor, format: str, rounding: str, overflow: str, seed: int, tensor_id: int) -> list[Tensor]:
    """Return the codes, scales and minimums of `x`, which must be 1-D and contiguous, each as a 1-D tensor.

    `seed`, `tensor_id` and `step`, one int32 on the device of `x`, determine the random bits of stochastic rounding.
    """
    kernels = flat_encoder(x.shape[0], x.is_cuda, format, rounding, overflow, seed, tensor_id)
    if kernels is not None:
        return kernels(x, step)
    how = _encoding(format, rounding, overflow)
    packed = encode_flat(x, how.format, how.rounding, how.overflow, Seed(seed, tensor_id, step))
    return [part.view(-1) for part in packed.parts.tensors()]


@lru_cache(maxsize=4096)
def flat_encoder(numel: int, is_cuda: bool, format: str, rounding: str, overflow: str, seed: int, tensor_id: int) -> Any:
    """Return an encoder that runs Triton kernels on `numel` values; None on a CPU, or if no kernel encodes this format."""
    kernels, how = backend.find_kernels() if is_cuda else None, _encoding(format, rounding, overflow)
    if kernels is None or how.format.block is None or not kernels.covers(how, "encode"):
        return None
    return kernels.FlatEncoder(numel, (how.format, how.rounding, how.overflow, COVER), Seed(seed, tensor_id))


def part_kinds(numel: int, format: str, rounding: str, overflow: str) -> list[tuple[int, torch.dtype]]:
    """Return (length, dtype) of each tensor that `encode` returns for `numel` values."""
    parts = _encoding(format, rounding, overflow).empty_parts(1, numel, device=torch.device("meta"), tensor_scale=None)
    return [(part.numel(), part.dtype) for part in parts.tensors()]


def _empty_parts(x: Tensor, _step: Tensor, _order: list[int], format: str, rounding: str, overflow: str, *_: int) -> list[Tensor]:
    return [x.new_empty(count, dtype=dtype) for count, dtype in part_kinds(x.numel(), format, rounding, overflow)]


@lru_cache(maxsize=64)
def _encoding(format: str, rounding: str, overflow: str) -> Encoding:
    return Encoding(Format.parse(format), Rounding(rounding), Overflow(overflow))


# --- decode -----------------------------------------------------------------------------------------------------------


def decode(parts: list[Tensor], format: str, dtype: torch.dtype, sizes: list[int], dims: list[int]) -> Tensor:
    """Return the tensor of shape `sizes` that is decoded from codes, scales and minimums, with dimensions permuted by `dims`."""
    return decode_in_graph(parts, Format.parse(format), prod(sizes), dtype).view(sizes).permute(dims)


def decode_in_graph(parts: Sequence[Tensor], format: Format, numel: int, dtype: torch.dtype) -> Tensor:
    """Return the `numel` values, 1-D, decoded from `parts`, the codes, scales and minimums that `paredown::encode` returned.

    It consists of torch operations that torch.compile traces. Finite values stay finite in float16.
    """
    element = format.element
    y = parts[0].view(CASTS[element]).float() if element in CASTS else _unpacked(parts[0], format, numel).float()
    if format.block and format.scale:
        y = y * _spread(_scale_values(parts[1], format), format.block, numel)
        if format.minimum:
            y = y + _spread(parts[2].float(), format.block, numel)
    if dtype is torch.float16:
        y = torch.where(y.abs() < inf, y.clamp(-65504.0, 65504.0), y)
    return y.to(dtype)


def largest_in_graph(x: Tensor, parts: Sequence[Tensor], format: Format) -> Tensor:
    """Return an upper bound on |x|, computed from the scales and minimums in `parts`, to which `x` was encoded.

    For a format without blocks, which has no scales, it is max |x|. The bound is NaN if `x` is not finite.
    """
    if format.block is None or format.scale is None:
        largest = x.abs().amax().float()
        return torch.where(largest < inf, largest, nan)
    scales = _scale_values(parts[1], format)
    low = parts[2].float() if format.minimum else scales * 0
    return torch.maximum(low.abs(), (low + scales * format.element.max_value).abs()).amax()


def _scale_values(scales: Tensor, format: Format) -> Tensor:
    if format.scale is None or format.scale.name != "e8m0":
        return scales.float()
    codes = scales.to(torch.int32)
    bits = torch.where(codes == 0, 0x400000, codes << 23)
    return torch.where(codes == 255, nan, bits.view(torch.float32))


def _unpacked(packed: Tensor, format: Format, numel: int) -> Tensor:
    """Return `numel` codes as 1-D integers, from bytes that may hold several, by few operations: each takes time to compile."""
    width, is_signed = format.element.width, format.element.kind is ElementKind.INT
    if width == 8:
        return packed.to(torch.int8) if is_signed else packed
    first = torch.arange(0, 8, width, dtype=torch.int32, device=packed.device)  # the lowest bit of each
    words = packed.to(torch.int32).view(-1, 1)
    fields = (words << ((32 - width) - first)) >> (32 - width) if is_signed else (words >> first) & ((1 << width) - 1)
    return _first(fields.reshape(-1), numel)


def _spread(per_block: Tensor, block: int, numel: int) -> Tensor:
    """Return a tensor (numel,) that has for each value the number of its block from `per_block`, (num_blocks,).

    Products of (num_blocks, block) and (num_blocks, 1) would make slower kernels (ResNet-50: 5 %). If the last block is short, indices are
    computed: Inductor on the CPU (2.13) splits a loop over i that reads x[i // block] into whole blocks and drops the rest.
    """
    if statically_known_true(numel % block == 0):
        return per_block[:, None].expand(-1, block).reshape(-1)
    is_wide = isinstance(numel, int) and numel > 1 << 31  # pyright: ignore[reportUnnecessaryIsInstance]  (a SymInt is no int)
    index = torch.arange(numel, dtype=torch.int64 if is_wide else torch.int32, device=per_block.device)
    index = index ^ 0  # the xor keeps Inductor from reading i // block out of it
    if block & (block - 1) == 0:  # a shift, since integer division in AVX2 is wrong in Inductor of torch 2.11
        return per_block[index >> (block.bit_length() - 1)]
    return per_block[torch.div(index, block, rounding_mode="floor")]


def _first(x: Tensor, count: int) -> Tensor:
    return x if statically_known_true(x.shape[0] == count) else x[:count]


# --- masks ------------------------------------------------------------------------------------------------------------


def unpack_bits(bits: Tensor, sizes: list[int], dims: list[int]) -> Tensor:
    """Return the booleans stored in `bits`, eight to a byte, as a tensor of shape `sizes` with dimensions permuted by `dims`."""
    return unpack_mask_in_graph(bits, prod(sizes)).view(sizes).permute(dims)


def pack_mask_in_graph(mask: Tensor) -> Tensor:
    """Return a 1-D boolean tensor as bits in uint8, eight values in each byte, the first one in the lowest bit."""
    flags, count = mask.to(torch.int32), mask.shape[0]
    is_whole = statically_known_true(count % 8 == 0)
    num_bytes = count // 8 if is_whole else (count + 7) // 8
    flags = flags if is_whole else pad(flags, (0, num_bytes * 8 - count))
    # One sum of 8 numbers is a reduction to Inductor, which reads memory in order: 122 us for 2^27.6 values on one H200, 205 us unrolled.
    # Words of 64 flags are one kernel with a norm, a ReLU and encode, which is slower: ResNet-50 in 8 bits took 49.9 instead of 45.0 ms.
    shifted = flags.view(num_bytes, 8) << torch.arange(8, dtype=torch.int32, device=mask.device)
    return shifted.sum(1, dtype=torch.int32).to(torch.uint8)


def unpack_mask_in_graph(bits: Tensor, numel: int) -> Tensor:
    """Return the first `numel` booleans, 1-D, of the bits that `pack_mask_in_graph` returned."""
    one_bit = 1 << torch.arange(8, dtype=torch.uint8, device=bits.device)
    return _first((bits[:, None] & one_bit).reshape(-1), numel) != 0


# --- operations of torch ----------------------------------------------------------------------------------------------


def cast_all(tensors: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Return `tensors` cast to another dtype; in a compiled graph it is one node, of which Inductor makes one kernel."""
    return [tensor.to(dtype) for tensor in tensors]


def in_memory(x: Tensor) -> Tensor:
    """Return a copy of `x`; in a compiled graph it makes Inductor write `x` to memory once for all of its readers."""
    return x.clone()


def _empty(source: Tensor, dtype: torch.dtype, sizes: list[int], dims: list[int]) -> Tensor:
    return source.new_empty(sizes, dtype=dtype).permute(dims)


for _device in ("CUDA", "CPU"):
    for _function in (encode, decode, unpack_bits, cast_all, in_memory):
        _LIBRARY.impl(_function.__name__, _function, _device)
torch.library.register_fake("paredown::encode", _empty_parts, lib=_LIBRARY)
torch.library.register_fake("paredown::decode", lambda parts, *t: _empty(parts[0], *t[-3:]), lib=_LIBRARY)
torch.library.register_fake("paredown::unpack_bits", lambda bits, *t: _empty(bits, torch.bool, *t), lib=_LIBRARY)
torch.library.register_fake("paredown::cast_all", cast_all, lib=_LIBRARY)
torch.library.register_fake("paredown::in_memory", torch.empty_like, lib=_LIBRARY)
