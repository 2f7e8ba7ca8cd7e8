"""`encode` quantizes a tensor into a `PackedTensor`, `PackedTensor.decode()` dequantizes it, `round_trip` does both.

    x (3, 100) float32, 1200 bytes  --encode("int4/64@bf16")-->  codes (3, 50) uint8 + scales (3, 2) bf16, 162 bytes

A tensor is packed and decoded in its memory order if it is dense in that order and takes the same bytes (channels_last stays so and is
never transposed). A tensor with gaps, or transposed so that its rows would differ, is copied first, and decodes to a contiguous one.
`order="logical"` packs in the order of the dimensions, which optimizer state and weights need.

Values that are not finite, or past the largest value:
* NaN and inf in a block make the scale of that block NaN: all of it decodes to NaN. Without a block they become the element's
  NaN and inf; inf saturates under overflow="saturate". -0.0 is kept if the element has it (not in fnuz and integers).
* An element with neither inf nor NaN and no block (int8, e2m1fn) has no code for them: `encode` raises CodecError for NaN, and for values
  past the largest unless overflow="saturate"; `round_trip`, which returns ordinary tensors, returns inf and NaN.
* A value below zero in uintN without a minimum overflows, and makes the scale of its block NaN unless overflow="saturate".
* Empty and 0-d tensors pack like any other. float16 results saturate at 65504; values above half of float32's largest that are rounded
  up in a block may become inf.

>>> p = encode(torch.linspace(-1, 1, 300).view(3, 100), "int4/64@bf16")
>>> p
PackedTensor(int4/64@bf16, shape=(3, 100), float32 on cpu, 162 bytes, 7.4x smaller)
>>> p.decode().shape
torch.Size([3, 100])
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, final

import torch
from torch import Tensor

from paredown.codec import backend, cpu
from paredown.codec.reference import COVER, OCP, Encoding, PackedParts, tensor_scale_of
from paredown.errors import CodecError
from paredown.formats.catalog import find_format
from paredown.formats.format import Format
from paredown.formats.rounding import Overflow, Rounding, Seed

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
DEVICES = ("cpu", "cuda")
GIVEN = "given"
FLAT = (0,)
PART_NAMES = ("codes", "scales", "minimums", "tensor_scale")


@dataclass(frozen=True, eq=False, repr=False)
class PackedTensor:
    """A tensor stored in a format: codes and scales, and the shape, dtype and memory order to which it is decoded."""

    format: Format
    shape: torch.Size
    dtype: torch.dtype
    order: tuple[int, ...]  # dimensions from the outermost to the innermost in memory
    parts: PackedParts

    @property
    def codes(self) -> Tensor:
        """The packed codes, (rows, row_bytes) uint8."""
        assert self.parts.codes is not None
        return self.parts.codes

    @property
    def scales(self) -> Tensor | None:
        """The scale of each block, (rows, blocks), as stored; None for a format without scales."""
        return self.parts.scales

    @property
    def minimums(self) -> Tensor | None:
        """The minimum of each block, (rows, blocks); None for a format without minimums."""
        return self.parts.minimums

    @property
    def tensor_scale(self) -> Tensor | None:
        """The float32 number that multiplies all block scales, if those are 8-bit floats; else None."""
        return self.parts.tensor_scale

    @property
    def device(self) -> torch.device:
        """The device on which the codes are."""
        return self.codes.device

    @property
    def nbytes(self) -> int:
        """The bytes of codes, scales and minimums; equal to `format.nbytes(shape)`."""
        return sum(t.nbytes for t in self.parts.tensors())

    def decode(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return the decoded values in `dtype`, or the encoded tensor's dtype for None, and in its memory order."""
        if dtype is not None and dtype not in DTYPES:
            raise CodecError(f"decode returns float32, bfloat16 or float16, not {dtype}: decode to float32 and convert the result.")
        out = torch.empty([self.shape[d] for d in self.order], dtype=dtype or self.dtype, device=self.device)
        encoding = Encoding(self.format, Rounding.NEAREST_EVEN, Overflow.SATURATE)
        rows = out.view(self.format.rows_and_cols(out.shape))
        backend.codec_for(out, encoding, "decode").decode_rows(self.parts, encoding, rows)
        return out if self.order == FLAT else out.permute(_inverse(self.order))

    def to(self, device: torch.device | str | int) -> PackedTensor:
        """Return the same packed tensor on `device`."""
        if isinstance(device, torch.dtype):
            raise CodecError(f"a packed tensor moves between devices; for values in {device}, call p.decode({device}).")
        return self.mapped(lambda part: part.to(device))

    def mapped(self, function: Callable[[Tensor], Tensor]) -> PackedTensor:
        """Return a packed tensor of the same format and shape whose codes, scales and minimums are `function` of this one's."""
        return replace(self, parts=self.parts.mapped(function))

    def state_dict(self) -> dict[str, Any]:
        """Return a dict of codes, scales and minimums as ordinary tensors, and of the rest as JSON text under "header".

        It can be saved by torch.save, or by safetensors, with the header in the metadata.
        """
        tensors = dict(zip(PART_NAMES, self.parts.all(), strict=True))
        dtype = str(self.dtype).removeprefix("torch.")
        header = {"format": self.format.to_json(), "shape": list(self.shape), "dtype": dtype, "order": list(self.order)}
        return {"header": json.dumps(header), **{name: t for name, t in tensors.items() if t is not None}}

    @staticmethod
    def from_state_dict(state: Mapping[str, Any]) -> PackedTensor:
        """Return the packed tensor whose `state_dict()` is `state`; raise CodecError for any other value."""
        if "header" not in state or "codes" not in state:
            raise CodecError(
                f"the state of a packed tensor has 'header' and 'codes'; this one has {sorted(state)}. Give what state_dict() returned."
            )
        tensors = [state.get(name) for name in PART_NAMES]
        if any(t is not None and not isinstance(t, Tensor) for t in tensors):
            raise CodecError(f"{', '.join(PART_NAMES)} are tensors; these are {[type(t).__name__ for t in tensors]}.")
        packed = _from_header(state["header"], PackedParts(*tensors).mapped(Tensor.contiguous))
        _check_parts(packed)
        return packed

    def __repr__(self) -> str:
        plain = self.shape.numel() * self.dtype.itemsize
        ratio = f", {plain / self.nbytes:.1f}x smaller" if 0 < self.nbytes <= plain else ""
        dtype = str(self.dtype).removeprefix("torch.")
        return f"PackedTensor({self.format}, shape={tuple(self.shape)}, {dtype} on {self.device}, {self.nbytes} bytes{ratio})"


def encode(
    x: Tensor,
    format: Format | str,
    *,
    rounding: Rounding | str = Rounding.NEAREST_EVEN,
    overflow: Overflow | str | None = None,
    seed: Seed | int = 0,
    scales: PackedTensor | Tensor | str = COVER,
    order: str = "memory",
) -> PackedTensor:
    """Return `x` packed in `format`.

    `overflow` defaults to NONFINITE without a block or for uintN without a minimum, and to SATURATE otherwise. `seed` is used by stochastic
    rounding only; pass a different one for each tensor and step: Seed(value, tensor=, step=). `scales`: "cover" (no value overflows),
    "ocp" (the rule of the OCP standard, for e8m0 scales), or a packed tensor, or its `.scales`, whose scales are reused. `order`: "memory"
    packs dense tensors in the order of their strides, "logical" packs all in the order of their dimensions.
    """
    _check_tensor(x, "encode")
    if x.requires_grad and torch.is_grad_enabled():
        raise CodecError(
            "encode stores numbers and passes no gradient, but x requires one. Encode x.detach(), or call it under "
            "torch.no_grad(); round_trip(x, ...) passes gradients straight through."
        )
    encoding = _encoding(format, rounding, overflow, seed, scales)
    dims = _dims(x, encoding, scales, order)
    rows = _as_rows(x, dims)
    given = _given_parts(x, rows, encoding, scales)
    _check_representable(rows, encoding)
    parts = backend.codec_for(rows, encoding, "encode").encode_rows(rows, encoding, given)
    return PackedTensor(encoding.format, x.shape, x.dtype, dims, parts)


def encode_flat(x: Tensor, format: Format, rounding: Rounding, overflow: Overflow | None, seed: Seed) -> PackedTensor:
    """Return `x`, which must be flat and contiguous, packed in `format`, as `encode` does, without checking arguments.

    It saves time, since it is called for many tensors in each step.
    """
    if format.block is None or format.has_tensor_scale:
        return encode(x, format, rounding=rounding, overflow=overflow, seed=seed)
    encoding = Encoding(format, rounding, overflow or default_overflow(format), seed)
    parts = backend.codec_for(x, encoding, "encode").encode_rows(x.view(1, -1), encoding, None)
    return PackedTensor(format, x.shape, x.dtype, FLAT, parts)


class FlatCodec(ABC):
    """An encoder and decoder for all flat tensors of one size, dtype and device, which are prepared once.

    Only the same codec can decode what its `encode` returned.
    """

    __slots__ = ("dtype", "format", "nbytes", "numel")
    takes_address = False  # whether `encode` reads values from the address of `x` on, whatever its shape; otherwise `x` is flat

    def __init__(self, numel: int, dtype: torch.dtype, format: Format) -> None:
        self.numel, self.dtype, self.format = numel, dtype, format
        self.nbytes = format.nbytes((numel,))  # of codes, scales and minimums

    @abstractmethod
    def encode(self, x: Tensor, step: Any, bits: Tensor | None = None) -> Any:
        """Return `x` encoded, in a form that only this codec decodes.

        `step`: the training step, which selects random bits: a number, or one int32 on the device of `x`.
        `bits`: a tensor to fill with a mask, one bit per value of `x`, 1 for values above 0; only codecs with `takes_address` do that.
        """

    @abstractmethod
    def decode(self, stored: Any, size: tuple[int, ...], stride: tuple[int, ...]) -> Tensor:
        """Return the decoded values of `stored`, which `encode` returned, in a new tensor of this size and stride."""

    @abstractmethod
    def packed(self, stored: Any) -> PackedTensor:
        """Return `stored`, which `encode` returned, as a flat packed tensor."""

    def recompute(self, stored: Any, steps: Any, dtype: torch.dtype, layout: tuple[tuple[int, ...], tuple[int, ...]]) -> Tensor:
        """Return the output of `steps` (`DecodeSteps`: a norm and an activation function) on the values decoded from `stored`.

        It is a new dense tensor of `layout` (sizes, strides). Only codecs with `takes_address` have this method.
        """
        raise NotImplementedError


@final
class PlainCodec(FlatCodec):
    """The `FlatCodec` for devices and formats that have no kernels for it: what its `encode` returns is a `PackedTensor`."""

    __slots__ = ("_how", "_seed")

    def __init__(self, numel: int, dtype: torch.dtype, format: Format, how: tuple[Rounding, Overflow | None], seed: Seed) -> None:
        super().__init__(numel, dtype, format)
        self._how, self._seed = how, seed

    def encode(self, x: Tensor, step: Any, bits: Tensor | None = None) -> PackedTensor:
        """Return `x`, which must be flat and contiguous, encoded with the random bits of training step `step`."""
        return encode_flat(x, self.format, *self._how, Seed(self._seed.value, self._seed.tensor, step))

    def decode(self, stored: PackedTensor, size: tuple[int, ...], stride: tuple[int, ...]) -> Tensor:
        """Return the decoded values as a tensor with these sizes and strides."""
        return stored.decode().as_strided(size, stride)

    def packed(self, stored: PackedTensor) -> PackedTensor:
        """Return the stored tensor itself."""
        return stored


def flat_codec(like: Tensor, numel: int, format: Format, how: tuple[Rounding, Overflow | None], seed: Seed) -> FlatCodec:
    """Return the codec for flat tensors of `numel` values with the dtype and device of `like`.

    `how`: rounding and overflow; an overflow of None is the format's default.
    """
    kernels = backend.find_kernels() if like.is_cuda else None
    if kernels is None or format.block is None or not kernels.covers_recompute(format):
        return PlainCodec(numel, like.dtype, format, how, seed)
    codec: FlatCodec = kernels.BufferCodec(numel, like.dtype, format, (how[0], how[1] or default_overflow(format)), seed)
    return codec


def decoder(packed: PackedTensor) -> Callable[[Tensor], Tensor]:
    """Return a function that writes the values of `packed` into its argument, a contiguous tensor of the same shape.

    What depends on size and format is computed here, once. If codes later change in place, the function reads the new ones.
    """
    if packed.order not in (FLAT, tuple(range(len(packed.shape)))):
        raise CodecError(
            f"decoder takes a tensor packed in the order of its dimensions, not in {packed.order}: encode it with order='logical'."
        )
    encoding = Encoding(packed.format, Rounding.NEAREST_EVEN, Overflow.SATURATE)
    codec = backend.codec_for(packed.codes, encoding, "decode")
    return codec.decoder(packed.parts, encoding, *packed.format.rows_and_cols(packed.shape))


def round_trip(
    x: Tensor,
    format: Format | str,
    *,
    rounding: Rounding | str = Rounding.NEAREST_EVEN,
    overflow: Overflow | str | None = None,
    seed: Seed | int = 0,
    scales: PackedTensor | Tensor | str = COVER,
    order: str = "memory",
) -> Tensor:
    """Return decode(encode(x)), `x` rounded to values of `format`, in its dtype; the gradient passes unchanged."""
    _check_tensor(x, "round_trip")
    encoding = _encoding(format, rounding, overflow, seed, scales)
    dims = _dims(x, encoding, scales, order)
    return _StraightThrough.apply(x, encoding, dims, scales)  # type: ignore[no-any-return]


class _StraightThrough(torch.autograd.Function):
    """The autograd function that rounds a tensor in forward and passes the gradient unchanged in backward."""

    @staticmethod
    def forward(x: Tensor, encoding: Encoding, dims: tuple[int, ...], scales: PackedTensor | Tensor | str) -> Tensor:
        rows = _as_rows(x, dims)
        out = torch.empty_like(rows)
        given = _given_parts(x, rows, encoding, scales)
        backend.codec_for(rows, encoding, "round_trip").round_trip_rows(rows, encoding, given, out)
        return out.view([x.shape[d] for d in dims]).permute(_inverse(dims))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        return grad, None, None, None


def memory_order(x: Tensor, format: Format, order: str = "memory") -> tuple[int, ...]:
    """Return the dimensions of `x` in the order in which `encode` packs them, the outermost first.

    It is the order of the strides if `x` is dense and takes the same bytes of the format in that order, and 0, 1, 2, ... otherwise.
    """
    if order not in ("memory", "logical"):
        raise CodecError(f"order is 'memory' or 'logical', not {order!r}.")
    logical = tuple(range(x.ndim))
    if order == "logical" or x.is_contiguous():
        return logical
    dims = tuple(sorted(logical, key=lambda d: -x.stride(d)))
    same_bytes = format.nbytes([x.shape[d] for d in dims]) == format.nbytes(x.shape)
    return dims if same_bytes and x.permute(dims).is_contiguous() else logical


def _dims(x: Tensor, encoding: Encoding, scales: PackedTensor | Tensor | str, order: str) -> tuple[int, ...]:
    """Return the order of dimensions in which to pack `x`: that of the packed tensor `scales`, or else by `order`."""
    if not isinstance(scales, PackedTensor):
        return memory_order(x, encoding.format, order)
    if scales.format != encoding.format or scales.shape != x.shape or scales.device != x.device:
        raise CodecError(
            f"scales are those of {scales!r}, which does not fit {encoding.format} of shape {tuple(x.shape)} on {x.device}."
        )
    return scales.order


def _as_rows(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    """Return `x` as a contiguous (rows, cols) tensor after permuting its dimensions to `dims`: a view if possible."""
    x = x.detach()
    if not x.is_contiguous() or dims != tuple(range(x.ndim)):
        x = x.permute(dims).contiguous()
    return x.view(Format.rows_and_cols(x.shape))


def _from_header(text: Any, parts: PackedParts) -> PackedTensor:
    """Return the packed tensor that `text` (JSON, from `state_dict`) describes, made of `parts`, which are not checked yet."""
    try:
        header = json.loads(text)
        dtypes = {str(d).removeprefix("torch."): d for d in DTYPES}
        shape, order = torch.Size(header["shape"]), tuple(int(d) for d in header["order"])
        packed = PackedTensor(Format.from_json(header["format"]), shape, dtypes[header["dtype"]], order, parts)
    except (KeyError, TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise CodecError(f"the header {text!r} does not describe a packed tensor: {type(error).__name__}: {error}.") from None
    if any(n < 0 for n in shape) or sorted(order) != list(range(len(shape))):
        raise CodecError(
            f"the header {text!r} has dimensions {order}, which is no permutation of the {len(shape)} dimensions of shape {tuple(shape)}."
        )
    return packed


def _check_parts(packed: PackedTensor) -> None:
    """Raise CodecError if codes, scales or minimums do not have the shapes, dtypes or device that format and shape imply."""
    format, device = packed.format, torch.device("meta")
    rows, cols = format.rows_and_cols([packed.shape[d] for d in packed.order])
    tensor_scale = torch.empty((), device=device) if format.has_tensor_scale else None
    expected = Encoding(format, Rounding.NEAREST_EVEN, Overflow.SATURATE).empty_parts(
        rows, cols, device=device, tensor_scale=tensor_scale
    )
    if len({t.device for t in packed.parts.tensors()}) > 1:
        raise CodecError(f"the tensors are on {[str(t.device) for t in packed.parts.tensors()]}: they belong on one device.")
    for name, actual, wanted in zip(PART_NAMES, packed.parts.all(), expected.all(), strict=True):
        described = [None if t is None else (tuple(t.shape), str(t.dtype)) for t in (actual, wanted)]
        if described[0] != described[1]:
            raise CodecError(
                f"{name} is {described[0]}, but {format} of shape {tuple(packed.shape)} has {described[1]}: "
                "the header and the tensors do not belong together."
            )


def _inverse(order: tuple[int, ...]) -> list[int]:
    return [order.index(d) for d in range(len(order))]


def _encoding(
    format: Format | str, rounding: Rounding | str, overflow: Overflow | str | None, seed: Seed | int, scales: Any
) -> Encoding:
    if not isinstance(scales, str | Tensor | PackedTensor):
        raise CodecError(f"scales are 'cover', 'ocp', a PackedTensor or its scales, not {type(scales).__name__}.")
    format = find_format(format)
    try:
        rounding, overflow = Rounding(rounding), default_overflow(format) if overflow is None else Overflow(overflow)
    except ValueError as error:
        allowed = f"rounding: {', '.join(r.value for r in Rounding)}; overflow: {', '.join(o.value for o in Overflow)}"
        raise CodecError(f"{error}. Allowed are {allowed}.") from None
    rule = scales if isinstance(scales, str) else GIVEN
    encoding = _checked_encoding(str(format), rounding, overflow, rule)
    return replace(encoding, seed=seed if isinstance(seed, Seed) else Seed(seed))


@lru_cache(maxsize=1024)
def _checked_encoding(text: str, rounding: Rounding, overflow: Overflow, rule: str) -> Encoding:
    format = Format.parse(text)  # keyed by text, since equal formats may have different names
    ocp_fits = format.scale is not None and format.scale.name == "e8m0" and format.minimum is None
    if rule not in (COVER, OCP, GIVEN) or (rule == OCP and not ocp_fits):
        allowed = "'cover', 'ocp' (for e8m0 scales without a minimum), a PackedTensor or its scales"
        raise CodecError(f"scales={rule!r} with {format}: allowed are {allowed}.")
    if rule == GIVEN and format.block is None:
        raise CodecError(f"scales were given, but {format} has no block to scale.")
    return Encoding(format, rounding, overflow, rule=rule)


def default_overflow(format: Format) -> Overflow:
    """Return a format's default overflow: SATURATE with blocks, whose scales cover all values, else NONFINITE.

    uintN without a minimum, which may receive negative values, has NONFINITE too.
    """
    return Overflow.SATURATE if format.block and (format.element.signed or format.minimum) else Overflow.NONFINITE


def _given_parts(x: Tensor, rows: Tensor, encoding: Encoding, scales: PackedTensor | Tensor | str) -> PackedParts | None:
    """Return the scales that the caller passed to `encode`, after checking them; None if `encode` must choose them.

    For a format with one more scale for the whole tensor, that one is computed and returned. `rows`: `x` as (rows, cols).
    """
    format = encoding.format
    if isinstance(scales, str):
        if not format.has_tensor_scale:
            return None
        largest = backend.codec_for(rows, None, "largest_finite").largest_finite(rows)
        return PackedParts(tensor_scale=tensor_scale_of(largest, format))
    if isinstance(scales, PackedTensor):
        return replace(scales.parts, codes=None).mapped(Tensor.contiguous)
    if format.minimum or format.has_tensor_scale:
        raise CodecError(f"{format} has more than block scales: give the PackedTensor itself, scales=p instead of scales=p.scales.")
    expected = encoding.empty_parts(*rows.shape, device=torch.device("meta"), tensor_scale=None).scales
    assert expected is not None
    if scales.shape != expected.shape or scales.dtype != expected.dtype or scales.device != x.device:
        raise CodecError(
            f"scales are {tuple(scales.shape)} {scales.dtype} on {scales.device}; {format} of shape {tuple(x.shape)} "
            f"needs {tuple(expected.shape)} {expected.dtype} on {x.device}."
        )
    return PackedParts(scales=scales.contiguous())


def _check_tensor(x: Tensor, verb: str) -> None:
    if not isinstance(x, Tensor):
        raise CodecError(f"{verb} takes a tensor, not {type(x).__name__}.")
    if x.layout is not torch.strided or x.is_nested or x.device.type not in DEVICES:
        raise CodecError(
            f"{verb} takes dense tensors on {' or '.join(DEVICES)}, not {x.layout} on {x.device}: move with x.cpu() or x.to_dense()."
        )
    if x.dtype not in DTYPES:
        raise CodecError(f"{verb} takes float32, bfloat16 or float16, not {x.dtype}: convert with x.float() if that is meant.")


def _check_representable(rows: Tensor, encoding: Encoding) -> None:
    """Raise CodecError if a value in `rows` has no code in the format, such as NaN in an element without NaN."""
    element = encoding.format.element
    if encoding.format.block or element.nan_code is not None or rows.numel() == 0:
        return
    low, high = (end.float().item() for end in torch.aminmax(rows))  # NaN if any value is
    if encoding.rounding is Rounding.STOCHASTIC and encoding.overflow is Overflow.NONFINITE:
        is_representable = element.min_value <= low and high <= element.max_value  # a value past the largest may be rounded up
    else:
        ends = torch.tensor([[low, high]])
        is_representable = bool(cpu.round_trip_rows(ends, encoding, None, torch.empty_like(ends)).isfinite().all())
    if is_representable:
        return
    what = "NaN" if low != low else f"values from {low:g} to {high:g}"
    remedy = "" if low != low else " overflow='saturate' clamps them, or"
    raise CodecError(
        f"x holds {what}, but {element} represents {element.min_value:g} to {element.max_value:g} and has no code for inf or NaN:{remedy} "
        f"use a block, whose scale adapts to the values and can be NaN: {element if element.width > 1 else 'int2'}/64@bf16."
    )
