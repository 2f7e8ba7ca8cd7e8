"""Built-in models on built-in data: what a task by name is made of.

A task's options stand behind `#`: `digits#model=vit,steps=200,dim=32`. Those of OPTIONS are the task's own, all others are keywords of the
model. Without a number of steps a task on pictures takes ten passes over its examples.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import nn

from paredown.errors import TaskError
from paredown.models import MODELS, OF_PIXELS, OF_TEXT
from paredown.plan.keys import closest
from paredown.runs.arrays import scaled
from paredown.runs.data import NUM_BYTES, Data, Examples, Look, Text
from paredown.runs.task import Recipe, Task

BATCH = 32
PASSES = 10
TEXT_STEPS = 500
MLP_WIDTH = 256
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "none": None}
# what trains well with AdamW; all other models take SGD with momentum
SLOW_STARTERS = frozenset({"vit", "convnext", "gpt", "lstm"})
ADAMW = Recipe("adamw", 1e-3, {"betas": (0.9, 0.95), "weight_decay": 0.1}, max_norm=1.0)
SGDM = Recipe("sgdm", 0.05, {"weight_decay": 5e-4})


class Option(NamedTuple):
    """One option of a task: how its text is read, and what it means."""

    read: type
    note: str


OPTIONS: Mapping[str, Option] = MappingProxyType(
    {
        "model": Option(str, "a name of paredown.models.MODELS"),
        "steps": Option(int, "of training"),
        "batch": Option(int, "examples of a step"),
        "optimizer": Option(str, "sgd, sgdm, adamw or lion"),
        "lr": Option(float, "the peak learning rate"),
        "schedule": Option(str, "cosine or constant"),
        "max_norm": Option(float, "to which gradients are clipped"),
        "loss_scale": Option(float, "where torch's scaler of losses starts"),
        "loss_factor": Option(float, "by which the loss is multiplied and gradients are divided"),
        "autocast": Option(str, "bf16, fp16 or none"),
        "superclass": Option(int, "pictures: only the classes of this one"),
        "side": Option(int, "pictures: scaled to this height and width"),
        "shift": Option(int, "pictures: shifted by up to so many pixels in training"),
        "mirror": Option(bool, "pictures: mirrored or not in training"),
        "length": Option(int, "text: bytes of a piece"),
    }
)
OF_RECIPE = ("lr", "schedule", "max_norm", "loss_scale", "loss_factor")
OF_PICTURES = ("superclass", "side", "shift", "mirror")
TRUE = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}


def parse_options(text: str) -> dict[str, Any]:
    """The options that stand behind `#`, read as what they are.

    >>> parse_options("steps=20,lr=0.1,mirror=true,width=16,gelu=tanh")
    {'steps': 20, 'lr': 0.1, 'mirror': True, 'width': 16, 'gelu': 'tanh'}
    """
    found: dict[str, Any] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, sign, value = (piece.strip() for piece in part.partition("="))
        if not sign or not name.isidentifier() or not value:
            raise TaskError(f"option {part!r} cannot be read: options are name=value, with commas between them.")
        if name in found:
            raise TaskError(f"option {name!r} is there twice.")
        found[name] = _read(name, value)
    return found


def _read(name: str, value: str) -> Any:
    wanted = OPTIONS[name].read if name in OPTIONS else None
    for kind in (wanted,) if wanted is not None else (int, float, bool, str):
        try:
            return TRUE[value.lower()] if kind is bool else kind(value)
        except (ValueError, KeyError):
            continue
    raise TaskError(
        f"option {name}={value} cannot be read; it is of type {getattr(wanted, '__name__', wanted)}: {OPTIONS[name].note}."
    )


WITHOUT_CONVOLUTIONS = ("mlp", "vit")  # or with one that matters little


def named_task(name: str, data: Examples | Text, options: Mapping[str, Any]) -> Task:
    """A built-in model on `data`."""
    is_text = isinstance(data, Text)
    model = options.get("model", "gpt" if is_text else "resnet18")
    _check_model(model, is_text=is_text)
    _refuse(options, OF_PICTURES if is_text else ("length",), "text" if is_text else "pictures")
    data = data if is_text else _prepared(data, model, options)
    build = partial(MODELS[model], **_keywords(model, data, options))
    _check_build(model, build, data)
    batch = options.get("batch", BATCH)
    steps = options.get("steps", TEXT_STEPS if is_text else max(PASSES * (data.num_train // max(batch, 1)), 1))
    metric = "loss" if is_text else "error"
    autocast = _dtype(options.get("autocast", "none"))
    turns = not is_text and model not in WITHOUT_CONVOLUTIONS
    recipe = _recipe(model, options)
    return Task(name, partial(_made, build), data, steps, batch, recipe, metric=metric, autocast=autocast, channels_last=turns)


def _made(build: partial[nn.Module], seed: int) -> nn.Module:
    """A fresh model; `evaluate` has seeded torch."""
    return build()


def _check_model(model: str, *, is_text: bool) -> None:
    if model not in MODELS:
        raise TaskError(f"model {model!r} is unknown. Closest: {closest(model, MODELS)}. Allowed: {', '.join(MODELS)}.")
    if model in OF_PIXELS:
        raise TaskError(f"model {model!r} gives an answer for each pixel, and no built-in task asks for that.")
    if (model in OF_TEXT) != is_text:
        fitting = [name for name in MODELS if (name in OF_TEXT) == is_text and name not in OF_PIXELS]
        raise TaskError(f"model {model!r} is not for {'text' if is_text else 'pictures'}. Allowed: {', '.join(fitting)}.")


def _refuse(options: Mapping[str, Any], names: tuple[str, ...], what: str) -> None:
    for name in names:
        if name in options:
            raise TaskError(f"option {name!r} does not go with {what} ({OPTIONS[name].note}).")


def _prepared(data: Examples, model: str, options: Mapping[str, Any]) -> Examples:
    """Pictures as `model` takes them: three channels for all but the MLP."""
    if "side" in options:
        if options["side"] < 1:
            raise TaskError(f"side is {options['side']}; pictures have at least one pixel.")
        data = scaled(data, options["side"])
    if not 0 <= options.get("shift", 0) < min(data.x_train.shape[-2:]):
        raise TaskError(f"shift is {options['shift']}; pictures of {tuple(data.x_train.shape[-2:])} are shifted by less than that.")
    look = Look(None if model == "mlp" else 3, options.get("shift", 0), options.get("mirror", False))
    return replace(data, look=look)


def _keywords(model: str, data: Data, options: Mapping[str, Any]) -> dict[str, Any]:
    """What the model is told: what the data asks for, then the user's."""
    given = {name: value for name, value in options.items() if name not in OPTIONS}
    if isinstance(data, Text):
        return {"vocabulary": NUM_BYTES, **({"context": data.length} if model == "gpt" else {}), **given}
    assert isinstance(data, Examples)
    if model == "mlp":
        width = given.pop("width", MLP_WIDTH)
        return {"sizes": (data.x_train[0].numel(), width, width, data.num_answers), **given}
    return {"num_classes": data.num_answers, **({"picture": data.x_train.shape[-1]} if model == "vit" else {}), **given}


def _check_build(model: str, build: partial[nn.Module], data: Examples | Text) -> None:
    """The model is made and called once without memory; whatever it refuses is said here."""
    x = next(data.tests(2, device=torch.device("cpu")))[0].to("meta")
    try:
        with torch.device("meta"):
            made = build()
    except Exception as error:
        takes = [name for name in inspect.signature(build.func).parameters if name != "changes"]
        more = f" It takes {', '.join(takes)}." if takes else ""
        given = ", ".join(f"{name}={value}" for name, value in build.keywords.items())
        raise TaskError(
            f"model {model!r} cannot be made of {given}: {error}.{more} Options of tasks: {', '.join(OPTIONS)}."
        ) from None
    try:
        made.eval()(x)
    except Exception as error:
        hint = "" if isinstance(data, Text) else " Scale the pictures with side=32."
        shape = " x ".join(map(str, x.shape[1:]))
        raise TaskError(f"model {model!r} does not take examples of {shape}: {error}.{hint}") from None


def _recipe(model: str, options: Mapping[str, Any]) -> Recipe:
    usual = ADAMW if model in SLOW_STARTERS else SGDM
    own = {name: options[name] for name in OF_RECIPE if name in options}
    if options.get("optimizer", usual.optimizer) == usual.optimizer:
        return replace(usual, **own)
    if "lr" not in own:
        raise TaskError(
            f"optimizer={options['optimizer']} needs lr=: what suits {usual.optimizer} ({usual.lr:g}) does not suit it."
        )
    return Recipe(options["optimizer"], **own)


def _dtype(name: str) -> torch.dtype | None:
    if name not in DTYPES:
        raise TaskError(f"autocast {name!r} is unknown. Allowed: {', '.join(DTYPES)}.")
    return DTYPES[name]
