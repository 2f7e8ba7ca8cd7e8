"""A prior out of trials: of a store, or of the JSON that `paredown sweep export` wrote.

    done, stopped                    the error that was measured
    diverged                         the error of a blind guess (of an unknown task: its worst error), and counted
    out of memory, killed, failed    as if it had not run: the entry is missing

Tasks that are found here tell their model's family and their answers; of others the name says what it says. Code that a task names is run
only out of a folder that the caller named. Nothing of the machine is kept but names of devices and versions.

What a task is to a prior: the family of its model, its data, its metric, and how well a blind guess does.

>>> row_of_task("digits#model=mlp,steps=5", Path("."))
TaskRow(name='digits mlp', family='mlp', data='digits', metric='error', answers=10, blind=0.9, full_bytes=None, steps=5, source='', \
text='digits#model=mlp,steps=5')

What a plan is called in a table, the level it belongs to, and its features: numbers that tell plans apart.

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
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path, PurePath
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from paredown.assign.assign import templates_of
from paredown.errors import ParedownError, PriorError
from paredown.formats.catalog import TIERS
from paredown.pick.prior_data import Array, PlanRow, PriorData, TaskRow
from paredown.plan.plan import Plan
from paredown.roles import Role
from paredown.serial import NUMBER, TEXT, Check, check_fields, or_none, read_json
from paredown.simulate.peppp import parse_peppp
from paredown.tasks.lookup import cached_task, parse_options, portable_text
from paredown.tasks.task import Task
from paredown.tasks.task_trace import peppp_bytes
from paredown.tasks.trial import Status, Trial

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
RECURRENT = (nn.RNNBase, nn.RNNCellBase)
# families of the models that tasks by name have, for tasks whose data is not here
FAMILIES = {"mlp": "mlp", "vit": "vit", "gpt": "gpt", "lstm": "lstm"}
OWN = "own"


def family_of(model: nn.Module) -> str:
    """ "vit", "gpt", "lstm", "cnn" or "mlp": attention over tokens of a text is gpt, over others vit.

    >>> from paredown.models import MODELS
    >>> [family_of(MODELS[name]()) for name in ("resnet18", "convnext", "vit", "gpt", "lstm", "mlp")]
    ['cnn', 'cnn', 'vit', 'gpt', 'lstm', 'mlp']
    """
    modules = list(model.modules())
    if any("attention" in type(module).__name__.lower() for module in modules):
        return "gpt" if any(isinstance(module, nn.Embedding) for module in modules) else "vit"
    if any(isinstance(module, RECURRENT) for module in modules):
        return "lstm"
    return "cnn" if any(isinstance(module, CONVOLUTIONS) for module in modules) else "mlp"


def family_of_task(task: Task) -> str:
    """The family of a task's model, which is made without memory where it can be."""
    try:
        with torch.device("meta"):
            return family_of(task.make_model(0))
    except Exception:  # code of the user's, which may not bear a model without numbers
        return family_of(task.make_model(0))


def blind_error(task: Task) -> float | None:
    """The error of a blind guess: equal odds for every answer."""
    answers = task.data.num_answers
    if answers is None:
        return None
    return {"error": 1 - 1 / answers, "loss": math.log(answers)}.get(task.metric if isinstance(task.metric, str) else "")


def row_of_task(text: str, folder: Path | None) -> TaskRow:
    """The row of a task by name; of one that cannot be found here, or is code and no folder is named, what its name says."""
    portable = portable_text(text)
    head, _, tail = portable.partition("#")
    data = PurePath(head.partition(":")[2] or head).name
    data = data.removesuffix(".gz").rpartition(".")[0] or data
    options, task = _options(tail), _task(text, folder)
    if "superclass" in options:
        data = f"{data}/{options['superclass']}"
    is_text = head.startswith("text:")
    model = options.get("model", "gpt" if is_text else "resnet18") if ".py:" not in head else ""
    name = f"{data} {model}".strip()
    if task is None:
        family = FAMILIES.get(model, "cnn" if model else OWN)
        return TaskRow(name, family, data, "loss" if is_text else "error", text=portable)
    metric = task.metric if isinstance(task.metric, str) else "own"
    return TaskRow(
        name, family_of_task(task), data, metric, task.data.num_answers, blind_error(task), steps=task.steps, text=portable
    )


def _options(text: str) -> dict[str, Any]:
    try:
        return parse_options(text)
    except ParedownError:
        return {}


def _task(text: str, folder: Path | None) -> Task | None:
    try:
        return cached_task(text, folder)
    except ParedownError:
        return None


# --- What a plan is called in a table, the level it belongs to, and its features ---

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


# --- A prior out of trials ---

AS_WRITTEN = row_of(Plan()).key
COUNTED = (Status.DONE, Status.STOPPED, Status.DIVERGED)
NEEDED = ("sweep", "task", "mode", "trial")
CHECKS: dict[str, Check] = {**dict.fromkeys(("sweep", "task", "mode"), TEXT), "propensity": or_none(NUMBER)}  # of a row
Rows = Sequence[Mapping[str, Any]]


class CollectedTrial(NamedTuple):
    """A trial that counts, and where it belongs."""

    task: str  # its text
    column: str  # the key of its PlanRow
    trial: Trial
    propensity: float
    sweep: str


@dataclass(frozen=True)
class Table:
    """Entries, with the rows and columns that they belong to, by text and by key."""

    mode: str
    entries: list[CollectedTrial]
    tasks: dict[str, TaskRow]
    plans: dict[str, PlanRow]


def read_rows(source: str | Path) -> Rows:
    """The trials of an export (.json), or of a store."""
    if str(source).endswith(".json"):
        return _exported(Path(source))
    from paredown.sweeps.export import rows  # SQLAlchemy is an extra
    from paredown.sweeps.store import Store

    with Store(source, may_create=False) as store:
        return rows(store)


def _exported(path: Path) -> Rows:
    found = read_json(path, "export of a sweep", PriorError, name=path.name)
    if not isinstance(found, list) or not all(isinstance(row, dict) and row.keys() >= set(NEEDED) for row in found):
        raise PriorError(f"{path.name} is no export of a sweep: paredown sweep export {path.name} --store FILE writes one.")
    for row in found:
        check_fields({"propensity": None, **row}, CHECKS, f"row of {path.name}", PriorError)
    return found


def collect(
    rows: Rows, name: str, *, sweeps: Iterable[str] = (), folder: Path | None = None, is_finished: bool = False
) -> PriorData:
    """The prior of all trials, or of all on the tasks of some sweeps; tasks are looked for in `folder`, without one none that are code.

    `is_finished`: only tasks of which these sweeps have nothing left to run; of others a sample would be what happened to run first.
    """
    sweeps = set(sweeps)
    waiting = {row["task"] for row in rows if row["trial"] is None and (not sweeps or row["sweep"] in sweeps)}
    finished = [row for row in rows if row["trial"] is not None and not (is_finished and row["task"] in waiting)]
    unknown = sorted(sweeps - {str(row["sweep"]) for row in finished})
    if unknown:
        raise PriorError(f"sweep {unknown[0]!r} has no finished trial here. There are: {', '.join(_names(finished)) or 'none'}.")
    texts = {row["task"] for row in finished if not sweeps or row["sweep"] in sweeps}
    wanted = sorted((row for row in finished if row["task"] in texts), key=lambda row: bool(sweeps) and row["sweep"] not in sweeps)
    modes = {_mode(row) for row in wanted}
    if len(modes) != 1:
        told = (
            "there is no finished trial" if not modes else "sweeps of both modes, store and simulate, are there: name those of one"
        )
        raise PriorError(f"no prior can be made: {told}.")
    folder = None if folder is None else folder.resolve()
    return _earlier(name, _table(wanted, modes.pop(), folder), folder)


def _mode(row: Mapping[str, Any]) -> str:
    return "store" if row["mode"] == "store" else "simulate"


def _names(rows: Rows) -> list[str]:
    return sorted({str(row["sweep"]) for row in rows})


def _table(rows: Rows, mode: str, folder: Path | None) -> Table:
    """What counts, once for each task, plan and seed; columns in the order in which they came."""
    plans: dict[str, PlanRow] = {}
    found: dict[tuple[str, str, int], CollectedTrial] = {}
    for row in rows:
        trial = _trial(row)
        if trial.status not in COUNTED:
            continue
        for column in [recipe_row(one) for one in templates_of(trial.plan)] or [
            row_of(replace(trial.plan, made_for={}, reason=""))
        ]:
            plans.setdefault(column.key, column)
            place = str(row["task"]), column.key, trial.seed
            odds = float(row.get("propensity") or 1.0)
            new = CollectedTrial(*place[:2], trial, odds, str(row["sweep"]))
            kept = found.setdefault(place, new)
            found[place] = kept._replace(propensity=max(odds, kept.propensity))
    if not found:
        raise PriorError(f"no prior can be made: of {len(rows)} trials none was judged and none diverged.")
    texts = dict.fromkeys(place[0] for place in found)
    return Table(mode, list(found.values()), {text: row_of_task(text, folder) for text in texts}, plans)


def _trial(row: Mapping[str, Any]) -> Trial:
    try:
        return Trial.from_json(row["trial"])
    except ParedownError as error:
        raise PriorError(f"a trial of task {str(row['task'])[:80]!r} cannot be read: {error}") from None


def _earlier(name: str, table: Table, folder: Path | None) -> PriorData:
    """The matrices."""
    at_task, at_plan = ({key: i for i, key in enumerate(part)} for part in (table.tasks, table.plans))
    shape, seeds = (len(at_task), len(at_plan)), _places(table.entries)
    depth = 1 + max(seeds.values())
    sheets = {word: np.full((*shape, depth), np.nan) for word in ("runs", "memory", "measured")}
    diverged, propensity = np.zeros(shape), np.zeros(shape)
    for entry in table.entries:
        place, trial = (at_task[entry.task], at_plan[entry.column]), entry.trial
        at = (*place, seeds[entry.task, trial.seed])
        sheets["runs"][at] = np.inf if trial.status is Status.DIVERGED else trial.error
        sheets["memory"][at] = _bytes(entry, table.mode, folder)
        sheets["measured"][at] = trial.measured_peak_bytes if trial.measured_peak_bytes is not None else np.nan
        diverged[place] += trial.status is Status.DIVERGED
        propensity[place] = max(propensity[place], entry.propensity)
    memory, measured = (_mean(sheets[word]) for word in ("memory", "measured"))
    full = memory[:, at_plan[AS_WRITTEN]] if AS_WRITTEN in at_plan else np.full(shape[0], np.nan)
    tasks = [
        replace(row, full_bytes=None if np.isnan(f) else float(f)) for row, f in zip(_told_apart(table, name), full, strict=True)
    ]
    told = {"diverged": diverged, "propensity": propensity, "provenance": provenance_of(table.entries)}
    runs = _guessed(sheets["runs"], [row.blind for row in tasks])
    return PriorData.of_runs(name, table.mode, tasks, list(table.plans.values()), runs, memory=memory, measured=measured, **told)


def _places(entries: Iterable[CollectedTrial]) -> dict[tuple[str, int], int]:
    """Of each task and seed, which of the task's seeds it is."""
    pairs = sorted({(entry.task, entry.trial.seed) for entry in entries})
    first = {task: i for i, (task, _) in reversed(list(enumerate(pairs)))}
    return {pair: i - first[pair[0]] for i, pair in enumerate(pairs)}


def _bytes(entry: CollectedTrial, mode: str, folder: Path | None) -> float:
    """Predicted peak bytes; where arithmetic is simulated and no step stores what a plan speaks of, PEPPP's count."""
    if mode == "simulate":
        try:
            return peppp_bytes(entry.task, entry.trial.plan, folder)
        except (ParedownError, IndexError):
            pass
    predicted = entry.trial.predicted_peak_bytes
    return np.nan if predicted is None else float(predicted)


def _mean(sheet: Array) -> Array:
    """Over seeds, NaN where there is none."""
    counts = np.isfinite(sheet).sum(axis=2)
    return np.where(counts > 0, np.nansum(sheet, axis=2) / np.maximum(counts, 1), np.nan)


def _guessed(runs: Array, blind: Sequence[float | None]) -> Array:
    """Runs that diverged with the error of a blind guess; where that is not known, with the worst that their task had."""
    finite = np.where(np.isinf(runs), np.nan, runs)
    worst = [np.nanmax(row) if np.isfinite(row).any() else 1.0 for row in finite]
    instead = np.array([w if b is None else b for w, b in zip(worst, blind, strict=True)])
    return np.where(np.isinf(runs), instead[:, None, None], runs)


def _told_apart(table: Table, source: str) -> list[TaskRow]:
    """Rows whose names differ: by their whole texts where the short ones do not tell them apart, then by number."""
    count, taken = Counter(row.name for row in table.tasks.values()), Counter[str]()
    found: list[TaskRow] = []
    for row in table.tasks.values():
        name = row.name if count[row.name] == 1 else row.text
        taken[name] += 1
        found.append(replace(row, source=source, name=name if taken[name] == 1 else f"{name} ({taken[name]})"))
    return found


def provenance_of(entries: Iterable[CollectedTrial]) -> tuple[dict[str, Any], ...]:
    """Commit, device and versions of the trials that are in a prior, how many each, their sweeps and the day on which this was made."""
    found: dict[str, list[CollectedTrial]] = {}
    for entry in {id(entry.trial): entry for entry in entries}.values():  # a trial may stand in two columns
        trial = entry.trial
        told = {"commit": trial.commit, "device": trial.device, "versions": dict(trial.versions)}
        found.setdefault(json.dumps({word: part for word, part in told.items() if part}, sort_keys=True), []).append(entry)
    day = datetime.now(UTC).date().isoformat()
    return tuple(
        {**json.loads(told), "trials": len(of), "sweeps": sorted({entry.sweep for entry in of}), "collected": day}
        for told, of in found.items()
    )
