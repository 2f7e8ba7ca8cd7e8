"""The kernel of a chunk's loss and gradient against torch's cross entropy."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch.nn import functional

from paredown.loss import ChunkSettings, CrossEntropy, chunked_cross_entropy
from paredown.loss.chunked_cross_entropy import KERNEL_DEVICES, ROW_ALIGNMENT, Elementwise, Problem, Rows
from tests.loss.largest import LargestTensor
from tests.loss.test_chunked_cross_entropy import gradients, inputs, oracle

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NUM_ROWS = 5


@pytest.mark.parametrize(("smoothing", "weighted", "num_classes"), [*product((0.0, 0.2), (False, True), (31, 4096 + 77))])
def test_losses_and_gradient(smoothing: float, weighted: bool, num_classes: int) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = (5 * torch.randn(NUM_ROWS, num_classes, generator=generator)).to(DEVICE)
    target = torch.tensor([0, num_classes - 1, -100, 7, 7], device=DEVICE)
    weights = torch.linspace(0.1, 2.0, num_classes, device=DEVICE) if weighted else None
    leaf = logits.double().requires_grad_()
    exact = weights.double() if weights is not None else None
    expected = functional.cross_entropy(leaf, target, weight=exact, label_smoothing=smoothing, reduction="none")
    expected.sum().backward()
    rows = Rows(Problem(target, CrossEntropy(weights, label_smoothing=smoothing), ChunkSettings()), num_classes, torch.float32)
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
        chunk = logits.to(dtype, copy=True)
        before = chunk.clone()
        losses = rows.fused_(chunk, slice(0, NUM_ROWS), None)
        assert torch.equal(chunk, before), "without a scale nothing is written"
        assert (losses - expected).norm() <= tolerance * expected.norm()
        assert losses[2] == 0
        again = rows.fused_(chunk, slice(0, NUM_ROWS), 0.5)
        assert torch.equal(again, losses)
        assert leaf.grad is not None
        assert (chunk.double() - 0.5 * leaf.grad).norm() <= tolerance * leaf.grad.norm()
    part = logits[1:4].clone()
    assert torch.equal(rows.fused_(part, slice(1, 4), 1.0), rows.fused_(logits.clone(), slice(0, NUM_ROWS), 1.0)[1:4])


CAP = Elementwise((("to", "float32"), ("div", 2.0), ("tanh", None), ("mul", 3.0)))


TRANSFORMS = (None, CAP, Elementwise((("mul", 0.5), ("div", 3.0))), Elementwise((*CAP.calls, ("tanh", None))))


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize(("reduction", "alignment"), [("mean", 1), ("mean", 64), ("none", 64)])
def test_losses_by_the_kernel(
    transform: Elementwise | None, reduction: str, alignment: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Products and tanh too."""
    monkeypatch.setitem(KERNEL_DEVICES, "cpu", True)
    monkeypatch.setitem(ROW_ALIGNMENT, DEVICE, alignment)
    *leaves, target = (t.detach().to(DEVICE) for t in inputs(torch.float32) if t is not None)
    hidden, weight, offset = (leaf.requires_grad_() for leaf in leaves)
    options = CrossEntropy(reduction=reduction, label_smoothing=0.1)
    expected = gradients(oracle(hidden, weight, offset, target, options, transform), (hidden, weight, offset))
    settings = ChunkSettings(num_rows=8, transform=transform)
    with LargestTensor() as seen:
        loss = chunked_cross_entropy(hidden, weight, target, bias=offset, options=options, settings=settings)
    assert "_log_softmax" not in seen.operations, "the kernel computes it"
    torch.testing.assert_close(gradients(loss, (hidden, weight, offset)), expected)


def test_a_transform_in_float64_has_no_kernel() -> None:
    settings = ChunkSettings(torch.float32, Elementwise((("to", "float64"), ("tanh", None))), device="cuda")
    assert not Problem(torch.zeros(1, dtype=torch.int64), CrossEntropy(), settings).is_fused


@pytest.mark.skipif(DEVICE == "cuda", reason="a failed assertion on the device ends the process's use of it")
@pytest.mark.parametrize("bad", [-1, 31])
def test_targets_that_are_no_class(bad: int, monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, weight, _, target = inputs(torch.float32)
    target[3] = bad
    with pytest.raises(RuntimeError, match="out of bounds"):
        chunked_cross_entropy(hidden, weight, target)
    monkeypatch.setitem(KERNEL_DEVICES, "cpu", True)
    with pytest.raises(RuntimeError, match="no class: classes are 0 to 30"):
        chunked_cross_entropy(hidden, weight, target)
