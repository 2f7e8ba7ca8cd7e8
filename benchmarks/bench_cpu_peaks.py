"""Measured peaks of trials on a CPU beside their predictions.

python benchmarks/bench_cpu_peaks.py                                  # some minutes; rows in results/cpu_peaks.json
python benchmarks/bench_cpu_peaks.py --task "digits#model=vit,steps=3"
"""

from __future__ import annotations

import argparse
import json
from itertools import pairwise
from typing import Any

import torch
from measure import RESULTS, machine
from torch import nn

import paredown as pare
from paredown.study.tasks.data import Examples
from paredown.study.tasks.lookup import find_task
from paredown.study.tasks.task import Task

PATH = RESULTS / "cpu_peaks.json"

PICTURES = "five convolutions, 32 x 3 x 64 x 64"  # whose operands oneDNN copies into formats of its own
TASKS = ("digits#model=mlp,steps=3", "digits#model=resnet18,steps=3", "digits#model=resnet18,steps=2,batch=1024", PICTURES)
PLANS = {
    "baseline": pare.Plan(),
    **{name: pare.Plan.preset(name) for name in ("activations8", "activations4", "half", "lpmm")},
    "lpmm, 4-bit activations": pare.Plan.preset("lpmm").set("activation", "uint4/64@bf16+bf16"),
}


def convolutions(seed: int) -> nn.Module:
    """A network of 260 MiB."""
    sizes = (3, 48, 48, 48, 48)
    layers = [[nn.Conv2d(m, n, 3, padding=1), nn.BatchNorm2d(n), nn.ReLU()] for m, n in pairwise(sizes)]
    last = nn.MaxPool2d(2), nn.Conv2d(48, 96, 3, padding=1), nn.BatchNorm2d(96), nn.GELU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    return nn.Sequential(*(layer for group in layers for layer in group), *last, nn.Linear(96, 10))


def pictures() -> Task:
    """`PICTURES`, of random values."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(96, 3, 64, 64, generator=generator), torch.randint(10, (96,), generator=generator)
    return Task(PICTURES, convolutions, Examples(x, y, x[:32], y[:32]), steps=2, batch=32)


def rows_of(name: str) -> list[dict[str, Any]]:
    """A trial of each plan."""
    task, rows = pictures() if name == PICTURES else find_task(name), list[dict[str, Any]]()
    for label, plan in PLANS.items():
        trial = pare.evaluate(task, plan, device="cpu")
        predicted, measured = trial.predicted_peak_bytes, trial.measured_peak_bytes
        assert predicted is not None and measured is not None, trial.reason
        rows.append({"task": name, "plan": label, "predicted": predicted, "measured": measured})
        sizes = f"{predicted / 2**20:10.2f}{measured / 2**20:10.2f}   measured / predicted {measured / predicted:.2f}"
        print(f"{name:42s} {label:26s}{sizes}", flush=True)
    return rows


def main() -> None:
    """Print the rows in MiB, and append them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--task", nargs="+", default=TASKS)
    rows = [row for name in parser.parse_args().task for row in rows_of(name)]
    runs = json.loads(PATH.read_text()) if PATH.exists() else []
    PATH.write_text(json.dumps([*runs, machine("cpu", ("torch", "numba")) | {"rows": rows}], indent=1) + "\n")


if __name__ == "__main__":
    main()
