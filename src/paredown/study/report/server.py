"""`serve(source)` shows the report page live in a browser, from the store of a running sweep or from a record file that changes.

The server listens on a loopback address only and is read-only: GET and HEAD of three paths; no part of a request reaches a file or a
database. Requests with another Host header are refused, so that a web page cannot read the record by pointing its own name at this
machine (DNS rebinding). New records are sent as server-sent events.

    /             the page
    /events       new records as a stream of events
    /record.json  the current record

A `RecordSource` is polled for records. Reading one runs no code and unpickles nothing: a record is JSON, a store holds numbers and text.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from os import PathLike
from pathlib import Path
from typing import Any

from paredown.errors import ParedownError, ReportError
from paredown.study.report.page import drawn, policy, render
from paredown.study.report.record import Record, scrub

PATIENCE_SECONDS = 2.0  # a store that is busy for longer is reported on the page


@dataclass
class RecordSource:
    """Reads a report's record that changes: `load` returns the current one, and `state` a value that differs after every change."""

    state: Callable[[], object]
    load: Callable[[], Record]
    close: Callable[[], object] = lambda: None  # releases resources
    _seen: object = field(init=False, default=None)

    def read(self) -> Record | None:
        """Return the current record; None if it has not changed since the last call. ParedownError if it cannot be read."""
        state = self.state()
        if state is not None and state == self._seen:
            return None
        record = self.load()
        self._seen = state
        return record


def open_source(source: str | PathLike[str], *, sweep: str | None = None) -> RecordSource:
    """Return a RecordSource of a record file if `source` ends in .json, else of a database of trials (one `sweep`, or all)."""
    if str(source).lower().endswith(".json"):
        return RecordSource(partial(_file_state, Path(source)), partial(Record.load, source))
    from paredown.study.sweeps.status import count
    from paredown.study.sweeps.store import Store

    store = Store(str(source), may_create=False, patience_seconds=PATIENCE_SECONDS)
    return RecordSource(partial(count, store), partial(Record.of_store, store, sweep=sweep), store.close)


def _file_state(path: Path) -> object:
    try:
        status = path.stat()
        return status.st_mtime_ns, status.st_size
    except OSError:
        return None


class WatchedSource:
    """Polls a RecordSource in a thread; `number` counts new records and errors, and `wait` blocks until `number` changes."""

    def __init__(self, source: RecordSource, *, seconds: float = 1.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._source, self._seconds, self._clock = source, seconds, clock
        self._changed = threading.Condition()
        self._ended = threading.Event()
        self.record = source.read() or Record("Nothing yet")
        self.number = 1
        self.trouble = ""
        self._event: tuple[int, tuple[str, str]] | None = None  # cached: (number, event)
        self._thread = threading.Thread(target=self._run, name="paredown-watch", daemon=True)

    def start(self) -> None:
        """Start the thread that polls the source."""
        self._thread.start()

    def close(self) -> None:
        """Stop polling, wake all waiting threads, and close the source."""
        self._ended.set()
        with self._changed:
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join(timeout=10)
        self._source.close()

    @property
    def has_ended(self) -> bool:
        """Return whether polling has stopped."""
        return self._ended.is_set()

    def wait(self, number: int, timeout: float) -> int:
        """Return the current number of records and errors, after waiting up to `timeout` seconds for one other than `number`."""
        with self._changed:
            self._changed.wait_for(lambda: self.number != number or self.has_ended, timeout)
            return self.number

    def event(self) -> tuple[str, str]:
        """Return the event to send to pages, (kind, JSON): ("record", the record), or ("trouble", the error of reading it)."""
        with self._changed:
            if self._event is None or self._event[0] != self.number:  # serialized once for all open pages
                value = ("trouble", scrub(self.trouble)) if self.trouble else ("record", drawn(self.record))
                self._event = self.number, (value[0], json.dumps(value[1], allow_nan=False))
            return self._event[1]

    def _run(self) -> None:
        pause = self._seconds
        while not self._ended.wait(pause):
            begun = self._clock()
            self._poll()
            pause = max(self._seconds, 4 * (self._clock() - begun))  # polling a large store uses at most a fifth of a core

    def _poll(self) -> None:
        try:
            record, trouble = self._source.read(), ""
        except ParedownError as error:
            record, trouble = None, str(error)
        if record is None and trouble == self.trouble:
            return
        with self._changed:
            self.record, self.trouble = record or self.record, trouble
            self.number += 1
            self._changed.notify_all()


# --- the HTTP server -------------------------------------------------------------------------------------------------

HOST = "127.0.0.1"  # loopback alone: a page has no log-in
MOST_STREAMS = 32  # open event streams
ALIVE_SECONDS = 10.0  # between comments that keep an idle stream open
REFUSED_METHODS = ("POST", "PUT", "DELETE", "PATCH", "OPTIONS", "CONNECT", "TRACE")
TEXT, PAGE, JSON, EVENTS = "text/plain", "text/html", "application/json", "text/event-stream"


class Server:
    """Serves the report page at `url` on loopback, from `start` to `close`; usable as a context manager."""

    def __init__(self, source: RecordSource, *, port: int = 0, seconds: float = 1.0) -> None:
        _check(port)
        try:
            self.watched = WatchedSource(source, seconds=seconds)
            self._http = _Http((HOST, port), self.watched)
        except BaseException as error:
            source.close()
            if not isinstance(error, OSError):
                raise
            advice = "Give another port, or 0 for a free one."
            raise ReportError(f"port {port} of {HOST} cannot be used: {error.strerror}. {advice}") from None
        self.port = self._http.server_port
        self.url = f"http://{HOST}:{self.port}/"
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.1,), name="paredown-serve", daemon=True)

    def __enter__(self) -> Server:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> None:
        """Start polling the source and answering requests."""
        self.watched.start()
        self._thread.start()

    def close(self) -> None:
        """Stop the server and end all open event streams."""
        self.watched.close()
        if self._thread.is_alive():  # shutdown blocks unless serve_forever runs
            self._http.shutdown()
            self._thread.join(timeout=5)
        self._http.server_close()

    def wait(self) -> None:
        """Block until the server is closed, or KeyboardInterrupt."""
        while self._thread.is_alive():
            self._thread.join(timeout=0.5)


def serve(
    source: str | PathLike[str] | RecordSource,
    *,
    port: int = 0,
    seconds: float = 1.0,
    sweep: str | None = None,
    say: Callable[[str], object] = print,
) -> None:
    """Serve the report page of a record file or a database of trials until Ctrl-C; `say` is called with its address."""
    _check(port)
    opened = source if isinstance(source, RecordSource) else open_source(source, sweep=sweep)
    with Server(opened, port=port, seconds=seconds) as server:
        say(f"{server.url} shows it until Ctrl-C")
        try:
            server.wait()
        except KeyboardInterrupt:
            say("stopped")


def _check(port: int) -> None:
    if type(port) is not int or not 0 <= port < 65536:
        raise ReportError(f"port {port!r} is invalid; it is a whole number from 0 (any free port) to 65535.")


class _Http(ThreadingHTTPServer):
    """The HTTP server of a report page: it has the watched record, a limit on event streams, and accepted Host headers."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, address: tuple[str, int], watched: WatchedSource) -> None:
        self.watched = watched
        self.streams = threading.Semaphore(MOST_STREAMS)
        super().__init__(address, _Handler)
        names = {HOST, "localhost"}
        self.names = {f"{name}:{self.server_port}" for name in names} | (names if self.server_port == 80 else set())

    def server_bind(self) -> None:
        """Bind without a DNS lookup of the host name, which can take seconds."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore errors of connections that the client closed."""


class _Handler(BaseHTTPRequestHandler):
    """Answers one HTTP request to the server of the report page."""

    protocol_version = "HTTP/1.1"
    timeout = 10  # seconds for a request to arrive, and for a write to finish
    server: _Http  # pyright: ignore[reportIncompatibleVariableOverride]

    def do_GET(self) -> None:
        """Answer a GET request for the page, its record, or its events."""
        self.close_connection = True
        hosts, record = self.headers.get_all("Host", []), self.server.watched.record
        if not hosts or any(name not in self.server.names for name in hosts):
            self._send(HTTPStatus.MISDIRECTED_REQUEST, TEXT, "this server answers to its loopback address alone\n")
        elif self.path == "/":
            self._send(HTTPStatus.OK, PAGE, render(record, live="events"))
        elif self.path == "/record.json":
            self._send(HTTPStatus.OK, JSON, json.dumps(record.to_json(), allow_nan=False) + "\n")
        elif self.path == "/events":
            self._events()
        else:
            self._send(HTTPStatus.NOT_FOUND, TEXT, "there are /, /events and /record.json\n")

    do_HEAD = do_GET

    def refuse(self) -> None:
        """Answer any method but GET and HEAD with status 405."""
        self.close_connection = True
        self._send(HTTPStatus.METHOD_NOT_ALLOWED, TEXT, "this server is read-only: GET and HEAD\n", Allow="GET, HEAD")

    def _events(self) -> None:
        if self.command == "HEAD":
            return self._send(HTTPStatus.OK, EVENTS, "")
        if not self.server.streams.acquire(blocking=False):
            return self._send(HTTPStatus.SERVICE_UNAVAILABLE, TEXT, f"{MOST_STREAMS} pages are open already\n")
        try:
            self._stream()
        except OSError:
            return  # the client closed the connection
        finally:
            self.server.streams.release()

    def _stream(self) -> None:
        watched, number = self.server.watched, 0
        self._head(HTTPStatus.OK, EVENTS)
        while not watched.has_ended:
            current = watched.wait(number, ALIVE_SECONDS)
            kind, text = watched.event()
            line = f"event: {kind}\ndata: {text}\n\n" if current != number else ": nothing new\n\n"
            self.wfile.write(line.encode())
            self.wfile.flush()
            number = current

    def _send(self, status: HTTPStatus, kind: str, text: str, **headers: str) -> None:
        body = text.encode()
        self._head(status, kind, **headers, **{"Content-Length": str(len(body))})
        if self.command != "HEAD":
            self.wfile.write(body)

    def _head(self, status: HTTPStatus, kind: str, **headers: str) -> None:
        self.send_response(status)
        fixed = {
            "Content-Type": f"{kind}; charset=utf-8",
            "Content-Security-Policy": f"{policy(is_live=True)}; frame-ancestors 'none'",
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "Cross-Origin-Resource-Policy": "same-origin",
            "Cache-Control": "no-store",
            "Connection": "close",
        }
        for name, value in (fixed | headers).items():
            self.send_header(name, value)
        self.end_headers()

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answer an invalid request with its status alone; nothing of the request is echoed."""
        self.close_connection = True
        self.command = getattr(self, "command", None) or "GET"
        self._send(HTTPStatus(code), TEXT, f"{HTTPStatus(code).phrase}\n")

    def version_string(self) -> str:
        """Return the Server header, which names no versions."""
        return "paredown"

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""


for _method in REFUSED_METHODS:
    setattr(_Handler, f"do_{_method}", _Handler.refuse)
