"""Numbers that compiled graphs measure at each call, and the slots that stay unmodified where they are too large.

Logits of attention and statistics of norms (session/value_bounds.py) decide whether their operands may be packed. A graph writes them to a
tensor, and `reason` of each check reads them after the call.
"""

# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportAttributeAccessIssue=false

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from paredown.formats.format import Format
from paredown.plan.storage import significant_bits
from paredown.session.compiled.graph_decisions import hint
from paredown.session.compiled.graph_slots import ATTENTION, NORMS, GraphSlot, Operation
from paredown.session.value_bounds import (
    blocks_mix_groups,
    measure_attention,
    reason_of_logits,
    reason_of_spread,
    spread_of_statistics,
)

NUM_NUMBERS = 4096  # how many numbers a graph can measure
Check = tuple[list[fx.Node], Callable[..., Tensor], int, Callable[[Sequence[float]], str]]  # sources, measure, count, reason


def check_of(operation: Operation, users: list[tuple[fx.Node, GraphSlot, Format]], forward: dict[str, fx.Node]) -> Check | None:
    """What to measure of an operation whose operands are packed; None for nothing."""
    if not users:
        return None
    format = min((format for _, _, format in users), key=significant_bits)
    if operation.row.op == ATTENTION:
        node = operation.nodes[0]
        output = next(n for n in operation.nodes if n.target is operator.getitem and n.args[1] == 0)
        sources: list[Any] = [*forward[node.name].args[:3], forward[output.name]]
        scale: Any = node.kwargs.get("scale")
        head_dim = int(sources[0].meta["val"].shape[-1])
        return (
            sources,
            lambda q, k, v, o: measure_attention(q, k, v, o, scale),
            2,
            lambda n: reason_of_logits(n[0], n[1], format, head_dim),
        )
    rstd = next((n for n in operation.nodes if n.target is torch.ops.aten.rsqrt.default), None)
    mean = next((n for n in operation.nodes if n.target is operator.getitem and n.args[1] == 1), None)
    if operation.row.op not in NORMS or rstd is None or mean is None:
        return None
    num_groups = hint(rstd.meta["val"].numel())
    if not any(blocks_mix_groups(node.meta["val"], num_groups, operation.row.op) for node, _, _ in users):
        return None
    argument = rstd.args[0]
    eps = next((a for a in getattr(argument, "args", ()) if isinstance(a, float)), 0.0)
    return (
        [forward[mean.name], forward[rstd.name]],
        lambda m, r: spread_of_statistics(m, r, eps),
        1,
        lambda n: reason_of_spread(n[0]),
    )
