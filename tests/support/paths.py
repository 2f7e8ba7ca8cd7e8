"""The CPU path (compiled loops, or pieces) and the reference on the same rows: encode, decode and round_trip, compared bit for bit."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

import torch
from torch import Tensor

from paredown.codec import cpu, reference
from paredown.codec.reference import Encoding, PackedParts
from paredown.formats.format import Format
from paredown.formats.rounding import Overflow, Rounding, Seed
from tests.support.compare import assert_same_bits
from tests.support.values import normal, specials, wide_floats

SEED = Seed(5, tensor=6, step=7, first_index=11)


def loops_or_none(x: Tensor) -> ModuleType | None:
    """`cpu.find_loops` for tensors of any size."""
    return import_module(cpu.LOOPS) if cpu.has_numba() and x.numel() and x.device.type == "cpu" else None


def no_loops(x: Tensor) -> None:
    """`cpu.find_loops` where numba is missing."""


def make_encoding(text: str, rounding: str, overflow: str, seed: Seed = SEED) -> Encoding:
    """All of a call but the tensor."""
    return Encoding(Format.parse(text), Rounding(rounding), Overflow(overflow), seed)


def mixed_rows(rows: int, cols: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Ordinary rows, rows of very different sizes, and rows that hold what is special."""
    x = normal(rows, cols, seed=rows)
    x[1::4] *= torch.exp2(normal(len(x[1::4]), cols, seed=cols) * 20)
    odd = torch.cat([specials(), wide_floats(cols, seed=1)])
    x[3::4] = odd[torch.arange(x[3::4].numel()) % len(odd)].view(x[3::4].shape)
    return x.to(dtype)


def tensor_scale(x: Tensor, encoding: Encoding) -> PackedParts | None:
    """The scale of the tensor, found without either path."""
    if not encoding.format.has_tensor_scale:
        return None
    finite = x.float()[x.isfinite()]
    largest = finite.abs().max() if finite.numel() else torch.tensor(0.0)
    return PackedParts(tensor_scale=reference.tensor_scale_of(largest, encoding.format))


def assert_paths_agree(x: Tensor, encoding: Encoding, given: PackedParts | None = None) -> None:
    """Same packed bytes, same decoded values, same round trip."""
    given = given or tensor_scale(x, encoding)
    bits = None
    if encoding.rounding is Rounding.STOCHASTIC:
        bits = reference.random_bits(encoding.seed, encoding.seed.first_index, x.numel(), x.device).view(x.shape)
    expected, packed = reference.encode_rows(x, encoding, given, bits), cpu.encode_rows(x, encoding, given)
    for mine, other in zip(packed.tensors(), expected.tensors(), strict=True):
        assert_same_bits(mine, other)
    values = reference.decode_rows(expected, encoding.format, x.shape[1], x.dtype)
    assert_same_bits(cpu.decode_rows(packed, encoding, torch.empty_like(x)), values)
    rounded = cpu.round_trip_rows(x, encoding, given, torch.empty_like(x))
    assert_same_bits(rounded, reference.round_trip_rows(x, encoding, given, bits))
