"""The state of one parameter in an optimizer: formats, moments in these formats, and the tensors that an update reads.

Formats. A keyword (weight=, moment1=, ...) overrides the tier of the group, which overrides the plan of a session; without any of them
everything is unmodified (tier "full"). A parameter of fewer than 2 dimensions or 4096 values is *small*: its state is float32, its gradient
is not packed, and a bfloat16 weight gets an 8-bit residue, since packing would save little, and norms and biases are the most sensitive to
rounding. Embeddings are not small.

State, as the tensors of torch's `state`:

    state["exp_avg.codes"] (rows, row_bytes) uint8, state["exp_avg.scales"] (rows, blocks)      a packed moment
    state["exp_avg"]       of the parameter's shape                                             a float32 moment, not packed
    state["residue"]       int8, of the parameter's shape                                       the 8 bits below a bfloat16 weight

A row is one index of dimension 0, so that no row lies on two shards. The second moment is stored as its square root, which halves the range
of exponents that codes have to cover (8 bits and wider), or about its fourth root (fewer bits).

Sessions and optimizers find each other by two dictionaries with weak keys: the formats that a session requests for a parameter, and the
optimizer that has it. Neither keeps a parameter or an optimizer alive.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakIdKeyDictionary

from paredown.codec.packed import DTYPES, PackedTensor
from paredown.codec.reference import Encoding, PackedParts
from paredown.errors import FormatError, OptimError
from paredown.formats.catalog import TIERS, find_format, is_small, reason_not_to_store
from paredown.formats.format import Format
from paredown.formats.rounding import Overflow, Rounding, default_rounding
from paredown.optim.gradient_ops import PackedGradient
from paredown.optim.packed_weight import PLAIN_DTYPES, Weight, weight_of
from paredown.optim.reference import UpdateSlot, UpdateUnit
from paredown.optim.rules import Rule
from paredown.optim.sharded.local_rows import local
from paredown.roles import ACCUMULATED, OF_PARAMETER, Role

Choice = tuple[Format | None, Rounding]


@dataclass(frozen=True)
class RequestedFormats:
    """The formats and roundings that a session's plan wants an optimizer to use for a parameter, its gradient and moments."""

    name: str
    choices: Mapping[Role, Choice]


_REQUESTS: WeakIdKeyDictionary = WeakIdKeyDictionary()  # parameter -> RequestedFormats
_OWNERS: WeakIdKeyDictionary = WeakIdKeyDictionary()  # parameter -> weak reference to the optimizer that has it


def request_of(parameter: Tensor) -> RequestedFormats | None:
    """Return the formats that the plan of an open session requests for this parameter; None without a session."""
    return _REQUESTS.get(parameter)


def request_formats(model: nn.Module, rows: list[tuple[nn.Parameter, RequestedFormats]]) -> None:
    """Record the formats that a plan requests for each parameter; optimizers of `model` without state adopt them."""
    for parameter, request in rows:
        _REQUESTS[parameter] = request
    for owner in {owner_of(parameter) for parameter in model.parameters()} - {None}:
        if not owner.has_started:
            owner.follow_requests()


def withdraw_requests(model: nn.Module) -> None:
    """Forget the formats that a plan has requested for the parameters of `model`, since its session is closed."""
    for parameter in model.parameters():
        _REQUESTS.pop(parameter, None)


def set_owner(parameter: Tensor, owner: Any) -> None:
    """Record that the optimizer `owner` updates a parameter; the optimizer that did so before removes its hooks from it."""
    before = owner_of(parameter)
    if before is not None and before is not owner:
        before.let_go(parameter)
    _OWNERS[parameter] = weakref.ref(owner)


def remove_owner(parameter: Tensor, owner: Any) -> None:
    """Forget that the optimizer `owner` updates a parameter; if another optimizer is recorded, that record stays."""
    if owner_of(parameter) is owner:
        _OWNERS.pop(parameter, None)


def owner_of(parameter: Tensor) -> Any:
    """Return the optimizer of paredown.optim that updates this parameter; None if there is none."""
    ref = _OWNERS.get(parameter)
    return ref() if ref is not None else None


# --- formats of slots -------------------------------------------------------------------------------------------------

FROM_TIER = "tier"  # default of a keyword: the format of the tier or the plan


@dataclass(frozen=True)
class SlotFormats:
    """How an optimizer stores the weight, gradient, moments and residue of one parameter: formats (None: unpacked), roundings."""

    name: str
    is_full: bool  # nothing is packed, and torch.optim updates the parameter
    is_small: bool
    slots: Mapping[Role, Choice]

    def format(self, role: Role) -> Format | None:
        """Return the format of this parameter's weight, gradient, moment or residue, as `role` says; None if it is unpacked."""
        return self.slots[role][0]

    def rounding(self, role: Role) -> Rounding:
        """Return the rounding of this parameter's weight, gradient, moment or residue, as `role` says."""
        return self.slots[role][1]


PLAIN: Choice = (None, Rounding.NEAREST_EVEN)


def choose(parameter: Tensor, group: Mapping[str, Any], request: RequestedFormats | None, default_name: str) -> SlotFormats:
    """Return how to store a parameter, its gradient and moments, given its parameter group and the plan's `request`.

    `request` is None if there is no plan; `default_name` is the parameter's name then.
    """
    name = request.name if request is not None else default_name
    wanted = {role: _wanted(role, group, request) for role in OF_PARAMETER}
    if not any(format for format, _ in wanted.values()):
        return SlotFormats(name, True, False, dict.fromkeys(OF_PARAMETER, PLAIN))
    if is_small(parameter.shape):
        slots = dict.fromkeys(OF_PARAMETER, PLAIN)
        if parameter.dtype is torch.bfloat16:
            slots[Role.RESIDUE] = (Format.parse("int8"), Rounding.NEAREST_EVEN)
        return SlotFormats(name, False, True, slots)
    _check(wanted, name)
    return SlotFormats(name, False, False, wanted)


def check_group(group: Mapping[str, Any]) -> None:
    """Raise OptimError if a parameter group names a tier (set of formats), a tensor's role or a rounding that is unknown."""
    tier = group.get("tier")
    if tier is not None and tier not in TIERS:
        raise OptimError(f"tier {tier!r} is unknown. Allowed: {', '.join(TIERS)}, or None for the plan's formats.")
    for role, rounding in (group.get("rounding") or {}).items():
        if role not in OF_PARAMETER or rounding not in tuple(Rounding):
            raise OptimError(
                f"rounding {{{role!r}: {rounding!r}}} is unknown. Keys: {', '.join(r.value for r in OF_PARAMETER)}; "
                f"values: {', '.join(r.value for r in Rounding)}."
            )


def _wanted(role: Role, group: Mapping[str, Any], request: RequestedFormats | None) -> Choice:
    keyword, tier = group.get(role.value, FROM_TIER), group.get("tier")
    rounding: Rounding | None = None
    if not (isinstance(keyword, str) and keyword == FROM_TIER):
        format = _format(keyword, role)
    elif tier is not None:
        text = TIERS[tier].get(role.value)
        format = Format.parse(text) if text else None
    else:
        format, rounding = request.choices.get(role, PLAIN) if request is not None else PLAIN
    keyword = (group.get("rounding") or {}).get(role.value)
    if keyword is not None:
        rounding = Rounding(keyword)
    if rounding is None and format is not None:
        rounding = default_rounding(format.element.width, is_sum=role in ACCUMULATED)
    return format, rounding or Rounding.NEAREST_EVEN


def _format(keyword: Any, role: Role) -> Format | None:
    try:
        return None if keyword is None else find_format(keyword)
    except FormatError as error:
        raise OptimError(f"{role.value}={keyword!r}: {error} None leaves the tensor unmodified.") from None


def _check(wanted: Mapping[Role, Choice], name: str) -> None:
    """Raise OptimError if a parameter, called `name` in the message, cannot be stored in the `wanted` formats."""
    weight, residue = wanted[Role.WEIGHT][0], wanted[Role.RESIDUE][0]
    if residue is not None and (str(residue) != "int8" or weight is None or str(weight) != "bf16"):
        raise OptimError(
            f"{name}: residue={residue} beside weight={weight}: the residue is 'int8', the 8 bits that follow a 'bf16' weight. "
            "Give weight='bf16', residue='int8' (tiers 'safe' and 'fine_tune'), or residue=None."
        )
    for role, (format, _) in wanted.items():
        reason = None if format is None else reason_not_to_store(format, role.value)
        if reason is not None:
            raise OptimError(f"{name}: {role.value}={reason}.")
        if role in (Role.MOMENT1, Role.MOMENT2, Role.GRADIENT) and format is not None and format.has_tensor_scale:
            raise OptimError(
                f"{name}: {role.value}={format} has one scale for the whole tensor, which is not known before an update. "
                "Give it a format with block scales only, such as 'int8/64@bf16'."
            )
    if weight is not None and weight.block is None and str(weight) not in PLAIN_DTYPES:
        raise OptimError(
            f"{name}: weight={weight} has no scale: optimizers update weights in {', '.join(PLAIN_DTYPES)} or in a format with a scale. "
            f"Give weight='{weight}/64@bf16', or leave trained weights unmodified: plan.set('weight', None)."
        )


# --- one parameter ----------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class ParameterState:
    """The state of one parameter in an optimizer: its formats, the hook on its gradient, and the number of updates."""

    parameter: Tensor
    group: int
    number: int  # index among all parameters of the optimizer, which selects its random bits
    choices: SlotFormats
    counters: Tensor  # (5,) int32
    step: int = 0
    gradient: PackedGradient | None = None
    hook: Any = None
    updated: bool = False  # under release: whether it was updated since the last step()
    is_started: bool = False  # with microbatches: whether a sum has started since the last update
    is_gone: bool = False  # a newer optimizer has the parameter
    shadow: Tensor | None = None  # contiguous copy of an unpacked parameter that is not contiguous (channels_last)
    unit: Any = None  # under release: the address of the parameter, its state, and the cached `UpdateUnit`
    shape: torch.Size = field(init=False)
    weight: Weight | None = field(init=False)

    def __post_init__(self) -> None:
        self.shape = self.parameter.shape
        self.weight = weight_of(self.parameter)

    @property
    def name(self) -> str:
        """The name of the parameter in the model, or its number in the optimizer."""
        return self.choices.name

    @property
    def rows_and_cols(self) -> tuple[int, int]:
        """The rows and columns of the parameter that this process stores: under fully_shard, only some of the rows."""
        return Format.rows_and_cols(local(self.parameter).shape)

    @property
    def first_index(self) -> int:
        """The index of this process's first value in the whole parameter; 0 unless the parameter is a DTensor."""
        return 0 if not isinstance(self.parameter, DTensor) else _first_index(self.parameter, self.name)


def check_parameter(parameter: Any, place: str) -> None:
    """Raise OptimError if an optimizer cannot update `parameter`, which the message calls `place`."""
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
    """Raise OptimError if a gradient is sparse, or has another shape than the parameter had when the optimizer was made."""
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


def _first_index(parameter: DTensor, name: str) -> int:
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    for placement in parameter.placements:
        if not (placement.is_replicate() or placement.is_shard(0)):
            raise OptimError(
                f"{name} is distributed by {placement}, and blocks run along rows: shard dimension 0 only, or use tier='full'."
            )
    _, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    _, cols = Format.rows_and_cols(parameter.shape)
    return offset[0] * cols if offset else 0


# --- state ------------------------------------------------------------------------------------------------------------


def zeros(shape: tuple[int, ...] | torch.Size, format: Format, dtype: torch.dtype, device: torch.device) -> PackedTensor:
    """Return a packed tensor of zeros, which decodes to this shape and dtype."""
    encoding = Encoding(format, Rounding.NEAREST_EVEN, Overflow.SATURATE)
    parts = encoding.empty_parts(*Format.rows_and_cols(shape), device=device, tensor_scale=None)
    for tensor in parts.tensors():
        tensor.zero_()
    return PackedTensor(format, torch.Size(shape), dtype, tuple(range(len(shape))), parts)


def roots_of(role: Role, format: Format | None) -> int:
    """Return how often a tensor's square root is taken before it is packed: 1 or 2 times for second moments, otherwise 0."""
    if role is not Role.MOMENT2 or format is None or format.block is None:
        return 0
    return 1 if format.element.width >= 8 else 2


def restart(entry: ParameterState, rule: Rule, state: dict[str, Any]) -> None:
    """Set the step count of a parameter to 0 if user code has cleared its `state`, as torch.optim does."""
    if rule.names and not any(name.partition(".")[0] in rule.names for name in state):
        entry.step = 0


def fill_state(entry: ParameterState, rule: Rule, state: dict[str, Any]) -> None:
    """Add to `state` what is missing for an update by `rule`: moments of zeros, a residue, the codes of the weight."""
    plain = local(entry.parameter)
    for role, name in zip(rule.roles, rule.names, strict=True):
        format = entry.choices.format(role)
        if format is not None and format.block is not None:
            if f"{name}.codes" not in state:
                put(state, name, zeros(plain.shape, format, torch.float32, plain.device).parts)
        elif name not in state:
            dtype = PLAIN_DTYPES[format.element.name] if format is not None else torch.float32
            state[name] = torch.zeros(plain.shape, dtype=dtype, device=plain.device)
    if has_residue(entry) and "residue" not in state:
        state["residue"] = torch.zeros(plain.shape, dtype=torch.int8, device=plain.device)
    if entry.weight is not None:
        put(state, "weight", entry.weight.packed.parts)
        entry.weight.residue = state.get("residue")  # zeroed when other code writes the weight


def has_residue(entry: ParameterState) -> bool:
    """Return whether a bfloat16 weight has a residue, 8 more bits of precision, for which a format must have been chosen."""
    weight = entry.weight
    is_bf16 = local(entry.parameter).dtype is torch.bfloat16 if weight is None else str(weight.packed.format) == "bf16"
    return is_bf16 and entry.choices.format(Role.RESIDUE) is not None


def put(state: dict[str, Any], name: str, parts: PackedParts) -> None:
    """Add the codes, scales and minimums of a packed tensor to `state`, as "name.codes", "name.scales", "name.minimums"."""
    state[f"{name}.codes"] = parts.codes
    for part, tensor in (("scales", parts.scales), ("minimums", parts.minimums)):
        if tensor is not None:
            state[f"{name}.{part}"] = tensor


def parts_in(state: dict[str, Any], name: str) -> PackedParts:
    """Return the codes, scales and minimums that `put` has added to `state` under this name."""
    return PackedParts(state[f"{name}.codes"], state.get(f"{name}.scales"), state.get(f"{name}.minimums"))


# --- slots ------------------------------------------------------------------------------------------------------------


def unit_of(entry: ParameterState, rule: Rule, state: dict[str, Any], gradient: Tensor) -> UpdateUnit:
    """Return the tensors that an update by `rule` reads and writes: weight, residue, the moments in `state`, and gradient."""
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
    """Return an `UpdateSlot` for an unpacked tensor, through which an update reads and writes it as (rows, cols)."""
    return UpdateSlot(None, rounding, PackedParts(tensor.detach().view(Format.rows_and_cols(tensor.shape))))


def _moment_slot(entry: ParameterState, role: Role, name: str, state: dict[str, Any]) -> UpdateSlot:
    format, rounding = entry.choices.slots[role]
    if format is None or format.block is None:
        return plain_slot(state[name], rounding)
    return UpdateSlot(format, rounding, parts_in(state, name), roots_of(role, format))


def weight_slot(entry: ParameterState) -> UpdateSlot:
    """Return the `UpdateSlot` through which an update writes a weight: its codes if it is packed, else the parameter itself.

    If the parameter is not contiguous, the update writes to a contiguous copy of it, its shadow.
    """
    rounding = entry.choices.rounding(Role.WEIGHT)
    if entry.weight is None:
        plain = local(entry.parameter)
        if plain.is_contiguous():
            return plain_slot(plain, rounding)
        if entry.shadow is None:
            entry.shadow = torch.empty_like(plain, memory_format=torch.contiguous_format).detach()
        return plain_slot(entry.shadow, rounding)
    packed = entry.weight.packed
    if packed.format.block is None:
        return plain_slot(packed.codes.view(PLAIN_DTYPES[packed.format.element.name]), rounding)
    return UpdateSlot(packed.format, rounding, packed.parts)


def gradient_slot(gradient: Tensor) -> UpdateSlot:
    """Return the `UpdateSlot` through which an update reads this gradient.

    An unpacked gradient is a new tensor in each step, so its slot has only dtype and size, without memory.
    """
    if isinstance(gradient, PackedGradient):
        return UpdateSlot(gradient.packed.format, Rounding.STOCHASTIC, gradient.packed.parts)
    return plain_slot(torch.empty(local(gradient).shape, dtype=gradient.dtype, device="meta"), Rounding.NEAREST_EVEN)
