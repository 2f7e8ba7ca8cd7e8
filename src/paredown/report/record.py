"""A record: what was tried, picked and trained, as one JSON value; every part may be missing. `page.render` makes a page of it.

What leaves a record, as JSON or as a page, holds no absolute path and no name of a host or user: see record.py.

>>> from paredown.tasks.trial import Status
>>> trial = Trial("digits", Plan.preset("lpmm"), 0, Status.DONE, error=0.025, predicted_peak_bytes=2**20)
>>> record = Record.of_trials("two plans", [trial, Trial("digits", Plan(), 0, Status.DONE, error=0.02, predicted_peak_bytes=2**21)])
>>> record
Record('two plans': 1 task, 2 plans, 2 trials)
>>> record.studies[0].picks
(BudgetPick(nbytes=1048576, label='lpmm'), BudgetPick(nbytes=2097152, label='as written'))
>>> Record.from_json(record.to_json()) == record
True

Texts without what tells where they were made: absolute paths, names of this host and this user, addresses of databases.

Of a path its last part is left; text that is none of these is left as it is.

>>> scrub("[Errno 2] No such file: '/home/ann/my models/net.py', see https://example.org/a/b and int8/64@bf16")
"[Errno 2] No such file: 'net.py', see https://example.org/a/b and int8/64@bf16"
>>> scrub("images:/data/ann/faces.npz#steps=3")
'images:faces.npz#steps=3'
>>> scrub("store postgresql://ann:secret@db.example.org/trials, file C:\\\\Users\\\\ann\\\\plan.json")
'store postgresql://..., file plan.json'
"""

from __future__ import annotations

import getpass
import json
import re
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import count
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paredown.errors import ReportError
from paredown.pick.answer import Picked
from paredown.plan.plan import Plan
from paredown.report.studies import (
    Labels,
    ReportedProgress,
    ReportedTrial,
    Study,
    kept_under,
    plans_to_show,
    run_of,
    study_of_pick,
    study_of_trials,
)
from paredown.serial import dump_dataclass, read_dataclass, read_json
from paredown.session.changes import Action, Change
from paredown.tasks.trial import Trial
from paredown.trace.trace import Trace

if TYPE_CHECKING:
    from paredown.session.session import Session
    from paredown.sweeps.store import Store


QUOTED = re.compile(r"(?P<quote>['\"])(?:file://)?(?:/|~|[A-Za-z]:[\\/]|\\\\)[^'\"\n]*[\\/](?P<last>[^'\"\n\\/]*)(?P=quote)")
POSIX = re.compile(r"(?:file://|(?<![\w/.<>@*\]-]))(?:~\w*)?/(?:[^\s/'\"<>:,;()]+/)+(?P<last>[^\s/'\"<>:,;()]*)")
ROOTED = re.compile(
    r"(?<![\w/.<>@*\]-])(?:~/|/(?=(?:home|root|Users|tmp|var|etc|opt|usr|mnt|srv|data)\b))(?P<last>[^\s/'\"<>:,;()]+)"
)
WINDOWS = re.compile(r"(?:\b[A-Za-z]:|\\)[\\/](?:[^\s\\/'\"<>:,;()]+[\\/])*(?P<last>[^\s\\/'\"<>:,;()]*)")
DATABASE = re.compile(r"\b(?P<kind>postgres\w*|mysql|sqlite)(?:\+\w+)?://[^\s'\",;)]*")
LOGIN = re.compile(r"\b(?P<kind>\w+)://[^\s/@'\"]+@[^\s'\",;)]*")
SURROGATE = re.compile("[\ud800-\udfff]")
ANYBODY = frozenset({"root", "user", "admin", "ubuntu", "debian", "runner", "nobody", "localhost", "main", "test"})  # tell nothing
SHORTEST = 4  # of a name that is looked for: shorter ones are parts of ordinary words


@lru_cache(maxsize=1 << 14)
def scrub(text: str) -> str:
    """`text` without them."""
    text = SURROGATE.sub("\ufffd", text)
    if "/" in text or "\\" in text:
        text = text.replace(_home(), "~")  # which may have blanks in it
        for pattern in (DATABASE, LOGIN):
            text = pattern.sub(lambda found: f"{found['kind']}://...", text)
        text = QUOTED.sub(lambda found: f"{found['quote']}{found['last'] or '...'}{found['quote']}", text)
        for pattern in (WINDOWS, POSIX, ROOTED):
            text = pattern.sub(lambda found: found["last"] or "...", text)
    return _names().sub("...", text)


def scrub_all(value: Any, names: Mapping[str, str] | None = None) -> Any:
    """A JSON value with every text of it scrubbed, keys too; `names` has texts that become something else."""
    names = names or {}
    if isinstance(value, str):
        return names.get(value) or scrub(value)
    if isinstance(value, dict):
        return {scrub(str(key)): scrub_all(part, names) for key, part in value.items()}
    return [scrub_all(part, names) for part in value] if isinstance(value, list) else value


def scrub_names(names: Iterable[str]) -> dict[str, str]:
    """Names that tell things apart, scrubbed so that they still do.

    >>> scrub_names(["/home/ann/plan.json", "/home/bob/plan.json", "lpmm"])
    {'/home/ann/plan.json': 'plan.json', '/home/bob/plan.json': 'plan.json (2)', 'lpmm': 'lpmm'}
    """
    found, taken = dict[str, str](), set[str]()
    for name in dict.fromkeys(names):
        new = scrub(name)
        found[name] = next(text for i in count(1) if (text := new if i == 1 else f"{new} ({i})") not in taken)
        taken.add(found[name])
    return found


@lru_cache(maxsize=1)
def _home() -> str:
    """Of this user; something that no text has where there is none to speak of."""
    home = str(Path.home())
    return home if len(home) > SHORTEST else "\ud800"


@lru_cache(maxsize=1)
def _names() -> re.Pattern[str]:
    """This host and this user, where they are told apart from words."""
    try:
        user = getpass.getuser()
    except (OSError, KeyError):  # an id without a name
        user = ""
    host = socket.gethostname()
    names = {name for name in (user, host, host.partition(".")[0]) if len(name) >= SHORTEST and name.lower() not in ANYBODY}
    return (
        re.compile(rf"\b(?:{'|'.join(map(re.escape, sorted(names, key=len, reverse=True)))})\b") if names else re.compile(r"(?!)")
    )


# --- A record ---

VERSION = 1  # of the JSON
LARGEST_BYTES = 256 << 20  # of a file that is read
MOST_RUNS = 2000
MOST_CURVES = 200


@dataclass(frozen=True, repr=False)
class Record:
    """What a page shows. `changes`: what a session could not give as asked; `given`: slot by slot, what it gave."""

    title: str
    studies: tuple[Study, ...] = ()
    runs: tuple[ReportedTrial, ...] = ()
    actions: tuple[Action, ...] = ()
    changes: tuple[Change, ...] = ()
    given: tuple[Change, ...] = ()
    progress: tuple[ReportedProgress, ...] = ()
    notes: tuple[str, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict[str, str], hash=False)
    commit: str = ""

    def __repr__(self) -> str:
        nums = {"task": len(self.studies), "plan": sum(len(study.marks) for study in self.studies), "trial": len(self.runs)}
        said = ", ".join(f"{num} {what}{'s' * (num != 1)}" for what, num in nums.items())
        return f"Record({self.title!r}: {said})"

    # --- made of ------------------------------------------------------------------------------------------------------

    @staticmethod
    def of_pick(picked: Picked, *, trace: Trace | None = None, title: str = "", session: Session | None = None) -> Record:
        """What `pick` answered; with the trace of its step where the memory goes, with a session what it gave and did."""
        study = study_of_pick(picked)
        labels = Labels({point.label: point.plan for point in picked.frontier.points})
        record = Record(title or f"{picked.task}: a plan within a budget", studies=(study,)).with_trials(picked.trials, labels)
        record = record if trace is None else record.with_footprints(trace, plans_to_show(picked))
        return record if session is None else record.with_session(session)

    @staticmethod
    def of_trials(title: str, trials: Iterable[Trial], *, labels: Mapping[str, Plan] | None = None) -> Record:
        """Trials, a study for each of their tasks; `labels` names plans."""
        found, names = list(trials), Labels(labels)
        by_task: dict[str, list[Trial]] = {}
        for trial in found:
            by_task.setdefault(trial.task, []).append(trial)
        studies = tuple(study_of_trials(task, of_it, names) for task, of_it in by_task.items())
        return Record(title, studies=studies).with_trials(found, names)

    @staticmethod
    def of_store(store: Store, *, sweep: str | None = None, title: str = "") -> Record:
        """The trials of a store as it is now, and how far its sweeps are."""
        from paredown.report.store_record import record_of_store

        return record_of_store(store, sweep=sweep, title=title)

    # --- and with -----------------------------------------------------------------------------------------------------

    def with_trials(self, trials: Iterable[Trial], labels: Labels | Mapping[str, Plan] | None = None) -> Record:
        """These trials too: their rows, curves, versions and commit."""
        found = list(trials)
        names = labels if isinstance(labels, Labels) else Labels(labels)
        last = _last(found)
        notes = (
            [f"{len(last)} of {len(found)} trials are listed; `paredown sweep export` has all."] if len(last) < len(found) else []
        )
        runs = _runs(last, names)
        return replace(
            self,
            runs=(*self.runs, *runs),
            notes=(*self.notes, *notes),
            versions=_joined([self.versions, *(trial.versions for trial in found)]),
            commit=_joined([{"": self.commit}, *({"": trial.commit} for trial in found)]).get("", ""),
        )

    def with_footprints(self, trace: Trace, plans: Mapping[str, Plan], *, task: str = "") -> Record:
        """Where the memory of a step goes under these plans; `task` is the first one unless given."""
        studies = self.studies or (Study(task or trace.model),)
        task = task or studies[0].task
        if task not in (study.task for study in studies):
            raise ReportError(f"the record has no task {task!r}. There are: {', '.join(study.task for study in studies)}.")
        kept = kept_under(trace, plans)
        written = next((label for label, plan in plans.items() if plan.changes_nothing), "")
        full = next((row.peak_bytes for row in kept if row.label == written), None)
        return replace(
            self, studies=tuple(study.keeping(kept, written, full) if study.task == task else study for study in studies)
        )

    def with_session(self, session: Session) -> Record:
        """What a session gave, slot by slot, and what its guard did; take it while the session is open and has made a step."""
        given = tuple(Change(row.slot, row.asked, row.now, row.why) for row in session.explain())
        return replace(self, changes=tuple(session.changes), given=given, actions=tuple(session.actions))

    # --- as a file ----------------------------------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """The JSON value, scrubbed."""
        labels = [row.label for study in self.studies for row in (*study.marks, *study.kept)] + [run.plan for run in self.runs]
        tasks = [study.task for study in self.studies] + [run.task for run in self.runs]
        return {"version": VERSION, **scrub_all(dump_dataclass(self), scrub_names(tasks) | scrub_names(labels))}

    @staticmethod
    def from_json(value: Any) -> Record:
        """The record whose `to_json` is `value`; ReportError says why it is none."""
        if not isinstance(value, dict) or not {"version", "title"} <= value.keys():
            raise ReportError("the JSON of a record is an object with version and title; this is none.")
        version = value["version"]
        if type(version) is not int or not 1 <= version <= VERSION:
            said = version if type(version) is int and abs(version) < 10**6 else "no number of one"
            raise ReportError(f"the record is of version {said}; this paredown reads 1 to {VERSION}. Update paredown to read it.")
        return read_dataclass(Record, {name: part for name, part in value.items() if name != "version"}, "record")

    def save(self, path: str | PathLike[str]) -> None:
        """Write the JSON."""
        Path(path).write_text(json.dumps(self.to_json(), allow_nan=False) + "\n", encoding="utf-8")

    @staticmethod
    def load(path: str | PathLike[str]) -> Record:
        """The record that `save` wrote; ReportError says why a file is none."""
        name = Path(path).name
        hint = "Records are written by record.save(path)."
        value = read_json(path, "record", ReportError, hint=hint, name=name, most_bytes=LARGEST_BYTES)
        try:
            return Record.from_json(value)
        except ReportError as error:
            raise ReportError(f"{name}: {error}") from None


def _last(trials: list[Trial]) -> list[Trial]:
    """At most about MOST_RUNS of them: the last of each task, as many of each."""
    if len(trials) <= MOST_RUNS:
        return trials
    left = dict.fromkeys((trial.task for trial in trials), max(1, MOST_RUNS // len({trial.task for trial in trials})))
    kept: list[Trial] = []
    for trial in reversed(trials):
        left[trial.task] -= 1
        kept += [trial] if left[trial.task] >= 0 else []
    return kept[::-1]


def _runs(trials: list[Trial], names: Labels) -> list[ReportedTrial]:
    """Their rows; a curve for the first run of a plan on a task, in all at most MOST_CURVES, as many for each task."""
    most = max(1, MOST_CURVES // max(1, len({trial.task for trial in trials})))
    drawn: dict[str, set[str]] = {trial.task: set() for trial in trials}
    runs: list[ReportedTrial] = []
    for trial in trials:
        label, there = names.of(trial.plan), drawn[trial.task]
        runs.append(run_of(trial, label, has_curve=label not in there and len(there) < most))
        there |= {label} if runs[-1].curve else set()
    return runs


def _joined(found: Iterable[Mapping[str, str]]) -> dict[str, str]:
    """Every name with all its different values, in turn.

    >>> _joined([{"torch": "2.11"}, {"torch": "2.13"}, {"torch": "2.11"}])
    {'torch': '2.11, 2.13'}
    """
    values: dict[str, dict[str, None]] = {}
    for mapping in found:
        for name, value in mapping.items():
            values.setdefault(name, {}).update(dict.fromkeys(value.split(", ") if value else ()))
    return {name: ", ".join(several) for name, several in values.items() if several}
