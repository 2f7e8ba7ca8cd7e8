"""The host's side of the kernels: what they cover, the constants they are compiled with, their tiles, and their launches.

`Launch` calls a kernel repeatedly without Triton's binding of arguments, which takes 60 to 80 microseconds for about thirty arguments.

A `Launch` is a kernel with its grid, its constants and those arguments that do not change. The first call for a device and dtypes goes
through Triton and keeps the compiled kernel, later ones call that directly. What else Triton compiles for is the same each time: pointers
are multiples of 16 (if one is not, Triton binds), and integers that it looks at are among those that do not change. Where Triton is
interpreted, has launch hooks (a profiler), or its launcher takes other arguments, every launch goes through Triton. `Direct` spares the
launcher too, which is a Python object around a C function (`compiled_launch`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from copy import copy
from functools import cache, lru_cache
from math import frexp
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
from torch import Tensor

from paredown.codec.kernels import numbers, pack, runtime_formats
from paredown.codec.reference import Encoding, PackedParts, table_limits
from paredown.formats.element import TABLES, Element, ElementKind
from paredown.formats.format import Format
from paredown.formats.rounding import Overflow, Rounding, Seed

log = logging.getLogger("paredown")
_is_quick = not triton.knobs.runtime.interpret
BIG = 1 << 31
Key = tuple[int, torch.dtype, torch.dtype]


class Launch:
    """`kernel[grid](*pointers, *fixed, *scalars, **constants)` as one call of pointers and scalars.

    `scalars` are floats, or integers that the kernel is not specialised for.
    """

    __slots__ = ("_compiled", "_rest", "constants", "fixed", "grid", "kernel")

    def __init__(self, kernel: Any, grid: int, fixed: tuple[Any, ...], constants: dict[str, Any]) -> None:
        self.kernel, self.grid, self.fixed, self.constants = kernel, grid, fixed, constants
        self._compiled: dict[Any, Any] = {}
        self._rest: tuple[Any, ...] = ()

    def __call__(self, pointers: tuple[Tensor | None, ...], scalars: tuple[int | float, ...] = ()) -> None:
        global _is_quick
        assert pointers[0] is not None and pointers[1] is not None
        index = pointers[0].get_device()
        if index >= 0 and index != torch.cuda.current_device():  # a model on several GPUs
            with torch.cuda.device(index):
                self(pointers, scalars)
            return
        address = 0
        for pointer in pointers:
            if pointer is not None:
                address |= pointer.data_ptr()
        if address & 15 or not _is_quick or has_hooks() or any(s >= BIG for s in scalars):
            self.kernel[(self.grid,)](*pointers, *self.fixed, *scalars, **self.constants)
            return
        key = (index, pointers[0].dtype, pointers[1].dtype)
        compiled = self._compiled.get(key)
        if compiled is None:
            compiled = self.kernel[(self.grid,)](*pointers, *self.fixed, *scalars, **self.constants)
            self._compiled[key] = compiled
            names = self.kernel.arg_names[len(pointers) + len(self.fixed) + len(scalars) :]
            self._rest = tuple(self.constants[name] for name in names)
            return
        stream = current_stream(index)
        try:
            compiled.run(
                self.grid, 1, 1, stream, compiled.function, compiled.packed_metadata, None, None, None,
                *pointers, *self.fixed, *scalars, *self._rest,
            )  # fmt: skip
        except TypeError:
            log.info("This Triton launches kernels otherwise than 3.6 to 3.9: every launch is bound by Triton, more slowly.")
            _is_quick = False
            self.kernel[(self.grid,)](*pointers, *self.fixed, *scalars, **self.constants)

    def compiled_for(self, index: int, *dtypes: torch.dtype) -> tuple[Any, tuple[Any, ...]] | None:
        """The compiled kernel for a device and the dtypes of the first two pointers, and its last arguments; None before the first call."""
        kernel = self._compiled.get((index, *dtypes)) if _is_quick else None
        return None if kernel is None else (kernel, self._rest)


def compiled_launch(kernel: Any) -> tuple[Callable[..., None], tuple[Any, ...]]:
    """f, before: `f(grid, 1, 1, stream, *before, *arguments)` launches a compiled kernel, without launch hooks.

    `kernel.run` is a Python object that calls the C function `kernel.run.launch` with what it knows about the kernel, in an order that
    depends on Triton's version, and then the arguments, one by one (3.6) or in a tuple (3.9). A copy of that object with another `launch`
    shows the order. f is `kernel.run` itself where a launch needs scratch memory, which it allocates, or does anything else.
    """
    run, before = kernel.run, (kernel.function, kernel.packed_metadata, None, None, None)
    launch = getattr(run, "launch", None)
    if launch is None or any(getattr(run, f"{kind}_scratch_size", 0) for kind in ("global", "profile")):
        return run, before
    calls: list[tuple[Any, ...]] = []
    argument, witness = object(), copy(run)
    witness.launch = lambda *args: calls.append(args)
    try:
        witness(1, 1, 1, 0, *before, argument)
    except TypeError:
        return run, before
    if len(calls) != 1 or calls[0][:4] != (1, 1, 1, 0):
        return run, before
    *known, last = calls[0][4:]
    if last is argument:
        return launch, tuple(known)
    return (lambda x, y, z, stream, *args: launch(x, y, z, stream, *known, args), ()) if last == (argument,) else (run, before)


# function, grid, its arguments between the stream and the addresses, those after the addresses
Compiled = tuple[Callable[..., None], int, tuple[Any, ...], tuple[Any, ...]]


def _compiled_launches(launches: list[Launch], key: Key, scalars: tuple[int | float, ...] = ()) -> list[Compiled] | None:
    """The compiled kernels of `launches` for a device and the dtypes of the first two pointers; None if one is not compiled."""
    compiled: list[Compiled] = []
    for launch in launches:
        found = launch.compiled_for(*key)
        if found is None:
            return None
        function, before = compiled_launch(found[0])
        compiled.append((function, launch.grid, before, (*launch.fixed, *scalars, *found[1])))
    return compiled


class Repeated:
    """Repeated launches with the same pointers except one: pointers are passed as numbers, which saves the launcher a call per tensor.

    `pointers`: None stands where `out` goes. The tensors are kept.
    """

    __slots__ = ("_compiled", "_index", "_launches", "_numbers", "_pointers")

    def __init__(self, launches: list[Launch], pointers: tuple[Tensor | None, ...]) -> None:
        self._launches, self._pointers = launches, pointers
        self._numbers = [None if p is None else p.data_ptr() for p in pointers]
        self._index = next(p.get_device() for p in pointers if p is not None)
        self._compiled: dict[torch.dtype, list[Compiled]] = {}

    def __call__(self, out: Tensor) -> None:
        compiled, address = self._compiled.get(out.dtype), out.data_ptr()
        if compiled is None or address & 15 or has_hooks() or torch.cuda.current_device() != self._index:
            self._launch(out)
            return
        stream = current_stream(self._index)
        numbers = [address if number is None else number for number in self._numbers]
        for launch, grid, before, rest in compiled:
            launch(grid, 1, 1, stream, *before, *numbers, *rest)

    def _launch(self, out: Tensor) -> None:
        """Launch through `Launch`; the next call launches directly, if `Launch` has a compiled kernel."""
        pointers = tuple(out if p is None else p for p in self._pointers)
        for launch in self._launches:
            launch(pointers)
        assert pointers[0] is not None and pointers[1] is not None
        compiled = _compiled_launches(self._launches, (self._index, pointers[0].dtype, pointers[1].dtype))
        if compiled is not None and not any((n or 0) & 15 for n in self._numbers):
            self._compiled[out.dtype] = compiled


knobs = triton.knobs.runtime
# None in builds of torch without CUDA
current_device: Any = getattr(torch._C, "_cuda_getDevice", None)
current_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)


def has_hooks() -> bool:
    """Whether Triton calls hooks at each launch, for a profiler."""
    hook = knobs.launch_enter_hook
    return hook is not None and bool(getattr(hook, "calls", True))


_empty_on_gpu = getattr(
    torch._C._dynamo.guards, "_empty_strided_cuda", None
)  # what compiled graphs call: a third of torch.empty's time


def empty_strided(size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype, like: Tensor) -> Tensor:
    """torch.empty_strided on the device of `like`, a GPU."""
    if _empty_on_gpu is None or current_device() != like.get_device():
        return torch.empty_strided(size, stride, dtype=dtype, device=like.device)
    return _empty_on_gpu(tuple(size), stride, dtype)  # it refuses a torch.Size


class Direct:
    """Launches of one job on flat tensors. The first call goes through `Launch`; later ones pass addresses to the compiled kernels.

    `scalars` follow the fixed arguments. Addresses are passed as numbers, which saves the launcher a call per tensor.
    """

    __slots__ = ("_compiled", "launches", "scalars")

    def __init__(self, launches: list[Launch], scalars: tuple[int | float, ...] = ()) -> None:
        self.launches, self.scalars = launches, scalars
        self._compiled: dict[Any, list[Compiled] | None] = {}

    def run(self, key: Key, address: int, addresses: tuple[int | None, ...]) -> bool:
        """Launch on the current stream; False, and no launch, if this call must go through `launch`.

        `key`: device and dtypes of the first two pointers. `address`: the addresses that may not be multiples of 16, combined by "or".
        """
        compiled, hook, index = self._compiled.get(key), knobs.launch_enter_hook, key[0]
        if compiled is None or address & 15 or (hook is not None and getattr(hook, "calls", True)) or current_device() != index:
            return False
        stream = current_stream(index)
        try:
            for launch, grid, before, rest in compiled:
                launch(grid, 1, 1, stream, *before, *addresses, *rest)
        except TypeError:  # of a Triton whose launcher takes other arguments: `Launch` finds that out too
            self._compiled[key] = None
            return False
        return True

    def launch(self, key: Key, pointers: tuple[Tensor | None, ...]) -> None:
        """Launch through `Launch`, and keep what it compiled under `key`."""
        for launch in self.launches:
            launch(pointers, self.scalars)
        assert pointers[0] is not None and pointers[1] is not None
        self._compiled[key] = _compiled_launches(self.launches, (key[0], pointers[0].dtype, pointers[1].dtype), self.scalars)


# --- The host's side of the kernels ---

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
    """Whether there is a kernel to "encode" or "decode" (packed widths), or to "round_trip" (any width without a block).

    Elements whose smallest normal value lies below float32's (e8m3fnuz, e4m3b130), tables of users and scales other than SCALES go
    through plain torch.
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
    """`x` (rows, cols) encoded; `given` holds scales to use."""
    parts = encoding.empty_parts(*x.shape, device=x.device, tensor_scale=given.tensor_scale if given else None)
    if encoding.rule == "given":
        assert given is not None
        for mine, theirs in ((parts.scales, given.scales), (parts.minimums, given.minimums)):
            if mine is not None and theirs is not None:
                mine.copy_(theirs)
    assert parts.codes is not None
    _launch_encode(x, parts.codes, encoding, parts, stores_codes=True)
    return parts


def decode_rows(parts: PackedParts, encoding: Encoding, out: Tensor) -> Tensor:
    """`out` (rows, cols), filled with the decoded values."""
    element = encoding.format.element
    pointers = (parts.codes, out, *shared_of(parts, out), _table(element, Rounding.NEAREST_EVEN, out.device))
    for launch in decodes(*out.shape, encoding.format):
        launch(pointers)
    return out


def decoder(parts: PackedParts, encoding: Encoding, rows: int, cols: int) -> Callable[[Tensor], Tensor]:
    """A function decode(out) that decodes `parts` into `out`; all else is prepared once, so that repeated calls are cheap."""
    assert parts.codes is not None
    shared = (None if t is None else t.view(AS_INTEGERS.get(t.dtype, t.dtype)) for t in (parts.scales, parts.minimums))
    table = _table(encoding.format.element, Rounding.NEAREST_EVEN, parts.codes.device)
    pointers = (parts.codes, None, *shared, parts.tensor_scale, table)
    launch = Repeated(decodes(rows, cols, encoding.format), pointers)

    def decode(out: Tensor) -> Tensor:
        launch(out)
        return out

    return decode


def round_trip_rows(x: Tensor, encoding: Encoding, given: PackedParts | None, out: Tensor) -> Tensor:
    """`out`, filled with decode(encode(x))."""
    element = encoding.format.element
    if encoding.format.block is None and element.kind is not ElementKind.TABLE:
        return round_trip_at_run_time(x, device_spec(element, encoding.overflow, x.device), encoding.rounding, encoding.seed, out)
    _launch_encode(x, out, encoding, given or PackedParts(), stores_codes=False)
    return out


def round_trip_at_run_time(x: Tensor, spec: Tensor, rounding: Rounding, seed: Seed, out: Tensor) -> Tensor:
    """`x` rounded to the element that `spec` describes when the kernel runs; see `runtime_formats.describe`."""
    random = random_of(seed, x.numel(), rounding)
    for launch in round_trips(x.numel(), rounding, random.step_in_memory, random.wide):
        launch((bf16_as_integers(x), out, spec, random.step), random.scalars)
    return out


def round_trip_by_row(x: Tensor, row: Tensor, rounding: Rounding, step: Tensor, out: Tensor) -> Tensor:
    """The same; `row` holds the element and then the keys of the random bits, `step` the step."""
    wide = x.numel() > 1 << 32
    for launch in round_trips(x.numel(), rounding, step_in_memory=True, wide=wide, keys_in_memory=True):
        launch((bf16_as_integers(x), out, row, step), (0, 0, 0))
    return out


def round_many(owners: Tensor, table: Tensor, rounding: Rounding, step: Tensor, tile: int) -> None:
    """Round many tensors in one launch; `runtime_formats.round_many_kernel` describes the contents of the first two arguments."""
    constants = {"ROUNDING": ROUNDINGS[rounding].value, "TILE": tile, "num_warps": 4, "enable_fp_fusion": False}
    runtime_formats.round_many_kernel[(owners.numel(),)](owners, table, step, **constants)


@lru_cache(maxsize=4096)
def round_trips(numel: int, rounding: Rounding, step_in_memory: bool, wide: bool, keys_in_memory: bool = False) -> list[Launch]:
    """The launch for this number of values."""
    where = {"STEP_IN_MEMORY": step_in_memory, "KEYS_IN_MEMORY": keys_in_memory}
    constants = {"ROUNDING": ROUNDINGS[rounding].value, **where, "WIDE": wide}
    launches: list[Launch] = []
    for tiles in _tiles(1, numel, FP32, "round_trip"):
        first_tile, _, cols, _, _ = tiles.offsets
        own = {name: tiles.constants[name] for name in ("MASKED", "TILE", "num_warps", "enable_fp_fusion")}
        launches.append(Launch(runtime_formats.round_trip_kernel, tiles.count, (cols, first_tile), {**constants, **own}))
    return launches


def largest_finite(x: Tensor) -> Tensor:
    """The largest finite magnitude of `x`, a float32 scalar tensor."""
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
    """Launches for (rows, cols); `how`: format, rounding, overflow and the rule of scales."""
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
    """Launches for (rows, cols)."""
    constants = {"ELEMENT": element_constants(format.element, Overflow.SATURATE), **block_constants(format)}
    tiles = _tiles(rows, cols, format, "decode")
    return [Launch(pack.decode_kernel, t.count, t.offsets, {**constants, **t.constants}) for t in tiles]


# --- what the kernels are compiled with -------------------------------------------------------------------------------


@cache
def element_constants(element: Element, overflow: Overflow) -> tuple[int, ...]:
    """The tuple that `numbers.py` documents."""
    inf_code, nan_code = (-1 if code is None else code for code in (element.inf_code, element.nan_code))
    special = (inf_code if inf_code >= 0 else nan_code) if overflow is Overflow.NONFINITE else -1
    has_minus_zero = element.kind is ElementKind.FLOAT and element.value(element.sign_code) == 0
    fields = (
        KINDS[element.kind].value,
        element.width,
        element.mantissa_bits,
        element.min_exponent,
        element.subnormals,
        element.max_code,
    )
    return tuple(int(v) for v in (*fields, special, inf_code, nan_code, has_minus_zero, frexp(element.max_value)[1] - 1))


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
    """The result of `runtime_formats.describe` on the device. It is cached: clone it before writing to it."""
    return torch.tensor(runtime_formats.describe(element, overflow), dtype=torch.int32, device=device)


@cache
def _table(element: Element, rounding: Rounding, device: torch.device) -> Tensor:
    """For a table: the float32 from which on the next code is used, in 2^width entries, then the value of every code."""
    if element.kind is not ElementKind.TABLE:
        return torch.zeros(1, device=device)
    pairs = zip(element.table, element.table[1:], strict=False)
    thresholds = [_threshold(code, low, high, element, rounding) for code, (low, high) in enumerate(pairs)]
    num_unused = (1 << element.width) - len(thresholds)
    return torch.tensor([*thresholds, *[0.0] * num_unused, *element.values()], dtype=torch.float32, device=device)


def _threshold(code: int, low: float, high: float, element: Element, rounding: Rounding) -> float:
    """The smallest float32 that becomes `high` rather than `low`, the value of `code`; stochastic rounding starts from `low`."""
    if rounding is Rounding.STOCHASTIC or (rounding is Rounding.TOWARD_ZERO and low >= 0):
        return high
    at, ties_go_up = (low, False) if rounding is Rounding.TOWARD_ZERO else ((low + high) / 2, code % 2 == 1)
    if rounding is Rounding.NEAREST_AWAY or (rounding is Rounding.NEAREST_EVEN and element.name == "e8m0"):
        ties_go_up = at > 0
    nearest = np.float32(at)
    if float(nearest) > at or (float(nearest) == at and ties_go_up):
        return float(nearest)
    return float(np.nextafter(nearest, np.float32(np.inf)))


# --- arguments --------------------------------------------------------------------------------------------------------


class Random(NamedTuple):
    """Arguments of a kernel that draws random bits."""

    step: Any
    scalars: tuple[int, int, int]  # first_index, k0, k1
    step_in_memory: bool
    wide: bool


NOT_RANDOM = Random(None, (0, 0, 0), False, False)


def random_of(seed: Seed, numel: int, rounding: Rounding) -> Random:
    if rounding is not Rounding.STOCHASTIC:
        return NOT_RANDOM
    in_memory = isinstance(seed.step, Tensor)
    k0, k1 = (k - (1 << 32) if k >> 31 else k for k in (seed.base_keys() if in_memory else seed.keys()))
    wide = seed.first_index + numel > 1 << 32
    return Random(seed.step if in_memory else None, (seed.first_index, k0, k1), in_memory, wide)


def bf16_as_integers(x: Tensor) -> Tensor:
    return x.view(torch.int16) if x.dtype is torch.bfloat16 else x


def shared_of(parts: PackedParts, like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Scales and minimums as integers, and the tensor scale; `like` in place of missing ones."""
    scales, minimums = (like if t is None else t.view(AS_INTEGERS[t.dtype]) for t in (parts.scales, parts.minimums))
    return scales, minimums, like if parts.tensor_scale is None else parts.tensor_scale


class RowTiles(NamedTuple):
    """The tiles that one launch covers."""

    count: int
    offsets: tuple[int, int, int, int, int]  # first_tile, tiles_per_row, cols, row_bytes, blocks_per_row
    constants: dict[str, int]


def tiling(format: Format, job: str, cols: int) -> tuple[int, int]:
    """(values per tile, warps per program); `cols` is the length of a row, 0 if all rows form one long row.

    With a block, 32 values per thread share what is computed once per thread, such as the division for the scale: on one H200 encoding bf16
    to int8/64@bf16 ran at 95 % of copy with 1024 values per warp and at 82 % with 256 (docs/log.md, 2026-11-15).
    """
    tile, per_warp = {"encode": (1024, 1024), "decode": (2048, 1024)}[job] if format.block else (1024, 256)
    if cols:
        tile = min(tile, max(triton.next_power_of_2(cols), 128))
    tile = max(tile, format.block or 0)
    return tile, max(1, tile // per_warp)


def _tiles(rows: int, cols: int, format: Format, job: str) -> list[RowTiles]:
    """For one long row: full tiles without a mask, and the rest with one; otherwise all tiles with a mask."""
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
