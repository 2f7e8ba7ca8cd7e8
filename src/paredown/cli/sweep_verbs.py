"""`paredown sweep run|status|export|merge` and `paredown worker` run many trials, resumably. docs/sweeps.md is the guide.

`WorkRequest.work_on` shows progress: on a terminal a bar, trials per minute, the time left and the best plans; in a pipe one JSON object
per line, `finished` for each result after it is in the store, and `progress` every ten seconds.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager, redirect_stdout
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paredown.cli import application as cli
from paredown.cli.output import clean, emit, say, tell, to_json
from paredown.errors import ParedownError

if TYPE_CHECKING:
    from paredown.study.sweeps.engines.engine import Engine
    from paredown.study.sweeps.engines.ray import RayOptions
    from paredown.study.sweeps.runner import TaskFolder
    from paredown.study.sweeps.status import SweepProgress, SweepWatcher
    from paredown.study.sweeps.store import Store
    from paredown.study.sweeps.sweep import Claim
    from paredown.study.tasks.trial import Status, Trial


PIPE_SECONDS = 10.0  # between lines of progress in a pipe
SHOWN_BEST = 5
BAR_WIDTH = 60
ENGINES_HELP = "Where trials run: local (a process each), graphs (simulated trials in CUDA graphs), inline, or ray."


# callbacks of WorkerOptions: after each result, between results, for messages
Callbacks = tuple["Callable[[Claim, Trial], object]", "Callable[[], object]", "Callable[[str], object]"]


@contextmanager
def _pipe(watcher: SweepWatcher) -> Generator[Callbacks]:
    """Return a context that yields a worker's callbacks, which print results and the progress in `watcher` as lines of JSON.

    What other code prints to stdout meanwhile goes to stderr.
    """
    lines = partial(print, file=sys.stdout, flush=True)

    def on_result(claim: Claim, trial: Trial) -> None:
        figures = {"task": trial.task, "label": claim.label, "seed": trial.seed, "status": trial.status.value, "error": trial.error}
        lines(to_json({"event": "finished", "key": claim.key, "sweep": claim.sweep, **figures, "reason": trial.reason}))

    def idle(*, is_due: bool = False) -> None:
        for progress in watcher.look(is_due=is_due):
            lines(to_json(progress.to_json()))

    with redirect_stdout(sys.stderr):
        try:
            yield on_result, idle, say
        finally:
            idle(is_due=True)


@contextmanager
def _terminal(watcher: SweepWatcher) -> Generator[Callbacks]:
    from rich.live import Live

    with Live(refresh_per_second=4) as live:

        def idle(*, is_due: bool = False) -> None:
            if progress := watcher.look(is_due=is_due):
                live.update(_display(progress))

        def on_result(claim: Claim, trial: Trial) -> None:
            if trial.reason:
                about = f"{trial.task}, {claim.label}, seed {trial.seed}"
                live.console.print(clean(f"{about}: {trial.status.value}: {trial.reason}"), markup=False)

        try:
            yield on_result, idle, lambda message: live.console.print(clean(message), markup=False)
        finally:
            idle(is_due=True)


def _display(sweeps: list[SweepProgress]) -> Any:
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    table = Table.grid()
    for progress in sweeps:
        table.add_row(ProgressBar(total=max(progress.counts.total, 1), completed=progress.counts.finished, width=BAR_WIDTH))
        table.add_row(Text(clean(str(progress))))  # Text, since a name can contain markup
        for one in progress.best[:SHOWN_BEST]:
            table.add_row(Text(clean(f"  best of {one}")))
    return table


# --- the subcommands -------------------------------------------------------------------------------------------------

sweep_app = typer.Typer(no_args_is_help=True, rich_markup_mode="rich", help="Many trials: tasks x plans x seeds, resumable.")
cli.app.add_typer(sweep_app, name="sweep", rich_help_panel=cli.MANY)


@dataclass(frozen=True, kw_only=True)
class WorkRequest:
    """The arguments that `paredown sweep run` and `paredown worker` share."""

    store: cli.StoreOption = None
    tasks: cli.TasksOption = None
    slots: Annotated[int | None, cli.option("Trials that run in parallel. (default: one per GPU, or one)", min=1)] = None
    ray: Annotated[Path | None, cli.option("With --engine ray: GPUs, placement and environment of a trial.", metavar="FILE")] = None
    patience: Annotated[
        float, typer.Option(min=1.0, help="Seconds without a heartbeat after which a worker's trials run elsewhere.")
    ] = 20.0
    is_json: cli.JsonOption = False

    def ray_options(self) -> RayOptions | None:
        """Return the options for a Ray cluster in the file that --ray names; None without --ray."""
        from paredown.study.sweeps.engines.ray import RayOptions

        return None if self.ray is None else RayOptions.load(self.ray)

    def work_on(self, opened: Store, sweep: str | None, folder: TaskFolder, engine: Engine, *, stays: bool = False) -> None:
        """Run the trials of `sweep` (None: of all sweeps) in the database `opened` by `engine`, and show progress.

        Tasks that `folder` refuses are left to other workers. With `stays`, it goes on waiting for new trials when all are finished.
        """
        from paredown.study.sweeps.status import SweepWatcher
        from paredown.study.sweeps.worker import WorkerOptions, work

        is_terminal = sys.stdout.isatty() and not self.is_json
        watcher = SweepWatcher(opened, sweep, seconds=1.0 if is_terminal else PIPE_SECONDS)
        with _terminal(watcher) if is_terminal else _pipe(watcher) as callbacks:
            work(opened, engine, WorkerOptions(sweep, folder.refuses, *callbacks, stays=stays, patience_seconds=self.patience))


@cli.verb(sweep_app, "run", "paredown sweep run sweep.toml --slots 4", "paredown sweep run sweep.toml --again failed,killed")
def sweep_run(
    file: Annotated[Path, typer.Argument(help="The sweep, a TOML file.")],
    *,
    request: WorkRequest,
    engine: Annotated[str | None, cli.option(f"{ENGINES_HELP} (default: chosen for the sweep)")] = None,
    again: Annotated[str, typer.Option(help="Run trials with these statuses again, such as failed,killed.")] = "",
) -> None:
    """Run a sweep to its end. After an interruption the same command runs the trials that are left."""
    from paredown.study.sweeps.runner import TaskFolder, add_sweep, engine_for, make_engine, report_infeasible
    from paredown.study.sweeps.sweep_file import load_sweep
    from paredown.study.tasks.task_trace import predicted_bytes

    loaded = load_sweep(file)
    folder = TaskFolder((request.tasks or loaded.folder).resolve())
    chosen, of_ray = engine or engine_for(loaded.sweep), request.ray_options()
    with cli.kept_in_store(), open_store(request.store or loaded.store or str(file.with_suffix(".db"))) as opened:
        added = add_sweep(loaded.sweep, opened, cost=lambda task, plan: predicted_bytes(task, plan, folder.path))
        reopened = opened.reopen(loaded.sweep.name, _statuses(again)) if again else 0
        counts = f"{added.num_new} trials are new, {added.num_there} were there, {reopened} run again"
        say(f"{counts}; store {opened.database.name}, engine {chosen}")
        report_infeasible(opened, loaded.sweep.name, say)
        request.work_on(opened, loaded.sweep.name, folder, make_engine(chosen, folder, slots=request.slots, ray=of_ray))


@cli.verb(cli.app, "worker", "paredown worker --store trials.db --tasks my_tasks", panel=cli.MANY)
def worker(
    request: WorkRequest,
    sweep: cli.SweepOption = None,
    engine: Annotated[str, typer.Option(help=ENGINES_HELP)] = "local",
    stays: Annotated[bool, typer.Option("--stay", help="Keep running and wait for new trials when all are finished.")] = False,
    wait: Annotated[str, typer.Option(help="How long to wait for a store that is not there yet, or has no trials yet.")] = "60s",
) -> None:
    """Join the sweeps of a store, from any machine. Without --tasks only built-in tasks are run."""
    from paredown.sizes import parse_seconds
    from paredown.study.sweeps.runner import TaskFolder, make_engine
    from paredown.study.sweeps.worker import wait_for_store

    address, seconds, of_ray = needed(request.store), parse_seconds(wait), request.ray_options()
    with ExitStack() as stack:
        stack.enter_context(cli.kept_in_store())
        none = None if request.tasks else stack.enter_context(tempfile.TemporaryDirectory())
        folder = TaskFolder(Path(request.tasks or str(none)).resolve())
        opened = stack.enter_context(wait_for_store(address, seconds=seconds, sweep=sweep, needs_trials=not stays, say=say))
        made = make_engine(engine, folder, slots=request.slots, ray=of_ray)
        request.work_on(opened, sweep, folder, made, stays=stays)


@cli.verb(sweep_app, "status", "paredown sweep status --store trials.db")
def sweep_status(store: cli.StoreOption = None, is_json: cli.JsonOption = False) -> None:
    """Print the counts of trials of each sweep in a store, and the best plan of each task: least mean error over seeds."""
    from paredown.study.sweeps.status import count, find_best, find_infeasible

    with open_store(needed(store), may_create=False) as opened:
        sweeps = count(opened)
        if not sweeps and not is_json:
            tell("no trials in the store")
        for counts in sweeps:
            best, infeasible = find_best(opened, counts.sweep), find_infeasible(opened, counts.sweep)
            if not is_json:
                tell(str(counts), *(f"  infeasible: {pair}" for pair in infeasible), *(f"  best of {one}" for one in best))
            else:
                pairs = {"infeasible": [pair.to_json() for pair in infeasible]}
                emit({"event": "status", **counts.to_json(), **pairs, "best": [one.to_json() for one in best]})


@cli.verb(sweep_app, "export", "paredown sweep export trials.csv --store trials.db")
def sweep_export(
    to: Annotated[Path, typer.Argument(help="A file ending in .csv, .json or .parquet.")],
    store: cli.StoreOption = None,
    sweep: cli.SweepOption = None,
    is_json: cli.JsonOption = False,
) -> None:
    """Write the trials of a store to a file."""
    from paredown.study.sweeps.export import export

    with open_store(needed(store), may_create=False) as opened:
        num = export(opened, to, sweep=sweep)
    if is_json:
        emit({"trials": num, "file": str(to)})
    else:
        say(f"{num} trials in {to}")


@cli.verb(sweep_app, "merge", "paredown sweep merge other.db --store trials.db")
def sweep_merge(
    source: Annotated[str, typer.Argument(help="The store to copy trials from; it is not changed.")],
    store: cli.StoreOption = None,
    is_json: cli.JsonOption = False,
) -> None:
    """Copy the trials of another store into --store."""
    from paredown.study.sweeps.export import merge

    with open_store(source, may_create=False) as other, open_store(needed(store)) as into:
        merged = merge(into, other)
        if is_json:
            emit({"store": into.database.name, **asdict(merged)})
        else:
            say(f"{into.database.name}: {merged}")


def needed(store: str | None) -> str:
    """Return `store`, the address of the database of trials; raise ParedownError if the user gave none."""
    if not store:
        raise ParedownError("which store? Give --store FILE or URL, or set PAREDOWN_STORE.")
    return store


def open_store(address: str, *, may_create: bool = True) -> Store:
    """Open and return the database of trials at `address`, a file or URL; messages on waiting for it go to stderr."""
    from paredown.study.sweeps.store import Store

    return Store(address, may_create=may_create, say=say)


def _statuses(text: str) -> list[Status]:
    from paredown.study.tasks.trial import Status

    allowed = {status.value: status for status in Status}
    for word in text.split(","):
        if word.strip() not in allowed:
            raise ParedownError(f"--again: status {word!r} is unknown. Allowed: {', '.join(allowed)}.")
    return [allowed[word.strip()] for word in text.split(",")]
