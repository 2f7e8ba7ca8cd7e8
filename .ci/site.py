"""A hook of the documentation site: the command-line reference is made from the application."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
COMMANDS = "<!-- commands -->"  # replaced by the reference, on the page that has it


def on_page_markdown(markdown: str, **_: Any) -> str:
    """A page with the command-line reference in its place."""
    return markdown.replace(COMMANDS, "\n".join(reference())) if COMMANDS in markdown else markdown


def reference() -> Iterator[str]:
    """Markdown of every command of the application: usage, help, a table of its parameters, examples."""
    sys.path.insert(0, str(ROOT / "src"))  # this checkout, whatever is installed
    from typer.main import get_command

    from paredown.cli import app

    yield from describe("paredown", get_command(app), level=3)


def describe(path: str, command: Any, level: int) -> Iterator[str]:
    """Markdown of a command and of those below it."""
    commands = getattr(command, "commands", {})
    yield f"{'#' * level} {path}\n"
    yield f"{escape(command.help or '')}\n"
    parameters = [parameter for parameter in command.params if not getattr(parameter, "hidden", False)]
    arguments = "".join(f" {label(parameter)}" for parameter in parameters if parameter.param_type_name == "argument")
    yield f"```text\n{path} [OPTIONS]{arguments}{' COMMAND' if commands else ''}\n```\n"
    if parameters:
        yield "| parameter | default | meaning |\n|---|---|---|"
        yield from (row(parameter) for parameter in parameters)
        yield ""
    examples = [line.strip() for line in (command.epilog or "").splitlines() if line.strip().startswith("paredown ")]
    if examples and level > 3:
        yield "```sh\n" + "\n".join(examples) + "\n```\n"
    for name, child in commands.items():
        if not getattr(child, "hidden", False):
            yield from describe(f"{path} {name}", child, level + 1)


def label(parameter: Any) -> str:
    """How a parameter is written: `--budget SIZE`, `TASK`, `--json`."""
    if parameter.param_type_name == "argument":
        return parameter.metavar or parameter.name.upper()
    names = ", ".join([*parameter.opts, *parameter.secondary_opts])
    return names if parameter.is_flag else f"{names} {parameter.metavar or parameter.name.upper()}"


def row(parameter: Any) -> str:
    """A row of a command's table."""
    default = parameter.default
    shown = "required" if parameter.required else "" if default in (None, False, (), []) or callable(default) else f"`{default}`"
    repeats = " Can be repeated." if parameter.multiple and "repeated" not in (parameter.help or "") else ""
    return f"| `{label(parameter)}` | {shown} | {escape(parameter.help or '')}{repeats} |"


def escape(text: str) -> str:
    """Text for one line of Markdown: no bars, tags or emphasis of its own."""
    for mark in ("\\", "|", "<", "*", "_"):
        text = text.replace(mark, "\\" + mark)
    return " ".join(text.split())
