"""These functions save and load optimizer state, packed or decoded as in torch.optim, and load state of bitsandbytes.

`state_dict()` has ordinary tensors only, so that `torch.load(weights_only=True)` and distributed checkpoints can read it:

    state[i]["step"]                                      number of updates of parameter i
    state[i]["exp_avg.codes"], ["exp_avg.scales"]         a packed moment, bit for bit; ["exp_avg"] one that is not packed
    state[i]["weight.codes"], ["weight.scales"]           the parameter, if it is packed
    state[i]["gradient.codes"], ..., or ["gradient"]      the sum of gradients so far, between microbatches
    state[i]["folds"]                                     number of gradients added so far; it selects the random bits
    param_groups[j]["updates"], ["waiting"], ["seed"]     number of updates, of microbatches since the last update, seed

Rows of codes are rows of the parameter: a sharded parameter (DTensor) has sharded codes, and any number of processes can load them. Loading
checks everything before it changes anything. torch's load_state_dict would cast codes to the parameter's dtype, so they bypass it.
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from paredown.codec.packed import PackedTensor, encode
from paredown.errors import OptimError
from paredown.optim.parameter_state import ParameterState, fill_state, parts_in, put, roots_of
from paredown.optim.rules import from_stored_root, stored_root
from paredown.optim.sharded.local_rows import distributed_like, local
from paredown.roles import Role

if TYPE_CHECKING:
    from paredown.optim.base import Optimizer

RUN = ("updates", "waiting", "seed")  # "waiting", the number of microbatches, is the name in files of version 0.1
# raised by state of an unknown origin
LOAD_ERRORS = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
BNB_BLOCK = 256
BNB_NEST = "__bnb_optimizer_quant_state__"  # bitsandbytes nests here what FSDP is not to shard
BNB_NAMES = ("state1", "state2")


# --- save -------------------------------------------------------------------------------------------------------------


def state_dict(optimizer: Optimizer, base: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return an optimizer's state, packed as it is stored; `base` is the `state_dict` of torch.optim.Optimizer."""
    for entry in optimizer.entries:
        if entry.weight is not None:
            entry.weight.gather()
            put(optimizer.state[entry.parameter], "weight", entry.weight.packed.parts)
    made = base()
    run = {"updates": optimizer.updates, "waiting": optimizer._num_accumulated, "seed": optimizer.seed}
    made["param_groups"] = [{**group, **run} for group in made["param_groups"]]
    for entry in optimizer.entries:
        state = dict(made["state"].get(entry.number, {}))
        _add_gradient(entry, state, is_partial=optimizer._num_accumulated > 0)
        if not state:
            continue
        if not optimizer.is_torchs(entry):
            state["step"] = torch.tensor(float(entry.step))
        made["state"][entry.number] = state
        if isinstance(entry.parameter, DTensor):
            made["state"][entry.number] = {name: _as_dtensor(value, entry.parameter) for name, value in state.items()}
    return made


def _add_gradient(entry: ParameterState, state: dict[str, Any], *, is_partial: bool) -> None:
    """Add to `state` how many gradients were summed so far, and if `is_partial` (between microbatches) the sum itself."""
    if entry.gradient is not None:
        state["folds"] = torch.tensor(entry.gradient.total.folds)
    with torch._C.DisableTorchFunctionSubclass():
        grad = entry.parameter.grad
    if is_partial and grad is not None:
        if entry.gradient is not None and entry.gradient.lent(local(grad)):
            put(state, "gradient", entry.gradient.packed.parts)
            state["gradient.factor"] = entry.gradient.factor
        else:
            state["gradient"] = local(grad).detach()


def _as_dtensor(value: Any, like: DTensor) -> Any:
    """Return a DTensor that is distributed like the parameter `like`, and whose rows in this process are `value`."""
    if not isinstance(value, Tensor) or value.dim() == 0:
        return value
    whole = like.shape if value.shape == like._local_tensor.shape else torch.Size((like.shape[0], *value.shape[1:]))
    strides = torch.empty(whole, device="meta").stride()
    return DTensor.from_local(value, like.device_mesh, like.placements, run_check=False, shape=whole, stride=strides)


def export_state(optimizer: Optimizer) -> dict[str, Any]:
    """Return the state decoded to float32, in the form that the torch.optim optimizer of the same name loads."""
    state: dict[int, dict[str, Any]] = {}
    for entry in optimizer.entries:
        saved = optimizer.state.get(entry.parameter)
        if not saved:
            continue
        rule = optimizer.rule_for(optimizer.param_groups[entry.group])
        out = {name: _decoded(entry, role, name, saved) for role, name in zip(rule.roles, rule.names, strict=True)}
        step = saved["step"] if optimizer.is_torchs(entry) and "step" in saved else torch.tensor(float(entry.step))
        state[entry.number] = {**out, "step": step} if len(rule.roles) > 1 else out
    groups, start = [], 0
    for i, group in enumerate(optimizer.param_groups):
        count = len(group["params"])
        groups.append({**optimizer._torch_options(i), "params": list(range(start, start + count))})
        start += count
    return {"state": state, "param_groups": groups}


def _decoded(entry: ParameterState, role: Role, name: str, saved: dict[str, Any]) -> Tensor:
    format = entry.choices.format(role)
    if format is None or format.block is None or f"{name}.codes" not in saved:
        return saved[name].float() if name in saved else torch.zeros_like(entry.parameter, dtype=torch.float32)
    shape = local(entry.parameter).shape
    value = PackedTensor(format, shape, torch.float32, tuple(range(len(shape))), parts_in(saved, name)).decode()
    return from_stored_root(value, roots_of(role, format))


# --- load -------------------------------------------------------------------------------------------------------------


def load_state_dict(optimizer: Optimizer, loaded: Mapping[str, Any], base: Callable[[dict[str, Any]], None]) -> None:
    """Load state that `state_dict`, torch.optim or bitsandbytes saved; an error leaves the optimizer unchanged.

    `base` is the `load_state_dict` of torch.optim.Optimizer.
    """
    groups, state = [dict(group) for group in optimizer.param_groups], optimizer.state
    run = optimizer.updates, optimizer._num_accumulated, optimizer.seed
    try:
        _load(optimizer, loaded, base)
    except LOAD_ERRORS as error:
        for group, old in zip(optimizer.param_groups, groups, strict=True):
            group.clear()
            group.update(old)
        optimizer.state = state
        optimizer.updates, optimizer._num_accumulated, optimizer.seed = run
        if isinstance(error, OptimError):
            raise
        raise OptimError(
            f"the state cannot be read: {type(error).__name__}: {error}. Give what opt.state_dict() returned, unchanged."
        ) from error


def _load(optimizer: Optimizer, loaded: Mapping[str, Any], base: Callable[[dict[str, Any]], None]) -> None:
    if not isinstance(loaded, Mapping) or not {"state", "param_groups"} <= loaded.keys():
        has = sorted(loaded) if isinstance(loaded, Mapping) else type(loaded).__name__
        raise OptimError(
            f"the state of an optimizer has 'state' and 'param_groups'; this has {has}. Give what opt.state_dict() returned."
        )
    before = [dict(group) for group in optimizer.param_groups]
    old_ids = [i for group in loaded["param_groups"] for i in group["params"]]
    if len(loaded["param_groups"]) != len(before) or len(old_ids) != len(optimizer.entries):
        raise OptimError(
            f"the state is of {len(old_ids)} parameters in {len(loaded['param_groups'])} groups; this optimizer has "
            f"{len(optimizer.entries)} in {len(before)}. It belongs to another model or other groups."
        )
    taken: dict[Any, Any] = {}

    def keep(_: Any, state: dict[str, Any]) -> dict[str, Any]:
        taken.update(state["state"])
        new = {
            old: _new_state(optimizer, entry, taken.get(old) or {}) for old, entry in zip(old_ids, optimizer.entries, strict=True)
        }
        taken.clear()
        taken.update(new)
        return {**state, "state": {}}

    handle = optimizer.register_load_state_dict_pre_hook(keep)  # runs after the hooks of the user
    try:
        base(dict(loaded))
    finally:
        handle.remove()
    _restore_groups(optimizer, before)
    for old, entry in zip(old_ids, optimizer.entries, strict=True):
        _take(optimizer, entry, taken[old])


def _restore_groups(optimizer: Optimizer, before: list[dict[str, Any]]) -> None:
    """After loading, give parameter groups the formats that they had in `before`, and options that were not loaded."""
    first = optimizer.param_groups[0] if optimizer.param_groups else {}
    optimizer.updates, optimizer._num_accumulated = int(first.get("updates", 0)), int(first.get("waiting", 0))
    optimizer.seed = int(first.get("seed", optimizer.seed))
    format_options = optimizer.memory.defaults()
    for group, old in zip(optimizer.param_groups, before, strict=True):
        for name in RUN:
            group.pop(name, None)
        group.update({name: old[name] for name in format_options})
        for name, value in old.items():
            group.setdefault(name, value)


def _new_state(optimizer: Optimizer, entry: ParameterState, source: Mapping[str, Any]) -> dict[str, Any]:
    """Return `source`, a parameter's loaded state, in this optimizer's formats; raise OptimError if it does not fit."""
    source = {name: _local_rows(value, entry) for name, value in {**source, **source.get(BNB_NEST, {})}.items() if name != BNB_NEST}
    if not source:
        return {}
    rule = optimizer.rule_for(optimizer.param_groups[entry.group])
    if "state1" in source or "state2" in source:
        source = _from_bitsandbytes(entry, source, rule.names)
    _check_names(entry, source, rule.names)
    new: dict[str, Any] = {}
    if "gradient" in source:
        new["gradient"] = _same(entry, "gradient", source.pop("gradient"), local(entry.parameter))
    if optimizer.is_torchs(entry):
        return {**new, **_torchs_state(entry, source)}
    wanted: dict[str, Any] = {}
    fill_state(entry, rule, wanted)
    new |= {"step": int(source.get("step", 1 if len(rule.roles) == 1 else 0)), "folds": int(source.get("folds", 0))}
    for role, name in zip(rule.roles, rule.names, strict=True):
        new.update(_moment(entry, role, name, source, wanted))
    if "residue" in wanted:
        new["residue"] = _same(entry, "residue", source.get("residue", wanted["residue"]), wanted["residue"])
    return {**new, **_packed_state(entry, source)}


def _check_names(entry: ParameterState, source: Mapping[str, Any], names: tuple[str, ...]) -> None:
    """Raise OptimError if `source`, a parameter's loaded state, has unknown moments instead of `names`, this optimizer's."""
    known = ("step", "folds", "gradient", "residue", "weight.", "gradient.", *names, *(f"max_{name}s" for name in names))
    unknown = [name for name in source if not name.startswith(known)]
    if unknown and not any(name.startswith(names) for name in source if names):
        raise OptimError(
            f"{entry.name}: the state has {', '.join(sorted(unknown)[:5])}, and this optimizer stores {', '.join(names) or 'nothing'}: "
            "it belongs to another optimizer."
        )


def _torchs_state(entry: ParameterState, source: Mapping[str, Any]) -> dict[str, Any]:
    """Return `source`, the loaded state of a parameter that torch.optim updates; raise OptimError if it is packed."""
    packed = [name for name in source if name.endswith(".codes")]
    if packed:
        raise OptimError(
            f"{entry.name}: the state has {', '.join(packed)}, packed, and this optimizer stores it unpacked (tier 'full'). Make the "
            "optimizer with the same tier or plan, or load export_state()."
        )
    device, dtype = entry.parameter.device, entry.parameter.dtype
    return {n: v if n == "step" or not isinstance(v, Tensor) else v.to(device, dtype) for n, v in source.items()}


def _packed_state(entry: ParameterState, source: Mapping[str, Any]) -> dict[str, Any]:
    """Return the codes of a packed weight and of a sum of gradients from `source`, the loaded state, if it has them."""
    new: dict[str, Any] = {}
    for prefix, current in (("weight", entry.weight), ("gradient", entry.gradient)):
        if f"{prefix}.codes" not in source:
            continue
        if current is None:
            raise OptimError(
                f"{entry.name}: the state has a packed {prefix}, and this optimizer has a plain one. Apply the same plan to the model, "
                "then load."
            )
        expected: dict[str, Any] = {}
        put(expected, prefix, current.packed.parts)
        if prefix == "gradient":
            expected["gradient.factor"] = current.factor  # type: ignore[union-attr]
        new.update({part: _same(entry, part, source.get(part), tensor) for part, tensor in expected.items()})
    return new


def _moment(entry: ParameterState, role: Role, name: str, source: Mapping[str, Any], wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tensors to store for one moment: loaded codes unchanged, or a loaded unpacked moment after packing it.

    `name`: the moment's name in torch.optim. `wanted`: tensors as this optimizer stores them, which also stand for a missing moment.
    """
    expected = {part: tensor for part, tensor in wanted.items() if part == name or part.startswith(f"{name}.")}
    if expected.keys() <= source.keys():
        return {part: _same(entry, part, source[part], tensor) for part, tensor in expected.items()}
    if name not in source:
        if any(part.startswith(f"{name}.") for part in source):
            raise OptimError(
                f"{entry.name}: {name} was saved packed, and this optimizer stores it unpacked: it has another tier. Make the optimizer "
                "with the tier or plan it was saved with, or load export_state()."
            )
        return expected
    value = source[name]
    if value is None:
        return expected
    format = entry.choices.format(role)
    if tuple(value.shape) != tuple(local(entry.parameter).shape):
        raise OptimError(_shapes(entry, name, value, local(entry.parameter)))
    if format is None or format.block is None:
        return {name: value.to(expected[name].device, expected[name].dtype).contiguous().clone()}
    value = value.detach().to(local(entry.parameter).device, torch.float32)
    value = stored_root(value, roots_of(role, format))
    out: dict[str, Any] = {}
    put(out, name, encode(value, format, order="logical").parts)
    return out


def _same(entry: ParameterState, name: str, value: Any, like: Tensor) -> Tensor:
    """Return a copy of `value`, a loaded tensor, on the device of `like`; raise OptimError if their shapes or dtypes differ."""
    if not isinstance(value, Tensor) or value.shape != like.shape or value.dtype != like.dtype:
        raise OptimError(_shapes(entry, name, value, like))
    return value.detach().to(like.device, copy=True).contiguous()


def _shapes(entry: ParameterState, name: str, value: Any, like: Tensor) -> str:
    actual = f"{tuple(value.shape)} {value.dtype}" if isinstance(value, Tensor) else type(value).__name__
    return (
        f"{entry.name}: {name} in the state is {actual}, and {tuple(like.shape)} {like.dtype} is expected: it belongs to another model "
        "or another tier. Load it into an optimizer of the model and tier that saved it."
    )


def _local_rows(value: Any, entry: ParameterState) -> Any:
    """Return this process's rows of a loaded tensor if the parameter is sharded; return any other value unchanged."""
    if isinstance(value, DTensor):
        return value._local_tensor
    if not isinstance(value, Tensor) or value.dim() == 0 or not isinstance(entry.parameter, DTensor):
        return value
    rows, cols = entry.rows_and_cols
    first = entry.first_index // cols
    return value[first : first + rows] if value.shape[0] == entry.parameter.shape[0] else value


def _from_bitsandbytes(entry: ParameterState, source: Mapping[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    """Return a parameter's state from an optimizer of bitsandbytes decoded to float32, under torch.optim's names.

    value = qmap[code] * absmax of its block of 256; a 32-bit tensor is unchanged.
    """
    out: dict[str, Any] = {"step": source.get("step", 0)}
    for name, bnb_name in zip(names, BNB_NAMES, strict=False):
        codes = source.get(bnb_name)
        if codes is None:
            continue
        if codes.dtype is torch.uint8:
            scale = source[f"absmax{bnb_name[-1]}"].float().repeat_interleave(BNB_BLOCK)[: codes.numel()]
            codes = source[f"qmap{bnb_name[-1]}"].float()[codes.long().flatten()] * scale
        out[name] = codes.float().view(entry.parameter.shape)
    return out


def _take(optimizer: Optimizer, entry: ParameterState, new: dict[str, Any]) -> None:
    """Replace a parameter's state by `new`, which must have been checked; codes are copied into the existing tensors."""
    p, grad = entry.parameter, new.pop("gradient", None)
    if grad is not None:
        p.grad = distributed_like(grad, p)
    if not optimizer.is_torchs(entry):
        entry.step, entry.updated, folds = new.pop("step", 0), False, new.pop("folds", 0)
        if entry.weight is not None and "weight.codes" in new:
            entry.weight.packed.parts.copy_(parts_in(new, "weight"))
            entry.weight.changed()
        if entry.gradient is not None:
            if "gradient.codes" in new:
                p.grad = distributed_like(entry.gradient.lend(p.dtype), p)
                entry.gradient.packed.parts.copy_(parts_in(new, "gradient"))
                entry.gradient.factor.copy_(new["gradient.factor"])
                entry.gradient.total.is_scaled = True
            total = entry.gradient.total
            total.folds, total.seed = folds, replace(total.seed, value=optimizer.seed)
        new = {name: value for name, value in new.items() if not name.startswith(("weight.", "gradient."))}
    if new:
        optimizer.state[p] = new
