"""Studies of tasks: from what `pick` answered, from trials, and from footprints.

The parts of a record: plain values, each optional, that a page shows.

    Study     a task: its plans on a chart (Mark), what is taken within which budget (Pick), where the memory goes (Kept)
    Run       a trial, with the label of its plan instead of the plan
    Progress  how far a sweep is

Rows of which there are many (Slot, Place, Pick) are tuples, and lists in JSON.

Short names of plans, one for each plan that says something else.

>>> labels = Labels({"mine": Plan.uniform(activation="int4/64@bf16", weight="int8/64@e8m0")})
>>> [labels.of(plan) for plan in (Plan(), Plan.preset("lpmm"), Plan.uniform(activation="e4m3fn/64@bf16", weight="int8/64@e8m0"))]
['as written', 'lpmm', 'weight int8/64@e8m0, activation e4m3fn/64@bf16']
>>> labels.of(Plan.uniform(weight="int8/64@e8m0", activation="int4/64@bf16"))
'mine'
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from statistics import fmean
from typing import NamedTuple

from paredown.errors import ReportError
from paredown.pick.answer import Picked, Point
from paredown.plan.explanation import explain_slots
from paredown.plan.footprint import footprint
from paredown.plan.plan import Plan
from paredown.plan.presets import PRESETS
from paredown.plan.selectors import Selector
from paredown.sizes import say_bytes
from paredown.tasks.trial import Status, Trial
from paredown.trace.trace import Trace

NINE_OF_TEN = "Bands: nine times of ten the mean error lies within."
SEEDS = "Bands: from the best seed to the worst."


@dataclass(frozen=True)
class PlanMark:
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


class BudgetPick(NamedTuple):
    """From so many bytes on this plan is taken, until the next row."""

    nbytes: int
    label: str


class ModuleBytes(NamedTuple):
    """Bytes that a module keeps in a role."""

    module: str
    role: str
    nbytes: int


class SlotRow(NamedTuple):
    """What becomes of a slot under a plan, and why: see plan/explanation.py."""

    slot: str
    role: str
    written_bytes: int
    nbytes: int
    format: str
    what: str
    why: str


@dataclass(frozen=True)
class MemoryUse:
    """Where the memory goes under a plan: at the peak, what waits by role and by module, slot by slot."""

    label: str
    peak_bytes: int
    low_bytes: int
    high_bytes: int
    by_role: Mapping[str, int] = field(default_factory=dict[str, int], hash=False)
    places: tuple[ModuleBytes, ...] = ()
    slots: tuple[SlotRow, ...] = ()
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
    marks: tuple[PlanMark, ...] = ()
    picks: tuple[BudgetPick, ...] = ()  # by bytes
    kept: tuple[MemoryUse, ...] = ()
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

    def keeping(self, kept: tuple[MemoryUse, ...], written: str, full_bytes: int | None) -> Study:
        """With these footprints too, and the step as it is written where that was not known."""
        known = {"written": self.written or written, "full_bytes": self.full_bytes or full_bytes}
        return replace(self, kept=(*self.kept, *kept), **known)


@dataclass(frozen=True)
class ReportedTrial:
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
class ReportedProgress:
    """The trials of a sweep, by state; finished ones by status."""

    sweep: str
    waiting: int = 0
    running: int = 0
    by_status: Mapping[str, int] = field(default_factory=dict[str, int], hash=False)


def choose(marks: Iterable[PlanMark]) -> tuple[BudgetPick, ...]:
    """What is taken within each budget: the least error, of equals the fewest bytes.

    >>> choose([PlanMark("a", 10, 0.5), PlanMark("b", 20, 0.6), PlanMark("c", 30, 0.4), PlanMark("d", 5)])
    (BudgetPick(nbytes=10, label='a'), BudgetPick(nbytes=30, label='c'))
    """
    found: list[BudgetPick] = []
    least = float("inf")
    known = [(mark.nbytes, mark.error, mark.label) for mark in marks if mark.error is not None]
    for nbytes, error, label in sorted(known):
        if error < least:
            found.append(BudgetPick(nbytes, label))
            least = error
    return tuple(found)


# --- Short names of plans, one for each plan that says something else ---

WRITTEN = "as written"
MOST_WORDS = 40  # lines of a plan that a page has


class Labels:
    """The label of every plan that was asked for; two plans never share one."""

    def __init__(self, known: Mapping[str, Plan] | None = None) -> None:
        self._labels: dict[object, str] = {plan.key: label for label, plan in (known or {}).items()}

    def of(self, plan: Plan) -> str:
        """Its label, the same each time."""
        key = plan.key
        if key not in self._labels:
            taken, name = set(self._labels.values()), name_of(plan)
            self._labels[key] = next(
                text for i in range(1, len(taken) + 3) if (text := f"{name} ({i})" if i > 1 else name) not in taken
            )
        return self._labels[key]


def name_of(plan: Plan) -> str:
    """A plan in a few words."""
    if plan.changes_nothing:
        return WRITTEN
    if (name := _presets().get(plan.key)) is not None:
        return name
    roles = [f"{key} {assignment.format or 'as it is'}" for key, assignment in plan.rules if Selector.parse(key).role is not None]
    slots = len(plan.rules) - len(roles)
    own = [f"{slots} slots by name"] if slots else []
    again = [f"{len(plan.recompute)} modules computed again"] if plan.recompute else []
    return ", ".join([*roles, *own, *again])


def in_words(plan: Plan) -> tuple[str, ...]:
    """The plan a line for each rule, cut where there are many."""
    lines = plan.explain().splitlines()
    more = [f"and {len(lines) - MOST_WORDS} lines more"] if len(lines) > MOST_WORDS else []
    return (*lines[:MOST_WORDS], *more)


@lru_cache(maxsize=1)
def _presets() -> dict[object, str]:
    return {Plan.preset(name).key: name for name in reversed(list(PRESETS))}


# --- Studies of tasks ---

BAND = 1.645  # standard deviations: nine times of ten
MOST_POINTS = 60  # of a curve
LIBRARIES = "libraries"  # beside the roles: workspaces that libraries keep


def study_of_pick(picked: Picked) -> Study:
    """What a pick says of its task."""
    frontier = picked.frontier
    counts = Counter(trial.plan.key for trial in picked.trials)
    marks = tuple(_mark(point, point.num_trials or counts[point.plan.key]) for point in frontier.points)
    written = next((point.label for point in frontier.points if point.plan.changes_nothing), "")
    steps = sorted({point.needs for point in frontier.points if point.trains})
    picks = [BudgetPick(nbytes, frontier.best(nbytes).label) for nbytes in steps]
    kept = tuple(pick for i, pick in enumerate(picks) if i == 0 or pick.label != picks[i - 1].label)
    return Study(
        picked.task,
        metric=frontier.metric,
        written=written,
        full_bytes=picked.full_bytes,
        budget_bytes=picked.budget_bytes,
        picked=picked.label if picked.plan is not None else "",
        reason=picked.reason,
        ties=picked.ties,
        band=NINE_OF_TEN,
        marks=marks,
        picks=kept,
        notes=(*picked.notes, *_learned(picked)),
    )


def _mark(point: Point, num_trials: int) -> PlanMark:
    half = BAND * point.deviation
    notes = {"prior": "predicted from earlier tasks", "features": "predicted from its formats alone: no earlier task had this plan"}
    lost = "it could not be trained" if num_trials else "there was no memory for it, or for a smaller plan"
    found = [notes.get(point.source, "")] if point.trains else [lost]
    if point.measured_bytes is None and point.needs > point.predicted_bytes:
        found.append(f"trials took more than predicted: {say_bytes(point.needs)} are expected")
    return PlanMark(
        point.label,
        point.needs,
        error=point.mean if point.trains else None,
        low=max(0.0, point.mean - half) if point.trains else None,
        high=point.mean + half if point.trains else None,
        measured=point.measured,
        measured_bytes=point.measured_bytes,
        num_trials=num_trials,
        on_front=point.on_front,
        note="; ".join(filter(None, found)),
        words=in_words(point.plan),
        predicted_bytes=point.predicted_bytes if point.needs > point.predicted_bytes else None,
    )


def _learned(picked: Picked) -> list[str]:
    if not picked.prior:
        return []
    most = ", ".join(f"{name} ({weight:.0%})" for name, weight in picked.used[:3])
    return [f"Learned from the earlier tasks of {picked.prior}{f'; most weight has {most}' if most else ''}."]


def study_of_trials(task: str, trials: Sequence[Trial], labels: Labels) -> Study:
    """A task with what was measured of it: a mark for each plan of known size, means over seeds."""
    by_label: dict[str, list[Trial]] = {}
    for trial in trials:
        by_label.setdefault(labels.of(trial.plan), []).append(trial)
    marks = [mark for label, found in by_label.items() if (mark := _measured(label, found)) is not None]
    picks = choose(marks)
    front = {pick.label for pick in picks}
    on_front = (replace(mark, on_front=mark.label in front) for mark in marks)
    marks = tuple(sorted(on_front, key=lambda mark: (mark.nbytes, mark.label)))
    written = labels.of(Plan()) if any(trial.plan.changes_nothing for trial in trials) else ""
    full = next((mark.nbytes for mark in marks if mark.label == written), None)
    metric = "error" if all(trial.error is None or trial.error <= 1 for trial in trials) else "loss"  # trials do not say
    return Study(task, metric=metric, written=written, full_bytes=full, band=SEEDS, marks=marks, picks=picks)


def _measured(label: str, trials: Sequence[Trial]) -> PlanMark | None:
    """Where a plan stands; None where nobody knows what it takes."""
    sizes = [trial.predicted_peak_bytes for trial in trials if trial.predicted_peak_bytes is not None]
    measured = [trial.measured_peak_bytes for trial in trials if trial.measured_peak_bytes is not None]
    if not sizes and not measured:
        return None
    errors = [trial.error for trial in trials if trial.status is Status.DONE and trial.error is not None]
    ended = {status.value: sum(trial.status is status for trial in trials) for status in Status if status is not Status.DONE}
    return PlanMark(
        label,
        max(sizes or measured),
        error=fmean(errors) if errors else None,
        low=min(errors, default=None),
        high=max(errors, default=None),
        measured=fmean(errors) if errors else None,
        measured_bytes=max(measured, default=None),
        num_trials=len(errors),
        note=", ".join(f"{num} of {len(trials)} {status.replace('_', ' ')}" for status, num in ended.items() if num),
        words=in_words(trials[0].plan),
    )


def run_of(trial: Trial, label: str, *, has_curve: bool = True) -> ReportedTrial:
    """A trial as a row."""
    return ReportedTrial(
        trial.task,
        label,
        trial.seed,
        trial.status.value,
        error=trial.error,
        loss=trial.loss,
        predicted_bytes=trial.predicted_peak_bytes,
        measured_bytes=trial.measured_peak_bytes,
        seconds=trial.seconds,
        reason=trial.reason,
        device=trial.device,
        commit=trial.commit,
        curve=thin(trial.curve) if has_curve else (),
    )


def thin(curve: Sequence[tuple[int, float]], most: int = MOST_POINTS) -> tuple[tuple[int, float], ...]:
    """At most so many points of a curve, each the mean of its neighbours, four digits each.

    >>> thin([(1, 4.0), (2, 2.0), (3, 1.0), (4, 0.123456)], 2)
    ((2, 3.0), (4, 0.5617))
    """
    width = -(-len(curve) // most) or 1
    groups = [curve[i : i + width] for i in range(0, len(curve), width)]
    return tuple((group[-1][0], float(f"{fmean(loss for _, loss in group):.4g}")) for group in groups)


def kept_under(trace: Trace, plans: Mapping[str, Plan]) -> tuple[MemoryUse, ...]:
    """Where the memory of a step goes under each of these plans; labels are theirs."""
    return tuple(_kept(trace, label, plan) for label, plan in plans.items())


def _kept(trace: Trace, label: str, plan: Plan) -> MemoryUse:
    foot = footprint(trace, plan)
    by_role = {role.value: nbytes for role, nbytes in foot.at_peak.items()}
    by_role |= {LIBRARIES: foot.workspace_bytes} if foot.workspace_bytes else {}
    return MemoryUse(
        label,
        foot.peak_bytes,
        foot.low_bytes,
        foot.high_bytes,
        by_role=by_role,
        places=tuple(ModuleBytes(module, role.value, nbytes) for (module, role), nbytes in foot.places_at_peak().items()),
        slots=tuple(
            SlotRow(row.slot, row.role.value, row.written_bytes, row.nbytes, row.format, row.what, row.why)
            for row in explain_slots(trace, plan)
        ),
        notes=foot.notes,
    )


def plans_to_show(picked: Picked, most: int = 8) -> dict[str, Plan]:
    """The step as it is written, the picked plan, and further ones of the frontier: what a page has footprints of."""
    points = picked.frontier.points
    found = {point.label: point.plan for point in points if point.plan.changes_nothing} or {WRITTEN: Plan()}
    found |= {picked.label: picked.plan} if picked.plan is not None else {}
    found |= {point.label: point.plan for point in _spread(picked.frontier.front(), most) if point.label not in found}
    return found


def _spread(points: Sequence[Point], most: int) -> Iterable[Point]:
    """At most so many of them, from the first to the last."""
    if len(points) <= most:
        return points
    return [points[round(i * (len(points) - 1) / (most - 1))] for i in range(most)]
