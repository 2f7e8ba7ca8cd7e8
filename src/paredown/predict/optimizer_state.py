"""Finds the state tensors that an optimizer stores for each parameter, from its name, its rule, or a step on a tiny parameter.

Optimizers of `paredown.optim` have a `rule`, which lists the roles of their moments; no step is run. Their moments are traced unpacked,
and plans assign formats to them. For any other instance, one step on a tiny parameter shows which tensors it stores, and of what shape.

"muon" stores one moment for each matrix of a hidden layer, and like "adamw" two for the other parameters: those that are not matrices, and
those of `paredown.optim.embeddings_and_head(model)`. Its step orthogonalizes one matrix at a time, in two bfloat16 copies and two squares
of the shorter side: `matrix_bytes`, under every plan.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from paredown.errors import TraceError
from paredown.optim.muon import embeddings_and_head
from paredown.roles import Role, role_of_state

NAMES = {
    "sgd": (),
    "sgdm": (Role.MOMENT1,),
    "adam": (Role.MOMENT1, Role.MOMENT2),
    "adamw": (Role.MOMENT1, Role.MOMENT2),
    "lion": (Role.MOMENT1,),
    "muon": (Role.MOMENT1,),  # of matrices of hidden layers
}
NOT_COPIED = ("params", "capturable")  # options not passed to the tiny optimizer; capturable needs a GPU
FORMAT_KEYWORDS = ("tier", "weight", "residue", "moment1", "moment2", "gradient")  # keywords of `paredown.optim`
FORMATS_NOTE = "formats passed to {} are not in the trace: pass footprint a plan with the same formats, such as Plan.preset('lpmm')"
# sizes of the tiny parameter: different primes, so that the size of a state's dimension shows which dimension of the parameter it has
PRIMES: tuple[int, ...] = (2, 3, 5, 7, 11, 13, 17, 19)


@dataclass(frozen=True)
class StateTensor:
    """A tensor that an optimizer stores for one parameter, such as its first moment."""

    parameter: str
    role: Role
    shape: tuple[int, ...]
    dtype: torch.dtype
    suffix: str = ""  # distinguishes several states of one role

    @property
    def name(self) -> str:
        """Return the name of the tensor in a trace: that of the parameter, with `suffix` if there is one."""
        return f"{self.parameter}.{self.suffix}" if self.suffix else self.parameter


@dataclass(frozen=True)
class OptimizerState:
    """All tensors that an optimizer stores from step to step, and the memory that its step allocates and frees.

    `transient_bytes` is that memory for a step of torch.optim with nothing packed, `matrix_bytes` that of a step of Muon under every plan.
    """

    name: str
    states: tuple[StateTensor, ...]
    transient_bytes: int
    notes: tuple[str, ...] = ()
    released: frozenset[str] = frozenset()  # parameters that are updated inside backward; their gradients are freed there
    matrix_bytes: int = 0


def state_of_optimizer(optimizer: Any, parameters: dict[str, nn.Parameter], device: str, model: nn.Module) -> OptimizerState:
    """Return the state that `optimizer` (a name, an instance, or None) stores for the trained ones of `parameters`."""
    if optimizer is None:
        return OptimizerState("", (), 0)
    trained = {name: p for name, p in parameters.items() if p.requires_grad}
    if isinstance(optimizer, str):
        if optimizer not in NAMES:
            raise TraceError(
                f"optimizer {optimizer!r} is unknown. Allowed: {', '.join(NAMES)}, or an instance of torch.optim.Optimizer."
            )
        rules = _rules_by_name(optimizer, trained, model)
        states = (StateTensor(name, role, tuple(p.shape), p.dtype) for name, p in trained.items() for role in NAMES[rules[name]])
        matrices = [p for name, p in trained.items() if rules[name] == "muon"]
        return OptimizerState(optimizer, tuple(states), 0, matrix_bytes=_matrix_bytes(matrices))
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TraceError(
            f"optimizer is a name ({', '.join(NAMES)}) or an instance of torch.optim.Optimizer, not {type(optimizer).__name__}."
        )
    return _state_of_instance(optimizer, trained, device)


def _rules_by_name(optimizer: str, trained: dict[str, nn.Parameter], model: nn.Module) -> dict[str, str]:
    """Return the name of the update rule of each parameter in `trained`, by the parameter's name.

    With "muon", parameters that are not matrices of hidden layers get "adamw".
    """
    if optimizer != "muon":
        return dict.fromkeys(trained, optimizer)
    others = {id(p) for p in embeddings_and_head(model)}
    return {name: "muon" if p.dim() == 2 and id(p) not in others else "adamw" for name, p in trained.items()}


def _matrix_bytes(matrices: Iterable[Tensor]) -> int:
    """Return the bytes of temporaries that a step of Muon needs for the largest of `matrices`."""
    return max((4 * p.numel() + 4 * min(p.shape) ** 2 for p in matrices), default=0)


def _state_of_instance(optimizer: torch.optim.Optimizer, trained: dict[str, nn.Parameter], device: str) -> OptimizerState:
    in_groups = {id(p) for group in optimizer.param_groups for p in group["params"]}
    held = {name: p for name, p in trained.items() if id(p) in in_groups}
    name = type(optimizer).__name__
    notes = [f"{len(trained) - len(held)} parameters are not in the optimizer"] if len(held) < len(trained) else []
    if all(hasattr(getattr(optimizer, "rule", None), attribute) for attribute in ("roles", "names")):
        return _state_by_rule(optimizer, held, device, notes)
    states: list[StateTensor] = []
    try:
        by_rank = {rank: _state_of_tiny_parameter(optimizer, rank) for rank in {p.dim() for p in held.values()}}
        for parameter, p in held.items():
            states += _scaled(parameter, p, by_rank[p.dim()])
    except Exception as error:
        notes.append(f"the state of {name} is left out: a step on a tiny parameter failed ({type(error).__name__}: {error})")
    matrix_bytes = _matrix_bytes(held.values()) if isinstance(optimizer, torch.optim.Muon) else 0
    return OptimizerState(name, tuple(states), _transient(optimizer, held, device), tuple(notes), matrix_bytes=matrix_bytes)


def _state_by_rule(optimizer: Any, held: dict[str, nn.Parameter], device: str, notes: list[str]) -> OptimizerState:
    """Return the state of an optimizer of `paredown.optim`, unpacked, by the roles that its update rule lists.

    Its dtypes are those of torch.optim if torch has that optimizer, else float32. `held` are the optimizer's parameters by name; a note may
    be added to `notes`.
    """
    releases = bool(getattr(getattr(optimizer, "memory", None), "release", False))
    uses_torch = getattr(optimizer, "torch_class", None) is not None and not releases
    groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    rule_for = getattr(optimizer, "rule_for", lambda group: optimizer.rule)
    states = [
        StateTensor(name, role, tuple(p.shape), p.dtype if uses_torch else torch.float32)
        for name, p in held.items()
        for role in rule_for(groups[id(p)]).roles
    ]
    if any(group.get(keyword) not in (None, "full", "tier") for group in optimizer.param_groups for keyword in FORMAT_KEYWORDS):
        notes.append(FORMATS_NOTE.format(type(optimizer).__name__))
    transient = _transient(optimizer, held, device) if uses_torch else 0
    matrices = [p for p in held.values() if getattr(rule_for(groups[id(p)]), "is_of_matrix", False)]
    released = frozenset(held if releases else ())
    return OptimizerState(type(optimizer).__name__, tuple(states), transient, tuple(notes), released, _matrix_bytes(matrices))


def _state_of_tiny_parameter(optimizer: torch.optim.Optimizer, rank: int) -> dict[str, Tensor]:
    """Return the tensors that the optimizer stores, by name, for a tiny parameter of `rank` dimensions."""
    kind = type(optimizer)
    accepted = inspect.signature(kind.__init__).parameters
    options = {name: value for name, value in optimizer.param_groups[0].items() if name in accepted and name not in NOT_COPIED}
    tiny = nn.Parameter(torch.ones(PRIMES[:rank]))
    tiny.grad = torch.ones_like(tiny)
    copy = kind([tiny], **options)
    copy.step()
    return {name: value for name, value in copy.state[tiny].items() if isinstance(value, Tensor) and value.numel() > 1}


def _scaled(parameter: str, p: Tensor, tiny_state: dict[str, Tensor]) -> Iterator[StateTensor]:
    """Yield the state tensors of the parameter `p`; `tiny_state` has those of a tiny parameter of the same rank."""
    sizes = dict(zip(PRIMES, p.shape, strict=False))
    seen_roles: set[Role] = set()
    for name, value in tiny_state.items():
        role = role_of_state(name)
        dtype = p.dtype if value.dtype is torch.float32 else value.dtype
        yield StateTensor(parameter, role, tuple(sizes.get(n, n) for n in value.shape), dtype, name if role in seen_roles else "")
        seen_roles.add(role)


def _transient(optimizer: torch.optim.Optimizer, held: dict[str, nn.Parameter], device: str) -> int:
    """Return the bytes that a step of a torch.optim optimizer allocates and frees, for the parameters `held`."""
    group = optimizer.param_groups[0]
    if group.get("fused"):
        return 0
    sizes = [p.numel() * p.element_size() for p in held.values()]
    foreach = group.get("foreach", False)
    is_foreach = device == "cuda" if foreach is None else foreach
    return sum(sizes) if is_foreach else max(sizes, default=0)
