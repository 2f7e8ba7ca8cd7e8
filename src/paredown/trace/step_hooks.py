"""Hooks on the steps of all optimizers, which do not keep their owner alive.

torch iterates over the hooks while it calls them, and raises a RuntimeError if one is removed meanwhile. The garbage collector may free an
owner at any moment, in the middle of a step too: a finalizer must not remove a hook. The hook of an owner that is gone does nothing, and is
removed before the next hook is registered.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from torch.optim import Optimizer

Owner = TypeVar("Owner")


class Handle(Protocol):
    """What torch returns for a registered hook."""

    def remove(self) -> None:
        """Remove the hook, if it is still registered."""


_abandoned: list[Handle] = []  # of owners that are gone; no step depends on them


def register_weakly(register: Callable[[Any], Handle], owner: Owner, method: Callable[[Owner, Optimizer], None]) -> Handle:
    """Call `method(owner, optimizer)` as long as `owner` is alive; `register` is register_optimizer_step_pre_hook or its twin for post."""
    ref = weakref.ref(owner)

    def hook(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        alive = ref()
        if alive is not None:
            method(alive, optimizer)

    while _abandoned:
        _abandoned.pop().remove()
    handle = register(hook)
    weakref.finalize(owner, _abandoned.append, handle).atexit = False
    return handle
