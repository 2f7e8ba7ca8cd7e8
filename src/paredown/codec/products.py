"""Matrix products of 8-bit codes: `row_linear` is F.linear whose operands are codes with one scale for each row.

    x (tokens, inputs)     = scales_x * codes_x        one scale for each token
    W (outputs, inputs)    = scales_w * codes_w        one scale for each output
    y      = (codes_x codes_w^T) * scales_x * scales_w^T
    grad_x = q(g * scales_w^T) codes_w                 q: quantized by rows, with the scales of W inside
    grad_W = q((g * scales_x)^T) codes_x               q: quantized by rows, with the scales of x inside

So backward multiplies the codes that forward multiplied: the gradient is that of the rounded operands, and nothing but codes of x and one
number for each token is saved. A scale is the largest magnitude of its row over the largest code (448 in e4m3fn, 127 in int8), and not
finite for a row with a value that is not finite, whose results then are not finite either. Codes are rounded to nearest.

On CUDA, products are those of torch._scaled_mm (e4m3fn: compute capability 8.9 and later) and torch._int_mm (int8: 7.5 and later); both
operands are contiguous along the contraction. Elsewhere decoded codes are multiplied in float32.

The four functions are operations of torch (`paredown::quantize_rows`, ...). In compiled graphs they are the plain torch of
`DECOMPOSITIONS`, which Inductor fuses into the operations around them, but for `quantize_columns` on CUDA; in eager mode on CUDA they are
Triton kernels (codec/kernels/products.py).

>>> x, w = torch.tensor([[1.0, -2.0], [0.25, 4.0]]), torch.tensor([[0.5, 0.25]])
>>> quantize_rows(x, "int8")
(tensor([[  64, -127],
        [   8,  127]], dtype=torch.int8), tensor([[0.0157],
        [0.0315]]))
>>> row_linear(x, w, None, "int8")[1]
tensor([1.1339])
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from paredown.codec import backend

ELEMENTS = {"e4m3fn": torch.float8_e4m3fn, "int8": torch.int8}
LARGEST = {"e4m3fn": 448.0, "int8": 127.0}
CAPABILITIES = {"e4m3fn": (8, 9), "int8": (7, 5)}  # of the first CUDA devices with such products
MULTIPLE = 16  # both sizes of a weight, and the length of a contraction, are multiples of this
MAX_TERMS = 2**17  # products that can be added in int32: each is at most 127^2
MIN_INT8_ROWS = 32  # torch._int_mm takes more than 16
scaled_mm: Callable[..., Tensor] = torch._scaled_mm  # pyright: ignore[reportPrivateImportUsage]
int_mm: Callable[..., Tensor] = torch._int_mm  # pyright: ignore[reportPrivateImportUsage]
MIN_MAGNITUDE = 2.0**-100  # rows whose values are all smaller are rounded to zero
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TWICE = (
    "a product of 8-bit codes is differentiated once: its backward was called with create_graph=True. Call session.close() before "
    "computing second derivatives, or exclude these layers: plan.set('product=PATH', None)."
)
NO_INSTRUCTIONS = (
    "{device} has no matrix products in {element}: they need CUDA compute capability {needed}{have}. A plan with products in {other}, in "
    "auto, or without products may do; on a CPU they are computed in float32."
)
NODE = "RowProduct"  # name in autograd's table of operations
# names of the operations
QUANTIZE, PRODUCT, COLUMNS, TRANSPOSED = "quantize_rows", "row_product", "quantize_columns", "transposed_codes"

_LIBRARY = torch.library.Library("paredown", "FRAGMENT")
_LIBRARY.define(f"{QUANTIZE}(Tensor x, str element) -> (Tensor, Tensor)")
_LIBRARY.define(f"{PRODUCT}(Tensor a, Tensor b, Tensor scales_a, Tensor? scales_b, ScalarType dtype) -> Tensor")
_LIBRARY.define(f"{COLUMNS}(Tensor g, Tensor factors, str element) -> (Tensor, Tensor)")
_LIBRARY.define(f"{TRANSPOSED}(Tensor codes) -> Tensor")


# --- the definition ----------------------------------------------------------------------------------------------------------------


def quantize_rows(x: Tensor, element: str) -> tuple[Tensor, Tensor]:
    """Return (codes, scales) of a matrix: codes of its shape in `element` ("int8", "e4m3fn"), float32 scales (rows, 1)."""
    values, largest = x.float(), LARGEST[element]
    scales = values.abs().amax(-1, keepdim=True).clamp(min=MIN_MAGNITUDE) / largest
    scaled = (values / scales).clamp(-largest, largest)  # in backward of a compiled graph `x` may be a decoded tensor
    return (scaled.round() if element == "int8" else scaled).to(ELEMENTS[element]), scales


def row_product(a: Tensor, b: Tensor, scales_a: Tensor, scales_b: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return (a b^T) * scales_a * scales_b^T of codes a (rows, n) and b (columns, n), as (rows, columns) of `dtype`.

    `scales_b`: None if there are none to multiply by.
    """
    # made here, so that a graph has one tensor of ones for each size
    scales_b = b.new_ones((b.shape[0], 1), dtype=torch.float32) if scales_b is None else scales_b
    if a.device.type != "cuda":
        return ((a.float() @ b.float().t()) * scales_a * scales_b.t()).to(dtype)
    if a.dtype is torch.int8 and isinstance(a.shape[1], int) and a.shape[1] > MAX_TERMS:
        halves = [[part.contiguous() for part in codes.split(MAX_TERMS, 1)] for codes in (a, b)]
        return sum(row_product(*parts, scales_a, scales_b, torch.float32) for parts in zip(*halves, strict=True)).to(dtype)  # type: ignore[union-attr]
    if a.dtype is torch.int8:
        rows = a.shape[0]
        product = int_mm(pad(a, (0, 0, 0, MIN_INT8_ROWS - rows)) if rows < MIN_INT8_ROWS else a, b.t())[:rows]
        return (product.float() * scales_a * scales_b.t()).to(dtype)
    product = scaled_mm(a, b.t(), scale_a=scales_a, scale_b=scales_b.t(), out_dtype=torch.bfloat16, use_fast_accum=True)
    return product.to(dtype)


def quantize_columns(g: Tensor, factors: Tensor, element: str) -> tuple[Tensor, Tensor]:
    """Return (codes, scales) of the columns of g * factors, transposed; `factors` has one number for each row of g.

    Codes of `element` are (columns, rows up to a multiple of 16), scales float32 (columns, 1).
    """
    return quantize_rows(transposed_codes(g.float() * factors), element)


def transposed_codes(codes: Tensor) -> Tensor:
    """Return the transpose of a matrix of codes, contiguous, whose rows are padded with zeros to a multiple of 16 columns."""
    missing, transposed = -codes.shape[0] % MULTIPLE, codes.t()
    if missing:
        values = transposed.view(torch.int8) if codes.element_size() == 1 else transposed  # torch pads no 8-bit floats
        transposed = pad(values, (0, missing)).view(codes.dtype)
    return transposed.contiguous()


def _on_cuda(kernel: str, reference: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function for CUDA tensors that runs the Triton kernel named `kernel`, or `reference` if Triton is missing."""

    def run(*args: Any) -> Any:
        kernels = backend.find_kernels()
        return reference(*args) if kernels is None or args[0].numel() == 0 else getattr(kernels, kernel)(*args)

    return run


def _in_graph(x: Tensor, *args: Any) -> Any:
    """Return `quantize_columns(x, *args)` as traced torch operations on a CPU; return NotImplemented where a kernel does it.

    Inductor would fuse these operations into reductions along rows, whose transposed writes took 10.6 of 83 ms of a step (one H200).
    """
    has_kernels = x.device.type == "cuda" and backend.find_kernels() is not None
    return NotImplemented if has_kernels else quantize_columns(x, *args)


def _empty_codes(x: Tensor, element: str) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape, dtype=ELEMENTS[element]), x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)


def _empty_columns(g: Tensor, factors: Tensor, element: str) -> tuple[Tensor, Tensor]:
    return _empty_codes(_empty_transposed(g), element)


def _empty_transposed(codes: Tensor) -> Tensor:
    return codes.new_empty((codes.shape[1], codes.shape[0] + -codes.shape[0] % MULTIPLE))


def _empty_product(a: Tensor, b: Tensor, scales_a: Tensor, scales_b: Tensor | None, dtype: torch.dtype) -> Tensor:
    return a.new_empty((a.shape[0], b.shape[0]), dtype=dtype)


for _name, _function, _kernel, _empty in (
    (QUANTIZE, quantize_rows, "quantize_rows", _empty_codes),
    (COLUMNS, quantize_columns, "quantize_columns", _empty_columns),
    (TRANSPOSED, transposed_codes, "transposed", _empty_transposed),
    (PRODUCT, row_product, None, _empty_product),
):
    _LIBRARY.impl(_name, _function, "CPU")
    _LIBRARY.impl(_name, _on_cuda(_kernel, _function) if _kernel else _function, "CUDA")
    torch.library.register_fake(f"paredown::{_name}", _empty, lib=_LIBRARY)
DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {
    torch.ops.paredown.quantize_rows.default: quantize_rows,
    torch.ops.paredown.row_product.default: row_product,
    torch.ops.paredown.transposed_codes.default: transposed_codes,
    torch.ops.paredown.quantize_columns.default: _in_graph,
}


# --- the layer ---------------------------------------------------------------------------------------------------------------------


class SharedCodes:
    """A cache of the codes of the last tensor that was quantized, so that layers with the same input save its codes once.

    The codes are kept as long as that tensor lives.
    """

    def __init__(self) -> None:
        self._of: weakref.ref[Tensor] | None = None
        self._key: tuple[int, str] = (0, "")
        self._codes: tuple[Tensor, Tensor] | None = None

    def codes(self, x: Tensor, matrix: Tensor, element: str) -> tuple[Tensor, Tensor]:
        """Return (codes, scales) of `matrix`, a 2-D view of `x`: the cached ones if `x` is unchanged since the last call."""
        key = x._version, element
        if self._codes is None or self._of is None or self._of() is not x or self._key != key:
            with torch.no_grad():
                self._codes = torch.ops.paredown.quantize_rows(matrix, element)
            self._of, self._key = weakref.ref(x, self._forget), key
        assert self._codes is not None
        return self._codes

    def _forget(self, ref: Any) -> None:
        if ref is self._of:
            self._of = self._codes = None


class RowProduct(torch.autograd.Function):
    """The autograd function for x W^T, with x and W quantized to 8-bit codes; it saves W and the codes of x for backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, element: str, dtype: torch.dtype, given: Any) -> Tensor:
        """Return x W^T, with both quantized to codes of `element`, in `dtype`; `given`: (codes, scales) of x, or None."""
        with torch.autocast(x.device.type, enabled=False):
            codes, scales = given or torch.ops.paredown.quantize_rows(x, element)
            weight_codes, weight_scales = torch.ops.paredown.quantize_rows(weight, element)
            ctx.element, ctx.dtypes = element, (x.dtype, weight.dtype)
            has_grad = weight.requires_grad
            ctx.save_for_backward(codes if has_grad else None, scales if has_grad else None, weight)
            ctx.stands_for = NODE, ("codes", "scales", "weight")
            return torch.ops.paredown.row_product(codes, weight_codes, scales, weight_scales, dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        """Return the gradients of x and W, and None for the other arguments of forward."""
        if torch.is_grad_enabled():
            raise RuntimeError(TWICE)
        codes, scales, weight = ctx.saved_tensors
        of_x, of_weight, ops = None, None, torch.ops.paredown
        with torch.autocast(grad.device.type, enabled=False):
            if ctx.needs_input_grad[0]:
                weight_codes, weight_scales = ops.quantize_rows(weight, ctx.element)
                rows, row_scales = ops.quantize_rows(grad.float() * weight_scales.t(), ctx.element)
                of_x = ops.row_product(rows, weight_codes.t().contiguous(), row_scales, None, ctx.dtypes[0])
            if ctx.needs_input_grad[1]:
                columns, column_scales = ops.quantize_columns(grad, scales, ctx.element)
                of_weight = ops.row_product(columns, ops.transposed_codes(codes), column_scales, None, ctx.dtypes[1])
        return of_x, of_weight, None, None, None


def row_linear(x: Tensor, weight: Tensor, bias: Tensor | None, element: str, shared: SharedCodes | None = None) -> Tensor:
    """Return F.linear(x, weight, bias) computed by products of 8-bit codes, in the dtype that F.linear returns.

    `element`: "int8" or "e4m3fn". Both sizes of `weight` must be multiples of MULTIPLE. `shared`: a cache for layers with the same input.
    """
    device = x.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else torch.promote_types(x.dtype, weight.dtype)
    matrix = x.reshape(-1, x.shape[-1])
    given = shared.codes(x, matrix, element) if shared is not None else None
    product: Tensor = RowProduct.apply(matrix, weight, element, dtype, given)  # type: ignore[assignment]
    y = product.view(*x.shape[:-1], weight.shape[0])
    return y if bias is None else y + bias.to(dtype)


@cache
def reason_without(element: str, device: torch.device) -> str:
    """Return a sentence which says why `device` cannot multiply codes in `element`; "" if it can."""
    needed, (other,) = CAPABILITIES[element], [name for name in ELEMENTS if name != element]
    if device.type == "cpu":
        return ""
    have = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    if have is not None and have >= needed:
        return ""
    text = f", and it has {have[0]}.{have[1]}" if have else ""
    return NO_INSTRUCTIONS.format(device=device, element=element, needed=".".join(map(str, needed)), have=text, other=other)
