"""Imports point up the list of packages: what a layer may import is a row of ALLOWED, in order; a new folder needs a new row.

A module named in a string is an import too. Four files load modules by name: the lazy public surface (`__init__.py` of the package, and
`lazy.py` for those of its folders), the command line's application, which loads its verbs, and the look-up of tasks in modules of users.
Optional packages are imported where they are used, by ordinary imports.
"""

from __future__ import annotations

import ast
import collections
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

PACKAGE = Path(__file__).parent.parent / "src" / "paredown"
TORCH = frozenset({"torch", "numpy", "triton"})
MODULE = re.compile(r"paredown(\.\w+)+")  # a text that names a module
MOST_FILES = 15  # of a package, beside __init__.py
BY_NAME = (
    (),
    ("lazy",),
    ("cli", "application"),
    ("study", "tasks", "lookup"),
)  # modules that load others by name; (): the package itself
BASE = frozenset({"errors", "lazy", "roles", "sizes", "tables", "serial", "version"})
STEP = BASE | {"formats", "autograd", "plan"}
STORE = STEP | {"codec", "optim", "loss", "session"}
CORE = STORE | {"models", "simulate", "predict", "assignment", "check", "apply_plan"}
# layer: (layers of paredown, packages from elsewhere beside the standard library); rows stand below all that they import
ALLOWED: dict[str, tuple[frozenset[str], frozenset[str]]] = {
    "errors": (frozenset(), frozenset()),
    "lazy": (frozenset(), frozenset()),
    "roles": (frozenset(), frozenset()),
    "serial": (frozenset({"errors"}), frozenset()),
    "sizes": (frozenset({"errors", "serial"}), frozenset()),
    "tables": (frozenset(), frozenset()),
    "version": (frozenset(), frozenset()),
    "formats": (frozenset({"errors"}), frozenset()),
    "models": (frozenset(), frozenset({"torch"})),
    "codec": (frozenset({"errors", "formats"}), TORCH | {"numba"}),
    "autograd": (frozenset(), frozenset({"torch"})),
    "plan": (BASE | {"formats", "autograd"}, frozenset()),
    "optim": (BASE | {"formats", "codec"}, TORCH | {"numba"}),
    "loss": (BASE | {"codec", "autograd", "optim"}, TORCH),
    "session": (STEP | {"codec", "optim", "loss"}, frozenset({"torch"})),
    "predict": (STORE | {"models"}, frozenset({"torch"})),
    "simulate": (STEP | {"codec", "session", "predict"}, frozenset({"torch"})),
    "assignment": (STEP | {"predict"}, frozenset({"numpy"})),
    "check": (STORE | {"predict", "assignment"}, frozenset({"torch"})),
    "apply_plan": (STORE | {"simulate", "check"}, frozenset({"torch"})),
    "study/tasks": (CORE, frozenset({"torch", "numpy", "PIL"})),
    "study/sweeps": (CORE | {"study/tasks"}, frozenset({"torch", "numpy", "sqlalchemy", "ray", "pyarrow"})),
    "study/priors": (CORE | {"study/tasks", "study/sweeps"}, frozenset({"numpy"})),
    "study/pick": (CORE | {"study/tasks", "study/sweeps", "study/priors"}, frozenset({"torch", "numpy", "scipy"})),
    "study/papers": (STEP | {"simulate", "study/pick"}, frozenset({"numpy", "scipy"})),
    "study/report": (CORE | {"study/tasks", "study/sweeps", "study/pick"}, frozenset({"sqlalchemy"})),
    "study": (frozenset(), frozenset()),
    "integrations": (
        CORE | {"study/tasks", "study/pick"},
        frozenset({"torch", "transformers", "diffusers", "huggingface_hub", "lightning"}),
    ),
    "cli": (
        CORE | {"__init__", "study/tasks", "study/sweeps", "study/pick", "study/report", "integrations"},
        frozenset({"typer", "rich", "torch", "numpy", "safetensors"}),
    ),
    "__main__": (frozenset({"cli"}), frozenset()),
    "__init__": (CORE | {"study/tasks", "study/pick"}, frozenset()),
}
ABOVE_ALL = "__init__"  # the public surface, which the command line may use


def layer_of(parts: tuple[str, ...]) -> str:
    """The layer of a module inside the package: its folder, or its own name when it lies at the top; studies are layers of their own."""
    if parts[:1] == ("study",) and len(parts) > 1 and parts[1] != "__init__":
        return "/".join(parts[:2])
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
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and MODULE.fullmatch(node.value):
            yield node.lineno, node.value


def loads_by_name(tree: ast.AST) -> Iterator[int]:
    """Lines of calls of `import_module`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            yield node.lineno


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
    if inside not in BY_NAME:
        found += [f"{'/'.join(inside)}:{line}: a module is imported by name" for line in loads_by_name(ast.parse(source))]
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


def test_every_class_has_a_name_of_its_own() -> None:
    homes: dict[str, list[str]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes.setdefault(node.name, []).append(str(path.relative_to(PACKAGE)))
    assert "Plan" in homes and not {name: paths for name, paths in homes.items() if len(paths) > 1}


def private_names(tree: ast.AST) -> set[str]:
    """Private names that a module defines: functions, classes, constants, and what classes set on `self`."""
    found = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    found |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self"}
    found |= {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    return {name for name in found if name.startswith("_") and not name.startswith("__")}


def private_reads(tree: ast.AST) -> set[str]:
    """Private names that a module reads from other objects or imports from its package."""
    found = {
        node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and ast.unparse(node.value) not in ("self", "cls")
    }
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("paredown")]
    found |= {alias.name for node in imports for alias in node.names}
    return {name for name in found if name.startswith("_") and not name.startswith("__")}


def test_no_module_reads_private_names_of_another_package() -> None:
    of_others = {
        *dir(torch.Tensor),
        *vars(torch.nn.Module()),
        *dir(collections.namedtuple("Pair", "a b")),
    }  # ours may be called like them
    trees = {path.relative_to(PACKAGE): ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}
    homes: dict[str, set[str]] = {}
    for path, tree in trees.items():
        for name in private_names(tree) - of_others:
            homes.setdefault(name, set()).add(path.parts[0])
    found = [
        f"{path}: {name}"
        for path, tree in trees.items()
        for name in private_reads(tree)
        if path.parts[0] not in homes.get(name, path.parts)
    ]
    assert not found, found
    planted = ast.parse("from paredown.check.verify import _step\nsession._watch.stop()")
    assert private_reads(planted) == {"_step", "_watch"}


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
    assert violations("from paredown.plan.plan import Plan\n", ("autograd", "graph")), "what reads a live step knows no plan"
    assert violations("from paredown.predict.trace_step import trace_step\n", ("session", "session")), (
        "predictions imitate sessions"
    )
    assert violations("from paredown.simulate.peppp import peppp_plan\n", ("session", "session")), "apply alone knows both modes"
    assert violations("from paredown.study.tasks.task import Task\n", ("check", "verify")), "the core imports no study"
    assert violations("from paredown.study.papers.peppp_completion import complete\n", ("study", "pick", "pick"))


def test_the_checker_sees_modules_named_in_strings() -> None:
    assert violations('HEAD = "paredown.loss.output_head"\n', ("plan", "plan"))
    assert violations('import_module("paredown." + name)\n', ("plan", "plan"))
    assert violations("importlib.import_module(HEAD)\n", ("plan", "plan"))
    assert violations('import_module("ray")\n', ("study", "sweeps", "worker"))
    assert violations('import_module("paredown.cli.application")\n', ("cli", "__init__"))
    assert not violations('import_module(f"paredown.cli.{name}")\n', ("cli", "application"))


def test_the_checker_lets_the_rest_pass() -> None:
    assert not violations("import math\nfrom paredown.errors import FormatError\nfrom . import rounding\n", ("formats", "element"))
    assert not violations("from paredown.formats.format import Format\nimport torch\nfrom . import cpu\n", ("codec", "packed"))
    assert not violations("from paredown.simulate.simulated_session import SimulatedSession\n", ("apply_plan",))
