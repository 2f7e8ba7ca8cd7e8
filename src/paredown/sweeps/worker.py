"""A worker: claims trials from a store, has an engine run them, writes the results down, and tells after that.

    while anything is unfinished:  write results and claim as many as there is room for  ->  start them  ->  wait for some to end

It leaves when nothing is left to do. While others still run the last trials it stays: should one of them die, its trials are
freed (sweeps/worker.py) and run here.

Who lives and who does not, by counted heartbeats.

Each worker adds one to its counter every `beat_seconds`. Every worker also looks at the counters of the others, and times with
its own monotonic clock how long each stood still. Wall clocks are not asked, so machines may disagree about the time and a clock
may jump. A look counts for two beats at most: a watcher that was itself stopped, or cut off from the database, condemns nobody for it.

>>> pulse = WorkerPulse(patience_seconds=10, look_seconds=2)
>>> [sorted(pulse.look({"a": 1, "b": beats}, now)) for beats, now in ((1, 0.0), (2, 4.0), (3, 8.0), (4, 12.0))]
[[], [], [], ['a']]
>>> pulse.look({"a": 1, "c": 1}, 9999.0)
['a']
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from uuid import uuid4

from sqlalchemy.exc import DBAPIError

from paredown.errors import StoreError, SweepError
from paredown.sweeps.engines.engine import Engine
from paredown.sweeps.status import count_open
from paredown.sweeps.store import MAX_ATTEMPTS, Claim, EndedTrial, Store, WriteOutcome, WrittenResult
from paredown.tasks.trial import Trial

BEAT_SECONDS = 2.0
PATIENCE_SECONDS = 20.0


def beat_every(patience_seconds: float) -> float:
    """Seconds between beats: never more than others with the usual patience expect, whatever one's own is."""
    return min(BEAT_SECONDS, patience_seconds / 10)


@dataclass
class WorkerPulse:
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


class Heartbeat:
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
        self._pulse = WorkerPulse(patience_seconds, beat_seconds)
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


# --- A worker ---

IDLE_SECONDS = 0.5  # between looks for something to do


def ignore(*_: object) -> None:
    """Tell nobody."""


def refuse_nothing(task: str) -> str | None:
    """Any task is welcome."""
    return None


@dataclass(frozen=True)
class WorkerOptions:
    """What a worker does and does not do.

    `refuses` says why a task is not for this worker, or None; its trials are left to others. `told` hears of each result after it
    is in the store, `idle` is called between, `say` gets sentences for people. `stays`: wait for new trials when all are finished.
    """

    sweep: str | None = None
    refuses: Callable[[str], str | None] = refuse_nothing
    told: Callable[[Claim, Trial], object] = ignore
    idle: Callable[[], object] = ignore
    say: Callable[[str], object] = ignore
    stays: bool = False
    beat_seconds: float = BEAT_SECONDS
    patience_seconds: float = PATIENCE_SECONDS


def work(store: Store, engine: Engine, duty: WorkerOptions | None = None) -> int:
    """Run trials until none is left; how many this worker finished. Interrupted, it gives back what it holds."""
    return Worker(store, engine, duty or WorkerOptions()).run()


class Worker:
    """One worker, from its first claim to its leave."""

    def __init__(self, store: Store, engine: Engine, duty: WorkerOptions) -> None:
        self._store, self._engine, self._duty = store, engine, duty
        self._id = uuid4().hex
        self._claims: dict[str, Claim] = {}  # running
        self._ended: list[EndedTrial] = []  # not yet written
        self._refused: dict[str, str] = {}  # task: why
        self._num_finished = 0

    def run(self) -> int:
        """See `work`."""
        self._store.beat(self._id)
        duty = self._duty
        heart = Heartbeat(
            self._store, self._id, beat_seconds=duty.beat_seconds, patience_seconds=duty.patience_seconds, say=duty.say
        )
        heart.start()
        try:
            while self._turn():
                self._ended += self._wait()
        except StoreError:
            self._engine.stop()  # the store cannot be told; others free what was held here
            raise
        except BaseException:
            self._give_up()
            raise
        finally:
            heart.stop()
        self._engine.stop()  # nothing runs; what it keeps ready is given back
        self._store.leave(self._id)
        self._check_refused()
        return self._num_finished

    def _turn(self) -> bool:
        """Write what has ended, claim and start what there is room for; False when nothing is left to do."""
        claims = self._write(self._engine.slots - len(self._claims) + len(self._ended))
        for claim in self._welcome(claims):
            self._engine.start(claim)
        self._duty.idle()
        return bool(self._claims or claims) or not self._is_over()

    def _write(self, room: int) -> list[Claim]:
        """Hand results in, then tell of them; what is ours to run next."""
        duty, ended = self._duty, self._ended
        written, claims = self._store.exchange(self._id, ended, room, sweep=duty.sweep, without=tuple(self._refused))
        self._ended = []
        for one in ended:
            del self._claims[one.claim.key]
        self._claims |= {claim.key: claim for claim in claims}  # before telling, which may be interrupted
        for one, fate in zip(ended, written, strict=True):
            self._tell(one, fate)
        return claims

    def _wait(self) -> list[EndedTrial]:
        """Results, when there are any; a pause where nothing runs here."""
        if self._claims:
            return self._engine.wait(IDLE_SECONDS)
        time.sleep(IDLE_SECONDS)
        return []

    def _tell(self, one: EndedTrial, written: WrittenResult) -> None:
        """Say what became of a result, now that it is in the store."""
        about = f"{one.claim.spec.task}, seed {one.claim.spec.seed}"
        if written.trial is not None:
            self._num_finished += 1
            self._duty.told(one.claim, written.trial)
        elif written.fate is WriteOutcome.LATE:
            self._duty.say(f"{about}: another worker had finished it before; this result is dropped.")
        else:
            self._duty.say(f"{about}: {one.reason}. It will run again ({one.claim.attempt} of at most {MAX_ATTEMPTS} attempts).")

    def _welcome(self, claims: Sequence[Claim]) -> list[Claim]:
        """The claims whose tasks this worker runs; the others go back, and are not asked for again."""
        for task in dict.fromkeys(claim.spec.task for claim in claims):
            if (reason := self._duty.refuses(task)) is not None:
                self._refused[task] = reason
                self._duty.say(f"task {task!r} is left to other workers: {reason}")
        refused = [claim for claim in claims if claim.spec.task in self._refused]
        self._store.give_back(refused)
        for claim in refused:
            del self._claims[claim.key]
        return [claim for claim in claims if claim not in refused]

    def _is_over(self) -> bool:
        """Whether nothing is left that this worker could still come to run."""
        return not self._duty.stays and not count_open(self._store, self._duty.sweep, without=tuple(self._refused))

    def _give_up(self) -> None:
        """End what runs and let others have it; what had ended is written first."""
        self._engine.stop()
        self._write(0)
        self._store.give_back(list(self._claims.values()))
        self._store.leave(self._id)

    def _check_refused(self) -> None:
        """SweepError if trials are left that this worker refused."""
        left = count_open(self._store, self._duty.sweep) if self._refused else 0
        if left:
            task, reason = next(iter(self._refused.items()))
            raise SweepError(f"{left} trial{'s' * (left > 1)} left to other workers; task {task!r}: {reason}")
