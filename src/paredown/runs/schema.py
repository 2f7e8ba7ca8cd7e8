"""The tables of a store, their version, and how a store of an older version is brought up to it.

    paredown_meta      name, value        the version
    paredown_workers   id, beats          a counter for each worker that lives: no clock is compared with another
    paredown_trials    one row a trial: what to run, who runs it, what came of it

A trial is `waiting`, `running` (worker and claim say whose) or `finished` (then, and only then, it has a result; the database
itself refuses anything else). `claim` is a random token: who holds it may give the trial back. The first result counts.

A new version appends a row to MIGRATIONS, statements that lead to it from the version before.
"""

from __future__ import annotations

import re

from sqlalchemy import (
    BigInteger,
    CheckConstraint,
    Column,
    Connection,
    Float,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    Text,
    insert,
    inspect,
    select,
    text,
    update,
)

from paredown.errors import StoreError

WAITING, RUNNING, FINISHED = "waiting", "running", "finished"
METADATA = MetaData()
META = Table("paredown_meta", METADATA, Column("name", String(40), primary_key=True), Column("value", Text, nullable=False))
WORKERS = Table(
    "paredown_workers",
    METADATA,
    Column("id", String(40), primary_key=True),
    Column("beats", BigInteger, nullable=False),
)
TRIALS = Table(
    "paredown_trials",
    METADATA,
    Column("key", String(40), primary_key=True),  # a hash of what makes it this trial: see sweep.py
    Column("sweep", Text, nullable=False),
    Column("place", Integer, nullable=False),  # its turn within the sweep
    Column("task", Text, nullable=False),
    Column("plan", Text, nullable=False),  # JSON
    Column("seed", BigInteger, nullable=False),
    Column("settings", Text, nullable=False),  # JSON: mode, device, timeout_seconds
    Column("propensity", Float, nullable=False),  # how likely the draw was to take it
    Column("state", String(10), nullable=False, server_default=WAITING),
    Column("worker", String(40)),
    Column("claim", String(40)),
    Column("attempts", Integer, nullable=False, server_default="0"),
    Column("status", String(20)),
    Column("error", Float),
    Column("seconds", Float),
    Column("result", Text),  # the trial's JSON
    CheckConstraint("(state = 'finished') = (result IS NOT NULL)", name="paredown_finished_has_result"),
    CheckConstraint("(state = 'running') = (worker IS NOT NULL)", name="paredown_running_has_worker"),
    Index("paredown_trials_turn", "state", "sweep", "place"),
    Index("paredown_trials_worker", "worker"),
)
MIGRATIONS: list[tuple[str, ...]] = [()]  # row i leads from version i to i + 1; version 1 is made whole
VERSION = re.compile(r"[0-9]{1,9}")  # anything else is no version
LOCK = 0x70617265  # of PostgreSQL: one process at a time makes or changes the tables


def prepare(connection: Connection, name: str) -> None:
    """Make the tables, or bring them up to this version; `name` is the store in messages. Inside one transaction."""
    if connection.dialect.name == "postgresql":
        connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": LOCK})
    found = find_version(connection)
    if found is None:
        METADATA.create_all(connection)
        connection.execute(insert(META).values(name="version", value=str(len(MIGRATIONS))))
        return
    check_version(found, name)
    for statements in MIGRATIONS[found:]:
        for statement in statements:
            connection.execute(text(statement))
    if found < len(MIGRATIONS):
        connection.execute(update(META).where(META.c.name == "version").values(value=str(len(MIGRATIONS))))


def find_version(connection: Connection) -> int | None:
    """The version of the tables that are there; None where there are none."""
    if not inspect(connection).has_table(META.name):
        return None
    found = str(connection.scalar(select(META.c.value).where(META.c.name == "version")))
    return int(found) if VERSION.fullmatch(found) else 0


def check_version(found: int, name: str) -> None:
    """StoreError unless this paredown can read a store of this version."""
    if found > len(MIGRATIONS):
        raise StoreError(
            f"the store {name} is of version {found}; this paredown reads up to {len(MIGRATIONS)}. Nothing was changed. "
            "Update paredown (pip install -U paredown) on this machine, or use another store."
        )
    if found < 1:
        raise StoreError(f"the store {name} has no version that can be read; it is none of paredown's. Use another one.")
