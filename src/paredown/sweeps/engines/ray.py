"""One process for each trial on a Ray cluster: a running one that this machine belongs to, or a local one that is started.

The worker here keeps the store; trials run where Ray has room, each with its share of a GPU, and nothing over there sees the
store or its password. Task files must lie at the same path on every machine of the cluster. When the worker dies, Ray ends its
trials. `pip install 'paredown[ray]'`.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from importlib import import_module
from typing import Any, final

from paredown.errors import SweepError
from paredown.sweeps.engines.engine import Engine, RunTrial, failed, run_safely
from paredown.sweeps.store import Claim, EndedTrial
from paredown.sweeps.sweep import TrialSpec
from paredown.tasks.trial import Status, Trial


@final
class RayEngine(Engine):
    """Trials as Ray tasks. `gpus`: of each trial, fractions allowed; `cpus` likewise. A process serves one trial."""

    def __init__(self, run: RunTrial, *, slots: int | None = None, gpus: float | None = None, cpus: float = 1.0) -> None:
        self._ray = _join()
        there = self._ray.cluster_resources()
        self._gpus = gpus if gpus is not None else (1.0 if there.get("GPU") else 0.0)
        share = there.get("GPU", 0) / self._gpus if self._gpus else there.get("CPU", 1) / cpus
        self.slots = slots or max(1, int(share))
        self._remote = self._ray.remote(num_cpus=cpus, num_gpus=self._gpus, max_calls=1, max_retries=0)(_run_remotely)
        self._run = run
        self._running: dict[Any, tuple[Claim, float | None]] = {}

    @staticmethod
    def make(run: RunTrial, slots: int | None) -> RayEngine:
        """With more slots than GPUs, trials share them."""
        engine = RayEngine(run, slots=slots)
        there = engine._ray.cluster_resources().get("GPU", 0)
        return RayEngine(run, slots=slots, gpus=there / slots) if slots and there and slots > there else engine

    def start(self, claim: Claim) -> None:
        """Begin the claimed trial."""
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
        """End all running trials and return their claims."""
        left = [claim for claim, _ in self._running.values()]
        for reference in self._running:
            self._ray.cancel(reference, force=True)
        self._running = {}
        return left

    def _get(self, reference: Any) -> EndedTrial:
        claim, _ = self._running.pop(reference)
        try:
            return EndedTrial(claim, Trial.from_json(json.loads(self._ray.get(reference))))
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
    return json.dumps(run_safely(run, spec).to_json())


def _join() -> Any:
    """Ray, connected: to the cluster that is there (RAY_ADDRESS, or one on this machine), else to a new local one."""
    try:
        ray = import_module("ray")
    except ModuleNotFoundError:
        raise SweepError("the ray engine needs Ray: pip install 'paredown[ray]'.") from None
    if ray.is_initialized():
        return ray
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # it would report to its makers
    quiet = {"log_to_driver": False, "logging_level": "ERROR"}
    try:
        ray.init(address="auto", **quiet)
    except ConnectionError:
        ray.init(include_dashboard=False, **quiet)
    return ray
