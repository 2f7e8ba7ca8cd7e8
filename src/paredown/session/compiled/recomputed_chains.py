"""Tensors that backward recomputes from packed tensors: which of them should be saved instead, and when backward computes the others.

Backward of a residual network recomputes the outputs of its blocks from packed inputs of norms:

    out1 = relu(norm(a) + norm(b))      out2 = relu(norm(c) + out1)      out3 = relu(norm(d) + out2)

A convolution reads each from memory, the last one first. Inductor makes one kernel of the chain, which writes all of them when backward
begins: two outputs are in memory before they are used. Saved in 4 bits they take less, and decoding them takes as long.

Measured on one H200 for the three outputs of ResNet-50's first stage (2^27.6 values each) in 8 bits: one kernel 945 us; three kernels, each
with a chain of its own, 2,060 us.

Other tensors are delayed: Inductor may decode one long before its use, and its memory adds to the peak (0.38 of 3.47 GiB for ResNet-50 in 4
bits). A copy of its operations takes scales that depend on the gradient which its user takes. Where backward also reads values on the way,
as that of a GELU does, nothing is delayed: one kernel computes both.
"""

# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from math import inf

import torch
from torch import Tensor, fx
from torch._functorch.partitioners import get_default_op_list

from paredown.session.compiled.graph_slots import hint

MIN_DELAYED = 1 << 20  # values
MIN_GAIN = 2.0  # bytes that are in memory early over bytes stored instead


class RecomputedChains:
    """Finds tensors that backward recomputes and writes to memory: some should be saved instead, others delayed.

    `of_tangents`: the nodes that depend on tangents (the gradients of the outputs).
    """

    def __init__(self, graph: fx.Graph, of_tangents: set[fx.Node]) -> None:
        self._graph, self._of_tangents, self._operations = graph, of_tangents, get_default_op_list()
        self._operations.fusible_ops |= {torch.ops.paredown.decode, torch.ops.paredown.unpack_bits}
        self._order = {node: i for i, node in enumerate(graph.nodes)}
        self._constants = set[fx.Node]()
        for node in graph.nodes:
            if node.op == "call_function" and self._constants.issuperset(node.all_input_nodes):
                self._constants.add(node)
        self._tensors = {self._viewed(node) for node in graph.nodes if self._is_recomputed(node) and self._is_read(node)}

    def to_save(self, bits: Mapping[str, float]) -> set[str]:
        """Return the names of recomputed tensors that should be saved instead, to lower the peak.

        `bits`: the bits per value of each packed tensor, by name.
        """
        found = set[str]()
        for chain in self._chains():
            leaves = {i.name for node in self._cone(chain) for i in node.all_input_nodes if i.name in bits}
            stored = len(chain) * max((bits[name] for name in leaves), default=float("inf"))
            early = 8.0 * (len(chain) - 1) * max(node.meta["val"].element_size() for node in chain)
            found |= {node.name for node in chain} if early > MIN_GAIN * stored else set()
        return found

    def delay(self, scales: set[fx.Node], insert: Callable[..., fx.Node]) -> None:
        """Make Inductor compute each recomputed tensor only once the operation that uses it has its gradient.

        Tensors that are recomputed from each other or share a kernel with others are left out. `scales`: placeholders of the scales of
        packed tensors. `insert(function, arguments, before)` inserts a traced function into the graph.
        """
        chained = set[fx.Node]().union(*self._chains())
        for tensor in sorted(self._tensors - chained, key=self._order.__getitem__):
            outputs = [node for node in self._views(tensor) if any(user in self._of_tangents for user in node.users)]
            users = {user for node in outputs for user in node.users if user in self._of_tangents}
            first = min(users, key=self._order.__getitem__)
            gradient = next((self._base(node) for node in first.all_input_nodes if node in self._of_tangents), None)
            cone = sorted(self._cone(outputs), key=self._order.__getitem__)
            delayed = scales.intersection(i for node in cone for i in node.all_input_nodes)
            if not delayed or _numel(tensor) < MIN_DELAYED or self._is_shared(cone, users, first):
                continue
            if gradient is not None and gradient.op != "placeholder":
                copies = {node: insert(_after, [node, gradient], first) for node in delayed}
                self._copy(cone, copies, first)
                for user in users:
                    for node in outputs:
                        user.replace_input_with(node, copies[node])

    def _is_shared(self, cone: Iterable[fx.Node], users: set[fx.Node], first: fx.Node) -> bool:
        """Return whether nodes other than `users` read results of the operations `cone`, and may run before the node `first`."""
        nodes = {*cone, *users}
        others, after = {user for node in cone for user in node.users} - nodes, {first}
        last = max(map(self._order.__getitem__, others), default=-1)
        stack = [first]
        while stack:
            found = [user for user in stack.pop().users if user not in after and self._order.get(user, last + 1) <= last]
            after.update(found)
            stack += found
        return not others <= after

    def _copy(self, nodes: Iterable[fx.Node], copies: dict[fx.Node, fx.Node], before: fx.Node) -> None:
        """Insert copies of `nodes` in front of the node `before`, and record the copy of each node in `copies`."""
        with self._graph.inserting_before(before):
            for node in nodes:
                copies[node] = self._graph.node_copy(node, lambda i: copies.get(i, i))

    def _views(self, tensor: fx.Node) -> Iterable[fx.Node]:
        """Yield `tensor` and its recomputed views."""
        yield tensor
        for user in tensor.users:
            if user not in self._of_tangents and self._operations.is_view(user):
                yield from self._views(user)

    def _base(self, node: fx.Node) -> fx.Node:
        while self._operations.is_view(node) and node.all_input_nodes[0] in self._of_tangents:
            node = node.all_input_nodes[0]
        return node

    def _chains(self) -> list[set[fx.Node]]:
        """Return groups of tensors that are recomputed from each other, as along a residual stream."""
        chains: list[set[fx.Node]] = []
        for tensor in self._tensors:
            joined = self._cone([tensor]) & self._tensors
            touching = [chain for chain in chains if chain & joined]
            chains = [chain for chain in chains if chain not in touching] + [joined.union(*touching)]
        return [chain for chain in chains if len(chain) > 1]

    def _is_recomputed(self, node: fx.Node) -> bool:
        return node not in self._of_tangents and node not in self._constants and self._is_pointwise(node)

    def _is_read(self, node: fx.Node) -> bool:
        """Return whether an operation that Inductor does not fuse, such as a matrix product, reads a node."""
        return any(user in self._of_tangents and not self._operations.is_fusible(user) for user in node.users)

    def _viewed(self, node: fx.Node) -> fx.Node:
        """Return the tensor that a node is a view of."""
        while self._operations.is_view(node) and self._is_recomputed(node.all_input_nodes[0]):
            node = node.all_input_nodes[0]
        return node

    def _is_pointwise(self, node: fx.Node) -> bool:
        """Return whether Inductor fuses the operation of a node, and the operation is not a reduction."""
        if node.op != "call_function" or not self._operations.is_fusible(node) or self._operations.is_random(node):
            return False
        return self._operations.is_view(node) or _numel(node) >= max(map(_numel, node.all_input_nodes), default=0)

    def _cone(self, outputs: Iterable[fx.Node]) -> set[fx.Node]:
        """Return the recomputed pointwise operations that compute `outputs`."""
        cone, stack = set[fx.Node](), list(outputs)
        while stack:
            node = stack.pop()
            if node not in cone and self._is_recomputed(node):
                cone.add(node)
                stack += node.all_input_nodes
        return cone


def _after(scales: Tensor, gradient: Tensor) -> Tensor:
    """Return `scales` with an artificial dependence on `gradient`, so that Inductor computes them after it.

    Inductor stores the input of as_strided, so that the order holds. The comparison is false for all numbers (none is larger than
    infinity), so the compiler of the kernel drops the load.
    """
    is_never = gradient.as_strided((1,), (1,)).float() > inf
    return torch.where(is_never, torch.zeros((), dtype=scales.dtype, device=scales.device), scales)


def _numel(node: fx.Node) -> int:
    value = node.meta.get("val")
    return hint(value.numel()) if isinstance(value, Tensor) else 0
