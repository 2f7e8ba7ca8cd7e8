"""One network of the zoo in a process of its own: `python benchmarks/zoo_worker.py '{"network": "dit", "ways": ["compiled", "int8"]}'`.

The process builds a variant of the network for each way, compiles it, and compares its first gradients with those of a float32 step and
with those of the unmodified variant of the same mode. All variants stay in memory, without activations. When all are ready, it prints
{"ready": true} and blocks on its standard input, as compile_worker.py does; then the variants take turns, so that all of them meet the same
host. The peak of a variant is what it allocates in its own turns: bytes of the other variants are subtracted.

GPU time alone: forward, and then backward with the update, are queued behind a kernel that sleeps until the host has issued all of it; a
queue holds some 1,000 launches. Steps that synchronize, or launch more, have no such time.
"""

from __future__ import annotations

import json
import math
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch
from compile_worker import DeviceLock, Way, lock_autotuning, serve
from loops import failure, forward, make_optimizer, release
from torch import Tensor, nn
from zoo_networks import ZOO, Network, moved

import paredown as pare

PRESETS = {"int8": "activations8", "int4": "activations4"}
WARM_LR = 3e-4  # of the steps before gradients are compared
CYCLES_PER_SECOND = 2e9  # of an H200, at most
ROUNDS, STEPS = 3, 4
LATE = "not ready at the deadline (--within less --reserve)"


@dataclass(eq=False)
class Variant:
    """One way in memory: its step, what it holds between steps, and what was measured."""

    way: Way
    loss: Callable[[], Tensor]
    update: Callable[[Tensor], None]  # backward from a loss, and the optimizer's step
    own_bytes: int
    columns: dict[str, Any] = field(default_factory=dict[str, Any])
    seconds: list[float] = field(default_factory=list[float])
    issued: list[float] = field(default_factory=list[float])

    def step(self) -> None:
        """One training step."""
        self.update(self.loss())


@dataclass
class Worker:
    """What all variants of a network share."""

    network: Network
    device: str
    lock: DeviceLock
    stack: ExitStack
    predicts: bool = False
    deadline: float = math.inf  # on the clock of time.perf_counter; a way that is not ready by then has no row
    weights: dict[str, Tensor] = field(default_factory=dict[str, Tensor])  # after the steps of --warm
    reference: list[Tensor | None] = field(default_factory=list[Tensor | None])  # gradients of the float32 step
    unmodified: dict[bool, list[Tensor | None]] = field(default_factory=dict[bool, list[Tensor | None]])  # by is_eager
    traces: dict[bool, pare.Trace] = field(default_factory=dict[bool, pare.Trace])

    @property
    def is_small(self) -> bool:
        """Small networks on the CPU."""
        return self.device == "cpu"

    def model_and_batch(self) -> tuple[nn.Module, dict[str, Tensor]]:
        """The network with the weights that all variants begin with, and its batch."""
        torch.manual_seed(0)
        with torch.device(self.device):
            model = self.network.model(small=self.is_small)
        if self.weights:
            model.load_state_dict(self.weights)
        return model, moved(self.network.batch(self.is_small), self.device)

    def warm(self, num_steps: int) -> None:
        """Train the weights that all variants begin with for some unmodified steps in float32."""
        model, batch = self.model_and_batch()
        optimizer = torch.optim.AdamW(model.parameters(), WARM_LR)
        for _ in range(num_steps):
            forward(model, batch)[0].backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.weights = {name: value.detach().to("cpu", copy=True) for name, value in model.state_dict().items()}


def way_and_plan(name: str) -> tuple[Way, pare.Plan | None]:
    """The way of a name and its plan: a preset, or a format and its rounding, such as eager-uint4/32@bf16+bf16:stochastic."""
    mode, _, text = name.partition("-")
    if "/" not in text:
        way = Way.parse(name)
        return way, pare.Plan.preset(PRESETS[way.bits]) if way.bits else None
    format, _, rounding = text.partition(":")
    return replace(Way.parse(mode), name=name), pare.Plan.uniform(activation=format, rounding=rounding or None)


def gradients(model: nn.Module) -> list[Tensor | None]:
    """Copies of the gradients of all parameters, in float32, on the CPU: what a variant holds is measured on the device."""
    return [None if p.grad is None else p.grad.detach().to("cpu", torch.float32, copy=True) for p in model.parameters()]


def distance(found: Sequence[Tensor | None], wanted: Sequence[Tensor | None]) -> float:
    """The norm of the difference of two gradients over that of the second."""
    pairs = [(a, b) for a, b in zip(found, wanted, strict=True) if a is not None and b is not None]
    difference = sum(float((a - b).double().square().sum()) for a, b in pairs)
    return (difference / sum(float(b.double().square().sum()) for _, b in pairs)) ** 0.5


def allocated(device: str) -> int:
    """Bytes of all tensors of this process."""
    release(device)
    return torch.cuda.memory_allocated() if device == "cuda" else 0


def float32_gradients(worker: Worker) -> list[Tensor | None]:
    """Gradients of an unmodified step in float32."""
    model, batch = worker.model_and_batch()
    with worker.lock:
        forward(model, batch)[0].backward()
        found = gradients(model)
        del model, batch
        release(worker.device)
    return found


def prepared(worker: Worker, way: Way, plan: pare.Plan | None) -> Variant:
    """A variant after its first steps, with its compile time and its distances from other gradients."""
    before = allocated(worker.device)
    model, batch = worker.model_and_batch()
    columns: dict[str, Any] = {"predicted_bytes": predicted(worker, way, plan, model, batch) if worker.predicts else None}
    session = None if plan is None else worker.stack.enter_context(pare.apply(plan, model, seed=0))
    network: Any = model if way.is_eager else torch.compile(model) if session is None else session.compile()
    optimizer = make_optimizer("adamw", model)

    def loss() -> Tensor:
        with torch.autocast(worker.device, torch.bfloat16):
            return forward(network, batch)[0]

    blocked, begun = worker.lock.blocked_seconds, time.perf_counter()
    loss().backward()
    columns["compile_seconds"] = time.perf_counter() - begun - (worker.lock.blocked_seconds - blocked)
    found = gradients(model)
    columns["error"] = distance(found, worker.reference)
    if plan is None:
        worker.unmodified[way.is_eager] = found
    elif way.is_eager in worker.unmodified:
        columns["distance"] = distance(found, worker.unmodified[way.is_eager])

    def update(loss: Tensor) -> None:
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    del found
    with worker.lock:
        for _ in range(2):
            update(loss())
        if session is not None:
            held = loss()
            columns["stored_bytes"] = session.stored_bytes
            columns["num_changes"] = len(session.changes)
            update(held)
            del held
        return Variant(way, loss, update, allocated(worker.device) - before, columns)


def predicted(worker: Worker, way: Way, plan: pare.Plan | None, model: nn.Module, batch: Any) -> int:
    """The peak that `footprint` predicts for the step."""
    if way.is_eager not in worker.traces:
        about = {"optimizer": "adamw", "device": worker.device, "autocast": torch.bfloat16, "compiled": not way.is_eager}
        worker.traces[way.is_eager] = pare.trace_step(model, batch, **about)
    return pare.footprint(worker.traces[way.is_eager], plan).peak_bytes


# --- turns ----------------------------------------------------------------------------------------------------------------------------


def cuda_turn(variant: Variant) -> None:
    """Time some steps that follow each other, and their peak."""
    variant.step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    others = torch.cuda.memory_allocated() - variant.own_bytes
    events = [torch.cuda.Event(enable_timing=True) for _ in range(STEPS + 1)]
    events[0].record()
    begun = time.perf_counter()
    for event in events[1:]:
        variant.step()
        event.record()
    variant.issued.append((time.perf_counter() - begun) / STEPS)
    torch.cuda.synchronize()
    variant.seconds += [a.elapsed_time(b) / 1e3 for a, b in pairwise(events)]
    variant.columns["peak_bytes"] = max(variant.columns.get("peak_bytes", 0), torch.cuda.max_memory_allocated() - others)
    variant.columns["state_bytes"] = variant.own_bytes


def gpu_seconds(variant: Variant) -> float | None:
    """The median seconds of a step on the GPU alone; None if the step waits for the GPU."""
    found: list[float | None] = []
    for _ in range(3):
        loss, forward_seconds = queued(variant.loss, variant)
        _, backward_seconds = queued(lambda loss=loss: variant.update(loss), variant)
        found.append(None if forward_seconds is None or backward_seconds is None else forward_seconds + backward_seconds)
        del loss
    seconds = [one for one in found if one is not None]
    return statistics.median(seconds) if seconds else None


def queued(run: Callable[[], Any], variant: Variant) -> tuple[Any, float | None]:
    """The result of a call, and its seconds on the GPU if the call returned while a kernel before it still slept."""
    torch.cuda.synchronize()
    begins, ends = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(int(CYCLES_PER_SECOND * (1.5 * statistics.median(variant.issued) + 2e-3)))
    begins.record()
    result = run()
    is_early = not begins.query()
    ends.record()
    torch.cuda.synchronize()
    return result, begins.elapsed_time(ends) / 1e3 if is_early else None


def cpu_turn(variant: Variant) -> None:
    """Time one step."""
    begun = time.perf_counter()
    variant.step()
    variant.seconds.append(time.perf_counter() - begun)


def take_turns(variants: Sequence[Variant], device: str) -> None:
    """Fill in the times and peaks of all variants."""
    for _ in range(ROUNDS):
        for variant in variants:
            cuda_turn(variant) if device == "cuda" else cpu_turn(variant)
    for variant in variants:
        variant.columns["median_seconds"] = statistics.median(variant.seconds)
        variant.columns["host_seconds"] = statistics.median(variant.issued) if variant.issued else None
        variant.columns["gpu_seconds"] = gpu_seconds(variant) if device == "cuda" else None


def first_cause(error: BaseException) -> Exception:
    """The error that others were raised from: compilers wrap it in theirs, whose text begins with all of their settings."""
    while (cause := error.__cause__ or error.__context__) is not None:
        error = cause
    return error if isinstance(error, Exception) else RuntimeError(repr(error))


@contextmanager
def interrupted(deadline: float) -> Generator[None]:
    """Raise TimeoutError at the deadline, in the block itself or, where it waits for compiled code, right after that."""

    def stop(*_: Any) -> None:
        raise TimeoutError(LATE)

    left = deadline - time.perf_counter()
    if left <= 0:
        stop()
    if left < math.inf:
        signal.signal(signal.SIGALRM, stop)
        signal.setitimer(signal.ITIMER_REAL, left)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def measured(worker: Worker, ways: Sequence[str], ready: Callable[[], None]) -> dict[str, Any]:
    """{"rows": one for each way}."""
    rows: dict[str, dict[str, Any]] = {
        way: {"network": worker.network.name, "kind": worker.network.kind, "way": way} for way in ways
    }
    worker.reference = float32_gradients(worker)
    variants = list[Variant]()
    for name in ways:
        torch.compiler.reset()
        try:
            with interrupted(worker.deadline):
                variants.append(prepared(worker, *way_and_plan(name)))
        except Exception as error:
            is_late = time.perf_counter() > worker.deadline
            rows[name]["failure"] = LATE if is_late else failure(first_cause(error))
            print(f"{name}: {rows[name]['failure']}", file=sys.stderr, flush=True)
    worker.reference.clear()
    worker.unmodified.clear()
    for variant in variants:
        variant.step()  # compiles again, from torch's caches: compilations of later variants have reset Dynamo
    release(worker.device)
    ready()
    take_turns(variants, worker.device)
    for variant in variants:
        rows[variant.way.name] |= variant.columns
    return {"rows": list(rows.values())}


def main() -> None:
    """Read the request, measure, print the rows."""
    request: dict[str, Any] = {"device": "cpu", "lock": os.devnull, "predicts": False, **json.loads(sys.argv[1])}
    lock, deadline = DeviceLock(request["lock"]), time.perf_counter() + request.get("deadline", math.inf)

    def make(ready: Callable[[], None]) -> dict[str, Any]:
        if request["device"] == "cuda":
            lock_autotuning(lock)
        with ExitStack() as stack:
            worker = Worker(ZOO[request["network"]], request["device"], lock, stack, request["predicts"], deadline)
            if request.get("warm"):
                worker.warm(request["warm"])
            return measured(worker, request["ways"], ready)

    serve(make)


if __name__ == "__main__":
    main()
