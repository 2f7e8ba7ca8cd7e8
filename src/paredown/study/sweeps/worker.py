"""A worker claims trials from a store, runs them in an engine, writes the results to the store, and reports them after that.

    while trials are unfinished:  write results, claim a trial for each free slot of the engine  ->  start them  ->  wait for some to end

It ends when all trials are finished. While other workers still run the last trials it stays: if another worker dies, its trials are
released, and this one runs them.

Dead workers are detected by counted heartbeats. Each worker increments its counter in the store every `beat_seconds`, and measures with its
own monotonic clock how long the counters of the other workers have not changed. Wall clocks are not used, so clocks of machines may differ
or jump. The time between two readings counts as at most two beats, so that a worker that was itself suspended, or disconnected from the
database, does not take others for dead.

>>> pulse = WorkerPulse(patience_seconds=10, look_seconds=2)
>>> [sorted(pulse.look({"a": 1, "b": beats}, now)) for beats, now in ((1, 0.0), (2, 4.0), (3, 8.0), (4, 12.0))]
[[], [], [], ['a']]
>>> pulse.look({"a": 1, "c": 1}, 9999.0)
['a']
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from uuid import uuid4

from sqlalchemy.exc import DBAPIError

from paredown.errors import StoreError, SweepError
from paredown.sizes import say_seconds
from paredown.study.sweeps.database import Database
from paredown.study.sweeps.engines.engine import Engine
from paredown.study.sweeps.status import count, count_open
from paredown.study.sweeps.store import MAX_ATTEMPTS, Store, WriteOutcome, WrittenResult
from paredown.study.sweeps.sweep import Claim, EndedTrial
from paredown.study.tasks.trial import Trial

BEAT_SECONDS = 2.0
PATIENCE_SECONDS = 20.0


@dataclass
class WorkerPulse:
    """Detects dead workers: those whose heartbeat counter stops increasing."""

    patience_seconds: float
    look_seconds: float
    _last: float | None = None
    _unchanged: dict[str, tuple[int, float]] = field(default_factory=dict[str, tuple[int, float]])

    def look(self, beats: Mapping[str, int], now: float) -> list[str]:
        """Compare the counters `beats` at time `now` with earlier ones; return workers whose counter stood still for `patience_seconds`."""
        passed = 0.0 if self._last is None else min(now - self._last, 2 * self.look_seconds)
        self._last = now
        previous = self._unchanged
        self._unchanged = {
            worker: (count, previous[worker][1] + passed if previous.get(worker, (None,))[0] == count else 0.0)
            for worker, count in beats.items()
        }
        return [worker for worker, (_, seconds) in self._unchanged.items() if seconds >= self.patience_seconds]


class Heartbeat:
    """Counts a worker's heartbeats in a thread, and releases the trials of dead workers, from `start` to `stop`."""

    def __init__(self, store: Store, worker: str, options: WorkerOptions) -> None:
        self._store, self._worker, self._seconds, self._say = store, worker, options.beat_seconds, options.say
        self._pulse = WorkerPulse(options.patience_seconds, options.beat_seconds)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="paredown-heart", daemon=True)

    def start(self) -> None:
        """Start the thread that counts heartbeats."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread that counts heartbeats."""
        self._ended.set()
        self._thread.join(timeout=5)

    def _run(self) -> None:
        while not self._ended.wait(self._seconds):
            try:
                self._turn()
            except (StoreError, DBAPIError):
                continue  # the worker's next write raises, unless the store works again by then

    def _turn(self) -> None:
        self._store.beat(self._worker)
        beats = self._store.beats()
        for worker in self._pulse.look({w: n for w, n in beats.items() if w != self._worker}, time.monotonic()):
            freed = self._store.free(worker, beats[worker])
            if freed:
                self._say(f"a worker has stopped counting heartbeats: {freed} of its trial{'s' * (freed > 1)} will run again.")


# --- Waiting for a store ---

LOOK_SECONDS, SAY_SECONDS = 1.0, 10.0  # between two looks, and between two messages


def wait_for_store(
    address: str | Path, *, seconds: float, sweep: str | None = None, needs_trials: bool = True, say: Callable[[str], object]
) -> Store:
    """Wait up to `seconds` until a database exists, with trials (of `sweep`) if `needs_trials`, and return it."""
    database = Database(address, say=say)
    deadline = time.monotonic() + seconds
    try:
        wait_until(database.why_missing, deadline, say)
    finally:
        database.close()
    store = Store(address, may_create=False, say=say)
    try:
        if needs_trials:
            wait_until(lambda: _why_empty(store, sweep), deadline, say)
    except BaseException:
        store.close()
        raise
    return store


def wait_until(why_not: Callable[[], str | None], deadline: float, say: Callable[[str], object]) -> None:
    """Wait until `why_not()` returns None, and pass its sentences to `say`; at `deadline` raise StoreError with the last one."""
    start, reported = time.monotonic(), -math.inf
    while (reason := why_not()) is not None:
        now = time.monotonic()
        if now >= deadline:
            waited = f" after {now - start:.0f} s" if deadline > start else ""
            raise StoreError(
                f"{reason}{waited}. `paredown sweep run` creates a store with its trials: start it first, or check the address, "
                "or wait longer, as with --wait 10min."
            )
        if now - reported >= SAY_SECONDS:
            say(f"{reason}; waiting for it, {say_seconds(deadline - now)} left (--wait).")
            reported = now
        time.sleep(min(LOOK_SECONDS, deadline - now))


def _why_empty(store: Store, sweep: str | None) -> str | None:
    if any(sweep in (None, counts.sweep) for counts in count(store)):
        return None
    return f"the store {store.database.name} has no trials{'' if sweep is None else f' of sweep {sweep!r}'}"


# --- A worker ---

IDLE_SECONDS = 0.5  # between attempts to claim trials


def ignore(*_: object) -> None:
    """Do nothing; this function is the default of callbacks, and of `refuses`, which then refuses no task."""


@dataclass(frozen=True)
class WorkerOptions:
    """Says which trials a worker runs, which functions it calls, and how long (`patience_seconds`) other workers may be silent.

    `refuses(task)` returns why this worker does not run a task, or None; refused trials are left to other workers.
    `on_result(claim, trial)` is called for each result after it is in the store, `idle()` in each round, `say(sentence)` with messages for
    the user. `stays`: keep running when all trials are finished, for trials that are added later.
    """

    sweep: str | None = None
    refuses: Callable[[str], str | None] = ignore
    on_result: Callable[[Claim, Trial], object] = ignore
    idle: Callable[[], object] = ignore
    say: Callable[[str], object] = ignore
    stays: bool = False
    patience_seconds: float = PATIENCE_SECONDS

    @property
    def beat_seconds(self) -> float:
        """Return the seconds between heartbeats: a tenth of `patience_seconds`, and at most BEAT_SECONDS, which other workers expect."""
        return min(BEAT_SECONDS, self.patience_seconds / 10)


def work(store: Store, engine: Engine, options: WorkerOptions | None = None) -> int:
    """Run trials until all are finished, and return how many this worker finished; if interrupted, it releases its trials."""
    return Worker(store, engine, options or WorkerOptions()).run()


class Worker:
    """Runs one worker: reserves trials in a database, has the engine run them, and writes their results, until all ended."""

    def __init__(self, store: Store, engine: Engine, options: WorkerOptions) -> None:
        self._store, self._engine, self._options = store, engine, options
        self._id = uuid4().hex
        self._claims: dict[str, Claim] = {}  # running
        self._ended: list[EndedTrial] = []  # not yet written
        self._refused: dict[str, str] = {}  # task: why
        self._num_finished = 0

    def run(self) -> int:
        """Run trials until all are finished, as `work` describes, and return how many this worker finished."""
        self._store.beat(self._id)
        heart = Heartbeat(self._store, self._id, self._options)
        heart.start()
        try:
            while self._turn():
                self._ended += self._wait()
        except StoreError:
            self._engine.stop()  # the store cannot be written; other workers release the claims of this one
            raise
        except BaseException:
            self._give_up()
            raise
        finally:
            heart.stop()
        self._engine.stop()  # no trial runs; ends idle processes of the engine
        self._store.leave(self._id)
        if self._refused and (left := count_open(self._store, self._options.sweep)):
            task, reason = next(iter(self._refused.items()))
            raise SweepError(f"{left} trial{'s' * (left > 1)} left to other workers; task {task!r}: {reason}")
        return self._num_finished

    def _turn(self) -> bool:
        """Write results, start as many trials as the engine has room for, and return whether any trial runs or is unfinished."""
        claims = self._write(self._engine.slots - len(self._claims) + len(self._ended))
        for claim in self._accepted(claims):
            self._engine.start(claim)
        self._options.idle()
        if self._claims or claims or self._options.stays:
            return True
        return bool(count_open(self._store, self._options.sweep, without=tuple(self._refused)))

    def _write(self, num_free: int) -> list[Claim]:
        """Write the results of ended trials to the database, report them, and reserve and return up to `num_free` new trials."""
        options, ended = self._options, self._ended
        written, claims = self._store.exchange(self._id, ended, num_free, sweep=options.sweep, without=tuple(self._refused))
        self._ended = []
        for result in ended:
            del self._claims[result.claim.key]
        self._claims |= {claim.key: claim for claim in claims}  # before reporting, which may be interrupted
        for result, outcome in zip(ended, written, strict=True):
            self._report(result, outcome)
        return claims

    def _wait(self) -> list[EndedTrial]:
        """Return trials of this worker that ended within IDLE_SECONDS; if it runs none, pause that long and return an empty list."""
        if self._claims:
            return self._engine.wait(IDLE_SECONDS)
        time.sleep(IDLE_SECONDS)
        return []

    def _report(self, result: EndedTrial, written: WrittenResult) -> None:
        claim = result.claim
        about = f"{claim.spec.task}, {claim.label}, seed {claim.spec.seed}"
        if written.trial is not None:
            self._num_finished += 1
            self._options.on_result(claim, written.trial)
        elif written.fate is WriteOutcome.LATE:
            self._options.say(f"{about}: another worker has finished it already; this result is dropped.")
        else:
            self._options.say(f"{about}: {result.reason}. It will run again ({claim.attempt} of at most {MAX_ATTEMPTS} attempts).")

    def _accepted(self, claims: Sequence[Claim]) -> list[Claim]:
        """Return the reserved trials whose tasks this worker runs; release the others, and reserve no more of their tasks."""
        for task in dict.fromkeys(claim.spec.task for claim in claims):
            if (reason := self._options.refuses(task)) is not None:
                self._refused[task] = reason
                self._options.say(f"task {task!r} is left to other workers: {reason}")
        refused = [claim for claim in claims if claim.spec.task in self._refused]
        self._store.give_back(refused)
        for claim in refused:
            del self._claims[claim.key]
        return [claim for claim in claims if claim not in refused]

    def _give_up(self) -> None:
        self._engine.stop()
        self._write(0)
        self._store.give_back(list(self._claims.values()))
        self._store.leave(self._id)
