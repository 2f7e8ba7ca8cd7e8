"""Flags that several verbs share; a flag means the same wherever it is."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from paredown.errors import BudgetError
from paredown.plan.sizes import parse_bytes


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


def spelled(model: str, **options: object) -> str:
    """A model and the options that were given, as another verb is told of them.

    >>> spelled("net.py:make", input="3x32x32", batch=4, device=None)
    'net.py:make --input 3x32x32 --batch 4'
    """
    return " ".join([model, *(f"--{name} {value}" for name, value in options.items() if value is not None)])
