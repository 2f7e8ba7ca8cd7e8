"""Make the parts of a report's record from picks, trials and footprints.

    Study             one task: its plans on a chart (PlanMark), the best plan for each budget (BudgetPick), memory by plan (MemoryUse)
    ReportedTrial     a trial, with the label of its plan instead of the plan

SlotRow and BudgetPick are NamedTuples, which are lists in JSON, since a record has many of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, median
from typing import Any, NamedTuple

from paredown.errors import ReportError
from paredown.plan.explanation import explain_slots
from paredown.plan.footprint import footprint
from paredown.plan.plan import Plan
from paredown.plan.trace import Trace
from paredown.sizes import say_bytes
from paredown.study.pick.answer import Picked, Point
from paredown.study.sweeps.plan_labels import BASELINE, Labels
from paredown.study.tasks.trial import Status, Trial, standard_error, with_baseline_steps

NINE_OF_TEN = "Intervals: the mean error is inside with a probability of 90 %."
SEEDS = (
    "Errors are means over seeds; intervals are one standard error of the mean to each side, and one seed has none. "
    "A plan is as accurate as the baseline where its interval is not above the baseline's."
)


@dataclass(frozen=True)
class PlanMark:
    """A plan's point in the report's chart, at its peak memory and its mean error (None if no run of the plan finished)."""

    label: str
    nbytes: int  # peak memory, which budgets are compared with
    error: float | None = None
    low: float | None = None  # `low` to `high`: the interval of `error`
    high: float | None = None
    measured: float | None = None  # mean error of the finished trials
    measured_bytes: int | None = None
    num_trials: int = 0  # finished trials, whose mean is `measured`
    on_front: bool = False
    note: str = ""
    words: tuple[str, ...] = ()  # the plan as text, a line for each rule
    predicted_bytes: int | None = None  # set if it differs from `nbytes`
    step_seconds: float | None = None  # median step time
    step_ratio: float | None = None  # step time divided by the unmodified step's
    step_source: str = ""  # "measured", "predicted" or "prior"


class BudgetPick(NamedTuple):
    """Names the plan to pick, by its label, for budgets from `nbytes` up to those of the next BudgetPick."""

    nbytes: int
    label: str


class SlotRow(NamedTuple):
    """A row of the report's table of slots (tensors of the step): how a plan stores the slot, and why."""

    slot: str
    role: str
    written_bytes: int  # in the unmodified step
    nbytes: int
    format: str
    what: str
    why: str


@dataclass(frozen=True)
class MemoryUse:
    """Predicted bytes of a step under the plan `label`: at the peak by role, over time (`phases`), and by slot (tensor)."""

    label: str
    peak_bytes: int
    low_bytes: int
    high_bytes: int
    phases: tuple[tuple[int, ...], ...] = ()  # bytes during forward, backward and the optimizer's step, MOST_POINTS of each
    by_role: Mapping[str, int] = field(default_factory=dict[str, int], hash=False)
    slots: tuple[SlotRow, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Study:
    """The part of a report on one task; `written` is the label of its baseline plan, `full_bytes` the baseline's predicted peak."""

    task: str
    metric: str = "error"
    written: str = ""
    full_bytes: int | None = None
    budget_bytes: int | None = None
    picked: str = ""  # label of the picked plan; empty if no plan fits, or no budget was given
    reason: str = ""
    ties: tuple[str, ...] = ()
    band: str = ""  # what intervals mean, as a sentence
    marks: tuple[PlanMark, ...] = ()
    picks: tuple[BudgetPick, ...] = ()  # by rising bytes
    kept: tuple[MemoryUse, ...] = ()
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        labels = [mark.label for mark in self.marks]
        if len(set(labels)) < len(labels):
            raise ReportError(f"task {self.task!r}: two plans have the same label; give each plan its own.")
        for label in (pick.label for pick in self.picks):
            if label not in labels:
                raise ReportError(f"task {self.task!r}: {label!r} is picked, but it is none of the {len(labels)} plans of `marks`.")
        if list(self.picks) != sorted(self.picks, key=lambda pick: pick.nbytes):
            raise ReportError(f"task {self.task!r}: `picks` must be sorted by rising bytes; these are not.")

    def summary(self) -> str:
        """Return the report's first sentence: what the picked plan gains and costs, beside the baseline."""
        baseline, plan = self.compared()
        if baseline is not None and plan is not None:
            said = f"{'; '.join(say_comparison(baseline, plan, self.budget_bytes, self.metric))}."
            if self.picked or not self.marks:
                return said
            return f"{plan.label} is the smallest plan as accurate as the baseline: {said[0].lower()}{said[1:]}"
        if self.reason and self.budget_bytes is not None:
            return self.reason
        known = [mark for pick in self.picks for mark in self.marks if mark.label == pick.label]
        if not known:
            return "No plan has finished a trial." if self.marks else ""
        ends = [f"{say_bytes(mark.nbytes)} with {self.metric} {say_error(mark, self.metric)}" for mark in (known[0], known[-1])]
        return f"{len(self.marks)} plans, from {' to '.join(ends)}." if len(known) > 1 else f"The best plan needs {ends[0]}."

    def compared(self) -> tuple[PlanMark | None, PlanMark | None]:
        """Return the baseline and the plan that the report compares with it, both measured or both predicted."""
        kept = [PlanMark(row.label, row.peak_bytes) for row in self.kept]
        rows = kept if not self.marks else [] if self.budget_bytes is not None else self._as_accurate()
        label = self.picked or min(((row.nbytes, row.label) for row in rows), default=(0, ""))[1]
        for marks in (self.marks, kept):
            found = {mark.label: mark for mark in marks}
            if label != self.written and {label, self.written} <= set(found):
                return found[self.written], found[label]
        return None, None

    def _as_accurate(self) -> list[PlanMark]:
        """Return the marks (points of the chart) of plans below the baseline's bytes whose error interval is not above its own."""
        own = next((mark for mark in self.marks if mark.label == self.written and mark.error is not None), None)
        most = None if own is None else own.error if own.high is None else own.high
        known = [(mark, mark.error if mark.low is None else mark.low) for mark in self.marks if own and mark.nbytes < own.nbytes]
        return [mark for mark, least in known if least is not None and most is not None and least <= most]

    def with_memory(self, kept: tuple[MemoryUse, ...], written: str, full_bytes: int | None) -> Study:
        """Return this part of a report with memory of more plans (`kept`), and the baseline's label and peak if it has none."""
        known = {"written": self.written or written, "full_bytes": self.full_bytes or full_bytes}
        return replace(self, kept=(*self.kept, *kept), **known)


@dataclass(frozen=True)
class ReportedTrial:
    """A row of the report's table of trials."""

    task: str
    plan: str  # its label
    seed: int
    status: str
    error: float | None = None
    loss: float | None = None
    predicted_bytes: int | None = None
    measured_bytes: int | None = None
    seconds: float | None = None
    step_seconds: float | None = None
    step_ratio: float | None = None
    reason: str = ""
    device: str = ""
    commit: str = ""
    curve: tuple[tuple[int, float], ...] = ()  # (step, training loss)
    finished_at: str = ""  # ISO 8601, UTC; empty: unknown
    host: str = ""  # "host 1" and so on, since a page can be shared


def choose(marks: Sequence[PlanMark], written: str = "") -> tuple[BudgetPick, ...]:
    """Return the plan to pick for each budget: the one of least error, and of equally accurate plans the smallest.

    No picked plan takes more bytes than the baseline, which has the label `written`.

    >>> choose([PlanMark("a", 10, 0.5), PlanMark("b", 20, 0.6), PlanMark("c", 30, 0.4), PlanMark("d", 5)])
    (BudgetPick(nbytes=10, label='a'), BudgetPick(nbytes=30, label='c'))
    """
    picks: list[BudgetPick] = []
    least = float("inf")
    most = next((mark.nbytes for mark in marks if mark.label == written), float("inf"))
    known = [(mark.nbytes, mark.error, mark.label) for mark in marks if mark.error is not None and mark.nbytes <= most]
    for nbytes, error, label in sorted(known):
        if error < least:
            picks.append(BudgetPick(nbytes, label))
            least = error
    return tuple(picks)


def with_front(marks: Iterable[PlanMark], picks: Iterable[BudgetPick], picked: str = "") -> tuple[PlanMark, ...]:
    """Return the chart's points with `on_front` set for those on its line: plans to pick for some budget, and `picked`.

    A plan with less memory and less error than `picked` is not on the line; the page says why it was not picked.

    >>> marks = [PlanMark("a", 10, 0.5), PlanMark("quicker", 20, 0.6), PlanMark("c", 30, 0.4), PlanMark("d", 40, 0.6)]
    >>> picks = [BudgetPick(mark.nbytes, mark.label) for mark in marks]
    >>> [mark.label for mark in with_front(marks, picks) if mark.on_front]
    ['a', 'c']
    >>> [mark.label for mark in with_front(marks, picks, "quicker") if mark.on_front]
    ['quicker', 'c']
    """
    all_marks = tuple(sorted(marks, key=lambda mark: (mark.nbytes, mark.label)))
    names = {picked, *(pick.label for pick in picks)}
    known = [(mark.nbytes, mark.error, mark.label) for mark in all_marks if mark.label in names and mark.error is not None]
    own = next((row for row in known if row[2] == picked), None)
    line: list[tuple[int, float, str]] = []
    for row in known:
        beats = own is not None and row != own and row[0] <= own[0] and row[1] <= own[1]
        if not beats and (not line or row[1] < line[-1][1]):
            line.append(row)
    front = {row[2] for row in line}
    return tuple(replace(mark, on_front=mark.label in front) for mark in all_marks)


MOST_LINES = 40  # lines of a plan on a page


def say_comparison(baseline: PlanMark, plan: PlanMark, budget_bytes: int | None, metric: str) -> Iterator[str]:
    """Yield texts with peak, error and step time of a plan beside the baseline's; "about" marks predicted numbers.

    >>> before = PlanMark("baseline", 20000, 0.044, measured=0.044, measured_bytes=20000, step_seconds=0.1)
    >>> after = PlanMark("small", 9000, 0.046, measured=0.046, measured_bytes=9000, step_seconds=0.16)
    >>> list(say_comparison(before, after, 8000, "error"))[0]
    'Peak memory 8.79 instead of 19.53 KiB, above the budget of 7.81 KiB'
    >>> list(say_comparison(before, after, None, "error"))[1:]
    ['error 4.6 % instead of 4.4 %', 'each step 1.6x as long']
    """
    is_measured = baseline.measured_bytes is not None and plan.measured_bytes is not None
    after, before = (mark.nbytes if is_measured else mark.predicted_bytes or mark.nbytes for mark in (plan, baseline))
    texts = [say_bytes(after).split(), say_bytes(before).split()]
    ends = [f"{texts[0][0]} instead of" if texts[0][1] == texts[1][1] else f"{' '.join(texts[0])} instead of", " ".join(texts[1])]
    faults = [f", above the budget of {say_bytes(budget_bytes)}"] if budget_bytes is not None and plan.nbytes > budget_bytes else []
    faults += [", more than the baseline"] if plan.nbytes > baseline.nbytes else []
    faults[:0] = [f", measured {say_bytes(plan.nbytes)}"] if faults and plan.nbytes != after else []
    yield f"{'Peak memory' if is_measured else 'Predicted peak memory'} {' '.join(ends)}{''.join(faults)}"
    if plan.error is not None and baseline.error is not None:
        yield f"{metric} {say_error(plan, metric)} instead of {say_error(baseline, metric)}"
    elif plan.error is None and plan.num_trials + bool(plan.note):
        yield f"no {metric} is known: {plan.note}" if plan.note else f"its {metric} is not known"
    seconds = plan.step_seconds / baseline.step_seconds if plan.step_seconds and baseline.step_seconds else plan.step_ratio
    if seconds is not None:
        yield f"each step {'' if plan.step_source in ('', 'measured') else 'about '}{seconds:.1f}x as long"


def say_error(mark: PlanMark, metric: str) -> str:
    """Return the text of a mean error, with its standard error if it is a mean of several runs.

    >>> say_error(PlanMark("a", 1, 0.046, 0.041, 0.051, measured=0.046, num_trials=3), "error")
    '4.6 % \u00b1 0.5'
    >>> say_error(PlanMark("a", 1, 0.046, 0.041, 0.051), "error"), say_error(PlanMark("a", 1, 3.2, measured=3.2), "loss")
    ('about 4.6 %', '3.200')
    """
    if mark.error is None:
        return "unknown"
    about, unit = "" if mark.error == mark.measured else "about ", " %" if metric == "error" else ""
    text = (lambda value: f"{100 * value:.1f}") if metric == "error" else (lambda value: f"{value:.3f}")
    has_spread = not about and mark.low is not None and mark.num_trials > 1
    spread = f" \u00b1 {text(mark.error - (mark.low or 0.0))}" if has_spread else ""
    return f"{about}{text(mark.error)}{unit}{spread}"


def in_words(plan: Plan) -> tuple[str, ...]:
    """Return the plan as text, a line for each rule, at most MOST_LINES."""
    lines = plan.explain().splitlines()
    more = [f"and {len(lines) - MOST_LINES} lines more"] if len(lines) > MOST_LINES else []
    return (*lines[:MOST_LINES], *more)


# --- studies from picks, trials and footprints -----------------------------------------------------------------------

BAND = 1.645  # standard deviations: 90 % of a normal distribution lie within
MOST_POINTS = 60  # points of a curve
LIBRARIES = "libraries"  # beside the roles: workspaces of libraries such as cuBLAS


def study_of_pick(picked: Picked) -> Study:
    """Return a report's part on the answer of `pick`: a mark (point of the chart) for each plan, Pareto front, and reason."""
    frontier = picked.frontier
    counts = Counter(trial.plan.key for trial in picked.trials)
    marks = tuple(_mark(point, point.num_trials or counts[point.plan.key]) for point in frontier.points)
    written = next((point.label for point in frontier.points if point.plan.changes_nothing), "")
    steps = sorted({point.needs for point in frontier.points if point.trains})
    picks = [BudgetPick(nbytes, frontier.best(nbytes).label) for nbytes in steps]
    kept = tuple(pick for i, pick in enumerate(picks) if i == 0 or pick.label != picks[i - 1].label)
    label = picked.label if picked.plan is not None else ""
    return Study(
        picked.task,
        metric=frontier.metric,
        written=written,
        full_bytes=picked.full_bytes,
        budget_bytes=picked.budget_bytes,
        picked=label,
        reason=picked.reason,
        ties=picked.ties,
        band=NINE_OF_TEN,
        marks=with_front(marks, kept, label),
        picks=kept,
        notes=(*picked.notes, *([f"Fitted to the tasks of the prior {picked.prior}."] if picked.prior else [])),
    )


def _mark(point: Point, num_trials: int) -> PlanMark:
    half = BAND * point.deviation
    notes = {"prior": "predicted from prior tasks", "features": "predicted from its formats alone: no prior task has this plan"}
    failure = "its trials failed" if num_trials else "it, or a smaller plan, ran out of memory"
    texts = [notes.get(point.source, "")] if point.trains else [failure]
    if point.measured_bytes is None and point.needs > point.predicted_bytes:
        texts.append(f"trials took more than predicted: {say_bytes(point.needs)} are expected")
    nbytes = point.needs if point.measured_bytes is None else point.measured_bytes
    same = ("label", "measured", "measured_bytes", "step_seconds", "step_ratio", "step_source")
    return PlanMark(
        nbytes=nbytes,
        error=point.mean if point.trains else None,
        low=max(0.0, point.mean - half) if point.trains else None,
        high=point.mean + half if point.trains else None,
        num_trials=num_trials,
        note="; ".join(filter(None, texts)),
        words=in_words(point.plan),
        predicted_bytes=point.predicted_bytes if nbytes != point.predicted_bytes else None,
        **{name: getattr(point, name) for name in same},
    )


def study_of_trials(task: str, trials: Sequence[Trial], labels: Labels) -> Study:
    """Return a report's part on trials of a task: a mark (point of the chart) for each plan with known bytes, by means."""
    by_label: dict[str, list[Trial]] = {}
    for trial in with_baseline_steps((task, trial) for trial in trials):
        by_label.setdefault(labels.of(trial.plan, task), []).append(trial)
    metric = (
        "error" if all(trial.error is None or trial.error <= 1 for trial in trials) else "loss"
    )  # a trial has no field for its metric; error rates are at most 1
    marks = [mark for label, runs in by_label.items() if (mark := _measured(label, runs, metric)) is not None]
    written = next((labels.of(trial.plan, task) for trial in trials if trial.plan.changes_nothing), "")
    full = next((mark.nbytes for mark in marks if mark.label == written), None)
    picks = choose(marks, written)
    return Study(task, metric=metric, written=written, full_bytes=full, band=SEEDS, marks=with_front(marks, picks), picks=picks)


def _measured(label: str, trials: Sequence[Trial], metric: str) -> PlanMark | None:
    sizes = [trial.predicted_peak_bytes for trial in trials if trial.predicted_peak_bytes is not None]
    measured = [trial.measured_peak_bytes for trial in trials if trial.measured_peak_bytes is not None]
    if not sizes and not measured:
        return None
    errors = [trial.error for trial in trials if trial.status is Status.DONE and trial.error is not None]
    mean, half = fmean(errors) if errors else None, standard_error(errors)
    ended = {status.value: sum(trial.status is status for trial in trials) for status in Status if status is not Status.DONE}
    others = ", ".join(f"{num} of {len(trials)} {status.replace('_', ' ')}" for status, num in ended.items() if num)
    nbytes = max(measured or sizes)
    return PlanMark(
        label,
        nbytes,
        error=mean,
        low=None if mean is None or half is None else mean - half,
        high=None if mean is None or half is None else mean + half,
        measured=mean,
        measured_bytes=max(measured, default=None),
        num_trials=len(errors),
        note="; ".join(filter(None, (_say_seeds(len(errors), half, metric), others))),
        words=in_words(trials[0].plan),
        predicted_bytes=max(sizes) if sizes and max(sizes) != nbytes else None,
        **_step_time(trials),
    )


def _step_time(trials: Sequence[Trial]) -> dict[str, Any]:
    """Return the fields of a PlanMark on step time: the median ratio to the baseline's, and the median seconds.

    Seconds are None if the trials ran on several devices.
    """
    timed = [trial for trial in trials if trial.step_seconds is not None]
    ratios = [trial.step_ratio for trial in timed if trial.step_ratio is not None]
    seconds = [trial.step_seconds for trial in timed if trial.step_seconds is not None]
    is_one_device = len({trial.device for trial in timed}) == 1
    return {
        "step_seconds": median(seconds) if is_one_device else None,
        "step_ratio": median(ratios) if ratios else None,
        "step_source": "measured" if timed else "",
    }


def _say_seeds(num: int, standard: float | None, metric: str) -> str:
    """Return a text with the number of seeds and the standard error of their mean error (`standard`), in percentage points for error rates.

    >>> _say_seeds(3, 0.0058, "error"), _say_seeds(2, 0.25, "loss"), _say_seeds(1, None, "error")
    ('mean of 3 seeds, standard error 0.58 points', 'mean of 2 seeds, standard error 0.25', 'one seed: no standard error')
    """
    if standard is None:
        return "one seed: no standard error" if num else ""
    size = f"{100 * standard:.2f} points" if metric == "error" else f"{standard:.4g}"
    return f"mean of {num} seeds, standard error {size}"


def thin(curve: Sequence[tuple[int, float]], most: int = MOST_POINTS) -> tuple[tuple[int, float], ...]:
    """Return a curve with at most `most` points, by averaging neighbours.

    >>> thin([(1, 4.0), (2, 2.0), (3, 1.0), (4, 0.123456)], 2)
    ((2, 3.0), (4, 0.5617))
    """
    return tuple((group[-1][0], float(f"{fmean(loss for _, loss in group):.4g}")) for group in parts_of(curve, most))


def parts_of(values: Sequence[Any], most: int = MOST_POINTS) -> list[Sequence[Any]]:
    """Return the sequence `values` cut into at most `most` consecutive parts."""
    width = -(-len(values) // most) or 1
    return [values[i : i + width] for i in range(0, len(values), width)]


def memory_use(trace: Trace, label: str, plan: Plan) -> MemoryUse:
    """Return the predicted memory of the traced step under a plan."""
    foot = footprint(trace, plan)
    by_role = {role.value: nbytes for role, nbytes in foot.at_peak.items()}
    by_role |= {LIBRARIES: foot.workspace_bytes} if foot.workspace_bytes else {}
    return MemoryUse(
        label,
        foot.peak_bytes,
        foot.low_bytes,
        foot.high_bytes,
        phases=tuple(tuple(max(part) for part in parts_of(phase)) for phase in foot.by_tick()),
        by_role=by_role,
        slots=tuple(
            SlotRow(row.slot, row.role.value, row.baseline_bytes, row.nbytes, row.format, row.what, row.why)
            for row in explain_slots(trace, plan)
        ),
        notes=foot.notes,
    )


def plans_to_show(picked: Picked, most: int = 8) -> dict[str, Plan]:
    """Return the plans whose memory a report shows, by label: the baseline, the picked plan, and up to `most` of the Pareto front."""
    points = picked.frontier.points
    plans = {point.label: point.plan for point in points if point.plan.changes_nothing} or {BASELINE: Plan()}
    plans |= {picked.label: picked.plan} if picked.plan is not None else {}
    front = picked.frontier.front()
    if len(front) > most:  # evenly spaced, from the first to the last
        front = tuple(front[round(i * (len(front) - 1) / (most - 1))] for i in range(most))
    return plans | {point.label: point.plan for point in front if point.label not in plans}
