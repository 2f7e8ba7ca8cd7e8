"""Packed parameters in training loops: states, conversions, torch.optim, averages, `unpacked`, `close`."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from paredown import apply
from paredown.optim.packed_parameter import PackedParameter
from paredown.optim.packed_weight import weight_of
from tests.session.nets import Net, assert_same, gradients, pictures, rows, weighted
from tests.session.test_memory import live_bytes
from tests.session.test_weights import PLAN, mlp, parameter_bytes, pictures_net
from tests.session.test_weights_outside import rounded, stored, through

FEW = 3000


def tied() -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(100, 64), nn.Linear(64, 64), nn.Linear(64, 100, bias=False))
    net[2].weight = net[0].weight
    return net


def test_states_are_plain() -> None:
    net = tied()
    apply(PLAN, net)
    for options in ({}, {"keep_vars": True}):
        state = net.state_dict(**options)
        assert {type(value) for value in state.values()} == {nn.Parameter if options else Tensor}
        assert all(
            torch.equal(value, stored(p))
            for value, p in zip(state.values(), [net[0].weight, net[1].weight], strict=False)
            if p.dim() > 1
        )
    assert state["0.weight"].requires_grad
    state = net.state_dict()
    assert state["0.weight"] is state["2.weight"]
    state["0.weight"].zero_()
    assert net.state_dict()["0.weight"].any()
    assert torch.equal(net[1].state_dict(prefix="x.")["x.weight"], stored(net[1].weight))
    loaded = through(torch.save, torch.load, net.state_dict())
    other = tied()
    other.load_state_dict(loaded)
    assert torch.equal(other[1].weight, stored(net[1].weight))


@pytest.mark.parametrize("assign", [False, True])
def test_loading_a_state(assign: bool) -> None:
    net, other = mlp(), mlp()
    session = apply(PLAN, net)
    with torch.no_grad():
        for p in other.parameters():
            p.normal_()
    weighted(net(rows(97))).backward()
    net.load_state_dict(copy.deepcopy(other.state_dict()), assign=assign)
    net(rows(97))
    for p, q in zip(net.parameters(), other.parameters(), strict=True):
        assert torch.equal(p.detach(), rounded(q) if q.dim() > 1 else q)
    assert parameter_bytes(net) < FEW
    assert len(session.changes) == 1
    apply(PLAN, other)
    assert torch.equal(net(rows(97)), other(rows(97)))
    saved = net.state_dict()
    net.load_state_dict(saved)
    assert all(torch.equal(a, b) for a, b in zip(net.state_dict().values(), saved.values(), strict=True))


def test_steps_through_modules_pack_what_was_loaded_and_what_an_interrupt_left() -> None:
    """Code that calls net.body alone runs no hook of the model itself."""
    net = nn.Module()
    net.body = mlp()

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    with apply(PLAN, net) as session:
        nbytes = session.weight_bytes
        net.load_state_dict(copy.deepcopy(net.state_dict()), assign=True)
        weighted(net.body(rows(97))).backward()
        assert session.weight_bytes == nbytes and parameter_bytes(net) < FEW
        handle = net.body[2].register_forward_pre_hook(stop)
        with pytest.raises(KeyboardInterrupt):
            net.body(rows(97))
        handle.remove()
        weighted(net.body(rows(97))).backward()
        assert parameter_bytes(net) < FEW


def test_a_parameter_that_was_replaced_is_a_row() -> None:
    net = mlp()
    session = apply(PLAN, net)
    net[2].weight = nn.Parameter(torch.randn(64, 128))
    assert [row.reason for row in session.changes if row.slot == "weight=2.weight"] == ["the parameter was replaced after apply"]
    weighted(net(rows(97))).backward()
    assert type(net[2].weight) is nn.Parameter


# --- conversions --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_to_another_dtype(dtype: torch.dtype) -> None:
    net = mlp()
    session = apply(PLAN, net)
    plain = copy.deepcopy(net)
    parameters = list(net.parameters())
    for model in (net, plain):
        model.to(dtype)
    assert all(a is b for a, b in zip(net.parameters(), parameters, strict=True))
    assert {p.dtype for p in net.parameters()} == {dtype}
    x = rows(97).to(dtype)
    for model in (net, plain):
        weighted(model(x).float()).backward()
    assert_same(gradients(net), gradients(plain))
    assert {g.dtype for g in gradients(net)} == {dtype}
    assert parameter_bytes(net) < FEW
    session.close()
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), plain.parameters(), strict=True))


def test_to_another_memory_format() -> None:
    net = pictures_net()
    apply(PLAN, net)
    plain = copy.deepcopy(net)
    x = pictures().to(memory_format=torch.channels_last)
    for model in (net, plain):
        model.to(memory_format=torch.channels_last)
        weighted(model(x)).backward()
    assert_same(gradients(net), gradients(plain))
    assert type(net[3].weight) is PackedParameter
    assert net[3].weight.stride() == plain[3].weight.stride()


def test_to_the_meta_device() -> None:
    net = mlp()
    session = apply(PLAN, net)
    net.to("meta")
    assert {(type(p), p.device.type) for p in net.parameters()} == {(nn.Parameter, "meta")}
    session.close()


# --- loops --------------------------------------------------------------------------------------------------------------

ROUNDED = "torch.optim.* updates . weights that are stored packed, and new values are rounded to nearest"
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=False),
    "sgd foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "sgd fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, foreach=False),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.3, foreach=False),
    "adam foreach": lambda p: torch.optim.Adam(p, lr=0.01, foreach=True),
    "adam fused": lambda p: torch.optim.Adam(p, lr=0.01, fused=True),
    "lbfgs": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=1),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_of_other_optimizers(name: str) -> None:
    """One step from the same gradients: what a plain parameter would be, rounded to nearest."""
    net = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
    apply(PLAN, net)
    plain = copy.deepcopy(net)
    optimizers = [OPTIMIZERS[name](model.parameters()) for model in (net, plain)]
    for model, optimizer in zip((net, plain), optimizers, strict=True):

        def closure(model: nn.Module = model, optimizer: torch.optim.Optimizer = optimizer) -> Tensor:
            optimizer.zero_grad()
            loss = weighted(model(rows(97)))
            loss.backward()
            clip_grad_norm_(model.parameters(), 1.0)
            return loss

        with pytest.warns(UserWarning, match=ROUNDED) if model is net else nullcontext():
            optimizer.step(closure)
    for p, q in zip(net.parameters(), plain.parameters(), strict=True):
        expected = rounded(q) if q.dim() > 1 else q.detach()
        assert torch.equal(p.detach(), expected) or (name == "lbfgs" and torch.allclose(p.detach(), expected, atol=1e-6))
    assert parameter_bytes(net) < FEW


def test_averages_of_weights() -> None:
    net = mlp()
    apply(PLAN, net)
    ema = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    own = [p.detach().clone() for p in net.parameters()]
    assert {type(p) for p in ema.parameters()} == {nn.Parameter}
    with torch.no_grad():
        for p in net.parameters():
            p.mul_(2)
        for mine, p in zip(own, net.parameters(), strict=True):
            mine.lerp_(p, 0.5)
    ema.update_parameters(net)
    ema.update_parameters(net)
    assert torch.equal(own[0], 0.75 * stored(net[0].weight))
    assert torch.equal(ema.module[0].weight, stored(net[0].weight))
    for p, e in zip(net.parameters(), ema.parameters(), strict=True):
        p.data.copy_(e.data)
        e.data.copy_(p.data)


def test_unpacked() -> None:
    net = mlp()
    session = apply(PLAN, net)
    plain = copy.deepcopy(net)
    with session.unpacked():
        assert {type(p) for p in net.parameters()} == {nn.Parameter}
        assert net[0].weight.data_ptr() != 0
        assert torch.equal(net(rows(97)), plain(rows(97)))
        net[0].weight.data.mul_(2)
        loss = weighted(net(rows(97))) + net[4].weight.square().sum()
        with session.unpacked():
            net[2].weight.data = torch.ones(64, 128)
    assert torch.equal(stored(net[0].weight), 2 * plain[0].weight)
    assert torch.equal(stored(net[2].weight), torch.ones(64, 128))
    with pytest.raises(RuntimeError, match="modified"):
        loss.backward()
    del loss
    net(rows(97))
    assert parameter_bytes(net) < FEW
    with session.unpacked():
        loss = weighted(net(rows(97))) + net[4].weight.square().sum()
    loss.backward()
    assert net[4].weight.grad is not None
    net(rows(97))
    assert parameter_bytes(net) < FEW


def test_close_gives_plain_parameters_back() -> None:
    net = tied()
    before = dict(vars(net[0].weight))
    session = apply(PLAN, net)
    values = [p.detach().clone() for p in net.parameters()]
    parameters = list(net.parameters())
    x = torch.arange(60)
    loss = weighted(net(x))
    session.close()
    assert all(a is b and type(a) is nn.Parameter for a, b in zip(net.parameters(), parameters, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), values, strict=True))
    assert vars(net[0].weight) == before
    loss.backward()  # a graph outlives its session
    found = gradients(net)
    net.zero_grad()
    weighted(net(x)).backward()
    assert_same(found, gradients(net))
    session.close()
    assert session.weight_bytes == 0
    apply(PLAN, net).close()


def test_parameters_outlive_their_model() -> None:
    net = mlp()
    apply(PLAN, net)
    parameters, expected = list(net.parameters()), [p.detach().clone() for p in net.parameters()]
    del net
    assert all(torch.equal(a, b) for a, b in zip(parameters, expected, strict=True))
    parameters[0].sum().backward()


def test_a_parameter_in_two_places() -> None:
    """A net uses the weight of another module of the same model, and of another model."""
    first = Net(lambda net, x: net.b(net.a(x)) @ net.more[0].weight, nn.Linear(64, 64))
    apply(PLAN, first)
    second = nn.Linear(64, 64)
    second.weight = first.a.weight
    plain_first, plain_second = copy.deepcopy([first, second])
    for a, b in ((first, second), (plain_first, plain_second)):
        weighted(b(a(rows(97)))).backward()
    assert_same(gradients(first), gradients(plain_first))
    assert parameter_bytes(first) < FEW


def test_a_model_and_its_weights_are_freed() -> None:
    net = mlp()
    session = apply(PLAN, net)
    weighted(net(rows(97))).backward()
    gone = [weakref.ref(net), *(weakref.ref(p) for p in net.parameters()), weakref.ref(weight_of(net[0].weight))]
    del net, session
    gc.collect()
    assert [ref() for ref in gone] == [None] * len(gone)


def test_who_looks_at_all_tensors_finds_no_trap() -> None:
    """As snippets that count memory do."""
    net = mlp()
    apply(PLAN, net)
    found = [t for t in gc.get_objects() if issubclass(type(t), Tensor) and t.layout is torch.strided]
    sizes = [(t.untyped_storage().nbytes(), t.size(), t.device, t.requires_grad) for t in found]
    assert len(sizes) > 8


@pytest.mark.filterwarnings(f"ignore:{ROUNDED}")
def test_many_steps_at_constant_bytes() -> None:
    net = mlp()
    apply(PLAN, net)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    seen, counts = set[int](), list[int]()
    for number in range(120):
        loss = net(rows(97)).square().mean() + net[0].weight.square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        del loss
        if number % 40 == 39:
            gc.collect()
            seen.add(live_bytes())
            counts.append(len(gc.get_objects()))
    assert len(seen) == 1
    assert max(counts) - min(counts) < 40  # fewer than one for each step
