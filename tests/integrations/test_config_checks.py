"""Configs, cards, targets and functions that cannot be used are sentences."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from paredown.cli.subject import SubjectOptions, find_subject
from paredown.errors import TaskError
from paredown.integrations.hugging_face_config import check_counts
from paredown.models.lora import add_lora

LLAMA = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 100}


def written(folder: Path, value: Any) -> str:
    (folder / "config.json").write_text(json.dumps(value))
    return str(folder)


@pytest.mark.parametrize("num", [5000, 2**63, 10**400])
def test_too_many_layers_are_not_built(num: int, tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=r"num_hidden_layers is .*at most 4096"):
        find_subject(written(tmp_path, LLAMA | {"num_hidden_layers": num}), SubjectOptions())
    with pytest.raises(TaskError, match=r"model 'gpt': layers is .*at most 4096"):
        find_subject(f"gpt#layers={min(num, 2**63)}", SubjectOptions())
    with pytest.raises(TaskError, match=r"vision\.depths is"):
        check_counts({"vision": {"depths": [2, num]}}, "config.json")


def test_fewer_than_no_layers_are_refused() -> None:
    with pytest.raises(TaskError, match=r"text_config\.num_hidden_layers is -1; a model has 0 layers or more"):
        check_counts({"vision_feature_layer": -2, "text_config": {"num_hidden_layers": -1}}, "config.json")


def test_sizes_are_no_counts() -> None:
    check_counts({"block_size": 1 << 20, "layer_norm_eps": 1e-5, "vocab_size": 10**6, "num_hidden_layers": 126}, "config.json")


def test_one_unknown_target_of_several_is_named() -> None:
    model = nn.Sequential()
    model.add_module("q_proj", nn.Linear(4, 4))
    with pytest.raises(ValueError, match="nope matches none of 1, which are named q_proj"):
        add_lora(model, 2, ["q_proj", "nope"])
    assert type(model.q_proj) is nn.Linear and all(p.requires_grad for p in model.parameters()), "unmodified"


def test_a_model_instead_of_a_function(tmp_path: Path) -> None:
    path = tmp_path / "net.py"
    path.write_text("from torch import nn\nnet = nn.Linear(3, 3)\n")
    with pytest.raises(TaskError, match="net is a model, not a function: write `def step"):
        find_subject(f"{path}:net", SubjectOptions(input="3"))
