"""Packed parameters touched outside of their modules: values, writing, copies, states, conversions, other optimizers; sentences, no crashes."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, parameters_to_vector, vector_to_parameters
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from paredown import Plan, apply
from paredown.codec.packed import encode
from paredown.errors import OptimError
from paredown.optim.outside import PackedParameter, WeightView
from paredown.optim.weights import Weight, weight_of
from tests.session.nets import Net, assert_same, gradients, pictures, rows, weighted
from tests.session.test_weights import LPMM, PLAN, mlp, parameter_bytes, pictures_net

FEW = 3000


def packed(values: Tensor | None = None, format: str = LPMM) -> tuple[nn.Linear, nn.Parameter, Tensor]:
    """A layer, its packed weight (64, 64), and the values of that."""
    torch.manual_seed(0)
    net = nn.Linear(64, 64)
    if values is not None:
        net.weight = nn.Parameter(values.clone(memory_format=torch.preserve_format))
    apply(Plan.uniform(weight=format), net)
    weight = weight_of(net.weight)
    assert weight is not None
    assert type(net.weight) is PackedParameter
    return net, net.weight, weight.decode()


def rounded(values: Tensor, format: str = LPMM) -> Tensor:
    return encode(values.detach(), format, order="logical").decode()


def stored(p: Tensor) -> Tensor:
    weight = weight_of(p)
    assert weight is not None
    return weight.decode()


def test_what_a_parameter_says_of_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    _, p, values = packed()
    monkeypatch.setattr(Weight, "decode", None)  # nothing of this asks for the values
    assert (p.shape, p.size(), p.dim(), p.ndim, p.numel(), p.nelement(), len(p)) == (values.shape, values.size(), 2, 2, 4096, 4096, 64)
    assert (p.dtype, p.device, p.layout, p.stride(), p.is_contiguous(), p.storage_offset()) == (
        torch.float32, torch.device("cpu"), torch.strided, (64, 1), True, 0,
    )  # fmt: skip
    assert p.requires_grad
    assert p.is_leaf
    assert p.grad_fn is None
    assert p.grad is None
    assert (p.nbytes, p.element_size(), p.itemsize, p.type(), p.is_cuda) == (4 * 4096, 4, 4, "torch.FloatTensor", False)
    assert isinstance(p, nn.Parameter)
    assert hash(p) == id(p)
    assert p in {p}
    p.grad = torch.ones(64, 64)
    assert p.grad.sum() == 4096
    p.requires_grad_(False)
    assert not p.requires_grad
    p.requires_grad = True
    for make in (torch.zeros_like, torch.empty_like, torch.ones_like, lambda q: q.new_zeros(64, 64)):
        assert type(make(p)) is Tensor
        assert make(p).shape == p.shape
    assert p.untyped_storage().nbytes() == 0
    p.register_hook(lambda g: g)
    p.remark = "mine"
    assert p.remark == "mine"


READS: dict[str, Callable[[Any], Any]] = {
    "sum": lambda p: p.sum(),
    "norm": lambda p: p.norm(),
    "item": lambda p: p[3, 4].item(),
    "transpose": lambda p: p.T,
    "slice": lambda p: p[::2, 3:],
    "float64": lambda p: p.double(),
    "bfloat16": lambda p: p.to(torch.bfloat16),
    "clone": lambda p: p.clone(),
    "list": lambda p: p.tolist(),
    "iteration": lambda p: torch.stack([row.sum() for row in p]),
    "cat": lambda p: torch.cat([p, p]),
    "stack of a list": lambda p: torch.stack([p, p * 2]),
    "comparison": lambda p: p > 0,
    "equal": lambda p: torch.equal(p, p.clone()),
    "matmul": lambda p: p @ p,
    "right": lambda p: 1 + p,
    "einsum": lambda p: torch.einsum("ij,jk->ik", p, p),
    "detached": lambda p: p.detach().reshape(-1),
    "data": lambda p: p.data.abs().max(),
    "foreach": lambda p: torch._foreach_norm([p, p]),
    "numpy": lambda p: p.detach().numpy().sum(),
    "where": lambda p: torch.where(p > 0, p, 0.0),
    "vector": lambda p: parameters_to_vector([p.T, p.T] if p.stride(0) == 1 else [p, p]),
    "histogram": lambda p: torch.histc(p.detach(), 10),
    "argmax": lambda p: int(p.argmax()),
    "any": lambda p: bool(p.isnan().any()),
}


@pytest.mark.parametrize("name", READS)
@pytest.mark.parametrize("around", [torch.no_grad, torch.enable_grad, torch.inference_mode])
def test_functions_see_the_values(name: str, around: Any) -> None:
    for layout in (lambda t: t, lambda t: t.T.contiguous().T):
        _, p, values = packed(layout(torch.randn(64, 64)))
        plain = nn.Parameter(values.clone(memory_format=torch.preserve_format))
        with around():
            found, expected = READS[name](p), READS[name](plain)
            assert repr(found).replace(",\n       requires_grad=True", "") == repr(expected).replace(",\n       requires_grad=True", "")
            for a, b in zip(*([x] if isinstance(x, Tensor) else x if isinstance(x, tuple | list) else [x] for x in (found, expected)), strict=True):
                assert torch.equal(a, b) if isinstance(b, Tensor) else a == b
        assert torch.equal(stored(p), values)
        assert type(p) is PackedParameter


WRITES: dict[str, Callable[[Any], Any]] = {
    "add_": lambda p: p.add_(1.0),
    "iadd": lambda p: p.__iadd__(0.5),
    "mul_ through data": lambda p: p.data.mul_(2),
    "mul_ of detached": lambda p: p.detach().mul_(2),
    "copy_": lambda p: p.copy_(torch.linspace(-1, 1, 4096).view(64, 64)),
    "row": lambda p: p.__setitem__(3, torch.linspace(-1, 1, 64)),
    "mask": lambda p: p.data.__setitem__(p.data > 0, 0.25),
    "view of data": lambda p: (p.data.T if p.stride(0) == 1 else p.data).view(-1)[5:700].fill_(0.5),
    "column of data": lambda p: p.data[:, 3].zero_(),
    "transposed": lambda p: p.data.T[0].fill_(0.125),
    "chunk": lambda p: p.data.chunk(2)[1].neg_(),
    "out": lambda p: torch.add(torch.ones(64, 64), p.data, out=p.data),
    "fill_diagonal_": lambda p: p.fill_diagonal_(0.75),
    "clamp_": lambda p: p.clamp_(-0.05, 0.05),
    "lerp_": lambda p: p.lerp_(torch.ones(64, 64), 0.25),
    "foreach": lambda p: torch._foreach_add_([p], 1.0),
    "foreach of two": lambda p: torch._foreach_mul_([p.data, torch.zeros(3)], 2.0),
    "index_add_": lambda p: p.index_add_(0, torch.tensor([1, 5]), torch.ones(2, 64)),
    "normal_": lambda p: (torch.manual_seed(1), p.normal_()),
    "init": lambda p: (torch.manual_seed(1), nn.init.kaiming_normal_(p)),
    "init orthogonal": lambda p: (torch.manual_seed(1), nn.init.orthogonal_(p)),
    "init trunc": lambda p: (torch.manual_seed(1), nn.init.trunc_normal_(p, std=0.02)),
    "set data": lambda p: setattr(p, "data", torch.linspace(-2, 1, 4096).view(64, 64)),
    "vector": lambda p: vector_to_parameters(torch.linspace(-2, 1, 4096), [p]),
    "data of data": lambda p: p.data.data.add_(1),
}


@pytest.mark.parametrize("name", WRITES)
@pytest.mark.parametrize("around", [torch.no_grad, torch.inference_mode])
def test_what_is_written_is_encoded(name: str, around: Any) -> None:
    for layout in (lambda t: t, lambda t: t.T.contiguous().T):
        _, p, values = packed(layout(torch.randn(64, 64)))
        plain = nn.Parameter(values.clone(memory_format=torch.preserve_format))
        with around():
            WRITES[name](p)
            WRITES[name](plain)
        assert not torch.equal(plain, values)
        assert torch.equal(stored(p), rounded(plain))
        assert torch.equal(p.detach(), rounded(plain))
        assert type(p) is PackedParameter


def test_initialising_with_gradients_enabled() -> None:
    """The functions of nn.init write without a gradient by themselves; others must not write into a leaf, as ever."""
    _, p, values = packed()
    nn.init.zeros_(p)
    assert not stored(p).any()
    p.data.copy_(values)
    for write in (lambda: p.add_(1), lambda: p.__setitem__(0, 1.0), lambda: torch.nn.functional.relu_(p)):
        with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
            write()
    assert torch.equal(stored(p), values)
    version = p._version
    with torch.no_grad():
        p.add_(1)
    assert p._version > version


def test_views_follow_the_weight() -> None:
    _, p, values = packed()
    row, alias = p.data[1], p.detach()
    assert type(alias) is type(row) is WeightView
    row.zero_()
    assert torch.equal(stored(p)[1], torch.zeros(64))
    with torch.no_grad():
        p.fill_(0.5)
    assert torch.equal(row, torch.full((64,), 0.5))
    assert torch.equal(alias, torch.full((64, 64), 0.5))
    assert (alias.shape, alias.requires_grad, alias.is_leaf, row.shape) == ((64, 64), False, True, (64,))
    assert copy.deepcopy(row).sum() == 32
    assert type(copy.deepcopy(row)) is Tensor
    assert repr(row)[:6] == "tensor"
    assert values.sum() != 0


def test_no_memory_is_a_sentence() -> None:
    _, p, _ = packed()
    for call in (lambda: p.data_ptr(), lambda: p.share_memory_(), lambda: p.resize_(3), lambda: p.data.data_ptr()):
        with pytest.raises(OptimError, match=r"session\.unpacked\(\)"):
            call()


# --- copies and states --------------------------------------------------------------------------------------------------


def through(dump: Callable[[Any, Any], None], load: Callable[[Any], Any], thing: Any) -> Any:
    file = io.BytesIO()
    dump(thing, file)
    file.seek(0)
    return load(file)


COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda thing: pickle.loads(pickle.dumps(thing)),
    "save": lambda thing: through(torch.save, lambda file: torch.load(file, weights_only=False), thing),
}


@pytest.mark.parametrize("name", COPIES)
def test_copies_are_plain(name: str) -> None:
    net, p, values = packed()
    other = COPIES[name](p)
    assert type(other) is nn.Parameter
    assert torch.equal(other, values)
    assert other.requires_grad
    model = COPIES[name](net)
    assert {type(q) for q in model.parameters()} == {nn.Parameter}
    assert torch.equal(model(rows(97)), net(rows(97)))
    alias = COPIES[name](p.data)
    assert type(alias) is Tensor
    assert torch.equal(alias, values)
    other.data.zero_()
    assert torch.equal(stored(p), values)
    assert type(p) is PackedParameter


def test_repr_is_that_of_the_values() -> None:
    net, p, values = packed()
    assert repr(p) == repr(nn.Parameter(values))
    assert str(net) == "Linear(in_features=64, out_features=64, bias=True)"
    assert f"{p.mean():.3f}" == f"{values.mean():.3f}"


def tied() -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(100, 64), nn.Linear(64, 64), nn.Linear(64, 100, bias=False))
    net[2].weight = net[0].weight
    return net


def test_states_are_plain() -> None:
    net = tied()
    apply(PLAN, net)
    for options in ({}, {"keep_vars": True}):
        state = net.state_dict(**options)
        assert {type(value) for value in state.values()} == {nn.Parameter if options else Tensor}
        assert all(torch.equal(value, stored(p)) for value, p in zip(state.values(), [net[0].weight, net[1].weight], strict=False) if p.dim() > 1)
    assert state["0.weight"].requires_grad
    state = net.state_dict()
    assert state["0.weight"] is state["2.weight"]
    state["0.weight"].zero_()
    assert net.state_dict()["0.weight"].any()
    assert torch.equal(net[1].state_dict(prefix="x.")["x.weight"], stored(net[1].weight))
    loaded = through(torch.save, torch.load, net.state_dict())
    other = tied()
    other.load_state_dict(loaded)
    assert torch.equal(other[1].weight, stored(net[1].weight))


@pytest.mark.parametrize("assign", [False, True])
def test_loading_a_state(assign: bool) -> None:
    net, other = mlp(), mlp()
    session = apply(PLAN, net)
    with torch.no_grad():
        for p in other.parameters():
            p.normal_()
    weighted(net(rows(97))).backward()
    net.load_state_dict(copy.deepcopy(other.state_dict()), assign=assign)
    net(rows(97))
    for p, q in zip(net.parameters(), other.parameters(), strict=True):
        assert torch.equal(p.detach(), rounded(q) if q.dim() > 1 else q)
    assert parameter_bytes(net) < FEW
    assert len(session.changes) == 1
    apply(PLAN, other)
    assert torch.equal(net(rows(97)), other(rows(97)))
    saved = net.state_dict()
    net.load_state_dict(saved)
    assert all(torch.equal(a, b) for a, b in zip(net.state_dict().values(), saved.values(), strict=True))


def test_a_parameter_that_was_replaced_is_a_row() -> None:
    net = mlp()
    session = apply(PLAN, net)
    net[2].weight = nn.Parameter(torch.randn(64, 128))
    assert [row.reason for row in session.changes if row.slot == "weight=2.weight"] == ["this parameter was put there after apply"]
    weighted(net(rows(97))).backward()
    assert type(net[2].weight) is nn.Parameter


# --- conversions --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_to_another_dtype(dtype: torch.dtype) -> None:
    net = mlp()
    session = apply(PLAN, net)
    plain = copy.deepcopy(net)
    parameters = list(net.parameters())
    for model in (net, plain):
        model.to(dtype)
    assert all(a is b for a, b in zip(net.parameters(), parameters, strict=True))
    assert {p.dtype for p in net.parameters()} == {dtype}
    x = rows(97).to(dtype)
    for model in (net, plain):
        weighted(model(x).float()).backward()
    assert_same(gradients(net), gradients(plain))
    assert {g.dtype for g in gradients(net)} == {dtype}
    assert parameter_bytes(net) < FEW
    session.close()
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), plain.parameters(), strict=True))


def test_to_another_memory_format() -> None:
    net = pictures_net()
    apply(PLAN, net)
    plain = copy.deepcopy(net)
    x = pictures().to(memory_format=torch.channels_last)
    for model in (net, plain):
        model.to(memory_format=torch.channels_last)
        weighted(model(x)).backward()
    assert_same(gradients(net), gradients(plain))
    assert type(net[3].weight) is PackedParameter
    assert net[3].weight.stride() == plain[3].weight.stride()


def test_to_the_meta_device() -> None:
    net = mlp()
    session = apply(PLAN, net)
    net.to("meta")
    assert {(type(p), p.device.type) for p in net.parameters()} == {(nn.Parameter, "meta")}
    session.close()


# --- loops --------------------------------------------------------------------------------------------------------------

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=False),
    "sgd foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "sgd fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, foreach=False),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.3, foreach=False),
    "adam foreach": lambda p: torch.optim.Adam(p, lr=0.01, foreach=True),
    "adam fused": lambda p: torch.optim.Adam(p, lr=0.01, fused=True),
    "lbfgs": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=1),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_of_other_optimizers(name: str) -> None:
    """One step from the same gradients: what a plain parameter would be, rounded to nearest."""
    net = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
    apply(PLAN, net)
    plain = copy.deepcopy(net)
    optimizers = [OPTIMIZERS[name](model.parameters()) for model in (net, plain)]
    for model, optimizer in zip((net, plain), optimizers, strict=True):

        def closure(model: nn.Module = model, optimizer: torch.optim.Optimizer = optimizer) -> Tensor:
            optimizer.zero_grad()
            loss = weighted(model(rows(97)))
            loss.backward()
            clip_grad_norm_(model.parameters(), 1.0)
            return loss

        optimizer.step(closure)
    for p, q in zip(net.parameters(), plain.parameters(), strict=True):
        expected = rounded(q) if q.dim() > 1 else q.detach()
        assert torch.equal(p.detach(), expected) or (name == "lbfgs" and torch.allclose(p.detach(), expected, atol=1e-6))
    assert parameter_bytes(net) < FEW


def test_averages_of_weights() -> None:
    net = mlp()
    apply(PLAN, net)
    ema = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    own = [p.detach().clone() for p in net.parameters()]
    assert {type(p) for p in ema.parameters()} == {nn.Parameter}
    with torch.no_grad():
        for p in net.parameters():
            p.mul_(2)
        for mine, p in zip(own, net.parameters(), strict=True):
            mine.lerp_(p, 0.5)
    ema.update_parameters(net)
    ema.update_parameters(net)
    assert torch.equal(own[0], 0.75 * stored(net[0].weight))
    assert torch.equal(ema.module[0].weight, stored(net[0].weight))
    for p, e in zip(net.parameters(), ema.parameters(), strict=True):
        p.data.copy_(e.data)
        e.data.copy_(p.data)


def test_unpacked() -> None:
    net = mlp()
    session = apply(PLAN, net)
    plain = copy.deepcopy(net)
    with session.unpacked():
        assert {type(p) for p in net.parameters()} == {nn.Parameter}
        assert net[0].weight.data_ptr() != 0
        assert torch.equal(net(rows(97)), plain(rows(97)))
        net[0].weight.data.mul_(2)
        loss = weighted(net(rows(97))) + net[4].weight.square().sum()
        with session.unpacked():
            net[2].weight.data = torch.ones(64, 128)
    assert torch.equal(stored(net[0].weight), 2 * plain[0].weight)
    assert torch.equal(stored(net[2].weight), torch.ones(64, 128))
    with pytest.raises(RuntimeError, match="modified"):
        loss.backward()
    del loss
    net(rows(97))
    assert parameter_bytes(net) < FEW
    with session.unpacked():
        loss = weighted(net(rows(97))) + net[4].weight.square().sum()
    loss.backward()
    assert net[4].weight.grad is not None
    net(rows(97))
    assert parameter_bytes(net) < FEW


def test_close_gives_plain_parameters_back() -> None:
    net = tied()
    before = dict(vars(net[0].weight))
    session = apply(PLAN, net)
    values = [p.detach().clone() for p in net.parameters()]
    parameters = list(net.parameters())
    x = torch.arange(60)
    loss = weighted(net(x))
    session.close()
    assert all(a is b and type(a) is nn.Parameter for a, b in zip(net.parameters(), parameters, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), values, strict=True))
    assert vars(net[0].weight) == before
    loss.backward()  # a graph outlives its session
    found = gradients(net)
    net.zero_grad()
    weighted(net(x)).backward()
    assert_same(found, gradients(net))
    session.close()
    assert session.weight_bytes == 0
    apply(PLAN, net).close()


def test_parameters_outlive_their_model() -> None:
    net = mlp()
    apply(PLAN, net)
    parameters, expected = list(net.parameters()), [p.detach().clone() for p in net.parameters()]
    del net
    assert all(torch.equal(a, b) for a, b in zip(parameters, expected, strict=True))
    parameters[0].sum().backward()


def test_a_parameter_in_two_places() -> None:
    """A net uses the weight of another module of the same model, and of another model."""
    first = Net(lambda net, x: net.b(net.a(x)) @ net.more[0].weight, nn.Linear(64, 64))
    apply(PLAN, first)
    second = nn.Linear(64, 64)
    second.weight = first.a.weight
    plain_first, plain_second = copy.deepcopy([first, second])
    for a, b in ((first, second), (plain_first, plain_second)):
        weighted(b(a(rows(97)))).backward()
    assert_same(gradients(first), gradients(plain_first))
    assert parameter_bytes(first) < FEW
