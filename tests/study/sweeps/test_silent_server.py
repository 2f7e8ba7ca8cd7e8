"""A PostgreSQL server that never answers: after the limit that is set, a sentence; all on loopback."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy import event

from paredown.errors import StoreError
from paredown.study.sweeps.database import Database
from paredown.study.sweeps.store import Store


@pytest.fixture
def silent() -> Iterator[str]:
    """The URL of a server that takes connections and never answers."""
    pytest.importorskip("psycopg")
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(8)
        yield f"postgresql://ann:secret@127.0.0.1:{server.getsockname()[1]}/trials"


def test_a_server_that_never_answers_is_a_sentence(silent: str) -> None:
    with pytest.raises(
        StoreError, match=r"no server answers at this address within 2 s\. Check host and port.*PGCONNECT_TIMEOUT"
    ) as raised:
        Store(f"{silent}?connect_timeout=2", may_create=False)
    assert "secret" not in str(raised.value)


LIMITS = {"": ("", 3), "the URL": ("?connect_timeout=7", 7), "the environment": ("", 9), "the URL first": ("?connect_timeout=7", 7)}


@pytest.mark.parametrize("case", LIMITS, ids=lambda case: case or "default")
def test_the_limit_that_is_set_is_handed_to_the_driver(case: str, silent: str, monkeypatch: pytest.MonkeyPatch) -> None:
    query, seconds = LIMITS[case]
    monkeypatch.delenv("PGCONNECT_TIMEOUT", raising=False)
    if case in ("the environment", "the URL first"):
        monkeypatch.setenv("PGCONNECT_TIMEOUT", "9")
    handed: list[Any] = []

    def connect(dialect: Any, record: Any, arguments: Any, keywords: dict[str, Any]) -> Any:
        handed.append(keywords["connect_timeout"])
        raise dialect.loaded_dbapi.OperationalError("connection timeout expired")

    database = Database(silent + query)
    event.listen(database._engine, "do_connect", connect)  # pyright: ignore[reportPrivateUsage]
    with pytest.raises(StoreError, match=rf"within {seconds} s"):
        database.open(may_create=False)
    assert [int(one) for one in handed] == [seconds], "asked once, and not again and again"


def test_a_limit_that_is_no_number_is_a_sentence(silent: str) -> None:
    with pytest.raises(StoreError, match=r"connect_timeout is 'soon'; it must be a whole number of seconds"):
        Database(f"{silent}?connect_timeout=soon")
