"""Priors: what earlier tasks came to under which plans, as files that the package carries and files of the user's own.

    load("stored")       what users really run: formats in which tensors wait, on pictures and text
    load("simulated")    PEPPP's 99 configurations, arithmetic rounded, on pictures
    load("mine")         one of the user's own, made by `paredown prior add`
    load("file.json")    any file of this kind
    known("store")       the shipped one of this mode and all of the user's own, joined

Own priors lie in the folder that PAREDOWN_PRIORS names, else in ~/.local/share/paredown/priors. Nothing here needs torch.

Files of earlier tasks: JSON that says itself what it holds (ABOUT), checked when it is read.

Reading needs no torch, runs no code, and takes files of up to MOST_BYTES.

A prior that nobody measured, of the form of the shipped ones: for tests, and to try a picker before there is anything to learn from.

More bits are better until they no longer pay; what is known of the optimizer's formats is that they cost little. Half of the tasks
are of family "cnn", the others of "vit", "gpt" and "mlp".

>>> made_up_prior(3, 4)
PriorData(made_up: 3 tasks x 4 plans, store mode, 12 of 12 entries, 24 runs, noise 0.005 to 0.011)
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, fields, replace
from importlib import resources
from itertools import islice, product
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from paredown.errors import PriorError
from paredown.formats.catalog import TIERS
from paredown.pick.prior_data import Array, Mask, PlanRow, PriorData, TaskRow, join_priors, pooled_noise
from paredown.plan.plan import Plan
from paredown.plan.selectors import closest
from paredown.serial import read_bytes

__all__ = [
    "PlanRow",
    "PriorData",
    "TaskRow",
    "add",
    "available",
    "join_priors",
    "known_prior",
    "load",
    "made_up_prior",
    "pooled_noise",
    "remove",
]


VERSION = 2
FIRST = 1  # runs of a pair stood one after the other, whatever their seeds
MOST_BYTES = 64 * 2**20
MOST_RUNS = 1000  # of one pair: seeds of its task
MODES = ("store", "simulate")
FIELDS = (
    "about", "version", "name", "mode", "tasks", "plans", "runs", "seeds", "diverged", "memory", "measured", "propensity", "noise",
    "provenance",
)  # fmt: skip
NEEDED = ("version", "name", "mode", "tasks", "plans", "runs")
DIGITS = 6  # of an error
Row = TypeVar("Row", TaskRow, PlanRow)

ABOUT = {
    "about": "what the other fields are",
    "version": f"of this form of file: {VERSION}",
    "name, mode": "what the prior is called; store: tensors wait in their formats, simulate: arithmetic is rounded",
    "tasks": "name, family of the model, data, metric (error: share of wrong answers; loss: cross entropy), answers to choose from, "
    "blind: error of a blind guess, full_bytes: the step as it is written, steps of training, "
    "source: the prior it came with, text: the task as sweeps call it",
    "plans": "label; plan: JSON of a Plan, or recipe: how it is made for each task; level: plans of one level differ by noise alone, as "
    "far as is known; features: bits a value by role, and other numbers that tell plans apart",
    "runs": "for each task, for each plan, the errors of its runs, each in the place of its seed; null where that seed did not run, [] "
    "where nobody looked",
    "seeds": "of each task whether these places are known to be seeds; null: of all",
    "diverged": "how many of these diverged, and have the error of a blind guess",
    "memory, measured": "peak bytes, predicted and measured; null where they are not known",
    "propensity": "how likely the draw was to take the pair; null: certain, for all",
    "noise": "of each task: the deviation of one run about the mean of its plan, pooled over plans that ran more than once",
    "provenance": "for each collection: commit, device, versions, dates, sweep",
}


def write_prior(earlier: PriorData, path: Path, *, name: str | None = None) -> None:
    """Write a prior, a line for each task and plan; it appears whole or not at all."""
    text = prior_to_text(earlier if name is None else replace(earlier, name=name))
    _check_readable(text, path.name)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        part.write_text(text, encoding="utf-8", newline="\n")
        part.replace(path)
    except OSError as error:
        raise PriorError(f"{path.name} cannot be written: {error.strerror}.") from None
    finally:
        part.unlink(missing_ok=True)


def _check_readable(text: str, name: str) -> None:
    """What would not be read is not written."""
    try:
        _check_size(len(text.encode()), "it")
        prior_from_text(text)
    except PriorError as error:
        raise PriorError(f"{name} is not written, since it could not be read again: {error}") from None


def _check_size(size: int, what: str) -> None:
    if size > MOST_BYTES:
        raise PriorError(f"{what} has {size} bytes; priors of up to {MOST_BYTES} are read.")


def read_prior(path: Path) -> PriorData:
    """The prior of a file; PriorError says why it is none."""
    try:
        return prior_from_text(read_bytes(path, "prior", PriorError, name=path.name, most_bytes=MOST_BYTES))
    except PriorError as error:
        raise PriorError(str(error) if str(error).startswith(path.name) else f"{path.name}: {error}") from None


# --- writing ----------------------------------------------------------------------------------------------------------


def prior_to_text(earlier: PriorData) -> str:
    """The JSON, a line for each row of a table or matrix."""
    parts: list[tuple[str, Any]] = [("about", ABOUT), ("version", VERSION), ("name", earlier.name), ("mode", earlier.mode)]
    parts += [("tasks", [_told(task) for task in earlier.tasks]), ("plans", [_told(plan) for plan in earlier.plans])]
    parts += [("runs", [[_runs(runs) for runs in row] for row in earlier.runs])]
    parts += [("seeds", None if earlier.has_seeds.all() else earlier.has_seeds.tolist()), ("diverged", _whole(earlier.diverged))]
    parts += [("memory", _whole(earlier.memory)), ("measured", _whole(earlier.measured))]
    is_sure = bool((earlier.propensity == 1).all())
    parts += [("propensity", None if is_sure else [[float(f"{x:.5g}") for x in row] for row in earlier.propensity])]
    parts += [("noise", [_number(x) for x in earlier.noise]), ("provenance", [dict(one) for one in earlier.provenance])]
    return "{\n" + ",\n".join(f"{json.dumps(name)}: {_lines(value)}" for name, value in parts) + "\n}\n"


def _lines(value: Any) -> str:
    if isinstance(value, list) and value and isinstance(value[0], list | dict):
        return "[\n" + ",\n".join(_compact(row) for row in value) + "\n]"
    return json.dumps(value, indent=1, allow_nan=False) if isinstance(value, dict) else _compact(value)


def _compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def _told(row: TaskRow | PlanRow) -> dict[str, Any]:
    """The fields that say something."""
    return {name: value for name, value in asdict(row).items() if value is not None and value != "" and value != {}}


def _runs(runs: Array) -> list[float | None]:
    return [_number(x) for x in runs[: np.flatnonzero(np.isfinite(runs)).max(initial=-1) + 1]]


def _whole(matrix: Array) -> list[list[int | None]]:
    return [[int(x) if np.isfinite(x) else None for x in row] for row in matrix]


def _number(value: float) -> float | None:
    return round(float(value), DIGITS) if np.isfinite(value) else None


# --- reading ----------------------------------------------------------------------------------------------------------


def prior_from_text(text: str | bytes) -> PriorData:
    """The prior whose JSON this is."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise PriorError(f"this is no JSON: {str(error)[:100]}.") from None
    if not isinstance(value, dict) or not {"version", "name"} <= value.keys():
        raise PriorError(f"a prior is a JSON object with {', '.join(NEEDED)}; this is {_brief(value)}.")
    if type(value["version"]) is not int or not FIRST <= value["version"] <= VERSION:
        told = f"it is of version {_brief(value['version'])}; this paredown reads {FIRST} to {VERSION}"
        raise PriorError(f"{told}. Update paredown to read it.")
    unknown, missing = sorted(set(value) - set(FIELDS)), [name for name in NEEDED if name not in value]
    if unknown or missing:
        raise PriorError(f"field {unknown[0]!r} is unknown." if unknown else f"field {missing[0]!r} is missing.")
    if not isinstance(value["name"], str) or value["mode"] not in MODES:
        raise PriorError(
            f"name is text and mode one of {', '.join(MODES)}; they are {_brief(value['name'])}, {_brief(value['mode'])}."
        )
    return _earlier(value)


def _earlier(value: Mapping[str, Any]) -> PriorData:
    tasks, plans = _rows(value["tasks"], TaskRow, "tasks"), _rows(value["plans"], PlanRow, "plans")
    shape = len(tasks), len(plans)
    rest = {name: _matrix(value.get(name), shape, name) for name in ("diverged", "memory", "measured", "propensity")}
    rest = {name: matrix for name, matrix in rest.items() if matrix is not None}
    provenance = value.get("provenance", [])
    if not isinstance(provenance, list) or not all(isinstance(one, dict) for one in provenance):
        raise PriorError(f"provenance is a list of objects, not {_brief(provenance)}.")
    runs = _all_runs(value["runs"], shape)
    seeds = _has_seeds(value.get("seeds"), shape[0]) & (_may_have_seeds(runs) if value["version"] == FIRST else True)
    told = {"provenance": tuple(provenance), "has_seeds": seeds, **rest}
    return PriorData.of_runs(value["name"], value["mode"], tasks, plans, runs, **told)


def _rows(value: Any, kind: type[Row], what: str) -> list[Row]:
    if not isinstance(value, list) or not value or not all(isinstance(row, dict) for row in value):
        raise PriorError(f"{what} is a list of objects, one at least, not {_brief(value)}.")
    return [_row(row, kind, f"row {i} of {what}") for i, row in enumerate(value, 1)]


def _row(value: Mapping[str, Any], kind: type[Row], where: str) -> Row:
    unknown = sorted(set(value) - {field.name for field in fields(kind)})
    if unknown:
        raise PriorError(f"{where} has a field {unknown[0]!r}, which is unknown.")
    for name, part in value.items():
        if not CHECKS[name](part):
            raise PriorError(f"{where}: {name} cannot be {_brief(part)}.")
    try:
        return kind(**value)
    except TypeError:
        raise PriorError(f"{where} needs {', '.join(REQUIRED[kind.__name__])}; it has {', '.join(value) or 'nothing'}.") from None


def _matrix(value: Any, shape: tuple[int, int], name: str) -> Array | None:
    """Numbers from 0 up; null is not known."""
    if value is None:
        return None
    if not _is_table(value, shape) or not all(part is None or (_is_number(part) and part >= 0) for row in value for part in row):
        raise PriorError(f"{name} is {shape[0]} rows of {shape[1]} numbers from 0 up or null; it is {_brief(value)}.")
    return np.array([[np.nan if part is None else part for part in row] for row in value], dtype=np.float64).reshape(shape)


def _all_runs(value: Any, shape: tuple[int, int]) -> Array:
    """(tasks, plans, most runs of a pair)."""
    told = f"runs is {shape[0]} rows of {shape[1]} lists of finite errors or null"
    if not _is_table(value, shape) or not all(isinstance(cell, list) for row in value for cell in row):
        raise PriorError(f"{told}; it is {_brief(value)}.")
    depth = max((len(cell) for row in value for cell in row), default=0)
    if depth > MOST_RUNS:
        raise PriorError(f"{told}, a place for each seed of the task and up to {MOST_RUNS}; one has {depth}.")
    found = np.full((*shape, max(depth, 1)), np.nan)
    for i, row in enumerate(value):
        for j, cell in enumerate(row):
            if not all(part is None or _is_number(part) for part in cell):
                raise PriorError(f"{told}; of task {i + 1} and plan {j + 1} they are {_brief(cell)}.")
            found[i, j, : len(cell)] = [np.nan if part is None else part for part in cell]
    return found


def _has_seeds(value: Any, num_tasks: int) -> Mask:
    if value is not None and not (isinstance(value, list) and len(value) == num_tasks and all(type(one) is bool for one in value)):
        raise PriorError(f"seeds is {num_tasks} times true or false, or null; it is {_brief(value)}.")
    return np.ones(num_tasks, dtype=bool) if value is None else np.array(value, dtype=bool)


def _may_have_seeds(runs: Array) -> Mask:
    """Of a file that does not say: all plans of a task ran equally often. Else runs of two seeds may stand in one place."""
    counts = np.isfinite(runs).sum(axis=2)
    return np.array([len(set(row[row > 0])) < 2 for row in counts])


def _is_table(value: Any, shape: tuple[int, int]) -> bool:
    rows = isinstance(value, list) and len(value) == shape[0]
    return rows and all(isinstance(row, list) and len(row) == shape[1] for row in value)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300 and math.isfinite(value)


def _is_text(value: object) -> bool:
    return isinstance(value, str) and len(value) < 10_000


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**53


def _is_features(value: object) -> bool:
    return isinstance(value, Mapping) and all(_is_text(name) and _is_number(part) for name, part in value.items())


def _is_plan(value: Any) -> bool:
    """The form of a plan's JSON: `Plan.from_json` looks at it closely when it is used, which for a hundred takes a quarter of a second."""
    rules = value.get("rules") if isinstance(value, dict) else None
    return isinstance(rules, list) and "version" in value and all(isinstance(rule, list) and len(rule) == 2 for rule in rules)


CHECKS: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("name", "family", "data", "metric", "source", "text", "label", "recipe", "level"), _is_text),
    **dict.fromkeys(("answers", "steps"), _is_count),
    **dict.fromkeys(("blind", "full_bytes"), _is_number),
    "plan": _is_plan,
    "features": _is_features,
}
REQUIRED: dict[str, Sequence[str]] = {"TaskRow": ("name", "family", "data"), "PlanRow": ("label",)}


def _brief(value: object) -> str:
    """A value in a message, cut to one short line."""
    if isinstance(value, list | dict):
        return f"{'a list' if isinstance(value, list) else 'an object'} of {len(value)}"
    return text if len(text := repr(value)) <= 60 else text[:57] + "..."


# --- Priors ---

SHIPPED = {"store": "stored", "simulate": "simulated"}  # by mode
FOLDER = "PAREDOWN_PRIORS"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")


def load(name: str | os.PathLike[str] = "stored") -> PriorData:
    """The prior of that name, or of that file."""
    text = os.fspath(name)
    if text.endswith(".json") or "/" in text or os.sep in text:
        return read_prior(Path(text))
    return read_prior(_paths_by_name(text))


def available() -> list[str]:
    """Names that `load` knows: shipped ones first."""
    shipped = [name for name in SHIPPED.values() if _shipped(name).is_file()]
    return [*shipped, *own_priors()]


def own_priors() -> list[str]:
    """The user's own."""
    return sorted(path.stem for path in folder().glob("*.json") if NAME.fullmatch(path.stem))


def known_prior(mode: str = "store") -> PriorData:
    """All that is known in a mode: the shipped prior and the user's own."""
    if mode not in SHIPPED:
        raise PriorError(f"mode {mode!r} is unknown. Allowed: {', '.join(SHIPPED)}.")
    found = [load(name) for name in available()]
    parts = [one for one in found if one.mode == mode]
    if not parts:
        raise PriorError(f"there is no prior of mode {mode!r} yet: add your own sweeps with paredown prior add STORE.")
    return parts[0] if len(parts) == 1 else join_priors(parts, "+".join(one.name for one in parts))


def add(earlier: PriorData, name: str, *, replaces: bool = False) -> Path:
    """Keep a prior as one of the user's own; the file."""
    path = _own_path(name)
    if path.exists() and not replaces:
        raise PriorError(
            f"there is a prior {name!r} already. Remove it first (paredown prior remove {name}), or take another name."
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    write_prior(earlier, path, name=name)
    return path


def remove(name: str) -> None:
    """Forget one of the user's own."""
    path = _own_path(name)
    if not path.is_file():
        raise PriorError(f"there is no prior {name!r} of your own. You have: {', '.join(own_priors()) or 'none'}.")
    path.unlink()


def folder() -> Path:
    """Where the user's own are."""
    given = os.environ.get(FOLDER)
    base = os.environ.get("XDG_DATA_HOME") or str(Path.home() / ".local" / "share")
    return Path(given) if given else Path(base) / "paredown" / "priors"


def _own_path(name: str) -> Path:
    if not NAME.fullmatch(name):
        raise PriorError(
            f"{name[:40]!r} is no name for a prior: letters, digits, dots, - and _, 64 at most, a letter or digit first."
        )
    if name in SHIPPED.values():
        raise PriorError(f"{name!r} is the prior that the package carries; it stays as it is. Take another name for your own.")
    return folder() / f"{name}.json"


def _shipped(name: str) -> Path:
    return Path(str(resources.files("paredown"))) / "pick" / "shipped" / f"{name}.json"


def _paths_by_name(name: str) -> Path:
    path = _shipped(name) if name in SHIPPED.values() else folder() / f"{name}.json"
    if name in SHIPPED.values() and not path.is_file():
        raise PriorError(f"the {name} prior is not in this version of paredown yet. Known: {', '.join(available()) or 'none'}.")
    if not NAME.fullmatch(name) or not path.is_file():
        there = available()
        raise PriorError(
            f"there is no prior {name[:40]!r}. Closest: {closest(name[:40], there)}. Known: {', '.join(there) or 'none'}."
        )
    return path


# --- A prior that nobody measured, of the form of the shipped ones ---

FAMILIES = ("cnn", "vit", "cnn", "gpt", "cnn", "mlp")
BLOCKS = (64, 32, 128, 256)
ELEMENTS = (
    ("uint2/{}@bf16+bf16", 2, 32),
    ("int4/{}@bf16", 4, 16),
    ("int8/{}@bf16", 8, 16),
    ("", 32, 0),
)  # text, bits, bits a block
STATES = {"full": 32.0, "half": 16.0, "lpmm": 8.125}  # bits of a weight


def made_up_prior(num_tasks: int = 11, num_plans: int = 30, *, seeds: int = 2, seed: int = 0, mode: str = "store") -> PriorData:
    """`num_plans` is at most 39: activations as they are, or in 2, 4 or 8 bits in blocks of four lengths, with three tiers."""
    source = np.random.default_rng(seed)
    plans = list(islice(_plans(), num_plans))
    activation = np.array([plan.features["activation"] for plan in plans])
    state = np.array([plan.features["weight"] for plan in plans])
    hard, slope, noise = (source.uniform(low, high, num_tasks) for low, high in ((0.05, 0.5), (0.05, 0.4), (0.003, 0.02)))
    means = hard[:, None] + slope[:, None] * (2.0 ** -(activation / 2) + 0.1 * (state < 16))
    full = source.uniform(1e7, 1e8, num_tasks)
    memory = full[:, None] * (0.75 * activation + 0.25 * state) / 32
    tasks = [
        TaskRow(f"task {i}", FAMILIES[i % len(FAMILIES)], f"data {i}", "error", 10, 0.9, float(full[i]), 100, "made_up")
        for i in range(num_tasks)
    ]
    runs = np.clip(means[..., None] + noise[:, None, None] * source.standard_normal((num_tasks, len(plans), seeds)), 0, 1)
    about = {"memory": memory, "measured": memory * 1.02, "provenance": ({"about": "made up"},)}
    return PriorData.of_runs("made_up", mode, tasks, plans, runs, **about)


def _plans() -> Iterator[PlanRow]:
    """Rows, those of the first block first."""
    for block, (tier, bits), (text, width, more) in product(BLOCKS, STATES.items(), ELEMENTS):
        if not text and block != BLOCKS[0]:
            continue
        plan = Plan.uniform(**TIERS[tier], **({"activation": text.format(block)} if text else {}))  # type: ignore[misc]
        features = {"activation": width + more / block, "weight": bits, "moment1": min(bits, 32.0 if tier == "full" else 8.25)}
        yield PlanRow(f"a{width}/{block} {tier}", plan.to_json(), "", f"a{width} {tier}", features)
