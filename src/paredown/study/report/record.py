"""A `Record` holds trials, picks, memory and changes as one JSON value, which `page.render` turns into a report page; all are optional.

>>> from paredown.study.tasks.trial import Status
>>> trial = Trial("digits", Plan.preset("lpmm"), 0, Status.DONE, error=0.025, predicted_peak_bytes=2**20)
>>> record = Record.of_trials("two plans", [trial, Trial("digits", Plan(), 0, Status.DONE, error=0.02, predicted_peak_bytes=2**21)])
>>> record
Record('two plans': 1 task, 2 plans, 2 trials)
>>> record.studies[0].picks
(BudgetPick(nbytes=1048576, label='lpmm'), BudgetPick(nbytes=2097152, label='baseline'))
>>> Record.from_json(record.to_json()) == record
True

`to_json` scrubs every text, so that records and pages can be shared: of an absolute path only the last part remains, and names of this
host, this user and addresses of databases are removed.

>>> scrub("[Errno 2] No such file: '/home/ann/my models/net.py', see https://example.org/a/b and int8/64@bf16")
"[Errno 2] No such file: 'net.py', see https://example.org/a/b and int8/64@bf16"
>>> scrub("images:/data/ann/faces.npz#steps=3")
'images:faces.npz#steps=3'
>>> scrub("store postgresql://ann:secret@db.example.org/trials, file C:\\\\Users\\\\ann\\\\plan.json")
'store postgresql://..., file plan.json'
"""

from __future__ import annotations

import getpass
import re
import socket
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paredown.errors import ReportError
from paredown.plan.plan import Plan
from paredown.plan.trace import Trace
from paredown.serial import dump_dataclass, load_json, read_versioned, save_json
from paredown.session.changes import Action, Change
from paredown.study.pick.answer import Picked
from paredown.study.report import studies as parts
from paredown.study.sweeps.plan_labels import Labels, distinct, distinct_labels
from paredown.study.sweeps.sweep import SweepCounts
from paredown.study.tasks.trial import Status, Trial

if TYPE_CHECKING:
    from paredown.session.session import Session
    from paredown.study.sweeps.store import Store


QUOTED = re.compile(r"(?P<quote>['\"])(?:file://)?(?:/|~|[A-Za-z]:[\\/]|\\\\)[^'\"\n]*[\\/](?P<last>[^'\"\n\\/]*)(?P=quote)")
POSIX = re.compile(r"(?:file://|(?<![\w/.<>@*\]-]))(?:~\w*)?/(?:[^\s/'\"<>:,;()]+/)+(?P<last>[^\s/'\"<>:,;()]*)")
ROOTED = re.compile(
    r"(?<![\w/.<>@*\]-])(?:~/|/(?=(?:home|root|Users|tmp|var|etc|opt|usr|mnt|srv|data)\b))(?P<last>[^\s/'\"<>:,;()]+)"
)
WINDOWS = re.compile(r"(?:\b[A-Za-z]:|\\)[\\/](?:[^\s\\/'\"<>:,;()]+[\\/])*(?P<last>[^\s\\/'\"<>:,;()]*)")
DATABASE = re.compile(r"\b(?P<kind>postgres\w*|mysql|sqlite)(?:\+\w+)?://[^\s'\",;)]*")
LOGIN = re.compile(r"\b(?P<kind>\w+)://[^\s/@'\"]+@[^\s'\",;)]*")
SURROGATE = re.compile("[\ud800-\udfff]")
COMMON_NAMES = frozenset(
    {"root", "user", "admin", "ubuntu", "debian", "runner", "nobody", "localhost", "main", "test"}
)  # not removed
SHORTEST = 4  # characters of a host or user name that is removed; shorter names are parts of ordinary words


@lru_cache(maxsize=1 << 14)
def scrub(text: str) -> str:
    """Return `text` without absolute paths, host and user names and database addresses."""
    text = SURROGATE.sub("\ufffd", text)
    if "/" in text or "\\" in text:
        text = text.replace(_home(), "~")  # first, since it can contain spaces
        for pattern in (DATABASE, LOGIN):
            text = pattern.sub(lambda found: f"{found['kind']}://...", text)
        text = QUOTED.sub(lambda found: f"{found['quote']}{found['last'] or '...'}{found['quote']}", text)
        for pattern in (WINDOWS, POSIX, ROOTED):
            text = pattern.sub(lambda found: found["last"] or "...", text)
    return _names().sub("...", text)


def scrub_all(value: Any, names: Mapping[str, str] | None = None) -> Any:
    """Return a JSON value in which every text is scrubbed of paths and addresses, or replaced by its entry in `names` if it has one."""
    names = names or {}
    if isinstance(value, str):
        return names.get(value) or scrub(value)
    if isinstance(value, dict):
        return {scrub(str(key)): scrub_all(part, names) for key, part in value.items()}
    return [scrub_all(part, names) for part in value] if isinstance(value, list) else value


def scrub_names(names: Iterable[str]) -> dict[str, str]:
    """Return a scrubbed name for each name, numbered if scrubbing makes two of them equal.

    >>> scrub_names(["/home/ann/plan.json", "/home/bob/plan.json", "lpmm"])
    {'/home/ann/plan.json': 'plan.json', '/home/bob/plan.json': 'plan.json (2)', 'lpmm': 'lpmm'}
    """
    known = list(dict.fromkeys(names))
    return dict(zip(known, distinct(map(scrub, known)), strict=True))


@lru_cache(maxsize=1)
def _home() -> str:
    """Return the home folder of this user, to be removed from texts."""
    home = str(Path.home())
    return home if len(home) > SHORTEST else "\ud800"


@lru_cache(maxsize=1)
def _names() -> re.Pattern[str]:
    try:
        user = getpass.getuser()
    except (OSError, KeyError):  # a user id without a name
        user = ""
    host = socket.gethostname()
    names = {name for name in (user, host, host.partition(".")[0]) if len(name) >= SHORTEST and name.lower() not in COMMON_NAMES}
    return (
        re.compile(rf"\b(?:{'|'.join(map(re.escape, sorted(names, key=len, reverse=True)))})\b") if names else re.compile(r"(?!)")
    )


# --- the record ------------------------------------------------------------------------------------------------------

VERSION = 2  # of the JSON; 1 had predicted bytes as those of marks, and bytes by module
MOST_RUNS = 2000  # trials that are listed
MOST_CURVES = 200  # training curves that are drawn


@dataclass(frozen=True, repr=False)
class Record:
    """The content of a report page: a Study for each task, trials (`runs`), and what the Guard of a session did (`actions`).

    `changes`: tensors of the step that are not stored as the plan requests; `given`: how every tensor is stored.
    """

    title: str
    studies: tuple[parts.Study, ...] = ()
    runs: tuple[parts.ReportedTrial, ...] = ()
    actions: tuple[Action, ...] = ()
    changes: tuple[Change, ...] = ()
    given: tuple[Change, ...] = ()
    progress: tuple[SweepCounts, ...] = ()
    notes: tuple[str, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict[str, str], hash=False)
    commit: str = ""

    def __repr__(self) -> str:
        nums = {"task": len(self.studies), "plan": sum(len(study.marks) for study in self.studies), "trial": len(self.runs)}
        counts = ", ".join(f"{num} {what}{'s' * (num != 1)}" for what, num in nums.items())
        return f"Record({self.title!r}: {counts})"

    @staticmethod
    def of_pick(picked: Picked, *, trace: Trace | None = None, title: str = "", session: Session | None = None) -> Record:
        """Return the record of a pick; `trace` adds memory of plans, `session` how tensors are stored and what its Guard did."""
        study = parts.study_of_pick(picked)
        labels = Labels({point.label: point.plan for point in picked.frontier.points})
        record = Record(title or f"{picked.task}: a plan within a budget", studies=(study,)).with_trials(picked.trials, labels)
        record = record if trace is None else record.with_footprints(trace, parts.plans_to_show(picked))
        return record if session is None else record.with_session(session)

    @staticmethod
    def of_trials(
        title: str,
        trials: Iterable[Trial],
        *,
        labels: Labels | Mapping[str, Plan] | None = None,
        times: Sequence[tuple[str, str]] = (),
    ) -> Record:
        """Return the record of measured trials, a study (a task's part of the page) for each task.

        `labels` names plans, `times` has (end time, host) of each trial.
        """
        rows, names = list(trials), labels if isinstance(labels, Labels) else Labels(labels)
        by_task: dict[str, list[Trial]] = {}
        for trial in rows:
            by_task.setdefault(trial.task, []).append(trial)
        studies = tuple(parts.study_of_trials(task, of_task, names) for task, of_task in by_task.items())
        return Record(title, studies=studies).with_trials(rows, names, times)

    @staticmethod
    def of_store(store: Store, *, sweep: str | None = None, title: str = "") -> Record:
        """Return the record of a database of trials: its finished trials by task and plan, and the progress of its sweeps."""
        from paredown.study.sweeps.database import readable  # SQLAlchemy is an extra
        from paredown.study.sweeps.export import rows
        from paredown.study.sweeps.status import count

        sweeps = count(store)
        shown = [counts for counts in sweeps if sweep is None or counts.sweep == sweep]
        if sweep is not None and not shown:
            raise ReportError(
                f"the store has no sweep {sweep!r}. It has: {', '.join(counts.sweep for counts in sweeps) or 'none'}."
            )
        names = ", ".join(counts.sweep for counts in shown)
        with readable("a trial"):
            ended = [(row, Trial.from_json(row["trial"])) for row in rows(store, sweep) if row["trial"] is not None]
        finished = [(row, trial) for row, trial in ended if trial.status is not Status.INFEASIBLE]
        labels = Labels(of_tasks=distinct_labels((trial.task, trial.plan, row["label"]) for row, trial in finished))
        record = Record.of_trials(
            title or (f"Sweep {names}" if names else "An empty store"),
            [trial for _, trial in finished],
            labels=labels,
            times=_times([row for row, _ in finished]),
        )
        # listed, but in no study: they have no plan, and their label is that of a template
        infeasible = [run_of(trial, row["label"]) for row, trial in ended if trial.status is Status.INFEASIBLE]
        return replace(record, progress=tuple(shown), runs=(*record.runs, *infeasible))

    def with_trials(
        self, trials: Iterable[Trial], labels: Labels | Mapping[str, Plan] | None = None, times: Sequence[tuple[str, str]] = ()
    ) -> Record:
        """Return this record with further trials; `times` is empty, or has (end time, host) of each trial."""
        rows = list(trials)
        names = labels if isinstance(labels, Labels) else Labels(labels)
        last = _last(rows)
        notes = (
            [f"{len(last)} of {len(rows)} trials are listed; `paredown sweep export` writes all."] if len(last) < len(rows) else []
        )
        runs = _runs([rows[i] for i in last], names)
        if times:
            runs = [replace(run, finished_at=times[i][0], host=times[i][1]) for run, i in zip(runs, last, strict=True)]
        return replace(
            self,
            runs=(*self.runs, *runs),
            notes=(*self.notes, *notes),
            versions=_joined([self.versions, *(trial.versions for trial in rows)]),
            commit=_joined([{"": self.commit}, *({"": trial.commit} for trial in rows)]).get("", ""),
        )

    def with_footprints(self, trace: Trace, plans: Mapping[str, Plan], *, task: str = "") -> Record:
        """Return this record with the memory of a step under `plans`, in the Study (part) of `task`, by default the first one."""
        studies = self.studies or (parts.Study(task or trace.model),)
        task = task or studies[0].task
        if task not in (study.task for study in studies):
            raise ReportError(f"the record has no task {task!r}. There are: {', '.join(study.task for study in studies)}.")
        kept = tuple(parts.memory_use(trace, label, plan) for label, plan in plans.items())
        written = next((label for label, plan in plans.items() if plan.changes_nothing), "")
        full = next((row.peak_bytes for row in kept if row.label == written), None)
        return replace(
            self, studies=tuple(study.with_memory(kept, written, full) if study.task == task else study for study in studies)
        )

    def with_session(self, session: Session) -> Record:
        """Return this record with how an open session stores every tensor, after a step, and what its Guard has done."""
        given = tuple(Change(row.slot, row.asked, row.now, row.why) for row in session.explain())
        return replace(self, changes=tuple(session.changes), given=given, actions=tuple(session.actions))

    def to_json(self) -> dict[str, Any]:
        """Return the record as a dict for JSON, with paths, host and user names removed from all texts."""
        labels = [row.label for study in self.studies for row in (*study.marks, *study.kept)] + [run.plan for run in self.runs]
        tasks = [study.task for study in self.studies] + [run.task for run in self.runs]
        return {"version": VERSION, **scrub_all(dump_dataclass(self), scrub_names(tasks) | scrub_names(labels))}

    @staticmethod
    def from_json(value: Any) -> Record:
        """Return the record whose `to_json` is `value`; raise ReportError if `value` is no valid record."""
        return read_versioned(Record, value, "record", VERSION, ReportError, oldest=VERSION)

    def save(self, path: str | PathLike[str]) -> None:
        """Write the record as JSON to a file."""
        save_json(path, self.to_json(), ReportError)

    @staticmethod
    def load(path: str | PathLike[str]) -> Record:
        """Return the record, a report's content, that `save` wrote; ReportError if the file holds none."""
        hint = "Records are written by record.save(path)."
        return load_json(path, "record", ReportError, Record.from_json, hint=hint, name=Path(path).name)


def _times(finished: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Return (end time, host) of each row of a finished trial; hosts are "host 1" and so on, since pages name no machines."""
    first: dict[str, str] = {}
    for row in finished:
        if row["host"]:
            first[row["host"]] = min(first.get(row["host"], row["started_at"] or ""), row["started_at"] or "")
    names = {host: f"host {i}" for i, host in enumerate(sorted(first, key=lambda host: (first[host], host)), 1)}
    return [(row["finished_at"] or "", names.get(row["host"], "")) for row in finished]


def _last(trials: list[Trial]) -> list[int]:
    """Return the positions of the trials that a report lists: all, or the last ones of each task if there are more than MOST_RUNS."""
    if len(trials) <= MOST_RUNS:
        return list(range(len(trials)))
    left = dict.fromkeys((trial.task for trial in trials), max(1, MOST_RUNS // len({trial.task for trial in trials})))
    kept: list[int] = []
    for i in reversed(range(len(trials))):
        left[trials[i].task] -= 1
        kept += [i] if left[trials[i].task] >= 0 else []
    return kept[::-1]


def _runs(trials: list[Trial], names: Labels) -> list[parts.ReportedTrial]:
    """Return trials as rows of the report's table; the first trial of each plan on a task has its loss curve, up to MOST_CURVES curves."""
    most = max(1, MOST_CURVES // max(1, len({trial.task for trial in trials})))
    drawn: dict[str, set[str]] = {trial.task: set() for trial in trials}
    runs: list[parts.ReportedTrial] = []
    for trial in trials:
        label, labels = names.of(trial.plan, trial.task), drawn[trial.task]
        runs.append(run_of(trial, label, has_curve=label not in labels and len(labels) < most))
        labels |= {label} if runs[-1].curve else set()
    return runs


def run_of(trial: Trial, label: str, *, has_curve: bool = True) -> parts.ReportedTrial:
    """Return a trial as a row of the report's table; `label` is the name of its plan, `has_curve` adds its loss curve."""
    same = ("task", "seed", "error", "loss", "seconds", "step_seconds", "step_ratio", "reason", "device", "commit")
    return parts.ReportedTrial(
        plan=label,
        status=trial.status.value,
        predicted_bytes=trial.predicted_peak_bytes,
        measured_bytes=trial.measured_peak_bytes,
        curve=parts.thin(trial.curve) if has_curve else (),
        **{name: getattr(trial, name) for name in same},
    )


def _joined(mappings: Iterable[Mapping[str, str]]) -> dict[str, str]:
    """Return mappings joined into one: for each name its distinct values, separated by commas.

    >>> _joined([{"torch": "2.11"}, {"torch": "2.13"}, {"torch": "2.11"}])
    {'torch': '2.11, 2.13'}
    """
    values: dict[str, dict[str, None]] = {}
    for mapping in mappings:
        for name, value in mapping.items():
            values.setdefault(name, {}).update(dict.fromkeys(value.split(", ") if value else ()))
    return {name: ", ".join(several) for name, several in values.items() if several}
