"""Packed parameters used outside their modules, or in parts: attributes, values, writing, views, copies, gradients; no crashes."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from paredown import Plan, apply
from paredown.autograd.graph import DECODED
from paredown.codec.packed import encode
from paredown.errors import OptimError
from paredown.optim.packed_parameter import PackedParameter
from paredown.optim.packed_weight import Weight, weight_of
from tests.session.nets import INT8, assert_same, rows, weighted
from tests.session.test_weights import CASES, LPMM, PLAN, alive, assert_equal, step


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
    assert (p.shape, p.size(), p.dim(), p.ndim, p.numel(), p.nelement(), len(p)) == (
        values.shape,
        values.size(),
        2,
        2,
        4096,
        4096,
        64,
    )
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
            assert repr(found).replace(",\n       requires_grad=True", "") == repr(expected).replace(
                ",\n       requires_grad=True", ""
            )
            for a, b in zip(
                *([x] if isinstance(x, Tensor) else x if isinstance(x, tuple | list) else [x] for x in (found, expected)),
                strict=True,
            ):
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
    assert type(alias) is type(row) is PackedParameter
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


# --- parts of parameters, and weights beside packed activations -------------------------------------------------------------------


class Parts(nn.Module):
    """Products with parts of parameters."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tall, self.pair = nn.Parameter(torch.randn(128, 64) / 8), nn.Parameter(torch.randn(2, 64, 64) / 8)

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.pair.unbind(0)
        upper, lower = self.tall.split(64)
        h = functional.linear(functional.linear(x, self.tall[:64]), self.tall.narrow(0, 40, 64)).tanh()
        return h @ first + h @ second.T + h @ self.pair.select(0, 1) + functional.linear(h, lower) + functional.linear(x, upper)


class Decoder(nn.Module):
    """Its attention to another text multiplies by a third and by two thirds of one parameter."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.TransformerDecoderLayer(64, 4, 128, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x, x.flip(1))


OF_PARTS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "parts of parameters": lambda: (Parts(), rows(97)),
    "decoder": lambda: (Decoder(), rows(128).view(2, 64, 64)),
}


@pytest.mark.parametrize("name", OF_PARTS)
def test_parts_of_parameters_are_decoded_in_backward(name: str, decoded: list[StorageWeakRef]) -> None:
    net, x = OF_PARTS[name]()
    assert_equal(net, x)
    decoded.clear()
    y = net(x)
    assert decoded and alive(decoded) == 0, "nothing keeps decoded weights between forward and backward"
    weighted(y).backward()


@pytest.mark.parametrize("name", [*CASES, *OF_PARTS])
def test_gradients_beside_packed_activations(name: str) -> None:
    """Those of plain weights with the same values and the same activations in int8, in passes that repeat earlier ones too."""
    net, x = {**CASES, **OF_PARTS}[name]()
    apply(PLAN, net).close()  # values that int8 has
    plain = copy.deepcopy(net)
    session, other = apply(Plan.uniform(weight=LPMM, activation=INT8), net), apply(Plan.uniform(activation=INT8), plain)
    for _ in range(6):
        found, expected = (step(model, (x,), lambda y: weighted(y.float()), nullcontext) for model in (net, plain))
        assert torch.equal(found[0], expected[0])
        assert_same(found[1], expected[1])
    assert session.weight_bytes > 0 and other.weight_bytes == 0


def test_the_node_of_decoded_weights_is_known_by_its_name() -> None:
    _, weight, _ = packed()
    node = (weight * 2).grad_fn
    assert node is not None and DECODED in (before.name() for before, _ in node.next_functions if before is not None)
