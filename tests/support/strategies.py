"""Hypothesis strategies: texts of elements and formats, and shapes.

Texts are in the one spelling that a format prints, so that they can be compared with it.
"""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

SCALES = ("fp32", "bf16", "e8m0", "e4m3fn", "e5m2", "e3m4")
MINIMUMS = ("", "+fp32", "+bf16")
BLOCK_LENGTHS = (1, 2, 3, 5, 8, 16, 31, 32, 64, 100, 65536)


def examples(count: int) -> settings:
    """So many examples, the same ones in every run: a red test stays red until it is explained."""
    return settings(
        max_examples=count, deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow]
    )


@st.composite
def float_elements(draw: st.DrawFn) -> str:
    """eXmY with specials, a bias within float32's reach, and with or without subnormals."""
    exponent_bits, mantissa_bits = draw(st.integers(1, 8)), draw(st.integers(0, 23))
    specials = draw(st.sampled_from(["", "fn", "fnuz", "f"] if mantissa_bits else ["fn", "fnuz", "f"]))
    bias = draw(st.sampled_from(["", f"b{draw(st.integers(0, 100))}"]))
    if (exponent_bits, mantissa_bits, specials, bias) == (8, 23, "fnuz", ""):
        bias = "b127"  # its own bias has steps below 2^-149
    if (exponent_bits, mantissa_bits) == (8, 0) and not specials + bias:
        specials = "fn"
    no_subnormals = draw(st.sampled_from(["", "ns"])) if specials or exponent_bits > 1 else ""
    return f"e{exponent_bits}m{mantissa_bits}{bias}{specials}{no_subnormals}"


def elements() -> SearchStrategy[str]:
    """Any element."""
    integers = st.builds("{}{}".format, st.sampled_from(["int", "uint"]), st.integers(1, 16))
    return st.one_of(float_elements(), integers, st.sampled_from(["e8m0", "nf4", "fp32", "bf16", "fp16"]))


@st.composite
def formats(draw: st.DrawFn, blocks: tuple[int, ...] = BLOCK_LENGTHS) -> str:
    """Any format: a bare element, or one in blocks, or affine."""
    element = draw(elements())
    if element in ("e8m0", "int1") or draw(st.booleans()):
        return element
    minimum = draw(st.sampled_from(MINIMUMS)) if element.startswith("uint") else ""
    return f"{element}/{draw(st.sampled_from(blocks))}@{draw(st.sampled_from(SCALES))}{minimum}"


def shapes(max_side: int = 9) -> SearchStrategy[tuple[int, ...]]:
    """Shapes of up to four dimensions, empty ones included."""
    return st.lists(st.integers(0, max_side), max_size=4).map(tuple)
