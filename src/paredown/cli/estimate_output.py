"""Print the answer of `paredown estimate`, an EstimatedStep with an EstimateRow for each plan, as JSON or text.

The text begins with whether the step fits, which plan does, and bars of the memory at the peak:

    Does not fit: 13.20 GiB of 11.20 GiB. activations8 fits: 10.20 GiB, about 1.2x time.

    baseline      WWGGOOOOAAAAAAAAAAAAAAAAAAAAAAAATT  13.20 GiB
    activations8  WWGGOOOOAAAAAAAAAAAAAATTTT|         10.20 GiB

Segments are proportional to the bytes at the peak, which add up to it: by role, and the workspace of libraries. A terminal gets colours
instead of letters, unless NO_COLOR is set; `|` is the budget.
"""

from __future__ import annotations

import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from paredown.cli.output import BASELINE, Styled, clean, heading, table
from paredown.roles import Role
from paredown.sizes import say_bytes

if TYPE_CHECKING:
    from paredown.cli.budget import Budget
    from paredown.plan.explanation import UnpackedSlots

BLOCK, SQUARE = "\u2588", "\u25a0"
WIDTH, SHORTEST = 48, 10  # characters of the longest bar, and its least length on a narrow terminal
BESIDE = 16  # characters of a line beside its name and bar: the size, the mark at the budget, spaces
ESCAPE = re.compile(r"\x1b\[[\d;]*m")
WORKSPACE = "workspace"  # of cuBLAS and cuDNN
# Step time relative to the baseline, measured on one H200 (docs/benchmarks.md). Eager mode: GPT-2, ResNet-50 and ViT, 1.17 to 1.24 and
# 1.13 to 1.23; compiled: these and Llama, 1.08 to 1.13. The format of activations4 has not been measured there.
MEASURED_TIMES = {"activations8": "1.2x", "activations2": "1.2x"}
MEASURED_COMPILED_TIMES = {"activations8": "1.1x"}
COMPILED = "compiled"
SHOWN_MODULES = 10
SHOWN_NOTES = 5
SHOWN_BARS = 6
SHOWN_SLOTS = 3
ABSENT = ("step_seconds_reason", "device_seconds", "host_seconds", "model_bytes", "sent_bytes", "host_bytes")
LEAST_REASON = 100  # a reason is printed if its bytes are at least a hundredth of the peak
RED, GREEN, PLAIN = "\x1b[1;31m", "\x1b[1;32m", "\x1b[0m"


class BarSegment(NamedTuple):
    """A part of a printed bar of memory: its letter, colour and name, and the roles whose bytes it sums."""

    letter: str
    colour: int
    name: str
    keys: tuple[str, ...]


SEGMENTS = (
    BarSegment("W", 34, "weights", (Role.WEIGHT.value, Role.FROZEN.value, Role.RESIDUE.value, Role.MASTER.value)),
    BarSegment("G", 36, "gradients", (Role.GRADIENT.value,)),
    BarSegment("O", 35, "optimizer state", (Role.MOMENT1.value, Role.MOMENT2.value)),
    BarSegment("A", 33, "activations", (Role.ACTIVATION.value,)),
    BarSegment("I", 32, "inputs and buffers", (Role.INPUT.value, Role.BUFFER.value)),
    BarSegment("T", 37, "temporaries", (Role.TEMPORARY.value, Role.ERROR.value)),
    BarSegment("L", 90, "workspace of libraries", (WORKSPACE,)),
)


@dataclass(frozen=True)
class EstimateRow:
    """Holds the predicted memory and time of a training step under one plan; its fields are those of the JSON output."""

    plan: str
    peak_bytes: int
    low_bytes: int
    high_bytes: int
    fits: bool | None = None  # None: there is no budget
    largest_batch: int | None = None  # within the budget, with --batch auto
    by_role: Mapping[str, int] = field(default_factory=dict[str, int])
    at_peak: Mapping[str, int] = field(default_factory=dict[str, int])  # by role
    workspace_bytes: int = 0
    step_seconds: float | None = None
    step_seconds_reason: str | None = None  # why it is not predicted
    device_seconds: float | None = None
    host_seconds: float | None = None
    model_bytes: int | None = None  # of one process, if several train the model
    sent_bytes: int | None = None
    host_bytes: int | None = None  # of a plan that offloads
    by_module: Mapping[str, int] = field(default_factory=dict[str, int])
    at_peak_by_module: Mapping[str, int] = field(default_factory=dict[str, int])
    not_packed: tuple[UnpackedSlots, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return this row as a dict for JSON, without the fields that are None and only some steps have."""
        return {name: value for name, value in asdict(self).items() if value is not None or name not in ABSENT}

    @property
    def parts_at_peak(self) -> dict[str, int]:
        """Return the bytes at the peak by role (weight, activation, ...) and of libraries' workspaces; they sum to the peak."""
        return {**self.at_peak, **({WORKSPACE: self.workspace_bytes} if self.workspace_bytes else {})}

    @property
    def is_within(self) -> bool:
        """Return whether the step fits the budget; with --batch auto, whether any batch of it does."""
        return bool(self.fits if self.largest_batch is None else self.largest_batch)


def smallest(rows: Sequence[EstimateRow]) -> EstimateRow:
    """Return the row (the estimate under one plan) with the smallest peak."""
    return min(rows, key=lambda row: row.peak_bytes)


@dataclass(frozen=True)
class Adapters:
    """Counts layers with LoRA adapters, trained parameters, and all parameters."""

    layers: int
    trained_parameters: int
    parameters: int


@dataclass(frozen=True)
class EstimatedStep:
    """Holds what `paredown estimate` prints on a training step; its fields are those of the JSON output."""

    model: str
    device: str
    dtype: str
    optimizer: str
    compiled: bool
    batch_size: int
    batch: tuple[str, ...]
    assumed: tuple[str, ...]
    lora: Adapters | None
    checkpointed: tuple[str, ...]
    tile: int | None
    budget_bytes: int | None
    plans: tuple[EstimateRow, ...]
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the estimate as a dict for `paredown estimate --json`."""
        value = {**asdict(self), "plans": [row.to_json() for row in self.plans]}
        return {name: part for name, part in value.items() if part or name not in ("lora", "checkpointed", "tile")}

    @property
    def _device(self) -> str:
        return f"{self.device} {COMPILED}" if self.compiled else self.device

    def verdict(self, *, requested: bool) -> str:
        """Return a sentence on whether the step under one plan fits the budget, and if not, under which other plan it does.

        That plan is the baseline, or, if the user `requested` plans, the first of these that fits.
        """
        return verdict(self.plans, self.budget_bytes, requested=requested, device=self._device)

    def step_lines(self) -> list[str]:
        """Return lines that describe the traced step: model, device, dtype, optimizer, batch, adapters, assumptions."""
        where = f"{self._device.replace(' ', ', ')}, {self.dtype}, {self.optimizer or 'no optimizer'}, batch {self.batch_size}"
        lines = [f"One training step of {self.model} on {where}, predicted"]
        lines.append(f"Batch: {', '.join(text.partition(': ')[2] for text in self.batch)}.")
        if self.lora is not None:
            share = f"{self.lora.trained_parameters:,} of {self.lora.parameters:,} parameters are trained"
            lines.append(f"LoRA adapters on {self.lora.layers} weights, in the dtype of the base: {share}.")
        if layers := self.checkpointed:
            lines.append(f"Activation checkpointing: {len(layers)} layers, {layers[0]} to {layers[-1]}.")
        if self.tile is not None:
            lines.append(
                f"MLPs, norms and projections with adapters run over pieces of {self.tile} tokens; the baseline runs them whole."
            )
        return [*lines, *([f"Assumed: {', '.join(self.assumed)}."] if self.assumed else [])]

    def lines(self, budget: Budget | None, *, requested: bool) -> list[str]:
        """Return the lines that `paredown estimate` prints; `requested` says whether the user named the plans."""
        bars_shown = bars(self._rows_with_bars(requested=requested), self.budget_bytes, in_colour=has_colour())
        step, *details = self.step_lines()
        head = [styled_verdict(self.verdict(requested=requested)), "", *bars_shown, "", heading(step), *details]
        head += [] if budget is None else [f"The budget is {budget.say(self.budget_bytes or 0)}."]
        untimed = [row.step_seconds_reason for row in self.plans if row.step_seconds is None]
        reasons = [*_reasons(self.plans), *([f"Step time: not predicted, {untimed[0]}"] if untimed else [])]
        notes = [f"note: {note}" for note in self.notes[:SHOWN_NOTES]]
        return [*head, "", *_tables(self.plans, self.budget_bytes), *(["", *reasons] if reasons else []), *notes]

    def _rows_with_bars(self, *, requested: bool) -> Sequence[EstimateRow]:
        """Return the rows with bars: the first ones, or with a budget and no `requested` plans the baseline and one that fits."""
        if requested or self.budget_bytes is None:
            return self.plans[:SHOWN_BARS]
        first = self.plans[0]
        other = next((row for row in self.plans if row.fits), smallest(self.plans))
        return (first,) if other is first else (first, other)


# --- whether it fits ---------------------------------------------------------------------------------------------------


def verdict(rows: Sequence[EstimateRow], allowed: int | None, *, requested: bool, device: str) -> str:
    """Return a sentence on whether the step fits `allowed` bytes under the first plan, or, if `requested`, under any.

    With `requested`, the user named the plans. The sentence names another plan that fits if the first does not; without a budget
    (None), it says what the step needs. `device` selects the measured step times of presets that it quotes.
    """
    if allowed is None:
        span = f"{_size(rows[0])} ({say_bytes(rows[0].low_bytes)} to {say_bytes(rows[0].high_bytes)})"
        return f"Needs {span}.{_smaller(rows, device)}"
    if rows[0].largest_batch is not None:
        sizes = ", ".join(f"{row.largest_batch or 'none'} ({row.plan})" for row in rows)
        return f"Largest batch within {say_bytes(allowed)}: {sizes}."
    fitting = [row for row in rows if row.fits]
    judged = fitting[0] if requested and fitting else rows[0]
    of = _share(judged.peak_bytes, allowed)
    of += f", and {say_bytes(judged.host_bytes)} in host memory" if judged.host_bytes else ""
    if judged.fits:
        tight = f"; at most {say_bytes(judged.high_bytes)}" if judged.high_bytes > allowed else ""
        return f"{_begin(judged, 'fits')}: {of}{tight}."
    if fitting:
        other = f"{_begin(fitting[0], 'fits')}: {_size(fitting[0])}{_time(fitting[0], rows, device)}"
        return f"{_begin(judged, 'does not fit')}: {of}. {other}."
    least = smallest(rows)
    more = f" No plan here fits; the smallest, {least.plan}, needs {_size(least)}." if least is not judged else ""
    return f"{_begin(judged, 'does not fit')}: {of}.{more}"


def _begin(row: EstimateRow, words: str) -> str:
    return words[0].upper() + words[1:] if row.plan == BASELINE else f"{row.plan} {words}"


def _share(nbytes: int, allowed: int) -> str:
    """Return a peak (`nbytes`) and a budget (`allowed`, in bytes) as text, such as "13.20 of 11.20 GiB"."""
    (number, unit), (other, other_unit) = say_bytes(nbytes).split(), say_bytes(allowed).split()
    return f"{number} of {other} {unit}" if unit == other_unit else f"{number} {unit} of {other} {other_unit}"


def _size(row: EstimateRow) -> str:
    return say_bytes(row.peak_bytes)


def _smaller(rows: Sequence[EstimateRow], device: str) -> str:
    """Return a sentence on the plan with the smallest peak and its step time on `device`; "" if it is the first row's."""
    least = smallest(rows)
    return "" if least.peak_bytes >= rows[0].peak_bytes else f" {least.plan} needs {_size(least)}{_time(least, rows, device)}."


def _time(row: EstimateRow, rows: Sequence[EstimateRow], device: str) -> str:
    """Return words on a plan's step time relative to the baseline's: predicted, or measured on `device`; "" if unknown."""
    before, after = rows[0].step_seconds, row.step_seconds
    if before and after and rows[0].plan == BASELINE:
        return f", {after / before:.2f}x time predicted"
    times = {"cuda": MEASURED_TIMES, f"cuda {COMPILED}": MEASURED_COMPILED_TIMES}.get(device, {})
    time = times.get(row.plan)
    return "" if time is None else f", about {time} time"


# --- bars ------------------------------------------------------------------------------------------------------------


def has_colour() -> bool:
    """Return whether stdout is a terminal that may get colours and block characters."""
    is_plain = bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") == "dumb"
    return sys.stdout.isatty() and not is_plain and "utf" in (sys.stdout.encoding or "").lower()


def styled_verdict(text: str) -> str:
    """Return the verdict, in green or red on a terminal."""
    if not has_colour() or text.startswith(("Needs", "Largest")):
        return text
    colour = RED if "not fit" in text.partition(":")[0] else GREEN
    return Styled(f"{colour}{clean(text)}{PLAIN}")


def bars(rows: Sequence[EstimateRow], allowed: int | None, *, in_colour: bool, columns: int | None = None) -> list[str]:
    """Return lines with a bar of memory for each plan, all to one scale, and a legend; `allowed` bytes, the budget, are marked.

    `columns` is the width of the terminal; with None, bars have their full width.
    """
    longest = max([row.peak_bytes for row in rows] + ([allowed] if allowed and not all(row.fits for row in rows) else []))
    names = [clean(row.plan) for row in rows]
    width = max(map(len, names))
    length = WIDTH if columns is None else max(SHORTEST, min(WIDTH, columns - width - BESIDE))
    mark_at = round(allowed / longest * length) if allowed is not None and allowed <= longest else None
    segments = [_segments(row, length / longest) for row in rows]
    lines = [
        f"{name:<{width}}  {_bar(parts, mark_at, length, in_colour=in_colour)}  {_size(row)}"
        for name, parts, row in zip(names, segments, rows, strict=True)
    ]
    shown = [part for part in SEGMENTS if any(part in parts for parts in segments)]
    legend = [f"{_drawn(part, SQUARE, in_colour=in_colour)} {part.name}" for part in shown]
    legend += [f"| budget {say_bytes(allowed)}"] if allowed is not None and mark_at is not None else []
    return [Styled(line) for line in (*lines, *_legend(legend, width + 2, columns, separator="  " if in_colour else ", "))]


def _legend(parts: Sequence[str], indent: int, columns: int | None, *, separator: str) -> list[str]:
    """Return the legend: `parts` joined by `separator`, in indented lines of up to `columns` characters; None: in one line."""
    lines: list[str] = []
    for part in parts:
        longer = f"{lines[-1]}{separator}{part}" if lines else ""
        if longer and (columns is None or len(ESCAPE.sub("", longer)) <= columns):
            lines[-1] = longer
        else:
            lines.append(" " * indent + part)
    return lines


def _segments(row: EstimateRow, scale: float) -> list[BarSegment]:
    """Return the BarSegment (weights, activations, ...) of each character in a plan's bar; `scale` is characters per byte."""
    drawn: list[BarSegment] = []
    parts, total = row.parts_at_peak, 0
    for part in SEGMENTS:
        total += sum(parts.get(key, 0) for key in part.keys)
        drawn += [part] * (round(total * scale) - len(drawn))
    return drawn


def _drawn(part: BarSegment, block: str, *, in_colour: bool) -> str:
    return f"\x1b[{part.colour}m{block}{PLAIN}" if in_colour else part.letter


def _bar(parts: Sequence[BarSegment], mark_at: int | None, length: int, *, in_colour: bool) -> str:
    """Return a bar of `length` characters, one for each of `parts`, with the budget's mark at `mark_at` unless it is None."""
    cells = [*(_drawn(part, BLOCK, in_colour=in_colour) for part in parts), *" " * (length + 1 - len(parts))]
    if mark_at is not None:
        cells.insert(mark_at, "|")
    return "".join(cells)


# --- tables ---------------------------------------------------------------------------------------------------------


def _tables(rows: Sequence[EstimateRow], allowed: int | None) -> list[str]:
    names = [row.plan for row in rows]
    peaks = ("peak", *(say_bytes(row.peak_bytes) for row in rows))
    lines = table(("at the peak, by role", *names), [*_by([row.parts_at_peak for row in rows]), peaks])
    lines += ["", *table(("at the peak, by module", *names), [*_by_module(rows), peaks])]
    return [*lines, "", *table(("whole step", *names), _totals(rows, allowed))]


def _by(parts: Sequence[Mapping[str, int]]) -> list[tuple[str, ...]]:
    keys = list(dict.fromkeys(key for row in parts for key in row))
    return [(key or "(the model itself)", *(say_bytes(row.get(key, 0)) for row in parts)) for key in keys]


def _by_module(rows: Sequence[EstimateRow]) -> list[tuple[str, ...]]:
    by_module = [row.at_peak_by_module for row in rows]
    keys = list(dict.fromkeys(key for row in by_module for key in row))
    largest = [{key: row[key] for key in keys[:SHOWN_MODULES] if key in row} for row in by_module]
    more: list[tuple[str, ...]] = []
    if num := len(keys[SHOWN_MODULES:]):
        rest = [sum(row.values()) - sum(some.values()) for row, some in zip(by_module, largest, strict=True)]
        more.append((f"{num} other module{'s' * (num != 1)}", *map(say_bytes, rest)))
    if any(row.workspace_bytes for row in rows):
        more.append((WORKSPACE, *(say_bytes(row.workspace_bytes) for row in rows)))
    return [*_by(largest), *more]


def _totals(rows: Sequence[EstimateRow], allowed: int | None) -> list[tuple[str, ...]]:
    def sizes(name: str, nbytes: Callable[[EstimateRow], int | None]) -> tuple[str, ...]:
        return name, *(say_bytes(nbytes(row) or 0) for row in rows)

    lines = [sizes("peak", lambda row: row.peak_bytes), sizes("at least", lambda row: row.low_bytes)]
    lines.append(sizes("at most", lambda row: row.high_bytes))
    if rows[0].sent_bytes is not None:
        lines.append(sizes("sent by a process", lambda row: row.sent_bytes))
    lines.append(sizes("activations stored for backward", lambda row: row.by_role.get("activation")))
    if any(row.host_bytes is not None for row in rows):
        lines.append(sizes("in host memory", lambda row: row.host_bytes))
    if allowed is not None:
        lines.append((f"fits {say_bytes(allowed)}", *("yes" if row.fits else "no" for row in rows)))
    if any(row.step_seconds is not None for row in rows):
        lines.append(("step time", *("-" if row.step_seconds is None else f"{1e3 * row.step_seconds:.1f} ms" for row in rows)))
    if rows[0].largest_batch is not None:
        lines.append(("largest batch", *(str(row.largest_batch) for row in rows)))
    return lines


def _reasons(rows: Sequence[EstimateRow]) -> list[str]:
    lines: dict[str, list[str]] = {}
    for row in rows:
        for group in row.not_packed:
            if LEAST_REASON * group.nbytes >= row.peak_bytes:
                slots = group.slots
                names = ", ".join(slots[:SHOWN_SLOTS]) + (", ..." if len(slots) > SHOWN_SLOTS else "")
                what = f"{group.role.value} {say_bytes(group.nbytes)} in {len(slots)} slot{'s' * (len(slots) > 1)} ({names})"
                lines.setdefault(f"{what}: {group.why}.", []).append(row.plan)
    return [f"Not packed under {', '.join(plans)}: {line}" for line, plans in lines.items()]


# --- groups of modules -------------------------------------------------------------------------------------------------

NUMBER = re.compile(r"(?<![^.])[0-9]+(?![^.])")  # a part of a path that is a number
MOST_GROUPS = 10  # of groups with numbers


class Grouping(NamedTuple):
    """Groups modules by the first `depth` parts of their paths; with `joins_layers`, layers.0 and layers.1 are layers.*."""

    depth: int
    joins_layers: bool = False

    def name(self, module: str) -> str:
        """Return the name of the group to which the module with the path `module` belongs."""
        path = ".".join(module.split(".")[: self.depth])
        return NUMBER.sub("*", path) if self.joins_layers else path

    def sums(self, sizes: Mapping[str, int]) -> dict[str, int]:
        """Return the bytes of each group, the largest first; `sizes` has those of each module."""
        sums: Counter[str] = Counter()
        for module, nbytes in sizes.items():
            sums[self.name(module)] += nbytes
        return dict(sums.most_common())


def useful_grouping(sizes: Mapping[str, int]) -> Grouping:
    """Return the grouping by the fewest path parts in which no group has more than half of the bytes; `sizes` are bytes by module.

    If there is none, return the one whose largest group is smallest. Where a network repeats layers, their numbers are left out, so that
    32 layers are one row for each of their parts:

    >>> sizes = {f"model.layers.{i}.{part}": 10 for i in range(32) for part in ("attn", "mlp")} | {"model.embed": 5, "head": 5}
    >>> useful_grouping(sizes).sums(sizes)
    {'model.layers.*.attn': 320, 'model.layers.*.mlp': 320, 'model.embed': 5, 'head': 5}
    >>> useful_grouping({"conv1": 3, "layer1.0.conv": 4, "layer1.1.conv": 1, "layer2.0.conv": 4}).depth
    1
    """
    half, deepest = sum(sizes.values()) / 2, max((module.count(".") + 1 for module in sizes), default=1)
    largest: dict[Grouping, int] = {}
    for grouping in (Grouping(depth, joins) for depth in range(1, deepest + 1) for joins in (False, True)):
        groups = grouping.sums(sizes)
        if grouping.joins_layers or len(groups) <= MOST_GROUPS:
            largest[grouping] = max(groups.values(), default=0)
            if largest[grouping] <= half:
                return grouping
    return min(largest, key=lambda grouping: largest[grouping])
