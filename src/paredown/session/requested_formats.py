"""The formats that a plan requests of the optimizer of a model: of weights, moments, residues and gradients."""

from __future__ import annotations

from typing import Any

from torch import nn

from paredown.errors import ApplyError
from paredown.optim.parameter_state import Choice, RequestedFormats, owner_of
from paredown.plan.plan import Plan
from paredown.roles import Role, weight_role
from paredown.session.changes import STATE


def requested_formats_of(model: nn.Module, plan: Plan) -> list[tuple[nn.Parameter, RequestedFormats]]:
    """The formats that `plan` gives to the parameters of `model`; ApplyError or OptimError if their optimizer cannot follow it."""
    rows: list[tuple[nn.Parameter, RequestedFormats]] = []
    checked: set[Any] = set()
    for name, parameter in model.named_parameters():
        assigned = {role: plan.find((name,), role) for role in (Role.WEIGHT, *STATE)}
        assigned[Role.WEIGHT] = plan.find((name,), weight_role(is_frozen=not parameter.requires_grad))
        choices: dict[Role, Choice] = {role: (a.format, a.rounding_in(role)) for role, a in assigned.items()}
        if any(format is not None for format, _ in choices.values()):
            rows.append((parameter, RequestedFormats(name, choices)))
            owner = owner_of(parameter)
            if owner is not None and owner not in checked and owner.has_started:
                raise ApplyError(
                    f"{type(owner).__name__} of paredown.optim has {name} and has state already ({owner.updates} updates), which is not "
                    "stored in the plan's formats. Apply the plan before the first step and before load_state_dict(); or apply it "
                    "without that optimizer, make a new one, and load export_state() of the old one into it."
                )
            if owner is not None:
                checked.add(owner)
                owner.check_request(parameter, rows[-1][1])
    return rows
