"""Measurements of packed slots that compiled graphs make for a guard: two numbers for each slot, in every call of a graph.

error       |x - decoded|^2 / |x|^2 of at most SAMPLE values, which are encoded again: whole blocks, evenly spaced in memory. Where
            backward subtracts a mean, the denominator is |x - mean of each 64 values|^2, as in eager sessions (session/signals.py)
largest     the largest value that the stored scales and minimums allow, at most one step of a scale above max |x|; max |x| itself
            for formats without a block. NaN where a value of the tensor is not finite
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from paredown.codec.graph_codec import decode_in_graph, largest_in_graph
from paredown.codec.packed import default_overflow
from paredown.formats.format import Format
from paredown.formats.rounding import Rounding
from paredown.session.compiled.graph_slots import GraphSlot
from paredown.session.signals import CENTERED_LEN, SAMPLE, relative_error

NUM_SIGNALS = 2  # numbers of one slot


@dataclass(frozen=True)
class GraphSignal:
    """Locates two numbers, rounding error and largest value, that a graph measures of the saved tensor with the slots `names`."""

    names: tuple[str, ...]
    first: int


def sampled(flat: Tensor, format: Format) -> Tensor:
    """Return at most SAMPLE values of a 1-D tensor, in whole blocks of `format` at even distances.

    >>> sampled(torch.arange(16384), Format.parse("int8/64@bf16"))[[0, 63, 64, 128]].tolist()
    [0, 63, 256, 512]
    """
    length = format.block or CENTERED_LEN
    num_blocks = flat.shape[0] // length
    count = min(num_blocks, max(1, SAMPLE // length))
    if count == 0:
        return flat
    return flat[: num_blocks * length].view(num_blocks, length)[:: num_blocks // count][:count].reshape(-1)


@dataclass(frozen=True)
class SlotMeasure:
    """Measures, in a call of a compiled graph, the rounding error and the largest value of one packed tensor."""

    slot: GraphSlot
    format: Format
    rounding: Rounding
    seed: int

    @staticmethod
    def of(decision: Any, seed: int) -> SlotMeasure:
        """Return the function that measures a tensor which is packed in the format and rounding of `decision`."""
        return SlotMeasure(decision.slot, decision.format, decision.rounding, seed)

    def __call__(self, flat: Tensor, step: Tensor, *parts: Tensor) -> Tensor:
        """Return rounding error and largest magnitude of `flat`, whose codes and scales are `parts`; `step`: the step counter."""
        exact = sampled(flat, self.format)
        tensor_id = crc32(self.slot.names[0].encode()) if self.slot.names else 0
        names = str(self.format), self.rounding.value, default_overflow(self.format).value
        encoded = torch.ops.paredown.encode(exact, step.to(torch.int32), [0], *names, self.seed, tensor_id)
        rounded = decode_in_graph(encoded, self.format, exact.shape[0], exact.dtype)
        if self.format.block is None:  # also where Inductor leaves out the cast
            rounded = torch.where(exact.abs() > self.format.element.max_value, inf, rounded)
        error = relative_error(exact.float(), rounded.float(), is_centered=self.slot.needs.is_centered)
        return torch.stack([error, largest_in_graph(flat, parts, self.format)])
