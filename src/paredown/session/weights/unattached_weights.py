"""Makes and finds packed weights without a session: loaded packed, or left so by `Session.close`.

    p = pack_values("fc.weight", values, plan)     an nn.Parameter, packed if the plan has a format for frozen weights
    p = packed_parameter(packed)                   an nn.Parameter from codes and scales that exist already
    export_decoded(model)                          state dicts of the model have decoded values from now on

Such a parameter is a `PackedParameter`: functions of torch decode it, so that the model runs, but autograd saves the decoded weights.
`apply` gives it to a session without quantizing it again; `session.close()` leaves it packed.
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from paredown.autograd.hooks import Hook
from paredown.codec.packed import DEVICES, DTYPES, PackedTensor
from paredown.formats.catalog import is_small
from paredown.formats.format import Format
from paredown.optim.packed_parameter import PackedParameter
from paredown.optim.packed_weight import KEY, PLAIN_DTYPES, Weight, pack, strides_of, weight_of
from paredown.plan.plan import Plan
from paredown.roles import Role
from paredown.session.changes import Change
from paredown.session.weights.saved_weights import export_plain

UNSHARED_USE_COUNT = 2  # references to a storage that no other tensor shares: the tensor's, and that of the object that counts
SHARED = "its memory is shared with other tensors, or a graph whose backward has not run yet holds it"
LARGER = "it would not be smaller"
PACKED_BEFORE = "it was packed before apply, from a file or in an earlier session, and is not quantized again"
QUANTIZED_BEFORE = "it is a {}, which is quantized or wrapped already, and stays unmodified"


def reason_to_keep_plain(parameter: Tensor, format: Format) -> str | None:
    """Return why a parameter cannot be stored packed in `format`; None if it can."""
    if type(parameter) is not nn.Parameter:
        return "another session has it" if type(parameter) is PackedParameter else QUANTIZED_BEFORE.format(type(parameter).__name__)
    reason = reason_not_to_encode(parameter, format)
    if reason is not None:
        return reason
    storage = parameter.untyped_storage()
    if storage.nbytes() != parameter.nbytes or torch._C._storage_Use_Count(storage._cdata) > UNSHARED_USE_COUNT:
        return SHARED
    return None if is_finite(parameter) else "it holds values that are not finite"


def reason_not_to_encode(values: Tensor, format: Format) -> str | None:
    """Return why a weight of this dtype, size and layout cannot be packed; None if it can."""
    if values.device.type not in DEVICES or values.dtype not in DTYPES or values.layout is not torch.strided:
        return f"it is {values.dtype} in layout {values.layout} on {values.device}"
    if format.nbytes(values.shape) >= values.nbytes:
        return LARGER
    return "its memory has gaps" if strides_of(values) != values.stride() else None


def is_finite(values: Tensor) -> bool:
    """Return whether all values are finite."""
    return bool(values.detach().isfinite().all())


def format_of(plan: Plan, name: str, values: Tensor) -> Format | None:
    """Return the format in which a plan stores a frozen weight; None if it stays unpacked, as small weights do."""
    format = plan.find((name,), Role.FROZEN).format
    is_plain = format is None or values.dtype is PLAIN_DTYPES.get(str(format)) or is_small(values.shape)
    return None if is_plain or format is None or reason_not_to_encode(values, format) else format


def pack_values(name: str, values: Tensor, plan: Plan) -> nn.Parameter:
    """Return a parameter with these values, packed if the plan has a format for it.

    The bits are those that `apply` would store. Packed parameters are frozen, unless a rule for `weight` gives the same format to trained
    ones. References to the memory of `values` stay valid.
    """
    format = format_of(plan, name, values)
    if format is None or not is_finite(values):
        return nn.Parameter(values, values.is_floating_point() or values.is_complex())
    parameter = nn.Parameter(values, plan.find((name,), Role.WEIGHT).format == format)
    pack(parameter, format, PackedParameter)
    return parameter


def packed_parameter(packed: PackedTensor) -> nn.Parameter:
    """Return a frozen parameter that is stored as the codes and scales of `packed`."""
    parameter = nn.Parameter(torch.empty(packed.shape, dtype=packed.dtype, device=packed.device), requires_grad=False)
    weight = Weight(parameter, packed, PackedParameter)
    vars(parameter)[KEY] = weight
    weight.hide()
    return parameter


def unattached_weight(parameter: Tensor) -> Weight | None:
    """Return the packed weight of a parameter that belongs to no session; None for other parameters."""
    weight = weight_of(parameter) if type(parameter) is PackedParameter else None
    return None if weight is None or weight.is_attached else weight


def stays_packed(weight: Weight, packed_base: bool | None, was_packed: bool) -> bool:
    """Return whether a weight stays packed when its session ends.

    `was_packed`: whether it was packed before the session. `packed_base`: the argument of `Session.close`.
    """
    parameter = weight.parameter
    if parameter is None or weight.is_released:
        return False
    return was_packed if packed_base is None else packed_base and not parameter.requires_grad


def kept_formats(asked: Mapping[str, Format | None], weights: Mapping[str, Weight]) -> Iterator[Change]:
    """Yield a `Change` for weights that were packed before `apply` in another format than the plan's.

    `asked`: the formats that the plan requests, by name of the weight.
    """
    rows: dict[tuple[str, str], list[str]] = {}
    for name, format in asked.items():
        if name in weights and str(format) != str(weights[name].format):
            texts = str(format) if format is not None else "no format", str(weights[name].format)
            rows.setdefault(texts, []).append(name)
    for texts, names in rows.items():
        yield Change(f"weight={names[0]}" if len(names) == 1 else f"{len(names)} weights", *texts, PACKED_BEFORE)


def export_decoded(model: nn.Module) -> None:
    """Register hooks that put decoded values in place of packed weights into all later state dicts of the model."""
    for module in model.modules():
        if any(p is not None and weight_of(p) is not None for p in module._parameters.values()):
            module.register_state_dict_post_hook(Hook(export_plain))
