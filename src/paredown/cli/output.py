"""Output of the commands: results go to stdout as text or, with --json, as one JSON object; messages and progress go to stderr.

Tables are plain text, the same on a terminal and in a pipe; only a terminal gets bold headings and colours. Progress bars are drawn only
if stderr is a terminal; else a command that takes long writes a line of progress to stderr every PIPE_SECONDS.
"""

from __future__ import annotations

import json
import re
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from paredown.sizes import say_seconds
from paredown.tables import Table

BASELINE = "baseline"  # the name of the step without a plan, in arguments and tables
BOLD, PLAIN = "\x1b[1m", "\x1b[0m"
# control characters (other than newline, tab and the two sequences above) and lone surrogates
CONTROL = re.compile(r"(?!\x1b\[[01]m)[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


class Styled(str):
    """A line of output with escape codes for colours, which `tell` prints unchanged; in other lines it replaces control characters."""

    __slots__ = ()


def clean(text: str) -> str:
    """Return `text` with control characters replaced by "?", since names from files may change the terminal.

    >>> clean("digits" + chr(27) + "[2J")
    'digits?[2J'
    """
    return CONTROL.sub("?", text)


def say(sentence: str) -> None:
    """Print a message to stderr."""
    print(clean(f"paredown: {sentence}"), file=sys.stderr, flush=True)


def to_json(value: Mapping[str, Any]) -> str:
    """Return one line of JSON; NaN and infinities raise ValueError, since other JSON readers refuse them."""
    return json.dumps(value, allow_nan=False)


def emit(value: Mapping[str, Any]) -> None:
    """Print the result of a command as one line of JSON to stdout."""
    print(to_json(value), flush=True)


def tell(*lines: str) -> None:
    """Print the result of a command as lines of text to stdout."""
    print(*(line if isinstance(line, Styled) else clean(line) for line in lines), sep="\n", flush=True)


def heading(text: str) -> str:
    """Return `text`, in bold if stdout is a terminal."""
    return f"{BOLD}{text}{PLAIN}" if sys.stdout.isatty() else text


def table(names: Sequence[str], rows: Iterable[Sequence[str]], *, left: int = 1) -> list[str]:
    """Return the lines of a table with a bold heading.

    Columns of numbers are aligned right, all others and the first `left` columns left.

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
    texts = [cell for cell in cells if cell]
    return 2 * sum(text.lstrip("+-")[:1].isdigit() or text in ("yes", "no") for text in texts) > len(texts)


def warn_of_passwords(arguments: Iterable[str]) -> None:
    """Print a warning if an argument is a URL with a password, since other users can see it in the list of processes."""
    if any(_has_password(argument) for argument in arguments):
        say("other users of this machine can read a password on a command line; set PAREDOWN_STORE or PGPASSWORD instead.")


def _has_password(argument: str) -> bool:
    try:
        return "://" in argument and urlsplit(argument.partition("=")[2] or argument).password is not None
    except ValueError:
        return False


# --- Progress ---

Report = Callable[[float, float, str], None]  # (done, total, note)
PIPE_SECONDS = 10.0  # between lines of progress where stderr is no terminal
TICK_SECONDS = 0.5
ECHO = 3  # columns that live bars leave free: a terminal echoes Ctrl-C as ^C, and an echo that wraps would leave a line behind


class ProgressLines:
    """Prints lines of progress: what was done, the time so far and the predicted time left.

    >>> now = [0.0]
    >>> lines = ProgressLines("picking", clock=lambda: now[0], write=print)
    >>> lines.report(0, 8, "trying lpmm"); now[0] = 60.0; lines.report(2, 8, "trying safe")
    picking: 2 of 8, trying safe; 1 min so far, about 3 min left
    """

    def __init__(self, what: str, *, clock: Callable[[], float] = time.monotonic, write: Callable[[str], object] = say) -> None:
        self._what, self._clock, self._write = what, clock, write
        self._begun = self._written = clock()
        self._first: tuple[float, float] | None = None  # time and count of the first report
        self._last: tuple[float, float, float, str] | None = None  # time, count, total and note of the last one
        self._lock = threading.Lock()

    def report(self, done: float, total: float, note: str) -> None:
        """Record that `done` of `total` units of work are done, and print a line if the last one was printed PIPE_SECONDS ago."""
        self._first = self._first or (self._clock(), done)
        self._last = (self._clock(), done, total, note)
        self.tick()

    def tick(self) -> None:
        """Print a line of progress if the last one was printed PIPE_SECONDS ago."""
        with self._lock:
            now = self._clock()
            if now - self._written >= PIPE_SECONDS:
                self._written = now
                self._write(self._line(now))

    def _line(self, now: float) -> str:
        so_far = f"{say_seconds(now - self._begun)} so far"
        if self._first is None or self._last is None:
            return f"{self._what}: {so_far}"
        (begun, at_first), (at, done, total, note) = self._first, self._last
        left = (total - done) * (at - begun) / (done - at_first) - (now - at) if done > at_first else 0.0
        rest = f", about {say_seconds(left)} left" if left > 0 else ""  # none where it takes longer than predicted
        return f"{self._what}: {done:.3g} of {total:g}, {note}; {so_far}{rest}"


@contextmanager
def progress_lines(what: str) -> Generator[Report]:
    """Return a context that yields `ProgressLines.report`; a thread prints lines also while nothing is reported."""
    lines, is_over = ProgressLines(what), threading.Event()

    def tick() -> None:
        while not is_over.wait(TICK_SECONDS):
            lines.tick()

    thread = threading.Thread(target=tick, daemon=True)
    thread.start()
    try:
        yield lines.report
    finally:
        is_over.set()
        thread.join()


@contextmanager
def progress_bar(what: str) -> Generator[Report]:
    """Return a context that yields `report(done, total, note)`, which moves a bar, or writes a line every PIPE_SECONDS in a pipe."""
    if not sys.stderr.isatty():
        with progress_lines(what) as report:
            yield report
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
    """Return a context in which a spinner runs on stderr; in a pipe a line is written every PIPE_SECONDS."""
    if not sys.stderr.isatty():
        with progress_lines(what):
            yield
        return
    from rich.console import Console
    from rich.markup import escape

    with Console(stderr=True).status(f"{escape(what)} ..."):
        yield


@dataclass(frozen=True)
class LiveScreen:
    """Changes a terminal in place: `tell(lines)` replaces its text, `bar(name, done, total, note)` sets a progress bar."""

    tell: Callable[[Sequence[str]], None]
    bar: Callable[[str, float, float, str], None]


@contextmanager
def live_screen(what: str, *, counted: str) -> Generator[LiveScreen]:
    """Return a context that yields a LiveScreen on stderr; in a pipe it writes a line every PIPE_SECONDS for the bar `counted`."""
    if not sys.stderr.isatty():
        with progress_lines(what) as report:
            yield LiveScreen(lambda _: None, lambda name, done, total, note: report(done, total, note) if name == counted else None)
        return
    from rich.console import Console, Group
    from rich.live import Live
    from rich.progress_bar import ProgressBar
    from rich.table import Table as Grid
    from rich.text import Text

    console = Console(stderr=True)
    text, bars = [""], dict[str, tuple[float, float, str]]()

    def drawn() -> Group:
        grid = Grid.grid(padding=(0, 1))
        grid.width = console.width - ECHO
        for ratio in (None, 1, 1):
            grid.add_column(ratio=ratio, no_wrap=True)
        for name, (done, total, note) in list(bars.items()):
            colour = "red" if done > total else "green"
            bar = ProgressBar(total, min(done, total), complete_style=colour, finished_style=colour)
            grid.add_row(name, bar, Text(clean(f"{done:g} of {total:g}, {note}" if name == counted else note)))
        return Group(Text.from_ansi(text[0]), grid)

    def tell_above(lines: Sequence[str]) -> None:
        text[0] = "\n".join((*(line if isinstance(line, Styled) else clean(line) for line in lines), ""))

    # stdout stays a terminal for those who ask it, such as has_colour
    with Live(get_renderable=drawn, console=console, transient=True, redirect_stdout=False):
        yield LiveScreen(tell_above, lambda name, done, total, note: bars.update({name: (done, total, note)}))
