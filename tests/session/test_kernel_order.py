"""The order of the kernels of a backward graph, and of the gradients of a convolution."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config
from torch import Tensor, fx, nn
from torch._inductor import memory
from torch.fx.experimental.proxy_tensor import make_fx

import paredown as pare
from paredown.session.compiled import kernel_order
from paredown.session.compiled.kernel_order import CONVOLUTION_BACKWARD, ByLastOperation, by_last_operation, split_convolutions
from tests.support.compare import assert_same_bits


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
    # a graph from a cache is not scheduled
    with inductor_config.patch(fx_graph_cache=False), functorch_config.patch(enable_autograd_cache=False):
        with pare.apply(pare.Plan.uniform(activation="int8/64@bf16"), net) as session:
            session.compile()(x).square().sum().backward()
        assert compared == []
        torch.compiler.reset()
        torch.compile(net)(x).square().sum().backward()
    assert compared == [False, True]


# --- gradients of convolutions ----------------------------------------------------------------------------------------

Case = tuple[tuple[int, ...], tuple[int, ...], bool, int]  # sizes of input and weight, is it transposed, groups
CASES: dict[str, Case] = {
    "pictures": ((2, 4, 8, 8), (6, 4, 3, 3), False, 1),
    "volumes": ((2, 4, 8, 8, 8), (6, 4, 3, 3, 3), False, 1),
    "signals": ((2, 4, 32), (6, 4, 3), False, 1),
    "enlarged": ((2, 4, 4, 4, 4), (4, 6, 3, 3, 3), True, 1),
    "groups": ((2, 4, 8, 8), (6, 2, 3, 3), False, 2),
    "depthwise": ((2, 4, 8, 8), (4, 1, 3, 3), False, 4),
}


def backward_of(case: Case, mask: tuple[bool, bool, bool] = (True, True, True)) -> tuple[fx.GraphModule, list[Tensor]]:
    """A graph of one convolution's backward, whose input is computed in the graph, with its inputs."""
    size, weight_size, is_transposed, groups = case
    x, weight = torch.randn(size), torch.randn(weight_size)
    num = len(size) - 2
    options = ([1] * num, [1] * num, [1] * num, is_transposed, [0] * num, groups)
    gradient = torch.randn_like(torch.ops.aten.convolution(x, weight, None, *options))
    bias = [weight.shape[0] if not is_transposed else weight.shape[1] * groups]

    def function(gradient: Tensor, codes: Tensor, weight: Tensor) -> list[Tensor]:
        found = CONVOLUTION_BACKWARD(gradient, codes * 2, weight, bias, *options, list(mask))
        return [part * 3 for part in found if part is not None]

    given = [gradient, x, weight]
    return make_fx(function)(*given), given


def calls(graph: fx.Graph) -> list[list[bool]]:
    return [node.args[10] for node in graph.find_nodes(op="call_function", target=CONVOLUTION_BACKWARD)]  # type: ignore[misc]


@pytest.fixture
def _splits_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_order, "MIN_SPLIT", 1)


@pytest.mark.usefixtures("_splits_all")
@pytest.mark.parametrize("name", [name for name in CASES if name != "depthwise"])
def test_the_gradient_of_the_weight_is_computed_first(name: str) -> None:
    """The same bits, and the operation for the input's gradient reads nothing that the input is computed from."""
    module, given = backward_of(CASES[name])
    expected = module(*given)
    split_convolutions(module.graph, keeps_layout=True)
    module.graph.lint()
    module.recompile()
    for part, other in zip(module(*given), expected, strict=True):
        assert_same_bits(part, other)
    assert calls(module.graph) == [[False, True, True], [True, False, False]]
    second = module.graph.find_nodes(op="call_function", target=CONVOLUTION_BACKWARD)[1]
    assert "mul" not in [node.name for node in second.all_input_nodes], "the product is the input of the convolution"
    assert not second.args[1].meta["val"].is_contiguous() and second.args[1].meta["val"].shape == given[1].shape


@pytest.mark.usefixtures("_splits_all")
@pytest.mark.parametrize(
    ("name", "mask", "keeps"),
    [("depthwise", (True, True, False), True), ("pictures", (False, True, True), True), ("pictures", (True, True, True), False)],
)
def test_convolutions_that_stay_one_operation(name: str, mask: tuple[bool, bool, bool], keeps: bool) -> None:
    """torch's own kernels, one gradient alone, and pictures that Inductor makes channels_last."""
    module, _ = backward_of(CASES[name], mask)
    split_convolutions(module.graph, keeps_layout=keeps)
    assert calls(module.graph) == [list(mask)]


def test_small_convolutions_stay_one_operation() -> None:
    module, _ = backward_of(CASES["volumes"])
    split_convolutions(module.graph, keeps_layout=True)
    assert calls(module.graph) == [[True, True, True]]


@pytest.mark.gpu
def test_a_gpu_computes_the_gradients_alone_as_together() -> None:
    """In bf16, within a rounding; a view without memory stands for the input of the second."""
    x, weight = torch.randn(2, 32, 64, 64, 64), torch.randn(32, 32, 3, 3, 3)
    x, weight = (t.to("cuda", torch.bfloat16) for t in (x, weight))
    gradient = torch.randn_like(x)
    options = ([0], [1] * 3, [1] * 3, [1] * 3, False, [0] * 3, 1)
    together = CONVOLUTION_BACKWARD(gradient, x, weight, *options, [True, True, False])
    of_weight = CONVOLUTION_BACKWARD(gradient, x, weight, *options, [False, True, False])[1]
    stand_in = of_weight.as_strided(x.shape, [0] * 5)
    of_input = CONVOLUTION_BACKWARD(gradient, stand_in, weight, *options, [True, False, False])[0]
    torch.testing.assert_close((of_input, of_weight), together[:2], rtol=1 / 64, atol=1 / 64)
    assert of_input.stride() == together[0].stride()
