"""One row of bench_language.py in a process of its own: `python benchmarks/language_worker.py '{"job": "lora", "way": "paredown"}'`.

The process replies by lines of JSON, as compile_worker.py does: {"ready": true} after its first steps, then it blocks until it reads a
line, and takes its times while no other process computes. Trainings run without that: they reply once, when they are done.

`largest`: the longest single text, in multiples of 1024 tokens, whose step runs with 24 GiB of memory in all (the allocator's limit), in at
most six tries, after the timed steps of all processes. The model is that of the timed steps; after a try that does not fit all tensors of
the step are freed. The first try is the length that an earlier run has found, where there is one.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from statistics import median
from typing import Any

import torch
from bench_session import cpu_times, cuda_times
from compile_worker import serve
from language_loss import loss_fields, missing
from language_steps import JOBS, Step, Way, import_peers
from language_training import TRAININGS, training_fields
from loops import GIB

WARM_UP = 3
LARGEST_BYTES, GRAIN, NUM_TRIES = 24 * GIB, 1024, 6
WITHOUT_LIGER = "without Liger, whose kernels need a GPU"
SLOW = "Inductor takes minutes on a CPU; name the row in --only to run it"


def skip_reason(job: str, way: str, device: str, *, is_named: bool = False) -> str | None:
    """Why a row cannot be measured on this device."""
    if job == "loss":
        return missing(way, device)
    if device == "cuda":
        return None
    return SLOW if job in JOBS and JOBS[job].way(way).is_compiled and not is_named else None


def set_limit(limit_bytes: int | None) -> None:
    """Let the allocator of this process hold at most so much memory of the GPU; None: all of it."""
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(1.0 if limit_bytes is None else limit_bytes / total)


def freed(step: Step) -> None:
    """Free what a step that failed has left."""
    step.optimizer.zero_grad(set_to_none=True)
    gc.collect()
    torch.cuda.empty_cache()


def step_fields(step: Step, num_steps: int, ready: Callable[[], None]) -> dict[str, Any]:
    """Peak, model memory and times of a step."""
    begun = time.perf_counter()
    first = float(step())
    fields: dict[str, Any] = {"first_loss": first, "compile_seconds": time.perf_counter() - begun}
    for _ in range(WARM_UP - 1):
        step()
    ready()
    step()  # the first one after a pause
    fields |= cuda_times(step, num_steps) if step.device == "cuda" else cpu_times(step, num_steps)
    shape = step.job.tokens(is_quick=step.is_quick)
    fields |= {"shape": list(shape), "model_bytes": step.model_bytes(), "num_steps": num_steps}
    fields["base_bytes"] = step.base_bytes
    fields["num_changes"] = None if step.session is None else len(step.session.changes)
    return fields


def limit_fields(step: Step, limit_bytes: int | None) -> dict[str, Any]:
    """Losses of the first and the last of some steps on one batch, within a limit that holds since before the model was built."""
    losses, ends = list[float](), [time.perf_counter()]
    for _ in range(2 if step.is_quick else step.job.limit_steps):
        losses.append(float(step()))
        ends.append(time.perf_counter())
    peaks = {}
    if step.device == "cuda":
        peaks = {"peak_bytes": torch.cuda.max_memory_allocated(), "reserved_bytes": torch.cuda.max_memory_reserved()}
    shape = list(step.job.tokens(is_quick=step.is_quick))
    return {
        "shape": shape,
        "limit_bytes": limit_bytes,
        "first_loss": losses[0],
        "last_loss": losses[-1],
        "num_steps": len(losses),
        "median_seconds": median(b - a for a, b in pairwise(ends)),
        **peaks,
    }


# --- the largest length -----------------------------------------------------------------------------------------------


def next_length(peaks: dict[int, int], too_long: int | None, base_bytes: int, limit_bytes: int) -> int | None:
    """The length to try next: where the line through the two longest texts that fit, at first from the base, meets the limit.

    None if the longest text that fits is known.

    >>> next_length({4096: 18}, None, 16, 24), next_length({4096: 18, 15360: 23}, 16384, 16, 24)
    (15360, None)
    >>> next_length({4096: 18, 15360: 22}, None, 16, 24), next_length({4096: 18}, 15360, 16, 24)
    (20480, 9216)
    """
    *_, before, low = 0, 0, *sorted(peaks)
    if too_long is not None:
        middle = (low + too_long) // 2 // GRAIN * GRAIN
        return middle if low < middle < too_long else None
    if not low:
        return 4 * GRAIN
    slope = max(peaks[low] - (peaks[before] if before else base_bytes), 1) / (low - before)
    ideal = low + (limit_bytes - peaks[low]) / slope
    return max(int(ideal if before else 0.97 * ideal) // GRAIN * GRAIN, low + GRAIN)


def peak_at(step: Step, length: int) -> tuple[int, float] | None:
    """Peak and seconds of one step on one text of this length; None if it does not fit."""
    freed(step)
    torch.cuda.reset_peak_memory_stats()
    try:
        step.batch = step.tokens(1, length)
        begun = time.perf_counter()
        step()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated(), time.perf_counter() - begun
    except torch.OutOfMemoryError:
        return None


def largest_fields(step: Step, length: int, peak: int, begin: int | None) -> dict[str, Any]:
    """The longest text within LARGEST_BYTES, its peak and its seconds; `peak` is that of a text of `length`, `begin` is tried first."""
    freed(step)
    idle = step.allocated()
    set_limit(LARGEST_BYTES)
    peaks, too_long = {length: peak} if peak < LARGEST_BYTES else {}, None if peak < LARGEST_BYTES else length
    seconds: dict[int, float] = {}
    tries: list[tuple[int, bool]] = []
    while len(tries) < NUM_TRIES and (size := begin or next_length(peaks, too_long, idle, LARGEST_BYTES)) is not None:
        found = peak_at(step, size)
        begin = None if tries or not begin else size + GRAIN if found else max(size - 2 * GRAIN, GRAIN)
        tries.append((size, found is not None))
        print(
            f"{step.way.name}: {size} tokens {'do not fit' if found is None else f'peak at {found[0] / GIB:.2f} GiB'}",
            file=sys.stderr,
        )
        if found is None:
            too_long = size
        else:
            peaks[size], seconds[size] = found
    freed(step)
    set_limit(None)
    longest = max(peaks, default=0)
    return {
        "largest_length": longest, "largest_peak_bytes": peaks.get(longest), "largest_seconds": seconds.get(longest),
        "largest_tries": tries, "limit_bytes": LARGEST_BYTES, "left_bytes": step.allocated() - idle,
    }  # fmt: skip


# --- the process ------------------------------------------------------------------------------------------------------


def fields_of(request: dict[str, Any], ready: Callable[[], None]) -> dict[str, Any]:
    """The fields of the requested row."""
    name, way, device, is_quick = (request[key] for key in ("job", "way", "device", "is_quick"))
    if reason := skip_reason(name, way, device, is_named=request["is_named"]):
        return {"skipped": reason}
    if name in TRAININGS:
        return training_fields(request)
    if name == "loss":
        return loss_fields(way, device, ready, is_quick=is_quick, is_named=request["is_named"])
    job = JOBS[name]
    if job.limit_bytes and device == "cuda":
        set_limit(job.limit_bytes)
    step = Step(job, job.way(way), device, is_quick)
    with step.stack:
        fields = limit_fields(step, job.limit_bytes) if job.limit_bytes else step_fields(step, request["num_steps"], ready)
        if request["largest"] and job.has_adapters and device == "cuda":
            ready()
            fields |= largest_fields(step, job.shape[1], fields["peak_bytes"], request.get("begin"))
    return {**fields, **note_of(job.way(way), device)}


def note_of(way: Way, device: str) -> dict[str, str]:
    """What a row on this device leaves out."""
    return {"note": WITHOUT_LIGER} if way.liger and device == "cpu" else {}


def main() -> None:
    """Read the request, measure, print the row."""
    defaults = {"device": "cpu", "is_quick": True, "is_named": True, "num_steps": 3, "largest": False}
    request: dict[str, Any] = {**defaults, **json.loads(sys.argv[1])}
    import_peers()
    serve(lambda ready: fields_of(request, ready))


if __name__ == "__main__":
    main()
