"""`peppp_plan` returns a configuration of PEPPP (ICLR 2022) as a plan; `memory_bytes` counts memory as PEPPP does.

A configuration has a low-precision format for activations, their gradients, weights and their gradients, and a high-precision one for the
input, the logits, master weights and momentum. All are rounded stochastically. PEPPP's floats have no subnormals, and as many exponents
above 0 as below.

>>> from paredown.formats.element import Element
>>> Element.parse(peppp_element(4, 3)).smallest, Element.parse(peppp_element(4, 3)).max_value
(0.0078125, 240.0)

Memory in bits, for P parameters, I input values, L logits and T outputs of modules; `low` and `high` are the widths of the formats:

    bits = low * (P + 2 (T - L)) + high * (2 P + I + 2 L)

T counts the output of every call of a module, including quantizers, layers and the network itself; the factor 2 is for gradients.

One difference from the library that PEPPP used (QPyTorch 0.2.0): values between 0 and the smallest value are rounded stochastically here,
as all others are; there they were rounded to the nearer of the two.
"""

from __future__ import annotations

import re
from dataclasses import replace
from fnmatch import fnmatchcase

from paredown.errors import FormatError
from paredown.formats.element import Element
from paredown.formats.rounding import Overflow, Rounding
from paredown.plan.plan import Plan
from paredown.plan.storage import Assignment
from paredown.roles import Role
from paredown.simulate.outline import INPUT, Outline, OutlineValue

SUM = "add"
# Slots of `models/resnet.py` at which PEPPP's network has a quantizer: there is none between a norm and the next operation
PEPPP_LOW = ("relu:output", "*conv1:output", "*conv2:output", "*relu?:output", "*downsample.1:output", "*add.output")
PEPPP_HIGH = ("input1", "fc:output")
# PEPPP's 99 configurations are all pairs of these: column 9 * low + high of its matrices
LOW_FORMATS = ("e3m1", "e3m2", "e3m3", "e3m4", "e4m1", "e4m2", "e4m3", "e4m4", "e5m1", "e5m2", "e5m3")
HIGH_FORMATS = ("e6m7", "e6m9", "e6m11", "e7m7", "e7m9", "e7m11", "e8m7", "e8m9", "e8m11")


def peppp_element(exponent_bits: int, mantissa_bits: int) -> str:
    """Return the name of PEPPP's float element with these bits, which has no subnormals, infinities or NaN.

    Exponents go from -(2^(e-1) - 1) to 2^(e-1) - 1. With 8 exponent bits the smallest exponent is -126 instead of -127, as float32's is.
    """
    bias = min(1 << (exponent_bits - 1), 127)
    return f"e{exponent_bits}m{mantissa_bits}b{bias}fns"


def parse_peppp(text: str) -> tuple[int, int]:
    """Return (exponent bits, mantissa bits) of a float that is named as in PEPPP.

    >>> parse_peppp("e4m3")
    (4, 3)
    """
    match = re.fullmatch(r"e([1-8])m(\d{1,2})", text) if isinstance(text, str) else None
    if match is None:
        raise FormatError(f"{text!r} is no format of PEPPP: write it as e4m3, with 1 to 8 exponent bits.")
    return int(match[1]), int(match[2])


def peppp_plan(low: tuple[int, int], high: tuple[int, int]) -> Plan:
    """Return PEPPP's plan with formats `low` and `high`, each (exponent bits, mantissa bits), for `models/resnet.py`.

    Weights, gradients and activations are low; input, logits, master weights and momentum high. The stem's convolution is not rounded.
    Apply it with `apply(plan, model, mode="peppp")`, which rounds the sums of gradients.
    """
    texts = {False: peppp_element(*low), True: peppp_element(*high)}
    assignments = {is_high: Assignment.parse(text, Rounding.STOCHASTIC, Overflow.SATURATE) for is_high, text in texts.items()}
    rules = [(role.value, assignments[False]) for role in (Role.WEIGHT, Role.GRADIENT)]
    rules += [(role.value, assignments[True]) for role in (Role.MASTER, Role.MOMENT1)]
    for role in (Role.ACTIVATION, Role.ERROR):
        rules += [(f"{role.value}={pattern}", assignments[False]) for pattern in PEPPP_LOW]
        rules += [(f"{role.value}={name}", assignments[True]) for name in PEPPP_HIGH]
        rules += [(f"{role.value}=conv1:output", Assignment())]
    return replace(Plan(tuple(rules)), reason=f"PEPPP: low {texts[False]}, high {texts[True]}")


# --- memory -----------------------------------------------------------------------------------------------------------


def num_outputs(outline: Outline) -> int:
    """Return how many numbers the modules of PEPPP's network return in one call, counted from its outline as PEPPP does."""

    def is_shortcut(term: OutlineValue) -> bool:
        return term.op == SUM or term.name == "relu:output"  # the output of a layer, or of the stem

    modules = sum(value.numel for value in outline.values if value.op not in (INPUT, SUM))
    quantizers = sum(value.numel for value in outline.values if _is_rounded(value))
    sums = [value for value in outline.values if value.op == SUM]
    layers = sum(value.numel for value in sums)
    shortcuts = sum(value.numel for value in sums if is_shortcut(outline.values[value.sources[1]]))
    return modules + quantizers + layers + shortcuts + outline.values[-1].numel


def _is_rounded(value: OutlineValue) -> bool:
    patterns = (*PEPPP_LOW, *PEPPP_HIGH)
    return value.name != "conv1:output" and any(fnmatchcase(value.name, pattern) for pattern in patterns)


def memory_bytes(outline: Outline, low: str, high: str) -> float:
    """Return the bytes that PEPPP counts for a step with these two elements; `outline` is that of one call, without a loss."""
    parameters, logits = sum(outline.weights.values()), outline.values[-1].numel
    inputs = sum(value.numel for value in outline.values if value.op == INPUT)
    low_numbers = parameters + 2 * (num_outputs(outline) - logits)
    high_numbers = 2 * parameters + inputs + 2 * logits
    return (Element.parse(low).width * low_numbers + Element.parse(high).width * high_numbers) / 8


def plan_bytes(outline: Outline, plan: Plan) -> float:
    """Return the bytes that PEPPP counts for a step under a plan that `peppp_plan` made; `outline`: one call without a loss.

    The low-precision element is that of the plan's weights, the high-precision one that of its master weights, fp32 if they have none.
    """
    formats = [plan.find(("*",), role).format for role in (Role.WEIGHT, Role.MASTER)]
    low, high = (str(format.element) if format is not None else "fp32" for format in formats)
    return memory_bytes(outline, low, high)
