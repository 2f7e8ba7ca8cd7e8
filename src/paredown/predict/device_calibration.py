"""`calibrate` measures the costs of a device and writes them as JSON, from which `assign`, `footprint` and `estimate` predict step time.

    calibrate("cuda")                       # under 30 s; a file of this device and these versions is read instead
    calibrate("cuda", traces=[trace])       # and the operations of these traces, timed one by one: predictions of their steps are closer
    calibrate("cuda", has_present_host=True)    # a present file with the speed that the host has now, in a second

Compiling kernels takes most of the time. After MOST_SECONDS, measurements that have a substitute are left out: formats, for which the
format of the nearest width stands, packed weights, and operations of traces, with which the next call continues.

A file of another device or version is measured again, with a warning that states the reason (the log "paredown"). A present file is not
measured again unless `is_forced`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import fields, replace

import torch

from paredown.errors import CalibrationError
from paredown.plan.calibration import (
    Calibration,
    FormatCost,
    HostCost,
    calibration_path,
    find_calibration,
    load_calibration,
    present_device_name,
    versions,
)
from paredown.plan.trace import DEVICES, Trace
from paredown.predict.device_time import bandwidths, codec_seconds, flop_rates, smallest_kernel
from paredown.predict.host_time import HostMeasurement, with_present_host
from paredown.predict.operation_time import with_operations
from paredown.serial import brief

FORMATS = ["int8/64@bf16", "int4/64@bf16", "uint2/64@bf16+bf16"]  # the first is always measured
MOST_SECONDS = 20.0
log = logging.getLogger("paredown")


def calibrate(
    device: str | None = None, *, traces: Sequence[Trace] = (), is_forced: bool = False, has_present_host: bool = False
) -> Calibration:
    """Return the measured costs of this device, from a file in the cache folder, or else measured now.

    Costs that are measured are written to the file. `device` is "cuda" or "cpu"; None is "cuda" if there is a GPU. `traces` are steps whose
    operations are timed one by one and added to the file. With `is_forced`, everything is measured again. With `has_present_host`, only the
    speed of the host is, which other work on the machine changes from one minute to the next.
    """
    kind = checked_device(device)
    if not all(isinstance(trace, Trace) for trace in traces):
        raise CalibrationError(f"traces are results of trace_step(model, batch), in a list, not {brief(traces)}.")
    try:
        calibration = None if is_forced else load_calibration(kind, present_device_name(kind))
    except CalibrationError as error:
        calibration = None
        if calibration_path(kind).exists():
            log.warning("The device is measured again: %s", error)
    if calibration is not None and not traces and not has_present_host:
        return calibration
    begun = time.perf_counter()
    if calibration is not None and has_present_host:
        calibration = with_present_host(calibration)
    calibration = calibration or measure_device(kind)
    if traces:
        calibration = with_operations(calibration, [_on(trace, kind) for trace in traces], most_seconds=MOST_SECONDS)
    calibration = replace(calibration, measured_in_seconds=time.perf_counter() - begun)
    calibration.save()
    return calibration


def measure_device(device: str) -> Calibration:
    """Measure the costs of this device now, and return them as a calibration."""
    begun = time.perf_counter()

    def is_late() -> bool:
        return time.perf_counter() - begun > MOST_SECONDS

    first, *others = FORMATS
    rates = {first: codec_seconds(first, device)}
    draft = Calibration(
        device=device,
        device_name=present_device_name(device) or device,
        host=HostCost(*[0.0] * len(fields(HostCost))),
        kernel_seconds=smallest_kernel(device),
        bytes_per_second=bandwidths(device),
        flops_per_second=flop_rates(device),
        formats={first: FormatCost(*rates[first], 0.0)},
        torch=versions()["torch"],
        paredown=versions()["paredown"],
    )
    measurement = HostMeasurement(draft)
    host, packed = measurement.costs(first, is_late)
    issued = {name: host.empty_operation * ratio for name, ratio in measurement.calls.issued.items()}
    rates |= {text: codec_seconds(text, device) for text in others if not is_late()}
    formats = {text: FormatCost(*rate, packed) for text, rate in rates.items()}
    return replace(draft, host=host, formats=formats, issued=issued)


def checked_device(device: str | None) -> str:
    """Return `device`, "cuda" or "cpu", or for None the GPU if there is one; raise CalibrationError if it is absent."""
    kind = str(device or ("cuda" if torch.cuda.is_available() else "cpu")).partition(":")[0]
    if kind not in DEVICES:
        raise CalibrationError(f"device {brief(device)} cannot be measured. Allowed: {', '.join(DEVICES)}.")
    if kind == "cuda" and not torch.cuda.is_available():
        raise CalibrationError("there is no CUDA device here to measure. Run it where the training runs, or calibrate 'cpu'.")
    return kind


def _on(trace: Trace, device: str) -> Trace:
    if trace.device != device:
        raise CalibrationError(f"the trace is of a step on {trace.device}; its operations cannot be timed on {device}.")
    return trace


def calibration_for(trace: Trace) -> tuple[Calibration | None, str]:
    """Return (the calibration for the device of `trace`, ""), or (None, the reason why there is none).

    On a GPU, operations of the trace that were never timed are timed now, which takes seconds.
    """
    found, reason = find_calibration(trace.device)
    is_present = trace.device == "cuda" and present_device_name(trace.device) is not None
    if found is None or not is_present or not found.num_untimed(trace):
        return found, reason
    return calibrate(trace.device, traces=[trace]), ""
