"""How many simulated trainings a minute: side by side in captured graphs, and by loops that launch each kernel. Rows in results/sweep.json.

    PAREDOWN_DATA=... python benchmarks/bench_sweep.py                                # all ways, --seconds each
    PEERS=folder ... python benchmarks/bench_sweep.py --way "graphs, 8 lanes" --seconds 10   # unpacked wheel of qtorch

The task is PEPPP's: its ResNet-18 at batch 32 on one superclass of CIFAR-100, under its configurations in turn (those 66 of 99 whose high
formats TF32 keeps). A trial is --steps steps and the test examples; everything between two results counts. Ways:

    graphs, N lanes      paredown's own, as `paredown sweep run` has it on a GPU
    one by one           `evaluate` in a loop: the same trials, bit by bit
    by hand              a loop as one would write it: hooks that round by one kernel each, formats fixed, cuDNN free to choose
    QPyTorch             the same loop with its float_quantize and OptimLP
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import count, cycle, islice
from typing import Any

import torch
from loops import Log, common_options
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import paredown as pare
from paredown.codec.backend import find_kernels
from paredown.models.resnet import SumLastResNet
from paredown.plan.plan import Plan
from paredown.simulate.peppp import peppp_element, peppp_plan
from paredown.study.sweeps.engines.cuda_graphs import GraphBench
from paredown.study.tasks.evaluate import evaluate, make_setting
from paredown.study.tasks.lookup import find_task
from paredown.study.tasks.task import Task

LOWS = ((3, 1), (3, 2), (3, 3), (3, 4), (4, 1), (4, 2), (4, 3), (4, 4), (5, 1), (5, 2), (5, 3))  # exponent and mantissa bits
HIGHS = ((6, 7), (6, 9), (7, 7), (7, 9), (8, 7), (8, 9))
Rounder = Callable[[Tensor], Tensor]
ROUNDED = ("relu", "conv1", "conv2", "relu1", "relu2", "downsample.1")
SEED = 7
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@dataclass(frozen=True)
class Row:
    """Trials of one way. Seconds of a trial are those between two results, when several are on their way at once."""

    way: str
    width: int
    batch: int
    steps: int
    num_test: int
    num_trials: int
    seconds: float
    trials_per_minute: float
    ms_per_step: float  # all that a trial takes, by its steps
    median_seconds: float
    p20_seconds: float
    p80_seconds: float
    mean_error: float | None


def plans() -> Iterator[Plan]:
    """PEPPP's configurations, again and again."""
    return cycle([peppp_plan(low, high) for high in HIGHS for low in LOWS])


# --- ways -------------------------------------------------------------------------------------------------------------


def graphs(task: Task, lanes: int) -> Iterator[float]:
    """Errors of trials, without end."""
    bench, source = GraphBench(lanes), enumerate(plans())
    for number, plan in islice(source, 2 * lanes):
        bench.add(number, make_setting(task, plan, mode="peppp", device=DEVICE))
    while True:
        for trial in bench.turn().values():
            assert isinstance(trial, pare.Trial), trial
            number, plan = next(source)
            bench.add(number, make_setting(task, plan, mode="peppp", device=DEVICE))
            yield trial.error if trial.error is not None else 1.0


def one_by_one(task: Task) -> Iterator[float]:
    """The same by `evaluate`."""
    for plan in plans():
        trial = evaluate(task, plan, mode="peppp", device=DEVICE)
        yield trial.error if trial.error is not None else 1.0


def by_hand(task: Task, width: int) -> Iterator[float]:
    """Our kernel in a loop as one would write it."""
    for low, high in cycle((low, high) for high in HIGHS for low in LOWS):
        rounders = [_rounder(peppp_element(*bits)) for bits in (low, high)]
        yield _train(task, width, *rounders, _stepper(*rounders))


def qpytorch(task: Task, width: int) -> Iterator[float]:
    """Its quantisers and its optimizer."""
    sys.path.append(os.environ.get("PEERS", "peers"))
    from qtorch.optim import OptimLP
    from qtorch.quant import float_quantize

    def rounder(bits: tuple[int, int]) -> Rounder:
        return lambda x: float_quantize(x.contiguous(), *bits, "stochastic")

    def stepper(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
        wrapped = OptimLP(optimizer, weight_quant=low, grad_quant=low, momentum_quant=high, acc_quant=high, grad_scaling=1.0)
        return wrapped.step

    for low_bits, high_bits in cycle((low, high) for high in HIGHS for low in LOWS):
        low, high = rounder(low_bits), rounder(high_bits)
        yield _train(task, width, low, high, stepper)


def _rounder(text: str) -> Rounder:
    """One kernel a tensor, launched as directly as it can be."""
    kernels, counter = find_kernels(), count()
    assert kernels is not None
    spec = kernels.device_spec(pare.Element.parse(text), pare.Overflow.SATURATE, torch.device(DEVICE))

    def round_to(x: Tensor) -> Tensor:
        x = x.contiguous()
        return kernels.round_trip_at_run_time(
            x, spec, pare.Rounding.STOCHASTIC, pare.Seed(SEED, 0, next(counter)), torch.empty_like(x)
        )

    return round_to


def _stepper(low: Rounder, high: Rounder) -> Callable[..., Callable[[], None]]:
    def make(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
        masters = [p.detach().clone() for p in model.parameters()]

        @torch.no_grad()
        def step() -> None:
            for p, master in zip(model.parameters(), masters, strict=True):
                assert p.grad is not None
                p.grad.copy_(low(p.grad))
                p.copy_(master)
            optimizer.step()
            for p, master in zip(model.parameters(), masters, strict=True):
                master.copy_(high(p))
                p.copy_(low(master))
                buffer = optimizer.state[p]["momentum_buffer"]
                buffer.copy_(high(buffer))

        return step

    return make


def _train(task: Task, width: int, low: Rounder, high: Rounder, make_step: Callable[..., Callable[[], None]]) -> float:
    """One trial by hand; its error."""
    torch.manual_seed(SEED)
    model = SumLastResNet(num_classes=task.data.num_answers or 10, width=width).to(DEVICE)
    _hook(model, low, high)
    optimizer = torch.optim.SGD(model.parameters(), lr=task.settings.lr, momentum=0.9, weight_decay=5e-4)
    step = make_step(model, optimizer)
    device = torch.device(DEVICE)
    for x, answers in islice(task.data.batches(task.batch, seed=SEED, device=device), task.steps):
        optimizer.zero_grad()
        cross_entropy(model(high(x)), answers).backward()
        step()
    model.eval()
    with torch.no_grad():
        wrong = [(model(high(x)).argmax(-1) != answers).sum() for x, answers in task.data.tests(task.batch, device=device)]
    return float(torch.stack(wrong).sum()) / task.data.num_test


def _hook(model: nn.Module, low: Rounder, high: Rounder) -> None:
    """Round where PEPPP's network does, forward and backward."""

    class Round(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, is_high: bool) -> Tensor:  # type: ignore[override]
            ctx.is_high = is_high
            return (high if is_high else low)(x)

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
            return (high if ctx.is_high else low)(gradient), None

    for name, module in model.named_modules():
        part = name.split(".", 2)[-1] if name.startswith("layers.") else name
        is_layer = name.startswith("layers.") and name.count(".") == 1
        if (part in ROUNDED and name != "conv1") or is_layer or name == "fc":
            module.register_forward_hook(lambda _, args, out, is_high=name == "fc": Round.apply(out, is_high))


# --- rates ------------------------------------------------------------------------------------------------------------


def measured(way: str, errors: Iterator[float], task: Task, width: int, seconds: float) -> Row:
    """Rate over at least so many seconds, after the first result."""
    next(errors)
    begun = last = time.perf_counter()
    between: list[float] = []
    found: list[float] = []
    while last - begun < seconds or len(found) < 2:
        found.append(next(errors))
        now = time.perf_counter()
        between.append(now - last)
        last = now
    spent, num = last - begun, len(found)
    p20, _, _, p80 = statistics.quantiles(between, n=5)
    sizes = (width, task.batch, task.steps, task.data.num_test, num)
    rates = (spent, 60 * num / spent, 1e3 * spent / num / task.steps)
    return Row(way, *sizes, *rates, statistics.median(between), p20, p80, statistics.mean(found))


def main() -> None:
    parser = common_options(__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--steps", type=int, default=78)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--task", default="images:cifar100.npz#superclass=3")
    parser.add_argument("--way", action="append", default=[], help="only these")
    options = parser.parse_args()
    text = f"{options.task},model=sumlast18,width={options.width},steps={options.steps},schedule=constant,lr=0.01"
    task = replace(find_task(text), stops_early=False)
    width = options.width
    ways: dict[str, Callable[[], Iterator[float]]] = {
        f"graphs, {n} lanes": lambda n=n: graphs(task, n) for n in (1, 2, 4, 8, 12, 16)
    }
    ways |= {
        "one by one": lambda: one_by_one(task),
        "by hand": lambda: by_hand(task, width),
        "QPyTorch": lambda: qpytorch(task, width),
    }
    log = Log("sweep.json", DEVICE, options)
    for way in options.way or ways:
        torch.backends.cudnn.benchmark = way in ("by hand", "QPyTorch")
        for switch in (torch.backends.cuda.matmul, torch.backends.cudnn):
            switch.allow_tf32 = way in ("by hand", "QPyTorch")
        try:
            row = measured(way, ways[way](), task, width, options.seconds)
        except ImportError as error:
            print(f"{way}: {error}", file=sys.stderr)
            continue
        rate = f"{row.trials_per_minute:8.1f} trials a minute, {row.ms_per_step:7.2f} ms a step"
        print(f"{way:20} {rate}, error {row.mean_error:.3f}", flush=True)
        log.add(row)


if __name__ == "__main__":
    main()
