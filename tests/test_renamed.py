"""Names of version 0.1 that work for one more release: each warns, and has the value of the new name."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from torch import nn

from paredown.cli.demo_verb import DemoResult
from paredown.cli.train_verb import TrainingRun
from paredown.pick.answer import Frontier, Picked
from paredown.plan.explanation import explain_slots
from paredown.plan.footprint import footprint
from paredown.plan.plan import Plan
from paredown.tasks.task import OptimizerSettings, Task
from paredown.tasks.trial import Status, Trial
from paredown.trace.trace_step import trace_step
from tests.cli.commands import ask
from tests.tasks.made import make_task

ADAMW = OptimizerSettings("adamw", 3e-3)


def test_the_argument_recipe_of_a_task_warns_and_sets_the_settings() -> None:
    base = make_task()
    with pytest.warns(DeprecationWarning, match="the argument recipe of Task is settings now") as caught:
        task = Task("old", base.make_model, base.data, batch=8, recipe=ADAMW)  # pyright: ignore[reportCallIssue]
    assert task.settings is ADAMW
    assert caught[0].filename == __file__, "the warning points to the caller"
    with pytest.warns(DeprecationWarning, match="recipe of Task is settings"):
        assert replace(base, recipe=ADAMW).settings is ADAMW
    with pytest.warns(DeprecationWarning, match=r"Task\.recipe is Task\.settings now"):
        assert task.recipe is ADAMW


def test_new_names_of_a_task_do_not_warn() -> None:
    base = make_task()
    assert replace(base, settings=ADAMW).settings is ADAMW
    assert Task("new", base.make_model, base.data, 5, 8, ADAMW).settings is ADAMW, "by position, as in version 0.1"


def test_as_written_and_written_bytes_warn() -> None:
    trace = trace_step(
        nn.Linear(64, 64), (torch.randn(32, 64), torch.randn(32, 64)), loss=nn.functional.mse_loss, optimizer="adamw"
    )
    plan = Plan.preset("lpmm")
    found = footprint(trace, plan)
    with pytest.warns(DeprecationWarning, match=r"Footprint\.as_written is Footprint\.baseline now"):
        assert found.as_written == found.baseline
    row = explain_slots(trace, plan)[0]
    with pytest.warns(DeprecationWarning, match="written_bytes of a slot is baseline_bytes now"):
        assert row.written_bytes == row.baseline_bytes


def test_json_of_commands_lists_its_old_fields() -> None:
    status, out, _ = ask("prior", "show", "stored", "--json")
    value = json.loads(out)
    assert status == 0 and value["deprecated"] == {"recipe": "template"}
    assert all(row["recipe"] == row["template"] for row in value["plans"])


def test_json_of_the_demo_lists_its_old_field() -> None:
    picked = Picked("digits", Plan(), Frontier(()), "nothing smaller fits", budget_bytes=100, full_bytes=250)
    runs = [TrainingRun(name, Plan(), Trial("digits", Plan(), seed, Status.DONE)) for seed, name in enumerate(("baseline", "lpmm"))]
    value = DemoResult(picked, runs[0], runs[1], seconds=1.0).to_json()
    assert value["deprecated"] == {"as_written": "baseline"} and value["as_written"] == value["baseline"] != value["with_plan"]
