"""The annotated tree of CONTRIBUTING.md, made of the first lines of docstrings: `python .ci/tree.py` writes it anew."""

from __future__ import annotations

import ast
import re
import runpy
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "CONTRIBUTING.md"
TREE = re.compile(r"(?<=    src/paredown/\n).*?(?=    tests/)", re.DOTALL)
COLUMN, WIDTH = 42, 138  # where descriptions begin, and where lines end
LAYERS = list(runpy.run_path(str(ROOT / "tests" / "test_layers.py"))["ALLOWED"])  # packages are in this order
SHORTEST = 30  # letters of a description that is cut at a comma


def description(file: Path) -> str:
    """Return the first sentence of a module's docstring, or as many of its clauses as fit a line."""
    text = " ".join((ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or "").split("\n\n")[0].split())
    sentence = re.split(r"(?<=[^.])\. |\.$", text)[0]
    if len(sentence) <= WIDTH - COLUMN:
        return sentence
    ends = [m.start() for m in re.finditer("[,;:] ", sentence[: WIDTH - COLUMN]) if is_complete(sentence[: m.start()])]
    return sentence[: ends[-1]] if ends else f"{sentence[: WIDTH - COLUMN - 3].rsplit(' ', 1)[0]} ..."


def is_complete(text: str) -> bool:
    """Return whether a part of a sentence can stand alone: it has some length, and what it opens is closed."""
    return len(text) >= SHORTEST and text.count("(") == text.count(")") and text.count("`") % 2 == 0


def lines(folder: Path, indent: int) -> Iterator[str]:
    """Yield a line for each file of a package, then for each package in it and its files."""
    for file in sorted(folder.glob("[!_]*.py")):
        yield f"{' ' * indent}{file.name:{COLUMN - indent}}{description(file)}"
    for package in sorted(folder.glob("*/__init__.py"), key=place):
        yield f"{' ' * indent}{package.parent.name + '/':{COLUMN - indent}}{description(package)}"
        yield from lines(package.parent, indent + 2)


def place(package: Path) -> tuple[int, str]:
    """Return where a package stands among those of its folder: in the order of layers, then by name."""
    name = package.parent.relative_to(ROOT / "src" / "paredown").as_posix()
    return LAYERS.index(name) if name in LAYERS else len(LAYERS), name


def filled(page: str) -> str:
    """Return the page with the tree of the package as it is now."""
    return TREE.sub(lambda _: "".join(f"{line.rstrip()}\n" for line in lines(ROOT / "src" / "paredown", 6)), page)


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
