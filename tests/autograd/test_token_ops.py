"""Which modules can run over pieces of the sequence: the definition is that a module's output on a piece is that piece of its output."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from paredown.autograd.token_ops import mixes, reason_to_run_whole

SIDE, TOKENS = 12, 10


class Call(nn.Module):
    """A module whose forward is a function."""

    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(x)


def gated() -> nn.Module:
    up, gate, down = nn.Linear(SIDE, 20), nn.Linear(SIDE, 20), nn.Linear(20, SIDE)
    module = Call(lambda x: down(functional.silu(gate(x)) * up(x)))
    module.parts = nn.ModuleList([up, gate, down])
    return module


def per_head(x: Tensor) -> Tensor:
    heads = x.view(*x.shape[:2], 3, -1)
    return (heads * torch.rsqrt(heads.square().mean(-1, keepdim=True) + 1e-6)).flatten(2)


BY_TOKEN: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(SIDE, 8),
    "gated": gated,
    "layer norm": lambda: nn.LayerNorm(SIDE),
    "rms norm": lambda: nn.RMSNorm(SIDE),
    "softmax over features": lambda: nn.Softmax(-1),
    "glu": lambda: nn.GLU(),
    "heads": lambda: Call(per_head),
    "einsum": lambda: Call(lambda x: torch.einsum("btd,de->bte", x, torch.ones(SIDE, 5, dtype=x.dtype))),
    "weights first": lambda: Call(lambda x: (torch.ones(5, SIDE, dtype=x.dtype) @ x.transpose(1, 2)).transpose(1, 2)),
    "sum over features": lambda: Call(lambda x: x.cumsum(2)),
    "halves": lambda: Call(lambda x: torch.cat(x.chunk(2, -1)[::-1], -1)),
    "best features": lambda: Call(lambda x: x.topk(3).values),
    "relu in place": lambda: Call(lambda x: functional.relu(x + 1, inplace=True)),
    "dropout in eval": lambda: nn.Sequential(nn.Linear(SIDE, 8), nn.Dropout(0.5)).eval(),
}
NAMES_THREE_DIMENSIONS = ("einsum", "weights first", "sum over features", "heads")
CASES = [
    *((name, (2, TOKENS, SIDE)) for name in BY_TOKEN),
    *((name, (TOKENS, SIDE)) for name in BY_TOKEN if name not in NAMES_THREE_DIMENSIONS),
]
OTHERS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "attention": (lambda: Call(lambda x: functional.scaled_dot_product_attention(x, x, x)), "mixes tokens"),
    "scores": (lambda: Call(lambda x: (x @ x.transpose(1, 2)).softmax(-1) @ x), "bmm mixes tokens"),
    "softmax over tokens": (lambda: nn.Softmax(1), "_softmax mixes tokens"),
    "convolution": (lambda: Call(lambda x: nn.Conv1d(SIDE, SIDE, 3, padding=1).to(x)(x.mT).mT), "convolution mixes tokens"),
    "batch norm": (lambda: Call(lambda x: nn.BatchNorm1d(SIDE).to(x)(x.mT).mT), "batch_norm mixes tokens"),
    "norm of all": (lambda: Call(lambda x: x / x.norm()), "linalg_vector_norm mixes tokens"),
    "mean": (lambda: Call(lambda x: x - x.mean(1, keepdim=True)), "mean mixes tokens"),
    "sort": (lambda: Call(lambda x: x.sort(dim=1).values), "sort mixes tokens"),
    "capacity": (lambda: Call(lambda x: x * (x.topk(4, dim=1).values.sum(1, keepdim=True))), "topk mixes tokens"),
    "sum so far": (lambda: Call(lambda x: x.cumsum(1)), "cumsum mixes tokens"),
    "shift": (lambda: Call(lambda x: x.roll(1, 1)), "roll mixes tokens"),
    "next token": (lambda: Call(lambda x: torch.cat([x[:, 1:], x[:, :1]], 1)), "slice mixes tokens"),
    "positions": (lambda: Call(lambda x: x + torch.arange(x.shape[1])[:, None]), "arange makes a tensor"),
    "a table of positions": (lambda: Call(lambda x: x + torch.ones(TOKENS, SIDE)), "does not run on"),
    "count": (lambda: Call(lambda x: x / x.shape[1]), "div gets other numbers"),
    "merged": (lambda: Call(lambda x: x.mT.reshape(x.shape)), "mixes tokens"),
    "flat": (lambda: nn.Flatten(), "view merges tokens"),
    "random bits": (lambda: nn.Dropout(0.5), "draws random bits"),
    "in place": (lambda: Call(lambda x: x.mul_(2)), "mul_ writes into the module's input"),
    "a number": (lambda: Call(lambda x: x * x.amax().item()), "amax mixes tokens"),
    "two results": (lambda: Call(lambda x: (x, x)), "does not return one tensor"),
    "an unseen kernel": (lambda: Call(lambda x: torch.empty_like(x).set_(x + 1)), "not known to treat tokens one by one"),
    "no rule": (lambda: Call(lambda x: torch.fft.fft(x).real), "_fft_r2c mixes tokens"),
}


@pytest.mark.parametrize(("name", "shape"), CASES)
def test_modules_by_token(name: str, shape: tuple[int, ...]) -> None:
    module, x = BY_TOKEN[name]().double(), torch.randn(shape, dtype=torch.float64)
    assert reason_to_run_whole(module, x) == ""
    whole = module(x.clone())
    pieces = torch.cat([module(x.narrow(-2, start, min(3, TOKENS - start))) for start in range(0, TOKENS, 3)], -2)
    assert torch.allclose(pieces, whole, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("name", OTHERS)
def test_others_are_named(name: str) -> None:
    make, said = OTHERS[name]
    reason = reason_to_run_whole(make(), torch.randn(2, TOKENS, SIDE))
    assert said in reason, reason
    assert mixes(reason) == ("mixes tokens" in said or "merges tokens" in said)
