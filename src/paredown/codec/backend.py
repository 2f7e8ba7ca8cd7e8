"""`codec_for` chooses between Triton kernels and the CPU's codec for each call.

The logger `paredown` reports the choice once per device and format.
"""

from __future__ import annotations

import logging
from functools import cache
from importlib.util import find_spec
from types import ModuleType

import torch
from torch import Tensor

from paredown.codec import cpu
from paredown.codec.reference import Encoding

log = logging.getLogger("paredown")


def codec_for(x: Tensor, encoding: Encoding | None, job: str) -> ModuleType:
    """Return the module that does `job` for the tensor `x`: `codec.kernels` if a Triton kernel can, otherwise `codec.cpu`.

    `job`: "encode", "decode", "round_trip" or "largest_finite". Both modules have a function for each, such as `encode_rows`.
    """
    kernels = find_kernels() if x.device.type == "cuda" else None
    if kernels is None:
        _log_once(x.device.type, None, job)
    elif encoding is not None and not kernels.covers(encoding, job):
        _log_once(x.device.type, str(encoding.format), job)
        return cpu
    return kernels or cpu


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
