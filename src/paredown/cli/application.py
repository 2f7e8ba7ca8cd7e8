"""The application, how a verb joins it, and what becomes of errors: one sentence, and an exit status.

0   done
1   an error, said in a sentence
2   the command line was misspelled
3   it does not fit: the budget is too small for what was asked
4   the training did not end well: diverged, hopeless, out of memory
130 interrupted

Flags that several verbs share; a flag means the same wherever it is.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from enum import IntEnum
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

import paredown
from paredown.cli.output import say
from paredown.errors import BudgetError, ParedownError
from paredown.sizes import parse_bytes

EXTRAS = {
    "psycopg": "postgres",
    "pyarrow": "parquet",
    "ray": "ray",
    "rich": "cli",
    "safetensors": "safetensors",
    "scipy": "search",
    "sqlalchemy": "sweeps",
}
ALONE = {"PIL": "pillow", "transformers": "transformers", "torch": "torch", "numpy": "numpy"}  # packages by import name
TRACEBACK = "PAREDOWN_TRACEBACK"
LONG = 2000  # letters of a sentence: what others wrote may be of any length


class InterruptedWithStore(KeyboardInterrupt):
    """Interrupted where a store has what was finished."""


class Exit(IntEnum):
    """Exit statuses, as docs/cli.md has them."""

    DONE = 0
    ERROR = 1
    USAGE = 2
    DOES_NOT_FIT = 3
    ENDED_BADLY = 4
    INTERRUPTED = 130


app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    epilog="In a hurry: paredown demo. Exit status: 0 done, 1 error, 2 usage, 3 does not fit, 4 training ended badly, 130 interrupted.",
)
LOOK, CHOOSE, MANY, SHOW = "Look", "Choose and train", "Many trials", "Show"


def _version(is_asked: bool) -> None:
    if is_asked:
        print(f"paredown {paredown.__version__}")
        raise typer.Exit


@app.callback()
def about(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Train in the memory you have: what a training step keeps, which formats fit a budget, and what they cost."""


def verb(
    to: typer.Typer, name: str, *examples: str, panel: str | None = None
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a function a verb whose help ends with examples, and whose errors are sentences."""

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        @wraps(function)
        def run(*values: Any, **options: Any) -> None:
            with errors():
                function(*values, **options)

        told = "\n\n".join([f"Example{'s' * (len(examples) > 1)}:", *examples])
        return to.command(name, epilog=told, rich_help_panel=panel)(run)

    return decorate


@contextmanager
def errors() -> Generator[None]:
    """What goes wrong in one sentence, and an exit status."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # a worker that is asked to end gives its trials back
    try:
        yield
    except (typer.Exit, typer.Abort, typer.BadParameter):
        raise
    except BrokenPipeError:
        sys.stderr.close()
        raise typer.Exit(Exit.ERROR) from None
    except (Exception, KeyboardInterrupt) as error:
        if os.environ.get(TRACEBACK) and not isinstance(error, ParedownError | KeyboardInterrupt):
            raise
        end(*describe_error(error))
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def kept_in_store(is_kept: bool = True) -> Generator[None]:
    """What an interruption says in here: that finished trials are in a store, where they are."""
    try:
        yield
    except KeyboardInterrupt:
        if is_kept:
            raise InterruptedWithStore from None
        raise


def describe_error(error: BaseException) -> tuple[str, Exit]:
    """The sentence and the exit status of an error."""
    if isinstance(error, ParedownError):
        return str(error), Exit.DOES_NOT_FIT if isinstance(error, BudgetError) else Exit.ERROR
    if isinstance(error, KeyboardInterrupt):
        kept = "; finished trials are in the store, and the same command goes on with the others" * isinstance(
            error, InterruptedWithStore
        )
        return f"stopped{kept}.", Exit.INTERRUPTED
    if isinstance(error, ModuleNotFoundError) and error.name:
        return say_missing(error.name.partition(".")[0]), Exit.ERROR
    if isinstance(error, OSError) and error.filename and error.strerror:
        return f"{error.filename}: {error.strerror}.", Exit.ERROR
    # of a model, a task or a library: a sentence, and the way to the rest
    return f"{type(error).__name__}: {str(error).strip() or 'no reason given'}. {TRACEBACK}=1 shows where.", Exit.ERROR


def say_missing(package: str) -> str:
    """How to get a package that is not here."""
    wanted = f"'paredown[{EXTRAS[package]}]'" if package in EXTRAS else ALONE.get(package, package)
    return f"this needs {package}: pip install {wanted}."


def end(sentence: str, status: int) -> NoReturn:
    """End with a sentence."""
    say(sentence if len(sentence) <= LONG else f"{sentence[: LONG - 4]} ...")
    raise typer.Exit(status) from None


# --- Flags that several verbs share ---


def _size(text: str | None) -> str | None:
    """A size as it was written, once it can be read."""
    try:
        if text is not None:
            parse_bytes(text, whole=100)
    except BudgetError as error:
        raise typer.BadParameter(str(error)) from None
    return text


SPELLED = (
    "A task or model: digits, digits#model=vit,steps=200, resnet50#width=64, file.py:function, module:function, or a Hugging Face "
    "config.json."
)
TASK_SPELLED = "A task: digits, images:FILE.npz#model=vit,steps=200, text:FILE, file.py:function or module:function."

ModelArgument = Annotated[str, typer.Argument(metavar="MODEL", help=SPELLED, show_default=False)]
TaskArgument = Annotated[str, typer.Argument(metavar="TASK", help=TASK_SPELLED, show_default=False)]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of words.")]
BudgetOption = Annotated[
    str | None,
    typer.Option(
        "--budget", metavar="SIZE", callback=_size, help="8GiB, 8GB, bytes, or 60% of the step as written.", show_default=False
    ),
]
NeededBudget = Annotated[
    str, typer.Option("--budget", metavar="SIZE", callback=_size, help="8GiB, 8GB, bytes, or 60% of the step as written.")
]
PlanOption = Annotated[
    list[str] | None,
    typer.Option("--plan", metavar="PLAN", help="A preset, a plan.json, or role=format,... May be repeated.", show_default=False),
]
DeviceOption = Annotated[
    str | None,
    typer.Option(
        "--device",
        help="Where the step will run: cuda or cpu; it need not be here. (default: cuda where there is one)",
        show_default=False,
    ),
]
HereOption = Annotated[
    str | None,
    typer.Option("--device", help="Where to train: cuda, cuda:1 or cpu. (default: cuda where there is one)", show_default=False),
]
AutocastOption = Annotated[str | None, typer.Option("--autocast", metavar="DTYPE", help="bf16, fp16 or none.", show_default=False)]
OptimizerOption = Annotated[
    str | None, typer.Option("--optimizer", help="sgd, sgdm, adamw or lion. (default: the task's; adamw)", show_default=False)
]
InputOption = Annotated[
    str | None,
    typer.Option(
        "--input",
        metavar="SHAPE",
        help="One example of a model that comes without data: 3x224x224, or tokens:1024.",
        show_default=False,
    ),
]
OutOption = Annotated[Path | None, typer.Option("--out", "-o", metavar="FILE", help="Write the result here.", show_default=False)]
SeedOption = Annotated[int, typer.Option("--seed", min=0, help="Of the model, the order of the data and the rounding.")]
StoreOption = Annotated[
    str | None, typer.Option("--store", envvar="PAREDOWN_STORE", help="A file for SQLite, or a PostgreSQL URL.", show_default=False)
]
TasksOption = Annotated[Path | None, typer.Option("--tasks", help="The folder that task files may come from.", show_default=False)]
SlotsOption = Annotated[int | None, typer.Option(min=1, help="Trials at a time. (default: one a GPU, or one)", show_default=False)]
ENGINES_HELP = "Where trials run: local (a process each), graphs (simulated ones side by side on a GPU), inline, or ray."
EngineOption = Annotated[str, typer.Option(help=ENGINES_HELP)]
PatienceOption = Annotated[
    float, typer.Option("--patience", min=1.0, help="Seconds without a heartbeat after which a worker's trials run elsewhere.")
]
SweepOption = Annotated[str | None, typer.Option("--sweep", help="Only this sweep.", show_default=False)]
ModeOption = Annotated[str, typer.Option("--mode", help="store: bytes really shrink. simulate: arithmetic sees rounded values.")]


def command_text(model: str, **options: object) -> str:
    """A model and the options that were given, as another verb is told of them.

    >>> command_text("net.py:make", input="3x32x32", batch=4, device=None)
    'net.py:make --input 3x32x32 --batch 4'
    """
    return " ".join([model, *(f"--{name} {value}" for name, value in options.items() if value is not None)])
