"""The hook of the documentation site: every command is in the reference."""

from __future__ import annotations

import importlib.util
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
