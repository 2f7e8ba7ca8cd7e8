"""The most bytes of tensors that a training holds at one time, measured.

On CUDA that is what torch's allocator counts, over the whole run. On a CPU the allocator keeps no count: torch's profiler writes
down each allocation and release, temporaries inside of operators included, from before the model is made until the first STEPS steps
are done; by then all state of the optimizer is there.
"""

# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false

from __future__ import annotations

import gc
from abc import ABC, abstractmethod
from typing import Any, final

import torch
from torch import autograd

STEPS = 3  # that are measured on a CPU


class Meter(ABC):
    """Counts from `start` on; `bytes` is None where nothing could be measured."""

    bytes: int | None = None

    @abstractmethod
    def start(self) -> None:
        """Before the model is there."""

    @abstractmethod
    def stop(self) -> None:
        """After the last step, or earlier; a second call does nothing."""

    @abstractmethod
    def after(self, step: int) -> None:
        """After each step, counted from 1."""


@final
class CudaMeter(Meter):
    """What the allocator counts, beyond what was there before."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._before, self._runs = device, 0, False

    def start(self) -> None:
        """Before the model is there."""
        torch.cuda.synchronize(self._device)
        if clear := getattr(torch._C, "_cuda_clearCublasWorkspaces", None):
            clear()  # kept from the trials before in this process: each takes its own, as in a process of its own
        torch.cuda.reset_peak_memory_stats(self._device)
        self._before, self._runs = torch.cuda.memory_allocated(self._device), True

    def after(self, step: int) -> None:
        """The allocator goes on counting."""

    def stop(self) -> None:
        """Reads the peak."""
        if self._runs:
            self.bytes, self._runs = torch.cuda.max_memory_allocated(self._device) - self._before, False


@final
class CpuMeter(Meter):
    """What the profiler writes down; a process in which it runs already is not measured."""

    def __init__(self) -> None:
        self._runs = False

    def start(self) -> None:
        """Before the model is there."""
        if not hasattr(autograd, "_enable_profiler_legacy") or autograd._profiler_enabled():
            return
        gc.collect()  # what is freed now is not freed while the profiler looks on
        state, choices = autograd.ProfilerState.CPU, torch._C._profiler._ExperimentalConfig()  # type: ignore[attr-defined]
        autograd._enable_profiler_legacy(autograd.ProfilerConfig(state, False, True, False, False, False, choices))
        self._runs = True

    def after(self, step: int) -> None:
        """The profiler slows steps down, so that it ends after some."""
        if step >= STEPS:
            self.stop()

    def stop(self) -> None:
        """Adds up what was written down."""
        if self._runs:
            self._runs = False
            self.bytes = largest_sum([event for thread in autograd._disable_profiler_legacy() for event in thread])


def largest_sum(events: list[Any]) -> int:
    """The largest running sum of bytes taken and given back."""
    held = peak = 0
    for event in events:
        if event.kind() == "memory_alloc":
            held += event.cpu_memory_usage()
            peak = max(peak, held)
    return peak


def meter_of(device: torch.device) -> Meter:
    """The one for this device."""
    return CudaMeter(device) if device.type == "cuda" else CpuMeter()
