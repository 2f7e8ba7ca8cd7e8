"""Released gradients: used and freed in backward; code that needs them later gets an error that names the remedy."""

from __future__ import annotations

import copy
import gc
import io
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from paredown.errors import OptimError
from paredown.optim.gradient_hooks import ReleasedGradient, Releaser
from tests.optim.nets import batches, mlp, pack
from tests.support.compare import assert_same_bits


class Driver:
    """Plain SGD in backward, as an optimizer with release=True does it."""

    def __init__(self, model: nn.Module, lr: float = 0.1) -> None:
        self.updated: set[int] = set()
        self.parameters, self.lr = list(model.parameters()), lr
        self.releasers = [self._releaser(n, p) for n, p in enumerate(self.parameters)]
        for releaser in self.releasers:
            releaser.attach()

    def _releaser(self, number: int, parameter: Tensor) -> Releaser:
        return Releaser(parameter, lambda grad: self._update(number, grad), lambda: number in self.updated, name=f"p{number}")

    def _update(self, number: int, grad: Tensor) -> None:
        assert type(grad) is Tensor and not grad.requires_grad and not torch.is_grad_enabled()
        self.parameters[number].data.sub_(grad, alpha=self.lr)
        self.updated.add(number)

    def step(self) -> None:
        self.updated.clear()


@pytest.mark.parametrize("set_to_none", [True, False])
def test_it_trains_like_the_step_after_backward(set_to_none: bool) -> None:
    model, plain = mlp(), mlp()
    driver, optimizer = Driver(model), torch.optim.SGD(plain.parameters(), lr=0.1)
    for x in batches(3):
        model.zero_grad(set_to_none=set_to_none)
        optimizer.zero_grad()
        model(x).square().mean().backward()
        plain(x).square().mean().backward()
        assert all(isinstance(p.grad, ReleasedGradient) and p.grad.nbytes == 0 for p in model.parameters())
        driver.step()
        optimizer.step()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert_same_bits(p.detach(), q.detach())


def test_a_second_backward_before_the_step_is_refused() -> None:
    model, x = mlp(), batches(1)[0]
    driver = Driver(model)
    sentence = (
        r"p\d: release=True updates in backward, and a second backward ran before step\(\): use microbatches=K \(release=False\)"
    )
    model(x).sum().backward()
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(OptimError, match=sentence):
        model(x).sum().backward()
    model.zero_grad()
    with pytest.raises(OptimError, match=sentence):
        model(x).sum().backward()
    for p, old in zip(model.parameters(), before, strict=True):
        assert_same_bits(p.detach(), old)
    driver.step()
    model.zero_grad()
    model(x).sum().backward()


def test_adding_to_a_used_gradient_after_the_step_is_refused() -> None:
    model, x = mlp(), batches(1)[0]
    driver = Driver(model)
    model(x).sum().backward()
    driver.step()
    with pytest.raises(OptimError, match=r"call zero_grad\(\) between step\(\) and backward"):
        model(x).sum().backward()


def released() -> nn.Sequential:
    model = mlp()
    Driver(model)
    model(batches(1)[0]).sum().backward()
    return model


@pytest.mark.parametrize("foreach", [None, True, False])
def test_clipping_raises_and_says_why(foreach: bool | None) -> None:
    model = released()
    with pytest.raises(OptimError, match=r"nothing left to read, clip or scale.*Use release=False"):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=foreach)
    with pytest.raises(OptimError, match="nothing left to read, clip or scale"):
        torch.nn.utils.clip_grad_value_(model.parameters(), 1.0, foreach=foreach)


def test_scaling_and_reading_raise() -> None:
    grad = released()[0].weight.grad
    assert grad is not None
    readers: list[Callable[[Tensor], object]] = [
        *(
            Tensor.clone,
            Tensor.sum,
            lambda g: g.tolist(),
            lambda g: g.numpy(),
            lambda g: g + 1,
            lambda g: torch.zeros(70, 64).copy_(g),
        ),
        *(lambda g: g.mul_(2), lambda g: g[0], lambda g: torch.save(g, io.BytesIO()), lambda g: g.add_(torch.ones(70, 64))),
        lambda g: torch._amp_foreach_non_finite_check_and_unscale_([g], torch.zeros(1), torch.ones(1)),
    ]
    for reader in readers:
        with pytest.raises(OptimError, match="release=True updates in backward and frees each gradient"):
            reader(grad)
    assert grad.shape == (70, 64) and grad.dtype is torch.float32
    assert repr(grad) == "ReleasedGradient(shape=(70, 64), used in backward)"
    assert isinstance(grad.detach(), ReleasedGradient)


def test_beside_packed_gradients() -> None:
    model, x = mlp(), batches(1)[0]
    driver = Driver(nn.ModuleList([model[0]]))
    pack(model[2].weight)
    model(x).square().sum().backward()
    with pytest.raises(OptimError, match="clip"):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
    model.zero_grad(set_to_none=False)
    torch.optim.SGD(model.parameters()).zero_grad(set_to_none=False)  # in one list
    driver.step()
    model(x).square().sum().backward()
    assert isinstance(model[0].weight.grad, ReleasedGradient)


def test_sparse_gradients_are_refused() -> None:
    embedding = nn.Embedding(10, 4, sparse=True)
    Driver(embedding)
    with pytest.raises(OptimError, match=r"p0 has a sparse gradient.*sparse=False"):
        embedding(torch.arange(3)).sum().backward()


def test_an_update_that_fails_leaves_the_gradient() -> None:
    parameter = nn.Parameter(torch.zeros(2, 3))

    def fail(grad: Tensor) -> None:
        raise ValueError("no")

    Releaser(parameter, fail, lambda: False).attach()
    with pytest.raises(ValueError, match="no"):
        parameter.sum().backward()
    assert type(parameter.grad) is Tensor


def test_copies_have_no_gradient_and_parameters_are_not_kept() -> None:
    model = released()
    leaf = torch.zeros(2, requires_grad=True)
    releaser = Releaser(leaf, lambda grad: None, lambda: False)
    releaser.attach()
    leaf.sum().backward()
    assert copy.deepcopy(leaf).grad is None and copy.deepcopy(model)[0].weight.grad is None
    gone = weakref.ref(leaf)
    del leaf
    gc.collect()
    assert gone() is None
