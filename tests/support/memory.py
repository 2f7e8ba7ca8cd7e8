"""How much memory a call holds at its peak, as torch's own allocator reports it.

The profiler writes a line for each allocation and release, temporaries inside operators included; the peak of their
running sum, less what the result itself keeps, is scratch.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

MIB = 2**20


def peak_bytes(call: Callable[[], object], folder: Path) -> int:
    """The most bytes that `call` had allocated at one time, its result included; `folder` takes the trace."""
    file = folder / "trace.json"
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        result = call()
    profiler.export_chrome_trace(str(file))
    del result
    changes = [e for e in json.loads(file.read_text())["traceEvents"] if e.get("name") == "[memory]"]
    held = peak = 0
    for event in sorted(changes, key=lambda e: e["ts"]):
        held += event["args"]["Bytes"]
        peak = max(peak, held)
    return peak


def scratch_bytes(call: Callable[[], object], result_bytes: int, folder: Path) -> int:
    """The peak beyond the result."""
    with torch.no_grad():
        return peak_bytes(call, folder) - result_bytes
