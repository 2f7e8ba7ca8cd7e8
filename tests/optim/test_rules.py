"""Rules equal their formulas in float32, and stay close to torch.optim."""

from __future__ import annotations

from fractions import Fraction
from math import sqrt
from typing import Any

import numpy as np
import pytest
import torch

from paredown.errors import OptimError
from paredown.optim.rules import RULES, as_float32, from_stored_root, fused, root, stored_root
from tests.optim.made import HYPERS

Array = np.ndarray[Any, np.dtype[np.float32]]


def nearest(x: Fraction) -> np.float32:
    """The float32 nearest to x; of two that are equally near the one with an even last bit."""
    close = np.float32(float(x))
    around = [np.nextafter(close, np.float32(-np.inf)), close, np.nextafter(close, np.float32(np.inf))]
    return min(around, key=lambda a: (abs(Fraction(float(a)) - x), int(a.view(np.int32)) & 1))


def fma(a: Any, b: Any, c: Any) -> Array:
    """a * b + c, rounded once, by fractions."""
    numbers = np.broadcast(a, b, c)
    made = [nearest(Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))) for x, y, z in numbers]
    return np.array(made, np.float32).reshape(numbers.shape)


def by_numpy(name: str, p: Array, g: Array, m: Array, v: Array, h: list[np.float32]) -> list[Array]:
    """[p', moments'] of a rule, written once more."""
    if name in ("sgd", "sgdm", "nesterov"):
        _, lr, momentum, carry, fresh, decay = h
        d = fma(decay, p, g)
        m = fma(carry, m, fresh * d)
        u = {"sgd": lambda: d, "sgdm": lambda: m, "nesterov": lambda: fma(momentum, m, d)}[name]()
        return [fma(-lr, u, p), *([] if name == "sgd" else [m])]
    _, keep, beta1, rest1, beta2, rest2 = h[:6]
    if name == "lion":
        return [fma(-h[6], np.sign(fma(beta1, m, rest1 * g)), p * keep), fma(beta2, m, rest2 * g)]
    m, v = fma(beta1, m, rest1 * g), fma(beta2, v, fma(rest2 * g, g, np.float32(2.0**-100)))
    return [fma(-h[6] * m, np.float32(1) / fma(h[7], np.sqrt(v), h[8]), p * keep), m, v]


def test_fused_rounds_once() -> None:
    """Numbers whose sum lies next to the middle between two float32, where rounding twice goes wrong, and subnormal ones."""
    made, e = torch.Generator().manual_seed(3), 2.0**-24
    a, b, c = (torch.randn(500, generator=made) * 2.0 ** torch.randint(-30, 30, (500,), generator=made) for _ in range(3))
    hard = [(1 + 2 * e, 1 + 2 * e, s * 2.0**k) for k in range(-60, 30) for s in (1, -1)]
    hard += [(s * e, 1.0 + t * 2 * e, 1.0 + n * 2 * e) for s in (1, -1) for t in (-1, 0, 1) for n in range(4)]
    hard += [(2.0**-70, 1.5 * 2.0**-70, 2.0**-140), (2.0**-75, 2.0**-75, 3 * 2.0**-149), (0.0, 1.0, 0.0), (1.0, 1.0, -1.0)]
    a, b, c = (torch.cat([x, torch.tensor(y)]) for x, y in zip((a, b, c), zip(*hard, strict=True), strict=True))
    assert np.array_equal(fused(a, b, c).numpy(), fma(a.numpy(), b.numpy(), c.numpy()))
    assert fused(2.0, torch.tensor([torch.inf, torch.nan, 3e38]), 0.0).tolist()[::2] == [torch.inf, torch.inf]


def test_stored_roots_come_back() -> None:
    x = torch.logspace(-28, 20, 5000)
    for roots, exact in ((0, x), (1, x.double() ** 0.5), (2, x.double() ** 0.25)):
        y = stored_root(x, roots)
        assert (y / exact - 1).abs().max() < (0.07 if roots == 2 else 1e-6)
        assert bool((y.diff() > 0).all())
        assert torch.allclose(from_stored_root(y, roots), x, rtol=1e-6, atol=0.0)
        assert from_stored_root(stored_root(torch.zeros(2), roots), roots).tolist() == [0.0, 0.0]


@pytest.mark.parametrize("name", [name for name, rule in RULES.items() if not rule.is_of_matrix])
def test_rules_are_their_formulas(name: str) -> None:
    made = torch.Generator().manual_seed(1)
    p, g, m, v = (torch.randn(1000, generator=made) * 10.0 ** torch.randint(-12, 3, (1000,), generator=made) for _ in range(4))
    v = v.square()
    v[:10] = 1e-35  # below what is added
    rule = RULES[name]
    new, moments = rule.update(p, g, (m, v)[: len(rule.roles)], rule.numbers(HYPERS[name]))
    expected = by_numpy(name, *(t.numpy() for t in (p, g, m, v)), [np.float32(n) for n in HYPERS[name]])
    assert [t.numpy().tobytes() for t in (new, *moments)] == [np.asarray(a, np.float32).tobytes() for a in expected]


def test_root_is_correctly_rounded() -> None:
    for first in (0x0D800000, 0x3F800000, 0x40000000, 0x7F000000):  # every float32 of four binades: two of each parity
        x = torch.arange(first, first + (1 << 23), 7, dtype=torch.int32).view(torch.float32)
        assert np.array_equal(root(x).numpy(), np.sqrt(x.numpy()))
    assert root(torch.tensor([0.0, 2.0**-100])).tolist() == [0.0, 2.0**-50]


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
def test_rules_stay_close_to_torch(name: str, torch_name: str, options: dict[str, Any]) -> None:
    ours, theirs = steps_of(name, torch_name, **options)
    assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-6)  # each step rounds in another order


def test_numbers_are_float32_and_as_many_as_the_rule_reads() -> None:
    assert RULES["sgd"].numbers((1.0, 0.1, 0, 0, 1, 0))["lr"] == float(np.float32(0.1))
    assert as_float32(1e300) == float("inf") and as_float32(-1e300) == float("-inf")
    with pytest.raises(OptimError, match="6 numbers, not 2"):
        RULES["sgd"].numbers((1.0, 0.1))
