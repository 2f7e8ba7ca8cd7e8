"""Measures the host seconds of views, module calls, gradients, packed tensors, checkpointed layers and weights by steps of small networks.

The networks are so small that a GPU keeps up with the host: the time of a step is that of the host. The time for calling operations
is measured call by call (predict/operation_time.py). The rest of a step is divided by counts of the trace, which a prediction
multiplies. On the CPU a call of an operation is device time, and no host time.

    view, module call,    their shares of the step of the first network, SHARES, which were fitted to eight networks; on the CPU
    gradient              (seconds of forward and backward - calls of their operations) by these shares
    watched               (seconds of a step that packs one tensor - seconds of the baseline) / module calls and saved tensors
    packed tensor         (seconds of a step that packs all - of one that packs one tensor) / packed tensors, in one format: the host takes
                          the same time for all
    checkpointed tensor   (seconds with checkpointing - baseline - second forward pass) / tensors that the layers save:
                          torch.utils.checkpoint calls Python for each of them in both forward passes and in backward

The steps of a network with and without a plan take turns, with a loop of empty operations in each turn: a host that becomes slower changes
all of them, and not their ratios. Between the networks, seconds are scaled by the empty operations of their turns.

`with_present_host` runs one of these networks again, in a third of a second, and multiplies all costs by how much longer its step takes.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import cached_property
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from paredown.models import MODELS
from paredown.optim.optimizers import AdamW
from paredown.plan.byte_intervals import slot_storages
from paredown.plan.calibration import Calibration, HostCost
from paredown.plan.checkpointed_trace import is_of, modules_of, outermost
from paredown.plan.plan import Plan
from paredown.plan.step_time import FORWARD, added_time, called_modules, num_saved, num_watched
from paredown.plan.trace import VIEW, Operation, Slot, Trace
from paredown.predict.device_time import empty_operation
from paredown.predict.operation_time import time_operations
from paredown.predict.trace_step import trace_step
from paredown.roles import Role
from paredown.session.session import start_session

WARM_UP, STEPS = {"cuda": 4, "cpu": 2}, {"cuda": 9, "cpu": 5}
DTYPES = {"cuda": torch.bfloat16, "cpu": None}  # autocast's dtype
LEAST_SECONDS = 1e-7  # no cost is less, since differences of two measured times can be negative
WEIGHTS = "int8/64@bf16"
BACKWARD = ("backward",)
PRESENT_STEPS, SPEED_STEPS = 24, 4
# Shares of a step of the first network, which took 6.0 ms on the host of one H200: least squares over forward and backward of small steps
# of eight networks (benchmarks/host_shares.py). Two networks do not tell them apart: 0.1 us for a view, and 25 us for a module call.
SHARES = {"view": 1.35e-3, "backward_view": 0.52e-3, "module_call": 2.2e-3, "gradient": 2.4e-3}
EMPTY_CALLS = 100


class StepSeconds(NamedTuple):
    """The host (CPU) seconds of a training step: forward with loss, backward, and the optimizer's step."""

    forward: float
    backward: float
    optimizer: float

    @property
    def total(self) -> float:
        """Return the host seconds of the whole step."""
        return sum(self)

    def scaled(self, factor: float) -> StepSeconds:
        """Return these seconds times `factor`, for a host that takes `factor` times as long."""
        return StepSeconds(*(factor * seconds for seconds in self))


class SmallNetwork:
    """A network so small that the host limits its training steps; they are timed to measure host time."""

    def __init__(self, name: str, layers: str, batch: tuple[Tensor, ...], **sizes: int) -> None:
        self.name, self.layers, self.batch, self.sizes = name, layers, batch, sizes
        self.device = batch[0].device.type
        self.empty_operations: list[float] = []  # seconds, one for each turn

    def build(self) -> nn.Module:
        """Return a new model of this network in training mode, on the device of the network's batch."""
        return MODELS[self.name](**self.sizes).to(self.device).train()

    @cached_property
    def trace(self) -> Trace:
        """Return the trace of a training step of the network with AdamW."""
        batch: Any = tuple(part.cpu() for part in self.batch)
        dtype = DTYPES[self.device]
        return trace_step(self.build().cpu(), batch, loss=_loss, optimizer="adamw", device=self.device, autocast=dtype)

    def seconds(self, *plans: Plan | None, is_ours: bool = False) -> list[StepSeconds]:
        """Return the median host seconds of the network's steps under each of `plans`, where None is the baseline.

        Steps under the plans take turns. With `is_ours`, the optimizer is AdamW of paredown.optim, otherwise that of torch.
        """
        models = [self.build() for _ in plans]
        sessions = [start_session(plan, model) for plan, model in zip(plans, models, strict=True) if plan is not None]
        try:
            optimizers = [AdamW(m.parameters()) if is_ours else torch.optim.AdamW(m.parameters(), fused=True) for m in models]
            pairs, warm_up = list(zip(models, optimizers, strict=True)), WARM_UP[self.device]
            num_turns = warm_up + STEPS[self.device]
            turns = [self._turn(pairs) for _ in range(num_turns)][warm_up:]
        finally:
            for session in sessions:
                session.close()
        return [StepSeconds(*map(median, zip(*rows, strict=True))) for rows in zip(*turns, strict=True)]

    def _turn(self, pairs: Sequence[tuple[nn.Module, torch.optim.Optimizer]]) -> list[tuple[float, float, float]]:
        """Run two steps of each (model, optimizer), and return (forward, backward, optimizer) seconds of the second."""
        self.empty_operations.append(empty_operation(self.device, EMPTY_CALLS))
        return [(self.step(*pair), self.step(*pair))[1] for pair in pairs]

    def step(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[float, float, float]:
        """Run one training step; return the host seconds of forward with loss, of backward and of the optimizer."""
        if self.device == "cuda":
            torch.cuda.synchronize()
        times = [time.perf_counter()]
        dtype = DTYPES[self.device]
        with nullcontext() if dtype is None else torch.autocast(self.device, dtype):
            loss = _loss(model(*self.batch[:-1]), self.batch[-1])
        times.append(time.perf_counter())
        loss.backward()
        times.append(time.perf_counter())
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        times.append(time.perf_counter())
        return times[1] - times[0], times[2] - times[1], times[3] - times[2]

    def packed(self, plan: Plan) -> list[Slot]:
        """Return the saved tensors of the network's step that `plan` packs."""
        storages = slot_storages(self.trace, plan)
        return [slot for slot in self.trace.activations if storages[slot.name].packs]

    def packing_one(self, plan: Plan) -> Plan:
        """Return a plan that packs only one of the tensors that `plan` packs."""
        slot = self.packed(plan)[0]
        return Plan(((f"activation={slot.name}", plan.find(slot.names, Role.ACTIVATION)),))

    @property
    def checkpointing(self) -> Plan:
        """Return the plan that checkpoints all layers of the network and packs nothing."""
        return Plan((), recompute=(self.layers,))

    @cached_property
    def paths(self) -> list[str]:
        """Return the module paths of the network's repeated layers."""
        return outermost(modules_of(self.trace), (self.layers,))

    def count(self, phases: Sequence[str], of: Callable[[Operation], float] = lambda one: one.op == VIEW) -> float:
        """Return the sum of `of(operation)` over all calls in `phases`; by default the number of views."""
        return sum(one.count * of(one) for one in self.trace.operations if one.phase in phases)


def _loss(output: Tensor, target: Tensor) -> Tensor:
    return cross_entropy(output.flatten(0, -2), target.flatten())


def small_networks(device: str) -> list[SmallNetwork]:
    """Return two networks to time, a transformer and a ResNet, whose saved tensors are just large enough to pack."""
    ids = torch.randint(64, (1, 64), device=device)
    pictures, labels = torch.randn(1, 3, 32, 32, device=device), torch.randint(10, (1,), device=device)
    gpt = {"vocabulary": 64, "dim": 64, "num_layers": 4, "num_heads": 2, "context": 64}
    return [SmallNetwork("gpt", "layers.*", (ids, ids), **gpt), SmallNetwork("resnet18", "layer?.*", (pictures, labels), width=16)]


class HostMeasurement:
    """Measures the host's time for packing, checkpointing and calls, by steps of small networks.

    `draft` is a calibration of the device whose host costs are not measured yet.
    """

    def __init__(self, draft: Calibration) -> None:
        self.networks, self.is_cpu = small_networks(draft.device), draft.device == "cpu"
        self.calls = time_operations([one.trace for one in self.networks], draft.device)
        self.draft = replace(draft, timed=self.calls.timed if self.is_cpu else {})

    def costs(self, text: str, is_late: Callable[[], bool]) -> tuple[HostCost, float]:
        """Return the measured costs of the host, and its seconds for packing a tensor in the format `text`.

        If `is_late()` is true, packed weights are not measured, since kernels of their optimizer would be compiled: a packed weight is
        taken to cost as much as two packed tensors.
        """
        packing = Plan.uniform(activation=text)
        with _without_collection():
            turns = [one.seconds(None, one.packing_one(packing), packing, one.checkpointing) for one in self.networks]
            empty = median(seconds for one in self.networks for seconds in one.empty_operations)
            scales = [empty / median(one.empty_operations) for one in self.networks]
            scaled = [[row.scaled(scale) for row in own] for own, scale in zip(turns, scales, strict=True)]
            rows, few, all_packed, checkpointed = (list(column) for column in zip(*scaled, strict=True))
            unit = self._unit(rows, empty)
            watched, packed = self._packed(rows, few, all_packed, packing)
            tensor = self._checkpointed(rows, checkpointed)
            weight = 2 * packed if is_late() else self._weight()
        optimizer = _share([row.optimizer for row in rows], [len(one.trace.of(Role.GRADIENT)) for one in self.networks])
        both = (*FORWARD, *BACKWARD)
        num_kernels = sum(one.count(both, lambda one: one.op != VIEW) for one in self.networks)
        kernel = 0.0 if self.is_cpu else sum(self._calls(both, empty)) / num_kernels
        cost = HostCost(
            empty_operation=empty,
            operation=kernel,
            **{name: share * unit for name, share in SHARES.items()},
            optimizer_parameter=optimizer,
            checkpointed_tensor=tensor,
            watched=watched,
            packed_weight=weight,
            step=rows[0].total,
        )
        return cost, packed

    def _calls(self, phases: Sequence[str], empty: float) -> list[float]:
        """Return, for each network, the host seconds of calling its operations in `phases`.

        `empty` is the host seconds of an empty operation, in which calls are measured.
        """
        ratios, draft = self.calls.issued, self.draft

        def seconds(one: Operation) -> float:
            return draft.operation_seconds(one) if self.is_cpu else empty * ratios.get(one.op, 1.0) * (one.op != VIEW)

        return [network.count(phases, seconds) for network in self.networks]

    def _unit(self, rows: Sequence[StepSeconds], empty: float) -> float:
        """Return the host seconds of a step of the first network, which SHARES divides among kinds of calls.

        On the CPU, the computation of the step's operations is left out. `rows` has the baseline's seconds of each network, `empty` the
        seconds of an empty operation.
        """
        if not self.is_cpu:
            return rows[0].total
        rest = [row.forward + row.backward for row in rows], [-seconds for seconds in self._calls((*FORWARD, *BACKWARD), empty)]
        return _share([one for part in rest for one in part], [self._shares(network) for network in self.networks])

    def _shares(self, network: SmallNetwork) -> float:
        """Return the time of all views, module calls and gradients of `network`, in steps of the first network."""
        counts = {"view": network.count(FORWARD), "backward_view": network.count(BACKWARD)}
        counts |= {"module_call": len(called_modules(network.trace)), "gradient": len(network.trace.of(Role.GRADIENT))}
        return sum(SHARES[name] * count for name, count in counts.items())

    def _packed(
        self, rows: Sequence[StepSeconds], few: Sequence[StepSeconds], all_packed: Sequence[StepSeconds], plan: Plan
    ) -> tuple[float, float]:
        """Return the host seconds for each module call or saved tensor in a session, and for each packed tensor.

        `rows`, `few` and `all_packed` are the seconds of each network's step with no packed tensor, with one, and with all that `plan`
        packs.
        """
        computed = sum(added_time(one.trace, plan, self.draft).device_seconds for one in self.networks)
        num_packed = [sum(len(slot.names) for slot in one.packed(plan)) - 1 for one in self.networks]
        added = [after.total - before.total for before, after in zip(few, all_packed, strict=True)]
        packed = _share([*added, -computed * self.is_cpu], num_packed)
        added = [after.total - before.total - packed for before, after in zip(rows, few, strict=True)]
        return _share(added, [num_watched(one.trace, plan) for one in self.networks]), packed

    def _checkpointed(self, rows: Sequence[StepSeconds], checkpointed: Sequence[StepSeconds]) -> float:
        """Return the host seconds for each tensor that a layer under activation checkpointing saves."""
        added: list[float] = []
        for network, baseline, other in zip(self.networks, rows, checkpointed, strict=True):
            inside = [one for one in network.trace.operations if any(is_of(one.module, path) for path in network.paths)]
            share = sum(one.count for one in inside if one.phase in FORWARD) / network.count(FORWARD, lambda one: 1.0)
            added.append(other.total - baseline.total - baseline.forward * share)  # on the CPU this includes the computation
        return _share(added, [num_saved(network.trace, network.paths) for network in self.networks])

    def _weight(self) -> float:
        network, plan = self.networks[0], Plan.uniform(weight=WEIGHTS)
        num_packed = sum(len(slot.shape) > 1 for slot in network.trace.of(Role.WEIGHT))
        baseline, packed = network.seconds(None, plan, is_ours=True)
        return _share([packed.total - baseline.total], [num_packed])


def with_present_host(calibration: Calibration) -> Calibration:
    """Return the calibration with host times scaled to the speed that the host has now, which is measured."""
    return calibration.with_host_speed(HostSpeed(calibration)(PRESENT_STEPS))


class HostSpeed:
    """Measures how fast the host is now, by steps of a small network that were also timed at calibration."""

    def __init__(self, calibration: Calibration) -> None:
        self._network, self._seconds = small_networks(calibration.device)[0], calibration.host.step
        model = self._network.build()
        self._pair = model, torch.optim.AdamW(model.parameters(), fused=True)
        for _ in range(WARM_UP[calibration.device]):
            self._network.step(*self._pair)

    def __call__(self, num_steps: int = SPEED_STEPS) -> float:
        """Return the median time of `num_steps` steps, divided by that at calibration: above 1 for a slower host."""
        with _without_collection():
            _, *steps = [sum(self._network.step(*self._pair)) for _ in range(1 + num_steps)]
        return median(steps) / self._seconds


def _share(seconds: Sequence[float], counts: Sequence[float]) -> float:
    return max(sum(seconds) / sum(counts), LEAST_SECONDS)


@contextmanager
def _without_collection() -> Generator[None]:
    """Return a context in which Python does not collect garbage, which would make some of the steps longer."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
