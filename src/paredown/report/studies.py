"""Studies of tasks: from what `pick` answered, from trials, and from footprints."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean

from paredown.plan.footprint import footprint
from paredown.plan.plan import Plan
from paredown.plan.record import Trace
from paredown.plan.sizes import say_bytes
from paredown.plan.trial import Status, Trial
from paredown.report.labels import WRITTEN, Labels, in_words, said
from paredown.report.parts import NINE_OF_TEN, SEEDS, Kept, Mark, Pick, Place, Run, Slot, Study, choose
from paredown.search.explain import explain_slots
from paredown.search.picked import Picked, Point

BAND = 1.645  # standard deviations: nine times of ten
MOST_POINTS = 60  # of a curve
LIBRARIES = "libraries"  # beside the roles: workspaces that libraries keep


def study_of_pick(picked: Picked) -> Study:
    """What a pick says of its task."""
    frontier = picked.frontier
    counts = Counter(said(trial.plan) for trial in picked.trials)
    marks = tuple(_mark(point, point.num_trials or counts[said(point.plan)]) for point in frontier.points)
    written = next((point.label for point in frontier.points if point.plan.changes_nothing), "")
    steps = sorted({point.needs for point in frontier.points if point.trains})
    picks = [Pick(nbytes, frontier.best(nbytes).label) for nbytes in steps]
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


def _mark(point: Point, num_trials: int) -> Mark:
    half = BAND * point.deviation
    notes = {"prior": "predicted from earlier tasks", "features": "predicted from its formats alone: no earlier task had this plan"}
    lost = "it could not be trained" if num_trials else "there was no memory for it, or for a smaller plan"
    found = [notes.get(point.source, "")] if point.trains else [lost]
    if point.measured_bytes is None and point.needs > point.predicted_bytes:
        found.append(f"trials took more than predicted: {say_bytes(point.needs)} are expected")
    return Mark(
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


def _measured(label: str, trials: Sequence[Trial]) -> Mark | None:
    """Where a plan stands; None where nobody knows what it takes."""
    sizes = [trial.predicted_peak_bytes for trial in trials if trial.predicted_peak_bytes is not None]
    measured = [trial.measured_peak_bytes for trial in trials if trial.measured_peak_bytes is not None]
    if not sizes and not measured:
        return None
    errors = [trial.error for trial in trials if trial.status is Status.DONE and trial.error is not None]
    ended = {status.value: sum(trial.status is status for trial in trials) for status in Status if status is not Status.DONE}
    return Mark(
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


def run_of(trial: Trial, label: str, *, has_curve: bool = True) -> Run:
    """A trial as a row."""
    return Run(
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


def kept_under(trace: Trace, plans: Mapping[str, Plan]) -> tuple[Kept, ...]:
    """Where the memory of a step goes under each of these plans; labels are theirs."""
    return tuple(_kept(trace, label, plan) for label, plan in plans.items())


def _kept(trace: Trace, label: str, plan: Plan) -> Kept:
    foot = footprint(trace, plan)
    by_role = {role.value: nbytes for role, nbytes in foot.at_peak.items()}
    by_role |= {LIBRARIES: foot.workspace_bytes} if foot.workspace_bytes else {}
    return Kept(
        label,
        foot.peak_bytes,
        foot.low_bytes,
        foot.high_bytes,
        by_role=by_role,
        places=tuple(Place(module, role.value, nbytes) for (module, role), nbytes in foot.places_at_peak().items()),
        slots=tuple(
            Slot(row.slot, row.role.value, row.written_bytes, row.nbytes, row.format, row.what, row.why)
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
