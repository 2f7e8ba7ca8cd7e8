"""Finds saved tensors that need not be stored, because backward can recompute them from another saved tensor.

    relu(batch_norm(x))           from x, the statistics that the norm saved, and the exact signs that the ReLU saved
    batch_norm(x), layer_norm(x)  from x and its statistics
    gelu(x), silu(x)              from x; where x is a batch norm's output, from the input of that norm

In a sequence of convolution, norm and activation function, the input of the norm is stored, and the inputs of the function and of the next
convolution are not: they have the rounding errors of one tensor, as in compiled graphs. Casts and views may follow the operations. Traces
(predict/saved_lifetimes.py) and sessions (session/eager/activations.py) both call `rematerialization_of`.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

from torch import Tensor
from torch.autograd.function import BackwardCFunction

from paredown.autograd.graph import CAST_NODE, VIEWS
from paredown.autograd.operations import row_of

SAME_MEMORY_ORDER = frozenset((*VIEWS, CAST_NODE))
# operations from whose saved "input" (of a ReLU: "output") later tensors can be recomputed
SOURCE_OPS = frozenset(("batch_norm", "layer_norm", "gelu", "silu", "relu"))
REORDERED = frozenset(f"{name}Backward0" for name in ("Transpose", "Permute", "T"))
ACTIVATIONS = frozenset(("gelu", "silu"))


class Rematerialization(NamedTuple):
    """Says how backward recomputes a saved tensor: it applies the operation `op` to the input that node `source` saved.

    `sign`: the node of a ReLU after `op`. `function`: the node of another activation function after `op`. `otherwise`: another way to
    recompute the tensor, for the case that the input which `source` saved is not stored.
    """

    op: str
    source: Any
    sign: Any | None = None
    function: Any | None = None
    is_copy: bool = False  # a cast came after it, which writes the logical order: the source must be contiguous
    otherwise: Rematerialization | None = None


def rematerialization_of(tensor: Tensor) -> Rematerialization | None:
    """Return the way to recompute `tensor` in backward from a tensor that an earlier node saved, or None."""
    node = tensor.grad_fn
    if node is None:
        return None
    name: str = node.name()
    if not _may_lead(name) and not isinstance(node, BackwardCFunction):
        return None
    passed: set[str] = set()
    while name in SAME_MEMORY_ORDER:
        passed.add(name)
        node = node.next_functions[0][0]
        if node is None:
            return None
        name = node.name()
    is_copy = CAST_NODE in passed  # a cast may change the memory order
    if is_copy and passed & REORDERED:
        return None
    op = function_name(node)
    if is_copy and op != "relu" and not tensor.is_contiguous():
        return None
    from_input = Rematerialization(op, node, is_copy=is_copy) if op in ACTIVATIONS or op == "layer_norm" else None
    norm = node if op == "batch_norm" else node.next_functions[0][0] if op == "relu" or op in ACTIVATIONS else None
    if norm is not None and function_name(norm) == "batch_norm" and _is_training(norm):
        sign, function = (node if op == "relu" else None), (node if op in ACTIVATIONS else None)
        return Rematerialization("batch_norm", norm, sign, function, otherwise=from_input)
    return from_input


@cache
def _may_lead(name: str) -> bool:
    """Return whether results of autograd nodes with this name can possibly be recomputed in backward."""
    return name in SAME_MEMORY_ORDER or row_of(name).op in SOURCE_OPS


def function_name(node: Any) -> str:
    """Return the name of the operation of an autograd node, from the table of operations."""
    name: str = node.name()
    return row_of(getattr(node, "stands_for", (name,))[0] if isinstance(node, BackwardCFunction) else name).op


def _is_training(norm: Any) -> bool:
    """Return whether a batch norm's node used the statistics of the batch, and has a weight and a bias to recompute with."""
    return bool(getattr(norm, "_saved_training", True)) and len(norm.next_functions) == 3
