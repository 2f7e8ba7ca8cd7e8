"""The server: loopback alone, reading alone, its own Host header, events as results come, and sentences about broken stores."""

from __future__ import annotations

import http.client
import json
import sqlite3
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from paredown.errors import ParedownError, ReportError
from paredown.plan.plan import Plan
from paredown.study.report.page import drawn
from paredown.study.report.record import Record
from paredown.study.report.server import MOST_STREAMS, RecordSource, Server, WatchedSource, open_source, serve
from tests.study.report.made import record, trial

pytest.importorskip("sqlalchemy")

from paredown.study.sweeps.store import Store
from paredown.study.sweeps.sweep import EndedTrial, Sweep
from tests.support.trials import PLANS, done, draw


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    """Over a record's file."""
    record().save(tmp_path / "record.json")
    with Server(open_source(tmp_path / "record.json"), seconds=0.05) as made:
        yield made


def ask(server: Server, method: str, path: str, **headers: str) -> tuple[int, dict[str, str], str]:
    """(status, headers, body) of one request; the path is sent as it is."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=120)
    connection.putrequest(method, path, skip_host="Host" in headers)
    for name, value in headers.items():
        connection.putheader(name, value)
    connection.endheaders()
    answer = connection.getresponse()
    found = answer.status, dict(answer.getheaders()), answer.read().decode()
    connection.close()
    return found


def events(server: Server) -> Iterator[tuple[str, Any]]:
    """(kind, value) of each event of a stream."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=120)
    connection.request("GET", "/events")
    answer = connection.getresponse()
    assert answer.headers["Content-Type"].startswith("text/event-stream")
    try:
        kind = ""
        while line := answer.readline().decode():
            name, _, value = line.strip().partition(": ")
            kind = value if name == "event" else kind
            if name == "data":
                yield kind, json.loads(value)
    finally:
        connection.close()


def test_the_page_and_the_record_are_served(server: Server) -> None:
    status, headers, body = ask(server, "GET", "/")
    assert (status, headers["Content-Type"]) == (200, "text/html; charset=utf-8")
    assert 'data-live="events"' in body
    assert Record.from_json(json.loads(ask(server, "GET", "/record.json")[2])) == record()


def test_answers_say_what_a_browser_may_do_with_them(server: Server) -> None:
    _, headers, _ = ask(server, "GET", "/")
    assert headers["Content-Security-Policy"].startswith("default-src 'none'")
    assert "frame-ancestors 'none'" in headers["Content-Security-Policy"]
    assert (headers["X-Content-Type-Options"], headers["Cross-Origin-Resource-Policy"]) == ("nosniff", "same-origin")
    assert headers["Server"] == "paredown"
    assert "Access-Control-Allow-Origin" not in headers


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:{port}", "127.0.0.1", "127.0.0.1:1", "localhost.evil.example:{port}", ""]
)
def test_another_host_is_refused(server: Server, host: str) -> None:
    for path in ("/", "/record.json", "/events"):
        status, _, body = ask(server, "GET", path, Host=host.format(port=server.port))
        assert status == 421
        assert "blobs" not in body


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_its_own_names_are_answered(server: Server, host: str) -> None:
    assert ask(server, "GET", "/", Host=f"{host}:{server.port}")[0] == 200


PATHS = (
    "/../record.json",
    "/..%2f..%2fetc/passwd",
    "/static/page.js",
    "//etc/passwd",
    "/record.json?x",
    "/record.json/",
    "/%2e%2e/",
    "*",
    "/\\..",
)


@pytest.mark.parametrize("path", PATHS)
def test_other_paths_are_not_there(server: Server, path: str) -> None:
    status, _, body = ask(server, "GET", path)
    assert (status, body) == (404, "there are /, /events and /record.json\n")


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"])
def test_other_methods_are_refused(server: Server, method: str) -> None:
    status, headers, _ = ask(server, method, "/")
    assert (status, headers["Allow"]) == (405, "GET, HEAD")


def test_no_other_machine_is_served(server: Server) -> None:
    """Another address of this machine, even one of the loopback network, finds no server."""
    with pytest.raises(OSError):
        http.client.HTTPConnection("127.0.0.2", server.port, timeout=10).connect()


def test_a_port_that_is_taken_or_none_is_a_sentence(server: Server, tmp_path: Path) -> None:
    with pytest.raises(ReportError, match=f"port {server.port} of 127.0.0.1 cannot be used"):
        Server(open_source(tmp_path / "record.json"), port=server.port)
    with pytest.raises(ReportError, match="whole number"):
        serve(tmp_path / "record.json", port=70000)


def test_a_new_record_is_sent(server: Server, tmp_path: Path) -> None:
    stream = events(server)
    assert next(stream)[1]["title"] == record().title
    replace(record(), title="another").save(tmp_path / "record.json")
    assert next(stream) == ("record", drawn(replace(record(), title="another")))


def test_trouble_is_said_and_passes(server: Server, tmp_path: Path) -> None:
    stream = events(server)
    next(stream)
    (tmp_path / "record.json").write_text("{")
    kind, said = next(stream)
    assert (kind, "not JSON" in said, str(tmp_path) in said) == ("trouble", True, False)
    record().save(tmp_path / "record.json")
    assert next(stream)[0] == "record"


def test_results_of_a_sweep_arrive(tmp_path: Path) -> None:
    with Store(tmp_path / "trials.db") as store:
        store.add("s", draw("noop", seeds=(0, 1), plans=PLANS))
        with Server(open_source(tmp_path / "trials.db"), seconds=0.05) as server:
            stream = events(server)
            assert next(stream)[1]["progress"] == [{"sweep": "s", "waiting": 4, "running": 0, "by_status": {}}]
            claim = store.claim("w", 1)[0]
            store.finish("w", EndedTrial(claim, replace(done(claim.spec), predicted_peak_bytes=1000)))
            told = next(value for _, value in stream if value["runs"])
            assert told["progress"][0]["by_status"] == {"done": 1}
            assert [mark["nbytes"] for mark in told["studies"][0]["marks"]] == [1000]


def test_a_page_of_a_store_has_its_labels_times_and_hosts_without_their_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    minutes = iter(range(60))
    monkeypatch.setattr("paredown.study.sweeps.store.utc_now", lambda: f"2026-01-31T12:{next(minutes):02}:00Z")
    with Store(tmp_path / "trials.db") as store:
        store.add("s", Sweep("s", ("noop",), PLANS, labels={"four bits": PLANS[1]}).draw())
        store.add("t", Sweep("t", ("noop",), (Plan.preset("lpmm"),), labels={"four bits": Plan.preset("lpmm")}).draw())
        for host in ("tyrannosaurus", "brachiosaurus", "tyrannosaurus"):
            monkeypatch.setattr("socket.gethostname", lambda host=host: host)
            (claim,) = store.claim("w", 1)
            store.finish("w", EndedTrial(claim, replace(done(claim.spec), predicted_peak_bytes=1000)))
        value = Record.of_store(store).to_json()
    runs = [(run["plan"], run["finished_at"], run["host"]) for run in value["runs"]]
    assert runs == [
        ("baseline", "2026-01-31T12:01:00Z", "host 1"),
        ("four bits", "2026-01-31T12:03:00Z", "host 2"),
        ("four bits (2)", "2026-01-31T12:05:00Z", "host 1"),
    ], "two plans of one label are told apart"
    assert sorted(mark["label"] for mark in value["studies"][0]["marks"]) == ["baseline", "four bits", "four bits (2)"]
    assert "saurus" not in json.dumps(value) and Record.from_json(value).to_json() == value


def test_serving_writes_nothing_into_the_store(tmp_path: Path) -> None:
    with Store(tmp_path / "trials.db") as store:
        store.add("s", draw("noop", plans=PLANS))
    dump = lambda: list(sqlite3.connect(tmp_path / "trials.db").iterdump())  # noqa: E731
    before = dump()
    with Server(open_source(tmp_path / "trials.db"), seconds=0.05) as server:
        next(events(server))
        time.sleep(0.2)
    assert dump() == before


def test_a_sweep_can_be_chosen(tmp_path: Path) -> None:
    with Store(tmp_path / "trials.db") as store:
        store.add("one", draw("noop"))
        store.add("two", draw("nap"))
        assert [row.sweep for row in Record.of_store(store, sweep="two").progress] == ["two"]
        assert Record.of_store(store).title == "Sweep one, two"
        with pytest.raises(ReportError, match=r"no sweep 'three'\. It has: one, two"):
            Record.of_store(store, sweep="three")


def test_streams_end_with_the_server(tmp_path: Path) -> None:
    record().save(tmp_path / "record.json")
    with Server(open_source(tmp_path / "record.json"), seconds=0.05) as server:
        stream = events(server)
        next(stream)
    assert list(stream) == []
    with pytest.raises(OSError):
        ask(server, "GET", "/")
    assert not [thread for thread in threading.enumerate() if thread.name in ("paredown-serve", "paredown-watch")]


def test_a_source_is_closed_whatever_happens(tmp_path: Path) -> None:
    closed: list[str] = []

    def counted(name: str) -> RecordSource:
        return replace(open_source(tmp_path / name), close=lambda: closed.append(name))

    with pytest.raises(ReportError, match="cannot be read"):
        Server(counted("none.json"))
    assert closed == ["none.json"]
    record().save(tmp_path / "record.json")
    Server(counted("record.json")).close()  # one that was never started
    assert closed == ["none.json", "record.json"]


def test_too_many_streams_are_refused(server: Server) -> None:
    streams = [events(server) for _ in range(MOST_STREAMS)]
    for stream in streams:
        next(stream)
    assert ask(server, "GET", "/events")[0] == 503
    assert ask(server, "GET", "/")[0] == 200
    for stream in streams:
        stream.close()


def test_serve_says_where_and_ends_when_interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record().save(tmp_path / "record.json")
    said: list[str] = []

    def interrupt(self: Server) -> None:
        assert ask(self, "GET", "/")[0] == 200
        raise KeyboardInterrupt

    monkeypatch.setattr(Server, "wait", interrupt)
    serve(tmp_path / "record.json", say=said.append)
    assert said[0].startswith("http://127.0.0.1:")
    assert said[-1] == "stopped"


# --- broken stores --------------------------------------------------------------------------------------------------


def test_a_store_that_is_not_there_is_not_made(tmp_path: Path) -> None:
    with pytest.raises(ParedownError, match="there is no store"):
        open_source(tmp_path / "none.db")
    assert list(tmp_path.iterdir()) == []


def test_what_was_read_last_stays_while_there_is_trouble() -> None:
    num = count()

    def load() -> Record:
        """Fail from the second time on."""
        if next(num):
            raise ReportError("gone")
        return Record.of_trials("t", [trial("lpmm")])

    watched = WatchedSource(RecordSource(lambda: None, load), seconds=0.01)
    watched.start()
    assert watched.wait(1, 120) == 2
    assert watched.event() == ("trouble", '"gone"')
    assert watched.record.title == "t"
    time.sleep(0.05)
    assert watched.number == 2, "the same trouble is told once"
    watched.close()
