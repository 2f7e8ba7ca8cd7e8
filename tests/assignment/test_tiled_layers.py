"""`assign` runs layers in tiles where no other plan fits; measured peaks are within the budget."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from paredown.assignment.assign import assign
from paredown.assignment.tiled_layers import tiled_steps
from paredown.errors import BudgetError
from paredown.plan.footprint import footprint
from paredown.plan.plan import Plan
from paredown.plan.trace import Trace
from paredown.sizes import say_bytes
from tests.plan.test_tiled_trace import BEFORE, network, real_bytes, trace_of

LAYERS = tuple((f"layers.{number}", 256) for number in range(3))


def smallest(trace: Trace, *, recompute: bool | None) -> int:
    with pytest.raises(BudgetError) as found:
        assign(trace, "1%", recompute=recompute)
    assert found.value.smallest_bytes is not None
    return found.value.smallest_bytes


def test_tiles_are_the_last_choice(tmp_path: Path) -> None:
    trace = trace_of(network())
    without, least = smallest(replace(trace, token_modules=()), recompute=None), smallest(trace, recompute=None)
    assert least < without and smallest(trace, recompute=False) >= without
    budget = (least + without) // 2
    with pytest.raises(BudgetError):
        assign(trace, budget, recompute=False)
    plan = assign(trace, budget)
    foot = footprint(trace, plan)
    assert plan.tiles == LAYERS and foot.peak_bytes <= budget and "over pieces of 256 tokens" in plan.reason
    assert say_bytes(footprint(trace).peak_bytes) in plan.reason
    before = sum(foot.by_role.get(role, 0) for role in BEFORE)
    assert real_bytes(network(), plan, 2, tmp_path) + before <= 1.01 * budget
    assert not assign(trace, int(1.01 * without)).tiles


def test_lengths_and_rules() -> None:
    trace = trace_of(network())
    ((step, rules),) = tiled_steps(trace)
    assert rules == LAYERS
    plan = Plan().recomputing("layers.*")
    assert footprint(step, plan).peak_bytes == footprint(trace, plan.tiling(*(path for path, _ in LAYERS), length=256)).peak_bytes
