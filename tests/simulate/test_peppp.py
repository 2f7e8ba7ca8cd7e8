"""PEPPP's memory of its network equals that of its released matrix, and its floats equal QPyTorch's."""

from __future__ import annotations

import pytest
import torch

from paredown import Format, round_trip
from paredown.models.resnet import SumLastResNet
from paredown.simulate.outline import Outline, outline
from paredown.simulate.peppp import memory_bytes, num_outputs, peppp_element, peppp_plan

BATCH = 32


def outline_of(side: int, num_classes: int = 10) -> Outline:
    with torch.device("meta"):
        model = SumLastResNet(num_classes=num_classes)
    return outline(model, (torch.empty(BATCH, 3, side, side, device="meta"),))


def test_outputs_and_memory_are_the_published_ones() -> None:
    """T of pictures of 32 and 64, and the first configuration of CIFAR-10: low 5 bits, high 14."""
    assert num_outputs(outline_of(32)) == 114_410_432
    assert num_outputs(outline_of(64)) == 457_589_696
    assert memory_bytes(outline_of(32), peppp_element(3, 1), peppp_element(6, 7)) / 2**20 == pytest.approx(180.5099, abs=5e-5)


def test_each_bit_of_the_low_format_weighs_ten_of_the_high() -> None:
    found = outline_of(32)
    base, low, high = (memory_bytes(found, *texts) / 2**20 for texts in (("e4m3", "e6m9"), ("e4m4", "e6m9"), ("e4m3", "e6m10")))
    assert low - base == pytest.approx(28.6095, abs=5e-5)
    assert high - base == pytest.approx(2.676, abs=5e-4)


@pytest.mark.parametrize(
    ("exponent_bits", "smallest", "binade"), [(3, 2.0**-3, 3), (4, 2.0**-7, 7), (5, 2.0**-15, 15), (6, 2.0**-31, 31)]
)
def test_its_floats_have_no_subnormals_and_saturate(exponent_bits: int, smallest: float, binade: int) -> None:
    element = Format.parse(peppp_element(exponent_bits, 2)).element
    assert element.smallest == smallest and element.max_value == 2.0**binade * 1.75
    tiny = round_trip(torch.full((4000,), 0.3 * smallest), str(element), rounding="stochastic", overflow="saturate", seed=1)
    assert set(tiny.tolist()) == {0.0, smallest}
    assert tiny.mean().item() == pytest.approx(0.3 * smallest, rel=0.15), "on average it is right: 6 deviations are 14 %"


def test_the_plan_says_what_it_is() -> None:
    assert peppp_plan((4, 3), (6, 9)).reason == "PEPPP: low e4m3b8fns, high e6m9b32fns"
