"""A pick in sentences: why this plan, how sure that is, what it rests on and what it cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paredown.plan.sizes import say_bytes
from paredown.plan.trial import Status, Trial
from paredown.search.choosing import ENOUGH
from paredown.search.learned import Learned
from paredown.search.picked import Point

NAMED = 3  # ties that a reason names
TURNED = "With convolutions, Task(..., channels_last=True) spares a GPU the room to turn tensors round."
UNFINISHED = (Status.OUT_OF_MEMORY, Status.FAILED, Status.KILLED)  # trials that say nothing of an error


@dataclass(frozen=True)
class Telling:
    """What is told of: the budget, the step as it is written, the trials, earlier tasks, and trials of the task known besides."""

    budget_bytes: int
    full_bytes: int
    trials: tuple[Trial, ...]
    learned: Learned
    others: tuple[Trial, ...] = ()

    def why(self, point: Point, ties: Sequence[str], num_fits: int, *, is_settled: bool) -> str:
        """Why this plan."""
        share = f"{100 * point.predicted_bytes / max(self.full_bytes, 1):.0f} % of the step as it is written"
        peak = f"{say_bytes(point.predicted_bytes)} of {say_bytes(self.budget_bytes)} ({share})"
        error = f"error {point.mean:.4f} +- {point.deviation:.4f}, {self._rests_on(point)}"
        more = f", {say_bytes(point.needs)} with what trials took beyond" if point.needs > point.predicted_bytes else ""
        parts = [f"{point.label}: predicted peak {peak}{more}; {error}.", _ties(ties, num_fits), self._family()]
        parts += [self._settled()] if is_settled else []
        return " ".join(part for part in parts if part)

    def notes(self, point: Point, num_left_out: int, *, has_unit: bool) -> tuple[str, ...]:
        """What else is to be known."""
        found: list[str] = []
        if self.trials:
            found.append(self._cost())
        bad = [trial for trial in self.trials if trial.status in (Status.DIVERGED, Status.OUT_OF_MEMORY, Status.FAILED)]
        found += [f"seed {trial.seed}, {trial.status.value}: {trial.reason}" for trial in bad]
        if point.measured_bytes is not None and point.measured_bytes > self.budget_bytes:
            found.append(
                f"its measured peak, {say_bytes(point.measured_bytes)}, is above the budget: scratch inside of operators is in it"
            )
        if point.source == "features":
            found.append("no earlier task was trained under it: it is judged by plans that are like it")
        if num_left_out:
            found.append(f"{num_left_out} plans of earlier tasks cannot be made for this step")
        if not has_unit and all(trial.error is None for trial in (*self.trials, *self.others)):
            found.append("what a blind guess has in this metric is not known: errors are in parts of that")
        return tuple(found)

    def _rests_on(self, point: Point) -> str:
        num, known = (sum(trial.status not in UNFINISHED for trial in trials) for trials in (self.trials, self.others))
        earlier = self.learned.prior.num_tasks
        own = f"after {num} trial{'s' * (num != 1)}"
        trials = f"{own} of its own and {known} known" if known else own if num else "without a trial"
        measured = "" if point.measured is None else f" (measured {point.measured:.4f})"
        return f"{trials}{measured} and from {earlier} earlier task{'s' * (earlier != 1)} ({self.learned.earlier.name})"

    def _family(self) -> str:
        learned = self.learned
        if learned.wanted and not learned.family:
            return f"No earlier task is of family {learned.wanted!r} or like it: all of them count alike."
        if learned.family != learned.wanted:
            return f"No earlier task is of family {learned.wanted!r}: those of {learned.family!r}, the nearest, came first."
        return ""

    def _settled(self) -> str:
        return f"Stopped early: more trials could not be expected to lower the error by more than {ENOUGH:.0%} of what one run varies by."

    def _cost(self) -> str:
        seconds = sum(trial.seconds or 0.0 for trial in self.trials)
        peak = max((trial.measured_peak_bytes or trial.predicted_peak_bytes or 0 for trial in self.trials), default=0)
        return f"{len(self.trials)} trial{'s' * (len(self.trials) != 1)} took {seconds:.1f} s and at most {say_bytes(peak)}"


def why_none_trains(within: Sequence[Point], trials: Sequence[Trial]) -> str:
    """Plans fit by what was predicted, and none of them could be trained."""
    last = next((trial for trial in reversed(trials) if trial.status is not Status.DONE), None)
    said = f" The last trial: {last.status.value}, {last.reason}." if last is not None else ""
    if excess := max((point.needs - point.predicted_bytes for point in within), default=0):
        said += f" Trials took up to {say_bytes(excess)} more than predicted; {_least(within)} {TURNED}"
    head = f"{len(within)} plans fit by their predicted peaks and none could be trained within the budget."
    return f"{head}{said} Raise the budget, or lower the batch."


def _least(points: Sequence[Point]) -> str:
    least = min(points, key=lambda point: (not point.trains, point.needs))
    if least.measured_bytes is not None:
        return f"the smallest, {least.label}, took {say_bytes(least.measured_bytes)}."
    return f"with that the smallest, {least.label}, needs {say_bytes(least.needs)}."


def why_nothing_is_small_enough(least: Point, budget_bytes: int) -> str:
    """No plan fits, and no search says more."""
    smallest = f"the smallest, {least.label}, needs {say_bytes(least.predicted_bytes)}"
    return f"no plan fits {say_bytes(budget_bytes)}; {smallest}. Raise the budget, or lower the batch."


def _ties(ties: Sequence[str], num_fits: int) -> str:
    if num_fits == 1:
        return "No other plan fits."
    if not ties:
        return f"None of the {num_fits - 1} other plans that fit is likely to be better."
    more = f" and {len(ties) - NAMED} more" if len(ties) > NAMED else ""
    named = ", ".join(map(repr, ties[:NAMED]))  # labels have commas of their own
    return f"{len(ties)} of the {num_fits - 1} other plans that fit may be as good: {named}{more}."
