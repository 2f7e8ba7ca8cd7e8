"""The numbers and the picture that docs/priors.md cites are those of the shipped prior."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))

import bench_priors

ROOT = Path(__file__).parent.parent


def test_results_and_pictures_are_made_of_the_shipped_priors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PAREDOWN_PRIORS", str(tmp_path / "none"))
    monkeypatch.setattr(bench_priors, "RESULTS", tmp_path / "priors.json")
    monkeypatch.setattr(bench_priors, "PICTURES", tmp_path / "pictures")
    bench_priors.main()
    assert json.loads((tmp_path / "priors.json").read_text()) == json.loads((ROOT / "benchmarks/results/priors.json").read_text())
    for path in (tmp_path / "pictures").iterdir():
        assert path.read_text() == (ROOT / "docs" / "pictures" / path.name).read_text()
    assert "lost_by_plan" in capsys.readouterr().out


@pytest.mark.parametrize("word", ["as written", "uint2/64@bf16+bf16, lpmm"])
def test_the_guide_cites_them(word: str) -> None:
    facts = json.loads((ROOT / "benchmarks/results/priors.json").read_text())["stored"]
    text = (ROOT / "docs/priors.md").read_text()
    assert word in facts["lost_by_plan"]
    two = [100 * facts["lost_by_plan"][f"uint2/64@bf16+bf16, {tier}"]["mean"] for tier in ("full", "lpmm")]
    assert f"lose {two[0]:.1f} and {two[1]:.1f} %" in text
    assert f"F = {facts['effects_of_tiers']['f']:.2f}, p = {facts['effects_of_tiers']['p']:.2f}" in text
    assert f"measured over predicted is {facts['measured_over_predicted']['p50']:.1f}" in text
