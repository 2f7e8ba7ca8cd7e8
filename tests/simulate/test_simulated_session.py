"""A simulated session: closing, exceptions, copies, rows of changes, other modes and other plans."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from paredown import Plan, Role, apply
from paredown.errors import ApplyError
from paredown.models import MODELS
from paredown.simulate.rounded_values import Simulate
from tests.session.nets import pictures
from tests.simulate.rounded_nets import FORWARD, PAPER, Float, Forked, Roundings, forked_step, paper_plan, same, sent_back, step


def test_closing_gives_the_plain_model_back() -> None:
    net, x, sent = Forked(), pictures(2, side=8), sent_back()
    out, gradients = step(net, x, sent)
    session = apply(paper_plan(), net, mode="simulate")
    assert not torch.equal(step(net, x, sent)[0], out)
    with pytest.raises(ApplyError, match="has a session already"):
        apply(paper_plan(), net)
    session.close()
    again, found = step(net, x, sent)
    assert torch.equal(again, out) and all(torch.equal(found[name], g) for name, g in gradients.items())
    apply(paper_plan(), net, mode="simulate").close()
    assert "closed" in repr(session)


def test_an_error_inside_leaves_nothing_behind() -> None:
    net = Forked()
    apply(paper_plan(), net, mode="simulate")
    with pytest.raises(RuntimeError):
        net(torch.randn(2, 7, 8, 8))
    assert not torch.overrides._get_current_function_mode_stack()
    y = torch.randn(5) * 1.2345678
    assert torch.equal(y * 1.0, y)
    out, gradients = forked_step(net, pictures(2, side=8), sent_back(), PAPER)
    ours, found = step(net, pictures(2, side=8), sent_back())
    assert torch.equal(ours, out) and all(torch.equal(found[name], g) for name, g in gradients.items())


def test_nothing_keeps_a_model_that_nobody_has() -> None:
    net = Forked()
    apply(paper_plan(), net, mode="simulate")
    step(net, pictures(2, side=8), sent_back())
    there = weakref.ref(net)
    del net
    gc.collect()
    assert there() is None


def test_a_session_may_be_freed_in_the_middle_of_a_step() -> None:
    """torch iterates over its hooks: removing one meanwhile ends the step with 'OrderedDict mutated during iteration'."""
    nets = [Forked()]
    apply(paper_plan(), nets[0], mode="simulate")
    there = weakref.ref(nets[0])

    def free(*_: object) -> None:
        nets.clear()
        gc.collect()

    handles = [register_optimizer_step_post_hook(free), register_optimizer_step_post_hook(lambda *_: None)]
    other = torch.nn.Parameter(torch.zeros(3))
    other.grad = torch.ones(3)
    torch.optim.SGD([other], 1.0).step()
    for handle in handles:
        handle.remove()
    assert there() is None
    assert other.tolist() == [-1, -1, -1]


def test_inference_mode_rounds_as_no_grad_does() -> None:
    """ResNet-18 has ReLUs and sums in place."""
    torch.manual_seed(0)
    net, x = MODELS["resnet18"]().eval(), pictures(2)
    apply(paper_plan(), net, mode="simulate")
    with torch.no_grad():
        expected = net(x)
    with torch.inference_mode():
        assert torch.equal(net(x), expected)
        assert torch.equal(net(x.clone()), expected)


def test_a_copy_is_a_plain_model() -> None:
    net, x = Forked(), pictures(2, side=8)
    out = net(x)
    apply(paper_plan(), net, mode="simulate")
    assert torch.equal(copy.deepcopy(net)(x), out)


def test_missing_slots_are_rows_of_changes() -> None:
    net, plan = Forked(), paper_plan().set("conv2:output", "e5m2f").set("conv:output", "e5m2f").set("residue", "int8")
    session = apply(plan, net, mode="simulate")
    net(pictures(2, side=8))
    reasons = {row.slot: row.reason for row in session.changes}
    assert reasons["conv2:output"] == "no such slot in this model"
    assert "residue" in reasons and len(reasons) == 2


def test_checkpointed_modules_are_rows_of_changes() -> None:
    plan = paper_plan().recomputing("conv")
    assert [(row.slot, row.given) for row in apply(plan, Forked(), mode="simulate").changes] == [("conv", "unmodified")]
    with pytest.raises(ApplyError, match="recompute 'layers' is no module"):
        apply(paper_plan().recomputing("layers"), Forked(), mode="simulate")


@pytest.mark.parametrize("state", [None, [], {"version": 1}])
def test_invalid_states_are_refused(state: Any) -> None:
    for mode in ("store", "simulate"):
        with apply(Plan.uniform(), Forked(), mode=mode) as session, pytest.raises(ApplyError, match="this is not the state of a"):
            session.load_state_dict(state)


def test_plans_are_plans() -> None:
    with pytest.raises(ApplyError, match="raised is a Plan"):
        Simulate(raised="e6m9f")  # type: ignore[arg-type]
    with pytest.raises(ApplyError, match="set_plan takes a Plan, not str"):
        apply(paper_plan(), Forked(), mode="simulate").set_plan("e6m9f")  # type: ignore[arg-type]


def test_float64_is_not_rounded_and_is_a_row_of_changes() -> None:
    net = Forked().double()
    session = apply(FORWARD.rule(Plan.uniform(), "activation"), net, mode="simulate")
    net(pictures(2, side=8).double())
    assert {row.reason for row in session.changes} == {"its values are float64"}


def test_models_that_fail_on_fake_tensors_run_with_the_names_of_outputs() -> None:
    class Net(Forked):
        def forward(self, x: Tensor) -> Tensor:
            if type(x) is not Tensor:
                raise TypeError("no tensor with values")
            return super().forward(x)

    net, x, sent = Net(), pictures(2, side=8), sent_back()
    out, gradients = forked_step(net, x, sent, PAPER)
    session = apply(paper_plan(), net, mode="simulate")
    ours, found = step(net, x, sent)
    assert torch.equal(ours, out) and all(torch.equal(found[name], g) for name, g in gradients.items())
    assert "fails on fake tensors" in session.changes[-1].reason


@pytest.mark.parametrize("mode", ["pretend", None])
def test_modes_are_two(mode: Any) -> None:
    with pytest.raises(ApplyError, match="Allowed: 'store', 'simulate'"):
        apply(Plan.uniform(), Forked(), mode=mode)
    with pytest.raises(ApplyError, match=r"sums='twice' is unknown\. Allowed: exact, rounded"):
        Simulate(sums="twice")
    with pytest.raises(ApplyError, match=r"share=1\.5 is the part"):
        Simulate(share=1.5)


def test_a_compiled_model_is_refused() -> None:
    with pytest.raises(ApplyError, match="a compiled model cannot be simulated"):
        apply(Plan.uniform(), torch.compile(Forked(), backend="eager"), mode="simulate")  # type: ignore[arg-type]


def test_other_formats_for_the_same_slots() -> None:
    net, x, sent = Forked(), pictures(2, side=8), sent_back()
    session = apply(Plan.uniform(), net, mode=Simulate(all_live=True))
    step(net, x, sent)
    for plan, by in ((FORWARD.rule(Plan.uniform(), "activation"), Roundings(FORWARD, same, same, same)),):
        with pytest.raises(ApplyError, match="set_plan cannot change roundings"):
            session.set_plan(plan)
        session.close()
        session = apply(plan, net, mode=Simulate(all_live=True))
        net(x)
        other = Float("e5m2f", 2, -14, 16, "saturate")
        session.set_plan(other.rule(Plan.uniform(), "activation"))
        assert torch.equal(step(net, x, sent)[0], forked_step(net, x, sent, Roundings(other, same, same, same))[0])
        session.set_plan(plan)
        assert torch.equal(step(net, x, sent)[0], forked_step(net, x, sent, by)[0])
    assert session.plan.find(("conv:output",), Role.ACTIVATION).format is not None
