"""The tables of docs/benchmarks.md, from results/*.json alone: the newest row of each job and way.

python benchmarks/tables.py             # print them
python benchmarks/tables.py --write     # put them into the page, between its marks
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
PAGE = Path(__file__).parent.parent / "docs" / "benchmarks.md"
MARKS = re.compile(r"(<!-- table (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
GIB = 2**30
WORDS = {
    "checkpointing": "activation checkpointing",
    "by hand": "an eager loop",
}  # names in results: names on the page


def newest(name: str, keys: tuple[str, ...]) -> dict[tuple[Any, ...], dict[str, Any]]:
    """Rows by those of their fields, later runs of the file over earlier ones, with the commit that they were measured at."""
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for run in json.loads((RESULTS / f"{name}.json").read_text()):
        for row in run.get("rows", ()):
            found[tuple(row.get(key) for key in keys)] = {**row, "commit": run["commit"], "device": run["device"]}
    return found


def markdown(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """A table."""
    return "".join(f"| {' | '.join(row)} |\n" for row in (head, ("---",) * len(head), *rows))


def activations() -> str:
    """Peaks and times of training steps whose activations are packed."""
    rows = [
        row for (job, _, _), row in newest("session", ("job", "way", "size")).items() if "largest" not in job and not row["error"]
    ]
    cells = [
        (row["job"], WORDS.get(row["way"], row["way"]),
         f"{row['peak_bytes'] / GIB:.2f}", f"{row['predicted_peak_bytes'] / GIB:.2f}" if row["predicted_peak_bytes"]
         else "", f"{row['peak_ratio']:.2f}x", f"{1e3 * row['median_seconds']:.1f}", f"{row['time_ratio']:.2f}x", row["commit"])
        for row in sorted(rows, key=lambda row: row["job"])
    ]  # fmt: skip
    return markdown(("step", "storage of activations", "peak, GiB", "predicted", "x baseline", "ms", "x baseline", "commit"), cells)


def optimizers() -> str:
    """Bytes per parameter and time of one optimizer step over GPT-2 medium's 292 tensors."""
    rows = {way: row for (job, way), row in newest("optim", ("job", "way")).items() if job == "355M" and not row.get("error")}
    cells = [
        (way, f"{row['bytes_per_parameter']:.2f}", f"{1e3 * row['median_seconds']:.2f}" if row.get("median_seconds") else "in backward",
         row["commit"])
        for way, row in rows.items()
    ]  # fmt: skip
    return markdown(("355 M parameters", "bytes per parameter", "ms", "commit"), cells)


def footprints() -> str:
    """Predicted peaks against measured ones: the largest errors over all plans."""
    by_job: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for (job, _, size), row in newest("footprint", ("job", "way", "size")).items():
        by_job.setdefault((job, size), []).append(row)
    cells: list[tuple[str, ...]] = []
    for (job, size), rows in sorted(by_job.items()):
        worst = max((row["predicted_peak_bytes"] / row["measured_peak_bytes"] - 1 for row in rows), key=abs)
        cells.append((job, str(size), str(len(rows)), f"{worst:+.1%}", rows[0]["commit"]))
    return markdown(("network", "batch", "plans", "predicted against measured, at worst", "commit"), cells)


def sweeps() -> str:
    """Simulated trainings a minute."""
    rows = newest("sweep", ("way", "width")).values()
    cells = [
        (
            WORDS.get(row["way"], row["way"]),
            str(row["width"]),
            str(row["steps"]),
            f"{row['trials_per_minute']:.1f}",
            f"{row['ms_per_step']:.2f}",
            row["commit"],
        )
        for row in rows
    ]
    return markdown(("way", "width of ResNet-18", "steps of a trial", "trials per minute", "ms per step", "commit"), cells)


def planning() -> str:
    """Seconds of tracing, planning and probing, and of the store."""
    rows = [*newest("plan", ("job", "who")).values(), *newest("store", ("job", "who")).values()]
    cells = [(row["job"], row["who"], row["device"], f"{row['median_seconds']:.4f}", row["commit"]) for row in rows]
    return markdown(("job", "of", "on", "seconds", "commit"), cells)


TABLES: dict[str, Callable[[], str]] = {
    made.__name__: made for made in (activations, optimizers, footprints, sweeps, planning)
}  # the names that the page's marks have


def filled(page: str) -> str:
    """The page with its tables as the results have them now."""
    return MARKS.sub(lambda mark: f"{mark[1]}{TABLES[mark[2]]()}{mark[3]}", page)


def main() -> None:
    """Print or write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    if parser.parse_args().write:
        PAGE.write_text(filled(PAGE.read_text()))
    else:
        print("\n".join(make() for make in TABLES.values()))


if __name__ == "__main__":
    main()
