"""Plans, trials, picks, records, priors, traces and sensitivities from strangers' JSON: a value or a sentence, each time."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import paredown as pare
from paredown.assignment.sensitivity import Sensitivities
from paredown.cli.inputs import read_frontier, read_source
from paredown.study.pick.answer import Frontier, Picked, Point
from paredown.study.priors.prior_files import made_up_prior, read_prior, write_prior
from paredown.study.report.record import Record
from paredown.study.tasks.trial import Status, Trial
from tests.strangers.mutations import answers, text_of, thousands, wrong_bytes, wrong_json

PLAN = pare.Plan.preset("lpmm").set("layer*:input", "int4/64@bf16", rounding="stochastic").recomputing("layer.0")
TRIAL = Trial(
    "digits", PLAN, 0, Status.DONE, error=0.1, loss=0.2, seconds=1.0, curve=((1, 2.0), (2, 1.0)), versions={"torch": "2.13"}
)
POINTS = (
    Point("lpmm", PLAN, 400, 0.12, 0.01, measured=0.1, measured_bytes=500, on_front=True, fits=True, source="measured"),
    Point("full", pare.Plan(), 1000, 0.1, 0.01, on_front=True),
)
FRONTIER = Frontier(POINTS, "error", full_bytes=1000)
PICKED = Picked("digits", PLAN, FRONTIER, "why", 500, 1000, (TRIAL,), ("full",), 1.0, "made", "lpmm", ("note",))


@lru_cache(maxsize=1)
def trace() -> Any:
    """A small one."""
    batch = torch.zeros(2, 4), torch.zeros(2, dtype=torch.int64)
    made = pare.trace_step(nn.Sequential(nn.Linear(4, 3), nn.GELU()), batch, loss=nn.functional.cross_entropy, device="cpu")
    return json.loads(json.dumps(made.to_json()))


@lru_cache(maxsize=1)
def prior(folder: Path) -> Any:
    """A made-up one, cut to a few tasks."""
    path = folder / "prior.json"
    write_prior(made_up_prior(2), path)
    return json.loads(path.read_text())


READERS: dict[str, tuple[Any, Callable[[Any], Any], int]] = {
    "plan": (PLAN.to_json(), pare.Plan.from_json, 700),
    "trial": (TRIAL.to_json(), Trial.from_json, 500),
    "frontier": (FRONTIER.to_json(), Frontier.from_json, 400),
    "pick": (PICKED.to_json(), Picked.from_json, 400),
    "record": (Record.of_pick(PICKED).to_json(), Record.from_json, 400),
    "sensitivities": ({"version": 1, "step": 3, "errors": {"a": {"int8/64@bf16": 0.1}}}, Sensitivities.from_json, 200),
}


@pytest.mark.parametrize("name", READERS)
def test_a_right_value_is_read(name: str) -> None:
    right, read, _ = READERS[name]
    assert answers(lambda: read(right))


@pytest.mark.parametrize("name", READERS)
def test_a_wrong_value_is_a_sentence(name: str) -> None:
    right, read, num = READERS[name]

    @thousands(num)
    @given(wrong_json(right))
    def check(value: Any) -> None:
        answers(lambda: read(value))

    check()


def test_wrong_plans_that_are_read_can_be_said_and_written(tmp_path: Path) -> None:
    """What gets through is a plan like any other: words, JSON and footprints of it are made or refused."""
    step = pare.Trace.from_json(trace())

    @thousands(200)
    @given(wrong_json(PLAN.to_json()))
    def check(value: Any) -> None:
        try:
            plan = pare.Plan.from_json(value)
        except pare.errors.ParedownError:
            return
        assert plan.explain() and repr(plan)
        assert pare.Plan.from_json(plan.to_json()) == plan
        answers(lambda: pare.footprint(step, plan))

    check()


def test_a_trace_whose_gradients_are_of_no_weight_is_refused() -> None:
    value = trace()
    value = {**value, "slots": [slot for slot in value["slots"] if slot["role"] != "weight"]}
    with pytest.raises(pare.errors.TraceError, match="which the trace does not have"):
        pare.Trace.from_json(value)


def test_wrong_traces_that_are_read_can_be_added_up() -> None:
    plan = pare.Plan.preset("activations4")

    @thousands(400)
    @given(wrong_json(trace()))
    def check(value: Any) -> None:
        if answers(lambda: pare.Trace.from_json(value)):
            answers(lambda: pare.footprint(pare.Trace.from_json(value), plan).by_module(1))

    check()


FILES: dict[str, tuple[Callable[[Path], Any], Callable[[Path], Any]]] = {
    "plan": (lambda _: PLAN.to_json(), pare.Plan.load),
    "trace": (lambda _: trace(), pare.Trace.load),
    "sensitivities": (lambda _: READERS["sensitivities"][0], Sensitivities.load),
    "record": (lambda _: Record.of_pick(PICKED).to_json(), Record.load),
    "pick": (lambda _: PICKED.to_json(), read_frontier),
    "source": (lambda _: {"task": "t", "runs": [{"name": "x", **TRIAL.to_json()}]}, lambda path: read_source(str(path))),
    "prior": (prior, read_prior),
}


@pytest.mark.parametrize("name", FILES)
def test_a_wrong_file_is_a_sentence(name: str, tmp_path: Path) -> None:
    make, read = FILES[name]
    right, path = make(tmp_path), tmp_path / "file.json"
    path.write_bytes(text_of(right))
    assert answers(lambda: read(path)), "the right one is read"

    @thousands(250)
    @given(st.one_of(wrong_json(right).map(text_of), wrong_bytes(text_of(right))))
    def check(data: bytes) -> None:
        path.write_bytes(data)
        answers(lambda: read(path))

    check()


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize(
    "data", [b"", b"null", b"[" * 200_000, b'{"a":' * 100_000, b"9" * 10_000, b"\xff\xfe", b"\xef\xbb\xbf{}", b"NaN"]
)
def test_deep_long_and_empty_files_are_sentences(name: str, data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    path.write_bytes(data)
    assert not answers(lambda: FILES[name][1](path))
