"""The Python of the README and of all pages in docs/ runs, in order and in one namespace each, and prints what the text says.

Blocks of `sh` that begin with `paredown` run too, line by line between the others; `# exit 3` behind a command is its exit status.
Blocks of `console` have commands behind `$ ` and what they print, where `...` is anything. The README's doors run one by one.
A block behind `<!-- requires: paredown.name -->` runs where that name is public.
"""

from __future__ import annotations

import doctest
import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import paredown
from tests.support.processes import needs_gloo, run_on_two

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
TABLES = {
    "benchmarks.md",
    "compatibility.md",
    "examples/index.md",
    "glossary.md",
    "guarantees.md",
    "limits.md",
    "papers.md",
    "sizing.md",
}  # without code
HISTORY = {"decisions", "log.md"}
PAGES = sorted(path.relative_to(ROOT / "docs") for path in (ROOT / "docs").glob("**/*.md"))
GUIDES = [f"docs/{page.as_posix()}" for page in PAGES if page.parts[0] not in HISTORY and page.as_posix() not in TABLES]
NEEDS = {
    "README.md": ("transformers",),  # reads a config.json
    "docs/sweeps.md": ("sqlalchemy",),
    "docs/how_to/hugging_face.md": ("transformers", "accelerate"),
    "docs/how_to/lightning.md": ("lightning",),
    "docs/how_to/load_packed.md": ("safetensors",),
    "docs/how_to/slurm.md": ("sqlalchemy",),
}
BLOCK = re.compile(r"(?:^<!-- requires: paredown\.(\w+) -->\n)?^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
COMMANDS = re.compile(r"^```sh\n(paredown .*?)^```$", re.MULTILINE | re.DOTALL)
CONSOLE = re.compile(r"^```console\n(.*?)^```$", re.MULTILINE | re.DOTALL)
DOOR = re.compile(r"^# (.*)\n((?:(?!#).*\n)+)", re.MULTILINE)
GIVEN = {
    "README.md": """
import torch; from torch import nn; import paredown as pare
model = nn.Sequential(*[part for _ in range(4) for part in (nn.Linear(256, 256), nn.GELU())], nn.Linear(256, 10))
x, y, loss_fn = torch.randn(65536, 256), torch.randint(10, (65536,)), nn.functional.cross_entropy
"""
}  # what a page leaves to its reader
CONFIG = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}  # gpt2/config.json: a model of 124M parameters
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


def run_console(code: str) -> str:
    """What a block of `$ commands` should have printed and printed instead."""
    from typer.testing import CliRunner

    from paredown.cli import app

    report = ""
    for part in code.split("$ ")[1:]:
        command, _, expected = part.partition("\n")
        printed = CliRunner().invoke(app, shlex.split(command)[1:], prog_name="paredown").stdout
        printed = "".join(f"{line.rstrip()}\n" for line in printed.splitlines())
        if not doctest.OutputChecker().check_output(expected, printed, doctest.ELLIPSIS):
            report += f"{command}\nExpected:\n{expected}\nGot:\n{printed}\n"
    return report


def failures(text: str, given: str = "") -> str:
    """What goes wrong when the blocks run: doctests where they have prompts, plain code elsewhere; `given` runs before them."""
    namespace: dict[str, Any] = {}
    exec(given, namespace)
    report: list[str] = []
    commands = dict(command_blocks(text))
    report += [run_console(block) for block in CONSOLE.findall(text)]
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
    if command_blocks(text) or CONSOLE.search(text):
        pytest.importorskip("typer")
    Path("gpt2").mkdir()
    Path("gpt2", "config.json").write_text(json.dumps(CONFIG))
    assert len(python_blocks(text)) >= 2 or name == "README.md"
    assert not failures(text, GIVEN.get(name, ""))


def test_the_readme_is_short_and_install_and_four_lines_come_first() -> None:
    lines = README.read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 120 and max(map(len, lines)) <= 110
    first = "\n".join(lines[:40])
    assert all(
        text in first for text in ("docs/pictures/report.png", "pip install", "trace_step(", "assign(", "apply(", ".compile()")
    )
    paragraphs = [
        part for part in README.read_text(encoding="utf-8").split("\n\n") if not re.match(r"```|\||<!-- (?!table caption)", part)
    ]
    assert not [
        part for part in paragraphs if len(re.findall(r"(?<![\w.-])\d[\d.]*", re.sub(r"`[^`]*`|\]\([^)]*\)", "", part))) > 4
    ]


def doors() -> dict[str, str]:
    """The ways into paredown that the README shows, by title."""
    (block,) = re.findall(r"^```py\n(.*?)^```$", README.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    return dict(DOOR.findall(block))


def things(**more: Any) -> dict[str, Any]:
    """What the code of a door is given: a network of one block, a batch and a plan."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 8))
    plan = paredown.Plan.preset("lpmm").set("activation", "int8/64@bf16")
    found = {"x": torch.randn(64, 128), "y": torch.randint(8, (64,)), "loss_fn": nn.functional.cross_entropy}
    return {"pare": paredown, "model": model, "plan": plan, **found, **more}


def trainer_things() -> dict[str, Any]:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    config = transformers.GPT2Config(vocab_size=64, n_positions=16, n_embd=64, n_layer=1, n_head=2, use_cache=False)
    rows = [{"input_ids": row, "labels": row} for row in torch.randint(64, (8, 16))]
    args = transformers.TrainingArguments("out", max_steps=1, report_to=[], use_cpu=True, disable_tqdm=True, save_strategy="no")
    return things(trainer=transformers.Trainer(model=transformers.GPT2LMHeadModel(config), args=args, train_dataset=rows))


def lightning_things() -> dict[str, Any]:
    lightning = pytest.importorskip("lightning")

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = things()["model"]

        def training_step(self, batch: list[Tensor], index: int) -> Tensor:
            return self.net(batch[0]).square().mean()

        def configure_optimizers(self) -> Any:
            return paredown.optim.AdamW(self.parameters(), lr=1e-3)

    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(64, 128)), batch_size=64)
    return things(lightning=lightning, module=Module(), data=data)


def walk_through(title: str, namespace: dict[str, Any]) -> paredown.Session:
    """The session that the code of a door makes."""
    exec(compile(doors()[title], title, "exec"), namespace)
    callback = next(iter(getattr(namespace.get("trainer"), "callbacks", ())), None)
    return namespace.get("session") or (namespace.get("attached") or callback).session


@pytest.mark.filterwarnings("ignore")  # the libraries' own
@pytest.mark.parametrize(
    ("title", "given"),
    [("Your own loop", things), ("Hugging Face Trainer and TRL", trainer_things), ("Lightning", lightning_things)],
)
def test_a_door_opens(title: str, given: Callable[[], dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with walk_through(title, given()) as session:
        assert session.forwards == 1 and session.weight_bytes


def sharded(rank: int, folder: Path) -> bool:
    """Whether a rank's session packs weights, after a step."""
    from torch.distributed.fsdp import fully_shard

    found = things(fully_shard=fully_shard)
    session = walk_through("FSDP2", found)
    found["loss_fn"](found["model"](found["x"]), found["y"]).backward()
    found["optimizer"].step()
    return session.weight_bytes > 0


@needs_gloo
def test_the_door_of_fsdp2_opens(tmp_path: Path) -> None:
    assert run_on_two(sharded, tmp_path) == [True, True]
    assert len(doors()) == 4


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
    assert "Expected" in failures("```console\n$ paredown formats int8\nnothing of the kind\n```\n")
    assert not failures("```console\n$ paredown formats int8\n...int8...\n```\n")
    assert "exit 2" in failures("```sh\nparedown formats\nparedown unheard\n```\n")
    assert not failures("```sh\nparedown formats int8\nparedown unheard of   # exit 2: said\n```\n```sh\nmake all\n```\n")
