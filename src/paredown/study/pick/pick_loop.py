"""Run one pick: predict the error of every candidate plan, choose which plan to try next, and give the answer.

    trials so far  ->  posterior  ->  acquisition  ->  the next trial, until `evaluations` trials ran or no trial is worth its cost

The answer is a `Picked`: the plan, the Pareto front, and sentences for why this plan, how sure that is, and what the trials cost.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from statistics import median

import numpy as np
from numpy.typing import NDArray

from paredown.errors import BudgetError, TaskError
from paredown.plan.plan import Plan
from paredown.study.pick import posterior, reasons
from paredown.study.pick.answer import Frontier, Picked, Point, comparable_times
from paredown.study.pick.candidates import Candidates, TaskStep
from paredown.study.pick.pareto import undominated
from paredown.study.pick.task_prior import WORST, TaskPrior
from paredown.study.sweeps.measurement import Measurer, TrialCallback
from paredown.study.tasks.trial import Status, Trial

Array = NDArray[np.float64]
Indices = NDArray[np.intp]
SMALLEST = "smallest"  # label of a plan that is added to the front where nothing fits
MOST_FAILURES = 3  # failed trials without a successful one: then the task is at fault, not the plan


@dataclass
class PickLoop:
    """Holds the candidate plans, the prior and the trials of one pick, and decides which trial to run next, and when to stop.

    `unit`: the error of random guessing, by which errors are divided. If it is None, the first trial sets it so that its error equals the
    prior's mean for its plan. The bytes that a trial took beyond its prediction (its excess) are expected of other plans too. `device`:
    name of the device that the plan is for, as trials record it. `others`: trials of the same task that a database already had.
    `max_error_increase`: if given, the pick is the smallest plan whose error is, with the probability `confidence`, at most this much
    above the baseline's, instead of the plan of least error. `predict_seconds`: a cost model, from a plan to its step time.
    """

    task: str
    metric: str
    unit: float | None
    budget_bytes: int
    step: TaskStep
    candidates: Candidates
    task_prior: TaskPrior
    device: str = ""
    max_error_increase: float | None = None
    confidence: float = 0.9
    predict_seconds: Callable[[Plan], float | None] | None = None
    prior: posterior.Prior = field(init=False)
    trials: list[Trial] = field(default_factory=list[Trial])
    num_done: int = 0  # trials that count as evaluations
    others: list[Trial] = field(default_factory=list[Trial])
    is_settled: bool = False
    _index_of: dict[object, int] = field(init=False, repr=False)
    _exact: frozenset[int] = field(init=False, repr=False)  # the candidates that quantize nothing: their errors are the baseline's

    def __post_init__(self) -> None:
        rows = self.candidates
        self.prior = self.task_prior.covering(rows.error_columns, rows.features, rows.points)
        self._index_of = {row.plan.key: i for i, row in enumerate(rows.rows)}
        self._exact = frozenset(i for i, row in enumerate(rows.rows) if row.plan.quantizes_nothing)

    # --- the posterior ------------------------------------------------------------------------------------------------

    def learn(self, own_trials: Iterable[Trial], others: Iterable[Trial] = ()) -> None:
        """Add finished trials of this pick, and `others`, trials of the same task from other sweeps of its database."""
        own_trials = list(own_trials)
        self.trials += own_trials
        self.num_done += len(own_trials)
        self.others += others
        self._stop_if_all_failed(MOST_FAILURES)

    def _stop_if_all_failed(self, min_trials: int) -> None:
        """Raise TaskError if there are at least `min_trials` trials and all of them failed: then the task is wrong, not a plan."""
        num_trials = len(self.trials)
        if num_trials >= min_trials and all(trial.status is Status.FAILED for trial in self.trials):
            failed = f"{num_trials} trial{'s' * (num_trials != 1)} of {num_trials} failed"
            raise TaskError(f"task {self.task!r}: {failed}. {self.trials[-1].reason}")

    @property
    def known(self) -> list[tuple[int, Trial]]:
        """Return all trials of candidate plans, each with the index of its plan."""
        return self._indexed((*self.trials, *self.others))

    @property
    def _on_this_device(self) -> list[tuple[int, Trial]]:
        """Return the trials on this device, each with the index of its plan; trials of this pick that name no device are included."""
        own_trials = [trial for trial in self.trials if trial.device in ("", self.device)]
        return self._indexed((*own_trials, *(trial for trial in self.others if trial.device == self.device)))

    def _indexed(self, trials: Iterable[Trial]) -> list[tuple[int, Trial]]:
        return [(self._index_of[trial.plan.key], trial) for trial in trials if trial.plan.key in self._index_of]

    def runs(self) -> list[posterior.Run]:
        """Return the finished trials as runs (plan, error), with errors relative to random guessing, infinite if it diverged."""
        finished = [(plan, trial) for plan, trial in self.known if trial.status not in reasons.UNFINISHED]
        errors = [min(WORST, trial.error / self._unit) if trial.error is not None else np.inf for _, trial in finished]
        return [posterior.Run(plan, error) for (plan, _), error in zip(finished, errors, strict=True)]

    @property
    def _unit(self) -> float:
        """Return the error of random guessing, by which errors are divided; if it is unknown, a substitute from the first trial."""
        if self.unit is not None:
            return self.unit
        first = next(((plan, trial.error) for plan, trial in self.known if trial.error is not None), None)
        if first is None:
            return 1.0
        expected = posterior.Estimate.after(self.prior, self.candidates.memory, []).means[first[0]]
        return first[1] / expected if first[1] > 0 and expected > 0 else 1.0

    def blocked(self) -> set[int]:
        """Return the indices of plans that cannot be trained here: a trial ran out of memory, or one of this pick failed or was killed.

        Failures in other sweeps do not count, since they may have another cause than the plan. A plan that has not run is blocked too if
        its predicted peak is at least that of a plan that ran out of memory.
        """
        failed = {plan for plan, trial in self._indexed(self.trials) if trial.status in (Status.FAILED, Status.KILLED)}
        out_of_memory = {plan for plan, trial in self._on_this_device if trial.status is Status.OUT_OF_MEMORY}
        if out_of_memory:
            least, ran = self.candidates.memory[list(out_of_memory)].min(), {plan for plan, _ in self._peaks}
            out_of_memory |= set(np.flatnonzero(self.candidates.memory >= least).tolist()) - ran
        return failed | out_of_memory

    @property
    def _peaks(self) -> list[tuple[int, int]]:
        """Return the measured peak bytes of each finished trial on this device, with the index of its plan."""
        ended = [(plan, trial) for plan, trial in self._on_this_device if trial.status not in reasons.UNFINISHED]
        return [(plan, trial.measured_peak_bytes) for plan, trial in ended if trial.measured_peak_bytes is not None]

    def expected(self) -> Array:
        """Return the expected peak bytes of each plan, (plans,): predicted ones plus what trials took beyond their prediction."""
        memory, peaks = self.candidates.memory, self._peaks
        return expected_peaks(memory, peaks) if peaks else memory

    def needed(self) -> Array:
        """Return the bytes that each plan needs, (plans,); infinite for plans that need more than the baseline or cannot be trained."""
        memory = self.expected()
        baseline = self._index_of.get(Plan().key)
        if baseline is not None:
            memory[memory > memory[baseline]] = np.inf
        memory[list(self.blocked())] = np.inf
        return memory

    def fits(self) -> Indices:
        """Return the indices of the plans within the budget that can be trained."""
        return np.flatnonzero(self.needed() <= self.budget_bytes)

    def step_times(self) -> list[tuple[float | None, float | None, str]]:
        """Return (seconds, multiple of the baseline's, source) of each plan's step; None and "" if it is unknown.

        The time is measured on this device, else predicted, else the median multiple on the prior's tasks.
        """
        trials = [(plan, trial) for plan, trial in self._on_this_device if trial.step_seconds is not None]
        baselines = [trial.baseline_step_seconds for _, trial in trials if trial.baseline_step_seconds is not None]
        predict = self.predict_seconds or (lambda plan: None)
        baseline = median(baselines) if baselines else predict(Plan())
        times: list[tuple[float | None, float | None, str]] = []
        for i, row in enumerate(self.candidates.rows):
            measured = [trial.step_seconds or 0.0 for plan, trial in trials if plan == i]
            predicted, ratios = predict(row.plan), self.task_prior.prior_data.step_ratio[:, row.column]
            # a template that checkpoints here may pack there
            is_known = row.column >= 0 and (row.plan.changes_nothing or not row.plan.quantizes_nothing)
            ratios = ratios[np.isfinite(ratios) & is_known]
            if measured:
                times.append((median(measured), median(measured) / baseline if baseline else None, "measured"))
            elif predicted is not None:
                full = predict(Plan()) or baseline
                times.append((predicted, predicted / full if full else None, "predicted"))
            elif len(ratios):
                ratio = float(np.median(ratios))
                times.append((ratio * baseline if baseline else None, ratio, "prior"))
            else:
                times.append((None, None, ""))
        return times

    # --- trials ------------------------------------------------------------------------------------------------

    def search(self, measurer: Measurer, evaluations: int, *, seed: int = 0, progress: TrialCallback | None = None) -> None:
        """Run trials by `measurer` until `evaluations` have run or none is worth its cost; raise TaskError if all failed.

        The first trial of each plan has the seed `seed`, its next one the next seed.
        """
        while self.num_done < evaluations and not self.is_settled:
            plan = self.next_plan(evaluations - self.num_done)
            if plan is None:
                break
            label, done = self.candidates.rows[plan].label, self.num_done

            def step(current_step: int, num_steps: int, loss: float, done: int = done, label: str = label) -> None:
                if progress is not None:
                    text = f"{label}: step {current_step} of {num_steps}, training loss {loss:.4g}"
                    progress(done + current_step / max(num_steps, 1), evaluations, text)

            if progress is not None:
                progress(done, evaluations, f"trying {label}")
            taken = {trial.seed for other, trial in self.known if other == plan}
            fresh_seed = next(number for number in count(seed) if number not in taken)
            trials = measurer.measure(self.candidates.rows[plan].plan, fresh_seed, step)
            self.learn(trials)
            if progress is not None:
                progress(self.num_done, evaluations, "; ".join(f"{label}: {_outcome(trial)}" for trial in trials))
        self._stop_if_all_failed(1)

    def next_plan(self, num_left: int) -> int | None:
        """Return the index of the plan to try next; None if no plan can fit, or none of the `num_left` trials is worth its cost."""
        fits, runs, estimate = self.fits(), self.runs(), self.estimate()
        if not len(fits):
            return self._smallest_untried()
        if (margin := self.margin()) is not None:
            num_runs = Counter(run.plan for run in runs)
            plan = posterior.propose_for_margin(estimate, margin, self.budget_bytes, num_runs, is_last=num_left == 1)
            self.is_settled = plan is None
            return plan
        diverged = [run.plan for run in runs if not np.isfinite(run.error)]
        fits = fits if np.isin(fits, diverged).all() else np.setdiff1d(fits, diverged)
        best = estimate.best(self.budget_bytes, is_cautious=False).plan  # it may be one that is picked only after a trial
        times = comparable_times(time[:2] for time in self.step_times())
        is_least = best in self._exact and not (times[fits] < times[best]).any()  # no trial finds less error, or a quicker plan
        if best in estimate.tried and (is_least or posterior.is_settled(estimate, fits)):
            self.is_settled = True
            return None
        if best not in estimate.tried and num_left == 1:
            return best
        return posterior.propose(estimate, fits)

    def _smallest_untried(self) -> int | None:
        """Return the untried plan of least expected peak (None: there is none); it is tried before the answer is that nothing fits."""
        needed = self.needed()
        within = np.flatnonzero((self.candidates.memory <= self.budget_bytes) & np.isfinite(needed))
        if not (len(within) and self._peaks):
            return None
        tried = {plan for plan, _ in self._peaks}
        least = min(within.tolist(), key=lambda plan: (needed[plan], plan not in tried))
        return None if least in tried else least

    # --- the answer ---------------------------------------------------------------------------------------------

    def estimate(self) -> posterior.Estimate:
        """Return the predicted error of every plan, given the prior and the trials, relative to random guessing."""
        estimate = posterior.Estimate.after(self.prior, self.needed(), self.runs())
        return replace(estimate, exact=self._exact, times=comparable_times(time[:2] for time in self.step_times()))

    def margin(self) -> posterior.ErrorMargin | None:
        """Return how far the picked plan's error may lie above the baseline's; None without `max_error_increase`."""
        if self.max_error_increase is None:
            return None
        return posterior.ErrorMargin(self.max_error_increase / self._unit, self.confidence, self._index_of[Plan().key])

    def choice(self) -> posterior.BudgetChoice:
        """Return the plan of least expected error within the budget; with `max_error_increase`, the smallest that it allows."""
        estimate, margin = self.estimate(), self.margin()
        return estimate.best(self.budget_bytes) if margin is None else estimate.smallest(self.budget_bytes, margin)

    def answer(self, seconds: float) -> Picked:
        """Return the answer after the trials so far; `seconds` is the time that the pick took."""
        estimate = self.estimate()
        points = self._points(estimate)
        answer = Picked(
            task=self.task,
            plan=None,
            frontier=Frontier(tuple(points), self.metric, self.step.full_bytes, estimate.tie_error * self._unit),
            reason="",
            budget_bytes=self.budget_bytes,
            full_bytes=self.step.full_bytes,
            trials=tuple(self.trials),
            seconds=seconds,
            prior=self.task_prior.prior_data.name,
        )
        try:
            choice = self.choice()
        except BudgetError:
            return self._nothing_picked(answer, points)
        is_by_error = self.max_error_increase is None
        point = replace(points[choice.plan], on_front=True)  # nothing that fits was preferred to it
        others = (other for other in answer.frontier.points if other.label != point.label)
        frontier = replace(answer.frontier, points=(*others, point))
        time = reasons.say_time(frontier, point, self.budget_bytes, is_by_error=is_by_error)
        certainty = f"{self._certainty(estimate, choice, points)} {time}"
        early = "" if not self.is_settled else reasons.stopped_early(point) if is_by_error else reasons.DECIDED
        text = reasons.AnswerText(answer, point, tuple(self.others), len(self.task_prior.prior_data.tasks), self.unit is not None)
        return replace(
            answer,
            plan=point.plan,
            label=point.label,
            frontier=frontier,
            ties=tuple(points[plan].label for plan in choice.ties),
            reason=text.reason(certainty, early),
            notes=text.notes(),
        )

    def _certainty(self, estimate: posterior.Estimate, choice: posterior.BudgetChoice, points: Sequence[Point]) -> str:
        """Return a sentence on how certain `choice` is: which plans may be as good, or how probably its error is low enough."""
        if (margin := self.margin()) is not None:
            return self._say_margin(points[margin.baseline], choice.plan, float(estimate.within_margin(margin)[choice.plan]))
        certainty = reasons.say_ties([points[plan].label for plan in choice.ties], len(self.fits()))
        if self.known:
            return certainty
        gain = float(posterior.expected_gains(estimate, self.fits(), has_noise=False).max())
        return f"{certainty} {reasons.say_use_of_trials(gain, posterior.is_settled(estimate, self.fits()))}"

    @property
    def _said_margin(self) -> str:
        return f"at most {self.max_error_increase:g} above the baseline's with a probability of {100 * self.confidence:g} % or more"

    def _say_margin(self, baseline: Point, plan: int, chance: float) -> str:
        """Return a sentence that explains the pick: the smallest plan whose error is probably (`chance`) near the baseline's."""
        if plan == self._index_of[Plan().key]:
            return f"No smaller plan has an error {self._said_margin}."
        known = f"the baseline has {baseline.mean:.4f} +- {baseline.deviation:.4f} (standard deviation)"
        return f"It is the smallest plan that fits with an error {self._said_margin}: {100 * chance:.0f} %; {known}."

    def _points(self, estimate: posterior.Estimate) -> list[Point]:
        rows, blocked, fits, needed = self.candidates.rows, self.blocked(), set(self.fits().tolist()), self.expected()
        times, every = self.step_times(), np.arange(len(rows))
        means = estimate.errors(every, is_cautious=False)
        front = undominated(estimate.memory, estimate.errors(every), estimate.times) & np.isfinite(estimate.memory)
        return [
            Point(
                label=row.label,
                plan=row.plan,
                predicted_bytes=row.predicted_bytes,
                mean=max(float(means[i]), 0.0 if self.unit is not None else -np.inf) * self._unit,
                deviation=float(estimate.deviations[i]) * self._unit,
                measured=_mean([trial.error for plan, trial in self.known if plan == i]),
                measured_bytes=max((nbytes for plan, nbytes in self._peaks if plan == i), default=None),
                on_front=bool(front[i]),
                fits=i in fits,
                source="measured" if i in estimate.tried else "prior" if row.column >= 0 else "features",
                trains=i not in blocked,
                num_trials=sum(trial.error is not None for plan, trial in self.known if plan == i),
                needed_bytes=int(needed[i]) if needed[i] > row.predicted_bytes else None,
                step_seconds=times[i][0],
                step_ratio=times[i][1],
                step_source=times[i][2],
            )
            for i, row in enumerate(rows)
        ]

    def _nothing_picked(self, answer: Picked, points: Sequence[Point]) -> Picked:
        """Return `answer` with a reason why no plan was picked, and with a point for the smallest possible plan if that is known."""
        if len(self.fits()):
            return replace(answer, reason=f"no plan that fits has an error {self._said_margin}. Raise the budget or the margin.")
        if within := [point for point in points if point.predicted_bytes <= self.budget_bytes]:
            return replace(answer, reason=reasons.explain_nothing_trains(within, self.trials))
        try:
            if self.step.trace_of is not None:
                self.step.assigned(self.budget_bytes)
        except BudgetError as error:
            least = min(points, key=lambda point: point.predicted_bytes)
            if error.smallest_bytes is None or error.smallest_bytes >= least.predicted_bytes:
                return replace(answer, reason=f"{error} The smallest plan is {least.label}.")
            frontier = replace(answer.frontier, points=(*answer.frontier.points, self._smallest(error.smallest_bytes)))
            return replace(answer, frontier=frontier, reason=f"{error} It is the plan {SMALLEST!r} of the Pareto front.")
        return replace(answer, reason=answer.frontier.explain_nothing_fits(self.budget_bytes))

    def _smallest(self, nbytes: int) -> Point:
        """Make the plan of the smallest possible peak, `nbytes`, and return it as a point with a predicted error."""
        plan = self.step.assigned(nbytes)
        prior = self.task_prior.covering(np.array([-1]), self.step.features(plan)[None], self.candidates.points)
        estimate = posterior.Estimate.after(prior, np.array([float(nbytes)]), [])
        mean, deviation = float(estimate.means[0]) * self._unit, float(estimate.deviations[0]) * self._unit
        return Point(SMALLEST, plan, self.step.bytes_of(plan), mean, deviation, on_front=True, fits=False, source="features")


def expected_peaks(memory: Array, peaks: Sequence[tuple[int, int]]) -> Array:
    """Return the expected peak bytes of each plan, (plans,): the predicted `memory` plus the excess of a trial.

    The excess of a trial is its measured peak less its predicted one; `peaks` has (plan, measured bytes) of each trial. A plan without a
    trial gets the excess of the trial with the nearest prediction; of several trials, the one of most excess counts.
    """
    tried, measured = np.array([plan for plan, _ in peaks]), np.array([float(nbytes) for _, nbytes in peaks])
    distance = np.abs(memory[:, None] - memory[tried])
    distance[tried, np.arange(len(tried))] = -1.0  # a plan's own trial comes before that of another plan of the same size
    is_nearest = distance == distance.min(axis=1, keepdims=True)
    return memory + np.where(is_nearest, measured - memory[tried], 0.0).max(axis=1, initial=0.0)


def _mean(errors: Iterable[float | None]) -> float | None:
    finite = [error for error in errors if error is not None]
    return float(np.mean(finite)) if finite else None


def _outcome(trial: Trial) -> str:
    return f"error {trial.error:.4g}" if trial.error is not None else f"{trial.status.value}, {trial.reason}"
