"""Packed weights that are written, copied, converted or replaced after apply: nothing is silently undone, and `changes` lists it."""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paredown import Plan, apply
from paredown.errors import OptimError
from paredown.optim import AdamW
from paredown.optim.packed_parameter import PackedParameter
from paredown.optim.packed_weight import weight_of
from tests.session.nets import rows, weighted
from tests.session.test_weights import LPMM, PLAN, mlp
from tests.session.test_weights_outside import packed, rounded, stored

INT8 = "int8/64@bf16"
ADDED = "it was added after the plan was applied"


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def copied(net: Any, values: Tensor) -> None:
    with torch.no_grad():
        net[2].weight.copy_(values)


def through_data(net: Any, values: Tensor) -> None:
    net[2].weight.data.copy_(values)


def replaced(net: Any, values: Tensor) -> None:
    net[2].weight.data = values.clone()


def loaded(net: Any, values: Tensor) -> None:
    net[2].load_state_dict({"weight": values, "bias": net[2].bias.detach()})


WAYS = pytest.mark.parametrize("write", [copied, through_data, replaced, loaded])


@WAYS
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")  # torch's own
def test_a_step_keeps_what_was_written_into_a_compiled_weight(write: Callable[[Any, Tensor], None]) -> None:
    net: Any = mlp()
    session = apply(PLAN, net)
    optimizer = AdamW(net.parameters(), lr=0.0, weight_decay=0.0)
    model: Any = torch.compile(net, backend="eager")
    for _ in range(3):  # the second time, comparing found it equal before
        weighted(model(rows(97))).backward()
        assert type(net[2].weight) is nn.Parameter
        values = torch.randn(64, 128)
        write(net, values)
        optimizer.step()
        optimizer.zero_grad()
        assert torch.equal(net[2].weight, rounded(values))
        assert torch.equal(stored(net[2].weight), rounded(values))
    session.close()


@WAYS
def test_a_step_keeps_what_was_written_into_an_unpacked_weight(write: Callable[[Any, Tensor], None]) -> None:
    net: Any = mlp()
    session = apply(PLAN, net)
    optimizer = AdamW(net.parameters(), lr=0.0, weight_decay=0.0)
    values = torch.empty(0)
    for _ in range(2):
        weighted(net(rows(97))).backward()
        with session.unpacked():
            for _ in range(2):
                values = torch.randn(64, 128)
                write(net, values)
                optimizer.step()
                assert torch.equal(net[2].weight, rounded(values))
        optimizer.zero_grad()
        assert torch.equal(stored(net[2].weight), rounded(values))


def test_gathering() -> None:
    net: Any = mlp()
    apply(PLAN, net)
    weight = weight_of(net[2].weight)
    assert weight is not None
    before = weight.version
    assert not weight.gather()  # it is packed: there is nothing to gather
    weight.pin()
    assert not weight.gather()
    assert weight.version == before
    net[2].weight.data.mul_(1.1)
    with pytest.warns(UserWarning, match="an update was written into it"):
        assert weight.gather()
    assert torch.equal(net[2].weight, weight.decode())
    assert not weight.gather()


@pytest.mark.parametrize("copy_of", [copy.deepcopy, lambda p: pickle.loads(pickle.dumps(p))], ids=["deepcopy", "pickle"])
@pytest.mark.parametrize("requires_grad", [True, False])
def test_a_copy_of_a_parameter_made_of_data(copy_of: Callable[[Any], Any], requires_grad: bool) -> None:
    _, p, values = packed()
    made = copy_of(nn.Parameter(p.data, requires_grad))
    assert type(made) is nn.Parameter
    assert made.requires_grad is requires_grad
    assert torch.equal(made, values)
    assert type(copy_of(p.data)) is Tensor


def test_a_parameter_made_of_data_shares_the_values_and_has_its_own_gradient() -> None:
    """As with plain ones: nn.Parameter(p.data) has the memory of p; p.data itself is no parameter."""
    _, p, values = packed()
    plain = nn.Parameter(values.clone())
    for q in (p, plain):
        made: Any = nn.Parameter(q.data, requires_grad=False)
        assert isinstance(made, nn.Parameter) and not made.requires_grad and torch.equal(made, values)
        made = nn.Parameter(q.data)
        (made * 3).sum().backward()
        assert q.grad is None and made.is_leaf and torch.equal(made.grad, torch.full((64, 64), 3.0))
        with torch.no_grad():
            made[0] = 1.0
        assert torch.equal(q[0], torch.ones(64)) and torch.equal(made[0], torch.ones(64))
        assert isinstance(q, nn.Parameter) and not isinstance(q.data, nn.Parameter) and not isinstance(q.data[0], nn.Parameter)
    assert torch.equal(stored(p), rounded(plain))


@pytest.mark.parametrize("kind", ["weight_norm", "data"])
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_parameter_made_of_data_trains(kind: str) -> None:
    net, p, values = packed()
    if kind == "weight_norm":
        nn.utils.weight_norm(net)  # torch's old one makes nn.Parameter(p.data)
        made: Any = net.weight_v
    else:
        net.weight = made = nn.Parameter(p.data)
    del p  # the view alone holds the weight
    optimizer = AdamW(net.parameters(), lr=0.1)
    for _ in range(2):
        weighted(net(torch.ones(4, 64))).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert not torch.equal(made, values)


def test_as_subclass_gives_values() -> None:
    _, p, values = packed()
    assert torch.equal(p.as_subclass(Tensor), values)
    p.as_subclass(Tensor).sum().backward()
    assert p.grad is not None
    assert p.grad.sum() == p.numel()


@pytest.mark.skipif(
    not hasattr(torch._C, "_set_storage_access_error_msg"), reason="torch without CUDA cannot say that memory is not there"
)
@pytest.mark.parametrize(
    "function", [torch.tensor, torch.Tensor, lambda p: torch.as_tensor(p, dtype=torch.float64), torch.ones(1).new_tensor]
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_functions_that_do_not_ask(function: Callable[[Any], Tensor]) -> None:
    _, p, _ = packed()
    with pytest.raises(RuntimeError, match="is stored packed"):
        function(p).sum()
    other = torch.ones(64, 64)
    other.data = p.data
    with pytest.raises(RuntimeError, match="is stored packed"):
        other.sum()


@pytest.mark.parametrize("is_unpacked", [False, True])
def test_a_dtype_without_a_codec(is_unpacked: bool) -> None:
    net: Any = mlp()
    session = apply(PLAN, net)
    before = [p.detach().clone() for p in net.parameters()]
    if is_unpacked:
        with session.unpacked():
            net.double()
    else:
        net.double()
    assert {(type(p), p.dtype) for p in net.parameters()} == {(nn.Parameter, torch.float64)}
    assert all(torch.equal(p, values.double()) for p, values in zip(net.parameters(), before, strict=True))
    said = {row.slot: row for row in session.changes}
    for name in ("0.weight", "2.weight", "4.weight"):
        assert (said[f"weight={name}"].given, said[f"weight={name}"].reason.split(":")[0]) == (
            "unmodified", "its dtype or device became one that is not packed",
        )  # fmt: skip
    assert session.weight_bytes == 0
    weighted(net(rows(97).double())).backward()
    assert all(p.grad is not None and p.grad.dtype is torch.float64 for p in net.parameters())
    with session.unpacked():
        net[0].weight.data.zero_()
    assert not net[0].weight.any()
    session.close()
    assert not net[0].weight.any()
    assert {p.dtype for p in net.parameters()} == {torch.float64}


def test_rows_of_a_layer_that_was_added() -> None:
    net: Any = nn.Sequential(nn.Embedding(128, 64), nn.Linear(64, 128, bias=False))
    session = apply(Plan.uniform(weight=LPMM, moment1=INT8, gradient=INT8), net)
    net.append(nn.Linear(128, 128, bias=False))
    _optimizer = AdamW(net.parameters())
    assert [(row.slot, row.given, row.reason) for row in session.changes] == [
        ("weight=2.weight", "unmodified", ADDED),
        ("moment1=2.weight", "unmodified", ADDED),
        ("gradient=2.weight", "unmodified", ADDED),
    ]


def test_rows_of_a_layer_that_was_tied() -> None:
    net = nn.Sequential(nn.Embedding(128, 64), nn.Linear(64, 128, bias=False))
    session = apply(PLAN, net)
    net[1].weight = net[0].weight
    assert type(net[1].weight) is PackedParameter
    assert not session.changes
    net[1](net[0](torch.arange(9))).sum().backward()
    session.close()
    net = nn.Sequential(nn.Embedding(128, 64), nn.Linear(64, 128, bias=False))
    session = apply(Plan.uniform(weight=LPMM).set("weight=1.weight", "bf16"), net)
    net[1].weight = net[0].weight
    assert [(row.slot, row.asked, row.given) for row in session.changes] == [("weight=1.weight", "bf16", LPMM)]


@pytest.mark.parametrize("function", [lambda net: nn.Parameter(net.weight), nn.utils.parametrizations.weight_norm])
def test_parameters_of_packed_ones_are_refused(function: Callable[[Any], Any]) -> None:
    net, p, values = packed()
    with pytest.raises(OptimError, match=r"weight_norm on before paredown\.apply"):
        function(net)
    assert net.weight is p
    assert torch.equal(stored(p), values)
    assert torch.equal(nn.Parameter(p.detach().clone()), values)
