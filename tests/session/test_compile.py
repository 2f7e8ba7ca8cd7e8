"""torch.compile gives right results, and `session.changes` lists what is not packed there; torch.func raises an error."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from paredown import apply
from paredown.errors import ApplyError
from tests.session.nets import INT4, INT8, Net, activations, assert_same, relative_error, rows, step

BACKENDS = pytest.mark.parametrize("backend", ["eager", "aot_eager"])
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")  # torch's own


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Small(nn.Module):
    """Without a function in it, so that all of it is compiled."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.relu, self.last = nn.Linear(64, 64), nn.LayerNorm(64), nn.ReLU(), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.relu(self.norm(self.first(x))))


@BACKENDS
@pytest.mark.parametrize("when", ["before", "after", "after it ran"])
def test_a_compiled_model(backend: str, when: str) -> None:
    net = Small()
    plain = step(net, rows())
    session = apply(activations(INT4), net) if when == "before" else None
    compiled = torch.compile(net, backend=backend)
    if when == "after it ran":
        step(compiled, rows())
    session = session or apply(activations(INT4), compiled)
    found = step(compiled, rows())
    torch.testing.assert_close(found, plain, rtol=1e-5, atol=1e-5)
    assert session.stored_bytes == 0
    assert any("torch.compile runs the model" in c.reason and "call session.compile() instead" in c.reason for c in session.changes)
    session.close()
    torch.testing.assert_close(step(compiled, rows()), plain, rtol=1e-5, atol=1e-5)


@BACKENDS
def test_a_compiled_part_of_a_model(backend: str) -> None:
    net = Net(lambda net, x: net.b(net.more[0](net.a(x))), torch.compile(Small(), backend=backend))
    plain = step(net, rows())
    session = apply(activations(INT8), net)
    assert relative_error(step(net, rows()), plain) < 0.03
    assert session.stored_bytes == 0
    assert "b:input" in session._activations.decisions
    assert any("torch.compile" in change.reason for change in session.changes) is (backend == "aot_eager")


def test_a_model_that_breaks_the_graph() -> None:
    def forward(net: Any, x: Tensor) -> Tensor:
        h = torch.sigmoid(net.a(x))
        torch._dynamo.graph_break()
        return net.b(h)

    net = Net(forward)
    plain = step(net, rows())
    session = apply(activations(INT8), net)
    assert relative_error(step(torch.compile(net, backend="eager"), rows()), plain) < 0.03
    assert session.changes


def test_torch_func_is_refused_in_a_sentence() -> None:
    net = Small()
    apply(activations(INT8), net)
    parameters = {name: p.detach() for name, p in net.named_parameters()}

    def loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(net, parameters, (x,)).square().sum()

    for call in (lambda: grad(loss)(parameters, rows()), lambda: vmap(grad(loss), in_dims=(None, 0))(parameters, rows()[:, None])):
        with pytest.raises(ApplyError, match=r"torch\.func .* session\.close\(\) first, or use a copy"):
            call()
    plain = copy.deepcopy(net)
    grad(lambda p: functional_call(plain, p, (rows(),)).sum())(parameters)


def test_functional_call_without_torch_func() -> None:
    net = Small()
    parameters = {name: p.detach().clone().requires_grad_() for name, p in net.named_parameters()}

    def gradients() -> list[Tensor]:
        return list(torch.autograd.grad(functional_call(net, parameters, (rows(),)).square().sum(), list(parameters.values())))

    plain = gradients()
    with apply(activations(INT8), net):
        assert relative_error(gradients(), plain) < 0.02
    assert_same(gradients(), plain)


def test_vmap_inside_the_model() -> None:
    net = Net(lambda net, x: net.b(torch.tanh(vmap(net.a)(x))))
    plain = step(net, rows())
    apply(activations(INT8), net)
    assert relative_error(step(net, rows()), plain) < 0.02
