"""Casts of weights and of their gradients in compiled graphs are few kernels, with the values that they have alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch._inductor.config as inductor_config
from torch import Tensor, fx, nn
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._inductor.graph import GraphLowering

import paredown as pare
from paredown.session.compiled import graph_packing, grouped_casts
from paredown.session.compiled.grouped_casts import CAST, CAST_ALL, group_casts_of
from tests.support.compare import assert_same_bits

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # torch's own
NUM_LAYERS, WIDTH = 4, 128


@pytest.fixture(autouse=True)
def _without_compiled_graphs() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def network() -> nn.Module:
    torch.manual_seed(0)
    parts = [
        part for _ in range(NUM_LAYERS) for part in (nn.Linear(WIDTH, 256), nn.GELU(), nn.Linear(256, WIDTH), nn.LayerNorm(WIDTH))
    ]
    return nn.Sequential(nn.Linear(64, WIDTH), *parts)


def graphs_and_gradients(*, is_grouped: bool) -> tuple[list[fx.Graph], list[Tensor]]:
    """Forward and backward graph of a packed step under autocast, and its gradients; casts are grouped as on a GPU, if asked for."""
    found, model = list[fx.Graph](), network()

    def inner(gm: fx.GraphModule, inputs: Any, **_: Any) -> Any:
        found.append(gm.graph)
        return make_boxed_func(gm.forward)

    def group(*modules: fx.GraphModule) -> None:
        for module in modules if is_grouped else ():
            group_casts_of(module.graph)
            module.graph.lint()
            module.recompile()

    replaced = patch.object(graph_packing, "compile_fx_inner", inner), patch.object(graph_packing, "group_casts", group)
    with (
        replaced[0],
        replaced[1],
        pare.apply(pare.Plan.preset("activations8"), model) as session,
        torch.autocast("cpu", torch.bfloat16),
    ):
        session.compile()(torch.randn(64, 64, generator=torch.Generator().manual_seed(1))).float().square().mean().backward()
    return found, [p.grad for p in model.parameters() if p.grad is not None]


def num_casts(graph: fx.Graph) -> tuple[int, int]:
    """The number of casts of 2-D tensors that are kernels of their own, and of calls for several casts."""
    ends = ("placeholder", "output")
    alone = [
        node for node in graph.find_nodes(op="call_function", target=CAST)
        if node.meta["val"].dim() == 2 and (node.all_input_nodes[0].op in ends or all(user.op in ends for user in node.users))
    ]  # fmt: skip
    return len(alone), len(graph.find_nodes(op="call_function", target=CAST_ALL))


def test_casts_of_weights_and_gradients_are_few_calls_with_equal_values() -> None:
    """Nine weights: one call in forward, one for the weights and one for the gradients in backward; gradients have the same bits."""
    (plain_forward, plain_backward), expected = graphs_and_gradients(is_grouped=False)
    (forward, backward), found = graphs_and_gradients(is_grouped=True)
    num_weights = 2 * NUM_LAYERS + 1
    assert num_casts(forward)[1] == 1 and num_casts(backward)[1] == 2
    assert num_casts(plain_forward)[0] - num_casts(forward)[0] == num_weights + 1  # and the input
    assert num_casts(plain_backward)[0] - num_casts(backward)[0] == 2 * num_weights - 1  # no gradient of the input
    for a, b in zip(found, expected, strict=True):
        assert_same_bits(a, b)


def test_groups_are_whole_layers_within_the_bytes_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal layers get equal groups, since each kind of group is a kernel to compile."""
    monkeypatch.setattr(grouped_casts, "MAX_GROUP_BYTES", 2 * 2 * (256 * WIDTH + 256 * WIDTH + 256 + WIDTH) + 100)
    (forward, _), _ = graphs_and_gradients(is_grouped=True)
    shapes = [
        tuple(tuple(value.shape) for value in call.meta["val"]) for call in forward.find_nodes(op="call_function", target=CAST_ALL)
    ]
    layer = ((256, WIDTH), (256,), (WIDTH, 256), (WIDTH,))
    assert [sorted(shape) for shape in shapes][-2:] == [sorted(2 * layer)] * 2 and shapes[-2] == shapes[-1]


def test_casts_on_different_devices_are_different_calls() -> None:
    graph, devices = fx.Graph(), ("cpu", "meta", "cpu", "meta")
    for number, device in enumerate(devices):
        weight, x = graph.placeholder(f"w{number}"), graph.placeholder(f"x{number}")
        weight.meta["val"], x.meta["val"] = torch.empty(8, 8, device=device), torch.empty(8, 8, dtype=torch.bfloat16, device=device)
        cast = graph.call_function(CAST, (weight, torch.bfloat16))
        product = graph.call_function(torch.ops.aten.mm.default, (x, cast))
        cast.meta["val"] = product.meta["val"] = x.meta["val"]
    graph.output(tuple(node for node in graph.nodes if node.target is torch.ops.aten.mm.default))
    group_casts_of(graph)
    calls = graph.find_nodes(op="call_function", target=CAST_ALL)
    assert [{value.device.type for value in call.meta["val"]} for call in calls] == [{"cpu"}, {"meta"}]


def test_a_gpu_casts_many_tensors_in_one_kernel() -> None:
    """Inductor makes one kernel of operations that it has in one list; each keeps the strides of its tensor."""

    lists: list[list[str]] = []

    def codegen(self: GraphLowering) -> Any:
        lists.extend(self.lists.values())
        raise NotImplementedError("lowered")

    def run(x: Tensor, y: Tensor) -> list[Tensor]:
        return torch.ops.paredown.cast_all([x, y], torch.bfloat16)

    x, y = torch.randn(8, 16), torch.randn(2, 3, 4, 4).contiguous(memory_format=torch.channels_last)
    for one, other in zip(torch.compile(run, fullgraph=True)(x, y), (x, y), strict=True):
        assert_same_bits(one, other.bfloat16())
        assert one.stride() == other.stride()
    torch.compiler.reset()
    has = patch.object(GraphLowering, "has_feature", lambda *_: True)
    lowered = patch.object(GraphLowering, "codegen", codegen), inductor_config.patch(fx_graph_cache=False)
    with has, lowered[0], lowered[1], pytest.raises(Exception, match="lowered"):
        torch.compile(run, fullgraph=True)(x, y)
    assert [len(names) for names in lists] == [2]
