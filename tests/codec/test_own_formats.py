"""Tables of values that a user spells out, and block scales in 8-bit floats other than e4m3fn, against their definitions."""

from __future__ import annotations

import pickle
from itertools import pairwise
from math import frexp

import numpy as np
import pytest
import torch

from paredown.codec.packed import encode, round_trip
from paredown.errors import FormatError
from paredown.formats.element import Element
from paredown.formats.format import Format
from paredown.plan.plan import Plan

OWN = "[-1 -0.5 -0.1 0 0.1 0.5 1]"
VALUES = [float(np.float32(v)) for v in (-1, -0.5, -0.1, 0, 0.1, 0.5, 1)]
SCALES = ("e5m2", "e4m3", "e3m4", "e4m3fnuz", "e5m2fnuz", "e6m1", "e5m2ns")


def nearest(x: float) -> float:
    """The value of OWN nearest to x; no tie is tested."""
    return min(VALUES, key=lambda value: abs(value - x))


def test_a_table_rounds_to_the_nearest_of_its_values() -> None:
    x = torch.linspace(-1.2, 1.2, 1001)
    rounded = round_trip(x, OWN, overflow="saturate")
    assert rounded.tolist() == [nearest(v) for v in x.tolist()]
    packed = encode(x, OWN, overflow="saturate")
    assert torch.equal(packed.decode(), rounded)
    assert packed.nbytes == Format.parse(OWN).nbytes(x.shape) == (3 * 1001 + 7) // 8


def test_a_table_in_blocks_maps_the_largest_magnitude_to_its_largest_value() -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 64)
    rounded = round_trip(x, f"{OWN}/16@fp32")
    for row, out in zip(x.view(-1, 16), rounded.view(-1, 16), strict=True):
        scale = row.abs().max()
        assert torch.allclose(out, torch.tensor([nearest(v) for v in (row / scale).tolist()]) * scale, rtol=1e-6)


def test_nf4_spelled_out_is_nf4() -> None:
    nf4 = Element.parse("nf4")
    own = Element.of_values(nf4.table)
    assert own == nf4 and own.width == 4
    x = torch.randn(8, 64)
    assert torch.equal(round_trip(x, f"{own}/64@fp32"), round_trip(x, "nf4/64@fp32"))


@pytest.mark.parametrize("text", [OWN, "[0 1]", "[-1e-30 0 1e30]", "[.5,1,  2]", "[-3 -2 -1]".replace("-1", "1")])
def test_texts_of_tables_are_read_back(text: str) -> None:
    element = Element.parse(text)
    assert Element.parse(str(element)) == element == pickle.loads(pickle.dumps(element))
    assert list(element.table) == sorted(element.table) and element.value(0) == element.min_value
    if 0.0 in element.table:
        plan = Plan.uniform(activation=f"{element}/64@bf16")
        assert Plan.from_json(plan.to_json()) == plan


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[1]", "2 to 256"),
        ("[0 1 x]", "unknown"),
        ("[0 1 --2]", "decimal numbers"),
        ("[0 1 1]", "rise"),
        ("[1 0]", "Sort"),
        ("[0 1 1.00000001]", "float32"),
        ("[-2 -1 0]", "above 0"),
        ("[0 1e39]", "3.4e38"),
        (f"[{' '.join(map(str, range(257)))}]", "2 to 256"),
        ("[-1 1]/64@bf16", "no zero"),
    ],
)
def test_tables_that_cannot_be(text: str, says: str) -> None:
    with pytest.raises(FormatError, match=says):
        Format.parse(text)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("element", ["e2m1fn", "int4"])
def test_scales_are_the_smallest_that_cover_their_block(element: str, scale: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(6, 96) * torch.logspace(-2, 2, 6)[:, None]
    format = Format.parse(f"{element}/16@{scale}")
    packed = encode(x, format)
    assert packed.nbytes == format.nbytes(x.shape) == 6 * 48 + 36 + 4
    assert packed.scales is not None and packed.scales.dtype is torch.uint8 and packed.tensor_scale is not None
    positive = sorted({v for v in Element.parse(scale).values() if 0 <= v < float("inf")})
    below = {high: low for low, high in pairwise(positive)}
    largest, unit = Element.parse(element).max_value, packed.tensor_scale.item()
    values = Element.parse(scale).values()
    for block, code in zip(x.view(-1, 16), packed.scales.flatten().tolist(), strict=True):
        needed = block.abs().max().item() / largest / unit
        assert values[code] >= needed * (1 - 1e-6) and below[values[code]] < needed
    decoded, spread = packed.decode(), packed.scales.flatten().long()
    step = torch.tensor(values)[spread] * unit * (2.0 if element == "e2m1fn" else 1.0)  # the widest step: of e2m1fn between 4 and 6
    assert ((decoded - x).view(-1, 16).abs().amax(1) <= step / 2 * (1 + 1e-5)).all()
    assert torch.equal(round_trip(x, format), decoded)


def test_the_largest_magnitude_has_the_largest_scale() -> None:
    x = torch.zeros(2, 16)
    x[0, 0], x[1, 3] = 3.0, 1e-3
    packed = encode(x, "int8/16@e5m2")
    assert packed.scales is not None and packed.tensor_scale is not None
    assert Element.parse("e5m2").value(int(packed.scales[0, 0])) == 57344.0
    assert frexp(packed.tensor_scale.item()) == frexp(float(np.float32(3.0) / np.float32(57344.0 * 127)))
    assert packed.decode()[0, 0].item() == pytest.approx(3.0, rel=1e-6)


@pytest.mark.parametrize("scale", ["e4m3f", "e5m1", "e5m3", "fp16", "int8", "e2m1fn"])
def test_scales_have_eight_bits_and_nan(scale: str) -> None:
    with pytest.raises(FormatError, match=f"'{scale}' is no scale.*8-bit floats that have NaN"):
        Format.parse(f"int4/16@{scale}")
