"""`assign(prefer=...)`: within budget and error, and never predicted slower than checkpointing every layer or every second one."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from importlib import import_module
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest
import torch

from paredown import Plan, Trace, assign, footprint, trace_step
from paredown.assignment.checkpointed_layers import repeated_layers
from paredown.assignment.speed import NOISE, Candidate, quickest_plan
from paredown.errors import BudgetError, PlanError
from paredown.models import MODELS
from paredown.plan.byte_intervals import slot_storages
from paredown.plan.calibration import REFERENCE, Calibration, HostCost
from paredown.plan.step_time import StepTime, predict_step
from paredown.sizes import say_bytes
from tests.support.calibrations import calibration

DEVICE = replace(
    REFERENCE, host=HostCost(*[1e-9] * 11), formats={t: replace(c, host_seconds=1e-9) for t, c in REFERENCE.formats.items()}
)
HOST = replace(
    REFERENCE, kernel_seconds=1e-12, bytes_per_second={"elementwise": 1e18}, flops_per_second={"matmul float32": ((1.0, 1e21),)}
)
LIMITS = pytest.mark.parametrize("costs", [REFERENCE, DEVICE, HOST], ids=["H200", "device", "host"])


@cache
def traced() -> Trace:
    """A small transformer, as it would run on a GPU."""
    model = MODELS["gpt"](vocabulary=64, dim=64, num_layers=4, num_heads=2, context=64)
    ids = torch.zeros(1024, 64, dtype=torch.long)
    return trace_step(model, {"ids": ids, "targets": ids}, device="cuda", autocast=torch.bfloat16, optimizer="adamw")


def error_of(plan: Plan) -> float:
    """The predicted error that the reason of a plan states."""
    return float(plan.reason.partition("predicted squared gradient error ")[2].partition(". ")[0].rstrip("."))


def seconds(plan: Plan, costs: Calibration) -> float:
    return predict_step(traced(), plan, calibration=costs).seconds


def checkpointed() -> dict[str, Plan]:
    """Every layer checkpointed, and every second one."""
    layers = repeated_layers(traced())
    return {"every": Plan((), recompute=tuple(layers)), "second": Plan((), recompute=tuple(sorted(layers)[::2]))}


@LIMITS
@pytest.mark.parametrize("where", ["every", "second", "80%", "60%", "50%"])
def test_a_plan_is_never_predicted_slower_than_checkpointing(where: str, costs: Calibration) -> None:
    """At the expected peaks of checkpointing, and at shares of the baseline; within the noise of measured times."""
    trace, plans = traced(), checkpointed()
    budget = footprint(trace, plans[where]).peak_bytes if where in plans else footprint(trace).peak_bytes * int(where[:-1]) // 100
    plan = assign(trace, budget, prefer="speed", calibration=costs)
    accurate = assign(trace, budget, prefer="accuracy")
    assert error_of(plan) <= 1.12 * error_of(accurate), "two digits are printed"
    assert footprint(trace, plan).bound_bytes <= budget or set(plan.recompute) in [set(other.recompute) for other in plans.values()]
    assert footprint(trace, plan).peak_bytes <= budget
    for other in plans.values():
        if footprint(trace, other).peak_bytes <= budget:
            assert seconds(plan, costs) <= (1 + NOISE) * seconds(other, costs)
    assert seconds(plan, costs) <= (1 + NOISE) * seconds(accurate, costs)
    assert "Predicted step" in plan.reason and "by the calibration of " in plan.reason


def test_checkpointing_is_taken_at_its_own_peak_where_nothing_else_is_as_quick() -> None:
    """Packing a tensor takes 1 s. One byte less, and another plan has to be found; a margin of 8 MiB, and it is kept."""
    trace, every = traced(), checkpointed()["every"]
    dear = replace(HOST, formats={text: replace(cost, host_seconds=1.0) for text, cost in HOST.formats.items()})
    foot = footprint(trace, every)
    tight = assign(trace, foot.peak_bytes, prefer="speed", calibration=dear)
    assert not tight.rules and set(tight.recompute) == set(every.recompute)
    assert f"(with a margin of 0 B instead of {say_bytes(foot.bound_bytes - foot.peak_bytes)} for the allocator" in tight.reason
    less = assign(trace, foot.peak_bytes - 1, prefer="speed", calibration=dear)
    assert less.rules and footprint(trace, less).bound_bytes < foot.peak_bytes
    assert "instead of" not in assign(trace, foot.bound_bytes, prefer="speed", calibration=dear).reason.partition("margin")[2]
    assert "with a margin of 0 B" not in assign(trace, foot.peak_bytes).reason, "only a preference for speed has less margin"


def test_checkpointing_is_taken_where_no_plan_with_a_margin_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    trace, every = traced(), checkpointed()["every"]
    monkeypatch.setattr(import_module("paredown.assignment.assign"), "_solve", Mock(side_effect=BudgetError("nothing fits")))
    monkeypatch.setattr(import_module("paredown.assignment.speed"), "packed_solutions", Mock(return_value=[]))
    budget = footprint(trace, every).peak_bytes
    assert set(assign(trace, budget, prefer="speed", calibration=REFERENCE).recompute) == set(every.recompute)
    for other in ({"prefer": "accuracy"}, {"prefer": "speed", "recompute": False}):
        with pytest.raises(BudgetError, match="nothing fits"):
            assign(trace, budget, **other)  # pyright: ignore[reportArgumentType]
    with pytest.raises(BudgetError, match="nothing fits"):
        assign(trace, budget - 1, prefer="speed", calibration=REFERENCE)


def test_a_smaller_margin_or_a_larger_error_needs_a_gain_beyond_noise() -> None:
    def candidate(seconds: float, error: float, *, keeps_margin: bool = True) -> Candidate:
        point: Any = SimpleNamespace(error=error)
        return Candidate((cast(Any, None), point, ()), Plan(), StepTime(seconds, 0.0), keeps_margin)

    quick, exact = candidate(1.0, 0.5), candidate(1.01, 0.0)
    assert quickest_plan([quick, exact]) is exact and quickest_plan([quick, candidate(1.03, 0.0)]) is quick
    near, far = candidate(0.995, 0.0, keeps_margin=False), candidate(0.9, 0.0, keeps_margin=False)
    assert quickest_plan([quick, near]) is quick and quickest_plan([near, quick, far]) is far and quickest_plan([near]) is near


def test_the_limit_decides_what_is_taken() -> None:
    """A slow host takes few tensors, or layers where packing a tensor takes longer than a layer."""
    trace = traced()
    budget = footprint(trace).peak_bytes * 75 // 100
    dear = replace(HOST, formats={text: replace(cost, host_seconds=1.0) for text, cost in HOST.formats.items()})
    plan = assign(trace, budget, prefer="speed", calibration=dear)
    assert plan.recompute and not any(one.packs for one in slot_storages(trace, plan).values()), "a packed tensor takes 1 s"
    cheap = replace(DEVICE, bytes_per_second={"elementwise": 1e6}, flops_per_second={"matmul bfloat16": ((1.0, 1e6),)})
    plan = assign(trace, budget, prefer="speed", calibration=cheap)
    assert not plan.recompute, "operations are slow, and packing is not"


def test_an_allowance_of_none_is_exact() -> None:
    trace = traced()
    layers = repeated_layers(trace)
    budget = footprint(trace, Plan((), recompute=tuple(layers))).peak_bytes
    plan = assign(trace, budget, prefer="speed", error_allowance=0.0, calibration=REFERENCE)
    assert set(plan.recompute) == set(layers) and error_of(plan) == 0
    wide = assign(trace, budget, prefer="speed", error_allowance=100.0, calibration=DEVICE)
    assert seconds(wide, DEVICE) <= (1 + NOISE) * seconds(plan, DEVICE)


def test_an_allowance_that_no_plan_keeps_is_an_error() -> None:
    trace = traced()
    budget = footprint(trace, Plan((), recompute=tuple(repeated_layers(trace)))).peak_bytes * 9 // 10
    with pytest.raises(
        BudgetError, match=r"no plan within .* squared gradient error is at most 0; the least found is .* Raise error_allow"
    ):
        assign(trace, budget, prefer="speed", error_allowance=0.0, calibration=REFERENCE)


def test_layers_are_mixed_with_formats_where_layers_alone_do_not_fit() -> None:
    trace = traced()
    budget = footprint(trace, Plan((), recompute=tuple(repeated_layers(trace)))).bound_bytes - 1
    plan = assign(trace, budget, prefer="speed", calibration=REFERENCE)
    formats_alone = assign(trace, budget, prefer="speed", calibration=REFERENCE, recompute=False)
    assert not formats_alone.recompute and seconds(plan, REFERENCE) <= (1 + NOISE) * seconds(formats_alone, REFERENCE)


def test_without_a_calibration_the_reason_says_so() -> None:
    plan = assign(traced(), "75%", prefer="speed")
    assert (
        "by the costs of one H200, not of this device: nothing is measured for device 'cuda'. Run `paredown calibrate`"
        in plan.reason
    )


def test_accuracy_checkpoints_only_where_formats_do_not_fit() -> None:
    plan = assign(traced(), "75%", prefer="accuracy")
    assert not plan.recompute and error_of(plan) > 0
    assert plan.rules == assign(traced(), "75%", recompute=False).rules


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"prefer": "memory"}, "Allowed: 'speed', 'accuracy'"),
        ({"prefer": "accuracy", "error_allowance": 1.0}, "used with prefer='speed' only"),
        ({"prefer": "speed", "error_allowance": -1.0}, "from 0 up"),
        ({"prefer": "speed", "error_allowance": "much"}, "from 0 up"),
        ({"calibration": calibration()}, "used with prefer='speed' or a host_budget only"),
        ({"prefer": "speed", "levels": [None, "bf16"]}, "not combined with levels"),
        ({"prefer": "speed", "method": "random"}, "methods that are there for comparison"),
        ({"prefer": "speed", "calibration": {}}, "the result of paredown.calibrate"),
    ],
)
def test_wrong_arguments(arguments: dict[str, object], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        assign(traced(), "75%", **arguments)  # pyright: ignore[reportArgumentType]
