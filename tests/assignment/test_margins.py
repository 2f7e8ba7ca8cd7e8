"""One definition of peak: budgets, percentages and errors of `assign` mean `footprint(trace, plan).peak_bytes`."""

import re
from functools import cache

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, max_pool3d

from paredown import Plan, Trace, assign, footprint, trace_step
from paredown.errors import BudgetError
from paredown.models.resnet import resnet18
from paredown.sizes import parse_bytes, say_bytes_above

PRESETS = ("activations8", "activations4", "lpmm")


def convolutions(num_in: int, num_out: int) -> nn.Sequential:
    layers = (
        layer
        for num in (num_in, num_out)
        for layer in (
            nn.Conv3d(num, num_out, 3, padding=1),
            nn.InstanceNorm3d(num_out, affine=True),
            nn.LeakyReLU(0.01, inplace=True),
        )
    )
    return nn.Sequential(*layers)


class VolumeNet(nn.Module):
    """A 3-D U-Net of two levels."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.first, self.low = convolutions(1, width), convolutions(width, 2 * width)
        self.up, self.last = nn.ConvTranspose3d(2 * width, width, 2, 2), convolutions(2 * width, width)
        self.head = nn.Conv3d(width, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.head(self.last(torch.cat([self.up(self.low(max_pool3d(x, 2))), x], 1)))


@cache
def traced(name: str) -> Trace:
    if name == "volume":
        model, size = VolumeNet(), (64, 64, 64)
        batch = torch.empty(2, 1, *size), torch.zeros(2, *size, dtype=torch.long)
    else:
        model, batch = resnet18(num_classes=10, width=16, small_input=True), (torch.empty(64, 3, 32, 32), torch.zeros(64).long())
    device = "cpu" if name == "resnet, cpu" else "cuda"
    return trace_step(model, batch, loss=cross_entropy, optimizer="adamw", device=device)


NETS = ("volume", "resnet", "resnet, cpu")


@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("preset", PRESETS)
def test_the_peak_of_a_preset_is_a_budget(name: str, preset: str) -> None:
    trace = traced(name)
    budget = footprint(trace, Plan.preset(preset)).peak_bytes
    for recompute in (None, False):
        assert footprint(trace, assign(trace, budget, recompute=recompute)).peak_bytes <= budget
    assert footprint(trace, assign(trace, budget, prefer="speed")).fits(budget)


@pytest.mark.parametrize("name", NETS)
def test_percentages_are_of_the_peak_of_the_baseline(name: str) -> None:
    trace = traced(name)
    whole = footprint(trace, Plan.uniform()).peak_bytes
    assert assign(trace, "100%").made_for["budget_bytes"] == whole and not assign(trace, "100%").rules
    assert footprint(trace, Plan.preset("activations8")).fits("100%").budget_bytes == whole
    plan = assign(trace, "70%")
    assert plan.made_for["budget_bytes"] == whole * 70 // 100 == footprint(trace, plan).fits("70%").budget_bytes
    assert footprint(trace, plan).fits("70%")


@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("recompute", [None, False])
def test_the_smallest_budget_of_an_error_is_accepted(name: str, recompute: bool | None) -> None:
    trace = traced(name)
    with pytest.raises(BudgetError) as caught:
        assign(trace, "3%", recompute=recompute)
    least = caught.value.smallest_bytes
    printed = re.search(r"the smallest needs ([0-9.]+ [A-Za-z]+)\.", str(caught.value))
    assert least is not None and printed is not None and least <= parse_bytes(printed[1]) < 1.01 * least
    for budget in (least, printed[1]):
        assert footprint(trace, assign(trace, budget, recompute=recompute)).peak_bytes <= parse_bytes(budget)
    assert any(footprint(trace, Plan.preset(preset)).peak_bytes >= least for preset in PRESETS)


def test_a_margin_is_at_most_an_eighth_of_the_budget() -> None:
    """Three operands of a 3-D convolution in float32 are a fourth of the baseline; two bits would be needed to keep so much free."""
    trace = traced("volume")
    base = footprint(trace)
    budget = base.peak_bytes * 6 // 10
    assert base.bound_bytes - base.peak_bytes > budget // 4
    planned = footprint(trace, assign(trace, budget, recompute=False))
    assert planned.peak_bytes <= budget - budget // 8 < planned.bound_bytes
    assert "MiB instead of" in planned.plan.reason.partition("margin of")[2] and "2/64" not in planned.plan.reason


def test_sizes_that_are_rounded_up() -> None:
    for count in (1, 1023, 1025, 2**20 - 1, 2**20 + 1, 5 * 2**30 + 12345, 10**12, 1_048_570):
        assert count <= parse_bytes(say_bytes_above(count)) <= 1.011 * count + 1
