"""Tasks by name: `find_task` reads a text and gives a Task.

    digits                                    handwritten digits, which the package carries
    fashion_mnist                             all of it, where Debian's package dataset-fashion-mnist has put it
    images:FILE.npz, images:FOLDER            pictures in arrays, in class folders, or in idx files
    images:cifar100.npz#superclass=3          the classes of one of CIFAR-100's superclasses
    text:FILE.txt, text:FILE.gz               bytes of a text, one after the other
    path/to/file.py:function                  what a function of yours returns
    NAME#model=vit,steps=200,batch=32         options: `tasks/lookup.py`, and keywords of the model; of the function for a file of yours

Files are looked for here and in the folder that the environment variable PAREDOWN_DATA names. With `folder`, as a worker has it, nothing
outside of that folder is run, and data comes from there or from PAREDOWN_DATA alone.

>>> find_task("digits#model=mlp,steps=100")
Task(digits#model=mlp,steps=100: 100 steps of 32, sgdm at 0.05; 1437 to learn from, 360 to be judged by, 10 answers)
>>> find_task("digit")
Traceback (most recent call last):
    ...
paredown.errors.TaskError: task 'digit' is unknown. Closest: 'digits'. Allowed: digits, fashion_mnist, images:FILE.npz, images:FOLDER, \
text:FILE, or path/to/file.py:function.

Built-in models on built-in data: what a task by name is made of.

A task's options stand behind `#`: `digits#model=vit,steps=200,dim=32`. Those of OPTIONS are the task's own, all others are keywords of the
model. Without a number of steps a task on pictures takes ten passes over its examples.

Code of the user's: what a function of a file or of a module returns; whatever it raises becomes a sentence.

>>> call_user_function("math", "sqrt", {})
Traceback (most recent call last):
    ...
paredown.errors.TaskError: math raised TypeError: math.sqrt() takes exactly one argument (0 given).

Tasks by name that are found again: a process that runs many trials of one task reads its data once.

A task on a file is made again when the file has changed; one on a folder, or of the user's own code, each time.
"""

from __future__ import annotations

import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path, PureWindowsPath
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import nn

from paredown.errors import TaskError
from paredown.models import MODELS, OF_PIXELS, OF_TEXT
from paredown.plan.selectors import closest
from paredown.tasks.data import NUM_BYTES, Data, Examples, PictureTransform, Text
from paredown.tasks.data_files import read_arrays, read_digits, read_fashion_mnist, read_folder, read_text, scaled
from paredown.tasks.task import OptimizerSettings, Task

__all__ = ["OptimizerSettings", "Task", "find_task"]


BATCH = 32
PASSES = 10
TEXT_STEPS = 500
MLP_WIDTH = 256
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "none": None}
# what trains well with AdamW; all other models take SGD with momentum
SLOW_STARTERS = frozenset({"vit", "convnext", "gpt", "lstm"})
ADAMW = OptimizerSettings("adamw", 1e-3, {"betas": (0.9, 0.95), "weight_decay": 0.1}, max_norm=1.0)
SGDM = OptimizerSettings("sgdm", 0.05, {"weight_decay": 5e-4})


class TaskOption(NamedTuple):
    """One option of a task: how its text is read, and what it means."""

    read: type
    note: str


OPTIONS: Mapping[str, TaskOption] = MappingProxyType(
    {
        "model": TaskOption(str, "a name of paredown.models.MODELS"),
        "steps": TaskOption(int, "of training"),
        "batch": TaskOption(int, "examples of a step"),
        "optimizer": TaskOption(str, "sgd, sgdm, adamw or lion"),
        "lr": TaskOption(float, "the peak learning rate"),
        "schedule": TaskOption(str, "cosine or constant"),
        "max_norm": TaskOption(float, "to which gradients are clipped"),
        "loss_scale": TaskOption(float, "where torch's scaler of losses starts"),
        "loss_factor": TaskOption(float, "by which the loss is multiplied and gradients are divided"),
        "autocast": TaskOption(str, "bf16, fp16 or none"),
        "superclass": TaskOption(int, "pictures: only the classes of this one"),
        "side": TaskOption(int, "pictures: scaled to this height and width"),
        "shift": TaskOption(int, "pictures: shifted by up to so many pixels in training"),
        "mirror": TaskOption(bool, "pictures: mirrored or not in training"),
        "length": TaskOption(int, "text: bytes of a piece"),
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
    look = PictureTransform(None if model == "mlp" else 3, options.get("shift", 0), options.get("mirror", False))
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


def _recipe(model: str, options: Mapping[str, Any]) -> OptimizerSettings:
    usual = ADAMW if model in SLOW_STARTERS else SGDM
    own = {name: options[name] for name in OF_RECIPE if name in options}
    if options.get("optimizer", usual.optimizer) == usual.optimizer:
        return replace(usual, **own)
    if "lr" not in own:
        raise TaskError(
            f"optimizer={options['optimizer']} needs lr=: what suits {usual.optimizer} ({usual.lr:g}) does not suit it."
        )
    return OptimizerSettings(options["optimizer"], **own)


def _dtype(name: str) -> torch.dtype | None:
    if name not in DTYPES:
        raise TaskError(f"autocast {name!r} is unknown. Allowed: {', '.join(DTYPES)}.")
    return DTYPES[name]


# --- Code of the user's ---


def call_user_function(source: Path | str, function: str, options: Mapping[str, Any]) -> Any:
    """What `function` of a file (a path) or of a module (a name) returns when called with `options`."""
    name = source.name if isinstance(source, Path) else source
    with _said(name):
        module = _imported(source) if isinstance(source, Path) else _module(source)
        make = getattr(module, function, None)
        if not callable(make):
            names = [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]
            raise TaskError(f"{name} has no function {function!r}. Closest: {closest(function, names) or 'it has none'}.")
        return make(**options)


@contextmanager
def _said(name: str) -> Generator[None]:
    """What the user's code raises becomes a sentence; leaving the process is no way out."""
    try:
        yield
    except TaskError:
        raise
    except (Exception, SystemExit) as error:
        raise TaskError(f"{name} raised {type(error).__name__}: {error}.") from error


def _imported(path: Path) -> Any:
    """The file as a module of its own, which may import what lies beside it."""
    name = f"paredown_task_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look for their module there
    with _beside(path.parent):
        spec.loader.exec_module(module)
    return module


def _module(name: str) -> Any:
    """A module by name, of this folder too."""
    with _beside(Path()):
        return importlib.import_module(name)


@contextmanager
def _beside(folder: Path) -> Generator[None]:
    place = str(folder.resolve())
    sys.path.insert(0, place)
    try:
        yield
    finally:
        sys.path.remove(place)


# --- Tasks by name ---

LENGTH = 64  # bytes of a piece of text
ALLOWED = "digits, fashion_mnist, images:FILE.npz, images:FOLDER, text:FILE, or path/to/file.py:function"
WITHOUT_FILE: dict[str, Callable[[], Examples]] = {"digits": read_digits, "fashion_mnist": read_fashion_mnist}
WITH_FILE = ("images", "text")
DATA = "PAREDOWN_DATA"
INSIDE_DATA = ("", "images", "text")


def find_task(text: str, folder: str | os.PathLike[str] | None = None) -> Task:
    """The task that `text` names; with `folder`, only files under it."""
    if not isinstance(text, str):
        raise TaskError(f"a task by name is text, not {type(text).__name__}. Allowed: {ALLOWED}.")
    head, _, tail = text.strip().partition("#")
    root = None if folder is None else Path(folder)
    try:
        options = parse_options(tail)
        kind, sign, file = head.strip().partition(":")
        if ".py:" in head:
            return _own_task(head.strip(), options, root)
        if kind in WITH_FILE and file:
            return _task_of_file(kind, file, options, root)
        if kind in WITHOUT_FILE and not sign:
            return named_task(_name(kind, options), _without_file(kind, options), options)
    except TaskError as error:
        raise TaskError(
            str(error) if str(error).startswith("task ") else f"task {portable_text(text)!r}: {error}"
        ) from error.__cause__
    except OSError as error:  # a name that no file may have
        raise TaskError(f"task {portable_text(text)!r}: {error.strerror or error}.") from None
    likely = closest(kind, (*WITHOUT_FILE, *WITH_FILE)).partition(",")[0]
    raise TaskError(f"task {portable_text(text)!r} is unknown. Closest: {likely}. Allowed: {ALLOWED}.")


def _without_file(kind: str, options: Mapping[str, Any]) -> Examples:
    if "superclass" in options:
        raise TaskError(f"{kind} has no superclasses.")
    return WITHOUT_FILE[kind]()


def _task_of_file(kind: str, file: str, options: Mapping[str, Any], folder: Path | None) -> Task:
    path = find_file(file, folder)
    name = _name(f"{kind}:{_portable(file)}", options)
    if kind == "text":
        return named_task(name, _text(path, options), options)
    if not path.is_dir():
        stamp = path.stat()
        return named_task(name, _arrays(path, options.get("superclass"), (stamp.st_mtime_ns, stamp.st_size)), options)
    if "superclass" in options:
        raise TaskError("a folder of pictures has no superclasses.")
    return named_task(name, read_folder(path, side=options.get("side")), options)


def _text(path: Path, options: Mapping[str, Any]) -> Text:
    if path.is_dir():
        raise TaskError(f"{path.name} is a folder; give a file.")
    length = options.get("length", LENGTH)
    if length < 1:
        raise TaskError(f"length is {length}; a piece has at least one byte.")
    return read_text(path, length)


@lru_cache(maxsize=4)
def _arrays(path: Path, superclass: int | None, stamp: tuple[int, int]) -> Examples:
    """The arrays of a file as it is now: twenty tasks of one file are read one after the other."""
    return read_arrays(path, superclass=superclass)


def _name(head: str, options: Mapping[str, Any]) -> str:
    """The same for the same task, whatever the order of its options."""
    return head + "#" * bool(options) + ",".join(f"{name}={value}" for name, value in sorted(options.items()))


def _portable(file: str) -> str:
    """A path as it may stand in a trial: relative, without a way up; the last part of others."""
    path = Path(file)
    is_outside = path.is_absolute() or PureWindowsPath(file).is_absolute() or ".." in path.parts or file.startswith("~")
    return PureWindowsPath(file).name if is_outside else path.as_posix()


def portable_text(text: str) -> str:
    """A task's text as it may stand in a message or a file: no path in it, nor among its options, is absolute or goes up.

    >>> portable_text("images:/data/ann/faces.npz#steps=3,from=/data/ann/w.pt")
    'images:faces.npz#steps=3,from=w.pt'
    """
    head, mark, tail = text.strip().partition("#")
    kind, sign, rest = head.partition(":")
    if sign and rest:
        head = f"{kind}:{_portable(rest)}" if kind in WITH_FILE else _portable(head)
    options = [part.partition("=") for part in tail.split(",")]
    return head + mark + ",".join(f"{name}{sign}{_portable(value) if value else ''}" for name, sign, value in options)


def find_file(file: str, folder: Path | None) -> Path:
    """Where `file` is: under `folder`, or without one here, or under PAREDOWN_DATA."""
    data = Path(os.environ[DATA]) if os.environ.get(DATA) else None
    roots = [folder if folder is not None else Path(), *((data / inside for inside in INSIDE_DATA) if data is not None else ())]
    for root in roots:
        path = root / file
        if path.exists():
            if folder is not None and not any(is_inside(path, root) for root in roots):
                raise TaskError(f"{_portable(file)} is outside of the folder that tasks may come from.")
            return path
    near = [path.name for root in roots if root.is_dir() for path in (root / file).parent.glob("*")] if folder is None else []
    like = closest(Path(file).name, dict.fromkeys(near))
    where = f"here{'' if data is None else f' or under {DATA}'}" if folder is None else "in the folder that tasks may come from"
    raise TaskError(f"there is no {_portable(file)} {where}.{f' Closest: {like}.' if like else ''}")


def is_inside(path: Path, root: Path) -> bool:
    """Whether a file lies under `root`, links followed."""
    return path.resolve().is_relative_to(root.resolve())


# --- files of the user ------------------------------------------------------------------------------------------------


def _own_task(text: str, options: Mapping[str, Any], folder: Path | None) -> Task:
    """What the function of a file returns."""
    file, _, function = text.rpartition(":")
    path = (folder or Path()) / file
    if folder is not None and not is_inside(path, folder):
        raise TaskError("it is outside of the folder that tasks may come from, and is not run.")
    if not path.is_file():
        raise TaskError("there is no such file.")
    task = call_user_function(path, function, options)
    if not isinstance(task, Task):
        told = f"{function} returned {type(task).__name__}; it is to return a paredown.Task"
        raise TaskError(f"{told}: a model with data, steps and a recipe (docs/tasks.md).")
    return task


# --- Tasks by name that are found again ---

KEPT = 32  # tasks: those of a sweep that runs cheap plans first take turns
Stamp = tuple[int, int]


def cached_task(text: str, folder: Path | None) -> Task:
    """`find_task(text, folder)`, the same object for the same words and the same file; with None data of this folder, and no code."""
    head = text.strip().partition("#")[0].strip()
    if ".py:" in head:
        if folder is None:
            raise TaskError("a file of code is named, and no folder that tasks may come from: it is not run.")
        return find_task(text, folder)
    folder = Path().resolve() if folder is None else folder
    kind, _, file = head.partition(":")
    path = find_file(file, folder) if kind in WITH_FILE and file else None
    if path is not None and path.is_dir():
        return find_task(text, folder)  # a picture in it may have changed
    return _kept(text, folder, None if path is None else _stamp(path))


@lru_cache(maxsize=KEPT)
def _kept(text: str, folder: Path, stamp: Stamp | None) -> Task:
    return find_task(text, folder)


def _stamp(path: Path) -> Stamp:
    """When a file was written, and how long it is."""
    seen = path.stat()
    return (seen.st_mtime_ns, seen.st_size)
