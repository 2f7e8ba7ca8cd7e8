"""Stores and exports from strangers: rows of any type, bytes for text, infinities; a value or a sentence, each time."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paredown.errors import ParedownError, StoreError
from tests.strangers.mutations import answers, text_of, thousands, wrong_bytes, wrong_json


@pytest.fixture
def store_bytes(tmp_path: Path) -> bytes:
    """A store with finished and waiting trials, in one file."""
    pytest.importorskip("sqlalchemy")
    from paredown.study.sweeps.store import Store
    from paredown.study.sweeps.sweep import EndedTrial
    from tests.support.trials import done, draw

    path = tmp_path / "right.db"
    with Store(path) as store:
        store.add("s", draw("a", "b", seeds=range(2)))
        for claim in store.claim("w", 2):
            store.finish("w", EndedTrial(claim, done(claim.spec)))
    whole = sqlite3.connect(path)
    whole.execute("pragma wal_checkpoint(truncate)")
    whole.execute("pragma journal_mode=delete")
    whole.close()
    return path.read_bytes()


def looked_at(path: Path) -> None:
    """All that reads a store."""
    from paredown.study.priors.prior_collection import read_rows
    from paredown.study.report.record import Record
    from paredown.study.sweeps.export import export, merge
    from paredown.study.sweeps.status import count, find_best
    from paredown.study.sweeps.store import Store

    with Store(path, may_create=False, patience_seconds=0.0) as store:
        for counts in count(store):
            assert all(map(str, (counts, *find_best(store, counts.sweep))))
        for ending in ("json", "csv"):
            export(store, path.with_name(f"rows.{ending}"))
        with Store(path.with_name("into.db"), patience_seconds=0.0) as into:
            merge(into, store)
        Record.of_store(store)
    read_rows(path)


def test_stores(tmp_path: Path, store_bytes: bytes) -> None:
    path = tmp_path / "other.db"
    path.write_bytes(store_bytes)
    assert answers(lambda: looked_at(path))

    @thousands(150)
    @given(wrong_bytes(store_bytes))
    def check(data: bytes) -> None:
        for beside in tmp_path.glob("other.db*"):
            beside.unlink()
        path.write_bytes(data)
        answers(lambda: looked_at(path))

    check()


COLUMNS = ("sweep", "state", "task", "plan", "seed", "settings", "status", "error", "result", "propensity", "place", "attempts")
COLUMNS += ("label", "started_at", "finished_at", "host")


def test_rows_of_strangers(tmp_path: Path, store_bytes: bytes) -> None:
    """Right tables with odd contents; SQLite lets any column hold anything."""
    path = tmp_path / "odd.db"
    values = [None, "", "x", "{", "[]", "{}", "null", -1, 2**62, 1e308, b"\x00\xff", "done", "finished", "\x1b[2J", "[" * 3000]
    values += [
        float("inf"),
        float("-inf"),
        0.5,
        "9" * 6000,
        b"s",
        b"done",
        "1e999",
        '{"mode": 1}',
        '{"version": %s}' % ("9" * 6000),
    ]

    @thousands(120)
    @given(st.lists(st.tuples(st.sampled_from(COLUMNS), st.sampled_from(values)), min_size=1, max_size=3))
    def check(changes: list[tuple[str, Any]]) -> None:
        for beside in tmp_path.glob("odd.db*"):
            beside.unlink()
        path.write_bytes(store_bytes)
        file = sqlite3.connect(path)
        for column, value in changes:
            try:
                file.execute(f"update paredown_trials set {column} = ?", (value,))
            except sqlite3.IntegrityError:
                continue
        file.commit()
        file.close()
        answers(lambda: looked_at(path))

    check()


@pytest.mark.parametrize(
    "sql", ["create table other (a)", "create table paredown_trials (a)", "create view trials as select 1 as a"]
)
def test_databases_of_others_are_sentences_and_stay_as_they_are(tmp_path: Path, sql: str) -> None:
    pytest.importorskip("sqlalchemy")
    path = tmp_path / "other.db"
    file = sqlite3.connect(path)
    file.execute(sql)
    file.commit()
    file.close()
    before = path.read_bytes()
    assert not answers(lambda: looked_at(path))
    assert path.read_bytes() == before


def test_exports_of_others(tmp_path: Path, store_bytes: bytes) -> None:
    from paredown.study.priors.prior_collection import collect, read_rows
    from paredown.study.sweeps.export import export
    from paredown.study.sweeps.store import Store

    path = tmp_path / "rows.json"
    with Store(tmp_path / "right.db") as store:
        export(store, path)
    right = json.loads(path.read_text())

    @thousands(150)
    @given(wrong_json(right))
    def check(value: Any) -> None:
        path.write_bytes(text_of(value))
        answers(lambda: collect(read_rows(path), "mine", folder=tmp_path))

    check()


def changed(path: Path, data: bytes, sql: str, *values: Any) -> Path:
    """A store whose file has `data`, and a statement run on it."""
    path.write_bytes(data)
    file = sqlite3.connect(path)
    file.execute(sql, values)
    file.commit()
    file.close()
    return path


ODD_ROWS = {
    "bytes for a sweep": ("update paredown_trials set sweep = ?", b"s", "the name of a sweep in the store is text, not b's'"),
    "bytes for a task": ("update paredown_trials set task = ?", b"a", "task of a trial in the store is text, not b'a'"),
    "bytes for a status": ("update paredown_trials set status = ?", b"done", "status of a trial in the store is text, or None"),
    "an infinite propensity": (
        "update paredown_trials set propensity = ?",
        float("inf"),
        "propensity of a trial in the store is a finite",
    ),
    "no UTF-8": ("update paredown_trials set task = cast(? as text)", b"\xff\xfe", "ould not decode to UTF-8"),
    "a version of 6,000 digits": ("update paredown_meta set value = ?", "9" * 6000, "has no readable version"),
    "a version in raised digits": ("update paredown_meta set value = ?", "\u00b2", "has no readable version"),
}


@pytest.mark.parametrize("case", ODD_ROWS)
def test_an_odd_row_is_named(case: str, tmp_path: Path, store_bytes: bytes) -> None:
    sql, value, said = ODD_ROWS[case]
    path = changed(tmp_path / "odd.db", store_bytes, sql, value)
    with pytest.raises(ParedownError) as raised:
        looked_at(path)
    assert said in str(raised.value)


@pytest.mark.parametrize("name", ["loss", "seconds"])
@pytest.mark.parametrize("number", ["Infinity", "NaN", "9" * 400, "9" * 6000])
def test_a_result_that_is_not_finite_is_not_exported(name: str, number: str, tmp_path: Path, store_bytes: bytes) -> None:
    from paredown.study.sweeps.export import export
    from paredown.study.sweeps.store import Store

    sql = f"update paredown_trials set result = json_set(result, '$.{name}', 'HERE') where state = 'finished'"
    path = changed(tmp_path / "odd.db", store_bytes, sql)
    changed(path, path.read_bytes(), "update paredown_trials set result = replace(result, '\"HERE\"', ?)", number)
    with Store(path, may_create=False) as store:
        for ending in ("json", "csv"):
            with pytest.raises(StoreError, match=r"a trial in the store|a trial in the store cannot be read"):
                export(store, tmp_path / f"rows.{ending}")
    assert not list(tmp_path.glob("*rows.*")), "no half of a file stays"


def test_a_schema_that_is_no_utf_8_is_a_sentence(tmp_path: Path, store_bytes: bytes) -> None:
    path = tmp_path / "odd.db"
    path.write_bytes(store_bytes.replace(b"CREATE INDEX paredown_trials_turn", b"CREATE \xffNDEX paredown_trials_turn"))
    with pytest.raises(StoreError, match=r"a column of text has bytes that are not UTF-8\. It is damaged"):
        looked_at(path)
