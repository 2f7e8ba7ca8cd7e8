"""Reads autograd's graph: the nodes behind tensors, the tensors that each node saved, and a description of each (`Saved`).

Autograd numbers its nodes as it creates them (`_sequence_nr`), separately in each thread: a number identifies a node only together with
the thread. A node exposes its saved tensors by name: `_raw_saved_input` is a handle that takes hooks, `_saved_input` the tensor itself,
after autograd's check that it was not modified in place.
"""

# pyright: reportPrivateUsage=false, reportAttributeAccessIssue=false
# Autograd exposes saved tensors only by attributes that begin with an underscore, in torch 2.11 as in 2.13.

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cache
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from paredown.autograd.operations import Needs, Operand, OperationRow, Pin, Use, row_of, unknown_operand

BLOCK = 64  # values of a block in most formats
WHOLE_SHARE = 0.3  # a view of at least this share of its storage is packed with all of it: q, k and v are thirds
NO_SEQUENCE = 1 << 62  # AccumulateGrad nodes have numbers from here on
PLAIN_TYPES = (Tensor, nn.Parameter, nn.Buffer)
IS_WEIGHT = "is_of_weight"  # attribute of hooks that a session registers for packed weights
ACCUMULATE = "torch::autograd::AccumulateGrad"
DECODED = "DecodedBackward"  # node of a packed weight that is used outside of its module
VIEWS = tuple(f"{name}Backward0" for name in ("T", "Transpose", "Permute", "View", "UnsafeView", "Unsqueeze", "Squeeze", "Alias"))
CAST_NODE = "ToCopyBackward0"
IN_PLACE_ON_VIEW = "torch::autograd::CopySlices"  # the tensors that the operation saves are not exposed
SAVES_NOTHING = frozenset((*VIEWS, CAST_NODE, "ExpandBackward0", "SplitBackward0"))
# operations whose result counts as a weight if their input is one
WEIGHT_PRESERVING = frozenset((*VIEWS, CAST_NODE, "ExpandBackward0", "ReshapeBackward0", "CloneBackward0"))


@dataclass(eq=False, slots=True)
class Saved:
    """Describes a tensor that an autograd node saved: its slot name, its operation, and what backward needs of it.

    `raw` is autograd's handle (`SavedTensor`) of the tensor, which takes hooks. `tensor`, `node` and `raw` keep the graph alive: do not
    store them.
    """

    name: str
    module: str
    op: str
    operand: str
    use: Use
    kind: str  # "activation", "weight", "buffer", "input" or "hooked"
    pin: Pin | None
    bound: int | None
    reason: str
    is_centered: bool  # backward subtracts a mean from the tensor
    attribute: str  # autograd's name for the operand
    node: Any
    raw: Any
    tensor: Tensor | None  # None for "hooked"
    slot: Any = None  # set by the function that gets the description, and gets it again when the operation runs again

    @property
    def needs(self) -> Needs:
        """Return what backward needs of the tensor (values, bits, an index ...), and the limits on its format."""
        return Needs(self.use, self.pin, self.is_centered)

    def again(self, kind: str, node: Any, raw: Any, tensor: Tensor) -> Saved:
        """Return a copy of this description for the tensor that the same operation saved in a later forward pass.

        `kind`, `node`, `raw` (autograd's handle) and `tensor` are those of the later pass.
        """
        described = self.use, kind, self.pin, None, self.reason, self.is_centered
        return Saved(self.name, self.module, self.op, self.operand, *described, self.attribute, node, raw, tensor)


class ModuleCall:
    """Describes a running call of a module's forward, from which the tensors that are saved in the call get their names.

    Attributes that few calls set have their defaults in the class, which saves time.
    """

    needs: tuple[bool, ...] = ()  # for each tensor among its arguments, whether it requires a gradient
    checkpoint: tuple[Any, str] | None = None  # (frame, slot name of inputs) of a checkpoint, if this is the first call in it

    def __init__(self, module: nn.Module, path: str, is_plain_leaf: bool, first: int) -> None:
        """Begin a call of the module at `path`; the path ends with @2 for the module's second call in a forward pass.

        `is_plain_leaf`: what the function of this name returned. `first`: the number of the first autograd node that the call creates.
        """
        self.module, self.path, self.is_plain_leaf, self.first = module, path, is_plain_leaf, first
        self.counts: dict[str, int] = {}  # operation -> number of nodes that saved tensors

    @property
    def is_checkpointed(self) -> bool:
        """Return whether the called module is the layer of a checkpoint with use_reentrant=False."""
        return self.checkpoint is not None and self.checkpoint[1].startswith(f"{self.path}:")


@dataclass(eq=False, slots=True)
class Pass:
    """Describes a running forward pass of the model, of a submodule, or of a layer that backward runs again."""

    inputs: frozenset[int]  # storages of the caller's arguments
    modules: Iterable[nn.Module]
    calls: list[ModuleCall]
    seen: set[int] = field(default_factory=set)
    unreached: int = 0  # number of nodes created so far that no output led to when the graph was last read
    times: dict[str, int] = field(default_factory=dict)
    over: nn.Module | None = None  # the running module whose submodules are not followed; None if there is none
    is_repeated: bool = False  # whether `over` is a checkpointed layer; calls of its submodules are only counted
    # nodes that were read in other threads (branches); held as objects, since numbers of other threads overlap
    of_threads: set[Any] = field(default_factory=set)
    checkpoints: set[Any] = field(default_factory=set)  # frames of checkpoints seen so far, also one around the whole pass
    hooked: list[Saved] = field(default_factory=list)  # tensors that the running checkpoint's hooks have replaced so far
    hidden: Any = None  # the `HiddenLayer` that runs under no_grad
    hidden_layers: dict[int, Any] = field(default_factory=dict)  # by the number of the last node before the layer
    is_branch: bool = False  # whether the pass runs a submodule in another thread than the model's
    stops: frozenset[Any] = frozenset()  # nodes of a branch's arguments, which another thread created
    saves: Any = None  # `ReentrantSaves` of the second forward pass of a checkpointed layer
    # recorded `graph_parts.Segment`s of the last pass that began with the same module: (path of a call, whether read before it) -> segment
    segments: dict[tuple[str, bool], Any] = field(default_factory=dict)
    entrance: nn.Module | None = None  # the submodule with whose call the pass began; None if it began with the model's
    depth: int = 0  # number of running calls of `entrance`
    _constants: dict[int, tuple[str, Tensor]] | None = None

    @property
    def in_checkpoint(self) -> bool:
        """Return whether a layer under torch.utils.checkpoint is running in this pass."""
        return any(call.checkpoint is not None for call in self.calls)

    def kind_of_constant(self, storage: int) -> str | None:
        """Return "weight" or "buffer" if a parameter or a buffer has the storage at this address now, else None.

        A packed weight has a storage only while its module runs; when that storage was freed, an activation may get its address.
        """
        if self._constants is None:
            self._constants = constants_of(self.modules)
        kind, tensor = self._constants.get(storage, (None, None))
        return kind if tensor is not None and tensor.untyped_storage()._cdata == storage else None


next_number = torch._C._autograd._get_sequence_nr  # () -> the sequence number of the next node that this thread creates


def constants_of(modules: Iterable[nn.Module]) -> dict[int, tuple[str, Tensor]]:
    """Map the storage of each parameter and buffer of `modules` to ("weight", the parameter) or ("buffer", the buffer)."""
    kinds: dict[int, tuple[str, Tensor]] = {}
    for module in modules:
        for tensors, kind in ((module._buffers, "buffer"), (module._parameters, "weight")):
            for tensor in tensors.values():
                if tensor is not None and has_storage(tensor):
                    kinds[tensor.untyped_storage()._cdata] = kind, tensor
    return kinds


def is_around(running: Pass, module: nn.Module) -> bool:
    """Return whether `module` is inside the module whose call began `running`, a forward pass of another thread."""
    entrance = running.entrance
    return entrance is None or (module is not entrance and any(part is module for part in entrance.modules()))


@contextmanager
def passed_over(current: Pass | None) -> Generator[None]:
    """Return a context in which the pass `current` (None if none is running) does not record calls of modules."""
    if current is None or current.over is not None:
        yield
        return
    current.over = nn.Module()  # one that is never called: a pass follows modules again when the one in `over` returns
    try:
        yield
    finally:
        current.over = None


def covers_storage(tensor: Tensor) -> bool:
    """Return whether packing a saved tensor packs all of its storage, rather than the values of the tensor alone."""
    return is_packed_whole(tensor, tensor.untyped_storage().nbytes())


def packable_bytes(tensor: Tensor) -> int:
    """Return the bytes that packing a saved tensor would free: those of its whole storage, or of the tensor alone."""
    storage_bytes = tensor.untyped_storage().nbytes()
    return storage_bytes if is_packed_whole(tensor, storage_bytes) else tensor.nbytes


def is_packed_whole(tensor: Tensor, storage_bytes: int) -> bool:
    """Return whether `tensor`, perhaps a view, is packed together with all the `storage_bytes` of its storage.

    A view that is a large part of its storage (q, k or v of one matrix product) is packed with the whole storage if none of its blocks
    contains values outside of the view: those may have another magnitude, or be uninitialized.
    """
    view_bytes = tensor.numel() * tensor.itemsize
    if storage_bytes % tensor.itemsize or view_bytes >= storage_bytes:
        return storage_bytes % tensor.itemsize == 0
    return view_bytes >= WHOLE_SHARE * storage_bytes and _lies_in_blocks(tensor)


def _lies_in_blocks(tensor: Tensor) -> bool:
    """Return whether the memory of `tensor` consists of contiguous runs that begin and end at multiples of BLOCK values."""
    run, outer_strides = 1, list[int]()
    for stride, size in sorted(zip(tensor.stride(), tensor.size(), strict=True)):
        if stride == run and not outer_strides:
            run *= size
        elif size > 1:
            outer_strides.append(stride)
    return all(number % BLOCK == 0 for number in (run, tensor.storage_offset(), *outer_strides))


def new_nodes(values: Any, forward: Pass) -> list[tuple[int, Any]]:
    """Return (number, node) of the autograd nodes that lead to `values` and were not returned before, sorted by number.

    `forward`: the forward pass; only nodes that were created in it are returned.
    """
    stack: list[Any] = [t.grad_fn for t in tensors_in(values) if t.grad_fn is not None]
    nodes: list[tuple[int, Any]] = []
    first, last, seen = forward.calls[0].first, next_number(), forward.seen  # nodes of other threads may have numbers beyond these
    passed: set[Any] = set()
    while stack:
        node = stack.pop()
        number = node._sequence_nr()
        if forward.of_threads and node in forward.of_threads:  # this node was read, but perhaps not the nodes before it
            stack.extend([] if node in passed else [before for before, _ in node.next_functions if before is not None])
            passed.add(node)
        elif first <= number < last and number not in seen and node not in forward.stops:
            seen.add(number)
            nodes.append((number, node))
            stack.extend([before for before, _ in node.next_functions if before is not None])
    if len(nodes) > 1:
        nodes.sort(key=itemgetter(0))
    return nodes


def nodes_behind(values: Any, first: int) -> list[Any]:
    """Return the autograd nodes that lead to `values`, without leaves and nodes older than sequence number `first`."""
    pending: list[Any] = [t.grad_fn for t in tensors_in(values)]
    nodes: dict[Any, None] = {}
    while pending:
        node = pending.pop()
        if node is not None and node not in nodes and first <= node._sequence_nr() < NO_SEQUENCE:
            nodes[node] = None
            pending += [before for before, _ in node.next_functions]
    return list(nodes)


@cache
def attributes(node_name: str, node_type: type, only_major: bool) -> tuple[tuple[str, str, str], ...]:
    """Return the names by which a type of autograd node exposes each tensor that it saves, as triples.

    The triple of the operand `self` is ("self", "_raw_saved_self", "_saved_self"): its name, the attribute with autograd's handle and the
    attribute with the tensor. If `only_major`, statistics, library state and parameters are left out.
    """
    names = (a.removeprefix("_raw_saved_") for a in dir(node_type) if a.startswith("_raw_saved_"))
    operands = row_of(node_name).operands
    kept = (name for name in names if not (only_major and name in operands and operands[name].is_minor))
    return tuple((name, f"_raw_saved_{name}", f"_saved_{name}") for name in kept)


Named = tuple[str, Any, Tensor | None]


def saved_of(node: Any, name: str, only_major: bool) -> list[Named]:
    """Return (autograd's name, handle, tensor or None) for each tensor that `node` saved.

    The handle is autograd's `SavedTensor`. The tensor is None if hooks of other code hold it. `name`: the node's name. If `only_major`,
    statistics, library state and parameters are left out.
    """
    saved: list[Named] = []
    if isinstance(node, torch.autograd.function.BackwardCFunction):
        raws = node._raw_saved_tensors
        names = getattr(node, "stands_for", ("", ()))[1] or tuple(f"saved{i + 1}" for i in range(len(raws)))
        _read(saved, names, raws, node, "saved_tensors")
        return saved
    for attribute, raw_name, tensor_name in attributes(name, type(node), only_major):
        raw = getattr(node, raw_name)
        if isinstance(raw, tuple | list):
            _read(saved, [f"{attribute}{i + 1}" for i in range(len(raw))], raw, node, tensor_name)
        elif (hook := raw.unpack_hook) is not None:
            saved.extend([] if is_of_weight(hook) else [(attribute, raw, None)])
        else:
            try:
                tensor = getattr(node, tensor_name)
            except RuntimeError:  # modified in place since it was saved: backward raises the error
                continue
            if tensor is not None:
                saved.append((attribute, raw, tensor))
    return saved


def _read(saved: list[Named], names: Sequence[str], raws: Sequence[Any], node: Any, attribute: str) -> None:
    """Append (name, handle, tensor or None) to `saved` for each tensor in a list of tensors that a node saved.

    `attribute`: the name of that list on `node`. `names`, `raws`: the names and autograd's handles of the tensors.
    """
    hooks = [raw.unpack_hook for raw in raws]
    if any(hook is not None for hook in hooks):  # reading the tensors would run the hooks
        is_foreign = any(hook is not None and not is_of_weight(hook) for hook in hooks)
        named = [(name, raw) for name, raw, hook in zip(names, raws, hooks, strict=False) if not is_of_weight(hook)]
        saved.extend((name, raw, None if is_foreign else raw.data) for name, raw in named)
        return
    try:
        tensors = getattr(node, attribute)
    except RuntimeError:
        return
    saved.extend(named for named in zip(names, raws, tensors, strict=False) if isinstance(named[2], Tensor))


def is_of_weight(hook: Any) -> bool:
    """Return whether a saved-tensor hook was registered for a packed weight, which is not reported as an activation."""
    return getattr(hook, IS_WEIGHT, False)


def describe(node: Any, row: OperationRow, named: Named, forward: Pass, call: ModuleCall) -> Saved:
    """Return the description of a tensor that a node saved: its slot name, and what backward needs of it.

    `row`: the node's operation in the table of operations. `named`: what `saved_of` returned for the tensor. `forward` and `call`: the
    forward pass and the module call in which the node was created.
    """
    attribute, raw, tensor = named
    operand = row.operands.get(attribute) or (row.others and replace(row.others, name=attribute))
    if operand is None:
        is_float = tensor is None or tensor.is_floating_point()
        is_custom = isinstance(node, torch.autograd.function.BackwardCFunction)
        is_bool = tensor is not None and tensor.dtype is torch.bool
        operand = unknown_operand(attribute, is_float=is_float, is_bool=is_bool, is_custom=is_custom)
    kind = "hooked" if tensor is None else kind_of(tensor, operand.name, forward)
    if kind == "activation" and row.op == "mul" and isinstance(call.module, nn.modules.dropout._DropoutNd):
        row, operand = OperationRow("dropout"), Operand("mask", Use.MASK)  # on a CPU dropout multiplies by a float mask
    operand = operand.at(node)
    bound = _bound(operand, node) if tensor is not None else None
    name = f"{call.path}:{_prefix(call, row.op)}{operand.name}"
    described = operand.use, kind, operand.pin, bound, operand.reason, operand.is_centered
    return Saved(name, call.path, row.op, operand.name, *described, attribute, node, raw, tensor)


def _bound(operand: Operand, node: Any) -> int | None:
    try:
        return operand.bound(node) if operand.bound else None
    except RuntimeError:  # the bound is read from a saved tensor that was modified in place: backward raises the error
        return None


def _prefix(call: ModuleCall, op: str) -> str:
    """Return the part of a slot name between module and operand: "", "mul.", or "mul#2." for a call's second product."""
    if call.is_plain_leaf and len(call.counts) == 1 and 1 in call.counts.values():
        return ""
    count = call.counts.get(op, 1)
    return f"{op}." if count == 1 else f"{op}#{count}."


def kind_of(tensor: Tensor, operand: str, forward: Pass) -> str:
    """Return what a saved tensor is: "activation", "weight" (a parameter, its view or cast), "buffer" or "input".

    `operand`: its name in the table of operations. An input is a tensor of the caller of `forward`, the running forward pass.
    """
    node = tensor.grad_fn
    if node is not None:
        while node is not None and node.name() in WEIGHT_PRESERVING:
            node = node.next_functions[0][0]
        # such as a third of nn.MultiheadAttention's weight
        is_part = isinstance(tensor._base, nn.Parameter) and tensor._base.is_leaf
        if (node is not None and node.name() in (ACCUMULATE, DECODED)) or is_part:
            return "weight"
    elif operand == "weight" or tensor.requires_grad or isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter):
        return "weight"
    if not has_storage(tensor):
        return "activation"
    storage = tensor.untyped_storage()._cdata
    if storage in forward.inputs:
        return "input"
    return (node is None and forward.kind_of_constant(storage)) or "activation"


def is_view_modified_in_place(tensor: Tensor) -> bool:
    """Return whether a tensor is a view whose base was last modified through a view, in place."""
    node = tensor._base.grad_fn if tensor._base is not None else None
    return node is not None and node.name() == IN_PLACE_ON_VIEW


def tensors_in(values: Any, depth: int = 3) -> Iterator[Tensor]:
    """Yield the tensors in nested containers and in attributes of objects, up to `depth` levels deep."""
    if isinstance(values, Tensor):
        yield values
        return
    if isinstance(values, tuple) and all(value is None or isinstance(value, Tensor | str | int | float) for value in values):
        yield from (value for value in values if isinstance(value, Tensor))
        return
    for leaf in tree_leaves(values):
        if isinstance(leaf, Tensor):
            yield leaf
        elif depth and hasattr(leaf, "__dict__") and not isinstance(leaf, nn.Module | type | Enum) and not callable(leaf):
            yield from tensors_in(list(vars(leaf).values()), depth - 1)


def has_storage(tensor: Tensor) -> bool:
    """Return whether the storage of `tensor` holds its values; False for wrapper subclasses such as DTensor."""
    return type(tensor) in PLAIN_TYPES or hasattr(tensor, "fake_mode")


def is_plain_leaf(module: nn.Module) -> bool:
    """Return whether `module` is of torch.nn and has no children; slot names of tensors that it saves name no operation."""
    return type(module).__module__.startswith("torch.nn.") and next(module.children(), None) is None
