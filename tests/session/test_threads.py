"""Branches of a model that run in threads of their own. Autograd numbers nodes for each thread: two branches have nodes of one number."""

from __future__ import annotations

import threading

import torch
from torch import Tensor, nn

from paredown import Plan, apply
from tests.session.nets import INT8, assert_same, gradients, relative_error, rows, step, weighted

WIDTH = 64


class InThreads(nn.Module):
    """A layer, then branches side by side, each in a thread of its own, multiplied."""

    def __init__(self, *branches: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.branches = nn.Linear(WIDTH, WIDTH), nn.ModuleList(branches)

    def forward(self, x: Tensor) -> Tensor:
        h, found = self.first(x), dict[int, Tensor]()

        def run(number: int, branch: nn.Module) -> None:
            found[number] = branch(h)

        threads = [threading.Thread(target=run, args=pair) for pair in enumerate(self.branches)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return torch.stack([found[number] for number in range(len(threads))]).prod(0)


def activation_first() -> nn.Module:
    """GELU of a layer: its output is recomputed from the input that the node of the GELU saved."""
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))


def norm_first() -> nn.Module:
    """SiLU of a norm: nodes of other operations at the same numbers."""
    return nn.Sequential(nn.LayerNorm(WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))


def test_an_exact_plan_changes_no_bit() -> None:
    net, x = InThreads(activation_first(), norm_first()), rows()
    plain = step(net, x)
    with apply(Plan.uniform(activation="fp32"), net):
        for _ in range(3):
            assert_same(step(net, x), plain)


def test_eight_bits_are_near_in_every_step() -> None:
    net, x = InThreads(activation_first(), activation_first(), norm_first()), rows()
    plain = step(net, x)
    with apply(Plan.uniform(activation=INT8), net):
        errors = [relative_error(step(net, x), plain) for _ in range(4)]
    assert max(errors) < 0.05


def test_branches_alike_keep_their_own_tensors() -> None:
    """Same operations at the same numbers, other values: each linear layer gets back the activation of its own branch."""
    net, x = InThreads(*(activation_first() for _ in range(4))), rows()
    plain = step(net, x)
    with apply(Plan.uniform(activation=INT8), net):
        assert max(relative_error(step(net, x), plain) for _ in range(3)) < 0.05


def test_what_branches_save_is_packed_under_the_names_of_their_modules() -> None:
    net, x = InThreads(activation_first(), norm_first()), rows()
    with apply(Plan.uniform(activation=INT8), net) as session:
        kept = net(x)
        assert session.stored_bytes > 0
        names = {row.slot for row in session.explain()}
        assert {"branches.0.1:input", "branches.1.0:input", "branches.1.3:input"} <= names
        kept.sum().backward()
        del kept
        assert session.stored_bytes == 0


def test_two_forward_passes_at_once_that_use_threads_say_what_stays_plain() -> None:
    """It is not known to which of them a thread belongs: what it saves is not packed, and a row of changes says so."""
    net, x = InThreads(activation_first(), norm_first()), rows()
    plain = step(net, x)
    inside = threading.Barrier(2, timeout=60)

    def meet(*_: object) -> None:
        inside.wait()

    handle = net.first.register_forward_hook(meet)
    session = apply(Plan.uniform(activation=INT8), net)
    outputs = list[Tensor]()
    threads = [threading.Thread(target=lambda: outputs.append(net(x))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert any("several forward passes" in row.reason for row in session.changes)
    session.close()
    handle.remove()
    net.zero_grad()
    for output in outputs:
        (weighted(output) / 2).backward()
    assert len(outputs) == 2
    assert relative_error(gradients(net), plain) < 0.05
