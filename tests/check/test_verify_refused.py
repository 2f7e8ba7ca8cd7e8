"""Arguments that `verify` refuses, with its error messages, and a `Verification` as JSON."""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils.checkpoint import checkpoint

import paredown as pare
from paredown.errors import ApplyError, ParedownError, PlanError, TraceError, VerificationError
from paredown.session.eager.stored_tensors import StoredValues
from tests.check.test_verify import perceptron
from tests.session.nets import INT8, Net, activations, rows


def test_what_cannot_be_verified_is_said() -> None:
    model, batch = Net(lambda net, x: net.b(net.a(x).tanh())), (rows(), rows(seed=2))
    with pytest.raises(ApplyError, match="verify needs a plan where the model has no session"):
        pare.verify(model, batch, loss=mse_loss)
    with pytest.raises(ApplyError, match="takes a model, a batch and a Plan, not Net and str"):
        pare.verify(model, batch, "int8", loss=mse_loss)  # type: ignore[arg-type]
    with pytest.raises(ApplyError, match="no parameter of the model requires a gradient"):
        pare.verify(copy.deepcopy(model).requires_grad_(False), batch, activations(INT8), loss=mse_loss)
    with pytest.raises(ApplyError, match="tolerance is -1"):
        pare.verify(model, batch, activations(INT8), loss=mse_loss, tolerance=-1)
    with pytest.raises(ApplyError, match="not finite without the plan"):
        pare.verify(model, (rows() / 0, batch[1]), activations(INT8), loss=mse_loss)
    with pytest.raises(TraceError, match=r"called with all 2 parts of the batch.*verify\(\.\.\., loss="):
        pare.verify(model, batch, activations(INT8))
    with pare.apply(activations(INT8), model, mode="simulate"), pytest.raises(ApplyError, match="in simulate mode"):
        pare.verify(model, batch, loss=mse_loss)


def test_reentrant_checkpoints_are_refused_and_others_pass() -> None:
    for is_reentrant in (True, False):
        model = Net(lambda net, x, old=is_reentrant: net.b(checkpoint(net.a, x, use_reentrant=old).tanh()))
        if is_reentrant:
            with pytest.raises(ApplyError, match="Set use_reentrant=False"):
                pare.verify(model, (rows().requires_grad_(), rows(seed=2)), activations(INT8), loss=mse_loss)
        else:
            assert pare.verify(model, (rows(), rows(seed=2)), activations(INT8), loss=mse_loss).ok


def test_a_verification_is_its_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = perceptron()
    monkeypatch.setattr(StoredValues, "_unpacked", lambda self: torch.full((self.numel,), torch.nan))
    found = pare.verify(model, batch, activations(INT8), loss=cross_entropy)
    assert not found.ok and max(row.error for row in found.rows) == 1e300, "what is not finite is a number of JSON"
    found.save(tmp_path / "found.json")
    assert pare.Verification.load(tmp_path / "found.json") == found
    assert "off under the exact plan" in found._repr_html_()
    for value in ({}, None, {"version": 1}, {**found.to_json(), "version": 9}, {**found.to_json(), "rows": [{"name": "a"}]}):
        with pytest.raises(PlanError, match="verification"):
            pare.Verification.from_json(value)
    assert issubclass(VerificationError, ParedownError)
