"""The collector of trials at low budgets: what it runs next, what it never runs twice, and the rows that it writes. Nothing is trained."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from paredown.plan.plan import Plan


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).parent.parent / "benchmarks"))
    import collect_low_budgets  # type: ignore[import-not-found]

    yield collect_low_budgets
    for name in ("collect_low_budgets", "low_budget_tasks"):
        sys.modules.pop(name, None)


PLANS = [{"plan": plan.to_json(), "bytes": 100} for plan in (Plan(), Plan.preset("activations4"), Plan.preset("activations2"))]
TASKS = [
    {"data": "images:a.npz", "how": {"model": "vit", "steps": 3}, "plans": PLANS},
    {"data": "images:b.npz", "how": {"model": "gpt", "steps": 3}, "plans": PLANS, "order": [2]},
]


def trial(job: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {"task": job["task"], "plan": job["plan"], "seed": job["seed"], "status": "done", "loss": 1.0, "error": 0.5, **changes}


def ran(collection: Any, best: float, diverges: int | None = None) -> list[str]:
    """All jobs one after the other: the rate `best` has the least loss, plan `diverges` of the first task diverges."""
    keys: list[str] = []
    while (job := collection.next_job()) is not None:
        keys.append(job["key"])
        is_bad = diverges is not None and job["task"].startswith("images:a") and f"plan {diverges} " in job["key"]
        collection.add(
            job["key"], trial(job, loss=0.5 if f"lr={best}," in job["task"] else 1.0, status="diverged" if is_bad else "done")
        )
    return keys


def test_rates_first_then_seed_after_seed(collector: Any) -> None:
    keys = ran(collector.Collection(TASKS, []), best=0.001)
    assert len(keys) == len(set(keys)), "nothing twice"
    assert all(" plan 0 seed 0" in key for key in keys[:6]) and sum("lr=" in key for key in keys[:6]) == 6
    rest = [(key.partition("#")[0][-5], key.partition(" plan ")[2]) for key in keys[6:]]
    by_seed = [[("a", f"1 seed {s}"), ("a", f"2 seed {s}")] for s in range(3)]
    assert rest[:3] == [("b", "2 seed 0"), *by_seed[0]], "the order of a task; its baseline with seed 0 is that of its rate"
    assert rest[3:] == [("a", "0 seed 1"), ("b", "2 seed 1"), *by_seed[1], ("a", "0 seed 2"), ("b", "2 seed 2"), *by_seed[2]]
    assert all("lr=0.001" in key for key in keys[6:])


def test_a_second_call_runs_the_rest(collector: Any, tmp_path: Path) -> None:
    whole, first = ran(collector.Collection(TASKS, []), 0.001), collector.Collection(TASKS, [])
    done = [(job["key"], trial(job)) for job in [first.job(0, 0, 0, lr) for lr in collector.rates_of({"model": "vit"})]]
    (tmp_path / "trials-0.jsonl").write_text("".join(json.dumps({"key": key, "trial": one}) + "\n" for key, one in done))
    again = ran(collector.Collection(TASKS, [tmp_path / "trials-0.jsonl"]), 0.001)
    assert not set(again) & {key for key, _ in done} and len(again) + len(done) == len(whole)


def test_a_plan_that_diverged_and_a_job_that_fails_are_not_run_again(collector: Any) -> None:
    keys = ran(collector.Collection(TASKS, []), 0.001, diverges=1)
    assert [key.partition(" plan ")[2] for key in keys if key.startswith("images:a") and "plan 1" in key] == ["1 seed 0"]
    collection = collector.Collection(TASKS, [])
    first = collection.next_job()
    for _ in range(collector.MOST_ATTEMPTS):
        assert collection.next_job() == first
        collection.running.add(first["key"])
        assert collection.next_job() != first
        collection.fail(first["key"], "its process died")
    assert collection.next_job() != first and len(collection.reasons) == collector.MOST_ATTEMPTS


def test_rows_have_step_times_and_chosen_rates_alone(collector: Any, tmp_path: Path) -> None:
    collection, jobs = collector.Collection(TASKS, []), []
    for lr, index in ((0.001, 0), (0.0005, 0), (0.001, 1)):
        jobs.append(collection.job(0, index, 0, lr))
    lines = [{"key": job["key"], "trial": trial(job)} for job in jobs]
    lines += [
        {"how": TASKS[0]["how"], "plan": plan["plan"], "seconds": seconds}
        for plan, seconds in zip(PLANS[:2], (0.1, 0.3), strict=True)
    ]
    (tmp_path / "all.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    collector.write_rows([tmp_path / "all.jsonl"], tmp_path / "rows.json")
    rows = [row["trial"] for row in json.loads((tmp_path / "rows.json").read_text())]
    assert [(row["step_seconds"], row["baseline_step_seconds"]) for row in rows] == [(0.1, 0.1), (0.3, 0.1)]


def test_steps_of_a_network_are_timed_once(collector: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first task of the ViT runs no plan: its steps are those of the second one."""
    monkeypatch.setattr(collector, "known_task", lambda name: name)
    monkeypatch.setattr(collector, "step_seconds", lambda task, plan, device: 0.1 + len(plan.rules))
    vit = {**TASKS[0], "data": "images:c.npz"}
    collector.time_steps([{**TASKS[0], "order": []}, vit, TASKS[1], {**vit, "order": [0]}], tmp_path, seconds=60.0)
    rows = [json.loads(line) for line in (tmp_path / "times.jsonl").read_text().splitlines()]
    assert [(row["how"]["model"], row["plan"]) for row in rows] == [
        *(("vit", row["plan"]) for row in PLANS),
        ("gpt", PLANS[2]["plan"]),
    ]


def test_a_group_of_tasks_has_all_seeds_before_the_next(collector: Any) -> None:
    first, second = ({**task, "order": [1], "group": group} for task, group in zip(TASKS, (1, 0), strict=True))
    again = {**second, "order": [2], "group": 2}  # the same task with other plans later
    keys = ran(collector.Collection([first, second, again], []), best=0.001)
    assert len(keys) == len(set(keys)) and all(" plan 0 seed 0" in key for key in keys[:6])
    rest = [(key.partition("#")[0][-5], key.partition(" plan ")[2]) for key in keys[6:]]
    assert rest == [(name, f"{plan} seed {seed}") for name, plan in (("b", 1), ("a", 1), ("b", 2)) for seed in range(3)]


def test_weights_to_start_from_are_trained_first_and_are_no_trials(
    collector: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAREDOWN_DATA", str(tmp_path))
    tuned = {**TASKS[0], "how": {**TASKS[0]["how"], "lr": 1e-5, "start": "w.pt"}, "start": "images:c.npz#model=vit", "tf32": True}
    collection = collector.Collection([tuned, TASKS[1]], [])
    first = collection.next_job()
    assert (first["key"], first["save"], first["tf32"]) == ("start w.pt", "w.pt", True)
    collection.running.add(first["key"])
    assert collection.next_job()["task"].startswith("images:b"), "the other task does not start from these weights"
    (tmp_path / "w.pt").touch()
    collection.add(first["key"], trial(first))
    assert not collection.trials
    keys = ran(collection, best=0.001)
    assert keys[0].startswith("images:a") and "lr=1e-05" in keys[0] and "start=w.pt" in keys[0] and len(keys) == len(set(keys))
    assert sum(key.startswith("images:a") for key in keys) == 3 * len(PLANS), "one rate: every plan with every seed"


def test_rows_of_the_loss(collector: Any, tmp_path: Path) -> None:
    job = collector.Collection(TASKS, []).job(0, 1, 0, 0.001)
    (tmp_path / "all.jsonl").write_text(json.dumps({"key": job["key"], "trial": trial(job)}) + "\n")
    collector.write_rows([tmp_path / "all.jsonl"], tmp_path / "rows.json", "some", "loss")
    (row,) = json.loads((tmp_path / "rows.json").read_text())
    assert (row["sweep"], row["trial"]["error"], row["task"]) == (
        "some",
        1.0,
        "images:a.npz#lr=0.001,metric=loss,model=vit,steps=3",
    )


def test_tasks_whose_baseline_does_not_train_are_left_out(collector: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten answers: the loss of random guessing is 2.30. The third task trains with one seed of three, as far as a loss of 1.9."""
    data = SimpleNamespace(num_answers=10)
    monkeypatch.setattr(collector, "known_task", lambda text: SimpleNamespace(data=data))
    losses = {"a": (1.0, 1.1, 1.2), "b": (300.0, 5.0, None), "c": (1.9, 40.0, 3.0)}
    plans = [PLANS[0]["plan"], PLANS[1]["plan"]]
    rows = [{"task": t, "trial": {"plan": plan, "loss": loss}} for t, of in losses.items() for loss in of for plan in plans]
    assert [row["task"] for row in collector.trained(rows)] == ["a"] * 6


def test_plans_of_a_set_fit_its_share(collector: Any) -> None:
    task = collector.find_task("digits#batch=64,dim=64,model=vit,num_layers=2,patch=4,steps=2,lr=0.001")
    chosen = collector.SETS["state"]
    every = collector.plans_of(task, replace(chosen, most_share=1.0), "cpu")
    shares = sorted(row["bytes"] / every[0]["bytes"] for row in every[1:])
    rows = collector.plans_of(task, replace(chosen, most_share=shares[1]), "cpu")
    assert rows[0]["plan"] == Plan().to_json(), "the baseline is there in any case"
    assert (
        sorted(row["bytes"] / rows[0]["bytes"] for row in rows[1:]) == [share for share in shares if share <= shares[1]] != shares
    )
