"""Errors of plans, by themselves and against the slots of a model: each states what, where, what is allowed and what to do."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given

from paredown.errors import PlanError
from paredown.plan.plan import Plan
from paredown.plan.presets import PRESETS
from paredown.plan.selectors import Selector, slot_key
from paredown.plan.storage import UNMODIFIED, Assignment
from paredown.roles import FORMATTED, Role
from tests.plan.plans import keys, plan_of
from tests.support.strategies import examples

A, W, G = Role.ACTIVATION, Role.WEIGHT, Role.GRADIENT

# --- what a plan refuses: what is asked, and what the message has to say
PLAN = Plan.uniform(activation="int8").set("layer3.*", "int4")
REFUSED: list[tuple[Any, list[str]]] = [
    (lambda: PLAN.set("", None), ["key ''", "a role (activation)"]),
    (lambda: PLAN.set(" activation", None), ["' activation'", "without spaces"]),
    (lambda: PLAN.set(3, None), ["key 3"]),  # type: ignore[arg-type]
    (lambda: PLAN.set("activations", None), ["did you mean 'activation'?", "'weight=activations'"]),
    (lambda: PLAN.set("WEIGHT", None), ["did you mean 'weight'?"]),
    (lambda: PLAN.set("wieght=a.*", None), ["'wieght' is no role", "Did you mean 'weight'?", "moment1, moment2"]),
    (lambda: PLAN.set("x=y:input", None), ["'x' is no role", "'activation=x=y:input'"]),
    (lambda: PLAN.set("weight=", None), ["no name after '='", "'weight=*'"]),
    (lambda: PLAN.set("buffer", None), ["have no format", "weight, frozen, gradient"]),
    (lambda: PLAN.set("temporary=a.*", None), ["have no format"]),
    (lambda: PLAN.set("a.*", "int4/64"), ["rule 'a.*'", "write int4/64@bf16", "None stores the tensor unmodified"]),
    (lambda: PLAN.set("a.*", "mxfp5"), ["rule 'a.*'", "'mxfp5'", "Similar names in the catalog: mxfp4"]),
    (lambda: PLAN.set("a.*", 4), ["rule 'a.*'", "not int"]),  # type: ignore[arg-type]
    (lambda: PLAN.set("a.*", "int4", rounding="up"), ["rule 'a.*'", "rounding 'up'", "toward_zero, nearest_away, stochastic"]),
    (lambda: PLAN.set("a.*", "int4", overflow="wrap"), ["rule 'a.*'", "overflow 'wrap'", "saturate, nonfinite"]),
    (lambda: PLAN.set("a.*", None, rounding="stochastic"), ["rule 'a.*'", "unmodified", "leave rounding and overflow out"]),
    (lambda: PLAN.without("layer4.*"), ["no rule 'layer4.*'", "Closest of 2: 'layer3.*'"]),
    (lambda: Plan().without("layer4.*"), ["no rule 'layer4.*'", "has none"]),
    (lambda: Plan.uniform(activations="int8"), ["'activations' is no role", "'activation'"]),  # type: ignore[call-arg]
    (lambda: Plan.uniform(input="int8"), ["have no format"]),  # type: ignore[call-arg]
    (lambda: Plan.uniform(weight="int99"), ["rule 'weight'", "int99"]),
    (lambda: Plan.preset("int8"), ["'int8'", *PRESETS]),
    (lambda: Plan((("activation", "int8"),)), ["(key, Assignment)", "set(key, format)"]),  # type: ignore[arg-type]
    (lambda: Plan(3), ["(key, Assignment)"]),  # type: ignore[arg-type]
    (lambda: Plan(made_for={"a": {1}}), ["JSON", "set"]),
    (lambda: Assignment("int8"), ["format 'int8'", "Assignment.parse"]),  # type: ignore[arg-type]
    (lambda: Assignment(None, "up"), ["rounding 'up'", "Assignment.parse"]),  # type: ignore[arg-type]
]


@pytest.mark.parametrize(("ask", "said"), REFUSED, ids=range(len(REFUSED)))
def test_errors_name_rule_and_remedy(ask: Any, said: list[str]) -> None:
    with pytest.raises(PlanError) as caught:
        ask()
    assert [part for part in said if part not in str(caught.value)] == []
    assert str(caught.value).endswith(".")


# --- a plan and the slots of a model
SLOTS = [
    (("layer1.0.conv1:input",), A),
    (("layer1.0.relu:result", "layer1.0.conv2:input"), A),
    (("layer3.0.conv1:input",), A),
    (("fc.weight",), W),
    (("fc.weight",), G),
    (("bn.running_mean",), Role.BUFFER),
]


@pytest.mark.parametrize(
    ("keys", "missing"),
    [
        ([], []),
        (["activation", "moment1"], []),
        (["layer1.*", "layer1.0.conv2:input", "weight=fc.*", "gradient=fc.weight"], []),
        (["layer1.0.conv1:input", "layer9.0.conv1:input", "moment1=fc.weight"], ["layer9.0.conv1:input", "moment1=fc.weight"]),
        (["layer1.*", "layer9.0.conv1:input"], ["layer9.0.conv1:input"]),
    ],
)
def test_check_lists_names_of_no_slot(keys: list[str], missing: list[str]) -> None:
    assert plan_of(*((key, "int8") for key in keys)).check(iter(SLOTS)) == missing


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (
            ["activation", "layr3.*:input"],
            ["pattern 'layr3.*:input' matches no slot", "'layer3.0.conv1:input'", "plan.without('layr3.*:input')"],
        ),
        (["weight=layer3.*"], ["pattern 'weight=layer3.*'", "Closest of 1 weight slot name: 'fc.weight'"]),
        (["moment1=fc.*"], ["The model has no moment1 slots"]),
        (["bn.*"], ["pattern 'bn.*' matches no slot"]),  # a buffer gets no format
        (
            ["activation", "layer3.0.conv:input"],
            ["names slot 'layer3.0.conv:input'", "Closest of 5 slot names: 'layer3.0.conv1:input'"],
        ),
        (["x.y:input", "x.z:input"], ["names 2 slots, 'x.y:input' the first"]),
        (["moment1=fc.weight"], ["names slot 'moment1=fc.weight'", "no moment1 slot"]),
    ],
)
def test_check_refuses_patterns_without_a_slot_and_plans_without_one_in_common(keys: list[str], said: list[str]) -> None:
    plan = plan_of(*((key, "int8") for key in keys))
    with pytest.raises(PlanError) as caught:
        plan.check(SLOTS)
    assert [part for part in said if part not in str(caught.value)] == []


def test_a_plan_of_another_model_says_what_it_was_made_for() -> None:
    plan = replace(plan_of(("x.y:input", "int8")), made_for={"model": "unet"})
    with pytest.raises(PlanError, match=r'made for {"model": "unet"}'):
        plan.check(SLOTS)


@pytest.mark.parametrize(
    "name", ["fc.weight", "fc:input", "weight", "activations", "a=b:input", "a[0]:input", ":linear.input", "pos"]
)
@pytest.mark.parametrize("role", FORMATTED)
def test_the_key_of_a_slot_matches_it_alone(name: str, role: Role) -> None:
    plan = plan_of((slot_key(name, role), "int8"))
    assert plan.check([((name,), role)]) == []
    named = {
        A,
        W,
        Role.FROZEN,
    }  # a name without a role matches all of them, and a key of the role weight matches frozen weights too
    others = [other for other in FORMATTED if other is not role and (role is Role.FROZEN or not {other, role} <= named)]
    assert [other for other in (role, *others) if plan.find((name,), other) != UNMODIFIED] == [role]


@given(text=keys())
@examples(200)
def test_text_of_a_key_round_trips(text: str) -> None:
    assert str(Selector.parse(text)) == text
