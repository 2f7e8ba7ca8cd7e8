"""The ray engine: one process per trial on a Ray cluster, either a running one that this machine belongs to, or a new local one.

The worker on this machine accesses the store; trials run where Ray has free resources, each with its share of a GPU, and have access to
neither the store nor its password. Task files must be at the same path on every machine of the cluster. When the worker dies, Ray kills its
trials. `pip install 'paredown[ray]'`.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Sequence
from importlib import import_module
from typing import Any, final

from paredown.errors import SweepError
from paredown.sweeps.engines.engine import Engine, RunTrial, failed, run_safely
from paredown.sweeps.sweep import Claim, EndedTrial, TrialSpec
from paredown.tasks.trial import Status, Trial


@final
class RayEngine(Engine):
    """Runs trials as Ray tasks, one process each. `gpus` and `cpus` are those of one trial; fractions are allowed."""

    def __init__(self, run: RunTrial, *, slots: int | None = None, gpus: float | None = None, cpus: float = 1.0) -> None:
        self._ray = _join()
        resources = self._ray.cluster_resources()
        self._gpus = gpus if gpus is not None else (1.0 if resources.get("GPU") else 0.0)
        num_fitting = resources.get("GPU", 0) / self._gpus if self._gpus else resources.get("CPU", 1) / cpus
        self.slots = slots or max(1, int(num_fitting))
        self._remote = self._ray.remote(num_cpus=cpus, num_gpus=self._gpus, max_calls=1, max_retries=0)(_run_remotely)
        self._run = run
        self._running: dict[Any, tuple[Claim, float | None]] = {}

    @staticmethod
    def make(run: RunTrial, slots: int | None) -> RayEngine:
        """The engine with this many slots; with more slots than GPUs, trials share GPUs."""
        engine = RayEngine(run, slots=slots)
        num_gpus = engine._ray.cluster_resources().get("GPU", 0)
        return RayEngine(run, slots=slots, gpus=num_gpus / slots) if slots and num_gpus and slots > num_gpus else engine

    def start(self, claim: Claim) -> None:
        """Start a trial."""
        limit = claim.spec.settings.timeout_seconds
        self._running[self._remote.remote(self._run, claim.spec)] = (claim, None if limit is None else time.monotonic() + limit)

    def wait(self, seconds: float) -> list[EndedTrial]:
        """The trials that ended, after at most `seconds`."""
        ready, _ = self._ray.wait(list(self._running), num_returns=1, timeout=seconds)
        ended = [self._get(reference) for reference in ready]
        now = time.monotonic()
        late = [
            ref for ref, (_, deadline) in self._running.items() if ref not in ready and deadline is not None and now >= deadline
        ]
        return ended + [self._end(reference) for reference in late]

    def stop(self) -> Sequence[Claim]:
        """Kill all running trials and return their claims."""
        claims = [claim for claim, _ in self._running.values()]
        for reference in self._running:
            self._ray.cancel(reference, force=True)
        self._running = {}
        return claims

    def _get(self, reference: Any) -> EndedTrial:
        claim, _ = self._running.pop(reference)
        try:
            host, trial = json.loads(self._ray.get(reference))
            return EndedTrial(claim, Trial.from_json(trial), host=host)
        except self._ray.exceptions.WorkerCrashedError:
            return EndedTrial(claim, None, "its process on the cluster died (the machine may have run out of memory)")
        except self._ray.exceptions.RayError as error:
            return EndedTrial(claim, None, f"Ray lost it: {type(error).__name__}")

    def _end(self, reference: Any) -> EndedTrial:
        claim, _ = self._running.pop(reference)
        self._ray.cancel(reference, force=True)
        reason = f"no result after {claim.spec.settings.timeout_seconds:g} s (timeout_seconds); its process was ended"
        return EndedTrial(claim, failed(claim.spec, reason, Status.KILLED))


def _run_remotely(run: RunTrial, spec: TrialSpec) -> str:
    """The host of this machine of the cluster and the trial, as JSON."""
    return json.dumps([socket.gethostname(), run_safely(run, spec).to_json()])


def _join() -> Any:
    """The ray module, connected to a running cluster (RAY_ADDRESS, or one on this machine), else to a new local one."""
    try:
        ray = import_module("ray")
    except ModuleNotFoundError:
        raise SweepError("the ray engine needs Ray: pip install 'paredown[ray]'.") from None
    if ray.is_initialized():
        return ray
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # no usage reports
    quiet = {"log_to_driver": False, "logging_level": "ERROR"}
    try:
        ray.init(address="auto", **quiet)
    except ConnectionError:
        ray.init(include_dashboard=False, **quiet)
    return ray
