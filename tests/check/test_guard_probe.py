"""Guards that probe: when, with as many examples as fit into the budget, and without changing the training; predicted memory of a probe."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import mse_loss

import paredown as pare
from paredown.check.guard_steps import examples_within, probe_bytes
from paredown.errors import ApplyError
from paredown.plan.footprint import peak_of
from paredown.roles import Role
from paredown.session.changes import THE_PROBE
from paredown.study.tasks.evaluate import MemoryMeter
from tests.check.test_guards import BATCH, MANY, Loud, Run, traced, weights
from tests.predict.steps import step_of
from tests.session.nets import INT4, INT8

INT4_PLAN = pare.Plan.uniform(activation=INT4)


SIZES = {("gpt", 1), ("gpt", 16), ("vit", 4), ("resnet18", 1), ("resnet18", 4)}  # the others in `make test-all`
ALL_SIZES = [
    pytest.param(name, num, marks=[] if (name, num) in SIZES else pytest.mark.full)
    for name in ("gpt", "vit", "resnet18")
    for num in (1, 4, 16)
]


@pytest.mark.parametrize(("name", "num"), ALL_SIZES)
def test_a_probe_takes_no_more_than_foreseen(name: str, num: int) -> None:
    """Measured beside the model and its optimizer; and not much less, or guards would probe with too little."""
    model, batch, loss = step_of(name, 16)
    trace = pare.trace_step(model, batch, loss=loss, device="cpu", optimizer="adamw")
    part = tuple(tensor[:num] for tensor in batch)
    pare.probe(model, part, trace, loss=loss, backwards=8)
    meter = MemoryMeter(torch.device("cpu"))
    meter.start()
    pare.probe(model, part, trace, loss=loss, backwards=8)
    meter.stop()
    by_role = pare.footprint(trace).by_role
    beside = sum(nbytes for role, nbytes in by_role.items() if role not in (Role.ACTIVATION, Role.TEMPORARY))
    foreseen = probe_bytes(trace, pare.Plan(), part) - beside
    assert meter.bytes is not None and foreseen / 3 <= meter.bytes <= foreseen


@pytest.mark.parametrize("batch", [MANY, {"x": MANY[0], "y": MANY[1], "scale": torch.ones(3)}])
def test_as_many_examples_as_fit_into_the_budget(batch: Any) -> None:
    trace = traced(Loud(), MANY)
    least, most = (probe_bytes(trace, INT4_PLAN, MANY, num_examples=num) for num in (1, 1024))
    assert examples_within(batch, trace, INT4_PLAN, 2 * most) is batch
    assert examples_within(batch, trace, INT4_PLAN, least - 1000) is None
    part: Any = examples_within(batch, trace, INT4_PLAN, (least + most) // 2)
    tensors = list(part.values()) if isinstance(part, dict) else list(part)
    assert 500 < len(tensors[0]) == len(tensors[1]) < 520
    assert torch.equal(tensors[0], MANY[0][: len(tensors[0])])
    assert [len(tensor) for tensor in tensors[2:]] in ([], [3]), "what has no examples stays"


def test_a_guard_reports_that_a_probe_does_not_fit_into_the_budget() -> None:
    tight = Run(INT4_PLAN, pare.Guard(traced(Loud()), batch=(MANY[0][:8], MANY[1][:8]), loss=mse_loss)).steps(12)
    assert tight.session.sensitivities is None
    (action,) = [action for action in tight.session.actions if action.slot == THE_PROBE]
    assert (action.step, action.after) == (10, "skipped")
    assert "one example would take" in action.why


def test_probes_with_packed_weights_and_gradients() -> None:
    model, part = Loud(), (BATCH[0][:16], BATCH[1][:16])
    plan = pare.Plan.preset("lpmm").set("activation", INT4)
    found: list[list[Tensor]] = []
    for batch in (None, part):
        model = Loud()
        session = pare.apply(plan, model, guard=pare.Guard(traced(model), batch=batch, loss=mse_loss))
        optimizer, gradients = pare.optim.AdamW(model.parameters(), 1e-3), list[Tensor]()
        for step in range(11):
            optimizer.zero_grad()
            mse_loss(model(BATCH[0]), BATCH[1]).backward()
            if step == 9:
                gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
            optimizer.step()
            if step == 9:
                found.append([*gradients, *weights(model)])
        assert (session.sensitivities is not None) == (batch is not None)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True)), "the step in which it probed is the same"


def test_probes_anew_at_10_and_30_steps() -> None:
    model = Loud()
    trace = traced(model, MANY)
    plan = pare.Plan.uniform(activation=INT4).set("b:input", INT8)
    part = (MANY[0][:16], MANY[1][:16])
    run = Run(plan, pare.Guard(trace, batch=part, loss=mse_loss), model, MANY)
    probed: list[int] = []
    for step in range(1, 32):
        run.steps(1)
        if run.session.sensitivities is not None and run.session.sensitivities.step == step:
            probed.append(step)
    assert probed == [10, 30]
    assert set(run.session.sensitivities.errors) >= {"b:input", "c:input", "d:input"}  # type: ignore[union-attr]
    assert all(peak_of(trace, used) <= peak_of(trace, plan) for used in run.plans)


def test_probing_changes_nothing_but_the_plan() -> None:
    trace = traced(Loud(), MANY)
    part = (MANY[0][:16], MANY[1][:16])
    settled = Run(pare.Plan.uniform(activation=INT4), pare.Guard(trace, batch=part, loss=mse_loss), batch=MANY).steps(12)
    plan = settled.session.plan
    assert settled.session.sensitivities is not None
    found: list[list[Tensor]] = []
    for batch in (None, part):
        run = Run(plan, pare.Guard(trace, batch=batch, loss=mse_loss), batch=MANY)
        run.steps(12)
        assert run.plans == [plan], "nothing is better within this budget"
        found.append(weights(run.model))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_can_be_asked_to_probe() -> None:
    run = Run(pare.Plan.uniform(activation=INT4), pare.Guard(traced(Loud()))).steps(2)
    found = run.session.reprobe(BATCH, loss=mse_loss)
    assert found.step == 2
    assert run.session.sensitivities is found
    plain = Run(pare.Plan.uniform(activation=INT4), None)
    with pytest.raises(ApplyError, match="needs a guard"):
        plain.session.reprobe(BATCH, loss=mse_loss)
