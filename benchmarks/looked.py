"""Trials of a new task that are looked up among the runs that it has: in each draw other ones, and noise where there are none left.

    plans of a named level    differ by noise alone: the level's runs are dealt out to them anew, each once; then its mean and noise
    other plans               their own runs where they have several, with seeds in another order; else their mean, what the seed
                              does to all plans of the task, and noise; a plan of which a share of the runs diverged diverges with
                              that probability

Twins, which are the same to the last bit, get the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from seed_effects import VarianceParts, variance_parts_of, without_seed_effects

from paredown.plan.plan import Plan
from paredown.study.tasks.trial import Status, Trial

TASKS_OF_TWINS = 3  # at least, on which both plans ran with an equal seed


@dataclass(frozen=True)
class Row:
    """A task's runs (plans, seeds), NaN where there is none, the names of its plans' levels ("" none) and twins; `noise`: of one run.

    `calm`: plans that tell of seeds. `worst`: the error of a run that diverged.
    """

    runs: np.ndarray
    levels: np.ndarray
    twins: np.ndarray
    noise: float
    calm: np.ndarray
    worst: float = np.inf

    @cached_property
    def parts(self) -> VarianceParts:
        """What seeds do to all plans, and the rest, as variances."""
        return variance_parts_of(np.where(self.calm[:, None], self.runs, np.nan))

    @cached_property
    def level(self) -> np.ndarray:
        """The runs without what seeds do to all."""
        return without_seed_effects(self.runs[None], self.calm[None])[0]

    @cached_property
    def named(self) -> list[str]:
        """Levels that have names."""
        return [str(name) for name in dict.fromkeys(self.levels) if name]

    def of_level(self, name: str) -> np.ndarray:
        """The runs of a level, those of twins once."""
        found = without_twins(self.runs[None], self.twins)[0][self.levels == name]
        return found[np.isfinite(found)]

    @cached_property
    def means(self) -> np.ndarray:
        """Of each plan, (plans,), without what seeds do to all and runs that diverged; of its level where that has a name."""
        seen = np.isfinite(self.level) & (self.runs < self.worst)
        found = np.where(seen.any(axis=1), np.where(seen, self.level, 0.0).sum(axis=1) / np.maximum(seen.sum(axis=1), 1), np.nan)
        for name in self.named:
            found[self.levels == name] = self.of_level(name).mean() if len(self.of_level(name)) else np.nan
        return found

    @cached_property
    def noises(self) -> np.ndarray:
        """Of one run of each plan beside what its seed does, (plans,); of all runs of its level where that has a name."""
        rest = self.parts.rest
        found = np.full(len(self.runs), self.noise if np.isnan(rest) else np.sqrt(rest))
        for name in self.named:
            if len(self.of_level(name)) > 2:
                found[self.levels == name] = self.of_level(name).std(ddof=1)
        return found

    def dealt(self, draw: int) -> np.ndarray:
        """Runs of a draw, (plans, seeds)."""
        dice = np.random.default_rng(draw)
        found = self.runs[:, dice.permutation(self.runs.shape[1])]
        for name in self.named:
            pool, is_of = list(dice.permutation(self.of_level(name))), self.levels == name
            found[is_of] = np.nan
            for seed in range(found.shape[1]):
                for twin in np.unique(self.twins[is_of]):
                    found[is_of & (self.twins == twin), seed] = pool.pop() if pool else np.nan
        return found


@dataclass
class Looked:
    """Trials of a task that are looked up in its row; a pick measures by it."""

    task: str
    row: Row
    place: dict[object, int]
    draw: int

    def measure(self, plan: Plan, seed: int, progress: Any = None) -> list[Trial]:
        error = self.error(self.place[plan.key], seed)
        if error >= self.row.worst:
            return [Trial(self.task, plan, seed, Status.DIVERGED, reason="it diverged")]
        return [Trial(self.task, plan, seed, Status.DONE, error=error)]

    @cached_property
    def runs(self) -> np.ndarray:
        """Of this draw."""
        return self.row.dealt(self.draw)

    @cached_property
    def lifts(self) -> np.ndarray:
        """What each seed of this draw adds to all plans."""
        order = np.random.default_rng(self.draw).permutation(self.row.runs.shape[1])
        apart = (self.row.runs - self.row.level)[:, order]
        return np.array([part[np.isfinite(part)][0] if np.isfinite(part).any() else 0.0 for part in apart.T])

    def error(self, column: int, seed: int) -> float:
        """Of the plan with that seed."""
        runs, is_named = self.runs[column], bool(self.row.levels[column])
        if np.nan_to_num(runs, nan=np.inf).min() >= self.row.worst:
            return self.row.worst
        if seed < len(runs) and np.isfinite(runs[seed]) and (is_named or np.isfinite(runs).sum() > 1):
            return float(runs[seed])
        shared = 0.0 if is_named else np.nan_to_num(self.row.parts.shared)
        lift = self.lifts[seed] if seed < len(runs) and not is_named else np.sqrt(shared) * _dice(self.draw, seed)
        lost = np.mean(runs[np.isfinite(runs)] >= self.row.worst) if np.isfinite(runs).any() else 0.0
        if np.random.default_rng([self.draw, column, seed]).random() < lost:
            return self.row.worst
        noise = self.row.noises[column] * _dice(self.draw, int(self.row.twins[column]), seed)
        return max(0.0, float(self.row.means[column] + lift + noise))


def _dice(*seeds: int) -> float:
    return float(np.random.default_rng(seeds).standard_normal())


# --- twins: plans of a level whose runs with equal seeds are equal to the last bit, as where a format has more exponents than needed ---


def find_twins(runs: np.ndarray, levels: np.ndarray) -> np.ndarray:
    """For each plan the first plan of its level whose runs (tasks, plans, seeds) equal its own wherever both ran."""
    groups: dict[int, list[list[int]]] = {}  # by level
    first_twin = np.arange(runs.shape[1])
    for plan in range(runs.shape[1]):
        level_groups = groups.setdefault(int(levels[plan]), [])
        group = next((other for other in level_groups if _are_twins(runs[:, other], runs[:, [plan]])), None)
        if group is None:
            level_groups.append(group := [])
        group.append(plan)
        first_twin[plan] = group[0]
    return first_twin


def _are_twins(runs: np.ndarray, others: np.ndarray) -> bool:
    """Whether the runs of a plan, `others`, equal those of every plan of a group, (tasks, plans, seeds) each."""
    both = np.isfinite(runs) & np.isfinite(others)
    num_tasks = both.any(axis=2).sum(axis=0)
    return bool((num_tasks >= TASKS_OF_TWINS).all()) and bool((runs == others)[both].all())


def without_twins(runs: np.ndarray, twins: np.ndarray) -> np.ndarray:
    """Runs (tasks, plans, seeds) in which those of twins count once: NaN where an earlier twin has the same run."""
    kept = runs.copy()
    for twin in np.unique(twins):
        same = np.flatnonzero(twins == twin)
        before = np.cumsum(np.isfinite(runs[:, same]), axis=1) - np.isfinite(runs[:, same])  # (tasks, twins, seeds)
        kept[:, same] = np.where(before > 0, np.nan, runs[:, same])
    return kept
