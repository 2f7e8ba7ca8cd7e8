"""Predicts the memory order of a forward graph's tensors, once Inductor has compiled the graph.

The result of an eager operation has the strides of its first operand, and fake tensors follow that. Inductor lets all operands of a kernel
vote on each pair of dimensions, and takes the order of the dimensions where the vote is a tie:

    patches.flatten(2).transpose(1, 2) + places       eager: as the transposed patches, in this sum and in all sums of the residual stream
                                                      Inductor: row by row, here and in all layers

Where it computes convolutions in channels_last, all that they read is channels_last too, and what follows up to the last convolution.

Codes in another order than the values cost a transposed copy before each encode, and reads across rows in each decode.
"""

# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Sequence
from functools import cmp_to_key

import torch
from torch import Tensor, fx
from torch._inductor.graph import GraphLowering

from paredown.autograd.operation_kinds import kind_of, name_of
from paredown.session.compiled.graph_decisions import memory_order

CASTS = ("convert_element_type", "_to_copy")  # pointwise operations without torch's tag
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")  # they take operands of any strides
CONVOLUTION = torch.ops.aten.convolution.default

Strides = tuple[int, ...]


class MemoryOrders:
    """Predicts in which order each tensor of a forward graph lies in memory, since packed tensors are encoded in this order."""

    def __init__(self, forward: fx.GraphModule) -> None:
        self._strides: dict[fx.Node, Strides] = {}
        self._channels_last = _channels_last(forward)
        for node in forward.graph.nodes:
            self._find(node)

    def of(self, node: fx.Node, saved: fx.Node | None = None) -> list[int]:
        """Return a node's dimensions, the largest stride first. `saved`: the node's placeholder in backward, if it is saved.

        A saved tensor that a library kernel such as attention reads in backward has the strides that the graph states.
        """
        value: Tensor = node.meta["val"]
        if node not in self._strides or (saved is not None and node not in self._channels_last and _has_fixed_strides(saved)):
            return memory_order(value)
        return memory_order(self._like(value, self._strides[node]))

    def tensor(self, node: fx.Node) -> Tensor:
        """Return a tensor on the meta device with the strides that the tensor of a node will have."""
        value: Tensor = node.meta["val"]
        return self._like(value, self._strides[node]) if node in self._strides else value

    def add(self, node: fx.Node) -> None:
        """Determine the memory order of a node that was added to the graph after its inputs."""
        self._find(node)

    def _find(self, node: fx.Node) -> None:
        value = node.meta.get("val")
        if node.op != "call_function" or not isinstance(value, Tensor) or not _is_static(value):
            return
        kind = kind_of(node)
        if kind == "view":
            self._view(node, value)
        elif node in self._channels_last and value.dim() == 4 and (node.target is CONVOLUTION or kind == "pointwise"):
            self._strides[node] = _dense(value, [d for d in (0, 2, 3, 1) if value.shape[d] > 1])
        elif kind == "pointwise" and (name_of(node) in CASTS or torch.Tag.pointwise in getattr(node.target, "tags", ())):
            reads = [read for i in node.all_input_nodes if (read := self._read(i, value)) is not None]
            order = voted_order(reads, value.shape)
            if order != [d for d in memory_order(value) if value.shape[d] > 1]:
                self._strides[node] = _dense(value, order)

    def _view(self, node: fx.Node, value: Tensor) -> None:
        source = node.all_input_nodes[0] if node.all_input_nodes else None
        if source is None or source not in self._strides:
            return
        x = self._like(source.meta["val"], self._strides[source])
        try:
            result = node.target(*(x if a is source else a for a in node.args), **node.kwargs)  # type: ignore[operator]
        except (RuntimeError, ValueError):  # a view across dimensions that are not adjacent: Inductor copies
            return
        if isinstance(result, Tensor) and result.shape == value.shape:
            self._strides[node] = result.stride()

    def _read(self, node: fx.Node, result: Tensor) -> Strides | None:
        """Return the strides of an input along the dimensions of `result`; 0 in dimensions where the input is repeated."""
        value = node.meta.get("val")
        if not isinstance(value, Tensor) or not _is_static(value) or value.dim() > result.dim() or not value.dim():
            return None
        strides = self._strides.get(node, value.stride())
        own = [stride if size > 1 else 0 for size, stride in zip(value.shape, strides, strict=True)]
        return (*[0] * (result.dim() - value.dim()), *own)

    def _like(self, value: Tensor, strides: Strides) -> Tensor:
        return torch.empty_strided(value.shape, strides, dtype=value.dtype, device="meta")


def voted_order(reads: Sequence[Strides], sizes: Sequence[int]) -> list[int]:
    """Return the order of dimensions, outermost first, in which Inductor's kernel with these inputs writes its result.

    Dimensions of one element are left out. The rule is Inductor's `pick_loop_order`.

    >>> voted_order([(196608, 1, 256), (0, 768, 1)], (64, 256, 768)), voted_order([(196608, 1, 256), (0, 1, 0)], (64, 256, 768))
    ([0, 1, 2], [0, 2, 1])
    """

    def compare(a: int, b: int) -> int:
        a_first = sum(read[b] == 0 or read[a] < read[b] for read in set(reads))
        b_first = sum(read[a] == 0 or read[b] < read[a] for read in set(reads))
        return (b_first > a_first) - (a_first > b_first) or (b > a) - (b < a)

    inner_first = sorted(reversed([d for d, size in enumerate(sizes) if size > 1]), key=cmp_to_key(compare))
    return inner_first[::-1]


def _dense(value: Tensor, order: Sequence[int]) -> Strides:
    """Return the strides of a dense tensor whose dimensions (of more than one element) are in the given order."""
    strides, step = [1] * value.dim(), 1
    for d in reversed(order):
        strides[d], step = step, step * value.shape[d]
    for d, size in enumerate(value.shape):
        strides[d] = strides[d] if size > 1 else step
    return tuple(strides)


def _has_fixed_strides(saved: fx.Node) -> bool:
    """Return whether a library kernel (other than a matrix product) reads a tensor, so that its strides must stay."""
    stack, seen = list(saved.users), set[fx.Node]()
    while stack:
        user = stack.pop()
        if user in seen or user.op != "call_function":
            continue
        seen.add(user)
        kind = kind_of(user)
        if kind == "extern" and name_of(user) not in PRODUCTS:
            return True
        stack += list(user.users) if kind == "view" else []
    return False


def _channels_last(forward: fx.GraphModule) -> set[fx.Node]:
    """Return the nodes whose 4-dimensional tensors Inductor lays out in channels_last; none if it keeps all layouts."""
    nodes = list(forward.graph.nodes)
    if not GraphLowering.decide_layout_opt(forward, is_inference=False):
        return set()
    found, convolutions = set[fx.Node](), [node for node in nodes if node.target is CONVOLUTION]
    for node in reversed(nodes):
        if node.target is CONVOLUTION or not found.isdisjoint(node.users):
            found.add(node)
    for node in nodes[: nodes.index(convolutions[-1])] if convolutions else ():
        if node in found:
            found.update(node.users)
    return found


def _is_static(value: Tensor) -> bool:
    return all(isinstance(size, int) for size in (*value.shape, *value.stride()))  # pyright: ignore[reportUnnecessaryIsInstance]
