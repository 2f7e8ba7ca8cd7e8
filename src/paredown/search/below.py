"""When memory runs out: which role grew, and the next plan down.

What a step begins with is kept from step to step (weights, optimizer state, buffers, the batch); what it takes beside that until its peak
has grown: saved activations, gradients, temporaries. The next plan down is the largest among candidates that takes clearly less.

>>> import torch
>>> from paredown.plan.trace import trace_step
>>> layers = (part for _ in range(4) for part in (torch.nn.Linear(64, 64), torch.nn.GELU()))
>>> batch = torch.empty(2048, 64), torch.empty(2048, 64)
>>> trace = trace_step(torch.nn.Sequential(*layers), batch, loss=torch.nn.functional.mse_loss, device="cpu")
>>> print(explain_shortage(trace, Plan()))
activation grew most, to 4.00 MiB of 6.06 MiB at the predicted peak, in backward. The next plan down is 'activations8', 3.58 MiB.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from paredown.plan.footprint import Footprint, footprint, peak_of
from paredown.plan.plan import Plan
from paredown.plan.record import Trace
from paredown.plan.sizes import say_bytes
from paredown.roles import Role
from paredown.search.picked import Frontier

KEPT = (Role.WEIGHT, Role.MASTER, Role.RESIDUE, Role.MOMENT1, Role.MOMENT2, Role.BUFFER, Role.INPUT)
CLEARLY = 0.95  # of the peak: less than that is worth another try
ACTIVATIONS, TIERS = ("activations8", "activations4", "activations2"), ("half", "lpmm")
NAMES = (*ACTIVATIONS, *TIERS, *(f"{tier}+{name}" for tier in TIERS for name in ACTIVATIONS))  # as the command line takes them


@dataclass(frozen=True)
class Shortage:
    """Why a plan had no memory, and what to take instead; no label: no plan that is known takes less."""

    role: Role
    role_bytes: int
    peak_bytes: int
    phase: str
    label: str = ""
    next_bytes: int | None = None

    def __str__(self) -> str:
        grew = f"{self.role.value} grew most, to {say_bytes(self.role_bytes)} of {say_bytes(self.peak_bytes)} at the predicted peak"
        if self.next_bytes is None:
            return f"{grew}, {self.phase}. No plan that is known takes less: lower the batch, or take a smaller model."
        return f"{grew}, {self.phase}. The next plan down is {self.label!r}, {say_bytes(self.next_bytes)}."


def explain_shortage(trace: Trace, plan: Plan, *, frontier: Frontier | None = None, available_bytes: int | None = None) -> Shortage:
    """What grew under `plan`, and the next plan down a frontier, or among presets where there is none.

    `available_bytes`: what the device has, where that is known.
    """
    foot = footprint(trace, plan)
    limit = min(int(CLEARLY * foot.peak_bytes), available_bytes or foot.peak_bytes)
    sizes = {point.label: point.predicted_bytes for point in frontier.front()} if frontier else _preset_peaks(trace)
    below = {label: size for label, size in sizes.items() if size <= limit}
    role = grown(foot)
    told = Shortage(role, foot.at_peak.get(role, 0), foot.peak_bytes, _phase(foot))
    if not below:
        return told
    label = max(below, key=lambda name: below[name])
    return Shortage(told.role, told.role_bytes, told.peak_bytes, told.phase, label, below[label])


def grown(foot: Footprint) -> Role:
    """The role that takes most at the peak of what was not there when the step began."""
    new = {role: size for role, size in foot.at_peak.items() if role not in KEPT} or foot.at_peak
    return max(new, key=lambda role: new[role], default=Role.WEIGHT)


def combined(names: Iterable[str]) -> Plan:
    """Presets of different roles as one plan.

    >>> [key for key, _ in combined(("half", "activations8")).rules]
    ['weight', 'gradient', 'moment1', 'moment2', 'activation']
    """
    plans = [Plan.preset(name) for name in names]
    return Plan(tuple(rule for plan in plans for rule in plan.rules), "; ".join(plan.reason for plan in plans))


def _preset_peaks(trace: Trace) -> Mapping[str, int]:
    return {name: peak_of(trace, combined(name.split("+"))) for name in NAMES}


def _phase(foot: Footprint) -> str:
    if foot.peak_tick < foot.trace.backward_at:
        return "in forward"
    return "in backward" if foot.peak_tick < foot.trace.length else "in the optimizer's step"
