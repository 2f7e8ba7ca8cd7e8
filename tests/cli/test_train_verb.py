"""`train`, `pick`, `report` and `serve` on small tasks: what they write, and how they end."""

from __future__ import annotations

import json
import sys
import urllib.request
from importlib import import_module
from pathlib import Path

import pytest
import torch

import paredown as pare
from paredown.cli.train_verb import TrainingRun, runs_table
from paredown.session.eager.stored_tensors import StoredValues
from paredown.study.pick.answer import Picked
from paredown.study.priors.prior_files import made_up_prior, write_prior
from paredown.study.tasks.evaluate import device_name
from paredown.study.tasks.lookup import find_task
from paredown.study.tasks.trial import Status, Trial
from tests.cli.commands import ask, asked_json

MLP = "digits#model=mlp,steps=6"


@pytest.fixture
def prior(folder: Path) -> str:
    """A made-up prior in a file."""
    write_prior(made_up_prior(), folder / "made.json")
    return "made.json"


def test_training_is_the_trial_that_evaluate_gives(folder: Path) -> None:
    value = asked_json("train", MLP, "--plan", "lpmm", "--compare", "--device", "cpu", "-o", "runs.json", "--save", "w.pt")
    assert [run["name"] for run in value["runs"]] == ["baseline", "lpmm"]
    for run, plan in zip(value["runs"], (pare.Plan(), pare.Plan.preset("lpmm")), strict=True):
        expected = pare.evaluate(MLP, plan, device="cpu")
        assert (run["error"], run["loss"]) == (expected.error, expected.loss)
        assert run["predicted_peak_bytes"] == expected.predicted_peak_bytes
        assert run["measured_peak_bytes"] == pytest.approx(expected.measured_peak_bytes, abs=1024), "all weights are counted"
    assert json.loads(Path("runs.json").read_text()) == value
    weights = torch.load("w.pt", weights_only=True)
    assert all(type(tensor) is torch.Tensor and tensor.isfinite().all() for tensor in weights.values())
    find_task(MLP).make_model(0).load_state_dict(weights)


def test_the_weights_that_are_kept_are_those_that_were_judged(folder: Path) -> None:
    pytest.importorskip("safetensors")
    from safetensors.torch import load_file

    value = asked_json("train", "tasks.py:small#steps=6", "--device", "cpu", "--save", "w.safetensors")
    task = find_task(MLP)
    model = task.make_model(0)
    model.load_state_dict(load_file("w.safetensors"))
    with torch.no_grad():
        wrong = [(model.eval()(x).argmax(-1) != y).float().sum() for x, y in task.data.tests(32, device=torch.device("cpu"))]
    assert float(sum(wrong)) / 360 == pytest.approx(value["runs"][0]["error"], abs=1e-6)


def test_verify_compares_gradients_before_the_training(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("train", "digits#model=mlp,steps=2", "--plan", "activations8", "--device", "cpu")
    plain, checked = asked_json(*words), asked_json(*words, "--verify")
    found = pare.Verification.from_json(checked.pop("verification"))
    assert found.ok and found.rows and checked["runs"][0]["loss"] == plain["runs"][0]["loss"], "the training is the same"
    status, out, _ = ask(*words, "--verify")
    assert status == 0 and out.index("Verification of MLP: ok") < out.index("peak, measured")
    monkeypatch.setattr(StoredValues, "_unpacked", lambda self: torch.zeros(self.numel, dtype=self.dtype))
    status, out, err = ask(*words, "--verify")
    assert status == 4 and "not ok" in out and "off under the exact plan" in out and "peak, measured" not in out
    assert "activations8: gradients under the plan are not those of the unmodified model; nothing was trained" in err
    value = asked_json(*words, "--verify", "-o", "off.json", status=4)
    assert value["runs"] == [] and not value["verification"]["ok"] and json.loads(Path("off.json").read_text()) == value
    status, _, err = ask(*words, "--verify", "--mode", "simulate")
    assert status == 2 and "simulate mode also rounds the forward pass" in err


def test_verify_says_that_a_tolerance_is_too_coarse(folder: Path) -> None:
    words = ("train", "digits#model=mlp,steps=2", "--plan", "activations2", "--device", "cpu", "--verify")
    status, out, err = ask(*words)
    assert status == 0 and "Verification of MLP: ok, but too coarse to be useful" in out.splitlines()[0]
    said = " ".join(err.split())
    assert (
        "activations2: Verification of MLP: ok, but too coarse to be useful" in said and "a gradient of zero would pass too" in said
    )
    found = asked_json(*words)["verification"]
    assert found["ok"] and found["verdict"] == "too coarse to be useful" and found["tolerance"] > 1


def test_a_training_that_diverges_is_exit_4(folder: Path) -> None:
    status, out, err = ask("train", f"{MLP},lr=1000", "--device", "cpu", "--save", "w.pt")
    assert status == 4 and "diverged" in out and "baseline: diverged: the training loss is" in err
    assert not Path("w.pt").exists(), "what went wrong is not kept"


def test_out_of_memory_names_the_role_and_the_next_plan_down(folder: Path) -> None:
    value = asked_json("train", "tasks.py:hungry", "--device", "cpu", status=4)
    assert value["runs"][0]["status"] == "out_of_memory" and "requested 20.00 MiB more" in value["runs"][0]["reason"]
    assert value["advice"].startswith("activation grew most, to ") and "The next plan down is " in value["advice"]
    label = value["advice"].split("'")[1]
    down = asked_json("estimate", "tasks.py:hungry", "--device", "cpu", "--plan", "baseline", "--plan", label)["plans"]
    assert down[1]["peak_bytes"] < 0.95 * down[0]["peak_bytes"]
    status, _, err = ask("train", "tasks.py:hungry", "--device", "cpu", "--plan", label)
    assert status == 4 and f"{label}: out_of_memory: " in err and f"next plan down is {label!r}" not in err


def test_a_pick_is_written_shown_and_trained_with(folder: Path, prior: str) -> None:
    words = ("pick", MLP, "--budget", "3MiB", "--evaluations", "2", "--prior", prior, "--device", "cpu")  # with scratch memory
    value = asked_json(*words, "--record", "picked.json", "--report", "page.html", "--store", "trials.db")
    Path("printed.json").write_text(json.dumps(value))
    files = value.pop("files")
    assert files == {"plan": "plan.json", "answer": "picked.json", "page": "page.html"}
    picked = Picked.from_json(json.loads(Path("picked.json").read_text()))
    assert picked == Picked.from_json(value) and picked.plan == pare.Plan.load("plan.json")
    assert picked.point is not None and picked.point.predicted_bytes <= picked.budget_bytes
    again = asked_json(*words, "--store", "trials.db", "--overwrite")
    took = [sorted(trial["seconds"] for trial in answer["trials"]) for answer in (value, again)]
    assert took[0] == took[1], "nothing ran again"
    for source in ("picked.json", "printed.json", "trials.db"):
        assert asked_json("report", source, "-o", "other.html")["trials"] == len(picked.trials)
        assert "<html" in Path("other.html").read_text()
    status, _, told = ask("report", "plan.json")
    assert status == 1 and "plan.json: this is a plan" in told and "pick --record" in told
    assert ask("train", MLP, "--plan", "plan.json", "--device", "cpu", "--frontier", "printed.json")[0] == 0


@pytest.mark.parametrize(
    ("verb", "option", "file", "said"),
    [(verb, option, "nodir/x.json", "there is no folder nodir")
     for verb, option in (("pick", "-o"), ("pick", "--record"), ("pick", "--report"), ("train", "--out"))]
    + [("train", "--save", "nodir/x.pt", "there is no folder nodir"), ("train", "--out", ".", "is a folder; give a file")],
)  # fmt: skip
def test_what_cannot_be_written_is_said_before_anything_runs(
    folder: Path, verb: str, option: str, file: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paredown.cli.subject.find_any_task", lambda _: pytest.fail("it went on"))
    status, _, err = ask(verb, MLP, option, file)
    assert status == 2 and said in " ".join(err.replace("│", " ").split())


def test_a_package_that_weights_need_is_asked_for_before_anything_runs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paredown.cli.subject.find_any_task", lambda _: pytest.fail("it went on"))
    monkeypatch.setitem(sys.modules, "safetensors", None)
    status, _, err = ask("train", MLP, "--save", "w.safetensors")
    assert status == 1 and "this needs safetensors: pip install 'paredown[safetensors]'" in err


@pytest.mark.parametrize(
    ("arguments", "where", "is_kept"),
    [
        (("train", MLP), "paredown.study.tasks.evaluate.trial_and_model", False),
        (("demo",), "paredown.study.tasks.paired_training.load_loops", False),
        (("pick", MLP), "paredown.study.pick.pick.pick", False),
        (("pick", MLP, "--store", "t.db"), "paredown.study.pick.pick.pick", True),
        (("sweep", "run", "s.toml"), "paredown.study.sweeps.worker.work", True),
        (("worker", "--store", "s.db", "--stay"), "paredown.study.sweeps.worker.work", True),
    ],
)
def test_an_interruption_speaks_of_a_store_only_where_there_is_one(
    folder: Path, arguments: tuple[str, ...], where: str, is_kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    pytest.importorskip("sqlalchemy")
    from paredown.study.sweeps.store import Store

    Store(folder / "s.db").close()
    Path("s.toml").write_text(f'name = "s"\ntasks = ["{MLP}"]\nseeds = [0]\n[[plans]]\nactivation = "int8"\n')
    module, _, name = where.rpartition(".")
    monkeypatch.setattr(import_module(module), name, stop)
    status, _, err = ask(*arguments)
    kept = "; finished trials are in the store, and the same command runs the others"
    assert status == 130 and err.endswith(f"paredown: stopped{kept if is_kept else ''}.\n")


def test_nothing_fits_is_an_answer_with_exit_3(folder: Path, prior: str) -> None:
    status, out, err = ask("pick", MLP, "--budget", "1%", "--evaluations", "0", "--prior", prior, "--device", "cpu")
    assert status == 3 and "no plan fits --budget 1%, " in err and "plan" in out
    assert not Path("plan.json").exists()


def test_runs_become_a_page(folder: Path) -> None:
    plan = pare.Plan.preset("lpmm")
    runs = [{"name": "lpmm", **Trial("t", plan, 0, Status.DONE, error=0.5, predicted_peak_bytes=100).to_json()}]
    Path("runs.json").write_text(json.dumps({"task": "t", "runs": runs, "advice": None}))
    assert asked_json("report", "runs.json", "--model", MLP)["plans"] == 1
    status, _, err = ask("report", "none.json")
    assert status == 1 and "there is no file none.json" in err
    status, _, err = ask("report", "none.db")
    assert status == 1 and "there is no store none.db" in err


def test_a_file_is_served(folder: Path, prior: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page is fetched while the verb runs; then it is interrupted."""
    from paredown.study.report import server as module

    ask("pick", MLP, "--budget", "75%", "--evaluations", "0", "--prior", prior, "--device", "cpu", "--record", "picked.json")
    fetched: list[str] = []

    def wait(server: module.Server) -> None:
        with urllib.request.urlopen(server.url, timeout=20) as answer:
            fetched.append(answer.read().decode())
        raise KeyboardInterrupt

    monkeypatch.setattr(module.Server, "wait", wait)
    status, out, _ = ask("serve", "picked.json", "--json")
    assert status == 0 and json.loads(out.splitlines()[0])["url"].startswith("http://127.0.0.1:")
    assert "digits#model=mlp" in fetched[0]


def test_sources_name_nothing_that_is_run(folder: Path, prior: str) -> None:
    """An answer of somebody else's names a task in a file: showing it does not import the file."""
    ask("pick", MLP, "--budget", "75%", "--evaluations", "0", "--prior", prior, "--device", "cpu", "--record", "picked.json")
    value = json.loads(Path("picked.json").read_text())
    Path("evil.py").write_text("open('mark', 'w')\n")
    Path("evil.json").write_text(json.dumps({**value, "task": "evil.py:run"}))
    assert ask("report", "evil.json")[0] == 0
    assert not Path("mark").exists()


@pytest.mark.parametrize(
    ("measured", "device", "is_said"),
    [
        (1150, "a GPU", False),
        (1151, "a GPU", True),
        (None, "a GPU", False),
        (1152, "a GPU", False),
        (1151, device_name(torch.device("cpu")), False),
    ],
)
def test_much_more_than_predicted_is_said(measured: int | None, device: str, is_said: bool) -> None:
    sizes = {"predicted_peak_bytes": None if measured == 1152 else 1000, "measured_peak_bytes": measured}
    trial = Trial("t", pare.Plan(), 0, Status.DONE, error=0.1, device=device, **sizes)
    lines = runs_table("t", [TrainingRun("mine", pare.Plan(), trial)])
    assert ("mine took 151 B more than predicted" in lines[-1] and "channels_last" in lines[-1]) is is_said
    assert len(lines) == 3 + is_said
