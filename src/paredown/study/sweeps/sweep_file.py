"""`load_sweep` reads a sweep from a TOML file:

name = "widths"
tasks = ["digits", "my_tasks.py:small"]      # files in the folder of this one
seeds = [0, 1, 2]
method = "uniform"                           # full (the default), uniform, cheap_first
share = 0.2
mode = "store"                               # or simulate
timeout_seconds = 3600
store = "trials.db"                          # --store and PAREDOWN_STORE replace it

[[plans]]                                    # the baseline
[[plans]]
preset = ["lpmm", "activations4"]            # a plan each; or one text
[[plans]]
file = "plan.json"
label = "mine"                               # its name in status, exports and pages; a list where a table makes several plans
[[plans]]                                    # all combinations of lists: 2 x 1 plans
activation = ["int4/64@bf16", "int8/64@bf16"]
weight = "int8/64@e8m0"
rounding = "stochastic"
[[plans]]                                    # made for each task: formats slot by slot
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

from paredown.assignment.assign import PlanTemplate, make_plans
from paredown.errors import BudgetError, ParedownError, SweepError
from paredown.plan.plan import Plan
from paredown.study.sweeps.sweep import InfeasiblePair, Sweep, TrialSettings

MAX_FILE_BYTES = 1 << 24
DOTTED = re.compile(r"""(?:(?:[\w-]{1,99}|"[^"\n]{0,99}"|'[^'\n]{0,99}')[ \t]*\.[ \t]*){100}""")
SETTINGS = tuple(row.name for row in fields(TrialSettings))
PLAIN = tuple(row.name for row in fields(Sweep) if row.name not in ("plans", "settings", "pairs", "labels"))
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
    """Says what a sweep file has: the sweep, the address of a database (None if it names none), the folder of the tasks."""

    sweep: Sweep
    store: str | None
    folder: Path


def load_sweep(path: str | Path) -> SweepFile:
    """Return the sweep of a TOML file; SweepError names the line or table with an error."""
    path = Path(path)
    try:
        return _read(_parsed(path), path)
    except FileNotFoundError:
        raise SweepError(f"there is no sweep file {path}.") from None
    except ParedownError as error:
        raise SweepError(f"{path}: {error}") from None
    except (OSError, ValueError, RecursionError) as error:  # ValueError: not UTF-8, not TOML, or a number of thousands of digits
        raise SweepError(f"{path} cannot be read: {str(error)[:300]}.") from None


def _parsed(path: Path) -> dict[str, Any]:
    """Return the parsed TOML of a file; raise an error for very long dotted keys, which tomllib parses slowly."""
    if path.stat().st_size > MAX_FILE_BYTES:
        raise SweepError(f"it has {path.stat().st_size} bytes; a sweep file has at most {MAX_FILE_BYTES}.")
    text = path.read_text(encoding="utf-8")
    if DOTTED.search(text):
        raise SweepError("it has a dotted key of more than a hundred parts; keys of a sweep have one part.")
    return tomllib.loads(text)


def _read(value: dict[str, Any], path: Path) -> SweepFile:
    for word, part in value.items():
        _check(word, part)
    missing = [word for word in ("tasks", "plans") if word not in value]
    if missing:
        raise SweepError(f"{missing[0]} is missing; a sweep needs tasks and plans.")
    folder = path.resolve().parent
    entries, labels = _entries(value["plans"], folder)
    plans, templates = tuple(p for p in entries if isinstance(p, Plan)), [t for t in entries if isinstance(t, PlanTemplate)]
    plain: dict[str, Any] = {"name": path.stem} | {word: value[word] for word in PLAIN if word in value}
    settings = TrialSettings(**{word: value[word] for word in SETTINGS if word in value})
    shared = plans or (
        (Plan(),) if templates else ()
    )  # mistakes of other kinds are found before tasks are traced, which takes time
    sweep = Sweep(**plain, plans=shared, settings=settings, labels=labels)
    if templates:
        made = [(task, _plans_of_templates(task, templates, folder, settings.device)) for task in sweep.tasks]
        known = {plan.key for plan in plans}
        pairs = tuple((task, plan) for task, (of_task, _) in made for plan in of_task if plan.key not in known)
        sweep = replace(sweep, plans=plans, pairs=pairs, infeasible=tuple(pair for _, (_, without) in made for pair in without))
    store: str | None = value.get("store")
    return SweepFile(sweep, store if store is None or "://" in store else str(folder / store), folder)  # beside the file, or a URL


def _plans_of_templates(
    task: str, templates: list[PlanTemplate], folder: Path, device: str | None
) -> tuple[list[Plan], list[InfeasiblePair]]:
    """Return the plans that `assign` makes by `templates` for a task, traced on `device`, and the templates that fit no budget."""
    from paredown.study.tasks.lookup import (
        cached_task,  # importing torch takes seconds, and sweeps without templates need none here
    )
    from paredown.study.tasks.task_trace import trace_task

    infeasible: dict[PlanTemplate, InfeasiblePair] = {}

    def on_infeasible(template: PlanTemplate, error: BudgetError) -> None:
        infeasible[template] = InfeasiblePair(task, template, str(error))

    try:
        trace = trace_task(cached_task(task, folder), Plan.preset("lpmm"), device)
        return make_plans(templates, trace, on_infeasible=on_infeasible), list(infeasible.values())
    except ParedownError as error:
        raise SweepError(f"task {task!r}: {error}") from None


def _check(word: str, value: Any) -> None:
    if word not in KINDS:
        hint = f" Did you mean {close[0]!r}?" if (close := get_close_matches(word, KINDS, 1)) else ""
        raise SweepError(f"{word!r} is unknown.{hint} Allowed: {', '.join(KINDS)}.")
    if not isinstance(value, KINDS[word]) or isinstance(value, bool):
        raise SweepError(f"{word} must be of type {KINDS[word][-1].__name__}, not {type(value).__name__}.")
    if word in MEMBERS and not all(isinstance(part, MEMBERS[word]) and not isinstance(part, bool) for part in value):
        raise SweepError(f"{word} must be a list of {MEMBERS[word].__name__}, not {value!r}.")


Entry = Plan | PlanTemplate


def _entries(tables: list[dict[str, Any]], folder: Path) -> tuple[list[Entry], tuple[tuple[str, Entry], ...]]:
    entries: list[Entry] = []
    labels: list[tuple[str, Entry]] = []
    for number, table in enumerate(tables, 1):
        new = _plans({word: value for word, value in table.items() if word != "label"}, folder, number)
        entries += new
        if "label" in table:
            labels += zip(_table_labels(table["label"], len(new), number), new, strict=True)
    return entries, tuple(labels)


def _table_labels(value: Any, num_plans: int, number: int) -> list[str]:
    """Return `value`, the label of the file's [[plans]] table `number`, as a list of labels for its `num_plans` plans."""
    labels = value if isinstance(value, list) else [value]
    if len(labels) != num_plans:
        needs = f"a list of {num_plans} labels" if num_plans > 1 else "one label"
        raise SweepError(f"plan {number} of the file: label has {len(labels)} text{'s' * (len(labels) != 1)}; it needs {needs}.")
    return labels


def _plans(table: dict[str, Any], folder: Path, number: int) -> Sequence[Entry]:
    try:
        for word, (make, others) in SOURCES.items():
            if word in table:
                if unknown := sorted(set(table) - {word, *others}):
                    allowed = f"allows only {', '.join(others)} beside it" if others else "allows no other key"
                    raise SweepError(f"{word} {allowed}; leave out {', '.join(unknown)}.")
                return make(table, folder)
        return [Plan.uniform(**choice) for choice in _crossed(table)]
    except (ParedownError, OSError, TypeError, ValueError) as error:
        raise SweepError(f"plan {number} of the file: {error}") from None


def _crossed(table: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a table for every combination of the values in a table's lists; other values are in all of them."""
    choices = [value if isinstance(value, list) else [value] for value in table.values()]
    return [dict(zip(table, choice, strict=True)) for choice in product(*choices)]


def _names(table: dict[str, Any], word: str) -> list[str]:
    names = table[word] if isinstance(table[word], list) else [table[word]]
    if not names or not all(isinstance(name, str) for name in names):
        raise SweepError(f'{word} is a text or a list of texts, such as {word} = ["lpmm", "activations4"], not {table[word]!r}.')
    return names


def _peppp(table: dict[str, Any], folder: Path) -> list[Plan]:
    from paredown.simulate.peppp import parse_peppp, peppp_plan  # it imports torch, which other sweeps need in their trials alone

    words = ("peppp_low", "peppp_high")
    if missing := [word for word in words if word not in table]:
        raise SweepError(f"{missing[0]} is missing; a configuration of PEPPP has a low and a high format.")
    choices = _crossed({word: table[word] for word in words})
    return [peppp_plan(*(parse_peppp(choice[word]) for word in words)) for choice in choices]


Make = Callable[[dict[str, Any], Path], Sequence[Entry]]
SOURCES: dict[
    str, tuple[Make, tuple[str, ...]]
] = {  # key of a [[plans]] table: the function that makes its plans, and the keys that it allows beside it
    "preset": (lambda table, folder: [Plan.preset(name) for name in _names(table, "preset")], ()),
    "file": (lambda table, folder: [Plan.load(folder / name) for name in _names(table, "file")], ()),
    "assign": (
        lambda table, _: [PlanTemplate(str(row["assign"]), row.get("method", "role")) for row in _crossed(table)],
        ("method",),
    ),
    "peppp_low": (_peppp, ("peppp_high",)),
}
