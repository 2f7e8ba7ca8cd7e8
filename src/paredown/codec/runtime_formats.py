"""`RuntimeFormatTable` rounds tensors to formats that kernels read from memory, so one captured CUDA graph serves all.

The table has a row of int32 for each slot, a tensor to round: twelve describe its format (`kernels/runtime_formats.py`), two are keys
of its random bits. Rows can hold floats and integers without a block, and fp32 for slots that stay unmodified.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from paredown.codec import backend
from paredown.codec.packed import default_overflow, memory_order, round_trip
from paredown.errors import CodecError
from paredown.formats.element import ElementKind
from paredown.formats.format import Format
from paredown.formats.rounding import Overflow, Rounding, Seed, signed

NUM_FIELDS = 12  # int32 that describe a format
NUM_COLUMNS = 16  # so that rows begin on a multiple of 16 bytes
TF32_BITS = 10  # mantissa bits
UNMODIFIED = Format.parse("fp32")
TILE = 1024  # values per program of `round_many`
WORDS = 5  # int64 per tensor of `round_many`: three addresses, the number of values, the first tile
NEEDS_TRITON = "formats that are read at run time need Triton: install it, or keep tensors on the CPU."
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
Job = tuple[Tensor, Tensor, int]  # x, out, row of the table


def is_live(format: Format | None) -> bool:
    """Return whether kernels can round to this format when they read its description from device memory.

    They can for formats without a block and without a table of values, and for None, which leaves values unmodified.
    """
    return format is None or (
        format.block is None and format.element.kind is not ElementKind.TABLE and format.element.min_exponent >= -126
    )


def is_narrow(format: Format | None) -> bool:
    """Return whether TF32 represents all values of this format exactly, so that matrix products may run in TF32.

    >>> is_narrow(Format.parse("e6m9f")), is_narrow(Format.parse("int16")), is_narrow(None)
    (True, False, False)
    """
    return format is not None and format.block is None and not format.element.table and format.element.mantissa_bits <= TF32_BITS


def overflow_limit(format: Format | None) -> float:
    """Return the magnitude from which on a value overflows when it is rounded to nearest in this format.

    That is half a step above the format's largest value; infinity if no value overflows or `format` is None (unmodified).

    >>> overflow_limit(Format.parse("e4m3b11f")), overflow_limit(Format.parse("e5m2f")), overflow_limit(Format.parse("int8/64@bf16"))
    (31.0, 122880.0, inf)
    """
    if format is None or format.block is not None or format.element.kind is ElementKind.TABLE:
        return float("inf")
    element = format.element
    limit = element.max_value + (element.max_value - element.value(element.max_code - 1)) / 2
    return limit if limit <= torch.finfo(torch.float32).max else float("inf")


def flat(x: Tensor) -> Tensor | None:
    """Return a 1-D view of the memory of `x`, in memory order; None if the memory has gaps."""
    x = x.detach()
    dims = memory_order(x, UNMODIFIED)
    ordered = x.permute(dims)
    return ordered.view(-1) if ordered.is_contiguous() else None


def round_trip_(x: Tensor, format: Format, rounding: Rounding, overflow: Overflow | None, seed: Seed) -> Tensor:
    """Round `x` to `format` in place and return it; autograd does not see the change.

    A saved tensor that shares memory with `x` is rounded too.
    """
    x.data.copy_(round_trip(x.data, format, rounding=rounding, overflow=overflow, seed=seed))
    return x


class RuntimeFormatTable:
    """A table in device memory, whose rows have a format and a seed each; a kernel that rounds a tensor reads one row.

    So a captured CUDA graph goes on to work when formats change. `capacity`: the number of rows.
    """

    def __init__(self, capacity: int, device: torch.device) -> None:
        self.rows = torch.zeros((capacity, NUM_COLUMNS), dtype=torch.int32, device=device)
        self.device = device

    def set(self, rows: dict[int, tuple[Format | None, Overflow | None]]) -> None:
        """Write a format and overflow mode into each row whose number is a key of `rows`; a format of None means no rounding."""
        self._write({row: fields_of(*fields) for row, fields in rows.items()}, slice(NUM_FIELDS))

    def set_seeds(self, seeds: dict[int, Seed]) -> None:
        """Write the seed of stochastic rounding into each row whose number is a key of `seeds`.

        The step of a seed is left out, since each rounding gets it as an argument.
        """
        self._write(
            {row: [signed(key) for key in seed.base_keys()] for row, seed in seeds.items()}, slice(NUM_FIELDS, NUM_FIELDS + 2)
        )

    def _write(self, rows: Mapping[int, Sequence[int]], columns: slice) -> None:
        if rows:
            values = torch.tensor(list(rows.values()), dtype=torch.int32).to(self.device)
            self.rows[torch.tensor(list(rows)).to(self.device), columns] = values

    def round_many(
        self, jobs: Sequence[Job], rounding: Rounding, step: Tensor, memory: Tensor, *, is_captured: bool = False
    ) -> BatchedRoundTrip:
        """Round tensors in one launch, each to the format in a row of the table; `jobs`: (x, out, row), float32 without gaps.

        `memory`: int64 on the device, as many as `words_for` says, for the launch's arguments. `is_captured`: a CUDA graph is being
        captured, and the caller must call `write()` of the result before the graph runs.
        """
        kernels, first, rows = backend.find_kernels(), 0, list[list[int]]()
        if kernels is None:
            raise CodecError(NEEDS_TRITON)
        for x, out, row in jobs:
            rows.append([x.data_ptr(), out.data_ptr(), self.rows[row].data_ptr(), x.numel(), first])
            first += tiles_of(x)
        owners = torch.arange(len(jobs), dtype=torch.int32).repeat_interleave(torch.tensor([tiles_of(x) for x, *_ in jobs]))
        many = BatchedRoundTrip(
            memory[len(rows) * WORDS :].view(torch.int32)[:first], memory[: len(rows) * WORDS], owners, torch.tensor(rows)
        )
        if not is_captured:
            many.write()
        kernels.round_many(many.owners, many.table, rounding, step, TILE)
        return many

    def round_into(self, x: Tensor, out: Tensor, row: int, rounding: Rounding, step: Tensor) -> Tensor:
        """Write `x`, rounded to the format in a row of the table, into `out`, which may be `x` itself, and return `out`.

        `step`: the training step, for random bits. The kernel reads it, and the row, from device memory when it runs.
        """
        kernels = backend.find_kernels()
        if kernels is None:
            raise CodecError(NEEDS_TRITON)
        source, target = flat(x.data), flat(out.data)
        has_gaps = source is None or target is None or x.stride() != out.stride()
        if has_gaps:
            source = target = x.detach().clone(memory_format=torch.contiguous_format).view(-1)
        if x.numel():
            kernels.round_trip_by_row(source, self.rows[row], rounding, step, target)
        if has_gaps and target is not None:
            out.data.copy_(target.view(x.shape))
        return out


class BatchedRoundTrip(NamedTuple):
    """The arguments of one launch of `RuntimeFormatTable.round_many`: device tensors, and what `write` copies into them."""

    owners: Tensor
    table: Tensor
    host_owners: Tensor
    host_table: Tensor

    def write(self) -> None:
        """Copy the arguments of the launch (addresses of tensors and formats) to the device; it must precede the launch."""
        self.owners.copy_(self.host_owners)
        self.table.copy_(self.host_table.flatten())


def tiles_of(x: Tensor) -> int:
    """Return the number of programs (thread blocks) that round `x` in `round_many`."""
    return -(-x.numel() // TILE)


def words_for(tensors: Iterable[Tensor]) -> int:
    """Return how many int64 the argument `memory` of `RuntimeFormatTable.round_many` must have for these tensors."""
    return sum(WORDS + tiles_of(x) for x in tensors) + 2  # owners are half as wide


@cache
def fields_of(format: Format | None, overflow: Overflow | None) -> tuple[int, ...]:
    """Return the twelve int32 from which kernels learn a format when they run; None stands for unmodified values."""
    if not is_live(format):
        raise CodecError(f"{format} cannot be read from memory at run time: it has a block, a list of values or tiny exponents.")
    from paredown.codec.kernels.runtime_formats import describe  # needs Triton

    format = format or UNMODIFIED
    return tuple(describe(format.element, overflow or default_overflow(format)))
