"""Measured peaks of trials on a CPU beside their predictions, and what `pick` expects of each plan after trials of the others.

    python benchmarks/bench_cpu_peaks.py                                  # about a minute; rows in results/cpu_peaks.json
    python benchmarks/bench_cpu_peaks.py --task "digits#model=vit,steps=3"

`expected`: the peak of a plan by `pick.pick_loop.expected_peaks`, from the trials of all other plans of the task.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import numpy as np
from measure import RESULTS, machine

import paredown as pare
from paredown.study.pick.candidates import ROLES, features_of
from paredown.study.pick.pick_loop import expected_peaks
from paredown.study.tasks.lookup import find_task
from paredown.study.tasks.task_trace import trace_task

PATH = RESULTS / "cpu_peaks.json"

TASKS = ("digits#model=mlp,steps=3", "digits#model=resnet18,steps=3")
PLANS = {
    "baseline": pare.Plan(),
    **{name: pare.Plan.preset(name) for name in ("activations8", "activations4", "half", "lpmm")},
    "lpmm, 4-bit activations": pare.Plan.preset("lpmm").set("activation", "uint4/64@bf16+bf16"),
}


def rows_of(name: str) -> list[dict[str, Any]]:
    """A trial of each plan, and what the others say of its peak."""
    task, rows, roles = find_task(name), list[dict[str, Any]](), list[Any]()
    for label, plan in PLANS.items():
        trial = pare.evaluate(task, plan, device="cpu")
        assert trial.predicted_peak_bytes is not None and trial.measured_peak_bytes is not None, trial.reason
        rows.append({"task": name, "plan": label, "predicted": trial.predicted_peak_bytes, "measured": trial.measured_peak_bytes})
        roles.append(features_of(plan, trace_task(task, plan, "cpu"))[: len(ROLES)] > 0)
    memory = np.array([float(row["predicted"]) for row in rows])
    for i, row in enumerate(rows):
        others = [(j, other["measured"]) for j, other in enumerate(rows) if j != i]
        row["expected"] = int(expected_peaks(memory, others, np.array(roles))[i])
        ratios = (row["measured"] / row["predicted"], row["measured"] / row["expected"])
        print(
            f"{name:32s} {row['plan']:26s}" + "".join(f"{row[key] / 2**20:10.2f}" for key in ("predicted", "expected", "measured")),
            end="",
        )
        print("   measured / predicted {:.2f}   measured / expected {:.2f}".format(*ratios), flush=True)
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
