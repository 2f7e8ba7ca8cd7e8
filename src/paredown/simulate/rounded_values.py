"""The values of a simulated step: each is rounded when an operation makes it, and its gradient when one sends it back.

Rounding happens below autograd, in the memory of the tensor: backward passes straight through, and an operation whose backward needs its
own output has the rounded one. Gradients are rounded by hooks on the nodes that autograd made for an operation.

TF32 where it is exact: a product of two tensors with at most 10 mantissa bits each loses nothing by it, and is several times faster.

Accumulation is float32 either way. Only CUDA has TF32; elsewhere nothing is done.
"""


# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, cast, final

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from paredown.codec.runtime_formats import is_narrow
from paredown.errors import ApplyError
from paredown.plan.plan import Plan
from paredown.roles import Role
from paredown.simulate.forward_calls import PRODUCTS, Operation, OperationListener, mark, mark_of
from paredown.simulate.outline import INPUT, Outline
from paredown.simulate.rounded_slots import RoundedSlot, RoundedSlots
from paredown.trace.autograd_graph import NO_SEQUENCE, tensors_in

# Not allow_tf32, which cannot be read once the user has set these; it reads as before when they are put back
SWITCHES: tuple[Any, ...] = (torch.backends.cuda.matmul, cast("Any", torch.backends.cudnn).conv)


def are_narrow(places: Iterable[RoundedSlot | None]) -> bool:
    """Whether all of these are, also once they are raised."""
    return all(
        p is not None and is_narrow(p.assignment.format) and (p.raised.format is None or is_narrow(p.raised.format)) for p in places
    )


class Precision:
    """Torch's switches of TF32 during a product; `restore` puts them back."""

    def __init__(self) -> None:
        self._before: tuple[str, ...] | None = None

    def set(self, is_narrow: bool) -> None:
        """TF32 or not, for what is launched from now on."""
        if self._before is None:
            self._before = tuple(switch.fp32_precision for switch in SWITCHES)
        for switch in SWITCHES:
            switch.fp32_precision = "tf32" if is_narrow else "ieee"

    def restore(self) -> None:
        """As it was."""
        for switch, before in zip(SWITCHES, self._before or (), strict=False):
            switch.fp32_precision = before
        self._before = None

    def around(self, node: Any, is_narrow: bool) -> None:
        """The same in backward, while `node` runs."""
        node.register_prehook(_call(lambda: self.set(is_narrow)))
        node.register_hook(_call(self.restore))


def _call(function: Callable[[], None]) -> Callable[..., None]:
    def hook(*args: Any) -> None:
        function()

    return hook


# --- The values of a simulated step ---

CHOICES = {"sums": ("exact", "rounded"), "gradients": ("backward", "step"), "first_weights": ("rounded", "exact")}


@dataclass(frozen=True)
class Simulate:
    """How simulate mode goes; `apply(plan, model, mode="simulate")` takes these defaults.

    `raised`: the plan whose assignments activations and weights get for good once `share` of their values overflow in one training
    pass. `sums`: where several operations take an activation, "exact" rounds what each sends back and not the sum, "rounded" the
    sum alone. `gradients`: rounded in "backward" or before the optimizer's "step". `first_weights`: "exact" computes with the
    parameters as they are until the first step. `all_live`: every slot can be given any format later by `session.set_plan`, so
    that no product runs in TF32.
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


PEPPP = Simulate(sums="rounded", gradients="step")  # but for its first step, which its release computes with exact weights
MODES: Mapping[str, Simulate] = MappingProxyType({"simulate": Simulate(), "peppp": PEPPP})


@dataclass(eq=False, slots=True)
class TrackedValue:
    """A value: the slots of the activation and of its gradient, and how many operations take it."""

    activation: RoundedSlot | None
    error: RoundedSlot | None
    num_uses: int = 1


@final
class RoundedValues(OperationListener):
    """Rounds what operations take, make and send back. `names`: of parameters, by their ids."""

    def __init__(self, places: RoundedSlots, names: dict[int, str], how: Simulate) -> None:
        self.places, self.how, self._names = places, how, names
        self.precision = Precision()
        self.has_stepped = self.looks = False  # `looks`: overflow is counted in this pass
        self._outline = Outline((), {})
        self._known: dict[str, TrackedValue] = {}
        self._weights: dict[int, Tensor] = {}  # rounded copies of the forward pass that runs
        self._copies: dict[int, Tensor] = {}  # the same while a graph is captured, made all at once

    def learn(self, outline: Outline) -> None:
        """The names of all values; slots get their numbers in this order."""
        self._outline = outline
        self._known = {value.name: self._slots(value.names, value.num_uses) for value in outline.values}

    def relearn(self) -> None:
        """After the plan changed."""
        self.learn(self._outline)

    def begin(self, args: Any, kwargs: Any, *, looks: bool) -> Any:
        """A forward pass begins: its arguments, with rounded copies of their floats."""
        self.looks = looks
        self._weights.clear()
        numbers = {id(tensor): number for number, tensor in enumerate(tensors_in((args, kwargs)), 1)}
        return tree_map_only(Tensor, lambda tensor: self._input(tensor, numbers.get(id(tensor), 0)), (args, kwargs))

    def end(self, output: Any) -> None:
        """It ended: what comes back from outside to what the model returns is rounded too."""
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
            StraightThroughRounding.apply(tensor, self.places, value.activation, self.looks)
            if value.activation
            else tensor.view_as(tensor)
        )
        mark(tensor, self, value)
        return tensor

    # --- forward --------------------------------------------------------------------------------------------------------

    def taken(self, weight: nn.Parameter) -> Tensor:
        """The rounded copy of a parameter, one for each pass."""
        name = self._names.get(id(weight))
        place = self.places.of((name,), Role.WEIGHT) if name is not None else None
        if place is None or (self.how.first_weights == "exact" and not self.has_stepped):
            return weight
        copy = self._weights.get(id(weight))
        if copy is None or copy.requires_grad != (weight.requires_grad and torch.is_grad_enabled()):
            made = self._copies.pop(id(weight), None)
            self._weights[id(weight)] = copy = StraightThroughRounding.apply(weight, self.places, place, self.looks, made)
        return copy

    def copy_all(self, weights: Iterable[Tensor]) -> None:
        """Round copies of these for the pass that begins, in one launch; what `taken` gives then."""
        named = [(weight, self._names[id(weight)]) for weight in weights if id(weight) in self._names]
        places = [(weight, self.places.of((name,), Role.WEIGHT)) for weight, name in named]
        rounded = [(weight, torch.empty_like(weight, requires_grad=False), place) for weight, place in places if place is not None]
        self.places.round_all(rounded)
        self._copies = {id(weight): out for weight, out, _ in rounded}

    def begins(self, operation: Operation) -> None:
        """TF32 or not."""
        if self._is_product(operation):
            self.precision.set(self._are_narrow(self._operands(operation)))

    def made(self, operation: Operation, out: Tensor, number: int) -> TrackedValue:
        """Round what an operation made, and what it will send back."""
        if self._is_product(operation):
            self.precision.restore()
        value = self._value(operation.output_name(number))
        if value.activation is not None:
            self.places.round_(out, value.activation, looks=self.looks)
        if out.requires_grad:
            self._hook_errors(operation, out, value)
        return value

    def moved(self, value: TrackedValue, out: Tensor, name: str) -> tuple[TrackedValue, Tensor]:
        """A part of a value is rounded as that is, unless the plan gives it something else."""
        if not name:
            return value, out
        part = self._value(name)
        if part.activation is None or (value.activation is not None and part.activation.assignment == value.activation.assignment):
            return TrackedValue(value.activation, part.error), out
        return part, StraightThroughRounding.apply(out, self.places, part.activation, self.looks)

    def _value(self, name: str) -> TrackedValue:
        value = self._known.get(name)
        if value is None:
            self._known[name] = value = self._slots((name,), 1)
        return value

    def _slots(self, names: tuple[str, ...], num_uses: int) -> TrackedValue:
        return TrackedValue(self.places.of(names, Role.ACTIVATION), self.places.of(names, Role.ERROR), num_uses)

    def _is_product(self, operation: Operation) -> bool:
        return operation.op in PRODUCTS and self.places.device.type == "cuda"

    def _operands(self, operation: Operation) -> list[RoundedSlot | None]:
        """The slots that a product reads; a bias is added in float32."""
        weights = [self.places.of((self._names[id(w)],), Role.WEIGHT) for w in operation.weights[:1] if id(w) in self._names]
        return [*(source.value.activation for source in operation.sources), *weights, *[None] * operation.num_unknown]

    def _are_narrow(self, places: list[RoundedSlot | None]) -> bool:
        """Whether TF32 is exact, now and whatever formats come later."""
        return not self.how.all_live and are_narrow(places)

    # --- backward -------------------------------------------------------------------------------------------------------

    def _hook_errors(self, operation: Operation, out: Tensor, value: TrackedValue) -> None:
        """Round gradients of what the operation took where they leave it, or the gradient of what it made where it is summed."""
        is_summed = self.how.sums == "rounded"
        if is_summed and value.error is not None:
            out.register_hook(self._rounder(value.error))
        edges = (
            [] if is_summed else [(*source.edge, source.value.error) for source in operation.sources if source.edge[0] is not None]
        )
        is_product = self._is_product(operation)
        if not is_product and all(place is None for *_, place in edges):
            return
        is_one = is_summed or value.num_uses == 1  # a sum of several has more bits than they have
        is_narrow = is_product and is_one and self._are_narrow([*self._operands(operation), value.error])
        for node in _nodes(out.grad_fn, operation.first):
            places = _leaving(node, edges)
            if places:
                node.register_hook(self._returned(places))
            if is_product:
                self.precision.around(node, is_narrow)

    def _rounder(self, place: RoundedSlot) -> Callable[[Tensor], Tensor]:
        return lambda gradient: self.places.rounded(gradient, place)

    def _returned(self, places: dict[int, RoundedSlot]) -> Callable[[Any, Any], Any]:
        def hook(sent: tuple[Tensor | None, ...], received: Any) -> tuple[Tensor | None, ...]:
            return tuple(self.places.rounded(g, places[i]) if i in places and g is not None else g for i, g in enumerate(sent))

        return hook


def _leaving(node: Any, edges: list[tuple[Any, int, RoundedSlot | None]]) -> dict[int, RoundedSlot]:
    """Which of the gradients that `node` sends go along one of `edges`, and their slots."""
    found: dict[int, RoundedSlot] = {}
    for number, (before, output) in enumerate(node.next_functions):
        for other, its_output, place in edges:
            if place is not None and before is other and output == its_output:
                found[number] = place
    return found


def _nodes(last: Any, first: int) -> list[Any]:
    """The nodes behind `last` that were made from number `first` on."""
    found, waiting = list[Any](), [last]
    while waiting:
        node = waiting.pop()
        if node is not None and first <= node._sequence_nr() < NO_SEQUENCE and node not in found:
            found.append(node)
            waiting.extend(before for before, _ in node.next_functions)
    return found


class StraightThroughRounding(torch.autograd.Function):
    """A rounded copy, whose gradient passes straight through."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, places: RoundedSlots, place: RoundedSlot, looks: bool, made: Tensor | None = None) -> Tensor:  # type: ignore[override]
        """`x` rounded."""
        return places.rounded(x, place, looks=looks) if made is None else made

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:  # type: ignore[override]
        """The gradient, straight through."""
        return grad, None, None, None, None
