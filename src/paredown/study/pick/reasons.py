"""Write the answer of a pick in sentences: why this plan, how certain that is, its step time, the cost of trials, or why nothing fits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paredown.sizes import say_bytes
from paredown.study.pick.answer import Frontier, Picked, Point, comparable_times, step_times
from paredown.study.pick.pareto import SAME_TIME
from paredown.study.pick.posterior import AS_ACCURATE, ENOUGH
from paredown.study.tasks.trial import Status, Trial, say_step

NUM_NAMED_TIES = 3  # labels in a reason
CHANNELS_LAST_ADVICE = "With convolutions, Task(..., channels_last=True) avoids copies to another memory layout."
UNFINISHED = (Status.OUT_OF_MEMORY, Status.FAILED, Status.KILLED, Status.INFEASIBLE)  # trials without an error
DECIDED = "Stopped early: every smaller plan is within the margin with too small a probability."
TIMED = {"measured": "measured", "predicted": "predicted", "prior": "the mean of prior tasks"}  # by `step_source`


@dataclass(frozen=True)
class AnswerText:
    """Writes the sentences of an answer about the picked `point`; `others` are trials of the task that other sweeps ran."""

    answer: Picked
    point: Point
    others: tuple[Trial, ...]
    num_tasks: int  # tasks of the prior
    has_unit: bool  # whether the error of random guessing is known

    def reason(self, certainty: str, early: str) -> str:
        """Return why this plan is picked: its peak and expected error, then the sentences `certainty` and `early`.

        They say how certain the choice is, and why trials ended early ("" if they did not).
        """
        answer, point = self.answer, self.point
        share = f"{100 * point.predicted_bytes / max(answer.full_bytes, 1):.0f} % of the baseline"
        peak = f"{say_bytes(point.predicted_bytes)} of {say_bytes(answer.budget_bytes)} ({share})"
        error = f"error {point.mean:.4f} +- {point.deviation:.4f} (standard deviation), {self._evidence()}"
        excess = "measured {}" if point.measured_bytes is not None else "{} with what trials took beyond their prediction"
        more = f", {excess.format(say_bytes(point.needs))}" if point.needs > point.predicted_bytes else ""
        parts = [f"{point.label}: predicted peak {peak}{more}; {error}.", certainty, early]
        return " ".join(part for part in parts if part)

    def notes(self) -> tuple[str, ...]:
        """Return further sentences: what trials cost, which failed, a measured peak above the budget, how errors were predicted."""
        point, trials, notes = self.point, self.answer.trials, list[str]()
        if trials:
            seconds = sum(trial.seconds or 0.0 for trial in trials)
            peak = max(trial.measured_peak_bytes or trial.predicted_peak_bytes or 0 for trial in trials)
            notes.append(f"{len(trials)} trial{'s' * (len(trials) != 1)} took {seconds:.1f} s and at most {say_bytes(peak)}")
        bad = [trial for trial in trials if trial.status in (Status.DIVERGED, Status.OUT_OF_MEMORY, Status.FAILED)]
        notes += [f"seed {trial.seed}, {trial.status.value}: {trial.reason}" for trial in bad]
        if point.measured_bytes is not None and point.measured_bytes > self.answer.budget_bytes:
            notes.append(
                f"its measured peak, {say_bytes(point.measured_bytes)}, is above the budget: it includes the workspace of operators"
            )
        if point.source == "features":
            notes.append("no prior task was trained under it: its error is predicted from similar plans")
        if not self.has_unit and all(trial.error is None for trial in (*trials, *self.others)):
            notes.append("the error of random guessing is not known in this metric: errors are relative to it")
        return tuple(notes)

    def _evidence(self) -> str:
        point, num_tasks, counted = self.point, self.num_tasks, (self.answer.trials, self.others)
        num_own, num_others = (sum(trial.status not in UNFINISHED for trial in trials) for trials in counted)
        after = f"after {num_own} trial{'s' * (num_own != 1)}"
        trials = f"{after} of its own and {num_others} known before" if num_others else after if num_own else "without a trial"
        measured = "" if point.measured is None else f" (measured {point.measured:.4f})"
        return f"{trials}{measured} and from {num_tasks} prior task{'s' * (num_tasks != 1)} ({self.answer.prior})"


def say_use_of_trials(gain: float, is_settled: bool) -> str:
    """Return a sentence, for a pick without trials, on whether trials would help: not if `is_settled`, else by `gain`."""
    if is_settled:
        return (
            "Trials are not expected to change this choice: the plans that fit are about as accurate, by what earlier tasks show."
        )
    return f"No trial ran; trials are expected to find a plan with an error lower by {gain:.4f} or more."


def stopped_early(point: Point) -> str:
    """Return a sentence on why fewer trials ran than were allowed; `point` is the picked plan."""
    if point.plan.quantizes_nothing:
        return "Stopped early: nothing is quantized under this plan, so that its errors are the baseline's."
    return (
        f"Stopped early: more trials are not expected to lower the error by more than {ENOUGH:.0%} of one run's standard deviation."
    )


def explain_nothing_trains(within: Sequence[Point], trials: Sequence[Trial]) -> str:
    """Return a text on why no plan could be trained within the budget, although those of `within` were predicted to fit."""
    last = next((trial for trial in reversed(trials) if trial.status is not Status.DONE), None)
    details = f" The last trial: {last.status.value}, {last.reason}." if last is not None else ""
    if excess := max((point.needs - point.predicted_bytes for point in within), default=0):
        details += f" Trials took up to {say_bytes(excess)} more than predicted; {_least(within)} {CHANNELS_LAST_ADVICE}"
    head = f"{len(within)} plans fit by their predicted peaks and none could be trained within the budget."
    return f"{head}{details} Raise the budget, or lower the batch."


def _least(points: Sequence[Point]) -> str:
    least = min(points, key=lambda point: (not point.trains, point.needs))
    if least.measured_bytes is not None:
        return f"the smallest, {least.label}, took {say_bytes(least.measured_bytes)}."
    return f"with that the smallest, {least.label}, needs {say_bytes(least.needs)}."


def say_ties(ties: Sequence[str], num_fits: int) -> str:
    """Return a sentence on how many of the `num_fits` plans that fit may be as good as the picked one: those labelled `ties`."""
    if num_fits == 1:
        return "No other plan fits."
    if not ties:
        return f"None of the {num_fits - 1} other plans that fit is likely to be better."
    more = f" and {len(ties) - NUM_NAMED_TIES} more" if len(ties) > NUM_NAMED_TIES else ""
    named = ", ".join(map(repr, ties[:NUM_NAMED_TIES]))  # quoted, since labels contain commas
    return f"{len(ties)} of the {num_fits - 1} other plans that fit may be as good: {named}{more}."


def say_time(frontier: Frontier, point: Point, budget_bytes: int, *, is_by_error: bool = True) -> str:
    """Return a sentence on the step time of the picked plan, and if `is_by_error`, on those of equally accurate plans."""
    if not point.step_source:
        return "No step time was measured."
    step = f"{say_step(point.step_seconds, point.step_ratio)} ({TIMED[point.step_source]})"
    others = frontier.as_accurate(point.label, budget_bytes) if is_by_error else ()
    if not others:
        return f"Its step time is {step}."
    plans = "1 other plan that fits is" if len(others) == 1 else f"{len(others)} other plans that fit are"
    apart = f"mean errors at most {frontier.tie_error:.4f} apart, {AS_ACCURATE:g} standard deviations of a run"
    head = f"{plans} as accurate as this one ({apart})"
    own, *times = comparable_times(map(step_times, (point, *others)))
    known = [time for time in times if time == time]
    if not known:
        return f"{head}; none of them has a known step time, its own is {step}."
    among = "" if len(known) == len(others) else f"of the {len(known) + 1} with a known step time "
    rank = "the quickest" if own <= min(known) else f"within {SAME_TIME:.0%} of the quickest"
    return f"{head}; {among}it is {rank}: {step}."
