"""A rounding function from the definition, and small networks with their simulated step computed by hand, as references."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import batch_norm, conv2d, linear, relu

from paredown import Plan


@dataclass(frozen=True)
class Float:
    """A float without infinities: mantissa bits, exponents of the smallest and the largest binade, and what larger values become."""

    text: str
    mantissa_bits: int
    low: int
    high: int
    past: str

    @property
    def largest(self) -> float:
        return 2.0**self.high * (2 - 2.0**-self.mantissa_bits)

    def __call__(self, x: Tensor) -> Tensor:
        """To nearest, ties away from zero, by the definition in float64."""
        a = x.detach().double().abs()
        exponent = torch.frexp(a).exponent.double() - 1
        step = torch.exp2(exponent.clamp(min=self.low) - self.mantissa_bits)
        rounded = (a / step + 0.5).floor() * step
        end = self.largest if self.past == "saturate" else torch.inf
        return torch.where(rounded > self.largest, end, rounded).copysign(x.double()).float()

    def rule(self, plan: Plan, key: str) -> Plan:
        """`plan` with this format for `key`."""
        return plan.set(key, self.text, rounding="nearest_away", overflow=self.past)


FORWARD = Float("e4m3b11f", 3, -10, 4, "saturate")
BACKWARD = Float("e5m2f", 2, -14, 16, "nonfinite")
HIGH = Float("e6m9f", 9, -30, 32, "nonfinite")
WIDE = Float("e6m9f", 9, -30, 32, "saturate")


def vjp(function: Callable[..., Tensor], *inputs: Tensor, given: Tensor) -> tuple[Tensor, ...]:
    """The gradients of one operation alone, at these inputs."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    return torch.autograd.grad(function(*leaves), leaves, given)


class Forked(nn.Module):
    """conv, norm, relu, a sum that takes the convolution's output again, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.conv, self.bn, self.relu = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()
        self.fc = nn.Linear(4 * 6 * 6, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        return self.fc((self.relu(self.bn(x)) + x).flatten(1))


def _norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return batch_norm(x, None, None, weight, bias, training=True)


@dataclass(frozen=True)
class Roundings:
    """The roundings of activations, errors, weights and gradients."""

    activation: Callable[[Tensor], Tensor]
    error: Callable[[Tensor], Tensor]
    weight: Callable[[Tensor], Tensor]
    gradient: Callable[[Tensor], Tensor]


def forked_step(net: Forked, x: Tensor, sent: Tensor, by: Roundings, *, sums: bool = False) -> tuple[Tensor, dict[str, Tensor]]:
    """Output and gradients of a `Forked` net whose output's gradient is `sent`, operation by operation."""
    q, e, w = by.activation, by.error, {name: by.weight(p) for name, p in net.named_parameters()}
    branch, total = (lambda g: g, e) if sums else (e, lambda g: g)
    x = q(x)
    a = q(conv2d(x, w["conv.weight"], w["conv.bias"]))
    b = q(_norm(a, w["bn.weight"], w["bn.bias"]))
    c = q(relu(b))
    d = q(c + a)
    out = q(linear(d.flatten(1), w["fc.weight"], w["fc.bias"]))
    g_out = e(sent)
    g_flat, g_fc, g_fc_bias = vjp(linear, d.flatten(1), w["fc.weight"], w["fc.bias"], given=g_out)
    g_d = total(branch(g_flat.view(d.shape)))
    g_c, g_a1 = total(branch(g_d)), branch(g_d)
    g_b = total(branch(g_c * (c > 0)))
    g_a2, g_bn, g_bn_bias = vjp(_norm, a, w["bn.weight"], w["bn.bias"], given=g_b)
    g_a = total(branch(g_a2) + g_a1)
    _, g_conv, g_conv_bias = vjp(conv2d, x, w["conv.weight"], w["conv.bias"], given=g_a)
    found = {"conv.weight": g_conv, "conv.bias": g_conv_bias, "bn.weight": g_bn, "bn.bias": g_bn_bias, "fc.weight": g_fc}
    return out, {name: by.gradient(g) for name, g in {**found, "fc.bias": g_fc_bias}.items()}


def paper_plan() -> Plan:
    """The mixed-precision paper's formats for every tensor, all low."""
    plan = Plan.uniform()
    for key, rounding in (("activation", FORWARD), ("error", BACKWARD), ("weight", FORWARD), ("gradient", HIGH)):
        plan = rounding.rule(plan, key)
    return plan


def step(model: nn.Module, x: Tensor, sent: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Output and gradients of one backward from the output's gradient `sent`."""
    model.zero_grad()
    out: Any = model(x)
    out.backward(sent)
    return out.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


PAPER = Roundings(FORWARD, BACKWARD, FORWARD, HIGH)


def sent_back(scale: float = 1.0) -> Tensor:
    """A gradient for the output of `Forked`."""
    return scale * torch.randn(2, 5, generator=torch.Generator().manual_seed(9))


def same(x: Tensor) -> Tensor:
    """The unmodified tensor."""
    return x.detach()
