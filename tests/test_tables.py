"""Pages of tables name files and tests that are there, and benchmarks have the numbers of their results."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

from benchmarks import claims
from benchmarks.tables import MARKS, README_TABLES, SIZE_TABLES, TABLES, filled

ROOT = Path(__file__).parent.parent
PAGES = ("benchmarks", "guarantees", "limits", "papers")
NAMED = re.compile(r"`((?:src|tests|docs|benchmarks|examples)/[\w/.-]+)(?:::(\w+))?`")


def wrong(text: str) -> list[str]:
    """Files and tests that a text names and that are not there."""
    found: list[str] = []
    for path, test in NAMED.findall(text):
        file = ROOT / path
        if not file.exists() or (test and not re.search(rf"^def {test}\(", file.read_text(), re.MULTILINE)):
            found.append(f"{path}::{test}" if test else path)
    return found


@pytest.mark.parametrize("name", PAGES)
def test_what_a_page_names_is_there(name: str) -> None:
    text = (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")
    assert name == "limits" or len(NAMED.findall(text)) >= 8
    assert not wrong(text)


def test_guides_the_readme_and_contributing_name_what_is_there() -> None:
    guides = [path for path in (ROOT / "docs").glob("**/*.md") if path.parent.name != "decisions" and path.name != "log.md"]
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *guides]
    assert not [(page.name, name) for page in pages for name in wrong(page.read_text(encoding="utf-8"))]


def test_decisions_that_pages_name_are_there() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("**/*.md")]
    named = {
        (page.name, name) for page in pages for name in re.findall(r"decisions/(\d[\w-]+\.md)", page.read_text(encoding="utf-8"))
    }
    assert named and not [pair for pair in sorted(named) if not (ROOT / "docs" / "decisions" / pair[1]).exists()]


@pytest.mark.parametrize(
    ("name", "tables"),
    [
        ("docs/benchmarks.md", TABLES),
        ("README.md", README_TABLES),
        ("docs/sizing.md", SIZE_TABLES),
    ],
)
def test_benchmarks_are_those_of_the_results(name: str, tables: dict[str, object]) -> None:
    page = (ROOT / name).read_text(encoding="utf-8")
    assert {mark[2] for mark in MARKS.finditer(page)} == set(tables)
    assert filled(page) == page, "python benchmarks/tables.py --write"


def test_the_tree_is_that_of_the_package() -> None:
    made, page = runpy.run_path(str(ROOT / ".ci" / "tree.py"))["filled"], (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert made(page) == page, "python .ci/tree.py"
    assert made(page.replace("graph_editor.py    ", "editor.py    ")) == page


def test_a_wrong_page_is_noticed() -> None:
    assert wrong(
        "`src/paredown/nothing.py`, `tests/test_tables.py::test_nothing`, `tests/test_tables.py::test_a_wrong_page_is_noticed`"
    ) == [
        "src/paredown/nothing.py",
        "tests/test_tables.py::test_nothing",
    ]
    page = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    assert filled(page.replace("| gpt2 |", "| gpt3 |")) == page


def test_claims_of_the_papers_have_the_verdicts_of_the_results() -> None:
    page = claims.PAGE.read_text(encoding="utf-8")
    assert claims.MARKS.search(page) and claims.filled(page) == page


def test_a_difference_is_that_of_the_same_seeds() -> None:
    rows = [{"way": way, "seed": seed, "value": value, "task": "t"}
            for way, values in (("fp32", (0.5, 0.7, 0.1)), ("low", (0.4, 0.7))) for seed, value in enumerate(values)]  # fmt: skip
    found = claims.difference(rows, "low", task="t")
    assert (found.num, found.mean, found.error) == (2, pytest.approx(-0.05), pytest.approx(0.05)) and found.is_noise


def test_where_nothing_was_promoted_both_ways_are_runs_of_one() -> None:
    """By hand: (0.4 + 0.6) / 2 - 0.5 and (0.2 + 0.6) / 2 - 0.5; where tensors were promoted, the way of least memory counts."""
    runs = {"fp32": (0.5, 0.5), "r0.3": (0.4, 0.2), "r0.3-fixed": (0.6, 0.6), "r1.0": (0.5, 0.4)}
    memory = {"fp32": 8.0, "r0.3": 4.0, "r0.3-fixed": 4.0, "r1.0": 2.0}
    rows: list[dict[str, object]] = [
        {"way": way, "seed": seed, "value": value, "memory": memory[way], "num_promoted": 0}
        for way, values in runs.items()
        for seed, value in enumerate(values)
    ]
    saving, found, num = claims.at_equal_accuracy(rows)
    assert (saving, found.mean, num) == (2.0, pytest.approx(-0.05), 0.0)
    promoted = [{**row, "num_promoted": 3} if row["way"] == "r1.0" else row for row in rows]
    saving, found, num = claims.at_equal_accuracy(promoted)
    assert (saving, found.mean, num) == (4.0, pytest.approx(-0.05), 3.0)
