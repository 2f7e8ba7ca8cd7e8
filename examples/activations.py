"""What a training step stores, and what it costs to store less: `make activations` runs this.

A small ResNet learns handwritten digits four times in parallel, from the same seed and on the same batches: without a plan (the baseline),
and with its saved activations in 8, 4 and 2 bits. Predictions for one step come first, then measurements. Float32, on the CPU.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, nullcontext
from importlib.resources import files
from importlib.util import find_spec
from itertools import islice
from shutil import get_terminal_size
from textwrap import fill
from time import perf_counter

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.functional import cross_entropy, interpolate

import paredown as pare
from paredown.models import resnet18

WAYS = {
    "baseline": None,
    "8 bits": pare.Plan.preset("activations8"),
    "4 bits": pare.Plan.preset("activations4"),
    "2 bits": pare.Plan.preset("activations2"),
}
NUM_TRAIN = 1500
BATCH = 100
STEPS = 90  # 6 epochs
WIDTH, PICTURE = 8, 16  # channels of the first layer; pixels along a side, twice those of the data
RATE = 0.2  # of learning, at its highest
MIB = 2**20
Report = Callable[[int, str], None]


def main() -> None:
    """Trace one step, train four times, compare."""
    parser = argparse.ArgumentParser(description=fill((__doc__ or "").partition("\n")[0]))
    parser.add_argument("--steps", type=int, default=STEPS, help="of each run (%(default)s)")
    num_steps = parser.parse_args().steps
    torch.set_num_threads(1)  # small tensors gain nothing from a second thread, and a busy machine makes it wait
    images, labels = digits()
    batch = images[:BATCH], labels[:BATCH]
    trace = pare.trace_step(new_model(), batch, loss=cross_entropy, optimizer="sgdm", device="cpu")
    print(f"One step of a ResNet-18 of width {WIDTH} on {BATCH} digits, predicted before anything runs:\n")
    print(pare.footprint(trace), flush=True)
    runs = [Run(name, plan, trace, num_steps) for name, plan in WAYS.items()]
    print(f"\nNow {num_steps} steps, {num_steps * BATCH / NUM_TRAIN:.2g} epochs, four times side by side.\n", flush=True)
    train(runs, images[:NUM_TRAIN], labels[:NUM_TRAIN])
    for run in runs:
        run.test(images[NUM_TRAIN:], labels[NUM_TRAIN:])
    print(f"{table(runs)}\n\n{lesson(runs)}\n\n{ADVICE}")


def digits() -> tuple[Tensor, Tensor]:
    """The digits that the package carries, as pictures (1797, 3, 16, 16) of mean 0 and deviation 1, and which digit each shows."""
    with (files("paredown") / "data" / "digits.npz").open("rb") as file:
        data = np.load(file)
        x, y = torch.from_numpy(data["x"]).float().view(-1, 1, 8, 8), torch.from_numpy(data["y"]).long()
    return interpolate((x - x.mean()) / x.std(), PICTURE).expand(-1, 3, -1, -1).contiguous(), y


def new_model() -> nn.Module:
    """The same network at each call."""
    torch.manual_seed(0)
    return resnet18(num_classes=10, width=WIDTH, small_input=True)


class Run:
    """One way to train: its model and optimizer, what the trace says of it, and what is measured."""

    def __init__(self, name: str, plan: pare.Plan | None, trace: pare.Trace, num_steps: int) -> None:
        foot = pare.footprint(trace, plan)
        self.name, self.model, self.num_steps = name, new_model(), num_steps
        self.session = pare.apply(plan, self.model, seed=1) if plan is not None else None
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=RATE, momentum=0.9, weight_decay=5e-4)
        self.schedule = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, RATE, num_steps)
        self.predicted_bytes, self.predicted_peak_bytes = foot.by_role[pare.Role.ACTIVATION], foot.peak_bytes
        self.measured_bytes, self.seconds, self.num_right, self.num_tested = 0, 0.0, 0, 0

    def step(self, x: Tensor, y: Tensor) -> float:
        """One step of an ordinary loop; the first one also counts the bytes that wait for backward."""
        started = perf_counter()
        saved: dict[int, int] = {}
        counts = self.session is None and not self.measured_bytes
        with count_saved(saved, [x, y, *self.model.parameters(), *self.model.buffers()]) if counts else nullcontext():
            loss = cross_entropy(self.model(x), y)
        if not self.measured_bytes:
            self.measured_bytes = sum(saved.values()) if self.session is None else self.session.stored_bytes
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.schedule.step()
        self.seconds += perf_counter() - started
        return loss.item()

    def sizes(self) -> tuple[int, int, int]:
        """Bytes that wait for backward, measured and predicted, and the predicted peak."""
        return self.measured_bytes, self.predicted_bytes, self.predicted_peak_bytes

    def step_time(self) -> str:
        """The mean of all steps, in milliseconds."""
        return f"{1000 * self.seconds / self.num_steps:.0f} ms"

    @torch.no_grad()
    def test(self, x: Tensor, y: Tensor) -> None:
        """Give the plain model back, and count the unseen digits that it reads right."""
        if self.session is not None:
            self.session.close()
        self.num_right, self.num_tested = int((self.model.eval()(x).argmax(1) == y).sum()), len(y)


@contextmanager
def count_saved(saved: dict[int, int], others: list[Tensor]) -> Generator[None]:
    """Bytes of each storage that autograd saves, once however often it is saved, without those of `others`."""
    not_saved = {tensor.untyped_storage().data_ptr() for tensor in others}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in not_saved:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor.detach()

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        yield


def train(runs: list[Run], images: Tensor, labels: Tensor) -> None:
    """All steps of all runs, in turn on the same batches."""
    num_steps = runs[0].num_steps
    with progress([run.name for run in runs], num_steps) as report:
        for batch in islice(batches(len(images)), num_steps):
            for place, run in enumerate(runs):
                report(place, f"loss {run.step(images[batch], labels[batch]):.3f}")


def batches(num: int) -> Iterator[Tensor]:
    """Indices of `num` examples without end, in another order each epoch."""
    source = torch.Generator().manual_seed(0)
    while True:
        yield from torch.randperm(num, generator=source).split(BATCH)


# --- what is printed --------------------------------------------------------------------------------------------------------------


@contextmanager
def progress(names: list[str], num_steps: int) -> Generator[Report]:
    """A bar for each name in a terminal: rich's where it is installed, else a line of percentages. Nothing elsewhere."""
    if not sys.stdout.isatty():
        yield lambda place, text: None
    elif find_spec("rich"):
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn("{task.description:10}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[note]}"))
        with Progress(*columns, TimeRemainingColumn()) as bars:
            tasks = [bars.add_task(name, total=num_steps, note="") for name in names]
            yield lambda place, text: bars.update(tasks[place], advance=1, note=text)
        print()
    else:
        done = [0] * len(names)

        def line(place: int, text: str) -> None:
            done[place] += 1
            print(
                "\r" + "   ".join(f"{name} {n / num_steps:4.0%}" for name, n in zip(names, done, strict=True)), end="", flush=True
            )

        yield line
        print("\n")


def table(runs: list[Run]) -> str:
    """A row for each run."""
    rows = [
        ("", "stored,", "stored,", "peak,", "test", "time of"),
        ("", "measured", "predicted", "predicted", "accuracy", "a step"),
        *((run.name, *(mib(n) for n in run.sizes()), f"{run.num_right / run.num_tested:.1%}", run.step_time()) for run in runs),
    ]
    widths = [10, 9, 9, 9, 8, 7]
    lines = ["  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))]) for row in rows]
    return "\n".join([*lines[:2], "-" * len(lines[0]), *lines[2:]])


def mib(nbytes: int) -> str:
    """In MiB."""
    return f"{nbytes / MIB:.2f} MiB"


def lesson(runs: list[Run]) -> str:
    """What was saved, and what it cost."""
    plain, *packed = runs
    times = ", ".join(f"{plain.measured_bytes / run.measured_bytes:.1f}x in {run.name}" for run in packed)
    changes = ", ".join(f"{run.num_right - plain.num_right:+d} in {run.name}" for run in packed)
    slower = max(run.seconds for run in packed) / plain.seconds
    paragraphs = (
        f"Saved: activations between forward and backward are smaller by {times}. (Measured in the baseline: every storage that autograd "
        "saved. Packed: what the session holds; statistics and other small tensors are unmodified, and are in the prediction.)",
        f"Cost: {plain.num_right} of {plain.num_tested} test digits are classified correctly by the baseline, {changes}; one seed, so a "
        f"few digits are chance. A step took up to {slower:.1f}x as long, on one core of this CPU.",
    )
    width = min(get_terminal_size().columns, 100)
    return "\n".join(fill(paragraph, width) for paragraph in paragraphs)


ADVICE = """For your own model, in the loop that you have:

    trace = pare.trace_step(model, (x, y), loss=loss_fn, optimizer="adamw",
                            device="cuda", autocast=torch.bfloat16)
    print(pare.footprint(trace))        # needs no GPU
    session = pare.apply(pare.Plan.preset("activations4"), model)
    ...                                 # train as before
    print(session.changes)              # slots not stored as requested, and why"""


if __name__ == "__main__":
    main()
