"""`paredown prior list|show|add|make|remove`: what earlier tasks taught, shipped and of one's own."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paredown.cli.application import MANY, JsonOption, TasksOption, app, verb
from paredown.cli.output import emit, say, tell

if TYPE_CHECKING:
    from paredown.pick.prior_data import PriorData

prior_app = typer.Typer(
    no_args_is_help=True, rich_markup_mode="rich", help="What earlier tasks taught: shipped priors and your own."
)
app.add_typer(prior_app, name="prior", rich_help_panel=MANY)
SourceArgument = Annotated[str, typer.Argument(help="A store (file or URL) or an export (.json) of sweeps.")]
SweepsOption = Annotated[
    list[str] | None, typer.Option("--sweep", help="Only tasks of this sweep; may be said again.", show_default=False)
]
FinishedOption = Annotated[bool, typer.Option("--finished", help="Only tasks of which no trial is left to run.")]


@verb(prior_app, "list", "paredown prior list")
def prior_list(is_json: JsonOption = False) -> None:
    """The priors that are here."""
    from paredown.pick.priors import available, load, own_priors

    found = [(load(name), name in own_priors()) for name in available()]
    if is_json:
        emit({"priors": [{**summary(prior), "own": is_own} for prior, is_own in found]})
    else:
        tell(*([f"{prior!r}{' (your own)' if is_own else ''}" for prior, is_own in found] or ["There are none."]))


@verb(prior_app, "show", "paredown prior show stored")
def prior_show(
    name: Annotated[str, typer.Argument(help="A name, or a file.")],
    tasks: Annotated[int, typer.Option(min=1, help="Rows.")] = 50,
    is_json: JsonOption = False,
) -> None:
    """Tasks and plans of a prior: errors, noise, memory and where they come from."""
    from paredown.pick.priors import load

    prior = load(name)
    if is_json:
        emit(summary(prior))
    else:
        tell(text_of(prior, tasks))


@verb(prior_app, "add", "paredown prior add trials.db --name mine")
def prior_add(
    source: SourceArgument,
    name: Annotated[str, typer.Option("--name", help="What to call it.")] = "mine",
    sweep: SweepsOption = None,
    tasks: TasksOption = None,
    replaces: Annotated[bool, typer.Option("--replace", help="Take the place of an own prior of that name.")] = False,
    is_json: JsonOption = False,
) -> None:
    """Learn from your own sweeps: picks use them from now on."""
    from paredown.pick.prior_collection import collect, read_rows
    from paredown.pick.priors import add

    prior = collect(read_rows(source), name, sweeps=sweep or (), folder=tasks)
    add(prior, name, replaces=replaces)
    if is_json:
        emit(summary(prior))
    else:
        say(f"{prior!r} is known from now on; paredown prior remove {name} forgets it.")


@verb(prior_app, "make", "paredown prior make trials.db stored.json --sweep stored")
def prior_make(
    source: SourceArgument,
    to: Annotated[Path, typer.Argument(help="The file to write, .json.")],
    name: Annotated[str | None, typer.Option("--name", help="Its name; the file's unless given.", show_default=False)] = None,
    sweep: SweepsOption = None,
    tasks: TasksOption = None,
    is_finished: FinishedOption = False,
    is_json: JsonOption = False,
) -> None:
    """Write the prior of a store to a file, as the package carries them."""
    from paredown.pick.prior_collection import collect, read_rows
    from paredown.pick.priors import write_prior

    prior = collect(read_rows(source), name or to.stem, sweeps=sweep or (), folder=tasks, is_finished=is_finished)
    write_prior(prior, to)
    if is_json:
        emit({**summary(prior), "file": str(to)})
    else:
        say(f"{prior!r} in {to.name}")


@verb(prior_app, "remove", "paredown prior remove mine")
def prior_remove(name: Annotated[str, typer.Argument(help="One of your own.")], is_json: JsonOption = False) -> None:
    """Forget one of your own priors."""
    from paredown.pick.priors import remove

    remove(name)
    if is_json:
        emit({"removed": name})
    else:
        say(f"prior {name!r} is forgotten.")


def summary(prior: PriorData) -> dict[str, Any]:
    """A prior as JSON: its size, its tasks and plans, and where it comes from."""
    from dataclasses import asdict

    import numpy as np

    from paredown.pick.priors import FILE_FIELDS

    means = [float(row[known].mean()) if (known := np.isfinite(row)).any() else None for row in prior.errors]
    tasks = [
        {**asdict(task), "mean_error": mean, "noise": None if np.isnan(noise) else float(noise), "runs": int(count)}
        for task, mean, noise, count in zip(prior.tasks, means, prior.noise, prior.counts.sum(axis=1), strict=True)
    ]
    head = {
        "name": prior.name,
        "mode": prior.mode,
        "entries": int(np.isfinite(prior.errors).sum()),
        "runs": int(prior.counts.sum()),
    }
    plans = [{"label": plan.label, FILE_FIELDS["template"]: plan.template, "level": plan.level} for plan in prior.plans]
    return {**head, "tasks": tasks, "plans": plans, "provenance": [dict(one) for one in prior.provenance]}


def text_of(prior: PriorData, most: int) -> str:
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
