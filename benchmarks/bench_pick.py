"""How good picks are on tasks that no prior has seen: every image set left out of a shipped prior in turn. A run in results/pick.json.

    python benchmarks/bench_pick.py                     # the stored prior under 40 % and 60 %, the simulated one under 22 %
    python benchmarks/bench_pick.py --prior FILE.json --budget 40%      # another one, printed alone
    PAREDOWN_DATA=... python benchmarks/bench_pick.py --prior released --budget 22%     # PEPPP's matrices as a prior: 87 tasks

All rows of a data set are left out together (its ViT, its superclasses). Trials are looked up (looked.py).
A pick is right if its mean error is within the noise of one run of that of the best plan; `strictly`: within that of the best plan
itself, where it is known and less, since plans that hardly learn have most of a task's noise. Three truths:

    matrix      plain means: of a plan that ran with one seed, luck of that seed included, and the best of many is a lucky one
    seeds       means over seeds without what a seed does to all plans of the task (seed_effects.py)
    smoothed    luck taken out: the mean of all plans of a level where the prior names levels, else what all runs of this task and all
                tasks say of each mean

Beside these, `unseen`: each seed in turn is hidden from the pick, and the picked plan's run with it is compared with the mean of all
plans that fit; below 0 is better than a random plan. The best plan of a noisy seed would be a lucky one.

Coverage: after random trials, the share of the other plans whose mean error, and whose single runs, lie in their 90 % bands; of runs
with seeds that no trial had, where plans have runs of their own.

Ways: `pick` with some trials; `nothing`: no trial; `random`: the same number of trials of random plans that fit, the least error is taken;
`random, same beliefs`: of these, what the prior makes of them; `one at random`: a random plan that fits; `assign`: the plan that it makes;
`best on average`: that of all other tasks.
"""

from __future__ import annotations

import argparse
import json
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from bench_peppp import matrices
from looked import Looked, Row, find_twins
from measure import RESULTS, machine
from seed_effects import is_calm, runs_of_task, without_seed_effects

from paredown.plan.plan import Plan
from paredown.simulate.peppp import HIGH_FORMATS, LOW_FORMATS, parse_peppp, peppp_plan
from paredown.sizes import parse_bytes
from paredown.study.pick.candidates import BASELINE, NAMES, CandidatePlan, Candidates, TaskStep, features_of
from paredown.study.pick.pick_loop import PickLoop
from paredown.study.pick.posterior import Run
from paredown.study.pick.task_prior import WORST, TaskPrior, scaled
from paredown.study.priors import prior_files as priors
from paredown.study.priors.prior_data import PlanRow, PriorData, TaskRow, random_guess_error

NUM_TRIALS = 6
TRUTHS = ("matrix", "seeds", "smoothed")
NUM_DRAWS = 20  # of the noise of trials, and of random plans
FEW_DRAWS = 4  # where tasks are many
SEED_DRAWS = 4  # for each hidden seed
COUNTS = (0, 3, 6, 10)  # trials before coverage
COVERAGE_DRAWS = 6
MOST_TASKS = 40  # of a prior, whose coverage is counted
PICTURES_ALONE = ("stored",)  # priors of which texts are no cases
BUDGETS = (("stored", "40%"), ("stored", "60%"), ("simulated", "22%"), ("released", "22%"))


@dataclass(frozen=True)
class Case:
    """A task that is new, and what was known before."""

    earlier: PriorData
    row: int
    budget_bytes: int
    before: PriorData
    truths: dict[str, np.ndarray]  # (plans,)
    noise: float  # of one run of this task

    @property
    def runs(self) -> Row:
        """What is looked up."""
        levels, runs = np.array([plan.level for plan in self.earlier.plans]), self.earlier.runs[self.row]
        worst = np.nanmax(runs) if self.earlier.diverged[self.row].any() else np.inf
        return Row(runs, levels, twins_of(self.earlier), self.noise, is_calm(self.earlier)[self.row], float(worst))

    @property
    def columns(self) -> np.ndarray:
        """Plans that ran on this task, and whose bytes are known."""
        return np.flatnonzero(np.isfinite(next(iter(self.truths.values()))) & np.isfinite(self.earlier.memory[self.row]))

    @property
    def fits(self) -> np.ndarray:
        """Those within the budget."""
        return np.array([c for c in self.columns if self.earlier.memory[self.row, c] <= self.budget_bytes], dtype=np.intp)

    @cached_property
    def exact(self) -> set[int]:
        """Plans made for each task that checkpoint layers alone here: with two seeds or more, their runs are the baseline's to the bit."""
        runs, labels = self.earlier.runs[self.row], [plan.label for plan in self.earlier.plans]
        if BASELINE not in labels:
            return set()
        known = np.isfinite(runs) & np.isfinite(runs[labels.index(BASELINE)])
        is_equal = (runs == runs[labels.index(BASELINE)]) | ~known
        return {c for c in np.flatnonzero(is_equal.all(axis=1) & (known.sum(axis=1) > 1)) if self.earlier.plans[c].plan is None}

    def plan(self, column: int) -> Plan:
        """The plan of a column; one that is made for each task has a name of its own here, and a format unless it is exact."""
        row = self.earlier.plans[column]
        if row.plan is not None:
            return Plan.from_json(row.plan)
        return (Plan() if column in self.exact else Plan.preset("activations8")).recomputing(f"column {column}")

    @cached_property
    def task_prior(self) -> TaskPrior:
        """What was known before; fitted once for all picks of this task."""
        return TaskPrior.of(self.before)

    def picking(self) -> PickLoop:
        """A pick of this task that knows what was known before."""
        task, memory = self.earlier.tasks[self.row], self.earlier.memory[self.row]
        plans = {c: self.plan(c) for c in range(len(self.earlier.plans))}
        points = np.array([features_of(plan) if not plan.recompute else np.full(len(NAMES), np.nan) for plan in plans.values()])
        rows = tuple(CandidatePlan(self.earlier.plans[c].label, plans[c], int(memory[c]), c, points[c]) for c in self.columns)
        step = TaskStep(lambda plan: 0, None, int(task.full_bytes or 0))
        unit = task.blind or random_guess_error(task.metric, task.answers)
        return PickLoop(task.name, task.metric, unit, self.budget_bytes, step, Candidates(rows, points), self.task_prior)

    def looked(self, picking: PickLoop, draw: int) -> Looked:
        """Where trials come from."""
        place = {row.plan.key: row.column for row in picking.candidates.rows}
        return Looked(self.earlier.tasks[self.row].name, self.runs, place, draw)


# --- ways to pick ---------------------------------------------------------------------------------------------------------


def picked(case: Case, draw: int, num: int) -> tuple[int, int]:
    """As `pick` does it: the column that is taken, and the trials that were run."""
    picking = case.picking()
    picking.search(case.looked(picking, draw), num, seed=0)
    return int(picking.candidates.rows[picking.choice().plan].column), len(picking.trials)


def at_random(case: Case, draw: int, num: int) -> tuple[int, int]:
    """The least error of random plans that fit."""
    picking, dice = case.picking(), np.random.default_rng([draw, case.row])
    looked = case.looked(picking, draw)
    tried = dice.choice(case.fits, min(num, len(case.fits)), replace=False)
    return int(min(tried, key=lambda column: looked.error(int(column), 0))), len(tried)


def at_random_believed(case: Case, draw: int, num: int) -> tuple[int, int]:
    """Random plans that fit, and then what is believed."""
    picking, dice = case.picking(), np.random.default_rng([draw, case.row])
    looked = case.looked(picking, draw)
    for column in dice.choice(case.fits, min(num, len(case.fits)), replace=False):
        picking.learn(looked.measure(case.plan(int(column)), 0))
    return int(picking.candidates.rows[picking.choice().plan].column), len(picking.trials)


def assigned(case: Case, draw: int, num: int) -> tuple[int, int]:
    """What `assign` makes for the largest budget that fits, without a trial; a random plan where the prior has none."""
    shares = {c: re.fullmatch(r"assign ([\d.]+)% role", case.earlier.plans[c].template) for c in case.fits}
    known = {c: float(share[1]) for c, share in shares.items() if share}
    return (int(max(known, key=lambda c: known[c])), 0) if known else one_at_random(case, draw, num)


def one_at_random(case: Case, draw: int, num: int) -> tuple[int, int]:
    """Any plan that fits, each in turn, in a random order."""
    return int(np.random.default_rng(case.row).permutation(case.fits)[draw % len(case.fits)]), 0


def best_on_average(case: Case, draw: int, num: int) -> tuple[int, int]:
    """The plan that fits with the least mean distance from the best plan on the tasks before, in errors of random guessing."""
    errors = np.nanmean(scaled(case.before)[:, case.fits], axis=2)
    return int(case.fits[np.nanargmin(np.nanmean(errors - np.nanmin(errors, axis=1, keepdims=True), axis=0))]), 0


WAYS: dict[str, tuple[Callable[[Case, int, int], tuple[int, int]], int]] = {
    "pick": (picked, NUM_TRIALS),
    "pick, 3 trials": (picked, 3),
    "nothing": (picked, 0),
    "random": (at_random, NUM_TRIALS),
    "random, same beliefs": (at_random_believed, NUM_TRIALS),
    "one at random": (one_at_random, 1),
    "assign": (assigned, 0),
    "best on average": (best_on_average, 0),
}


# --- truths ---------------------------------------------------------------------------------------------------------------


def cases(earlier: PriorData, budget: str) -> Iterator[Case]:
    """Each task; all rows of its data are left out. Runs of twins are those of each other."""
    whole, errors, noise = TaskPrior.of(earlier), earlier.errors, noise_of(earlier)
    earlier = replace(earlier, runs=with_twins(earlier.runs, twins_of(earlier)))
    runs = scaled(earlier)
    for row, task in enumerate(earlier.tasks):
        if (task.metric != "error" and earlier.name in PICTURES_ALONE) or "/" in task.data:
            continue
        kin = [other.name for other in earlier.tasks if other.data.partition("/")[0] == task.data]
        full = task.full_bytes or float(np.nanmax(earlier.memory[row]))
        unit = task.blind or random_guess_error(task.metric, task.answers) or 1.0
        means = seed_means(earlier.runs[row], is_calm(earlier)[row])
        smooth = level_means(earlier, means) if any(plan.level for plan in earlier.plans) else unit * smoothed(whole, runs[row])
        truths = {"matrix": errors[row], "seeds": means, "smoothed": smooth}
        yield Case(earlier, row, parse_bytes(budget, whole=int(full)), earlier.without(kin), truths, float(noise[row]))


def noise_of(earlier: PriorData) -> np.ndarray:
    """Of one run of each task, (tasks,): the median of the others where it is not known; of PEPPP's tasks from plans of a level."""
    if earlier.name != "released":
        return np.where(np.isfinite(earlier.noise), earlier.noise, np.nanmedian(earlier.noise))
    groups = earlier.errors.reshape(len(earlier.tasks), len(LOW_FORMATS), len(HIGH_FORMATS))
    return np.sqrt(groups.var(axis=2, ddof=1).mean(axis=1))


def twins_of(earlier: PriorData) -> np.ndarray:
    """Of each plan, the first plan that is the same to the last bit; one that is made for each task has no twin."""
    names = [f"\0{i}" if plan.plan is None else plan.level for i, plan in enumerate(earlier.plans)]
    return find_twins(earlier.runs, np.unique(names, return_inverse=True)[1])


def with_twins(runs: np.ndarray, twins: np.ndarray) -> np.ndarray:
    """Runs (tasks, plans, seeds), where a plan has none that of a twin."""
    found = runs.copy()
    for twin in np.unique(twins):
        same = np.flatnonzero(twins == twin)
        theirs = np.where(np.isfinite(runs[:, same]), runs[:, same], -np.inf).max(axis=1, keepdims=True)
        found[:, same] = np.where(np.isfinite(runs[:, same]) | np.isinf(theirs), runs[:, same], theirs)
    return found


def seed_means(runs: np.ndarray, calm: np.ndarray) -> np.ndarray:
    """Means of one task's plans (plans, seeds) without what seeds do to all of them; NaN where nobody looked."""
    level = without_seed_effects(runs[None], calm[None])[0]
    seen = np.isfinite(level)
    return np.where(seen.any(axis=1), np.where(seen, level, 0.0).sum(axis=1) / np.maximum(seen.sum(axis=1), 1), np.nan)


def level_means(earlier: PriorData, means: np.ndarray) -> np.ndarray:
    """Of each plan, the mean error of the plans of its level."""
    names = np.array([plan.level or f"plan {i}" for i, plan in enumerate(earlier.plans)])
    known = np.isfinite(means)
    return np.array([means[known & (names == name)].mean() if known[names == name].any() else np.nan for name in names])


def smoothed(task_prior: TaskPrior, runs: np.ndarray) -> np.ndarray:
    """Means of the plans of a task by all of its runs (plans, seeds), and by what all tasks are like."""
    mean = task_prior.prior.after([Run(run.plan, run.error) for run in runs_of_task(runs)]).mean
    return mean[task_prior.prior.levels]


# --- tables ---------------------------------------------------------------------------------------------------------------


def rows_of(earlier: PriorData, budget: str) -> list[dict[str, Any]]:
    """A row for each task and way: how far the picks lie above the best, in noises of one run, and how many are within one."""
    found: list[dict[str, Any]] = []
    num_draws = NUM_DRAWS if len(earlier.tasks) < 50 else FEW_DRAWS
    for case in cases(earlier, budget):
        head = {"prior": earlier.name, "budget": budget, "task": earlier.tasks[case.row].name, "noise": round(case.noise, 5)}
        head |= {"plans_that_fit": len(case.fits)}
        if not len(case.fits):
            found.append({**head, "way": "none", "note": "nothing fits"})
            continue
        for way, (pick, num) in WAYS.items():
            done = [pick(case, draw, num) for draw in range(num_draws if num else 1)]
            columns, trials = [column for column, _ in done], float(np.mean([count for _, count in done]))
            scores: dict[str, Any] = {name: _scores(case, truth, columns) for name, truth in case.truths.items()}
            scores["unseen"] = unseen(case, pick, num)
            found.append({**head, "way": way, "trials": round(trials, 2), "plan": earlier.plans[columns[0]].label, **scores})
    return found


def hidden_seeds(case: Case) -> Iterator[Case]:
    """The case with each of its seeds hidden in turn, and as its truth: of plans that ran with others too, by level where one is named."""
    runs = case.earlier.runs[case.row]
    several = np.isfinite(runs).sum(axis=1) > 1
    for seed in range(runs.shape[1]):
        truth = np.where(several, runs[:, seed], np.nan)
        if any(plan.level for plan in case.earlier.plans):
            truth = level_means(case.earlier, truth)
        left = np.array(case.earlier.runs)
        left[case.row, several, seed] = np.nan
        truth = np.where(np.isfinite(case.truths["matrix"]), truth, np.nan)
        hidden = replace(case, earlier=replace(case.earlier, runs=left), truths={"unseen": truth})
        hidden.__dict__["task_prior"] = case.task_prior  # fitted once: this task is not in it
        if len(hidden.fits) > 1:
            yield hidden


def unseen(case: Case, pick: Callable[[Case, int, int], tuple[int, int]], num: int) -> float | None:
    """How far picks lie above the mean of all plans that fit, with a seed that they did not see, in noises of a run; None without seeds."""
    found: list[float] = []
    for hidden in hidden_seeds(case):
        truth, columns = hidden.truths["unseen"], [pick(hidden, draw, num)[0] for draw in range(SEED_DRAWS if num else 1)]
        found.append(float(truth[columns].mean() - truth[hidden.fits].mean()) / case.noise)
    return round(float(np.mean(found)), 3) if found else None


def _scores(case: Case, truth: np.ndarray, columns: list[int]) -> dict[str, float]:
    """`above` in noises of a run of this task; `strictly`: within the noise of the best plan alone, where that is less."""
    best = int(case.fits[truth[case.fits].argmin()])
    apart = truth[columns] - truth[best]
    above, least = apart / case.noise, min(case.noise, float(case.runs.noises[best]))
    shares = {"within": np.mean(above <= 1), "first_within": above[0] <= 1, "strictly": np.mean(apart <= least)}
    return {"above": round(float(above.mean()), 3), **{word: round(float(share), 3) for word, share in shares.items()}}


def table(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Counts over tasks, for each prior and way."""
    for prior, budget in dict.fromkeys((row["prior"], row["budget"]) for row in rows):
        own = [row for row in rows if (row["prior"], row["budget"]) == (prior, budget) and row["way"] in WAYS]
        if not own:
            yield f"\n{prior} under {budget}: nothing fits any task"
            continue
        num, fewest = len({row["task"] for row in own}), min(row["plans_that_fit"] for row in own)
        most = max(row["plans_that_fit"] for row in own)
        head = f"{prior} under {budget}, {num} tasks, {fewest} to {most} plans fit"
        yield f"\n{head}: within one noise of the best, and mean distance in noises"
        for way in WAYS:
            of_way = [row for row in own if row["way"] == way]
            cells = []
            for truth in TRUTHS:
                parts = [row[truth] for row in of_way]
                words = ("within", "first_within", "strictly", "above")
                within, first, strictly, above = (sum(part[word] for part in parts) for word in words)
                cells.append(
                    f"{truth} {within:4.1f} (first draw {first:2.0f}, strictly {strictly:4.1f}), {above / len(parts):5.2f}"
                )
            trials, hidden = (
                np.mean([row["trials"] for row in of_way]),
                [row["unseen"] for row in of_way if row["unseen"] is not None],
            )
            cells += (
                [f"unseen {np.mean(hidden):+.2f} ({np.std(hidden, ddof=1) / len(hidden) ** 0.5:.2f})"] if len(hidden) > 1 else []
            )
            yield f"   {way:22s}{trials:4.1f} trials   " + "   ".join(cells)


def spreads(earlier: PriorData, budget: str) -> Iterator[dict[str, Any]]:
    """For each task the standard deviation of the true means of plans that fit, and of the mean of three runs of one plan.

    The variance of observed means has noise in it, which is subtracted; effects of seeds, which all plans share, are taken off before.
    """
    for case in cases(earlier, budget):
        runs = case.runs.level[case.fits]
        counts = np.isfinite(runs).sum(axis=1)
        if len(runs) < 2 or not np.isfinite(case.runs.parts.rest):
            continue
        means, rest = np.nansum(runs, axis=1) / np.maximum(counts, 1), case.runs.parts.rest
        variance = float(means.var(ddof=1) - rest * (1 / counts).mean())
        yield {
            "prior": earlier.name,
            "budget": budget,
            "task": earlier.tasks[case.row].name,
            "plans_that_fit": len(runs),
            "spread": round(max(variance, 0.0) ** 0.5, 5),
            "noise_of_three": round((rest / 3) ** 0.5, 5),
        }


# --- coverage -------------------------------------------------------------------------------------------------------------


def coverage(earlier: PriorData, *, has_levels: bool) -> Iterator[dict[str, Any]]:
    """For each number of trials the share of plans whose mean, and of runs, that lie in their 90 % bands; mean over tasks left out."""
    known = earlier if has_levels else replace(earlier, plans=tuple(replace(plan, level="") for plan in earlier.plans))
    every = -(-sum(1 for _ in cases(earlier, "100%")) // MOST_TASKS)
    found: dict[int, list[np.ndarray]] = {}
    for case in list(cases(earlier, "1000%"))[::every]:
        before = known.without([task.name for task in known.tasks if task.name not in {row.name for row in case.before.tasks}])
        blind = replace(case, earlier=replace(case.earlier, plans=known.plans), before=before)
        for count in COUNTS:
            found.setdefault(count, []).append(
                np.nanmean([inside(case, blind, count, draw) for draw in range(COVERAGE_DRAWS)], axis=0)
            )
    head = {"prior": earlier.name, "levels": "given" if has_levels else "found"}
    for count, shares in found.items():
        means, runs = np.nanmean(shares, axis=0)
        yield {
            **head,
            "trials": count,
            "tasks": len(shares),
            "mean_bands": round(float(means), 3),
            "run_bands": round(float(runs), 3),
        }


def inside(case: Case, blind: Case, count: int, draw: int) -> tuple[float, float]:
    """Shares of the untried plans of a task whose mean, and of whose runs, lie in their bands after `count` random trials."""
    picking, dice = blind.picking(), np.random.default_rng([count, case.row, draw])
    columns, unit = picking.candidates.columns, picking.unit or 1.0
    tried = dice.choice(columns, min(count, len(columns) - 1), replace=False)
    looked = case.looked(case.picking(), draw)
    for column in tried:
        picking.learn(looked.measure(case.plan(int(column)), 0))
    runs, has_names = unseen_runs(case, draw if count else None), any(plan.level for plan in case.earlier.plans)
    num_runs = _num_runs(case, runs)
    rest = np.flatnonzero(~np.isin(columns, tried) & (num_runs[columns] > 0))
    estimate, columns = picking.estimate(), columns[rest]
    means = np.where(np.isfinite(runs), runs, 0.0).sum(axis=1) / np.maximum(num_runs, 1)
    truth = np.minimum((case.truths["smoothed"] if has_names else means)[columns] / unit, WORST)
    runs = np.minimum(runs[columns] / unit, WORST)
    one_run = 1.645 * np.sqrt(estimate.deviations**2 + estimate.noise)
    bands = estimate.mean_band(), (estimate.means - one_run, estimate.means + one_run)
    (low, high), (run_low, run_high) = ([part[rest] for part in band] for band in bands)
    half = np.hypot((high - low) / 2, 1.645 * case.noise / unit / np.sqrt(num_runs[columns]))  # the true means are not known better
    is_in = np.isfinite(runs) & (runs >= run_low[:, None] - 1e-9) & (runs <= run_high[:, None] + 1e-9)
    return float(np.mean(np.abs(truth - (low + high) / 2) <= half + 1e-9)), float(is_in.sum() / np.isfinite(runs).sum())


def unseen_runs(case: Case, draw: int | None) -> np.ndarray:
    """The task's runs (plans, seeds) with seeds that no trial of the draw had; all of them where the plans of a level share their runs."""
    runs = case.earlier.runs[case.row].copy()
    if draw is not None and runs.shape[1] > 1 and not any(plan.level for plan in case.earlier.plans):
        runs[:, np.random.default_rng(draw).permutation(runs.shape[1])[0]] = np.nan  # the seed of its trials (looked.py)
    return runs


def _num_runs(case: Case, runs: np.ndarray) -> np.ndarray:
    """Runs behind the true mean of each plan, (plans,)."""
    names = np.array([plan.level or f"plan {i}" for i, plan in enumerate(case.earlier.plans)])
    counts = np.isfinite(runs).sum(axis=1)
    return np.array([int(counts[names == name].sum()) for name in names])


def say_coverage(rows: list[dict[str, Any]]) -> Iterator[str]:
    """A line for each prior: shares of means and of runs in their 90 % bands, by trials."""
    for prior, levels in dict.fromkeys((row["prior"], row["levels"]) for row in rows):
        own = [row for row in rows if (row["prior"], row["levels"]) == (prior, levels)]
        cells = (f"{row['trials']} trials: means {row['mean_bands']:.2f}, runs {row['run_bands']:.2f}" for row in own)
        yield f"{prior}, levels {levels}, {own[0]['tasks']} tasks, in 90 % bands after " + "; ".join(cells)


def save(rows: list[dict[str, Any]], covered: list[dict[str, Any]], spread: list[dict[str, Any]]) -> None:
    """Add a run to the results."""
    path = RESULTS / "pick.json"
    runs = json.loads(path.read_text()) if path.exists() else []
    about = {"trials": NUM_TRIALS, "draws": [NUM_DRAWS, FEW_DRAWS, SEED_DRAWS], "table": [*table(rows), *say_coverage(covered)]}
    runs.append({**machine("cpu", ("numpy", "scipy")), **about, "rows": rows, "coverage": covered, "spreads": spread})
    path.write_text(json.dumps(runs).replace('{"prior"', '\n  {"prior"') + "\n")


def main() -> None:
    """Print the table, and append the run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prior", help="a name or a file, instead of the shipped ones")
    parser.add_argument("--budget", default="40%")
    options = parser.parse_args()
    there = [*priors.available(), *(["released"] if os.environ.get("PAREDOWN_DATA") else [])]
    wanted = [(options.prior, options.budget)] if options.prior else [pair for pair in BUDGETS if pair[0] in there]
    for name in () if options.prior else sorted({name for name, _ in BUDGETS} - {name for name, _ in wanted}):
        print(f"{name}: it is not here")
    rows = [row for name, budget in wanted for row in rows_of(named(name), budget)]
    spread = [row for name, budget in wanted for row in spreads(named(name), budget)]
    print("\n".join([*table(rows), "", *map(str, spread)]))
    if not options.prior:
        covered = [row for name in dict.fromkeys(name for name, _ in wanted) for row in both_coverages(named(name))]
        print("\n".join(["", *say_coverage(covered)]))
        save(rows, covered, spread)


def both_coverages(earlier: PriorData) -> Iterator[dict[str, Any]]:
    """With levels given, where the prior names some, and found."""
    if any(plan.level for plan in earlier.plans):
        yield from coverage(earlier, has_levels=True)
    yield from coverage(earlier, has_levels=False)


def named(name: str) -> PriorData:
    """A prior; "made up" is one that nobody measured, "released" is made of PEPPP's matrices."""
    made = {"made up": lambda: priors.made_up_prior(13, 30), "released": released}
    return made[name]() if name in made else replace(priors.load(name), name=os.path.basename(name))


def released() -> PriorData:
    """PEPPP's 87 tasks; plans of a low format are a level. A task's classes, and its bytes in 32 bits, follow from its memory."""
    data = matrices()
    pairs = [(low, high) for low in LOW_FORMATS for high in HIGH_FORMATS]
    words = np.array([[1 + sum(parse_peppp(text)) for text in pair] for pair in pairs])  # (plans, 2)
    per_bit = np.linalg.lstsq(words, data.memory.T * 2**23, rcond=None)[0].T  # numbers in low and in high words, (tasks, 2)
    tasks = [_released_task(i, *row) for i, row in enumerate(per_bit)]
    plans = [PlanRow(f"{low} {high}", peppp_plan(parse_peppp(low), parse_peppp(high)).to_json(), "", low) for low, high in pairs]
    return PriorData("released", "simulate", tasks, plans, data.errors[..., None], memory=data.memory * 2**20)


def _released_task(number: int, low: float, high: float) -> TaskRow:
    """high = 2 (11,168,832 + 513 classes) + inputs + 64 classes, for 32 pictures of 3 x 32 x 32 or 3 x 64 x 64."""
    inputs = 32 * 3 * (32 if low < 3e8 else 64) ** 2
    classes = round((high - 2 * 11_168_832 - inputs) / (2 * 513 + 64))
    return TaskRow(f"task {number}", "cnn", f"data {number}", "error", classes, 1 - 1 / classes, 32 * (low + high) / 8)


if __name__ == "__main__":
    main()
