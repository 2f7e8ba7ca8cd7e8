"""Chains of tensors that backward recomputes, each from the one before: which of them are better saved.

Backward of a residual network recomputes the outputs of its blocks from packed inputs of norms:

    out1 = relu(norm(a) + norm(b))      out2 = relu(norm(c) + out1)      out3 = relu(norm(d) + out2)

A convolution reads each from memory, the last one first. Inductor makes one kernel of the chain, which writes all of them when backward
begins: two outputs are in memory before they are used. Saved in 4 bits they take less, and decoding them takes as long.

Measured on one H200 for the three outputs of ResNet-50's first stage (2^27.6 values each) in 8 bits: one kernel 945 us; three kernels, each
with a chain of its own, 2,060 us.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false, reportAttributeAccessIssue=false

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, fx

from paredown.session.compiled.graph_slots import hint

MIN_GAIN = 2.0  # bytes that are in memory early over bytes stored instead


class RecomputedChains:
    """The recomputed tensors of one backward graph that operations read from memory.

    `of_tangents`: the nodes that depend on gradients. `operations`: torch's lists of operations (`is_fusible`, `is_view`, `is_random`).
    """

    def __init__(self, graph: fx.Graph, of_tangents: set[fx.Node], operations: Any) -> None:
        self._of_tangents, self._operations = of_tangents, operations
        self._tensors = {self._viewed(node) for node in graph.nodes if self._is_recomputed(node) and self._is_read(node)}

    def to_save(self, bits: Mapping[str, float]) -> set[str]:
        """The names of the tensors to save; `bits`: of a value of each packed tensor, by the name of its placeholder."""
        found = set[str]()
        for chain in self._chains():
            leaves = {i.name for node in self._cone(chain) for i in node.all_input_nodes if i.name in bits}
            stored = len(chain) * max((bits[name] for name in leaves), default=float("inf"))
            early = 8.0 * (len(chain) - 1) * max(node.meta["val"].element_size() for node in chain)
            found |= {node.name for node in chain} if early > MIN_GAIN * stored else set()
        return found

    def _chains(self) -> list[set[fx.Node]]:
        """The tensors that are recomputed from each other."""
        chains: list[set[fx.Node]] = []
        for tensor in self._tensors:
            joined = self._cone([tensor]) & self._tensors
            touching = [chain for chain in chains if chain & joined]
            chains = [chain for chain in chains if chain not in touching] + [joined.union(*touching)]
        return [chain for chain in chains if len(chain) > 1]

    def _is_recomputed(self, node: fx.Node) -> bool:
        return node not in self._of_tangents and self._is_pointwise(node)

    def _is_read(self, node: fx.Node) -> bool:
        """Whether an operation that Inductor does not fuse reads a node from memory."""
        return any(user in self._of_tangents and not self._operations.is_fusible(user) for user in node.users)

    def _viewed(self, node: fx.Node) -> fx.Node:
        """The tensor that a node is a view of."""
        while self._operations.is_view(node) and self._is_recomputed(node.all_input_nodes[0]):
            node = node.all_input_nodes[0]
        return node

    def _is_pointwise(self, node: fx.Node) -> bool:
        """Whether a node is an operation that Inductor fuses and that is no reduction."""
        if node.op != "call_function" or not self._operations.is_fusible(node) or self._operations.is_random(node):
            return False
        return self._operations.is_view(node) or _numel(node) >= max(map(_numel, node.all_input_nodes), default=0)

    def _cone(self, outputs: Iterable[fx.Node]) -> set[fx.Node]:
        """The recomputed pointwise nodes that `outputs` are computed by, with the outputs."""
        cone, stack = set[fx.Node](), list(outputs)
        while stack:
            node = stack.pop()
            if node not in cone and self._is_recomputed(node):
                cone.add(node)
                stack += node.all_input_nodes
        return cone


def _numel(node: fx.Node) -> int:
    value = node.meta.get("val")
    return hint(value.numel()) if isinstance(value, Tensor) else 0
