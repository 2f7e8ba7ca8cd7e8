"""The record of a store: trials of its sweeps as they are now. Reads, and writes nothing."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace

from sqlalchemy.exc import SQLAlchemyError

from paredown.errors import ParedownError, ReportError, StoreError
from paredown.report.record import Record
from paredown.report.studies import ReportedProgress
from paredown.sweeps.export import rows
from paredown.sweeps.status import SweepCounts, count
from paredown.sweeps.store import Store
from paredown.tasks.trial import Trial


def open_to_read(address: str, *, patience_seconds: float = 120.0) -> Store:
    """A store that is there; what is no store of paredown's is a sentence."""
    with _sentences():
        return Store(address, may_create=False, patience_seconds=patience_seconds)


def counts_of(store: Store) -> tuple[SweepCounts, ...]:
    """How far its sweeps are: what changes when anything does."""
    with _sentences():
        return tuple(count(store))


def record_of_store(store: Store, *, sweep: str | None = None, title: str = "") -> Record:
    """Finished trials with their tasks and plans, and counts of the others."""
    there = counts_of(store)
    counts = [one for one in there if sweep is None or one.sweep == sweep]
    if sweep is not None and not counts:
        raise ReportError(f"the store has no sweep {sweep!r}. There are: {', '.join(one.sweep for one in there) or 'none'}.")
    names = ", ".join(one.sweep for one in counts)
    with _sentences():
        trials = [Trial.from_json(row["trial"]) for row in rows(store, sweep) if row["trial"] is not None]
    record = Record.of_trials(title or (f"Sweep {names}" if names else "An empty store"), trials)
    progress = tuple(ReportedProgress(one.sweep, one.waiting, one.running, dict(one.by_status)) for one in counts)
    return replace(record, progress=progress)


@contextmanager
def _sentences() -> Generator[None]:
    """What somebody else has written into a store, or made of it, is a sentence."""
    try:
        yield
    except StoreError:
        raise
    except ParedownError as error:
        raise ReportError(f"a trial of the store cannot be read: {error}") from None
    except SQLAlchemyError as error:
        raise ReportError(f"the store cannot be shown: {type(error).__name__}, its tables are not those of paredown.") from None
    except (ValueError, KeyError, TypeError, RecursionError):
        raise ReportError("the store cannot be shown: the JSON of a trial in it is damaged.") from None
