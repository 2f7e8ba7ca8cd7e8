"""Memory and update statistics of a run for loggers (`numbers`, `Monitor`), and the base class of integrations (`AppliedPlan`).

    memory/weight_gib, memory/gradient_gib, memory/optimizer_gib    stored from step to step, packed or not
    memory/activation_gib                                           packed between forward and backward; a Monitor reports the maximum
    memory/peak_gib                                                 CUDA only: torch.cuda.max_memory_allocated
    updates/underflow, updates/flips                                packed weights: shares of updates lost, and of values that changed
    guard/actions                                                   number of actions of the guard

>>> import torch
>>> from paredown import Plan, apply, optim
>>> model = torch.nn.Linear(256, 256)
>>> with apply(Plan.preset("lpmm"), model) as session:
...     opt = optim.AdamW(model.parameters())
...     loss = model(torch.randn(8, 256)).square().sum(); loss.backward(); opt.step()
...     values = numbers(session, opt)
>>> {name: round(value * 2**30) for name, value in values.items() if name in ("memory/weight_gib", "memory/optimizer_gib")}
{'memory/weight_gib': 67584, 'memory/optimizer_gib': 137216}
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from paredown.apply_plan import apply
from paredown.autograd.hooks import Hook
from paredown.autograd.module_watch import unwrapped
from paredown.check.verify import verify_step
from paredown.errors import ApplyError
from paredown.optim.base import Optimizer
from paredown.plan.plan import Plan
from paredown.session.open_sessions import any_session_of
from paredown.session.session import Session
from paredown.simulate.simulated_session import SimulatedSession

GIB = 2**30
WEIGHT = "weight."  # prefix of packed weights in an optimizer's state, which are counted as weight


def numbers(session: Session | SimulatedSession | None, optimizer: Any = None) -> dict[str, float]:
    """Return memory and update statistics for loggers, by name; those of a session or an optimizer that is None are left out."""
    optimizer = unwrap_optimizer(optimizer)
    model = session.model if session is not None else None
    parameters = _parameters(model, optimizer)
    packed = session.weight_bytes if isinstance(session, Session) else 0
    values = {
        "memory/weight_gib": packed + sum(p.untyped_storage().nbytes() for p in parameters)
    }  # a packed one has an empty storage
    if isinstance(session, Session):
        values["memory/activation_gib"] = session.stored_bytes
    if optimizer is not None:
        values["memory/gradient_gib"] = sum(_gradient_bytes(p, optimizer) for p in parameters if p.requires_grad)
        state = [item for part in optimizer.state.values() for item in part.items()]
        values["memory/optimizer_gib"] = sum(v.nbytes for name, v in state if isinstance(v, Tensor) and not name.startswith(WEIGHT))
    devices = {p.device for p in parameters if p.device.type == "cuda"}
    if devices:
        values["memory/peak_gib"] = max(torch.cuda.max_memory_allocated(device) for device in devices)
    values = {name: value / GIB for name, value in values.items()}
    values |= _arrivals(optimizer)
    if isinstance(session, Session) and session.budget_bytes is not None:
        values["guard/actions"] = float(len(session.actions))
    return values


class Monitor:
    """Measures the numbers that loggers show, with the maximum bytes of packed activations between two calls of `numbers`."""

    def __init__(self, session: Session | SimulatedSession, model: nn.Module) -> None:
        self.session, self._most = session, 0
        self._handle = model.register_forward_hook(Hook(self._record))  # registered after the session's hooks, which pack

    def numbers(self, optimizer: Any = None) -> dict[str, float]:
        """Return the numbers for loggers at this time; activation memory is the maximum since the previous call of this method."""
        values = numbers(self.session, optimizer)
        if "memory/activation_gib" in values:
            values["memory/activation_gib"] = max(values["memory/activation_gib"], self._most / GIB)
        self._most = 0
        return values

    def forget(self) -> None:
        """Reset the maximum of activation memory and torch's peak statistics, after work that is not part of training."""
        self._most = 0
        model = self.session.model
        for device in {p.device for p in model.parameters() if p.device.type == "cuda"} if model is not None else ():
            torch.cuda.reset_peak_memory_stats(device)

    def close(self) -> None:
        """Remove the hook that measures activation memory."""
        self._handle.remove()

    def _record(self, module: nn.Module, args: Any, output: Any) -> None:
        if isinstance(self.session, Session) and torch.is_grad_enabled():
            self._most = max(self._most, self.session.stored_bytes)


def unwrap_optimizer(optimizer: Any) -> Any:
    """Return the optimizer inside the wrappers of Accelerate and Lightning."""
    while not isinstance(optimizer, Optimizer) and isinstance(getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = optimizer.optimizer
    return optimizer


def _parameters(model: nn.Module | None, optimizer: Any) -> list[Tensor]:
    if model is not None:
        return list(model.parameters())
    return [p for group in optimizer.param_groups for p in group["params"]] if optimizer is not None else []


def _gradient_bytes(parameter: Tensor, optimizer: Any) -> int:
    """Return the bytes that a parameter's gradient takes after backward; 0 if the optimizer releases gradients during backward."""
    entry = optimizer.entry_of(parameter) if isinstance(optimizer, Optimizer) else None
    if entry is not None and entry.gradient is not None:
        return entry.gradient.nbytes
    is_released = isinstance(optimizer, Optimizer) and optimizer.memory.release
    return 0 if is_released else parameter.numel() * parameter.element_size()


def _arrivals(optimizer: Any) -> dict[str, float]:
    """Return the shares of updates lost to rounding and of weights that changed, as means over all packed weights."""
    rows = optimizer.diagnostics() if isinstance(optimizer, Optimizer) else ()
    counted = [(row, row.num_values) for row in rows if row.num_values]
    if not counted:
        return {}
    return {
        "updates/underflow": _mean((row.underflow, count) for row, count in counted),
        "updates/flips": _mean((row.flips, count) for row, count in counted),
    }


def _mean(pairs: Iterable[tuple[float, int]]) -> float:
    pairs = list(pairs)
    return sum(value * count for value, count in pairs) / sum(count for _, count in pairs)


# --- the base class of the integrations ------------------------------------------------------------------------------


class AppliedPlan:
    """Base class of integrations: applies a plan to a model with the `options` of `apply`, and holds session and Monitor."""

    prints_summary = True

    def __init__(self, plan: Plan, **options: Any) -> None:
        if not isinstance(plan, Plan):
            name = type(self).__name__
            raise ApplyError(f"{name} takes a Plan, not {type(plan).__name__}: {name}(Plan.preset('half')).")
        self.plan, self._options = plan, options
        self.session: Session | SimulatedSession | None = None  # the last session, also after it is closed, for its changes
        self._monitor: Monitor | None = None

    @property
    def is_open(self) -> bool:
        """Return whether the plan is applied to a model now; False after the user or another `attach` closes the session."""
        model = self.session.model if self.session is not None and self._monitor is not None else None
        return model is not None and any_session_of(model) is self.session

    def put_on(self, model: nn.Module) -> None:
        """Apply the plan to `model`, and keep the session that `apply` returns."""
        self.go_on_with(apply(self.plan, model, **self._options), unwrapped(model))

    def go_on_with(self, session: Session | SimulatedSession, model: nn.Module) -> None:
        """Use `session`, by which the plan is applied to `model` already, instead of applying it again."""
        self.session, self._monitor = session, Monitor(session, model)

    def verify(self, model: nn.Module, batch: Any, step: Callable[[Any], Tensor]) -> None:
        """Compare gradients of the loss `step(batch)` with the unmodified model's; if they differ, end the session and raise."""
        try:
            verify_step(model, batch, step).check()
        except BaseException:
            self.close()
            raise
        if self._monitor is not None:
            self._monitor.forget()

    def print_summary(self) -> None:
        """Print the summary of the session (the applied plan) if it is open, unless `prints_summary` is False."""
        if self.prints_summary and self.is_open and isinstance(self.session, Session):
            print(f"paredown: {self.session.summary()}", flush=True)

    def close(self) -> None:
        """Close the session (the applied plan), which restores the unmodified model; can be called more than once."""
        if self._monitor is not None:
            self._monitor.close()
        if self.session is not None:
            self.session.close()
        self._monitor = None
