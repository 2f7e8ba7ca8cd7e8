"""Products of 8-bit codes against their definition: codes by exhaustive search, products and gradients of exact operands in float64."""

# pyright: reportPrivateUsage=false

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from paredown.codec import products
from paredown.codec.products import ELEMENTS, SharedCodes, quantize_rows, reason_without, row_linear

BOTH = pytest.mark.parametrize("element", list(ELEMENTS))
ERRORS = {"e4m3fn": 0.05, "int8": 0.015}  # of products of normal values: 3.6 % and 0.8 % measured
GRIDS = {  # the values of all codes, from the definition of the formats
    "int8": torch.arange(-127, 128).double(),
    "e4m3fn": torch.tensor(
        sorted(
            {
                s * (m / 8 * 2**-6 if e == 0 else (1 + m / 8) * 2.0 ** (e - 7))
                for s in (1, -1)
                for e in range(16)
                for m in range(8)
                if e * 8 + m < 127
            }
        ),
        dtype=torch.float64,
    ),
}


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def signs(rows: int, cols: int, seed: int, *, by_row: bool) -> Tensor:
    """Plus and minus powers of two, which are one in each row or each column: their codes are exact."""
    source = torch.Generator().manual_seed(seed)
    shape = (rows, 1) if by_row else (1, cols)
    sign = 1 - 2.0 * torch.randint(2, (rows, cols), generator=source)
    return sign * 2.0 ** torch.randint(-3, 4, shape, generator=source)


def exact_gradients(x: Tensor, w: Tensor, g: Tensor) -> list[Tensor]:
    x, w, g = x.double(), w.double(), g.double()
    return [x @ w.t(), g @ w, g.t() @ x]


def found_gradients(x: Tensor, w: Tensor, g: Tensor, element: str, bias: Tensor | None = None) -> list[Tensor]:
    x, w = x.clone().requires_grad_(), w.clone().requires_grad_()
    y = row_linear(x, w, bias, element)
    return [y.detach(), *torch.autograd.grad(y, (x, w), g)]


@BOTH
def test_codes_are_the_nearest_values_of_the_element(element: str) -> None:
    x = normal(20, 33) * 10.0 ** torch.arange(-10, 10).view(20, 1)
    codes, scales = quantize_rows(x, element)
    grid = GRIDS[element]
    assert codes.dtype is ELEMENTS[element] and scales.shape == (20, 1) and len(grid) in (253, 255)
    torch.testing.assert_close(scales, x.abs().amax(1, keepdim=True) / grid.max().float())
    scaled = (x / scales).double()
    nearest = (scaled.unsqueeze(-1) - grid).abs().amin(-1)
    assert torch.equal((scaled - codes.double()).abs(), nearest.clamp(min=0))


@BOTH
@pytest.mark.parametrize("rows", [1, 5, 16, 40])
def test_exact_operands_have_exact_products_and_gradients(element: str, rows: int) -> None:
    """A scale in the wrong place, or of the wrong row, changes a power of two; rows that fill no multiple of 16 are padded."""
    x, w = signs(rows, 32, 1, by_row=True), signs(48, 32, 2, by_row=True)
    grads = signs(rows, 48, 3, by_row=True) / w.abs().amax(1), signs(rows, 48, 4, by_row=False) / x.abs().amax(1, keepdim=True)
    (y, of_x, _), (_, _, of_w) = (found_gradients(x, w, g, element) for g in grads)
    expected = [exact_gradients(x, w, g) for g in grads]
    for found, exact in ((y, expected[0][0]), (of_x, expected[0][1]), (of_w, expected[1][2])):
        torch.testing.assert_close(found.double(), exact, rtol=1e-6, atol=1e-9)


@BOTH
def test_products_of_normal_values_err_by_the_rounding_of_their_operands(element: str) -> None:
    x, w, g = normal(70, 96), normal(64, 96, seed=1), normal(70, 64, seed=2)
    for found, exact in zip(found_gradients(x, w, g, element), exact_gradients(x, w, g), strict=True):
        error = float((found - exact).norm() / exact.norm())
        assert ERRORS[element] / 10 < error < ERRORS[element]


@BOTH
def test_a_large_token_does_not_change_the_rounding_of_others(element: str) -> None:
    x, w = normal(8, 32), normal(16, 32, seed=1)
    outlier = x.clone()
    outlier[3] *= 1e6
    plain, found = (row_linear(one, w, None, element) for one in (x, outlier))
    others = [row for row in range(8) if row != 3]
    assert torch.equal(plain[others], found[others])


@BOTH
def test_rows_of_zeros_and_without_finite_values(element: str) -> None:
    x, w = normal(6, 32), normal(16, 32, seed=1)
    x[0], x[1, 2], x[2, 3] = 0, float("inf"), float("nan")
    y, of_x, of_w = found_gradients(x, w, torch.ones(6, 16), element)
    assert torch.equal(y[0], torch.zeros(16)) and not y[1:3].isfinite().any() and y[3:].isfinite().all()
    assert of_x.isfinite().all() and not of_w.isfinite().all()
    zero = found_gradients(torch.zeros(6, 32), w, torch.ones(6, 16), element)
    assert torch.equal(zero[0], torch.zeros(6, 16)) and torch.equal(zero[2], torch.zeros(16, 32)) and zero[1].isfinite().all()


@pytest.mark.parametrize("dtype", products.DTYPES)
def test_dtypes_shapes_and_bias_are_those_of_linear(dtype: torch.dtype) -> None:
    x, w, b = (
        normal(2, 3, 32).to(dtype).requires_grad_(),
        normal(16, 32).to(dtype).requires_grad_(),
        normal(16).to(dtype).requires_grad_(),
    )
    y = row_linear(x, w, b, "e4m3fn")
    y.sum().backward()
    assert y.shape == (2, 3, 16) and y.dtype is dtype
    for tensor in (x, w, b):
        assert tensor.grad is not None and tensor.grad.dtype is dtype and tensor.grad.shape == tensor.shape
    assert torch.equal(row_linear(x[0, 0], w, b, "e4m3fn"), y[0, 0])


def test_autocast_decides_the_dtype_of_the_result() -> None:
    x, w = normal(20, 32).requires_grad_(), normal(16, 32).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        y = row_linear(x, w, None, "int8")
    assert y.dtype is torch.bfloat16
    torch.testing.assert_close(y, row_linear(x, w, None, "int8").to(torch.bfloat16), rtol=0, atol=0)
    assert all(grad.dtype is torch.float32 for grad in torch.autograd.grad(y.float().sum(), (x, w)))


def test_second_derivatives_are_refused() -> None:
    x, w = normal(20, 32).requires_grad_(), normal(16, 32)
    y = row_linear(x, w, None, "int8")
    with pytest.raises(RuntimeError, match=r"differentiated once.*session.close\(\)"):
        torch.autograd.grad(y.sum(), x, create_graph=True)


def test_what_backward_does_not_need_is_not_saved() -> None:
    x, w = normal(20, 32), normal(16, 32)
    sizes: dict[str, list[int]] = {}
    for name, (a, b) in {
        "both": (x.clone().requires_grad_(), w.clone().requires_grad_()),
        "frozen": (x.clone().requires_grad_(), w),
    }.items():
        out = row_linear(a, b, None, "e4m3fn")
        saved = out.grad_fn.next_functions[0][0].saved_tensors  # type: ignore[union-attr]
        sizes[name] = [tensor.nbytes for tensor in saved if tensor is not None and tensor.shape[0] == 20]
    assert sizes == {"both": [20 * 32, 20 * 4], "frozen": []}


def test_layers_share_the_codes_of_an_input_while_it_is_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    shared, x = SharedCodes(), normal(20, 32)
    first = shared.codes(x, x, "int8")
    assert shared.codes(x, x, "int8") is first
    assert shared.codes(x, x, "e4m3fn")[0].dtype is torch.float8_e4m3fn  # another element
    again = shared.codes(x, x, "int8")
    x.mul_(2)
    assert torch.equal(shared.codes(x, x, "int8")[1], 2 * again[1])  # written since
    del x
    assert shared._codes is None


def test_devices_without_the_instructions_get_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def capability(major: int, minor: int) -> Any:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (major, minor))
        reason_without.cache_clear()

    device = torch.device("cuda", 0)
    capability(8, 0)
    assert "compute capability 8.9, and it has 8.0" in reason_without("e4m3fn", device) and not reason_without("int8", device)
    capability(9, 0)
    assert not reason_without("e4m3fn", device)
    capability(7, 0)
    assert "7.5, and it has 7.0" in reason_without("int8", device)
    assert not reason_without("e4m3fn", torch.device("cpu")) and "mps" in reason_without("int8", torch.device("mps"))
    reason_without.cache_clear()


# --- kernels: in Triton's interpreter, or compiled on a GPU ----------------------------------------------------------------------------

INTERPRETED = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled here")
DEVICES = pytest.mark.parametrize("device", [pytest.param("cpu", marks=INTERPRETED), pytest.param("cuda", marks=pytest.mark.gpu)])
# Triton's interpreter casts 2 % of the values to e4m3fn wrongly; compiled, quotients beside the middle of two codes may round otherwise
MOST_DIFFERENT = {("e4m3fn", "cpu"): 0.04, ("e4m3fn", "cuda"): 0.002, ("int8", "cpu"): 0.0, ("int8", "cuda"): 0.002}


@BOTH
@DEVICES
@pytest.mark.parametrize("shape", [(40, 70), (130, 64), (16, 16)])
def test_kernels_quantize_and_transpose_as_the_definition(element: str, device: str, shape: tuple[int, int]) -> None:
    kernels = pytest.importorskip("paredown.codec.kernels.products")
    x = normal(*shape).to(device, torch.bfloat16)
    factors = normal(shape[0], 1, seed=1).abs().to(device)
    pairs = [(kernels.quantize_rows(x, element), quantize_rows(x, element))]
    pairs.append((kernels.quantize_columns(x, factors, element), products.quantize_columns(x, factors, element)))
    for (codes, scales), (expected, expected_scales) in pairs:
        assert codes.dtype is expected.dtype and codes.shape == expected.shape
        torch.testing.assert_close(scales, expected_scales, rtol=1e-6, atol=0)
        assert float((codes.float() != expected.float()).float().mean()) <= MOST_DIFFERENT[element, device]
        if (element, device) != ("e4m3fn", "cpu"):
            torch.testing.assert_close(codes.float(), expected.float(), rtol=0.13, atol=1)  # the neighbouring code
    codes = pairs[0][1][0]
    assert torch.equal(kernels.transposed(codes).view(torch.int8), products.transposed_codes(codes).view(torch.int8))


@BOTH
@DEVICES
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numpy, in the interpreter
def test_kernels_pass_on_what_is_not_finite(element: str, device: str) -> None:
    kernels = pytest.importorskip("paredown.codec.kernels.products")
    x = normal(32, 48).to(device)
    x[3, 5], x[4, 6] = float("nan"), float("-inf")
    for (_, scales), bad in (
        (kernels.quantize_rows(x, element), [3, 4]),
        (kernels.quantize_columns(x, x.new_ones(32, 1), element), [5, 6]),
    ):
        assert (~scales.isfinite()).nonzero()[:, 0].tolist() == bad


@BOTH
@pytest.mark.gpu
@pytest.mark.parametrize("rows", [8, 33, 1000])
def test_products_on_a_gpu_are_those_of_the_emulation(element: str, rows: int) -> None:
    x, w, g = normal(rows, 256), normal(64, 256, seed=1), normal(rows, 64, seed=2)
    on_cpu = found_gradients(x, w, g, element)
    on_gpu = found_gradients(x.cuda(), w.cuda(), g.cuda(), element)
    for found, expected in zip(on_gpu, on_cpu, strict=True):
        assert float((found.cpu() - expected).norm() / expected.norm()) < 0.005  # results are rounded to bf16: 0.0017 measured
