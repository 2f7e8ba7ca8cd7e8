"""`paredown prior list|show|add|make|remove`: priors of the package and your own, made from sweeps."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paredown.cli.application import MANY, JsonOption, TasksOption, app, verb
from paredown.cli.output import emit, say, table, tell

if TYPE_CHECKING:
    from paredown.study.pick.prior_data import PriorData

prior_app = typer.Typer(
    no_args_is_help=True, rich_markup_mode="rich", help="Priors for pick: results of prior tasks, shipped and your own."
)
app.add_typer(prior_app, name="prior", rich_help_panel=MANY)
SourceArgument = Annotated[str, typer.Argument(help="A store (file or URL) or an export (.json) of sweeps.")]
SweepsOption = Annotated[
    list[str] | None, typer.Option("--sweep", help="Only tasks of this sweep; may be repeated.", show_default=False)
]
FinishedOption = Annotated[bool, typer.Option("--finished", help="Only tasks all of whose trials have finished.")]


@verb(prior_app, "list", "paredown prior list")
def prior_list(is_json: JsonOption = False) -> None:
    """Print the installed priors."""
    from paredown.study.pick.priors import available, load, own_priors

    priors = [(load(name), name in own_priors()) for name in available()]
    if is_json:
        emit({"priors": [{**summary(prior), "own": is_own} for prior, is_own in priors]})
    else:
        tell(*([f"{prior!r}{' (your own)' if is_own else ''}" for prior, is_own in priors] or ["There are none."]))


@verb(prior_app, "show", "paredown prior show stored")
def prior_show(
    name: Annotated[str, typer.Argument(help="A name, or a file.")],
    tasks: Annotated[int, typer.Option(min=1, help="Number of tasks to print.")] = 50,
    is_json: JsonOption = False,
) -> None:
    """Print tasks and plans of a prior: errors, noise, memory and provenance."""
    from paredown.study.pick.priors import load

    prior = load(name)
    if is_json:
        emit(summary(prior))
    else:
        tell(text_of(prior, tasks))


@verb(prior_app, "add", "paredown prior add trials.db --name mine")
def prior_add(
    source: SourceArgument,
    name: Annotated[str, typer.Option("--name", help="The name of the prior.")] = "mine",
    sweep: SweepsOption = None,
    tasks: TasksOption = None,
    replaces: Annotated[bool, typer.Option("--replace", help="Replace your own prior of that name.")] = False,
    is_json: JsonOption = False,
) -> None:
    """Make a prior from your own sweeps and install it, so that pick uses it."""
    from paredown.study.pick.prior_collection import collect, read_rows
    from paredown.study.pick.priors import add

    prior = collect(read_rows(source), name, sweeps=sweep or (), folder=tasks)
    add(prior, name, replaces=replaces)
    if is_json:
        emit(summary(prior))
    else:
        say(f"{prior!r} is installed; paredown prior remove {name} removes it.")


@verb(prior_app, "make", "paredown prior make trials.db stored.json --sweep stored")
def prior_make(
    source: SourceArgument,
    to: Annotated[Path, typer.Argument(help="The file to write, .json.")],
    name: Annotated[
        str | None, typer.Option("--name", help="The name of the prior. (default: the name of the file)", show_default=False)
    ] = None,
    sweep: SweepsOption = None,
    tasks: TasksOption = None,
    is_finished: FinishedOption = False,
    is_json: JsonOption = False,
) -> None:
    """Write the prior of a store to a file, in the format of the shipped priors."""
    from paredown.study.pick.prior_collection import collect, read_rows
    from paredown.study.pick.priors import write_prior

    prior = collect(read_rows(source), name or to.stem, sweeps=sweep or (), folder=tasks, is_finished=is_finished)
    write_prior(prior, to)
    if is_json:
        emit({**summary(prior), "file": str(to)})
    else:
        say(f"{prior!r} in {to.name}")


@verb(prior_app, "remove", "paredown prior remove mine")
def prior_remove(name: Annotated[str, typer.Argument(help="One of your own.")], is_json: JsonOption = False) -> None:
    """Remove one of your own priors."""
    from paredown.study.pick.priors import remove

    remove(name)
    if is_json:
        emit({"removed": name})
    else:
        say(f"prior {name!r} is removed.")


def summary(prior: PriorData) -> dict[str, Any]:
    """A prior as JSON: its size, its tasks and plans, and its provenance."""
    from dataclasses import asdict

    import numpy as np

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
    plans = [{"label": p.label, "template": p.template, "level": p.level} for p in prior.plans]
    return {
        **head,
        "tasks": tasks,
        "plans": plans,
        "provenance": [dict(source) for source in prior.provenance],
    }


def text_of(prior: PriorData, most: int) -> str:
    """A table of tasks, each with its plan of least error, and the provenance."""
    import numpy as np

    rows: list[tuple[str, ...]] = []
    for i, task in enumerate(prior.tasks[:most]):
        j = int(np.nanargmin(prior.errors[i])) if np.isfinite(prior.errors[i]).any() else 0
        rows.append((task.name, task.family, str(prior.counts[i].sum()), f"{prior.errors[i, j]:.4f}", prior.plans[j].label))
    lines = [repr(prior), "", *table(("task", "family", "runs", "least error", "plan"), rows, left=2)]
    lines += [f"... {len(prior.tasks) - most} more"] if len(prior.tasks) > most else []
    for source in prior.provenance:
        origin = ", ".join(f"{word} {value}" for word, value in source.items() if word not in ("versions", "sweeps"))
        lines.append(f"{origin}; {', '.join(f'{k} {v}' for k, v in source.get('versions', {}).items())}")
    return "\n".join(lines)
