"""The demo prints what its trials measured, keeps its budget, writes its files, and fits one screen."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

import pytest
import torch

import paredown
from paredown.cli.demo_verb import OWN_MODEL, TASK, DemoResult, MeasuredFit
from paredown.sizes import parse_bytes
from paredown.study.tasks.lookup import find_task
from paredown.study.tasks.trial import Status, Trial
from tests.cli.commands import CONTROL, ask, asked_json, environment, on_terminal, piped

MIB = 2**20
HEADLINE = re.compile(
    r"Peak (\S+) instead of (\S+) MiB \(budget (\S+)\), error (\S+) % \+- (\S+) instead of (\S+) % \+- (\S+), each step (\S+)x as long\."
)


def headline(value: dict[str, Any]) -> list[str]:
    """The numbers of the first sentence, from the trials of the JSON."""
    columns = [value["with_plan"], value["baseline"]]
    peaks = [max(trial["measured_peak_bytes"] for trial in trials) for trials in columns]
    errors = [[100 * trial["error"] for trial in trials] for trials in columns]
    after, before = (median(trial["step_seconds"] for trial in trials) for trials in columns)
    texts = [f"{peak / MIB:.1f}" for peak in (*peaks, value["budget_bytes"])]
    texts += [text for each in errors for text in (f"{fmean(each):.1f}", f"{stdev(each) / 3**0.5:.1f}")]
    return [*texts, f"{after / before:.1f}"]


def test_the_first_sentence_is_what_was_measured(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    printed: list[dict[str, Any]] = []
    told = DemoResult.in_words
    monkeypatch.setattr(DemoResult, "in_words", lambda self, files: (printed.append(self.to_json()), told(self, files))[1])
    monkeypatch.setenv("COLUMNS", "100")
    status, out, _ = ask("demo", "--steps", "5", "--seed", "4")
    assert status == 0
    found = HEADLINE.match(" ".join(out.partition("\n\n")[0].split()))
    assert found is not None and list(found.groups()) == headline(printed[0])
    lines = out.splitlines()
    assert len(lines) <= 29 and max(map(len, lines)) <= 100, "one screen"
    assert lines[-3:] == [f"  {line}" for line in OWN_MODEL]
    assert [trial["seed"] for trial in printed[0]["with_plan"]] == [4, 5, 6]


def test_the_plan_is_chosen_for_the_measured_budget_and_is_in_the_files(folder: Path) -> None:
    value = asked_json("demo", "--steps", "4", "-o", "out")
    trials = [Trial.from_json(trial) for trial in (*value["baseline"], *value["with_plan"])]
    assert len({(trial.seed, trial.plan.key) for trial in trials}) == 6
    assert value["budget_bytes"] == value["full_bytes"] // 2
    assert value["full_bytes"] == pytest.approx(max(trial.measured_peak_bytes or 0 for trial in trials[:3]), abs=1024)
    assert value["peak_bytes"] == max(trial.measured_peak_bytes or 0 for trial in trials[3:]) <= value["budget_bytes"]
    plan = paredown.Plan.load("out/plan.json")
    assert plan.rules == trials[-1].plan.rules and plan.made_for["method"] == "role", "the library's own choice"
    page = Path(value["files"]["page"]).read_text()
    assert "paredown demo" in page and str(folder) not in page
    assert "no optimizer of paredown.optim" not in page, "asked and given are those of a training"


@pytest.mark.parametrize(
    ("budget", "status", "said"), [("1%", 3, "no plan of method 'role' fits"), ("30MiB", 2, "and fits 30.00 MiB")]
)
def test_budgets_that_are_too_small_or_large(folder: Path, budget: str, status: int, said: str) -> None:
    found, out, err = ask("demo", "--steps", "4", "--budget", budget)
    assert found == status and not out and said in " ".join(err.replace("\u2502", " ").split())


def test_the_lines_for_the_users_own_model_run() -> None:
    task = find_task(TASK)
    model, batch = task.make_model(0), next(task.data.batches(task.batch, seed=0, device=torch.device("cpu")))
    names: dict[str, Any] = {"paredown": paredown, "model": model, "batch": batch, "loss_fn": task.loss}
    exec("\n".join(OWN_MODEL), names)
    full, planned = (paredown.footprint(names["trace"], plan).peak_bytes for plan in (paredown.Plan(), names["plan"]))
    assert planned <= parse_bytes("50%", whole=full)
    optimizer = paredown.optim.AdamW(model.parameters())
    task.loss(model(batch[0]), batch[1]).backward()
    optimizer.step()
    assert any("int8/64@bf16" in row.now for row in names["session"].explain())
    names["session"].close()


def a_result(errors: tuple[float, float], standard_error: float) -> DemoResult:
    """A result of two columns of equal trials."""
    columns = [
        tuple(
            Trial("t", paredown.Plan(), seed, Status.DONE, error=error, measured_peak_bytes=MIB, step_seconds=0.1)
            for seed in range(3)
        )
        for error in errors
    ]
    fit = MeasuredFit(None, 2 * MIB, MIB, paredown.Plan(), MIB)  # type: ignore[arg-type]
    return DemoResult(fit, *columns, errors[1] - errors[0], standard_error)


@pytest.mark.parametrize(("standard_error", "is_noise"), [(0.006, True), (0.004, False)])
def test_noise_is_up_to_two_standard_errors(standard_error: float, is_noise: bool) -> None:
    for errors in ((0.04, 0.05), (0.05, 0.04)):
        result = a_result(errors, standard_error)
        assert result.is_noise is is_noise
        sign = "+" if errors[1] > errors[0] else "-"
        said = result._accuracy()  # pyright: ignore[reportPrivateUsage]
        assert f"{sign}1.0 % +- {100 * standard_error:.1f}" in said and said.startswith("the same" if is_noise else "not the same")


def test_a_peak_above_the_budget_is_said() -> None:
    result = a_result((0.04, 0.04), 0.01)
    assert "(budget 1.0)" in result.headline()
    unknown = replace(result, packed=tuple(replace(trial, measured_peak_bytes=None) for trial in result.packed))
    assert unknown.headline().startswith("Predicted peak 1.0 instead of 2.0 MiB")
    above = replace(result, fit=replace(result.fit, plan_bytes=MIB + 1))
    assert "(above the budget 1.0)" in above.headline()


def test_what_makes_quantizing_quick_is_named_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    result = a_result((0.04, 0.04), 0.01)
    monkeypatch.setattr(MeasuredFit, "bars", lambda _: ["bars"])
    monkeypatch.setattr(MeasuredFit, "in_words", lambda _: "a plan")
    for has_numba in (True, False):
        monkeypatch.setattr("paredown.codec.cpu.has_numba", lambda found=has_numba: found)
        assert ("'paredown[cpu]'" in " ".join(result.in_words({"page": "p", "plan": "q"}))) is not has_numba


def test_a_training_that_ends_badly_is_exit_4(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paredown.cli.demo_verb.TASK", "digits#model=mlp,lr=1e30,width=64,batch=512")
    status, out, err = ask("demo", "--steps", "40", "--budget", "90%")
    assert status == 4 and not out and "diverged: the training loss is " in err


def test_a_pipe_gets_text_without_bars_of_progress(folder: Path) -> None:
    done = piped(folder, "demo", "--steps", "4")
    assert done.returncode == 0 and not CONTROL.search(done.stdout + done.stderr) and "\r" not in done.stdout + done.stderr
    assert all(line.startswith("paredown: demo: ") for line in done.stderr.splitlines()), "progress of a slow machine, and no more"


@pytest.mark.full
@pytest.mark.parametrize(("columns", "has_colours"), [("60", True), ("100", False)])
def test_a_terminal_gets_two_bars_and_then_one_screen(
    folder: Path, columns: str, has_colours: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed = {**environment(), "COLUMNS": columns} | ({} if has_colours else {"NO_COLOR": "1"})
    monkeypatch.setattr("tests.cli.commands.environment", lambda: changed)
    status, shown = on_terminal(folder, "demo", "--steps", "6")
    assert status == 0
    text = CONTROL.sub("", shown)
    assert "it does not fit" in text and "memory" in text and "progress" in text and "18 of 18, seed 2" in text
    last = text[text.rindex("Peak ") :].splitlines()
    assert max(map(len, last)) <= int(columns) + 16, "commands and code are not wrapped"
    assert ("\x1b[33m" in shown) is has_colours and json.loads(Path("demo/plan.json").read_text())["rules"]
