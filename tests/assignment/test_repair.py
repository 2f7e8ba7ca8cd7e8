"""Repairs by arithmetic: within the budget whatever is asked for, raised by one level, while others that cost least are lowered."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paredown.assignment.assign import assign
from paredown.assignment.repair import LEVELS, RepairedPlan, RepairTerms, bits_per_value, repair, replan
from paredown.assignment.sensitivity import Sensitivities
from paredown.errors import BudgetError
from paredown.formats.format import Format
from paredown.plan.byte_intervals import slot_storages
from paredown.plan.footprint import footprint, peak_of
from paredown.plan.plan import Plan
from paredown.plan.trace import Trace
from paredown.roles import Role
from tests.predict.steps import traced

INT8, INT4, INT2 = "int8/64@bf16", "int4/64@bf16", "uint2/64@bf16+bf16"
PLANS = {
    "int8": Plan.uniform(activation=INT8),
    "int4": Plan.uniform(activation=INT4, weight="int8/64@e8m0", moment1=INT8),
    "low": Plan.uniform(activation=INT2),
    "unscaled": Plan.uniform(activation="e4m3fn"),
}


@cache
def trace_of(name: str) -> Trace:
    return traced(name, optimizer="adamw")


@cache
def packed(name: str, plan: str) -> list[str]:
    """Slots that are stored in a format."""
    return [slot for slot, chosen in slot_storages(trace_of(name), PLANS[plan]).items() if chosen.format is not None]


def formats(trace: Trace, plan: Plan) -> dict[str, Format | None]:
    return {name: chosen.format for name, chosen in slot_storages(trace, plan).items()}


def assert_sound(trace: Trace, plan: Plan, found: RepairedPlan, budget_bytes: int, keeps: set[str]) -> None:
    """What holds of every repair, by the real footprint and the real choices."""
    assert footprint(trace, found.plan).peak_bytes <= budget_bytes
    before, after = formats(trace, plan), formats(trace, found.plan)
    moved = {move.slot: (move.before, move.after) for move in found.moves}
    assert moved == {name: (before[name], after[name]) for name in before if before[name] != after[name]}
    assert all(bits_per_value(after[name]) >= bits_per_value(before[name]) for name in keeps)
    for role in (Role.WEIGHT, Role.MOMENT1, Role.MOMENT2, Role.GRADIENT):
        for slot in trace.of(role):
            assert found.plan.find((slot.name,), role) == plan.find((slot.name,), role)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_holds_the_budget_whatever_is_raised(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(["resnet18", "gpt"]))
    key = data.draw(st.sampled_from(sorted(PLANS)))
    trace, plan, slots = trace_of(name), PLANS[key], packed(name, key)
    raised = data.draw(st.lists(st.sampled_from(slots), max_size=5, unique=True))
    keeps = set(data.draw(st.lists(st.sampled_from(slots), max_size=5)))
    slack = data.draw(st.integers(0, 1 << 18))
    budget = peak_of(trace, plan) + slack
    found = repair(plan, RepairTerms(trace, budget), raised=raised, keeps=keeps)
    assert_sound(trace, plan, found, budget, keeps | set(found.raised))
    before, after = formats(trace, plan), formats(trace, found.plan)
    assert (*found.raised, *found.refused) == tuple(raised)
    assert all(bits_per_value(after[slot]) > bits_per_value(before[slot]) for slot in found.raised)
    if not raised:
        assert found.plan == plan and not found.moves


@pytest.mark.parametrize("name", ["resnet18", "gpt"])
def test_raises_by_one_level(name: str) -> None:
    trace, plan = trace_of(name), PLANS["int4"]
    free = [s for s in packed(name, "int4") if trace.slot(s).pin is None and not trace.slot(s).recomputed_from]
    slot = next(s for s in free if not any(saver.is_centered for saver in trace.slot(s).savers))
    found = repair(plan, RepairTerms(trace, peak_of(trace, Plan())), raised=[slot])
    assert formats(trace, found.plan)[slot] == Format.parse(INT8)
    again = repair(found.plan, RepairTerms(trace, peak_of(trace, Plan())), raised=[slot])
    assert formats(trace, again.plan)[slot] == LEVELS[1]
    last = repair(again.plan, RepairTerms(trace, peak_of(trace, Plan())), raised=[slot])
    assert formats(trace, last.plan)[slot] is None
    assert repair(last.plan, RepairTerms(trace, peak_of(trace, Plan())), raised=[slot]).moves == (), "it is at the top"


@pytest.mark.parametrize("payer", ["layers.0.mlp.1:input", "layers.0.norm2:input", "layers.0.norm1:input"])
def test_the_least_sensitive_are_lowered(payer: str) -> None:
    trace, plan, slots = (
        replace(trace_of("gpt"), device="cuda"),
        PLANS["int4"],
        packed("gpt", "int4"),
    )  # no scratch of the CPU codec
    family = {slot for slot in slots if slot == payer or trace.slot(slot).recomputed_from == payer}
    errors = {
        slot: {INT8: 1e-9, INT4: 1e-8, INT2: 1e-7} if slot in family else {INT8: 1e-4, INT4: 1e-2, INT2: 1.0} for slot in slots
    }
    raised = "layers.0.norm1:input" if payer != "layers.0.norm1:input" else "layers.0.norm2:input"
    found = repair(plan, RepairTerms(trace, peak_of(trace, plan), Sensitivities(errors)), raised=[raised])
    assert found.raised == (raised,)
    assert payer in {move.slot for move in found.moves if bits_per_value(move.after) < bits_per_value(move.before)}


def test_refuses_what_no_other_slot_can_free() -> None:
    trace, plan = trace_of("gpt"), PLANS["low"]
    peak = peak_of(trace, plan)
    at_peak = [slot for slot in packed("gpt", "low") if peak_of(trace, plan.set(f"activation={slot}", None)) > peak]
    found = repair(plan, RepairTerms(trace, peak), raised=at_peak)
    assert found.refused and found.refused == tuple(at_peak[len(found.raised) :])
    assert peak_of(trace, found.plan) <= peak


@pytest.mark.parametrize("name", ["resnet18", "gpt"])
@pytest.mark.parametrize("key", ["int8", "int4"])
def test_replan_improves_within_the_budget(name: str, key: str) -> None:
    trace, plan = trace_of(name), PLANS[key]
    budget = peak_of(trace, plan)
    found = replan(plan, RepairTerms(trace, budget))
    assert_sound(trace, plan, found, budget, set())
    again = replan(found.plan, RepairTerms(trace, budget))
    assert again.moves == (), "a second call changes nothing"
    keeps = set(packed(name, key)[:3])
    kept = replan(plan, RepairTerms(trace, budget), keeps=keeps)
    assert_sound(trace, plan, kept, budget, keeps)


def test_a_plan_of_assign_is_unmodified() -> None:
    trace = trace_of("gpt")
    plan = assign(trace, "75%", levels=(None, "bf16", INT8, INT4, INT2))
    assert replan(plan, RepairTerms(trace, peak_of(trace, plan))).moves == ()


def test_says_that_the_plan_is_over_the_budget() -> None:
    trace = trace_of("gpt")
    with pytest.raises(BudgetError, match="the plan to repair needs"):
        repair(PLANS["int8"], RepairTerms(trace, 1000), raised=[])
    with pytest.raises(BudgetError, match="the plan to repair needs"):
        replan(PLANS["int8"], RepairTerms(trace, 1000))


def test_names_that_are_no_slots_are_passed_over() -> None:
    trace, plan = trace_of("gpt"), PLANS["int8"]
    found = repair(plan, RepairTerms(trace, peak_of(trace, plan)), raised=["no slot"], keeps={"no other slot"})
    assert found.plan == plan and not found.moves and not found.raised


def test_follows_a_plan_that_recomputes() -> None:
    trace = trace_of("gpt")
    plan = Plan((), recompute=("layers.0",)).set("activation", INT4)
    budget = peak_of(trace, plan)
    slots = [slot for slot in packed("gpt", "int4") if slot.startswith("layers.1.mlp")]
    found = repair(plan, RepairTerms(trace, budget + (1 << 16)), raised=slots)
    assert found.plan.recompute == ("layers.0",)
    assert peak_of(trace, found.plan) <= budget + (1 << 16)
