"""How a sweep gets on: finished, trials a minute, time left, the best so far. Numbers only; cli/live.py draws them.

The rate is that of the last WINDOW_SECONDS as this process saw the store's count grow, so trials of other machines count too.

>>> pace = Pace()
>>> [pace.add(finished, now) for finished, now in ((4, 0.0), (5, 30.0), (7, 60.0))]
[None, 2.0, 3.0]
>>> say_seconds(3725)
'1 h 2 min'
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from paredown.runs.status import Best, Counts, count, find_best
from paredown.runs.store import Store

WINDOW_SECONDS = 300.0
UNITS = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))


@dataclass
class Pace:
    """Trials a minute, from counts at times of one monotonic clock."""

    _seen: deque[tuple[float, int]] = field(default_factory=deque[tuple[float, int]])

    def add(self, finished: int, now: float) -> float | None:
        """The rate so far; None while there is none."""
        self._seen.append((now, finished))
        while len(self._seen) > 2 and now - self._seen[0][0] > WINDOW_SECONDS:
            self._seen.popleft()
        start, first = self._seen[0]
        return 60 * (finished - first) / (now - start) if now > start and finished > first else None


@dataclass(frozen=True)
class Progress:
    """One moment of a sweep."""

    counts: Counts
    trials_per_minute: float | None
    best: tuple[Best, ...]

    @property
    def seconds_left(self) -> float | None:
        """At this rate; None while it is not known."""
        left = self.counts.total - self.counts.finished
        return 60 * left / self.trials_per_minute if self.trials_per_minute else None

    def __str__(self) -> str:
        rate = f"{self.trials_per_minute:.1f} trials/min" if self.trials_per_minute else "no rate yet"
        left = f", {say_seconds(self.seconds_left)} left" if self.seconds_left else ""
        return f"{self.counts}; {rate}{left}"

    def to_json(self) -> dict[str, Any]:
        """The JSON value, one line of a pipe."""
        rates = {"trials_per_minute": self.trials_per_minute, "seconds_left": self.seconds_left}
        return {"event": "progress", **self.counts.to_json(), **rates, "best": [one.to_json() for one in self.best]}


class Watcher:
    """Looks at a sweep of a store, or at all of them (None), at most every `seconds`."""

    def __init__(self, store: Store, sweep: str | None = None, *, seconds: float = 1.0) -> None:
        self._store, self._sweep, self._seconds = store, sweep, seconds
        self._paces: dict[str, Pace] = {}
        self._next = 0.0

    def look(self, *, is_due: bool = False) -> list[Progress]:
        """The sweeps now; none if the last look is not long ago, unless this one is due."""
        now = time.monotonic()
        if now < self._next and not is_due:
            return []
        self._next = now + self._seconds
        return [self._progress(one, now) for one in count(self._store) if self._sweep in (None, one.sweep)]

    def _progress(self, counts: Counts, now: float) -> Progress:
        pace = self._paces.setdefault(counts.sweep, Pace())
        return Progress(counts, pace.add(counts.finished, now), tuple(find_best(self._store, counts.sweep)))


def say_seconds(seconds: float) -> str:
    """A duration in its two largest units."""
    left, parts = round(seconds), list[str]()
    for size, unit in UNITS:
        if left >= size or (unit == "s" and not parts):
            parts.append(f"{left // size} {unit}")
            left %= size
    return " ".join(parts[:2])
