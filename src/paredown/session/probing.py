"""How many examples a guard may probe with: a probe holds what it saves as it is, beside the model, and is to stay within the budget too.

    a probe takes    model, optimizer state, gradients        they are there when it runs, before a step of the optimizer
                     GRADIENTS x gradients                    the exact ones, those of one more backward, and a difference
                     SAVED x activations of the examples      as they are, rounded, and what flows back

Both factors are from above: 2.2 to 2.4, and 1.4 to 2.9, were measured on GPTs, ViTs and ResNets (`tests/session/test_probing.py`).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from paredown.plan.footprint import footprint
from paredown.plan.plan import Plan
from paredown.plan.record import Trace
from paredown.roles import Role

GRADIENTS, SAVED = 2.5, 3.0
COMES_AND_GOES = (Role.ACTIVATION, Role.TEMPORARY, Role.ERROR)


def probe_bytes(trace: Trace, plan: Plan, batch: Any, *, num_examples: int | None = None) -> int:
    """The predicted peak of a probe of `batch`, or of its first examples, between two steps of training under `plan`."""
    beside, each = _costs(trace, plan, batch)
    return int(beside + each * (count_examples(batch) if num_examples is None else num_examples))


def within(batch: Any, trace: Trace, plan: Plan, budget_bytes: int) -> Any | None:
    """The first examples of `batch`, as many as can be probed within the budget; None if not even one can."""
    beside, each = _costs(trace, plan, batch)
    num = int((budget_bytes - beside) // each) if each else 1 << 62
    return first_examples(batch, num) if num > 0 else None


def first_examples(batch: Any, num: int) -> Any:
    """The first `num` examples of `batch`, or all where it has no more."""
    there = count_examples(batch)
    return tree_map(lambda leaf: leaf[:num] if _has_examples(leaf, there) else leaf, batch) if num < there else batch


def _costs(trace: Trace, plan: Plan, batch: Any) -> tuple[float, float]:
    """(what a probe takes however few examples it has, for each example)."""
    written, now = footprint(trace), footprint(trace, plan)
    held = sum(nbytes for role, nbytes in now.by_role.items() if role not in COMES_AND_GOES) + now.workspace_bytes
    share = sum(leaf.nbytes for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)) / max(written.by_role.get(Role.INPUT, 0), 1)
    gradients, saved = (written.by_role.get(role, 0) for role in (Role.GRADIENT, Role.ACTIVATION))
    return held + GRADIENTS * gradients, SAVED * saved * min(share, 1.0) / count_examples(batch)


def count_examples(batch: Any) -> int:
    """The length of the first tensor that has one."""
    return next((len(leaf) for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim() and len(leaf)), 1)


def _has_examples(leaf: Any, num: int) -> bool:
    return isinstance(leaf, Tensor) and leaf.dim() > 0 and len(leaf) == num
