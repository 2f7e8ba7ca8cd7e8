"""A plan from a text of the command line: a preset, several of different roles, a file, or formats by role.

>>> len(read_plan("lpmm+activations4").rules)
5

>>> read_plan("activation=int4/64@bf16,weight=int8/64@e8m0").rules[0][0]
'weight'
>>> read_plan("activation4")  # doctest: +ELLIPSIS
Traceback (most recent call last):
    ...
paredown.errors.PlanError: there is no plan 'activation4': give a file, a preset (activations8, ...), or role=format,... Closest: ...
"""

from __future__ import annotations

from pathlib import Path

from paredown.errors import PlanError
from paredown.plan.keys import closest
from paredown.plan.plan import Plan
from paredown.plan.presets import PRESETS
from paredown.search.below import combined

AS_WRITTEN = "as_written"


def read_plan(text: str) -> Plan:
    """The plan that `text` names."""
    if text == AS_WRITTEN:
        return Plan()
    if text and all(name in PRESETS for name in text.split("+")):
        return combined(text.split("+")) if "+" in text else Plan.preset(text)
    if "=" in text and not Path(text).exists():
        return _by_role(text)
    if not Path(text).is_file():
        names = (*PRESETS, AS_WRITTEN)
        raise PlanError(
            f"there is no plan {text!r}: give a file, a preset ({', '.join(names)}), or role=format,... Closest: {closest(text, names)}."
        )
    return Plan.load(text)


def _by_role(text: str) -> Plan:
    formats: dict[str, str] = {}
    for part in text.split(","):
        role, sign, format = (piece.strip() for piece in part.partition("="))
        if not sign or not format or role in formats:
            raise PlanError(
                f"{part!r} in plan {text!r} cannot be read: it is role=format, once a role, such as activation=int4/64@bf16."
            )
        formats[role] = format
    return Plan.uniform(**formats)  # type: ignore[arg-type]


def name_of(text: str) -> str:
    """A plan's name in a table: a preset's, a file's without its folder."""
    return text if "=" in text or text in PRESETS else Path(text).name
