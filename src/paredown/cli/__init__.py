"""The command `paredown`: subcommands `estimate`, `plan`, `pick`, `train` and others. docs/cli.md is the guide.

Each file holds related subcommands. torch, numpy and SQLAlchemy are imported inside the subcommands that need them, so that `--help` does
not wait for them.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paredown.cli.application import app

__all__ = ["app", "main"]


def main() -> None:
    """Run the command line: the entry point of `paredown` and of `python -m paredown`."""
    try:
        loaded = _load()
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich"):
            raise
        sys.exit(f"paredown: the command line needs {error.name}: pip install 'paredown[cli]'.")
    os.environ.setdefault(
        "TORCH_CPP_LOG_LEVEL", "ERROR"
    )  # torch reads it when imported; its profiler warns about tensors that were allocated before it started
    from paredown.cli.output import warn_of_passwords

    warn_of_passwords(sys.argv)
    loaded(prog_name="paredown")


def _load() -> Any:
    from paredown.cli.application import load

    return load()


def __getattr__(name: str) -> Any:
    if name == "app":
        return _load()
    raise AttributeError(f"module 'paredown.cli' has no attribute {name!r}")
