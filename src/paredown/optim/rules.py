"""Optimizers as pure float32 functions: parameter, gradient and moments to the next parameter and moments.

A product with a sum is rounded once, as one operation (`fused`), all others are rounded each, and a reciprocal takes the place of a
division: a kernel does the same to the bit. `h` holds the numbers of a step as float32, in the order of `hyper_names`; `factor`
multiplied the gradient before. What is in brackets is rounded first.

    sgd        d = g + weight_decay p                                          p' = p - lr d
    sgdm       d = g + weight_decay p;  m' = carry m + (fresh d)               p' = p - lr m'
    nesterov   d and m' as in sgdm                                             p' = p - lr (d + momentum m')
    adamw      m' = beta1 m + (rest1 g);  v' = beta2 v + ((rest2 g) g + 2^-100);
               e = 1 / (root(v') inverse_root + eps)                           p' = (p keep) - (step_size m') e
    lion       c = beta1 m + (rest1 g);  m' = beta2 m + (rest2 g)              p' = (p keep) - lr sign(c)

carry is momentum, and 0 on the first step of a tensor, where fresh is 1: torch's first m' is d. keep = 1 - lr weight_decay,
rest = 1 - beta, step_size = lr / (1 - beta1^t), inverse_root = 1 / root(1 - beta2^t). 2^-100 is far below
eps^2, and a root of 0 needs no care.

>>> rule = RULES["sgdm"]
>>> h = rule.numbers((1.0, 0.5, 0.9, 0.9, 1.0, 0.0))
>>> rule.update(torch.ones(2), torch.ones(2), (torch.zeros(2),), h)
(tensor([0.5000, 0.5000]), (tensor([1., 1.]),))
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from struct import pack, unpack

import torch
from torch import Tensor

from paredown.errors import OptimError
from paredown.roles import Role

SMALLEST_SQUARE = 2.0**-100
HALF_BITS = 127 << 22  # half of the bits of 1.0
Numbers = dict[str, float]
Moments = tuple[Tensor, ...]
Update = Callable[[Tensor, Tensor, Moments, Numbers], tuple[Tensor, Moments]]


@dataclass(frozen=True)
class Rule:
    """An optimizer's arithmetic, the roles and torch's names of its moments, and the numbers it reads."""

    name: str
    update: Update
    roles: tuple[Role, ...]
    names: tuple[str, ...]
    hyper_names: tuple[str, ...]

    def numbers(self, hyper: Sequence[float]) -> Numbers:
        """The numbers of a step by name, as float32."""
        if len(hyper) != len(self.hyper_names):
            raise OptimError(f"{self.name} reads {', '.join(self.hyper_names)}: {len(self.hyper_names)} numbers, not {len(hyper)}.")
        return dict(zip(self.hyper_names, (as_float32(n) for n in hyper), strict=True))


def as_float32(number: float) -> float:
    """The float32 nearest to a number."""
    try:
        return unpack("f", pack("f", number))[0]
    except OverflowError:
        return float("inf") if number > 0 else float("-inf")


def fused(a: Tensor | float, b: Tensor, c: Tensor | float) -> Tensor:
    """a * b + c in float32, rounded once.

    The product is exact in float64, and the sum is rounded to it. A second rounding, to float32, does harm only half-way between two of
    those, and where they are subnormal. There the last bit of the sum is set if it is not exact, on the side where it lies: then the
    second rounding sees that there is more.
    """
    product, c = b.double() * a, torch.as_tensor(c, dtype=torch.float64, device=b.device)
    total = product + c
    rounded = total.float()
    hard = (total.view(torch.int64) & 0x1FFFFFFF == 0x10000000) | ((rounded.abs() < 2.0**-125) & (total != 0))
    if bool(hard.any()):
        rounded[hard] = _to_odd(product[hard], c.expand_as(total)[hard], total[hard]).float()
    return rounded


def _to_odd(a: Tensor, b: Tensor, total: Tensor) -> Tensor:
    """a + b in float64, of which `total` is the nearest: itself if exact, else the neighbour of the sum that ends in 1."""
    back = total - a
    rest = (a - (total - back)) + (b - back)  # what `total` misses, exactly
    bits = total.view(torch.int64)
    outward = torch.where((rest > 0) == (total > 0), 1, -1)
    missing = (rest != 0) & (bits & 1 == 0) & total.isfinite()
    return torch.where(missing, bits + outward, bits).view(torch.float64)


def sgd(p: Tensor, g: Tensor, moments: Moments, h: Numbers) -> tuple[Tensor, Moments]:
    """Without momentum."""
    return fused(-h["lr"], fused(h["weight_decay"], p, g), p), ()


def sgdm(p: Tensor, g: Tensor, moments: Moments, h: Numbers) -> tuple[Tensor, Moments]:
    """With momentum."""
    m = fused(h["carry"], moments[0], h["fresh"] * fused(h["weight_decay"], p, g))
    return fused(-h["lr"], m, p), (m,)


def nesterov(p: Tensor, g: Tensor, moments: Moments, h: Numbers) -> tuple[Tensor, Moments]:
    """With momentum, looking ahead."""
    d = fused(h["weight_decay"], p, g)
    m = fused(h["carry"], moments[0], h["fresh"] * d)
    return fused(-h["lr"], fused(h["momentum"], m, d), p), (m,)


def adamw(p: Tensor, g: Tensor, moments: Moments, h: Numbers) -> tuple[Tensor, Moments]:
    """Adam with decoupled weight decay."""
    m = fused(h["beta1"], moments[0], h["rest1"] * g)
    v = fused(h["beta2"], moments[1], fused(h["rest2"] * g, g, SMALLEST_SQUARE))
    denominator = fused(h["inverse_root"], root(v), h["eps"])
    return fused(-h["step_size"] * m, torch.ones_like(denominator) / denominator, p * h["keep"]), (m, v)


def lion(p: Tensor, g: Tensor, moments: Moments, h: Numbers) -> tuple[Tensor, Moments]:
    """The sign of a mean."""
    c = fused(h["beta1"], moments[0], h["rest1"] * g)
    return fused(-h["lr"], torch.sign(c), p * h["keep"]), (fused(h["beta2"], moments[0], h["rest2"] * g),)


def root(x: Tensor) -> Tensor:
    """The correctly rounded square root of float32 x >= 0. (torch.sqrt is not correctly rounded on every CPU.)"""
    return x.double().sqrt().float()


def stored_root(x: Tensor, roots: int) -> Tensor:
    """What is stored of x >= 0: itself (0), its root (1), or close to its fourth root (2).

    The second root halves the bits of the first as an integer, exponent and mantissa alike: within 7 % of a root, rising like one, and
    undone but for the last bit. What 4 bits keep of it is as good, and it costs one operation.
    """
    if roots == 0:
        return x
    r = root(x)
    return r if roots == 1 else torch.where(r > 0, ((r.view(torch.int32) >> 1) + HALF_BITS).view(torch.float32), 0.0)


def from_stored_root(y: Tensor, roots: int) -> Tensor:
    """The inverse of `stored_root`; rounding aside, since a square is rounded."""
    if roots == 0:
        return y
    r = y if roots == 1 else ((y.contiguous().view(torch.int32) - HALF_BITS).clamp(min=0) << 1).view(torch.float32)
    return r * r


SGD_NUMBERS = ("factor", "lr", "momentum", "carry", "fresh", "weight_decay")
MEANS = ("factor", "keep", "beta1", "rest1", "beta2", "rest2")
RULES = {
    rule.name: rule
    for rule in (
        Rule("sgd", sgd, (), (), SGD_NUMBERS),
        Rule("sgdm", sgdm, (Role.MOMENT1,), ("momentum_buffer",), SGD_NUMBERS),
        Rule("nesterov", nesterov, (Role.MOMENT1,), ("momentum_buffer",), SGD_NUMBERS),
        Rule("adamw", adamw, (Role.MOMENT1, Role.MOMENT2), ("exp_avg", "exp_avg_sq"), (*MEANS, "step_size", "inverse_root", "eps")),
        Rule("lion", lion, (Role.MOMENT1,), ("exp_avg",), (*MEANS, "lr")),
    )
}
