"""What optimizers keep for each parameter, by name or found by trying the instance on a tiny parameter.

An optimizer that follows a rule, as those of `paredown.optim` do, is not tried: its `rule` tells the roles of its moments. They are
traced plain, and plans give them formats.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from paredown.errors import TraceError
from paredown.roles import Role

NAMES = {
    "sgd": (),
    "sgdm": (Role.MOMENT1,),
    "adam": (Role.MOMENT1, Role.MOMENT2),
    "adamw": (Role.MOMENT1, Role.MOMENT2),
    "lion": (Role.MOMENT1,),
}
SECOND = ("sq", "square", "sum", "second", "v")  # words in the names of second moments
NOT_TRIED = ("params", "capturable")  # the second one wants a GPU
OWN_FORMATS = ("tier", "weight", "residue", "moment1", "moment2", "gradient")  # keywords of `paredown.optim`
OWN_NOTE = "formats that {} was made with are left out: give footprint the plan that says the same, such as Plan.preset('lpmm')"
PRIMES: tuple[int, ...] = (
    2,
    3,
    5,
    7,
    11,
    13,
    17,
    19,
)  # sizes of the tiny parameter: each dimension of a state shows which one it follows


@dataclass(frozen=True)
class StateTensor:
    """One tensor of optimizer state: which parameter's, in which role, of what shape and dtype."""

    parameter: str
    role: Role
    shape: tuple[int, ...]
    dtype: torch.dtype
    suffix: str = ""  # for a third and fourth state

    @property
    def name(self) -> str:
        """The name of its slot."""
        return f"{self.parameter}.{self.suffix}" if self.suffix else self.parameter


@dataclass(frozen=True)
class OptimizerState:
    """All state of an optimizer, and the memory that its step takes and gives back."""

    name: str
    states: tuple[StateTensor, ...]
    transient_bytes: int
    notes: tuple[str, ...] = ()
    released: frozenset[str] = frozenset()  # parameters whose gradient is used in backward, and freed


def state_of_optimizer(optimizer: Any, parameters: dict[str, nn.Parameter], device: str) -> OptimizerState:
    """What `optimizer`, a name or an instance, keeps for those of `parameters` (name -> parameter) that have gradients."""
    if optimizer is None:
        return OptimizerState("", (), 0)
    trained = {name: p for name, p in parameters.items() if p.requires_grad}
    if isinstance(optimizer, str):
        if optimizer not in NAMES:
            raise TraceError(
                f"optimizer {optimizer!r} is unknown. Allowed: {', '.join(NAMES)}, or an instance of torch.optim.Optimizer."
            )
        states = (StateTensor(name, role, tuple(p.shape), p.dtype) for name, p in trained.items() for role in NAMES[optimizer])
        return OptimizerState(optimizer, tuple(states), 0)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TraceError(
            f"optimizer is a name ({', '.join(NAMES)}) or an instance of torch.optim.Optimizer, not {type(optimizer).__name__}."
        )
    return _kept_by_instance(optimizer, trained, device)


def _kept_by_instance(optimizer: torch.optim.Optimizer, trained: dict[str, nn.Parameter], device: str) -> OptimizerState:
    mine = {id(p) for group in optimizer.param_groups for p in group["params"]}
    held = {name: p for name, p in trained.items() if id(p) in mine}
    name = type(optimizer).__name__
    notes = [f"{len(trained) - len(held)} parameters are not in the optimizer"] if len(held) < len(trained) else []
    if all(hasattr(getattr(optimizer, "rule", None), told) for told in ("roles", "names")):
        return _kept_by_rule(optimizer, held, device, notes)
    states: list[StateTensor] = []
    try:
        tried = {rank: _tried(optimizer, rank) for rank in {p.dim() for p in held.values()}}
        for parameter, p in held.items():
            states += _scaled(parameter, p, tried[p.dim()])
    except Exception as error:
        notes.append(f"the state of {name} is left out: a step on a tiny parameter failed ({type(error).__name__}: {error})")
    return OptimizerState(name, tuple(states), _transient(optimizer, held, device), tuple(notes))


def _kept_by_rule(optimizer: Any, held: dict[str, nn.Parameter], device: str, notes: list[str]) -> OptimizerState:
    """What an optimizer of `paredown.optim` keeps where nothing is packed: torch.optim's state, or float32 where torch has no such one."""
    releases = bool(getattr(getattr(optimizer, "memory", None), "release", False))
    is_torchs = bool(getattr(optimizer, "has_torch", False)) and not releases
    groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    rule_for = getattr(optimizer, "rule_for", lambda group: optimizer.rule)
    states = [
        StateTensor(name, role, tuple(p.shape), p.dtype if is_torchs else torch.float32)
        for name, p in held.items()
        for role in rule_for(groups[id(p)]).roles
    ]
    if any(group.get(asked) not in (None, "full", "tier") for group in optimizer.param_groups for asked in OWN_FORMATS):
        notes.append(OWN_NOTE.format(type(optimizer).__name__))
    transient = _transient(optimizer, held, device) if is_torchs else 0
    return OptimizerState(type(optimizer).__name__, tuple(states), transient, tuple(notes), frozenset(held if releases else ()))


def _tried(optimizer: torch.optim.Optimizer, rank: int) -> dict[str, Tensor]:
    """The tensors that the optimizer keeps for one parameter of `rank` dimensions, after a step of one like it."""
    kind = type(optimizer)
    accepted = inspect.signature(kind.__init__).parameters
    options = {name: value for name, value in optimizer.param_groups[0].items() if name in accepted and name not in NOT_TRIED}
    tiny = nn.Parameter(torch.ones(PRIMES[:rank]))
    tiny.grad = torch.ones_like(tiny)
    like = kind([tiny], **options)
    like.step()
    return {name: value for name, value in like.state[tiny].items() if isinstance(value, Tensor) and value.numel() > 1}


def role_of_state(name: str) -> Role:
    """What a tensor is that an optimizer keeps under this name.

    >>> role_of_state("momentum_buffer").value, role_of_state("exp_avg_sq").value
    ('moment1', 'moment2')
    """
    return Role.MOMENT2 if any(word in name.lower().split("_") for word in SECOND) else Role.MOMENT1


def _scaled(parameter: str, p: Tensor, tried: dict[str, Tensor]) -> Iterator[StateTensor]:
    """The states of `p`: every dimension of a tried one is that of the tiny parameter's dimension which it follows."""
    sizes = dict(zip(PRIMES, p.shape, strict=False))
    taken: set[Role] = set()
    for name, value in tried.items():
        role = role_of_state(name)
        dtype = p.dtype if value.dtype is torch.float32 else value.dtype
        yield StateTensor(parameter, role, tuple(sizes.get(n, n) for n in value.shape), dtype, name if role in taken else "")
        taken.add(role)


def _transient(optimizer: torch.optim.Optimizer, held: dict[str, nn.Parameter], device: str) -> int:
    """Scratch of one step: all parameters once where the optimizer goes over lists, the largest one where it goes one by one."""
    group = optimizer.param_groups[0]
    if group.get("fused"):
        return 0
    sizes = [p.numel() * p.element_size() for p in held.values()]
    by_lists = group.get("foreach", False)
    over_lists = device == "cuda" if by_lists is None else by_lists
    return sum(sizes) if over_lists else max(sizes, default=0)
