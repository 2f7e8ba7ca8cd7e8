"""The page on compatibility is that of tests and results: its tests are there and say what it says, its networks are those of the zoo."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.support.scripts import run_script
from tests.test_zoo import zoo

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "compatibility.md"
ROW = re.compile(r"^\| (.+?) \| (.+?) \| `(tests/[\w/]+\.py)(?:::(\w+))?` \| (.+) \|$", re.MULTILINE)


def wrong(page: str) -> list[str]:
    """Rows whose test is not there, failed, or says another thing."""
    found: list[str] = []
    for what, state, path, name, outcome in ROW.findall(page):
        source = (ROOT / path).read_text(encoding="utf-8") if (ROOT / path).is_file() else ""
        body = re.search(rf"^def {name}\(.*?(?=^\S|\Z)", source.partition("\n")[2], re.MULTILINE | re.DOTALL) if name else None
        if not source or (name and not body) or not (outcome == "passed" or outcome.startswith("skipped: ")):
            found.append(what)
        if "refused" in state and "raises" not in source:
            found.append(what)
        if "row" in state and not re.search("changes|reason", source):
            found.append(what)
    return found


def test_the_page_is_made_from_tests_and_results(tmp_path: Path) -> None:
    pytest.importorskip("typer")
    made = run_script(ROOT / "benchmarks" / "compatibility.py", cwd=tmp_path)
    assert made.status == 0, made.err
    assert made.out == PAGE.read_text(encoding="utf-8") + "\n", "python benchmarks/compatibility.py --write"


def test_rows_are_those_of_tests() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert len(ROW.findall(page)) >= 40 and not wrong(page)
    assert wrong("| a | works | `tests/test_zoo.py::test_nothing` | passed |") == ["a"]
    assert wrong("| a | works | `tests/test_nothing.py` | passed |\n| b | works | `tests/test_zoo.py` | failed |") == ["a", "b"]


def test_every_network_of_the_zoo_is_a_row() -> None:
    run = json.loads((ROOT / "benchmarks" / "results" / "compatibility.json").read_text())
    assert [row["network"] for row in run["networks"]] == list(zoo.ZOO), "python benchmarks/compatibility.py --run --write"
