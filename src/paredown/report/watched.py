"""What a live page shows, read again and again: a record's file, or a store while its sweep runs.

Reading runs nothing and unpickles nothing: a record is JSON, a store holds numbers and texts.
"""

from __future__ import annotations

import json
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from os import PathLike
from pathlib import Path

from paredown.errors import ParedownError
from paredown.report.record import Record
from paredown.report.scrub import scrub

PATIENCE_SECONDS = 2.0  # that a store may be busy before the page says so


class Source(ABC):
    """Where records come from."""

    @abstractmethod
    def read(self) -> Record | None:
        """The record as it is now; None where nothing is new since the last time. ParedownError says why there is none."""

    def close(self) -> None:
        """Give back what is held."""
        return


class FileSource(Source):
    """The record in a file."""

    def __init__(self, path: str | PathLike[str]) -> None:
        self._path = Path(path)
        self._seen: object = None

    def read(self) -> Record | None:
        """Anew when the file has changed."""
        try:
            found = self._path.stat()
            seen = (found.st_mtime_ns, found.st_size)
        except OSError:
            seen = None  # the reader says what is wrong
        if seen is not None and seen == self._seen:
            return None
        record = Record.load(self._path)
        self._seen = seen
        return record


class StoreSource(Source):
    """The trials of a store."""

    def __init__(self, address: str | PathLike[str], *, sweep: str | None = None) -> None:
        from paredown.report.sweeps import open_to_read

        self._store = open_to_read(str(address), patience_seconds=PATIENCE_SECONDS)
        self._sweep = sweep
        self._seen: object = None

    def read(self) -> Record | None:
        """Anew when a trial was added, claimed or finished."""
        from paredown.report.sweeps import counts_of

        seen = counts_of(self._store)
        if seen == self._seen:
            return None
        record = Record.of_store(self._store, sweep=self._sweep)
        self._seen = seen
        return record

    def close(self) -> None:
        """Close the store."""
        self._store.close()


def open_source(source: str | PathLike[str], *, sweep: str | None = None) -> Source:
    """The source that a text names: a file that ends in .json is a record, anything else a store."""
    return FileSource(source) if str(source).lower().endswith(".json") else StoreSource(source, sweep=sweep)


class Watched:
    """The latest record of a source, with a number that rises with each; who waits for the next one is woken."""

    def __init__(self, source: Source, *, seconds: float = 1.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._source, self._seconds, self._clock = source, seconds, clock
        self._changed = threading.Condition()
        self._ended = threading.Event()
        self.record = source.read() or Record("Nothing yet")
        self.number = 1
        self.trouble = ""
        self._told: tuple[int, tuple[str, str]] | None = None
        self._thread = threading.Thread(target=self._run, name="paredown-watch", daemon=True)

    def start(self) -> None:
        """Look from now on."""
        self._thread.start()

    def close(self) -> None:
        """Look no more, and wake everybody."""
        self._ended.set()
        with self._changed:
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join(timeout=10)
        self._source.close()

    @property
    def has_ended(self) -> bool:
        """Whether it looks no more."""
        return self._ended.is_set()

    def wait(self, number: int, timeout: float) -> int:
        """The number of what is there now, after a wait for one that is not `number`."""
        with self._changed:
            self._changed.wait_for(lambda: self.number != number or self.has_ended, timeout)
            return self.number

    def said(self) -> tuple[str, str]:
        """(kind, JSON) of what a page is told now: the record, or the trouble there is in reading it."""
        with self._changed:
            if self._told is None or self._told[0] != self.number:  # made once, however many pages are open
                value = ("trouble", scrub(self.trouble)) if self.trouble else ("record", self.record.to_json())
                self._told = self.number, (value[0], json.dumps(value[1], allow_nan=False))
            return self._told[1]

    def _run(self) -> None:
        pause = self._seconds
        while not self._ended.wait(pause):
            begun = self._clock()
            self._look()
            pause = max(self._seconds, 4 * (self._clock() - begun))  # a large store does not keep a core busy

    def _look(self) -> None:
        try:
            found, trouble = self._source.read(), ""
        except ParedownError as error:
            found, trouble = None, str(error)
        if found is None and trouble == self.trouble:
            return
        with self._changed:
            self.record, self.trouble = found or self.record, trouble
            self.number += 1
            self._changed.notify_all()
