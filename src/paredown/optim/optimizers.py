"""SGD, AdamW and Lion take the arguments and defaults of torch.optim, and formats of the tensors that they store.

    paredown.apply(paredown.Plan.preset("lpmm"), model)                  # weights are stored in 8 bits
    opt = paredown.optim.AdamW(model.parameters(), lr=3e-4)              # and so are moments and gradient accumulators
    loss.backward(); opt.step(); opt.zero_grad()

Arguments that torch.optim does not have:
* `tier`, a named set of formats: "full" (nothing is packed), "safe", "fine_tune", "half", "lpmm", "lpmm4" (`formats/catalog.py`), or None:
  the plan of the model's session (applied before or after), or "full" if there is no session.
* `weight`, `residue`, `moment1`, `moment2`, `gradient`: formats that override those of the tier; None leaves that tensor unmodified.
* `rounding`: {"weight": "nearest_even", ...}, which overrides the defaults.
* `release`: update each parameter inside backward and store no gradient. Clipping and scaling of gradients then raise OptimError.
* `microbatches`: K backward passes per update. Small updates of 8-bit weights underflow; K gradients are added up in the accumulator, whose
  scale adapts to the gradient, and the weights get one larger update. Scale the learning rate up with the batch: by K for SGD, by the
  square root of K for AdamW and Lion.
* `seed`: the seed of stochastic rounding.
All except the last three can also be set for a parameter group.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import sqrt
from typing import Any, final

import torch
from torch import Tensor

from paredown.errors import OptimError
from paredown.optim.base import MemoryOptions, Optimizer
from paredown.optim.parameter_state import FROM_TIER
from paredown.optim.rules import RULES, Rule


@final
class SGD(Optimizer):
    """SGD, optionally with (Nesterov) momentum, with the arguments of torch.optim.SGD, and formats to store its tensors in."""

    rule_name, torch_class = "sgdm", torch.optim.SGD

    def __init__(
        self, params: Any, lr: float | Tensor = 1e-3, momentum: float = 0, dampening: float = 0, weight_decay: float = 0,
        nesterov: bool = False, *, maximize: bool = False, foreach: bool | None = None, differentiable: bool = False,
        fused: bool | None = None, tier: str | None = None, weight: Any = FROM_TIER, residue: Any = FROM_TIER,
        moment1: Any = FROM_TIER, gradient: Any = FROM_TIER, rounding: Mapping[str, str] | None = None, release: bool = False,
        microbatches: int = 1, seed: int = 0,
    ) -> None:  # fmt: skip
        torch_options = {"foreach": foreach, "differentiable": differentiable, "fused": fused}
        defaults = {"lr": lr, "momentum": momentum, "dampening": dampening, "weight_decay": weight_decay, "nesterov": nesterov}
        memory = MemoryOptions(tier, weight, residue, moment1, None, gradient, rounding, release, microbatches, seed)
        super().__init__(params, {**defaults, "maximize": maximize, **torch_options}, memory)

    def rule_for(self, group: Mapping[str, Any]) -> Rule:
        """Return the rule of a parameter group: SGD without momentum, with momentum, or with Nesterov momentum."""
        return RULES["sgd" if not group["momentum"] else "nesterov" if group["nesterov"] else "sgdm"]

    def check_hyper(self, group: Mapping[str, Any]) -> None:
        """Raise ValueError if a hyperparameter of the group is out of range."""
        check_numbers(group, "lr", "momentum", "weight_decay")
        if group["nesterov"] and (group["momentum"] <= 0 or group["dampening"] != 0):
            raise ValueError("Nesterov momentum requires a momentum and zero dampening")

    def numbers(self, group: Mapping[str, Any], step: int, factor: float) -> dict[str, float]:
        """Return the update rule's hyperparameters at `step` (from 1) by name; `factor` multiplies the gradients."""
        momentum = float(group["momentum"])
        return {
            "factor": factor, "lr": lr_of(group), "weight_decay": float(group["weight_decay"]), "momentum": momentum,
            "carry": 0.0 if step == 1 else momentum, "fresh": 1.0 if step == 1 else 1.0 - float(group["dampening"]),
        }  # fmt: skip


@final
class AdamW(Optimizer):
    """Adam with decoupled weight decay, with the arguments of torch.optim.AdamW, and formats to store its tensors in."""

    rule_name, torch_class = "adamw", torch.optim.AdamW

    def __init__(
        self, params: Any, lr: float | Tensor = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
        weight_decay: float = 1e-2, amsgrad: bool = False, *, maximize: bool = False, foreach: bool | None = None,
        capturable: bool = False, differentiable: bool = False, fused: bool | None = None, tier: str | None = None,
        weight: Any = FROM_TIER, residue: Any = FROM_TIER, moment1: Any = FROM_TIER, moment2: Any = FROM_TIER,
        gradient: Any = FROM_TIER, rounding: Mapping[str, str] | None = None, release: bool = False, microbatches: int = 1,
        seed: int = 0,
    ) -> None:  # fmt: skip
        torch_options = {
            "amsgrad": amsgrad,
            "foreach": foreach,
            "capturable": capturable,
            "differentiable": differentiable,
            "fused": fused,
        }
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "maximize": maximize}
        memory = MemoryOptions(tier, weight, residue, moment1, moment2, gradient, rounding, release, microbatches, seed)
        super().__init__(params, {**defaults, **torch_options}, memory)

    def check_hyper(self, group: Mapping[str, Any]) -> None:
        """Raise ValueError if a hyperparameter of the group is out of range."""
        check_numbers(group, "lr", "eps", "weight_decay")
        check_betas(group["betas"])

    def numbers(self, group: Mapping[str, Any], step: int, factor: float) -> dict[str, float]:
        """Return the update rule's hyperparameters at `step` (from 1) by name; `factor` multiplies the gradients."""
        return adamw_numbers(group, step, factor)


@final
class Lion(Optimizer):
    """The optimizer Lion: p <- p (1 - lr decay) - lr sign(beta1 m + (1 - beta1) g), m <- beta2 m + (1 - beta2) g.

    Every weight changes by lr in each step: in an 8-bit format by a whole step of the format with probability lr / step. Choose lr at least
    1 % of that step (`opt.diagnostics()` reports how often values change), or tier "half" or "fine_tune".
    """

    rule_name, torch_class = "lion", None

    def __init__(
        self, params: Any, lr: float | Tensor = 1e-4, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.0, *,
        maximize: bool = False, tier: str | None = None, weight: Any = FROM_TIER, residue: Any = FROM_TIER, moment1: Any = FROM_TIER,
        gradient: Any = FROM_TIER, rounding: Mapping[str, str] | None = None, release: bool = False, microbatches: int = 1,
        seed: int = 0,
    ) -> None:  # fmt: skip
        defaults = {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize}
        rounding = {
            "moment1": "stochastic",
            **(rounding or {}),
        }  # it changes by 1 % per update, less than half a step of an 8-bit format
        memory = MemoryOptions(tier, weight, residue, moment1, None, gradient, rounding, release, microbatches, seed)
        super().__init__(params, defaults, memory)

    def check_hyper(self, group: Mapping[str, Any]) -> None:
        """Raise ValueError if a hyperparameter of the group is out of range."""
        check_numbers(group, "lr", "weight_decay")
        check_betas(group["betas"])

    def numbers(self, group: Mapping[str, Any], step: int, factor: float) -> dict[str, float]:
        """Return the update rule's hyperparameters at `step` (from 1) by name; `factor` multiplies the gradients."""
        return _numbers_of_means(group, factor)


def adamw_numbers(group: Mapping[str, Any], step: int, factor: float) -> dict[str, float]:
    """Return the hyperparameters of the rule "adamw" at `step` (from 1) by name; `factor` multiplies the gradients."""
    numbers = _numbers_of_means(group, factor)
    step_size, inverse_root = numbers["lr"] / (1.0 - numbers["beta1"] ** step), 1.0 / sqrt(1.0 - numbers["beta2"] ** step)
    return {**numbers, "step_size": step_size, "inverse_root": inverse_root, "eps": float(group["eps"])}


def _numbers_of_means(group: Mapping[str, Any], factor: float) -> dict[str, float]:
    lr, (beta1, beta2) = lr_of(group), (float(beta) for beta in group["betas"])
    rests = {"rest1": 1.0 - beta1, "rest2": 1.0 - beta2}
    return {"factor": factor, "lr": lr, "keep": 1.0 - lr * float(group["weight_decay"]), "beta1": beta1, "beta2": beta2, **rests}


def lr_of(group: Mapping[str, Any]) -> float:
    """Return the learning rate of a parameter group as a float; raise OptimError if it is a tensor on a GPU."""
    lr = group["lr"]
    if isinstance(lr, Tensor) and lr.device.type != "cpu":
        raise OptimError(
            f"lr is a tensor on {lr.device}: reading it would synchronize with the device in every step. Give a float or a tensor on the "
            "CPU; changing it recompiles nothing."
        )
    return float(lr)


def check_numbers(group: Mapping[str, Any], *names: str) -> None:
    """Raise ValueError, as torch.optim does, if a hyperparameter in `names` is negative or has several values."""
    for name in names:
        value = group[name]
        if isinstance(value, Tensor) and value.numel() != 1:
            raise ValueError(f"Tensor {name} must be 1-element")
        if not (isinstance(value, Tensor) and value.is_cuda) and not float(value) >= 0.0:
            raise ValueError(f"Invalid {name}: {value}; it has to be at least 0.")


def check_betas(betas: Any) -> None:
    """Raise ValueError if `betas` are not two numbers in [0, 1)."""
    if len(betas) != 2 or not all(0.0 <= float(beta) < 1.0 for beta in betas):
        raise ValueError(f"Invalid betas: {betas}; each has to be at least 0 and below 1.")
