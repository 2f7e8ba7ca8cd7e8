"""Chains of recomputed tensors are saved where that takes less memory, and decoded tensors are computed right before their use."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, fx, nn

from paredown import Session, apply
from paredown.session.compiled import graph_packing, recomputed_chains
from tests.programs.compiling import compiles_quickly
from tests.session.nets import INT4, INT8, activations, gradients, relative_error, step, weighted

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")  # torch's own
CONVOLUTION = torch.ops.aten.convolution_backward.default


class ResidualBlocks(nn.Module):
    """Blocks of a convolution, a batch norm, a sum and a ReLU."""

    def __init__(self, num: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.convs = nn.ModuleList(nn.Conv2d(16, 16, 3, padding=1, bias=False) for _ in range(num))
        self.norms = nn.ModuleList(nn.BatchNorm2d(16) for _ in range(num))

    def forward(self, x: Tensor) -> Tensor:
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = torch.relu(x + norm(conv(x)))
        return x


def compiled(model: nn.Module, format: str) -> tuple[Session, fx.Graph, list[Tensor], list[Tensor]]:
    """A session, the backward graph of a compiled step in it, its gradients, and those of the unmodified eager model."""
    x = torch.randn(4, 16, 16, 16, generator=torch.Generator().manual_seed(0)).contiguous(memory_format=torch.channels_last)
    model = nn.Sequential(nn.Conv2d(16, 16, 1), model).to(memory_format=torch.channels_last)
    plain = step(model, x)
    model.zero_grad()
    session, graphs = apply(activations(format), model), list[fx.Graph]()

    def finished(editor: Any) -> None:
        finish(editor)
        graphs.append(editor.backward.graph)

    finish = graph_packing.GraphEditor.finish
    with compiles_quickly(), patch.object(graph_packing.GraphEditor, "finish", finished):
        weighted(session.compile()(x)).backward()
    return session, graphs[0], gradients(model), plain


def saved(session: Session) -> list[tuple[str, ...]]:
    assert session._compiled is not None
    return [d.slot.names for d in session._compiled.decisions.values() if d.format is not None]


def test_outputs_of_blocks_are_saved_in_4_bits_and_recomputed_in_8() -> None:
    """In memory early: one tensor of 32 bits a value. Stored: two of 4.3 or 8.5 bits, twice of which is more than 32."""
    blocks = [(f"1.convs.{i}:input",) for i in (1, 2)]
    session, _, found, plain = compiled(ResidualBlocks(3), INT4)
    assert set(blocks) <= set(saved(session)) and relative_error(found, plain) < 0.3
    session, _, found, plain = compiled(ResidualBlocks(3), INT8)
    assert not set(blocks) & set(saved(session)) and relative_error(found, plain) < 0.03


def ancestors(node: fx.Node) -> set[fx.Node]:
    found, stack = set[fx.Node](), [node]
    while stack:
        for parent in stack.pop().all_input_nodes:
            if parent not in found:
                found.add(parent)
                stack.append(parent)
    return found


@pytest.mark.parametrize("min_delayed", [0, 1 << 30])
def test_an_input_of_a_convolution_is_decoded_when_its_gradient_is_there(min_delayed: int) -> None:
    with patch.object(recomputed_chains, "MIN_DELAYED", min_delayed):
        _, graph, found, plain = compiled(ResidualBlocks(4), INT4)
    convolutions = graph.find_nodes(op="call_function", target=CONVOLUTION)
    decoded = [node for node in convolutions if isinstance(node.args[1], fx.Node) and node.args[1].op != "placeholder"]
    is_delayed = [node.args[0] in ancestors(node.args[1]) for node in decoded if node is not convolutions[0]]
    assert is_delayed.count(min_delayed == 0) == len(is_delayed) == 3
    assert relative_error(found, plain) < 0.3


def test_delayed_values_are_those_of_the_others() -> None:
    """The scales that wait for a gradient are equal to the scales: no bit of a gradient changes."""
    with patch.object(recomputed_chains, "MIN_DELAYED", 0):
        delayed = compiled(ResidualBlocks(4), INT4)[2]
    for one, other in zip(delayed, compiled(ResidualBlocks(4), INT4)[2], strict=True):
        assert torch.equal(one, other)
