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
SAME_RATES = ("simulated", "superclasses_uniform", "superclasses_cheap_first", "stored")
SUPERCLASSES = 20
THERE = list(FILES)
STORED = "stored"  # the sweep behind the stored prior
LEARNED = 5.0  # deviations of a run by which full precision is better than a blind guess


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


def distinct(found: PriorData) -> int:
    """How many plans differ in any run of the first seed on the complete rows."""
    return len({found.runs[:COMPLETE, j, 0].tobytes() for j in range(len(found.plans))})


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


def test_exponents_of_high_formats_change_no_bit(simulated: PriorData) -> None:
    """Values of 6 exponent bits are all that accumulators need: 33 of the 99 configurations differ, and full precision."""
    assert distinct(simulated) == 34
    at = [plan.label for plan in simulated.plans].index
    for low, mantissa in product(LOW_FORMATS, ("m7", "m9", "m11")):
        first, *others = (simulated.runs[:COMPLETE, at(f"{low} e{bits}{mantissa}"), 0] for bits in (6, 7, 8))
        assert all(np.array_equal(first, other) for other in others)


def test_rates_are_the_chosen_ones() -> None:
    chosen = json.loads((SWEEPS / "rates.json").read_text())
    names = [name for name in SAME_RATES if (SWEEPS / f"{name}.toml").is_file()]
    assert {"simulated", STORED} <= set(names)
    for name in names:
        for text in tables(name)["tasks"]:
            options = text.partition("#")[2].split(",")
            (rate,) = [option[3:] for option in options if option.startswith("lr=")]
            assert chosen[re.sub(r",(lr|steps)=[^,]+", "", text)] == float(rate)


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


def test_low_budgets_are_low() -> None:
    """Six tasks have three seeds of every plan that did not diverge; all plans but the baseline take 20 to 30 % of the memory."""
    found = load("low_budgets")
    share = found.memory / np.array([task.full_bytes for task in found.tasks], dtype=float)[:, None]
    assert (np.nanmin(share, axis=1) < 0.25).all() and (share[:, 1:][np.isfinite(share[:, 1:])] <= 0.3).all()
    whole = ((found.counts == 3) | (found.diverged > 0) | (found.counts == 0)).all(axis=1) & ((found.counts > 0).sum(axis=1) >= 7)
    assert whole.sum() == 6 and {task.family for task, is_whole in zip(found.tasks, whole, strict=True) if is_whole} == {
        "cnn",
        "vit",
        "gpt",
    }


def test_networks_with_much_state_train_with_three_seeds() -> None:
    """Nine of the twelve tasks; every plan but the baseline takes 26 to 30 %, and ran with all seeds unless it diverged."""
    found = load("state_budgets")
    share = found.memory / np.array([task.full_bytes for task in found.tasks], dtype=float)[:, None]
    assert len(found.tasks) == 9 and {task.family for task in found.tasks} == {"cnn", "vit", "gpt"}
    assert np.nanmin(share) > 0.26 and (share[:, 1:][np.isfinite(share[:, 1:])] <= 0.3).all() and np.isnan(found.measured).all()
    assert ((found.counts == 3) | (found.diverged > 0) | (found.counts == 0)).all()
    blind = np.array([task.blind for task in found.tasks], dtype=float)
    assert (found.errors[:, [plan.label for plan in found.plans].index("baseline")] <= 0.9 * blind).all()


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


def check_rows(found: PriorData, num_rows: int) -> np.ndarray:
    """Complete, three seeds of eight plans, noise known; by how much full precision is better than random guessing."""
    assert np.isfinite(found.errors[:num_rows]).all()
    assert ((found.counts[:num_rows] >= 3).sum(axis=1) >= 8).all(), "three seeds"
    assert (found.noise[:num_rows] > 0).all()
    full = found.errors[:num_rows, [plan.label for plan in found.plans].index("baseline")]
    blind = np.array([task.blind for task in found.tasks[:num_rows]], dtype=np.float64)
    return blind - full


def test_rows_of_the_stored_prior(stored: PriorData) -> None:
    assert (check_rows(stored, len(stored.tasks)) > LEARNED * stored.noise).all()
    assert not stored.diverged.any()


def test_rows_of_the_simulated_prior(simulated: PriorData) -> None:
    """At full precision a tenth of the way from random guessing to no error, at least; most noise is that of formats that do not learn."""
    assert (check_rows(simulated, COMPLETE) > [0.1 * (task.blind or np.nan) for task in simulated.tasks[:COMPLETE]]).all()


def test_superclasses_are_sampled_with_known_odds(simulated: PriorData) -> None:
    configurations = [j for j, plan in enumerate(simulated.plans) if plan.level]
    sampled = np.isfinite(simulated.errors[COMPLETE:][:, configurations])
    assert len(sampled) == SUPERCLASSES and sampled.mean(axis=1).min() >= 0.3
    odds = simulated.propensity[COMPLETE:][:, configurations][sampled]
    assert (odds < 1).all() and len(np.unique(odds)) > 20, "uniform on some, cheap first on some"


def test_superclasses_are_learned(simulated: PriorData) -> None:
    """Full precision is not among what was drawn; formats that lose nothing on complete rows are held to what that is held to there."""
    wide = [j for j, plan in enumerate(simulated.plans) if plan.level in ("e4m3", "e4m4", "e5m2", "e5m3")]
    blind = np.array([task.blind for task in simulated.tasks[COMPLETE:]], dtype=np.float64)
    assert (np.nanmean(simulated.errors[COMPLETE:, wide], axis=1) < 0.9 * blind).all()


def test_measured_bytes_stand_beside_predicted_ones(stored: PriorData) -> None:
    """docs/priors.md says where they are apart: one copy of the logits of a text, and scratch where tensors are packed."""
    assert np.isfinite(stored.measured).all()
    ratio = stored.measured / stored.memory
    assert ((ratio > 0.85) & (ratio < 1.25)).all()
    assert np.median(abs(ratio - 1)) < 0.1
    plain = [task.name for task in stored.tasks].index("cifar10 resnet18"), [plan.label for plan in stored.plans].index("baseline")
    assert abs(ratio[plain] - 1) < 0.02


def test_simulated_memory_is_counted_not_measured(simulated: PriorData) -> None:
    assert np.isnan(simulated.measured).all() and np.isfinite(simulated.memory[np.isfinite(simulated.errors)]).all()


def test_where_the_simulated_prior_comes_from(simulated: PriorData) -> None:
    assert {one["device"] for one in simulated.provenance} == {"NVIDIA H200"}
    assert sum(one["trials"] for one in simulated.provenance) == simulated.counts.sum()


def test_where_the_stored_prior_comes_from(stored: PriorData) -> None:
    assert [one["sweeps"] for one in stored.provenance] == [["stored", "stored_again"], ["stored_fits"]]
    for one in stored.provenance:
        assert one["device"] == "NVIDIA H200" and one["versions"]["torch"].startswith("2.11")
    trials = sum(one["trials"] for one in stored.provenance)
    assert trials <= stored.counts.sum(), "plans that were equal are one trial and two entries"


def test_what_picks_are_judged_by_has_three_seeds(stored: PriorData, simulated: PriorData) -> None:
    """On image sets; configurations that are one run with the first seed share the seeds of one of them."""
    for found, budget in ((stored, 0.4), (simulated, 0.22)):
        for row, task in enumerate(found.tasks):
            if task.metric != "error" or "/" in task.data:
                continue
            most: dict[bytes, int] = {}
            for j in np.flatnonzero(found.memory[row] <= budget * float(task.full_bytes or np.nan)):
                run = found.runs[:COMPLETE, j, 0].tobytes()
                most[run] = max(most.get(run, 0), int(found.counts[row, j]))
            assert len(most) >= 9 and set(most.values()) == {3}


def test_a_place_of_a_run_is_its_seed(stored: PriorData) -> None:
    """Plans that ran once ran with the first seed: those of one seed can be compared."""
    assert set(np.unique(stored.counts)) == {1, 3} and np.isfinite(stored.runs[..., 0]).all()


def test_levels_are_the_low_formats(simulated: PriorData) -> None:
    assert [plan.level for plan in simulated.plans] == ["", *np.repeat(LOW_FORMATS, 9)]


# --- the files --------------------------------------------------------------------------------------------------------


def test_they_are_small_and_say_what_they_hold() -> None:
    assert sum(FILES[name].stat().st_size for name in THERE) <= 2_000_000
    for path in (FILES[name] for name in THERE):
        value = json.loads(path.read_text())
        assert value["about"] == priors.ABOUT


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
