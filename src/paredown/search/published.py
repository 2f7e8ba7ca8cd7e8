"""The assignments that the mixed-precision paper compares, as plans for `apply(plan, model, mode="simulate")`.

    all_high, all_low         one level for everything (gradients of parameters stay high)
    operator                  HFP8: what a product takes and its weight in e4m3, the gradient of what it made in e5m2; the ends are high
    amp                       torch's autocast: products low, losses and softmax high, the rest as wide as the widest that it takes

`FORMATS` are those of HFP8, written as this library writes elements: every code is a number, 1-4-3 has the bias 11 (exponents from -10
to 4), rounding is to nearest with ties away from zero; forward what is too large becomes the largest value, backward infinity, for the loss
scaler to see. Otherwise than in the paper's code NaN stays NaN.

>>> from paredown.formats.element import Element
>>> [(Element.parse(text).max_value, Element.parse(text).smallest) for text in (FORMATS.forward, FORMATS.backward)]
[(30.0, 0.0001220703125), (114688.0, 1.52587890625e-05)]
>>> Element.parse(FORMATS.high).max_value
8581545984.0
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from paredown.formats.rounding import Overflow, Rounding
from paredown.plan.assignment import Assignment
from paredown.plan.keys import slot_key
from paredown.plan.outline import Outline
from paredown.plan.plan import Plan
from paredown.roles import Role
from paredown.search.demotion import ALL_HIGH, Low, demote, groups_of, low_ratio

# The lists of torch.autocast on CUDA, as far as this library names operations
AMP_HIGH = frozenset(
    (
        *(
            "softmax",
            "log_softmax",
            "layer_norm",
            "group_norm",
            "norm",
            "rsqrt",
            "exp",
            "log",
            "pow",
            "sum",
            "prod",
            "cumsum",
            "dist",
        ),
        *("nll_loss", "mse_loss", "l1_loss", "smooth_l1_loss", "kl_div", "binary_cross_entropy_with_logits"),
        *("cosine_similarity", "softplus"),
    )
)
ROLES = (Role.ACTIVATION, Role.ERROR, Role.WEIGHT, Role.GRADIENT)


@dataclass(frozen=True)
class Formats:
    """What high and low mean: low has a format forward and another one backward."""

    forward: str = "e4m3b11f"
    backward: str = "e5m2f"
    high: str = "e6m9f"
    rounding: Rounding = Rounding.NEAREST_AWAY

    def of(self, role: Role, *, is_low: bool) -> Assignment:
        """The assignment of a tensor of this role."""
        is_backward = role in (Role.ERROR, Role.GRADIENT)
        low = self.backward if is_backward else self.forward
        overflow = Overflow.NONFINITE if is_backward else Overflow.SATURATE
        return Assignment.parse(low if is_low and role is not Role.GRADIENT else self.high, self.rounding, overflow)


FORMATS = Formats()


def plan_of(outline: Outline, low: Low, formats: Formats = FORMATS, reason: str = "") -> Plan:
    """Everything high but what is `low`, which is named slot by slot."""
    high = [(role.value, formats.of(role, is_low=False)) for role in ROLES]
    names = [
        (slot_key(name, role), formats.of(role, is_low=True)) for role, name in sorted(low, key=lambda key: (key[0].value, key[1]))
    ]
    share = f"{low_ratio(outline, low):.1%} of all numbers low"
    return Plan((*high, *names), reason=f"{reason}: {share}" if reason else share)


def high_plan(formats: Formats = FORMATS) -> Plan:
    """Everything high: also what promotion raises tensors to."""
    return Plan(tuple((role.value, formats.of(role, is_low=False)) for role in ROLES), reason="everything high")


# --- baselines --------------------------------------------------------------------------------------------------------


def operator(outline: Outline) -> Low:
    """HFP8: the operands of products, but for the first one and the last."""
    products = [place for place, value in enumerate(outline.values) if value.is_product]
    low: set[tuple[Role, str]] = set()
    for value in (outline.values[place] for place in products):
        low |= {(Role.ACTIVATION, outline.values[source].name) for source in value.sources}
        low |= {(Role.WEIGHT, name) for name in value.weights} | {(Role.ERROR, value.name)}
    return frozenset(low) - _ends(outline, products)


def _ends(outline: Outline, products: list[int]) -> Low:
    """What stays high: the first product with what it takes and makes, the group of the last one and what it takes."""
    first, last = (outline.values[place] for place in (products[0], products[-1]))
    values = [first, *(outline.values[source] for source in (*first.sources, *last.sources))]
    kept = {(role, value.name) for value in values for role in (Role.ACTIVATION, Role.ERROR)}
    kept |= {(Role.WEIGHT, name) for name in (*first.weights, *last.weights)}
    return frozenset(kept | {tensor.key for tensor in groups_of(outline)[-1].tensors})


def amp(outline: Outline) -> Low:
    """torch.autocast: the widest input decides for operations that no list names."""
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
