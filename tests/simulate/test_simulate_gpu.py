"""Simulate mode on a GPU: one captured graph serves every format and continues to count; TF32 only where it is exact."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from paredown import Plan, Role, apply
from paredown.codec import backend
from paredown.errors import ApplyError
from paredown.simulate import rounded_slots
from paredown.simulate.rounded_slots import RoundedSlot, RoundedSlots
from paredown.simulate.rounded_values import Precision, Simulate
from paredown.study.papers.mixed_precision_assignments import high_plan
from tests.session.nets import pictures
from tests.simulate.rounded_nets import BACKWARD, FORWARD, HIGH, Forked, Roundings, forked_step, paper_plan, step

ROLES = ("activation", "error", "weight", "gradient")
FORMATS = {role: "e4m3b11f" for role in ROLES}
PLANS = {
    "all low": {role: "e4m3b11f" for role in ROLES},
    "all high": {role: "e6m9f" for role in ROLES},
    "activations alone": {"activation": "e3m2b5f"},
    "unmodified": {},
    "weights and errors": {"weight": "int8", "error": "e5m2f"},
}


def plan_of(formats: dict[str, str], rounding: str) -> Plan:
    plan = Plan.uniform()
    for role, text in formats.items():
        plan = plan.set(role, text, rounding=rounding, overflow="saturate")
    return plan


def captured(run: Callable[[], Tensor]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    """A graph of `run` after three warm-up calls, and what it returns each time it is replayed."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    return graph, out


@pytest.fixture
def exactly_repeatable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)


@pytest.mark.gpu
@pytest.mark.usefixtures("exactly_repeatable")
@pytest.mark.parametrize("rounding", ["nearest_away", "stochastic"])
def test_one_graph_serves_every_format(rounding: str) -> None:
    net, x = Forked().cuda(), pictures(2, side=8).cuda()
    sent = torch.randn(2, 5, device="cuda")
    session = apply(plan_of(FORMATS, rounding), net, seed=3, mode=Simulate(all_live=True))

    def run() -> Tensor:
        for p in net.parameters():
            p.grad = None
        out = net(x)
        out.backward(sent)
        return out

    graph, out = captured(run)
    gradients = {name: p.grad for name, p in net.named_parameters()}
    for formats in PLANS.values():
        plan = plan_of(formats, rounding)
        session.set_plan(plan)
        before = session.forwards
        graph.replay()
        assert session.forwards == before + 1, "the count goes on in the graph"
        other = copy.deepcopy(net)
        eager = apply(plan, other, seed=3, mode=Simulate(all_live=True))
        eager.load_state_dict({**eager.state_dict(), "forwards": before})
        expected, found = step(other, x, sent)
        assert torch.equal(out, expected), formats
        for name, gradient in gradients.items():
            assert gradient is not None and torch.equal(gradient, found[name]), (formats, name)


@pytest.mark.gpu
@pytest.mark.usefixtures("exactly_repeatable")
def test_promotion_happens_inside_of_the_graph() -> None:
    net, x = Forked().cuda(), pictures(2, side=8).cuda()
    session = apply(paper_plan(), net, mode=Simulate(raised=high_plan()))
    graph, out = captured(lambda: net(x))
    assert not session.promotions
    with torch.no_grad():
        net.fc.weight.fill_(40.0)
    graph.replay()  # sees it
    low = out.clone()
    graph.replay()  # and has raised it
    promotions = [list(row) for row in session.promotions]
    assert "fc.weight" in {row[0] for row in promotions}
    assert not torch.equal(low, out)
    other = copy.deepcopy(net)
    eager = apply(paper_plan(), other, mode=Simulate(raised=high_plan()))
    eager.load_state_dict({**eager.state_dict(), "forwards": session.forwards - 1, "promotions": promotions})
    assert torch.equal(other(x), out)


@pytest.mark.gpu
def test_a_gpu_rounds_what_a_cpu_rounds() -> None:
    """Without products the arithmetic is the same, so that all bits are."""

    class Net(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x.relu() * 3.0 + x).relu()

    for plan in (paper_plan(), plan_of(FORMATS, "stochastic")):
        x = 10 * pictures(4).requires_grad_()
        results: list[tuple[Tensor, Tensor]] = []
        for device in ("cpu", "cuda"):
            net, there = Net(), x.detach().to(device).requires_grad_()
            apply(plan, net, seed=2, mode="simulate")
            out = net(there)
            out.backward(torch.ones_like(out) / 3)
            assert there.grad is not None
            results.append((out.detach().cpu(), there.grad.cpu()))
        assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])


@pytest.mark.gpu
def test_wide_formats_are_multiplied_in_float32() -> None:
    """4097 has 13 significant bits: by TF32, which the user allowed, 4097 * 4097 would be 2^24."""
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        net = nn.Linear(64, 64, bias=False).cuda()
        with torch.no_grad():
            net.weight.copy_(4097 * torch.eye(64, device="cuda"))
        x = 4097.0 * torch.ones(32, 64, device="cuda")
        with apply(Plan.uniform(activation="e8m20f", weight="e8m20f", rounding="nearest_away"), net, mode="simulate"):
            assert torch.equal(net(x).cpu(), torch.full((32, 64), 16785408.0))
        assert torch.backends.cuda.matmul.allow_tf32
    finally:
        torch.backends.cuda.matmul.allow_tf32 = False


# --- without a GPU ------------------------------------------------------------------------------------------------------


@pytest.fixture
def tabled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Formats in memory on the CPU too, read by kernels in Triton's interpreter."""
    pytest.importorskip("triton", reason="Triton is not installed")
    if torch.cuda.is_available():
        pytest.skip("kernels are compiled here")
    monkeypatch.setattr(rounded_slots, "TABLE_DEVICES", ("cpu",))


@pytest.mark.usefixtures("tabled")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_kernels_round_a_step_like_the_one_computed_by_hand() -> None:
    net, x, sent = Forked(), 4 * pictures(2, side=8), torch.randn(2, 5)
    out, gradients = forked_step(net, x, sent, Roundings(FORWARD, BACKWARD, FORWARD, HIGH))
    apply(paper_plan(), net, mode="simulate")
    ours, found = step(net, x, sent)
    assert torch.equal(ours, out)
    assert all(torch.equal(found[name], gradient) for name, gradient in gradients.items())


@pytest.mark.usefixtures("tabled")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_rows_are_replaced_by_other_plans_and_by_promotion() -> None:
    net, x, sent = Forked(), pictures(2, side=8), torch.randn(2, 5)
    session = apply(plan_of(FORMATS, "nearest_away"), net, mode=Simulate(all_live=True))
    plain = copy.deepcopy(net)
    step(net, x, sent)
    for formats in PLANS.values():
        session.set_plan(plan_of(formats, "nearest_away"))
        ours, found = step(net, x, sent)
        other = copy.deepcopy(plain)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(rounded_slots, "TABLE_DEVICES", ())
            apply(plan_of(formats, "nearest_away"), other, mode="simulate")
            expected, theirs = step(other, x, sent)
        assert torch.equal(ours, expected) and all(torch.equal(found[name], g) for name, g in theirs.items()), formats
    session.close()
    session = apply(paper_plan(), net, mode=Simulate(raised=high_plan()))
    net(x)
    with pytest.raises(ApplyError, match="may run in TF32"):
        session.set_plan(plan_of({"activation": "e8m20f"}, "nearest_away"))
    with torch.no_grad():
        net.fc.weight.fill_(40.0)
    low, high = net(0.01 * x), net(0.01 * x)
    assert "fc.weight" in {row.slot for row in session.promotions} and not torch.equal(low, high)


@pytest.mark.usefixtures("tabled")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_parameters_in_few_launches_are_rounded_as_one_by_one() -> None:
    plan = plan_of({role: "e4m3b11f" for role in (*ROLES, "master", "moment1")}, "stochastic")
    x, sent, found = pictures(2, side=8), torch.randn(2, 5), []
    torch.manual_seed(0)
    first = Forked()
    for few in (False, True):
        net = copy.deepcopy(first)
        session = apply(plan, net, seed=3, mode=Simulate(gradients="step"))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        net(x)  # the model is on its device, and its slots are known
        for _ in range(2):
            with session.capturing() if few else nullcontext():
                out = net(x)
                out.backward(sent)
                optimizer.step()
                optimizer.zero_grad()
        found.append([out, *net.parameters(), *(optimizer.state[p]["momentum_buffer"] for p in net.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.usefixtures("tabled")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_weights_in_blocks_are_copied_while_a_graph_is_captured() -> None:
    net, x = Forked(), pictures(2, side=8)
    session = apply(Plan.uniform(weight="int4/64@bf16", activation="e4m3b11f", rounding="nearest_even"), net, mode="simulate")
    before = {name: p.detach().clone() for name, p in net.named_parameters()}
    expected = net(x)
    with session.capturing():
        assert torch.equal(net(x), expected)
    assert all(torch.equal(p, before[name]) for name, p in net.named_parameters())


READS = ("tolist", "item", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__", "nonzero", "tensor", "as_tensor")


class Captured(TorchFunctionMode):
    """Fails where CUDA would in a capture: a tensor is read by the host or made of its numbers. Kernels of the interpreter may."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        assert name not in READS, f"{name} synchronizes with the device"
        return func(*args, **(kwargs or {}))


def unwatched(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **options: Any) -> Any:
        with torch._C.DisableTorchFunction():  # pyright: ignore[reportPrivateUsage]
            return function(*args, **options)

    return call


@pytest.mark.usefixtures("tabled")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("num_warmups", [1, 3])
@pytest.mark.parametrize("raised", [None, high_plan()], ids=["plain", "promotion"])
def test_a_captured_step_does_not_synchronize(num_warmups: int, raised: Plan | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after passes in which values were counted; what these counts say is a warning of the first pass that is not captured."""
    net, x, sent = Forked(), pictures(2, side=8), 1e-9 * torch.randn(2, 5)  # the plan rounds these errors to 0
    session = apply(paper_plan(), net, mode=Simulate(raised=raised))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def run() -> None:
        net(x).backward(sent)
        optimizer.step()

    for _ in range(num_warmups - 1):
        run()
    net(x).backward(sent)
    before = session.counts
    kernels = backend.find_kernels()
    for name in ("round_trip_by_row", "round_many"):
        monkeypatch.setattr(kernels, name, unwatched(getattr(kernels, name)))
    with monkeypatch.context() as patch, Captured():
        patch.setattr(rounded_slots, "is_capturing", lambda: True)
        optimizer.step()  # a graph of the step alone
        run()
    assert session.counts == before, "captured steps are not counted"
    with pytest.warns(UserWarning, match="training stalls") if num_warmups == 3 else nullcontext():
        net(x)


def place_of(text: str | None, raised: str | None) -> list[RoundedSlot | None]:
    made = RoundedSlots(Plan.uniform(activation=text), 0, raised=Plan.uniform(activation=raised) if raised else None, all_live=True)
    return [made.of(("x",), Role.ACTIVATION)]


def switches() -> tuple[Any, ...]:
    return torch.backends.cuda.matmul.fp32_precision, torch.backends.cudnn.conv.fp32_precision


@pytest.mark.parametrize("allowed", [False, True])
def test_switches_go_back_to_what_they_were(allowed: bool) -> None:
    first, default = switches(), torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = allowed
    try:
        before, precision = switches(), Precision()
        for is_narrow, text in ((True, "tf32"), (False, "ieee")):
            precision.set(is_narrow)
            assert switches() == (text, text)
        precision.restore()
        assert switches() == before and torch.backends.cuda.matmul.allow_tf32 is allowed
        y: Any = torch.ones(3, requires_grad=True) * 2
        seen: list[Any] = []
        precision.around(y.grad_fn, True)
        y.grad_fn.register_prehook(lambda gradients: seen.append(switches()))
        y.sum().backward()
        assert seen == [("tf32", "tf32")] and switches() == before
    finally:
        torch.backends.cuda.matmul.allow_tf32 = default
        for switch, text in zip((torch.backends.cuda.matmul, torch.backends.cudnn.conv), first, strict=True):
            switch.fp32_precision = text
