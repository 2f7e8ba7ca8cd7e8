"""`find_task` returns the Task that a text names:

    digits                                    handwritten digits, a file of this package
    fashion_mnist                             Fashion-MNIST, from Debian's package dataset-fashion-mnist
    images:FILE.npz, images:FOLDER            pictures in arrays, in class folders, or in idx files
    images:cifar100.npz#superclass=3          the classes of one of CIFAR-100's superclasses
    text:FILE.txt, text:FILE.gz               next-byte prediction on a text
    path/to/file.py:function                  the Task that a function of yours returns
    NAME#model=vit,steps=200,batch=32         with options

Options after `#` are those of OPTIONS; all others are keyword arguments of the model, or of your function. Without `steps` a task on
pictures trains for ten passes over its examples.

Files are searched for in the current folder and in that of the environment variable PAREDOWN_DATA. With `folder`, which workers pass, no
code outside of that folder runs, and data is read from there or from PAREDOWN_DATA only.

>>> find_task("digits#model=mlp,steps=100")
Task(digits#model=mlp,steps=100: 100 steps of 32, sgdm at 0.05; 1437 training examples, 360 test examples, 10 answers)
>>> find_task("digit")
Traceback (most recent call last):
    ...
paredown.errors.TaskError: task 'digit' is unknown. Closest: 'digits'. Allowed: digits, fashion_mnist, images:FILE.npz, images:FOLDER, \
text:FILE, or path/to/file.py:function.

Exceptions of the user's code become a TaskError with their type and text:

>>> call_user_function("math", "sqrt", {})
Traceback (most recent call last):
    ...
paredown.errors.TaskError: math raised TypeError: math.sqrt() takes exactly one argument (0 given).

`cached_task` keeps tasks, so that a process that runs many trials of one task reads its data once. It reads a file again when the file has
changed; a task on a folder, or of the user's code, is not cached.
"""

from __future__ import annotations

import ast
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
from paredown.study.tasks import data_files
from paredown.study.tasks.data import NUM_BYTES, Data, Examples, PictureTransform, Text
from paredown.study.tasks.task import OptimizerSettings, Task

__all__ = ["OptimizerSettings", "Task", "find_task"]


BATCH = 32
NUM_PASSES = 10
TEXT_STEPS = 500
MLP_WIDTH = 256
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "none": None}
# models that train well with AdamW; all others use SGD with momentum
ADAMW_MODELS = frozenset({"vit", "convnext", "gpt", "lstm"})
ADAMW = OptimizerSettings("adamw", 1e-3, {"betas": (0.9, 0.95), "weight_decay": 0.1}, max_norm=1.0)
SGDM = OptimizerSettings("sgdm", 0.05, {"weight_decay": 5e-4})


class TaskOption(NamedTuple):
    """Describes an option such as `steps=200` after the `#` of a task's name: the type of its value, and its meaning."""

    read: type
    note: str


OPTIONS: Mapping[str, TaskOption] = MappingProxyType(
    {
        "model": TaskOption(str, "a name of paredown.models.MODELS"),
        "steps": TaskOption(int, "training steps"),
        "batch": TaskOption(int, "examples in a batch"),
        "optimizer": TaskOption(str, "sgd, sgdm, adamw, lion or muon"),
        "lr": TaskOption(float, "peak learning rate"),
        "schedule": TaskOption(str, "cosine or constant"),
        "max_norm": TaskOption(float, "norm that gradients are clipped to"),
        "loss_scale": TaskOption(float, "initial scale of torch.amp.GradScaler"),
        "loss_factor": TaskOption(float, "constant loss scale; gradients of parameters are divided by it"),
        "autocast": TaskOption(str, "bf16, fp16 or none"),
        "metric": TaskOption(str, "what the error of a trial is: error (share of wrong answers) or loss"),
        "start": TaskOption(str, "file of torch.save with weights to start from; those of other names or shapes are new"),
        "superclass": TaskOption(int, "pictures: use only the classes of this superclass"),
        "side": TaskOption(int, "pictures: resize to this height and width"),
        "shift": TaskOption(int, "pictures: random shifts in training by up to this many pixels"),
        "mirror": TaskOption(bool, "pictures: random horizontal flips in training"),
        "length": TaskOption(int, "text: bytes of a training piece"),
    }
)
OPTIMIZER_OPTIONS = ("lr", "schedule", "max_norm", "loss_scale", "loss_factor")
PICTURE_OPTIONS = ("superclass", "side", "shift", "mirror")
TRUE = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}


def parse_options(text: str) -> dict[str, Any]:
    """Return the options in `text`, with values of the types in OPTIONS, or for other names the first of int, float, bool, str that fits.

    >>> parse_options("steps=20,lr=0.1,mirror=true,width=16,gelu=tanh")
    {'steps': 20, 'lr': 0.1, 'mirror': True, 'width': 16, 'gelu': 'tanh'}
    """
    options: dict[str, Any] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, sign, value = (piece.strip() for piece in part.partition("="))
        if not sign or not name.isidentifier() or not value:
            raise TaskError(f"option {part!r} cannot be read: options are name=value, separated by commas.")
        if name in options:
            raise TaskError(f"option {name!r} appears twice. Leave one out.")
        options[name] = _converted(name, value)
    return options


def _converted(name: str, value: str) -> Any:
    wanted = OPTIONS[name].read if name in OPTIONS else None
    for kind in (wanted,) if wanted is not None else (int, float, bool, str):
        try:
            return TRUE[value.lower()] if kind is bool else kind(value)
        except (ValueError, KeyError):
            continue
    raise TaskError(
        f"option {name}={value} cannot be read; it must be of type {getattr(wanted, '__name__', wanted)}: {OPTIONS[name].note}."
    )


WITHOUT_CONVOLUTIONS = ("mlp", "vit")  # channels_last gains nothing: a vit has one convolution, for its patches


def named_task(name: str, data: Examples | Text, options: Mapping[str, Any]) -> Task:
    """Return the task called `name` that trains a built-in model on `data`, as `options` say."""
    is_text = isinstance(data, Text)
    model = options.get("model", "gpt" if is_text else "resnet18")
    _check_model(model, is_text=is_text)
    for option in PICTURE_OPTIONS if is_text else ("length",):
        if option in options:
            what = "text" if is_text else "pictures"
            raise TaskError(f"option {option!r} does not apply to {what} ({OPTIONS[option].note}).")
    data = data if is_text else _prepared(data, model, options)
    build = partial(MODELS[model], **_keywords(model, data, options))
    _check_build(model, build, data)
    batch = options.get("batch", BATCH)
    steps = options.get("steps", TEXT_STEPS if is_text else max(NUM_PASSES * (data.num_train // max(batch, 1)), 1))
    metric = options.get("metric", "loss" if is_text else "error")
    autocast = autocast_dtype(options.get("autocast", "none"))
    optimizer, is_convolutional = _optimizer_settings(model, options), not is_text and model not in WITHOUT_CONVOLUTIONS
    switches: dict[str, Any] = {"metric": metric, "autocast": autocast, "channels_last": is_convolutional}
    start = options.get("start", "")
    if start and start != _portable(start):
        raise TaskError(f"start is {_portable(start)!r}: name a file in the current folder or under {DATA}, without '..'.")
    return Task(name, partial(_new_model, build, start), data, steps, batch, optimizer, **switches)


def _new_model(build: partial[nn.Module], start: str, seed: int) -> nn.Module:
    """Return `build()`, a new model, with the weights of the file `start` unless that is ""; the caller seeds torch for `seed`."""
    model = build()
    return data_files.load_weights(model, find_file(start, None)) if start and not next(model.parameters()).is_meta else model


def _check_model(model: str, *, is_text: bool) -> None:
    if model not in MODELS:
        raise TaskError(f"model {model!r} is unknown. Closest: {closest(model, MODELS)}. Allowed: {', '.join(MODELS)}.")
    if model in OF_PIXELS:
        raise TaskError(f"model {model!r} has an answer for each pixel, and no built-in task has such answers.")
    if (model in OF_TEXT) != is_text:
        fitting = [name for name in MODELS if (name in OF_TEXT) == is_text and name not in OF_PIXELS]
        raise TaskError(f"model {model!r} is not for {'text' if is_text else 'pictures'}. Allowed: {', '.join(fitting)}.")


def _prepared(data: Examples, model: str, options: Mapping[str, Any]) -> Examples:
    """Return the pictures with the size and the random shifts and flips in `options`, and three channels unless `model` is the MLP."""
    if "side" in options:
        if options["side"] < 1:
            raise TaskError(f"side is {options['side']}; pictures have at least one pixel.")
        data = data_files.scaled(data, options["side"])
    if not 0 <= options.get("shift", 0) < min(data.x_train.shape[-2:]):
        raise TaskError(
            f"shift is {options['shift']}; it must be at least 0 and less than the sides of pictures, {tuple(data.x_train.shape[-2:])}."
        )
    look = PictureTransform(None if model == "mlp" else 3, options.get("shift", 0), options.get("mirror", False))
    return replace(data, look=look)


def _keywords(model: str, data: Data, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keyword arguments of the model: those that follow from the data, then the user's."""
    given = {name: value for name, value in options.items() if name not in OPTIONS}
    if isinstance(data, Text):
        return {"vocabulary": NUM_BYTES, **({"context": data.length} if model == "gpt" else {}), **given}
    assert isinstance(data, Examples)
    if model == "mlp":
        width = given.pop("width", MLP_WIDTH)
        return {"sizes": (data.x_train[0].numel(), width, width, data.num_answers), **given}
    return {"num_classes": data.num_answers, **({"picture": data.x_train.shape[-1]} if model == "vit" else {}), **given}


def _check_build(model: str, build: partial[nn.Module], data: Examples | Text) -> None:
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
        hint = "" if isinstance(data, Text) else " Resize the pictures with side=32."
        shape = " x ".join(map(str, x.shape[1:]))
        raise TaskError(f"model {model!r} does not take examples of {shape}: {error}.{hint}") from None


def _optimizer_settings(model: str, options: Mapping[str, Any]) -> OptimizerSettings:
    default = ADAMW if model in ADAMW_MODELS else SGDM
    changes = {name: options[name] for name in OPTIMIZER_OPTIONS if name in options}
    if options.get("optimizer", default.optimizer) == default.optimizer:
        return replace(default, **changes)
    if "lr" not in changes:
        raise TaskError(
            f"optimizer={options['optimizer']} needs lr=: the default, {default.lr:g}, is for {default.optimizer}, this model's optimizer."
        )
    return OptimizerSettings(options["optimizer"], **changes)


def autocast_dtype(name: str) -> torch.dtype | None:
    """Return the dtype of autocast by its name; None for "none"."""
    if name not in DTYPES:
        raise TaskError(f"autocast {name!r} is unknown. Allowed: {', '.join(DTYPES)}.")
    return DTYPES[name]


def call_user_function(source: Path | str, function: str, options: Mapping[str, Any]) -> Any:
    """Return `function(**options)`, where `function` is a name in `source`, a Python file (Path) or a module (str)."""
    name = source.name if isinstance(source, Path) else source
    with _errors_as_task_errors(name):
        module = _imported(source) if isinstance(source, Path) else _module(source)
        make = getattr(module, function, None)
        if not callable(make):
            names = [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]
            raise TaskError(f"{name} has no function {function!r}. Closest: {closest(function, names) or 'it has none'}.")
        if isinstance(make, nn.Module):
            raise TaskError(f"{name}: {function} is a model, not a function: write `def step(): return {function}`, and name step.")
        return make(**options)


@contextmanager
def _errors_as_task_errors(name: str) -> Generator[None]:
    try:
        yield
    except TaskError:
        raise
    except (Exception, SystemExit) as error:
        raise TaskError(f"{name} raised {type(error).__name__}: {error}.") from error


def _imported(path: Path) -> Any:
    name = f"paredown_task_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses need their module there
    with _on_sys_path(path.parent):
        spec.loader.exec_module(module)
    return module


def _module(name: str) -> Any:
    with _on_sys_path(Path()):
        return importlib.import_module(name)


@contextmanager
def _on_sys_path(folder: Path) -> Generator[None]:
    path = str(folder.resolve())
    sys.path.insert(0, path)
    try:
        yield
    finally:
        sys.path.remove(path)


SHOWN_FUNCTIONS = 8
LENGTH = 64  # bytes of a training piece of a text
ALLOWED = "digits, fashion_mnist, images:FILE.npz, images:FOLDER, text:FILE, or path/to/file.py:function"
WITHOUT_FILE: dict[str, Callable[[], Examples]] = {"digits": data_files.read_digits, "fashion_mnist": data_files.read_fashion_mnist}
WITH_FILE = ("images", "text")
DATA = "PAREDOWN_DATA"
DATA_FOLDERS = ("", "images", "text")  # folders of PAREDOWN_DATA that are searched
Stamp = tuple[int, int]  # modification time and size of a file


def find_task(text: str, folder: str | os.PathLike[str] | None = None) -> Task:
    """Return the task that `text` names; with `folder`, code runs only from files under it."""
    if not isinstance(text, str):
        raise TaskError(f"the name of a task is a str, not {type(text).__name__}. Allowed: {ALLOWED}.")
    head, _, tail = text.strip().partition("#")
    root = None if folder is None else Path(folder)
    try:
        options = parse_options(tail)
        kind, sign, file = head.strip().partition(":")
        if ".py:" in head:
            return _user_task(head.strip(), options, root)
        if kind in WITH_FILE and file:
            return _task_of_file(kind, file, options, root)
        if kind in WITHOUT_FILE and not sign:
            if "superclass" in options:
                raise TaskError(f"{kind} has no superclasses.")
            return named_task(_name(kind, options), WITHOUT_FILE[kind](), options)
    except TaskError as error:
        raise TaskError(
            str(error) if str(error).startswith("task ") else f"task {portable_text(text)!r}: {error}"
        ) from error.__cause__
    except OSError as error:  # the name of a file is not valid
        raise TaskError(f"task {portable_text(text)!r}: {error.strerror or error}.") from None
    check_has_function(head.strip(), root)
    likely = closest(kind, (*WITHOUT_FILE, *WITH_FILE)).partition(",")[0]
    raise TaskError(f"task {portable_text(text)!r} is unknown. Closest: {likely}. Allowed: {ALLOWED}.")


def check_has_function(head: str, folder: Path | None = None) -> None:
    """Raise TaskError if `head` names a Python file but no function in it; the message lists the file's functions.

    >>> check_has_function("net.py")
    Traceback (most recent call last):
        ...
    paredown.errors.TaskError: there is no file net.py. A task or model of yours is written file.py:function.
    """
    file, _, function = head.partition(":")
    if not file.endswith(".py") or function:
        return
    path = (folder or Path()) / file
    if not path.is_file():
        raise TaskError(f"there is no file {_portable(file)}. A task or model of yours is written file.py:function.")
    names = _functions(path) if folder is None else []
    which = f"It defines {', '.join(names[:SHOWN_FUNCTIONS])}." if names else "It defines no function."
    raise TaskError(
        f"{_portable(file)} is a file; name its function that returns the task or model too: "
        f"{_portable(file)}:{names[0] if names else 'function'}. {which}"
    )


def _functions(path: Path) -> list[str]:
    """Return the names of the functions that a Python file defines, from its text: nothing runs."""
    try:
        body = ast.parse(path.read_bytes()).body
    except (SyntaxError, ValueError):
        return []
    return [node.name for node in body if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")]


def _task_of_file(kind: str, file: str, options: Mapping[str, Any], folder: Path | None) -> Task:
    path = find_file(file, folder)
    name = _name(f"{kind}:{_portable(file)}", options)
    if kind == "text":
        return named_task(name, _text(path, options), options)
    if not path.is_dir():
        return named_task(name, _arrays(path, options.get("superclass"), _stamp(path)), options)
    if "superclass" in options:
        raise TaskError("a folder of pictures has no superclasses.")
    return named_task(name, data_files.read_folder(path, side=options.get("side")), options)


def _text(path: Path, options: Mapping[str, Any]) -> Text:
    if path.is_dir():
        raise TaskError(f"{path.name} is a folder; give a file.")
    length = options.get("length", LENGTH)
    if length < 1:
        raise TaskError(f"length is {length}; a piece has at least one byte.")
    return data_files.read_text(path, length)


@lru_cache(maxsize=4)
def _arrays(path: Path, superclass: int | None, stamp: Stamp) -> Examples:
    """Return the examples in an `.npz` file, cached by its path and its `stamp`, which changes with the file."""
    return data_files.read_arrays(path, superclass=superclass)


def _name(head: str, options: Mapping[str, Any]) -> str:
    """Return the name of a task, `head` and its options in alphabetical order, so that equal tasks have equal names."""
    return head + "#" * bool(options) + ",".join(f"{name}={value}" for name, value in sorted(options.items()))


def _portable(file: str) -> str:
    """Return `file`, or only its last part if it may lie outside of the current folder, so that trials contain no local path."""
    path = Path(file)
    is_outside = path.is_absolute() or PureWindowsPath(file).is_absolute() or ".." in path.parts or file.startswith("~")
    return PureWindowsPath(file).name if is_outside else path.as_posix()


def portable_text(text: str) -> str:
    """Return a task's name for messages and files, with local paths shortened to the names of their files.

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
    """Return the path of `file`: under `folder` (the current folder when None), or under PAREDOWN_DATA."""
    data = Path(os.environ[DATA]) if os.environ.get(DATA) else None
    roots = [folder if folder is not None else Path(), *((data / inside for inside in DATA_FOLDERS) if data is not None else ())]
    for root in roots:
        path = root / file
        if path.exists():
            if folder is not None and not any(is_inside(path, root) for root in roots):
                raise TaskError(f"{_portable(file)} is outside of the tasks folder.")
            return path
    names = [path.name for root in roots if root.is_dir() for path in (root / file).parent.glob("*")] if folder is None else []
    like = closest(Path(file).name, dict.fromkeys(names))
    where = f"in this folder{'' if data is None else f' or under {DATA}'}" if folder is None else "in the tasks folder"
    raise TaskError(f"there is no {_portable(file)} {where}.{f' Closest: {like}.' if like else ''}")


def is_inside(path: Path, root: Path) -> bool:
    """Return whether a path is under `root` after following symbolic links."""
    return path.resolve().is_relative_to(root.resolve())


def _user_task(text: str, options: Mapping[str, Any], folder: Path | None) -> Task:
    file, _, function = text.rpartition(":")
    path = (folder or Path()) / file
    if folder is not None and not is_inside(path, folder):
        raise TaskError("the file is outside of the tasks folder, and is not run.")
    if not path.is_file():
        raise TaskError(f"there is no file {_portable(file)}.")
    task = call_user_function(path, function, options)
    if not isinstance(task, Task):
        raise TaskError(f"{function} returned {type(task).__name__}; it must return a paredown.Task (docs/tasks.md).")
    return task


NUM_CACHED = 32  # a sweep that runs cheap plans first alternates between its tasks


def cached_task(text: str, folder: Path | None) -> Task:
    """Return `find_task(text, folder)`, cached until its data file changes; with `folder` None, tasks in `.py` files are refused."""
    head = text.strip().partition("#")[0].strip()
    if ".py:" in head:
        if folder is None:
            raise TaskError("the task is a function of a .py file, which is run only from a tasks folder; none was given.")
        return find_task(text, folder)
    folder = Path().resolve() if folder is None else folder
    kind, _, file = head.partition(":")
    path = find_file(file, folder) if kind in WITH_FILE and file else None
    if path is not None and path.is_dir():
        return find_task(text, folder)  # not cached: a picture may have changed
    return _cached_task(text, folder, None if path is None else _stamp(path))


@lru_cache(maxsize=NUM_CACHED)
def _cached_task(text: str, folder: Path, stamp: Stamp | None) -> Task:
    return find_task(text, folder)


def _stamp(path: Path) -> Stamp:
    stat = path.stat()
    return stat.st_mtime_ns, stat.st_size
