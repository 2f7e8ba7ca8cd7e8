"""`estimate`, `plan` and `explain` against the library itself; exit 3 where nothing fits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import paredown as pare
from paredown.cli import subject
from tests.cli.commands import ask, asked_json


def traced(num: int = 8, optimizer: str = "adamw", *, compiled: bool = False) -> pare.Trace:
    """The step of net.py, written out again."""
    layers = (
        nn.Conv2d(3, 16, 3, padding=1),
        nn.GELU(),
        nn.Conv2d(16, 16, 3, padding=1),
        nn.GELU(),
        nn.Flatten(),
        nn.Linear(1024, 10),
    )
    batch = torch.zeros(num, 3, 8, 8), torch.zeros(num, dtype=torch.int64)
    model, options = nn.Sequential(*layers), {"optimizer": optimizer, "device": "cpu", "compiled": compiled}
    return pare.trace_step(model, batch, loss=nn.functional.cross_entropy, **options)


def test_the_bytes_are_those_of_the_footprint(folder: Path) -> None:
    value = asked_json("estimate", "net.py:both", "--device", "cpu", "--plan", "activations4", "--plan", "lpmm+activations8")
    for row, plan in zip(value["plans"], ("activations4", "lpmm+activations8"), strict=True):
        rules = [rule for name in plan.split("+") for rule in pare.Plan.preset(name).rules]
        foot = pare.footprint(traced(), pare.Plan(tuple(rules)))
        assert (row["peak_bytes"], row["low_bytes"], row["high_bytes"]) == (foot.peak_bytes, foot.low_bytes, foot.high_bytes)
        assert row["by_role"] == {role.value: size for role, size in foot.by_role.items()}
        assert row["by_module"] == foot.by_module(1) and row["fits"] is None
    assert value["batch_size"] == 8 and value["optimizer"] == "adamw"


def test_one_process_of_several(folder: Path) -> None:
    words = ("estimate", "net.py:both", "--device", "cpu", "--plan", "lpmm", "--world-size", "4", "--strategy")
    for strategy in ("ddp", "fsdp2"):
        (row,) = asked_json(*words, strategy)["plans"]
        foot = pare.footprint(traced(), pare.Plan.preset("lpmm"), world_size=4, strategy=strategy)
        assert (row["peak_bytes"], row["model_bytes"]) == (foot.peak_bytes, foot.model_bytes)
        assert row["sent_bytes"] == foot.communication.total
        assert "sent by a process" in ask(*words, strategy)[1]
    status, _, err = ask(*words[:-1])
    assert status == 2 and "ddp or fsdp2" in err
    status, _, err = ask(*words, "ddp", "--report", "page.html")
    assert status == 2 and "pages are of one process" in err


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")  # torch's own
def test_a_compiled_step(folder: Path) -> None:
    value = asked_json("estimate", "net.py:both", "--device", "cpu", "--plan", "activations4", "--compiled")
    foot = pare.footprint(traced(compiled=True), pare.Plan.preset("activations4"))
    assert value["plans"][0]["peak_bytes"] == foot.peak_bytes
    assert value["plans"][0]["peak_bytes"] != pare.footprint(traced(), pare.Plan.preset("activations4")).peak_bytes
    made = asked_json("plan", "net.py:both", "--device", "cpu", "--budget", "95%", "--compiled")
    assert made["peak_bytes"] <= made["budget_bytes"] < pare.footprint(traced(compiled=True)).peak_bytes


def test_a_model_alone_gets_a_batch_of_the_shape_that_is_said(folder: Path) -> None:
    one = asked_json("estimate", "net.py:model", "--input", "3x8x8", "--batch", "8", "--device", "cpu", "--plan", "baseline")
    other = asked_json("estimate", "net.py:both", "--device", "cpu", "--plan", "baseline")
    assert one["plans"] == other["plans"]
    module = asked_json("estimate", "net:model", "--input", "3x8x8", "--batch", "8", "--device", "cpu", "--plan", "baseline")
    assert module["plans"] == one["plans"], "a module by name is the same as its file"


def test_a_plan_takes_one_trace(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    batches: list[object] = []

    def counted(model: nn.Module, batch: object, **options: object) -> pare.Trace:
        batches.append(batch)
        return pare.trace_step(model, batch, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(subject, "trace_step", counted)
    asked_json("plan", "net.py:both", "--budget", "70%", "--device", "cpu", "-o", "once.json")
    assert len(batches) == 1


@pytest.mark.parametrize("plan", ["baseline", "activations8", "lpmm"])
@pytest.mark.parametrize("budget", [300_000, 2_000_000, 2_100_001])
def test_the_largest_batch_fits_and_the_next_does_not(folder: Path, plan: str, budget: int) -> None:
    words = ("estimate", "net.py:both", "--device", "cpu", "--plan", plan, "--batch", "auto", "--budget", str(budget))
    rules = pare.Plan() if plan == "baseline" else pare.Plan.preset(plan)
    smallest = pare.footprint(traced(1), rules).peak_bytes
    largest = asked_json(*words, status=0 if smallest <= budget else 3)["plans"][0]["largest_batch"]
    if smallest > budget:
        assert largest == 0
        return
    assert pare.footprint(traced(largest), rules).peak_bytes <= budget < pare.footprint(traced(largest + 1), rules).peak_bytes


def test_what_does_not_fit_is_exit_3_and_says_what_would(folder: Path) -> None:
    words = ("estimate", "digits#batch=256", "--device", "cpu", "--budget", "8MiB")
    status, out, err = ask(*words)
    assert status == 3 and "fits 8.00 MiB" in out
    assert (
        "it does not fit 8.00 MiB (8.39 MB). These presets do: activations8" in err
        and "paredown plan digits#batch=256 --device cpu --budget 8MiB" in err
    )
    assert ask(*words, "--plan", "activations8")[0] == 0, "the plan that was asked for fits"
    status, _, err = ask("plan", "digits", "--budget", "1%")
    assert status == 3 and "the smallest needs" in err
    assert not Path("plan.json").exists()


def test_a_plan_is_within_its_budget_and_is_explained(folder: Path) -> None:
    value = asked_json("plan", "net.py:both", "--budget", "70%", "--device", "cpu", "-o", "mine.json")
    plan, trace = pare.Plan.load("mine.json"), traced()
    assert pare.Plan.from_json(value["plan"]) == plan and value["file"] == "mine.json"
    whole = pare.footprint(trace).peak_bytes
    assert value["baseline_bytes"] == whole and value["budget_bytes"] == whole * 70 // 100
    assert value["peak_bytes"] == pare.footprint(trace, plan).peak_bytes <= value["budget_bytes"]
    told = asked_json("explain", "mine.json", "--model", "net.py:both", "--device", "cpu")
    assert told["words"] == plan.explain().splitlines()
    kept = sum(row["nbytes"] for row in told["slots"] if row["role"] == "activation")
    assert kept == pare.footprint(trace, plan).by_role[pare.Role.ACTIVATION]
    status, out, _ = ask("explain", "mine.json")
    assert status == 0 and out.strip() == plan.explain()


def test_a_file_is_replaced_only_if_asked(folder: Path) -> None:
    Path("plan.json").write_text("mine")
    words = ("plan", "net.py:both", "--budget", "70%", "--device", "cpu")
    for refused in (words, ("pick", "digits#model=mlp,steps=4")):
        status, _, err = ask(*refused)
        assert status == 2 and "plan.json exists: add --overwrite to replace it" in " ".join(err.replace("│", " ").split())
        assert Path("plan.json").read_text() == "mine"
    assert ask(*words, "-o", "other.json")[0] == 0 and Path("plan.json").read_text() == "mine"
    assert ask(*words, "--overwrite")[0] == 0
    assert pare.Plan.load("plan.json") == pare.Plan.load("other.json")
    assert ask(*words, "--force")[0] == 0


def test_a_measured_plan_needs_numbers(folder: Path) -> None:
    value = asked_json("plan", "net.py:both", "--budget", "70%", "--device", "cpu", "--method", "sensitivity")
    assert value["plan"]["made_for"]["method"] == "sensitivity"
    status, _, err = ask("plan", "resnet18", "--budget", "70%", "--method", "sensitivity", "--overwrite")
    assert status == 1 and "this one has shapes only" in err


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (("estimate", "digit"), 1, "neither a task nor a model. Closest: 'digits'"),
        (("estimate", "net.py:model"), 1, "give the shape of one example"),
        (("estimate", "net.py:forgot"), 1, "if the last one is the target, return (model, batch, loss)"),
        (("estimate", "net.py"), 1, "name its function that returns the task or model too: net.py:model. It defines model, both,"),
        (
            ("train", "tasks.py"),
            1,
            "name its function that returns the task or model too: tasks.py:small. It defines small, hungry.",
        ),
        (("estimate", "gone.py"), 1, "there is no file gone.py. A task or model of yours is written file.py:function."),
        (("estimate", "llama/config.json"), 1, "llama/config.json: there is no such file."),
        (("estimate", "meta-llama/Llama-3-8B"), 1, "there is no folder meta-llama/Llama-3-8B, and nothing is downloaded"),
        (("estimate", "."), 1, "the folder . has no config.json"),
        (("estimate", "net.py:model", "--input", "3x"), 1, "cannot be parsed"),
        (("estimate", "net.py:model", "--input", "5x8x8"), 1, "does not take examples of 5x8x8"),
        (("estimate", "net.py:number"), 1, "number returned int"),
        (("estimate", "net.py:broken"), 1, "net.py raised RuntimeError: not today"),
        (("estimate", "net.py:leaves"), 1, "net.py raised SystemExit: 0"),
        (("estimate", "net.py:none"), 1, "net.py has no function 'none'"),
        (("estimate", "gone.py:model"), 1, "there is no such file"),
        (("estimate", "gone_module:model"), 1, "No module named 'gone_module'"),
        (("estimate", "resnet18#width=none"), 1, "cannot be built with"),
        (("estimate", "digits", "--plan", "activation4"), 1, "there is no plan 'activation4'"),
        (("estimate", "digits", "--plan", "activation=int9000"), 1, "rule 'activation'"),
        (("estimate", "digits", "--optimizer", "adagrad"), 1, "optimizer 'adagrad' is unknown"),
        (("estimate", "digits", "--autocast", "fp8"), 1, "autocast 'fp8' is unknown"),
        (("estimate", "digits", "--device", "tpu"), 1, "device 'tpu' cannot be traced"),
        (("estimate", "digits", "--budget", "8Gb8"), 2, "size '8Gb8' cannot be read"),
        (("estimate", "digits", "--batch", "auto"), 2, "auto needs --budget"),
        (("estimate", "digits", "--batch", "-3"), 2, "'-3' is no batch size"),
        (("explain", "net.py"), 1, "is no plan: it is not JSON"),
        (("plan", "digits", "--budget", "50%", "-o", "no/such/folder.json"), 1, "No such file or directory"),
        (("plan", "digits", "--budget", "50%", "--method", "alphabet"), 1, "method 'alphabet' is unknown"),
    ],
)
def test_what_is_wrong_is_a_sentence(folder: Path, words: tuple[str, ...], status: int, said: str) -> None:
    found, out, err = ask(*words)
    assert found == status, (out, err)
    assert said in " ".join(err.replace("│", " ").split())
    assert status == 2 or err.startswith("paredown: ")


def test_formats_are_told_to_the_byte(folder: Path) -> None:
    value = asked_json("formats", "int4/64@bf16", "mxfp4", "--shape", "3x100")
    assert [row["nbytes"] for row in value["formats"]] == [3 * (50 + 2 * 2), 3 * (50 + 4)], "4 bits a value, 2 and 4 scales a row"
    assert [row["bits_per_value"] for row in value["formats"]] == [4.25, 4.25]
    assert len(asked_json("formats")["formats"]) == len(pare.CATALOG)
    status, _, err = ask("formats", "int99")
    assert status == 1 and "int99" in err
    assert ask("formats", "--shape", "3*4")[0] == 2


def test_the_environment_names_what_is_missing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from paredown.cli import environment_verbs as looking

    spec = looking.find_spec
    monkeypatch.setattr(looking, "find_spec", lambda name: None if name == "sqlalchemy" else spec(name))
    value = asked_json("env")
    packages = {row["name"]: row["version"] for row in value["packages"]}
    assert torch.__version__.startswith(str(packages["torch"])) and packages["sqlalchemy"] is None
    assert "for sweeps and stores: pip install 'paredown[sweeps]'" in value["advice"]
    text = json.dumps(value)
    assert str(folder) not in text and str(Path.home()) not in text, "no path of the user's"
    assert "To do" in ask("env")[1]


def test_what_a_hint_says_can_be_asked_as_it_is(folder: Path) -> None:
    given = ("--input", "3x8x8", "--batch", "4", "--device", "cpu")
    status, _, err = ask("estimate", "net.py:model", *given, "--budget", "95%")
    assert status == 3 and " --input 3x8x8 --batch 4 --device cpu --budget 95%" in err
    status, out, _ = ask("plan", *err.rpartition("paredown plan ")[2].split())
    assert status == 0, out
    status, out, _ = ask("explain", *out.rpartition("paredown explain ")[2].split())
    assert status == 0 and "On " in out
