"""The mixed-precision paper's assignments, trained: accuracy against the memory of all tensors; rows in results/train_assign.json.

    PAREDOWN_DATA=folder python benchmarks/train_assign.py                          # one GPU, one process
    python benchmarks/train_assign.py --task squeezenet --way fp32 r0.5 --seeds 0   # some of it, for one of several processes
    python benchmarks/train_assign.py --merge part*/train_assign.json --out folder  # what they found, as one run with its means
    python benchmarks/train_assign.py --quick                                       # a few steps of small ones on the CPU
    python benchmarks/train_assign.py --device cpu --task cnn                       # a task for which a CPU is enough, at full length

SqueezeNet at half and ResNet-18 at a quarter of their widths learn CIFAR-10 (images/cifar10.npz, 7,000 pictures) by SGD with momentum, in
simulate mode, with torch's loss scaler from 2^16, doubled after an epoch without infinities. It is a short schedule: 500 steps of
128 pictures, 9 times all of them, where the paper has 200 epochs of 50,000; the rate goes up in the first tenth and then along a cosine.
Deterministic kernels are asked for, so that `r0.5` and `r0.5-fixed` differ by promotions alone: until the first one they are the same
to the bit on a CPU.

`cnn` has three convolutions without norms and learns CIFAR-100 in 400 steps of 64 pictures, with a smaller low format forward: an exponent
bit less, 1-3-3 with the paper's bias 4, whose largest value is 1.875. `memory` counts 8 bits for it too. Its rate is 0.1, or 0.2.

Ways: `fp32`; `high` and `low` have one level everywhere; `operator` is HFP8's, `amp` torch.autocast's; `r0.5` demotes groups by decreasing
size until half of all numbers are low and promotes what overflows by 1 %, `r0.5-fixed` does not promote. `memory` is the size of
all tensors of a step, in MiB, mean over the steps, as the paper counts it. Accuracy is taken with the formats on, `exact_value` without.
A run diverged when its loss was not finite or it ended near guessing.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

import torch
from loops import Log, Table, compared, failure, mean_of, release, training_options
from measure import RESULTS
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from train_activations import CHECK_EVERY, Pictures, find_file, learning_rate, number

import paredown as pare
from paredown.models.resnet import resnet18
from paredown.models.small_networks import SqueezeNet
from paredown.simulate.outline import Outline, outline
from paredown.simulate.rounded_values import Simulate
from paredown.simulate.simulated_session import SimulatedSession
from paredown.study.papers.mixed_precision_assignments import (
    BASELINES,
    FORMATS,
    Formats,
    Low,
    demote,
    high_plan,
    low_ratio,
    plan_of,
    tensors_of,
    total_bytes,
)

FILE = "train_assign.json"
RATIOS = (0.3, 0.5, 0.7, 0.9, 1.0)
HIGH_SHARE = 0.5  # of float32's bytes


@dataclass(frozen=True)
class Task:
    """A network and how long it is trained."""

    name: str
    build: Callable[[], nn.Module]
    num_steps: int = 500
    batch: int = 128
    peak_lr: float = 0.1
    num_judged: int = 1 << 30
    data: str = "cifar10"
    num_classes: int = 10
    formats: Formats = FORMATS


def cnn(width: int) -> nn.Module:
    """Three convolutions of stride 2 and a linear layer, without norms; weights have the variance that ReLUs need."""
    layers: list[nn.Module] = []
    for num_in, num_out in pairwise((3, width, 2 * width, 4 * width)):
        layers += [nn.Conv2d(num_in, num_out, 3, stride=2, padding=1), nn.ReLU()]
    net = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16 * width, 100))
    for name, parameter in net.named_parameters():
        if name.endswith("weight"):
            nn.init.kaiming_normal_(parameter)
        else:
            nn.init.zeros_(parameter)
    return net


SMALLER = Formats(forward="e3m3b7f")
CNN = Task("cnn", partial(cnn, 16), 400, 64, data="cifar100", num_classes=100, formats=SMALLER)
TASKS = {
    "cnn": CNN,
    "cnn, rate 0.2": replace(CNN, name="cnn, rate 0.2", peak_lr=0.2),
    "squeezenet": Task("squeezenet", partial(SqueezeNet, num_classes=10, width=0.5), peak_lr=0.05),
    "resnet18": Task("resnet18", partial(resnet18, num_classes=10, width=16, small_input=True)),
}
QUICK = {
    **{name: replace(TASKS[name], build=partial(cnn, 4), num_steps=3, batch=8, num_judged=16) for name in ("cnn", "cnn, rate 0.2")},
    "squeezenet": Task("squeezenet", partial(SqueezeNet, num_classes=10, width=0.125), 3, 8, num_judged=16),
    "resnet18": Task("resnet18", partial(resnet18, num_classes=10, width=4, small_input=True), 3, 8, num_judged=16),
}


@dataclass(frozen=True)
class Way:
    """An assignment: which tensors are low, and whether those that overflow are raised; `low` None is float32."""

    name: str
    low: Callable[[Outline], Low] | None
    promotes: bool = False


WAYS = {
    way.name: way
    for way in (
        Way("fp32", None),
        Way("high", BASELINES["all_high"]),
        Way("operator", BASELINES["operator"]),
        Way("amp", BASELINES["amp"]),
        Way("low", BASELINES["all_low"]),
        *(Way(f"r{ratio}", partial(demote, ratio=ratio), promotes=True) for ratio in RATIOS),
        *(Way(f"r{ratio}-fixed", partial(demote, ratio=ratio)) for ratio in RATIOS[:-1]),  # the last one is `low`
    )
}


@dataclass(frozen=True)
class Row:
    """One run, or what the runs of one way have in common (seed None)."""

    task: str
    way: str
    num_steps: int
    batch: int
    seed: int | None = None
    value: float | None = None  # accuracy with the formats on
    exact_value: float | None = None  # of the same weights in float32
    train_loss: float | None = None
    low_ratio: float | None = None  # mean over the steps
    memory: float | None = None  # MiB of all tensors, mean over the steps
    num_promoted: int | None = None
    num_skipped: int | None = None  # steps whose gradients were not finite
    seconds: float | None = None
    status: str = "done"  # or "diverged", "failed", "summary"
    num_runs: int | None = None
    mean: float | None = None
    deviation: float | None = None
    difference: float | None = None  # of the means, from fp32
    standard_error: float | None = None
    num_diverged: int | None = None
    num_failed: int | None = None
    error: str | None = None
    data: str = "cifar10"
    forward: str = FORMATS.forward  # low, of activations and weights


# --- runs -------------------------------------------------------------------------------------------------------------


def run(task: Task, way: Way, seed: int, data: Pictures, *, graph: bool = False) -> Row:
    """Train once and judge."""
    release(data.device)
    torch.manual_seed(seed)
    model, begun = task.build().to(data.device), time.perf_counter()
    batch = torch.empty(task.batch, 3, data.side, data.side), torch.empty(task.batch, dtype=torch.long)
    found = outline(model, batch, loss=cross_entropy)
    low = way.low(found) if way.low is not None else None
    session = None
    if low is not None:
        how = Simulate(raised=high_plan() if way.promotes else None)
        session = pare.apply(plan_of(found, low, task.formats), model, seed=seed, mode=how)
    source = torch.Generator(data.device).manual_seed(1000 + seed)
    loss, num_skipped = train(task, loop_of(task, model, session, data), data, source, graph=graph)
    ratio, num_promoted = mean_ratio(found, low, session) if low is not None else (None, None)
    value = judge(model, data, task.num_judged)
    if session is not None:
        session.close()
    exact = judge(model, data, task.num_judged)
    is_done = math.isfinite(loss) and value > 1.2 / task.num_classes
    sizes = {"low_ratio": ratio, "memory": memory_of(found, ratio), "num_promoted": num_promoted, "num_skipped": num_skipped}
    row = Row(task.name, way.name, task.num_steps, task.batch, seed, value, exact, loss, **sizes)
    row = replace(row, data=task.data, forward=task.formats.forward)
    return replace(row, seconds=time.perf_counter() - begun, status="done" if is_done else "diverged")


@dataclass
class Loop:
    """What one step takes: forward and backward, as calls or as a captured CUDA graph, then the scaler and the optimizer."""

    model: nn.Module
    session: SimulatedSession | None
    scaler: torch.amp.GradScaler
    optimizer: torch.optim.Optimizer

    def backward(self, x: Tensor, target: Tensor) -> Tensor:
        """The loss, gradients left behind."""
        with self.session.following() if self.session is not None else nullcontext():
            loss = cross_entropy(self.model(x), target)
        self.scaler.scale(loss).backward()
        return loss.detach()

    def captured(self, x: Tensor, target: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
        """`backward` as a graph, after three passes on this batch, which change nothing but running statistics and promotions."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self.optimizer.zero_grad(set_to_none=True)
                self.backward(x, target)
        torch.cuda.current_stream().wait_stream(side)
        self.optimizer.zero_grad(set_to_none=True)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            loss = self.backward(x, target)

        def replay(new_x: Tensor, new_target: Tensor) -> Tensor:
            x.copy_(new_x)
            target.copy_(new_target)
            graph.replay()
            return loss.clone()

        return replay

    def update(self) -> Tensor:
        """Step, unless a gradient is not finite; whether one was."""
        largest = nn.utils.get_total_norm([p.grad for p in self.model.parameters() if p.grad is not None], math.inf)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return ~largest.isfinite()


def loop_of(task: Task, model: nn.Module, session: SimulatedSession | None, data: Pictures) -> Loop:
    """SGD with momentum and torch's loss scaler; float32 needs none."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9, weight_decay=5e-4, fused=data.device == "cuda")
    interval = max(len(data.train) // task.batch, 1)
    scaler = torch.amp.GradScaler(data.device, init_scale=2.0**16, growth_interval=interval, enabled=session is not None)
    return Loop(model.train(), session, scaler, optimizer)


def train(task: Task, loop: Loop, data: Pictures, source: torch.Generator, *, graph: bool) -> tuple[float, int]:
    """The mean loss since the last look, and the steps that were skipped; stops where the loss is not finite."""
    zero = torch.zeros((), device=data.device)
    loss, total, since, skipped = math.nan, zero, 0, zero
    backward = loop.captured(*data.batch(task.batch, source)) if graph else loop.backward
    for step in range(task.num_steps):
        for group in loop.optimizer.param_groups:
            group["lr"] = learning_rate(step, task.num_steps, task.peak_lr)
        total, since = total + backward(*data.batch(task.batch, source)), since + 1
        skipped = skipped + loop.update()
        if not graph:
            loop.optimizer.zero_grad(set_to_none=True)
        if step % CHECK_EVERY == CHECK_EVERY - 1 or step == task.num_steps - 1:
            loss, total, since = total.item() / since, zero, 0
            if not math.isfinite(loss):
                break
    return loss, int(skipped.item())


def judge(model: nn.Module, data: Pictures, num: int) -> float:
    """Accuracy on the test pictures."""
    with torch.no_grad():
        return data.accuracy(model.eval(), num)


def mean_ratio(found: Outline, low: Low, session: SimulatedSession | None) -> tuple[float, int]:
    """The share of low numbers, mean over the steps, less what was promoted from its pass on; and how many were."""
    assert session is not None
    sizes = {tensor.key: tensor.numel for tensor in tensors_of(found)}
    total, steps = sum(sizes.values()), max(session.forwards, 1)
    lost, promotions = 0.0, session.promotions
    for slot, forward, _ in promotions:
        role, _, name = slot.rpartition("=")
        keys = [
            key for key in low if key[1] == name and (not role or key[0].value == role) and key[0].value in ("activation", "weight")
        ]
        lost += sum(sizes[key] for key in keys) * max(steps - forward, 0) / steps
    return low_ratio(found, low) - lost / total, len(promotions)


def memory_of(found: Outline, ratio: float | None) -> float:
    """MiB of all tensors: high ones take half of float32, low ones a quarter."""
    return total_bytes(found) / 2**20 * (1.0 if ratio is None else HIGH_SHARE * (1 - ratio / 2))


def attempt(task: Task, way: Way, seed: int, data: Pictures, *, graph: bool) -> Row:
    """`run`, an error being a row too."""
    try:
        return run(task, way, seed, data, graph=graph)
    except Exception as error:
        return Row(task.name, way.name, task.num_steps, task.batch, seed, status="failed", error=failure(error))


# --- the table --------------------------------------------------------------------------------------------------------


def summaries(rows: Sequence[Row]) -> Iterator[Row]:
    """One for each task and way: means over the seeds, runs that diverged left out of accuracies and counted."""
    for task, way in dict.fromkeys((row.task, row.way) for row in rows):
        mine = [row for row in rows if (row.task, row.way) == (task, way)]
        done = {name: [r for r in rows if (r.task, r.way, r.status) == (task, name, "done")] for name in (way, "fp32")}
        accuracies = {name: [row.value for row in of_way if row.value is not None] for name, of_way in done.items()}
        counts = {
            name: sum(row.status == word for row in mine) for name, word in (("num_diverged", "diverged"), ("num_failed", "failed"))
        }
        rest = {name: mean_of(mine, name) for name in ("low_ratio", "memory", "num_promoted", "num_skipped", "exact_value")}
        head = Row(task, way, mine[0].num_steps, mine[0].batch, status="summary", num_runs=len(mine), **counts)
        head = replace(head, data=mine[0].data, forward=mine[0].forward)
        yield replace(
            head, **rest, **compared(accuracies[way], accuracies["fp32"]), seconds=sum(row.seconds or 0.0 for row in mine)
        )


def line(row: Row) -> str:
    """One line of the table."""
    head = f"{row.task:11s} {row.way:11s} {number(row.memory, '7.1f')} MiB  low {number(row.low_ratio, '6.1%'):>6s}"
    if row.seed is None:
        lost = "".join(f"  {n} {word}" for n, word in ((row.num_diverged, "DIVERGED"), (row.num_failed, "FAILED")) if n)
        against = f"{number(row.difference, '+.4f')} +- {number(row.standard_error)} against fp32"
        return f"{head}  accuracy {number(row.mean)} +- {number(row.deviation)}  {against}{lost}"
    figures = f"accuracy {number(row.value)} (exact {number(row.exact_value)})  loss {number(row.train_loss)}"
    counts = f"{row.num_promoted} promoted, {row.num_skipped} skipped"
    return f"{head}  seed {row.seed}  {figures}  {counts}  {number(row.seconds, '.1f')} s  {row.error or row.status}"


TABLE = Table(FILE, Row, tuple(WAYS), summaries, line)


def parse_options() -> argparse.Namespace:
    """What to run, and on which data."""
    parser = training_options(__doc__)
    parser.add_argument("--task", nargs="+", choices=tuple(TASKS), default=tuple(TASKS), help="only these")
    parser.add_argument("--way", nargs="+", choices=tuple(WAYS), default=tuple(WAYS), help="only these")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--graph", action="store_true", help="forward and backward as one CUDA graph")
    return parser.parse_args()


def main() -> None:
    """Seed by seed all tasks and ways, so that what is there when it is stopped can be compared; then their means."""
    options = parse_options()
    if options.merge:
        TABLE.merge(options.merge, options.out or RESULTS)
        return
    device = "cpu" if options.quick else options.device
    torch.backends.cudnn.deterministic = True  # without it, ways that round alike differed by 1.3 points on an H200
    names = dict.fromkeys(TASKS[name].data for name in options.task)
    data = {name: Pictures(find_file(options.data, "images", f"{name}.npz"), device) for name in names}
    log, rows = Log(FILE, device, options), list[Row]()
    for seed, name, way in ((seed, name, way) for seed in options.seeds for name in options.task for way in options.way):
        task = (QUICK if options.quick else TASKS)[name]
        task = replace(task, num_steps=max(int(options.share * task.num_steps), 1))
        rows.append(attempt(task, WAYS[way], seed, data[task.data], graph=options.graph))
        TABLE.tell(log, rows[-1:])
    TABLE.tell(log, summaries(rows))


if __name__ == "__main__":
    main()
