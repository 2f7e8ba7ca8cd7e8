"""PEPPP's released matrices, where PAREDOWN_DATA has them: 87 tasks, 99 plans (11 low formats times 9 high ones)."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from paredown.study.papers.peppp_cross_validation import SETTINGS, Cache, HeldOutTask, Matrices, held_out_tasks

FOLDER = Path(os.environ.get("PAREDOWN_DATA", "")) / "peppp"
needs_matrices = pytest.mark.skipif(not (FOLDER / "mem_matrix_full.npy").is_file(), reason="PEPPP's matrices are not there")
DROPPED = 28  # all of CIFAR-100, which the release leaves out
LEVELS = np.repeat(np.arange(11), 9)
KEPT: Cache = {}


@cache
def released() -> Matrices:
    """Errors and memory (MB) of the tasks that the release uses."""
    accuracies, memory = np.load(FOLDER / "acc_matrix_res64_all.npy"), np.load(FOLDER / "mem_matrix_full.npy")
    return Matrices(np.delete(1 - accuracies, DROPPED, axis=0), np.delete(memory, DROPPED, axis=0), LEVELS)


@cache
def released_trials(setting: str) -> list[HeldOutTask]:
    """Every task left out in turn; completions are made once."""
    return held_out_tasks(released(), SETTINGS[setting], KEPT)
