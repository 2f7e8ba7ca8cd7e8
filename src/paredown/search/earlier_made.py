"""A prior that nobody measured, of the form of the shipped ones: for tests, and to try a picker before there is anything to learn from.

More bits are better until they no longer pay; what is known of the optimizer's formats is that they cost little. Half of the tasks
are of family "cnn", the others of "vit", "gpt" and "mlp".

>>> made_up(3, 4)
Earlier(made_up: 3 tasks x 4 plans, store mode, 12 of 12 entries, 24 runs, noise 0.005 to 0.011)
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice, product

import numpy as np

from paredown.formats.tiers import TIERS
from paredown.plan.plan import Plan
from paredown.search.earlier import Earlier, PlanRow, TaskRow

FAMILIES = ("cnn", "vit", "cnn", "gpt", "cnn", "mlp")
BLOCKS = (64, 32, 128, 256)
ELEMENTS = (
    ("uint2/{}@bf16+bf16", 2, 32),
    ("int4/{}@bf16", 4, 16),
    ("int8/{}@bf16", 8, 16),
    ("", 32, 0),
)  # text, bits, bits a block
STATES = {"full": 32.0, "half": 16.0, "lpmm": 8.125}  # bits of a weight


def made_up(num_tasks: int = 11, num_plans: int = 30, *, seeds: int = 2, seed: int = 0, mode: str = "store") -> Earlier:
    """`num_plans` is at most 39: activations as they are, or in 2, 4 or 8 bits in blocks of four lengths, with three tiers."""
    source = np.random.default_rng(seed)
    plans = list(islice(_plans(), num_plans))
    activation = np.array([plan.features["activation"] for plan in plans])
    state = np.array([plan.features["weight"] for plan in plans])
    hard, slope, noise = (source.uniform(low, high, num_tasks) for low, high in ((0.05, 0.5), (0.05, 0.4), (0.003, 0.02)))
    means = hard[:, None] + slope[:, None] * (2.0 ** -(activation / 2) + 0.1 * (state < 16))
    full = source.uniform(1e7, 1e8, num_tasks)
    memory = full[:, None] * (0.75 * activation + 0.25 * state) / 32
    tasks = [
        TaskRow(f"task {i}", FAMILIES[i % len(FAMILIES)], f"data {i}", "error", 10, 0.9, float(full[i]), 100, "made_up")
        for i in range(num_tasks)
    ]
    runs = np.clip(means[..., None] + noise[:, None, None] * source.standard_normal((num_tasks, len(plans), seeds)), 0, 1)
    about = {"memory": memory, "measured": memory * 1.02, "provenance": ({"about": "made up"},)}
    return Earlier.of_runs("made_up", mode, tasks, plans, runs, **about)


def _plans() -> Iterator[PlanRow]:
    """Rows, those of the first block first."""
    for block, (tier, bits), (text, width, more) in product(BLOCKS, STATES.items(), ELEMENTS):
        if not text and block != BLOCKS[0]:
            continue
        plan = Plan.uniform(**TIERS[tier], **({"activation": text.format(block)} if text else {}))  # type: ignore[misc]
        features = {"activation": width + more / block, "weight": bits, "moment1": min(bits, 32.0 if tier == "full" else 8.25)}
        yield PlanRow(f"a{width}/{block} {tier}", plan.to_json(), "", f"a{width} {tier}", features)
