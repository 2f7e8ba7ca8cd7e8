"""Weights, gradients and optimizer state under a plan: bytes by hand, and lifetimes of decoded copies."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear, mse_loss
from torch.utils.checkpoint import checkpoint

from paredown.autograd.operations import Use
from paredown.formats.catalog import MIN_NUMEL, TIERS, is_small
from paredown.models.transformer import GPT, token_loss
from paredown.plan.byte_intervals import model_memory
from paredown.plan.footprint import Footprint, footprint, model_bytes
from paredown.plan.plan import Plan
from paredown.plan.trace import Slot, Trace
from paredown.predict.trace_step import trace_step
from paredown.roles import Role
from tests.plan.test_footprint import MLP, ROWS
from tests.predict.steps import traced
from tests.predict.test_trace import WIDE, Parts

INT8, ONE_BYTE = "int8/64@bf16", "int8/64@e8m0"
SIDE = 64  # a matrix of SIDE x SIDE is the smallest that is packed, one block a row
MATRIX, VECTOR = SIDE * SIDE, SIDE
LPMM = Plan.preset("lpmm")


def small_trace(model: nn.Module | None = None, *, dtype: torch.dtype = torch.float32, **options) -> Trace:
    """The trace of a layer with 4096 weights and a bias of 64."""
    model = (model or nn.Linear(SIDE, SIDE)).to(dtype)
    x = torch.ones(2, SIDE, dtype=dtype)
    return trace_step(model, (x, x), loss=mse_loss, **{"device": "cpu", "optimizer": "adamw", **options})


def kept(foot: Footprint) -> dict[str, int]:
    """Stored bytes of weights, gradients, residues and moments."""
    roles = (Role.WEIGHT, Role.GRADIENT, Role.MOMENT1, Role.MOMENT2, Role.RESIDUE)
    return {role.value: foot.by_role[role] for role in roles if role in foot.by_role}


def weight(trace: Trace, name: str) -> Slot:
    """The slot of a parameter."""
    return trace.slot(name, Role.WEIGHT)


# --- bytes by hand -------------------------------------------------------------------------------------------------------------


def test_small_parameters_by_the_rule() -> None:
    assert is_small((MIN_NUMEL * 2,)) and is_small((1, MIN_NUMEL - 1)) and not is_small((1, MIN_NUMEL)) and is_small(())


@pytest.mark.parametrize(
    ("tier", "weights", "residue", "moments"),
    [
        ("safe", 2 * MATRIX, MATRIX, MATRIX + 2 * SIDE),  # a bf16 scale for each row, which is one block
        ("half", 2 * MATRIX, 0, MATRIX + 2 * SIDE),
        ("lpmm", MATRIX + SIDE, 0, MATRIX + 2 * SIDE),  # an e8m0 scale for each row
        ("lpmm4", MATRIX + SIDE, 0, MATRIX // 2 + 2 * SIDE),
    ],
)
def test_tiers_on_one_layer(tier: str, weights: int, residue: int, moments: int) -> None:
    plain = 4 * VECTOR  # the bias has one dimension: float32, whatever the tier
    expected = {
        "weight": weights + plain,
        "gradient": MATRIX + 2 * SIDE + plain,
        "moment1": moments + plain,
        "moment2": moments + plain,
    }
    foot = footprint(small_trace(), Plan.preset(tier))
    assert kept(foot) == {**expected, **({"residue": residue} if residue else {})}
    assert foot.model_bytes == sum(kept(foot).values()) == model_bytes(small_trace(), Plan.preset(tier))
    assert foot.notes == ()


def test_a_bfloat16_model_keeps_its_weights_and_small_ones_get_8_bits_more() -> None:
    trace = small_trace(dtype=torch.bfloat16)
    assert kept(footprint(trace)) == dict.fromkeys(("weight", "gradient", "moment1", "moment2"), 2 * (MATRIX + VECTOR))
    half = footprint(trace, Plan.preset("half"))
    moments = MATRIX + 2 * SIDE
    assert kept(half) == {
        "weight": 2 * (MATRIX + VECTOR),
        "gradient": moments + 2 * VECTOR,
        "moment1": moments + 4 * VECTOR,
        "moment2": moments + 4 * VECTOR,
        "residue": VECTOR,
    }
    assert not [i for i in model_memory(trace, Plan.preset("half")) if i.role is Role.TEMPORARY]  # nothing is decoded
    assert footprint(trace, Plan.preset("safe")).by_role[Role.RESIDUE] == MATRIX + VECTOR


def test_a_moment_without_a_format_is_float32_beside_packed_ones_and_as_traced_otherwise() -> None:
    trace = small_trace(dtype=torch.bfloat16)
    one = kept(footprint(trace, Plan.uniform(moment1=INT8)))
    assert one["moment1"] == MATRIX + 2 * SIDE + 4 * VECTOR and one["moment2"] == 4 * (MATRIX + VECTOR)
    assert kept(footprint(trace, Plan.uniform(activation=INT8)))["moment2"] == 2 * (MATRIX + VECTOR)
    bias = kept(footprint(trace, Plan().set("moment2=bias", INT8)))
    assert bias["moment2"] == 2 * MATRIX + 4 * VECTOR, "asked for, but small"


def test_only_bf16_weights_have_a_residue() -> None:
    assert Role.RESIDUE not in footprint(small_trace(), Plan.uniform(residue="int8", weight=ONE_BYTE)).by_role
    assert footprint(small_trace(), Plan.uniform(residue="int8", weight="bf16")).by_role[Role.RESIDUE] == MATRIX


def test_weights_are_unmodified_in_formats_that_save_nothing() -> None:
    plan = Plan.uniform(weight="fp32")
    assert footprint(small_trace(), plan).by_role == footprint(small_trace()).by_role


def test_frozen_weights_are_packed_too_and_have_no_gradient_or_state() -> None:
    foot = footprint(small_trace(nn.Sequential(nn.Linear(SIDE, SIDE).requires_grad_(False), nn.Linear(SIDE, SIDE))), LPMM)
    assert foot.by_role[Role.WEIGHT] == 2 * (MATRIX + SIDE + 4 * VECTOR)
    assert foot.by_role[Role.MOMENT1] == MATRIX + 2 * SIDE + 4 * VECTOR


def test_parameters_of_the_loss_are_unmodified() -> None:
    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(SIDE, SIDE, bias=False)

        def forward(self, output: Tensor, target: Tensor) -> Tensor:
            return mse_loss(self.fc(output), target)

    x = torch.ones(2, SIDE)
    found = trace_step(nn.Linear(SIDE, SIDE, bias=False), (x, x), loss=Loss(), optimizer="sgdm", device="cpu")
    assert kept(footprint(found, LPMM)) == {
        "weight": MATRIX + SIDE + 4 * MATRIX,
        "gradient": MATRIX + 2 * SIDE + 4 * MATRIX,
        "moment1": MATRIX + 2 * SIDE + 4 * MATRIX,
    }


def test_a_large_model_takes_a_quarter() -> None:
    with torch.device("meta"):
        model, ids = GPT(), torch.zeros(1, 1024, dtype=torch.int64)
    found = trace_step(model, (ids, ids), loss=token_loss, optimizer="adamw", device="cuda")
    sizes = [model_bytes(found, Plan.preset(name)) if name else model_bytes(found, Plan()) for name in ("", *list(TIERS)[1:])]
    assert sizes == sorted(sizes, reverse=True)
    parameters = sum(p.numel() for p in model.parameters())
    assert sizes[0] == 16 * parameters
    for size, bytes_each in zip(
        sizes[1:], (6.09375, 6.0234375, 5.09375, 4.109375, 3.109375), strict=True
    ):  # of what is packed, by hand
        assert size == pytest.approx(bytes_each * parameters, rel=0.005)  # norms and biases are a thousandth of the parameters
    assert footprint(found, LPMM).model_bytes == sizes[4] <= 0.27 * sizes[0]


# --- when plain copies are there -----------------------------------------------------------------------------------------------


def test_the_peak_under_lpmm_by_hand() -> None:
    foot = footprint(MLP, LPMM)
    matrix, hidden = WIDE * WIDE, ROWS * WIDE * 4
    blocks = matrix // 64
    assert foot.model_bytes == 3 * (4 * matrix + blocks * (1 + 2 + 2 + 2))
    # In backward of the last layer: its weight is decoded for the gradient of its input, beside its plain gradient. Both inputs, relu,
    # sigmoid, output, the output's gradient and the input's are as large as a hidden tensor; the loss and its gradient are numbers.
    assert foot.low_bytes == foot.model_bytes + 2 * 4 * matrix + 7 * hidden + 2 * 4
    baseline = footprint(MLP)
    # Baseline, in backward of the first layer: all gradients, both inputs, the output (which the caller holds) and its gradient.
    assert baseline.low_bytes == 16 * 3 * matrix + 4 * hidden + 2 * 4


def plain_spans(trace: Trace, name: str, plan: Plan = LPMM) -> list[tuple[int, int]]:
    """Spans in which a packed weight is decoded."""
    nbytes = weight(trace, name).nbytes
    spans = [i for i in model_memory(trace, plan) if i.role is Role.TEMPORARY and i.module == name.rpartition(".")[0]]
    assert all(i.nbytes == nbytes for i in spans)
    return [(i.birth, i.death) for i in spans]


def test_weights_are_decoded_in_their_modules_and_where_backward_needs_them() -> None:
    one, two, three = (sorted(plain_spans(MLP, f"{name}.weight")) for name in ("one", "two", "three"))
    assert [len(one), len(two), len(three)] == [1, 2, 2], "no gradient of the batch is asked for"
    in_order = [one[0], two[0], three[0], (MLP.backward_at, MLP.backward_at), three[1], two[1]]
    assert all(before[1] < after[0] for before, after in pairwise(in_order))
    gradient = MLP.slot("three.weight", Role.GRADIENT)
    assert gradient.birth <= gradient.dropped < two[1][0], "folded before the next layer's backward"


def test_gradients_are_unpacked_until_they_are_accumulated() -> None:
    foot = footprint(MLP, Plan.uniform(gradient=INT8))
    gradients = [i for i in model_memory(MLP, Plan.uniform(gradient=INT8)) if i.role is Role.GRADIENT]
    accumulators = [i for i in gradients if i.birth == 0]
    assert len(accumulators) == 3 and all(i.death == MLP.length for i in accumulators)
    plain = sorted((i.birth, i.death) for i in gradients if i.birth)
    assert all(before[1] < after[0] for before, after in pairwise(plain))
    assert foot.by_role[Role.GRADIENT] == 3 * (WIDE * WIDE + WIDE * WIDE // 32)


def test_casts_of_packed_weights_are_not_stored() -> None:
    model = nn.Sequential(nn.Linear(SIDE, SIDE), nn.Linear(SIDE, SIDE))
    found = small_trace(model, device="cuda", autocast=torch.bfloat16)
    baseline, packed = footprint(found), footprint(found, LPMM)
    # The cast of the second weight is stored for the gradient of its input; the input of the first weight needs no gradient.
    assert baseline.by_role[Role.TEMPORARY] - packed.by_role[Role.TEMPORARY] == 2 * MATRIX
    cast = found.slot("1:weight", Role.TEMPORARY)
    assert cast.recomputed_from == "1.weight" and cast.birth < found.backward_at < cast.death
    spans = [(i.birth, i.death) for i in model_memory(found, LPMM) if i.nbytes == 2 * MATRIX and i.role is Role.TEMPORARY]
    ((start, end), (again, done)) = sorted(spans)
    ((enter, leave),) = weight(found, "1.weight").running
    assert enter <= start <= end == leave < found.backward_at < again <= done <= cast.death
    alone = footprint(found, Plan.uniform(moment1=INT8))
    assert alone.by_role[Role.TEMPORARY] == baseline.by_role[Role.TEMPORARY]


def test_tied_weights_and_those_of_a_module_called_twice_are_decoded_each_time() -> None:
    twice = small_trace(Parts(lambda self, x: self.fc(self.fc(x).relu()), fc=nn.Linear(SIDE, SIDE)))
    assert len(weight(twice, "fc.weight").running) == 2
    tied = Parts(lambda self, x: self.b(self.a(x).relu()), a=nn.Linear(SIDE, SIDE), b=nn.Linear(SIDE, SIDE))
    tied.b.weight = tied.a.weight
    found = small_trace(tied)
    assert [slot.name for slot in found.of(Role.WEIGHT)] == ["a.weight", "a.bias", "b.bias"]
    assert len(weight(found, "a.weight").running) == 2 and len(weight(found, "b.bias").running) == 1


def test_weights_of_a_parent_are_decoded_while_it_runs_and_others_where_they_are_used() -> None:
    def forward(self: Parts, x: Tensor) -> Tensor:
        return linear(self.fc(x) + self.table.sum(0), self.other.weight)

    model = Parts(forward, fc=nn.Linear(SIDE, SIDE), other=nn.Linear(SIDE, SIDE))
    model.table = nn.Parameter(torch.ones(SIDE, SIDE))
    found = small_trace(model)
    (whole,) = weight(found, "table").running
    (inside,), (elsewhere,) = weight(found, "fc.weight").running, weight(found, "other.weight").running
    assert whole[0] <= inside[0] and inside[1] < elsewhere[0] and elsewhere[1] <= whole[1]


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_needs_weights_until_their_gradient_is_complete(reentrant: bool) -> None:
    def forward(self: Parts, x: Tensor) -> Tensor:
        return self.b(checkpoint(self.inner, self.a(x), use_reentrant=reentrant))

    inner = nn.Sequential(nn.Linear(SIDE, SIDE), nn.Tanh())
    found = small_trace(Parts(forward, a=nn.Linear(SIDE, SIDE), inner=inner, b=nn.Linear(SIDE, SIDE)))
    first, again = weight(found, "inner.0.weight").running
    assert first[1] < found.backward_at < again[0]
    assert again[1] >= found.slot("inner.0.weight", Role.GRADIENT).birth


def test_rules_for_weights_only_do_not_pack_masks_and_indices() -> None:
    trace = traced("resnet18", 4)
    there = [slot for slot in trace.activations if Use.VALUE not in slot.uses]
    assert there, "masks or indices, which a plan for activations packs"
    kept = [footprint(trace, plan).by_role[Role.ACTIVATION] for plan in (Plan(), Plan.preset("lpmm"))]
    assert kept[0] == kept[1] > footprint(trace, Plan().set("activation", None)).by_role[Role.ACTIVATION]


def test_it_prints_the_tiers() -> None:
    text = repr(footprint(small_trace(), LPMM))
    assert "model memory: baseline 65.00 KiB, this plan 17.44 KiB, safe" in text
    assert "this plan" not in repr(footprint(small_trace())) and "model memory" not in repr(footprint(small_trace(optimizer=None)))
