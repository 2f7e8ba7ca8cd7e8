"""Imports point one way: errors, roles, serial <- formats <- codec, plan; codec <- optim; plan <- search; all <- session <- runs.

What a layer may import is a row of ALLOWED; a new folder needs a new row.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "src" / "paredown"
TORCH = frozenset({"torch", "numpy", "triton"})
# layer: (layers of paredown, packages from elsewhere beside the standard library)
ALLOWED: dict[str, tuple[frozenset[str], frozenset[str]]] = {
    "errors": (frozenset(), frozenset()),
    "roles": (frozenset(), frozenset()),
    "serial": (frozenset({"errors"}), frozenset()),
    "formats": (frozenset({"errors"}), frozenset()),
    "codec": (frozenset({"errors", "formats"}), TORCH),
    "plan": (frozenset({"errors", "roles", "serial", "formats"}), TORCH - {"triton"}),
    "search": (frozenset({"errors", "roles", "serial", "formats", "plan"}), frozenset({"numpy", "scipy"})),
    "models": (frozenset(), frozenset({"torch"})),
    "optim": (frozenset({"errors", "roles", "formats", "codec"}), TORCH),
    "session": (frozenset({"errors", "roles", "formats", "codec", "plan", "optim", "search"}), frozenset({"torch"})),
    "runs": (
        frozenset({"errors", "roles", "serial", "formats", "codec", "plan", "optim", "session", "models", "search"}),
        frozenset({"torch", "numpy", "PIL", "sqlalchemy"}),
    ),
    "report": (frozenset({"errors", "roles", "serial", "plan", "search", "session", "runs"}), frozenset({"sqlalchemy"})),
    "integrations": (
        frozenset({"__init__", "errors", "plan", "optim", "search", "session", "runs"}),
        frozenset({"torch", "transformers", "lightning"}),
    ),
    "cli": (
        frozenset({"__init__", "errors", "roles", "serial", "formats", "plan", "models", "session", "search", "runs", "report"}),
        frozenset({"typer", "rich", "torch", "numpy", "safetensors"}),
    ),
    "__main__": (frozenset({"cli"}), frozenset()),
    "__init__": (
        frozenset({"errors", "roles", "formats", "codec", "plan", "optim", "search", "session", "runs"}),
        frozenset({"sqlalchemy"}),
    ),
}


def layer_of(parts: tuple[str, ...]) -> str:
    """The layer of a module inside the package: its folder, or its own name when it lies at the top."""
    return parts[0] if parts else "__init__"


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
    there = {path.relative_to(PACKAGE).with_suffix("").parts[0] for path in PACKAGE.rglob("*.py")}
    assert there == set(ALLOWED)


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


def test_the_checker_lets_the_rest_pass() -> None:
    assert not violations("import math\nfrom paredown.errors import FormatError\nfrom . import rounding\n", ("formats", "element"))
    assert not violations("from paredown.formats.format import Format\nimport torch\nfrom . import cpu\n", ("codec", "packed"))
