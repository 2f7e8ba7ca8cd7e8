"""The inputs that activation checkpointing keeps are packed: gradients, bytes, and the layers of which they are stored unmodified.

The oracle is the same model without a session, whose checkpointed layers run on inputs that the test rounds in backward alone: the forward
pass of a layer gets the exact input, its gradient is that of a plain layer at `round_trip` of the input.
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from paredown import Guard, Plan, Role, apply, footprint, round_trip, trace_step
from paredown.plan.explanation import explain_slots
from tests.predict.test_prediction import plainly_held
from tests.session.nets import INT4, INT8, assert_same, gradients, relative_error, weighted

REENTRANT, NON_REENTRANT, BY_PLAN, BY_NAME = "reentrant", "non-reentrant", "plan.recompute", "plan.recompute, x by name"
PLANNED = (BY_PLAN, BY_NAME)
MODES = pytest.mark.parametrize("mode", [NON_REENTRANT, REENTRANT, *PLANNED])
ROWS, WIDTH = 128, 64
EIGHT_BITS = ROWS * WIDTH + ROWS * WIDTH // 64 * 2  # codes, and a scale of two bytes for 64 values


class Block(nn.Module):
    """A norm and an MLP with dropout, added to the input."""

    def __init__(self, act: type[nn.Module] = nn.GELU) -> None:
        super().__init__()
        self.norm, self.up, self.act, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 128), act(), nn.Linear(128, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.dropout(self.down(self.act(self.up(self.norm(x)))), 0.2)


class Rounded(torch.autograd.Function):
    """The oracle: runs `layer` on x in forward, and differentiates it at the rounded x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: Callable[[Tensor], Tensor], rounded: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.x, ctx.layer, ctx.state = rounded(x.detach()), layer, torch.get_rng_state()
        return layer(x)

    @staticmethod
    def backward(ctx: Any, *gradient: Tensor) -> Any:
        x = ctx.x.requires_grad_()
        with torch.enable_grad(), torch.random.fork_rng(devices=[]):
            torch.set_rng_state(ctx.state)
            torch.autograd.backward(ctx.layer(x), gradient)
        return x.grad, None, None


class Stack(nn.Module):
    """A linear layer, three blocks that `mode` runs, and a sum with the output of the first."""

    def __init__(self, mode: str, block: Callable[[], nn.Module] = Block) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.layers, self.mode = nn.Linear(WIDTH, WIDTH), nn.ModuleList(block() for _ in range(3)), mode
        self.rounded: Callable[[int, Tensor], Tensor] | None = None
        self.inputs: list[weakref.ref[torch.UntypedStorage]] = []

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for number, layer in enumerate(self.layers):
            self.inputs.append(weakref.ref(x.untyped_storage()))
            if self.rounded is not None:
                x = Rounded.apply(x, layer, partial(self.rounded, number))
            elif self.mode in PLANNED:
                x = layer(x) if self.mode == BY_PLAN else layer(x=x)
            else:
                x = checkpoint(layer, x, use_reentrant=self.mode == REENTRANT)
        return x


def batch() -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))


def step(model: nn.Module, *, autocast: bool = False) -> list[Tensor]:
    torch.manual_seed(3)
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = weighted(model(batch()))
    loss.backward()
    return gradients(model)


def plan_of(format: str, mode: str) -> Plan:
    """A plan that packs the inputs of checkpoints only."""
    plan = Plan.uniform(activation=None).set("*:checkpoint.input", format)
    return plan.recomputing("layers.*") if mode in PLANNED else plan


def in_row(x: Tensor, format: str, **options: Any) -> Tensor:
    """Rounded as the session stores activations: all values in one row, in the order of memory."""
    return round_trip(x.reshape(-1), format, **options).view(x.shape)


@MODES
def test_gradients_are_those_of_layers_at_the_rounded_input(mode: str) -> None:
    model = Stack(mode)
    oracle, plain = copy.deepcopy(model), step(copy.deepcopy(model))
    oracle.rounded = lambda number, x: in_row(x, INT8)
    expected = step(oracle)
    with apply(plan_of(INT8, mode), model) as session:
        for _ in range(2):
            assert_same(step(model), expected)
        assert not session.changes
    assert 0 < relative_error(expected, plain) < 0.01
    assert_same(step(model) if mode != BY_PLAN else plain, plain)


@MODES
def test_autocast(mode: str) -> None:
    model = Stack(mode)
    plain = step(copy.deepcopy(model), autocast=True)
    with apply(plan_of("fp32", mode), model):
        assert_same(step(model, autocast=True), plain)
    with apply(plan_of(INT8, mode), model):
        assert 0 < relative_error(step(model, autocast=True), plain) < 0.02


@MODES
def test_the_original_is_freed_and_the_bytes_are_those_of_the_format(mode: str) -> None:
    model = Stack(mode)
    loss = weighted(model(batch()))
    assert [ref() is None for ref in model.inputs] == [False] * 3
    with apply(plan_of(INT8, mode), model) as session:
        for _ in range(2):
            model.inputs.clear()
            loss = weighted(model(batch()))
            assert session.stored_bytes == 3 * EIGHT_BITS
            assert [ref() is None for ref in model.inputs] == [True] * 3
            loss.backward()
            assert session.stored_bytes == 0


def test_reentrant_inputs_are_freed_when_the_next_layer_begins() -> None:
    """The graph behind a reentrant layer is read when the next one is called, not at the end of the forward pass."""
    alive: list[int] = []

    class Counting(Block):
        def forward(self, x: Tensor) -> Tensor:
            alive.append(sum(ref() is not None for ref in model.inputs))
            return super().forward(x)

    model = Stack(REENTRANT, Counting)
    loss = weighted(model(batch()))
    assert alive == [1, 2, 3]
    alive.clear()
    model.inputs.clear()
    with apply(plan_of(INT8, REENTRANT), model):
        loss = weighted(model(batch()))
    assert alive == [1, 1, 1] and loss.grad_fn is not None


@MODES
def test_presets_store_8_bits_and_a_rule_that_names_the_slots_may_use_fewer(mode: str) -> None:
    model = Stack(mode)
    preset = Plan.preset("activations4")
    with apply(preset.recomputing("layers.*") if mode in PLANNED else preset, model) as session:
        step(model)
        row = session.explain().of("layers.1:checkpoint.input")
    assert (row.asked, row.now) == ("uint4/32@bf16+bf16", INT8)
    assert "a checkpointed layer runs again from it in backward" in row.why
    with apply(plan_of(INT4, mode), model) as session:
        step(model)
        assert session.explain().of("layers.1:checkpoint.input").now == INT4


def test_resumed_sessions_round_with_the_same_bits() -> None:
    model, plan = Stack(NON_REENTRANT), Plan().set("*:checkpoint.input", INT4, rounding="stochastic")
    with apply(plan, model, seed=5) as session:
        step(model)
        state, second = session.state_dict(), step(model)
        third = step(model)
    with apply(plan, model) as session:
        session.load_state_dict(state)
        assert_same(step(model), second)
    assert relative_error(second, third) > 0


class Comparing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(WIDTH, WIDTH)


class ReluFirst(Comparing):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.fc(torch.relu(x))


class InPlace(Comparing):
    def forward(self, x: Tensor) -> Tensor:
        return x + F.relu_(self.fc(x))


class Pooled(Comparing):
    def forward(self, x: Tensor) -> Tensor:
        return self.fc(F.max_pool1d(x[None], 3, 1, 1)[0])


class Routed(Comparing):
    """The rows whose largest value is above 0 go through the layer: shapes inside depend on values."""

    def forward(self, x: Tensor) -> Tensor:
        rows = self.fc(x).mean(-1) > 0
        return x.index_put((rows,), torch.tanh(self.fc(x[rows])))


class MoELayer(Comparing):
    """Named after its routing, which no node of autograd shows."""

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.where(x.argmax(-1, keepdim=True) > 9, self.fc(x), x)


class Unread(Comparing):
    """Its operations read no input with a gradient."""

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x.detach()) + 0 * self.fc.weight.sum()


CASES = {
    "applies relu": lambda: Block(nn.ReLU),
    "applies relu:": ReluFirst,
    "applies relu: ": InPlace,
    "applies max_pool": Pooled,
    "routes by values (index)": Routed,
    "routes by values (MoELayer)": MoELayer,
    "no operation of the checkpointed layer": Unread,
}


@pytest.mark.parametrize("mode", [NON_REENTRANT, BY_PLAN])
@pytest.mark.parametrize("reason", CASES)
def test_exact_where_signs_or_routing_decide(mode: str, reason: str) -> None:
    model = Stack(mode, CASES[reason])
    plain = step(copy.deepcopy(model))
    with apply(plan_of(INT8, mode), model) as session:
        for _ in range(2):
            assert_same(step(model), plain)
        change = next(row for row in session.changes if row.slot == "layers.1:checkpoint.input")
    assert (change.asked, change.given) == (INT8, "unmodified")
    assert reason.strip() in change.reason


@pytest.mark.parametrize("reason", ["applies ReLU", "applies relu", "(MoELayer)", "use_reentrant=True hides operations"])
def test_exact_in_reentrant_layers(reason: str) -> None:
    """Without a graph, modules and their attributes tell what a layer does."""
    with_attribute = Block()
    with_attribute.function = F.relu
    block = {
        "applies ReLU": lambda: Block(nn.ReLU),
        "applies relu": lambda: copy.deepcopy(with_attribute),
        "(MoELayer)": MoELayer,
        "use_reentrant=True hides operations": ReluFirst,
    }[reason]
    model = Stack(REENTRANT, block)
    plain = step(copy.deepcopy(model))
    with apply(plan_of(INT8, REENTRANT), model) as session:
        assert_same(step(model), plain)
        assert reason in next(row.reason for row in session.changes if row.slot == "layers.1:checkpoint.input")


class Masked(nn.Module):
    """A layer with a second input that has no gradient, and whose values must not be rounded."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.fc(x) + torch.softmax(x + mask, -1)


@MODES
def test_inputs_without_a_gradient_and_of_two_layers(mode: str) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.first, self.layers = nn.Linear(WIDTH, WIDTH), nn.ModuleList([Masked(), Masked()])

        def forward(self, x: Tensor) -> Tensor:
            x, mask = self.first(x), torch.full((ROWS, WIDTH), -torch.inf).triu(1)
            if mode in PLANNED:
                return self.layers[0](x, mask) + self.layers[1](x, mask)
            run: Any = partial(checkpoint, use_reentrant=mode == REENTRANT)
            return run(self.layers[0], x, mask) + run(self.layers[1], x, mask)

    model = Net()
    plain = step(copy.deepcopy(model))
    plan = Plan.uniform(activation=INT8)
    with apply(plan.recomputing("layers.*") if mode in PLANNED else plan, model) as session:
        loss = weighted(model(batch()))
        assert session.stored_bytes == EIGHT_BITS, "both layers share the packed input"
        loss.backward()
        assert 0 < relative_error(step(model), plain) < 0.01
        reasons = {row.slot: row.reason for row in session.changes}
    assert "no gradient flows to it" in reasons["layers.0:checkpoint.input2"]


def test_a_function_names_the_module_that_gets_its_input() -> None:
    class Net(Stack):
        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            x = checkpoint(lambda h: 2 * self.layers[1](self.layers[0](h)), x, use_reentrant=False)
            return checkpoint(lambda h: self.layers[2](h.sin()), x, use_reentrant=False)

    model = Net(NON_REENTRANT)
    with apply(Plan.uniform(activation=INT8), model) as session:
        step(model)
        names = [name for name in session._activations.names if "checkpoint" in name]
        assert sorted(names) == [":checkpoint.input", "layers.0:checkpoint.input"]
        assert session.explain().of("layers.0:checkpoint.input").now == INT8
        assert session.explain().of(":checkpoint.input").now == "unmodified"


def test_an_input_that_the_caller_holds_is_stored_once() -> None:
    class Net(Stack):
        def forward(self, x: Tensor) -> Any:
            hidden = [self.first(x)]
            for layer in self.layers:
                hidden.append(checkpoint(layer, hidden[-1], use_reentrant=False))
            return hidden

    model = Net(NON_REENTRANT)
    with apply(plan_of(INT8, NON_REENTRANT), model) as session:
        hidden = model(batch())
        assert session.stored_bytes == 0
        assert {row.slot for row in session.changes} == {f"layers.{i}:checkpoint.input" for i in range(3)}
        weighted(hidden[-1]).backward()


def test_an_input_that_is_modified_in_place_has_the_gradient_of_its_first_values() -> None:
    class Net(Stack):
        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            y = checkpoint(self.layers[0], x * 1.0, use_reentrant=False)
            return y.add_(1.0)

    model = Net(NON_REENTRANT)
    plain = step(copy.deepcopy(model))
    with apply(plan_of("fp32", NON_REENTRANT), model):
        assert_same(step(model), plain)


@MODES
def test_a_guard_measures_them(mode: str) -> None:
    model = Stack(mode)
    trace = trace_step(model, (batch(), torch.zeros(1)), loss=lambda y, _: weighted(y), device="cpu")
    with apply(plan_of(INT8, mode), model, guard=Guard(trace)) as session:
        assert session._guard is not None
        session._guard.signals.looks_at_all = True
        step(model)
        signals = session._guard.signals.read(None)[1]
        assert session.explain().of("layers.1:checkpoint.input").now == INT8
    assert list(signals) == [f"layers.{i}:checkpoint.input" for i in range(3)]
    assert all(0 < signal.error < 0.01 for signal in signals.values())


# --- prediction --------------------------------------------------------------------------------------------------------------------


@MODES
@pytest.mark.parametrize("block", [Block, lambda: Block(nn.ReLU)])
def test_predicted_bytes_are_the_stored_ones(mode: str, block: Callable[[], nn.Module]) -> None:
    model, plan = Stack(mode, block), Plan.uniform(activation=INT8)
    plan = plan.recomputing("layers.*") if mode in PLANNED else plan
    inputs = (batch(), torch.zeros(1))
    trace = trace_step(model, inputs, loss=lambda y, _: weighted(y), device="cpu")
    with apply(plan, model) as session:
        y = model(inputs[0])
        known = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *inputs, y)}
        loss = weighted(y)
        rows = [row for row in explain_slots(trace, plan) if "checkpoint" in row.slot]
        assert [row.slot for row in rows] == [f"layers.{i}:checkpoint.input" for i in range(3)]
        packed = sum(row.nbytes for row in rows if row.format)
        assert packed == session.stored_bytes == (3 * EIGHT_BITS if block is Block else 0)
        alive = [storage for ref in model.inputs if (storage := ref()) is not None]
        held = sum(storage.nbytes() for storage in alive)
        assert sum(row.nbytes for row in rows) == packed + held
        measured = packed + held + plainly_held(loss, known | {storage.data_ptr() for storage in alive})
    assert footprint(trace, plan).by_role[Role.ACTIVATION] == measured


class BiasedLayer(nn.Module):
    """Attention with a bias that is added to its logits."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        logits = self.query(x) @ self.key(x).transpose(-1, -2) / 8 + bias
        return x + logits.softmax(-1) @ self.value(x)


class MaskedByBias(nn.Module):
    """Two such layers, whose bias is learned and has a causal mask in it, as in T5."""

    def __init__(self, lowest: float, *, by_name: bool) -> None:
        super().__init__()
        self.layers, self.position = nn.ModuleList(BiasedLayer() for _ in range(2)), nn.Parameter(torch.randn(ROWS, ROWS) / 4)
        self.lowest, self.by_name = lowest, by_name

    def forward(self, x: Tensor) -> Tensor:
        bias = self.position + torch.full((ROWS, ROWS), self.lowest).triu(1)
        for layer in self.layers:
            x = layer(x, bias=bias) if self.by_name else layer(x, bias)
        return x


@pytest.mark.parametrize("by_name", [False, True])
@pytest.mark.parametrize("lowest", [-torch.inf, torch.finfo(torch.float32).min, torch.finfo(torch.float16).min, -1e4])
def test_masks_in_a_bias_stay_exact(lowest: float, by_name: bool) -> None:
    """Quantized, a block with -inf would be decoded as NaN, and biases beside -1e4 as 0."""
    torch.manual_seed(0)
    model, x = MaskedByBias(lowest, by_name=by_name), torch.randn(2, ROWS, WIDTH)
    model(x).square().mean().backward()
    expected = gradients(model)
    model.zero_grad()
    with apply(Plan.uniform(activation=INT8).recomputing("layers.*"), model) as session:
        model(x).square().mean().backward()
        assert 0 < relative_error(gradients(model), expected) < 0.02
        rows = [row.slot for row in session.changes if "as masks have" in row.reason]
    assert len(rows) in (1, 2) and all("checkpoint.input" in slot for slot in rows), rows
