"""The rules are what their formulas say, in float32, and go where torch.optim goes."""

from __future__ import annotations

from math import sqrt
from typing import Any

import numpy as np
import pytest
import torch

from paredown.errors import OptimError
from paredown.optim.rules import RULES, as_float32, root
from tests.optim.made import HYPERS

Array = np.ndarray[Any, np.dtype[np.float32]]


def by_numpy(name: str, p: Array, g: Array, m: Array, v: Array, h: list[np.float32]) -> list[Array]:
    """[p', moments'] of a rule, written once more."""
    if name in ("sgd", "sgdm", "nesterov"):
        _, lr, momentum, carry, fresh, decay = h
        d = g + decay * p
        m = carry * m + fresh * d
        u = {"sgd": d, "sgdm": m, "nesterov": d + momentum * m}[name]
        return [p - lr * u, *([] if name == "sgd" else [m])]
    _, keep, beta1, rest1, beta2, rest2 = h[:6]
    if name == "lion":
        return [p * keep - h[6] * np.sign(beta1 * m + rest1 * g), beta2 * m + rest2 * g]
    m, v = beta1 * m + rest1 * g, beta2 * v + rest2 * (g * g)
    denominator = np.where(v < np.float32(2.0**-100), np.float32(0), np.sqrt(v)) * h[7] + h[8]
    return [p * keep - (h[6] * m) * (np.float32(1) / denominator), m, v]


@pytest.mark.parametrize("name", RULES)
def test_rules_are_their_formulas(name: str) -> None:
    made = torch.Generator().manual_seed(1)
    p, g, m, v = (torch.randn(4096, generator=made) * 10.0 ** torch.randint(-12, 3, (4096,), generator=made) for _ in range(4))
    v = v.square()
    v[:10] = 1e-35  # below what root() sees
    rule = RULES[name]
    new, moments = rule.update(p, g, (m, v)[: len(rule.roles)], rule.numbers(HYPERS[name]))
    expected = by_numpy(name, *(t.numpy() for t in (p, g, m, v)), [np.float32(n) for n in HYPERS[name]])
    assert [t.numpy().tobytes() for t in (new, *moments)] == [np.asarray(a, np.float32).tobytes() for a in expected]


def test_root_is_correctly_rounded() -> None:
    for first in (0x0D800000, 0x3F800000, 0x40000000, 0x7F000000):  # every float32 of four binades: two of each parity
        x = torch.arange(first, first + (1 << 23), 7, dtype=torch.int32).view(torch.float32)
        assert np.array_equal(root(x).numpy(), np.sqrt(x.numpy()))
    assert root(torch.tensor([0.0, 2.0**-101, 2.0**-100])).tolist() == [0.0, 0.0, 2.0**-50]


def steps_of(name: str, torch_name: str, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """A parameter after six steps of a rule, and of torch.optim."""
    made, rule = torch.Generator().manual_seed(2), RULES[name]
    p = torch.randn(1000, generator=made)
    theirs = torch.nn.Parameter(p.clone())
    optimizer = getattr(torch.optim, torch_name)([theirs], foreach=False, **options)
    moments = tuple(torch.zeros_like(p) for _ in rule.roles)
    for step in range(1, 7):
        g = torch.randn(1000, generator=made)
        theirs.grad = g.clone()
        optimizer.step()
        p, moments = rule.update(p, g, moments, rule.numbers(hyper(name, step, **options)))
    return p, theirs.detach()


def hyper(name: str, step: int, **o: Any) -> tuple[float, ...]:
    if name != "adamw":
        momentum, is_first = o.get("momentum", 0.0), step == 1
        fresh = 1.0 if is_first else 1 - o.get("dampening", 0.0)
        return (1.0, o["lr"], momentum, 0.0 if is_first else momentum, fresh, o.get("weight_decay", 0.0))
    b1, b2 = o["betas"]
    corrected = (o["lr"] / (1 - b1**step), 1 / sqrt(1 - b2**step), o["eps"])
    return (1.0, 1 - o["lr"] * o["weight_decay"], b1, 1 - b1, b2, 1 - b2, *corrected)


@pytest.mark.parametrize(
    ("name", "torch_name", "options"),
    [
        ("sgd", "SGD", {"lr": 0.1, "weight_decay": 0.01}),
        ("sgdm", "SGD", {"lr": 0.1, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.01}),
        ("nesterov", "SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
        ("adamw", "AdamW", {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}),
    ],
)
def test_rules_go_where_torch_goes(name: str, torch_name: str, options: dict[str, Any]) -> None:
    ours, theirs = steps_of(name, torch_name, **options)
    assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-6)  # each step rounds in another order


def test_numbers_are_float32_and_as_many_as_the_rule_reads() -> None:
    assert RULES["sgd"].numbers((1.0, 0.1, 0, 0, 1, 0))["lr"] == float(np.float32(0.1))
    assert as_float32(1e300) == float("inf") and as_float32(-1e300) == float("-inf")
    with pytest.raises(OptimError, match="6 numbers, not 2"):
        RULES["sgd"].numbers((1.0, 0.1))
