"""What the callbacks of all libraries share: a plan, its session while it is at work, and the numbers of that."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from paredown.errors import ApplyError
from paredown.integrations.numbers import Monitor
from paredown.plan.plan import Plan
from paredown.session.session import Session, apply, unwrapped
from paredown.session.simulated import SimulatedSession
from paredown.session.verify import verify_step


class Applied:
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
