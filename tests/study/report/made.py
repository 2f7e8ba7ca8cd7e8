"""Records to test on: one with every part, made of a real trace and made-up errors."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import torch
from torch import nn

from paredown import Plan, Trace, Trial, footprint, trace_step
from paredown.session.changes import Action, Change
from paredown.study.pick.answer import Frontier, Picked, Point
from paredown.study.report.record import Record
from paredown.study.tasks.trial import Status

HOSTILE = "</script><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">'\"&<!--"
LOW = Plan(rules=(*Plan.preset("lpmm").rules, *Plan.preset("activations4").rules))
# label: plan, mean error, its standard deviation, what was measured
ROWS: dict[str, tuple[Plan, float, float, float | None]] = {
    "baseline": (Plan(), 0.020, 0.001, 0.021),
    "activations8": (Plan.preset("activations8"), 0.022, 0.002, 0.022),
    "activations4": (Plan.preset("activations4"), 0.035, 0.004, None),
    "lpmm": (Plan.preset("lpmm"), 0.024, 0.003, 0.024),
    "low": (LOW, 0.031, 0.004, None),
}
FRONT = ("low", "activations8", "baseline")


@lru_cache(maxsize=1)
def trace() -> Trace:
    """Of a small net of five layers."""
    inner = nn.Sequential(*(part for _ in range(3) for part in (nn.Linear(256, 256), nn.GELU())))
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), inner, nn.Linear(256, 10))
    batch = torch.empty(512, 64), torch.empty(512, dtype=torch.int64)
    return trace_step(model, batch, loss=nn.functional.cross_entropy, optimizer="adamw", device="cpu")


def trial(label: str, seed: int = 0, **changes: object) -> Trial:
    """A trial of one of ROWS."""
    plan, _, _, measured = ROWS[label]
    curve = tuple((step, 2.3 / step + 0.1 * seed) for step in range(1, 31))
    peak = footprint(trace(), plan).peak_bytes
    made = Trial("blobs", plan, seed, Status.DONE, error=measured, loss=0.1, predicted_peak_bytes=peak, seconds=1.5, curve=curve)
    made = replace(made, measured_peak_bytes=peak + 4096, device="x86_64 CPU", versions={"torch": "2.13.0"}, commit="abc123")
    return replace(made, **changes)


def picked(task: str = "blobs", share: float = 0.5) -> Picked:
    """A pick of them within a share of the step as it is written."""
    points: list[Point] = []
    for label, (plan, mean, deviation, measured) in ROWS.items():
        nbytes = footprint(trace(), plan).peak_bytes
        is_measured = measured is not None
        source = "measured" if is_measured else "prior"
        size = nbytes + 4096 if is_measured else None
        points.append(Point(label, plan, nbytes, mean, deviation, measured, size, on_front=label in FRONT, source=source))
    full = footprint(trace()).peak_bytes
    frontier = Frontier(tuple(points), "error", full)
    best = frontier.best(int(share * full))
    trials = tuple(trial(label) for label, row in ROWS.items() if row[3] is not None)
    return Picked(
        task,
        best.plan,
        frontier,
        "It has the least error of those that fit.",
        int(share * full),
        full,
        trials=tuple(replace(one, task=task) for one in trials),
        ties=("lpmm",),
        prior="stored",
        label=best.label,
    )


@lru_cache(maxsize=4)
def record(task: str = "blobs", title: str = "") -> Record:
    """A record that has every part."""
    made = Record.of_pick(picked(task), trace=trace(), title=title)
    return replace(
        made,
        actions=(Action(30, "0:input", "int4/64@bf16", "int8/64@bf16", "its error rose"),),
        changes=(Change("2.0:input", "int4/64@bf16", "as it is", "the caller holds it"),),
        given=(
            Change("2.0:input", "int4/64@bf16", "as it is", "the caller holds it"),
            Change("0:input", "int4", "int4", "lowered"),
        ),
        notes=("made for tests",),
    )


def trained() -> Record:
    """Trainings of the baseline and of a plan within a budget, three seeds each, with the memory of a step."""
    errors = {"baseline": (0.020, 0.022, 0.021), "low": (0.023, 0.021, 0.025)}
    plans = {label: ROWS[label][0] for label in errors}
    times = {"baseline": 0.010, "low": 0.016}
    trials = [
        trial(label, seed, error=error, step_seconds=times[label])
        for label, of_label in errors.items()
        for seed, error in enumerate(of_label)
    ]
    made = Record.of_trials("trained", trials, labels=plans)
    study = replace(made.studies[0], budget_bytes=picked().budget_bytes, picked="low", reason="assigned")
    return replace(made, studies=(study,)).with_footprints(trace(), plans)
