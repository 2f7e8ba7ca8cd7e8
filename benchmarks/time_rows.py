"""Rows of bench_time.py: their ratios, the line of a row, and the summary of all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from loops import gib

WITHIN, PEAK_WITHIN = 0.15, 0.05
TITLE = (
    "peak GiB of budget (predicted); ms: median, p20, p80, host | predicted: step, device, host, at a small step over that of the "
    "calibration; ratios: timed operations, rates, host as calibrated at the start, relative to the baseline; ratio to the "
    "quickest way without formats in the budget"
)


@dataclass(frozen=True)
class Row:
    """One way of one network. `ratio`: predicted to measured seconds, with timed operations; `against_ratio`: to those of `against`.

    `host_speed`: seconds of a small step beside the way's turns over those at calibration; `ratio_at_start`: `ratio` without it;
    `relative_ratio`: `ratio` over the baseline's; `against_ratio` is the median over rounds.
    """

    job: str
    way: str
    size: int
    num_layers: int = 0
    num_checkpointed: int = 0
    budget_bytes: int | None = None
    peak_bytes: int | None = None
    predicted_peak_bytes: int | None = None
    bound_bytes: int | None = None  # the predicted peak with its margin
    reserved_bytes: int | None = None
    median_seconds: float | None = None
    p20_seconds: float | None = None
    p80_seconds: float | None = None
    host_seconds: float | None = None
    predicted_seconds: float | None = None
    predicted_device_seconds: float | None = None
    predicted_host_seconds: float | None = None
    predicted_seconds_by_rates: float | None = None
    predicted_seconds_at_start: float | None = None
    ratio: float | None = None
    ratio_by_rates: float | None = None
    host_speed: float | None = None
    ratio_at_start: float | None = None
    relative_ratio: float | None = None
    kernel_seconds: float | None = None
    small_step_seconds: float | None = None
    against: str = ""
    against_ratio: float | None = None
    is_slower: bool = False
    is_over: bool = False
    last_loss: float | None = None
    optimizer: str = ""
    num_timed: int = 0  # operations
    empty_operation_seconds: float | None = None
    reason: str = ""
    error: str | None = None


def with_ratios(row: Row) -> Row:
    """The row with predicted over measured seconds."""
    predicted = {"ratio": row.predicted_seconds, "ratio_by_rates": row.predicted_seconds_by_rates}
    predicted |= {"ratio_at_start": row.predicted_seconds_at_start}
    assert row.median_seconds is not None
    return replace(row, **{name: (seconds or 0.0) / row.median_seconds for name, seconds in predicted.items()})


def beside_baseline(row: Row, plain: Row | None) -> Row:
    """The measured row with its ratio relative to the baseline of its network, if that was measured."""
    return row if plain is None or not plain.ratio or row.ratio is None else replace(row, relative_ratio=row.ratio / plain.ratio)


def summary(rows: Sequence[Row]) -> str:
    """How many predictions hold, the worst of each network, and which plans are slower than checkpointing or above their budget."""
    off = {(row.job, row.way): row.ratio - 1 for row in rows if row.ratio is not None}
    worst = {job: max((pair for pair in off.items() if pair[0][0] == job), key=lambda pair: abs(pair[1])) for job, _ in off}
    texts = [f"{job} {value:+.0%} ({way})" for job, ((_, way), value) in worst.items()]
    within = sum(abs(value) <= WITHIN for value in off.values())
    others = {"with the host as calibrated at the start": "ratio_at_start", "relative to the baseline": "relative_ratio"}
    peaks = {(row.job, row.way): (row.predicted_peak_bytes or 0) / row.peak_bytes - 1 for row in rows if row.peak_bytes}
    close = sum(abs(value) <= PEAK_WITHIN for value in peaks.values())
    far = [f"{job} {way} {value:+.1%}" for (job, way), value in peaks.items() if abs(value) > PEAK_WITHIN]
    compared = [row for row in rows if row.against]
    lines = [
        f"{within} of {len(off)} predicted times within {WITHIN:.0%}; the worst of each network: {', '.join(texts)}",
        "; ".join(f"{text}: {_num_within(rows, name)}" for text, name in others.items()),
        f"{close} of {len(peaks)} predicted peaks within {PEAK_WITHIN:.0%}; others: {', '.join(far) or 'none'}",
        f"{sum(row.is_slower for row in compared)} of {len(compared)} plans slower than what they are compared with: "
        + (", ".join(f"{row.job} {row.way} {row.against_ratio:.3f}x" for row in compared if row.is_slower) or "none"),
        "above their budgets: " + (", ".join(f"{row.job} {row.way}" for row in rows if row.is_over) or "none"),
    ]
    return "\n".join(lines)


def _num_within(rows: Sequence[Row], name: str) -> str:
    values: list[float] = [value for row in rows if (value := getattr(row, name)) is not None]
    return f"{sum(abs(value - 1) <= WITHIN for value in values)} of {len(values)} within {WITHIN:.0%}"


def line(row: Row) -> str:
    """One line of the table."""
    head = f"{row.job:16s} {row.way:36s} {row.num_checkpointed:2d} of {row.num_layers:2d} layers"
    if row.error or row.ratio is None or row.ratio_by_rates is None:
        return f"{head}  {row.error}"
    ms = lambda *seconds: " ".join("      -" if one is None else f"{1e3 * one:7.1f}" for one in seconds)  # noqa: E731
    predicted = ms(row.predicted_seconds, row.predicted_device_seconds, row.predicted_host_seconds)
    spread = ms(row.median_seconds, row.p20_seconds, row.p80_seconds, row.host_seconds)
    off = f" {(row.predicted_peak_bytes or 0) / row.peak_bytes - 1:+.1%}" if row.peak_bytes else ""
    budget = "" if row.budget_bytes is None else f" of {gib(row.budget_bytes)}{' OVER' * row.is_over}"
    beside = "".join("      -" if one is None else f" {one:5.2f}x" for one in (row.ratio_at_start, row.relative_ratio))
    against = f"  {row.against_ratio:.3f}x of {row.against}{' SLOWER' * row.is_slower}" if row.against_ratio is not None else ""
    peaks = f"{gib(row.peak_bytes)}{budget} ({gib(row.predicted_peak_bytes)}{off})"
    speed = "" if row.host_speed is None else f" at {row.host_speed:4.2f}"
    return f"{head} {peaks} {spread} | {predicted}{speed} {row.ratio:5.2f}x {row.ratio_by_rates:5.2f}x{beside}{against}"
