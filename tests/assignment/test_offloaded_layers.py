"""`assign` with a budget of host memory: both budgets are kept, time and error decide, and nothing is offloaded without one."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from paredown import trace_step
from paredown.assignment.assign import assign
from paredown.assignment.checkpointed_layers import added_seconds
from paredown.errors import BudgetError, PlanError
from paredown.plan.byte_intervals import pinned_bytes
from paredown.plan.calibration import COPY_BYTES_PER_SECOND, REFERENCE, TO_DEVICE, TO_HOST, Calibration
from paredown.plan.footprint import footprint
from paredown.plan.plan import Plan
from paredown.plan.planned_step import planned_step
from paredown.plan.step_time import offload_wait
from paredown.plan.trace import Trace

WIDTH, TOKENS, LAYERS = 256, 8192, 6


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.act, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 1024), nn.GELU(), nn.Linear(1024, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.act(self.up(self.norm(x))))


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList(Layer() for _ in range(LAYERS)), nn.Linear(WIDTH, 10)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x).square().mean()


@pytest.fixture(scope="module")
def trace() -> Trace:
    return trace_step(Network(), (torch.empty(TOKENS, WIDTH),), device="cuda")


def with_copies(bytes_per_second: float) -> Calibration:
    rates = {**REFERENCE.bytes_per_second, TO_HOST: bytes_per_second, TO_DEVICE: bytes_per_second}
    return replace(REFERENCE, bytes_per_second=rates)


FAST, SLOW = with_copies(1e12), with_copies(1e6)


@pytest.mark.parametrize("share", ["60%", "45%", "35%"])
def test_both_budgets_are_kept_and_the_error_is_no_larger(trace: Trace, share: str) -> None:
    alone, both = (
        assign(trace, share, recompute=False, host_budget=host, calibration=FAST if host else None) for host in (None, "1GiB")
    )
    assert not alone.offload and "host memory" not in alone.reason
    foot, before = footprint(trace, both), footprint(trace, alone)
    assert foot.fits(share) and 0 < foot.host_bytes < 1 << 30
    assert both.offload and f"Packed activations of {len(both.offload)} layers are in host memory" in both.reason
    assert foot.peak_bytes <= before.peak_bytes or added_seconds(trace, both, FAST) < added_seconds(trace, alone, FAST)


def test_a_smaller_peak_than_without(trace: Trace) -> None:
    """Where 8 bits alone do not fit, layers in host memory do, at the error of 8 bits."""
    eight_bits = Plan.uniform(activation="int8/64@bf16")
    least = footprint(trace, eight_bits.offloading("*")).peak_bytes
    budget = (least + footprint(trace, eight_bits).peak_bytes) // 2
    alone, both = (assign(trace, budget, recompute=False, host_budget=host) for host in (None, "1GiB"))
    formats = [{str(a.format) for _, a in plan.rules if a.format is not None} for plan in (alone, both)]
    assert "int4/64@bf16" in formats[0] and "int4/64@bf16" not in formats[1]
    assert footprint(trace, both).peak_bytes <= budget


def test_slow_copies_are_not_chosen(trace: Trace) -> None:
    for share in ("60%", "35%"):
        plan = assign(trace, share, host_budget="1GiB", calibration=SLOW)
        assert not plan.offload and plan == assign(trace, share)


def test_the_host_budget_is_kept(trace: Trace) -> None:
    whole = footprint(trace, assign(trace, "35%", recompute=False, host_budget="1GiB", calibration=FAST)).host_bytes
    for host_budget in (whole // 2, whole // 4, 1 << 20):
        plan = assign(trace, "35%", recompute=False, host_budget=host_budget, calibration=FAST)
        assert footprint(trace, plan).host_bytes <= host_budget and footprint(trace, plan).fits("35%")


def test_a_host_budget_that_is_too_small(trace: Trace) -> None:
    eight_bits = Plan.uniform(activation="uint2/64@bf16+bf16")
    least = footprint(trace, eight_bits).peak_bytes
    for budget, pattern in (
        (least - (2 << 20), "a plan that fits needs .* of it, and host_budget is 1.00 MiB: raise it"),
        ("1%", "tried too"),
    ):
        with pytest.raises(BudgetError, match=pattern) as found:
            assign(trace, budget, recompute=False, host_budget="1MiB")
        assert found.value.smallest_bytes is not None


def test_copies_that_take_longer_than_a_step(trace: Trace) -> None:
    budget = footprint(trace, Plan.uniform(activation="uint2/64@bf16+bf16")).peak_bytes - (2 << 20)
    assert assign(trace, budget, recompute=False, host_budget="1GiB", calibration=FAST).offload
    with pytest.raises(BudgetError, match=r"a step would wait .* s for copies .*longer than it takes without a plan"):
        assign(trace, budget, recompute=False, host_budget="1GiB", calibration=SLOW)


def test_arguments(trace: Trace) -> None:
    on_cpu = trace_step(Network(), (torch.empty(64, WIDTH),), device="cpu")
    with pytest.raises(PlanError, match="host_budget is for eager steps on a GPU: on a CPU all memory is the host's"):
        assign(on_cpu, "50%", host_budget="1GiB")
    with pytest.raises(PlanError, match="host_budget is not combined with levels"):
        assign(trace, "50%", host_budget="1GiB", levels=("int8/64@bf16",))
    with pytest.raises(PlanError, match="with prefer='speed' or a host_budget only"):
        assign(trace, "50%", calibration=FAST)
    for prefer in ("speed", "accuracy"):
        plan = assign(trace, "35%", prefer=prefer, host_budget="1GiB", calibration=FAST)
        assert footprint(trace, plan).fits("35%") and footprint(trace, plan).host_bytes <= 1 << 30


def test_waits_are_what_copies_take_longer_than_the_next_layer(trace: Trace) -> None:
    plan = Plan.uniform(activation="int8/64@bf16").offloading("layers.*")
    step = planned_step(trace, plan)

    def seconds(path: str, phase: str) -> float:
        inside = [one for one in trace.operations if f"{one.module}.".startswith(f"{path}.") and one.phase == phase]
        return sum(one.count * REFERENCE.operation_seconds(one) for one in inside)

    following = [*(f"layers.{number}" for number in range(1, LAYERS)), "head"]
    eight_bits = Plan.uniform(activation="int8/64@bf16")
    moved = [footprint(trace, eight_bits.offloading(f"layers.{number}.*")).host_bytes for number in range(LAYERS)]
    assert sum(moved) == footprint(trace, plan).host_bytes
    pairs = [(one, seconds(path, phase)) for one, path in zip(moved, following, strict=True) for phase in ("forward", "backward")]
    rates = sorted(one / hiding for one, hiding in pairs)  # of the slowest copies that wait for nothing
    assert offload_wait(step, plan, with_copies(rates[-1] * 1.01)) == 0
    for rate in (rates[len(rates) // 2], rates[0] / 3):
        expected = sum(max(0.0, one / rate - hiding) for one, hiding in pairs)
        assert offload_wait(step, plan, with_copies(rate)) == pytest.approx(expected) and expected > 0
    assert offload_wait(planned_step(trace, Plan()), Plan(), REFERENCE) == 0


def test_calibrations_without_copies_use_a_default() -> None:
    old = dict(FAST.to_json())
    old["bytes_per_second"] = dict(REFERENCE.bytes_per_second)
    read = Calibration.from_json(old)
    assert read.copy_rate(TO_HOST) == read.copy_rate(TO_DEVICE) == COPY_BYTES_PER_SECOND
    assert read.say_copies() == "25 GB/s to host memory and 25 GB/s from host memory, assumed since the calibration has no copies"
    again = Calibration.from_json(FAST.to_json())
    assert again.copy_rate(TO_HOST) == 1e12 and again.say_copies() == "1e+03 GB/s to host memory and 1e+03 GB/s from host memory"
    assert "GB/s to host memory" in str(again) and "host memory" not in str(replace(again, device="cpu"))


@pytest.mark.parametrize("nbytes", [1, 3000, 1 << 20, (1 << 20) + 1, 33 << 20, 99 << 20, 12345678])
def test_pinned_memory_is_at_most_1_mib_larger(nbytes: int) -> None:
    assert nbytes <= pinned_bytes(nbytes) < nbytes + (1 << 20)
