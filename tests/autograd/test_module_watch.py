"""What Watch reports: every tensor that autograd saves in the model, against torch's own hooks, with names that do not change."""

# pyright: reportPrivateUsage=false

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from paredown.autograd import saved_reports
from paredown.autograd.graph import Pass, Saved, kind_of
from paredown.autograd.module_watch import Watch
from paredown.autograd.operations import ROWS, Use, row_of
from paredown.models import MODELS, random_batch
from tests.support.values import listed


def watched(model: nn.Module, *inputs: Any) -> list[Saved]:
    """Every report of one forward pass."""
    reported: list[Saved] = []
    watch = Watch(model, reported.append)
    watch.attach()
    model(*inputs)
    watch.detach()
    return reported


def saved_by_hooks(model: nn.Module, *inputs: Any) -> list[tuple[int, ...]]:
    """Shapes of all tensors that autograd passes to saved-tensor hooks."""
    shapes: list[tuple[int, ...]] = []

    def pack(tensor: Tensor) -> Tensor:
        shapes.append(tuple(tensor.shape))
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(*inputs)
    return sorted(shapes)


@pytest.mark.parametrize("name", MODELS)
def test_all_that_autograd_saves_is_reported(name: str) -> None:
    torch.manual_seed(0)
    model, (x, _) = MODELS[name](), random_batch(name, 2)
    expected = saved_by_hooks(model, x)
    reported = sorted(tuple(saved.tensor.shape) for saved in watched(model, x) if saved.tensor is not None)
    assert reported == expected


@pytest.mark.parametrize("name", MODELS)
def test_names_are_unique_and_do_not_change(name: str) -> None:
    torch.manual_seed(0)
    model = MODELS[name]()
    one, two, larger = ([saved.name for saved in watched(model, random_batch(name, num)[0])] for num in (2, 2, 3))
    assert one == two == larger
    assert len(set(one)) == len(one)


@pytest.mark.parametrize("name", MODELS)
def test_parameters_and_inputs_have_their_kind(name: str) -> None:
    torch.manual_seed(0)
    model, (x, _) = MODELS[name](), random_batch(name, 2)
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    buffers = {b.untyped_storage().data_ptr() for b in model.buffers()}
    for saved in watched(model, x):
        assert saved.tensor is not None
        at = saved.tensor.untyped_storage().data_ptr()
        expected = "weight" if at in parameters else "buffer" if at in buffers else "input" if at == x.data_ptr() else "activation"
        assert saved.kind == expected or saved.tensor.numel() == 0, saved.name


class Named(nn.Module):
    """A model with one case of each kind of slot name."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.relu, self.norm = nn.Conv2d(3, 3, 1), nn.ReLU(), nn.BatchNorm2d(3)
        self.inner = nn.Sequential(nn.Linear(8, 8), nn.Sigmoid())

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.conv(x))
        x = self.relu(self.norm(x * x.exp()))
        x = x * torch.tanh(x) * 2 + functional.gelu(x)
        return self.inner(x) * x


def test_names() -> None:
    reported = watched(Named(), torch.randn(2, 3, 8, 8))
    names = [
        s.name for s in reported if s.kind == "activation" and s.use is not Use.EXACT and s.tensor is not None and s.tensor.dim()
    ]
    assert names == listed("""
        relu:output :exp.output :mul.other :mul.input norm:input relu@2:output :tanh.output :mul#2.other :mul#2.input :gelu.input
        inner.0:input inner.1:output :mul#4.other :mul#4.input
    """)


def test_nothing_is_reported_without_gradients_or_outside() -> None:
    model, reported = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), []
    watch = Watch(model, reported.append)
    watch.attach()
    with torch.no_grad():
        model(torch.randn(2, 4))
    model[0](torch.randn(2, 4))
    assert not reported
    before = torch.randn(2, 4, requires_grad=True).exp().sin()
    model(before)
    assert [saved.name for saved in reported if saved.kind != "weight"] == ["0:input", "1:output"]  # not what came before
    assert watch.where() == ""
    watch.detach()
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_a_second_forward_pass_does_not_report_the_first() -> None:
    model, reported = nn.Sequential(nn.Linear(4, 4), nn.Sigmoid()), []
    watch = Watch(model, reported.append)
    watch.attach()
    model(model(torch.randn(2, 4)))
    assert [saved.name for saved in reported if saved.kind != "weight"] == ["0:input", "1:output", "0:input", "1:output"]


def test_grad_mode_is_restored() -> None:
    class Teacher(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            h = self.a(x).exp()
            with torch.no_grad():
                y = self.b(h)
                assert not torch.is_grad_enabled()
            assert torch.is_grad_enabled()
            return h * y

    assert not [saved for saved in watched(Teacher(), torch.randn(2, 4)) if saved.module == "b"]


def test_rows_are_of_nodes_that_exist() -> None:
    """A row under a name that autograd does not use would never be read."""
    names = {
        name.removesuffix("0").removesuffix("1").removesuffix("2").removesuffix("Backward") for name in dir(torch._C._functions)
    }
    made_elsewhere = {"CheckpointFunction", "CompiledFunction", "QuantizeRows", "RowProduct", "TileInput"}  # by torch and paredown
    missing = {name for name in ROWS if name not in names} - made_elsewhere if len(names) > 100 else set()
    assert not missing
    assert row_of("ConvolutionBackward0") is ROWS["Convolution"]
    assert row_of("NoSuchBackward7").op == "NoSuchBackward7"


def test_a_storage_that_was_a_weights_is_an_activation() -> None:
    """A packed weight gives its decoded storage back when its module ends, and the allocator may give the address to a dropout mask."""
    layer = nn.BatchNorm1d(8)
    forward = Pass(frozenset(), [layer], [])
    weight, buffer = layer.weight.data, layer.running_mean
    assert isinstance(buffer, Tensor)
    assert (kind_of(weight, "other", forward), kind_of(buffer, "other", forward)) == ("weight", "buffer")
    layer.weight.data = torch.ones(8)
    assert (kind_of(weight, "other", forward), kind_of(buffer, "other", forward)) == ("activation", "buffer")


class Repeated(nn.Module):
    """Calls a module as often as `num_calls` says."""

    num_calls = 1

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.first, self.inner = nn.Linear(8, 8), inner

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(self.num_calls):
            x = self.inner(x)
        return x


class SharedInside(nn.Module):
    """A checkpointed layer, and a module that runs inside the layer and again after it."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Sigmoid()
        self.layer = Repeated(self.shared)

    def forward(self, x: Tensor) -> Tensor:
        return self.shared(checkpoint(self.layer, x, use_reentrant=False))


def test_the_inside_of_a_checkpointed_layer_is_reported_once() -> None:
    model, x = SharedInside(), torch.randn(4, 8)
    reported: list[Saved] = []
    watch = Watch(model, reported.append, min_numel=1)
    watch.attach()
    passes: list[list[str]] = []
    for num_calls in (1, 1, 1, 2):
        model.layer.num_calls = num_calls
        model(x).sum().backward()
        passes.append([saved.name for saved in reported])
        reported.clear()
    kept = [name for name in passes[0] if not name.startswith(("layer.", "shared:"))]
    assert any("checkpoint" in name for name in kept) and "shared@2:output" in kept
    assert len(kept) < len(passes[0]) and passes[1] == passes[2] == kept
    assert passes[3] == [name.replace("shared@2", "shared@3") for name in kept], "calls inside are counted in every pass"


class Between(nn.Module):
    """Operations between the calls of modules; `changed` replaces one of them by another, with as many nodes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.changed = ""

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        a, b = h.sigmoid(), h.tanh()
        mixed = a + b if self.changed == "add" else a * b
        y = self.second(mixed)
        last = torch.sin(y) if self.changed == "sin" else torch.exp(y)
        return last if self.changed != "views" else last.view(-1).view_as(y).exp()


CHANGES = ("", "", "", "add", "", "sin", "", "", "views", "views", "views", "", "")


def test_passes_that_repeat_earlier_ones_report_what_a_first_pass_reports() -> None:
    model = Between()
    reported: list[Saved] = []
    watch = Watch(model, reported.append, min_numel=1)
    watch.attach()
    for number, changed in enumerate(CHANGES):
        model.changed = changed
        x = torch.randn(4 + number % 2, 8)
        model(x).sum()
        found = [(saved.name, saved.use, saved.kind) for saved in reported if saved.kind == "activation"]
        reported.clear()
        watch.detach()
        fresh = watched_again(model, x)
        watch.attach()
        assert sorted(found, key=str) == sorted(fresh, key=str), f"pass {number}, {changed or 'unchanged'}"


def watched_again(model: nn.Module, x: Tensor) -> list[tuple[str, Use, str]]:
    """The activations that a new Watch reports."""
    reported: list[Saved] = []
    watch = Watch(model, reported.append, min_numel=1)
    watch.attach()
    model(x).sum()
    watch.detach()
    return [(saved.name, saved.use, saved.kind) for saved in reported if saved.kind == "activation"]


def test_later_passes_do_not_search_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x, searched = Between(), torch.randn(4, 8), list[int]()
    watch = Watch(model, lambda saved: None, min_numel=1)
    search = saved_reports.new_nodes

    def counted(values: Any, forward: Pass) -> list[tuple[int, Any]]:
        searched.append(1)
        return search(values, forward)

    monkeypatch.setattr(saved_reports, "new_nodes", counted)
    watch.attach()
    numbers: list[int] = []
    for _ in range(4):
        model(x).sum()
        numbers.append(len(searched))
        searched.clear()
    assert numbers[0] > 0 and numbers[2:] == [0, 0]


def test_modules_inside_of_checkpointed_layers_have_hooks_in_the_first_pass_alone() -> None:
    """Later passes report nothing there; a layer that runs without its checkpoint has them again, with the names of its slots."""

    class Stack(nn.Module):
        is_checkpointed = True

        def __init__(self) -> None:
            super().__init__()
            self.layer, self.last = nn.Sequential(nn.Linear(64, 64), nn.GELU()), nn.Linear(64, 64)

        def forward(self, x: Tensor) -> Tensor:
            x = x * 1.5
            return self.last(checkpoint(self.layer, x, use_reentrant=False) if self.is_checkpointed else self.layer(x))  # type: ignore[arg-type]

    model, names = Stack(), list[str]()
    watch = Watch(model, lambda saved: names.append(saved.name), min_numel=4096)
    watch.attach()
    x = torch.randn(64, 64, requires_grad=True)
    model(x)
    watch.end_first_pass()
    assert not model.layer[0]._forward_hooks and model.layer._forward_hooks and model.last._forward_hooks
    names.clear()
    model(x).sum().backward()
    assert names == ["layer:checkpoint.input", "last:input"]
    model.is_checkpointed = False
    names.clear()
    model(x)
    assert model.layer[0]._forward_hooks and {"layer.0:input", "layer.1:input"} <= set(names)
    watch.detach()
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
