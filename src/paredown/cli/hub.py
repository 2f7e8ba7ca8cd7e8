"""A Hugging Face model from its config.json alone: shapes without weights, nothing is fetched, and no code that a config names is run."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from paredown.errors import TaskError
from paredown.serial import read_json

NAME = "config.json"
BATCH = 8  # as Trainer has it
LONGEST = 1024  # tokens, unless told otherwise
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
LARGEST = 1 << 22  # bytes of a config
# what makes a library fetch code or weights; none of it changes shapes
FETCHED = frozenset(
    {"auto_map", "use_pretrained_backbone"} | {f"{sign}{what}_implementation" for what in ("attn", "experts") for sign in ("", "_")}
)
ONE_LABEL = ("ForSequenceClassification", "ForImageClassification")


def find_config(text: str) -> Path | None:
    """The config.json that `text` names: itself, or that of a folder."""
    path = Path(text)
    if path.name == NAME and path.is_file():
        return path
    return path / NAME if (path / NAME).is_file() else None


def read_config(path: Path, options: Mapping[str, Any], input: str | None) -> tuple[nn.Module, dict[str, Tensor]]:
    """The model that a config describes, on the meta device, and a batch for it. `length` and `dtype` are options."""
    unknown = sorted(options.keys() - {"length", "dtype"})
    if unknown:
        raise TaskError(
            f"option {unknown[0]!r} is unknown for a Hugging Face config. Allowed: length, dtype ({', '.join(DTYPES)})."
        )
    value = _object(path)
    transformers = import_module("transformers")
    transformers.logging.set_verbosity_error()
    try:
        with _offline():
            config = transformers.AutoConfig.for_model(str(value.pop("model_type", "")), **value)
            config.use_cache = False  # a cache keeps keys and values as they are
            model = _model(transformers, config, options.get("dtype"))
    except TaskError:
        raise
    except Exception as error:  # whatever a config makes another library raise
        raise TaskError(f"{path.parent.name}/{NAME} describes no model that transformers can make: {_first_line(error)}.") from None
    return model, _batch(model, config, _length(config, options, input))


def _object(path: Path) -> dict[str, Any]:
    value = read_json(path, "config", TaskError, most_bytes=LARGEST)
    if not isinstance(value, dict) or not isinstance(value.get("model_type"), str):
        raise TaskError(f"{path} is no config of a Hugging Face model: it has no model_type.")
    return _without_fetched(value)


def _without_fetched(value: Any) -> Any:
    """A JSON value without the fields of FETCHED, parts of parts included."""
    if isinstance(value, dict):
        return {name: _without_fetched(part) for name, part in value.items() if name not in FETCHED}
    return [_without_fetched(part) for part in value] if isinstance(value, list) else value


@contextmanager
def _offline() -> Generator[None]:
    """Whatever else a config names, such as a backbone of the hub, is not asked for."""
    constants: Any = import_module("huggingface_hub.constants")
    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


def _model(transformers: Any, config: Any, dtype: Any) -> nn.Module:
    """The class that the config names among those of transformers; a language model where it names none."""
    if dtype is not None and dtype not in DTYPES:
        raise TaskError(f"dtype {dtype!r} is unknown. Allowed: {', '.join(DTYPES)}.")
    named = [name for name in config.architectures or () if isinstance(name, str) and name.isidentifier()]
    kind = getattr(transformers, named[0], None) if named else None
    is_model = isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)
    with torch.device("meta"):
        model = (
            kind(config)
            if is_model and kind is not None
            else transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=False)
        )
    wanted = DTYPES[dtype] if dtype else getattr(config, "dtype", None)
    return model.to(wanted) if isinstance(wanted, torch.dtype) else model


def _length(config: Any, options: Mapping[str, Any], input: str | None) -> int:
    kind, _, number = (input or "").partition(":")
    if input is not None and (kind != "tokens" or not number.isdigit()):
        raise TaskError(f"input {input!r} does not go with a Hugging Face config; say tokens:512, or nothing.")
    most = getattr(config, "max_position_embeddings", None)
    return int(number[:9]) if number else int(options.get("length", min(most if isinstance(most, int) else LONGEST, LONGEST)))


def _batch(model: nn.Module, config: Any, length: int) -> dict[str, Tensor]:
    """Keywords of the model by the name of its main input."""
    name = str(getattr(model, "main_input_name", ""))
    has_one = type(model).__name__.endswith(ONE_LABEL)
    if name == "input_ids":
        ids = torch.zeros((BATCH, length), dtype=torch.int64)
        return {name: ids, "attention_mask": torch.ones_like(ids), "labels": ids[:, 0].clone() if has_one else ids.clone()}
    if name == "pixel_values":
        shape = (BATCH, int(getattr(config, "num_channels", 3)), *_sides(getattr(config, "image_size", 224)))
        return {name: torch.empty(shape, device="meta"), "labels": torch.zeros(BATCH, dtype=torch.int64)}
    raise TaskError(
        f"{type(model).__name__} takes {name!r}, for which no batch is made up: write a function that returns (model, batch)."
    )


def _sides(size: Any) -> tuple[int, int]:
    pair = tuple(size) if isinstance(size, list | tuple) else (size, size)
    return int(pair[0]), int(pair[-1])


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__
