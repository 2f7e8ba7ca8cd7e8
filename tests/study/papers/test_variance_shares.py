"""What is noise and what is not: on PEPPP's released matrices as its specification says, and on constructions."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from paredown.errors import PlanError
from tests.study.papers.released import LEVELS, needs_matrices, released
from tests.support.scripts import ROOT

sys.path.append(str(ROOT / "benchmarks"))

from bench_priors import lost_share, split_variance


@needs_matrices
def test_peppps_optimizer_formats_have_no_effect_in_its_matrices() -> None:
    """Low formats 83 % of the variance within tasks, noise 16.7 %, all else 0.2 %; F = 1.095, p = 0.26; noise 0.039."""
    found = split_variance(released().errors, LEVELS)
    assert found.levels == pytest.approx(0.83, abs=0.005)
    assert found.rest == pytest.approx(0.167, abs=0.002) and found.plans == pytest.approx(0.002, abs=0.0005)
    assert found.f == pytest.approx(1.095, abs=0.001) and found.p == pytest.approx(0.26, abs=0.005)
    assert found.deviation == pytest.approx(0.039, abs=0.001)
    imagenet = split_variance(released().errors[-50:], LEVELS)
    assert imagenet.f == pytest.approx(1.19, abs=0.005) and imagenet.p == pytest.approx(0.11, abs=0.01)


def test_an_effect_that_is_there_is_found() -> None:
    """Within each of 3 levels 4 plans differ by 0.02, with noise 0.01 on 12 tasks: F is about 1 + 12 x 0.02^2 / 0.01^2."""
    source = np.random.default_rng(5)
    levels, apart = np.repeat([0, 1, 2], 4), np.tile([0.03, -0.01, -0.01, -0.01], 3)
    noise = 0.01 * source.standard_normal((12, 12))
    found = split_variance(0.3 * levels + apart + noise, levels)
    assert found.f > 20 and found.p < 1e-6
    assert split_variance(0.3 * levels + noise, levels).p > 0.01, "and one that is not there is not"
    assert found.levels + found.plans + found.rest == pytest.approx(1)


def test_by_chance_as_often_as_it_says() -> None:
    """Of 200 matrices of noise alone about a tenth have p below 0.1: 20, within five deviations (21)."""
    source = np.random.default_rng(6)
    found = [split_variance(source.standard_normal((5, 9)), np.repeat([0, 1, 2], 3)).p for _ in range(200)]
    assert abs(sum(p < 0.1 for p in found) - 20) < 5 * np.sqrt(200 * 0.1 * 0.9)


def test_what_cannot_be_compared() -> None:
    with pytest.raises(PlanError, match="have gaps"):
        split_variance(np.array([[0.1, np.nan], [0.1, 0.2]]), np.array([0, 0]))
    with pytest.raises(PlanError, match="leave nothing to compare"):
        split_variance(np.ones((3, 2)), np.array([0, 1]))


def test_the_share_that_is_lost() -> None:
    found = lost_share(np.array([[0.1, 0.5, 0.9]]), np.array([0.1]), np.array([0.9]))
    assert found == pytest.approx(np.array([[0.0, 0.5, 1.0]]))
