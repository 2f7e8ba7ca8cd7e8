"""Batches are shuffled, seeded and complete; test examples are separate; pictures are normalized, shifted and mirrored correctly."""

from __future__ import annotations

import math
from itertools import islice

import numpy as np
import pytest
import torch
from torch import Tensor

from paredown.errors import TaskError
from paredown.study.tasks.data import Data, Examples, PictureTransform, Text
from tests.study.tasks.made import CPU, examples


def numbered(num: int = 103) -> Examples:
    """Examples that are their own numbers, classes sorted; test examples are negative."""
    y = torch.arange(num) * 4 // num
    return Examples(torch.arange(num, dtype=torch.float32), y, -1.0 - torch.arange(7.0), torch.arange(7) % 4)


def drawn(data: Data, batch: int, num: int, seed: int = 0) -> list[Tensor]:
    return [x for x, _ in islice(data.batches(batch, seed=seed, device=CPU), num)]


def test_a_pass_takes_each_example_once_and_leaves_what_fills_no_batch() -> None:
    passes = [torch.cat(drawn(numbered(), 10, 40)[start : start + 10]).tolist() for start in (0, 10, 20, 30)]
    for seen in passes:
        assert len(set(seen)) == 100, "10 batches of 10 of 103, none twice"
    assert len(set(map(tuple, passes))) == 4, "each pass has an order of its own"
    assert set().union(*passes) == set(range(103)), "what one pass left out another takes"


def test_a_seed_decides_the_order() -> None:
    assert all(torch.equal(a, b) for a, b in zip(drawn(numbered(), 10, 25), drawn(numbered(), 10, 25), strict=True))
    assert not torch.equal(drawn(numbered(), 100, 1)[0], drawn(numbered(), 100, 1, seed=1)[0])


def test_examples_and_answers_stay_together_and_are_mixed() -> None:
    data = numbered()
    for x, y in islice(data.batches(20, seed=3, device=CPU), 5):
        assert torch.equal(y, data.y_train[x.long()])
        assert len(y.unique()) >= 3, "classes lie sorted in the data; a batch of 20 has fewer than 3 of 4 with odds below 1e-5"


def test_test_examples_come_in_order_and_never_in_training() -> None:
    data = numbered()
    assert torch.cat([x for x, _ in data.tests(3, device=CPU)]).tolist() == [-1.0 - k for k in range(7)]
    assert all((x >= 0).all() for x in drawn(data, 10, 20))


def bytes_of(num: int, channels: int = 1) -> Tensor:
    return torch.randint(256, (num, channels, 6, 5), generator=torch.Generator().manual_seed(num), dtype=torch.uint8)


@pytest.mark.parametrize("channels", [1, 3])
def test_bytes_get_the_mean_and_deviation_of_training(channels: int) -> None:
    x, x_test = bytes_of(40, channels), bytes_of(8, channels)
    data = Examples(x, torch.arange(40) % 2, x_test, torch.arange(8) % 2, look=PictureTransform(channels=3))
    seen = next(data.tests(8, device=CPU))[0]
    as_numpy = x.numpy().astype(np.float64)
    mean, deviation = as_numpy.mean((0, 2, 3), keepdims=True), as_numpy.std((0, 2, 3), keepdims=True)
    expected = np.broadcast_to((x_test.numpy() - mean) / deviation, (8, 3, 6, 5))
    np.testing.assert_allclose(seen.numpy(), expected, atol=1e-5)  # numbers up to 2 in float32


def test_pictures_of_one_colour_stay_finite() -> None:
    same = torch.full((4, 1, 2, 2), 7, dtype=torch.uint8)
    data = Examples(same, torch.arange(4) % 2, same, torch.arange(4) % 2)
    assert next(data.tests(4, device=CPU))[0].abs().max() == 0


def test_pictures_are_shifted_and_mirrored_in_training_alone() -> None:
    x = torch.arange(1.0, 31).view(1, 1, 6, 5).repeat(2, 1, 1, 1)
    data = Examples(x, torch.tensor([0, 1]), x, torch.tensor([0, 1]), look=PictureTransform(shift=2, mirror=True))
    padded = torch.nn.functional.pad(x[0, 0], (2, 2, 2, 2))
    windows = [padded[down : down + 6, right : right + 5] for down in range(5) for right in range(5)]
    allowed = {tuple(w.flatten().tolist()) for window in windows for w in (window, window.flip(1))}
    seen = {tuple(picture.flatten().tolist()) for batch in drawn(data, 2, 400) for picture in batch}
    assert seen <= allowed
    assert len(seen) == len(allowed) == 50, "800 draws miss one of 50 with odds of 5e-6"
    assert torch.equal(next(data.tests(2, device=CPU))[0], x)


def test_texts_are_pieces_and_the_byte_that_comes_next() -> None:
    text = Text(torch.arange(3000).remainder(251).to(torch.uint8), length=16)
    for x, y in islice(text.batches(8, seed=0, device=CPU), 30):
        assert x.shape == y.shape == (8, 16)
        assert torch.equal((x + 1) % 251, y)


def test_training_never_sees_the_last_tenth_of_a_text() -> None:
    read = torch.zeros(5000, dtype=torch.uint8)
    read[4500:] = 1
    text = Text(read, length=9)
    for x, y in islice(text.batches(64, seed=0, device=CPU), 100):
        assert not x.any() and not y.any()
    tests = list(text.tests(16, device=CPU))
    assert sum(len(x) for x, _ in tests) == text.num_test == 50
    assert all(x.all() and y.all() for x, y in tests)


def test_many_test_pieces_lie_evenly() -> None:
    read = (torch.arange(200_000) // 800).to(torch.uint8)  # the last tenth: 225 to 249
    first = torch.cat([x[:, 0] for x, _ in Text(read, length=7).tests(100, device=CPU)])
    assert len(first) == 512
    assert sorted(set(first.tolist())) == list(range(225, 250))


def test_blind_loss_is_that_of_equal_odds() -> None:
    assert examples().blind_loss == pytest.approx(math.log(4))
    assert Text(torch.zeros(1000, dtype=torch.uint8)).blind_loss == pytest.approx(math.log(256))
    x = torch.zeros(4, 2)
    assert Examples(x, x, x, x).blind_loss is None


X, Y = torch.zeros(6, 2), torch.arange(6) % 2


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ((X, Y, X[:0], Y[:0]), "the test split is empty"),
        ((X[:0], Y[:0], X, Y), "the training split is empty"),
        ((X, Y[:5], X, Y), "6 training examples and 5 answers"),
        ((X, torch.zeros_like(Y), X, torch.zeros_like(Y)), "all 6 training examples are of class 0"),
        ((X, Y, X, Y + 1), "the test split has class 2"),
        ((X, Y - 1, X, Y), "classes are numbers from 0 up, and one is -1"),
        ((X, Y, X[:, :1], Y), r"different shapes: \(2,\) and \(1,\)"),
        ((X.numpy(), Y, X, Y), "tensors, not ndarray and Tensor"),
        ((X[0, 0], Y[0], X, Y), r"\(num, \.\.\.\), not \(\) and \(\)"),
    ],
)
def test_examples_that_make_no_task(parts: tuple[Tensor, Tensor, Tensor, Tensor], said: str) -> None:
    with pytest.raises(TaskError, match=said):
        Examples(*parts)


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, torch.bool])
def test_classes_of_any_whole_type(dtype: torch.dtype) -> None:
    data = Examples(X, Y.to(dtype), X, Y.to(dtype))
    assert data.num_answers == 2 and data.y_test.dtype is torch.int64


def test_other_data_that_makes_no_task() -> None:
    with pytest.raises(TaskError, match=r"the text has 100 bytes; pieces of 64 bytes.* at least 650"):
        Text(torch.zeros(100, dtype=torch.uint8))
    with pytest.raises(TaskError, match="is for pictures"):
        Examples(X, Y, X, Y, look=PictureTransform(shift=1))
