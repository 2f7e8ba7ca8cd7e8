"""Reads 4-bit weights of bitsandbytes from safetensors files into packed tensors, without quantizing them again.

    x.weight                                    uint8 (numel / 2, 1): two codes a byte, the first in the high bits; blocks cross rows
    x.weight.absmax                             float32, a scale for each block; or uint8 codes of them ("double quantization")
    x.weight.quant_map                          float32 (16,): the value of each code
    x.weight.nested_absmax, .nested_quant_map   float32: scales and values of the codes of absmax
    x.weight.quant_state.bitsandbytes__nf4      uint8: JSON with quant_type, blocksize, dtype, shape, nested_blocksize, nested_offset

A value is quant_map[code] * absmax, in float32; absmax is nested_quant_map[code] * nested_absmax + nested_offset under double quantization.
The format is nf4/64@fp32 for blocks of 64. Blocks of this library do not cross rows, so each row must be made of whole blocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from paredown.codec.packed import PackedTensor
from paredown.codec.reference import PackedParts
from paredown.errors import CheckpointError
from paredown.formats.element import NF4
from paredown.formats.format import Format
from paredown.serial import brief, parse_json
from paredown.session.weights.safetensors_files import FileTensor, PackedInFiles

STATE, PARTS = ".quant_state.bitsandbytes__", ("absmax", "quant_map", "nested_absmax", "nested_quant_map")
EIGHT_BITS = ".SCB"  # ends the name of the scales of a weight in 8 bits
INSTEAD = "Load the dense checkpoint with a plan, or call dequantize() in transformers and save the result."


def four_bit_weights(tensors: Mapping[str, FileTensor]) -> Iterator[PackedInFiles]:
    """Yield the weights of bitsandbytes among the tensors of a checkpoint; raise CheckpointError for one that cannot be converted."""
    for key in tensors:
        name, is_state, kind = key.removesuffix(EIGHT_BITS).partition(STATE)
        if key.endswith(EIGHT_BITS):
            raise CheckpointError(f"{name} is quantized by bitsandbytes in 8 bits, which is not read. {INSTEAD}")
        if is_state:
            names = {"": name, **{part: f"{name}.{part}" for part in PARTS}}
            parts = {part: tensors[full] for part, full in names.items() if full in tensors}
            state = parse_json(bytes(tensors[key].read().tolist()), "quant_state of bitsandbytes", CheckpointError, name=key)
            reason = f"its codes are {kind}: nf4 is read" if kind != "nf4" else _reason_not_to_convert(parts, state)
            if reason:
                raise CheckpointError(f"{name} is quantized by bitsandbytes, and {reason}. {INSTEAD}")
            dtype = getattr(torch, str(state.get("dtype")).removeprefix("torch."), torch.float32)
            shape = torch.Size(state["shape"])
            yield PackedInFiles(name, shape, dtype, (key, *names.values()), partial(_read, parts, state, shape, dtype))


def _read(parts: Mapping[str, FileTensor], state: Mapping[str, Any], shape: torch.Size, dtype: torch.dtype) -> PackedTensor:
    length = int(state["blocksize"])
    rows, cols = Format.rows_and_cols(shape)
    packed = parts[""].read()
    codes = ((packed << 4) | (packed >> 4)).view(rows, cols // 2)
    scales = PackedParts(codes, _scales(parts, state).view(rows, cols // length))
    return PackedTensor(Format.parse(f"nf4/{length}@fp32"), shape, dtype, tuple(range(len(shape))), scales)


def _scales(parts: Mapping[str, FileTensor], state: Mapping[str, Any]) -> Tensor:
    absmax = parts["absmax"].read().flatten()
    if "nested_absmax" not in parts:
        return absmax.float()
    nested = parts["nested_absmax"].read().float().repeat_interleave(int(state["nested_blocksize"]))[: absmax.numel()]
    return parts["nested_quant_map"].read()[absmax.long()] * nested + float(state["nested_offset"])


def _reason_not_to_convert(parts: Mapping[str, FileTensor], state: Any) -> str:
    """Return why a weight with the tensors `parts` and the JSON `state` cannot be converted exactly; "" if it can."""
    is_nested = "nested_absmax" in parts
    needed = {"", "absmax", "quant_map"} | ({"nested_quant_map"} if is_nested else set())
    lengths = [state.get(name) for name in ("blocksize", *(("nested_blocksize",) if is_nested else ()))]
    is_complete = needed <= parts.keys() and isinstance(state.get("shape"), list) and (not is_nested or "nested_offset" in state)
    if not is_complete or not all(type(length) is int and length > 0 for length in lengths):
        return f"its parts {sorted(parts)} and its quant_state {brief(dict(state))} are not complete"
    shape, length = torch.Size(state["shape"]), int(state["blocksize"])
    _, cols = Format.rows_and_cols(shape)
    if cols % length or length % 2:
        return f"its rows have {cols} values, which are not whole blocks of {length}"
    if parts[""].nbytes * 2 != shape.numel() or parts["absmax"].shape.numel() * length != shape.numel():
        return f"its codes and scales are not those of shape {tuple(shape)} in blocks of {length}"
    table = torch.tensor(NF4, dtype=torch.float32)
    return "" if torch.equal(parts["quant_map"].read().float().flatten(), table) else "its quant_map is not that of nf4"
