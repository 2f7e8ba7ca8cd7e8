"""Faults of databases, provoked: full disks, read-only paths, other files, a server that is killed; and passwords in messages."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sqlalchemy")

from sqlalchemy import text

from paredown.errors import StoreError
from paredown.study.sweeps.database import parse_address, say_address
from paredown.study.sweeps.export import export, rows
from paredown.study.sweeps.status import count
from paredown.study.sweeps.store import Store
from paredown.study.sweeps.sweep import Claim, EndedTrial
from paredown.study.tasks.trial import Status, Trial
from tests.support.postgres import PASSWORD, Postgres
from tests.support.trials import draw
from tests.support.work import ROOT


def ended(claim: Claim, size: int = 0) -> EndedTrial:
    """A claim with a result of about so many bytes."""
    return EndedTrial(claim, Trial(claim.spec.task, claim.spec.plan, claim.spec.seed, Status.DONE, error=0.5, reason="x" * size))


def test_a_full_disk_is_waited_for_and_nothing_is_lost(tmp_path: Path) -> None:
    """SQLite's own limit of pages gives the error of a full disk; space is freed while the worker retries."""
    said: list[str] = []
    with Store(tmp_path / "t.db", patience_seconds=30, say=said.append) as store:
        store.add("s", draw("a", seeds=range(3)))
        claims = store.claim("w", 3)
        store.finish("w", ended(claims[0]))
        limit_pages(store, 0)  # as many as there are: none is left
        roomier = threading.Timer(2.0, limit_pages, (store, 100_000))
        roomier.start()
        store.finish("w", ended(claims[1], size=100_000))
        roomier.join()
        store.finish("w", ended(claims[2]))
        assert count(store)[0].by_status == {"done": 3}
    assert len(said) == 1
    assert "its disk is full" in said[0] and "finished trials are safe" in said[0]


def limit_pages(store: Store, pages: int) -> None:
    """How large the file may grow, for all pooled connections: there is one."""
    with store.database._engine.connect() as connection:
        connection.exec_driver_sql(f"PRAGMA max_page_count={pages or 1}")


def test_a_disk_that_stays_full_ends_in_a_sentence_and_the_rest_is_there(tmp_path: Path) -> None:
    """The kernel refuses to let files grow (RLIMIT_FSIZE), in a process of its own."""
    path = tmp_path / "t.db"
    with Store(path) as store:
        store.add("s", draw("a", seeds=range(3)))
        store.finish("w", ended(store.claim("w", 1)[0]))
        store.leave("w")
    code = """
import sys
from paredown.study.sweeps.store import Store
from tests.study.sweeps.test_store_faults import ended
store = Store(sys.argv[1], patience_seconds=1, say=print)
store.finish("w", ended(store.claim("w", 1)[0], size=3_000_000))
"""
    limit = path.stat().st_size + 200_000
    printed = in_a_process(code, str(path), preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)))
    assert "StoreError" in printed and "its disk" in printed and "Free some space" in printed
    with Store(path) as store:
        assert count(store)[0].by_status == {"done": 1}
        store.leave("w")
        assert count(store)[0].waiting == 2


READ_ONLY = """
import os, sys
from paredown.errors import StoreError
from paredown.study.sweeps.store import Store
Store(sys.argv[2]).close()  # all is imported that another user may not be able to read
if os.getuid() == 0:
    os.seteuid(65534)  # root may write anywhere
try:
    Store(sys.argv[1])
except StoreError as error:
    print(error)
"""


@pytest.mark.parametrize("what", ["folder", "file"])
def test_a_read_only_path_is_a_sentence(tmp_path: Path, what: str) -> None:
    folder = tmp_path / "theirs"
    folder.mkdir()
    path = folder / "t.db"
    if what == "file":
        Store(path).close()
        path.chmod(0o444)
    folder.chmod(0o555)
    for parent in (tmp_path, tmp_path.parent, tmp_path.parent.parent):
        parent.chmod(0o755)
    printed = in_a_process(READ_ONLY, str(path), str(tmp_path / "ours.db"))
    folder.chmod(0o755)
    assert printed.startswith(f"the store {path} cannot be ")
    assert "writable" in printed or "Allow writing" in printed


def in_a_process(code: str, *arguments: str, **options: Any) -> str:
    """What a fresh interpreter prints, errors included."""
    env = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'src'}"}
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False, **options)
    return done.stdout + done.stderr


@pytest.mark.parametrize(
    ("content", "said"),
    [(b"name,error\n" * 500, "the file is no SQLite database"), (None, "it cannot be opened")],
    ids=["text", "folder"],
)
def test_other_files_are_refused_and_left_alone(tmp_path: Path, content: bytes | None, said: str) -> None:
    path = tmp_path / "table.csv"
    if content is None:
        path.mkdir()
    else:
        path.write_bytes(content)
    with pytest.raises(StoreError, match=said):
        Store(path)
    assert content is None or path.read_bytes() == content


def test_a_store_to_read_must_be_there(address: str, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"there is no store .*`paredown sweep run` creates it"):
        Store(address, may_create=False)
    assert not list(tmp_path.iterdir()), "looking made nothing"


def test_a_missing_folder_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="Its folder must exist"):
        Store(tmp_path / "nowhere" / "t.db")


def test_a_lock_that_stays_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paredown.study.sweeps.database.LOCK_SECONDS", 0.2)
    path = tmp_path / "t.db"
    with Store(path) as one, Store(path, patience_seconds=0.5) as other:
        with one.database._engine.connect() as connection, connection.begin():
            connection.execute(text("DELETE FROM paredown_workers"))
            assert count(other) == [], "readers are not held up"
            with pytest.raises(StoreError, match="other processes keep it locked"):
                other.beat("w")
        other.beat("w")


@pytest.mark.full
def test_a_server_that_is_killed_and_restarted_loses_nothing(postgres: Postgres, new_postgres: Callable[[], str]) -> None:
    said: list[str] = []
    with Store(new_postgres(), patience_seconds=60, say=said.append) as store:
        store.add("s", draw("a", seeds=range(30)))
        killer = threading.Timer(0.3, lambda: (postgres.kill(), time.sleep(2.0), postgres.start()))
        killer.start()
        reported: list[str] = []
        claims = store.claim("w", 1)
        while claims:
            time.sleep(0.05)
            results = [ended(claim) for claim in claims]
            written, claims = store.exchange("w", results, 1)
            reported += [one.claim.key for one, fate in zip(results, written, strict=True) if fate.trial]
        killer.join()
        found = {row["key"] for row in rows(store) if row["status"] == "done"}
        assert len(reported) == 30 and set(reported) == found, "what was announced is there, once"
    assert any("the server does not answer" in sentence for sentence in said)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda url: url.replace(PASSWORD, "wrong-" + PASSWORD), "refuses user or password"),
        (lambda url: url.replace("tester:", "stranger:"), "refuses user or password"),
        (lambda url: url.replace("/postgres?", "/missing?"), "has no such database"),
        (lambda url: url.replace("127.0.0.1:", "127.0.0.1:1"), None),
        (lambda url: url.replace("@127", "@x@127"), None),
        (lambda url: url.replace("127.0.0.1:", f"127.0.0.1:{PASSWORD}"), "cannot be read"),
        (lambda url: url.replace("postgresql", "mysql"), "PostgreSQL URL"),
    ],
    ids=["password", "user", "database", "port", "host", "unreadable", "kind"],
)
def test_a_url_that_does_not_work_is_a_sentence_without_the_password(
    new_postgres: Callable[[], str], change: Callable[[str], str], said: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paredown.study.sweeps.database.LOCK_SECONDS", 0.5)
    with pytest.raises(StoreError, match=said or "cannot be used|cannot be read") as caught:
        Store(change(new_postgres()))
    assert PASSWORD not in str(caught.value)
    shown = "".join(traceback.format_exception(caught.value)).replace(change.__code__.co_filename, "")
    assert PASSWORD not in shown, "the exception underneath is not shown either"


def test_the_password_is_in_nothing_that_is_written(new_postgres: Callable[[], str], tmp_path: Path) -> None:
    url = new_postgres()
    with Store(url) as store:
        store.add("s", draw("a"))
        store.finish("w", ended(store.claim("w", 1)[0]))
        for name in ("t.csv", "t.json"):
            export(store, tmp_path / name)
            assert PASSWORD not in (tmp_path / name).read_text()
        assert PASSWORD not in repr(store) + json.dumps(rows(store)) + store.database.name
        with pytest.raises(Exception, match="nonsense") as caught:
            store.database.write(lambda c: c.execute(text("SELECT nonsense")))
        assert PASSWORD not in str(caught.value)


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://u:SECRET@h/d",
        "postgresql://h/d?password=SECRET",
        "postgresql://u:SECRET@h:5/d?sslpassword=SECRET&options=SECRET",
        "postgres://SECRET@h/d",
    ],
)
def test_an_address_is_said_without_user_and_options(url: str) -> None:
    assert "SECRET" not in say_address(parse_address(url))
    assert say_address(parse_address(url)).startswith("postgresql://h")
