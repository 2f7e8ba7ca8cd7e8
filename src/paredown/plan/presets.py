"""PRESETS is a table of plans that have a name, one row each; `Plan.preset("activations4")` returns the plan of a row.

Bits for each value, with scales and minimums: activations8 and activations8f 8.25, activations4 5, activations4a 4.5, activations2 2.5;
frozen8 8.25, frozen4 4.25 for each frozen value. Activations are rounded to nearest.
The other presets are the tiers of `formats/catalog.py`: formats of weights, gradients and optimizer state, with unmodified activations.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple, TypedDict, cast

from paredown.formats.catalog import TIERS
from paredown.plan.storage import FormatLike


class ByRole(TypedDict, total=False):
    """The keyword arguments of `Plan.uniform`: a format for each role, and `product`, the element of 8-bit products."""

    weight: FormatLike
    frozen: FormatLike
    gradient: FormatLike
    moment1: FormatLike
    moment2: FormatLike
    master: FormatLike
    residue: FormatLike
    activation: FormatLike
    error: FormatLike
    product: str | None  # products of all linear layers (plan/product_rules.py)


class Preset(NamedTuple):
    """A row of PRESETS: the name of a plan, its formats by role, and a note on what to use it for."""

    name: str
    formats: ByRole
    note: str


ROWS = (
    Preset("activations8", {"activation": "int8/64@bf16"}, "activations in 8 bits, symmetric: the first to try"),
    Preset("activations8f", {"activation": "e4m3fn/64@bf16"}, "activations in 8-bit floats: keeps small values beside large ones"),
    Preset("activations4", {"activation": "uint4/32@bf16+bf16"}, "activations in 4 bits, affine, in short blocks"),
    Preset("activations4a", {"activation": "uint4/64@bf16+bf16"}, "activations in 4 bits, affine: half a bit less, coarser"),
    Preset("activations2", {"activation": "uint2/64@bf16+bf16"}, "activations in 2 bits, affine: when nothing else fits"),
    Preset(
        "fp8",
        {"activation": "int8/64@bf16", "product": "e4m3fn"},
        "linear layers multiply FP8 codes, activations in 8 bits: less memory and time",
    ),
    Preset(
        "int8_products",
        {"activation": "int8/64@bf16", "product": "int8"},
        "linear layers multiply int8 codes, activations in 8 bits",
    ),
    Preset(
        "auto_products",
        {"activation": "int8/64@bf16", "product": "auto"},
        "linear layers multiply FP8 codes, or int8 where the device has no FP8; activations in 8 bits",
    ),
    Preset("frozen8", {"frozen": "int8/64@bf16"}, "weights without a gradient in 8 bits: the base of LoRA adapters"),
    Preset("frozen4", {"frozen": "nf4/64@bf16"}, "weights without a gradient in 4 bits, as in QLoRA"),
    *(
        Preset(name, cast("ByRole", TIERS[name]), note)
        for name, note in (
            ("safe", "24-bit weights, the rest of the model's memory in 8 bits: trains like fp32"),
            ("fine_tune", "24-bit weights, the rest in 8 bits in longer blocks: for learning rates of 5e-5 and less"),
            ("half", "bf16 weights without a wider copy, the rest in 8 bits"),
            ("lpmm", "weights, gradients and optimizer state in 8 bits: a quarter of the model's memory"),
            ("lpmm4", "like lpmm, with optimizer state in 4 bits"),
        )
    ),
)

PRESETS: Mapping[str, Preset] = MappingProxyType({row.name: row for row in ROWS})
