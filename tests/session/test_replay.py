"""Passes that repeat an earlier one (autograd/repeated_passes.py): the same gradients and bytes as passes that are followed in full.

Where a pass differs, tensors that were not reported yet stay unmodified in it, and the next passes are followed in full again.
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import copy
import gc
import threading
from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from paredown import Plan, apply
from paredown.autograd import repeated_passes as replay
from paredown.autograd.hooks import Hook, HookPlace
from paredown.optim import AdamW
from paredown.session.eager.recomputed_values import RecomputedValues
from paredown.session.session import Session
from paredown.session.weights.saved_weights import PackedModule

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


def taken_out(session: Session) -> int:
    return len(session._watch.replays._taken_out)


def applied(plan: Plan, make: Callable[[], nn.Module], *, replays: bool) -> tuple[nn.Module, Session]:
    """A new model and its session, in which all passes are followed in full without `replays`."""
    torch.manual_seed(0)
    session = apply(plan, net := make())
    assert isinstance(session, Session)
    if not replays:
        session._activations.replay_key = lambda: None
    return net, session


def steps(
    plan: Plan, changes: Mapping[int, Change] | None = None, *, replays: bool, rows: Mapping[int, int] | None = None, num: int = 12
) -> tuple[list[list[Tensor]], list[int], list[int]]:
    """Gradients, stored bytes and hooks that are taken out, of each step; `changes` and `rows` from a step on."""
    found, stored, out, num_rows = list[list[Tensor]](), list[int](), list[int](), 256
    net, session = applied(plan, Net, replays=replays)
    with session:
        for number in range(num):
            (changes or {}).get(number, lambda net: None)(net)
            num_rows = (rows or {}).get(number, num_rows)
            loss = net(batch(number, num_rows)).square().mean()
            stored.append(session.stored_bytes)
            loss.backward()
            found.append([p.grad for p in net.parameters() if p.grad is not None])
            net.zero_grad(set_to_none=True)
            out.append(taken_out(session))
    return found, stored, out


def assert_same(mine: list[list[Tensor]], theirs: list[list[Tensor]], but: int | None = None) -> None:
    """The same gradients to the bit; of the step `but`, close ones."""
    for number, (a, b) in enumerate(zip(mine, theirs, strict=True)):
        for x, y in zip(a, b, strict=True):
            assert torch.equal(x, y) if number != but else (x - y).norm() <= 0.05 * y.norm(), number


@pytest.mark.parametrize("plan", [ALL, ONE, Plan().set("activation=body.*", INT8)])
def test_replayed_passes_have_the_gradients_and_bytes_of_passes_followed_in_full(plan: Plan) -> None:
    mine, theirs = steps(plan, replays=True), steps(plan, replays=False)
    assert mine[2][-1] > 0 and theirs[2][-1] == 0
    assert_same(mine[0], theirs[0])
    assert mine[1] == theirs[1]
    if plan is ONE:
        kept = 5  # head, tail and the blocks: code around the model may call them, and they keep both hooks
        assert mine[2][-1] == 2 * (17 - kept) - 4, (
            "of the other modules that are called, the packed one is followed, and three masks"
        )


@pytest.mark.parametrize("plan", [ALL, ONE, Plan().set("activation=body.1.second:input", None).set("activation=body.0*", INT8)])
def test_replayed_passes_have_the_changes_of_passes_followed_in_full(plan: Plan) -> None:
    found: list[tuple[str, str]] = []
    for replays in (True, False):
        net, session = applied(plan, Net, replays=replays)
        with session:
            for number in range(8):
                net(batch(number)).square().mean().backward()
            assert replays == (taken_out(session) > 0)
            found.append((str(session.changes), str(session.explain())))
    assert found[0] == found[1]


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
def test_a_pass_that_differs_is_followed_in_full_from_there_on(what: str, plan: Plan) -> None:
    def gradients(*, replays: bool) -> tuple[list[list[Tensor]], list[int], list[int]]:
        return steps(plan, {6: DIFFERENT[what]}, replays=replays, num=14)

    mine, theirs = gradients(replays=True), gradients(replays=False)
    assert mine[2][5] > 0, "no hook is taken out: the test is empty"
    assert_same(mine[0], theirs[0], but=6)
    assert [stored for number, stored in enumerate(mine[1]) if number != 6] == [
        stored for number, stored in enumerate(theirs[1]) if number != 6
    ]
    assert mine[1][6] <= theirs[1][6]


def test_a_difference_leaves_little_unmodified() -> None:
    """Layers after the one that differs are packed in the same pass."""
    unmodified, mine, theirs = [steps(plan, {6: set_middle(num_relus=1)}, replays=r)[1][6] for plan, r in
                                ((Plan(), False), (ALL, True), (ALL, False))]  # fmt: skip
    assert mine > 0.6 * theirs and unmodified == 0


def test_passes_with_other_sizes_are_followed_in_full_until_they_repeat() -> None:
    rows = {number: (256, 192)[number % 2] for number in range(6, 20)}
    mine, theirs = (steps(ALL, rows={5: 192, 6: 256, **rows}, replays=r, num=20) for r in (True, False))
    assert_same(mine[0], theirs[0])
    assert mine[1] == theirs[1]
    assert mine[2][4] > 0 and mine[2][5] == 0 and mine[2][-1] > 0


def test_another_plan_makes_another_program() -> None:
    found: list[list[Tensor]] = []
    for replays in (True, False):
        net, session = applied(ONE, Net, replays=replays)
        with session:
            for number in range(12):
                if number == 6:
                    assert taken_out(session) > 0 or not replays
                    session._change(ALL)
                loss = net(batch(number)).square().mean()
                assert (session.stored_bytes > 60_000) == (number >= 6)
                assert taken_out(session) == 0 or number not in (6, 7)
                found.append(list(torch.autograd.grad(loss, list(net.get_submodule("body.2.norm").parameters()))))
    assert_same(found[:12], found[12:])


def void(value: object) -> None:
    """None, for a hook that does not replace an output."""


def test_backward_raises_where_a_saved_tensor_was_modified_in_place() -> None:
    net = Net()
    with apply(ONE, net) as session:
        for _ in range(6):
            net(batch()).sum().backward()
        assert taken_out(session) > 0
        handle = net.get_submodule("body.0.first").register_forward_hook(lambda module, args, output: void(args[0].add_(1)))
        loss = net(batch()).sum()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        handle.remove()
        net(batch()).sum().backward()


def test_graphs_that_are_retained_give_the_same_gradients_again() -> None:
    net = Net()
    with apply(ALL, net) as session:
        for _ in range(6):
            net(batch()).sum().backward()
        assert taken_out(session) > 0
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
        assert taken_out(session) > 0 and stored > 60_000


def test_threads_replay_independently() -> None:
    torch.manual_seed(0)
    net, found = Net(), dict[int, list[Tensor]]()
    parameters = list(net.get_submodule("body.1.norm").parameters())

    def work(number: int) -> None:
        for _ in range(8):
            loss = net(batch(number, 256 if number % 2 else 320)).square().mean()
            found[number] = list(torch.autograd.grad(loss, parameters))

    with apply(Plan.uniform(activation="fp32"), net) as session:
        for _ in range(6):
            net(batch()).sum().backward()
        assert taken_out(session) > 0
        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for number in range(4):
        loss = net(batch(number, 256 if number % 2 else 320)).square().mean()
        for mine, theirs in zip(found[number], torch.autograd.grad(loss, parameters), strict=True):
            torch.testing.assert_close(mine, theirs)


def test_every_so_many_passes_one_is_followed_in_full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "RECHECK", 4)
    out = steps(ALL, replays=True, num=16)[2]
    assert {0} < set(out[5:]) and out[5:].count(0) <= 3
    assert_same(steps(ALL, replays=True)[0], steps(ALL, replays=False)[0])


def test_closing_and_copies_leave_no_hooks() -> None:
    net = Net()
    session = apply(ALL, net)
    for _ in range(6):
        net(batch()).sum().backward()
    assert taken_out(session) > 0
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
    found: list[tuple[int, Tensor]] = []
    for replays in (True, False):
        net, session = applied(ALL, Shared, replays=replays)
        with session:
            for number in range(8):
                loss = net(batch(number)).square().mean()
                forms = session._activations.stored_forms()
                assert any(isinstance(form, RecomputedValues) for form in forms), number
                found.append((session.stored_bytes, torch.autograd.grad(loss, [net.first.weight])[0]))
            assert replays == bool(session._watch.replays._programs)
    for (mine, gradient), (theirs, expected) in zip(found[:8], found[8:], strict=True):
        assert mine == theirs and torch.equal(gradient, expected)


@pytest.mark.parametrize("preset", ["lpmm", "safe"])
def test_packed_weights_are_trained_to_the_same_bits(preset: str) -> None:
    found: list[list[Tensor]] = []
    for replays in (True, False):
        net, session = applied(Plan.preset(preset).set("activation", INT8), lambda: Net(64), replays=replays)
        optimizer = AdamW(net.parameters(), lr=1e-2)
        with session:
            found.append([])
            for number in range(10):
                loss = net(batch(number)).square().mean()
                assert session.stored_bytes > 100_000
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                found[-1].append(loss.detach())
            assert session.weight_bytes > 0 and replays == (taken_out(session) > 0)
        found[-1] += [p.detach() for p in net.parameters()]
    assert all(torch.equal(x, y) for x, y in zip(*found, strict=True))


def test_a_pass_that_looks_for_the_gradient_node_of_a_weight_is_followed_in_full() -> None:
    """Finding that node creates another one, and replays count nodes: what is not reported by then stays unmodified in this pass."""
    plan, found, stored, out = ALL.set("weight", INT8), list[list[list[Tensor]]](), list[list[int]](), list[list[bool]]()
    for replays in (True, False):
        net, session = applied(plan, lambda: Net(64), replays=replays)
        used = [p for name, p in net.named_parameters() if "other" not in name]
        for rows in (found, stored, out):
            rows.append([])
        with session:
            for number in range(16):
                for place in [one for one in gc.get_objects() if isinstance(one, PackedModule)] if number == 6 else ():
                    place.accumulators.clear()
                loss = net(batch(number)).square().mean()
                stored[-1].append(session.stored_bytes)
                found[-1].append(list(torch.autograd.grad(loss, used)))
                out[-1].append(taken_out(session) > 0)
    assert_same(*found, but=6)
    assert [a == b for a, b in zip(*stored, strict=True)] == [number != 6 for number in range(16)]
    assert out[0][5] and not out[0][6] and out[0][-1] and not any(out[1])


def test_frozen_packed_weights() -> None:
    net = Net(64).requires_grad_(requires_grad=False)
    net.head.requires_grad_()
    with apply(ALL.set("frozen", INT8), net) as session:
        for number in range(8):
            net(batch(number)).square().mean().backward()
        assert session.weight_bytes > 0 and taken_out(session) > 0


def test_hooks_are_put_back_in_their_place() -> None:
    module, called = nn.Identity(), list[str]()

    def add(name: str, **options: bool) -> object:
        return module.register_forward_hook(Hook(lambda *_: called.append(name)), **options)

    add("b")
    place = HookPlace(add("c"))
    add("d")
    add("a", prepend=True)
    place.take_out()
    add("e")
    module(torch.zeros(1))
    assert called == list("abde")
    called.clear()
    place.put_back()
    place.put_back()
    module(torch.zeros(1))
    assert called == list("abcde")
