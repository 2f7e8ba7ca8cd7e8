"""Update rules are pure float32 functions that return the next parameter and moments.

A multiply-add is rounded once (`fused`), every other operation once each, and division is multiplication by a reciprocal, so that kernels
return the same bits. `h` holds the numbers of a step as float32, in the order of `hyper_names`; the gradient is already multiplied by
`factor`. Expressions in brackets are rounded first.

    sgd        d = g + weight_decay p                                          p' = p - lr d
    sgdm       d = g + weight_decay p;  m' = carry m + (fresh d)               p' = p - lr m'
    nesterov   d and m' as in sgdm                                             p' = p - lr (d + momentum m')
    adamw      m' = beta1 m + (rest1 g);  v' = beta2 v + ((rest2 g) g + 2^-100);
               e = 1 / (root(v') inverse_root + eps)                           p' = (p keep) - (step_size m') e
    lion       c = beta1 m + (rest1 g);  m' = beta2 m + (rest2 g)              p' = (p keep) - lr sign(c)

    muon       m' = momentum m + rest g;  u = momentum m' + rest g (nesterov), or m';
               O = newton_schulz(u)                                            p' = p keep - (lr ratio) O

carry is momentum, and 0 on the first step of a tensor, where fresh is 1: torch's first m' is d. keep = 1 - lr weight_decay,
rest = 1 - beta, step_size = lr / (1 - beta1^t), inverse_root = 1 / root(1 - beta2^t). 2^-100 is far below
eps^2, and avoids a special case for the root of 0.

muon needs the whole matrix: `look_ahead`, `newton_schulz` and `step_along` are its three parts, with the operations of torch.optim.Muon on
numbers that are not rounded to float32, so that unpacked float32 state gives torch's bits. newton_schulz brings the singular values of u
near 1, in bfloat16: X = u / |u|, then `steps` times X <- a X + (b A + c A A) X with A = X X^T, for the shorter side of u as rows.

>>> rule = RULES["sgdm"]
>>> h = rule.numbers((1.0, 0.5, 0.9, 0.9, 1.0, 0.0))
>>> rule.update(torch.ones(2), torch.ones(2), (torch.zeros(2),), h)
(tensor([0.5000, 0.5000]), (tensor([1., 1.]),))
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import sqrt
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
    """An optimizer's update rule: its function, and the names of its hyperparameters and of its moments, with their roles."""

    name: str
    update: Update
    roles: tuple[Role, ...]
    names: tuple[str, ...]
    hyper_names: tuple[str, ...]
    is_of_matrix: bool = False  # an update of one value depends on the whole matrix

    def numbers(self, hyper: Sequence[float]) -> Numbers:
        """Return hyperparameters, given in the order of `hyper_names`, by name, rounded to float32 (not for Muon's rule)."""
        if len(hyper) != len(self.hyper_names):
            raise OptimError(f"{self.name} reads {', '.join(self.hyper_names)}: {len(self.hyper_names)} numbers, not {len(hyper)}.")
        return dict(zip(self.hyper_names, hyper if self.is_of_matrix else map(as_float32, hyper), strict=True))


def as_float32(number: float) -> float:
    """Return a Python number rounded to float32."""
    try:
        return unpack("f", pack("f", number))[0]
    except OverflowError:
        return float("inf") if number > 0 else float("-inf")


def fused(a: Tensor | float, b: Tensor, c: Tensor | float) -> Tensor:
    """Return a * b + c in float32, rounded once.

    The product is exact in float64, and the sum is rounded to float64. The second rounding, to float32, can differ from a single one only
    at ties and for subnormals. There the sum is rounded to odd (its last bit is set if it is inexact), which makes double rounding exact.
    """
    product, c = b.double() * a, torch.as_tensor(c, dtype=torch.float64, device=b.device)
    total = product + c
    rounded = total.float()
    is_tie_or_subnormal = (total.view(torch.int64) & 0x1FFFFFFF == 0x10000000) | ((rounded.abs() < 2.0**-125) & (total != 0))
    if bool(is_tie_or_subnormal.any()):
        where = is_tie_or_subnormal
        rounded[where] = _to_odd(product[where], c.expand_as(total)[where], total[where]).float()
    return rounded


def _to_odd(a: Tensor, b: Tensor, total: Tensor) -> Tensor:
    """Return a + b in float64, rounded to odd; `total` is the sum rounded to nearest.

    Odd means that the last bit is set if the sum is inexact, so that rounding it to float32 gives the correctly rounded sum.
    """
    back = total - a
    rest = (a - (total - back)) + (b - back)  # the exact rounding error of `total`
    bits = total.view(torch.int64)
    outward = torch.where((rest > 0) == (total > 0), 1, -1)
    missing = (rest != 0) & (bits & 1 == 0) & total.isfinite()
    return torch.where(missing, bits + outward, bits).view(torch.float64)


def sgd(p: Tensor, g: Tensor, moments: Moments, h: Numbers) -> tuple[Tensor, Moments]:
    """Return parameter `p` after a step of SGD without momentum, and no moments; `g`: gradient, `h`: hyperparameters."""
    return fused(-h["lr"], fused(h["weight_decay"], p, g), p), ()


def sgdm(p: Tensor, g: Tensor, moments: Moments, h: Numbers) -> tuple[Tensor, Moments]:
    """Return parameter `p` and momentum after a step of SGD with momentum; `g`: gradient, `h`: hyperparameters."""
    m = fused(h["carry"], moments[0], h["fresh"] * fused(h["weight_decay"], p, g))
    return fused(-h["lr"], m, p), (m,)


def nesterov(p: Tensor, g: Tensor, moments: Moments, h: Numbers) -> tuple[Tensor, Moments]:
    """Return parameter `p` and momentum after a step of SGD with Nesterov momentum; `g`: gradient, `h`: hyperparameters."""
    d = fused(h["weight_decay"], p, g)
    m = fused(h["carry"], moments[0], h["fresh"] * d)
    return fused(-h["lr"], fused(h["momentum"], m, d), p), (m,)


def adamw(p: Tensor, g: Tensor, moments: Moments, h: Numbers) -> tuple[Tensor, Moments]:
    """Return parameter `p` and moments after a step of Adam with decoupled decay; `g`: gradient, `h`: hyperparameters."""
    m = fused(h["beta1"], moments[0], h["rest1"] * g)
    v = fused(h["beta2"], moments[1], fused(h["rest2"] * g, g, SMALLEST_SQUARE))
    denominator = fused(h["inverse_root"], root(v), h["eps"])
    return fused(-h["step_size"] * m, torch.ones_like(denominator) / denominator, p * h["keep"]), (m, v)


def lion(p: Tensor, g: Tensor, moments: Moments, h: Numbers) -> tuple[Tensor, Moments]:
    """Return parameter `p` and momentum after a step of Lion; `g`: gradient, `h`: hyperparameters."""
    c = fused(h["beta1"], moments[0], h["rest1"] * g)
    return fused(-h["lr"], torch.sign(c), p * h["keep"]), (fused(h["beta2"], moments[0], h["rest2"] * g),)


def muon(p: Tensor, g: Tensor, moments: Moments, h: Numbers) -> tuple[Tensor, Moments]:
    """Return the matrix `p` and its momentum after a step of Muon; `g`: gradient, `h`: hyperparameters.

    `reference.update` calls the three functions that this one calls: `look_ahead` and `step_along` on some rows at a time.
    """
    m, u = look_ahead(g, moments[0], h)
    return step_along(newton_schulz(u.bfloat16(), h), p, h, p.shape), (m,)


def look_ahead(g: Tensor, m: Tensor, h: Numbers) -> tuple[Tensor, Tensor]:
    """Return Muon's next momentum, and the matrix to orthogonalize: that momentum, or its Nesterov sum with the gradient."""
    m = torch.lerp(m, g, 1 - h["momentum"])
    return m, torch.lerp(g, m, h["momentum"]) if h["nesterov"] else m


def newton_schulz(x: Tensor, h: Numbers) -> Tensor:
    """Return `x` with its singular values replaced by values near 1; `h` has the number of iterations and coefficients.

    `x`, bfloat16, is overwritten. If the caller keeps no reference to it, one matrix of its size and two squares of its shorter side are
    allocated beside it.
    """
    is_tall = x.shape[0] > x.shape[1]
    x = x.T if is_tall else x
    x.div_(x.norm().clamp(min=h["eps"]))
    for _ in range(int(h["steps"])):
        gram = x @ x.T  # (short, short)
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=h["b"], alpha=h["c"]), x, beta=h["a"])
    return x.T if is_tall else x


def step_along(direction: Tensor, p: Tensor, h: Numbers, shape: Sequence[int]) -> Tensor:
    """Return `p`, some rows of a parameter, after weight decay and a step along `direction`, the same rows of Muon's update.

    The step's length is lr root(max(1, rows / cols)), or 0.2 lr root(max(rows, cols)) if `match_rms`; `shape`: the whole parameter's.
    """
    rows, cols = shape
    ratio = 0.2 * sqrt(max(rows, cols)) if h["match_rms"] else sqrt(max(1, rows / cols))
    return torch.add(p * h["keep"], direction, alpha=-h["lr"] * ratio)


def root(x: Tensor) -> Tensor:
    """Return the square root of float32 x >= 0, correctly rounded, which torch.sqrt is not on every CPU."""
    return x.double().sqrt().float()


def stored_root(x: Tensor, roots: int) -> Tensor:
    """Return what is stored for a second moment x >= 0: x if `roots` is 0, its square root if 1, about its fourth root if 2.

    The second root halves the bit pattern of the first as an integer: within 7 % of a true root, monotone, and invertible except for the
    last bit. In 4 bits it is as accurate as a true root, and it takes one operation.
    """
    if roots == 0:
        return x
    r = root(x)
    return r if roots == 1 else torch.where(r > 0, ((r.view(torch.int32) >> 1) + HALF_BITS).view(torch.float32), 0.0)


def from_stored_root(y: Tensor, roots: int) -> Tensor:
    """Return the second moment for which `stored_root` has returned y with the same `roots`, up to rounding."""
    if roots == 0:
        return y
    r = y if roots == 1 else ((y.contiguous().view(torch.int32) - HALF_BITS).clamp(min=0) << 1).view(torch.float32)
    return r * r


SGD_NUMBERS = ("factor", "lr", "momentum", "carry", "fresh", "weight_decay")
MEANS = ("factor", "keep", "beta1", "rest1", "beta2", "rest2")
MUON_NUMBERS = ("factor", "keep", "lr", "momentum", "nesterov", "match_rms", "a", "b", "c", "eps", "steps")
RULES = {
    rule.name: rule
    for rule in (
        Rule("sgd", sgd, (), (), SGD_NUMBERS),
        Rule("sgdm", sgdm, (Role.MOMENT1,), ("momentum_buffer",), SGD_NUMBERS),
        Rule("nesterov", nesterov, (Role.MOMENT1,), ("momentum_buffer",), SGD_NUMBERS),
        Rule("adamw", adamw, (Role.MOMENT1, Role.MOMENT2), ("exp_avg", "exp_avg_sq"), (*MEANS, "step_size", "inverse_root", "eps")),
        Rule("lion", lion, (Role.MOMENT1,), ("exp_avg",), (*MEANS, "lr")),
        Rule("muon", muon, (Role.MOMENT1,), ("momentum_buffer",), MUON_NUMBERS, is_of_matrix=True),
    )
}
