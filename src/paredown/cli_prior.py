"""`paredown prior list|show|add|make|remove`: what earlier tasks taught, shipped and of one's own."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ParamSpec

import typer

from paredown.errors import ParedownError

if TYPE_CHECKING:
    from paredown.search.earlier import Earlier

P = ParamSpec("P")
prior_app = typer.Typer(no_args_is_help=True, help="What earlier tasks taught: shipped priors and your own.")
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
SourceArgument = Annotated[str, typer.Argument(help="A store (file or URL) or an export (.json) of sweeps.")]
SweepsOption = Annotated[
    list[str] | None, typer.Option("--sweep", help="Only tasks of this sweep; may be said again.", show_default=False)
]
TasksOption = Annotated[Path, typer.Option("--tasks", help="The folder in which task files are.")]


def in_sentences(verb: Callable[P, None]) -> Callable[P, None]:
    """What goes wrong in one sentence, and exit status 1."""

    @wraps(verb)
    def said(*args: P.args, **keywords: P.kwargs) -> None:
        try:
            verb(*args, **keywords)
        except ParedownError as error:
            _say(str(error))
            raise typer.Exit(1) from None

    return said


@prior_app.command("list")
@in_sentences
def prior_list(as_json: JsonOption = False) -> None:
    """The priors that are here.

    Example: paredown prior list
    """
    from paredown.search.prior import available, load, own

    found = [(load(name), name in own()) for name in available()]
    if as_json:
        print(json.dumps([{**summary(prior), "own": is_own} for prior, is_own in found]))
        return
    for prior, is_own in found:
        print(f"{prior!r}{' (your own)' if is_own else ''}")


@prior_app.command("show")
@in_sentences
def prior_show(
    name: Annotated[str, typer.Argument(help="A name, or a file.")],
    as_json: JsonOption = False,
    tasks: Annotated[int, typer.Option(help="Rows.")] = 50,
) -> None:
    """Tasks and plans of a prior: errors, noise, memory and where they come from.

    Example: paredown prior show stored
    """
    from paredown.search.prior import load

    prior = load(name)
    print(json.dumps(summary(prior)) if as_json else text_of(prior, tasks))


@prior_app.command("add")
@in_sentences
def prior_add(
    source: SourceArgument,
    name: Annotated[str, typer.Option("--name", help="What to call it.")] = "mine",
    sweep: SweepsOption = None,
    tasks: TasksOption = Path("."),
    replaces: Annotated[bool, typer.Option("--replace", help="Take the place of an own prior of that name.")] = False,
) -> None:
    """Learn from your own sweeps: picks use them from now on.

    Example: paredown prior add trials.db --name mine
    """
    from paredown.runs.collected import collect, read_rows
    from paredown.search.prior import add

    prior = collect(read_rows(source), name, sweeps=sweep or (), folder=tasks)
    add(prior, name, replaces=replaces)
    _say(f"{prior!r} is known from now on; paredown prior remove {name} forgets it.")


@prior_app.command("make")
@in_sentences
def prior_make(
    source: SourceArgument,
    to: Annotated[Path, typer.Argument(help="The file to write, .json.")],
    name: Annotated[str | None, typer.Option("--name", help="Its name; the file's unless given.", show_default=False)] = None,
    sweep: SweepsOption = None,
    tasks: TasksOption = Path("."),
) -> None:
    """Write the prior of a store to a file, as the package carries them.

    Example: paredown prior make trials.db stored.json --sweep stored
    """
    from paredown.runs.collected import collect, read_rows
    from paredown.search.earlier_json import write

    prior = collect(read_rows(source), name or to.stem, sweeps=sweep or (), folder=tasks)
    write(prior, to)
    _say(f"{prior!r} in {to.name}")


@prior_app.command("remove")
@in_sentences
def prior_remove(name: Annotated[str, typer.Argument(help="One of your own.")]) -> None:
    """Forget one of your own priors.

    Example: paredown prior remove mine
    """
    from paredown.search.prior import remove

    remove(name)
    _say(f"prior {name!r} is forgotten.")


def summary(prior: Earlier) -> dict[str, Any]:
    """A prior as JSON: its size, its tasks and plans, and where it comes from."""
    from dataclasses import asdict

    import numpy as np

    means = np.nanmean(np.where(np.isfinite(prior.errors), prior.errors, np.nan), axis=1)
    tasks = [
        {**asdict(task), "mean_error": float(mean), "noise": None if np.isnan(noise) else float(noise), "runs": int(count)}
        for task, mean, noise, count in zip(prior.tasks, means, prior.noise, prior.counts.sum(axis=1), strict=True)
    ]
    head = {
        "name": prior.name,
        "mode": prior.mode,
        "entries": int(np.isfinite(prior.errors).sum()),
        "runs": int(prior.counts.sum()),
    }
    plans = [{"label": plan.label, "recipe": plan.recipe, "level": plan.level} for plan in prior.plans]
    return {**head, "tasks": tasks, "plans": plans, "provenance": [dict(one) for one in prior.provenance]}


def text_of(prior: Earlier, most: int) -> str:
    """A line for each task, best plans of all, and provenance."""
    import numpy as np

    lines = [repr(prior), ""]
    width = max(len(task.name) for task in prior.tasks)
    lines += [f"{'task':{width}}  family  runs  least error  plan"]
    for i, task in enumerate(prior.tasks[:most]):
        j = int(np.nanargmin(prior.errors[i])) if np.isfinite(prior.errors[i]).any() else 0
        figures = f"{int(prior.counts[i].sum()):4}  {prior.errors[i, j]:11.4f}"
        lines.append(f"{task.name:{width}}  {task.family:6}  {figures}  {prior.plans[j].label}")
    lines += [f"... {len(prior.tasks) - most} more"] if len(prior.tasks) > most else []
    for one in prior.provenance:
        told = ", ".join(f"{word} {value}" for word, value in one.items() if word not in ("versions", "sweeps"))
        lines.append(f"{told}; {', '.join(f'{k} {v}' for k, v in one.get('versions', {}).items())}")
    return "\n".join(lines)


def _say(sentence: str) -> None:
    print(f"paredown: {sentence}", file=sys.stderr, flush=True)
