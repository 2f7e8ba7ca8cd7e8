"""Host functions prepare and launch the kernels that update parameters and add up gradients.

Sums of squares of many packed tensors take two launches whatever their number: one number for each tile, then one for each tensor.

    tile      squares[i] = sum over its values of (code value * scale)^2
    tensor    sum of its tiles, in their order: the same bits every time, which atomic additions would not give

Each tensor is treated as one long row; tensors whose rows end within a block are decoded instead (`covers_squares`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from paredown.codec.kernels.launch import Launch
from paredown.codec.kernels.numbers import BF16, FP32, decode_values, load_scale
from paredown.codec.kernels.pack import load_codes, load_shared
from paredown.codec.kernels.rows import ROUNDINGS, SCALES, element_constants
from paredown.codec.packed import PackedTensor
from paredown.formats.element import ElementKind
from paredown.formats.format import Format
from paredown.formats.rounding import Overflow, Seed, signed
from paredown.optim.kernels import arithmetic, slots, update
from paredown.optim.kernels.update import fold_kernel
from paredown.optim.reference import Fold, SlotKind, UpdateLayout, UpdateSlot, UpdateUnit
from paredown.optim.rules import Rule, as_float32

RULE_NUMBERS = {
    "sgd": arithmetic.SGD.value,
    "sgdm": arithmetic.SGDM.value,
    "nesterov": arithmetic.NESTEROV.value,
    "adamw": arithmetic.ADAMW.value,
    "lion": arithmetic.LION.value,
}
STORAGES = {torch.float32: slots.PLAIN_FP32.value, torch.bfloat16: slots.PLAIN_BF16.value, torch.float16: slots.PLAIN_FP16.value}
COLUMNS = update.COLUMNS.value
NUM_HYPERS = 12  # numbers in a row: at most 9, padded to a multiple of 16 bytes
TILE, RAGGED_TILE = 2048, 1024  # values; 16 and 8 for each thread
WARPS = 4
MAX_REGISTERS = 96  # allows 20 warps at a time, whose loads and arithmetic overlap
RUN, EVEN, RAGGED = arithmetic.RUN.value, arithmetic.EVEN.value, arithmetic.RAGGED.value
MOST_TURNS = 8  # tiles per program: looking up its tensor takes 200 operations, too many for 16 values per thread
PROGRAMS = 4096  # some for each multiprocessor: with fewer programs, each takes one tile
MOST_BLOCKS = 64  # in a tile: as many as are sampled together
ABSENT = ((slots.ABSENT.value, 0, 0, 0, 0, 0.0, 0.0, 0.0, 0.0), (0,) * 11)


# --- what there is ----------------------------------------------------------------------------------------------------


@cache
def covers(how: UpdateLayout) -> bool:
    """Return whether kernels can do this update: not Muon's; tensors must be unpacked, or in 4 or 8 bits with equal blocks."""
    kinds = (how.weight, *how.moments, how.gradient)
    return (
        how.rule in RULE_NUMBERS
        and how.block & (how.block - 1) == 0
        and 16 <= how.block <= RAGGED_TILE
        and all(_covers_kind(kind, how.block) for kind in kinds)
        and (not how.has_residue or how.weight.dtype is torch.bfloat16)
    )


def _covers_kind(kind: SlotKind, block: int) -> bool:
    if kind.format is None:
        return kind.dtype in STORAGES and kind.roots == 0
    return kind.format.block == block and covers_format(kind.format)


@cache
def covers_format(format: Format) -> bool:
    """Return whether the kernels that update parameters and sum gradients can read and write this format."""
    element = format.element
    return (
        format.block is not None
        and format.minimum is None
        and not format.has_tensor_scale
        and element.kind is not ElementKind.TABLE
        and element.width in (4, 8)
        and element.min_exponent >= -126
        and element.max_value >= 4  # so that no scale is so large that its inverse is subnormal
    )


@cache
def slot_constants(kind: SlotKind, is_weight: bool, has_residue: bool) -> tuple[Any, Any]:
    """Return the compile-time constants (SLOT, ELEMENT) with which kernels read and write a tensor stored as `kind` says.

    `slots.py` lists them. `is_weight`: it is a weight, not a moment or gradient; `has_residue`: a weight with an int8 residue.
    """
    stored = kind.stored
    element = stored.element
    is_sticky = is_weight and stored.scale is not None and stored.scale.name == "e8m0"
    storage = slots.BLOCKS.value if kind.format is not None else STORAGES[kind.dtype]  # type: ignore[index]
    half = 2.0 ** -(1 + (15 if has_residue else element.mantissa_bits))
    limits = (element.max_value, half, as_float32(0.2 * element.max_value), as_float32(1 / element.max_value))
    scale = SCALES[stored.scale.name].value if stored.scale else 0
    rounding = ROUNDINGS[kind.rounding].value
    return (storage, rounding, kind.roots, scale, int(is_sticky), *limits), element_constants(element, Overflow.SATURATE)


@cache
def constants_of(how: UpdateLayout) -> dict[str, Any]:
    """Return the compile-time constants of `update_kernel` for tensors stored as `how` says, except the constant TILE."""
    (w, we), (g, ge) = slot_constants(how.weight, True, how.has_residue), slot_constants(how.gradient, False, False)
    moments = [slot_constants(kind, False, False) for kind in how.moments]
    (m, me), (v, ve) = [*moments, ABSENT, ABSENT][:2]
    return {
        "RULE": RULE_NUMBERS[how.rule], "W": w, "WE": we, "HAS_RESIDUE": how.has_residue, "M": m, "ME": me, "V": v, "VE": ve,
        "G": g, "GE": ge, "num_warps": WARPS, "enable_fp_fusion": False, "maxnreg": MAX_REGISTERS,
    }  # fmt: skip


class UpdateTiles(NamedTuple):
    """How many tiles a tensor has: first `full` ones, contiguous in memory, then `others`, with the shape EVEN or RAGGED."""

    full: int
    others: int
    shape: int
    first_other: int  # the number of the first of `others`, counted in tiles of their size
    blocks_per_row: int
    num_blocks: int


@cache
def tile_blocks(shape: int, block: int) -> int:
    """Return how many blocks of length `block` a tile has, given its `shape`: RUN (contiguous), EVEN or RAGGED."""
    return min((RAGGED_TILE if shape == RAGGED else TILE) // block, MOST_BLOCKS)


@lru_cache(maxsize=4096)
def tiles_of(rows: int, cols: int, first_index: int, block: int) -> UpdateTiles:
    """Return the tiles (values that a program loads together) into which kernels divide a tensor of (rows, cols) values.

    A tile is contiguous (a RUN) only if no index passes 2^32 within it, and if `first_index` is a multiple of 4.
    """
    is_even = first_index % 4 == 0
    blocks_per_row, shape = -(-cols // block), EVEN if cols % 16 == 0 and is_even else RAGGED
    num_blocks, size = rows * blocks_per_row, tile_blocks(RUN, block) * block
    is_run = rows == 1 or cols % block == 0
    is_narrow = first_index % size == 0 or first_index + rows * cols <= 1 << 32
    full = rows * cols // size if is_run and is_narrow and is_even else 0
    done, few = full * size // block, tile_blocks(shape, block)
    return UpdateTiles(full, -(-(num_blocks - done) // few), shape, done // few, blocks_per_row, num_blocks)


# --- many tensors -----------------------------------------------------------------------------------------------------


class LaunchGroup:
    """Parameters on one device that are stored alike, with the tables by which a few kernel launches update them together."""

    def __init__(self, rule: Rule, units: Sequence[UpdateUnit], seed: int) -> None:
        self.rule, self.units, self.how = rule, list(units), units[0].how(rule.name)
        self.device = units[0].weight.codes.device
        self._tiles = [tiles_of(u.rows, u.cols, u.first_index, self.how.block) for u in units]
        self._has_factor = any(u.factor is not None for u in units)
        self._one = torch.ones((), device=self.device) if self._has_factor else None
        self._turns = max(1, min(sum(tiles.full for tiles in self._tiles) // PROGRAMS, MOST_TURNS))
        self._address, first = 0, [0, 0, 0]
        rows: list[list[int]] = []
        for unit, tiles in zip(self.units, self._tiles, strict=True):
            rows.append(self._row(unit, tiles, seed, first))
            first[RUN] += -(-tiles.full // self._turns)
            first[tiles.shape] += tiles.others
        self._table = torch.tensor(rows, dtype=torch.int64).to(self.device)
        self._owners = [self._owners_of(shape) for shape in (RUN, EVEN, RAGGED)]
        self._grad_addresses = np.zeros((0, 2), np.int64)
        self._set_addresses(np.array([_addresses(u.gradient) for u in units], np.int64))

    def _row(self, unit: UpdateUnit, tiles: UpdateTiles, seed: int, first: list[int]) -> list[int]:
        """Return a parameter's row in the table that the kernel reads: addresses, sizes, and keys of the random bits.

        `first`: for each shape of tiles (RUN, EVEN, RAGGED), the number of the parameter's first program (thread block).
        """
        m, v = [*unit.moments, None, None][:2]
        pointers = [*_addresses(unit.weight), _addresses(unit.residue)[0], *_addresses(m), *_addresses(v)]
        for address in pointers:
            self._address |= address
        factor = unit.factor if unit.factor is not None else self._one
        others = [0 if factor is None else factor.data_ptr(), unit.counters.data_ptr()]
        tiles_there = [-first[RUN], tiles.first_other - first[tiles.shape]]
        sizes = [*tiles_there, unit.cols, tiles.blocks_per_row, tiles.num_blocks, unit.first_index]
        return [*pointers, *others, *sizes, *Seed(seed, 8 * unit.tensor_id).base_keys(), tiles.full]

    def _owners_of(self, shape: int) -> Tensor:
        """Return which parameter each program (thread block) updates, by index, in the launch with tiles of this `shape`."""
        runs = [-(-tiles.full // self._turns) for tiles in self._tiles]
        counts = runs if shape == RUN else [tiles.others if shape == tiles.shape else 0 for tiles in self._tiles]
        return torch.from_numpy(np.repeat(np.arange(len(counts), dtype=np.int32), counts)).to(self.device)

    def set_gradients(self, gradients: Sequence[Tensor]) -> None:
        """Read these unpacked gradients in the next updates; each must have the dtype and size of the one that it replaces."""
        addresses = np.zeros((len(gradients), 2), np.int64)
        addresses[:, 0] = [grad.data_ptr() for grad in gradients]
        self._set_addresses(addresses)

    def _set_addresses(self, addresses: np.ndarray[Any, np.dtype[np.int64]]) -> None:
        if np.array_equal(addresses, self._grad_addresses):
            return
        self._grad_addresses = addresses
        self._grads = torch.from_numpy(addresses).to(self.device, non_blocking=True)
        aligned = int(np.bitwise_or.reduce(addresses, axis=None)) | self._address
        self._launches = _launches(self.how, self._has_factor, aligned % 16 == 0, tuple(len(o) for o in self._owners))

    def update(self, hypers: Sequence[Sequence[float]], rows: Sequence[int] | int, steps: Sequence[int] | int) -> None:
        """Update all parameters of the group once.

        Parameter i gets the hyperparameters hypers[rows[i]] and is at step steps[i], from 1; one number for `rows` or `steps` is for all.
        """
        alike = isinstance(rows, int) and isinstance(steps, int)
        count = 1 if alike else len(self.units)
        numbers = np.zeros((len(hypers), NUM_HYPERS), np.float32)
        for row, hyper in enumerate(hypers):
            numbers[row, : len(hyper)] = hyper
        at = np.empty((count, 2), np.int32)
        at[:, 0], at[:, 1] = rows, steps
        both = np.concatenate([numbers.view(np.int32).ravel(), at.ravel()])
        there = torch.from_numpy(both).to(
            self.device, non_blocking=True
        )  # pageable memory: copied before the call returns, without synchronizing
        hypers_there, at_there = there[: numbers.size].view(torch.float32), there[numbers.size :]
        for launch, owners in zip(self._launches, self._owners, strict=True):
            if launch is not None:
                launch((owners, self._table, self._grads, at_there, hypers_there), (0 if alike else 2, self._turns))


@lru_cache(maxsize=1024)
def _launches(how: UpdateLayout, has_factor: bool, is_aligned: bool, counts: tuple[int, ...]) -> list[Launch | None]:
    """Return a launch of `update_kernel` for each shape of tiles (RUN, EVEN, RAGGED), or None if there is no such tile.

    `counts`: programs of each. `has_factor`: a tensor multiplies gradients. `is_aligned`: all addresses are multiples of 16.
    """
    constants = {**constants_of(how), "HAS_FACTOR": has_factor, "ALIGNED": is_aligned, "NUM_HYPERS": NUM_HYPERS}
    return [
        Launch(update.update_kernel, count, (), {**constants, "TILE": tile_constant(shape, how.block)}) if count else None
        for shape, count in enumerate(counts)
    ]


def tile_constant(shape: int, block: int) -> tuple[int, int, int]:
    """Return the constant TILE of kernels, (shape, blocks in a tile, block length); `shape` is RUN, EVEN or RAGGED."""
    return shape, tile_blocks(shape, block), block


def _addresses(slot: UpdateSlot | None) -> tuple[int, int]:
    if slot is None:
        return 0, 0
    scales = slot.parts.scales
    return slot.codes.data_ptr(), 0 if scales is None else scales.data_ptr()


# --- one tensor -------------------------------------------------------------------------------------------------------


def update_one(unit: UpdateUnit, how: UpdateLayout, hyper: Sequence[float], step: int, seed: int, gradient: Tensor | None) -> None:
    """Update one parameter and its state in place; `gradient`, if not None, is used instead of the one in `unit`.

    `how`: how the tensors are stored. `hyper`: the rule's hyperparameters. `step` counts from 1. `seed`: of stochastic rounding.
    """
    w, g = unit.weight.parts, unit.gradient.parts
    pointers: list[Tensor | None] = [w.codes, w.scales, None if unit.residue is None else unit.residue.codes]
    for moment in unit.moments:
        pointers += [moment.parts.codes, moment.parts.scales]
    pointers += [None] * (7 - len(pointers))
    pointers += [g.codes if gradient is None else gradient, g.scales, unit.factor]
    k0, k1 = map(signed, Seed(seed, 8 * unit.tensor_id, step).keys())
    scalars = (unit.first_index, k0, k1, *hyper, *(0.0,) * (9 - len(hyper)))
    arguments = (*[w.codes if t is None else t for t in pointers], unit.counters)  # placeholders of missing tensors are not read
    for launch in _launches_of_one(how, unit.rows, unit.cols, unit.first_index, unit.factor is not None):
        launch(arguments, scalars)


@lru_cache(maxsize=4096)
def _launches_of_one(how: UpdateLayout, rows: int, cols: int, first_index: int, has_factor: bool) -> list[Launch]:
    constants = {**constants_of(how), "HAS_FACTOR": has_factor}
    return _both(update.update_one_kernel, tiles_of(rows, cols, first_index, how.block), cols, how.block, constants)


def _both(kernel: Any, tiles: UpdateTiles, cols: int, block: int, constants: dict[str, Any]) -> list[Launch]:
    """Return the launches of `kernel` for one tensor: one for its full tiles and one for its other tiles."""
    sizes = (cols, tiles.blocks_per_row, tiles.num_blocks)
    parts = ((tiles.full, 0, RUN), (tiles.others, tiles.first_other, tiles.shape))
    return [
        Launch(kernel, count, (first, *sizes), {**constants, "TILE": tile_constant(shape, block)})
        for count, first, shape in parts
        if count
    ]


def fold(packed: PackedTensor, grad: Tensor, how: Fold) -> None:
    """Add `grad`, which must be contiguous, to a packed sum of gradients in place, weighted and rounded as `how` says."""
    k0, k1 = map(signed, how.seed.keys())
    has_factor = how.factor is not None and not how.is_first
    arguments = (packed.codes, packed.scales, grad, how.factor if has_factor else packed.codes)
    kind = SlotKind(packed.format, None, how.rounding, 0)
    for launch in _folds(kind, grad.dtype, packed.shape, how.seed.first_index, has_factor, how.is_first):
        launch(arguments, (how.seed.first_index, k0, k1, how.weight))


@lru_cache(maxsize=4096)
def _folds(
    kind: SlotKind, dtype: torch.dtype, shape: torch.Size, first_index: int, has_factor: bool, is_first: bool
) -> list[Launch]:
    format = kind.stored
    assert format.block is not None
    slot, element = slot_constants(kind, False, False)
    constants = {
        "SLOT": slot, "ELEMENT": element, "GRAD": STORAGES[dtype], "HAS_FACTOR": has_factor, "IS_FIRST": is_first,
        "num_warps": WARPS, "enable_fp_fusion": False,
    }  # fmt: skip
    rows, cols = format.rows_and_cols(shape)
    return _both(fold_kernel, tiles_of(rows, cols, first_index, format.block), cols, format.block, constants)


# --- Sums of squares of many packed tensors, in two launches whatever their number ---

SQUARES_TILE = 4096
SQUARES_COLUMNS = 4  # address of codes, address of scales, number of values, first tile


@triton.jit
def squares_kernel(
    owners_ptr, table_ptr, squares_ptr, ELEMENT: tl.constexpr, BLOCK_LEN: tl.constexpr, SCALE: tl.constexpr, COLS: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Store a tile's sum of squares: for codes [ c0 c1 | c2 c3 ] and scales [ s0 | s1 ] it is (c0 s0)^2 + ... + (c3 s1)^2."""
    pid = tl.program_id(0)
    row = table_ptr + tl.load(owners_ptr + pid) * COLS
    numel = tl.load(row + 2)
    start = (pid - tl.load(row + 3)) * TILE
    codes_ptr = tl.multiple_of(tl.load(row).to(tl.pointer_type(tl.uint8)), 16)
    if SCALE == FP32:
        scales_ptr = tl.load(row + 1).to(tl.pointer_type(tl.int32))
    elif SCALE == BF16:
        scales_ptr = tl.load(row + 1).to(tl.pointer_type(tl.int16))
    else:
        scales_ptr = tl.load(row + 1).to(tl.pointer_type(tl.uint8))
    BLOCKS: tl.constexpr = TILE // BLOCK_LEN
    byte = start * ELEMENT[1] // 8
    codes = load_codes(codes_ptr + byte, tl.cdiv(numel * ELEMENT[1], 8) - byte, ELEMENT[1], TILE, True)
    at = start // BLOCK_LEN + tl.arange(0, BLOCKS)
    scale = load_scale(load_shared(scales_ptr, at, at * BLOCK_LEN < numel, SCALE), SCALE)
    values = decode_values(codes, table_ptr, ELEMENT).reshape(BLOCKS, BLOCK_LEN) * scale[:, None]
    values = tl.where((start + tl.arange(0, TILE) < numel).reshape(BLOCKS, BLOCK_LEN), values, 0.0)
    tl.store(squares_ptr + pid, tl.sum((values * values).reshape(TILE), 0))


@triton.jit
def totals_kernel(squares_ptr, ends_ptr, totals_ptr, CHUNK: tl.constexpr):
    """Store the sum of squares of one tensor: tensor i has the tiles ends[i] to ends[i + 1], whose sums are at `squares_ptr`."""
    tensor = tl.program_id(0)
    start, end = tl.load(ends_ptr + tensor), tl.load(ends_ptr + tensor + 1)
    total = tl.zeros((CHUNK,), tl.float32)
    while start < end:
        at = start + tl.arange(0, CHUNK)
        total += tl.load(squares_ptr + at, mask=at < end, other=0.0)
        start += CHUNK
    tl.store(totals_ptr + tensor, tl.sum(total, 0))


@cache
def covers_squares(format: Format, shape: torch.Size) -> bool:
    """Return whether a kernel can sum the squares of such a tensor, which must be one row, or have rows that end with a block."""
    rows, cols = format.rows_and_cols(shape)
    block = format.block or 0
    return (
        0 < block <= SQUARES_TILE
        and block & (block - 1) == 0
        and (rows == 1 or cols % block == 0)
        and format.minimum is None
        and not format.has_tensor_scale
        and format.element.width in (4, 8)
        and format.element.table == ()
    )


def square_sums(tensors: Sequence[PackedTensor]) -> Tensor:
    """Return the sum of squares of each tensor in float32; all tensors must have the same format and device."""
    format, device = tensors[0].format, tensors[0].device
    counts = [-(-t.shape.numel() // SQUARES_TILE) for t in tensors]
    ends = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    table = np.empty((len(tensors), SQUARES_COLUMNS), np.int64)
    table[:, 0] = [t.codes.data_ptr() for t in tensors]
    table[:, 1] = [0 if t.scales is None else t.scales.data_ptr() for t in tensors]
    table[:, 2], table[:, 3] = [t.shape.numel() for t in tensors], ends[:-1]
    owners = np.repeat(np.arange(len(tensors), dtype=np.int64), counts)
    there = torch.from_numpy(np.concatenate([table.ravel(), ends, owners])).to(device, non_blocking=True)
    squares, totals = torch.empty(int(ends[-1]), device=device), torch.empty(len(tensors), device=device)
    constants = _constants(format)
    tables = there[: table.size], there[table.size : table.size + len(ends)], there[table.size + len(ends) :]
    with torch.cuda.device(device) if device.type == "cuda" else torch.no_grad():
        squares_kernel[(len(owners),)](
            tables[2], tables[0], squares, **constants, COLS=SQUARES_COLUMNS, TILE=SQUARES_TILE, num_warps=4
        )
        totals_kernel[(len(tensors),)](squares, tables[1], totals, CHUNK=1024, num_warps=4)
    return totals


@cache
def _constants(format: Format) -> dict[str, Any]:
    assert format.scale is not None
    return {
        "ELEMENT": element_constants(format.element, Overflow.SATURATE),
        "BLOCK_LEN": format.block,
        "SCALE": SCALES[format.scale.name].value,
    }
