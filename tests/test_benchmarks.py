"""The scripts of benchmarks/ run: each is imported, those with options print their help, and two take their steps at a small size."""

from __future__ import annotations

import json
import os
from importlib import import_module
from pathlib import Path

import pytest

from tests.support.scripts import ROOT, run_script

FOLDER = ROOT / "benchmarks"
SCRIPTS = sorted(FOLDER.glob("*.py"))
DATA = os.environ.get("PAREDOWN_DATA", "")
needs_data = pytest.mark.skipif(not DATA or not Path(DATA).exists(), reason="PAREDOWN_DATA names no folder")


def has_options(path: Path) -> bool:
    """Whether the script is run with arguments."""
    text = path.read_text(encoding="utf-8")
    return "__main__" in text and "ArgumentParser(" in text


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_is_imported_and_prints_its_help(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    try:
        import_module(path.stem)
    except ModuleNotFoundError as error:
        pytest.skip(f"{error.name} is not installed")
    if has_options(path):
        ran = run_script(path, "--help", cwd=tmp_path)
        assert ran.status == 0 and "usage:" in ran.out, ran.err


@needs_data
def test_gradients_of_assignments_are_measured(tmp_path: Path) -> None:
    options = ("--quick", "--gradients", "--task", "gpt", "--seeds", "0", "--way", "full", "int8/uint2 25%", "--out", str(tmp_path))
    ran = run_script(FOLDER / "bench_assign.py", *options, cwd=tmp_path)
    assert ran.status == 0 and (tmp_path / "assign_gradients.json").is_file(), ran.err


@pytest.mark.full
def test_step_times_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAREDOWN_CACHE", str(tmp_path / "cache"))  # not the folder that other tests expect to be empty
    options = ("--quick", "--model", "graph", "--traces", str(tmp_path / "traces"), "--commit", "x", "--out", str(tmp_path))
    ran = run_script(FOLDER / "bench_time.py", *options, cwd=tmp_path)
    assert ran.status == 0 and (tmp_path / "time.json").is_file(), ran.err


def test_lora_of_diffusion_transformers_is_measured_and_predicted(tmp_path: Path) -> None:
    for package in ("diffusers", "peft"):
        pytest.importorskip(package, reason=f"{package} is not installed")
    for words, file in (((), "diffusion.json"), (("predict",), "diffusion_predictions.json")):
        ran = run_script(FOLDER / "bench_diffusion.py", *words, "--quick", "--model", "sd3", "--out", str(tmp_path), cwd=tmp_path)
        assert ran.status == 0 and (tmp_path / file).is_file(), ran.err
    rows = json.loads((tmp_path / "diffusion.json").read_text())[-1]["rows"]
    assert [row["way"] for row in rows if row["error"]] == [] and sum(row["median_seconds"] is not None for row in rows) == 4
