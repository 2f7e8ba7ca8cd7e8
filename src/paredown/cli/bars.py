"""Progress on a terminal: what is being done, how far, and the time left. Nothing where stderr is no terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager

from paredown.cli.voice import clean

Report = Callable[[float, float, str], None]  # done, of how many, a note


@contextmanager
def bar(what: str, *, is_shown: bool = True) -> Generator[Report]:
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
def waiting(what: str) -> Generator[None]:
    """A sign that something of unknown length is going on."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console
    from rich.markup import escape

    with Console(stderr=True).status(f"{escape(what)} ..."):
        yield
