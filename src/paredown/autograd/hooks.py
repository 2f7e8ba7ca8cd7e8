"""Defines module hooks that do nothing in copies of a model, and optimizer hooks that do not keep their owner alive.

`Hook` is registered on modules, and `num_running` counts a module's running calls, without those that an interrupt ended.
`register_weakly` is for optimizers: torch iterates over their hooks while it calls them, and raises a RuntimeError if one is removed
meanwhile. The garbage collector may free an owner at any moment, in the middle of a step too, so that a finalizer must not remove a hook.
The hook of an owner that is gone does nothing, and is removed before the next hook is registered.
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

Owner = TypeVar("Owner")
compiler = torch.compiler
is_dynamo_compiling = compiler.is_dynamo_compiling  # True while Dynamo traces, which replaces the call
CALL = nn.Module._call_impl.__code__  # of every call of a module that has hooks


class Hook:
    """Wraps a function as a module hook, which becomes an empty hook in copies of the model (deepcopy, pickle)."""

    def __init__(self, call: Callable[..., Any] | None = None) -> None:
        self._call = call
        self.was_compiled = False
        self.is_traced = False  # whether trace_step leaves the hook on the model

    def __call__(self, *args: Any) -> Any:
        """Call the hook's function and return its result; do nothing while torch.compile traces, and in a copy."""
        if is_dynamo_compiling() or compiler._is_compiling_flag:  # compiler.is_compiling() in one call
            self.was_compiled = True
            return None
        return self._call(*args) if self._call is not None else None

    def __deepcopy__(self, memo: Any) -> Hook:
        return Hook()

    def __reduce__(self) -> Any:
        return Hook, ()


def num_running(module: nn.Module) -> int:
    """Return how many calls of `module` are running in this thread, by counting their frames in Python's stack.

    Counting pre-hooks and forward hooks would not do, since torch calls no forward hook after a KeyboardInterrupt.
    """
    frame, count = sys._getframe(), 0
    while frame is not None:
        count += frame.f_code is CALL and frame.f_locals["self"] is module
        frame = frame.f_back
    return count


def call_always(module: nn.Module, handle: Any, *, is_on: bool) -> None:
    """Set whether a module's forward hook is also called after a forward that raises, with None as the output.

    `handle` is what `register_forward_hook` returned for the hook.
    """
    always: dict[int, bool] = module._forward_hooks_always_called
    always[handle.id] = True
    if not is_on:
        del always[handle.id]


_abandoned: list[RemovableHandle] = []  # handles of hooks whose owners are gone; the hooks do nothing until they are removed


def register_weakly(
    register: Callable[[Any], RemovableHandle], owner: Owner, method: Callable[[Owner, Optimizer], None]
) -> RemovableHandle:
    """Register a hook that calls `method(owner, optimizer)` at optimizer steps as long as `owner` is alive.

    `register` is torch's function that registers such a hook, and its handle is returned.
    """
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


@contextmanager
def patched_attributes(owner: object, **attributes: Any) -> Generator[None]:
    """Return a context in which `owner` has these attributes in place of attributes of its class."""
    instance = vars(owner)
    before = {name: instance[name] for name in attributes if name in instance}
    instance.update(attributes)
    try:
        yield
    finally:
        for name in attributes:
            del instance[name]
        instance.update(before)
