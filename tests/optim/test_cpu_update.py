"""Updates and folds in compiled loops give the bits of `optim/reference.py`, for all rules, formats, roundings, dtypes and shapes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paredown.codec import cpu as codec
from paredown.codec.packed import encode
from paredown.formats.catalog import CATALOG, reason_not_to_store
from paredown.formats.catalog import TIERS as CATALOG_TIERS
from paredown.formats.format import Format
from paredown.formats.rounding import Rounding, Seed
from paredown.optim import reference
from paredown.optim.batched_update import Batch, fold, update_one
from paredown.optim.cpu import updater as cpu
from paredown.optim.reference import Fold, UpdateUnit
from paredown.optim.rules import RULES
from tests.optim.made import HYPERS, NEAREST, PLAIN, TIERS, Stored, assert_same_unit, moved, unit
from tests.support.compare import assert_same_parts
from tests.support.memory import MIB, peak_bytes
from tests.support.paths import loops_or_none, no_loops
from tests.support.strategies import examples

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SHAPES = ((3, 128), (2, 100), (5, 6007), (40, 4096), (7, 3), (1, 1))
ROLES = ("weight", "moment1", "moment2", "gradient")
STORABLE = {
    role: [str(f) for f in CATALOG.values() if f.block and not f.has_tensor_scale and reason_not_to_store(f, role) is None]
    for role in ROLES
}


@pytest.fixture(autouse=True)
def loops(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Compiled loops whatever the size of a tensor."""
    if not codec.has_numba():
        pytest.skip("numba is not installed")
    monkeypatch.setattr(codec, "find_loops", loops_or_none)
    yield


def assert_loops_agree(name: str, u: UpdateUnit, *, step: int = 5, seed: int = 9) -> None:
    """The same unit after an update in loops, and by the reference."""
    expected = moved(u)
    assert cpu.covers(u.how(name), u.cols)
    reference.update(RULES[name], expected, HYPERS[name], step, seed)
    update_one(RULES[name], u, HYPERS[name], step, seed)
    assert_same_unit(u, expected)


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("name", cpu.COMPILED_RULES)
def test_rules_and_tiers(name: str, tier: str) -> None:
    for shape, is_broken in product(SHAPES, (False, True)):
        if not is_broken or shape[1] > 1:
            assert_loops_agree(name, unit(name, TIERS[tier], *shape, is_broken=is_broken))


@pytest.mark.parametrize("tier", sorted(set(CATALOG_TIERS) - {"full"}))
def test_tiers_of_the_catalog_are_covered(tier: str) -> None:
    """With any plain gradient as well."""
    formats = CATALOG_TIERS[tier]
    weight = torch.bfloat16 if formats["weight"] == "bf16" else formats["weight"]
    roots = 1 if formats["moment2"].startswith("uint8") else 2
    moments: list[Stored] = [(formats["moment1"], NEAREST, 0), (formats["moment2"], Rounding.STOCHASTIC, roots)]
    for gradient in (formats["gradient"], *DTYPES):
        stored = ((weight, Rounding.STOCHASTIC, 0), *moments, (gradient, NEAREST, 0))
        assert_loops_agree("adamw", unit("adamw", stored, 3, 300))


@pytest.mark.parametrize("rounding", Rounding)
@pytest.mark.parametrize("role", range(4))
def test_every_format_of_the_catalog(role: int, rounding: Rounding) -> None:
    """In each slot that can have it, the others plain; the second moment under both roots."""
    for text, roots in product(STORABLE[ROLES[role]], (1, 2) if role == 2 else (0,)):
        stored = [PLAIN] * 4
        stored[role] = (text, rounding, roots)
        assert_loops_agree("adamw", unit("adamw", tuple(stored), 3, 130, is_broken=True))  # type: ignore[arg-type]


@pytest.mark.parametrize("rounding", Rounding)
@pytest.mark.parametrize("dtype", DTYPES)
def test_plain_slots(dtype: torch.dtype, rounding: Rounding) -> None:
    stored: Stored = (dtype, rounding, 0)
    for shape in SHAPES[:4]:
        assert_loops_agree("sgdm", unit("sgdm", (stored, stored, stored, stored), *shape))


WEIGHTS = ("int8/64@e8m0", "int5/24@e8m0", "e4m3fn/32@e8m0", "nf4/16@fp32", "uint4/40@bf16+fp32", "int3/7@bf16", "e8m7/9@bf16")
MOMENTS = ("int8/64@bf16", "e5m2/16@e8m0", "int4/48@fp32", "uint8/32@bf16+bf16", "e3m2fn/5@bf16")
SQUARES = ("uint8/64@bf16", "uint4/24@bf16", "e4m3fn/32@e8m0", "uint6/10@fp32")
GRADIENTS = ("int8/64@bf16", "e5m2", "bf16", "uint4/64@bf16+bf16", "int16/12@fp32")


@given(
    name=st.sampled_from(cpu.COMPILED_RULES),
    formats=st.tuples(*(st.sampled_from((*texts, *DTYPES)) for texts in (WEIGHTS, MOMENTS, SQUARES, GRADIENTS))),
    roundings=st.tuples(*[st.sampled_from(Rounding)] * 4),
    roots=st.integers(1, 2),
    shape=st.tuples(st.integers(1, 4), st.integers(1, 300)),
    place=st.tuples(st.sampled_from((0, 1, 63, 2**32 - 100, 2**34 - 1)), st.sampled_from((None, 0.25, 3.0)), st.booleans()),
)
@examples(150)
def test_any_layout(
    name: str,
    formats: tuple[str | torch.dtype, ...],
    roundings: tuple[Rounding, ...],
    roots: int,
    shape: tuple[int, int],
    place: tuple[int, float | None, bool],
) -> None:
    """Blocks of different lengths, ends of rows, the random bits of shards, a factor on the device."""
    first_index, factor, is_broken = place
    kinds = zip(formats, roundings, (0, 0, 0 if isinstance(formats[2], torch.dtype) else roots, 0), strict=True)
    weight, first, second, gradient = kinds
    u = unit(name, (weight, first, second, gradient), *shape, is_broken=is_broken)
    u = replace(u, first_index=first_index, factor=None if factor is None else torch.tensor(factor))
    if cpu.covers(u.how(name), u.cols):
        assert_loops_agree(name, u)


def test_moments_and_weights_that_are_not_finite() -> None:
    for tier in ("lpmm", "half", "safe", "small"):
        u = unit("adamw", TIERS[tier], 4, 200)
        for moment in u.moments:
            broken = moment.codes if moment.format is None else moment.parts.scales
            assert broken is not None
            broken.view(-1)[3] = torch.nan
        if u.weight.format is None:
            u.weight.codes[1, 150] = torch.inf
        else:
            assert u.weight.parts.scales is not None
            u.weight.parts.scales[2, 1] = 255  # NaN
        assert_loops_agree("adamw", u)
        assert u.counters[4] > 1


def test_updates_one_after_the_other_and_new_gradients() -> None:
    u = unit("adamw", (TIERS["lpmm"][0], *TIERS["lpmm"][1:3], PLAIN), 6, 192)
    expected, batch = moved(u), Batch(RULES["adamw"], [u], 4)
    for step in range(1, 5):
        gradient = torch.randn(6, 192, generator=torch.Generator().manual_seed(step)) * 1e-3
        batch.update([HYPERS["adamw"]], 0, step, [gradient])
        reference.update(RULES["adamw"], cpu.with_gradient(expected, gradient), HYPERS["adamw"], step, 4)
    assert_same_unit(u, expected)


# --- what has no loop -------------------------------------------------------------------------------------------------


def test_what_has_no_loop() -> None:
    def covers(weight: str | torch.dtype, *, rule: str = "sgd", cols: int = 8192) -> bool:
        moment: Stored = ("int8/64@bf16", NEAREST, 0)
        u = unit("sgd" if rule == "muon" else rule, ((weight, NEAREST, 0), moment, moment, PLAIN), 1, cols)
        return cpu.covers(u.how(rule), cols)

    assert covers("int8/64@e8m0") and covers("int8/2048@bf16") and covers(torch.float16)
    assert not covers("int8/64@e8m0", rule="muon"), "of matrices"
    assert not covers("e2m1fn/16@e4m3fn"), "one scale for the whole tensor"
    assert not covers("int8/65@bf16", rule="sgdm"), "blocks of 64 and 65 end together after 4160 values"
    assert covers("int8/65@bf16", rule="sgdm", cols=2000) and covers("int8/5000@bf16", cols=2000)


@pytest.mark.parametrize("is_compiled", [True, False])
def test_layouts_without_loops_are_updated_by_the_reference(is_compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that fit no tile; and all, where numba is missing."""
    monkeypatch.setattr(codec, "find_loops", loops_or_none if is_compiled else no_loops)
    weight: Stored = ("int8/65@bf16", NEAREST, 0) if is_compiled else TIERS["lpmm"][0]
    u = unit("sgdm", (weight, *TIERS["lpmm"][1:]), 2, 4200)
    expected, calls = moved(u), []
    reference.update(RULES["sgdm"], expected, HYPERS["sgdm"], 5, 9)
    update = reference.update
    monkeypatch.setattr(reference, "update", lambda *args: calls.append(update(*args)))
    update_one(RULES["sgdm"], u, HYPERS["sgdm"], 5, 9)
    assert_same_unit(u, expected)
    assert len(calls) == 1


# --- folds ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rounding", Rounding)
@pytest.mark.parametrize("text", [*STORABLE["gradient"], "e5m2", "bf16", "fp32", "int8/5000@bf16"])
def test_folds(text: str, rounding: Rounding) -> None:
    made, format = torch.Generator().manual_seed(0), Format.parse(text)
    for shape, dtype in product(((3, 130), (2, 3, 64), (1, 5000)), DTYPES):
        packed = encode(torch.zeros(shape), format, order="logical")
        expected = encode(torch.zeros(shape), format, order="logical")
        for count, factor in enumerate((None, None, torch.tensor(0.3))):
            grad = (torch.randn(shape, generator=made) * 1e-3).to(dtype)
            if count == 2:
                grad.view(-1)[7], grad.view(-1)[-1] = torch.nan, torch.inf
            how = Fold(0.25, factor, Seed(3, 11, count, first_index=2**32 - 64), is_first=count == 0, rounding=rounding)
            fold(packed, grad, how)
            reference.fold(expected, grad, how)
            assert_same_parts(packed, expected)


# --- memory -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tier", TIERS)
def test_updates_and_folds_take_no_scratch_memory(tier: str, tmp_path: Path) -> None:
    u, grad = unit("adamw", TIERS[tier], 512, 1024), torch.ones(512, 1024)
    packed = encode(grad, "int8/64@bf16", order="logical")
    how = Fold(1.0, None, Seed(0, 0), is_first=False)
    assert peak_bytes(lambda: update_one(RULES["adamw"], u, HYPERS["adamw"], 3, 4), tmp_path) < MIB // 64
    assert peak_bytes(lambda: fold(packed, grad, how), tmp_path) < MIB // 64
    assert peak_bytes(lambda: reference.update(RULES["adamw"], u, HYPERS["adamw"], 3, 4), tmp_path) > MIB, "what would be seen"
