"""The address of a store: a file for SQLite, a URL for PostgreSQL; and what may be said of it.

`say_address` gives dialect, host and database and nothing else: a password stands in a URL's user part or among its options,
and neither is ever printed.

>>> say_address(parse_address("postgresql://ann:secret@db.example.org/trials?sslpassword=secret"))
'postgresql://db.example.org/trials'
>>> say_address(parse_address("results/trials.db"))
'results/trials.db'
>>> parse_address("mysql://ann:secret@db/trials")
Traceback (most recent call last):
    ...
paredown.errors.StoreError: a store is a file (trials.db) or a PostgreSQL URL (postgresql://user@host/database); this one starts \
with 'mysql://'.
"""

from __future__ import annotations

from pathlib import Path

from sqlalchemy import URL, make_url
from sqlalchemy.exc import ArgumentError

from paredown.errors import StoreError

DRIVERS = {
    "sqlite": "sqlite",
    "postgresql": "postgresql+psycopg",
    "postgres": "postgresql+psycopg",
    "postgresql+psycopg": "postgresql+psycopg",
}
ALLOWED = "a store is a file (trials.db) or a PostgreSQL URL (postgresql://user@host/database)"


def parse_address(address: str | Path) -> URL:
    """The URL of a store; messages do not repeat what they could not read."""
    text = str(address)
    if not text.strip():
        raise StoreError(f"{ALLOWED}; this one is empty.")
    if "://" not in text:
        return URL.create("sqlite", database=text)
    kind = text.partition("://")[0]
    if kind not in DRIVERS:
        raise StoreError(f"{ALLOWED}; this one starts with {kind[:20] + '://'!r}.")
    try:
        url = make_url(text).set(drivername=DRIVERS[kind])
    except (ArgumentError, ValueError):
        raise StoreError(
            f"{ALLOWED}; this URL cannot be read. In a password, write @ : / and % as %40, %3A, %2F and %25, "
            "or leave it out and set PGPASSWORD."
        ) from None
    if kind == "sqlite" and url.database in (None, "", ":memory:"):
        raise StoreError(f"{ALLOWED}; SQLite in memory is gone with the process.")
    return url


def say_address(url: URL) -> str:
    """What messages call the store: no user, no password, no options."""
    if url.drivername == "sqlite":
        return str(url.database)
    host = url.host or "localhost"
    port = f":{url.port}" if url.port else ""
    return f"postgresql://{host}{port}/{url.database or ''}"


def is_same_store(a: URL, b: URL) -> bool:
    """Whether two addresses lead to one store."""
    if a.drivername == b.drivername == "sqlite":
        return Path(str(a.database)).resolve() == Path(str(b.database)).resolve()
    return a.set(username=None, password=None) == b.set(username=None, password=None)
