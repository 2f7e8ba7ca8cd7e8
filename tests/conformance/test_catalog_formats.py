"""Every row of the catalog: both paths agree, bytes are as predicted, and tensors come back as what they were."""

from __future__ import annotations

import pytest
import torch

from paredown.codec.packed import PackedTensor, encode, round_trip
from paredown.formats.catalog import CATALOG
from paredown.formats.format import Format
from tests.support.compare import assert_same_bits, assert_within
from tests.support.paths import assert_paths_agree, make_encoding, mixed_rows
from tests.support.values import OVERFLOWS, ROUNDINGS, normal

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("name", CATALOG)
def test_paths_agree(name: str, rounding: str) -> None:
    for overflow in OVERFLOWS:
        encoding = make_encoding(str(CATALOG[name]), rounding, overflow)
        for dtype in DTYPES:
            assert_paths_agree(mixed_rows(8, 131, dtype), encoding)


@pytest.mark.parametrize("name", CATALOG)
def test_predicted_bytes_are_held(name: str) -> None:
    for shape in ((), (1,), (0,), (7,), (3, 65), (2, 3, 4, 5), (0, 4), (4, 0)):
        packed = encode(torch.full(shape, 0.5), CATALOG[name])
        assert packed.nbytes == CATALOG[name].nbytes(shape)
        assert sum(t.untyped_storage().nbytes() for t in packed.parts.tensors()) == packed.nbytes


@pytest.mark.parametrize("name", CATALOG)
def test_ordinary_numbers_come_back_within_half_a_step(name: str) -> None:
    text = str(CATALOG[name])
    x = normal(4, 130).abs() if text.startswith("uint") else normal(4, 130)
    for dtype in DTYPES:
        y = x.to(dtype)
        assert_within(
            round_trip(y, text, overflow="saturate").float(), round_trip(y.float(), text, overflow="saturate"), "fp32", 2**16
        )
        covered = y.float().abs() <= CATALOG[name].element.max_value if CATALOG[name].block is None else torch.ones_like(y).bool()
        assert_within(torch.where(covered, round_trip(y, text), y), y.float(), text, steps=0.5)


@pytest.mark.parametrize("name", CATALOG)
def test_state_dicts_bring_it_back(name: str) -> None:
    x = normal(3, 70).abs()
    packed = encode(x.clamp(max=1.0), CATALOG[name], rounding="stochastic", seed=1)
    again = PackedTensor.from_state_dict(packed.state_dict())
    assert (again.format, again.shape, again.dtype, again.order) == (packed.format, packed.shape, packed.dtype, packed.order)
    assert_same_bits(again.decode(), packed.decode())


@pytest.mark.parametrize("name", CATALOG)
def test_text_there_and_back(name: str) -> None:
    assert Format.parse(str(CATALOG[name])) == CATALOG[name]
    assert Format.from_json(CATALOG[name].to_json()) == CATALOG[name]


@pytest.mark.parametrize("name", CATALOG)
def test_a_seed_gives_the_same_bytes_again_and_another_seed_others(name: str) -> None:
    x = normal(50, 64).abs().clamp(max=1.0)
    one, same, other = (encode(x, CATALOG[name], rounding="stochastic", seed=seed) for seed in (1, 1, 2))
    assert torch.equal(one.codes, same.codes)
    assert torch.equal(one.codes, other.codes) == (name == "fp32")  # float32 keeps every bit, so there is nothing to draw
