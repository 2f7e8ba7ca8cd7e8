"""`serve(source)`: the same page, live, over a running sweep's store or over a record that is written again.

On this machine alone (a loopback address), for reading alone: GET and HEAD of three paths, and nothing of a request reaches a file or a
database. A request whose Host header is not this server's is refused, so that a page elsewhere cannot read it by giving its own name
this machine's address (DNS rebinding). New records are sent as server-sent events.

    /             the page
    /events       the records as they come
    /record.json  the record as it is now

What a live page shows, read again and again: a record's file, or a store while its sweep runs.

Reading runs nothing and unpickles nothing: a record is JSON, a store holds numbers and texts.
"""

from __future__ import annotations

import ipaddress
import json
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from os import PathLike
from pathlib import Path
from typing import Any

from paredown.errors import ParedownError, ReportError
from paredown.report.page import policy, render
from paredown.report.record import Record, scrub

PATIENCE_SECONDS = 2.0  # that a store may be busy before the page says so


class RecordSource(ABC):
    """Where records come from."""

    @abstractmethod
    def read(self) -> Record | None:
        """The record as it is now; None where nothing is new since the last time. ParedownError says why there is none."""

    def close(self) -> None:
        """Give back what is held."""
        return


class FileSource(RecordSource):
    """The record in a file."""

    def __init__(self, path: str | PathLike[str]) -> None:
        self._path = Path(path)
        self._seen: object = None

    def read(self) -> Record | None:
        """Anew when the file has changed."""
        try:
            found = self._path.stat()
            seen = (found.st_mtime_ns, found.st_size)
        except OSError:
            seen = None  # the reader says what is wrong
        if seen is not None and seen == self._seen:
            return None
        record = Record.load(self._path)
        self._seen = seen
        return record


class StoreSource(RecordSource):
    """The trials of a store."""

    def __init__(self, address: str | PathLike[str], *, sweep: str | None = None) -> None:
        from paredown.report.store_record import open_to_read

        self._store = open_to_read(str(address), patience_seconds=PATIENCE_SECONDS)
        self._sweep = sweep
        self._seen: object = None

    def read(self) -> Record | None:
        """Anew when a trial was added, claimed or finished."""
        from paredown.report.store_record import counts_of

        seen = counts_of(self._store)
        if seen == self._seen:
            return None
        record = Record.of_store(self._store, sweep=self._sweep)
        self._seen = seen
        return record

    def close(self) -> None:
        """Close the store."""
        self._store.close()


def open_source(source: str | PathLike[str], *, sweep: str | None = None) -> RecordSource:
    """The source that a text names: a file that ends in .json is a record, anything else a store."""
    return FileSource(source) if str(source).lower().endswith(".json") else StoreSource(source, sweep=sweep)


class WatchedSource:
    """The latest record of a source, with a number that rises with each; who waits for the next one is woken."""

    def __init__(self, source: RecordSource, *, seconds: float = 1.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._source, self._seconds, self._clock = source, seconds, clock
        self._changed = threading.Condition()
        self._ended = threading.Event()
        self.record = source.read() or Record("Nothing yet")
        self.number = 1
        self.trouble = ""
        self._told: tuple[int, tuple[str, str]] | None = None
        self._thread = threading.Thread(target=self._run, name="paredown-watch", daemon=True)

    def start(self) -> None:
        """Look from now on."""
        self._thread.start()

    def close(self) -> None:
        """Look no more, and wake everybody."""
        self._ended.set()
        with self._changed:
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join(timeout=10)
        self._source.close()

    @property
    def has_ended(self) -> bool:
        """Whether it looks no more."""
        return self._ended.is_set()

    def wait(self, number: int, timeout: float) -> int:
        """The number of what is there now, after a wait for one that is not `number`."""
        with self._changed:
            self._changed.wait_for(lambda: self.number != number or self.has_ended, timeout)
            return self.number

    def said(self) -> tuple[str, str]:
        """(kind, JSON) of what a page is told now: the record, or the trouble there is in reading it."""
        with self._changed:
            if self._told is None or self._told[0] != self.number:  # made once, however many pages are open
                value = ("trouble", scrub(self.trouble)) if self.trouble else ("record", self.record.to_json())
                self._told = self.number, (value[0], json.dumps(value[1], allow_nan=False))
            return self._told[1]

    def _run(self) -> None:
        pause = self._seconds
        while not self._ended.wait(pause):
            begun = self._clock()
            self._look()
            pause = max(self._seconds, 4 * (self._clock() - begun))  # a large store does not keep a core busy

    def _look(self) -> None:
        try:
            found, trouble = self._source.read(), ""
        except ParedownError as error:
            found, trouble = None, str(error)
        if found is None and trouble == self.trouble:
            return
        with self._changed:
            self.record, self.trouble = found or self.record, trouble
            self.number += 1
            self._changed.notify_all()


# --- `serve(source)` ---

MOST_STREAMS = 32
ALIVE_SECONDS = 10.0  # between signs of life on a quiet stream
REFUSED_METHODS = ("POST", "PUT", "DELETE", "PATCH", "OPTIONS", "CONNECT", "TRACE")
TEXT, PAGE, JSON, EVENTS = "text/plain", "text/html", "application/json", "text/event-stream"


class Server:
    """A page on loopback, from `start` to `close`; a context manager does both. `url` is where it is."""

    def __init__(self, source: RecordSource, *, host: str = "127.0.0.1", port: int = 0, seconds: float = 1.0) -> None:
        _check(host, port)
        try:
            self.watched = WatchedSource(source, seconds=seconds)
            self._http = _Http((host, port), self.watched)
        except BaseException as error:
            source.close()
            if not isinstance(error, OSError):
                raise
            advice = "Give another port, or 0 for a free one."
            raise ReportError(f"port {port} of {host} cannot be used: {error.strerror}. {advice}") from None
        self.port = self._http.server_port
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{self.port}/"
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.1,), name="paredown-serve", daemon=True)

    def __enter__(self) -> Server:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> None:
        """Answer from now on."""
        self.watched.start()
        self._thread.start()

    def close(self) -> None:
        """Answer no more; streams end."""
        self.watched.close()
        if self._thread.is_alive():  # else nobody would answer `shutdown`
            self._http.shutdown()
            self._thread.join(timeout=5)
        self._http.server_close()

    def wait(self) -> None:
        """Until the server is closed, or the caller is interrupted."""
        while self._thread.is_alive():
            self._thread.join(timeout=0.5)


def serve(
    source: str | PathLike[str] | RecordSource,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    seconds: float = 1.0,
    sweep: str | None = None,
    say: Callable[[str], object] = print,
) -> None:
    """Show a store, or a record's file, until interrupted; `say` hears the address."""
    _check(host, port)
    found = source if isinstance(source, RecordSource) else open_source(source, sweep=sweep)
    with Server(found, host=host, port=port, seconds=seconds) as server:
        say(f"{server.url} shows it until Ctrl-C")
        try:
            server.wait()
        except KeyboardInterrupt:
            say("stopped")


def _check(host: str, port: int) -> None:
    try:
        is_near = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_near = False
    if not is_near:
        raise ReportError(
            f"host {host!r} is not this machine's loopback, and the page is shown to nobody else. From another machine: "
            "ssh -L 8000:127.0.0.1:PORT this-machine, then open http://127.0.0.1:8000/."
        )
    if type(port) is not int or not 0 <= port < 65536:
        raise ReportError(f"port {port!r} is none; it is a whole number from 0 (any that is free) to 65535.")


class _Http(ThreadingHTTPServer):
    """Threads that end with the process; knows what it shows and by which names it may be called."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, address: tuple[str, int], watched: WatchedSource) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self.watched = watched
        self.streams = threading.Semaphore(MOST_STREAMS)
        super().__init__(address, _Handler)
        names = {"127.0.0.1", "localhost", "[::1]", f"[{address[0]}]" if ":" in address[0] else address[0]}
        self.names = {f"{name}:{self.server_port}" for name in names} | (names if self.server_port == 80 else set())

    def server_bind(self) -> None:
        """Without looking the host's name up, which may take seconds."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A reader that went away is no news."""


class _Handler(BaseHTTPRequestHandler):
    """One request."""

    protocol_version = "HTTP/1.1"
    timeout = 10  # seconds for a request to arrive, and for a line to be taken
    server: _Http  # pyright: ignore[reportIncompatibleVariableOverride]

    def do_GET(self) -> None:
        """Answer one of the three paths."""
        self.close_connection = True
        if self.headers.get_all("Host") is None or any(name not in self.server.names for name in self.headers.get_all("Host", [])):
            return self._send(HTTPStatus.MISDIRECTED_REQUEST, TEXT, "this server answers to its loopback address alone\n")
        answer = self._answers().get(self.path)
        if answer is None:
            return self._send(HTTPStatus.NOT_FOUND, TEXT, "there are /, /events and /record.json\n")
        return answer()

    do_HEAD = do_GET

    def refuse(self) -> None:
        """Of any other method."""
        self.close_connection = True
        self._send(HTTPStatus.METHOD_NOT_ALLOWED, TEXT, "this page is for reading: GET and HEAD\n", Allow="GET, HEAD")

    def _answers(self) -> dict[str, Callable[[], None]]:
        return {"/": self._page, "/record.json": self._record, "/events": self._events}

    def _page(self) -> None:
        self._send(HTTPStatus.OK, PAGE, render(self.server.watched.record, live="events"))

    def _record(self) -> None:
        self._send(HTTPStatus.OK, JSON, json.dumps(self.server.watched.record.to_json(), allow_nan=False) + "\n")

    def _events(self) -> None:
        if self.command == "HEAD":
            return self._send(HTTPStatus.OK, EVENTS, "")
        if not self.server.streams.acquire(blocking=False):
            return self._send(HTTPStatus.SERVICE_UNAVAILABLE, TEXT, f"{MOST_STREAMS} pages are open already\n")
        try:
            self._stream()
        except OSError:
            return  # the reader went away
        finally:
            self.server.streams.release()

    def _stream(self) -> None:
        watched, number = self.server.watched, 0
        self._head(HTTPStatus.OK, EVENTS)
        while not watched.has_ended:
            now = watched.wait(number, ALIVE_SECONDS)
            kind, text = watched.said()
            line = f"event: {kind}\ndata: {text}\n\n" if now != number else ": nothing new\n\n"
            self.wfile.write(line.encode())
            self.wfile.flush()
            number = now

    def _send(self, status: HTTPStatus, kind: str, text: str, **headers: str) -> None:
        body = text.encode()
        self._head(status, kind, **headers, **{"Content-Length": str(len(body))})
        if self.command != "HEAD":
            self.wfile.write(body)

    def _head(self, status: HTTPStatus, kind: str, **headers: str) -> None:
        self.send_response(status)
        own = {
            "Content-Type": f"{kind}; charset=utf-8",
            "Content-Security-Policy": f"{policy(is_live=True)}; frame-ancestors 'none'",
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "Cross-Origin-Resource-Policy": "same-origin",
            "Cache-Control": "no-store",
            "Connection": "close",
        }
        for name, value in (own | headers).items():
            self.send_header(name, value)
        self.end_headers()

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """A request that is none: the status and a few words, nothing of what was sent."""
        self.close_connection = True
        self.command = getattr(self, "command", None) or "GET"
        self._send(HTTPStatus(code), TEXT, f"{HTTPStatus(code).phrase}\n")

    def version_string(self) -> str:
        """Without versions of anything."""
        return "paredown"

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing."""


for _method in REFUSED_METHODS:
    setattr(_Handler, f"do_{_method}", _Handler.refuse)
