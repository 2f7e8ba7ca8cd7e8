"""torch.utils.checkpoint in the user's model still saves memory: nothing inside is packed, and modules run as often as before."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from paredown import Plan, apply
from tests.session.nets import INT8, Net, activations, assert_same, gradients, relative_error, rows, weighted

MODES = pytest.mark.parametrize("reentrant", [False, True])
EIGHT = 8192 + 256


class Counted(nn.Module):
    """A part with four tensors to save, that counts its forward passes."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.body = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.Sigmoid())

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.body(x)


def inside(reentrant: bool) -> Any:
    return lambda net, x: net.b(checkpoint(net.more[0], net.a(x), use_reentrant=reentrant))


def run(net: Net, plan: Plan | None, around: bool = False, reentrant: bool = False) -> tuple[list[Tensor], int, int, int]:
    """Gradients, bytes stored after the forward pass, number of tensors saved in it, calls of the part."""
    session = apply(plan, net) if plan is not None else None
    net.zero_grad()
    net.more[0].calls = 0
    x = rows().requires_grad_()
    y = checkpoint(net, x, use_reentrant=reentrant) if around else net(x)
    nbytes = session.stored_bytes if session is not None else 0
    held = kept_bytes(y)
    weighted(y).backward()
    if session is not None:
        assert session.stored_bytes == 0
        session.close()
    return gradients(net), nbytes, held, net.more[0].calls


def kept_bytes(y: Tensor) -> int:
    """Bytes of float tensors of 8192 values that nodes of y's graph hold unpacked."""
    pending, seen, storages = [y.grad_fn], set(), {}
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        pending.extend(before for before, _ in node.next_functions)
        for name in dir(node):
            raw = getattr(node, name) if name.startswith("_raw_saved_") and name != "_raw_saved_tensors" else None
            if raw is not None and not isinstance(raw, tuple) and raw.unpack_hook is None:
                tensor = getattr(node, name.replace("_raw", ""))
                if tensor is not None and tensor.numel() == 8192:
                    storages[tensor.untyped_storage().data_ptr()] = tensor.nbytes
    return sum(storages.values())


@MODES
def test_inside_the_model(reentrant: bool) -> None:
    net = Net(inside(reentrant), Counted())
    plain, _, held, calls = run(net, None)
    exact = run(net, Plan.uniform(activation="fp32"))
    assert_same(exact[0], plain)
    assert exact[3] == calls == 2
    found, nbytes, still_held, calls = run(net, activations(INT8))
    assert relative_error(found, plain) < 0.02
    assert calls == 2
    assert (
        nbytes <= 2 * EIGHT
    )  # b's input; the part's input, which the reentrant one saves in the graph; nothing of the four inside
    assert still_held <= held


def test_without_checkpointing_the_part_is_stored() -> None:
    """The bound of the test above can be exceeded."""
    net = Net(lambda net, x: net.b(net.more[0](net.a(x))), Counted())
    assert run(net, activations(INT8))[1] == 2 * EIGHT + (EIGHT + 256) + 1024  # two inputs; sigmoid, with minimums; signs


@MODES
def test_around_the_model(reentrant: bool) -> None:
    net = Net(lambda net, x: net.b(net.more[0](net.a(x))), Counted())
    plain = run(net, None, around=True, reentrant=reentrant)
    exact = run(net, Plan.uniform(activation="fp32"), around=True, reentrant=reentrant)
    assert_same(exact[0], plain[0])
    found = run(net, activations(INT8), around=True, reentrant=reentrant)
    assert relative_error(found[0], plain[0]) < 0.02
    assert (found[1], found[3]) == (0, 2)


@MODES
def test_a_function_that_calls_modules(reentrant: bool) -> None:
    """Hooked modules inside a checkpointed function, with dropout, whose random state must be restored."""

    def forward(net: Any, x: Tensor) -> Tensor:
        def function(h: Tensor, factor: float) -> Tensor:
            return torch.sin(net.more[1](net.more[0](h))) * factor + net.a(h)

        return net.b(checkpoint(function, net.a(x), 2.0, use_reentrant=reentrant))

    net = Net(forward, Counted(), nn.Dropout(0.3))
    results = []
    for plan in (None, Plan.uniform(activation="fp32"), activations(INT8)):
        torch.manual_seed(5)
        results.append(run(net, plan))
    assert_same(results[1][0], results[0][0])
    assert relative_error(results[2][0], results[0][0]) < 0.03
    assert {result[3] for result in results} == {2}
    assert results[2][1] <= 2 * EIGHT


def test_sequential() -> None:
    body = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4)))
    net = Net(lambda net, x: net.b(checkpoint_sequential(net.more[1], 2, net.a(x), use_reentrant=False)), Counted(), body)
    plain = run(net, None)[0]
    assert_same(run(net, Plan.uniform(activation="fp32"))[0], plain)
    assert relative_error(run(net, activations(INT8))[0], plain) < 0.03


def test_a_session_on_the_part_that_is_checkpointed() -> None:
    net = Net(inside(False), Counted())
    plain = run(net, None)[0]
    session = apply(activations(INT8), net.more[0])
    found = run(net, None)
    assert_same(found[0], plain)
    assert found[3] == 2
    assert any("other saved-tensor hooks" in change.reason for change in session.changes)
