"""Judges many random programs in several processes, and counts what is wrong.

On a GPU torch uses deterministic algorithms: under an exact plan gradients are compared bit for bit. Programs with an operation that has no
deterministic algorithm there are drawn again. Both runs are made on the same device with the same kernels, so that the limits of
`judging.py` hold as on a CPU: what a GPU rounds otherwise (TF32: 2^-11 of a factor) is far below the 2^-8 of int8.
"""

from __future__ import annotations

import os
import threading
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from multiprocessing.connection import Connection

import torch

from tests.programs.judging import ROUNDED, differences, drawn, faults_of_exact, faults_of_rounded
from tests.programs.programs import Program
from tests.programs.running import Outcome, run

EXACT_PLAN = "fp32"
PLANS = (EXACT_PLAN, *ROUNDED)
UNREPEATABLE, MISMATCH, TOO_FAR, RAISED = "not repeatable", "exact mismatches", "too far", "raised"
REFUSED = "not compiled"  # torch.compile raises without a session


@dataclass(frozen=True)
class Job:
    """Numbers of programs, the names of the plans they run under, and the device."""

    numbers: Sequence[int]
    plans: tuple[str, ...]
    device: str = "cpu"
    is_compiled: bool = False


@dataclass(frozen=True)
class Verdict:
    """What is wrong with one program: texts by kind."""

    number: int
    faults: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    source: str = ""

    def __str__(self) -> str:
        told = [f"program {self.number}: {kind}: {text}" for kind, texts in self.faults.items() for text in texts]
        return "\n".join([*told, self.source])


def prepare(device: str) -> None:
    """Set this process up: one thread, and on a GPU deterministic algorithms. Call it before anything runs on the device."""
    torch.set_num_threads(1)
    if device != "cpu":
        os.environ.setdefault(
            "CUBLAS_WORKSPACE_CONFIG", ":4096:8"
        )  # without it cuBLAS is not deterministic, and torch refuses to use it
        torch.use_deterministic_algorithms(True)


def faults_by_kind(program: Program, expected: Outcome, plans: Sequence[str], *, is_compiled: bool = False) -> dict[str, list[str]]:
    """What is wrong with a program under plans, by their names; nothing if two unmodified runs differ, which is told."""
    if not is_compiled and differences(expected, run(program)):
        return {UNREPEATABLE: ["two unmodified runs differ"]}
    found: dict[str, list[str]] = {}
    for plan in plans:
        try:
            is_exact = plan == EXACT_PLAN
            faults = (
                faults_of_exact(program, expected, is_compiled=is_compiled)
                if is_exact
                else faults_of_rounded(program, expected, ROUNDED[plan], is_compiled=is_compiled)
            )
            kind = MISMATCH if is_exact else TOO_FAR
        except Exception:
            kind, faults = RAISED, [traceback.format_exc()]
        if faults:
            found.setdefault(kind, []).extend(f"{plan}: {fault}" for fault in faults)
    if found and is_compiled and differences(expected, run(program, is_compiled=True)):  # only then: a run compiles it
        return {UNREPEATABLE: ["two unmodified runs differ"]}
    return found


def judge(number: int, plans: Sequence[str], device: str = "cpu", *, is_compiled: bool = False) -> Verdict:
    """The verdict on the program of a number. `is_compiled`: compiled in a session, against torch.compile without one."""
    try:
        program, expected = drawn(number, device)
    except AssertionError as error:
        return Verdict(number, {RAISED: [str(error)]})
    if is_compiled:
        try:
            expected = run(program, is_compiled=True)
        except Exception as error:
            return Verdict(number, {REFUSED: [f"torch.compile: {type(error).__name__}: {error}"]})
    faults = faults_by_kind(program, expected, plans, is_compiled=is_compiled)
    return Verdict(number, faults, str(program) if faults else "")


def survey(job: Job, num_workers: int, on_verdict: Callable[[Verdict], None]) -> list[Verdict]:
    """The verdicts on all programs of a job, in this process or in `num_workers` others; `on_verdict` sees each as it comes."""
    if num_workers == 1:
        return [_told(verdict, on_verdict) for verdict in _judged(job)]
    lock = threading.Lock()

    def told(verdict: Verdict) -> None:
        with lock:
            on_verdict(verdict)

    shares = [replace(job, numbers=job.numbers[place::num_workers]) for place in range(num_workers)]
    with ThreadPoolExecutor(num_workers) as threads:
        found = threads.map(lambda share: [_told(verdict, told) for verdict in _in_processes(share)], shares)
    return sorted((verdict for verdicts in found for verdict in verdicts), key=lambda verdict: verdict.number)


def summary(verdicts: Sequence[Verdict]) -> str:
    """Counts in one line, then the numbers of the programs at fault, by kind.

    >>> print(summary([Verdict(3), Verdict(4, {TOO_FAR: ["int8: m is 0.3 off"]})]))
    2 programs: 0 exact mismatches, 1 too far, 0 raised, 0 not repeatable
    too far: 4
    """
    counts = Counter(kind for verdict in verdicts for kind in verdict.faults)
    kinds = (MISMATCH, TOO_FAR, RAISED, UNREPEATABLE, *((REFUSED,) if REFUSED in counts else ()))
    lines = [f"{len(verdicts)} programs: " + ", ".join(f"{counts[kind]} {kind}" for kind in kinds)]
    for kind in kinds:
        numbers = [str(verdict.number) for verdict in verdicts if kind in verdict.faults]
        lines += [f"{kind}: {' '.join(numbers)}"] if numbers else []
    return "\n".join(lines)


def _told(verdict: Verdict, on_verdict: Callable[[Verdict], None]) -> Verdict:
    on_verdict(verdict)
    return verdict


def _judged(job: Job) -> Iterator[Verdict]:
    prepare(job.device)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield from (judge(number, job.plans, job.device, is_compiled=job.is_compiled) for number in job.numbers)


def _send(job: Job, connection: Connection) -> None:
    """The work of a process."""
    for verdict in _judged(job):
        connection.send(verdict)


def _in_processes(job: Job) -> Iterator[Verdict]:
    """The verdicts of a process; if it ends before its time, the program that it ran is at fault, and another process takes the rest."""
    numbers = list(job.numbers)
    context = get_context("spawn")
    while numbers:
        receiving, sending = context.Pipe(duplex=False)
        process = context.Process(target=_send, args=(replace(job, numbers=list(numbers)), sending))
        process.start()
        sending.close()
        while numbers:
            number = numbers.pop(0)
            try:
                yield receiving.recv()
            except EOFError:
                process.join()
                yield Verdict(number, {RAISED: [f"the process ended with exit status {process.exitcode}"]})
                break
        process.join()
