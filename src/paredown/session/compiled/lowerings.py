"""Tells Inductor how to compile this library's operations, such as `paredown::encode` and `paredown::decode`.

Decode and unpack are pointwise operations, which it fuses into their readers. Each value is computed from its place i, in the layout of
codec/reference.py:

    decode        code(i) * scale(i // block) + minimum(i // block)
    unpack_bits   (bits(i // 8) >> i % 8) & 1

The same arithmetic in aten operations is some twenty nodes for each saved tensor. Inductor visits every node several times, and composes
the indices of every view: backward of ResNet-50 in 4 bits would have 4,765 nodes, and has 3,231 (2,325 without packing).

Encode is buffers for the parts, and a call of the codec from the code that Inductor writes, here of the Triton kernels:

    codes, scales = empty_strided_cuda(...), empty_strided_cuda(...)
    paredown_encode_1f0c(x, step, codes, scales)

The function is one of this module's `encoder`, and launches compiled kernels, as the code does with kernels of its own. Through torch's
dispatcher the same launch takes two to three times as long on the host, and a step has one for each saved tensor. A kernel that Inductor
itself launches (torch.library.wrap_triton) would have the same host time; Inductor parses it again for every call, though, to find out
which tensors it writes to, and compiling takes longer. The arithmetic in aten operations would compile longer still, and its codes differ
from the reference where Inductor fuses multiply and add (docs/decisions/036-compiled-loops-on-the-cpu.md).
"""

# pyright: reportAttributeAccessIssue=false, reportArgumentType=false
# pyright: reportIncompatibleMethodOverride=false

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, final
from zlib import crc32

import torch
from torch import Tensor
from torch._inductor import virtualized
from torch._inductor.codegen.common import BackendFeature
from torch._inductor.ir import ExternKernel, MutationOutput, NoneLayout, Pointwise
from torch._inductor.lowering import empty_strided, fallback_handler, permute, register_lowering, to_dtype, view
from torch._inductor.ops_handler import OpCounterCSE
from torch._inductor.virtualized import V
from torch.utils._ordered_set import OrderedSet
from torch.utils._sympy.functions import FloorDiv, ModularIndexing

from paredown.codec import backend, graph_codec
from paredown.codec.products import ELEMENTS, MULTIPLE
from paredown.formats.element import ElementKind
from paredown.formats.format import Format

SCALES = ("fp32", "bf16")  # of formats that `paredown::decode` stands for
OPERATOR = torch.ops.paredown.encode.default
COLUMNS, TRANSPOSED = torch.ops.paredown.quantize_columns.default, torch.ops.paredown.transposed_codes.default
_through_dispatcher = {
    operation: fallback_handler(operation, add_to_fallback_set=False) for operation in (OPERATOR, COLUMNS, TRANSPOSED)
}


# --- decode ---------------------------------------------------------------------------------------------------------------------------


def lowers(format: Format, numel: Any, dtype: torch.dtype) -> bool:
    """Return whether `decode` in this module can lower a format: integers in whole blocks, decoded to float32 or bfloat16."""
    if format.block is None or format.scale is None or format.scale.name not in SCALES or dtype is torch.float16:
        return False
    is_integer = format.element.kind in (ElementKind.INT, ElementKind.UINT)
    return is_integer and isinstance(numel, int) and numel % format.block == 0


@register_lowering(torch.ops.paredown.decode.default, type_promotion_kind=None)
def decode(parts: Sequence[Any], format: str, dtype: torch.dtype, *layout: Any) -> Any:
    """Lower `paredown::decode` to a pointwise operation, which Inductor fuses with the operations that read its result.

    `parts`: codes, scales and minimums. `layout`: the sizes in memory order and the dimensions by which they are permuted.
    """
    how = Format.parse(format)
    load, code = parts[0].make_loader(), _code_loader(parts[0], how)
    of_block = [part.make_loader() for part in parts[1:]]

    def value(i: Any) -> Any:
        if _counts_operations():
            return load([i])
        scale, *minimum = (virtualized.ops.to_dtype(load([FloorDiv(i, how.block)]), torch.float32) for load in of_block)
        result = virtualized.ops.mul(virtualized.ops.to_dtype(code(i), torch.float32), scale)
        return virtualized.ops.to_dtype(virtualized.ops.add(result, minimum[0]) if minimum else result, dtype)

    result = _pointwise(parts[0], dtype, value, *layout)
    if how.element.width < 8 and parts[0].get_device().type == "cpu":
        result.realize()  # Inductor vectorizes no reader that finds a code within a byte (docs/decisions/036)
    return result


@register_lowering(torch.ops.paredown.unpack_bits.default, type_promotion_kind=None)
def unpack_bits(bits: Any, *layout: Any) -> Any:
    """Lower `paredown::unpack_bits`, which unpacks a mask with eight booleans in each byte, to a pointwise operation."""
    load = bits.make_loader()

    def value(i: Any) -> Any:
        if _counts_operations():
            return load([i])
        field = _shifted(virtualized.ops.to_dtype(load([FloorDiv(i, 8)]), torch.int32), ModularIndexing(i, 1, 8))
        return virtualized.ops.ne(virtualized.ops.bitwise_and(field, _int(1)), _int(0))

    return _pointwise(bits, torch.bool, value, *layout)


def _counts_operations() -> bool:
    """Return whether Inductor is now counting the operations and reads of a value, rather than generating code.

    A decoded tensor counts as one read, as the tensor itself does in a step without packing. Reads of scales, which are small, would
    else make Inductor write normalized values to memory, in float32.
    """
    return isinstance(V.get_ops_handler(), OpCounterCSE)


def _code_loader(codes: Any, format: Format) -> Callable[[Any], Any]:
    """Return a function that loads the code at the index of a value, as an integer of any width."""
    load, width, is_signed = codes.make_loader(), format.element.width, format.element.kind is ElementKind.INT
    if width == 8:
        return lambda i: virtualized.ops.to_dtype(load([i]), torch.int8) if is_signed else load([i])
    per_byte = 8 // width

    def code(i: Any) -> Any:
        lane: Any = ModularIndexing(i, 1, per_byte)
        first_bit = width * lane
        word = virtualized.ops.to_dtype(load([FloorDiv(i, per_byte)]), torch.int32)
        if not is_signed:
            return virtualized.ops.bitwise_and(_shifted(word, first_bit), _int((1 << width) - 1))
        highest = virtualized.ops.bitwise_left_shift(word, virtualized.ops.index_expr((32 - width) - first_bit, torch.int32))
        return virtualized.ops.bitwise_right_shift(highest, _int(32 - width))

    return code


def _shifted(word: Any, shift: Any) -> Any:
    return virtualized.ops.bitwise_right_shift(word, virtualized.ops.index_expr(shift, torch.int32))


def _int(number: int) -> Any:
    return virtualized.ops.constant(number, torch.int32)


def _pointwise(source: Any, dtype: torch.dtype, value: Callable[[Any], Any], sizes: Sequence[int], dims: Sequence[int]) -> Any:
    """Return an operation that computes `value(i)` for each index, as a tensor of `sizes` permuted by `dims`."""
    ranges: Any = [prod(sizes)]
    flat = Pointwise.create(device=source.get_device(), dtype=dtype, inner_fn=lambda index: value(index[0]), ranges=ranges)
    return permute(view(flat, sizes), dims)


# --- casts ----------------------------------------------------------------------------------------------------------------------------


@register_lowering(torch.ops.paredown.cast_all.default, type_promotion_kind=None)
def cast_all(tensors: Sequence[Any], dtype: torch.dtype) -> list[Any]:
    """Lower `paredown::cast_all` to a pointwise operation for each tensor, and on a GPU one kernel for all of them."""
    results = [to_dtype(tensor, dtype) for tensor in tensors]
    if V.graph.has_feature(results[0].get_device(), BackendFeature.FOREACH):
        for result in results:
            result.realize()
        V.graph.register_operation_list([result.get_operation_name() for result in results])
    return results


@register_lowering(torch.ops.paredown.in_memory.default, type_promotion_kind=None)
def in_memory(x: Any) -> Any:
    """Lower `paredown::in_memory`: return `x`, which is then written to memory once for all operations that read it."""
    x.realize()
    return x


# --- encode ---------------------------------------------------------------------------------------------------------------------------


def encoder(*arguments: Any) -> Callable[..., None]:
    """Return a function f(x, step, codes, scales, [minimums]) that encodes the memory of `x` into codes, scales and minimums.

    `arguments`: the number of values, whether they are on a GPU, and the arguments of `paredown::encode` after its tensors.
    """
    kernels = graph_codec.flat_encoder(*arguments)
    if kernels is not None:
        return kernels.encode_into

    def encode_into(x: Tensor, step: Tensor, *parts: Tensor) -> None:
        flat = x.as_strided((x.numel(),), (1,))
        for part, value in zip(parts, graph_codec.encode_flattened(flat, step, *arguments[2:]), strict=True):
            part.copy_(value)

    return encode_into


@register_lowering(OPERATOR, type_promotion_kind=None)
def encode(x: Any, step: Any, order: Sequence[int], *options: Any) -> Any:
    """Lower `paredown::encode` to a call that writes the buffers [codes, scales] or [codes, scales, minimums].

    The call reads the memory of `x`. If the layout of `x` is still open, its dimensions are laid out in `order`; otherwise it is copied.
    """
    sizes = x.get_size()
    if not _is_known(sizes):
        return _through_dispatcher[OPERATOR](x, step, order, *options)
    numel, strides = 1, [0] * len(sizes)
    for d in reversed(order):
        strides[d], numel = numel, numel * int(sizes[d])
    device = x.get_device()
    parts = [_empty(device, dtype, count) for count, dtype in graph_codec.part_kinds(numel, *options[:3])]
    x.realize()
    source = ExternKernel.require_exact_strides(x, strides)
    KernelCall("encoder", (numel, device.type == "cuda", *options), [source, step], parts)
    return parts


# --- products of 8-bit codes ----------------------------------------------------------------------------------------------------------


def column_quantizer(*sizes: Any) -> Callable[..., None]:
    """Return the function that generated code calls to quantize the columns of a matrix, f(g, factors, codes, scales)."""
    kernels = backend.find_kernels()
    assert kernels is not None
    return kernels.column_quantizer(*sizes)


def transposer(rows: int, columns: int) -> Callable[..., None]:
    """Return the function that generated code calls to transpose a matrix of codes, f(codes, out)."""
    kernels = backend.find_kernels()
    assert kernels is not None
    return kernels.transposer(rows, columns)


def _has_kernels(x: Any) -> bool:
    return _is_known(x.get_size()) and x.get_device().type == "cuda" and backend.find_kernels() is not None


@register_lowering(COLUMNS, type_promotion_kind=None)
def quantize_columns(g: Any, factors: Any, element: str) -> Any:
    """Lower `paredown::quantize_columns` to a call of its kernel where it has one; return the buffers [codes, scales]."""
    if not _has_kernels(g):
        return _through_dispatcher[COLUMNS](g, factors, element)
    (rows, columns), device = map(int, g.get_size()), g.get_device()
    padded = -(-rows // MULTIPLE) * MULTIPLE
    parts = [_empty(device, ELEMENTS[element], columns, padded), _empty(device, torch.float32, columns, 1)]
    inputs = [ExternKernel.require_contiguous(ExternKernel.realize_input(x)) for x in (g, factors)]
    KernelCall("column_quantizer", (rows, columns, columns, element), inputs, parts)
    return parts


@register_lowering(TRANSPOSED, type_promotion_kind=None)
def transposed_codes(codes: Any) -> Any:
    """Lower `paredown::transposed_codes`, a transpose of 8-bit codes, to a call of its kernel where it has one.

    Torch 2.13 would not make the call by itself, because the operation has a decomposition too.
    """
    source = ExternKernel.require_contiguous(ExternKernel.realize_input(codes))
    if not _has_kernels(codes):
        return _through_dispatcher[TRANSPOSED](source)
    rows, columns = map(int, codes.get_size())
    out = _empty(codes.get_device(), codes.get_dtype(), columns, -(-rows // MULTIPLE) * MULTIPLE)
    KernelCall("transposer", (rows, columns), [source], [out])
    return out


# --- calls of kernels -----------------------------------------------------------------------------------------------------------------


def _is_known(sizes: Sequence[Any]) -> bool:
    """Return whether all sizes are numbers, so that generated code can call a kernel directly."""
    return not V.graph.cpp_wrapper and all(getattr(size, "is_Integer", isinstance(size, int)) for size in sizes)


def _empty(device: Any, dtype: torch.dtype, *size: int) -> Any:
    return empty_strided(list(size), [prod(size[i + 1 :]) for i in range(len(size))], dtype=dtype, device=device)


@final
class KernelCall(ExternKernel):
    """Makes Inductor's generated code call a function on `inputs` and on `outputs`, the buffers that the function writes.

    The function is what `make(*arguments)` returns, where `make` names a function of this module.
    """

    def __init__(self, make: str, arguments: tuple[Any, ...], inputs: list[Any], outputs: list[Any]) -> None:
        self.make, self.arguments, self.device = make, arguments, outputs[0].get_device()
        tensors = self.unwrap_storage([self.realize_input(tensor) for tensor in (*inputs, *outputs)])
        super().__init__(None, NoneLayout(device=self.device), tensors)
        self.mutation_outputs = [MutationOutput(NoneLayout(device=self.device), out, self) for out in tensors[len(inputs) :]]
        V.graph.register_operation(self)

    def codegen(self, wrapper: Any) -> None:
        """Write the call into the generated code."""
        name = f"paredown_{self.make}_{crc32(repr(self.arguments).encode()):08x}"
        wrapper.add_import_once(f"from {__name__} import {self.make}")
        wrapper.add_import_once(f"{name} = {self.make}{self.arguments!r}")
        tensors = ", ".join(tensor.codegen_reference() for tensor in self.inputs)
        wrapper.writeline(f"{name}({tensors})")

    def get_outputs(self) -> list[Any]:
        """Return the buffers that this call writes."""
        return list(self.mutation_outputs)

    def get_device(self) -> torch.device | None:
        """Return the device of the tensors."""
        return self.device

    def should_allocate(self) -> bool:
        """Return False, since the buffers are allocated already."""
        return False

    def get_unbacked_symbol_defs(self) -> OrderedSet[Any]:
        """Return the empty set, since all sizes are known."""
        return OrderedSet()
