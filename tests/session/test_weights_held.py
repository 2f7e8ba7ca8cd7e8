"""Packed weights that others reference or write: values are right, they are packed as soon as possible, and `changes` lists the rest."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.func import functional_call, grad, vmap
from torch.nn import functional

from paredown import Plan, apply
from paredown.errors import ApplyError
from paredown.optim.packed_parameter import PackedParameter
from paredown.optim.packed_weight import weight_of
from paredown.session.weights.unattached_weights import SHARED
from tests.session.nets import Net, assert_same, rows, weighted
from tests.session.test_weights import LPMM, PLAN, assert_equal, mlp, parameter_bytes, step

FEW = 3000  # bytes of what is not packed


def same(tensor: Any) -> Any:
    return tensor


HOOKS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "identity hooks": lambda: saved_tensors_hooks(same, same),
    "copied": lambda: saved_tensors_hooks(lambda t: t.detach().clone(), same),
    "on the CPU": save_on_cpu,
}


@pytest.mark.parametrize("name", HOOKS)
def test_hooks_around_the_model(name: str) -> None:
    """A hook may keep the parameter itself: it stays unpacked until backward is done."""
    net = Net(lambda net, x: net.b(torch.mm(net.more[0](x), net.more[0].weight)), nn.Linear(64, 64))
    assert_equal(net, rows(97), around=HOOKS[name])
    with HOOKS[name]():
        loss = weighted(net(rows(97)))
    loss.backward(retain_graph=True)
    loss.backward()
    del loss
    net(rows(97))
    assert parameter_bytes(net) < FEW


@pytest.mark.parametrize("name", HOOKS)
def test_hooks_inside_of_a_module(name: str) -> None:
    class Product(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(64, 64))

        def forward(self, x: Tensor) -> Tensor:
            with HOOKS[name]():
                return torch.mm(x, self.weight)

    assert_equal(Net(lambda net, x: net.b(net.more[0](net.a(x))), Product()), rows(97))


def test_a_view_that_a_module_keeps() -> None:
    class Keeps(nn.Linear):
        kept: Any = None

        def forward(self, x: Tensor) -> Tensor:
            self.kept = self.weight.T
            return super().forward(x)

    net = Net(lambda net, x: net.b(net.more[0](x)), Keeps(64, 64))
    session = apply(PLAN, net)
    plain = copy.deepcopy(net)
    found, expected = (step(model, (rows(97),), weighted, nullcontext) for model in (net, plain))
    assert_same(found[1], expected[1])
    assert [(row.slot, row.given) for row in session.changes if "more" in row.slot] == [
        ("weight=more.0.weight", "unpacked until backward")
    ]
    values = weight_of(net.more[0].weight).decode()
    assert torch.equal(net.more[0].kept.T, values)
    assert torch.equal(net.more[0].weight, values)
    with torch.no_grad():
        net.more[0].weight.mul_(2)
    net.more[0].kept = None
    found, expected = (step(model, (rows(97),), weighted, nullcontext) for model in (net, copy.deepcopy(net)))
    assert_same(found[1], expected[1])
    assert session.weight_bytes == 3 * (4096 + 64)


def test_a_step_while_a_weight_is_held() -> None:
    """The optimizer's new values are seen, and autograd notices that what it saved is old."""
    net = Net(lambda net, x: net.b(torch.mm(net.more[0](x), net.more[0].weight)), nn.Linear(64, 64))
    apply(PLAN, net)
    with saved_tensors_hooks(same, same):
        loss = weighted(net(rows(97)))
    weight = weight_of(net.b.weight)
    assert weight is not None
    assert weight.is_plain
    before = net.b.weight.detach().clone()
    weight.packed.codes.copy_(torch.randint(1, 99, weight.packed.codes.shape))
    weight.changed()
    assert torch.equal(net.b.weight, weight.decode())
    assert not torch.equal(net.b.weight, before)
    loss.backward()  # hooks of others are not asked whether anything changed, as in torch
    found, expected = (step(model, (rows(97),), weighted, nullcontext) for model in (net, copy.deepcopy(net)))
    assert_same(found[1], expected[1])


class Odd(Exception):
    """What a model may raise."""


def test_an_exception_in_forward() -> None:
    fails = True

    def forward(net: Any, x: Tensor) -> Tensor:
        h = net.a(x)
        if fails:
            raise Odd
        return net.b(h)

    net = Net(forward)
    apply(PLAN, net)
    plain = copy.deepcopy(net)
    for kind in (torch.no_grad, torch.enable_grad):
        with pytest.raises(Odd), kind():
            net(rows(97))
        assert parameter_bytes(net) < FEW
    fails = False
    found, expected = (step(model, (rows(97),), weighted, nullcontext) for model in (net, plain))
    assert_same(found[1], expected[1])


@pytest.mark.parametrize("error", [Odd, KeyboardInterrupt])
def test_an_exception_inside_of_a_packed_module(error: type[BaseException]) -> None:
    class Fails(nn.Linear):
        fails = True

        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            if self.fails:
                raise error
            return y

    net = Net(lambda net, x: net.b(net.more[0](net.a(x))), Fails(64, 64))
    apply(PLAN, net)
    plain = copy.deepcopy(net)
    for _ in range(3):
        with pytest.raises(error):
            net(rows(97))
    plain.more[0].fails = net.more[0].fails = False
    for _ in range(2):
        found, expected = (step(model, (rows(97),), weighted, nullcontext) for model in (net, plain))
        assert_same(found[1], expected[1])
    assert parameter_bytes(net) < FEW


def test_a_module_that_calls_itself() -> None:
    class Deep(nn.Linear):
        def forward(self, x: Tensor, depth: int = 3) -> Tensor:
            y = torch.tanh(super().forward(x))
            return self(y, depth - 1) if depth else y

    assert_equal(Net(lambda net, x: net.b(net.more[0](x)), Deep(64, 64)), rows(97))


def test_a_model_that_calls_itself() -> None:
    depth = [0]

    def forward(net: Any, x: Tensor) -> Tensor:
        depth[0] += 1
        y = net.b(torch.tanh(net.a(x)))
        return net(y) if depth[0] % 3 else y

    assert_equal(Net(forward), rows(97))


def renormed(net: Any, x: Tensor) -> Tensor:
    return net.b(net.more[0](x))


class InPlace(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.renorm_(2, 0, 0.5)
        return super().forward(x)


class ThroughData(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        self.weight.data.renorm_(2, 0, 0.5)
        return super().forward(x)


class SetsData(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        self.weight.data = torch.renorm(self.weight.data, 2, 0, 0.5)
        return super().forward(x)


@pytest.mark.parametrize("kind", [InPlace, ThroughData, SetsData])
def test_modules_that_write_their_weight(kind: type[nn.Linear]) -> None:
    """As constraints on norms do: the written values are encoded afterwards."""
    net = Net(renormed, kind(64, 64))
    apply(PLAN, net)
    plain = copy.deepcopy(net)
    for _ in range(3):
        found, expected = (step(model, (rows(97),), weighted, nullcontext)[1] for model in (net, plain))
        assert all(torch.allclose(a, b, rtol=0.1, atol=0.05 * b.abs().max()) for a, b in zip(found, expected, strict=True))
        with torch.no_grad():
            norms = net.more[0].weight.norm(dim=1)
            assert norms.max() < 0.52
            net.more[0].weight.mul_(2)
            plain.more[0].weight.mul_(2)


def test_an_embedding_that_limits_norms() -> None:
    net = Net(lambda net, x: net.more[0](x), nn.Embedding(100, 64, max_norm=1.0))
    apply(PLAN, net)
    x = torch.arange(50)
    assert float(weight_of(net.more[0].weight).decode().norm(dim=1).min()) > 3
    weighted(net(x)).backward()
    norms = net.more[0].weight.detach().norm(dim=1)
    assert float(norms[:50].max()) < 1.05
    assert float(norms[50:].min()) > 3
    assert type(net.more[0].weight) is PackedParameter


@pytest.mark.parametrize("has_gradients", [False, True])
def test_threads_share_a_model(has_gradients: bool) -> None:
    net = Net(lambda net, x: net.b(torch.tanh(net.a(x))))
    apply(PLAN, net)
    plain = copy.deepcopy(net)
    right: list[bool] = []

    def results(model: nn.Module, x: Tensor) -> list[Tensor]:
        with torch.set_grad_enabled(has_gradients):
            y = model(x)
        return [y, *(torch.autograd.grad(weighted(y), list(model.parameters())) if has_gradients else ())]

    def run(seed: int) -> None:
        for number in range(30):
            x = rows(97, seed=seed + number)
            right.append(all(torch.equal(a, b) for a, b in zip(results(net, x), results(plain, x), strict=True)))

    threads = [threading.Thread(target=run, args=(100 * i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert right == [True] * 90
    net(rows(97))
    assert parameter_bytes(net) < FEW


def test_vmap_inside_the_model() -> None:
    assert_equal(Net(lambda net, x: net.b(torch.tanh(vmap(net.a)(x)))), rows(97))


def test_torch_func_is_refused_in_a_sentence() -> None:
    net = mlp()
    apply(PLAN, net)
    parameters = {name: p.detach().clone() for name, p in net.named_parameters()}
    with pytest.raises(ApplyError, match=r"torch\.func"):
        grad(lambda p: functional_call(net, p, (rows(97),)).square().sum())(parameters)


def test_functional_call_uses_other_parameters() -> None:
    net = mlp()
    apply(PLAN, net)
    plain = copy.deepcopy(net)
    for make in (lambda p: p.detach().clone().requires_grad_(), lambda p: nn.Parameter(p.detach() * 2)):
        parameters = {name: make(p) for name, p in net.named_parameters()}
        found, expected = (functional_call(model, parameters, (rows(97),)) for model in (net, plain))
        assert torch.equal(found, expected)
        assert all(type(p) is not PackedParameter for p in parameters.values())
    assert torch.equal(net(rows(97)), plain(rows(97)))


# --- what is not packed -----------------------------------------------------------------------------------------------


def reasons(net: nn.Module, plan: Plan = PLAN) -> dict[str, str]:
    session = apply(plan, net)
    found = {row.slot: row.reason for row in session.changes}
    session.close()
    return found


def test_small_parameters_are_one_row() -> None:
    net = mlp()
    session = apply(PLAN, net)
    row = session.changes[0]
    assert (row.slot, row.asked, row.given) == ("5 parameters of fewer than 2 dimensions or 4096 values", LPMM, "unmodified")
    assert {name for name, p in net.named_parameters() if type(p) is PackedParameter} == {"0.weight", "2.weight", "4.weight"}


def test_parameters_that_cannot_be_packed() -> None:
    net = mlp()
    flat = torch.randn(2 * 4096)
    net[0].weight, net[2].weight = (nn.Parameter(part.view(64, 64)) for part in flat.chunk(2))
    net[4].weight = nn.Parameter(torch.full((70, 64), torch.nan))
    net.double_one = nn.Parameter(torch.randn(64, 64).double())
    net.with_gaps = nn.Parameter(torch.randn(64, 128)[:, ::2])
    net.elsewhere = nn.Parameter(torch.empty(64, 64, device="meta"))
    found = reasons(net)
    assert found.pop("weight=0.weight") == found.pop("weight=2.weight") == SHARED
    assert found.pop("weight=4.weight") == "it holds values that are not finite"
    assert "float64" in found.pop("weight=double_one")
    assert "gaps" in found.pop("weight=with_gaps")
    assert "meta" in found.pop("weight=elsewhere")
    assert len(found) == 1
    held = net[2].weight.data
    assert held.untyped_storage().nbytes() == flat.nbytes


def test_a_parameter_whose_memory_somebody_has() -> None:
    net = mlp()
    alias = net[0].weight.data
    assert reasons(net)["weight=0.weight"] == SHARED
    alias.zero_()
    assert not net[0].weight.any()


def test_a_parameter_of_the_format_already() -> None:
    net = mlp().bfloat16()
    before = parameter_bytes(net)
    session = apply(Plan.uniform(weight="bf16"), net)
    assert (session.weight_bytes, parameter_bytes(net)) == (0, before)
    assert repr(session.changes) == "everything is as requested"
    session.close()
    assert reasons(net, Plan.uniform(weight="fp32"))["weight=0.weight"] == "it would not be smaller"


def test_a_format_that_cannot_say_the_values() -> None:
    assert "no code for inf or NaN" in reasons(scaled(mlp(), 1e5), Plan.uniform(weight="e4m3f"))["weight=0.weight"]


def scaled(net: nn.Sequential, factor: float) -> nn.Sequential:
    with torch.no_grad():
        for p in net.parameters():
            p.mul_(factor)
    return net


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_scripted_modules_are_not_packed() -> None:
    net = nn.Sequential(nn.Linear(64, 64), torch.jit.script(nn.Linear(64, 64)))
    session = apply(PLAN, net)
    assert [row.slot for row in session.changes if "TorchScript" in row.reason] == ["weight=1.weight"]
    step(net, (rows(97),), weighted, nullcontext)


def test_a_plan_by_name() -> None:
    net = mlp()
    session = apply(Plan.uniform().set("weight=0.*", LPMM).set("weight=2.weight", "bf16"), net)
    assert [type(net[i].weight) is PackedParameter for i in (0, 2, 4)] == [True, True, False]
    assert session.weight_bytes == 8192 + 128 + 2 * 8192
    assert functional.linear(rows(97), net[0].weight).shape == (97, 128)
