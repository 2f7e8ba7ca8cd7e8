"""Updates of `optim/reference.py` against numbers computed here, block by block, and against the encoding of the codec."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from math import floor
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from paredown.codec import reference as codec
from paredown.codec.packed import encode
from paredown.errors import OptimError
from paredown.formats.format import Format
from paredown.formats.rounding import WORD, Overflow, Rounding, Seed
from paredown.optim import reference
from paredown.optim.batched_update import Batch, update_one
from paredown.optim.reference import Fold, UpdateSlot, UpdateUnit
from paredown.optim.rules import RULES
from tests.optim.made import HYPERS, NEAREST, TIERS, assert_same_unit, moved, slot, unit
from tests.support.compare import assert_same_bits
from tests.support.memory import peak_bytes

MOMENT_BITS = (0xA13FC965, 0xADB4A92D)
PLACE_BITS = (1, 0x7EB9D1C9, 0x73270133, 0x60BDADCF)


def decoded(slot: UpdateSlot, cols: int) -> Tensor:
    """The values of a slot, through codec."""
    if slot.format is None:
        return slot.codes.float()
    x = codec.decode_rows(slot.parts, slot.format, cols, torch.float32)
    if slot.roots == 2:  # half of the bits of the root
        bits = torch.tensor([[max(int(n) - (127 << 22), 0) * 2 for n in row] for row in x.view(torch.int32).tolist()])
        x = bits.int().view(torch.float32)
    return x * x if slot.roots else x


def oracle_values(u: UpdateUnit, name: str) -> tuple[Tensor, tuple[Tensor, ...]]:
    """p' and the moments, in float32, from decoded slots; the gradient's scale takes the factor first."""
    rule, h = RULES[name], RULES[name].numbers(HYPERS[name])
    codes = u.gradient.codes.view(torch.int8).float()
    assert u.gradient.parts.scales is not None
    scales = u.gradient.parts.scales.float() * torch.tensor(h["factor"])
    g = codes * scales.repeat_interleave(64, 1)[:, : u.cols]
    return rule.update(decoded(u.weight, u.cols), g, tuple(decoded(m, u.cols) for m in u.moments), h)


def bits_of(u: UpdateUnit, step: int, seed: int, multiplier: int = 1) -> Tensor:
    """Four values draw once, and multiply."""
    drawn = codec.random_bits(Seed(seed, 8 * u.tensor_id, step), 0, u.first_index + u.rows * u.cols, torch.device("cpu")).tolist()
    bits = [drawn[i // 4] * PLACE_BITS[i % 4] * multiplier & WORD for i in range(u.first_index, u.first_index + u.rows * u.cols)]
    return torch.tensor(bits).view(u.rows, u.cols)


def oracle_sticky(u: UpdateUnit, p: Tensor, bits: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and scale codes of int8/64@e8m0 with scales that stay where they can, one value at a time."""
    codes, scales = torch.zeros(u.rows, u.cols, dtype=torch.uint8), torch.empty_like(u.weight.parts.scales)
    for row in range(u.rows):
        for k, start in enumerate(range(0, u.cols, 64)):
            block = p[row, start : start + 64].tolist()
            old, largest = int(u.weight.parts.scales[row, k]), max(abs(x) for x in block)
            quotient = float(np.float32(largest) / np.float32(127))
            cover = next(c for c in range(27, 255) if 2.0 ** (c - 127) >= quotient)
            stays = largest == 0 or (cover <= old and largest >= float(np.float32(0.2 * 127)) * 2.0 ** (old - 127))
            scales[row, k] = new = old if stays else cover
            for i, x in enumerate(block):
                codes[row, start + i] = floor_code(x, 2.0 ** (127 - new), int(bits[row, start + i])) & 255
    return codes, scales


def floor_code(x: float, inverse: float, bits: int) -> int:
    """floor(x * inverse + u), exactly."""
    return floor(Fraction(x) * Fraction(inverse) + Fraction(bits >> 9, 1 << 23))


def oracle_moment(x: Tensor, format: Format, bits: Tensor | None, least: int) -> tuple[Tensor, Tensor]:
    """Codes, one in each byte, and scales of whole numbers, one value at a time; without `bits` rounded to nearest."""
    scales = encode(x, format, order="logical").scales
    assert scales is not None and scales.dtype is torch.bfloat16
    inverses = np.float32(1) / scales.float().numpy() * np.float32(1 if bits is None else 1 - 2.0**-22)
    codes = torch.zeros(x.shape, dtype=torch.uint8)
    for row, col in np.ndindex(*x.shape):
        value, inverse = float(x[row, col]), float(inverses[row, col // 64])
        code = round(Fraction(value) * Fraction(inverse)) if bits is None else floor_code(value, inverse, int(bits[row, col]))
        assert abs(code) <= format.element.max_value
        codes[row, col] = max(code, least) & ((1 << format.element.width) - 1)
    return codes, scales


@pytest.mark.parametrize("name", ["sgd", "sgdm", "nesterov", "adamw", "lion"])
def test_lpmm(name: str) -> None:
    for rows, cols in ((3, 128), (2, 100)):
        u = unit(name, TIERS["lpmm"], rows, cols)
        p, moments = oracle_values(u, name)
        codes, scales = oracle_sticky(u, p, bits_of(u, 5, 9))
        reference.update(RULES[name], u, HYPERS[name], 5, 9)
        assert torch.equal(u.weight.codes, codes) and torch.equal(u.weight.parts.scales, scales)
        if moments:
            codes, scales = oracle_moment(moments[0], Format.parse("int8/64@bf16"), None, -127)
            assert torch.equal(u.moments[0].codes, codes)
            assert_same_bits(u.moments[0].parts.scales, scales)
        if len(moments) > 1:
            check_squares(u, moments[1])


def check_squares(u: UpdateUnit, v: Tensor) -> None:
    """The second moment: the root, stochastic, codes of at least 1."""
    x = torch.from_numpy(np.sqrt(v.numpy()))
    codes, scales = oracle_moment(x, Format.parse("uint8/64@bf16"), bits_of(u, 5, 9, MOMENT_BITS[1]), 1)
    assert_same_bits(u.moments[1].parts.scales, scales)
    assert torch.equal(u.moments[1].codes, codes)


def test_four_bits() -> None:
    u = unit("adamw", TIERS["lpmm4"], 3, 99)
    _, (m, v) = oracle_values(u, "adamw")
    reference.update(RULES["adamw"], u, HYPERS["adamw"], 5, 9)
    r = np.sqrt(v.numpy())
    fourth = torch.from_numpy(np.where(r > 0, (r.view(np.int32) // 2 + (127 << 22)).view(np.float32), np.float32(0)))
    assert (fourth - v.double() ** 0.25).abs().max() < 0.07 * v.double().max() ** 0.25
    for moment, x, n, least in ((u.moments[0], m, 0, -7), (u.moments[1], fourth, 1, 1)):
        assert moment.format is not None
        codes, scales = oracle_moment(x, moment.format, bits_of(u, 5, 9, MOMENT_BITS[n]), least)
        assert_same_bits(moment.parts.scales, scales)
        pairs = torch.cat([codes, torch.zeros(3, 1, dtype=torch.uint8)], 1).view(3, 50, 2)  # 99 values: the last byte has one
        assert torch.equal(moment.codes, pairs[..., 0] | pairs[..., 1] << 4)


def test_bf16_weights_use_the_requested_rounding() -> None:
    for rounding in Rounding:
        u = unit("sgdm", ((torch.bfloat16, rounding, 0), *TIERS["half"][1:]), 2, 70)
        p, _ = oracle_values(u, "sgdm")
        reference.update(RULES["sgdm"], u, HYPERS["sgdm"], 5, 9)
        codes, _ = codec.codes_of(p, Format.parse("bf16").element, rounding, Overflow.SATURATE, bits_of(u, 5, 9))
        assert torch.equal(u.weight.codes.view(torch.int16).long() & 0xFFFF, codes)


def test_a_residue_keeps_24_bits() -> None:
    u = unit("sgdm", TIERS["safe"], 4, 64)
    assert u.residue is not None
    before = (u.weight.codes.view(torch.int16).int() << 16) + (u.residue.codes.int() << 8)
    g, h = decoded(u.gradient, 64), RULES["sgdm"].numbers((1.0, *HYPERS["sgdm"][1:]))
    p, _ = RULES["sgdm"].update(before.view(torch.float32), g, (decoded(u.moments[0], 64),), h)
    reference.update(RULES["sgdm"], u, (1.0, *HYPERS["sgdm"][1:]), 1, 0)
    after = (u.weight.codes.view(torch.int16).int() << 16) + (u.residue.codes.int() << 8)
    assert torch.equal(after, (p.view(torch.int32) + 128) >> 8 << 8)
    assert (p - u.weight.codes.float()).abs().max() <= p.abs().max() * 2.0**-8  # the bf16 alone is the weight, rounded


def test_a_weight_that_does_not_move_keeps_its_bits() -> None:
    for tier, stored in TIERS.items():
        u = unit("adamw", stored, 5, 100)
        before = [t.clone() for t in (u.weight.codes, *(() if tier in ("half", "safe", "small") else (u.weight.parts.scales,)))]
        nothing = replace(u, gradient=slot(torch.zeros(5, 100), stored[3]), moments=tuple(map(zeroed, u.moments)))
        for step in range(1, 4):
            reference.update(RULES["adamw"], nothing, (1.0, 1.0, *HYPERS["adamw"][2:]), step, 0)
        after = [nothing.weight.codes, *(() if len(before) == 1 else (nothing.weight.parts.scales,))]
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True)), tier
        assert nothing.counters.tolist() == [1500, 0, 0, 0, 0]


def zeroed(moment: UpdateSlot) -> UpdateSlot:
    for t in moment.parts.tensors():
        t.zero_()
    return moment


def test_scales_of_weights_stay_until_they_must_change() -> None:
    x = torch.full((1, 64), 127 / 256)  # 127 steps of 2^-8
    u = unit("sgd", TIERS["lpmm"], 1, 64)
    for size, change in ((1.0, 0), (0.3, 0), (0.21, 0), (0.19, -2), (1.01, 1), (1.99, 1), (2.01, 2), (0.0, 0)):
        held = replace(u, weight=slot(x, TIERS["lpmm"][0]), gradient=slot(x - x * size, (torch.float32, NEAREST, 0)))
        assert held.weight.parts.scales.tolist() == [[127 - 8]]
        reference.update(RULES["sgd"], held, (1.0, 1.0, 0.0, 0.0, 1.0, 0.0), 1, 0)
        assert held.weight.parts.scales.tolist() == [[127 - 8 + change]], size


@pytest.mark.parametrize("tier", TIERS)
def test_what_is_not_finite_is_left_as_it_was(tier: str) -> None:
    u = unit("adamw", TIERS[tier], 4, 200, is_broken=True)
    whole, before = moved(u), moved(u)
    reference.update(RULES["adamw"], u, HYPERS["adamw"], 1, 0)
    assert u.counters[4] == 2  # (2, 100) and (0, 199)
    for slot_before, slot_after in zip((before.weight, *before.moments), (u.weight, *u.moments), strict=True):
        old, new = decoded(slot_before, 200), decoded(slot_after, 200)
        assert torch.equal(old[0, 192:], new[0, 192:]) and torch.equal(old[2, 64:128], new[2, 64:128])
        assert not torch.equal(old[0, :192], new[0, :192]) and not torch.equal(old[2, 128:], new[2, 128:])
    clean = replace(whole, gradient=unit("adamw", TIERS[tier], 4, 200).gradient)
    reference.update(RULES["adamw"], clean, HYPERS["adamw"], 1, 0)
    assert torch.equal(decoded(clean.weight, 200)[1], decoded(u.weight, 200)[1])  # other blocks do not notice


def test_pieces_are_one_update(monkeypatch: pytest.MonkeyPatch) -> None:
    u = unit("adamw", TIERS["lpmm"], 9, 300, is_broken=True)
    cut = moved(u)
    reference.update(RULES["adamw"], u, HYPERS["adamw"], 3, 4)
    monkeypatch.setattr(reference, "update_rows", lambda rows, cols: 2)
    reference.update(RULES["adamw"], cut, HYPERS["adamw"], 3, 4)
    assert_same_unit(cut, u)


@pytest.mark.parametrize("text", ["int8/64@bf16", "uint4/32@bf16+bf16", "e4m3fn"])
def test_folds_in_pieces_are_one_encoding(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "update_rows", lambda rows, cols: 2)
    first, second = torch.randn(2, 9, 100, generator=torch.Generator().manual_seed(0)).abs().unbind()
    packed, seeds = encode(torch.zeros(9, 100), text), (Seed(4, 3, 1, first_index=700), Seed(4, 3, 2, first_index=700))
    reference.fold(packed, first, Fold(0.5, None, seeds[0], is_first=True))
    expected = encode(0.5 * first, text, rounding="stochastic", seed=seeds[0])
    assert_same_bits(packed.decode(), expected.decode())
    reference.fold(packed, second, Fold(2.0, None, seeds[1], is_first=False))
    expected = encode(expected.decode() + 2.0 * second, text, rounding="stochastic", seed=seeds[1])
    assert_same_bits(packed.decode(), expected.decode())


@pytest.mark.parametrize("shape", [(256, 256), (2048, 1024)])
@pytest.mark.parametrize("tier", ["half", "lpmm"])
@pytest.mark.parametrize("name", ["sgd", "sgdm", "adamw", "lion"])
def test_an_update_allocates_for_an_eighth_of_the_parameter(name: str, tier: str, shape: tuple[int, int], tmp_path: Path) -> None:
    u = unit(name, TIERS[tier], *shape)
    used = peak_bytes(lambda: reference.update(RULES[name], u, HYPERS[name], 3, 4), tmp_path)
    assert used < 110 * max(shape[0] * shape[1] // 16, 1 << 15), "89 bytes a value, and at most 2^17 values"


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("text", ["int8/64@bf16", "int4/64@bf16"])
def test_a_fold_allocates_for_a_part_of_the_gradient(text: str, is_first: bool, tmp_path: Path) -> None:
    packed, grad = encode(torch.zeros(2048, 1024), text), torch.linspace(-1, 1, 1 << 21).view(2048, 1024)
    how = Fold(1.0, None, Seed(0, 0), is_first=is_first)
    assert peak_bytes(lambda: reference.fold(packed, grad, how), tmp_path) < 30 * (1 << 17) < grad.nbytes


def test_counters() -> None:
    u = unit("sgdm", TIERS["half"], 40, 4096)  # 64 blocks in a row: rows 0, 16 and 32 are looked at
    before = moved(u)
    p, _ = oracle_values(u, "sgdm")
    reference.update(RULES["sgdm"], u, HYPERS["sgdm"], 1, 0)
    old, new = (decoded(x.weight, 4096)[::16] for x in (before, u))
    moved_, step = p[::16] != old, torch.exp2(torch.floor(torch.log2(old.abs().clamp(min=1e-30))) - 8)
    close = moved_ & ((p[::16] - old).abs() < step)
    assert u.counters.tolist() == [3 * 4096, int(moved_.sum()), int((moved_ & (new != old)).sum()), int(close.sum()), 0]


def test_a_step_of_the_format_decides_the_dead_zone() -> None:
    u = unit("sgd", TIERS["lpmm"], 1, 64)
    x = torch.arange(1, 65)[None] / 64.0
    g = torch.where(torch.arange(64) < 10, 2.0**-7 * 0.49, 2.0**-7 * 0.51)[None]  # the scale is 2^-6: half of it is 2^-7
    u = replace(u, weight=slot(x, TIERS["lpmm"][0]), gradient=slot(2 * g, (torch.float32, NEAREST, 0)))
    assert u.weight.parts.scales.tolist() == [[127 - 6]]
    reference.update(RULES["sgd"], u, (1.0, 0.5, 0.0, 0.0, 1.0, 0.0), 1, 0)
    assert u.counters.tolist()[:2] == [64, 64] and u.counters[3] == 64
    assert reference.half_step(x, u.weight, False)[0, 0] == 2.0**-7


def test_weights_are_right_on_average() -> None:
    x = torch.full((64, 4096), 0.1)
    u = replace(unit("sgd", TIERS["lpmm"], 64, 4096), weight=slot(x, TIERS["lpmm"][0]))
    start = decoded(u.weight, 4096)
    u = replace(u, gradient=slot(torch.full((64, 4096), 1e-6), (torch.float32, NEAREST, 0)))
    reference.update(RULES["sgd"], u, (1.0, 1.0, 0.0, 0.0, 1.0, 0.0), 1, 3)
    change = (decoded(u.weight, 4096) - start).mean().item()
    assert abs(change + 1e-6) < 5 * (1e-6 * 2.0**-10 / 2**18) ** 0.5  # one false alarm in a million seeds


def test_rounding_is_right_on_average_and_alone() -> None:
    """Codes of 16 and 1 steps of x / scale: their mean, and how often neighbours, which share random bits, go up together."""
    format = Format.parse("int8/64@e8m0")
    for fraction in (0.5, 0.1, 2.0**-12, 2.0**-20):
        x = torch.full((1 << 14, 64), 16 + fraction)
        bits = reference.random_bits(Seed(5, 8, 1), x.numel(), x.device).view(x.shape)
        made = reference.whole_parts(x, format, bits, torch.full((1 << 14, 1), 127, dtype=torch.uint8)).codes
        assert made is not None and bool(((made == 16) | (made == 17)).all())
        up = (made == 17).double()
        error = (fraction * (1 - fraction) / x.numel()) ** 0.5
        assert abs(up.mean().item() - fraction) < 5 * error
        fours = up.view(-1, 4)
        for a, b in ((0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)):
            both = (fours[:, a] * fours[:, b]).mean().item()
            assert abs(both - fraction**2) < 5 * (fraction**2 / len(fours)) ** 0.5 + 1 / len(fours)


def test_whole_numbers_are_unchanged() -> None:
    """Of a scale that is no power of two as well, and no code is past the largest."""
    made = torch.Generator().manual_seed(0)
    for text in ("int8/64@e8m0", "int8/64@bf16", "uint8/64@fp32", "int4/64@bf16"):
        format = Format.parse(text)
        most = int(format.element.max_value)
        codes = torch.randint(-most if format.element.signed else 0, most + 1, (500, 64), generator=made)
        codes[:, 0] = most
        x = codes * (torch.rand(500, 1, generator=made) + 0.5).bfloat16().float() * 2.0**-9
        bits = reference.random_bits(Seed(3), x.numel(), x.device).view(x.shape)
        for given in (bits, None):
            parts = reference.whole_parts(x, format, given, None)
            again = codec.decode_rows(parts, format, 64, torch.float32)
            assert parts.codes is not None and parts.scales is not None
            step = codec.scale_values(parts, format)
            assert bool(((again - x).abs() <= step * (1.0 if given is not None else 0.5)).all())
            if format.scale is not None and format.scale.name == "bf16":
                assert ((again - x).abs() > 1e-4 * step).float().mean() < 1e-3


# --- the engine -------------------------------------------------------------------------------------------------------


def test_a_batch_is_its_units_one_by_one() -> None:
    units = [unit("adamw", TIERS[tier], 3, 70 + i, seed=i) for i, tier in enumerate(TIERS)]
    units[1] = replace(units[1], factor=torch.tensor(0.5))
    hypers, rows, steps = [HYPERS["adamw"], tuple(n * 0.5 for n in HYPERS["adamw"])], [0, 1, 0, 1, 0], [1, 2, 3, 4, 5]
    alone = [moved(u) for u in units]
    Batch(RULES["adamw"], units, 7).update(hypers, rows, steps)
    for u, other, row, step in zip(units, alone, rows, steps, strict=True):
        update_one(RULES["adamw"], other, hypers[row], step, 7)
        assert_same_unit(u, other)


def test_other_gradients_than_the_first_are_refused() -> None:
    batch, other = Batch(RULES["sgdm"], [unit("sgdm", TIERS["small"], 3, 70)], 0), torch.ones(210, dtype=torch.bfloat16)
    for wrong in (other.float(), other[:100], torch.ones(1, dtype=torch.bfloat16).expand(210)):
        with pytest.raises(OptimError, match="of the same dtype and size as the one before"):
            batch.update([HYPERS["sgdm"]], 0, 3, [wrong])
