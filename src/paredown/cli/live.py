"""How work on a store is shown: a picture on a terminal, JSON lines in a pipe.

On a terminal: a bar, trials a minute, the time left and the best so far. Into a pipe: one JSON object a line, `finished` for each result
once it is in the store, and `progress` now and then.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager, redirect_stdout
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from paredown.cli.voice import clean, say, to_json

if TYPE_CHECKING:
    from paredown.plan.trial import Trial
    from paredown.runs.claims import Claim
    from paredown.runs.engines.engine import Engine
    from paredown.runs.progress import Progress, Watcher
    from paredown.runs.store import Store
    from paredown.runs.worker import Duty

PIPE_SECONDS = 10.0  # between lines of progress in a pipe
SHOWN_BEST = 5
BAR_WIDTH = 60


def work_on(opened: Store, engine: Engine, duty: Duty, *, is_json: bool) -> None:
    """Work on a store, and show how it gets on."""
    from paredown.runs.progress import Watcher
    from paredown.runs.worker import work

    is_terminal = sys.stdout.isatty() and not is_json
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
        lines(to_json({"event": "finished", "key": claim.key, "sweep": claim.sweep, **figures, "reason": trial.reason}))

    def idle(*, is_due: bool = False) -> None:
        for progress in watcher.look(is_due=is_due):
            lines(to_json(progress.to_json()))

    with redirect_stdout(sys.stderr):
        try:
            yield told, idle, say
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
                live.console.print(clean(f"{trial.task}, seed {trial.seed}: {trial.status.value}: {trial.reason}"), markup=False)

        try:
            yield told, idle, lambda sentence: live.console.print(clean(sentence), markup=False)
        finally:
            idle(is_due=True)


def _picture(found: list[Progress]) -> Any:
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    table = Table.grid()
    for progress in found:
        table.add_row(ProgressBar(total=max(progress.counts.total, 1), completed=progress.counts.finished, width=BAR_WIDTH))
        table.add_row(Text(clean(str(progress))))  # as it is: a name may look like markup
        for one in progress.best[:SHOWN_BEST]:
            table.add_row(Text(clean(f"  best of {one}")))
    return table
