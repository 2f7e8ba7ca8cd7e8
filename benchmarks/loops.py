"""What the benchmarks of training loops share: jobs, the ways to run them, one step, and a file of results that grows row by row."""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from measure import RESULTS, machine
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import paredown as pare
from paredown.plan.storage import Assignment

PACKAGES = ("torch", "triton", "numpy", "torchvision", "transformers")
GIB = 2**30

Batch = tuple[Tensor, Tensor] | Mapping[str, Tensor]


@dataclass(frozen=True)
class Way:
    """One variant of a loop: the baseline, checkpointed, or with activations in a format."""

    name: str
    activation: str | None = None
    checkpointing: bool = False
    asked: str | None = None  # the rounding; None: the default

    @property
    def rounding(self) -> str | None:
        """The rounding of activations; None if they are not packed."""
        return None if self.activation is None else Assignment.parse(self.activation, self.asked).resolved_rounding.value

    @property
    def kind(self) -> str | None:
        """Whether a block has a minimum beside its scale."""
        return None if self.activation is None else "affine" if "+" in self.activation else "symmetric"

    def plan(self) -> pare.Plan:
        """The plan that this way applies."""
        return pare.Plan.uniform(activation=self.activation, rounding=self.rounding) if self.activation else pare.Plan.uniform()


BASELINE = Way("baseline")


def chosen(ways: Sequence[Way], texts: Sequence[str]) -> list[Way]:
    """The variants whose names contain one of `texts`; the baseline is always among them."""
    return [way for way in ways if way is BASELINE or any(text in way.name for text in texts)]


def failure(error: Exception) -> str:
    """An error as the text of a row."""
    return f"{type(error).__name__}: {error}"[:600]


@dataclass(frozen=True)
class Job:
    """A training loop. A batch that is a mapping holds keywords, and the model then answers its own loss."""

    name: str
    size: int  # examples in a batch
    build: Callable[[], nn.Module]
    batch: Callable[[int, str], Batch]
    optimizer: str  # "sgdm" or "adamw"
    channels_last: bool = False
    has_checkpointing: bool = False


def pictures(size: int, device: str, *, side: int = 224, num_classes: int = 1000, channels_last: bool = False) -> Batch:
    """Noise and labels."""
    x = torch.randn(size, 3, side, side, device=device)
    return x.to(memory_format=torch.channels_last) if channels_last else x, torch.randint(num_classes, (size,), device=device)


def build(job: Job, device: str, *, checkpointing: bool = False) -> nn.Module:
    """The job's model on `device`, made there."""
    with torch.device(device):
        model = job.build().train()
    if job.channels_last:
        model.to(memory_format=torch.channels_last)
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def make_optimizer(name: str, model: nn.Module) -> torch.optim.Optimizer:
    """torch's own, fused."""
    if name == "sgdm":
        return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=True)
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


def forward(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor | None]:
    """The loss, and the output that a loop holds until its step ends; of a model that answers its own loss, the loss alone."""
    if isinstance(batch, Mapping):
        return model(**batch).loss, None
    output = model(batch[0])
    return cross_entropy(output, batch[1]), output


def make_step(model: nn.Module, batch: Batch, optimizer: torch.optim.Optimizer, device: str) -> Callable[[], Tensor]:
    """One training step as a call that returns the loss."""

    def step() -> Tensor:
        with torch.autocast(device, torch.bfloat16):
            loss, _output = forward(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


@contextmanager
def applied(way: Way, model: nn.Module, seed: int = 0) -> Iterator[Any]:
    """The session of a way that has a plan, else None."""
    if way.activation is None:
        yield None
        return
    session = pare.apply(way.plan(), model, seed=seed)
    try:
        yield session
    finally:
        session.close()


def release(device: str) -> None:
    """Give back what the last case left, cuBLAS's workspace of 64 MiB too: a network without matrix products does not have it."""
    gc.collect()
    if device == "cuda":
        torch._C._cuda_clearCublasWorkspaces()  # pyright: ignore[reportPrivateUsage]
        torch.cuda.empty_cache()


# --- results ----------------------------------------------------------------------------------------------------------


class Log:
    """A run in a file of results, printed as it goes: rewritten after each row, so that what comes later cannot lose it."""

    def __init__(self, file: str, device: str, options: argparse.Namespace, *, continues: bool = False) -> None:
        """`continues`: rows are added to the last run of the file if it has the same commit."""
        folder = options.out or RESULTS
        self.path = folder / file if options.out or not options.quick else None
        self.runs = json.loads(self.path.read_text()) if self.path and self.path.exists() else []
        run: dict[str, Any] = {**machine(device, PACKAGES, options.commit), "rows": []}
        if continues and self.runs and self.runs[-1]["commit"] == run["commit"]:
            run = self.runs.pop()  # its rows are there already
        self.runs.append(run)
        self.rows: list[dict[str, Any]] = run["rows"]
        folder.mkdir(parents=True, exist_ok=True)

    def add(self, row: Any) -> None:
        """Write one more row, a dataclass."""
        self.rows.append(asdict(row))
        self._write()

    def amend(self, row: Any) -> None:
        """Write this row in place of the last one."""
        self.rows[-1] = asdict(row)
        self._write()

    def _write(self) -> None:
        if self.path:
            part = self.path.with_suffix(".part")
            part.write_text(json.dumps(self.runs, indent=1) + "\n")
            part.replace(self.path)  # at once: a run that is killed here leaves the file whole


@dataclass(frozen=True)
class Table:
    """Prints the rows of a benchmark, and joins rows that several processes measured."""

    file: str
    row_type: type[Any]
    ways: tuple[str, ...]  # in the order of the table
    summaries: Callable[[Sequence[Any]], Iterator[Any]]
    line: Callable[[Any], str]

    def tell(self, log: Log, rows: Iterable[Any]) -> None:
        """Write rows down and print them."""
        for row in rows:
            log.add(row)
            print(self.line(row), flush=True)

    def merge(self, paths: Sequence[Path], folder: Path) -> None:
        """The runs in all files as one, with their means; appended to the file in `folder`."""
        runs = [run for path in paths for run in json.loads(path.read_text())]
        names = {field.name for field in fields(self.row_type)}
        values = [{k: v for k, v in row.items() if k in names} for run in runs for row in run["rows"] if row["seed"] is not None]
        rows = [self.row_type(**row) for row in values]
        order = {name: place for place, name in enumerate(self.ways)}
        rows.sort(key=lambda row: (row.task, order.get(row.way, len(order)), row.seed))
        joined = list(self.summaries(rows))
        print("\n".join(self.line(row) for row in joined))
        file = folder / self.file
        before = json.loads(file.read_text()) if file.exists() else []
        folder.mkdir(parents=True, exist_ok=True)
        commits = ", ".join(dict.fromkeys(str(run["commit"]) for run in runs))
        run = {**runs[0], "commit": commits, "rows": [asdict(row) for row in (*rows, *joined)]}
        file.write_text(json.dumps([*before, run], indent=1) + "\n")


def compared(values: Sequence[float], others: Sequence[float]) -> dict[str, float | None]:
    """Mean and deviation of `values`, the difference of the means from `others`, and its standard error."""
    both = len(values) > 1 and len(others) > 1
    variance = statistics.variance(values) / len(values) + statistics.variance(others) / len(others) if both else 0.0
    return {
        "mean": statistics.mean(values) if values else None,
        "deviation": statistics.stdev(values) if len(values) > 1 else None,
        "difference": statistics.mean(values) - statistics.mean(others) if values and others else None,
        "standard_error": math.sqrt(variance) if both else None,
    }


def mean_of(rows: Sequence[Any], name: str) -> float | None:
    """The mean of a column, None where no row has it."""
    found = [getattr(row, name) for row in rows if getattr(row, name) is not None]
    return statistics.mean(found) if found else None


def gib(count: int | None) -> str:
    """Bytes for a table."""
    return "      -" if count is None else f"{count / GIB:7.3f}"


def common_options(doc: str | None) -> argparse.ArgumentParser:
    """The options that benchmarks of training loops share."""
    os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")  # some virtual machines name AMX and then refuse it
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", help="only these")
    parser.add_argument("--quick", action="store_true", help="tiny shapes on the CPU")
    parser.add_argument("--commit", help="what is measured, where git cannot tell")
    parser.add_argument("--out", type=Path, help="folder of the JSON file: benchmarks/results, or with --quick none")
    return parser


def training_options(doc: str | None) -> argparse.ArgumentParser:
    """`common_options`, and what benchmarks that train on data have beside them."""
    parser = common_options(doc)
    parser.add_argument("--data", type=Path, default=Path(os.environ.get("PAREDOWN_DATA", "data")), help="folder (PAREDOWN_DATA)")
    parser.add_argument("--share", type=float, default=1.0, help="of the steps, where time is short")
    parser.add_argument("--merge", type=Path, nargs="+", help="files to join instead of training")
    return parser
