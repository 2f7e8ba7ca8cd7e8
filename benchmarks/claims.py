"""What the three papers claim, and what our results say of it: `python benchmarks/claims.py` writes the table of docs/papers.md anew.

It is made of results/*.json alone. A difference is paired by seed, and its standard error is over seeds. A claim of equal accuracy is
"shown" where the difference is within two standard errors and these are small, "short" where the trainings are too few or too short to
tell, "not shown" where the difference is clear.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
PAGE = Path(__file__).parent.parent / "docs" / "papers.md"
MARKS = re.compile(r"(<!-- table claims -->\n).*?(<!-- end -->)", re.DOTALL)
Row = dict[str, Any]
HEAD = ("paper", "claim", "our evidence", "file, commit", "verdict")
CLEAR = 2.0  # standard errors
PROMOTING = ("r0.3", "r0.5", "r0.7", "r0.9", "r1.0")  # ways of train_assign.py
SMALL = 0.0015  # of accuracy: the standard error that a training of full length should have


@dataclass(frozen=True)
class Difference:
    """A paired difference of accuracies, of `num` seeds."""

    mean: float
    error: float
    num: int

    @property
    def is_noise(self) -> bool:
        """Whether it is within two standard errors of zero."""
        return abs(self.mean) <= CLEAR * self.error

    def __str__(self) -> str:
        return f"{100 * self.mean:+.2f} ({100 * self.error:.2f})"


def rows_of(name: str) -> list[Row]:
    """All trained rows of a results file, each with its commit."""
    runs = json.loads((RESULTS / f"{name}.json").read_text())
    return [{**row, "commit": run["commit"]} for run in runs for row in run.get("rows", ()) if row.get("status", "done") == "done"]


def difference(rows: Iterable[Row], way: str, base: str = "fp32", **fields: Any) -> Difference:
    """The accuracy of `way` less that of `base`, in the rows that have `fields`."""
    chosen = [row for row in rows if all(row[name] == value for name, value in fields.items())]
    by_way = {name: {row["seed"]: row["value"] for row in chosen if row["way"] == name} for name in (way, base)}
    pairs = [value - by_way[base][seed] for seed, value in by_way[way].items() if seed in by_way[base]]
    return Difference(statistics.mean(pairs), statistics.stdev(pairs) / len(pairs) ** 0.5, len(pairs))


def commits(rows: Iterable[Row]) -> str:
    """The commits of rows."""
    return ", ".join(dict.fromkeys(row["commit"] for row in rows))


def lpmm() -> list[tuple[str, ...]]:
    """The claims of LPMM: model memory, accuracy, underflow."""
    optim = [row for row in rows_of("optim") if row["job"] == "355M" and row["way"] == "SGDM paredown lpmm"]
    nbytes, commit = optim[-1]["bytes_per_parameter"], optim[-1]["commit"]
    rows = rows_of("train_lpmm")
    fashion, cifar = (difference(rows, "lpmm", task=task, num_passes=passes) for task, passes in
                      (("mlp on Fashion-MNIST", 1876), ("resnet18 on CIFAR-10", 1800)))  # fmt: skip
    nearest = [difference(rows, "lpmm-nearest", task=f"{net} on Fashion-MNIST") for net in ("mlp", "mlp K=1", "cnn")]
    few = difference(rows, "lpmm-nearest", task="mlp K=8 on Fashion-MNIST")
    is_exact = all(one.is_noise and one.error <= SMALL for one in (fashion, cifar))
    loses = not any(one.is_noise for one in nearest) and abs(few.mean) < abs(nearest[1].mean)
    where = "`benchmarks/results/train_lpmm.json`"
    return [
        ("LPMM", "over 70 % less model memory with SGDM", f"{nbytes:.2f} of 12 bytes a parameter, {1 - nbytes / 12:.0%} less",
         f"`benchmarks/results/optim.json`, {commit}", "shown" if nbytes < 0.3 * 12 else "not shown"),
        ("LPMM", "negligible loss of accuracy", f"points beside float32: Fashion-MNIST {fashion}, CIFAR-10 ResNet-18 {cifar}",
         f"{where}, {commits(rows)}", "shown" if is_exact else "short: 1,800 steps on 7,000 pictures"),
        ("LPMM", "stochastic rounding and microbatching overcome underflow",
         f"to nearest {min(one.mean for one in nearest) * 100:.1f} to {max(one.mean for one in nearest) * 100:.1f} points, "
         f"{few} with 8 microbatches", f"{where}, {commits(rows)}", "shown, in short trainings" if loses else "not shown"),
    ]  # fmt: skip


def assignments() -> list[tuple[str, ...]]:
    """The claims of mixed-precision assignments: memory at equal accuracy, divergence, tasks."""
    rows = rows_of("train_assign")
    networks = list(dict.fromkeys(row["task"] for row in rows))
    evidence = {name: at_equal_accuracy([row for row in rows if row["task"] == name]) for name in networks}
    promoting = [name for name in networks if evidence[name][2]]
    has_parity = [name for name in networks if evidence[name][1].is_noise]
    shown = "; ".join(f"{name} {saving:.2f}x, {one}{f' with {num:.0f} tensors promoted' if num else ', nothing overflowed'}"
                      for name, (saving, one, num) in evidence.items())  # fmt: skip
    is_shown = promoting and len(has_parity) == len(networks)
    verdict = "shown, in short trainings" if is_shown else f"in part: {'; '.join(has_parity)}" if has_parity else "not shown"
    where = f"`benchmarks/results/train_assign.json`, {commits(rows)}"
    all_runs = [
        row for run in json.loads((RESULTS / "train_assign.json").read_text()) for row in run["rows"] if row["seed"] is not None
    ]
    diverged = [row for row in all_runs if row["status"] == "diverged"]
    where_diverged = list(dict.fromkeys((row["task"], row["way"]) for row in diverged))
    others = "; ".join(
        f"{task}: {difference(rows, 'operator', task=task)} by operator, {difference(rows, 'amp', task=task)} by torch.autocast's lists, "
        f"{difference(rows, 'r1.0', task=task)} all low with promotion"
        for task in promoting
    )
    ours = sum(row["way"] in PROMOTING for row in diverged)
    said = ", ".join(f"{way} on {task} with {sum((row['task'], row['way']) == (task, way) for row in diverged)} seeds"
                     for task, way in where_diverged)  # fmt: skip
    by_operator = any(way in ("operator", "amp") for _, way in where_diverged)
    on_100 = [name for name in networks if any(row.get("data") == "cifar100" for row in rows if row["task"] == name)]
    name = "assignments"
    return [
        (name, "over 2x less memory at equal accuracy", f"less than float32, points with promotion: {shown}", where, verdict),
        (name, "avoids divergence where others diverge", f"{len(diverged)} of {len(all_runs)} trainings diverged: {said or 'none'}; "
         f"with promotion {ours}. Points: {others}", where,
         "not shown" if ours or not diverged else "shown" if by_operator else "in part: all low diverges, others only lose"),
        (name, "CIFAR-100 and larger networks", f"{len(networks)} tasks of small networks, {len(on_100)} of them on CIFAR-100", where,
         "in part" if on_100 else "not tried"),
    ]  # fmt: skip


def at_equal_accuracy(rows: list[Row]) -> tuple[float, Difference, float]:
    """Of one network with promotion: memory saved, points beside float32, and tensors promoted.

    Of ways in which tensors were promoted it is the one of lowest memory whose accuracy is equal, or of all if none is. Where no tensor
    was promoted, `r0.3` and `r0.3-fixed` are two runs of one way, whose mean counts.
    """
    memory = {row["way"]: row["memory"] for row in rows}
    promoted = {row["way"] for row in rows if row["way"] in PROMOTING and row["num_promoted"]}
    if promoted:
        found = {way: difference(rows, way) for way in promoted}
        way = min(promoted, key=lambda way: (not found[way].is_noise, memory[way]))
        return memory["fp32"] / memory[way], found[way], statistics.mean(row["num_promoted"] for row in rows if row["way"] == way)
    twice = [[row["value"] for row in rows if row["way"] in ("r0.3", "r0.3-fixed") and row["seed"] == seed]
             for seed in sorted({row["seed"] for row in rows})]  # fmt: skip
    means = [{"way": "both", "seed": seed, "value": statistics.mean(values)} for seed, values in enumerate(twice)]
    return memory["fp32"] / memory["r0.3"], difference([*rows, *means], "both"), 0.0


def peppp() -> list[tuple[str, ...]]:
    """The claim of PEPPP: its experiment design beside the other pickers."""
    runs = json.loads((RESULTS / "peppp.json").read_text())
    run = next(run for run in reversed(runs) if {"V", "VI"} <= {row["setting"] for row in run.get("rows", ())})
    found = {(row["setting"], row["picker"], row["measurements"]): row for row in run["rows"] if not row["is_released"]}
    others = ("BO-MF", "BO-full", "random-MF")
    settings = list(dict.fromkeys(setting for setting, picker, _ in found if picker in others and " " not in setting))
    scores = ("convergence", "hypervolume")
    wins = {
        setting: sum(
            found[setting, "ED-MF", num][score][0] < found[setting, other, num][score][0]
            for setting_, other, num in found
            if setting_ == setting and other in others and (setting, "ED-MF", num) in found
            for score in scores
        )
        for setting in settings
    }
    cases = {
        setting: len(scores)
        * sum(one == setting and other in others and (setting, "ED-MF", num) in found for one, other, num in found)
        for setting in settings
    }
    told = ", ".join(f"{setting} {wins[setting]} of {cases[setting]}" for setting in settings)
    missing = [setting for setting in ("I", "II", "III", "IV", "V", "VI") if setting not in settings]
    verdict = ("shown" if all(wins[s] > 0.9 * cases[s] for s in settings) else "mostly") + (
        f"; no rows of {missing}" if missing else ""
    )
    evidence = f"better in convergence and hypervolume, of all comparisons: {told}"
    return [
        (
            "PEPPP",
            "ED-MF is better than BO-MF, BO-full and random-MF",
            evidence,
            f"`benchmarks/results/peppp.json`, {run['commit']}",
            verdict,
        )
    ]


def claims() -> str:
    """The table in Markdown."""
    lines = (HEAD, ("---",) * len(HEAD), *lpmm(), *assignments(), *peppp())
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def filled(page: str) -> str:
    """The page with the table as the results have it now."""
    return MARKS.sub(lambda mark: f"{mark[1]}{claims()}{mark[2]}", page)


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text()))
