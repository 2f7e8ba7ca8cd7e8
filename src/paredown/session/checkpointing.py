"""Activation checkpointing of the modules in `plan.recompute`: torch's non-reentrant checkpointing, switched on by module hooks.

From a module's forward pre-hook to its forward hook, the saved-tensor hooks of torch.utils.checkpoint replace each saved tensor by an empty
placeholder. When backward needs the first of them, the module runs again with the random state and autocast settings of its first call;
the hooks of this file do nothing in that second call. Class, parameter names and state_dict of the model do not change. `Watch` leaves the
placeholders alone: hooks that it registered on them would replace those of checkpointing and silently disable it (docs/decisions/005).

Batch norms update their running statistics once per batch: not in the second call.
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.utils.checkpoint import _checkpoint_without_reentrant_generator

from paredown.errors import ApplyError, PlanError
from paredown.plan.checkpointed_trace import is_of, outermost
from paredown.plan.plan import Plan
from paredown.trace.hooks import Hook
from paredown.trace.operations import is_checkpoint_input

DETERMINISM, KEEPS_RANDOM_STATE, DEBUG, EARLY_STOP = "default", True, False, True


class CheckpointedModules:
    """The checkpointed modules of one model."""

    def __init__(self, plan: Plan, model: nn.Module) -> None:
        paths = dict(model.named_modules())
        try:
            matches = outermost(paths, plan.checkpointed)
            self.paths = tuple(path for match in matches for path in _callable_paths(match, paths[match]))
        except PlanError as error:
            raise ApplyError(f"{error} Correct it, or use a plan that was made for this model.") from None
        self.modules = [paths[path] for path in self.paths]
        self._handles: list[Any] = []
        self._local = threading.local()

    def has(self, name: str) -> bool:
        """Whether the slot `name` is inside a checkpointed module, and so not saved."""
        return not is_checkpoint_input(name) and any(is_of(name, path) for path in self.paths)

    def attach(self) -> None:
        """Register the hooks. The pre-hook runs before all others, so that the second call gets the original arguments."""
        for module in self.modules:
            enter, leave = Hook(self._enter), Hook(self._leave)
            self._handles.append(module.register_forward_pre_hook(enter, with_kwargs=True, prepend=True))
            self._handles.append(module.register_forward_hook(leave, prepend=True, always_call=True))

    def detach(self) -> None:
        """Remove the hooks; the backward of graphs that exist already still runs the modules again."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if getattr(self._local, "is_second_call", False):
            return
        running = _checkpoint_without_reentrant_generator(
            module,
            KEEPS_RANDOM_STATE,
            lambda: (nullcontext(), _ReusableContext(lambda: self._second_call(module))),
            DETERMINISM,
            DEBUG,
            EARLY_STOP,
            *args,
            **kwargs,
        )
        next(running)
        self._calls().append((module, running))

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        calls = self._calls()
        if getattr(self._local, "is_second_call", False) or not calls or calls[-1][0] is not module:
            return
        next(calls.pop()[1], None)  # finishes the generator, which removes the saved-tensor hooks of checkpointing

    def _calls(self) -> list[tuple[nn.Module, Generator[None, None, None]]]:
        if not hasattr(self._local, "calls"):
            self._local.calls = []
        return self._local.calls

    @contextmanager
    def _second_call(self, module: nn.Module) -> Generator[None]:
        """The context of the second call of a module, in the thread that runs backward."""
        before = getattr(self._local, "is_second_call", False)
        self._local.is_second_call = True
        try:
            with _frozen_statistics(module):
                yield
        finally:
            self._local.is_second_call = before


def _callable_paths(path: str, module: nn.Module) -> Iterator[str]:
    """The path of a module, or those of its children where it has no forward, as nn.ModuleList."""
    if type(module).forward is not nn.Module.forward:
        yield path
        return
    for name, part in module.named_children():
        yield from _callable_paths(f"{path}.{name}", part)


class _ReusableContext:
    """A context that can be entered several times: each backward of a retained graph runs the module again."""

    def __init__(self, make: Callable[[], AbstractContextManager[None]]) -> None:
        self._make = make
        self._open: list[AbstractContextManager[None]] = []

    def __enter__(self) -> None:
        context = self._make()
        context.__enter__()
        self._open.append(context)

    def __exit__(self, *error: Any) -> bool | None:
        return self._open.pop().__exit__(*error)


@contextmanager
def _frozen_statistics(module: nn.Module) -> Generator[None]:
    """A context in which batch norms use the statistics of the batch and do not update the running ones."""
    norms = [
        part for part in module.modules() if isinstance(part, _NormBase | _BatchNorm) and part.track_running_stats and part.training
    ]
    before = [(part.momentum, part._buffers.get("num_batches_tracked")) for part in norms]
    for part in norms:
        part.momentum, part._buffers["num_batches_tracked"] = 0.0, None  # running <- 1 x running + 0 x batch
    try:
        yield
    finally:
        for part, (momentum, count) in zip(norms, before, strict=True):
            part.momentum, part._buffers["num_batches_tracked"] = momentum, count


def repeated_layers_of(model: nn.Module) -> tuple[str, ...]:
    """The layers of a model: modules with parameters in its outermost lists; ApplyError if there are none."""
    lists = [path for path, module in model.named_modules() if _is_list_of_layers(module)]
    outer = [path for path in lists if not any(path.startswith(f"{other}.") for other in lists)]
    paths = [f"{path}.{name}".lstrip(".") for path in outer for name, _ in model.get_submodule(path).named_children()]
    layers = tuple(path for path in paths if next(model.get_submodule(path).parameters(), None) is not None)
    if not layers:
        raise ApplyError(
            f"{type(model).__name__} has no list of layers to checkpoint: neither an nn.ModuleList, nor an nn.Sequential of modules of one "
            "class. Name modules in a plan: Plan().recomputing('encoder.*')."
        )
    return layers


def _is_list_of_layers(module: nn.Module) -> bool:
    children = list(module.children())
    is_uniform = len({type(child) for child in children}) == 1 and next(children[0].children(), None) is not None
    return isinstance(module, nn.ModuleList) or (isinstance(module, nn.Sequential) and is_uniform)
