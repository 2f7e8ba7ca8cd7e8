"""Pictures and labels in numpy arrays, as an `.npz` has them: which array is what, and examples made of them.

An `.npz` needs four arrays: names that speak of `train` or `test` and of x, images or data, or of y, labels or targets, as in `x_train` or
`test_labels`. One of pictures and one of labels do too: every fifth picture of each class is then held apart for tests. Pictures are
(num, height, width), (num, height, width, channels) or (num, channels, height, width). Nothing is unpickled.

>>> kind_of("test_labels"), kind_of("X_train"), kind_of("meta")
(('test', 'y'), ('train', 'x'), None)
"""

from __future__ import annotations

import re
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import interpolate

from paredown.errors import TaskError
from paredown.runs.data import Examples

Array = np.ndarray[Any, Any]
Arrays = dict[tuple[str, str], Array]  # by split and kind
KINDS = {"x": "x image images picture pictures data", "y": "y label labels target targets"}
WORDS = {word: kind for kind, words in KINDS.items() for word in words.split()}
SPLITS = {"train": "train", "training": "train", "test": "test", "testing": "test"}
NEEDED = tuple((split, kind) for split in ("train", "test") for kind in ("x", "y"))
SWOLLEN_BYTES, SWELLING = 1 << 30, 300  # from so many bytes on, more than so many times the file's size is refused
EVERY = 5  # of the pictures of a class that come without a test split, every fifth is for tests
BROKEN = (zipfile.BadZipFile, zlib.error, EOFError, OSError, ValueError)  # what a file that is cut off or of another kind raises


def read_arrays(path: Path, *, superclass: int | None = None) -> Examples:
    """The pictures of an `.npz`; `superclass` keeps the classes of one, as CIFAR-100's are told by `coarse_train` and `coarse_test`."""
    arrays = _loaded(path)
    found = _by_name(arrays) or _by_shape(arrays)
    missing = [f"{kind}_{split}" for split, kind in NEEDED if (split, kind) not in found]
    if missing:
        has = ", ".join(f"{name} {array.shape}" for name, array in arrays.items()) or "nothing"
        raise TaskError(
            f"{path.name} has no {', no '.join(missing)}; it has {has}. Needed are x_train, y_train, x_test and y_test, or one array of "
            "pictures and one of labels."
        )
    names = tuple(map(str, arrays["class_names"])) if "class_names" in arrays else ()
    if superclass is not None:
        found = _of_superclass(found, arrays, superclass, path.name)
    return examples_of(found, names, path.name)


def _loaded(path: Path) -> dict[str, Array]:
    try:
        with path.open("rb") as opened:
            file: Any = np.load(opened, allow_pickle=False)
            if not isinstance(file, np.lib.npyio.NpzFile):
                raise ValueError("it is one array")
            members = file.zip.infolist() if file.zip is not None else ()
            check_swelling(sum(member.file_size for member in members), path.stat().st_size)
            return {name: file[name] for name in file.files}
    except (*BROKEN, MemoryError, NotImplementedError, RuntimeError, KeyError) as error:  # the last ones: of zipfile
        raise TaskError(f"{path.name} is no .npz that can be read: {error}. Write it with numpy.savez, without objects.") from None


def check_swelling(unpacked_bytes: int, packed_bytes: int) -> None:
    """ValueError for a file that unpacks to far more than data would: pictures and texts shrink ten times at most."""
    if unpacked_bytes > SWOLLEN_BYTES and unpacked_bytes > SWELLING * packed_bytes:
        raise ValueError(f"its {packed_bytes} bytes unpack to {unpacked_bytes} and more, which no data does")


def kind_of(name: str) -> tuple[str, str] | None:
    """Split and kind of an array by its name."""
    words = [word for word in re.split(r"[^a-z]+", name.lower()) if word]
    splits, kinds = [SPLITS[w] for w in words if w in SPLITS], [WORDS[w] for w in words if w in WORDS]
    return (splits[0], kinds[0]) if len(splits) == len(kinds) == 1 else None


def _by_name(arrays: Mapping[str, Array]) -> Arrays:
    return {kind: array for name, array in arrays.items() if (kind := kind_of(name)) is not None}


def _by_shape(arrays: Mapping[str, Array]) -> Arrays:
    """One array of pictures and one of labels as a training and a test split."""
    pictures = [array for array in arrays.values() if array.ndim in (3, 4)]
    labels = [a for a in arrays.values() if pictures and _are_labels(a, len(pictures[0]))]
    return split(pictures[0], labels[0].reshape(-1)) if len(pictures) == len(labels) == 1 else {}


def _are_labels(array: Array, num: int) -> bool:
    """One for each of `num` pictures, in a row or in a column."""
    return array.shape in ((num,), (num, 1)) and array.dtype.kind != "f"


def split(x: Array, y: Array) -> Arrays:
    """Every fifth example of each class for tests, the others for training."""
    place = np.zeros(len(y), dtype=np.int64)
    for label in np.unique(y):
        place[y == label] = np.arange((y == label).sum())
    is_test = place % EVERY == EVERY - 1
    return {
        (name, kind): array[rows] for name, rows in (("train", ~is_test), ("test", is_test)) for kind, array in (("x", x), ("y", y))
    }


def _of_superclass(found: Arrays, arrays: Mapping[str, Array], number: int, file: str) -> Arrays:
    """The examples whose superclass has this number, their classes counted from 0."""
    if not {"coarse_train", "coarse_test"} <= arrays.keys():
        raise TaskError(
            f"{file} has no superclasses: they are told by arrays coarse_train and coarse_test, and it has {', '.join(arrays)}."
        )
    there = sorted(set(arrays["coarse_train"].tolist()))
    if number not in there:
        raise TaskError(f"superclass {number} is not in {file}; it has {there[0]} to {there[-1]}.")
    return {(name, kind): array[arrays[f"coarse_{name}"] == number] for (name, kind), array in found.items()}


def examples_of(found: Mapping[tuple[str, str], Array], class_names: Sequence[str], file: str) -> Examples:
    """Arrays by split and kind as examples; classes are counted from 0 in the order of their labels."""
    labels = {name: _labels(found[name, "y"], f"y_{name} of {file}") for name in ("train", "test")}
    known = np.unique(labels["train"])
    unknown = np.setdiff1d(labels["test"], known)
    if len(unknown):
        raise TaskError(f"{file}: the test split has class {unknown[0]!s}, of which there is no training example.")
    names = [class_names[k] if known.dtype.kind == "i" and 0 <= k < len(class_names) else k for k in known]
    x = {name: _channels_first(found[name, "x"], f"x_{name} of {file}") for name in ("train", "test")}
    y = {name: torch.from_numpy(np.searchsorted(known, labels[name]).astype(np.int64)) for name in ("train", "test")}
    try:
        return Examples(x["train"], y["train"], x["test"], y["test"], tuple(map(str, names)))
    except TaskError as error:
        raise TaskError(f"{file}: {error}") from None


def _labels(array: Array, what: str) -> Array:
    flat = array[:, 0] if array.ndim == 2 and array.shape[1] == 1 else array
    if flat.ndim != 1 or flat.dtype.kind not in "iuUb":
        raise TaskError(
            f"{what} is {array.shape} of {array.dtype}; labels are (num,) whole numbers or texts, one for each picture."
        )
    return flat.astype(np.int64) if flat.dtype.kind in "iub" else flat


def _channels_first(array: Array, what: str) -> Tensor:
    """(num, channels, height, width), bytes where the numbers are bytes."""
    grey = array[:, None] if array.ndim == 3 else array
    last = grey.ndim == 4 and grey.shape[1] not in (1, 3) and grey.shape[3] in (1, 3)
    picture = np.moveaxis(grey, 3, 1) if last else grey
    if picture.ndim != 4 or picture.shape[1] not in (1, 3) or picture.dtype.kind not in "iuf":
        raise TaskError(
            f"{what} is {array.shape} of {array.dtype}; pictures are (num, height, width) with 1 or 3 channels first, last or not at all."
        )
    is_bytes = picture.dtype.kind in "iu" and (not picture.size or (picture.min() >= 0 and picture.max() <= 255))
    return torch.from_numpy(np.array(picture, dtype=np.uint8 if is_bytes else np.float32, order="C"))


def scaled(data: Examples, side: int) -> Examples:
    """The same pictures, `side` pixels high and wide."""
    if data.x_train.shape[-2:] == (side, side):
        return data
    x = [
        interpolate(x.float(), (side, side), mode="bilinear", antialias=True).round().to(x.dtype)
        if x.dtype is torch.uint8
        else interpolate(x, (side, side), mode="bilinear", antialias=True)
        for x in (data.x_train, data.x_test)
    ]
    return Examples(x[0], data.y_train, x[1], data.y_test, data.class_names, data.look)
