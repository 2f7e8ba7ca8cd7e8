"""Plans: which slots a rule matches, which rule wins, edits, differences and printing."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from dataclasses import FrozenInstanceError, replace
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paredown.formats.catalog import CATALOG
from paredown.formats.format import Format
from paredown.formats.rounding import Overflow, Rounding
from paredown.plan.plan import Plan
from paredown.plan.presets import PRESETS
from paredown.plan.selectors import SelectorIndex
from paredown.plan.storage import UNMODIFIED, Assignment
from paredown.roles import FORMATTED, Role
from tests.plan.plans import plan_of
from tests.support.strategies import examples

A, W, G = Role.ACTIVATION, Role.WEIGHT, Role.GRADIENT


def format_of(plan: Plan, names: tuple[str, ...], role: Role) -> str | None:
    """The text of the format that a slot gets."""
    format = plan.find(names, role).format
    return str(format) if format else None


# --- which rule wins: rules in order, a slot, and its format by the definition
PRECEDENCE: list[tuple[list[tuple[str, str | None]], tuple[str, ...], Role, str | None]] = [
    ([], ("a.b:input",), A, None),
    ([("activation", "int8")], ("a.b:input",), A, "int8"),
    ([("weight", "int8")], ("a.b:input",), A, None),
    ([("a.*", "int4"), ("activation", "int8")], ("a.b:input",), A, "int4"),
    ([("a.b:input", "int2"), ("a.*", "int4"), ("activation", "int8")], ("a.b:input",), A, "int2"),
    ([("a.b:input", None), ("a.*", "int4"), ("activation", "int8")], ("a.b:input",), A, None),
    ([("a.*", "int4"), ("*:input", "int8")], ("a.b:input",), A, "int8"),
    ([("*:input", "int8"), ("a.*", "int4")], ("a.b:input",), A, "int4"),
    ([("*:input", "int8"), ("a.*", None)], ("a.b:input",), A, None),
    ([("activation=a.*", "int4"), ("a.*", "int8")], ("a.b:input",), A, "int8"),  # a role before a pattern does not make it stronger
    ([("a.*", "int8"), ("activation=a.*", "int4")], ("a.b:input",), A, "int4"),
    ([("weight=a.*", "int4"), ("activation", "int8")], ("a.b:input",), A, "int8"),
    ([("b:input", "int4"), ("activation", "int8")], ("a:input", "b:input"), A, "int4"),  # any saver's name
    ([("a:input", "int4"), ("b:input", "int8")], ("b:input", "a:input"), A, "int8"),  # two names: the last rule wins
    ([("b:in*", "int4"), ("a:input", "int8")], ("a:input", "b:input"), A, "int8"),
    ([("fc.weight", "int8")], ("fc.weight",), W, "int8"),
    ([("fc.weight", "int8")], ("fc.weight",), G, None),  # a name without a role matches the weight
    ([("gradient=fc.weight", "int8")], ("fc.weight",), G, "int8"),
    ([("gradient=fc.weight", "int8")], ("gradient=fc.weight",), G, "int8"),
    ([("gradient=fc.weight", "int8")], ("fc.weight",), W, None),
    ([("fc.*", "int8")], ("fc.weight",), G, "int8"),  # a pattern without a role matches every role
    ([("weight", "int8"), ("weight=weight", "int4")], ("weight",), W, "int4"),  # a parameter that is called like a role
    ([("weight", "int8"), ("weight=weight", "int4")], ("bias",), W, "int8"),
    ([("a[0]:input", "int4"), ("*", "int8")], ("a[0]:input",), A, "int4"),  # a name with a bracket is a name
    ([("a[0]:input", "int4"), ("activation", "int8")], ("a0:input",), A, "int4"),  # and a pattern
    ([("layer?.x:input", "int4")], ("layer3.x:input",), A, "int4"),
    ([("layer?.x:input", "int4")], ("layer33.x:input",), A, None),
    ([("LAYER3*", "int4")], ("layer3.x:input",), A, None),  # patterns are case-sensitive
    ([("layer3.*", "int4")], ("layer3x.y:input",), A, None),  # a dot matches a dot only
    ([("*", "int4")], ("running_mean",), Role.BUFFER, None),
    ([("*", "int4")], ("x",), Role.INPUT, None),
    ([("*", "int4")], ("t",), Role.TEMPORARY, None),
]


@pytest.mark.parametrize(("rules", "names", "role", "expected"), PRECEDENCE)
def test_precedence(rules: list[tuple[str, str | None]], names: tuple[str, ...], role: Role, expected: str | None) -> None:
    plan = plan_of(*rules)
    assert format_of(plan, names, role) == expected
    assert format_of(plan, names, role) == expected, "the second look-up comes from memory"
    assert format_of(Plan.from_json(plan.to_json()), names, role) == expected


NAMES = ("a.x:input", "a.y:input", "b.x:input")
SPEAKS_OF = {"a.*": {0, 1}, "*.x:input": {0, 2}, "*": {0, 1, 2}, "a.x:input": {0}, "b.x:input": {2}, "activation": {0, 1, 2}}
TIERS = ({"a.x:input", "b.x:input"}, {"a.*", "*.x:input", "*"}, {"activation"})


@pytest.mark.parametrize("count", range(1, 5))
def test_every_order_of_a_few_rules(count: int) -> None:
    for keys in permutations(SPEAKS_OF, count):
        widths = {key: f"int{2 + place}" for place, key in enumerate(keys)}
        plan = plan_of(*widths.items())
        for place, name in enumerate(NAMES):
            speaking = [[key for key in keys if key in tier and place in SPEAKS_OF[key]] for tier in TIERS]
            winner = next((tier[-1] for tier in speaking if tier), None)
            assert format_of(plan, (name,), A) == (widths[winner] if winner else None), (keys, name)


def test_setting_a_pattern_again_writes_it_last() -> None:
    plan = plan_of(("a.*", "int4"), ("*.x:input", "int8"))
    assert format_of(plan, ("a.x:input",), A) == "int8"
    assert format_of(plan.set("a.*", "int2"), ("a.x:input",), A) == "int2"


def test_names_may_come_as_a_list_or_alone() -> None:
    plan = plan_of(("a.x:input", "int4"))
    assert plan.find(["a.x:input"], A) == plan.find("a.x:input", A) == plan.find(("a.x:input",), A) == Assignment.parse("int4")


# --- memory of look-ups
def test_each_plan_caches_its_own_lookups() -> None:
    plan = plan_of(("activation", "int8"))
    assert format_of(plan, ("a:input",), A) == "int8"
    assert format_of(plan, ("a:input",), Role.ERROR) is None, "the role is part of the question"
    assert format_of(plan.set("activation", "int4"), ("a:input",), A) == "int4"
    assert format_of(plan.without("activation"), ("a:input",), A) is None
    assert format_of(replace(plan, rules=()), ("a:input",), A) is None
    assert format_of(Plan(), ("a:input",), A) is None
    assert format_of(plan, ("a:input",), A) == "int8"


def test_a_slot_is_searched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    plan, asked = plan_of(("activation", "int8")), list[object]()
    search = SelectorIndex.best
    monkeypatch.setattr(SelectorIndex, "best", lambda *args: asked.append(args[1:]) or search(*args))
    for _ in range(3):
        plan.find(("a:input",), A)
        plan.find(("a:input",), W)
    assert asked == [(("a:input",), A), (("a:input",), W)]


def test_copies_and_pickles_are_equal_and_work() -> None:
    plan = replace(Plan.preset("activations4").set("a.*", "mxfp4"), made_for={"batch": [16, 1024]})
    plan.find(("a.b:input",), A)
    for again in (pickle.loads(pickle.dumps(plan)), copy.copy(plan), copy.deepcopy(plan)):
        assert again == plan and hash(again) == hash(plan) and again is not plan
        assert again.find(("a.b:input",), A) == plan.find(("a.b:input",), A)
        assert again.made_for is not plan.made_for


# --- equality
def test_plans_with_the_same_effect_are_equal() -> None:
    one = Plan.uniform(activation="int4/64@bf16", weight="mxfp4")
    other = Plan.uniform(weight=Format.parse("e2m1fn/32@e8m0")).set("activation", CATALOG["int4_block"])
    assert one == other and len({one, other}) == 1
    assert Plan.uniform() == Plan.uniform(activation=None) == Plan() != Plan().set("activation", None)
    assert one != replace(one, reason="because") and one != replace(one, made_for={"batch": 1})
    assert plan_of(("a.*", "int4"), ("*.b", "int8")) != plan_of(("*.b", "int8"), ("a.*", "int4")), "the order of patterns counts"
    assert one != one.set("activation", "int4/64@bf16", rounding="nearest_even")


def test_a_plan_is_frozen() -> None:
    given = {"model": "net"}
    plan = Plan(made_for=given)
    given["model"] = "other"
    assert plan.made_for == {"model": "net"}
    with pytest.raises(FrozenInstanceError):
        plan.reason = "x"  # type: ignore[misc]


# --- assignments
@pytest.mark.parametrize(
    ("format", "expected"),
    [
        ("int4/64@bf16", "stochastic"),
        ("uint2/64@bf16+bf16", "stochastic"),
        ("int7", "stochastic"),
        ("nf4", "stochastic"),
        ("int8/64@bf16", "nearest_even"),
        ("e4m3fn", "nearest_even"),
        ("bf16", "nearest_even"),
    ],
)
def test_the_default_rounding_depends_on_the_width_but_for_activations(format: str, expected: str) -> None:
    """Activations are not carried to the next step, so that errors of the same sign do not add up there."""
    assert Assignment.parse(format).rounding_in(Role.MOMENT1) is Rounding(expected)
    assert Assignment.parse(format).resolved_rounding is Rounding.NEAREST_EVEN
    for rounding in Rounding:
        assert Assignment.parse(format, rounding).resolved_rounding is rounding


def test_uniform_gives_each_role_its_format() -> None:
    texts: dict[str, Any] = {role.value: f"int{8 + place}/64@bf16" for place, role in enumerate(FORMATTED)}
    plan = Plan.uniform(**texts, rounding="toward_zero", overflow=Overflow.SATURATE)
    for role in FORMATTED:
        expected = Assignment(Format.parse(texts[role.value]), Rounding.TOWARD_ZERO, Overflow.SATURATE)
        assert plan.find(("any:input",), role) == expected
    assert Plan.uniform(activation="nvfp4").find(("x",), A) == Assignment(CATALOG["nvfp4"])
    assert plan.find(("running_mean",), Role.BUFFER) == UNMODIFIED


def test_edits_make_the_next_plan() -> None:
    plan = Plan.uniform(activation="int8")
    edited = replace(plan.set("a.*", "int4", rounding="nearest_away", overflow="nonfinite"), reason="tried")
    assert edited.find(("a.b:input",), A) == Assignment(Format.parse("int4"), Rounding.NEAREST_AWAY, Overflow.NONFINITE)
    assert edited.without("a.*") == replace(plan, reason="tried") and plan.rules == Plan.uniform(activation="int8").rules
    assert plan.set(Role.ACTIVATION, "int4") == Plan.uniform(activation="int4")


def test_rules_for_frozen_weights() -> None:
    """A rule for frozen beats one for weight, whatever their order; names and patterns of either beat both; trained weights ignore it."""
    plan = Plan.uniform(frozen="nf4/64@bf16", weight="int8/64@e8m0").set("weight=head.*", None).set("frozen=a.*", "int4/64@bf16")
    plan = plan.set("b.weight", "e4m3fn/64@bf16")
    found = {name: str(plan.find((f"{name}.weight",), Role.FROZEN)) for name in ("x", "head", "a", "b")}
    assert found == {"x": "nf4/64@bf16", "head": "unmodified", "a": "int4/64@bf16", "b": "e4m3fn/64@bf16"}
    trained = {name: str(plan.find((f"{name}.weight",), W)) for name in ("x", "head", "a", "b")}
    assert trained == {"x": "int8/64@e8m0", "head": "unmodified", "a": "int8/64@e8m0", "b": "e4m3fn/64@bf16"}
    assert str(Plan.uniform(weight="int8/64@e8m0").find(("x.weight",), Role.FROZEN)) == "int8/64@e8m0"
    assert Plan.from_json(plan.to_json()) == plan
    assert "frozen: nf4/64@bf16, 4.25 bits a value, rounding to nearest" in plan.explain().splitlines()


FROZEN_BITS = {"frozen8": 8.25, "frozen4": 4.25}
EIGHT = ("activations8", "activations8f", "fp8", "int8_products", "auto_products")
BITS = {**dict.fromkeys(EIGHT, 8.25), "activations4": 5.0, "activations4a": 4.5, "activations2": 2.5}
BYTES = {"safe": 6.09, "fine_tune": 6.02, "half": 5.09, "lpmm": 4.11, "lpmm4": 3.11}  # a parameter, with AdamW


def test_presets() -> None:
    assert {*BITS, *FROZEN_BITS, *BYTES} == PRESETS.keys()
    for name in PRESETS:
        plan = Plan.preset(name)
        format = plan.find(("x:input",), A).format
        assert (format and format.bits_per_value) == BITS.get(name)
        frozen = plan.set("weight", None).find(("x.weight",), Role.FROZEN).format
        assert (frozen and frozen.bits_per_value) == FROZEN_BITS.get(name)
        assert name in plan.reason and plan.diff(Plan.uniform(**PRESETS[name].formats)) == ()


@pytest.mark.parametrize("name", BYTES)
def test_tiers_take_the_bytes_of_their_formats(name: str) -> None:
    plan = Plan.preset(name)
    formats = [a.format for _, a in plan.rules if a.format is not None]
    assert sum(format.bits_per_value for format in formats) / 8 == pytest.approx(BYTES[name], abs=0.006)
    roundings = {key: a.rounding_in(Role(key)).value for key, a in plan.rules}
    assert roundings["gradient"] == roundings["weight"] == roundings["moment2"] == "stochastic"


# --- printing
def test_diff_names_each_rule_that_differs() -> None:
    one = Plan.uniform(activation="int4/64@bf16", weight="int8").set("a.*", None)
    other = Plan.uniform(activation="int4/64@bf16", weight="int4").set("b.*", "int2", rounding="stochastic")
    assert one.diff(other) == (
        ("weight", Assignment.parse("int8"), Assignment.parse("int4")),
        ("a.*", UNMODIFIED, None),
        ("b.*", None, Assignment.parse("int2", "stochastic")),
    )
    assert str(one.diff(other)) == "weight: int8 -> int4\na.*: unmodified -> no rule\nb.*: no rule -> int2, stochastic"
    assert str(one.diff(one)) == "no difference"


def test_diff_reports_patterns_in_another_order() -> None:
    one, other = plan_of(("a.*", "int4"), ("*.b", "int8")), plan_of(("*.b", "int8"), ("a.*", "int4"))
    assert str(one.diff(other)) == "a.*: int4, in another order\n*.b: int8, in another order"


FEW_RULES = st.lists(st.tuples(st.sampled_from(list(SPEAKS_OF)), st.sampled_from(["int4", "int8"])), unique_by=lambda rule: rule[0])


@given(one=FEW_RULES, other=FEW_RULES)
@examples(200)
def test_there_is_no_difference_only_between_equal_rules(one: list[tuple[str, str]], other: list[tuple[str, str]]) -> None:
    mine, theirs = plan_of(*one), replace(plan_of(*other), reason="another reason is no difference")
    rows = mine.diff(theirs)
    assert (rows == ()) == (mine.rules == theirs.rules)
    assert {(row.key, row.theirs, row.mine) for row in rows} == set(theirs.diff(mine))
    unlike = {key for key in {*dict(one), *dict(other)} if dict(one).get(key) != dict(other).get(key)}
    assert {row.key for row in rows if row.mine != row.theirs} == unlike


def test_explain_is_a_line_for_each_rule() -> None:
    plan = (
        Plan.uniform(activation="int4/64@bf16", weight="uint1")
        .set("gradient=fc.*", "e4m3fn", overflow="saturate")
        .set("a.b:input", None)
    )
    assert replace(plan, reason="Smallest that fits.").explain().splitlines() == [
        "Smallest that fits.",
        "weight: uint1, 1 bit a value, stochastic rounding",
        "activation: int4/64@bf16, 4.25 bits a value, rounding to nearest",
        "gradient slots like 'fc.*': e4m3fn, 8 bits a value, stochastic rounding, larger values become the largest",
        "slot 'a.b:input': unmodified",
        "Everything else is unmodified.",
    ]
    assert Plan().explain() == "Everything is unmodified."


def test_repr_is_short() -> None:
    assert repr(Plan()) == "Plan(): everything unmodified"
    assert repr(Plan.uniform(activation="int8")) == "Plan(1 rule)\n  activation  int8"
    assert repr(Plan.uniform(activation="int8").set("a.*", None)) == "Plan(2 rules)\n  activation  int8\n  a.*         unmodified"
    long = repr(plan_of(*((f"layer{k}.x:input", "int8") for k in range(100)))).splitlines()
    assert len(long) == 22 and long[-1] == "  ... 80 more"


def test_html_is_escaped() -> None:
    html = replace(plan_of(("<b>.x:input", "int8")), reason="a < b & c")._repr_html_()
    assert "<b>" not in html and "&lt;b&gt;.x:input" in html and "a &lt; b &amp; c" in html
    assert html.count("<tr>") == html.count("</tr>") == 2
    assert "80 more" in plan_of(*((f"layer{k}.x:input", "int8") for k in range(100)))._repr_html_()


def test_plans_need_no_torch() -> None:
    code = "import sys; from paredown.plan import plan; import paredown.sizes; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": str(Path(__file__).parents[2] / "src")}).returncode == 0
