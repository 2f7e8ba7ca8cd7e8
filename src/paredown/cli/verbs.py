"""The application, how a verb joins it, and what becomes of errors: one sentence, and an exit status.

0   done
1   an error, said in a sentence
2   the command line was misspelled
3   it does not fit: the budget is too small for what was asked
4   the training did not end well: diverged, hopeless, out of memory
130 interrupted
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from enum import IntEnum
from functools import wraps
from typing import Annotated, Any, NoReturn

import typer

import paredown
from paredown.cli.voice import say
from paredown.errors import BudgetError, ParedownError

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


class Kept(KeyboardInterrupt):
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
        end(*told(error))
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def kept_in_store(is_kept: bool = True) -> Generator[None]:
    """What an interruption says in here: that finished trials are in a store, where they are."""
    try:
        yield
    except KeyboardInterrupt:
        if is_kept:
            raise Kept from None
        raise


def told(error: BaseException) -> tuple[str, Exit]:
    """The sentence and the exit status of an error."""
    if isinstance(error, ParedownError):
        return str(error), Exit.DOES_NOT_FIT if isinstance(error, BudgetError) else Exit.ERROR
    if isinstance(error, KeyboardInterrupt):
        kept = "; finished trials are in the store, and the same command goes on with the others" * isinstance(error, Kept)
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
