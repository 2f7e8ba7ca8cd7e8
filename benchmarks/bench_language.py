"""Language models beside other libraries; rows in results/language.json.

    PYTHONPATH=src python benchmarks/bench_language.py loss              # one GPU; Liger from the folder peers/, if it is there
    PYTHONPATH=src python benchmarks/bench_language.py loss --quick      # tiny shapes on the CPU: whether it runs, no figures

`loss`: forward and backward of a linear layer and cross entropy, 16,384 tokens x 128,256 classes x 4096 values in bfloat16. Peak: the most
allocated during one call, without the hidden states, the weight and the target, which exist before it; the gradients of both are included.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from measure import append, machine, time_call
from torch import Tensor, nn
from torch.nn import functional

from paredown.loss import ChunkSettings, chunked_cross_entropy, chunked_loss
from paredown.sizes import say_bytes

PEERS = Path(__file__).parent.parent / "peers"
PACKAGES = ("torch", "triton", "liger-kernel")


@dataclass(frozen=True)
class Row:
    """One way to compute a loss; `peak_bytes` is None on a CPU."""

    job: str
    way: str
    shape: tuple[int, int, int]  # tokens, classes, hidden size
    peak_bytes: int | None
    median_seconds: float
    p20_seconds: float
    p80_seconds: float
    loss: float


class Head(nn.Module):
    """An output head alone, in a module of its own."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.head = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
        self.head.weight = weight

    def forward(self, hidden: Tensor) -> Tensor:
        """The logits."""
        return self.head(hidden)


Loss = Callable[[Tensor, nn.Parameter, Tensor], Tensor]


def plain(hidden: Tensor, weight: nn.Parameter, target: Tensor) -> Tensor:
    """torch's cross entropy of all logits, in float32 as Hugging Face's models."""
    return functional.cross_entropy(functional.linear(hidden, weight).float(), target)


def chunked(hidden: Tensor, weight: nn.Parameter, target: Tensor) -> Tensor:
    """Our function alone."""
    return chunked_cross_entropy(hidden, weight, target, settings=ChunkSettings(loss_dtype=torch.float32))


def deferred(hidden: Tensor, weight: nn.Parameter, target: Tensor) -> Tensor:
    """The same code, with deferred logits."""
    model = Head(weight)
    with chunked_loss(model):
        return functional.cross_entropy(model(hidden).float(), target)


def liger(hidden: Tensor, weight: nn.Parameter, target: Tensor) -> Tensor:
    """Liger's fused linear cross entropy."""
    function: Any = import_module("liger_kernel.ops.fused_linear_cross_entropy").LigerFusedLinearCrossEntropyFunction
    result = function.apply(hidden, weight, target)
    return result[0] if isinstance(result, tuple) else result


def losses() -> Iterator[tuple[str, Loss]]:
    """(name, function) of each way that can be imported."""
    yield "torch", plain
    yield "paredown", chunked
    yield "paredown, deferred logits", deferred
    try:
        import_module("liger_kernel.ops.fused_linear_cross_entropy")
    except ImportError as error:
        print(f"Liger is left out: {error}", file=sys.stderr)
    else:
        yield "Liger", liger


class LossStep:
    """Forward and backward of one loss on the same tensors."""

    def __init__(self, shape: tuple[int, int, int], device: str) -> None:
        num_tokens, num_classes, size = shape
        generator = torch.Generator(device).manual_seed(0)
        options: Any = {"device": device, "dtype": torch.bfloat16, "generator": generator}
        self.hidden = torch.randn(num_tokens, size, **options).requires_grad_()
        self.weight = nn.Parameter(torch.randn(num_classes, size, **options).mul_(size**-0.5))
        self.target = torch.randint(num_classes, (num_tokens,), device=device, generator=generator)

    def __call__(self, function: Loss) -> Tensor:
        """The loss; the gradients are freed."""
        value = function(self.hidden, self.weight, self.target)
        value.backward()
        self.hidden.grad = self.weight.grad = None
        return value.detach()

    def peak_bytes(self, function: Loss) -> int:
        """The most bytes that are allocated during a step beside its inputs."""
        self(function)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        self(function)
        return torch.cuda.max_memory_allocated() - before


def loss(device: str, *, is_quick: bool) -> Iterator[Row]:
    """Peak and time of one forward and backward, each way."""
    shape = (64, 8192, 16) if is_quick else (16_384, 128_256, 4096)
    step = LossStep(shape, device)
    for name, function in losses():
        value = float(step(function))
        peak = step.peak_bytes(function) if device == "cuda" else None
        times = time_call(partial(step, function), device, repeats=2 if is_quick else 5, calls=2)
        yield Row("loss", name, shape, peak, *times, value)


JOBS = {"loss": loss}


def print_rows(rows: list[Row]) -> None:
    """One line for each row."""
    for row in rows:
        peak = say_bytes(row.peak_bytes) if row.peak_bytes is not None else "-"
        times = f"{1e3 * row.median_seconds:.1f} ms ({1e3 * row.p20_seconds:.1f} to {1e3 * row.p80_seconds:.1f})"
        print(f"{row.job}  {row.way:<26}  peak {peak:>10}  {times}  loss {row.loss:.4f}")


def main() -> None:
    """Run the jobs, print a table, and append rows unless the run is quick."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("job", nargs="*", default=list(JOBS), choices=list(JOBS))
    parser.add_argument("--quick", action="store_true", help="tiny shapes on the CPU; nothing is stored")
    parser.add_argument("--commit", help="of the code, if git is not there")
    chosen = parser.parse_args()
    sys.path.insert(0, str(PEERS))
    device = "cpu" if chosen.quick else "cuda"
    rows = [row for job in chosen.job for row in JOBS[job](device, is_quick=chosen.quick)]
    print_rows(rows)
    if not chosen.quick:
        append("language.json", machine(device, PACKAGES, chosen.commit), rows)


if __name__ == "__main__":
    main()
