"""The chunked loss on a GPU: values against float64, the allocated peak, and the predicted peak."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from paredown import footprint, trace_step
from paredown.loss import ChunkSettings, CrossEntropy, chunked_cross_entropy, chunked_loss
from paredown.loss.chunked_cross_entropy import CHUNK_BYTES, KERNEL_DEVICES

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
