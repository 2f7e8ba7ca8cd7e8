"""Trials in parallel lanes equal trials alone: on the CPU, where nothing is captured, and from captured graphs on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paredown import Plan, Trial
from paredown.simulate.peppp import peppp_plan
from paredown.simulate.rounded_values import Simulate
from paredown.study.sweeps.engines.cuda_graphs import GraphBench, kind_of, model_key, why_alone
from paredown.study.sweeps.engines.graph_lane import LayoutMismatch
from paredown.study.tasks.evaluate import evaluate, make_setting
from paredown.study.tasks.task import OptimizerSettings, Task
from tests.study.tasks.made import examples, make_task, net
from tests.support.scale import SCALE

every_device = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
ROLES = ("activation", "weight", "gradient", "error")
AS_ALONE = [
    ("sgdm", "simulate"),
    ("sgd", "peppp"),
    ("adamw", "simulate"),
    *(
        pytest.param(rule, mode, marks=pytest.mark.full)
        for rule, mode in (("sgdm", "peppp"), ("sgd", "simulate"), ("adamw", "peppp"))
    ),
]


def plan_of(text: str | None, rounding: str = "stochastic") -> Plan:
    plan = Plan()
    for role in ROLES if text is not None else ():
        plan = plan.set(role, text, rounding=rounding, overflow="saturate")
    return plan


def side_by_side(cases: Sequence[tuple[Task, Plan, int]], device: str, mode: Any, lanes: int) -> list[Trial | LayoutMismatch]:
    bench = GraphBench(lanes)
    for number, (task, plan, seed) in enumerate(cases):
        bench.add(number, make_setting(task, plan, seed=seed, device=device, mode=mode))
    found = ended(bench)
    return [found[number] for number in range(len(cases))]


def ended(bench: GraphBench) -> dict[Any, Any]:
    """What each run has become, by its key."""
    found: dict[Any, Any] = {}
    while bench.is_busy:
        found |= bench.turn()
    return found


def assert_shares_no_graph(cases: Sequence[tuple[Task, Plan, int]], device: str, **options: Any) -> None:
    """All come back untrained."""
    found = side_by_side(cases, device, **{"mode": "simulate", "lanes": 3, **options})
    assert [type(one) for one in found] == [LayoutMismatch] * len(cases)


def assert_as_alone(cases: Sequence[tuple[Task, Plan, int]], device: str, *, mode: Any = "simulate", lanes: int = 3) -> list[Trial]:
    """Every field is what `evaluate` gives, but for times, and for peaks of what is stored: a process makes some tables once."""
    together = side_by_side(cases, device, mode, lanes)
    for trial, (task, plan, seed) in zip(together, cases, strict=True):
        assert isinstance(trial, Trial), trial
        alone = evaluate(task, plan, seed=seed, device=device, mode=mode)
        both = (replace(one, seconds=None, step_seconds=None, measured_peak_bytes=None) for one in (trial, alone))
        assert next(both) == next(both)
    return [trial for trial in together if isinstance(trial, Trial)]


@every_device
@pytest.mark.parametrize(("rule", "mode"), AS_ALONE)
def test_as_alone(rule: str, mode: str, device: str) -> None:
    task = make_task(steps=8, settings=OptimizerSettings(rule, 0.05, max_norm=1.0 if rule == "adamw" else None))
    texts = ("e4m3fn", "e3m1b4fns") if SCALE == 1 else ("e4m3fn", "e5m2f", "e3m1b4fns")
    cases = [(task, plan_of(text), seed) for seed in (0, 1) for text in texts]  # more than there are lanes
    trials = assert_as_alone(cases, device, mode=mode)
    assert len({trial.loss for trial in trials}) == len(cases), "formats and seeds matter"


@pytest.mark.full
@every_device
def test_networks_with_buffers_and_odd_last_batches(device: str) -> None:
    def make(seed: int) -> nn.Module:
        return nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4))

    task = make_task(make, steps=9, batch=24)  # 64 test examples: 24, 24 and 16
    assert_as_alone([(task, plan_of(text), seed) for text in ("e4m3fn", "e6m9f") for seed in (0, 3)], device, lanes=2)


@pytest.mark.full
@every_device
def test_tasks_with_other_data_and_rates_share_lanes(device: str) -> None:
    tasks = [make_task(settings=OptimizerSettings("sgdm", lr)) for lr in (0.02, 0.2)]
    tasks += [make_task(data=examples(96), steps=7)]
    few = examples(96)
    tasks += [
        make_task(data=replace(few, x_test=few.x_test[:50], y_test=few.y_test[:50]), steps=7)
    ]  # its last test batch is smaller
    settings = [make_setting(task, plan_of("e4m3fn"), device=device, mode="simulate") for task in tasks]
    assert len({kind_of(setting) for setting in settings}) == 1
    assert_as_alone([(task, plan_of("e4m3fn"), 0) for task in tasks], device)


@every_device
def test_runs_that_diverge_or_are_hopeless_end_where_they_do_alone(device: str) -> None:
    wild = make_task(steps=40, settings=OptimizerSettings("sgd", 1e9, schedule="constant"))
    vain = make_task(steps=120, settings=OptimizerSettings("sgd", 1e-9))
    trials = assert_as_alone([(task, plan_of("e8m7"), 0) for task in (wild, vain, make_task())], device, lanes=2)
    assert [trial.status.value for trial in trials] == ["diverged", "stopped", "done"]


@pytest.mark.full
@every_device
@pytest.mark.filterwarnings("ignore:.*training stalls:UserWarning")  # e2m1 loses most gradients
def test_peppps_plans_share_one_graph(device: str) -> None:
    from paredown.study.tasks.lookup import find_task

    task = find_task("digits#model=sumlast18,width=4,steps=2,batch=120")
    plans = [peppp_plan(low, (6, 9)) for low in ((2, 1), (4, 3))]
    assert len({kind_of(make_setting(task, plan, device=device, mode="peppp")) for plan in plans}) == 1
    assert_as_alone([(task, plan, 0) for plan in plans], device, mode="peppp")


def test_what_a_graph_has_fixed_tells_groups_apart() -> None:
    task = make_task()
    first = kind_of(make_setting(task, plan_of("e4m3fn"), mode="simulate"))
    assert first == kind_of(make_setting(task, plan_of("e5m2"), seed=4, mode="simulate"))
    others = [
        make_setting(task, plan_of("e8m20f"), mode="simulate"),  # no TF32
        make_setting(task, plan_of("e4m3fn", "nearest_even"), mode="simulate"),
        make_setting(task, plan_of(None), mode="simulate"),
        make_setting(task, plan_of("e4m3fn"), mode="peppp"),
        make_setting(make_task(batch=16), plan_of("e4m3fn"), mode="simulate"),
        make_setting(make_task(settings=OptimizerSettings("sgdm", 0.1, {"weight_decay": 0.1})), plan_of("e4m3fn"), mode="simulate"),
        make_setting(make_task(lambda seed: net(seed)), plan_of("e4m3fn"), mode="simulate"),
    ]
    assert len({first, *map(kind_of, others)}) == 1 + len(others)
    assert model_key(partial(net, 1)) == model_key(partial(net, 1)) != model_key(partial(net, 2))


@pytest.mark.parametrize(
    ("changes", "mode", "text", "why"),
    [
        ({}, "store", "e4m3fn", "different sizes"),
        ({}, Simulate(raised=Plan()), "e4m3fn", "depends on the steps before"),
        ({"settings": OptimizerSettings("lion", 0.01)}, "simulate", "e4m3fn", "no lion"),
        ({"settings": OptimizerSettings("sgd", 0.01, loss_scale=8.0)}, "simulate", "e4m3fn", "GradScaler"),
        ({"settings": OptimizerSettings("sgdm", 0.01, {"dampening": 0.5})}, "simulate", "e4m3fn", "dampening"),
        ({}, "simulate", "int8/64@bf16", "blocks or tables"),
    ],
)
def test_what_cannot_share_comes_back_with_the_reason(changes: dict[str, Any], mode: Any, text: str, why: str) -> None:
    task, plan = make_task(**changes), Plan.uniform(activation=text)
    assert why in (why_alone(make_setting(task, plan, mode=mode)) or "")
    (found,) = side_by_side([(task, plan, 0)], "cpu", mode, 1)
    assert isinstance(found, LayoutMismatch) and why in str(found)


class Drops(nn.Module):
    """Drops its layer now and then, as the host's own generator says."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * (float(torch.rand(())) > 0.3 if self.training else 1.0)


@pytest.mark.full
@every_device
@pytest.mark.parametrize(
    "make",
    [lambda seed: nn.Sequential(nn.Linear(16, 32), nn.Dropout(0.5), nn.Linear(32, 4)), lambda seed: Drops()],
    ids=["dropout", "host"],
)
def test_models_that_draw_random_numbers_share_no_graph(make: Any, device: str) -> None:
    assert_shares_no_graph([(make_task(make), plan_of("e4m3fn"), seed) for seed in (0, 1)], device)


class Asks(nn.Module):
    """Asks its tensors for a number, which a graph cannot do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * (2.0 if x.mean().item() > 0 else 1.0)


@pytest.mark.gpu
def test_what_cannot_be_captured_shares_no_graph() -> None:
    assert_shares_no_graph([(make_task(lambda seed: Asks()), plan_of("e4m3fn"), seed) for seed in (0, 1)], "cuda")


@pytest.mark.full
@every_device
def test_batches_that_lie_otherwise_in_memory(device: str) -> None:
    """Random bits follow the order of memory: shifted pictures lie channels last."""
    from paredown.study.tasks.lookup import find_task

    tasks = [find_task(f"digits#model=sumlast18,width=4,steps=2,batch=120{more}") for more in ("", ",shift=1")]
    assert_as_alone([(task, peppp_plan((4, 3), (6, 9)), 0) for task in tasks], device, mode="peppp", lanes=1)


def wide(widths: list[int], seed: int) -> nn.Module:
    return nn.Sequential(nn.Linear(16, widths[0]), nn.ReLU(), nn.Linear(widths[0], 4))


def test_models_that_cannot_be_compared_share_no_graph() -> None:
    assert_shares_no_graph([(make_task(partial(wide, [32])), plan_of("e4m3fn"), 0)], "cpu")


def test_metrics_of_double_precision_are_kept() -> None:
    def metric(output: Tensor, answers: Tensor) -> Tensor:
        return (output.argmax(-1) != answers).double().mean() + 1e-9

    assert_as_alone([(make_task(metric=metric), plan_of("e4m3fn"), 0)], "cpu")


def test_what_shares_no_graph_comes_back_beside_what_does(caplog: pytest.LogCaptureFixture) -> None:
    bench = GraphBench(2)
    bench.add("alone", make_setting(make_task(), Plan.uniform(activation="int8/64@bf16"), device="cpu", mode="simulate"))
    bench.add("shared", make_setting(make_task(), plan_of("e4m3fn"), device="cpu", mode="simulate"))
    found = ended(bench)
    assert isinstance(found["alone"], LayoutMismatch) and found["shared"].status.value == "done"
    assert bench.begun == ["shared"]
    assert caplog.messages == [
        "Trials of task 'blobs' share no captured graph and run alone: formats with blocks or tables are fixed in a graph."
    ]


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:.*training stalls:UserWarning")  # e2m1 loses most gradients
def test_many_lanes_of_convolutions() -> None:
    from paredown.study.tasks.lookup import find_task

    task = find_task("digits#model=sumlast18,width=16,steps=20")
    cases = [(task, peppp_plan(low, (6, 9)), seed) for low in ((2, 1), (3, 2), (4, 3), (5, 2)) for seed in (0, 1)]
    assert_as_alone(cases, "cuda", mode="peppp", lanes=6)


def test_what_a_task_raises_is_its_own_and_others_go_on() -> None:
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.calls = nn.Linear(16, 4), 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += x.device.type == "cpu" and self.training
            if self.calls > 5:
                raise ValueError("enough")
            return self.inner(x)

    bench = GraphBench(2)
    for key, task in (("broken", make_task(lambda seed: Broken())), ("well", make_task())):
        bench.add(key, make_setting(task, plan_of("e4m3fn"), device="cpu", mode="simulate"))
    found = ended(bench)
    assert str(found["broken"]) == "enough" and found["well"].status.value == "done"


def test_a_run_that_cannot_begin_leaves_its_lane_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    bench, data = GraphBench(1), examples()
    broken = replace(examples(), x_test=data.x_test[:40], y_test=data.y_test[:40])
    plan = plan_of("e4m3fn")
    for key, task in (("first", make_task(data=data)), ("broken", make_task(data=broken)), ("last", make_task(data=data))):
        bench.add(key, make_setting(task, plan, device="cpu", mode="simulate"))
    real = type(broken).batches_ahead

    def batches_ahead(self: Any, *args: Any, **options: Any) -> Any:
        if self is broken:
            raise ValueError("no such file")
        return real(self, *args, **options)

    monkeypatch.setattr(type(broken), "batches_ahead", batches_ahead)
    found = ended(bench)
    assert [found[key].status.value for key in ("first", "last")] == ["done"] * 2 and str(found["broken"]) == "no such file"


def test_torchs_random_state_is_left_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    side_by_side([(make_task(), plan_of("e4m3fn"), 0)], "cpu", "simulate", 1)
    assert torch.equal(torch.rand(3), expected)
