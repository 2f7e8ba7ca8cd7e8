"""Reads autograd's graph: the nodes behind tensors, what each saved, and what that is.

Autograd numbers its nodes as it makes them (`_sequence_nr`), each thread for itself: a number names a node only beside the thread that
made it. Each node has its saved tensors by name: `_raw_saved_input` is a handle that can be hooked, `_saved_input` the tensor itself, after
autograd's own check that nobody modified it since.
"""

# pyright: reportPrivateUsage=false, reportAttributeAccessIssue=false
# What autograd saved is told by attributes whose names begin with an underscore, in torch 2.11 as in 2.13; there are no others.

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cache
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from paredown.trace.operations import Needs, Operand, OperationRow, Pin, Use, row_of, unknown_operand

MIN_PACKED_NUMEL = 4096  # smaller tensors stay as they are
BLOCK = 64  # the usual length of a block
WHOLE_SHARE = 0.3  # a view of at least this share of its storage is packed with all of it: q, k and v are thirds
NO_SEQUENCE = 1 << 62  # nodes that accumulate gradients have no place in the sequence
PLAIN_TYPES = (Tensor, nn.Parameter, nn.Buffer)
IS_WEIGHT = "is_of_weight"  # an attribute of hooks
ACCUMULATE = "torch::autograd::AccumulateGrad"
VIEWS = tuple(f"{name}Backward0" for name in ("T", "Transpose", "Permute", "View", "UnsafeView", "Unsqueeze", "Squeeze", "Alias"))
CAST_NODE = "ToCopyBackward0"
SAVES_NOTHING = frozenset((*VIEWS, CAST_NODE, "ExpandBackward0", "SplitBackward0"))
PASSING = frozenset(
    (*VIEWS, CAST_NODE, "ExpandBackward0", "ReshapeBackward0", "CloneBackward0")
)  # what a weight stays a weight through


@dataclass(eq=False, slots=True)
class Saved:
    """One tensor that one node saved. Don't keep `tensor`, `node` or `raw`: they hold the graph."""

    name: str
    module: str
    op: str
    operand: str
    use: Use
    kind: str  # "activation", "weight", "buffer", "input" or "hooked"
    pin: Pin | None
    bound: int | None
    reason: str
    is_centered: bool  # backward subtracts a mean from it
    attribute: str  # autograd's name of the operand
    node: Any
    raw: Any
    tensor: Tensor | None  # None for "hooked"

    @property
    def needs(self) -> Needs:
        """What its backward needs of it."""
        return Needs(self.use, self.pin, self.is_centered)


@dataclass(eq=False, slots=True)
class ModuleCall:
    """A module whose forward is running."""

    module: nn.Module
    path: str  # with @2 for a second call
    is_plain_leaf: bool
    first: int  # nodes from this sequence number on were made in it
    counts: dict[str, int] = field(default_factory=dict)  # of nodes that save something, by operation
    needs: tuple[bool, ...] = ()  # which of its arguments need a gradient


@dataclass(eq=False, slots=True)
class Pass:
    """A forward pass of the model that is running, or the part of one that runs in a thread of its own."""

    inputs: frozenset[int]  # storages that the caller brought
    modules: Iterable[nn.Module]
    calls: list[ModuleCall]
    seen: set[int] = field(default_factory=set)
    unreached: int = 0  # nodes made so far that no output reached when the graph was last read
    times: dict[str, int] = field(default_factory=dict)
    over: nn.Module | None = None  # the running module whose inside is passed over
    # nodes of one forward pass that were read in threads of their own; held, since a node is known by its identity alone
    of_threads: set[Any] = field(default_factory=set)
    is_branch: bool = False  # whether this is a part that runs in a thread of its own
    stops: frozenset[Any] = frozenset()  # nodes of its arguments, which another thread made
    _constants: dict[int, str] | None = None

    def constants(self) -> dict[int, str]:
        """Storage -> "weight" or "buffer", looked up when first needed."""
        if self._constants is None:
            self._constants = constants_of(self.modules)
        return self._constants


def next_number() -> int:
    """The sequence number of the next node that this thread makes."""
    return torch._C._autograd._get_sequence_nr()


def constants_of(modules: Iterable[nn.Module]) -> dict[int, str]:
    """The storages of parameters and buffers."""
    found: dict[int, str] = {}
    for module in modules:
        for tensors, kind in ((module._buffers, "buffer"), (module._parameters, "weight")):
            for tensor in tensors.values():
                if tensor is not None and has_storage(tensor):
                    found[tensor.untyped_storage()._cdata] = kind
    return found


def covers_storage(tensor: Tensor) -> bool:
    """Whether `tensor` is packed with all of its storage, of which it may be a view, or alone."""
    return is_packed_whole(tensor, tensor.untyped_storage().nbytes())


def is_packed_whole(tensor: Tensor, storage_bytes: int) -> bool:
    """`covers_storage`, where the size of the storage is known.

    A view that is a good part of its storage (q, k or v of one product) is packed with all of it if no block of its values holds others
    too: those may be of another size, or nothing at all.
    """
    own = tensor.numel() * tensor.itemsize
    if storage_bytes % tensor.itemsize or own >= storage_bytes:
        return storage_bytes % tensor.itemsize == 0
    return own >= WHOLE_SHARE * storage_bytes and _lies_in_blocks(tensor)


def _lies_in_blocks(tensor: Tensor) -> bool:
    """Whether the values of `tensor` lie in memory in runs that begin and end at multiples of a block."""
    run, later = 1, list[int]()
    for stride, size in sorted(zip(tensor.stride(), tensor.size(), strict=True)):
        if stride == run and not later:
            run *= size
        elif size > 1:
            later.append(stride)
    return all(number % BLOCK == 0 for number in (run, tensor.storage_offset(), *later))


def new_nodes(values: Any, now: Pass) -> list[tuple[int, Any]]:
    """The nodes behind the tensors in `values` that were made in this pass and not seen yet, in the order of their making."""
    waiting: list[Any] = [t.grad_fn for t in tensors_in(values) if t.grad_fn is not None]
    found: list[tuple[int, Any]] = []
    first, last, seen = now.calls[0].first, next_number(), now.seen  # nodes of other threads may have numbers beyond these
    passed: set[Any] = set()
    while waiting:
        node = waiting.pop()
        number = node._sequence_nr()
        if now.of_threads and node in now.of_threads:  # it was read; what stands before it may not have been
            waiting.extend([] if node in passed else [before for before, _ in node.next_functions if before is not None])
            passed.add(node)
        elif first <= number < last and number not in seen and node not in now.stops:
            seen.add(number)
            found.append((number, node))
            waiting.extend([before for before, _ in node.next_functions if before is not None])
    if len(found) > 1:
        found.sort(key=itemgetter(0))
    return found


@cache
def attributes(node_name: str, node_type: type, only_major: bool) -> tuple[tuple[str, str, str], ...]:
    """(autograd's name, of the handle, of the tensor) of what nodes of a type save; `only_major` leaves out statistics and parameters."""
    names = (a.removeprefix("_raw_saved_") for a in dir(node_type) if a.startswith("_raw_saved_"))
    operands = row_of(node_name).operands
    kept = (name for name in names if not (only_major and name in operands and operands[name].is_minor))
    return tuple((name, f"_raw_saved_{name}", f"_saved_{name}") for name in kept)


Named = tuple[str, Any, Tensor | None]


def saved_of(node: Any, name: str, only_major: bool) -> list[Named]:
    """(autograd's name, handle, tensor) of all that `node` saved; the tensor is None where somebody else's hooks hold it."""
    found: list[Named] = []
    if isinstance(node, torch.autograd.function.BackwardCFunction):
        raws = node._raw_saved_tensors
        names = getattr(node, "stands_for", ("", ()))[1] or tuple(f"saved{i + 1}" for i in range(len(raws)))
        _read(found, names, raws, node, "saved_tensors")
        return found
    for attribute, raw_name, tensor_name in attributes(name, type(node), only_major):
        raw = getattr(node, raw_name)
        if isinstance(raw, tuple | list):
            _read(found, [f"{attribute}{i + 1}" for i in range(len(raw))], raw, node, tensor_name)
        elif (hook := raw.unpack_hook) is not None:
            found.extend([] if is_of_weight(hook) else [(attribute, raw, None)])
        else:
            try:
                tensor = getattr(node, tensor_name)
            except RuntimeError:  # modified in place since it was saved: backward will say so itself
                continue
            if tensor is not None:
                found.append((attribute, raw, tensor))
    return found


def _read(found: list[Named], names: Sequence[str], raws: Sequence[Any], node: Any, attribute: str) -> None:
    hooks = [raw.unpack_hook for raw in raws]
    if any(hook is not None for hook in hooks):  # reading would run them
        is_foreign = any(hook is not None and not is_of_weight(hook) for hook in hooks)
        named = [(name, raw) for name, raw, hook in zip(names, raws, hooks, strict=False) if not is_of_weight(hook)]
        found.extend((name, raw, None if is_foreign else raw.data) for name, raw in named)
        return
    try:
        tensors = getattr(node, attribute)
    except RuntimeError:
        return
    found.extend(named for named in zip(names, raws, tensors, strict=False) if isinstance(named[2], Tensor))


def is_of_weight(hook: Any) -> bool:
    """Whether a session put this hook in place of a weight that waits packed: nobody else has to do with that."""
    return getattr(hook, IS_WEIGHT, False)


def describe(node: Any, row: OperationRow, named: Named, now: Pass, call: ModuleCall) -> Saved:
    """What one tensor is that `node` saved, in the words of its row, and its name."""
    attribute, raw, tensor = named
    operand = row.operands.get(attribute) or (row.others and replace(row.others, name=attribute))
    if operand is None:
        is_float = tensor is None or tensor.is_floating_point()
        is_custom = isinstance(node, torch.autograd.function.BackwardCFunction)
        is_bool = tensor is not None and tensor.dtype is torch.bool
        operand = unknown_operand(attribute, is_float=is_float, is_bool=is_bool, is_custom=is_custom)
    kind = "hooked" if tensor is None else kind_of(tensor, operand.name, now)
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
    except RuntimeError:  # it asks for another saved tensor, which was modified in place since: backward will say so
        return None


def _prefix(call: ModuleCall, op: str) -> str:
    """What stands between the module and the operand in a name."""
    if call.is_plain_leaf and len(call.counts) == 1 and 1 in call.counts.values():
        return ""
    count = call.counts.get(op, 1)
    return f"{op}." if count == 1 else f"{op}#{count}."


def kind_of(tensor: Tensor, operand: str, now: Pass) -> str:
    """Whether a saved tensor is an activation, a "weight" (a parameter, its view, its cast), a "buffer" or the caller's "input"."""
    node = tensor.grad_fn
    if node is not None:
        while node is not None and node.name() in PASSING:
            node = node.next_functions[0][0]
        if node is not None and node.name() == ACCUMULATE:
            return "weight"
    elif operand == "weight" or tensor.requires_grad or isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter):
        return "weight"
    if not has_storage(tensor):
        return "activation"
    storage = tensor.untyped_storage()._cdata
    if storage in now.inputs:
        return "input"
    return "activation" if node is not None else now.constants().get(storage, "activation")


def tensors_in(values: Any, depth: int = 3) -> Iterator[Tensor]:
    """The tensors in nested containers, and in the attributes of other objects in them (a cache of keys and values), `depth` deep."""
    if isinstance(values, Tensor):
        yield values
        return
    if isinstance(values, tuple) and len(values) == 1 and isinstance(values[0], Tensor):
        yield values[0]
        return
    for leaf in tree_leaves(values):
        if isinstance(leaf, Tensor):
            yield leaf
        elif depth and hasattr(leaf, "__dict__") and not isinstance(leaf, nn.Module | type | Enum) and not callable(leaf):
            yield from tensors_in(list(vars(leaf).values()), depth - 1)


def has_storage(tensor: Tensor) -> bool:
    """Whether `tensor` has memory of its own to speak of; subclasses such as DTensor have not."""
    return type(tensor) in PLAIN_TYPES or hasattr(tensor, "fake_mode")
