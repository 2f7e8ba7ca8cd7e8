"""The first lines of `paredown estimate`: whether the step fits, which plan does, and bars of the memory at the peak.

    Does not fit: 13.20 GiB of 11.20 GiB. activations8 fits: 10.20 GiB, about 1.2x time.

    baseline      WWGGOOOOAAAAAAAAAAAAAAAAAAAAAAAATT  13.20 GiB
    activations8  WWGGOOOOAAAAAAAAAAAAAATTTT|         10.20 GiB

Segments are proportional to the bytes at the peak, which add up to it: by role, and the workspace of libraries. A terminal gets colours
instead of letters, unless NO_COLOR is set; `|` is the budget.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import typer

from paredown.cli.application import Exit
from paredown.cli.budget import Budget, shorter
from paredown.cli.output import BASELINE, Styled, clean, say, spinner
from paredown.roles import Role
from paredown.sizes import say_bytes, say_bytes_twice

BLOCK, SQUARE = "\u2588", "\u25a0"
WIDTH = 48  # characters of the longest bar
WORKSPACE = "workspace"  # of cuBLAS and cuDNN
# Step time relative to the baseline, measured on one H200 (docs/benchmarks.md). Eager mode: GPT-2, ResNet-50 and ViT, 1.17 to 1.24,
# 1.23 to 1.27 and 1.13 to 1.23; compiled: these and Llama, 1.08 to 1.13 and 1.08 to 1.18.
MEASURED_TIMES = {"activations8": "1.2x", "activations4": "1.25x", "activations2": "1.2x"}
MEASURED_COMPILED_TIMES = {"activations8": "1.1x", "activations4": "1.15x"}
COMPILED = "compiled"
RED, GREEN, PLAIN = "\x1b[1;31m", "\x1b[1;32m", "\x1b[0m"


class Segment(NamedTuple):
    """A part of a bar: its letter in plain text, its colour on a terminal, its name, and the keys of `at_peak` that it sums."""

    letter: str
    colour: int
    name: str
    keys: tuple[str, ...]


SEGMENTS = (
    Segment("W", 34, "weights", (Role.WEIGHT.value, Role.FROZEN.value, Role.RESIDUE.value, Role.MASTER.value)),
    Segment("G", 36, "gradients", (Role.GRADIENT.value,)),
    Segment("O", 35, "optimizer state", (Role.MOMENT1.value, Role.MOMENT2.value)),
    Segment("A", 33, "activations", (Role.ACTIVATION.value,)),
    Segment("I", 32, "inputs and buffers", (Role.INPUT.value, Role.BUFFER.value)),
    Segment("T", 37, "temporaries", (Role.TEMPORARY.value, Role.ERROR.value)),
    Segment("L", 90, "workspace of libraries", (WORKSPACE,)),
)


def parts_at_peak(row: Mapping[str, Any]) -> dict[str, int]:
    """Bytes at the peak by role, and the workspace of libraries; their sum is the peak."""
    workspace = {WORKSPACE: row["workspace_bytes"]} if row["workspace_bytes"] else {}
    return {**row["at_peak"], **workspace}


def verdict(rows: Sequence[Mapping[str, Any]], allowed: int | None, *, requested: bool, device: str) -> str:
    """Whether the judged plan fits (the baseline, or of requested plans the first that fits), and which of the others does."""
    if allowed is None:
        return f"Needs {_span(rows[0])}.{_smaller(rows, device)}"
    if rows[0]["largest_batch"] is not None:
        sizes = ", ".join(f"{row['largest_batch'] or 'none'} ({row['plan']})" for row in rows)
        return f"Largest batch within {say_bytes(allowed)}: {sizes}."
    fitting = [row for row in rows if row["fits"]]
    judged = fitting[0] if requested and fitting else rows[0]
    of = _share(judged["peak_bytes"], allowed)
    if judged["fits"]:
        tight = f"; at most {say_bytes(judged['high_bytes'])}" if judged["high_bytes"] > allowed else ""
        return f"{_begin(judged, 'fits')}: {of}{tight}."
    if fitting:
        other = f"{_begin(fitting[0], 'fits')}: {_size(fitting[0])}{_time(fitting[0], rows, device)}"
        return f"{_begin(judged, 'does not fit')}: {of}. {other}."
    least = min(rows, key=lambda row: row["peak_bytes"])
    more = f" No plan here fits; the smallest, {least['plan']}, needs {_size(least)}." if least is not judged else ""
    return f"{_begin(judged, 'does not fit')}: {of}.{more}"


def _begin(row: Mapping[str, Any], words: str) -> str:
    return words[0].upper() + words[1:] if row["plan"] == BASELINE else f"{row['plan']} {words}"


def _share(nbytes: int, allowed: int) -> str:
    """Two sizes, with one unit if they have the same: 13.20 of 11.20 GiB."""
    (number, unit), (other, other_unit) = say_bytes(nbytes).split(), say_bytes(allowed).split()
    return f"{number} of {other} {unit}" if unit == other_unit else f"{number} {unit} of {other} {other_unit}"


def _size(row: Mapping[str, Any]) -> str:
    return say_bytes(row["peak_bytes"])


def _span(row: Mapping[str, Any]) -> str:
    return f"{_size(row)} ({say_bytes(row['low_bytes'])} to {say_bytes(row['high_bytes'])})"


def _smaller(rows: Sequence[Mapping[str, Any]], device: str) -> str:
    """A sentence on the smallest of the other plans; "" if none is smaller than the first."""
    least = min(rows, key=lambda row: row["peak_bytes"])
    return (
        ""
        if least["peak_bytes"] >= rows[0]["peak_bytes"]
        else f" {least['plan']} needs {_size(least)}{_time(least, rows, device)}."
    )


def _time(row: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], device: str) -> str:
    """The step time of a plan relative to the baseline's: predicted for a calibrated device, else measured for a preset; else ""."""
    before, after = rows[0].get("step_seconds"), row.get("step_seconds")
    if before and after and rows[0]["plan"] == BASELINE:
        return f", {after / before:.2f}x time predicted"
    times = {"cuda": MEASURED_TIMES, f"cuda {COMPILED}": MEASURED_COMPILED_TIMES}.get(device, {})
    time = times.get(row["plan"])
    return "" if time is None else f", about {time} time"


# --- bars ------------------------------------------------------------------------------------------------------------


def has_colour() -> bool:
    """Whether stdout is a terminal that may get colours and block characters."""
    is_plain = bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") == "dumb"
    return sys.stdout.isatty() and not is_plain and "utf" in (sys.stdout.encoding or "").lower()


def styled_verdict(text: str) -> str:
    """The verdict in green or red on a terminal."""
    if not has_colour() or text.startswith(("Needs", "Largest")):
        return text
    colour = RED if "not fit" in text.partition(":")[0] else GREEN
    return Styled(f"{colour}{clean(text)}{PLAIN}")


def bars(rows: Sequence[Mapping[str, Any]], allowed: int | None, *, in_colour: bool) -> list[str]:
    """A bar for each row, to one scale, and the legend of the segments that they have."""
    longest = max([row["peak_bytes"] for row in rows] + ([allowed] if allowed and not all(row["fits"] for row in rows) else []))
    mark_at = round(allowed / longest * WIDTH) if allowed is not None and allowed <= longest else None
    names, segments = [clean(row["plan"]) for row in rows], [_segments(row, longest) for row in rows]
    width = max(map(len, names))
    lines = [
        f"{name:<{width}}  {_bar(parts, mark_at, in_colour=in_colour)}  {_size(row)}"
        for name, parts, row in zip(names, segments, rows, strict=True)
    ]
    shown = [part for part in SEGMENTS if any(part in parts for parts in segments)]
    legend = [f"{_drawn(part, SQUARE, in_colour=in_colour)} {part.name}" for part in shown]
    legend += [f"| budget {say_bytes(allowed)}"] if allowed is not None and mark_at is not None else []
    return [Styled(line) for line in (*lines, " " * (width + 2) + ("  " if in_colour else ", ").join(legend))]


def _segments(row: Mapping[str, Any], longest: int) -> list[Segment]:
    """The segment of each character of a bar; `longest` bytes have WIDTH characters."""
    drawn: list[Segment] = []
    parts, total = parts_at_peak(row), 0
    for part in SEGMENTS:
        total += sum(parts.get(key, 0) for key in part.keys)
        drawn += [part] * (round(total / longest * WIDTH) - len(drawn))
    return drawn


def _drawn(part: Segment, block: str, *, in_colour: bool) -> str:
    return f"\x1b[{part.colour}m{block}{PLAIN}" if in_colour else part.letter


def _bar(parts: Sequence[Segment], mark_at: int | None, *, in_colour: bool) -> str:
    """The characters of a bar, padded to one width, with a mark at the budget."""
    cells = [*(_drawn(part, BLOCK, in_colour=in_colour) for part in parts), *" " * (WIDTH + 1 - len(parts))]
    if mark_at is not None:
        cells.insert(mark_at, "|")
    return "".join(cells)


# --- what does not fit -------------------------------------------------------------------------------------------------

WITH_LENGTH = ("activation", "temporary", "input")  # roles whose bytes grow with the length, nearly all of them


def length_that_fits(value: Mapping[str, Any], peak: Callable[[str, int], int], length: int | None) -> Callable[[], str]:
    """A function that finds a shorter text that fits under the plan of the smallest peak, and says so; "" if it finds none."""

    def text() -> str:
        least = min(value["plans"], key=lambda row: row["peak_bytes"])
        fixed = least["peak_bytes"] - sum(least["at_peak"].get(role, 0) for role in WITH_LENGTH)
        with spinner("a shorter text"):
            sizes = {"fixed_bytes": fixed, "budget_bytes": value["budget_bytes"]}
            found = shorter(lambda num: peak(least["plan"], num), length or 0, least["peak_bytes"], **sizes)
        return "" if found is None else f" --length {found[0]} fits with it: {say_bytes(found[1])}."

    return text if length else str


def exit_if_too_large(
    value: Mapping[str, Any],
    *,
    requested: list[str] | None,
    model: str | None,
    budget: Budget | None,
    length: Callable[[], str],
) -> None:
    """Exit with status 3 if none of the requested plans fits the budget; without requested plans, if the baseline does not fit.

    `model`: the arguments for `paredown plan`; None if it cannot make this step. `length` finds a text that fits.
    """
    rows = value["plans"]
    judged = rows if requested else rows[:1]
    is_searched = judged[0]["largest_batch"] is not None
    if budget is None or any(row["largest_batch"] if is_searched else row["fits"] for row in judged):
        return
    fitting = [row["plan"] for row in rows if (row["largest_batch"] if is_searched else row["fits"])]
    others = f"These presets do: {', '.join(fitting)}. " if fitting else ""
    size = say_bytes_twice(value["budget_bytes"])
    if model is None:
        least = min(rows, key=lambda row: row["peak_bytes"])
        advice = f"{least['plan']} has the smallest peak, {say_bytes(least['peak_bytes'])}: lower --batch or --length, or raise the budget."
        say(f"it does not fit {size}. {others or f'{advice}{length()}'}".rstrip())
    else:
        say(f"it does not fit {size}. {others}To make a plan that fits: paredown plan {model} {budget.argument}")
    raise typer.Exit(Exit.DOES_NOT_FIT)
