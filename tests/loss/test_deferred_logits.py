"""Deferred logits: what is recorded, and what computes them. Uses of all kinds are in tests/programs/logits_uses.py."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.nn import functional

from paredown.loss import chunked_loss
from paredown.loss.chunked_cross_entropy import CHUNK_BYTES
from paredown.loss.deferred_logits import DeferredLogits
from paredown.loss.recorded_calls import keeps_last
from tests.loss.largest import LargestTensor

NUM_CLASSES, SIZE, BATCH, LENGTH = 8192, 4, 3, 5
Loss = Callable[[Tensor, Tensor], Tensor]


class Model(nn.Module):
    """An embedding and a head."""

    def __init__(self, *, bias: bool = True, tied: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(NUM_CLASSES, SIZE), nn.Linear(SIZE, NUM_CLASSES, bias=bias)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embedding(tokens).tanh())


def tokens() -> Tensor:
    return torch.randint(NUM_CLASSES, (BATCH, LENGTH), generator=torch.Generator().manual_seed(1))


def step(model: nn.Module, loss: Loss) -> list[Tensor]:
    model.zero_grad()
    value = loss(model(tokens()), tokens())
    value.backward()
    return [value.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def flat(logits: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(logits.view(-1, NUM_CLASSES), labels.view(-1))


def shifted(logits: Tensor, labels: Tensor) -> Tensor:
    upper = logits.to(labels.device).float()[..., :-1, :].contiguous()
    return functional.cross_entropy(upper.view(-1, upper.size(-1)), labels[..., 1:].reshape(-1), ignore_index=7)


def soft_capped(logits: Tensor, labels: Tensor) -> Tensor:
    logits = (logits / 5.0).tanh() * 5.0
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), label_smoothing=0.1, reduction="sum")


def soft_capped_functions(logits: Tensor, labels: Tensor) -> Tensor:
    logits = 5 * torch.tanh(torch.div(logits, 5))
    return functional.cross_entropy(logits.to(torch.float64).reshape(-1, NUM_CLASSES), labels.flatten()).float()


def by_module(logits: Tensor, labels: Tensor) -> Tensor:
    weights = torch.linspace(0.5, 1.5, NUM_CLASSES)
    return nn.CrossEntropyLoss(weight=weights)(logits[0][1:], labels[0, 1:])


def by_row(logits: Tensor, labels: Tensor) -> Tensor:
    losses = functional.cross_entropy(logits.view(-1, NUM_CLASSES), labels.view(-1), reduction="none")
    return (losses * torch.linspace(0, 1, len(losses))).sum()


def classes_first(logits: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(logits.transpose(1, 2), labels) + nn.CrossEntropyLoss()(logits.permute(0, 2, 1), labels)


def classes_first_by_row(logits: Tensor, labels: Tensor) -> Tensor:
    losses = functional.cross_entropy(logits[:, None].movedim(-1, 1), labels[:, None], reduction="none")
    return (losses * torch.linspace(0, 1, losses.numel()).view(BATCH, 1, LENGTH)).sum()


LOSSES = (flat, shifted, soft_capped, soft_capped_functions, by_module, by_row, classes_first, classes_first_by_row)


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.__name__)
@pytest.mark.parametrize("tied", [False, True])
def test_losses_in_chunks(loss: Loss, tied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CHUNK_BYTES, "cpu", 2 * NUM_CLASSES * 4)
    model = Model(tied=tied)
    expected = step(model, loss)
    with LargestTensor() as seen, chunked_loss(model) as head:
        found = step(model, loss)
    torch.testing.assert_close(found, expected)
    assert head.use.num_losses == (2 if loss is classes_first else 1) and not head.use.requests
    assert seen.numel == NUM_CLASSES * SIZE  # the weights; chunks have 2 rows of logits, of 15
    assert not list(head.rows())


def log_probabilities(logits: Tensor, labels: Tensor) -> Tensor:
    return -logits.log_softmax(-1).gather(-1, labels[..., None]).mean()


def test_metrics_beside_the_loss_compute_all_logits_once() -> None:
    model = Model()
    plain = model(tokens())
    with chunked_loss(model) as head:
        logits = model(tokens())
        flat(logits, tokens()).backward()
        with LargestTensor() as seen, torch.no_grad():
            best = logits.argmax(-1)
            also = logits.float().softmax(-1)
        numbers = logits.tolist(), logits.detach().numpy(), str(logits), logits[0, 0, 0].item()
    assert torch.equal(best, plain.argmax(-1)) and torch.equal(also, plain.softmax(-1))
    assert numbers[0] == plain.tolist() and (numbers[1] == plain.detach().numpy()).all() and numbers[3] == plain[0, 0, 0].item()
    assert numbers[2].partition("grad_fn")[0] == str(plain).partition("grad_fn")[0]
    assert head.use.num_losses == 1
    assert seen.operations & {"addmm", "mm"}
    with LargestTensor() as seen:
        logits.argmax(-1)
    assert not seen.operations & {"addmm", "mm"}


def test_metadata_needs_no_logits() -> None:
    model = Model()
    plain = model(tokens())
    upper = plain[:, 1:]
    with chunked_loss(model) as head, LargestTensor() as seen:
        logits = model(tokens())
        for name in ("shape", "dtype", "device", "ndim", "requires_grad", "is_leaf", "layout", "is_cuda"):
            assert getattr(logits, name) == getattr(plain, name)
        for name in ("size", "dim", "numel", "stride", "is_contiguous", "is_floating_point", "element_size", "__len__"):
            assert getattr(logits, name)() == getattr(plain, name)()
        part = logits[:, 1:]
        assert part.stride() == upper.stride() and not part.is_contiguous()
        assert isinstance(part, DeferredLogits) and logits.grad_fn is not None and len({logits, part}) == 2
        with pytest.raises(RuntimeError, match="view"):  # as for ordinary logits
            part.view(-1, NUM_CLASSES)
    assert not head.use.requests and seen.numel <= NUM_CLASSES * SIZE  # the weight


def test_the_hidden_states_are_freed_with_the_logits() -> None:
    model, held = Model(), list[Any]()
    handle = model.head.register_forward_pre_hook(lambda module, args: held.append(weakref.ref(args[0])))
    gc.disable()
    try:
        with chunked_loss(model):
            for read in (lambda logits: None, lambda logits: logits.argmax(-1)):
                logits = model(tokens())
                flat(logits.float(), tokens()).backward()
                read(logits)
                assert held[-1]() is not None
                del logits
                assert held[-1]() is None, "without the garbage collector"
    finally:
        gc.enable()
        handle.remove()


def test_evaluation_and_passes_without_gradients_are_unmodified() -> None:
    model = Model()
    with chunked_loss(model):
        assert isinstance(model(tokens()), DeferredLogits)
        with torch.no_grad():
            assert type(model(tokens())) is Tensor
        assert type(model.eval()(tokens())) is Tensor
    assert type(model.train()(tokens())) is Tensor


@pytest.mark.parametrize("loss", [flat, shifted, soft_capped, log_probabilities], ids=lambda loss: loss.__name__)
def test_autocast(loss: Loss) -> None:
    model = Model()
    with torch.autocast("cpu", torch.bfloat16):
        expected = step(model, loss)
        with chunked_loss(model), LargestTensor() as seen:
            found = step(model, loss)
    assert torch.bfloat16 in seen.product_dtypes
    assert [t.dtype for t in found] == [t.dtype for t in expected]
    for mine, theirs in zip(found, expected, strict=True):
        assert (mine - theirs).norm() <= 0.02 * theirs.norm()  # bf16: 8 bits


def test_frozen_heads_and_checkpointed_models() -> None:
    model = Model()
    model.head.requires_grad_(False)
    expected = step(model, flat)
    with chunked_loss(model) as head:
        torch.testing.assert_close(step(model, flat), expected)

        def whole(logits: Tensor, labels: Tensor) -> Tensor:
            run = lambda part: flat(model(part), part)  # noqa: E731
            loss = torch.utils.checkpoint.checkpoint(run, labels, use_reentrant=False)
            assert isinstance(loss, Tensor)
            return loss

        torch.testing.assert_close(step(model, whole), expected)
    assert head.use.num_losses == 2 and model.head.weight.grad is None


def test_indices_that_keep_the_last_dimension() -> None:
    whole = slice(None)
    kept = [
        None,
        (whole, None),
        0,
        (0, 1),
        (..., 1, whole),
        (whole, 1),
        (None, 0),
        (slice(1), ...),
        (..., whole),
        (0, ..., whole),
        (whole, whole, whole),
    ]
    other = [(..., 0), (..., slice(1, 2)), (..., None), (0, 0, 0), (whole, whole, slice(2)), (0, 0, 0, ...), (..., whole, None)]
    values = torch.arange(24).view(2, 3, 4)
    for index in (*kept, *other):
        found = values[index]
        is_whole = found.dim() > 0 and found.shape[-1] == 4 and bool((found.diff(dim=-1) == 1).all())
        assert keeps_last(index, 3) == is_whole
    assert not keeps_last([0, 1], 3) and not keeps_last(torch.tensor([0]), 3) and not keeps_last(True, 3)
