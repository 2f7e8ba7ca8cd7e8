"""In which order slots are lowered: METHODS has a row for each way.

    size          the largest first, the order of "Training with Mixed-Precision Floating-Point Assignments" (2023)
    operator      inputs of matrix products and convolutions alone, the largest first; not those of the first and the last layer
    role          what is expected to cost least, by the role table (priors.py)
    sensitivity   what was measured to cost least (`probe`); the role table, on the same scale, for slots that were not probed
    random        any order, by the seed

Pins hold under every method: they are facts of what backward does (`plan/ops.py`), and a session keeps to them anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from random import Random
from statistics import median
from types import MappingProxyType

from paredown.formats.format import Format
from paredown.plan.given import significant_bits
from paredown.plan.ops import Use
from paredown.plan.record import Trace
from paredown.plan.slots import Slot
from paredown.search.exchange import exchanged
from paredown.search.items import ErrorOf, Item, Ladder
from paredown.search.ledger import Ledger
from paredown.search.path import Point, greedy, in_order
from paredown.search.role_errors import slot_error
from paredown.search.sensitivity import Sensitivities

PRODUCTS = frozenset({"conv", "linear", "matmul"})
Order = Callable[[tuple[Item, ...], int], list[int]]


@dataclass(frozen=True)
class Method:
    """A way of assigning. `order`: of items, None for the greedy search by predicted error; `eligible`: the activations it may lower."""

    name: str
    note: str
    order: Order | None = None
    eligible: Callable[[Trace], frozenset[str]] | None = None
    lowers_parameters: bool = True
    needs_sensitivities: bool = False

    def points(self, ledger: Ledger, seed: int) -> list[Point]:
        """The points that a budget chooses from."""
        if self.order is not None:
            return in_order(ledger, self.order(ledger.items, seed))
        return exchanged(ledger, greedy(ledger))


def _by_size(items: tuple[Item, ...], seed: int) -> list[int]:
    return sorted(range(len(items)), key=lambda number: -items[number].nbytes)


def _shuffled(items: tuple[Item, ...], seed: int) -> list[int]:
    order = list(range(len(items)))
    Random(seed).shuffle(order)
    return order


def _inputs_of_products(trace: Trace) -> frozenset[str]:
    """Activations that a matrix product or a convolution needs, without those of the first and the last of them."""
    found = [
        slot
        for slot in sorted(trace.activations, key=lambda slot: slot.birth)
        if any(saver.use is Use.VALUE and saver.op in PRODUCTS for saver in slot.savers)
    ]
    return frozenset(slot.name for slot in found[1:-1])


ROWS = (
    Method("size", "the largest first, as in the paper", order=_by_size),
    Method(
        "operator",
        "inputs of matrix products and convolutions alone, but for the first and the last layer",
        order=_by_size,
        eligible=_inputs_of_products,
        lowers_parameters=False,
    ),
    Method("role", "the least expected error for each byte, by what backward does with a slot"),
    Method("sensitivity", "the least measured error for each byte (probe)", needs_sensitivities=True),
    Method("random", "any order, by the seed", order=_shuffled),
)
METHODS: Mapping[str, Method] = MappingProxyType({row.name: row for row in ROWS})


def expected_error(slot: Slot, format: Format) -> float:
    """By the role table."""
    return slot_error(slot.savers, format)


def measured_error(trace: Trace, sensitivities: Sensitivities, ladder: Ladder) -> ErrorOf:
    """As it was measured; the role table, scaled by the median of measured to expected, for slots that were not probed.

    A lower format never counts as better than a higher one, whatever the noise of the measurement.
    """
    formats = [format for format in ladder if format is not None]
    probed = [(slot, name) for slot in trace.activations if (name := _probed(slot, sensitivities)) is not None]
    ratios = [_ratio(sensitivities.of(name, format), expected_error(slot, format)) for slot, name in probed for format in formats]
    scale = median([ratio for ratio in ratios if ratio > 0] or [1.0])

    def error_of(slot: Slot, format: Format) -> float:
        name = _probed(slot, sensitivities)
        if name is None:
            return scale * expected_error(slot, format)
        bits = significant_bits(format)
        finer = (other for other in formats if significant_bits(other) > bits)
        return max(sensitivities.of(name, other) or 0.0 for other in (format, *finer))

    return error_of


def _probed(slot: Slot, sensitivities: Sensitivities) -> str | None:
    """The name under which a slot was probed: its own, or that of another operation that saved it."""
    return next(iter(sensitivities.known((slot.name, *slot.names))), None)


def _ratio(measured: float | None, expected: float) -> float:
    return (measured or 0.0) / expected if expected else 0.0


def ladder_for(eligible: Iterable[str] | None, ladder: Ladder) -> Callable[[Slot], Ladder]:
    """The formats that a slot may have: all, or the first alone where it is not eligible."""
    if eligible is None:
        return lambda slot: ladder
    names = frozenset(eligible)
    return lambda slot: ladder if slot.name in names else ladder[:1]
