"""Saved tensors that backward could recompute from other saved tensors, and the edits that make backward do so, or undo it.

The partitioner lets backward recompute what Inductor can fuse, and saves the outputs of matrix products and convolutions. Each of these can
also be recomputed, by running its product again:

    forward   x (saved) -> norm -> product -> s (saved)       ->   x (saved) -> norm -> product -> s
    backward  x, s, tangents                                  ->   x, tangents;  s = product(norm(x)), before its first use

A plan names such tensors (`plan.recompute`). What they are computed from is saved unmodified, so that their values are those of forward.
Random operations and attention do not run again, nor does what reads a buffer that forward writes.

`save_recomputed` is the other direction: it saves tensors that backward recomputes (recomputed_chains.py).
"""

# pyright: reportPrivateUsage=false
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterable, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch._functorch._aot_autograd.utils import _is_tangent
from torch.fx.node import map_arg

from paredown.autograd.operation_kinds import flops_of, kind_of
from paredown.autograd.operations import MIN_PACKED_NUMEL
from paredown.session.compiled.graph_decisions import nbytes_of, storage_of

PRODUCTS = frozenset(("mm", "addmm", "bmm", "baddbmm", "convolution"))
MAX_OPERATIONS = 200  # of one recomputed tensor
RANDOM = ("inductor_seeds", "inductor_seed", "inductor_lookup_seed", "inductor_random", "inductor_randint")


@dataclass(frozen=True, eq=False)
class RecomputedTensor:
    """Describes a saved tensor that backward can recompute from other saved tensors.

    `nodes`: the operations of forward that compute it, itself last. `sources`: the tensors that they read.
    """

    nodes: tuple[fx.Node, ...]
    sources: tuple[fx.Node, ...]

    @property
    def node(self) -> fx.Node:
        """Return the node of the tensor that is recomputed."""
        return self.nodes[-1]

    @property
    def products(self) -> list[fx.Node]:
        """Return the matrix products and convolutions that recomputing the tensor takes."""
        return [node for node in self.nodes if kind_of(node) == "extern"]

    @property
    def flops(self) -> int:
        """Return the floating-point operations that recomputing the tensor takes."""
        return sum(_flops(node) for node in self.products)

    @property
    def written_bytes(self) -> int:
        """Return the bytes of intermediate tensors that recomputing writes to memory."""
        inside = set(self.nodes)
        ends = [_viewed(i) for node in self.products for i in (node, *node.all_input_nodes)]
        written = {node for node in ends if node in inside and is_tensor(node)} - {_viewed(self.node)}
        return sum(nbytes_of(node) for node in written)

    @property
    def moved_bytes(self) -> int:
        """Return the bytes of memory that recomputing the tensor reads and writes."""
        inside = set(self.nodes)
        read = {i for node in self.nodes for i in node.all_input_nodes if i not in inside and is_tensor(i)}
        return sum(nbytes_of(node) for node in read) + 2 * self.written_bytes + nbytes_of(self.node)


def recomputable_tensors(forward: fx.Graph, num_outputs: int) -> dict[str, RecomputedTensor]:
    """Return the saved tensors that backward could recompute, by name.

    The first `num_outputs` results of `forward` are its own outputs, the others are saved for backward.
    """
    returned: Any = forward.output_node().args[0]
    tensors = list(dict.fromkeys(node for node in returned if is_tensor(node)))
    held = {node for node in returned[:num_outputs] if is_tensor(node)}
    saved = {node for node in returned[num_outputs:] if is_tensor(node)}
    counts = Counter(storage_of(node) for node in tensors)
    order = {node: i for i, node in enumerate(forward.nodes)}
    written = {node.args[0] for node in forward.nodes if node.op == "call_function" and kind_of(node) != "view" and _writes(node)}
    found: dict[str, RecomputedTensor] = {}
    for node in saved - held:
        value: Tensor = node.meta["val"]
        is_large = value.is_floating_point() and _has_fixed_sizes(value) and value.numel() >= MIN_PACKED_NUMEL
        if node.op == "call_function" and is_large and counts[storage_of(node)] == 1:
            cone = _operations_of(node, saved - {node}, written)
            if cone:
                nodes = tuple(sorted(cone, key=order.__getitem__))
                sources = {i for one in nodes for i in one.all_input_nodes if i in saved and i.op != "placeholder"}
                found[node.name] = RecomputedTensor(nodes, tuple(sorted(sources, key=order.__getitem__)))
    return dict(sorted(found.items(), key=lambda item: order[item[1].node]))


def _operations_of(node: fx.Node, saved: set[fx.Node], written: set[Any]) -> set[fx.Node]:
    """Return the operations that recompute a node from saved tensors or inputs; an empty set if that is impossible.

    `written`: the inputs that the graph overwrites, from which nothing can be recomputed.
    """
    cone, stack = set[fx.Node](), [node]
    while stack:
        one = stack.pop()
        if one in cone or one in saved:
            continue
        if one.op == "placeholder":
            if one in written or not is_tensor(one):
                return set()
            continue
        if not _can_run_again(one) or len(cone) == MAX_OPERATIONS:
            return set()
        cone.add(one)
        stack += one.all_input_nodes
    return cone


def _can_run_again(node: fx.Node) -> bool:
    if node.op != "call_function" or _writes(node):
        return False
    values = node.meta.get("val")
    parts = values if isinstance(values, tuple | list) else (values,)
    if not all(isinstance(part, Tensor) and _has_fixed_sizes(part) for part in parts):
        return False
    if node.target is operator.getitem:
        return True
    schema = getattr(node.target, "_schema", None)
    if schema is None or torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
        return False
    name = schema.name.split("::")[-1]
    return name in PRODUCTS or (kind_of(node) in ("view", "pointwise", "reduction") and name not in RANDOM)


def _writes(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.is_mutable


def _has_fixed_sizes(value: Tensor) -> bool:
    return all(isinstance(size, int) for size in (*value.shape, *value.stride()))  # pyright: ignore[reportUnnecessaryIsInstance]


def _viewed(node: fx.Node) -> fx.Node:
    """Return the tensor that a node is a view of."""
    while node.op == "call_function" and kind_of(node) == "view" and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def _flops(node: fx.Node) -> int:
    args, kwargs = map_arg((node.args, node.kwargs), lambda n: n.meta.get("val"))
    return flops_of(node.target, args, kwargs, node.meta["val"])


# --- edits of forward and backward ----------------------------------------------------------------------------------------


def recompute_saved(
    forward: fx.GraphModule, backward: fx.GraphModule, num_outputs: int, tensors: Iterable[RecomputedTensor]
) -> None:
    """Edit both graphs so that backward recomputes the saved tensors `tensors` and forward does not save them.

    None of these may be recomputed from another of them. The first `num_outputs` results of forward are the model's outputs.
    """
    returned: list[Any] = list(forward.graph.output_node().args[0])  # type: ignore[arg-type]
    for tensor in tensors:
        known = {node.name: node for node in backward.graph.nodes}
        order = {node: i for i, node in enumerate(backward.graph.nodes)}
        first = min(known[tensor.node.name].users, key=order.__getitem__)
        inside = set(tensor.nodes)
        for source in (i for node in tensor.nodes for i in node.all_input_nodes if i not in inside):
            if source.name not in known:
                known[source.name] = _pass_on(source, backward.graph, returned, num_outputs)
        for node in tensor.nodes:
            _compute_before(first, node, known, order)
        returned[num_outputs:] = [node for node in returned[num_outputs:] if node is not tensor.node]
    forward.graph.output_node().args = (tuple(returned),)


def _compute_before(first: fx.Node, node: fx.Node, known: dict[str, fx.Node], order: dict[fx.Node, int]) -> None:
    """Copy a forward node into backward, in front of the node `first`, or move it there if backward computes it later.

    `known`: backward's nodes by name. `order`: the positions of backward's nodes.
    """
    old = known.get(node.name)
    args, kwargs = map_arg((node.args, node.kwargs), lambda n: known[n.name])
    if old is None:
        with first.graph.inserting_before(first):
            known[node.name] = first.graph.create_node("call_function", node.target, args, kwargs, node.name, node.type)
        known[node.name].meta = dict(node.meta)
    elif old.op == "placeholder":
        first.prepend(old)
        old.op, old.target, old.args, old.kwargs = "call_function", node.target, args, kwargs
        old.meta = dict(node.meta)
    elif order.get(old, -1) > order[first]:
        first.prepend(old)


def _pass_on(node: fx.Node, graph: fx.Graph, returned: list[Any], num_outputs: int) -> fx.Node:
    """Make forward save the tensor of a node, and return its new placeholder in the backward graph `graph`.

    `returned`: forward's results, of which the first `num_outputs` are the model's outputs.
    """
    _save(node, returned, num_outputs)
    with graph.inserting_after(last_saved(graph)):
        placeholder = graph.placeholder(node.name)
    placeholder.meta = dict(node.meta)
    return placeholder


def save_recomputed(forward: fx.GraphModule, backward: fx.GraphModule, num_outputs: int, names: Set[str]) -> None:
    """Edit both graphs so that forward saves the tensors `names`, which backward recomputed before.

    Saved tensors that backward read for this recomputation alone are no longer saved.
    """
    output, computed = forward.graph.output_node(), {node.name: node for node in forward.graph.nodes}
    returned: list[Any] = list(output.args[0])  # type: ignore[arg-type]
    for node in [node for node in backward.graph.nodes if node.name in names & computed.keys() and node.op == "call_function"]:
        _save(computed[node.name], returned, num_outputs)
        last = last_saved(backward.graph)
        node.args, node.kwargs, node.op, node.target = (), {}, "placeholder", node.name
        last.append(node)
    backward.graph.eliminate_dead_code()
    for unused in [p for p in backward.graph.find_nodes(op="placeholder") if not p.users and is_tensor(p) and not _is_tangent(p)]:
        returned[num_outputs:] = [node for node in returned[num_outputs:] if node is not computed[unused.name]]
        backward.graph.erase_node(unused)
    output.args = (tuple(returned),)  # the modules' code is generated when their graphs are finished


def _save(node: fx.Node, returned: list[Any], num_outputs: int) -> None:
    """Add a forward node to the saved tensors in forward's results `returned`, where they precede the symbolic sizes."""
    returned.insert(end_of_tensors(returned, num_outputs), node)


def end_of_tensors(returned: list[Any], num_outputs: int) -> int:
    """Return the index in forward's outputs at which saved tensors end and symbolic sizes begin."""
    return next((i for i in range(num_outputs, len(returned)) if not is_tensor(returned[i])), len(returned))


def last_saved(backward: fx.Graph) -> fx.Node:
    """Return the last placeholder of a backward graph that stands for a saved value, rather than for a tangent."""
    return [p for p in backward.find_nodes(op="placeholder") if not _is_tangent(p)][-1]


def is_tensor(node: Any) -> bool:
    """Return whether the value of a graph's node is a tensor."""
    return isinstance(node, fx.Node) and isinstance(node.meta.get("val"), Tensor)
