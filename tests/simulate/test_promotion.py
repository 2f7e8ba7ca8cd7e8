"""Promotion, loss scaling, optimizer state and resuming: what simulate mode carries from step to step."""

from __future__ import annotations

import copy
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from paredown import Plan, apply
from paredown.errors import ApplyError
from paredown.models.resnet import SumLastResNet
from paredown.simulate.outline import outline
from paredown.simulate.peppp import peppp_element, peppp_plan
from paredown.simulate.rounded_values import Simulate
from paredown.study.papers.mixed_precision_assignments import ALL_HIGH, FORMATS, demote, high_plan, low_ratio, plan_of
from tests.session.nets import pictures
from tests.simulate.rounded_nets import FORWARD, WIDE, Float, Forked, paper_plan

LOW = 30.0  # the largest value of the low format; from 31 on values go past it


class Wide(nn.Module):
    """A linear layer that is the identity, and a ReLU."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.fc, self.relu = nn.Linear(width, width, bias=False), nn.ReLU()
        nn.init.eye_(self.fc.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.fc(x))


def batch_with(num_past: int, num: int = 200) -> Tensor:
    """Positive values of which `num_past` round past the largest low value, and others just do not."""
    x = torch.full((num,), 30.99)
    x[:num_past] = 31.0
    return x.view(2, -1)


@pytest.mark.parametrize(("num_past", "is_raised"), [(0, False), (1, False), (2, True), (50, True)])
def test_one_percent_of_overflow_raises_a_tensor_for_good(num_past: int, is_raised: bool) -> None:
    """The input of 200 values; its 2 values past the end are 1 %."""
    model = Wide(100)
    session = apply(paper_plan(), model, mode=Simulate(raised=high_plan()))
    x = batch_with(num_past)
    first = model(x)
    assert first.max() <= LOW and not session.promotions, "raised before the next pass"
    second = model(x)
    raised = {row.slot: row for row in session.promotions}
    assert ("input1" in {slot.partition("=")[2] or slot for slot in raised}) is is_raised
    if is_raised:
        (row,) = [row for slot, row in raised.items() if slot.endswith("input1")]
        assert row.forward == 1 and row.share == pytest.approx(num_past / 200)
        assert any(change.slot == row.slot and "overflowed" in change.reason for change in session.changes)
    assert second.max() <= LOW, "the product behind it is still low, until its own overflow was seen"
    third = model(x)
    assert is_raised or not third.max() > LOW
    assert bool(model(x).max() > LOW) is is_raised
    assert len({row.slot for row in session.promotions}) == len(session.promotions)


def test_an_overflow_in_the_last_step_raises_before_the_model_is_judged() -> None:
    """The paper raises tensors after every step: accuracy after the last one is measured with the formats that the step left."""
    model = Wide(100)
    with torch.no_grad():
        model.fc.weight.mul_(0.5)
    session = apply(paper_plan(), model, mode=Simulate(raised=high_plan()))
    x = torch.full((2, 100), 31.0)
    assert (model(x) == 15.0).all()  # of 30
    assert (model.eval()(x) == 16.0).all() and [row.forward for row in session.promotions] == [1]  # 15.5, ties away from zero


@pytest.mark.parametrize("rounding", ["nearest_away", "stochastic"])
def test_training_is_the_same_to_the_bit_until_something_overflows(rounding: str) -> None:
    """Counting overflows changes no value, no random bit and no loss scale; then only what is raised does."""
    results: list[list[float]] = []
    for raised in (None, high_plan()):
        net = Forked()
        plan = Plan.uniform(activation="e4m3b11f", weight="e4m3b11f", error="e5m2f", rounding=rounding, overflow="saturate")
        session = apply(plan, net, seed=4, mode=Simulate(raised=raised))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
        results.append(train(net, 3, optimizer, times=1.0))
        assert not session.promotions
        results[-1] += train(net, 3, optimizer, 3, times=100.0)
        assert bool(session.promotions) is (raised is not None)
    assert results[0][:4] == results[1][:4] and results[0][4:] != results[1][4:]


def test_single_tensors_are_raised_not_groups() -> None:
    torch.manual_seed(0)
    net = Forked()
    with torch.no_grad():
        net.fc.weight.fill_(40.0)
    session = apply(paper_plan(), net, mode=Simulate(raised=high_plan()))
    net(0.01 * pictures(2, side=8))
    session.promote()
    slots = {row.slot for row in session.promotions}
    assert "fc.weight" in slots and not {"conv:output", "bn:output", "fc.bias", "conv.weight"} & slots


def test_without_a_plan_to_raise_to_nothing_is_raised() -> None:
    model = Wide(100)
    session = apply(paper_plan(), model, mode="simulate")
    for _ in range(3):
        assert model(batch_with(100)).max() <= LOW
    assert session.promotions == ()


def train(net: nn.Module, steps: int, optimizer: torch.optim.Optimizer, first: int = 0, *, times: float = 30.0) -> list[float]:
    losses: list[float] = []
    for number in range(first, first + steps):
        x = times * pictures(4, side=8, seed=number)
        loss = cross_entropy(net(x), torch.tensor([0, 1, 2, 3]))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_training_resumes_with_its_promotions_and_random_bits() -> None:
    plan = Plan.uniform(activation="e4m3b11f", weight="e4m3b11f", error="e5m2f", rounding="stochastic", overflow="saturate")
    how = Simulate(raised=Plan.uniform(activation="e6m9f", weight="e6m9f", rounding="stochastic", overflow="saturate"))
    net = Forked()
    session, optimizer = apply(plan, net, seed=4, mode=how), torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    train(net, 3, optimizer)
    saved = copy.deepcopy((session.state_dict(), net.state_dict(), optimizer.state_dict()))
    expected = train(net, 3, optimizer, 3)
    assert saved[0]["promotions"], "there is something to resume"
    other = Forked()
    resumed, optimizer = apply(plan, other, mode=how), torch.optim.SGD(other.parameters(), lr=0.01, momentum=0.9)
    resumed.load_state_dict(saved[0])
    other.load_state_dict(saved[1])
    optimizer.load_state_dict(saved[2])
    assert train(other, 3, optimizer, 3) == expected
    assert resumed.promotions == session.promotions
    assert resumed.forwards == session.forwards == 6


def test_states_of_others_are_refused() -> None:
    session = apply(paper_plan(), Forked(), mode="simulate")
    with pytest.raises(ApplyError, match="not the state of a simulated session"):
        session.load_state_dict({"version": 1, "plan": {}})
    with pytest.raises(ApplyError, match="the state belongs to another plan"):
        session.load_state_dict({**session.state_dict(), "plan": Plan.uniform().to_json()})


def test_the_loss_scaler_skips_what_overflows_and_halves() -> None:
    """Errors become infinite past 114688: torch's own scaler sees it, halves and skips, and doubles after its interval."""
    net = Forked()
    apply(paper_plan(), net, mode="simulate")
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24, growth_interval=4)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    scales: list[float] = []
    for number in range(16):
        before = copy.deepcopy(net.state_dict())
        loss = cross_entropy(net(pictures(4, side=8, seed=number)), torch.tensor([0, 1, 2, 3]))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scales.append(scaler.get_scale())
        scaler.update()
        optimizer.zero_grad()
        is_skipped = scaler.get_scale() < scales[-1]
        same = all(torch.equal(p, before[name]) for name, p in net.named_parameters())
        assert same == is_skipped
    assert scales[1] == 2.0**23 and min(scales) > 1.0
    assert any(b == 2 * a for a, b in pairwise(scales)), "and grows again"


# --- optimizers ---------------------------------------------------------------------------------------------------------


def test_masters_and_moments_are_rounded_after_each_step() -> None:
    net = Forked()
    plan = WIDE.rule(WIDE.rule(WIDE.rule(Plan.uniform(), "master"), "moment1"), "moment2")
    plain = copy.deepcopy(net)
    apply(plan, net, mode="simulate")
    ours, theirs = torch.optim.Adam(net.parameters(), lr=0.01), torch.optim.Adam(plain.parameters(), lr=0.01)
    for number in range(3):
        for model, optimizer in ((net, ours), (plain, theirs)):
            optimizer.zero_grad()
            model(pictures(4, side=8, seed=number)).square().sum().backward()
            optimizer.step()
        with torch.no_grad():
            for p in plain.parameters():
                p.copy_(WIDE(p))
                for state in ("exp_avg", "exp_avg_sq"):
                    theirs.state[p][state].copy_(WIDE(theirs.state[p][state]))
    for p, q in zip(net.parameters(), plain.parameters(), strict=True):
        assert torch.equal(p, q)
        assert torch.equal(ours.state[p]["exp_avg_sq"], theirs.state[q]["exp_avg_sq"])
        assert ours.state[p]["step"] == 3


def test_other_optimizers_and_closed_sessions_do_not_round() -> None:
    net, stranger = Forked(), nn.Linear(3, 3)
    session = apply(WIDE.rule(Plan.uniform(), "master"), net, mode="simulate")
    before = stranger.weight.detach().clone()
    stranger(torch.ones(1, 3)).sum().backward()
    torch.optim.SGD(stranger.parameters(), lr=2.0**-20).step()
    assert torch.equal(stranger.weight, before - 2.0**-20)
    session.close()
    before = net.conv.bias.detach().clone()
    net.conv.bias.grad = torch.ones_like(before)
    torch.optim.SGD([net.conv.bias], lr=2.0**-20).step()
    assert torch.equal(net.conv.bias, before - 2.0**-20)


def nearest(plan: Plan) -> Plan:
    """PEPPP's plan without stochastic rounding, so that the step can be computed by hand."""
    rules = [(key, a if a.format is None else type(a).parse(a.format, "nearest_away", a.overflow)) for key, a in plan.rules]
    return Plan(tuple(rules))


def test_peppps_step_in_its_order() -> None:
    """g <- lo(g / scale), an fp32 step on the master, master <- hi, weight <- lo(master) for the next pass, momentum <- hi."""
    low, high, scale = Float(peppp_element(4, 3), 3, -7, 7, "saturate"), Float(peppp_element(6, 7), 7, -31, 31, "saturate"), 1000.0
    torch.manual_seed(0)
    net = SumLastResNet(width=4)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    how = Simulate(sums="rounded", gradients="step", first_weights="exact")
    session = apply(nearest(peppp_plan((4, 3), (6, 7))), net, mode=how)
    master = {name: p.detach().clone() for name, p in net.named_parameters()}
    momentum: dict[str, Tensor] = {}
    for number in range(3):
        loss = scale * cross_entropy(net(pictures(4, side=32, seed=number)), torch.tensor([0, 1, 2, 3]))
        optimizer.zero_grad()
        loss.backward()
        for name, p in net.named_parameters():
            assert p.grad is not None
            p.grad.div_(scale)
            g = no_subnormals(low, p.grad) + 5e-4 * master[name]
            momentum[name] = g if number == 0 else 0.9 * momentum[name] + g
            master[name] = no_subnormals(high, master[name] - 0.05 * momentum[name])
            momentum[name] = no_subnormals(high, momentum[name])
        optimizer.step()
        for name, p in net.named_parameters():
            assert torch.allclose(p, master[name], rtol=2.0**-7, atol=0), name
            master[name] = p.detach().clone()  # one step at a time: sums of float32 in another order may tie otherwise
            momentum[name] = optimizer.state[p]["momentum_buffer"].clone()
            assert torch.equal(no_subnormals(high, p), p) and torch.equal(no_subnormals(low, p.grad), p.grad)
    assert not session.changes


def no_subnormals(by: Float, x: Tensor) -> Tensor:
    """Below the smallest normal value there is only 0: values from half of it on are rounded up to it."""
    smallest = 2.0**by.low
    return torch.where(x.abs() < smallest, torch.where(x.abs() >= smallest / 2, smallest, 0.0).copysign(x), by(x))


def test_peppps_quantisers_stand_where_they_did() -> None:
    net, x = SumLastResNet(width=4), pictures(2, side=32)
    apply(peppp_plan((3, 1), (8, 7)), net, mode=Simulate(sums="rounded"))
    levels: dict[str, set[int]] = {}

    def note(name: str) -> Any:
        def record(module: Any, args: Any, output: Tensor) -> None:
            if type(output) is Tensor:  # the first pass is outlined on fake tensors, each value of which would be an operation
                levels[name] = set(output.flatten().tolist())

        return record

    for name, module in net.named_modules():
        module.register_forward_hook(note(name))
    net(x)
    few = {name for name, values in levels.items() if len(values) <= 29}  # e3m1 has 14 magnitudes, both signs and 0
    rounded = {name for name in levels if name.endswith(("conv1", "conv2", "relu1", "relu2", "downsample.1")) and name != "conv1"}
    sums = {name for name in levels if name.startswith("layers") and name.count(".") <= 1}
    assert rounded <= few and "relu" in few and sums - {""} <= few
    assert not {"conv1", "bn1", "layers.0.bn1", "layers.0.bn2", "layers.2.downsample.0"} & few


def test_a_published_plan_trains_and_its_share_is_reported() -> None:
    torch.manual_seed(0)
    net = SumLastResNet(width=4)
    batch = pictures(8, side=32), torch.arange(8)
    found = outline(net, batch, loss=cross_entropy)
    low = demote(found, 0.5)
    plan = plan_of(found, low, FORMATS, "demotion")
    assert plan.reason == f"demotion: {low_ratio(found, low):.1%} of all numbers low"
    assert plan_of(found, ALL_HIGH).rules == high_plan().rules
    session = apply(plan, net, mode=Simulate(raised=high_plan()))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    losses: list[float] = []
    for _ in range(6):
        with session.following():
            loss = cross_entropy(net(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]
    assert not [row for row in session.changes if row.reason == "no such slot in this model"]


def test_the_float_of_the_tests_is_the_low_format() -> None:
    assert FORWARD.largest == LOW
