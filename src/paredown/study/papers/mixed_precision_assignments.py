""" "Training with Mixed-Precision Floating-Point Assignments": precision demotion, and the assignments that the paper compares it with.

Demotion: groups of tensors change from the high to the low precision, the largest group first. Tensors are every value of the forward
pass, every parameter, and the gradient of each. A group is the output of one matrix product, everything after it up to the next product,
and the parameters that are applied to it. Starting from all high, whole groups become low until the share of low numbers reaches a
ratio. Gradients of parameters are always high, so that the share ends below 1.

    ratio_low = numbers in low tensors / all numbers         bytes relative to float32 = (2 - ratio_low) / 4, for 16 and 8 bits

This is the sum over all tensors of a step, not a peak, and excludes optimizer state.

Baselines, as plans for `apply(plan, model, mode="simulate")`:

    all_high, all_low         one level for everything (gradients of parameters are high)
    operator                  HFP8: inputs and weights of products in e4m3, gradients of outputs in e5m2; first and last layer high
    amp                       torch's autocast: products low, losses and softmax high, the rest as wide as its widest input

`FORMATS` are those of HFP8 in this library's notation: every code is a number, 1-4-3 has the bias 11 (exponents from -10 to 4),
rounding is to nearest with ties away from zero; on overflow, forward values saturate and backward values become infinite, for the
loss scaler to detect. Unlike in the paper's code, NaN stays NaN.

>>> from paredown.formats.element import Element
>>> [(Element.parse(text).max_value, Element.parse(text).smallest) for text in (FORMATS.forward, FORMATS.backward)]
[(30.0, 0.0001220703125), (114688.0, 1.52587890625e-05)]
>>> Element.parse(FORMATS.high).max_value
8581545984.0
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from paredown.errors import PlanError
from paredown.formats.rounding import Overflow, Rounding
from paredown.plan.plan import Plan
from paredown.plan.selectors import slot_key
from paredown.plan.storage import Assignment
from paredown.roles import Role
from paredown.simulate.outline import INPUT, Outline

Low = frozenset[tuple[Role, str]]  # role and name of each low tensor
ALL_HIGH: Low = frozenset()
BYTES_FP32 = 4
# Operations that torch.autocast runs in float32 on CUDA, of those that this library names
AMP_HIGH = frozenset(
    {
        "softmax", "log_softmax", "layer_norm", "group_norm", "norm", "rsqrt", "exp", "log", "pow", "sum", "prod", "cumsum", "dist",
        "nll_loss", "mse_loss", "l1_loss", "smooth_l1_loss", "kl_div", "binary_cross_entropy_with_logits",
        "cosine_similarity", "softplus",
    }
)  # fmt: skip
ROLES = (Role.ACTIVATION, Role.ERROR, Role.WEIGHT, Role.GRADIENT)


@dataclass(frozen=True)
class Counted:
    """Describes a tensor of the step that the paper counts: role, name, number of values, and the number of its TensorGroup."""

    role: Role
    name: str
    numel: int
    group: int

    @property
    def key(self) -> tuple[Role, str]:
        """Return the role and the name of the tensor, which identify it."""
        return self.role, self.name


@dataclass(frozen=True)
class TensorGroup:
    """Holds the tensors of a training step that change to low precision together."""

    number: int
    tensors: tuple[Counted, ...]

    @property
    def numel(self) -> int:
        """Return the number of values in all tensors of the group."""
        return sum(tensor.numel for tensor in self.tensors)


def tensors_of(outline: Outline) -> list[Counted]:
    """Return every tensor that the paper counts in a step; `outline` lists the values of its forward pass.

    A parameter is in the group of the value that it is applied to first.
    """
    group, groups, tensors = -1, list[int](), list[Counted]()
    counted_weights: set[str] = set()
    for value in outline.values:
        group += value.is_product or value.op == INPUT or group < 0
        groups.append(group)
        tensors += [Counted(role, value.name, value.numel, group) for role in (Role.ACTIVATION, Role.ERROR)]
        input_group = groups[value.sources[0]] if value.sources else group
        for name in (name for name in value.weights if name not in counted_weights):
            counted_weights.add(name)
            tensors += [Counted(role, name, outline.weights[name], input_group) for role in (Role.WEIGHT, Role.GRADIENT)]
    return tensors


def groups_of(outline: Outline) -> list[TensorGroup]:
    """Return the groups of tensors of the step `outline` that the paper demotes together, in the order of their first tensors."""
    tensors = tensors_of(outline)
    numbers = sorted({tensor.group for tensor in tensors})
    return [TensorGroup(number, tuple(tensor for tensor in tensors if tensor.group == number)) for number in numbers]


def total_bytes(outline: Outline) -> int:
    """Return the bytes of all tensors that the paper counts in the step `outline`, in float32."""
    return BYTES_FP32 * sum(tensor.numel for tensor in tensors_of(outline))


def low_ratio(outline: Outline, low: Low) -> float:
    """Return the share of all numbers of the step `outline` that are in `low`, tensors given by role and name."""
    tensors = tensors_of(outline)
    return sum(t.numel for t in tensors if t.key in low) / sum(t.numel for t in tensors)


def memory_factor(ratio: float) -> float:
    """Return by which factor tensors in 16 and 8 bits are smaller than in float32; `ratio` is the share of numbers in 8 bits.

    >>> memory_factor(0.0), memory_factor(1.0)
    (2.0, 4.0)
    """
    return 4 / (2 - ratio)


# --- orders -----------------------------------------------------------------------------------------------------------


ORDERS: dict[str, Callable[[Sequence[TensorGroup], int], list[TensorGroup]]] = {  # of groups, with a seed
    "decreasing": lambda groups, seed: sorted(groups, key=lambda group: (-group.numel, group.number)),  # the paper's
    "increasing": lambda groups, seed: sorted(groups, key=lambda group: (group.numel, group.number)),
    "random": lambda groups, seed: random.Random(seed).sample(groups, len(groups)),
}


def demote(outline: Outline, ratio: float, *, order: str = "decreasing", seed: int = 0) -> Low:
    """Return the tensors that get low precision: whole groups in this `order`, until a share `ratio` of all numbers is low.

    If all groups together do not reach `ratio`, all become low. `order` is "decreasing" or "increasing", by size, or "random", which
    alone uses `seed`.
    """
    if order not in ORDERS or not 0 <= ratio <= 1:
        raise PlanError(f"demote takes a ratio in 0..1 and an order of {', '.join(ORDERS)}; these are {ratio} and {order!r}.")
    groups = ORDERS[order](groups_of(outline), seed)
    needed = ratio * sum(group.numel for group in groups)
    low: set[tuple[Role, str]] = set()
    reached = 0
    for group in groups:
        if reached >= needed:
            break
        lowered = [tensor for tensor in group.tensors if tensor.role is not Role.GRADIENT]
        low |= {tensor.key for tensor in lowered}
        reached += sum(tensor.numel for tensor in lowered)
    return frozenset(low)


# --- plans -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Formats:
    """Names the format of the high precision, and the two formats of the low precision, for forward and for backward."""

    forward: str = "e4m3b11f"
    backward: str = "e5m2f"
    high: str = "e6m9f"
    rounding: Rounding = Rounding.NEAREST_AWAY

    def of(self, role: Role, *, is_low: bool) -> Assignment:
        """Return the format, rounding and overflow mode for a role, in low precision if `is_low`; gradients are always high."""
        is_backward = role in (Role.ERROR, Role.GRADIENT)
        low = self.backward if is_backward else self.forward
        overflow = Overflow.NONFINITE if is_backward else Overflow.SATURATE
        return Assignment.parse(low if is_low and role is not Role.GRADIENT else self.high, self.rounding, overflow)


FORMATS = Formats()


def plan_of(outline: Outline, low: Low, formats: Formats = FORMATS, reason: str = "") -> Plan:
    """Return the plan with low precision for `low`, and high for all other tensors; its own reason begins with `reason`."""
    high_rules = [(role.value, formats.of(role, is_low=False)) for role in ROLES]
    low_rules = [
        (slot_key(name, role), formats.of(role, is_low=True)) for role, name in sorted(low, key=lambda key: (key[0].value, key[1]))
    ]
    share = f"{low_ratio(outline, low):.1%} of all numbers low"
    return Plan((*high_rules, *low_rules), reason=f"{reason}: {share}" if reason else share)


def high_plan() -> Plan:
    """Return the plan with all tensors in high precision, which is used after low-precision tensors overflow."""
    return Plan(tuple((role.value, FORMATS.of(role, is_low=False)) for role in ROLES), reason="everything high")


# --- baselines --------------------------------------------------------------------------------------------------------


def operator(outline: Outline) -> Low:
    """Return the tensors that HFP8 has in low precision: operands and output gradients of products, but the first and last."""
    products = [index for index, value in enumerate(outline.values) if value.is_product]
    low: set[tuple[Role, str]] = set()
    for value in (outline.values[index] for index in products):
        low |= {(Role.ACTIVATION, outline.values[source].name) for source in value.sources}
        low |= {(Role.WEIGHT, name) for name in value.weights} | {(Role.ERROR, value.name)}
    return frozenset(low) - _ends(outline, products)


def _ends(outline: Outline, products: list[int]) -> Low:
    """Return the tensors of the first and the last of `products` (indices in `outline.values`), which HFP8 leaves high."""
    first, last = (outline.values[index] for index in (products[0], products[-1]))
    values = [first, *(outline.values[source] for source in (*first.sources, *last.sources))]
    kept = {(role, value.name) for value in values for role in (Role.ACTIVATION, Role.ERROR)}
    kept |= {(Role.WEIGHT, name) for name in (*first.weights, *last.weights)}
    return frozenset(kept | {tensor.key for tensor in groups_of(outline)[-1].tensors})


def amp(outline: Outline) -> Low:
    """Return the tensors that torch.autocast has in low precision: products, and values whose inputs are all low.

    Operations of AMP_HIGH, such as softmax, are never low.
    """
    is_low: list[bool] = []
    low: set[tuple[Role, str]] = set()
    for value in outline.values:
        inputs = [is_low[source] for source in value.sources]
        is_low.append(value.is_product or (value.op not in AMP_HIGH and bool(inputs) and all(inputs)))
        if is_low[-1]:
            low |= {(Role.ACTIVATION, value.name), (Role.ERROR, value.name)}
        if value.is_product:
            low |= {(Role.WEIGHT, name) for name in value.weights}
    return frozenset(low)


BASELINES: dict[str, Callable[[Outline], Low]] = {
    "all_high": lambda outline: ALL_HIGH,
    "all_low": partial(demote, ratio=1.0),
    "operator": operator,
    "amp": amp,
}
