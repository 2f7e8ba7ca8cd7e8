"""The typer application: the files that define subcommands (VERB_FILES), the decorator `verb` that registers one, exit statuses, and
options that subcommands share.

Errors end in one message on stderr and an exit status:

0   done
1   an error
2   invalid arguments
3   no plan fits the budget
4   the training diverged, was stopped early, or ran out of memory
130 interrupted

An option has the same meaning in every subcommand.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from enum import IntEnum
from functools import wraps
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

import paredown
from paredown.cli.budget import CARDS
from paredown.cli.output import say
from paredown.errors import BudgetError, ParedownError
from paredown.sizes import parse_bytes

# modules of this package that define subcommands, in the order of the help
VERB_FILES = (
    "environment_verbs",
    "estimate_verb",
    "plan_verbs",
    "pick_verbs",
    "train_verb",
    "sweep_verbs",
    "prior_verbs",
    "report_verbs",
    "demo_verb",
)
EXTRAS = {
    "psycopg": "postgres",
    "pyarrow": "parquet",
    "ray": "ray",
    "rich": "cli",
    "safetensors": "safetensors",
    "scipy": "search",
    "sqlalchemy": "sweeps",
}
ALONE = {
    "PIL": "pillow",
    "transformers": "transformers",
    "torch": "torch",
    "numpy": "numpy",
}  # PyPI names of imports without an extra
TRACEBACK = "PAREDOWN_TRACEBACK"  # environment variable: 1 prints a traceback instead of a message
LONG = 2000  # characters of a message; exceptions of libraries can have any length


class InterruptedWithStore(KeyboardInterrupt):
    """Interrupted while finished trials are in a store."""


class Exit(IntEnum):
    """Exit statuses, as listed in docs/cli.md."""

    DONE = 0
    ERROR = 1
    USAGE = 2
    DOES_NOT_FIT = 3
    ENDED_BADLY = 4
    INTERRUPTED = 130


app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    epilog="Try it: paredown demo. Exit status: 0 done, 1 error, 2 usage, 3 does not fit, 4 training ended badly, 130 interrupted.",
)
LOOK, CHOOSE, MANY, SHOW = "Inspect", "Choose and train", "Many trials", "Report"


def load() -> typer.Typer:
    """The application with all subcommands, which register themselves when their modules are imported."""
    for name in VERB_FILES:
        import_module(f"paredown.cli.{name}")
    return app


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
    """Train in the memory you have: what a training step stores, which formats fit a budget, and what they cost."""


def verb(
    to: typer.Typer, name: str, *examples: str, panel: str | None = None
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register a function as the subcommand `name`; its help ends with `examples`, its exceptions become a message and an exit status."""

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        @wraps(function)
        def run(*values: Any, **options: Any) -> None:
            with errors():
                function(*values, **options)

        epilog = "\n\n".join([f"Example{'s' * (len(examples) > 1)}:", *examples])
        return to.command(name, epilog=epilog, rich_help_panel=panel)(run)

    return decorate


@contextmanager
def errors() -> Generator[None]:
    """A context in which an exception ends the process with one message on stderr and an exit status."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # on SIGTERM a worker releases its claims
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
        end(*describe_error(error))
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def kept_in_store(is_kept: bool = True) -> Generator[None]:
    """A context in which Ctrl-C also reports that finished trials are in the store, if `is_kept`."""
    try:
        yield
    except KeyboardInterrupt:
        if is_kept:
            raise InterruptedWithStore from None
        raise


def describe_error(error: BaseException) -> tuple[str, Exit]:
    """The message and the exit status of an exception."""
    if isinstance(error, ParedownError):
        return str(error), Exit.DOES_NOT_FIT if isinstance(error, BudgetError) else Exit.ERROR
    if isinstance(error, KeyboardInterrupt):
        kept = "; finished trials are in the store, and the same command runs the others" * isinstance(error, InterruptedWithStore)
        return f"stopped{kept}.", Exit.INTERRUPTED
    if isinstance(error, ModuleNotFoundError) and error.name:
        return say_missing(error.name.partition(".")[0]), Exit.ERROR
    if isinstance(error, OSError) and error.filename and error.strerror:
        return f"{error.filename}: {error.strerror}.", Exit.ERROR
    # raised by a model, a task or a library
    return f"{type(error).__name__}: {str(error).strip() or 'no message'}. Set {TRACEBACK}=1 for the traceback.", Exit.ERROR


def say_missing(package: str) -> str:
    """A message that names the pip command for a missing package."""
    wanted = f"'paredown[{EXTRAS[package]}]'" if package in EXTRAS else ALONE.get(package, package)
    return f"this needs {package}: pip install {wanted}."


def end(sentence: str, status: int) -> NoReturn:
    """Print a message and exit with `status`."""
    say(sentence if len(sentence) <= LONG else f"{sentence[: LONG - 4]} ...")
    raise typer.Exit(status) from None


# --- options that several subcommands share --------------------------------------------------------------------------


def check_size(text: str | None) -> str | None:
    """`text` unchanged, if it is a valid size; else typer.BadParameter."""
    try:
        if text is not None:
            parse_bytes(text, whole=100)
    except BudgetError as error:
        raise typer.BadParameter(str(error)) from None
    return text


def starting(names: Sequence[str]) -> Callable[[str], list[str]]:
    """A function for shell completion: the names that begin with the text so far. Without any, the shell completes file names.

    >>> starting(["lpmm", "lpmm4", "safe"])("lp")
    ['lpmm', 'lpmm4']
    """
    return lambda incomplete: [name for name in names if name.startswith(incomplete)]


# names for shell completion, which must not wait for torch: equal to those of paredown.models, tasks and presets (tests/cli/test_help.py)
MODEL_NAMES = (
    *("mlp", "resnet18", "resnet50", "sumlast18", "squeezenet", "shufflenet", "mobilenet"),
    *("convnext", "unet", "vit", "gpt", "lstm"),
)
TASK_NAMES = ("digits", "fashion_mnist", "images:", "text:")
PLAN_NAMES = (
    "baseline",
    "activations8",
    "activations8f",
    "activations4",
    "activations4a",
    "activations2",
    "frozen8",
    "frozen4",
    "safe",
    "fine_tune",
    "half",
    "lpmm",
    "lpmm4",
)
SPELLED = (
    "A task or model: digits, digits#model=vit,steps=200, resnet50#width=64, file.py:function, module:function, or a Hugging Face "
    "config.json."
)
TASK_SPELLED = "A task: digits, images:FILE.npz#model=vit,steps=200, text:FILE, file.py:function or module:function."

ModelArgument = Annotated[
    str, typer.Argument(metavar="MODEL", help=SPELLED, show_default=False, autocompletion=starting(TASK_NAMES + MODEL_NAMES))
]
TaskArgument = Annotated[
    str, typer.Argument(metavar="TASK", help=TASK_SPELLED, show_default=False, autocompletion=starting(TASK_NAMES))
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
BUDGET = "40%"  # of pick and demo
SIZES = "8GiB (1024^3 bytes each), 8GB (1000^3), bytes, or 60% of the baseline's peak memory."
BudgetOption = Annotated[
    str | None,
    typer.Option("--budget", metavar="SIZE", callback=check_size, help=SIZES, show_default=False),
]
DefaultBudget = Annotated[
    str | None,
    typer.Option("--budget", metavar="SIZE", callback=check_size, help=f"{SIZES} (default: {BUDGET})", show_default=False),
]
GpuOption = Annotated[
    str | None,
    typer.Option(
        "--gpu",
        metavar="CARD",
        autocompletion=starting([*(card.name for card in CARDS), "cuda"]),
        help="Instead of --budget, the memory of a card: 4090, h100, a100-80gb and others, or cuda: what is free on the GPU here.",
        show_default=False,
    ),
]
PlanOption = Annotated[
    list[str] | None,
    typer.Option(
        "--plan",
        metavar="PLAN",
        help="A preset, a plan.json, or role=format,... May be repeated.",
        show_default=False,
        autocompletion=starting(PLAN_NAMES),
    ),
]
DeviceOption = Annotated[
    str | None,
    typer.Option(
        "--device",
        help="Where the step will run: cuda or cpu; predictions need no GPU. (default: cuda if available)",
        show_default=False,
    ),
]
HereOption = Annotated[
    str | None,
    typer.Option("--device", help="Where to train: cuda, cuda:1 or cpu. (default: cuda if available)", show_default=False),
]
AutocastOption = Annotated[str | None, typer.Option("--autocast", metavar="DTYPE", help="bf16, fp16 or none.", show_default=False)]
CompiledOption = Annotated[bool, typer.Option("--compiled", help="torch.compile compiles the model: session.compile().")]
WorldSizeOption = Annotated[
    int, typer.Option("--world-size", min=1, help="Processes that train the model together; bytes are those of one.")
]
StrategyOption = Annotated[
    str | None, typer.Option("--strategy", help="How they share it: ddp, or fsdp2 (fully_shard).", show_default=False)
]
ChunkedLossOption = Annotated[
    bool | None,
    typer.Option(
        "--chunked-loss/--no-chunked-loss", help="Whether sessions compute the loss in chunks of rows.", show_default=False
    ),
]
OptimizerOption = Annotated[
    str | None, typer.Option("--optimizer", help="sgd, sgdm, adamw, lion or muon. (default: the task's; adamw)", show_default=False)
]
InputOption = Annotated[
    str | None,
    typer.Option(
        "--input",
        metavar="SHAPE",
        help="Shape of one example, for a model without data: 3x224x224, or tokens:1024.",
        show_default=False,
    ),
]
LengthOption = Annotated[
    int | None, typer.Option("--length", min=1, help="Tokens of one example; the same as --input tokens:N.", show_default=False)
]
LoraOption = Annotated[
    int | None,
    typer.Option("--lora", min=1, metavar="RANK", help="LoRA adapters of this rank; all else is frozen.", show_default=False),
]
LoraTargetsOption = Annotated[
    str | None,
    typer.Option(
        "--lora-targets",
        metavar="NAMES",
        help="Layers with adapters: q_proj,v_proj or patterns of paths. (default: all linear layers but the output head)",
        show_default=False,
    ),
]
CheckpointingOption = Annotated[bool, typer.Option("--checkpointing", help="Activation checkpointing of every layer.")]
OffloadOption = Annotated[bool, typer.Option("--offload", help="Packed inputs of checkpointed layers are in host memory.")]
FrozenOption = Annotated[
    str | None,
    typer.Option("--frozen", metavar="FORMAT", help="Store frozen weights in it: nf4/64@bf16, int8/64@bf16.", show_default=False),
]
PLAN_FILE = Path("plan.json")
PlanFileOption = Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="The file that the plan is written to.")]
ReportOption = Annotated[Path | None, typer.Option(metavar="FILE", help="Also write a report page.", show_default=False)]
OutOption = Annotated[Path | None, typer.Option("--out", "-o", metavar="FILE", help="Write the result here.", show_default=False)]
OverwriteOption = Annotated[bool, typer.Option("--overwrite", "--force", help="Replace the file of --out if it exists.")]
SeedOption = Annotated[int, typer.Option("--seed", min=0, help="Seed of initial weights, data order and stochastic rounding.")]
StoreOption = Annotated[
    str | None, typer.Option("--store", envvar="PAREDOWN_STORE", help="A file for SQLite, or a PostgreSQL URL.", show_default=False)
]
TasksOption = Annotated[
    Path | None, typer.Option("--tasks", help="The folder that task files are loaded from.", show_default=False)
]
SlotsOption = Annotated[
    int | None, typer.Option(min=1, help="Trials that run in parallel. (default: one per GPU, or one)", show_default=False)
]
ENGINES_HELP = "Where trials run: local (a process each), graphs (simulated trials in CUDA graphs), inline, or ray."
EngineOption = Annotated[str, typer.Option(help=ENGINES_HELP)]
RayOption = Annotated[
    Path | None,
    typer.Option(
        "--ray", metavar="FILE", help="With --engine ray: GPUs, placement and environment of a trial.", show_default=False
    ),
]
PatienceOption = Annotated[
    float, typer.Option("--patience", min=1.0, help="Seconds without a heartbeat after which a worker's trials run elsewhere.")
]
SweepOption = Annotated[str | None, typer.Option("--sweep", help="Only this sweep.", show_default=False)]
ModeOption = Annotated[
    str,
    typer.Option("--mode", help="store: stored tensors are packed. simulate: arithmetic uses rounded values; no memory is saved."),
]


def command_text(model: str, **options: object) -> str:
    """The arguments that name `model` and the options that are not None or False, for a command in a hint.

    >>> command_text("net.py:make", input="3x32x32", batch=4, device=None)
    'net.py:make --input 3x32x32 --batch 4'
    """
    given = {name: value for name, value in options.items() if value is not None and value is not False}
    return " ".join([model, *(f"--{name}" if value is True else f"--{name} {value}" for name, value in given.items())])


def step_text(model: str, options: Any) -> str:
    """The arguments that name `model` and the `SubjectOptions` that `paredown plan` and `explain` take."""
    fields = {name: getattr(options, name) for name in ("input", "batch", "optimizer", "device", "autocast", "compiled")}
    is_chunked = options.chunked_loss
    return command_text(model, **fields, **({} if is_chunked is None else {f"{'' if is_chunked else 'no-'}chunked-loss": True}))
