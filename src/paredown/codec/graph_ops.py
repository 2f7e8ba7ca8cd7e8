"""Operations of torch for compiled graphs: `paredown::encode`, `paredown::decode` and `paredown::unpack_bits`.

`encode` runs the Triton kernels, on a GPU, which compiled code launches without an operator (session/compiled/lowerings.py). Its
codes have the layout of the reference, and the step of the random bits is a tensor, which the kernel reads when it runs. The other two
stand for the functions of graph_codec.py, each in one node: Inductor fuses them into their readers (session/compiled/lowerings.py),
and a graph of some twenty nodes for each would take longer to compile.
"""

from __future__ import annotations

from functools import lru_cache
from math import prod
from typing import Any

import torch
from torch import Tensor

from paredown.codec import backend
from paredown.codec.graph_codec import decode_in_graph, unpack_mask_in_graph
from paredown.codec.packed import encode_flat
from paredown.codec.reference import COVER, Encoding
from paredown.formats.format import Format
from paredown.formats.rounding import Overflow, Rounding, Seed

NAMESPACE = "paredown"
_LIBRARY = torch.library.Library(NAMESPACE, "DEF")
_LIBRARY.define("encode(Tensor x, Tensor step, str format, str rounding, str overflow, int seed, int tensor_id) -> Tensor[]")
_LIBRARY.define("decode(Tensor[] parts, str format, bool in_order, ScalarType dtype, int[] sizes, int[] dims) -> Tensor")
_LIBRARY.define("unpack_bits(Tensor bits, int[] sizes, int[] dims) -> Tensor")


def encode(x: Tensor, step: Tensor, format: str, rounding: str, overflow: str, seed: int, tensor_id: int) -> list[Tensor]:
    """Return the 1-D parts [codes, scales] or [codes, scales, minimums] of 1-D contiguous `x`.

    `step` is one int32 on the device of `x`.
    """
    kernels = flat_encoder(x.shape[0], x.is_cuda, format, rounding, overflow, seed, tensor_id)
    if kernels is not None:
        return kernels(x, step)
    how = _encoding(format, rounding, overflow)
    packed = encode_flat(x, how.format, how.rounding, how.overflow, Seed(seed, tensor_id, step))
    return [part.view(-1) for part in packed.parts.tensors()]


@lru_cache(maxsize=4096)
def flat_encoder(numel: int, is_cuda: bool, format: str, rounding: str, overflow: str, seed: int, tensor_id: int) -> Any:
    """Return the Triton encoder for tensors of one size, which takes little host time; None if there is no kernel."""
    kernels, how = backend.find_kernels() if is_cuda else None, _encoding(format, rounding, overflow)
    if kernels is None or not kernels.covers(how, "encode"):
        return None
    return kernels.FlatEncoder(numel, (how.format, how.rounding, how.overflow, COVER), Seed(seed, tensor_id))


def part_kinds(numel: int, format: str, rounding: str, overflow: str) -> list[tuple[int, torch.dtype]]:
    """Return (length, dtype) of each tensor that `encode` returns for `numel` values."""
    parts = _encoding(format, rounding, overflow).empty_parts(1, numel, device=torch.device("meta"), tensor_scale=None)
    return [(part.numel(), part.dtype) for part in parts.tensors()]


def _empty_parts(x: Tensor, _step: Tensor, format: str, rounding: str, overflow: str, *_: int) -> list[Tensor]:
    return [x.new_empty(count, dtype=dtype) for count, dtype in part_kinds(x.shape[0], format, rounding, overflow)]


def decode(parts: list[Tensor], format: str, in_order: bool, dtype: torch.dtype, sizes: list[int], dims: list[int]) -> Tensor:
    """Return the values that `decode_in_graph` computes, as the permutation `dims` of a contiguous tensor of `sizes`."""
    return decode_in_graph(tuple(parts), Format.parse(format), prod(sizes), dtype, in_order=in_order).view(sizes).permute(dims)


def unpack_bits(bits: Tensor, sizes: list[int], dims: list[int]) -> Tensor:
    """Return the mask that `unpack_mask_in_graph` unpacks, as the permutation `dims` of a contiguous tensor of `sizes`."""
    return unpack_mask_in_graph(bits, prod(sizes)).view(sizes).permute(dims)


def _empty(source: Tensor, dtype: torch.dtype, sizes: list[int], dims: list[int]) -> Tensor:
    return source.new_empty(sizes, dtype=dtype).permute(dims)


@lru_cache(maxsize=64)
def _encoding(format: str, rounding: str, overflow: str) -> Encoding:
    return Encoding(Format.parse(format), Rounding(rounding), Overflow(overflow))


for _device in ("CUDA", "CPU"):
    _LIBRARY.impl("encode", encode, _device)
    _LIBRARY.impl("decode", decode, _device)
    _LIBRARY.impl("unpack_bits", unpack_bits, _device)
torch.library.register_fake(f"{NAMESPACE}::encode", _empty_parts, lib=_LIBRARY)
torch.library.register_fake(f"{NAMESPACE}::decode", lambda parts, *t: _empty(parts[0], *t[-3:]), lib=_LIBRARY)
torch.library.register_fake(f"{NAMESPACE}::unpack_bits", lambda bits, *t: _empty(bits, torch.bool, *t), lib=_LIBRARY)
