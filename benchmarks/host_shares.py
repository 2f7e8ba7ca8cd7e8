"""Shares of a small step that views, module calls and gradients take of the host: SHARES of predict/host_time.py, from results/host.json.

    python benchmarks/host_shares.py        # least squares over forward and backward of eight networks; needs scipy

A row of the file is a network with a thirty-second of its batch, so that the host is the limit, on one CPU beside one H200: medians of
forward, backward and the optimizer's step, unmodified (`base`), in a session that packs one tensor (`one`), in `int8` and `int4`, in turns.
`small_step_seconds`: a step of the calibration's small GPT beside these turns. `forward_calls`, `backward_calls`: host time of the
operations, each called four times in a loop, in empty operations; counts are those of the trace. It was measured by a script that is not
kept.

    forward  / small step = factor * calls + view * views          + module_call * modules
    backward / small step = factor * calls + backward_view * views + gradient * gradients
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

RESULTS = Path(__file__).parent / "results" / "host.json"
NAMES = ("factor", "view", "backward_view", "module_call", "gradient")
EMPTY_OPERATION = 7e-6 / 6e-3  # share of a small step, in quiet seconds


def equations(rows: list[dict[str, Any]]) -> Iterator[tuple[tuple[float, ...], float]]:
    """(counts in the order of NAMES, share of a small step) of forward and backward of each network."""
    for row in rows:
        forward, backward = (row["seconds"]["base"][phase] / row["small_step_seconds"] for phase in ("forward", "backward"))
        yield (row["forward_calls"] * EMPTY_OPERATION, row["forward_views"], 0.0, row["module_calls"], 0.0), forward
        yield (row["backward_calls"] * EMPTY_OPERATION, 0.0, row["backward_views"], 0.0, row["gradients"]), backward


def fitted(rows: list[dict[str, Any]]) -> tuple[dict[str, float], np.ndarray]:
    """The shares by name, and predicted over measured time of each phase; errors are relative, shares at least 0."""
    from scipy.optimize import nnls

    counts, shares = (np.array(part) for part in zip(*equations(rows), strict=True))
    solution, _ = nnls(counts / shares[:, None], np.ones(len(shares)))
    return dict(zip(NAMES, solution.tolist(), strict=True)), counts @ solution / shares


def main() -> None:
    """Print the shares, and how far off each network is."""
    rows = json.loads(RESULTS.read_text())[-1]["rows"]
    shares, ratios = fitted(rows)
    print(", ".join(f"{name} {share:.5f}" for name, share in shares.items()))
    for number, row in enumerate(rows):
        print(f"{row['job']:16s} forward {ratios[2 * number]:.2f}, backward {ratios[2 * number + 1]:.2f} of the measured time")


if __name__ == "__main__":
    main()
