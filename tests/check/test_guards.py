"""Guards: runs that rounding would break continue, within the budget; other runs do not change."""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import copy
import gc
import json
import weakref
from collections.abc import Callable
from math import inf
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss, scaled_dot_product_attention
from torch.optim.optimizer import register_optimizer_step_pre_hook

import paredown as pare
from paredown.errors import ApplyError, BudgetError, PlanError
from paredown.plan.footprint import peak_of
from paredown.session import value_bounds
from paredown.session.changes import THE_STEP
from tests.session.nets import INT4, INT8, rows

LOW = "e4m3fn"  # without a scale of its own a block past 448 becomes NaN
INT2 = "uint2/64@bf16+bf16"
LOUD = 1000.0


class Loud(nn.Module):
    """Linear layers; `loudness` multiplies the activation between the first two, and does not change the result."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c, self.d = (nn.Linear(64, 64) for _ in range(4))
        self.loudness = 1.0

    def forward(self, x: Tensor) -> Tensor:
        h = self.b(self.a(x) * self.loudness) / self.loudness
        return self.d(self.c(h.sin()).sin())


class Attention(nn.Module):
    """Attention over long texts, whose logits `gain` makes large."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.out, self.gain = nn.Linear(32, 96), nn.Linear(32, 32), 1.0

    def forward(self, x: Tensor) -> Tensor:
        num, length, dim = x.shape
        q, k, v = self.qkv(x).view(num, length, 3, 2, dim // 2).permute(2, 0, 3, 1, 4)
        out = scaled_dot_product_attention(q * self.gain, k * self.gain, v)
        return self.out(out.transpose(1, 2).reshape(num, length, dim))


BATCH = (rows(), rows(seed=2))
MANY = (rows(1024), rows(1024, seed=2))  # a probe of some of them is within a budget for all of them
TEXT = tuple(torch.randn(2, 512, 32, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))


def traced(model: nn.Module, batch: Any = BATCH) -> pare.Trace:
    return pare.trace_step(model, batch, loss=mse_loss, device="cpu", optimizer="sgd")


class Run:
    """A model in training under a plan, with or without a guard; `plans` are all that were ever used."""

    def __init__(self, plan: pare.Plan, guard: pare.Guard | None, model: nn.Module | None = None, batch: Any = BATCH) -> None:
        self.model, self.batch = model or Loud(), batch
        self.session = pare.apply(plan, self.model, guard=guard)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1, momentum=0.9)
        self.plans = [plan]
        self.losses: list[float] = []

    def steps(self, num: int, before: Callable[[int], None] = lambda step: None) -> Run:
        for step in range(num):
            before(step)
            self.optimizer.zero_grad()
            loss = mse_loss(self.model(self.batch[0]), self.batch[1])
            loss.backward()
            self.optimizer.step()
            self.losses.append(float(loss.detach()))
            if self.session.plan is not self.plans[-1]:
                self.plans.append(self.session.plan)
        return self

    @property
    def moves(self) -> dict[str, list[tuple[str, str]]]:
        found: dict[str, list[tuple[str, str]]] = {}
        for action in self.session.actions:
            if action.slot != THE_STEP and action.before != action.after:
                found.setdefault(action.slot, []).append((action.before, action.after))
        return found


def becomes_loud(run: Run) -> Callable[[int], None]:
    def before(step: int) -> None:
        run.model.loudness = LOUD if step >= 5 else 1.0  # type: ignore[assignment]

    return before


def weights(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def test_saves_a_run_that_diverges_within_the_budget() -> None:
    plan = pare.Plan.uniform(activation=LOW)
    lost = Run(plan, None)
    lost.steps(30, becomes_loud(lost))
    assert not all(w.isfinite().all() for w in weights(lost.model)), "without a guard this run is lost"
    trace = traced(Loud())
    budget = peak_of(trace, plan) + 600  # the loud slot takes 256 bytes more at the next level
    run = Run(plan, pare.Guard(trace, budget))
    run.steps(30, becomes_loud(run))
    assert all(w.isfinite().all() for w in weights(run.model))
    assert run.losses[-1] < run.losses[0]
    assert run.moves == {"b:input": [(LOW, INT8)]}
    assert all(peak_of(trace, used) <= budget for used in run.plans)
    left_out = [action.step for action in run.session.actions if action.slot == THE_STEP]
    assert len(left_out) <= 2
    exact = Run(pare.Plan(), None)
    exact.steps(30 - len(left_out), becomes_loud(exact))
    assert run.losses[-1] == pytest.approx(exact.losses[-1], rel=0.02)


def test_others_pay_where_the_budget_is_tight() -> None:
    trace = traced(Loud())
    plan = pare.Plan.uniform(activation=INT8).set("b:input", LOW)
    run = Run(plan, pare.Guard(trace))  # the budget is what the plan takes: b:input can rise if somebody goes down
    run.steps(30, becomes_loud(run))
    assert run.moves["b:input"] == [(LOW, INT8)]
    paid = {name: moves for name, moves in run.moves.items() if name != "b:input"}
    assert paid, "somebody paid"
    assert all(peak_of(trace, used) <= peak_of(trace, plan) for used in run.plans)
    assert all(w.isfinite().all() for w in weights(run.model))
    assert any("makes space for b:input" in action.why for action in run.session.actions)


def test_says_where_nobody_can_pay() -> None:
    trace = traced(Loud())
    plan = pare.Plan.uniform(activation=INT2).set("b:input", LOW)
    run = Run(plan, pare.Guard(trace, limits=pare.Limits(every=1)))
    run.steps(60, becomes_loud(run))
    assert sum("no other slot can be lowered" in action.why for action in run.session.actions if action.slot == "b:input") == 1
    assert len(run.session.actions) < 20, "a run that cannot be helped does not fill its log"
    assert all(w.isfinite().all() for w in weights(run.model)), "steps are still skipped"


def test_a_step_that_is_left_out_changes_nothing() -> None:
    plan = pare.Plan.uniform(activation=LOW)
    run = Run(plan, pare.Guard(traced(Loud()), "100%")).steps(3)
    before, state = weights(run.model), copy.deepcopy(run.optimizer.state_dict())
    run.model.loudness = LOUD  # type: ignore[assignment]
    run.steps(1)
    assert [action.slot for action in run.session.actions] == [THE_STEP]
    assert all(torch.equal(a, b) for a, b in zip(before, weights(run.model), strict=True))
    after = run.optimizer.state_dict()["state"]
    assert all(torch.equal(state["state"][i]["momentum_buffer"], after[i]["momentum_buffer"]) for i in after)


@pytest.mark.full
def test_long_attention_with_large_logits_stays_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounded queries and keys stand in an exponent beside an exact logsumexp: as logits grow, gradients explode.

    Sessions keep them plain where logits are large; without that, a guard raises them.
    """
    bounded = Run(pare.Plan.uniform(activation=INT8), None, Attention(), TEXT)
    monkeypatch.setattr(value_bounds, "MAX_LOGIT_ERROR", inf)
    monkeypatch.setattr(value_bounds, "MAX_SHARED_ERROR", inf)
    plan, trace = pare.Plan.uniform(activation=INT8), traced(Attention(), TEXT)
    runs: dict[str, Run] = {}
    for name, guard in (("exact", None), ("lost", None), ("guarded", pare.Guard(trace, "150%", limits=pare.Limits(every=4)))):
        runs[name] = run = Run(pare.Plan() if name == "exact" else plan, guard, Attention(), TEXT)
        run.optimizer.param_groups[0]["lr"] = 0.02
        with_growing_logits(run)
    assert not all(w.isfinite().all() for w in weights(runs["lost"].model)), "without a guard this run is lost"
    run = runs["guarded"]
    assert all(w.isfinite().all() for w in weights(run.model))
    assert run.losses[-1] < run.losses[0] and run.losses[-1] == pytest.approx(runs["exact"].losses[-1], rel=0.02)
    assert {":scaled_dot_product_attention.query", ":scaled_dot_product_attention.key"} <= set(run.moves)
    assert all(peak_of(trace, used) <= 1.5 * peak_of(trace, pare.Plan()) for used in run.plans), "with scratch of the CPU codec"

    monkeypatch.undo()
    bounded.optimizer.param_groups[0]["lr"] = 0.02
    with_growing_logits(bounded)
    assert bounded.losses[-1] == pytest.approx(runs["exact"].losses[-1], rel=0.02)
    assert any("logits are up to" in row.reason for row in bounded.session.changes)


def with_growing_logits(run: Run) -> None:
    """Sixty steps in which the logits grow to 24 times what they are."""
    for step in range(60):
        run.model.gain = min(1.2**step, 24.0)  # type: ignore[assignment]
        run.steps(1)


@pytest.mark.parametrize("format", [None, "fp32", INT8, INT2])
def test_runs_that_nothing_is_wrong_with_are_left_alone(format: str | None) -> None:
    plan = pare.Plan.uniform(activation=format)
    run = Run(plan, pare.Guard(traced(Loud()), limits=pare.Limits(every=1)))
    run.steps(40, becomes_loud(run))
    assert run.session.actions == ()
    assert run.plans == [plan]
    same = Run(plan, None)
    same.steps(40, becomes_loud(same))
    assert all(torch.equal(a, b) for a, b in zip(weights(run.model), weights(same.model), strict=True)), "looking changes nothing"


def test_exact_plans_are_not_to_blame_for_what_is_not_finite() -> None:
    run = Run(pare.Plan.uniform(activation="fp32"), pare.Guard(traced(Loud())))
    run.steps(3)
    run.batch = (BATCH[0], BATCH[1] * float("inf"))
    run.steps(2)
    assert run.session.actions == ()


def test_resumes_bit_for_bit_after_an_action() -> None:
    plan, trace = pare.Plan.uniform(activation=INT4).set("b:input", LOW), traced(Loud())
    guard = pare.Guard(trace, "100%", limits=pare.Limits(every=2))
    whole = Run(plan, guard)
    whole.steps(24, becomes_loud(whole))
    first = Run(plan, guard)
    first.steps(12, becomes_loud(first))
    assert first.moves, "an action before the checkpoint"
    state = copy.deepcopy((first.model.state_dict(), first.optimizer.state_dict(), first.session.state_dict()))
    second = Run(plan, guard)
    second.model.load_state_dict(state[0])
    second.optimizer.load_state_dict(state[1])
    second.session.load_state_dict(json.loads(json.dumps(state[2])))  # as a file has it
    assert second.session.plan == first.session.plan
    second.steps(12, lambda step: setattr(second.model, "loudness", LOUD))
    assert second.session.plan == whole.session.plan
    assert second.session.actions == whole.session.actions
    assert second.session.state_dict() == whole.session.state_dict()
    assert all(torch.equal(a, b) for a, b in zip(weights(second.model), weights(whole.model), strict=True))


def test_does_not_go_to_and_fro() -> None:
    """Two slots that take turns in being wrong, and a budget for one of them: each moves once, not at every turn."""
    trace = traced(Loud())
    plan = pare.Plan.uniform(activation=INT8).set("b:input", LOW)
    run = Run(plan, pare.Guard(trace, limits=pare.Limits(every=1, hold=1000)))

    def before(step: int) -> None:
        run.model.loudness = LOUD if step // 5 % 2 else 1.0  # type: ignore[assignment]

    run.steps(80, before)
    assert sum(map(len, run.moves.values())) <= 4
    assert run.moves["b:input"] == [(LOW, INT8)], "raised, and held"


def test_a_slot_that_was_raised_is_held_for_some_steps_only() -> None:
    trace = traced(Loud())
    run = Run(pare.Plan.uniform(activation=LOW), pare.Guard(trace, "100%", limits=pare.Limits(every=1, hold=7)))
    run.steps(12, becomes_loud(run))
    guarded = run.session._guard
    assert guarded is not None
    raised_at = next(action.step for action in run.session.actions if action.slot == "b:input")
    guarded.memory.steps = raised_at + 6
    assert guarded.memory.is_held("b:input")
    guarded.memory.steps = raised_at + 7
    assert not guarded.memory.is_held("b:input")


def test_gradients_that_jump_are_left_out_a_few_times() -> None:
    run = Run(pare.Plan.uniform(activation=INT8), pare.Guard(traced(Loud()), "100%", limits=pare.Limits(patience=3)))
    run.steps(15)
    run.batch = (BATCH[0], BATCH[1] * 1e5)
    before = weights(run.model)
    run.optimizer.param_groups[0]["lr"] = 1e-12
    run.steps(3)
    said = [action for action in run.session.actions if action.slot == THE_STEP]
    assert len(said) == 3 and "usually" in said[0].why
    assert all(torch.equal(a, b) for a, b in zip(before, weights(run.model), strict=True))
    run.steps(1)
    assert len([action for action in run.session.actions if action.slot == THE_STEP]) == 3, "then it is taken for what it is"


def test_two_optimizers_of_one_model_have_each_their_own_norms() -> None:
    """One has gradients a million times those of the other, which is usual for it; a step of both is one step."""
    run = Run(pare.Plan.uniform(activation=INT8), pare.Guard(traced(Loud()), "100%"))
    scale = 1e-6
    *most, last = run.model.parameters()
    last.register_hook(lambda g: g * scale)
    ways = [torch.optim.SGD([last], 1e-3), torch.optim.SGD(most, 1e-3)]
    for _ in range(25):
        mse_loss(run.model(BATCH[0]), BATCH[1]).backward()
        for optimizer in ways:
            optimizer.step()
            optimizer.zero_grad()
    assert run.session.actions == ()
    assert run.session.state_dict()["guard"]["memory"]["steps"] == 25


@pytest.mark.parametrize("tier", ["full", "lpmm"])
@pytest.mark.parametrize("microbatches", [1, 3])
def test_optimizers_of_paredown_leave_steps_out_too(tier: str, microbatches: int) -> None:
    model = Loud()
    plan = pare.Plan.uniform(activation=LOW)
    session = pare.apply(plan, model, guard=pare.Guard(traced(model), "100%"))
    formats: dict[str, Any] = {"weight": None} if tier == "lpmm" else {}
    optimizer = pare.optim.AdamW(model.parameters(), 1e-3, tier=tier, microbatches=microbatches, **formats)

    def step() -> None:
        for _ in range(microbatches):
            mse_loss(model(BATCH[0]), BATCH[1]).backward()
            optimizer.step()
            optimizer.zero_grad()

    for _ in range(3):
        step()
    before = weights(model)
    model.loudness = LOUD
    step()
    assert [action.slot for action in session.actions] == [THE_STEP]
    assert all(torch.equal(a, b) for a, b in zip(before, weights(model), strict=True))
    for _ in range(4):
        step()
    assert all(w.isfinite().all() for w in weights(model))
    assert not all(torch.equal(a, b) for a, b in zip(before, weights(model), strict=True)), "it goes on"


def test_what_a_grad_scaler_leaves_out_is_no_alarm() -> None:
    model = Loud()
    session = pare.apply(pare.Plan.uniform(activation=INT8), model, guard=pare.Guard(traced(model)))
    optimizer, scaler = torch.optim.SGD(model.parameters(), 0.1), torch.amp.GradScaler("cpu", init_scale=2.0**127)
    for _ in range(4):
        optimizer.zero_grad()
        scaler.scale(1e4 * mse_loss(model(BATCH[0]), BATCH[1])).backward()
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() < 2.0**127, "it left steps out"
    assert session.actions == ()


def test_explains_slot_by_slot() -> None:
    run = Run(pare.Plan.uniform(activation=LOW), pare.Guard(traced(Loud()), "100%"))
    run.steps(10, becomes_loud(run))
    row = run.session.explain().of("b:input")
    assert (row.asked, row.now) == (LOW, INT8)
    assert "quantized by the plan" in row.why and "become infinite" in row.why
    attention = Run(pare.Plan.uniform(activation=INT4), None, Attention(), TEXT).steps(1)
    said = attention.session.explain()
    assert any("pinned at 7 significant bits" in row.why for row in said)
    with pytest.raises(KeyError, match="no slot"):
        said.of("nobody")


def test_lets_go_of_everything() -> None:
    from torch.optim.optimizer import _global_optimizer_pre_hooks as hooks  # type: ignore[attr-defined]

    gc.collect()  # sessions of other tests, whose hooks go with the next registration
    Run(pare.Plan.uniform(activation=INT8), pare.Guard(traced(Loud()))).session.close()
    before = len(hooks)
    run = Run(pare.Plan.uniform(activation=INT8), pare.Guard(traced(Loud()))).steps(2)
    assert len(hooks) == before + 1
    run.session.close()
    assert len(hooks) == before
    run = Run(pare.Plan.uniform(activation=INT8), pare.Guard(traced(Loud()))).steps(2)
    gone = weakref.ref(run.model)
    del run
    gc.collect()
    assert gone() is None
    Run(pare.Plan.uniform(activation=INT8), pare.Guard(traced(Loud()))).session.close()
    assert len(hooks) == before, "the hook of a session that is gone is removed before the next one is registered"


def test_a_session_may_be_freed_in_the_middle_of_a_step() -> None:
    """torch iterates over its hooks: removing one meanwhile ends the step with 'OrderedDict mutated during iteration'."""
    freed: list[Any] = []

    def free(*_: Any) -> None:
        freed.clear()
        gc.collect()

    handle = register_optimizer_step_pre_hook(free)
    run = Run(pare.Plan.uniform(activation=INT8), pare.Guard(traced(Loud())))
    gone = weakref.ref(run.model)
    freed.append(run)
    del run
    other = torch.nn.Parameter(torch.zeros(3))
    other.grad = torch.ones(3)
    torch.optim.SGD([other], 1.0).step()
    handle.remove()
    assert gone() is None
    assert other.tolist() == [-1, -1, -1]


def test_other_models_and_their_optimizers_are_none_of_its_business() -> None:
    run = Run(pare.Plan.uniform(activation=LOW), pare.Guard(traced(Loud()))).steps(1)
    other = nn.Linear(4, 4)
    other.weight.grad = torch.full_like(other.weight, float("nan"))
    torch.optim.SGD(other.parameters(), 0.1).step()
    assert other.weight.isnan().all()
    assert run.session.actions == ()


BAD: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (lambda: pare.apply(pare.Plan(), Loud(), guard=True), ApplyError, "guard is True: pass Guard"),  # type: ignore[arg-type]
    (lambda: pare.Guard(Loud()), ApplyError, "needs the Trace of the step"),  # type: ignore[arg-type]
    (lambda: pare.Guard(traced(Loud()), sensitivities={}), ApplyError, "sensitivities is of type dict"),  # type: ignore[arg-type]
    (
        lambda: pare.apply(pare.Plan(), Loud(), guard=pare.Guard(traced(Loud()), "10%")),
        BudgetError,
        "the plan needs .* of a budget",
    ),
    (lambda: pare.apply(pare.Plan(), Loud(), guard=pare.Guard(traced(Loud()), "much")), BudgetError, "cannot be read"),
    (lambda: pare.Guard(traced(Loud()), "much"), BudgetError, "size 'much' cannot be read"),
    (lambda: pare.apply(pare.Plan(), Loud(), guard=traced(Loud())), ApplyError, r"guard is Trace of .{,50}: pass Guard"),  # type: ignore[arg-type]
    (lambda: pare.Limits(levels=("much",)), PlanError, "element 'much' is unknown"),
    (lambda: pare.Limits(levels=3), PlanError, "levels are formats, the best first, .* not 3"),  # type: ignore[arg-type]
    (lambda: pare.Limits(error=True), ApplyError, "error is True"),
    (lambda: pare.Limits(every=0), ApplyError, "every is 0"),
    (lambda: pare.Limits(jump=0.5), ApplyError, "jump is 0.5"),
]


@pytest.mark.parametrize(("call", "error", "says"), BAD)
def test_says_what_is_wrong(call: Callable[[], Any], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        call()


def test_a_refused_guard_leaves_the_model_plain() -> None:
    model = Loud()
    trace = traced(model)
    with pytest.raises(BudgetError):
        pare.apply(pare.Plan.uniform(activation=INT8), model, guard=pare.Guard(trace, "10%"))
    pare.apply(pare.Plan.uniform(activation=INT8), model).close()
    assert not any(m._forward_hooks for m in model.modules())


@pytest.mark.parametrize("other", [nn.Linear(8, 8), nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))])
def test_the_trace_of_another_model_is_refused_and_leaves_the_model_plain(other: nn.Module) -> None:
    size = next(other.parameters()).shape[1]
    trace = traced(other, (torch.randn(256, size), torch.randn(256, size)))
    model, plan = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 64)), pare.Plan.uniform(activation=INT8)
    with pytest.raises(ApplyError, match=r"the guard's trace is of another model, a (Linear|Sequential): '(0\.)?weight' is"):
        pare.apply(plan, model, guard=pare.Guard(trace))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    pare.apply(plan, model).close()


def test_states_with_and_without_a_guard_are_not_interchangeable() -> None:
    plan = pare.Plan.uniform(activation=INT8)
    guarded, plain = Run(plan, pare.Guard(traced(Loud()))).session, Run(plan, None).session
    with pytest.raises(ApplyError, match="has no guard, and the session that saved the state had one"):
        plain.load_state_dict(guarded.state_dict())
    with pytest.raises(ApplyError, match="has a guard, and the session that saved the state had none"):
        guarded.load_state_dict(plain.state_dict())
    other = Run(pare.Plan.uniform(activation=INT4), pare.Guard(traced(Loud()))).session
    with pytest.raises(ApplyError, match="another plan"):
        other.load_state_dict(guarded.state_dict())


@pytest.mark.parametrize("spoiled", [3, {}, {"memory": {}}, {"actions": None}])
def test_invalid_states_are_refused_and_change_nothing(spoiled: Any) -> None:
    session = Run(pare.Plan.uniform(activation=INT8), pare.Guard(traced(Loud()))).steps(2).session
    state = session.state_dict()
    guard = {**state["guard"], **spoiled} if isinstance(spoiled, dict) and spoiled else spoiled
    with pytest.raises(ApplyError, match="the guard's part of the state"):
        session.load_state_dict({**state, "guard": guard})
    assert session.state_dict() == state
