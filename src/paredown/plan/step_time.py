"""`predict_step` predicts the seconds of a training step under a plan, from its trace and the calibration of a device.

The host issues operations while the device works through those issued before: a step takes as long as the slower of the two, and a
little longer where both are near, since each of them is the limit of a part of the step.

    seconds = (device^6 + host^6)^(1/6)
    device  = operations + second forward pass of checkpointed layers and modules in tiles + encode and decode of packed tensors + optimizer
              + waits for copies to host memory and back, where a layer's copy takes longer than the next layer
    host    = calls of operations, by the host time of their names; views, module calls, gradients, packed tensors, parameters, and
              tensors that checkpointed layers save, by their number

The host time of a step differs by what it calls. Small steps of eight networks on the host of one H200, forward and backward apart: calls
as timed in a loop, plus 8 us for a view and 13 us for a module call in forward, 3 us for a view and 14 us for a gradient in backward, are
17 % below to 11 % above the measured time; with one cost for views of both, and none for gradients, 24 % below to 14 % above (docs/log.md,
2026-11-17). A session that packs some tensor watches all modules and all saved tensors.

A step that the host limits becomes slower with every packed tensor, whatever its size; a step that the device limits becomes slower with
the bytes that are packed, and with the operations that run twice. On the CPU the host is the device, and a step takes the sum.

With this exponent, 21 steps whose kernels and host were timed apart on one H200 (benchmarks/results/session.json, time.json) are predicted
0.7 % too short in the mean, 4.2 % with the larger of both. Left out: data loading and synchronization. A compiled step is not predicted:
its trace has no operations.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from paredown.autograd.operations import Use
from paredown.errors import CalibrationError
from paredown.plan.byte_intervals import BASELINE, model_memory, part_bytes, resolve_parameter_formats, slot_storages
from paredown.plan.calibration import ELEMENTWISE, TO_DEVICE, TO_HOST, Calibration
from paredown.plan.checkpointed_trace import is_of, modules_of, outermost, step_under, with_parents
from paredown.plan.plan import Plan
from paredown.plan.planned_step import layer_of, planned_step, recomputed_slots, saving_layers
from paredown.plan.tiled_trace import tiled_modules
from paredown.plan.trace import Operation, Slot, Trace, cached_on_trace
from paredown.roles import Role

OVERLAP = 6  # exponent of the norm of device and host seconds
UPDATED = (Role.WEIGHT, Role.MOMENT1, Role.MOMENT2, Role.RESIDUE)  # read and written by the optimizer; gradients are read
FORWARD = ("forward", "loss")  # phases of operations in forward


@dataclass(frozen=True)
class StepTime:
    """The predicted seconds of one step: on the device, on the host, and in total.

    The total is the larger of device and host seconds or a little more, on a CPU their sum. `num_untimed` is the number of operations that
    were not timed themselves, whose seconds follow from rates of the device.

    >>> StepTime(0.0543, 0.031), StepTime(0.020, 0.031)
    (54.6 ms (limited by the device; host 31.0 ms), 31.4 ms (limited by the host; device 20.0 ms))
    """

    device_seconds: float
    host_seconds: float
    is_cpu: bool = False
    num_untimed: int = 0

    @property
    def seconds(self) -> float:
        """Return the predicted seconds of the whole step."""
        if self.is_cpu:
            return self.device_seconds + self.host_seconds
        longer, shorter = max(self.device_seconds, self.host_seconds), min(self.device_seconds, self.host_seconds)
        return longer * (1 + (shorter / longer) ** OVERLAP) ** (1 / OVERLAP) if longer > 0 else longer

    @property
    def limit(self) -> str:
        """Return which side takes longer and so limits the step: "device" or "host"."""
        return "host" if not self.is_cpu and self.host_seconds > self.device_seconds else "device"

    def __add__(self, other: StepTime) -> StepTime:
        return StepTime(self.device_seconds + other.device_seconds, self.host_seconds + other.host_seconds, self.is_cpu)

    def __repr__(self) -> str:
        if self.is_cpu:
            return f"{1e3 * self.seconds:.1f} ms"
        other = f"device {1e3 * self.device_seconds:.1f}" if self.limit == "host" else f"host {1e3 * self.host_seconds:.1f}"
        by_rates = "; operations not timed" if self.num_untimed else ""
        return f"{1e3 * self.seconds:.1f} ms (limited by the {self.limit}; {other} ms{by_rates})"


NO_TIME = StepTime(0.0, 0.0)


def predict_step(trace: Trace, plan: Plan | None = None, *, calibration: Calibration) -> StepTime:
    """Return the predicted time of one training step under `plan`; raise CalibrationError if it cannot be predicted."""
    plan = plan or BASELINE
    step = step_under(trace, plan)
    if trace.is_compiled:
        raise CalibrationError("steps under torch.compile are not predicted, since it chooses their kernels.")
    if not step.operations:
        raise CalibrationError("the trace has no operations, since an earlier paredown made it: trace the step again.")
    if calibration.device != trace.device:
        raise CalibrationError(f"the trace is of a step on {trace.device}, the calibration of {calibration.device_name}.")
    zero = StepTime(0.0, 0.0, is_cpu=trace.device == "cpu")
    host = calibration.host
    calls = StepTime(0.0, host.module_call * len(called_modules(step)) + host.gradient * len(step.of(Role.GRADIENT)))
    parts = (
        *(_operations(step.operations, calibration), calls),
        *(_optimizer(step, plan, calibration), added_time(step, plan, calibration)),
    )
    return replace(sum(parts, zero), num_untimed=calibration.num_untimed(step))


def added_time(step: Trace, plan: Plan, calibration: Calibration) -> StepTime:
    """Return the time that packing, checkpointing, pieces (tiles) and copies to host memory under `plan` add to a step.

    The optimizer's time is not included.
    """
    checkpointed = planned_step(step, plan)
    again = _checkpointing(step, plan, calibration) + _tiling(step, plan, calibration)
    waits = StepTime(offload_wait(checkpointed, plan, calibration), 0.0)
    return sum((_packing(checkpointed, plan, calibration), _weights(step, plan, calibration), again, waits), StepTime(0.0, 0.0))


def _operations(operations: Iterable[Operation], calibration: Calibration) -> StepTime:
    device = host = 0.0
    for operation in operations:
        device += operation.count * calibration.operation_seconds(operation)
        host += operation.count * calibration.issue_seconds(operation)
    return StepTime(device, host)


@cached_on_trace
def called_modules(trace: Trace) -> list[str]:
    """Return the paths of the modules that run operations in forward, and of the modules that contain them."""
    return with_parents(one.module for one in trace.operations if one.phase == "forward")


def _packing(trace: Trace, plan: Plan, calibration: Calibration) -> StepTime:
    chosen, slots = slot_storages(trace, plan), {slot.name: slot for slot in trace.activations}
    device = host = 0.0
    for name, storage in chosen.items():
        if storage.packs:
            cost, slot = calibration.format_cost(storage.format), slots[name]
            has_values = Use.VALUE in slot.uses and not storage.recomputed
            # bits are few, and recomputed values are written once
            device += cost.device_seconds(slot.nbytes if has_values else slot.nbytes // 2)
            host += cost.host_seconds * len(slot.names)
    if host and calibration.host.watched:
        host += calibration.host.watched * num_watched(trace, plan)
    return StepTime(device, host)


def num_watched(trace: Trace, plan: Plan) -> int:
    """Return how many module calls and saved tensors the hooks of a session see in one step; each costs host time."""
    layers = _checkpointed_layers(trace, plan)
    modules = sum(not any(is_of(path, layer) for layer in layers) for path in called_modules(trace))
    return modules + sum(len(slot.names) for slot in trace.activations)


def _checkpointed_layers(trace: Trace, plan: Plan) -> list[str]:
    return outermost(modules_of(trace), plan.checkpointed) if plan.checkpointed and not trace.is_compiled else []


def _weights(trace: Trace, plan: Plan, calibration: Calibration) -> StepTime:
    packed = [slot for slot in trace.of(Role.WEIGHT) if resolve_parameter_formats(slot, plan).weight is not None]
    moved = sum(2 * slot.nbytes for slot in packed) / calibration.bytes_per_second[ELEMENTWISE]
    return StepTime(moved, calibration.host.packed_weight * len(packed))


def _checkpointing(trace: Trace, plan: Plan, calibration: Calibration) -> StepTime:
    layers = _checkpointed_layers(trace, plan)
    again = sum((_second_pass(trace, layer, calibration) for layer in layers), NO_TIME)
    again += (
        _operations((product_of(slot) for slot in recomputed_slots(trace, plan)), calibration) if trace.is_compiled else NO_TIME
    )
    return again + StepTime(0.0, calibration.host.checkpointed_tensor * num_saved(trace, layers))


def _tiling(trace: Trace, plan: Plan, calibration: Calibration) -> StepTime:
    """Return the time that running modules over pieces of the sequence adds: a second forward pass, and more calls.

    If a module is last in a checkpointed layer, its second pass is part of the layer's second pass, and is not added.
    """
    total, layers = NO_TIME, _checkpointed_layers(trace, plan)
    for module, length in tiled_modules(trace, plan.tiles) if plan.tiles else ():
        num_pieces = -(-module.tokens // length)
        if num_pieces > 1:
            again = _second_pass(trace, module.path, calibration)
            backward = (one for one in trace.operations if one.phase == "backward" and is_of(one.module, module.path))
            issued = 2 * again.host_seconds + _operations(backward, calibration).host_seconds
            around = next((layer for layer in layers if is_of(module.path, layer)), "")
            is_last = around and not any(s.birth > module.forward[1] and is_of(s.name, around) for s in trace.activations)
            total += StepTime(0.0 if is_last else again.device_seconds, 0.0 if is_last else again.host_seconds)
            total += StepTime(0.0, issued * (num_pieces - 1))
    return total


def offload_wait(trace: Trace, plan: Plan, calibration: Calibration) -> float:
    """Return the seconds for which a step waits for copies to host memory and back.

    `trace` must be from `planned_step`. The packed values of a layer are copied while the next layer computes, so that the step waits only
    if the copy takes longer than that layer.
    """
    layers, storages = saving_layers(trace, plan), slot_storages(trace, plan) if plan.offload else {}
    if not layers:
        return 0.0
    again = _checkpointed_layers(trace, plan)
    busy = defaultdict[tuple[str, bool], float](float)  # device seconds by layer, in forward and in backward
    for one in trace.operations:
        seconds, path = one.count * calibration.operation_seconds(one), layer_of(one.module)
        busy[path, one.phase == "backward"] += seconds
        busy[path, True] += seconds if one.phase == "forward" and any(is_of(one.module, layer) for layer in again) else 0.0
    waits = 0.0
    for (_, layer), (following, _) in pairwise(layers):
        # a layer that is copied and never freed makes nothing wait
        moved = [(slot, part) for _, slot in layer for part in slot.parts if part.away and part.away[0] < trace.length]
        nbytes = sum(part_bytes(slot, part, storages[slot.name]) for slot, part in moved)
        for kind in (TO_HOST, TO_DEVICE):
            waits += max(0.0, nbytes / calibration.copy_rate(kind) - busy[following, kind == TO_DEVICE])
    return waits


def num_saved(trace: Trace, layers: Sequence[str]) -> int:
    """Return the number of tensors that the layers with these paths save for backward."""

    def is_inside(name: str) -> bool:
        return any(is_of(name, layer) for layer in layers)

    if not layers:
        return 0
    activations = sum(len(slot.names) for slot in trace.activations if is_inside(slot.name))
    weights = sum(bool(slot.parts) and is_inside(slot.name) for slot in trace.of(Role.WEIGHT))
    return activations + weights + sum(is_inside(slot.recomputed_from) for slot in trace.of(Role.TEMPORARY))


def product_of(slot: Slot) -> Operation:
    """Return the matrix product or convolution that runs again if backward of a compiled step recomputes `slot`."""
    how = slot.recomputation
    assert how is not None
    return Operation(how.op, slot.module, "backward", slot.dtype, how.flops, how.nbytes)


def _second_pass(trace: Trace, layer: str, calibration: Calibration) -> StepTime:
    inside = (one for one in _forward_operations(trace) if is_of(one.module, layer))
    num_modules = sum(is_of(path, layer) for path in called_modules(trace))
    return _operations(inside, calibration) + StepTime(0.0, calibration.host.module_call * num_modules)


@cached_on_trace
def _forward_operations(trace: Trace) -> list[Operation]:
    return [operation for operation in trace.operations if operation.phase == "forward" and operation.module]


def _optimizer(trace: Trace, plan: Plan, calibration: Calibration) -> StepTime:
    if not trace.optimizer:
        return StepTime(0.0, 0.0)
    held = list(model_memory(trace, plan))
    moved = sum(i.nbytes * (2 if i.role in UPDATED else 1) for i in held if i.role in (*UPDATED, Role.GRADIENT))
    num_parameters = len(trace.of(Role.GRADIENT))
    return StepTime(moved / calibration.bytes_per_second[ELEMENTWISE], num_parameters * calibration.host.optimizer_parameter)
