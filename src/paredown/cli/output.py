"""What a verb says: results to stdout, sentences for people to stderr, JSON when it is asked for.

Tables are plain text, the same on a terminal and in a pipe; only a terminal gets bold heads.

Progress on a terminal: what is being done, how far, and the time left. Nothing where stderr is no terminal.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

BOLD, PLAIN = "\x1b[1m", "\x1b[0m"
# control characters other than new line and tab, and halves of characters, but for the two above
CONTROL = re.compile(r"(?!\x1b\[[01]m)[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


def clean(text: str) -> str:
    """A text as a terminal may show it: names in files of strangers may hold commands for it.

    >>> clean("digits" + chr(27) + "[2J")
    'digits?[2J'
    """
    return CONTROL.sub("?", text)


def say(sentence: str) -> None:
    """A sentence for people."""
    print(clean(f"paredown: {sentence}"), file=sys.stderr, flush=True)


def to_json(value: Mapping[str, Any]) -> str:
    """One line of JSON; numbers that JSON does not have are an error, not text that others cannot read."""
    return json.dumps(value, allow_nan=False)


def emit(value: Mapping[str, Any]) -> None:
    """The answer of a verb that was asked for JSON."""
    print(to_json(value), flush=True)


def tell(*lines: str) -> None:
    """The answer of a verb in words."""
    print(*map(clean, lines), sep="\n", flush=True)


def heading(text: str) -> str:
    """A line above others, bold on a terminal."""
    return f"{BOLD}{text}{PLAIN}" if sys.stdout.isatty() else text


def table(names: Sequence[str], rows: Iterable[Sequence[str]], *, left: int = 1) -> list[str]:
    """Lines of a table: columns of numbers are flush right, all others and the first `left` flush left.

    >>> print(*table(("plan", "peak", "note"), [("as written", "1.25 MiB", ""), ("lpmm", "612 KiB", "of 8 bits")]), sep="\\n")
    plan            peak  note
    as written  1.25 MiB
    lpmm         612 KiB  of 8 bits
    """
    cells = [tuple(names), *(tuple(row) for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(names))]
    is_left = [i < left or not _are_numbers([row[i] for row in cells[1:]]) for i in range(len(names))]

    def line(row: Sequence[str]) -> str:
        padded = [cell.ljust(w) if on_left else cell.rjust(w) for cell, w, on_left in zip(row, widths, is_left, strict=True)]
        return "  ".join(padded).rstrip()

    return [heading(line(cells[0])), *(line(row) for row in cells[1:])]


def _are_numbers(cells: Sequence[str]) -> bool:
    """Most of those that say anything."""
    told = [cell for cell in cells if cell]
    return 2 * sum(cell.lstrip("+-")[:1].isdigit() or cell in ("yes", "no") for cell in told) > len(told)


def warn_of_passwords(arguments: Iterable[str]) -> None:
    """What stands on a command line is seen by everybody on the machine."""
    if any(_has_password(argument) for argument in arguments):
        say("everybody on this machine can read a password on a command line; set PAREDOWN_STORE or PGPASSWORD instead.")


def _has_password(argument: str) -> bool:
    try:
        return "://" in argument and urlsplit(argument.partition("=")[2] or argument).password is not None
    except ValueError:
        return False


# --- Progress on a terminal ---

Report = Callable[[float, float, str], None]  # done, of how many, a note


@contextmanager
def progress_bar(what: str, *, is_shown: bool = True) -> Generator[Report]:
    """A bar with the time left; `report(done, total, note)` moves it."""
    if not (is_shown and sys.stderr.isatty()):
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
    """A sign that something of unknown length is going on."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console
    from rich.markup import escape

    with Console(stderr=True).status(f"{escape(what)} ..."):
        yield
