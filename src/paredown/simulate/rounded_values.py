"""`RoundedValues` rounds each value of a simulated step when an operation computes it, and its gradient in backward.

Rounding writes into the memory of the tensor and is not recorded by autograd: gradients pass straight through, and if backward of an
operation reads its saved output, it reads the rounded output. Gradients are rounded by hooks on the autograd nodes of an operation.

If both factors of a product have at most 10 mantissa bits, the product runs in TF32, which is exact for such factors and several times
faster (`Precision`). Sums are in float32 with and without TF32. Only CUDA has TF32; on other devices nothing changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, cast, final

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from paredown.autograd.graph import nodes_behind, tensors_in
from paredown.codec.runtime_formats import is_narrow
from paredown.errors import ApplyError
from paredown.plan.plan import Plan
from paredown.roles import Role
from paredown.simulate.forward_calls import PRODUCTS, ForwardOperation, OperationListener, mark, mark_of
from paredown.simulate.outline import INPUT, Outline
from paredown.simulate.rounded_slots import RoundedSlot, RoundedSlots

# Not allow_tf32, which cannot be read once the user has set these, until they are restored
SWITCHES: tuple[Any, ...] = (torch.backends.cuda.matmul, cast("Any", torch.backends.cudnn).conv)
CHOICES = {"sums": ("exact", "rounded"), "gradients": ("backward", "step"), "first_weights": ("rounded", "exact")}


@dataclass(frozen=True)
class Simulate:
    """The settings of simulate mode; `apply(plan, model, mode="simulate")` has the defaults.

    `raised`: a plan with wider formats. An activation or weight has its format of this plan for the rest of training once a
    fraction `share` of its values overflow in one training pass. None: formats never change.
    `sums`: if several operations use an activation, "exact" rounds the gradient that each returns, "rounded" only their sum.
    `gradients`: gradients of parameters are rounded in "backward", or before the optimizer's "step".
    `first_weights`: "exact" computes with unmodified parameters until the first optimizer step.
    `all_live`: `session.set_plan` may give any tensor any format later, and therefore no product runs in TF32.
    """

    raised: Plan | None = None
    share: float = 0.01
    sums: str = "exact"
    gradients: str = "backward"
    first_weights: str = "rounded"
    all_live: bool = False

    def __post_init__(self) -> None:
        for name, allowed in CHOICES.items():
            if getattr(self, name) not in allowed:
                raise ApplyError(f"Simulate: {name}={getattr(self, name)!r} is unknown. Allowed: {', '.join(allowed)}.")
        if not isinstance(self.raised, Plan | None):
            raise ApplyError(f"Simulate: raised is a Plan, the formats that slots are raised to, not {type(self.raised).__name__}.")
        if not 0 < self.share <= 1:
            raise ApplyError(
                f"Simulate: share={self.share} is the part of a tensor's values that may overflow, above 0 and at most 1."
            )


PEPPP = Simulate(sums="rounded", gradients="step")  # except the first step, which PEPPP's released code computes with exact weights
MODES: Mapping[str, Simulate] = MappingProxyType({"simulate": Simulate(), "peppp": PEPPP})


@dataclass(eq=False, slots=True)
class TrackedValue:
    """A value of the forward pass: how it (`activation`) and its gradient (`error`) are rounded, and how often it is used."""

    activation: RoundedSlot | None
    error: RoundedSlot | None
    num_uses: int = 1


@final
class RoundedValues(OperationListener):
    """The listener that rounds, for a simulated session, the weights, outputs and gradients of every operation."""

    def __init__(self, slots: RoundedSlots, names: dict[int, str], how: Simulate) -> None:
        self.slots, self.how, self._names = slots, how, names
        self.precision = Precision()
        self.has_stepped = self.counts_overflow = False  # both as of the current forward pass
        self._outline = Outline((), {})
        self._known: dict[str, TrackedValue] = {}
        self._weights: dict[int, Tensor] = {}  # rounded copies of parameters in the current forward pass
        self._copies: dict[int, Tensor] = {}  # the same, rounded in one launch while a graph is captured

    def set_outline(self, outline: Outline) -> None:
        """Look up in the plan, for each value of `outline` by all of its names, how it and its gradient are rounded."""
        self._outline = outline
        self._known = {value.name: self._tracked(value.names, value.num_uses) for value in outline.values}

    def refresh(self) -> None:
        """Look up in the plan again how each value is rounded, because the plan has changed."""
        self.set_outline(self._outline)

    def begin(self, args: Any, kwargs: Any, *, counts_overflow: bool) -> Any:
        """Begin a forward pass, and return its arguments with rounded copies in place of float tensors.

        `counts_overflow`: record the share of values that overflow.
        """
        self.counts_overflow = counts_overflow
        self._weights.clear()
        numbers = {id(tensor): number for number, tensor in enumerate(tensors_in((args, kwargs)), 1)}
        return tree_map_only(Tensor, lambda tensor: self._input(tensor, numbers.get(id(tensor), 0)), (args, kwargs))

    def end(self, output: Any) -> None:
        """End a forward pass, and register hooks that round the gradients of its `output` that come from a loss."""
        self._weights.clear()
        self.precision.restore()
        for tensor in tensors_in(output) if self.how.sums == "exact" else ():
            value: TrackedValue | None = mark_of(tensor, self)
            if value is not None and value.error is not None and tensor.requires_grad and not tensor.is_leaf:
                tensor.register_hook(self._rounder(value.error))

    def _input(self, tensor: Tensor, number: int) -> Tensor:
        if not tensor.is_floating_point():
            return tensor
        value = self._value(f"{INPUT}{number}")
        tensor = (
            StraightThroughRounding.apply(tensor, self.slots, value.activation, self.counts_overflow)
            if value.activation
            else tensor.view_as(tensor)
        )
        mark(tensor, self, value)
        return tensor

    # --- forward --------------------------------------------------------------------------------------------------------

    def taken(self, weight: nn.Parameter) -> Tensor:
        """Return the rounded copy of a parameter that operations must use; it is made once in each forward pass."""
        name = self._names.get(id(weight))
        slot = self.slots.of((name,), Role.WEIGHT) if name is not None else None
        if slot is None or (self.how.first_weights == "exact" and not self.has_stepped):
            return weight
        copy = self._weights.get(id(weight))
        if copy is None or copy.requires_grad != (weight.requires_grad and torch.is_grad_enabled()):
            rounded = self._copies.pop(id(weight), None)
            self._weights[id(weight)] = copy = StraightThroughRounding.apply(
                weight, self.slots, slot, self.counts_overflow, rounded
            )
        return copy

    def copy_all(self, weights: Iterable[Tensor]) -> None:
        """Round copies of `weights` for the forward pass that begins, in one launch while a CUDA graph is captured."""
        named = [(weight, self._names[id(weight)]) for weight in weights if id(weight) in self._names]
        pairs = [(weight, self.slots.of((name,), Role.WEIGHT)) for weight, name in named]
        rounded = [(weight, torch.empty_like(weight, requires_grad=False), slot) for weight, slot in pairs if slot is not None]
        self.slots.round_all(rounded)
        self._copies = {id(weight): out for weight, out, _ in rounded}

    def begins(self, operation: ForwardOperation) -> None:
        """Allow TF32 for the operation that will run next if it is exact for the operands' formats, and else forbid it."""
        if self._is_product(operation):
            self.precision.set(self._are_narrow(self._operands(operation)))

    def made(self, operation: ForwardOperation, out: Tensor, number: int) -> TrackedValue:
        """Round `out`, an output of an operation, in place, and register hooks that round the gradients in its backward."""
        if self._is_product(operation):
            self.precision.restore()
        value = self._value(operation.output_name(number))
        if value.activation is not None:
            self.slots.round_(out, value.activation, counts_overflow=self.counts_overflow)
        if out.requires_grad:
            self._hook_errors(operation, out, value)
        return value

    def moved(self, value: TrackedValue, out: Tensor, name: str) -> tuple[TrackedValue, Tensor]:
        """Return `out`, a view or copy of a value; a slice, which has a `name`, is rounded if the plan gives it another format."""
        if not name:
            return value, out
        part = self._value(name)
        if part.activation is None or (value.activation is not None and part.activation.assignment == value.activation.assignment):
            return TrackedValue(value.activation, part.error), out
        return part, StraightThroughRounding.apply(out, self.slots, part.activation, self.counts_overflow)

    def _value(self, name: str) -> TrackedValue:
        value = self._known.get(name)
        if value is None:
            self._known[name] = value = self._tracked((name,), 1)
        return value

    def _tracked(self, names: tuple[str, ...], num_uses: int) -> TrackedValue:
        return TrackedValue(self.slots.of(names, Role.ACTIVATION), self.slots.of(names, Role.ERROR), num_uses)

    def _is_product(self, operation: ForwardOperation) -> bool:
        return operation.op in PRODUCTS and self.slots.device.type == "cuda"

    def _operands(self, operation: ForwardOperation) -> list[RoundedSlot | None]:
        """Return how each factor of a product is rounded, None if that is unknown; the bias, added in float32, is left out."""
        weights = [self.slots.of((self._names[id(w)],), Role.WEIGHT) for w in operation.weights[:1] if id(w) in self._names]
        return [*(source.value.activation for source in operation.sources), *weights, *[None] * operation.num_unknown]

    def _are_narrow(self, slots: list[RoundedSlot | None]) -> bool:
        """Return whether a product of tensors in these formats may run in TF32; never with `Simulate(all_live=True)`."""
        return not self.how.all_live and are_narrow(slots)

    # --- backward -------------------------------------------------------------------------------------------------------

    def _hook_errors(self, operation: ForwardOperation, out: Tensor, value: TrackedValue) -> None:
        """Register hooks that round gradients of an operation in backward: those of its inputs, or that of its output.

        `Simulate.sums` decides which.
        """
        is_summed = self.how.sums == "rounded"
        if is_summed and value.error is not None:
            out.register_hook(self._rounder(value.error))
        edges = (
            [] if is_summed else [(*source.edge, source.value.error) for source in operation.sources if source.edge[0] is not None]
        )
        is_product = self._is_product(operation)
        if not is_product and all(slot is None for *_, slot in edges):
            return
        is_rounded = is_summed or value.num_uses == 1  # a sum of several rounded gradients has more bits than each of them
        is_narrow = is_product and is_rounded and self._are_narrow([*self._operands(operation), value.error])
        for node in nodes_behind(out, operation.first):
            slots = _slots_of_edges(node, edges)
            if slots:
                node.register_hook(self._round_outgoing(slots))
            if is_product:
                self.precision.around(node, is_narrow)

    def _rounder(self, slot: RoundedSlot) -> Callable[[Tensor], Tensor]:
        return lambda gradient: self.slots.rounded(gradient, slot)

    def _round_outgoing(self, by_edge: dict[int, RoundedSlot]) -> Callable[[Any, Any], Any]:
        def hook(outgoing: tuple[Tensor | None, ...], incoming: Any) -> tuple[Tensor | None, ...]:
            rounded = self.slots.rounded
            return tuple(rounded(g, by_edge[i]) if i in by_edge and g is not None else g for i, g in enumerate(outgoing))

        return hook


def _slots_of_edges(node: Any, edges: list[tuple[Any, int, RoundedSlot | None]]) -> dict[int, RoundedSlot]:
    """Return how the gradient on each edge of an autograd node is rounded, as `RoundedSlot` by index of the edge.

    `edges` are (node, number of its output, slot), where the slot is None for a gradient that is not rounded.
    """
    by_edge: dict[int, RoundedSlot] = {}
    for index, (target, output) in enumerate(node.next_functions):
        for other, other_output, slot in edges:
            if slot is not None and target is other and output == other_output:
                by_edge[index] = slot
    return by_edge


class StraightThroughRounding(torch.autograd.Function):
    """The autograd function that rounds a copy of a tensor and passes the gradient unchanged."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, x: Tensor, slots: RoundedSlots, slot: RoundedSlot, counts_overflow: bool, rounded: Tensor | None = None
    ) -> Tensor:
        """Return a copy of `x` that `slots` rounds to the format of `slot`; if `rounded` is such a copy, return it instead."""
        return slots.rounded(x, slot, counts_overflow=counts_overflow) if rounded is None else rounded

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:  # type: ignore[override]
        """Return the gradient, unmodified."""
        return grad, None, None, None, None


# --- TF32 -------------------------------------------------------------------------------------------------------------------------


def are_narrow(slots: Iterable[RoundedSlot | None]) -> bool:
    """Return whether TF32 is exact for the formats of all `slots` (tensors), and for the wider ones that they may get."""
    return all(
        p is not None and is_narrow(p.assignment.format) and (p.raised.format is None or is_narrow(p.raised.format)) for p in slots
    )


class Precision:
    """A switch that allows or forbids TF32 for single operations, and then restores what the user had set."""

    def __init__(self) -> None:
        self._before: tuple[str, ...] | None = None

    def set(self, is_narrow: bool) -> None:
        """Allow TF32 if `is_narrow`, else forbid it, for kernels that are launched until `restore` is called."""
        if self._before is None:
            self._before = tuple(switch.fp32_precision for switch in SWITCHES)
        for switch in SWITCHES:
            switch.fp32_precision = "tf32" if is_narrow else "ieee"

    def restore(self) -> None:
        """Restore the TF32 settings that torch had before `set`."""
        for switch, before in zip(SWITCHES, self._before or (), strict=False):
            switch.fp32_precision = before
        self._before = None

    def around(self, node: Any, is_narrow: bool) -> None:
        """Allow TF32 if `is_narrow`, else forbid it, while backward runs this autograd node."""
        node.register_prehook(_call(lambda: self.set(is_narrow)))
        node.register_hook(_call(self.restore))


def _call(function: Callable[[], None]) -> Callable[..., None]:
    def hook(*args: Any) -> None:
        function()

    return hook
