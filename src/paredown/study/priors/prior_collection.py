"""Make a prior from the trials of a store, or of the JSON that `paredown sweep export` writes. Its entry for a trial, by status:

    done, stopped                    the measured error
    diverged                         the error of random guessing (where that is not known: the task's worst error), and counted
    out of memory, killed, failed    no entry

The row of a task has its model's family and its number of answers where the task can be loaded, and else what its name contains.
Code that a task names runs only from a folder that the caller names. A prior contains names of devices and versions, and nothing
else about a machine.

>>> row_of_task("digits#model=mlp,steps=5", Path("."))
TaskRow(name='digits mlp', family='mlp', data='digits', metric='error', answers=10, blind=0.9, full_bytes=None, steps=5, source='', \
text='digits#model=mlp,steps=5')

The column of a plan has a label and, for PEPPP's configurations, a level.

>>> [row_of(plan).label for plan in (Plan(), Plan.preset("lpmm"), Plan.uniform(activation="int4/64@bf16", weight="bf16"))]
['baseline', 'lpmm', 'weight bf16, activation int4/64@bf16']
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path, PurePath
from typing import Any, NamedTuple

import numpy as np

from paredown.assignment.assign import templates_of
from paredown.errors import ParedownError, PriorError
from paredown.plan.plan import Plan
from paredown.serial import NUMBER, TEXT, Check, check_fields, or_none, read_json
from paredown.study.priors.prior_data import Array, PlanRow, PriorData, TaskRow, mean_of_seeds, random_guess_error
from paredown.study.sweeps.plan_labels import distinct, plan_label
from paredown.study.tasks.lookup import cached_task, parse_options, portable_text
from paredown.study.tasks.task import Task, task_family
from paredown.study.tasks.task_trace import peppp_bytes
from paredown.study.tasks.trial import Status, Trial, with_baseline_steps

NO_CNN = ("mlp", "vit", "gpt", "lstm")  # models that are families, for tasks that cannot be loaded here
OWN = "own"  # family of other models, and metric that is a function
PEPPP_FORMAT = re.compile(r"(e\d+m\d+)b\d+fns")
COUNTED = (Status.DONE, Status.STOPPED, Status.DIVERGED)
REQUIRED = ("sweep", "task", "mode", "trial")
CHECKS: dict[str, Check] = {
    **dict.fromkeys(("sweep", "task", "mode"), TEXT),
    "propensity": or_none(NUMBER),
}  # of a row of an export
Rows = Sequence[Mapping[str, Any]]


class CollectedTrial(NamedTuple):
    """Holds a trial that becomes an entry of a prior, in the row of its `task` and the `column` of its plan.

    `propensity` is the probability that its sweep drew it.
    """

    task: str  # the text of the task
    column: str  # the key of its PlanRow
    trial: Trial
    propensity: float
    sweep: str


def read_rows(source: str | Path) -> Rows:
    """Return the rows of trials in `source`, a JSON file of `paredown sweep export`, or a store (a database of trials)."""
    if not str(source).endswith(".json"):
        from paredown.study.sweeps.export import rows as rows_of  # SQLAlchemy is an extra
        from paredown.study.sweeps.store import Store

        with Store(source, may_create=False) as store:
            return rows_of(store)
    path = Path(source)
    rows = read_json(path, "export of a sweep", PriorError, name=path.name)
    if not isinstance(rows, list) or not all(isinstance(row, dict) and row.keys() >= set(REQUIRED) for row in rows):
        raise PriorError(f"{path.name} is not an export of a sweep, which paredown sweep export {path.name} --store FILE writes.")
    for row in rows:
        check_fields({"propensity": None, **row}, CHECKS, f"row of {path.name}", PriorError)
    return rows


def collect(
    rows: Rows, name: str, *, sweeps: Iterable[str] = (), folder: Path | None = None, is_finished: bool = False
) -> PriorData:
    """Return a prior called `name` of all trials in `rows`, or of those on the tasks of `sweeps`.

    Tasks in files of code are loaded from `folder` alone.

    `is_finished`: take only tasks without unfinished trials in these sweeps; the finished trials of other tasks are a biased sample.
    """
    sweeps = set(sweeps)
    open_tasks = {row["task"] for row in rows if row["trial"] is None and (not sweeps or row["sweep"] in sweeps)}
    finished = [row for row in rows if row["trial"] is not None and not (is_finished and row["task"] in open_tasks)]
    unknown = sorted(sweeps - {str(row["sweep"]) for row in finished})
    if unknown:
        names = ", ".join(sorted({str(row["sweep"]) for row in finished}))
        raise PriorError(f"sweep {unknown[0]!r} has no finished trial here. Sweeps with some: {names or 'none'}.")
    texts = {row["task"] for row in finished if not sweeps or row["sweep"] in sweeps}
    selected = sorted(
        (row for row in finished if row["task"] in texts), key=lambda row: bool(sweeps) and row["sweep"] not in sweeps
    )
    modes = {"store" if row["mode"] == "store" else "simulate" for row in selected}
    if len(modes) != 1:
        mixed = "the sweeps have both modes, store and simulate; name sweeps of one mode"
        raise PriorError(f"no prior can be made: {mixed if modes else 'no trial is finished'}.")
    folder = None if folder is None else folder.resolve()
    return _prior_data(name, modes.pop(), *_table(selected), folder)


def _table(rows: Rows) -> tuple[list[CollectedTrial], dict[str, PlanRow]]:
    """Return the trials in `rows` with an error or that diverged, one for each task, plan and seed, and the prior's columns."""
    plans: dict[str, PlanRow] = {}
    entries: dict[tuple[str, str, int], CollectedTrial] = {}
    for row in rows:
        try:
            trial = Trial.from_json(row["trial"])
        except ParedownError as error:
            raise PriorError(f"a trial of task {str(row['task'])[:80]!r} cannot be read: {error}") from None
        if trial.status not in COUNTED:
            continue
        for column in [PlanRow(text, None, text) for text in templates_of(trial.plan)] or [
            row_of(replace(trial.plan, made_for={}, reason=""))
        ]:
            plans.setdefault(column.key, column)
            entry_key = str(row["task"]), column.key, trial.seed
            propensity = float(row.get("propensity") or 1.0)
            entry = CollectedTrial(*entry_key[:2], trial, propensity, str(row["sweep"]))
            kept = entries.setdefault(entry_key, entry)
            entries[entry_key] = kept._replace(propensity=max(propensity, kept.propensity))
    if not entries:
        raise PriorError(f"no prior can be made: of {len(rows)} trials none has an error and none diverged.")
    return list(entries.values()), plans


def _prior_data(name: str, mode: str, entries: list[CollectedTrial], plans: dict[str, PlanRow], folder: Path | None) -> PriorData:
    texts = dict.fromkeys(entry.task for entry in entries)
    row_of_text, column_of = ({key: i for i, key in enumerate(part)} for part in (texts, plans))
    shape, seed_index = (len(row_of_text), len(column_of)), _seed_indices(entries)
    depth = 1 + max(seed_index.values())
    by_seed = {word: np.full((*shape, depth), np.nan) for word in ("runs", "memory", "measured", "step_ratio")}
    diverged, propensity = np.zeros(shape), np.zeros(shape)
    trials = with_baseline_steps((entry.task, entry.trial) for entry in entries)
    for entry, trial in zip(entries, trials, strict=True):
        pair = row_of_text[entry.task], column_of[entry.column]
        index = (*pair, seed_index[entry.task, trial.seed])
        by_seed["runs"][index] = np.inf if trial.status is Status.DIVERGED else trial.error
        by_seed["memory"][index] = _bytes(entry, mode, folder)
        by_seed["measured"][index] = trial.measured_peak_bytes  # None becomes NaN
        by_seed["step_ratio"][index] = trial.step_ratio
        diverged[pair] += trial.status is Status.DIVERGED
        propensity[pair] = max(propensity[pair], entry.propensity)
    memory, measured, step_ratio = (mean_of_seeds(by_seed[word]) for word in ("memory", "measured", "step_ratio"))
    baseline = row_of(Plan()).key
    full = memory[:, column_of[baseline]] if baseline in column_of else np.full(shape[0], np.nan)
    rows = zip(_distinct_task_rows([row_of_task(text, folder) for text in texts], name), full, strict=True)
    tasks = [replace(row, full_bytes=None if np.isnan(nbytes) else float(nbytes)) for row, nbytes in rows]
    runs = _with_diverged(by_seed["runs"], [row.blind for row in tasks])
    labels = distinct(plan.label for plan in plans.values())
    columns = tuple(replace(plan, label=label) for plan, label in zip(plans.values(), labels, strict=True))
    provenance = provenance_of(entries)
    return PriorData(name, mode, tuple(tasks), columns, runs, memory, measured, diverged, propensity, step_ratio, provenance)


def _seed_indices(entries: Iterable[CollectedTrial]) -> dict[tuple[str, int], int]:
    pairs = sorted({(entry.task, entry.trial.seed) for entry in entries})
    first = {task: i for i, (task, _) in reversed(list(enumerate(pairs)))}
    return {pair: i - first[pair[0]] for i, pair in enumerate(pairs)}


def _bytes(entry: CollectedTrial, mode: str, folder: Path | None) -> float:
    """Return a trial's predicted peak bytes; in simulate mode PEPPP's count if possible, of a task whose code is in `folder`."""
    if mode == "simulate":
        try:
            return peppp_bytes(entry.task, entry.trial.plan, folder)
        except (ParedownError, IndexError):
            pass
    predicted = entry.trial.predicted_peak_bytes
    return np.nan if predicted is None else float(predicted)


def _with_diverged(runs: Array, blind: Sequence[float | None]) -> Array:
    """Return the errors of runs, where diverged runs (infinite) have the error of random guessing (`blind`) or the task's worst error."""
    finite = np.where(np.isinf(runs), np.nan, runs)
    worst = [np.nanmax(row) if np.isfinite(row).any() else 1.0 for row in finite]
    replacement = np.array([w if b is None else b for w, b in zip(worst, blind, strict=True)])
    return np.where(np.isinf(runs), replacement[:, None, None], runs)


def _distinct_task_rows(tasks: list[TaskRow], source: str) -> list[TaskRow]:
    """Return `tasks` with `source`, their prior's name, and distinct names: tasks of equal names are named by their whole text."""
    count = Counter(row.name for row in tasks)
    names = distinct(row.name if count[row.name] == 1 else row.text for row in tasks)
    return [replace(row, source=source, name=name) for row, name in zip(tasks, names, strict=True)]


def provenance_of(entries: Iterable[CollectedTrial]) -> tuple[dict[str, Any], ...]:
    """Return a dict for each combination of commit, device and versions: number of trials, sweeps, today's date."""
    groups: dict[str, list[CollectedTrial]] = {}
    for entry in {id(entry.trial): entry for entry in entries}.values():  # a trial may be in two columns
        trial = entry.trial
        origin = {"commit": trial.commit, "device": trial.device, "versions": dict(trial.versions)}
        groups.setdefault(json.dumps({field: value for field, value in origin.items() if value}, sort_keys=True), []).append(entry)
    day = datetime.now(UTC).date().isoformat()
    return tuple(
        {**json.loads(origin), "trials": len(group), "sweeps": sorted({entry.sweep for entry in group}), "collected": day}
        for origin, group in groups.items()
    )


# --- rows and columns --------------------------------------------------------------------------------------------------


def row_of_task(text: str, folder: Path | None) -> TaskRow:
    """Return a task's row of a prior; if the task cannot be loaded, or is code and `folder` is None, from its text alone."""
    portable = portable_text(text)
    head, _, tail = portable.partition("#")
    data = PurePath(head.partition(":")[2] or head).name
    data = data.removesuffix(".gz").rpartition(".")[0] or data
    options: dict[str, Any] = {}
    task: Task | None = None
    with suppress(ParedownError):
        options = parse_options(tail)
    with suppress(ParedownError):
        task = cached_task(text, folder)
    if "superclass" in options:
        data = f"{data}/{options['superclass']}"
    is_text = head.startswith("text:")
    model = options.get("model", "gpt" if is_text else "resnet18") if ".py:" not in head else ""
    name = f"{data} {model}".strip() + (", fine-tuned" if "start" in options else "")
    if task is None:
        family = model if model in NO_CNN else "cnn" if model else OWN
        return TaskRow(name, family, data, "loss" if is_text else "error", text=portable)
    metric, answers = task.metric if isinstance(task.metric, str) else OWN, task.data.num_answers
    return TaskRow(
        name, task_family(task), data, metric, answers, random_guess_error(metric, answers), steps=task.steps, text=portable
    )


def row_of(plan: Plan) -> PlanRow:
    """Return a plan's column of a prior: JSON, label, and for PEPPP's configurations a level, which plans alike share."""
    formats = {key: str(assignment.format) for key, assignment in plan.rules if assignment.format is not None}
    low, high = (PEPPP_FORMAT.fullmatch(formats.get(role, "")) for role in ("weight", "master"))
    if low and high:
        return PlanRow(f"{low[1]} {high[1]}", plan.to_json(), "", low[1])
    return PlanRow(plan_label(plan), plan.to_json())
