"""Groups of modules for tables of memory: by as many parts of their paths as show where the bytes are.

`useful_grouping(sizes)` takes the fewest parts at which no group has more than half of the bytes. Where a network repeats layers, their
numbers are left out, so that 32 layers are one row for each of their parts:

>>> sizes = {f"model.layers.{i}.{part}": 10 for i in range(32) for part in ("attn", "mlp")} | {"model.embed": 5, "head": 5}
>>> useful_grouping(sizes).sums(sizes)
{'model.layers.*.attn': 320, 'model.layers.*.mlp': 320, 'model.embed': 5, 'head': 5}
>>> useful_grouping({"conv1": 3, "layer1.0.conv": 4, "layer1.1.conv": 1, "layer2.0.conv": 4}).depth
1
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

NUMBER = re.compile(r"(?<![^.])[0-9]+(?![^.])")  # a part of a path that is a number
MOST_GROUPS = 10  # of groups with numbers


class Grouping(NamedTuple):
    """A way to group modules: by the first `depth` parts of their paths; if `joins_layers`, numbers in these are left out."""

    depth: int
    joins_layers: bool = False

    def name(self, module: str) -> str:
        """Return the name of the group of a module."""
        path = ".".join(module.split(".")[: self.depth])
        return NUMBER.sub("*", path) if self.joins_layers else path

    def sums(self, sizes: Mapping[str, int]) -> dict[str, int]:
        """Return the bytes of each group, the largest first; `sizes` has those of each module."""
        sums: Counter[str] = Counter()
        for module, nbytes in sizes.items():
            sums[self.name(module)] += nbytes
        return dict(sums.most_common())


def useful_grouping(sizes: Mapping[str, int]) -> Grouping:
    """Return the grouping by the fewest path parts in which no group has more than half of the bytes; `sizes` are bytes by module.

    If there is no such grouping, return the one whose largest group is smallest.
    """
    half, deepest = sum(sizes.values()) / 2, max((module.count(".") + 1 for module in sizes), default=1)
    largest: dict[Grouping, int] = {}
    for grouping in (Grouping(depth, joins) for depth in range(1, deepest + 1) for joins in (False, True)):
        groups = grouping.sums(sizes)
        if grouping.joins_layers or len(groups) <= MOST_GROUPS:
            largest[grouping] = max(groups.values(), default=0)
            if largest[grouping] <= half:
                return grouping
    return min(largest, key=lambda grouping: largest[grouping])
