"""The codec on the CPU, in plain torch: the same bits as `reference.py`, faster, in pieces that fit the cache.

Rounding to nearest is one addition and one subtraction: with C = 1.5 * 2^(E + 23 - mantissa_bits) and 2^E the power of two below
|x| (at least the smallest normal one), float32's own rounding makes (x + C) - C the multiple of the step nearest to x.

The other roundings add and truncate. The bits of a normal float32, read as an integer, count steps: adding the top bits of
the random number below the last kept bit and clearing what is below is the rounding, carry into the exponent included.
Subnormals have fixed steps, so there |x| is scaled to an integer first. Both are computed for all values, each with its
argument clamped at 2^min_exponent, where both agree; their sum less that common value is the result, without a branch
(torch.where alone took half of the time).

All of it runs on one thread. An operation on a piece takes microseconds; torch would start threads for each of some thirty operations and
join them again, and where other programs keep the cores busy a join lasts as long as the scheduler's time slice: on two cores with a load
average of 11, encoding 2^20 values took 1200 ms on two threads and 86 ms on one.

Values that this arithmetic cannot round (NaN, values past the largest, exponents at the end of float32) are computed by the
reference, value by value. This module also serves tensors on a GPU for which there is no kernel.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from functools import lru_cache, partial
from math import lcm

import torch
from torch import Tensor

from paredown.codec import reference
from paredown.codec.reference import Encoding, PackedParts
from paredown.formats.cpu_scratch import MOST_VALUES, piece_values
from paredown.formats.element import Element, ElementKind, Specials
from paredown.formats.rounding import INDEX_STEP, MULTIPLIER_1, MULTIPLIER_2, WORD, Overflow, Rounding, Seed, high_key

PIECE = MOST_VALUES  # round_trip has fewer temporaries and takes 2 PIECE
FORKED_NUMEL = 1 << 15  # torch uses several threads for operations on more values
EXACT_BITS = {Rounding.TOWARD_ZERO: 0, Rounding.NEAREST_AWAY: 1 << 31}


def encode_rows(x: Tensor, encoding: Encoding, given: PackedParts | None) -> PackedParts:
    """`reference.encode_rows`, piece by piece; `x` is (rows, cols)."""
    out = encoding.empty_parts(*x.shape, device=x.device, tensor_scale=given.tensor_scale if given else None)
    scratch = Scratch()
    to_codes = partial(codes_of, shared=scratch)
    with one_thread(x):
        for r, c in _pieces_of(encoding, *x.shape):
            bits = _bits(encoding, x, r, c, scratch)
            parts = reference.encode_rows(x[r, c], encoding, _piece_of(given, encoding, r, c), bits, to_codes)
            for to, made in zip(_piece_of(out, encoding, r, c).tensors(), parts.tensors(), strict=True):
                to.copy_(made)
    return out


def decode_rows(parts: PackedParts, encoding: Encoding, out: Tensor) -> Tensor:
    """`reference.decode_rows` into `out` (rows, cols), piece by piece."""
    with one_thread(out):
        for r, c in _pieces_of(encoding, *out.shape):
            out[r, c] = reference.decode_rows(_piece_of(parts, encoding, r, c), encoding.format, c.stop - c.start, out.dtype)
    return out


def round_trip_rows(x: Tensor, encoding: Encoding, given: PackedParts | None, out: Tensor) -> Tensor:
    """`reference.round_trip_rows` into `out` (rows, cols), piece by piece; both are contiguous."""
    scratch = Scratch()
    direct = encoding.format.block is None and x.dtype is torch.float32 and _fits(x, encoding.format.element, encoding.rounding)
    with one_thread(x):
        for r, c in pieces(*x.shape, unit=8, size=2 * PIECE) if direct else _pieces_of(encoding, *x.shape):
            bits = _bits(encoding, x, r, c, scratch)
            if direct:
                _round_trip_piece(x[r, c], encoding, bits, out[r, c], scratch)
            else:
                out[r, c] = reference.round_trip_rows(x[r, c], encoding, _piece_of(given, encoding, r, c), bits, codes_of)
    return out


def _round_trip_piece(x: Tensor, encoding: Encoding, bits: Tensor | None, out: Tensor, scratch: Scratch) -> None:
    element = encoding.format.element
    outside = _outside(x, element, encoding.overflow)
    outside_bits = None if bits is None or outside is None else bits[outside][None]
    rounded(_clamped(x, element, outside), element, encoding.rounding, bits, out, scratch)
    if element.kind is not ElementKind.FLOAT or element.specials is Specials.FNUZ:
        out.add_(0.0)  # these elements have no -0.0
    if outside is not None:
        out[outside] = reference.round_trip_rows(x[outside][None], encoding, None, outside_bits, reference_codes_of)[0]


def codes_of(
    y: Tensor, element: Element, rounding: Rounding, overflow: Overflow, bits: Tensor | None, *, shared: Scratch | None = None
) -> tuple[Tensor, Tensor]:
    """`reference.codes_of`, from int32 random bits to int32 codes; scratch tensors that `shared` has are used, others freed at the end."""
    if not _fits(y, element, rounding):
        return reference_codes_of(y, element, rounding, overflow, bits)
    y = y.contiguous()
    outside = _outside(y, element, overflow)
    outside_bits = None if bits is None or outside is None else bits[outside]
    values = rounded(_clamped(y, element, outside), element, rounding, bits, torch.empty_like(y), Scratch(shared))
    codes, unrepresentable = _exact_codes(values, y, element), torch.zeros_like(y, dtype=torch.bool)
    if outside is not None:
        outside_codes, unrepresentable[outside] = reference_codes_of(y[outside], element, rounding, overflow, outside_bits)
        codes[outside] = outside_codes.int()
    return codes, unrepresentable


def reference_codes_of(
    y: Tensor, element: Element, rounding: Rounding, overflow: Overflow, bits: Tensor | None
) -> tuple[Tensor, Tensor]:
    """`reference.codes_of` itself, from int32 random bits."""
    return reference.codes_of(y, element, rounding, overflow, None if bits is None else bits.long() & WORD)


# --- pieces -----------------------------------------------------------------------------------------------------------


@contextmanager
def one_thread(x: Tensor) -> Generator[None]:
    """A context in which operations on the pieces of `x` start no threads; nothing changes for small tensors and on a GPU."""
    before = torch.get_num_threads() if x.numel() > FORKED_NUMEL and x.device.type == "cpu" else 1
    if before == 1:
        yield
        return
    torch.set_num_threads(1)  # 0.2 microseconds, and for this thread alone
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Scratch:
    """Scratch tensors by name, reused for every piece: new ones cost more in page faults than the arithmetic takes.

    `other`: scratch whose tensors are used too.
    """

    def __init__(self, other: Scratch | None = None) -> None:
        self._tensors: dict[tuple[str, torch.Size], Tensor] = dict(other._tensors) if other is not None else {}

    def like(self, x: Tensor, name: str) -> Tensor:
        """A contiguous int32 tensor of the shape of `x`, uninitialized."""
        key = (name, x.shape)  # all pieces except the last have one shape
        if key not in self._tensors:
            self._tensors[key] = torch.empty(x.shape, dtype=torch.int32, device=x.device)
        return self._tensors[key]


def _pieces_of(encoding: Encoding, rows: int, cols: int) -> Iterator[tuple[slice, slice]]:
    """`pieces` of whole blocks and bytes, as large as plans count (formats/cpu_scratch.py)."""
    size = piece_values(encoding.format.element.width, rows * cols)
    return pieces(rows, cols, unit=lcm(encoding.format.block or 1, 8), size=size)


def pieces(rows: int, cols: int, *, unit: int, size: int | None = None) -> Iterator[tuple[slice, slice]]:
    """(row, column) slices that cover rows x cols, about `size` (or PIECE) values each: whole rows, or parts of one row.

    >>> list(pieces(3, 2, unit=8))
    [(slice(0, 3, None), slice(0, 2, None))]
    """
    if rows * cols == 0:
        return
    size = size or PIECE
    width = min(cols, max(unit, size // unit * unit))
    height = max(1, size // width) if width == cols else 1
    for r in range(0, rows, height):
        for c in range(0, cols, width):
            yield slice(r, min(r + height, rows)), slice(c, min(c + width, cols))


def _piece_of(parts: PackedParts | None, encoding: Encoding, r: slice, c: slice) -> PackedParts:
    if parts is None:
        return PackedParts()
    block, width = encoding.format.block or 1, encoding.format.element.width
    in_bytes = slice(c.start * width // 8, -(-c.stop * width // 8))
    in_blocks = slice(c.start // block, -(-c.stop // block))
    return PackedParts(
        None if parts.codes is None else parts.codes[r, in_bytes],
        None if parts.scales is None else parts.scales[r, in_blocks],
        None if parts.minimums is None else parts.minimums[r, in_blocks],
        parts.tensor_scale,
    )


# --- random bits ------------------------------------------------------------------------------------------------------


def _bits(encoding: Encoding, x: Tensor, r: slice, c: slice, scratch: Scratch) -> Tensor | None:
    """The random bits of a piece; None if the rounding uses none."""
    if encoding.rounding is not Rounding.STOCHASTIC:
        return None
    start = encoding.seed.first_index + r.start * x.shape[1] + c.start
    return random_bits(encoding.seed, start, scratch.like(x[r, c], "bits"), scratch)


def random_bits(seed: Seed, start: int, out: Tensor, scratch: Scratch) -> Tensor:
    """`reference.random_bits` from index `start`, as int32 of the same bits, into `out`."""
    if start >> 32 != (start + out.numel()) >> 32:
        bits = reference.random_bits(seed, start, out.numel(), out.device).view(out.shape)
        return out.copy_((bits ^ (1 << 31)) - (1 << 31))
    k0, k1 = seed.keys()
    k1 ^= high_key(start)
    torch.arange(out.numel(), out=out.view(-1)).mul_(_word(INDEX_STEP)).add_(_word(start * INDEX_STEP + k0))
    shifted = scratch.like(out, "temporary")
    _xor_shifted(out, 16, shifted).mul_(_word(MULTIPLIER_1))
    return _xor_shifted(out, 15, shifted).bitwise_xor_(_word(k1)).mul_(_word(MULTIPLIER_2))


def _xor_shifted(x: Tensor, shift: int, shifted: Tensor) -> Tensor:
    """x ^= x >> shift, a logical shift; `shifted` is scratch memory."""
    torch.bitwise_right_shift(x, _word(shift), out=shifted)
    return x.bitwise_xor_(shifted.bitwise_and_(_word((1 << (32 - shift)) - 1)))


@lru_cache(maxsize=1024)
def _word(value: int) -> Tensor:
    """32 bits as an int32 scalar tensor, cached: converting a Python number at each call takes a third of the time of the call."""
    value &= WORD
    return torch.tensor(value - (1 << 32) if value >> 31 else value, dtype=torch.int32)


# --- rounding ---------------------------------------------------------------------------------------------------------


def rounded(x: Tensor, element: Element, rounding: Rounding, bits: Tensor | None, out: Tensor, scratch: Scratch) -> Tensor:
    """`x`, all of it within the element's range, rounded into `out`, signs of zeros included. Uses up `bits`."""
    if rounding is not Rounding.NEAREST_EVEN:
        _add_and_truncate(x, element, EXACT_BITS[rounding] if bits is None else bits, out, scratch)
    elif element.subnormals:
        _nearest(x, element, out, scratch)
    else:
        smallest, smallest_bits = 2.0**element.min_exponent, _word(_float_bits(element.min_exponent))
        a = torch.abs(x, out=scratch.like(x, "a").view(torch.float32))
        in_hole = (a > smallest / 2).int().mul_(smallest_bits)  # 0 or the smallest value, as float32 bits
        _nearest(a.clamp_(min=smallest), element, out, scratch)
        out.view(torch.int32).add_(in_hole).sub_(smallest_bits)
    signs = torch.bitwise_and(x.view(torch.int32), _word(1 << 31), out=scratch.like(x, "temporary"))
    out.view(torch.int32).bitwise_or_(signs)  # torch.copysign takes three times as long
    return out


def _nearest(x: Tensor, element: Element, out: Tensor, scratch: Scratch) -> None:
    c = torch.bitwise_and(x.view(torch.int32), _word(0x7F800000), out=scratch.like(x, "temporary"))
    c.clamp_(min=_float_bits(element.min_exponent)).add_(((23 - element.mantissa_bits) << 23) + 0x400000)
    torch.add(x, c.view(torch.float32), out=out).sub_(c.view(torch.float32))


def _add_and_truncate(x: Tensor, element: Element, bits: Tensor | int, out: Tensor, scratch: Scratch) -> None:
    """`out`, filled with |x| rounded: normals and subnormals are computed apart and added."""
    min_exponent, dropped = element.min_exponent, 23 - element.mantissa_bits
    a = torch.abs(x, out=scratch.like(x, "a").view(torch.float32))
    if min_exponent == -126 and element.subnormals:  # the steps of float32's own subnormals
        top = bits >> (32 - dropped) if isinstance(bits, int) else _shift_down(bits, 32 - dropped, dropped)
        torch.add(a.view(torch.int32), top, out=out.view(torch.int32)).bitwise_and_(_word(-(1 << dropped)))
        return
    sub_bits = element.mantissa_bits if element.subnormals else 0  # mantissa bits below the smallest normal value
    kept = 30 - sub_bits
    clamped = torch.clamp(a, max=2.0**min_exponent, out=scratch.like(x, "clamped").view(torch.float32))
    steps = scratch.like(x, "temporary").copy_(_times_power(clamped, 30 - min_exponent))
    top = bits >> (32 - kept) if isinstance(bits, int) else _shift_down(bits, 32 - kept, kept)
    steps.add_(top).bitwise_right_shift_(_word(kept))
    subnormal = clamped.copy_(steps).mul_(2.0 ** (min_exponent - sub_bits))
    top = top >> (kept - dropped) if isinstance(top, int) else _shift_down(top, kept - dropped, 31)
    normal = a.clamp_(min=2.0**min_exponent).view(torch.int32).add_(top).bitwise_and_(_word(-(1 << dropped)))
    torch.add(normal, subnormal.view(torch.int32), out=out.view(torch.int32)).sub_(_word(_float_bits(min_exponent)))


def _shift_down(bits: Tensor, shift: int, kept: int) -> Tensor:
    """bits >>= shift in place, as unsigned integers: copies of the sign bit above the `kept` lowest bits are cleared if `kept` < 31."""
    bits.bitwise_right_shift_(_word(shift))
    return bits if kept == 31 else bits.bitwise_and_(_word((1 << kept) - 1))


def _exact_codes(values: Tensor, y: Tensor, element: Element) -> Tensor:
    """Codes (int32) of `values`, which the element represents exactly; `y`, the values before rounding, has the signs of zeros."""
    if element.kind is not ElementKind.FLOAT:
        return values.int().bitwise_and_(_word((1 << element.width) - 1))
    mantissa_bits, smallest = element.mantissa_bits, 2.0**element.min_exponent
    a = values.abs()
    codes = _times_power(a.clamp(max=smallest), mantissa_bits - element.min_exponent).int()
    normal = a.clamp_(min=smallest).view(torch.int32).bitwise_right_shift_(_word(23 - mantissa_bits))
    codes.add_(normal).sub_((element.min_exponent + 127) << mantissa_bits)
    sign = y.view(torch.int32).bitwise_right_shift(31).bitwise_and_(_word(element.sign_code))
    return codes.bitwise_or_(sign.mul_(codes != 0) if element.specials is Specials.FNUZ else sign)


def _fits(x: Tensor, element: Element, rounding: Rounding) -> bool:
    """Whether this module's arithmetic is exact for the element: float32 can count its steps, and ties are even where codes are."""
    if element.kind is ElementKind.TABLE or x.device.type != "cpu" or element.min_exponent < -126:
        return False
    fewest, most = (1, 21) if rounding is Rounding.NEAREST_EVEN else (0, 22)
    return fewest <= element.mantissa_bits <= most


def _safe_range(element: Element) -> tuple[float, float]:
    """The smallest and largest value that this module can round: the range of the element, as far as C (see above) is finite."""
    largest = 2.0 ** min(103 + element.mantissa_bits, 127)
    return max(element.min_value, -largest), min(element.max_value, largest)


def _outside(x: Tensor, element: Element, overflow: Overflow) -> Tensor | None:
    """A mask of the values that the reference has to round, or None if there are none."""
    low, high = (end.item() for end in x.aminmax())
    safe_low, safe_high = _safe_range(element)
    if safe_low <= low and high <= safe_high:  # False for NaN
        return None
    if overflow is Overflow.SATURATE and safe_high == element.max_value:
        return x.isnan()
    return ~((x >= safe_low) & (x <= safe_high))


def _clamped(x: Tensor, element: Element, outside: Tensor | None) -> Tensor:
    return x if outside is None else x.clamp(*_safe_range(element))


def _times_power(a: Tensor, exponent: int) -> Tensor:
    """a * 2^exponent in place, in two steps where one factor would not be a float32."""
    return a.mul_(2.0**64).mul_(2.0 ** (exponent - 64)) if exponent > 127 else a.mul_(2.0**exponent)


def _float_bits(exponent: int) -> int:
    """The bits of the float32 2^exponent."""
    return (exponent + 127) << 23


def largest_finite(x: Tensor) -> Tensor:
    """The largest finite magnitude of (rows, cols) as a float32 scalar tensor; 0 if no value is finite."""
    largest = torch.zeros((), device=x.device)
    for r, c in pieces(*x.shape, unit=1):
        piece = x[r, c].float()
        largest = torch.maximum(largest, torch.where(piece.isfinite(), piece.abs(), 0.0).amax())
    return largest
