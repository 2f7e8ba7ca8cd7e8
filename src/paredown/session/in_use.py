"""A packed parameter that is plain at this moment: who uses it, and who held it before."""

# pyright: reportPrivateUsage=false, reportAttributeAccessIssue=false

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn

from paredown.optim.weights import Weight, weight_of
from paredown.plan.graph import next_number
from paredown.session.saved_weights import accumulator_of


class Entry:
    """A packed parameter in use: how many held it when it was made plain."""

    __slots__ = ("accumulator", "handle", "has_graph", "holders", "is_hooked", "parameter", "weight")

    def __init__(self, parameter: nn.Parameter, weight: Weight) -> None:
        self.parameter, self.weight = parameter, weight
        with torch._C.DisableTorchFunctionSubclass():  # or a packed one answers in Python, which is slow
            self.has_graph = parameter.requires_grad and torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
        self.accumulator: Any = None
        self.handle: Any = None
        self.holders, self.is_hooked = (0, 0), False

    def look(self) -> None:
        """Count who holds it before it is used."""
        self.accumulator = accumulator_of(self.parameter) if self.has_graph else None
        self.holders = self.count()

    def count(self) -> tuple[int, int]:
        """Holders of the tensor, and of the object; where a graph may be, with the accumulator of its gradient alive in any case."""
        accumulator = self.accumulator or (accumulator_of(self.parameter) if self.has_graph else None)
        counts = self.parameter._use_count(), sys.getrefcount(self.parameter)
        del accumulator
        return counts


class Call:
    """A module whose forward is running."""

    __slots__ = ("entries", "first", "module")

    def __init__(self, module: nn.Module) -> None:
        self.module, self.first = module, next_number()
        weights = [(p, weight_of(p)) for p in module._parameters.values() if p is not None]
        # a view of a weight that was made a parameter, nn.Parameter(p.data), is used as code outside of modules uses it
        self.entries = [Entry(p, weight) for p, weight in weights if weight is not None and weight.parameter is p]
