"""The hooks of the documentation site: every command is in the reference, every example is a page and a notebook."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent


def load() -> ModuleType:
    """The file of hooks, as mkdocs loads it."""
    spec = importlib.util.spec_from_file_location("site_hooks", ROOT / ".ci" / "site.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


SITE = load()


def paths(command: Any, path: str) -> list[str]:
    """A command and all below it."""
    children = getattr(command, "commands", {}).items()
    return [path, *(found for name, child in children for found in paths(child, f"{path} {name}"))]


def test_every_command_and_option_is_in_the_reference() -> None:
    pytest.importorskip("typer")
    from typer.main import get_command

    from paredown.cli import app

    command = get_command(app)
    text = "\n".join(SITE.reference())
    headings = [line.lstrip("# ") for line in text.splitlines() if line.startswith("###")]
    assert headings == paths(command, "paredown")
    estimate = command.commands["estimate"]
    table = text[text.index("#### paredown estimate") : text.index("#### paredown plan")]
    for parameter in estimate.params:
        assert f"`{SITE.label(parameter)}`" in table
    assert "paredown estimate digits" in table  # its examples


def test_the_reference_takes_the_place_of_its_mark_alone() -> None:
    assert SITE.COMMANDS in (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    assert SITE.on_page_markdown("# A page") == "# A page"


def test_text_cannot_break_a_table() -> None:
    assert SITE.escape("a | b\n <c> *d* e_f") == "a \\| b \\<c> \\*d\\* e\\_f"


def test_a_row_says_what_is_required_and_what_is_the_default() -> None:
    option = {
        "param_type_name": "option",
        "secondary_opts": [],
        "is_flag": False,
        "metavar": "SIZE",
        "name": "budget",
        "multiple": False,
    }
    assert SITE.row(SimpleNamespace(opts=["--budget"], default=None, required=True, help="Bytes.", **option)) == (
        "| `--budget SIZE` | required | Bytes. |"
    )
    assert SITE.row(SimpleNamespace(opts=["--budget"], default="8GiB", required=False, help="Bytes.", **option)) == (
        "| `--budget SIZE` | `8GiB` | Bytes. |"
    )


def code_of(name: str) -> list[str]:
    """The lines of an example that are not blank."""
    return [line for line in (ROOT / "examples" / f"{name}.py").read_text(encoding="utf-8").splitlines() if line.strip()]


@pytest.mark.parametrize("name", SITE.EXAMPLES)
def test_the_cells_of_an_example_are_all_of_it(name: str) -> None:
    title, about, cells = SITE.cells(name)
    assert title and about and cells[0][0] == "" and all(heading for heading, _ in cells[1:])
    lines = [
        line for heading, code in cells for line in (*([f"# %% {heading}"] if heading else []), *code.splitlines()) if line.strip()
    ]
    assert code_of(name)[-len(lines) :] == lines
    assert len(code_of(name)) - len(lines) == len([line for line in [title, *about.splitlines(), '"""'] if line])


@pytest.mark.parametrize("name", SITE.EXAMPLES)
def test_an_example_is_a_page_and_a_notebook(name: str) -> None:
    page = SITE.page(name, "what it printed\n")
    assert page.startswith("# ") and f"({name}.ipynb)" in page and "```text\nwhat it printed\n```" in page
    notebook = json.loads(json.dumps(SITE.notebook(name)))
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert all(set(cell) == {"cell_type", "id", "metadata", "source", "execution_count", "outputs"} for cell in code)
    assert len({cell["id"] for cell in notebook["cells"]}) == len(notebook["cells"])
    assert re.findall(r"^```python\n(.*?)^```$", page, re.M | re.S) == [f"{cell['source']}\n" for cell in code]


def test_every_example_is_in_the_navigation_and_in_the_list() -> None:
    listed, navigation = ((ROOT / path).read_text(encoding="utf-8") for path in ("docs/examples/index.md", "mkdocs.yml"))
    for name in SITE.EXAMPLES:
        assert f"`{name}.py`" in listed and f": examples/{name}.md\n" in navigation


def test_an_example_that_fails_fails_the_site(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "examples").mkdir()
    for name, code in {
        "fails": "print(1 / 0)",
        "lacks": "import sys; sys.exit('Skipped: it needs more.')",
        "runs": "print(3)",
    }.items():
        (tmp_path / "examples" / f"{name}.py").write_text(code)
    monkeypatch.setattr(SITE, "ROOT", tmp_path)
    assert (SITE.printed("runs"), SITE.printed("lacks")) == ("3\n", "Skipped: it needs more.\n")
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        SITE.printed("fails")
