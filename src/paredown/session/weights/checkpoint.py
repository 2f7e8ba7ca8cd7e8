"""Loads and saves packed weights: `load_packed` packs dense files while reading, `save_packed` writes codes.

    with torch.device("meta"):
        model = Model()                                   # no memory
    load_packed(model, "folder", Plan.preset("frozen4"))  # one tensor at a time: it is read, packed, and freed
    save_packed(model, "packed")                          # codes and scales
    load_packed(other, "packed")                          # the same bits, nothing is quantized

The files of `save_packed` are safetensors: x.codes, x.scales, x.minimums and x.tensor_scale for a packed weight x, other tensors under
their names, and in each file the metadata "paredown", JSON: {"version": 1, "weights": {x: header of the packed tensor}}. A tensor that is
packed in the files, by paredown or by bitsandbytes (nf4), is not quantized again, whatever the plan says.
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from paredown.autograd.checkpoints import router_weights
from paredown.codec.packed import DTYPES, PART_NAMES, PackedTensor
from paredown.errors import CheckpointError, CodecError
from paredown.optim.packed_weight import weight_of
from paredown.plan.plan import Plan
from paredown.serial import PathText, brief, object_parts, parse_json
from paredown.session.weights.bitsandbytes_weights import four_bit_weights
from paredown.session.weights.safetensors_files import (
    FileTensor,
    FoundTensors,
    PackedInFiles,
    TensorRecord,
    find_tensors,
    is_or_are,
    listed,
    write_shards,
)
from paredown.session.weights.unattached_weights import export_decoded, pack_values, packed_parameter
from paredown.sizes import parse_bytes

VERSION = 1
METADATA = "paredown"
PACKED = "packed"  # begins the names of the files
DENSE = "model"
MAX_SHARD = "5GB"
WRAPPED = (".qdata", ":qdata", "_weight_qdata")  # end the names of tensors that torchao has quantized
ADAPTED = ".base_layer."


@dataclass(frozen=True)
class Checkpoint:
    """Holds a checkpoint's tensors by their names in the model; `where` is its folder or file, for messages."""

    where: Path
    tensors: Mapping[str, FileTensor | PackedInFiles]


def open_checkpoint(source: PathText | Sequence[PathText]) -> Checkpoint:
    """Find the tensors in safetensors files without reading values; raise CheckpointError for damaged files."""
    found = find_tensors(source, names=(PACKED, DENSE))
    wrapped = [name for name in found.tensors if name.endswith(WRAPPED)]
    if wrapped:
        raise CheckpointError(
            f"{found.where} has tensors that torchao has quantized ({listed(wrapped)}): their layout is private to classes of torchao, "
            "and is not read. Load the dense checkpoint with a plan."
        )
    rest: dict[str, FileTensor | PackedInFiles] = dict(found.tensors)
    for weight in (*_saved_weights(found), *four_bit_weights(found.tensors)):
        for name in weight.names:
            rest.pop(name, None)
        rest[weight.name] = weight
    return Checkpoint(found.where, rest)


def _saved_weights(found: FoundTensors) -> Iterator[PackedInFiles]:
    """Yield the packed weights that `save_packed` wrote into the files whose tensors are `found`."""
    for metadata in found.metadata:
        if METADATA in metadata:
            value = parse_json(metadata[METADATA], "metadata of packed weights", CheckpointError, name=str(found.where))
            headers = object_parts(value, "file of packed weights", ("weights",), ("weights",), VERSION, CheckpointError)["weights"]
            for name, header in headers.items():
                parts = {part: found.tensors[f"{name}.{part}"] for part in PART_NAMES if f"{name}.{part}" in found.tensors}
                shape, dtype = _shape_and_dtype(name, header)
                yield PackedInFiles(
                    name, shape, dtype, tuple(f"{name}.{part}" for part in parts), partial(_read, name, header, parts)
                )


def _shape_and_dtype(name: str, header: Any) -> tuple[torch.Size, torch.dtype]:
    try:
        parsed = json.loads(header)
        return torch.Size(parsed["shape"]), getattr(torch, parsed["dtype"])
    except (TypeError, KeyError, ValueError, AttributeError):
        raise CheckpointError(f"{name}: {brief(header)} is no header of a packed tensor.") from None


def _read(name: str, header: str, parts: Mapping[str, FileTensor]) -> PackedTensor:
    try:
        return PackedTensor.from_state_dict({"header": header, **{part: tensor.read() for part, tensor in parts.items()}})
    except CodecError as error:
        raise CheckpointError(f"{name}: {error}") from None


# --- loading --------------------------------------------------------------------------------------------------------------


def plan_of(plan: Plan | str | None) -> Plan:
    """Return `plan` itself or, for a name, the preset of this name; None stands for the plan that packs nothing."""
    chosen = Plan() if plan is None else Plan.preset(plan) if isinstance(plan, str) else plan
    if not isinstance(chosen, Plan):
        raise CheckpointError(f"plan is a Plan or the name of a preset, such as 'frozen4', not {brief(plan)}.")
    chosen.check_stored()
    return chosen


def load_packed(
    model: nn.Module,
    source: PathText | Sequence[PathText],
    plan: Plan | str | None = None,
    *,
    device: torch.device | str | None = None,
) -> None:
    """Load a model's parameters and buffers from safetensors files; each weight is packed in the plan's format when it is read.

    `source`: a folder, a file, an index, or a list of files. `plan`: a plan or preset, whose formats for frozen weights are used; weights
    that are packed in the files are not quantized again. At most one tensor is in host memory beside those that are stored. `device`: where
    the model will be, by default where its parameters are, and the CPU for those on the meta device. Parameters keep their dtypes, and are
    new objects: make optimizers afterwards. If files and model do not fit, CheckpointError says why, and the model is unmodified.
    """
    checkpoint, plan = open_checkpoint(source), plan_of(plan)
    for name in router_weights(model):
        plan = plan.set(name, None)
    slots = model.state_dict(keep_vars=True)
    names_by_id: dict[int, list[str]] = {}
    for name, tensor in slots.items():
        names_by_id.setdefault(id(tensor), []).append(name)
    _check_fits(model, checkpoint, slots, list(names_by_id.values()))
    loaded: dict[str, Tensor] = {}
    for names in names_by_id.values():
        name = _name_in_files(names, checkpoint)
        loaded |= dict.fromkeys(names, _loaded(name, checkpoint.tensors[name], slots[name], plan, device))
    for name, value in loaded.items():
        path, _, own = name.rpartition(".")
        module = model.get_submodule(path)
        if isinstance(value, nn.Parameter):
            module._parameters[own] = value
        else:
            module._buffers[own] = value
    export_decoded(model)


def _name_in_files(names: Sequence[str], checkpoint: Checkpoint) -> str:
    """Return the first name of a tied parameter in the files; raise CheckpointError if its values there differ."""
    first, *rest = [name for name in names if name in checkpoint.tensors]
    for name in rest:
        values = [value for value in (checkpoint.tensors[part].read() for part in (first, name)) if isinstance(value, Tensor)]
        if len(values) != 2 or not torch.equal(*values):
            raise CheckpointError(
                f"{checkpoint.where} has other values for {name} than for {first}, which the model ties: untie them."
            )
    return first


def _loaded(name: str, stored: FileTensor | PackedInFiles, slot: Tensor, plan: Plan, device: torch.device | str | None) -> Tensor:
    """Read the tensor `stored` in files, and return the parameter or buffer that replaces the model's `slot`."""
    where = torch.device(device) if device is not None else slot.device if slot.device.type != "meta" else torch.device("cpu")
    value = moved(stored.read(), name, where, slot.dtype)
    if not isinstance(slot, nn.Parameter):
        return value.decode() if isinstance(value, PackedTensor) else value
    parameter = parameter_of(name, value, plan)
    return parameter if weight_of(parameter) is not None else parameter.requires_grad_(slot.requires_grad)


def moved(value: Tensor | PackedTensor, name: str, device: Any, dtype: torch.dtype | None) -> Tensor | PackedTensor:
    """Return a dense or packed tensor moved to `device`, with values of `dtype`; codes stay the same."""
    if isinstance(value, Tensor):
        return value.to(device=device, dtype=dtype)
    if dtype is not None and dtype not in DTYPES:
        raise CheckpointError(f"{name} is stored packed, and decodes to float32, bfloat16 or float16, not to {dtype}.")
    return replace(value if device is None else value.to(device), dtype=dtype or value.dtype)


def parameter_of(name: str, value: Tensor | PackedTensor, plan: Plan) -> nn.Parameter:
    """Return a parameter with this value, packed if `value` is packed or the plan has a format for it."""
    return packed_parameter(value) if isinstance(value, PackedTensor) else pack_values(name, value, plan)


def _check_fits(model: nn.Module, checkpoint: Checkpoint, slots: Mapping[str, Any], groups: Sequence[Sequence[str]]) -> None:
    """Raise CheckpointError if the model and the checkpoint do not have the same tensors.

    `slots`: the model's tensors by name. `groups`: the names of each tensor, several if it is tied.
    """
    stored = checkpoint.tensors
    missing = [names[0] for names in groups if not any(name in stored for name in names)]
    check_names(checkpoint, type(model).__name__, missing, sorted(stored.keys() - slots.keys()))
    wrong = [name for name in slots if name in stored and slots[name].shape != stored[name].shape]
    if wrong:
        name = wrong[0]
        raise CheckpointError(
            f"{checkpoint.where} is of another model than this {type(model).__name__}: {name} has shape {tuple(stored[name].shape)} there "
            f"and {tuple(slots[name].shape)} here, one of {len(wrong)} that differ."
        )
    unknown = [name for name, buffer in model.named_buffers() if buffer.is_meta and name not in slots]
    if unknown:
        raise CheckpointError(
            f"{listed(unknown)} {is_or_are(unknown)} on the meta device and in no file, since state dicts leave non-persistent buffers "
            "out: make the buffers on a real device before load_packed, or use from_pretrained for a transformers model."
        )


def check_names(checkpoint: Checkpoint, model: str, missing: Sequence[str], unexpected: Sequence[str], advice: str = "") -> None:
    """Raise CheckpointError if the checkpoint lacks tensors or has tensors that the model does not have.

    `model`: the name of the model's class. `advice`: the end of the error message.
    """
    if not missing and not unexpected:
        return
    texts = [f"lacks {listed(missing)} of the model"] if missing else []
    texts += [f"has {listed(unexpected)}, which the model has not"] if unexpected else []
    raise CheckpointError(
        f"{checkpoint.where} does not fit this {model}: it {', and '.join(texts)}. Nothing was loaded: give the checkpoint of this "
        f"model.{advice}"
    )


# --- saving ---------------------------------------------------------------------------------------------------------------


def save_packed(model: nn.Module, folder: PathText, *, max_shard: int | str = MAX_SHARD) -> None:
    """Write a model's weights into `folder`, packed weights as codes and scales; `load_packed` reads the same bits.

    The model may have a session or none. `max_shard`: the largest file, such as "5GB". Files are written whole, and an index last, so that
    an interrupt leaves an earlier checkpoint intact. A transformers model is written with its config, and `from_pretrained` reads it.
    """
    path = Path(folder)
    adapted = [name for name, _ in model.named_parameters() if ADAPTED in name]
    if adapted:
        raise CheckpointError(
            f"the model has adapters ({listed(adapted)}): save the base before get_peft_model, or after model.unload(), and the adapters "
            "with their own save_pretrained()."
        )
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be made: {error.strerror}. Give the path of a folder.") from None
    for config in (getattr(model, "config", None), getattr(model, "generation_config", None)):
        if hasattr(config, "save_pretrained"):
            config.save_pretrained(path)  # type: ignore[union-attr]
    write_shards(path, PACKED, _records(model), describe=_describe, max_bytes=parse_bytes(max_shard))


def _describe(headers: dict[str, str]) -> dict[str, str]:
    return {"format": "pt", METADATA: json.dumps({"version": VERSION, "weights": headers})}


def _records(model: nn.Module) -> Iterator[TensorRecord]:
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            raise CheckpointError(f"{name} is distributed by fully_shard: save the model with torch.distributed.checkpoint.")
        weight = weight_of(parameter)
        if weight is None:
            yield TensorRecord(name, {name: parameter.detach()})
        else:
            weight.gather()
            state = weight.packed.state_dict()
            header = state.pop("header")
            yield TensorRecord(name, {f"{name}.{part}": tensor for part, tensor in state.items()}, header)
    for path, module in model.named_modules():
        for own, buffer in module._buffers.items():
            if buffer is not None and own not in module._non_persistent_buffers_set:
                name = f"{path}.{own}" if path else own
                yield TensorRecord(name, {name: buffer})
