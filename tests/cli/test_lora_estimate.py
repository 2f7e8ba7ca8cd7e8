"""`estimate` of LoRA, activation checkpointing and frozen formats, against footprints of the same step made by hand."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import paredown as pare
from tests.cli.commands import ask, asked_json

HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 160, "dtype": "bfloat16"}
LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 500,
    "hidden_size": 96,
    "num_hidden_layers": 3,
    **HEADS,
}
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
RANK, LENGTH = 4, 64


class Adapted(nn.Module):
    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base
        self.lora_A = nn.Linear(base.in_features, RANK, bias=False, dtype=base.weight.dtype)
        self.lora_B = nn.Linear(RANK, base.out_features, bias=False, dtype=base.weight.dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.lora_B(self.lora_A(x)) * 2.0


@pytest.fixture(scope="module")
def trace() -> pare.Trace:
    """One step of the model of LLAMA with adapters on all of its layers."""
    transformers: Any = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(**{name: part for name, part in LLAMA.items() if name != "model_type"}, use_cache=False)
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16).requires_grad_(False)
    for layer in model.model.layers:
        for part in (layer.self_attn, layer.mlp):
            for name in [name for name in TARGETS if hasattr(part, name)]:
                setattr(part, name, Adapted(getattr(part, name)))
    ids = torch.zeros((1, LENGTH), dtype=torch.int64)
    return pare.trace_step(
        model, {"input_ids": ids, "attention_mask": ids + 1, "labels": ids.clone()}, optimizer="adamw", device="cpu"
    )


@pytest.fixture
def config(folder: Path) -> str:
    (folder / "tiny").mkdir()
    (folder / "tiny" / "config.json").write_text(json.dumps(LLAMA))
    return "tiny"


@pytest.mark.filterwarnings("ignore")
def test_the_peaks_are_those_of_a_model_made_by_hand(config: str, trace: pare.Trace) -> None:
    lora = ("--lora", str(RANK), "--length", str(LENGTH), "--device", "cpu")
    value = asked_json("estimate", config, *lora)
    assert [row["plan"] for row in value["plans"]] == ["baseline", "activations8", "frozen8", "frozen4", "frozen4+activations8"]
    for row in value["plans"]:
        names = [] if row["plan"] == "baseline" else row["plan"].split("+")
        plan = pare.Plan(tuple(rule for name in names for rule in pare.Plan.preset(name).rules))
        assert row["peak_bytes"] == pare.footprint(trace, plan).peak_bytes
    assert value["batch_size"] == 1 and value["lora"]["layers"] == len(TARGETS) * 3
    trained = sum(slot.numel for slot in trace.of(pare.Role.GRADIENT))
    assert value["lora"]["trained_parameters"] == trained
    layers = [f"model.layers.{number}" for number in range(3)]
    value = asked_json("estimate", config, *lora, "--checkpointing", "--frozen", "nf4/64@bf16")
    plan = pare.Plan.uniform(frozen="nf4/64@bf16").recomputing(*layers)
    assert value["checkpointed"] == layers and value["plans"][0]["plan"] == "frozen=nf4/64@bf16"
    assert value["plans"][0]["peak_bytes"] == pare.footprint(trace, plan).peak_bytes < pare.footprint(trace).peak_bytes


@pytest.mark.filterwarnings("ignore")
def test_the_step_is_described_and_a_length_that_cannot_fit_has_advice(config: str) -> None:
    code, out, err = ask(
        "estimate", config, "--lora", "4", "--checkpointing", "--length", "64", "--budget", "10KiB", "--device", "cpu"
    )
    assert code == 3
    assert "LoRA adapters on 21 weights" in out and "Activation checkpointing: 3 layers, model.layers.0 to model.layers.2." in out
    assert "has the smallest peak" in err and "lower --batch or --length" in err and "paredown plan" not in err


@pytest.mark.filterwarnings("ignore")
def test_a_shorter_text_that_fits_is_named(config: str) -> None:
    step = ("estimate", config, "--lora", "4", "--checkpointing", "--device", "cpu", "--plan", "activations8")
    budget = asked_json(*step, "--length", "1100")["plans"][0]["peak_bytes"]
    code, _, err = ask(*step, "--length", "4096", "--budget", str(budget))
    found = re.search(r"--length (\d+) fits with it", err)
    assert code == 3 and found is not None and int(found[1]) <= 1100
    assert asked_json(*step, "--length", found[1], "--budget", str(budget))["plans"][0]["fits"]


@pytest.mark.filterwarnings("ignore")
def test_inputs_in_host_memory(config: str) -> None:
    step = ("estimate", config, "--lora", "4", "--checkpointing", "--length", "64", "--device", "cuda", "--plan", "activations8")
    (kept,), (moved,) = (asked_json(*step, *more)["plans"] for more in ((), ("--offload",)))
    inputs = 2 * pare.Format.parse("int8/64@bf16").nbytes((1, 64, 96))  # that of the first layer requires no gradient: unmodified
    assert moved["host_bytes"] == inputs and "host_bytes" not in kept
    assert kept["by_role"]["activation"] - moved["by_role"]["activation"] == inputs // 2, "the last one is on the GPU too"
    limited = *step, "--offload", "--budget", "1GiB", "--host-budget"
    assert asked_json(*limited, str(inputs))["plans"][0]["fits"]
    code, out, err = ask(*limited, str(inputs - 1))
    assert code == 3 and "12.38 KiB in host memory" in out
    assert f"needs 12.38 KiB of host memory, more than --host-budget {inputs - 1}: raise it" in err
    assert "in host memory" in ask(*step, "--offload")[1]


@pytest.mark.parametrize("more", [(), ("--host-budget", "1GiB")], ids=["", "host budget"])
def test_presets_that_fit_with_offload_are_named(more: tuple[str, ...]) -> None:
    """The baseline does not fit, and the presets take host memory within its budget."""
    step = ("estimate", "gpt", "--length", "512", "--batch", "16", "--checkpointing", "--offload", "--device", "cuda")
    baseline, packed = (asked_json(*step)["plans"][place]["peak_bytes"] for place in (0, 1))
    code, _, err = ask(*step, *more, "--budget", str((baseline + packed) // 2))
    assert code == 3 and "These presets do: activations8" in err and "raise it" not in err


@pytest.mark.filterwarnings("ignore")
def test_tiles() -> None:
    """Plans but the baseline have tiles, and tiles alone are a plan; with a frozen format all plans have them."""
    step = ("estimate", "gpt", "--lora", "4", "--checkpointing", "--length", "256", "--device", "cpu", "--plan", "baseline")
    whole, tiled = (asked_json(*step, *more) for more in ((), ("--tile", "64")))
    rows = {row["plan"]: row for row in tiled["plans"]}
    assert list(rows) == ["baseline", "tiles of 64"] and tiled["tile"] == 64 and "tile" not in whole
    assert rows["baseline"]["peak_bytes"] == whole["plans"][0]["peak_bytes"]
    assert rows["tiles of 64"]["at_peak"]["temporary"] < whole["plans"][0]["at_peak"]["temporary"]
    frozen, both = (asked_json(*step, "--frozen", "nf4/64@bf16", *more)["plans"] for more in ((), ("--tile", "64")))
    assert [row["plan"] for row in both] == ["frozen=nf4/64@bf16"] and both[0]["peak_bytes"] < frozen[0]["peak_bytes"]
    assert "pieces of 64 tokens" in ask(*step, "--tile", "64")[1]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("--device", "cpu", "--checkpointing"), "all memory is the host's: add --device cuda"),
        (("--device", "cuda"), "add --checkpointing"),
        (("--device", "cuda", "--checkpointing", "--plan", "frozen8"), "a plan with activations"),
        (("--device", "cuda", "--checkpointing", "--host-budget", "1GiB"), "add --budget or --gpu"),
    ],
)
def test_offload_that_changes_nothing(config: str, more: tuple[str, ...], said: str) -> None:
    code, _, err = ask("estimate", config, "--lora", "4", "--length", "64", "--offload", *more)
    assert code != 0 and said in " ".join(err.replace("│", "").split())


@pytest.mark.filterwarnings("ignore")
def test_targets_are_chosen(config: str) -> None:
    value = asked_json("estimate", config, "--lora", "4", "--lora-targets", "q_proj, *.v_proj", "--length", "16", "--device", "cpu")
    assert value["lora"]["layers"] == 6
    assert value["lora"]["trained_parameters"] == 3 * 4 * (96 + 96 + 96 + 48)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("gpt", "--length", "64", "--input", "tokens:64"), "--input tokens:64 has the length already"),
        (("gpt", "--lora-targets", "qkv"), "add --lora 16"),
        (("gpt", "--lora", "4", "--lora-targets", "k_proj"), "k_proj matches none of"),
        (("digits", "--lora", "4"), "digits is a task, which makes its own model"),
        (("gpt", "--frozen", "nf5/64"), "nf5"),
        (("gpt", "--frozen", "nf4/64@bf16"), "no weight of this model is frozen"),
        (("digits", "--length", "64"), "is a task, which has its own batch"),
        (("mlp", "--checkpointing"), "MLP has no list of layers to checkpoint"),
    ],
)
def test_options_that_do_not_go_together(arguments: tuple[str, ...], said: str) -> None:
    code, _, err = ask("estimate", *arguments, "--device", "cpu")
    assert code != 0 and said in " ".join(err.split())


def test_a_length_for_a_model_of_text() -> None:
    one = asked_json("estimate", "gpt", "--length", "32", "--plan", "baseline", "--device", "cpu")
    other = asked_json("estimate", "gpt#length=32", "--plan", "baseline", "--device", "cpu")
    assert one["plans"] == other["plans"]
    checkpointed = asked_json("estimate", "gpt", "--length", "32", "--plan", "baseline", "--device", "cpu", "--checkpointing")
    assert checkpointed["checkpointed"] == ["layers.0", "layers.1"]
    assert checkpointed["plans"][0]["by_role"]["activation"] < one["plans"][0]["by_role"]["activation"]


@pytest.mark.filterwarnings("ignore")
def test_a_chunked_loss(folder: Path) -> None:
    """The baseline, checkpointed or not, has no session and all logits; plans have chunks."""
    (folder / "large").mkdir()
    (folder / "large" / "config.json").write_text(json.dumps({**LLAMA, "vocab_size": 40_000, "num_hidden_layers": 1}))
    step = (
        "estimate",
        "large",
        "--length",
        "4096",
        "--device",
        "cuda",
        "--checkpointing",
        "--plan",
        "baseline",
        "--plan",
        "activations8",
    )
    all_logits, chunked = (
        {row["plan"]: row["peak_bytes"] for row in asked_json(*step, flag)["plans"]}
        for flag in ("--no-chunked-loss", "--chunked-loss")
    )
    logits = 4096 * 40_000 * 2
    assert chunked["baseline"] == all_logits["baseline"] > 4 * logits
    assert chunked["activations8"] < all_logits["activations8"] - logits
    notes = [note for note in asked_json(*step, "--chunked-loss")["notes"] if "output is assumed freed" in note]
    assert sorted(note.partition(":")[0] for note in notes) == ["activations8", "baseline"], notes  # all logits, and their inputs
