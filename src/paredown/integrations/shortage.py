"""When memory runs out in a run of your own: which role grew, and the next plan down.

    with explained(trace, plan):
        trainer.train()          # an out-of-memory error leaves it as it is, with a note at the end of its traceback

>>> import torch
>>> from paredown import trace_step
>>> model = torch.nn.Sequential(*(part for _ in range(4) for part in (torch.nn.Linear(64, 64), torch.nn.GELU())))
>>> trace = trace_step(model, (torch.empty(2048, 64), torch.empty(2048, 64)), loss=torch.nn.functional.mse_loss, device="cpu")
>>> try:
...     with explained(trace):
...         raise MemoryError("no room")
... except MemoryError as error:
...     print(error.__notes__[0])
paredown: activation grew most, to 4.00 MiB of 6.06 MiB at the predicted peak, in backward. The next plan down is 'activations8', 3.58 MiB.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import torch

from paredown.plan.plan import Plan
from paredown.plan.record import Trace
from paredown.runs.evaluate import is_out_of_memory
from paredown.search.below import Shortage, explain_shortage
from paredown.search.picked import Frontier


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
def explained(trace: Trace, plan: Plan | None = None, *, frontier: Frontier | None = None) -> Generator[None]:
    """A context whose out-of-memory errors say which role grew and which plan is next."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        add_explanation(error, trace, plan or Plan(), frontier=frontier)
        raise
