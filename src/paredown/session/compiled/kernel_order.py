"""Chooses the order of Inductor's kernels in packed graphs, and lets more kernels hold rows in registers.

The order is that of the graph, by the last operation of each kernel. Inductor sorts fused kernels by their first operation. A kernel that
adds up gradients of all layers, such as that of the condition of adaptive norms, then pulls all of backward in front of the gradients of
weights, and what these read stays in memory: decoded tensors of all layers, 2.5 of 6.2 GiB of a DiT in 8 bits.
Inductor's comparison of orders by its own estimate of the peak is switched off (graph_packing.py).

    operations   a1 s1 w1 a2 s2 w2        a: gradient of activations, w: of weights, s: a term of a sum, s1 + s2 one kernel
    by first     a1 a2 s1+s2 w1 w2
    by last      a1 w1 a2 s1+s2 w2

The backward of a convolution is two operations for libraries, one for each gradient, and one in the graph: it holds the input, its
gradient, and what the library copies at once. `split_convolutions` makes two of it, and a decoded input is freed between them:

    gradient of the weight   reads the input and the gradient of the output
    gradient of the input    reads the weight and the gradient of the output

In a 3-D U-Net the input of one convolution is a fourth of the memory at the peak.

Kernels that reduce rows of up to 4096 values hold a whole row, and read it once. By itself Inductor holds rows of up to 1024 values
("persistent reductions"); longer ones are read again for each reduction, and once more for the result. In the graphs of a session a value
that is read is also decoded, and one that is written is often quantized by its row, so that reading again costs more than it does in
torch's own graphs.
"""

# pyright: reportAttributeAccessIssue=false, reportIncompatibleMethodOverride=false, reportPrivateUsage=false

from __future__ import annotations

import heapq
import operator
from collections.abc import Collection, Mapping
from typing import Any, TypeVar, final

import torch
import torch._inductor.custom_graph_pass as custom_graph_pass
from torch import Tensor, fx
from torch._inductor import config
from torch._inductor.choices import InductorChoices
from torch._inductor.runtime.hints import ReductionHint
from torch._inductor.virtualized import V

# The kernels of a step of a Llama-like network of width 2048 with FP8 products take 23.4, 22.8 and 23.2 ms with limits of 1024, 4096 and
# 8192 (one H200, four layers); those of a ViT-L in `activations8` 9.54 and 9.37 with 1024 and 8192, of a DiT-XL 8.77 and 8.45.
MAX_ROW = 4096  # values

MIN_SPLIT = 1 << 20  # values of a convolution's input; smaller ones are not worth another call of the host
CONVOLUTION_BACKWARD = torch.ops.aten.convolution_backward.default

Node = TypeVar("Node")
SchedulerPass: Any = getattr(custom_graph_pass, "CustomSchedulerPass", object)  # torch 2.13


@final
class ByLastOperation(SchedulerPass):
    """Orders kernels by their last operations, as a pass of Inductor, to lower the peak of backward."""

    def __call__(self, nodes: list[Any]) -> list[Any]:
        """Return the kernels of a backward graph in the order of their last operations; in a forward graph, unchanged."""
        return by_last_operation(nodes) if V.graph.is_backward else nodes

    def uuid(self) -> Any:
        """Return a text that identifies the pass in the keys of Inductor's caches."""
        return "paredown kernel order 1"

    def __reduce__(self) -> Any:
        """Return how to pickle the pass, by its uuid, since Inductor pickles its settings for cache keys."""
        return repr, (self.uuid(),)


def by_last_operation(nodes: list[Any]) -> list[Any]:
    """Return fused kernels in the order of the last operation of each, behind the kernels that they depend on."""
    makers = {name: node for node in nodes for name in node.get_buffer_names()}
    sources = {node: {makers[dep.name] for dep in node.unmet_dependencies if dep.name in makers} - {node} for node in nodes}
    return sorted_by_last(sources, {node: node.max_order for node in nodes})


def sorted_by_last(sources: Mapping[Node, Collection[Node]], last: Mapping[Node, int]) -> list[Node]:
    """Return the keys of `sources` in the order of `last`, each behind its own sources; unchanged if there is a cycle."""
    places = {node: place for place, node in enumerate(sources)}
    missing = {node: len(before) for node, before in sources.items()}
    users: dict[Node, list[Node]] = {node: [] for node in sources}
    for node, before in sources.items():
        for other in before:
            users[other].append(node)
    ready, nodes, order = [(last[node], places[node]) for node in sources if not missing[node]], list(sources), list[Node]()
    heapq.heapify(ready)
    while ready:
        node = nodes[heapq.heappop(ready)[1]]
        order.append(node)
        for user in users[node]:
            missing[user] -= 1
            if not missing[user]:
                heapq.heappush(ready, (last[user], places[user]))
    return order if len(order) == len(nodes) else nodes


def split_convolutions(backward: fx.Graph, *, keeps_layout: bool) -> None:
    """Compute the two gradients of each large convolution in a backward graph one after the other, that of the weight first.

    `keeps_layout`: Inductor keeps the memory order of two-dimensional convolutions, as it does of others. The gradient of an input is in
    the order of the input, and what stands for the input has none, so that only contiguous ones are split.
    """
    for node in backward.find_nodes(op="call_function", target=CONVOLUTION_BACKWARD):
        arguments: tuple[Any, ...] = node.args
        values: list[Tensor] = [i.meta["val"] for i in arguments[:3]]  # gradient of the output, input, weight
        groups, mask = arguments[9:11]
        if not _is_large(values[1]):
            continue
        has_order = all(value.is_contiguous() for value in values) and (keeps_layout or values[1].dim() != 4)
        is_depthwise = groups > 1 and values[2].shape[1] == 1  # torch's own kernels
        if has_order and not is_depthwise and mask[0] and mask[1]:
            _split(node)


def _is_large(value: Tensor) -> bool:
    return all(isinstance(size, int) for size in value.shape) and value.numel() >= MIN_SPLIT  # pyright: ignore[reportUnnecessaryIsInstance]


def _split(node: fx.Node) -> None:
    """Leave the gradients of weight and bias to the backward of a convolution, and add an operation for the gradient of the input.

    That reads nothing of the input but its sizes, so that a view of the gradient of the weight with these sizes takes its place. So it has
    to run second: Inductor would fuse the kernel that computes the input into one that reads its gradient.
    """
    arguments: tuple[Any, ...] = node.args
    (gradient, x, *others, mask), values, graph = arguments, node.meta["val"], node.graph
    sizes = list(x.meta["val"].shape)
    results = {user.args[1]: user for user in node.users}
    with graph.inserting_after(node):
        of_weight = results.get(1) or graph.call_function(operator.getitem, (node, 1))
    of_weight.meta.setdefault("val", values[1])
    with graph.inserting_after(max(node.users, key=lambda user: user._sort_key)):
        stand_in = graph.call_function(torch.ops.aten.as_strided.default, (of_weight, sizes, [0] * len(sizes)))
    stand_in.meta["val"] = values[1].as_strided(sizes, [0] * len(sizes))
    with graph.inserting_after(stand_in):
        call = graph.call_function(CONVOLUTION_BACKWARD, (gradient, stand_in, *others, [True, False, False]))
    call.meta = {**node.meta, "val": (values[0], None, None)}
    node.args, node.meta["val"] = (gradient, x, *others, [False, *mask[1:]]), (None, *values[1:])
    if 0 in results:
        results[0].args = (call, 0)
        call.append(results[0])


@final
class RowsInRegisters(InductorChoices):
    """Replaces Inductor's choices of kernels, so that kernels hold longer rows in registers."""

    @staticmethod
    def should_use_persistent_reduction(features: Any, cooperative_reduction: bool) -> bool:
        """Return whether a kernel holds the whole row that it reduces in registers."""
        if InductorChoices.should_use_persistent_reduction(features, cooperative_reduction):
            return True
        if not config.triton.persistent_reductions:
            return False
        is_row = features.get_reduction_hint() == ReductionHint.INNER and not cooperative_reduction
        return is_row and V.graph.sizevars.statically_known_leq(features.reduction_numel, MAX_ROW)
