"""Code of the user's: what a function of a file or of a module returns; whatever it raises becomes a sentence.

>>> made_by("math", "sqrt", {})
Traceback (most recent call last):
    ...
paredown.errors.TaskError: math raised TypeError: math.sqrt() takes exactly one argument (0 given).
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from paredown.errors import TaskError
from paredown.plan.keys import closest


def made_by(source: Path | str, function: str, options: Mapping[str, Any]) -> Any:
    """What `function` of a file (a path) or of a module (a name) returns when called with `options`."""
    name = source.name if isinstance(source, Path) else source
    with _said(name):
        module = _imported(source) if isinstance(source, Path) else _module(source)
        make = getattr(module, function, None)
        if not callable(make):
            names = [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]
            raise TaskError(f"{name} has no function {function!r}. Closest: {closest(function, names) or 'it has none'}.")
        return make(**options)


@contextmanager
def _said(name: str) -> Generator[None]:
    """What the user's code raises becomes a sentence; leaving the process is no way out."""
    try:
        yield
    except TaskError:
        raise
    except (Exception, SystemExit) as error:
        raise TaskError(f"{name} raised {type(error).__name__}: {error}.") from error


def _imported(path: Path) -> Any:
    """The file as a module of its own, which may import what lies beside it."""
    name = f"paredown_task_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look for their module there
    with _beside(path.parent):
        spec.loader.exec_module(module)
    return module


def _module(name: str) -> Any:
    """A module by name, of this folder too."""
    with _beside(Path()):
        return importlib.import_module(name)


@contextmanager
def _beside(folder: Path) -> Generator[None]:
    place = str(folder.resolve())
    sys.path.insert(0, place)
    try:
        yield
    finally:
        sys.path.remove(place)
