"""`Signals` measures two numbers of each packed activation for a guard, on the device, in forward passes.

    error       |x - decoded|^2 / |x|^2, of 4096 values, or of all values in a full measurement. Where backward subtracts a mean, as norms
                do, the denominator is |x - mean of each 64 values|^2: a format that loses the differences has an error of 1 or more
    largest     max |x| of all values

Each number is of the last pass that measured the slot. It stays on the device until `read`, once per step: one transfer for all slots and
the gradient norm. With several processes one reduction takes the maximum of each number, so that all processes read the same.

`SessionGuard` is the interface through which a session calls its guard; `check/guard_steps.py` implements it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paredown.autograd.graph import Saved
from paredown.codec.packed import encode_flat
from paredown.formats.format import Format
from paredown.formats.rounding import Seed
from paredown.plan.plan import Plan
from paredown.session.changes import Action
from paredown.session.eager.activations import Activations
from paredown.session.eager.stored_tensors import StoragePiece, StoredForm, StoredValues

SAMPLE = 4096  # values of a slot that are measured
UNSEEN = -1.0  # a number that was not measured since the last step
TOO_LARGE = 3e38  # replaces infinity and NaN, which a MAX reduction would lose
TINY = 1e-30
CENTERED_LEN = 64  # consecutive values that are assumed to share a mean, as those of a channel or of a row


@dataclass(frozen=True)
class SlotSignal:
    """Holds squared relative rounding error and largest magnitude (inf for NaN) of one packed tensor of the step.

    A guard, which changes formats during training, decides by them.
    """

    error: float
    largest: float


class Signals:
    """Measures the rounding error and the largest value of packed activations, for the guard that changes formats by them.

    `names`: the slots (saved tensors) to measure, each in every `every`-th forward pass.
    """

    def __init__(self, activations: Activations, names: Sequence[str], every: int) -> None:
        self._activations, self._names, self._every = activations, tuple(names), every
        self._places = {name: place for place, name in enumerate(names)}
        self._numbers: Tensor | None = None  # (2, num_slots): errors, largest values
        # slots of a compiled graph -> their places in `_numbers`, and their rows in the numbers that the graph measures
        self._indices: dict[tuple[tuple[str, ...], ...], Tensor] = {}
        self.looks_at_all = False  # whether all values of all slots are measured in the next forward pass
        activations.observe(self._measure)

    @property
    def has_any(self) -> bool:
        """Return whether an activation that is to be measured was packed so far, so that there are numbers to read."""
        return self._numbers is not None

    @property
    def device(self) -> torch.device:
        """Return the device on which measurements are stored; the CPU before the first one."""
        return self._numbers.device if self._numbers is not None else torch.device("cpu")

    def read(self, norm: Tensor | None) -> tuple[float, dict[str, SlotSignal]]:
        """Return the gradient norm, and what was measured of each slot since the last call; both are maxima over processes.

        `norm` is the gradient norm of this process; if it is None in all processes, the returned norm is negative.
        """
        assert self._numbers is not None
        first = self._numbers.new_tensor([UNSEEN]) if norm is None else norm.detach().reshape(1).to(self._numbers)
        numbers = torch.cat([first, self._numbers.reshape(-1)])
        numbers = numbers.nan_to_num(nan=TOO_LARGE, posinf=TOO_LARGE, neginf=TOO_LARGE).clamp_max(TOO_LARGE)
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(numbers, op=dist.ReduceOp.MAX)
        self._numbers.fill_(UNSEEN)
        values = [inf if value >= 0.99 * TOO_LARGE else value for value in numbers.tolist()]
        num = len(self._names)
        rows = zip(self._names, values[1 : 1 + num], values[1 + num :], strict=True)
        return values[0], {name: SlotSignal(error, largest) for name, error, largest in rows if error != UNSEEN}

    def is_due(self, num_calls: int) -> bool:
        """Return whether the measurements of call number `num_calls` (from 1) of a compiled graph are used.

        Those of the first call and of each `every`-th later one are used; while `looks_at_all` is set, those of all calls.
        """
        return self.looks_at_all or num_calls % self._every == 1 % self._every

    def add(self, slots: Sequence[tuple[str, ...]], numbers: Tensor) -> None:
        """Record `numbers`, (error, largest value) of each tensor that a compiled graph saved; `slots`: slot names of each."""
        if self._numbers is None:
            self._numbers = torch.full((2, len(self._names)), UNSEEN, device=numbers.device)
        index = self._indices.get(tuple(slots))
        if index is None:
            rows = [(self._places[name], row) for row, names in enumerate(slots) for name in names if name in self._places]
            index = torch.tensor(rows, dtype=torch.int64).reshape(-1, 2).t().to(numbers.device)
            self._indices[tuple(slots)] = index
        self._numbers[:, index[0].to(self._numbers.device)] = numbers.view(-1, 2)[index[1]].t().to(self._numbers.device)

    def _measure(self, saved: Saved, piece: StoragePiece, form: StoredForm) -> None:
        place = self._places.get(saved.name)
        if place is None or type(form) is not StoredValues or not form.is_packed:
            return
        if self._numbers is None:
            self._numbers = torch.full((2, len(self._names)), UNSEEN, device=piece.tensor.device)
        if self.looks_at_all or (place + self._activations.forwards) % self._every == 0:
            flat = piece.flat()
            exact, rounded = self._all(flat, form) if self.looks_at_all else self._sample(flat, saved.name)
            self._numbers[0, place] = relative_error(exact.float(), rounded.float(), is_centered=saved.is_centered)
            self._numbers[1, place] = torch.linalg.vector_norm(flat, inf)

    def _all(self, flat: Tensor, form: StoredValues) -> tuple[Tensor, Tensor]:
        return flat, form.codec.decode(form.on_device(), (form.numel,), (1,))

    def _sample(self, flat: Tensor, name: str) -> tuple[Tensor, Tensor]:
        """Return a part of the values `flat` of tensor `name`, exact and after rounding; another part at each measurement."""
        decision = self._activations.decisions[name]
        assert decision.format is not None
        num_pieces = max(1, flat.numel() // SAMPLE)
        start = self._activations.forwards // self._every * 7919 % num_pieces * SAMPLE
        piece = flat[start : start + SAMPLE].contiguous()
        seed = Seed(self._activations.seed, decision.tensor_id, self._activations.forwards)
        packed = encode_flat(piece, decision.format, decision.rounding, decision.overflow, seed)
        return piece, packed.decode()


def relative_error(exact: Tensor, rounded: Tensor, *, is_centered: bool) -> Tensor:
    """Return the squared relative error |rounded - exact|^2 / |exact|^2 of two flat tensors.

    `is_centered` subtracts the mean of each 64 values from `exact` in the denominator.

    >>> exact = torch.tensor([100.0, 101.0]).repeat(32)
    >>> float(relative_error(exact, exact + 0.5, is_centered=True))
    1.0
    """
    error = (rounded - exact).square().sum()
    if is_centered and exact.numel() >= CENTERED_LEN:
        exact = exact[: exact.numel() // CENTERED_LEN * CENTERED_LEN].view(-1, CENTERED_LEN)
        exact = exact - exact.mean(dim=1, keepdim=True)
    return error / exact.square().sum().clamp_min(TINY)


class SessionGuard(ABC):
    """Declares what a session uses of its guard, which changes formats during training."""

    slots: Mapping[str, Any]  # the slots that the guard measures, by name, as the trace has them
    signals: Signals
    actions: list[Action]
    budget_bytes: int
    sensitivities: Any  # `Sensitivities`, or None

    @abstractmethod
    def passes_over(self) -> bool:
        """Return whether the guard itself runs the forward pass that now begins; nothing is packed in such a pass."""

    @abstractmethod
    def read_formats(self, format_of: Callable[[str], Format | None]) -> None:
        """Set the function that returns the current format of a saved tensor, given its slot name."""

    @abstractmethod
    def reprobe(self, batch: Any, loss: Callable[..., Tensor] | None) -> Any:
        """Measure on `batch` the gradient error that rounding each saved tensor causes, choose formats by it, and return it."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return the state of the guard, from which another process can continue."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any], plan: Plan) -> None:
        """Restore a guard's state; `plan` must be the plan that the guard used when the state was saved."""

    @abstractmethod
    def close(self) -> None:
        """Remove the guard's hooks."""


GuardFactory = Callable[[Activations, Callable[[Plan], None]], SessionGuard]  # (activations, function that sets the plan) -> guard
