"""Optimizers beside a session: made before or after `apply`, refused by it, and after the session is closed."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import paredown
from paredown import Plan
from paredown.errors import OptimError
from paredown.optim import SGD, AdamW, Lion
from tests.optim.nets import take_step
from tests.optim.test_optimizers import TIERS, losses, network


def test_after_close_the_plain_parameters_are_trained() -> None:
    model = nn.Linear(128, 64, bias=False)
    session = paredown.apply(Plan.preset("lpmm"), model)
    optimizer = SGD(model.parameters(), lr=0.1)
    for closes in (False, True):
        if closes:
            session.close()
        before = model.weight.detach().clone()
        take_step(optimizer, model(torch.ones(1, 128)).sum())
        moved = before - model.weight.detach()
        assert moved.mean().item() == pytest.approx(0.1, rel=0.01)
    assert moved.std() < 1e-3  # float32 now


@pytest.mark.parametrize("options", [{}, {"release": True}, {"microbatches": 2}, {"moment1": None}], ids=str)
@pytest.mark.parametrize("tier", TIERS)
def test_an_optimizer_made_before_apply_follows_the_plan_as_one_made_after_it(tier: str, options: dict[str, Any]) -> None:
    results: list[list[Tensor]] = []
    for optimizer_first in (True, False):
        model = network()
        optimizer = AdamW(model.parameters(), **options) if optimizer_first else None
        session = paredown.apply(Plan.preset(tier), model)
        optimizer = optimizer or AdamW(model.parameters(), **options)
        curve = losses(model, optimizer, 6)
        saved = optimizer.state_dict()["state"]
        tensors = [t for i in sorted(saved) for _, t in sorted(saved[i].items())]
        assert "exp_avg_sq.codes" in saved[0] and ("exp_avg.codes" in saved[0]) is ("moment1" not in options)
        results.append([torch.tensor(curve), *(p.detach().clone() for p in model.parameters()), *tensors])
        results[-1].append(torch.tensor([*repr(session.changes).encode()]))
    for first, second in zip(*results, strict=True):
        assert torch.equal(first, second)


def test_an_optimizer_made_before_apply_folds_a_gradient_that_is_there_already() -> None:
    model = nn.Linear(128, 64, bias=False)
    optimizer = SGD(model.parameters(), lr=0.5)
    model.weight.sum().backward()
    paredown.apply(Plan.uniform(gradient="int8/64@bf16"), model)
    before = model.weight.detach().clone()
    optimizer.step()
    assert "PackedGradient" in repr(model.weight.grad)
    torch.testing.assert_close(before - model.weight.detach(), torch.full((64, 128), 0.5), rtol=0.01, atol=0.0)


def test_an_optimizer_with_state_is_refused_by_apply_and_left_unmodified() -> None:
    model = network()
    optimizer = AdamW(model.parameters())
    losses(model, optimizer, 1)
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(paredown.errors.ApplyError, match=r"has 0.weight and has state already \(1 updates\).*export_state"):
        paredown.apply(Plan.preset("lpmm"), model)
    assert all(torch.equal(p, q) for p, q in zip(before, model.parameters(), strict=True))
    losses(model, optimizer, 1)
    del optimizer
    paredown.apply(Plan.preset("lpmm"), model)


@pytest.mark.parametrize(("options", "message"), [
    ({"amsgrad": True}, "amsgrad=True has no packed form"),
    ({"weight": "bf16"}, "is stored in int8/64@e8m0 by the session's plan, and the optimizer requests bf16"),
])  # fmt: skip
def test_a_plan_that_contradicts_an_optimizer_made_before_is_refused_before_packing(options: dict[str, Any], message: str) -> None:
    model = network().bfloat16()
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = AdamW(model.parameters(), **options)
    with pytest.raises(OptimError, match=message):
        paredown.apply(Plan.preset("lpmm"), model)
    assert all(type(p) is nn.Parameter and torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    assert all(entry.choices.name.startswith("parameter") for entry in optimizer.entries)


def test_a_session_does_not_keep_an_optimizer_alive() -> None:
    model = network()
    optimizer = AdamW(model.parameters())
    session = paredown.apply(Plan.preset("lpmm"), model)
    alive = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert alive() is None and "no optimizer of paredown.optim" in repr(session.changes)


def test_a_weight_that_the_session_leaves_plain_is_updated_in_place() -> None:
    model = nn.Linear(128, 64, bias=False).half()
    session = paredown.apply(Plan.preset("half"), model)
    optimizer = SGD(model.parameters(), lr=0.5)
    assert "weight=weight" in repr(session.changes)
    before = model.weight.detach().clone()
    model.weight.sum().backward()
    optimizer.step()
    assert (before - model.weight.detach()).float().mean().item() == pytest.approx(0.5, rel=0.01)


def test_moments_that_the_plan_asks_for_and_an_optimizer_stores_otherwise_are_rows() -> None:
    def moments(optimizer: type, **options: Any) -> dict[str, str]:
        model = nn.Linear(128, 64)
        with paredown.apply(Plan.preset("lpmm"), model) as session:
            made = optimizer(model.parameters(), lr=0.1, **options)
            model(torch.ones(1, 128)).sum().backward()
            made.step()
            return {row.slot: row.given for row in session.changes if row.slot.startswith("moment")}

    assert not moments(AdamW) and not moments(Lion) and not moments(SGD, momentum=0.9)
    assert moments(AdamW, moment1=None, moment2="uint4/64@bf16+bf16") == {
        "moment1=weight": "unmodified",
        "moment2=weight": "uint4/64@bf16+bf16",
    }
    assert moments(SGD) == {"moment1": "nothing", "moment2": "nothing"}
