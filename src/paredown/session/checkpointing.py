"""Modules that are computed again in backward instead of being saved: torch's own non-reentrant checkpointing, put on by hooks.

Between a module's pre-hook and its hook, checkpointing holds what operations save as empty places; when backward asks for the first of
them, the module is called again, with the random state and autocast of the first time, and its hooks of this kind are passed over.
Class, names and state_dict of the model do not change. What `Watch` finds inside is held by others' hooks, and it leaves that alone: hooks
of our own set inside would take the place of checkpointing's, and switch it off without a word (docs/decisions/005).

Batch norms count a batch once: in the second pass their running statistics are left as they are.
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
from paredown.trace.module_watch import Hook

DETERMINISM, KEEPS_RANDOM_STATE, DEBUG, EARLY_STOP = "default", True, False, True


class CheckpointedModules:
    """The modules of one model that a plan has computed again."""

    def __init__(self, plan: Plan, model: nn.Module) -> None:
        paths = dict(model.named_modules())
        try:
            self.paths = tuple(path for found in outermost(paths, plan.recompute) for path in _called(found, paths[found]))
        except PlanError as error:
            raise ApplyError(f"{error} Correct it, or take a plan of this model.") from None
        self.modules = [paths[path] for path in self.paths]
        self._handles: list[Any] = []
        self._local = threading.local()

    def has(self, name: str) -> bool:
        """Whether the slot of this name is inside of one of them, and not saved."""
        return any(is_of(name, path) for path in self.paths)

    def attach(self) -> None:
        """Register the hooks: the first of all before a call, so that the second call gets the same arguments."""
        for module in self.modules:
            enter, leave = Hook(self._enter), Hook(self._leave)
            self._handles.append(module.register_forward_pre_hook(enter, with_kwargs=True, prepend=True))
            self._handles.append(module.register_forward_hook(leave, prepend=True, always_call=True))

    def detach(self) -> None:
        """Remove the hooks; what waits for its backward is still computed again."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if getattr(self._local, "is_again", False):
            return
        running = _checkpoint_without_reentrant_generator(
            module,
            KEEPS_RANDOM_STATE,
            lambda: (nullcontext(), _Afresh(lambda: self._again(module))),
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
        if getattr(self._local, "is_again", False) or not calls or calls[-1][0] is not module:
            return
        next(calls.pop()[1], None)  # ends it: the hooks of checkpointing are taken off

    def _calls(self) -> list[tuple[nn.Module, Generator[None, None, None]]]:
        if not hasattr(self._local, "calls"):
            self._local.calls = []
        return self._local.calls

    @contextmanager
    def _again(self, module: nn.Module) -> Generator[None]:
        """Around the second call of a module, in the thread that runs backward."""
        before = getattr(self._local, "is_again", False)
        self._local.is_again = True
        try:
            with _statistics_kept(module):
                yield
        finally:
            self._local.is_again = before


def _called(path: str, module: nn.Module) -> Iterator[str]:
    """The path of a module, or of its parts where it is a mere list of them, which nobody calls."""
    if type(module).forward is not nn.Module.forward:
        yield path
        return
    for name, part in module.named_children():
        yield from _called(f"{path}.{name}", part)


class _Afresh:
    """A context that is made anew each time it is entered: a graph that is retained is computed again by every backward."""

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
def _statistics_kept(module: nn.Module) -> Generator[None]:
    """Batch norms inside use the statistics of the batch, and leave the running ones alone."""
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
