"""`StepBatches` makes a step of a few `Batch`es, per rule and device one for packed and one for unpacked gradients.

Batches are cached from step to step. Each step checks, with list comparisons rather than Python loops where possible, whether the same
parameters have gradients of the same type, and whether parameters and accumulators have the same addresses. Gradients that are not packed
are new tensors in every step; only their addresses are updated.
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
from paredown.optim.gradient_hooks import ReleasedGradient
from paredown.optim.gradient_ops import PackedGradient
from paredown.optim.packed_weight import KEY, weight_of
from paredown.optim.parameter_state import ParameterState, check_gradient, check_parameter, fill_state, restart, unit_of
from paredown.optim.rules import Rule
from paredown.optim.sharded.local_rows import local

if TYPE_CHECKING:
    from paredown.optim.base import Optimizer


class StepBatch:
    """Parameters with one update rule, whose gradients are all packed or all unpacked, and the `Batch` that updates them."""

    def __init__(self, optimizer: Optimizer, rule: Rule, pairs: list[tuple[ParameterState, Any]], *, is_plain: bool) -> None:
        self.entries = [entry for entry, _ in pairs]
        self.is_plain = is_plain
        is_spread = is_plain and any(isinstance(entry.parameter, DTensor) for entry in self.entries)
        self.factor = 1.0 / optimizer.microbatches if is_spread else 1.0  # other gradients are means already
        self.groups = [entry.group for entry in self.entries]
        self.used_groups = list(dict.fromkeys(self.groups))  # other groups may have another rule, with other hyperparameters
        self.rows = [self.used_groups.index(group) for group in self.groups]
        self.steps = [entry.step for entry in self.entries]
        self.is_uniform = len(set(self.steps)) == 1
        units = [unit_of(e, rule, optimizer.state[e.parameter], g) for e, g in pairs]
        self.batch = Batch(rule, units, optimizer.seed)
        self.shadows = [(local(e.parameter), shadow) for e in self.entries if (shadow := e.shadow) is not None]
        self.weights = [entry.weight for entry in self.entries if entry.weight is not None]

    def run(self, optimizer: Optimizer, gradients: list[Tensor] | None) -> None:
        """Update all parameters of the batch once; `gradients` are new unpacked ones, or None if gradients are packed."""
        for parameter, shadow in self.shadows:
            shadow.copy_(parameter)
        groups = optimizer.param_groups
        if self.is_uniform:
            step = self.steps[0] + 1
            hypers = [optimizer.hyper(groups[i], step, self._factor(groups[i])) for i in self.used_groups]
            self.batch.update(hypers, self.rows if len(self.used_groups) > 1 else 0, step, gradients)
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
    """The batches of parameters that an optimizer updates together, kept until parameters, gradients or state change."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._batches: list[StepBatch] = []
        self._entries: list[ParameterState] | None = None  # parameters that torch.optim does not update
        self._parameters: list[Tensor] = []
        self._is_spread = False  # whether some parameters are sharded (DTensor)
        self._built_for: Any = None  # the value of `_signature` for which the batches were built

    def clear(self) -> None:
        """Discard the batches of parameters; the next step makes new ones."""
        self.settle()
        self._batches, self._entries, self._built_for = [], None, None

    def settle(self) -> None:
        """Copy each parameter's number of steps, which its batch counts, to its `ParameterState`, where checkpoints read it."""
        for batch in self._batches:
            for entry, step in zip(batch.entries, batch.steps, strict=True):
                entry.step = step

    def run(self) -> None:
        """Update all parameters that have gradients, in batches that are made anew only if something has changed."""
        optimizer = self._optimizer()
        assert optimizer is not None
        if self._entries is None:
            gone = [entry.name for entry in optimizer.entries if entry.is_gone]
            if gone:
                raise OptimError(
                    f"a newer optimizer of paredown.optim has {gone[0]}, which this one had before: step the newer one."
                )
            self._entries = [entry for entry in optimizer.entries if not optimizer.is_torchs(entry)]
            self._parameters = [entry.parameter for entry in self._entries]
            self._is_spread = any(isinstance(p, DTensor) for p in self._parameters)
        with torch._C.DisableTorchFunctionSubclass():
            gradients = self._gradients()
            if self._built_for is None or self._signature(optimizer, gradients) != self._built_for:
                gradients = self._make(optimizer, gradients)
            for batch, places in zip(self._batches, self._plain_places, strict=True):
                plain: list[Tensor] | None = [gradients[i] for i in places] if batch.is_plain else None
                if plain is not None and not all([g.is_contiguous() for g in plain]):
                    plain = [g.contiguous() for g in plain]
                batch.run(optimizer, plain)

    def _gradients(self) -> list[Any]:
        """Return this process's rows of each parameter's gradient; None for a parameter without a gradient."""
        gradients: list[Any] = [p.grad for p in self._parameters]
        return [None if g is None else local(g) for g in gradients] if self._is_spread else gradients

    def _signature(self, optimizer: Optimizer, gradients: list[Any]) -> Any:
        """Return a key that is equal to the last step's as long as the batches of parameters need not be made anew.

        It consists of the types of all gradients, the rules, and the addresses of parameters and accumulators.
        """
        kinds = list(map(type, gradients))
        rules = [optimizer.rule_for(group).name for group in optimizer.param_groups]
        kept = (rules, id(optimizer.state), len(optimizer.state))
        if self._built_for is not None and (kinds, kept) != self._built_for[:2]:
            return None
        weights: list[Any] = [p.__dict__.get(KEY) for p in self._packed_parameters]
        if weights != self._weights:  # the session was closed or replaced
            return None
        for weight in weights:
            if weight.address:  # decoded at the moment: other code may have written to it
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
        """Make new batches of the parameters that have gradients, and return the gradients, some of which may be packed now.

        If user code assigned an ordinary tensor in place of a packed gradient, it is encoded.
        """
        self.settle()
        self._batches, self._built_for = [], None
        assert self._entries is not None
        for entry, gradient in zip(self._entries, gradients, strict=True):
            whole = entry.parameter.grad
            if whole is not None and not isinstance(gradient, ReleasedGradient):
                check_parameter(entry.parameter, entry.name)
                check_gradient(entry, whole)
                weight = weight_of(entry.parameter)
                if weight is not None:
                    weight.gather()
                if entry.gradient is not None and not entry.gradient.lent(gradient):
                    entry.hook.collect()
        gradients = self._gradients()
        self._place(optimizer, gradients)
        self._built_for = self._signature(optimizer, gradients)
        return gradients

    def _place(self, optimizer: Optimizer, gradients: list[Any]) -> None:
        by_kind: dict[Any, list[int]] = {}
        assert self._entries is not None
        for i, (entry, gradient) in enumerate(zip(self._entries, gradients, strict=True)):
            if gradient is None or isinstance(gradient, ReleasedGradient):
                continue
            entry.weight = weight_of(entry.parameter)
            rule = optimizer.rule_for(optimizer.param_groups[entry.group])
            restart(entry, rule, optimizer.state[entry.parameter])
            fill_state(entry, rule, optimizer.state[entry.parameter])
            is_plain = not isinstance(gradient, PackedGradient)
            is_sharded = isinstance(entry.parameter, DTensor)  # its unpacked gradients are sums over microbatches, others means
            by_kind.setdefault((is_plain, rule.name, local(entry.parameter).device, is_sharded), []).append(i)
        kinds = sorted(by_kind.items(), key=lambda item: item[0][0])  # packed gradients first: they take the longest
        for (is_plain, *_), places in kinds:
            entries = [self._entries[i] for i in places]
            rule = optimizer.rule_for(optimizer.param_groups[entries[0].group])
            pairs = [(e, gradients[i] if is_plain else e.gradient) for e, i in zip(entries, places, strict=True)]
            self._batches.append(StepBatch(optimizer, rule, pairs, is_plain=is_plain))
        self._plain_places = [places if is_plain else [] for (is_plain, *_), places in kinds]
        self._packed_places = [i for (is_plain, *_), places in kinds if not is_plain for i in places]
        updated = [entry for batch in self._batches for entry in batch.entries]
        self._weights = [entry.weight for entry in updated if entry.weight is not None]
        self._packed_parameters = [entry.parameter for entry in updated if entry.weight is not None]
        self._plain_parameters = [entry.parameter for entry in updated if entry.weight is None]
