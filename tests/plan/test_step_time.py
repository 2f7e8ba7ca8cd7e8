"""Predicted step time against sums made by hand, from a calibration of round numbers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from paredown import Plan, Trace, footprint, trace_step
from paredown.errors import CalibrationError
from paredown.plan.calibration import HostCost
from paredown.plan.checkpointed_trace import checkpointed_trace
from paredown.plan.step_time import StepTime, predict_step
from paredown.plan.trace import VIEW, Operation
from paredown.roles import Role
from tests.support.calibrations import calibration

INT8 = Plan.uniform(activation="int8/64@bf16")
NUM, WIDTH = 64, 128


class Block(nn.Module):
    """A product and an activation function."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The result."""
        return torch.nn.functional.gelu(self.linear(x))


def network() -> nn.Sequential:
    """Three blocks."""
    return nn.Sequential(*(Block() for _ in range(3)))


def traced(device: str = "cuda", optimizer: str | None = None) -> Trace:
    """The step of three blocks in float32."""
    batch = torch.empty(NUM, WIDTH), torch.empty(NUM, WIDTH)
    return trace_step(network(), batch, loss=mse_loss, device=device, optimizer=optimizer)


def test_flops_of_a_trace_are_those_of_a_real_step() -> None:
    model, x = network(), torch.randn(NUM, WIDTH)
    with FlopCounterMode(display=False) as counter:
        mse_loss(model(x), x).backward()
    assert sum(one.count * one.flops for one in traced("cpu").operations) == counter.get_total_flops()


def test_views_of_a_trace_are_those_of_a_real_forward_pass() -> None:
    class Views(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            is_view = func.is_view or func is torch.ops.aten._unsafe_view.default  # of a copy
            self.count += is_view and func is not torch.ops.aten.detach.default
            return func(*args, **(kwargs or {}))

    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x).view(NUM, 4, -1).transpose(0, 1).flatten(1).chunk(2, -1)[0].sum(0)

    x = torch.randn(NUM, WIDTH)
    with Views() as views:
        result = Heads()(x)
    trace = trace_step(Heads(), (x, torch.empty_like(result)), loss=mse_loss, device="cpu")
    counted = {one.module: one.count for one in trace.operations if one.op == VIEW and one.phase == "forward"}
    assert sum(counted.values()) == views.count > 3 and counted["linear"] == 1, "the transposed weight"


def test_attention_of_a_gpu_is_counted() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.scaled_dot_product_attention(x * self.scale, x, x, is_causal=True)

    x = torch.empty(2, 4, 256, 32, dtype=torch.bfloat16)
    trace = trace_step(Attention().bfloat16(), (x, x), loss=mse_loss, device="cuda")
    flops = {one.op: one.flops for one in trace.operations if "attention" in one.op}
    products = 2 * 2 * 2 * 4 * 256 * 256 * 32 // 2  # two products, half of them under a causal mask
    assert flops == {"attention": products, "attention_backward": products * 5 // 2}


def test_device_and_host_of_the_baseline() -> None:
    trace = traced()
    time = predict_step(trace, calibration=calibration())
    kernels = [one for one in trace.operations if one.op != VIEW]
    assert time.host_seconds == pytest.approx(sum(one.count for one in kernels) * 1e-3)
    assert time.device_seconds == pytest.approx(sum(one.count * max(one.flops, one.nbytes, 1) / 1e9 for one in kernels))
    gelu = next(one for one in trace.operations if one.op == "aten.gelu.default")
    assert gelu.nbytes == 2 * NUM * WIDTH * 4 and gelu.phase == "forward"


def test_the_limit_is_the_slower_of_device_and_host() -> None:
    trace, slow = traced(), calibration()
    quick = replace(slow, host=HostCost(*[1e-9] * 11))
    assert predict_step(trace, calibration=slow).limit == "host"
    time = predict_step(trace, calibration=quick)
    assert time.limit == "device" and time.seconds == time.device_seconds
    assert StepTime(2.0, 3.0, is_cpu=True).seconds == 5.0
    assert StepTime(2.0, 0.0).seconds == 2.0 and StepTime(0.0, 0.0).seconds == 0.0
    assert StepTime(2.0, 2.0).seconds == pytest.approx(2 * 2 ** (1 / 6)) and StepTime(2.0, 4.0).seconds == pytest.approx(
        4.0, rel=0.003
    )


def test_each_packed_tensor_adds_its_bytes_and_its_host_time() -> None:
    trace, costs = traced(), calibration(packed=0.5)
    before, after = (predict_step(trace, plan, calibration=costs) for plan in (None, INT8))
    large = [slot for slot in trace.activations if not slot.stays]
    assert after.host_seconds - before.host_seconds == pytest.approx(0.5 * len(large))
    assert [bool(slot.recomputed_from) for slot in large].count(True) == 2 and len(large) == 5, "two outputs of gelu are recomputed"
    assert after.device_seconds - before.device_seconds == pytest.approx(8 * NUM * WIDTH * 4 / 1e9), "three twice, two once"


def test_a_checkpointed_layer_adds_its_forward_pass() -> None:
    trace, costs = traced(), calibration()
    before, after = (predict_step(trace, plan, calibration=costs) for plan in (None, Plan((), recompute=("1",))))
    again = [one for one in trace.operations if one.phase == "forward" and one.module.startswith("1")]
    assert {one.op for one in again} == {"aten.addmm.default", "aten.gelu.default", VIEW}
    assert after.host_seconds - before.host_seconds == pytest.approx(2 * 1e-3 + 3 * 0.1), (
        "two kernels, two saved tensors and the weight"
    )
    gelu, product = 2 * NUM * WIDTH * 4, 2 * NUM * WIDTH * WIDTH
    assert after.device_seconds - before.device_seconds == pytest.approx((gelu + product) / 1e9)


def test_views_module_calls_and_gradients_take_host_time_alone() -> None:
    trace, costs = traced(), calibration()
    costly = replace(costs, host=replace(costs.host, view=7.0, backward_view=11.0, module_call=0.25, gradient=1000.0))
    views = {is_backward: 0 for is_backward in (False, True)}
    for one in trace.operations:
        views[one.phase == "backward"] += one.count * (one.op == VIEW)
    before, after = (predict_step(trace, calibration=one) for one in (costs, costly))
    assert after.device_seconds == before.device_seconds and all(views.values())
    expected = 7.0 * views[False] + 11.0 * views[True] + 0.25 * 6 + 1000.0 * len(trace.of(Role.WEIGHT))
    assert after.host_seconds - before.host_seconds == pytest.approx(expected), "three blocks, three products"


def test_host_time_of_an_operation_is_that_of_its_name() -> None:
    trace, costs = traced(), calibration()
    num = sum(one.count for one in trace.operations if one.op == "aten.gelu.default")
    before, after = (predict_step(trace, calibration=one) for one in (costs, replace(costs, issued={"aten.gelu.default": 0.5})))
    assert num == 3 and after.host_seconds - before.host_seconds == pytest.approx(num * (0.5 - 1e-3))


def test_a_session_that_packs_one_tensor_looks_at_all() -> None:
    """Six modules and six saved tensors; the modules of a checkpointed layer are passed over."""
    trace, costs = traced(), calibration(packed=1e-9)
    watching = replace(costs, host=replace(costs.host, watched=1.0))
    one = Plan((("activation=0:gelu.input", INT8.rules[0][1]),))

    def watched(plan: Plan | None) -> float:
        return (
            predict_step(trace, plan, calibration=watching).host_seconds - predict_step(trace, plan, calibration=costs).host_seconds
        )

    assert watched(None) == 0.0 and watched(Plan((), recompute=("1",))) == 0.0, "nothing is packed"
    assert watched(one) == pytest.approx(6 + 6) == watched(INT8)
    in_layer = checkpointed_trace(trace, ("1",)).activations
    assert watched(replace(one, recompute=("1",))) == pytest.approx(4 + sum(len(slot.names) for slot in in_layer))


def test_all_host_times_follow_the_speed_of_the_host() -> None:
    trace, costs = traced(optimizer="adamw"), calibration(issued={"aten.gelu.default": 0.5})
    for plan in (None, INT8, Plan((), recompute=("1",)), Plan.uniform(weight="int8/64@bf16")):
        slow, before = (predict_step(trace, plan, calibration=one) for one in (costs.with_host_speed(3.0), costs))
        assert slow.host_seconds == pytest.approx(3 * before.host_seconds) and slow.device_seconds == before.device_seconds


def test_the_optimizer_moves_weights_gradients_and_moments() -> None:
    costs = calibration()
    without, adamw = (predict_step(traced(optimizer=name), calibration=costs) for name in (None, "adamw"))
    values = 3 * (WIDTH * WIDTH + WIDTH)
    assert adamw.device_seconds - without.device_seconds == pytest.approx(4 * values * 7 / 1e9), "3 read and written, 1 read"
    assert adamw.host_seconds - without.host_seconds == pytest.approx(6 * 1e-3)


def test_what_cannot_be_predicted_says_so() -> None:
    with pytest.raises(CalibrationError, match="no operations"):
        predict_step(replace(traced(), operations=()), calibration=calibration())
    with pytest.raises(CalibrationError, match=r"under torch\.compile are not predicted"):
        predict_step(replace(traced(), is_compiled=True), calibration=calibration())
    with pytest.raises(CalibrationError, match="a step on cuda, the calibration of"):
        predict_step(traced(), calibration=calibration("cpu"))


@contextmanager
def cached(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Iterator[None]:
    """A cache folder with a calibration of a GPU that is not here."""
    monkeypatch.setenv("PAREDOWN_CACHE", str(folder))
    calibration("cuda").save()
    yield


@pytest.mark.skipif(torch.cuda.is_available(), reason="the calibration is of another GPU")
def test_a_footprint_prints_step_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    trace = traced()
    with cached(monkeypatch, tmp_path):
        foot = footprint(trace, INT8)
        time = predict_step(trace, INT8, calibration=calibration("cuda"))
        assert foot.step_time == time and f"step time: {time!r}" in repr(foot) and "limited by the host" in repr(foot)


def test_operations_are_part_of_the_json() -> None:
    trace = traced()
    assert Trace.from_json(trace.to_json()).operations == trace.operations
    assert all(isinstance(one, Operation) and one.count for one in trace.operations)
    old = {name: part for name, part in trace.to_json().items() if name != "operations"}
    assert Trace.from_json(old).operations == ()
