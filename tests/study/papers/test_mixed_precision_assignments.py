"""The mixed-precision paper's accounting on its four networks, and its orders; the numbers are those of the authors' own code."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import cross_entropy

from paredown.errors import PlanError
from paredown.models.resnet import resnet18
from paredown.models.small_networks import MobileNet, ShuffleNet, SqueezeNet
from paredown.roles import Role
from paredown.simulate.outline import Outline, OutlineValue, outline
from paredown.study.papers.mixed_precision_assignments import (
    ALL_HIGH,
    ORDERS,
    amp,
    demote,
    groups_of,
    low_ratio,
    memory_factor,
    operator,
    tensors_of,
    total_bytes,
)

BATCH, SIDE = 128, 32


class Expected(NamedTuple):
    """A row of the table, batch 128: groups, MiB in fp32, share of parameters, share low of the operators' way, groups, largest group."""

    build: Callable[[], nn.Module]
    num_groups: int
    mib: float
    parameter_share: float
    operator_ratio: float
    num_half: int
    num_most: int
    largest: float


TABLE = {
    "SqueezeNet": Expected(SqueezeNet, 27, 1359.8, 0.0041, 0.173, 4, 15, 0.229),
    "ShuffleNet-v2": Expected(ShuffleNet, 58, 1987.2, 0.0049, 0.269, 13, 40, 0.088),
    "MobileNet-v2": Expected(MobileNet, 59, 5009.8, 0.0035, 0.328, 10, 35, 0.086),
    "ResNet-18": Expected(partial(resnet18, num_classes=10, small_input=True), 22, 2072.8, 0.0411, 0.279, 5, 15, 0.124),
}
# memory against fp32 by the ratio asked for, over the four networks; the ends of each range as they were printed
FACTORS = {
    0.0: (2.0, 2.0),
    0.1: (2.13, 2.26),
    0.3: (2.38, 2.47),
    0.5: (2.69, 2.72),
    0.7: (3.08, 3.18),
    0.9: (3.65, 3.68),
    1.0: (3.92, 3.99),
}


@cache
def outline_of(name: str) -> Outline:
    with torch.device("meta"):
        model = TABLE[name].build()
    batch = torch.empty(BATCH, 3, SIDE, SIDE, device="meta"), torch.empty(BATCH, dtype=torch.long, device="meta")
    return outline(model, batch, loss=cross_entropy)


@pytest.mark.parametrize("name", TABLE)
def test_the_table_of_the_paper(name: str) -> None:
    row, found = TABLE[name], outline_of(name)
    groups = groups_of(found)
    sizes = sorted((group.numel for group in groups), reverse=True)
    total = sum(sizes)
    sums = [sum(sizes[: count + 1]) for count in range(len(sizes))]
    parameters = sum(t.numel for t in tensors_of(found) if t.role in (Role.WEIGHT, Role.GRADIENT))
    assert len(groups) == row.num_groups
    assert total_bytes(found) / 2**20 == pytest.approx(row.mib, rel=1e-4)
    assert parameters / total == pytest.approx(row.parameter_share, abs=6e-5)
    assert low_ratio(found, operator(found)) == pytest.approx(row.operator_ratio, abs=6e-4)
    assert [1 + next(i for i, s in enumerate(sums) if s >= share * total) for share in (0.5, 0.9)] == [row.num_half, row.num_most]
    assert sizes[0] / total == pytest.approx(row.largest, abs=6e-4)


@pytest.mark.parametrize("ratio", FACTORS)
def test_memory_by_ratio(ratio: float) -> None:
    factors = [memory_factor(low_ratio(found, demote(found, ratio))) for found in map(outline_of, TABLE)]
    assert (min(factors), max(factors)) == pytest.approx(FACTORS[ratio], abs=6e-3)


def test_a_parameter_stays_high_backward_and_counts() -> None:
    found = outline_of("ResNet-18")
    low = demote(found, 1.0)
    assert not [name for role, name in low if role is Role.GRADIENT]
    assert low_ratio(found, low) == pytest.approx(0.979, abs=6e-4)
    assert low_ratio(found, ALL_HIGH) == 0


def test_groups_hold_what_a_product_made_and_the_weights_that_meet_it() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 2))
    groups = groups_of(outline(model, (torch.empty(5, 3, 2, 2),)))
    names = [[t.name for t in group.tensors if t.role in (Role.ACTIVATION, Role.WEIGHT)] for group in groups]
    assert names == [
        ["input1", "0.weight", "0.bias"],
        ["0:output", "1:output", "1.weight", "1.bias", "2:output", "4.weight", "4.bias"],
        ["4:output"],
    ]


def test_autocast_keeps_the_losses_high_and_the_rest_low() -> None:
    low = amp(outline_of("SqueezeNet"))
    names = {name for role, name in low if role is Role.ACTIVATION}
    assert "input1" not in names and "loss:log_softmax.output" not in names
    assert {"stem.0:output", "stem.1:output", "stem.2:output", "avgpool:output"} <= names
    assert (Role.WEIGHT, "stem.1.weight") not in low and (Role.WEIGHT, "stem.0.weight") in low


def test_demotion_takes_the_largest_groups_first() -> None:
    found = outline_of("ResNet-18")
    groups = sorted(groups_of(found), key=lambda group: -group.numel)
    for ratio, count in ((0.0, 0), (0.5, 5), (1.0, 22)):
        tensors = [tensor for group in groups[:count] for tensor in group.tensors]
        assert demote(found, ratio) == {tensor.key for tensor in tensors if tensor.role is not Role.GRADIENT}


@st.composite
def outlines(draw: st.DrawFn) -> Outline:
    """A chain of products and others, some with weights."""
    values, weights = [OutlineValue("input1", "input", draw(st.integers(1, 50)))], dict[str, int]()
    for number in range(draw(st.integers(1, 12))):
        op, size = draw(st.sampled_from(["conv", "relu", "add"])), draw(st.integers(1, 99))
        names = (f"w{number}",) if op == "conv" else ()
        weights |= dict.fromkeys(names, draw(st.integers(1, 99)))
        values.append(OutlineValue(f"v{number}:output", op, size, (draw(st.integers(0, number)),), names))
    return Outline(tuple(values), weights)


@settings(max_examples=200, deadline=None)
@given(outlines(), st.floats(0, 1), st.sampled_from(sorted(ORDERS)), st.integers(0, 5))
def test_demotion_reaches_its_ratio_with_whole_groups(found: Outline, ratio: float, order: str, seed: int) -> None:
    low, groups = demote(found, ratio, order=order, seed=seed), groups_of(found)
    total = sum(group.numel for group in groups)
    chosen = [g for g in groups if any(t.key in low for t in g.tensors)]
    assert low == {t.key for g in chosen for t in g.tensors if t.role is not Role.GRADIENT}
    most = low_ratio(found, demote(found, 1.0))
    assert low_ratio(found, low) >= min(ratio, most) - 1e-12
    sizes = [sum(t.numel for t in g.tensors if t.role is not Role.GRADIENT) for g in chosen]
    assert not chosen or (sum(sizes) - max(sizes)) / total < max(ratio, 1e-12) or order != "increasing"
    if order == "decreasing" and chosen:
        assert min(g.numel for g in chosen) >= max((g.numel for g in groups if g not in chosen), default=0)


def test_wrong_ratios_and_orders_are_refused() -> None:
    found = Outline((OutlineValue("input1", "input", 3),), {})
    for ratio, order in ((1.5, "decreasing"), (0.5, "sideways")):
        with pytest.raises(PlanError, match=r"ratio in 0\.\.1 and an order of decreasing"):
            demote(found, ratio, order=order)
