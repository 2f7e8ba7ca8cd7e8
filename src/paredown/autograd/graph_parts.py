"""Records paths in autograd's graph, so that later passes find saved tensors without a search.

    GraphPart   the paths from the outputs of a part of the graph to the nodes in it that saved activations
    Segment     the part of the graph that was read when a call of a module returned, or from the arguments of one

A part is read along the same paths if a pass created as many nodes as the pass before, from tensors of the same sizes and dtypes; then the
names of the nodes on the paths are compared. Where anything differs, `read_again` returns None and has changed nothing: the graph is
searched (`graph.new_nodes`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paredown.autograd.graph import Pass, Saved, next_number, tensors_in
from paredown.autograd.operations import Operand, row_of

NEEDED, NOT_NEEDED = (True,), (False,)
FoundAgain = tuple[Saved, Any, Any, Tensor]  # the earlier pass's description; node, handle and tensor of this pass
# (number, node) of nodes, and (number of the node, description) of the tensors that they saved
Report = tuple[list[tuple[int, Any]], list[tuple[int, Saved]]]
Moment = tuple[tuple[Any, ...], list[dict[str, int]]]  # `point_of`, and the counts of the running calls


class SavedTrail(NamedTuple):
    """Holds the position of a saved tensor in autograd's graph, by which later forward passes find the tensor again."""

    node_index: int
    raw: str
    tensor: str
    saved: Saved
    operand: Operand | None  # set where the use of the tensor depends on the node


@dataclass(eq=False, slots=True)
class GraphPart:
    """Records the paths to saved tensors in a part of autograd's graph, so that later passes need no search.

    Nodes are numbered in the order in which they are found, beginning with the `roots`. An item of `walk` has the number of a node, and
    (index of the edge, name of the node) for each node that is reached from it.
    """

    roots: tuple[tuple[int, str], ...]  # index among the tensors that the part was read from, name of the node
    walk: list[tuple[int, tuple[tuple[int, str], ...]]]
    trails: list[SavedTrail]

    @staticmethod
    def of(starts: Sequence[Any], created: Mapping[int, Any], saved: Iterable[tuple[int, Saved]]) -> GraphPart:
        """Record the part of autograd's graph that leads to the nodes `starts`, among the nodes `created` in the pass.

        `created`: the nodes by number. `saved`: (number of a node, description) of each tensor that the nodes saved.
        """
        kept = [(number, one) for number, one in saved if one.kind in ("activation", "input")]
        found, edges = _reach(starts, created)
        kept = [(number, one) for number, one in kept if number in found]
        needed = _ancestors([number for number, _ in kept], found)
        # all starts of the part, also those behind which nothing was saved: their names distinguish other passes
        order = [number for number, (parent, _) in found.items() if parent is None]
        roots = tuple((found[number][1], created[number].name()) for number in order)
        walk: list[tuple[int, tuple[tuple[int, str], ...]]] = []
        for index, number in enumerate(order):  # grows as nodes are added
            behind = [(edge, after) for edge, after in edges.get(number, ()) if after in needed]
            if behind:
                walk.append((index, tuple((edge, created[after].name()) for edge, after in behind)))
                order.extend(after for _, after in behind)
        places = {number: index for index, number in enumerate(order)}
        return GraphPart(roots, walk, [_trail(places[number], created[number], one) for number, one in kept])

    def follow(self, starts: Sequence[Any]) -> list[FoundAgain] | None:
        """Return (description, node, handle, tensor) of each saved tensor at the recorded paths in the graph of a later pass.

        Return None if a node differs from the recorded one. `starts`: the nodes of the tensors from which the paths begin.
        """
        nodes: list[Any] = []
        for index, name in self.roots:
            node = starts[index] if index < len(starts) else None
            if node is None or node.name() != name:
                return None
            nodes.append(node)
        for index, behind in self.walk:
            edges = nodes[index].next_functions
            for edge, name in behind:
                node = edges[edge][0] if edge < len(edges) else None
                if node is None or node.name() != name:
                    return None
                nodes.append(node)
        tensors: list[FoundAgain] = []
        try:
            for index, raw_name, tensor_name, saved, operand in self.trails:
                node = nodes[index]
                raw = getattr(node, raw_name)
                if raw.unpack_hook is not None or (operand is not None and operand.at(node).use is not saved.use):
                    return None
                tensor = getattr(node, tensor_name)
                if tensor is None:
                    return None
                tensors.append((saved, node, raw, tensor))
        except RuntimeError:  # modified in place since it was saved: backward raises the error
            return None
        return tensors


def is_plain(created: dict[int, Any], reported: list[tuple[int, Saved]]) -> bool:
    """Return whether later passes can find, along the same paths, the tensors that these nodes saved.

    They can if no node belongs to a custom function. `created`: the nodes by number. `reported`: (number of a node, description) of
    each saved tensor.
    """
    if any(isinstance(node, torch.autograd.function.BackwardCFunction) for node in created.values()):
        return False
    return all(  # each tensor can be read by the name of an attribute: it has no bound and is not in a list
        number in created
        and saved.kind != "hooked"
        and saved.bound is None
        and hasattr(created[number], f"_raw_saved_{saved.attribute}")
        for number, saved in reported
    )


def _trail(index: int, node: Any, saved: Saved) -> SavedTrail:
    operand = row_of(node.name()).operands.get(saved.attribute)
    conditional = operand if operand is not None and operand.exact_if is not None else None
    template = replace(saved, node=None, raw=None, tensor=None)
    return SavedTrail(index, f"_raw_saved_{saved.attribute}", f"_saved_{saved.attribute}", template, conditional)


Found = dict[int, tuple[int | None, int]]


def _reach(starts: Sequence[Any], created: Mapping[int, Any]) -> tuple[Found, dict[int, list[tuple[int, int]]]]:
    """Search autograd's graph from the nodes `starts`; return how each node was reached, and the edges taken from it.

    The first dict maps a node's number to (number of the previous node or None, index of the edge or start), the second to a list of
    (edge, number of the next node). `created`: the nodes of the pass by number; no others are visited.
    """
    found, edges = Found(), dict[int, list[tuple[int, int]]]()
    queue: list[tuple[Any, int | None, int]] = [(start, None, index) for index, start in enumerate(starts)]
    for node, parent, edge in queue:  # grows as nodes are found
        if node is None:
            continue
        number = node._sequence_nr()
        if number not in created or number in found:
            continue
        found[number] = parent, edge
        if parent is not None:
            edges.setdefault(parent, []).append((edge, number))
        queue.extend((behind, number, i) for i, (behind, _) in enumerate(node.next_functions))
    return found, edges


def _ancestors(numbers: Iterable[int], found: Found) -> set[int]:
    """Return the numbers of all nodes on the paths from the starts to the nodes `numbers`.

    `found`: how each node was reached (`_reach`).
    """
    needed: set[int] = set()
    for number in numbers:
        at: int | None = number
        while at is not None and at not in needed:
            needed.add(at)
            at = found[at][0]
    return needed


# --- moments of a pass ------------------------------------------------------------------------------------------------------------


def needs_of(args: Any) -> tuple[bool, ...]:
    """Return, for each tensor among the arguments of a call, whether it requires a gradient."""
    if len(args) == 1 and type(args[0]) is Tensor:
        return NEEDED if args[0].requires_grad else NOT_NEEDED
    return tuple([arg.requires_grad for arg in args if isinstance(arg, Tensor)])


@dataclass(eq=False, slots=True)
class Segment:
    """Records what a part of autograd's graph saved, read at one moment of a forward pass, so that the next needs no search."""

    point: tuple[Any, ...]  # `point_of` the moment before the part was read
    layouts: list[tuple[torch.Size, torch.dtype]]  # sizes and dtypes of the tensors that it was read from
    reached: list[int]  # numbers of its nodes, counted from the first node of the pass
    unreached: int  # `Pass.unreached` after it was read
    counts: list[tuple[int, dict[str, int]]]  # (index of a running call, its counts of operations after it was read)
    part: GraphPart

    @staticmethod
    def of(start: Moment, current: Pass, found: Report, values: Any) -> Segment | None:
        """Record the part of the graph that was read from `values`; return None if later passes cannot find it (`is_plain`).

        `start`: the moment of the pass `current` before the part was read. `found`: the nodes and saved tensors of the part.
        """
        (point, counts), (nodes, reported) = start, found
        if current.hidden is not None or not is_plain(dict(nodes), reported):
            return None
        tensors = list(tensors_in(values))
        changed = [(i, dict(call.counts)) for i, call in enumerate(current.calls) if call.counts != counts[i]]
        part = GraphPart.of([tensor.grad_fn for tensor in tensors], dict(nodes), reported)
        layouts = [(tensor.size(), tensor.dtype) for tensor in tensors]
        first = current.calls[0].first
        return Segment(point, layouts, [number - first for number, _ in nodes], current.unreached, changed, part)

    def read_again(self, current: Pass, values: Any, before: int | None) -> list[FoundAgain] | None:
        """Return what the same nodes of a later pass saved; None if this pass differs from the recorded one.

        `current`: the later pass. `values`: the tensors whose graph is read. `before`: as for `point_of`.
        """
        if point_of(current, before) != self.point:
            return None
        tensors = [values] if type(values) is Tensor else list(tensors_in(values))
        if [(tensor.size(), tensor.dtype) for tensor in tensors] != self.layouts:
            return None
        found = self.part.follow([tensor.grad_fn for tensor in tensors])
        if found is None:
            return None
        first = current.calls[0].first
        current.seen.update([first + number for number in self.reached])
        current.unreached = self.unreached
        for index, counts in self.counts:
            current.calls[index].counts.update(counts)
        return found


def point_of(current: Pass, before: int | None) -> tuple[Any, ...]:
    """Return values that identify a moment of a pass: its counts of autograd nodes and its running module calls.

    The last value says which arguments of the innermost call require a gradient. `before`: the number of the first node after that moment;
    None if the moment is now.
    """
    calls = current.calls
    created = (next_number() if before is None else before) - calls[0].first
    return created, len(current.seen), current.unreached, len(calls), calls[-1].needs
