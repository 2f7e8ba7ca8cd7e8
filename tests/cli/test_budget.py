"""Budgets in GB and GiB, and budgets of cards: both units are printed, and a card has the bytes that a program can use."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import pytest
import torch

pytest.importorskip("typer")

import typer

from paredown.cli.budget import gpu_budget
from tests.cli.commands import ask, asked_json

NET = ("net.py:both", "--plan", "baseline")


def test_a_budget_in_gb_is_printed_in_both_units_with_the_cards_it_may_mean(folder: Path) -> None:
    status, out, _ = ask("estimate", *NET, "--budget", "24GB")
    assert status == 0
    assert (
        "The budget is 22.35 GiB (24.00 GB): cards sold as 24 GB have 21.9 to 23.5 GiB (--gpu 3090, 3090ti, 4090, a10, l4)." in out
    )
    assert "The budget is 24.00 GiB (25.77 GB).\n" in ask("estimate", *NET, "--budget", "24GiB")[1], "no card is meant"
    assert "The budget is 23.28 GiB (25.00 GB).\n" in ask("estimate", *NET, "--budget", "25GB")[1], "no card has this size"


@pytest.mark.parametrize("text", ["4090", "RTX 4090", "NVIDIA GeForce RTX 4090", "rtx_4090"])
def test_a_card_is_a_budget_on_cuda(folder: Path, text: str) -> None:
    value = asked_json("estimate", *NET, "--gpu", text)
    assert value["budget_bytes"] == int(Fraction("23.5") * 2**30) - 2**29
    assert value["device"] == "cuda" and value["plans"][0]["fits"] is True


def test_every_command_with_a_budget_takes_a_card(folder: Path) -> None:
    status, out, err = ask("plan", "net.py:both", "--gpu", "h100", "-o", "card.json")
    assert status == 0, err
    assert "The budget is 78.60 GiB (84.40 GB): h100, 79.10 GiB less 512.00 MiB for the CUDA context." in out
    status, out, err = ask("train", "tasks.py:small", "--gpu", "4090", "--device", "cpu")
    assert status == 0 and "The budget is 23.00 GiB (24.70 GB): 4090" in out, err
    status, _, err = ask("plan", "net.py:both")
    assert status == 2 and "--budget" in err


def test_a_plan_that_does_not_fit_names_the_card_in_its_hint(folder: Path) -> None:
    words = ("estimate", "resnet50#width=64,picture=224", "--batch", "1024", "--gpu", "3080")
    status, _, err = ask(*words, "--plan", "baseline")
    assert status == 3 and "--device cuda --gpu 3080" in err


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a100", "GPU 'a100' comes in two sizes: write a100-40gb or a100-80gb;"),
        ("4091", "GPU '4091' is unknown: allowed are 1080ti, "),
        ("cuda", "torch sees 0 GPUs on this machine"),
    ],
)
def test_an_unknown_card_is_a_sentence(monkeypatch: pytest.MonkeyPatch, text: str, said: str) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(typer.BadParameter) as caught:
        gpu_budget(text)
    assert said in str(caught.value)


def test_the_gpu_of_this_machine_has_what_is_free(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: ((3 + index) << 30, 12 << 30))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "a card")
    budget = gpu_budget("cuda:1")
    assert int(budget.size) == 4 << 30 and budget.argument == "--gpu cuda:1"
    assert budget.say(4 << 30) == "4.00 GiB (4.29 GB): free of 12.00 GiB on cuda:1, a card"
    with pytest.raises(typer.BadParameter, match="torch sees 2 GPUs"):
        gpu_budget("cuda:2")


def test_a_budget_and_a_card_are_one_too_many(folder: Path) -> None:
    status, _, err = ask("estimate", *NET, "--gpu", "4090", "--budget", "8GiB")
    assert status == 2 and "not both" in err


@pytest.mark.parametrize("command", ["plan", "train"])
def test_an_error_says_the_budget_in_both_units(folder: Path, command: str) -> None:
    status, _, err = ask(command, "tasks.py:small", "--budget", "10KB", "--device", "cpu")
    assert status == 3 and "fits 9.77 KiB (10.00 KB); the smallest needs" in err and "The budget is" not in err
