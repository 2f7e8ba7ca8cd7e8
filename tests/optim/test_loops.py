"""What users do to optimizers in their loops, and what torch.optim makes of it."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import paredown
from paredown import Plan
from paredown.errors import OptimError
from paredown.optim import SGD, AdamW
from paredown.optim.parameter_state import owner_of
from tests.optim.nets import take_step
from tests.optim.test_optimizers import PACKED, batch, losses, network

GRADIENT: dict[str, Any] = {"gradient": "int8/64@bf16"}


def backward(model: nn.Module, seed: int = 0) -> None:
    x, y = batch(seed)
    nn.functional.cross_entropy(model(x), y).backward()


# --- microbatches -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, GRADIENT])
def test_norms_between_microbatches_are_those_of_the_mean(options: dict[str, Any]) -> None:
    model, plain = network(), network()
    optimizer = SGD(model.parameters(), lr=1.0, microbatches=4, **options)
    for seed in range(4):
        backward(model, seed)
        if not optimizer.updates_next:
            optimizer.step()
            optimizer.zero_grad()
        backward(plain, seed)
    for p in plain.parameters():
        assert p.grad is not None
        p.grad /= 4
    expected = nn.utils.get_total_norm([p.grad for p in plain.parameters() if p.grad is not None])
    assert nn.utils.clip_grad_norm_(model.parameters(), 0.5).item() == pytest.approx(expected.item(), rel=0.02)
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.step()
    moved = torch.stack([(p - q).norm() for p, q in zip(model.parameters(), before, strict=True)]).norm()
    assert moved.item() == pytest.approx(0.5, rel=0.02)


@pytest.mark.parametrize(("options", "set_to_none"), [({}, True), (GRADIENT, True), (GRADIENT, False)])
def test_clearing_gradients_between_microbatches_is_refused(options: dict[str, Any], set_to_none: bool) -> None:
    model = network()
    optimizer = SGD(model.parameters(), lr=1.0, microbatches=4, **options)
    backward(model)
    optimizer.step()
    with pytest.raises(OptimError, match=r"cleared between microbatches \(1 of 4"):
        model.zero_grad(set_to_none)
        backward(model)


def test_a_parameter_may_get_its_first_gradient_late() -> None:
    model = network()
    optimizer = SGD(model.parameters(), lr=1.0, microbatches=2, **GRADIENT)
    for p in (model[2].weight.sum(), model[0].weight.sum() + model[2].weight.sum()):
        take_step(optimizer, p)
    assert optimizer.updates == 1


# --- state and rules that change --------------------------------------------------------------------------------------


@pytest.mark.parametrize("clears", [lambda o: o.state.clear(), lambda o: setattr(o, "state", defaultdict(dict))])
def test_cleared_state_begins_anew(clears: Any) -> None:
    moves: list[Tensor] = []
    for options in (PACKED, {}):
        model = network()
        optimizer = AdamW(model.parameters(), lr=1e-2, weight_decay=0.0, **options)
        losses(model, optimizer, 5)
        clears(optimizer)
        before = model[0].weight.detach().clone()
        losses(model, optimizer, 1)
        moves.append((model[0].weight.detach() - before).abs().mean())
        assert any(name.startswith("exp_avg") for name in optimizer.state_dict()["state"][0])
    assert moves[0].item() == pytest.approx(moves[1].item(), rel=0.05)  # the first step of Adam is lr for every value


@pytest.mark.parametrize("release", [False, True])
@pytest.mark.parametrize("change", [{"momentum": 0.9}, {"momentum": 0.9, "nesterov": True}])
def test_a_changed_rule_is_followed(change: dict[str, Any], release: bool) -> None:
    results: list[Tensor] = []
    for kind, options in ((SGD, {"moment1": "int8/64@bf16", "release": release}), (torch.optim.SGD, {})):
        model = nn.Linear(128, 64, bias=False)
        nn.init.zeros_(model.weight)
        optimizer = kind(model.parameters(), lr=0.1, **options)
        for number in range(6):
            if number == 2:
                optimizer.param_groups[0].update(change)
            take_step(optimizer, model.weight.sum())
        results.append(model.weight.detach())
    torch.testing.assert_close(*results, rtol=0.02, atol=0.0)


def test_a_fresh_state_round_trips() -> None:
    results: list[Tensor] = []
    for loads in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(128, 64, bias=False)
        optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9, dampening=0.5, moment1="int8/64@bf16", **GRADIENT)
        if loads:
            optimizer.load_state_dict(optimizer.state_dict())
        for _ in range(2):
            take_step(optimizer, (model.weight * torch.linspace(-1, 1, 128)).sum())
        results.append(model.weight.detach())
    assert torch.equal(*results)


# --- tiers and dtypes -------------------------------------------------------------------------------------------------


def test_safe_where_the_weight_is_no_bfloat16() -> None:
    """The 8 bits follow a bfloat16; a float16 model stays float16, and its updates are what they should be."""
    model = nn.Linear(128, 64, bias=False).half()
    paredown.apply(Plan.preset("safe"), model)
    optimizer = SGD(model.parameters(), lr=0.5)
    before = model.weight.detach().float().clone()
    direction = torch.randn(64, 128)
    (model.weight.float() * direction).sum().backward()
    optimizer.step()
    moved = before - model.weight.detach().float()
    assert nn.functional.cosine_similarity(moved.flatten(), direction.flatten(), 0) > 0.99
    assert moved.norm() / direction.norm() == pytest.approx(0.5, rel=0.01)


def test_a_dtype_that_changes_after_the_optimizer_was_made() -> None:
    for first, then in ((torch.bfloat16, torch.float16), (torch.bfloat16, torch.float32)):
        model = nn.Linear(128, 64).to(first)
        optimizer = SGD(model.parameters(), lr=0.5, tier="safe", gradient=None)
        for dtype in (first, then):
            model.to(dtype)
            before = model.weight.detach().float().clone()
            take_step(optimizer, model.weight.sum())
            assert (before - model.weight.detach().float()).mean().item() == pytest.approx(0.5, rel=0.01)


# --- the rest ---------------------------------------------------------------------------------------------------------


def test_a_step_can_be_repeated_after_an_exception(monkeypatch: pytest.MonkeyPatch) -> None:
    model = network()
    optimizer = AdamW(model.parameters(), **PACKED)
    losses(model, optimizer, 1)
    backward(model)
    monkeypatch.setattr(optimizer._batches, "run", lambda: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    monkeypatch.undo()
    optimizer.zero_grad()
    assert all(p.grad is None for p in model.parameters()) and optimizer.updates == 1
    losses(model, optimizer, 1)


@pytest.mark.parametrize("options", [{"release": True, **PACKED}, PACKED, {"microbatches": 2}])
def test_frozen_parameters_may_be_thawed(options: dict[str, Any]) -> None:
    model = network()
    model[0].weight.requires_grad_(False)
    optimizer = AdamW(model.parameters(), lr=0.1, **options)
    before = model[0].weight.detach().clone()
    losses(model, optimizer, 2)
    assert torch.equal(before, model[0].weight) and not model[0].weight.requires_grad
    model[0].weight.requires_grad_(True)
    losses(model, optimizer, 2)
    assert not torch.equal(before, model[0].weight)


def test_the_older_of_two_optimizers_says_that_it_is_out() -> None:
    model = network()
    old = AdamW(model.parameters(), **PACKED)
    new = AdamW(model.parameters(), **PACKED)
    losses(model, new, 1)
    backward(model)
    with pytest.raises(OptimError, match=r"newer optimizer of paredown\.optim has parameter 0 of group 0"):
        old.step()


def test_a_refused_group_leaves_nothing() -> None:
    model = network()
    optimizer = AdamW(model.parameters(), **PACKED)
    extra = [nn.Parameter(torch.zeros(64, 64)), nn.Parameter(torch.zeros(2, dtype=torch.complex64))]
    with pytest.raises(OptimError, match="complex"):
        optimizer.add_param_group({"params": extra})
    optimizer.load_state_dict(optimizer.state_dict())
    losses(model, optimizer, 1)
    assert owner_of(extra[0]) is None and owner_of(model[0].weight) is optimizer
    assert len(optimizer.diagnostics()) <= len(optimizer.entries) == 8


def test_a_sparse_gradient_of_a_small_parameter() -> None:
    embedding = nn.Embedding(16, 8)
    optimizer = AdamW(embedding.parameters(), **PACKED)
    for is_sparse in (False, True):
        embedding.sparse = is_sparse
        optimizer.zero_grad()
        embedding(torch.arange(4)).sum().backward()
        if is_sparse:
            with pytest.raises(OptimError, match="sparse"):
                optimizer.step()
        else:
            optimizer.step()


def test_inference_mode_is_refused() -> None:
    model = network()
    optimizer = AdamW(model.parameters(), **PACKED)
    backward(model)
    with torch.inference_mode(), pytest.raises(OptimError, match="inference_mode"):
        optimizer.step()
    optimizer.step()


def test_a_model_in_float64_is_refused_in_a_sentence() -> None:
    model = network()
    paredown.apply(Plan.preset("lpmm"), model)
    optimizer = AdamW(model.parameters())
    losses(model, optimizer, 1)
    model.double()
    model(torch.randn(2, 64, dtype=torch.float64)).sum().backward()
    with pytest.raises(OptimError, match="float64"):
        optimizer.step()
