"""What the rows of bench_language.py must show, beside what they show: one line for each requirement, and the losses of trainings.

>>> rows = {("loss", "liger", None): {"peak_bytes": 100, "median_seconds": 1.0}, ("loss", "paredown", None): {"peak_bytes": 90}}
>>> [verdict.text for verdict in verdicts(rows) if verdict.measured is not None]
['loss: peak of paredown / liger']
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paredown.tables import Table

Rows = Mapping[tuple[str, str, int | None], Mapping[str, Any]]  # (job, way, seed) -> row
GIB = 2**30
EXPERTS_GIB = 22
MAX_ERROR = 0.05  # of predicted peaks
QLORA = ("qlora", "qlora-double")
BASELINES = {"lora_accuracy": "bf16"}


@dataclass(frozen=True)
class Verdict:
    """A requirement and the measured number; None: not measured."""

    text: str
    must: str
    measured: float | None
    passes: bool | None
    unit: str = "x"

    @property
    def cells(self) -> tuple[str, str, str, str]:
        """A line of the table."""
        shown = "-" if self.measured is None else f"{self.measured:+.1%}" if self.unit == "%" else f"{self.measured:.3f}{self.unit}"
        return self.text, self.must, shown, "not measured" if self.passes is None else "PASS" if self.passes else "miss"


def value(rows: Rows, job: str, way: str, name: str) -> float | None:
    """A field of a row; None where it is missing."""
    return rows.get((job, way, None), {}).get(name)


def above_base(rows: Rows, job: str, way: str, name: str) -> float | None:
    """The peak without the base weights of the same way."""
    peak, base = (value(rows, job, way, key) for key in (name, "base_bytes"))
    return None if peak is None or base is None else peak - base


@dataclass(frozen=True)
class Must:
    """A bound on the ratio of a field of one way to that of another; `is_least`: a lower bound."""

    job: str
    way: str
    peer: str
    field: str
    bound: float
    is_least: bool = False
    read: Callable[[Rows, str, str, str], float | None] = value
    label: str = ""

    def verdict(self, rows: Rows) -> Verdict:
        """The ratio beside its bound, with `spread`."""
        ours, theirs = (self.read(rows, self.job, way, self.field) for way in (self.way, self.peer))
        label = self.label or {"peak_bytes": "peak", "median_seconds": "step", "model_bytes": "model memory"}.get(
            self.field, self.field
        )
        text, must = f"{self.job}: {label} of {self.way} / {self.peer}", f"{'>=' if self.is_least else '<='} {self.bound:.2f}x"
        if ours is None or not theirs:
            return Verdict(text, must, None, None)
        ratio = ours / theirs
        return Verdict(text, must, ratio, ratio >= self.bound if self.is_least else ratio <= self.bound + self.spread(rows))

    def spread(self, rows: Rows) -> float:
        """Half of the range from the 20th to the 80th percentile of both ways, where equal times are required."""
        if self.field != "median_seconds" or self.bound != 1.0:
            return 0.0
        shares = []
        for way in (self.way, self.peer):
            low, middle, high = (value(rows, self.job, way, f"{name}_seconds") for name in ("p20", "median", "p80"))
            shares.append((high - low) / 2 / middle if low and middle and high else 0.0)
        return sum(shares)


def musts() -> Iterator[Must]:
    """All bounds on ratios."""
    for way in ("paredown", "paredown-offload", "paredown-inputs-offload"):
        yield Must("lora", way, "peft-liger", "peak_bytes", 0.65, read=above_base, label="peak above the base")
        yield Must("lora", way, "peft-liger", "median_seconds", 1.05)
    yield Must("lora", "paredown-frozen8", "peft-liger", "peak_bytes", 0.70)
    yield Must("lora", "paredown-frozen8", "peft-liger", "median_seconds", 1.05)
    for ours in ("paredown-nf4", "paredown-int4"):
        for peer in QLORA:
            yield Must("lora", ours, peer, "peak_bytes", 1.0)
            yield Must("lora", ours, peer, "median_seconds", 1.0)
            yield Must("lora", ours, peer, "largest_length", 1.3, is_least=True, label="largest length in 24 GiB")
    for way in ("lpmm", "lpmm-release", "lpmm-inputs-release", "half-release"):
        yield Must("full", way, "liger-adamw8bit", "model_bytes", 0.75)
        yield Must("full", way, "liger-adamw8bit", "peak_bytes", 0.78)
        yield Must("full", way, "liger-adamw8bit", "median_seconds", 1.05)
    for way in ("fine_tune", "fine_tune-release"):
        yield Must("full", way, "liger-adamw8bit", "model_bytes", 1.0)
    for ours, peer, bound in (("int4-lpmm", "eager", 0.25), ("compiled-int4-lpmm", "compiled", 0.45)):
        yield Must("gpt2", ours, peer, "peak_bytes", bound)
        yield Must("gpt2", ours, peer, "median_seconds", 1.20)
    for way in ("paredown", "paredown-deferred"):
        yield Must("loss", way, "liger", "peak_bytes", 1.0)
        yield Must("loss", way, "liger", "median_seconds", 1.0)


def verdicts(rows: Rows) -> list[Verdict]:
    """All requirements on steps, predictions of peaks included."""
    found = [must.verdict(rows) for must in musts()]
    for way in ("lpmm", "lpmm-release"):
        row = rows.get(("full-8GiB", way, None), {})
        first, last = row.get("first_loss"), row.get("last_loss")
        falls = None if first is None or last is None else last - first
        found.append(Verdict(f"full: change of the loss of {way} in 8 GiB", "< 0", falls, None if falls is None else falls < 0, ""))
    peak = value(rows, "experts", "paredown-nf4-lpmm", "peak_bytes")
    fits = None if peak is None else peak <= EXPERTS_GIB * GIB
    found.append(Verdict("experts: peak of paredown-nf4-lpmm", f"<= {EXPERTS_GIB} GiB", peak and peak / GIB, fits, " GiB"))
    for (job, way, seed), row in rows.items():
        peak, guess = row.get("peak_bytes"), row.get("predicted_bytes")
        if seed is None and peak and guess:
            error = guess / peak - 1
            found.append(Verdict(f"{job}: predicted peak of {way}", "within 5.0%", error, abs(error) <= MAX_ERROR, "%"))
    return found


def verdict_table(rows: Rows) -> Table:
    """The requirements of the jobs that have rows."""
    jobs = {job.partition("-8")[0] for job, _, _ in rows}
    lines = [verdict.cells for verdict in verdicts(rows) if verdict.text.partition(":")[0].partition("-8")[0] in jobs]
    return Table(("what", "must", "measured", ""), lines, right=(2,))


# --- losses over seeds ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Losses:
    """Validation losses of one way over seeds, and their differences from the baseline of the same seeds."""

    job: str
    way: str
    losses: tuple[float, ...]
    differences: tuple[float, ...]

    @staticmethod
    def mean_and_error(values: Sequence[float]) -> tuple[float, float | None]:
        """The mean, and its standard error if there are two values or more."""
        return statistics.mean(values), statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None

    @property
    def is_within_noise(self) -> bool | None:
        """Whether the mean difference is at most two standard errors; None without an error."""
        mean, error = self.mean_and_error(self.differences)
        return None if error is None else abs(mean) <= 2 * error

    @property
    def cells(self) -> tuple[str, ...]:
        """A line of the table."""
        mean, difference = self.mean_and_error(self.losses), self.mean_and_error(self.differences)
        shown = [
            f"{middle:{sign}.4f} ({'-' if error is None else f'{error:.4f}'})"
            for (middle, error), sign in ((mean, ""), (difference, "+"))
        ]
        noise = {True: "within two standard errors", False: "", None: ""}[self.is_within_noise]
        return self.job, self.way, str(len(self.losses)), *shown, noise if self.way != BASELINES[self.job] else ""


def losses_by_way(rows: Rows) -> list[Losses]:
    """The validation losses of all trainings."""
    found: dict[tuple[str, str], dict[int, float]] = {}
    for (job, way, seed), row in rows.items():
        if seed is not None and row.get("validation_loss") is not None:
            found.setdefault((job, way), {})[seed] = row["validation_loss"]
    made: list[Losses] = []
    for (job, way), by_seed in found.items():
        base = found.get((job, BASELINES[job]), {})
        pairs = [loss - base[seed] for seed, loss in by_seed.items() if seed in base]
        if pairs:
            made.append(Losses(job, way, tuple(by_seed.values()), tuple(pairs)))
    return made


def loss_table(rows: Rows) -> Table:
    """Means over seeds with standard errors, and paired differences from the baseline."""
    head = ("job", "way", "seeds", "validation loss (standard error)", "difference, paired by seed (standard error)", "")
    return Table(head, [losses.cells for losses in losses_by_way(rows)], right=(2, 3, 4))
