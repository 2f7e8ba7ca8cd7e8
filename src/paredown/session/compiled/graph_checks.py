"""Makes compiled graphs measure numbers at each call; saved tensors stay unmodified where these numbers are too large.

Logits of attention and statistics of norms (session/value_bounds.py) decide whether their operands may be packed. A graph writes them to a
tensor, and `reason` of each check reads them after the call.
"""

# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from paredown.formats.format import Format
from paredown.plan.storage import BLOCK, significant_bits
from paredown.session.compiled.graph_slots import ATTENTION, NORMS, GraphOperation, GraphSlot, hint
from paredown.session.value_bounds import (
    attention_parts,
    blocks_mix_groups,
    extremes,
    join_attention_parts,
    ranges_of_statistics,
    reason_of_attention,
    reason_of_spread,
    spread_of_ranges,
)

NUM_NUMBERS = 1 << 13  # how many numbers a graph can measure
MAX_RANGES = 64  # ranges of a norm that are measured with those of all norms of as long ranges; other norms take three kernels each
MAX_RANGES_TRIED = (MAX_RANGES, 16, 4, 0)  # fewer where a graph would measure more numbers than ENOUGH_NUMBERS
ENOUGH_NUMBERS = NUM_NUMBERS // 2  # the rest is for the signals of guards


@dataclass(frozen=True)
class GraphCheck:
    """Measures `count` numbers in a compiled graph that decide whether an operation's operands may be packed.

    `measure` gets the tensors of the nodes `sources`. Checks of the same `kind` are measured together, by one call of `join` with the
    tensors that `measure` returned for all of them. `reason` is a function from the numbers to a reason not to pack the operands, or "".
    """

    kind: Hashable
    sources: list[fx.Node]
    measure: Callable[..., tuple[Tensor, ...]]
    join: Callable[[Sequence[Tensor]], Tensor]
    count: int
    reason: Callable[[Sequence[float]], str]


def check_of(
    operation: GraphOperation,
    users: list[tuple[fx.Node, GraphSlot, Format]],
    forward: dict[str, fx.Node],
    in_memory: Callable[[fx.Node], Tensor],
    max_ranges: int = MAX_RANGES,
) -> GraphCheck | None:
    """Return what to measure for an operation whose operands are packed; None if nothing needs to be measured.

    `users`: the packed operands with their slots and formats. `forward`: the nodes of the forward graph by name. `in_memory` returns a
    tensor with the strides in which a node's tensor is encoded. `max_ranges`: a norm with more ranges is measured by itself.
    """
    if not users:
        return None
    if operation.row.op == ATTENTION:
        return _check_of_attention(operation, min((format for _, _, format in users), key=significant_bits), forward)
    statistics = statistics_of(operation, users, forward, in_memory)
    if statistics is None:
        return None
    *sources, eps = statistics
    num_groups, reason = hint(sources[1].meta["val"].numel()), lambda n: reason_of_spread(spread_of_ranges(n, eps))
    length = min(num_groups & -num_groups, BLOCK)  # the largest power of two that divides the number
    if num_groups // length > max_ranges:
        return GraphCheck("extremes", sources, lambda m, r: (extremes(r, m),), lambda t: torch.cat(list(t)), 4, reason)
    join = partial(ranges_of_statistics, length=length)
    return GraphCheck(("ranges", length), sources, lambda *t: t, join, 4 * (num_groups // length), reason)


def _check_of_attention(operation: GraphOperation, format: Format, forward: dict[str, fx.Node]) -> GraphCheck:
    node = operation.nodes[0]
    output = next(n for n in operation.nodes if n.target is operator.getitem and n.args[1] == 0)
    sources: list[Any] = [*forward[node.name].args[:3], forward[output.name]]
    sizes = tuple(source.meta["val"].shape for source in sources)
    head_dim = int(sizes[0][-1])
    scale: Any = node.kwargs.get("scale")
    scale = head_dim**-0.5 if scale is None else scale
    reason = lambda n: reason_of_attention(n, scale, format, head_dim)  # noqa: E731
    return GraphCheck((ATTENTION, sizes), sources, attention_parts, join_attention_parts, 4, reason)


def statistics_of(
    operation: GraphOperation,
    users: list[tuple[fx.Node, GraphSlot, Format]],
    forward: dict[str, fx.Node],
    in_memory: Callable[[fx.Node], Tensor],
) -> tuple[fx.Node, fx.Node, float] | None:
    """Return the nodes (mean, rstd) and the eps of a norm if blocks of its packed input mix channels or rows; else None.

    The arguments are those of `check_of`.
    """
    rstd = next((n for n in operation.nodes if n.target is torch.ops.aten.rsqrt.default), None)
    mean = next((n for n in operation.nodes if n.target is operator.getitem and n.args[1] == 1), None)
    if operation.row.op not in NORMS or rstd is None or mean is None:
        return None
    num_groups = hint(rstd.meta["val"].numel())
    if not any(blocks_mix_groups(in_memory(node), num_groups, operation.row.op) for node, _, _ in users):
        return None
    eps = next((a for a in getattr(rstd.args[0], "args", ()) if isinstance(a, float)), 0.0)
    return forward[mean.name], forward[rstd.name], eps
