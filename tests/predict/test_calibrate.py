"""`calibrate`: its file, what is measured again, and the costs of the host."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import paredown as pare
from paredown.assignment.speed import Preference
from paredown.errors import CalibrationError
from paredown.plan.calibration import TO_DEVICE, TO_HOST, calibration_path, operation_key
from paredown.plan.step_time import called_modules, num_saved, predict_step
from paredown.plan.trace import VIEW
from paredown.predict import device_calibration, host_time, operation_time
from paredown.predict.host_time import HostMeasurement, SmallNetwork, StepSeconds, small_networks, with_present_host
from paredown.predict.operation_time import (
    CallSeconds,
)
from tests.cli.commands import ask, asked_json
from tests.support.calibrations import calibration, traced
from tests.support.scripts import ROOT


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Devices that were measured, by a stand-in; the cache folder is empty."""
    devices: list[str] = []
    monkeypatch.setenv("PAREDOWN_CACHE", str(tmp_path))

    def measure(device: str) -> pare.Calibration:
        devices.append(device)
        return calibration(device)

    monkeypatch.setattr(device_calibration, "measure_device", measure)
    return devices


def test_a_device_is_measured_once(measured: list[str]) -> None:
    first = pare.calibrate("cpu")
    assert pare.calibrate("cpu") == first and measured == ["cpu"]
    pare.calibrate("cpu", is_forced=True)
    assert measured == ["cpu", "cpu"]


def test_the_speed_of_the_host_is_measured_again_on_demand(measured: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    first = pare.calibrate("cpu", has_present_host=True)
    assert first.host == calibration("cpu").host and measured == ["cpu"], "it was just measured"
    monkeypatch.setattr(device_calibration, "with_present_host", lambda found: found.with_host_speed(2.0))
    assert pare.calibrate("cpu", has_present_host=True).host == first.with_host_speed(2.0).host == pare.calibrate("cpu").host
    assert asked_json("calibrate", "--device", "cpu", "--host")["host"]["step"] == 4 * first.host.step and measured == ["cpu"]


def test_a_file_of_another_version_is_measured_again(measured: list[str], caplog: pytest.LogCaptureFixture) -> None:
    replace(calibration("cpu"), torch="0.4").save()
    assert pare.calibrate("cpu").torch != "0.4" and measured == ["cpu"]
    assert len(caplog.messages) == 1 and "measured again: the calibration in calibration-cpu.json is of torch '0.4'" in caplog.text
    calibration_path("cpu").write_text("[]")
    pare.calibrate("cpu")
    assert measured == ["cpu", "cpu"] and json.loads(calibration_path("cpu").read_text())["device"] == "cpu"


def test_operations_of_traces_are_added_to_the_file(measured: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operation_time, "device_seconds", lambda call, device: (call(), 0.125)[1])
    trace = traced()
    made = pare.calibrate("cpu", traces=[trace])
    assert set(made.timed.values()) == {0.125} and pare.calibrate("cpu") == made
    kernels = {operation_key(one) for one in trace.operations if one.op != VIEW}
    assert kernels == set(made.timed), "every operation of this step can be repeated"


def test_wrong_arguments(measured: list[str]) -> None:
    with pytest.raises(CalibrationError, match="Allowed: cuda, cpu"):
        pare.calibrate("tpu")
    with pytest.raises(CalibrationError, match="results of trace_step"):
        pare.calibrate("cpu", traces=["trace.json"])  # pyright: ignore[reportArgumentType]
    with pytest.raises(CalibrationError, match="a step on cuda; its operations cannot be timed on cpu"):
        pare.calibrate("cpu", traces=[traced("cuda")])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_an_absent_gpu_is_an_error(measured: list[str]) -> None:
    with pytest.raises(CalibrationError, match="no CUDA device here"):
        pare.calibrate("cuda")


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> list[SmallNetwork]:
    """Steps take 1 s for each part; in forward 2 s more if one tensor is packed, 12 s if all are, and 10 s with checkpointing."""
    networks = small_networks("cpu")
    monkeypatch.setattr(host_time, "time_operations", lambda traces, device: CallSeconds({}, {}, {}))
    monkeypatch.setattr(host_time, "small_networks", lambda device: networks)

    def seconds(self: SmallNetwork, *plans: pare.Plan | None, is_ours: bool = False) -> list[StepSeconds]:
        self.empty_operations += [1.0, 9.0, 2.0]
        more = [0 if plan is None else 10 if plan.recompute else 2 if "=" in plan.rules[0][0] else 12 for plan in plans]
        return [StepSeconds(1.0 + one, 1.0, 1.0) for one in more]

    monkeypatch.setattr(SmallNetwork, "seconds", seconds)
    return networks


def without_device_time() -> pare.Calibration:
    """A calibration of a CPU on which operations and codecs take no time."""
    rates: dict[str, Any] = {"bytes_per_second": {"elementwise": 1e30}, "flops_per_second": {"matmul float32": ((1.0, 1e30),)}}
    draft = calibration("cpu", **rates, kernel_seconds=1e-30)
    quick = {"encode_bytes_per_second": 1e30, "decode_bytes_per_second": 1e30}
    return replace(draft, formats={text: replace(cost, **quick) for text, cost in draft.formats.items()})


def test_host_costs_are_differences_over_counts(stand_ins: list[SmallNetwork]) -> None:
    cost, packed = HostMeasurement(without_device_time()).costs("int8/64@bf16", lambda: False)
    late, _ = HostMeasurement(without_device_time()).costs("int8/64@bf16", lambda: True)
    assert late.packed_weight == 2 * packed and cost.packed_weight != late.packed_weight
    assert (cost.empty_operation, cost.operation, cost.step) == (2.0, 0.0, 3.0)
    shared = {name: getattr(cost, name) for name in host_time.SHARES}
    counts = dict.fromkeys(shared, 0.0)
    for network in stand_ins:
        for one in network.trace.operations:
            counts["backward_view" if one.phase == "backward" else "view"] += one.count * (one.op == VIEW)
        counts["module_call"] += len(called_modules(network.trace))
        counts["gradient"] += len(list(network.build().parameters()))
    assert sum(shared[name] * counts[name] for name in shared) == pytest.approx(4.0), "1 s each for two passes of two networks"
    assert [shared[name] / cost.view for name in shared] == pytest.approx([one / 1.35e-3 for one in host_time.SHARES.values()])
    plan = pare.Plan.uniform(activation="int8/64@bf16")
    packs = [len(slot.names) for network in stand_ins for slot in network.packed(plan)]
    assert packed == pytest.approx(20 / (sum(packs) - 2)), "one tensor of each network is packed in both"
    saved = sum(len(slot.names) for network in stand_ins for slot in network.trace.activations)
    called = sum(len(called_modules(network.trace)) for network in stand_ins)
    assert cost.watched == pytest.approx((4 - 2 * packed) / (saved + called))


def test_a_network_that_ran_while_the_host_was_slow_counts_as_much(
    stand_ins: list[SmallNetwork], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second network's steps and its empty operations take twice as long: costs are those of a host between both."""
    usual, packed = HostMeasurement(without_device_time()).costs("int8/64@bf16", lambda: True)
    seconds = SmallNetwork.seconds

    def slower(self: SmallNetwork, *plans: pare.Plan | None, **options: Any) -> list[StepSeconds]:
        factor, rows = 1 + (self is stand_ins[1]), seconds(self, *plans, **options)
        self.empty_operations = [2.0 * factor] * 3
        return [row.scaled(factor) for row in rows]

    monkeypatch.setattr(SmallNetwork, "seconds", slower)
    found, packed_slower = HostMeasurement(without_device_time()).costs("int8/64@bf16", lambda: True)
    assert found.empty_operation == 3.0
    parts = "view", "backward_view", "module_call", "gradient", "watched", "step"
    assert [getattr(found, name) for name in parts] == pytest.approx([1.5 * getattr(usual, name) for name in parts])
    assert packed_slower == pytest.approx(1.5 * packed)


def test_the_speed_of_the_host_is_a_step_over_that_of_the_calibration(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter([*[9.0] * host_time.WARM_UP["cpu"], 50.0, 1.0, 3.0, 2.0, 40.0])
    monkeypatch.setattr(SmallNetwork, "step", lambda *_: (next(seconds), 0.0, 0.0))
    speed = host_time.HostSpeed(calibration("cpu", host=replace(calibration("cpu").host, step=2.0)))
    assert speed() == 1.25, "the median of 1, 2, 3 and 40 s, without the first, over 2 s"


def test_shares_of_a_small_step_are_those_of_the_measured_networks(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("scipy")
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import host_shares  # type: ignore[import-not-found]

    shares, ratios = host_shares.fitted(json.loads(host_shares.RESULTS.read_text())[-1]["rows"])
    assert {name: shares[name] for name in host_time.SHARES} == pytest.approx(host_time.SHARES, rel=0.03)
    assert len(ratios) == 16 and min(ratios) > 0.82 and max(ratios) < 1.12, "as plan/step_time.py says"


def test_a_checkpointed_tensor_is_one_that_the_layers_save(stand_ins: list[SmallNetwork]) -> None:
    """A real forward pass saves a few more: running statistics of batch norms, which are no slots."""
    cost, _ = HostMeasurement(without_device_time()).costs("int8/64@bf16", lambda: True)
    again = 0.0
    for network in stand_ins:
        forward = [one for one in network.trace.operations if one.phase != "backward"]
        inside = [one.count for one in forward if one.module.startswith("layer") and "." in one.module]
        again += sum(inside) / sum(one.count for one in forward)  # of 1 s
    counted = [num_saved(network.trace, network.paths) for network in stand_ins]
    assert cost.checkpointed_tensor == pytest.approx((20 - again) / sum(counted))
    assert all(0.75 * real <= num <= real for num, real in zip(counted, map(saved_in_layers, stand_ins), strict=True))


def saved_in_layers(network: SmallNetwork) -> int:
    """Tensors that the layers of a real step save for backward."""
    model, saved = network.build(), list[torch.Tensor]()
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda x: (saved.append(x), x)[1], lambda x: x)
    for path in network.paths:
        module = model.get_submodule(path)
        module.register_forward_pre_hook(lambda *_: hooks.__enter__())
        module.register_forward_hook(lambda *_: hooks.__exit__())
    model(*network.batch[:-1])
    return len(saved)


def test_costs_of_the_host_are_scaled_by_its_present_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SmallNetwork, "step", lambda *_: (1.0, 1.0, 1.0))
    before = calibration("cpu", host=replace(calibration("cpu").host, step=2.0))
    assert with_present_host(before) == before.with_host_speed(1.5), "a step takes 3 s now"


def test_what_is_late_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiling takes all the time: one format, and no packed weights."""
    monkeypatch.setattr(device_calibration, "MOST_SECONDS", -1.0)
    monkeypatch.setattr(device_calibration, "codec_seconds", lambda text, device: (1e9, 1e9, 0.0))
    late: list[bool] = []

    def costs(self: HostMeasurement, text: str, is_late: Any) -> Any:
        late.append(is_late())
        return calibration("cpu").host, 1e-3

    calls = CallSeconds({}, {"aten.mm": 2.0}, {})
    monkeypatch.setattr(HostMeasurement, "__init__", lambda self, draft: setattr(self, "calls", calls))
    monkeypatch.setattr(HostMeasurement, "costs", costs)
    for name in ("bandwidths", "flop_rates", "smallest_kernel"):
        parts = {"bandwidths": {"elementwise": 1e9}, "flop_rates": {"matmul float32": ((1.0, 1e9),)}, "smallest_kernel": 1e-9}
        monkeypatch.setattr(device_calibration, name, lambda device, value=parts[name]: value)
    made = device_calibration.measure_device("cpu")
    assert made.issued == {"aten.mm": 2.0 * made.host.empty_operation}
    assert late == [True] and list(made.formats) == [device_calibration.FORMATS[0]]
    assert pare.Calibration.from_json(made.to_json()) == made


def test_a_step_on_a_present_gpu_has_its_operations_timed_once(measured: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """`assign(prefer="speed")` and `estimate` time them; elsewhere the file is used as it was made."""
    from paredown.plan import calibration as file

    trace = traced("cuda")
    calibration("cuda").save()
    assert device_calibration.calibration_for(trace)[0] == file.load_calibration("cuda"), "no GPU is here"
    monkeypatch.setattr(file, "present_device_name", lambda device: "a GPU")
    monkeypatch.setattr(device_calibration, "present_device_name", lambda device: "a GPU")
    monkeypatch.setattr(device_calibration, "checked_device", lambda device: "cuda")
    calls: list[int] = []
    monkeypatch.setattr(operation_time, "_seconds", lambda operation, device: calls.append(1) or (0.5, 4.0))
    found, reason = device_calibration.calibration_for(trace)
    assert found is not None and not reason and not found.num_untimed(trace) and calls
    assert set(found.issued.values()) == {4.0 * found.host.empty_operation}, "four empty operations each"
    assert set(found.issued) == {one.op for one in trace.operations if one.op != VIEW}, "by name"
    calls.clear()
    preference = Preference.of(trace, "speed", None, None)
    assert preference is not None and preference.calibration == found and not calls, "assign reads the file"
    assert "operations not timed" in repr(predict_step(trace, calibration=calibration("cuda")))
    assert "operations not timed" not in repr(predict_step(trace, calibration=found))


@pytest.mark.full
def test_this_processor_is_measured() -> None:
    made = device_calibration.measure_device("cpu")
    assert pare.Calibration.from_json(made.to_json()) == made and made.host.module_call > 0 and made.host.view > 0


@pytest.mark.gpu
def test_a_gpu_is_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PAREDOWN_CACHE", str(tmp_path))
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 30 * 30, 10))
    batch = torch.zeros(4, 3, 32, 32), torch.zeros(4, dtype=torch.long)
    trace = pare.trace_step(model, batch, loss=cross_entropy, device="cuda", autocast=torch.bfloat16)
    made = pare.calibrate("cuda", traces=[trace])
    assert pare.calibrate("cuda") == made and made.timed
    assert {TO_HOST, TO_DEVICE} <= made.bytes_per_second.keys() and "assumed" not in made.say_copies()
    assert isinstance(pare.footprint(trace).step_time, object) and "step time: " in repr(pare.footprint(trace))


def test_the_command_measures_reads_and_measures_again(measured: list[str]) -> None:
    first = asked_json("calibrate", "--device", "cpu")
    assert first["is_new"] and first["device"] == "cpu" and measured == ["cpu"]
    status, out, _ = ask("calibrate", "--device", "cpu")
    assert status == 0 and "without measuring" in out and measured == ["cpu"]
    replace(calibration("cpu"), torch="0.4").save()
    assert (
        "Measured again: the calibration in calibration-cpu.json is of torch '0.4' instead of"
        in ask("calibrate", "--device", "cpu")[1]
    )


def test_an_estimate_prints_step_time(measured: list[str]) -> None:
    pare.calibrate("cpu")
    value = asked_json("estimate", "digits#batch=8", "--device", "cpu", "--plan", "baseline")
    row = value["plans"][0]
    assert row["step_seconds"] == pytest.approx(row["device_seconds"] + row["host_seconds"]) and row["host_seconds"] > 0.01
    out = ask("estimate", "digits#batch=8", "--device", "cpu", "--plan", "baseline")[1]
    assert f"{1e3 * row['step_seconds']:.1f} ms" in out and "not predicted" not in out
    calibration_path("cpu").unlink()
    assert (
        "Step time: not predicted, nothing is measured"
        in ask("estimate", "digits#batch=8", "--device", "cpu", "--plan", "baseline")[1]
    )
