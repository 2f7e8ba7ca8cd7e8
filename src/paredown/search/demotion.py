"""Precision demotion of "Training with Mixed-Precision Floating-Point Assignments": groups of tensors go low, largest first.

Counted are, for each value of an outline, the tensor itself and its gradient, and for each parameter the same; a group is what one product
made, everything after it up to the next product, and the parameters that take it. Starting from all high, whole groups go low until
the share of low numbers reaches a ratio. Gradients of parameters stay high always, so that the share ends below 1.

    ratio_low = numbers in low tensors / all numbers         bytes against float32 = (2 - ratio_low) / 4, for 16 and 8 bits

It is the sum over all tensors of a step, not a peak, and nothing that an optimizer keeps is in it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from paredown.errors import PlanError
from paredown.plan.outline import INPUT, Outline
from paredown.roles import Role

Low = frozenset[tuple[Role, str]]  # the tensors that are low, by role and name
ALL_HIGH: Low = frozenset()
BYTES_FP32 = 4


@dataclass(frozen=True)
class Counted:
    """One tensor in the paper's sense."""

    role: Role
    name: str
    numel: int
    group: int

    @property
    def key(self) -> tuple[Role, str]:
        """What tells it from the others."""
        return self.role, self.name

    @property
    def may_be_low(self) -> bool:
        """All but the gradients of parameters."""
        return self.role is not Role.GRADIENT


@dataclass(frozen=True)
class Group:
    """Tensors that go low together."""

    number: int
    tensors: tuple[Counted, ...]

    @property
    def numel(self) -> int:
        """Numbers in all of them."""
        return sum(tensor.numel for tensor in self.tensors)


def tensors_of(outline: Outline) -> list[Counted]:
    """Every tensor that is counted, with its group: a parameter belongs to that of the first value it meets."""
    group, groups, found = -1, list[int](), list[Counted]()
    seen: set[str] = set()
    for value in outline.values:
        group += value.is_product or value.op == INPUT or group < 0
        groups.append(group)
        found += [Counted(role, value.name, value.numel, group) for role in (Role.ACTIVATION, Role.ERROR)]
        first = groups[value.sources[0]] if value.sources else group
        for name in (name for name in value.weights if name not in seen):
            seen.add(name)
            found += [Counted(role, name, outline.weights[name], first) for role in (Role.WEIGHT, Role.GRADIENT)]
    return found


def groups_of(outline: Outline) -> list[Group]:
    """All groups in the order of their opening."""
    tensors = tensors_of(outline)
    numbers = sorted({tensor.group for tensor in tensors})
    return [Group(number, tuple(tensor for tensor in tensors if tensor.group == number)) for number in numbers]


def total_bytes(outline: Outline) -> int:
    """Bytes of all tensors in float32."""
    return BYTES_FP32 * sum(tensor.numel for tensor in tensors_of(outline))


def low_ratio(outline: Outline, low: Low) -> float:
    """The share of numbers in low tensors."""
    tensors = tensors_of(outline)
    return sum(t.numel for t in tensors if t.key in low) / sum(t.numel for t in tensors)


def memory_factor(ratio: float) -> float:
    """How many times smaller than float32 all tensors are, in 16 bits and 8.

    >>> memory_factor(0.0), memory_factor(1.0)
    (2.0, 4.0)
    """
    return 4 / (2 - ratio)


# --- orders -----------------------------------------------------------------------------------------------------------


def decreasing(groups: Sequence[Group], seed: int) -> list[Group]:
    """The largest first: the paper's own."""
    return sorted(groups, key=lambda group: (-group.numel, group.number))


def increasing(groups: Sequence[Group], seed: int) -> list[Group]:
    """The smallest first."""
    return sorted(groups, key=lambda group: (group.numel, group.number))


def shuffled(groups: Sequence[Group], seed: int) -> list[Group]:
    """By chance."""
    return random.Random(seed).sample(list(groups), len(groups))


ORDERS: dict[str, Callable[[Sequence[Group], int], list[Group]]] = {
    "decreasing": decreasing,
    "increasing": increasing,
    "random": shuffled,
}


def demote(outline: Outline, ratio: float, *, order: str = "decreasing", seed: int = 0) -> Low:
    """The tensors of the fewest groups in this order that reach `ratio`; of all groups where none do."""
    if order not in ORDERS or not 0 <= ratio <= 1:
        raise PlanError(f"demote takes a ratio in 0..1 and an order of {', '.join(ORDERS)}; found {ratio} and {order!r}.")
    groups = ORDERS[order](groups_of(outline), seed)
    needed = ratio * sum(group.numel for group in groups)
    low: set[tuple[Role, str]] = set()
    reached = 0
    for group in groups:
        if reached >= needed:
            break
        low |= _lowered(group.tensors)
        reached += sum(tensor.numel for tensor in group.tensors if tensor.may_be_low)
    return frozenset(low)


def demote_top(outline: Outline, count: int) -> Low:
    """The tensors of the `count` largest groups."""
    groups = decreasing(groups_of(outline), 0)[:count]
    return frozenset(key for group in groups for key in _lowered(group.tensors))


def _lowered(tensors: Iterable[Counted]) -> set[tuple[Role, str]]:
    return {tensor.key for tensor in tensors if tensor.may_be_low}
