"""A real PostgreSQL server on loopback for tests: started, killed and started again by its process id.

The binaries are the machine's own (PATH, or where Debian puts them) or those of a wheel; without any, tests that need a server are
counted skips. The server asks for a password, so that tests can look for it where it must not be. PostgreSQL refuses to run as
root: there it runs as `postgres` or `nobody`.
"""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

PASSWORD = "pw-8c1f0e"  # of a server that lives as long as the tests
USER = "tester"


def find_binaries() -> Path | None:
    """The folder of `initdb` and `postgres`; None where there is none."""
    places = [Path(found).resolve().parent] if (found := shutil.which("initdb")) else []
    places += sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    spec = find_spec("pgserver")
    places += [Path(spec.origin).parent / "pginstall" / "bin"] if spec and spec.origin else []
    return next((place for place in places if (place / "postgres").exists() and (place / "initdb").exists()), None)


class Postgres:
    """One server in a folder of its own."""

    def __init__(self, binaries: Path, *, is_durable: bool = False) -> None:
        self._is_durable = is_durable
        self._binaries = binaries
        self._folder = Path(tempfile.mkdtemp(prefix="paredown-pg-"))
        self._user = _other_user() if os.getuid() == 0 else None
        self._process: subprocess.Popen[bytes] | None = None
        self.port = _free_port()
        secret = self._folder / "password"
        secret.write_text(PASSWORD)
        if self._user is not None:
            shutil.chown(self._folder, self._user)
            shutil.chown(secret, self._user)
        options = ["-U", USER, "--pwfile", str(secret), "-A", "scram-sha-256", "--no-sync", "--locale=C", "-E", "UTF8"]
        self._run("initdb", "-D", str(self._folder / "data"), *options)

    @property
    def url(self) -> str:
        """The address, password included."""
        return f"postgresql://{USER}:{PASSWORD}@127.0.0.1:{self.port}/postgres"

    @property
    def socket_url(self) -> str:
        """The address of its Unix socket."""
        return f"postgresql://{USER}:{PASSWORD}@/postgres?host={self._folder}&port={self.port}"

    def start(self) -> None:
        """Start the server and wait until it answers; after a kill its children may hold it up for a moment."""
        settings = {
            "port": self.port,
            "listen_addresses": "127.0.0.1",
            "unix_socket_directories": self._folder,
            "max_connections": 60,
            "max_wal_size": "64MB",
            "fsync": "on" if self._is_durable else "off",  # killed processes lose nothing without it, and tests take less time
        }
        options = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
        command = [str(self._binaries / "postgres"), "-D", str(self._folder / "data"), *options]
        deadline = time.monotonic() + 60
        while not (self._process is not None and self._process.poll() is None and self._answers()):
            assert time.monotonic() < deadline, "PostgreSQL does not start"
            if self._process is None or self._process.poll() is not None:
                self._process = subprocess.Popen(
                    command,
                    user=self._user,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    cwd=self._folder,
                    start_new_session=True,
                )
            time.sleep(0.05)

    def _answers(self) -> bool:
        import psycopg

        try:
            psycopg.connect(self.url, connect_timeout=5).close()
        except psycopg.OperationalError:
            return False
        return True

    def kill(self) -> None:
        """kill -9 of the server; its children end by themselves."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """A shutdown that aborts transactions and ends all connections, as a restart of the service does."""
        self._end(signal.SIGINT)

    def close(self) -> None:
        """End the server and remove its folder."""
        self._end(signal.SIGQUIT)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _end(self, sig: signal.Signals) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(sig)
            self._process.wait()
        self._process = None

    def _run(self, program: str, *arguments: str) -> None:
        command = [str(self._binaries / program), *arguments]
        done = subprocess.run(command, user=self._user, cwd=self._folder, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr


def _other_user() -> str:
    names = {entry.pw_name for entry in pwd.getpwall()}
    return "postgres" if "postgres" in names else "nobody"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
