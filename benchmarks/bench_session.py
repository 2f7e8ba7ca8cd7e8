"""Training loops with packed activations beside the baseline: peak bytes and step time, and rows in results/session.json.

    python benchmarks/bench_session.py                              # one GPU; torchvision and transformers installed
    python benchmarks/bench_session.py --kernels                    # seconds of kernels instead of the host's, which the profiler changes
    python benchmarks/bench_session.py --model resnet50 --plan int8 # some of it; the baseline always runs
    python benchmarks/bench_session.py --quick                      # tiny shapes on the CPU: whether it runs, no figures

All under bf16 autocast with fused optimizers. Beside each step stand the host's microseconds per packed tensor and those of an empty eager
operation (an addition in place to one value, issued 2000 times): they distinguish a slow host from slow code. The time per packed tensor is
the difference of the steps of a session and of the baseline, both with a small batch that leaves the device idle, divided by the number of
saved tensors that the session packs in a step. With --kernels the seconds of the step's kernels stand there instead, by torch's profiler,
after which every launch of the process takes longer.

Each way is a fresh model; after warm-up a run of steps is timed by events between them,
and the peak is torch.cuda.max_memory_allocated over those steps. Ratios are to the baseline in the same run. `predicted` is
footprint's peak. The largest batch is found under a real limit of the allocator, by bisection on multiples of 32; give it
PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, or scattered memory decides.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from loops import (
    BASELINE,
    GIB,
    Batch,
    Job,
    Log,
    Way,
    applied,
    build,
    chosen,
    common_options,
    failure,
    gib,
    make_optimizer,
    make_step,
    pictures,
    release,
)
from networks import AttentionUNet, GraphNetwork, LstmLanguageModel, ScanLanguageModel, llama
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import paredown as pare
from paredown.models import MODELS

LIMIT_BYTES = 16 * GIB
WARM_UP = 4
SMALL = 32  # the small batch is this many times smaller
GRAIN = 32  # the largest batch is a multiple of this
OUT_OF_MEMORY = ("out of memory", "ALLOC_FAILED", "unable to find an engine")  # what torch, cuBLAS and cuDNN say


# --- what is measured -------------------------------------------------------------------------------------------------


FORMATS = (
    *("int8/64@bf16", "e4m3fn/64@bf16"),
    *("int4/64@bf16", "uint4/64@bf16+bf16"),
    *("int2/64@bf16", "uint2/64@bf16+bf16"),
)
WAYS = (BASELINE, Way("checkpointing", checkpointing=True), *(Way(text, text) for text in FORMATS))
LARGEST_WAYS = (BASELINE, Way("int4/64@bf16", "int4/64@bf16"))


@dataclass(frozen=True)
class Row:
    """One variant of one job; None: not measured. Ratios are to the baseline."""

    job: str
    way: str
    size: int
    kind: str | None = None
    rounding: str | None = None
    limit_bytes: int | None = None
    peak_bytes: int | None = None
    reserved_bytes: int | None = None
    predicted_peak_bytes: int | None = None
    median_seconds: float | None = None
    p20_seconds: float | None = None
    p80_seconds: float | None = None
    host_seconds: float | None = None  # to issue one step
    kernel_seconds: float | None = None  # of all kernels of one step, by the profiler
    small_step_seconds: float | None = None  # of a step with a small batch: host time
    num_packed: int | None = None  # saved tensors that are packed in such a step
    host_us_per_packed: float | None = None
    empty_op_us: float | None = None
    peak_ratio: float | None = None
    time_ratio: float | None = None
    kernel_ratio: float | None = None
    size_ratio: float | None = None
    examples_per_second_ratio: float | None = None
    first_loss: float | None = None
    last_loss: float | None = None
    num_changes: int | None = None
    error: str | None = None


# --- jobs -------------------------------------------------------------------------------------------------------------


def texts(size: int, device: str, *, length: int = 1024, vocabulary: int = 50257) -> Batch:
    """Random tokens, as inputs and as labels."""
    ids = torch.randint(vocabulary, (size, length), device=device)
    return {"input_ids": ids, "labels": ids}


def torchvision_model(name: str) -> nn.Module:
    """A model of torchvision with random weights."""
    import torchvision

    return getattr(torchvision.models, name)()


def gpt2(**changes: int) -> nn.Module:
    """Hugging Face's GPT-2 with its head (124M unless changed): dropout 0.1, attention by torch, no key-value cache."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(use_cache=False, attn_implementation="sdpa", **changes)
    assert config.attn_pdrop == config.resid_pdrop == config.embd_pdrop == 0.1
    return GPT2LMHeadModel(config).train()


def images(size: int, device: str, *, side: int = 64) -> Batch:
    """Pictures, and a class for each pixel."""
    return torch.randn(size, 3, side, side, device=device), torch.randint(3, (size, side, side), device=device)


def graphs(num_thousands: int, device: str, *, num_inputs: int = 64, num_classes: int = 40) -> Batch:
    """A random graph with 1000 edges and 100 nodes for each of `num_thousands`, and a class for each node."""
    num_nodes = 100 * num_thousands
    edges = torch.randint(num_nodes, (2, 1000 * num_thousands), device=device)
    nodes, labels = torch.randn(num_nodes, num_inputs, device=device), torch.randint(num_classes, (num_nodes,), device=device)
    return {"nodes": nodes, "edges": edges, "labels": labels}


def full_jobs() -> tuple[Job, ...]:
    """The jobs of the table, for a GPU."""
    short = lambda size, device: texts(size, device, length=256, vocabulary=16384)  # noqa: E731
    words = lambda size, device: texts(size, device, vocabulary=32000)  # noqa: E731
    last = lambda size, device: pictures(size, device, channels_last=True)  # noqa: E731
    return (
        Job("resnet50", 256, lambda: torchvision_model("resnet50"), last, "sgdm", channels_last=True),
        Job("gpt2", 16, gpt2, texts, "adamw", has_checkpointing=True),
        Job("vit", 128, lambda: torchvision_model("vit_b_16"), pictures, "sgdm"),
        Job("swin", 128, lambda: torchvision_model("swin_t"), pictures, "adamw"),
        Job("llama", 8, llama, words, "adamw", has_checkpointing=True),
        Job("densenet121", 128, lambda: torchvision_model("densenet121"), last, "adamw", channels_last=True),
        Job("scan", 8, ScanLanguageModel, words, "adamw"),
        Job("graph", 600, GraphNetwork, graphs, "adamw"),
        Job("lstm", 64, LstmLanguageModel, short, "adamw"),
        Job("attention_unet", 32, AttentionUNet, images, "adamw"),
    )


def quick_jobs() -> tuple[Job, ...]:
    """The same shapes in small, to see whether all of it runs."""
    last = lambda size, device: pictures(size, device, side=32, num_classes=10, channels_last=True)  # noqa: E731
    small = lambda size, device: pictures(size, device, side=32, num_classes=10)  # noqa: E731
    words = lambda size, device: texts(size, device, length=32, vocabulary=128)  # noqa: E731
    small_llama = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 128}
    scans = lambda size, device: texts(size, device, length=64, vocabulary=128)  # noqa: E731
    tiny = {"n_layer": 2, "n_embd": 64, "n_head": 2, "vocab_size": 128, "n_positions": 32, "bos_token_id": 0, "eos_token_id": 0}
    return (
        Job("resnet50", 8, MODELS["resnet50"], last, "sgdm", channels_last=True),
        Job("gpt2", 4, lambda: gpt2(**tiny), words, "adamw", has_checkpointing=True),
        Job("vit", 8, MODELS["vit"], small, "sgdm"),
        Job("llama", 4, lambda: llama(**small_llama), words, "adamw", has_checkpointing=True),
        Job("scan", 4, lambda: ScanLanguageModel(64, 2, 4, 16, 128), scans, "adamw"),
        Job("graph", 2, lambda: GraphNetwork(64, 2), graphs, "adamw"),
        Job("lstm", 4, lambda: LstmLanguageModel(64, 128), words, "adamw"),
        Job("attention_unet", 2, lambda: AttentionUNet(16), lambda size, device: images(size, device, side=16), "adamw"),
    )


# --- measuring --------------------------------------------------------------------------------------------------------


def measure(job: Job, way: Way, device: str, num_steps: int, *, has_kernels: bool = False) -> Row:
    """A fresh model, warm-up, then `num_steps` steps; then its kernels, or else its host time with a small batch."""
    release(device)
    torch.manual_seed(0)
    model = build(job, device, checkpointing=way.checkpointing)
    batch, optimizer = job.batch(job.size, device), make_optimizer(job.optimizer, model)
    row = Row(job.name, way.name, job.size, way.kind, way.rounding)
    with applied(way, model) as session:
        step = make_step(model, batch, optimizer, device)
        first, *_ = [step() for _ in range(WARM_UP)]
        times = cuda_times(step, num_steps) if device == "cuda" else cpu_times(step, num_steps)
        changes = None if session is None else len(session.changes)
        row = replace(row, first_loss=float(first), num_changes=changes, **times)
        if has_kernels:
            return replace(row, kernel_seconds=kernel_seconds(step))
        small = make_step(model, job.batch(max(2, job.size // SMALL), device), optimizer, device)
        host = small_step_seconds(small, device)
        num_packed = None if session is None else count_packed(session, small)
    return replace(row, small_step_seconds=host, num_packed=num_packed, empty_op_us=empty_op_us(device))


def count_packed(session: Any, step: Callable[[], Tensor]) -> int:
    """The number of saved tensors that a step packs."""
    packed, activations = list[str](), session._activations
    before = activations.on_packed
    activations.on_packed = lambda saved, piece, form: packed.append(saved.name)
    try:
        step()
    finally:
        activations.on_packed = before
    return len(packed)


def small_step_seconds(step: Callable[[], Tensor], device: str, num_steps: int = 10) -> float:
    """Median seconds of a step that ends when the device has finished; the host is slower than the device if the batch is small.

    cuDNN tries no algorithms for these shapes, which would take longer than the steps.
    """
    seconds, was_trying = list[float](), torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = False
    for _ in range(WARM_UP + num_steps):
        begun = time.perf_counter()
        step()
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begun)
    torch.backends.cudnn.benchmark = was_trying
    return statistics.median(seconds[WARM_UP:])


def kernel_seconds(step: Callable[[], Tensor]) -> float:
    """The sum of the times of all kernels and copies of a step, by the profiler: what a fast host would leave of the step's time."""
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        step()
        torch.cuda.synchronize()
    return sum(event.self_device_time_total for event in profiler.key_averages()) / 1e6


def empty_op_us(device: str, num_ops: int = 2000) -> float:
    """Host microseconds to issue an eager operation on one value."""
    x = torch.zeros(1, device=device)
    best = float("inf")
    for _ in range(5):
        if device == "cuda":
            torch.cuda.synchronize()
        begun = time.perf_counter()
        for _ in range(num_ops // 5):
            x.add_(1)
        best = min(best, (time.perf_counter() - begun) / (num_ops // 5))
    return 1e6 * best


def cuda_times(step: Callable[[], Tensor], num_steps: int) -> dict[str, Any]:
    """Seconds between events that lie between the steps, as a loop queues them, and the peak over all of them."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(num_steps + 1)]
    begun = time.perf_counter()
    events[0].record()
    for event in events[1:]:
        loss = step()
        event.record()
    issued = time.perf_counter()
    torch.cuda.synchronize()
    seconds = [a.elapsed_time(b) / 1e3 for a, b in pairwise(events)]
    bytes_used = {"peak_bytes": torch.cuda.max_memory_allocated(), "reserved_bytes": torch.cuda.max_memory_reserved()}
    return {**spread(seconds), **bytes_used, "host_seconds": (issued - begun) / num_steps, "last_loss": float(loss)}


def cpu_times(step: Callable[[], Tensor], num_steps: int) -> dict[str, Any]:
    """Seconds of each step."""
    seconds: list[float] = []
    for _ in range(num_steps):
        begun = time.perf_counter()
        loss = step()
        seconds.append(time.perf_counter() - begun)
    return {**spread(seconds), "last_loss": float(loss)}


def spread(seconds: Sequence[float]) -> dict[str, float]:
    """Median, 20th and 80th percentile."""
    p20, _, _, p80 = statistics.quantiles(seconds, n=5)
    return {"median_seconds": statistics.median(seconds), "p20_seconds": p20, "p80_seconds": p80}


def attempt(job: Job, way: Way, device: str, num_steps: int, *, has_kernels: bool = False) -> Row:
    """`measure`, an error being a row too."""
    try:
        return measure(job, way, device, num_steps, has_kernels=has_kernels)
    except Exception as error:
        return Row(job.name, way.name, job.size, way.kind, way.rounding, error=failure(error))
    finally:
        release(device)


def predictor(job: Job, device: str) -> Callable[[Way], int | None]:
    """From a way to footprint's peak, by one trace of the job; None for what was not traced."""
    try:
        batch = job.batch(job.size, "cpu")
        loss = None if isinstance(batch, Mapping) else cross_entropy
        trace = pare.trace_step(
            build(job, "meta"), batch, loss=loss, optimizer=job.optimizer, device=device, autocast=torch.bfloat16
        )
        return lambda way: None if way.checkpointing else pare.footprint(trace, way.plan()).peak_bytes
    except Exception as error:
        print(f"{job.name} was not traced: {type(error).__name__}: {error}"[:600], flush=True)
        return lambda way: None


def predicted(predict: Callable[[Way], int | None], way: Way) -> int | None:
    """The prediction, if it can be made."""
    try:
        return predict(way)
    except Exception as error:
        print(f"{way.name} was not predicted: {type(error).__name__}: {error}"[:600], flush=True)
        return None


def compared(row: Row, plain: Row) -> Row:
    """`row` with its ratios to the baseline."""
    if row.error or plain.error or row.median_seconds is None or plain.median_seconds is None:
        return row
    slower = row.median_seconds / plain.median_seconds
    larger = row.size / plain.size
    peak = row.peak_bytes / plain.peak_bytes if row.peak_bytes and plain.peak_bytes else None
    if row.num_packed and row.small_step_seconds is not None and plain.small_step_seconds is not None:
        row = replace(row, host_us_per_packed=1e6 * (row.small_step_seconds - plain.small_step_seconds) / row.num_packed)
    if row.kernel_seconds and plain.kernel_seconds:
        row = replace(row, kernel_ratio=row.kernel_seconds / plain.kernel_seconds)
    return replace(row, peak_ratio=peak, time_ratio=slower, size_ratio=larger, examples_per_second_ratio=larger / slower)


def rows_of(job: Job, ways: Sequence[Way], device: str, num_steps: int, *, has_kernels: bool = False) -> Iterator[Row]:
    """The baseline of a job, and then each of its variants with ratios to it."""
    predict = predictor(job, device)
    plain = None
    for way in ways:
        if way.checkpointing and not job.has_checkpointing:
            continue
        row = attempt(job, way, device, num_steps, has_kernels=has_kernels)
        plain = plain or row
        yield replace(compared(row, plain), predicted_peak_bytes=predicted(predict, way))


# --- the largest batch ------------------------------------------------------------------------------------------------


def largest(fits: Callable[[int], bool], guess: int) -> int:
    """The largest multiple of GRAIN that fits, looked for around `guess`; 0 if none does."""
    size = max(guess // GRAIN, 1) * GRAIN
    low, high, stride = 0, None, GRAIN
    while high is None or high - low > GRAIN:
        if fits(size):
            low = size
        else:
            high = size
        if high is None:
            size = low + stride
        elif low == 0:
            size = max(high - stride, GRAIN)
        else:
            size = (low + high) // 2 // GRAIN * GRAIN
        stride *= 2
    return low


def fits_in_limit(job: Job, way: Way, size: int) -> bool:
    """Whether a few steps pass, and the allocator never gave memory back to ask again, which takes long; other errors are raised."""
    before = torch.cuda.memory_stats().get("num_alloc_retries", 0)
    row = attempt(replace(job, size=size), way, "cuda", 2)
    if row.error and not any(text.lower() in row.error.lower() for text in OUT_OF_MEMORY):
        raise RuntimeError(row.error)
    retries = torch.cuda.memory_stats().get("num_alloc_retries", 0) - before
    print(f"  {job.name} {way.name}: {size} {'does not fit' if row.error else f'fits, {retries} retries'}", flush=True)
    return row.error is None and retries == 0


def guessed_size(job: Job, way: Way) -> int:
    """Where the peak would meet the limit, from two small batches."""
    small, large = (measure(replace(job, size=size), way, "cuda", 2).peak_bytes or 0 for size in (64, 128))
    per_example = (large - small) / 64
    return int(0.97 * (LIMIT_BYTES - small + 64 * per_example) / per_example)


def largest_row(job: Job, way: Way, num_steps: int) -> Row:
    """The largest batch of `way` under the limit, and its speed there."""
    torch.cuda.set_per_process_memory_fraction(LIMIT_BYTES / torch.cuda.get_device_properties(0).total_memory)
    try:
        size = largest(lambda size: fits_in_limit(job, way, size), guessed_size(job, way))
        row = attempt(replace(job, size=size), way, "cuda", num_steps)
        while row.error and size > GRAIN:  # more steps may scatter the memory more
            size -= GRAIN
            row = attempt(replace(job, size=size), way, "cuda", num_steps)
    except Exception as error:
        row = Row(job.name, way.name, 0, way.kind, way.rounding, error=failure(error))
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        release("cuda")
    return replace(row, job=f"{job.name}, largest batch", limit_bytes=LIMIT_BYTES)


def largest_rows(job: Job, num_steps: int) -> Iterator[Row]:
    """The largest batch of the baseline, and that with 4 bits."""
    plain = None
    for way in LARGEST_WAYS:
        row = largest_row(job, way, num_steps)
        plain = plain or row
        yield compared(row, plain)


# --- the table --------------------------------------------------------------------------------------------------------


def times(ratio: float | None) -> str:
    """A ratio for a table."""
    return "     -" if ratio is None else f"{ratio:5.3f}x"


def line(row: Row) -> str:
    """One line of the table."""
    head = f"{row.job:24s} {row.size:5d} {row.way:20s} {row.kind or '':10s}"
    if row.error:
        return f"{head} {row.error}"
    milliseconds = " ".join(
        f"{1e3 * (s or 0):8.2f}" for s in (row.median_seconds, row.p20_seconds, row.p80_seconds, row.host_seconds)
    )
    more = f"  {times(row.size_ratio)} examples, {times(row.examples_per_second_ratio)} as fast" if row.limit_bytes else ""
    changes = "" if row.num_changes is None else f" changes {row.num_changes}"
    kernels = "" if row.kernel_seconds is None else f" kernels {1e3 * row.kernel_seconds:.2f} {times(row.kernel_ratio)}"
    host = "" if row.host_us_per_packed is None else f" host {row.host_us_per_packed:.1f} us x {row.num_packed} packed"
    host += "" if row.empty_op_us is None else f", empty op {row.empty_op_us:.1f} us"
    return (
        f"{head} {gib(row.peak_bytes)} {times(row.peak_ratio)} {gib(row.predicted_peak_bytes)} {milliseconds} {times(row.time_ratio)}"
        f"{kernels}  loss {row.first_loss:.3f} to {row.last_loss:.3f}{changes}{host}{more}"
    )


def main() -> None:
    """Measure all of it, print the table and append the rows."""
    parser = common_options(__doc__)
    parser.add_argument(
        "--plan", nargs="+", default=[""], help="only variants whose name contains one of these; the baseline always runs"
    )
    parser.add_argument("--steps", type=int, default=12, help="timed steps of each way")
    parser.add_argument("--kernels", action="store_true", help="seconds of kernels on a GPU instead of the host's")
    options = parser.parse_args()
    if options.quick and options.kernels:
        parser.error("--kernels needs a GPU, and --quick runs on the CPU: leave one of them out")
    device = "cpu" if options.quick else "cuda"
    torch.backends.cudnn.benchmark = True
    ways = chosen(WAYS, options.plan)
    log = Log("session.json", device, options)
    print(
        "job, examples, way; peak GiB, ratio, predicted GiB; step ms: median, p20, p80, host; ratio; kernels ms, ratio", flush=True
    )
    jobs = quick_jobs() if options.quick else full_jobs()
    asked = [job for job in jobs if not options.model or job.name in options.model]
    found = [rows_of(job, ways, device, options.steps, has_kernels=options.kernels) for job in asked]
    if device == "cuda" and (not options.model or "largest" in options.model):
        found.append(largest_rows(jobs[0], options.steps))
    for rows in found:
        for row in rows:
            log.add(row)
            print(line(row), flush=True)


if __name__ == "__main__":
    main()
