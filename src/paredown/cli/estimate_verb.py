"""`paredown estimate`: will it fit? Bytes by role, module and plan, and the largest batch within a budget; nothing is trained.

The largest batch within a budget: a search over whole numbers for a peak that grows with the batch.

>>> calls = []
>>> largest_batch(lambda num: calls.append(num) or 100 + 7 * num, 1000, start=32), len(calls) < 6
(128, True)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paredown.cli.application import (
    LOOK,
    AutocastOption,
    BudgetOption,
    DeviceOption,
    Exit,
    InputOption,
    JsonOption,
    ModelArgument,
    OptimizerOption,
    PlanOption,
    app,
    command_text,
    verb,
)
from paredown.cli.output import emit, heading, progress_bar, say, spinner, table, tell

if TYPE_CHECKING:
    from paredown.cli.subject import Subject
    from paredown.plan.footprint import Footprint


AUTO = "auto"
SHOWN = ("as_written", "activations8", "activations4", "activations2", "lpmm")  # unless plans are named
SHOWN_MODULES = 10
SHOWN_NOTES = 5


@verb(
    app,
    "estimate",
    "paredown estimate digits#batch=256 --budget 8MiB",
    "paredown estimate resnet50#width=64,picture=224 --batch auto --budget 8GiB",
    "paredown estimate net.py:make --input 3x32x32 --plan activations4",
    panel=LOOK,
)
def estimate(
    model: ModelArgument,
    budget: BudgetOption = None,
    plan: PlanOption = None,
    batch: Annotated[
        str | None, typer.Option(help="Examples of a step, or auto: the most within --budget.", show_default=False)
    ] = None,
    input: InputOption = None,
    optimizer: OptimizerOption = None,
    device: DeviceOption = None,
    autocast: AutocastOption = None,
    depth: Annotated[int, typer.Option(min=1, help="Parts of module paths that are told apart.")] = 1,
    is_json: JsonOption = False,
) -> None:
    """Will it fit? Bytes of a training step by role, module and plan, before anything runs."""
    size = _batch(batch, budget)
    with spinner("following one step"):
        from paredown.cli.subject import SubjectOptions, find_subject, name_of, read_plan
        from paredown.plan.footprint import footprint

        subject = find_subject(model, SubjectOptions(size, input, device, autocast, optimizer))
        plans = {name_of(text): read_plan(text) for text in plan or SHOWN}
        feet = {name: footprint(subject.trace(of), of) for name, of in plans.items()}
    allowed = None if budget is None else _allowed(budget, subject)
    largest: dict[str, int] = {}
    if batch == AUTO:
        with progress_bar("the largest batch") as report:
            for number, (name, of) in enumerate(plans.items()):
                report(number, len(plans), name)
                largest[name] = _largest(subject, of, allowed or 0)
    rows = [_row(name, foot, allowed, largest.get(name), depth) for name, foot in feet.items()]
    value = {**_head(subject), "budget_bytes": allowed, "plans": rows, "notes": _notes(feet)}
    if is_json:
        emit(value)
    else:
        tell(*_told(value))
    again = command_text(model, input=input, batch=size, optimizer=optimizer, device=device, autocast=autocast)
    _verdict(value, asked=plan, model=again, budget=budget)


def _batch(text: str | None, budget: str | None) -> int | None:
    """The batch size that was asked for; None: the subject's own, or to be found."""
    if text is None or text == AUTO:
        if text == AUTO and budget is None:
            raise typer.BadParameter("auto needs --budget: the largest batch within it is looked for.", param_hint="--batch")
        return None
    if not (text.isascii() and text.isdigit() and 0 < int(text[:12]) < 10**9):
        raise typer.BadParameter(f"{text!r} is none; it is a whole number from 1 up, or auto.", param_hint="--batch")
    return int(text)


def _head(subject: Subject) -> dict[str, Any]:
    """What is estimated."""
    trace = subject.trace()
    rule = subject.optimizer if isinstance(subject.optimizer, str) else trace.optimizer
    about = {"model": subject.name, "device": trace.device, "dtype": trace.dtype, "optimizer": rule}
    return {**about, "batch_size": subject.batch_size, "batch": list(trace.batch)}


def _allowed(budget: str, subject: Subject) -> int:
    from paredown.plan.plan import Plan
    from paredown.sizes import parse_bytes

    return parse_bytes(budget, whole=subject.peak_bytes(Plan()))


def _largest(subject: Subject, plan: Any, allowed: int) -> int:
    """The most examples whose step is within `allowed`; 0 where not one fits. Peaks grow with the batch, almost in proportion."""

    return largest_batch(lambda num: subject.peak_bytes(plan, num), allowed, start=subject.batch_size)


def _row(name: str, foot: Footprint, allowed: int | None, largest: int | None, depth: int) -> dict[str, Any]:
    bounds = {"peak_bytes": foot.peak_bytes, "low_bytes": foot.low_bytes, "high_bytes": foot.high_bytes}
    roles = {role.value: n for role, n in foot.by_role.items() if n}
    at_peak = {role.value: n for role, n in foot.at_peak.items() if n}
    fits = None if allowed is None else foot.peak_bytes <= allowed
    found = {"by_role": roles, "at_peak": at_peak, "by_module": foot.by_module(depth)}
    return {"plan": name, **bounds, "fits": fits, "largest_batch": largest, **found}


def _notes(feet: dict[str, Footprint]) -> list[str]:
    return list(dict.fromkeys(note for foot in feet.values() for note in foot.notes))


def _told(value: dict[str, Any]) -> list[str]:
    rows: list[dict[str, Any]] = value["plans"]
    where = f"{value['device']}, {value['dtype']}, {value['optimizer'] or 'no optimizer'}, batch {value['batch_size']}"
    names = [row["plan"].replace("_", " ") for row in rows]
    lines = [heading(f"One training step of {value['model']} on {where}, predicted"), ""]
    lines += table(("kept, by role", *names), _by(rows, "by_role"))
    lines += ["", *table(("kept, by module", *names), _by(rows, "by_module")[:SHOWN_MODULES])]
    lines += ["", *table(("whole step", *names), _totals(rows, value["budget_bytes"]))]
    return [*lines, *(f"note: {note}" for note in value["notes"][:SHOWN_NOTES])]


def _by(rows: Sequence[dict[str, Any]], kind: str) -> list[tuple[str, ...]]:
    """A line for each role or module, the largest of the first plan first where they are modules."""
    from paredown.sizes import say_bytes

    keys = list(dict.fromkeys(key for row in rows for key in row[kind]))
    return [(key or "(the model itself)", *(say_bytes(row[kind].get(key, 0)) for row in rows)) for key in keys]


def _totals(rows: Sequence[dict[str, Any]], allowed: int | None) -> list[tuple[str, ...]]:
    from paredown.sizes import say_bytes

    lines = [("peak", *(say_bytes(row["peak_bytes"]) for row in rows))]
    lines += [
        ("at least", *(say_bytes(row["low_bytes"]) for row in rows)),
        ("at most", *(say_bytes(row["high_bytes"]) for row in rows)),
    ]
    if allowed is not None:
        lines.append((f"fits {say_bytes(allowed)}", *("yes" if row["fits"] else "no" for row in rows)))
    if rows[0]["largest_batch"] is not None:
        lines.append(("largest batch", *(str(row["largest_batch"]) for row in rows)))
    return lines


def _verdict(value: dict[str, Any], *, asked: list[str] | None, model: str, budget: str | None) -> None:
    """Does not fit is an answer of its own: exit 3 where none of the plans that were named fits, or the step as written."""
    rows, allowed = value["plans"], value["budget_bytes"]
    judged = rows if asked else rows[:1]
    is_searched = judged[0]["largest_batch"] is not None
    if allowed is None or any(row["largest_batch"] if is_searched else row["fits"] for row in judged):
        return
    fitting = [row["plan"] for row in rows if (row["largest_batch"] if is_searched else row["fits"])]
    others = f"These presets do: {', '.join(fitting)}. " if fitting else ""
    say(f"it does not fit {budget}. {others}To have a plan made: paredown plan {model} --budget {budget}")
    raise typer.Exit(Exit.DOES_NOT_FIT)


# --- The largest batch within a budget ---

MOST = 1 << 24  # examples: beyond that the budget is no limit


def largest_batch(peak: Callable[[int], int], budget_bytes: int, *, start: int) -> int:
    """The largest number of examples whose `peak` is within the budget; 0 if one alone is above it.

    A line between the nearest sizes guesses where the budget is met; every third guess is the middle, for peaks that are no line.
    """
    known: dict[int, int] = {}

    def fits(num: int) -> bool:
        known[num] = known[num] if num in known else peak(num)
        return known[num] <= budget_bytes

    def met(low: int, high: int) -> int:
        """The last size below the budget on the line through two known ones."""
        slope = max(known[high] - known[low], 1) / (high - low)
        return int(low + (budget_bytes - known[low]) / slope)

    low, high = max(start, 1), 2 * max(start, 1)
    if not fits(low):
        low, high = 1, low
        if high == 1 or not fits(1):
            return 0
    before = low
    while fits(high):  # the first guess beyond two sizes is one that should not fit
        before, low, high = low, high, max(high + 1, met(before, high) + 1) if before == max(start, 1) else 2 * high
        if low >= MOST:
            return MOST
    turn = 0
    while high - low > 1:
        guess, turn = met(low, high) if turn % 3 < 2 else (low + high) // 2, turn + 1
        guess = min(max(guess, low + 1), high - 1)
        low, high = (guess, high) if fits(guess) else (low, guess)
    return low
