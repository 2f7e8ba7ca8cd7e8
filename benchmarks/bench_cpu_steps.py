"""Training steps on one core of a CPU, in about two minutes: one table, and rows in results/cpu_steps.json.

    python benchmarks/bench_cpu_steps.py

Optimizer steps alone, over a matrix of 2^21 values and over 64 small tensors, beside torch.optim (fused) and beside plain torch, which runs
where numba is not installed; and whole steps of the network of `paredown demo` under plans, beside the baseline. All of a job take turns in
one process. Times are CPU time of the process, which other programs on the machine change least; medians, and the least of all turns.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from unittest.mock import patch

import torch
from measure import append, machine
from torch import nn

import paredown as pare
from paredown.cli.demo_verb import TASK
from paredown.cli.subject import find_any_task
from paredown.codec import cpu
from paredown.study.tasks.training import Loop, TrainingSetup

PACKAGES = ("torch", "numpy", "numba")
CPU, WARM_UP = torch.device("cpu"), 3
STATE8 = {"moment1": "int8/64@bf16", "moment2": "uint8/64@bf16", "gradient": None}
PACKED = {"activation": "int8/64@bf16", "weight": "int8/64@e8m0", "gradient": "int8/64@bf16", "moment1": "int8/64@bf16"}
PLANS = {
    "baseline": pare.Plan(),
    "8-bit activations": pare.Plan.preset("activations8"),
    "lpmm": pare.Plan.preset("lpmm"),
    "lpmm and 8-bit activations": pare.Plan.uniform(**PACKED),
    "int4 activations": pare.Plan.preset("activations4"),
    "uint2 activations": pare.Plan.preset("activations2"),
}
SHAPES = {"2^21 values": [(2048, 1024)], "64 tensors": [(64, 64)] * 8 + [(64,)] * 56}


@dataclass(frozen=True)
class StepRow:
    """One way of one job; ratios are to the first way of the job, by medians."""

    job: str
    way: str
    numel: int
    median_seconds: float
    least_seconds: float
    time_ratio: float


def optimizer_steps(shapes: list[tuple[int, ...]]) -> Iterator[tuple[str, Callable[[], object], ExitStack]]:
    """Steps of torch's fused AdamW, of ours with 8-bit state, and of ours without compiled loops."""
    makers = {
        "torch.optim.AdamW fused": partial(torch.optim.AdamW, fused=True),
        "AdamW, 8-bit state": partial(pare.optim.AdamW, **STATE8),
        "AdamW, 8-bit state, without numba": partial(pare.optim.AdamW, **STATE8),
    }
    for way, make in makers.items():
        parameters = [nn.Parameter(0.02 * torch.randn(shape)) for shape in shapes]
        for parameter in parameters:
            parameter.grad = 1e-3 * torch.randn_like(parameter)
        optimizer, stack = make(parameters, lr=1e-4), ExitStack()

        def step(optimizer: torch.optim.Optimizer = optimizer, is_plain: bool = "without" in way) -> None:
            with patch.object(cpu, "find_loops", lambda x: None) if is_plain else ExitStack():
                optimizer.step()

        yield way, step, stack


def demo_steps() -> Iterator[tuple[str, Callable[[], object], ExitStack]]:
    """Steps of the demo's network under plans."""
    task = find_any_task(f"{TASK},steps=40")
    x, y = next(iter(task.data.batches(task.batch, seed=0, device=CPU)))
    for way, plan in PLANS.items():
        setting, stack = TrainingSetup(task, plan, 0, CPU), ExitStack()
        model = setting.placed_model()
        loop = Loop(setting, model, stack.enter_context(setting.session(model)))
        yield way, partial(loop.step, x, y, 0.01), stack


def measured(job: str, numel: int, ways: list[tuple[str, Callable[[], object], ExitStack]], turns: int) -> list[StepRow]:
    """All ways of a job in turns."""
    seconds: dict[str, list[float]] = {way: [] for way, *_ in ways}
    for turn in range(WARM_UP + turns):
        for way, step, _ in ways:
            begun = time.process_time()
            step()
            if turn >= WARM_UP:
                seconds[way].append(time.process_time() - begun)
    for *_, stack in ways:
        stack.close()
    first = statistics.median(seconds[ways[0][0]])
    return [StepRow(job, way, numel, m := statistics.median(s), min(s), m / first) for way, s in seconds.items()]


def main() -> None:
    """Measure all of it, print the table and append the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=40, help="timed steps of each way")
    parser.add_argument("--commit", help="what is measured, where git cannot tell")
    parser.add_argument("--no-save", action="store_true", help="print only")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    cpu.load_loops()
    rows: list[StepRow] = []
    for name, shapes in SHAPES.items():
        numel = sum(torch.Size(shape).numel() for shape in shapes)
        rows += measured(f"AdamW step, {name}", numel, list(optimizer_steps(shapes)), options.turns)
    rows += measured("step of the demo's network", 0, list(demo_steps()), options.turns)
    for row in rows:
        print(
            f"{row.job:28s} {row.way:36s} {1e3 * row.median_seconds:8.2f} ms, least {1e3 * row.least_seconds:8.2f} {row.time_ratio:6.2f}x"
        )
    if not options.no_save:
        append("cpu_steps.json", machine("cpu", PACKAGES, options.commit), rows)


if __name__ == "__main__":
    main()
