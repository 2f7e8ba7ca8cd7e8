"""`apply` puts a plan to work on a model, in one of two modes: it stores tensors packed, or it simulates formats.

    session = apply(plan, model)                       # store: a Session; bytes fall
    session = apply(plan, model, mode="simulate")      # a SimulatedSession: arithmetic sees rounded values
    session = apply(plan, model, guard=Guard(trace))   # store, with a guard that changes the plan during training

This module imports both modes and the guard, so that none of them needs to import another.
"""

from __future__ import annotations

from functools import partial
from typing import Literal, overload

from torch import nn

from paredown.autograd.module_watch import is_wrapped_by_compile, unwrapped
from paredown.check.guard import Guard, checked_guard
from paredown.check.guard_steps import GuardRunner
from paredown.errors import ApplyError
from paredown.loss.output_head import CHUNKED_LOSS
from paredown.plan.plan import Plan
from paredown.session.open_sessions import check_has_none, forget, register
from paredown.session.session import Session, start_session
from paredown.session.unused_plans import warn_of_unused_plan
from paredown.session.view_outputs import check_is_not_graphed
from paredown.simulate.rounded_values import MODES, Simulate
from paredown.simulate.simulated_session import SimulatedSession


@overload
def apply(
    plan: Plan,
    model: nn.Module,
    *,
    seed: int = 0,
    mode: Literal["store"] = "store",
    guard: Guard | None = None,
    chunked_loss: bool = CHUNKED_LOSS,
) -> Session: ...
@overload
def apply(plan: Plan, model: nn.Module, *, seed: int = 0, mode: Literal["simulate", "peppp"] | Simulate) -> SimulatedSession: ...
def apply(
    plan: Plan,
    model: nn.Module,
    *,
    seed: int = 0,
    mode: str | Simulate = "store",
    guard: Guard | None = None,
    chunked_loss: bool = CHUNKED_LOSS,
) -> Session | SimulatedSession:
    """Apply `plan` to `model` in place and return the session. `seed` is the seed of stochastic rounding.

    `mode`: "store" packs tensors between their uses; "simulate", or a `Simulate` with other settings, rounds the values that arithmetic
    sees and saves no memory; "peppp" is the `Simulate` that rounds where the method of the paper PEPPP rounds. In store mode, `guard`
    changes formats during training when rounding errors or gradients become too large, and `chunked_loss` computes the cross entropy of a
    language model's output head in chunks of rows, so that the logits of all rows never exist at once (docs/language_models.md).
    """
    if isinstance(plan, nn.Module) or isinstance(model, Plan):
        raise ApplyError("apply takes the plan first, then the model: paredown.apply(plan, model).")
    if not isinstance(plan, Plan) or not isinstance(model, nn.Module):
        types = f"{type(plan).__name__} and {type(model).__name__}"
        raise ApplyError(f"apply takes a Plan and a torch.nn.Module, not {types}: apply(Plan.preset('activations8'), model).")
    if mode != "store":
        return _simulated(plan, model, seed, mode, guard)
    checked = checked_guard(guard, plan)
    warn_of_unused_plan(plan, unwrapped(model))
    if checked is None:
        return start_session(plan, model, seed=seed, chunked_loss=chunked_loss)
    make_guard = partial(GuardRunner, checked, plan, unwrapped(model))
    return start_session(plan, model, seed=seed, make_guard=make_guard, chunked_loss=chunked_loss)


def _simulated(plan: Plan, model: nn.Module, seed: int, mode: str | Simulate, guard: Guard | None) -> SimulatedSession:
    is_compiled, model = is_wrapped_by_compile(model), unwrapped(model)
    check_is_not_graphed(model)
    check_has_none(model)
    settings = MODES.get(mode) if isinstance(mode, str) else mode
    if not isinstance(settings, Simulate):
        allowed = ", ".join(map(repr, ("store", *MODES)))
        raise ApplyError(f"mode {mode!r} is unknown. Allowed: {allowed}, or a paredown.simulate.simulated_session.Simulate.")
    if is_compiled:
        raise ApplyError(
            "a compiled model cannot be simulated: torch.compile hides its operations. Apply the plan to the model before torch.compile."
        )
    if plan.multiplies:
        raise ApplyError(
            "the plan multiplies 8-bit codes, and simulate mode rounds values that products of the model's dtype then read: it would show "
            "other numbers. Apply the plan in store mode (the default), which emulates its products on a CPU, or leave the products out: "
            f"{', '.join(f'plan.without({key!r})' for key, _ in plan.products)}."
        )
    if guard is not None:
        raise ApplyError(
            "a guard keeps a memory budget, and simulate mode saves no memory: Simulate(raised=...) raises what overflows."
        )
    session = SimulatedSession(plan, model, seed, settings, on_close=forget)
    register(model, session)
    return session
