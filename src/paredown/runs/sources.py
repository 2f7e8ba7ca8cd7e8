"""Pictures and texts from files: the carried digits, Fashion-MNIST, idx files as MNIST has them, folders of class folders, bytes of a text.

>>> read_digits()
Examples(1437 to learn from, 360 to be judged by, 10 answers)
"""

from __future__ import annotations

import gzip
import warnings
from collections.abc import Sequence
from importlib import resources
from math import prod
from pathlib import Path

import numpy as np
import torch

from paredown.errors import TaskError
from paredown.runs.arrays import BROKEN, NEEDED, Array, check_swelling, examples_of, split
from paredown.runs.data import Examples, Text

DEBIAN = Path("/usr/share/datasets/fashion-mnist")
FASHION = ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot")
PIECE = 1 << 26  # bytes unpacked at a time
LEVELS, NUM_DIGITS = 16, 1437  # of grey above black; of digits to learn from
IDX = {
    ("train", "x"): "train-images-idx3-ubyte",
    ("train", "y"): "train-labels-idx1-ubyte",
    ("test", "x"): "t10k-images-idx3-ubyte",
    ("test", "y"): "t10k-labels-idx1-ubyte",
}


def read_digits() -> Examples:
    """scikit-learn's handwritten digits, which the package carries: the last fifth of them is for tests."""
    with (resources.files("paredown") / "data" / "digits.npz").open("rb") as file, np.load(file) as arrays:
        x, y = np.rint(arrays["x"] * (255 / LEVELS)).astype(np.uint8), arrays["y"].astype(np.int64)
    parts = {"train": slice(None, NUM_DIGITS), "test": slice(NUM_DIGITS, None)}
    return examples_of({(name, kind): {"x": x, "y": y}[kind][parts[name]] for name, kind in NEEDED}, (), "digits.npz")


def read_fashion_mnist(folder: Path | None = None) -> Examples:
    """Fashion-MNIST where Debian's package dataset-fashion-mnist puts it."""
    folder = DEBIAN if folder is None else folder
    if not folder.is_dir():
        raise TaskError(
            f"Fashion-MNIST is not there: Debian's package dataset-fashion-mnist puts it into {folder} (apt install "
            "dataset-fashion-mnist). With a file of your own, take images:FILE.npz."
        )
    return read_idx(folder, FASHION)


def read_text(path: Path, length: int) -> Text:
    """The bytes of a file, unzipped where it is `.gz`."""
    try:
        read = _unzipped(path) if path.suffix == ".gz" else path.read_bytes()
    except BROKEN as error:
        raise TaskError(f"{path.name} cannot be read: {error}.") from None
    return Text(torch.frombuffer(bytearray(read), dtype=torch.uint8) if read else torch.empty(0, dtype=torch.uint8), length)


def _unzipped(path: Path) -> bytes:
    """What a .gz holds, piece by piece: one that swells beyond measure is given up."""
    pieces: list[bytes] = []
    packed, num = path.stat().st_size, 0
    with gzip.open(path) as file:
        while piece := file.read(PIECE):
            pieces.append(piece)
            num += len(piece)
            check_swelling(num, packed)
    return b"".join(pieces)


# --- idx and folders --------------------------------------------------------------------------------------------------


def read_idx(folder: Path, class_names: Sequence[str] = ()) -> Examples:
    """The four idx files of MNIST and its kin, zipped or not."""
    found = {kind: _idx_array(folder, IDX[kind]) for kind in NEEDED}
    return examples_of(found, class_names, folder.name)


def is_idx(folder: Path) -> bool:
    """Whether a folder has idx files."""
    return any((folder / f"{IDX['train', 'x']}{ending}").exists() for ending in ("", ".gz"))


def _idx_array(folder: Path, name: str) -> Array:
    """Two zero bytes, 8 for bytes, the number of dimensions, each of them in four bytes, high ones first; then the numbers."""
    zipped, plain = folder / f"{name}.gz", folder / name
    if not zipped.exists() and not plain.exists():
        raise TaskError(f"{folder.name} has neither {name} nor {name}.gz.")
    try:
        read = plain.read_bytes() if plain.exists() else _unzipped(zipped)
    except BROKEN as error:
        raise TaskError(f"{name} in {folder.name} cannot be read: {error}.") from None
    num_dims = read[3] if read[:3] == b"\0\0\x08" and len(read) > 3 else 0
    shape = np.frombuffer(read, ">u4", num_dims, 4).astype(np.int64) if len(read) >= 4 + 4 * num_dims else np.zeros(0, np.int64)
    values = np.frombuffer(read, np.uint8, offset=min(4 + 4 * num_dims, len(read)))
    if not num_dims or values.size != prod(shape.tolist()):  # in whole numbers of any size
        raise TaskError(f"{name} in {folder.name} is no idx file of bytes, or is cut off: {len(read)} bytes.")
    return values.reshape(shape)


def read_folder(folder: Path, *, side: int | None = None) -> Examples:
    """Pictures in folders named as their classes, under `train` and `test`, or without these: then every fifth is for tests."""
    if is_idx(folder):
        return read_idx(folder)
    halves = {name: folder / name for name in ("train", "test") if (folder / name).is_dir()}
    if len(halves) == 1:
        raise TaskError(
            f"{folder.name} has a folder {next(iter(halves))} and not the other; it needs train and test, or class folders."
        )
    names = _folders(halves.get("train", folder))
    if len(names) < 2:
        raise TaskError(
            f"{folder.name} has {len(names)} class folders; pictures lie in one folder for each class, and two at least."
        )
    if not halves:
        return examples_of(split(*_pictures(folder, names, side)), names, folder.name)
    unknown = [name for name in _folders(halves["test"]) if name not in names]
    if unknown:
        raise TaskError(f"{folder.name}/test has class {unknown[0]!r}, which train has not.")
    read = {name: _pictures(half, names, side) for name, half in halves.items()}
    return examples_of({(name, kind): read[name][kind == "y"] for name, kind in NEEDED}, names, folder.name)


def _folders(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))


def _pictures(folder: Path, names: Sequence[str], side: int | None) -> tuple[Array, Array]:
    """All pictures (num, height, width, 3) uint8 and their classes."""
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
            f"pictures in {folder.name} have different sizes, {a[:2]} and {b[:2]} among them: say side=32 to scale them."
        )
    x = np.stack([picture for picture, _ in read]) if read else np.zeros((0, 1, 1, 3), np.uint8)
    return x, np.array([number for _, number in read], dtype=np.int64)


def _picture(path: Path, side: int | None) -> Array:
    try:
        from PIL import Image
    except ImportError:
        raise TaskError("pictures in folders are read with Pillow: pip install pillow. An .npz needs nothing.") from None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of odd tags beside a picture that can be read
            warnings.simplefilter("error", Image.DecompressionBombWarning)  # 89 million pixels and more
            with Image.open(path) as file:
                picture = file.convert("RGB")
            return np.asarray(picture if side is None else picture.resize((side, side), Image.Resampling.BILINEAR))
    except Exception as error:  # Pillow's thirty decoders raise errors of many kinds
        why = f"{type(error).__name__}: {str(error)[:120]}".rstrip(": ")
        raise TaskError(
            f"{path.parent.name}/{path.name} is no picture that can be read: {why}. Replace it, or remove it."
        ) from None
