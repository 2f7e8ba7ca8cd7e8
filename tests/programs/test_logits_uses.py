"""Logits used in every way (`logits_uses.py`): losses, values and gradients where they are deferred are those of plain torch.

What cannot be computed from deferred logits is an error or a warning with a sentence, never another value.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

import paredown
from paredown import Plan
from paredown.loss import chunked_loss
from paredown.loss.chunked_cross_entropy import CHUNK_BYTES
from tests.loss.largest import LargestTensor
from tests.programs.compiling import compiles_quickly
from tests.programs.logits_uses import (
    NUM_CLASSES,
    REFUSED,
    SIZE,
    TRANSFORMS,
    USES,
    Model,
    Outcome,
    Use,
    batch,
    loss_of,
    outcome,
)

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")  # of torch.func.jvp


IN_CHUNKS = (
    "plain mean",
    "sum of rows",
    "one loss per row",
    "two losses of one tensor",
    "soft capped",
    "classes in dimension one",
    "functional call with other weights",
    "functional call of the loss too",
    "functional call with constants",
    "weight frozen",
    "head replaced",
    "hidden states frozen",
)
FOR_FROZEN = (
    "plain mean",
    "one loss per row",
    "weight unfrozen",
    "weight frozen and all logits",
    "written through data",
    "weight written",
)
COMPILED = (
    "plain mean",
    "sum of two passes",
    "written through data",
    "written through its storage",
    "retained before the loss",
    "hook after the loss",
    "gradient that may be unused",
    "weight replaced",
    "weight unfrozen",
    "weight written through data",
    "read after a step",
)
PACKED = Plan.uniform(weight="bf16", frozen="bf16")


class CompiledModel:
    """A model whose calls run compiled, and whose attributes are those of the model."""

    def __init__(self, model: Model, compiled: Any) -> None:
        vars(self).update(model=model, compiled=compiled)

    def __call__(self, ids: Tensor) -> Tensor:
        return vars(self)["compiled"](ids)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["model"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(vars(self)["model"], name, value)


def rounded() -> Model:
    """A model whose parameters have values of bfloat16."""
    model = Model()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(p.bfloat16())
    return model


def assert_same(found: Outcome, expected: Outcome) -> None:
    """Values and gradients are equal but for rounding, and gradients that are None are None."""
    assert len(found.values) == len(expected.values)
    for mine, theirs in zip(found.values, expected.values, strict=True):
        if isinstance(theirs, Tensor | float):
            torch.testing.assert_close(mine, theirs, equal_nan=True)
        else:
            assert mine == theirs
    assert {n for n, g in found.gradients.items() if g is None} == {n for n, g in expected.gradients.items() if g is None}
    for name, gradient in expected.gradients.items():
        torch.testing.assert_close(found.gradients[name], gradient, msg=lambda text, name=name: f"{name}: {text}")


def assert_conforms(use: Use, model: Model, says: str | None, make: Callable[[], Model] = Model, seen: Any = None) -> None:
    """The program has the outcome of plain torch for the model that `make` returns; with `says`, it is refused with this text.

    `seen`: a context for the run that is compared.
    """
    expected = None if says is not None else outcome(use, make())
    with pytest.raises((RuntimeError, UserWarning), match=says) if says is not None else nullcontext():
        with seen or nullcontext():
            found = outcome(use, model)
        assert expected is not None
        assert_same(found, expected)


@pytest.mark.parametrize("name", USES)
def test_logits_in_a_session_are_those_of_torch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CHUNK_BYTES, "cpu", 2 * NUM_CLASSES * 4)  # two rows
    with paredown.apply(Plan.uniform(), (model := Model()), chunked_loss=True) as session:
        seen = LargestTensor()
        assert_conforms(USES[name], model, REFUSED.get(name), seen=seen)
        if seen.rows_of(NUM_CLASSES) >= batch().numel():
            assert [row.given for row in session.changes] == ["all logits"], "where all logits were computed, a row says so"


def test_what_stays_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CHUNK_BYTES, "cpu", 2 * NUM_CLASSES * 4)
    for name in IN_CHUNKS:
        with paredown.apply(Plan.uniform(), (model := Model()), chunked_loss=True) as session, LargestTensor() as seen:
            outcome(USES[name], model)
            assert not session.changes and seen.rows_of(NUM_CLASSES) <= SIZE, name


@pytest.mark.parametrize("name", USES)
@pytest.mark.filterwarnings("ignore:torch.optim.SGD updates:UserWarning")  # some programs step, which rounds
@pytest.mark.filterwarnings("ignore:head.weight is trained and stored:UserWarning")  # or write an update
def test_logits_of_packed_weights_are_those_of_torch(name: str) -> None:
    """Weights that bfloat16 has are packed without an error."""
    with paredown.apply(PACKED, (model := rounded()), chunked_loss=True):
        assert_conforms(USES[name], model, REFUSED.get(name), rounded)


@pytest.mark.parametrize("name", FOR_FROZEN)
def test_logits_of_packed_frozen_weights_are_those_of_torch(name: str) -> None:
    def frozen() -> Model:
        model = rounded()
        model.head.requires_grad_(False)
        return model

    with paredown.apply(PACKED, (model := frozen()), chunked_loss=True):
        assert_conforms(USES[name], model, REFUSED.get(name), frozen)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # torch's own
@pytest.mark.parametrize("name", [name if name in COMPILED else pytest.param(name, marks=pytest.mark.full) for name in USES])
def test_logits_of_compiled_models_are_those_of_torch(name: str) -> None:
    with compiles_quickly(), paredown.apply(Plan.uniform(), (model := Model()), chunked_loss=True) as session:
        compiled: Any = CompiledModel(model, session.compile())
        is_refused = name in REFUSED and "hidden states" not in name  # the program calls parts of the model, which are not compiled
        assert_conforms(USES[name], compiled, REFUSED[name] if is_refused else None)


@pytest.mark.parametrize("is_inside", [True, False], ids=["inside", "outside"])
def test_compiled_functional_calls_use_the_weights_that_they_are_given(is_inside: bool) -> None:
    """First those of the model, for which the graph is compiled, and then others, for which it is not compiled again."""

    class Called(nn.Module):
        def __init__(self, model: Model) -> None:
            super().__init__()
            self.model = model

        def forward(self, ids: Tensor, *weights: Tensor) -> Tensor:
            names = [name for name, _ in self.model.named_parameters()]
            logits: Any = functional_call(self.model, dict(zip(names, weights, strict=True)), (ids,))
            return loss_of(logits, ids) if is_inside else logits

    def run(called: Any, weights: Sequence[Tensor]) -> list[Tensor]:
        result = called(batch(), *weights)
        loss = result if is_inside else loss_of(result, batch())
        return [loss.detach(), *torch.autograd.grad(loss, weights)]

    model, num_graphs = Model(), 0
    others = [(p.detach() * 0.5 + 0.1).requires_grad_() for p in model.parameters()]
    expected = [run(Called(model), weights) for weights in ([*model.parameters()], others)]
    with compiles_quickly(), paredown.apply(Plan.uniform(), (called := Called(model)), chunked_loss=True) as session:
        compiled = session.compile()
        for weights, theirs in zip(([*model.parameters()], others), expected, strict=True):
            torch.testing.assert_close(run(compiled, weights), theirs)
            num_graphs = max(num_graphs, session._head.use.num_graphs)
    assert called.training and num_graphs == 1


@pytest.mark.parametrize("name", USES | TRANSFORMS)
def test_logits_without_a_session_are_those_of_torch(name: str) -> None:
    with chunked_loss(model := Model()):
        assert_conforms((USES | TRANSFORMS)[name], model, REFUSED.get(name))


def test_a_comparison_that_fails() -> None:
    plain = outcome(USES["plain mean"], Model())
    for other in ("sum of rows", "frozen head"):
        with pytest.raises(AssertionError):
            assert_same(outcome(USES[other], Model()), plain)
