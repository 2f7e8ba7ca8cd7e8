"""The record of a store: trials of its sweeps as they are now. Reads, and writes nothing."""

from __future__ import annotations

from dataclasses import replace

from paredown.errors import ParedownError, ReportError
from paredown.plan.trial import Trial
from paredown.report.parts import Progress
from paredown.report.record import Record
from paredown.runs.export import rows
from paredown.runs.status import count
from paredown.runs.store import Store


def record_of_store(store: Store, *, sweep: str | None = None, title: str = "") -> Record:
    """Finished trials with their tasks and plans, and counts of the others."""
    counts = [one for one in count(store) if sweep is None or one.sweep == sweep]
    if sweep is not None and not counts:
        there = ", ".join(one.sweep for one in count(store)) or "none"
        raise ReportError(f"the store has no sweep {sweep!r}. There are: {there}.")
    names = ", ".join(one.sweep for one in counts)
    record = Record.of_trials(title or (f"Sweep {names}" if names else "An empty store"), _trials(store, sweep))
    progress = tuple(Progress(one.sweep, one.waiting, one.running, dict(one.by_status)) for one in counts)
    return replace(record, progress=progress)


def _trials(store: Store, sweep: str | None) -> list[Trial]:
    """Those that are finished; a row that somebody else has written into the store is a sentence."""
    try:
        return [Trial.from_json(row["trial"]) for row in rows(store, sweep) if row["trial"] is not None]
    except (ParedownError, ValueError, KeyError, TypeError, RecursionError) as error:
        said = str(error) if isinstance(error, ParedownError) else "its JSON is damaged"
        raise ReportError(f"a trial of the store cannot be read: {said}") from None
