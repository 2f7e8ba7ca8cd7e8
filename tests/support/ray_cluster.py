"""A Ray cluster of two nodes on this machine for tests: the head with one CPU, and a second node with two CPUs, which can be killed.

`python -m tests.support.ray_cluster` runs both nodes until its standard input is closed, so that they end with the process that started
them. Ray's processes leave the group of their parent: all of them carry a variable of the environment with a random value, by which
`close` finds and kills what is left. They listen on 127.0.0.1 alone, and usage reports are switched off.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

ROOT = Path(__file__).parent.parent.parent
MARK = "PAREDOWN_RAY_TEST"
STORE_BYTES = 80 * 2**20  # of shared memory for each node; Ray's least are 75 MiB


class RayEnvironment:
    """The environment of Ray's processes in a test, and their folder; `close` kills all processes that have it."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="pd-ray-", dir="/tmp"))  # Ray's sockets need a short path
        self._mark = uuid4().hex
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        self.variables = {
            **inherited,
            MARK: self._mark,
            "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'src'}",
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # nodes listen on 127.0.0.1 alone, as they do on Windows and macOS
            "RAY_TMPDIR": str(self.folder),
            "RAY_memory_monitor_refresh_ms": "0",  # Ray would kill trials when other programs fill the machine's memory
            "RAY_USAGE_STATS_ENABLED": "0",
        }

    def processes(self) -> list[int]:
        """The ids of living processes with this environment."""
        found: list[int] = []
        for entry in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                is_ours = f"{MARK}={self._mark}".encode() in (entry / "environ").read_bytes().split(b"\0")
                found += [int(entry.name)] if is_ours else []
        return found

    def close(self) -> None:
        """Kill what is left, and remove the folder."""
        while left := self.processes():
            for process in left:
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            time.sleep(0.02)
        shutil.rmtree(self.folder, ignore_errors=True)


class RayCluster:
    """The two nodes, in a process of their own."""

    def __init__(self, environment: RayEnvironment) -> None:
        command = [sys.executable, "-m", "tests.support.ray_cluster"]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        self._process = subprocess.Popen(command, cwd=ROOT, env=environment.variables, text=True, **pipes)
        environment.variables["RAY_ADDRESS"] = self._answer()
        assert environment.variables["RAY_ADDRESS"], "Ray does not start"

    def kill_node(self) -> None:
        """kill -9 of the second node."""
        assert self._process.stdin is not None
        self._process.stdin.write("kill\n")
        self._process.stdin.flush()
        assert self._answer() == "killed"

    def close(self) -> None:
        """End both nodes; what does not end is left to the environment's `close`."""
        with suppress(subprocess.TimeoutExpired):
            self._process.communicate(timeout=60)

    def _answer(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


def main() -> None:
    """Run two nodes until standard input is closed; a line of it kills the second one."""
    import psutil
    from ray.cluster_utils import Cluster

    size = {"object_store_memory": STORE_BYTES, "num_gpus": 0}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False, **size})
    node = cluster.add_node(**{**size, "num_cpus": 2, "num_gpus": 1}, resources={"disk": 2}, labels={"kind": "second"})
    print(cluster.address, flush=True)
    for _ in sys.stdin:
        raylet = psutil.Process(node.all_processes["raylet"][0].process.pid)
        its_trials = raylet.children(recursive=True)
        cluster.remove_node(node, allow_graceful=False)
        for process in its_trials:  # with the machine; they would outlive the raylet for a moment
            with suppress(psutil.NoSuchProcess):
                process.kill()
        print("killed", flush=True)
    cluster.shutdown()


if __name__ == "__main__":
    main()
