"""`update` and `fold` define an optimizer step and gradient accumulation in plain torch; kernels return the same bits.

Values are (rows, cols) in float32, blocks run along the rows, each operation is rounded once. With h the numbers of the step:

    f = factor * h.factor         g = code value * (scale * f), or plain value * f
    p', m', v' = rule(p, g, m, v, h)                                    see `rules.py`
    moments     codec's scales ("cover"); of MOMENT2 `rules.stored_root` is stored, with codes of at least 1
    weight      in blocks with an e8m0 scale: sticky scales, below; in other blocks codec's encode; plain: rounded to its dtype
    residue     b = (bits of p' + 128) >> 8;  weight = (b + 128) >> 8, a bf16;  residue = b - (weight << 8):  24 bits together

Sticky scales: with a = max |p'| of a block, s its scale and L the element's largest value, the scale is kept if a == 0, or if it covers a
and a >= 0.2 L s; otherwise it becomes the smallest that covers a, at least 2^-100. A weight that the rule leaves unchanged keeps its bits.

A block in which a new value is not finite (p' and m' at 2^126 and above count as such) is not updated, in any slot.

A rule of matrices (muon) takes two passes over the rows: the first decodes m and g and writes what is orthogonalized, in bfloat16; the
second decodes p, m and g, and stores p' and m'. Decoded values exist for some rows at a time. A value of the gradient that is not
finite makes all of O not finite, and no block of the matrix is updated.

Integer codes in blocks are rounded by `whole_parts`: floor(x / scale + u), or to nearest. All other values are rounded by the codec.
Random bits of the weight with index i in the whole tensor are those of Seed(seed, tensor=8 * tensor_id, step) at i // 4, times one of
`PLACE_BITS` for i % 4, modulo 2^32; those of a moment are the same times one of `MOMENT_BITS`. Any two of these 12 form a lattice that
fills the plane evenly (its shortest vector is at least half of the longest possible), and a product is cheaper than another hash.

Each update adds to five counters. Block b, counted along the rows, is sampled if (b // 64) % 16 == 0:

    0 values sampled     1 p' differs from p     2 the stored values differ too     3 0 < |p' - p| < half a step of the format ("dead zone")
    4 blocks that were not finite, of all blocks

An update reads and writes an `UpdateUnit`: an `UpdateSlot` for each tensor of a parameter. `UpdateLayout` is how a unit is stored:

    weight     int8/64@e8m0   codes (rows, cols) uint8, scales (rows, blocks) uint8         or plain: codes (rows, cols) bf16
    residue    plain int8     the 8 bits below a bf16 weight
    moments    int8/64@bf16   codes (rows, cols) uint8, scales (rows, blocks) bf16          or plain: codes (rows, cols) fp32
    gradient   as a moment, read only; its scales are multiplied by `factor`, a scalar on the device, if it has one

A slot without a format is a plain tensor in `parts.codes`: it may be the parameter or gradient itself, viewed as (rows, cols).
Units with the same `UpdateLayout` are updated in one kernel launch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from paredown.codec import cpu
from paredown.codec.packed import PackedTensor, default_overflow
from paredown.codec.reference import (
    COVER,
    Encoding,
    PackedParts,
    in_blocks,
    pack_bits,
    scale_values,
    spread,
    store_scale,
    unpack_bits,
    values_of,
)
from paredown.formats.element import Element, ElementKind
from paredown.formats.format import Format
from paredown.formats.rounding import Overflow, Rounding, Seed, signed
from paredown.optim.rules import Numbers, Rule, as_float32, from_stored_root, look_ahead, newton_schulz, step_along, stored_root

PLAIN_BLOCK = 64  # values that are skipped together if one is not finite, for parameters without a tensor in blocks
PLAIN_FORMATS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


class SlotKind(NamedTuple):
    """How one weight, gradient or moment is stored: format or dtype, rounding, and how often its square root is taken first."""

    format: Format | None
    dtype: torch.dtype | None
    rounding: Rounding
    roots: int

    @property
    def stored(self) -> Format:
        """The format in which the values are stored; for an unpacked tensor, the format that equals its dtype."""
        assert self.format is not None or self.dtype is not None
        return self.format or Format.parse(PLAIN_FORMATS[self.dtype])  # type: ignore[index]


@dataclass(frozen=True, eq=False)
class UpdateSlot:
    """A weight, gradient or moment of one parameter as (rows, cols), which an update reads and writes in place.

    It has codes and scales in `format`, or is an ordinary tensor in `parts.codes`. `roots`: the square root of the values is stored (1), or
    about their fourth root (2), see `rules.stored_root`. Such codes are at least 1.
    """

    format: Format | None
    rounding: Rounding
    parts: PackedParts
    roots: int = 0

    @cached_property
    def kind(self) -> SlotKind:
        """How this tensor is stored (format or dtype, rounding, roots), as a hashable key."""
        return SlotKind(self.format, None if self.format is not None else self.codes.dtype, self.rounding, self.roots)

    @property
    def codes(self) -> Tensor:
        """The codes; for a tensor that is not packed, its values."""
        assert self.parts.codes is not None
        return self.parts.codes

    def rows(self, rows: slice) -> UpdateSlot:
        """Return an `UpdateSlot` for some rows of the tensor, without a copy: its tensors are views."""
        codes, scales, minimums = (t if t is None else t[rows] for t in (self.parts.codes, self.parts.scales, self.parts.minimums))
        return UpdateSlot(self.format, self.rounding, PackedParts(codes, scales, minimums, self.parts.tensor_scale), self.roots)


class UpdateLayout(NamedTuple):
    """The update rule, and how each tensor of a parameter is stored; one kernel launch updates all with the same layout."""

    rule: str
    block: int  # values that are skipped together if one is not finite
    weight: SlotKind
    has_residue: bool
    moments: tuple[SlotKind, ...]
    gradient: SlotKind


@dataclass(frozen=True, eq=False)
class UpdateUnit:
    """The tensors that an update of one parameter reads and writes, with sizes, ids and counters for all of its steps."""

    weight: UpdateSlot
    residue: UpdateSlot | None  # unpacked int8 beside an unpacked bf16 weight
    moments: tuple[UpdateSlot, ...]
    gradient: UpdateSlot
    rows: int
    cols: int
    tensor_id: int  # selects its random bits
    first_index: int  # index of its first value in the whole tensor
    factor: Tensor | None = None  # float32 scalar tensor, on the device
    counters: Tensor = field(default_factory=lambda: torch.zeros(5, dtype=torch.int32))  # see `reference.py`

    def how(self, rule: str) -> UpdateLayout:
        """Return the layout of these tensors' update by the rule with this name: the rule, and how each tensor is stored."""
        return UpdateLayout(rule, *self._stored)

    @cached_property
    def _stored(self) -> tuple[int, SlotKind, bool, tuple[SlotKind, ...], SlotKind]:
        moments = tuple(m.kind for m in self.moments)
        formats = [kind.format for kind in (self.weight.kind, *moments, self.gradient.kind)]
        block = max([f.block for f in formats if f is not None and f.block] or [PLAIN_BLOCK])
        return block, self.weight.kind, self.residue is not None, moments, self.gradient.kind


# --- update and fold --------------------------------------------------------------------------------------------------

LIMIT = 2.0**126
SMALLEST_STICKY_CODE = 27  # code of e8m0 for 2^-100
STAYS_ABOVE = 0.2  # share of the largest value below which a sticky scale is lowered
SAMPLED_BLOCKS, SAMPLED_EVERY = 64, 16
MOMENT_BITS = (0xA13FC965, 0xADB4A92D)  # factors from the random bits of a weight to those of its moments
PLACE_BITS = (1, 0x7EB9D1C9, 0x73270133, 0x60BDADCF)  # factors from the random bits of four weights to those of each
GPU_PIECE = 1 << 20  # values at a time on a GPU, where a piece is some 100 launches
# Values at a time on a CPU: an eighth of a parameter, at least 2^15 (with 2^14 it takes 1.8 times as long), at most 2^17 for the cache.
# An update takes about 90 bytes for each, which plans do not count.
PIECES, FEWEST_UPDATED, MOST_UPDATED = 8, 1 << 15, 1 << 17
GIVEN = "given"


def update(rule: Rule, unit: UpdateUnit, hyper: Sequence[float], step: int, seed: int) -> None:
    """Update a parameter and its state, the tensors in `unit`, in place by `rule`; `step` counts from 1.

    `hyper`: the rule's hyperparameters, in the order of `hyper_names`. `seed`: of stochastic rounding.
    """
    numbers, block = rule.numbers(hyper), unit.how(rule.name).block
    factor = numbers["factor"] if unit.factor is None else unit.factor.float() * numbers["factor"]
    direction = newton_schulz(_looked_ahead(unit, factor, numbers), numbers) if rule.is_of_matrix else None
    for rows in _pieces(unit.rows, unit.cols, unit.weight.codes.device):
        piece = _Piece(unit, rows, block, Seed(seed, 8 * unit.tensor_id, step, unit.first_index + rows.start * unit.cols))
        g = values(piece.slot(unit.gradient), unit.cols, factor)
        old = [values(piece.slot(slot), unit.cols) for slot in (unit.weight, *unit.moments)]
        if unit.residue is not None:
            old[0] = _with_residue(piece.slot(unit.weight).codes, piece.slot(unit.residue).codes)
        if direction is None:
            p, moments = rule.update(old[0], g, tuple(old[1:]), numbers)
        else:
            p, moments = step_along(direction[rows], old[0], numbers, (unit.rows, unit.cols)), look_ahead(g, old[1], numbers)[:1]
        weight = old[0]
        del g, old  # their memory is reused
        if weight.data_ptr() == piece.slot(unit.weight).codes.data_ptr():  # float32, overwritten before the changes are counted
            weight = weight.clone()
        piece.store(weight, p, moments)


def _looked_ahead(unit: UpdateUnit, factor: Tensor | float, numbers: Numbers) -> Tensor:
    """Return the bfloat16 matrix that Muon orthogonalizes, a combination of its momentum and `factor` times the gradient."""
    mean = torch.empty(unit.rows, unit.cols, dtype=torch.bfloat16, device=unit.weight.codes.device)
    for rows in _pieces(unit.rows, unit.cols, mean.device):
        piece = _Piece(unit, rows, 0, Seed(0, 0))
        g, m = values(piece.slot(unit.gradient), unit.cols, factor), values(piece.slot(unit.moments[0]), unit.cols)
        mean[rows] = look_ahead(g, m, numbers)[1]
    return mean


class Fold(NamedTuple):
    """How a gradient is added to a packed sum: sum <- encode(sum * factor + grad * weight); if `is_first`, sum is 0."""

    weight: float
    factor: Tensor | None
    seed: Seed
    is_first: bool
    rounding: Rounding = Rounding.STOCHASTIC


def fold(packed: PackedTensor, grad: Tensor, how: Fold) -> None:
    """Add `grad` to a packed sum of gradients in place, weighted and rounded as `how` says."""
    slot = UpdateSlot(packed.format, how.rounding, packed.parts)
    num_rows, cols = packed.format.rows_and_cols(packed.shape)
    grad = grad.detach().reshape(num_rows, cols)
    for rows in [slice(0, num_rows)] if packed.format.has_tensor_scale else _pieces(num_rows, cols, grad.device):
        piece = slot.rows(rows)
        x = grad[rows].float() * as_float32(how.weight)
        if not how.is_first:
            x = values(piece, cols, how.factor) + x
        seed = replace(how.seed, first_index=how.seed.first_index + rows.start * cols)
        encoding = Encoding(packed.format, how.rounding, default_overflow(packed.format), seed)  # without a block inf stays inf
        piece.parts.copy_(cpu.encode_rows(x, encoding, None))


def values(slot: UpdateSlot, cols: int, factor: Tensor | float | None = None) -> Tensor:
    """Return one tensor of an update decoded to float32, (rows, cols), and multiplied by `factor` if there is one."""
    if slot.format is None:
        x = slot.codes.float()
        return x if factor is None else x * factor
    x = _element_values(slot.codes, slot.format.element, cols)
    if slot.format.block:
        scales = scale_values(slot.parts, slot.format)
        x = x * spread(scales if factor is None else scales * factor, slot.format.block, cols)
        if slot.parts.minimums is not None:
            minimums = slot.parts.minimums.float()
            x = x + spread(minimums if factor is None else minimums * factor, slot.format.block, cols)
    elif factor is not None:
        x = x * factor
    return from_stored_root(x, slot.roots)


def _element_values(codes: Tensor, element: Element, cols: int) -> Tensor:
    if element.width == 8 and element.name in ("int8", "uint8"):
        return (codes.view(torch.int8) if element.name == "int8" else codes).float()
    return values_of(unpack_bits(codes, element.width, cols), element)


def _pieces(rows: int, cols: int, device: torch.device) -> Iterator[slice]:
    """Yield slices of the rows of a (rows, cols) parameter, which an update processes one after the other."""
    if not cols:
        return
    height = update_rows(rows, cols) if device.type == "cpu" else max(1, GPU_PIECE // cols)
    for first in range(0, rows, height):
        yield slice(first, min(first + height, rows))


def update_rows(rows: int, cols: int) -> int:
    """Return how many rows of a (rows, cols) parameter an update processes at once on a CPU.

    >>> update_rows(512, 512), update_rows(10, 64), update_rows(4096, 1 << 18)
    (64, 10, 1)
    """
    size = min(max(rows * cols // PIECES, FEWEST_UPDATED), MOST_UPDATED)
    return max(1, min(rows, size // max(cols, 1)))


def _with_residue(weight: Tensor, residue: Tensor) -> Tensor:
    """Return, as float32, the 24-bit floats that a bf16 weight and the next 8 bits of each value, its residue, make up."""
    return ((weight.view(torch.int16).int() << 16) + (residue.int() << 8)).view(torch.float32)


class _Piece:
    """Some rows of a parameter and its state, which an update decodes and encodes at a time to save memory."""

    def __init__(self, unit: UpdateUnit, rows: slice, block: int, seed: Seed) -> None:
        self.unit, self.rows, self.block, self.seed = unit, rows, block, seed

    def slot(self, slot: UpdateSlot) -> UpdateSlot:
        return slot.rows(self.rows)

    def store(self, old: Tensor, p: Tensor, moments: Sequence[Tensor]) -> None:
        """Encode and store the new parameter `p` and moments, except for blocks in which a new value is not finite.

        `old` is the parameter before the update.
        """
        is_finite = p.abs() < LIMIT
        for x, slot in zip(moments, self.unit.moments, strict=True):
            is_finite &= x.isfinite() if slot.roots else x.abs() < LIMIT
        broken = in_blocks((~is_finite).float(), self.block, 0.0).amax(2) > 0  # (rows, blocks)
        skipped = spread(broken, self.block, self.unit.cols) if bool(broken.any()) else None
        if skipped is not None:
            p, moments = torch.where(skipped, old, p), [torch.where(skipped, 0.0, x) for x in moments]
        weight = self.slot(self.unit.weight)
        step = half_step(old, weight, self.unit.residue is not None)
        self._store_weight(weight, p, skipped)
        for n, (slot, x) in enumerate(zip(self.unit.moments, moments, strict=True)):
            self._store_moment(self.slot(slot), x, MOMENT_BITS[n], skipped)
        self._count(old, p, step, broken)

    def _store_weight(self, slot: UpdateSlot, p: Tensor, skipped: Tensor | None) -> None:
        if self.unit.residue is not None:
            b = (p.contiguous().view(torch.int32) + 128) >> 8
            weight = (b + 128) >> 8
            _put(slot, PackedParts(weight.to(torch.int16).view(torch.bfloat16)), skipped, self.unit.cols)
            _put(self.slot(self.unit.residue), PackedParts((b - (weight << 8)).to(torch.int8)), skipped, self.unit.cols)
        elif is_sticky(slot.format):
            assert slot.format is not None
            _put(slot, self._encoded(slot, p, 1, PackedParts(scales=sticky_scales(p, slot))), skipped, self.unit.cols)
        else:
            _put(slot, self._encoded(slot, p, 1), skipped, self.unit.cols)

    def _store_moment(self, slot: UpdateSlot, x: Tensor, multiplier: int, skipped: Tensor | None) -> None:
        parts = self._encoded(slot, stored_root(x, slot.roots), multiplier)
        if slot.roots and slot.format is not None:
            assert parts.codes is not None
            width = slot.format.element.width
            codes = (
                parts.codes.clamp(min=1)
                if width == 8
                else pack_bits(unpack_bits(parts.codes, width, x.shape[1]).clamp(min=1), width)
            )
            parts = PackedParts(codes, parts.scales, parts.minimums, parts.tensor_scale)
        _put(slot, parts, skipped, self.unit.cols)

    def _encoded(self, slot: UpdateSlot, x: Tensor, multiplier: int, given: PackedParts | None = None) -> PackedParts:
        """Return `x` encoded in the format of `slot`, with new scales, or with the scales in `given`.

        `multiplier` turns the random bits that weight and moments share into those of this tensor.
        """
        bits = None
        if slot.rounding is Rounding.STOCHASTIC:
            bits = random_bits(self.seed, x.numel(), x.device).view(x.shape)
            bits = bits if multiplier == 1 else bits.mul_(signed(multiplier))
        if is_whole(slot):
            return whole_parts(x, slot.kind.stored, bits, None if given is None else given.scales)
        encoding = Encoding(slot.kind.stored, slot.rounding, Overflow.SATURATE, rule=GIVEN if given else COVER)
        parts = cpu.encode_rows(x.contiguous(), encoding, given, bits)
        return parts if slot.format is not None or parts.codes is None else PackedParts(parts.codes.view(slot.codes.dtype))

    def _count(self, old: Tensor, p: Tensor, step: Tensor, broken: Tensor) -> None:
        num_blocks = broken.shape[1]
        number = torch.arange(self.rows.start * num_blocks, self.rows.stop * num_blocks, device=old.device).view(broken.shape)
        is_sampled = (number // SAMPLED_BLOCKS % SAMPLED_EVERY == 0) & ~broken
        counters = torch.zeros(5, dtype=torch.int32, device=old.device)
        counters[4] = broken.sum()
        if bool(is_sampled.any()):
            stored = values(self.slot(self.unit.weight), self.unit.cols)
            if self.unit.residue is not None:
                stored = _with_residue(self.slot(self.unit.weight).codes, self.slot(self.unit.residue).codes)
            inside = spread(is_sampled, self.block, self.unit.cols)
            moved = inside & (p != old)
            counters[0], counters[1] = inside.sum(), moved.sum()
            counters[2], counters[3] = (moved & (stored != old)).sum(), (moved & ((p - old).abs() < step)).sum()
        self.unit.counters.add_(counters)


def random_bits(seed: Seed, count: int, device: torch.device) -> Tensor:
    """Return the int32 random bits of `count` weights, of which the first has the index `seed.first_index`.

    Four adjacent weights share one hash, which is multiplied by another odd number for each of the four.
    """
    first = seed.first_index >> 2
    quad_bits = cpu.random_bits(seed, first, (seed.first_index + count + 3 >> 2) - first, device)
    bits = quad_bits[:, None] * torch.tensor([signed(n) for n in PLACE_BITS], dtype=torch.int32, device=device)
    return bits.flatten()[seed.first_index & 3 :][:count]


def is_whole(slot: UpdateSlot) -> bool:
    """Return whether a tensor is stored as integer codes in blocks without a minimum, for which `whole_parts` is used."""
    format = slot.format
    return (
        format is not None
        and format.block is not None
        and format.element.kind in (ElementKind.INT, ElementKind.UINT)
        and format.minimum is None
        and not format.has_tensor_scale
        and slot.rounding in (Rounding.STOCHASTIC, Rounding.NEAREST_EVEN)
    )


def whole_parts(x: Tensor, format: Format, bits: Tensor | None, scales: Tensor | None) -> PackedParts:
    """Return `x` in integer codes, with the given `scales`, or with new ones so large that no value overflows.

    With random `bits` (int32), codes are floor(x / scale + u), u = the top 23 bits / 2^23, where 1 / scale is reduced by 2^-22 if it is
    rounded, so that no code exceeds the largest. Otherwise codes are x / scale to nearest, ties to even.
    """
    assert format.block and format.scale
    if scales is None:
        largest = in_blocks(x, format.block, 0.0).abs().amax(2)
        scales = store_scale(largest / torch.full_like(largest, format.element.max_value), format.scale)
    inverse = 1.0 / scale_values(PackedParts(None, scales), format)
    inverse = torch.where(inverse.isfinite(), inverse, 0.0)
    if bits is not None and format.scale.name != "e8m0":
        inverse = inverse * (1 - 2.0**-22)
    if not format.element.signed:
        x = x.clamp(min=0.0)
    y = x.double().mul_(spread(inverse, format.block, x.shape[1]))  # exact in float64, as are its fraction and the threshold
    codes = y.round() if bits is None else y.floor()
    if bits is not None:
        threshold = (bits >> 9).bitwise_and_(0x7FFFFF).float().mul_(-(2.0**-23)).add_(1.0)
        codes.add_(y.sub_(codes) >= threshold)
    width = format.element.width
    codes = codes.to(torch.int16)
    return PackedParts(codes.to(torch.uint8) if width == 8 else pack_bits(codes.long() & ((1 << width) - 1), width), scales)


def is_sticky(format: Format | None) -> bool:
    """Return whether a weight in `format` keeps a block's scale from step to step while it fits, as with e8m0 scales."""
    return format is not None and format.scale is not None and format.scale.name == "e8m0" and format.minimum is None


def sticky_scales(p: Tensor, slot: UpdateSlot) -> Tensor:
    """Return the e8m0 scales (rows, blocks) of a weight whose new values are `p`; `slot` has the weight before the update.

    A block keeps its scale as long as it fits the block's largest value.
    """
    format, old = slot.format, slot.parts.scales
    assert format is not None and format.block and format.scale and old is not None
    largest = in_blocks(p, format.block, 0.0).abs().amax(2)
    cover = store_scale(largest / torch.full_like(largest, format.element.max_value), format.scale).clamp(min=SMALLEST_STICKY_CODE)
    enough = largest >= as_float32(STAYS_ABOVE * format.element.max_value) * scale_values(slot.parts, format)
    return torch.where((largest == 0) | ((cover <= old) & enough), old, cover)


def half_step(p: Tensor, slot: UpdateSlot, has_residue: bool) -> Tensor:
    """Return half the distance between values that the weight `slot`, with a residue or without, can store, at each `p`."""
    element = slot.kind.stored.element
    mantissa_bits = 15 if has_residue else element.mantissa_bits
    scale: Tensor | float = 1.0
    if slot.format is not None and slot.format.block:
        scales = scale_values(slot.parts, slot.format)
        inverse = 1.0 / scales
        scale = spread(scales, slot.format.block, p.shape[1])
        p = p * spread(torch.where(inverse.isfinite(), inverse, 0.0), slot.format.block, p.shape[1])
    binade = (p.contiguous().view(torch.int32) & 0x7F800000).clamp(min=(element.min_exponent + 127) << 23).view(torch.float32)
    return binade * 2.0 ** -(mantissa_bits + 1) * scale


def _put(slot: UpdateSlot, parts: PackedParts, skipped: Tensor | None, cols: int) -> None:
    """Write new codes and scales into the tensors of `slot`, except where the mask `skipped` is True; None skips nothing."""
    slot.parts.copy_(parts if skipped is None else _keep(slot, parts, skipped, cols))


def _keep(slot: UpdateSlot, parts: PackedParts, skipped: Tensor, cols: int) -> PackedParts:
    """Return the new codes and scales `parts`, but the old ones of `slot` where the mask `skipped` is True."""
    assert parts.codes is not None
    if slot.format is None:
        return PackedParts(torch.where(skipped, slot.codes, parts.codes))
    width, block = slot.format.element.width, slot.format.block or 1
    keep = pack_bits(skipped.long() * ((1 << width) - 1), width)
    codes = (slot.codes & keep) | (parts.codes & ~keep)
    blocks = skipped[:, ::block]
    shared = [
        None if made is None or old is None else torch.where(blocks, old, made)
        for old, made in ((slot.parts.scales, parts.scales), (slot.parts.minimums, parts.minimums))
    ]
    return PackedParts(codes, *shared)
