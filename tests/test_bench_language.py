"""The benchmark of language models: which rows it measures, what it keeps, how it searches for the largest length, and its verdicts."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(FOLDER))
    import bench_language  # type: ignore[import-not-found]

    yield bench_language
    for name in set(sys.modules) - before:
        if (getattr(sys.modules[name], "__file__", None) or "").startswith(f"{FOLDER}/"):
            del sys.modules[name]


def test_rows_are_selected_by_name_and_trainings_by_seed(bench: Any) -> None:
    cells = bench.selected((), "lora:paredown, accuracy:baseline,lora:paredown", (0, 1))
    assert [cell.name for cell in cells] == ["lora:paredown", "accuracy:baseline:0", "accuracy:baseline:1"]
    assert len(bench.selected(("lora", "loss"), None, ())) == 10 + 6
    for wrong in ("lora:nothing", "nothing"):
        with pytest.raises(SystemExit, match="there are"):
            bench.selected((), wrong, ())


def test_rows_of_other_commits_and_rows_with_errors_are_measured_again(bench: Any) -> None:
    row = {"job": "lora", "way": "paredown", "seed": None, "error": None, "skipped": None, "largest_length": None}
    runs = [
        {"commit": "a", "device": "gpu", "rows": [row, {**row, "error": "no"}, {**row, "way": "qlora", "error": "no"}]},
        {"commit": "b", "device": "gpu", "rows": [{**row, "way": "paredown-nf4"}]},
    ]
    found = bench.measured(runs, "a", "gpu")
    done, with_largest = Namespace(largest=False), Namespace(largest=True)
    assert [key[1] for key, one in found.items() if bench.is_done(one, done)] == ["paredown"]
    assert not any(bench.is_done(one, with_largest) for one in found.values()), "its largest length is missing"
    assert bench.is_done({**row, "largest_length": 4096}, with_largest)


def test_processes_of_one_job_run_together_as_memory_allows(bench: Any) -> None:
    cells = bench.selected(("lora", "full-8GiB", "loss"), None, ())
    sizes = [[cell.job for cell in batch] for batch in bench.batches(cells, num_jobs=6)]
    assert sizes == [["lora"] * 5, ["lora"] * 5, ["full-8GiB"] * 2, ["loss"] * 5, ["loss"]]
    assert max(len(batch) for batch in bench.batches(cells, num_jobs=6, limit_gib=50)) == 2


def search(next_length: Any, limit: int) -> tuple[int, int]:
    """The longest text that the search finds where 1024 tokens take 3 of `limit`, beside 20; and the number of tries."""
    peaks, too_long, num = {4096: 32}, None, 0
    while num < 6 and (length := next_length(peaks, too_long, 20, limit)) is not None:
        num, peak = num + 1, 20 + 3 * (length // 1024)
        if peak <= limit:
            peaks[length] = peak
        else:
            too_long = length
    return max(peaks), num


@pytest.mark.parametrize("limit", [40, 50, 77, 110])
def test_the_largest_length_is_found_in_six_tries(bench: Any, limit: int) -> None:
    import language_worker  # type: ignore[import-not-found]

    found, num = search(language_worker.next_length, limit)
    assert found == (limit - 20) // 3 * 1024 and num <= 6
    assert language_worker.next_length({}, 4096, 20, 30) == 2048, "below the length of the timed steps"


@pytest.mark.parametrize(("limit_length", "begin", "lengths"), [
    (47104, 47104, [47104, 48128]), (50176, 47104, [47104, 48128]), (46080, 47104, [47104, 45056, 46080]), (4096, 1024, [1024, 2048]),
])  # fmt: skip
def test_the_search_begins_with_a_length_that_was_found_before(
    bench: Any, monkeypatch: pytest.MonkeyPatch, limit_length: int, begin: int, lengths: list[int]
) -> None:
    import language_worker  # type: ignore[import-not-found]

    def peak_at(step: Any, length: int) -> tuple[int, float] | None:
        return (10 * 2**30 + length * 2**18, 1.0) if length <= limit_length else None

    for name, value in {"peak_at": peak_at, "freed": lambda step: None, "set_limit": lambda limit: None}.items():
        monkeypatch.setattr(language_worker, name, value)
    step = Namespace(allocated=lambda: 10 * 2**30, way=Namespace(name="toy"))
    found = language_worker.largest_fields(step, 4096, 10 * 2**30 + 4096 * 2**18, begin)
    assert found["largest_length"] == limit_length and len(found["largest_tries"]) <= 6
    assert [length for length, _ in found["largest_tries"]][: len(lengths)] == lengths


def test_lengths_that_were_found_before_are_those_of_the_last_run(bench: Any, tmp_path: Path) -> None:
    rows = [{"job": "lora", "way": "qlora", "largest_length": length} for length in (3072, 2048, None)]
    (tmp_path / "found.json").write_text(json.dumps([{"rows": [row]} for row in rows]))
    assert bench.known_length("qlora", tmp_path / "found.json") == 2048
    assert bench.known_length("paredown", tmp_path / "found.json") is None
    assert bench.known_length("qlora", tmp_path / "none.json") is None


def test_verdicts_compare_with_the_peer(bench: Any) -> None:
    import language_verdicts  # type: ignore[import-not-found]

    def row(peak: int, seconds: float, **more: Any) -> dict[str, Any]:
        return {"peak_bytes": peak, "median_seconds": seconds, "p20_seconds": seconds, "p80_seconds": seconds, **more}

    rows = {
        ("lora", "peft-liger", None): row(120, 1.0, base_bytes=100),
        ("lora", "paredown", None): row(112, 1.2, base_bytes=100, predicted_bytes=120),
    }
    found = {one.text: (one.passes, one.measured) for one in language_verdicts.verdicts(rows) if one.passes is not None}
    assert found == {
        "lora: peak above the base of paredown / peft-liger": (True, 0.6),
        "lora: step of paredown / peft-liger": (False, 1.2),
        "lora: predicted peak of paredown": (False, pytest.approx(120 / 112 - 1)),
    }
    assert "not measured" in str(language_verdicts.verdict_table(rows))


def test_differences_are_paired_by_seed(bench: Any) -> None:
    import language_verdicts  # type: ignore[import-not-found]

    losses = {"baseline": (2.0, 3.0, 4.0), "lpmm+int4": (2.1, 3.2, 4.3)}
    rows = {("accuracy", way, seed): {"validation_loss": loss} for way in losses for seed, loss in enumerate(losses[way])}
    _, packed = language_verdicts.losses_by_way(rows)
    mean, error = packed.mean_and_error(packed.differences)
    assert mean == pytest.approx(0.2) and error == pytest.approx(0.1 / 3**0.5)
    assert packed.is_within_noise is False and packed.cells[3:5] == ("3.2000 (0.6351)", "+0.2000 (0.0577)")
