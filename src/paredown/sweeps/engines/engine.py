"""One process for each trial on this machine, forked from a server that has imported torch already.

A process has its own memory and its own CUDA context, so one that runs out of memory, hangs or crashes harms no other. Slots take
the GPUs in turn (`CUDA_VISIBLE_DEVICES`). Results come back as JSON through a pipe. When the worker is killed, the pipe closes and
each child ends its own process group; nothing goes on training that nobody waits for. What a trial prints goes to stderr.

What an engine does: run claimed trials somewhere, and say which have ended. It never sees the store.

inline   in the worker's own process, one after the other: for trials that are trusted and short
local    a process for each trial on this machine
graphs   simulated trials side by side in one process for each GPU
ray      a process for each trial on a Ray cluster

Trials in the worker's own process, one after the other. One that ends or blocks the process takes the worker with it.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import connection, get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from types import ModuleType
from typing import Any, NamedTuple, final

from paredown.errors import SweepError
from paredown.sweeps.store import Claim, EndedTrial
from paredown.sweeps.sweep import TrialSpec
from paredown.tasks.trial import Status, Trial

LONGEST_REASON = 2000  # characters: a message may hold a whole tensor
RunTrial = Callable[[TrialSpec], Trial]


class Engine(ABC):
    """A place where up to `slots` trials run at a time."""

    slots: int = 1

    @abstractmethod
    def start(self, claim: Claim) -> None:
        """Begin a trial."""

    @abstractmethod
    def wait(self, seconds: float) -> list[EndedTrial]:
        """The trials that have ended, as soon as there are any; none after so many seconds."""

    @abstractmethod
    def stop(self) -> Sequence[Claim]:
        """End what runs, without results; what ran. The engine can start trials again."""


def run_safely(run: RunTrial, spec: TrialSpec) -> Trial:
    """The trial, whatever its code does: what it raises becomes a status and a reason."""
    try:
        trial = run(spec)
        if not isinstance(trial, Trial):
            return failed(spec, f"running it gave {type(trial).__name__}, not a Trial")
        return trial
    except BaseException as error:
        return of_error(spec, error)


def of_error(spec: TrialSpec, error: BaseException) -> Trial:
    """The trial whose code raised this; an interrupt is the user's, and is raised again."""
    if isinstance(error, KeyboardInterrupt):
        raise error
    if isinstance(error, MemoryError):
        return failed(spec, f"out of memory: {error}", Status.OUT_OF_MEMORY)
    if isinstance(error, SystemExit):
        return failed(spec, f"its code ended the process with exit status {error.code}")
    return failed(spec, f"{type(error).__name__}: {error}")


def failed(spec: TrialSpec, reason: str, status: Status = Status.FAILED) -> Trial:
    """The trial that has no numbers."""
    return Trial(spec.task, spec.plan, spec.seed, status, reason=reason[:LONGEST_REASON])


# --- One process for each trial on this machine, forked from a server that has imported torch already ---

# torch._dynamo: imported by the first step of any optimizer, which takes a new process 1.1 s
PRELOAD = ("torch", "torch._dynamo", "paredown.tasks.evaluate", "paredown.sweeps.runner")
END_SECONDS = 5.0  # for a process whose result has come to end by itself


class TrialResources(NamedTuple):
    """What a trial may use: a GPU, None for any, and threads of the CPU."""

    gpu: str | None
    threads: int


@dataclass
class TrialProcess:
    """A trial's process, our end of its pipe, its GPU and when it must be over."""

    claim: Claim
    process: BaseProcess
    pipe: Connection
    gpu: str | None
    deadline: float | None


@final
class LocalEngine(Engine):
    """Processes of this machine. `run` is a function of a module, or a picklable object: a child finds it by its name."""

    def __init__(self, run: RunTrial, *, slots: int = 1, gpus: Sequence[str] = (), preload: Sequence[str] = PRELOAD) -> None:
        check_run(run)
        self.slots = slots
        self._run = run
        self._gpus = list(gpus)
        self._threads = max(1, (os.cpu_count() or 1) // slots)
        self._running: list[TrialProcess] = []
        self._context: Any = get_context("forkserver")
        self._context.set_forkserver_preload([*preload, __name__])

    def start(self, claim: Claim) -> None:
        """Begin the claimed trial."""
        ours, theirs = self._context.Pipe()
        gpu = min(self._gpus, key=[one.gpu for one in self._running].count) if self._gpus else None
        process = self._context.Process(
            target=_child, args=(theirs, self._run, claim.spec, TrialResources(gpu, self._threads)), daemon=False
        )
        with without_main():
            process.start()
        theirs.close()
        limit = claim.spec.settings.timeout_seconds
        self._running.append(TrialProcess(claim, process, ours, gpu, None if limit is None else time.monotonic() + limit))

    @property
    def pipes(self) -> list[Connection]:
        """Where results come from."""
        return [one.pipe for one in self._running]

    def wait(self, seconds: float) -> list[EndedTrial]:
        """The trials that ended, after at most `seconds`."""
        left = [one.deadline - time.monotonic() for one in self._running if one.deadline is not None]
        connection.wait(self.pipes, timeout=max(0.0, min([seconds, *left])))
        ended = [(one, found) for one in self._running if (found := _look(one)) is not None]
        self._running = [one for one in self._running if all(one is not other for other, _ in ended)]
        return [found for _, found in ended]

    def stop(self) -> list[Claim]:
        """End all running trials and return their claims."""
        left = [one.claim for one in self._running]
        for one in self._running:
            _kill(one)
        self._running = []
        return left


def check_run(run: RunTrial) -> None:
    """SweepError where children could not find it."""
    if getattr(run, "__module__", None) == "__main__":
        raise SweepError(
            "what runs trials is defined in the script itself; children find it in a module: put it into a file and import it."
        )


def _look(one: TrialProcess) -> EndedTrial | None:
    """The result, the way its process died, or None while it runs."""
    spec = one.claim.spec
    if one.pipe.poll():
        trial = _receive(one)
        one.process.join(END_SECONDS)
        reason = "" if trial else cause_of(one.process.exitcode)
        exited = trial is None and (one.process.exitcode or 0) >= 0
        _kill(one)
        return EndedTrial(one.claim, failed(spec, reason) if exited else trial, reason)
    if one.deadline is not None and time.monotonic() >= one.deadline:
        _kill(one)
        reason = f"no result after {spec.settings.timeout_seconds:g} s (timeout_seconds); its process was ended"
        return EndedTrial(one.claim, failed(spec, reason, Status.KILLED))
    return None


def _receive(one: TrialProcess) -> Trial | None:
    """What the child sent; None: the pipe closed without a result."""
    try:
        return Trial.from_json(json.loads(one.pipe.recv_bytes()))
    except (EOFError, OSError):
        return None


def cause_of(exitcode: int | None) -> str:
    """How a process ended that gave no result."""
    if exitcode is None:
        return "its process closed its pipe without a result"
    if exitcode >= 0:
        return f"its process ended with exit status {exitcode} and without a result"
    name = signal.Signals(-exitcode).name if -exitcode in tuple(signal.Signals) else str(-exitcode)
    hint = " (the machine may have run out of memory)" if name == "SIGKILL" else ""
    return f"its process was ended by {name}{hint}"


def _kill(one: TrialProcess) -> None:
    kill_group(one.process)
    one.pipe.close()


def kill_group(process: BaseProcess) -> None:
    """End a process and all that it started."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL) if process.pid else None
    if process.is_alive():
        process.kill()
    process.join()


def _child(pipe: Connection, run: RunTrial, spec: TrialSpec, room: TrialResources) -> None:
    """All that a trial's process does."""
    settle(pipe, room)
    trial = run_safely(run, spec)
    pipe.send_bytes(json.dumps(trial.to_json()).encode())
    sys.stderr.flush()
    os._exit(0)  # what a library leaves behind for its end cannot hang or change the result


def settle(pipe: Connection, room: TrialResources) -> None:
    """What each child does first; it ends when the other side of `pipe` is closed."""
    os.setsid()  # a group of its own, which ends as a whole
    os.dup2(sys.stderr.fileno(), 1)  # stdout is the parent's to write
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    if room.gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = room.gpu
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(room.threads)  # slots with all threads each are slower than one alone
    threading.Thread(target=_end_with_parent, args=(pipe,), daemon=True).start()


def _end_with_parent(pipe: Connection) -> None:
    """Wait for the end of the pipe's other side, and end this process and all that it started."""
    with suppress(EOFError, OSError):
        pipe.poll(None)
    os.killpg(0, signal.SIGKILL)


@contextmanager
def without_main() -> Generator[None]:
    """Keep multiprocessing from running the user's script once more in every child: trials need none of it."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


# --- Trials in the worker's own process, one after the other ---


@final
class InlineEngine(Engine):
    """Runs a trial when it is waited for."""

    def __init__(self, run: RunTrial) -> None:
        self._run = run
        self._next: Claim | None = None

    def start(self, claim: Claim) -> None:
        """Begin the claimed trial."""
        self._next = claim

    def wait(self, seconds: float) -> list[EndedTrial]:
        """The trials that ended, after at most `seconds`."""
        if self._next is None:
            return []
        ended = EndedTrial(self._next, run_safely(self._run, self._next.spec))
        self._next = None
        return [ended]

    def stop(self) -> list[Claim]:
        """End all running trials and return their claims."""
        left = [] if self._next is None else [self._next]
        self._next = None
        return left
