"""Footprints of weights, gradients and optimizer state against the storages of a real model and optimizer."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

import paredown as pare
from paredown.formats.catalog import TIERS
from paredown.formats.format import Format
from paredown.plan.footprint import footprint
from paredown.plan.plan import Plan
from paredown.predict.trace_step import trace_step
from paredown.roles import Role
from tests.predict.steps import peak_bytes, step_of
from tests.predict.test_trace import Parts

MOMENTS = {Role.MOMENT1: ("exp_avg", "momentum_buffer"), Role.MOMENT2: ("exp_avg_sq",)}


def held(tensors: Iterable[Tensor]) -> int:
    """Bytes of the storages behind tensors, each once."""
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def measured(model: torch.nn.Module, optimizer: pare.optim.AdamW) -> dict[Role, int]:
    """Bytes by role after a step, before gradients are freed."""
    states = [(name, tensor) for state in optimizer.state.values() for name, tensor in state.items() if isinstance(tensor, Tensor)]
    found = {role: held(t for name, t in states if name.partition(".")[0] in names) for role, names in MOMENTS.items()}
    found[Role.RESIDUE] = held(t for name, t in states if name == "residue")
    packed = [t for name, t in states if name.startswith("weight.")]
    found[Role.WEIGHT] = held([*model.parameters(), *packed])
    accumulators = [entry.gradient.packed for entry in optimizer.entries if entry.gradient is not None]
    parts = [t for packed in accumulators for t in packed.parts.tensors()]
    plain = [e.parameter.grad for e in optimizer.entries if e.gradient is None and e.parameter.grad is not None]
    found[Role.GRADIENT] = held([*parts, *plain])
    return {role: nbytes for role, nbytes in found.items() if nbytes}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("tier", [tier for tier in TIERS if tier != "full"])
def test_a_step_holds_what_was_predicted(tier: str, dtype: torch.dtype) -> None:
    model, batch, loss = step_of("gpt", 2)
    model = model.to(dtype)
    plan = Plan.preset(tier)
    found = footprint(trace_step(model, batch, loss=loss, optimizer="adamw", device="cpu"), plan)
    with pare.apply(plan, model):
        optimizer = pare.optim.AdamW(model.parameters())
        again = footprint(trace_step(model, batch, loss=loss, optimizer=optimizer, device="cpu"), plan)
        loss(model(batch[0]), batch[1]).backward()
        optimizer.step()
        real = measured(model, optimizer)
    assert real == {role: found.by_role[role] for role in real} == {role: again.by_role[role] for role in real}
    assert found.model_bytes == sum(real.values())


@pytest.mark.parametrize("name", ["resnet18", "vit", "lstm", "unet", "convnext"])
def test_weights_after_apply_are_what_was_predicted(name: str) -> None:
    model, batch, loss = step_of(name, 2)
    plan = Plan.uniform(weight="int8/64@e8m0")
    predicted = footprint(trace_step(model, batch, loss=loss, device="cpu"), plan).by_role[Role.WEIGHT]
    shapes = [p.shape for p in model.parameters()]
    by_hand = sum(Format.parse("int8/64@e8m0").nbytes(s) if len(s) > 1 and s.numel() >= 4096 else 4 * s.numel() for s in shapes)
    with pare.apply(plan, model) as session:
        assert predicted == by_hand == session.weight_bytes + held(model.parameters())
        loss(model(batch[0]), batch[1]).backward()
        assert predicted == session.weight_bytes + held(model.parameters()), "and after a step"


def network(side: int) -> torch.nn.Module:
    """Three layers whose weights are most of a step on few rows."""
    wide = {name: torch.nn.Linear(side, side, bias=False) for name in ("one", "two", "three")}
    return Parts(lambda self, x: self.three(self.two(self.one(x).relu()).sigmoid()), **wide)


@pytest.mark.parametrize("text", ["int8/64@e8m0", "bf16"])
@pytest.mark.parametrize("name", ["wide", "gpt", "vit"])
def test_the_peak_of_a_step_on_packed_weights_is_the_predicted_one(name: str, text: str) -> None:
    wide = network(1024), (torch.randn(16, 1024), torch.zeros(16, dtype=torch.int64)), cross_entropy
    model, batch, loss = wide if name == "wide" else step_of(name, 4)
    plan = Plan.uniform(weight=text)
    foot = footprint(trace_step(model, batch, loss=loss, device="cpu"), plan)
    assert name != "wide" or foot.low_bytes < foot.baseline.low_bytes
    with pare.apply(plan, model):
        real = peak_bytes(model, batch, loss)
    assert foot.low_bytes - sum(foot.by_role.get(role, 0) for role in (Role.WEIGHT, Role.BUFFER, Role.INPUT)) == real
