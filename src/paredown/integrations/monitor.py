"""The few numbers of a run that matter, by the names that loggers show: bytes by role, whether updates arrive, what a guard did.

    memory/weight_gib, memory/gradient_gib, memory/optimizer_gib    kept from step to step, packed and plain
    memory/activation_gib                                           packed between forward and backward; a Monitor keeps the largest
    memory/peak_gib                                                 on CUDA alone: the most that torch's allocator held
    updates/underflow, updates/flips                                of packed weights: changes that were lost, values that moved
    guard/actions                                                   how often the guard did something

>>> import torch
>>> from paredown import Plan, apply, optim
>>> model = torch.nn.Linear(256, 256)
>>> with apply(Plan.preset("lpmm"), model) as session:
...     opt = optim.AdamW(model.parameters())
...     loss = model(torch.randn(8, 256)).square().sum(); loss.backward(); opt.step()
...     found = numbers(session, opt)
>>> {name: round(value * 2**30) for name, value in found.items() if name in ("memory/weight_gib", "memory/optimizer_gib")}
{'memory/weight_gib': 67584, 'memory/optimizer_gib': 137216}

What the callbacks of all libraries share: a plan, its session while it is at work, and the numbers of that.
"""


# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from paredown.errors import ApplyError
from paredown.optim.base import Optimizer
from paredown.plan.plan import Plan
from paredown.session.session import Session, apply, unwrapped
from paredown.session.verify import verify_step
from paredown.simulate.simulated_session import SimulatedSession

GIB = 2**30
WEIGHT = "weight."  # what a state_dict() has put beside the state: counted as weight


def numbers(session: Session | SimulatedSession | None, optimizer: Any = None) -> dict[str, float]:
    """What is known now; `optimizer` may be wrapped, or torch's own."""
    optimizer = unwrap_optimizer(optimizer)
    model = session._model() if session is not None else None
    parameters = _parameters(model, optimizer)
    packed = session.weight_bytes if isinstance(session, Session) else 0
    found = {"memory/weight_gib": packed + sum(_plain_bytes(p) for p in parameters)}
    if isinstance(session, Session):
        found["memory/activation_gib"] = session.stored_bytes
    if optimizer is not None:
        found["memory/gradient_gib"] = sum(_gradient_bytes(p, optimizer) for p in parameters if p.requires_grad)
        found["memory/optimizer_gib"] = sum(map(_state_bytes, optimizer.state.values()))
    devices = {p.device for p in parameters if p.device.type == "cuda"}
    if devices:
        found["memory/peak_gib"] = max(torch.cuda.max_memory_allocated(device) for device in devices)
    found = {name: value / GIB for name, value in found.items()}
    found |= _arrivals(optimizer)
    if isinstance(session, Session) and session.budget_bytes is not None:
        found["guard/actions"] = float(len(session.actions))
    return found


class Monitor:
    """`numbers` of a run, with the most that waited between a forward and its backward pass since it was asked last."""

    def __init__(self, session: Session | SimulatedSession, model: nn.Module) -> None:
        self.session, self._most = session, 0
        self._handle = model.register_forward_hook(self._look)  # after those of the session, which pack

    def numbers(self, optimizer: Any = None) -> dict[str, float]:
        """What is known now."""
        found = numbers(self.session, optimizer)
        if "memory/activation_gib" in found:
            found["memory/activation_gib"] = max(found["memory/activation_gib"], self._most / GIB)
        self._most = 0
        return found

    def forget(self) -> None:
        """Peaks count from now on: what was before is no part of the run."""
        self._most = 0
        model = self.session._model()
        for device in {p.device for p in model.parameters() if p.device.type == "cuda"} if model is not None else ():
            torch.cuda.reset_peak_memory_stats(device)

    def close(self) -> None:
        """Look no more."""
        self._handle.remove()

    def _look(self, module: nn.Module, args: Any, output: Any) -> None:
        if isinstance(self.session, Session) and torch.is_grad_enabled():
            self._most = max(self._most, self.session.stored_bytes)


def unwrap_optimizer(optimizer: Any) -> Any:
    """The optimizer inside those of Accelerate and Lightning."""
    while not isinstance(optimizer, Optimizer) and isinstance(getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = optimizer.optimizer
    return optimizer


def _parameters(model: nn.Module | None, optimizer: Any) -> list[Tensor]:
    """Each once: the model's, or those that the optimizer has."""
    if model is not None:
        return list(model.parameters())
    return [p for group in optimizer.param_groups for p in group["params"]] if optimizer is not None else []


def _plain_bytes(parameter: Tensor) -> int:
    """Bytes of a parameter that waits as it is; a packed one has no memory of its own."""
    return parameter.untyped_storage().nbytes()


def _gradient_bytes(parameter: Tensor, optimizer: Any) -> int:
    """Bytes that the sum of its gradient takes from the first backward pass on."""
    entry = optimizer.entry_of(parameter) if isinstance(optimizer, Optimizer) else None
    if entry is not None and entry.gradient is not None:
        return entry.gradient.nbytes
    is_released = isinstance(optimizer, Optimizer) and optimizer.memory.release
    return 0 if is_released else parameter.numel() * parameter.element_size()


def _state_bytes(state: dict[str, Any]) -> int:
    return sum(value.nbytes for name, value in state.items() if isinstance(value, Tensor) and not name.startswith(WEIGHT))


def _arrivals(optimizer: Any) -> dict[str, float]:
    """Underflow and flips over all packed weights, each value counting the same; since the start, as `diagnostics()` has them."""
    rows = optimizer.diagnostics() if isinstance(optimizer, Optimizer) else ()
    looked = [(row, row.num_values) for row in rows if row.num_values]
    if not looked:
        return {}
    return {
        "updates/underflow": _mean((row.underflow, count) for row, count in looked),
        "updates/flips": _mean((row.flips, count) for row, count in looked),
    }


def _mean(pairs: Iterable[tuple[float, int]]) -> float:
    pairs = list(pairs)
    return sum(value * count for value, count in pairs) / sum(count for _, count in pairs)


# --- What the callbacks of all libraries share ---


class AppliedPlan:
    """A plan that is put onto a model and taken off again. `options` are those of `apply`."""

    def __init__(self, plan: Plan, **options: Any) -> None:
        if not isinstance(plan, Plan):
            own = type(self).__name__
            raise ApplyError(f"{own} takes a Plan, not {type(plan).__name__}: {own}(Plan.preset('half')).")
        self.plan, self._options = plan, options
        self.session: Session | SimulatedSession | None = None
        self._monitor: Monitor | None = None

    def put_on(self, model: nn.Module) -> None:
        """From now on the plan is at work."""
        self.session = session = apply(self.plan, model, **self._options)
        self._monitor = Monitor(session, unwrapped(model))

    def verify(self, model: nn.Module, batch: Any, step: Callable[[Any], Tensor]) -> None:
        """VerificationError, and the plain model, unless gradients of `step(batch)` are those of the unmodified model."""
        try:
            verify_step(model, batch, step).check()
        except BaseException:
            self.close()
            raise
        if self._monitor is not None:
            self._monitor.forget()

    def close(self) -> None:
        """Give the plain model back; also after a training that was broken off."""
        if self._monitor is not None:
            self._monitor.close()
        if self.session is not None:
            self.session.close()
        self.session, self._monitor = None, None
