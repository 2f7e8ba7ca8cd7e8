"""Checkpointed modules of a plan: the same gradients to the bit, the bytes that a footprint predicts, and no hooks left after close."""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from paredown import Guard, Plan, Role, apply, footprint, optim, trace_step
from paredown.autograd import saved_reports
from paredown.errors import ApplyError
from tests.predict.steps import peak_bytes, step_of, traced
from tests.session.nets import INT8, assert_same, gradients, relative_error

LAYERS = {"gpt": "layers.*", "vit": "layers.*", "resnet18": "layer?.?", "convnext": "groups.?.?", "unet": "down.?"}
CASES = pytest.mark.parametrize("name", LAYERS)
INPUTS = Plan.uniform(activation=None).set("*:checkpoint.input", INT8)  # packs the inputs of checkpointed layers only


class Counted(nn.Module):
    """A layer with dropout that counts its forward passes."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.body = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.GELU(), nn.Dropout(0.3), nn.Linear(64, 64))

    def forward(self, x: Tensor, *, factor: float = 1.0) -> Tensor:
        self.calls += 1
        return x + factor * self.body(x)


class Deep(nn.Module):
    """Three layers, called with a keyword."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Counted() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, factor=0.5)
        return x


def run(model: nn.Module, batch: Any, loss: Callable[..., Tensor]) -> list[Tensor]:
    """Gradients of one step, after zeroing."""
    torch.manual_seed(3)
    model.zero_grad()
    loss(model(batch[0]), batch[1]).backward()
    return gradients(model)


def deep_step(model: nn.Module) -> list[Tensor]:
    return run(model, (torch.randn(128, 64, generator=torch.Generator().manual_seed(1)), None), lambda y, _: (y * y).mean())


def held_bytes(model: nn.Module, batch: Any, loss: Callable[..., Tensor]) -> int:
    """Bytes that forward and loss allocate and do not free while the loss is held and the output is not."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as seen:
        output = model(batch[0])
        value = loss(output, batch[1])
        del output
    events: Any = seen.profiler.kineto_results.events()  # type: ignore[union-attr]
    assert value.grad_fn is not None
    return sum(event.nbytes() for event in events if event.name() == "[memory]")


@CASES
def test_gradients_and_buffers_are_the_same_to_the_bit(name: str) -> None:
    model, batch, loss = step_of(name)
    other = copy.deepcopy(model)
    expected = run(model, batch, loss)
    with apply(Plan().recomputing(LAYERS[name]), other):
        assert_same(run(other, batch, loss), expected)
    for (key, found), wanted in zip(other.named_buffers(), model.buffers(), strict=True):
        assert torch.equal(found, wanted), key


def test_dropout_keywords_and_batch_norms() -> None:
    plain, model = Deep(), Deep()
    session = apply(Plan().recomputing("layers.0", "layers.2"), model)
    for _ in range(2):
        expected, found = deep_step(plain), deep_step(model)
        assert_same(found, expected)
    assert [layer.calls for layer in model.layers] == [4, 2, 4]
    for (key, buffer), other in zip(plain.state_dict().items(), model.state_dict().values(), strict=True):
        assert torch.equal(buffer, other), key
    session.close()
    deep_step(model)
    assert [layer.calls for layer in model.layers] == [5, 3, 5]


def test_nothing_of_the_model_changes() -> None:
    model = Deep()
    names, kind, keys = [n for n, _ in model.named_modules()], type(model.layers[0]), list(model.state_dict())
    session = apply(Plan().recomputing("layers.*"), model)
    assert ([n for n, _ in model.named_modules()], type(model.layers[0]), list(model.state_dict())) == (names, kind, keys)
    twin = copy.deepcopy(model)
    deep_step(twin)
    assert [layer.calls for layer in twin.layers] == [1, 1, 1], "a copy is a plain model"
    model.eval()
    with torch.no_grad():
        model(torch.zeros(2, 64))
    assert [layer.calls for layer in model.layers] == [1, 1, 1]
    session.close()
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in model.modules())


def test_a_forward_pass_that_raises_leaves_nothing_behind() -> None:
    model = Deep()
    plain = deep_step(copy.deepcopy(model))
    session = apply(Plan().recomputing("layers.*"), model)
    with pytest.raises(RuntimeError, match="mat1"):
        model(torch.zeros(2, 5))
    torch.zeros(2, 64, requires_grad=True).sin().sum().backward()
    assert_same(deep_step(model), plain)
    session.close()


def test_beside_packed_activations_and_weights() -> None:
    model, batch, loss = step_of("gpt")
    plain = run(copy.deepcopy(model), batch, loss)
    plan = Plan.uniform(activation=INT8).recomputing("layers.0")
    session = apply(plan, model)
    assert 0 < relative_error(run(model, batch, loss), plain) < 0.02
    assert not [change for change in session.changes if change.slot.startswith("layers.0.")]
    assert session.stored_bytes == 0
    session.close()
    low = apply(Plan.preset("lpmm").recomputing("layers.*"), model)
    opt = optim.AdamW(model.parameters(), lr=1e-3)
    first = loss(model(batch[0]), batch[1]).item()
    for _ in range(8):
        run(model, batch, loss)
        opt.step()
    assert loss(model(batch[0]), batch[1]).item() < first
    low.close()


@pytest.mark.parametrize(
    ("name", "layers"), [("gpt", ("layers.0",)), ("resnet18", ("layer1.*", "layer3.1")), ("vit", ("layers.1",))]
)
def test_what_is_inside_is_read_in_the_first_pass_alone(
    name: str, layers: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Later passes pack the same: the same gradients to the bit, the same names, and fewer nodes looked at."""
    model, batch, loss = step_of(name)
    read: list[str] = []
    describe = saved_reports.describe
    monkeypatch.setattr(saved_reports, "describe", lambda *args: read.append(args[-1].path) or describe(*args))
    with apply(Plan.uniform(activation=INT8).recomputing(*layers), model) as session:
        first = run(model, batch, loss)
        changes, inside = session.changes, [path for path in read if session._checkpointed.has(path)]
        read.clear()
        assert_same(run(model, batch, loss), first)
        assert session.changes == changes
        inner = [part for module in session._checkpointed.modules for part in module.modules() if part is not module]
        assert inner and not any(part._forward_hooks or part._forward_pre_hooks for part in inner)
        held = loss(model(batch[0]), batch[1])
        third = session.stored_bytes
        held.backward()
    assert inside
    assert not any(session._checkpointed.has(path) for path in read)
    with apply(Plan.uniform(activation=INT8).recomputing(*layers), model) as anew:
        held = loss(model(batch[0]), batch[1])
        assert anew.stored_bytes == third


@pytest.mark.parametrize(
    ("name", "plan"), [*((name, Plan()) for name in LAYERS), *((name, INPUTS) for name in ("gpt", "convnext"))]
)
def test_the_bytes_that_wait_are_those_foreseen(name: str, plan: Plan) -> None:
    model, batch, loss = step_of(name, 16)
    trace = traced(name, 16)
    run(model, batch, loss)
    before = held_bytes(model, batch, loss)
    plan = plan.recomputing(LAYERS[name])
    with apply(plan, model):
        run(model, batch, loss)
        after = held_bytes(model, batch, loss)
    kept = [footprint(trace, of).by_role for of in (Plan(), plan)]
    predicted = [sum(sizes.get(role, 0) for role in (Role.ACTIVATION, Role.TEMPORARY)) for sizes in kept]
    assert after < 0.8 * before
    assert predicted[0] - predicted[1] == pytest.approx(before - after, rel=0.05)


@pytest.mark.parametrize(("name", "plan"), [("gpt", Plan()), ("vit", Plan()), ("gpt", Plan.preset("activations8"))])
def test_the_peak_is_the_one_foreseen(name: str, plan: Plan) -> None:
    """For networks without convolutions, for which the CPU's library allocates workspace."""
    model, batch, loss = step_of(name, 16)
    trace, plan = traced(name, 16), plan.recomputing(LAYERS[name])
    with apply(plan, model):
        measured = peak_bytes(model, batch, loss)
    foot = footprint(trace, plan)
    rest = sum(foot.by_role.get(role, 0) for role in (Role.WEIGHT, Role.BUFFER, Role.INPUT))
    assert foot.low_bytes - rest == pytest.approx(measured, rel=0.05)
    assert foot.peak_bytes < 0.75 * footprint(trace).peak_bytes
    assert foot.recomputed == ("layers.0", "layers.1")


def test_each_backward_of_a_retained_graph_runs_checkpointed_modules() -> None:
    model, x = Deep(), torch.randn(32, 64)
    with apply(Plan().recomputing("layers.*"), model):
        loss = model(x).square().mean()
        first, second = (torch.autograd.grad(loss, list(model.parameters()), retain_graph=True) for _ in range(2))
    assert_same(list(first), list(second))


def test_a_guard_probes_a_model_with_checkpointed_layers() -> None:
    """A probe runs several backward passes through one graph."""
    model, batch = Deep(), (torch.randn(128, 64), torch.randn(128, 64))
    loss = nn.functional.mse_loss
    plan, trace = Plan.uniform(activation=INT8).recomputing("layers.0"), trace_step(model, batch, loss=loss, device="cpu")
    with apply(plan, model, guard=Guard(trace)) as session:
        loss(model(batch[0]), batch[1]).backward()
        found = session.reprobe(batch, loss=loss)
    assert any(name.startswith("layers.1") for name in found.errors)


def test_a_session_explains_layers_and_weights_too() -> None:
    model = Deep()
    session = apply(Plan.uniform(activation=INT8, weight=INT8).recomputing("layers.0"), model)
    model(torch.randn(128, 64)).sum().backward()
    said = session.explain()
    assert (said.of("layers.0").now, said.of("layers.0").why) == ("checkpointed", "the activations inside it are not saved")
    assert said.of("weight=layers.1.body.0.weight").now == INT8
    assert len({row.slot for row in said}) == len(said)
    session.close()


class Doubled(nn.Module):
    """Adds onto the input of its layer, which autograd does not need."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Twice()

    def forward(self, x: Tensor) -> Tensor:
        x = x * 1.5
        return x.add_(self.layer(x))


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x * 2.0)


def test_an_input_that_is_changed_in_place_is_no_silent_error() -> None:
    model = Doubled()
    with apply(Plan().recomputing("layer"), model):
        loss = model(torch.randn(8, 64)).sum()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_a_module_that_is_not_there() -> None:
    with pytest.raises(ApplyError, match=r"recompute 'layer\.\*' is no module\. Closest of \d+: 'layers"):
        apply(Plan().recomputing("layer.*"), Deep())


class Listed(nn.Module):
    """Layers in a list; with `is_direct` a part of one of them is called from outside too."""

    def __init__(self, *, is_direct: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        parts = [nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(2)]
        self.layers, self.head, self.is_direct = nn.ModuleList(parts), nn.Linear(64, 64), is_direct

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return self.head(self.layers[1][0](x) if self.is_direct else x)


def test_a_list_of_layers_is_not_called_and_its_parts_are() -> None:
    x = torch.randn(64, 64)
    with apply(Plan().recomputing("layers"), Listed()) as session:
        assert session._checkpointed.paths == ("layers.0", "layers.1")
    model, plan = Listed(), Plan.uniform(activation=INT8).recomputing("layers")
    wanted = Plan.uniform(activation=INT8).recomputing("layers.*")
    found: list[list[int]] = []
    for one in (plan, wanted):
        with apply(one, model) as session:
            found.append([_stored_bytes(session, model, x) for _ in range(3)])
    assert found[0] == found[1] and len(set(found[0])) == 1


def test_a_part_that_is_called_outside_too_keeps_its_name() -> None:
    model, x = Listed(is_direct=True), torch.randn(64, 64)
    plan = Plan.uniform(activation=INT8).recomputing("layers.*")
    with apply(plan, model) as session:
        sizes = [_stored_bytes(session, model, x) for _ in range(3)]
        assert len(set(sizes)) == 1
        assert not [name for name in session._activations.decisions if name.startswith(":")]


def _stored_bytes(session: Any, model: nn.Module, x: Tensor) -> int:
    """Bytes stored between forward and backward."""
    loss = model(x).square().mean()
    nbytes = session.stored_bytes
    loss.backward()
    return nbytes


def test_modules_that_refer_back() -> None:
    model = Listed()
    model.layers[0][1].owner = model  # a circle
    with apply(Plan.uniform(activation=INT8).recomputing("layers.0"), model):
        model(torch.randn(64, 64)).square().mean().backward()


def test_frozen_weights_are_packed_again_when_backward_has_ended() -> None:
    model = Listed()
    model.layers.requires_grad_(False)
    with apply(Plan.uniform(weight=INT8).recomputing("layers.*"), model):
        for _ in range(2):
            model(torch.randn(64, 64, requires_grad=True)).square().mean().backward()
            plain = [name for name, p in model.layers.named_parameters() if p.numel() >= 4096 and p.untyped_storage().nbytes()]
            assert not plain
