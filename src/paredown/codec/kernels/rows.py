"""Host functions prepare launches of the kernels that encode, decode and round rows, and say what these cover."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, lru_cache, reduce
from math import frexp
from operator import or_
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from paredown.codec.cpu import table_thresholds
from paredown.codec.kernels import numbers, pack, runtime_formats
from paredown.codec.kernels.launch import Direct, Launch
from paredown.codec.reference import Encoding, PackedParts, table_limits
from paredown.formats.element import TABLES, Element, ElementKind
from paredown.formats.format import Format
from paredown.formats.rounding import Overflow, Rounding, Seed, signed

FP32 = Format.parse("fp32")
WIDTHS = (1, 2, 4, 6, 8, 16)
MAX_BLOCK_LEN = 4096
KINDS = {
    ElementKind.FLOAT: numbers.FLOAT,
    ElementKind.INT: numbers.INT,
    ElementKind.UINT: numbers.UINT,
    ElementKind.TABLE: numbers.TABLE,
}
ROUNDINGS = {
    Rounding.NEAREST_EVEN: numbers.NEAREST_EVEN,
    Rounding.TOWARD_ZERO: numbers.TOWARD_ZERO,
    Rounding.NEAREST_AWAY: numbers.NEAREST_AWAY,
    Rounding.STOCHASTIC: numbers.STOCHASTIC,
}
SCALES = {"fp32": numbers.FP32, "bf16": numbers.BF16, "e8m0": numbers.E8M0, "e4m3fn": numbers.E4M3}
RULES = {"cover": pack.COVER, "ocp": pack.OCP, "given": pack.GIVEN}
AS_INTEGERS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.uint8: torch.uint8}


def covers(encoding: Encoding, job: str) -> bool:
    """Return whether a kernel does this job ("encode", "decode" or "round_trip") for this encoding.

    Kernels do not support elements whose smallest normal value lies below float32's (e8m3fnuz, e4m3b130), tables that users
    define, and scales other than SCALES.
    """
    element, block, scale = encoding.format.element, encoding.format.block, encoding.format.scale
    is_own_table = element.kind is ElementKind.TABLE and element.name not in TABLES
    if element.min_exponent < -126 or is_own_table or (scale is not None and scale.name not in SCALES):
        return False
    if job == "round_trip" and block is None:
        return True
    pow2_block = block is None or (block <= MAX_BLOCK_LEN and block & (block - 1) == 0)
    return element.width in WIDTHS and pow2_block and element.name != "int1"


def encode_rows(x: Tensor, encoding: Encoding, given: PackedParts | None) -> PackedParts:
    """Return the codes and scales of `x`, (rows, cols); `given` has scales to use instead of choosing them, or is None."""
    parts = encoding.empty_parts(*x.shape, device=x.device, tensor_scale=given.tensor_scale if given else None)
    if encoding.rule == "given":
        assert given is not None
        parts.copy_(given)
    assert parts.codes is not None
    _launch_encode(x, parts.codes, encoding, parts, stores_codes=True)
    return parts


def decode_rows(parts: PackedParts, encoding: Encoding, out: Tensor) -> Tensor:
    """Write the values decoded from `parts` (codes, scales, minimums) into `out`, (rows, cols), and return `out`."""
    element = encoding.format.element
    pointers = (parts.codes, out, *shared_of(parts, out), _table(element, Rounding.NEAREST_EVEN, out.device))
    for launch in decodes(*out.shape, encoding.format):
        launch(pointers)
    return out


def decoder(parts: PackedParts, encoding: Encoding, rows: int, cols: int) -> Callable[[Tensor], Tensor]:
    """Return a function that decodes `parts` into its argument, a (rows, cols) tensor; kernel launches are prepared here."""
    codes, direct = parts.codes, Direct(decodes(rows, cols, encoding.format))
    assert codes is not None
    shared = (None if t is None else t.view(AS_INTEGERS.get(t.dtype, t.dtype)) for t in (parts.scales, parts.minimums))
    table = _table(encoding.format.element, Rounding.NEAREST_EVEN, codes.device)
    pointers = (codes, None, *shared, parts.tensor_scale, table)  # None: `out`
    numbers = [None if p is None else p.data_ptr() for p in pointers]
    together = reduce(or_, (number or 0 for number in numbers))

    def decode(out: Tensor) -> Tensor:
        address, key = out.data_ptr(), (out.get_device(), codes.dtype, out.dtype)
        if not direct.run(key, address | together, tuple(address if number is None else number for number in numbers)):
            direct.launch(key, tuple(out if p is None else p for p in pointers))
        return out

    return decode


def round_trip_rows(x: Tensor, encoding: Encoding, given: PackedParts | None, out: Tensor) -> Tensor:
    """Write `x`, (rows, cols), rounded to values of the encoding's format into `out`, and return `out`.

    `given` has scales to use instead of choosing them, or is None.
    """
    element = encoding.format.element
    if encoding.format.block is None and element.kind is not ElementKind.TABLE:
        return round_trip_at_run_time(x, device_spec(element, encoding.overflow, x.device), encoding.rounding, encoding.seed, out)
    _launch_encode(x, out, encoding, given or PackedParts(), stores_codes=False)
    return out


def round_trip_at_run_time(x: Tensor, spec: Tensor, rounding: Rounding, seed: Seed, out: Tensor) -> Tensor:
    """Write `x`, rounded to a number type that the kernel reads from device memory, into `out`, and return `out`.

    `spec`: the type's twelve int32 from `runtime_formats.describe`. One compiled kernel serves all types without blocks.
    """
    random = random_of(seed, x.numel(), rounding)
    for launch in round_trips(x.numel(), rounding, random.step_in_memory, random.wide):
        launch((bf16_as_integers(x), out, spec, random.step), random.scalars)
    return out


def round_trip_by_row(x: Tensor, row: Tensor, rounding: Rounding, step: Tensor, out: Tensor) -> Tensor:
    """Write `x`, rounded to the format that `row`, a row of int32 in device memory, describes, into `out`; return `out`.

    The row also has keys of the random bits; `step` is the training step, one int32 on the device. Captured CUDA graphs use this.
    """
    wide = x.numel() > 1 << 32
    for launch in round_trips(x.numel(), rounding, step_in_memory=True, wide=wide, keys_in_memory=True):
        launch((bf16_as_integers(x), out, row, step), (0, 0, 0))
    return out


def round_many(owners: Tensor, table: Tensor, rounding: Rounding, step: Tensor, tile: int) -> None:
    """Round many tensors in one kernel launch, each to its own number type, as `RuntimeFormatTable.round_many` prepares.

    `owners` has the tensor's index for each program of `tile` values, `table` one row of int64 for each tensor: addresses and sizes.
    """
    constants = {"ROUNDING": ROUNDINGS[rounding].value, "TILE": tile, "num_warps": 4, "enable_fp_fusion": False}
    runtime_formats.round_many_kernel[(owners.numel(),)](owners, table, step, **constants)


@lru_cache(maxsize=4096)
def round_trips(numel: int, rounding: Rounding, step_in_memory: bool, wide: bool, keys_in_memory: bool = False) -> list[Launch]:
    """Return the launches of `round_trip_kernel` that round `numel` values.

    `step_in_memory`, `keys_in_memory`: step and keys of the random bits are in device memory. `wide`: an index may be past 2^32.
    """
    where = {"STEP_IN_MEMORY": step_in_memory, "KEYS_IN_MEMORY": keys_in_memory}
    constants = {"ROUNDING": ROUNDINGS[rounding].value, **where, "WIDE": wide}
    launches: list[Launch] = []
    for tiles in _tiles(1, numel, FP32, "round_trip"):
        first_tile, _, cols, _, _ = tiles.offsets
        own = {name: tiles.constants[name] for name in ("MASKED", "TILE", "num_warps", "enable_fp_fusion")}
        launches.append(Launch(runtime_formats.round_trip_kernel, tiles.count, (cols, first_tile), {**constants, **own}))
    return launches


def largest_finite(x: Tensor) -> Tensor:
    """Return the largest finite magnitude of `x` as a float32 scalar tensor."""
    out = torch.zeros((), dtype=torch.int32, device=x.device)
    tile = 4096
    if x.numel():
        pack.largest_finite_kernel[(triton.cdiv(x.numel(), tile),)](bf16_as_integers(x), out, x.numel(), TILE=tile)
    return out.view(torch.float32)


def _launch_encode(x: Tensor, out: Tensor, encoding: Encoding, parts: PackedParts, *, stores_codes: bool) -> None:
    element, random = encoding.format.element, random_of(encoding.seed, x.numel(), encoding.rounding)
    pointers = (bf16_as_integers(x), out, *shared_of(parts, x), _table(element, encoding.rounding, x.device), random.step, x)
    how = (encoding.format, encoding.rounding, encoding.overflow, encoding.rule)
    for launch in encodes(*x.shape, how, stores_codes, random.step_in_memory, random.wide):
        launch(pointers, random.scalars)


@lru_cache(maxsize=4096)
def encodes(
    rows: int, cols: int, how: Any, stores_codes: bool, step_in_memory: bool, wide: bool, stores_bits: bool = False
) -> list[Launch]:
    """Return the launches of `encode_kernel` that encode (rows, cols) values.

    `how`: format, rounding, overflow and the rule of scales. `stores_bits`: the mask of values above 0 is stored, too.
    Without `stores_codes` the rounded values are stored. `wide`: element indices may be past 2^32.
    """
    format, rounding, overflow, rule = how
    lowest, highest = table_limits(format.element, rounding) if format.element.kind is ElementKind.TABLE else (0.0, 0.0)
    limits = (lowest, highest, format.element.max_value)
    constants = {
        "ELEMENT": element_constants(format.element, overflow),
        "ROUNDING": ROUNDINGS[rounding].value,
        "RULE": RULES[rule].value,
        "SAYS_NAN": overflow is Overflow.SATURATE or format.element.nan_code is not None,
        "STORES_CODES": stores_codes,
        "STORES_BITS": stores_bits,
        "STEP_IN_MEMORY": step_in_memory,
        "WIDE": wide,
        **block_constants(format),
    }
    tiles = _tiles(rows, cols, format, "encode")
    return [Launch(pack.encode_kernel, t.count, (*limits, *t.offsets), {**constants, **t.constants}) for t in tiles]


@lru_cache(maxsize=4096)
def decodes(rows: int, cols: int, format: Format) -> list[Launch]:
    """Return the launches of `decode_kernel` that decode (rows, cols) values."""
    constants = {"ELEMENT": element_constants(format.element, Overflow.SATURATE), **block_constants(format)}
    tiles = _tiles(rows, cols, format, "decode")
    return [Launch(pack.decode_kernel, t.count, t.offsets, {**constants, **t.constants}) for t in tiles]


# --- what the kernels are compiled with -------------------------------------------------------------------------------


@cache
def element_constants(element: Element, overflow: Overflow) -> tuple[int, ...]:
    """Return the numbers that describe an element, a type of number, to kernels at compile time; `numbers.py` lists them."""
    inf_code, nan_code = (-1 if code is None else code for code in (element.inf_code, element.nan_code))
    special = (inf_code if inf_code >= 0 else nan_code) if overflow is Overflow.NONFINITE else -1
    has_minus_zero = element.kind is ElementKind.FLOAT and element.value(element.sign_code) == 0
    numbers = element.width, element.mantissa_bits, element.min_exponent, element.subnormals, element.max_code
    codes = special, inf_code, nan_code, has_minus_zero
    return tuple(int(v) for v in (KINDS[element.kind].value, *numbers, *codes, frexp(element.max_value)[1] - 1))


@cache
def block_constants(format: Format) -> dict[str, int]:
    return {
        "BLOCK_LEN": format.block or 0,
        "SCALE": SCALES[format.scale.name].value if format.scale else 0,
        "MINIMUM": SCALES[format.minimum.name].value if format.minimum else -1,
        "HAS_TENSOR_SCALE": int(format.has_tensor_scale),
    }


@cache
def device_spec(element: Element, overflow: Overflow, device: torch.device) -> Tensor:
    """Return the twelve int32 that describe an element, a type of number, to kernels at run time, as a tensor on the device.

    The tensor is cached: clone it before writing to it.
    """
    return torch.tensor(runtime_formats.describe(element, overflow), dtype=torch.int32, device=device)


@cache
def _table(element: Element, rounding: Rounding, device: torch.device) -> Tensor:
    """Return what kernels read for an element that is a table of values: its thresholds, then its values; otherwise one zero.

    A threshold is the float32 from which on the code is one higher. There are 2^width entries for thresholds, some of them unused.
    """
    if element.kind is not ElementKind.TABLE:
        return torch.zeros(1, device=device)
    thresholds = table_thresholds(element, rounding).tolist()
    num_unused = (1 << element.width) - len(thresholds)
    return torch.tensor([*thresholds, *[0.0] * num_unused, *element.values()], dtype=torch.float32, device=device)


# --- arguments --------------------------------------------------------------------------------------------------------


class Random(NamedTuple):
    """What a kernel needs to draw random bits: the training step, two keys, and the index of the tensor's first element."""

    step: Any
    scalars: tuple[int, int, int]  # first_index, k0, k1
    step_in_memory: bool
    wide: bool


NOT_RANDOM = Random(None, (0, 0, 0), False, False)


def random_of(seed: Seed, numel: int, rounding: Rounding) -> Random:
    if rounding is not Rounding.STOCHASTIC:
        return NOT_RANDOM
    in_memory = isinstance(seed.step, Tensor)
    k0, k1 = map(signed, seed.base_keys() if in_memory else seed.keys())
    wide = seed.first_index + numel > 1 << 32
    return Random(seed.step if in_memory else None, (seed.first_index, k0, k1), in_memory, wide)


def bf16_as_integers(x: Tensor) -> Tensor:
    return x.view(torch.int16) if x.dtype is torch.bfloat16 else x


def shared_of(parts: PackedParts, like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return scales and minimums as integers, and the tensor scale, as kernels read them; `like` stands in for missing ones."""
    scales, minimums = (like if t is None else t.view(AS_INTEGERS[t.dtype]) for t in (parts.scales, parts.minimums))
    return scales, minimums, like if parts.tensor_scale is None else parts.tensor_scale


class RowTiles(NamedTuple):
    """What one kernel launch needs to cover rows by tiles: how many tiles, arguments that depend on sizes, and constants."""

    count: int
    offsets: tuple[int, int, int, int, int]  # first_tile, tiles_per_row, cols, row_bytes, blocks_per_row
    constants: dict[str, int]


def tiling(format: Format, job: str, cols: int) -> tuple[int, int]:
    """Return how many values a tile has, and how many warps a program, for rows of `cols` values (0 for one long row).

    `job`: "encode" or "decode".

    With a block, 32 values per thread share what is computed once per thread, such as the division for the scale: on one H200 encoding bf16
    to int8/64@bf16 ran at 95 % of copy with 1024 values per warp and at 82 % with 256 (docs/log.md, 2026-11-15).
    """
    tile, per_warp = {"encode": (1024, 1024), "decode": (2048, 1024)}[job] if format.block else (1024, 256)
    if cols:
        tile = min(tile, max(triton.next_power_of_2(cols), 128))
    tile = max(tile, format.block or 0)
    return tile, max(1, tile // per_warp)


def _tiles(rows: int, cols: int, format: Format, job: str) -> list[RowTiles]:
    """Return the tiles of each kernel launch that covers (rows, cols) values.

    Rows without gaps are one long row: a launch for full tiles without a mask, another for the rest. Other rows take one launch.
    """
    if rows * cols == 0:
        return []
    ends_evenly = cols * format.element.width % 8 == 0 and cols % (format.block or 1) == 0
    one_row = rows == 1 or ends_evenly
    if one_row:
        rows, cols = 1, rows * cols
    tile, num_warps = tiling(format, job, cols if not one_row else 0)
    constants = {"TILE": tile, "num_warps": num_warps, "ONE_ROW": one_row, "enable_fp_fusion": False}
    tiles, full = triton.cdiv(cols, tile), cols // tile
    sizes = (tiles, cols, format.row_bytes(cols), format.blocks_per_row(cols))
    if not one_row:
        return [RowTiles(rows * tiles, (0, *sizes), {**constants, "MASKED": cols % tile != 0})]
    whole = [RowTiles(full, (0, *sizes), {**constants, "MASKED": False})] if full else []
    return whole + ([RowTiles(1, (full, *sizes), {**constants, "MASKED": True})] if tiles > full else [])
