"""Encode, decode and one-bit masks as torch functions without branches on data, to be traced into the graphs of torch.compile.

`reference.py` defines the results. These functions compute the same bits for the formats that `covers` lists; TorchInductor fuses them
into the operations that produce x and that use the decoded values. Sizes may be symbolic. For each block, in float32:

    plain     scale = round_up(max |x| / max_value)                            y = x / scale
    affine    minimum = round_down(min x), scale = round_up((max x - minimum) / max_value),  y = (x - minimum) / scale
    integers  nearest_even: code = round(y)      others: |code| = (floor(|y| * 2^R) + r) >> R,   R = 30 - mantissa_bits
    floats    nearest_even: the cast to torch.float8_e4m3fn, float8_e5m2, bfloat16 or float16
              others: the bits of |y| plus r with the dropped bits cleared (as in `cpu.py`), then the same cast, which is exact

with r = 0 (toward_zero), the half of a step (nearest_away) or random bits (stochastic). The quotient by max_value is a float64 product
rounded to float32: equal to the float32 quotient for all max_value of these elements, while Inductor replaces a division by a constant
on a GPU with an inexact product. 1 / scale is a float32 reciprocal. Triton's is not correctly rounded by default, and it contracts
value * scale + minimum into one fused multiply-add, so on a GPU a code or the last bit of an affine value may differ from the reference.

Layout. 8-bit codes are uint8, in order. bf16 and fp16 without a block are tensors of that dtype, in which NaN has any sign and payload.
Narrower codes: a block of n values takes n * width / 8 bytes, and byte j holds the values j, j + n/2 (4 bits) or j, j + n/4, j + 2n/4,
j + 3n/4 (2 bits), the first lowest. Loads are then contiguous, and packing has the same loop as the maximum of a block, over
(num_blocks, n/2), so that Inductor makes one kernel of both. A short last block takes the bytes of a whole one. Where the block
length is not a multiple of the values in a byte, the layout is the reference's.

    int4/8:   bytes  [v4 v0] [v5 v1] [v6 v2] [v7 v3]

Arithmetic on codes and random bits is int32, a shift right of random bits is logical. Masks: eight flags a byte, the first lowest.

>>> from paredown.formats.format import Format
>>> int4 = Format.parse("int4/8@bf16")
>>> codes, scales = encode_in_graph(torch.arange(8.0), int4, Rounding.NEAREST_EVEN, Overflow.SATURATE, None)
>>> [hex(byte) for byte in codes.tolist()], scales.tolist()
(['0x40', '0x51', '0x62', '0x73'], [1.0])
>>> decode_in_graph((codes, scales), int4, 8, torch.float32).tolist()
[0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]
>>> pack_mask_in_graph(torch.tensor([True, False, True])).tolist()
[5]
"""

from __future__ import annotations

from functools import reduce
from math import inf, nan

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.nn.functional import pad

from paredown.codec.reference import SMALLEST_SCALE
from paredown.errors import CodecError
from paredown.formats import rounding as hashing
from paredown.formats.element import Element, ElementKind
from paredown.formats.format import Format
from paredown.formats.rounding import WORD, Overflow, Rounding, Seed

CASTS = {
    Element.parse("e4m3fn"): torch.float8_e4m3fn,
    Element.parse("e5m2"): torch.float8_e5m2,
    Element.parse("bf16"): torch.bfloat16,
    Element.parse("fp16"): torch.float16,
}
DIVIDES_BYTE = (1, 2, 4, 8)
SCALES = ("fp32", "bf16", "e8m0")


def covers(format: Format) -> bool:
    """Return whether the functions of this module support this format."""
    element = format.element
    if format.block is None or format.scale is None:
        return element in CASTS
    if format.scale.name not in SCALES:
        return False
    if element.kind is ElementKind.UINT:
        return format.minimum is not None and element.width in DIVIDES_BYTE
    return element.width in DIVIDES_BYTE if element.kind is ElementKind.INT else element in CASTS and element.width == 8


def encode_in_graph(x: Tensor, format: Format, rounding: Rounding, overflow: Overflow, keys: Tensor | None) -> tuple[Tensor, ...]:
    """Return (codes, scales, minimums) of 1-D contiguous `x`, the last two if the format has them.

    `keys`: None, or for stochastic rounding the two words of `keys_in_graph` as int32 or int64. Index 0 is the first value of `x`.
    """
    _check(format, rounding, keys)
    x = x.float()
    if format.block is None:
        bits = _bits(_indices(x.shape[0], x.device), rounding, keys)
        return (_cast_codes(x, format.element, overflow, rounding, bits),)
    scales, scale, minimum = _choose_scales(x, format)
    inverse = _own_buffer(torch.where(scale == 0, 0.0, scale.reciprocal()))[:, None]  # NaN where the scale is
    indices = _indices(scale.shape[0] * format.block, x.device)
    values, index, codes = _lanes(x, format, 0.0), _lanes(indices, format, 0), []
    for value, i in zip(values, index, strict=True):
        y = (value if minimum is None else value - minimum[:, None]) * inverse
        codes.append(_block_codes(torch.where(y.isnan(), 0.0, y), format.element, rounding, _bits(i, rounding, keys)))
    packed = _packed(codes, format, x.shape[0])
    if minimum is None or format.minimum is None:
        return packed, scales
    return packed, scales, torch.where(scale.isnan(), 0.0, minimum).to(_stored_dtype(format.minimum))


def decode_in_graph(parts: tuple[Tensor, ...], format: Format, numel: int, dtype: torch.dtype, *, in_order: bool = False) -> Tensor:
    """Return the `numel` values, 1-D, of what `encode_in_graph` returned. Finite values past float16's largest stay finite.

    `in_order`: the bytes hold neighbours, as in the reference.
    """
    element = format.element
    if element in CASTS:
        y = (parts[0].view(CASTS[element]) if element.width == 8 else parts[0]).float()
    else:
        y = _unpacked(parts[0], format, numel, in_order).float()
    if format.block and format.scale:
        scales = parts[1]
        y = y * _spread(_e8m0_values(scales) if format.scale.name == "e8m0" else scales.float(), format.block, numel)
        if format.minimum:
            y = y + _spread(parts[2].float(), format.block, numel)
    if dtype is torch.float16:
        y = torch.where(y.abs() < inf, y.clamp(-65504.0, 65504.0), y)
    return y.to(dtype)


def largest_in_graph(x: Tensor, parts: tuple[Tensor, ...], format: Format) -> Tensor:
    """Return a bound on the magnitudes of encoded `x`: the largest one that its scales and minimums allow; max |x| without a block.

    NaN if `x` is not finite.
    """
    if format.block is None or format.scale is None:
        largest = x.abs().amax().float()
        return torch.where(largest < inf, largest, nan)
    scales = _e8m0_values(parts[1]) if format.scale.name == "e8m0" else parts[1].float()
    low = parts[2].float() if format.minimum else scales * 0
    return torch.maximum(low.abs(), (low + scales * format.element.max_value).abs()).amax()


def _check(format: Format, rounding: Rounding, keys: Tensor | None) -> None:
    if not covers(format):
        raise CodecError(
            f"format {str(format)!r} has no encode for compiled graphs. Covered: intN and uintN with a minimum of 1, 2, 4 or 8 bits, "
            "e4m3fn and e5m2 in blocks with scales in fp32, bf16 or e8m0, and e4m3fn, e5m2, bf16 and fp16 without a block."
        )
    if rounding is Rounding.STOCHASTIC and keys is None:
        raise CodecError("stochastic rounding takes the two words of keys_in_graph as `keys`, not None.")


# --- random bits ------------------------------------------------------------------------------------------------------


def keys_in_graph(step: Tensor, seed: int, tensor_id: int) -> Tensor:
    """Return the words of `Seed(seed, tensor_id, step).keys()` as (2,) int32, from `step`, an int64 tensor of one number."""
    k0, k1 = (_signed(key) for key in Seed(seed, tensor_id).base_keys())
    base = torch.where(torch.arange(2, device=step.device) == 0, k0, k1).to(torch.int32)
    x = (base ^ _word(step.reshape(1))) + _signed(hashing.KEY_SALTS[0])
    x = (x ^ _shifted(x, 16)) * _signed(hashing.MULTIPLIER_1)
    x = (x ^ _shifted(x, 15)) * _signed(hashing.MULTIPLIER_2)
    return x ^ _shifted(x, 16)


def random_bits(index: Tensor, keys: Tensor) -> Tensor:
    """Return `reference.random_bits` of the elements `index` (int32 below 2^31, or int64), as int32 of the same bits."""
    k0, k1 = _word(keys[0]), _word(keys[1])
    low = _word(index) ^ 0  # without an xor, Inductor turns the product into a symbolic index, in which it overflows
    x = low * _signed(hashing.INDEX_STEP) + k0
    x = (x ^ _shifted(x, 16)) * _signed(hashing.MULTIPLIER_1)
    x = x ^ _shifted(x, 15) ^ k1
    if index.dtype is torch.int64:
        high = _word(index >> 32) * _signed(hashing.HIGH_INDEX)
        x = x ^ ((high ^ _shifted(high, 15)) * _signed(hashing.MULTIPLIER_2))
    return x * _signed(hashing.MULTIPLIER_2)


def _bits(index: Tensor, rounding: Rounding, keys: Tensor | None) -> Tensor | None:
    return random_bits(index, keys) if rounding is Rounding.STOCHASTIC and keys is not None else None


def _indices(count: int, device: torch.device) -> Tensor:
    wide = isinstance(count, int) and count > 1 << 31  # pyright: ignore[reportUnnecessaryIsInstance]  (a SymInt is no int)
    return torch.arange(count, dtype=torch.int64 if wide else torch.int32, device=device)


def _word(x: Tensor) -> Tensor:
    """Return the low 32 bits of integers as int32."""
    return x if x.dtype is torch.int32 else (((x & WORD) ^ (1 << 31)) - (1 << 31)).to(torch.int32)


def _signed(word: int) -> int:
    return word - (1 << 32) if word >> 31 else word


def _shifted(x: Tensor, shift: int) -> Tensor:
    """Return int32 `x` shifted right, with zeros in place of copies of the sign bit."""
    return (x >> shift) & ((1 << (32 - shift)) - 1)


# --- codes ------------------------------------------------------------------------------------------------------------


def _block_codes(y: Tensor, element: Element, rounding: Rounding, bits: Tensor | None) -> Tensor:
    """Return the codes of scaled values `y`: int32 for integers, uint8 for floats.

    `y` exceeds the element's range by rounding error alone.
    """
    largest = element.max_value
    if element.kind is ElementKind.FLOAT:
        return _rounded(y.clamp(-largest, largest), element, rounding, bits).to(CASTS[element]).view(torch.uint8)
    low, high = -int(largest) if element.signed else 0, int(largest)  # of integers: a clamp of floats costs a test for NaN
    if rounding is Rounding.NEAREST_EVEN:
        return y.round().to(torch.int32).clamp(low, high) & ((1 << element.width) - 1)
    kept = 30 - element.mantissa_bits
    steps = ((y.abs() if element.signed else y) * 2.0**kept).to(torch.int32).clamp(0, high << kept)
    codes = (steps + _addend(rounding, bits, kept)) >> kept
    sign = y.view(torch.int32) >> 31  # -1 or 0
    codes = (codes ^ sign) - sign if element.signed else codes  # -codes where y < 0; torch.where would use `codes` twice
    return codes & ((1 << element.width) - 1)


def _cast_codes(y: Tensor, element: Element, overflow: Overflow, rounding: Rounding, bits: Tensor | None) -> Tensor:
    """Return the codes of values in a format without a block.

    Inf and NaN of 8 bits are set as codes, since casts to float8 saturate on some devices only.
    """
    largest = element.max_value
    if overflow is Overflow.SATURATE:
        y = y.clamp(-largest, largest)
    values = torch.where(y.isnan(), y, _rounded(torch.where(y.isnan(), 0.0, y), element, rounding, bits))
    if element.width == 16:
        return values.to(CASTS[element])
    assert element.nan_code is not None
    codes = values.clamp(-largest, largest).to(CASTS[element]).view(torch.uint8).to(torch.int32)
    sign = (y.view(torch.int32) >> 24) & 128
    codes = torch.where(y.isnan(), sign | element.nan_code, codes)
    if overflow is Overflow.NONFINITE:
        special = element.nan_code if element.inf_code is None else element.inf_code
        codes = torch.where(_past(values.abs(), element, rounding), sign | special, codes)
    return codes.to(torch.uint8)


def _past(a: Tensor, element: Element, rounding: Rounding) -> Tensor:
    """Return whether each value that `_rounded` returned exceeds the largest value of the element.

    Under nearest_even, the values are not rounded yet.
    """
    if rounding is not Rounding.NEAREST_EVEN:
        return a > element.max_value
    middle = element.max_value + (element.max_value - element.value(element.max_code - 1)) / 2
    return a >= middle if element.max_code % 2 else a > middle


def _rounded(y: Tensor, element: Element, rounding: Rounding, bits: Tensor | None) -> Tensor:
    """Return `y` (not NaN) rounded to a multiple of the element's step, as float32; unchanged for nearest_even, which the cast rounds."""
    if rounding is Rounding.NEAREST_EVEN:
        return y
    a, smallest, dropped = y.abs(), 2.0**element.min_exponent, 23 - element.mantissa_bits
    has_float32_range = element.min_exponent == -126  # bf16: float32's own subnormals
    normal = (a if has_float32_range else a.clamp(min=smallest)).view(torch.int32)
    rounded = (normal + _addend(rounding, bits, dropped)) & -(1 << dropped)
    if not has_float32_range:  # the sum of normal and subnormal part, each clamped at the smallest normal value, less that value
        kept = 30 - element.mantissa_bits
        steps = (a.clamp(max=smallest) * (2.0**30 / smallest)).to(torch.int32) + _addend(rounding, bits, kept)
        subnormal = (steps >> kept).float() * (smallest * 2.0**-element.mantissa_bits)
        rounded = rounded + subnormal.view(torch.int32) - ((element.min_exponent + 127) << 23)
    return torch.copysign(rounded.view(torch.float32), y)


def _addend(rounding: Rounding, bits: Tensor | None, num_bits: int) -> Tensor | int:
    """Return the number to add before the lowest `num_bits` bits of an integer are dropped, so that the integer is rounded."""
    if bits is not None:
        return _shifted(bits, 32 - num_bits)
    return 1 << (num_bits - 1) if rounding is Rounding.NEAREST_AWAY else 0


# --- scales -----------------------------------------------------------------------------------------------------------


def _choose_scales(x: Tensor, format: Format) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the stored scales, and scales and minimums as float32, (num_blocks,) each."""
    if format.minimum is None:
        largest, minimum = reduce(torch.maximum, [lane.abs() for lane in _lanes(x, format, 0.0)]).amax(1), None
    else:
        low = reduce(torch.minimum, _lanes(x, format, inf)).amin(1)
        low = torch.where(low == 0, 0.0, low)  # -0.0 becomes 0.0
        minimum = _own_buffer(low if format.minimum.name == "fp32" else _bf16_away_from_zero(low, low < 0))
        largest = reduce(torch.maximum, _lanes(x, format, -inf)).amax(1)
        largest = (largest - minimum).abs()  # abs, since -0.0 has a sign bit
    scale = (largest.double() * (1.0 / format.element.max_value)).float()
    return *_stored_scales(scale, format), minimum


def _stored_scales(scale: Tensor, format: Format) -> tuple[Tensor, Tensor]:
    """Return the scales rounded up, as stored and as float32; those that are not finite, before or after, become NaN."""
    assert format.scale is not None
    if format.scale.name == "e8m0":
        codes = torch.where(scale < inf, _e8m0_codes(scale), 255).to(torch.uint8)
        return codes, _e8m0_values(codes)
    up = torch.where(scale > 0, scale.clamp(min=SMALLEST_SCALE), scale)
    if format.scale.name == "bf16":
        up = _bf16_away_from_zero(up, up > 0)
    up = torch.where((scale < inf) & (up < inf), up, nan)
    return up.to(_stored_dtype(format.scale)), up


def _bf16_away_from_zero(x: Tensor, away: Tensor) -> Tensor:
    """Return the bf16 value next to `x` as float32: the one of larger magnitude where `away`, else the smaller one."""
    return ((x.view(torch.int32) + away.to(torch.int32) * 0xFFFF) & -0x10000).view(torch.float32)


def _e8m0_codes(scale: Tensor) -> Tensor:
    """Return the e8m0 codes of scales, rounded up to a power of two: its exponent plus 127, or 0 up to 2^-127."""
    bits = scale.view(torch.int32)
    return torch.where(bits <= 0x400000, 0, (bits >> 23) + ((bits & 0x7FFFFF) != 0).to(torch.int32))


def _e8m0_values(codes: Tensor) -> Tensor:
    codes = codes.to(torch.int32)
    bits = torch.where(codes == 0, 0x400000, codes << 23)
    return torch.where(codes == 255, nan, bits.view(torch.float32))


def _stored_dtype(element: Element) -> torch.dtype:
    return torch.bfloat16 if element.name == "bf16" else torch.float32


# --- layout -----------------------------------------------------------------------------------------------------------


def lanes_per_block(format: Format) -> int:
    """Return how many codes share a byte in the layout of this module; 1 if a byte holds one code, or neighbours as in the reference."""
    per_byte = 8 // format.element.width
    assert format.block
    return 1 if format.block % per_byte else per_byte


def _lanes(x: Tensor, format: Format, fill: float) -> list[Tensor]:
    """Return the values whose codes share bytes, as one tensor (num_blocks, part) for each place in a byte.

    `x` is 1-D and padded with `fill`. The tensors are separate, so that all of encode has one shape: Inductor stores the result of some 30
    operations, and fuses the next ones only if their shape is the same.
    """
    assert format.block
    num_blocks, lanes = _ceil_div(x.shape[0], format.block), lanes_per_block(format)
    padded = _padded(x, num_blocks * format.block, fill).view(num_blocks, lanes, format.block // lanes)
    return [padded.select(1, lane) for lane in range(lanes)]


def _own_buffer(x: Tensor) -> Tensor:
    """Return `x`, 1-D and contiguous, in a form that Inductor writes to memory.

    Inductor stores the input of as_strided, which it would otherwise compute again for every value.
    """
    return x.as_strided((x.shape[0],), (1,))


def _packed(lanes: list[Tensor], format: Format, numel: int) -> Tensor:
    """Return codes packed into bytes, 1-D. Each tensor in `lanes`, (num_blocks, part), has the codes for one place in a byte."""
    width = format.element.width
    if len(lanes) > 1:
        shifted = [lane << (width * i) if i else lane for i, lane in enumerate(lanes)]
        return reduce(torch.bitwise_or, shifted).to(torch.uint8).flatten()
    codes = lanes[0].to(torch.uint8).flatten()
    if not statically_known_true(codes.shape[0] == numel):
        codes = codes.as_strided((numel,), (1,))
    return codes if width == 8 else _join_neighbours(codes.to(torch.int32), width)


def _unpacked(packed: Tensor, format: Format, numel: int, in_order: bool) -> Tensor:
    """Return the codes in bytes as `numel` integers, 1-D. `in_order`: the bytes hold neighbours.

    The function has few operations, since each takes time to compile.
    """
    width, is_signed = format.element.width, format.element.kind is ElementKind.INT
    if width == 8:
        return packed.to(torch.int8) if is_signed else packed
    lanes = 1 if in_order else lanes_per_block(format)
    part = format.block // lanes if format.block and lanes > 1 else 1
    first = torch.arange(0, 8, width, dtype=torch.int32, device=packed.device).view(-1, 1)  # the lowest bit of each
    words = packed.to(torch.int32).view(-1, 1, part)
    fields = (words << ((32 - width) - first)) >> (32 - width) if is_signed else (words >> first) & ((1 << width) - 1)
    return _first(fields.reshape(-1), numel)


def _join_neighbours(codes: Tensor, width: int) -> Tensor:
    """Return 1-D codes packed into bytes, as many neighbours in each as fit."""
    per_byte = 8 // width
    num_bytes = _ceil_div(codes.shape[0], per_byte)
    return _joined(_padded(codes, num_bytes * per_byte, 0).view(num_bytes, per_byte, 1), width).flatten()


def _joined(codes: Tensor, width: int) -> Tensor:
    """Return codes, (n, 8 / width, part) int32, packed into bytes, (n, part) uint8.

    Inductor unrolls sums of fewer than 8 numbers, so 8 are summed in two steps.
    """
    shifts = torch.arange(0, 8, width, dtype=torch.int32, device=codes.device)
    fields = codes << shifts.view(-1, 1)
    if width == 1:
        fields = fields.view(fields.shape[0], 2, 4, fields.shape[2]).sum(1, dtype=torch.int32)
    return fields.sum(1, dtype=torch.int32).to(torch.uint8)


def _spread(per_block: Tensor, block: int, numel: int) -> Tensor:
    """Return one value for each block, (num_blocks,), repeated for each value, (numel,).

    Products of (num_blocks, block) and (num_blocks, 1) would make slower kernels (ResNet-50: 5 %).

    A short last block takes computed indices: Inductor on the CPU (2.13) splits a loop over i that reads x[i // block] into whole blocks
    and drops the rest.
    """
    if statically_known_true(numel % block == 0):
        return per_block[:, None].expand(-1, block).reshape(-1)
    index = _indices(numel, per_block.device) ^ 0  # the xor keeps Inductor from reading i // block out of it
    return per_block[torch.div(index, block, rounding_mode="floor")]


def _ceil_div(count: int, divisor: int) -> int:
    return count // divisor if statically_known_true(count % divisor == 0) else (count + divisor - 1) // divisor


def _padded(x: Tensor, count: int, fill: float) -> Tensor:
    return x if statically_known_true(x.shape[0] == count) else pad(x, (0, count - x.shape[0]), value=fill)


def _first(x: Tensor, count: int) -> Tensor:
    return x if statically_known_true(x.shape[0] == count) else x[:count]


# --- masks ------------------------------------------------------------------------------------------------------------


def pack_mask_in_graph(mask: Tensor) -> Tensor:
    """Return 1-D bool as uint8, eight flags a byte, the first lowest; the last byte is padded with zeros."""
    num_bytes = _ceil_div(mask.shape[0], 8)
    flags = _padded(mask.to(torch.int32), num_bytes * 8, 0).view(num_bytes, 8)
    # One sum of 8 numbers is a reduction to Inductor, which reads memory in order: 122 us for 2^27.6 values on one H200, 205 us unrolled.
    # Words of 64 flags are one kernel with a norm, a ReLU and encode, which is slower: ResNet-50 in 8 bits took 49.9 instead of 45.0 ms.
    return (flags << torch.arange(8, dtype=torch.int32, device=mask.device)).sum(1, dtype=torch.int32).to(torch.uint8)


def unpack_mask_in_graph(bits: Tensor, numel: int) -> Tensor:
    """Return the first `numel` flags of `pack_mask_in_graph`, 1-D bool."""
    one_bit = 1 << torch.arange(8, dtype=torch.uint8, device=bits.device)
    return _first((bits[:, None] & one_bit).reshape(-1), numel) != 0
