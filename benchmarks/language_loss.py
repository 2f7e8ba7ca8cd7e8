"""The job `loss` of bench_language.py: a linear layer and cross entropy alone, ours, Liger's, TRL's and torch's.

Forward and backward of 16,384 tokens x 128,256 classes x 4096 values in bfloat16; on a CPU, for rows that --only names, 2048 x 32,768 x 512
in float32. Peak: the most allocated during one call, without the hidden states, the weight and the target, which exist before it; the
gradients of both are included. TRL's function is in one file, `trl/kernels/chunked_logprob.py`, which is read from the folder peers/ as
`trl_chunked_logprob.py` if it is there. `torch-linear` is F.linear_cross_entropy of torch 2.13 with options, which compute in chunks.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from measure import time_call
from torch import Tensor, nn
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile

from paredown.loss import ChunkSettings, chunked_cross_entropy, chunked_loss

SHAPE, CPU_SHAPE, QUICK_SHAPE = (16_384, 128_256, 4096), (2048, 32_768, 512), (64, 8192, 16)  # tokens, classes, hidden size
TRL_FILE = Path(__file__).parent.parent / "peers" / "trl_chunked_logprob.py"
TRL_TILE = 32_768  # classes, as in TRL's trainers
LINEAR = "linear_cross_entropy"
Loss = Callable[[Tensor, nn.Parameter, Tensor], Tensor]


class Head(nn.Module):
    """An output head alone, in a module of its own."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.head = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
        self.head.weight = weight

    def forward(self, hidden: Tensor) -> Tensor:
        """The logits."""
        return self.head(hidden)


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


@cache
def trl_function() -> Any:
    """TRL's autograd function."""
    if not TRL_FILE.exists():
        return import_module("trl.kernels").ChunkedLogProbFunction
    spec = importlib.util.spec_from_file_location("trl_alone.kernels.chunked_logprob", TRL_FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    for name in ("trl_alone", "trl_alone.trainer", "trl_alone.trainer.utils"):
        sys.modules[name] = ModuleType(name)
    # backward imports it; for a weight that is not sharded it does nothing
    sys.modules["trl_alone.trainer.utils"].maybe_gather_lm_head_ctx = lambda *weights: nullcontext()  # type: ignore[attr-defined]
    spec.loader.exec_module(module)
    return module.ChunkedLogProbFunction


def trl(hidden: Tensor, weight: nn.Parameter, target: Tensor) -> Tensor:
    """The loss of TRL's trainers, without entropy and accuracy."""
    return -trl_function().apply(hidden, weight, None, target, 1.0, TRL_TILE, None, 1.0, ())[0].mean()


def torch_linear(hidden: Tensor, weight: nn.Parameter, target: Tensor) -> Tensor:
    """torch's function of linear layer and loss, in chunks."""
    options: Any = getattr(nn, "LinearCrossEntropyOptions")()  # noqa: B009  torch 2.11 has neither
    return getattr(functional, LINEAR)(hidden, weight, target, options=options)


LOSSES: dict[str, Loss] = {
    "torch": plain, "torch-linear": torch_linear, "paredown": chunked, "paredown-deferred": deferred, "liger": liger, "trl": trl,
}  # fmt: skip


def missing(way: str, device: str) -> str | None:
    """Why a loss cannot be measured here."""
    if way == "liger" and device == "cpu":
        return "Liger's kernels need a GPU"
    if way == "torch-linear" and not hasattr(functional, LINEAR):
        return f"torch {torch.__version__} has no {LINEAR}"
    return None


class LossStep:
    """Forward and backward of one loss on the same tensors."""

    def __init__(self, shape: tuple[int, int, int], device: str, dtype: torch.dtype) -> None:
        num_tokens, num_classes, size = shape
        generator = torch.Generator(device).manual_seed(0)
        options: Any = {"device": device, "dtype": dtype, "generator": generator}
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
        if self.hidden.device.type == "cpu":
            return cpu_peak_bytes(partial(self, function))
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        self(function)
        return torch.cuda.max_memory_allocated() - before


def cpu_peak_bytes(call: Callable[[], object]) -> int:
    """The most bytes that `call` had allocated at one time, by torch's profiler."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        call()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(file))
        events = [event for event in json.loads(file.read_text())["traceEvents"] if event.get("name") == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda event: event["ts"]):
        held += event["args"]["Bytes"]
        peak = max(peak, held)
    return peak


def loss_fields(way: str, device: str, ready: Callable[[], None], *, is_quick: bool, is_named: bool) -> dict[str, Any]:
    """Peak and time of one forward and backward; rows on a CPU that are not named have a tiny shape, and no peak."""
    shape = SHAPE if device == "cuda" else CPU_SHAPE if is_named else QUICK_SHAPE
    function, step = LOSSES[way], LossStep(shape, device, torch.bfloat16 if device == "cuda" else torch.float32)
    value = float(step(function))
    ready()
    peak = step.peak_bytes(function) if shape is not QUICK_SHAPE else None
    times = time_call(partial(step, function), device, repeats=2 if is_quick and not is_named else 5, calls=2)
    names = ("median_seconds", "p20_seconds", "p80_seconds")
    return {"shape": list(shape), "peak_bytes": peak, "first_loss": value, **dict(zip(names, times, strict=True))}
