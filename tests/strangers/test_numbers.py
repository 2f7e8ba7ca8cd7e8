"""Numbers of thousands of digits, NaN, infinities and texts where trials and sensitivities have numbers: a sentence, each time."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given

import paredown as pare
from paredown.assignment.sensitivity import Sensitivities
from paredown.errors import BudgetError, PlanError
from paredown.sizes import parse_bytes, say_bytes
from paredown.study.tasks.trial import Status, Trial
from tests.strangers.mutations import answers, thousands, wrong_json

RIGHT = Trial("digits", pare.Plan(), 0, Status.DONE, error=0.1, loss=0.2, seconds=1.0, curve=((1, 2.0),)).to_json()
LONG = [10**400, -(10**400), 10**6000, -(10**6000)]


@pytest.mark.parametrize("number", LONG, ids=["400", "-400", "6000", "-6000"])
@pytest.mark.parametrize("name", ["error", "loss", "seconds", "seed", "measured_peak_bytes", "version", "status", "reason", "plan"])
def test_a_trial_with_a_huge_integer_is_a_sentence(name: str, number: int) -> None:
    with pytest.raises(PlanError, match=r"whole number of about (401|6001) digits"):
        Trial.from_json({**RIGHT, name: number})
    with pytest.raises(PlanError, match="pairs of a step and a finite loss"):
        Trial.from_json({**RIGHT, "curve": [[1, number]]})


SAID = {"2^1328 B or more": 10**400, "-2^19931 B or more": -(10**6000), "1073741824.00 PiB": 2**80}


@pytest.mark.parametrize("said", SAID)
def test_bytes_of_any_number_are_said(said: str) -> None:
    number = SAID[said]
    assert say_bytes(number) == said
    with pytest.raises(BudgetError, match=" is below 0; a size is"):
        parse_bytes(-abs(number))


def measured(**parts: Any) -> dict[str, Any]:
    """The JSON of sensitivities, with parts replaced."""
    return {"version": 1, "step": 3, "errors": {"a": {"int8/64@bf16": 0.1}, "b": {"int4/64@bf16": 0.2}}, **parts}


NO_STEPS = [None, "x", "3", [], {}, 1.5, float("nan"), float("inf"), 10**400, 10**6000, "9" * 6000, True, -1]


@pytest.mark.parametrize("step", NO_STEPS, ids=lambda step: str(type(step).__name__))
def test_sensitivities_at_a_step_that_is_no_number_are_refused(step: Any) -> None:
    with pytest.raises(PlanError, match="step of a measurement of sensitivities is a whole number from 0"):
        Sensitivities.from_json(measured(step=step))


NO_ERRORS = [None, "0.1", [], float("nan"), -1.0, 10**400, 10**6000, "9" * 6000, True]


@pytest.mark.parametrize("error", NO_ERRORS, ids=lambda error: str(type(error).__name__))
def test_sensitivities_with_an_error_that_is_no_number_are_refused(error: Any) -> None:
    with pytest.raises(
        PlanError, match=r"sensitivities of 'a': the error of 'int8/64@bf16' is .* a squared error is a float64 from 0 up"
    ):
        Sensitivities.from_json(measured(errors={"a": {"int8/64@bf16": error}}))


def test_sensitivities_of_slots_and_formats_that_are_none_are_refused() -> None:
    with pytest.raises(PlanError, match="the name of a slot is text, not a whole number of about 6001 digits"):
        Sensitivities({10**6000: {"int8/64@bf16": 0.1}})  # pyright: ignore[reportArgumentType]
    with pytest.raises(PlanError, match="sensitivities of 'a', 'int99'"):
        Sensitivities.from_json(measured(errors={"a": {"int99": 0.1}}))
    assert Sensitivities({"a": {"int8/64@bf16": float("inf")}}).of("a", "int2/64@bf16") == 1e300, "an infinite error is a large one"


@thousands(300)
@given(wrong_json(measured()))
def test_wrong_sensitivities_that_are_read_can_be_asked(value: Any) -> None:
    def ask() -> None:
        found = Sensitivities.from_json(value)
        assert all((found.of(name, "uint2/64@bf16+bf16") or 0.0) >= 0 for name in found.errors)
        assert repr(found) and json.dumps(found.to_json(), allow_nan=False)

    answers(ask)


@thousands(200)
@given(wrong_json(RIGHT))
def test_wrong_trials_that_are_read_can_be_said_and_written(value: Any) -> None:
    def use() -> None:
        found = Trial.from_json(value)
        assert repr(found) and Trial.from_json(json.loads(json.dumps(found.to_json(), allow_nan=False))) == found

    answers(use)
