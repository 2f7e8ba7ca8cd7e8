"""The order in which Inductor runs the kernels of a packed graph: that of the graph, by the last operation of each kernel.

Inductor sorts fused kernels by their first operation. A kernel that adds up gradients of all layers, such as that of the condition of
adaptive norms, then pulls all of backward in front of the gradients of weights, and what these read stays in memory: decoded tensors of all
layers, 2.5 of 6.2 GiB of a DiT in 8 bits. Inductor then compares this order with others by its own estimate of the peak.

    operations   a1 s1 w1 a2 s2 w2        a: gradient of activations, w: of weights, s: a term of a sum, s1 + s2 one kernel
    by first     a1 a2 s1+s2 w1 w2
    by last      a1 w1 a2 s1+s2 w2
"""

# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import heapq
from collections import Counter
from typing import Any, final

import torch._inductor.custom_graph_pass as custom_graph_pass
from torch._inductor.virtualized import V

SchedulerPass: Any = getattr(custom_graph_pass, "CustomSchedulerPass", object)  # torch 2.13


@final
class ByLastOperation(SchedulerPass):
    """A pass of Inductor that orders kernels by their last operations, to lower the peak of backward."""

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
    users: dict[Any, list[Any]] = {node: [] for node in nodes}
    missing: Counter[Any] = Counter()
    for node in nodes:
        before = {makers[dep.name] for dep in node.unmet_dependencies if dep.name in makers} - {node}
        missing[node] = len(before)
        for other in before:
            users[other].append(node)
    ready = [(node.max_order, place, node) for place, node in enumerate(nodes) if not missing[node]]
    places, order = {node: place for place, node in enumerate(nodes)}, list[Any]()
    heapq.heapify(ready)
    while ready:
        _, _, node = heapq.heappop(ready)
        order.append(node)
        for user in users[node]:
            missing[user] -= 1
            if not missing[user]:
                heapq.heappush(ready, (user.max_order, places[user], user))
    return order if len(order) == len(nodes) else nodes
