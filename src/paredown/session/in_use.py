"""A packed parameter that is plain at this moment: who uses it, and who held it before."""

# pyright: reportPrivateUsage=false, reportAttributeAccessIssue=false

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn

from paredown.optim.weights import KEY, Weight
from paredown.plan.graph import next_number
from paredown.session.saved_weights import Finder, accumulator_of


class Entry:
    """A packed parameter in use: how many held it when it was made plain.

    It keeps the node that accumulates the gradient: whether a graph holds that too changes no count then.
    """

    __slots__ = ("_accumulator", "_like", "handle", "holders", "is_hooked", "parameter", "weight")

    def __init__(self, parameter: nn.Parameter, weight: Weight) -> None:
        self.parameter, self.weight = parameter, weight
        self._accumulator: Any = None
        self._like: Tensor | None = None
        self.handle: Any = None
        self.holders, self.is_hooked = (0, 0), False

    def look(self) -> None:
        """Count who holds it before it is used; it is plain by now."""
        weight = self.weight
        if self._like is not weight.empty:  # another dtype or device has another node
            self._accumulator, self._like = None, weight.empty
        if self._accumulator is None and self.parameter.requires_grad and not torch.is_inference_mode_enabled():
            self._accumulator = accumulator_of(self.parameter)
        weight.accumulator = self._accumulator
        self.holders = self.count()

    def count(self) -> tuple[int, int]:
        """Holders of the tensor, and of the object."""
        return self.parameter._use_count(), sys.getrefcount(self.parameter)


class Call:
    """A module whose forward is running."""

    __slots__ = ("entries", "first", "place")

    def __init__(self, place: Place, entries: list[Entry]) -> None:
        self.place, self.entries, self.first = place, entries, 0


class Place:
    """A module with packed parameters: what its calls need, kept from one to the next."""

    __slots__ = ("_free", "_known", "finder", "module")

    def __init__(self, module: nn.Module) -> None:
        self.module, self.finder = module, Finder()
        self._known: list[tuple[int, Weight | None]] = []
        self._free: list[Call] = []  # calls that ended, to be used again

    def call(self) -> Call:
        """A call that begins now."""
        parameters = self.module._parameters.values()
        known = [(id(p), vars(p).get(KEY)) for p in parameters if p is not None]
        if known != self._known:
            self._known, self._free = known, []
        try:
            call = self._free.pop()
        except IndexError:
            pairs = [(p, vars(p).get(KEY)) for p in parameters if p is not None]
            # a view of a weight that was made a parameter, nn.Parameter(p.data), is used as code outside of modules uses it
            call = Call(self, [Entry(p, weight) for p, weight in pairs if weight is not None and weight.parameter is p])
        call.first = next_number()
        return call

    def ended(self, call: Call) -> None:
        """Nobody needs this call any more."""
        self._free.append(call)
