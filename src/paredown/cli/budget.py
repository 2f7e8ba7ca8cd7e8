"""Read budgets of the command line: `--budget 24GB` in bytes, and `--gpu 4090` as the memory of a card less that of its CUDA context.

A GB is 1000^3 bytes and a GiB is 1024^3, so `24GB` is 22.35 GiB; a card that is sold as 24 GB has about 23.5 GiB. Budgets are printed in
both units, and a budget in GB that is the size of a card names `--gpu`.

>>> gpu_budget("RTX 4090").say(parse_bytes(gpu_budget("4090").size))
'23.00 GiB (24.70 GB): 4090, 23.50 GiB less 512.00 MiB for the CUDA context'

`largest_batch` searches for the largest batch size whose predicted peak is within a budget, with few predictions:

>>> calls = []
>>> largest_batch(lambda num: calls.append(num) or 100 + 7 * num, 1000, start=32), len(calls) < 6
(128, True)
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import typer

from paredown.errors import BudgetError
from paredown.sizes import parse_bytes, say_bytes, say_bytes_twice

CONTEXT_BYTES = 1 << 29  # about what the CUDA context takes with the kernels that it loads
HERE = re.compile(r"(?:cuda|here)(?::(?P<index>[0-9]{1,3}))?")


class Card(NamedTuple):
    """A row of the table of GPUs: name, GB in its name or specification, and GiB that torch reports, rounded down to 0.1."""

    name: str
    sold_gb: int
    total_gib: float


CARDS = (
    Card("1080ti", 11, 10.9),
    Card("2080ti", 11, 10.5),
    Card("3060", 12, 11.6),
    Card("3080", 10, 9.6),
    Card("3090", 24, 23.5),
    Card("3090ti", 24, 23.5),
    Card("4070", 12, 11.5),
    Card("4080", 16, 15.5),
    Card("4090", 24, 23.5),
    Card("5090", 32, 31.3),
    Card("t4", 16, 14.5),
    Card("v100-16gb", 16, 15.7),
    Card("v100-32gb", 32, 31.7),
    Card("a10", 24, 21.9),
    Card("l4", 24, 21.9),
    Card("a40", 48, 44.3),
    Card("l40", 48, 44.3),
    Card("l40s", 48, 44.3),
    Card("6000ada", 48, 47.3),
    Card("a6000", 48, 47.3),
    Card("a100-40gb", 40, 39.3),
    Card("a100-80gb", 80, 79.1),
    Card("h100", 80, 79.1),
    Card("h200", 141, 139.7),
    Card("b200", 180, 178.3),
    Card("b300", 288, 267.6),
    Card("mi300x", 192, 191.5),
)
ALIASES = {"a10g": "a10", "h10080gb": "h100", "v100": "v100-16gb or v100-32gb", "a100": "a100-40gb or a100-80gb"}


@dataclass(frozen=True)
class Budget:
    """Holds a memory budget from the command line: its size as text, the option that gave it, and where the size comes from."""

    size: str
    argument: str
    origin: str = ""

    def say(self, nbytes: int) -> str:
        """Return `nbytes`, the bytes of this budget, as text in GiB and GB, and where they come from, or which cards have them."""
        why = self.origin or _cards_of(self.size)
        return f"{say_bytes_twice(nbytes)}{f': {why}' if why else ''}"

    @contextmanager
    def in_errors(self) -> Generator[None]:
        """Return a context that adds to a BudgetError where the budget comes from, or which cards have so many GB."""
        try:
            yield
        except BudgetError as error:
            if not (self.origin or _cards_of(self.size)):
                raise
            raise BudgetError(f"{error} The budget is {self.say(parse_bytes(self.size))}.") from None


def read_budget(budget: str | None, gpu: str | None) -> Budget | None:
    """Return the budget that --budget or --gpu gives, None without either; raise BadParameter if both are given."""
    if budget is not None and gpu is not None:
        raise typer.BadParameter(f"give a budget or a GPU, not both: --gpu {gpu} is a budget.", param_hint="--gpu")
    return gpu_budget(gpu) if gpu is not None else None if budget is None else Budget(budget, f"--budget {budget}")


def needed_budget(budget: str | None, gpu: str | None, *, default: str | None = None) -> Budget:
    """Return the budget that --budget or --gpu gives, or else the size `default`; raise BadParameter if all three are None."""
    found = read_budget(budget, gpu)
    if found is None and default is None:
        raise typer.BadParameter("missing: give a size such as 8GiB or 60%, or the card with --gpu.", param_hint="--budget")
    return found or Budget(str(default), f"--budget {default}")


def gpu_budget(text: str) -> Budget:
    """Return a budget of the memory of the card `text` less a CUDA context; for cuda or cuda:1, what is free there now."""
    name = re.sub(
        r"nvidia|amd|instinct|generation|geforce|quadro|tesla|rtx|gtx|pcie|sxm[0-9]*|hbm[0-9a-z]*|[\s_-]", "", text.lower()
    )
    if (match := HERE.fullmatch(name)) is not None:
        return _budget_here(int(match["index"] or 0), text)
    name = ALIASES.get(name, name)
    for card in CARDS:
        if card.name.replace("-", "") == name.replace("-", ""):
            total = int(card.total_gib * 2**30)
            origin = f"{card.name}, {say_bytes(total)} less {say_bytes(CONTEXT_BYTES)} for the CUDA context"
            return Budget(str(total - CONTEXT_BYTES), f"--gpu {card.name}", origin)
    names = ", ".join(card.name for card in CARDS)
    fault = f"comes in two sizes: write {name}" if " or " in name else f"is unknown: allowed are {names}"
    raise typer.BadParameter(
        f"GPU {text!r} {fault}; cuda is what is free on the GPU of this machine, and --budget takes any size.", param_hint="--gpu"
    )


def _budget_here(index: int, text: str) -> Budget:
    """Return the memory that is free now on GPU number `index` as a budget; errors quote `text`, the value of --gpu."""
    from torch import cuda

    num = cuda.device_count() if cuda.is_available() else 0
    if index >= num:
        raise typer.BadParameter(
            f"torch sees {num} GPU{'s' * (num != 1)} on this machine, and {text!r} is none of them: name a card, such as --gpu 4090.",
            param_hint="--gpu",
        )
    free, total = cuda.mem_get_info(index)
    origin = f"free of {say_bytes(total)} on cuda:{index}, {cuda.get_device_name(index)}"
    return Budget(str(free), f"--gpu cuda:{index}", origin)


def _cards_of(size: str) -> str:
    """Return words that name the cards sold with `size`, such as "24GB", of memory; "" if no card is, or if the unit is not GB."""
    number, unit = size.strip()[:-2].strip(), size.strip()[-2:].lower()
    cards = [card for card in CARDS if unit == "gb" and parse_bytes(size) == card.sold_gb * 10**9]
    if not cards:
        return ""
    low, high = (pick(card.total_gib for card in cards) for pick in (min, max))
    span = f"{low} GiB" if low == high else f"{low} to {high} GiB"
    return f"cards sold as {number} GB have {span} (--gpu {', '.join(card.name for card in cards)})"


# --- the largest batch and a length within a budget -------------------------------------------------------------------

MOST = 1 << 24  # examples; a budget that allows more is not searched further
LENGTH_GRAIN, NUM_LENGTHS = 128, 3  # lengths are multiples of 128 tokens, and at most 3 are tried


def largest_batch(peak: Callable[[int], int], budget_bytes: int, *, start: int) -> int:
    """Return the largest batch size with `peak(batch_size)`, predicted bytes, within the budget; 0 if none has.

    The search begins at `start`. It interpolates, since peaks grow almost linearly; every third guess is the midpoint, in case they do
    not.
    """
    known: dict[int, int] = {}

    def fits(num: int) -> bool:
        known[num] = known[num] if num in known else peak(num)
        return known[num] <= budget_bytes

    def interpolated(low: int, high: int) -> int:
        """Return the batch size at which a line through the known peaks of the batch sizes `low` and `high` reaches the budget."""
        slope = max(known[high] - known[low], 1) / (high - low)
        return int(low + (budget_bytes - known[low]) / slope)

    low, high = max(start, 1), 2 * max(start, 1)
    if not fits(low):
        low, high = 1, low
        if high == 1 or not fits(1):
            return 0
    before = low
    while fits(high):  # the first extrapolation adds 1, to a size that should not fit
        before, low, high = low, high, max(high + 1, interpolated(before, high) + 1) if before == max(start, 1) else 2 * high
        if low >= MOST:
            return MOST
    turn = 0
    while high - low > 1:
        guess, turn = interpolated(low, high) if turn % 3 < 2 else (low + high) // 2, turn + 1
        guess = min(max(guess, low + 1), high - 1)
        low, high = (guess, high) if fits(guess) else (low, guess)
    return low


def shorter(
    peak: Callable[[int], int], length: int, peak_bytes: int, *, fixed_bytes: int, budget_bytes: int
) -> tuple[int, int] | None:
    """Return a shorter text length and its predicted peak within the budget; None if three tries fail.

    `peak(length)` predicts bytes. `peak_bytes` is its value at `length`, above the budget; `fixed_bytes` of that do not depend on the
    length. The first try is on the line from `fixed_bytes` at length 0 to `peak_bytes` at `length`, each later try on the line through
    the last two tries.

    >>> shorter(lambda num: 100 + num, 4096, 4196, fixed_bytes=50, budget_bytes=1000)
    (896, 996)
    """
    known = [(0, fixed_bytes), (length, peak_bytes)]
    for _ in range(NUM_LENGTHS):
        (low, low_bytes), (high, high_bytes) = known[-2:]
        slope = (high_bytes - low_bytes) / (high - low)
        guess = int(low + (budget_bytes - low_bytes) / slope) // LENGTH_GRAIN * LENGTH_GRAIN if slope > 0 else 0
        if guess <= 0 or guess in (low, high):
            return None
        known.append((guess, peak(guess)))
        if known[-1][1] <= budget_bytes:
            return known[-1]
    return None
