"""The benchmark of compiled steps: which rows it measures, which of them at the same time, what it keeps, and its tables."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import tables
from paredown import footprint, trace_step

FOLDER = Path(__file__).parent.parent / "benchmarks"
LONG = 600.0  # seconds that no process here needs
# Replies as compile_worker.py does, and writes down when it is ready and when it takes its times.
WORKER = """
import json, sys
name, journal = sys.argv[1:]
def note(what):
    with open(journal, "a") as file:
        file.write(f"{what} {name}\\n")
note("ready")
print(json.dumps({"ready": True}), flush=True)
assert sys.stdin.readline() == "go\\n"
note("begin")
print(json.dumps({"last_loss": len(name)}), flush=True)
sys.stdin.read()
"""
FAILS = "import sys; sys.exit('no such network')"
HANGS = "import time; time.sleep(3600)"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")  # what the command line sets: put back after the test
    import bench_compile  # type: ignore[import-not-found]

    yield bench_compile
    for name in set(sys.modules) - before:
        if (getattr(sys.modules[name], "__file__", None) or "").startswith(f"{FOLDER}/"):
            del sys.modules[name]


def names(cells: Sequence[Any]) -> list[str]:
    return [cell.name for cell in cells]


def test_rows_are_selected_by_name(bench: Any) -> None:
    assert names(bench.selected("gpt2:int8, toy:eager-int4,gpt2:int8", ["steps"])) == ["gpt2:int8", "toy:eager-int4"]
    assert len(bench.selected("llama", ["losses"])) == 7, "all ways of a job"
    everything = names(bench.selected(None, ["steps"]))
    assert len(everything) == 5 * 7 and everything[:2] == ["resnet50:compiled", "resnet50:budget=0.8"]
    assert {name.split(":")[0] for name in names(bench.selected(None, ["losses", "largest"]))} == {
        *("resnet18-losses", "gpt-losses", "resnet50-largest"),
    }
    assert names(bench.selected(None, ["steps"], ["vit_b_16"])) == [name for name in everything if name.startswith("vit")]
    with pytest.raises(SystemExit, match="'gpt3'"):
        bench.selected("gpt3:int8", ["steps"])


def test_names_of_ways(bench: Any) -> None:
    parse = bench.Way.parse
    found = [parse(name) for name in ("compiled", "eager", "int4", "eager-int8", "budget=0.3", "int8+budget=0.6")]
    assert [way.is_eager for way in found] == [False, True, False, True, False, False]
    assert [way.bits for way in found] == [None, None, "int4", "int8", None, "int8"]
    assert [way.budget for way in found] == [None, None, None, None, 0.3, 0.6]
    assert [parse(name).fit for name in ("fit=6.6", "fit=12", "int8")] == [6.6, 12.0, None]
    for wrong in ("int3", "int8+int4", "budget=2", "", "compiled-eager", "fit=", "int8+fit=3"):
        with pytest.raises(ValueError, match="no way to run a step"):
            parse(wrong)


@pytest.mark.parametrize(("num_jobs", "limit"), [(1, 130), (3, 130), (6, 130), (6, 40), (28, 60), (4, 1)])
def test_rows_prepared_at_the_same_time_fit(bench: Any, num_jobs: int, limit: float) -> None:
    cells = bench.selected(None, ["steps", "losses", "largest"])
    found = bench.batches(cells, num_jobs, limit)
    assert [cell for batch in found for cell in batch] == cells, "each once, in their order"
    for batch in found:
        assert len(batch) == 1 or sum(cell.gib for cell in batch) <= limit
        assert len(batch) <= num_jobs and len({cell.case.kind for cell in batch}) == 1
    for batch, after in pairwise(found):
        is_longer_allowed = len(batch) < num_jobs and sum(cell.gib for cell in (*batch, after[0])) <= limit
        assert not is_longer_allowed or batch[0].case.kind != after[0].case.kind, "no batch ends early"


def test_times_are_taken_one_after_the_other_once_all_are_ready(bench: Any, tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    commands = {name: [sys.executable, "-c", WORKER, name, str(journal)] for name in ("a", "bb", "ccc")}
    commands["fails"] = [sys.executable, "-c", FAILS]
    journals: dict[str, list[str]] = {}
    replies: dict[str, Any] = {}
    for name, reply in bench.run_batch(commands, tmp_path / "runs", LONG):
        replies[name], journals[name] = reply, journal.read_text().splitlines()
    assert [replies[name] for name in ("a", "bb", "ccc")] == [{"last_loss": 1}, {"last_loss": 2}, {"last_loss": 3}]
    assert "status 1" in replies["fails"]["error"] and "no such network" in replies["fails"]["error"]
    assert sorted(journals["a"][:3]) == ["ready a", "ready bb", "ready ccc"]
    assert [journals[name][3:] for name in ("a", "bb")] == [["begin a"], ["begin a", "begin bb"]], "the next begins later"


def test_a_process_that_is_ready_twice_runs_again_after_the_times_of_all_others(bench: Any, tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    twice = WORKER.replace(
        'note("begin")', 'note("first"); print(json.dumps({"ready": True}), flush=True); sys.stdin.readline(); note("begin")'
    )
    commands = {
        name: [sys.executable, "-c", code, name, str(journal)] for name, code in (("a", twice), ("bb", WORKER), ("ccc", twice))
    }
    assert [name for name, _ in bench.run_batch(commands, tmp_path / "runs", LONG)] == ["bb", "a", "ccc"]
    assert journal.read_text().splitlines()[3:] == ["first a", "begin bb", "first ccc", "begin a", "begin ccc"]


def test_a_process_beyond_the_limit_is_killed(bench: Any, tmp_path: Path) -> None:
    [(name, reply)] = bench.run_batch({"late": [sys.executable, "-c", HANGS]}, tmp_path / "runs", 0.2)
    assert name == "late" and reply["error"].startswith("killed after 0.2 s")


def test_caches_are_empty_and_apart(bench: Any, tmp_path: Path) -> None:
    script = "import json, os; print(json.dumps({k: os.environ[k] for k in ('TORCHINDUCTOR_CACHE_DIR', 'TRITON_CACHE_DIR')}))"
    command = [sys.executable, "-c", script]
    replies = [reply for _, reply in bench.run_batch({"a": command, "b": command}, tmp_path / "runs", LONG)]
    folders = [folder for reply in replies for folder in reply.values()]
    assert len(set(folders)) == 4 and all(folder.startswith(str(tmp_path)) for folder in folders)


def row(bench: Any, way: str, **fields: Any) -> Any:
    return bench.Row("toy", way, size=16, p20_seconds=0.1, p80_seconds=0.3, compile_seconds=2.0, **fields)


def fake_measure(bench: Any, asked: list[str], stop_after: int) -> Any:
    """Stands for `measure`: writes down what it is asked for, and is interrupted after some rows."""

    def measure(cells: Sequence[Any], device: str, options: Any, rows: Any) -> Iterator[Any]:
        for number, cell in enumerate(cells):
            if number == stop_after:
                raise KeyboardInterrupt
            asked.append(cell.name)
            error = "ValueError: no" if cell.way == "int4" else None
            yield row(bench, cell.way, median_seconds=0.2 if cell.way == "compiled" else 0.3, peak_bytes=2**30, error=error)

    return measure


def test_a_run_that_was_interrupted_measures_the_rest(
    bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[str] = []

    def run(*more: str, commit: str = "abc", stop_after: int = 99) -> list[str]:
        asked.clear()
        monkeypatch.setattr(bench, "measure", fake_measure(bench, asked, stop_after))
        monkeypatch.setattr(sys, "argv", ["bench_compile.py", "--quick", "--commit", commit, "--out", str(tmp_path), *more])
        bench.main()
        return [name.removeprefix("toy:") for name in asked]

    with pytest.raises(KeyboardInterrupt):
        run(stop_after=1)
    assert asked == ["toy:compiled"]
    assert run() == ["int8", "int4", "eager"]
    assert "1.500x" in capsys.readouterr().out, "the ratio of int8 to a row of the run before"
    assert run() == []
    assert run("--retry") == ["int4"], "the row with an error"
    assert run("--only", "toy:int8,toy:eager-int8") == ["eager-int8"]
    assert run("--no-resume") == ["compiled", "int8", "int4", "eager"] == run(commit="def")
    runs = json.loads((tmp_path / "compile.json").read_text())
    assert [(run["commit"], len(run["rows"])) for run in runs] == [
        *(("abc", 1), ("abc", 3), ("abc", 1), ("abc", 1), ("abc", 4), ("def", 4)),
    ]
    assert {"device", "versions", "threads"} <= runs[0].keys()


def test_rows_of_other_commits_and_devices_do_not_count(bench: Any) -> None:
    def run(commit: str, device: str, **rows: str | None) -> dict[str, Any]:
        return {
            "commit": commit,
            "device": device,
            "rows": [{"job": "toy", "way": way, "error": error} for way, error in rows.items()],
        }

    runs = [run("a", "x", int8=None, int4="lost"), run("a", "x", int8="lost"), run("b", "x", eager=None), run("a", "y", eager=None)]
    found = bench.measured(runs, "a", "x")
    assert {way: row["error"] for (_, way), row in found.items()} == {"int8": None, "int4": "lost"}


@pytest.mark.parametrize(("fixed", "slope", "bend"), [(400, 41, 0.0), (0, 10, 0.0), (1200, 15, 0.004), (700, 52, -0.004)])
def test_the_search_finds_the_largest_batch(bench: Any, fixed: int, slope: int, bend: float) -> None:
    """Against all multiples of 32, on lines and on slightly bent curves."""
    from compile_worker import next_size  # type: ignore[import-not-found]

    def peak(size: int) -> int:
        return int(fixed + slope * size + bend * size * size)

    limit = 16_384
    peaks = {0: fixed // 2, 256: peak(256)}  # what is known before the first batch is a guess
    while (size := next_size(peaks, limit)) is not None:
        assert size not in peaks and size % 32 == 0
        peaks[size] = peak(size)
    expected = max(size for size in range(32, 4096, 32) if peak(size) < limit)
    assert max(size for size, found in peaks.items() if found < limit) == expected
    assert len(peaks) <= 5, "each of them is compiled"


def test_tables_of_compiled_steps(bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = [tables.compiled, tables.compiled_losses, tables.compiled_largest]
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    assert [make() for make in made] == ["", "", ""], "nothing before there are results"

    def rows(*found: dict[str, Any]) -> list[dict[str, Any]]:
        return [{**vars(bench.Row("vit", "compiled")), "p20_seconds": 0.1, "p80_seconds": 0.3, **one} for one in found]

    timed = {"median_seconds": 0.2, "peak_bytes": 2**31, "compile_seconds": 60.0}
    packed = {"way": "int8", "median_seconds": 0.25, "peak_bytes": 2**30, "predicted_bytes": 3 * 2**29, "compile_seconds": 70.0}
    largest = [
        {"job": "vit-largest", "kind": "largest", "way": way, "size": size, "limit_bytes": 2**34, **timed}
        for way, size in (("compiled", 400), ("eager", 100), ("int8", 300))
    ]
    losses = {"job": "gpt-losses", "kind": "losses", "losses": [1.0, 2.0, 3.0], "num_steps": 100}
    first = {"commit": "aaa", "device": "GPU", "rows": rows(timed, packed, {"way": "int4", "error": "lost"}, losses, *largest)}
    later = {"commit": "bbb", "device": "GPU", "rows": rows({"way": "int8", "error": "lost"}, {**packed, "way": "eager"})}
    (tmp_path / "compile.json").write_text(json.dumps([first, later]))
    steps, training, batch = (make().splitlines() for make in made)
    assert [line for line in steps if line.startswith("| vit")] == [
        "| vit | `torch.compile` | 2.00 |  | 1.00x | 200.0 | 100.0 to 300.0 | 1.00x | 60 | aaa |",
        "| vit | int8 | 1.00 | 1.50 | 0.50x | 250.0 | 100.0 to 300.0 | 1.25x | 70 | aaa |",
        "| vit | eager | 1.00 | 1.50 |  | 250.0 | 100.0 to 300.0 |  |  | bbb |",
    ]
    assert training[-1] == "| gpt | compiled | 100 | 3 | 2.0000 | 1.0000 | aaa |"
    assert batch[-1] == "| vit | int8 | 300 | 2.00 | 16 | 1500 | 3.00x | 0.75x | aaa |"
    assert tables.headline() == "", "vit is not a network of the README"
    monkeypatch.setattr(tables, "NETWORKS", {"vit": "ViT"})
    plain, packed8 = "2.0 GiB, 200.0 ms", "1.0 GiB, 250.0 ms"
    assert tables.headline().splitlines()[-1] == f"| ViT | {plain} | {packed8} (0.50x, 1.25x) |  |"


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")  # torch's own
@pytest.mark.usefixtures("bench")
def test_the_u_net_is_predicted_without_a_gpu() -> None:
    """Beside what was measured on one H200."""
    import compile_worker as worker  # type: ignore[import-not-found]

    runs = json.loads((FOLDER / "results" / "compile.json").read_text())
    measured = {row["way"]: row["peak_bytes"] for run in runs for row in run["rows"] if row["job"] == "unet" and not row["error"]}
    job = worker.jobs()["unet"]
    batch = job.batch(job.size, "meta")
    trace = trace_step(worker.build(job, "meta"), batch, optimizer="adamw", device="cuda", autocast=torch.bfloat16, compiled=True)
    predicted = {way: footprint(trace, worker.plan_of(worker.Way.parse(way))).peak_bytes for way in measured}
    assert len(measured) == 3 and predicted == pytest.approx(measured, rel=0.05)
