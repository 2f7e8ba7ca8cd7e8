"""LoRA adapters: which layers have them, what is trained, and that an adapted model starts as its base."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import nn

from paredown.models import MODELS, random_batch
from paredown.models.lora import ALPHA, add_lora
from paredown.plan.footprint import footprint
from paredown.plan.plan import Plan
from paredown.predict.trace_step import trace_step
from paredown.roles import Role


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


def mixture_of_experts(kind: str) -> Any:
    """A small mixture of experts of transformers."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": 256}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    experts = {"num_experts": 8, "num_local_experts": 8, "num_experts_per_tok": 2, "eos_token_id": None, "pad_token_id": None}
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(kind, **sizes, **heads, **experts))


@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral", "olmoe"])
def test_experts_and_routers_have_the_adapters_of_peft(kind: str) -> None:
    """The same parameters are trained, and with equal adapters outputs and gradients are equal."""
    peft = pytest.importorskip("peft")
    model = mixture_of_experts(kind)
    ours = copy.deepcopy(model)
    add_lora(ours, 4)
    config = peft.LoraConfig(r=4, lora_alpha=4 * ALPHA, target_modules="all-linear", init_lora_weights=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT looks for rank patterns in modules, and has parameters
        theirs = peft.get_peft_model(model, config)
    adapters = {
        name.removeprefix("base_model.model.").replace(".default", ""): p
        for name, p in theirs.named_parameters()
        if p.requires_grad
    }
    own = {name: p for name, p in ours.named_parameters() if p.requires_grad}
    assert {name: p.shape for name, p in own.items()} == {name: p.shape for name, p in adapters.items()}
    with torch.no_grad():
        for name, parameter in own.items():
            parameter.copy_(adapters[name])
    ids = torch.randint(256, (2, 16))
    for adapted in (ours, theirs):
        adapted(input_ids=ids, labels=ids).loss.backward()
    for name, parameter in own.items():
        torch.testing.assert_close(parameter.grad, adapters[name].grad)


def test_transposed_experts_have_no_adapters() -> None:
    adapted = add_lora(mixture_of_experts("gpt_oss"), 4)
    assert {path.rpartition(".")[2] for path in adapted} == {"q_proj", "k_proj", "v_proj", "o_proj"}


def test_targets_name_parameters_of_experts() -> None:
    model = mixture_of_experts("qwen3_moe")
    assert add_lora(model, 4, ("down_proj",)) == [f"model.layers.{layer}.mlp.experts.down_proj" for layer in range(2)]
    weight = model.model.layers[0].mlp.experts.base_layer.down_proj
    model(input_ids=torch.zeros(1, 4, dtype=torch.int64))
    assert model.model.layers[0].mlp.experts.base_layer.down_proj is weight, "the parameter is registered again after forward"


def test_activation_checkpointing_of_adapted_experts_is_counted() -> None:
    """Adapters read weights outside of the module that has them, which is no second call of the layer."""
    with torch.device("meta"):
        model = mixture_of_experts("qwen3_moe")
    add_lora(model, 4)
    ids = torch.zeros(1, 64, dtype=torch.int64)
    trace = trace_step(model, {"input_ids": ids, "labels": ids}, optimizer="adamw", device="cuda")
    foot = footprint(trace, Plan().recomputing("model.layers.*"))
    assert not any("checkpointing is not counted" in note for note in foot.trace.notes)
    assert foot.by_role[Role.ACTIVATION] < footprint(trace).by_role[Role.ACTIVATION] / 2
