"""Encoded tensors lie in memory as Inductor lays them out: no encode has a copy of its own, nor runs before a convolution that copies."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, fx, nn
from torch._dynamo.utils import detect_fake_mode
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._inductor.compile_fx import record_original_output_strides, view_to_reshape
from torch._inductor.graph import GraphLowering
from torch._inductor.virtualized import V

import paredown as pare
from paredown.session.compiled import graph_packing
from paredown.session.compiled.memory_orders import MemoryOrders
from tests.session.nets import gradients, relative_error

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # torch's own
PLAN = pare.Plan.preset("activations8")


class Patches(nn.Module):
    """A residual stream that begins with transposed patches, as in a vision transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.places = nn.Conv2d(3, 64, 4, 4), nn.Parameter(torch.randn(1, 64, 64))
        self.norms = nn.ModuleList(nn.LayerNorm(64) for _ in range(2))
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2) + self.places
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = x + torch.tanh(layer(norm(x)))
        return x.square().mean()


class Sound(nn.Module):
    """Transposed frames and a position for each, as in a speech model."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.places, self.norm = nn.Conv1d(8, 64, 3, padding=1), nn.Parameter(torch.randn(64, 64)), nn.LayerNorm(64)
        self.layer = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.nn.functional.gelu(self.conv(x)).permute(0, 2, 1) + self.places
        return (x + torch.sigmoid(self.layer(self.norm(x)))).square().mean()


def convolutions() -> nn.Module:
    """Convolutions of a contiguous picture, which Inductor computes in channels_last."""
    parts = [nn.Conv2d(3, 64, 3), nn.BatchNorm2d(64), nn.SiLU(), nn.Conv2d(64, 64, 3), nn.BatchNorm2d(64), nn.SiLU()]
    return nn.Sequential(*parts, nn.Conv2d(64, 64, 3), nn.Flatten(), nn.Linear(6400, 1))


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "patches": (Patches, (2, 3, 32, 32)),
    "sound": (Sound, (2, 8, 64)),
    "convolutions": (convolutions, (2, 3, 16, 16)),
}


def encoded_alone(model: nn.Module, x: Tensor) -> tuple[list[str], int]:
    """The encoded buffers that no other operation of the compiled forward graph reads, and the number of all encoded ones."""
    found: tuple[list[str], int] = [], 0

    def inner(gm: fx.GraphModule, inputs: Any, **options: Any) -> Any:
        nonlocal found
        if not options.get("is_backward"):
            view_to_reshape(gm)
            record_original_output_strides(gm)
            graph = GraphLowering(gm, example_inputs=inputs)
            with V.set_fake_mode(detect_fake_mode(inputs)), V.set_graph_handler(graph), V.set_extern_kernel_nodes([]):
                graph.run(*inputs)
            encodes = [op for op in graph.operations if type(op).__name__ == "KernelCall"]
            others = {name for op in graph.operations if op not in encodes for name in op.get_read_names()}
            others |= set(graph.graph_inputs) | set(graph.get_output_names())
            sources = [op.inputs[0].get_name() for op in encodes]
            found = [name for name in sources if name not in others], len(encodes)
        return make_boxed_func(gm.forward)

    torch.compiler.reset()
    with patch.object(graph_packing, "compile_fx_inner", inner), pare.apply(PLAN, model) as session:
        session.compile()(x)
    torch.compiler.reset()
    return found


@pytest.mark.parametrize("name", NETWORKS)
def test_no_encode_has_a_copy_of_its_own(name: str) -> None:
    make, shape = NETWORKS[name]
    alone, count = encoded_alone(make(), torch.randn(shape))
    assert count >= 2 and not alone


def test_the_strides_of_eager_mode_would_cost_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MemoryOrders, "_find", lambda self, node: None)
    copied = {name for name, (make, shape) in NETWORKS.items() if encoded_alone(make(), torch.randn(shape))[0]}
    assert copied == {"patches", "convolutions"}


def volumes(activation: nn.Module) -> nn.Module:
    """Convolutions of volumes with instance norms, whose outputs are views that the activation function changes in place."""
    parts = [nn.Conv3d(2, 8, 3, padding=1), nn.InstanceNorm3d(8, affine=True), activation, nn.Conv3d(8, 8, 3, padding=1)]
    return nn.Sequential(*parts, nn.InstanceNorm3d(8, affine=True))


def packed_step(model: nn.Module, x: Tensor) -> tuple[list[Tensor], list[str], list[fx.Graph]]:
    """Gradients of a compiled step in 8 bits, the slots that stay unmodified, and forward graphs, which run without kernels."""
    forward = list[fx.Graph]()

    def inner(gm: fx.GraphModule, inputs: Any, **options: Any) -> Any:
        forward.extend([] if options.get("is_backward") else [gm.graph])
        return make_boxed_func(gm.forward)

    torch.compiler.reset()
    with patch.object(graph_packing, "compile_fx_inner", inner), pare.apply(PLAN, model) as session:
        with torch.autocast("cpu", torch.bfloat16):
            output = session.compile()(x)
        (output * torch.linspace(-1, 1, output.numel()).view_as(output)).sum().backward()
        unmodified = [change.slot for change in session.changes if change.given == "unmodified"]
    torch.compiler.reset()
    return gradients(model), unmodified, forward


@pytest.mark.parametrize("make", [nn.LeakyReLU, nn.ReLU, nn.SiLU])
def test_what_is_modified_in_place_on_a_view_is_packed(make: Callable[..., nn.Module]) -> None:
    """Autograd runs the backward of such an operation inside of a node of its own, of another number than forward's operation."""
    torch.manual_seed(0)
    model, x = volumes(make(inplace=True)), torch.randn(2, 2, 16, 16, 16)
    other = copy.deepcopy(model)
    with torch.autocast("cpu", torch.bfloat16):
        output = other(x)
    (output * torch.linspace(-1, 1, output.numel()).view_as(output)).sum().backward()
    found, unmodified, _ = packed_step(model, x)
    assert not unmodified
    pairs = list(zip(found, gradients(other), strict=True))
    names = [name for name, _ in model.named_parameters()]
    pairs = [pair for name, pair in zip(names, pairs, strict=True) if name not in ("0.bias", "3.bias")]  # their gradients are zero
    assert relative_error(*zip(*pairs, strict=True)) < 0.03


def test_encodes_of_volumes_follow_the_convolutions_that_read_them() -> None:
    """Libraries copy operands that are not channels_last, beside which the codes would be in memory."""
    (graph,) = packed_step(volumes(nn.LeakyReLU(0.01, inplace=True)), torch.randn(2, 2, 16, 16, 16))[2]
    order = {node: place for place, node in enumerate(graph.nodes)}
    encodes = graph.find_nodes(op="call_function", target=torch.ops.paredown.encode.default)
    read = [(encode, user) for encode in encodes for user in encode.args[0].users if "convolution" in user.name]
    assert read and all(order[encode] > order[user] for encode, user in read)
