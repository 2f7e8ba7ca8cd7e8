"""Host seconds of operations, packed tensors, checkpointed layers and packed weights, from steps of two small networks.

Their tensors are so small that a GPU keeps up with the host: the time of a step is that of the host. On the CPU, what the operations
themselves take is subtracted, by the rates and times of a `draft` whose host costs are 0. The number of operations and of packed tensors
follows from a trace, as it does in a prediction, so that what a trace does not count (views, modules, hooks) is part of the cost of what
it counts.

    forward operation     seconds of forward / its operations
    packed tensor         (seconds of a step with packed activations - seconds of the baseline) / packed tensors, in one format: the host
                          takes the same time for all
    checkpointed tensor   (seconds with checkpointing - baseline - operations that run twice) / tensors that the layers save:
                          torch.utils.checkpoint calls Python for each of them in both forward passes and in backward

The steps of a network with and without a plan take turns: a host that becomes slower changes all of them, and not their difference.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import cached_property
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from paredown.calibrate.operation_time import time_operations
from paredown.models import MODELS
from paredown.optim.optimizers import AdamW
from paredown.plan.calibration import Calibration, HostCost
from paredown.plan.checkpointed_trace import is_of, modules_of, outermost
from paredown.plan.plan import Plan
from paredown.plan.replay import slot_storages
from paredown.plan.step_time import FORWARD, added_time
from paredown.roles import Role
from paredown.session.session import apply
from paredown.trace.trace import Trace
from paredown.trace.trace_step import trace_step

WARM_UP, STEPS = {"cuda": 4, "cpu": 2}, {"cuda": 9, "cpu": 5}
DTYPES = {"cuda": torch.bfloat16, "cpu": None}  # of autocast
LEAST_SECONDS = 1e-7  # of a cost: differences of two times can be negative
WEIGHTS = "int8/64@bf16"
EMPTY_CALLS = 200


class StepSeconds(NamedTuple):
    """Host seconds of forward (with loss), backward and the optimizer's step."""

    forward: float
    backward: float
    optimizer: float

    @property
    def total(self) -> float:
        """Seconds of all three."""
        return sum(self)


class SmallNetwork:
    """A network of `paredown.models` on small tensors, whose steps are timed under plans. `layers`: pattern of its repeated layers."""

    def __init__(self, name: str, layers: str, batch: tuple[Tensor, ...], **sizes: int) -> None:
        self.name, self.layers, self.batch, self.sizes = name, layers, batch, sizes
        self.device = batch[0].device.type

    def build(self) -> nn.Module:
        """The model, on the device."""
        return MODELS[self.name](**self.sizes).to(self.device).train()

    @cached_property
    def trace(self) -> Trace:
        """The trace of its step."""
        batch: Any = tuple(part.cpu() for part in self.batch)
        dtype = DTYPES[self.device]
        return trace_step(self.build().cpu(), batch, loss=_loss, optimizer="adamw", device=self.device, autocast=dtype)

    def seconds(self, *plans: Plan | None, is_ours: bool = False) -> list[StepSeconds]:
        """Medians over steps under each of the plans, in turns; None is the baseline. `is_ours`: with AdamW of paredown.optim."""
        models = [self.build() for _ in plans]
        sessions = [apply(plan, model) for plan, model in zip(plans, models, strict=True) if plan is not None]
        try:
            optimizers = [AdamW(m.parameters()) if is_ours else torch.optim.AdamW(m.parameters(), fused=True) for m in models]
            pairs, warm_up = list(zip(models, optimizers, strict=True)), WARM_UP[self.device]
            turns = [[self._step(*pair) for pair in pairs] for _ in range(warm_up + STEPS[self.device])][warm_up:]
        finally:
            for session in sessions:
                session.close()
        return [StepSeconds(*map(median, zip(*rows, strict=True))) for rows in zip(*turns, strict=True)]

    def _step(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[float, float, float]:
        _synchronize(self.device)
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

    def num_packed(self, plan: Plan) -> int:
        """Saved tensors that the plan packs."""
        return sum(storage.packs for storage in slot_storages(self.trace, plan).values())

    @property
    def checkpointing(self) -> Plan:
        """All layers checkpointed, nothing packed."""
        return Plan((), recompute=(self.layers,))

    @cached_property
    def _paths(self) -> list[str]:
        return outermost(modules_of(self.trace), (self.layers,))

    @property
    def num_checkpointed(self) -> int:
        """Tensors that the layers save."""
        return sum(any(is_of(slot.name, path) for path in self._paths) for slot in self.trace.activations)

    @property
    def checkpointed_share(self) -> float:
        """The share of the operations of forward and loss that are in the layers."""
        counts = [
            (one.count, any(is_of(one.module, path) for path in self._paths))
            for one in self.trace.operations
            if one.phase in FORWARD
        ]
        return sum(count for count, is_inside in counts if is_inside) / sum(count for count, _ in counts)


def _loss(output: Tensor, target: Tensor) -> Tensor:
    return cross_entropy(output.flatten(0, -2), target.flatten())


def small_networks(device: str) -> list[SmallNetwork]:
    """A transformer and a residual network; saved tensors have more values than the least that is packed."""
    ids = torch.randint(64, (2, 64), device=device)
    pictures, labels = torch.randn(4, 3, 32, 32, device=device), torch.randint(10, (4,), device=device)
    gpt = {"vocabulary": 64, "dim": 64, "num_layers": 4, "num_heads": 2, "context": 64}
    return [SmallNetwork("gpt", "layers.*", (ids, ids), **gpt), SmallNetwork("resnet18", "layer?.*", (pictures, labels), width=16)]


class HostMeasurement:
    """Measures what the host takes for the steps of small networks. `draft`: rates of the device, with host costs of 0."""

    def __init__(self, draft: Calibration) -> None:
        self.draft, self.networks = draft, small_networks(draft.device)
        self.is_cpu = draft.device == "cpu"
        if self.is_cpu:
            self.draft = replace(draft, timed=time_operations([one.trace for one in self.networks], "cpu"))

    def cost(self, text: str, is_late: Callable[[], bool]) -> tuple[HostCost, float]:
        """Costs of the host, and its seconds for one packed tensor, measured in the format `text`.

        Packed weights, whose optimizer has kernels to compile, are not measured if `is_late`: then two packed tensors stand for a weight.
        """
        packing = Plan.uniform(activation=text)
        with _without_collection():
            turns = [one.seconds(None, packing, one.checkpointing) for one in self.networks]
            rows = [row for row, _, _ in turns]
            forward = self._per_operation([row.forward for row in rows], "forward", "loss")
            backward = self._per_operation([row.backward for row in rows], "backward")
            optimizer = _share([row.optimizer for row in rows], [len(one.trace.of(Role.GRADIENT)) for one in self.networks])
            packed = self._packed([(row.total, other.total) for row, other, _ in turns], packing)
            checkpointed = self._checkpointed([(row, other.total) for row, _, other in turns])
            weight = 2 * packed if is_late() else self._weight()
        return HostCost(empty_operation(self.draft.device), forward, backward, optimizer, checkpointed, weight), packed

    def _per_operation(self, seconds: list[float], *phases: str) -> float:
        operations = [[one for one in network.trace.operations if one.phase in phases] for network in self.networks]
        computed = sum(one.count * self.draft.operation_seconds(one) for rows in operations for one in rows)
        return _share([*seconds, -computed * self.is_cpu], [sum(one.count for one in rows) for rows in operations])

    def _packed(self, seconds: list[tuple[float, float]], plan: Plan) -> float:
        added = [under_plan - baseline for baseline, under_plan in seconds]
        computed = sum(added_time(one.trace, plan, self.draft).device_seconds for one in self.networks)
        return _share([*added, -computed * self.is_cpu], [one.num_packed(plan) for one in self.networks])

    def _checkpointed(self, seconds: list[tuple[StepSeconds, float]]) -> float:
        added: list[float] = []
        for network, (baseline, total) in zip(self.networks, seconds, strict=True):
            again = baseline.forward * network.checkpointed_share  # on the CPU what is computed is part of it
            added.append(total - baseline.total - again)
        return _share(added, [network.num_checkpointed for network in self.networks])

    def _weight(self) -> float:
        network, plan = self.networks[0], Plan.uniform(weight=WEIGHTS)
        num_packed = sum(len(slot.shape) > 1 for slot in network.trace.of(Role.WEIGHT))
        baseline, packed = network.seconds(None, plan, is_ours=True)
        return _share([packed.total - baseline.total], [num_packed])


def _share(seconds: list[float], counts: list[int]) -> float:
    return max(sum(seconds) / sum(counts), LEAST_SECONDS)


def empty_operation(device: str) -> float:
    """Host seconds of an addition of one value, called in a loop; the least of three loops."""
    x = torch.ones(1, device=device)

    def loop(call: Callable[[], object]) -> float:
        _synchronize(device)
        begun = time.perf_counter()
        for _ in range(EMPTY_CALLS):
            call()
        return (time.perf_counter() - begun) / EMPTY_CALLS

    return min(loop(lambda: x + x) for _ in range(3))


def _synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


@contextmanager
def _without_collection() -> Generator[None]:
    """Inside the context, Python does not collect garbage: a collection in one step would count as its cost."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
