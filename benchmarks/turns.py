"""Steps of several variants of one network in turns: all of them meet the same host, whose speed changes within seconds.

Each variant is built alone, which measures its peak, and stays in memory without its activations. Then rounds follow: in each round every
variant runs one step that fills caches and the queue of the device, and a few that are timed by events between them. Before and after each
turn a step of a small network is timed, whose ratio to the same step at calibration is the speed of the host in that turn.

    variants         A            B            C            A       ...
    host speed    s0     s1           s2           s3          s4         speed of A's first turn: (s0 + s1) / 2
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch
from bench_session import spread
from torch import Tensor

from paredown.plan.step_time import StepTime

CPU_LOOPS, CPU_ROUNDS = 20_000, 5
MORE_ROUNDS, MORE_SECONDS = (
    3,
    12.0,
)  # short steps have up to so many times as many rounds, as long as all of them take fewer seconds


@dataclass(eq=False)
class Runner:
    """One variant in memory: its step, a step with a small batch or None, and what its turns measured."""

    name: str
    step: Callable[[], Tensor]
    close: Callable[[], None]
    small_step: Callable[[], Tensor] | None = None
    columns: dict[str, Any] = field(default_factory=dict[str, Any])  # what was measured before the turns
    turns: list[list[float]] = field(default_factory=list[list[float]])  # seconds of the timed steps, a list for each turn
    issued: list[float] = field(default_factory=list[float])  # host seconds of a step
    small_turns: list[float] = field(default_factory=list[float])
    speeds: list[float] = field(default_factory=list[float])

    @property
    def times(self) -> dict[str, Any]:
        """Columns of a row: median and percentiles of all timed steps, and of the host."""
        seconds = [one for turn in self.turns for one in turn]
        found = {**spread(seconds), "host_speed": statistics.median(self.speeds)}
        found |= {"host_seconds": statistics.median(self.issued)} if self.issued else {}
        return found | ({"small_step_seconds": statistics.median(self.small_turns)} if self.small_turns else {})

    def ratios(self, other: Runner) -> list[float]:
        """Seconds of a turn over those of the other variant in the same round."""
        return [sum(own) / sum(theirs) for own, theirs in zip(self.turns, other.turns, strict=False)]


def median_ratio(runner: Runner, at_one: StepTime, at_two: StepTime) -> float:
    """The median over turns of predicted over measured seconds, each for the speed that the host had in that turn.

    `at_one`, `at_two`: the predictions for a host as fast as at calibration, and half as fast; host seconds are linear in the speed.
    """
    grows = at_two.host_seconds - at_one.host_seconds
    predicted = [replace(at_one, host_seconds=at_one.host_seconds + grows * (speed - 1)).seconds for speed in runner.speeds]
    return statistics.median(seconds / statistics.mean(turn) for seconds, turn in zip(predicted, runner.turns, strict=True))


def take_turns(
    runners: Sequence[Runner], speed: Callable[[], float], device: str, *, num_rounds: int, num_steps: int
) -> Iterable[tuple[Runner, Exception]]:
    """Run the rounds, more of them for short steps; yields runners whose step raised, which take no further turns."""
    failed: set[Runner] = set()
    begun, before = time.perf_counter(), speed()
    for done in range(MORE_ROUNDS * num_rounds if device == "cuda" else num_rounds):
        if done >= num_rounds and time.perf_counter() - begun > MORE_SECONDS:
            return
        for runner in runners:
            if runner in failed:
                continue
            try:
                _turn(runner, device, num_steps)
            except Exception as error:
                failed.add(runner)
                yield runner, error
                continue
            after = speed()
            runner.speeds.append((before + after) / 2)
            before = after


def _turn(runner: Runner, device: str, num_steps: int) -> None:
    runner.step()
    if device == "cuda":
        seconds, issued = _cuda_steps(runner.step, num_steps)
        runner.issued.append(issued)
    else:
        seconds = _synchronized_steps(runner.step, device, num_steps)
    runner.turns.append(seconds)
    if runner.small_step is not None:
        runner.small_step()
        runner.small_turns.append(statistics.median(_synchronized_steps(runner.small_step, device, num_steps)))


def _cuda_steps(step: Callable[[], Tensor], num_steps: int) -> tuple[list[float], float]:
    """Seconds between events around the steps, which follow each other without synchronization, and host seconds to issue one."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(num_steps + 1)]
    events[0].record()
    begun = time.perf_counter()
    for event in events[1:]:
        step()
        event.record()
    issued = (time.perf_counter() - begun) / num_steps
    torch.cuda.synchronize()
    return [a.elapsed_time(b) / 1e3 for a, b in pairwise(events)], issued


def _synchronized_steps(step: Callable[[], Tensor], device: str, num_steps: int) -> list[float]:
    """Seconds of each step until the device has finished it."""
    seconds: list[float] = []
    for _ in range(num_steps):
        begun = time.perf_counter()
        step()
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begun)
    return seconds


def pin_to_quickest_cpu() -> tuple[int, float]:
    """Bind this thread, and those that it starts, to the CPU whose loop of Python is the quickest; returns it and its seconds.

    Forward runs in the thread of the caller and backward in one of autograd's: on one CPU both have the same speed, and the measured
    speed is theirs. They never run at the same time.
    """
    cpus = sorted(os.sched_getaffinity(0))
    seconds = {cpu: statistics.median(_loop_seconds(cpu) for _ in range(CPU_ROUNDS)) for cpu in cpus}
    quickest = min(cpus, key=lambda cpu: seconds[cpu])
    os.sched_setaffinity(0, {quickest})
    return quickest, seconds[quickest]


def _loop_seconds(cpu: int) -> float:
    os.sched_setaffinity(0, {cpu})
    begun = time.perf_counter()
    for _ in range(CPU_LOOPS):
        pass
    return time.perf_counter() - begun
