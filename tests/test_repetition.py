"""Nothing is written twice: no six lines of code occur in two places of src, benchmarks or examples.

Lines are compared without indentation. Blank lines, comments, imports, lines without a letter and the signatures of functions do
not count: two public functions may take the same arguments, spelled out in both.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).parent.parent
FOLDERS = ("src", "benchmarks", "examples")
WINDOW = 6
TRIVIAL = {"else:", "try:", "finally:", "pass", "return", "continue", "break"}

Place = tuple[str, int]  # file, line


def skipped_lines(tree: ast.AST) -> set[int]:
    """Lines of imports, and of signatures from `def` to the body."""
    skipped: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            skipped.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            skipped.update(range(node.lineno, node.body[0].lineno))
    return skipped


def counted_lines(source: str) -> list[tuple[int, str]]:
    """(line number, text without indentation) of the lines that count."""
    skipped = skipped_lines(ast.parse(source))
    lines = ((number, " ".join(line.split())) for number, line in enumerate(source.splitlines(), 1) if number not in skipped)
    return [(number, line) for number, line in lines if counts(line)]


def counts(line: str) -> bool:
    """Whether a line says anything of its own."""
    return not line.startswith("#") and line not in TRIVIAL and any(letter.isalpha() for letter in line)


def repetitions(sources: Mapping[str, str]) -> list[tuple[Place, Place]]:
    """Pairs of places where the same WINDOW lines start, first pairs only of a longer repetition."""
    places: dict[tuple[str, ...], list[tuple[str, int, int]]] = defaultdict(list)
    for name, source in sources.items():
        lines = counted_lines(source)
        for start in range(len(lines) - WINDOW + 1):
            places[tuple(line for _, line in lines[start : start + WINDOW])].append((name, start, lines[start][0]))
    pairs = {pair for found in places.values() for pair in _apart(found)}
    longer = {((a, i + 1), (b, j + 1)) for (a, i, _), (b, j, _) in pairs}
    return sorted(((a, line), (b, other)) for (a, i, line), (b, j, other) in pairs if ((a, i), (b, j)) not in longer)


def _apart(found: list[tuple[str, int, int]]) -> Iterator[tuple[tuple[str, int, int], tuple[str, int, int]]]:
    """Neighbouring occurrences of one window that do not overlap."""
    for a, b in pairwise(found):
        if a[0] != b[0] or b[1] - a[1] >= WINDOW:
            yield a, b


def test_nothing_is_written_twice() -> None:
    paths = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    found = repetitions({str(path.relative_to(ROOT)): path.read_text() for path in paths})
    assert not found, "\n".join(f"{a}:{line} is written again at {b}:{other}" for (a, line), (b, other) in found)


BODY = [f"    total_{k} = first_{k} + second_{k}" for k in range(8)]


def test_a_planted_repetition_is_found_once() -> None:
    one = "\n".join(["def one():", *BODY])
    other = "\n".join(["import math", "", "class Other:", "    def two(self):", *(f"    {line}" for line in BODY)])
    assert repetitions({"a.py": one, "b.py": other}) == [(("a.py", 2), ("b.py", 5))]
    assert repetitions({"a.py": one + "\n\n\n" + one.replace("one", "again")}) == [(("a.py", 2), ("a.py", 13))]


def test_five_lines_signatures_and_imports_may_repeat() -> None:
    short = "\n".join(["def one():", *BODY[:5]])
    assert not repetitions({"a.py": short, "b.py": short})
    signature = "\n".join(["def f(", *(f"    argument_{k}: int," for k in range(8)), ") -> None:", "    return None"])
    imports = "\n".join(["from math import (", *(f"    name_{k}," for k in range(8)), ")"])
    assert not repetitions({"a.py": signature, "b.py": signature})
    assert not repetitions({"a.py": imports, "b.py": imports})
