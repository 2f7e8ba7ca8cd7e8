"""Random programs whose weights, gradients, moments and activations are packed together, against plain models with the decoded weights."""

from __future__ import annotations

import pytest
import torch

from paredown.optim import packed_weight
from tests.programs import packed_training
from tests.programs.judging import drawn
from tests.programs.packed_training import TIERS, beyond_a_step, faults_of_packed_training, plan_of
from tests.support.scale import scaled

NUM_PROGRAMS, CHUNK = scaled(100), 25


@pytest.mark.filterwarnings("ignore:grad and param do not obey the gradient layout contract")  # of torch, about speed
@pytest.mark.parametrize("first", range(0, NUM_PROGRAMS, CHUNK))
def test_packed_weights_gradients_and_moments_of_random_programs(first: int) -> None:
    faults: list[str] = []
    for number in range(first, min(first + CHUNK, NUM_PROGRAMS)):
        program, _ = drawn(number)
        found = faults_of_packed_training(program)
        faults += [f"program {number} under {plan_of(number)}: {fault}" for fault in found] + ([str(program)] if found else [])
    assert not faults, "\n".join(faults)


def test_programs_have_all_tiers_and_packed_weights() -> None:
    assert len({plan_of(number).key for number in range(2 * len(TIERS))}) == 2 * len(TIERS)
    with_weights = [
        number for number in range(16) if any(p.numel() >= 4096 for p in packed_training.build(drawn(number)[0]).parameters())
    ]
    assert len(with_weights) > 8


def test_a_weight_that_is_decoded_wrong_in_backward_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = packed_weight.Weight.shared
    monkeypatch.setattr(packed_weight.Weight, "shared", lambda self, dtype: 1.01 * shared(self, dtype))
    assert any(faults_of_packed_training(drawn(number)[0]) for number in range(0, 8, 2))


def test_values_beyond_a_step_are_seen() -> None:
    exact = torch.linspace(-1, 1, 256, dtype=torch.float64).view(2, 128)
    for text, step in (("int8/64@bf16", 1 / 127), ("int4/64@bf16", 1 / 7)):
        assert beyond_a_step(text, exact + 0.9 * step * packed_training.largest_in_blocks(exact), exact) <= 0
        assert beyond_a_step(text, exact + 1.2 * step * packed_training.largest_in_blocks(exact), exact) > 0
