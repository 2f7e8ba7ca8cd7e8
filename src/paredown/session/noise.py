"""How rounding errors spread in one backward: energies on the edges of autograd's graph, and what an error on an edge does to gradients.

While an exact backward runs, a hook behind each node measures the energy |g|^2 of what comes in and of what goes out on each edge. A
node that saved a slot is called again with that slot rounded, and the energy of the difference is measured on each edge. Nothing else of
the backward is repeated, and its result is exact.

An error on an edge is then followed to the parameters, as if every node passed on relative errors as they are:

    worth(parameter) = 1 / |g_p|^2          worth(node) = sum over edges of |out_k|^2 / |in|^2 * worth(where k leads)
    error(slot)      = sum over nodes that saved it, and their edges, of |difference_k|^2 * worth(where k leads)

Where an edge leads to a parameter, as from a linear layer to its weight, this is exact. Elsewhere it is an estimate: `probe` scales it by
what it measures.
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from paredown.plan.graph import ACCUMULATE

Energies = tuple[Tensor | None, ...]


@dataclass(frozen=True)
class Trial:
    """A slot in a format: `lower` makes backward see it so, `restore` as it was."""

    slot: str
    format: str
    lower: Callable[[], None]
    restore: Callable[[], None]


@dataclass(eq=False)
class Passed:
    """A node that ran: energies of what came in, of what went out, and of the differences by (slot, format)."""

    node: Any
    came: Tensor
    went: Energies
    differences: dict[tuple[str, str], Energies] = field(default_factory=dict)


class Noise:
    """Measures one exact backward. `trials`: for a node, the slots that it saved, in each format."""

    def __init__(self, trials: Mapping[Any, Sequence[Trial]]) -> None:
        self._trials = trials
        self._passed: list[Passed] = []

    def backward(self, loss: Tensor, parameters: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
        """The exact gradients of `parameters`; the graph is kept."""
        handles = [node.register_hook(self._hook(node)) for node in nodes_behind(loss)]
        try:
            return torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True)
        finally:
            for handle in handles:
                handle.remove()

    def errors(self, parameters: Sequence[Tensor], energies: Sequence[float]) -> dict[tuple[str, str], tuple[float, float]]:
        """By slot and format: (the error of parameters that an edge leads to at once, the estimate of the others)."""
        own = {id(p): 1 / energy for p, energy in zip(parameters, energies, strict=True) if energy > 0}
        numbers = iter(_numbers(tensor for passed in self._passed for tensor in _tensors(passed)))
        read = [_Read.of(passed, numbers) for passed in self._passed]
        worth: dict[Any, float] = {}
        found: dict[tuple[str, str], tuple[float, float]] = {}
        for row in reversed(read):  # parameters first
            targets = [edge for edge, _ in row.node.next_functions]
            values = [_worth(target, own, worth) for target in targets]
            if row.came > 0:
                worth[row.node] = sum(out / row.came * value for out, value in zip(row.went, values, strict=False))
            for place, energies_of in row.differences.items():
                direct, rest = found.get(place, (0.0, 0.0))
                for target, value, energy in zip(targets, values, energies_of, strict=False):
                    is_direct = target is not None and _parameter(target) is not None
                    direct, rest = (direct + energy * value, rest) if is_direct else (direct, rest + energy * value)
                found[place] = direct, rest
        return found

    def _hook(self, node: Any) -> Callable[[Any, Any], None]:
        def measure(went: tuple[Tensor | None, ...], came: tuple[Tensor | None, ...]) -> None:
            sums = [energy for energy in map(energy_of, came) if energy is not None]
            if not sums:
                return
            passed = Passed(node, torch.stack(sums).sum(), tuple(map(energy_of, went)))
            for trial in self._trials.get(node, ()):
                trial.lower()
                again = _called(node, came)
                trial.restore()
                passed.differences[trial.slot, trial.format] = tuple(
                    None if a is None or b is None else energy_of(_fitted(b, a) - a) for a, b in zip(went, again, strict=False)
                )
            self._passed.append(passed)

        return measure


@dataclass(frozen=True, eq=False)
class _Read:
    """`Passed` in numbers of Python."""

    node: Any
    came: float
    went: list[float]
    differences: dict[tuple[str, str], list[float]]

    @staticmethod
    def of(passed: Passed, numbers: Any) -> _Read:
        came = next(numbers)
        went = [0.0 if tensor is None else next(numbers) for tensor in passed.went]
        rows = {place: [0.0 if t is None else next(numbers) for t in row] for place, row in passed.differences.items()}
        return _Read(passed.node, came, went, rows)


def _tensors(passed: Passed) -> Iterable[Tensor]:
    rows = [(passed.came,), passed.went, *passed.differences.values()]
    return (tensor for row in rows for tensor in row if tensor is not None)


def _numbers(tensors: Iterable[Tensor]) -> list[float]:
    """Numbers of one element each, read at once."""
    found = list(tensors)
    return torch.stack(found).tolist() if found else []


def energy_of(tensor: Tensor | None) -> Tensor | None:
    """The sum of squares, on the device; None for no tensor and for integers."""
    if tensor is None or not tensor.is_floating_point():
        return None
    return torch.linalg.vector_norm(tensor, dtype=torch.float32).square()


def nodes_behind(loss: Tensor) -> list[Any]:
    """All nodes that backward from `loss` may run, without those that accumulate gradients."""
    waiting, seen = [loss.grad_fn], dict[Any, None]()
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen and node.name() != ACCUMULATE:
            seen[node] = None
            waiting.extend(before for before, _ in node.next_functions)
    return list(seen)


def _called(node: Any, came: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    is_custom = isinstance(node, torch.autograd.function.BackwardCFunction)
    with torch.no_grad():
        found = node.apply(*came) if is_custom else node(*came)
    return found if isinstance(found, tuple) else (found,)


def _fitted(tensor: Tensor, to: Tensor) -> Tensor:
    """Of the shape that the engine gave to a gradient: summed over what was broadcast."""
    return tensor if tensor.shape == to.shape else tensor.sum_to_size(to.shape)


PASSING = frozenset(("TBackward0", "TransposeBackward0", "ToCopyBackward0", "ViewBackward0", "PermuteBackward0"))


def _parameter(node: Any) -> Tensor | None:
    """The parameter that an edge leads to through views and casts alone."""
    while node is not None and node.name() in PASSING:
        node = node.next_functions[0][0]
    return node.variable if node is not None and node.name() == ACCUMULATE else None


def _worth(node: Any, own: Mapping[int, float], worth: Mapping[Any, float]) -> float:
    if node is None:
        return 0.0
    return own.get(id(node.variable), 0.0) if node.name() == ACCUMULATE else worth.get(node, 0.0)
