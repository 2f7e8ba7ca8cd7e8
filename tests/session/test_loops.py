"""Training loops of all kinds: accumulation, several forwards, dropped losses, second derivatives, exceptions, threads, autocast."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from paredown import Plan, apply
from tests.session.nets import INT4, INT8, Net, activations, assert_same, gradients, relative_error, rows, step, weighted

PLANS = (Plan.uniform(activation="fp32"), activations(INT8))


def small(*more: nn.Module) -> Net:
    return Net(lambda net, x: net.b(torch.tanh(functional.relu(net.a(x)))), *more)


def check(found: list[Tensor], plain: list[Tensor], plan: Plan) -> None:
    """The same bits under an exact plan, near under another."""
    if plan == Plan.uniform(activation="fp32"):
        assert_same(found, plain)
    else:
        assert relative_error(found, plain) < 0.03


def accumulate(net: nn.Module) -> None:
    for number in range(3):
        weighted(net(rows(seed=number))).backward()


def several_forwards(net: nn.Module) -> None:
    outputs = [net(rows(seed=number)) for number in range(3)]
    (weighted(outputs[0]) + weighted(outputs[1] * outputs[2])).backward()


def out_of_order(net: nn.Module) -> None:
    outputs = [net(rows(seed=number)) for number in range(3)]
    for output in (outputs[1], outputs[2], outputs[0]):
        weighted(output).backward()


def dropped(net: nn.Module) -> None:
    net(rows(seed=5))
    kept = net(rows(seed=6))
    weighted(net(rows())).backward()
    del kept


def retained(net: nn.Module) -> None:
    loss = weighted(net(rows()))
    loss.backward(retain_graph=True)
    loss.backward(retain_graph=True)
    loss.backward()


def penalty(net: nn.Module) -> None:
    x = rows().requires_grad_()
    y = weighted(net(x).square())
    (slope,) = torch.autograd.grad(y, x, create_graph=True)
    (y + slope.square().sum()).backward()


def in_eval_mode(net: nn.Module) -> None:
    net.eval()
    weighted(net(rows())).backward()
    net.train()


def in_a_thread(net: nn.Module) -> None:
    loss = weighted(net(rows()))
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()


def anomaly(net: nn.Module) -> None:
    with torch.autograd.set_detect_anomaly(True):
        weighted(net(rows())).backward()


LOOPS = (accumulate, several_forwards, out_of_order, dropped, retained, penalty, in_eval_mode, in_a_thread)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("loop", LOOPS)
def test_loops(loop: Any, plan: Plan) -> None:
    net = Net(lambda net, x: net.b(net.more[0](functional.relu(net.a(x)))), nn.Sequential(nn.BatchNorm1d(64), nn.Softplus()))
    loop(net)
    plain = gradients(net)
    net.zero_grad()
    net.more[0][0].reset_running_stats()
    session = apply(plan, net)
    loop(net)
    check(gradients(net), plain, plan)
    assert session.stored_bytes == 0


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_anomaly_detection() -> None:
    test_loops(anomaly, PLANS[1])


def test_nothing_is_packed_without_gradients() -> None:
    net = small()
    session = apply(activations(INT8), net)
    expected = net(rows())
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            assert torch.equal(net(rows()), expected)
    assert session.forwards == 1
    assert session.stored_bytes > 0
    del expected
    assert session.stored_bytes == 0


def test_a_part_without_gradients_stays_without() -> None:
    """Packing when a module is entered must not enable gradients for it."""

    def forward(net: Any, x: Tensor) -> Tensor:
        h = torch.sigmoid(net.a(x)) * 2
        with torch.no_grad():
            teacher = net.b(net.more[0](h))
            assert not torch.is_grad_enabled()
        assert not teacher.requires_grad
        return h * teacher

    net = Net(forward, nn.Identity())  # which gives back h, whose history is new
    plain = step(net, rows())
    apply(activations(INT8), net)
    for _ in range(3):
        assert relative_error(step(net, rows()), plain) < 0.01
        assert net.b.weight.grad is None


def test_shared_modules() -> None:
    net = Net(lambda net, x: net.a(net.more[0](net.b(net.more[0](net.a(x))))), nn.ReLU())
    plain = step(net, rows())
    session = apply(activations(INT8), net)
    assert relative_error(step(net, rows()), plain) < 0.02
    assert {"b:input", "a@2:input"} <= session._activations.decisions.keys()


class Fails(nn.Module):
    """Raises the exception that it is created with."""

    error: BaseException | None = None

    def forward(self, x: Tensor) -> Tensor:
        y = torch.sigmoid(x)
        if self.error is not None:
            raise self.error
        return y


@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt()])
def test_an_exception_in_mid_forward(error: BaseException) -> None:
    fails = Fails()
    net = Net(lambda net, x: net.b(net.more[0](net.a(x))), fails)
    session = apply(activations(INT8), net)
    expected, names = step(net, rows()), set(session._activations.decisions)
    fails.error = error
    with pytest.raises(type(error)):
        net(rows())
    fails.error = None
    assert session.stored_bytes == 0
    for _ in range(2):
        assert_same(step(net, rows()), expected)
    assert session.stored_bytes == 0
    assert set(session._activations.decisions) == names and session.forwards == 4


def test_an_exception_that_the_model_catches() -> None:
    def forward(net: Any, x: Tensor) -> Tensor:
        h = net.a(x)
        try:
            h = net.more[0](h)
        except ValueError:
            h = torch.tanh(h)
        return net.b(h)

    fails = Fails()
    net = Net(forward, fails)
    fails.error = ValueError("no")
    plain = step(net, rows())
    session = apply(activations(INT8), net)
    assert relative_error(step(net, rows()), plain) < 0.01
    assert session.stored_bytes == 0
    fails.error = None
    step(net, rows())
    assert "b:input" in session._activations.decisions


def test_a_model_that_calls_itself() -> None:
    def forward(net: Any, x: Tensor) -> Tensor:
        net.depth = getattr(net, "depth", 0) + 1
        h = torch.tanh(net.a(x))
        h = net(h) if net.depth < 3 else h
        net.depth = 0
        return net.b(h)

    net = Net(forward)
    plain = step(net, rows())
    session = apply(activations(INT8), net)
    assert relative_error(step(net, rows()), plain) < 0.02
    assert session.stored_bytes == 0


def test_a_gradient_taken_in_the_forward_pass() -> None:
    def forward(net: Any, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        energy = net.b(torch.tanh(net.a(x))).sum()
        return torch.autograd.grad(energy, x, create_graph=True)[0]

    net = Net(forward)
    plain = step(net, rows())
    for plan in PLANS:
        with apply(plan, net):
            check(step(net, rows()), plain, plan)


def test_backward_hooks_of_modules() -> None:
    net, seen = small(), []
    net.b.register_full_backward_hook(lambda module, inputs, outputs: seen.append(inputs[0].clone()))
    plain = step(net, rows())
    apply(activations(INT4), net)
    assert relative_error(step(net, rows()), plain) < 0.2
    assert torch.equal(seen[0], seen[1])
