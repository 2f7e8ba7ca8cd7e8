"""Replaces weights saved for backward by `DeferredWeight`, which decodes the packed weight when backward uses it.

A saved tensor is replaced if it lies in the memory of an unpacked parameter (the parameter or a view of it), or if it is a cast of one, as
autocast makes: its autograd history leads through casts and views to the parameter. The values of a cast are compared with the weight
bit for bit the first time; later its history, size and strides identify it. The cast of a frozen weight has no history: it is a saved
tensor without a gradient of the weight's size, and is compared in every call; in LAYERS, which save one such tensor, in the first only.

Inside torch.utils.checkpoint (non-reentrant) saved tensors have its hooks already, and the second forward pass would hold the decoded
frozen weights of a whole layer until backward reads them: `CheckpointedSaves` defers them there.

`PackedModule` describes a module with packed parameters, and `WeightCall` one call of it: the weights, and the first new node of the graph.
"""

# pyright: reportPrivateUsage=false, reportAttributeAccessIssue=false

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from paredown.autograd.graph import (
    ACCUMULATE,
    CAST_NODE,
    DECODED,
    IS_WEIGHT,
    NO_SEQUENCE,
    SAVES_NOTHING,
    attributes,
    has_storage,
    is_of_weight,
    next_number,
    tensors_in,
)
from paredown.autograd.rematerialization import SAME_MEMORY_ORDER
from paredown.autograd.second_passes import SecondPass
from paredown.codec.packed import DTYPES
from paredown.optim.packed_parameter import PackedParameter, decoded_copy
from paredown.optim.packed_weight import KEY, PackHook, Weight, same_bits, weight_of
from paredown.optim.sharded import packed_shards

top_hooks = torch._C._autograd._top_saved_tensors_default_hooks
COMPILED = "torch.compile runs its module, and skips the hooks that would decode it"
SCRIPTED = "TorchScript runs its module"
FROZEN_CAST = "the cast of a frozen weight"
# layers of torch whose forward pass uses a weight in one matrix product or convolution, and no other tensor of its size
LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


class DeferredWeight:
    """Replaces a saved weight in autograd's graph, and decodes the packed weight when backward uses it."""

    __slots__ = ("accumulator", "dtype", "offset", "size", "stride", "version", "weight")

    def __init__(self, weight: Weight, saved: Tensor) -> None:
        self.weight, self.version, self.dtype = weight, weight.version, saved.dtype
        self.size, self.stride, self.offset = saved.size(), saved.stride(), int(saved.storage_offset())
        # unpacking looks up the leaf's AccumulateGrad node, and autograd holds that node only weakly
        self.accumulator = (weight.accumulator or accumulator_of(saved)) if saved.is_leaf and saved.requires_grad else None

    def tensor(self) -> Tensor:
        """Return the decoded saved tensor."""
        self.weight.check_version(self.version)
        return self.weight.shared(self.dtype).as_strided(self.size, self.stride, self.offset)


setattr(DeferredWeight.tensor, IS_WEIGHT, True)  # other hooks skip saved tensors that have this unpack hook


def _follow(node: Any, hops: tuple[int, ...], name: str) -> Any:
    """Return autograd's handle of the saved tensor at the end of a path in the graph; None if there is none.

    `hops`: the indices of the edges from `node` on. `name`: the name of the saved-tensor attribute of the last node.
    """
    for hop in hops:
        edges = node.next_functions
        node = edges[hop][0] if hop < len(edges) else None
        if node is None:
            return None
    raw = getattr(node, name, None)
    return raw if raw is not None and raw.unpack_hook is None else None


def release_saved_weights(
    values: Any,
    first: int,
    memory: Mapping[int, Weight],
    trails: list[tuple[tuple[int, ...], str]] | None = None,
    *,
    is_layer: bool = False,
) -> bool:
    """Replace weights that the nodes behind `values` saved; return whether other code's hooks may hold one.

    Only nodes with a sequence number of at least `first` are visited. `memory`: storage address -> weight, for all decoded weights.
    `trails` receives the path to each replaced tensor: the indices of edges from the node of `values`, and the name of the saved-tensor
    attribute, "" if it is one of a list. `is_layer`: whether `values` are the output of a module whose class is in LAYERS.
    """
    is_hooked = False
    for node, hops in _nodes(values, first):
        for name, raw in _saved(node):
            hook = raw.unpack_hook
            if hook is not None:
                is_hooked = is_hooked or (not is_of_weight(hook) and keeps_objects(hook))
            elif _replace(raw, memory, is_layer=is_layer) and trails is not None:
                trails.append((hops, name))
    return is_hooked


def _saved(node: Any) -> list[tuple[str, Any]]:
    """Return (attribute name, handle) for each tensor that a node saved; the name is "" for those in a list."""
    name = node.name()
    if name in SAVES_NOTHING:
        return []
    if isinstance(node, torch.autograd.function.BackwardCFunction):
        return [("", raw) for raw in node._raw_saved_tensors]
    handles: list[tuple[str, Any]] = []
    for _, raw_name, _ in attributes(name, type(node), False):
        raw = getattr(node, raw_name)
        handles.extend([("", handle) for handle in raw] if isinstance(raw, tuple | list) else [(raw_name, raw)])
    return handles


def _replace(raw: Any, memory: Mapping[int, Weight], *, is_layer: bool) -> bool:
    """Replace a saved tensor, given its handle, if it is a decoded weight or a view or cast of one; return whether it is.

    `raw`: autograd's `SavedTensor`. `memory`, `is_layer`: as for `release_saved_weights`.
    """
    if raw is None:
        return False
    tensor = raw.data
    if not isinstance(tensor, Tensor) or not has_storage(tensor) or tensor.layout is not torch.strided:
        return False
    weight = memory.get(tensor.untyped_storage()._cdata)
    if weight is None or tensor.dtype is not weight.dtype:
        weight = _weight_behind(tensor)
    if weight is None and not tensor.requires_grad:
        weight = _frozen_weight_of(tensor, memory, is_layer=is_layer)
    if weight is None:
        return False
    deferred = DeferredWeight(weight, tensor)
    raw.register_hooks(lambda _: deferred, DeferredWeight.tensor)
    return True


class CheckpointedSaves:
    """Registers saved-tensor hooks that keep decoded frozen weights out of a checkpoint's second forward pass.

    The hooks of checkpointing get every tensor, so that they count as many in both forward passes. What they return for a weight is
    dropped: the second forward pass then stores nothing for the weight, and backward decodes it.
    """

    __slots__ = ("__weakref__", "_memory", "_outer")

    def __init__(self, outer: tuple[Any, Any], weights: Iterable[Weight]) -> None:
        self._outer, self._memory = outer, {weight.address: weight for weight in weights}
        # not torch.autograd.graph.saved_tensors_hooks: this object and that one would refer to each other, and hold the saved tensors of
        # the checkpoint until the next garbage collection
        torch._C._autograd._push_saved_tensors_default_hooks(self.pack, self.unpack)

    def pack(self, tensor: Tensor) -> Any:
        """Return a `DeferredWeight` for a frozen weight or a view of it; for other tensors, what the hook of checkpointing returns."""
        packed = self._outer[0](tensor)
        is_strided = has_storage(tensor) and tensor.layout is torch.strided
        weight = self._memory.get(tensor.untyped_storage()._cdata) if is_strided else None
        return (packed, None) if weight is None or tensor.dtype is not weight.dtype else (None, DeferredWeight(weight, tensor))

    def unpack(self, packed: tuple[Any, DeferredWeight | None]) -> Tensor:
        """Return the saved tensor, decoded if it is a weight."""
        return self._outer[1](packed[0]) if packed[1] is None else packed[1].tensor()

    def leave(self) -> None:
        """Remove these saved-tensor hooks, unless other code has removed them already."""
        hooks = top_hooks(True)
        if hooks is not None and hooks[0] == self.pack:
            torch._C._autograd._pop_saved_tensors_default_hooks()


def keeps_objects(hook: Any) -> bool:
    """Return whether a saved-tensor hook may hold the tensor itself; the hooks of torch.utils.checkpoint do not."""
    if isinstance(getattr(hook, "__self__", None), CheckpointedSaves | SecondPass):
        return False
    return getattr(hook, "__module__", "") != torch.utils.checkpoint.__name__


def hook_of_checkpoint() -> PackHook | None:
    """Return the pack hook of the innermost non-reentrant checkpoint that runs; None if none runs."""
    hooks = top_hooks(True)
    return hooks[0] if hooks is not None and not keeps_objects(hooks[0]) else None


def accumulator_of(parameter: Tensor) -> Any:
    """Return the autograd node that accumulates the gradient of a leaf tensor."""
    if torch.is_grad_enabled():
        node: Any = parameter.view_as(parameter).grad_fn
        return node.next_functions[0][0]
    return torch.autograd.graph.get_gradient_edge(parameter).node


Accumulators = dict[Weight, tuple[Tensor, Any]]  # `Weight.empty` and the AccumulateGrad node of its parameter


def gradient_node(weight: Weight, known: Accumulators) -> Any:
    """Return the autograd node that accumulates the gradient of a weight; `known` has the nodes found before.

    Return None for frozen weights, and in inference mode.
    """
    parameter = weight.parameter
    if parameter is None or not parameter.requires_grad:
        return None
    like, node = known.get(weight, (None, None))
    if like is weight.empty:  # otherwise there is none yet, or the dtype or device changed, and with it the node
        return node
    if torch.is_inference_mode_enabled():
        return None
    node = accumulator_of(parameter)
    known[weight] = weight.empty, node
    return node


def _nodes(values: Any, first: int) -> Iterator[tuple[Any, tuple[int, ...]]]:
    """Yield (node, indices of the edges that lead to it) for the autograd nodes behind `values` from number `first` on."""
    pending: list[Any] = [(t.grad_fn, ()) for t in tensors_in(values) if t.grad_fn is not None]
    seen: set[Any] = set()
    while pending:
        node, hops = pending.pop()
        if node not in seen and first <= node._sequence_nr() < NO_SEQUENCE:
            seen.add(node)
            yield node, hops
            pending.extend([(edge, (*hops, i)) for i, (edge, _) in enumerate(node.next_functions) if edge is not None])


def leads_to_weight(values: Any) -> bool:
    """Return whether a tensor in `values` is a view or cast of a weight decoded outside of its module."""
    return any(_source(t)[0] == DECODED for t in tensors_in(values))


def _source(tensor: Tensor) -> tuple[str, Any, list[str]]:
    """Return (name, node) of the operation that computed `tensor`, and names of casts and views after it."""
    node, names = tensor.grad_fn, list[str]()
    while node is not None:
        name = node.name()
        if name not in SAME_MEMORY_ORDER:
            return name, node, names
        names.append(name)
        node = node.next_functions[0][0]
    return "", None, names


def _weight_behind(tensor: Tensor) -> Weight | None:
    """Return the packed weight that a saved tensor was decoded from; None if there is none."""
    name, node, names = _source(tensor)
    weight: Weight | None = None
    if name == DECODED:
        weight = node.weight
    elif name == ACCUMULATE and CAST_NODE in names:
        weight = weight_of(node.variable)
    if weight is None or not _has_size(tensor, weight):
        return None
    place = (name, *names, tensor.dtype, tensor.size(), tensor.stride(), tensor.storage_offset())
    return weight if place in weight.places or _is_equal(tensor, weight, place) else None


def _has_size(tensor: Tensor, weight: Weight) -> bool:
    """Return whether a tensor's storage has as many values as the weight, on the same device."""
    return tensor.untyped_storage().nbytes() == weight.size.numel() * tensor.itemsize and tensor.device == weight.packed.device


def _frozen_weight_of(cast: Tensor, memory: Mapping[int, Weight], *, is_layer: bool) -> Weight | None:
    """Return the frozen weight in `memory` of which the saved tensor `cast` is a cast; None if there is none."""
    for weight in memory.values():
        parameter = weight.parameter
        if parameter is None or parameter.requires_grad or cast.dtype not in DTYPES or cast.dtype is weight.dtype:
            continue
        place = (FROZEN_CAST, cast.dtype, cast.size(), cast.stride(), cast.storage_offset())
        if not _has_size(cast, weight):
            continue
        if (is_layer and place in weight.places) or _is_equal(cast, weight, place):
            return weight
    return None


def _is_equal(tensor: Tensor, weight: Weight, place: Any) -> bool:
    """Return whether a tensor has the values of the weight, bit for bit.

    If so, `place` (a key for where the tensor was saved) is remembered, unless all values are the same, when the match may be chance.
    """
    flat = tensor.detach().as_strided(weight.size, weight.stride, 0)
    is_equal = same_bits(flat, weight.shared(tensor.dtype))
    if is_equal and bool((flat != flat.flatten()[0]).any()):
        weight.places.add(place)
    return is_equal


# --- calls of modules with packed parameters --------------------------------------------------------------------------------------


class PackedModule:
    """Describes a module with packed parameters, and the paths in autograd's graph to where its calls save them."""

    __slots__ = ("_is_layer", "_known", "_trails", "_weights", "accumulators", "module")

    def __init__(self, module: nn.Module) -> None:
        self.module, self._is_layer = module, type(module) in LAYERS
        # finding a node creates another one, and `Watch` compares numbers of nodes: it is found once
        self.accumulators: Accumulators = {}
        self._known: list[tuple[int, Weight | None]] = []
        self._weights: list[Weight] = []
        # (name of the output's node, number of new nodes) -> (indices of edges from there, name of the saved-tensor attribute)
        self._trails: dict[tuple[str, int], list[tuple[tuple[int, ...], str]]] = {}

    def weights(self) -> list[Weight]:
        """Return the packed weights among the current parameters of the module."""
        known = [(id(p), vars(p).get(KEY)) for p in self.module._parameters.values() if p is not None]
        if known != self._known:
            # nn.Parameter(p.data) of a packed parameter p is a view of the weight: it is decoded on use, as outside modules
            packed = [w for key, w in known if w is not None and (p := w.parameter) is not None and id(p) == key]
            self._known, self._weights, self.accumulators = known, packed, {}
        return self._weights

    def release(self, output: Any, call: WeightCall) -> bool:
        """Replace the weights that a call of the module saved; return whether hooks of other code may hold a weight.

        The paths in autograd's graph that earlier calls found are tried first.
        """
        memory = {weight.address: weight for weight in call.weights}
        node = output.grad_fn if isinstance(output, Tensor) else None
        key = (node.name(), next_number() - call.first) if node is not None else None
        trails = self._trails.get(key) if key is not None else None
        if trails is not None and key is not None:
            if all([_replace(_follow(node, hops, name), memory, is_layer=self._is_layer) for hops, name in trails]):
                return any(weight.is_referenced() for weight in call.weights) and release_saved_weights(output, call.first, memory)
            del self._trails[key]
        trails = list[tuple[tuple[int, ...], str]]()
        is_hooked = release_saved_weights(output, call.first, memory, trails, is_layer=self._is_layer)
        if key is not None and not is_hooked and all(name for _, name in trails):
            self._trails[key] = trails
        return is_hooked


class WeightCall:
    """Describes a running call of a module with packed parameters, which are decoded until the call ends."""

    __slots__ = ("_saves", "first", "place", "weights")

    def __init__(self, place: PackedModule, weights: list[Weight]) -> None:
        self.place, self.weights, self.first = place, weights, next_number()
        self._saves: CheckpointedSaves | None = None

    def begin_saves(self) -> None:
        """Begin to replace the frozen weights that the module saves, if it runs inside torch.utils.checkpoint."""
        hooks = top_hooks(True)
        if hooks is not None and not keeps_objects(hooks[0]):
            frozen = [weight for weight in self.weights if (p := weight.parameter) is not None and not p.requires_grad]
            self._saves = CheckpointedSaves(hooks, frozen) if frozen else None

    def end_saves(self) -> bool:
        """Stop replacing saved weights, and return whether `begin_saves` had begun to."""
        saves, self._saves = self._saves, None
        if saves is not None:
            saves.leave()
        return saves is not None


def is_frozen_linear(module: nn.Module) -> bool:
    """Return whether a module is an unmodified nn.Linear with frozen parameters, which needs no decoded weight."""
    if type(module) is not nn.Linear or "forward" in vars(module):
        return False
    with torch._C.DisableTorchFunctionSubclass():
        return not any(p.requires_grad for p in module._parameters.values() if p is not None)


def parameters_without_hooks(model: nn.Module, is_compiled: bool) -> dict[int, str]:
    """Return {id: reason} of the parameters that cannot be packed because hooks do not run in their modules."""
    reasons: dict[int, str] = {}
    for module in model.modules():
        compiled = hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None
        if compiled or (is_compiled and module is model):
            reasons.update({id(p): COMPILED for p in module.parameters()})
        if isinstance(module, torch.jit.ScriptModule):
            reasons.update({id(p): SCRIPTED for p in module.parameters()})
    return reasons


def export_plain(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """Replace packed weights in a state dict by decoded tensors, as a state-dict hook; tied weights stay one tensor."""
    for name in module._parameters:
        value = state.get(prefix + name)
        if isinstance(value, PackedParameter):
            weight = weight_of(value)
            state[prefix + name] = decoded_copy(value) if isinstance(value, nn.Parameter) or weight is None else weight.exported()
        elif isinstance(value, DTensor):
            state[prefix + name] = packed_shards.plain_copy(value)
