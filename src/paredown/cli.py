"""The command line: `paredown sweep run|status|export|merge` and `paredown worker`.

On a terminal a sweep shows a bar, trials a minute, the time left and the best so far; into a pipe it writes one JSON object a line:
`finished` for each result once it is in the store, and `progress` now and then. Sentences for people go to stderr.
torch and SQLAlchemy are imported by the commands that need them, so that `--help` is quick.
"""

from __future__ import annotations

import json
import signal
import sys
import tempfile
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager, redirect_stdout
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn
from urllib.parse import urlsplit

import typer

from paredown.cli_prior import prior_app
from paredown.errors import ParedownError

if TYPE_CHECKING:
    from paredown.plan.trial import Trial
    from paredown.runs.claims import Claim
    from paredown.runs.engines.engine import Engine
    from paredown.runs.progress import Progress, Watcher
    from paredown.runs.store import Store
    from paredown.runs.worker import Duty

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help="Train in the memory you have.")
sweep_app = typer.Typer(no_args_is_help=True, help="Many trials: tasks x plans x seeds, resumable.")
app.add_typer(sweep_app, name="sweep")
app.add_typer(prior_app, name="prior")
EXTRAS = {"sqlalchemy": "sweeps", "psycopg": "postgres", "ray": "ray", "pyarrow": "parquet", "rich": "cli"}
PIPE_SECONDS = 10.0  # between lines of progress in a pipe
SHOWN_BEST = 5
BAR_WIDTH = 60

StoreOption = Annotated[
    str | None, typer.Option("--store", envvar="PAREDOWN_STORE", help="A file for SQLite, or a PostgreSQL URL.", show_default=False)
]
TasksOption = Annotated[Path | None, typer.Option("--tasks", help="The folder that task files may come from.", show_default=False)]
SlotsOption = Annotated[int | None, typer.Option(min=1, help="Trials at a time.  [default: one a GPU, or one]", show_default=False)]
ENGINES_HELP = "Where trials run: local (a process each), graphs (simulated ones side by side on a GPU), inline, or ray."
EngineOption = Annotated[str, typer.Option(help=ENGINES_HELP)]
PatienceOption = Annotated[
    float, typer.Option("--patience", min=1.0, help="Seconds without a heartbeat after which a worker's trials run elsewhere.")
]
SweepOption = Annotated[str | None, typer.Option("--sweep", help="Only this sweep.", show_default=False)]


@app.callback()
def about() -> None:
    """Train in the memory you have."""


@sweep_app.command("run")
def sweep_run(
    file: Annotated[Path, typer.Argument(help="The sweep, a TOML file.")],
    store: StoreOption = None,
    tasks: TasksOption = None,
    slots: SlotsOption = None,
    engine: Annotated[str | None, typer.Option(help=f"{ENGINES_HELP}  [default: what suits the sweep]", show_default=False)] = None,
    patience: PatienceOption = 20.0,
    again: Annotated[str, typer.Option(help="Statuses to run once more, such as failed,killed.")] = "",
) -> None:
    """Run a sweep to its end. Killed and started again, it goes on with what is left."""
    with _errors():
        from paredown.plan.trial import Status
        from paredown.runs.running import TaskFolder, add_sweep, engine_for, make_engine, predicted_bytes
        from paredown.runs.sweep_file import load_sweep
        from paredown.runs.watch import beat_every
        from paredown.runs.worker import Duty

        found = load_sweep(file)
        folder = TaskFolder((tasks or found.folder).resolve())
        with _open(store or found.store or str(file.with_suffix(".db"))) as opened:
            added = add_sweep(found.sweep, opened, cost=lambda task, plan: predicted_bytes(task, plan, folder.path))
            reopened = opened.reopen(found.sweep.name, _statuses(again, Status)) if again else 0
            _say(
                f"{added.num_new} trials are new, {added.num_there} were there, {reopened} run again; store {opened.database.name}"
            )
            duty = Duty(found.sweep.name, folder.refuses, beat_seconds=beat_every(patience), patience_seconds=patience)
            _work(opened, make_engine(engine or engine_for(found.sweep), folder, slots=slots), duty)


@app.command("worker")
def worker(
    store: StoreOption = None,
    tasks: TasksOption = None,
    sweep: SweepOption = None,
    slots: SlotsOption = None,
    engine: EngineOption = "local",
    patience: PatienceOption = 20.0,
    stays: Annotated[bool, typer.Option("--stay", help="Wait for new trials when all are finished.")] = False,
) -> None:
    """Join the sweeps of a store, from any machine. Without --tasks only built-in tasks are run."""
    with _errors(), ExitStack() as stack:
        from paredown.runs.running import TaskFolder, make_engine
        from paredown.runs.watch import beat_every
        from paredown.runs.worker import Duty

        none = None if tasks else stack.enter_context(tempfile.TemporaryDirectory())
        folder = TaskFolder(Path(tasks or str(none)).resolve())
        opened = stack.enter_context(_open(_needed(store), may_create=False))
        duty = Duty(sweep, folder.refuses, stays=stays, beat_seconds=beat_every(patience), patience_seconds=patience)
        _work(opened, make_engine(engine, folder, slots=slots), duty)


@sweep_app.command("status")
def sweep_status(store: StoreOption = None) -> None:
    """How far the sweeps of a store are."""
    with _errors(), _open(_needed(store), may_create=False) as opened:
        from paredown.runs.status import count, find_best

        for counts in count(opened):
            best = find_best(opened, counts.sweep)
            if sys.stdout.isatty():
                print(counts, *(f"  best of {one}" for one in best), sep="\n")
            else:
                print(_json({"event": "status", **counts.to_json(), "best": [one.to_json() for one in best]}))


@sweep_app.command("export")
def sweep_export(
    to: Annotated[Path, typer.Argument(help="A file ending in .csv, .json or .parquet.")],
    store: StoreOption = None,
    sweep: SweepOption = None,
) -> None:
    """Write the trials of a store to a file."""
    with _errors(), _open(_needed(store), may_create=False) as opened:
        from paredown.runs.export import export

        _say(f"{export(opened, to, sweep=sweep)} trials in {to}")


@sweep_app.command("merge")
def sweep_merge(
    source: Annotated[str, typer.Argument(help="The store to take trials from; it stays as it is.")],
    store: StoreOption = None,
) -> None:
    """Bring the trials of another store into --store."""
    with _errors(), _open(source, may_create=False) as other, _open(_needed(store)) as into:
        from paredown.runs.merge import merge

        _say(f"{into.database.name}: {merge(into, other)}")


def main() -> None:
    """The entry point."""
    if any(_has_password(argument) for argument in sys.argv):
        _say("everybody on this machine can read a password on a command line; set PAREDOWN_STORE or PGPASSWORD instead.")
    app()


def _work(opened: Store, engine: Engine, duty: Duty) -> None:
    """Work on a store, and show how it gets on."""
    from paredown.runs.progress import Watcher
    from paredown.runs.worker import work

    is_terminal = sys.stdout.isatty()
    watcher = Watcher(opened, duty.sweep, seconds=1.0 if is_terminal else PIPE_SECONDS)
    with _terminal(watcher) if is_terminal else _pipe(watcher) as (told, idle, say):
        work(opened, engine, replace(duty, told=told, idle=idle, say=say))


Voices = tuple["Callable[[Claim, Trial], object]", "Callable[[], object]", "Callable[[str], object]"]


@contextmanager
def _pipe(watcher: Watcher) -> Generator[Voices]:
    """JSON lines: results as they come, progress at times and at the end. What else is printed goes to stderr."""
    lines = partial(print, file=sys.stdout, flush=True)

    def told(claim: Claim, trial: Trial) -> None:
        figures = {"task": trial.task, "seed": trial.seed, "status": trial.status.value, "error": trial.error}
        lines(_json({"event": "finished", "key": claim.key, "sweep": claim.sweep, **figures, "reason": trial.reason}))

    def idle(*, is_due: bool = False) -> None:
        for progress in watcher.look(is_due=is_due):
            lines(_json(progress.to_json()))

    with redirect_stdout(sys.stderr):
        try:
            yield told, idle, _say
        finally:
            idle(is_due=True)


@contextmanager
def _terminal(watcher: Watcher) -> Generator[Voices]:
    """A picture that is drawn over itself."""
    from rich.live import Live

    with Live(refresh_per_second=4) as live:

        def idle(*, is_due: bool = False) -> None:
            if found := watcher.look(is_due=is_due):
                live.update(_picture(found))

        def told(claim: Claim, trial: Trial) -> None:
            if trial.reason:
                live.console.print(f"{trial.task}, seed {trial.seed}: {trial.status.value}: {trial.reason}", markup=False)

        try:
            yield told, idle, lambda sentence: live.console.print(sentence, markup=False)
        finally:
            idle(is_due=True)


def _picture(found: list[Progress]) -> Any:
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    table = Table.grid()
    for progress in found:
        table.add_row(ProgressBar(total=max(progress.counts.total, 1), completed=progress.counts.finished, width=BAR_WIDTH))
        table.add_row(Text(str(progress)))  # as it is: a name may look like markup
        for one in progress.best[:SHOWN_BEST]:
            table.add_row(Text(f"  best of {one}"))
    return table


def _statuses(text: str, kind: Any) -> list[Any]:
    allowed = {status.value: status for status in kind}
    wrong = [word for word in text.split(",") if word.strip() not in allowed]
    if wrong:
        raise ParedownError(f"--again: status {wrong[0]!r} is unknown. Allowed: {', '.join(allowed)}.")
    return [allowed[word.strip()] for word in text.split(",")]


def _needed(store: str | None) -> str:
    if not store:
        raise ParedownError("which store? Give --store FILE or URL, or set PAREDOWN_STORE.")
    return store


def _open(address: str, *, may_create: bool = True) -> Store:
    from paredown.runs.store import Store

    return Store(address, may_create=may_create, say=_say)


@contextmanager
def _errors() -> Generator[None]:
    """What goes wrong in one sentence, and an exit status."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # a worker that is asked to end gives its trials back
    try:
        yield
    except ParedownError as error:
        _end(str(error), 1)
    except ModuleNotFoundError as error:
        if error.name not in EXTRAS:
            raise
        _end(f"this needs {error.name}: pip install 'paredown[{EXTRAS[error.name]}]'.", 1)
    except KeyboardInterrupt:
        _end("stopped; finished trials are in the store, and the same command goes on with the others.", 130)
    except BrokenPipeError:
        sys.stderr.close()
        raise typer.Exit(1) from None
    finally:
        signal.signal(signal.SIGTERM, before)


def _has_password(argument: str) -> bool:
    try:
        return "://" in argument and urlsplit(argument.partition("=")[2] or argument).password is not None
    except ValueError:
        return False


def _end(sentence: str, status: int) -> NoReturn:
    _say(sentence)
    raise typer.Exit(status) from None


def _say(sentence: str) -> None:
    print(f"paredown: {sentence}", file=sys.stderr, flush=True)


def _json(value: dict[str, Any]) -> str:
    return json.dumps(value, allow_nan=False)
