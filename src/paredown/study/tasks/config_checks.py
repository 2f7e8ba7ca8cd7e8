"""Checks of a config before a model is built from it: what describes it, and counts of layers that would take for ever to build.

>>> check_counts({"text_config": {"num_hidden_layers": 2**63}}, "config.json")  # doctest: +ELLIPSIS
Traceback (most recent call last):
    ...
paredown.errors.TaskError: config.json: text_config.num_hidden_layers is 9223372036854775808; ... at most 4096 ...
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from paredown.errors import TaskError
from paredown.serial import brief

MOST_LAYERS = 4096  # the deepest published transformers have about 1000
COUNTED = re.compile(r"layer|block|depth|expert|stage|repeat")  # fields by which modules are built one by one
LAYERS = (
    "num_hidden_layers",
    "num_layers",
    "n_layer",
    "n_layers",
    "encoder_layers",
    "decoder_layers",
)  # others can be -1 for "the last"
NOT_COUNTED = re.compile(r"(size|dim|freq|interval|id|ids|tokens|offset|width|length|eps|dropout|step)$")
DIFFUSERS = "_class_name"


def check_config(value: Any, path: Path) -> None:
    """Raise TaskError for a value that is no config of a transformers model, or of one that is too deep to build."""
    if isinstance(value, Mapping) and DIFFUSERS in value:
        raise TaskError(
            f"{path} is a config of diffusers ({brief(value[DIFFUSERS])}), and only those of transformers are built. Write a function that "
            f"builds the model and a batch, such as `def step(): return UNet2DConditionModel.from_config(...), batch, loss`, and give "
            "file.py:step."
        )
    if not isinstance(value, Mapping) or not isinstance(value.get("model_type"), str):
        raise TaskError(f"{path} is no config of a Hugging Face model: it has no field model_type.")
    check_counts(value, str(path))


def check_counts(value: Any, where: str) -> None:
    """Raise TaskError for the first field that requests more than MOST_LAYERS layers, blocks or experts, or fewer than none of them."""
    for name, count in _counts(value, ""):
        if count < 0 and name.rpartition(".")[2] in LAYERS:
            raise TaskError(f"{where}: {name} is {brief(count)}; a model has 0 layers or more. Correct it.")
        if count > MOST_LAYERS:
            raise TaskError(
                f"{where}: {name} is {brief(count)}; a model is built with at most {MOST_LAYERS} of them. Correct it, or trace fewer "
                "layers and multiply."
            )


def _counts(value: Any, name: str) -> Iterator[tuple[str, int]]:
    """Yield the integers in a JSON value that count layers, each with the path of its field."""
    if isinstance(value, Mapping):
        for key, part in value.items():
            yield from _counts(part, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _counts(part, name)
    elif isinstance(value, int) and not isinstance(value, bool):
        last = name.rpartition(".")[2].lower()
        if COUNTED.search(last) and not NOT_COUNTED.search(last):
            yield name, value
