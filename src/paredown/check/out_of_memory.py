"""Explains out-of-memory errors: which tensors made up the peak, by role and module, and which plan is the next smaller one.

    with pare.explain_oom(model, optimizer=optimizer):
        for batch in loader: ...        # an out-of-memory error is raised unchanged, with a note at the end of its traceback

>>> import torch
>>> model = torch.nn.Sequential(*(part for _ in range(4) for part in (torch.nn.Linear(64, 64), torch.nn.GELU())))
>>> try:
...     with explain_oom(model, optimizer="adamw"):
...         loss = model(torch.empty(2048, 64)).square().mean()
...         raise MemoryError("out of memory")
... except MemoryError as error:
...     print(error.__notes__[0])
paredown: activation grew most, to 3.50 MiB of 5.69 MiB at the predicted peak, in backward. The next plan down is 'activations8', 3.21 MiB.
At the peak: activation 3.50 MiB, temporary 1.50 MiB, input 512.00 KiB, weight 65.00 KiB, moment1 65.00 KiB, moment2 65.00 KiB.
Most of it is in 7 (temporary) 1.00 MiB, 6 (temporary) 512.00 KiB, 1 (activation) 512.00 KiB.

`LastCall` has the sizes of the model's last batch, and traces the step once memory has run out. `attach` of the Hugging Face integration
and `paredown train` use it, or a trace of their own, without a context.

Weights, optimizer state, buffers and the batch exist when a step begins; saved activations, gradients and temporaries grow until its
peak. The next plan down is the largest of the candidates (a frontier, or presets) whose predicted peak is at least 5 % smaller.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from paredown.autograd.graph import tensors_in
from paredown.autograd.hooks import Hook
from paredown.autograd.module_watch import unwrapped
from paredown.errors import TraceError
from paredown.formats.catalog import SMALL_LEARNING_RATE
from paredown.plan.footprint import Footprint, footprint, peak_of
from paredown.plan.plan import Plan, combine_presets
from paredown.plan.trace import Trace
from paredown.predict.trace_step import trace_step
from paredown.roles import Role
from paredown.session.open_sessions import any_session_of
from paredown.sizes import parse_bytes, say_bytes

# roles of tensors that exist when a step begins
STORED_BEFORE = (Role.WEIGHT, Role.MASTER, Role.RESIDUE, Role.MOMENT1, Role.MOMENT2, Role.BUFFER, Role.INPUT)
CLEARLY = 0.95  # of the peak; a plan above that is not worth another run
SHARE_AT_PEAK = 0.01  # roles with a smaller share of the peak are not named
FRAGMENTED = 0.05  # of the device's memory: as much as that, reserved and not allocated, is worth advice
RESERVED = re.compile(r"([\d.]+ [KMGT]iB) is reserved by PyTorch but unallocated")  # in torch's message
OUT_OF_MEMORY_TEXTS = ("DefaultCPUAllocator", "out of memory", "STATUS_ALLOC_FAILED")  # in messages of RuntimeErrors of libraries
SHOWN_PLACES = 3
NOT_COUNTED = "The loss is computed outside of the model, and what it stores is not counted. trace_step(..., loss=...) counts it."
CAPACITY = re.compile(r"total capacity of ([\d.]+ [KMGT]iB)")
ACTIVATIONS, TIERS = ("activations8", "activations4", "activations2"), ("half", "lpmm")
FROZEN = ("frozen8", "frozen4")  # for models with frozen weights
SMALL_RATE_TIERS = ("fine_tune",)  # in place of TIERS at small learning rates, whose updates are too small for the weights of TIERS


def explain_shortage(
    trace: Trace,
    plan: Plan,
    *,
    candidates: Mapping[str, int] | None = None,
    available_bytes: int | None = None,
    learning_rate: float | None = None,
) -> str:
    """Return a text that says what takes the most memory at the peak of `plan`, and which plan to try next.

    `candidates` maps names of plans to their predicted peaks in bytes, by default those of the presets; the next plan is the largest of
    clearly smaller peak. `available_bytes` is the memory of the device, if known, into which it must fit. At a small `learning_rate`, if
    known, presets store weights with a residue (extra bits).
    """
    foot = footprint(trace, plan)
    limit = min(int(CLEARLY * foot.peak_bytes), available_bytes or foot.peak_bytes)
    sizes = _preset_peaks(trace, learning_rate) if candidates is None else candidates
    smaller = {label: size for label, size in sizes.items() if size <= limit}
    next_down = "No known plan takes less: reduce the batch size, or use a smaller model."
    if smaller:
        label = max(smaller, key=lambda name: smaller[name])
        next_down = f"The next plan down is {label!r}, {say_bytes(smaller[label])}."
    new = {role: size for role, size in foot.at_peak.items() if role not in STORED_BEFORE} or foot.at_peak
    role = max(new, key=lambda role: new[role], default=Role.WEIGHT)  # of those whose tensors are created during the step
    grew = (
        f"{role.value} grew most, to {say_bytes(foot.at_peak.get(role, 0))} of {say_bytes(foot.peak_bytes)} at the predicted peak"
    )
    largest = sorted(foot.at_peak.items(), key=lambda row: -row[1])
    roles = ", ".join(f"{role.value} {say_bytes(size)}" for role, size in largest if size >= SHARE_AT_PEAK * foot.peak_bytes)
    named = ((module, part, size) for (module, part), size in foot.places_at_peak().items() if module)
    places = ", ".join(f"{module} ({part.value}) {say_bytes(size)}" for module, part, size in islice(named, SHOWN_PLACES))
    lines = [f"{grew}, {_phase(foot)}. {next_down}", f"At the peak: {roles}." if roles else ""]
    return "\n".join(filter(None, [*lines, f"Most of it is in {places}." if places else ""]))


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


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an exception means that memory was exhausted."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or any(text in str(error) for text in OUT_OF_MEMORY_TEXTS)


def add_explanation(error: BaseException, trace: Trace | None, plan: Plan, *, learning_rate: float | None = None) -> None:
    """Add to the traceback of `error` what made up the peak of the step, if the error says that memory ran out.

    `trace` and `plan` are those of the step; if `trace` is None, only advice about the allocator is added.
    """
    if not is_out_of_memory(error):
        return
    if trace is not None:
        available = torch.cuda.mem_get_info()[1] if torch.cuda.is_available() and trace.device == "cuda" else None
        error.add_note(f"paredown: {explain_shortage(trace, plan, available_bytes=available, learning_rate=learning_rate)}")
    advice = allocator_advice(str(error))
    if advice:
        error.add_note(f"paredown: {advice}")


def allocator_advice(message: str) -> str:
    """Return advice if torch's error message says that much memory is reserved but not allocated; "" otherwise.

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
    """Remembers the shapes of a model's last call with gradients, so that the step can be explained if memory runs out.

    `traced_as` are arguments of `trace_step`; device and autocast are those of the call unless given there. `learning_rate` is that of the
    training, if known.
    """

    def __init__(self, model: nn.Module, **traced_as: Any) -> None:
        self.traced_as = traced_as
        self.learning_rate: float | None = None
        self._model, self._arguments, self._context = model, ((), {}), dict[str, Any]()
        self._handle = model.register_forward_pre_hook(Hook(self._record), with_kwargs=True)

    def explain(self, error: BaseException, plan: Plan) -> None:
        """Trace the step of the last call, and add an explanation to `error` if memory ran out."""
        args, named = self._arguments
        if not is_out_of_memory(error):
            return
        if not (args or named):
            error.add_note(
                "paredown: the model was not called with gradients before memory ran out, so that its step is not known."
            )
            return
        try:
            arguments: dict[str, Any] = {**self._context, **self.traced_as}
            trace = trace_step(self._model, *self._batch(args, named), **arguments)
        except Exception as fault:  # such as a step whose loss is computed outside of the model; `error` is what is raised
            error.add_note(f"paredown: the step cannot be traced, so that what the peak was made of is not known: {fault}")
            trace = None
        add_explanation(error, trace, plan, learning_rate=self.learning_rate)

    def close(self) -> None:
        """Remove the hook that records calls."""
        self._handle.remove()

    def _batch(self, args: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any]:
        if named:
            return (dict(inspect.signature(self._model.forward).bind(*args, **named).arguments) if args else named,)
        return ((*args, None) if "loss" in self.traced_as else args,)

    def _record(self, module: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        if not torch.is_grad_enabled():
            return
        to_shape = lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")  # noqa: E731
        self._arguments = tree_map_only(Tensor, to_shape, (args, dict(named)))
        device = next((p.device.type for p in module.parameters()), "cpu")
        is_cast = torch.is_autocast_enabled(device)
        self._context = {"device": device, "autocast": torch.get_autocast_dtype(device) if is_cast else None}


@contextmanager
def explain_oom(model: nn.Module, *, optimizer: Any = None, learning_rate: float | None = None) -> Generator[None]:
    """Return a context that explains out-of-memory errors: which tensors made up the peak, and which plan needs less.

    The step is traced again from the shapes of the model's last call, under the plan of the model's open session. `optimizer` is a name or
    an instance, as for `trace_step`. If the model does not return its loss, the mean of its outputs is used, which stores nothing, and the
    note says that the loss is not counted.
    """
    call = LastCall(unwrapped(model), optimizer=optimizer, loss=LossOf())
    call.learning_rate = learning_rate
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        session = any_session_of(unwrapped(model))
        call.explain(error, session.plan if session is not None else Plan())
        if call.traced_as["loss"].is_missing:
            error.add_note(f"paredown: {NOT_COUNTED}")
        raise
    finally:
        call.close()


class LossOf:
    """A loss function for `trace_step` that needs no target: it returns the loss that the model returned.

    If the model returned none, it is the sum of the means of all outputs, which only serves to run backward.
    """

    is_missing = False  # whether a model returned none

    def __call__(self, output: Any, *_: Any) -> Tensor:
        """Return the loss in `output`, or the sum of the means of all its tensors that require a gradient."""
        loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
        if isinstance(loss, Tensor):
            return loss
        self.is_missing = True
        means = [tensor.mean() for tensor in tensors_in(output) if tensor.requires_grad and tensor.is_floating_point()]
        if not means:
            raise TraceError("the model returned no tensor that requires a gradient. Call it as the training loop does.")
        return torch.stack(means).sum()
