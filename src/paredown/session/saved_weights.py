"""Weights that autograd saved for backward: each is replaced by the promise to decode it again.

What is found is a saved tensor that lies in the memory of a plain packed parameter (the parameter, a view of it), or a cast of one, as
autocast makes it: its history leads through casts and views to the parameter. Such a one is compared with the values once, bit for bit;
after that its history, size and strides tell it.

A packed parameter that is plain at this moment: who uses it, and who held it before.
"""


# pyright: reportPrivateUsage=false, reportAttributeAccessIssue=false

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn

from paredown.optim.packed_parameter import Decoded
from paredown.optim.packed_weight import KEY, Weight, same_bits, weight_of
from paredown.session.stored_tensors import MODIFIED
from paredown.trace.autograd_graph import (
    ACCUMULATE,
    CAST_NODE,
    IS_WEIGHT,
    NO_SEQUENCE,
    SAVES_NOTHING,
    VIEWS,
    attributes,
    has_storage,
    is_of_weight,
    next_number,
    tensors_in,
)

LEADS_ON = frozenset((*VIEWS, CAST_NODE))
DECODED = f"{Decoded.__name__}Backward"


class DeferredWeight:
    """A saved weight, to be decoded when backward asks for it."""

    __slots__ = ("accumulator", "dtype", "offset", "size", "stride", "version", "weight")

    def __init__(self, weight: Weight, saved: Tensor) -> None:
        self.weight, self.version, self.dtype = weight, weight.version, saved.dtype
        self.size, self.stride, self.offset = saved.size(), saved.stride(), int(saved.storage_offset())
        # autograd asks for the node of a leaf again, and does not keep it by itself
        self.accumulator = (weight.accumulator or accumulator_of(saved)) if saved.is_leaf and saved.requires_grad else None

    def tensor(self) -> Tensor:
        """The saved tensor again."""
        if self.weight.version != self.version:
            raise RuntimeError(MODIFIED.format(self.version, self.weight.version))
        return self.weight.shared(self.dtype).as_strided(self.size, self.stride, self.offset)


setattr(DeferredWeight.tensor, IS_WEIGHT, True)  # others pass over what is replaced by this


class SavedWeightFinder:
    """Finds what the calls of one module saved of its weights, the second time by the way that led there the first time."""

    __slots__ = ("_trails",)

    def __init__(self) -> None:
        # name of the output's node and number of nodes -> edges to follow from there, name of the handle
        self._trails: dict[tuple[str, int], list[tuple[tuple[int, ...], str]]] = {}

    def let_go(self, output: Any, first: int, memory: Mapping[int, Weight]) -> bool:
        """`release_saved_weights`, for what one call of the module made."""
        if not isinstance(output, Tensor) or output.grad_fn is None:
            return release_saved_weights(output, first, memory)
        node = output.grad_fn
        key = node.name(), next_number() - first
        trails = self._trails.get(key)
        if trails is not None:
            if all([_replace(_follow(node, hops, name), memory) for hops, name in trails]):
                return False
            del self._trails[key]
        found_by: list[tuple[tuple[int, ...], str]] = []
        is_hooked = release_saved_weights(output, first, memory, found_by)
        if not is_hooked and all(name for _, name in found_by):
            self._trails[key] = found_by
        return is_hooked


def _follow(node: Any, hops: tuple[int, ...], name: str) -> Any:
    """The handle that a trail leads to, None if there is no such, or others hold it."""
    for hop in hops:
        edges = node.next_functions
        node = edges[hop][0] if hop < len(edges) else None
        if node is None:
            return None
    raw = getattr(node, name, None)
    return raw if raw is not None and raw.unpack_hook is None else None


def release_saved_weights(
    values: Any, first: int, memory: Mapping[int, Weight], trails: list[tuple[tuple[int, ...], str]] | None = None
) -> bool:
    """Replace the weights that the nodes behind `values` saved, from number `first` on; whether hooks of others may hold any of them.

    `memory`: the storages of plain parameters, and whose they are. `trails` gets the way to each that was replaced: the edges from the
    node of `values`, and the name of the handle, "" where it has none of its own.
    """
    is_hooked = False
    for node, hops in _nodes(values, first):
        for name, raw in _saved(node):
            hook = raw.unpack_hook
            if hook is not None:
                is_hooked = is_hooked or (not is_of_weight(hook) and keeps_objects(hook))
            elif _replace(raw, memory) and trails is not None:
                trails.append((hops, name))
    return is_hooked


def _saved(node: Any) -> list[tuple[str, Any]]:
    """The handles of what a node saved, with their names where each has one."""
    name = node.name()
    if name in SAVES_NOTHING:
        return []
    if isinstance(node, torch.autograd.function.BackwardCFunction):
        return [("", raw) for raw in node._raw_saved_tensors]
    found: list[tuple[str, Any]] = []
    for _, raw_name, _ in attributes(name, type(node), False):
        raw = getattr(node, raw_name)
        found.extend([("", one) for one in raw] if isinstance(raw, tuple | list) else [(raw_name, raw)])
    return found


def _replace(raw: Any, memory: Mapping[int, Weight]) -> bool:
    """Replace a saved tensor, if it is a weight's."""
    if raw is None:
        return False
    tensor = raw.data
    if not isinstance(tensor, Tensor) or not has_storage(tensor) or tensor.layout is not torch.strided:
        return False
    weight = memory.get(tensor.untyped_storage()._cdata)
    if weight is None or tensor.dtype is not weight.dtype:
        weight = _weight_behind(tensor)
    if weight is None:
        return False
    again = DeferredWeight(weight, tensor)
    raw.register_hooks(lambda _: again, DeferredWeight.tensor)
    return True


def keeps_objects(hook: Any) -> bool:
    """Whether a hook may keep the very object that was saved; checkpointing keeps none of them."""
    return getattr(hook, "__module__", "") != torch.utils.checkpoint.__name__


def accumulator_of(parameter: Tensor) -> Any:
    """The node that accumulates the gradient of a leaf."""
    if torch.is_grad_enabled():
        node: Any = parameter.view_as(parameter).grad_fn
        return node.next_functions[0][0]
    return torch.autograd.graph.get_gradient_edge(parameter).node


def _nodes(values: Any, first: int) -> Iterator[tuple[Any, tuple[int, ...]]]:
    """The nodes behind `values` that were made since `first`, and the edges that lead to each."""
    waiting: list[Any] = [(t.grad_fn, ()) for t in tensors_in(values) if t.grad_fn is not None]
    seen: set[Any] = set()
    while waiting:
        node, hops = waiting.pop()
        if node not in seen and first <= node._sequence_nr() < NO_SEQUENCE:
            seen.add(node)
            yield node, hops
            waiting.extend([(before, (*hops, i)) for i, (before, _) in enumerate(node.next_functions) if before is not None])


def leads_to_weight(values: Any) -> bool:
    """Whether any of the tensors in `values` is a view or a cast of the values of a packed weight, decoded outside of modules."""
    return any(_source(t)[0] == DECODED for t in tensors_in(values))


def _source(tensor: Tensor) -> tuple[str, Any, list[str]]:
    """Name and node that a history of casts and views leads to, and the names on the way."""
    node, names = tensor.grad_fn, list[str]()
    while node is not None:
        name = node.name()
        if name not in LEADS_ON:
            return name, node, names
        names.append(name)
        node = node.next_functions[0][0]
    return "", None, names


def _weight_behind(tensor: Tensor) -> Weight | None:
    """The weight that a saved tensor is a cast of, or the decoded values of."""
    name, node, names = _source(tensor)
    weight: Weight | None = None
    if name == DECODED:
        weight = node.weight
    elif name == ACCUMULATE and CAST_NODE in names:
        weight = weight_of(node.variable)
    if (
        weight is None
        or tensor.untyped_storage().nbytes() != weight.size.numel() * tensor.itemsize
        or tensor.device != weight.packed.device
    ):
        return None
    place = (name, *names, tensor.dtype, tensor.size(), tensor.stride(), tensor.storage_offset())
    return weight if place in weight.places or _is_equal(tensor, weight, place) else None


def _is_equal(tensor: Tensor, weight: Weight, place: Any) -> bool:
    """Whether the bits are those of the weight; the place is remembered, unless all values are alike, which proves nothing."""
    flat = tensor.detach().as_strided(weight.size, weight.stride, 0)
    is_equal = same_bits(flat, weight.shared(tensor.dtype))
    if is_equal and bool((flat != flat.flatten()[0]).any()):
        weight.places.add(place)
    return is_equal


# --- A packed parameter that is plain at this moment ---


class WeightUse:
    """A packed parameter in use: how many held it when it was made plain.

    It keeps the node that accumulates the gradient: whether a graph holds that too changes no count then.
    """

    __slots__ = ("_accumulator", "_like", "handle", "holders", "is_hooked", "parameter", "weight")

    def __init__(self, parameter: nn.Parameter, weight: Weight) -> None:
        self.parameter, self.weight = parameter, weight
        self._accumulator: Any = None
        self._like: Tensor | None = None
        self.handle: Any = None
        self.holders, self.is_hooked = (0, 0), False

    def look(self) -> None:
        """Count who holds it before it is used; it is plain by now."""
        weight = self.weight
        if self._like is not weight.empty:  # another dtype or device has another node
            self._accumulator, self._like = None, weight.empty
        if self._accumulator is None and self.parameter.requires_grad and not torch.is_inference_mode_enabled():
            self._accumulator = accumulator_of(self.parameter)
        weight.accumulator = self._accumulator
        self.holders = self.count()

    def count(self) -> tuple[int, int]:
        """Holders of the tensor, and of the object."""
        return self.parameter._use_count(), sys.getrefcount(self.parameter)


class WeightCall:
    """A module whose forward is running."""

    __slots__ = ("entries", "first", "place")

    def __init__(self, place: PackedModule, entries: list[WeightUse]) -> None:
        self.place, self.entries, self.first = place, entries, 0


class PackedModule:
    """A module with packed parameters: what its calls need, kept from one to the next."""

    __slots__ = ("_free", "_known", "finder", "module")

    def __init__(self, module: nn.Module) -> None:
        self.module, self.finder = module, SavedWeightFinder()
        self._known: list[tuple[int, Weight | None]] = []
        self._free: list[WeightCall] = []  # calls that ended, to be used again

    def call(self) -> WeightCall:
        """A call that begins now."""
        parameters = self.module._parameters.values()
        known = [(id(p), vars(p).get(KEY)) for p in parameters if p is not None]
        if known != self._known:
            self._known, self._free = known, []
        try:
            call = self._free.pop()
        except IndexError:
            pairs = [(p, vars(p).get(KEY)) for p in parameters if p is not None]
            # a view of a weight that was made a parameter, nn.Parameter(p.data), is used as code outside of modules uses it
            call = WeightCall(self, [WeightUse(p, weight) for p, weight in pairs if weight is not None and weight.parameter is p])
        call.first = next_number()
        return call

    def ended(self, call: WeightCall) -> None:
        """Nobody needs this call any more."""
        self._free.append(call)
