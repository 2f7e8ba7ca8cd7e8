"""The ray engine on a stand-in for Ray: hosts, time limits of queued trials, options, and how many trials fit."""

from __future__ import annotations

import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

pytest.importorskip("sqlalchemy")

from paredown.errors import SweepError
from paredown.study.sweeps.engines.ray import RayEngine, RayOptions
from paredown.study.sweeps.export import rows
from paredown.study.sweeps.store import Store
from paredown.study.sweeps.worker import work
from paredown.study.tasks.trial import Status
from tests.support.trials import act, draw


class FakeRay:
    """Ray's functions, with trials that run in this process on a machine of another name, once they are read."""

    exceptions = SimpleNamespace(**dict.fromkeys(("RuntimeEnvSetupError", "WorkerCrashedError", "RayError"), RuntimeError))
    options: ClassVar[dict[str, object]] = {}
    num_ready = 1  # of the trials that are asked for; 0: all are queued

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": 2.0, "GPU": 4.0}

    def nodes(self) -> list[dict[str, Any]]:
        return [{"Alive": True, "Resources": {"CPU": 2.0, "GPU": 2.0}, "Labels": {"kind": kind}} for kind in ("a", "b")]

    def remote(self, **options: object) -> Any:
        self.options.update(options)
        return lambda run: SimpleNamespace(remote=run)

    def wait(self, references: list[Any], **_: object) -> tuple[list[Any], list[Any]]:
        return references[: self.num_ready], references[self.num_ready :]

    def get(self, value: str) -> str:
        return value.replace(socket.gethostname(), "node 7")

    def cancel(self, reference: Any, *, force: bool) -> None:
        assert force


@pytest.fixture
def fake_ray(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    ray = FakeRay()
    monkeypatch.setattr("paredown.study.sweeps.engines.ray._join", lambda env: (ray, {"runtime_env": dict(env)}))
    return ray


def test_a_trial_on_a_cluster_has_the_host_where_it_ran(tmp_path: Path, fake_ray: FakeRay) -> None:
    with Store(tmp_path / "t.db") as store:
        store.add("s", draw("noop", "raise"))
        assert work(store, RayEngine(act)) == 2
        assert [(row["status"], row["host"]) for row in rows(store)] == [("done", "node 7"), ("failed", "node 7")]


def test_the_time_limit_of_a_trial_that_ray_queues_begins_when_it_starts(tmp_path: Path, fake_ray: FakeRay) -> None:
    store = Store(tmp_path / "t.db")
    store.add("s", draw("noop", timeout=1e-300))
    engine, (claim,) = RayEngine(act), store.claim("w", 1)
    fake_ray.num_ready = 0
    engine.start(claim)
    assert engine.wait(0.01) == [], "it is queued, and has no deadline"
    fake_ray.num_ready = 1
    (ended,) = engine.wait(60.0)
    assert ended.trial is not None and ended.trial.status is Status.KILLED and ended.host == "node 7"


def test_every_option_is_passed_to_ray(fake_ray: FakeRay) -> None:
    strategy, env = object(), {"env_vars": {"A": "1"}, "pip": ["one"]}
    options = RayOptions(cpus=0.5, gpus=0.25, resources={"disk": 2}, labels={"kind": "a"}, placement=strategy, runtime_env=env)
    assert RayEngine(act, slots=3, options=options).slots == 3
    assert fake_ray.options == {
        "max_calls": 1,
        "max_retries": 0,
        "num_cpus": 0.5,
        "num_gpus": 0.25,
        "resources": {"disk": 2},
        "label_selector": {"kind": "a"},
        "scheduling_strategy": strategy,
        "runtime_env": env,
    }


def test_slots_are_the_trials_that_fit(fake_ray: FakeRay) -> None:
    def slots(**options: Any) -> int:
        return RayEngine(act, options=RayOptions(**options)).slots

    group = SimpleNamespace(placement_group=SimpleNamespace(bundle_specs=[{"CPU": 1.0}, {"CPU": 3.0}]))
    assert (slots(), slots(gpus=0.5), slots(cpus=1.5), slots(gpus=0.5, cpus=0), slots(cpus=0, gpus=0)) == (4, 4, 2, 8, 2)
    assert (slots(labels={"kind": "b"}), slots(gpus=0, placement=group)) == (2, 4)
    with pytest.raises(SweepError, match=r"one needs CPU 3, GPU 1; the cluster has CPU 2, GPU 4\. Ask for less, or give --slots"):
        slots(cpus=3.0)
    RayEngine(act, slots=6)
    assert fake_ray.options["num_gpus"] == 0.5, "two trials share each of four GPUs"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"gpus": -1}', "gpus of a trial on Ray is a finite number from 0 up, or None, not -1"),
        ('{"cpus": "2"}', "cpus of a trial on Ray is a finite number from 0 up, not '2'"),
        ('{"resources": {"disk": 0}}', "resources of a trial on Ray is an object of positive numbers"),
        ('{"labels": {"kind": 1}}', "labels of a trial on Ray is an object of texts"),
        ('{"placement": "PACK"}', "placement of a trial on Ray is DEFAULT or SPREAD, not 'PACK'"),
        ('{"runtime_env": []}', "runtime_env of a trial on Ray is an object"),
        ('{"gpu": 1}', "field 'gpu' is unknown"),
        ("{", "it is not JSON"),
    ],
)
def test_options_that_ray_cannot_take_are_a_sentence(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "ray.json").write_text(text)
    with pytest.raises(SweepError, match=said):
        RayOptions.load(tmp_path / "ray.json")
