"""The shipped priors are those of the committed sweeps: tasks, plans, seeds, bytes; and nothing of a machine is in them."""

from __future__ import annotations

import json
import re
import socket
import tomllib
from getpass import getuser
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paredown.plan.plan import Plan
from paredown.simulate.peppp import HIGH_FORMATS, LOW_FORMATS
from paredown.study.priors import prior_files as priors
from paredown.study.priors.prior_collection import row_of
from paredown.study.priors.prior_data import PriorData
from paredown.study.priors.prior_files import load
from paredown.study.sweeps.sweep_file import load_sweep

ROOT = Path(__file__).parents[3]
SWEEPS = ROOT / "benchmarks" / "sweeps"
NAMES = ("simulated", "stored", "low_budgets", "state_budgets")
FILES = {name: Path(priors.__file__).parent / "shipped" / f"{name}.json" for name in NAMES}
COMPLETE = 11  # image sets, which every plan of the simulated prior was tried on


SUPERCLASSES = 20
THERE = list(FILES)
STORED = "stored"  # the sweep behind the stored prior


def tables(name: str) -> dict[str, Any]:
    return tomllib.loads((SWEEPS / f"{name}.toml").read_text())


def fixed_plans(name: str, tmp_path: Path) -> list[Plan]:
    """The plans of a sweep file that are the same for every task."""
    tasks, *rest = re.split(r"^(?=\[\[plans\]\])", (SWEEPS / f"{name}.toml").read_text(), flags=re.MULTILINE)
    (tmp_path / "fixed.toml").write_text(tasks + "".join(table for table in rest if "assign" not in table))
    return list(load_sweep(tmp_path / "fixed.toml").sweep.plans)


def templates(name: str) -> set[str]:
    found = [table for table in tables(name)["plans"] if "assign" in table]
    return {f"assign {a} {m}" for table in found for a, m in product(table["assign"], table["method"])}


@pytest.fixture(scope="module")
def simulated() -> PriorData:
    return load("simulated")


@pytest.fixture(scope="module")
def stored() -> PriorData:
    return load("stored")


# --- what they are of -------------------------------------------------------------------------------------------------


def test_the_simulated_prior_is_that_of_its_sweeps(simulated: PriorData, tmp_path: Path) -> None:
    names = ("simulated", "superclasses_uniform", "superclasses_cheap_first")
    assert [task.text for task in simulated.tasks[:COMPLETE]] == tables("simulated")["tasks"]
    assert {task.text for task in simulated.tasks} <= {text for name in names for text in tables(name)["tasks"]}
    assert len(simulated.tasks) == COMPLETE + SUPERCLASSES
    assert [plan.key for plan in simulated.plans] == [row_of(plan).key for plan in fixed_plans("simulated", tmp_path)]
    assert [plan.label for plan in simulated.plans] == ["baseline", *(f"{a} {b}" for a, b in product(LOW_FORMATS, HIGH_FORMATS))]


def test_the_stored_prior_is_that_of_its_sweep(stored: PriorData, tmp_path: Path) -> None:
    assert [task.text for task in stored.tasks] == tables(STORED)["tasks"]
    fixed = {row_of(plan).key for plan in fixed_plans(STORED, tmp_path)}
    assert {plan.key for plan in stored.plans if plan.plan is not None} == fixed
    assert {plan.template for plan in stored.plans if plan.plan is None} == templates(STORED)
    assert [task.family for task in stored.tasks] == ["vit", "vit", *["cnn"] * 9, "gpt", "gpt"]
    assert [task.metric for task in stored.tasks] == [*["error"] * COMPLETE, "loss", "loss"]
    assert len(stored.tasks) == 13 and len(stored.plans) >= 24


@pytest.mark.parametrize("name", ["low_budgets", "state_budgets"])
def test_a_prior_of_low_budgets_is_that_of_its_results(name: str) -> None:
    """Every trial with a chosen rate that has an error, or diverged, is an entry; a plan of two templates is in two columns."""
    found, rows = load(name), json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())["trials"]
    tasks, plans = [task.text for task in found.tasks], [plan.label for plan in found.plans]
    rows, entries = [row for row in rows if row["task"] in tasks], 0
    for row in rows:
        for label in row["plan"].split("; "):
            task = tasks.index(row["task"])
            error = found.tasks[task].blind if row["status"] == "diverged" else row["error"]
            assert found.runs[task, plans.index(label), row["seed"]] == pytest.approx(error, abs=1e-6)
            entries += 1
    assert entries == found.counts.sum() and found.diverged.sum() == sum(row["status"] == "diverged" for row in rows)


# --- what is in them --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", THERE)
def test_numbers_are_possible(name: str) -> None:
    found = load(name)
    seen = np.isfinite(found.errors)
    shares = np.array([task.metric == "error" for task in found.tasks])
    assert (found.errors[shares][seen[shares]] <= 1).all() and (found.errors[seen] >= 0).all()
    assert (found.counts[seen] >= 1).all() and (found.counts[~seen] == 0).all()
    assert (found.memory[seen] > 0).all() and ((found.propensity[seen] > 0) & (found.propensity[seen] <= 1)).all()
    for task in found.tasks:
        blind = 1 - 1 / task.answers if task.metric == "error" else np.log(task.answers)
        assert task.blind == pytest.approx(blind)


def test_where_the_simulated_prior_comes_from(simulated: PriorData) -> None:
    assert {one["device"] for one in simulated.provenance} == {"NVIDIA H200"}
    assert sum(one["trials"] for one in simulated.provenance) == simulated.counts.sum()


def test_where_the_stored_prior_comes_from(stored: PriorData) -> None:
    assert [one["sweeps"] for one in stored.provenance] == [["stored", "stored_again"], ["stored_fits"]]
    for one in stored.provenance:
        assert one["device"] == "NVIDIA H200" and one["versions"]["torch"].startswith("2.11")
    trials = sum(one["trials"] for one in stored.provenance)
    assert trials <= stored.counts.sum(), "plans that were equal are one trial and two entries"


def test_levels_are_the_low_formats(simulated: PriorData) -> None:
    assert [plan.level for plan in simulated.plans] == ["", *np.repeat(LOW_FORMATS, 9)]


# --- the files --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", THERE)
def test_they_are_as_they_were_written(name: str) -> None:
    """What is derived, noise among it, agrees with what the file says."""
    assert priors.prior_to_text(load(name)) == FILES[name].read_text()


@pytest.mark.parametrize("name", THERE)
def test_nothing_of_a_machine_is_in_them(name: str) -> None:
    text = FILES[name].read_text()
    assert not re.search(r"[\"' =](/|[A-Za-z]:\\\\|~)[A-Za-z]", text), "an absolute path"
    for word in (socket.gethostname(), getuser()):
        assert len(word) < 4 or word not in text
    for one in load(name).provenance:
        assert {"commit", "device", "versions", "trials", "sweeps", "collected"} >= set(one) and one["device"]
