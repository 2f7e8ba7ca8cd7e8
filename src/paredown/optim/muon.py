"""`Muon` updates matrices by an orthogonalized momentum and other parameters by AdamW, with low-bit state.

    adamw_params = embeddings_and_head(model)
    opt = Muon(model.parameters(), lr=0.02, adamw_lr=3e-4, adamw_params=adamw_params)
    opt = Muon([{"params": matrices, "lr": 0.02}, {"params": others, "rule": "adamw", "lr": 3e-4}])      the same by groups

A parameter has the rule of its group, "rule": "muon" or "adamw". A group without a rule is split in two: parameters of 2 dimensions that
are not in `adamw_params` are updated by Muon, and the rest, a group of its own in `param_groups`, by AdamW. Muon is for hidden layers:
name embeddings and the output layer in `adamw_params`, because their shapes do not tell them from other matrices.

Arguments, defaults and arithmetic of Muon are those of torch.optim.Muon, those of AdamW parameters (`adamw_...`) of torch.optim.AdamW;
formats are those of all optimizers of `paredown.optim`. State is the momentum ("moment1") of a Muon parameter, and both moments of the
others. A step decodes some rows of one parameter at a time; the orthogonalized update takes two bfloat16 copies of that parameter and two
squares of its shorter side. In tier "full" torch.optim.Muon and torch.optim.AdamW make the updates.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from paredown.errors import OptimError
from paredown.optim.base import MemoryOptions, Optimizer
from paredown.optim.optimizers import adamw_numbers, check_betas, check_numbers, lr_of
from paredown.optim.parameter_state import FROM_TIER
from paredown.optim.rules import RULES, Rule

ADJUSTMENTS = (None, "original", "match_rms_adamw")
MUON_RULES = ("muon", "adamw")
COEFFICIENTS = (3.4445, -4.7750, 2.0315)


@final
class _TorchOptimizers:
    """One optimizer made of torch.optim.Muon and torch.optim.AdamW, each with some parameter groups; they step together."""

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        kinds = {"muon": torch.optim.Muon, "adamw": torch.optim.AdamW}
        of_rule = {name: [group for group in groups if group["rule"] == name] for name in kinds}
        self._optimizers = {name: kinds[name](of) for name, of in of_rule.items() if of}
        made = {name: iter(optimizer.param_groups) for name, optimizer in self._optimizers.items()}
        self.param_groups = [next(made[group["rule"]]) for group in groups]
        self.state: Any = None

    def step(self) -> None:
        for optimizer in self._optimizers.values():
            optimizer.state = self.state
            optimizer.step()


@final
class Muon(Optimizer):
    """An optimizer that updates matrices by Muon and all other parameters by AdamW, with state in low-bit formats.

    `adjust_lr_fn`: the learning rate of a matrix of shape (A, B) is lr * sqrt(max(1, A / B)) with "original" (or None), and
    0.2 * lr * sqrt(max(A, B)) with "match_rms_adamw", for which the learning rate and weight decay of AdamW are right.
    `adamw_lr`: the learning rate of AdamW parameters; it may be left out with "match_rms_adamw", where it is `lr`.
    `adamw_weight_decay`: None means `weight_decay`. `adamw_params`: parameters of 2 dimensions to be updated by AdamW all the same.
    """

    rule_name, torch_class = "muon", _TorchOptimizers

    def __init__(
        self, params: Any, lr: float | Tensor = 1e-3, weight_decay: float = 0.1, momentum: float = 0.95, nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = COEFFICIENTS, eps: float = 1e-7, ns_steps: int = 5,
        adjust_lr_fn: str | None = None, *, adamw_lr: float | Tensor | None = None, adamw_betas: tuple[float, float] = (0.9, 0.999),
        adamw_eps: float = 1e-8, adamw_weight_decay: float | None = None, adamw_params: Iterable[Tensor] = (),
        tier: str | None = None, weight: Any = FROM_TIER, residue: Any = FROM_TIER, moment1: Any = FROM_TIER,
        moment2: Any = FROM_TIER, gradient: Any = FROM_TIER, rounding: Mapping[str, str] | None = None, release: bool = False,
        microbatches: int = 1, seed: int = 0,
    ) -> None:  # fmt: skip
        defaults = {
            "lr": lr, "weight_decay": weight_decay, "momentum": momentum, "nesterov": nesterov, "ns_coefficients": ns_coefficients,
            "eps": eps, "ns_steps": ns_steps, "adjust_lr_fn": adjust_lr_fn,
        }  # fmt: skip
        self._adamw = {"lr": adamw_lr, "betas": adamw_betas, "eps": adamw_eps, "weight_decay": adamw_weight_decay}
        self._adamw_params = list(adamw_params)
        memory = MemoryOptions(tier, weight, residue, moment1, moment2, gradient, rounding, release, microbatches, seed)
        super().__init__(params, defaults, memory)

    # --- groups -----------------------------------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group; one without a "rule" is split into a group for Muon and a group for AdamW."""
        num_groups, num_entries = len(self.param_groups), len(self.entries)
        try:
            for group in self._split(param_group):
                if group["rule"] == "adamw":
                    self._complete(group)
                super().add_param_group(group)
                self._check_matrices(self.param_groups[-1])
        except Exception:
            del self.param_groups[num_groups:]
            self._remove_entries(num_entries)
            raise

    def _split(self, group: dict[str, Any]) -> list[dict[str, Any]]:
        """Return a group without a "rule" as one or two groups: its matrices for Muon, and its other parameters for AdamW."""
        rule = group.get("rule")
        if rule is not None and rule not in MUON_RULES:
            raise OptimError(f"rule {rule!r} of a group is unknown. Allowed: {', '.join(MUON_RULES)}, or none, to choose by shape.")
        given: Any = group["params"]
        params: Any = [given] if isinstance(given, Tensor) else given if isinstance(given, set) else list(given)
        if rule is not None or not params or isinstance(given, set):  # torch refuses sets, which have no order
            return [{**group, "rule": rule or "muon", "params": params}]
        rules = [self._rule_by_shape(item[1] if isinstance(item, tuple) else item) for item in params]
        parts = {name: [item for item, rule in zip(params, rules, strict=True) if rule == name] for name in MUON_RULES}
        made = [{**group, "rule": name, "params": part} for name, part in parts.items() if part]
        return [part | ({"lr": self._adamw_lr(part)} if part["rule"] == "adamw" else {}) for part in made]

    def _rule_by_shape(self, parameter: Any) -> str:
        is_matrix = isinstance(parameter, Tensor) and parameter.dim() == 2 and not parameter.is_complex()
        return "muon" if is_matrix and not any(parameter is other for other in self._adamw_params) else "adamw"

    def _complete(self, group: dict[str, Any]) -> None:
        """Add to a group of the rule "adamw" those of AdamW's hyperparameters that it lacks."""
        decay = self._adamw["weight_decay"]
        group.setdefault("weight_decay", self.defaults["weight_decay"] if decay is None else decay)
        for name in ("betas", "eps"):
            group.setdefault(name, self._adamw[name])
        if "lr" not in group:
            group["lr"] = self._adamw_lr(group)

    def _adamw_lr(self, group: Mapping[str, Any]) -> Any:
        """Return the learning rate for AdamW in a group whose `lr` is Muon's; raise OptimError if the user gave none."""
        if self._adamw["lr"] is not None:
            return self._adamw["lr"]
        if group.get("adjust_lr_fn", self.defaults["adjust_lr_fn"]) == "match_rms_adamw":
            return group.get("lr", self.defaults["lr"])
        raise OptimError(
            f"{len(group['params'])} parameters that are not matrices of hidden layers are updated by AdamW, and lr="
            f"{group.get('lr', self.defaults['lr'])} is that of Muon, which is usually larger: give adamw_lr, such as 3e-4, or "
            "adjust_lr_fn='match_rms_adamw', with which both take lr."
        )

    def _check_matrices(self, group: Mapping[str, Any]) -> None:
        """Raise OptimError if a group for Muon has a parameter that is not a matrix, or that is sharded over processes."""
        for parameter in group["params"] if group["rule"] == "muon" else ():
            name = self._by_id[id(parameter)].name
            if parameter.dim() != 2:
                raise OptimError(
                    f"{name} has shape {tuple(parameter.shape)}, and Muon updates matrices. Give its group 'rule': 'adamw', or leave "
                    "the rule out, to update all that are not matrices by AdamW."
                )
            if isinstance(parameter, DTensor) and group["tier"] != "full":
                raise OptimError(
                    f"{name} is distributed by {parameter.placements}, and Muon orthogonalizes whole matrices. Give its group "
                    "'rule': 'adamw', or tier='full', which is torch.optim.Muon."
                )

    # --- what the driver asks for -----------------------------------------------------------------------------------------

    def rule_for(self, group: Mapping[str, Any]) -> Rule:
        """Return the update rule of a parameter group: Muon's or AdamW's, as its "rule" says."""
        return RULES[group["rule"]]

    def check_hyper(self, group: Mapping[str, Any]) -> None:
        """Raise ValueError if a hyperparameter of the parameter group is out of range."""
        check_numbers(group, "lr", "eps", "weight_decay")
        if group["rule"] == "adamw":
            return check_betas(group["betas"])
        check_numbers(group, "momentum")
        if group["adjust_lr_fn"] not in ADJUSTMENTS:
            raise ValueError(f"Invalid adjust_lr_fn: {group['adjust_lr_fn']!r}; allowed are 'original' and 'match_rms_adamw'.")
        if len(group["ns_coefficients"]) != len(COEFFICIENTS) or not 0 <= group["ns_steps"] < 100:
            raise ValueError(
                f"Invalid ns_coefficients {group['ns_coefficients']} or ns_steps {group['ns_steps']}: 3 numbers, fewer than 100 steps."
            )
        return None

    def numbers(self, group: Mapping[str, Any], step: int, factor: float) -> dict[str, float]:
        """Return the hyperparameters of the group's rule at `step` (from 1) by name; `factor` multiplies the gradients."""
        if group["rule"] == "adamw":
            return adamw_numbers(group, step, factor)
        lr, (a, b, c) = lr_of(group), (float(n) for n in group["ns_coefficients"])
        own = {name: float(group[name]) for name in ("momentum", "nesterov", "eps")}
        match_rms = float(group["adjust_lr_fn"] == "match_rms_adamw")
        others = {"steps": float(group["ns_steps"]), "match_rms": match_rms, "keep": 1.0 - lr * float(group["weight_decay"])}
        return {"factor": factor, "lr": lr, "a": a, "b": b, "c": c, **own, **others}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the result of `state_dict()` of an optimizer with the same groups, or that of torch.optim.Muon."""
        groups = state_dict.get("param_groups", ()) if isinstance(state_dict, Mapping) else ()
        for i, (saved, group) in enumerate(zip(groups, self.param_groups, strict=False)):
            if saved.get("rule", group["rule"]) != group["rule"]:
                raise OptimError(
                    f"group {i} of the state was updated by {saved['rule']}, and here by {group['rule']}: make the optimizer with the "
                    "groups and adamw_params it was saved with."
                )
        super().load_state_dict(state_dict)


def embeddings_and_head(model: nn.Module) -> list[Tensor]:
    """Return the weights of a model's embeddings and output layer, for the argument `adamw_params` of Muon.

    The output layer is `model.get_output_embeddings()`, as in Hugging Face's models, or else the model's last nn.Linear.
    """
    modules = list(model.modules())
    found = [m.weight for m in modules if isinstance(m, (nn.Embedding, nn.EmbeddingBag))]
    head = getattr(model, "get_output_embeddings", lambda: None)()
    heads = [m for m in modules if isinstance(m, nn.Linear)][-1:] if head is None else [head]
    found += [m.weight for m in heads]
    return list({id(p): p for p in found}.values())
