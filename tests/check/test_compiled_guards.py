"""Guards of compiled sessions: what graphs measure, and runs that rounding would break.

Graphs run operation by operation (tests/programs/compiling.py), except in the first test, which compiles them with Inductor.
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor_config
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import paredown as pare
from paredown.autograd.operations import Needs
from paredown.check.guard import Limits
from paredown.formats.rounding import Rounding
from paredown.session.changes import THE_STEP
from paredown.session.compiled.graph_signals import SlotMeasure
from paredown.session.compiled.graph_slots import GraphSlot
from paredown.session.signals import SlotSignal
from tests.programs.compiling import compiles_quickly
from tests.session.nets import INT4, INT8, rows

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")  # torch's own
LOW = "e4m3fn"  # without a scale, values past 448 become NaN
LOUD, FIRST_LOUD = 3000.0, 5
BATCH = (rows(), rows(seed=2))


class Loud(nn.Module):
    """Linear layers; `loudness` multiplies the activation between the first two, and does not change the result."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = (nn.Linear(64, 64) for _ in range(3))
        self.register_buffer("loudness", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        loudness: Any = self.loudness
        return self.c(torch.tanh(self.b(self.a(x * loudness)) / loudness))


class Run:
    """A compiled model in training under a plan, with or without a guard."""

    def __init__(self, plan: pare.Plan, *, limits: Limits | None = None, has_guard: bool = True) -> None:
        self.model = Loud()
        trace = pare.trace_step(self.model, BATCH, loss=mse_loss, device="cpu", optimizer="sgd")
        guard = pare.Guard(trace, budget="100%", limits=limits or Limits()) if has_guard else None
        self.session = pare.apply(plan, self.model, guard=guard)
        self.compiled: Any = self.session.compile()
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1, momentum=0.9)
        self.losses: list[float] = []

    def step(self, x: Tensor = BATCH[0], *, loudness: float = 1.0) -> None:
        self.model.get_buffer("loudness").fill_(loudness)
        self.optimizer.zero_grad()
        loss = mse_loss(self.compiled(x), BATCH[1])
        loss.backward()
        self.optimizer.step()
        self.losses.append(float(loss.detach()))

    def steps(self, num: int) -> Run:
        for step in range(num):
            self.step(loudness=LOUD if step >= FIRST_LOUD else 1.0)
        return self

    def measured(self) -> dict[str, SlotSignal]:
        """What the last forward pass measured."""
        assert self.session._guard is not None
        return self.session._guard.signals.read(None)[1]

    @property
    def is_finite(self) -> bool:
        return all(bool(p.detach().isfinite().all()) for p in self.model.parameters())

    def format_of(self, name: str) -> str:
        assert self.session._compiled is not None
        return str(self.session._compiled.format_of(name))


@pytest.fixture
def quickly() -> Iterator[None]:
    with compiles_quickly():
        yield


@pytest.mark.full
def test_a_run_that_diverges_is_saved() -> None:
    """Compiled by Inductor, twice: the second graph stores the loud slots in the next format."""
    with inductor_config.patch({"cpp.simdlen": 1, "compile_threads": 1}):
        lost = Run(pare.Plan.uniform(activation=LOW), has_guard=False).steps(FIRST_LOUD + 1)
        assert not lost.is_finite, "without a guard this run is lost"
        run = Run(pare.Plan.uniform(activation=LOW)).steps(12)
    assert run.is_finite and run.losses[-1] < run.losses[0]
    raised = {action.slot: (action.before, action.after) for action in run.session.actions if action.slot != THE_STEP}
    assert raised == {"a:input": (LOW, INT8), "b:input": (LOW, INT8)}
    assert [run.format_of(f"{name}:input") for name in "ab"] == [INT8, INT8]
    skipped = [action.why for action in run.session.actions if action.slot == THE_STEP]
    assert skipped and set(skipped) == {"gradients are not finite"}


@pytest.mark.usefixtures("quickly")
@pytest.mark.parametrize("format", [INT8, INT4, LOW, "uint8/64@bf16+bf16"])
def test_graphs_measure_rounding_errors_and_largest_values(format: str) -> None:
    run = Run(pare.Plan.uniform(activation=format, rounding="nearest_even"), limits=Limits(every=1))
    values = run.model.a(BATCH[0]).detach()  # (128, 64): the graph measures every second row
    exact = values[::2].double()
    run.compiled(BATCH[0]).sum().backward()
    found = run.measured()
    error = (pare.round_trip(values, format)[::2].double() - exact).square().sum() / exact.square().sum()
    assert found["b:input"].error == pytest.approx(float(error), rel=1e-3)
    assert float(values.abs().max()) <= found["b:input"].largest * (1 + 1e-6) <= 1.02 * float(values.abs().max())
    assert run.format_of("b:input") == format


@pytest.mark.usefixtures("quickly")
@pytest.mark.parametrize(("format", "loudness", "is_finite"), [("fp16", 1.0, True), ("fp16", 1e5, False), ("bf16", 1e5, True)])
def test_values_beyond_the_largest_of_a_format(format: str, loudness: float, is_finite: bool) -> None:
    run = Run(pare.Plan.uniform(activation=format), limits=Limits(every=1))
    run.model.get_buffer("loudness").fill_(loudness)
    run.compiled(BATCH[0])
    found = run.measured()["b:input"]
    assert found.largest == pytest.approx(float(run.model.a(BATCH[0] * loudness).abs().max()), rel=1e-5)
    assert (found.error < 1e-4) if is_finite else (found.error == torch.inf)


@pytest.mark.gpu
def test_values_beyond_the_largest_of_a_format_in_one_kernel() -> None:
    """One compiled kernel casts to fp16 and back; whatever casts it leaves out, values above 65504 are an infinite error."""
    measure = SlotMeasure(GraphSlot(("b:input",), Needs()), pare.Format.parse("fp16"), Rounding.NEAREST_EVEN, 0)
    values, step = torch.full((4096,), 1e5, device="cuda"), torch.zeros(1, dtype=torch.int64, device="cuda")
    measured = torch.compile(lambda flat, step: measure(flat, step, flat.half()))(values, step)
    assert measured.tolist() == [torch.inf, pytest.approx(1e5)]


@pytest.mark.usefixtures("quickly")
def test_values_that_are_not_finite() -> None:
    run = Run(pare.Plan.uniform(activation=INT8), limits=Limits(every=1))
    run.step()
    before = [p.detach().clone() for p in run.model.parameters()]
    x = BATCH[0].clone()
    x[3, 5] = torch.inf
    run.compiled(x)
    assert run.measured()["b:input"].largest == torch.inf
    run.step(x)
    assert all(torch.equal(p, q) for p, q in zip(run.model.parameters(), before, strict=True)), "the step was skipped"
    assert [(a.slot, a.after, a.why) for a in run.session.actions] == [(THE_STEP, "skipped", "gradients are not finite")]


@pytest.mark.usefixtures("quickly")
def test_a_guard_that_finds_nothing_changes_no_bit() -> None:
    """Measurements of one forward pass in `every` are used, the first one included."""
    plain = Run(pare.Plan.uniform(activation=INT4), has_guard=False)
    run = Run(pare.Plan.uniform(activation=INT4), limits=Limits(every=3))
    seen: list[bool] = []
    for _ in range(5):
        plain.step()
        run.step()
        run.compiled(BATCH[0])
        seen.append("b:input" in run.measured())
        plain.compiled(BATCH[0])
    assert seen == [False, True, False, False, True], "of calls 2, 4, 6, 8, 10: the guard read those of calls 1 and 7"
    assert run.losses == plain.losses
    assert all(torch.equal(p, q) for p, q in zip(run.model.parameters(), plain.model.parameters(), strict=True))
    assert not run.session.actions


@pytest.mark.usefixtures("quickly")
def test_a_resumed_guard_continues() -> None:
    """The state has the raised slot: the graphs of the resumed run store it so from the first call on."""
    run = Run(pare.Plan.uniform(activation=LOW)).steps(9)
    assert run.format_of("b:input") == INT8
    state, weights = run.session.state_dict(), run.model.state_dict()
    resumed = Run(pare.Plan.uniform(activation=LOW))
    resumed.session.load_state_dict(state)
    resumed.model.load_state_dict(weights)
    resumed.step(loudness=LOUD)
    assert resumed.format_of("b:input") == INT8 and resumed.is_finite
    assert resumed.session.actions == run.session.actions


@pytest.mark.usefixtures("quickly")
def test_a_guard_probes_a_compiled_model() -> None:
    """After 10 steps, in eager mode; graphs are compiled again where formats change."""
    model = Loud()
    trace = pare.trace_step(model, BATCH, loss=mse_loss, device="cpu", optimizer="sgd")
    guard = pare.Guard(trace, "100%", batch=BATCH, loss=mse_loss)
    session = pare.apply(pare.Plan.uniform(activation="uint2/64@bf16+bf16"), model, guard=guard)
    compiled: Any = session.compile()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(11):
        optimizer.zero_grad()
        mse_loss(compiled(BATCH[0]), BATCH[1]).backward()
        optimizer.step()
    assert session.sensitivities is not None and session.sensitivities.step == 10
    assert session._compiled is not None
    found = {action.slot: action.after for action in session.actions}
    assert found, "a budget of 100 % allows more bits"
    assert str(session._compiled.format_of("b:input") or "unmodified") == found["b:input"]
