"""Picks below 30 % of the memory beside plainer choices, each image set or text left out in turn. Rows go to results/low_budgets.json.

    python benchmarks/bench_low_budgets.py PRIOR.json                     # that of collect_low_budgets.py, joined with the stored prior
    python benchmarks/bench_low_budgets.py PRIOR.json --trials rows.json  # its trials go to the results too
    python benchmarks/bench_low_budgets.py PRIOR.json --joined stored low_budgets --budgets 30% --results state_budgets.json

Regret: the error of the chosen plan with a seed that the choice did not see, less that of the plan with the least mean over all seeds
among those that fit, relative to random guessing. Each seed is hidden in turn, trials are looked up among the others (looked.py).
A plan that diverged with one seed was not run with further ones, and counts as random guessing with all of them; so does a loss above it.
Tasks that do not train, whose baseline's mean loss or error is not a tenth below random guessing, are in one table and not in another.
The least of several noisy means is too low, and one seed is noisy. So there is a second regret, of shrunken means: the mean of all seeds
of each plan, moved towards that of all plans that train, by the share of the variance that noise explains. It has little noise, and
favours choices by trials a little, since two of three seeds of these means were seen.

Spread: the standard deviation of the true means of the plans that fit, beside that of the mean of three runs of one plan.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from bench_pick import SEED_DRAWS, Case, assigned, best_on_average, cases, coverage, hidden_seeds, picked, say_coverage, spreads
from measure import RESULTS, machine

from paredown.study.pick.candidates import BASELINE
from paredown.study.priors.prior_collection import read_rows, row_of
from paredown.study.priors.prior_data import PriorData, join_priors, random_guess_error
from paredown.study.priors.prior_files import load
from paredown.study.tasks.trial import Trial

Array = np.ndarray
Way = Callable[[Case, int, int], tuple[int, int]]
BUDGETS = ("23%", "25%", "30%")
TRAINED = 0.9  # most error of the baseline of a task that trains, relative to random guessing
FEWEST_PLANS = 3  # that fit and ran with all seeds: else there is nothing to choose
WAYS: dict[str, tuple[Way, int]] = {
    "pick, 6 trials": (picked, 6),
    "pick, 3 trials": (picked, 3),
    "pick, no trial": (picked, 0),
    "assign": (assigned, 0),
    "best on average": (best_on_average, 0),
}
RANDOM = "a random plan"


def with_all_seeds(prior_data: PriorData) -> PriorData:
    """The prior, where a plan that diverged with one seed has that error with every seed that it was not run with."""
    worst = np.where(prior_data.diverged > 0, np.nanmax(np.nan_to_num(prior_data.runs, nan=-np.inf), axis=2), np.nan)
    return replace(prior_data, runs=np.where(np.isfinite(prior_data.runs), prior_data.runs, worst[..., None]))


def known(low: PriorData, *stored: PriorData) -> PriorData:
    """What a pick knows; shortened texts have the names of the whole ones."""
    joined = join_priors([low, *stored], low.name) if stored else low
    joined = replace(joined, tasks=tuple(replace(task, data=task.data.removesuffix("_2mb")) for task in joined.tasks))
    return with_all_seeds(without_high_losses(joined))


def without_high_losses(prior_data: PriorData) -> PriorData:
    """The prior, where a loss above that of random guessing is that of random guessing."""
    most = np.array([(task.blind or np.inf) if task.metric == "loss" else np.inf for task in prior_data.tasks])
    if not (prior_data.runs > most[:, None, None]).any():
        return prior_data
    runs = np.minimum(prior_data.runs, most[:, None, None])
    words = ("memory", "measured", "diverged", "propensity", "step_ratio", "provenance")
    fields = {word: getattr(prior_data, word) for word in words}
    return PriorData(prior_data.name, prior_data.mode, prior_data.tasks, prior_data.plans, runs, **fields)


def that_train(low: PriorData) -> PriorData:
    """The prior with the tasks alone whose baseline trains."""
    errors = without_high_losses(low).errors[:, [plan.label for plan in low.plans].index(BASELINE)]
    rows = zip(low.tasks, errors, strict=True)
    return low.without([task.name for task, error in rows if not error <= TRAINED * (task.blind or np.inf)])


def regret_rows(earlier: PriorData, names: set[str], budget: str) -> Iterator[dict[str, Any]]:
    """A row for each of the named tasks and each way: regret with unseen seeds, and the step time of its choice."""
    for case in cases(earlier, budget):
        task = earlier.tasks[case.row]
        hidden = [one for one in hidden_seeds(case) if len(one.fits) >= FEWEST_PLANS] if task.name in names else []
        if not hidden:
            continue
        unit = task.blind or random_guess_error(task.metric, task.answers) or 1.0
        head = {"budget": budget, "task": task.name, "plans_that_fit": len(hidden[0].fits)}
        baseline = [one.truths["unseen"][[plan.label for plan in earlier.plans].index(BASELINE)] for one in hidden]
        means = shrunken_means(case, hidden[0].fits)
        for way in (*WAYS, RANDOM):
            chosen = [choices(one, way) for one in hidden]
            errors = np.array([np.mean(one.truths["unseen"][columns]) for one, columns in zip(hidden, chosen, strict=True)])
            regret, above = (float(np.mean(errors - part)) / unit for part in ([least(case, one) for one in hidden], baseline))
            shrunken = float(
                np.mean([means[columns].mean() - means[one.fits].min() for one, columns in zip(hidden, chosen, strict=True)])
            )
            ratios = earlier.step_ratio[case.row, np.concatenate(chosen)]
            time = round(float(ratios.mean()), 3) if np.isfinite(ratios).all() else None
            label = earlier.plans[chosen[0][0]].label if way != RANDOM else ""
            scores = {"regret": round(regret, 5), "shrunken": round(shrunken / unit, 5), "above_baseline": round(above, 5)}
            scores |= {"step_ratio": time, "plan": label}
            yield {**head, "way": way, **scores}


def choices(case: Case, way: str) -> Array:
    """The columns that a way takes, one for each draw; of a random plan all that fit."""
    if way == RANDOM:
        return case.fits
    pick, num = WAYS[way]
    return np.array([pick(case, draw, num)[0] for draw in range(SEED_DRAWS if num else 1)])


def least(case: Case, hidden: Case) -> float:
    """The unseen error of the plan with the least mean over all seeds among those that fit."""
    means = case.truths["seeds"][hidden.fits]
    return float(hidden.truths["unseen"][hidden.fits[int(means.argmin())]])


def shrunken_means(case: Case, fits: Array) -> Array:
    """Means of all seeds without seed effects, (plans,); those of the plans that fit and train are shrunk to their mean."""
    means, counts, rest = np.array(case.truths["seeds"]), np.isfinite(case.earlier.runs[case.row]).sum(axis=1), case.runs.parts.rest
    trained = fits[case.earlier.diverged[case.row, fits] == 0]
    if len(trained) > 1 and np.isfinite(rest):
        own, noise = means[trained], rest / counts[trained]
        variance = max(0.0, float(own.var(ddof=1) - noise.mean()))
        means[trained] = own.mean() + variance / np.maximum(variance + noise, 1e-300) * (own - own.mean())
    return means


def table(rows: list[dict[str, Any]]) -> Iterator[str]:
    """For each budget and way: mean regret over tasks, and the difference of `pick` with six trials with its paired standard error."""
    for knows, budget in dict.fromkeys((row["knows"], row["budget"]) for row in rows):
        own = [row for row in rows if (row["knows"], row["budget"]) == (knows, budget)]
        yield f"\n{budget}, {knows}: {len({row['task'] for row in own})} tasks"
        ours, untimed = scores_of(own, next(iter(WAYS)), "regret"), {row["task"] for row in own if row["step_ratio"] is None}
        for way in (*WAYS, RANDOM):
            above = scores_of(own, way, "above_baseline")
            times = [row["step_ratio"] for row in own if row["way"] == way and row["task"] not in untimed]
            cells = [_compared(ours, scores_of(own, way, "regret"))]
            cells += [_compared(*(scores_of(own, one, "shrunken") for one in (next(iter(WAYS)), way)))]
            yield f"   {way:16s}{cells[0]}   shrunken {cells[1]}   above the baseline {above.mean():+.4f}   step {np.mean(times):.2f}x"
        for task in dict.fromkeys(row["task"] for row in own):
            cells = (f"{row['way']} {row['regret']:+.4f} {row['shrunken']:.4f}" for row in own if row["task"] == task)
            yield f"      {task:24s}" + "   ".join(cells)


def _compared(ours: Array, theirs: Array) -> str:
    """Mean of `theirs` over tasks; in brackets ours less theirs, and its paired standard error."""
    apart = ours - theirs
    return f"{theirs.mean():.4f} [{apart.mean():+.4f} ({apart.std(ddof=1) / len(apart) ** 0.5:.4f})]"


def scores_of(rows: list[dict[str, Any]], way: str, score: str) -> Array:
    """A score of a way, one for each task."""
    return np.array([row[score] for row in rows if row["way"] == way])


def trial_row(row: dict[str, Any]) -> dict[str, Any]:
    """A trial of rows.json in few words."""
    trial = Trial.from_json(row["trial"])
    name = str(trial.plan.made_for.get("recipe", "")) or row_of(trial.plan).label
    head = {"task": row["task"], "plan": name, "seed": trial.seed, "status": trial.status.value}
    bytes_of = {"predicted_bytes": trial.predicted_peak_bytes, "measured_bytes": trial.measured_peak_bytes}
    origin = {"device": trial.device, "torch": dict(trial.versions).get("torch"), "commit": trial.commit}
    return {**head, "error": trial.error, "loss": trial.loss, "step_ratio": trial.step_ratio, **bytes_of, **origin}


def save(path: Path, tables: dict[str, list[dict[str, Any]]], trials: list[dict[str, Any]] | None) -> None:
    """Replace the tables of the results, and add the trials where there are some."""
    found = json.loads(path.read_text()) if path.exists() else {"trials": []}
    known_trials = {(row["task"], row["plan"], row["seed"]): row for row in (*found["trials"], *(trials or ()))}
    found |= {"trials": list(known_trials.values())}
    found |= {**machine("cpu", ("numpy", "scipy")), **tables}
    text = json.dumps(found)
    for start in ('{"task"', '{"knows"', '{"prior"'):
        text = text.replace(start, f"\n  {start}")
    path.write_text(text + "\n")


def rows_of(low: PriorData, stored: Sequence[PriorData], budgets: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Rows of all ways, with what is known beside the other tasks of `low`, for all of its tasks and for those that train."""
    groups = {"": low} | ({", tasks that train": chosen} if len((chosen := that_train(low)).tasks) < len(low.tasks) else {})
    beside = f"with the {'stored prior' if len(stored) == 1 else 'other priors'}"
    for (knows, others), (group, part) in product(((beside, stored), ("alone", ())), groups.items()):
        earlier = known(part, *others)
        names = {task.name for task in earlier.tasks[: len(part.tasks)]}
        for budget in budgets:
            yield from ({"knows": knows + group, **row} for row in regret_rows(earlier, names, budget))


def main() -> None:
    """Print the tables, and replace the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prior")
    parser.add_argument("--trials", type=Path)
    parser.add_argument("--joined", nargs="*", default=["stored"])
    parser.add_argument("--budgets", nargs="*", default=BUDGETS)
    parser.add_argument("--results", default="low_budgets.json")
    options = parser.parse_args()
    low, stored = load(options.prior), [load(name) for name in options.joined]
    rows = list(rows_of(low, stored, options.budgets))
    print("\n".join(table(rows)), flush=True)
    spread = [row for budget in options.budgets for row in spreads(known(low), budget)]
    covered = list(coverage(known(that_train(low), *stored), has_levels=False))
    print("\n".join(["", *map(str, spread), "", *say_coverage(covered)]))
    save(
        RESULTS / options.results,
        {"rows": rows, "spreads": spread, "coverage": covered},
        [trial_row(dict(row)) for row in read_rows(options.trials)] if options.trials else None,
    )


if __name__ == "__main__":
    main()
