"""Hugging Face configs: shapes as the library makes them, without the network, and no code that a config names."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
import transformers

from tests.cli.commands import ask, asked_json

GPT = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 100}
SMALL = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
CONFIGS = {
    "gpt": GPT | {"n_positions": 64, "bos_token_id": 0, "eos_token_id": 0},
    "llama": {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 100, **SMALL},
    "bert": {"model_type": "bert", "architectures": ["BertForSequenceClassification"], "vocab_size": 100, **SMALL},
    "vit": {"model_type": "vit", "architectures": ["ViTForImageClassification"], "image_size": 16, "patch_size": 4, **SMALL},
}


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("the network was asked")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


def write(folder: Path, name: str, value: Any) -> Path:
    """A config.json in a folder of its own."""
    (folder / name).mkdir(exist_ok=True)
    path = folder / name / "config.json"
    path.write_text(value if isinstance(value, str) else json.dumps(value))
    return path


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_the_parameters_are_those_of_the_library(folder: Path, name: str) -> None:
    path = write(folder, name, CONFIGS[name])
    kind: Any = getattr(transformers, CONFIGS[name]["architectures"][0])
    model = kind(kind.config_class(**{key: part for key, part in CONFIGS[name].items() if key != "model_type"}))
    length = () if name == "vit" else ("--input", "tokens:16")
    for text in (name, str(path.relative_to(folder))):
        value = asked_json("estimate", text, "--plan", "baseline", "--device", "cpu", *length)
        assert value["plans"][0]["by_role"]["weight"] == sum(4 * p.numel() for p in model.parameters())
        assert value["batch_size"] == 8 and value["optimizer"] == "adamw"
    larger = asked_json("estimate", name, "--plan", "baseline", "--device", "cpu", "--batch", "16", *length)
    assert larger["plans"][0]["by_role"]["activation"] > 1.8 * value["plans"][0]["by_role"]["activation"]


@pytest.mark.filterwarnings("ignore")
def test_a_half_precision_model_takes_half_of_the_bytes(folder: Path) -> None:
    write(folder, "gpt", CONFIGS["gpt"])
    sizes = [
        asked_json("estimate", f"gpt#length=16,dtype={dtype}", "--plan", "baseline")["plans"][0]["by_role"]["weight"]
        for dtype in ("fp32", "bf16")
    ]
    assert sizes[0] == 2 * sizes[1]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("{", "is not JSON"),
        ("[" * 5000, "is not JSON"),
        ("[1]", "has no field model_type"),
        ({"model_type": "unheard_of"}, "describes no model"),
        ({"model_type": 3}, "has no field model_type"),
        (GPT | {"n_head": 3}, "describes no model"),
        (GPT | {"n_embd": "many"}, "describes no model"),
        (GPT | {"architectures": ["PreTrainedConfig"]}, None),
        (GPT | {"architectures": ["__import__"]}, None),
    ],
)
def test_a_strangers_config_is_a_sentence_or_a_language_model(folder: Path, value: Any, said: str | None) -> None:
    write(folder, "odd", value)
    status, _, err = ask("estimate", "odd", "--input", "tokens:8", "--plan", "baseline")
    assert (status == 0) if said is None else (status == 1 and said in err), err


@pytest.mark.filterwarnings("ignore")
def test_code_that_a_config_names_is_not_run(folder: Path) -> None:
    mark = folder / "mark"
    names = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    write(folder, "odd", GPT | {"auto_map": names, "architectures": ["EvilModel"], "n_positions": 16})
    (folder / "odd" / "evil.py").write_text(f"open({str(mark)!r}, 'w')\n")
    assert ask("estimate", "odd", "--plan", "baseline")[0] == 0
    write(folder, "odd", {"model_type": "evil", "auto_map": names})
    assert ask("estimate", "odd")[0] == 1
    assert not mark.exists()


KERNELS = "kernels-community/flash-attn"
RESNET = {"architectures": ["DetrForObjectDetection"], "backbone": "microsoft/resnet-50", "use_timm_backbone": False}
FETCHING = {
    "weights": {"model_type": "detr", "use_pretrained_backbone": True, "backbone_config": None, **RESNET},
    "backbone": {"model_type": "dpt", "architectures": ["DPTForDepthEstimation"], "backbone": "facebook/dinov2-base"},
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", sorted(FETCHING))
def test_what_lies_on_the_hub_is_not_asked_for(folder: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    for what in ("getaddrinfo", "create_connection"):
        monkeypatch.setattr(socket, what, lambda *place, **_: asked.append(place))
    monkeypatch.setattr(socket.socket, "connect", lambda *place: asked.append(place))
    write(folder, name, FETCHING[name])
    status, _, err = ask("estimate", name, "--plan", "baseline")
    assert status == 1 and "describes no model" in err and not asked
    from huggingface_hub import constants

    assert not constants.HF_HUB_OFFLINE, "only while the model is made"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("field", ["attn_implementation", "_attn_implementation", "experts_implementation"])
def test_kernels_that_a_config_names_are_left_out(folder: Path, field: str) -> None:
    from paredown.integrations.hugging_face_config import read_config

    small = CONFIGS["gpt"] | {field: KERNELS, "parts": [{field: KERNELS, "use_pretrained_backbone": True}]}
    model, _ = read_config(write(folder, "gpt", small), {}, None)
    config: Any = model.config
    assert KERNELS not in repr(config.to_dict()) and config._attn_implementation in ("sdpa", "eager")
    assert config.parts == [{}]
