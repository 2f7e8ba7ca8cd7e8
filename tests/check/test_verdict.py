"""The verdict of a verification: whether the tolerance that gradients keep says anything about the plan."""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import html
import itertools
import json
import re
import warnings

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import paredown as pare
from paredown.check.verification import SAME_BITS, TOO_COARSE, USELESS_TOLERANCE, Compared, Verification
from tests.check.test_verify import perceptron
from tests.session.nets import INT4, INT8, activations, rows


def made(tolerance: float, *errors: float) -> Verification:
    compared = [Compared.of(f"p{i}", 0.0, error, 0.0, tolerance) for i, error in enumerate(errors)]
    return Verification("Net", tuple(compared), (), 0.0, tolerance, "tolerance was given")


@pytest.mark.parametrize(
    ("tolerance", "errors", "ok", "verdict"),
    [
        (0.0, (0.0, 0.0), True, "same bits"),
        (0.02, (0.0, 0.0), True, "same bits"),
        (1.45, (0.0, 0.0), True, "same bits"),
        (0.02, (0.0, 0.01), True, "within the format's bound"),
        (0.999, (0.5,), True, "within the format's bound"),
        (1.0, (0.01,), True, "too coarse to be useful"),
        (1.45, (1.2, 0.1), True, "too coarse to be useful"),
        (0.02, (0.03, 0.0), False, "outside the format's bound"),
        (1.45, (1.5,), False, "outside the format's bound"),
    ],
)
def test_the_verdict_follows_from_errors_and_tolerance(tolerance: float, errors: tuple[float, ...], ok: bool, verdict: str) -> None:
    found = made(tolerance, *errors)
    assert (found.ok, found.verdict) == (ok, verdict)
    assert verdict in repr(found).splitlines()[0] and verdict in html.unescape(found._repr_html_())
    assert found.to_json()["verdict"] == verdict
    assert Verification.from_json(json.loads(json.dumps(found.to_json()))) == found
    older = {name: value for name, value in found.to_json().items() if name != "verdict"}
    assert Verification.from_json(older).verdict == verdict


@pytest.mark.parametrize(("tolerance", "ok"), [(USELESS_TOLERANCE, True), (0.99, False)])
def test_from_the_threshold_on_a_gradient_of_zero_passes(tolerance: float, ok: bool) -> None:
    """The run under the plan, after two of the baseline and one of the exact plan, has a loss whose gradient is zero."""
    model, batch = perceptron()
    calls = itertools.count(1)
    loss = lambda *arguments: cross_entropy(*arguments) * (next(calls) <= 3)  # noqa: E731
    found = pare.verify(model, batch, activations(INT8), loss=loss, tolerance=tolerance)
    assert found.ok is ok and max(row.error for row in found.rows) == pytest.approx(1.0, abs=1e-6)
    assert found.verdict == (TOO_COARSE if ok else "outside the format's bound")


def test_deep_networks_in_four_bits_are_too_coarse_and_in_eight_are_not() -> None:
    """The tolerance is 3 sqrt(n) times the expected error of each of n slots."""
    torch.manual_seed(0)
    layers = [layer for _ in range(12) for layer in (nn.Linear(64, 64), nn.GELU())]
    model, batch = nn.Sequential(*layers, nn.Linear(64, 10)), (rows(256, 64), torch.arange(256) % 10)
    coarse = pare.verify(model, batch, activations(INT4), loss=cross_entropy)
    assert coarse.ok and coarse.tolerance > 1 and coarse.verdict == TOO_COARSE
    assert re.search(rf"gradients may differ by \d+ % of their norm: the bound of {re.escape(INT4)} over \d+ slots", repr(coarse))
    fine = pare.verify(model, batch, activations(INT8), loss=cross_entropy)
    assert fine.verdict == "within the format's bound"
    assert pare.verify(model, batch, pare.Plan(), loss=cross_entropy).verdict == SAME_BITS
    with pytest.warns(UserWarning, match="too coarse to be useful"):
        assert coarse.check() is coarse
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fine.check()
