"""One parameter in an optimizer: its state in formats, as the tensors that torch's `state` shows, and as the slots that an update reads.

    state["exp_avg.codes"] (rows, row_bytes) uint8, state["exp_avg.scales"] (rows, blocks)      a moment in a format
    state["exp_avg"]       of the parameter's shape                                             a plain one, float32
    state["residue"]       int8, of the parameter's shape                                       8 bits that follow a bfloat16 weight

A row is one index of dimension 0, so that rows never lie on two shards. The second moment waits as its root, which halves the range that
codes have to cover (8 bits and wider), or close to its fourth root (fewer bits).

Which format each slot of a parameter gets, and why it is not the one that was asked for.

A keyword (weight=, moment1=, ...) beats the tier of the group, that beats the plan of a session, and without any of them all stays as it is
(tier "full"). A parameter of fewer than 2 dimensions or 4096 values is *small*: it keeps float32 state and a plain gradient, and a
bfloat16 one gets 8 bits more (RESIDUE), for little is saved on it, and norms and biases are the most sensitive. Embeddings are not small.

What a session asks for a model's parameters, and which optimizer has them: the two find each other here, and know nothing else.

All of it is weak: neither a parameter nor an optimizer lives longer because of it.
"""


# pyright: reportPrivateUsage=false

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakIdKeyDictionary

from paredown.codec.packed import PackedTensor
from paredown.codec.reference import Encoding, PackedParts
from paredown.errors import FormatError, OptimError
from paredown.formats.catalog import TIERS, find_format, is_small
from paredown.formats.format import Format
from paredown.formats.rounding import Overflow, Rounding, default_rounding
from paredown.optim.gradient_hooks import PackedGradient
from paredown.optim.packed_weight import Weight, weight_of
from paredown.optim.reference import UpdateSlot, UpdateUnit
from paredown.optim.rules import Rule
from paredown.roles import ACCUMULATED, Role

Choice = tuple[Format | None, Rounding]


@dataclass(frozen=True)
class RequestedFormats:
    """The name of a parameter in its model, and what the plan gives to its slots."""

    name: str
    choices: Mapping[Role, Choice]


_ASKED: WeakIdKeyDictionary = WeakIdKeyDictionary()  # parameter -> Asked
_OWNERS: WeakIdKeyDictionary = WeakIdKeyDictionary()  # parameter -> weak reference to the optimizer that has it


def set_request(parameter: Tensor, asked: RequestedFormats | None) -> None:
    """Say what a parameter's slots are to get; None takes it back."""
    if asked is None:
        _ASKED.pop(parameter, None)
    else:
        _ASKED[parameter] = asked


def request_of(parameter: Tensor) -> RequestedFormats | None:
    """What a session asks for this parameter, if one does."""
    return _ASKED.get(parameter)


def set_owner(parameter: Tensor, owner: Any) -> None:
    """`owner` takes the parameter over; the one before, if another, lets it go (`let_go`)."""
    before = owner_of(parameter)
    if before is not None and before is not owner:
        before.let_go(parameter)
    _OWNERS[parameter] = weakref.ref(owner)


def remove_owner(parameter: Tensor, owner: Any) -> None:
    """`owner` gives the parameter up, if it has it."""
    if owner_of(parameter) is owner:
        _OWNERS.pop(parameter, None)


def owner_of(parameter: Tensor) -> Any:
    """The optimizer of paredown that has this parameter, or None."""
    ref = _OWNERS.get(parameter)
    return ref() if ref is not None else None


# --- Which format each slot of a parameter gets, and why it is not the one that was asked for ---

FROM_TIER = "tier"  # the default of a keyword: what the tier or the plan says
SLOTS: tuple[Role, ...] = (Role.WEIGHT, Role.RESIDUE, Role.MOMENT1, Role.MOMENT2, Role.GRADIENT)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class SlotFormats:
    """Format (None: plain) and rounding of each slot of one parameter."""

    name: str
    is_full: bool  # nothing is packed, and torch.optim's own arithmetic serves
    is_small: bool
    slots: Mapping[Role, Choice]
    asked: Mapping[Role, Choice]

    def format(self, role: Role) -> Format | None:
        """The format of a slot, None where it is plain."""
        return self.slots[role][0]

    def rounding(self, role: Role) -> Rounding:
        """How a slot is rounded when it is written."""
        return self.slots[role][1]


PLAIN: Choice = (None, Rounding.NEAREST_EVEN)


def choose(parameter: Tensor, group: Mapping[str, Any], request: RequestedFormats | None, default_name: str) -> SlotFormats:
    """The formats of the slots of `parameter`, from its parameter group and the plan's `request`; `default_name` is used without a plan."""
    name = request.name if request is not None else default_name
    wanted = {role: _wanted(role, group, request) for role in SLOTS}
    if not any(format for format, _ in wanted.values()):
        return SlotFormats(name, True, False, dict.fromkeys(SLOTS, PLAIN), wanted)
    if is_small(parameter.shape):
        slots = dict.fromkeys(SLOTS, PLAIN)
        if parameter.dtype is torch.bfloat16:
            slots[Role.RESIDUE] = (Format.parse("int8"), Rounding.NEAREST_EVEN)
        return SlotFormats(name, False, True, slots, wanted)
    _check(wanted, name)
    return SlotFormats(name, False, False, wanted, wanted)


def check_group(group: Mapping[str, Any]) -> None:
    """Refuse tiers, formats and roundings that there are not."""
    tier = group.get("tier")
    if tier is not None and tier not in TIERS:
        raise OptimError(f"tier {tier!r} is unknown. Allowed: {', '.join(TIERS)}, or None for the plan's formats.")
    for role, rounding in (group.get("rounding") or {}).items():
        if role not in tuple(SLOTS) or rounding not in tuple(Rounding):
            raise OptimError(
                f"rounding {{{role!r}: {rounding!r}}} is unknown. Keys: {', '.join(r.value for r in SLOTS)}; "
                f"values: {', '.join(r.value for r in Rounding)}."
            )


def _wanted(role: Role, group: Mapping[str, Any], asked: RequestedFormats | None) -> Choice:
    given, tier = group.get(role.value, FROM_TIER), group.get("tier")
    rounding: Rounding | None = None
    if not (isinstance(given, str) and given == FROM_TIER):
        format = _format(given, role)
    elif tier is not None:
        text = TIERS[tier].get(role.value)
        format = Format.parse(text) if text else None
    else:
        format, rounding = asked.choices.get(role, PLAIN) if asked is not None else PLAIN
    own = (group.get("rounding") or {}).get(role.value)
    if own is not None:
        rounding = Rounding(own)
    if rounding is None and format is not None:
        rounding = default_rounding(format.element.width, is_sum=role in ACCUMULATED)
    return format, rounding or Rounding.NEAREST_EVEN


def _format(given: Any, role: Role) -> Format | None:
    try:
        return None if given is None else find_format(given)
    except FormatError as error:
        raise OptimError(f"{role.value}={given!r}: {error} None leaves the tensor as it is.") from None


def _check(wanted: Mapping[Role, Choice], name: str) -> None:
    """Refuse combinations that mean nothing."""
    weight, residue = wanted[Role.WEIGHT][0], wanted[Role.RESIDUE][0]
    if residue is not None and (str(residue) != "int8" or weight is None or str(weight) != "bf16"):
        raise OptimError(
            f"{name}: residue={residue} beside weight={weight}: the residue is 'int8', the 8 bits that follow a 'bf16' weight. "
            "Give weight='bf16', residue='int8' (tier 'safe'), or residue=None."
        )
    for role in (Role.MOMENT1, Role.MOMENT2, Role.GRADIENT):
        format = wanted[role][0]
        if format is not None and format.block is None and format.element.width < 16:
            raise OptimError(
                f"{name}: {role.value}={format} has no scale, and values of this role are of any size. "
                f"Give it a block and a scale, such as '{format}/64@bf16'."
            )
        if format is not None and format.has_tensor_scale:
            raise OptimError(
                f"{name}: {role.value}={format} has one scale for the whole tensor, which an update would have to know beforehand. "
                "Give it scales of blocks alone, such as 'int8/64@bf16'."
            )


# --- One parameter in an optimizer ---

PLAIN_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(eq=False)
class ParameterState:
    """A parameter, what its slots get, and how often it was updated."""

    parameter: Tensor
    group: int
    number: int  # among all parameters of the optimizer: the id of its random bits
    choices: SlotFormats
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


def check_gradient(entry: ParameterState, grad: Tensor) -> None:
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


def restart(entry: ParameterState, rule: Rule, state: dict[str, Any]) -> None:
    """Count from the first step again where the rule's moments are not there: as in torch, what was cleared begins anew."""
    if rule.names and not any(name.partition(".")[0] in rule.names for name in state):
        entry.step = 0


def fill_state(entry: ParameterState, rule: Rule, state: dict[str, Any]) -> None:
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


def has_residue(entry: ParameterState) -> bool:
    """Whether 8 bits follow the weight: where that is a bfloat16 now, whatever was asked for."""
    weight = entry.weight
    is_bf16 = local(entry.parameter).dtype is torch.bfloat16 if weight is None else str(weight.packed.format) == "bf16"
    return is_bf16 and entry.choices.format(Role.RESIDUE) is not None


def put(state: dict[str, Any], name: str, parts: PackedParts) -> None:
    """The tensors of a packed one under a name."""
    state[f"{name}.codes"] = parts.codes
    for part, tensor in (("scales", parts.scales), ("minimums", parts.minimums)):
        if tensor is not None:
            state[f"{name}.{part}"] = tensor


def parts_in(state: dict[str, Any], name: str) -> PackedParts:
    """The inverse of `put`."""
    return PackedParts(state[f"{name}.codes"], state.get(f"{name}.scales"), state.get(f"{name}.minimums"))


# --- slots ------------------------------------------------------------------------------------------------------------


def unit_of(entry: ParameterState, rule: Rule, state: dict[str, Any], gradient: Tensor) -> UpdateUnit:
    """What an update of this parameter reads and writes; `gradient` is its packed accumulator, or a plain tensor that is not kept."""
    rows, cols = entry.rows_and_cols
    moments = tuple(_moment_slot(entry, role, name, state) for role, name in zip(rule.roles, rule.names, strict=True))
    residue = state.get("residue") if has_residue(entry) else None
    return UpdateUnit(
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


def plain_slot(tensor: Tensor, rounding: Rounding) -> UpdateSlot:
    """A plain tensor, seen as rows."""
    return UpdateSlot(None, rounding, PackedParts(tensor.detach().view(Format.rows_and_cols(tensor.shape))))


def _moment_slot(entry: ParameterState, role: Role, name: str, state: dict[str, Any]) -> UpdateSlot:
    format, rounding = entry.choices.slots[role]
    if format is None or format.block is None:
        return plain_slot(state[name], rounding)
    return UpdateSlot(format, rounding, parts_in(state, name), roots_of(role, format))


def weight_slot(entry: ParameterState) -> UpdateSlot:
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
    return UpdateSlot(packed.format, rounding, packed.parts)


def gradient_slot(gradient: Tensor) -> UpdateSlot:
    """A packed accumulator; or the dtype and size of a plain gradient, which is given to each update and not kept."""
    if isinstance(gradient, PackedGradient):
        return UpdateSlot(gradient.packed.format, Rounding.STOCHASTIC, gradient.packed.parts)
    return plain_slot(torch.empty(local(gradient).shape, dtype=gradient.dtype, device="meta"), Rounding.NEAREST_EVEN)
