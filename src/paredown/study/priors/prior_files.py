"""Load and save priors, by name or as files: those that the package ships, and the user's own.

    load("stored")         shipped: tensors stored in low-bit formats, on images and text
    load("low_budgets")    shipped: the same on deeper networks in longer trainings, below 30 % of the memory
    load("state_budgets")  shipped: the same on networks with much state, new and fine-tuned, at 30 %
    load("simulated")      shipped: PEPPP's 99 configurations, arithmetic rounded, on images
    load("mine")           one of the user's own, installed by `add`
    load("file.json")      any file of this format
    known_prior("store")   the shipped priors of this mode and all of the user's own, joined

The user's own priors are in the folder of PAREDOWN_PRIORS, or else in ~/.local/share/paredown/priors. A file is JSON, and is checked when
it is read; reading runs no code, needs no torch, and accepts at most MOST_BYTES.

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
from dataclasses import dataclass, fields, replace
from importlib import resources
from itertools import islice, product
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from paredown.errors import PriorError
from paredown.formats.catalog import TIERS
from paredown.plan.plan import Plan
from paredown.plan.selectors import closest
from paredown.serial import Check, FromZeroOrNone, dump_dataclass, load_json, read_versioned, save_text
from paredown.study.priors.prior_data import MATRICES, Array, PlanRow, PriorData, TaskRow, join_priors

VERSION = 3  # of the file format
MOST_BYTES = 64 * 2**20
MOST_RUNS = 1000  # of one task and plan
SHIPPED = ("stored", "low_budgets", "state_budgets", "simulated")
MODES = ("store", "simulate")
FOLDER_VARIABLE = "PAREDOWN_PRIORS"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
Matrix = tuple[tuple[FromZeroOrNone, ...], ...]

ABOUT = "errors of earlier trainings under plans, for paredown's pick; docs/priors.md says what the fields are"


@dataclass(frozen=True)
class PriorFile:
    """Defines the JSON of a prior: the fields of `PriorData`, where matrices that have only default values are left out (None)."""

    name: str
    mode: Annotated[str, Check(MODES.__contains__, f"one of {', '.join(MODES)}")]
    tasks: tuple[TaskRow, ...]
    plans: tuple[PlanRow, ...]
    runs: tuple[tuple[tuple[float | None, ...], ...], ...]
    memory: Matrix | None = None
    measured: Matrix | None = None
    diverged: Matrix | None = None
    propensity: Matrix | None = None
    step_ratio: Matrix | None = None
    provenance: tuple[Mapping[str, Any], ...] = ()
    about: str = ""


def load(name: str | os.PathLike[str] = "stored") -> PriorData:
    """Return the prior (errors of earlier tasks under plans) called `name`, or the one in a file if `name` is a path."""
    text = os.fspath(name)
    if text.endswith(".json") or "/" in text or os.sep in text:
        return read_prior(Path(text))
    shipped = Path(str(resources.files("paredown.study.priors"))) / "shipped"
    path = (shipped if text in SHIPPED else folder()) / f"{text}.json"
    if not NAME.fullmatch(text) or not path.is_file():
        names = available()
        raise PriorError(f"no prior is named {text[:40]!r}. Closest: {closest(text[:40], names)}. Known: {', '.join(names)}.")
    return read_prior(path)


def available() -> list[str]:
    """Return the names that `load` accepts, those of shipped priors first."""
    return [*SHIPPED, *own_priors()]


def own_priors() -> list[str]:
    """Return the names of the priors (errors of earlier tasks under plans) that the user has added."""
    return sorted(path.stem for path in folder().glob("*.json") if NAME.fullmatch(path.stem))


def known_prior(mode: str = "store") -> PriorData:
    """Return all priors of a mode ("store" or "simulate") joined into one: the shipped ones and the user's own."""
    if mode not in MODES:
        raise PriorError(f"mode {mode!r} is unknown. Allowed: {', '.join(MODES)}.")
    parts = [prior for prior in map(load, available()) if prior.mode == mode]
    return parts[0] if len(parts) == 1 else join_priors(parts, "+".join(prior.name for prior in parts))


def add(prior_data: PriorData, name: str, *, replaces: bool = False) -> Path:
    """Save a prior as one of the user's own, called `name`, and return its path; with `replaces` an existing one is overwritten."""
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
    """Return the folder of the prior files that the user has added."""
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


# --- files -------------------------------------------------------------------------------------------------------------


def write_prior(prior_data: PriorData, path: Path, *, name: str | None = None) -> None:
    """Write a prior to a file, one line for each task and plan; if writing fails, there is no partial file."""
    text = prior_to_text(prior_data if name is None else replace(prior_data, name=name))
    try:
        if len(text.encode()) > MOST_BYTES:
            raise PriorError(f"it has {len(text.encode())} bytes; a prior has at most {MOST_BYTES}.")
        prior_from_json(json.loads(text))
    except PriorError as error:
        raise PriorError(f"{path.name} is not written, since it could not be read back: {error}") from None
    save_text(path, text, PriorError)


def prior_to_text(prior_data: PriorData) -> str:
    """Return the JSON text of a prior, one line for each row of a table or matrix."""
    values: dict[str, Any] = {row.name: getattr(prior_data, row.name, ABOUT) for row in fields(PriorFile)}
    values |= {name: _rows_or_none(values[name], empty) for name, empty in MATRICES.items()}
    values["runs"] = [
        [_numbers(cell[: np.flatnonzero(np.isfinite(cell)).max(initial=-1) + 1]) for cell in row] for row in prior_data.runs
    ]
    parts = {"about": values.pop("about"), "version": VERSION, **dump_dataclass(values, skips_defaults=True)}
    return "{\n" + ",\n".join(f"{json.dumps(name)}: {_lines(value)}" for name, value in parts.items()) + "\n}\n"


def _lines(value: Any) -> str:
    if isinstance(value, list) and value and isinstance(value[0], list | dict):
        return "[\n" + ",\n".join(_compact(row) for row in value) + "\n]"
    return json.dumps(value, indent=1, allow_nan=False) if isinstance(value, dict) else _compact(value)


def _compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def _rows_or_none(matrix: Array, empty: float) -> list[list[float | None]] | None:
    """Return a matrix as lists; None if all values are `empty`, the default, since files leave such a matrix out."""
    return None if np.array_equal(matrix, np.full(matrix.shape, empty), equal_nan=True) else [_numbers(row) for row in matrix]


def _numbers(row: Array) -> list[float | None]:
    """Return the numbers of a row for JSON: with at most nine digits, whole ones in full, and None for NaN."""
    return [None if not np.isfinite(x) else int(x) if x == int(x) else float(f"{x:.9g}") for x in row.tolist()]


def read_prior(path: Path) -> PriorData:
    """Return the prior in a file; PriorError names what is wrong if the file holds none."""
    return load_json(path, "prior", PriorError, prior_from_json, name=path.name, most_bytes=MOST_BYTES)


def prior_from_json(value: Any) -> PriorData:
    """Return the prior of a JSON value, or raise PriorError; its plans are parsed when they are used, since 100 take 0.25 s."""
    file: PriorFile = read_versioned(PriorFile, value, "prior", VERSION, PriorError, oldest=VERSION)
    shape = len(file.tasks), len(file.plans)
    if not all(shape):
        raise PriorError(f"a prior has tasks and plans; this one has {shape[0]} tasks and {shape[1]} plans.")
    tables = {name: rows for name in ("runs", *MATRICES) if (rows := getattr(file, name)) is not None}
    for name, rows in tables.items():
        if len(rows) != shape[0] or any(len(row) != shape[1] for row in rows):
            raise PriorError(
                f"{name} has {len(rows)} rows of {', '.join(map(str, {len(row) for row in rows}))}; it needs {shape[0]} of {shape[1]}."
            )
    depth = max(len(cell) for row in file.runs for cell in row)
    if depth > MOST_RUNS:
        raise PriorError(
            f"runs has at most {MOST_RUNS} errors of a task and plan, one for each seed of the task; one list has {depth}."
        )
    tables["runs"] = [[[*cell, *[None] * (max(depth, 1) - len(cell))] for cell in row] for row in file.runs]
    arrays: dict[str, Any] = {name: np.array(rows, dtype=np.float64) for name, rows in tables.items()}
    return PriorData(file.name, file.mode, file.tasks, file.plans, provenance=file.provenance, **arrays)


# --- a synthetic prior -------------------------------------------------------------------------------------------------

FAMILIES = ("cnn", "vit", "cnn", "gpt", "cnn", "mlp")
BLOCKS = (64, 32, 128, 256)
ELEMENTS = {"uint2/{}@bf16+bf16": 2, "int4/{}@bf16": 4, "int8/{}@bf16": 8, "": 32}  # format: bits of an activation
STATES = {"full": 32.0, "half": 16.0, "lpmm": 8.125}  # tier: bits of a weight


def made_up_prior(num_tasks: int = 11, num_plans: int = 30, *, seeds: int = 2, seed: int = 0, mode: str = "store") -> PriorData:
    """Return a synthetic prior of at most 39 plans.

    Activations are unmodified, or have 2, 4 or 8 bits in four block lengths; optimizer state has one of three tiers (sets of formats).
    """
    rng = np.random.default_rng(seed)
    plans, activation, state = zip(*islice(_plans(), num_plans), strict=True)
    activation, state = np.array(activation), np.array(state)
    floor, slope, noise = (rng.uniform(low, high, num_tasks) for low, high in ((0.05, 0.5), (0.05, 0.4), (0.003, 0.02)))
    means = floor[:, None] + slope[:, None] * (2.0 ** -(activation / 2) + 0.1 * (state < 16))
    full_bytes = rng.uniform(1e7, 1e8, num_tasks)
    memory = full_bytes[:, None] * (0.75 * activation + 0.25 * state) / 32
    tasks = tuple(
        TaskRow(f"task {i}", FAMILIES[i % len(FAMILIES)], f"data {i}", "error", 10, 0.9, float(full_bytes[i]), 100, "made_up")
        for i in range(num_tasks)
    )
    runs = np.clip(means[..., None] + noise[:, None, None] * rng.standard_normal((num_tasks, len(plans), seeds)), 0, 1)
    return PriorData("made_up", mode, tasks, plans, runs, memory, 1.02 * memory, provenance=({"about": "made up"},))


def _plans() -> Iterator[tuple[PlanRow, float, float]]:
    """Yield (plan, bits of an activation, bits of a value of optimizer state) for each plan of the synthetic prior."""
    for block, (tier, bits), (text, width) in product(BLOCKS, STATES.items(), ELEMENTS.items()):
        if not text and block != BLOCKS[0]:
            continue
        plan = Plan.uniform(**TIERS[tier], **({"activation": text.format(block)} if text else {}))  # type: ignore[misc]
        more = 0 if not text else 32 if "+" in text else 16  # bits of a block's scale and minimum
        yield PlanRow(f"a{width}/{block} {tier}", plan.to_json(), "", f"a{width} {tier}"), width + more / block, bits
