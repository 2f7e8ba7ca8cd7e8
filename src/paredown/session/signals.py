"""What a guard sees of the slots that are packed: numbers on the device, collected in forward passes and read once a step.

For each slot two numbers, of the forward pass in which it was looked at last since the last step:

    error       |x - decoded|^2 / |x|^2, of a piece of 4096 values, or of all of them in a full look; |x - mean of its 64 values|^2 below
                the line where backward subtracts a mean, as norms do: a format that loses the differences has an error of 1 or more
    largest     max |x|, of all values

Nothing waits for the device until `read`, which is one transfer for all slots and the gradient norm, and one reduction where several
processes train: the largest of each number counts, so that all of them read the same.
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

import torch
import torch.distributed as dist
from torch import Tensor

from paredown.codec.packed import encode_flat
from paredown.formats.rounding import Seed
from paredown.plan.graph import Saved
from paredown.session.stored import Activations
from paredown.session.waiting import Piece, Values, Waiting

SAMPLE = 4096
UNSEEN = -1.0
TOO_LARGE = 3e38  # stands for infinity and NaN, which a reduction would lose
TINY = 1e-30
CENTERED_LEN = 64  # values that are taken to have one mean, as those of a channel or of a row


@dataclass(frozen=True)
class Look:
    """What was seen of a slot: its error, and its largest value; infinity where they are not finite."""

    error: float
    largest: float


class Signals:
    """Collects the numbers of the slots `names`, in one order for all processes."""

    def __init__(self, activations: Activations, names: Sequence[str], every: int) -> None:
        self._activations, self._names, self._every = activations, tuple(names), every
        self._places = {name: place for place, name in enumerate(names)}
        self._numbers: Tensor | None = None  # (2, num_slots): errors, largest values
        self.looks_at_all = False
        activations.on_packed = self._packed

    @property
    def has_any(self) -> bool:
        """Whether anything was packed so far."""
        return self._numbers is not None

    @property
    def device(self) -> torch.device:
        """Where the numbers are."""
        return self._numbers.device if self._numbers is not None else torch.device("cpu")

    def read(self, norm: Tensor | None) -> tuple[float, dict[str, Look]]:
        """The gradient norm, and what was seen of each slot since the last time, alike on all processes."""
        assert self._numbers is not None
        first = self._numbers.new_tensor([UNSEEN]) if norm is None else norm.detach().reshape(1).to(self._numbers)
        numbers = torch.cat([first, self._numbers.reshape(-1)])
        numbers = numbers.nan_to_num(nan=TOO_LARGE, posinf=TOO_LARGE, neginf=TOO_LARGE).clamp_max(TOO_LARGE)
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(numbers, op=dist.ReduceOp.MAX)
        self._numbers.fill_(UNSEEN)
        values = [inf if value >= 0.99 * TOO_LARGE else value for value in numbers.tolist()]
        num = len(self._names)
        seen = zip(self._names, values[1 : 1 + num], values[1 + num :], strict=True)
        return values[0], {name: Look(error, largest) for name, error, largest in seen if error != UNSEEN}

    def _packed(self, saved: Saved, piece: Piece, waiting: Waiting) -> None:
        place = self._places.get(saved.name)
        if place is None or type(waiting) is not Values or waiting.packed is None:
            return
        if self._numbers is None:
            self._numbers = torch.full((2, len(self._names)), UNSEEN, device=piece.tensor.device)
        if self.looks_at_all or (place + self._activations.forwards) % self._every == 0:
            flat = piece.flat()
            exact, rounded = self._all(flat, waiting) if self.looks_at_all else self._sample(flat, saved.name)
            self._numbers[0, place] = relative_error(exact.float(), rounded.float(), is_centered=saved.is_centered)
            self._numbers[1, place] = torch.linalg.vector_norm(flat, inf)

    def _all(self, flat: Tensor, waiting: Values) -> tuple[Tensor, Tensor]:
        assert waiting.packed is not None
        return flat, waiting.packed.decode()

    def _sample(self, flat: Tensor, name: str) -> tuple[Tensor, Tensor]:
        """(exact, decoded) values of a piece; its place moves through the tensor from look to look."""
        decision = self._activations.decisions[name]
        assert decision.format is not None
        num_pieces = max(1, flat.numel() // SAMPLE)
        start = self._activations.forwards // self._every * 7919 % num_pieces * SAMPLE
        piece = flat[start : start + SAMPLE].contiguous()
        seed = Seed(self._activations.seed, decision.tensor_id, self._activations.forwards)
        packed = encode_flat(piece, decision.format, decision.rounding, decision.overflow, seed)
        return piece, packed.decode()


def relative_error(exact: Tensor, rounded: Tensor, *, is_centered: bool) -> Tensor:
    """|rounded - exact|^2 / |exact|^2 of flat tensors; `is_centered` subtracts the mean of each 64 values from `exact` below the line.

    >>> exact = torch.tensor([100.0, 101.0]).repeat(32)
    >>> float(relative_error(exact, exact + 0.5, is_centered=True))
    1.0
    """
    error = (rounded - exact).square().sum()
    if is_centered and exact.numel() >= CENTERED_LEN:
        exact = exact[: exact.numel() // CENTERED_LEN * CENTERED_LEN].view(-1, CENTERED_LEN)
        exact = exact - exact.mean(dim=1, keepdim=True)
    return error / exact.square().sum().clamp_min(TINY)


def total_norm(gradients: Sequence[Tensor]) -> Tensor | None:
    """The norm of all gradients together, on the device; infinity or NaN if any value is."""
    if not gradients:
        return None
    norm = torch.nn.utils.get_total_norm(gradients)
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm  # type: ignore[operator]
