"""The codec on the CPU runs loops that numba compiles (`loops.py`), or `reference.py` on one piece after another.

Where numba (the extra `cpu`) is missing, the reference encodes and decodes PIECE values at a time, so that its scratch memory stays below
half a MiB; that takes 100 to 400 nanoseconds a value instead of 1 to 2. Importing numba and reading the compiled loops from disk takes 0.8
seconds, as long as the reference takes for PATIENCE values, so the reference encodes and decodes small tensors until they were PATIENCE
values in all. This module also serves tensors on a GPU for which there is no kernel, through the reference.

All of it runs on one thread: torch would start threads for each of the reference's operations on a piece, which take microseconds, and join
them again; where other programs keep the cores busy a join lasts as long as the scheduler's time slice.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from functools import cache, lru_cache
from importlib.util import find_spec
from itertools import pairwise
from math import frexp, lcm
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paredown.codec import reference
from paredown.codec.reference import COVER, OCP, Encoding, PackedParts
from paredown.formats.element import Element, ElementKind, Specials
from paredown.formats.format import Format
from paredown.formats.rounding import WORD, Overflow, Rounding, Seed

PIECE = 1 << 12  # values that the reference encodes at a time: about 100 bytes of scratch memory each
GPU_PIECE = 1 << 17
FEW_VALUES = 1 << 14  # a tensor with more imports numba at once
PATIENCE, CALL = 1 << 21, PIECE  # CALL: a call of the reference takes as long as encoding this many values
FORKED_NUMEL = 1 << 15  # torch uses several threads for operations on more values
LOOPS = "paredown.codec.loops"


def encode_rows(x: Tensor, encoding: Encoding, given: PackedParts | None, bits: Tensor | None = None) -> PackedParts:
    """Return the codes and scales of `x`, (rows, cols), by compiled loops or `reference.encode_rows`, with the same result.

    `given`: scales to use, None to choose them. `bits`: int32 random bits, one for each value, in place of those from the seed.
    """
    out = encoding.empty_parts(*x.shape, device=x.device, tensor_scale=given.tensor_scale if given else None)
    loops = find_loops(x)
    if loops is not None:
        if encoding.rule == GIVEN and given is not None:
            out.copy_(given)
        _run_encode(loops, x.contiguous(), encoding, out, None, bits)
        return out
    with one_thread(x):
        for r, c in _pieces_of(encoding, x):
            words = _bits(encoding, x, r, c) if bits is None else bits[r, c].long() & WORD
            parts = reference.encode_rows(x[r, c], encoding, _piece_of(given, encoding, r, c), words)
            _piece_of(out, encoding, r, c).copy_(parts)
    return out


def decode_rows(parts: PackedParts, encoding: Encoding, out: Tensor) -> Tensor:
    """Write the values decoded from `parts` (codes, scales, minimums) into contiguous `out`, (rows, cols), and return `out`."""
    loops = find_loops(out)
    if loops is not None:
        numbers, tables = numbers_of(encoding.format, encoding.rounding, encoding.overflow, COVER)
        loops.decode(_memory(loops, parts), _call(loops, out, parts), bytes_of(out), numbers, tables)
        return out
    with one_thread(out):
        for r, c in _pieces_of(encoding, out):
            out[r, c] = reference.decode_rows(_piece_of(parts, encoding, r, c), encoding.format, c.stop - c.start, out.dtype)
    return out


def decoder(parts: PackedParts, encoding: Encoding, rows: int, cols: int) -> Callable[[Tensor], Tensor]:
    """Return a function that decodes `parts` (codes, scales, minimums) into its argument, contiguous, of rows * cols values."""
    return lambda out: decode_rows(parts, encoding, out.view(rows, cols))


def round_trip_rows(x: Tensor, encoding: Encoding, given: PackedParts | None, out: Tensor) -> Tensor:
    """Write `x`, (rows, cols), rounded to values of the encoding's format into `out`, and return `out`.

    `given`: scales to use, None to choose them.
    """
    loops = find_loops(x)
    if loops is not None:
        parts = given if given is not None else PackedParts()
        _run_encode(loops, x, encoding, parts, out)
        return out
    with one_thread(x):
        for r, c in _pieces_of(encoding, x):
            bits = _bits(encoding, x, r, c)
            out[r, c] = reference.round_trip_rows(x[r, c], encoding, _piece_of(given, encoding, r, c), bits)
    return out


def largest_finite(x: Tensor) -> Tensor:
    """Return the largest finite magnitude of `x`, (rows, cols), as a float32 scalar tensor; 0 if no value is finite."""
    largest = torch.stack(torch.aminmax(x)).float().abs().amax() if x.numel() else torch.zeros((), device=x.device)
    if largest.isfinite():
        return largest
    largest = torch.zeros((), device=x.device)
    for r, c in pieces(*x.shape, unit=1, size=GPU_PIECE):
        piece = x[r, c].float()
        largest = torch.maximum(largest, torch.where(piece.isfinite(), piece.abs(), 0.0).amax())
    return largest


def random_bits(seed: Seed, start: int, count: int, device: torch.device) -> Tensor:
    """Return the random bits of `count` elements from index `start` on as int32, (count,), equal to the reference's."""
    out = torch.empty(count, dtype=torch.int32, device=device)
    loops = find_loops(out)
    if loops is None:
        return out.copy_((reference.random_bits(seed, start, count, device) ^ (1 << 31)) - (1 << 31))
    loops.random_bits(loops.Call(1, count, 0, np.float32(1), *seed.keys(), start), bytes_of(out).view(np.uint32))
    return out


def pack_mask(x: Tensor, low: float, high: float, out: Tensor) -> bool:
    """Write one bit per value of flat `x` into `out`, 1 where low < x < high, and return True.

    Without numba nothing is written and the result is False; then the caller must do it otherwise.
    """
    loops = find_loops(x)
    if loops is None or x.dtype not in MASKED:
        return False
    bounds = torch.tensor([low, high], dtype=torch.float32 if x.dtype is torch.bool else x.dtype).float().numpy()
    loops.pack_mask(bytes_of(x), MASKED[x.dtype], *bounds, bytes_of(out))
    return True


def select(bits: Tensor, inside: Tensor, outside: Tensor, out: Tensor) -> bool:
    """Write `inside` into flat `out` where the mask's bit is 1 and `outside` elsewhere, and return True.

    `bits` has eight values in each byte. Without numba nothing is written and the result is False.
    """
    loops = find_loops(out)
    if loops is None:
        return False
    words = (bytes_of(tensor).view(WORDS[out.dtype.itemsize]) for tensor in (inside, outside, out))
    loops.select(bytes_of(bits), *words)
    return True


# --- compiled loops ---------------------------------------------------------------------------------------------------

GIVEN = "given"
ROUNDINGS = (Rounding.NEAREST_EVEN, Rounding.TOWARD_ZERO, Rounding.NEAREST_AWAY, Rounding.STOCHASTIC)  # as loops.py counts them
RULES = (COVER, OCP, GIVEN)
STORED = {"fp32": 1, "bf16": 2}
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
MASKED = {**DTYPES, torch.bool: 3}
WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
NO_FLOATS, NO_WORDS, NO_BYTES = (np.empty(0, dtype) for dtype in (np.float32, np.uint32, np.uint8))


def find_loops(x: Tensor) -> ModuleType | None:
    """Return the module `codec.loops`, whose functions numba compiles, to encode or decode `x`; None if it cannot be used.

    That is: on a GPU, without numba, or as long as importing it takes longer than plain torch takes for the values so far.
    """
    numel = x.numel()
    if x.device.type != "cpu" or numel == 0 or not has_numba():
        return None
    if LOOPS not in sys.modules and numel <= FEW_VALUES and _patience.lasts(numel):
        return None
    from paredown.codec import loops

    return loops


def load_loops() -> None:
    """Import `codec.loops` now if numba is installed, so that measurements of later calls do not include the import."""
    _patience.left = 0
    find_loops(torch.empty(1))


@cache
def has_numba() -> bool:
    """Return whether numba, which compiles `codec.loops`, is installed."""
    return find_spec("numba") is not None


class Patience:
    """A count of the values that plain torch has encoded; once they would have repaid the import of numba, numba is used."""

    def __init__(self) -> None:
        self.left = PATIENCE

    def lasts(self, numel: int) -> bool:
        """Count a call with `numel` values, and return whether plain torch should do it, since numba's import would not pay off."""
        self.left -= numel + CALL
        return self.left > 0


_patience = Patience()


def _run_encode(
    loops: ModuleType, x: Tensor, encoding: Encoding, parts: PackedParts, out: Tensor | None, bits: Tensor | None = None
) -> None:
    numbers, tables = numbers_of(encoding.format, encoding.rounding, encoding.overflow, encoding.rule)
    seed = encoding.seed if encoding.rounding is Rounding.STOCHASTIC else None
    words = NO_WORDS if bits is None else bytes_of(bits := bits.contiguous()).view(np.uint32)
    loops.encode(bytes_of(x), _call(loops, x, parts, seed), _memory(loops, parts), bytes_of(out), numbers, tables, words)


def _call(loops: ModuleType, x: Tensor, parts: PackedParts, seed: Seed | None = None) -> Any:
    scale = np.float32(1.0 if parts.tensor_scale is None else parts.tensor_scale.item())
    keys = (*seed.keys(), seed.first_index) if seed is not None else (0, 0, 0)
    return loops.Call(*x.shape, DTYPES[x.dtype], scale, *keys)


def _memory(loops: ModuleType, parts: PackedParts) -> Any:
    return loops.Parts(*map(bytes_of, (parts.codes, parts.scales, parts.minimums)))


def bytes_of(x: Tensor | None) -> Any:
    """Return the memory of a contiguous tensor as a numpy array of bytes, valid while the tensor lives; empty for None.

    `Tensor.numpy` would forbid `resize_` of its storage from then on, which FSDP2 calls, and np.from_dlpack takes six times as long.
    """
    if x is None or x.nbytes == 0:
        return NO_BYTES
    assert x.is_contiguous(), "loops read the memory of contiguous tensors"
    return np.frombuffer(_buffer(x.nbytes).from_address(x.data_ptr()), np.uint8)


@lru_cache(maxsize=4096)
def _buffer(num_bytes: int) -> Any:
    return ctypes.c_uint8 * num_bytes


@lru_cache(maxsize=1024)
def numbers_of(format: Format, rounding: Rounding, overflow: Overflow, rule: str) -> tuple[Any, Any]:
    """Return an encoding as the two records that compiled loops read: numbers, and tables of the values of codes.

    `rule`: how scales are chosen: "cover", "ocp" or "given".
    """
    from paredown.codec import loops

    element, scale, is_nonfinite = format.element, format.scale, overflow is Overflow.NONFINITE
    special = element.nan_code if element.inf_code is None else element.inf_code
    is_table, is_float = element.kind is ElementKind.TABLE, element.kind is ElementKind.FLOAT
    is_integer = not is_table and not is_float and element.width > 1  # int1 reaches further below 0 than above
    lowest, highest = reference.table_limits(element, rounding) if is_table else (0.0, 0.0)
    of_element = "width", "mantissa_bits", "min_exponent", "max_code", "min_code", "sign_code", "inf_code", "nan_code"
    numbers: dict[str, float | None] = {
        **{name: getattr(element, name) for name in (*of_element, "max_value", "min_value")},
        "kind": loops.TABLE if is_table else loops.INTEGER if is_integer else loops.GRID,
        "sub_bits": element.mantissa_bits if element.subnormals else 0,
        "special": special if is_nonfinite else None,
        "is_nonfinite": is_nonfinite and special is None,
        "has_minus_zero": is_float and element.specials is not Specials.FNUZ,
        "is_float": is_float,
        "rounding": ROUNDINGS.index(rounding),
        "rule": RULES.index(rule),
        "block": format.block or 0,
        "scale": 0 if scale is None else STORED.get(scale.name, loops.CODE),
        **_scale_numbers(scale),
        "has_tensor_scale": format.has_tensor_scale,
        "minimum": 0 if format.minimum is None else STORED[format.minimum.name],
        "max_exponent": frexp(element.max_value)[1],
        "lowest": lowest,
        "highest": highest,
    }
    record = np.zeros(1, loops.NUMBERS)
    record[0] = tuple(-1 if numbers[name] is None else numbers[name] for name in loops.NAMES)
    thresholds = _thresholds(element, rounding) if is_table else (NO_FLOATS, NO_WORDS)
    return record[0], loops.Tables(_table(element), _table(scale), *thresholds)


def _scale_numbers(scale: Element | None) -> dict[str, float]:
    """Return, by name, the numbers by which compiled loops round scales to 8-bit codes; zeros if scales are not stored so.

    code = (bits of the scale as a float64, rounded up) - offset; below the smallest normal value it is a number of fixed steps.
    """
    if scale is None or scale.width != 8:
        values: tuple[float, ...] = (0, 0, 0, 0, 0, 0.0, 0.0)
    elif scale.kind is ElementKind.TABLE:  # e8m0: 2^-127 is code 0, and what is past the largest gets the code of NaN
        values = (0, 1023 - 127, 0, 255, 255, 2.0**-127, 0.0)
    else:
        m, least, sub_bits = scale.mantissa_bits, scale.min_exponent, scale.mantissa_bits if scale.subnormals else 0
        values = ((least + 1022) << m, m - sub_bits, scale.max_code, scale.nan_code or 0, 2.0**least, 2.0 ** (sub_bits - least))
        values = (m, *values)
    names = ("mantissa_bits", "offset", "hole", "most", "nan", "smallest", "steps")
    return {f"scale_{name}": value for name, value in zip(names, values, strict=True)}


@lru_cache(maxsize=256)
def _table(element: Element | None) -> Any:
    """Return an element's values, indexed by code; an empty array for elements wider than 8 bits."""
    if element is None or element.width > 8:
        return NO_FLOATS
    return np.array(element.values(), np.float32)  # no memory of torch, which the first measured step would be charged for


def table_thresholds(element: Element, rounding: Rounding) -> Any:
    """Return, for each code from 1 on, the smallest float32 that rounds to it, for an element that is a table of values.

    With stochastic rounding, it is the smallest float32 that always gets the code.
    """
    values, up = np.array(element.table, np.float32), np.float32(np.inf)
    below, above = values[:-1], values[1:]
    if rounding is Rounding.STOCHASTIC:
        return above
    if rounding is Rounding.TOWARD_ZERO:
        return np.where(above > 0, above, np.nextafter(below, up))
    middle = (below.astype(np.float64) + above) / 2
    nearest = middle.astype(np.float32)
    nearest = np.where(nearest < middle, np.nextafter(nearest, up), nearest)
    ties_up = middle > 0 if rounding is Rounding.NEAREST_AWAY or element.name == "e8m0" else np.arange(len(middle)) % 2 == 1
    return np.where((nearest == middle) & ~ties_up, np.nextafter(nearest, up), nearest)


@lru_cache(maxsize=256)
def _thresholds(element: Element, rounding: Rounding) -> tuple[Any, Any]:
    """Return two arrays for the loops, in which a value's code is the sum of `signs` over the thresholds that it reaches.

    A sign is 1, or 2^32 - 1, which stands for -1. Only rounding toward zero in a table without 0 needs that.
    """
    thresholds, up = table_thresholds(element, rounding), np.float32(np.inf)
    if rounding is Rounding.STOCHASTIC:
        thresholds = thresholds[:-1]  # thresholds of the code below; the largest value has none above it
    signs = np.ones(len(thresholds), np.uint32)
    across = [low for low, high in pairwise(element.table) if low < 0 < high]
    if rounding is Rounding.TOWARD_ZERO and across:  # up if low < y < 0, down from 0 on, and up from `high` on
        thresholds = np.append(thresholds, [np.nextafter(np.float32(across[0]), up), np.float32(0)])
        signs = np.append(signs, [1, WORD]).astype(np.uint32)
    return thresholds.astype(np.float32), signs


# --- the reference in pieces ------------------------------------------------------------------------------------------


@contextmanager
def one_thread(x: Tensor) -> Generator[None]:
    """Return a context in which torch uses one thread: operations on small pieces of `x` are faster without others.

    It changes nothing if `x` itself is small or on a GPU.
    """
    before = torch.get_num_threads() if x.numel() > FORKED_NUMEL and x.device.type == "cpu" else 1
    if before == 1:
        yield
        return
    torch.set_num_threads(1)  # 0.2 microseconds, and for this thread alone
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _pieces_of(encoding: Encoding, x: Tensor) -> Iterator[tuple[slice, slice]]:
    """Yield (row, column) slices that cover `x`, (rows, cols), by pieces of some thousand values and of whole blocks."""
    return pieces(*x.shape, unit=lcm(encoding.format.block or 1, 8), size=PIECE if x.device.type == "cpu" else GPU_PIECE)


def pieces(rows: int, cols: int, *, unit: int, size: int) -> Iterator[tuple[slice, slice]]:
    """Yield (row, column) slices of about `size` values each that cover a (rows, cols) tensor: some rows, or part of one.

    Parts of a row begin at multiples of `unit`.

    >>> list(pieces(3, 2, unit=8, size=100))
    [(slice(0, 3, None), slice(0, 2, None))]
    """
    if rows * cols == 0:
        return
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


def _bits(encoding: Encoding, x: Tensor, r: slice, c: slice) -> Tensor | None:
    """Return the random bits of the values x[r, c]; None if the encoding's rounding is not stochastic."""
    if encoding.rounding is not Rounding.STOCHASTIC:
        return None
    start = encoding.seed.first_index + r.start * x.shape[1] + c.start
    return reference.random_bits(encoding.seed, start, x[r, c].numel(), x.device).view(x[r, c].shape)
