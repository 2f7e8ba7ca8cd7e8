"""The one place that asks whether Triton is here: each call goes to the kernels, or to plain torch where there is none.

Tensors are (rows, cols) and contiguous. Which path serves is said once, through the logger `paredown`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from types import ModuleType

import torch
from torch import Tensor

from paredown.codec import cpu
from paredown.codec.reference import Encoding, PackedParts

log = logging.getLogger("paredown")


def encode_rows(x: Tensor, encoding: Encoding, given: PackedParts | None) -> PackedParts:
    """`x` packed."""
    kernels = _kernels(x, encoding, "encode")
    return kernels.encode_rows(x, encoding, given) if kernels else cpu.encode_rows(x, encoding, given)


def decode_rows(parts: PackedParts, encoding: Encoding, out: Tensor) -> Tensor:
    """The values of `parts`, into `out`."""
    kernels = _kernels(out, encoding, "decode")
    return (kernels or cpu).decode_rows(parts, encoding, out)


def decoder(parts: PackedParts, encoding: Encoding, rows: int, cols: int) -> Callable[[Tensor], Tensor]:
    """`decode_rows` of the same parts again and again, into any contiguous tensor of rows * cols values."""
    assert parts.codes is not None
    kernels = _kernels(parts.codes, encoding, "decode")
    if kernels is not None:
        return kernels.decoder(parts, encoding, rows, cols)
    return lambda out: cpu.decode_rows(parts, encoding, out.view(rows, cols))


def round_trip_rows(x: Tensor, encoding: Encoding, given: PackedParts | None, out: Tensor) -> Tensor:
    """decode(encode(x)), into `out`."""
    kernels = _kernels(x, encoding, "round_trip")
    return (kernels or cpu).round_trip_rows(x, encoding, given, out)


def largest_finite(x: Tensor) -> Tensor:
    """The largest finite magnitude of `x` as a float32 of no dimensions; 0 where there is none."""
    kernels = _kernels(x, None, "largest_finite")
    return (kernels or cpu).largest_finite(x)


def _kernels(x: Tensor, encoding: Encoding | None, job: str) -> ModuleType | None:
    kernels = find_kernels() if x.device.type == "cuda" else None
    if kernels is None:
        _say_once(x.device.type, None, job)
    elif encoding is not None and not kernels.covers(encoding, job):
        _say_once(x.device.type, str(encoding.format), job)
        return None
    return kernels


@cache
def find_kernels() -> ModuleType | None:
    """The Triton kernels, where Triton is installed."""
    if find_spec("triton") is None:
        return None
    from paredown.codec import kernels  # needs Triton, which CPU builds of torch come without

    return kernels


@cache
def _say_once(device: str, format: str | None, job: str) -> None:
    if format is not None:
        log.info("There is no kernel to %s %s: plain torch serves, more slowly.", job, format)
    elif device == "cuda":
        log.warning("Triton is not installed: tensors on the GPU go through plain torch, more slowly. `pip install triton` helps.")
    else:
        _say_cpu_once()


@cache
def _say_cpu_once() -> None:
    why = "tensors are on the CPU" if torch.cuda.is_available() else "no CUDA device is here"
    log.info("Number formats run in plain torch, since %s.", why)
