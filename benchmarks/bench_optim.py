"""Optimizer steps beside torch's fused ones and other libraries: bytes a parameter, step time, and rows in results/optim.json.

    PYTHONPATH=src python benchmarks/bench_optim.py                     # one GPU; other libraries from the folder peers/, if it is there
    python benchmarks/bench_optim.py --model 355M --way lpmm bitsandbytes   # some of it; torch's fused optimizers run always
    python benchmarks/bench_optim.py --quick                            # tiny shapes on the CPU: whether it runs, no figures

Jobs: the step alone over the shapes of GPT-2 medium ("355M"), over few large tensors ("1e9") and over ResNet-50's 161 ("resnet50"); and
whole training steps of GPT-2 medium, folding and materialising included ("gpt2", batch 8 x 1024, and "gpt2_16", 16 x 1024).

Bytes: what the parameters, gradients and the optimizer's state hold after a backward pass, from their storages; beside it the growth of
torch.cuda.memory_allocated. Time: the learning rate changes at every step; `median` is between events of steps queued one after the other,
`idle` is of one step on an idle device, `host` is what issuing it takes. `floor` is the time that a copy at the rate measured in the same
run would take for the bytes a step must move: parameters and state read and written, gradients read.
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from bench_session import cpu_times, cuda_times, gpt2, spread, texts, times
from loops import Log, common_options, failure, release
from measure import time_call
from optimizers import ALONE, OTHERS, RELEASED, TORCH, TRAINED, Way, peer_versions
from storages import memory, used_bytes
from torch import Tensor, nn

import paredown as pare
from paredown.models import MODELS, random_batch
from paredown.models.resnet import resnet50

WARM_UP = 4
COPIED = 1 << 28  # floats


@dataclass(frozen=True)
class Row:
    """One way of one job; what is None was not measured. Ratios are to torch's fused optimizer of the same rule."""

    job: str
    way: str
    num_tensors: int
    numel: int
    dtype: str
    bytes_per_parameter: float | None = None  # parameters, gradients, state and scales
    gradient_bytes_per_parameter: float | None = None
    allocated_per_parameter: float | None = None  # by the allocator
    memory_ratio: float | None = None  # to fp32
    median_seconds: float | None = None
    p20_seconds: float | None = None
    p80_seconds: float | None = None
    idle_seconds: float | None = None
    host_seconds: float | None = None
    time_ratio: float | None = None  # to bf16
    copy_bytes_per_second: float | None = None
    floor_seconds: float | None = None
    floor_ratio: float | None = None
    peak_bytes: int | None = None
    reserved_bytes: int | None = None
    first_loss: float | None = None
    last_loss: float | None = None
    num_changes: int | None = None
    error: str | None = None


# --- jobs -------------------------------------------------------------------------------------------------------------


class Holder(nn.Module):
    """One parameter, and a loss whose gradient is the tensor that it is multiplied by."""

    def __init__(self, shape: Sequence[int], dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.02 * torch.randn(shape, dtype=dtype))

    def forward(self, factor: Tensor) -> Tensor:
        """The sum of the parameter's values, each times its factor."""
        return (self.weight * factor).sum()


class Holders(nn.Module):
    """Parameters of any shapes in a module, as a session wants them."""

    def __init__(self, shapes: Sequence[Sequence[int]], dtype: torch.dtype) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Holder(shape, dtype) for shape in shapes)

    def forward(self, index: int, factor: Tensor) -> Tensor:
        """The loss of one of them."""
        return self.parts[index](factor)


@dataclass(frozen=True)
class Job:
    """The step alone over `shapes`; or training steps of a model that answers its own loss on a batch of keywords."""

    name: str
    ways: tuple[Way, ...]
    shapes: Sequence[Sequence[int]] = ()
    model: Callable[[], nn.Module] | None = None
    batch: Callable[[str], Any] | None = None  # on a device


def medium_shapes(dim: int, num_layers: int, vocabulary: int) -> list[tuple[int, ...]]:
    """Of a GPT-2: embeddings, and of each layer four matrices with their biases and two norms."""
    layer = [(3 * dim, dim), (3 * dim,), (dim, dim), (dim,), (4 * dim, dim), (4 * dim,), (dim, 4 * dim), (dim,), *[(dim,)] * 4]
    return [(vocabulary, dim), (1024, dim), *layer * num_layers, (dim,), (dim,)]


def resnet_shapes(width: int, num_classes: int) -> list[tuple[int, ...]]:
    """Of ResNet-50's 161 tensors."""
    with torch.device("meta"):
        return [tuple(p.shape) for p in resnet50(width=width, num_classes=num_classes).parameters()]


def full_jobs() -> tuple[Job, ...]:
    """The jobs of the table, for a GPU."""
    medium = partial(gpt2, n_embd=1024, n_layer=24, n_head=16)
    return (
        Job("355M", (*TORCH, *ALONE, *RELEASED, *OTHERS), medium_shapes(1024, 24, 50304)),
        Job("1e9", (*TORCH, *ALONE), [(15625, 16000)] * 4),
        Job("resnet50", (*TORCH, *ALONE, *OTHERS), resnet_shapes(64, 1000)),
        Job("gpt2", (*TORCH, *TRAINED, *RELEASED), model=medium, batch=lambda device: texts(8, device)),
        Job("gpt2_16", (*TORCH, *TRAINED, *RELEASED), model=medium, batch=lambda device: texts(16, device)),
    )


def quick_jobs() -> tuple[Job, ...]:
    """The same in small and without other libraries, to see whether all of it runs."""

    def batch(device: str) -> Mapping[str, Tensor]:
        ids, targets = random_batch("gpt", 2)
        return {"ids": ids.to(device), "targets": targets.to(device)}

    return (
        Job("355M", (*TORCH, *ALONE, *RELEASED), medium_shapes(64, 1, 128)),
        Job("1e9", (*TORCH, *ALONE), [(100, 160)] * 4),
        Job("resnet50", (*TORCH, *ALONE), resnet_shapes(8, 10)),
        Job("gpt2", (*TORCH, *TRAINED, *RELEASED), model=MODELS["gpt"], batch=batch),
        Job("gpt2_16", TORCH, model=MODELS["gpt"], batch=batch),
    )


# --- measuring --------------------------------------------------------------------------------------------------------


@contextmanager
def applied(way: Way, model: nn.Module) -> Generator[Any, None, None]:
    """The session of a way that has a tier, else None."""
    if way.tier is None:
        yield None
        return
    with pare.apply(pare.Plan.preset(way.tier), model) as session:
        yield session


def measure_alone(job: Job, way: Way, device: str, num_steps: int) -> Row:
    """The step alone, with the gradients of one backward pass; of a way with release the bytes only."""
    torch.manual_seed(0)
    release(device)
    before = used_bytes(device)
    with torch.device(device):
        model = Holders(job.shapes, way.dtype)
    with applied(way, model) as session:
        optimizer = way.make(model.parameters())
        for _ in range(2 if way.release else 1):
            optimizer.zero_grad(set_to_none=True)
            for index, shape in enumerate(job.shapes):
                model(index, 1e-3 * torch.randn(shape, dtype=way.dtype, device=device)).backward()
            optimizer.step()
        row = replace(first_row(job, way, model), num_changes=None if session is None else len(session.changes))
        row = replace(row, **memory(model, before, device, has_gradients=not way.release))
        return row if way.release else replace(row, **step_times(stepper(optimizer), device, num_steps))


def stepper(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """A step whose learning rate is another one each time."""
    rates = [float(group["lr"]) for group in optimizer.param_groups]
    count = 0

    def step() -> None:
        nonlocal count
        count += 1
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            value = rate / (1 + 0.01 * count)
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(value)
            else:
                group["lr"] = value
        optimizer.step()

    return step


def step_times(step: Callable[[], None], device: str, num_steps: int) -> dict[str, float]:
    """Seconds of steps queued one after the other, of one on an idle device, and of the host to issue it."""
    for _ in range(WARM_UP):
        step()
    if device != "cuda":
        seconds = [cpu_seconds(step) for _ in range(num_steps)]
        return {**spread(seconds), "idle_seconds": statistics.median(seconds), "host_seconds": statistics.median(seconds)}
    torch.cuda.synchronize()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(num_steps + 1)]
    torch.cuda._sleep(20_000_000)  # about 10 ms, so that the first steps wait in the queue too
    events[0].record()
    for event in events[1:]:
        step()
        event.record()
    torch.cuda.synchronize()
    queued = spread([a.elapsed_time(b) / 1e3 for a, b in pairwise(events)])
    idle, host = zip(*(idle_seconds(step) for _ in range(num_steps)), strict=True)
    return {**queued, "idle_seconds": statistics.median(idle), "host_seconds": statistics.median(host)}


def cpu_seconds(step: Callable[[], None]) -> float:
    """Of one step."""
    begun = time.perf_counter()
    step()
    return time.perf_counter() - begun


def idle_seconds(step: Callable[[], None]) -> tuple[float, float]:
    """Of one step on an idle device, and of the host to issue it."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    host = cpu_seconds(step)
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1e3, host


def measure_training(job: Job, way: Way, device: str, num_steps: int) -> Row:
    """Whole training steps: a float32 model under bf16 autocast, any other unmodified."""
    assert job.model is not None and job.batch is not None
    torch.manual_seed(0)
    batch = job.batch(device)
    warm = torch.ones(64, 64, device=device, dtype=torch.bfloat16, requires_grad=True)
    (warm @ warm).sum().backward()  # cuBLAS takes its memory
    del warm
    release(device)
    before = used_bytes(device)
    with torch.device(device):
        model = job.model().to(way.dtype).train()
    with applied(way, model) as session:
        optimizer = way.make(model.parameters())

        def backward() -> Tensor:
            with torch.autocast(device, torch.bfloat16, enabled=way.dtype is torch.float32):
                loss = model(**batch).loss
            loss.backward()
            return loss.detach()

        def step() -> Tensor:
            loss = backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            return loss

        first, *_ = [float(step()) for _ in range(WARM_UP)]
        backward()
        row = replace(first_row(job, way, model), first_loss=first, **memory(model, before, device, has_gradients=not way.release))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        measured = cuda_times(step, num_steps) if device == "cuda" else cpu_times(step, num_steps)
        return replace(row, num_changes=None if session is None else len(session.changes), **measured)


def first_row(job: Job, way: Way, model: nn.Module | None) -> Row:
    """What was asked for."""
    shapes = [tuple(p.shape) for p in model.parameters()] if model is not None else job.shapes
    numel = sum(torch.Size(shape).numel() for shape in shapes)
    return Row(job.name, way.name, len(shapes), numel, str(way.dtype).removeprefix("torch."))


def attempt(job: Job, way: Way, device: str, num_steps: int) -> Row:
    """A measurement, an error being a row too."""
    try:
        measure = measure_alone if job.model is None else measure_training
        return measure(job, way, device, num_steps)
    except Exception as error:
        return replace(first_row(job, way, None), error=failure(error))
    finally:
        release(device)


# --- rows -------------------------------------------------------------------------------------------------------------


def compared(row: Row, others: Mapping[str, Row], copy_rate: float, *, is_alone: bool) -> Row:
    """`row` with its floor, and its ratios to torch's fused optimizers."""
    rule = row.way.split()[0]
    half, full = (others.get(f"{rule} torch fused {dtype}") for dtype in ("bfloat16", "float32"))
    if half is not None and row.median_seconds and half.median_seconds:
        row = replace(row, time_ratio=row.median_seconds / half.median_seconds)
    if full is not None and row.bytes_per_parameter and full.bytes_per_parameter:
        row = replace(row, memory_ratio=row.bytes_per_parameter / full.bytes_per_parameter)
    if not is_alone or row.median_seconds is None or row.bytes_per_parameter is None:
        return row
    moved = (2 * row.bytes_per_parameter - (row.gradient_bytes_per_parameter or 0.0)) * row.numel
    floor = moved / copy_rate
    return replace(row, copy_bytes_per_second=copy_rate, floor_seconds=floor, floor_ratio=row.median_seconds / floor)


def rows_of(job: Job, asked: Sequence[str], device: str, num_steps: int, copy_rate: float) -> Iterator[Row]:
    """All ways of a job whose names contain one of `asked`, torch's first and always."""
    rows: dict[str, Row] = {}
    for way in job.ways:
        is_asked = way in TORCH or any(text in way.name for text in asked)
        if not is_asked or way.only not in (None, job.name):
            continue
        row = attempt(job, way, device, num_steps)
        rows[way.name] = compared(row, {**rows, row.way: row}, copy_rate, is_alone=job.model is None)
        yield rows[way.name]


def copied_per_second(device: str, numel: int) -> float:
    """Bytes a second of a copy, read and written."""
    source = torch.ones(numel, device=device)
    target = torch.empty_like(source)
    median, _, _ = time_call(lambda: target.copy_(source), device)
    return 2 * source.nbytes / median


def figure(value: float | None, unit: float = 1.0) -> str:
    """A number for a table, or a dash."""
    return "      -" if value is None else f"{value / unit:7.3f}"


def line(row: Row) -> str:
    """One line of the table."""
    head = f"{row.job:9s} {row.way:34s}"
    if row.error:
        return f"{head} {row.error}"
    seconds = (row.median_seconds, row.p20_seconds, row.p80_seconds, row.idle_seconds, row.host_seconds, row.floor_seconds)
    bytes_used = f"{figure(row.bytes_per_parameter)} {figure(row.allocated_per_parameter)} {times(row.memory_ratio)}"
    milliseconds = " ".join(figure(value, 1e-3) for value in seconds)
    loss = "" if row.first_loss is None else f"  loss {row.first_loss:.3f} to {row.last_loss:.3f}"
    return f"{head} {bytes_used} {milliseconds} {times(row.floor_ratio)} {times(row.time_ratio)}{loss}"


def main() -> None:
    """Measure all of it, print the table and append the rows."""
    parser = common_options(__doc__)
    parser.add_argument("--way", nargs="+", default=[""], help="only ways whose name contains one of these; torch's run always")
    parser.add_argument("--steps", type=int, default=40, help="timed steps of each way")
    options = parser.parse_args()
    device = "cpu" if options.quick else "cuda"
    steps = min(options.steps, 3) if options.quick else options.steps
    log = Log("optim.json", device, options)
    log.runs[-1]["versions"].update(peer_versions())
    copy_rate = copied_per_second(device, COPIED >> 8 if options.quick else COPIED)
    release(device)
    print(f"copy: {copy_rate / 1e12:.3f} TB/s", flush=True)
    print(
        "job, way; bytes a parameter, by the allocator, ratio to fp32; ms: median, p20, p80, idle, host, floor; to floor, to bf16"
    )
    for job in quick_jobs() if options.quick else full_jobs():
        if options.model and job.name not in options.model:
            continue
        for row in rows_of(job, options.way, device, steps, copy_rate):
            log.add(row)
            print(line(row), flush=True)


if __name__ == "__main__":
    main()
