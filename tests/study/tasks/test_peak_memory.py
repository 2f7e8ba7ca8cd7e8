"""Measured peak memory: known tensors are counted to the byte, and a footprint agrees with a measured peak."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.profiler import profile

from paredown import Plan, evaluate
from paredown.study.tasks.data import Examples
from paredown.study.tasks.evaluate import NUM_MEASURED_STEPS, MemoryMeter
from paredown.study.tasks.task import Task

MIB = 2**20


def test_tensors_that_come_and_go_on_a_cpu() -> None:
    before = torch.zeros(MIB)  # was there before, and is not counted
    meter = MemoryMeter(torch.device("cpu"))
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
    meter = MemoryMeter(torch.device("cpu"))
    meter.start()
    first = torch.zeros(2 * MIB, dtype=torch.uint8)
    before.clear()
    second = torch.zeros(3 * MIB, dtype=torch.uint8)
    meter.stop()
    assert meter.bytes == first.nbytes + second.nbytes


def test_temporaries_inside_of_operators_are_counted() -> None:
    x = torch.zeros(MIB)
    meter = MemoryMeter(torch.device("cpu"))
    meter.start()
    result = x.sort()[0]  # values, indices of 8 bytes each, and scratch
    meter.stop()
    assert meter.bytes is not None and meter.bytes >= 12 * MIB
    assert len(result) == MIB


def test_a_cpu_is_measured_for_some_steps() -> None:
    meter = MemoryMeter(torch.device("cpu"))
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
        meter = MemoryMeter(torch.device("cpu"))
        meter.start()
        torch.zeros(8).add(1)
        meter.stop()
    assert meter.bytes is None
    assert any(event.key == "aten::add" for event in own.key_averages()), "the user's profiler goes on"


def convolutions(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    layers = [[nn.Conv2d(num, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU()] for num in (3, 32, 32)]
    return nn.Sequential(*(layer for group in layers for layer in group), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="the rules are those of oneDNN")
@pytest.mark.parametrize("preset", ["activations8", "activations4"])
def test_copies_that_convolutions_make_are_part_of_the_prediction(preset: str) -> None:
    """They are 4 MiB each: without them a packed step takes 1.4 times its prediction."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(64, 3, 32, 32, generator=generator), torch.randint(10, (64,), generator=generator)
    task = Task("pictures", convolutions, Examples(x, y, x[:32], y[:32]), steps=2, batch=32)
    trial = evaluate(task, Plan.preset(preset), device="cpu")
    assert trial.measured_peak_bytes == pytest.approx(trial.predicted_peak_bytes, rel=0.05)


@pytest.mark.gpu
def test_tensors_that_come_and_go_on_a_gpu() -> None:
    """CUDA's allocator leaves up to 1 MiB of a free block with the tensor that it gives the block to."""
    before = torch.zeros(MIB, device="cuda")
    meter = MemoryMeter(torch.device("cuda"))
    meter.start()
    first = torch.zeros(2 * MIB, dtype=torch.uint8, device="cuda")
    second = torch.zeros(3 * MIB, dtype=torch.uint8, device="cuda")
    del first, second
    meter.stop()
    assert meter.bytes is not None and 5 * MIB <= meter.bytes <= (5 + 2) * MIB
    assert before.numel() == MIB
