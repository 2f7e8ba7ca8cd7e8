"""A calibration made by hand, with round numbers from which times follow by mental arithmetic, and the trace of a small GPT."""

from __future__ import annotations

from typing import Any

import torch

import paredown as pare
from paredown.models import MODELS
from paredown.plan.calibration import Calibration, FormatCost, HostCost, present_device_name, versions

FORMATS = ("int8/64@bf16", "int4/64@bf16")


def calibration(device: str = "cuda", *, packed: float = 1e-3, **changes: Any) -> Calibration:
    """1 GB/s, 1 GFLOP/s, smallest kernel 1 ns; 1 ms of the host for each kernel and, unless changed, each packed tensor; views, module
    calls and gradients take none, nor do those that a session looks at.
    """
    host = HostCost(1e-6, 1e-3, 0.0, 0.0, 0.0, 0.0, 1e-3, 0.1, 0.0, 0.1, 1.0)
    parts: dict[str, Any] = {
        "device": device,
        "device_name": present_device_name(device) or "a GPU",
        **versions(),
        "host": host,
        "kernel_seconds": 1e-9,
        "bytes_per_second": {"elementwise": 1e9},
        "flops_per_second": {"matmul float32": ((1.0, 1e9),)},
        "formats": {text: FormatCost(1e9, 1e9, 0.0, packed) for text in FORMATS},
    }
    return Calibration(**(parts | changes))


def traced(device: str = "cpu") -> pare.Trace:
    """The step of a GPT of one layer, without values."""
    model = MODELS["gpt"](vocabulary=16, dim=32, num_layers=1, num_heads=2, context=16)
    ids = torch.zeros(2, 16, dtype=torch.long)
    return pare.trace_step(model, {"ids": ids, "targets": ids}, device=device)
