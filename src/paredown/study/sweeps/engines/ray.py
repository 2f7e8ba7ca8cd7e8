"""The ray engine runs a process per trial on a Ray cluster, either a running one that this machine belongs to, or a new local one.

The worker on this machine accesses the store; trials run where Ray has free resources, each with its share of a GPU, and have access to
neither the store nor its password. `RayOptions` says what Ray reserves for a trial, which nodes may run it, and its runtime environment.
When the worker dies, Ray kills its trials. When a node dies, its trials are released and run on another one. `pip install 'paredown[ray]'`.

A trial is a Ray generator of two values, its host when it starts and its result: the time limit begins when the trial starts, however long
Ray queues it before, as it does while nodes are missing.
"""

from __future__ import annotations

import json
import math
import os
import socket
import time
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, final

from paredown.errors import SweepError
from paredown.serial import FROM_0, Check, check_fields, is_number, object_parts, or_none, read_json
from paredown.study.sweeps.engines.engine import Engine, RunTrial, deadline_of, late, run_safely
from paredown.study.sweeps.sweep import Claim, EndedTrial, TrialSpec
from paredown.study.tasks.trial import Trial

STRATEGIES = ("DEFAULT", "SPREAD")  # the scheduling strategies that Ray names by text
MAX_FILE_BYTES = 1 << 20
AMOUNTS = Check(
    lambda value: isinstance(value, Mapping) and all(is_number(part) and part > 0 for part in value.values()),
    "an object of positive numbers",
)
TEXTS = Check(
    lambda value: isinstance(value, Mapping) and all(isinstance(part, str) for part in value.values()), "an object of texts"
)
CHECKS = {
    "cpus": FROM_0,
    "gpus": or_none(FROM_0),
    "resources": AMOUNTS,
    "labels": TEXTS,
    "placement": Check(lambda value: not isinstance(value, str) or value in STRATEGIES, f"{' or '.join(STRATEGIES)}"),
    "runtime_env": Check(lambda value: isinstance(value, Mapping), "an object"),
}


@dataclass(frozen=True)
class RayOptions:
    """The resources and options with which Ray runs each trial.

    `cpus`, `gpus` (fractions are allowed; None: one GPU where the cluster has GPUs, a share where there are more slots than GPUs) and
    `resources`, by name, are reserved for the trial. `labels`: the labels of nodes that may run it (Ray's `label_selector`). `placement`:
    "DEFAULT", "SPREAD", or a strategy of `ray.util.scheduling_strategies`, such as a placement group's. `runtime_env`: Ray's runtime
    environment: `env_vars`, `working_dir`, `py_modules`, `pip`, ...

    >>> RayOptions(gpus=0.5, placement="spread")
    Traceback (most recent call last):
        ...
    paredown.errors.SweepError: placement of a trial on Ray is DEFAULT or SPREAD, not 'spread'.
    """

    cpus: float = 1.0
    gpus: float | None = None
    resources: Mapping[str, float] = field(default_factory=dict[str, Any])
    labels: Mapping[str, str] = field(default_factory=dict[str, Any])
    placement: Any = "DEFAULT"
    runtime_env: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def __post_init__(self) -> None:
        check_fields(self, CHECKS, "trial on Ray", SweepError)

    @staticmethod
    def load(path: str | Path) -> RayOptions:
        """Return the options in a JSON file: an object with any of the fields."""
        value = read_json(path, "file of options for Ray", SweepError, most_bytes=MAX_FILE_BYTES)
        names = [one.name for one in fields(RayOptions)]
        return RayOptions(**object_parts(value, "file of options for Ray", names, (), 1, SweepError))

    @property
    def amounts(self) -> dict[str, float]:
        """Return the resources that Ray reserves for a trial, by the names that Ray's nodes have for them."""
        amounts = {"CPU": self.cpus, "GPU": self.gpus or 0.0, **self.resources}
        return {name: amount for name, amount in amounts.items() if amount}

    def to_ray(self) -> dict[str, Any]:
        """Return these options as keyword arguments of `ray.remote`, without the runtime environment."""
        selector = {"label_selector": dict(self.labels)} if self.labels else {}
        reserved = {"num_cpus": self.cpus, "num_gpus": self.gpus or 0.0, "resources": dict(self.resources)}
        return {**reserved, "scheduling_strategy": self.placement, **selector}


@dataclass(frozen=True)
class RayTrial:
    """A trial that Ray has queued or is running; its host and its deadline are known once it runs."""

    claim: Claim
    host: str | None = None
    deadline: float | None = None


@final
class RayEngine(Engine):
    """Runs each trial as a Ray task in a process of its own, `slots` in parallel; None: as many as the cluster has room for."""

    def __init__(self, run: RunTrial, *, slots: int | None = None, options: RayOptions | None = None) -> None:
        options = options or RayOptions()
        self._ray, env = _join(options.runtime_env)
        if options.gpus is None:
            options = replace(options, gpus=share_of_gpu(self._ray.cluster_resources().get("GPU", 0.0), slots))
        self.slots = slots or self._num_fitting(options)
        self._remote = _refused_by_ray(
            lambda: self._ray.remote(max_calls=1, max_retries=0, **options.to_ray(), **env)(_run_remotely)
        )
        self._run = run
        self._running: dict[Any, RayTrial] = {}

    def start(self, claim: Claim) -> None:
        self._running[self._remote.remote(self._run, claim.spec)] = RayTrial(claim)

    def wait(self, seconds: float) -> list[EndedTrial]:
        end = time.monotonic() + seconds
        while True:
            deadlines = [trial.deadline for trial in self._running.values() if trial.deadline is not None]
            left = max(0.0, min([end, *deadlines]) - time.monotonic())
            ready, _ = self._ray.wait(list(self._running), num_returns=1, timeout=left)
            ended = [one for values in ready if (one := self._read(values)) is not None] + self._end_late()
            if ended or time.monotonic() >= end:
                return ended

    def stop(self) -> None:
        for values in self._running:
            self._ray.cancel(values, force=True)
        self._running = {}

    def _read(self, values: Any) -> EndedTrial | None:
        trial, exceptions = self._running[values], self._ray.exceptions
        try:
            host, result = json.loads(self._ray.get(next(values)))
        except exceptions.RuntimeEnvSetupError as error:
            raise SweepError(f"Ray cannot set up the runtime environment of trials: {str(error)[:1000]}") from None
        except exceptions.WorkerCrashedError:
            return self._died(values, "its process on the cluster died (the machine may have run out of memory)")
        except exceptions.RayError as error:
            return self._died(values, f"Ray lost it, as when its node dies: {type(error).__name__}")
        if result is None:
            self._running[values] = replace(trial, host=host, deadline=deadline_of(trial.claim))
            return None
        del self._running[values]
        return EndedTrial(trial.claim, Trial.from_json(result), host=host)

    def _died(self, values: Any, reason: str) -> EndedTrial:
        return EndedTrial(self._running.pop(values).claim, None, reason)

    def _end_late(self) -> list[EndedTrial]:
        now, ended = time.monotonic(), list[EndedTrial]()
        for values, trial in list(self._running.items()):
            if trial.deadline is not None and now >= trial.deadline:
                del self._running[values]
                self._ray.cancel(values, force=True)
                ended.append(late(trial.claim, trial.host))
        return ended

    def _num_fitting(self, options: RayOptions) -> int:
        group = getattr(options.placement, "placement_group", None)
        nodes = [node for node in self._ray.nodes() if node["Alive"] and has_labels(node["Labels"], options.labels)]
        places = list(group.bundle_specs) if group is not None else [node["Resources"] for node in nodes]
        num = sum(num_fitting(place, options.amounts) for place in places)
        if not num:
            on = f" on a node with labels {_say(options.labels)}" if options.labels else ""
            raise SweepError(
                f"no node of the Ray cluster can run a trial: one needs {_say(options.amounts)}{on}; the cluster has "
                f"{_say(self._ray.cluster_resources())}. Ask for less, or give --slots where Ray's autoscaler adds nodes."
            )
        return num


def _say(amounts: Mapping[str, object]) -> str:
    shown = {name: amount for name, amount in amounts.items() if ":" not in name and "memory" not in name}
    return ", ".join(f"{name} {amount:g}" if isinstance(amount, float) else f"{name} {amount}" for name, amount in shown.items())


def num_fitting(place: Mapping[str, float], amounts: Mapping[str, float]) -> int:
    """Return how many trials that need `amounts` of resources fit in `place`, a node's resources or a placement group's bundle.

    It is one if trials need nothing.

    >>> num_fitting({"CPU": 8, "GPU": 2}, {"CPU": 1, "GPU": 0.5}), num_fitting({"CPU": 8}, {"CPU": 1, "GPU": 0.5})
    (4, 0)
    """
    return min((int(place.get(name, 0.0) / amount + 1e-9) for name, amount in amounts.items()), default=1)


def has_labels(found: Mapping[str, str], asked: Mapping[str, str]) -> bool:
    """Return whether a node's labels `found` have the values `asked`; conditions such as `!in(a, b)` are checked by Ray alone.

    >>> has_labels({"region": "north"}, {"region": "north"}), has_labels({"region": "north"}, {"region": "south"})
    (True, False)
    """
    return all(value.startswith(("!", "in(")) or found.get(name) == value for name, value in asked.items())


def share_of_gpu(num_gpus: float, slots: int | None) -> float:
    """Return the GPUs of one trial: one if there are enough, otherwise a share of a GPU such that `slots` trials fit.

    It is 0 if there are no GPUs.

    >>> share_of_gpu(2, None), share_of_gpu(2, 2), share_of_gpu(2, 3), share_of_gpu(2, 8), share_of_gpu(0, 8)
    (1.0, 1.0, 0.5, 0.25, 0.0)
    """
    return 1.0 / max(1, math.ceil((slots or 1) / num_gpus)) if num_gpus else 0.0


def _run_remotely(run: RunTrial, spec: TrialSpec) -> Generator[str]:
    """Run a trial on the cluster; yield JSON of this host's name and None at the start, of the name and the trial at the end."""
    host = socket.gethostname()
    yield json.dumps([host, None])
    yield json.dumps([host, run_safely(run, spec).to_json()])


def _join(runtime_env: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return the ray module, connected to a cluster, and the options that tasks need for `runtime_env`.

    A running cluster is that of RAY_ADDRESS or of `ray start` on this machine; if there is none, a new local one is started.

    The runtime environment is set for the connection, since Ray then uploads folders of this machine (`working_dir`, `py_modules`). If the
    program was connected already, the environment is returned as an option of tasks instead.
    """
    try:
        import ray
    except ModuleNotFoundError:
        raise SweepError("the ray engine needs Ray: pip install 'paredown[ray]'.") from None
    env: dict[str, Any] = {"runtime_env": dict(runtime_env)} if runtime_env else {}
    if ray.is_initialized():
        return ray, env
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # no usage reports
    options: dict[str, Any] = {"include_dashboard": False, "log_to_driver": False, "logging_level": "ERROR", **env}
    try:
        _refused_by_ray(lambda: ray.init(**options))  # not address="auto", which joins the private cluster of any other program
    except ConnectionError as error:
        if address := os.environ.get("RAY_ADDRESS"):
            raise SweepError(f"the Ray cluster of RAY_ADDRESS, {address}, cannot be reached: {str(error)[:300]}") from None
        ray.init(address="local", **options)  # the cluster of `ray start` has ended
    return ray, {}


def _refused_by_ray(call: Any) -> Any:
    try:
        return call()
    except (TypeError, ValueError) as error:
        raise SweepError(f"Ray refuses the options of trials: {str(error)[:1000]}") from None
