"""What a plan is called in a table, the level it belongs to, and its features: numbers that tell plans apart.

>>> row = row_of(Plan.uniform(activation="int4/64@bf16", weight="bf16"))
>>> row_of(Plan.uniform(activation="int4/64@bf16", **TIERS["lpmm"])).label, row.label, row.features["activation"]
('int4/64@bf16, lpmm', '2 rules, 02432e', 4.25)
>>> row_of(Plan()).label
'as written'

Features are bits a value by role, 32 where a plan says nothing of it; of PEPPP's configurations also exponent and mantissa bits of the low
format. Plans that name single slots have the roles that they give a format to everywhere.
"""

from __future__ import annotations

import hashlib
import re

from paredown.formats.tiers import TIERS
from paredown.plan.plan import Plan
from paredown.roles import Role
from paredown.search.earlier import PlanRow
from paredown.search.peppp import parse_peppp

PLAIN_BITS = 32.0
ROLES = (Role.ACTIVATION, Role.ERROR, Role.WEIGHT, Role.GRADIENT, Role.MOMENT1, Role.MOMENT2, Role.MASTER)
PEPPP = re.compile(r"(e\d+m\d+)b\d+fns")


def row_of(plan: Plan) -> PlanRow:
    """The column of a plan."""
    given = {key: str(assignment.format) for key, assignment in plan.rules if assignment.format is not None}
    low, high = (PEPPP.fullmatch(given.get(role, "")) for role in ("weight", "master"))
    if low and high:
        return PlanRow(f"{low[1]} {high[1]}", plan.to_json(), "", low[1], _peppp_features(low[1], high[1]))
    return PlanRow(_label(plan, given), plan.to_json(), "", "", _features(plan))


def recipe_row(recipe: str) -> PlanRow:
    """The column of a recipe, whose plans differ from task to task; its feature is the budget's share."""
    share = re.search(r"([\d.]+)%", recipe)
    return PlanRow(recipe, None, recipe, "", {"budget": float(share[1]) / 100} if share else {})


def _label(plan: Plan, given: dict[str, str]) -> str:
    if plan.changes_nothing:
        return "as written"
    state = {key: text for key, text in given.items() if key != "activation"}
    tier = next((name for name, formats in TIERS.items() if dict(formats) == state), None)
    if tier is None or len(given) != len(plan.rules) or plan.recompute:
        told = hashlib.sha256(repr((plan.rules, plan.recompute)).encode()).hexdigest()[:6]
        return f"{len(plan.rules)} rules, {told}"
    return f"{given.get('activation', 'as it is')}, {tier}"


def _features(plan: Plan) -> dict[str, float]:
    of_role = {key: assignment.format for key, assignment in plan.rules}
    formats = {role.value: of_role.get(role.value) for role in ROLES}
    return {role: PLAIN_BITS if format is None else format.bits_per_value for role, format in formats.items() if role != "master"}


def _peppp_features(low: str, high: str) -> dict[str, float]:
    narrow, wide = parse_peppp(low), parse_peppp(high)
    lows = dict.fromkeys(("activation", "error", "weight", "gradient"), 1.0 + sum(narrow))
    highs = dict.fromkeys(("master", "moment1"), 1.0 + sum(wide))
    finer = {"exponent": float(narrow[0]), "mantissa": float(narrow[1])}
    return {**lows, **highs, **finer, "wide_exponent": float(wide[0]), "wide_mantissa": float(wide[1])}
