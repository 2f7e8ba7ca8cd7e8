"""The sdist and the wheel: built by the backend of pyproject.toml without a network, complete, installed beside torch, and working.

As `python -m build` does, the wheel is built from the unpacked sdist: what the sdist lacks, the wheel lacks.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import tomllib
from email.message import Message
from email.parser import Parser
from importlib import metadata
from pathlib import Path
from zipfile import ZipFile

import pytest

import paredown

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
BUILD = "import sys; from hatchling.build import build_{kind}; print(build_{kind}(sys.argv[1]))"
# what each part of the package reads beside its own source: digits, the shipped priors, the parts of the page
SMOKE = """
import sys, tempfile
from importlib import metadata
from pathlib import Path
import torch
import paredown as pare
assert Path(pare.__file__).is_relative_to(sys.argv[1]), pare.__file__
assert pare.__version__ == metadata.version("paredown"), metadata.version("paredown")
x = torch.randn(8, 64)
assert pare.encode(x, "int4/64@bf16").nbytes == 8 * 34
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4))
trace = pare.trace_step(model, (x, torch.zeros(8, dtype=torch.long)), loss=torch.nn.functional.cross_entropy, device="cuda")
assert pare.footprint(trace, pare.Plan.preset("activations8")).peak_bytes > 0
trial = pare.evaluate("digits#model=mlp,steps=2", pare.Plan(), seed=0, device="cpu")
assert trial.status.value == "done", trial
from paredown.study import priors
assert priors.load("stored") and priors.load("simulated")
page = Path(tempfile.mkdtemp()) / "page.html"
from paredown.study.report import Record, write
write(Record(title="smoke"), page)
assert "</html>" in page.read_text()
print("works")
"""


def skip_without(package: str) -> None:
    """A counted skip where a package is missing. pip is not even looked for as a module: setuptools then lets the distutils of the standard
    library in, and Inductor fails later in this process.
    """
    try:
        metadata.distribution(package)
    except metadata.PackageNotFoundError:
        pytest.skip(f"{package} is not installed")


def run(*command: str, cwd: Path, **environment: str) -> str:
    """The output of a command of this Python."""
    env = {**os.environ, **environment}
    done = subprocess.run((sys.executable, *command), cwd=cwd, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip()


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(sdist, wheel)."""
    skip_without("hatchling")
    dist, unpacked = tmp_path_factory.mktemp("dist"), tmp_path_factory.mktemp("unpacked")
    sdist = dist / run("-c", BUILD.format(kind="sdist"), str(dist), cwd=ROOT).splitlines()[-1]
    with tarfile.open(sdist) as archive:
        archive.extractall(unpacked, filter="data")
    (tree,) = unpacked.iterdir()
    wheel = dist / run("-c", BUILD.format(kind="wheel"), str(dist), cwd=tree).splitlines()[-1]
    return sdist, wheel


def files_of(folder: str) -> set[str]:
    """The files of a folder of the repository that belong to it, without caches."""
    paths = (path for path in (ROOT / folder).rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {path.relative_to(ROOT).as_posix() for path in paths if path.suffix != ".pyc"}


def metadata_of(wheel: Path) -> Message:
    with ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        return Parser().parsestr(archive.read(name).decode())


def test_the_sdist_has_all_that_the_tests_need(built: tuple[Path, Path]) -> None:
    with tarfile.open(built[0]) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    expected = files_of("src") | files_of("tests") | files_of("docs") | files_of(".ci") | files_of("examples")
    assert not expected - held
    assert {"pyproject.toml", "conftest.py", "README.md", "LICENSE", "constraints.txt", "Makefile"} <= held


def test_the_wheel_has_the_package_and_nothing_else(built: tuple[Path, Path]) -> None:
    with ZipFile(built[1]) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
        others = {name.partition(".dist-info/")[2] for name in archive.namelist() if ".dist-info/" in name}
    assert held == {name.removeprefix("src/") for name in files_of("src/paredown")}
    assert {"METADATA", "RECORD", "entry_points.txt", "licenses/LICENSE"} <= others


def test_metadata_is_complete(built: tuple[Path, Path]) -> None:
    found = metadata_of(built[1])
    assert (found["Name"], found["Version"], found["License-Expression"]) == ("paredown", paredown.__version__, "Apache-2.0")
    assert found["Requires-Python"] == PROJECT["requires-python"] and found["Description-Content-Type"] == "text/markdown"
    assert len(found["Summary"]) > 20 and "# paredown" in str(found.get_payload())
    urls = [url.rpartition(", ")[2] for url in found.get_all("Project-URL", [])]
    assert urls and all(url.startswith("https://") for url in urls)
    from trove_classifiers import classifiers

    mine = found.get_all("Classifier", [])
    assert len(mine) >= 8 and set(mine) <= set(classifiers)
    assert not any(name.startswith("License ::") for name in mine), "the license is an expression"
    extras = set(found.get_all("Provides-Extra", []))
    assert extras == set(PROJECT["optional-dependencies"])


def test_the_version_has_one_place() -> None:
    assert "version" not in PROJECT and PROJECT["dynamic"] == ["version"]
    assert re.fullmatch(r"[0-9]+\.[0-9]+\.[0-9]+((a|b|rc)[0-9]+)?", paredown.__version__)
    stated = re.compile(rf"(?i)\bversion\W{{1,4}}{re.escape(paredown.__version__)}\b")
    assert stated.search(f"Version {paredown.__version__}.") and stated.search(f"version: {paredown.__version__}\n")
    files = [ROOT / name for name in ("pyproject.toml", "CITATION.cff", "README.md", "mkdocs.yml", "Makefile")]
    assert not [path.name for path in files if stated.search(path.read_text(encoding="utf-8"))]


def test_the_installed_wheel_works(built: tuple[Path, Path], tmp_path: Path) -> None:
    skip_without("pip")
    target = tmp_path / "site"
    options = ("--no-deps", "--no-index", "--no-compile", "--quiet", "--disable-pip-version-check", "--target", str(target))
    run("-m", "pip", "install", *options, str(built[1]), cwd=tmp_path)
    paths = {"PYTHONPATH": str(target), "OMP_NUM_THREADS": "1"}
    assert run("-W", "ignore", "-c", SMOKE, str(target), cwd=tmp_path, **paths).splitlines()[-1] == "works"
    skip_without("typer")
    assert run("-m", "paredown", "--version", cwd=tmp_path, **paths) == f"paredown {paredown.__version__}"
