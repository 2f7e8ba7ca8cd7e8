"""Formats in memory: the rows of a table round as round_trip does, in any layout; in Triton's interpreter where there is no GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from paredown import Format, Overflow, Rounding, Seed, round_trip
from paredown.codec.runtime_formats import fields_of, flat, is_live, overflow_limit, round_trip_, words_for
from paredown.errors import CodecError
from tests.codec.test_kernels import every_device
from tests.support.compare import assert_same_bits
from tests.support.values import normal

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy warns in the interpreter; a GPU does not
TEXTS = ("e4m3b11f", "e5m2f", "e6m9f", "int8", "e3m1b4fns")


def layouts() -> list[Tensor]:
    """Contiguous, channels last, with gaps, of one number, and none."""
    x = 40 * normal(3, 4, 5, 6)
    return [x.clone(), x.to(memory_format=torch.channels_last), x[:, ::2], torch.tensor(33.0), torch.zeros(0, 4)]


@every_device
@pytest.mark.parametrize("rounding", [Rounding.NEAREST_AWAY, Rounding.STOCHASTIC])
def test_a_table_rounds_as_round_trip_does(rounding: Rounding, device: str) -> None:
    from paredown.codec.runtime_formats import RuntimeFormatTable

    table = RuntimeFormatTable(8, torch.device(device))
    table.set({place: (Format.parse(text), Overflow.SATURATE) for place, text in enumerate(TEXTS)})
    table.set({7: (None, None)})
    table.set_seeds(dict.fromkeys(range(8), Seed(3, 5)))
    for place, text in [*enumerate(TEXTS), (7, "fp32")]:
        for x in layouts():
            expected = round_trip(x, text, rounding=rounding, overflow="saturate" if text != "fp32" else None, seed=Seed(3, 5, 2))
            step = torch.tensor([2], dtype=torch.int32, device=device)
            ours = x.to(device, copy=True)
            if not x.is_contiguous() and x.is_contiguous(memory_format=torch.channels_last):
                ours = ours.to(memory_format=torch.channels_last)
            copy = table.round_into(ours, torch.empty_like(ours), place, rounding, step)
            assert_same_bits(ours.cpu().contiguous(), x.contiguous())
            table.round_into(ours, ours, place, rounding, step)
            for found in (copy, ours):
                assert_same_bits(found.cpu().contiguous(), expected.contiguous())


@every_device
@pytest.mark.parametrize("rounding", [Rounding.NEAREST_EVEN, Rounding.STOCHASTIC])
def test_many_tensors_in_one_launch(rounding: Rounding, device: str) -> None:
    from paredown.codec.runtime_formats import RuntimeFormatTable

    table, step = RuntimeFormatTable(8, torch.device(device)), torch.tensor([2], dtype=torch.int32, device=device)
    table.set({place: (Format.parse(text), Overflow.SATURATE) for place, text in enumerate(TEXTS)})
    table.set_seeds({place: Seed(3, place) for place in range(8)})
    given = [9 * normal(*shape) for shape in ((3, 700), (5,), (1024,), (1025,), (2, 3, 3, 3))]
    theirs = [x.to(device, copy=True) for x in given]
    memory = torch.empty(words_for(theirs), dtype=torch.int64, device=device)
    table.round_many([(x, x, place) for place, x in enumerate(theirs)], rounding, step, memory)
    for place, (text, x) in enumerate(zip(TEXTS, given, strict=True)):
        expected = round_trip(x, text, rounding=rounding, overflow="saturate", seed=Seed(3, place, 2))
        assert_same_bits(theirs[place].cpu(), expected)


@every_device
def test_a_row_that_is_replaced_is_read_anew(device: str) -> None:
    from paredown.codec.runtime_formats import RuntimeFormatTable

    table, x, step = RuntimeFormatTable(2, torch.device(device)), 3 * normal(50), torch.zeros(1, dtype=torch.int32, device=device)
    for text in TEXTS:
        table.set({1: (Format.parse(text), Overflow.NONFINITE)})
        ours = table.round_into(x.to(device), torch.empty_like(x, device=device), 1, Rounding.NEAREST_AWAY, step)
        assert_same_bits(ours.cpu(), round_trip(x, text, rounding="nearest_away", overflow="nonfinite"))


def test_in_place_and_out_of_autograds_sight() -> None:
    x = normal(20).requires_grad_()
    y = (x * 3).sigmoid()
    before, version = y.detach().clone(), y._version
    assert round_trip_(y, Format.parse("e4m0f"), Rounding.NEAREST_AWAY, Overflow.SATURATE, Seed(0)) is y
    assert torch.equal(y, round_trip(before, "e4m0f", rounding="nearest_away", overflow="saturate"))
    assert y._version == version
    y.sum().backward()
    assert x.grad is not None


def test_memory_as_one_row() -> None:
    last = normal(2, 3, 4, 5).to(memory_format=torch.channels_last)
    row = flat(last)
    assert row is not None and torch.equal(row, last.permute(0, 2, 3, 1).flatten())
    assert flat(normal(4, 6)[:, ::2]) is None


def test_which_formats_stand_in_a_table() -> None:
    assert is_live(None) and is_live(Format.parse("e8m7"))
    for text in ("int8/64@bf16", "nf4", "e8m3fnuz"):
        assert not is_live(Format.parse(text))
        with pytest.raises(CodecError, match="cannot be read from memory"):
            fields_of(Format.parse(text), None)


@pytest.mark.parametrize("text", ["e4m3b11f", "e5m2f", "e6m9f", "int8", "e4m3fn"])
def test_the_limit_is_where_values_round_past_the_largest(text: str) -> None:
    limit = torch.tensor(overflow_limit(Format.parse(text)))
    below = torch.nextafter(limit, torch.tensor(0.0))
    past, held = (round_trip(x, text, rounding="nearest_away", overflow="nonfinite") for x in (limit, below))
    assert not past.isfinite() and held == Format.parse(text).element.max_value
