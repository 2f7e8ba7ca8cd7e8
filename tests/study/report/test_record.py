"""Records: made of picks and trials, scrubbed, and read from strangers' files with a sentence."""

from __future__ import annotations

import getpass
import json
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from paredown import Guard, Plan, apply, footprint, optim, trace_step
from paredown.errors import ReportError
from paredown.plan.explanation import explain_slots
from paredown.study.report.page import render
from paredown.study.report.record import MOST_CURVES, MOST_RUNS, Record, scrub
from paredown.study.report.studies import MOST_POINTS, BudgetPick, PlanMark, Study, choose, with_front
from paredown.study.tasks.trial import Status
from tests.study.report.made import ROWS, picked, record, trace, trained, trial

PATHS = (
    "/home/wilma/nets/net.py",
    "/tmp/x/y.db",
    "/Users/wilma lee/a/b.toml",
    "C:\\Users\\wilma\\net.py",
    "~/nets/net.py",
    "\\\\nas\\wilma\\net.py",
)


def test_a_file_gives_the_record_back(tmp_path: Path) -> None:
    record().save(tmp_path / "record.json")
    assert Record.load(tmp_path / "record.json") == record()


def test_the_picks_are_those_of_the_frontier_at_every_budget() -> None:
    found, study = picked(), record().studies[0]
    assert len(study.picks) > 2, "else there is nothing to look at"
    for budget in range(study.picks[0].nbytes, footprint(trace()).peak_bytes + 2000, 1009):
        label = [pick.label for pick in study.picks if pick.nbytes <= budget][-1]
        assert label == found.frontier.best(budget).label


def test_what_cannot_be_trained_is_on_the_chart_and_never_picked() -> None:
    found = picked()
    points = tuple(replace(point, trains=point.label != "low") for point in found.frontier.points)
    made = Record.of_pick(replace(found, frontier=replace(found.frontier, points=points), plan=None, label=""))
    study = made.studies[0]
    assert study.picked == ""
    assert next(mark.error for mark in study.marks if mark.label == "low") is None
    assert "low" not in {pick.label for pick in study.picks}


@given(st.lists(st.tuples(st.integers(0, 9), st.none() | st.integers(0, 9)), max_size=12))
def test_what_is_chosen_is_the_least_error_within_each_budget(rows: list[tuple[int, int | None]]) -> None:
    marks = [PlanMark(str(i), nbytes, error) for i, (nbytes, error) in enumerate(rows)]
    picks = choose(marks)
    for budget in range(11):
        errors = [mark.error for mark in marks if mark.error is not None and mark.nbytes <= budget]
        taken = [pick.label for pick in picks if pick.nbytes <= budget]
        assert bool(taken) == bool(errors)
        assert not taken or marks[int(taken[-1])].error == min(errors)


def test_memory_is_that_of_the_footprint_and_adds_up() -> None:
    study = record().studies[0]
    assert {row.label for row in study.kept} >= {"baseline", study.picked}
    for row in study.kept:
        foot = footprint(trace(), ROWS[row.label][0])
        assert row.peak_bytes == foot.peak_bytes == sum(row.by_role.values())
        told = explain_slots(trace(), ROWS[row.label][0])
        assert [(slot.slot, slot.format, slot.why) for slot in row.slots] == [(fate.slot, fate.format, fate.why) for fate in told]


def test_memory_over_the_step_has_the_peak_and_the_bytes_of_each_phase() -> None:
    for row in record().studies[0].kept:
        phases = footprint(trace(), ROWS[row.label][0]).by_tick()
        assert max(map(max, phases)) == max(map(max, row.phases)) == row.peak_bytes
        for ticks, shown in zip(phases, row.phases, strict=True):
            assert max(ticks) == max(shown) and 0 < len(shown) <= MOST_POINTS
            assert set(shown) <= set(ticks)


def test_the_first_sentence_has_means_over_seeds_and_their_standard_errors() -> None:
    study = trained().studies[0]
    before, after = (footprint(trace(), ROWS[label][0]).peak_bytes + 4096 for label in ("baseline", "low"))
    spread = 100 * np.std([0.023, 0.021, 0.025], ddof=1) / np.sqrt(3)
    assert study.summary() == (
        f"Peak memory {after / 2**20:.2f} instead of {before / 2**20:.2f} MiB; "
        f"error 2.3 % \u00b1 {spread:.1f} instead of 2.1 % \u00b1 0.1; each step 1.6x as long."
    )


@pytest.mark.parametrize(
    ("extra", "said"),
    [(0, ""), (400_000, ", above the budget of"), (4_500_000, ", above the budget of 3.58 MiB, more than the baseline")],
)
def test_a_peak_above_the_budget_or_the_baseline_is_in_the_first_sentence(extra: int, said: str) -> None:
    trials = [
        trial("baseline"),
        trial("low", error=0.02, measured_peak_bytes=footprint(trace(), ROWS["low"][0]).peak_bytes + extra),
    ]
    study = Record.of_trials("t", trials, labels={label: ROWS[label][0] for label in ("baseline", "low")}).studies[0]
    first, _, _ = replace(study, budget_bytes=picked().budget_bytes, picked="low").summary().partition(";")
    assert said in first and ("above" in first) == bool(said)
    points = [replace(point, measured_bytes=None) if point.label == "baseline" else point for point in picked().frontier.points]
    points = [replace(point, measured_bytes=point.predicted_bytes + extra) if point.label == "low" else point for point in points]
    found = replace(picked(), frontier=replace(picked().frontier, points=tuple(points)))
    first, _, _ = Record.of_pick(found).studies[0].summary().partition(";")
    assert said in first and (", measured" in first) == bool(said), "where the baseline was not measured too"


def test_without_trials_of_both_plans_the_first_sentence_says_what_is_predicted() -> None:
    low, full = (footprint(trace(), ROWS[label][0]).peak_bytes for label in ("low", "baseline"))
    said = Record.of_pick(picked()).studies[0].summary()
    assert said == (
        f"Predicted peak memory {low / 2**20:.2f} instead of {full / 2**20:.2f} MiB; error about 3.1 % instead of about 2.0 %."
    )
    nothing = replace(picked(), plan=None, label="", reason="no plan fits 1 B.")
    assert Record.of_pick(nothing).studies[0].summary() == "no plan fits 1 B."
    assert (
        Record.of_trials("t", [trial("lpmm", status=Status.DIVERGED, error=None)]).studies[0].summary()
        == "No plan has finished a trial."
    )
    failed = [trial("baseline"), trial("low", status=Status.DIVERGED, error=None)]
    study = Record.of_trials("t", failed, labels={label: ROWS[label][0] for label in ("baseline", "low")}).studies[0]
    assert "no error is known: 1 of 1 diverged" in replace(study, picked="low").summary()


def test_the_first_sentence_of_trials_without_a_budget_is_about_the_smallest_plan_that_is_as_accurate() -> None:
    errors = {"baseline": (0.10, 0.12), "activations8": (0.11, 0.14), "lpmm": (0.09, 0.10), "low": (0.20, 0.21)}
    trials = [trial(label, seed, error=error) for label, both in errors.items() for seed, error in enumerate(both)]
    labels = {label: ROWS[label][0] for label in errors}
    study = Record.of_trials("t", trials, labels=labels).studies[0]
    sizes = {mark.label: mark.nbytes for mark in study.marks}
    smaller = min(("activations8", "lpmm"), key=lambda label: sizes[label])
    assert sizes["low"] < sizes[smaller] < sizes["baseline"]
    assert study.summary().startswith(f"{smaller} is the smallest plan as accurate as the baseline: peak memory ")
    worse = Record.of_trials(
        "t", [row for row in trials if row.error is None or row.plan.changes_nothing or row.error >= 0.2], labels=labels
    )
    assert worse.studies[0].summary().startswith("2 plans, from ")


@given(st.lists(st.tuples(st.integers(0, 9), st.none() | st.integers(0, 9), st.booleans()), max_size=10), st.integers(0, 9))
def test_the_line_of_the_chart_falls_goes_through_the_pick_and_has_nothing_that_beats_it(
    rows: list[tuple[int, int | None, bool]], own: int
) -> None:
    marks = [PlanMark(str(i), nbytes, error) for i, (nbytes, error, _) in enumerate(rows)]
    picks = [BudgetPick(nbytes, str(i)) for i, (nbytes, _, is_pick) in enumerate(rows) if is_pick]
    picked = str(own) if own < len(rows) and rows[own][1] is not None else ""
    line = [(mark.nbytes, mark.error, mark.label) for mark in with_front(marks, picks, picked) if mark.on_front]
    errors = [error for _, error, _ in line]
    assert errors == sorted(set(errors), reverse=True)
    assert not picked or picked in {label for _, _, label in line}
    assert {label for _, _, label in line} <= {picked, *(pick.label for pick in picks)}


def test_no_plan_above_the_baseline_is_chosen_for_any_budget() -> None:
    marks = [PlanMark("a", 5, 0.5), PlanMark("base", 10, 0.3), PlanMark("lucky", 11, 0.2)]
    assert [pick.label for pick in choose(marks, "base")] == ["a", "base"]
    trials = [trial("baseline", error=0.3), trial("lpmm", error=0.2, measured_peak_bytes=2**30)]
    study = Record.of_trials("t", trials).studies[0]
    assert [pick.label for pick in study.picks] == ["baseline"] and study.budget_bytes is None
    assert study.marks[-1].nbytes == 2**30, "compared as measured, where that is more than predicted"


def test_trials_become_means_with_their_standard_error_and_what_went_wrong() -> None:
    trials = [trial("lpmm", seed, error=error) for seed, error in enumerate((0.2, 0.4, 0.3))]
    trials += [trial("lpmm", 3, status=Status.DIVERGED, error=None), trial("baseline")]
    study = Record.of_trials("t", trials).studies[0]
    marks = {mark.label: mark for mark in study.marks}
    mark, standard = marks["lpmm"], np.std([0.2, 0.4, 0.3], ddof=1) / np.sqrt(3)
    assert (mark.error, mark.low, mark.high) == pytest.approx((0.3, 0.3 - standard, 0.3 + standard))
    assert (mark.num_trials, mark.note) == (3, "mean of 3 seeds, standard error 5.77 points; 1 of 4 diverged")
    assert marks["baseline"].low is marks["baseline"].high is None, "one seed has no standard error"
    assert marks["baseline"].note == "one seed: no standard error" and "standard error" in study.band


def test_step_times_of_trials_are_medians_and_relative_to_the_baseline_on_their_device() -> None:
    timed = [trial("baseline", step_seconds=0.2), trial("baseline", 1, step_seconds=0.4), trial("baseline", 2, step_seconds=0.3)]
    timed += [trial("lpmm", seed, step_seconds=seconds) for seed, seconds in enumerate((0.3, 0.6, 0.9))]
    timed += [trial("activations8", step_seconds=0.6, device="another"), trial("low", step_seconds=0.1, baseline_step_seconds=0.2)]
    marks = {mark.label: mark for mark in Record.of_trials("t", timed).studies[0].marks}
    found = {label: (mark.step_seconds, mark.step_ratio, mark.step_source) for label, mark in marks.items()}
    expected = {"baseline": (0.3, 1.0), "lpmm": (0.6, 2.0), "activations8": (0.6, None)}
    for label, (seconds, ratio) in expected.items():
        assert found.pop(label) == (pytest.approx(seconds), ratio and pytest.approx(ratio), "measured")
    assert list(found.values()) == [(0.1, pytest.approx(0.5), "measured")]
    untimed = Record.of_trials("t", [trial("lpmm")]).studies[0].marks[0]
    assert (untimed.step_seconds, untimed.step_ratio, untimed.step_source) == (None, None, "")


def test_several_tasks_are_several_studies_and_losses_are_called_so() -> None:
    trials = [trial("lpmm", task="a"), trial("lpmm", task="b", error=3.2), trial("baseline", task="b", error=3.0)]
    studies = Record.of_trials("t", trials).studies
    assert [(study.task, study.metric) for study in studies] == [("a", "error"), ("b", "loss")]


def test_versions_and_commits_of_all_trials_are_there() -> None:
    trials = [trial("lpmm", versions={"torch": "2.11"}), trial("lpmm", 1, versions={"torch": "2.13"}, commit="def")]
    made = Record.of_trials("t", trials)
    assert (dict(made.versions), made.commit) == ({"torch": "2.11, 2.13"}, "abc123, def")


def test_many_trials_are_cut_and_said_to_be() -> None:
    trials = [trial("lpmm", seed) for seed in range(MOST_RUNS + 5)]
    made = Record.of_trials("t", trials)
    assert len(made.runs) == MOST_RUNS
    assert str(MOST_RUNS + 5) in made.notes[0]
    assert 0 < sum(bool(run.curve) for run in made.runs) <= MOST_CURVES
    assert made.studies[0].marks[0].num_trials == MOST_RUNS + 5, "means are over all of them"


def test_a_cut_leaves_something_of_every_task() -> None:
    trials = [trial("lpmm", seed, task=task) for task in ("a", "b", "c") for seed in range(MOST_RUNS // 2)]
    made = Record.of_trials("t", trials)
    for task in ("a", "b", "c"):
        rows = [run for run in made.runs if run.task == task]
        assert len(rows) == MOST_RUNS // 3
        assert sum(bool(run.curve) for run in rows) == 1
        assert rows[-1].seed == MOST_RUNS // 2 - 1, "the last ones are kept, in turn"


# --- where it was made ----------------------------------------------------------------------------------------------


QUOTED = ("no such file: '{}'", 'File "{}", line 3')
BARE = ("{}", "cannot open {}: refused", "({})", "images:{}#steps=3")  # where a path with blanks has no end
CASES = [form.format(path) for path in PATHS for form in (QUOTED if " " in path else QUOTED + BARE)]


@pytest.mark.parametrize("text", CASES)
def test_no_path_leaves_a_record(text: str) -> None:
    told = Record.of_trials(text, [trial("lpmm", task=text, reason=text, device=text, commit=text)])
    left = json.dumps(replace(told, notes=(text,)).to_json())
    assert all(part not in left for part in ("wilma", "/home", "/tmp", "/Users", "nas", "C:", "~"))


def test_no_host_and_no_user_leaves_a_record(monkeypatch: pytest.MonkeyPatch) -> None:
    from paredown.study.report import record as module

    monkeypatch.setattr(socket, "gethostname", lambda: "annas-box.lab.example")
    monkeypatch.setattr(getpass, "getuser", lambda: "anneliese")
    monkeypatch.setattr(Path, "home", lambda: Path("/srv/people/Anne Liese"))
    for cached in (module.scrub, module._home, module._names):
        cached.cache_clear()
    try:
        said = scrub("anneliese on annas-box.lab.example (annas-box), /srv/people/Anne Liese/nets/net.py")
    finally:
        for cached in (module.scrub, module._home, module._names):
            cached.cache_clear()
    assert said == "... on ... (...), net.py"


def test_what_is_no_path_stays() -> None:
    for text in (
        "int8/64@bf16",
        "mine.py:small",
        "tasks/mine.py:small",
        "https://example.org/a/b",
        "images:faces/of/all.npz",
        "a / b",
        "error 1/2",
        "layers.0:input",
    ):
        assert scrub(text) == text


# --- strangers' files -----------------------------------------------------------------------------------------------

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**30), 10**30) | st.floats() | st.text(max_size=8) | st.just(HUGE := 10**400),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)


def places(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths to all parts of a JSON value."""
    rows = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [at, *(path for key, part in rows for path in places(part, (*at, key)))]


def changed(value: Any, path: tuple[Any, ...], new: Any, how: str) -> Any:
    """A copy with one part replaced, left out, or added to."""
    if not path:
        return new
    copy = dict(value) if isinstance(value, dict) else list(value)
    if len(path) == 1 and how == "drop":
        del copy[path[0]]
    else:
        copy[path[0]] = changed(copy[path[0]], path[1:], new, how)
    return copy


SMALL = Record.of_trials("t", [trial("lpmm"), trial("baseline")]).with_footprints(trace(), {"lpmm": Plan.preset("lpmm")}).to_json()
SMALL["studies"][0]["kept"][0]["slots"] = SMALL["studies"][0]["kept"][0]["slots"][:2]
PLACES = places(SMALL)


@settings(max_examples=600, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.sampled_from(PLACES), VALUES, st.sampled_from(["replace", "drop"]))
def test_a_damaged_record_is_a_sentence_or_a_page(path: tuple[Any, ...], new: Any, how: str) -> None:
    try:
        made = Record.from_json(changed(SMALL, path, new, how))
    except ReportError as error:
        assert 10 < len(str(error)) < 400
        assert "\n" not in str(error)
        return
    assert render(made).startswith("<!doctype html>")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"[" * 100_000, "not JSON"),
        (b'{"version": 99, "title": "t"}', "Update paredown"),
        (b'{"version": 1, "title": "t"}', "Write it again"),
        (b'{"version": true, "title": "t"}', "version"),
        (b'{"version": 2, "title": "t", "studies": [{"task": "a", "picks": [[1, "b"]]}]}', "'b' is picked"),
        (b'{"version": 2, "title": "t", "runs": [{}]}', "task is missing"),
        (b'{"version": 2, "title": "t", "commit": NaN}', "text is needed"),
        (b'{"version": 2, "title": "\\ud800", "extra": 1}', "'extra' is unknown"),
    ],
)
def test_what_is_wrong_is_said(content: bytes, said: str, tmp_path: Path) -> None:
    (tmp_path / "record.json").write_bytes(content)
    with pytest.raises(ReportError, match=said):
        Record.load(tmp_path / "record.json")


def test_two_plans_of_one_label_are_refused() -> None:
    with pytest.raises(ReportError, match="the same label"):
        Study("t", marks=(PlanMark("a", 1), PlanMark("a", 2)))
    with pytest.raises(ReportError, match="sorted by rising bytes"):
        Study("t", marks=(PlanMark("a", 1), PlanMark("b", 2)), picks=(BudgetPick(2, "b"), BudgetPick(1, "a")))


def test_footprints_of_an_unknown_task_are_refused() -> None:
    with pytest.raises(ReportError, match="no task 'other'"):
        record().with_footprints(trace(), {"baseline": Plan()}, task="other")


def test_names_that_were_different_stay_different() -> None:
    plans = {"/home/wilma/a/plan.json": Plan(), "/home/wilma/b/plan.json": Plan.preset("lpmm")}
    trials = [
        trial(label, task=task) for label in ("baseline", "lpmm") for task in ("/home/wilma/a/net.py:f", "/home/wilma/b/net.py:f")
    ]
    made = Record.from_json(Record.of_trials("t", trials, labels=plans).to_json())
    assert [study.task for study in made.studies] == ["net.py:f", "net.py:f (2)"]
    for study in made.studies:
        assert {mark.label for mark in study.marks} == {"plan.json", "plan.json (2)"}
        assert {run.plan for run in made.runs if run.task == study.task} == {mark.label for mark in study.marks}
        assert study.written == max(study.marks, key=lambda mark: mark.nbytes).label


def test_a_session_tells_what_it_gave_and_what_its_guard_did() -> None:
    layers = [part for _ in range(3) for part in (nn.Linear(128, 128), nn.GELU())]
    model, loss = nn.Sequential(*layers), nn.functional.mse_loss
    x, y = torch.randn(512, 128), torch.randn(512, 128)
    steps = trace_step(model, (x, y), loss=loss, optimizer="adamw", device="cpu")
    session = apply(Plan.preset("activations8"), model, guard=Guard(steps, "100%"))
    optimizer = optim.AdamW(model.parameters(), lr=1e-3)
    loss(model(torch.full_like(x, torch.inf)), y).backward()
    optimizer.step()
    made = Record("t").with_session(session)
    assert made.actions == tuple(session.actions) != ()
    assert made.actions[0].after == "skipped"
    assert made.changes == tuple(session.changes)
    assert [(row.slot, row.given) for row in made.given] == [(row.slot, row.now) for row in session.explain()]
    assert made.given
    session.close()
    assert Record.from_json(made.to_json()) == made
