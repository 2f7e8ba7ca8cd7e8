"""Tasks by name: `find_task` reads a text and gives a Task.

    digits                                    handwritten digits, which the package carries
    fashion_mnist                             all of it, where Debian's package dataset-fashion-mnist has put it
    images:FILE.npz, images:FOLDER            pictures in arrays, in class folders, or in idx files
    images:cifar100.npz#superclass=3          the classes of one of CIFAR-100's superclasses
    text:FILE.txt, text:FILE.gz               bytes of a text, one after the other
    path/to/file.py:function                  what a function of yours returns
    NAME#model=vit,steps=200,batch=32         options: `named.py`, and keywords of the model; of the function for a file of yours

Files are looked for here and in the folder that the environment variable PAREDOWN_DATA names. With `folder`, as a worker has it, nothing
outside of that folder is run, and data comes from there or from PAREDOWN_DATA alone.

>>> find_task("digits#model=mlp,steps=100")
Task(digits#model=mlp,steps=100: 100 steps of 32, sgdm at 0.05; 1437 to learn from, 360 to be judged by, 10 answers)
>>> find_task("digit")
Traceback (most recent call last):
    ...
paredown.errors.TaskError: task 'digit' is unknown. Closest: 'digits'. Allowed: digits, fashion_mnist, images:FILE.npz, images:FOLDER, \
text:FILE, or path/to/file.py:function.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path, PureWindowsPath
from typing import Any

from paredown.errors import TaskError
from paredown.plan.keys import closest
from paredown.runs.arrays import read_arrays
from paredown.runs.data import Examples, Text
from paredown.runs.named import named_task, parse_options
from paredown.runs.own_code import made_by
from paredown.runs.sources import read_digits, read_fashion_mnist, read_folder, read_text
from paredown.runs.task import Recipe, Task

__all__ = ["Recipe", "Task", "find_task"]

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
    task = made_by(path, function, options)
    if not isinstance(task, Task):
        told = f"{function} returned {type(task).__name__}; it is to return a paredown.Task"
        raise TaskError(f"{told}: a model with data, steps and a recipe (docs/tasks.md).")
    return task
