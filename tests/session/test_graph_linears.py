"""Frozen packed weights in compiled graphs: they stay packed, with the outputs and gradients of eager mode, and nothing is silent."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import silu
from torch.utils.checkpoint import checkpoint

from paredown import Plan, apply, footprint, trace_step
from paredown.errors import ApplyError
from paredown.optim.packed_parameter import PackedParameter
from tests.programs.compiling import compiles_quickly

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # torch's own
FORMATS = ["int8/64@bf16", "nf4/64@bf16", "e2m1fn/16@e4m3fn"]
WIDTH = 128


@pytest.fixture(autouse=True)
def _quick() -> Iterator[None]:
    torch.compiler.reset()
    with compiles_quickly():
        yield
    torch.compiler.reset()


class Adapted(nn.Module):
    """A frozen linear layer and a trained adapter of rank 4."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.base = nn.Linear(inputs, outputs).requires_grad_(False)
        self.a, self.b = nn.Linear(inputs, 4, bias=False), nn.Linear(4, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.b(self.a(x))


class Layers(nn.Module):
    """Two adapted layers, as checkpointed segments if requested, and a plain frozen weight that a function uses."""

    def __init__(self, *, is_checkpointed: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down, self.is_checkpointed = Adapted(WIDTH, 2 * WIDTH), Adapted(2 * WIDTH, WIDTH), is_checkpointed

    def forward(self, x: Tensor) -> Tensor:
        run: Any = (lambda f, y: checkpoint(f, y, use_reentrant=False)) if self.is_checkpointed else lambda f, y: f(y)
        return x + self.down(silu(run(self.up, x)))


def rows(device: Any = "cpu") -> Tensor:
    return torch.randn(24, WIDTH, generator=torch.Generator().manual_seed(1)).to(device)


def step(model: Any, net: nn.Module, *, autocast: bool = False) -> list[Tensor]:
    net.zero_grad()
    device = net.get_parameter("up.a.weight").device
    with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
        y = model(rows(device))
    y.float().pow(3).sum().backward()
    return [p.grad for p in net.parameters() if p.grad is not None]


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("kind", ["plain", "checkpointed", "autocast"])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_graphs_decode_frozen_weights_as_eager_mode_does(format: str, kind: str, device: str) -> None:
    net, plan = Layers(is_checkpointed=kind == "checkpointed").to(device), Plan.uniform(frozen=format)
    other = copy.deepcopy(net)
    with apply(plan, other):
        expected = step(other, other, autocast=kind == "autocast")
    with apply(plan, net) as session:
        packed_bytes = session.weight_bytes
        model = session.compile()
        step(model, net, autocast=kind == "autocast")
        found = step(model, net, autocast=kind == "autocast")
        assert session.weight_bytes == packed_bytes
        assert type(net.up.base.weight) is type(net.down.base.weight) is PackedParameter
        assert not [row for row in session.changes if row.slot.startswith("weight=")]
        largest = 0.02 if kind == "autocast" else 1e-5  # kernels of Inductor add in another order, and round to bfloat16 less often
        for value, wanted in zip(found, expected, strict=True):
            assert float((value - wanted).norm() / wanted.norm()) < largest
    assert type(net.up.base.weight) is nn.Parameter and "forward" not in vars(net.up.base)


def test_a_graph_reads_the_codes_of_loaded_weights() -> None:
    torch.manual_seed(3)
    net, plan = Layers(), Plan.uniform(frozen="int8/64@bf16")
    loaded = {name: torch.randn_like(value) / 16 for name, value in net.state_dict().items()}
    with apply(plan, net) as session, torch.no_grad():
        model = session.compile()
        model(rows())
        net.load_state_dict(loaded)
        found = model(rows())
    other = Layers()
    other.load_state_dict(loaded)
    with apply(plan, other), torch.no_grad():
        torch.testing.assert_close(found, other(rows()))


def test_a_layer_that_is_trained_later_is_an_error() -> None:
    net = Layers()
    with apply(Plan.uniform(frozen="nf4/64@bf16"), net) as session:
        model = session.compile()
        step(model, net)
        net.up.base.requires_grad_(True)
        with pytest.raises(ApplyError, match=r"layer 'up\.base' was frozen .* compile again"):
            step(model, net)


def test_copies_are_plain_and_compute_the_same() -> None:
    net = Layers()
    with apply(Plan.uniform(frozen="int8/64@bf16"), net) as session, torch.no_grad():
        session.compile()
        other = copy.deepcopy(net)
        assert type(other.up.base.weight) is nn.Parameter
        torch.testing.assert_close(other(rows()), net(rows()))


def test_weights_that_are_tied_or_not_of_a_linear_layer_are_decoded_and_listed() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.head = nn.Embedding(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
            self.head.weight = self.words.weight
            self.conv, self.last = nn.Conv1d(WIDTH, WIDTH, 1), nn.Linear(WIDTH, WIDTH)
            self.requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.conv(self.head(self.words(x)).mT).mT)

    net = Tied()
    with apply(Plan.uniform(frozen="int8/64@bf16"), net) as session:
        session.compile()
        names = {row.slot for row in session.changes if "torch.compile" in row.reason}
        assert names == {"weight=words.weight", "weight=conv.weight"}
        assert type(net.last.weight) is PackedParameter and type(net.words.weight) is nn.Parameter


def test_the_whole_session_is_as_before_after_close() -> None:
    net = Layers()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    session = apply(Plan.uniform(frozen="int8/64@bf16"), net)
    step(session.compile(), net)
    state = net.state_dict()
    session.close()
    assert all(torch.equal(net.state_dict()[name], value) for name, value in state.items())
    assert state.keys() == before.keys() and all(state[name].shape == value.shape for name, value in before.items())


def test_predictions_of_compiled_steps_count_packed_weights_and_one_decoded_copy() -> None:
    net, plan = Layers(), Plan.uniform(frozen="nf4/64@bf16")
    trace = trace_step(net, (rows(), rows()), loss=nn.functional.mse_loss, optimizer="adamw", compiled=True, device="cpu")
    weights = [net.up.base.weight, net.down.base.weight]
    stored = sum(nf4_bytes(weight) for weight in weights)
    saved = sum(weight.nbytes for weight in weights) - stored - max(weight.nbytes for weight in weights)
    assert footprint(trace, Plan()).peak_bytes - footprint(trace, plan).peak_bytes == saved


def nf4_bytes(weight: Tensor) -> int:
    """Bytes of a weight in nf4: half a byte for each value, and a scale in bfloat16 for 64 of them."""
    return weight.numel() // 2 + weight.numel() // 64 * 2


def test_an_input_of_another_dtype_is_torchs_error() -> None:
    net = Layers().bfloat16()
    with apply(Plan.uniform(frozen="int8/64@bf16"), net) as session, pytest.raises(RuntimeError, match="dtype"):
        session.compile()
        net(rows())
