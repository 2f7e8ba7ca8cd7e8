"""Every verb: help with an example that could be typed, --json, and nothing heavy imported before it is needed."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("typer")

import typer

from paredown.cli import app
from paredown.cli.application import Exit
from tests.cli.commands import CONTROL, ROOT, ask, environment

VERBS = {
    *(
        "env",
        "calibrate",
        "formats",
        "estimate",
        "explain",
        "plan",
        "pick",
        "train",
        "worker",
        "report",
        "serve",
        "demo",
    ),
    *(f"sweep {name}" for name in ("run", "status", "export", "merge")),
}


def commands(group: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """(words, command) of every verb under a group."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, (*path, name))
        else:
            yield " ".join((*path, name)), command


FOUND = dict(commands(typer.main.get_command(app)))


def flags(command: Any) -> dict[str, Any]:
    """The flags of a command by spelling."""
    return {flag: option for option in command.params for flag in (*option.opts, *option.secondary_opts) if flag.startswith("-")}


def test_the_verbs_are_those_of_the_pipeline() -> None:
    assert set(FOUND) == VERBS


@pytest.mark.parametrize("name", sorted(VERBS))
def test_a_verb_has_help_with_examples_and_json(name: str) -> None:
    status, out, _ = ask(*name.split(), "--help")
    text = CONTROL.sub("", out)
    assert status == 0 and "Example" in text and "--json" in text
    assert re.search(rf"^ +paredown {name}\b", text, re.MULTILINE), "an example begins with the command"


@pytest.mark.parametrize("name", sorted(VERBS))
def test_an_option_stands_once_in_a_verb(name: str) -> None:
    """Also where a request has the fields of another dataclass."""
    options = FOUND[name].params
    texts = [text for option in options for text in (*option.opts, *option.secondary_opts)]
    assert len(set(texts)) == len(texts) and len({option.name for option in options}) == len(options)


@pytest.mark.parametrize("name", sorted(VERBS))
def test_the_examples_could_be_typed(name: str) -> None:
    """Each is a command line that the parser takes: known flags, values where they belong."""
    command = FOUND[name]
    head, *examples = command.epilog.split("\n\n")
    assert head in ("Example:", "Examples:") and examples
    for example in examples:
        words = shlex.split(example)
        assert words[: 1 + len(name.split())] == ["paredown", *name.split()]
        assert len(example) <= 78, "a line of a terminal"
        command.make_context("paredown", words[1 + len(name.split()) :], resilient_parsing=False)


def test_help_imports_nothing_heavy() -> None:
    code = """
import sys
from typer.testing import CliRunner
from paredown.cli import app
for words in ([], ["estimate"], ["sweep", "run"], ["demo"]):
    assert CliRunner().invoke(app, [*words, "--help"]).exit_code == 0
heavy = {"torch", "numpy", "scipy", "sqlalchemy", "transformers", "paredown.plan.plan", "paredown.study.report.record"}
print(sorted(heavy & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "[]", done.stderr


def test_the_exit_statuses_are_those_of_the_guide() -> None:
    guide = (ROOT / "docs" / "cli.md").read_text()
    told = {int(number) for number in re.findall(r"^\| (\d+) \|", guide, re.MULTILINE)}
    assert told == {int(status) for status in Exit}


def test_the_version_is_told() -> None:
    status, out, _ = ask("--version")
    assert status == 0 and re.fullmatch(r"paredown \d+\.\d+\.\d+\n", out)
    done = subprocess.run([sys.executable, "-m", "paredown", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == out


@pytest.mark.parametrize(
    "words", [("estimat", "digits"), ("estimate",), ("plan", "digits"), ("formats", "--shape"), ("estimate", "digits", "--unheard")]
)
def test_a_misspelled_command_line_is_exit_2(words: tuple[str, ...]) -> None:
    assert ask(*words)[0] == Exit.USAGE


@pytest.mark.parametrize(
    ("typed", "wanted"),
    [
        ("paredown es", {"estimate"}),
        ("paredown estimate resnet5", {"resnet50"}),
        ("paredown estimate digits --gpu h", {"h100", "h200"}),
        ("paredown estimate digits --plan activations8", {"activations8", "activations8f"}),
        ("paredown train digits --plan lpm", {"lpmm", "lpmm4"}),
        ("paredown pick dig", {"digits"}),
    ],
)
def test_the_shell_completes_names(typed: str, wanted: set[str]) -> None:
    words = {**environment(), "_PAREDOWN_COMPLETE": "complete_bash", "COMP_WORDS": typed, "COMP_CWORD": str(typed.count(" "))}
    code = "from paredown.cli import main; import sys; sys.argv = ['paredown']; main()"
    done = subprocess.run([sys.executable, "-c", code], env=words, capture_output=True, text=True, check=False)
    assert set(done.stdout.split()) == wanted, done.stderr


def test_completed_names_are_those_that_are_known() -> None:
    from paredown.cli.application import MODEL_NAMES, TASK_NAMES
    from paredown.models import MODELS
    from paredown.study.tasks.lookup import WITH_FILE, WITHOUT_FILE

    assert tuple(MODELS) == MODEL_NAMES
    assert (*WITHOUT_FILE, *(f"{name}:" for name in WITH_FILE)) == TASK_NAMES
