"""Finds what a plan cannot do on a model: rules that match no tensor, scripted modules, and steps that no session saw.

frozen=*        no parameter of the model is frozen: the preset frozen4 stores nothing
net.encoder     a scripted module, whose inside no hook reads
the model       an optimizer updated its parameters, and no module of it was called: autograd saved all activations unmodified
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from paredown.autograd.hooks import register_weakly
from paredown.errors import ApplyError
from paredown.optim.parameter_state import owner_of
from paredown.plan.plan import Plan
from paredown.plan.selectors import Selector
from paredown.roles import Role
from paredown.session.changes import UNMODIFIED, Change, StoredBytes

NONE_FROZEN = "no parameter is frozen: freeze the base by requires_grad_(False) before apply, or give weights a format by weight="
NONE_TRAINED = "no parameter of the model requires a gradient"
NO_PARAMETER = "the model has no parameters"
UNSEEN = (
    "its parameters have gradients, and no hook of its modules ran, which packs what is saved. Call the model or its modules as functions, "
    "not their forward(), not a copy of the model, and not what torch.compile compiled before apply (call session.compile() instead)"
)
NOTHING = "Nothing is stored in a format of this plan: session.changes has the reasons"
NOTHING_SAVED = "no forward pass saved a tensor for backward that is large enough to pack and that only backward holds"
SCRIPTED = "torch.jit.script compiled it, and hooks cannot read what it saves inside: use the module that it was compiled from"


def unused_rules(plan: Plan, model: nn.Module) -> list[Change]:
    """Return a `Change` for each rule on a whole role (weights, frozen weights, ...) that matches no parameter."""
    needs = [p.requires_grad for p in model.parameters()]
    rows: list[Change] = []
    for text, assignment in plan.rules:
        key = Selector.parse(text)
        if key.name is not None or key.role in (None, Role.ACTIVATION, Role.MASTER, Role.ERROR) or assignment.format is None:
            continue
        if key.role is Role.WEIGHT:
            reason = "" if needs else NO_PARAMETER
        elif key.role is Role.FROZEN:
            reason = NONE_FROZEN if all(needs) else ""
        else:
            reason = "" if any(needs) else NONE_TRAINED
        rows += [Change(f"{text}=*", str(assignment.format), "nothing", reason)] if reason else []
    return rows


def warn_of_unused_plan(plan: Plan, model: nn.Module) -> None:
    """Warn if no rule of `plan` matches a parameter of `model`; the warning names the line that called this function's caller."""
    rows = unused_rules(plan, model)
    if rows and len(rows) == sum(assignment.format is not None for _, assignment in plan.rules):
        warnings.warn(
            f"the plan stores nothing of this model: {'; '.join(f'{row.slot}: {row.reason}' for row in rows)}.", stacklevel=3
        )


def scripted_parts(model: nn.Module) -> list[str]:
    """Return the paths of scripted modules (TorchScript) in `model`; raise ApplyError if it is scripted itself."""
    if isinstance(model, torch.jit.ScriptModule):
        raise ApplyError(
            "this model is a torch.jit.ScriptModule: it runs without Python, and no hook can pack what it saves. Apply the plan to the "
            "model before torch.jit.script or torch.jit.trace, train that, and script it after training; session.compile() compiles it."
        )
    paths = [path for path, module in model.named_modules() if isinstance(module, torch.jit.ScriptModule)]
    return [path for path in paths if not any(path.startswith(f"{other}.") for other in paths)]


def scripted_changes(plan: Plan, paths: Iterable[str]) -> list[Change]:
    """Return a `Change` for each scripted module of `paths`, whose activations cannot be packed."""
    rest = plan.find(("",), Role.ACTIVATION).format
    return [Change(path, str(rest), UNMODIFIED, SCRIPTED) for path in paths if rest is not None]


def does_nothing(plan: Plan, stored: Sequence[StoredBytes], *, has_run: bool) -> bool:
    """Return whether a plan with rules packs nothing in this model; False before a forward pass has run."""
    return bool(plan.rules) and has_run and not any(row.stored < row.baseline for row in stored)


class UnseenSteps:
    """Warns once if an optimizer updates the parameters of a model although `session.has_run` is False."""

    def __init__(self, model: nn.Module, session: Any) -> None:
        self._model, self._session = weakref.ref(model), weakref.ref(session)
        self.were_seen = False  # whether there were such steps
        self._handle = register_weakly(register_optimizer_step_post_hook, self, UnseenSteps._after_step)

    def close(self) -> None:
        """Remove the hook on optimizer steps."""
        self._handle.remove()

    def check(self, among: set[nn.Parameter] | None = None) -> bool:
        """Return whether parameters of the model (or of `among`) have gradients although no forward pass was seen."""
        model, session = self._model(), self._session()
        if model is not None and session is not None and not self.were_seen and not session.has_run:
            found = [p for p in model.parameters() if among is None or p in among]
            self.were_seen = any(p.requires_grad and p.grad is not None for p in found)
        return self.were_seen

    def _after_step(self, optimizer: Optimizer) -> None:
        session = self._session()
        if self.were_seen or session is None or session.has_run:
            return
        updated = {p for group in optimizer.param_groups for p in group["params"] if owner_of(p) in (None, optimizer)}
        if self.check(updated):  # an optimizer of paredown.optim may call one of torch.optim: its own step is the one to name
            text = f"the plan packs activations, and nothing was packed in the step of {type(optimizer).__name__} over the model: {UNSEEN}."
            warnings.warn(text, stacklevel=4)
