"""One database, and work on it in transactions that are tried again while the trouble may pass.

SQLite runs in WAL mode with full synchronization: a commit that returned survives the process, the machine and the power. What
may pass is waited for, up to `patience_seconds`: a lock, a full disk, a PostgreSQL server that restarts. What cannot is a
StoreError at once: a read-only path, a file that is no database, a wrong password. TROUBLES is the table of both.

A PostgreSQL server has CONNECT_SECONDS to answer a connection, or as many as `connect_timeout` in the URL or the environment variable
PGCONNECT_TIMEOUT says (psycopg takes 2 at least). A store whose server does not answer in that time when it is opened is a StoreError
at once; one that was open is tried again, for `patience_seconds`.

Work may run twice, when the server was lost between commit and answer: whoever writes must find what the first time did.

The tables of a store, their version, and how a store of an older version is brought up to it.

    paredown_meta      name, value        the version
    paredown_workers   id, beats          a counter for each worker that lives: no clock is compared with another
    paredown_trials    one row a trial: what to run, who runs it, what came of it

A trial is `waiting`, `running` (worker and claim say whose) or `finished` (then, and only then, it has a result; the database
itself refuses anything else). `claim` is a random token: who holds it may give the trial back. The first result counts.

A new version appends a row to MIGRATIONS, statements that lead to it from the version before.

The address of a store: a file for SQLite, a URL for PostgreSQL; and what may be said of it.

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

What stands in a store may have been written by anybody: whatever cannot be read is a sentence.

>>> with readable("a plan"):
...     {}["format"]
Traceback (most recent call last):
    ...
paredown.errors.StoreError: a plan in the store cannot be read: KeyError: 'format'. It is damaged, or was not written by paredown.
"""

from __future__ import annotations

import os
import re
import sqlite3
import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from sqlalchemy import (
    URL,
    BigInteger,
    CheckConstraint,
    Column,
    Connection,
    Engine,
    Float,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    Text,
    create_engine,
    event,
    insert,
    inspect,
    make_url,
    select,
    text,
    update,
)
from sqlalchemy.exc import ArgumentError, DBAPIError, IntegrityError, InterfaceError, OperationalError

from paredown.errors import ParedownError, StoreError
from paredown.serial import NUMBER, TEXT, WHOLE, Check, brief, check_fields, or_none

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
    Column("key", String(40), primary_key=True),  # a hash of what makes it this trial: see sweeps/sweep.py
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


# --- The address of a store ---

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


# --- One database, and work on it in transactions that are tried again while the trouble may pass ---

T = TypeVar("T")
OLDEST_SQLITE = (3, 35)  # RETURNING
CONNECT_SECONDS = 3  # that a server has to answer, where neither the URL nor PGCONNECT_TIMEOUT says
LOCK_SECONDS = 20  # that SQLite itself waits for a lock
READS: dict[str, Any] = {"paredown_reads": True}
MOST_CONNECT_SECONDS = 130  # what psycopg takes 0 for
SECONDS = re.compile(r"[0-9]{1,6}")
PAUSE_SECONDS = (0.05, 2.0)  # between attempts: the first, and the longest


class DatabaseTrouble(NamedTuple):
    """A text of the database's message, what it means, whether it may pass, and what to do."""

    said: str
    meaning: str
    may_pass: bool
    advice: str


TROUBLES = (
    DatabaseTrouble("database is locked", "other processes keep it locked", True, "End what holds it, or use PostgreSQL."),
    DatabaseTrouble("disk is full", "its disk is full", True, "Free some space: finished trials are safe and the sweep goes on."),
    DatabaseTrouble(
        "disk i/o error", "its disk takes no more writes: full, over a quota, or broken", True, "Free some space, or copy it."
    ),
    DatabaseTrouble("no space left on device", "the server's disk is full", True, "Free some space there: the sweep goes on."),
    DatabaseTrouble("could not extend file", "the server's disk is full", True, "Free some space there: the sweep goes on."),
    DatabaseTrouble(
        "readonly database", "it cannot be written", False, "Allow writing to the file and its folder, or copy both elsewhere."
    ),
    DatabaseTrouble(
        "unable to open database file",
        "it cannot be opened",
        False,
        "The folder must be there and writable, for the log beside it.",
    ),
    DatabaseTrouble("not a database", "the file is no SQLite database", False, "Give another path."),
    DatabaseTrouble("malformed", "the file is damaged", False, "Take a copy, and read it with sqlite3's .recover."),
    DatabaseTrouble(
        "password authentication failed", "the server refuses user or password", False, "Set PGPASSWORD, or correct the URL."
    ),
    DatabaseTrouble("no password supplied", "the server asks for a password", False, "Set PGPASSWORD, or put it into the URL."),
    DatabaseTrouble(
        "permission denied", "this user may not do that there", False, "Ask for CREATE, SELECT, INSERT, UPDATE and DELETE rights."
    ),
    DatabaseTrouble("fatal:  database", "the server has no such database", False, "Make it (createdb), or correct the URL."),
    DatabaseTrouble("fatal:  role", "the server has no such user", False, "Make it (createuser), or correct the URL."),
)
SILENT = DatabaseTrouble(
    "timeout expired",
    "no server answers at this address within {seconds} s",
    True,
    "Check host and port, and that the server runs. To wait longer, write ?connect_timeout=10 behind the URL, or set PGCONNECT_TIMEOUT.",
)
LOST = DatabaseTrouble(
    "", "the server does not answer", True, "Start it, and run the same command again: it goes on where it stopped."
)


DAMAGED = "It is damaged, or was not made by paredown."


class Database:
    """Connections to one store. `say` gets a sentence when something has to be waited for."""

    def __init__(self, address: str | Path, *, patience_seconds: float = 120.0, say: Callable[[str], object] | None = None) -> None:
        self.url = parse_address(address)
        self.name = say_address(self.url)
        self.patience_seconds = patience_seconds
        self._say = say or _to_stderr
        self._connect_seconds = 0 if self.url.drivername == "sqlite" else connect_seconds(self.url)
        self._engine = _make_engine(self.url, self.name, self._connect_seconds)

    def open(self, *, may_create: bool = True) -> None:
        """Connect, and make or migrate the tables; StoreError says what is in the way. A store to read must be there."""
        if may_create or not self._is_current():
            self._first_try(lambda: self._run(lambda connection: prepare(connection, self.name), {}))

    def _is_current(self) -> bool:
        """Whether the tables are there as this version has them; StoreError where there are none. Writes nothing."""
        there = self.url.drivername != "sqlite" or Path(str(self.url.database)).is_file()
        found = self._first_try(lambda: self._run(find_version, READS)) if there else None
        if found is None:
            raise StoreError(f"there is no store {self.name}. Give the address of one; `paredown sweep run` makes it.")
        check_version(found, self.name)
        return found == len(MIGRATIONS)

    def write(self, work: Callable[[Connection], T]) -> T:
        """What `work` returns, once all that it wrote is on the disk."""
        return self._try(lambda: self._run(work, {}), self.patience_seconds)

    def read(self, work: Callable[[Connection], T]) -> T:
        """What `work` returns; it sees one moment of the store and blocks nobody."""
        return self._try(lambda: self._run(work, READS), self.patience_seconds)

    def close(self) -> None:
        """Give the connections back."""
        self._engine.dispose()

    def _run(self, work: Callable[[Connection], T], options: dict[str, Any]) -> T:
        with self._engine.connect() as connection, connection.execution_options(**options).begin():
            return work(connection)

    def _first_try(self, work: Callable[[], T]) -> T:
        """Do it; a server that has never answered is not tried again."""
        return self._try(work, LOCK_SECONDS, is_open=False)

    def _try(self, work: Callable[[], T], patience_seconds: float, *, is_open: bool = True) -> T:
        """Do it, again after trouble that may pass, for so long."""
        start, pause, told = time.monotonic(), PAUSE_SECONDS[0], False
        while True:
            try:
                return work()
            except DBAPIError as error:
                trouble = self._trouble(error)
                waited = time.monotonic() - start
                may_pass = trouble.may_pass and (is_open or trouble is not SILENT)
                if not may_pass or waited + pause > patience_seconds:
                    raise StoreError(self._sentence(trouble, waited)) from None
            except UnicodeDecodeError:  # of a driver, which decodes texts and the database's own messages
                raise StoreError(f"{self._unusable}: it holds bytes that are no UTF-8 where text stands. {DAMAGED}") from None
            if not told and waited > 1.0:
                meaning = trouble.meaning.format(seconds=self._connect_seconds)
                self._say(f"{self._unusable}: {meaning}. Trying for {patience_seconds:.0f} s. {trouble.advice}")
                told = True
            time.sleep(pause)
            pause = min(2 * pause, PAUSE_SECONDS[1])

    @property
    def _unusable(self) -> str:
        return f"the store {self.name} cannot be used"

    def _trouble(self, error: DBAPIError) -> DatabaseTrouble:
        """What the error means; StoreError where nothing is known of it."""
        trouble = find_trouble(error)
        if trouble is None and isinstance(error, IntegrityError):
            raise error  # a mistake of ours, which the tables refuse
        if trouble is None:
            said = str(error.orig).strip()[:200]
            raise StoreError(f"{self._unusable}: {said}. {DAMAGED}") from error
        return trouble

    def _sentence(self, trouble: DatabaseTrouble, waited: float) -> str:
        after = f" (waited {waited:.0f} s)" if trouble.may_pass and trouble is not SILENT else ""
        return f"{self._unusable}: {trouble.meaning.format(seconds=self._connect_seconds)}{after}. {trouble.advice}"


def find_trouble(error: DBAPIError) -> DatabaseTrouble | None:
    """What the database means; None where nothing is known of it."""
    said = str(error.orig).lower()
    for row in (*TROUBLES, SILENT):
        if row.said in said:
            return row
    is_lost = isinstance(error, OperationalError | InterfaceError) and not type(error.orig).__module__.startswith("sqlite3")
    return LOST if is_lost else None


def _to_stderr(sentence: str) -> None:
    print(f"paredown: {sentence}", file=sys.stderr, flush=True)


def connect_seconds(url: URL) -> int:
    """How long a server has to answer: what the URL says, else the environment, else CONNECT_SECONDS.

    >>> connect_seconds(parse_address("postgresql://db.example.org/trials?connect_timeout=10"))
    10
    """
    said = url.query.get("connect_timeout") or os.environ.get("PGCONNECT_TIMEOUT") or str(CONNECT_SECONDS)
    said = said if isinstance(said, str) else said[-1]
    if not SECONDS.fullmatch(said):
        raise StoreError(
            f"the store {say_address(url)} cannot be used: connect_timeout is {brief(said)}; it is a whole number of seconds, as in "
            "?connect_timeout=10 behind the URL or in PGCONNECT_TIMEOUT."
        )
    return int(said) or MOST_CONNECT_SECONDS


def _make_engine(url: URL, name: str, connect_seconds: int) -> Engine:
    options: dict[str, Any] = {"connect_args": {"connect_timeout": connect_seconds}}
    if url.drivername == "sqlite":
        if sqlite3.sqlite_version_info < OLDEST_SQLITE:
            raise StoreError(
                f"the store {name} needs SQLite 3.35; this Python has {sqlite3.sqlite_version}. Use a newer Python, or PostgreSQL."
            )
        options = {"connect_args": {"timeout": LOCK_SECONDS, "check_same_thread": False}}
    try:
        engine = create_engine(url, hide_parameters=True, **options)
    except ModuleNotFoundError:
        raise StoreError(f"the store {name} needs psycopg: pip install 'paredown[postgres]'.") from None
    if url.drivername == "sqlite":
        event.listen(engine, "connect", _set_up_sqlite)
        event.listen(engine, "begin", _begin_sqlite)
    return engine


def _set_up_sqlite(connection: Any, _record: object) -> None:
    connection.isolation_level = None  # transactions begin below, not when the driver sees an INSERT
    if connection.execute("PRAGMA journal_mode").fetchone()[0] != "wal" and _is_ours_or_empty(connection):
        connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("PRAGMA synchronous=FULL")


def _is_ours_or_empty(connection: Any) -> bool:
    """A database of somebody else's is refused later, and stays as it is."""
    names = {name for (name,) in connection.execute("SELECT name FROM sqlite_master")}
    return not names or META.name in names


def _begin_sqlite(connection: Connection) -> None:
    # A writer takes the lock at once: one that asked for it after reading would be refused without waiting.
    reads = connection.get_execution_options().get("paredown_reads")
    connection.exec_driver_sql("BEGIN" if reads else "BEGIN IMMEDIATE")


# --- What stands in a store may have been written by anybody ---

ODD = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)


@contextmanager
def readable(what: str) -> Generator[None]:
    """StoreError where `what` is not what it should be."""
    try:
        yield
    except StoreError:
        raise
    except ParedownError as error:
        raise StoreError(f"{what} in the store cannot be read: {error}") from None
    except ODD as error:
        told = f"{type(error).__name__}: {str(error)[:100]}"
        raise StoreError(f"{what} in the store cannot be read: {told}. It is damaged, or was not written by paredown.") from None


CHECKS: dict[str, Check] = {
    **dict.fromkeys(("key", "sweep", "task", "plan", "settings", "state"), TEXT),
    **dict.fromkeys(("worker", "claim", "status", "result"), or_none(TEXT)),
    **dict.fromkeys(("seed", "place", "attempts"), WHOLE),
    **dict.fromkeys(("propensity", "error", "seconds"), or_none(NUMBER)),
}


def check_columns(row: Any) -> None:
    """StoreError where a column holds something of another type, as SQLite lets it, or a number that is not finite."""
    there = {name: check for name, check in CHECKS.items() if hasattr(row, name)}
    check_fields(row, there, "trial in the store", _damaged)


def check_text(value: object, what: str) -> str:
    """`value`, where it is text; StoreError where a column of text holds bytes or a number."""
    if not isinstance(value, str):
        raise _damaged(f"{what} in the store is text, not {brief(value)}.")
    return value


def _damaged(sentence: str) -> StoreError:
    return StoreError(f"{sentence} The store is damaged, or was not written by paredown.")
