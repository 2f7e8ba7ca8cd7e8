"""Models whose forward another library has replaced, and computes the loss without the head: left unmodified, with a row."""

from __future__ import annotations

import functools
import types
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import paredown as pare


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.lm_head = nn.Embedding(8192, 16), nn.Linear(16, 8192, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.lm_head(self.embedding(tokens))


def fused(self: Tiny, tokens: Tensor) -> Tensor:
    return functional.cross_entropy(functional.linear(self.embedding(tokens), self.lm_head.weight), tokens)


def replaced(package: str, *, is_decorated: bool = False) -> Tiny:
    """A model with a forward of a module of `package`, under a decorator of another one."""
    model = Tiny()
    function: Any = types.FunctionType(fused.__code__, {**globals(), "__name__": f"{package}.models.llama"})
    if is_decorated:
        inner = function
        function = functools.wraps(inner)(lambda *args: inner(*args))
    model.forward = types.MethodType(function, model)  # type: ignore[method-assign]
    return model


def rows_after_a_step(model: Tiny) -> list[tuple[str, str]]:
    with pare.apply(pare.Plan(), model, chunked_loss=True) as session:
        before = [(row.slot, row.reason) for row in session.changes]
        output = model(torch.arange(8))
        (output if output.dim() == 0 else functional.cross_entropy(output, torch.arange(8))).backward()
        assert [(row.slot, row.reason) for row in session.changes] == before
    return before


def test_a_forward_of_another_library_has_a_row() -> None:
    for package, name in (("liger_kernel", "Liger"), ("trl", "TRL")):
        for is_decorated in (False, True):
            said = f"the model's forward is that of {name}, which computes the loss of 8,192 classes in chunks without calling it"
            row = "lm_head", f"{said}: nothing is left to do"
            assert rows_after_a_step(replaced(package, is_decorated=is_decorated)) == [row]


def test_other_forwards_have_none() -> None:
    assert rows_after_a_step(Tiny()) == []
    assert rows_after_a_step(replaced("a_module_of_ones_own")) == []


def test_a_head_that_is_called_all_the_same_is_deferred() -> None:
    """As with TRL's label smoothing: its forward calls the model's own."""
    model = replaced("trl")
    model.forward = types.MethodType(types.FunctionType(Tiny.forward.__code__, {"__name__": "trl.trainer"}), model)  # type: ignore
    with pare.apply(pare.Plan(), model, chunked_loss=True) as session:
        assert len(session.changes) == 1
        functional.cross_entropy(model(torch.arange(8)), torch.arange(8)).backward()
        assert not session.changes
