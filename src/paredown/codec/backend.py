"""Choose between Triton kernels and plain torch for each call; the only module that checks whether Triton is installed.

Tensors are (rows, cols) and contiguous. The logger `paredown` reports the choice once per device and format.
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
    """Return the codes and scales of `x`, (rows, cols), in the format of `encoding`; if `given` is not None, its scales are used."""
    kernels = _kernels(x, encoding, "encode")
    return kernels.encode_rows(x, encoding, given) if kernels else cpu.encode_rows(x, encoding, given)


def decode_rows(parts: PackedParts, encoding: Encoding, out: Tensor) -> Tensor:
    """Write the values that the codes and scales in `parts` stand for into `out`, (rows, cols), and return `out`."""
    kernels = _kernels(out, encoding, "decode")
    return (kernels or cpu).decode_rows(parts, encoding, out)


def decoder(parts: PackedParts, encoding: Encoding, rows: int, cols: int) -> Callable[[Tensor], Tensor]:
    """Return a function that writes the decoded values of `parts` into its argument, a contiguous tensor of rows * cols values.

    For codes that are decoded often it is quicker than `decode_rows`."""
    assert parts.codes is not None
    kernels = _kernels(parts.codes, encoding, "decode")
    if kernels is not None:
        return kernels.decoder(parts, encoding, rows, cols)
    return lambda out: cpu.decode_rows(parts, encoding, out.view(rows, cols))


def round_trip_rows(x: Tensor, encoding: Encoding, given: PackedParts | None, out: Tensor) -> Tensor:
    """Write the values that encoding and decoding make of `x` into `out`, and return `out`.

    If `given` is not None, its scales are used.
    """
    kernels = _kernels(x, encoding, "round_trip")
    return (kernels or cpu).round_trip_rows(x, encoding, given, out)


def largest_finite(x: Tensor) -> Tensor:
    """Return the largest finite magnitude of `x` as a float32 scalar tensor; 0 if no value is finite."""
    kernels = _kernels(x, None, "largest_finite")
    return (kernels or cpu).largest_finite(x)


def _kernels(x: Tensor, encoding: Encoding | None, job: str) -> ModuleType | None:
    kernels = find_kernels() if x.device.type == "cuda" else None
    if kernels is None:
        _log_once(x.device.type, None, job)
    elif encoding is not None and not kernels.covers(encoding, job):
        _log_once(x.device.type, str(encoding.format), job)
        return None
    return kernels


@cache
def find_kernels() -> ModuleType | None:
    """Return the package `codec.kernels` of Triton kernels; None if Triton is not installed."""
    if find_spec("triton") is None:
        return None
    from paredown.codec import kernels  # needs Triton, which CPU builds of torch come without

    return kernels


@cache
def _log_once(device: str, format: str | None, job: str) -> None:
    if format is not None:
        log.info("There is no kernel to %s %s: plain torch is used, which is slower.", job, format)
    elif device == "cuda":
        log.warning("Triton is not installed: tensors on the GPU use plain torch, which is slower. Run `pip install triton`.")
    else:
        _log_cpu_once()


@cache
def _log_cpu_once() -> None:
    why = "tensors are on the CPU" if torch.cuda.is_available() else "there is no CUDA device"
    if cpu.has_numba():
        log.info(
            "Number formats run in loops compiled by numba, since %s. The first call compiles them, once for all processes.", why
        )
    else:
        log.info("Number formats run in plain torch, since %s: 100 times slower than with numba. Run `pip install numba`.", why)
