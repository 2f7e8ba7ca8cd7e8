"""Lets a package load the names that it exports when they are first used (PEP 562).

A package keeps a table from each name to the module that defines it. `import paredown.study.tasks` then imports no module of it, and
`from paredown.study.tasks import Task` imports one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any


def loader(package: str, **modules: str) -> Callable[[str], Any]:
    """Return a `__getattr__` for `package` that imports the defining module when one of its names is first used.

    Each keyword is a module of the package, and its value lists the names that the module defines: module="name name ...".
    """
    home = {name: f"{package}.{module}" for module, names in modules.items() for name in names.split()}

    def load(name: str) -> Any:
        if name not in home:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(home[name]), name)
        setattr(sys.modules[package], name, value)  # the next look-up finds it
        return value

    return load
