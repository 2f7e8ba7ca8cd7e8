"""A sweep from a TOML file.

name = "widths"
tasks = ["digits", "my_tasks.py:small"]      # files lie beside this one
seeds = [0, 1, 2]
method = "uniform"                           # full (the default), uniform, cheap_first
share = 0.2
mode = "store"                               # or simulate
timeout_seconds = 3600
store = "trials.db"                          # unless --store or PAREDOWN_STORE says otherwise

[[plans]]                                    # the step as it is written
[[plans]]
preset = "lpmm"
[[plans]]
file = "plan.json"
[[plans]]                                    # lists are crossed: 2 x 1 plans
activation = ["int4/64@bf16", "int8/64@bf16"]
weight = "int8/64@e8m0"
rounding = "stochastic"
[[plans]]                                    # made for each task: its own formats, slot by slot
assign = ["40%", "60%"]
method = ["role", "size"]
[[plans]]                                    # PEPPP's configurations, for model=sumlast18 and mode = "peppp"
peppp_low = ["e4m3", "e5m2"]
peppp_high = ["e6m7", "e8m11"]
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from difflib import get_close_matches
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from paredown.errors import ParedownError, SweepError
from paredown.plan.plan import Plan
from paredown.runs.sweep import Settings, Sweep
from paredown.search.peppp import parse_peppp, peppp_plan
from paredown.search.recipe import Recipe, make_plans

LARGEST = 1 << 24  # bytes of a file
DOTTED = re.compile(r"""(?:(?:[\w-]{1,99}|"[^"\n]{0,99}"|'[^'\n]{0,99}')[ \t]*\.[ \t]*){100}""")
SETTINGS = tuple(row.name for row in fields(Settings))
PLAIN = tuple(row.name for row in fields(Sweep) if row.name not in ("plans", "settings", "pairs"))
KINDS: dict[str, tuple[type, ...]] = {
    "name": (str,),
    "tasks": (list,),
    "seeds": (list,),
    "method": (str,),
    "share": (int, float),
    "draw_seed": (int,),
    "mode": (str,),
    "device": (str,),
    "timeout_seconds": (int, float),
    "plans": (list,),
    "store": (str,),
}
MEMBERS: dict[str, type] = {"tasks": str, "seeds": int, "plans": dict}


class SweepFile(NamedTuple):
    """What a file says: the sweep, the store if it names one, and the folder of its tasks."""

    sweep: Sweep
    store: str | None
    folder: Path


def load_sweep(path: str | Path) -> SweepFile:
    """The sweep of a TOML file; SweepError says what is wrong, and in which line or table."""
    path = Path(path)
    try:
        return _read(_parsed(path), path)
    except FileNotFoundError:
        raise SweepError(f"there is no sweep {path}.") from None
    except ParedownError as error:
        raise SweepError(f"{path}: {error}") from None
    except (OSError, ValueError, RecursionError) as error:  # ValueError: no UTF-8, no TOML, a number of thousands of digits
        raise SweepError(f"{path} cannot be read: {str(error)[:300]}.") from None


def _parsed(path: Path) -> dict[str, Any]:
    """The TOML of a file; a few bytes could keep the parser busy for hours: keys of many parts take it the square of their number."""
    if path.stat().st_size > LARGEST:
        raise SweepError(f"it has {path.stat().st_size} bytes; a sweep has at most {LARGEST}.")
    text = path.read_text(encoding="utf-8")
    if DOTTED.search(text):
        raise SweepError("it has a key of more than a hundred parts; a sweep's keys have one.")
    return tomllib.loads(text)


def _read(value: dict[str, Any], path: Path) -> SweepFile:
    for word, part in value.items():
        _check(word, part)
    missing = [word for word in ("tasks", "plans") if word not in value]
    if missing:
        raise SweepError(f"{missing[0]} is missing; a sweep needs tasks and plans.")
    folder = path.resolve().parent
    made = [one for i, table in enumerate(value["plans"], 1) for one in _plans(table, folder, i)]
    plans, recipes = tuple(p for p in made if isinstance(p, Plan)), [r for r in made if isinstance(r, Recipe)]
    plain: dict[str, Any] = {"name": path.stem} | {word: value[word] for word in PLAIN if word in value}
    settings = Settings(**{word: value[word] for word in SETTINGS if word in value})
    sweep = Sweep(**plain, plans=plans, settings=settings)
    if recipes:
        pairs = tuple((task, plan) for task in sweep.tasks for plan in _made(task, recipes, folder, settings.device))
        known = {(plan.rules, plan.recompute) for plan in plans}
        sweep = replace(sweep, pairs=tuple((t, p) for t, p in pairs if (p.rules, p.recompute) not in known))
    return SweepFile(sweep, _beside(value.get("store"), folder), folder)


def _made(task: str, recipes: list[Recipe], folder: Path, device: str | None) -> list[Plan]:
    """What recipes come to on a task, traced for the device where its trials run."""
    from paredown.runs.traced import trace_of  # torch takes seconds, and sweeps without recipes need none here

    try:
        return make_plans(recipes, trace_of(task, folder, device))
    except ParedownError as error:
        raise SweepError(f"task {task!r}: {error}") from None


def _check(word: str, value: Any) -> None:
    if word not in KINDS:
        hint = f" Did you mean {close[0]!r}?" if (close := get_close_matches(word, KINDS, 1)) else ""
        raise SweepError(f"{word!r} is unknown.{hint} Allowed: {', '.join(KINDS)}.")
    if not isinstance(value, KINDS[word]) or isinstance(value, bool):
        raise SweepError(f"{word} is of type {KINDS[word][-1].__name__}, not {type(value).__name__}.")
    if word in MEMBERS and not all(isinstance(part, MEMBERS[word]) and not isinstance(part, bool) for part in value):
        raise SweepError(f"{word} is a list of {MEMBERS[word].__name__} alone, not {value!r}.")


def _plans(table: dict[str, Any], folder: Path, number: int) -> Sequence[Plan | Recipe]:
    """The plans of one [[plans]] table: a preset, a file, recipes, or every combination of the formats of its roles."""
    try:
        for word, (make, others) in SOURCES.items():
            if word in table:
                if unknown := sorted(set(table) - {word, *others}):
                    beside = f"goes with {', '.join(others)} alone" if others else "stands alone"
                    raise SweepError(f"{word} {beside}; leave out {', '.join(unknown)}.")
                return make(table, folder)
        return [Plan.uniform(**choice) for choice in _crossed(table)]
    except (ParedownError, OSError, TypeError, ValueError) as error:
        raise SweepError(f"plan {number} of the file: {error}") from None


def _crossed(table: dict[str, Any]) -> list[dict[str, Any]]:
    """Every combination of what stands in lists."""
    choices = [value if isinstance(value, list) else [value] for value in table.values()]
    return [dict(zip(table, choice, strict=True)) for choice in product(*choices)]


def _recipes(table: dict[str, Any], folder: Path) -> list[Recipe]:
    return [Recipe(str(one["assign"]), one.get("method", "role")) for one in _crossed(table)]


def _peppp(table: dict[str, Any], folder: Path) -> list[Plan]:
    words = ("peppp_low", "peppp_high")
    if missing := [word for word in words if word not in table]:
        raise SweepError(f"{missing[0]} is missing; a configuration of PEPPP has a low format and a high one.")
    chosen = [[one[word] for word in words] for one in _crossed({word: table[word] for word in words})]
    return [peppp_plan(*(parse_peppp(text) for text in pair)) for pair in chosen]


Make = Callable[[dict[str, Any], Path], Sequence[Plan | Recipe]]
SOURCES: dict[str, tuple[Make, tuple[str, ...]]] = {  # word: what it makes, and the words that go with it
    "preset": (lambda table, folder: [Plan.preset(table["preset"])], ()),
    "file": (lambda table, folder: [Plan.load(folder / table["file"])], ()),
    "assign": (_recipes, ("method",)),
    "peppp_low": (_peppp, ("peppp_high",)),
}


def _beside(store: str | None, folder: Path) -> str | None:
    """A path is meant from the file's folder; a URL is itself."""
    return store if store is None or "://" in store else str(folder / store)
