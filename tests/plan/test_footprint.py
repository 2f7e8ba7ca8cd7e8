"""Footprints against the memory of real steps, and against sums made by hand."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from paredown.autograd.operations import Needs
from paredown.errors import BudgetError, PlanError
from paredown.formats.format import Format
from paredown.models import MODELS
from paredown.models.transformer import GPT, token_loss
from paredown.plan.byte_intervals import slot_storages
from paredown.plan.footprint import DEVICES, Footprint, footprint
from paredown.plan.plan import Plan
from paredown.plan.storage import Assignment, resolve_format
from paredown.predict.trace_step import trace_step
from paredown.roles import Role
from tests.predict.steps import peak_bytes, saved_bytes, step_of, traced
from tests.predict.test_trace import WIDE, Parts, X, trace

INT8, INT4 = "int8/64@bf16", "int4/64@bf16"
BROUGHT = (Role.WEIGHT, Role.BUFFER, Role.INPUT)
# What a real peak may differ by: oneDNN's scratch for convolutions is no tensor of the step, and small steps show it most.
SLACK = {"resnet18": 0.04, "resnet50": 0.02, "sumlast18": 0.04, "shufflenet": 0.001, "mobilenet": 0.001, "unet": 0.12, "lstm": 0.03}


def beside(foot: Footprint, nbytes: int) -> int:
    """`nbytes` without what is allocated before the step."""
    return nbytes - sum(foot.by_role.get(role, 0) for role in BROUGHT)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("num", [4, 16])
def test_the_peak_is_that_of_a_real_step(name: str, num: int) -> None:
    model, batch, loss = step_of(name, num)
    foot = footprint(traced(name, num))
    real = peak_bytes(model, batch, loss)
    if name == "convnext":  # 6 MB of workspace for depthwise convolutions, beside 2 MB of tensors
        assert beside(foot, foot.low_bytes) <= real <= beside(foot, foot.high_bytes)
    elif name in SLACK:
        assert beside(foot, foot.peak_bytes) == pytest.approx(real, rel=SLACK[name])
        assert real <= beside(foot, foot.high_bytes)
    else:
        assert beside(foot, foot.peak_bytes) == real


@pytest.mark.parametrize("name", ["resnet18", "vit", "gpt", "unet", "convnext", "lstm"])
def test_activations_by_role_are_those_of_a_real_step(name: str) -> None:
    assert footprint(traced(name)).by_role[Role.ACTIVATION] == pytest.approx(saved_bytes(*step_of(name)), rel=0.03)


def test_a_large_model_by_hand() -> None:
    with torch.device("meta"):
        model, ids = GPT(), torch.zeros(16, 1024, dtype=torch.int64)
    found = trace_step(model, (ids, ids), loss=token_loss, optimizer="adamw", device="cuda", autocast=torch.bfloat16)
    foot = footprint(found, Plan.preset("activations8"))
    assert foot.peak_bytes < 0.8 * foot.baseline.peak_bytes  # the loss, outside of the model, is most of the rest
    # By hand, for each layer and token: two norms' inputs in float32, and in 16 bits what the products, the attention and GELU save.
    tokens, dim = 16 * 1024, 768
    layer = tokens * (2 * 4 * dim + 2 * (dim + 3 * dim + dim + dim + 4 * dim + 4 * dim) + 4 * 12 + 4 * 4)
    ends = tokens * (
        4 * dim + 2 * 4 + 2 * dim + (2 + 4) * 50257 + 8
    )  # last norm, head, log-probabilities and their cast, positions aside
    assert foot.baseline.by_role[Role.ACTIVATION] == pytest.approx(12 * layer + ends, rel=0.001)


# --- by hand -------------------------------------------------------------------------------------------------------------------

ROWS = 64
HIDDEN = ROWS * WIDE  # values of each hidden tensor


def mlp() -> nn.Module:
    """x -> a -> relu b -> c -> sigmoid d -> e; the first layer saves the batch, which the caller holds."""
    wide = {name: nn.Linear(WIDE, WIDE, bias=False) for name in ("one", "two", "three")}
    return Parts(lambda self, x: self.three(self.two(self.one(x).relu()).sigmoid()), **wide)


BATCH = (torch.ones(ROWS, WIDE), torch.ones(ROWS, WIDE))
MLP = trace_step(mlp(), BATCH, loss=mse_loss, device="cpu", optimizer="adamw")


def test_stored_bytes_by_hand() -> None:
    weights = 3 * WIDE * WIDE * 4
    roles = footprint(MLP).by_role
    assert {role: roles[role] for role in (Role.WEIGHT, Role.GRADIENT, Role.MOMENT1, Role.MOMENT2)} == {
        Role.WEIGHT: weights,
        Role.GRADIENT: weights,
        Role.MOMENT1: weights,
        Role.MOMENT2: weights,
    }
    assert roles[Role.INPUT] == 2 * HIDDEN * 4
    assert roles[Role.ACTIVATION] == 3 * HIDDEN * 4  # after relu, after sigmoid, and the output, which the loss saves


def test_packed_bytes_by_hand() -> None:
    roles = footprint(MLP, Plan.uniform(activation=INT4)).by_role
    nbytes = Format.parse(INT4).nbytes
    sigmoid = Format.parse("uint8/64@bf16+bf16").nbytes((HIDDEN,))  # its output is pinned, with minimums
    assert roles[Role.ACTIVATION] == nbytes((HIDDEN,)) + HIDDEN // 8 + sigmoid + HIDDEN * 4  # values and signs; sigmoid; output
    chosen = slot_storages(MLP, Plan.uniform(activation=INT4))
    assert str(chosen[":sigmoid.output"].format) == "uint8/64@bf16+bf16" and "pinned" in chosen[":sigmoid.output"].reason
    assert str(chosen["two:input"].format) == INT4


def test_other_roles_take_their_formats_in_logical_order() -> None:
    plan = Plan.uniform(weight="int8/64@e8m0", gradient=INT8, moment1=INT8, moment2="uint8/64@bf16")
    foot = footprint(MLP, plan)
    for role, text in ((Role.WEIGHT, "int8/64@e8m0"), (Role.GRADIENT, INT8), (Role.MOMENT1, INT8), (Role.MOMENT2, "uint8/64@bf16")):
        assert foot.by_role[role] == 3 * Format.parse(text).nbytes((WIDE, WIDE))
    assert foot.peak_bytes < footprint(MLP).peak_bytes


def test_a_plan_without_rules_is_the_baseline() -> None:
    assert footprint(MLP, Plan.uniform()) == footprint(MLP)


def test_slots_by_name_and_pattern() -> None:
    whole = footprint(MLP).by_role[Role.ACTIVATION]
    one = footprint(MLP, Plan().set("two:input", INT8)).by_role[Role.ACTIVATION]
    assert one == whole - HIDDEN * 4 + Format.parse(INT8).nbytes((HIDDEN,)) + HIDDEN // 8
    assert footprint(MLP, Plan().set("three:*", INT8)).by_role[Role.ACTIVATION] == whole  # its first saver is the sigmoid


def test_the_peak_falls_with_the_width() -> None:
    found = traced("resnet18", 16, device="cuda", autocast=torch.bfloat16)
    peaks = [footprint(found, plan).peak_bytes for plan in (Plan(), *(Plan.preset(f"activations{n}") for n in (8, 4, 2)))]
    assert peaks == sorted(peaks, reverse=True) and len(set(peaks)) == 4


def test_a_recomputed_slot_takes_no_bytes() -> None:
    found = traced("resnet18", 16)
    chosen = slot_storages(found, Plan.uniform(activation=INT8))
    assert chosen["layer1.0.conv1:input"].recomputed and not chosen["bn1:input"].recomputed
    alone = slot_storages(found, Plan().set("layer1.0.conv1:input", INT8))
    assert alone["layer1.0.conv1:input"].packs and not alone["layer1.0.conv1:input"].recomputed


def test_masks_and_indices_are_packed_without_loss() -> None:
    parts = {"conv": nn.Conv2d(3, 8, 3, padding=1), "pool": nn.MaxPool2d(2), "drop": nn.Dropout(0.5)}
    model = Parts(lambda self, x: self.drop(self.pool(self.conv(x))).sum(), **parts)
    found = trace(model, (torch.ones(8, 3, 32, 32),), loss=None, device="cuda")
    numel = 8 * 8 * 16 * 16
    held = footprint(found, Plan.uniform(activation=INT8)).by_role[Role.ACTIVATION]
    assert (
        held == numel * 2 + numel // 8
    )  # indices below 1024 in 2 bytes, a bit of the mask; of the pool's input backward needs the shape only


# --- sizes ---------------------------------------------------------------------------------------------------------------------


def test_low_expected_and_high_are_in_order() -> None:
    for device in DEVICES:
        foot = footprint(traced("resnet18", device=device))
        assert foot.low_bytes <= foot.peak_bytes <= foot.high_bytes
    assert foot.workspace_bytes == (DEVICES[device].matmul_workspace)


@pytest.mark.parametrize(("rows", "margin"), [(768, 2**19 + 3 * 2**10), (1024, 2**12), (256, 0)])
def test_the_bound_has_a_part_of_each_large_tensor_and_half_a_mib_for_odd_sizes(rows: int, margin: int) -> None:
    """All tensors have 1.5 MiB, 2 MiB or 0.5 MiB; inputs stay from step to step."""
    x = torch.empty(rows, 512, requires_grad=True)
    model = nn.Sequential(nn.Tanh(), nn.Tanh(), nn.Tanh())
    foot = footprint(trace_step(model, (x, x), loss=lambda out, _: out.square().sum(), device="cuda"))
    num_live = sum(nbytes for role, nbytes in foot.at_peak.items() if role is not Role.INPUT) // (rows * 2048)
    assert num_live > 3 and foot.bound_bytes - foot.peak_bytes == num_live * margin


def test_weights_and_moments_need_no_margin() -> None:
    """Each has 2.25 MiB; the gradient comes and goes. On a CPU nothing is rounded."""
    batch = (torch.empty(4, 768),) * 2
    for device, margin in (("cuda", 2**19 + 9 * 2**9), ("cpu", 0)):
        wide = trace_step(nn.Linear(768, 768, bias=False), batch, loss=mse_loss, device=device, optimizer="adamw")
        assert footprint(wide).bound_bytes - footprint(wide).peak_bytes == margin


@pytest.mark.parametrize(
    ("layout", "dtype", "copies"), [("nchw", None, 4), ("nhwc", None, 4), ("nchw", "bf16", 0), ("nhwc", "bf16", 0)]
)
def test_the_bound_has_three_operands_of_a_convolution(layout: str, dtype: str | None, copies: int) -> None:
    """Of 4 MiB each, beside a part in 512 of the large tensors; in bf16 copies are expected, and have no margin."""
    conv, x = nn.Conv2d(64, 64, 3, padding=1), torch.empty(16, 64, 32, 32)
    if layout == "nhwc":
        conv, x = conv.to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)
    autocast = torch.bfloat16 if dtype else None
    foot = footprint(trace_step(conv, (x, x), loss=mse_loss, device="cuda", autocast=autocast))
    large = sum(nbytes for role, nbytes in foot.at_peak.items() if role is not Role.INPUT)
    assert 3 * copies * x.numel() <= foot.bound_bytes - foot.peak_bytes <= 3 * copies * x.numel() + large // 512
    assert foot.high_bytes >= foot.bound_bytes


def test_on_cuda_sizes_are_rounded_up() -> None:
    model = nn.Linear(3, 1, bias=False)
    found = trace_step(model, (torch.ones(1, 3), torch.ones(1, 1)), loss=mse_loss, device="cuda")
    foot = footprint(found)
    assert (foot.peak_bytes - foot.workspace_bytes) % 512 == 0
    assert foot.by_role[Role.WEIGHT] == 12 and foot.at_peak[Role.WEIGHT] == 512


def test_fits_lists_what_is_not_counted() -> None:
    foot = footprint(MLP)
    assert foot.fits(foot.peak_bytes) and not foot.fits(foot.peak_bytes - 1)
    assert "does not fit" in repr(foot.fits("1MiB")) and "Not counted: the interpreter" in repr(foot.fits("1MiB"))
    assert foot.fits("100%") and not foot.fits("99%")
    assert footprint(traced("vit", 16), Plan.preset("activations8")).fits("70%")
    assert "CUDA context" in repr(footprint(traced("mlp", device="cuda")).fits("8GiB"))
    with pytest.raises(BudgetError):
        foot.fits("8G")


def test_bytes_by_module() -> None:
    foot = footprint(traced("vit", optimizer="adamw"))
    whole = sum(foot.by_role.values())
    assert sum(foot.by_module().values()) == whole == sum(foot.by_module(depth=1).values())
    assert foot.by_module(depth=1)["layers"] > foot.by_module(depth=2)["layers.0"]
    assert list(foot.by_module().values()) == sorted(foot.by_module().values(), reverse=True)


def test_it_prints_as_a_table() -> None:
    foot = footprint(traced("vit"), Plan.uniform(activation=INT4))
    text = repr(foot)
    assert text.startswith("Footprint of ViT on cpu, float32: peak ") and "activations8" in text and "this plan" in text
    assert text.splitlines()[2].startswith(
        "  step time: not predicted, nothing is measured for device 'cpu'. Run `paredown calibrate`"
    )
    assert " ".join(text.splitlines()[3].split()) == "largest slots baseline this plan activations8 activations4 activations2"
    assert "<table>" in foot._repr_html_() and "layers.1.mlp.1:input" in foot._repr_html_()


def test_tensors_held_outside_of_autograd_are_not_packed() -> None:
    def forward(self, x):
        self.seen = self.one(x)
        return self.two(self.seen.relu())

    model = Parts(forward, one=nn.Linear(WIDE, WIDE), two=nn.Linear(WIDE, WIDE))
    found = trace(model, (X, X))
    held = next(slot for slot in found.activations if slot.name == "one:addmm.held")
    assert "something other than autograd" in held.stays and not hasattr(model, "seen")
    assert footprint(found).by_role[Role.ACTIVATION] == 3 * 2 * WIDE * 4


# --- what is refused ---------------------------------------------------------------------------------------------------------


def test_a_pattern_that_matches_nothing_is_refused_before_anything_runs() -> None:
    with pytest.raises(PlanError, match=r"pattern 'twoo\*' matches no slot"):
        footprint(MLP, Plan().set("twoo*", INT8))


def test_a_name_of_no_slot_is_a_note() -> None:
    foot = footprint(MLP, Plan().set("two:input", INT8).set("nine:input", INT8))
    assert any("nine:input" in note for note in foot.notes)


def test_arguments_in_the_wrong_order_raise_plan_error() -> None:
    with pytest.raises(PlanError, match="in this order"):
        footprint(Plan(), MLP)  # type: ignore[arg-type]


def test_integers_without_a_block_are_unmodified_with_a_reason() -> None:
    format, reason = resolve_format(Assignment.parse("int4"), Needs(), dtype="float32", numel=1 << 20)
    assert format is None
    assert "can only store values from -7 to 7" in reason and "write int4/64@bf16" in reason
