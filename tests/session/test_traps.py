"""Tensors that must not be rounded or confused with others, and the rows of `changes` for them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paredown.apply_plan import apply
from paredown.optim.packed_weight import weight_of
from paredown.plan.plan import Plan
from tests.session.nets import INT8, activations, assert_same, both, error_of, gradients, relative_error, rows

EXACT = Plan.uniform(activation="fp32")


class Net(nn.Module):
    """Two layers, and what is done between them."""

    def __init__(self, between: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.between = nn.Linear(64, 64), nn.Linear(64, 64), between

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.between(self.a(x)))


def test_two_switches_on_one_tensor_have_bits_of_their_own() -> None:
    plain, found, _ = both(Net(lambda y: F.relu6(3 * y) + F.hardtanh(3 * y)), rows(256), plan=EXACT)
    assert_same(found, plain)
    one = Net(lambda y: (lambda z: F.relu6(z) + F.hardtanh(z))(3 * y))
    plain, found, _ = both(one, rows(256), plan=EXACT)
    assert_same(found, plain)


def largest_of_groups(y: Tensor) -> Tensor:
    index = (torch.arange(len(y)) % 16)[:, None].expand_as(y)
    best = y.new_zeros(16, y.shape[1]).scatter_reduce(0, index, y, "amax", include_self=False)
    return best[torch.arange(len(y)) % 16] + y


UNKNOWN: dict[str, Callable[[Tensor], Tensor]] = {
    "scatter_reduce": largest_of_groups,
    "xlogy": lambda y: torch.xlogy(torch.ones_like(y), y.abs().add(1e-3)),
    "masked softplus": lambda y: F.softplus(y.masked_fill(y > 1, -torch.inf)),
    "cdist": lambda y: torch.cdist(y, y[:64]),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_operations_without_a_row_are_not_packed(name: str) -> None:
    assert error_of(Net(UNKNOWN[name]), rows(256)) < 0.05


@pytest.mark.parametrize("loss", [F.mse_loss, F.smooth_l1_loss, F.huber_loss])
def test_a_loss_inside_the_model_near_its_end(loss: Callable[..., Tensor]) -> None:
    """Backward takes the difference of two tensors that are nearly equal."""
    x = rows(256)

    class Near(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.a = nn.Linear(64, 64)

        def forward(self, x: Tensor) -> Tensor:
            y = self.a(x)
            return loss(y, y.detach() + 1e-3 * x)

    assert error_of(Near(), x, loss=lambda value: value) < 0.02


def test_neighbours_in_memory_do_not_spoil_a_view() -> None:
    def beside_large_numbers(y: Tensor) -> Tensor:
        whole = torch.cat([y[:, :32], torch.full((len(y), 32), -1e9)], 1)
        return torch.cat([whole[:, :32].tanh(), y[:, 32:]], 1)

    assert error_of(Net(beside_large_numbers), rows(256)) < 0.05


def test_another_dtype_is_another_decision() -> None:
    net = Net(torch.tanh)
    session = apply(activations(INT8), net)
    net(rows(256)).sum().backward()
    net.double()
    output = net(rows(256).double())
    assert session.stored_bytes == 0, "float64 is not packed"
    del output
    net.float()
    output = net(rows(256))
    assert session.stored_bytes > 0
    assert output.grad_fn is not None


def test_threads_do_not_mix() -> None:
    net, x = Net(torch.tanh), rows(256)
    apply(activations(INT8), net)
    net(x).sum().backward()
    expected, failed, found = gradients(net), list[BaseException](), list[float]()
    net.zero_grad()

    def work() -> None:
        try:
            for _ in range(10):
                grads = torch.autograd.grad(net(x).sum(), list(net.parameters()))
                found.append(relative_error(grads, expected))
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert len(found) == 40 and max(found) < 1e-6


class Gate(nn.Module):
    """A module without children that saves one factor or both."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x * y


class Gated(nn.Module):
    """Two layers and their product."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.gate = nn.Linear(64, 64), nn.Linear(64, 64), Gate()

    def forward(self, x: Tensor) -> Tensor:
        return self.gate(self.a(x), self.b(x))


def test_a_part_that_is_trained_later_is_packed_then() -> None:
    def stored_bytes(*, is_frozen_first: bool) -> int:
        net = Gated()
        session = apply(activations(INT8), net)
        net.a.requires_grad_(not is_frozen_first)
        for _ in range(2):
            net(rows(256)).sum().backward()
        net.a.requires_grad_(True)
        kept = net(rows(256))
        assert kept.grad_fn is not None
        return session.stored_bytes

    assert stored_bytes(is_frozen_first=True) == stored_bytes(is_frozen_first=False) > 0


# --- what changes says -------------------------------------------------------------------------------------------------------------


def reasons(session: Any) -> dict[str, str]:
    return {row.slot: row.reason for row in session.changes}


def test_what_the_caller_holds_is_a_row() -> None:
    class Two(Net):
        def forward(self, x: Tensor) -> Any:  # type: ignore[override]
            hidden = self.between(self.a(x))
            return self.b(hidden), hidden

    net = Two(lambda y: y * 2)
    session = apply(activations(INT8), net)
    outputs = net(rows(256))
    assert "holds it" in reasons(session)["b:input"]
    assert outputs


def test_small_tensors_are_a_row() -> None:
    net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    session = apply(activations(INT8), net)
    net(torch.randn(4, 8)).sum().backward()
    assert any("fewer than" in slot for slot in reasons(session))


def test_rows_go_when_their_reason_does() -> None:
    net, x = Net(torch.tanh), rows(256)
    session = apply(activations(INT8), net)
    with torch.autograd.graph.save_on_cpu():
        net(x).sum().backward()
    assert "hooks" in reasons(session)["b:input"] and "b:weight" not in reasons(session)
    net(x).sum().backward()
    assert "b:input" not in reasons(session)


def test_a_plan_without_rules_does_nothing() -> None:
    net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    session = apply(Plan.uniform(), net)
    kept = net(rows(256))
    assert session.stored_bytes == 0 and session.forwards == 1
    assert not session.changes
    assert kept.grad_fn is not None


@pytest.mark.parametrize("pattern", ["2:*", "1:*"])
@pytest.mark.parametrize("num", [256, 8])
def test_patterns_on_what_is_small_or_a_mask_are_answered(pattern: str, num: int) -> None:
    """A plan still applies at a batch so small that its slots are not packed."""
    net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))
    session = apply(Plan().set(pattern, INT8), net)
    net(rows(256)[:num]).sum().backward()
    assert session.forwards == 1


def test_what_is_asked_for_single_weights() -> None:
    net = Net(torch.tanh)
    plan = activations(INT8).set("weight=a.weight", INT8).set("moment1=b.*", INT8)
    assert {row.slot for row in apply(plan, net).changes} == {"moment1"}
    assert (weight_of(net.a.weight) is not None, weight_of(net.b.weight)) == (True, None)


def test_what_the_caller_holds_but_changed_is_no_row() -> None:
    class Changed(Net):
        def forward(self, x: Tensor) -> Any:  # type: ignore[override]
            hidden = self.between(self.a(x))
            result = self.b(hidden)
            with torch.no_grad():
                hidden.mul_(2)
            return result, hidden

    net = Changed(lambda y: y * 2)
    session = apply(activations(INT8), net)
    outputs = net(rows(256))
    assert session.stored_bytes > 0 and "b:input" not in reasons(session)
    assert outputs
