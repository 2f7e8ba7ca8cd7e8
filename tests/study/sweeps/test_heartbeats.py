"""Heartbeats: a worker whose counter does not change for long enough is dead, also when the watching worker was suspended."""

from __future__ import annotations

import pytest

pytest.importorskip("sqlalchemy")

from hypothesis import given
from hypothesis import strategies as st

from paredown.study.sweeps.worker import WorkerPulse

gaps = st.lists(st.floats(0.1, 1000.0), min_size=1, max_size=60)


@given(gaps)
def test_who_beats_at_every_look_lives(gaps: list[float]) -> None:
    pulse, now = WorkerPulse(10.0, 2.0), 0.0
    for beats, gap in enumerate(gaps):
        now += gap
        assert pulse.look({"w": beats}, now) == []


@given(gaps)
def test_the_dead_are_found_after_their_patience_and_a_long_gap_counts_little(gaps: list[float]) -> None:
    """By the definition: the sum of the gaps since the first look, each counted as two looks at most."""
    pulse, now, still = WorkerPulse(10.0, 2.0), 0.0, 0.0
    pulse.look({"w": 7}, now)
    for gap in gaps:
        now += gap
        still += min(gap, 4.0)
        if abs(still - 10.0) > 1e-6:
            assert pulse.look({"w": 7}, now) == (["w"] if still > 10.0 else [])
        else:
            pulse.look({"w": 7}, now)


def test_one_beat_starts_the_count_again() -> None:
    pulse = WorkerPulse(5.0, 2.0)
    looks = [pulse.look({"w": beats}, 2.0 * i) for i, beats in enumerate((1, 1, 1, 2, 2, 2, 2))]
    assert looks == [[], [], [], [], [], [], ["w"]]


def test_a_watcher_that_slept_condemns_nobody() -> None:
    pulse = WorkerPulse(5.0, 2.0)
    pulse.look({"w": 1, "v": 1}, 0.0)
    assert pulse.look({"w": 1, "v": 1}, 1e6) == []
