"""Data files: the examples that are read from them, and errors for files with missing or wrong contents."""

from __future__ import annotations

import gzip
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from paredown.errors import TaskError
from paredown.study.tasks import data_files
from paredown.study.tasks.data import Examples
from paredown.study.tasks.data_files import read_arrays, read_digits, read_fashion_mnist, read_folder, read_text, scaled
from tests.study.tasks.made import DATA, needs_data, pictures, write_npz


def test_the_carried_digits_are_scikit_learns() -> None:
    datasets = pytest.importorskip("sklearn.datasets")
    x, y = datasets.load_digits(return_X_y=True)
    data = read_digits()
    both = torch.cat([data.x_train, data.x_test]).view(-1, 64).numpy()
    assert np.array_equal(both, np.rint(x * 255 / 16))
    assert np.array_equal(torch.cat([data.y_train, data.y_test]).numpy(), y)


@pytest.mark.parametrize("shape", [(6, 7), (6, 7, 1), (6, 7, 3), (1, 6, 7), (3, 6, 7)])
def test_pictures_of_any_layout(shape: tuple[int, ...], tmp_path: Path) -> None:
    data = read_arrays(write_npz(tmp_path / "a.npz", shape))
    channels = 3 if 3 in shape else 1
    assert data.x_train.shape == (30, channels, 6, 7) and data.x_test.shape == (9, channels, 6, 7)
    array = pictures(30, *shape)[0]
    expected = array.reshape(30, 1, 6, 7) if channels == 1 else array if shape[0] == 3 else array.transpose(0, 3, 1, 2)
    assert np.array_equal(data.x_train.numpy(), expected)


NAMES = [
    ("x_train", "y_train", "x_test", "y_test"),
    ("train_images", "train_labels", "test_images", "test_labels"),
    ("X_train", "Y_train", "X_test", "Y_test"),
    ("training-data", "training-targets", "testing-data", "testing-targets"),
]


@pytest.mark.parametrize("names", NAMES)
def test_arrays_by_name(names: tuple[str, ...], tmp_path: Path) -> None:
    (x, y), (x_test, y_test) = pictures(30, 6, 6), pictures(9, 6, 6, seed=1)
    arrays = dict(zip(names, (x, y[:, None], x_test, y_test[:, None]), strict=True))  # labels (num, 1), as MedMNIST has them
    np.savez(tmp_path / "a.npz", **arrays, val_images=x, val_labels=y, meta="{}")
    data = read_arrays(tmp_path / "a.npz")
    assert np.array_equal(data.x_test[:, 0].numpy(), x_test)
    assert data.y_train.tolist() == y.tolist()


def test_one_array_of_pictures_is_split_class_by_class(tmp_path: Path) -> None:
    x, _ = pictures(50, 4, 4)
    y = np.repeat([5, 7], 25)
    np.savez(tmp_path / "a.npz", stuff=x, things=y)
    data = read_arrays(tmp_path / "a.npz")
    assert (data.num_train, data.num_test) == (40, 10)
    assert Counter(data.y_test.tolist()) == {0: 5, 1: 5}
    seen = {picture.numpy().tobytes() for picture in torch.cat([data.x_train, data.x_test])}
    assert seen == {picture.tobytes() for picture in x}, "every picture is in one of the two"


def test_labels_may_be_texts_and_any_numbers(tmp_path: Path) -> None:
    words = np.array(["cat", "dog", "ant"])
    y, y_test = np.arange(30) % 3, np.arange(9) % 3
    data = read_arrays(write_npz(tmp_path / "a.npz", y_train=words[y], y_test=words[y_test]))
    assert data.num_answers == 3
    assert data.y_test.tolist()[:3] == [1, 2, 0]
    data = read_arrays(write_npz(tmp_path / "b.npz", y_train=y * 10, y_test=y_test * 10))
    assert data.num_answers == 3


def test_floats_stay_floats(tmp_path: Path) -> None:
    x = np.random.default_rng(0).normal(size=(30, 6, 6))
    data = read_arrays(write_npz(tmp_path / "a.npz", x_train=x, x_test=x[:9]))
    assert data.x_train.dtype is torch.float32
    assert np.array_equal(data.x_train[:, 0].numpy(), x.astype(np.float32))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"x_test": None}, r"a.npz has no x_test; it has x_train \(30, 6, 6\), y_train \(30,\), y_test \(9,\). It needs x_train"),
        ({"x_test": None, "y_test": None}, "has no x_test, no y_test"),
        ({"y_train": np.zeros(30, np.int64), "y_test": np.zeros(9, np.int64)}, "all 30 training examples are of class 0"),
        ({"x_test": np.zeros((0, 6, 6), np.uint8), "y_test": np.zeros(0, np.int64)}, "the test split is empty"),
        ({"y_test": np.arange(9)}, "the test split has class 3, of which there is no training example"),
        ({"y_train": np.zeros((30, 5))}, r"y_train of a.npz is \(30, 5\) of float64; labels are"),
        ({"x_train": np.zeros((30, 36), np.uint8)}, r"x_train of a.npz is \(30, 36\) of uint8; pictures are"),
        ({"y_train": np.arange(29) % 3}, "30 training examples and 29 answers"),
        ({"x_train": np.array([{}] * 30, dtype=object)}, "not a readable .npz: .*without objects"),
    ],
)
def test_files_that_make_no_task(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=said):
        read_arrays(write_npz(tmp_path / "a.npz", **changes))


def test_files_that_are_no_npz(tmp_path: Path) -> None:
    whole = write_npz(tmp_path / "a.npz").read_bytes()
    for number, read in enumerate((b"", b"hello", whole[: len(whole) // 2])):
        path = tmp_path / f"{number}.npz"
        path.write_bytes(read)
        with pytest.raises(TaskError, match=rf"{number}\.npz is not a readable \.npz"):
            read_arrays(path)
    np.save(tmp_path / "one.npy", np.zeros(3))
    with pytest.raises(TaskError, match="it is a single array"):
        read_arrays(tmp_path / "one.npy")


def test_a_superclass_keeps_its_classes(tmp_path: Path) -> None:
    coarse = {"coarse_train": np.arange(30) % 3 // 2, "coarse_test": np.arange(9) % 3 // 2}  # classes 0, 1 | 2
    path = write_npz(tmp_path / "a.npz", **coarse)
    data = read_arrays(path, superclass=0)
    assert (data.num_train, data.num_test, data.num_answers) == (20, 6, 2)
    with pytest.raises(TaskError, match=r"superclass 5 is not in a\.npz; it has 0 to 1"):
        read_arrays(path, superclass=5)
    with pytest.raises(TaskError, match=r"all 10 training examples are of class"):
        read_arrays(path, superclass=1)
    with pytest.raises(TaskError, match="coarse_train and coarse_test, and it has x_train"):
        read_arrays(write_npz(tmp_path / "b.npz"), superclass=0)


@needs_data
@pytest.mark.parametrize("number", [0, 19])
def test_the_superclasses_of_cifar100(number: int) -> None:
    data = read_arrays(DATA / "images" / "cifar100.npz", superclass=number)
    assert (data.num_train, data.num_test, data.num_answers) == (600, 200, 5)
    assert Counter(data.y_test.tolist()) == dict.fromkeys(range(5), 40)


SHAPES = {
    "cifar10": (7000, 1800, 10),
    "trashnet": (2022, 503, 6),
    "pneumonia_mnist": (2698, 468, 2),
    "fashion_mnist": (8000, 2000, 10),
}


@needs_data
@pytest.mark.parametrize("name", SHAPES)
def test_real_sets(name: str) -> None:
    data = read_arrays(DATA / "images" / f"{name}.npz")
    assert (data.num_train, data.num_test, data.num_answers) == SHAPES[name]


# --- idx --------------------------------------------------------------------------------------------------------------


def write_idx(folder: Path, *, zipped: bool) -> Path:
    folder.mkdir()
    for split, num in (("train", 30), ("t10k", 9)):
        x, y = pictures(num, 5, 4, seed=num)
        for what, array in (("images-idx3", x), ("labels-idx1", y.astype(np.uint8))):
            head = bytes([0, 0, 8, array.ndim]) + b"".join(size.to_bytes(4, "big") for size in array.shape)
            read = head + array.tobytes()
            name = f"{split}-{what}-ubyte{'.gz' * zipped}"
            (folder / name).write_bytes(gzip.compress(read) if zipped else read)
    return folder


@pytest.mark.parametrize("zipped", [True, False])
def test_idx_files(zipped: bool, tmp_path: Path) -> None:
    folder = write_idx(tmp_path / "set", zipped=zipped)
    for data in (read_folder(folder), read_fashion_mnist(folder)):
        assert np.array_equal(data.x_test[:, 0].numpy(), pictures(9, 5, 4, seed=9)[0])
        assert data.y_train.tolist() == [k % 3 for k in range(30)]


def test_idx_files_that_are_cut_off_or_missing(tmp_path: Path) -> None:
    folder = write_idx(tmp_path / "set", zipped=False)
    whole = (folder / "t10k-images-idx3-ubyte").read_bytes()
    for read in (whole[:-1], whole[:7], b"", b"\0\0\x0d\x03" + whole[4:]):
        (folder / "t10k-images-idx3-ubyte").write_bytes(read)
        with pytest.raises(TaskError, match="t10k-images-idx3-ubyte in set is not an idx file of uint8, or is truncated"):
            read_folder(folder)
    (folder / "t10k-images-idx3-ubyte").unlink()
    with pytest.raises(TaskError, match=r"set has neither t10k-images-idx3-ubyte nor t10k-images-idx3-ubyte\.gz"):
        read_folder(folder)


def test_fashion_mnist_says_where_it_would_be(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(data_files, "DEBIAN", tmp_path / "none")
    with pytest.raises(TaskError, match="apt install dataset-fashion-mnist"):
        read_fashion_mnist()


# --- folders ----------------------------------------------------------------------------------------------------------


def write_pictures(folder: Path, names: str, num: int, size: tuple[int, int] = (5, 4), seed: int = 0) -> None:
    image = pytest.importorskip("PIL.Image")
    for name in names:
        (folder / name).mkdir(parents=True)
        for number, array in enumerate(pictures(num, size[1], size[0], 3, seed=seed + ord(name))[0]):
            image.fromarray(array).save(folder / name / f"{number:03d}.png")


def test_folders_of_classes(tmp_path: Path) -> None:
    write_pictures(tmp_path / "set" / "train", "ab", 6)
    write_pictures(tmp_path / "set" / "test", "ab", 2, seed=9)
    data = read_folder(tmp_path / "set")
    assert (data.num_train, data.num_test, data.num_answers) == (12, 4, 2)
    assert np.array_equal(data.x_train[6].numpy(), pictures(6, 4, 5, 3, seed=ord("b"))[0][0].transpose(2, 0, 1))
    write_pictures(tmp_path / "set" / "test", "c", 1)
    with pytest.raises(TaskError, match="set/test has class 'c', which train does not have"):
        read_folder(tmp_path / "set")


def test_folders_without_a_split_and_of_any_size(tmp_path: Path) -> None:
    write_pictures(tmp_path, "ab", 10)
    data = read_folder(tmp_path)
    assert (data.num_train, data.num_test) == (16, 4)
    write_pictures(tmp_path, "c", 10, size=(8, 8))
    with pytest.raises(TaskError, match=r"different sizes, \(4, 5\) and \(8, 8\) among them: resize them with the option side=32"):
        read_folder(tmp_path)
    assert read_folder(tmp_path, side=6).x_train.shape == (24, 3, 6, 6)


def test_folders_that_make_no_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TaskError, match="has 0 class folders"):
        read_folder(tmp_path)
    (tmp_path / "train").mkdir()
    with pytest.raises(TaskError, match="has a folder train and not the other"):
        read_folder(tmp_path)
    (tmp_path / "train").rmdir()
    for name in "ab":
        (tmp_path / name).mkdir()
    with pytest.raises(TaskError, match="the training split is empty"):
        read_folder(tmp_path)
    (tmp_path / "a" / "note.txt").write_text("hello")
    monkeypatch.setitem(sys.modules, "PIL", None)  # as if it were not installed
    with pytest.raises(TaskError, match="pip install pillow"):
        read_folder(tmp_path)


def test_what_is_no_picture_is_named(tmp_path: Path) -> None:
    write_pictures(tmp_path, "ab", 5)
    (tmp_path / "a" / "note.txt").write_text("hello")
    with pytest.raises(TaskError, match=r"a/note\.txt is not a readable picture: UnidentifiedImageError"):
        read_folder(tmp_path)


# --- texts and sizes --------------------------------------------------------------------------------------------------


def test_texts_are_bytes_zipped_or_not(tmp_path: Path) -> None:
    text = ("Grüße " * 400).encode()
    (tmp_path / "a.txt").write_bytes(text)
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(text))
    for name in ("a.txt", "a.txt.gz"):
        assert bytes(read_text(tmp_path / name, 32).read.tolist()) == text
    (tmp_path / "b.gz").write_bytes(gzip.compress(text)[:-20])
    with pytest.raises(TaskError, match=r"b\.gz cannot be read"):
        read_text(tmp_path / "b.gz", 32)
    (tmp_path / "empty").write_bytes(b"")
    with pytest.raises(TaskError, match="the text has 0 bytes"):
        read_text(tmp_path / "empty", 32)


def test_scaling_keeps_bytes_and_means() -> None:
    data = read_digits()
    larger = scaled(data, 16)
    assert larger.x_train.shape == (1437, 1, 16, 16) and larger.x_train.dtype is torch.uint8
    assert larger.x_train.float().mean() == pytest.approx(data.x_train.float().mean().item(), rel=0.01)
    assert scaled(data, 8) is data
    flat = Examples(torch.full((4, 1, 4, 4), 0.5), torch.arange(4) % 2, torch.full((4, 1, 4, 4), 0.5), torch.arange(4) % 2)
    assert torch.equal(scaled(flat, 7).x_test, torch.full((4, 1, 7, 7), 0.5))
