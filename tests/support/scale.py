"""How many cases a randomized test runs: PAREDOWN_TEST_SCALE times as many as `make test`, which `make test-all` sets to 100."""

from __future__ import annotations

import os

SCALE = int(os.environ.get("PAREDOWN_TEST_SCALE", "1"))


def scaled(count: int) -> int:
    """`count` times the scale of this run."""
    return count * SCALE
