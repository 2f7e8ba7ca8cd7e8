"""Kernels of updates and folding give the reference's bits: in Triton's interpreter where there is no GPU, compiled where there is one."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from paredown.codec.packed import encode
from paredown.codec.reference import PackedParts
from paredown.formats.rounding import Rounding, Seed
from paredown.optim import batched_update, reference
from paredown.optim.batched_update import Batch
from paredown.optim.reference import Fold, UpdateSlot, UpdateUnit
from paredown.optim.rules import RULES
from tests.optim.made import GRADIENT, HYPERS, NEAREST, STOCHASTIC, TIERS, Stored, assert_same_unit, moved, tensors, unit
from tests.support.compare import assert_same_bits, assert_same_parts

pytest.importorskip("triton", reason="Triton is not installed")
from paredown.optim import kernels
from paredown.optim.kernels import launch

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy warns in the interpreter; a GPU does not
INTERPRETED = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled here")
every_device = pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=INTERPRETED), pytest.param("cuda", marks=pytest.mark.gpu)]
)
# tiles that are runs and end in an even rest; rows of 16 values; rows that end anywhere; one long row
SHAPES = ((33, 64), (7, 80), (3, 50), (1, 2101))
ODD: dict[str, tuple[Stored, Stored, Stored, Stored]] = {
    "floats": (("e4m3fn/64@e8m0", NEAREST, 0), ("e4m3fn/64@fp32", STOCHASTIC, 0), ("uint8/64@e8m0", STOCHASTIC, 1), GRADIENT),
    "scales": (("int8/64@bf16", STOCHASTIC, 0), ("int4/64@e8m0", NEAREST, 0), ("uint4/64@fp32", STOCHASTIC, 1), GRADIENT),
    "weights of 4 bits": (
        ("int4/64@e8m0", STOCHASTIC, 0), ("int4/64@bf16", NEAREST, 0), ("uint4/64@bf16", STOCHASTIC, 1), ("int4/64@bf16", NEAREST, 0),
    ),
    "halves": (
        (torch.float16, STOCHASTIC, 0), (torch.bfloat16, STOCHASTIC, 0), (torch.float16, Rounding.TOWARD_ZERO, 0),
        (torch.float16, NEAREST, 0),
    ),
    "blocks": (
        ("int8/16@e8m0", Rounding.NEAREST_AWAY, 0), ("int8/16@bf16", STOCHASTIC, 0), ("uint8/16@bf16", NEAREST, 1),
        (torch.float32, NEAREST, 0),
    ),
}  # fmt: skip
CASES = [("adamw", t) for t in ("lpmm", "half", "safe", "lpmm4", "small", *ODD)]
CASES += [("sgd", "lpmm"), ("sgdm", "lpmm"), ("nesterov", "half"), ("lion", "lpmm")]


def units_of(rule: str, tier: str) -> list[UpdateUnit]:
    """One unit of each shape: NaN and inf in the second, another place in the whole tensor for the third, a factor for the last."""
    stored = {**TIERS, **ODD}[tier]
    units = [unit(rule, stored, rows, cols, seed=i, is_broken=i == 1) for i, (rows, cols) in enumerate(SHAPES)]
    units[2] = replace(units[2], first_index=(1 << 32) - 75)
    units[3] = replace(units[3], factor=torch.tensor(0.3))
    return units


@every_device
@pytest.mark.parametrize(("rule", "tier"), CASES)
def test_updates(rule: str, tier: str, device: str) -> None:
    units = units_of(rule, tier)
    assert all(kernels.covers(u.how(rule)) for u in units)
    there = [moved(u, device) for u in units]
    hypers, rows, steps = [HYPERS[rule], tuple(n * 0.5 for n in HYPERS[rule])], [0, 1, 0, 1], [3, 3, 4, 5]
    kernels.LaunchGroup(RULES[rule], there, 6).update(hypers, rows, steps)
    for u, other, row, step in zip(units, there, rows, steps, strict=True):
        reference.update(RULES[rule], u, hypers[row], step, 6)
        assert_same_unit(other, u)


@every_device
def test_batches_launch_the_kernels(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if device == "cpu":  # without a GPU a batch uses the reference: let it choose the interpreted kernels
        monkeypatch.setattr(batched_update, "_kernels_for", lambda unit, layout: kernels)
    units = units_of("adamw", "lpmm")
    there = [moved(u, device) for u in units]
    Batch(RULES["adamw"], there, 6).update([HYPERS["adamw"]], 0, 3)
    for u, other in zip(units, there, strict=True):
        reference.update(RULES["adamw"], u, HYPERS["adamw"], 3, 6)
        assert_same_unit(other, u)


@every_device
def test_one_at_a_time(device: str) -> None:
    for u in units_of("sgdm", "lpmm"):
        there = moved(u, device)
        kernels.update_one(there, there.how("sgdm"), HYPERS["sgdm"], 2, 6, None)
        reference.update(RULES["sgdm"], u, HYPERS["sgdm"], 2, 6)
        assert_same_unit(there, u)


@every_device
def test_a_program_takes_several_tiles(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "PROGRAMS", 3)
    units = [unit("sgdm", TIERS["lpmm"], rows, 64, seed=rows) for rows in (160, 40)]  # 5 tiles and 1; two for each program
    there = [moved(u, device) for u in units]
    kernels.LaunchGroup(RULES["sgdm"], there, 0).update([HYPERS["sgdm"]], 0, 1)
    for u, other in zip(units, there, strict=True):
        reference.update(RULES["sgdm"], u, HYPERS["sgdm"], 1, 0)
        assert_same_unit(other, u)


@every_device
def test_steps_follow_each_other(device: str) -> None:
    """One row of numbers for all, gradients that move and lie anywhere, several steps."""
    units = [unit("adamw", TIERS["small"], 3, 80), unit("adamw", TIERS["small"], 1, 30, seed=1)]
    there = [moved(u, device) for u in units]
    group = kernels.LaunchGroup(RULES["adamw"], there, 0)
    for step in (1, 2, 3):
        grads = [torch.randn(u.rows * u.cols + 1, generator=torch.Generator().manual_seed(step)).bfloat16()[1:] for u in units]
        memory = [torch.cat([g[:1], g]).to(device)[1:] for g in grads]  # 2 bytes past where memory starts
        group.set_gradients(memory)
        group.update([HYPERS["adamw"]], 0, step)
        for u, grad in zip(units, grads, strict=True):
            given = replace(u, gradient=UpdateSlot(None, NEAREST, PackedParts(grad.view(u.rows, u.cols))))
            reference.update(RULES["adamw"], given, HYPERS["adamw"], step, 0)
    for u, other in zip(units, there, strict=True):
        assert_same_unit(other, u)


@every_device
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
def test_folds(dtype: torch.dtype, device: str) -> None:
    for text, shape in (
        ("int8/64@bf16", (33, 64)),
        ("int8/64@bf16", (2101,)),
        ("e5m2/32@e8m0", (3, 50)),
        ("int4/128@fp32", (3, 80)),
    ):
        made = torch.Generator().manual_seed(1)
        ours, theirs = (encode(torch.zeros(shape), text, order="logical").to(d) for d in (device, "cpu"))
        for step in range(3):
            grad = (torch.randn(shape, generator=made) * 10.0 ** torch.randint(-38, 1, shape, generator=made)).to(dtype)
            if step == 2:
                grad.view(-1)[7] = torch.nan
            factor, seed = torch.tensor(0.3), Seed(4, 3, step, (1 << 32) - 99 if step == 1 else 5)
            kernels.fold(ours, grad.to(device), Fold(0.25, factor.to(device), seed, step == 0))
            reference.fold(theirs, grad, Fold(0.25, factor, seed, step == 0))
            assert_same_parts(ours, theirs)


def test_what_is_covered() -> None:
    covered, other = unit("sgdm", TIERS["lpmm"], 2, 64), ("int8/32@bf16", NEAREST, 0)
    two_blocks = unit("sgdm", (TIERS["lpmm"][0], other, *TIERS["lpmm"][2:]), 2, 64)
    tables = unit("sgdm", (("nf4/64@fp32", NEAREST, 0), *TIERS["lpmm"][1:]), 2, 64)
    affine = unit("sgdm", (TIERS["lpmm"][0], ("uint8/64@bf16+fp32", NEAREST, 0), *TIERS["lpmm"][2:]), 2, 64)
    assert [kernels.covers(u.how("sgdm")) for u in (covered, two_blocks, tables, affine)] == [True, False, False, False]
    reference.update(RULES["sgdm"], two_blocks, HYPERS["sgdm"], 1, 0)  # plain torch serves them
    reference.update(RULES["sgdm"], affine, HYPERS["sgdm"], 1, 0)


def test_tiles_cover_a_tensor_once() -> None:
    for rows, cols, first in ((33, 64, 0), (7, 80, 0), (3, 50, 0), (1, 2101, 0), (1 << 20, 1 << 12, 0), (1 << 20, 1 << 12, 64)):
        tiles = launch.tiles_of(rows, cols, first, 64)
        done = tiles.full * launch.tile_blocks(launch.RUN, 64)
        few = launch.tile_blocks(tiles.shape, 64)
        assert tiles.first_other * few == done
        assert 0 <= done + tiles.others * few - tiles.num_blocks < few
        assert tiles.num_blocks == rows * -(-cols // 64)
    assert tiles.full == 0 and tiles.others > 0  # from an index that is no multiple of a tile, past 2^32


# --- compiled ---------------------------------------------------------------------------------------------------------


def every_mantissa(first: int) -> Tensor:
    return torch.arange(first, first + (1 << 23), dtype=torch.int32).view(torch.float32)


@pytest.mark.gpu
def test_roots_and_reciprocals_are_correctly_rounded() -> None:
    """Through an update: with p = 0, m = 1 and factors of 1, v' = v + 2^-100 and p' = -1 / root(v')."""
    for first in (0x0D800000, 0x3F800000, 0x40000000, 0x5F000000):
        v = every_mantissa(first).view(2048, 4096)
        zeros = torch.zeros_like(v)
        slots = [UpdateSlot(None, NEAREST, PackedParts(t.clone().cuda())) for t in (zeros, zeros + 1, v, zeros)]
        u = UpdateUnit(
            slots[0], None, (slots[1], slots[2]), slots[3], 2048, 4096, 0, 0, None, torch.zeros(5, dtype=torch.int32).cuda()
        )
        Batch(RULES["adamw"], [u], 0).update([(1.0, 1.0, 1.0, 0.0, 1.0, 0.0, 1.0, 1.0, 0.0)], 0, 1)
        expected = -(np.float32(1) / np.sqrt(v.numpy() + np.float32(2.0**-100)))
        assert np.array_equal(u.weight.codes.cpu().numpy(), expected)


@pytest.mark.gpu
def test_a_tensor_of_more_than_2_31_values() -> None:
    rows, cols = (1 << 20) + 3, 2048
    like = unit("sgdm", TIERS["lpmm"], 1, 64)
    codes = [torch.zeros(rows, cols, dtype=torch.uint8, device="cuda") for _ in range(2)]
    scales = [torch.full((rows, cols // 64), n, dtype=d, device="cuda") for n, d in ((120, torch.uint8), (1, torch.bfloat16))]
    grad = torch.zeros(rows, cols, dtype=torch.bfloat16, device="cuda")
    codes[0][-1], grad[-1] = 100, 1.0
    weight = UpdateSlot(like.weight.format, STOCHASTIC, PackedParts(codes[0], scales[0]))
    moment = UpdateSlot(like.moments[0].format, NEAREST, PackedParts(codes[1], scales[1]))
    whole = replace(
        like, weight=weight, moments=(moment,), gradient=UpdateSlot(None, NEAREST, PackedParts(grad)), rows=rows, cols=cols
    )
    whole = replace(whole, counters=whole.counters.cuda())
    parts = {"weight": last_row(weight), "moments": (last_row(moment),), "gradient": last_row(whole.gradient)}
    last = replace(like, **parts, cols=cols, first_index=(rows - 1) * cols)
    Batch(RULES["sgdm"], [whole], 0).update([HYPERS["sgdm"]], 0, 1)
    reference.update(RULES["sgdm"], last, HYPERS["sgdm"], 1, 0)
    for ours, theirs in zip(tensors(whole)[:-1], tensors(last)[:-1], strict=True):
        assert_same_bits(ours[-1:].cpu(), theirs)
    assert int(codes[0][:-1].count_nonzero()) == 0


def last_row(slot: UpdateSlot) -> UpdateSlot:
    return UpdateSlot(slot.format, slot.rounding, PackedParts(*(t[-1:].cpu() for t in slot.parts.tensors())))


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype feature")
def test_launches_do_not_synchronize_or_recompile() -> None:
    u = moved(unit("adamw", TIERS["lpmm"], 64, 128), "cuda")
    batch = Batch(RULES["adamw"], [u], 0)
    for step in (1, 2, 3):
        batch.update([(*HYPERS["adamw"][:6], 1e-3 * step, *HYPERS["adamw"][7:])], 0, step)
    torch.cuda.synchronize()
    before = len(launch.update.update_kernel.device_caches[0][0])
    torch.cuda.set_sync_debug_mode("error")
    try:
        for step in (4, 5):
            batch.update([(*HYPERS["adamw"][:6], 1e-4 * step, *HYPERS["adamw"][7:])], 0, step)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(launch.update.update_kernel.device_caches[0][0]) == before
