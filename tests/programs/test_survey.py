"""Many programs at once: what is counted, processes that end before their time, and programs on other devices."""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import os
from dataclasses import replace
from multiprocessing.connection import Connection

import pytest
import torch

from paredown import Plan
from tests.programs import survey as module
from tests.programs.judging import ROUNDED, drawn
from tests.programs.operations import OPERATIONS
from tests.programs.programs import Line, Options, Program
from tests.programs.running import run
from tests.programs.survey import MISMATCH, RAISED, TOO_FAR, UNREPEATABLE, Job, Verdict, judge, summary, survey


def ends_at_5(job: Job, connection: Connection) -> None:
    """The work of a process that ends in program 5."""
    for number in job.numbers:
        if number == 5:
            os._exit(3)
        connection.send(Verdict(number))


@pytest.mark.full
def test_a_process_that_ends_before_its_time_names_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_send", ends_at_5)
    seen: list[int] = []
    verdicts = survey(Job(range(3, 8), ("fp32",)), 2, lambda verdict: seen.append(verdict.number))
    assert [verdict.number for verdict in verdicts] == sorted(seen) == [3, 4, 5, 6, 7]
    assert {verdict.number: verdict.faults for verdict in verdicts if verdict.faults} == {
        5: {RAISED: ["the process ended with exit status 3"]}
    }


def test_one_process_judges_programs_here() -> None:
    verdicts = survey(Job(range(3, 5), ("fp32", "int8")), 1, lambda verdict: None)
    assert verdicts == [Verdict(3), Verdict(4)]


def test_kinds_of_faults_are_counted() -> None:
    verdicts = [
        Verdict(1),
        Verdict(2, {MISMATCH: ["a", "b"], TOO_FAR: ["c"]}),
        Verdict(3, {RAISED: ["d"]}),
        Verdict(4, {UNREPEATABLE: ["e"]}),
    ]
    assert summary(verdicts).splitlines() == [
        "4 programs: 1 exact mismatches, 1 too far, 1 raised, 1 not repeatable",
        "exact mismatches: 2",
        "too far: 2",
        "raised: 3",
        "not repeatable: 4",
    ]


def test_a_plan_that_raises_and_one_that_is_too_coarse_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> list[str]:
        raise RuntimeError("no such thing")

    monkeypatch.setattr(module, "faults_of_exact", fails)
    monkeypatch.setitem(ROUNDED, "int8", replace(ROUNDED["int8"], plan=Plan.uniform(activation="int2/64@bf16")))
    verdict = judge(3, ("fp32", "int8"))
    assert "RuntimeError: no such thing" in verdict.faults[RAISED][0]
    assert verdict.faults[TOO_FAR][0].startswith("int8: step ")
    assert "class Model(nn.Module):" in str(verdict)


def test_operations_make_tensors_on_the_device_of_their_inputs() -> None:
    """On the device "meta", which has no values: torch refuses tensors of two devices there as it does for CUDA."""
    lines = [Line("linear", "v0", ("x",), 0, 0, 1, 0.5), Line("cos", "v1", ("x",), 0, 1, 1, 0.5)]
    for row in OPERATIONS:
        line = Line(row.name, "v2", ("v0", "v1", "x")[: row.num_inputs], 0, 2, 3, 0.75)
        model = Program(1, (*lines, line), Options(device="meta")).build()
        assert model(torch.empty(64, 128, device="meta")).shape == (64, 128), row.name


def test_parameters_and_inputs_are_on_the_device() -> None:
    program, _ = drawn(3)
    outcome = run(replace(program, options=replace(program.options, device="meta", needs_input_gradient=True)))
    assert {tensor.device.type for _, tensor in outcome.tensors()} == {"meta"}
