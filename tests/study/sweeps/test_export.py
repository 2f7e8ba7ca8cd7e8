"""Export and merge: files have the rows of the store, and a merged store has the trials of both."""

from __future__ import annotations

import csv
import json
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("sqlalchemy")

from paredown.errors import StoreError
from paredown.plan.plan import Plan
from paredown.study.sweeps.export import COLUMNS, MergeResult, export, merge, rows
from paredown.study.sweeps.status import count
from paredown.study.sweeps.store import Store
from paredown.study.sweeps.sweep import EndedTrial
from paredown.study.tasks.trial import Trial
from tests.support.trials import PLANS, done, draw


def finish(store: Store, num: int) -> None:
    """Finish so many trials."""
    for claim in store.claim("w", num):
        store.finish("w", EndedTrial(claim, done(claim.spec)))


@pytest.fixture
def store(tmp_path: Path) -> Store:
    store = Store(tmp_path / "t.db")
    store.add("s", draw("a,b", 'c"d', seeds=range(2), plans=PLANS))
    store.add("other", draw("x"))
    finish(store, 5)
    return store


def test_csv_has_a_row_for_each_trial(store: Store, tmp_path: Path) -> None:
    assert export(store, tmp_path / "t.csv") == 9
    with (tmp_path / "t.csv").open(newline="", encoding="utf-8") as file:
        found = list(csv.DictReader(file))
    assert tuple(found[0]) == COLUMNS
    assert [row["state"] for row in found] == ["finished"] * 5 + ["waiting"] * 4
    assert [row["task"] for row in found] == ["x", *["a,b"] * 4, *['c"d'] * 4]
    for row in found[1:5]:
        spec = next(one.spec for one in draw("a,b", seeds=range(2), plans=PLANS) if one.spec.key("s") == row["key"])
        assert float(row["error"]) == done(spec).error and Plan.from_json(json.loads(row["plan"])) == spec.plan
    assert found[-1]["error"] == found[-1]["status"] == ""
    assert [row["label"] for row in found] == ["baseline", *["baseline", "baseline", "activations4", "activations4"] * 2]
    assert {row["host"] for row in found[:5]} == {socket.gethostname()} and all(row["finished_at"] for row in found[:5])
    assert found[-1]["started_at"] == found[-1]["finished_at"] == found[-1]["host"] == ""


def test_json_has_whole_trials_and_a_sweep_can_be_picked(store: Store, tmp_path: Path) -> None:
    assert export(store, tmp_path / "t.json", sweep="s") == 8
    found = json.loads((tmp_path / "t.json").read_text())
    trials = [Trial.from_json(row["trial"]) for row in found if row["trial"]]
    assert trials == [done(one.spec) for one in draw("a,b", seeds=range(2), plans=PLANS)]
    assert [row["trial"] for row in found[4:]] == [None] * 4


def test_parquet_has_types(store: Store, tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    export(store, tmp_path / "t.parquet")
    table = parquet.read_table(tmp_path / "t.parquet")
    assert tuple(table.column_names) == COLUMNS and table.num_rows == 9
    assert table.column("error").to_pylist()[:5] == [row["error"] for row in rows(store)[:5]]
    assert str(table.schema.field("seed").type) == "int64" and str(table.schema.field("error").type) == "double"


def test_exports_that_cannot_be_written_are_sentences_and_leave_nothing(store: Store, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"Allowed: \.csv, \.json, \.parquet"):
        export(store, tmp_path / "t.xlsx")
    with pytest.raises(StoreError, match="cannot be written: No such file"):
        export(store, tmp_path / "nowhere" / "t.csv")
    (tmp_path / "d.csv").mkdir()
    with pytest.raises(StoreError, match="cannot be written"):
        export(store, tmp_path / "d.csv")
    assert not [path.name for path in tmp_path.iterdir() if path.suffix == ".part"]


def test_a_merge_has_every_trial_once_and_every_result(new_address: Callable[[], str]) -> None:
    shared, mine, theirs = draw("a", seeds=range(300)), draw("b"), draw("c", seeds=range(3))
    with Store(new_address()) as into, Store(new_address()) as source:
        into.add("s", [*shared, *mine])
        source.add("s", [*shared, *theirs])
        finish(into, 2)  # seeds 0 and 1 of a
        finish(source, 5)  # 0 to 4
        source.claim("dead", 300)
        assert merge(into, source) == MergeResult(num_new=3, num_results=3, num_both=2)
        assert merge(into, source) == MergeResult(0, 0, 5), "again: nothing is left to do"
        found = count(into)[0]
        assert (found.total, found.finished, found.running) == (304, 5, 0), "a trial that runs in the source is open in the target"
        assert [(row["started_at"], row["host"]) for row in rows(into) if row["task"] == "c"] == [(None, None)] * 3
        assert [claim.attempt for claim in into.claim("w", 1)] == [1]
        assert count(source)[0].total == 303, "the source stays"


def test_a_merge_between_databases(tmp_path: Path, new_postgres: Callable[[], str]) -> None:
    with Store(tmp_path / "t.db") as local, Store(new_postgres()) as shared:
        local.add("s", draw("a", seeds=range(5), plans=PLANS))
        finish(local, 7)
        assert merge(shared, local) == MergeResult(10, 0, 0)
        assert rows(shared) == rows(local), "with labels, times and hosts"


def test_a_store_is_not_merged_with_itself(store: Store, tmp_path: Path) -> None:
    (tmp_path / "link.db").symlink_to(tmp_path / "t.db")
    with Store(tmp_path / "link.db") as again, pytest.raises(StoreError, match="is the source and the target"):
        merge(store, again)
