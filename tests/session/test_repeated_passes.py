"""Passes that repeat an earlier one, and passes that differ from it: the gradients and stored bytes of a session that has seen no other.

Parts of autograd's graph that the last pass read are read again without a search (autograd/graph_parts.py).
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import copy
import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from paredown import Plan, apply
from paredown.session.eager.recomputed_values import RecomputedValues
from paredown.session.session import Session

INT8 = "int8/64@bf16"
ALL = Plan.uniform(activation=INT8)
ONE = Plan().set("activation=body.1.first:input", INT8)


class Layer(nn.Module):
    """A residual layer whose ReLU is called twice, with operations between the calls of modules."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.first, self.second = nn.LayerNorm(width), nn.Linear(width, width), nn.Linear(width, width)
        self.relu, self.other = nn.ReLU(), nn.Linear(width, width)
        self.num_relus, self.takes_other, self.operation = 2, False, "mul"

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(self.norm(x))
        for _ in range(self.num_relus):
            h = self.relu(h)
        h = self.other(h) if self.takes_other else self.second(h)
        gate = torch.sigmoid(h)
        return x + (h * gate if self.operation == "mul" else torch.maximum(h, gate))


class Net(nn.Module):
    """Layers between two linear ones; `checkpoints`: None, or `use_reentrant` of a checkpoint around the second layer."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.head, self.body, self.tail = nn.Linear(16, width), nn.ModuleList(Layer(width) for _ in range(3)), nn.Linear(width, 4)
        self.checkpoints: bool | None = None
        self.fails = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.head(x)
        for index, layer in enumerate(self.body):
            is_held = index == 1 and self.checkpoints is not None
            x = checkpoint(layer, x, use_reentrant=self.checkpoints) if is_held else layer(x)
            if self.fails:
                raise ValueError("the forward pass fails")
        return self.tail(x)


Change = Callable[[Net], object]


def batch(number: int = 0, num_rows: int = 256) -> Tensor:
    return torch.randn(num_rows, 16, generator=torch.Generator().manual_seed(number))


def step(net: nn.Module, session: Session, number: int, num_rows: int = 256) -> tuple[int, list[Tensor]]:
    """Stored bytes and gradients of one step."""
    loss = net(batch(number, num_rows)).square().mean()
    stored = session.stored_bytes
    loss.backward()
    gradients = [p.grad for p in net.parameters() if p.grad is not None]
    net.zero_grad(set_to_none=True)
    return stored, gradients


def new_net(make: Callable[[], nn.Module] = Net) -> nn.Module:
    torch.manual_seed(0)
    return make()


def first_step(plan: Plan, change: Change, number: int, num_rows: int = 256) -> tuple[int, list[Tensor]]:
    """The step of a new session, which has no earlier pass to repeat."""
    net = new_net()
    change(net)
    with apply(plan, net) as session:
        return step(net, session, number, num_rows)


def assert_same(mine: tuple[int, list[Tensor]], expected: tuple[int, list[Tensor]]) -> None:
    assert mine[0] == expected[0]
    assert all(torch.equal(x, y) for x, y in zip(mine[1], expected[1], strict=True))


def set_all(**values: object) -> Change:
    def change(net: Net) -> None:
        for layer in net.body:
            for name, value in values.items():
                setattr(layer, name, value)

    return change


def set_middle(**values: object) -> Change:
    return lambda net: [setattr(net.body[1], name, value) for name, value in values.items()]


DIFFERENT: dict[str, Change] = {
    "a module that was never called": set_middle(takes_other=True),
    "in all layers": set_all(takes_other=True),
    "one call less": set_middle(num_relus=1),
    "one call more": set_middle(num_relus=3),
    "another operation": set_middle(operation="maximum"),
    "checkpoint": lambda net: setattr(net, "checkpoints", False),
    "reentrant checkpoint": lambda net: setattr(net, "checkpoints", True),
    "eval of a part": lambda net: net.body[1].eval(),
    "frozen": lambda net: net.body[0].requires_grad_(requires_grad=False),
}


@pytest.mark.parametrize("plan", [ALL, ONE], ids=["all", "one"])
@pytest.mark.parametrize("what", DIFFERENT)
def test_a_pass_that_differs_has_the_bits_of_a_new_session(what: str, plan: Plan) -> None:
    net = new_net()
    with apply(plan, net) as session:
        for number in range(6):
            stored = step(net, session, number)[0]
        assert stored > 0
        DIFFERENT[what](net)
        if "checkpoint" in what:
            step(net, session, 6)  # names the tensors inside of the checkpoint
        for number in (7, 8):
            mine = step(net, session, number)
            assert all(torch.equal(x, y) for x, y in zip(mine[1], first_step(plan, DIFFERENT[what], number)[1], strict=True))


def test_passes_with_other_sizes_have_the_bits_of_a_new_session() -> None:
    net = new_net()
    with apply(ALL, net) as session:
        for number, rows in enumerate((256, 256, 256, 192, 256, 192, 192, 320)):
            assert_same(step(net, session, number, rows), first_step(ALL, lambda net: None, number, rows))


def test_another_plan_has_the_bits_of_a_new_session() -> None:
    net = new_net()
    with apply(ONE, net) as session:
        for number in range(6):
            step(net, session, number)
        session._change(ALL)
        for number in (6, 7):
            assert_same(step(net, session, number), first_step(ALL, lambda net: None, number))


def void(value: object) -> None:
    """None, for a hook that does not replace an output."""


def test_backward_raises_where_a_saved_tensor_was_modified_in_place() -> None:
    net = Net()
    with apply(ONE, net):
        for _ in range(6):
            net(batch()).sum().backward()
        handle = net.get_submodule("body.0.first").register_forward_hook(lambda module, args, output: void(args[0].add_(1)))
        loss = net(batch()).sum()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        handle.remove()
        net(batch()).sum().backward()


def test_graphs_that_are_retained_give_the_same_gradients_again() -> None:
    net = Net()
    with apply(ALL, net):
        for _ in range(6):
            net(batch()).sum().backward()
        losses = [net(batch(number)).square().mean() for number in range(3)]  # three graphs at a time
        parameters = list(net.get_submodule("body.1.norm").parameters())
        first = [torch.autograd.grad(loss, parameters, retain_graph=True) for loss in losses]
        again = [torch.autograd.grad(loss, parameters) for loss in losses]
    assert all(torch.equal(x, y) for a, b in zip(first, again, strict=True) for x, y in zip(a, b, strict=True))


def test_a_pass_that_raises_is_forgotten() -> None:
    net = Net()
    with apply(ALL, net) as session:
        for _ in range(6):
            net(batch()).sum().backward()
        net.fails = True
        with pytest.raises(ValueError, match="fails"):
            net(batch())
        net.fails = False
        loss = net(batch()).sum()
        stored = session.stored_bytes
        loss.backward()
        assert stored > 60_000


def test_threads_repeat_passes_independently() -> None:
    torch.manual_seed(0)
    net, found = Net(), dict[int, list[Tensor]]()
    parameters = list(net.get_submodule("body.1.norm").parameters())

    def work(number: int) -> None:
        for _ in range(8):
            loss = net(batch(number, 256 if number % 2 else 320)).square().mean()
            found[number] = list(torch.autograd.grad(loss, parameters))

    with apply(Plan.uniform(activation="fp32"), net):
        for _ in range(6):
            net(batch()).sum().backward()
        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for number in range(4):
        loss = net(batch(number, 256 if number % 2 else 320)).square().mean()
        for mine, theirs in zip(found[number], torch.autograd.grad(loss, parameters), strict=True):
            torch.testing.assert_close(mine, theirs)


def test_closing_and_copies_leave_no_hooks() -> None:
    net = Net()
    session = apply(ALL, net)
    for _ in range(6):
        net(batch()).sum().backward()
    twin = copy.deepcopy(net)
    twin(batch()).sum().backward()
    session.close()
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in net.modules())


class Shared(nn.Module):
    """The input of a norm, from which the input of the next layer is recomputed, is saved by logsumexp too, unmodified."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(16, 32), nn.LayerNorm(32), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        return self.second(self.norm(h)) + h.logsumexp(-1, keepdim=True)


def test_a_tensor_that_stays_unmodified_is_still_the_source_of_another() -> None:
    net = new_net(Shared)
    with apply(ALL, net) as session:
        for number in range(8):
            loss = net(batch(number)).square().mean()
            assert any(isinstance(form, RecomputedValues) for form in session._activations.stored_forms()), number
            loss.backward()
