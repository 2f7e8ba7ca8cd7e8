"""The parts of a record: plain values, each optional, that a page shows.

    Study     a task: its plans on a chart (Mark), what is taken within which budget (Pick), where the memory goes (Kept)
    Run       a trial, with the label of its plan instead of the plan
    Progress  how far a sweep is

Rows of which there are many (Slot, Place, Pick) are tuples, and lists in JSON.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from paredown.errors import ReportError

NINE_OF_TEN = "Bands: nine times of ten the mean error lies within."
SEEDS = "Bands: from the best seed to the worst."


@dataclass(frozen=True)
class Mark:
    """A plan on the chart: bytes that count against a budget, and the mean error over runs; None: no run of it ended well."""

    label: str
    nbytes: int
    error: float | None = None
    low: float | None = None  # the band of `error`
    high: float | None = None
    measured: float | None = None  # mean of the finished trials
    measured_bytes: int | None = None
    num_trials: int = 0  # behind `measured`
    on_front: bool = False
    note: str = ""
    words: tuple[str, ...] = ()  # the plan, a line for each rule
    predicted_bytes: int | None = None  # where that is not what counts: trials took more


class Pick(NamedTuple):
    """From so many bytes on this plan is taken, until the next row."""

    nbytes: int
    label: str


class Place(NamedTuple):
    """Bytes that a module keeps in a role."""

    module: str
    role: str
    nbytes: int


class Slot(NamedTuple):
    """What becomes of a slot under a plan, and why: see search/explain.py."""

    slot: str
    role: str
    written_bytes: int
    nbytes: int
    format: str
    what: str
    why: str


@dataclass(frozen=True)
class Kept:
    """Where the memory goes under a plan: at the peak, what waits by role and by module, slot by slot."""

    label: str
    peak_bytes: int
    low_bytes: int
    high_bytes: int
    by_role: Mapping[str, int] = field(default_factory=dict[str, int], hash=False)
    places: tuple[Place, ...] = ()
    slots: tuple[Slot, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Study:
    """What is known of one task. `written`: the label of the step as it is written; `full_bytes`: its peak."""

    task: str
    metric: str = "error"
    written: str = ""
    full_bytes: int | None = None
    budget_bytes: int | None = None
    picked: str = ""  # a label; empty: nothing fits, or nothing was asked
    reason: str = ""
    ties: tuple[str, ...] = ()
    band: str = ""  # what bands mean
    marks: tuple[Mark, ...] = ()
    picks: tuple[Pick, ...] = ()  # by bytes
    kept: tuple[Kept, ...] = ()
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        labels = [mark.label for mark in self.marks]
        if len(set(labels)) < len(labels):
            raise ReportError(f"task {self.task!r}: two plans have the same label; labels tell plans apart.")
        for label in (pick.label for pick in self.picks):
            if label not in labels:
                raise ReportError(f"task {self.task!r}: {label!r} is picked and is none of the {len(labels)} plans on the chart.")
        if list(self.picks) != sorted(self.picks, key=lambda pick: pick.nbytes):
            raise ReportError(f"task {self.task!r}: picks are ordered by bytes, the fewest first; these are not.")

    def keeping(self, kept: tuple[Kept, ...], written: str, full_bytes: int | None) -> Study:
        """With these footprints too, and the step as it is written where that was not known."""
        known = {"written": self.written or written, "full_bytes": self.full_bytes or full_bytes}
        return replace(self, kept=(*self.kept, *kept), **known)


@dataclass(frozen=True)
class Run:
    """A trial."""

    task: str
    plan: str  # its label
    seed: int
    status: str
    error: float | None = None
    loss: float | None = None
    predicted_bytes: int | None = None
    measured_bytes: int | None = None
    seconds: float | None = None
    reason: str = ""
    device: str = ""
    commit: str = ""
    curve: tuple[tuple[int, float], ...] = ()  # (step, training loss)


@dataclass(frozen=True)
class Progress:
    """The trials of a sweep, by state; finished ones by status."""

    sweep: str
    waiting: int = 0
    running: int = 0
    by_status: Mapping[str, int] = field(default_factory=dict[str, int], hash=False)


def choose(marks: Iterable[Mark]) -> tuple[Pick, ...]:
    """What is taken within each budget: the least error, of equals the fewest bytes.

    >>> choose([Mark("a", 10, 0.5), Mark("b", 20, 0.6), Mark("c", 30, 0.4), Mark("d", 5)])
    (Pick(nbytes=10, label='a'), Pick(nbytes=30, label='c'))
    """
    found: list[Pick] = []
    least = float("inf")
    known = [(mark.nbytes, mark.error, mark.label) for mark in marks if mark.error is not None]
    for nbytes, error, label in sorted(known):
        if error < least:
            found.append(Pick(nbytes, label))
            least = error
    return tuple(found)
