"""`outline` lists the values of a training step: the model's inputs and the output of every operation, saved or not.

It runs the forward pass and the loss once on fake tensors. An `OutlineValue` is an input of the model or the output of an operation,
in place or not; in backward it has a gradient of the same size. A value has its own name and those under which operations save it, so that
a plan's rule for `conv2:input` also matches `relu1:output`.

>>> step = outline(nn.Sequential(nn.Linear(8, 4), nn.ReLU()), (torch.empty(2, 8),))
>>> [(value.name, value.op, value.numel, value.weights) for value in step.values]
[('input1', 'input', 16, ()), ('0:output', 'linear', 8, ('0.weight', '0.bias')), ('1:output', 'relu', 8, ())]
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast, final

import torch
from torch import Tensor, nn

from paredown.autograd.graph import Saved, tensors_in
from paredown.autograd.module_watch import Watch
from paredown.predict.fake.fake_tensors import FakeTensors, check_model, with_fake_tensors
from paredown.roles import Role
from paredown.simulate.forward_calls import PRODUCTS, ForwardCalls, ForwardOperation, OperationListener, mark

LOSS = "loss"
INPUT = "input"
PART = "part"


@dataclass(frozen=True)
class OutlineValue:
    """An input of the model or a result of an operation; `sources` are the indices of the values that it is computed from."""

    name: str
    op: str
    numel: int
    sources: tuple[int, ...] = ()
    weights: tuple[str, ...] = ()
    saved_as: tuple[str, ...] = ()
    num_uses: int = 0  # operations that have the value as an input

    @property
    def names(self) -> tuple[str, ...]:
        """All names by which a plan can refer to the value: its own, and those under which operations save it."""
        return (self.name, *(name for name in self.saved_as if name != self.name))

    @property
    def is_product(self) -> bool:
        """Whether the value is the output of a convolution or a matrix product."""
        return self.op in PRODUCTS


@dataclass(frozen=True)
class Outline:
    """All values of a training step in the order in which they are computed, and the number of elements of each parameter."""

    values: tuple[OutlineValue, ...]
    weights: dict[str, int]

    @cached_property
    def users(self) -> dict[int, list[int]]:
        """For the index of each value, the indices of the values that operations compute from it."""
        users: dict[int, list[int]] = {index: [] for index in range(len(self.values))}
        for index, value in enumerate(self.values):
            for source in value.sources:
                users[source].append(index)
        return users

    def slots(self) -> list[tuple[tuple[str, ...], Role]]:
        """Return (names, role) of every tensor of the step to which a plan can give a format, for the check of a plan's rules."""
        pairs = [(value.names, role) for value in self.values for role in (Role.ACTIVATION, Role.ERROR)]
        roles = (Role.WEIGHT, Role.FROZEN, Role.GRADIENT, Role.MOMENT1, Role.MOMENT2, Role.MASTER)
        return [*pairs, *(((name,), role) for name in self.weights for role in roles)]

    def __repr__(self) -> str:
        total = sum(value.numel for value in self.values)
        products = sum(value.is_product for value in self.values)
        return f"Outline({len(self.values)} values of {total:,} numbers, {products} products, {len(self.weights)} parameters)"


def outline(model: nn.Module, batch: Any, *, loss: Callable[..., Tensor] | None = None) -> Outline:
    """Return a list of all values (inputs, results of operations) of one step of `model` on `batch`, found on fake tensors.

    `batch` has the model's arguments, and as the last one the target if `loss` is given.
    """
    check_model(model)
    parts = batch if isinstance(batch, tuple) else (batch,)
    args, targets = (parts[:-1], parts[-1:]) if loss is not None else (parts, ())
    return of_call(model, args, {}, None if loss is None else lambda output, fakes: loss(output, *fakes.batch(targets)))


def of_call(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], after: Callable[[Any, FakeTensors], Any] | None = None
) -> Outline:
    """Return the outline of one call of `model` in training and of what `after(output, fakes)` computes, such as a loss.

    `fakes` turns other tensors, such as targets, into fake ones.
    """
    fakes = FakeTensors()
    with with_fake_tensors(model, fakes):
        if not torch.is_grad_enabled():
            model.train()  # dropout has an output of its own in training
        names = {id(p): name for name, p in model.named_parameters()}
        listener = OutlineListener(names)
        calls = ForwardCalls(model, listener)
        watch = Watch(model, listener.saved)
        watch.checkpoints.reports_inputs = False
        with fakes.mode, torch.enable_grad(), torch.autocast("cpu", enabled=False):
            args, kwargs = listener.inputs(fakes.batch((args, kwargs)))
            calls.attach()
            watch.attach()
            with calls.following():
                output = model(*args, **kwargs)
            calls.detach()
            watch.detach()
            with calls.following(LOSS):
                _ = after(output, fakes) if after is not None else None
        return listener.outline({name: p.numel() for name, p in model.named_parameters()})


@final
class OutlineListener(OperationListener):
    """The listener that makes an outline: it records each value of a forward pass, and keeps all of them alive."""

    def __init__(self, names: dict[int, str]) -> None:
        self._names, self._rows = names, list[dict[str, Any]]()
        self._kept: list[Tensor] = []
        self._by_storage: dict[int, int] = {}  # storage address -> index of the value written there last

    def inputs(self, values: Any) -> Any:
        """Record each float tensor in `values` as an input, and return `values`."""
        for number, tensor in enumerate(tensors_in(values), 1):
            if tensor.is_floating_point():
                self._add(tensor, name=f"{INPUT}{number}", op=INPUT, sources=(), weights=())
        return values

    def taken(self, weight: nn.Parameter) -> Tensor:
        """Return the parameter unchanged."""
        return weight

    def begins(self, operation: ForwardOperation) -> None:
        """Do nothing: only outputs of operations are recorded."""

    def made(self, operation: ForwardOperation, out: Tensor, number: int) -> int:
        """Record `out` as a new value, and return its index, which is attached to the tensor."""
        sources = tuple(dict.fromkeys(source.value for source in operation.sources))
        weights = tuple(dict.fromkeys(self._names[id(w)] for w in operation.weights if id(w) in self._names))
        return self._add(out, name=operation.output_name(number), op=operation.op, sources=sources, weights=weights)

    def moved(self, value: int, out: Tensor, name: str) -> tuple[int, Tensor]:
        """Return the index `value` for `out`, a view or copy of that value, or a new index for a slice, which has a `name`."""
        self._kept.append(out)
        self._by_storage.setdefault(out.untyped_storage()._cdata, value)
        return self._add(out, name=name, op=PART, sources=(value,), weights=()) if name else value, out

    def saved(self, saved: Saved) -> None:
        """Record the name under which an operation saves a tensor, if that tensor is one of the values."""
        tensor = saved.tensor
        if tensor is None or saved.kind not in ("activation", "input") or not tensor.is_floating_point():
            return
        index = self._by_storage.get(tensor.untyped_storage()._cdata)
        if index is not None:
            self._rows[index]["saved_as"].append(saved.name)

    def outline(self, weights: dict[str, int]) -> Outline:
        """Return the outline of all recorded values; `weights` has the number of elements of each parameter."""
        uses = [0] * len(self._rows)
        for row in self._rows:
            for source in row["sources"]:
                uses[source] += 1
        rows = [{**row, "num_uses": n, "saved_as": tuple(row["saved_as"])} for row, n in zip(self._rows, uses, strict=True)]
        return Outline(tuple(OutlineValue(**cast("dict[str, Any]", row)) for row in rows), weights)

    def _add(self, tensor: Tensor, **row: Any) -> int:
        index = len(self._rows)
        self._rows.append({**row, "numel": tensor.numel(), "saved_as": []})
        self._kept.append(tensor)
        if row["op"] != PART:
            self._by_storage[tensor.untyped_storage()._cdata] = index
        mark(tensor, self, index)
        return index
