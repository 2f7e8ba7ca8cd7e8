"""`suited_threads(task, device)` is a context in which torch uses as many CPU threads as suit the sizes of a task's tensors.

torch uses all cores for an operation of more than 32,768 values. On small tensors the threads spend their time waiting for each other, and
for a core where other programs run: a trial on 8 x 8 pictures took 30 s instead of 0.8 s on a busy machine. One thread is used for each
VALUES_PER_THREAD values of a typical tensor, whose size n is the mean over all outputs of a step and all weights, weighted by size:

    n = sum(size^2) / sum(size),    threads = n / VALUES_PER_THREAD, from 1 to what torch would take

Environment variables for threads, such as OMP_NUM_THREADS, take precedence. The number of threads affects the order of sums, so two
machines with different numbers of cores can differ in the last bits of float32, as in torch.

>>> num_threads([8192] * 100, most=16), num_threads([2**22] * 100, most=16), num_threads([2**22] * 100, most=2)
(1, 16, 2)
"""

from __future__ import annotations

import os
from collections.abc import Generator, Iterable
from contextlib import contextmanager

import torch

from paredown.errors import ParedownError
from paredown.roles import Role
from paredown.study.tasks.task import Task
from paredown.study.tasks.task_trace import trace_task

VALUES_PER_THREAD = 1 << 18  # 1 MiB of float32: eight times the size from which torch uses a second thread
VALUE_BYTES = 4
CHOSEN_BY_USER = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


def num_threads(sizes: Iterable[int], *, most: int) -> int:
    """Return the number of threads, at most `most`, that suits operations on tensors with these numbers of values."""
    values = list(sizes)
    total = sum(values)
    mean = sum(n * n for n in values) // total if total else 0
    return max(1, min(mean // VALUES_PER_THREAD, most))


@contextmanager
def suited_threads(task: Task, device: torch.device | str) -> Generator[None]:
    """Return a context where torch's number of CPU threads suits `task`; the number stays on a GPU, or if the user set it."""
    before = torch.get_num_threads()
    is_fixed = before == 1 or str(device) != "cpu" or any(os.environ.get(name) for name in CHOSEN_BY_USER)
    wanted = before if is_fixed else _wanted(task, before)
    torch.set_num_threads(wanted)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _wanted(task: Task, most: int) -> int:
    try:
        trace = trace_task(task, device="cpu")
        written = (output.nbytes // VALUE_BYTES for output in trace.outputs)
        return num_threads([*written, *(slot.numel for slot in trace.of(Role.WEIGHT))], most=most)
    except (ParedownError, RuntimeError, TypeError, ValueError):  # the training reports what is wrong with the step
        return most
