"""The first lines of an estimate: a verdict, bars whose parts add up to the peak, and what was assumed."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("typer")

from paredown.cli.estimate_output import WIDTH, EstimateRow, bars, verdict
from tests.cli.commands import CONTROL, ask, asked_json, on_terminal

GIB = 2**30


def row(plan: str, gib: float, *, high: float = 0, fits: bool | None = None, batch: int | None = None) -> EstimateRow:
    """A plan of an estimate, half of whose peak are weights."""
    peak = int(gib * GIB)
    parts = {"weight": peak // 2, "activation": peak - peak // 2 - 1024}
    return EstimateRow(plan, peak, peak, int((high or gib) * GIB), fits, batch, at_peak=parts, workspace_bytes=1024)


@pytest.mark.parametrize(
    ("rows", "allowed", "requested", "said"),
    [
        (
            [row("baseline", 13.2, fits=False), row("activations8", 10.2, fits=True)],
            11.2,
            False,
            "Does not fit: 13.20 of 11.20 GiB. activations8 fits: 10.20 GiB, about 1.2x time.",
        ),
        ([row("baseline", 10.2, fits=True)], 11.2, False, "Fits: 10.20 of 11.20 GiB."),
        ([row("baseline", 10.2, fits=True, high=12)], 11.2, False, "Fits: 10.20 of 11.20 GiB; at most 12.00 GiB."),
        (
            [row("baseline", 13.2, fits=False), row("lpmm", 12.5, fits=False)],
            0.5,
            False,
            "Does not fit: 13.20 GiB of 512.00 MiB. No plan here fits; the smallest, lpmm, needs 12.50 GiB.",
        ),
        ([row("activations4", 13, fits=False), row("mine.json", 10, fits=True)], 11, True, "mine.json fits: 10.00 of 11.00 GiB."),
        ([row("activations4", 13, fits=False)], 11, True, "activations4 does not fit: 13.00 of 11.00 GiB."),
        (
            [row("baseline", 13), row("lpmm", 10)],
            None,
            False,
            "Needs 13.00 GiB (13.00 GiB to 13.00 GiB). lpmm needs 10.00 GiB.",
        ),
        (
            [row("baseline", 13, batch=0), row("lpmm", 12, batch=7)],
            2,
            False,
            "Largest batch within 2.00 GiB: none (baseline), 7 (lpmm).",
        ),
    ],
)
def test_the_verdict_is_a_sentence(rows: list[EstimateRow], allowed: float | None, requested: bool, said: str) -> None:
    nbytes = None if allowed is None else int(allowed * GIB)
    assert verdict(rows, nbytes, requested=requested, device="cuda") == said
    assert "time" not in verdict(rows, nbytes, requested=requested, device="cpu"), "times are those of a GPU"


def test_bars_are_proportional_and_marked_at_the_budget() -> None:
    rows = [row("baseline", 16, fits=False), row("lpmm", 8, fits=True)]
    first, second, legend = bars(rows, 12 * GIB, in_colour=False)
    assert first == "baseline  " + "W" * 24 + "A" * 12 + "|" + "A" * 12 + "   16.00 GiB"
    assert second == "lpmm      " + "W" * 12 + "A" * 12 + " " * 12 + "|" + " " * 13 + "  8.00 GiB"
    assert legend.split() == ["W", "weights,", "A", "activations,", "|", "budget", "12.00", "GiB"]
    coloured = bars(rows, 12 * GIB, in_colour=True)
    assert [CONTROL.sub("", line).count("\u2588") for line in coloured] == [WIDTH, WIDTH // 2, 0]


@pytest.mark.parametrize("in_colour", [False, True])
def test_bars_and_legend_fit_into_columns(in_colour: bool) -> None:
    parts = {"weight": 4 * GIB, "activation": 8 * GIB, "input": 2 * GIB, "temporary": 2 * GIB}
    rows = [replace(row("baseline", 16, fits=False), at_peak=parts), row("lpmm", 8, fits=True)]
    for columns in (44, 60, 100):
        lines = [CONTROL.sub("", line) for line in bars(rows, 12 * GIB, in_colour=in_colour, columns=columns)]
        assert max(map(len, lines)) <= columns and lines[0].endswith("16.00 GiB")
        legend = " ".join(" ".join(line.rstrip(",").split()) for line in lines[2:])
        assert [name in legend for name in ("weights", "activations", "inputs and buffers", "temporaries", "| budget")] == [
            True
        ] * 5
        assert all(line.startswith(" " * 10) and not line.endswith(" ") for line in lines[2:])
    assert len(lines) == 3, "one line where there is room"
    narrow = bars(rows, 12 * GIB, in_colour=False, columns=60)[0]
    assert narrow.count("W") + narrow.count("A") + narrow.count("I") + narrow.count("T") == 60 - len("baseline") - 16


@pytest.mark.parametrize("words", [("net.py:both", "--device", "cpu"), ("resnet18", "--device", "cuda")])
def test_parts_add_up_to_the_peak(folder: Path, words: tuple[str, ...]) -> None:
    for plan in asked_json("estimate", *words)["plans"]:
        assert sum(plan["at_peak"].values()) + plan["workspace_bytes"] == plan["peak_bytes"]
        assert sum(plan["at_peak_by_module"].values()) + plan["workspace_bytes"] == plan["peak_bytes"]


def test_the_text_begins_with_the_verdict_and_names_what_is_assumed(folder: Path) -> None:
    _, out, _ = ask("estimate", "digits#batch=256", "--device", "cpu", "--budget", "8MiB")
    lines = out.splitlines()
    assert re.fullmatch(r"Does not fit: [\d.]+ of 8.00 MiB. activations8 fits: [\d.]+ MiB.", lines[0])
    assert lines[2].startswith("baseline ") and lines[3].startswith("activations8 ") and "| budget 8.00 MiB" in lines[4]
    assert "Batch: (256, 3, 8, 8) float32, (256,) int64." in lines and not any(line.startswith("Assumed") for line in lines)
    _, out, _ = ask("estimate", "gpt", "--plan", "baseline")
    assert "Assumed: batch 32 (--batch sets it), length 64 (#length=N sets it)." in out
    _, out, _ = ask("estimate", "gpt#length=16", "--plan", "baseline", "--batch", "4")
    assert "Assumed" not in out and "Batch: (4, 16) int64, (4, 16) int64." in out
    _, out, _ = ask("estimate", "net.py:model", "--input", "3x8x8", "--plan", "baseline")
    assert "Assumed: batch 32 (--batch sets it)." in out


def test_a_config_says_neither_batch_nor_length(folder: Path) -> None:
    pytest.importorskip("transformers")
    config = {"model_type": "gpt2", "n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 32, "n_positions": 24}
    (folder / "tiny").mkdir()
    (folder / "tiny" / "config.json").write_text(json.dumps(config))
    _, out, _ = ask("estimate", "tiny", "--plan", "baseline")
    assert "Assumed: batch 8 (--batch sets it), length 24 (--input tokens:N sets it)." in out
    assert "Batch: (8, 24) int64" in out


def test_a_page_of_the_memory_is_written(folder: Path) -> None:
    status, _, _ = ask("estimate", "net.py:both", "--device", "cpu", "--report", "page.html")
    page = (folder / "page.html").read_text()
    assert status == 0 and page.startswith("<!doctype html>") and "activations4" in page and "net.py:both" in page
    assert ask("estimate", "net.py:both", "--report", "no/such/page.html")[0] == 2


def test_the_page_has_the_verdict_the_budget_and_the_step(folder: Path) -> None:
    _, out, _ = ask("estimate", "net.py:both", "--device", "cpu", "--budget", "95%", "--report", "page.html")
    record = json.loads(re.findall(r'id="record">(.*?)</script>', (folder / "page.html").read_text())[0])
    (study,) = record["studies"]
    assert study["reason"] == out.splitlines()[0] and study["reason"].startswith("Does not fit: ")
    assert study["budget_bytes"] == int(0.95 * max(row["peak_bytes"] for row in study["kept"]))
    assert len(record["notes"]) >= 2 and all(note in out for note in record["notes"])


@pytest.mark.full
def test_a_terminal_gets_colours(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("PYTHONIOENCODING", "utf-8")
    status, shown = on_terminal(folder, "estimate", "net.py:both", "--device", "cpu", "--budget", "95%")
    assert status == 3 and "\x1b[1;31mDoes not fit" in shown and "\u2588" in shown
    monkeypatch.setenv("NO_COLOR", "1")
    status, shown = on_terminal(folder, "estimate", "net.py:both", "--device", "cpu", "--budget", "95%")
    assert "\x1b[1;31mDoes not fit" not in shown and "Does not fit" in shown and "\u2588" not in shown


@pytest.mark.parametrize(
    ("model", "plan", "slot", "why"),
    [
        ("double", "activations4", "1:input", "it is float64, which no format can store."),
        ("double", "lpmm", "5.weight", "it is float64, which no format can store."),
        ("both", "activation=e4m3f", "1:input", "e4m3f without a block can only store values from"),
        ("held", "activations4", "second:input", "it is held outside of autograd as well: by the caller"),
    ],
)
def test_what_a_plan_cannot_pack_has_a_reason(folder: Path, model: str, plan: str, slot: str, why: str) -> None:
    words = ("estimate", f"net.py:{model}", "--device", "cpu", "--plan", plan)
    status, out, _ = ask(*words)
    lines = [line for line in out.splitlines() if line.startswith(f"Not packed under {plan}: ")]
    assert status == 0 and any(why in line for line in lines), out
    groups = asked_json(*words)["plans"][0]["not_packed"]
    assert any(slot in group["slots"] and why.rstrip(".") in group["why"] and group["nbytes"] for group in groups)


def test_a_plan_that_packs_all_it_names_has_no_reasons(folder: Path) -> None:
    _, out, _ = ask("estimate", "net.py:both", "--device", "cpu", "--plan", "baseline", "--plan", "lpmm")
    assert "Not packed" not in out
