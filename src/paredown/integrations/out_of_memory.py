"""When memory runs out in a run of your own: which role grew, and the next plan down.

    with explained(trace, plan):
        trainer.train()          # an out-of-memory error leaves it as it is, with a note at the end of its traceback

>>> import torch
>>> from paredown import trace_step
>>> model = torch.nn.Sequential(*(part for _ in range(4) for part in (torch.nn.Linear(64, 64), torch.nn.GELU())))
>>> trace = trace_step(model, (torch.empty(2048, 64), torch.empty(2048, 64)), loss=torch.nn.functional.mse_loss, device="cpu")
>>> try:
...     with explain_on_out_of_memory(trace):
...         raise MemoryError("no room")
... except MemoryError as error:
...     print(error.__notes__[0])
paredown: activation grew most, to 4.00 MiB of 6.06 MiB at the predicted peak, in backward. The next plan down is 'activations8', 3.58 MiB.

When memory runs out: which role grew, and the next plan down.

What a step begins with is kept from step to step (weights, optimizer state, buffers, the batch); what it takes beside that until its peak
has grown: saved activations, gradients, temporaries. The next plan down is the largest among candidates that takes clearly less.

>>> import torch
>>> from paredown.trace.trace_step import trace_step
>>> layers = (part for _ in range(4) for part in (torch.nn.Linear(64, 64), torch.nn.GELU()))
>>> batch = torch.empty(2048, 64), torch.empty(2048, 64)
>>> trace = trace_step(torch.nn.Sequential(*layers), batch, loss=torch.nn.functional.mse_loss, device="cpu")
>>> print(explain_shortage(trace, Plan()))
activation grew most, to 4.00 MiB of 6.06 MiB at the predicted peak, in backward. The next plan down is 'activations8', 3.58 MiB.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from paredown.pick.answer import Frontier
from paredown.plan.footprint import Footprint, footprint, peak_of
from paredown.plan.plan import Plan, combine_presets
from paredown.roles import Role
from paredown.sizes import say_bytes
from paredown.tasks.evaluate import is_out_of_memory
from paredown.trace.trace import Trace

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
    role = grown_role(foot)
    told = Shortage(role, foot.at_peak.get(role, 0), foot.peak_bytes, _phase(foot))
    if not below:
        return told
    label = max(below, key=lambda name: below[name])
    return Shortage(told.role, told.role_bytes, told.peak_bytes, told.phase, label, below[label])


def grown_role(foot: Footprint) -> Role:
    """The role that takes most at the peak of what was not there when the step began."""
    new = {role: size for role, size in foot.at_peak.items() if role not in KEPT} or foot.at_peak
    return max(new, key=lambda role: new[role], default=Role.WEIGHT)


def _preset_peaks(trace: Trace) -> Mapping[str, int]:
    return {name: peak_of(trace, combine_presets(name.split("+"))) for name in NAMES}


def _phase(foot: Footprint) -> str:
    if foot.peak_tick < foot.trace.backward_at:
        return "in forward"
    return "in backward" if foot.peak_tick < foot.trace.length else "in the optimizer's step"


# --- When memory runs out in a run of your own ---


def explain_out_of_memory(
    error: BaseException, trace: Trace, plan: Plan | None = None, *, frontier: Frontier | None = None
) -> Shortage | None:
    """Which role grew under `plan`, and the next plan down a frontier, or among presets; None where `error` is another one."""
    if not isinstance(error, MemoryError | RuntimeError) or not is_out_of_memory(error):
        return None
    available = torch.cuda.mem_get_info()[1] if torch.cuda.is_available() and trace.device == "cuda" else None
    return explain_shortage(trace, plan or Plan(), frontier=frontier, available_bytes=available)


def add_explanation(error: BaseException, trace: Trace | None, plan: Plan, *, frontier: Frontier | None = None) -> None:
    """A note at the end of the traceback of an out-of-memory error; any other error stays as it is."""
    told = explain_out_of_memory(error, trace, plan, frontier=frontier) if trace is not None else None
    if told is not None:
        error.add_note(f"paredown: {told}")


@contextmanager
def explain_on_out_of_memory(trace: Trace, plan: Plan | None = None, *, frontier: Frontier | None = None) -> Generator[None]:
    """A context whose out-of-memory errors say which role grew and which plan is next."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        add_explanation(error, trace, plan or Plan(), frontier=frontier)
        raise
