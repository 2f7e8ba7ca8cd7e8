"""The ways that bench_assign compares: which plan a run has, by which method, levels and budget.

A share is that of the saving that is possible with two levels: the budget lies so far between the peak with all activations at the
high level and the peak with all at the low one. All methods get the same budget in predicted bytes. `size` stands for the published
rule, which knows no pins: traces and sessions are then made without them.
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
from paredown.plan import ops
from paredown.plan.footprint import peak_of
from paredown.plan.ops import Use
from paredown.plan.replay import choices
from paredown.roles import Role
from paredown.search.layers import repeated_layers

LEVELS: dict[str, tuple[str | None, ...]] = {
    "int8/int2": ("int8/64@bf16", "int2/64@bf16"),
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
    for levels in ("int8/int2", "bf16/e4m3"):
        for share in SHARES[levels == "bf16/e4m3" :]:  # the least with one of them alone
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
        Way("checkpointing as int4", plan="checkpointing as int4"),
        Way("role as checkpointing", "role", "any", plan="checkpointing"),
        Way("e4m3 unscaled", plan="e4m3fn", is_loud=True),
        Way("e4m3 unscaled, guarded", plan="e4m3fn", guard=True, is_loud=True),
        Way("int2 without pins", plan="int2/64@bf16", has_pins=False),
        Way("int2 without pins, guarded", plan="int2/64@bf16", guard=True, has_pins=False),
    )
}
TIMED = ("full", "uniform int4", "checkpointing as int4", "checkpointing", "role as checkpointing", "sensitivity int4/int2 50%")


@contextmanager
def without_pins() -> Iterator[None]:
    """What backward does with a slot is not looked at: for comparisons with rules that do not."""
    before = dict(ops.ROWS)
    try:
        for name, row in before.items():
            ops.ROWS[name] = replace(row, operands={key: replace(operand, pin=None) for key, operand in row.operands.items()})
        ops.row_of.cache_clear()
        yield
    finally:
        ops.ROWS.update(before)
        ops.row_of.cache_clear()


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
        return pare.trace_step(self.model, self.batch, autocast=torch.bfloat16, **keywords)

    @property
    def part(self) -> tuple[Tensor, Tensor]:
        """A part of the batch, to probe with: nothing is packed meanwhile, and the peak is to stay where it is."""
        num = max(len(self.batch[0]) // 32, 1)
        return self.batch[0][:num], self.batch[1][:num]

    def probed(self, way: Way) -> pare.Sensitivities:
        """Sensitivities of the model as it is now."""
        formats = [level for level in LEVELS[way.levels] if level not in (None, "bf16")]
        return pare.probe(self.model, self.part, self.trace, loss=self.task.loss, formats=formats)

    def budget(self, way: Way) -> int:
        """The bytes that a way may take at its peak."""
        if way.plan == "checkpointing":
            return peak_of(self.trace, self.checkpointing)
        pinned = self.pinned or self.trace
        high, low = (peak_of(pinned, pare.Plan.uniform(activation=LEVELS[way.levels][i])) for i in (0, -1))
        return int(high - (1.0 if way.share is None else way.share) * (high - low))

    @cached_property
    def checkpointing(self) -> pare.Plan:
        """Every layer is computed again in backward, and nothing is packed."""
        return pare.Plan((), recompute=LAYERS[self.name])

    @cached_property
    def checkpointing_as_int4(self) -> pare.Plan:
        """As few layers computed again as bring the peak to that of 4 bits everywhere; all of them where they do not."""
        budget, layers = peak_of(self.trace, pare.Plan.uniform(activation="int4/64@bf16")), repeated_layers(self.trace)
        plans = [pare.Plan((), recompute=tuple(layers[:num])) for num in range(1, len(layers) + 1)]
        return next((plan for plan in plans if peak_of(self.trace, plan) <= budget), plans[-1])

    def plan(self, way: Way, sensitivities: pare.Sensitivities | None, seed: int) -> pare.Plan:
        """The plan of a way."""
        if not way.method:
            fixed = {"checkpointing": self.checkpointing, "checkpointing as int4": self.checkpointing_as_int4}
            return fixed[way.plan] if way.plan in fixed else pare.Plan.uniform(activation=way.plan or None)
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


def low_share(trace: pare.Trace, plan: pare.Plan, low: str | None) -> float | None:
    """The share of the values that could be at the low level which are."""
    if low is None:
        return None
    wanted = pare.Format.parse(low)
    found = choices(trace, plan)
    slots = [slot for slot in trace.activations if not slot.stays and Use.VALUE in slot.uses]
    total = sum(slot.numel for slot in slots)
    return sum(slot.numel for slot in slots if found[slot.name].format == wanted) / total if total else 0.0
