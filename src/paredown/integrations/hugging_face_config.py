"""Make a Hugging Face model with the shapes of its config.json, and a batch for it; nothing is downloaded, no code of the config runs.

`read_config(path, options, input)` makes the model on the meta device, with the class of the config's first architecture, else as a causal
language model. Fields that make transformers download code or weights are left out. Counts of layers that would take for ever to build are
refused:

>>> check_counts({"text_config": {"num_hidden_layers": 2**63}}, "config.json")  # doctest: +ELLIPSIS
Traceback (most recent call last):
    ...
paredown.errors.TaskError: config.json: text_config.num_hidden_layers is 9223372036854775808; ... at most 4096 ...
"""

from __future__ import annotations

import re
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from paredown.errors import TaskError
from paredown.serial import brief, read_json

NAME = "config.json"
CONFIG_BATCH = 8  # the default batch size of transformers.Trainer
LONGEST = 1024  # default limit of tokens in one example
CONFIG_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
LARGEST = 1 << 22  # bytes of a config file
# fields that make transformers download code or weights; none of them changes shapes
FETCHED = frozenset(
    {"auto_map", "use_pretrained_backbone"} | {f"{sign}{what}_implementation" for what in ("attn", "experts") for sign in ("", "_")}
)
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
DIFFUSERS = "_class_name"  # the field of a config of diffusers that names the class
ONE_LABEL = ("ForSequenceClassification", "ForImageClassification")  # one label for each example, not for each token


def find_config(text: str) -> Path | None:
    """Return the config.json that `text` names: a file, that of a folder or of its `transformer` or `unet`; else None."""
    path = Path(text)
    if path.name == NAME and path.is_file():
        return path
    return next((folder / NAME for folder in (path, path / "transformer", path / "unet") if (folder / NAME).is_file()), None)


def is_of_diffusers(path: Path) -> bool:
    """Return whether a config.json is one of diffusers."""
    return DIFFUSERS in config_object(path)


def read_config(path: Path, options: Mapping[str, Any], input: str | None) -> tuple[nn.Module, dict[str, Tensor]]:
    """Return a model without values (on the meta device) with the shapes of a config.json, and a batch for it.

    `options` may set "dtype" and "length"; `input` is text such as "tokens:1024", None for a default.
    """
    unknown = sorted(options.keys() - {"length", "dtype"})
    if unknown:
        raise TaskError(
            f"option {unknown[0]!r} is unknown for a Hugging Face config. Allowed: length, dtype ({', '.join(CONFIG_DTYPES)})."
        )
    value = config_object(path)
    import transformers

    transformers.logging.set_verbosity_error()
    try:
        with _offline():
            config = transformers.AutoConfig.for_model(str(value.pop("model_type", "")), **value)
            config.use_cache = False  # a cache would hold keys and values, which training does not
            model = _model(config, options.get("dtype"))
    except TaskError:
        raise
    except Exception as error:  # transformers raises exceptions of any type for an invalid config
        raise TaskError(f"{path.parent.name}/{NAME} describes no model that transformers can make: {first_line(error)}.") from None
    return model, _batch(model, config, _length(config, options, input))


def config_object(path: Path) -> dict[str, Any]:
    """Return the fields of a config.json, without those that make libraries download files."""
    value = read_json(path, "config", TaskError, most_bytes=LARGEST)
    check_config(value, path)
    return _without_fetched(value)


def _without_fetched(value: Any) -> Any:
    """Return a JSON value without the fields that make transformers download files (FETCHED), at any depth."""
    if isinstance(value, dict):
        return {name: _without_fetched(part) for name, part in value.items() if name not in FETCHED}
    return [_without_fetched(part) for part in value] if isinstance(value, list) else value


@contextmanager
def _offline() -> Generator[None]:
    """Return a context in which huggingface_hub downloads nothing, not even a backbone that a config names."""
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


def _model(config: Any, dtype: Any) -> nn.Module:
    """Return on the meta device the model of the config's first architecture, else a causal language model, in `dtype`."""
    import transformers

    if dtype is not None and dtype not in CONFIG_DTYPES:
        raise TaskError(f"dtype {dtype!r} is unknown. Allowed: {', '.join(CONFIG_DTYPES)}.")
    named = next((name for name in config.architectures or () if isinstance(name, str) and name.isidentifier()), "")
    kind: Any = getattr(transformers, named, None)
    with torch.device("meta"):
        if isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel):
            model: Any = kind(config)
        else:
            model = transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    wanted = CONFIG_DTYPES[dtype] if dtype else getattr(config, "dtype", None)
    return model.to(wanted) if isinstance(wanted, torch.dtype) else model


def _length(config: Any, options: Mapping[str, Any], input: str | None) -> int:
    kind, _, number = (input or "").partition(":")
    if input is not None and (kind != "tokens" or not number.isdigit()):
        raise TaskError(f"input {input!r} cannot be used with a Hugging Face config; write tokens:512, or leave it out.")
    most = getattr(config, "max_position_embeddings", None)
    return int(number[:9]) if number else int(options.get("length", min(most if isinstance(most, int) else LONGEST, LONGEST)))


def _batch(model: nn.Module, config: Any, length: int) -> dict[str, Tensor]:
    name = str(getattr(model, "main_input_name", ""))
    has_one = type(model).__name__.endswith(ONE_LABEL)
    if name == "input_ids":
        ids = torch.zeros((CONFIG_BATCH, length), dtype=torch.int64)
        return {name: ids, "attention_mask": torch.ones_like(ids), "labels": ids[:, 0].clone() if has_one else ids.clone()}
    if name == "pixel_values":
        size = getattr(config, "image_size", 224)
        sides = (int(size[0]), int(size[-1])) if isinstance(size, list | tuple) else (int(size), int(size))
        shape = (CONFIG_BATCH, int(getattr(config, "num_channels", 3)), *sides)
        return {name: torch.empty(shape, device="meta"), "labels": torch.zeros(CONFIG_BATCH, dtype=torch.int64)}
    raise TaskError(
        f"{type(model).__name__} takes {name!r}, for which no random batch can be made: write a function that returns (model, batch)."
    )


def first_line(error: Exception) -> str:
    """Return the first line of an exception's message, or the name of its class if there is no message."""
    return str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__


# --- checks of a config before a model is built from it --------------------------------------------------------------


def check_config(value: Any, path: Path) -> None:
    """Raise TaskError if a JSON value is not the config of a transformers or diffusers model, or if the model is too deep to build."""
    if not isinstance(value, Mapping) or not isinstance(value.get(DIFFUSERS, value.get("model_type")), str):
        raise TaskError(
            f"{path} is no config of a Hugging Face model: it has no field model_type, and none of diffusers ({DIFFUSERS})."
        )
    check_counts(value, str(path))


def check_counts(value: Any, where: str) -> None:
    """Raise TaskError if a field asks for more than MOST_LAYERS layers, blocks or experts, or for less than 0 layers.

    Its message begins with `where`.
    """
    for name, count in _counts(value, ""):
        if count < 0 and name.rpartition(".")[2] in LAYERS:
            raise TaskError(f"{where}: {name} is {brief(count)}; a model has 0 layers or more. Correct it.")
        if count > MOST_LAYERS:
            raise TaskError(
                f"{where}: {name} is {brief(count)}; a model is built with at most {MOST_LAYERS} of them. Correct it, or trace fewer "
                "layers and multiply."
            )


def _counts(value: Any, name: str) -> Iterator[tuple[str, int]]:
    """Yield the integers in a JSON value that count layers, each after the path of its field; `name` is the path of `value` itself."""
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
