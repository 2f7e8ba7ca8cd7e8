"""Compiled sessions whose graphs are of parts of the model: names of slots, FSDP2 and DDP with one process of gloo.

Graphs run operation by operation (tests/programs/compiling.py).
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import scaled_dot_product_attention
from torch.nn.parallel import DistributedDataParallel

from paredown import Plan, Session, apply
from tests.programs.compiling import compiles_quickly
from tests.session.nets import INT8, activations, gradients, relative_error, rows, weighted
from tests.support.processes import needs_gloo

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")  # torch's own


class Layer(nn.Module):
    """Two linear layers with a norm between them; a graph break inside if asked for."""

    def __init__(self, *, is_broken: bool) -> None:
        super().__init__()
        self.a, self.norm, self.b, self.is_broken = nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 64), is_broken

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.norm(self.a(x)))
        if self.is_broken:
            torch._dynamo.graph_break()
        return torch.sigmoid(self.b(h))


class Net(nn.Module):
    """One such layer inside a model."""

    def __init__(self, *, is_broken: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers, self.head = nn.ModuleList([Layer(is_broken=is_broken)]), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers[0](x))


@pytest.fixture(autouse=True)
def _quickly() -> Iterator[None]:
    with compiles_quickly():
        yield


@pytest.fixture
def _one_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def packed(session: Session) -> set[str]:
    assert session._compiled is not None
    return {name for d in session._compiled.decisions.values() if d.format is not None for name in d.slot.names}


def plain_gradients(net: nn.Module) -> list[Tensor]:
    weighted(net(rows())).backward()
    return gradients(net)


def test_slots_of_graphs_after_a_break_have_their_names() -> None:
    """A rule for one slot of a layer that is compiled by itself is followed."""
    expected = plain_gradients(Net())
    net = Net(is_broken=True)
    session = apply(activations(INT8).set("layers.0.norm:input", None), net)
    compiled = session.compile()
    weighted(compiled(rows())).backward()
    assert relative_error(gradients(net), expected) < 0.03
    eager = apply(activations(INT8), other := Net())
    other(rows())
    assert session._compiled is not None
    names = {name for d in session._compiled.decisions.values() for name in d.slot.names}
    assert names and names <= {*eager._activations.decisions, *eager._activations.not_packed}
    assert "layers.0.norm:input" not in packed(session)


def test_layers_that_are_compiled_one_by_one() -> None:
    """Each layer has a session and graphs of its own; what is between the layers runs in eager mode."""
    torch.manual_seed(0)
    layers = nn.Sequential(*(Layer(is_broken=False) for _ in range(3)))
    expected = plain_gradients(layers)
    layers.zero_grad()
    sessions = [apply(activations(INT8), layer) for layer in layers]
    compiled = [session.compile() for session in sessions]
    for _ in range(2):
        x = rows()
        for layer in compiled:
            x = layer(x)
        assert all(session.stored_bytes > 0 for session in sessions)
        layers.zero_grad()
        weighted(x).backward()
        assert 1e-4 < relative_error(gradients(layers), expected) < 0.03
        assert not any(session.stored_bytes for session in sessions)
    assert all("norm:input" in packed(session) and len(session._compiled.reports) == 1 for session in sessions)  # type: ignore[union-attr]


def sharded(net: Any) -> nn.Module:
    mesh = init_device_mesh("cpu", (1,))
    parts = net if isinstance(net, nn.Sequential) else [net.layers[0]]
    for part in parts:
        fully_shard(part, mesh=mesh)
    return fully_shard(net, mesh=mesh)


def sequential() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))


@needs_gloo
@pytest.mark.usefixtures("_one_process")
@pytest.mark.parametrize(("make", "is_packed"), [(Net, True), (sequential, False)])
@pytest.mark.parametrize("is_sharded_first", [True, False])
def test_sharded_models(make: Callable[[], nn.Module], is_packed: bool, is_sharded_first: bool) -> None:
    expected = plain_gradients(make())
    net = make()
    net = sharded(net) if is_sharded_first else net
    session = apply(activations(INT8), net)
    compiled = session.compile()
    net = net if is_sharded_first else sharded(net)
    weighted(compiled(rows())).backward()
    found: list[Any] = [p.grad for p in net.parameters()]
    assert (1e-4 if is_packed else -1) < relative_error([g.full_tensor() for g in found], expected) < 0.03
    assert ("layers.0.norm:input" in packed(session)) is is_packed
    reasons = [change.reason for change in session.changes if change.slot == "the model"]
    assert bool(reasons) is not is_packed and all("such as nn.Sequential" in reason for reason in reasons)


class Attention(nn.Module):
    """Self-attention of four heads, whose logits a session measures."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(256), nn.Linear(256, 768), nn.Linear(256, 256)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(self.norm(x)).unflatten(-1, (3, 4, 64)).permute(2, 0, 3, 1, 4)
        return x + self.out(scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2))


@needs_gloo
@pytest.mark.usefixtures("_one_process")
def test_graphs_that_ddp_splits_are_packed() -> None:
    """DDP splits graphs at its buckets, and calls each part with fake tensors, whose numbers cannot be read."""
    torch.manual_seed(0)
    net, x = nn.Sequential(*(Attention() for _ in range(3))), torch.randn(4, 32, 256)
    weighted(net(x)).backward()
    expected = gradients(net)
    net.zero_grad()
    session = apply(activations(INT8), net)
    weighted(DistributedDataParallel(session.compile(), bucket_cap_mb=1)(x)).backward()
    assert session._compiled is not None and len(session._compiled.reports) > 1
    assert {f"{i}:scaled_dot_product_attention.query" for i in range(3)} <= packed(session)
    assert 1e-4 < relative_error(gradients(net), expected) < 0.03


def test_a_plan_without_activations_needs_no_graph() -> None:
    net = sequential()
    session = apply(Plan.uniform(moment1=INT8), net)
    session.compile()
    assert not [change for change in session.changes if change.slot == "the model"]
