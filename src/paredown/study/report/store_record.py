"""`record_of_store`: the record of the finished trials of a store and the progress of its sweeps. Read-only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from paredown.errors import ReportError
from paredown.study.report.record import Record, run_of
from paredown.study.report.studies import ReportedProgress
from paredown.study.sweeps.database import readable
from paredown.study.sweeps.export import rows
from paredown.study.sweeps.plan_labels import Labels, distinct_labels
from paredown.study.sweeps.status import count
from paredown.study.sweeps.store import RunTimes, Store
from paredown.study.tasks.trial import Status, Trial


def record_of_store(store: Store, *, sweep: str | None = None, title: str = "") -> Record:
    """Return the record of finished trials by task and plan, with counts of the others."""
    sweeps = count(store)
    shown = [counts for counts in sweeps if sweep is None or counts.sweep == sweep]
    if sweep is not None and not shown:
        raise ReportError(f"the store has no sweep {sweep!r}. It has: {', '.join(counts.sweep for counts in sweeps) or 'none'}.")
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
    progress = tuple(ReportedProgress(counts.sweep, counts.waiting, counts.running, dict(counts.by_status)) for counts in shown)
    # listed, but in no study: they have no plan, and their label is that of a template
    infeasible = [run_of(trial, row["label"]) for row, trial in ended if trial.status is Status.INFEASIBLE]
    return replace(record, progress=progress, runs=(*record.runs, *infeasible))


def _times(finished: Sequence[Mapping[str, Any]]) -> list[RunTimes]:
    """Return the times of trials, and their hosts as numbers in the order of their first trials.

    A page can be shared, and has no names of machines.
    """
    first: dict[str, str] = {}
    for row in finished:
        if row["host"]:
            first[row["host"]] = min(first.get(row["host"], row["started_at"] or ""), row["started_at"] or "")
    names = {host: f"host {i}" for i, host in enumerate(sorted(first, key=lambda host: (first[host], host)), 1)}
    return [RunTimes(row["started_at"], row["finished_at"], names.get(row["host"])) for row in finished]
