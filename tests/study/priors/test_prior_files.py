"""Priors as files: reading returns what was written, wrong files give an error, own priors can be added and removed, without torch."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paredown.errors import PlanError, PriorError
from paredown.plan.plan import Plan
from paredown.serial import parse_json
from paredown.study.priors import prior_files as priors
from paredown.study.priors.prior_collection import row_of
from paredown.study.priors.prior_data import PlanRow, PriorData, TaskRow, join_priors, pooled_noise
from paredown.study.priors.prior_files import (
    add,
    available,
    known_prior,
    load,
    made_up_prior,
    own_priors,
    prior_from_json,
    prior_to_text,
    remove,
)


def prior_from_text(text: str) -> PriorData:
    return prior_from_json(parse_json(text, "prior", PriorError))


MATRICES = ("errors", "counts", "memory", "measured", "noise", "diverged", "propensity", "step_ratio", "runs")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where own priors lie."""
    monkeypatch.setenv("PAREDOWN_PRIORS", str(tmp_path / "priors"))
    return tmp_path / "priors"


def gaps(seed: int = 3) -> PriorData:
    """A made-up prior in which some pairs never ran, some ran once and some diverged, drawn with odds."""
    whole, source = made_up_prior(5, 7, seeds=3), np.random.default_rng(seed)
    runs = np.where(source.uniform(size=whole.runs.shape) < 0.4, np.nan, whole.runs)
    seen = np.isfinite(runs).any(axis=2)
    rest = {
        "memory": np.where(seen, np.round(whole.memory), np.nan),
        "measured": np.full(seen.shape, np.nan),
        "diverged": np.where(seen, source.integers(0, 2, seen.shape), 0),
        "propensity": np.where(seen, np.round(source.uniform(0.1, 1, seen.shape), 3), 0),
        "step_ratio": np.where(seen, np.round(source.uniform(1, 2, seen.shape), 3), np.nan),
        "provenance": ({"device": "none", "versions": {"numpy": "2"}},),
    }
    return PriorData("gaps", "simulate", whole.tasks, whole.plans, runs, **rest)


# --- noise ------------------------------------------------------------------------------------------------------------


def test_noise_by_hand() -> None:
    """(0.1^2 + 0.1^2 + 0 + 0) / (1 + 1) = 0.1^2; a plan that ran once says nothing."""
    runs = np.array([[[0.1, 0.3], [0.2, 0.2], [0.9, np.nan]], [[0.5, np.nan], [0.1, np.nan], [np.nan, np.nan]]])
    found = pooled_noise(runs)
    assert found[0] == pytest.approx(0.1, rel=1e-12)
    assert np.isnan(found[1])


def test_plans_of_which_a_run_diverged_are_no_noise() -> None:
    runs = np.array([[[0.10, 0.12], [0.10, 0.90]]])
    rows = [TaskRow("t", "cnn", "d")], [PlanRow("a"), PlanRow("b")]
    found = [PriorData("p", "store", *rows, runs, diverged=np.array([[0, n]])).noise[0] for n in (1, 0)]
    assert found[0] == pytest.approx(np.std([0.10, 0.12], ddof=1))
    assert found[1] > 0.3, "the check would notice"


# --- files ------------------------------------------------------------------------------------------------------------


def test_a_file_holds_all_of_it(tmp_path: Path) -> None:
    before = gaps()
    priors.write_prior(before, tmp_path / "one.json")
    after = load(tmp_path / "one.json")
    assert (after.name, after.mode, after.tasks, after.plans) == (before.name, before.mode, before.tasks, before.plans)
    assert after.provenance == before.provenance
    for name in MATRICES:
        found, wanted = getattr(after, name), getattr(before, name)
        tolerance = 1e-6 if name in ("errors", "runs", "noise") else 0.5 if name in ("memory", "measured") else 1e-9
        pad = [(0, 0)] * (wanted.ndim - 1) + [(0, wanted.shape[-1] - found.shape[-1])] if name == "runs" else None
        found = np.pad(found, pad, constant_values=np.nan) if pad else found
        np.testing.assert_allclose(found, wanted, atol=tolerance, rtol=0, err_msg=name)
    assert prior_to_text(after) == prior_to_text(before)


def test_what_could_not_be_read_is_not_written(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = np.full((1, 1, 1001), 0.3)
    many = PriorData("many", "store", [TaskRow("t", "cnn", "d")], [PlanRow("p")], runs)
    with pytest.raises(PriorError, match=r"many\.json is not written, since it could not be read back: runs .* one list has 1001"):
        add(many, "many")
    monkeypatch.setattr(priors, "MOST_BYTES", 100)
    with pytest.raises(PriorError, match=r"large\.json is not written, .* it has \d+ bytes; a prior has at most 100"):
        add(made_up_prior(2, 3), "large")
    assert own_priors() == [] and not list(folder.glob("*"))


def test_reading_needs_no_torch(tmp_path: Path) -> None:
    priors.write_prior(made_up_prior(60, 39, seeds=3), tmp_path / "large.json")
    code = f"""
import sys
from paredown.study.priors.prior_files import load
load({str(tmp_path / "large.json")!r})
print(sorted({{"torch", "sqlalchemy", "scipy"}} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


def change(**parts: Any) -> Callable[[dict[str, Any]], object]:
    return lambda value: value.update(parts)


BAD: dict[str, tuple[Any, str]] = {
    "no JSON": (b"{", "not JSON"),
    "a list": (b"[]", "the JSON of a prior is an object with"),
    "no text": (b"\xff\xfe\x00", "not JSON"),
    "deep": (b"[" * 100_000, "not JSON"),
    "another version": (change(version=2), "the prior is of version 2; this paredown reads 3 to 3"),
    "a version of text": (change(version="1"), "the prior is of version '1'"),
    "an unknown field": (change(code="import os"), "field 'code' is unknown"),
    "no runs": (lambda value: value.pop("runs"), "the JSON of a prior is an object with mode, name, plans, runs, tasks, version"),
    "a mode": (change(mode="magic"), "prior.mode: one of store, simulate is needed here; this is 'magic'"),
    "no tasks": (change(tasks=[]), "a prior has tasks and plans; this one has 0 tasks and 3 plans"),
    "a task without data": (change(tasks=[{"name": "a", "family": "cnn"}] * 2), "tasks[0]: data is missing"),
    "a task of another form": (lambda value: value["tasks"][0].update(path="/root"), "tasks[0]: field 'path' is unknown"),
    "the same task twice": (lambda value: value["tasks"].__setitem__(0, value["tasks"][1]), "one of its tasks twice"),
    "a plan that is none": (
        lambda value: value["plans"][0].update(plan=[9]),
        "plans[0].plan: an object is needed here; this is [9]",
    ),
    "fewer rows": (lambda value: value["runs"].pop(), "runs has 1 rows of 3; it needs 2 of 3"),
    "fewer columns": (lambda value: value["memory"][0].pop(), "memory has 2 rows of 2, 3; it needs 2 of 3"),
    "a number for a list": (
        lambda value: value["runs"][0].__setitem__(0, 0.5),
        "prior.runs[0][0]: a list is needed here; this is 0.5",
    ),
    "NaN": (lambda value: value["runs"][0].__setitem__(0, [float("nan")]), "prior.runs[0][0][0]: a finite number"),
    "infinite": (lambda value: value["runs"][0].__setitem__(0, [1e999]), "prior.runs[0][0][0]: a finite number"),
    "a long whole number": (lambda value: value["runs"][0].__setitem__(0, [10**400]), "prior.runs[0][0][0]: a finite number"),
    "truth": (lambda value: value["runs"][0].__setitem__(0, [True]), "prior.runs[0][0][0]: a finite number"),
    "many runs": (lambda value: value["runs"][0].__setitem__(0, [0.5] * 1001), "one list has 1001"),
    "bytes below zero": (lambda value: value["memory"][0].__setitem__(0, -1), "prior.memory[0][0]: a finite number from 0 up"),
    "provenance": (change(provenance={"device": "x"}), "prior.provenance: a list is needed here"),
}


@pytest.mark.parametrize("case", BAD)
def test_wrong_files_have_a_sentence(case: str, tmp_path: Path) -> None:
    damage, sentence = BAD[case]
    text = damage
    if callable(damage):
        value = json.loads(prior_to_text(made_up_prior(2, 3)))
        damage(value)
        text = json.dumps(value).encode()
    path = tmp_path / "bad.json"
    path.write_bytes(text)
    with pytest.raises(PriorError) as raised:
        load(path)
    assert str(raised.value).startswith("bad.json")
    assert sentence in str(raised.value)
    assert str(tmp_path) not in str(raised.value)


def test_a_huge_file_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "huge.json").open("wb") as file:
        file.truncate(1 << 40)  # a sparse file: it takes no space on the disk
    with pytest.raises(PriorError, match=r"huge\.json has 1099511627776 bytes; a prior of more than 67108864 bytes is not read"):
        load(tmp_path / "huge.json")


# --- own ones ---------------------------------------------------------------------------------------------------------


def test_own_priors_come_and_go(folder: Path) -> None:
    before = available()
    add(made_up_prior(3, 4), "mine")
    assert own_priors() == ["mine"] and available() == [*before, "mine"]
    assert load("mine").name == "mine"
    with pytest.raises(PriorError, match="a prior 'mine' exists already"):
        add(made_up_prior(2, 4), "mine")
    add(made_up_prior(2, 4), "mine", replaces=True)
    assert len(load("mine").tasks) == 2
    remove("mine")
    assert available() == before and list(folder.iterdir()) == []
    with pytest.raises(PriorError, match=r"you have no prior 'mine'\. Your own: none"):
        remove("mine")


@pytest.mark.parametrize("name", ["../evil", "/tmp/evil", "", ".hidden", "a" * 65, "a b", "a\n", "stored", "simulated"])
def test_names_that_are_refused(name: str, folder: Path) -> None:
    for call in (lambda: add(made_up_prior(2, 2), name), lambda: remove(name)):
        with pytest.raises(PriorError):
            call()
    assert not folder.exists() or not list(folder.iterdir())


def test_known_joins_own_priors_of_the_mode(folder: Path) -> None:
    shipped = known_prior("store")
    add(made_up_prior(3, 4), "mine")
    add(made_up_prior(2, 4, mode="simulate"), "other")
    both = known_prior("store")
    assert len(both.tasks) == len(shipped.tasks) + 3
    assert [task.source for task in both.tasks[-3:]] == ["made_up"] * 3
    with pytest.raises(PriorError, match="mode 'magic' is unknown"):
        known_prior("magic")


# --- joining and taking apart -----------------------------------------------------------------------------------------


def test_tasks_are_left_out_by_name() -> None:
    whole = gaps()
    left = whole.without(["task 3", "task 0"])
    assert [task.name for task in left.tasks] == ["task 1", "task 2", "task 4"]
    for name in ("errors", "memory", "noise", "propensity", "diverged"):
        np.testing.assert_array_equal(getattr(left, name), getattr(whole, name)[[1, 2, 4]])


def test_joined_has_every_number_in_its_place() -> None:
    first, second = made_up_prior(3, 6, seed=1), made_up_prior(2, 9, seed=2, seeds=3)
    both = join_priors([first, second])
    assert both.errors.shape == (5, 9), "the first six plans are the same in both"
    np.testing.assert_array_equal(both.errors[:3, :6], first.errors)
    np.testing.assert_array_equal(both.errors[3:], second.errors)
    assert np.isnan(both.errors[:3, 6:]).all() and (both.counts[:3, 6:] == 0).all()
    assert [task.name for task in both.tasks[3:]] == ["task 0 (made_up)", "task 1 (made_up)"]
    np.testing.assert_array_almost_equal_nulp(both.noise, np.array([*first.noise, *second.noise]), 4)
    with pytest.raises(PriorError, match="only priors of one mode can be joined"):
        join_priors([first, made_up_prior(2, 2, mode="simulate")])


def test_shapes_that_do_not_go_together_are_refused() -> None:
    whole = made_up_prior(2, 3)
    with pytest.raises(PriorError, match=r"memory of prior 'p' is \(3, 2\); 2 tasks and 3 plans need \(2, 3\)"):
        PriorData("p", "store", whole.tasks, whole.plans, whole.runs, memory=whole.memory.T)


# --- names of plans ---------------------------------------------------------------------------------------------------


def test_a_plan_that_is_wrong_inside_says_so_when_it_is_used() -> None:
    value = json.loads(prior_to_text(made_up_prior(2, 3)))
    value["plans"][0]["plan"]["rules"] = [["weight", {"format": "int99"}]]
    with pytest.raises(PlanError):
        print(prior_from_text(json.dumps(value)).plans[0].key)


def test_plans_that_say_the_same_have_one_key() -> None:
    plan = Plan.preset("lpmm")
    again = Plan(plan.rules, "another reason", {"batch": [1]})
    assert row_of(plan).key == row_of(again).key
    assert row_of(plan.recomputing("a")).key != row_of(plan).key
