"""The Python of the README and of all pages in docs/ runs, in order and in one namespace each, and prints what the text says.

Blocks of `sh` that begin with `paredown` run too, line by line between the others; `# exit 3` behind a command is its exit status.
A block behind `<!-- requires: paredown.name -->` runs where that name is public.
"""

from __future__ import annotations

import doctest
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

import paredown

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
TABLES = {"benchmarks.md", "glossary.md", "guarantees.md", "limits.md", "papers.md"}  # pages without code: tests/test_tables.py
HISTORY = {"decisions", "log.md"}
PAGES = sorted(path.relative_to(ROOT / "docs") for path in (ROOT / "docs").glob("**/*.md"))
GUIDES = [f"docs/{page.as_posix()}" for page in PAGES if page.parts[0] not in HISTORY and page.name not in TABLES]
NEEDS = {
    "docs/sweeps.md": ("sqlalchemy",),
    "docs/how_to/hugging_face.md": ("transformers", "accelerate"),
    "docs/how_to/lightning.md": ("lightning",),
    "docs/how_to/slurm.md": ("sqlalchemy",),
}
BLOCK = re.compile(r"(?:^<!-- requires: paredown\.(\w+) -->\n)?^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
COMMANDS = re.compile(r"^```sh\n(paredown .*?)^```$", re.MULTILINE | re.DOTALL)
ENTRY = re.compile(r"^::: paredown\.([\w.]+)$", re.MULTILINE)
STATUS = re.compile(r"# exit (\d+)")


def python_blocks(text: str) -> list[tuple[int, str]]:
    """(line of its first statement, code) of every Python block that can run here."""
    return [
        (text.count("\n", 0, match.start(2)) + 1, match[2])
        for match in BLOCK.finditer(text)
        if not match[1] or match[1] in paredown.__all__
    ]


def command_blocks(text: str) -> list[tuple[int, str]]:
    """(line of its first command, commands) of every block that begins with `paredown`."""
    return [(text.count("\n", 0, match.start(1)) + 1, match[1]) for match in COMMANDS.finditer(text)]


def run_commands(code: str) -> str:
    """What goes wrong when the commands run, each of them a line."""
    from typer.testing import CliRunner

    from paredown.cli import app

    report = ""
    for line in code.splitlines():
        wanted = int(status[1]) if (status := STATUS.search(line)) else 0
        found = CliRunner().invoke(app, shlex.split(line.partition(" #")[0])[1:], prog_name="paredown")
        report += f"{line}: exit {found.exit_code}\n{found.output}\n" if found.exit_code != wanted else ""
    return report


def failures(text: str) -> str:
    """What goes wrong when the blocks run: doctests where they have prompts, plain code elsewhere."""
    namespace: dict[str, Any] = {}
    report: list[str] = []
    commands = dict(command_blocks(text))
    for line, code in sorted([*python_blocks(text), *commands.items()]):
        if line in commands:
            report.append(run_commands(code))
            continue
        if ">>>" not in code:
            exec(compile(code, f"README.md:{line}", "exec"), namespace)
            continue
        test = doctest.DocTestParser().get_doctest(code, namespace, "README", "README.md", line - 1)
        runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS, verbose=False)
        runner.run(test, out=report.append, clear_globs=False)
        namespace = test.globs
    return "".join(report)


@pytest.mark.parametrize("name", ["README.md", *GUIDES])
def test_what_is_written_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # examples write files
    for package in NEEDS.get(name, ()):
        pytest.importorskip(package)
    text = (ROOT / name).read_text(encoding="utf-8")
    if command_blocks(text):
        pytest.importorskip("typer")
    assert len(python_blocks(text)) >= 2
    assert not failures(text)


def undocumented(names: set[str], pages: dict[str, str]) -> set[str]:
    """Names without an entry, or whose page has no example that uses them."""
    found = set(names)
    for text in pages.values():
        code = "".join(block for _, block in python_blocks(text))
        for entry in ENTRY.findall(text):
            found -= {name for name in (entry.removeprefix("optim."), entry) if re.search(rf"\b{name}\b", code)}
    return found


def test_every_public_name_has_an_entry_with_an_example() -> None:
    pages = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "docs" / "reference").glob("*.md")}
    errors = {name for name in paredown.__all__ if name.endswith("Error")}  # one entry for their module, on a page of their own
    names = set(paredown.__all__) - errors - {"__version__", "optim", "CATALOG"} | set(paredown.optim.__all__)
    assert not undocumented(names, pages)
    assert "::: paredown.errors" in pages["errors.md"] and "CATALOG" in pages["formats.md"]


def test_a_name_without_an_entry_or_an_example_is_noticed() -> None:
    pages = {"one.md": "```python\n>>> made = pare.first()\n```\n\n::: paredown.first\n\n::: paredown.second\n"}
    assert undocumented({"first", "second", "third"}, pages) == {"second", "third"}


def test_a_wrong_readme_is_noticed() -> None:
    assert "Expected" in failures("```python\n>>> 1 + 1\n3\n```\n")
    assert not failures("```python\n>>> x = 1\n```\ntext\n```python\n>>> x + 1\n2\n```\n")
    assert not failures("<!-- requires: paredown.unheard -->\n```python\n>>> 1 + 1\n3\n```\n")
    assert "Expected" in failures("<!-- requires: paredown.encode -->\n```python\n>>> 1 + 1\n3\n```\n")
    with pytest.raises(ZeroDivisionError):
        failures("```python\n1 / 0\n```\n")
    pytest.importorskip("typer")
    assert "exit 2" in failures("```sh\nparedown formats\nparedown unheard\n```\n")
    assert not failures("```sh\nparedown formats int8\nparedown unheard of   # exit 2: said\n```\n```sh\nmake all\n```\n")
