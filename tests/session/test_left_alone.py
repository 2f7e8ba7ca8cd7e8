"""Tensors that are no activations are never packed: parameters, their views and casts, buffers, tensors of the caller."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from paredown import Plan, Session, apply
from paredown.autograd.graph import tensors_in
from tests.session.nets import INT4, INT8, Net, activations, assert_same, both, pictures, relative_error, rows, step


def decided(session: Session) -> set[str]:
    """The slots that have a format."""
    return {name for name, decision in session._activations.decisions.items() if decision.format is not None}


def stored(net: nn.Module, *inputs: Tensor, plan: Plan | None = None) -> tuple[int, Session, Any]:
    """Bytes stored after a forward pass, the session, and the model's output."""
    session = apply(plan or activations(INT8), net)
    output = net(*inputs)
    return session.stored_bytes, session, output


WEIGHTS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "linear": lambda net, x: net.a(x),
    "matmul": lambda net, x: x @ net.a.weight,
    "transposed": lambda net, x: x @ net.a.weight.T,
    "from the left": lambda net, x: net.a.weight @ x.T,
    "view": lambda net, x: x @ net.a.weight.view(2, 32, 64).transpose(0, 1).reshape(64, 64),
    "expanded": lambda net, x: torch.bmm(x.view(2, 64, 64), net.a.weight.expand(2, 64, 64)),
    "factor": lambda net, x: x[:64] * net.a.weight,
    "cast": lambda net, x: (x.bfloat16() * 1).float() @ net.a.weight.bfloat16().float(),
    "buffer": lambda net, x: (x @ net.a.weight) * net.table,
    "buffer's view": lambda net, x: (x @ net.a.weight) * net.table.view(64, 2, 64).view(128, 64),
}


@pytest.mark.parametrize("name", WEIGHTS)
def test_parameters_and_buffers_are_never_packed(name: str) -> None:
    """The caller's x and weights are all that these save, so nothing may be stored and the gradient is exact."""
    net = Net(WEIGHTS[name])
    net.register_buffer("table", rows())
    nbytes, session, output = stored(net, rows())
    assert (nbytes, decided(session)) == (0, set()) if name != "cast" else nbytes <= 8448
    session.close()
    plain, found, _ = both(net, rows(), plan=activations(INT4))
    assert_same(found, plain) if name != "cast" else None
    assert output.grad_fn is not None


def test_casts_of_weights_under_autocast_are_not_activations() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 64, 3), nn.Conv2d(64, 64, 3), nn.Flatten(), nn.Linear(64 * 12 * 12, 64))
    with torch.autocast("cpu", torch.bfloat16):
        _, session, output = stored(net, pictures(2, side=16))
    assert decided(session) == {"1:input", "3:input"}
    assert output.dtype is torch.bfloat16


def test_frozen_weights_under_autocast() -> None:
    net = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64))
    net[1].requires_grad_(False)
    with torch.autocast("cpu", torch.bfloat16):
        _, session, output = stored(net, rows())
    assert decided(session) == {"0:input", "2:input"}  # the cast of the caller's input; the frozen layer needs none
    assert output.grad_fn is not None


def test_a_frozen_first_part_saves_nothing() -> None:
    net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    net[:4].requires_grad_(False)
    nbytes, session, output = stored(net, rows())
    assert decided(session) == {"4:input"}
    assert nbytes == 8448
    assert output.grad_fn is not None


def test_tied_weights() -> None:
    net = Net(lambda net, ids: functional.linear(net.a(net.more[0](ids)), net.more[0].weight), nn.Embedding(500, 64))
    ids = torch.arange(256) % 500
    plain, found, session = both(net, ids, plan=activations(INT8))
    assert relative_error(found, plain) < 0.01
    assert decided(session) == {"a:input", ":linear.input"}


def test_the_callers_input_is_not_packed_even_as_a_view() -> None:
    net = Net(lambda net, x: net.a(x) + net.b(x.T.contiguous().T) + net.b(x.view(64, 128).view(128, 64)) + net.a(x[:, :]))
    _, session, output = stored(net, rows())
    assert decided(session) == {"b:input"}  # the copy, which is the model's own
    assert output.grad_fn is not None


@dataclass
class Answer:
    """What models of today return."""

    logits: Tensor
    hidden: Tensor


OUTPUTS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "tensor": lambda hidden, logits: hidden,
    "view": lambda hidden, logits: hidden.view(2, 64, 64)[1:],
    "tuple": lambda hidden, logits: (logits, hidden),
    "dict": lambda hidden, logits: {"logits": logits, "hidden": {"states": [hidden]}},
    "dataclass": lambda hidden, logits: Answer(logits, hidden),
}


@pytest.mark.parametrize("name", OUTPUTS)
def test_what_the_model_returns_is_not_there_twice(name: str) -> None:
    def forward(net: Any, x: Tensor) -> Any:
        hidden = torch.sigmoid(net.a(x))  # saved as its output, and as b's input
        return OUTPUTS[name](hidden, net.b(hidden))

    net = Net(forward)
    nbytes, session, output = stored(net, rows())
    assert nbytes == 0
    assert decided(session) == {":sigmoid.output", "b:input"}
    first = step(net, rows(), loss=lambda output: next(tensors_in(output)).square().sum())
    session.close()
    assert_same(step(net, rows(), loss=lambda output: next(tensors_in(output)).square().sum()), first)  # from the values themselves
    del output


def test_what_the_model_keeps_is_not_there_twice() -> None:
    """As an attribute: a table that is no buffer, and the last hidden state."""

    def forward(net: Any, x: Tensor) -> Tensor:
        net.last = functional.relu(net.a(x) * net.table)
        return net.b(net.last)

    net = Net(forward)
    net.table = rows(seed=4)
    plain = step(net, rows())
    nbytes, session, output = stored(net, rows(), plan=activations(INT4))
    assert nbytes == 0
    assert_same(step(net, rows()), plain)
    session.close()
    assert output.grad_fn is not None


@pytest.mark.parametrize(
    "make", [torch.sigmoid, functional.relu, functional.gelu, lambda h: torch.exp(h).view(2, 64, 64).view(128, 64)]
)
def test_hooks_of_the_user_that_keep_features(make: Callable[[Tensor], Tensor]) -> None:
    net, features = Net(lambda net, x: net.b(make(net.a(x)))), []
    net.b.register_forward_pre_hook(lambda module, args: features.append(args[0]))
    nbytes, _, output = stored(net, rows())
    assert nbytes == (8448 if make is functional.gelu else 0)  # its input, which nobody keeps
    assert output.grad_fn is not None


def test_inference_tensors_in_the_output() -> None:
    class Net2(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            with torch.inference_mode():
                doubled = 2 * x
            return super().forward(x), doubled

    net = Net2(64, 64)
    apply(activations(INT8), net)
    logits, _ = net(rows())
    logits.sum().backward()


def test_saved_tensors_with_other_hooks_are_not_packed() -> None:
    net = Net(lambda net, x: net.b(torch.sigmoid(net.a(x))))
    plain = step(net, rows())
    session = apply(activations(INT4), net)
    with torch.autograd.graph.save_on_cpu():
        found = step(net, rows())
    assert_same(found, plain)
    assert any("other saved-tensor hooks" in change.reason for change in session.changes)
