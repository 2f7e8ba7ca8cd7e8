"""Training and test data of a task: examples with answers, or a text. The order of training batches depends on the seed alone.

A pass over the training examples takes each of them once, in a random order; the examples that do not fill the last batch are left out of
that pass. Test examples are never shuffled. All random numbers are drawn on the CPU, so that every device has the same batches.

>>> data = Examples(torch.arange(10.0), torch.arange(10) % 2, torch.arange(2.0), torch.tensor([0, 1]))
>>> batches = data.batches(5, seed=0, device=torch.device("cpu"))
>>> sorted(x for _ in range(2) for x in next(batches)[0].tolist())
[0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0]
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, count
from typing import final

import torch
from torch import Tensor
from torch.nn.functional import pad

from paredown.errors import TaskError

Pair = tuple[Tensor, Tensor]  # inputs, answers
NUM_BYTES = 256
TEST_PART = 10  # the last tenth of a text is its test split
NUM_AHEAD = 16  # batches that `batches_ahead` makes at once
MAX_TEST_PIECES = 512  # of a text


class Data(ABC):
    """The interface of a task's data: training examples in random order, and test examples."""

    num_train: int  # training examples
    num_test: int  # test examples
    num_answers: int | None  # classes, or 256 for a text; None if answers are not classes

    @abstractmethod
    def batches(self, batch: int, *, seed: int, device: torch.device) -> Iterator[Pair]:
        """Return an endless iterator of training batches (inputs, answers) of `batch` examples, in an order that `seed` decides.

        Memory that all batches share is allocated before this returns, not at the first batch.
        """

    @abstractmethod
    def tests(self, batch: int, *, device: torch.device) -> Iterator[Pair]:
        """Return all test examples, in batches of at most `batch`."""

    def batches_ahead(self, batch: int, *, seed: int, device: torch.device) -> Iterator[Pair]:
        """Return the same batches as `batches`; a subclass may make several at a time, which is faster and takes more memory."""
        return self.batches(batch, seed=seed, device=device)

    @property
    def blind_loss(self) -> float | None:
        """Return the cross entropy of random guessing, with equal odds for every answer."""
        return None if self.num_answers is None else math.log(self.num_answers)

    def __repr__(self) -> str:
        answers = "" if self.num_answers is None else f", {self.num_answers} answers"
        return f"{type(self).__name__}({self.num_train} training examples, {self.num_test} test examples{answers})"


@dataclass(frozen=True)
class PictureTransform:
    """Says how pictures change before the model receives them: their number of channels, and random shifts and flips in training.

    Grey pictures are repeated to `channels`. In training each picture is shifted by up to `shift` pixels and, if `mirror`, flipped left
    to right, both at random.
    """

    channels: int | None = None  # None: unchanged
    shift: int = 0
    mirror: bool = False


NO_TRANSFORM = PictureTransform()


@final
@dataclass(frozen=True, repr=False, eq=False)
class Examples(Data):
    """Holds inputs and answers. uint8 inputs are pictures (num, channels, height, width), normalized to mean 0 and std 1 for the model."""

    x_train: Tensor
    y_train: Tensor
    x_test: Tensor
    y_test: Tensor
    look: PictureTransform = NO_TRANSFORM
    num_train: int = field(init=False)
    num_test: int = field(init=False)
    num_answers: int | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        for split, x, y in (("training", self.x_train, self.y_train), ("test", self.x_test, self.y_test)):
            if not isinstance(x, Tensor) or not isinstance(y, Tensor):
                raise TaskError(f"{split} examples and answers are tensors, not {type(x).__name__} and {type(y).__name__}.")
            if not x.dim() or not y.dim():
                raise TaskError(f"{split} examples and answers are (num, ...), not {tuple(x.shape)} and {tuple(y.shape)}.")
            if len(x) != len(y):
                raise TaskError(f"there are {len(x)} {split} examples and {len(y)} answers; each example needs one answer.")
            if not len(x):
                raise TaskError(f"the {split} split is empty: a task trains on one split and is evaluated on the other.")
        object.__setattr__(self, "num_train", len(self.x_train))
        object.__setattr__(self, "num_test", len(self.x_test))
        if self.x_train.shape[1:] != self.x_test.shape[1:]:
            shapes = f"{tuple(self.x_train.shape[1:])} and {tuple(self.x_test.shape[1:])}"
            raise TaskError(f"a training example and a test example have different shapes: {shapes}.")
        if self.y_train.dim() == 1 and not self.y_train.is_floating_point():
            object.__setattr__(self, "y_train", self.y_train.long())  # as cross entropy takes classes
            object.__setattr__(self, "y_test", self.y_test.long())
            self._check_classes()
            object.__setattr__(self, "num_answers", int(self.y_train.max()) + 1)
        if self.look != NO_TRANSFORM and self.x_train.dim() != 4:
            raise TaskError(f"{self.look} is for pictures (num, channels, height, width); these are {tuple(self.x_train.shape)}.")

    def _check_classes(self) -> None:
        trained, tested = self.y_train.unique().tolist(), self.y_test.unique().tolist()
        if trained[0] < 0 or tested[0] < 0:
            raise TaskError(f"classes are numbers from 0 up, and one is {min(trained[0], tested[0])}.")
        if len(trained) < 2:
            raise TaskError(f"all {self.num_train} training examples are of class {trained[0]}: there is nothing to classify.")
        unknown = sorted(set(tested) - set(trained))
        if unknown:
            raise TaskError(f"the test split has class {unknown[0]}, of which there is no training example.")

    @cached_property
    def normalization(self) -> Pair | None:
        """Return the mean and standard deviation of each channel of the training pictures, (channels, 1, 1); None unless they are uint8."""
        if self.x_train.dtype is not torch.uint8 or self.x_train.dim() != 4:
            return None
        counts = torch.stack([torch.bincount(x.flatten(), minlength=NUM_BYTES) for x in self.x_train.transpose(0, 1)]).double()
        shares, values = counts / counts.sum(1, keepdim=True), torch.arange(NUM_BYTES, dtype=torch.float64)
        mean = shares @ values
        std = (shares @ values.square() - mean.square()).clamp(min=1.0).sqrt()  # pictures of one colour stay finite
        return mean.float()[:, None, None], std.float()[:, None, None]

    def model_inputs(self, x: Tensor) -> Tensor:
        """Return stored examples as the model receives them: normalized, with the channels that `look` (PictureTransform) has."""
        if self.normalization is not None:
            mean, std = (part.to(x.device, non_blocking=True) for part in self.normalization)
            x = (x.float() - mean) / std
        if self.look.channels is not None and x.shape[1] == 1:
            x = x.expand(-1, self.look.channels, -1, -1).contiguous()
        return x

    def batches(self, batch: int, *, seed: int, device: torch.device) -> Iterator[Pair]:
        """Return an endless iterator of training batches (inputs, answers) of `batch` examples, in an order that `seed` decides."""
        return self._pairs(batch, batch, seed, device)

    def batches_ahead(self, batch: int, *, seed: int, device: torch.device) -> Iterator[Pair]:
        """Return the same batches as `batches`, made NUM_AHEAD at a time."""
        chunks = self._pairs(batch, NUM_AHEAD * batch, seed, device)
        return (pair for x, y in chunks for pair in zip(x.split(batch), y.split(batch), strict=True))

    def _pairs(self, batch: int, size: int, seed: int, device: torch.device) -> Iterator[Pair]:
        """Return an endless iterator of (inputs, answers) of up to `size` examples; each pass has whole batches of `batch`."""
        source, num = torch.Generator().manual_seed(seed), self.num_train // batch * batch
        x, y = self.x_train.to(device), self.y_train.to(device)
        first = self._draws(num, source, device)  # drawn now, so that its memory is allocated before the first batch
        passes = chain([first], (self._draws(num, source, device) for _ in count()))
        return (
            (self.model_inputs(self._moved(x[indices], offsets)), y[indices])
            for order, moves in passes
            for indices, offsets in zip(order.split(size), moves.split(size), strict=True)
        )

    def tests(self, batch: int, *, device: torch.device) -> Iterator[Pair]:
        """Yield all test examples, in batches of at most `batch`."""
        for x, y in zip(self.x_test.split(batch), self.y_test.split(batch), strict=True):
            yield self.model_inputs(x.to(device)), y.to(device)

    def _draws(self, num: int, source: torch.Generator, device: torch.device) -> Pair:
        """Return the order of one pass, indices (num,), and its pictures' moves, (num, 3): down, right, mirrored; or none, (num, 0)."""
        order = torch.randperm(self.num_train, generator=source)[:num]
        bounds = (2 * self.look.shift + 1, 2 * self.look.shift + 1, 1 + self.look.mirror) if self._is_moved else ()
        moves = torch.empty(num, len(bounds), dtype=torch.int64)
        for column, bound in enumerate(bounds):
            moves[:, column] = torch.randint(bound, (num,), generator=source)
        return order.to(device), moves.to(device)

    @property
    def _is_moved(self) -> bool:
        return self.look.shift > 0 or self.look.mirror

    def _moved(self, x: Tensor, offsets: Tensor) -> Tensor:
        """Return pictures shifted and mirrored by `offsets` (num, 3), padded with zeros."""
        if not self._is_moved:
            return x
        height, width = x.shape[-2:]
        padded = pad(x, (self.look.shift,) * 4)
        rows, columns = torch.arange(height, device=x.device), torch.arange(width, device=x.device)
        down, right, mirrored = offsets.unbind(1)
        columns = torch.where(mirrored[:, None].bool(), columns.flip(0), columns) + right[:, None]  # (num, width)
        rows = rows + down[:, None]  # (num, height)
        index = torch.arange(len(x), device=x.device)
        return padded[index[:, None, None], :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)


@final
@dataclass(frozen=True, repr=False, eq=False)
class Text(Data):
    """Holds the bytes of a text; a model predicts the next byte from those before it in a piece of `length` bytes.

    Training pieces start anywhere in the first nine tenths of the text; test pieces are evenly spaced in the last tenth.
    """

    read: Tensor  # (num_bytes,) uint8
    length: int = 64  # bytes of a piece
    cut: int = field(init=False)  # the first byte of the test split
    num_train: int = field(init=False)  # positions at which a training piece may start
    num_test: int = field(init=False)
    num_answers: int | None = field(init=False, default=NUM_BYTES)

    def __post_init__(self) -> None:
        least = TEST_PART * (self.length + 1)
        if len(self.read) < least:
            raise TaskError(
                f"the text has {len(self.read)} bytes; pieces of {self.length} bytes, a tenth of them for tests, need at least {least}."
            )

        num_tested = len(self.read) // TEST_PART
        object.__setattr__(self, "cut", len(self.read) - num_tested)
        object.__setattr__(self, "num_train", self.cut - self.length)
        object.__setattr__(self, "num_test", min(MAX_TEST_PIECES, num_tested // (self.length + 1)))

    def batches(self, batch: int, *, seed: int, device: torch.device) -> Iterator[Pair]:
        """Return an endless iterator of batches of `batch` pieces of the text with their next bytes as answers, drawn by `seed`."""
        source = torch.Generator().manual_seed(seed)
        read, offsets = self.read[: self.cut].to(device), torch.arange(self.length + 1, device=device)
        starts = (torch.randint(self.num_train, (batch, 1), generator=source).to(device) for _ in count())
        return (_shifted(read[start + offsets]) for start in starts)

    def tests(self, batch: int, *, device: torch.device) -> Iterator[Pair]:
        """Yield the test pieces, in batches of at most `batch`."""
        pieces = self.read[self.cut :].unfold(0, self.length + 1, self.length + 1)
        chosen = pieces[torch.arange(self.num_test) * len(pieces) // self.num_test]
        for part in chosen.split(batch):
            yield _shifted(part.to(device))


def _shifted(pieces: Tensor) -> Pair:
    return pieces[:, :-1].long(), pieces[:, 1:].long()
