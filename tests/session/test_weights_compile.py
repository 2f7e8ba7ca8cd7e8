"""torch.compile and packed weights: the same gradients; where hooks do not run, weights stay unpacked and `changes` lists them."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from paredown import Role, apply
from paredown.optim.packed_parameter import PackedParameter
from paredown.optim.packed_weight import weight_of
from tests.session.nets import assert_same, gradients, rows, weighted
from tests.session.test_weights import PLAN, mlp

BACKENDS = pytest.mark.parametrize("backend", ["eager", "aot_eager"])
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")  # torch's own


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(net: nn.Sequential, when: str, backend: str) -> tuple[Any, Any]:
    """What to call, and the session."""
    plan = PLAN.set("frozen", str(PLAN.find((), Role.WEIGHT).format))
    if when == "after":
        model = torch.compile(net, backend=backend)
        return model, apply(plan, model)
    session = apply(plan, net)
    if when == "before":
        return torch.compile(net, backend=backend), session
    (net if when == "in place" else net[2]).compile(backend=backend)
    return net, session


@BACKENDS
@pytest.mark.parametrize("when", ["before", "after", "in place", "a part"])
@pytest.mark.parametrize("is_frozen", [False, True], ids=["", "frozen"])
def test_a_compiled_model(is_frozen: bool, when: str, backend: str) -> None:
    net = mlp()
    net[2:].requires_grad_(not is_frozen)
    model, session = compiled(net, when, backend)
    plain = copy.deepcopy(net)
    for _ in range(3):
        for each in (model, plain):
            each.zero_grad()
            weighted(each(rows(97))).backward()
        assert_same(gradients(net), gradients(plain))
    said = {row.slot for row in session.changes if "torch.compile" in row.reason}
    assert said == {"weight=2.weight"} if when == "a part" else {"weight=0.weight", "weight=2.weight", "weight=4.weight"}
    assert [type(net[i].weight) is PackedParameter for i in (0, 2, 4)] == [when == "a part", False, when == "a part"]
    weight = weight_of(net[2].weight)
    if weight is not None:  # what an optimizer writes is seen
        weight.packed.codes.zero_()
        weight.changed()
        assert not net[2].weight.any()
    session.close()
    assert all(type(p) is nn.Parameter for p in net.parameters())
    weighted(model(rows(97))).backward()


def test_one_graph_is_refused_in_a_sentence() -> None:
    net = mlp()
    apply(PLAN, net)
    with pytest.raises(Exception, match=r"Compile the model before paredown\.apply"):
        torch.compile(net, backend="eager", fullgraph=True)(rows(97))
