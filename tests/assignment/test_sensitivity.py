"""Sensitivities are a value: they print, go through JSON, and answer for formats that were not probed."""

from __future__ import annotations

from math import inf
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paredown import Sensitivities
from paredown.errors import PlanError
from tests.support.strategies import examples, formats

ROWS = st.dictionaries(formats(), st.floats(0, inf), min_size=1, max_size=3)


@examples(200)
@given(errors=st.dictionaries(st.text(), ROWS, max_size=4), step=st.integers(0, 10**6))
def test_json_and_file_give_the_same_back(tmp_path_factory: pytest.TempPathFactory, errors: dict, step: int) -> None:
    measured = Sensitivities(errors, step)
    assert Sensitivities.from_json(measured.to_json()) == measured
    path = tmp_path_factory.mktemp("probe") / "probe.json"
    measured.save(path)
    assert Sensitivities.load(path) == measured
    assert "Infinity" not in path.read_text()
    assert len(measured) == len(errors)
    assert repr(measured).startswith(f"Sensitivities of {len(errors)} slot")


def test_a_bit_less_is_four_times_the_error() -> None:
    measured = Sensitivities({"a:input": {"int4/64@bf16": 1.0}})
    by_hand = {"int2/64@bf16": 4.0**2, "int3/64@bf16": 4.0, "int8/64@bf16": 4.0**-4, "e4m3fn/64@bf16": 0.25, "bf16": 4.0**-5}
    assert {text: measured.of("a:input", text) for text in by_hand} == by_hand
    assert measured.of("b:input", "bf16") is None


def test_between_two_it_is_on_the_line_of_their_logarithms() -> None:
    measured = Sensitivities({"a:input": {"int2/64@bf16": 1.0, "int8/64@bf16": 1e-6}})
    assert measured.of("a:input", "int4/64@bf16") == pytest.approx(1e-2)
    assert measured.of("a:input", "int8/64@bf16") == 1e-6, "what was measured is not touched"
    silent = Sensitivities({"a:input": {"int2/64@bf16": 0.0, "int8/64@bf16": 0.0}})
    assert silent.of("a:input", "int4/64@bf16") == 0.0


@pytest.mark.parametrize(
    ("errors", "said"),
    [
        ({"a:input": {"int4/64@bf16": -1.0}}, "a squared error is a float64 from 0 up"),
        ({"a:input": {"int4/64@bf16": float("nan")}}, "the error of 'int4/64@bf16' is nan"),
        ({"a:input": {"int99": 1.0}}, "'a:input', 'int99'"),
        ({"a:input": 3.0}, "{format: error}, not float"),
        ([("a:input", 3.0)], "not list"),
    ],
)
def test_bad_input_is_a_sentence(errors: dict, said: str) -> None:
    with pytest.raises(PlanError, match=said.replace("{", r"\{").replace("}", r"\}")):
        Sensitivities(errors)


def test_files_that_are_none(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    for text in ("{}", "[", '{"version": 9, "errors": {}}'):
        path.write_text(text)
        with pytest.raises(PlanError, match=r"x\.json"):
            Sensitivities.load(path)
