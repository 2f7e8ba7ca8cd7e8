"""The slots of a simulated session: what each is rounded to now, and promotion of those that overflow.

Every slot has a number. On a GPU, formats stand in a `RuntimeFormatTable`, the count of forward passes and what promotion looks
at beside it, all on
the device: rounding asks the host for nothing, so that one captured CUDA graph serves every format and goes on counting.

Promotion (of "Training with Mixed-Precision Floating-Point Assignments"): in each training pass the share of values that lie past the
largest one is taken of every activation and weight. From `share` on, that slot has the assignment of `raised` for the rest of training.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple
from zlib import crc32

import torch
from torch import Tensor

from paredown.codec.runtime_formats import (
    FLOATS,
    BatchedRoundTrip,
    Job,
    RuntimeFormatTable,
    flat,
    is_live,
    is_narrow,
    overflow_limit,
    round_trip_,
    words_for,
)
from paredown.errors import ApplyError
from paredown.formats.rounding import Rounding, Seed
from paredown.plan.plan import Plan
from paredown.plan.selectors import slot_key
from paredown.plan.storage import UNMODIFIED, Assignment
from paredown.roles import Role

SPARE = 256  # rows for slots that are met later, such as those of a loss
NEVER = -1
TABLED = ("cuda",)  # devices on which formats are read from memory
OF_PARAMETERS = (Role.WEIGHT, Role.GRADIENT, Role.MASTER, Role.MOMENT1, Role.MOMENT2)
FORWARD = (Role.ACTIVATION, Role.WEIGHT)  # what promotion looks at


class Promotion(NamedTuple):
    """A slot that was raised: after how many forward passes, and the share of its values that had overflowed."""

    slot: str
    forward: int
    share: float


@dataclass(eq=False, slots=True)
class RoundedSlot:
    """One slot: its number, what it is rounded to, and what it would be raised to."""

    number: int
    names: tuple[str, ...]
    role: Role
    assignment: Assignment
    raised: Assignment
    rounding: Rounding

    @property
    def key(self) -> str:
        """As a plan names it."""
        return slot_key(self.names[0], self.role)

    @property
    def tensor_id(self) -> int:
        """What tells its random bits from those of others."""
        return crc32(f"{self.role.value}={self.names[0]}".encode())

    @property
    def is_plain(self) -> bool:
        """Whether no format is given to it, now or later."""
        return self.assignment.format is None and self.raised.format is None

    @property
    def is_live(self) -> bool:
        """Whether its formats can be read from memory."""
        return is_live(self.assignment.format) and is_live(self.raised.format)


class Capture:
    """Where launches for many tensors find them. Not memory of the graph itself, in which earlier kernels of it write at each replay."""

    def __init__(self, memory: Tensor) -> None:
        self._memory, self._taken = memory, 0
        self.made: list[BatchedRoundTrip] = []

    def take(self, jobs: Sequence[Job]) -> Tensor:
        """Memory for one launch."""
        first, self._taken = self._taken, self._taken + words_for(x for x, *_ in jobs)
        if self._taken > self._memory.numel():
            raise ApplyError("a captured graph holds one forward pass and one step of the model; capture more of them one by one.")
        return self._memory[first : self._taken]


class RoundedSlots:
    """All slots of one session."""

    def __init__(self, plan: Plan, seed: int, *, raised: Plan | None = None, share: float = 0.01, all_live: bool = False) -> None:
        self.plan, self.seed, self.raised, self.share, self.all_live = plan, seed, raised, share, all_live
        self.refused: dict[str, str] = {}  # slots that are not rounded -> why
        self._all: list[RoundedSlot] = []
        self._found: dict[tuple[str, Role], RoundedSlot | None] = {}
        self._pending: dict[str, tuple[int, float]] = {}  # of a loaded state, for slots that were not met yet
        self.device = torch.device("cpu")
        self._counter = torch.zeros(1, dtype=torch.int32)
        self._capture: Capture | None = None  # of the graph that is being captured
        self._kept: list[Capture] = []  # of those that were
        self._table: RuntimeFormatTable | None = None
        self._make_room(SPARE)

    # --- slots ----------------------------------------------------------------------------------------------------------

    def of(self, names: Sequence[str], role: Role) -> RoundedSlot | None:
        """The slot with these names, the first its own; None where nothing is ever rounded."""
        key = (names[0], role)
        if key not in self._found:
            place = self._add(tuple(names), role)
            self._found[key] = None if place.is_plain and not self.all_live else place
            if self._found[key] is not None:
                self._all.append(place)
                if place.number >= len(self._promoted):
                    self._make_room(2 * len(self._promoted))
                if place.key in self._pending:
                    self._promoted[place.number], self._risen_at_share[place.number] = self._pending.pop(place.key)
                self._write([place])
        return self._found[key]

    def _add(self, names: tuple[str, ...], role: Role) -> RoundedSlot:
        asked = self.plan.find(names, role)
        raised = self.raised.find(names, role) if self.raised is not None and role in FORWARD else UNMODIFIED
        return RoundedSlot(len(self._all), names, role, asked, raised, asked.rounding_in(role))

    def _write(self, places: Sequence[RoundedSlot]) -> None:
        """Tell the device what these slots have."""
        for place in places if self.raised is not None else ():
            is_raised = self.is_raised(place)
            now = place.raised if is_raised else place.assignment
            self._limits[place.number] = overflow_limit(now.format)
            may_rise = place.role in FORWARD and self.raised is not None and place.raised != place.assignment
            self._next_limits[place.number] = overflow_limit(place.raised.format)
            self._may_rise[place.number] = may_rise
        if self._table is not None:
            live = [place for place in places if place.is_live]
            seeds = {p.number: Seed(self.seed, p.tensor_id) for p in live}
            now = {p.number: (p.assignment.format, p.assignment.overflow) for p in live}
            self._table.set({**now, **{p.number: (p.raised.format, p.raised.overflow) for p in live if self.is_raised(p)}})
            self._table.set_seeds(seeds)
            if self._next_rows is not None:
                self._next_rows.set({p.number: (p.raised.format, p.raised.overflow) for p in live})
                self._next_rows.set_seeds(seeds)

    def _make_room(self, capacity: int) -> None:
        """Vectors with a number for each slot, on the device; what was there is kept."""
        if self._kept:
            raise ApplyError(
                "slots were met after a graph was captured, which reads the table of those before. Apply the plan anew."
            )
        before = (self._promoted, self._shares, self._risen_at_share) if self._all else ()
        make: dict[str, Any] = {"device": self.device}
        self._promoted = torch.full((capacity,), NEVER, dtype=torch.int32, **make)
        self._shares, self._risen_at_share = (torch.zeros(capacity, **make) for _ in range(2))
        self._limits, self._next_limits = (torch.full((capacity,), torch.inf, **make) for _ in range(2))
        self._may_rise = torch.zeros(capacity, dtype=torch.bool, **make)
        for new, old in zip((self._promoted, self._shares, self._risen_at_share), before, strict=False):
            new[: len(old)] = old
        is_tabled = self.device.type in TABLED
        self._table = RuntimeFormatTable(capacity, self.device) if is_tabled else None
        self._next_rows = RuntimeFormatTable(capacity, self.device) if is_tabled and self.raised is not None else None
        if self._all:
            self._write(self._all)

    def move(self, device: torch.device) -> None:
        """Where the model is now."""
        if device != self.device:
            self.device, self._counter = device, self._counter.to(device)
            self._make_room(max(len(self._promoted), 2 * len(self._all) + SPARE))

    def set_plan(self, plan: Plan, seed: int) -> None:
        """Other formats and random bits for the same slots, in the memory that a captured graph reads; roundings stay."""
        for place in self._all:
            asked = plan.find(place.names, place.role)
            if self._table is not None and not (is_live(asked.format) and place.is_live):
                raise ApplyError(f"slot {place.key!r}: {asked} cannot be read from memory. Blocks need a session of their own.")
            if self._table is not None and not self.all_live and is_narrow(place.assignment.format) and not is_narrow(asked.format):
                raise ApplyError(
                    f"slot {place.key!r} has at most 10 mantissa bits and its products may run in TF32, which {asked} does not allow. "
                    "Apply with Simulate(all_live=True)."
                )
            if asked.format is not None and asked.rounding_in(place.role) is not place.rounding:
                raise ApplyError(
                    f"slot {place.key!r} rounds by {place.rounding.value}, and the new plan says {asked.rounding_in(place.role).value}: "
                    "a session keeps its roundings. Apply the plan anew."
                )
        for place in self._all:
            place.assignment = plan.find(place.names, place.role)
        self.plan, self.seed = plan, seed
        self._found = {key: place for key, place in self._found.items() if place is not None}
        self._write(self._all)

    # --- rounding -------------------------------------------------------------------------------------------------------

    @property
    def forwards(self) -> int:
        """Forward passes so far."""
        return int(self._counter.item())

    @forwards.setter
    def forwards(self, count: int) -> None:
        self._counter.fill_(count)

    def begin(self) -> None:
        """A forward pass begins."""
        self._counter.add_(1)

    def round_(self, x: Tensor, place: RoundedSlot, *, looks: bool = False) -> Tensor:
        """`x` rounded in place, out of autograd's sight; `looks`: what overflows is counted before."""
        return self._round(x, x, place, looks=looks)

    def rounded(self, x: Tensor, place: RoundedSlot, *, looks: bool = False) -> Tensor:
        """A rounded copy."""
        x = x.detach()
        if self._table is not None and x.device == self.device and place.is_live:
            return self._round(x, torch.empty_like(x), place, looks=looks)
        return self.round_(x.clone(), place, looks=looks)

    def _round(self, x: Tensor, out: Tensor, place: RoundedSlot, *, looks: bool) -> Tensor:
        if x.dtype not in FLOATS:
            self.refused[place.key] = f"its values are {str(x.dtype).removeprefix('torch.')}"
            return out if out is x else out.copy_(x)
        is_here = x.device == self.device
        if looks and is_here and self.raised is not None and x.numel():
            past = (x.detach().abs() >= self._limits[place.number]).float().mean()
            self._shares[place.number].copy_(torch.maximum(self._shares[place.number], past))
        if self._table is not None and is_here and place.is_live:
            return self._table.round_into(x, out, place.number, place.rounding, self._counter)
        seed = Seed(self.seed, place.tensor_id, self._step())
        now = place.raised if self.is_raised(place) else place.assignment
        return x if now.format is None else round_trip_(x, now.format, place.rounding, now.overflow, seed)

    def round_all(self, jobs: Sequence[tuple[Tensor, Tensor, RoundedSlot]]) -> None:
        """Round each x of (x, out, slot) into its out: in one launch inside of `capturing`, one by one otherwise."""
        capture, many = self._capture, dict[Rounding, list[Job]]()
        for x, out, place in jobs:
            if capture is not None and self._is_simple(x, out, place):
                many.setdefault(place.rounding, []).append((x.data, out.data, place.number))
            else:
                self._round(out if out is x else out.copy_(x.detach()), out, place, looks=False)
        is_captured = self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        for rounding, rows in many.items():
            assert self._table is not None and capture is not None
            memory = capture.take(rows)
            capture.made.append(self._table.round_many(rows, rounding, self._counter, memory, is_captured=is_captured))

    def _is_simple(self, x: Tensor, out: Tensor, place: RoundedSlot) -> bool:
        """Whether a launch for many takes this one."""
        is_here = self._table is not None and x.device == self.device and place.is_live and x.numel() > 0
        return is_here and x.dtype is torch.float32 and x.stride() == out.stride() and flat(x) is not None

    @property
    def is_capturing(self) -> bool:
        """Whether many tensors are rounded at once."""
        return self._capture is not None

    @contextmanager
    def capturing(self, parameters: Iterable[Tensor]) -> Generator[None]:
        """Around the capture of a graph: addresses, which it fixes, are told to the device when it is over."""
        if self._table is None:
            yield
            return
        words = len(OF_PARAMETERS) * words_for(parameters)
        self._capture = capture = Capture(torch.empty(words, dtype=torch.int64, device=self.device))
        try:
            yield
        finally:
            self._capture = None
        for many in capture.made:
            many.write()
        self._kept.append(capture)

    def _step(self) -> Any:
        return self._counter if self._table is not None else self.forwards

    # --- promotion ------------------------------------------------------------------------------------------------------

    def is_raised(self, place: RoundedSlot) -> bool:
        """Whether this slot was promoted; asks the device, but not where slots cannot be."""
        return self.raised is not None and place.role in FORWARD and bool(self._promoted[place.number] >= 0)

    def promote(self) -> None:
        """Raise what overflowed in the last training pass; nothing is asked from the device."""
        if self.raised is None:
            return
        hit = (self._shares >= self.share) & self._may_rise & (self._promoted < 0)
        self._promoted.copy_(torch.where(hit, self._counter, self._promoted))
        self._risen_at_share.copy_(torch.where(hit, self._shares, self._risen_at_share))
        is_up = self._promoted >= 0
        self._limits.copy_(torch.where(is_up, self._next_limits, self._limits))
        if self._table is not None and self._next_rows is not None:
            self._table.rows.copy_(torch.where(is_up[:, None], self._next_rows.rows, self._table.rows))
        self._shares.zero_()

    @property
    def promotions(self) -> tuple[Promotion, ...]:
        """What was raised so far, in the order of its raising."""
        at, shares = self._promoted.tolist(), self._risen_at_share.tolist()
        found = [Promotion(p.key, at[p.number], shares[p.number]) for p in self._all if at[p.number] >= 0]
        return tuple(sorted(found, key=lambda promotion: promotion.forward))

    def restore(self, promotions: Sequence[Sequence[Any]]) -> None:
        """Promotions as `promotions` told them; those of slots that were not met yet wait for them."""
        self._pending = {str(key): (int(forward), float(share)) for key, forward, share in promotions}
        for place in self._all:
            self._promoted[place.number], self._risen_at_share[place.number] = self._pending.pop(place.key, (NEVER, 0.0))
        self._write(self._all)
