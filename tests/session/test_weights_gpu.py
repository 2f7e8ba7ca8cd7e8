"""Packed weights on a GPU: the same gradients, the bytes that the allocator really has, and errors instead of illegal addresses."""

from __future__ import annotations

import copy
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from paredown import Plan, apply, round_trip
from paredown.optim.packed_parameter import PackedParameter
from paredown.optim.packed_weight import weight_of
from paredown.session.weights.unattached_weights import SHARED
from tests.session.nets import assert_same, gradients, rows
from tests.session.test_weights import CASES, PLAN, Lstm, assert_equal, mlp, parameter_bytes, tokens

pytestmark = pytest.mark.gpu


def weighted(y: torch.Tensor) -> torch.Tensor:
    return (y.float() * torch.linspace(-1, 1, y.numel(), device=y.device).view(y.shape)).sum()


def autocast() -> AbstractContextManager[Any]:
    return torch.autocast("cuda", torch.bfloat16)


ALIKE = [(name, around) for name in CASES if name not in ("lstm", "bfloat16") for around in (nullcontext, autocast)]
OTHERWISE = ("custom function", "twice in a pass")  # the first mixes dtypes under autocast; the second is cast twice


@pytest.mark.parametrize(("name", "around"), [case for case in ALIKE if case[1] is nullcontext or case[0] not in OTHERWISE])
def test_steps_are_those_of_a_plain_model(name: str, around: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    net, x = CASES[name]()
    session = assert_equal(net.cuda(), x.cuda(), loss=weighted, around=around)
    assert all("fewer than" in row.slot for row in session.changes)


@pytest.mark.filterwarnings("ignore:RNN module weights")
def test_weights_of_an_lstm_lie_in_one_memory() -> None:
    net = Lstm().cuda()
    session = apply(PLAN, net)
    plain = copy.deepcopy(net)
    for model in (net, plain):
        weighted(model(tokens().cuda())).backward()
    assert_same(gradients(net), gradients(plain))
    assert {row.slot for row in session.changes if row.reason == SHARED} >= {"weight=body.weight_hh_l0"}


def deep() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(1024, 1024, bias=False) for _ in range(16)])


def allocate_workspaces(model: nn.Module, x: torch.Tensor, around: Any) -> None:
    """Runs a step: cuBLAS allocates its workspaces at the first products of a process, and keeps them."""
    with around():
        y = weighted(model(x))
    y.backward()
    model.zero_grad()


@pytest.mark.parametrize("around", [nullcontext, autocast])
def test_bytes_of_the_allocator(around: Any) -> None:
    """16 layers of 4 MiB each: 1 MiB packed. A forward pass has one of them at a time, and keeps none for backward."""
    mib = 1 << 20
    net = deep().cuda()
    x = rows(8, 1024).cuda().requires_grad_()
    allocate_workspaces(net, x, around)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    session = apply(PLAN, net)
    packed = torch.cuda.memory_allocated()
    assert packed - before < -(64 - 17) * mib
    for _ in range(2):
        with around():
            y = weighted(net(x))
        kept = torch.cuda.memory_allocated() - packed
        assert kept < 3 * mib, "weights or their casts are kept for backward"
        del y
    for p in net.parameters():
        p.grad = torch.zeros(1024, 1024, device="cuda")
    torch.cuda.reset_peak_memory_stats()
    start = torch.cuda.memory_allocated()
    with around():
        y = weighted(net(x))
    y.backward()
    assert torch.cuda.max_memory_allocated() - start < 24 * mib
    assert torch.cuda.memory_allocated() - start < 3 * mib
    assert session.weight_bytes == 16 * (1 << 20) + 16 * (1 << 14)


class Checkpointed(nn.Sequential):
    """Runs its layers, after the first one, in a checkpoint."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, *others = self
        return checkpoint(nn.Sequential(*others), first(x), use_reentrant=False)


@pytest.mark.parametrize("format", ["nf4/64@bf16", "int8/64@bf16"])
@pytest.mark.parametrize("container", [nn.Sequential, Checkpointed])
@pytest.mark.parametrize("around", [nullcontext, autocast])
def test_frozen_linear_layers(around: Any, container: type[nn.Sequential], format: str) -> None:
    """Gradients of a trained layer through 16 frozen ones, of 4 MiB each: those of the rounded weights, with one of them at a time."""
    net: Any = container(nn.Linear(1024, 1024), *deep().requires_grad_(False)).cuda()
    plain: Any = copy.deepcopy(net)
    for layer in plain[1:]:
        layer.weight.data.copy_(round_trip(layer.weight.detach(), format))
    x = rows(8, 1024).cuda()
    allocate_workspaces(plain, x, around)
    apply(Plan.uniform(frozen=format), net)
    for _ in range(3):
        for model in (net, plain):
            model.zero_grad(set_to_none=False)
            torch.cuda.reset_peak_memory_stats()
            start = torch.cuda.memory_allocated()
            with around():
                y = weighted(model(x))
            y.backward()
            assert (
                model is plain or torch.cuda.max_memory_allocated() - start < 24 << 20
            )  # one weight, its gradients and workspaces
        assert_same(gradients(net), gradients(plain))


def test_moving_a_model() -> None:
    net = mlp()
    apply(PLAN, net)
    plain = copy.deepcopy(net)
    for model in (net, plain):
        model.cuda()
        weighted(model(rows(97).cuda())).backward()
    assert_same(gradients(net), gradients(plain))
    assert {p.device.type for p in net.parameters()} == {"cuda"}
    assert weight_of(net[0].weight).packed.device.type == "cuda"
    assert type(net[0].weight) is PackedParameter
    net.cpu()
    assert torch.equal(net[0].weight.detach(), plain[0].weight.cpu())
    assert parameter_bytes(net) < 3000


def test_a_fused_optimizer() -> None:
    net = mlp().cuda()
    apply(PLAN, net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1, fused=True)
    before = net[0].weight.detach().clone()
    weighted(net(rows(97).cuda())).backward()
    with pytest.warns(UserWarning, match="torch.optim.AdamW updates 3 weights that are stored packed"):
        optimizer.step()
    assert (net[0].weight.detach() - before).abs().mean() > 0.05


def test_memory_that_is_not_there_is_a_sentence() -> None:
    net = mlp().cuda()
    apply(PLAN, net)
    with torch._C.DisableTorchFunctionSubclass(), pytest.raises(RuntimeError, match="is stored packed"):
        net[0].weight.sum()  # as an extension in C++ would
    torch.cuda.synchronize()
