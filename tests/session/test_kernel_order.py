"""The order of the kernels of a backward graph."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch._inductor import memory

import paredown as pare
from paredown.session.compiled.kernel_order import ByLastOperation, by_last_operation


@dataclass(eq=False)
class Kernel:
    name: str
    max_order: int
    reads: list[str] = field(default_factory=list[str])

    @property
    def unmet_dependencies(self) -> list[Any]:
        return [SimpleNamespace(name=name) for name in self.reads]

    def get_buffer_names(self) -> list[str]:
        return [self.name]


def test_gradients_of_weights_run_before_a_sum_over_all_layers() -> None:
    """As Inductor has them: sorted by the first operation of the sum, and so behind everything that the sum reads."""
    chain = [Kernel("a0", 0), Kernel("a1", 3, ["a0"]), Kernel("a2", 6, ["a1"])]
    sums, weights = (
        Kernel("s", 7, ["a0", "a1", "a2"]),
        [Kernel("w0", 2, ["a0"]), Kernel("w1", 5, ["a1"]), Kernel("w2", 8, ["a2", "input"])],
    )
    found = [kernel.name for kernel in by_last_operation([*chain, sums, *weights])]
    assert found == ["a0", "w0", "a1", "w1", "a2", "s", "w2"]


def test_a_cycle_leaves_the_order() -> None:
    kernels = [Kernel("a", 1, ["b"]), Kernel("b", 0, ["a"])]
    assert by_last_operation(kernels) == kernels


def test_the_pass_has_one_identity() -> None:
    assert ByLastOperation().uuid() == ByLastOperation().uuid()


def test_inductor_does_not_replace_the_order_of_packed_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its estimate of the peak counts values that fused kernels never write: it takes worse orders than the one of the pass."""
    compared: list[bool] = []  # for each graph, whether it is backward
    reference = memory.reorder_for_peak_memory

    def counted(*args: Any, **options: Any) -> Any:
        compared.append(torch._inductor.virtualized.V.graph.is_backward)
        return reference(*args, **options)

    monkeypatch.setattr(memory, "reorder_for_peak_memory", counted)
    torch.compiler.reset()
    net, x = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 8)), torch.randn(128, 32)
    with pare.apply(pare.Plan.uniform(activation="int8/64@bf16"), net) as session:
        session.compile()(x).square().sum().backward()
    assert compared == []
    torch.compiler.reset()
    torch.compile(net)(x).square().sum().backward()
    assert compared == [False, True]
