"""Plans for tests: from a few rules, and hypothesis strategies for any."""

from __future__ import annotations

from hypothesis import strategies as st

from paredown.formats.rounding import Overflow, Rounding
from paredown.plan.plan import Plan
from paredown.plan.storage import UNMODIFIED, Assignment
from paredown.roles import FORMATTED
from tests.support.strategies import formats


def plan_of(*rules: tuple[str, str | None]) -> Plan:
    """A plan with these rules, in this order."""
    return Plan(tuple((key, Assignment.parse(text)) for key, text in rules))


@st.composite
def assignments(draw: st.DrawFn) -> Assignment:
    """A strategy for any assignment."""
    if draw(st.integers(0, 4)) == 0:
        return UNMODIFIED
    rounding, overflow = draw(st.sampled_from([None, *Rounding])), draw(st.sampled_from([None, *Overflow]))
    return Assignment.parse(draw(formats()), rounding, overflow)


def keys() -> st.SearchStrategy[str]:
    """Roles, names and patterns, with a role in front or without."""
    roles = st.sampled_from([role.value for role in FORMATTED])
    names = st.text(alphabet="ab.:*?[]@#\u00e9\"'<", min_size=1, max_size=8).map(lambda text: f"{text}.w")
    return st.one_of(roles, names, st.builds("{}={}".format, roles, names))


def plans() -> st.SearchStrategy[Plan]:
    """A strategy for any plan."""
    values = st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(), st.lists
    )
    rules = st.lists(st.tuples(keys(), assignments()), max_size=6, unique_by=lambda rule: rule[0]).map(tuple)
    modules = st.lists(st.text(min_size=1), max_size=3).map(tuple)
    slots = st.one_of(st.booleans(), modules)
    return st.builds(Plan, rules, st.text(), st.dictionaries(st.text(), values, max_size=3), modules, slots)
