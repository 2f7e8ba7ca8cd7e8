"""The chunked cross entropy against torch's own on all logits: loss, gradients, dtypes, largest tensor."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from paredown.loss import ChunkSettings, CrossEntropy, chunked_cross_entropy
from paredown.loss.chunked_cross_entropy import rows_of_chunk
from tests.loss.largest import LargestTensor

NUM_ROWS, SIZE, NUM_CLASSES = 23, 7, 31
OPTIONS = list(product(("mean", "sum", "none"), (0.0, 0.2), (False, True)))


def capped(logits: Tensor) -> Tensor:
    return 3.0 * torch.tanh(logits / 3.0)


def inputs(dtype: torch.dtype = torch.float64, *, bias: bool = True) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden, weight, offset = (
        torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        for shape in ((NUM_ROWS, SIZE), (NUM_CLASSES, SIZE), (NUM_CLASSES,))
    )
    target = torch.randint(NUM_CLASSES, (NUM_ROWS,), generator=generator)
    target[::5] = -100
    return hidden, weight, offset if bias else None, target


def oracle(hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, options: CrossEntropy, transform: Any) -> Tensor:
    logits = functional.linear(hidden, weight, bias)
    return functional.cross_entropy(
        transform(logits) if transform is not None else logits,
        target,
        weight=options.class_weights,
        ignore_index=options.ignore_index,
        reduction=options.reduction,
        label_smoothing=options.label_smoothing,
    )


def gradients(loss: Tensor, tensors: tuple[Tensor | None, ...], *, keep: bool = False) -> list[Tensor]:
    upstream = torch.linspace(0.5, 2.0, loss.numel(), dtype=loss.dtype).reshape(loss.shape)
    wanted = [t for t in tensors if t is not None]
    return [loss.detach(), *torch.autograd.grad(loss, wanted, upstream, retain_graph=keep)]


@pytest.mark.parametrize("transform", [None, capped], ids=["plain", "capped"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("reduction", "smoothing", "weighted"), OPTIONS)
def test_equals_torch(reduction: str, smoothing: float, weighted: bool, bias: bool, transform: Any) -> None:
    hidden, weight, offset, target = inputs(bias=bias)
    class_weights = torch.linspace(0.1, 2.0, NUM_CLASSES, dtype=torch.float64) if weighted else None
    options = CrossEntropy(class_weights, -100, reduction, smoothing)
    expected = gradients(oracle(hidden, weight, offset, target, options, transform), (hidden, weight, offset))
    for num_rows in (4, 100):
        settings = ChunkSettings(transform=transform, num_rows=num_rows)
        loss = chunked_cross_entropy(hidden, weight, target, bias=offset, options=options, settings=settings)
        for keep in (True, False):  # the second backward gets the tensors that the first one did not modify
            torch.testing.assert_close(gradients(loss, (hidden, weight, offset), keep=keep), expected)


def test_a_freed_graph_cannot_go_backward_again() -> None:
    hidden, weight, _, target = inputs()
    loss = chunked_cross_entropy(hidden, weight, target)
    loss.backward()
    with pytest.raises(RuntimeError, match="retain_graph"):
        loss.backward()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bits(dtype: torch.dtype) -> None:
    hidden, weight, _, target = inputs(dtype, bias=False)
    exact = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    expected = gradients(oracle(exact[0], exact[1], None, target, CrossEntropy(), None), tuple(exact))
    loss = chunked_cross_entropy(hidden, weight, target, settings=ChunkSettings(num_rows=8))
    found = gradients(loss, (hidden, weight))
    assert {t.dtype for t in found} == {dtype}
    for mine, theirs in zip(found, expected, strict=True):
        assert (mine.double() - theirs).norm() < 8 * torch.finfo(dtype).eps * theirs.norm()


def test_float16_gradients_neither_underflow_nor_overflow() -> None:
    num_rows = 1 << 14
    hidden = torch.full((num_rows, 1), 8.0, dtype=torch.float16, requires_grad=True)
    weight = torch.zeros(2, 1, dtype=torch.float32, requires_grad=True)
    target = torch.zeros(num_rows, dtype=torch.int64)
    settings = ChunkSettings(torch.float16)
    chunked_cross_entropy(hidden, weight, target, settings=settings).backward()
    assert weight.grad is not None
    # the sum of 2^14 rows of 0.5 x 8 is 65536, beyond float16
    torch.testing.assert_close(weight.grad, torch.tensor([[-4.0], [4.0]]))


def test_autocast_multiplies_in_bfloat16_and_returns_float32() -> None:
    hidden, weight, offset, target = inputs(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        expected = oracle(hidden, weight, offset, target, CrossEntropy(), None)
        with LargestTensor() as seen:
            found = chunked_cross_entropy(hidden, weight, target, bias=offset, settings=ChunkSettings(num_rows=8))
    assert found.dtype is expected.dtype is torch.float32
    assert torch.bfloat16 in seen.product_dtypes
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=0)  # bf16: 8 bits
    mine, theirs = (gradients(loss, (hidden, weight, offset)) for loss in (found, expected))
    assert {t.dtype for t in mine} == {torch.float32}
    for one, other in zip(mine, theirs, strict=True):
        assert (one - other).norm() < 0.03 * other.norm()


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_no_tensor_has_all_logits(reduction: str) -> None:
    hidden, weight, _, target = inputs(torch.float32)
    with LargestTensor() as seen:
        options, settings = CrossEntropy(reduction=reduction), ChunkSettings(num_rows=4)
        chunked_cross_entropy(hidden, weight, target, options=options, settings=settings).sum().backward()
    assert seen.numel == max(4 * NUM_CLASSES, NUM_CLASSES * SIZE)
    with LargestTensor() as seen:
        functional.cross_entropy(functional.linear(hidden, weight), target)
    assert seen.numel == NUM_ROWS * NUM_CLASSES


def test_the_gradient_of_a_frozen_weight_is_not_computed() -> None:
    hidden, weight, _, target = inputs(torch.float32)
    weight.requires_grad_(False)
    with LargestTensor() as seen:
        chunked_cross_entropy(hidden, weight, target, settings=ChunkSettings(num_rows=1)).backward()
    assert weight.grad is None and hidden.grad is not None
    assert "addmm_" not in seen.operations


def test_without_gradients_none_are_computed() -> None:
    hidden, weight, _, target = inputs(torch.float32)
    with torch.no_grad(), LargestTensor() as seen:
        loss = chunked_cross_entropy(hidden, weight, target, settings=ChunkSettings(num_rows=1))
    assert not loss.requires_grad
    assert "scatter_add_" not in seen.operations
    with LargestTensor() as seen:
        chunked_cross_entropy(hidden, weight, target)
    assert {"scatter_add_", "addmm_"} <= seen.operations


def test_batches_of_rows_and_no_valid_row() -> None:
    hidden, weight, _, target = inputs()
    rows, targets = hidden[:20].reshape(4, 5, SIZE), target[:20].reshape(4, 5)
    found = chunked_cross_entropy(rows, weight, targets, options=CrossEntropy(reduction="none"))
    expected = functional.cross_entropy((rows @ weight.T).flatten(0, 1), targets.flatten(), reduction="none").reshape(4, 5)
    torch.testing.assert_close(found, expected)
    assert chunked_cross_entropy(rows, weight, torch.full_like(targets, -100)).isnan()  # as torch's: 0 / 0


def test_chunks_fill_their_bytes() -> None:
    assert rows_of_chunk(128256, torch.bfloat16, "cuda") * 128256 * 2 <= 256 * 2**20
    assert rows_of_chunk(2**40, torch.float32, "cpu") == 1
    assert rows_of_chunk(8192, torch.float32, "cpu") == 1024


def test_bad_arguments_are_named() -> None:
    hidden, weight, _, target = inputs()
    with pytest.raises(ValueError, match=r"\(23, 7\), \(31, 7\) and \(22,\)"):
        chunked_cross_entropy(hidden, weight, target[1:])
    with pytest.raises(ValueError, match="class probabilities"):
        chunked_cross_entropy(hidden, weight, target.double())
    with pytest.raises(ValueError, match="'max' is unknown"):
        chunked_cross_entropy(hidden, weight, target, options=CrossEntropy(reduction="max"))
    with pytest.raises(ValueError, match="between 0 and 1, not 2"):
        chunked_cross_entropy(hidden, weight, target, options=CrossEntropy(label_smoothing=2.0))
