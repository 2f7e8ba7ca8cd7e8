"""Hooks of the documentation site: the command-line reference is made from the application, pages of examples from the programs.

An example is a program in cells: a docstring with its title, and lines `# %% What comes next`. Each becomes a page with its output, which
is that of a run while the site is built, and a notebook.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
COMMANDS = "<!-- commands -->"  # replaced by the reference, on the page that has it
EXAMPLES = ("cnn", "segmentation", "vit", "gpt", "hugging_face", "sft", "diffusion", "format_study", "sweep")
CELL = "# %% "
KERNEL = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
Cell = tuple[str, str]  # heading, code


def on_page_markdown(markdown: str, **_: Any) -> str:
    """A page with the command-line reference in its place."""
    return markdown.replace(COMMANDS, "\n".join(reference())) if COMMANDS in markdown else markdown


def on_files(files: Any, config: Any) -> Any:
    """The files of the site with a page and a notebook for each example, which runs now."""
    from mkdocs.structure.files import File

    for name in EXAMPLES:
        files.append(File.generated(config, f"examples/{name}.md", content=page(name, printed(name))))
        files.append(File.generated(config, f"examples/{name}.ipynb", content=json.dumps(notebook(name), indent=1)))
    return files


def printed(name: str) -> str:
    """What an example prints, or the sentence with which it ends where a package is missing."""
    print(f"Running examples/{name}.py ...", flush=True)
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "COLUMNS": "100"}
    command = [sys.executable, "-W", "ignore", str(ROOT / "examples" / f"{name}.py")]
    with tempfile.TemporaryDirectory() as folder:
        ran = subprocess.run(command, cwd=folder, env=environment, capture_output=True, encoding="utf-8", check=False)
    if ran.returncode and not ran.stderr.startswith("Skipped: "):
        raise RuntimeError(f"examples/{name}.py ended with {ran.returncode}:\n{ran.stderr}")
    return ran.stdout or ran.stderr


def cells(name: str) -> tuple[str, str, list[Cell]]:
    """The title of an example, what it is about, and its cells; the first has no heading."""
    source = (ROOT / "examples" / f"{name}.py").read_text(encoding="utf-8")
    title, _, about = (ast.get_docstring(ast.parse(source)) or "").partition("\n\n")
    first, *others = source.partition('"""\n\n')[2].split(f"\n{CELL}")
    parts = (part.partition("\n") for part in others)
    return title.rstrip("."), about, [("", first.strip()), *((heading, code.strip()) for heading, _, code in parts)]


def page(name: str, output: str) -> str:
    """The page of an example: its text, its code and what it printed."""
    title, about, code = cells(name)
    parts = [f"# {title}\n\n{about}\n\n`examples/{name}.py` · [the same as a notebook]({name}.ipynb)"]
    parts += [f"{heading and f'{heading}:'}\n\n```python\n{text}\n```" for heading, text in code]
    return "\n\n".join([*parts, f"It prints, on a CPU:\n\n```text\n{output.rstrip()}\n```\n"])


def notebook(name: str) -> dict[str, Any]:
    """An example as a Jupyter notebook, without output."""
    title, about, code = cells(name)
    found = [_cell("markdown", f"# {title}\n\n{about}", 0)]
    for heading, text in code:
        found += [_cell("markdown", heading, len(found))] if heading else []
        found.append(_cell("code", text, len(found)) | {"execution_count": None, "outputs": []})
    return {"nbformat": 4, "nbformat_minor": 5, "metadata": KERNEL, "cells": found}


def _cell(kind: str, text: str, number: int) -> dict[str, Any]:
    return {"cell_type": kind, "id": f"cell-{number}", "metadata": {}, "source": text}


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
