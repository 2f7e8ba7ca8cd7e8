"""PEPPP's configurations as plans for `models/resnet.py`, and its memory of one.

Low formats are for activations, their gradients, weights and their gradients; high ones for the input, the logits, masters and momentum.
All are rounded stochastically. Its floats have no subnormals, and as many exponents above 0 as below.

>>> from paredown.formats.element import Element
>>> Element.parse(peppp_element(4, 3)).smallest, Element.parse(peppp_element(4, 3)).max_value
(0.0078125, 240.0)

Memory, for words of so many bits, of P parameters, I numbers of input, L logits and T outputs of modules:

    bits = low * (P + 2 (T - L)) + high * (2 P + I + 2 L)

T counts the output of every call of a module, quantisers, layers and the network itself included; 2 is for gradients.

One thing is not as in the library that PEPPP used (QPyTorch 0.2.0): what lies between 0 and the smallest value is rounded
stochastically here, as everything else is, and went to the nearer of the two there.
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
from paredown.simulate.outline import INPUT, Outline, Value

SUM = "add"
# Where its network has a quantiser, by the names of `models/resnet.py`: not between the norms and what follows them
PEPPP_LOW = ("relu:output", "*conv1:output", "*conv2:output", "*relu?:output", "*downsample.1:output", "*add.output")
PEPPP_HIGH = ("input1", "fc:output")
# Its 99 configurations are all pairs of these, column 9 * low + high of its matrices
LOW_FORMATS = ("e3m1", "e3m2", "e3m3", "e3m4", "e4m1", "e4m2", "e4m3", "e4m4", "e5m1", "e5m2", "e5m3")
HIGH_FORMATS = ("e6m7", "e6m9", "e6m11", "e7m7", "e7m9", "e7m11", "e8m7", "e8m9", "e8m11")


def peppp_element(exponent_bits: int, mantissa_bits: int) -> str:
    """A float of PEPPP: exponents from -(2^(e-1) - 1) to 2^(e-1) - 1, every code a number, no subnormals.

    With 8 exponent bits the smallest exponent is -126 instead of -127, as float32's is.
    """
    bias = min(1 << (exponent_bits - 1), 127)
    return f"e{exponent_bits}m{mantissa_bits}b{bias}fns"


def parse_peppp(text: str) -> tuple[int, int]:
    """Exponent bits and mantissa bits of PEPPP's short spelling.

    >>> parse_peppp("e4m3")
    (4, 3)
    """
    found = re.fullmatch(r"e([1-8])m(\d{1,2})", text) if isinstance(text, str) else None
    if found is None:
        raise FormatError(f"{text!r} is no format of PEPPP: they are spelled e4m3, with 1 to 8 exponent bits.")
    return int(found[1]), int(found[2])


def peppp_plan(low: tuple[int, int], high: tuple[int, int]) -> Plan:
    """PEPPP's configuration of (exponent bits, mantissa bits) for `models/resnet.py`: what is where, all rounded stochastically.

    Weights, gradients and activations are low, input, logits, masters and momentum high. The stem's convolution is not rounded, and
    gradients are rounded as they are summed up: `apply(plan, model, mode="peppp")`.
    """
    texts = {False: peppp_element(*low), True: peppp_element(*high)}
    given = {is_high: Assignment.parse(text, Rounding.STOCHASTIC, Overflow.SATURATE) for is_high, text in texts.items()}
    rules = [(role.value, given[False]) for role in (Role.WEIGHT, Role.GRADIENT)]
    rules += [(role.value, given[True]) for role in (Role.MASTER, Role.MOMENT1)]
    for role in (Role.ACTIVATION, Role.ERROR):
        rules += [(f"{role.value}={pattern}", given[False]) for pattern in PEPPP_LOW]
        rules += [(f"{role.value}={name}", given[True]) for name in PEPPP_HIGH]
        rules += [(f"{role.value}=conv1:output", Assignment())]
    return replace(Plan(tuple(rules)), reason=f"PEPPP: low {texts[False]}, high {texts[True]}")


# --- memory -----------------------------------------------------------------------------------------------------------


def num_outputs(outline: Outline) -> int:
    """T: numbers in the outputs of all modules of PEPPP's network, as often as they are counted."""
    modules = sum(value.numel for value in outline.values if value.op not in (INPUT, SUM))
    quantisers = sum(value.numel for value in outline.values if _is_rounded(value))
    sums = [value for value in outline.values if value.op == SUM]
    layers = sum(value.numel for value in sums)
    shortcuts = sum(value.numel for value in sums if outline.values[value.sources[1]].op == SUM or _is_first(outline, value))
    return modules + quantisers + layers + shortcuts + outline.values[-1].numel


def _is_rounded(value: Value) -> bool:
    patterns = (*PEPPP_LOW, *PEPPP_HIGH)
    return value.name != "conv1:output" and any(fnmatchcase(value.name, pattern) for pattern in patterns)


def _is_first(outline: Outline, value: Value) -> bool:
    """Whether a sum adds the stem's output."""
    return outline.values[value.sources[1]].name == "relu:output"


def memory_bytes(outline: Outline, low: str, high: str) -> float:
    """PEPPP's memory of one step of its network: `outline` is of the model alone, without a loss."""
    parameters, logits = sum(outline.weights.values()), outline.values[-1].numel
    inputs = sum(value.numel for value in outline.values if value.op == INPUT)
    low_numbers = parameters + 2 * (num_outputs(outline) - logits)
    high_numbers = 2 * parameters + inputs + 2 * logits
    return (Element.parse(low).width * low_numbers + Element.parse(high).width * high_numbers) / 8


def plan_bytes(outline: Outline, plan: Plan) -> float:
    """The same of a plan that `peppp_plan` made, told by its weights and masters; a plan without these is 32 bits for all."""
    low, high = (plan.find(("*",), role).format for role in (Role.WEIGHT, Role.MASTER))
    widths = [str(one.element) if one is not None else "fp32" for one in (low, high)]
    return memory_bytes(outline, *widths)
