"""Calibrations: their file, what is refused, and rates between measured ones."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from paredown.errors import CalibrationError
from paredown.formats.format import Format
from paredown.plan.calibration import (
    Calibration,
    FormatCost,
    cache_folder,
    calibration_path,
    find_calibration,
    load_calibration,
    operation_key,
)
from paredown.plan.trace import Operation
from tests.support.calibrations import calibration

ADD = Operation("aten.add.Tensor", "", "forward", "float32", nbytes=3000, arguments="[[],{}]")
PRODUCT = Operation("aten.mm.default", "", "forward", "float32", flops=8000, nbytes=6000)


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty cache folder."""
    monkeypatch.setenv("PAREDOWN_CACHE", str(tmp_path))
    return tmp_path


def test_the_folder_is_that_of_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert cache_folder() == tmp_path and calibration_path("cuda") == tmp_path / "calibration-cuda.json"
    monkeypatch.delenv("PAREDOWN_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert cache_folder() == tmp_path / "cache" / "paredown"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_folder() == tmp_path / "home" / ".cache" / "paredown"


def test_a_calibration_is_its_json() -> None:
    made = calibration("cpu", timed={operation_key(ADD): 0.25})
    assert Calibration.from_json(json.loads(json.dumps(made.to_json()))) == made
    made.save()
    assert find_calibration("cpu") == (made, "")


@pytest.mark.parametrize(("field", "value"), [("torch", "0.4"), ("paredown", "9.9"), ("device_name", "another processor")])
def test_a_file_of_another_device_or_version_is_refused(field: str, value: str) -> None:
    replace(calibration("cpu"), **{field: value}).save()
    found, reason = find_calibration("cpu")
    assert found is None and f"{field} '{value}' instead of" in reason and "paredown calibrate" in reason


def test_a_file_of_a_gpu_serves_where_there_is_none() -> None:
    made = calibration("cuda", device_name="NVIDIA H200")
    path = made.save()
    assert load_calibration("cuda", None, path) == made
    with pytest.raises(CalibrationError, match="'NVIDIA H200' instead of 'NVIDIA A100'"):
        load_calibration("cuda", "NVIDIA A100", path)


def test_no_file_and_a_broken_one_say_what_to_do(folder: Path) -> None:
    assert find_calibration("cuda")[1] == "nothing is measured for device 'cuda'. Run `paredown calibrate` on this device."
    (folder / "calibration-cuda.json").write_text("{")
    assert "paredown calibrate" in find_calibration("cuda")[1]


def test_costs_that_no_measurement_has_are_refused() -> None:
    value = calibration().to_json()
    for changes in (
        {"kernel_seconds": 0},
        {"formats": {}},
        {"bytes_per_second": {"norm": 1e9}},
        {"flops_per_second": {"matmul float32": [[1, 0]]}},
        {"formats": {"int99": value["formats"]["int8/64@bf16"]}},
    ):
        with pytest.raises(CalibrationError, match="paredown calibrate"):
            Calibration.from_json(value | changes)


def test_an_operation_takes_what_its_bytes_or_its_flops_take() -> None:
    made = calibration()
    assert made.operation_seconds(ADD) == 3000 / 1e9
    assert made.operation_seconds(PRODUCT) == 8000 / 1e9, "its flops take longer than its bytes"
    assert made.operation_seconds(replace(PRODUCT, flops=1)) == 6000 / 1e9
    assert made.operation_seconds(replace(ADD, nbytes=0)) == 1e-9, "no kernel is quicker than the smallest"
    timed = replace(made, timed={operation_key(ADD): 0.5})
    assert timed.operation_seconds(ADD) == 0.5 and timed.operation_seconds(PRODUCT) == 8000 / 1e9


@pytest.mark.parametrize(("columns", "seconds"), [(50264, 1.0), (50257, 7.0), (3, 1.0)])
def test_products_with_odd_sides_have_a_rate_of_their_own(columns: int, seconds: float) -> None:
    rates = {"matmul bfloat16": ((1.0, 7e9),), "matmul bfloat16 unaligned": ((1.0, 1e9),)}
    arguments = json.dumps([[{"t": ["bfloat16", [16, 64], [64, 1]]}, {"t": ["bfloat16", [64, columns], [1, 64]]}], {}])
    product = Operation("aten.mm.default", "", "forward", "bfloat16", flops=7_000_000_000, arguments=arguments)
    assert calibration(flops_per_second=rates).operation_seconds(product) == pytest.approx(seconds)
    del rates["matmul bfloat16 unaligned"]
    assert calibration(flops_per_second=rates).operation_seconds(product) == pytest.approx(1.0), "a file without that rate"


def test_a_format_that_was_not_measured_costs_what_the_nearest_width_costs() -> None:
    costs = {"int8/64@bf16": FormatCost(8e9, 8e9, 0.0, 8.0), "int2/64@bf16": FormatCost(2e9, 2e9, 0.0, 2.0)}
    made = calibration(formats=costs)
    assert made.format_cost(Format.parse("e4m3fn/64@bf16")).host_seconds == 8.0
    assert made.format_cost(Format.parse("int3/32@bf16")).host_seconds == 2.0
    assert made.format_cost(None).host_seconds == 8.0, "masks"
