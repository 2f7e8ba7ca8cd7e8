"""State of optimizers with a rule: roles from the rule, unpacked in the trace, packed by plans."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

import paredown as pare
from paredown.formats.format import Format
from paredown.plan.footprint import footprint
from paredown.plan.plan import Plan
from paredown.plan.replay import intervals
from paredown.roles import Role
from tests.plan.test_model_memory import LPMM, MATRIX, SIDE, VECTOR, kept, small_trace

INT8 = Format.parse("int8/64@bf16")
MOMENTS = (Role.MOMENT1, Role.MOMENT2)


class Ruled(torch.optim.Optimizer):
    """A stand-in for an optimizer of paredown.optim, which cannot run a step on a tiny parameter."""

    def __init__(self, params, *, roles=MOMENTS, has_torch=True, release=False, **defaults) -> None:
        self.rule, self.has_torch = SimpleNamespace(roles=roles, names=("m", "v")[: len(roles)]), has_torch
        self.memory = SimpleNamespace(release=release)
        super().__init__(params, {"lr": 1.0, "fused": True, **defaults})

    def step(self, closure=None):
        raise AssertionError("it is not to be tried")


def layer(dtype: torch.dtype = torch.float32) -> nn.Linear:
    return nn.Linear(SIDE, SIDE).to(dtype)


def test_the_rule_gives_the_moments() -> None:
    model = layer()
    trace = small_trace(model, optimizer=Ruled(model.parameters()))
    assert trace.optimizer == "Ruled" and trace.notes == ()
    assert {(s.name, s.role, s.shape, s.dtype) for s in trace.slots if s.role in MOMENTS} == {
        (name, role, tuple(p.shape), "float32") for name, p in model.named_parameters() for role in MOMENTS
    }
    assert kept(footprint(trace, LPMM)) == kept(footprint(small_trace(), LPMM))
    model = layer()
    one = small_trace(model, optimizer=Ruled(model.parameters(), roles=(Role.MOMENT1,)))
    assert not one.of(Role.MOMENT2) and len(one.of(Role.MOMENT1)) == 2


def test_where_torch_has_no_such_optimizer_moments_are_float32() -> None:
    for has_torch, nbytes in ((True, 2), (False, 4)):
        model = layer(torch.bfloat16)
        trace = small_trace(model, dtype=torch.bfloat16, optimizer=Ruled(model.parameters(), has_torch=has_torch))
        assert footprint(trace).by_role[Role.MOMENT1] == nbytes * (MATRIX + VECTOR)


def test_released_gradients_are_not_stored_and_have_no_accumulator() -> None:
    model = nn.Sequential(layer(), layer())
    trace = small_trace(model, optimizer=Ruled(model.parameters(), release=True))
    plain = small_trace(model, optimizer=Ruled(model.parameters()))
    assert footprint(trace).by_role.get(Role.GRADIENT, 0) == footprint(trace, LPMM).by_role.get(Role.GRADIENT, 0) == 0
    assert footprint(trace, LPMM).low_bytes < footprint(plain, LPMM).low_bytes
    assert footprint(trace).low_bytes < footprint(plain).low_bytes
    part = small_trace(model, optimizer=Ruled(model[0].parameters(), release=True))
    assert footprint(part).by_role[Role.GRADIENT] == 4 * (MATRIX + VECTOR)
    assert part.notes == ("2 parameters are not in the optimizer",)


def test_formats_of_the_optimizer_itself_are_a_note() -> None:
    model = layer()
    (note,) = small_trace(model, optimizer=Ruled(model.parameters(), tier="lpmm")).notes
    assert "Plan.preset('lpmm')" in note
    for quiet in ({"tier": "full"}, {"tier": None, "moment1": "tier", "gradient": None}):
        assert small_trace(model, optimizer=Ruled(model.parameters(), **quiet)).notes == ()


def test_the_workspace_of_a_foreach_step_is_for_unmodified_parameters() -> None:
    model = nn.Sequential(layer(), layer())
    trace = small_trace(model, device="cuda", optimizer=torch.optim.AdamW(model.parameters()))

    def at_step(plan: Plan) -> int:
        return sum(i.nbytes for i in intervals(trace, plan) if i.birth == i.death == trace.length)

    assert at_step(Plan()) == at_step(Plan.preset("activations8")) == 2 * 4 * (MATRIX + VECTOR)
    assert at_step(LPMM) == 0
    first = Plan().set("moment1=0.weight", str(INT8)).set("moment1=0.bias", str(INT8))
    assert at_step(first) == 4 * (MATRIX + VECTOR), "torch.optim has the second layer"


@pytest.mark.parametrize(
    ("make", "moments"),
    [
        (lambda p: pare.optim.AdamW(p), 2),
        (lambda p: pare.optim.SGD(p, momentum=0.9), 1),
        (lambda p: pare.optim.SGD(p), 0),
        (lambda p: pare.optim.Lion(p), 1),
    ],
    ids=["adamw", "sgdm", "sgd", "lion"],
)
def test_optimizers_of_paredown(make, moments: int) -> None:
    model = layer()
    trace = small_trace(model, optimizer=make(model.parameters()))
    sizes = kept(footprint(trace))
    assert [sizes.get(role.value, 0) for role in MOMENTS] == [4 * (MATRIX + VECTOR) * (moments > n) for n in range(2)]
    packed = kept(footprint(trace, LPMM))
    assert [packed.get(role.value, 0) for role in MOMENTS] == [
        (INT8.nbytes((SIDE, SIDE)) + 4 * VECTOR) * (moments > n) for n in range(2)
    ]
    assert all(p.grad is None for p in model.parameters())
