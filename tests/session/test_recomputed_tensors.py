"""Single tensors of compiled steps that backward recomputes: bits of gradients, saved bytes as predicted, and plans of `assign` with them.

Oracles: the same compiled step without recomputation, what autograd's nodes really hold, and gradients of the unmodified model. Graphs run
operation by operation (tests/programs/compiling.py); in `make test-all` also as kernels of Inductor.
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor_config
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from paredown import Plan, Trace, apply, assign, footprint, trace_step
from paredown.errors import BudgetError
from paredown.models.transformer import GPT, GPTConfig, token_loss
from paredown.plan.checkpointed_trace import step_under
from paredown.plan.planned_step import SOURCE, planned_step, recomputed_slots
from paredown.session.compiled.graph_packing import autograd_node_of
from tests.predict.test_compiled_trace import in_graphs, packed_bytes, saved_bytes
from tests.programs.compiling import compiles_quickly
from tests.session.nets import INT4, INT8, assert_same, gradients, relative_error

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")  # torch's own
UNMODIFIED = Plan().set("activation", None)
ATTENTION = ":scaled_dot_product_attention."


class Bottleneck(nn.Module):
    """Three convolutions with norms and a residual sum."""

    def __init__(self, num_in: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(num_in, 8, 1, bias=False), nn.BatchNorm2d(8)
        self.conv2, self.norm2 = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.conv3, self.norm3 = nn.Conv2d(8, 32, 1, bias=False), nn.BatchNorm2d(32)
        self.shortcut = nn.Identity() if num_in == 32 else nn.Conv2d(num_in, 32, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm2(self.conv2(self.norm1(self.conv1(x)).relu())).relu()
        return (self.shortcut(x) + self.norm3(self.conv3(h))).relu()


class ResNet(nn.Module):
    """A stem, four blocks and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.blocks = nn.Sequential(Bottleneck(16), *(Bottleneck(32) for _ in range(3)))
        self.head = nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.norm(self.stem(x)).relu()).mean((2, 3)))


@dataclass
class Case:
    """A network, its batch and loss, patterns of tensors to recompute, and how many tensors these are."""

    net: nn.Module
    batch: tuple[Tensor, Tensor]
    loss: Callable[[Tensor, Tensor], Tensor]
    patterns: tuple[str, ...]
    num_recomputed: int


@lru_cache
def case_of(name: str) -> Case:
    torch.manual_seed(0)
    if name == "resnet":
        batch = torch.randn(8, 3, 16, 16), torch.randint(8, (8,))
        return Case(ResNet(), batch, cross_entropy, ("blocks.*.norm2:input",), 4)
    ids = torch.randint(64, (16, 64))
    num_layers, dropout = 4 if name == "deep" else 2, 0.1 if name == "dropout" else 0.0
    net = GPT(GPTConfig(dim=64, num_layers=num_layers, num_heads=4, vocabulary=64, context=64, dropout=dropout))
    # attention with dropout saves its operands by other names
    patterns = ("layers.*.mlp.1:input", *(() if dropout else (f"layers.*{ATTENTION}value",)))
    return Case(net, (ids, ids.roll(1)), token_loss, patterns, len(patterns) * num_layers)


@lru_cache
def trace_of(name: str) -> Trace:
    case = case_of(name)
    return trace_step(case.net, case.batch, loss=case.loss, device="cpu", compiled=True)


@dataclass
class Step:
    """Gradients of a compiled step, bytes that its graph held for backward, stored bytes, and rows of `session.changes`."""

    gradients: list[Tensor]
    held: int
    stored: int
    changes: dict[tuple[str, str], str]


@lru_cache
def step_of(name: str, plan: Plan) -> Step:
    case = case_of(name)
    with apply(plan, case.net) as session:
        compiled = session.compile()
        case.net.zero_grad()
        torch.manual_seed(3)
        output = compiled(case.batch[0])
        held = saved_bytes(autograd_node_of(output), *case.net.parameters(), *case.net.buffers(), *case.batch)
        stored = session.stored_bytes
        case.loss(output, case.batch[1]).backward()
        rows = {(change.slot, change.asked): change.reason for change in session.changes}
    return Step(gradients(case.net), held, stored, rows)


@pytest.fixture(autouse=True)
def _quickly(request: pytest.FixtureRequest) -> Any:
    if "kernels" in request.node.name:
        yield
        return
    with compiles_quickly():
        yield


def held_bytes(trace: Trace, plan: Plan) -> int:
    """Predicted bytes that graphs save under a plan that quantizes nothing; masks of unmodified tensors are not saved."""
    step = planned_step(trace, plan)
    masks = {slot.storage for slot in step.activations if slot.name.rpartition(":")[2].startswith("le")}
    return sum(nbytes for storage, nbytes in in_graphs(step).items() if storage not in masks)


@pytest.mark.parametrize("name", ["gpt", *(pytest.param(name, marks=pytest.mark.full) for name in ("resnet", "dropout"))])
def test_recomputed_tensors_change_no_bit(name: str) -> None:
    case, trace = case_of(name), trace_of(name)
    plan = UNMODIFIED.recomputing(*case.patterns)
    saved, recomputed = step_of(name, UNMODIFIED), step_of(name, plan)
    assert_same(recomputed.gradients, saved.gradients)
    chosen = recomputed_slots(trace, plan)
    assert len(chosen) == case.num_recomputed
    assert saved.held - recomputed.held == sum(slot.nbytes for slot in chosen) > 0
    assert not [row for row in recomputed.changes if row[1] == "recomputed"]


@pytest.mark.parametrize("name", ["gpt", "resnet"])
def test_saved_bytes_are_predicted(name: str) -> None:
    trace = trace_of(name)
    plan = UNMODIFIED.recomputing(*case_of(name).patterns)
    assert held_bytes(trace, plan) == step_of(name, plan).held
    assert footprint(trace, plan).peak_bytes < footprint(trace, UNMODIFIED).peak_bytes


@pytest.mark.parametrize(("name", "format"), [("gpt", INT8), pytest.param("resnet", INT4, marks=pytest.mark.full)])
def test_sources_are_unmodified_beside_packed_tensors(name: str, format: str) -> None:
    trace = trace_of(name)
    packed = Plan.uniform(activation=format)
    plan = packed.recomputing(*case_of(name).patterns)
    step = planned_step(step_under(trace, plan), plan)
    found, plain = step_of(name, plan), step_of(name, UNMODIFIED)
    assert 0 < found.stored == packed_bytes(step, plan) < packed_bytes(step_under(trace, packed), packed)
    sources = {slot.name for slot in step.activations if slot.stays == SOURCE}
    rows = {slot for (slot, _), reason in found.changes.items() if "backward recomputes" in reason}
    assert rows and rows <= sources
    assert relative_error(found.gradients, plain.gradients) < relative_error(step_of(name, packed).gradients, plain.gradients)


@pytest.mark.parametrize(
    ("name", "budget"), [("gpt", "80%"), ("resnet", "78%"), pytest.param("deep", "50%", marks=pytest.mark.full)]
)
def test_assigned_plans_have_less_error_within_the_same_budget(name: str, budget: str) -> None:
    """Formats alone have to quantize; recomputed tensors are exact, so that nothing is."""
    trace = trace_of(name)
    plan, formats = assign(trace, budget), assign(trace, budget, recompute=False)
    assert footprint(trace, plan).fits(budget) and footprint(trace, formats).fits(budget)
    assert recomputed_slots(trace, plan) and not formats.recompute and "recomputed" in plan.reason
    assert Plan.from_json(plan.to_json()) == plan
    plain = step_of(name, UNMODIFIED).gradients
    assert_same(step_of(name, plan).gradients, plain)
    assert relative_error(step_of(name, formats).gradients, plain) > 1e-4


@pytest.mark.full
def test_an_assigned_mixture_of_packed_and_recomputed_tensors() -> None:
    """Where recomputation alone is not enough, the rest is packed in wider formats than without it."""
    trace = trace_of("deep")
    plan, formats = assign(trace, "35%"), assign(trace, "35%", recompute=False)
    assert recomputed_slots(trace, plan) and any(format is not None for format in plan.activation_formats)
    plain, found = step_of("deep", UNMODIFIED).gradients, step_of("deep", plan)
    assert found.stored > 0
    assert relative_error(found.gradients, plain) < relative_error(step_of("deep", formats).gradients, plain)


def test_budgets_and_recomputation() -> None:
    trace = trace_of("gpt")
    exact = footprint(trace, UNMODIFIED.recomputing(*case_of("gpt").patterns)).peak_bytes
    only_exact = {"levels": (None,)}
    assert recomputed_slots(trace, assign(trace, exact, **only_exact))  # type: ignore[arg-type]
    with pytest.raises(BudgetError, match="Recomputing single tensors was not allowed"):
        assign(trace, exact, recompute=False, **only_exact)  # type: ignore[arg-type]
    with pytest.raises(BudgetError, match="Recomputing single tensors is included"):
        assign(trace, "5%")


LISTED = [
    ("gpt", f"layers.0.attention{ATTENTION}output", "attention", "layers.1.mlp.1:input"),
    ("gpt", "head:bias", "no tensor of this name", "layers.1.mlp.1:input"),
    ("resnet", "blocks.0.norm3:input", "recomputed too", "blocks.0.norm2:input"),
]


@pytest.mark.parametrize("name", ["gpt", "resnet"])
def test_what_cannot_be_recomputed_is_listed(name: str) -> None:
    """Attention does not run again; one tensor is computed from another that is recomputed; one name is unknown."""
    of_name = [row[1:] for row in LISTED if row[0] == name]
    plan = UNMODIFIED.recomputing(*(text for slot, _, other in of_name for text in (slot, other)))
    rows = {slot: reason for (slot, asked), reason in step_of(name, plan).changes.items() if asked == "recomputed"}
    notes = "\n".join(footprint(trace_of(name), plan).notes)
    assert rows.keys() == {slot for slot, *_ in of_name}
    for slot, text, other in of_name:
        assert text in rows[slot] and f"{slot} is not recomputed" in notes and f"{other} is not" not in notes


def test_sessions_and_plans_that_recompute_no_tensor() -> None:
    case = case_of("gpt")
    with apply(UNMODIFIED.recomputing("layers.0.mlp.1:input"), case.net) as session:
        assert [c.reason for c in session.changes if c.asked == "recomputed"] == [
            "only compiled sessions recompute single tensors: call session.compile()"
        ]
    plan = Plan().recomputing("layers.0.mlp.1:input")
    rows = step_of("gpt", plan).changes
    assert "no rule for activations" in rows["layers.0.mlp.1:input", "recomputed"]
    assert footprint(trace_of("gpt"), plan).peak_bytes == footprint(trace_of("gpt")).peak_bytes
    assert "no rule for activations" in "\n".join(footprint(trace_of("gpt"), plan).notes)


def test_plans_name_tensors_and_modules() -> None:
    plan = UNMODIFIED.recomputing("layers.0", "layers.*.mlp.1:input")
    assert plan.checkpointed == ("layers.0",) and plan.recomputed == ("layers.*.mlp.1:input",)
    assert "activation checkpointing: layers.0\nrecomputed in compiled sessions: layers.*.mlp.1:input" in plan.explain()
    assert str(UNMODIFIED.diff(plan)[-1]) == "slot layers.*.mlp.1:input: no rule -> recomputed"


@pytest.mark.full
def test_kernels_of_inductor() -> None:
    """Fused kernels sum in another order: float32 to rounding."""
    case = case_of("gpt")
    torch._dynamo.reset()
    with inductor_config.patch({"cpp.simdlen": 1, "compile_threads": 1}):
        saved, recomputed = (step_of.__wrapped__("gpt", plan) for plan in (UNMODIFIED, UNMODIFIED.recomputing(*case.patterns)))
    assert relative_error(recomputed.gradients, saved.gradients) < 1e-5
    assert saved.held - recomputed.held == sum(
        s.nbytes for s in recomputed_slots(trace_of("gpt"), UNMODIFIED.recomputing(*case.patterns))
    )
