"""Warns of writes into packed weights that rounding would lose, and lists them in `session.changes`.

Weights whose values the format does not suit have a row from the start (`Weight.rounding_error`).

    merges         code writes an update into a packed frozen weight, as PEFT's merge_and_unload() does: the sum is encoded again, and
                   steps of a 4-bit format are larger than most updates. After session.close() the same merge is exact
    foreign steps  an optimizer that is not of paredown.optim updates packed weights, or a loop does that writes p -= lr * p.grad: their
                   new values are rounded to nearest, which loses every update below half a step of the format

A write counts as an update if it changes values by less than half of their norm; other writes (initialization) are new values, whose
rounding error is that of the format. Values that load_state_dict writes are meant to be quantized, and are not reported.
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from paredown.autograd.hooks import Hook, register_weakly
from paredown.optim.packed_weight import Weight, weight_of
from paredown.optim.parameter_state import owner_of
from paredown.session.changes import Change

OWN = ("SGD", "AdamW", "Lion", "Muon")  # optimizers of paredown.optim
LARGEST_UPDATE = 0.5  # of the norm of the values; a larger change is taken for new values
COARSE = 0.5  # rounding error of a weight, of its norm, from which on it is a row
LEAST_ERROR = 0.05  # of an update: below it, rounding is not worth a warning
MERGED = (
    "{} is stored in {} and was written while packed: encoding it again rounds the new values, and the update ({:.2g} of the norm of "
    "the values) is off by {:.2g} %. Call session.close() before adapters are merged (merge_and_unload(), merge_adapter()): the weights "
    "are then plain, with the decoded values, and the sum is not rounded. session.changes lists all weights that were written."
)
COARSE_ROW = (
    "rounding changed its values by {:.0f} % of their norm: give it a finer format, or one with a scale, such as int8/64@bf16"
)
MERGED_ROW = "an update was written while it was packed, and is off by {:.2g} %: call session.close() before merging adapters"
FOREIGN = (
    "{} updates {} that {} stored packed, and new values are rounded to nearest: updates of less than half a step of the format are "
    "lost. In this step the update of {}, stored in {}, is off by {:.2g} %. Use {}, which rounds stochastically, or leave trained "
    "weights unmodified: plan.set('weight', None)."
)
WRITTEN = (
    "{} is trained and stored in {}, and an update was written into it ({:.2g} of the norm of the values): new values are rounded to "
    "nearest, and the update is off by {:.2g} %. Update it by an optimizer of paredown.optim without tier='full', which rounds "
    "stochastically, or leave trained weights unmodified: plan.set('weight', None)."
)
WRITTEN_ROW = (
    "{} was written, and rounding to nearest made the update off by {:.2g} %: updates of paredown.optim round stochastically"
)
FOREIGN_ROW = "{} rounds updates to nearest, off by {:.2g} % in its first step: use {}, which rounds stochastically"


class WeightWrites:
    """Observes writes into the packed weights of a session, and warns of writes that rounding loses."""

    def __init__(self) -> None:
        self._names: WeakKeyDictionary[Weight, str] = WeakKeyDictionary()
        # versions of loaded values; None while they are loaded
        self._loading: WeakKeyDictionary[Weight, tuple[int, int] | None] = WeakKeyDictionary()
        self._coarse: dict[str, Change] = {}
        self._merged: dict[str, Change] = {}
        self._foreign: Change | None = None
        self._stepping: list[tuple[str, Weight, float]] | None = (
            None  # (name, weight, error) of each update in the running step of another library's optimizer
        )
        self._num_seen: WeakKeyDictionary[Optimizer, int] = (
            WeakKeyDictionary()
        )  # optimizer without a packed weight -> number of its parameters

    def watch(self, name: str, weight: Weight) -> None:
        """Start observing writes into a packed weight."""
        self._names[weight] = name
        weight.on_write = self._written
        if weight.rounding_error is not None and not weight.rounding_error < COARSE:
            format, reason = str(weight.format), COARSE_ROW.format(100 * weight.rounding_error)
            self._coarse[name] = Change(f"weight={name}", format, format, reason)

    def changes(self) -> Iterator[Change]:
        """Yield a `Change` for each weight whose format rounds the values or updates written into it too coarsely."""
        yield from self._coarse.values()
        yield from [self._foreign] if self._foreign is not None else ()
        yield from self._merged.values()

    def attach(self, model: nn.Module) -> list[Any]:
        """Register the hooks on state-dict loading and on optimizer steps, and return their handles."""
        handles: list[Any] = [
            register_weakly(register_optimizer_step_pre_hook, self, WeightWrites._before_step),
            register_weakly(register_optimizer_step_post_hook, self, WeightWrites._after_step),
        ]
        for module in model.modules():
            if any(p is not None and weight_of(p) is not None for p in module._parameters.values()):
                handles.append(module.register_load_state_dict_pre_hook(Hook(self._before_load)))
                handles.append(module.register_load_state_dict_post_hook(Hook(self._after_load)))
        return handles

    # --- merges -------------------------------------------------------------------------------------------------------------

    def _before_load(self, module: nn.Module, *_: Any) -> None:
        self._loading.update(dict.fromkeys(_weights_of(module)))

    def _after_load(self, module: nn.Module, _: Any) -> None:
        self._loading.update({weight: _versions(weight) for weight in _weights_of(module)})

    def _written(self, weight: Weight, values: Tensor) -> Callable[[], None] | None:
        """Return a function that warns if rounding loses the update `values` that is being written into a weight, or None."""
        parameter, name = weight.parameter, self._names.get(weight)
        is_loaded = weight in self._loading and self._loading[weight] in (None, _versions(weight))
        if parameter is None or name is None or is_loaded:
            return None
        if name in self._merged or (parameter.requires_grad and self._foreign is not None):
            return None
        size, error = weight.update_errors(values)
        if parameter.requires_grad and self._stepping is not None:
            self._stepping += [(name, weight, error)] if size else []
            return None
        if not (0 < size < LARGEST_UPDATE and error > LEAST_ERROR):
            return None
        format, is_first = str(weight.format), parameter.requires_grad or not self._merged
        if parameter.requires_grad:
            self._foreign = Change("updates of weights", format, "rounded to nearest", WRITTEN_ROW.format(name, 100 * error))
        else:
            self._merged[name] = Change(f"weight={name}", format, f"{format}, rounded twice", MERGED_ROW.format(100 * error))
        text = (WRITTEN if parameter.requires_grad else MERGED).format(name, format, size, 100 * error)
        return (lambda: warnings.warn(text, UserWarning, stacklevel=2)) if is_first else None

    # --- foreign steps ------------------------------------------------------------------------------------------------------

    def _before_step(self, optimizer: Optimizer) -> None:
        if self._foreign is None and self._updated_by(optimizer):
            self._stepping = []

    def _updated_by(self, optimizer: Optimizer) -> list[Weight]:
        """Return the packed weights of this session that an optimizer of another library updates."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if self._num_seen.get(optimizer) == len(parameters):
            return []
        # paredown.optim may use torch.optim's arithmetic
        foreign = [p for p in parameters if p.requires_grad and owner_of(p) is None]
        weights = [weight for p in foreign if (weight := weight_of(p)) is not None and weight in self._names]
        if not weights:
            self._num_seen[optimizer] = len(parameters)
        return weights

    def _after_step(self, optimizer: Optimizer) -> None:
        if self._stepping is None:
            return
        updates, self._stepping = self._stepping, None
        weights = self._updated_by(optimizer)
        written = [(w, w.update_errors(values)) for w in weights if (values := w.unencoded()) is not None]
        updates += [(self._names[w], w, error) for w, (size, error) in written if size]
        if not updates:  # no parameter had a gradient, or the learning rate was zero, as it is when a warm-up begins
            return
        name, weight, error = max(updates, key=lambda update: update[2])
        kind, formats = type(optimizer), ", ".join(dict.fromkeys(str(weight.format) for weight in weights))
        other = f"{kind.__module__.split('.')[0]}.optim.{kind.__name__}" if kind.__module__.startswith("torch.") else kind.__name__
        remedy = f"paredown.optim.{kind.__name__}" if kind.__name__ in OWN else "an optimizer of paredown.optim"
        self._foreign = Change("updates of weights", formats, "rounded to nearest", FOREIGN_ROW.format(other, 100 * error, remedy))
        count = f"{len(weights)} weight{'s' * (len(weights) > 1)}", "are" if len(weights) > 1 else "is"
        warnings.warn(FOREIGN.format(other, *count, name, weight.format, 100 * error, remedy), UserWarning, stacklevel=2)


def _weights_of(module: nn.Module) -> list[Weight]:
    return [weight for p in module._parameters.values() if p is not None and (weight := weight_of(p)) is not None]


def _versions(weight: Weight) -> tuple[int, int]:
    """Return two version counters of a weight; every write changes at least one of them."""
    parameter = weight.parameter
    return weight.version, parameter._version if parameter is not None else -1
