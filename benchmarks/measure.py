"""What the benchmarks share: timing, what the machine is, and rows of results.

A row says what was measured (job, shape, bytes moved), on what (device, versions, commit) and the median, 20th and 80th percentile of the
seconds of one call. Rows are appended to a JSON file, one run after the other.
"""

from __future__ import annotations

import json
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

import torch

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Row:
    """One measurement. `bytes_moved`: what the job must read and write at least."""

    job: str
    who: str
    shape: tuple[int, ...]
    bytes_moved: int
    median_seconds: float
    p20_seconds: float
    p80_seconds: float

    @property
    def bytes_per_second(self) -> float:
        """Bandwidth, by the bytes that had to move."""
        return self.bytes_moved / self.median_seconds


def time_call(call: Callable[[], object], device: str, *, repeats: int = 15, calls: int = 8) -> tuple[float, float, float]:
    """Median, 20th and 80th percentile of the seconds of one call.

    On a GPU, `calls` calls are queued between two events, so that the time to launch them does not count unless it is longer than
    they run; on a CPU each call is timed.
    """
    seconds = _cuda_seconds(call, repeats, calls) if device == "cuda" else _cpu_seconds(call, repeats)
    p20, _, _, p80 = statistics.quantiles(seconds, n=5)
    return statistics.median(seconds), p20, p80


def _cuda_seconds(call: Callable[[], object], repeats: int, calls: int) -> list[float]:
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    seconds: list[float] = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(calls):
            call()
        end.record()
        torch.cuda.synchronize()
        seconds.append(start.elapsed_time(end) / 1e3 / calls)
    return seconds


def _cpu_seconds(call: Callable[[], object], repeats: int) -> list[float]:
    call()
    seconds: list[float] = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return seconds


def machine(device: str, packages: tuple[str, ...], commit: str | None = None) -> dict[str, object]:
    """Where a run was made: commit (asked from git unless given), device, threads and versions."""
    name = torch.cuda.get_device_name() if device == "cuda" else f"{platform.machine()} CPU"
    return {
        "commit": commit or _commit(),
        "device": name,
        "threads": torch.get_num_threads(),
        "versions": {p: version(p) for p in packages},
    }


def append(file: str, where: dict[str, object], rows: list[Row], folder: Path = RESULTS) -> None:
    """Add a run to `file` in the folder of results."""
    path = folder / file
    runs = json.loads(path.read_text()) if path.exists() else []
    runs.append({**where, "rows": [asdict(row) for row in rows]})
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(runs, indent=1) + "\n")


def version(package: str) -> str | None:
    """The version of a package; None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _commit() -> str:
    try:
        return subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
