"""When a weight that waits packed is plain in a step: while a module that has it runs, and where it is used outside of such modules.

A checkpoint calls modules again in backward, and holds what they saved: then the weight is plain until its gradient is there.
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

Span = tuple[int, int]


class Running:
    """Follows the calls of `modules` that have parameters of their own, in ticks of a clock."""

    def __init__(self, modules: Iterable[nn.Module], now: Callable[[], int]) -> None:
        self._now = now
        self._modules = [module for module in modules if any(p is not None for p in module._parameters.values())]
        self._having: dict[int, list[nn.Module]] = {}  # by id of a parameter
        for module in self._modules:
            for parameter in module._parameters.values():
                self._having.setdefault(id(parameter), []).append(module)
        self._entered: dict[nn.Module, list[int]] = {module: [] for module in self._modules}
        self._spans: dict[nn.Module, list[Span]] = {module: [] for module in self._modules}

    @contextmanager
    def followed(self) -> Generator[None]:
        """Follow calls, those in backward too: a checkpoint calls its modules again."""
        handles: list[Any] = []
        for module in self._modules:
            handles += [module.register_forward_pre_hook(self._enter), module.register_forward_hook(self._leave)]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def spans(self, parameter: Tensor) -> tuple[Span, ...]:
        """From which tick to which modules run that have `parameter`, both included."""
        return merged(span for module in self._having.get(id(parameter), ()) for span in self._spans[module])

    def _enter(self, module: nn.Module, args: Any) -> None:
        self._entered[module].append(self._now() + 1)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        entered = self._entered[module].pop()
        self._spans[module].append((entered, max(entered, self._now())))


def merged(spans: Iterable[Span]) -> tuple[Span, ...]:
    """Spans in order, those that overlap or follow each other as one.

    >>> merged([(7, 9), (1, 4), (2, 3), (5, 5)])
    ((1, 5), (7, 9))
    """
    found: list[Span] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1] + 1:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((start, end))
    return tuple(found)
