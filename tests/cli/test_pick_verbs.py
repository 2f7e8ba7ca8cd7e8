"""What `pick` writes and says beside the plan."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paredown import Plan, evaluate, pick
from paredown.cli.pick_verbs import record_of
from paredown.study.priors.prior_files import made_up_prior, write_prior
from paredown.study.sweeps import measurement
from paredown.study.tasks.lookup import find_task
from paredown.study.tasks.trial import Trial
from tests.cli.commands import ask, asked_json

MLP = "digits#model=mlp,steps=3"


@pytest.fixture
def prior(folder: Path) -> str:
    """A made-up prior in a file."""
    write_prior(made_up_prior(), folder / "few.json")
    return "few.json"


def test_what_failed_is_told_without_where_it_lay(folder: Path, prior: str, monkeypatch: pytest.MonkeyPatch) -> None:
    count, whole = 0, measurement.evaluate

    def once(task: object, plan: Plan, **options: object) -> Trial:
        nonlocal count
        count += 1
        if count == 1:
            raise FileNotFoundError(2, "No such file or directory", str(folder / "my tables" / "words.txt"))
        return whole(task, plan, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(measurement, "evaluate", once)
    words = ("pick", MLP, "--budget", "8MiB", "--evaluations", "2", "--prior", prior, "--device", "cpu", "--record", "picked.json")
    value = asked_json(*words)
    written = Path("picked.json").read_text()
    assert {key: part for key, part in value.items() if key != "files"} == json.loads(written)
    assert "No such file or directory: 'words.txt'" in written, "it is told"
    assert str(folder) not in written


def test_a_margin_of_error_takes_the_budget_of_the_baseline_unless_one_is_given(folder: Path, prior: str) -> None:
    words = ("pick", MLP, "--evaluations", "0", "--prior", prior, "--device", "cpu", "--max-error-increase")
    value = asked_json(*words, "1", "--out", "a.json")
    assert value["budget_bytes"] == value["full_bytes"] and "at most 1 above the baseline's" in value["reason"]
    labels = {point["label"]: point["predicted_bytes"] for point in value["frontier"]["points"]}
    assert labels[value["label"]] == min(labels.values()), "every error is within 1 of the baseline's"
    sure = asked_json(*words, "0.001", "--confidence", "0.99", "--budget", "100%", "--out", "b.json")
    assert labels[sure["label"]] > labels[value["label"]] and "a probability of 99 % or more" in sure["reason"]
    status, _, err = ask(*words, "0.1", "--confidence", "1.5", "--out", "c.json")
    assert status == 1 and "confidence is 1.5; it is a probability above 0.5 and below 1" in err


# --- one number for one peak ----------------------------------------------------------------------------------------------


def test_peaks_are_those_that_trials_predict(folder: Path) -> None:
    """An optimizer whose state no plan formats takes scratch of its own."""
    names = ("baseline", "activations8", "lpmm")
    plans = [Plan(), Plan.preset("activations8"), Plan.preset("lpmm")]
    expected = [evaluate(MLP, plan, device="cpu").predicted_peak_bytes for plan in plans]
    words = [word for name in names for word in ("--plan", name)]
    value = asked_json("estimate", MLP, "--device", "cpu", "--budget", "100%", *words)
    assert [row["peak_bytes"] for row in value["plans"]] == expected and value["budget_bytes"] == expected[0]
    for name, peak in zip(names, expected, strict=True):
        told = asked_json("explain", name, "--model", MLP, "--device", "cpu")
        assert (told["peak_bytes"], told["baseline_bytes"]) == (peak, expected[0])


@pytest.mark.parametrize("budget", ["1.05MiB", "80%", "99%", "100%"])
def test_a_plan_for_a_budget_is_within_it_when_it_trains(folder: Path, budget: str) -> None:
    made = asked_json("plan", MLP, "--budget", budget, "--device", "cpu")
    run = asked_json("train", MLP, "--budget", budget, "--device", "cpu")["runs"][-1]
    assert run["predicted_peak_bytes"] == made["peak_bytes"] <= made["budget_bytes"]
    assert run["plan"]["rules"] == made["plan"]["rules"]
    assert made["baseline_bytes"] == evaluate(MLP, Plan(), device="cpu").predicted_peak_bytes


def test_the_page_of_a_pick_has_the_peaks_of_its_frontier(folder: Path) -> None:
    picked = pick(MLP, "90%", 0, prior=made_up_prior(), device="cpu")
    study = record_of(picked, find_task(MLP), "cpu").studies[0]
    peaks = {point.label: point.predicted_bytes for point in picked.frontier.points}
    assert len(study.kept) > 2 and {row.label: row.peak_bytes for row in study.kept}.items() <= peaks.items()
    assert record_of(picked, find_task(MLP), "cuda").studies[0].kept != study.kept, "that of another device is another"


def test_the_pareto_front_is_printed_with_the_width_of_its_intervals(folder: Path, prior: str) -> None:
    words = ("pick", MLP, "--budget", "90%", "--evaluations", "0", "--prior", prior, "--device", "cpu")
    value = asked_json(*words)
    _, out, _ = ask(*words, "--overwrite")
    head = next(i for i, line in enumerate(out.splitlines()) if "+- 90 %" in line)
    points = {point["label"].replace("_", " "): point for point in value["frontier"]["points"]}
    printed = [line for line in out.splitlines()[head + 1 :] if line.strip("* ").partition("  ")[0] in points]
    assert any(line.startswith("* ") for line in printed)
    names = [line.strip("* ").partition("  ")[0] for line in printed]
    for name in names:  # none is beaten in both
        mine = points[name]
        assert not any(p["predicted_bytes"] < mine["predicted_bytes"] and p["mean"] < mine["mean"] for p in points.values())
