"""Footprints of plans with tiles, against the memory of real steps on the CPU, and the modules that sessions run in tiles."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import silu
from torch.utils.checkpoint import checkpoint

from paredown.apply_plan import apply
from paredown.errors import PlanError, TraceError
from paredown.models.lora import add_lora
from paredown.models.transformer import GPT, GPTConfig, token_loss
from paredown.plan.explanation import explain_slots
from paredown.plan.footprint import footprint
from paredown.plan.plan import Plan
from paredown.plan.step_time import added_time
from paredown.plan.tiled_trace import tiled_modules
from paredown.plan.trace import Trace
from paredown.predict.trace_step import trace_step
from paredown.roles import Role
from tests.support.calibrations import calibration
from tests.support.memory import peak_bytes

DIM, WIDE, TOKENS, VOCABULARY, LAYERS = 32, 128, 512, 50, 3
RNG_STATE_BYTES = 5056  # of the CPU, which every checkpoint stores
BEFORE = (Role.WEIGHT, Role.BUFFER, Role.INPUT)  # roles of what is allocated before a step
CHECKPOINTED = Plan().recomputing("layers.*")
IDS = torch.randint(VOCABULARY, (2, TOKENS), generator=torch.Generator().manual_seed(1))
BATCHES = pytest.mark.parametrize("num", [1, 2])  # pieces of one sequence are views, those of two are copies


class Gated(nn.Module):
    """The MLP of Llama."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(DIM, WIDE, bias=False), nn.Linear(DIM, WIDE, bias=False), nn.Linear(WIDE, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(silu(self.gate(x)) * self.up(x))


class Mixing(nn.Module):
    """A layer that mixes tokens by sums, whose kernels on the CPU have no scratch memory, as those of attention do."""

    def __init__(self, *, gated: bool) -> None:
        super().__init__()
        self.norm1, self.norm2, self.project = nn.LayerNorm(DIM), nn.LayerNorm(DIM), nn.Linear(DIM, DIM)
        self.mlp = Gated() if gated else nn.Sequential(nn.Linear(DIM, WIDE), nn.GELU(), nn.Linear(WIDE, DIM))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.project(self.norm1(x).cumsum(1))
        return x + self.mlp(self.norm2(x))


class Network(nn.Module):
    def __init__(self, *, gated: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, DIM)
        self.layers = nn.Sequential(*(Mixing(gated=gated) for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(DIM), nn.Linear(DIM, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.norm(self.layers(self.embed(ids))))


def network(*, gated: bool = True) -> Network:
    torch.manual_seed(0)
    return Network(gated=gated)


def adapted() -> Network:
    model = network()
    add_lora(model, 4, ("layers.*",))
    return model


def trace_of(model: nn.Module, num: int = 2, *, compiled: bool = False) -> Trace:
    return trace_step(model, (IDS[:num], IDS[:num]), loss=token_loss, device="cpu", compiled=compiled)


def real_bytes(model: nn.Module, plan: Plan, num: int, folder: Path) -> int:
    """The most bytes that a step of a session holds, beside what is there before; without the random states of checkpoints."""
    ids, other = IDS[:num], copy.deepcopy(model)

    def step() -> Tensor:
        out = other(ids)
        token_loss(out, ids).backward()
        return out

    with apply(plan, other):
        for _ in range(2):
            step()
            other.zero_grad()
        return peak_bytes(step, folder) - RNG_STATE_BYTES * LAYERS * bool(plan.recompute)


def predicted_bytes(model: nn.Module, plan: Plan, num: int) -> int:
    foot = footprint(trace_of(model, num), plan)
    return foot.peak_bytes - sum(foot.by_role.get(role, 0) for role in BEFORE)


# --- bytes ---------------------------------------------------------------------------------------------------------------------


@BATCHES
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("plan", [Plan(), CHECKPOINTED], ids=["saved", "checkpointed"])
@pytest.mark.parametrize(("names", "length"), [("layers.*", 16), ("layers.*", 100), ("layers.*.mlp", 32), ("layers.*.project", 32)])
def test_the_peak_is_that_of_a_real_step(names: str, length: int, plan: Plan, gated: bool, num: int, tmp_path: Path) -> None:
    model, plan = network(gated=gated), plan.tiling(names, length=length)
    assert predicted_bytes(model, plan, num) == real_bytes(model, plan, num, tmp_path)


@BATCHES
@pytest.mark.parametrize("plan", [Plan(), CHECKPOINTED], ids=["saved", "checkpointed"])
def test_the_peak_with_adapters(plan: Plan, num: int, tmp_path: Path) -> None:
    """Frozen weights have no gradients; scalars of adapters are a few bytes that no trace has."""
    for planned in (plan, plan.tiling("layers.*", length=32)):
        real = real_bytes(adapted(), planned, num, tmp_path)
        assert predicted_bytes(adapted(), planned, num) == pytest.approx(real, abs=128)


@pytest.mark.parametrize("role", ["frozen", "weight"])
@pytest.mark.parametrize("plan", [Plan(), CHECKPOINTED], ids=["saved", "checkpointed"])
def test_packed_weights_are_decoded_one_at_a_time(plan: Plan, role: str, tmp_path: Path) -> None:
    """The peak has one decoded weight of the MLP at most, of three."""
    model = adapted() if role == "frozen" else network()
    plan = plan.set(role, "int8/64@bf16").tiling("layers.*", length=32)
    real = real_bytes(model, plan, 2, tmp_path)
    assert real - 128 <= predicted_bytes(model, plan, 2) <= real + 4 * DIM * WIDE


def test_packed_inputs_of_checkpointed_layers_with_tiles(tmp_path: Path) -> None:
    plan = Plan.preset("activations8").recomputing("layers.*").tiling("layers.*", length=32)
    assert predicted_bytes(network(), plan, 2) == pytest.approx(real_bytes(network(), plan, 2, tmp_path), rel=0.01)


def test_long_sequences_on_cuda() -> None:
    """By hand: beside a checkpointed layer's inputs, pieces of an MLP hold its hidden tensors for their tokens alone."""
    with torch.device("meta"):
        model = GPT(GPTConfig(dim=1024, num_layers=2, num_heads=8, vocabulary=64, context=1 << 15)).bfloat16()
        ids = torch.zeros(1, 1 << 15, dtype=torch.int64)
    trace = trace_step(model, (ids, ids), loss=token_loss, device="cuda")
    whole, tiled = (footprint(trace, plan).peak_bytes for plan in (CHECKPOINTED, CHECKPOINTED.tiling("layers.*.mlp", length=2048)))
    hidden = 2 * 4 * 1024 * (1 << 15)  # bytes; three at the peak of the second pass: before and after GELU, and a gradient
    assert whole - tiled >= 2 * hidden * (1 - 2048 / (1 << 15))


# --- which modules -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("names", [("layers.*",), ("layers.0", "layers.1.mlp.up", "head"), ("layers",)])
def test_the_modules_are_those_that_sessions_tile(names: tuple[str, ...]) -> None:
    for model in (network(), adapted(), GPT(GPTConfig(DIM, 2, 2, vocabulary=VOCABULARY, context=TOKENS)).train()):
        names = tuple(name for name in names if "up" not in name or isinstance(model, Network))
        plan = Plan().tiling(*names, length=32)
        other = copy.deepcopy(model)
        with apply(plan, other) as session:
            token_loss(other(IDS), IDS).backward()
            ran = {row.slot for row in session.explain() if row.now == "in tiles of 32 tokens"}
        assert {module.path for module, _ in tiled_modules(trace_of(model), plan.tiles)} == ran


def test_what_is_refused_and_noted() -> None:
    model = GPT(GPTConfig(DIM, 2, 2, vocabulary=VOCABULARY, context=TOKENS))
    trace = trace_of(model)
    with pytest.raises(PlanError, match=r"layers.0.attention has none, since _scaled_dot_product\S* mixes tokens"):
        footprint(trace, Plan().tiling("layers.*.attention", length=8))
    with pytest.raises(PlanError, match=r"tile 'layer\.\*' is no module.*layers"):
        footprint(trace, Plan().tiling("layer.*", length=8))
    with pytest.raises(PlanError, match="an earlier paredown made it"):
        footprint(replace(trace, token_modules=()), Plan().tiling("layers.*", length=8))
    with pytest.raises(PlanError, match="compiled sessions run no tiles"):
        footprint(trace_of(model, compiled=True), Plan().tiling("layers.*", length=8))
    foot = footprint(trace, Plan().tiling("layers.*", length=TOKENS))
    assert foot.peak_bytes == footprint(trace).peak_bytes and any("no more tokens than a piece" in note for note in foot.notes)


@pytest.mark.parametrize("is_reentrant", [True, False])
def test_models_that_checkpoint_layers_themselves(is_reentrant: bool) -> None:
    class Own(Network):
        def forward(self, ids: Tensor) -> Tensor:
            x = self.embed(ids).requires_grad_()
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=is_reentrant)
            return self.head(self.norm(x))

    with pytest.raises(PlanError, match="the model checkpoints it itself"):
        footprint(trace_of(Own(gated=True)), Plan().tiling("layers.*", length=8))


def test_tables_name_tiles() -> None:
    trace, plan = trace_of(network()), Plan().tiling("layers.*", length=16)
    assert "in tiles of 16 tokens: layers.*" in repr(footprint(trace, plan))
    rows = {row.slot: row for row in explain_slots(trace, plan)}
    assert rows["layers.0.mlp.down:input"].what == "tiled" and rows["layers.0.mlp.down:input"].nbytes == 0
    assert rows["layers.0.mlp:tiles.input"].why == "the module runs again from it, piece by piece"


def test_traces_with_modules_in_files() -> None:
    trace = trace_of(network())
    assert Trace.from_json(trace.to_json()) == trace
    module = next(module for module in trace.token_modules if not module.whole)
    for wrong in (
        replace(module, backward=(5, 3)),
        replace(module, forward=(1, trace.length)),
        replace(module, in_forward=((0, 1 << 57),)),
    ):
        with pytest.raises(TraceError, match=r"contradicts itself|too many bytes"):
            Trace.from_json(replace(trace, token_modules=(wrong,)).to_json())


# --- time ----------------------------------------------------------------------------------------------------------------------


def test_tiles_add_a_second_pass_but_not_to_the_last_module_of_a_checkpointed_layer() -> None:
    trace, costs = trace_of(network()), calibration(device="cpu")

    def seconds(plan: Plan) -> tuple[float, float]:
        time = added_time(trace, plan, costs)
        return time.device_seconds, time.host_seconds

    assert seconds(Plan().tiling("layers.*.mlp", length=64))[0] > 0
    alone, tiled = seconds(CHECKPOINTED), seconds(CHECKPOINTED.tiling("layers.*.mlp", length=64))
    assert tiled[0] == pytest.approx(alone[0]) and tiled[1] >= alone[1]
    assert seconds(CHECKPOINTED.tiling("layers.*.project", length=64))[0] > alone[0]
    assert seconds(Plan().tiling("layers.*", length=TOKENS)) == seconds(Plan())
