"""Predicted peaks of common models under common plans, by `paredown estimate`, for docs/sizing.md.

    python benchmarks/sizes.py                   # all cases, ten minutes on one core; then benchmarks/tables.py --write
    python benchmarks/sizes.py --case gpt2       # some: rows of the others are kept

Nothing is downloaded: language models are made from the configurations below. Steps are eager, on a GPU, with AdamW.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from loops import PACKAGES
from measure import machine

from paredown.cli.budget import gpu_budget
from paredown.sizes import parse_bytes

FILE = Path(__file__).parent / "results" / "sizes.json"
CARDS = {"12 GB": "4070", "16 GB": "4080", "24 GB": "4090", "32 GB": "5090", "48 GB": "6000ada", "80 GB": "h100"}  # by what is sold
ACTIVATIONS = ("baseline", "activations8", "activations4", "half+activations4")
FULL = ("baseline", "activations8", "fine_tune+activations8", "lpmm+activations8")
LORA = ("baseline", "activations8", "frozen8+activations8", "frozen4+activations8")
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "num_key_value_heads": 8,
    "dtype": "bfloat16",
}
LLAMA_1B = {
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
}
LLAMA_8B = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
}
LLAMA_70B = {
    "vocab_size": 128256,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
}
TIED = {"tie_word_embeddings": True}


@dataclass(frozen=True)
class Case:
    """A training step: its title, the arguments of `paredown estimate`, and the function or the configuration of its model."""

    name: str
    title: str
    arguments: str
    plans: tuple[str, ...]
    model: str | Mapping[str, Any]


PICTURES = "--input 3x224x224 --autocast bf16"
CHECKPOINTED = "--checkpointing --length"
CASES = (
    Case("resnet50", "ResNet-50, batch 256", f"{PICTURES} --batch 256", ACTIVATIONS, "paredown.models.resnet:resnet50"),
    Case("vit", "ViT-B/16, batch 128", f"{PICTURES} --batch 128", ACTIVATIONS, "paredown.models.transformer:ViT"),
    Case("gpt2", "GPT-2 124M, 16 x 1024 tokens", "--autocast bf16 --batch 16 --length 1024", ACTIVATIONS,
         {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}),
    Case("gpt2-xl", "GPT-2 XL 1.5B, 4 x 1024 tokens", "--autocast bf16 --batch 4 --length 1024", ACTIVATIONS,
         {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_embd": 1600, "n_layer": 48, "n_head": 25}),
    Case("llama-1b", "Llama 3.2 1B, all parameters, 4 x 2048 tokens, checkpointing", f"--batch 4 {CHECKPOINTED} 2048", FULL,
         {**LLAMA, **LLAMA_1B, **TIED}),
    Case("llama-8b", "Llama 3.1 8B, all parameters, 1 x 4096 tokens, checkpointing", f"--batch 1 {CHECKPOINTED} 4096", FULL,
         {**LLAMA, **LLAMA_8B}),
    Case("lora-8b", "Llama 3.1 8B, LoRA of rank 16, 1 x 4096 tokens, checkpointing", f"--lora 16 --batch 1 {CHECKPOINTED} 4096", LORA,
         {**LLAMA, **LLAMA_8B}),
    Case("lora-70b", "Llama 3.1 70B, LoRA of rank 16, 1 x 4096 tokens, checkpointing", f"--lora 16 --batch 1 {CHECKPOINTED} 4096", LORA,
         {**LLAMA, **LLAMA_70B}),
)  # fmt: skip


@dataclass(frozen=True)
class Row:
    """One plan of one case."""

    case: str
    title: str
    plan: str
    peak_bytes: int


def estimated(case: Case) -> list[Row]:
    """The rows of a case."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(case.model))
        subject = case.model if isinstance(case.model, str) else folder
        plans = [text for plan in case.plans for text in ("--plan", plan)]
        command = [
            sys.executable,
            "-m",
            "paredown",
            "estimate",
            subject,
            *case.arguments.split(),
            *plans,
            "--device",
            "cuda",
            "--json",
        ]
        answer = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    return [Row(case.name, case.title, row["plan"], row["peak_bytes"]) for row in answer["plans"]]


def main() -> None:
    """Predict, print, and write one run with all rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", nargs="+", choices=[case.name for case in CASES], default=[case.name for case in CASES])
    parser.add_argument("--commit", help="of the package, if it is not that of this checkout")
    options = parser.parse_args()
    before = json.loads(FILE.read_text())[-1]["rows"] if FILE.exists() else []
    rows = {case.name: [row for row in before if row["case"] == case.name] for case in CASES}
    cards = {name: parse_bytes(gpu_budget(card).size) for name, card in CARDS.items()}
    for case in CASES:
        if case.name in options.case:
            rows[case.name] = [asdict(row) for row in estimated(case)]
            print(*rows[case.name], sep="\n", flush=True)
            everything = [row for found in rows.values() for row in found]
            run = {**machine("cpu", PACKAGES, options.commit), "cards": cards, "rows": everything}
            FILE.write_text(json.dumps([run], indent=1) + "\n")


if __name__ == "__main__":
    main()
