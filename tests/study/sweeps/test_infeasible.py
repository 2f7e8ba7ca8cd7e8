"""Sweeps with a pair of task and budget that no plan fits: its trials are recorded as infeasible, and the others run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("sqlalchemy")
pytest.importorskip("typer")

from typer.testing import CliRunner

from paredown.cli import app
from paredown.errors import PriorError, StoreError, SweepError
from paredown.plan.footprint import footprint
from paredown.plan.plan import Plan
from paredown.study.priors.prior_collection import collect
from paredown.study.report.record import Record
from paredown.study.sweeps.engines.engine import InlineEngine
from paredown.study.sweeps.export import export, merge, rows
from paredown.study.sweeps.runner import run_sweep
from paredown.study.sweeps.status import count, find_best, find_infeasible
from paredown.study.sweeps.store import Store
from paredown.study.sweeps.sweep import Sweep
from paredown.study.sweeps.sweep_file import load_sweep
from paredown.study.sweeps.worker import WorkerOptions
from paredown.study.tasks.lookup import find_task
from paredown.study.tasks.task_trace import trace_task
from paredown.study.tasks.trial import Status, Trial
from tests.support.trials import done

SMALL, LARGE = "digits#batch=32,model=mlp,steps=2", "digits#batch=512,model=mlp,steps=2,width=512"
TEXT = f"""
name = "s"
tasks = ["{SMALL}", "{LARGE}"]
seeds = [0, 1]
device = "cpu"
[[plans]]
label = "plain"
[[plans]]
assign = "SIZE"
label = "tight"
"""


def peak(task: str) -> int:
    return footprint(trace_task(find_task(task), Plan.preset("lpmm"), "cpu")).peak_bytes


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A sweep with a budget that a plan of the small task fits, and none of the large one."""
    path = tmp_path / "s.toml"
    path.write_text(TEXT.replace("SIZE", str(int(0.95 * peak(SMALL)))))
    return path


@pytest.fixture
def sweep(file: Path) -> Sweep:
    return load_sweep(file).sweep


def test_a_pair_that_no_plan_fits_is_infeasible_and_the_others_run(sweep: Sweep, tmp_path: Path) -> None:
    assert [(pair.task, str(pair.template).split()[0]) for pair in sweep.infeasible] == [(LARGE, "assign")]
    assert [task for task, _ in sweep.pairs] == [SMALL]
    said, ran = list[str](), list[str]()
    with Store(tmp_path / "t.db") as store:
        engine = InlineEngine(lambda spec: (ran.append(spec.task), done(spec))[1])
        assert run_sweep(sweep, store, engine, options=WorkerOptions(say=said.append)) == 6
        found = rows(store)
        assert str(count(store)[0]) == "s: 8 of 8 finished (6 done, 2 infeasible), 0 running, 0 waiting"
    assert len(ran) == 6 and ran.count(LARGE) == 2, "the baseline alone"
    assert said[0].startswith(f"2 of 8 trials are infeasible and do not run: {LARGE}, tight: no plan of method 'role' fits ")
    bad = [row for row in found if row["status"] == "infeasible"]
    assert [(row["task"], row["seed"], row["label"], row["error"]) for row in bad] == [(LARGE, s, "tight", None) for s in (0, 1)]
    assert all(row["reason"] == sweep.infeasible[0].reason and "the smallest needs" in row["reason"] for row in bad)
    assert len({row["key"] for row in found}) == 8, "the baseline, which has no rules either, is another trial"


def test_resuming_adds_and_runs_nothing(sweep: Sweep, tmp_path: Path) -> None:
    with Store(tmp_path / "t.db") as store:
        run_sweep(sweep, store, InlineEngine(done))
        before = rows(store)
        assert store.add(sweep.name, sweep.draw()).num_new == 0
        assert run_sweep(sweep, store, InlineEngine(done)) == 0 and rows(store) == before
        with pytest.raises(StoreError, match=r"infeasible trials have no plan to run again\. Raise the budgets"):
            store.reopen("s", [Status.FAILED, Status.INFEASIBLE])
        assert rows(store) == before


def test_a_pair_that_fits_after_a_change_of_its_task_is_no_longer_infeasible(sweep: Sweep, tmp_path: Path) -> None:
    plan = Plan.uniform(activation="int8/64@bf16")
    made = Sweep(
        "s", sweep.tasks, sweep.plans, sweep.seeds, settings=sweep.settings, pairs=((LARGE, replaced(plan, sweep)), *sweep.pairs)
    )
    with Store(tmp_path / "t.db") as store:
        run_sweep(sweep, store, InlineEngine(done))
        assert run_sweep(made, store, InlineEngine(done)) == 2
        assert count(store)[0].by_status == {"done": 8} and find_infeasible(store, "s") == []


def replaced(plan: Plan, sweep: Sweep) -> Plan:
    """The plan, as one of the template that is infeasible."""
    return Plan(plan.rules, "", sweep.infeasible[0].plan.made_for)


def test_infeasible_trials_count_for_no_plan(sweep: Sweep, tmp_path: Path) -> None:
    """Not as a failed seed of the baseline in status and reports, nor in a prior; an export and a merge keep them."""
    with Store(tmp_path / "t.db") as store:
        run_sweep(sweep, store, InlineEngine(done))
        assert [(best.label, best.num_not_done) for best in find_best(store, "s")] == [("plain", 0)] * 2
        record = Record.of_store(store)
        assert [(run.task, run.plan, run.seed) for run in record.runs if run.status == "infeasible"] == [
            (LARGE, "tight", 0),
            (LARGE, "tight", 1),
        ]
        assert record.progress[0].by_status == {"done": 6, "infeasible": 2}
        assert all("infeasible" not in mark.note for study in record.studies for mark in study.marks)
        assert export(store, tmp_path / "t.csv") == 8 and (tmp_path / "t.csv").read_text().count(",infeasible,") == 2
        with Store(tmp_path / "copy.db") as copy:
            assert merge(copy, store).num_new == 8 and find_infeasible(copy, "s") == find_infeasible(store, "s")
        bad = [row for row in rows(store) if row["status"] == "infeasible"]
    assert Trial.from_json(bad[0]["trial"]).status is Status.INFEASIBLE
    with pytest.raises(PriorError, match="of 2 trials none has an error"):
        collect(bad, name="none")


def test_a_sweep_in_which_nothing_fits_is_refused(tmp_path: Path) -> None:
    text = f'name = "s"\ntasks = ["{SMALL}"]\ndevice = "cpu"\n[[plans]]\nassign = ["0%", "1%"]\n'
    (tmp_path / "s.toml").write_text(text)
    with pytest.raises(
        SweepError, match=r"all 2 pairs of task and plan are infeasible\. Task .*, assign 0% role: no plan of method"
    ):
        load_sweep(tmp_path / "s.toml")
    (tmp_path / "s.toml").write_text(text.replace('"1%"', '"95%"'))
    sweep = load_sweep(tmp_path / "s.toml").sweep
    assert (len(sweep.plans), len(sweep.pairs), len(sweep.infeasible)) == (0, 1, 1), "plans that are made for each task suffice"


def test_a_budget_that_cannot_be_read_refuses_the_sweep(tmp_path: Path) -> None:
    (tmp_path / "s.toml").write_text(f'tasks = ["{SMALL}"]\ndevice = "cpu"\n[[plans]]\n[[plans]]\nassign = "6 pounds"\n')
    with pytest.raises(SweepError, match="size '6 pounds'"):
        load_sweep(tmp_path / "s.toml")


def test_the_command_line_says_so_first(file: Path, tmp_path: Path) -> None:
    address = str(tmp_path / "t.db")
    ran = CliRunner().invoke(app, ["sweep", "run", str(file), "--store", address, "--engine", "inline"])
    assert ran.exit_code == 0
    assert ran.stderr.splitlines()[1].startswith(f"paredown: 2 of 8 trials are infeasible and do not run: {LARGE}, tight: no plan")
    assert json.loads(ran.stdout.splitlines()[-1])["by_status"] == {"done": 6, "infeasible": 2}
    lines = CliRunner().invoke(app, ["sweep", "status", "--store", address]).stdout.splitlines()
    assert "(6 done, 2 infeasible)" in lines[0] and lines[1].startswith(
        f"  infeasible: {LARGE}, tight: no plan of method 'role' fits"
    )
    value = json.loads(CliRunner().invoke(app, ["sweep", "status", "--store", address, "--json"]).stdout)
    assert [(pair["task"], pair["label"], pair["num_trials"]) for pair in value["infeasible"]] == [(LARGE, "tight", 2)]
    again = CliRunner().invoke(app, ["sweep", "run", str(file), "--store", address, "--again", "infeasible"])
    assert again.exit_code == 1 and "infeasible trials have no plan to run again" in again.stderr
