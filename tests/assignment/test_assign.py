"""Budgets hold, more budget is never worse, and the greedy search comes close to the best there is, on random traces."""

from __future__ import annotations

from itertools import pairwise, product
from random import Random

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from paredown import Plan, footprint
from paredown.assignment.assign import assign
from paredown.assignment.assignment_problem import AssignmentProblem, rules_of
from paredown.assignment.storage_options import LADDER
from paredown.assignment.strategies import METHODS, best_within, role_table_error
from paredown.errors import BudgetError
from paredown.plan.footprint import DEVICES
from paredown.plan.trace import Trace
from tests.assignment.traces import random_trace
from tests.support.scale import scaled
from tests.support.strategies import examples

SEEDS = st.integers(0, 2**32)
NAMES = [name for name, row in METHODS.items() if not row.needs_sensitivities]


def peaks(trace: Trace) -> tuple[int, int]:
    """The lower bound of all plans' peaks, and the peak of the baseline."""
    return AssignmentProblem.of(trace, METHODS["role"]).ledger.floor_bytes, footprint(trace).peak_bytes


@examples(scaled(200))
@given(seed=SEEDS, method=st.sampled_from(NAMES), share=st.floats(0, 1))
def test_the_budget_is_never_exceeded(seed: int, method: str, share: float) -> None:
    trace = random_trace(seed)
    least, most = peaks(trace)
    budget = int(least + share * (most - least))
    try:
        plan = assign(trace, budget, method=method, seed=seed)
    except BudgetError as error:
        assert f"no plan of method {method!r}" in str(error)
        assert method != "role" or budget < AssignmentProblem.of(trace, METHODS["role"]).smallest.peak_bytes
        return
    assert footprint(trace, plan).peak_bytes <= budget
    assert Plan.from_json(plan.to_json()) == plan


@examples(scaled(100))
@given(seed=SEEDS, method=st.sampled_from(NAMES))
def test_every_point_has_the_peak_that_a_footprint_has(seed: int, method: str) -> None:
    trace = random_trace(seed)
    search = AssignmentProblem.of(trace, METHODS[method], seed=seed)
    for point in Random(seed).sample(search.points, min(3, len(search.points))):
        plan = Plan(rules_of(trace, search.formats(point), is_short=False))
        assert footprint(trace, plan).bound_bytes == point.peak_bytes


@examples(scaled(100))
@given(seed=SEEDS, method=st.sampled_from(NAMES), shares=st.lists(st.floats(0, 1.1), min_size=2, max_size=5))
def test_more_budget_is_never_worse(seed: int, method: str, shares: list[float]) -> None:
    trace = random_trace(seed)
    search = AssignmentProblem.of(trace, METHODS[method], seed=seed)
    written = footprint(trace).peak_bytes
    least = min(search.smallest.peak_bytes, written)
    budgets = sorted(int(least + share * (written - least)) for share in shares)
    points = [best_within(search.points, budget) for budget in budgets]
    errors = [0.0 if written <= budget else point.error for budget, point in zip(budgets, points, strict=True) if point is not None]
    assert errors == sorted(errors, reverse=True)


def all_errors_and_peaks(trace: Trace) -> tuple[np.ndarray, np.ndarray]:
    """Predicted error and peak of every assignment of the ladder's formats to independent activations, by the definition.

    Unmodified, a tensor is there from birth to death. Packed, the original is there until it is dropped, the codes from when they are made
    until they are released, and a copy whenever it is decoded; on a CPU, the codec's scratch memory while it works.
    """
    held = np.zeros((len(trace.activations), len(LADDER), trace.length + 3), dtype=np.int64)
    errors = np.zeros((len(trace.activations), len(LADDER)))
    for i, slot in enumerate(trace.activations):
        part = slot.parts[0]
        held[i, 0, slot.birth : slot.death + 1] = slot.nbytes
        for level, format in enumerate(LADDER[1:], 1):
            assert format is not None
            spans = [(slot.birth, slot.dropped, slot.nbytes), (part.packed, part.released, format.nbytes((slot.numel,)))]
            for start, end, nbytes in [*spans, *((start, end, slot.nbytes) for start, end in part.decoded)]:
                held[i, level, start : end + 1] += -(-nbytes // DEVICES[trace.device].rounding) * DEVICES[trace.device].rounding
            errors[i, level] = role_table_error(slot, format)
    held[:, 0] = -(-held[:, 0] // DEVICES[trace.device].rounding) * DEVICES[trace.device].rounding
    levels = np.array(list(product(range(len(LADDER)), repeat=len(trace.activations))))
    rows = np.arange(len(trace.activations))
    return errors[rows, levels].sum(axis=1), held[rows, levels].sum(axis=1).max(axis=1)


@examples(scaled(60))
@given(seed=SEEDS, num=st.integers(1, 6))
def test_the_error_is_within_2_percent_of_the_least_there_is(seed: int, num: int) -> None:
    """Of up to six independent activations, of any sizes and lives, with the default ladder; ten budgets each. The worst seen is the least.

    With seven and eight of them 8 of 4,000 budgets were further off than 2 %, up to 140 times: three items have to change at once
    there, since packing one more adds a decoded copy at another tick.
    """
    trace = random_trace(seed, num=num, has_parameters=False, is_simple=True)
    search = AssignmentProblem.of(trace, METHODS["role"])
    errors, peaks = all_errors_and_peaks(trace)
    assert search.smallest.peak_bytes == peaks.min()
    for budget in np.linspace(peaks.min(), peaks.max(), 10).astype(int):
        found = best_within(search.points, int(budget))
        assert found is not None
        assert found.error <= 1.02 * errors[peaks <= budget].min()


@examples(scaled(30))
@given(seed=SEEDS)
def test_bounds_and_peaks_of_changes_are_those_of_the_choices(seed: int) -> None:
    """The floor is that of the fewest bytes at every tick, and a change of one or two items has the peak of the new choice."""
    ledger, source = AssignmentProblem.of(random_trace(seed), METHODS["role"]).ledger, Random(seed)
    ends = [*ledger.starts[1:], len(ledger.errors)]
    rows_of = [range(int(start), int(end)) for start, end in zip(ledger.starts, ends, strict=True)]
    least = [min(int(ledger.held[row, tick]) for row in rows) for rows in rows_of for tick in range(len(ledger.ticks))]
    floor = ledger.base + np.array(least, dtype=np.int64).reshape(len(rows_of), -1).sum(axis=0)
    assert ledger.floor_bytes == int(floor.max()) + ledger.workspace_bytes
    chosen = np.array([source.choice(rows) for rows in rows_of])
    pairs = [(source.choice(a), source.choice(b)) for a, b in pairwise(rows_of)]
    changes = [(row, row) for rows in rows_of for row in rows] + pairs
    expected: list[int] = []
    for change in changes:
        after = chosen.copy()
        after[ledger.item_of[[*change]]] = change
        assert (ledger.changed_load(ledger.load(chosen), chosen, after) == ledger.load(after)).all()
        expected.append(ledger.peak(after))
    assert ledger.changed_peaks(chosen, ledger.load(chosen), np.array(changes)).tolist() == expected
    tick = np.array([source.randrange(len(ledger.ticks))])
    assert (ledger.changed_peaks(chosen, ledger.load(chosen), np.array(changes), tick) <= expected).all(), "a lower bound"
