"""State of optimizers with a rule: roles from the rule, unpacked in the trace, packed by plans."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

import paredown as pare
from paredown.formats.format import Format
from paredown.plan.byte_intervals import intervals
from paredown.plan.footprint import footprint
from paredown.plan.plan import Plan
from paredown.roles import Role
from tests.plan.test_model_memory import LPMM, MATRIX, SIDE, VECTOR, kept, small_trace

INT8 = Format.parse("int8/64@bf16")
MOMENTS = (Role.MOMENT1, Role.MOMENT2)


class Ruled(torch.optim.Optimizer):
    """A stand-in for an optimizer of paredown.optim, which cannot run a step on a tiny parameter."""

    def __init__(self, params, *, roles=MOMENTS, torch_class=torch.optim.Adam, release=False, **defaults) -> None:
        self.rule, self.torch_class = SimpleNamespace(roles=roles, names=("m", "v")[: len(roles)]), torch_class
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
    for torch_class, nbytes in ((torch.optim.Adam, 2), (None, 4)):
        model = layer(torch.bfloat16)
        trace = small_trace(model, dtype=torch.bfloat16, optimizer=Ruled(model.parameters(), torch_class=torch_class))
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


def test_muon_has_one_moment_of_hidden_matrices() -> None:
    """By name, by an instance, and as the optimizer allocates it; the workspace is that of the largest matrix."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.hidden, self.head = nn.Embedding(80, SIDE), nn.Linear(SIDE, 2 * SIDE), nn.Linear(2 * SIDE, 80)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.hidden(self.embedding(x)))

    model = Net()
    optimizer = pare.optim.Muon(model.parameters(), adamw_lr=1e-3, adamw_params=pare.optim.embeddings_and_head(model))
    traces = [
        pare.trace_step(model, (torch.arange(8), torch.arange(8)), loss=nn.functional.cross_entropy, optimizer=given, device="cpu")
        for given in ("muon", optimizer)
    ]
    hidden, total = 2 * SIDE * SIDE, sum(p.numel() for p in model.parameters())
    for trace in traces:
        sizes = kept(footprint(trace))
        assert (sizes["moment1"], sizes["moment2"]) == (4 * total, 4 * (total - hidden))
        (workspace,) = (output for output in trace.outputs if output.op == "newton_schulz")
        assert workspace.nbytes == 4 * hidden + 4 * SIDE * SIDE
    pare.apply(LPMM, model)  # the optimizer follows
    nn.functional.cross_entropy(model(torch.arange(8)), torch.arange(8)).backward()
    optimizer.step()
    stored = {"moment1": 0, "moment2": 0}
    for state in optimizer.state.values():
        for name, value in state.items():
            role = {"momentum_buffer": "moment1", "exp_avg": "moment1", "exp_avg_sq": "moment2"}.get(name.partition(".")[0])
            stored |= {role: stored[role] + value.nbytes} if role else {}
    packed = kept(footprint(traces[0], LPMM))
    assert {role: packed[role] for role in stored} == stored
