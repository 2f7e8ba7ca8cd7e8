"""The search for slots at fault, with tests that are functions of names, and the error that `verify` expects of a format."""

from __future__ import annotations

from typing import Any

import pytest

import paredown as pare
from paredown.check.verification import FaultSearch, expected_error
from paredown.formats.format import Format
from paredown.formats.rounding import Rounding
from tests.session.nets import INT8, rows


@pytest.mark.parametrize("planted", [["s7"], ["s0", "s63"], ["s3", "s4", "s40"]])
def test_the_search_needs_few_tests(planted: list[str]) -> None:
    """Slots of 64 that fail alone, and the same that fail together alone: found, each in 2 log2(64) + 3 tests or fewer."""
    slots = [f"s{number}" for number in range(64)]
    for fails in (lambda names: bool(set(planted) & set(names)), lambda names: set(planted) <= set(names)):
        tests: list[Any] = []
        search = FaultSearch(1000)
        groups, is_outside = search.minimal_groups(
            slots, lambda names, fails=fails, tests=tests: (tests.append(names), fails(names))[1]
        )
        assert sorted(slot for group in groups for slot in group) == sorted(planted) and not is_outside
        assert len(tests) <= 15 * len(planted) + 2


def test_a_search_that_is_spent_says_so() -> None:
    slots = [f"s{number}" for number in range(64)]
    search = FaultSearch(5)
    groups, _ = search.minimal_groups(slots, lambda names: "s9" in names)
    assert search.is_spent and "s9" in groups[0] and 1 < len(groups[0]) < 64
    assert FaultSearch(5).minimal_groups(slots, lambda names: True) == ([], True)


@pytest.mark.parametrize("text", ["bf16", "e4m3fn", INT8, "int4/64@bf16", "uint4/64@bf16+bf16", "uint8/64@bf16+bf16"])
@pytest.mark.parametrize("rounding", [Rounding.NEAREST_EVEN, Rounding.STOCHASTIC])
def test_the_expected_error_is_that_of_normal_values(text: str, rounding: Rounding) -> None:
    """Measured on 2^16 values: never above what is expected, and not far below (blocks of 64 reach 2.4 of 3 standard deviations)."""
    x = rows(1024, 64)
    measured = float((pare.round_trip(x, text, rounding=rounding, seed=1) - x).square().mean().sqrt() / x.square().mean().sqrt())
    assert 0.6 < measured / expected_error(Format.parse(text), rounding) < 1.0
