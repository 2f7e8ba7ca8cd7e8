"""Trials for a prior at 15 to 30 % of the baseline's memory: 2-bit, 4-bit and mixed plans, checkpointing; one process a trial.

    python benchmarks/collect_low_budgets.py plans --to plans.json                    on a CPU: plans of each task, with predicted bytes
    python benchmarks/collect_low_budgets.py run plans.json --to out --seconds 390    on one GPU: trains, one JSON line a trial
    python benchmarks/collect_low_budgets.py rows out/*.jsonl --to rows.json          rows that `read_rows` reads

Tasks and plans: `--set activations` or `--set state` (low_budget_tasks.py). `run` first trains the weights that tasks start from, and saves
them in the folder of PAREDOWN_DATA. It tries three learning rates of each task without one at full precision, takes the best, and trains
every plan with seed 0, then 1, then 2, in `--workers` processes. It stops after `--seconds`. With `--done`, files of earlier calls, it goes
on where they ended: no trial runs twice. A plan that diverged with one seed is not run with further ones. Then one process alone times
steps of every plan on each network, for `--timing` seconds at most. A task of plans.json may have an `order`: indices of the plans to run,
the first ones first; and a `group`: all seeds of group 0 run before those of group 1. Needs no database. `--tiny`: sizes for a CPU.
`rows --metric loss`: the loss is the error of every trial, and the names of tasks say so. `rows --without-peaks`: no measured bytes.
`rows --trained`: only tasks whose baseline trains to a mean loss a tenth below random guessing or more; a loss above that counts as it.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import multiprocessing
import os
import queue
import statistics
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import product, zip_longest
from pathlib import Path
from typing import Any

import torch
from low_budget_tasks import SETS, TaskSet, rates_of, tiny

from paredown.assignment.assign import PlanTemplate
from paredown.errors import BudgetError
from paredown.formats.catalog import TIERS
from paredown.plan.footprint import footprint
from paredown.plan.plan import Plan
from paredown.study.tasks.evaluate import (
    NUM_STEPS,
    MemoryMeter,
    StepTimer,
    commit,
    curve_of,
    deterministic,
    device_name,
    find_device,
    is_out_of_memory,
    seeded,
    versions,
)
from paredown.study.tasks.lookup import DATA, find_task, parse_options
from paredown.study.tasks.task import Task
from paredown.study.tasks.task_trace import trace_task
from paredown.study.tasks.training import Loop, TrainingSetup, judge, train, with_scores
from paredown.study.tasks.trial import Status, Trial

NUM_SEEDS = 3
MOST_ATTEMPTS = 2
TRAINED = 0.9  # most loss of the baseline of a task that trains, relative to random guessing
START = "start "  # of the key of a job that trains weights to start from
BASELINE = {"plan": Plan().to_json(), "bytes": 0}

WEIGHT4, GRADIENT4 = {"weight": "int4/64@e8m0"}, {"gradient": "int4/64@bf16"}
STATE_FORMATS: Mapping[str, Mapping[str, str]] = {
    **TIERS,
    "lpmm4 weight4": {**TIERS["lpmm4"], **WEIGHT4},
    "lpmm4 gradient4": {**TIERS["lpmm4"], **GRADIENT4},
    "lpmm4 weight4 gradient4": {**TIERS["lpmm4"], **WEIGHT4, **GRADIENT4},
    "lpmm weight4 gradient4": {**TIERS["lpmm"], **WEIGHT4, **GRADIENT4},
}  # tiers, and what labels call their variants with weights or gradients in 4 bits


def task_name(data: str, how: Mapping[str, Any], **more: Any) -> str:
    """A task by name, its options in order."""
    return f"{data}#" + ",".join(f"{name}={value}" for name, value in sorted({**how, **more}.items()))


# --- Plans ------------------------------------------------------------------------------------------------------------


def plans_of(task: Task, chosen: TaskSet, device: str) -> list[dict[str, Any]]:
    """The baseline and all plans of the set that can be made for a task within its share of the baseline's peak, with predicted bytes."""
    uniform: list[Any] = [
        ({} if format is None else {"activation": format}) | dict(STATE_FORMATS[tier]) for format, tier in chosen.uniform
    ]
    plans = [Plan(), *(Plan.uniform(**formats) for formats in uniform)]
    trace = trace_task(task, Plan.preset("lpmm"), device)
    for template in map(PlanTemplate.parse, chosen.templates):
        try:
            plans.append(template.make(trace))
        except BudgetError as error:
            print(f"{task.name}: {template}: {str(error)[:120]}", flush=True)
    made = make_plans_once(plans)
    rows: list[dict[str, Any]] = [
        {"plan": plan.to_json(), "bytes": footprint(trace_task(task, plan, device), plan).peak_bytes} for plan in made
    ]
    return [row for row in rows if row is rows[0] or row["bytes"] <= chosen.most_share * rows[0]["bytes"]]


def make_plans_once(plans: Iterable[Plan]) -> list[Plan]:
    """The plans, equal ones of several templates as one with all of their names."""
    by_key: dict[object, Plan] = {}
    for plan in plans:
        other = by_key.get(plan.key)
        names = [str(one.made_for["recipe"]) for one in (other, plan) if one is not None and "recipe" in one.made_for]
        by_key[plan.key] = replace(plan, made_for={**plan.made_for, "recipe": "; ".join(names)}) if names else plan
    return list(by_key.values())


def write_plans(to: Path, chosen: TaskSet, *, is_tiny: bool) -> None:
    """The plans of all tasks of a set, without learning rates that are to be tried."""
    chosen = replace(chosen, most_share=1.0) if is_tiny else chosen
    found: list[dict[str, Any]] = []
    for number, (data, how) in enumerate(chosen.tasks):
        options = tiny(how) if is_tiny else dict(how)
        new = {name: value for name, value in options.items() if name != "start"}  # values of weights change no plan
        task = find_task(task_name(data, new))
        plans = plans_of(task, chosen, "cpu" if is_tiny else "cuda")
        full = plans[0]["bytes"]
        print(task.name, *(f"{row['bytes'] / full:.3f}" for row in plans), flush=True)
        entry = {"data": data, "how": options, "plans": plans, "tf32": chosen.has_tf32, "group": int(number >= chosen.num_first)}
        if "start" in options:
            head, _, tail = chosen.starts[options["start"]].partition("#")
            start_options = parse_options(tail)
            entry["start"] = task_name(head, tiny(start_options) if is_tiny else start_options)
        found.append(entry)
    to.write_text(json.dumps(found), encoding="utf-8")


# --- One trial --------------------------------------------------------------------------------------------------------


@cache
def known_task(name: str) -> Task:
    """A task by name; its data is read once in a process."""
    return find_task(name)


def run_trial(job: Mapping[str, Any]) -> Trial:
    """Train the job's task under its plan. Predicted bytes are the job's: a trace for every trial would take as long as its training."""
    task, plan, device = known_task(job["task"]), Plan.from_json(job["plan"]), find_device(None)
    torch.set_float32_matmul_precision("high" if job.get("tf32") else "highest")
    setting = TrainingSetup(task, plan, job["seed"], device)
    head = Trial(task.name, plan, job["seed"], Status.DONE, predicted_peak_bytes=job["bytes"])
    head = replace(head, device=device_name(device), versions=versions(), commit=commit())
    begun, curve, meter = time.perf_counter(), curve_of(task), MemoryMeter(device)
    try:
        with seeded(setting), deterministic(device):
            batches = task.data.batches(task.batch, seed=setting.seed, device=device)
            gc.collect()  # tensors of earlier trials that are freed later would be subtracted from the peak
            meter.start()
            model = setting.placed_model()
            with setting.session(model) as session:
                loop = Loop(setting, model, session)
                train(loop, batches, curve)
                meter.stop()
                trial = replace(head, curve=tuple(curve.points), measured_peak_bytes=meter.bytes)
                if curve.verdict is not None:
                    trial = replace(trial, status=curve.verdict.status, reason=curve.verdict.reason)
                trial = trial if trial.status is Status.DIVERGED else with_scores(trial, *judge(loop))
                if "save" in job:
                    save_weights(model, job["save"])
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        trial = replace(head, status=Status.OUT_OF_MEMORY, reason=str(error)[:200])
    finally:
        meter.stop()
    return replace(trial, seconds=time.perf_counter() - begun)


def start_path(file: str) -> Path:
    """Where weights to start from are saved."""
    return Path(os.environ.get(DATA) or ".") / file


def save_weights(model: torch.nn.Module, file: str) -> None:
    """Save the weights of a model; other processes see the file when it is complete."""
    part = start_path(f"{file}.part")
    torch.save({name: value.cpu() for name, value in model.state_dict().items()}, part)
    part.rename(start_path(file))


def work(jobs: Any, results: Any) -> None:
    """The main function of a worker: trains what it receives. After an error of CUDA the process ends, and another one begins."""
    torch.set_num_threads(1)
    while (job := jobs.get()) is not None:
        try:
            results.put((job["key"], run_trial(job).to_json(), ""))
        except Exception as error:
            results.put((job["key"], None, traceback.format_exc()[-1500:]))
            if "CUDA" in str(error):
                results.close()
                results.join_thread()
                os._exit(3)


def time_steps(tasks: list[dict[str, Any]], to: Path, seconds: float) -> None:
    """Median step seconds of every plan on each network, one line each, until the time is over; nothing else may run meanwhile."""
    end, device, timed = time.monotonic() + seconds, find_device(None), set[tuple[str, int]]()
    with (to / "times.jsonl").open("w", encoding="utf-8") as file:
        for task in tasks:
            how, first_rate = _network(task["how"]), rates_of(task["how"])[0]
            for index in task.get("order", range(len(task["plans"]))):
                if time.monotonic() > end:
                    return
                if (how, index) in timed:
                    continue
                timed.add((how, index))
                row = task["plans"][index]
                plan = Plan.from_json(row["plan"])
                torch.set_float32_matmul_precision("high" if task.get("tf32") else "highest")
                try:
                    measured = step_seconds(known_task(task_name(task["data"], task["how"], lr=first_rate)), plan, device)
                except Exception as error:
                    print(f"{task['data']} {task['how']['model']}: no step time: {error}"[:300], flush=True)
                    continue
                file.write(json.dumps({"how": task["how"], "plan": row["plan"], "seconds": measured}) + "\n")
                file.flush()


def step_seconds(task: Task, plan: Plan, device: torch.device) -> float | None:
    """The median seconds of a step of `task` under `plan`."""
    setting, timer = TrainingSetup(task, plan, 0, device), StepTimer(device)
    with seeded(setting), deterministic(device):
        batches, model = task.data.batches(task.batch, seed=0, device=device), setting.placed_model()
        with setting.session(model) as session:
            loop = Loop(setting, model, session)
            for step, (x, answers) in zip(range(NUM_STEPS), batches, strict=False):
                loop.step(x, answers, task.settings.lr)
                timer.after(step + 1)
            return timer.seconds()


# --- All trials -------------------------------------------------------------------------------------------------------


class Collection:
    """The trials that are done, what to run next, and the rates that were chosen."""

    def __init__(self, tasks: list[dict[str, Any]], done: Iterable[Path]) -> None:
        self.tasks = tasks
        self.trials: dict[str, dict[str, Any]] = {}
        for path in done:
            for line in path.read_text(encoding="utf-8").splitlines():
                row = json.loads(line)
                self.trials[row["key"]] = row["trial"]
        self.running: set[str] = set()
        self.failures: Counter[str] = Counter()
        self.reasons: list[str] = []

    def add(self, key: str, trial: dict[str, Any]) -> None:
        """Note the trial of a job."""
        self.running.discard(key)
        self.trials |= {} if key.startswith(START) else {key: trial}

    def fail(self, key: str, reason: str) -> None:
        """Note that a job failed; it is tried MOST_ATTEMPTS times."""
        self.running.discard(key)
        self.failures[key] += 1
        self.reasons.append(f"{key}\n{reason}")

    def next_job(self) -> dict[str, Any] | None:
        """The next job to start; None where nothing is left, or where the rates of all other tasks are still being tried."""
        for job in self.jobs():
            key = job["key"]
            if key not in self.trials and key not in self.running and self.failures[key] < MOST_ATTEMPTS:
                return job
        return None

    def jobs(self) -> Iterable[dict[str, Any]]:
        """All jobs that can run now: weights to start from, rates, then group after group, in a group seed after seed, tasks in turn."""
        yield from self.start_jobs()
        for number, task in enumerate(self.tasks):
            yield from (self.job(number, 0, 0, lr) for lr in rates_of(task["how"]) if self.can_start(number))
        groups = [task.get("group", 0) for task in self.tasks]
        for group, seed in product(sorted(set(groups)), range(NUM_SEEDS)):
            numbers = [number for number, own in enumerate(groups) if own == group]
            yield from self.jobs_of(numbers, seed)

    def start_jobs(self) -> Iterable[dict[str, Any]]:
        """A job for each file of weights that is not there yet; its trial is not noted."""
        for task in self.tasks:
            if "start" in task and not start_path(file := task["how"]["start"]).exists():
                yield {"key": f"{START}{file}", "task": task["start"], "seed": 0, "save": file, "tf32": task["tf32"], **BASELINE}

    def can_start(self, number: int) -> bool:
        """Whether the weights that a task starts from are there."""
        task = self.tasks[number]
        return "start" not in task or start_path(task["how"]["start"]).exists()

    def jobs_of(self, numbers: Sequence[int], seed: int) -> Iterable[dict[str, Any]]:
        """The jobs of these tasks with this seed, tasks in turn; not of tasks whose rate is not known yet."""
        rates = [self.rate(number) for number in numbers]
        orders = [self.tasks[number].get("order", range(len(self.tasks[number]["plans"]))) for number in numbers]
        for places in zip_longest(*orders):
            for number, index, lr in zip(numbers, places, rates, strict=True):
                if index is not None and lr is not None and not self.has_diverged(number, index, lr, seed):
                    yield self.job(number, index, seed, lr)

    def job(self, number: int, index: int, seed: int, lr: float) -> dict[str, Any]:
        """A job: task with its rate, plan and seed."""
        task = self.tasks[number]
        name = task_name(task["data"], task["how"], lr=lr)
        more = {"tf32": task.get("tf32", False), **task["plans"][index]}
        return {"key": f"{name} plan {index} seed {seed}", "task": name, "seed": seed, **more}

    def has_diverged(self, number: int, index: int, lr: float, seed: int) -> bool:
        """Whether the plan diverged with an earlier seed."""
        earlier = (self.trials.get(self.job(number, index, other, lr)["key"]) for other in range(seed))
        return any(trial is not None and trial["status"] == Status.DIVERGED.value for trial in earlier)

    def rate(self, number: int) -> float | None:
        """The rate of least loss at full precision; None before all are known, or before the weights to start from are there.

        A rate that failed twice counts as diverged. A task with one rate of its own has it.
        """
        rates = rates_of(self.tasks[number]["how"])
        if len(rates) == 1:
            return rates[0] if self.can_start(number) else None
        found: list[tuple[float, float]] = []
        for lr in rates:
            key = self.job(number, 0, 0, lr)["key"]
            if key not in self.trials and self.failures[key] < MOST_ATTEMPTS:
                return None
            loss = self.trials.get(key, {}).get("loss")
            found.append((math.inf if loss is None else loss, lr))
        return min(found)[1]

    def show(self, num_before: int) -> None:
        """Print what was done and what is left."""
        failed = sum(count >= MOST_ATTEMPTS for count in self.failures.values())
        left = sum(job["key"] not in self.trials for job in self.jobs()) - failed
        print(f"{len(self.trials) - num_before} trials now, {len(self.trials)} in all, {left} left, {failed} failed")
        for number, task in enumerate(self.tasks):
            name = task_name(task["data"], {**task["how"], "lr": self.rate(number)})
            seconds = sorted(trial["seconds"] for trial in self.trials.values() if trial["task"] == name)
            print(name, f"{len(seconds)} trials", f"median {seconds[len(seconds) // 2]:.1f} s" if seconds else "")


class Workers:
    """Processes that run one job each at a time; a process that died is replaced."""

    def __init__(self, num_workers: int, collection: Collection) -> None:
        self._context = multiprocessing.get_context("spawn")
        self.results: Any = self._context.Queue()
        self._collection = collection
        self._processes: list[Any] = [None] * num_workers
        self._jobs: list[Any] = [None] * num_workers
        self.current: list[str | None] = [None] * num_workers

    def feed(self) -> None:
        """Give every idle worker a job."""
        for place, process in enumerate(self._processes):
            if process is None or not process.is_alive():
                self._replace(place)
            if self.current[place] is None and (job := self._collection.next_job()) is not None:
                self.current[place] = job["key"]
                self._collection.running.add(job["key"])
                self._jobs[place].put(job)

    def _replace(self, place: int) -> None:
        """Start a process; the job of the one before counts as failed once."""
        if self.current[place] is not None:
            self._collection.fail(self.current[place], "its process died")
        self.current[place], self._jobs[place] = None, self._context.SimpleQueue()
        self._processes[place] = self._context.Process(target=work, args=(self._jobs[place], self.results), daemon=True)
        self._processes[place].start()

    def release(self, key: str) -> None:
        """Note that the worker of this job is idle."""
        if key in self.current:
            self.current[self.current.index(key)] = None

    def kill(self) -> None:
        """End all processes."""
        for process in (process for process in self._processes if process is not None):
            process.kill()
            process.join()


def run(plans: Path, to: Path, done: Iterable[Path], num_workers: int, seconds: float) -> None:
    """Run all trials that are left, until the time is over."""
    end = time.monotonic() + seconds
    collection = Collection(json.loads(plans.read_text(encoding="utf-8")), done)
    before, workers = len(collection.trials), Workers(num_workers, collection)
    to.mkdir(parents=True, exist_ok=True)
    with (to / f"trials-{before}.jsonl").open("w", encoding="utf-8") as file:
        while time.monotonic() < end:
            workers.feed()
            if not any(workers.current):
                break
            try:
                key, trial, failure = workers.results.get(timeout=0.5)
            except queue.Empty:
                continue
            workers.release(key)
            if trial is None:
                collection.fail(key, failure)
                continue
            collection.add(key, trial)
            if key.startswith(START):
                continue
            file.write(json.dumps({"key": key, "trial": trial}) + "\n")
            file.flush()
    workers.kill()
    (to / "failures.txt").write_text("\n".join(collection.reasons), encoding="utf-8")
    collection.show(before)


# --- Rows -------------------------------------------------------------------------------------------------------------


def write_rows(files: Iterable[Path], to: Path, sweep: str = "low_budgets", metric: str = "", *, has_peaks: bool = True) -> None:
    """Rows as `paredown sweep export` writes them, with the step times of times.jsonl and without rates that were not chosen.

    A step time and the baseline's are of one file: the last one that has both, since hosts differ. `metric`: "loss" or that of the task.
    """
    by_file = [[json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] for path in files]
    trials = [row["trial"] for lines in by_file for row in lines if "trial" in row]
    seconds: dict[tuple[str, str], tuple[float, float]] = {}
    for lines in by_file:
        own_times = {(_network(row["how"]), _plan_text(row["plan"])): row["seconds"] for row in lines if "seconds" in row}
        baselines = {network: time for (network, plan), time in own_times.items() if plan == _plan_text(Plan().to_json())}
        seconds |= {key: (time, baselines[key[0]]) for key, time in own_times.items() if key[0] in baselines}
    chosen = {trial["task"] for trial in trials if trial["plan"]["rules"]}
    rows: list[dict[str, Any]] = []
    for trial in trials:
        network = _network(parse_options(trial["task"].partition("#")[2]))
        own, baseline = seconds.get((network, _plan_text(trial["plan"])), (None, None))
        timed = {**trial, "step_seconds": own, "baseline_step_seconds": baseline}
        timed |= {} if has_peaks else {"measured_peak_bytes": None}
        name = trial["task"]
        if metric == "loss" and not name.startswith("text:"):
            data, _, tail = name.partition("#")
            name = task_name(data, parse_options(tail), metric=metric)
            timed |= {"task": name, "error": trial.get("loss")}
        rows.append({"sweep": sweep, "task": name, "mode": "store", "trial": timed, "propensity": None})
    kept = [row for row, trial in zip(rows, trials, strict=True) if trial["task"] in chosen]
    to.write_text(json.dumps(kept), encoding="utf-8")


def trained(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The rows of tasks whose baseline trains."""
    losses: dict[str, list[float]] = {}
    for row in rows:
        if _plan_text(row["trial"]["plan"]) == _plan_text(Plan().to_json()):
            guess = math.log(known_task(row["task"]).data.num_answers or 2)
            losses.setdefault(row["task"], []).append(min(1.0, (row["trial"]["loss"] or math.inf) / guess))
    return [row for row in rows if statistics.mean(losses[row["task"]]) <= TRAINED]


def _network(options: Mapping[str, Any]) -> str:
    """The options of a task without those that do not change its step time."""
    return json.dumps({name: value for name, value in options.items() if name not in ("lr", "start")}, sort_keys=True)


def _plan_text(plan: Mapping[str, Any]) -> str:
    return json.dumps([plan["rules"], plan["recompute"]], sort_keys=True)


def main() -> None:
    """Make the plans, run the trials, or write their rows."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("what", choices=("plans", "run", "rows"))
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--to", type=Path, required=True)
    parser.add_argument("--done", nargs="*", type=Path, default=[])
    parser.add_argument("--workers", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=390.0)
    parser.add_argument("--timing", type=float, default=40.0)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--set", choices=tuple(SETS), default="activations")
    parser.add_argument("--metric", choices=("error", "loss"), default="error")
    parser.add_argument("--without-peaks", action="store_true")
    parser.add_argument("--trained", action="store_true")
    given = parser.parse_args()
    if given.what == "plans":
        write_plans(given.to, SETS[given.set], is_tiny=given.tiny)
    elif given.what == "run":
        run(given.files[0], given.to, given.done, given.workers, given.seconds)
        time_steps(json.loads(given.files[0].read_text(encoding="utf-8")), given.to, given.timing)
    else:
        write_rows(given.files, given.to, SETS[given.set].sweep, given.metric, has_peaks=not given.without_peaks)
        if given.trained:
            given.to.write_text(json.dumps(trained(json.loads(given.to.read_text(encoding="utf-8")))), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
