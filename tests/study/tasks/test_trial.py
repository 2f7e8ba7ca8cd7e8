"""Trials round-trip through JSON, invalid JSON is refused, and `repr` prints the known numbers."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paredown.errors import PlanError
from paredown.plan.plan import Plan
from paredown.study.tasks.trial import Status, Trial

finite = st.floats(allow_nan=False, allow_infinity=False)
maybe = st.none() | finite
trials = st.builds(
    Trial,
    task=st.text(),
    plan=st.sampled_from([Plan(), Plan.preset("lpmm"), Plan.uniform(activation="int4/64@bf16").set("a:input", None)]),
    seed=st.integers(-(2**63), 2**63 - 1),
    status=st.sampled_from(Status),
    error=maybe,
    loss=maybe,
    predicted_peak_bytes=st.none() | st.integers(0, 2**60),
    measured_peak_bytes=st.none() | st.integers(0, 2**60),
    seconds=maybe,
    step_seconds=maybe,
    baseline_step_seconds=maybe,
    curve=st.lists(st.tuples(st.integers(1, 2**63 - 1), finite), max_size=4).map(tuple),
    reason=st.text(),
    device=st.text(),
    versions=st.dictionaries(st.text(), st.text(), max_size=3),
    commit=st.text(),
)
ONE = Trial("digits", Plan(), 3, Status.DONE, error=0.25)


@given(trials)
def test_a_trial_comes_back_from_json(trial: Trial) -> None:
    text = json.dumps(trial.to_json(), allow_nan=False)
    back = Trial.from_json(json.loads(text))
    assert back == trial
    assert hash(back) == hash(trial)
    assert isinstance(repr(back), str)


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("error", math.nan, "a finite number, or None, not nan"),
        ("loss", math.inf, "a finite number, or None, not inf"),
        ("error", "0.5", "a finite number, or None"),
        ("seed", 1.5, "a whole number of at most 64 bits, not 1.5"),
        ("seed", True, "a whole number of at most 64 bits, not True"),
        ("measured_peak_bytes", -1, "from 0 up to 2\\^63 - 1, or None, not -1"),
        ("curve", ((1, math.nan),), "pairs of a step and a finite loss"),
        ("curve", ((1,),), "pairs of a step and a finite loss"),
        ("status", "lost", "status 'lost' is unknown. Allowed: done, diverged, stopped, out_of_memory, killed, failed"),
        ("status", 3, "status 3 is unknown"),
        ("task", None, "task of a trial is text"),
        ("versions", {"torch": 2}, "a mapping of texts"),
        ("plan", "lpmm", "the plan of a trial is a Plan, not str"),
    ],
)
def test_what_is_no_trial_is_refused(field: str, value: Any, said: str) -> None:
    with pytest.raises(PlanError, match=said.replace(".", r"\.")):
        replace(ONE, **{field: value})


def test_a_status_may_be_text() -> None:
    assert replace(ONE, status="killed").status is Status.KILLED  # type: ignore[arg-type]
