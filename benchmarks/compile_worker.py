"""One measurement of bench_compile.py in a process of its own: `python benchmarks/compile_worker.py '{"job": "toy", "way": "compiled"}'`.

The process builds its network, compiles it and runs the first steps. It then prints one line of JSON, {"ready": true}, and blocks on its
standard input until it reads a line: bench_compile.py sends that line when no other process computes. It times its steps, prints a
second line of JSON with the fields of its row, and exits. End of file on the standard input ends it without a row.

While other processes compile, a lock on a file admits one process at a time to what must not be disturbed: Inductor's timing of kernel
configurations, which decides which kernel runs, and the steps after the first. Seconds spent blocked on the lock are not counted as
compile time.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import sys
import time
import traceback
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch._functorch.config
from bench_session import cpu_times, cuda_times, gpt2, texts, torchvision_model
from loops import GIB, Batch, Job, build, failure, forward, gib, make_optimizer, make_step, pictures, release
from loops import Way as Format
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d, cross_entropy, interpolate, mse_loss, scaled_dot_product_attention

import paredown as pare
from paredown.models import MODELS

LIMIT_BYTES = 16 * GIB
GRAIN = 32  # the largest batch is a multiple of this
FORMATS = {"int8": "int8/64@bf16", "uint4": "uint4/32@bf16+bf16", "int4": "int4/64@bf16"}  # uint4 is the preset activations4
RECOMPUTE = "recompute"  # a plan that packs no activation: graphs that recompute what sessions do
NUM_LOSSES = 10  # the loss after a training is the mean of its last ones


@dataclass(frozen=True)
class Way:
    """How a step runs; parts are joined by + or -: compiled, eager, int8, uint4, int4, recompute, budget=0.5, fit=6.6, int8+budget=0.6."""

    name: str
    is_eager: bool
    bits: str | None  # a key of FORMATS, or RECOMPUTE
    budget: float | None  # torch's activation_memory_budget
    fit: float | None = None  # GiB that `assign` makes a plan for

    @staticmethod
    def parse(name: str) -> Way:
        """The way of that name."""
        parts = re.split(r"[+-]", name)
        budgets = [float(part[7:]) for part in parts if re.fullmatch(r"budget=[01](\.\d+)?", part)]
        bits = [part for part in parts if part in (*FORMATS, RECOMPUTE)]
        fits = [float(part[4:]) for part in parts if re.fullmatch(r"fit=\d+(\.\d+)?", part)]
        plain = [part for part in parts if part in ("compiled", "eager")]
        kinds = (budgets, bits, plain, fits)
        if sum(map(len, kinds)) != len(parts) or max(map(len, kinds)) > 1 or (fits and len(parts) > 1):
            raise ValueError(
                f"{name!r} is no way to run a step; write compiled, eager, {', '.join(FORMATS)}, recompute, budget=0.5 or int8+budget=0.6"
            )
        return Way(name, "eager" in plain, *(found[0] if found else None for found in (bits, budgets, fits)))


# --- networks ---------------------------------------------------------------------------------------------------------


def llama() -> nn.Module:
    """A Llama-shaped network of 0.4 billion parameters, without a key-value cache."""
    from transformers import LlamaConfig, LlamaForCausalLM

    shape: dict[str, Any] = {"hidden_size": 1536, "intermediate_size": 4096, "num_hidden_layers": 12, "num_attention_heads": 12}
    return LlamaForCausalLM(LlamaConfig(**shape, num_key_value_heads=4, vocab_size=32000, use_cache=False)).train()


class Loss(NamedTuple):
    """What a network returns that computes its own loss."""

    loss: Tensor


class Residual(nn.Module):
    """Two convolutions behind group norms and SiLUs, beside a convolution of 1 x 1."""

    def __init__(self, num_in: int, num_out: int) -> None:
        super().__init__()
        widths = (num_in, num_out)
        parts = (part for n in widths for part in (nn.GroupNorm(32, n), nn.SiLU(), nn.Conv2d(n, num_out, 3, padding=1)))
        self.layers, self.beside = nn.Sequential(*parts), nn.Conv2d(num_in, num_out, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x) + self.beside(x)


class PixelAttention(nn.Module):
    """Self-attention of all pixels, behind a group norm."""

    def __init__(self, num: int, num_heads: int = 4) -> None:
        super().__init__()
        self.norm, self.qkv, self.out, self.num_heads = (
            nn.GroupNorm(32, num),
            nn.Linear(num, 3 * num),
            nn.Linear(num, num),
            num_heads,
        )

    def forward(self, x: Tensor) -> Tensor:
        pixels = self.norm(x).flatten(2).transpose(1, 2)
        q, k, v = (part.unflatten(2, (self.num_heads, -1)).transpose(1, 2) for part in self.qkv(pixels).chunk(3, 2))
        found = scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return x + self.out(found).transpose(1, 2).unflatten(2, x.shape[2:])


class UNetWithAttention(nn.Module):
    """A U-Net as diffusion models have: group norms, SiLUs, and attention where pictures are smallest; the loss is a mean square."""

    def __init__(self, widths: Sequence[int] = (64, 128, 256)) -> None:
        super().__init__()
        pairs = list(pairwise(widths))
        self.first, self.last = nn.Conv2d(3, widths[0], 3, padding=1), nn.Conv2d(widths[0], 3, 3, padding=1)
        self.down = nn.ModuleList(Residual(a, b) for a, b in pairs)
        self.middle = nn.Sequential(Residual(widths[-1], widths[-1]), PixelAttention(widths[-1]), Residual(widths[-1], widths[-1]))
        self.up = nn.ModuleList(Residual(2 * b, a) for a, b in reversed(pairs))

    def forward(self, x: Tensor, noise: Tensor) -> Loss:
        h, skipped = self.first(x), list[Tensor]()
        for block in self.down:
            h = block(h)
            skipped.append(h)
            h = avg_pool2d(h, 2)
        h = self.middle(h)
        for block in self.up:
            h = block(torch.cat((interpolate(h, scale_factor=2), skipped.pop()), 1))
        return Loss(mse_loss(self.last(h).float(), noise))


def noisy_pictures(size: int, device: str, side: int = 64) -> Batch:
    """Pictures and noise, as keywords of UNetWithAttention."""
    return {name: torch.randn(size, 3, side, side, device=device) for name in ("x", "noise")}


def toy() -> nn.Module:
    """Two convolutions with batch norms: what compiles on a CPU in seconds."""
    layers = [module for num in (3, 64) for module in (nn.Conv2d(num, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU())]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


def jobs() -> dict[str, Job]:
    """The steps of the table by name, all with fused AdamW."""
    last = lambda size, device: pictures(size, device, channels_last=True)  # noqa: E731
    small = lambda size, device: pictures(size, device, side=32, num_classes=10, channels_last=True)  # noqa: E731
    found = (
        Job("resnet50", 256, lambda: torchvision_model("resnet50"), last, "adamw", channels_last=True),
        Job("vit_b_16", 128, lambda: torchvision_model("vit_b_16"), pictures, "adamw"),
        Job("gpt2", 16, gpt2, texts, "adamw"),
        Job("llama", 8, llama, lambda size, device: texts(size, device, vocabulary=32000), "adamw"),
        Job("unet", 32, UNetWithAttention, noisy_pictures, "adamw"),
        Job("toy", 16, toy, small, "adamw", channels_last=True),
    )
    return {job.name: job for job in found}


# --- one process among several ----------------------------------------------------------------------------------------


class DeviceLock:
    """A lock on a file that one process holds at a time; a process that holds it may enter again.

    The benchmark may stop its processes for a while; then the file has the seconds of all stops together.
    """

    def __init__(self, path: str) -> None:
        self.file = open(path, "a+")  # noqa: SIM115
        self.depth = 0
        self._blocked_seconds = 0.0

    @property
    def blocked_seconds(self) -> float:
        """Seconds for which this process was blocked on the lock, or stopped."""
        return self._blocked_seconds + self._stopped_seconds()

    def _stopped_seconds(self) -> float:
        self.file.seek(0)
        return float(self.file.read() or 0)

    def __enter__(self) -> None:
        if self.depth == 0:
            begun, stopped = time.perf_counter(), self._stopped_seconds()
            fcntl.flock(self.file, fcntl.LOCK_EX)
            self._blocked_seconds += time.perf_counter() - begun - (self._stopped_seconds() - stopped)
        self.depth += 1

    def __exit__(self, *_: object) -> None:
        self.depth -= 1
        if self.depth == 0:
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()  # queued kernels belong to the holder
            fcntl.flock(self.file, fcntl.LOCK_UN)


def lock_autotuning(lock: DeviceLock) -> None:
    """Let Inductor time kernels, and padded matrix products, under the lock alone; what a version of torch lacks is left unmodified."""
    from torch._inductor.fx_passes import pad_mm
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    for owner, name in ((CachingAutotuner, "benchmark_all_configs"), (pad_mm, "_should_pad_bench"), (pad_mm, "_should_pad")):
        if hasattr(owner, name):
            setattr(owner, name, _under(lock, getattr(owner, name)))


def _under(lock: DeviceLock, timing: Any) -> Any:
    def locked(*args: Any, **keywords: Any) -> Any:
        with lock:
            return timing(*args, **keywords)

    return locked


@dataclass(frozen=True)
class Worker:
    """What every kind of measurement needs: the way, the device, the lock, and `ready`, which blocks until no other process computes."""

    way: Way
    device: str
    num_steps: int
    lock: DeviceLock
    ready: Callable[[], None]
    predicts: bool = False  # peaks, from traces


@contextmanager
def called(
    way: Way, model: nn.Module, *, seed: int = 0, plan: pare.Plan | None = None, **options: Any
) -> Generator[tuple[Any, Any]]:
    """What a step calls in place of the model, and the session or None; `plan`: instead of the way's, `options`: of torch.compile."""
    plan = plan or plan_of(way)
    with nullcontext() if plan is None else pare.apply(plan, model, seed=seed) as session:
        if way.is_eager:
            yield model, session
        else:
            yield torch.compile(model, **options) if session is None else session.compile(**options), session


def plan_of(way: Way, trace: pare.Trace | None = None) -> pare.Plan | None:
    """The plan of a way, or None; one within `way.fit` GiB is made for the trace, of FORMATS and for activations alone."""
    if way.fit and trace:
        return pare.assign(trace, f"{way.fit}GiB", levels=(None, *FORMATS.values()))
    if way.bits == RECOMPUTE:
        return pare.Plan().set("activation", None)
    return Format(way.bits, FORMATS[way.bits]).plan() if way.bits else None


def traced(model: nn.Module, batch: Batch) -> pare.Trace:
    """The trace of the compiled step."""
    device = next(model.parameters()).device.type
    loss = None if isinstance(batch, Mapping) else cross_entropy
    return pare.trace_step(model, batch, loss=loss, optimizer="adamw", device=device, autocast=torch.bfloat16, compiled=True)


# --- steps ------------------------------------------------------------------------------------------------------------


def shape_of(batch: Batch) -> list[int]:
    """The shape of a network's input."""
    return list((batch[0] if isinstance(batch, tuple) else next(iter(batch.values()))).shape)


def stored_bytes(model: Any, batch: Batch, session: Any, device: str) -> int | None:
    """What a session stores between forward and backward; None where it has no such number."""
    if session is None:
        return None
    with torch.autocast(device, torch.bfloat16):
        loss, _output = forward(model, batch)
    found = getattr(session, "stored_bytes", None)
    loss.backward()
    return found


def warmed_up(worker: Worker, step: Callable[[], Tensor]) -> dict[str, float]:
    """Run the first steps: the first loss, and the seconds of the first step."""
    before, begun = worker.lock.blocked_seconds, time.perf_counter()
    first = float(step())
    seconds = time.perf_counter() - begun - (worker.lock.blocked_seconds - before)
    with worker.lock:
        for _ in range(3):
            step()
    return {"first_loss": first, "compile_seconds": seconds}


def timed(worker: Worker, step: Callable[[], Tensor], num_steps: int) -> dict[str, Any]:
    """Median, spread and peak of `num_steps` steps after two that are not counted."""
    for _ in range(2):
        step()
    return cuda_times(step, num_steps) if worker.device == "cuda" else cpu_times(step, num_steps)


def step_fields(worker: Worker, job: Job, **options: Any) -> dict[str, Any]:
    """One row of the table; `options` are those of torch.compile."""
    torch.manual_seed(0)
    model = build(job, worker.device)
    batch, optimizer = job.batch(job.size, worker.device), make_optimizer(job.optimizer, model)
    trace = traced(model, batch) if worker.way.fit or worker.predicts else None
    plan = plan_of(worker.way, trace)
    predicted = None if trace is None else pare.footprint(trace, plan).peak_bytes
    with called(worker.way, model, plan=plan, **options) as (network, session):
        step = make_step(network, batch, optimizer, worker.device)
        shape = {"size": job.size, "shape": shape_of(batch), "predicted_bytes": predicted}
        fields: dict[str, Any] = {**warmed_up(worker, step), **shape}
        with worker.lock:
            fields["stored_bytes"] = stored_bytes(network, batch, session, worker.device)
            optimizer.zero_grad(set_to_none=True)
        worker.ready()
        fields |= timed(worker, step, worker.num_steps)
        return {**fields, "num_changes": None if session is None else len(session.changes)}


# --- the largest batch ------------------------------------------------------------------------------------------------


def line_through(peaks: dict[int, int], limit: int) -> int:
    """The size at which the line through the two largest sizes in `peaks` meets the limit, rounded down to GRAIN."""
    (small, low), (large, high) = sorted(peaks.items())[-2:]
    return int(small + (limit - low) * (large - small) / (high - low)) // GRAIN * GRAIN


def next_size(peaks: dict[int, int], limit: int) -> int | None:
    """The batch to measure next, by the peak bytes of at least two batches; None when the largest that fits is measured.

    It is the largest multiple of GRAIN that the line predicts to fit, and after a batch that does not fit at least one GRAIN below.

    >>> next_size({64: 2000, 128: 4000}, limit=15_500), next_size({64: 2000, 128: 4000, 480: 15_400}, limit=15_500)
    (480, None)
    >>> next_size({64: 2000, 128: 4000, 480: 15_600}, limit=15_500)
    448
    """
    fits = [size for size, peak in peaks.items() if peak < limit]
    too_large = [size for size, peak in peaks.items() if peak >= limit]
    guess = max(line_through(peaks, limit), GRAIN)
    if too_large:
        guess = min(guess, min(too_large) - GRAIN)
    known = max(fits, default=0)
    return guess if guess > known else None


def peak_of(worker: Worker, job: Job) -> int:
    """Peak bytes of a few steps of a fresh network."""
    model = build(job, worker.device)
    batch, optimizer = job.batch(job.size, worker.device), make_optimizer(job.optimizer, model)
    with called(worker.way, model, dynamic=False) as (network, _):
        warmed_up(worker, make_step(network, batch, optimizer, worker.device))
        torch.cuda.reset_peak_memory_stats()
        with worker.lock:
            make_step(network, batch, optimizer, worker.device)()
        return torch.cuda.max_memory_allocated()


def largest_fields(worker: Worker, job: Job, known: dict[int, int]) -> dict[str, Any]:
    """The largest batch whose peak is below LIMIT_BYTES, and its times; `known`: peaks, else the job's own batch is measured first."""
    num_values = sum(param.numel() for param in build(job, "meta").parameters())
    peaks = {0: 16 * num_values, **known}  # weights, gradients and two moments in fp32: where the first line begins
    size: int | None = next_size(peaks, LIMIT_BYTES) if known else job.size
    while size is not None:
        torch.compiler.reset()
        release(worker.device)
        peaks[size] = peak_of(worker, replace(job, size=size))
        print(f"a batch of {size} peaks at {gib(peaks[size])} GiB", flush=True)
        size = next_size(peaks, LIMIT_BYTES)
    torch.compiler.reset()
    release(worker.device)
    best = max(size for size, peak in peaks.items() if peak < LIMIT_BYTES)
    fields = step_fields(worker, replace(job, size=best), dynamic=False)  # in the compile cache of this process
    return {**fields, "compile_seconds": None, "limit_bytes": LIMIT_BYTES}


# --- losses -----------------------------------------------------------------------------------------------------------


def teacher_pictures(size: int, source: torch.Generator) -> tuple[Tensor, Tensor]:
    """Coarse 4 x 4 noise as pictures of 32 x 32; labels are the largest of ten linear functions of it, the same for all seeds."""
    teacher = torch.randn(10, 48, generator=torch.Generator().manual_seed(0))
    coarse = torch.randn(size, 3, 4, 4, generator=source)
    fine = interpolate(coarse, scale_factor=8) + 0.1 * torch.randn(size, 3, 32, 32, generator=source)
    return fine, (coarse.flatten(1) @ teacher.T).argmax(1)


def teacher_texts(size: int, source: torch.Generator, *, length: int = 64, vocabulary: int = 256) -> tuple[Tensor, Tensor]:
    """Tokens of which 4 of 5 follow from the one before by a fixed permutation; the others are random."""
    follower = torch.randperm(vocabulary, generator=torch.Generator().manual_seed(0))
    columns = [torch.randint(vocabulary, (size,), generator=source)]
    for _ in range(length):
        is_random = torch.rand(size, generator=source) < 0.2
        columns.append(torch.where(is_random, torch.randint(vocabulary, (size,), generator=source), follower[columns[-1]]))
    tokens = torch.stack(columns, 1)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


TRAININGS: dict[str, tuple[Callable[[], nn.Module], Callable[..., tuple[Tensor, Tensor]]]] = {
    "resnet18": (lambda: MODELS["resnet18"](width=32), teacher_pictures),
    "gpt": (lambda: MODELS["gpt"](dim=128), teacher_texts),
    "toy": (toy, teacher_pictures),
}  # name of the network: how it is built, and its data


def loss_after(worker: Worker, name: str, seed: int, num_steps: int, size: int = 128) -> float:
    """The mean loss of the last steps of a training from `seed`, each step with new data."""
    make, data = TRAININGS[name]
    torch.manual_seed(seed)
    model, source = make().to(worker.device).train(), torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, fused=True)
    losses: list[Tensor] = []
    with called(worker.way, model, seed=seed) as (network, _):
        for _ in range(num_steps):
            x, target = (tensor.to(worker.device) for tensor in data(size, source))
            with torch.autocast(worker.device, torch.bfloat16):
                output = network(x)
                loss = cross_entropy(output.flatten(0, -2), target.flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            losses.append(loss.detach())
    return float(torch.stack(losses[-NUM_LOSSES:]).mean())


def loss_fields(worker: Worker, name: str, num_steps: int, seeds: Sequence[int] = (0, 1, 2)) -> dict[str, Any]:
    """The losses after trainings from several seeds."""
    losses = [loss_after(worker, name, seed, num_steps) for seed in seeds]
    worker.ready()
    return {"num_steps": num_steps, "losses": losses}


# --- the process ------------------------------------------------------------------------------------------------------


def fields_of(worker: Worker, job: str, kind: str, known: dict[int, int]) -> dict[str, Any]:
    """The measurement `kind` of a job: steps, largest or losses."""
    name = job.split("-")[0]
    if kind == "losses":
        return loss_fields(worker, name, worker.num_steps)
    return step_fields(worker, jobs()[name]) if kind == "steps" else largest_fields(worker, jobs()[name], known)


def serve(make: Callable[[Callable[[], None]], dict[str, Any]]) -> None:
    """Print the fields that `make` returns, or its error; it calls its argument to block until no other process computes."""
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print goes to the log

    def ready() -> None:
        replies.write(json.dumps({"ready": True}) + "\n")
        if not sys.stdin.readline():
            raise SystemExit("the benchmark that asked for this row has ended")

    try:
        reply = make(ready)
    except Exception as error:
        traceback.print_exc()
        reply = {"error": failure(error)}
    replies.write(json.dumps(reply) + "\n")


def main() -> None:
    """Read the request, measure, print the row."""
    request: dict[str, Any] = {"kind": "steps", "device": "cpu", "num_steps": 10, "lock": os.devnull, **json.loads(sys.argv[1])}
    way, lock = Way.parse(request["way"]), DeviceLock(request["lock"])
    if way.budget is not None:
        torch._functorch.config.activation_memory_budget = way.budget

    def make(ready: Callable[[], None]) -> dict[str, Any]:
        if request["device"] == "cuda":
            lock_autotuning(lock)
        worker = Worker(way, request["device"], request["num_steps"], lock, ready, request.get("predicts", False))
        known = {int(size): peak for size, peak in request.get("known", {}).items()}
        return fields_of(worker, request["job"], request["kind"], known)

    serve(make)


if __name__ == "__main__":
    main()
