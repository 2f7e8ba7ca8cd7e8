"""LoRA adapters: which layers have them, what is trained, and that an adapted model starts as its base."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from paredown.models import MODELS, random_batch
from paredown.models.lora import add_lora


def test_every_layer_but_the_head_is_adapted_and_the_rest_is_frozen() -> None:
    model = MODELS["gpt"]()
    linear = [path for path, module in model.named_modules() if type(module) is nn.Linear]
    adapted = add_lora(model, 4)
    assert adapted == [path for path in linear if path != "head"] != linear
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained == {f"{path}.lora_{side}.weight" for path in adapted for side in "AB"}


def test_an_adapted_model_starts_as_its_base() -> None:
    model = MODELS["gpt"]()
    base, (x, _) = copy.deepcopy(model), random_batch("gpt", 2)
    add_lora(model, 4)
    assert torch.equal(model(x), base(x))


@pytest.mark.parametrize("targets", [("0",), ("[0-1]",), ("1.inner", "0"), ("inner", "0")])
def test_targets_are_patterns_of_paths_or_last_names(targets: tuple[str, ...]) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ModuleDict({"inner": nn.Linear(8, 8)}), nn.Linear(8, 4))
    assert add_lora(model, 2, targets) == (["0", "1.inner"] if "inner" in "".join(targets) else ["0"])


class Conv1D(nn.Module):
    """The layer of GPT-2 in transformers: its weight is (inputs, outputs)."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6, 10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


def test_layers_of_gpt2() -> None:
    model = nn.Sequential(Conv1D())
    assert add_lora(model, 2) == ["0"] and model(torch.ones(3, 6)).shape == (3, 10)


def test_targets_that_match_nothing_are_an_error() -> None:
    with pytest.raises(ValueError, match=r"k_proj matches none of 2, which are named 0, 1"):
        add_lora(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), 2, ("k_proj",))
    with pytest.raises(ValueError, match="it has none"):
        add_lora(nn.Sequential(nn.ReLU()), 2)
