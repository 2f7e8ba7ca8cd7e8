"""Output of the commands: results go to stdout as text or, with --json, as one JSON object; messages and progress go to stderr.

Tables are plain text, the same on a terminal and in a pipe; only a terminal gets bold headings. Progress bars are drawn only if stderr is
a terminal.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

from paredown.tables import Table

BASELINE = "baseline"  # the name of the step without a plan, in arguments and tables
BOLD, PLAIN = "\x1b[1m", "\x1b[0m"
# control characters (other than newline, tab and the two sequences above) and lone surrogates
CONTROL = re.compile(r"(?!\x1b\[[01]m)[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


class Styled(str):
    """A line with colours, made of cleaned parts: `tell` prints it unchanged."""

    __slots__ = ()


def clean(text: str) -> str:
    """`text` with control characters replaced by "?", since names read from files may hold escape sequences for the terminal.

    >>> clean("digits" + chr(27) + "[2J")
    'digits?[2J'
    """
    return CONTROL.sub("?", text)


def say(sentence: str) -> None:
    """Print a message to stderr."""
    print(clean(f"paredown: {sentence}"), file=sys.stderr, flush=True)


def to_json(value: Mapping[str, Any]) -> str:
    """One line of JSON; NaN and infinities raise ValueError, since other JSON readers refuse them."""
    return json.dumps(value, allow_nan=False)


def emit(value: Mapping[str, Any]) -> None:
    """Print the result of a command as one line of JSON to stdout."""
    print(to_json(value), flush=True)


def tell(*lines: str) -> None:
    """Print the result of a command as lines of text to stdout."""
    print(*(line if isinstance(line, Styled) else clean(line) for line in lines), sep="\n", flush=True)


def heading(text: str) -> str:
    """`text`, bold if stdout is a terminal."""
    return f"{BOLD}{text}{PLAIN}" if sys.stdout.isatty() else text


def table(names: Sequence[str], rows: Iterable[Sequence[str]], *, left: int = 1) -> list[str]:
    """Lines of a table with a bold heading: columns of numbers are aligned right, all others and the first `left` columns left.

    >>> print(*table(("plan", "peak", "note"), [("baseline", "1.25 MiB", ""), ("lpmm", "612 KiB", "of 8 bits")]), sep="\\n")
    plan          peak  note
    baseline  1.25 MiB
    lpmm       612 KiB  of 8 bits
    """
    rows = list(rows)
    right = {i for i in range(left, len(names)) if _are_numbers([row[i] for row in rows])}
    head, *lines = Table(names, rows, right).lines()
    return [heading(head), *lines]


def _are_numbers(cells: Sequence[str]) -> bool:
    """Whether more than half of the cells with text are numbers, or yes and no."""
    texts = [cell for cell in cells if cell]
    return 2 * sum(text.lstrip("+-")[:1].isdigit() or text in ("yes", "no") for text in texts) > len(texts)


def warn_of_passwords(arguments: Iterable[str]) -> None:
    """Print a warning if an argument is a URL with a password: other users can read it in the list of processes."""
    if any(_has_password(argument) for argument in arguments):
        say("other users of this machine can read a password on a command line; set PAREDOWN_STORE or PGPASSWORD instead.")


def _has_password(argument: str) -> bool:
    try:
        return "://" in argument and urlsplit(argument.partition("=")[2] or argument).password is not None
    except ValueError:
        return False


# --- Progress on a terminal ---

Report = Callable[[float, float, str], None]  # (done, total, note)


@contextmanager
def progress_bar(what: str) -> Generator[Report]:
    """A function `report(done, total, note)` that moves a progress bar; it does nothing unless stderr is a terminal."""
    if not sys.stderr.isatty():
        yield lambda done, total, note: None
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[note]}"))
    with Progress(*columns, TimeRemainingColumn(), TextColumn("left"), console=Console(stderr=True), transient=True) as shown:
        row = shown.add_task(escape(clean(what)), total=None, note="")
        yield lambda done, total, note: shown.update(row, completed=done, total=total, note=escape(clean(note)))


@contextmanager
def spinner(what: str) -> Generator[None]:
    """A spinner on stderr while the block runs, if stderr is a terminal."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console
    from rich.markup import escape

    with Console(stderr=True).status(f"{escape(what)} ..."):
        yield
