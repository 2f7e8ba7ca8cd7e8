"""Applies the plan of a session inside the graphs of torch.compile.

`session.compile()` returns what `torch.compile(model)` returns, and each graph that it compiles packs what it saves for backward
(graph_packing.py). The hooks of eager mode are removed: they would break the graphs. Names of slots, formats and pins are those of
eager mode; `session.changes` lists what the graphs keep unmodified, with reasons.

Random bits of stochastic rounding follow from (seed, slot, number of calls of compiled graphs with gradients): a resumed run that loads
the state of the session draws the same bits.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from paredown.formats.format import Format
from paredown.loss.output_head import OutputHead
from paredown.plan.plan import Plan
from paredown.session.changes import UNMODIFIED, Change
from paredown.session.compiled.graph_decisions import GraphDecision, GraphReport
from paredown.session.compiled.graph_packing import PlanBackend, PlanPartitioner, autograd_node_of, holds_tensors, inductor_of
from paredown.session.compiled.graph_signals import NUM_SIGNALS
from paredown.session.eager.product_layers import ProductLayers
from paredown.session.signals import Signals

NOT_COMPILED = (
    "torch.compile has compiled no graph of it: call the model that session.compile() returned. Under fully_shard, Dynamo does not compile "
    "modules whose forward is torch's own, such as nn.Sequential: shard modules of classes of your own"
)


RECOMPUTED = "recomputed"
NO_RULE = (
    "the plan has no rule for activations, so that torch.compile chooses what to recompute: plan.set('activation', None) is enough"
)
NOT_SAVED = "the compiled graphs save no tensor of this name"


class CompiledGraphs:
    """Compiles the model of one session, and keeps account of its graphs, their calls and the stored bytes."""

    def __init__(
        self,
        plan: Plan,
        seed: int,
        *,
        calls: int,
        signals: Signals | None = None,
        head: OutputHead | None = None,
        products: ProductLayers | None = None,
        before_call: Callable[[], None] = lambda: None,
    ) -> None:
        self.before_call = before_call  # raises an error if no graph may run
        self.plan, self.seed, self.calls = plan, seed, calls
        self.head, self.products = head, products  # whose loss is computed in chunks, and whose products multiply codes
        self._signals = signals  # of a guard
        self.reports: list[GraphReport] = []
        self._steps: dict[torch.device, Tensor] = {}
        self._alive: weakref.WeakKeyDictionary[Any, int] = (
            weakref.WeakKeyDictionary()
        )  # autograd node of a call: bytes it saved packed

    def compile(self, model: nn.Module, wrapper: nn.Module, **options: Any) -> Any:
        """Return torch.compile(wrapper, **options), whose graphs pack what they save; `wrapper`: `model`, or DDP around it."""
        partitioner = PlanPartitioner(self.plan, self.seed, self._compiled, has_guard=self._signals is not None)
        inductor = inductor_of(options)
        backend = PlanBackend(self, partitioner, lambda: {id(p): name for name, p in model.named_parameters()}, inductor)
        return torch.compile(wrapper, backend=backend, **options)

    @property
    def decisions(self) -> dict[str, GraphDecision]:
        """Return how each saved tensor of all graphs is stored, by its first slot name (its name in eager mode)."""
        return {name: d for report in self.reports for d in report.decisions for name in d.slot.names[:1]}

    def format_of(self, name: str) -> Format | None:
        """Return the format in which the saved tensor with the slot name `name` is stored; None if it is not packed."""
        decisions = (d for report in self.reports for d in report.decisions if name in d.slot.names)
        return next((d.format for d in decisions if d.format is not None), None)

    def changes(self) -> list[Change]:
        """Return a `Change` for each saved tensor not stored as requested, or just one if nothing was compiled."""
        if not self.reports and self.plan.packs_activations:
            return [Change("the model", "packed activations", UNMODIFIED, NOT_COMPILED)]
        decisions = self.decisions.items()
        rows = [Change(name, str(d.asked), str(d.format or UNMODIFIED), d.reason) for name, d in decisions if d.format != d.asked]
        return [*rows, *self._not_recomputed()]

    def _not_recomputed(self) -> Iterator[Change]:
        """Yield a `Change` for each tensor that the plan recomputes, but that a graph saves or that no graph has."""
        refused = {name: reason for report in self.reports for name, reason in report.not_recomputed.items()}
        names = {*refused, *(name for report in self.reports for name in report.recomputed)}
        yield from (Change(name, RECOMPUTED, "saved", reason) for name, reason in refused.items())
        for text in (text for text in self.plan.recompute if ":" in text):
            if not self.plan.recomputed:
                yield Change(text, RECOMPUTED, "saved", NO_RULE)
            elif self.reports and not any(name == text or fnmatchcase(name, text) for name in names):
                yield Change(text, RECOMPUTED, "nothing", NOT_SAVED)

    @property
    def stored_bytes(self) -> int:
        """Return the bytes of codes, scales and masks of all calls whose backward has not run yet.

        If sizes are dynamic, these are the bytes for the sizes that a graph was compiled with.
        """
        return sum(nbytes for node, nbytes in self._alive.items() if holds_tensors(node))

    def resume(self, seed: int, calls: int) -> None:
        """Continue with the random bits of `seed` after `calls` calls; graphs with another seed are compiled again."""
        self.seed, self.calls = seed, calls

    def step(self, device: torch.device) -> Tensor:
        """Return the number of the next call, in an int64 tensor that all graphs of a device read."""
        if device not in self._steps:
            self._steps[device] = torch.zeros(1, dtype=torch.int64, device=device)
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return self._steps[device].add_(1)  # in the user's CUDA graph of a whole step: each replay draws new bits
        return self._steps[device].fill_(self.calls + 1)

    def _compiled(self, report: GraphReport, previous: GraphReport) -> None:
        """Replace the report on a graph's `previous` compilation by `report`, which is on its new one."""
        self.reports = [*(other for other in self.reports if other is not previous), report]

    def on_call(self, report: GraphReport, outputs: Any, numbers: Tensor, num_calls: int) -> None:
        """Count a call, with gradients, of the graph that `report` describes; the call returned `outputs`.

        `num_calls`: how often this graph was called so far. `numbers`: what it measured in this call.
        """
        self.calls += 1
        if self._signals is not None and report.signals and self._signals.is_due(num_calls):
            first = report.signals[0].first
            self._signals.add(
                [signal.names for signal in report.signals], numbers[first : first + NUM_SIGNALS * len(report.signals)]
            )
        node = autograd_node_of(outputs) if report.stored_bytes else None
        if node is not None:
            self._alive[node] = report.stored_bytes
