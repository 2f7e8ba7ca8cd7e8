"""The chunked loss on a GPU: values against float64, the allocated peak, and the predicted peak."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from paredown import Plan, apply, footprint, trace_step
from paredown.loss import ChunkSettings, CrossEntropy, chunked_cross_entropy, chunked_loss
from paredown.loss.chunked_cross_entropy import CHUNK_BYTES, KERNEL_DEVICES
from paredown.loss.loss_operator import OperatorSettings
from paredown.loss.loss_operator import chunked_loss as loss_operator
from tests.loss.test_chunked_sessions import Layers, head_rows
from tests.loss.test_compiled_loss import WithLoss

pytestmark = pytest.mark.gpu
NUM_ROWS, NUM_CLASSES, SIZE = 4096, 32_000, 512


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("num_classes", [8192, 8193])
@pytest.mark.parametrize("has_kernel", [False, True], ids=["torch", "kernel"])
def test_values(has_kernel: bool, num_classes: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(KERNEL_DEVICES, "cuda", has_kernel)
    generator = torch.Generator("cuda").manual_seed(0)
    hidden, weight = (
        torch.randn(size, 64, device="cuda", generator=generator).div(4).to(dtype).requires_grad_() for size in (300, num_classes)
    )
    target = torch.randint(num_classes, (300,), device="cuda", generator=generator)
    target[::7] = -100
    exact = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    options: Any = {"label_smoothing": 0.1, "reduction": "sum"}
    expected = functional.cross_entropy(exact[0] @ exact[1].t(), target, **options)
    expected.backward()
    settings = ChunkSettings(num_rows=128, loss_dtype=torch.float32)
    loss = chunked_cross_entropy(hidden, weight, target, options=CrossEntropy(**options), settings=settings)
    loss.backward()
    pairs = [(loss, expected), (hidden.grad, exact[0].grad), (weight.grad, exact[1].grad)]
    for found, other in pairs:
        assert isinstance(found, Tensor) and isinstance(other, Tensor)
        assert (found.double() - other).norm() <= max(8 * torch.finfo(dtype).eps, 2e-3) * other.norm()  # TF32 may be on: 10 bits


def test_allocated_and_predicted_peaks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(KERNEL_DEVICES, "cuda", True)
    monkeypatch.setitem(CHUNK_BYTES, "cuda", 512 * NUM_CLASSES * 2)
    model = nn.Sequential(nn.Identity(), nn.Linear(SIZE, NUM_CLASSES, bias=False)).cuda().bfloat16()
    hidden = torch.randn(NUM_ROWS, SIZE, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    target = torch.randint(NUM_CLASSES, (NUM_ROWS,), device="cuda")

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(logits.float(), labels)

    with chunked_loss(model):
        for _ in range(2):
            model.zero_grad()
            hidden.grad = None
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            loss(model(hidden), target).backward()
    peak = torch.cuda.max_memory_allocated() - before
    gradients = (NUM_CLASSES + NUM_ROWS) * SIZE * 2
    chunk = 512 * NUM_CLASSES * 2
    assert gradients + chunk <= peak <= 1.1 * (gradients + chunk)
    with chunked_loss(model, traced_device="cuda"):
        trace = trace_step(model, (hidden, target), loss=loss, device="cuda")
    predicted, existing = footprint(trace), (NUM_CLASSES + NUM_ROWS) * SIZE * 2 + NUM_ROWS * 8
    assert predicted.peak_bytes - predicted.workspace_bytes - existing == pytest.approx(peak, rel=0.05)


# --- compiled sessions ----------------------------------------------------------------------------------------------------------------

BATCH, LENGTH = 8, 512  # NUM_ROWS tokens
ALL_LOGITS = NUM_ROWS * NUM_CLASSES * 2


def token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


def step_peak(model: nn.Module, run: Any, *batch: Tensor) -> tuple[list[Tensor], int]:
    """Loss and gradients of a step in bf16 autocast, and its peak in bytes, from the third step on."""
    for _ in range(3):
        model.zero_grad()
        torch.cuda.reset_peak_memory_stats()
        with torch.autocast("cuda", torch.bfloat16):
            loss = run(*batch)
        loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)], torch.cuda.max_memory_allocated()


@pytest.mark.parametrize("has_kernel", [False, True], ids=["torch", "kernel"])
@pytest.mark.parametrize("is_inside", [True, False], ids=["inside", "outside"])
def test_compiled_sessions(is_inside: bool, has_kernel: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(KERNEL_DEVICES, "cuda", has_kernel)
    monkeypatch.setitem(CHUNK_BYTES, "cuda", 256 * NUM_CLASSES * 2)
    torch.compiler.reset()
    gc.collect()
    existing = torch.cuda.memory_allocated()  # of other tests
    ids = torch.randint(NUM_CLASSES, (BATCH, LENGTH), device="cuda")
    model = Layers(NUM_CLASSES, SIZE).cuda()
    nn.init.normal_(model.embedding.weight, std=0.05)
    expected, plain_peak = step_peak(model, lambda x, y: token_loss(model(x), y), ids, ids)
    expected = [t.cpu() for t in expected]
    traced: nn.Module = WithLoss(model, token_loss) if is_inside else model
    plan = Plan.uniform(activation="int8/64@bf16")
    with apply(plan, traced, chunked_loss=True) as session:
        compiled = session.compile()
        run = compiled if is_inside else lambda x, y: token_loss(compiled(x), y)
        found, peak = step_peak(model, run, ids, ids)
        assert not head_rows(session) and session._head.use.num_losses > 0
    for mine, other in zip(found, expected, strict=True):
        assert (mine.cpu().double() - other.double()).norm() <= 0.05 * other.double().norm()  # bf16, and int8 activations
    assert peak < plain_peak - ALL_LOGITS
    options: Any = {"loss": None if is_inside else token_loss, "device": "cuda", "autocast": torch.bfloat16, "compiled": True}
    trace = trace_step(traced, (ids, ids), **options, chunked_loss=True)
    predicted = footprint(trace, plan)
    assert predicted.low_bytes * 0.85 <= peak  # `existing` memory may have been freed since
    assert peak - existing <= 1.1 * predicted.high_bytes + 2**25


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype feature")
@pytest.mark.parametrize("has_kernel", [False, True], ids=["torch", "kernel"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_the_operator_does_not_synchronize(reduction: str, has_kernel: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(KERNEL_DEVICES, "cuda", has_kernel)
    hidden, weight = (torch.randn(size, 64, device="cuda", requires_grad=True) for size in (512, 8192))
    target = torch.randint(8192, (512,), device="cuda")
    settings = OperatorSettings("bfloat16", "cuda", (True, True, False), reduction=reduction, label_smoothing=0.1).text
    for mode in ("default", "error"):  # kernels are compiled in the first step
        torch.cuda.set_sync_debug_mode(mode)
        try:
            loss_operator(hidden, weight, None, target, None, settings)[0].sum().backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    exact = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    functional.cross_entropy(exact[0] @ exact[1].t(), target, label_smoothing=0.1, reduction="mean").backward()
    factor = 512 if reduction == "none" else 1
    for mine, other in zip((hidden, weight), exact, strict=True):
        assert mine.grad is not None and other.grad is not None  # of two steps
        assert (mine.grad.double() - 2 * factor * other.grad).norm() <= 0.05 * (2 * factor * other.grad).norm()
