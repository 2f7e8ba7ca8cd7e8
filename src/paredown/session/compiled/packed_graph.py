"""Runs a compiled graph, and compiles it again if values of saved tensors are too large to pack.

On a CPU the numbers that a graph measures are read after every call; on a GPU after the first call of each compilation, and later
asynchronously.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor

from paredown.errors import ApplyError
from paredown.session.compiled.graph_checks import NUM_NUMBERS
from paredown.session.compiled.graph_decisions import GraphReport
from paredown.session.compiled.graph_products import rewrite_products
from paredown.session.value_bounds import DeviceReading, update_reading

if TYPE_CHECKING:
    from paredown.session.compiled.graph_packing import PlanBackend

MAX_BUFFER = 1 << 20  # values of a buffer that a repeated first call sets back


class PackedGraph:
    """Runs a compiled graph, and compiles it again without packing saved tensors whose values are too large."""

    def __init__(self, backend: PlanBackend, gm: fx.GraphModule, example_inputs: list[Any]) -> None:
        self._backend, self._gm = backend, gm
        if backend.graphs.products is not None:
            rewrite_products(gm, example_inputs, backend.graphs.products, backend.names())
        devices = [t.device for t in example_inputs if isinstance(t, Tensor)]
        # a GPU graph may take CPU scalars
        self._device = next((device for device in devices if device.type != "cpu"), torch.device("cpu"))
        self._added = [backend.graphs.step(self._device), torch.zeros(NUM_NUMBERS, device=self._device)]
        sizes = [size for value in example_inputs for size in (value.shape if isinstance(value, Tensor) else (value,))]
        self._is_dynamic = any(isinstance(size, torch.SymInt) for size in sizes)
        self._roots = backend.roots(gm, example_inputs)
        self._kept: dict[tuple[str, ...], str] = {}
        self._reading = DeviceReading([], 0)
        self._num_calls = 0
        self._report = GraphReport([])
        deferred = backend.graphs.head.in_graph(gm, example_inputs) if backend.graphs.head is not None else None
        self._outputs = deferred or (lambda outputs, _: outputs)
        self._compiled = self._compile(example_inputs)

    def __call__(self, *args: Any) -> Any:
        """Run the graph and return its outputs; compile it again if the plan, the seed or the values require this."""
        is_fake = any(isinstance(arg, FakeTensor) for arg in args)  # DDP splits graphs, and calls each part with fake tensors first
        if is_fake or not torch.is_grad_enabled():
            return self._outputs(self._compiled(*args, *self._added), args)
        self._backend.graphs.before_call()
        if self._seed != self._backend.graphs.seed:  # the session loaded the state of another one
            self._compiled = self._compile_for_seed(list(args))
        if self._plan is not self._backend.graphs.plan and not self._is_dynamic:  # a guard changed it
            self._compiled = self._compile(list(args))
        self._backend.graphs.step(self._device)
        self._num_calls += 1
        is_read = bool(self._report.checks) and (not self._reading.values or not self._added[1].is_cuda)
        before = Snapshot(args) if is_read else None
        outputs = self._compiled(*args, *self._added)
        if self._must_compile_again(is_read=is_read):
            self._compiled = self._compile(list(args))
            if before is not None:
                before.restore()
                outputs = self._compiled(*args, *self._added)
        self._backend.graphs.on_call(self._report, outputs, self._added[1], self._num_calls)
        return self._outputs(outputs, args)

    def _compile(self, inputs: list[Any]) -> Callable[..., Any]:
        reports: list[GraphReport] = []
        self._seed, self._plan = self._backend.graphs.seed, self._backend.graphs.plan
        now = {"plan": self._plan, "seed": self._seed, "kept": dict(self._kept), "roots": self._roots}
        partitioner = replace(self._backend.partitioner, on_graph=reports.append, **now)
        compiled = self._backend.compile(self._gm, [*inputs, *self._added], partitioner)
        previous, self._report = self._report, reports[0] if reports else GraphReport([])
        self._reading = DeviceReading([], 0)  # the numbers of the new graph have other places
        self._backend.partitioner.on_graph(self._report, previous)
        return compiled

    def _compile_for_seed(self, inputs: list[Any]) -> Callable[..., Any]:
        if self._is_dynamic:  # compiled with `inputs` it would have their sizes, and torch.compile would call it with others
            raise ApplyError(
                f"the session loaded a state of seed {self._backend.graphs.seed}, and a graph of dynamic sizes was compiled with seed "
                f"{self._seed}: load the state before the first call of the compiled model, or apply the plan with that seed."
            )
        return self._compile(inputs)

    def _must_compile_again(self, *, is_read: bool) -> bool:
        """Return whether the measured numbers forbid packing a saved tensor that the graph packs.

        `is_read`: whether to read the numbers of this call; if not, those of an earlier call are used, without synchronizing with the GPU.
        """
        checks, numbers = self._report.checks, self._added[1]
        if not checks:
            return False
        last = checks[-1].first + checks[-1].count
        if is_read:
            self._reading.values = numbers[:last].tolist()
        elif not update_reading(self._reading, lambda: numbers[:last], self._num_calls):
            return False
        found = {
            slot.names: reason
            for check in checks
            if (reason := check.reason(self._reading.values[check.first : check.first + check.count]))
            for slot in check.slots
        }
        self._kept |= found
        return bool(found)


class Snapshot:
    """Copies the random states and small buffers that a call of a graph changes, so that it can be repeated."""

    def __init__(self, args: Sequence[Any]) -> None:
        tensors = [t for t in args if isinstance(t, Tensor) and not t.requires_grad and t.numel() <= MAX_BUFFER]
        self._copies = [(t, t.clone()) for t in tensors]
        devices = {t.device for t in args if isinstance(t, Tensor) and t.is_cuda}
        self._random = [(device, torch.cuda.get_rng_state(device)) for device in devices]
        self._host = torch.get_rng_state()

    def restore(self) -> None:
        """Restore the random number generators and buffers as they were when the copy was made."""
        torch.set_rng_state(self._host)
        for device, state in self._random:
            torch.cuda.set_rng_state(state, device)
        for tensor, copy in self._copies:
            if not torch.equal(tensor, copy):  # inputs that the graph only reads may be expanded, which cannot be written
                tensor.copy_(copy)
