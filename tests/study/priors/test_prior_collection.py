"""Priors of trials: each number in its place, whatever became of a trial; by store and by export."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("sqlalchemy")

from paredown.assignment.assign import PlanTemplate, make_plans, templates_of
from paredown.errors import PriorError, StoreError
from paredown.plan.plan import Plan
from paredown.simulate.peppp import memory_bytes, peppp_element, peppp_plan
from paredown.study.priors.prior_collection import collect, read_rows, row_of_task
from paredown.study.priors.prior_files import add, load, own_priors, prior_to_text, remove
from paredown.study.sweeps.export import export
from paredown.study.sweeps.store import Store
from paredown.study.sweeps.sweep import EndedTrial, Sweep, TrialSettings
from paredown.study.tasks.lookup import cached_task, find_task
from paredown.study.tasks.task_trace import outline_task, peppp_bytes, trace_task
from paredown.study.tasks.trial import Status, Trial

SMALL, OTHER = "digits#model=mlp,steps=5", "digits#model=mlp,steps=6"
PLANS = (Plan(), Plan.preset("lpmm"), Plan.preset("activations4"))


def row(task: str, plan: Plan, seed: int, error: float | None, **changes: Any) -> dict[str, Any]:
    """A row of an export."""
    sweep, mode, odds = changes.pop("sweep", "s"), changes.pop("mode", "store"), changes.pop("propensity", 1.0)
    trial = Trial(task, plan, seed, changes.pop("status", Status.DONE), error=error, **changes)
    return {"sweep": sweep, "task": task, "mode": mode, "propensity": odds, "trial": trial.to_json()}


def test_each_number_is_in_its_place() -> None:
    rows = [
        row(
            task,
            plan,
            seed,
            0.1 * i + 0.01 * j + 0.001 * seed,
            predicted_peak_bytes=1000 * j + 7,
            measured_peak_bytes=1000 * j + seed,
        )
        for i, task in enumerate((SMALL, OTHER))
        for j, plan in enumerate(PLANS)
        for seed in (0, 2)
    ]
    found = collect(rows, "mine")
    assert [plan.label for plan in found.plans] == ["baseline", "lpmm", "activations4"]
    assert [task.text for task in found.tasks] == [SMALL, OTHER]
    assert [task.name for task in found.tasks] == [SMALL, OTHER], "digits mlp would be both"
    for i, j in np.ndindex(2, 3):
        assert found.errors[i, j] == pytest.approx(0.1 * i + 0.01 * j + 0.001)
        assert found.counts[i, j] == 2 and found.memory[i, j] == 1000 * j + 7 and found.measured[i, j] == 1000 * j + 1
    assert found.noise == pytest.approx([np.sqrt(2) * 0.001] * 2)
    assert [task.full_bytes for task in found.tasks] == [7, 7]
    assert found.tasks[0].blind == pytest.approx(0.9) and found.tasks[0].family == "mlp"


def test_places_are_those_of_seeds_within_a_task() -> None:
    """Seeds of another task take no place: 5 and 9 are the first two of one, 0, 5 and 7 those of the other."""
    rows = [
        row(SMALL, PLANS[0], 9, 0.9),
        row(SMALL, PLANS[1], 5, 0.5),
        *(row(OTHER, PLANS[1], seed, 0.1 * seed) for seed in (7, 0, 5)),
    ]
    found = collect(rows, "mine").runs
    np.testing.assert_allclose(found[0], [[np.nan, 0.9, np.nan], [0.5, np.nan, np.nan]])
    np.testing.assert_allclose(found[1], [[np.nan] * 3, [0.0, 0.5, 0.7]])


def test_trials_that_went_wrong() -> None:
    rows = [
        row(SMALL, PLANS[0], 0, 0.2),
        row(SMALL, PLANS[1], 0, None, status=Status.DIVERGED, reason="nan"),
        row(SMALL, PLANS[2], 0, 0.8, status=Status.STOPPED, reason="hopeless"),
        *(
            row(SMALL, Plan.preset(name), 0, None, status=s)
            for name, s in (("half", Status.OUT_OF_MEMORY), ("safe", Status.FAILED))
        ),
    ]
    found = collect(rows, "mine")
    assert found.errors.tolist() == [[0.2, pytest.approx(0.9), 0.8]], "random guessing at ten digits is wrong in 90 % of cases"
    assert found.diverged.tolist() == [[0, 1, 0]]
    unknown = collect([{**r, "task": "nowhere.py:task"} for r in rows], "mine")
    assert unknown.errors.tolist() == [[0.2, 0.8, 0.8]], "the worst that was seen, where the error of random guessing is not known"


def row_error(rows: list[dict[str, Any]], **options: Any) -> str:
    with pytest.raises(PriorError) as raised:
        collect(rows, "mine", **options)
    return str(raised.value)


def test_what_cannot_be_a_prior_has_a_sentence() -> None:
    assert "no trial is finished" in row_error([])
    assert "none has an error" in row_error([row(SMALL, PLANS[0], 0, None, status=Status.FAILED)])
    both = [row(SMALL, PLANS[0], 0, 0.1), row(OTHER, PLANS[0], 0, 0.1, mode="peppp", sweep="t")]
    assert "both modes" in row_error(both)
    assert "sweep 'u' has no finished trial here. Sweeps with some: s, t" in row_error(both, sweeps=["u"])
    assert len(collect(both, "mine", sweeps=["s"]).tasks) == 1
    assert "cannot be read" in row_error([{**both[0], "trial": {"version": 1}}])


def test_a_sweep_brings_what_other_sweeps_know_of_its_tasks() -> None:
    rates = [row(task, PLANS[0], 0, error, sweep="rates") for task, error in ((SMALL, 0.3), (OTHER, 0.4))]
    found = collect([*rates, row(SMALL, PLANS[1], 0, 0.5, propensity=0.4)], "mine", sweeps=["s"])
    assert [plan.label for plan in found.plans] == ["lpmm", "baseline"]
    assert found.errors.tolist() == [[0.5, 0.3]] and found.propensity.tolist() == [[0.4, 1.0]]
    twice = collect([*rates, row(SMALL, PLANS[0], 0, 0.7)], "mine", sweeps=["s"])
    assert twice.errors.tolist() == [[0.7]], "a sweep that was named comes first"
    assert [(one["sweeps"], one["trials"]) for one in twice.provenance] == [(["s"], 1)], (
        "and provenance has only trials of the prior"
    )


def test_tasks_with_open_trials_may_be_left_out() -> None:
    open_trial = {"sweep": "s", "task": OTHER, "mode": "store", "propensity": 0.3, "trial": None}
    rows = [row(SMALL, PLANS[0], 0, 0.1), row(OTHER, PLANS[0], 0, 0.2), open_trial]
    assert [task.text for task in collect(rows, "mine").tasks] == [SMALL, OTHER]
    assert [task.text for task in collect(rows, "mine", is_finished=True).tasks] == [SMALL]
    assert len(collect([*rows[:2], {**open_trial, "sweep": "t"}], "mine", sweeps=["s"], is_finished=True).tasks) == 2
    assert "no trial is finished" in row_error([rows[1], open_trial], is_finished=True)


def test_templates_that_came_to_one_plan_are_two_columns() -> None:
    trace = trace_task(find_task(SMALL), Plan.preset("lpmm"), "cpu")
    plans = make_plans([PlanTemplate("200%"), PlanTemplate("300%", "size"), PlanTemplate("90%")], trace)
    assert [templates_of(plan) for plan in plans] == [["assign 200% role", "assign 300% size"], ["assign 90% role"]]
    found = collect([row(SMALL, plan, 0, 0.1 + i) for i, plan in enumerate(plans)], "mine")
    assert [plan.label for plan in found.plans] == ["assign 200% role", "assign 300% size", "assign 90% role"]
    assert found.errors.tolist() == [[0.1, 0.1, 1.1]]
    assert PlanTemplate.parse(found.plans[2].template).make(trace).rules == plans[1].rules


def test_memory_of_a_simulated_prior_is_peppps() -> None:
    text = "digits#batch=8,model=sumlast18,width=8,steps=5"
    found = collect([row(text, peppp_plan((4, 3), (6, 7)), 0, 0.5, mode="peppp"), row(text, Plan(), 0, 0.4, mode="peppp")], "mine")
    outline = outline_task(find_task(text))
    assert found.memory[0].tolist() == [
        memory_bytes(outline, peppp_element(4, 3), peppp_element(6, 7)),
        memory_bytes(outline, "fp32", "fp32"),
    ]
    assert found.mode == "simulate" and [plan.level for plan in found.plans] == ["e4m3", ""]
    assert peppp_bytes(text, Plan(), Path()) == found.tasks[0].full_bytes


def test_nothing_of_the_machine_is_kept() -> None:
    found = collect([row(SMALL, PLANS[0], 0, 0.2, device="NVIDIA H200", commit="abc", versions={"torch": "2"})], "mine")
    (one,) = found.provenance
    assert {**one, "collected": ""} == {
        "commit": "abc", "device": "NVIDIA H200", "versions": {"torch": "2"}, "trials": 1, "sweeps": ["s"], "collected": "",
    }  # fmt: skip


def test_no_path_of_the_machine_is_in_a_prior() -> None:
    texts = [f"images:{where}/faces.npz#model=mlp" for where in ("/data/ann", "/data/bob", "C:\\users\\ann", "~/ann", "../ann")]
    texts += ["/data/ann/mine.py:small", "mine.py:large#data=/data/ann/faces.npz"]
    found = collect([row(text, PLANS[0], 0, 0.2) for text in texts], "mine")
    assert not any(word in prior_to_text(found) for word in ("ann", "bob", "/data", "users", "~"))
    assert [task.name for task in found.tasks][3:] == [
        "images:faces.npz#model=mlp (4)", "images:faces.npz#model=mlp (5)", "small", "large",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "name", "family", "data"),
    [
        ("images:gone.npz#model=vit,superclass=3", "gone/3 vit", "vit", "gone/3"),
        ("text:deep/folder/book.txt.gz", "book gpt", "gpt", "book"),
        ("mine.py:small", "small", "own", "small"),
    ],
)
def test_tasks_that_are_not_here_are_described_by_their_names(text: str, name: str, family: str, data: str) -> None:
    found = row_of_task(text, Path())
    assert (found.name, found.family, found.data, found.answers) == (name, family, data, None)


CODE = """
from pathlib import Path
from paredown.study.tasks.lookup import find_task

def wipe(path):
    Path(path).write_text("called")
    return find_task("digits#model=mlp,steps=5")

Path("imported").write_text("")
"""


@pytest.mark.parametrize("mode", ["store", "peppp"])
def test_code_that_an_export_names_runs_only_from_a_folder_that_was_named(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("danger.py").write_text(CODE)
    Path("x.json").write_text(json.dumps([row("danger.py:wipe#path=chosen", PLANS[0], 0, 0.2, mode=mode)]))
    (task,) = collect(read_rows("x.json"), "y").tasks
    assert not Path("imported").exists() and not Path("chosen").exists()
    assert (task.name, task.family, task.answers) == ("wipe", "own", None)
    assert collect(read_rows("x.json"), "y", folder=Path()).tasks[0].family == "mlp" and Path("chosen").exists()


# --- stores and exports ----------------------------------------------------------------------------------


def stored(path: Path) -> Path:
    """A store with six finished trials."""
    sweep = Sweep("s", (SMALL, OTHER), PLANS, settings=TrialSettings())
    with Store(path) as store:
        store.add("s", sweep.draw())
        for claim in store.claim("w", 10):
            error = 0.1 * len(claim.spec.plan.rules) + 0.01 * (claim.spec.task == OTHER)
            trial = Trial(claim.spec.task, claim.spec.plan, claim.spec.seed, Status.DONE, error=error, predicted_peak_bytes=5)
            store.finish("w", EndedTrial(claim, trial))
    return path


def test_a_store_and_its_export_are_the_same_prior(tmp_path: Path) -> None:
    path = stored(tmp_path / "trials.db")
    with Store(path) as store:
        export(store, tmp_path / "trials.json")
    found = [collect(read_rows(source), "mine") for source in (path, tmp_path / "trials.json")]
    np.testing.assert_array_equal(found[0].errors, found[1].errors)
    assert found[0].errors.round(9).tolist() == [[0.0, 0.4, 0.1], [0.01, 0.41, 0.11]]


@pytest.mark.parametrize("text", ["", "{}", "[1]", '[{"task": 1}]', "[" * 50_000])
def test_a_file_that_is_no_export_has_a_sentence(text: str, tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(PriorError, match=r"x\.json"):
        read_rows(tmp_path / "x.json")


def test_a_prior_of_a_store_is_installed_and_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAREDOWN_PRIORS", str(tmp_path / "own"))
    add(collect(read_rows(stored(tmp_path / "trials.db")), "mine"), "mine")
    assert own_priors() == ["mine"] and np.isfinite(load("mine").errors).sum() == 6
    remove("mine")
    assert not own_priors()
    with pytest.raises(StoreError, match="there is no store"):
        read_rows(tmp_path / "none.db")


def test_a_task_is_read_once_and_again_when_its_file_changed(tmp_path: Path) -> None:
    x, y = np.zeros((20, 8, 8), np.uint8), np.arange(20) % 2
    arrays = {"x_train": x, "y_train": y, "x_test": x, "y_test": y}
    np.savez(tmp_path / "a.npz", **arrays)
    text = "images:a.npz#model=mlp,batch=4"
    first = cached_task(text, tmp_path)
    assert cached_task(text, tmp_path) is first
    np.savez(tmp_path / "a.npz", **{**arrays, "x_train": x[:10], "y_train": y[:10]})
    assert cached_task(text, tmp_path).data.num_train == 10
    (tmp_path / "own.py").write_text(
        "from paredown.study.tasks.lookup import find_task\ndef t(): return find_task('digits#model=mlp')\n"
    )
    assert cached_task("own.py:t", tmp_path) is not cached_task("own.py:t", tmp_path)
    assert replace(first, steps=3).steps == 3
