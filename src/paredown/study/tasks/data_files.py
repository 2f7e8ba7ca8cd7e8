"""Read pictures, texts and weights from files: this package's digits, Fashion-MNIST, idx files (MNIST), class folders, `.npz` arrays.

>>> read_digits()
Examples(1437 training examples, 360 test examples, 10 answers)

An `.npz` has four arrays, named by `train` or `test` and a word for pictures (x, images, data) or labels (y, labels, targets): `x_train`,
`test_labels`. Or it has one array of pictures and one of labels: every fifth picture of each class is then in the test split. Pictures
are (num, height, width), (num, height, width, channels) or (num, channels, height, width). Nothing is unpickled.

>>> kind_of("test_labels"), kind_of("X_train"), kind_of("meta")
(('test', 'y'), ('train', 'x'), None)
"""

from __future__ import annotations

import gzip
import logging
import pickle
import re
import warnings
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from importlib import resources
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate

from paredown.errors import TaskError
from paredown.study.tasks.data import Examples, Text

Array = np.ndarray[Any, Any]
Arrays = dict[tuple[str, str], Array]  # ("train" or "test", "x" or "y") -> array
KINDS = {"x": "x image images picture pictures data", "y": "y label labels target targets"}
WORDS = {word: kind for kind, words in KINDS.items() for word in words.split()}
SPLITS = {"train": "train", "training": "train", "test": "test", "testing": "test"}
NEEDED = tuple((split, kind) for split in ("train", "test") for kind in ("x", "y"))
# A file that unpacks to more than 1 GiB and more than 300 times its size is refused as a decompression bomb.
BOMB_BYTES, BOMB_RATIO = 1 << 30, 300
TEST_EVERY = 5  # every fifth picture of a class is a test example, where a file has no test split
log = logging.getLogger("paredown")
READ_ERRORS = (zipfile.BadZipFile, zlib.error, EOFError, OSError, ValueError)  # raised for truncated files and other formats


def read_arrays(path: Path, *, superclass: int | None = None) -> Examples:
    """Return the examples of an `.npz`; with `superclass`, those with this number in the arrays `coarse_train` and `coarse_test`."""
    arrays = _loaded(path)
    splits = {kind: array for name, array in arrays.items() if (kind := kind_of(name)) is not None} or _by_shape(arrays)
    missing = [f"{kind}_{split}" for split, kind in NEEDED if (split, kind) not in splits]
    if missing:
        present = ", ".join(f"{name} {array.shape}" for name, array in arrays.items()) or "nothing"
        raise TaskError(
            f"{path.name} has no {', no '.join(missing)}; it has {present}. It needs x_train, y_train, x_test and y_test, or one array of "
            "pictures and one of labels."
        )
    if superclass is not None:
        splits = _of_superclass(splits, arrays, superclass, path.name)
    return examples_of(splits, path.name)


def _loaded(path: Path) -> dict[str, Array]:
    try:
        with path.open("rb") as opened:
            file: Any = np.load(opened, allow_pickle=False)
            if not isinstance(file, np.lib.npyio.NpzFile):
                raise ValueError("it is a single array")
            members = file.zip.infolist() if file.zip is not None else ()
            check_unpacked_size(sum(member.file_size for member in members), path.stat().st_size)
            return {name: file[name] for name in file.files}
    except (*READ_ERRORS, MemoryError, NotImplementedError, RuntimeError, KeyError) as error:  # the last three: raised by zipfile
        raise TaskError(f"{path.name} is not a readable .npz: {error}. Write it with numpy.savez, without objects.") from None


def check_unpacked_size(unpacked_bytes: int, packed_bytes: int) -> None:
    """Raise ValueError if a file unpacks to so many more bytes than it has that it must be a decompression bomb."""
    if unpacked_bytes > BOMB_BYTES and unpacked_bytes > BOMB_RATIO * packed_bytes:
        raise ValueError(f"its {packed_bytes} bytes unpack to {unpacked_bytes} and more, which no pictures or texts do")


def kind_of(name: str) -> tuple[str, str] | None:
    """Return the split ("train" or "test") and the kind ("x": pictures, "y": labels) that an array's name says; None if unclear."""
    words = [word for word in re.split(r"[^a-z]+", name.lower()) if word]
    splits, kinds = [SPLITS[w] for w in words if w in SPLITS], [WORDS[w] for w in words if w in WORDS]
    return (splits[0], kinds[0]) if len(splits) == len(kinds) == 1 else None


def _by_shape(arrays: Mapping[str, Array]) -> Arrays:
    """Return the only array of pictures and the only array of labels, divided into two splits; empty unless there is one of each."""
    pictures = [array for array in arrays.values() if array.ndim in (3, 4)]
    num = len(pictures[0]) if pictures else -1
    labels = [array for array in arrays.values() if array.shape in ((num,), (num, 1)) and array.dtype.kind != "f"]
    return split(pictures[0], labels[0].reshape(-1)) if len(pictures) == len(labels) == 1 else {}


def split(x: Array, y: Array) -> Arrays:
    """Return pictures `x` and labels `y` divided into two splits: every fifth example of each class is a test example."""
    rank = np.zeros(len(y), dtype=np.int64)  # of each example within its class
    for label in np.unique(y):
        rank[y == label] = np.arange((y == label).sum())
    is_test = rank % TEST_EVERY == TEST_EVERY - 1
    return {
        (name, kind): array[rows] for name, rows in (("train", ~is_test), ("test", is_test)) for kind, array in (("x", x), ("y", y))
    }


def _of_superclass(splits: Arrays, arrays: Mapping[str, Array], number: int, file: str) -> Arrays:
    if not {"coarse_train", "coarse_test"} <= arrays.keys():
        raise TaskError(
            f"{file} has no superclasses: these are the arrays coarse_train and coarse_test, and it has {', '.join(arrays)}."
        )
    numbers = sorted(set(arrays["coarse_train"].tolist()))
    if number not in numbers:
        raise TaskError(f"superclass {number} is not in {file}; it has {numbers[0]} to {numbers[-1]}.")
    return {(name, kind): array[arrays[f"coarse_{name}"] == number] for (name, kind), array in splits.items()}


def examples_of(splits: Mapping[tuple[str, str], Array], file: str) -> Examples:
    """Return Examples of the arrays in `splits`, by (split, kind), with classes renumbered from 0; error messages name `file`."""
    labels = {name: _labels(splits[name, "y"], f"y_{name} of {file}") for name in ("train", "test")}
    known = np.unique(labels["train"])
    unknown = np.setdiff1d(labels["test"], known)
    if len(unknown):
        raise TaskError(f"{file}: the test split has class {unknown[0]!s}, of which there is no training example.")
    x = {name: _channels_first(splits[name, "x"], f"x_{name} of {file}") for name in ("train", "test")}
    y = {name: torch.from_numpy(np.searchsorted(known, labels[name]).astype(np.int64)) for name in ("train", "test")}
    try:
        return Examples(x["train"], y["train"], x["test"], y["test"])
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
    """Return pictures as (num, channels, height, width): uint8 if all are whole numbers from 0 to 255, else float32."""
    grey = array[:, None] if array.ndim == 3 else array
    is_last = grey.ndim == 4 and grey.shape[1] not in (1, 3) and grey.shape[3] in (1, 3)
    picture = np.moveaxis(grey, 3, 1) if is_last else grey
    if picture.ndim != 4 or picture.shape[1] not in (1, 3) or picture.dtype.kind not in "iuf":
        raise TaskError(
            f"{what} is {array.shape} of {array.dtype}; pictures are (num, height, width), or have 1 or 3 channels as their second or last "
            "dimension."
        )
    is_bytes = picture.dtype.kind in "iu" and (not picture.size or (picture.min() >= 0 and picture.max() <= 255))
    return torch.from_numpy(np.array(picture, dtype=np.uint8 if is_bytes else np.float32, order="C"))


def scaled(data: Examples, side: int) -> Examples:
    """Return the pictures of `data`, resized to `side` x `side` pixels."""
    if data.x_train.shape[-2:] == (side, side):
        return data
    x = [
        interpolate(x.float(), (side, side), mode="bilinear", antialias=True).round().to(x.dtype)
        if x.dtype is torch.uint8
        else interpolate(x, (side, side), mode="bilinear", antialias=True)
        for x in (data.x_train, data.x_test)
    ]
    return Examples(x[0], data.y_train, x[1], data.y_test, data.look)


# --- Pictures and texts from files ---

DEBIAN = Path("/usr/share/datasets/fashion-mnist")
CHUNK_BYTES = 1 << 26  # unpacked at a time
MAX_GREY, NUM_TRAIN_DIGITS = 16, 1437  # of scikit-learn's digits: the value of white; training examples
IDX = {
    ("train", "x"): "train-images-idx3-ubyte",
    ("train", "y"): "train-labels-idx1-ubyte",
    ("test", "x"): "t10k-images-idx3-ubyte",
    ("test", "y"): "t10k-labels-idx1-ubyte",
}


def read_digits() -> Examples:
    """Return scikit-learn's handwritten digits, a file of this package; the last fifth is the test split."""
    with (resources.files("paredown") / "data" / "digits.npz").open("rb") as file, np.load(file) as arrays:
        x, y = np.rint(arrays["x"] * (255 / MAX_GREY)).astype(np.uint8), arrays["y"].astype(np.int64)
    parts = {"train": slice(None, NUM_TRAIN_DIGITS), "test": slice(NUM_TRAIN_DIGITS, None)}
    return examples_of({(name, kind): {"x": x, "y": y}[kind][parts[name]] for name, kind in NEEDED}, "digits.npz")


def read_fashion_mnist(folder: Path | None = None) -> Examples:
    """Return Fashion-MNIST from `folder`, by default that of Debian's package dataset-fashion-mnist."""
    folder = DEBIAN if folder is None else folder
    if not folder.is_dir():
        raise TaskError(
            f"Fashion-MNIST is not in {folder}, where Debian's package dataset-fashion-mnist installs it (apt install "
            "dataset-fashion-mnist). For a file of yours, use images:FILE.npz."
        )
    return read_idx(folder)


def read_text(path: Path, length: int) -> Text:
    """Return the bytes of a file, decompressed if it is a `.gz`, as a Text with pieces of `length` bytes."""
    try:
        read = _unzipped(path) if path.suffix == ".gz" else path.read_bytes()
    except READ_ERRORS as error:
        raise TaskError(f"{path.name} cannot be read: {error}.") from None
    return Text(torch.frombuffer(bytearray(read), dtype=torch.uint8) if read else torch.empty(0, dtype=torch.uint8), length)


def _unzipped(path: Path) -> bytes:
    """Return the contents of a .gz, read in chunks so that a decompression bomb is refused early."""
    chunks: list[bytes] = []
    file_bytes, unpacked_bytes = path.stat().st_size, 0
    with gzip.open(path) as file:
        while chunk := file.read(CHUNK_BYTES):
            chunks.append(chunk)
            unpacked_bytes += len(chunk)
            check_unpacked_size(unpacked_bytes, file_bytes)
    return b"".join(chunks)


# --- idx and folders --------------------------------------------------------------------------------------------------


def read_idx(folder: Path) -> Examples:
    """Return the examples in a folder's four idx files (`.gz` or not), which have the names of MNIST's."""
    return examples_of({kind: _idx_array(folder, IDX[kind]) for kind in NEEDED}, folder.name)


def is_idx(folder: Path) -> bool:
    """Return whether a folder has idx files."""
    return any((folder / f"{IDX['train', 'x']}{ending}").exists() for ending in ("", ".gz"))


def _idx_array(folder: Path, name: str) -> Array:
    """Return the array of uint8 values in the idx file `name`, or `name`.gz.

    Layout: two zero bytes, the byte 8 (for uint8), the number of dimensions, each dimension as big-endian uint32, then the values.
    """
    zipped, plain = folder / f"{name}.gz", folder / name
    if not zipped.exists() and not plain.exists():
        raise TaskError(f"{folder.name} has neither {name} nor {name}.gz.")
    try:
        read = plain.read_bytes() if plain.exists() else _unzipped(zipped)
    except READ_ERRORS as error:
        raise TaskError(f"{name} in {folder.name} cannot be read: {error}.") from None
    num_dims = read[3] if read[:3] == b"\0\0\x08" and len(read) > 3 else 0
    shape = np.frombuffer(read, ">u4", num_dims, 4).astype(np.int64) if len(read) >= 4 + 4 * num_dims else np.zeros(0, np.int64)
    values = np.frombuffer(read, np.uint8, offset=min(4 + 4 * num_dims, len(read)))
    if not num_dims or values.size != prod(shape.tolist()):  # Python integers: sizes of a broken file overflow int64
        raise TaskError(f"{name} in {folder.name} is not an idx file of uint8, or is truncated: it has {len(read)} bytes.")
    return values.reshape(shape)


def read_folder(folder: Path, *, side: int | None = None) -> Examples:
    """Return the pictures of `folder`: in `train` and `test`, with a folder for each class in both, or in idx files.

    If class folders stand in `folder` itself, every fifth picture of a class is a test example. `side`: resize to `side` x `side` pixels.
    """
    if is_idx(folder):
        return read_idx(folder)
    halves = {name: folder / name for name in ("train", "test") if (folder / name).is_dir()}
    if len(halves) == 1:
        raise TaskError(
            f"{folder.name} has a folder {next(iter(halves))} and not the other; it needs both train and test, or class folders alone."
        )
    names = _folders(halves.get("train", folder))
    if len(names) < 2:
        raise TaskError(
            f"{folder.name} has {len(names)} class folders; it needs one folder of pictures for each class, and at least two classes."
        )
    if not halves:
        return examples_of(split(*_pictures(folder, names, side)), folder.name)
    unknown = [name for name in _folders(halves["test"]) if name not in names]
    if unknown:
        raise TaskError(f"{folder.name}/test has class {unknown[0]!r}, which train does not have.")
    read = {name: _pictures(half, names, side) for name, half in halves.items()}
    return examples_of({(name, kind): read[name][kind == "y"] for name, kind in NEEDED}, folder.name)


def _folders(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))


def _pictures(folder: Path, names: Sequence[str], side: int | None) -> tuple[Array, Array]:
    paths = [
        (path, number)
        for number, name in enumerate(names)
        if (folder / name).is_dir()
        for path in sorted((folder / name).iterdir())
    ]
    read = [(_picture(path, side), number) for path, number in paths if not path.name.startswith(".")]
    shapes = {picture.shape: None for picture, _ in read}
    if len(shapes) > 1:
        a, b = list(shapes)[:2]
        raise TaskError(
            f"pictures in {folder.name} have different sizes, {a[:2]} and {b[:2]} among them: resize them with the option side=32."
        )
    x = np.stack([picture for picture, _ in read]) if read else np.zeros((0, 1, 1, 3), np.uint8)
    return x, np.array([number for _, number in read], dtype=np.int64)


def _picture(path: Path, side: int | None) -> Array:
    try:
        from PIL import Image
    except ImportError:
        raise TaskError("pictures in folders need Pillow: pip install pillow. An .npz does not.") from None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # about unknown tags of pictures that can be read
            warnings.simplefilter("error", Image.DecompressionBombWarning)  # 89 million pixels and more
            with Image.open(path) as file:
                picture = file.convert("RGB")
            return np.asarray(picture if side is None else picture.resize((side, side), Image.Resampling.BILINEAR))
    except Exception as error:  # Pillow's decoders raise many kinds of errors
        why = f"{type(error).__name__}: {str(error)[:120]}".rstrip(": ")
        raise TaskError(f"{path.parent.name}/{path.name} is not a readable picture: {why}. Replace it, or remove it.") from None


# --- weights -----------------------------------------------------------------------------------------------------------


SAVE_WEIGHTS = "Write it by torch.save(model.state_dict(), FILE), from a model of the same options."


def load_weights(model: nn.Module, path: Path) -> nn.Module:
    """Return `model` with the weights of a saved state dict; tensors that the file lacks, or has in another shape, stay and are logged."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except (*READ_ERRORS, RuntimeError, pickle.UnpicklingError) as error:
        raise TaskError(f"{path.name} cannot be read as weights: {str(error)[:120]}. {SAVE_WEIGHTS}") from None
    own = model.state_dict()
    known = {name: value for name, value in state.items() if name in own and value.shape == own[name].shape}
    if not known:
        raise TaskError(
            f"{path.name} has no weight of this model: none of its {len(state)} tensors has the name and shape of one. {SAVE_WEIGHTS}"
        )
    new = [name for name in own if name not in known]
    if new:
        names = ", ".join(new[:3]) + (", ..." if len(new) > 3 else "")
        log.warning(
            "%s: %d of %d tensors of the model are not in it with their shape, and stay new: %s",
            path.name,
            len(new),
            len(own),
            names,
        )
    model.load_state_dict({**own, **known})
    return model
