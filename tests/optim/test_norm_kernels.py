"""Sums of squares of many packed tensors at once, against the decoded values in float64."""

from __future__ import annotations

import pytest
import torch

from paredown.codec.packed import encode

pytest.importorskip("triton", reason="Triton is not installed")
from paredown.optim.kernels import covers_squares, square_sums

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy warns in the interpreter; a GPU does not
INTERPRETED = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled here")
DEVICES = [pytest.param("cpu", marks=INTERPRETED), pytest.param("cuda", marks=pytest.mark.gpu)]
SHAPES = ((64, 128), (3, 64), (1, 4100), (100, 192))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("format", ["int8/64@bf16", "int4/64@bf16", "e4m3fn/32@e8m0", "int8/64@fp32"])
def test_sums_of_squares(format: str, device: str) -> None:
    torch.manual_seed(0)
    packed = [encode(10.0**i * torch.randn(shape), format, order="logical").to(device) for i, shape in enumerate(SHAPES)]
    assert all(covers_squares(p.format, p.shape) for p in packed)
    expected = torch.stack([p.decode().double().square().sum() for p in packed]).cpu()
    found = square_sums(packed).double().cpu()
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0.0)
    assert torch.equal(square_sums(packed).double().cpu(), found)


@pytest.mark.parametrize("device", DEVICES)
def test_what_is_not_finite_shows(device: str) -> None:
    x = torch.ones(64, 64)
    x[5, 3] = float("inf")
    packed = [encode(t, "int8/64@bf16", order="logical").to(device) for t in (torch.ones(64, 64), x)]
    assert square_sums(packed).isnan().tolist() == [False, True]


def test_rows_that_end_within_a_block_are_not_covered() -> None:
    assert not covers_squares(encode(torch.ones(64, 100), "int8/64@bf16").format, torch.Size((64, 100)))
