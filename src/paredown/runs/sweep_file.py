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
"""

from __future__ import annotations

import tomllib
from dataclasses import fields
from difflib import get_close_matches
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from paredown.errors import ParedownError, SweepError
from paredown.plan.plan import Plan
from paredown.runs.sweep import Settings, Sweep

SETTINGS = tuple(row.name for row in fields(Settings))
PLAIN = tuple(row.name for row in fields(Sweep) if row.name not in ("plans", "settings"))
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
        return _read(tomllib.loads(path.read_text(encoding="utf-8")), path)
    except FileNotFoundError:
        raise SweepError(f"there is no sweep {path}.") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise SweepError(f"{path} cannot be read: {error}.") from None
    except ParedownError as error:
        raise SweepError(f"{path}: {error}") from None


def _read(value: dict[str, Any], path: Path) -> SweepFile:
    for word, part in value.items():
        _check(word, part)
    missing = [word for word in ("tasks", "plans") if word not in value]
    if missing:
        raise SweepError(f"{missing[0]} is missing; a sweep needs tasks and plans.")
    folder = path.resolve().parent
    plans = tuple(plan for i, table in enumerate(value["plans"], 1) for plan in _plans(table, folder, i))
    plain: dict[str, Any] = {"name": path.stem} | {word: value[word] for word in PLAIN if word in value}
    settings = Settings(**{word: value[word] for word in SETTINGS if word in value})
    sweep = Sweep(**plain, plans=plans, settings=settings)
    return SweepFile(sweep, _beside(value.get("store"), folder), folder)


def _check(word: str, value: Any) -> None:
    if word not in KINDS:
        hint = f" Did you mean {close[0]!r}?" if (close := get_close_matches(word, KINDS, 1)) else ""
        raise SweepError(f"{word!r} is unknown.{hint} Allowed: {', '.join(KINDS)}.")
    if not isinstance(value, KINDS[word]) or isinstance(value, bool):
        raise SweepError(f"{word} is of type {KINDS[word][-1].__name__}, not {type(value).__name__}.")
    if word in MEMBERS and not all(isinstance(part, MEMBERS[word]) and not isinstance(part, bool) for part in value):
        raise SweepError(f"{word} is a list of {MEMBERS[word].__name__} alone, not {value!r}.")


def _plans(table: dict[str, Any], folder: Path, number: int) -> list[Plan]:
    """The plans of one [[plans]] table: a preset, a file, or every combination of the formats of its roles."""
    sources = {"preset": Plan.preset, "file": lambda name: Plan.load(folder / name)}
    try:
        for word, make in sources.items():
            if word in table:
                if len(table) > 1:
                    raise SweepError(f"{word} stands alone; leave out {', '.join(sorted(set(table) - {word}))}.")
                return [make(table[word])]
        choices = [value if isinstance(value, list) else [value] for value in table.values()]
        return [Plan.uniform(**dict(zip(table, choice, strict=True))) for choice in product(*choices)]
    except (ParedownError, OSError, TypeError) as error:
        raise SweepError(f"plan {number} of the file: {error}") from None


def _beside(store: str | None, folder: Path) -> str | None:
    """A path is meant from the file's folder; a URL is itself."""
    return store if store is None or "://" in store else str(folder / store)
