"""A step as a few batches: parameters with packed accumulators, and those with plain gradients, each one `Batch` of the engine.

Batches are kept from step to step. What is looked at each time, as lists and without a loop in Python where that can be: whether the same
parameters have gradients of the same kind, and whether parameters and accumulators lie where they did. Plain gradients are new ones in
every step; their addresses are passed on.
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from paredown.errors import OptimError
from paredown.optim.batched_update import Batch
from paredown.optim.gradient_hooks import PackedGradient, ReleasedGradient
from paredown.optim.packed_weight import KEY, weight_of
from paredown.optim.parameter_state import ParameterState, check_gradient, check_parameter, fill_state, local, restart, unit_of
from paredown.optim.rules import Rule

if TYPE_CHECKING:
    from paredown.optim.base import Optimizer


class StepBatch:
    """Entries with gradients of one kind and one rule, and the batch that updates them."""

    def __init__(self, optimizer: Optimizer, rule: Rule, pairs: list[tuple[ParameterState, Any]], *, is_plain: bool) -> None:
        self.entries = [entry for entry, _ in pairs]
        self.is_plain = is_plain
        is_spread = is_plain and any(isinstance(entry.parameter, DTensor) for entry in self.entries)
        self.factor = 1.0 / optimizer.microbatches if is_spread else 1.0  # all others hold the mean already
        self.groups = [entry.group for entry in self.entries]
        self.steps = [entry.step for entry in self.entries]
        self.is_uniform = len(set(self.steps)) == 1
        units = [unit_of(e, rule, optimizer.state[e.parameter], g) for e, g in pairs]
        self.batch = Batch(rule, units, optimizer.seed)
        self.shadows = [(local(e.parameter), shadow) for e in self.entries if (shadow := e.shadow) is not None]
        self.weights = [entry.weight for entry in self.entries if entry.weight is not None]

    def run(self, optimizer: Optimizer, gradients: list[Tensor] | None) -> None:
        """One update of all; `gradients` are new plain ones."""
        for parameter, shadow in self.shadows:
            shadow.copy_(parameter)
        groups = optimizer.param_groups
        if self.is_uniform:
            step = self.steps[0] + 1
            hypers = [optimizer.hyper(group, step, self._factor(group)) for group in groups]
            self.batch.update(hypers, self.groups if len(groups) > 1 else 0, step, gradients)
        else:
            places = [(group, step + 1) for group, step in zip(self.groups, self.steps, strict=True)]
            rows = {place: i for i, place in enumerate(dict.fromkeys(places))}
            hypers = [optimizer.hyper(groups[group], step, self._factor(groups[group])) for group, step in rows]
            self.batch.update(hypers, [rows[place] for place in places], [step for _, step in places], gradients)
        self.steps = [step + 1 for step in self.steps]
        for parameter, shadow in self.shadows:
            parameter.copy_(shadow)
        for weight in self.weights:
            weight.changed()

    def _factor(self, group: Any) -> float:
        return -self.factor if group.get("maximize") else self.factor


class StepBatches:
    """The rounds of an optimizer, made again when something changed."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._owner = weakref.ref(optimizer)
        self._rounds: list[StepBatch] = []
        self._entries: list[ParameterState] | None = None  # those that torch does not update
        self._parameters: list[Tensor] = []
        self._seen: Any = None  # what must be the same for the rounds to serve again

    def forget(self) -> None:
        """Make them again at the next step."""
        self.settle()
        self._rounds, self._entries, self._seen = [], None, None

    def settle(self) -> None:
        """Entries know how often they were updated."""
        for made in self._rounds:
            for entry, step in zip(made.entries, made.steps, strict=True):
                entry.step = step

    def run(self) -> None:
        """Update all entries that have gradients."""
        optimizer = self._owner()
        assert optimizer is not None
        if self._entries is None:
            gone = [entry.name for entry in optimizer.entries if entry.is_gone]
            if gone:
                raise OptimError(f"another optimizer of paredown.optim took {gone[0]} over, which this one had: step that one.")
            self._entries = [entry for entry in optimizer.entries if not optimizer.is_torchs(entry)]
            self._parameters = [entry.parameter for entry in self._entries]
        with torch._C.DisableTorchFunctionSubclass():
            gradients: list[Any] = [p.grad for p in self._parameters]
            if self._seen is None or self._look(optimizer, gradients) != self._seen:
                gradients = self._make(optimizer, gradients)
            for made, places in zip(self._rounds, self._plain_places, strict=True):
                plain: list[Tensor] | None = [gradients[i] for i in places] if made.is_plain else None
                if plain is not None and self._is_spread:
                    plain = [local(g) for g in plain]
                if plain is not None and not all([g.is_contiguous() for g in plain]):
                    plain = [g.contiguous() for g in plain]
                made.run(optimizer, plain)

    def _look(self, optimizer: Optimizer, gradients: list[Any]) -> Any:
        """Kinds of all gradients, accumulators, rules, and where parameters lie: equal to the last time if the same rounds serve."""
        kinds = list(map(type, gradients))
        rules = [optimizer.rule_for(group).name for group in optimizer.param_groups]
        kept = (rules, id(optimizer.state), len(optimizer.state))
        if self._seen is not None and (kinds, kept) != self._seen[:2]:
            return None
        weights: list[Any] = [p.__dict__.get(KEY) for p in self._packed_parameters]
        if weights != self._weights:  # the session was closed, or there is another
            return None
        for weight in weights:
            if weight.address:  # somebody uses it, and may have written into it
                weight.gather()
        totals = [gradients[i]._lease.total for i in self._packed_places]
        for total in totals:
            if total.floor is not None:
                total.settle()
        addresses = [p.data_ptr() for p in (map(local, self._plain_parameters) if self._is_spread else self._plain_parameters)]
        plain = [gradients[i] for places in self._plain_places for i in places]
        dtypes, layouts = [g.dtype for g in plain], [g.layout for g in plain]
        return kinds, kept, totals, [weight.packed for weight in weights], addresses, dtypes, layouts

    def _make(self, optimizer: Optimizer, gradients: list[Any]) -> list[Any]:
        """New rounds; the gradients, after those that somebody assigned were folded."""
        self.settle()
        self._rounds, self._seen = [], None
        assert self._entries is not None
        for entry, gradient in zip(self._entries, gradients, strict=True):
            if gradient is not None and not isinstance(gradient, ReleasedGradient):
                check_parameter(entry.parameter, entry.name)
                check_gradient(entry, gradient)
                weight = weight_of(entry.parameter)
                if weight is not None:
                    weight.gather()
                if entry.gradient is not None and not entry.gradient.lent(gradient):
                    entry.hook.collect()
        gradients = [p.grad for p in self._parameters]
        self._place(optimizer, gradients)
        self._seen = self._look(optimizer, gradients)
        return gradients

    def _place(self, optimizer: Optimizer, gradients: list[Any]) -> None:
        found: dict[Any, list[int]] = {}
        assert self._entries is not None
        for i, (entry, gradient) in enumerate(zip(self._entries, gradients, strict=True)):
            if gradient is None or isinstance(gradient, ReleasedGradient):
                continue
            entry.weight = weight_of(entry.parameter)
            rule = optimizer.rule_for(optimizer.param_groups[entry.group])
            restart(entry, rule, optimizer.state[entry.parameter])
            fill_state(entry, rule, optimizer.state[entry.parameter])
            is_plain = not isinstance(gradient, PackedGradient)
            found.setdefault((is_plain, rule.name, local(entry.parameter).device), []).append(i)
        of = sorted(found.items(), key=lambda item: item[0][0])  # packed ones first: they are the most work
        for (is_plain, _, _), places in of:
            entries = [self._entries[i] for i in places]
            rule = optimizer.rule_for(optimizer.param_groups[entries[0].group])
            pairs = [(e, gradients[i] if is_plain else e.gradient) for e, i in zip(entries, places, strict=True)]
            self._rounds.append(StepBatch(optimizer, rule, pairs, is_plain=is_plain))
        self._plain_places = [places if is_plain else [] for (is_plain, _, _), places in of]
        self._packed_places = [i for (is_plain, _, _), places in of if not is_plain for i in places]
        updated = [entry for made in self._rounds for entry in made.entries]
        self._weights = [entry.weight for entry in updated if entry.weight is not None]
        self._packed_parameters = [entry.parameter for entry in updated if entry.weight is not None]
        self._plain_parameters = [entry.parameter for entry in updated if entry.weight is None]
        self._is_spread = any(isinstance(p, DTensor) for p in self._parameters)
