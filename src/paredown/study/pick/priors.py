"""Priors by name and as files: those that the package ships, and the user's own.

    load("stored")         shipped: tensors stored in low-bit formats, on images and text
    load("low_budgets")    shipped: the same on deeper networks in longer trainings, below 30 % of the memory
    load("state_budgets")  shipped: the same on networks with much state, new and fine-tuned, at 30 %
    load("simulated")      shipped: PEPPP's 99 configurations, arithmetic rounded, on images
    load("mine")           one of the user's own, installed by `add`
    load("file.json")      any file of this format
    known_prior("store")   the shipped priors of this mode and all of the user's own, joined

The user's own priors are in the folder of PAREDOWN_PRIORS, or else in ~/.local/share/paredown/priors. A file is JSON with a
description of its fields (ABOUT), and is checked when it is read; reading runs no code, needs no torch, and accepts at most
MOST_BYTES.

`made_up_prior` is a synthetic prior in the same form, for tests and examples: more bits give less error, down to a floor for each
task, and formats of the optimizer cost little. Half of the tasks are of family "cnn", the others of "vit", "gpt" and "mlp".

>>> made_up_prior(3, 4)
PriorData(made_up: 3 tasks x 4 plans, store mode, 12 of 12 entries, 24 runs, noise 0.005 to 0.011)
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from importlib import resources
from itertools import islice, product
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from paredown.errors import PriorError
from paredown.formats.catalog import TIERS
from paredown.plan.plan import Plan
from paredown.plan.selectors import closest
from paredown.serial import SUMMED, TEXT, Check, brief, check_fields, load_json, object_parts, parse_json, read_dataclass, save_text
from paredown.study.pick.prior_data import Array, Mask, PlanRow, PriorData, TaskRow, join_priors, pooled_noise

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


VERSION = 2  # of the file format
FIRST_VERSION = 1  # the runs of a pair are listed without gaps, whatever their seeds
MOST_BYTES = 64 * 2**20
MOST_RUNS = 1000  # of one task and plan
SHIPPED = {
    "stored": "store",
    "low_budgets": "store",
    "state_budgets": "store",
    "simulated": "simulate",
}  # shipped priors and their modes
FOLDER_VARIABLE = "PAREDOWN_PRIORS"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
MODES = tuple(dict.fromkeys(SHIPPED.values()))
FIELDS = (
    "about", "version", "name", "mode", "tasks", "plans", "runs", "seeds", "diverged", "memory", "measured", "step_ratio", "propensity",
    "noise", "provenance",
)  # fmt: skip
NEEDED = ("version", "name", "mode", "tasks", "plans", "runs")
DIGITS = 6  # decimals of an error in a file
FILE_FIELDS = {"template": "recipe"}  # fields that have another name in files, since version 0.1
DATA_FIELDS = {name: field for field, name in FILE_FIELDS.items()}
Row = TypeVar("Row", TaskRow, PlanRow)

ABOUT = {
    "about": "what the other fields are",
    "version": f"of this form of file: {VERSION}",
    "name, mode": "name of the prior; store: tensors are stored in their formats, simulate: arithmetic is rounded",
    "tasks": "name, family of the model, data, metric (error: share of wrong answers; loss: cross entropy), number of answers, "
    "blind: error of random guessing, full_bytes: bytes of the baseline, steps of training, "
    "source: the prior it came with, text: the task as sweeps name it",
    "plans": f"label; plan: JSON of a Plan, or {FILE_FIELDS['template']}: the template of a plan for each task; level: plans of one "
    "level are known to differ by noise alone; features: bits per value by role, and other numbers that compare plans",
    "runs": "for each task, for each plan, the errors of its runs, at the index of its seed; null where that seed did not run, [] "
    "without any run",
    "seeds": "for each task whether the index of a run is its seed; null: for all",
    "diverged": "number of runs that diverged; they have the error of random guessing",
    "memory, measured": "peak bytes, predicted and measured; null where they are not known",
    "step_ratio": "median step time in times of the unmodified step's on the same machine; null where it was not measured, or for all",
    "propensity": "probability that the pair was drawn; null: 1 for all",
    "noise": "for each task: standard deviation of one run about the mean of its plan, pooled over plans that ran more than once",
    "provenance": "for each collection: commit, device, versions, dates, sweep",
}
FAMILIES = ("cnn", "vit", "cnn", "gpt", "cnn", "mlp")
BLOCKS = (64, 32, 128, 256)
ELEMENTS = (
    ("uint2/{}@bf16+bf16", 2, 32),
    ("int4/{}@bf16", 4, 16),
    ("int8/{}@bf16", 8, 16),
    ("", 32, 0),
)  # format, bits per value, further bits per block
STATES = {"full": 32.0, "half": 16.0, "lpmm": 8.125}  # tier: bits of a weight


def load(name: str | os.PathLike[str] = "stored") -> PriorData:
    """Return the prior of this name, or the prior in this file."""
    text = os.fspath(name)
    if text.endswith(".json") or "/" in text or os.sep in text:
        return read_prior(Path(text))
    return read_prior(_path_by_name(text))


def available() -> list[str]:
    """Return the names that `load` accepts, those of shipped priors first."""
    shipped = [name for name in SHIPPED if _shipped(name).is_file()]
    return [*shipped, *own_priors()]


def own_priors() -> list[str]:
    """Return the names of the user's own priors."""
    return sorted(path.stem for path in folder().glob("*.json") if NAME.fullmatch(path.stem))


def known_prior(mode: str = "store") -> PriorData:
    """Return all priors of a mode ("store" or "simulate") joined into one: the shipped ones and the user's own."""
    if mode not in MODES:
        raise PriorError(f"mode {mode!r} is unknown. Allowed: {', '.join(MODES)}.")
    all_priors = [load(name) for name in available()]
    parts = [prior for prior in all_priors if prior.mode == mode]
    if not parts:
        raise PriorError(f"no prior has mode {mode!r}. Make one from your own sweeps (docs/priors.md).")
    return parts[0] if len(parts) == 1 else join_priors(parts, "+".join(prior.name for prior in parts))


def add(prior_data: PriorData, name: str, *, replaces: bool = False) -> Path:
    """Save a prior among the user's own, and return its path.

    With `replaces`, an own prior of this name is overwritten.
    """
    path = _own_path(name)
    if path.exists() and not replaces:
        raise PriorError(f"a prior {name!r} exists already. Pass replaces=True to replace it, or choose another name.")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_prior(prior_data, path, name=name)
    return path


def remove(name: str) -> None:
    """Delete one of the user's own priors."""
    path = _own_path(name)
    if not path.is_file():
        raise PriorError(f"you have no prior {name!r}. Your own: {', '.join(own_priors()) or 'none'}.")
    path.unlink()


def folder() -> Path:
    """Return the folder of the user's own priors."""
    path = os.environ.get(FOLDER_VARIABLE)
    base = os.environ.get("XDG_DATA_HOME") or str(Path.home() / ".local" / "share")
    return Path(path) if path else Path(base) / "paredown" / "priors"


def _own_path(name: str) -> Path:
    if not NAME.fullmatch(name):
        raise PriorError(
            f"{name[:40]!r} cannot name a prior: a name has letters, digits, dots, - and _, at most 64, and starts with a letter or digit."
        )
    if name in SHIPPED:
        raise PriorError(f"{name!r} is a prior that the package ships, which cannot be replaced. Choose another name for your own.")
    return folder() / f"{name}.json"


def _shipped(name: str) -> Path:
    return Path(str(resources.files("paredown.study.pick"))) / "shipped" / f"{name}.json"


def _path_by_name(name: str) -> Path:
    path = _shipped(name) if name in SHIPPED else folder() / f"{name}.json"
    if name in SHIPPED and not path.is_file():
        raise PriorError(f"the {name} prior is not in this version of paredown yet. Known: {', '.join(available()) or 'none'}.")
    if not NAME.fullmatch(name) or not path.is_file():
        names = available()
        raise PriorError(
            f"no prior is named {name[:40]!r}. Closest: {closest(name[:40], names)}. Known: {', '.join(names) or 'none'}."
        )
    return path


# --- files -------------------------------------------------------------------------------------------------------------


def write_prior(prior_data: PriorData, path: Path, *, name: str | None = None) -> None:
    """Write a prior to a file, one line for each task and plan; if writing fails, there is no partial file."""
    text = prior_to_text(prior_data if name is None else replace(prior_data, name=name))
    _check_readable(text, path.name)
    save_text(path, text, PriorError)


def _check_readable(text: str, name: str) -> None:
    """Raise PriorError for a text that `read_prior` would refuse; `name` is for messages."""
    try:
        _check_size(len(text.encode()), "it")
        prior_from_text(text)
    except PriorError as error:
        raise PriorError(f"{name} is not written, since it could not be read back: {error}") from None


def _check_size(size: int, what: str) -> None:
    if size > MOST_BYTES:
        raise PriorError(f"{what} has {size} bytes; a prior has at most {MOST_BYTES}.")


def read_prior(path: Path) -> PriorData:
    """Return the prior in a file; PriorError names what is wrong if the file holds none."""
    return load_json(path, "prior", PriorError, prior_from_json, name=path.name, most_bytes=MOST_BYTES)


# --- writing ----------------------------------------------------------------------------------------------------------


def prior_to_text(prior_data: PriorData) -> str:
    """Return the JSON text of a prior, one line for each row of a table or matrix."""
    parts: list[tuple[str, Any]] = [("about", ABOUT), ("version", VERSION), ("name", prior_data.name), ("mode", prior_data.mode)]
    parts += [
        ("tasks", [_nonempty_fields(task) for task in prior_data.tasks]),
        ("plans", [_nonempty_fields(plan) for plan in prior_data.plans]),
    ]
    parts += [("runs", [[_runs(runs) for runs in row] for row in prior_data.runs])]
    parts += [
        ("seeds", None if prior_data.has_seeds.all() else prior_data.has_seeds.tolist()),
        ("diverged", _whole(prior_data.diverged)),
    ]
    parts += [("memory", _whole(prior_data.memory)), ("measured", _whole(prior_data.measured))]
    has_times = bool(np.isfinite(prior_data.step_ratio).any())
    parts += [("step_ratio", [[_number(x) for x in row] for row in prior_data.step_ratio] if has_times else None)]
    is_certain = bool((prior_data.propensity == 1).all())
    parts += [("propensity", None if is_certain else [[float(f"{x:.5g}") for x in row] for row in prior_data.propensity])]
    parts += [("noise", [_number(x) for x in prior_data.noise]), ("provenance", [dict(record) for record in prior_data.provenance])]
    return "{\n" + ",\n".join(f"{json.dumps(name)}: {_lines(value)}" for name, value in parts) + "\n}\n"


def _lines(value: Any) -> str:
    if isinstance(value, list) and value and isinstance(value[0], list | dict):
        return "[\n" + ",\n".join(_compact(row) for row in value) + "\n]"
    return json.dumps(value, indent=1, allow_nan=False) if isinstance(value, dict) else _compact(value)


def _compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def _nonempty_fields(row: TaskRow | PlanRow) -> dict[str, Any]:
    """Return the fields of a row that are not empty, by their names in files."""
    values = {name: value for name, value in asdict(row).items() if value is not None and value != "" and value != {}}
    return {FILE_FIELDS.get(name, name): value for name, value in values.items()}


def _runs(runs: Array) -> list[float | None]:
    return [_number(x) for x in runs[: np.flatnonzero(np.isfinite(runs)).max(initial=-1) + 1]]


def _whole(matrix: Array) -> list[list[int | None]]:
    return [[int(x) if np.isfinite(x) else None for x in row] for row in matrix]


def _number(value: float) -> float | None:
    return round(float(value), DIGITS) if np.isfinite(value) else None


# --- reading ----------------------------------------------------------------------------------------------------------


def prior_from_text(text: str) -> PriorData:
    """Return the prior of a JSON text; PriorError names what is wrong if the text is none."""
    return prior_from_json(parse_json(text, "prior", PriorError))


def prior_from_json(value: Any) -> PriorData:
    """Return the prior of a JSON value; PriorError names what is wrong if the value is none."""
    parts = object_parts(value, "prior", FIELDS, NEEDED, VERSION, PriorError)
    check_fields(parts, {"name": TEXT, "mode": Check(MODES.__contains__, f"one of {', '.join(MODES)}")}, "prior", PriorError)
    return _prior_data(parts, is_first_version=value["version"] == FIRST_VERSION)


def _prior_data(value: Mapping[str, Any], *, is_first_version: bool) -> PriorData:
    tasks, plans = _rows(value["tasks"], TaskRow, "tasks"), _rows(value["plans"], PlanRow, "plans")
    for i, plan in enumerate(plans):
        if plan.plan is not None and not _is_plan(plan.plan):
            raise PriorError(f"plans[{i}].plan: the JSON of a plan is needed here; this is {brief(plan.plan)}.")
    shape = len(tasks), len(plans)
    matrices = {
        name: _matrix(value.get(name), shape, name) for name in ("diverged", "memory", "measured", "step_ratio", "propensity")
    }
    matrices = {name: matrix for name, matrix in matrices.items() if matrix is not None}
    provenance = value.get("provenance", [])
    if not isinstance(provenance, list) or not all(isinstance(record, dict) for record in provenance):
        raise PriorError(f"provenance is a list of objects, not {brief(provenance)}.")
    runs = _all_runs(value["runs"], shape)
    seeds = _has_seeds(value.get("seeds"), shape[0]) & (_may_have_seeds(runs) if is_first_version else True)
    fields = {"provenance": tuple(provenance), "has_seeds": seeds, **matrices}
    return PriorData.of_runs(value["name"], value["mode"], tasks, plans, runs, **fields)


def _rows(value: Any, kind: type[Row], what: str) -> tuple[Row, ...]:
    """Return the tasks or plans of a file, at least one; `what` names them in errors."""
    if not isinstance(value, list) or not value or not all(isinstance(row, dict) for row in value):
        raise PriorError(f"{what} is a list of at least one object, not {brief(value)}.")
    return read_dataclass(
        tuple[kind, ...], [{DATA_FIELDS.get(name, name): row[name] for name in row} for row in value], what, PriorError
    )


def _matrix(value: Any, shape: tuple[int, int], name: str) -> Array | None:
    """Return a matrix (tasks, plans) of numbers from 0 up, with NaN for null; None if the file has no such matrix."""
    if value is None:
        return None
    if not _is_table(value, shape) or not all(part is None or (SUMMED.holds(part) and part >= 0) for row in value for part in row):
        raise PriorError(f"{name} is {shape[0]} rows of {shape[1]} numbers from 0 up or null; it is {brief(value)}.")
    return np.array([[np.nan if part is None else part for part in row] for row in value], dtype=np.float64).reshape(shape)


def _all_runs(value: Any, shape: tuple[int, int]) -> Array:
    """Return the runs, (tasks, plans, most runs of a pair), NaN where there is none."""
    expected = f"runs is {shape[0]} rows of {shape[1]} lists of finite errors or null"
    if not _is_table(value, shape) or not all(isinstance(cell, list) for row in value for cell in row):
        raise PriorError(f"{expected}; it is {brief(value)}.")
    depth = max((len(cell) for row in value for cell in row), default=0)
    if depth > MOST_RUNS:
        raise PriorError(f"{expected}, at most {MOST_RUNS} of them, one for each seed of the task; one list has {depth}.")
    runs = np.full((*shape, max(depth, 1)), np.nan)
    for i, row in enumerate(value):
        for j, cell in enumerate(row):
            if not all(part is None or SUMMED.holds(part) for part in cell):
                raise PriorError(f"{expected}; those of task {i + 1} and plan {j + 1} are {brief(cell)}.")
            runs[i, j, : len(cell)] = [np.nan if part is None else part for part in cell]
    return runs


def _has_seeds(value: Any, num_tasks: int) -> Mask:
    if value is not None and not (
        isinstance(value, list) and len(value) == num_tasks and all(type(flag) is bool for flag in value)
    ):
        raise PriorError(f"seeds is {num_tasks} times true or false, or null; it is {brief(value)}.")
    return np.ones(num_tasks, dtype=bool) if value is None else np.array(value, dtype=bool)


def _may_have_seeds(runs: Array) -> Mask:
    """Return for each task, (tasks,), whether all its plans ran equally often, for files of version 1.

    If not, runs of two different seeds may share an index.
    """
    counts = np.isfinite(runs).sum(axis=2)
    return np.array([len(set(row[row > 0])) < 2 for row in counts])


def _is_table(value: Any, shape: tuple[int, int]) -> bool:
    rows = isinstance(value, list) and len(value) == shape[0]
    return rows and all(isinstance(row, list) and len(row) == shape[1] for row in value)


def _is_plan(value: Any) -> bool:
    """Return whether a value has the form of a plan's JSON.

    `Plan.from_json` checks the rest when the plan is used, since that takes 0.25 s for 100 plans.
    """
    rules = value.get("rules") if isinstance(value, dict) else None
    return isinstance(rules, list) and "version" in value and all(isinstance(rule, list) and len(rule) == 2 for rule in rules)


# --- a synthetic prior -------------------------------------------------------------------------------------------------


def made_up_prior(num_tasks: int = 11, num_plans: int = 30, *, seeds: int = 2, seed: int = 0, mode: str = "store") -> PriorData:
    """Return a synthetic prior of at most 39 plans.

    Activations are unmodified, or have 2, 4 or 8 bits in four block lengths; optimizer state has one of three tiers (sets of formats).
    """
    rng = np.random.default_rng(seed)
    plans = list(islice(_plans(), num_plans))
    activation = np.array([plan.features["activation"] for plan in plans])
    state = np.array([plan.features["weight"] for plan in plans])
    floor, slope, noise = (rng.uniform(low, high, num_tasks) for low, high in ((0.05, 0.5), (0.05, 0.4), (0.003, 0.02)))
    means = floor[:, None] + slope[:, None] * (2.0 ** -(activation / 2) + 0.1 * (state < 16))
    full_bytes = rng.uniform(1e7, 1e8, num_tasks)
    memory = full_bytes[:, None] * (0.75 * activation + 0.25 * state) / 32
    tasks = [
        TaskRow(f"task {i}", FAMILIES[i % len(FAMILIES)], f"data {i}", "error", 10, 0.9, float(full_bytes[i]), 100, "made_up")
        for i in range(num_tasks)
    ]
    runs = np.clip(means[..., None] + noise[:, None, None] * rng.standard_normal((num_tasks, len(plans), seeds)), 0, 1)
    fields = {"memory": memory, "measured": memory * 1.02, "provenance": ({"about": "made up"},)}
    return PriorData.of_runs("made_up", mode, tasks, plans, runs, **fields)


def _plans() -> Iterator[PlanRow]:
    """Yield the plans of the synthetic prior, those with the first block length first."""
    for block, (tier, bits), (text, width, more) in product(BLOCKS, STATES.items(), ELEMENTS):
        if not text and block != BLOCKS[0]:
            continue
        plan = Plan.uniform(**TIERS[tier], **({"activation": text.format(block)} if text else {}))  # type: ignore[misc]
        features = {"activation": width + more / block, "weight": bits, "moment1": min(bits, 32.0 if tier == "full" else 8.25)}
        yield PlanRow(f"a{width}/{block} {tier}", plan.to_json(), "", f"a{width} {tier}", features)
