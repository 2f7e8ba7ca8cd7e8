"""The database of a store: address, tables and their version, and transactions that are retried after temporary errors.

**Tables.**

    paredown_meta      name, value        the version
    paredown_workers   id, beats          a heartbeat counter for each live worker; no clocks are compared between machines
    paredown_trials    one row per trial: task, plan, seed, the worker that runs it, the result; times and hosts for readers

The state of a trial is `waiting`, `running` (with the columns worker and claim) or `finished` (with a result); constraints of the tables
refuse anything else. `claim` is a random token; the worker that has it may release the trial. The first result counts. A store of another
version of the tables is refused.

**Transactions.** SQLite runs in WAL mode with full synchronization: after a commit has returned, its rows survive a crash of the process or
the machine. After temporary errors (a lock, a full disk, a PostgreSQL server that restarts) a transaction is retried for up to
`patience_seconds`. Permanent errors (a read-only path, a file that is no database, a wrong password) are a StoreError at once. TROUBLES
lists both. A transaction may run twice, when the connection is lost between commit and reply: writers must recognize what the first run
wrote.

**Connections.** A PostgreSQL server has CONNECT_SECONDS to answer, or `connect_timeout` of the URL, or the environment variable
PGCONNECT_TIMEOUT (psycopg takes at least 2). If it does not answer while a store is opened, this is a StoreError at once; in a store
that was open, the connection is retried for `patience_seconds`.

**Addresses.** A file for SQLite, a URL for PostgreSQL. Passwords are in the user part or the options of a URL; `say_address`, the name of
a store in messages, has neither:

>>> say_address(parse_address("postgresql://ann:secret@db.example.org/trials?sslpassword=secret"))
'postgresql://db.example.org/trials'
>>> say_address(parse_address("results/trials.db"))
'results/trials.db'
>>> parse_address("mysql://ann:secret@db/trials")
Traceback (most recent call last):
    ...
paredown.errors.StoreError: a store is a file (trials.db) or a PostgreSQL URL (postgresql://user@host/database); this one starts \
with 'mysql://'.

Rows of a store are untrusted input; unreadable ones raise a StoreError:

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
from itertools import starmap
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import sqlalchemy as sql
from sqlalchemy import event
from sqlalchemy.exc import ArgumentError, DBAPIError, IntegrityError, InterfaceError, OperationalError

from paredown.errors import ParedownError, StoreError
from paredown.serial import NUMBER, TEXT, WHOLE, Check, brief, check_fields, or_none

WAITING, RUNNING, FINISHED = "waiting", "running", "finished"
METADATA = sql.MetaData()
META = sql.Table(
    "paredown_meta", METADATA, sql.Column("name", sql.String(40), primary_key=True), sql.Column("value", sql.Text, nullable=False)
)
WORKERS = sql.Table(
    "paredown_workers",
    METADATA,
    sql.Column("id", sql.String(40), primary_key=True),
    sql.Column("beats", sql.BigInteger, nullable=False),
)
TRIALS = sql.Table(
    "paredown_trials",
    METADATA,
    sql.Column("key", sql.String(40), primary_key=True),  # TrialSpec.key: a hash of sweep, task, plan, seed, mode and device
    sql.Column("sweep", sql.Text, nullable=False),
    sql.Column("place", sql.Integer, nullable=False),  # its position in the order of the sweep
    sql.Column("task", sql.Text, nullable=False),
    sql.Column("plan", sql.Text, nullable=False),  # JSON
    sql.Column("seed", sql.BigInteger, nullable=False),
    sql.Column("settings", sql.Text, nullable=False),  # JSON: mode, device, timeout_seconds
    sql.Column("propensity", sql.Float, nullable=False),  # the probability that the sweep draws it
    sql.Column("state", sql.String(10), nullable=False, server_default=WAITING),
    sql.Column("worker", sql.String(40)),
    sql.Column("claim", sql.String(40)),
    sql.Column("attempts", sql.Integer, nullable=False, server_default="0"),
    sql.Column("status", sql.String(20)),
    sql.Column("error", sql.Float),
    sql.Column("seconds", sql.Float),
    sql.Column("result", sql.Text),  # the trial's JSON
    sql.Column("label", sql.Text),  # of the plan; NULL: none
    sql.Column("started_at", sql.Text),  # the time of the claim, ISO 8601 in UTC; NULL: unknown, or not claimed
    sql.Column("finished_at", sql.Text),
    sql.Column("host", sql.Text),  # of the worker that has claimed or finished it
    sql.CheckConstraint("(state = 'finished') = (result IS NOT NULL)", name="paredown_finished_has_result"),
    sql.CheckConstraint("(state = 'running') = (worker IS NOT NULL)", name="paredown_running_has_worker"),
    sql.Index("paredown_trials_turn", "state", "sweep", "place"),
    sql.Index("paredown_trials_worker", "worker"),
)
VERSION = 2  # of the tables
WRITTEN_VERSION = re.compile(r"[0-9]{1,9}")  # anything else is not a version
LOCK = 0x70617265  # PostgreSQL advisory lock: one process at a time creates the tables


def prepare(connection: sql.Connection, name: str) -> None:
    """Create the tables of a database of trials if there are none, else check their version; errors call it `name`."""
    if connection.dialect.name == "postgresql":
        connection.execute(sql.text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": LOCK})
    version = find_version(connection)
    if version is None:
        METADATA.create_all(connection)
        connection.execute(sql.insert(META).values(name="version", value=str(VERSION)))
    else:
        check_version(version, name)


def find_version(connection: sql.Connection) -> int | None:
    """Return the version of the tables in a database of trials; None if it has no tables, 0 if the version is unreadable."""
    if not sql.inspect(connection).has_table(META.name):
        return None
    value = str(connection.scalar(sql.select(META.c.value).where(META.c.name == "version")))
    return int(value) if WRITTEN_VERSION.fullmatch(value) else 0


def check_version(version: int, name: str) -> None:
    """Raise StoreError unless this paredown can read a database of trials whose tables have this version."""
    if version > VERSION:
        raise StoreError(
            f"the store {name} is of version {version}; this paredown reads version {VERSION}. Nothing was changed. "
            "Update paredown (pip install -U paredown) on this machine, or use another store."
        )
    if version < VERSION:
        raise StoreError(
            f"the store {name} has no readable version; it was not written by a published paredown. Use another store."
        )


# --- The address of a store ---

DRIVERS = {
    "sqlite": "sqlite",
    "postgresql": "postgresql+psycopg",
    "postgres": "postgresql+psycopg",
    "postgresql+psycopg": "postgresql+psycopg",
}
ALLOWED = "a store is a file (trials.db) or a PostgreSQL URL (postgresql://user@host/database)"


def parse_address(address: str | Path) -> sql.URL:
    """Return the URL of a database of trials; errors do not repeat an unreadable address, which may contain a password."""
    text = str(address)
    if not text.strip():
        raise StoreError(f"{ALLOWED}; this one is empty.")
    if "://" not in text:
        return sql.URL.create("sqlite", database=text)
    kind = text.partition("://")[0]
    if kind not in DRIVERS:
        raise StoreError(f"{ALLOWED}; this one starts with {kind[:20] + '://'!r}.")
    try:
        url = sql.make_url(text).set(drivername=DRIVERS[kind])
    except (ArgumentError, ValueError):
        raise StoreError(
            f"{ALLOWED}; this URL cannot be read. In a password, write @ : / and % as %40, %3A, %2F and %25, "
            "or leave it out and set PGPASSWORD."
        ) from None
    if kind == "sqlite" and url.database in (None, "", ":memory:"):
        raise StoreError(f"{ALLOWED}; SQLite in memory is lost when the process ends.")
    return url


def say_address(url: sql.URL) -> str:
    """Return the name of a database of trials for messages: its URL without user, password and options."""
    if url.drivername == "sqlite":
        return str(url.database)
    host = url.host or "localhost"
    port = f":{url.port}" if url.port else ""
    return f"postgresql://{host}{port}/{url.database or ''}"


def is_same_store(a: sql.URL, b: sql.URL) -> bool:
    """Return whether two URLs lead to the same database: one SQLite file, or URLs that are equal but for user and password."""
    if a.drivername == b.drivername == "sqlite":
        return Path(str(a.database)).resolve() == Path(str(b.database)).resolve()
    return a.set(username=None, password=None) == b.set(username=None, password=None)


# --- Transactions with retries ---

T = TypeVar("T")
OLDEST_SQLITE = (3, 35)  # the first with RETURNING
CONNECT_SECONDS = 3  # unless the URL or PGCONNECT_TIMEOUT has another timeout
LOCK_SECONDS = 20  # SQLite's own timeout for a lock
READS: dict[str, Any] = {"paredown_reads": True}
MAX_CONNECT_SECONDS = 130  # psycopg's meaning of 0
SECONDS = re.compile(r"[0-9]{1,6}")
PAUSE_SECONDS = (0.05, 2.0)  # the first and the longest pause between attempts


class DatabaseTrouble(NamedTuple):
    """Describes a kind of database error: a pattern in its message, its meaning, whether a retry may succeed, what the user can do."""

    pattern: str
    meaning: str
    is_temporary: bool
    advice: str


NO_DATABASE = "fatal:  database"
TROUBLES = tuple(
    starmap(
        DatabaseTrouble,
        (
            ("database is locked", "other processes keep it locked", True, "End the process that locks it, or use PostgreSQL."),
            ("disk is full", "its disk is full", True, "Free some space: finished trials are safe, and the sweep then continues."),
            ("disk i/o error", "its disk refuses writes: full, over a quota, or broken", True, "Free some space, or copy it."),
            ("no space left on device", "the server's disk is full", True, "Free some space there: the sweep then continues."),
            ("could not extend file", "the server's disk is full", True, "Free some space there: the sweep then continues."),
            (
                "readonly database",
                "it cannot be written",
                False,
                "Allow writing to the file and its folder, or copy both elsewhere.",
            ),
            (
                "unable to open database file",
                "it cannot be opened",
                False,
                "Its folder must exist and be writable, for SQLite's log.",
            ),
            ("not a database", "the file is no SQLite database", False, "Use another path."),
            ("malformed", "the file is damaged", False, "Take a copy, and read it with sqlite3's .recover."),
            ("password authentication failed", "the server refuses user or password", False, "Set PGPASSWORD, or correct the URL."),
            ("no password supplied", "the server asks for a password", False, "Set PGPASSWORD, or put it into the URL."),
            ("permission denied", "this user lacks rights on it", False, "Grant CREATE, SELECT, INSERT, UPDATE and DELETE."),
            (NO_DATABASE, "the server has no such database", False, "Create it (createdb), or correct the URL."),
            ("fatal:  role", "the server has no such user", False, "Create it (createuser), or correct the URL."),
        ),
    )
)
SILENT = DatabaseTrouble(
    "timeout expired",
    "no server answers at this address within {seconds} s",
    True,
    "Check host and port, and that the server runs. For a longer timeout, append ?connect_timeout=10 to the URL, or set PGCONNECT_TIMEOUT.",
)
LOST = DatabaseTrouble("", "the server does not answer", True, "Start it, and run the same command again: it resumes.")


DAMAGED = "It is damaged, or was not made by paredown."


class Database:
    """Runs transactions on a database of trials, and repeats them for up to `patience_seconds` after temporary errors.

    `say` is called with a sentence when a retry takes more than a second.
    """

    def __init__(self, address: str | Path, *, patience_seconds: float = 120.0, say: Callable[[str], object] | None = None) -> None:
        self.url = parse_address(address)
        self.name = say_address(self.url)
        self.patience_seconds = patience_seconds
        self._say = say or _to_stderr
        self._connect_seconds = 0 if self.url.drivername == "sqlite" else connect_seconds(self.url)
        self._engine = _make_engine(self.url, self.name, self._connect_seconds)

    def open(self, *, may_create: bool = True) -> None:
        """Connect, and create the tables if there are none; with `may_create=False` missing tables are a StoreError."""
        if may_create:
            self._first_try(lambda: self._run(lambda connection: prepare(connection, self.name), {}))
            return
        version = self._first_try(lambda: self._run(find_version, READS)) if self._may_exist else None
        if version is None:
            raise StoreError(f"there is no store {self.name}. Give the address of one; `paredown sweep run` creates it.")
        check_version(version, self.name)

    def why_missing(self) -> str | None:
        """Return why there is no database of trials (no file, server, database, tables); None if there is, or for other errors."""
        try:
            if self._may_exist and self._run(find_version, READS) is not None:
                return None
        except DBAPIError as error:
            trouble = find_trouble(error)
            is_missing = trouble is not None and (trouble in (SILENT, LOST) or trouble.pattern == NO_DATABASE)
            return f"{self._unusable}: {trouble.meaning.format(seconds=self._connect_seconds)}" if trouble and is_missing else None
        return f"there is no store {self.name}"

    @property
    def _may_exist(self) -> bool:
        """Return whether there may be a database: False for a missing SQLite file, which connecting would create."""
        return self.url.drivername != "sqlite" or Path(str(self.url.database)).is_file()

    def write(self, work: Callable[[sql.Connection], T]) -> T:
        """Return the value of `work(connection)`, after its transaction was committed to disk."""
        return self._try(lambda: self._run(work, {}), self.patience_seconds)

    def read(self, work: Callable[[sql.Connection], T]) -> T:
        """Return the value of `work(connection)`, run in a read-only transaction: one consistent snapshot, without blocking writers."""
        return self._try(lambda: self._run(work, READS), self.patience_seconds)

    def close(self) -> None:
        """Close the connections to the database."""
        self._engine.dispose()

    def _run(self, work: Callable[[sql.Connection], T], options: dict[str, Any]) -> T:
        with self._engine.connect() as connection, connection.execution_options(**options).begin():
            return work(connection)

    def _first_try(self, work: Callable[[], T]) -> T:
        """Return `work()`, with which the database is opened: a server that does not answer is an error at once."""
        return self._try(work, LOCK_SECONDS, is_open=False)

    def _try(self, work: Callable[[], T], patience_seconds: float, *, is_open: bool = True) -> T:
        """Return `work()`, which is called again for up to `patience_seconds` after temporary errors.

        While the database is not open yet (`is_open` is False), a server that does not answer is an error at once.
        """
        start, pause, is_reported = time.monotonic(), PAUSE_SECONDS[0], False
        while True:
            try:
                return work()
            except DBAPIError as error:
                trouble = self._trouble(error)
                waited = time.monotonic() - start
                is_temporary = trouble.is_temporary and (is_open or trouble is not SILENT)
                if not is_temporary or waited + pause > patience_seconds:
                    raise StoreError(self._sentence(trouble, waited)) from None
            except UnicodeDecodeError:  # raised by a driver, which decodes texts and messages of the database
                raise StoreError(f"{self._unusable}: a column of text has bytes that are not UTF-8. {DAMAGED}") from None
            if not is_reported and waited > 1.0:
                meaning = trouble.meaning.format(seconds=self._connect_seconds)
                self._say(f"{self._unusable}: {meaning}. Retrying for {patience_seconds:.0f} s. {trouble.advice}")
                is_reported = True
            time.sleep(pause)
            pause = min(2 * pause, PAUSE_SECONDS[1])

    @property
    def _unusable(self) -> str:
        return f"the store {self.name} cannot be used"

    def _trouble(self, error: DBAPIError) -> DatabaseTrouble:
        trouble = find_trouble(error)
        if trouble is None and isinstance(error, IntegrityError):
            raise error  # a constraint of the tables: a bug of paredown, not of the store
        if trouble is None:
            message = str(error.orig).strip()[:200]
            raise StoreError(f"{self._unusable}: {message}. {DAMAGED}") from error
        return trouble

    def _sentence(self, trouble: DatabaseTrouble, waited: float) -> str:
        after = f" (waited {waited:.0f} s)" if trouble.is_temporary and trouble is not SILENT else ""
        return f"{self._unusable}: {trouble.meaning.format(seconds=self._connect_seconds)}{after}. {trouble.advice}"


def find_trouble(error: DBAPIError) -> DatabaseTrouble | None:
    """Return the entry of TROUBLES that explains an error; SILENT or LOST if the server does not answer, None if none does."""
    message = str(error.orig).lower()
    for row in (*TROUBLES, SILENT):
        if row.pattern in message:
            return row
    is_lost = isinstance(error, OperationalError | InterfaceError) and not type(error.orig).__module__.startswith("sqlite3")
    return LOST if is_lost else None


def _to_stderr(sentence: str) -> None:
    print(f"paredown: {sentence}", file=sys.stderr, flush=True)


def connect_seconds(url: sql.URL) -> int:
    """Return the seconds that a server has to answer: from the URL, else from PGCONNECT_TIMEOUT, else CONNECT_SECONDS.

    >>> connect_seconds(parse_address("postgresql://db.example.org/trials?connect_timeout=10"))
    10
    """
    value = url.query.get("connect_timeout") or os.environ.get("PGCONNECT_TIMEOUT") or str(CONNECT_SECONDS)
    value = value if isinstance(value, str) else value[-1]
    if not SECONDS.fullmatch(value):
        raise StoreError(
            f"the store {say_address(url)} cannot be used: connect_timeout is {brief(value)}; it must be a whole number of seconds, as in "
            "?connect_timeout=10 at the end of the URL, or in PGCONNECT_TIMEOUT."
        )
    return int(value) or MAX_CONNECT_SECONDS


def _make_engine(url: sql.URL, name: str, connect_seconds: int) -> sql.Engine:
    options: dict[str, Any] = {"connect_args": {"connect_timeout": connect_seconds}}
    if url.drivername == "sqlite":
        if sqlite3.sqlite_version_info < OLDEST_SQLITE:
            raise StoreError(
                f"the store {name} needs SQLite 3.35; this Python has {sqlite3.sqlite_version}. Use a newer Python, or PostgreSQL."
            )
        options = {"connect_args": {"timeout": LOCK_SECONDS, "check_same_thread": False}}
    try:
        engine = sql.create_engine(url, hide_parameters=True, **options)
    except ModuleNotFoundError:
        raise StoreError(f"the store {name} needs psycopg: pip install 'paredown[postgres]'.") from None
    if url.drivername == "sqlite":
        event.listen(engine, "connect", _set_up_sqlite)
        event.listen(engine, "begin", _begin_sqlite)
    return engine


def _set_up_sqlite(connection: Any, _record: object) -> None:
    connection.isolation_level = None  # _begin_sqlite begins transactions, not the driver at the first INSERT
    if connection.execute("PRAGMA journal_mode").fetchone()[0] != "wal" and _is_ours_or_empty(connection):
        connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("PRAGMA synchronous=FULL")


def _is_ours_or_empty(connection: Any) -> bool:
    """Return whether a database has paredown's tables or no tables; any other must not be modified."""
    names = {name for (name,) in connection.execute("SELECT name FROM sqlite_master")}
    return not names or META.name in names


def _begin_sqlite(connection: sql.Connection) -> None:
    # A writer takes the lock at once: SQLite refuses to upgrade a read lock while another writer runs, without a timeout.
    reads = connection.get_execution_options().get("paredown_reads")
    connection.exec_driver_sql("BEGIN" if reads else "BEGIN IMMEDIATE")


# --- Untrusted rows ---

UNREADABLE = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)


@contextmanager
def readable(what: str) -> Generator[None]:
    """Return a context in which errors of reading from the database become a StoreError that says `what` was read."""
    try:
        yield
    except StoreError:
        raise
    except ParedownError as error:
        raise StoreError(f"{what} in the store cannot be read: {error}") from None
    except UNREADABLE as error:
        reason = f"{type(error).__name__}: {str(error)[:100]}"
        raise StoreError(f"{what} in the store cannot be read: {reason}. It is damaged, or was not written by paredown.") from None


CHECKS: dict[str, Check] = {
    **dict.fromkeys(("key", "sweep", "task", "plan", "settings", "state"), TEXT),
    **dict.fromkeys(("worker", "claim", "status", "result", "label", "started_at", "finished_at", "host"), or_none(TEXT)),
    **dict.fromkeys(("seed", "place", "attempts"), WHOLE),
    **dict.fromkeys(("propensity", "error", "seconds"), or_none(NUMBER)),
}


def check_columns(row: Any) -> None:
    """Raise StoreError if a column of a row has a value of the wrong type, which SQLite allows, or one that is not finite."""
    checks = {name: CHECKS[name] for name in row._fields if name in CHECKS}
    check_fields(row, checks, "trial in the store", _damaged)


def check_text(value: object, what: str) -> str:
    """Return `value` if it is a str; StoreError if a column of text has bytes or a number."""
    if not isinstance(value, str):
        raise _damaged(f"{what} in the store is text, not {brief(value)}.")
    return value


def _damaged(sentence: str) -> StoreError:
    return StoreError(f"{sentence} The store is damaged, or was not written by paredown.")
