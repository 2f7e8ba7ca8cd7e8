"""`CATALOG` maps names such as "nvfp4" to formats; `TIERS` maps names to sets of formats for an optimizer.

The rows named peppp_* are the formats of the 99 configurations of PEPPP (Yang et al., ICLR 2022): 11 low ones for activations,
weights and gradients, 9 high ones for the optimizer. They follow QPyTorch 0.2.0, which PEPPP measured with: no subnormals, no inf or NaN,
exponents from -(2^(X-1)-1) to 2^(X-1)-1; encode with overflow="saturate". (QPyTorch 0.2.0 rounds to nearest below the smallest value
even when it rounds stochastically; this codec is unbiased there.) With 8 exponent bits the smallest exponent of QPyTorch is -127,
where float32 is already subnormal; here it is -126. The rows named mpfa_* are those of "Training with
Mixed-Precision Floating-Point Assignments" (Lee et al., TMLR 2023), in which every code is a finite number.

>>> str(CATALOG["mxfp4"])
'e2m1fn/32@e8m0'
>>> CATALOG["peppp_e4m3"].element.smallest, CATALOG["peppp_e4m3"].element.max_value
(0.0078125, 240.0)

A tier names the formats of weights, gradients and optimizer state, by role. Plan presets and optimizers read the same rows.

    bytes per parameter: weights, moments, gradient accumulator, scales        SGD with momentum, Lion     AdamW
    (torch, all fp32)                                                          12                          16
    safe    bf16 weight + 8-bit residue, 8-bit moments and accumulator          5.06                        6.09
    fine_tune   as `safe`, in blocks of 256                                    5.02                        6.02
    half    bf16 weight, stochastic rounding; the rest as in `safe`            4.06                        5.09
    lpmm    8 bits for everything, no copy in higher precision                 3.08                        4.11
    lpmm4   8-bit weights and accumulator, 4-bit moments                       2.58                        3.11

Weights, accumulators and the second moment are sums of many small changes. They are rounded stochastically unless a plan or a keyword
sets another rounding (`roles.ACCUMULATED`): rounding to nearest would lose every change below half a step of the format.

`fine_tune` is for learning rates of SMALL_LEARNING_RATE and less, at which weights without a residue follow float32 with much noise
(`docs/optimizers.md`). It takes no more than bf16 weights and gradients with the 8-bit moments of bitsandbytes, 6.03 bytes.

A parameter of fewer than MIN_DIMS dimensions or MIN_NUMEL values is small: in every tier its weight and gradient are
unmodified and its moments are float32; a bfloat16 weight gets an 8-bit residue (Role.RESIDUE).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from math import prod
from types import MappingProxyType

from paredown.errors import FormatError
from paredown.formats.element import ElementKind
from paredown.formats.format import Format


@dataclass(frozen=True)
class CatalogRow:
    """A row of the catalog of formats: a name, the format's text, and a note that says what it is used for."""

    name: str
    text: str
    note: str


def _peppp(exponent_bits: int, mantissa_bits: int, note: str) -> CatalogRow:
    bias = f"b{1 << (exponent_bits - 1)}" if exponent_bits < 8 else ""
    return CatalogRow(f"peppp_e{exponent_bits}m{mantissa_bits}", f"e{exponent_bits}m{mantissa_bits}{bias}fns", note)


PEPPP_LOW = ((3, 1), (3, 2), (3, 3), (3, 4), (4, 1), (4, 2), (4, 3), (4, 4), (5, 1), (5, 2), (5, 3))  # in the order of the paper
PEPPP_HIGH = ((6, 7), (6, 9), (6, 11), (7, 7), (7, 9), (7, 11), (8, 7), (8, 9), (8, 11))

ROWS = (
    CatalogRow("fp32", "fp32", "what training starts from"),
    CatalogRow("bf16", "bf16", "float32 cut to 16 bits: same range, 3 digits fewer"),
    CatalogRow("fp16", "fp16", "IEEE half precision: smaller range, needs loss scaling"),
    CatalogRow("e4m3fn", "e4m3fn", "8-bit float of OCP for weights and activations"),
    CatalogRow("e5m2", "e5m2", "8-bit float of OCP for gradients"),
    CatalogRow("e3m4", "e3m4", "8-bit float with more digits than range"),
    CatalogRow("e4m3fnuz", "e4m3fnuz", "8-bit float of AMD and Graphcore"),
    CatalogRow("e5m2fnuz", "e5m2fnuz", "8-bit float of AMD and Graphcore"),
    CatalogRow("mxfp8_e4m3", "e4m3fn/32@e8m0", "OCP microscaling, 8 bits"),
    CatalogRow("mxfp8_e5m2", "e5m2/32@e8m0", "OCP microscaling, 8 bits"),
    CatalogRow("mxfp6_e3m2", "e3m2fn/32@e8m0", "OCP microscaling, 6 bits"),
    CatalogRow("mxfp6_e2m3", "e2m3fn/32@e8m0", "OCP microscaling, 6 bits"),
    CatalogRow("mxfp4", "e2m1fn/32@e8m0", "OCP microscaling, 4 bits"),
    CatalogRow("nvfp4", "e2m1fn/16@e4m3fn", "NVIDIA's 4 bits, with a float32 for the tensor"),
    CatalogRow("nf4_block", "nf4/64@fp32", "QLoRA's table for normally distributed weights"),
    CatalogRow("int8_block", "int8/64@bf16", "8 bits for momentum, gradients and activations"),
    CatalogRow("int8_pow2", "int8/64@e8m0", "8 bits for weights: power-of-two scales rarely change"),
    CatalogRow("uint8_block", "uint8/64@bf16", "8 bits for second moments, which are never negative"),
    CatalogRow("int4_block", "int4/64@bf16", "4 bits for activations and moments"),
    CatalogRow("uint4_affine", "uint4/64@bf16+fp32", "4 bits for activations on one side of zero"),
    CatalogRow("int2_block", "int2/64@bf16", "2 bits for activations: -1, 0 and 1"),
    CatalogRow("uint2_affine", "uint2/64@bf16+bf16", "2 bits for activations on one side of zero"),
    *(_peppp(x, y, "PEPPP: activations, weights, gradients") for x, y in PEPPP_LOW),
    *(_peppp(x, y, "PEPPP: input, logits, optimizer") for x, y in PEPPP_HIGH),
    CatalogRow("mpfa_forward", "e4m3b11f", "assignments: low precision for weights and activations"),
    CatalogRow("mpfa_backward", "e5m2f", "assignments: low precision for errors"),
    CatalogRow("mpfa_high", "e6m9f", "assignments: high precision, and all weight gradients"),
)

CATALOG: Mapping[str, Format] = MappingProxyType({row.name: Format.parse(row.text) for row in ROWS})


def find_format(format: Format | str) -> Format:
    """Return the format with this catalog name or text; raise FormatError, with similar names, if there is none.

    >>> find_format("int8_block") == find_format("int8/64@bf16")
    True
    """
    if isinstance(format, str) and format in CATALOG:
        return CATALOG[format]
    try:
        return Format.parse(format)
    except FormatError as error:
        names = get_close_matches(format, list(CATALOG), 3, 0.7) if isinstance(format, str) else []
        hint = f" Similar names in the catalog: {', '.join(names)}." if names else ""
        raise FormatError(f"{error}{hint}") from None


# --- Tiers ---

SMALL_LEARNING_RATE = 5e-5
MIN_DIMS = 2
MIN_NUMEL = 4096

_MOMENTS8 = {"moment1": "int8/64@bf16", "moment2": "uint8/64@bf16", "gradient": "int8/64@bf16"}
_MOMENTS8_LONG = {"moment1": "int8/256@bf16", "moment2": "uint8/256@bf16", "gradient": "int8/256@bf16"}
_MOMENTS4 = {"moment1": "int4/64@bf16", "moment2": "uint4/64@bf16", "gradient": "int8/64@bf16"}

TIERS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "full": {},
        "safe": {"weight": "bf16", "residue": "int8", **_MOMENTS8},
        "fine_tune": {"weight": "bf16", "residue": "int8", **_MOMENTS8_LONG},
        "half": {"weight": "bf16", **_MOMENTS8},
        "lpmm": {"weight": "int8/64@e8m0", **_MOMENTS8},
        "lpmm4": {"weight": "int8/64@e8m0", **_MOMENTS4},
    }
)


def is_small(shape: Sequence[int]) -> bool:
    """Return whether a parameter of `shape` is too small to pack.

    The weight and gradient of a small parameter stay unmodified, and its moments are float32, as rounding harms norms and biases most.

    >>> is_small((4096,)), is_small((63, 65)), is_small((64, 64))
    (True, True, False)
    """
    return len(shape) < MIN_DIMS or prod(shape) < MIN_NUMEL


# --- Which formats can store a role ---

RESIDUE = "residue"
NEVER_SIGNED = ("activation", "moment2", RESIDUE)  # roles whose tensors may have no value below 0
LEAST_FLOAT_WIDTH = {"gradient": 16, "moment1": 16, "moment2": 16}  # bits that a float without a scale needs; 8 for other roles


def reason_not_to_store(format: Format, role: str) -> str | None:
    """Return why `format` cannot store tensors of `role`, and suggest a format that can; return None if it can.

    Integers, tables and floats of fewer than 8 bits need a scale: int8 rounds weights of 0.02 to 0. Wider floats have the range without
    one; gradients and moments of small values need 16 bits. The residue is 8 bits that follow a bf16 weight, and needs none. Unsigned
    integers without a minimum cannot store negative values. This is the one check for all roles: plans call it in store mode
    (`Plan.check_stored`), optimizers for their keywords, and `resolve_format` for activations.

    >>> reason_not_to_store(Format.parse("nf4"), "frozen")
    'nf4 has no scale: it can only store values from -1 to 1, and 0.0795803 is the smallest above 0; write nf4/64@bf16'
    >>> reason_not_to_store(Format.parse("e4m3fn"), "weight"), reason_not_to_store(Format.parse("int8"), "residue")
    (None, None)
    """
    element = format.element
    is_float = element.kind is ElementKind.FLOAT
    if format.block is None and role != RESIDUE and not (is_float and element.width >= LEAST_FLOAT_WIDTH.get(role, 8)):
        span = f"{element.min_value:g} to {element.max_value:g}, and {element.smallest:g} is the smallest above 0"
        return f"{format} has no scale: it can only store values from {span}; write {_scaled(format, role)}"
    if element.kind is ElementKind.UINT and format.minimum is None and role not in NEVER_SIGNED:
        return f"{format} has no code for negative values; write {_scaled(format, role)}"
    return None


def _scaled(format: Format, role: str) -> str:
    """Return the text of a format like `format` that can store tensors of `role` because it has a scale, to suggest it."""
    element = format.element
    if element.kind is ElementKind.UINT and role not in NEVER_SIGNED:
        return f"int{min(max(element.width, 2), 8)}/{format.block or 64}@{format.scale or 'bf16'}"
    try:
        return str(Format.parse(f"{element}/64@bf16"))
    except FormatError:  # a table without 0
        return "int8/64@bf16"
