"""Imports point up the list of packages: what a layer may import is a row of ALLOWED, in order; a new folder needs a new row.

`apply` and `verify` are a layer of their own: they start sessions of `session/` or of `simulate/`, and simulate mode uses the changes and
the activation checkpointing of `session/`.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "src" / "paredown"
TORCH = frozenset({"torch", "numpy", "triton"})
MOST_FILES = 15  # of a package, beside __init__.py
ENTRANCES = (("session", "session"), ("session", "verify"), ("session", "__init__"))
BASE = frozenset({"errors", "lazy", "roles", "sizes", "tables", "serial"})
STEP = BASE | {"formats", "trace", "plan"}
# layer: (layers of paredown, packages from elsewhere beside the standard library); rows stand below all that they import
ALLOWED: dict[str, tuple[frozenset[str], frozenset[str]]] = {
    "errors": (frozenset(), frozenset()),
    "lazy": (frozenset(), frozenset()),
    "roles": (frozenset(), frozenset()),
    "serial": (frozenset({"errors"}), frozenset()),
    "sizes": (frozenset({"errors", "serial"}), frozenset()),
    "tables": (frozenset(), frozenset()),
    "formats": (frozenset({"errors"}), frozenset()),
    "codec": (frozenset({"errors", "formats"}), TORCH),
    "trace": (BASE | {"formats"}, frozenset({"torch"})),
    "plan": (BASE | {"formats", "trace"}, frozenset()),
    "assign": (STEP, frozenset({"numpy"})),
    "optim": (BASE | {"formats", "codec"}, TORCH),
    "loss": (STEP | {"codec", "optim"}, TORCH),
    "session": (STEP | {"codec", "assign", "optim", "loss"}, frozenset({"torch"})),
    "simulate": (STEP | {"codec", "session"}, frozenset({"torch"})),
    "apply": (STEP | {"codec", "assign", "optim", "loss", "session", "simulate"}, frozenset({"torch"})),
    "models": (frozenset(), frozenset({"torch"})),
    "calibrate": (STEP | {"codec", "optim", "apply", "models"}, frozenset({"torch"})),
    "tasks": (STEP | {"codec", "optim", "session", "apply", "simulate", "models"}, frozenset({"torch", "numpy", "PIL"})),
    "sweeps": (STEP | {"codec", "assign", "simulate", "tasks"}, frozenset({"torch", "numpy", "sqlalchemy"})),
    "pick": (STEP | {"assign", "simulate", "tasks", "sweeps"}, frozenset({"torch", "numpy", "scipy"})),
    "papers": (STEP | {"simulate", "pick"}, frozenset({"numpy", "scipy"})),
    "report": (STEP | {"session", "apply", "tasks", "sweeps", "pick"}, frozenset({"sqlalchemy"})),
    "integrations": (
        STEP | {"assign", "optim", "loss", "session", "apply", "simulate", "tasks", "pick"},
        frozenset({"torch", "transformers", "lightning"}),
    ),
    "cli": (
        STEP
        | {"__init__", "assign", "session", "apply", "models", "calibrate", "tasks", "sweeps", "pick", "report", "integrations"},
        frozenset({"typer", "rich", "torch", "numpy", "safetensors"}),
    ),
    "__main__": (frozenset({"cli"}), frozenset()),
    "__init__": (STEP | {"codec", "assign", "optim", "session", "apply", "calibrate", "tasks", "pick"}, frozenset()),
}
ABOVE_ALL = "__init__"  # the public surface, which the command line may use


def layer_of(parts: tuple[str, ...]) -> str:
    """The layer of a module inside the package: its folder, or its own name when it lies at the top."""
    return "apply" if parts[:2] in ENTRANCES else parts[0] if parts else "__init__"


def imported_modules(tree: ast.AST, package: tuple[str, ...]) -> Iterator[tuple[int, str]]:
    """(line, absolute dotted name) of every import, wherever it stands; `package` is where relative ones start."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join((*base, *(node.module or "").split("."))).strip(".")
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)


def violations(source: str, inside: tuple[str, ...]) -> list[str]:
    """What the module at `inside` (its path within paredown, without .py) imports against the rules."""
    layer = layer_of(inside)
    if layer not in ALLOWED:
        return [f"{layer} has no row in ALLOWED"]
    layers, elsewhere = ALLOWED[layer]
    found: list[str] = []
    for line, name in imported_modules(ast.parse(source), ("paredown", *inside[:-1])):
        top, *rest = name.split(".")
        if top == "paredown":
            target = layer_of(tuple(rest))
            fine = target == layer or target in layers
        else:
            fine = top in sys.stdlib_module_names or top in elsewhere
        if not fine:
            found.append(f"{'/'.join(inside)}:{line}: {layer} may not import {name}")
    return found


def test_imports_point_up_the_list() -> None:
    found: list[str] = []
    for path in sorted(PACKAGE.rglob("*.py")):
        inside = path.relative_to(PACKAGE).with_suffix("").parts
        found += violations(path.read_text(), inside if inside != ("__init__",) else ())
    assert not found, "\n".join(found)


def test_every_layer_is_there() -> None:
    there = {layer_of(path.relative_to(PACKAGE).with_suffix("").parts) for path in PACKAGE.rglob("*.py")}
    assert there == set(ALLOWED)


def test_rows_stand_below_what_they_import() -> None:
    order = list(ALLOWED)
    for layer, (layers, _) in ALLOWED.items():
        below = [one for one in layers - {ABOVE_ALL} if order.index(one) >= order.index(layer)]
        assert not below, f"{layer} may import {below}, which stand below it"


def test_packages_have_few_files() -> None:
    folders = {path.parent for path in PACKAGE.rglob("*.py")} - {PACKAGE}
    counts = {
        str(folder.relative_to(PACKAGE)): sum(path.name != "__init__.py" for path in folder.glob("*.py")) for folder in folders
    }
    assert max(counts.values()) <= MOST_FILES, counts


def test_the_checker_sees_planted_violations() -> None:
    at = ("formats", "element")
    assert violations("import torch\n", at) == ["formats/element:1: formats may not import torch"]
    assert violations("from paredown.codec import packed\n", at)
    assert violations("from ..codec.packed import encode\n", at)
    assert violations("from paredown import encode\n", at), "the public surface is above every layer"
    assert violations("def late():\n    import numpy.linalg\n", at)
    assert violations("from scipy import linalg\n", ("codec", "packed"))
    assert violations("import math\n", ("unheard_of", "module"))
    assert violations("from paredown.codec.packed import encode\n", ("plan", "plan")), "codec and plan meet in session"
    assert violations("from paredown.plan.plan import Plan\n", ("trace", "trace")), "a trace knows no plan"
    assert violations("from paredown.simulate.peppp import peppp_plan\n", ("session", "weights")), "apply alone knows both modes"
    assert violations("from paredown.papers.peppp_completion import complete\n", ("pick", "pick"))


def test_the_checker_lets_the_rest_pass() -> None:
    assert not violations("import math\nfrom paredown.errors import FormatError\nfrom . import rounding\n", ("formats", "element"))
    assert not violations("from paredown.formats.format import Format\nimport torch\nfrom . import cpu\n", ("codec", "packed"))
    assert not violations("from paredown.simulate.simulated_session import SimulatedSession\n", ENTRANCES[0])
