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


FACTS = json.loads((ROOT / "benchmarks/results/priors.json").read_text())
STORED, SIMULATED = FACTS["stored"], FACTS["simulated"]
PEOPLE = [100 * number for number in SIMULATED["wide_and_blind_superclasses"]["cifar100/14 sumlast18"]]
MIB = STORED["measured_minus_predicted_mib"]
NUM_WORSE = sum(13 - number for number in STORED["plans_within_noise_of_full"].values())


def _f(name: str, kind: str) -> str:
    return f"F = {FACTS[kind][name]['f']:.2f}, p = {FACTS[kind][name]['p']:.2f}"


def _share(plan: str) -> str:
    return _loss(STORED["lost_by_plan"][plan])


def _loss(part: dict[str, float]) -> str:
    return f"{100 * part['mean']:.1f} +- {100 * part['standard_error']:.1f} %"


@pytest.mark.parametrize(
    "words",
    [
        _share("uint2/64@bf16+bf16, lpmm"),
        _share("int4/64@bf16, full"),
        _share("unmodified, lpmm"),
        _f("effects_of_tiers", "stored"),
        _f("effects_of_activation_formats", "stored"),
        f"from {STORED['measured_over_predicted']['p0']:.2f} to {STORED['measured_over_predicted']['p100']:.2f}",
        f"{NUM_WORSE} of {13 * 25} are more than two standard deviations",
        f"from {-MIB['vit'][0]} less to {MIB['vit'][2]:.0f} more",
        f"{-MIB['gpt'][2]:.0f} to {-MIB['gpt'][0]:.0f} MiB less",
        f"to {MIB['cnn'][2]:.0f} MiB more",
        *(f"{_loss(SIMULATED['lost_by_low_format'][name])} for {name}" for name in ("e4m3", "e5m3")),
        _f("effects", "simulated"),
        _f("effects_from_4_exponent_bits", "simulated"),
        f"Low formats have {100 * SIMULATED['effects']['levels']:.0f} % of the variance",
        f"the first singular vector has {100 * SIMULATED['singular_shares'][0]:.0f} % of the energy",
        f"the 99\n  configurations are {SIMULATED['different_configurations']}",
        f"cifar100/14, the people: {PEOPLE[0]:.0f} to {PEOPLE[2]:.0f} %, {PEOPLE[1]:.0f} % on average",
        f"sampled, {100 * SIMULATED['sampled_share']:.0f} % of the pairs",
    ],
)
def test_the_guide_cites_them(words: str) -> None:
    assert words in (ROOT / "docs/priors.md").read_text()
