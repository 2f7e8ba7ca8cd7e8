"""Footprints of one process among several: bytes by hand. tests/session/test_sharded.py compares them with four processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from paredown.errors import PlanError
from paredown.plan.distribution import distributed_intervals, distribution_of
from paredown.plan.footprint import footprint
from paredown.plan.plan import Plan
from paredown.plan.trace import Trace
from paredown.predict.trace_step import trace_step
from paredown.roles import Role

WORLD, WIDTH, ODD = 4, 64, 130  # ODD rows: shards of 33, 33, 33 and 31
LPMM = Plan.preset("lpmm")  # weights int8/64@e8m0, gradients and first moments int8/64@bf16, second moments uint8/64@bf16


class Blocks(nn.Module):
    """Two blocks of one matrix each, and a matrix of the model itself; no biases."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)])
        self.head = nn.Linear(WIDTH, ODD, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@pytest.fixture(scope="module")
def trace() -> Trace:
    return trace_step(Blocks(), (torch.ones(2, WIDTH), torch.ones(2, ODD)), loss=mse_loss, optimizer="adamw", device="cpu")


def stored(trace: Trace, plan: Plan | None, **options: Any) -> dict[Role, int]:
    foot = footprint(trace, plan, world_size=WORLD, **options)
    return {role: foot.by_role[role] for role in (Role.WEIGHT, Role.GRADIENT, Role.MOMENT1, Role.MOMENT2)}


def test_fully_shard_stores_the_rows_of_the_largest_shard(trace: Trace) -> None:
    rows = 2 * WIDTH // WORLD + 33
    assert stored(trace, None, strategy="fsdp2") == dict.fromkeys(
        (Role.WEIGHT, Role.GRADIENT, Role.MOMENT1, Role.MOMENT2), rows * WIDTH * 4
    )
    packed = {Role.WEIGHT: rows * (WIDTH + 1), **dict.fromkeys((Role.GRADIENT, Role.MOMENT1, Role.MOMENT2), rows * (WIDTH + 2))}
    assert stored(trace, LPMM, strategy="fsdp2") == packed


def test_padding_is_listed_apart(trace: Trace) -> None:
    foot, alone = footprint(trace, LPMM, world_size=WORLD, strategy="fsdp2"), footprint(trace, LPMM)
    row_bytes = (WIDTH + 1) + 3 * (WIDTH + 2)
    assert foot.padding_bytes == (33 * WORLD - ODD) * row_bytes // WORLD + 1  # 2 rows in 4 processes; rounded up
    assert foot.model_bytes - foot.padding_bytes == alone.model_bytes // WORLD
    assert alone.padding_bytes == alone.wide_bytes == foot.wide_bytes == 0 and "padding, part of what is stored" in repr(foot)


def test_weights_that_stay_plain_are_listed_apart(trace: Trace) -> None:
    """A shard does not know the scale of the whole tensor: 2 * 64 + 130 rows of 64 values, in 4 bits and a byte for each 16 alone."""
    plan = Plan.uniform(weight="e2m1fn/16@e4m3fn")
    foot, alone = footprint(trace, plan, world_size=WORLD, strategy="fsdp2"), footprint(trace, plan)
    numel, scales = (2 * WIDTH + ODD) * WIDTH, 3 * 4  # one float32 for each weight
    assert foot.wide_bytes == (4 * numel - numel // 2 - numel // 16 - scales) // WORLD
    assert foot.model_bytes - foot.padding_bytes - foot.wide_bytes == -(-alone.model_bytes // WORLD)
    assert "weights that stay plain, part of what is stored" in repr(foot)


def test_fully_shard_sends_codes(trace: Trace) -> None:
    blocks, head = 2 * WIDTH // WORLD, 33
    for plan, row_bytes in ((None, WIDTH * 4), (LPMM, WIDTH + 1)):
        sent = footprint(trace, plan, world_size=WORLD, strategy="fsdp2").communication
        assert sent.all_gather == 3 * (2 * blocks + head) * row_bytes, "blocks in forward and backward, the head once"
        assert sent.reduce_scatter == 3 * (blocks + head) * WIDTH * 4
        assert sent.all_reduce == 0 and sent.total == sent.all_gather + sent.reduce_scatter
    whole = footprint(trace, LPMM, world_size=WORLD, strategy="fsdp2", units=()).communication
    assert whole.all_gather == 3 * (blocks + head) * (WIDTH + 1)


def test_units_bound_what_is_whole_at_a_time(trace: Trace) -> None:
    by_block = footprint(trace, LPMM, world_size=WORLD, strategy="fsdp2", units=["blocks.*"])
    assert by_block.peak_bytes < footprint(trace, LPMM, world_size=WORLD, strategy="fsdp2", units=()).peak_bytes
    assert by_block == footprint(trace, LPMM, world_size=WORLD, strategy="fsdp2")
    assert by_block.low_bytes < by_block.peak_bytes < by_block.high_bytes
    assert by_block.baseline.distribution == by_block.distribution and by_block.baseline.model_bytes > 3 * by_block.model_bytes


def test_ddp_counts_buckets_and_plain_gradients(trace: Trace) -> None:
    numel = (2 * WIDTH + ODD) * WIDTH
    foot, alone = footprint(trace, LPMM, world_size=WORLD, strategy="ddp"), footprint(trace, LPMM)
    assert foot.by_role[Role.GRADIENT] == 2 * 4 * numel
    assert foot.by_role[Role.WEIGHT] == alone.by_role[Role.WEIGHT]
    assert foot.communication.total == foot.communication.all_reduce == 2 * 3 * 4 * numel // 4
    assert "gradient_as_bucket_view" in repr(foot) and "4 processes (ddp)" in repr(foot)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"world_size": 4}, "needs a strategy"),
        ({"world_size": 0, "strategy": "ddp"}, "at least 1"),
        ({"world_size": 2, "strategy": "fsdp"}, "'ddp', 'fsdp2'"),
        ({"world_size": 2, "strategy": "ddp", "units": ["blocks.*"]}, "fully_shard wraps"),
        ({"world_size": 2, "strategy": "fsdp2", "units": ["layers.*"]}, "unit 'layers.*' is no module"),
    ],
)
def test_arguments_that_make_no_sense(trace: Trace, options: dict[str, Any], text: str) -> None:
    with pytest.raises(PlanError, match=text.replace("*", r"\*")):
        footprint(trace, **options)


def test_a_reduction_in_few_bits_holds_codes_and_a_chunk(trace: Trace) -> None:
    """By hand for the head, the largest unit: 33 rows of 64 values are a chunk, one byte each, and 2 bytes for each block of 64."""
    chunk = 33 * WIDTH
    scratch = 2 * WORLD * (chunk + 2 * 33) + 2 * 4 * chunk
    found = {
        name: [i.nbytes for i in distributed_intervals(trace, Plan(), distribution_of(trace, "fsdp2", WORLD, None, name))]  # type: ignore[arg-type]
        for name in (None, "int8/64@bf16")
    }
    added = [b - a for a, b in zip(found[None], found["int8/64@bf16"], strict=True) if a != b]
    assert len(added) == 3 and max(added) == scratch, "of three units"
    in_buckets = [footprint(trace, strategy="ddp", world_size=WORLD, reduction=name).peak_bytes for name in (None, "int8/64@bf16")]
    assert in_buckets[1] > in_buckets[0]
