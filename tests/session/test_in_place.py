"""Modification in place: what autograd refuses is refused or right, never silently wrong; what it allows gives the same result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from paredown import apply
from tests.session.nets import INT4, INT8, Net, activations, assert_exact, error_of, relative_error, rows, step, weighted

ALLOWED: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "relu after linear": lambda net, x: net.b(functional.relu_(net.a(x))),
    "residual": lambda net, x: net.b(functional.relu_(net.a(x).add_(x))),
    "residual twice": lambda net, x: net.b(functional.relu_(net.a(functional.relu_(net.a(x).add_(x))).add_(x))),
    "view": lambda net, x: net.b(set_rows(net.a(x))),
    "scaled": lambda net, x: net.b(net.a(x).mul_(2)),
    "saved, then modified under another version": lambda net, x: net.b(torch.sin(net.a(x)).mul_(3)).sin_().mul_(2),
    "copied into": lambda net, x: net.b(torch.empty(128, 64).copy_(net.a(x))),
    "dropout": lambda net, x: net.b(functional.dropout(net.a(x), 0.3, inplace=True)),
}


def set_rows(h: Tensor) -> Tensor:
    h[::2] = h[::2] * 3
    return h


@pytest.mark.parametrize("name", ALLOWED)
def test_what_is_allowed_stays_right(name: str) -> None:
    net = Net(ALLOWED[name])
    assert_exact(net, rows())
    assert error_of(net, rows()) < 0.03


def hidden(change: Callable[[Tensor], Any], make: Callable[[Tensor], Tensor]) -> Callable[[Any, Tensor], Tensor]:
    """A forward that makes h, gives it to a module, and modifies it afterwards."""

    def forward(net: Any, x: Tensor) -> Tensor:
        h = make(net.a(x))
        y = net.b(h)
        change(h)
        return y + h.detach().mean()

    return forward


def without_autograd(h: Tensor) -> None:
    with torch.no_grad():
        h.mul_(3)


MAKES = (
    torch.sigmoid,
    functional.relu,
    functional.gelu,
    torch.exp,
    lambda h: functional.layer_norm(h, (64,)),
    lambda h: functional.dropout(h, 0.2),
)
CHANGES = (
    lambda h: h.mul_(3),
    without_autograd,
    lambda h: h.detach().zero_(),
    lambda h: h.view(-1)[::2].zero_(),
    lambda h: h[:, :5].add_(1),
)


@pytest.mark.parametrize("make", MAKES)
@pytest.mark.parametrize("change", CHANGES)
def test_what_is_refused_is_refused_or_right(make: Callable[[Tensor], Tensor], change: Callable[[Tensor], Any]) -> None:
    """The right gradient is that of the same net whose module got a copy."""
    right = step(Net(copying(change, make)), rows())
    for format in (None, INT8):
        net = Net(hidden(change, make))
        with pytest.raises(RuntimeError, match="inplace"):
            step(net, rows())
        apply(activations(format), net)
        try:
            found = step(net, rows())
        except RuntimeError as error:
            assert "inplace" in str(error)
        else:
            assert relative_error(found, right) < 0.02


def copying(change: Callable[[Tensor], Any], make: Callable[[Tensor], Tensor]) -> Callable[[Any, Tensor], Tensor]:
    """`hidden`, with a copy to modify."""

    def forward(net: Any, x: Tensor) -> Tensor:
        h = make(net.a(x))
        y, copy = net.b(h), h.clone()
        change(copy)
        return y + copy.detach().mean()

    return forward


@pytest.mark.parametrize("make", [torch.sigmoid, functional.relu, torch.tanh])
@pytest.mark.parametrize("format", [None, INT8, INT4])
@pytest.mark.parametrize("change", CHANGES)
def test_outputs_that_the_caller_modifies(
    make: Callable[[Tensor], Tensor], format: str | None, change: Callable[[Tensor], Any]
) -> None:
    """An output is stored unmodified: an in-place change by the caller must raise, as in autograd."""
    net = Net(lambda net, x: make(net.a(x)))
    for is_applied in (False, True):
        session = apply(activations(format), net) if is_applied else None
        y = net(rows())
        change(y)
        with pytest.raises(RuntimeError, match="inplace"):
            weighted(y).backward()
        assert session is None or session.forwards == 1


def test_outputs_that_the_caller_modifies_without_need_of_them() -> None:
    """A linear layer does not save its output."""
    net = Net(lambda net, x: net.b(torch.sigmoid(net.a(x))))
    plain = step(net, rows(), loss=lambda y: weighted(y.mul_(2)))
    apply(activations(INT8), net)
    assert relative_error(step(net, rows(), loss=lambda y: weighted(y.mul_(2))), plain) < 0.01


@pytest.mark.parametrize("make", [functional.gelu, functional.silu, lambda h: functional.layer_norm(h, (64,))])
def test_modified_without_autograd_before_it_is_saved(make: Callable[[Tensor], Tensor]) -> None:
    """Allowed, and what is saved then does not follow from what the activation saved."""

    def forward(net: Any, x: Tensor) -> Tensor:
        h = make(net.a(x))
        without_autograd(h)
        return net.b(h)

    net = Net(forward)
    assert_exact(net, rows())
    assert error_of(net, rows()) < 0.03


@pytest.mark.parametrize("inplace", [False, True])
def test_relu_of_a_norm_modified_without_autograd(inplace: bool) -> None:
    """The next layer's input is the modified tensor, not the output of ReLU or norm."""

    class Modified(nn.Module):
        def forward(self, h: Tensor) -> Tensor:
            without_autograd(h)
            return h

    net = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(inplace), Modified(), nn.Linear(64, 64))
    right = nn.Sequential(*net[:3], Tripled(), net[4])
    expected = step(right, rows())
    apply(activations(INT8), net)
    assert relative_error(step(net, rows())[-2:], expected[-2:]) < 0.02  # of the last layer


class Tripled(nn.Module):
    """3 h, of which autograd records only the factor 1."""

    def forward(self, h: Tensor) -> Tensor:
        return h + 2 * h.detach()


def test_parameters_of_norms_that_change_before_backward() -> None:
    """Refused, or right: a bias that autograd alone does not save is used when the norm is recomputed."""
    net = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 64))
    plain = step(net, rows())
    apply(activations(INT8), net)
    net.zero_grad()
    loss = weighted(net(rows()))
    with torch.no_grad():
        net[1].bias.add_(5)
    try:
        loss.backward()
    except RuntimeError as error:
        assert "modified in place" in str(error)
    else:
        assert relative_error([p.grad for p in net.parameters() if p.grad is not None], plain) < 0.02


def test_memory_that_a_held_tensor_got_later_is_not_taken_for_the_saved_one() -> None:
    """`.data =` changes no version: what was packed before stays packed, though the model holds the tensor when the pass ends."""
    held: list[Tensor] = []

    def forward(net: Any, x: Tensor) -> Tensor:
        h = net.a(x)
        y = net.b(h)
        held[:] = [h]
        h.data = torch.zeros_like(h)
        return y

    expected = step(Net(lambda net, x: net.b(net.a(x))), rows())
    net = Net(forward)
    apply(activations(INT8), net)
    assert relative_error(step(net, rows()), expected) < 0.02
