"""Measured peak memory: known tensors are counted to the byte, and a footprint agrees with a measured peak."""

from __future__ import annotations

import pytest
import torch
from torch.profiler import profile

from paredown.study.tasks.evaluate import NUM_MEASURED_STEPS, CpuMeter, CudaMeter, meter_of

MIB = 2**20


def test_tensors_that_come_and_go_on_a_cpu() -> None:
    before = torch.zeros(MIB)  # was there before, and is not counted
    meter = CpuMeter()
    meter.start()
    first = torch.zeros(2 * MIB, dtype=torch.uint8)
    second = torch.zeros(3 * MIB, dtype=torch.uint8)
    del first
    third = torch.zeros(4 * MIB, dtype=torch.uint8)
    del before, second, third
    meter.stop()
    assert meter.bytes == 7 * MIB


def test_memory_from_before_that_is_released_meanwhile_does_not_count() -> None:
    before = [torch.zeros(size, dtype=torch.uint8) for size in (10_000, 5 * MIB)]
    meter = CpuMeter()
    meter.start()
    first = torch.zeros(2 * MIB, dtype=torch.uint8)
    before.clear()
    second = torch.zeros(3 * MIB, dtype=torch.uint8)
    meter.stop()
    assert meter.bytes == first.nbytes + second.nbytes


def test_temporaries_inside_of_operators_are_counted() -> None:
    x = torch.zeros(MIB)
    meter = CpuMeter()
    meter.start()
    result = x.sort()[0]  # values, indices of 8 bytes each, and scratch
    meter.stop()
    assert meter.bytes is not None and meter.bytes >= 12 * MIB
    assert len(result) == MIB


def test_a_cpu_is_measured_for_some_steps() -> None:
    meter = CpuMeter()
    meter.start()
    for step in range(1, NUM_MEASURED_STEPS + 3):
        kept = torch.zeros(step * MIB, dtype=torch.uint8)
        del kept
        meter.after(step)
    assert meter.bytes == NUM_MEASURED_STEPS * MIB
    meter.stop()
    assert meter.bytes == NUM_MEASURED_STEPS * MIB, "a second stop changes nothing"


def test_a_process_that_is_profiled_is_not_measured() -> None:
    with profile(acc_events=True) as own:
        meter = CpuMeter()
        meter.start()
        torch.zeros(8).add(1)
        meter.stop()
    assert meter.bytes is None
    assert any(event.key == "aten::add" for event in own.key_averages()), "the user's profiler goes on"


def test_the_meter_of_a_device() -> None:
    assert isinstance(meter_of(torch.device("cpu")), CpuMeter)
    assert isinstance(meter_of(torch.device("cuda:0")), CudaMeter)


@pytest.mark.gpu
def test_tensors_that_come_and_go_on_a_gpu() -> None:
    before = torch.zeros(MIB, device="cuda")
    meter = CudaMeter(torch.device("cuda"))
    meter.start()
    first = torch.zeros(2 * MIB, dtype=torch.uint8, device="cuda")
    second = torch.zeros(3 * MIB, dtype=torch.uint8, device="cuda")
    del first, second
    meter.stop()
    assert meter.bytes == 5 * MIB
    assert before.numel() == MIB
