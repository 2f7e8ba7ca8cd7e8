"""The ways that bench_assign compares: which plan a run has, by which method, levels and budget.

A share is that of the bytes of activations that are at the low of two levels. It makes a budget: the peak that there is when the largest
are lowered one by one, pins kept, until so many bytes are low. All methods get that budget. `size` stands for the published rule, which
knows no pins: traces and sessions are then made without them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from assign_tasks import LAYERS, RULES
from torch import Tensor, nn
from train_activations import Task

import paredown as pare
from paredown.assignment.assignment_problem import AssignmentProblem, ladder_of
from paredown.assignment.strategies import METHODS as ASSIGN_METHODS
from paredown.autograd import operations
from paredown.autograd.operations import Use
from paredown.plan.byte_intervals import slot_storages
from paredown.plan.footprint import peak_of
from paredown.roles import Role

LEVELS: dict[str, tuple[str | None, ...]] = {
    "int8/uint2": ("int8/64@bf16", "uint2/64@bf16+bf16"),  # two bits with an offset: four levels, where int2 has three
    "bf16/e4m3": ("bf16", "e4m3fn/64@bf16"),
    "int4/int2": ("int4/64@bf16", "uint2/64@bf16+bf16"),
    "any": (None, "int8/64@bf16", "int4/64@bf16", "uint2/64@bf16+bf16"),
}
SHARES = (0.25, 0.5, 1.0)
METHODS = ("size", "size+pins", "random", "role", "sensitivity")
BLIND = pare.Limits(error=1e30, jump=1e30, gradient_jump=1e30)  # a guard that probes anew, and does nothing else


@dataclass(frozen=True)
class Way:
    """One way. `method` "" has a fixed plan; `guard`: whether one watches; `is_loud`: pictures of large numbers."""

    name: str
    method: str = ""
    levels: str = ""
    share: float | None = None
    plan: str = ""  # a uniform format, "checkpointing", or what the method's budget is taken of
    guard: bool = False
    is_loud: bool = False
    has_pins: bool = True


def _mixed() -> Iterator[Way]:
    for levels in ("int8/uint2", "bf16/e4m3"):
        for share in SHARES:
            for method in METHODS:
                at = f"{share:.0%}" if share < 1 else "most"
                yield Way(f"{method} {levels} {at}", method, levels, share, has_pins=method != "size")


WAYS = {
    way.name: way
    for way in (
        Way("full"),
        *_mixed(),
        *(Way(f"uniform {name}", plan=text) for name, text in (("int4", "int4/64@bf16"), ("int2", "uint2/64@bf16+bf16"))),
        *(Way(f"{method} int4/int2 50%", method, "int4/int2", 0.5) for method in ("role", "sensitivity")),  # the lowest peaks
        Way("checkpointing", plan="checkpointing"),
        Way("role as checkpointing", "role", "any", plan="checkpointing"),
        Way("e4m3 unscaled", plan="e4m3fn", is_loud=True),
        Way("e4m3 unscaled, guarded", plan="e4m3fn", guard=True, is_loud=True),
        Way("int2 without pins", plan="int2/64@bf16", has_pins=False),
        Way("int2 without pins, guarded", plan="int2/64@bf16", guard=True, has_pins=False),
    )
}
MIXED = ("full", *(way.name for way in _mixed()))  # what gradients are compared of


@contextmanager
def without_pins() -> Iterator[None]:
    """What backward does with a slot is not looked at: for comparisons with rules that do not."""
    before = dict(operations.ROWS)
    try:
        for name, row in before.items():
            operations.ROWS[name] = replace(
                row, operands={key: replace(operand, pin=None) for key, operand in row.operands.items()}
            )
        operations.row_of.cache_clear()
        yield
    finally:
        operations.ROWS.update(before)
        operations.row_of.cache_clear()


@dataclass(frozen=True, eq=False)
class Planner:
    """Plans for one model on one device."""

    name: str  # of the task
    task: Task
    model: nn.Module
    batch: tuple[Tensor, Tensor]
    device: str
    pinned: pare.Trace | None = None  # the trace with pins, where this planner has none: budgets are the same

    @cached_property
    def trace(self) -> pare.Trace:
        """The step that is trained."""
        keywords: dict[str, Any] = {"loss": self.task.loss, "optimizer": RULES[self.name], "device": self.device}
        found = pare.trace_step(self.model, self.batch, autocast=torch.bfloat16, **keywords)
        return replace(found, device="cuda")  # budgets of a GPU, where packing takes no scratch memory, in quick runs too

    @property
    def part(self) -> tuple[Tensor, Tensor]:
        """An eighth of the batch, to probe with; guards use as much of it as fits the budget."""
        num = max(len(self.batch[0]) // 8, 1)
        return self.batch[0][:num], self.batch[1][:num]

    def probed(self, way: Way) -> pare.Sensitivities:
        """Sensitivities of the model in its current state."""
        formats = [level for level in LEVELS[way.levels] if level not in (None, "bf16")]
        return pare.probe(self.model, self.part, self.trace, loss=self.task.loss, formats=formats)

    def budget(self, way: Way) -> int:
        """The bytes that a way may take at its peak."""
        if way.plan == "checkpointing":
            return peak_of(self.trace, self.checkpointing)
        pinned, low = self.pinned or self.trace, LEVELS[way.levels][-1]
        if way.share is None or way.share >= 1:
            return peak_of(pinned, pare.Plan.uniform(activation=low))
        return size_peak(pinned, LEVELS[way.levels], way.share)

    @cached_property
    def checkpointing(self) -> pare.Plan:
        """Every layer is checkpointed, and nothing is packed."""
        return pare.Plan((), recompute=LAYERS[self.name])

    def plan(self, way: Way, sensitivities: pare.Sensitivities | None, seed: int) -> pare.Plan:
        """The plan of a way."""
        if not way.method:
            return self.checkpointing if way.plan == "checkpointing" else pare.Plan.uniform(activation=way.plan or None)
        method, levels = way.method.removesuffix("+pins"), LEVELS[way.levels]
        return pare.assign(self.trace, self.budget(way), method=method, sensitivities=sensitivities, levels=levels, seed=seed)

    def guard(self, way: Way, plan: pare.Plan, sensitivities: pare.Sensitivities | None) -> pare.Guard | None:
        """One that watches, one that only probes anew, or none."""
        if way.guard:
            budget = (peak_of(self.trace, plan) + peak_of(self.trace, pare.Plan())) // 2
            return pare.Guard(self.trace, budget, limits=pare.Limits(every=8))
        if sensitivities is None:
            return None
        limits = replace(BLIND, levels=LEVELS[way.levels])
        return pare.Guard(self.trace, self.budget(way), sensitivities, limits, self.part, self.task.loss)


def kept_bytes(trace: pare.Trace, plan: pare.Plan) -> int:
    """Bytes of activations that wait for backward, predicted."""
    return pare.footprint(trace, plan).by_role.get(Role.ACTIVATION, 0)


def size_peak(trace: pare.Trace, levels: tuple[str | None, ...], share: float) -> int:
    """The peak when the largest activations were lowered one by one until a share of the bytes is low."""
    search = AssignmentProblem.of(trace, ASSIGN_METHODS["size"], ladder=ladder_of(levels))
    low = ladder_of(levels)[-1]
    for point in sorted(search.points, key=lambda point: point.error):
        formats = {name: format for (name, _), format in search.formats(point).items()}
        if _share(trace, {name for name, format in formats.items() if format == low}) >= share:
            return point.peak_bytes
    return search.smallest.peak_bytes


def low_share(trace: pare.Trace, plan: pare.Plan, low: str | None) -> float | None:
    """The share of the bytes that could be at the low level which are."""
    if low is None:
        return None
    wanted, found = pare.Format.parse(low), slot_storages(trace, plan)
    return _share(trace, {name for name, choice in found.items() if choice.format == wanted})


def _share(trace: pare.Trace, names: set[str]) -> float:
    """Of the bytes of activations whose values matter in the baseline, those of `names`; a storage counts once."""
    slots = [slot for slot in trace.activations if not slot.stays and Use.VALUE in slot.uses]
    total = {slot.storage: slot.nbytes for slot in slots}
    lowered = {slot.storage: slot.nbytes for slot in slots if slot.name in names}
    return sum(lowered.values()) / sum(total.values()) if total else 0.0
