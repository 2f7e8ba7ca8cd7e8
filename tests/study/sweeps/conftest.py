"""Stores for tests: a file of SQLite, and a database of a real PostgreSQL server where one is installed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from tests.support.postgres import Postgres, find_binaries


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    """One server for all tests of this process."""
    pytest.importorskip("psycopg")
    binaries = find_binaries()
    if binaries is None:
        pytest.skip("no PostgreSQL server on this machine")
    server = Postgres(binaries)
    server.start()
    yield server
    server.close()


@pytest.fixture
def new_postgres(postgres: Postgres) -> Callable[[], str]:
    """Makes an empty place for tables on it, a schema; the URL."""
    import psycopg

    def make() -> str:
        name = f"trials_{uuid4().hex[:12]}"
        with psycopg.connect(postgres.url, autocommit=True) as connection:
            connection.execute(f"CREATE SCHEMA {name}")  # a database of its own takes 8 MB and a second
        return f"{postgres.url}?options=-csearch_path%3D{name}"

    return make


@pytest.fixture(params=["sqlite", "postgresql"])
def new_address(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], str]:
    """Makes the address of an empty store, in turn on both databases."""
    if request.param == "postgresql":
        return request.getfixturevalue("new_postgres")
    return lambda: str(tmp_path / f"{uuid4().hex[:8]}.db")


@pytest.fixture
def address(new_address: Callable[[], str]) -> str:
    """The address of an empty store."""
    return new_address()
