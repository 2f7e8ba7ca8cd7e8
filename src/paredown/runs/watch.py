"""Who lives and who does not, by counted heartbeats.

Each worker adds one to its counter every `beat_seconds`. Every worker also looks at the counters of the others, and times with
its own monotonic clock how long each stood still. Wall clocks are not asked, so machines may disagree about the time and a clock
may jump. A look counts for two beats at most: a watcher that was itself stopped, or cut off from the database, condemns nobody for it.

>>> pulse = Pulse(patience_seconds=10, look_seconds=2)
>>> [sorted(pulse.look({"a": 1, "b": beats}, now)) for beats, now in ((1, 0.0), (2, 4.0), (3, 8.0), (4, 12.0))]
[[], [], [], ['a']]
>>> pulse.look({"a": 1, "c": 1}, 9999.0)
['a']
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from sqlalchemy.exc import DBAPIError

from paredown.errors import StoreError
from paredown.runs.store import Store

BEAT_SECONDS = 2.0
PATIENCE_SECONDS = 20.0


def beat_every(patience_seconds: float) -> float:
    """Seconds between beats: never more than others with the usual patience expect, whatever one's own is."""
    return min(BEAT_SECONDS, patience_seconds / 10)


@dataclass
class Pulse:
    """How long the counter of each worker stood still, as far as this process saw it."""

    patience_seconds: float
    look_seconds: float
    _last: float | None = None
    _still: dict[str, tuple[int, float]] = field(default_factory=dict[str, tuple[int, float]])

    def look(self, beats: Mapping[str, int], now: float) -> list[str]:
        """The workers that are taken for dead."""
        passed = 0.0 if self._last is None else min(now - self._last, 2 * self.look_seconds)
        self._last = now
        was = self._still
        self._still = {
            worker: (count, was[worker][1] + passed if was.get(worker, (None,))[0] == count else 0.0)
            for worker, count in beats.items()
        }
        return [worker for worker, (_, still) in self._still.items() if still >= self.patience_seconds]


class Heart:
    """A thread that beats for one worker and frees what dead ones hold, from `start` to `stop`."""

    def __init__(
        self,
        store: Store,
        worker: str,
        *,
        beat_seconds: float = BEAT_SECONDS,
        patience_seconds: float = PATIENCE_SECONDS,
        say: Callable[[str], object] | None = None,
    ) -> None:
        self._store, self._worker, self._seconds = store, worker, beat_seconds
        self._pulse = Pulse(patience_seconds, beat_seconds)
        self._say = say
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="paredown-heart", daemon=True)

    def start(self) -> None:
        """Beat from now on."""
        self._thread.start()

    def stop(self) -> None:
        """Beat no more."""
        self._ended.set()
        self._thread.join(timeout=5)

    def _run(self) -> None:
        while not self._ended.wait(self._seconds):
            try:
                self._turn()
            except (StoreError, DBAPIError):
                continue  # the worker's own next write says what is wrong, or finds it mended

    def _turn(self) -> None:
        self._store.beat(self._worker)
        beats = self._store.beats()
        for worker in self._pulse.look({w: n for w, n in beats.items() if w != self._worker}, time.monotonic()):
            freed = self._store.free(worker, beats[worker])
            if freed and self._say:
                self._say(f"a worker has not been heard of: {freed} trial{'s' * (freed > 1)} of it will run again.")
