"""These functions define encode, decode and round_trip in plain torch; all other implementations give the same bits.

A tensor is laid out as (rows, cols); `formats/format.py` draws it. In float32 and correctly rounded, for each block:

    plain     scale = max |x| / max_value, rounded up            y = x * inverse,              value = e(y) * scale
    affine    minimum = min x, rounded down;
              scale = (max x - minimum) / max_value, rounded up  y = (x - minimum) * inverse,  value = e(y) * scale + minimum

where `inverse` = 1 / scale and e(y) is y rounded to the element (`codes_of`). Rounding the scale up keeps every y within the
element, so that stochastic rounding stays unbiased; where the division or the product still rounds past the largest value, y is clamped
to it. Scales in fp32 and bf16 are at least 2^-126 (or 0), so that 1 / scale is finite. With scale e4m3fn, or another 8-bit float, there is
one more scale for the tensor: tensor_scale = max |x| / (448 * max_value), where 448 is the largest value of e4m3fn; block scales are taken
relative to it, and `scale` above is their product.
`scales="ocp"` is OCP's rule for e8m0 instead: 2^(floor(log2 max |x|) - floor(log2 max_value)); values past the largest then saturate.

A block that holds NaN or inf, or numbers so large that its range or its scale cannot be stored, has scale NaN, and decodes to NaN
as a whole.

Rounding a magnitude a to a float or integer element: with 2^E the power of two below a, at least the smallest normal one, steps
are 2^(E - mantissa_bits). k = floor(a / step) and the fractional part f decide:

    toward_zero: k     nearest_*: k + 1 above one half     stochastic: k + 1 if floor(f * 2^R) + floor(bits / 2^(32 - R)) >= 2^R

with R = 30 - mantissa_bits, so that only the bits of f below 2^-R are dropped. toward_zero is the same with bits = 0 and
nearest_away with bits = 2^31, which is how `cpu.py` and the kernels compute them.

Codes of any width are packed into bytes without gaps: the first value in the lowest bits, each row starting on a new byte.

    width 4:  bytes  [v1 v0] [v3 v2] ...          width 6:  v0 | v1 << 6 | v2 << 12 | v3 << 18 as three bytes

>>> pack_bits(torch.tensor([[1, 2, 3]]), 4)
tensor([[33,  3]], dtype=torch.uint8)
>>> unpack_bits(torch.tensor([[33, 3]], dtype=torch.uint8), 4, cols=3)
tensor([[1, 2, 3]])
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from paredown.formats.element import Element, ElementKind
from paredown.formats.format import Format
from paredown.formats.rounding import HIGH_INDEX, INDEX_STEP, MULTIPLIER_1, MULTIPLIER_2, WORD, Overflow, Rounding, Seed


def pack_bits(codes: Tensor, width: int) -> Tensor:
    """Return codes of `width` bits, int64 (rows, cols), packed into bytes without gaps: uint8 (rows, row_bytes)."""
    if 8 % width == 0:
        per_byte = 8 // width
        codes = torch.nn.functional.pad(codes, (0, -codes.shape[1] % per_byte))
        words = codes[:, ::per_byte]
        for place in range(1, per_byte):
            words = words | codes[:, place::per_byte] << (place * width)
        return words.to(torch.uint8)
    bits = torch.stack([(codes >> bit).to(torch.uint8) & 1 for bit in range(width)], 2).flatten(1)  # (rows, cols * width)
    bits = torch.nn.functional.pad(bits, (0, -bits.shape[1] % 8))
    bits = bits.view(len(codes), bits.shape[1] // 8, 8)
    return (bits << torch.arange(8, dtype=torch.uint8, device=codes.device)).sum(2, dtype=torch.uint8)


def unpack_bits(packed: Tensor, width: int, cols: int) -> Tensor:
    """Return the int64 codes (rows, cols) of `width` bits that `pack_bits` has packed into uint8 (rows, row_bytes)."""
    if width == 8:
        return packed.long()
    if 8 % width == 0:
        first = torch.arange(0, 8, width, dtype=torch.uint8, device=packed.device)  # the lowest bit of each
        return ((packed[:, :, None] >> first) & ((1 << width) - 1)).flatten(1)[:, :cols].long()
    bits = (packed[:, :, None] >> torch.arange(8, dtype=torch.uint8, device=packed.device)) & 1
    bits = bits.flatten(1)[:, : cols * width].unflatten(1, (cols, width))
    codes = torch.zeros((len(packed), cols), dtype=torch.int64, device=packed.device)
    for bit in range(width):
        codes.add_(bits[:, :, bit], alpha=1 << bit)
    return codes


# --- encode, decode and round_trip ------------------------------------------------------------------------------------

SMALLEST_SCALE = 2.0**-126
OCP = "ocp"
COVER = "cover"


@dataclass(frozen=True)
class PackedParts:
    """The tensors of a packed tensor: codes (rows, row_bytes) uint8, scales and minimums (rows, blocks), tensor_scale ().

    Scales in fp32 and bf16 are tensors of that dtype, those in e8m0 and 8-bit floats are uint8 codes.
    """

    codes: Tensor | None = None
    scales: Tensor | None = None
    minimums: Tensor | None = None
    tensor_scale: Tensor | None = None

    def all(self) -> tuple[Tensor | None, ...]:
        """Return codes, scales, minimums and tensor_scale, None for those that the format lacks."""
        return self.codes, self.scales, self.minimums, self.tensor_scale

    def tensors(self) -> list[Tensor]:
        """Return those of codes, scales, minimums and tensor_scale that are not None, in this order."""
        return [t for t in self.all() if t is not None]

    def mapped(self, function: Callable[[Tensor], Tensor]) -> PackedParts:
        """Return the results of `function` on codes, scales and minimums, as another `PackedParts`."""
        return PackedParts(*(t if t is None else function(t) for t in self.all()))

    def copy_(self, other: PackedParts) -> None:
        """Copy the codes, scales and minimums of `other` into these tensors in place, skipping those that one of them lacks."""
        for mine, new in zip(self.all(), other.all(), strict=True):
            if mine is not None and new is not None:
                mine.copy_(new)


@dataclass(frozen=True)
class Encoding:
    """How to encode a tensor: format, rounding, overflow, seed of random bits, and the rule by which scales are chosen."""

    format: Format
    rounding: Rounding
    overflow: Overflow
    seed: Seed = Seed()
    rule: str = COVER

    def empty_parts(self, rows: int, cols: int, *, device: torch.device, tensor_scale: Tensor | None) -> PackedParts:
        """Return uninitialized tensors for the codes, scales and minimums of (rows, cols) values."""
        format, stored = self.format, {"fp32": torch.float32, "bf16": torch.bfloat16}
        codes = torch.empty((rows, format.row_bytes(cols)), dtype=torch.uint8, device=device)
        shape = (rows, format.blocks_per_row(cols))
        scales = torch.empty(shape, dtype=stored.get(format.scale.name, torch.uint8), device=device) if format.scale else None
        minimums = torch.empty(shape, dtype=stored[format.minimum.name], device=device) if format.minimum else None
        return PackedParts(codes, scales, minimums, tensor_scale)


# --- random bits ------------------------------------------------------------------------------------------------------


def random_bits(seed: Seed, start: int, count: int, device: torch.device) -> Tensor:
    """Return the 32 random bits of `count` elements from global index `start`, as int64 in 0..2^32-1, (count,)."""
    k0, k1 = seed.keys()
    index = torch.arange(start, start + count, device=device, dtype=torch.int64)
    x = ((index & WORD) * INDEX_STEP + k0) & WORD
    x = ((x ^ (x >> 16)) * MULTIPLIER_1) & WORD
    high = ((index >> 32) * HIGH_INDEX) & WORD
    high = ((high ^ (high >> 15)) * MULTIPLIER_2) & WORD
    return ((x ^ (x >> 15) ^ k1 ^ high) * MULTIPLIER_2) & WORD


# --- one element ------------------------------------------------------------------------------------------------------


def codes_of(y: Tensor, element: Element, rounding: Rounding, overflow: Overflow, bits: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the codes (int64) to which float32 `y` rounds, and a mask of values that have no code: too large, or NaN.

    `bits`: random bits for stochastic rounding. Under NONFINITE a value past the largest gets the code of inf or NaN if there is one.
    """
    codes, past = (
        table_codes(y, element, rounding, bits) if element.kind is ElementKind.TABLE else grid_codes(y, element, rounding, bits)
    )
    special = element.nan_code if element.inf_code is None else element.inf_code
    if overflow is Overflow.NONFINITE and special is not None:
        codes = torch.where(past, special | _sign_codes(y, element), codes)
    if element.nan_code is not None:
        codes = torch.where(y.isnan(), element.nan_code | _sign_codes(y, element), codes)
    unrepresentable = y.isnan() if element.nan_code is None else torch.zeros_like(past)
    return codes, unrepresentable | (past if overflow is Overflow.NONFINITE and special is None else False)


def grid_codes(y: Tensor, element: Element, rounding: Rounding, bits: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the codes to which `y` rounds in a float or integer element, and a mask of values out of range."""
    k = rounded_magnitude(y.abs().nan_to_num(0.0, posinf=torch.finfo(torch.float32).max), element, rounding, bits)
    negative = torch.signbit(y)
    limit = torch.where(negative, element.min_code, element.max_code)
    past = (k > limit) | y.isinf()
    k = torch.where(past, limit, k)
    if element.kind is not ElementKind.FLOAT:
        return torch.where(negative, -k, k) & ((1 << element.width) - 1), past
    keep_sign = negative & ((k != 0) | (element.value(element.sign_code) == 0))  # fnuz has no -0
    return torch.where(keep_sign, k | element.sign_code, k), past


def rounded_magnitude(a: Tensor, element: Element, rounding: Rounding, bits: Tensor | None) -> Tensor:
    """Return the codes (int64) to which magnitudes `a` >= 0 round in a float or integer element that had no largest value.

    So a code may be above the largest one. `bits`: random bits for stochastic rounding.
    """
    mantissa_bits, min_exponent = element.mantissa_bits, element.min_exponent
    a = a.double()
    exponent = torch.where(a > 0, torch.frexp(a).exponent.long() - 1, min_exponent).clamp(min=min_exponent)
    in_hole = (a < 2.0**min_exponent) & (not element.subnormals)  # between 0 and the smallest value
    step_exponent = torch.where(in_hole, min_exponent, exponent - mantissa_bits)
    steps = a * _power_of_two(-step_exponent)
    floor = steps.floor()
    code = floor.long() + ((exponent - min_exponent) << mantissa_bits)  # 0 in the hole
    up = _rounds_up(steps - floor, code, rounding, bits, 30 - torch.where(in_hole, 0, mantissa_bits))
    return code + torch.where(in_hole, up.long() << mantissa_bits, up.long())


def _rounds_up(fraction: Tensor, code: Tensor, rounding: Rounding, bits: Tensor | None, num_bits: Tensor) -> Tensor:
    if rounding is Rounding.TOWARD_ZERO:
        return torch.zeros_like(fraction, dtype=torch.bool)
    if rounding is Rounding.NEAREST_AWAY:
        return fraction >= 0.5
    if rounding is Rounding.NEAREST_EVEN:
        return (fraction > 0.5) | ((fraction == 0.5) & (code % 2 == 1))
    assert bits is not None, "stochastic rounding takes random bits"
    whole = torch.ones_like(code) << num_bits
    return (fraction * whole).floor().long() + (bits >> (32 - num_bits)) >= whole


def table_codes(y: Tensor, element: Element, rounding: Rounding, bits: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the codes to which `y` rounds in an element that is a table of values, and a mask of values out of range.

    `bits`: random bits for stochastic rounding. A tie between values of e8m0 becomes the larger one, as in ml_dtypes.
    """
    values = torch.tensor(element.table, dtype=torch.float32, device=y.device)
    lowest, highest = table_limits(element, rounding)
    past = (y < lowest) | (y > highest)
    y = y.nan_to_num(0.0).clamp(values[0], values[-1])
    low = (torch.searchsorted(values, y.contiguous(), right=True) - 1).clamp(0, len(values) - 2)
    below, above = values[low], values[low + 1]
    middle = (below.double() + above.double()) / 2
    if rounding is Rounding.TOWARD_ZERO:
        up = torch.where(y < 0, y > below, y >= above)
    elif rounding is Rounding.STOCHASTIC:
        assert bits is not None, "stochastic rounding takes random bits"
        up = ((y - below) / (above - below) * 2.0**31).long() + (bits >> 1) >= 2**31
    else:
        away = torch.where(middle > 0, y >= middle, y > middle)
        even = torch.where(low % 2 == 1, y >= middle, y > middle)
        up = away if rounding is Rounding.NEAREST_AWAY or element.name == "e8m0" else even
    return low + up.long(), past


def table_limits(element: Element, rounding: Rounding) -> tuple[float, float]:
    """Return the smallest and the largest float32 that round to a value of a table, instead of overflowing.

    These are the table's first and last value; in e8m0 they are the smallest number above 0, and where 2^128 begins to be nearer.
    """
    if element.name != "e8m0":
        return element.table[0], element.table[-1]
    nearest = rounding in (Rounding.NEAREST_EVEN, Rounding.NEAREST_AWAY)
    return 2.0**-149, 1.5 * 2.0**127 * (1 - 2.0**-24 if nearest else 4 / 3 * (1 - 2.0**-24))


def values_of(codes: Tensor, element: Element) -> Tensor:
    """Return the float32 value that each of the int64 `codes` of an element stands for."""
    if element.width <= 16:
        return torch.tensor(element.values(), dtype=torch.float32, device=codes.device)[codes]
    magnitude = codes & (element.sign_code - 1)  # only floats are wider than 16 bits
    field, mantissa = magnitude >> element.mantissa_bits, magnitude & ((1 << element.mantissa_bits) - 1)
    normal = (mantissa + (1 << element.mantissa_bits)) * _power_of_two(field - 1 + element.min_exponent - element.mantissa_bits)
    subnormal = mantissa * 2.0 ** (element.min_exponent - element.mantissa_bits) * element.subnormals
    value = torch.where(field > 0, normal, subnormal)
    if element.inf_code is not None:
        value = torch.where(magnitude >= element.inf_code, torch.where(magnitude == element.inf_code, torch.inf, torch.nan), value)
    value = torch.where((codes & element.sign_code) != 0, -value, value)
    if element.inf_code is None and element.nan_code is not None:
        either_sign = codes | (element.nan_code & ~element.sign_code and element.sign_code)
        value = torch.where(either_sign == (element.nan_code | element.sign_code), torch.nan, value)
    return value.float()


def _sign_codes(y: Tensor, element: Element) -> Tensor:
    return torch.where(torch.signbit(y), element.sign_code, 0)


def _power_of_two(exponent: Tensor) -> Tensor:
    return ((exponent.long() + 1023) << 52).view(torch.float64)


# --- blocks and their scales ------------------------------------------------------------------------------------------


def in_blocks(x: Tensor, block: int, fill: float) -> Tensor:
    """Return `x`, (rows, cols), as (rows, blocks, block), where a short last block is filled up with the number `fill`."""
    return torch.nn.functional.pad(x, (0, -x.shape[1] % block), value=fill).unflatten(1, (-1, block))


def choose_scales(x: Tensor, encoding: Encoding, tensor_scale: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return the scale and minimum of each block of float32 `x` (rows, cols), as stored; NaN for a block with NaN or inf."""
    format = encoding.format
    assert format.block and format.scale, "scales belong to blocks"
    low, high = in_blocks(x, format.block, torch.inf).amin(2), in_blocks(x, format.block, -torch.inf).amax(2)
    largest = torch.maximum(low.abs(), high.abs())
    minimums = None
    if format.minimum:
        minimums = rounded_down(low + 0.0, format.minimum)  # + 0.0 turns -0.0 into 0.0
        largest = high - minimums.float() + 0.0
    elif encoding.rule == OCP:
        return store_scale(torch.where(largest.isfinite(), ocp_scale(largest, format.element), torch.nan), format.scale), None
    scale = largest / torch.full_like(largest, format.element.max_value)  # a tensor, since CUDA divides by a number inexactly
    if tensor_scale is not None:
        scale = torch.where(tensor_scale > 0, scale / tensor_scale, 0.0)
    scale = torch.where(largest.isfinite(), scale, torch.nan)
    return store_scale(scale, format.scale), minimums


def tensor_scale_of(largest: Tensor, format: Format) -> Tensor:
    """Return the float32 scale of a whole tensor, by which the 8-bit float scales of its blocks are multiplied.

    `largest` is the tensor's largest finite magnitude. The scale is at least 2^-126 / the smallest block scale (2^-117 for e4m3fn),
    so that the product of both has a finite inverse. With a minimum, which bf16 rounds down, the range of a block is at most
    2 + 2^-6 times `largest`.
    """
    if format.minimum:
        largest = largest * (2 + 2.0**-6)
    assert format.scale is not None, "a tensor scale belongs to block scales"
    divisor = min(format.scale.max_value * format.element.max_value, torch.finfo(torch.float32).max)
    least = SMALLEST_SCALE / format.scale.smallest
    return torch.where(largest > 0, (largest / torch.full_like(largest, divisor)).clamp(min=least), 0.0)


def store_scale(scale: Tensor, element: Element) -> Tensor:
    """Return scales rounded up to values of `element`, as tensors of the dtype in which they are stored, uint8 for codes.

    NaN stays NaN. Past the largest value, 8-bit floats saturate, since scales relative to the tensor scale exceed it by rounding error
    alone; bf16 and e8m0 become inf or NaN.
    """
    if element.name in ("fp32", "bf16"):
        scale = torch.where(scale > 0, scale.clamp(min=SMALLEST_SCALE), scale)
        return scale if element.name == "fp32" else -rounded_down(-scale, element)
    values = torch.tensor(element.values()[: element.max_code + 1], device=scale.device)  # in increasing order
    codes = torch.searchsorted(values, scale.contiguous())
    if element.kind is ElementKind.FLOAT:
        codes = codes.clamp(max=element.max_code)
    return torch.where(scale.isnan(), element.nan_code or 0, codes).to(torch.uint8)


def rounded_down(x: Tensor, element: Element) -> Tensor:
    """Return the largest value of `element`, fp32 or bf16, that is at most `x`; NaN stays NaN."""
    if element.name == "fp32":
        return x
    truncated = (x.contiguous().view(torch.int32) & -65536).view(torch.float32)
    down = torch.where(truncated > x, (truncated.view(torch.int32) + 65536).view(torch.float32), truncated)
    return torch.where(x.isnan(), x, down).to(torch.bfloat16)


def ocp_scale(largest: Tensor, element: Element) -> Tensor:
    """Return the scale of the OCP MX standard, 2^(floor(log2 largest) - floor(log2 max_value)), within e8m0's range.

    `largest`: each block's largest magnitude; max_value is the element's. Blocks of zeros get the smallest value of e8m0.
    """
    exponent = torch.frexp(largest.double()).exponent - torch.frexp(torch.tensor(element.max_value)).exponent
    exponent = torch.where(largest > 0, exponent, -127).clamp(-127, 127)
    return _power_of_two(exponent).float()


def scale_values(parts: PackedParts, format: Format) -> Tensor:
    """Return the float32 scales of all blocks, (rows, blocks), from the stored scales in `parts`."""
    assert parts.scales is not None and format.scale is not None
    scales = values_of(parts.scales.long(), format.scale) if parts.scales.dtype is torch.uint8 else parts.scales.float()
    return scales if parts.tensor_scale is None else scales * parts.tensor_scale


# --- whole rows -------------------------------------------------------------------------------------------------------


def encode_rows(x: Tensor, encoding: Encoding, given: PackedParts | None, bits: Tensor | None) -> PackedParts:
    """Return the codes, scales and minimums of `x`, (rows, cols).

    `given`: the scales under rule "given", and the tensor scale if the format has one. `bits`: a random integer for each value, or None.

    Elements without inf and NaN saturate if there is no block scale to set to NaN; `packed.encode` raises before it calls this.
    """
    format, x = encoding.format, x.float()
    if format.block is None:
        codes, _ = codes_of(x, format.element, encoding.rounding, encoding.overflow, bits)
        return PackedParts(pack_bits(codes, format.element.width))
    tensor_scale = given.tensor_scale if given else None
    if encoding.rule in (COVER, OCP):
        parts = PackedParts(None, *choose_scales(x, encoding, tensor_scale), tensor_scale)
    else:
        assert given is not None
        parts = PackedParts(None, given.scales, given.minimums, tensor_scale)
    y = scaled(x, parts, encoding)
    if encoding.rule == COVER:  # y exceeds the largest value by rounding error alone
        y = y.clamp(-format.element.max_value if format.element.signed else None, format.element.max_value)
    codes, unrepresentable = codes_of(y, format.element, encoding.rounding, encoding.overflow, bits)
    broken = in_blocks((unrepresentable | ~x.isfinite()).float(), format.block, 0.0).amax(2) > 0
    scale = scale_values(parts, format)
    broken = broken | ~scale.isfinite() | (scale < 0)
    assert parts.scales is not None and format.scale is not None
    nan = torch.full_like(parts.scales, (format.scale.nan_code or 0) if parts.scales.dtype is torch.uint8 else torch.nan)
    minimums = None if parts.minimums is None else torch.where(broken, 0.0, parts.minimums)
    codes = torch.where(spread(broken, format.block, x.shape[1]), 0, codes)
    return PackedParts(pack_bits(codes, format.element.width), torch.where(broken, nan, parts.scales), minimums, tensor_scale)


def scaled(x: Tensor, parts: PackedParts, encoding: Encoding) -> Tensor:
    """Return (x - minimum) / scale in float32, (rows, cols), with the scales and minimums in `parts`.

    The result is 0 where a chosen scale is 0, since all values of the block are then 0 or nearly so.
    """
    block = encoding.format.block
    assert block
    if parts.minimums is not None:
        x = x - spread(parts.minimums.float(), block, x.shape[1])
    inverse = 1.0 / scale_values(parts, encoding.format)
    if encoding.rule in (COVER, OCP):
        return x * spread(torch.where(inverse.isfinite(), inverse, 0.0), block, x.shape[1])
    return torch.where(x == 0, x, x * spread(inverse, block, x.shape[1]))  # with a given scale of 0, all values except 0 overflow


def decode_rows(parts: PackedParts, format: Format, cols: int, dtype: torch.dtype) -> Tensor:
    """Return the decoded values (rows, cols) of `parts` in `dtype`; finite values stay finite in float16."""
    assert parts.codes is not None
    y = values_of(unpack_bits(parts.codes, format.element.width, cols), format.element)
    if format.block:
        y = y * spread(scale_values(parts, format), format.block, cols)
        if parts.minimums is not None:
            y = y + spread(parts.minimums.float(), format.block, cols)
    if dtype is torch.float16:
        y = torch.where(y.isfinite(), y.clamp(-65504.0, 65504.0), y)
    return y.to(dtype)


def round_trip_rows(x: Tensor, encoding: Encoding, given: PackedParts | None, bits: Tensor | None) -> Tensor:
    """Return `x`, (rows, cols), rounded to values of the encoding's format, as encoding and decoding would do.

    `given` and `bits` are those of `encode_rows`. Without blocks, values that have no code become NaN or infinite.
    """
    format = encoding.format
    if format.block:
        return decode_rows(encode_rows(x, encoding, given, bits), format, x.shape[1], x.dtype)
    codes, unrepresentable = codes_of(x.float(), format.element, encoding.rounding, encoding.overflow, bits)
    y = values_of(codes, format.element)
    y = torch.where(unrepresentable, torch.where(x.isnan(), torch.nan, torch.copysign(torch.full_like(y, torch.inf), x.float())), y)
    if x.dtype is torch.float16:
        y = torch.where(y.isfinite(), y.clamp(-65504.0, 65504.0), y)
    return y.to(x.dtype)


def spread(per_block: Tensor, block: int, cols: int) -> Tensor:
    """Return `per_block`, (rows, blocks), with each number repeated for all values of its block: (rows, cols)."""
    return per_block.repeat_interleave(block, 1)[:, :cols]
