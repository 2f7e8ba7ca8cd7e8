"""What the second forward pass of a checkpointed layer saves is packed: gradients, bytes, and what stays unmodified.

The oracle is the same model without checkpointing: a session packs the same slots of it in its only forward pass.
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from paredown import Plan, Trace, apply, footprint, trace_step
from paredown.autograd import operations
from paredown.autograd.second_passes import ReentrantSaves
from paredown.errors import PlanError
from paredown.session.checkpointing import Factor
from tests.session.nets import INT4, INT8
from tests.support.memory import peak_bytes

NONE, BY_MODEL, REENTRANT, BY_PLAN = "none", "model", "reentrant", "plan"
BY_MODELS = (BY_MODEL, REENTRANT)
WIDTH, INNER, ROWS = 32, 128, 256


@pytest.fixture(autouse=True)
def small_tensors_are_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operations, "MIN_SECOND_PASS_BYTES", 2 * ROWS * WIDTH * 4)


class Gated(nn.Module):
    """A gated MLP, as in a Llama, added to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(WIDTH, INNER, bias=False), nn.Linear(WIDTH, INNER, bias=False)
        self.down, self.products = nn.Linear(INNER, WIDTH, bias=False), list[weakref.ref[Any]]()

    def forward(self, x: Tensor) -> Tensor:
        product = F.silu(self.gate(x)) * self.up(x)
        self.products.append(weakref.ref(product.untyped_storage()))
        return x + self.down(product)


class Rectified(nn.Module):
    """An MLP with a ReLU and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(WIDTH, INNER), nn.ReLU(), nn.Linear(INNER, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.dropout(self.act(self.up(x)), 0.25))


class Stack(nn.Module):
    """Layers that torch.utils.checkpoint runs, if `mode` is BY_MODEL or REENTRANT."""

    def __init__(self, mode: str, layer: type[nn.Module] = Gated) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.layers, self.mode = nn.Linear(WIDTH, WIDTH), nn.ModuleList(layer() for _ in range(3)), mode

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            is_reentrant = self.mode == REENTRANT
            x = checkpoint(layer, x, use_reentrant=is_reentrant) if self.mode in BY_MODELS else layer(x)  # type: ignore[assignment]
        return x.square().mean()


def plan_of(mode: str, text: str | None = INT8, layer: type[nn.Module] = Gated) -> Plan:
    """What is computed inside of the layers in a format; the hidden states are exact, which are inputs of the checkpoints."""
    plan = Plan()
    for pattern in ("*:silu.input", "*:mul.*", "*.down:input") if issubclass(layer, Gated) else ("*.down:input",):
        plan = plan.set(f"activation={pattern}", text, rounding="nearest_even" if text else None)
    return plan.recomputing("layers.*") if mode == BY_PLAN else plan


def batch() -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))


def gradients(model: nn.Module, x: Tensor, **options: Any) -> list[Tensor]:
    model.zero_grad()
    torch.manual_seed(2)
    loss = model(x)
    loss.backward(**options)
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def assert_equal(found: list[Tensor], expected: list[Tensor]) -> None:
    assert len(found) == len(expected) and all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("text", [INT8, INT4])
@pytest.mark.parametrize("layer", [Gated, Rectified])
@pytest.mark.parametrize("mode", [*BY_MODELS, BY_PLAN])
def test_gradients_are_those_of_packing_without_checkpointing(mode: str, layer: type[nn.Module], text: str) -> None:
    x = batch()
    exact = gradients(Stack(NONE, layer), x)
    with apply(plan_of(NONE, text, layer), model := Stack(NONE, layer)):
        expected = gradients(model, x)
    assert any(not torch.equal(a, b) for a, b in zip(exact, expected, strict=True)), "packing has no effect: the test is empty"
    with apply(plan_of(mode, text, layer), model := Stack(mode, layer)) as session:
        for _ in range(3):
            assert_equal(gradients(model, x), expected)
        names = set(session._activations.decisions)
    assert ("layers.1:mul.input" if layer is Gated else "layers.1.down:input") in names


@pytest.mark.parametrize("mode", BY_MODELS)
def test_the_originals_are_freed_and_nothing_outlives_backward(mode: str) -> None:
    """Neither the second graph nor the checkpoint holds them; without a garbage collection."""
    model, x = Stack(mode), batch()
    layer: Any = model.layers[1]
    with apply(plan_of(mode), model) as session:
        gradients(model, x)
        loss = model(x)
        layer.products.clear()
        gc.disable()
        try:
            loss.backward()
            assert layer.products[-1]() is None
            del loss
            assert session.stored_bytes == 0
        finally:
            gc.enable()


@pytest.mark.parametrize("mode", [*(pytest.param(mode, marks=pytest.mark.full) for mode in (BY_MODEL, BY_PLAN)), REENTRANT])
def test_the_peak_falls_as_predicted(mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The measured peaks of a step on a CPU, unmodified, with packed inputs alone, and with packed second passes."""
    rows = 40_960  # scratch of encoding, for 2^17 values at most and counted once for each tensor of a layer, is small beside these
    monkeypatch.setattr(operations, "MIN_SECOND_PASS_BYTES", 2 * rows * WIDTH * 4)
    x = torch.randn(rows, WIDTH)
    checkpointed = mode if mode in BY_MODELS else NONE
    trace = trace_step(Stack(checkpointed), (x,), optimizer="sgd", device="cpu")
    peaks: dict[str, tuple[int, int]] = {}
    for name, inside in (("inputs", None), ("inside", INT8)):
        plan = plan_of(mode, inside).set("activation=*:checkpoint.input", INT8)
        model = Stack(checkpointed)
        constant = sum(p.nbytes for p in model.parameters()) + x.nbytes
        with apply(plan, model):
            gradients(model, x)
            model.zero_grad()
            measured = peak_bytes(lambda model=model: model(x).backward(), tmp_path) + constant
        peaks[name] = measured, footprint(trace, plan).peak_bytes
    assert peaks["inside"][0] < 0.85 * peaks["inputs"][0], peaks
    for measured, predicted in peaks.values():
        assert predicted == pytest.approx(measured, rel=0.05), peaks


@pytest.mark.parametrize("mode", BY_MODELS)
def test_traces_have_the_slots_that_a_session_packs(mode: str) -> None:
    x, plan = batch(), plan_of(mode)
    trace = trace_step(Stack(mode), (x,), device="cpu")
    with apply(plan, model := Stack(mode)) as session:
        gradients(model, x)
        packed = {name for name, decision in session._activations.decisions.items() if decision.format is not None}
    again = {name for slot in trace.activations if slot.birth > trace.backward_at for name in slot.names}
    assert packed == again
    assert Trace.from_json(trace.to_json()) == trace
    assert footprint(trace, plan).by_role == footprint(trace, Plan()).by_role, "what exists in backward alone is not stored"


def test_retained_graphs_and_graphs_that_are_differentiated_twice() -> None:
    x, expected = batch(), []
    with apply(plan_of(NONE), model := Stack(NONE)):
        expected = gradients(model, x)
    with apply(plan_of(BY_MODEL), model := Stack(BY_MODEL)):
        gradients(model, x)
        torch.manual_seed(2)
        loss = model(x)
        for _ in range(2):
            found = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
            assert_equal(list(found), expected)
        with_graph = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        for found, wanted in zip(with_graph, expected, strict=True):
            torch.testing.assert_close(found.detach(), wanted)  # torch computes the gradient of SiLU in other steps here
        sum((g.square().sum() for g in with_graph), torch.zeros(())).backward()


def test_without_early_stop_in_nested_checkpoints_and_under_autocast() -> None:
    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Gated()

        def forward(self, x: Tensor) -> Tensor:
            return F.silu(checkpoint(self.inner, x, use_reentrant=False))  # type: ignore[arg-type]

    x = batch()
    for layer, dtype, early in ((Gated, torch.float32, False), (Nested, torch.float32, True), (Gated, torch.bfloat16, True)):
        model, found = Stack(BY_MODEL, layer), list[Tensor]()
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype is torch.bfloat16), set_checkpoint_early_stop(early):
            exact = gradients(model, x)
            with apply(plan_of(BY_MODEL), model):
                for _ in range(2):
                    found = gradients(model, x)
        for a, b in zip(found, exact, strict=True):
            assert float((a - b).norm() / b.norm()) < 0.02


@pytest.mark.parametrize("inner", [True, False])
def test_checkpoints_inside_of_a_reentrant_one(inner: bool) -> None:
    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.outer = Gated(), Gated()

        def forward(self, x: Tensor) -> Tensor:
            return self.outer(checkpoint(self.inner, x, use_reentrant=inner))

    x, model, found = batch(), Stack(REENTRANT, Nested), list[Tensor]()
    exact = gradients(model, x)
    with apply(plan_of(REENTRANT), model) as session:
        for _ in range(2):
            found = gradients(model, x)
            assert session.stored_bytes == 0
        assert "layers.1.outer:mul.input" in session._activations.decisions
    for a, b in zip(found, exact, strict=True):
        assert 0 < float((a - b).norm() / b.norm()) < 0.02


def test_a_backward_that_raises_leaves_nothing_behind() -> None:
    """With use_reentrant=True the session follows the layer in backward, and does not notice that it raised."""

    class Fails(Gated):
        fails = False

        def forward(self, x: Tensor) -> Tensor:
            if self.fails and torch.is_grad_enabled():
                raise ValueError("no")
            return super().forward(x)

    x, model = batch(), Stack(REENTRANT, Fails)
    with apply(plan_of(REENTRANT), model) as session:
        expected = gradients(model, x)
        Fails.fails = True
        with pytest.raises(ValueError, match="no"):
            gradients(model, x)
        Fails.fails = False
        assert_equal(gradients(model, x), expected)
        assert session.stored_bytes == 0


def test_plans_that_store_nothing_inside_are_not_followed_there(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[int] = []
    init = ReentrantSaves.__init__
    monkeypatch.setattr(ReentrantSaves, "__init__", lambda self, store: begun.append(0) or init(self, store))
    x, plan = batch(), Plan().set("activation=*:checkpoint.input", INT8)
    with apply(plan, model := Stack(REENTRANT)):
        for _ in range(3):
            gradients(model, x)
    assert len(begun) == len(model.layers), "in the first step alone"


def test_patterns_are_checked_when_the_inside_of_layers_is_known() -> None:
    x, plan = batch(), plan_of(REENTRANT).set("activation=*:nothing.input", INT8)
    with apply(plan, model := Stack(REENTRANT)):
        model(x)  # without a backward
        gradients(model, x)
        with pytest.raises(PlanError, match="nothing"):
            model(x)


def test_a_layer_that_saves_other_tensors_later_stays_unmodified() -> None:
    class Switched(Gated):
        is_gated = True

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) if self.is_gated else x + self.down(self.up(x).tanh())

    x, model = batch(), Stack(BY_MODEL, Switched)
    with apply(plan_of(BY_MODEL), model):
        gradients(model, x)
        Switched.is_gated = False
        found = gradients(model, x)
    assert_equal(found, gradients(model, x))


@pytest.mark.parametrize("mode", BY_MODELS)
def test_frozen_weights_are_not_taken_for_activations(mode: str) -> None:
    """A weight larger than the limit stays what it is, packed or not."""
    for frozen in (None, INT8):
        model = Stack(mode)
        for layer in model.layers:
            for p in layer.parameters():
                p.requires_grad_(False)
        x = batch().repeat(4, 1)
        plan = plan_of(mode).without("activation=*.down:input").set("frozen", frozen)
        with apply(plan, model) as session:
            gradients(model, x)
            gradients(model, x)
            assert not {name for name in session._activations.decisions if name.endswith("weight")}


@pytest.mark.parametrize("mode", BY_MODELS)
def test_factors_are_decoded_by_every_operation(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    decoded = Factor.decoded
    monkeypatch.setattr(Factor, "decoded", lambda self: seen.append(repr(self)) or decoded(self))
    with apply(plan_of(mode), model := Stack(mode)):
        gradients(model, batch())
    assert len(seen) == 2 * len(model.layers) and seen[0] == f"Factor(({ROWS}, {INNER}), torch.float32)"
