"""Plans that are made for each task, by a text that says how: `assign 40% role`.

Columns of a prior and sweeps have them where plans by role have formats. The plan of a recipe has it in `made_for`; recipes that come to
the same plan on a task share it there.

>>> Recipe.parse("assign 40% role")
Recipe(budget='40%', method='role')
>>> Recipe.parse("by magic")
Traceback (most recent call last):
    ...
paredown.errors.PlanError: recipe 'by magic' cannot be read; it is 'assign BUDGET METHOD', such as 'assign 40% role'.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from paredown.errors import PlanError
from paredown.plan.plan import Plan
from paredown.plan.record import Trace
from paredown.search.assign import assign
from paredown.search.earlier import PlanRow
from paredown.search.search import method_named

RECIPE = "recipe"  # the word in `made_for`
BETWEEN = "; "


@dataclass(frozen=True)
class Recipe:
    """`assign` with a budget, a share of the step as it is written or bytes, and a method."""

    budget: str
    method: str = "role"

    def __post_init__(self) -> None:
        method_named(self.method)

    @staticmethod
    def parse(text: str) -> Recipe:
        """The recipe that `str` gives."""
        parts = text.split()
        if len(parts) != 3 or parts[0] != "assign":
            raise PlanError(f"recipe {text!r} cannot be read; it is 'assign BUDGET METHOD', such as 'assign 40% role'.")
        return Recipe(*parts[1:])

    def __str__(self) -> str:
        return f"assign {self.budget} {self.method}"

    def make(self, trace: Trace) -> Plan:
        """The plan for this step."""
        plan = assign(trace, self.budget, method=self.method)
        return replace(plan, made_for={**plan.made_for, RECIPE: str(self)})


def make_plans(recipes: Iterable[Recipe], trace: Trace) -> list[Plan]:
    """The plans of recipes for one step; those that say the same are one, with all of its recipes."""
    found: dict[object, Plan] = {}
    for plan in (recipe.make(trace) for recipe in recipes):
        key = plan.rules, plan.recompute
        told = [str(one.made_for[RECIPE]) for one in (found.get(key), plan) if one is not None]
        found[key] = replace(plan, made_for={**plan.made_for, RECIPE: BETWEEN.join(told)})
    return list(found.values())


def recipes_of(plan: Plan) -> list[str]:
    """The recipes that came to this plan."""
    told = plan.made_for.get(RECIPE, "")
    return told.split(BETWEEN) if isinstance(told, str) and told else []


def plan_of_row(row: PlanRow, trace: Trace) -> Plan:
    """The plan of a column, for this step."""
    return Recipe.parse(row.recipe).make(trace) if row.plan is None else Plan.from_json(row.plan)
