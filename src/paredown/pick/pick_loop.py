"""A pick in the making: what is known of each plan, what is tried next, and what is answered in the end.

A pick in sentences: why this plan, how sure that is, what it rests on and what it cost.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count

import numpy as np
from numpy.typing import NDArray

from paredown.errors import BudgetError, TaskError
from paredown.pick.acquisition import ENOUGH, TURNS, is_settled, propose
from paredown.pick.answer import Frontier, Picked, Point
from paredown.pick.candidates import Candidates, TaskStep
from paredown.pick.pareto import undominated
from paredown.pick.posterior import BudgetChoice, Estimate, Prior
from paredown.pick.seed_effects import SeedRun
from paredown.pick.task_prior import WORST, TaskPrior
from paredown.plan.plan import Plan
from paredown.sizes import say_bytes
from paredown.sweeps.measurement import Measurer, TrialCallback
from paredown.tasks.trial import Status, Trial

NAMED = 3  # ties that a reason names
TURNED = "With convolutions, Task(..., channels_last=True) spares a GPU the room to turn tensors round."
UNFINISHED = (Status.OUT_OF_MEMORY, Status.FAILED, Status.KILLED)  # trials that say nothing of an error


@dataclass(frozen=True)
class AnswerText:
    """What is told of: the budget, the step as it is written, the trials, earlier tasks, and trials of the task known besides."""

    budget_bytes: int
    full_bytes: int
    trials: tuple[Trial, ...]
    learned: TaskPrior
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


# --- A pick in the making ---

Array = NDArray[np.float64]
Indices = NDArray[np.intp]
MOST_USED = 8  # earlier tasks that an answer names
MOST_FAILURES = 3  # trials that may fail, and none succeed: then it is not the plan


@dataclass
class PickLoop:
    """`unit`: the error of a blind guess; where it is not known, what makes the first trial as good as earlier tasks were under its plan.

    `is_strict`: measured peaks above the budget do not fit either, as on a GPU. `device`: what trials call the one that is planned for.
    """

    task: str
    metric: str
    unit: float | None
    budget_bytes: int
    step: TaskStep
    candidates: Candidates
    learned: TaskPrior
    is_strict: bool = False
    device: str = ""
    prior: Prior = field(init=False)
    trials: list[Trial] = field(default_factory=list[Trial])
    num_done: int = 0  # trials that count as evaluations
    others: list[Trial] = field(default_factory=list[Trial])
    is_settled: bool = False
    _place: dict[object, int] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        rows = self.candidates
        self.prior = self.learned.covering(rows.columns, rows.features, rows.points)
        self._place = {_key(row.plan): i for i, row in enumerate(rows.rows)}

    # --- what is known ------------------------------------------------------------------------------------------------

    def learn(self, own: Iterable[Trial], others: Iterable[Trial] = ()) -> None:
        """Trials that are there: made for this pick, or known besides."""
        own = list(own)
        self.trials += own
        self.num_done += len(own)
        self.others += others
        self._stop_if_all_failed(MOST_FAILURES)

    def _stop_if_all_failed(self, least: int) -> None:
        """TaskError where there are trials, at least so many, and none did anything but fail: that says nothing of plans."""
        num = len(self.trials)
        if num >= least and all(trial.status is Status.FAILED for trial in self.trials):
            raise TaskError(f"task {self.task!r}: {num} trial{'s' * (num != 1)} of {num} failed. {self.trials[-1].reason}")

    @property
    def known(self) -> list[tuple[int, Trial]]:
        """All trials, with the plan of each."""
        return self._placed((*self.trials, *self.others))

    @property
    def _here(self) -> list[tuple[int, Trial]]:
        """Those whose bytes, or lack of them, count: trials of this device; made for this pick also where they do not say."""
        own = [trial for trial in self.trials if trial.device in ("", self.device)]
        return self._placed((*own, *(trial for trial in self.others if trial.device == self.device)))

    def _placed(self, trials: Iterable[Trial]) -> list[tuple[int, Trial]]:
        return [(self._place[_key(trial.plan)], trial) for trial in trials if _key(trial.plan) in self._place]

    def runs(self) -> list[SeedRun]:
        """Trials that came to an end, their errors in parts of a blind guess."""
        found = [(plan, trial) for plan, trial in self.known if trial.status not in UNFINISHED]
        errors = [min(WORST, trial.error / self._unit) if trial.error is not None else WORST for _, trial in found]
        return [SeedRun(plan, error, trial.seed) for (plan, trial), error in zip(found, errors, strict=True)]

    @property
    def _unit(self) -> float:
        """What one part of a blind guess is in the task's metric."""
        if self.unit is not None:
            return self.unit
        first = next(((plan, trial.error) for plan, trial in self.known if trial.error is not None), None)
        if first is None:
            return 1.0
        expected = Estimate.of(self.prior, self.candidates.memory).means[first[0]]
        return first[1] / expected if first[1] > 0 and expected > 0 else 1.0

    def blocked(self) -> set[int]:
        """Plans that cannot be trained here: a trial had no memory, or failed. Failures of other sweeps may be theirs, not the plan's.

        Where measured peaks count, those that are predicted to take as much as one without memory are not tried either.
        """
        failed = {plan for plan, trial in self._placed(self.trials) if trial.status in (Status.FAILED, Status.KILLED)}
        short = {plan for plan, trial in self._here if trial.status is Status.OUT_OF_MEMORY}
        if short and self.is_strict:
            least, fine = self.candidates.memory[list(short)].min(), {plan for plan, _ in self._peaks}
            short |= set(np.flatnonzero(self.candidates.memory >= least).tolist()) - fine
        return failed | short

    @property
    def _peaks(self) -> list[tuple[int, int]]:
        """Measured peaks of trials here that were not broken off: what those had reached is not what they need."""
        ended = [(plan, trial) for plan, trial in self._here if trial.status not in UNFINISHED]
        return [(plan, trial.measured_peak_bytes) for plan, trial in ended if trial.measured_peak_bytes is not None]

    def expected(self) -> Array:
        """The peaks of plans: predicted, and where measured ones count, what the trial of the nearest prediction took beyond its own."""
        memory, peaks = self.candidates.memory, self._peaks
        if not (peaks and self.is_strict):
            return memory.copy()
        tried, most = np.array([plan for plan, _ in peaks]), np.array([float(nbytes) for _, nbytes in peaks])
        distance = np.abs(memory[:, None] - memory[tried])
        distance[tried, np.arange(len(tried))] = -1.0  # its own trial is nearer than that of a plan of the same size
        nearest = distance == distance.min(axis=1, keepdims=True)
        excess = np.where(nearest, most - memory[tried], -np.inf).max(axis=1)
        return memory + np.maximum(excess, 0.0)

    def needed(self) -> Array:
        """Bytes that plans need: those that are expected; endless where they do not train."""
        memory = self.expected()
        memory[list(self.blocked())] = np.inf
        return memory

    def fits(self) -> Indices:
        """Plans that may be taken."""
        return np.flatnonzero(self.needed() <= self.budget_bytes)

    # --- what is tried ------------------------------------------------------------------------------------------------

    def search(self, measurer: Measurer, evaluations: int, *, seed: int = 0, told: TrialCallback | None = None) -> None:
        """Trials, until there are `evaluations` of them or nothing more is worth one; TaskError where all of them failed."""
        while self.num_done < evaluations and not self.is_settled:
            plan = self.next_plan(evaluations - self.num_done)
            if plan is None:
                break
            label, done = self.candidates.rows[plan].label, self.num_done

            def step(now: int, of: int, loss: float, done: int = done, label: str = label) -> None:
                if told is not None:
                    told(done + now / max(of, 1), evaluations, f"{label}: step {now} of {of}, training loss {loss:.4g}")

            if told is not None:
                told(done, evaluations, f"trying {label}")
            found = measurer.measure(self.candidates.rows[plan].plan, self._fresh_seed(plan, seed), step)
            self.learn(found)
            if told is not None:
                told(self.num_done, evaluations, "; ".join(f"{label}: {_said(trial)}" for trial in found))
        self._stop_if_all_failed(1)

    def _fresh_seed(self, plan: int, seed: int) -> int:
        """The first from `seed` on that this plan was not tried with."""
        taken = {trial.seed for one, trial in self.known if one == plan}
        return next(number for number in count(seed) if number not in taken)

    def next_plan(self, num_left: int) -> int | None:
        """The plan to try next; None where nothing can fit, or nothing more is worth a trial."""
        fits, runs = self.fits(), self.runs()
        if not len(fits):
            return self._smallest_untried()
        belief, memory = self.prior.after(runs), self.candidates.memory
        best, tried = self.choice().plan, {run.plan for run in runs}
        known = {self._twin(plan) for plan in tried}
        if self._twin(best) in known and is_settled(self.prior, belief, fits):
            self.is_settled = True
            return None
        if self._twin(best) not in known and num_left == 1:
            return best
        telling = np.array([plan for plan in fits if plan in tried or self._twin(plan) not in known], dtype=np.intp)
        turn = TURNS[min(len(self.known), len(TURNS) - 1)]
        return propose(turn, self.prior, belief, telling, memory, tried=tried) if len(telling) else None

    def _smallest_untried(self) -> int | None:
        """The plan that is expected to take least, where that is a guess by other trials: before nothing is said to fit, it is tried."""
        needed = self.needed()
        within = np.flatnonzero((self.candidates.memory <= self.budget_bytes) & np.isfinite(needed))
        if not (len(within) and self.is_strict and self._peaks):
            return None
        tried = {plan for plan, _ in self._peaks}
        least = min(within.tolist(), key=lambda plan: (needed[plan], plan not in tried))
        return None if least in tried else least

    def _twin(self, plan: int) -> int:
        """The same number for plans that come to the same runs: trying a second one tells nothing."""
        column = self.candidates.rows[plan].column
        return int(self.learned.twins[column]) if column >= 0 else -1 - plan

    # --- what is answered ---------------------------------------------------------------------------------------------

    def estimate(self) -> Estimate:
        """What is believed of all plans, in parts of a blind guess."""
        return Estimate.after(self.prior, self.needed(), self.runs())

    def choice(self) -> BudgetChoice:
        """The plan to take; BudgetError where nothing fits."""
        return self.estimate().best(self.budget_bytes)

    def answer(self, seconds: float) -> Picked:
        """All of it."""
        estimate = self.estimate()
        points = self._points(estimate)
        answer = Picked(
            task=self.task,
            plan=None,
            frontier=self._frontier(points),
            reason="",
            budget_bytes=self.budget_bytes,
            full_bytes=self.step.full_bytes,
            trials=tuple(self.trials),
            seconds=seconds,
            prior=self.learned.earlier.name,
            used=tuple(self.learned.used(estimate.belief)[:MOST_USED]),
        )
        try:
            choice = estimate.best(self.budget_bytes)
        except BudgetError:
            smallest, reason = self._nothing(points)
            return replace(answer, frontier=self._frontier([*points, *smallest]), reason=reason)
        return self._taken(answer, points[choice.plan], tuple(points[plan].label for plan in choice.ties))

    def _taken(self, answer: Picked, point: Point, ties: tuple[str, ...]) -> Picked:
        telling = AnswerText(self.budget_bytes, self.step.full_bytes, answer.trials, self.learned, tuple(self.others))
        reason = telling.why(point, ties, len(self.fits()), is_settled=self.is_settled)
        notes = telling.notes(point, self.candidates.num_left_out, has_unit=self.unit is not None)
        return replace(answer, plan=point.plan, label=point.label, ties=ties, reason=reason, notes=notes)

    def _points(self, estimate: Estimate) -> list[Point]:
        """A point for each plan, in the order of the candidates."""
        rows, blocked, fits, needed = self.candidates.rows, self.blocked(), set(self.fits().tolist()), self.expected()
        front = undominated(estimate.memory, estimate.means) & np.isfinite(estimate.memory)
        return [
            Point(
                label=row.label,
                plan=row.plan,
                predicted_bytes=row.predicted_bytes,
                mean=max(float(estimate.means[i]), 0.0 if self.unit is not None else -np.inf) * self._unit,
                deviation=float(estimate.deviations[i]) * self._unit,
                measured=_mean([trial.error for plan, trial in self.known if plan == i]),
                measured_bytes=max((nbytes for plan, nbytes in self._peaks if plan == i), default=None),
                on_front=bool(front[i]),
                fits=i in fits,
                source="measured" if i in estimate.measured else "prior" if row.column >= 0 else "features",
                trains=i not in blocked,
                num_trials=sum(trial.error is not None for plan, trial in self.known if plan == i),
                needed_bytes=int(needed[i]) if needed[i] > row.predicted_bytes else None,
            )
            for i, row in enumerate(rows)
        ]

    def _frontier(self, points: Sequence[Point]) -> Frontier:
        return Frontier(tuple(points), self.metric, self.step.full_bytes)

    def _nothing(self, points: Sequence[Point]) -> tuple[list[Point], str]:
        """The smallest plan there is, where it is none of the points, and the sentences that say why nothing fits."""
        within = [point for point in points if point.predicted_bytes <= self.budget_bytes]
        if within:
            return [], why_none_trains(within, self.trials)
        least = min(points, key=lambda point: point.predicted_bytes)
        if self.step.trace_of is None:
            return [], why_nothing_is_small_enough(least, self.budget_bytes)
        try:
            self.step.made(self.budget_bytes)
        except BudgetError as error:
            smallest = error.smallest_bytes
            if smallest is None or smallest >= least.predicted_bytes:
                return [], f"{error} The smallest plan is {least.label}."
            return self._smallest(smallest), f"{error} It is the plan {SMALLEST!r} of the frontier."
        return [], why_nothing_is_small_enough(least, self.budget_bytes)

    def _smallest(self, nbytes: int) -> list[Point]:
        """The plan of the smallest peak, judged by its features."""
        plan = self.step.made(nbytes)
        rows = self.candidates
        prior = self.learned.covering(np.array([-1]), self.step.features(plan)[None], rows.points)
        found = Estimate.of(prior, np.array([float(nbytes)]))
        mean, deviation = float(found.means[0]) * self._unit, float(found.deviations[0]) * self._unit
        return [Point(SMALLEST, plan, self.step.bytes_of(plan), mean, deviation, on_front=True, fits=False, source="features")]


SMALLEST = "smallest"


def _key(plan: Plan) -> object:
    return plan.rules, plan.recompute


def _mean(errors: Iterable[float | None]) -> float | None:
    found = [error for error in errors if error is not None]
    return float(np.mean(found)) if found else None


def _said(trial: Trial) -> str:
    return f"error {trial.error:.4g}" if trial.error is not None else f"{trial.status.value}, {trial.reason}"
