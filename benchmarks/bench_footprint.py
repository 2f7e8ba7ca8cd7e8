"""footprint's prediction beside what a step really takes: peak and bytes by role, and rows in results/footprint.json.

    python benchmarks/bench_footprint.py                     # one GPU
    python benchmarks/bench_footprint.py --model gpt lstm    # some of it
    python benchmarks/bench_footprint.py --quick             # small models on the CPU, bytes by role alone

Networks are those of paredown.models, in two batch sizes, the baseline and three plans, with bf16 autocast and fused optimizers. The
measured peak is torch.cuda.max_memory_allocated over steps in steady state (optimizer state is there, gradients start as None), and
nothing is taken off it. Bytes by role are storages that live at the end of the forward pass, each counted once; gradients those after
backward. For the baseline, saved tensors are counted by hooks that change nothing; under a plan the session reports packed bytes, and what
autograd's graph still holds plainly is added. Autocast's copies of weights are found by their values; they and the model's output, which
the loop holds, are temporary.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from loops import (
    BASELINE,
    Batch,
    Job,
    Log,
    Way,
    applied,
    build,
    common_options,
    failure,
    forward,
    gib,
    make_optimizer,
    make_step,
    pictures,
    release,
)
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.functional import cross_entropy

import paredown as pare
from paredown.models import MODELS, random_batch
from paredown.models.resnet import resnet18, resnet50
from paredown.models.small_networks import ConvNeXt, UNet
from paredown.models.transformer import GPT, GPTConfig, LSTMModel, ViT

WAYS = (BASELINE, *(Way(text, text) for text in ("int8/64@bf16", "uint4/64@bf16+bf16", "uint2/64@bf16+bf16")))
TEMPORARY = "temporary"  # the role that a trace gives to copies of weights that backward needs, and to the output
ROLES = ("weight", TEMPORARY, "buffer", "input", "moment1", "moment2", "gradient", "activation")
MOMENTS = {"momentum_buffer": "moment1", "exp_avg": "moment1", "exp_avg_sq": "moment2"}
WARM_UP = 3


@dataclass(frozen=True)
class Row:
    """One way of one job in one size."""

    job: str
    way: str
    size: int
    predicted_peak_bytes: int | None = None
    measured_peak_bytes: int | None = None
    peak_ratio: float | None = None
    predicted: dict[str, int] = field(default_factory=dict)  # role -> bytes
    measured: dict[str, int] = field(default_factory=dict)
    before_bytes: int | None = None  # allocated before the model was made
    forward_bytes: int | None = None  # allocated by one forward pass and still so at its end
    trace_seconds: float | None = None
    num_changes: int | None = None
    error: str | None = None


# --- jobs -------------------------------------------------------------------------------------------------------------


def tokens(size: int, device: str, *, length: int, vocabulary: int) -> Batch:
    """Random tokens and targets, as keywords."""
    draw = partial(torch.randint, vocabulary, (size, length), device=device)
    return {"ids": draw(), "targets": draw()}


def pixels(size: int, device: str, *, side: int) -> Batch:
    """Noise, and one of two classes for each pixel."""
    x, _ = pictures(size, device, side=side, channels_last=True)
    return x, torch.randint(2, (size, side, side), device=device)


def full_jobs() -> Iterator[tuple[Job, tuple[int, int]]]:
    """Each job with its two sizes, for a GPU."""
    last = partial(pictures, channels_last=True)
    yield Job("resnet18", 0, resnet18, last, "sgdm", channels_last=True), (64, 256)
    yield Job("resnet50", 0, resnet50, last, "sgdm", channels_last=True), (32, 128)
    yield Job("vit", 0, ViT, pictures, "adamw"), (32, 128)
    yield Job("gpt", 0, lambda: GPT(GPTConfig(dropout=0.1)), partial(tokens, length=1024, vocabulary=50257), "adamw"), (4, 16)
    yield Job("lstm", 0, LSTMModel, partial(tokens, length=256, vocabulary=10_000), "adamw"), (32, 128)
    yield Job("unet", 0, UNet, partial(pixels, side=256), "sgdm", channels_last=True), (4, 16)
    yield Job("convnext", 0, ConvNeXt, pictures, "adamw"), (32, 128)


def quick_jobs() -> Iterator[tuple[Job, tuple[int, int]]]:
    """The small ones of MODELS."""
    for name, constructor in MODELS.items():
        yield Job(name, 0, constructor, partial(small_batch, name), "adamw" if name in ("gpt", "lstm", "vit") else "sgdm"), (8, 16)


def small_batch(name: str, size: int, device: str) -> Batch:
    """What a small model takes, tokens as keywords."""
    x, target = (t.to(device) for t in random_batch(name, size))
    return {"ids": x, "targets": target} if name in ("gpt", "lstm") else (x, target)


# --- the oracle -------------------------------------------------------------------------------------------------------


@contextmanager
def counted(saved: list[Tensor]) -> Iterator[None]:
    """Hooks that change nothing: all tensors that autograd saves meanwhile are put into `saved`."""

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        yield


def held_plainly(loss: Tensor) -> Iterator[Tensor]:
    """The saved tensors behind `loss` that nobody's hooks replaced."""
    waiting, seen = [loss.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        waiting += [before for before, _ in node.next_functions]
        for name in (name for name in dir(node) if name.startswith("_raw_saved_")):
            raws = getattr(node, name)
            if all(raw.unpack_hook is None for raw in (raws if isinstance(raws, tuple | list) else (raws,))):
                value = getattr(node, "saved_tensors" if name == "_raw_saved_tensors" else name.removeprefix("_raw"))
                yield from (t for t in (value if isinstance(value, tuple | list) else (value,)) if isinstance(t, Tensor))


def sorted_bytes(saved: Iterable[Tensor], model: nn.Module, batch: Batch) -> dict[str, int]:
    """Bytes of activations and of copies of weights; what the model or the caller owns is neither."""
    owned = {storage_key(t) for t in (*model.parameters(), *model.buffers(), *tensors_of(batch))}
    found = [t for t in saved if storage_key(t) not in owned]
    copied = storage_bytes(t for t in {storage_key(t): t for t in found}.values() if is_weight_copy(t, model))
    return {"activation": storage_bytes(found) - copied, TEMPORARY: copied}


def storage_key(tensor: Tensor) -> int:
    """What tensors share that share memory."""
    return tensor.untyped_storage()._cdata


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the storages behind `tensors`, each once."""
    return sum({storage_key(t): t.untyped_storage().nbytes() for t in tensors}.values())


def tensors_of(batch: Batch) -> Sequence[Tensor]:
    """The tensors of a batch."""
    return tuple(batch.values()) if isinstance(batch, Mapping) else batch


def is_weight_copy(tensor: Tensor, model: nn.Module) -> bool:
    """Whether the memory behind `tensor` holds a parameter's values, in the order of the parameter's memory and another dtype."""
    if tensor.dtype is not torch.bfloat16:
        return False
    flat = in_memory_order(tensor)
    alike = (p for p in model.parameters() if p.numel() == flat.numel() and p.dtype is torch.float32)
    return any(torch.equal(in_memory_order(p.detach()).bfloat16(), flat) for p in alike)


def in_memory_order(tensor: Tensor) -> Tensor:
    """All of the tensor's storage, flat."""
    return torch.as_strided(tensor.detach(), (tensor.untyped_storage().nbytes() // tensor.itemsize,), (1,), 0)


def state_bytes(optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Bytes of each moment."""
    found = {"moment1": 0, "moment2": 0}
    for state in optimizer.state.values():
        for key, value in state.items():
            if key in MOMENTS:
                found[MOMENTS[key]] += storage_bytes([value])
    return found


# --- measuring --------------------------------------------------------------------------------------------------------


def measure(job: Job, way: Way, device: str) -> Row:
    """A fresh model: steps to the steady state, the peak over two more, and then one by role."""
    clear(device)
    before = allocated(device)
    torch.manual_seed(0)
    model = build(job, device)
    batch, optimizer = job.batch(job.size, device), make_optimizer(job.optimizer, model)
    with applied(way, model) as session:
        step = make_step(model, batch, optimizer, device)
        peak = peak_of(step, device)
        row = by_role(model, batch, session, device)
        changes = None if session is None else len(session.changes)
    owned = {"weight": storage_bytes(model.parameters()), "buffer": storage_bytes(model.buffers())}
    measured = {**owned, "input": storage_bytes(tensors_of(batch)), **state_bytes(optimizer), **row.measured}
    return replace(
        row,
        job=job.name,
        way=way.name,
        size=job.size,
        measured_peak_bytes=peak,
        measured=measured,
        before_bytes=before,
        num_changes=changes,
    )


def peak_of(step: Callable[[], Tensor], device: str) -> int | None:
    """max_memory_allocated over two steps after warm-up."""
    for _ in range(WARM_UP):
        step()
    if device != "cuda":
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(2):
        step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()


def by_role(model: nn.Module, batch: Batch, session: Any, device: str) -> Row:
    """Bytes of activations at the end of one forward pass, and of gradients after its backward."""
    before, saved = allocated(device), list[Tensor]()
    with torch.autocast(device, torch.bfloat16), counted(saved) if session is None else nullcontext():
        loss, output = forward(model, batch)
    taken = None if before is None else (allocated(device) or 0) - before
    plain = saved if session is None else list(held_plainly(loss))
    measured = sorted_bytes(plain, model, batch)
    if output is not None and storage_key(output) not in map(storage_key, plain):
        measured[TEMPORARY] += storage_bytes([output])
    measured["activation"] += 0 if session is None else session.stored_bytes
    saved.clear()
    loss.backward()
    measured["gradient"] = storage_bytes(p.grad for p in model.parameters() if p.grad is not None)
    return Row("", "", 0, measured=measured, forward_bytes=taken)


def allocated(device: str) -> int | None:
    """Bytes allocated on a GPU."""
    return torch.cuda.memory_allocated() if device == "cuda" else None


def clear(device: str) -> None:
    """Give back what the last case left, cuBLAS's workspaces too."""
    if device == "cuda":
        torch._C._cuda_clearCublasWorkspaces()
    release(device)


class Predictor:
    """footprint of each way, by one trace of the job."""

    def __init__(self, job: Job, device: str) -> None:
        self.error, self.seconds, begun = None, 0.0, time.perf_counter()
        batch = job.batch(job.size, "cpu")
        loss = None if isinstance(batch, Mapping) else cross_entropy
        about = {"optimizer": job.optimizer, "device": device, "autocast": torch.bfloat16}
        try:
            self.trace = pare.trace_step(build(job, "meta"), batch, loss=loss, **about)
        except Exception as error:
            self.error = f"trace: {failure(error)}"
        self.seconds = time.perf_counter() - begun

    def add(self, row: Row, way: Way) -> Row:
        """`row` with what footprint says of it."""
        if self.error:
            return replace(row, error=row.error or self.error)
        try:
            foot = pare.footprint(self.trace, way.plan())
        except Exception as error:
            return replace(row, error=row.error or f"footprint: {failure(error)}")
        ratio = foot.peak_bytes / row.measured_peak_bytes if row.measured_peak_bytes else None
        roles = {getattr(role, "value", role): int(count) for role, count in foot.by_role.items()}
        return replace(
            row, predicted_peak_bytes=int(foot.peak_bytes), peak_ratio=ratio, predicted=roles, trace_seconds=self.seconds
        )


def attempt(job: Job, way: Way, device: str) -> Row:
    """`measure`, an error being a row too."""
    try:
        return measure(job, way, device)
    except Exception as error:
        return Row(job.name, way.name, job.size, error=failure(error))
    finally:
        clear(device)


# --- the table --------------------------------------------------------------------------------------------------------


def line(row: Row) -> str:
    """Predicted, measured, ratio: the peak in GiB, and roles in MiB where there are any bytes."""
    head = f"{row.job:9s} {row.size:4d} {row.way:19s}"
    ratio = "     -" if row.peak_ratio is None else f"{row.peak_ratio:6.3f}"
    roles = "  ".join(role_text(role, row) for role in ROLES if row.predicted.get(role) or row.measured.get(role))
    forward = "" if row.forward_bytes is None else f"  forward {row.forward_bytes / 2**20:.1f}"
    error = f"  {row.error}" if row.error else ""
    return f"{head} peak {gib(row.predicted_peak_bytes)} {gib(row.measured_peak_bytes)} {ratio}  | {roles}{forward}{error}"


def role_text(role: str, row: Row) -> str:
    """One role: predicted / measured = ratio."""
    predicted, measured = row.predicted.get(role), row.measured.get(role)
    texts = ["-" if count is None else f"{count / 2**20:.1f}" for count in (predicted, measured)]
    ratio = f" = {predicted / measured:.3f}" if predicted and measured else ""
    return f"{role} {texts[0]}/{texts[1]}{ratio}"


def main() -> None:
    """Predict and measure all of it, print the table and append the rows."""
    parser = common_options(__doc__)
    parser.add_argument("--cudnn-benchmark", action="store_true", help="let cuDNN try its algorithms")
    options = parser.parse_args()
    device = "cpu" if options.quick else "cuda"
    torch.backends.cudnn.benchmark = options.cudnn_benchmark
    log, begun = Log("footprint.json", device, options), time.perf_counter()
    for job, sizes in quick_jobs() if options.quick else full_jobs():
        if options.model and job.name not in options.model:
            continue
        for sized in (replace(job, size=size) for size in sizes):
            predictor = Predictor(sized, device)
            for way in WAYS:
                row = predictor.add(attempt(sized, way, device), way)
                log.add(row)
                print(line(row), flush=True)
    print(f"{time.perf_counter() - begun:.0f} s", flush=True)


if __name__ == "__main__":
    main()
