"""The command line: verbs of the pipeline, `paredown estimate`, `plan`, `pick`, `train` and so on; docs/cli.md is the guide.

A file has the verbs of one kind; torch, numpy and SQLAlchemy are imported by the verbs that need them, so that `--help` is quick.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paredown.cli.application import app

__all__ = ["app", "main"]

# files with verbs, in the order of the help
PARTS = (
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


def main() -> None:
    """The entry point."""
    try:
        loaded = _load()
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich"):
            raise
        sys.exit(f"paredown: the command line needs {error.name}: pip install 'paredown[cli]'.")
    os.environ.setdefault(
        "TORCH_CPP_LOG_LEVEL", "ERROR"
    )  # its profiler warns of what was there before; read when torch is imported
    import_module("paredown.cli.output").warn_of_passwords(sys.argv)
    loaded(prog_name="paredown")


def _load() -> Any:
    """The application with all its verbs."""
    for part in PARTS:
        import_module(f"paredown.cli.{part}")
    return import_module("paredown.cli.application").app


def __getattr__(name: str) -> Any:
    if name == "app":
        return _load()
    raise AttributeError(f"module 'paredown.cli' has no attribute {name!r}")
