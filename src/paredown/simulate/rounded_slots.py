"""`RoundedSlots` rounds the slots of a simulated session (its tensors), and gives wider formats to those that overflow.

Every slot has a number. On a GPU the formats are rows of a `RuntimeFormatTable` on the device, as are the number of forward passes and the
counts of overflows: rounding reads nothing from the host, so that one captured CUDA graph serves every format and continues to count.

Promotion (of "Training with Mixed-Precision Floating-Point Assignments"): each training pass measures, for every activation and weight, the
share of values above the largest value of its format. Once that reaches `share`, the slot has the format of the plan `raised` for the
rest of training.
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
from paredown.session.value_bounds import is_capturing
from paredown.simulate.range_counts import RangeCounter, RangeCounts

SPARE = 256  # rows for slots that are added later, such as those of a loss
NEVER = -1
TABLE_DEVICES = ("cuda",)  # device types on which formats are read from a table in memory
OF_PARAMETERS = (Role.WEIGHT, Role.GRADIENT, Role.MASTER, Role.MOMENT1, Role.MOMENT2)
FORWARD = (Role.ACTIVATION, Role.WEIGHT)  # roles that can be promoted


class Promotion(NamedTuple):
    """The change of the tensor `slot` to a wider format in pass `forward`, because a fraction `share` of it overflowed."""

    slot: str
    forward: int
    share: float


@dataclass(eq=False, slots=True)
class RoundedSlot:
    """A tensor that a simulated session rounds (a slot): its format, and the wider one (`raised`) that it gets on overflow."""

    number: int
    names: tuple[str, ...]
    role: Role
    assignment: Assignment
    raised: Assignment
    rounding: Rounding

    @property
    def key(self) -> str:
        """The text by which a rule of a plan selects this tensor alone."""
        return slot_key(self.names[0], self.role)

    @property
    def tensor_id(self) -> int:
        """The number that selects the tensor's random bits."""
        return crc32(f"{self.role.value}={self.names[0]}".encode())

    @property
    def is_plain(self) -> bool:
        """Whether the tensor is never rounded: it has no format, and gets none after an overflow."""
        return self.assignment.format is None and self.raised.format is None

    @property
    def is_live(self) -> bool:
        """Whether kernels can read both formats from device memory, so that a captured CUDA graph can change them."""
        return is_live(self.assignment.format) and is_live(self.raised.format)


class Capture:
    """Device memory for the arguments of kernel launches in a captured CUDA graph, each of which rounds many tensors.

    It is allocated outside of the graph's memory pool: inside, earlier kernels of the graph would overwrite it in each replay.
    """

    def __init__(self, memory: Tensor) -> None:
        self._memory, self._used = memory, 0
        self.launches: list[BatchedRoundTrip] = []

    def take(self, jobs: Sequence[Job]) -> Tensor:
        """Return device memory that no other launch of the graph uses, for the arguments of one that rounds `jobs`."""
        first, self._used = self._used, self._used + words_for(x for x, *_ in jobs)
        if self._used > self._memory.numel():
            raise ApplyError(
                "more than one forward pass and one step of the model were captured in one graph. Capture a graph for each step."
            )
        return self._memory[first : self._used]


class RoundedSlots:
    """All tensors that a simulated session rounds (slots), with their formats and the functions that round them."""

    def __init__(self, plan: Plan, seed: int, *, raised: Plan | None = None, share: float = 0.01, all_live: bool = False) -> None:
        self.plan, self.seed, self.raised, self.share, self.all_live = plan, seed, raised, share, all_live
        self.refused: dict[str, str] = {}  # slot that is not rounded -> reason
        self._counter_of_range = RangeCounter()
        self._all: list[RoundedSlot] = []
        self._by_name: dict[tuple[str, Role], RoundedSlot | None] = {}
        self._pending: dict[str, tuple[int, float]] = {}  # promotions of a loaded state, for slots that are not added yet
        self.device = torch.device("cpu")
        self._counter = torch.zeros(1, dtype=torch.int32)
        self._capture: Capture | None = None  # memory for the graph that is being captured
        self._captured: list[Capture] = []  # memory for the graphs captured so far
        self._table: RuntimeFormatTable | None = None
        self._allocate(SPARE)

    # --- slots ----------------------------------------------------------------------------------------------------------

    def of(self, names: Sequence[str], role: Role) -> RoundedSlot | None:
        """Return the `RoundedSlot` of a tensor; None if it is never rounded.

        `names`: all names by which rules of a plan may select the tensor; the first one identifies it.
        """
        key = (names[0], role)
        if key not in self._by_name:
            asked, raised = self.plan.find(names, role), UNMODIFIED
            if self.raised is not None and role in FORWARD:
                raised = self.raised.find(names, role)
            slot = RoundedSlot(len(self._all), tuple(names), role, asked, raised, asked.rounding_in(role))
            self._by_name[key] = None if slot.is_plain and not self.all_live else slot
            if self._by_name[key] is not None:
                self._all.append(slot)
                if slot.number >= len(self._promoted):
                    self._allocate(2 * len(self._promoted))
                if slot.key in self._pending:
                    self._promoted[slot.number], self._promoted_share[slot.number] = self._pending.pop(slot.key)
                self._write([slot])
        return self._by_name[key]

    def _write(self, slots: Sequence[RoundedSlot]) -> None:
        for slot in slots if self.raised is not None else ():
            current = slot.raised if self.is_raised(slot) else slot.assignment
            self._limits[slot.number] = overflow_limit(current.format)
            can_rise = slot.role in FORWARD and self.raised is not None and slot.raised != slot.assignment
            self._next_limits[slot.number] = overflow_limit(slot.raised.format)
            self._can_rise[slot.number] = can_rise
        if self._table is not None:
            live = [slot for slot in slots if slot.is_live]
            seeds = {p.number: Seed(self.seed, p.tensor_id) for p in live}
            formats = {p.number: (p.assignment.format, p.assignment.overflow) for p in live}
            self._table.set({**formats, **{p.number: (p.raised.format, p.raised.overflow) for p in live if self.is_raised(p)}})
            self._table.set_seeds(seeds)
            if self._next_rows is not None:
                self._next_rows.set({p.number: (p.raised.format, p.raised.overflow) for p in live})
                self._next_rows.set_seeds(seeds)

    def _allocate(self, capacity: int) -> None:
        """Allocate tables of formats and counts for `capacity` tensors on the device, and copy the contents of the old tables."""
        if self._captured:
            raise ApplyError(
                "new slots appeared after a CUDA graph was captured, which reads the previous table. Run a step before capturing, or "
                "close the session and apply the plan again."
            )
        before = (self._promoted, self._shares, self._promoted_share) if self._all else ()
        make: dict[str, Any] = {"device": self.device}
        self._promoted = torch.full((capacity,), NEVER, dtype=torch.int32, **make)
        self._shares, self._promoted_share = (torch.zeros(capacity, **make) for _ in range(2))
        self._limits, self._next_limits = (torch.full((capacity,), torch.inf, **make) for _ in range(2))
        self._can_rise = torch.zeros(capacity, dtype=torch.bool, **make)
        for new, old in zip((self._promoted, self._shares, self._promoted_share), before, strict=False):
            new[: len(old)] = old
        has_table = self.device.type in TABLE_DEVICES
        self._table = RuntimeFormatTable(capacity, self.device) if has_table else None
        self._next_rows = RuntimeFormatTable(capacity, self.device) if has_table and self.raised is not None else None
        if self._all:
            self._write(self._all)

    def move(self, device: torch.device) -> None:
        """Move the tables of formats and counts to another device, that of the model."""
        if device != self.device:
            self.device, self._counter = device, self._counter.to(device)
            self._allocate(max(len(self._promoted), 2 * len(self._all) + SPARE))

    def set_plan(self, plan: Plan, seed: int) -> None:
        """Change to the formats of `plan` and to another seed, also in captured graphs; roundings must stay the same."""
        for slot in self._all:
            asked = plan.find(slot.names, slot.role)
            if self._table is not None and not (is_live(asked.format) and slot.is_live):
                raise ApplyError(
                    f"slot {slot.key!r}: set_plan cannot change to or from a format with blocks ({asked}) on a GPU. Close the session and "
                    "apply the plan again."
                )
            if self._table is not None and not self.all_live and is_narrow(slot.assignment.format) and not is_narrow(asked.format):
                raise ApplyError(
                    f"slot {slot.key!r} has at most 10 mantissa bits and its products may run in TF32, which {asked} does not allow. "
                    "Apply with Simulate(all_live=True)."
                )
            if asked.format is not None and asked.rounding_in(slot.role) is not slot.rounding:
                raise ApplyError(
                    f"slot {slot.key!r} has rounding {slot.rounding.value}, and {asked.rounding_in(slot.role).value} in the new plan: "
                    "set_plan cannot change roundings. Close the session and apply the plan again."
                )
        for slot in self._all:
            slot.assignment = plan.find(slot.names, slot.role)
        self.plan, self.seed = plan, seed
        self._counter_of_range.reset()
        self._by_name = {key: slot for key, slot in self._by_name.items() if slot is not None}
        self._write(self._all)

    # --- rounding -------------------------------------------------------------------------------------------------------

    @property
    def forwards(self) -> int:
        """The number of forward passes so far."""
        return int(self._counter.item())

    @forwards.setter
    def forwards(self, count: int) -> None:
        self._counter.fill_(count)

    def begin(self) -> None:
        """Count one more forward pass, which selects other random bits."""
        self._counter.add_(1)
        self._counter_of_range.begin(is_captured=self.is_capturing or is_capturing())

    def round_(self, x: Tensor, slot: RoundedSlot, *, counts_overflow: bool = False) -> Tensor:
        """Round `x` to the format of `slot` in place, without autograd's notice, and return it.

        `counts_overflow`: also record which share of its values overflows, on which wider formats depend.
        """
        return self._round(x, x, slot, counts_overflow=counts_overflow)

    def rounded(self, x: Tensor, slot: RoundedSlot, *, counts_overflow: bool = False) -> Tensor:
        """Return a copy of `x` rounded to the format of `slot`; `counts_overflow`: record the share of values that overflow."""
        x = x.detach()
        if self._table is not None and x.device == self.device and slot.is_live:
            return self._round(x, torch.empty_like(x), slot, counts_overflow=counts_overflow)
        return self.round_(x.clone(), slot, counts_overflow=counts_overflow)

    def _round(self, x: Tensor, out: Tensor, slot: RoundedSlot, *, counts_overflow: bool) -> Tensor:
        if x.dtype not in FLOATS:
            self.refused[slot.key] = f"its values are {str(x.dtype).removeprefix('torch.')}"
            return out if out is x else out.copy_(x)
        if not self._counter_of_range.is_on or is_capturing():
            return self._round_uncounted(x, out, slot, counts_overflow=counts_overflow)
        before, current = (x.detach().clone() if out is x else x), slot.raised if self.is_raised(slot) else slot.assignment
        rounded = self._round_uncounted(x, out, slot, counts_overflow=counts_overflow)
        if current.format is not None and x.numel():
            self._counter_of_range.add(slot.number, current.format, before, rounded)
        return rounded

    def _round_uncounted(self, x: Tensor, out: Tensor, slot: RoundedSlot, *, counts_overflow: bool) -> Tensor:
        is_on_device = x.device == self.device
        if counts_overflow and is_on_device and self.raised is not None and x.numel():
            share = (x.detach().abs() >= self._limits[slot.number]).float().mean()
            self._shares[slot.number].copy_(torch.maximum(self._shares[slot.number], share))
        if self._table is not None and is_on_device and slot.is_live:
            return self._table.round_into(x, out, slot.number, slot.rounding, self._counter)
        seed = Seed(self.seed, slot.tensor_id, self._counter if self._table is not None else self.forwards)
        current = slot.raised if self.is_raised(slot) else slot.assignment
        return x if current.format is None else round_trip_(x, current.format, slot.rounding, current.overflow, seed)

    def round_all(self, jobs: Sequence[tuple[Tensor, Tensor, RoundedSlot]]) -> None:
        """Write each `x` of the triples (x, out, slot), rounded to the slot's format, into its `out`.

        While a CUDA graph is captured in `capturing`, one launch does it.
        """
        capture, batches = self._capture, dict[Rounding, list[Job]]()
        for x, out, slot in jobs:
            if capture is not None and self._can_batch(x, out, slot):
                batches.setdefault(slot.rounding, []).append((x.data, out.data, slot.number))
            else:
                self._round(out if out is x else out.copy_(x.detach()), out, slot, counts_overflow=False)
        is_captured = is_capturing()
        for rounding, rows in batches.items():
            assert self._table is not None and capture is not None
            memory = capture.take(rows)
            capture.launches.append(self._table.round_many(rows, rounding, self._counter, memory, is_captured=is_captured))

    def _can_batch(self, x: Tensor, out: Tensor, slot: RoundedSlot) -> bool:
        is_on_device = self._table is not None and x.device == self.device and slot.is_live and x.numel() > 0
        return is_on_device and x.dtype is torch.float32 and x.stride() == out.stride() and flat(x) is not None

    @property
    def is_capturing(self) -> bool:
        """Whether `capturing` is active, in which many tensors are rounded in one launch."""
        return self._capture is not None

    @contextmanager
    def capturing(self, parameters: Iterable[Tensor]) -> Generator[None]:
        """Return a context in which a CUDA graph can be captured that rounds many tensors in one launch.

        `parameters`: those of the model, for which memory is allocated.
        """
        if self._table is None:
            yield
            return
        words = len(OF_PARAMETERS) * words_for(parameters)
        self._capture = capture = Capture(torch.empty(words, dtype=torch.int64, device=self.device))
        try:
            yield
        finally:
            self._capture = None
        for launch in capture.launches:
            launch.write()
        self._captured.append(capture)

    @property
    def counts(self) -> RangeCounts:
        """How many values left the range of their format in rounding, for each tensor."""
        return self._counter_of_range.counts((slot.number, slot.key, slot.role) for slot in self._all)

    def new_warnings(self) -> list[str]:
        """Return sentences about gradients that rounding makes vanish, one per role; none while a CUDA graph is captured."""
        if is_capturing():
            return []
        return self._counter_of_range.new_warnings((slot.number, slot.key, slot.role) for slot in self._all)

    # --- promotion ------------------------------------------------------------------------------------------------------

    def is_raised(self, slot: RoundedSlot) -> bool:
        """Return whether this tensor has got its wider format, after an overflow; this may wait for the device."""
        return self.raised is not None and slot.role in FORWARD and bool(self._promoted[slot.number] >= 0)

    def promote(self) -> None:
        """Give their wider formats to the tensors of which too many values overflowed in the last training pass."""
        if self.raised is None:
            return
        is_new = (self._shares >= self.share) & self._can_rise & (self._promoted < 0)
        self._promoted.copy_(torch.where(is_new, self._counter, self._promoted))
        self._promoted_share.copy_(torch.where(is_new, self._shares, self._promoted_share))
        is_promoted = self._promoted >= 0
        self._limits.copy_(torch.where(is_promoted, self._next_limits, self._limits))
        if self._table is not None and self._next_rows is not None:
            self._table.rows.copy_(torch.where(is_promoted[:, None], self._next_rows.rows, self._table.rows))
        self._shares.zero_()

    @property
    def promotions(self) -> tuple[Promotion, ...]:
        """The changes of tensors to wider formats after overflows, in the order in which they happened."""
        at, shares = self._promoted.tolist(), self._promoted_share.tolist()
        promotions = [Promotion(p.key, at[p.number], shares[p.number]) for p in self._all if at[p.number] >= 0]
        return tuple(sorted(promotions, key=lambda promotion: promotion.forward))

    def restore(self, promotions: Sequence[Sequence[Any]]) -> None:
        """Restore changes to wider formats from a saved state; those of unknown tensors take effect once they are added."""
        self._pending = {str(key): (int(forward), float(share)) for key, forward, share in promotions}
        for slot in self._all:
            self._promoted[slot.number], self._promoted_share[slot.number] = self._pending.pop(slot.key, (NEVER, 0.0))
        self._write(self._all)
