"""A store on both databases: trials are added once, claimed by one worker, finished once, also when a reply is lost after a commit."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("sqlalchemy")

from sqlalchemy import Connection, select, update
from sqlalchemy.exc import IntegrityError, OperationalError

from paredown.errors import StoreError
from paredown.plan.plan import Plan
from paredown.study.sweeps import database
from paredown.study.sweeps.database import META, TRIALS
from paredown.study.sweeps.export import rows
from paredown.study.sweeps.status import SweepCounts, count, find_best
from paredown.study.sweeps.store import MAX_ATTEMPTS, AddResult, Store, WriteOutcome
from paredown.study.sweeps.sweep import Claim, DrawnTrial, EndedTrial, SamplingMethod, Sweep, TrialSettings, TrialSpec
from paredown.study.tasks.trial import Status, Trial
from tests.support.postgres import Postgres
from tests.support.trials import PLANS, draw


def ended(claim: Claim, **changes: Any) -> EndedTrial:
    """A claim with its result."""
    spec = claim.spec
    return EndedTrial(claim, Trial(spec.task, spec.plan, spec.seed, **{"status": Status.DONE, "error": 0.5, **changes}))


def results(store: Store) -> dict[str, Any]:
    """Key to error of what is finished."""
    return {row["key"]: row["error"] for row in rows(store) if row["state"] == "finished"}


def test_adding_again_adds_nothing_and_keeps_results(address: str) -> None:
    with Store(address) as store:
        trials = draw("a", "b", seeds=range(120), plans=PLANS)  # more than one batch
        assert store.add("s", trials) == AddResult(480, 0)
        written = store.finish("w", ended(store.claim("w", 1)[0]))
        assert written.fate is WriteOutcome.COUNTED
        assert store.add("s", [*trials, *draw("c")]) == AddResult(1, 480)
        assert store.add("other", trials) == AddResult(480, 0), "another sweep has its own trials"
        assert count(store) == [SweepCounts("other", waiting=480), SweepCounts("s", waiting=480, by_status={"done": 1})]


def test_waiting_trials_take_new_settings_and_finished_ones_do_not(address: str) -> None:
    with Store(address) as store:
        store.add("s", draw("a", seeds=(0, 1)))
        store.finish("w", ended(store.claim("w", 1)[0]))
        store.add("s", draw("a", seeds=(0, 1), timeout=7.0))
        assert [claim.spec.settings.timeout_seconds for claim in store.claim("w", 9)] == [7.0]


def test_a_raised_share_goes_on_with_what_ran_at_its_new_odds(address: str) -> None:
    plans = tuple(Plan.preset(name) for name in ("safe", "half", "lpmm", "activations4"))
    smaller = Sweep("s", ("a", "b", "c"), plans, method=SamplingMethod.UNIFORM, share=0.3, draw_seed=3)
    larger = replace(smaller, share=0.6)
    with Store(address) as store:
        taken = store.add("s", smaller.draw()).num_new
        finished = store.claim("w", 1)[0]
        store.finish("w", ended(finished))
        assert store.add("s", larger.draw()).num_there == taken, "the larger draw has all of the smaller one"
        assert {row["propensity"] for row in rows(store)} == {0.6}, "also of what has run"
        store.add("s", smaller.draw())
        assert {row["propensity"] for row in rows(store)} == {0.6}, "a smaller draw takes nothing back"
        assert set(results(store)) == {finished.key}


def test_claims_are_in_turn_and_no_more_than_asked(address: str) -> None:
    with Store(address) as store:
        trials = draw("a", "b", seeds=range(20), plans=PLANS)
        store.add("s", trials)
        first, second = store.claim("w", 3), store.claim("v", 200)
        assert [claim.spec for claim in first + second] == [one.spec for one in trials]
        assert (len(first), len(second)) == (3, 77)
        assert store.claim("w", 5) == []


def test_claims_of_a_sweep_and_without_tasks(address: str) -> None:
    with Store(address) as store:
        store.add("s", draw("a", "b"))
        store.add("t", draw("a"))
        assert [claim.sweep for claim in store.claim("w", 9, sweep="t")] == ["t"]
        assert [claim.spec.task for claim in store.claim("w", 9, without=("a", "x"))] == ["b"]


def test_many_threads_never_claim_the_same(address: str) -> None:
    with Store(address) as store:
        store.add("s", draw("a", seeds=range(120)))
        start = threading.Barrier(6)

        def claims(worker: str) -> list[str]:
            start.wait()
            return [claim.key for _ in range(25) for claim in store.claim(worker, 1)]

        with ThreadPoolExecutor(6) as pool:
            keys = [key for found in pool.map(claims, "uvwxyz") for key in found]
        assert len(keys) == len(set(keys)) == 120


def test_a_unix_socket_and_a_port_lead_to_one_store(postgres: Postgres, new_postgres: Callable[[], str]) -> None:
    address = new_postgres()
    schema = address.partition("?")[2]
    with Store(address) as store, Store(f"{postgres.socket_url}&{schema}") as other:
        store.add("s", draw("a", seeds=range(2)))
        assert len({claim.key for claim in (*store.claim("w", 1), *other.claim("v", 1))}) == 2 and not store.claim("w", 1)


def test_the_first_result_counts(address: str) -> None:
    with Store(address) as store:
        store.add("s", draw("a"))
        claim = store.claim("w", 1)[0]
        assert store.leave("w") == 1, "as if it were dead"
        again = store.claim("v", 1)[0]
        assert again.key == claim.key and again.token != claim.token and again.attempt == 2
        assert store.finish("w", ended(claim, error=0.25)).fate is WriteOutcome.COUNTED, (
            "it lived, and what it finished is not lost"
        )
        assert store.finish("v", ended(again, error=0.75)).fate is WriteOutcome.LATE
        assert results(store) == {claim.key: 0.25}


def test_deaths_are_counted_and_end_as_killed(address: str) -> None:
    with Store(address) as store:
        store.add("s", draw("a", "b"))
        for attempt in range(1, MAX_ATTEMPTS + 1):
            process, worker = store.claim("w", 2)
            assert process.attempt == worker.attempt == attempt
            fate = store.finish("w", EndedTrial(process, None, "its process was ended by SIGKILL")).fate
            assert fate is (WriteOutcome.AGAIN if attempt < MAX_ATTEMPTS else WriteOutcome.COUNTED)
            store.leave("w")
        assert count(store) == [SweepCounts("s", by_status={"killed": 2})]
        reasons = [row["reason"] for row in rows(store)]
        assert reasons == [
            f"its process was ended by SIGKILL; this happened in {MAX_ATTEMPTS} attempts, and the trial is not run again",
            f"its worker died; this happened in {MAX_ATTEMPTS} attempts, and the trial is not run again",
        ]


def test_giving_back_is_no_death(address: str) -> None:
    with Store(address) as store:
        store.add("s", draw("a", "b"))
        for _ in range(MAX_ATTEMPTS + 2):
            claims = store.claim("w", 2)
            assert [claim.attempt for claim in claims] == [1, 1]
            store.give_back(claims)
        stale = store.claim("w", 1)
        store.leave("w")
        store.claim("v", 1)
        store.give_back(stale)
        assert count(store)[0].running == 1, "what another holds is not ours to give back"


def test_a_worker_is_freed_only_if_it_did_not_beat_since(address: str) -> None:
    with Store(address) as store:
        store.add("s", draw("a"))
        store.claim("w", 1)
        seen = store.beats()["w"]
        store.beat("w")
        assert store.free("w", seen) == 0
        assert store.free("w", seen + 1) == 1
        assert store.beats() == {}
        store.beat("w")
        assert store.beats() == {"w": 1}, "it lives after all, and is known again"


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_lost_answer_loses_and_doubles_nothing(address: str, when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The connection breaks before or after each commit; every call is repeated and finds what the first one did."""
    with Store(address) as store:
        store.add("s", draw("a", seeds=range(10)))
        run, calls = store.database._run, iter(range(1000))

        def broken(work: Callable[[Connection], Any], options: dict[str, Any]) -> Any:
            is_first = next(calls) % 2 == 0
            if is_first and when == "before":
                raise OperationalError("", {}, Exception("database is locked"))
            found = run(work, options)
            if is_first:
                raise OperationalError("", {}, Exception("database is locked"))
            return found

        monkeypatch.setattr(store.database, "_run", broken)
        reported: list[str] = []
        written, claims = store.exchange("w", [], 2)
        while claims:
            results_now = [ended(claim) for claim in claims]
            written, claims = store.exchange("w", results_now, 2)
            reported += [one.claim.key for one, fate in zip(results_now, written, strict=True) if fate.fate is WriteOutcome.COUNTED]
        monkeypatch.undo()
        assert len(reported) == len(set(reported)) == 10
        assert set(results(store)) == set(reported)
        assert {row.attempts for row in store.database.read(lambda c: c.execute(select(TRIALS)).all())} == {1}


def test_the_database_itself_refuses_half_a_result(address: str) -> None:
    with Store(address) as store:
        store.add("s", draw("a"))
        for wrong in ({"state": "finished"}, {"result": "{}"}, {"state": "running"}, {"worker": "w"}):
            with pytest.raises(IntegrityError):
                store.database.write(lambda c, wrong=wrong: c.execute(update(TRIALS).values(**wrong)))


def test_results_come_back_as_they_were(address: str) -> None:
    curve = ((1, 2.5), (2, 1e-30))
    with Store(address) as store:
        store.add("s", draw("a", plans=PLANS[1:]))
        claim = store.claim("w", 1)[0]
        trial = Trial("a", PLANS[1], 0, Status.DIVERGED, loss=0.1, curve=curve, reason="ünï\n'\"", versions={"torch": "2"})
        store.finish("w", EndedTrial(claim, trial))
        assert Trial.from_json(rows(store)[0]["trial"]) == trial


def test_the_best_of_each_task_is_the_plan_of_least_mean_error_over_seeds(address: str) -> None:
    """On task a the baseline has the least error of one seed, and activations4 the least mean."""
    errors = {
        "a": {"baseline": (0.1, 0.5, 0.6), "activations4": (0.25, 0.375, 0.25)},
        "b": {"baseline": (0.5, None, None), "activations4": (0.75, 0.75, 0.75)},
        "c": {"baseline": (None, None, None), "activations4": (None, None, None)},
    }
    with Store(address) as store:
        store.add("s", draw("a", "b", "c", seeds=range(3), plans=PLANS))
        for claim in store.claim("w", 99):
            error = errors[claim.spec.task][claim.label][claim.spec.seed]
            status = Status.DIVERGED if error is None else Status.DONE
            store.finish("w", ended(claim, status=status, error=error))
        store.add("other", draw("a"))
        store.finish("w", ended(store.claim("w", 1)[0], error=0.0))
        best = find_best(store, "s")
        assert [(one.task, one.label, dict(one.errors)) for one in best] == [
            ("a", "activations4", {0: 0.25, 1: 0.375, 2: 0.25}),
            ("b", "baseline", {0: 0.5}),
        ]
        standard = np.std([0.25, 0.375, 0.25], ddof=1) / np.sqrt(3)
        assert best[0].error == pytest.approx(0.875 / 3) and best[0].standard_error == pytest.approx(standard)
        assert best[1].standard_error is None and best[1].num_not_done == 2
        assert best[0].to_json()["seeds"] == [0, 1, 2] and best[1].to_json()["standard_error"] is None
        assert [str(one) for one in best] == [
            "a: error 0.2917 with activations4 (mean of 3 seeds, standard error 0.0417)",
            "b: error 0.5000 with baseline (one seed, no standard error; 2 seeds diverged or failed)",
        ]


def test_seeds_of_one_plan_are_those_of_the_same_rules_and_the_same_mode(address: str) -> None:
    """Reasons and time limits may differ; a simulated trial of the same plan is another run."""
    plan = PLANS[1]
    runs = [
        (TrialSpec("a", plan, 0), 0.25),
        (TrialSpec("a", replace(plan, reason="another"), 1, TrialSettings(timeout_seconds=9.0)), 0.5),
        (TrialSpec("a", plan, 2, TrialSettings("simulate")), 0.75),
    ]
    with Store(address) as store:
        store.add("s", [DrawnTrial(spec, 1.0) for spec, _ in runs])
        for claim, (_, error) in zip(store.claim("w", 9), runs, strict=True):
            store.finish("w", ended(claim, error=error))
        assert [dict(one.errors) for one in find_best(store, "s")] == [{0: 0.25, 1: 0.5}]


def test_labels_of_a_later_file_replace_earlier_ones_and_results_stay(address: str) -> None:
    with Store(address) as store:
        store.add("s", Sweep("s", ("a",), PLANS).draw())
        store.finish("w", ended(store.claim("w", 1)[0]))
        assert [row["label"] for row in rows(store)] == ["baseline", "activations4"]
        store.add("s", Sweep("s", ("a",), PLANS, labels={"whole": PLANS[0], "four bits": PLANS[1]}).draw())
        assert [(row["label"], row["state"]) for row in rows(store)] == [("whole", "finished"), ("four bits", "waiting")]
        assert [claim.label for claim in store.claim("w", 1)] == ["four bits"]
        store.add("s", [DrawnTrial(TrialSpec("a", plan, 0), 1.0) for plan in PLANS])
        assert [row["label"] for row in rows(store)] == ["whole", "four bits"], "trials without labels take none away"
        made = replace(PLANS[1], made_for={"recipe": "assign 40% role"})
        store.add("t", [DrawnTrial(TrialSpec("a", plan, 0), 1.0) for plan in (PLANS[0], made)])
        assert [row["label"] for row in rows(store, "t")] == ["baseline", "assign 40% role"], "and then have their own names"


def times(store: Store) -> list[tuple[Any, ...]]:
    """Start, end and host of each trial."""
    return [(row["started_at"], row["finished_at"], row["host"]) for row in rows(store)]


def test_rows_have_the_times_and_the_host_of_the_worker(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    minutes = iter(range(60))
    monkeypatch.setattr("paredown.study.sweeps.store.utc_now", lambda: f"2026-01-31T12:{next(minutes):02}:00Z")
    monkeypatch.setattr("socket.gethostname", lambda: "one")
    with Store(address) as store:
        store.add("s", draw("a", "b", "c"))
        a, b = store.claim("w", 2)
        assert times(store) == [("2026-01-31T12:00:00Z", None, "one")] * 2 + [(None, None, None)]
        store.give_back([b])
        assert times(store)[1] == (None, None, None)
        monkeypatch.setattr("socket.gethostname", lambda: "two")
        store.claim("v", 1)
        store.finish("w", ended(a))
        assert times(store)[:2] == [("2026-01-31T12:00:00Z", "2026-01-31T12:02:00Z", "one"), ("2026-01-31T12:01:00Z", None, "two")]
        store.finish("w", ended(b))  # the first result counts, with the times and the host of its own worker
        assert times(store)[1] == ("2026-01-31T12:00:00Z", "2026-01-31T12:03:00Z", "one")
        store.finish("v", ended(store.claim("v", 1)[0])._replace(host="node 7"))
        assert times(store)[2] == ("2026-01-31T12:04:00Z", "2026-01-31T12:05:00Z", "node 7"), "an engine may run trials elsewhere"
        store.reopen("s", [Status.DONE])
        assert times(store) == [(None, None, None)] * 3


def test_trials_that_failed_can_be_run_again(address: str) -> None:
    with Store(address) as store:
        store.add("s", draw("a", seeds=range(3)))
        for claim, status in zip(store.claim("w", 3), (Status.DONE, Status.FAILED, Status.KILLED), strict=True):
            store.finish("w", ended(claim, status=status))
        assert store.reopen("s", [Status.FAILED, Status.KILLED]) == 2
        assert [claim.attempt for claim in store.claim("w", 9)] == [1, 1]


def test_a_newer_store_is_refused_and_left_alone(address: str) -> None:
    with Store(address) as store:
        store.add("s", draw("a"))
        store.database.write(lambda c: c.execute(update(META).values(value="7")))
    for may_create in (True, False):
        with pytest.raises(
            StoreError, match=r"is of version 7; this paredown reads version 2\. Nothing was changed\. Update paredown"
        ):
            Store(address, may_create=may_create)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(database, "VERSION", 7)
        with Store(address) as store:
            assert count(store)[0].waiting == 1


@pytest.mark.parametrize("version", ["1", "0", "?"])
def test_a_store_without_a_published_version_is_refused(address: str, version: str) -> None:
    with Store(address) as store:
        store.database.write(lambda c: c.execute(update(META).values(value=version)))
    for may_create in (True, False):
        with pytest.raises(StoreError, match="has no readable version"):
            Store(address, may_create=may_create)


def test_many_open_a_new_store_at_once(address: str) -> None:
    with ThreadPoolExecutor(8) as pool:
        stores = list(pool.map(lambda _: Store(address), range(8)))
    assert stores[0].add("s", draw("a")) == AddResult(1, 0)
    assert all(count(store)[0].waiting == 1 for store in stores)
    for store in stores:
        store.close()
