"""How much memory a call holds at its peak, as torch's own allocator reports it.

The profiler writes a line for each allocation and release, temporaries inside operators included; the peak of their
running sum, less what the result itself keeps, is scratch.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

MIB = 2**20


def peak_bytes(call: Callable[[], object], folder: Path) -> int:
    """The most bytes that `call` had allocated at one time, its result included; `folder` takes the trace."""
    return peak_and_rest(call, folder)[1][0]


def peak_and_rest(call: Callable[[], Any], folder: Path) -> tuple[Any, tuple[int, int]]:
    """The result of `call`, the most bytes that it had allocated at one time, and those that are allocated when it returns."""
    file = folder / "trace.json"
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        result = call()
    profiler.export_chrome_trace(str(file))
    changes = [e for e in json.loads(file.read_text())["traceEvents"] if e.get("name") == "[memory]"]
    held = peak = 0
    sizes: dict[
        int, int
    ] = {}  # by address: what was allocated before `call` and is released meanwhile is not there, and does not count
    for args in (event["args"] for event in sorted(changes, key=lambda e: e["ts"])):
        if args["Bytes"] > 0:
            sizes[args["Addr"]] = args["Bytes"]
            held += args["Bytes"]
        else:
            held -= sizes.pop(args["Addr"], 0)
        peak = max(peak, held)
    return result, (peak, held)


def scratch_bytes(call: Callable[[], object], result_bytes: int, folder: Path) -> int:
    """The peak beyond the result."""
    with torch.no_grad():
        return peak_bytes(call, folder) - result_bytes


def saved_bytes(call: Callable[[], Tensor], others: Iterable[Tensor]) -> int:
    """Bytes of all storages that autograd saves in `call`, which returns a tensor with a gradient; without those of `others`."""
    own = {tensor.untyped_storage().data_ptr() for tensor in others}
    saved: dict[int, Tensor] = {}

    def record(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(record, lambda tensor: tensor):
        output = call()
    assert output.requires_grad
    return sum(tensor.untyped_storage().nbytes() for tensor in saved.values())
