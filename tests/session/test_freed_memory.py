"""Memory that packing frees: in-place activations after norms and linear layers; a row of `changes` where the original stays alive."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from paredown import Plan, Role, apply, footprint, trace_step
from paredown.session.changes import HIDDEN
from paredown.session.eager.slot_decisions import IN_PLACE, NOT_FREED
from tests.session.nets import INT4, INT8, Net, activations, assert_exact, assert_same, error_of, rows, step

NORMS: dict[str, Callable[[], nn.Module]] = {
    "instance": lambda: nn.InstanceNorm3d(4, affine=True),
    "instance without parameters": lambda: nn.InstanceNorm3d(4),
    "batch": lambda: nn.BatchNorm3d(4),
    "group": lambda: nn.GroupNorm(2, 4),
    "layer": lambda: nn.LayerNorm([8, 16, 16]),
}
IN_PLACES: dict[str, Callable[[], nn.Module]] = {
    "leaky_relu": lambda: nn.LeakyReLU(inplace=True),
    "relu": lambda: nn.ReLU(inplace=True),
    "relu6": lambda: nn.ReLU6(inplace=True),
    "silu": lambda: nn.SiLU(inplace=True),
    "elu": lambda: nn.ELU(inplace=True),
    "mish": lambda: nn.Mish(inplace=True),
    "hardswish": lambda: nn.Hardswish(inplace=True),
    "dropout": lambda: nn.Dropout(0.2, inplace=True),
}


class Allocations(TorchDispatchMode):
    """Weak references to the storages of all tensors that operations return in this context, except those of `before`."""

    def __init__(self, before: Iterable[Tensor]) -> None:
        super().__init__()
        self.before = {tensor.untyped_storage()._cdata for tensor in before}
        self.storages: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self.before:
                    self.storages[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        return result

    def alive_bytes(self) -> int:
        """Bytes of those that are not freed."""
        return sum(nbytes for reference, nbytes in self.storages.values() if not reference.expired())


def volumes() -> Tensor:
    return torch.randn(1, 1, 8, 16, 16, generator=torch.Generator().manual_seed(1))


def convolutions(norm: Callable[[], nn.Module], activation: Callable[[], nn.Module]) -> nn.Sequential:
    """Two blocks of convolution, norm and activation, and a last convolution; 8192 values (32 KiB) in each activation."""
    torch.manual_seed(0)
    channels = (1, 4, 4)
    blocks = [(nn.Conv3d(a, b, 3, padding=1), norm(), activation()) for a, b in pairwise(channels)]
    return nn.Sequential(*(layer for block in blocks for layer in block), nn.Conv3d(4, 1, 1))


def alive_after_forward(net: nn.Module, x: Tensor) -> tuple[int, Tensor]:
    with Allocations([x, *net.parameters(), *net.buffers()]) as allocations:
        output = net(x)
    return allocations.alive_bytes(), output


def linear_layers(activation: Callable[[], nn.Module]) -> nn.Sequential:
    """Linear layers, whose outputs of three dimensions are views, and in-place activations."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), activation(), nn.Linear(64, 64), activation(), nn.Linear(64, 1))


@pytest.mark.parametrize("activation", IN_PLACES)
@pytest.mark.parametrize("has_norms", [True, False])
def test_predictions_know_that_sessions_pack_what_in_place_activations_save(activation: str, has_norms: bool) -> None:
    make = IN_PLACES[activation]
    net = convolutions(NORMS["instance"], make) if has_norms else linear_layers(make)
    x = volumes() if has_norms else rows(1024).view(8, 512, 16)
    trace = trace_step(net, (x, x[:1]), loss=lambda output, target: output.sum(), device="cpu")
    for plan in (activations(INT4), Plan()):
        session = apply(plan, net)
        num_bytes, output = alive_after_forward(net, x)
        session.close()
        predicted = footprint(trace, plan).by_role[Role.ACTIVATION]
        assert predicted == pytest.approx(num_bytes - output.nbytes, rel=0.05), plan


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("activation", IN_PLACES)
def test_in_place_activations_after_norms_are_freed(norm: str, activation: str) -> None:
    net = convolutions(NORMS[norm], IN_PLACES[activation])
    session = apply(activations(INT4), net)
    num_bytes, output = alive_after_forward(net, volumes())
    assert num_bytes <= session.stored_bytes + output.nbytes + 1024  # 1024: statistics of norms; an activation has 32768
    assert {change.reason for change in session.changes}.isdisjoint((IN_PLACE, NOT_FREED, HIDDEN))


@pytest.mark.parametrize("activation", IN_PLACES)
def test_in_place_activations_after_instance_norms_are_exact(activation: str) -> None:
    assert_exact(convolutions(NORMS["instance"], IN_PLACES[activation]), volumes())
    net = convolutions(NORMS["instance"], IN_PLACES[activation])
    assert error_of(net, volumes()) < 0.03


@pytest.mark.parametrize("activation", IN_PLACES)
def test_in_place_activations_after_linear_layers_of_sequences(activation: str) -> None:
    """`Linear` returns a view for inputs of three dimensions."""
    net = nn.Sequential(nn.Linear(64, 64), IN_PLACES[activation](), nn.Linear(64, 64), IN_PLACES[activation](), nn.Linear(64, 8))
    x = rows().view(2, 64, 64)
    assert_exact(net, x)
    session = apply(activations(INT4), net)
    num_bytes, output = alive_after_forward(net, x)
    assert num_bytes <= session.stored_bytes + output.nbytes + 1024
    assert {change.reason for change in session.changes}.isdisjoint((IN_PLACE, NOT_FREED, HIDDEN))


def reasons(session: Any) -> dict[str, str]:
    return {change.slot: change.reason for change in session.changes if change.reason in (IN_PLACE, NOT_FREED, HIDDEN)}


def test_an_in_place_operation_on_another_view_is_a_row() -> None:
    """The model may still use the tensor behind `Flatten`, so its output remains a view: the rows name module, cause and remedy."""
    net = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Flatten(), nn.LeakyReLU(inplace=True), nn.Linear(64 * 64, 8))
    x = rows().view(2, 64, 64)
    session = apply(activations(INT4), net)
    num_bytes, output = alive_after_forward(net, x)
    assert num_bytes > session.stored_bytes + output.nbytes + 30_000  # the original, 32768 bytes
    assert reasons(session) == {"3:in_place": HIDDEN, "4:input": IN_PLACE}
    assert session.explain().of("4:input").now == f"{INT4} beside the original"
    assert "inplace=False" in HIDDEN
    assert "inplace=False" in IN_PLACE
    session.close()
    net[3].inplace = False
    again = apply(activations(INT4), net)
    num_bytes, output = alive_after_forward(net, x)
    assert num_bytes <= again.stored_bytes + output.nbytes + 1024
    assert reasons(again) == {}


def test_a_saved_copy_that_an_in_place_operation_hides_is_a_row() -> None:
    """In-place SiLU saves a copy of its input: no packed slot has its memory."""
    net = Net(lambda net, x: net.b(functional.silu(net.a(x).view(2, 64, 64), inplace=True)))
    session = apply(activations(INT8), net)
    net(rows())
    assert reasons(session) == {":in_place": HIDDEN}


def test_memory_that_the_model_still_refers_to_is_a_row() -> None:
    """A detached view outlives the forward pass: the saved tensor object is gone, and its memory is not."""

    def forward(net: Any, x: Tensor) -> Tensor:
        hidden = functional.gelu(net.a(x))
        net.last = hidden.detach()[0] if net.holds else None
        return net.b(hidden).sin() + 1

    net = Net(forward)
    net.holds = True
    session = apply(activations(INT8), net)
    net(rows())
    assert reasons(session) == {"b:input": NOT_FREED}
    net.holds = False
    net(rows())
    assert reasons(session) == {}


def test_outputs_that_a_hook_of_the_user_holds_keep_their_history() -> None:
    """A hook holds the norm's output, which the activation modifies in place; the loss uses it."""
    held: list[Tensor] = []

    def loss(y: Tensor) -> Tensor:
        return y.square().mean() + held[-1].sin().sum()

    def gradients(net: nn.Module) -> list[Tensor]:
        net[1].register_forward_hook(lambda module, args, output: held.append(output))
        session = apply(activations("fp32"), net) if net is other else None
        found = step(net, volumes(), loss=loss)
        assert session is None or session.forwards == 1
        return found

    net = convolutions(NORMS["instance"], IN_PLACES["leaky_relu"])
    other = copy.deepcopy(net)
    assert_same(gradients(other), gradients(net))


def test_the_session_restores_the_view() -> None:
    net = convolutions(NORMS["instance"], IN_PLACES["relu"])
    assert net[1](volumes().expand(1, 4, 8, 16, 16))._is_view()
    session = apply(activations(INT8), net)
    assert not net[1](volumes().expand(1, 4, 8, 16, 16))._is_view()
    session.close()
    assert net[1](volumes().expand(1, 4, 8, 16, 16))._is_view()


@pytest.mark.parametrize("packed", ["a", "b"])
def test_two_savers_of_one_tensor_of_which_the_plan_names_one(packed: str) -> None:
    """Where it names the first one, both store the packed tensor, in later passes too; where the second one, the original stays."""
    seen: list[StorageWeakRef] = []

    def forward(net: Any, x: Tensor) -> Tensor:
        x = x.sin()
        seen.append(StorageWeakRef(x.untyped_storage()))
        return net.a(x) + net.b(x)

    net, x = Net(forward), rows(128).requires_grad_()
    session = apply(Plan().set(f"activation={packed}:input", INT8), net)
    for _ in range(4):
        loss = net(x).square().mean()
        assert seen[-1].expired() == (packed == "a")
        assert (session.stored_bytes > 0) == (packed == "a")
        loss.backward()
