"""Packed weights under FSDP2: each process stores codes and scales of its rows, and all-gathers send these.

    p                    the sharded parameter of torch, a DTensor; the same Python object before and after packing
    p._local_tensor      a view (`PackedParameter`) of the rows of this process, without memory of its own
    weight_of(p)         the `Weight` with their codes, (rows, row_bytes), and scales
    all-gather inputs    codes and scales, padded with zeros to the rows of the first shard, so that all processes send the same size
    after an all-gather  the whole parameter is decoded into the memory that FSDP2 frees when it reshards

A block lies in one row (one index of dimension 0), so no block lies on two shards, and codes do not depend on the number of processes.
FSDP2 finds the functions `fsdp_pre_all_gather` and `fsdp_post_all_gather` on the local tensor. With five arguments it requires inputs of
the padded shard's size where dimension 0 does not divide by the number of processes, which codes and scales do not have; its form with one
argument has no such requirement, and is used for these parameters.

Whether a parameter is packed is decided from its whole shape, and from values that all processes have checked together, so that all
processes gather the same tensors. `reason_to_keep_shard_plain` lists what stays unmodified.
"""

# pyright: reportPrivateUsage=false, reportAttributeAccessIssue=false

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from paredown.codec.packed import DEVICES, DTYPES, encode
from paredown.codec.reference import PackedParts
from paredown.formats.format import Format
from paredown.optim.packed_parameter import PackedParameter, view_of
from paredown.optim.packed_weight import KEY, Weight, decode_into, weight_of

UNEVEN = "dimension 0 ({}) does not divide by {} processes: {} rows of zeros in all pad the shards, and are stored and sent too"
NOT_OF_FSDP = "it is a DTensor that fully_shard does not manage"
OTHER_PLACEMENT = "it is distributed by {}, and blocks run along rows: only dimension 0 can be sharded"
OFFLOADED = "CPUOffloadPolicy moves its shard between devices"
PARTLY_RESHARDED = "reshard_after_forward is an integer, and FSDP2 then gathers values"
TENSOR_SCALE = "{} has one scale for the whole tensor, and a shard knows only its own rows"
UNKNOWN_TORCH = "this torch ({}) has no FSDPParam.{}, which packing a shard needs"
NOT_FINITE = "it holds values that are not finite"
LARGER = "it would not be smaller"
# private attributes of torch's FSDPParam that this module reads or sets (torch 2.13)
NEEDED = (
    *("all_gather_outputs", "is_dtensor", "mesh_info", "offload_to_cpu", "padded_sharded_param_size", "post_forward_mesh_info"),
    *("_init_extensions", "_sharded_param_data", "_unsharded_inner_tensors"),
)


@dataclass(eq=False)
class PackedShard:
    """One process's rows of a parameter under fully_shard, stored packed; FSDP2 calls its methods around all-gathers."""

    parameter: DTensor
    managed: Any  # the FSDPParam of torch
    weight: Weight
    padded: PackedParts  # codes and scales with the rows that FSDP2 pads to; those of `weight` are their first rows
    _rows: nn.Parameter  # the parameter of `weight`, which has a weak reference to it

    def __post_init__(self) -> None:
        self.num_processes = int(self.managed.mesh_info.shard_mesh_size)  # processes that share the parameter's rows
        # the rows of zeros that all processes together add to the parameter, in order to store as many rows as the first shard has
        self.padding = int(self.managed.padded_sharded_param_size[0]) * self.num_processes - self.parameter.shape[0]

    @property
    def nbytes(self) -> int:
        """The bytes of codes and scales in this process, padding included."""
        return sum(tensor.nbytes for tensor in self.padded.tensors())

    @property
    def is_replaced(self) -> bool:
        """Whether other code has put another tensor in place of the packed rows, as load_state_dict(assign=True) does."""
        return self.managed.sharded_param is not self.parameter or vars(self.parameter).get(KEY) is not self.weight

    def gather_inputs(self) -> tuple[tuple[Tensor, ...], None]:
        """Return the codes and scales that this process sends in an all-gather, and None, as FSDP2 requires."""
        self.weight.encode()
        return tuple(self.padded.tensors()), None

    def decode_gathered(self, gathered: tuple[Tensor, ...], dtype: torch.dtype, out: Tensor | None) -> Tensor:
        """Return the whole parameter, decoded from `gathered`, the codes and scales of all processes, whose memory is freed.

        `out`: the tensor to decode into; None for a new one.
        """
        shape, own, received = self.parameter.shape, self.weight.packed, iter(gathered)
        if self.num_processes > 1:  # one process alone has replicas, and FSDP2 copies the first input only
            own = own.mapped(lambda _: next(received)[: shape[0]])
        whole = replace(own, shape=shape)
        made = torch.empty(shape, dtype=dtype, device=whole.device) if out is None else out.data
        with torch.no_grad():
            decode_into(whole, made)
        for tensor in gathered:  # FSDP2 would hold it until it reshards, and allocates it anew for the next all-gather
            tensor.untyped_storage().resize_(0)
        return made

    def release(self) -> None:
        """Replace the packed rows by an ordinary tensor of their values, as before packing."""
        if self.is_replaced:
            return
        managed, rows = self.managed, self.weight.size[0]
        plain = torch.zeros(managed.padded_sharded_param_size, dtype=self.weight.dtype, device=self.weight.packed.device)
        if plain[:rows].numel():
            plain[:rows].copy_(self.weight.decode())
        managed._sharded_param_data = plain.view(-1)
        self.parameter._local_tensor = plain[:rows]
        del vars(self.parameter)[KEY]
        forget_gathered(managed)


def pack_shard(parameter: DTensor, managed: Any, format: Format) -> PackedShard:
    """Pack this process's rows of a parameter under fully_shard, and replace the parameter's local tensor by the packed rows.

    `managed`: the FSDPParam of torch that manages the parameter.
    """
    values = parameter._local_tensor.detach()
    with torch.no_grad():
        packed = encode(values, format, order="logical")
        padded = packed.mapped(lambda part: _padded(part, int(managed.padded_sharded_param_size[0])))
        packed = padded.mapped(lambda part: part[: values.shape[0]])
    rows = nn.Parameter(values, requires_grad=False)
    weight = Weight(rows, packed, PackedParameter)
    vars(rows)[KEY] = weight
    weight.hide()
    shard = PackedShard(parameter, managed, weight, padded.parts, rows)
    vars(parameter)[KEY] = weight
    local = view_of(rows)
    _extend(local, shard)
    parameter._local_tensor = local
    managed._sharded_param_data = padded.codes.view(-1)  # the memory by which FSDP2 recognizes the local tensor
    managed._init_extensions()
    forget_gathered(managed)
    return shard


def _padded(part: Tensor, rows: int) -> Tensor:
    """Return `part`, codes or scales, with zeros appended so that it has `rows` rows."""
    if part.shape[0] == rows:
        return part
    made = part.new_zeros((rows, *part.shape[1:]))
    made[: part.shape[0]] = part
    return made


def _extend(local: PackedParameter, shard: PackedShard) -> None:
    """Give a local tensor the functions that FSDP2 calls before and after an all-gather: send codes, and decode all of them."""

    def gather(mesh: Any) -> tuple[tuple[Tensor, ...], None]:
        return shard.gather_inputs()

    def gather_even(mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any) -> tuple[tuple[Tensor, ...], None]:
        return shard.gather_inputs()

    def decode(outputs: tuple[Tensor, ...], metadata: Any, dtype: torch.dtype, *, out: Tensor | None = None) -> Any:
        made = shard.decode_gathered(outputs, dtype, out)
        return (made, (made,)) if out is None else None

    local.fsdp_pre_all_gather = gather if shard.padding else gather_even
    local.fsdp_post_all_gather = decode
    local.untyped_storage = lambda: shard.padded.codes.untyped_storage()  # type: ignore[method-assign, union-attr]


def plain_copy(value: DTensor) -> DTensor:
    """Return `value` with decoded rows if its rows are packed; otherwise return `value` itself."""
    weight = weight_of(value._local_tensor) if type(value._local_tensor) is PackedParameter else None
    if weight is None:
        return value
    return DTensor(weight.exported(), value._spec, requires_grad=False)


def forget_gathered(managed: Any) -> None:
    """Make FSDP2 allocate new memory for a parameter's next all-gather, since packed rows have another size than before."""
    managed.all_gather_outputs, managed._unsharded_inner_tensors = [], []
    if hasattr(managed, "_unsharded_param"):
        del managed._unsharded_param


# --- which parameters are packed ------------------------------------------------------------------------------------------


def reshard(model: nn.Module) -> None:
    """Free the whole parameters that modules under fully_shard may still hold after a forward pass without backward."""
    for module in model.modules():
        if hasattr(module, "_get_fsdp_state"):
            module.reshard()  # type: ignore[operator]


def managed_parameters(model: nn.Module) -> list[Any]:
    """Return torch's FSDPParam objects, which manage the sharded parameters of `model`."""
    found: list[Any] = []
    for module in model.modules():
        if hasattr(module, "_get_fsdp_state"):
            state: Any = module._get_fsdp_state()  # type: ignore[operator]
            groups = getattr(state, "_fsdp_param_groups", None)
            for group in [state._fsdp_param_group] if groups is None else groups:
                found += group.fsdp_params if group is not None else ()
    return found


def sharded_of_whole(model: nn.Module) -> dict[int, Any]:
    """Return the sharded parameter of each whole parameter that fully_shard has gathered, by the id of the whole one."""
    managed = managed_parameters(model)
    return {id(one._unsharded_param): one.sharded_param for one in managed if hasattr(one, "_unsharded_param")}


def reason_to_keep_shard_plain(parameter: DTensor, managed: Any, format: Format) -> str | None:
    """Return why a sharded parameter cannot be packed in `format`, the same in all processes; None if it can.

    Whether its values are finite is not checked here but by `finite_everywhere`.
    """
    if managed is None:
        return NOT_OF_FSDP
    missing = [name for name in NEEDED if not hasattr(managed, name)]
    if missing:
        return UNKNOWN_TORCH.format(torch.__version__, missing[0])
    local = parameter._local_tensor
    if type(local) is not Tensor or local.device.type not in DEVICES or local.dtype not in DTYPES:
        return f"its shard is a {type(local).__name__} of {local.dtype} on {local.device}"
    others = [placement for placement in parameter.placements if not (placement.is_replicate() or placement.is_shard(0))]
    if others or type(parameter.placements[-1]).__name__ != "Shard" or managed.is_dtensor:
        return OTHER_PLACEMENT.format(", ".join(map(str, parameter.placements)))
    if managed.offload_to_cpu:
        return OFFLOADED
    if managed.post_forward_mesh_info is not None and managed.post_forward_mesh_info is not managed.mesh_info:
        return PARTLY_RESHARDED
    if format.has_tensor_scale:
        return TENSOR_SCALE.format(format)
    return LARGER if format.nbytes(parameter.shape) >= parameter.numel() * parameter.dtype.itemsize else None


def finite_everywhere(parameters: Iterable[DTensor]) -> Iterator[bool]:
    """Yield for each parameter whether its values are finite in all processes.

    Every process must call this with the same parameters.
    """
    for parameter in parameters:
        local = parameter._local_tensor
        is_finite = local.isfinite().all().float().reshape(1) if local.numel() else torch.ones(1, device=local.device)
        for dim in range(parameter.device_mesh.ndim):
            dist.all_reduce(is_finite, dist.ReduceOp.MIN, group=parameter.device_mesh.get_group(dim))
        yield bool(is_finite)


Refused = dict[str, tuple[Format, str]]  # name -> requested format, and why it is not packed


def pack_shards(wanted: dict[str, tuple[DTensor, Format]], model: nn.Module) -> tuple[dict[str, PackedShard], Refused]:
    """Pack the `wanted` parameters of a model under fully_shard; return the packed ones, and why others cannot be packed.

    All processes must call this with the same parameters.
    """
    reshard(model)
    managed = {id(one.sharded_param): one for one in managed_parameters(model)}
    reasons = {name: reason_to_keep_shard_plain(p, managed.get(id(p)), format) for name, (p, format) in wanted.items()}
    possible = [name for name, reason in reasons.items() if reason is None]
    for name, is_finite in zip(possible, finite_everywhere(wanted[name][0] for name in possible), strict=True):
        reasons[name] = None if is_finite else NOT_FINITE
    packed: dict[str, PackedShard] = {}
    refused: Refused = {}
    for name, (parameter, format) in wanted.items():
        reason = reasons[name]
        if reason is None:
            packed[name] = pack_shard(parameter, managed[id(parameter)], format)
        else:
            refused[name] = format, reason
    return packed, refused
