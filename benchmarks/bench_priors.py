"""What the shipped priors teach: numbers in results/priors.json, pictures of docs/priors.md in docs/pictures.

python benchmarks/bench_priors.py
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from heatmap import Map, draw
from looked import find_twins
from numpy.typing import NDArray
from seed_effects import VarianceParts, is_calm, variance_parts_of, without_seed_effects

from paredown.errors import PlanError
from paredown.study.pick.pareto import undominated
from paredown.study.priors.prior_data import PriorData
from paredown.study.priors.prior_files import available, load

Array = NDArray[np.float64]
ROOT = Path(__file__).parent.parent
RESULTS, PICTURES = ROOT / "benchmarks" / "results" / "priors.json", ROOT / "docs" / "pictures"
FULL, PLAIN = "baseline", "unmodified"  # the second: activations in labels such as "unmodified, lpmm"
CROSSED = (PLAIN, "bf16", "int8/64@bf16", "int4/64@bf16", "uint2/64@bf16+bf16")  # activations that ran with each of TIER_ORDER
TIER_ORDER = ("full", "half", "lpmm")
WIDE = ("e4m3", "e4m4", "e5m2", "e5m3")  # low formats of 8 and 9 bits, but for those of 3 exponent bits
NOISE = 2.0  # deviations of a difference of means beyond which it is called one


@dataclass(frozen=True)
class Effects:
    """Shares of the variance within tasks, F of plans beyond their levels, its p value, and the standard deviation within levels."""

    levels: float
    plans: float
    rest: float
    f: float
    p: float
    deviation: float


def split_variance(errors: Array, levels: NDArray[np.intp]) -> Effects:
    """The variance of complete errors (tasks, plans) split into parts; `levels`: the level of each plan.

    The mean of each task is subtracted. Parts of the variance that is left:

        levels      the means of groups of plans, for each task
        plans       what plans of a group have in common over all tasks, beyond their group
        rest        all else: noise, and effects of plans on single tasks

    F = (plans / their degrees of freedom) / (rest / its degrees of freedom): 1 where plans of a group differ by noise alone.
    """
    if not np.isfinite(errors).all():
        raise PlanError(f"errors {errors.shape} have gaps; the split needs complete rows.")
    num_tasks, num_plans = errors.shape
    groups = np.unique(levels)
    if num_tasks < 2 or num_plans == len(groups):
        given = f"{num_tasks} tasks and {num_plans} plans in {len(groups)} levels"
        raise PlanError(f"{given} leave nothing to compare: the split needs two tasks, and a level with two plans.")
    centered = errors - errors.mean(axis=1, keepdims=True)
    means = np.stack([centered[:, levels == group].mean(axis=1) for group in groups], axis=1)  # (tasks, levels)
    within = centered - means[:, np.searchsorted(groups, levels)]
    common = within.mean(axis=0)  # (plans,)
    total, plans = float((centered**2).sum()), num_tasks * float((common**2).sum())
    rest = float(((within - common) ** 2).sum())
    degrees_of_freedom = num_plans - len(groups)
    f = (plans / degrees_of_freedom) / (rest / (degrees_of_freedom * (num_tasks - 1)))
    return Effects(
        levels=1 - (plans + rest) / total,
        plans=plans / total,
        rest=rest / total,
        f=f,
        p=_p_value(f, degrees_of_freedom, degrees_of_freedom * (num_tasks - 1)),
        deviation=float(np.sqrt((plans + rest) / (degrees_of_freedom * num_tasks))),
    )


def _p_value(f: float, above: int, below: int) -> float:
    """Probability of an F value at least this large by chance."""
    from scipy.special import fdtrc

    return float(fdtrc(above, below, f))


def lost_share(errors: Array, full: Array, guess: Array) -> Array:
    """(error - full) / (guess - full) of each plan, (tasks, plans): 0 is as good as full precision, 1 as bad as random guessing."""
    return (errors - full[:, None]) / (guess - full)[:, None]


def lost(prior: PriorData) -> Array:
    """Of what full precision learns, the share that plans lose; without what seeds do to all plans of a task."""
    return lost_share(means(prior), full_errors(prior), np.array([task.blind for task in prior.tasks], dtype=np.float64))


def full_errors(prior: PriorData) -> Array:
    """At full precision, (tasks,); where it did not run, the mean of the formats that lose nothing elsewhere."""
    errors = means(prior)
    full = errors[:, labels(prior).index(FULL)]
    wide = errors[:, [plan.level in WIDE for plan in prior.plans]]
    return full if np.isfinite(full).all() else np.where(np.isfinite(full), full, np.nanmean(wide, axis=1))


def means(prior: PriorData) -> Array:
    """Over seeds, (tasks, plans), without what seeds do to all plans of a task; NaN where nobody looked."""
    runs = without_seed_effects(prior.runs, is_calm(prior))
    counts = np.isfinite(runs).sum(axis=2)
    return np.where(counts > 0, np.nansum(runs, axis=2) / np.maximum(counts, 1), np.nan)


def rests(prior: PriorData) -> Array:
    """Of each task the deviation of a run that neither its plan nor its seed explains; NaN where no plan ran twice."""
    return np.sqrt([part.rest for part in parts(prior)])


def parts(prior: PriorData) -> list[VarianceParts]:
    """Variances of seeds and of the rest, of each task; by plans of which every run learned."""
    return [variance_parts_of(runs) for runs in np.where(is_calm(prior)[..., None], prior.runs, np.nan)]


def labels(prior: PriorData) -> list[str]:
    """Of the plans."""
    return [plan.label for plan in prior.plans]


def complete(prior: PriorData) -> Array:
    """Which tasks ran under every plan."""
    return np.isfinite(prior.errors).all(axis=1)


def figures(values: Array) -> dict[str, float]:
    """Mean and standard error over tasks."""
    seen = values[np.isfinite(values)]
    return {"mean": round(float(seen.mean()), 4), "standard_error": round(float(seen.std(ddof=1) / np.sqrt(len(seen))), 4)}


def _rounded(value: float) -> float:
    return float(f"{value:.3g}")


def rounded(effects: Effects) -> dict[str, float]:
    """The effects, rounded to four digits."""
    return {name: float(f"{value:.4g}") for name, value in vars(effects).items()}


def heads(prior: PriorData) -> dict[str, Any]:
    """Size and noise."""
    rows = complete(prior)
    noise = {
        task.name: {
            "run": _rounded(n),
            "seed": _rounded(np.sqrt(part.shared)),
            "rest": _rounded(np.sqrt(part.rest)),
        }
        for task, n, part in zip(prior.tasks, prior.noise, parts(prior), strict=True)
        if np.isfinite(n)
    }
    full = prior.errors[:, labels(prior).index(FULL)]
    learned = {
        task.name: [round(float(f), 4), round(float(task.blind or np.nan), 4)]
        for task, f in zip(prior.tasks, full, strict=True)
        if np.isfinite(f)
    }
    counts = {"tasks": len(prior.tasks), "complete": int(rows.sum()), "plans": len(prior.plans)}
    runs = {"entries": int(np.isfinite(prior.errors).sum()), "runs": int(prior.counts.sum()), "diverged": int(prior.diverged.sum())}
    return {**counts, **runs, "noise": noise, "full_and_blind": learned}


def singular_shares(errors: Array) -> list[float]:
    """Shares of the energy that the first five singular values have, of errors without the task's mean."""
    values = np.linalg.svd(errors - errors.mean(axis=1, keepdims=True), compute_uv=False) ** 2
    return [round(float(share), 4) for share in (values / values.sum())[:5]]


def on_fronts(prior: PriorData, groups: Sequence[str]) -> dict[str, int]:
    """How many points of the tasks' fronts each group of plans has, complete rows alone."""
    found = dict.fromkeys(groups, 0)
    for row in np.flatnonzero(complete(prior)):
        for place in np.flatnonzero(undominated(prior.memory[row], prior.errors[row])):
            found[groups[place]] += 1
    return found


# --- simulated --------------------------------------------------------------------------------------------------------


def simulated_facts(prior: PriorData) -> dict[str, Any]:
    """By low format, by mantissa of the high format, and what of it is noise; plans that are the same to the last bit count once."""
    share, rows, low = lost(prior), complete(prior), np.array([plan.level for plan in prior.plans])
    names = [str(name) for name in dict.fromkeys(low) if name]
    twins = find_twins(prior.runs, np.unique(low, return_inverse=True)[1])
    single = np.array([bool(plan.level) and twins[j] == j for j, plan in enumerate(prior.plans)])
    mantissa = np.array([label.partition("m")[2].partition("m")[2] for label in labels(prior)])
    errors, apart = prior.runs[rows][:, single, 0], share[rows][:, single] - _by(share[rows], low)[:, single]
    calm = single & np.array([name[:2] not in ("", "e3") for name in low])
    return {
        **heads(prior),
        "sampled_share": _rounded(float(np.isfinite(prior.errors[~rows][:, low != ""]).mean())) if not rows.all() else 1.0,
        "different_configurations": int(single.sum()),
        "wide_and_blind_superclasses": _wide_errors(prior, rows),
        "lost_by_low_format": {name: figures(np.nanmean(share[rows][:, low == name], axis=1)) for name in names},
        "lost_by_low_format_superclasses": {name: figures(_mean_of(share[~rows][:, low == name])) for name in names},
        "lost_beyond_low_format_by_high_mantissa": {
            m: figures(apart[:, mantissa[single] == m].mean(axis=1)) for m in ("7", "9", "11")
        },
        "effects": rounded(split_variance(errors, _numbers(low[single]))),
        "effects_from_4_exponent_bits": rounded(split_variance(prior.runs[rows][:, calm, 0], _numbers(low[calm]))),
        "noise_by_low_format": _noise_by(prior, rows, single, names),
        "singular_shares": singular_shares(errors),
        "front_points_by_low_format": on_fronts(prior, [plan.level or FULL for plan in prior.plans]),
    }


def _wide_errors(prior: PriorData, rows: Array) -> dict[str, list[float]]:
    """Of sampled tasks, where full precision did not run: least, mean and largest error with WIDE formats, and that of a blind guess."""
    wide = prior.errors[:, [plan.level in WIDE for plan in prior.plans]]
    found: dict[str, list[float]] = {}
    for row in np.flatnonzero(~rows):
        seen = wide[row][np.isfinite(wide[row])]
        numbers = (seen.min(), seen.mean(), seen.max(), prior.tasks[row].blind or np.nan)
        found[prior.tasks[row].name] = [round(float(number), 4) for number in numbers]
    return found


def _by(share: Array, low: Array) -> Array:
    """Of each plan the mean of its low format, (tasks, plans)."""
    return np.stack([share[:, low == name].mean(axis=1) for name in low], axis=1)


def _mean_of(values: Array) -> Array:
    """Of each task that has any."""
    return np.array([np.nanmean(row) for row in values if np.isfinite(row).any()])


def _numbers(names: Array) -> NDArray[np.intp]:
    return np.unique(names, return_inverse=True)[1]


def _noise_by(prior: PriorData, rows: Array, single: Array, names: Sequence[str]) -> dict[str, list[float | None]]:
    """Deviations in (task, low format), the median over tasks: of different configurations with one seed, and of one with three seeds."""
    low = np.array([plan.level for plan in prior.plans])
    found: dict[str, list[float | None]] = {}
    for name in names:
        within = prior.runs[rows][:, single & (low == name), 0].std(axis=1, ddof=1)
        again = prior.runs[rows][:, (low == name) & (prior.counts[rows].min(axis=0) > 2)].std(axis=2, ddof=1)
        found[name] = [_rounded(float(np.median(within))), _rounded(float(np.median(again))) if again.size else None]
    return found


def draw_simulated(prior: PriorData) -> None:
    """What configurations lose, by task."""
    chosen = [j for j, plan in enumerate(prior.plans) if plan.level]
    names = [task.name.removesuffix(" sumlast18") for task in prior.tasks]
    title = "Simulated prior: 11 low formats x 9 high formats; dots were not drawn"
    groups = [prior.plans[j].level for j in chosen]
    share = lost(prior)[:, chosen]
    unit = "of what full precision learns is lost"
    _save("simulated", draw(Map(title, names, [labels(prior)[j] for j in chosen], share, 1.0, groups, unit), cell=(8, 13)))


# --- stored -----------------------------------------------------------------------------------------------------------


def stored_facts(prior: PriorData) -> dict[str, Any]:
    """By activation format, by tier, and how well bytes were predicted."""
    share = lost(prior)
    parts = [(label if label != FULL else f"{PLAIN}, full").partition(", ") for label in labels(prior)]
    crossed = [j for j, (kind, _, tier) in enumerate(parts) if tier in TIER_ORDER and kind in CROSSED]
    formats, tiers = ([parts[j][k] for j in crossed] for k in (0, 2))
    whole = np.array([task.full_bytes for task in prior.tasks], dtype=np.float64)
    return {
        **heads(prior),
        "lost_by_plan": {label: figures(share[:, j]) for j, label in enumerate(labels(prior))},
        "lost_by_activation_format": _means(share[:, crossed], formats),
        "lost_by_tier": _means(share[:, crossed], tiers),
        "effects_of_tiers": _effects(prior, crossed, formats),
        "effects_of_activation_formats": _effects(prior, crossed, tiers),
        "deviations_above_full": above_full(prior),
        "plans_within_noise_of_full": within_noise(prior),
        "memory_share": {label: round(float(np.nanmean(prior.memory[:, j] / whole)), 3) for j, label in enumerate(labels(prior))},
        "front_points": on_fronts(prior, labels(prior)),
        **bytes_beside(prior),
    }


def _effects(prior: PriorData, columns: Sequence[int], groups: Sequence[str]) -> dict[str, float]:
    """What plans have in common over tasks beyond their group; runs of the first seed, which all have, in deviations of their task."""
    runs = prior.runs[:, columns, 0] / rests(prior)[:, None]
    return rounded(split_variance(runs, np.unique(groups, return_inverse=True)[1]))


def bytes_beside(prior: PriorData) -> dict[str, Any]:
    """Measured peaks beside predicted ones: all, and by family."""
    ratio, apart = prior.measured / prior.memory, (prior.measured - prior.memory) / 2**20
    families = np.array([task.family for task in prior.tasks])
    most = np.unravel_index(int(np.nanargmax(ratio)), ratio.shape)
    return {
        "measured_over_predicted": {f"p{q}": round(float(np.nanpercentile(ratio, q)), 4) for q in (0, 5, 50, 95, 100)},
        "measured_over_predicted_most": [prior.tasks[most[0]].name, labels(prior)[most[1]], round(float(ratio[most]), 4)],
        "measured_minus_predicted_mib": {
            name: [round(float(np.percentile(apart[families == name], q)), 1) for q in (0, 50, 100)]
            for name in dict.fromkeys(families)
        },
        "measured_memory_share": {
            label: round(float(share), 3) for label, share in zip(labels(prior), _measured_share(prior).mean(axis=0), strict=True)
        },
    }


def _measured_share(prior: PriorData) -> Array:
    return prior.measured / prior.measured[:, [labels(prior).index(FULL)]]


def _means(values: Array, groups: Sequence[str]) -> dict[str, dict[str, float]]:
    """Over the columns of each group."""
    return {name: figures(values[:, [one == name for one in groups]].mean(axis=1)) for name in dict.fromkeys(groups)}


def _apart(prior: PriorData) -> Array:
    """How far plans lie above full precision, in deviations of that difference, (tasks, plans)."""
    errors, full = means(prior), labels(prior).index(FULL)
    deviation = rests(prior)[:, None] * np.sqrt(1 / prior.counts + 1 / prior.counts[:, [full]])
    return (errors - errors[:, [full]]) / deviation


def above_full(prior: PriorData) -> dict[str, float]:
    """The mean over tasks times the root of their number: one deviation is what noise alone comes to."""
    return {label: round(float(z.mean() * np.sqrt(len(z))), 2) for label, z in zip(labels(prior), _apart(prior).T, strict=True)}


def within_noise(prior: PriorData) -> dict[str, int]:
    """On how many tasks a plan is not worse than full precision by more than NOISE deviations of the difference."""
    return {label: int((z <= NOISE).sum()) for label, z in zip(labels(prior), _apart(prior).T, strict=True)}


def draw_stored(prior: PriorData) -> None:
    """What plans lose, by task, in the order of their bytes."""
    whole = np.array([task.full_bytes for task in prior.tasks], dtype=np.float64)
    order = np.argsort(np.nanmean(prior.memory / whole[:, None], axis=0), kind="stable")
    names = [labels(prior)[j].replace("@bf16", "").replace("+bf16", "+") for j in order]
    rows = [task.name for task in prior.tasks]
    title, unit = "Stored prior, the fewest bytes first: what plans lose", "of what full precision learns is lost"
    _save("stored", draw(Map(title, rows, names, lost(prior)[:, order], 0.3, (), unit), cell=(18, 16)))


def _save(name: str, text: str) -> None:
    PICTURES.mkdir(parents=True, exist_ok=True)
    (PICTURES / f"{name}.svg").write_text(text, encoding="utf-8")


def main() -> None:
    """Of the priors that are there."""
    facts: dict[str, Any] = {}
    for name, (learn, show) in {"simulated": (simulated_facts, draw_simulated), "stored": (stored_facts, draw_stored)}.items():
        if name in available():
            prior = load(name)
            facts[name] = learn(prior)
            show(prior)
    RESULTS.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(facts, indent=1))


if __name__ == "__main__":
    main()
