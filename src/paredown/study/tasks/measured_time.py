"""`StepTimer`: the median seconds of a training step, from the ends of the steps of a run.

The first NUM_WARM_UP steps do not count: kernels are compiled, optimizer state is allocated, and on a CPU a profiler records the peak
memory. On CUDA the ends are events on the stream, so that timing does not synchronize steps. A step includes its batch.

>>> timer = StepTimer(torch.device("cpu"), clock=iter((0.0, 0.5, 1.0, 1.5, 2.0, 9.0)).__next__)
>>> for step in range(1, NUM_WARM_UP + 6):
...     timer.after(step)
>>> timer.seconds()
0.5
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from itertools import pairwise
from statistics import median
from typing import Any

import torch

NUM_WARM_UP = 3  # steps
FEWEST_STEPS = 5  # timed steps behind a median
MOST_STEPS = 200  # the last ones of a long run
NUM_STEPS = NUM_WARM_UP + 9  # of a run for its step time alone


class StepTimer:
    """Records the end of each step of a run; `seconds` is the median time between two ends."""

    def __init__(self, device: torch.device, clock: Callable[[], float] = time.perf_counter) -> None:
        self._device, self._clock = device, clock
        self._ends: deque[Any] = deque(maxlen=MOST_STEPS + 1)

    def after(self, step: int) -> None:
        """Record the end of a step, counted from 1."""
        if step >= NUM_WARM_UP:
            self._ends.append(self._end())

    def _end(self) -> Any:
        if self._device.type != "cuda":
            return self._clock()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def seconds(self) -> float | None:
        """Return the median seconds of a step; None after fewer than FEWEST_STEPS timed steps."""
        if len(self._ends) <= FEWEST_STEPS:
            return None
        if self._device.type != "cuda":
            return median(end - start for start, end in pairwise(self._ends))
        torch.cuda.synchronize(self._device)
        return median(start.elapsed_time(end) / 1000 for start, end in pairwise(self._ends))
