"""Activation checkpointing: as a part of plans, and in the predicted trace of the step."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from paredown import Plan, Role, footprint, trace_step
from paredown.errors import PlanError
from paredown.models import MODELS
from paredown.plan.checkpointed_trace import checkpointed_trace, modules_of
from tests.predict.steps import traced


def test_plans_print_and_save_checkpointed_modules(tmp_path: Path) -> None:
    plan = Plan.uniform(activation="int8/64@bf16").recomputing("layers.1").recomputing("layers.0", "layers.1")
    assert plan.recompute == ("layers.1", "layers.0")
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    assert "activation checkpointing: layers.1, layers.0" in repr(plan)
    assert plan.explain().splitlines()[-2] == "activation checkpointing: layers.1, layers.0"
    assert plan.set("head:input", None).recompute == plan.recompute
    assert plan != Plan.uniform(activation="int8/64@bf16")
    assert (
        str(plan.diff(Plan.uniform(activation="int8/64@bf16").recomputing("layers.0"))[0])
        == "module layers.1: checkpointed -> no rule"
    )
    assert not plan.diff(plan)
    assert "activation checkpointing" in plan._repr_html_()


def test_files_of_version_1_are_read(tmp_path: Path) -> None:
    old = {
        "version": 1,
        "reason": "",
        "made_for": {},
        "rules": [["activation", {"format": "bf16", "rounding": None, "overflow": None}]],
    }
    (tmp_path / "plan.json").write_text(json.dumps(old))
    assert Plan.load(tmp_path / "plan.json") == Plan.uniform(activation="bf16")


@pytest.mark.parametrize("wrong", ["layers.0", [3], [""], {"layers.0": True}])
def test_wrong_values_of_recompute_raise_plan_error(wrong: object) -> None:
    with pytest.raises(PlanError, match="recompute is a list of modules by path or pattern"):
        Plan.from_json({"version": 2, "rules": [], "recompute": wrong})


def test_only_the_inputs_of_checkpointed_layers_are_stored() -> None:
    """By hand: only the input of each layer is stored, and what it saves is recomputed when its backward begins."""
    trace = traced("gpt")
    again = checkpointed_trace(trace, ("layers.*",))
    inside = {slot.name for slot in trace.activations} - {slot.name for slot in again.activations}
    assert inside and all(name.startswith("layers.") for name in inside)
    inputs = {slot.name: slot for slot in again.activations if slot.name.startswith("layers.")}
    assert list(inputs) == ["layers.0:checkpoint.input", "layers.1:checkpoint.input"]
    for i, slot in enumerate(inputs.values()):
        before = trace.slot(f"layers.{i}.norm1:input")
        assert (slot.storage, slot.nbytes, slot.dropped, slot.stays) == (before.storage, before.nbytes, before.dropped, "")
        inside.remove(before.name)
    foot = footprint(trace, Plan().recomputing("layers.*"))
    stored, baseline = foot.by_role[Role.ACTIVATION], footprint(trace).by_role[Role.ACTIVATION]
    assert baseline - stored == sum(trace.slot(name).nbytes for name in inside)
    assert foot.peak_bytes < footprint(trace).peak_bytes
    assert foot.baseline.peak_bytes == footprint(trace).peak_bytes
    assert "checkpointed" in repr(foot) and "activation checkpointing: layers.0, layers.1" in repr(foot)


def test_casts_of_weights_are_not_stored() -> None:
    """Autocast's copies of the weights of linear layers, two bytes a value: checkpointed layers store none of them."""
    model, ids = MODELS["gpt"](vocabulary=64, dim=64, num_layers=3, num_heads=2, context=32), torch.randint(64, (4, 32))
    trace = trace_step(model, {"ids": ids, "targets": ids}, optimizer="adamw", device="cuda", autocast=torch.bfloat16)
    plans = Plan(), Plan().recomputing("layers.*"), Plan.uniform(weight="int8/64@bf16").recomputing("layers.*")
    kept = [footprint(trace, plan).by_role[Role.TEMPORARY] for plan in plans]
    casts = sum(2 * p.numel() for name, p in model.named_parameters() if name.startswith("layers.") and p.dim() == 2)
    assert kept[0] - kept[1] == casts
    assert kept[2] <= kept[1]


def test_backward_needs_the_result_of_a_module_first() -> None:
    """Backward of the last ReLU of a residual layer needs its output: the layer runs again while the gradient of that is live."""
    trace = traced("resnet18")
    again = checkpointed_trace(trace, ("layer1.1",))
    first = next(
        made for made in trace.outputs if made.phase == "backward" and made.op == "threshold_backward" and made.module == "layer1.1"
    )
    births = {made.birth for made in again.outputs if made.op == "recomputed"}
    assert len(births) == 1 and births.pop() <= first.birth
    result = again.slot("layer2.0.conv1:input")
    assert result.death < trace.slot("layer2.0.conv1:input").death  # the ReLU has a second one


def test_inputs_without_a_gradient_are_stored_although_a_variable_holds_them_too() -> None:
    """The output of a frozen embedding: nn.Sequential holds it longer than the first layer runs, and the checkpoint until backward."""
    parts = ((nn.LayerNorm(32, elementwise_affine=False), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32)) for _ in range(3))
    layers = nn.Sequential(*(nn.Sequential(*part) for part in parts))
    model = nn.Sequential(nn.Embedding(8, 32).requires_grad_(False), layers)
    ids = torch.zeros(256, dtype=torch.int64)
    trace = trace_step(model, (ids, torch.zeros(256, 32)), loss=nn.functional.mse_loss, device="cpu")
    again = checkpointed_trace(trace, ("1.*",))
    (embedded,) = (output for output in again.outputs if output.op == "embedding")
    first = max(slot.birth for slot in again.slots if slot.role is Role.GRADIENT and slot.module.startswith("1.0."))
    assert embedded.death >= first > again.backward_at


def test_outputs_that_the_caller_holds_live_to_the_end() -> None:
    """Hidden states that a model returns live until the step ends, checkpointed or not."""

    class Returns(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(3))

        def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
            hidden = [x]
            for layer in self.layers:
                hidden.append(layer(hidden[-1]))
            return hidden[-1], hidden

    trace = trace_step(Returns(), (torch.empty(64, 64), torch.empty(1)), loss=lambda out, _: out[0].mean(), device="cpu")
    again = checkpointed_trace(trace, ("layers.*",))
    for slot in (slot for slot in again.activations if slot.name.endswith(".0:input")):
        assert slot.death >= trace.slot(slot.name).dropped


@pytest.mark.parametrize("plan", [Plan(), Plan.uniform(frozen="int8/64@bf16")], ids=["baseline", "packed"])
def test_casts_of_frozen_weights(plan: Plan) -> None:
    """Autocast does not cache them: they are stored until backward, but not in a checkpointed layer, and not of packed weights."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(128, 128), nn.GELU()) for _ in range(3)))
    model.requires_grad_(False)
    x = torch.empty(64, 128, requires_grad=True)
    trace = trace_step(model, (x, torch.empty(1)), loss=lambda out, _: out.mean(), device="cuda", autocast=torch.bfloat16)
    by_role = [footprint(trace, one).by_role for one in (plan, plan.recomputing("*"))]
    kept = [by_role[0][Role.TEMPORARY], by_role[1][Role.TEMPORARY] + by_role[1][Role.ACTIVATION]]
    casts = 0 if plan.rules else 3 * 2 * 128 * 128
    inputs = 2 * 2 * 64 * 128  # the inputs of the second and third layer are stored instead
    assert kept[0] - kept[1] == casts - inputs


def test_a_pattern_without_a_module() -> None:
    with pytest.raises(PlanError, match=r"recompute 'layer\.0' is no module\. Closest of \d+: 'layers\.0"):
        footprint(traced("gpt"), Plan().recomputing("layer.0"))


class Shared(nn.Module):
    """One layer, called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.layer(x))


def test_a_module_that_is_called_twice_is_a_note() -> None:
    batch = torch.empty(128, 64), torch.empty(128, 64)
    trace = trace_step(Shared(), batch, loss=nn.functional.mse_loss, device="cpu")
    assert "layer" in modules_of(trace)
    foot = footprint(trace, Plan().recomputing("layer"))
    assert foot.peak_bytes == footprint(trace).peak_bytes
    assert any("'layer' is called 2 times" in note for note in foot.notes)
