"""Steps of diffusion models from configs of diffusers: shapes of the batch, against the models of diffusers where it is installed.

Where it is not, a module with diffusers' names stands for it, whose classes check the shapes that they get.
"""

# ruff: noqa: PLR0913  # the arguments of diffusers' models

from __future__ import annotations

import importlib.machinery
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paredown.cli.subject import SubjectOptions, find_subject
from paredown.errors import TaskError
from tests.cli.commands import asked_json

FLUX = {
    "_class_name": "FluxTransformer2DModel", "attention_head_dim": 16, "axes_dims_rope": [4, 6, 6], "guidance_embeds": True,
    "in_channels": 16, "joint_attention_dim": 64, "num_attention_heads": 4, "num_layers": 2, "num_single_layers": 2, "patch_size": 1,
    "pooled_projection_dim": 32,
}  # fmt: skip
SD3 = {
    "_class_name": "SD3Transformer2DModel", "attention_head_dim": 16, "caption_projection_dim": 64, "in_channels": 4, "out_channels": 4,
    "joint_attention_dim": 48, "num_attention_heads": 4, "num_layers": 2, "patch_size": 2, "pooled_projection_dim": 32,
    "pos_embed_max_size": 32, "sample_size": 16,
}  # fmt: skip
UNET = {
    "_class_name": "UNet2DConditionModel", "block_out_channels": [32, 64], "cross_attention_dim": 24, "in_channels": 4, "out_channels": 4,
    "down_block_types": ["CrossAttnDownBlock2D", "DownBlock2D"], "up_block_types": ["UpBlock2D", "CrossAttnUpBlock2D"],
    "layers_per_block": 1, "norm_num_groups": 8, "sample_size": 16, "attention_head_dim": 8,
}  # fmt: skip
SDXL = UNET | {"addition_embed_type": "text_time", "addition_time_embed_dim": 8, "projection_class_embeddings_input_dim": 68}
DIT = {
    "_class_name": "DiTTransformer2DModel", "attention_head_dim": 16, "num_attention_heads": 4, "num_layers": 2, "in_channels": 4,
    "out_channels": 8, "patch_size": 2, "sample_size": 16, "num_embeds_ada_norm": 10, "norm_type": "ada_norm_zero",
    "norm_elementwise_affine": False,
}  # fmt: skip
PIXART = {
    "_class_name": "PixArtTransformer2DModel", "attention_head_dim": 16, "num_attention_heads": 6, "num_layers": 2, "in_channels": 4,
    "out_channels": 8, "patch_size": 2, "sample_size": 128, "caption_channels": 48, "cross_attention_dim": 96,
    "use_additional_conditions": True, "norm_type": "ada_norm_single", "num_embeds_ada_norm": 10, "norm_elementwise_affine": False,
}  # fmt: skip
SHAPES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # of the arguments for 8 pictures, by name; the last is the target
    "flux": (FLUX, {
        "hidden_states": (8, 4096, 16), "encoder_hidden_states": (8, 512, 64), "pooled_projections": (8, 32), "timestep": (8,),
        "img_ids": (4096, 3), "txt_ids": (512, 3), "guidance": (8,), "target": (8, 4096, 16),
    }),
    "flux without guidance": (FLUX | {"guidance_embeds": False}, {
        "hidden_states": (8, 4096, 16), "encoder_hidden_states": (8, 512, 64), "pooled_projections": (8, 32), "timestep": (8,),
        "img_ids": (4096, 3), "txt_ids": (512, 3), "target": (8, 4096, 16),
    }),
    "sd3": (SD3, {
        "hidden_states": (8, 4, 16, 16), "encoder_hidden_states": (8, 333, 48), "pooled_projections": (8, 32), "timestep": (8,),
        "target": (8, 4, 16, 16),
    }),
    "unet": (UNET, {"sample": (8, 4, 16, 16), "timestep": (8,), "encoder_hidden_states": (8, 77, 24), "target": (8, 4, 16, 16)}),
    "dit": (DIT, {"hidden_states": (8, 4, 16, 16), "timestep": (8,), "class_labels": (8,), "target": (8, 4, 16, 16)}),
    "sdxl": (SDXL, {
        "sample": (8, 4, 16, 16), "timestep": (8,), "encoder_hidden_states": (8, 77, 24), "class_labels": None, "timestep_cond": None,
        "attention_mask": None, "cross_attention_kwargs": None, "added_cond_kwargs": {"text_embeds": (8, 20), "time_ids": (8, 6)},
        "target": (8, 4, 16, 16),
    }),
    "pixart": (PIXART, {
        "hidden_states": (8, 4, 128, 128), "encoder_hidden_states": (8, 512, 48), "timestep": (8,),
        "added_cond_kwargs": {"resolution": (8, 2), "aspect_ratio": (8, 1)}, "target": (8, 4, 128, 128),
    }),
}  # fmt: skip


class Stand(nn.Module):
    """A model with diffusers' names: an attention block of which `to_q` and `to_out.0` get adapters, under the config of the file."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.config = Config(config)
        width = config["in_channels"]
        self.transformer_blocks = nn.ModuleList([nn.ModuleDict({"to_q": nn.Linear(width, width)}) for _ in range(2)])
        for block in self.transformer_blocks:
            block["to_out"] = nn.ModuleList([nn.Linear(width, width), nn.Dropout(0.0)])

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Stand:
        return cls(config)

    def predicted(self, x: Tensor) -> Any:
        """The output for channels last."""
        for block in self.transformer_blocks:
            x = x + block["to_out"][0](torch.tanh(block["to_q"](x)))
        return SimpleNamespace(sample=x)


class Config(dict):
    """A config whose fields are attributes too."""

    __getattr__ = dict.get


class FluxTransformer2DModel(Stand):
    def forward(
        self, hidden_states: Any, encoder_hidden_states: Any = None, pooled_projections: Any = None, timestep: Any = None,
        img_ids: Any = None, txt_ids: Any = None, guidance: Any = None, joint_attention_kwargs: Any = None, return_dict: bool = True,
    ) -> Any:  # fmt: skip
        return self.predicted(hidden_states)


class SD3Transformer2DModel(Stand):
    def forward(
        self, hidden_states: Any, encoder_hidden_states: Any = None, pooled_projections: Any = None, timestep: Any = None,
        block_controlnet_hidden_states: Any = None, return_dict: bool = True,
    ) -> Any:  # fmt: skip
        return SimpleNamespace(sample=self.predicted(hidden_states.movedim(1, -1)).sample.movedim(-1, 1))


class UNet2DConditionModel(Stand):
    def forward(
        self, sample: Any, timestep: Any, encoder_hidden_states: Any, class_labels: Any = None, timestep_cond: Any = None,
        attention_mask: Any = None, cross_attention_kwargs: Any = None, added_cond_kwargs: Any = None, return_dict: bool = True,
    ) -> Any:  # fmt: skip
        return SimpleNamespace(sample=self.predicted(sample.movedim(1, -1)).sample.movedim(-1, 1))


class DiTTransformer2DModel(Stand):
    def forward(
        self, hidden_states: Any, timestep: Any = None, class_labels: Any = None, cross_attention_kwargs: Any = None
    ) -> Any:
        return SimpleNamespace(sample=self.predicted(hidden_states.movedim(1, -1)).sample.movedim(-1, 1))


class PixArtTransformer2DModel(Stand):
    def forward(
        self, hidden_states: Any, encoder_hidden_states: Any = None, timestep: Any = None, added_cond_kwargs: Any = None
    ) -> Any:
        return SimpleNamespace(sample=self.predicted(hidden_states.movedim(1, -1)).sample.movedim(-1, 1))


class WanTransformer3DModel(Stand):
    def forward(self, hidden_states: Any, timestep: Any, rotary_emb: Any) -> Any:
        raise AssertionError("no batch can be made for it")


STANDS = (
    FluxTransformer2DModel, SD3Transformer2DModel, UNet2DConditionModel, DiTTransformer2DModel, PixArtTransformer2DModel,
    WanTransformer3DModel,
)  # fmt: skip


@pytest.fixture
def stand(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module named diffusers, in place of an installed one too."""
    module: Any = ModuleType("diffusers")
    module.__spec__, module.__version__, module.ModelMixin = importlib.machinery.ModuleSpec("diffusers", None), "0", Stand
    module.utils = SimpleNamespace(logging=SimpleNamespace(set_verbosity_error=lambda: None))
    for kind in STANDS:
        setattr(module, kind.__name__, kind)
    monkeypatch.setitem(sys.modules, "diffusers", module)


def written(folder: Path, config: dict[str, Any], name: str = "transformer") -> str:
    (folder / name).mkdir(exist_ok=True)
    (folder / name / "config.json").write_text(json.dumps(config))
    return str(folder)


def shapes_of(batch: Any) -> list[Any]:
    def shape(value: Any) -> Any:
        return {k: shape(v) for k, v in value.items()} if isinstance(value, dict) else None if value is None else tuple(value.shape)

    return [shape(value) for value in batch]


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.usefixtures("stand")
def test_the_batch_has_the_shapes_that_the_model_takes(name: str, tmp_path: Path) -> None:
    config, shapes = SHAPES[name]
    subject = find_subject(written(tmp_path, config), SubjectOptions())
    assert shapes_of(subject.batch) == list(shapes.values())
    assert subject.name == config["_class_name"] and {p.device.type for p in subject.model.parameters()} == {"meta"}


@pytest.mark.parametrize("name", SHAPES)
def test_models_of_diffusers_take_the_batch(name: str, tmp_path: Path) -> None:
    """Their own step is traced, with adapters, a frozen base in 4 bits and activation checkpointing."""
    pytest.importorskip("diffusers", reason="diffusers is not installed")
    options = SubjectOptions(lora=4, lora_targets=("to_q", "to_out.0"), device="cuda", input="3x128x128")
    trace = find_subject(f"{written(tmp_path, SHAPES[name][0])}#dtype=bf16,length=16", options).trace()
    assert trace.batch and trace.activations


@pytest.mark.usefixtures("stand")
def test_options_set_the_picture_the_texts_and_the_dtype(tmp_path: Path) -> None:
    folder = written(tmp_path, SD3)
    subject = find_subject(f"{folder}#dtype=bf16,length=100", SubjectOptions(input="3x256x384", batch=2))
    assert shapes_of(subject.batch) == [(2, 4, 32, 48), (2, 100, 48), (2, 32), (2,), (2, 4, 32, 48)]
    assert {p.dtype for p in subject.model.parameters()} == {torch.bfloat16} and not subject.assumed
    assert find_subject(folder, SubjectOptions()).assumed == (
        "batch 8 (--batch sets it)",
        "float32 weights (#dtype=bf16 sets it)",
        "pictures of 128 x 128 (--input 3x128x128 sets it)",
        "texts of 333 tokens (#length=N sets it)",
    )
    assert shapes_of(find_subject(f"{folder}#picture=64", SubjectOptions(input="tokens:5")).batch)[:2] == [(8, 4, 8, 8), (8, 5, 48)]


@pytest.mark.usefixtures("stand")
def test_adapters_frozen_formats_and_checkpointing_work_as_for_language_models(tmp_path: Path) -> None:
    command = (
        "estimate",
        written(tmp_path, SD3 | {"in_channels": 64}),
        "--lora",
        "4",
        "--lora-targets",
        "to_q,to_out.0",
        "--device",
        "cuda",
    )
    plain, frozen = asked_json(*command), asked_json(*command, "--frozen", "nf4/64@bf16", "--checkpointing")
    assert plain["batch_size"] == 1 and plain["lora"]["layers"] == 4
    assert {row["plan"] for row in plain["plans"]} >= {"baseline", "frozen4+activations8"}
    weights = [found["plans"][0]["by_role"]["weight"] for found in (plain, frozen)]
    adapters = 4 * 2 * 4 * 64 * 4  # layers, A and B of rank 4 x 64 values in float32
    assert 5 < (weights[0] - adapters) / (weights[1] - adapters) < 8, "4.25 bits instead of 32, and biases"
    assert frozen["checkpointed"] == ["transformer_blocks.0", "transformer_blocks.1"]


@pytest.mark.usefixtures("stand")
def test_configs_that_cannot_be_used_are_sentences(tmp_path: Path) -> None:
    for config, options, fault in (
        (FLUX | {"_class_name": "NoModel"}, SubjectOptions(), r"diffusers 0 has no model 'NoModel'.*file\.py:step"),
        (FLUX | {"_class_name": "WanTransformer3DModel"}, SubjectOptions(), "takes 'rotary_emb', for which no random batch"),
        (FLUX, SubjectOptions(input="3x100x100"), "100 x 100 pixels has no whole patches: sides are multiples of 16"),
        (FLUX, SubjectOptions(input="large"), "write the picture as 3x1024x1024, the texts as tokens:512"),
        (FLUX | {"num_layers": 10**6}, SubjectOptions(), "num_layers is 1000000; .*at most 4096"),
    ):
        with pytest.raises(TaskError, match=fault):
            find_subject(written(tmp_path, config), options)
    with pytest.raises(TaskError, match=r"option 'size' is unknown for a config of diffusers. Allowed: dtype, length, picture"):
        find_subject(f"{written(tmp_path, FLUX)}#size=3", SubjectOptions())
    with pytest.raises(TaskError, match="dtype 'int8' is unknown"):
        find_subject(f"{written(tmp_path, FLUX)}#dtype=int8", SubjectOptions())


def test_without_diffusers_the_error_says_to_install_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "diffusers", None)
    with pytest.raises(TaskError, match=r"diffusers \('UNet2DConditionModel'\), which is not installed: pip install diffusers"):
        find_subject(written(tmp_path, UNET, "unet"), SubjectOptions())
