"""Whether training still works: activations in 8, 4 and 2 bits beside bf16, three seeds; rows in results/train_activations.json.

    PAREDOWN_DATA=folder python benchmarks/train_activations.py     # one GPU; --data folder does the same
    python benchmarks/train_activations.py --model gpt --seeds 0 1  # some of it
    python benchmarks/train_activations.py --small --seeds 0 1 2 3 4 5  # narrow ones on the CPU
    python benchmarks/train_activations.py --quick                  # a few steps of small ones on the CPU

ResNet-18 learns CIFAR-10 (images/cifar10.npz, a subset; accuracy on its test part), a small GPT learns English byte by byte
(text/sotu_en.txt.gz; loss in nats on the last tenth). Runs of one seed start alike and see the same batches in the same order, whatever
their activations. A run diverged when its loss stopped being finite or ended no better than guessing; it keeps its row.
"""

from __future__ import annotations

import argparse
import gzip
import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from loops import BASELINE, Log, Way, applied, chosen, common_options, failure, release
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from paredown.models import MODELS
from paredown.models.transformer import token_loss
from paredown.study.tasks.training import learning_rate

ROUNDINGS = ("nearest_even", "stochastic")
FOUR_BITS = ("int4/64@bf16", "uint4/64@bf16+bf16", "uint4/32@bf16+bf16")
WAYS = (
    BASELINE,
    Way("int8/64@bf16", "int8/64@bf16"),
    *(Way(f"{text} {asked}", text, asked=asked) for text in (*FOUR_BITS, "uint2/64@bf16+bf16") for asked in ROUNDINGS),
)
NUM_BYTES = 256
CHECK_EVERY = 50  # steps between looks at the loss
PAD = 4  # pixels that a crop may move
EXAMPLES_AT_ONCE = 512  # when judging


@dataclass(frozen=True)
class Size:
    """How much is trained: by default at full size, with --small or --quick on the CPU."""

    width: int  # channels of the ResNet, or dimension of the GPT
    num_steps: int
    batch: int
    num_layers: int = 0
    length: int = 0
    num_judged: int = 1 << 30  # test examples
    autocasts: bool = True  # to bfloat16, which most CPUs multiply slowly


RESNET, SMALL_RESNET, QUICK_RESNET = Size(64, 1100, 128), Size(8, 200, 32, autocasts=False), Size(8, 12, 32, num_judged=256)
TRANSFORMER, QUICK_TRANSFORMER = Size(256, 600, 64, 6, 256, 2048), Size(32, 12, 4, 2, 64, 64)
SMALL_TRANSFORMER = Size(32, 400, 16, 2, 64, 512, autocasts=False)


@dataclass(frozen=True)
class Task:
    """A model, its batches, and what it is judged by; `batches` and `judge` hold the data."""

    name: str
    metric: str
    guessing: float  # what the metric is without learning
    size: Size
    build: Callable[[], nn.Module]
    optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    peak_lr: float
    batches: Callable[[int, torch.Generator], tuple[Tensor, Tensor]]  # examples asked for, source of chance
    loss: Callable[[Tensor, Tensor], Tensor]
    judge: Callable[[nn.Module], float]

    @property
    def larger_is_better(self) -> bool:
        """Accuracies are, losses are not."""
        return self.metric == "accuracy"


@dataclass(frozen=True)
class Row:
    """One run, or what the runs of one way have in common (seed None)."""

    task: str
    way: str
    kind: str | None
    rounding: str | None
    metric: str
    num_steps: int
    seed: int | None = None
    value: float | None = None
    train_loss: float | None = None
    seconds: float | None = None
    peak_bytes: int | None = None
    status: str = "done"  # or "diverged", "failed"
    mean: float | None = None
    deviation: float | None = None  # of the seeds, one less than their number in the divisor
    mean_difference: float | None = None  # from the baseline with the same seeds
    standard_error: float | None = None  # of that mean
    num_diverged: int | None = None
    error: str | None = None


# --- data -------------------------------------------------------------------------------------------------------------


def find_file(folder: Path, kind: str, name: str) -> Path:
    """`name` in the folder of its kind, or in `folder` itself."""
    for path in (folder / kind / name, folder / name):
        if path.exists():
            return path
    raise SystemExit(f"{name} is neither in {folder / kind} nor in {folder}: set PAREDOWN_DATA or --data.")


def _channels_second(x: Tensor) -> Tensor:
    """(num, side, side, channels) as (num, channels, side, side): channels_last in memory on a GPU, contiguous on a CPU.

    oneDNN's AVX2 code of torch 2.13 writes out of bounds in backward of 1x1 convolutions with stride 2, channels_last and fewer than
    8 input channels, which the small networks of --quick have: the process crashes on CPUs without AVX-512.
    """
    x = x.permute(0, 3, 1, 2)
    return x if x.is_cuda else x.contiguous()


class Pictures:
    """CIFAR-10 on the device: normalised, training pictures padded for crops; channels_last on a GPU."""

    def __init__(self, path: Path, device: str) -> None:
        arrays = np.load(path)
        train, test = (torch.from_numpy(arrays[key]).to(device).float() / 255 for key in ("x_train", "x_test"))  # (num, 32, 32, 3)
        mean, deviation = train.mean((0, 1, 2)), train.std((0, 1, 2))
        padded = nn.functional.pad((train - mean) / deviation, (0, 0, PAD, PAD, PAD, PAD))
        self.train, self.test = padded, _channels_second((test - mean) / deviation)
        self.train_labels, self.test_labels = (torch.from_numpy(arrays[key]).to(device) for key in ("y_train", "y_test"))
        self.device, self.side = device, train.shape[1]

    def batch(self, num: int, source: torch.Generator) -> tuple[Tensor, Tensor]:
        """Pictures drawn at random, each shifted by up to PAD pixels and mirrored or not."""
        draw = lambda bound: torch.randint(bound, (num,), generator=source, device=self.device)  # noqa: E731
        which, down, right, mirrored = draw(len(self.train)), draw(2 * PAD + 1), draw(2 * PAD + 1), draw(2).bool()
        places = torch.arange(self.side, device=self.device)
        columns = torch.where(mirrored[:, None], places.flip(0), places) + right[:, None]  # (num, side)
        x = self.train[which[:, None, None], (places + down[:, None])[:, :, None], columns[:, None, :]]
        return _channels_second(x), self.train_labels[which]

    def accuracy(self, model: nn.Module, num_judged: int) -> float:
        """The share of test pictures that `model` names right."""
        pairs = zip(
            self.test[:num_judged].split(EXAMPLES_AT_ONCE), self.test_labels[:num_judged].split(EXAMPLES_AT_ONCE), strict=True
        )
        return torch.cat([model(x).argmax(1) == labels for x, labels in pairs]).float().mean().item()


class Text:
    """Bytes of a text on the device: nine tenths to learn, the last to be judged by."""

    def __init__(self, path: Path, device: str, length: int) -> None:
        read = torch.from_numpy(np.frombuffer(gzip.decompress(path.read_bytes()), dtype=np.uint8).copy())
        cut = len(read) * 9 // 10
        self.train, self.device, self.length = read[:cut].to(device), device, length
        rows = (len(read) - cut) // (length + 1)
        self.test = read[cut : cut + rows * (length + 1)].view(rows, length + 1).to(device)

    def batch(self, num: int, source: torch.Generator) -> tuple[Tensor, Tensor]:
        """Pieces that start anywhere, and the same one byte later."""
        starts = torch.randint(len(self.train) - self.length, (num, 1), generator=source, device=self.device)
        return self.pair(self.train[starts + torch.arange(self.length + 1, device=self.device)])

    def pair(self, pieces: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs and targets (num, length) of pieces (num, length + 1)."""
        return pieces[:, :-1].long(), pieces[:, 1:].long()

    def loss(self, model: nn.Module, num_judged: int) -> float:
        """Mean nats a byte over test pieces that lie evenly in the last tenth."""
        chosen = self.test[:: max(len(self.test) // num_judged, 1)][:num_judged]
        parts = [self.pair(pieces) for pieces in chosen.split(EXAMPLES_AT_ONCE)]
        losses = [token_loss(model(ids).float(), targets) * len(ids) for ids, targets in parts]
        return (torch.stack(losses).sum() / len(chosen)).item()


# --- tasks ------------------------------------------------------------------------------------------------------------


def picture_task(folder: Path, device: str, size: Size) -> Task:
    """ResNet-18 on CIFAR-10: SGD with Nesterov's momentum."""
    data = Pictures(find_file(folder, "images", "cifar10.npz"), device)

    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=5e-4, fused=True)

    return Task(
        *("resnet18 on CIFAR-10", "accuracy", 0.1, size),
        build=lambda: MODELS["resnet18"](width=size.width).to(memory_format=torch.channels_last),
        optimizer=optimizer,
        peak_lr=0.1,
        batches=data.batch,
        loss=cross_entropy,
        judge=lambda model: data.accuracy(model, size.num_judged),
    )


def text_task(folder: Path, device: str, size: Size) -> Task:
    """A GPT on bytes: AdamW."""
    data = Text(find_file(folder, "text", "sotu_en.txt.gz"), device, size.length)

    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True)

    shape = {"dim": size.width, "num_layers": size.num_layers, "num_heads": max(size.width // 32, 1), "context": size.length}
    return Task(
        *("gpt on bytes", "loss", math.log(NUM_BYTES), size),
        build=lambda: MODELS["gpt"](vocabulary=NUM_BYTES, **shape),
        optimizer=optimizer,
        peak_lr=1e-3,
        batches=data.batch,
        loss=token_loss,
        judge=lambda model: data.loss(model, size.num_judged),
    )


# --- runs -------------------------------------------------------------------------------------------------------------


def run(task: Task, way: Way, seed: int, device: str) -> Row:
    """Train once and judge."""
    release(device)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    row = Row(task.name, way.name, way.kind, way.rounding, task.metric, task.size.num_steps, seed)
    torch.manual_seed(seed)
    model, begun = task.build().to(device).train(), time.perf_counter()
    with applied(way, model, seed):
        train_loss = train(task, model, torch.Generator(device).manual_seed(1000 + seed), device)
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else None
    with torch.no_grad(), torch.autocast(device, torch.bfloat16, enabled=task.size.autocasts):
        value = task.judge(model.eval())
    better = value > 1.2 * task.guessing if task.larger_is_better else value < task.guessing
    status = "done" if math.isfinite(train_loss) and math.isfinite(value) and better else "diverged"
    return replace(row, value=value, train_loss=train_loss, seconds=time.perf_counter() - begun, peak_bytes=peak, status=status)


def train(task: Task, model: nn.Module, source: torch.Generator, device: str) -> float:
    """The loss of the last step, or the first that was not finite when looked at, where training then stops."""
    optimizer, num_steps = task.optimizer(model), task.size.num_steps
    loss = torch.tensor(math.nan)
    for step in range(num_steps):
        x, target = task.batches(task.size.batch, source)
        with torch.autocast(device, torch.bfloat16, enabled=task.size.autocasts):
            loss = task.loss(model(x), target)
        loss.backward()
        update(task, model, optimizer, step)
        if step % CHECK_EVERY == 0 and not math.isfinite(loss.item()):
            break
    return loss.item()


def update(task: Task, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Clip, set the learning rate of this step, and take it."""
    nn.utils.clip_grad_norm_(model.parameters(), 1.0 if task.metric == "loss" else 5.0)
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(step, task.size.num_steps, task.peak_lr)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def attempt(task: Task, way: Way, seed: int, device: str) -> Row:
    """`run`, an error being a row too."""
    try:
        return run(task, way, seed, device)
    except Exception as error:
        about = (task.name, way.name, way.kind, way.rounding, task.metric, task.size.num_steps, seed)
        return Row(*about, status="failed", error=failure(error))


# --- the table --------------------------------------------------------------------------------------------------------


def summary(rows: Sequence[Row], plain: Sequence[Row]) -> Row:
    """Mean and deviation over the seeds of one way, runs that diverged left out and counted."""
    values = {row.seed: row.value for row in rows if row.status == "done" and row.value is not None}
    by_seed = {row.seed: row.value for row in plain if row.status == "done" and row.value is not None}
    differences = [value - by_seed[seed] for seed, value in values.items() if seed in by_seed]
    return replace(
        rows[0],
        seed=None,
        value=None,
        train_loss=None,
        error=None,
        status="summary",
        seconds=sum(row.seconds or 0.0 for row in rows),
        mean=statistics.mean(values.values()) if values else None,
        deviation=statistics.stdev(values.values()) if len(values) > 1 else None,
        mean_difference=statistics.mean(differences) if differences else None,
        standard_error=statistics.stdev(differences) / len(differences) ** 0.5 if len(differences) > 1 else None,
        num_diverged=sum(row.status == "diverged" for row in rows),
    )


def number(value: float | None, form: str = ".4f") -> str:
    """A number for a table, or a dash."""
    return "-" if value is None else f"{value:{form}}"


def line(row: Row) -> str:
    """One line of the table."""
    head = f"{row.task:21s} {row.way:19s} {row.kind or '':10s}"
    if row.seed is None:
        diverged = f"  {row.num_diverged} DIVERGED" if row.num_diverged else ""
        against = number(row.mean_difference, "+.4f")
        figures = f"{row.metric} {number(row.mean)} +- {number(row.deviation)}  {against} ({number(row.standard_error)})"
        return f"{head} {figures} against the baseline{diverged}"
    peak = "" if row.peak_bytes is None else f"  peak {row.peak_bytes / 2**20:.0f} MiB"
    figures = f"{row.metric} {number(row.value)}  train loss {number(row.train_loss)}  {number(row.seconds, '.1f')} s{peak}"
    return f"{head} seed {row.seed}  {figures}  {row.error or row.status}"


def parse_options() -> argparse.Namespace:
    """What to run, and on which data."""
    parser = common_options(__doc__)
    parser.add_argument("--data", type=Path, default=Path(os.environ.get("PAREDOWN_DATA", "data")), help="folder (PAREDOWN_DATA)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument(
        "--plan", nargs="+", default=[""], help="only variants whose name contains one of these; the baseline always runs"
    )
    parser.add_argument("--share", type=float, default=1.0, help="of the steps, where time is short")
    parser.add_argument("--small", action="store_true", help="narrow networks on the CPU")
    return parser.parse_args()


def main() -> None:
    """Seed by seed all tasks and ways, so that what is there when it is stopped can be compared; then what they have in common."""
    options = parse_options()
    device = "cpu" if options.quick or options.small else "cuda"
    torch.backends.cudnn.benchmark = True
    makers = {
        "resnet18": (picture_task, QUICK_RESNET, SMALL_RESNET, RESNET),
        "gpt": (text_task, QUICK_TRANSFORMER, SMALL_TRANSFORMER, TRANSFORMER),
    }
    tasks = []
    for make, quick, small, full in (maker for name, maker in makers.items() if not options.model or name in options.model):
        size = small if options.small else full
        size = quick if options.quick else replace(size, num_steps=int(options.share * size.num_steps))
        tasks.append(make(options.data, device, size))
    ways = chosen(WAYS, options.plan)
    log, rows = Log("train_activations.json", device, options), []
    for seed, task, way in ((seed, task, way) for seed in options.seeds for task in tasks for way in ways):
        rows.append(attempt(task, way, seed, device))
        log.add(rows[-1])
        print(line(rows[-1]), flush=True)
    for task, way in ((task, way) for task in tasks for way in ways):
        of_task = [row for row in rows if row.task == task.name]
        of_way = [row for row in of_task if row.way == way.name]
        joined = summary(of_way, [row for row in of_task if row.way == BASELINE.name])
        log.add(joined)
        print(line(joined), flush=True)


if __name__ == "__main__":
    main()
