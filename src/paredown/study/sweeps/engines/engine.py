"""Engines run claimed trials and return their results; they have no access to the store.

inline   in the worker's process, one at a time: for short trials of trusted code; a trial that ends or blocks the process stops the worker
local    one process per trial on this machine
graphs   simulated trials in parallel, in one process per GPU (engines/cuda_graphs.py)
ray      one process per trial on a Ray cluster (engines/ray.py)

Processes of the local engine are forked from a server that has imported torch. Each has its own memory and CUDA context, so that one that
runs out of memory, hangs or crashes does not affect the others. Slots use the GPUs in turn (`CUDA_VISIBLE_DEVICES`). Results are sent as
JSON through a pipe. When the worker is killed, the pipe closes and each child kills its own process group, so that no training is left
running. stdout of a trial is redirected to stderr.
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
from paredown.study.sweeps.sweep import Claim, EndedTrial, TrialSpec
from paredown.study.tasks.trial import Status, Trial

MAX_REASON_CHARS = 2000  # an exception's message may contain a whole tensor
RunTrial = Callable[[TrialSpec], Trial]


class Engine(ABC):
    """The interface of objects that run up to `slots` trials in parallel."""

    slots: int = 1

    @abstractmethod
    def start(self, claim: Claim) -> None:
        """Start the trial of `claim`, which a worker has reserved in a store; `wait` returns it when it has ended."""

    @abstractmethod
    def wait(self, seconds: float) -> list[EndedTrial]:
        """Return the trials that have ended, as soon as there are any; an empty list if none ends within `seconds`."""

    @abstractmethod
    def stop(self) -> None:
        """Kill all running trials. The engine can start trials afterwards."""


def run_safely(run: RunTrial, spec: TrialSpec) -> Trial:
    """Run a trial and return its result; if it raises, return a result with the error as status and reason."""
    try:
        trial = run(spec)
        if not isinstance(trial, Trial):
            return failed(spec, f"the function that runs trials returned {type(trial).__name__}, not a Trial")
        return trial
    except BaseException as error:
        return of_error(spec, error)


def of_error(spec: TrialSpec, error: BaseException) -> Trial:
    """Return a trial whose status and reason describe an exception; KeyboardInterrupt is raised again."""
    if isinstance(error, KeyboardInterrupt):
        raise error
    if isinstance(error, MemoryError):
        return failed(spec, f"out of memory: {error}", Status.OUT_OF_MEMORY)
    if isinstance(error, SystemExit):
        return failed(spec, f"its code ended the process with exit status {error.code}")
    return failed(spec, f"{type(error).__name__}: {error}")


def failed(spec: TrialSpec, reason: str, status: Status = Status.FAILED) -> Trial:
    """Return a trial without measured numbers, with this status and reason; `spec` is what was to run."""
    return Trial(spec.task, spec.plan, spec.seed, status, reason=reason[:MAX_REASON_CHARS])


def deadline_of(claim: Claim) -> float | None:
    """Return the value of time.monotonic() at which a trial that starts now exceeds its time limit; None without a limit."""
    limit = claim.spec.settings.timeout_seconds
    return None if limit is None else time.monotonic() + limit


def late(claim: Claim, host: str | None = None) -> EndedTrial:
    """Return the result of a trial that was ended because it exceeded its time limit; `host` None means the worker's host."""
    spec = claim.spec
    reason = f"no result after {spec.settings.timeout_seconds:g} s (timeout_seconds); its process was ended"
    return EndedTrial(claim, failed(spec, reason, Status.KILLED), host=host)


# --- The local engine: one process per trial ---

# torch._dynamo: the first step of any optimizer imports it, which takes 1.1 s in a new process
PRELOAD = ("torch", "torch._dynamo", "paredown.study.tasks.evaluate", "paredown.study.sweeps.runner")
END_SECONDS = 5.0  # for a process to exit after it has sent its result; it is killed then


class TrialResources(NamedTuple):
    """What one trial may use: a GPU (None: any), and a number of CPU threads."""

    gpu: str | None
    threads: int


@dataclass
class TrialProcess:
    """A running process of LocalEngine: its trial, its pipe, its GPU (None: any) and its deadline (None: no time limit)."""

    claim: Claim
    process: BaseProcess
    pipe: Connection
    gpu: str | None
    deadline: float | None


@final
class LocalEngine(Engine):
    """Runs each trial in a process of its own on this machine. `run` must be picklable: a function of a module, or an object."""

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
        parent_pipe, child_pipe = self._context.Pipe()
        gpu = min(self._gpus, key=[running.gpu for running in self._running].count) if self._gpus else None
        process = self._context.Process(
            target=_child, args=(child_pipe, self._run, claim.spec, TrialResources(gpu, self._threads)), daemon=False
        )
        with without_main():
            process.start()
        child_pipe.close()
        self._running.append(TrialProcess(claim, process, parent_pipe, gpu, deadline_of(claim)))

    @property
    def pipes(self) -> list[Connection]:
        """Return the pipes of running trials, which become readable when a trial ends."""
        return [running.pipe for running in self._running]

    def wait(self, seconds: float) -> list[EndedTrial]:
        left = [running.deadline - time.monotonic() for running in self._running if running.deadline is not None]
        connection.wait(self.pipes, timeout=max(0.0, min([seconds, *left])))
        checked = [(running, _ended(running)) for running in self._running]
        self._running = [running for running, ended in checked if ended is None]
        return [ended for _, ended in checked if ended is not None]

    def stop(self) -> None:
        for running in self._running:
            _kill(running)
        self._running = []


def check_run(run: RunTrial) -> None:
    """Raise SweepError if child processes cannot import `run`, the function that runs trials, since a script defines it."""
    if getattr(run, "__module__", None) == "__main__":
        raise SweepError(
            "the function that runs trials is defined in the script itself, and child processes cannot import it: move it to a module."
        )


def _ended(running: TrialProcess) -> EndedTrial | None:
    spec = running.claim.spec
    if running.pipe.poll():
        trial = None
        with suppress(EOFError, OSError):  # the pipe was closed without a result
            trial = Trial.from_json(json.loads(running.pipe.recv_bytes()))
        running.process.join(END_SECONDS)
        reason = "" if trial else cause_of(running.process.exitcode)
        exited = trial is None and (running.process.exitcode or 0) >= 0
        _kill(running)
        return EndedTrial(running.claim, failed(spec, reason) if exited else trial, reason)
    if running.deadline is not None and time.monotonic() >= running.deadline:
        _kill(running)
        return late(running.claim)
    return None


def cause_of(exitcode: int | None) -> str:
    """Return how a process ended that sent no result, from its exit code."""
    if exitcode is None:
        return "its process closed its pipe without a result"
    if exitcode >= 0:
        return f"its process ended with exit status {exitcode} and without a result"
    name = signal.Signals(-exitcode).name if -exitcode in tuple(signal.Signals) else str(-exitcode)
    hint = " (the machine may have run out of memory)" if name == "SIGKILL" else ""
    return f"its process was ended by {name}{hint}"


def _kill(running: TrialProcess) -> None:
    kill_group(running.process)
    running.pipe.close()


def kill_group(process: BaseProcess) -> None:
    """Kill a process and all processes that it started."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL) if process.pid else None
    if process.is_alive():
        process.kill()
    process.join()


def _child(pipe: Connection, run: RunTrial, spec: TrialSpec, resources: TrialResources) -> None:
    settle(pipe, resources)
    trial = run_safely(run, spec)
    pipe.send_bytes(json.dumps(trial.to_json()).encode())
    sys.stderr.flush()
    os._exit(0)  # no atexit functions of libraries, which could hang


def settle(pipe: Connection, resources: TrialResources) -> None:
    """Prepare a new child process for a trial: set its GPU and threads, and end it when the other end of `pipe` is closed."""
    os.setsid()  # a process group of its own, which can be killed as a whole
    os.dup2(sys.stderr.fileno(), 1)  # stdout belongs to the parent
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    if resources.gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = resources.gpu
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(resources.threads)  # several trials with all threads each are slower than one alone
    threading.Thread(target=_end_with_parent, args=(pipe,), daemon=True).start()


def _end_with_parent(pipe: Connection) -> None:
    """Wait until the other end of the pipe is closed, then kill this process and all that it started."""
    with suppress(EOFError, OSError):
        pipe.poll(None)
    os.killpg(0, signal.SIGKILL)


@contextmanager
def without_main() -> Generator[None]:
    """Return a context that hides the user's script, which multiprocessing would otherwise run again in every child."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


# --- The inline engine ---


@final
class InlineEngine(Engine):
    """Runs one trial at a time in the worker's own process."""

    def __init__(self, run: RunTrial) -> None:
        self._run = run
        self._next: Claim | None = None

    def start(self, claim: Claim) -> None:
        self._next = claim

    def wait(self, seconds: float) -> list[EndedTrial]:
        if self._next is None:
            return []
        ended = EndedTrial(self._next, run_safely(self._run, self._next.spec))
        self._next = None
        return [ended]

    def stop(self) -> None:
        self._next = None
