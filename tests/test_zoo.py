"""Small versions of all networks of the zoo: traced, trained in 8 bits, gradients beside those of the unmodified network."""

from __future__ import annotations

import sys
from copy import deepcopy
from math import sqrt
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import paredown as pare

FOLDER = Path(__file__).parent.parent / "benchmarks"
INT8_ERROR = 0.0068  # root mean square of the rounding errors of normal numbers in blocks of 64, in standard deviations
SAFETY = 3.0
STEP = 0.02  # length of an update


def load() -> Any:
    """The modules of the zoo, which import each other by their names."""
    before = set(sys.modules)
    sys.path.insert(0, str(FOLDER))
    try:
        import zoo_networks  # type: ignore[import-not-found]
    finally:
        sys.path.remove(str(FOLDER))
        for name in set(sys.modules) - before:
            if (getattr(sys.modules[name], "__file__", None) or "").startswith(f"{FOLDER}/"):
                del sys.modules[name]
    return zoo_networks


zoo = load()


def step(model: nn.Module, batch: dict[str, Tensor]) -> tuple[float, Tensor]:
    """The loss and the gradient of a step that then updates the parameters."""
    loss = model(**batch).loss
    loss.backward()
    trained = [p for p in model.parameters() if p.grad is not None]
    gradient = torch.cat([p.grad.flatten() for p in trained if p.grad is not None])
    with torch.no_grad():
        for p in trained:
            p -= STEP * p.grad / gradient.norm()
            p.grad = None
    return loss.item(), gradient


def network_and_batch(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    try:
        return zoo.ZOO[name].model(small=True), zoo.ZOO[name].batch(True)
    except ImportError as error:
        pytest.skip(f"needs a package: {error}")


def test_the_zoo_has_networks_of_all_kinds() -> None:
    kinds = {network.kind for network in zoo.ZOO.values()}
    assert len(zoo.ZOO) >= 24 and len(kinds) == 10


@pytest.mark.parametrize("name", zoo.ZOO)
def test_network_is_traced_and_trained_in_8_bits(name: str) -> None:
    model, batch = network_and_batch(name)
    plan, plain = pare.Plan.preset("activations8"), deepcopy(model)
    trace = pare.trace_step(model, batch, optimizer="sgd")
    assert pare.footprint(trace, plan).peak_bytes < pare.footprint(trace, pare.Plan.uniform()).peak_bytes
    num_packed = sum(slot.role is pare.Role.ACTIVATION for slot in trace.slots)
    with pare.apply(plan, model) as session:
        session_loss = model(**batch).loss
        assert session.stored_bytes
        del session_loss
        (loss, found), (plain_loss, wanted) = step(model, batch), step(plain, batch)
        assert loss == plain_loss, "forward passes are exact"
        assert (found - wanted).norm() / wanted.norm() < SAFETY * INT8_ERROR * sqrt(num_packed)
        assert step(model, batch)[0] == pytest.approx(step(plain, batch)[0], rel=0.02)
