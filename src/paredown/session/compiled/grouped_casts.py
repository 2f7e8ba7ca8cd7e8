"""Casts of weights and of their gradients in compiled graphs, many in one kernel.

Under autocast each weight is cast before its product, and its gradient behind it. A library computes products, so that Inductor fuses no
cast with anything: each is a kernel and a launch. Many of them become one call of `paredown::cast_all`, which is one kernel:

    forward   w1 -> bf16, product, w2 -> bf16, product      ->   (w1, w2) -> bf16, product, product
    backward  product, g2 -> fp32, product, g1 -> fp32      ->   product, product, (g2, g1) -> fp32

Casts of weights move to the first use, those of gradients to the last. The tensors in between are MAX_GROUP_BYTES at most. The plan's
graphs cast weights again in backward, where torch's own save the copies: a step of a packed network has three casts for each weight.
"""

# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Iterator, Sequence

import torch
import torch._inductor.config as inductor_config
from torch import Tensor, fx

from paredown.autograd.operation_kinds import kind_of, readers_of
from paredown.session.compiled.graph_decisions import nbytes_of

CAST, CAST_ALL = torch.ops.prims.convert_element_type.default, torch.ops.paredown.cast_all.default
MAX_GROUP_BYTES = 32 << 20  # of the tensors in 16 bits
MAX_GROUP = 64  # casts in a kernel, each with two addresses and a size as arguments


def group_casts(*modules: fx.GraphModule) -> None:
    """Join neighbouring casts of weights in each graph into one call, and neighbouring casts of gradients into another.

    Nothing is joined on a CPU, where a kernel costs no launch, or with autotuned products, into which Inductor may fuse casts of gradients.
    """
    if inductor_config.max_autotune or inductor_config.max_autotune_gemm:
        return
    for module in modules:
        if any(isinstance(v := node.meta.get("val"), Tensor) and v.is_cuda for node in module.graph.find_nodes(op="placeholder")):
            group_casts_of(module.graph)
            module.recompile()


def group_casts_of(graph: fx.Graph) -> None:
    """Join neighbouring casts of weights in a graph into single calls, and neighbouring casts of gradients too."""
    order = {node: place for place, node in enumerate(graph.nodes)}
    casts = [node for node in graph.find_nodes(op="call_function", target=CAST) if node.all_input_nodes and _has_fixed_sizes(node)]
    gradients = [node for node in casts if _is_gradient(node)]
    weights = sorted((node for node in casts if _is_operand(node)), key=lambda node: min(map(order.__getitem__, node.users)))
    for group in _groups(weights, nbytes_of):
        _join(group, before=min((user for node in group for user in node.users), key=order.__getitem__))
    for group in _groups(gradients, lambda node: nbytes_of(node.all_input_nodes[0])):
        _join(group, before=group[-1].next)


def _is_operand(node: fx.Node) -> bool:
    """Return whether a node casts an input of the graph for library kernels alone, such as matrix products."""
    used = [user for user in readers_of(node) if user.op != "output"]
    return node.all_input_nodes[0].op == "placeholder" and bool(used) and all(kind_of(user) == "extern" for user in used)


def _is_gradient(node: fx.Node) -> bool:
    """Return whether a node casts the result of a library kernel, and the graph returns it without using it."""
    source = node.all_input_nodes[0]
    while source.op == "call_function" and kind_of(source) == "view":
        source = source.all_input_nodes[0]
    is_result = source.op == "call_function" and kind_of(source) == "extern"
    return is_result and all(user.op == "output" for user in node.users)


def _has_fixed_sizes(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and all(isinstance(size, int) for size in (*value.shape, *value.stride()))  # pyright: ignore[reportUnnecessaryIsInstance]


def _groups(casts: Sequence[fx.Node], nbytes: Callable[[fx.Node], int]) -> Iterator[list[fx.Node]]:
    """Yield casts to one dtype on one device in groups of two or more, neighbours together.

    Equal layers get equal groups, of one layer or of several, so that they share a compiled kernel; the remaining casts are one group.
    """
    kinds = {node: (node.meta["val"].dtype, node.meta["val"].device) for node in casts}
    for kind in dict.fromkeys(kinds.values()):
        rest = [node for node in casts if kinds[node] == kind and nbytes(node) <= MAX_GROUP_BYTES]
        signs = [(tuple(node.meta["val"].shape), node.meta["val"].stride()) for node in rest]
        start = 0
        while start < len(rest):
            total, fits = nbytes(rest[start]), start + 1
            while fits < min(len(rest), start + MAX_GROUP) and total + nbytes(rest[fits]) <= MAX_GROUP_BYTES:
                total, fits = total + nbytes(rest[fits]), fits + 1
            stop = fits if fits == len(rest) else _end_of_layers(signs, start, fits)
            if stop - start > 1:
                yield rest[start:stop]
            start = stop


def _end_of_layers(signs: Sequence[Hashable], start: int, limit: int) -> int:
    """Return where a group of casts from `start` ends: after several equal layers, or before the first of them.

    `signs`: shape and strides of each cast; equal layers are equal runs of signs. `limit`: the largest end of a group.

    >>> [_end_of_layers("abcdcdcdcd", start, limit) for start, limit in ((0, 7), (2, 7), (6, 10))]
    [2, 6, 10]
    """
    for first in range(start, limit):
        for length in range(1, limit - first + 1):
            layer = signs[first : first + length]
            if len(set(layer)) > 1 and layer == signs[first + length : first + 2 * length]:
                count = 1
                while (
                    first + (count + 1) * length <= limit and signs[first + count * length : first + (count + 1) * length] == layer
                ):
                    count += 1
                return first if first > start else start + count * length
    return limit


def _join(casts: Sequence[fx.Node], before: fx.Node) -> None:
    """Replace casts to one dtype by a single call of `paredown::cast_all`, in front of the node `before`."""
    graph, values = before.graph, [node.meta["val"] for node in casts]
    with graph.inserting_before(before):
        call = graph.call_function(CAST_ALL, ([node.all_input_nodes[0] for node in casts], values[0].dtype))
        call.meta["val"] = values
        for place, node in enumerate(casts):
            result = graph.call_function(operator.getitem, (call, place), name=node.name)
            result.meta = dict(node.meta)
            node.replace_all_uses_with(result)
    for node in casts:
        graph.erase_node(node)
