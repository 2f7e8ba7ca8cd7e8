"""What a caller changes between forward and backward: gradients, their absence and errors are those of the unmodified model.

Formats of 32 bits round nothing, so that everything is compared bit for bit. Each model runs three steps; the second one changes it.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import paredown as pare
from tests.programs.compiling import compiled_model, compiles_quickly

Change = Callable[[nn.Sequential], object]
Outcome = list[dict[str, Tensor | None] | str]
PLANS = {
    "activations": pare.Plan.uniform(activation="fp32"),
    "weights": pare.Plan.uniform(weight="fp32"),
    "both": pare.Plan.uniform(activation="fp32", weight="fp32"),
}


def _write(model: nn.Sequential) -> None:
    with torch.no_grad():
        model[3].weight.mul_(2)


def _write_storage(model: nn.Sequential) -> None:
    model[3].weight.data.mul_(2)


def _assign_data(model: nn.Sequential) -> None:
    model[3].weight.data = model[3].weight.data * 2


def _load(model: nn.Sequential) -> None:
    model.load_state_dict({name: 2 * value for name, value in model.state_dict().items()})


def _freeze_and_thaw(model: nn.Sequential) -> None:
    model[0].weight.requires_grad_(False)
    model[0].weight.requires_grad_(True)


CHANGES: dict[str, Change] = {
    "freeze": lambda model: model[3].weight.requires_grad_(False),
    "freeze and thaw": _freeze_and_thaw,
    "replace a parameter": lambda model: setattr(model[3], "weight", nn.Parameter(2 * model[3].weight.detach())),
    "replace a module": lambda model: model.__setitem__(3, nn.Linear(128, 128)),
    "remove a bias": lambda model: setattr(model[3], "bias", None),
    "write": _write,
    "write through data": _write_storage,
    "assign data": _assign_data,
    "load a state dict": _load,
    "set a gradient": lambda model: setattr(model[5].weight, "grad", torch.ones_like(model[5].weight)),
    "switch to eval": lambda model: model.eval(),
}
COMPILED = tuple(CHANGES)[:4]


def make_model() -> nn.Sequential:
    """Layers whose backward needs inputs, outputs, masks and weights."""
    torch.manual_seed(1)
    layers = (nn.Linear(64, 128), nn.GELU(), nn.LayerNorm(128), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 64), nn.Tanh())
    return nn.Sequential(*layers)


def outcome_of(change: Change, plan: pare.Plan | None, *, is_compiled: bool = False) -> Outcome:
    """The gradients of the first parameters in each step, or the error of a backward pass, which ends the run."""
    model = make_model()
    first = dict(model.named_parameters())
    session = pare.apply(plan, model) if plan is not None else None
    called = compiled_model(model, session) if is_compiled else model
    inputs, target = torch.randn(2, 256, 64, generator=torch.Generator().manual_seed(2))
    found: Outcome = []
    for step in range(3):
        model.zero_grad()
        loss = (called(inputs) - target).square().mean()
        if step == 1:
            change(model)
        try:
            loss.backward()
        except RuntimeError as error:
            return [*found, type(error).__name__]
        found.append({name: None if p.grad is None else p.grad.detach().clone() for name, p in first.items()})
    return found


def differences(found: Outcome, expected: Outcome) -> list[str]:
    """Steps and parameters whose gradients are not the same bits."""
    if [isinstance(step, str) for step in found] != [isinstance(step, str) for step in expected]:
        return [f"{found[-1]} instead of {expected[-1]}"]
    texts: list[str] = []
    for number, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
        if isinstance(mine, str) or isinstance(theirs, str):
            texts += [f"{mine} instead of {theirs}"] if mine != theirs else []
            continue
        for name, other in theirs.items():
            one = mine[name]
            is_same = one is None if other is None else one is not None and torch.equal(one, other)
            texts += [] if is_same else [f"step {number}: {name}"]
    return texts


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", CHANGES)
def test_changes_between_forward_and_backward(name: str, plan: str) -> None:
    expected = outcome_of(CHANGES[name], None)
    assert not differences(outcome_of(CHANGES[name], PLANS[plan]), expected)


@pytest.mark.parametrize("name", COMPILED)
def test_changes_between_forward_and_backward_of_compiled_models(name: str) -> None:
    with compiles_quickly():
        expected = outcome_of(CHANGES[name], None, is_compiled=True)
        torch._dynamo.reset()
        assert not differences(outcome_of(CHANGES[name], PLANS["activations"], is_compiled=True), expected)


def test_a_difference_is_noticed() -> None:
    """The changes do something, and another gradient, a missing one and an error are found."""
    unchanged = outcome_of(lambda model: None, None)
    assert differences(outcome_of(CHANGES["write through data"], None), unchanged)
    assert differences(outcome_of(CHANGES["remove a bias"], None), unchanged)
    assert outcome_of(CHANGES["write"], None)[-1] == "RuntimeError" and differences([*unchanged[:1], "RuntimeError"], unchanged)
