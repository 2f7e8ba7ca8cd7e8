"""What a model itself takes, and what it costs to take a quarter: `make optimizers` runs this.

A small classifier learns handwritten digits five times side by side, by SGD with momentum, from the same start and on the same batches:
in float32; with bf16 weights; with weights, momentum and gradients in 8 bits; and twice more in 8 bits with weights rounded to nearest
instead of stochastically, the second time with 4 backward passes to a step. Float32 arithmetic, on the CPU.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from itertools import islice
from shutil import get_terminal_size
from textwrap import fill
from time import perf_counter

import torch
from activations import BATCH, NUM_TRAIN, batches, digits, progress
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import paredown as pare
from paredown.optim import SGD


@dataclass(frozen=True)
class Way:
    """A tier, and how weights are rounded (None: as the tier does it)."""

    tier: str
    rounding: str | None = None
    microbatches: int = 1


WAYS = {
    "fp32": Way("full"),
    "half": Way("half"),
    "lpmm": Way("lpmm"),
    "nearest": Way("lpmm", "nearest_even"),
    "nearest x4": Way("lpmm", "nearest_even", microbatches=4),
}
STEPS = 240  # backward passes: 16 epochs
WIDTH = 256
RATE = 0.01  # of learning, with one batch to a step
KIB = 2**10


def main() -> None:
    """Trace one step, train five times, compare."""
    parser = argparse.ArgumentParser(description=fill((__doc__ or "").partition("\n")[0]))
    parser.add_argument("--steps", type=int, default=STEPS, help="backward passes of each run (%(default)s)")
    num_steps = parser.parse_args().steps
    torch.set_num_threads(1)  # small tensors gain nothing from a second thread, and a busy machine makes it wait
    images, labels = small_digits()
    trace = pare.trace_step(new_model(), (images[:BATCH], labels[:BATCH]), loss=cross_entropy, optimizer="sgdm", device="cpu")
    runs = [Run(name, way, trace, num_steps) for name, way in WAYS.items()]
    numel = sum(p.numel() for p in runs[0].model.parameters())
    print(
        f"A classifier of {numel:,} parameters, {num_steps} batches of {BATCH} digits, {num_steps * BATCH / NUM_TRAIN:.2g} epochs,\n"
        f"{len(runs)} times side by side.\n",
        flush=True,
    )
    with progress(list(WAYS), num_steps) as report:
        for batch in islice(batches(NUM_TRAIN), num_steps):
            for place, run in enumerate(runs):
                report(place, f"loss {run.step(images[batch], labels[batch]):.3f}")
    for run in runs:
        run.judge(images, labels)
    print(f"{table(runs)}\n\n{lesson(runs)}\n\n{ADVICE}")


def small_digits() -> tuple[Tensor, Tensor]:
    """The digits that the package carries as rows of 64 pixels, (1797, 64), and which digit each shows."""
    images, labels = digits()
    return images[:, 0, ::2, ::2].flatten(1).contiguous(), labels


def new_model() -> nn.Module:
    """The same network at each call."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 10))


class Run:
    """One way to train: its model and optimizer, what the trace says of it, and what is measured."""

    def __init__(self, name: str, way: Way, trace: pare.Trace, num_steps: int) -> None:
        plan = pare.Plan.preset(way.tier) if way.tier != "full" else None
        self.name, self.model, self.num_steps = name, new_model(), num_steps
        self.predicted_bytes = pare.footprint(trace, plan).model_bytes
        self.session = pare.apply(plan, self.model) if plan is not None else None
        rounding = {"weight": way.rounding} if way.rounding is not None else None
        count = way.microbatches
        self.optimizer = SGD(self.model.parameters(), lr=count * RATE, momentum=0.9, rounding=rounding, microbatches=count, seed=1)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, -(-num_steps // count))
        self.measured_bytes, self.seconds, self.loss, self.accuracy = 0, 0.0, 0.0, 0.0

    def step(self, x: Tensor, y: Tensor) -> float:
        """One step of an ordinary loop."""
        started = perf_counter()
        loss = cross_entropy(self.model(x), y)
        loss.backward()
        updates = self.optimizer.updates_next
        self.optimizer.step()
        if updates:
            self.schedule.step()
            self.measured_bytes = self.measured_bytes or self.model_bytes()
        self.optimizer.zero_grad()
        self.seconds += perf_counter() - started
        return loss.item()

    def model_bytes(self) -> int:
        """Bytes that weights, gradients and momentum hold."""
        parameters = list(self.model.parameters())
        weights = sum(p.untyped_storage().nbytes() for p in parameters)  # of packed ones 0
        packed = self.session.weight_bytes if self.session is not None else 0
        gradients = sum(p.grad.nbytes for p in parameters if p.grad is not None)
        state = [item for p in parameters for item in self.optimizer.state[p].items()]
        return weights + packed + gradients + sum(t.nbytes for name, t in state if not name.startswith("weight."))  # counted above

    @torch.no_grad()
    def judge(self, images: Tensor, labels: Tensor) -> None:
        """The loss on what it learned from, and the share of unseen digits that it reads right."""
        output = self.model(images)
        self.loss = cross_entropy(output[:NUM_TRAIN], labels[:NUM_TRAIN]).item()
        self.accuracy = (output[NUM_TRAIN:].argmax(1) == labels[NUM_TRAIN:]).float().mean().item()

    def moved(self) -> tuple[str, str]:
        """Share of weights that moved in a step, and share of updates below half a step of their format."""
        rows = self.optimizer.diagnostics()
        total = sum(row.num_values for row in rows)
        if not total:
            return "-", "-"
        flips, dead = (sum(getattr(row, of) * row.num_values for row in rows) / total for of in ("flips", "dead_zone"))
        return f"{flips:.1%}", f"{dead:.1%}"

    def row(self) -> tuple[str, ...]:
        """Its line of the table."""
        sizes = (f"{nbytes / KIB:.0f} KiB" for nbytes in (self.measured_bytes, self.predicted_bytes))
        time = f"{1000 * self.seconds / self.num_steps:.0f} ms"
        return (self.name, *sizes, f"{self.loss:.3f}", f"{self.accuracy:.1%}", *self.moved(), time)


# --- what is printed --------------------------------------------------------------------------------------------------------------


def table(runs: list[Run]) -> str:
    """A row for each run."""
    rows = [
        ("", "model memory,", "model memory,", "train", "test", "weights", "dead", "time of"),
        ("", "measured", "predicted", "loss", "accuracy", "that move", "zone", "a step"),
        *(run.row() for run in runs),
    ]
    widths = [10, 13, 13, 5, 8, 9, 6, 7]
    lines = [" ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))]) for row in rows]
    return "\n".join([*lines[:2], "-" * len(lines[0]), *lines[2:]])


def lesson(runs: list[Run]) -> str:
    """What was saved, what it cost, and what rounding has to do with it."""
    plain, half, lpmm, nearest, few = runs
    paragraphs = (
        f"Saved: weights, momentum and gradients take {1 - lpmm.measured_bytes / plain.measured_bytes:.0%} less in 8 bits (lpmm) and "
        f"{1 - half.measured_bytes / plain.measured_bytes:.0%} less with bf16 weights (half); biases and the last layer stay float32.",
        f"Rounding: {lpmm.moved()[1]} of the updates are in the dead zone, smaller than half a step of an 8-bit weight. To nearest they "
        f"are lost, and the loss ends at {nearest.loss:.3f} instead of {plain.loss:.3f}. Stochastically {lpmm.moved()[0]} of the weights "
        f"move by a whole step each time, which is right on average: {lpmm.loss:.3f}.",
        "Microbatches: 4 backward passes to a step at 4 times the learning rate make updates larger. To nearest that ends at "
        f"{few.loss:.3f}.",
    )
    width = min(get_terminal_size().columns, 100)
    return "\n".join(fill(paragraph, width) for paragraph in paragraphs)


ADVICE = """For your own model, in the loop that you have:

    session = pare.apply(pare.Plan.preset("lpmm"), model)
    opt = pare.optim.AdamW(model.parameters(), lr=3e-4)
    ...                                 # train as before
    print(opt.diagnostics())            # whether updates arrive
    print(session.changes)              # what was not done as asked, and why"""


if __name__ == "__main__":
    main()
