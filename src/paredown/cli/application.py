"""Define the typer application: the files with subcommands (VERB_FILES), the decorator `verb` that registers one, exit statuses, and
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
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, is_dataclass, replace
from enum import IntEnum
from importlib import import_module
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any, cast, get_type_hints

import typer

import paredown
from paredown.cli.budget import CARDS
from paredown.cli.output import BASELINE, say
from paredown.errors import BudgetError, ParedownError
from paredown.sizes import parse_bytes

# modules of this package that define subcommands, in the order of the help
VERB_FILES = (
    "environment_verbs",
    "estimate_verb",
    "plan_verbs",
    "pick_verbs",
    "train_verb",
    "report_verbs",
    "sweep_verbs",
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
    """Raised when the user interrupts work that can be resumed, since its finished trials are in a database."""


class Exit(IntEnum):
    """The exit statuses of the command line, which docs/cli.md lists."""

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
    """Return the typer application with all subcommands."""
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
    """Return a decorator that registers a function as the subcommand `name` of the application `to`.

    `examples` are commands that its help ends with, `panel` the heading under which `--help` lists it. Exceptions of the function become
    a message and an exit status. A parameter whose type is a dataclass stands for the options that are fields of that class.
    """

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        def run(**values: Any) -> None:
            with errors():
                _called(function, values)

        parameters = options_of(function)
        run.__name__, run.__doc__ = function.__name__, function.__doc__
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        vars(run)["__signature__"] = Signature(parameters)  # typer reads both
        epilog = "\n\n".join([f"Example{'s' * (len(examples) > 1)}:", *examples])
        return to.command(name, epilog=epilog, rich_help_panel=panel)(run)

    return decorate


def options_of(function: Callable[..., Any]) -> list[Parameter]:
    """Return the parameters of a subcommand's function that are options of the command line.

    A parameter whose type is a dataclass gives the fields of that class.

    >>> [option.name for option in options_of(SubjectOptions)]
    ['input', 'optimizer', 'device', 'autocast', 'compiled', 'chunked_loss']
    """
    found: list[Parameter] = []
    for parameter, kind in _typed(function):
        if is_dataclass(kind):
            found += options_of(cast(type, kind))
        elif hasattr(kind, "__metadata__"):  # Annotated[...]
            found.append(parameter.replace(kind=Parameter.KEYWORD_ONLY, annotation=kind))
    return found


def _called(function: Callable[..., Any], values: dict[str, Any]) -> Any:
    arguments: dict[str, Any] = {}
    for parameter, kind in _typed(function):
        if is_dataclass(kind):
            arguments[parameter.name] = _called(cast(type, kind), values)
        elif hasattr(kind, "__metadata__"):
            arguments[parameter.name] = values[parameter.name]
    return function(**arguments)


def _typed(function: Callable[..., Any]) -> Iterator[tuple[Parameter, Any]]:
    kinds = get_type_hints(function, include_extras=True)
    return ((parameter, kinds[name]) for name, parameter in signature(function).parameters.items())


@contextmanager
def errors() -> Generator[None]:
    """Return a context in which an exception ends the process with one message on stderr and an exit status."""
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
        sentence, status = describe_error(error)
        say(sentence if len(sentence) <= LONG else f"{sentence[: LONG - 4]} ...")
        raise typer.Exit(status) from None
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def kept_in_store(is_kept: bool = True) -> Generator[None]:
    """Return a context in which Ctrl-C raises InterruptedWithStore if `is_kept`: finished trials are in the database of trials."""
    try:
        yield
    except KeyboardInterrupt:
        if is_kept:
            raise InterruptedWithStore from None
        raise


def describe_error(error: BaseException) -> tuple[str, Exit]:
    """Return the message that the user sees for an exception, and the exit status of the process."""
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
    """Return a message with the pip command that installs `package`, which could not be imported."""
    return f"this needs {package}: pip install {name_for_pip(package)}."


def name_for_pip(package: str) -> str:
    """Return what `pip install` takes for a package that is imported as `package`: an extra of paredown, or its name on PyPI."""
    return f"'paredown[{EXTRAS[package]}]'" if package in EXTRAS else ALONE.get(package, package)


# --- options that several subcommands share --------------------------------------------------------------------------


def option(text: str, *names: str, **settings: Any) -> Any:
    """Return a typer.Option with the flags `names` and the help `text`, which must also say what the default does.

    `settings` are further arguments of typer.Option.
    """
    return typer.Option(*names, help=text, show_default=False, **settings)


def check_size(text: str | None) -> str | None:
    """Return `text` if it is None or a size such as 8GiB or 60%; raise typer.BadParameter otherwise."""
    try:
        if text is not None:
            parse_bytes(text, whole=100)
    except BudgetError as error:
        raise typer.BadParameter(str(error)) from None
    return text


def starting(names: Sequence[str] | Callable[[], Sequence[str]]) -> Callable[[str], list[str]]:
    """Return a function for shell completion that maps the typed text to the names that begin with it; `names` may be a function.

    If no name does, the shell completes file names.

    >>> starting(["lpmm", "lpmm4", "safe"])("lp")
    ['lpmm', 'lpmm4']
    """
    return lambda incomplete: [name for name in (names() if callable(names) else names) if name.startswith(incomplete)]


# names for shell completion, which must not wait for torch: equal to those of paredown.models and tasks (tests/cli/test_help.py)
MODEL_NAMES = (
    *("mlp", "resnet18", "resnet50", "sumlast18", "squeezenet", "shufflenet", "mobilenet"),
    *("convnext", "unet", "vit", "gpt", "lstm"),
)
TASK_NAMES = ("digits", "fashion_mnist", "images:", "text:")


def plan_names() -> list[str]:
    """Return the names of plans that need no file: "baseline" and all presets."""
    from paredown.plan.presets import PRESETS

    return [BASELINE, *PRESETS]


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
BatchOption = Annotated[int | None, option("Batch size.", min=1)]
BUDGET = "40%"  # of pick
SIZES = "8GiB (1024^3 bytes each), 8GB (1000^3), bytes, or 60% of the baseline's peak memory."
BudgetOption = Annotated[str | None, option(SIZES, "--budget", metavar="SIZE", callback=check_size)]
DefaultBudget = Annotated[str | None, option(f"{SIZES} (default: {BUDGET})", "--budget", metavar="SIZE", callback=check_size)]
GpuOption = Annotated[
    str | None,
    option(
        "Instead of --budget, the memory of a card: 4090, h100, a100-80gb and others, or cuda: what is free on the GPU here.",
        "--gpu",
        metavar="CARD",
        autocompletion=starting([*(card.name for card in CARDS), "cuda"]),
    ),
]
HostBudgetOption = Annotated[
    str | None,
    option("Host memory that packed activations may take until backward needs them.", metavar="SIZE", callback=check_size),
]
HereOption = Annotated[str | None, option("Where to train: cuda, cuda:1 or cpu. (default: cuda if available)", "--device")]
PLAN_FILE = Path("plan.json")
PlanFileOption = Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="The file that the plan is written to.")]
ReportOption = Annotated[Path | None, option("Also write a report page.", metavar="FILE")]
OverwriteOption = Annotated[bool, typer.Option("--overwrite", "--force", help="Replace the file of --out if it exists.")]
SeedOption = Annotated[int, typer.Option("--seed", min=0, help="Seed of initial weights, data order and stochastic rounding.")]
StoreOption = Annotated[str | None, option("A file for SQLite, or a PostgreSQL URL.", "--store", envvar="PAREDOWN_STORE")]
TasksOption = Annotated[Path | None, option("The folder that task files are loaded from.", "--tasks")]
SweepOption = Annotated[str | None, option("Only this sweep.", "--sweep")]
ModeOption = Annotated[
    str,
    typer.Option("--mode", help="store: stored tensors are packed. simulate: arithmetic uses rounded values; no memory is saved."),
]


@dataclass(frozen=True, kw_only=True)
class SubjectOptions:
    """Holds the command-line options that change the training step of the argument MODEL; None keeps the step's own value.

    `batch`, `lora` (rank of adapters) and `lora_targets` (layers that get them) come from options that only some subcommands have.
    """

    input: Annotated[
        str | None, option("Shape of one example, for a model without data: 3x224x224, or tokens:1024.", metavar="SHAPE")
    ] = None
    optimizer: Annotated[str | None, option("sgd, sgdm, adamw, lion or muon. (default: the task's; adamw)")] = None
    device: Annotated[
        str | None, option("Where the step will run: cuda or cpu; predictions need no GPU. (default: cuda if available)")
    ] = None
    autocast: Annotated[str | None, option("bf16, fp16 or none.", metavar="DTYPE")] = None
    compiled: Annotated[bool, typer.Option("--compiled", help="torch.compile compiles the model: session.compile().")] = False
    chunked_loss: Annotated[bool | None, option("Whether sessions compute the loss in chunks of rows.")] = None
    batch: int | None = None
    lora: int | None = None  # the rank of LoRA adapters
    lora_targets: tuple[str, ...] = ()

    def on_device_of(self, gpu: str | None) -> SubjectOptions:
        """Return these options with CUDA as the device if --device is not given and `gpu`, the value of --gpu, names a card."""
        return replace(self, device=self.device or ("cuda" if gpu else None))


def step_text(model: str, options: SubjectOptions) -> str:
    """Return `model` and `options` as arguments of `paredown plan`, for a command that a message suggests.

    >>> step_text("net.py:make", SubjectOptions(input="3x32x32", batch=4, compiled=True, chunked_loss=False))
    'net.py:make --input 3x32x32 --batch 4 --compiled --no-chunked-loss'
    """
    values = [(name, getattr(options, name)) for name in ("input", "batch", "optimizer", "device", "autocast")]
    flags = ["--compiled"] if options.compiled else []
    flags += {None: [], True: ["--chunked-loss"], False: ["--no-chunked-loss"]}[options.chunked_loss]
    return " ".join([model, *(f"--{name} {value}" for name, value in values if value is not None), *flags])
