"""What is rounded when an optimizer steps: gradients before it if asked for, then masters and moments after it.

Hooks that torch runs for every optimizer see the step of whoever has the model's parameters: the user's loop does not change. The
parameter that the optimizer updates is the master; the weight that the model computes with is rounded from it in each forward pass.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from paredown.plan.optimizers import role_of_state
from paredown.roles import Role
from paredown.session.places import Places


class Updates:
    """Rounds around the steps of all optimizers that hold parameters of `names` (id -> name)."""

    def __init__(self, places: Places, names: dict[int, str], *, gradients_at_step: bool) -> None:
        self._places, self._names, self._gradients_at_step = places, names, gradients_at_step
        self.num_steps = 0
        me: weakref.ref[Updates] = weakref.ref(self)
        self._handles = [
            register_optimizer_step_pre_hook(_weak(me, Updates._before)),
            register_optimizer_step_post_hook(_weak(me, Updates._after)),
        ]
        self.close = weakref.finalize(self, _remove, self._handles)  # steps are torch's again, also when nobody holds this

    @torch.no_grad()
    def _before(self, optimizer: Optimizer) -> None:
        mine = self._mine(optimizer) if self._gradients_at_step else ()
        self._round([(parameter.grad, name, Role.GRADIENT) for name, parameter in mine if parameter.grad is not None])

    @torch.no_grad()
    def _after(self, optimizer: Optimizer) -> None:
        mine = list(self._mine(optimizer))
        self.num_steps += bool(mine)
        found: list[tuple[Tensor, str, Role]] = [(parameter, name, Role.MASTER) for name, parameter in mine]
        for name, parameter in mine:
            for key, state in optimizer.state.get(parameter, {}).items():
                if isinstance(state, Tensor) and state.shape == parameter.shape and state.is_floating_point() and state.dim():
                    found.append((state, name, role_of_state(str(key))))
        self._round(found)

    def _mine(self, optimizer: Optimizer) -> Iterator[tuple[str, Tensor]]:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                name = self._names.get(id(parameter))
                if name is not None:
                    yield name, parameter

    def _round(self, tensors: list[tuple[Tensor, str, Role]]) -> None:
        slots = [(tensor, self._places.of((name,), role)) for tensor, name, role in tensors]
        self._places.round_all([(tensor, tensor, place) for tensor, place in slots if place is not None])


def _remove(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()


def _weak(ref: weakref.ref[Updates], method: Callable[[Updates, Any], None]) -> Callable[..., None]:
    def hook(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        found = ref()
        if found is not None:
            method(found, optimizer)

    return hook
