"""Finds operations that other code runs between a model's submodules: `h = relu(model.first(x)); model.second(h)`.

Nodes on the path from an argument of a call back to an output of an earlier call belong to the model, as they would inside its forward,
and the argument is no tensor of the caller's. Operations of another network are left alone: if a node on the path has a weight that is no
parameter of the model, the argument counts as the caller's. So do saved floats that no operation made, such as random noise.

Outputs are recognized by the numbers of their nodes, which rise in each thread: no node is kept alive.
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from paredown.autograd.graph import (
    ACCUMULATE,
    SAVES_NOTHING,
    WEIGHT_PRESERVING,
    attributes,
    has_storage,
    is_of_weight,
    saved_of,
    tensors_in,
)
from paredown.autograd.operations import row_of

MAX_KNOWN = 1024  # nodes that are known as outputs, or as read; older ones are forgotten
FROZEN_LINEAR = "FrozenLinearBackward"  # of a packed weight (optim/packed_parameter.py)
MAX_BETWEEN = 128  # nodes that are searched from one argument: a network without an output of the model may be behind it


class Between(NamedTuple):
    """Holds the autograd nodes between outputs of earlier calls of submodules and arguments of a later call.

    `nodes`: (number, node) of each. `arguments`: the arguments that depend on such outputs. `outputs`: storage addresses of the outputs
    that lead to these arguments. `held`: storage addresses of the caller's own tensors.
    """

    nodes: list[tuple[int, Any]]
    arguments: list[Tensor]
    outputs: set[int]
    held: frozenset[int]


class PassChain:
    """Records what a model's submodules return to code outside the model, to recognize it in arguments of later calls.

    There is one object for each thread. `owns` returns whether a tensor is a parameter of the model.
    """

    def __init__(self, owns: Callable[[Tensor], bool]) -> None:
        self._owns = owns
        # number of a node, in the order of creation -> the storage address of the output; 0 for nodes between calls
        self._known: dict[int, int] = {}

    def end_pass(self, output: Any, first: int) -> None:
        """Record the outputs of a call of a submodule. `first`: the number of the call's first autograd node."""
        made = [(t.grad_fn._sequence_nr(), t) for t in tensors_in(output) if t.grad_fn is not None and has_storage(t)]
        self._add({number: t.untyped_storage()._cdata for number, t in made if number >= first})

    def _add(self, storages: dict[int, int]) -> None:
        self._known.update(sorted(storages.items()))
        while len(self._known) > MAX_KNOWN:
            del self._known[next(iter(self._known))]

    def before(self, arguments: Sequence[Tensor]) -> Between:
        """Return the autograd nodes that lead from outputs of earlier calls to the `arguments` of a new call."""
        nodes, produced, outputs, held = dict[int, Any](), list[Tensor](), set[int](), set[int]()
        for argument in arguments if self._known else ():
            way = self._way_to(argument.grad_fn) if argument.grad_fn is not None and has_storage(argument) else None
            of_caller = None if way is None else self._saved_by_caller(way[0].values())
            if way is not None and of_caller is not None:
                nodes |= way[0]
                outputs |= way[1]
                held |= of_caller
                produced.append(argument)
        self._add(dict.fromkeys(nodes, 0))
        given = {t.untyped_storage()._cdata for t in arguments if not any(t is argument for argument in produced)}
        produced = [t for t in produced if t.untyped_storage()._cdata not in given]
        return Between(sorted(nodes.items()), produced, outputs - given, frozenset(given | held))

    def _way_to(self, start: Any) -> tuple[dict[int, Any], set[int]] | None:
        """Return the nodes (by number) from outputs of earlier calls to the node `start`, and these outputs' storages.

        Return None if no such output leads to `start`.
        """
        known, oldest = self._known, next(iter(self._known))
        found, behind, stack = dict[int, Any](), dict[int, list[int]](), [start]
        while stack and len(found) < MAX_BETWEEN:
            node = stack.pop()
            number = node._sequence_nr()
            if number in known or number in found or number < oldest or node.name() == ACCUMULATE:
                continue
            edges = [after for after, _ in node.next_functions if after is not None]
            found[number], behind[number] = node, [after._sequence_nr() for after in edges]
            stack.extend(edges)
        reached = [after for edges in (*behind.values(), [start._sequence_nr()]) for after in edges if after in known]
        leads = set[int]()
        for number in sorted(found):  # nodes are created before those that read them
            if any(after in known or after in leads for after in behind[number]):
                leads.add(number)
        return ({number: found[number] for number in leads}, {known[number] for number in reached} - {0}) if reached else None

    def _saved_by_caller(self, nodes: Iterable[Any]) -> set[int] | None:
        """Return addresses of the storages that `nodes` saved and that no operation computed, such as the caller's noise.

        Return None if one of the nodes reads a weight of another network.
        """
        held = set[int]()
        for node in nodes:
            name = node.name()
            if any(self._is_foreign_weight(after) for after, _ in node.next_functions) or _has_packed_weight(node, name):
                return None
            for attribute, _, tensor in saved_of(node, name, False) if name not in SAVES_NOTHING else ():
                if tensor is None or tensor.grad_fn is not None or not tensor.is_floating_point() or not has_storage(tensor):
                    continue
                weight, operand = tensor if tensor._base is None else tensor._base, row_of(name).operands.get(attribute)
                is_weight = isinstance(weight, nn.Parameter) or (operand is not None and operand.name == "weight")
                if is_weight and not self._owns(weight):
                    return None
                held.add(tensor.untyped_storage()._cdata)
        return held

    def _is_foreign_weight(self, node: Any) -> bool:
        """Return whether the result of a node is a parameter of another model, or a view or cast of one."""
        while node is not None and node.name() in WEIGHT_PRESERVING and node.next_functions:
            node = node.next_functions[0][0]
        return node is not None and node.name() == ACCUMULATE and not self._owns(node.variable)


def _has_packed_weight(node: Any, name: str) -> bool:
    if name in SAVES_NOTHING or isinstance(node, torch.autograd.function.BackwardCFunction):
        return name == FROZEN_LINEAR
    raws = [getattr(node, raw_name) for _, raw_name, _ in attributes(name, type(node), False)]
    return any(is_of_weight(raw.unpack_hook) for one in raws for raw in (one if isinstance(one, tuple | list) else (one,)))
