"""Explanations of out-of-memory errors: which role of tensors grew most, and the next smaller plan.

    with explain_on_out_of_memory(trace, plan):
        trainer.train()          # an out-of-memory error is raised unchanged, with a note at the end of its traceback

>>> import torch
>>> from paredown import trace_step
>>> model = torch.nn.Sequential(*(part for _ in range(4) for part in (torch.nn.Linear(64, 64), torch.nn.GELU())))
>>> trace = trace_step(model, (torch.empty(2048, 64), torch.empty(2048, 64)), loss=torch.nn.functional.mse_loss, device="cpu")
>>> try:
...     with explain_on_out_of_memory(trace):
...         raise MemoryError("out of memory")
... except MemoryError as error:
...     print(error.__notes__[0])
paredown: activation grew most, to 4.00 MiB of 6.06 MiB at the predicted peak, in backward. The next plan down is 'activations8', 3.58 MiB.
At the peak: activation 4.00 MiB, temporary 1.00 MiB, input 1.00 MiB, weight 65.00 KiB.

`attach` of the Hugging Face integration needs no context: `LastCall` has the sizes of the model's last batch, and traces the step once
memory has run out.

Weights, optimizer state, buffers and the batch exist when a step begins; saved activations, gradients and temporaries grow until its
peak. The next plan down is the largest of the candidates (a frontier, or presets) whose predicted peak is at least 5 % smaller.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from paredown.autograd.hooks import Hook
from paredown.formats.catalog import SMALL_LEARNING_RATE
from paredown.plan.footprint import Footprint, footprint, peak_of
from paredown.plan.plan import Plan, combine_presets
from paredown.plan.trace import Trace
from paredown.predict.trace_step import trace_step
from paredown.roles import Role
from paredown.sizes import parse_bytes, say_bytes
from paredown.study.pick.answer import Frontier
from paredown.study.tasks.evaluate import is_out_of_memory

STORED_BEFORE = (
    Role.WEIGHT,
    Role.MASTER,
    Role.RESIDUE,
    Role.MOMENT1,
    Role.MOMENT2,
    Role.BUFFER,
    Role.INPUT,
)  # exist when a step begins
CLEARLY = 0.95  # of the peak; a plan above that is not worth another run
SHARE_AT_PEAK = 0.01  # roles with less of the peak are not named
FRAGMENTED = 0.05  # of the device's memory: as much as that, reserved and not allocated, is worth advice
RESERVED = re.compile(r"([\d.]+ [KMGT]iB) is reserved by PyTorch but unallocated")  # in torch's message
CAPACITY = re.compile(r"total capacity of ([\d.]+ [KMGT]iB)")
ACTIVATIONS, TIERS = ("activations8", "activations4", "activations2"), ("half", "lpmm")
FROZEN = ("frozen8", "frozen4")  # for models with frozen weights
SMALL_RATE_TIERS = ("fine_tune",)  # in place of TIERS at small learning rates, which the weights of those do not follow


@dataclass(frozen=True)
class Shortage:
    """Which role grew most at the peak of a plan, and the next smaller plan; `next_bytes` None: no known plan is smaller."""

    role: Role
    role_bytes: int
    peak_bytes: int
    phase: str
    label: str = ""
    next_bytes: int | None = None
    at_peak: tuple[tuple[Role, int], ...] = ()  # the largest roles of the peak

    def __str__(self) -> str:
        made_of = ", ".join(f"{role.value} {say_bytes(size)}" for role, size in self.at_peak)
        return f"{self._grew()}\nAt the peak: {made_of}." if made_of else self._grew()

    def _grew(self) -> str:
        grew = f"{self.role.value} grew most, to {say_bytes(self.role_bytes)} of {say_bytes(self.peak_bytes)} at the predicted peak"
        if self.next_bytes is None:
            return f"{grew}, {self.phase}. No known plan takes less: reduce the batch size, or use a smaller model."
        return f"{grew}, {self.phase}. The next plan down is {self.label!r}, {say_bytes(self.next_bytes)}."


def explain_shortage(
    trace: Trace,
    plan: Plan,
    *,
    frontier: Frontier | None = None,
    available_bytes: int | None = None,
    learning_rate: float | None = None,
) -> Shortage:
    """The role that grew most under `plan`, and the next smaller plan of a frontier, or of the presets without a frontier.

    `available_bytes`: memory of the device, if known; the next plan has to fit it. `learning_rate`, if known: at a small one, presets
    store weights with a residue.
    """
    foot = footprint(trace, plan)
    limit = min(int(CLEARLY * foot.peak_bytes), available_bytes or foot.peak_bytes)
    sizes = {point.label: point.predicted_bytes for point in frontier.front()} if frontier else _preset_peaks(trace, learning_rate)
    smaller = {label: size for label, size in sizes.items() if size <= limit}
    role = grown_role(foot)
    largest = sorted(foot.at_peak.items(), key=lambda row: -row[1])
    parts = tuple((part, size) for part, size in largest if size >= SHARE_AT_PEAK * foot.peak_bytes)
    shortage = Shortage(role, foot.at_peak.get(role, 0), foot.peak_bytes, _phase(foot), at_peak=parts)
    if not smaller:
        return shortage
    label = max(smaller, key=lambda name: smaller[name])
    return replace(shortage, label=label, next_bytes=smaller[label])


def grown_role(foot: Footprint) -> Role:
    """The role with the most bytes at the peak, among those that do not exist when the step begins."""
    new = {role: size for role, size in foot.at_peak.items() if role not in STORED_BEFORE} or foot.at_peak
    return max(new, key=lambda role: new[role], default=Role.WEIGHT)


def _preset_peaks(trace: Trace, learning_rate: float | None) -> Mapping[str, int]:
    is_frozen = any(slot.is_frozen for slot in trace.of(Role.WEIGHT))
    tiers = SMALL_RATE_TIERS if learning_rate is not None and 0 < learning_rate <= SMALL_LEARNING_RATE else TIERS
    bases = FROZEN if is_frozen else tiers  # adapters are too small to pack
    names = (*ACTIVATIONS, *bases, *(f"{base}+{name}" for base in bases for name in ACTIVATIONS))  # as on the command line
    return {name: peak_of(trace, combine_presets(name.split("+"))) for name in names}


def _phase(foot: Footprint) -> str:
    if foot.peak_tick < foot.trace.backward_at:
        return "in forward"
    return "in backward" if foot.peak_tick < foot.trace.length else "in the optimizer's step"


def explain_out_of_memory(
    error: BaseException,
    trace: Trace,
    plan: Plan | None = None,
    *,
    frontier: Frontier | None = None,
    learning_rate: float | None = None,
) -> Shortage | None:
    """`explain_shortage` for an out-of-memory error; None for any other error."""
    if not isinstance(error, MemoryError | RuntimeError) or not is_out_of_memory(error):
        return None
    available = torch.cuda.mem_get_info()[1] if torch.cuda.is_available() and trace.device == "cuda" else None
    return explain_shortage(trace, plan or Plan(), frontier=frontier, available_bytes=available, learning_rate=learning_rate)


def add_explanation(
    error: BaseException, trace: Trace | None, plan: Plan, *, frontier: Frontier | None = None, learning_rate: float | None = None
) -> None:
    """Add an explanation to the traceback of an out-of-memory error; any other error is left unchanged."""
    shortage = None
    if trace is not None:
        shortage = explain_out_of_memory(error, trace, plan, frontier=frontier, learning_rate=learning_rate)
    if shortage is not None:
        error.add_note(f"paredown: {shortage}")
    advice = allocator_advice(str(error))
    if advice:
        error.add_note(f"paredown: {advice}")


def allocator_advice(message: str) -> str:
    """A sentence if torch's message says that much of the device's memory is reserved and not allocated; "" otherwise.

    >>> allocator_advice("GPU 0 has a total capacity of 24.00 GiB ... and 3.10 GiB is reserved by PyTorch but unallocated.")[:61]
    '3.10 GiB of 24.00 GiB is reserved by torch and not allocated:'
    """
    reserved, capacity = RESERVED.search(message), CAPACITY.search(message)
    if reserved is None or capacity is None or parse_bytes(reserved[1]) < FRAGMENTED * parse_bytes(capacity[1]):
        return ""
    return (
        f"{reserved[1]} of {capacity[1]} is reserved by torch and not allocated: free blocks are too small for the tensor. Set "
        "PYTORCH_ALLOC_CONF=expandable_segments:True (PYTORCH_CUDA_ALLOC_CONF before torch 2.9) before Python starts."
    )


class LastCall:
    """Shapes and dtypes of the arguments of a model's last call with gradients, from which a step is traced if memory runs out.

    `traced_as`: optimizer, device, autocast and chunked_loss of `trace_step`. `learning_rate`: that of the training, if known.
    """

    def __init__(self, model: nn.Module) -> None:
        self.traced_as: dict[str, Any] = {}
        self.learning_rate: float | None = None
        self._model, self._arguments = model, ((), {})
        self._handle = model.register_forward_pre_hook(Hook(self._record), with_kwargs=True)

    def explain(self, error: BaseException, plan: Plan) -> None:
        """Add an explanation to an out-of-memory error, with a trace of the call; any other error is left unchanged."""
        args, named = self._arguments
        if not isinstance(error, MemoryError | RuntimeError) or not is_out_of_memory(error) or not (args or named):
            return
        try:
            trace = trace_step(self._model, named or args, **self.traced_as)
        except Exception as fault:  # such as a step whose loss is computed outside of the model; `error` is what is raised
            error.add_note(f"paredown: the step cannot be traced, so that what the peak was made of is not known: {fault}")
            trace = None
        add_explanation(error, trace, plan, learning_rate=self.learning_rate)

    def close(self) -> None:
        """Remove the hook."""
        self._handle.remove()

    def _record(self, module: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        if torch.is_grad_enabled():
            self._arguments = tree_map_only(Tensor, _without_values, (args, dict(named)))


def _without_values(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


@contextmanager
def explain_on_out_of_memory(trace: Trace, plan: Plan | None = None, *, frontier: Frontier | None = None) -> Generator[None]:
    """A context that adds an explanation to out-of-memory errors: which role grew most, and the next smaller plan."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        add_explanation(error, trace, plan or Plan(), frontier=frontier)
        raise
