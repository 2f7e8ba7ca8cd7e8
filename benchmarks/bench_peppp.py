"""PEPPP's experiment on its released matrices, and the default picker beside it: every task left out in turn. A run in results/peppp.json.

    PAREDOWN_DATA=... python benchmarks/bench_peppp.py            # all settings and pickers, on two cores
    PAREDOWN_DATA=... python benchmarks/bench_peppp.py --quick    # settings I and II, few pickers, and no rows
    PAREDOWN_DATA=... python benchmarks/bench_peppp.py --only "pooled, no levels"     # settings I to IV of one picker, and ED-MF
    PAREDOWN_DATA=... python benchmarks/bench_peppp.py --speed    # from matrices to a proposal, on one core (OMP_NUM_THREADS=1)

A cell is the mean over 87 tasks and its standard error. `as released`: with the release's own fronts and areas, to compare with its
figures; other rows have the right ones. Regret is of single runs, mean regret of means over the nine plans of a level, which differ by
noise alone. The last tables are differences from ED-MF with 10 measurements, task by task.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
import tracemalloc
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from measure import RESULTS, machine
from numpy.typing import NDArray

from paredown.study.papers.peppp_cross_validation import SETTINGS, Cache, Matrices, PickerScores, held_out_tasks, judge
from paredown.study.papers.peppp_experiment_design import PICKERS, Measure, Picker, Pooled, Prediction, TaskKnowledge, front_gains
from paredown.study.pick.posterior import Prior

Array = NDArray[np.float64]
SCORES = ("convergence", "hypervolume", "regret", "mean_regret", "rmse")
COUNTS = (5, 6, 8, 10, 12, 15)
DROPPED = 28  # all of CIFAR-100
FOUR = ("I", "II", "III", "IV")
PAIRS = (("full", ("I", "II")), ("uniform", ("III", "IV")), ("cheap", ("V", "VI")), ("cheap, leaky", ("V leaky", "VI leaky")))
OURS, NO_LEVELS = "pooled", "pooled, no levels"


@dataclass(frozen=True)
class Job:
    """Settings that share their completions, who is judged, and how."""

    settings: tuple[str, ...]
    pickers: tuple[str, ...]
    is_released: bool = False


Found = dict[tuple[str, str, int, bool], PickerScores]


def matrices() -> Matrices:
    """The 87 tasks that the release uses, under 11 levels of 9 plans."""
    folder = Path(os.environ["PAREDOWN_DATA"]) / "peppp"
    accuracies, memory = np.load(folder / "acc_matrix_res64_all.npy"), np.load(folder / "mem_matrix_full.npy")
    return Matrices(np.delete(1 - accuracies, DROPPED, axis=0), np.delete(memory, DROPPED, axis=0), np.repeat(np.arange(11), 9))


def run(job: Job) -> Found:
    """All counts of all pickers of a job."""
    made, found = matrices(), Found()
    cache: Cache = {}
    for setting in job.settings:
        rows = held_out_tasks(made, SETTINGS[setting], cache)
        for name in job.pickers:
            known = [replace(row, known=replace(row.known, levels=None)) for row in rows] if name == NO_LEVELS else rows
            counts = (0, *COUNTS) if name == OURS else COUNTS
            for count, judged in judge(known, picker_of(name), counts, is_released=job.is_released).items():
                found[setting, name, count, job.is_released] = judged
    return found


def plugged(known: TaskKnowledge, measure: Measure, counts: Iterable[int]) -> dict[int, Prediction]:
    """ED-MF, whose Pareto front has measured errors in place of predicted ones."""
    found = PICKERS["ED-MF"](known, measure, counts)
    return {count: replace(prediction, drawn=prediction.expected) for count, prediction in found.items()}


def heaviest(known: TaskKnowledge, measure: Measure, counts: Iterable[int]) -> dict[int, Prediction]:
    """Recommends a random plan among those of most memory; errors are means over prior tasks."""
    order = np.random.RandomState(known.seed).permutation(len(known.memory))
    ranks = np.empty(len(order))
    ranks[np.lexsort((order, -known.memory))] = np.arange(len(order))
    return {count: replace(prediction, expected=ranks) for count, prediction in PICKERS["means"](known, measure, counts).items()}


def picker_of(name: str) -> Picker:
    """A published one, one that they are compared with, or ours."""
    return Pooled() if name in (OURS, NO_LEVELS) else {**PICKERS, "ED-MF plugged": plugged, "most memory": heaviest}[name]


def jobs(*, is_quick: bool, only: str | None = None) -> list[Job]:
    """What is run, the longest first."""
    if only is not None:
        return [Job(settings, ("ED-MF", only)) for _, settings in PAIRS[:2]]
    if is_quick:
        return [Job(("I", "II"), ("ED-MF", "QR-MF", "random-MF", OURS)), Job(("I", "II"), ("ED-MF",), is_released=True)]
    quick = ("ED-MF", "ED-MF plugged", "QR-MF", "random-MF", "means", "most memory", OURS)
    full, uniform, cheap, leaky = (settings for _, settings in PAIRS)
    return [
        Job(uniform, (*quick, "BO-MF", "BO-full", NO_LEVELS)),
        Job(full, (*quick, "BO-MF", "BO-full", NO_LEVELS)),
        Job(cheap, quick),
        Job(leaky, ("ED-MF",), is_released=True),
        Job(uniform[:1], ("ED-MF", "ED-MF+5", "QR-MF", "random-MF", "BO-MF worst"), is_released=True),
        Job(full, ("ED-MF", "ED-MF+5", "QR-MF", "random-MF"), is_released=True),
        Job(full[:1], ("ED-MF relaxed",)),
    ]


def table(found: Found) -> Iterable[str]:
    """A line for each setting and picker, the scores of each count."""
    for setting, name, is_released in dict.fromkeys((s, n, r) for s, n, _, r in found):
        yield f"{setting:9s}{name}{', as released' * is_released}"
        for count in sorted(c for s, n, c, r in found if (s, n, r) == (setting, name, is_released)):
            judged = found[setting, name, count, is_released]
            cells = (f"{score} {judged.mean(score):.4f} ({judged.standard_error(score):.4f})" for score in SCORES)
            yield f"   n={count:2d}  " + "  ".join(cells)


def differences(found: Found, name: str, count: int) -> Iterable[str]:
    """`name` with `count` measurements against ED-MF with 10: of each setting, and the means over settings I to IV."""
    yield f"\n{name} with {count} against ED-MF with 10"
    settings = [setting for setting in (*FOUR, "V", "VI") if (setting, name, count, False) in found]
    for setting in settings:
        ours, theirs = found[setting, name, count, False], found[setting, "ED-MF", 10, False]
        apart = {score: ours.values(score) - theirs.values(score) for score in SCORES}
        cells = (f"{score} {values.mean():+.4f} ({values.std(ddof=1) / len(values) ** 0.5:.4f})" for score, values in apart.items())
        yield f"   {setting:5s}" + "  ".join(cells)
    settings = [setting for setting in settings if setting in FOUR]
    yield f"   mean of {', '.join(settings)}: " + "  ".join(
        f"{score} {100 * change:+.0f} %" for score, change in changes(found, name, count).items()
    )


def changes(found: Found, name: str, count: int) -> dict[str, float]:
    """How much less or more than ED-MF with 10, in parts; means over those of settings I to IV that were run."""
    settings = [setting for setting in FOUR if (setting, name, count, False) in found]
    means = {
        who: {score: np.mean([found[s, who, n, False].mean(score) for s in settings]) for score in SCORES}
        for who, n in ((name, count), ("ED-MF", 10))
    }
    return {score: float(means[name][score] / means["ED-MF"][score] - 1) for score in SCORES}


def save(found: Found, seconds: float) -> None:
    """Add a run to the results: means and standard errors, and the changes."""
    cells = [
        {
            "setting": setting,
            "picker": name,
            "measurements": count,
            "is_released": is_released,
            **{score: [round(judged.mean(score), 5), round(judged.standard_error(score), 5)] for score in SCORES},
        }
        for (setting, name, count, is_released), judged in found.items()
    ]
    there = [name for name in (OURS, NO_LEVELS) if any(who == name for _, who, _, _ in found)]
    against = {f"{name}, {n}": changes(found, name, n) for name in there for n in (5, 10)}
    append({"seconds": round(seconds, 1), "against_ED-MF_10": against, "rows": cells})


def append(run: dict[str, object]) -> None:
    """Add a run to the results."""
    path = RESULTS / "peppp.json"
    runs = json.loads(path.read_text()) if path.exists() else []
    runs.append({**machine("cpu", ("numpy", "scipy")), **run})
    text = json.dumps(runs).replace('{"setting"', '\n  {"setting"').replace('{"job"', '\n  {"job"')
    path.write_text(text + "\n")


# --- speed ----------------------------------------------------------------------------------------------------------------


def proposal(errors: Array, memory: Array, levels: NDArray[np.intp] | None) -> int:
    """From matrices to the plan to measure first."""
    prior, seen = Prior.of(errors, levels), np.full(errors.shape[1], np.nan)
    return int(front_gains(prior, prior.gaussian.given([], []), memory / memory.max(), seen).argmax())


def speeds() -> Iterable[dict[str, object]]:
    """Seconds of the processor, median of 9, and the most memory that numpy took, in bytes and as a multiple of the matrix."""
    made = matrices()
    rng = np.random.default_rng(0)
    sampled = np.where(rng.random(made.errors.shape) < 0.2, made.errors, np.nan)
    loose = rng.standard_normal((2000, 5)) @ rng.standard_normal((5, 1000)) + rng.standard_normal((2000, 1000))
    jobs = {
        "levels given": (made.errors, made.memory[0], made.levels),
        "levels found": (made.errors, made.memory[0], None),
        "levels found, a fifth known": (sampled, made.memory[0], None),
        "levels found, large": (0.5 + 0.03 * loose, np.linspace(0.2, 1.0, 1000), None),
    }
    for name, (errors, memory, levels) in jobs.items():
        seconds = [
            processor_seconds(lambda job=(errors, memory, levels): proposal(*job)) for _ in range(9 if len(errors) < 1000 else 3)
        ]
        tracemalloc.start()
        proposal(errors, memory, levels)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        found = {"job": f"proposal, {name}", "shape": list(errors.shape), "median_seconds": round(statistics.median(seconds), 4)}
        yield {**found, "peak_bytes": peak, "times_the_matrix": round(peak / errors.nbytes, 1)}


def processor_seconds(call: Callable[[], object]) -> float:
    """Of one call."""
    start = time.process_time()
    call()
    return time.process_time() - start


def main() -> None:
    """Run all of it, print the tables and append the run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="settings I and II, few pickers, and no rows")
    parser.add_argument("--only", help="one picker beside ED-MF, in settings I to IV")
    parser.add_argument("--speed", action="store_true", help="time a proposal instead, and append its rows")
    options = parser.parse_args()
    if options.speed:
        rows = list(speeds())
        print("\n".join(map(str, rows)))
        append({"speed": rows})
        return
    start, found = time.perf_counter(), Found()
    with ProcessPoolExecutor(2) as pool:
        for part in pool.map(run, jobs(is_quick=options.quick, only=options.only)):
            found |= part
    seconds = time.perf_counter() - start
    print("\n".join(table(found)))
    for name, count in ((OURS, 10), (OURS, 5), (NO_LEVELS, 10), (NO_LEVELS, 5)):
        if any(who == name for _, who, _, _ in found):
            print("\n".join(differences(found, name, count)))
    print(f"\n{seconds:.0f} s")
    if not options.quick:
        save(found, seconds)


if __name__ == "__main__":
    main()
