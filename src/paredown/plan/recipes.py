"""Saved tensors that follow from another one that was saved before: they need not wait, they are computed again from it.

    relu(batch_norm(x))     from x, the statistics that the norm saved, and the exact signs that the ReLU saved
    layer_norm(x)           from x and its statistics
    gelu(x), silu(x)        from x

so that of a convolution, norm and ReLU the norm's input waits and the next convolution's input does not. The result may have been cast
and seen through views since.
"""

# pyright: reportPrivateUsage=false, reportAttributeAccessIssue=false

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from paredown.plan.graph import CAST_NODE, VIEWS
from paredown.plan.ops import row_of

SAME_MEMORY_ORDER = frozenset((*VIEWS, CAST_NODE))
# those whose "input", or "output" of a ReLU, others follow from
SOURCE_OPS = frozenset(("batch_norm", "layer_norm", "gelu", "silu", "relu"))
REORDERED = frozenset(f"{name}Backward0" for name in ("Transpose", "Permute", "T"))
ACTIVATIONS = frozenset(("gelu", "silu"))


@dataclass(frozen=True, eq=False)
class Recipe:
    """`source`: the node that saved what to start from, as its operand "input"; `sign`: that of a ReLU after it."""

    op: str
    source: Any
    sign: Any | None = None
    is_copy: bool = False  # in the logical order, then: the source must be contiguous


def recipe_of(tensor: Tensor) -> Recipe | None:
    """How `tensor` follows from what a node before it saved, if it is known to."""
    node = tensor.grad_fn
    passed: set[str] = set()
    while node is not None and node.name() in SAME_MEMORY_ORDER:
        passed.add(node.name())
        node = node.next_functions[0][0]
    is_copy = CAST_NODE in passed  # which may be of another memory order
    if node is None or (is_copy and passed & REORDERED):
        return None
    op = _op(node)
    if is_copy and op != "relu" and not tensor.is_contiguous():
        return None
    if op in ACTIVATIONS or op == "layer_norm":
        return Recipe(op, node, is_copy=is_copy)
    before = node.next_functions[0][0] if op == "relu" else None
    if before is not None and _op(before) == "batch_norm" and _is_training(before):
        return Recipe("batch_norm", before, node)
    return None


def _op(node: Any) -> str:
    return row_of(getattr(node, "stands_for", (node.name(),))[0]).op


def _is_training(norm: Any) -> bool:
    """Whether a batch norm used the statistics of the batch, and its bias can be had."""
    return bool(getattr(norm, "_saved_training", True)) and len(norm.next_functions) == 3
