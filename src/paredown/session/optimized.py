"""Where a session and an optimizer meet: what the plan asks for moments and gradients, and what became of it.

`apply` tells the optimizers of `paredown.optim` what the plan gives to each parameter; they are made after it. Rows of
`session.changes` say what is not as it was asked for: small parameters, gradients that others hold, or no such optimizer at all.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from paredown.errors import ApplyError
from paredown.formats.tiers import MIN_DIMS, MIN_NUMEL, is_small
from paredown.optim.registry import Asked, Choice, ask, asked_of, owner_of
from paredown.plan.plan import Plan
from paredown.roles import Role
from paredown.session.changes import Change
from paredown.session.packable import ADDED

STATE = (Role.RESIDUE, Role.MOMENT1, Role.MOMENT2, Role.GRADIENT)
NOBODY = "no optimizer of paredown.optim has these parameters yet: make one, such as paredown.optim.AdamW(model.parameters())"
SMALL = "they keep float32 state and plain gradients: that takes little, and norms and biases are sensitive"
REPLICATED = "gradients of several processes are averaged in the buckets of DistributedDataParallel, which hold them plain"
SHARDED = "fully_shard brings the gradient of each shard as a plain tensor"


def asked_for(model: nn.Module, plan: Plan) -> list[tuple[nn.Parameter, Asked]]:
    """What `plan` gives to the parameters of `model`; an optimizer that has them already was made for something else."""
    rows: list[tuple[nn.Parameter, Asked]] = []
    for name, parameter in model.named_parameters():
        found = {role: plan.find((name,), role) for role in (Role.WEIGHT, *STATE)}
        choices: dict[Role, Choice] = {role: (a.format, a.rounding_in(role)) for role, a in found.items()}
        if any(format is not None for format, _ in choices.values()):
            owner = owner_of(parameter)
            if owner is not None:
                raise ApplyError(
                    f"{type(owner).__name__} of paredown.optim has {name} already, and was made without this plan. Apply the plan first, "
                    "then make the optimizer; its export_state() can be loaded into the new one."
                )
            rows.append((parameter, Asked(name, choices)))
    return rows


def ask_for(rows: list[tuple[nn.Parameter, Asked]]) -> None:
    """Tell optimizers what a plan gives."""
    for parameter, asked in rows:
        ask(parameter, asked)


def forget(model: nn.Module) -> None:
    """Ask for nothing any more."""
    for parameter in model.parameters():
        ask(parameter, None)


def state_changes(model: nn.Module, plan: Plan) -> Iterator[Change]:
    """What the plan asks for moments and gradients, and is given otherwise."""
    wanted = [(name, p, role, plan.find((name,), role).format) for name, p in model.named_parameters() for role in STATE]
    wanted = [row for row in wanted if row[3] is not None]
    if wanted and all(owner_of(p) is None for _, p, _, _ in wanted):
        for role in STATE:
            formats = list(dict.fromkeys(str(format) for _, _, of, format in wanted if of is role))
            if formats:
                yield Change(role.value, ", ".join(formats), "as it is", NOBODY)
        return
    small = {name for name, p, _, _ in wanted if is_small(p.shape)}
    if small:
        yield Change(
            f"{len(small)} parameters of fewer than {MIN_DIMS} dimensions or {MIN_NUMEL} values", "formats", "float32", SMALL
        )
    for name, p, role, format in wanted:
        given = None if name in small else _given(p, role)
        if given is not None:
            yield Change(f"{role.value}={name}", str(format), *given)


def _given(parameter: Tensor, role: Role) -> tuple[str, str] | None:
    """What one slot of a parameter has instead of what was asked for, and why."""
    owner = owner_of(parameter)
    if owner is None:
        return "as it is", NOBODY
    entry = owner.entry_of(parameter)
    if entry is not None and asked_of(parameter) is None and entry.choices.format(role) is None:
        return "as it is", ADDED
    if role is not Role.GRADIENT or entry is None or entry.gradient is not None:
        return None
    if owner.memory.release:
        return "nothing", "release=True uses each gradient in backward and frees it"
    if entry.choices.format(Role.GRADIENT) is None:
        return "as it is", "the optimizer was made with gradient=None for it"
    return "as it is", SHARDED if isinstance(parameter, DTensor) else REPLICATED
