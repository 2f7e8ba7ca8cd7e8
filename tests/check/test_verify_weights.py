"""`verify` compares with the weights before packing: a weight that packing destroys is found, by its gradients and by its values."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import paredown as pare
from paredown.check.verification import expected_error
from paredown.formats.rounding import Rounding
from paredown.optim import packed_weight
from tests.session.test_weights_outside import rounded as rounded_to_lpmm

NF4, LPMM = "nf4/64@bf16", "int8/64@e8m0"


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(96, 128, bias=False), nn.Tanh(), nn.Linear(128, 64, bias=False)])


BATCH = torch.randn(32, 96, generator=torch.Generator().manual_seed(1)), torch.ones(32, 64)


def gradients(net: nn.Module) -> list[Tensor]:
    loss = mse_loss(net(BATCH[0]), BATCH[1])
    return list(torch.autograd.grad(loss, list(net.parameters())))


def test_errors_are_those_against_the_weights_before_packing() -> None:
    net = network()
    other = copy.deepcopy(net)
    with torch.no_grad():
        for p in other.parameters():
            p.copy_(rounded_to_lpmm(p))
    errors = [float((a - b).norm() / b.norm()) for a, b in zip(gradients(other), gradients(net), strict=True)]
    before = [p.detach().clone() for p in net.parameters()]
    found = pare.verify(net, BATCH, pare.Plan.uniform(weight=LPMM), loss=mse_loss)
    assert found.ok and [row.exact_error for row in found.rows] == [0.0, 0.0]
    assert [row.error for row in found.rows] == pytest.approx(errors, rel=1e-4) and min(errors) > 1e-3
    assert all(torch.equal(p, q) for p, q in zip(net.parameters(), before, strict=True))


@pytest.mark.parametrize("factor", [0.0, 0.25])
@pytest.mark.parametrize("role", ["weight", "frozen"])
@pytest.mark.parametrize("is_open", [False, True])
def test_a_weight_that_packing_destroys_is_off(monkeypatch: pytest.MonkeyPatch, factor: float, role: str, is_open: bool) -> None:
    net, encode = network(), packed_weight.encode
    net[0].requires_grad_(role == "weight")
    plan = pare.Plan.uniform(**{role: NF4})  # type: ignore[arg-type]
    assert pare.verify(net, BATCH, plan, loss=mse_loss).ok

    def wrong(values: Tensor, *arguments: Any, **options: Any) -> Any:
        return encode(factor * values if values.shape == (128, 96) else values, *arguments, **options)

    monkeypatch.setattr(packed_weight, "encode", wrong)
    session = pare.apply(plan, net) if is_open else None
    found = pare.verify(net, BATCH, None if is_open else plan, loss=mse_loss)
    assert not found.ok and "weight=0.weight" in {fault.slot for fault in found.at_fault}
    row = next(row for row in found.rows if row.name == "weight=0.weight")
    assert row.verdict == "off" and row.error == pytest.approx(1 - factor, abs=0.02)
    if session is not None:
        assert any("packed before verify was called" in note for note in found.notes)
        (reason,) = (change.reason for change in session.changes if change.slot == "weight=0.weight")
        assert "rounding changed its values by " in reason


def test_values_below_the_range_of_a_float_are_a_row() -> None:
    net = network()
    with torch.no_grad():
        net[0].weight.mul_(1e-3)  # below half of 2^-9, the smallest value of e4m3fn
    session = pare.apply(pare.Plan.uniform(weight="e4m3fn"), net)
    assert not net[0].weight.any()
    assert [change.slot for change in session.changes] == ["weight=0.weight"]
    session.close()


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "relu": (lambda: nn.Sequential(nn.Linear(96, 96), nn.ReLU(), nn.Linear(96, 96), nn.ReLU(), nn.Linear(96, 64)), (96,)),
    "pooling": (lambda: nn.Sequential(nn.Conv2d(8, 64, 3), nn.MaxPool2d(3), nn.Flatten(), nn.Linear(64 * 4, 64)), (8, 8, 8)),
}


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("text", ["bf16", LPMM])
def test_rounded_weights_that_move_values_across_zero_are_within_the_bound(name: str, text: str) -> None:
    """Weights with an error e change the gradient of such a network by about the square root of e; random errors do so too."""
    make, shape = NETWORKS[name]
    torch.manual_seed(0)
    net, batch = make(), (torch.randn(256, *shape), torch.randn(256, 64))
    format = pare.Format.parse(text)
    found = pare.verify(net, batch, pare.Plan.uniform(weight=format), loss=mse_loss)
    assert found.verdict == "within the format's bound"
    error = max(row.error for row in found.rows)
    assert error > 2 * expected_error(format, Rounding.NEAREST_EVEN), "more than the weights themselves are off"
    assert 1.2 * error < found.tolerance < 6 * error and "random errors of weights" in found.reason


def test_nothing_to_compare_is_said() -> None:
    net = network()
    found = pare.verify(net, BATCH, pare.Plan.uniform(frozen=NF4), loss=mse_loss)
    assert found.ok and any("nothing of this step is stored packed" in note for note in found.notes)
    assert not pare.verify(net, BATCH, pare.Plan(), loss=mse_loss).notes
    zero = pare.verify(net, BATCH, pare.Plan.uniform(activation="int8/64@bf16"), loss=lambda y, target: 0 * mse_loss(y, target))
    assert any("all gradients of this batch are zero" in note for note in zero.notes)
