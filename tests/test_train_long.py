"""Long trainings of the benchmarks: pieces that continue from saved states, and verdicts over seeds."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture
def train_long(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script as a module; the modules that it imports are forgotten afterwards."""
    monkeypatch.syspath_prepend(str(FOLDER))
    before = set(sys.modules)
    import train_long  # type: ignore[import-not-found]

    yield train_long
    for name in set(sys.modules) - before:
        if (getattr(sys.modules[name], "__file__", None) or "").startswith(f"{FOLDER}/"):
            del sys.modules[name]


def training(train_long: Any, arm: str, folder: Path) -> Any:
    options = train_long.parsed(["--size", "quick", "--states", str(folder)])
    return train_long.training_of(options, train_long.SETTINGS["quick"], arm, 0, "cpu")


@pytest.mark.parametrize("arm", ["baseline", "lpmm+int4"])
def test_a_run_in_pieces_has_the_curve_of_a_run_in_one_piece(arm: str, train_long: Any, tmp_path: Path) -> None:
    corpus = train_long.Corpus.read(None, train_long.SETTINGS["quick"], "cpu")
    whole = training(train_long, arm, tmp_path / "whole").run(corpus)
    pieces = training(train_long, arm, tmp_path / "pieces")
    found, count = None, 0
    while found is None:  # each piece is over after one step
        found, count = pieces.run(corpus, -math.inf), count + 1
    assert count == whole["num_steps"] == 6
    assert found["curve"] == whole["curve"] and [point[0] for point in whole["curve"]] == [0, 2, 4, 6]


def test_a_killed_run_goes_on_from_its_last_state(train_long: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    corpus = train_long.Corpus.read(None, train_long.SETTINGS["quick"], "cpu")
    whole = training(train_long, "int4", tmp_path / "whole").run(corpus)
    kind = type(training(train_long, "int4", tmp_path))
    step, taken = kind._step, []

    def killed(self: Any, parts: Any, batch: Any, rate: float) -> Any:
        if len(taken) == 3:
            raise KeyboardInterrupt
        taken.append(rate)
        return step(self, parts, batch, rate)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(kind, "_step", killed)
        training(train_long, "int4", tmp_path).run(corpus)
    assert training(train_long, "int4", tmp_path).run(corpus)["curve"] == whole["curve"]


def test_arms_of_a_seed_see_the_same_batches(train_long: Any, tmp_path: Path) -> None:
    corpus = train_long.Corpus.read(None, train_long.SETTINGS["quick"], "cpu")
    starts = [training(train_long, arm, tmp_path / arm).run(corpus)["curve"][0] for arm in ("baseline", "int8", "lpmm")]
    assert starts[0] == starts[1] and abs(starts[0][1] - starts[2][1]) < 1e-2  # weights in 8 bits
    assert corpus.batch(0, 3)[0].equal(corpus.batch(0, 3)[0]) and not corpus.batch(0, 3)[0].equal(corpus.batch(1, 3)[0])


def test_verdicts_agree_with_the_paired_test_of_scipy(train_long: Any) -> None:
    from scipy.stats import ttest_rel

    ours, base = [4.32, 4.34, 4.30, 4.40], [4.30, 4.31, 4.28, 4.37]
    losses = {("int4", seed): loss for seed, loss in enumerate(ours)} | {("baseline", seed): loss for seed, loss in enumerate(base)}
    found, interval = train_long.paired(losses, "int4"), ttest_rel(ours, base).confidence_interval(0.95)
    assert (found.mean - found.half_width(), found.mean + found.half_width()) == pytest.approx((interval.low, interval.high))
    assert interval.low > 0 and found.verdict(0.01) == "loses" and found.verdict(0.1) == "loses by less than 0.1"
    assert not train_long.paired({**losses, ("int4", 9): 9.0}, "int4").differences[4:]  # the baseline has no such seed


def test_a_difference_within_the_noise_is_undecided(train_long: Any) -> None:
    noise = train_long.Paired((0.02, -0.02, 0.01, -0.015))
    assert noise.verdict(0.01).startswith("undecided") and not noise.is_decided(0.01, 0.003)
    assert noise.is_decided(0.01, 0.05) and noise.verdict(0.1) == "differs by less than 0.1"
    seeds = int(noise.verdict(0.01).split()[-2])
    assert noise.half_width(seeds) <= 0.01 < noise.half_width(seeds - 1)
    assert train_long.Paired((0.5,)).verdict(0.01).startswith("undecided")
