"""Whether training still works: weights, gradients and optimizer state in tiers beside fp32; rows in results/train_lpmm.json.

    PAREDOWN_DATA=folder python benchmarks/train_lpmm.py                        # one GPU, one process; --data folder does the same
    python benchmarks/train_lpmm.py --task mlp --way fp32 lpmm --seeds 0 1      # some of it
    python benchmarks/train_lpmm.py --merge part1.json part2.json --out folder  # what several processes found, as one run with its means
    python benchmarks/train_lpmm.py --quick                                     # a few steps of small ones on the CPU

An MLP and a CNN learn Fashion-MNIST (images/fashion_mnist_full.npz, all 70,000 pictures, or images/fashion_mnist.npz), ResNet-18
learns CIFAR-10 (images/cifar10.npz, a subset), all three by SGD with momentum; a small GPT learns English byte by byte
(text/sotu_en.txt.gz) by AdamW. `mlp K=1` and `mlp K=8` see the same number of microbatches of 32: K of them make a step, at K times the
learning rate.

All compute under bf16 autocast; ways differ in what is kept between steps. `fp32`: torch.optim. `bf16`: torch.optim on weights in bfloat16,
which rounds to nearest. `safe`, `half`: the same weights in paredown's tiers. `lpmm`, `lpmm4`: a session packs the fp32 model.
`lpmm-nearest`: weights and gradients are rounded to nearest instead of at random. Tensors of fewer than 2 dimensions or 4096 values stay
fp32 in all of them. Runs of one seed start alike and see the same batches. `difference` is that of the means from fp32, with its standard
error.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from loops import Log, Table, compared, failure, release, training_options
from lpmm_tasks import SETTINGS, Setting, device_of, settings_of
from measure import RESULTS
from torch import nn
from train_activations import CHECK_EVERY, learning_rate, number

import paredown as pare
from paredown.optim import SGD, AdamW

FILE = "train_lpmm.json"
MIN_NUMEL = 4096  # smaller tensors stay fp32


# --- ways -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Way:
    """What is kept between steps: torch.optim, or a tier of paredown; weights in `dtype` where no session packs them."""

    name: str
    tier: str | None = None
    dtype: torch.dtype = torch.float32
    rounding: dict[str, str] | None = None

    @property
    def has_session(self) -> bool:
        """Whether weights wait packed."""
        return self.tier is not None and self.dtype is torch.float32

    def optimizer(
        self, rule: str, options: dict[str, Any], microbatches: int, seed: int, model: nn.Module
    ) -> torch.optim.Optimizer:
        """torch's own, or paredown's."""
        if self.tier is None:
            made = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}[rule]
            is_cuda = next(model.parameters()).is_cuda  # on a CPU, torch's fused SGD does not update bfloat16 weights
            return made(model.parameters(), fused=is_cuda, **options)
        tier = None if self.has_session else self.tier  # a session's plan says it
        ours: dict[str, Any] = {"tier": tier, "rounding": self.rounding, "microbatches": microbatches, "seed": seed}
        return {"sgd": SGD, "adamw": AdamW}[rule](model.parameters(), **options, **ours)


NEAREST = {"weight": "nearest_even", "gradient": "nearest_even"}
WAYS = {
    way.name: way
    for way in (
        Way("fp32"),
        Way("bf16", dtype=torch.bfloat16),
        Way("safe", "safe", torch.bfloat16),
        Way("half", "half", torch.bfloat16),
        Way("lpmm", "lpmm"),
        Way("lpmm-nearest", "lpmm", rounding=NEAREST),
        Way("lpmm4", "lpmm4"),
    )
}


# --- runs -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """One run, or what the runs of one way have in common (seed None)."""

    task: str
    way: str
    data: str
    metric: str
    num_passes: int  # backward passes
    microbatches: int
    batch: int  # examples of a pass
    peak_lr: float
    seed: int | None = None
    value: float | None = None
    train_loss: float | None = None  # of the last CHECK_EVERY passes or fewer
    seconds: float | None = None
    peak_bytes: int | None = None
    status: str = "done"  # or "diverged", "failed", "summary"
    underflow: float | None = None  # of the packed weights: see `paredown.optim.diagnostics`
    flips: float | None = None
    dead_zone: float | None = None
    num_runs: int | None = None
    mean: float | None = None
    deviation: float | None = None  # of the seeds, one less than their number in the divisor
    difference: float | None = None  # of the means, from fp32
    standard_error: float | None = None  # of that difference
    num_diverged: int | None = None
    num_failed: int | None = None
    error: str | None = None


def first_row(setting: Setting, way: Way, seed: int) -> Row:
    """What is asked for."""
    task = setting.task
    about = (task.name, way.name, setting.data, task.metric, task.size.num_steps, setting.microbatches, task.size.batch)
    return Row(*about, task.peak_lr, seed)


def run(setting: Setting, way: Way, seed: int, device: str) -> Row:
    """Train once and judge."""
    release(device)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    task = setting.task
    torch.manual_seed(seed)
    model, begun = to_dtype(task.build().to(device).train(), way.dtype), time.perf_counter()
    session = pare.apply(pare.Plan.preset(way.tier or "full"), model, seed=seed) if way.has_session else nullcontext()
    with session:
        options = {"lr": task.peak_lr, **setting.options}
        optimizer = way.optimizer(setting.rule, options, setting.microbatches, seed, model)
        train_loss = train(setting, model, optimizer, torch.Generator(device).manual_seed(1000 + seed), device)
        peak = torch.cuda.max_memory_allocated() if device == "cuda" else None
        rates = arrived(optimizer)
        with torch.no_grad(), torch.autocast(device, torch.bfloat16):
            value = task.judge(model.eval())
    is_better = value > 1.2 * task.guessing if task.larger_is_better else value < task.guessing
    is_done = math.isfinite(train_loss) and math.isfinite(value) and is_better
    found = replace(first_row(setting, way, seed), value=value, train_loss=train_loss, peak_bytes=peak, **rates)
    return replace(found, seconds=time.perf_counter() - begun, status="done" if is_done else "diverged")


def to_dtype(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """The same model, all but its small tensors in `dtype`."""
    for parameter in model.parameters():
        if parameter.dim() >= 2 and parameter.numel() >= MIN_NUMEL:
            parameter.data = parameter.data.to(dtype)
    return model


def train(setting: Setting, model: nn.Module, optimizer: torch.optim.Optimizer, source: torch.Generator, device: str) -> float:
    """The mean loss of the passes since the last look; training stops where it is not finite."""
    task, size, every = setting.task, setting.task.size, setting.microbatches
    num_steps, is_ours = size.num_steps // every, isinstance(optimizer, SGD | AdamW)
    loss, total, since = math.nan, torch.zeros((), device=device), 0
    for count in range(num_steps * every):
        x, target = task.batches(size.batch, source)
        with torch.autocast(device, torch.bfloat16):
            found = task.loss(model(x), target)
        (found if is_ours else found / every).backward()  # paredown's microbatches are a mean already
        total, since = total + found.detach(), since + 1
        is_update = (count + 1) % every == 0
        if is_update:
            if setting.max_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), setting.max_norm)
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(count // every, num_steps, task.peak_lr)
        if is_update or is_ours:  # paredown counts microbatches itself
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if count % CHECK_EVERY == CHECK_EVERY - 1 or count == num_steps * every - 1:
            loss, total, since = total.item() / since, torch.zeros_like(total), 0
            if not math.isfinite(loss):
                break
    return loss


def arrived(optimizer: torch.optim.Optimizer) -> dict[str, float]:
    """Shares of `diagnostics()`, over all packed weights."""
    if not isinstance(optimizer, SGD | AdamW):
        return {}
    rows = optimizer.diagnostics()
    total = sum(row.num_values for row in rows)
    return {
        key: sum(getattr(row, key) * row.num_values for row in rows) / max(total, 1) for key in ("underflow", "flips", "dead_zone")
    }


def attempt(setting: Setting, way: Way, seed: int, device: str) -> Row:
    """`run`, an error being a row too."""
    try:
        return run(setting, way, seed, device)
    except Exception as error:
        return replace(first_row(setting, way, seed), status="failed", error=failure(error))


# --- the table --------------------------------------------------------------------------------------------------------


def values_of(rows: Sequence[Row]) -> list[float]:
    """Of the runs that did not diverge."""
    return [row.value for row in rows if row.status == "done" and row.value is not None]


def summary(rows: Sequence[Row], plain: Sequence[Row]) -> Row:
    """Means over the seeds of one way, runs that diverged left out and counted."""
    rates = {
        key: [getattr(row, key) for row in rows if getattr(row, key) is not None] for key in ("underflow", "flips", "dead_zone")
    }
    return replace(
        rows[0],
        **{"seed": None, "value": None, "train_loss": None, "error": None, "status": "summary"},
        **{key: statistics.mean(found) if found else None for key, found in rates.items()},
        seconds=sum(row.seconds or 0.0 for row in rows),
        num_runs=len(rows),
        **compared(values_of(rows), values_of(plain)),
        num_diverged=sum(row.status == "diverged" for row in rows),
        num_failed=sum(row.status == "failed" for row in rows),
    )


def summaries(rows: Sequence[Row]) -> Iterator[Row]:
    """One for each task and way, in the order of the runs."""
    for task, way in dict.fromkeys((row.task, row.way) for row in rows):
        of_task = [row for row in rows if row.task == task]
        plain = [row for row in of_task if row.way == "fp32"]
        yield summary([row for row in of_task if row.way == way], plain)


def line(row: Row) -> str:
    """One line of the table."""
    head = f"{row.task:26s} {row.way:13s}"
    rates = (
        ""
        if row.flips is None
        else f"  flips {row.flips:.2%} dead {number(row.dead_zone, '.1%')} lost {number(row.underflow, '.1%')}"
    )
    if row.seed is None:
        lost = {"DIVERGED": row.num_diverged, "FAILED": row.num_failed}
        diverged = "".join(f"  {count} {word}" for word, count in lost.items() if count)
        against = f"{number(row.difference, '+.4f')} +- {number(row.standard_error)}"
        runs = f"{number(row.mean)} +- {number(row.deviation)} ({row.num_runs} runs)"
        return f"{head} {row.metric} {runs}  {against} against fp32{rates}{diverged}"
    figures = f"{row.metric} {number(row.value)}  train loss {number(row.train_loss)}  {number(row.seconds, '.1f')} s"
    return f"{head} seed {row.seed}  {figures}{rates}  {row.error or row.status}"


TABLE = Table(FILE, Row, tuple(WAYS), summaries, line)


def parse_options() -> argparse.Namespace:
    """What to run, and on which data."""
    parser = training_options(__doc__)
    parser.add_argument("--task", nargs="+", dest="model", choices=tuple(SETTINGS), help="only these")
    parser.add_argument("--way", nargs="+", choices=tuple(WAYS), default=tuple(WAYS), help="only these")
    parser.add_argument("--seeds", type=int, nargs="+", help="instead of five for the MLP and the CNN, and three for the others")
    return parser.parse_args()


def main() -> None:
    """Task by task and seed by seed all ways, so that what is there when it is stopped can be compared; then their means."""
    options = parse_options()
    if options.merge:
        TABLE.merge(options.merge, options.out or RESULTS)
        return
    device = device_of(options)
    torch.backends.cudnn.benchmark = True
    log, rows = Log(FILE, device, options), []
    for setting in settings_of(options):
        names = [name for name in setting.ways or WAYS if name in options.way]
        for seed, name in ((seed, name) for seed in setting.seeds for name in names):
            rows.append(attempt(setting, WAYS[name], seed, device))
            TABLE.tell(log, rows[-1:])
    TABLE.tell(log, summaries(rows))


if __name__ == "__main__":
    main()
