"""One parameter in an optimizer: its state in formats, as the tensors that torch's `state` shows, and as the slots that an update reads.

    state["exp_avg.codes"] (rows, row_bytes) uint8, state["exp_avg.scales"] (rows, blocks)      a moment in a format
    state["exp_avg"]       of the parameter's shape                                             a plain one, float32
    state["residue"]       int8, of the parameter's shape                                       8 bits that follow a bfloat16 weight

A row is one index of dimension 0, so that rows never lie on two shards. The second moment waits as its root, which halves the range that
codes have to cover (8 bits and wider), or close to its fourth root (fewer bits).
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from paredown.codec.packed import PackedTensor
from paredown.codec.reference import Encoding, Parts
from paredown.errors import OptimError
from paredown.formats.format import Format
from paredown.formats.rounding import Overflow, Rounding
from paredown.optim.choices import DTYPES, Choices
from paredown.optim.gradients import PackedGradient
from paredown.optim.rules import Rule
from paredown.optim.units import Slot, Unit
from paredown.optim.weights import Weight, weight_of
from paredown.roles import Role

PLAIN_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(eq=False)
class Entry:
    """A parameter, what its slots get, and how often it was updated."""

    parameter: Tensor
    group: int
    number: int  # among all parameters of the optimizer: the id of its random bits
    choices: Choices
    counters: Tensor  # (5,) int32
    step: int = 0
    gradient: PackedGradient | None = None
    hook: Any = None
    updated: bool = False  # under release: since the last step()
    is_started: bool = False  # whether a gradient came since the last update, with microbatches
    is_gone: bool = False  # another optimizer has the parameter now
    shadow: Tensor | None = None  # rows of a plain parameter that does not lie in rows (channels_last)
    unit: Any = None  # under release: where the parameter was, its state, and the unit made of both
    shape: torch.Size = field(init=False)
    weight: Weight | None = field(init=False)

    def __post_init__(self) -> None:
        self.shape = self.parameter.shape
        self.weight = weight_of(self.parameter)

    @property
    def name(self) -> str:
        """The parameter's name, or its place in the optimizer."""
        return self.choices.name

    @property
    def rows_and_cols(self) -> tuple[int, int]:
        """Of the part that this process has."""
        return Format.rows_and_cols(local(self.parameter).shape)

    @property
    def first_index(self) -> int:
        """The index of its first value in the whole tensor, where that is spread over processes."""
        return 0 if not isinstance(self.parameter, DTensor) else _first_index(self.parameter, self.name)


def check_parameter(parameter: Any, place: str) -> None:
    """Refuse what has no update here."""
    if not isinstance(parameter, Tensor):
        raise OptimError(f"{place} is a {type(parameter).__name__}, not a tensor: give model.parameters(), or groups of them.")
    if parameter.is_complex():
        raise OptimError(
            f"{place} is complex, and formats are of real numbers. Give torch.view_as_real(p) as a parameter, or tier='full'."
        )
    if parameter.dtype not in DTYPES or parameter.layout is not torch.strided:
        raise OptimError(
            f"{place} is {parameter.dtype} in layout {parameter.layout}; float32, bfloat16 and float16, strided, can be updated."
        )


def check_gradient(entry: Entry, grad: Tensor) -> None:
    """Refuse gradients that do not fit, before anything is changed."""
    p = entry.parameter
    if grad.layout is not torch.strided:
        raise OptimError(
            f"{entry.name} has a sparse gradient, and packed state is dense. Make the embedding with sparse=False, or use "
            "torch.optim.SparseAdam for it."
        )
    if p.shape != entry.shape or grad.shape != entry.shape:
        raise OptimError(
            f"{entry.name} had shape {tuple(entry.shape)} when the optimizer was made; now the parameter is {tuple(p.shape)} and its "
            f"gradient {tuple(grad.shape)}. Make a new optimizer after changing shapes."
        )


def local(tensor: Tensor) -> Tensor:
    """What this process has of a tensor."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _first_index(parameter: DTensor, name: str) -> int:
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    for placement in parameter.placements:
        if not (placement.is_replicate() or placement.is_shard(0)):
            raise OptimError(
                f"{name} is spread by {placement}; blocks run along rows, so dimension 0 alone can be. Shard dimension 0, or tier='full'."
            )
    _, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    _, cols = Format.rows_and_cols(parameter.shape)
    return offset[0] * cols if offset else 0


# --- state ------------------------------------------------------------------------------------------------------------


def zeros(shape: tuple[int, ...] | torch.Size, format: Format, dtype: torch.dtype, device: torch.device) -> PackedTensor:
    """A packed tensor of zeros, in logical order."""
    encoding = Encoding(format, Rounding.NEAREST_EVEN, Overflow.SATURATE)
    parts = encoding.empty_parts(*Format.rows_and_cols(shape), device=device, tensor_scale=None)
    for tensor in parts.tensors():
        tensor.zero_()
    return PackedTensor(format, torch.Size(shape), dtype, tuple(range(len(shape))), parts)


def roots_of(role: Role, format: Format | None) -> int:
    """How often a root is taken before a slot is stored."""
    if role is not Role.MOMENT2 or format is None or format.block is None:
        return 0
    return 1 if format.element.width >= 8 else 2


def restart(entry: Entry, rule: Rule, state: dict[str, Any]) -> None:
    """Count from the first step again where the rule's moments are not there: as in torch, what was cleared begins anew."""
    if rule.names and not any(name.partition(".")[0] in rule.names for name in state):
        entry.step = 0


def fill_state(entry: Entry, rule: Rule, state: dict[str, Any]) -> None:
    """What a parameter's state lacks, as zeros."""
    mine = local(entry.parameter)
    for role, name in zip(rule.roles, rule.names, strict=True):
        format = entry.choices.format(role)
        if format is not None and format.block is not None:
            if f"{name}.codes" not in state:
                put(state, name, zeros(mine.shape, format, torch.float32, mine.device).parts)
        elif name not in state:
            dtype = PLAIN_DTYPES[format.element.name] if format is not None else torch.float32
            state[name] = torch.zeros(mine.shape, dtype=dtype, device=mine.device)
    if has_residue(entry) and "residue" not in state:
        state["residue"] = torch.zeros(mine.shape, dtype=torch.int8, device=mine.device)
    if entry.weight is not None:
        put(state, "weight", entry.weight.packed.parts)
        entry.weight.residue = state.get("residue")  # values from outside clear it


def has_residue(entry: Entry) -> bool:
    """Whether 8 bits follow the weight: where that is a bfloat16 now, whatever was asked for."""
    weight = entry.weight
    is_bf16 = local(entry.parameter).dtype is torch.bfloat16 if weight is None else str(weight.packed.format) == "bf16"
    return is_bf16 and entry.choices.format(Role.RESIDUE) is not None


def put(state: dict[str, Any], name: str, parts: Parts) -> None:
    """The tensors of a packed one under a name."""
    state[f"{name}.codes"] = parts.codes
    for part, tensor in (("scales", parts.scales), ("minimums", parts.minimums)):
        if tensor is not None:
            state[f"{name}.{part}"] = tensor


def parts_in(state: dict[str, Any], name: str) -> Parts:
    """The inverse of `put`."""
    return Parts(state[f"{name}.codes"], state.get(f"{name}.scales"), state.get(f"{name}.minimums"))


# --- slots ------------------------------------------------------------------------------------------------------------


def unit_of(entry: Entry, rule: Rule, state: dict[str, Any], gradient: Tensor) -> Unit:
    """What an update of this parameter reads and writes; `gradient` is its packed accumulator, or a plain tensor that is not kept."""
    rows, cols = entry.rows_and_cols
    moments = tuple(_moment_slot(entry, role, name, state) for role, name in zip(rule.roles, rule.names, strict=True))
    residue = state.get("residue") if has_residue(entry) else None
    return Unit(
        weight=weight_slot(entry),
        residue=None if residue is None else plain_slot(residue, Rounding.NEAREST_EVEN),
        moments=moments,
        gradient=gradient_slot(gradient),
        rows=rows,
        cols=cols,
        tensor_id=entry.number,
        first_index=entry.first_index,
        factor=gradient.factor if isinstance(gradient, PackedGradient) else None,
        counters=entry.counters,
    )


def plain_slot(tensor: Tensor, rounding: Rounding) -> Slot:
    """A plain tensor, seen as rows."""
    return Slot(None, rounding, Parts(tensor.detach().view(Format.rows_and_cols(tensor.shape))))


def _moment_slot(entry: Entry, role: Role, name: str, state: dict[str, Any]) -> Slot:
    format, rounding = entry.choices.slots[role]
    if format is None or format.block is None:
        return plain_slot(state[name], rounding)
    return Slot(format, rounding, parts_in(state, name), roots_of(role, format))


def weight_slot(entry: Entry) -> Slot:
    """The parameter where it waits packed, or itself."""
    rounding = entry.choices.rounding(Role.WEIGHT)
    if entry.weight is None:
        mine = local(entry.parameter)
        if mine.is_contiguous():
            return plain_slot(mine, rounding)
        if entry.shadow is None:
            entry.shadow = torch.empty_like(mine, memory_format=torch.contiguous_format).detach()
        return plain_slot(entry.shadow, rounding)
    packed = entry.weight.packed
    if packed.format.block is None:
        return plain_slot(packed.codes.view(PLAIN_DTYPES[packed.format.element.name]), rounding)
    return Slot(packed.format, rounding, packed.parts)


def gradient_slot(gradient: Tensor) -> Slot:
    """A packed accumulator; or the dtype and size of a plain gradient, which is given to each update and not kept."""
    if isinstance(gradient, PackedGradient):
        return Slot(gradient.packed.format, Rounding.STOCHASTIC, gradient.packed.parts)
    return plain_slot(torch.empty(local(gradient).shape, dtype=gradient.dtype, device="meta"), Rounding.NEAREST_EVEN)
