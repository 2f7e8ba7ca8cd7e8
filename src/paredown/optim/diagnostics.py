"""Diagnostics of packed weights: the share of the updates that change the stored values.

    underflow    share of the nonzero updates that left the stored value unchanged
    flips        share of all values whose stored value changed in a step
    dead zone    share of the nonzero updates smaller than half a step of the format: rounding to nearest would lose every one of them

Under stochastic rounding underflow is no loss: an update of 1 % of a step moves 1 % of the values by a whole step. It is a loss under
rounding to nearest, and when flips are so rare that no value changes during training. Every 16th tile is counted, on the device, without
synchronizing with it; the sums are checked every 512 updates, and a warning describes a problem and its remedy.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from paredown.formats.rounding import Rounding
from paredown.roles import Role

if TYPE_CHECKING:
    from paredown.optim.parameter_state import ParameterState

NUM_COUNTERS = 5
DRAIN_EVERY = 64  # updates; int32 counters of a tensor of 2^31 values, a 16th of which is counted, can count 16 updates
CHECK_EVERY = 512
FEW_FLIPS = 1e-5  # per step: less than one move of a value in 100,000 steps
MOSTLY_DEAD = 0.9
MIN_CHANGES = 1000  # fewer values are not significant


@dataclass(frozen=True)
class ParameterDiagnostics:
    """What rounding did to the updates of one packed parameter: the shares that were lost, or that changed stored values."""

    name: str
    format: str
    rounding: str
    underflow: float
    flips: float
    dead_zone: float
    num_values: int  # sampled, over all steps
    num_not_finite: int  # blocks that were not updated, since a gradient was not finite


class Diagnostics(tuple[ParameterDiagnostics, ...]):
    """The result of `opt.diagnostics()`: a row for each packed parameter, printed as a table."""

    def __repr__(self) -> str:
        if not self:
            return "no parameter is packed, or there was no step"
        width = max(len(row.name) for row in self)
        lines = [f"{'':{width}}  underflow    flips  dead zone"]
        for row in self:
            broken = f"  {row.num_not_finite} blocks not finite" if row.num_not_finite else ""
            shares = f"{row.underflow:9.2%} {row.flips:8.3%}  {row.dead_zone:9.2%}"
            lines.append(f"{row.name:{width}}  {shares}  {row.format}, {row.rounding}{broken}")
        return "\n".join(lines)


class UpdateCounters:
    """Counts of what rounding did to updates of packed parameters: int32 that kernels add to, and float64 sums of these."""

    def __init__(self) -> None:
        self._counters: dict[torch.device, list[Tensor]] = {}
        self._sums: dict[torch.device, Tensor] = {}
        self._places: list[tuple[torch.device, int]] = []  # device and index of each parameter's counters
        self._copy: tuple[dict[torch.device, Tensor], Any] | None = None  # sums on their way to the host, and the event after them
        self._warned: set[tuple[str, str]] = set()

    def add(self, device: torch.device) -> Tensor:
        """Make counters for one more parameter, and return them: five int32 zeros on `device`, to which kernels add."""
        counters = torch.zeros(NUM_COUNTERS, dtype=torch.int32, device=device)
        on_device = self._counters.setdefault(device, [])
        self._places.append((device, len(on_device)))
        on_device.append(counters)
        return counters

    def keep(self, count: int) -> None:
        """Discard the counters of all parameters except those of the first `count`."""
        for device, _ in self._places[count:]:
            self._counters[device].pop()
        del self._places[count:]

    def after(self, updates: int, entries: Sequence[ParameterState]) -> None:
        """Do what is due after an update: sum the counters after every 64th, and check them for warnings after every 512th."""
        if updates % DRAIN_EVERY == 0:
            self.drain()
        if self._copy is not None and (self._copy[1] is None or self._copy[1].query()):
            self._warn(entries, self._copy[0])
            self._copy = None
        if updates % CHECK_EVERY == 0:
            self._send()

    def drain(self) -> None:
        """Add the counters of all parameters to the float64 sums, and set them to 0, all on the device."""
        for device, counters in self._counters.items():
            new = torch.stack(counters).double()
            before = self._sums.get(device)
            if before is not None:
                new[: len(before)] += before
            self._sums[device] = new
            for counter in counters:
                counter.zero_()

    def diagnostics(self, entries: Sequence[ParameterState], *, reset: bool) -> Diagnostics:
        """Return a row for each packed parameter about its updates since the start or the last reset."""
        self.drain()
        rows = Diagnostics(self._rows(entries, {device: sums.cpu() for device, sums in self._sums.items()}))
        if reset:
            self._sums.clear()
        return rows

    def _rows(self, entries: Sequence[ParameterState], sums: dict[torch.device, Tensor]) -> Iterator[ParameterDiagnostics]:
        for entry, (device, place) in zip(entries, self._places, strict=True):
            if device not in sums or place >= len(sums[device]):
                continue
            sampled, changed, flipped, dead, broken = sums[device][place].tolist()
            slot = entry.choices.format(Role.WEIGHT) if not entry.choices.is_small else None
            if (sampled == 0 or slot is None) and not broken:
                continue
            yield ParameterDiagnostics(
                entry.name, str(slot or "fp32"), entry.choices.rounding(Role.WEIGHT).value, (changed - flipped) / max(changed, 1),
                flipped / max(sampled, 1), dead / max(changed, 1), int(sampled), int(broken),
            )  # fmt: skip

    def _send(self) -> None:
        """Start to copy the sums of the counters to the CPU, where warnings are checked later, without waiting for the device."""
        self.drain()
        is_cuda = any(device.type == "cuda" for device in self._sums)
        copies = {device: sums.to("cpu", non_blocking=True) for device, sums in self._sums.items()}
        event = torch.cuda.Event() if is_cuda else None
        if event is not None:
            event.record()
        self._copy = copies, event

    def _warn(self, entries: Sequence[ParameterState], sums: dict[torch.device, Tensor]) -> None:
        rows = list(self._rows(entries, sums))
        lost = [
            r for r in rows if r.rounding != Rounding.STOCHASTIC.value and r.dead_zone > MOSTLY_DEAD and r.num_values > MIN_CHANGES
        ]
        rare = [r for r in rows if r.rounding == Rounding.STOCHASTIC.value and r.flips < FEW_FLIPS and r.num_values > MIN_CHANGES]
        broken = [r for r in rows if r.num_not_finite]
        if lost:
            self._warn_once(
                "lost", lost, f"{lost[0].dead_zone:.1%} of the updates of {{}} are smaller than half a step of {lost[0].format}, and "
                f"{lost[0].rounding} rounding loses them. Round stochastically (rounding={{'weight': 'stochastic'}}), or make updates "
                "larger: microbatches=8 with the learning rate scaled up (linearly for SGD), or use tier 'fine_tune'.",
            )  # fmt: skip
        if rare:
            self._warn_once(
                "rare", rare, f"updates of {{}} are so small beside a step of {rare[0].format} that a value moves once in "
                f"{1 / max(rare[0].flips, 1e-12):,.0f} steps. Use tier 'fine_tune' for such learning rates, or microbatches=8 with "
                "the learning rate scaled up.",
            )  # fmt: skip
        if broken:
            self._warn_once(
                "broken", broken, "gradients of {} were not finite: the blocks that they belong to were not updated. Lower the "
                "learning rate, clip gradients, or use a GradScaler with float16.",
            )  # fmt: skip

    def _warn_once(self, kind: str, rows: list[ParameterDiagnostics], text: str) -> None:
        if (kind, rows[0].name) in self._warned:
            return
        self._warned |= {(kind, row.name) for row in rows}
        others = f" and {len(rows) - 1} other parameters" if len(rows) > 1 else ""
        warnings.warn(text.replace("{}", f"{rows[0].name}{others}"), UserWarning, stacklevel=4)
