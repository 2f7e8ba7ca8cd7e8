"""Make a diffusion model with the shapes of its config.json, and a batch for it: noisy latents, time steps, texts and other inputs.

`read_diffusers_config(path, options, input)` makes the model on the meta device with the class of diffusers that the config names; nothing
is downloaded. ARGUMENTS has a function for each argument of these classes' forward; a class that requires other arguments is refused.

    latents   (batch, in_channels, height / 8, width / 8), of which UNets and most transformers make patches themselves
              (batch, height / 16 * width / 16, in_channels) where the model takes `img_ids`: Flux's patches are made before it
    texts     (batch, length, width), the output of the text encoder

Latents have an eighth of the picture's height and width, as those of the autoencoders of Stable Diffusion and Flux.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from inspect import Parameter, signature
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from paredown.errors import TaskError
from paredown.integrations.hugging_face_config import CONFIG_BATCH, CONFIG_DTYPES, DIFFUSERS, config_object, first_line
from paredown.serial import brief

LATENT, PATCH = 8, 2  # pixels of the picture for one latent, latents for one side of a patch
PICTURE = 1024  # pixels of a side, if the config has no sample_size
LENGTHS = {"UNet2DConditionModel": 77, "SD3Transformer2DModel": 333}  # tokens that the text encoders of these models give
LENGTH = 512  # of T5, for other models
OPTIONS = ("dtype", "length", "picture")
OWN_FUNCTION = (
    "Or write a function that builds the model and a batch, such as `def step(): return UNet2DConditionModel.from_config(...), batch, "
    "loss`, and give file.py:step."
)


@dataclass(frozen=True)
class DiffusionInput:
    """Makes the inputs of a diffusion model from its config, the picture's pixels, the tokens of a text (`length`) and a dtype."""

    config: Mapping[str, Any]
    height: int
    width: int
    length: int
    is_sequence: bool  # whether the model takes patches, not latents
    dtype: torch.dtype

    def floats(self, *sizes: int) -> Tensor:
        """Return a floating-point tensor of shape (CONFIG_BATCH, *sizes) on the meta device."""
        return torch.empty((CONFIG_BATCH, *sizes), dtype=self.dtype, device="meta")

    def latents(self) -> Tensor:
        """Return the noisy latents, as a sequence of patches if the model takes one."""
        height, width, channels = self.height // LATENT, self.width // LATENT, int(self.config["in_channels"])
        return (
            self.floats(height // PATCH * (width // PATCH), channels) if self.is_sequence else self.floats(channels, height, width)
        )

    def texts(self) -> Tensor | None:
        """Return embeddings of texts; None for a model that takes no texts."""
        width = next((self.config[name] for name in TEXT_WIDTHS if self.config.get(name)), None)
        width = width[0] if isinstance(width, list | tuple) else width
        return None if width is None else self.floats(self.length, int(width))

    def ids(self, num: int) -> Tensor:
        """Return zeros for the positions of `num` tokens on the axes of a rotary embedding, (num, axes)."""
        return torch.zeros((num, len(self.config.get("axes_dims_rope") or (0, 0, 0))))

    def conditions(self) -> dict[str, Tensor | None] | None:
        """Return the sizes and the pooled text that SDXL adds to its time embedding, or the sizes of PixArt; None for other models."""
        config = self.config
        if config.get("addition_embed_type") == "text_time":
            pooled = config["projection_class_embeddings_input_dim"] - 6 * config["addition_time_embed_dim"]
            return {"text_embeds": self.floats(pooled), "time_ids": self.floats(6)}
        if "use_additional_conditions" in config:
            has_sizes = config["use_additional_conditions"] or (
                config["use_additional_conditions"] is None and self.width == PICTURE
            )
            return {name: self.floats(num) if has_sizes else None for name, num in (("resolution", 2), ("aspect_ratio", 1))}
        return None

    def classes(self) -> Tensor | None:
        """Return a class number for each example; None for a model that takes no classes."""
        has_classes = self.config.get("num_class_embeds") or self.config.get("norm_type") == "ada_norm_zero"
        return torch.zeros(CONFIG_BATCH, dtype=torch.int64) if has_classes else None


TEXT_WIDTHS = (
    "joint_attention_dim",
    "caption_channels",
    "encoder_hid_dim",
    "cross_attention_dim",
)  # the first one that a config has
ARGUMENTS: dict[str, Callable[[DiffusionInput], Any]] = {
    "sample": DiffusionInput.latents,
    "hidden_states": DiffusionInput.latents,
    "timestep": lambda step: torch.zeros(CONFIG_BATCH, dtype=torch.int64),
    "encoder_hidden_states": DiffusionInput.texts,
    "pooled_projections": lambda step: step.floats(int(step.config["pooled_projection_dim"])),
    "img_ids": lambda step: step.ids(step.latents().shape[1]),
    "txt_ids": lambda step: step.ids(step.length),
    "guidance": lambda step: step.floats() if step.config.get("guidance_embeds") else None,
    "class_labels": DiffusionInput.classes,
    "added_cond_kwargs": DiffusionInput.conditions,
}


def sample_loss(output: Any, target: Tensor) -> Tensor:
    """Return the mean squared error of a diffusion model's output, without channels beyond the target's, which are variances."""
    return nn.functional.mse_loss(output.sample[:, : target.shape[1]].float(), target.float())


def read_diffusers_config(
    path: Path, options: Mapping[str, Any], input: str | None
) -> tuple[nn.Module, tuple[Any, ...], tuple[str, ...]]:
    """Return the model of a diffusers config.json on the meta device, a batch for `sample_loss`, and texts on the sizes that were assumed.

    `options` may set "dtype", "length" of the texts and "picture", a side in pixels; `input` is text such as "3x1024x1024" or "tokens:512".
    """
    unknown = sorted(options.keys() - set(OPTIONS))
    if unknown:
        raise TaskError(f"option {unknown[0]!r} is unknown for a config of diffusers. Allowed: {', '.join(OPTIONS)}.")
    if options.get("dtype", "fp32") not in CONFIG_DTYPES:
        raise TaskError(f"dtype {options['dtype']!r} is unknown. Allowed: {', '.join(CONFIG_DTYPES)}.")
    value = config_object(path)
    model = _model(path, value).to(CONFIG_DTYPES[options.get("dtype", "fp32")])
    return model, *diffusion_batch(model, {**options, **_sizes(input)})


def _model(path: Path, value: Mapping[str, Any]) -> nn.Module:
    """Return on the meta device the diffusers model that `value`, the JSON of the config at `path`, describes."""
    name = value[DIFFUSERS]
    try:
        import diffusers  # type: ignore[import-not-found]
    except ImportError:
        raise TaskError(
            f"{path} is a config of diffusers ({brief(name)}), which is not installed: pip install diffusers. {OWN_FUNCTION}"
        ) from None

    kind: Any = getattr(diffusers, name, None) if isinstance(name, str) and name.isidentifier() else None
    if not (isinstance(kind, type) and issubclass(kind, diffusers.ModelMixin)):
        raise TaskError(f"{path}: diffusers {diffusers.__version__} has no model {brief(name)}. {OWN_FUNCTION}")
    diffusers.utils.logging.set_verbosity_error()
    try:
        with torch.device("meta"):
            return kind.from_config(dict(value)).train()
    except Exception as error:  # diffusers raises exceptions of any type for an invalid config
        raise TaskError(f"{path} describes no {name} that diffusers can make: {first_line(error)}.") from None


def _sizes(input: str | None) -> dict[str, Any]:
    """Return what --input, `input`, sets: {"picture": (height, width)} in pixels, {"length": tokens of a text}, or {} for None."""
    kind, _, number = (input or "").partition(":")
    sides = (input or "").lower().split("x")
    if kind == "tokens" and number.isdigit():
        return {"length": int(number[:9])}
    if len(sides) == 3 and all(side.isdigit() and int(side[:9]) > 0 for side in sides):
        return {"picture": tuple(int(side[:9]) for side in sides[1:])}
    if input is not None:
        raise TaskError(
            f"input {input!r} cannot be used with a config of diffusers; write the picture as 3x1024x1024, the texts as tokens:512."
        )
    return {}


def _parameters(model: nn.Module) -> dict[str, Parameter]:
    return dict(signature(model.forward).parameters)


def diffusion_batch(model: nn.Module, options: Mapping[str, Any]) -> tuple[tuple[Any, ...], tuple[str, ...]]:
    """Return a batch of CONFIG_BATCH examples without memory, and texts that tell which sizes were assumed, with the options that set them.

    The batch has the arguments of the model, up to the last one that has a value, and the target of `sample_loss`.
    """
    step, assumed = _input(model, options)
    made: list[Any] = []
    for name, parameter in _parameters(model).items():
        if name not in ARGUMENTS and parameter.default is Parameter.empty:
            raise TaskError(
                f"{type(model).__name__} takes {name!r}, for which no random batch can be made; those that can: {', '.join(ARGUMENTS)}. "
                f"{OWN_FUNCTION}"
            )
        made.append(ARGUMENTS[name](step) if name in ARGUMENTS else parameter.default)
    last = max(place for place, name in enumerate(_parameters(model)) if name in ARGUMENTS and made[place] is not None)
    return (*made[: last + 1], step.latents()), assumed


def _input(model: nn.Module, options: Mapping[str, Any]) -> tuple[DiffusionInput, tuple[str, ...]]:
    """Return the DiffusionInput that makes the batch, and texts that tell which sizes were assumed, with the options that set them."""
    config: Any = model.config
    side = config.get("sample_size")
    latents = tuple(side) if isinstance(side, list | tuple) else (side or PICTURE // LATENT,) * 2
    picture = options.get("picture", tuple(LATENT * one for one in latents))
    height, width = picture if isinstance(picture, tuple) else (picture, picture)
    if height % (LATENT * PATCH) or width % (LATENT * PATCH):
        raise TaskError(f"a picture of {height} x {width} pixels has no whole patches: sides are multiples of {LATENT * PATCH}.")
    name = type(model).__name__
    length = int(options.get("length", LENGTHS.get(name, LENGTH)))
    step = DiffusionInput(config, height, width, length, "img_ids" in _parameters(model), next(model.parameters()).dtype)
    assumed = {
        "dtype": "float32 weights (#dtype=bf16 sets it)",
        "picture": f"pictures of {height} x {width} (--input 3x{height}x{width} sets it)",
        "length": f"texts of {length} tokens (#length=N sets it)" if step.texts() is not None else "",
    }
    return step, tuple(text for key, text in assumed.items() if text and key not in options)
