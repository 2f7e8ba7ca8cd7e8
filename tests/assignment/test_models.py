"""Plans for real networks: they fit, they are the same slots at another batch size, they train, and they say what they did."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

from paredown import Format, Plan, Role, Sensitivities, Trace, apply, assign, footprint, optim, trace_step
from paredown.assignment.assignment_problem import AssignmentProblem, ladder_of
from paredown.assignment.checkpointed_layers import added_seconds, layers_alone, repeated_layers
from paredown.assignment.strategies import METHODS, role_table_error
from paredown.autograd.operations import Use
from paredown.errors import BudgetError, PlanError
from paredown.formats.catalog import TIERS
from paredown.models import MODELS, random_batch
from paredown.models.lora import add_lora
from paredown.models.resnet import resnet50
from paredown.models.transformer import ViT
from paredown.plan import checkpointed_trace as checkpoints
from paredown.plan.checkpointed_trace import checkpointed_trace
from paredown.plan.explanation import explain_slots
from tests.predict.steps import step_of, traced

RARE = ("mobilenet", "shufflenet", "squeezenet")  # each takes as long to trace as all others
NAMES = pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.full) if name in RARE else name for name in MODELS])
TRACES: dict[tuple[str, int], Trace] = {}


def trace_of(name: str, num: int = 32) -> Trace:
    """The trace of a model for training with AdamW, made once."""
    if (name, num) not in TRACES:
        TRACES[name, num] = traced(name, num, optimizer="adamw")
    return TRACES[name, num]


@NAMES
@pytest.mark.parametrize("share", [90, 70, 50])
def test_half_of_the_memory_is_enough_or_the_error_explains(name: str, share: int) -> None:
    trace = trace_of(name)
    budget = footprint(trace).peak_bytes * share // 100
    floor = AssignmentProblem.of(trace, METHODS["role"]).ledger.floor_bytes
    try:
        plan = assign(trace, f"{share}%")
    except BudgetError as error:
        assert floor > budget
        assert "the smallest needs" in str(error) and "Largest at the peak: '" in str(error)
        return
    assert footprint(trace, plan).peak_bytes <= budget
    assert plan.made_for["budget_bytes"] == budget and "peak" in plan.reason
    alone = layers_alone(trace, budget, lambda of, ladder: AssignmentProblem.of(of, METHODS["role"], ladder=ladder))
    if alone is not None:
        assert added_seconds(trace, plan) <= added_seconds(trace, Plan((), recompute=alone[2])), "never slower than layers alone"
    assert plan.recompute or floor <= budget


def test_half_fits_where_activations_are_most() -> None:
    for name in ("resnet18", "resnet50", "vit", "convnext"):
        plan = assign(trace_of(name), "50%", recompute=False)
        assert footprint(trace_of(name), plan).fits("50%")


@pytest.mark.parametrize("name", ["resnet18", "gpt", "unet"])
def test_names_are_the_same_at_another_batch_size(name: str, tmp_path: Path) -> None:
    small, large = trace_of(name, 32), trace_of(name, 48)
    plan = assign(small, "60%")
    plan.save(tmp_path / "plan.json")
    plan = Plan.load(tmp_path / "plan.json")
    foot = footprint(large, plan)
    assert not [note for note in foot.notes if "no slot of this step" in note]
    assert foot.peak_bytes <= 1.55 * footprint(small, plan).peak_bytes
    assert foot.peak_bytes < 0.75 * footprint(large).peak_bytes
    with apply(plan, step_of(name, 8)[0]) as session:
        assert session.plan == plan


def test_it_trains_as_it_was_planned() -> None:
    model, batch, loss = step_of("resnet18", 16)
    trace = traced("resnet18", 16, optimizer="adamw")
    exact = copy.deepcopy(model)
    plan = assign(trace, "50%")
    session = apply(plan, model)
    losses: dict[str, float] = {}
    for name, net in (("plan", model), ("exact", exact)):
        opt = optim.AdamW(net.parameters(), lr=3e-3)
        for _ in range(12):
            opt.zero_grad()
            value = loss(net(batch[0]), batch[1])
            value.backward()
            opt.step()
        losses[name] = value.item()
    assert losses["plan"] == pytest.approx(losses["exact"], abs=0.1)
    session.close()


def test_every_slot_is_explained() -> None:
    trace = trace_of("gpt")
    plan = assign(trace, "55%", recompute=False)
    slots = explain_slots(trace, plan)
    activations = [row for row in slots if row.role is Role.ACTIVATION]
    assert [row.slot for row in activations] == [slot.name for slot in trace.activations]
    assert sum(row.nbytes for row in activations) == footprint(trace, plan).by_role[Role.ACTIVATION]
    assert {row.slot for row in slots.that("pinned")} <= {slot.name for slot in trace.activations if slot.pin is not None}
    assert slots.that("pinned") and slots.that("quantized") and slots.that("fixed") and slots.that("recomputed")
    assert "backward exponentiates its errors" in repr(slots.that("pinned"))
    assert {row.what for row in explain_slots(trace, Plan())} == {"unmodified", "fixed"}
    assert explain_slots(trace, Plan().recomputing("layers.0")).that("checkpointed")


# --- layers that are checkpointed -----------------------------------------------------------------------------------------------


def deep_trace() -> Trace:
    """Of a ViT of eight layers: those of MODELS have two, and checkpointing one of two saves little of the peak."""
    return trace_step(MODELS["vit"](num_layers=8), random_batch("vit", 32), loss=cross_entropy, device="cpu")


def test_layers_are_found_and_used_where_nothing_else_fits() -> None:
    trace = deep_trace()
    assert sorted(repeated_layers(trace)) == [f"layers.{i}" for i in range(8)]
    assert repeated_layers(traced("resnet18", 32))[0].startswith("layer1.")
    levels = (None, "int8/64@bf16")
    least = AssignmentProblem.of(trace, METHODS["role"], ladder=ladder_of(levels)).smallest.peak_bytes
    with pytest.raises(BudgetError, match="Activation checkpointing was not allowed"):
        assign(trace, least - 1, levels=levels, recompute=False)
    plan = assign(trace, least - 1, levels=levels)
    assert plan.recompute and footprint(trace, plan).peak_bytes < least
    assert "checkpointed" in plan.reason
    assert not assign(trace, least, levels=levels).recompute


def test_layers_are_used_where_errors_would_be_large() -> None:
    trace = deep_trace()
    floor = AssignmentProblem.of(trace, METHODS["role"]).smallest.peak_bytes
    budget = int(1.1 * floor)
    assert not assign(trace, budget, recompute=False).recompute
    plan = assign(trace, budget, recompute=True)
    assert plan.recompute
    assert footprint(trace, plan).peak_bytes <= budget
    assert not assign(trace, "95%", recompute=True).recompute


@pytest.mark.parametrize("share", [0.45, 0.55, 0.65, 0.75])
@pytest.mark.parametrize("recompute", [None, True])
def test_no_more_layers_than_are_needed(share: float, recompute: bool | None) -> None:
    """With one fewer no plan fits, or its error is above that of 8 bits everywhere (of 4, where layers are the last resort)."""
    trace, levels = deep_trace(), (None, "int8/64@bf16", "int4/64@bf16")
    layers, ladder = repeated_layers(trace), ladder_of(levels)
    first, last = (footprint(trace, Plan((), recompute=tuple(of))).peak_bytes for of in ((), layers))
    budget = int(last + share * (first - last) / 2)
    plan = assign(trace, budget, levels=levels, recompute=recompute)
    assert footprint(trace, plan).peak_bytes <= budget
    borne = sum(
        role_table_error(slot, Format.parse("int8/64@bf16" if recompute else "int4/64@bf16"))
        for slot in trace.activations
        if not slot.stays and Use.VALUE in slot.uses
    )
    if plan.recompute:
        fewer = checkpointed_trace(trace, tuple(layers[: len(plan.recompute) - 1]))
        best = AssignmentProblem.of(fewer, METHODS["role"], ladder=ladder).best(budget)
        assert best is None or best.error > borne
        assert set(plan.recompute) == set(layers[: len(plan.recompute)])


def step_on_gpu(make: Callable[[], nn.Module], batch: tuple[torch.Tensor, torch.Tensor]) -> Trace:
    """The trace of a network of real size, of which nothing is made."""
    with torch.device("meta"):
        model = make()
    return trace_step(model, batch, loss=cross_entropy, optimizer="sgdm", device="cuda", autocast=torch.bfloat16)


def test_predicted_time_orders_plans_as_measured() -> None:
    """One H200: 4 bits add 12.3 and 7.4 ms, checkpointing all layers 21.4 and 10.6 (results/session.json, results/assign_times.json)."""
    for make, num, measured in ((resnet50, 256, (12.3, 21.4)), (ViT, 128, (7.4, 10.6))):
        pictures = torch.empty(num, 3, 224, 224, device="meta"), torch.empty(num, dtype=torch.int64, device="meta")
        trace = step_on_gpu(make, pictures)
        every = Plan((), recompute=tuple(repeated_layers(trace)))
        predicted = [1e3 * added_seconds(trace, plan) for plan in (Plan.uniform(activation="int4/64@bf16"), every)]
        assert all(0.6 < a / b < 1.6 for a, b in zip(predicted, measured, strict=True)), predicted
        budget = footprint(trace, every).peak_bytes
        plan = assign(trace, budget)
        assert footprint(trace, plan).peak_bytes <= budget
        assert 1e3 * added_seconds(trace, plan) < 0.95 * predicted[1], "at the peak of checkpointing it is predicted to be quicker"
        assert not any(plan.find((slot.name,), Role.WEIGHT).format for slot in trace.of(Role.WEIGHT))


def test_layers_by_the_names_that_libraries_give_them() -> None:
    """encoder_layer_3 is one of several; conv1 and fc2 are parts of one."""

    def layer() -> nn.Module:
        return nn.Sequential(OrderedDict(fc1=nn.Linear(64, 64), act=nn.GELU(), fc2=nn.Linear(64, 64)))

    model = nn.Sequential(OrderedDict((f"encoder_layer_{number}", layer()) for number in range(3)))
    trace = trace_step(model, (torch.empty(256, 64), torch.empty(256, 64)), loss=mse_loss, device="cpu")
    assert sorted(repeated_layers(trace)) == ["encoder_layer_0", "encoder_layer_1", "encoder_layer_2"]


# --- methods ----------------------------------------------------------------------------------------------------------------------


def lowered(trace: Trace, plan: Plan) -> set[str]:
    return {
        row.slot
        for row in explain_slots(trace, plan)
        if row.what in ("quantized", "pinned", "recomputed") and row.role is Role.ACTIVATION
    }


def test_where_layers_alone_are_enough_nothing_looks_at_activations() -> None:
    trace = trace_of("gpt")
    layers = tuple(repeated_layers(trace))
    budget = footprint(trace, Plan((), recompute=layers)).peak_bytes
    plan = assign(trace, budget, levels=(None,))
    assert plan.recompute and not plan.packs_activations and not plan.rules
    assert footprint(trace, plan).peak_bytes <= budget


def test_levels_start_at_the_first_and_lower_activations_alone() -> None:
    trace = trace_of("resnet18")
    high = footprint(trace, Plan.uniform(activation="int8/64@bf16")).peak_bytes
    low = footprint(trace, Plan.uniform(activation="int2/64@bf16")).peak_bytes
    for name in ("size", "role", "random", "operator"):
        plan = assign(trace, high, method=name, levels=("int8/64@bf16", "int2/64@bf16"))
        formats = {row.format for row in explain_slots(trace, plan) if row.what in ("quantized", "recomputed")}
        assert formats == {"int8/64@bf16", "uint8/64@bf16+bf16"}, name  # the latter before norms
        if name != "operator":
            plan = assign(trace, (high + low) // 2, method=name, levels=("int8/64@bf16", "int2/64@bf16"))
            formats = {row.format for row in explain_slots(trace, plan) if row.what in ("quantized", "recomputed")}
            assert {"int8/64@bf16", "int2/64@bf16"} <= formats, name
            assert formats <= {"int8/64@bf16", "int2/64@bf16", "uint8/64@bf16+bf16", "uint2/64@bf16+bf16"}, name


def test_size_takes_the_largest_first_and_operator_inputs_of_products() -> None:
    trace = traced("resnet18", 32)
    rows = [row for row in explain_slots(trace, assign(trace, "90%", method="size")) if row.what in ("quantized", "recomputed")]
    kept = [row for row in explain_slots(trace, assign(trace, "90%", method="size")).that("unmodified")]
    assert min(row.baseline_bytes for row in rows) >= max(row.baseline_bytes for row in kept)
    ops = {saver.op for name in lowered(trace, assign(trace, "90%", method="operator")) for saver in trace.slot(name).savers}
    assert ops <= {"conv", "linear", "matmul", "relu"}
    seeds = [assign(trace, "80%", method="random", seed=seed) for seed in (0, 0, 1)]
    assert seeds[0] == seeds[1] != seeds[2]


def test_sensitivities_turn_the_order_around() -> None:
    """A slot that was measured as harmless goes first, one measured as harmful last, whatever their roles."""
    trace = traced("vit", 32)
    names = [slot.name for slot in trace.activations if not slot.stays and slot.parts]
    worst = "layers.0.mlp.1:input"
    for bad in (worst, "layers.1.norm1:input"):
        errors = {name: {"int8/64@bf16": 1e-6, "int4/64@bf16": 1e-4} for name in names} | {bad: {"int8/64@bf16": 1e3}}
        plan = assign(trace, "70%", method="sensitivity", sensitivities=Sensitivities(errors), recompute=False)
        assert bad not in lowered(trace, plan)
        assert len(lowered(trace, plan)) >= 5
    assert worst in lowered(trace, assign(trace, "70%", recompute=False))


# --- bad input --------------------------------------------------------------------------------------------------------------------


def test_a_budget_that_nothing_fits() -> None:
    trace = trace_of("gpt")
    said = r"no plan of method 'role' fits 1\.00 KiB \(1\.02 KB\); the smallest needs .* MiB\. Largest at the peak: '.* \("
    with pytest.raises(BudgetError, match=said) as error:
        assign(trace, "1KiB")
    smallest = AssignmentProblem.of(trace, METHODS["role"]).smallest.peak_bytes
    assert "Raise the budget, lower the batch (now 0: (32, 64) int64" in str(error.value)
    assert footprint(trace, assign(trace, smallest, recompute=False)).peak_bytes == smallest


def test_pins_that_contradict_the_budget() -> None:
    trace = traced("gpt", 32)
    floor = AssignmentProblem.of(trace, METHODS["role"]).smallest.peak_bytes
    with pytest.raises(BudgetError, match=r"The pins contradict this budget: without them .* backward exponentiates its errors"):
        assign(trace, floor - 1, recompute=False)


@pytest.mark.parametrize("budget", ["much", "8G", -1, 1.5, None, True, "", "50 %%"])
def test_budgets_that_are_none(budget: object) -> None:
    with pytest.raises(BudgetError, match="size"):
        assign(trace_of("mlp"), budget)  # type: ignore[arg-type]


def test_other_bad_input() -> None:
    trace = trace_of("mlp")
    with pytest.raises(PlanError, match=r"method 'sice' is unknown\. Allowed: size \(.*; role \(.*; sensitivity \(.*; random \("):
        assign(trace, "50%", method="sice")
    with pytest.raises(PlanError, match=r"method 'sensitivity' needs sensitivities\. Give assign"):
        assign(trace, "50%", method="sensitivity")
    with pytest.raises(PlanError, match=r"of another model: none of their 1 slots, 'x:input' the first, is among the \d+ of MLP"):
        assign(trace, "50%", method="sensitivity", sensitivities=Sensitivities({"x:input": {"int8/64@bf16": 1.0}}))
    with pytest.raises(PlanError, match="method 'role' does not use sensitivities"):
        assign(trace, "50%", sensitivities=Sensitivities({"x:input": {"int8/64@bf16": 1.0}}))
    with pytest.raises(PlanError, match="sensitivities are the result of probe"):
        assign(trace, "50%", method="sensitivity", sensitivities={})  # type: ignore[arg-type]
    with pytest.raises(PlanError, match=r"recompute is 'layers\.0': None"):
        assign(trace, "50%", recompute="layers.0")  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="assign takes a Trace and a budget, not str"):
        assign("50%", trace)  # type: ignore[arg-type]
    for levels in ("int8/64@bf16", ()):
        with pytest.raises(PlanError, match="levels are formats, the best first"):
            assign(trace, "50%", levels=levels)
    with pytest.raises(PlanError, match="int99"):
        assign(trace, "50%", levels=("int99",))
    for levels in (("int2/64@bf16", "int8/64@bf16"), ("int8/64@bf16", None)):
        with pytest.raises(PlanError, match=r"levels go from the best down, but .* is better than int"):
            assign(trace, "50%", levels=levels)


def test_a_baseline_that_fits_has_an_empty_plan() -> None:
    trace = trace_of("mlp")
    plan = assign(trace, "100%")
    assert plan.changes_nothing and "within" in plan.reason
    assert torch.is_grad_enabled()


def test_a_search_over_layers_checkpoints_each_of_them_few_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer more is added to the step with the layers before it; the search does not begin with the first layer each time."""
    layers = [nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)) for _ in range(8)]
    batch = torch.empty(512, 64), torch.empty(512, 64)
    trace = trace_step(nn.Sequential(*layers), batch, loss=mse_loss, device="cpu")
    made: list[str] = []
    add = checkpoints._with_checkpoint

    def counted(step: Trace, span: checkpoints.CheckpointSpan) -> Trace:
        made.append(span.module)
        return add(step, span)

    monkeypatch.setattr(checkpoints, "_with_checkpoint", counted)
    assign(trace, "40%")
    assert len(layers) <= len(made) <= 2 * len(layers), "once alone, to see what it saves, and once after the layers before it"


def mlp_trace(rank: int | None, optimizer: str = "adamw") -> Trace:
    """Weights of 256 KiB each and activations of 16 KiB: a budget is reached by weights alone."""
    model = nn.Sequential(*(part for _ in range(4) for part in (nn.Linear(256, 256), nn.GELU())))
    if rank is not None:
        add_lora(model, rank)
    return trace_step(model, (torch.empty(16, 256), torch.empty(16, 256)), loss=mse_loss, optimizer=optimizer, device="cpu")


def test_gradients_are_in_4_bits_before_activations_are_in_2() -> None:
    """At a peak that 4-bit activations need 4-bit gradients for, less 2 %: in the prior `state_budgets` 2-bit activations cost more."""
    model = nn.Sequential(*(part for _ in range(8) for part in (nn.Linear(256, 256), nn.GELU())))
    trace = trace_step(model, (torch.empty(512, 256),) * 2, loss=mse_loss, optimizer="adamw", device="cpu")
    plans = {
        bits: Plan.uniform(activation="int4/64@bf16", **TIERS["lpmm4"] | {"gradient": f"int{bits}/64@bf16"}) for bits in (4, 8)
    }
    budget = 98 * footprint(trace, plans[4]).bound_bytes // 100
    assert footprint(trace, plans[8]).bound_bytes > budget
    plan = assign(trace, budget)
    chosen = {slot.name: plan.find((slot.name,), Role.ACTIVATION).format for slot in trace.activations}
    assert {format.element.width for format in chosen.values() if format is not None} == {4}


@pytest.mark.parametrize("method", ["role", "fine_tune"])
@pytest.mark.parametrize("optimizer", ["adamw", "adam"])
def test_frozen_weights_are_packed_in_8_bits_then_in_4(method: str, optimizer: str) -> None:
    """With any optimizer, since none updates them; adapters of 4 x 256 values are too small to pack."""
    trace = mlp_trace(4, optimizer)
    found: list[set[str | None]] = []
    for budget in ("80%", "50%"):
        plan = assign(trace, budget, method=method)
        assert footprint(trace, plan).fits(budget)
        assert {key.partition("=")[0] for key, _ in plan.rules if "frozen" in key or "weight" in key} == {"frozen"}
        assert "of 16 parameters, which are frozen" in plan.reason
        assert "paredown.optim" not in plan.reason
        names = [slot.name for slot in trace.of(Role.WEIGHT) if slot.is_frozen and len(slot.shape) == 2]
        found.append({str(plan.find((name,), Role.FROZEN).format) for name in names} - {"None"})
    assert found[0] == {"int8/64@bf16"} and "nf4/64@bf16" in found[1]


@pytest.mark.parametrize("share", [70, 55])
def test_method_fine_tune_packs_trained_weights_only_with_a_residue(share: int) -> None:
    trace = mlp_trace(None)
    names = [slot.name for slot in trace.of(Role.WEIGHT) if len(slot.shape) == 2]
    plan = assign(trace, f"{share}%", method="fine_tune")
    assert footprint(trace, plan).fits(f"{share}%")
    stored = [(plan.find((name,), Role.WEIGHT).format, plan.find((name,), Role.RESIDUE).format) for name in names]
    assert all(weight is None or residue is not None for weight, residue in stored)
    with pytest.raises(BudgetError, match=r"no plan of method 'fine_tune' fits .*Method 'role' reaches"):
        assign(trace, "40%", method="fine_tune")
    assert footprint(trace, assign(trace, "40%")).fits("40%")
