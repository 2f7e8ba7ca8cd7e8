"""Packed weights inside their modules: losses and gradients of an unpacked model with the same values, without another copy."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from paredown import Plan, Session, apply
from paredown.models import MODELS, random_batch
from paredown.optim.packed_parameter import PackedParameter
from paredown.optim.packed_weight import weight_of
from tests.session.nets import INT8, Net, assert_same, pictures, rows, weighted

LPMM = "int8/64@e8m0"
FORMATS = pytest.mark.parametrize("format", [LPMM, "bf16", "int4/64@bf16", "e4m3fn"])
PLAN = Plan.uniform(weight=LPMM)
Make = Callable[[], AbstractContextManager[Any]]


def alive(found: list[StorageWeakRef]) -> int:
    """How many of them are still referenced."""
    gc.collect()
    return sum(not ref.expired() for ref in found)


def saved_sizes(y: Tensor) -> list[int]:
    """The sizes of all float tensors that nodes of y's graph hold unpacked."""
    pending, seen, found = [y.grad_fn], set(), []
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        pending.extend(before for before, _ in node.next_functions)
        for name in dir(node):
            raws = getattr(node, name) if name.startswith("_raw_saved_") else ()
            for raw in raws if isinstance(raws, tuple | list) else (raws,):
                if raw.unpack_hook is None and isinstance(raw.data, Tensor):
                    found.append(raw.data.untyped_storage().nbytes() // raw.data.itemsize)
    return found


def packed_sizes(model: nn.Module) -> set[int]:
    return {p.numel() for p in model.parameters() if type(p) is PackedParameter}


def parameter_bytes(model: nn.Module) -> int:
    """Bytes of the memory of the parameters themselves."""
    return sum(p.untyped_storage().nbytes() for p in model.parameters())


def step(model: nn.Module, args: tuple[Any, ...], loss: Callable[[Any], Tensor], around: Make) -> tuple[Tensor, list[Tensor]]:
    """Loss and gradients of one step."""
    torch.manual_seed(3)
    model.zero_grad()
    with around():
        result = loss(model(*args))
    result.backward()
    return result.detach(), [p.grad.clone() for p in model.parameters() if p.grad is not None]


def assert_equal(
    model: nn.Module,
    *args: Any,
    plan: Plan = PLAN,
    loss: Callable[[Any], Tensor] = weighted,
    around: Make = nullcontext,
    count: int = 3,
) -> Session:
    """Steps with packed weights equal those of a model with the same values, bit for bit; parameters have no memory afterwards."""
    session = apply(plan, model)
    packed = [p for p in model.parameters() if weight_of(p) is not None]
    assert packed
    plain = copy.deepcopy(model)
    assert all(type(p) is nn.Parameter for p in plain.parameters())
    for _ in range(count):
        found, found_gradients = step(model, args, loss, around)
        expected, gradients = step(plain, args, loss, around)
        assert torch.equal(found, expected)
        assert_same(found_gradients, gradients)
        assert all(type(p) is PackedParameter and p.untyped_storage().nbytes() == 0 for p in packed)
    return session


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64), nn.LayerNorm(64), nn.Linear(64, 70))


def pictures_net() -> nn.Sequential:
    torch.manual_seed(0)
    layers = (nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(inplace=True), nn.Conv2d(16, 32, 3), nn.BatchNorm2d(32), nn.ReLU())
    return nn.Sequential(*layers, nn.ConvTranspose2d(32, 16, 3))


class Lstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.body, self.head = nn.Embedding(100, 64), nn.LSTM(64, 64, 2), nn.Linear(64, 100)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.embedding(x))[0])


class Attention(nn.Module):
    """nn.MultiheadAttention uses the weight of its projection without calling it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.MultiheadAttention(64, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x, x, x)[0]


class Tied(nn.Module):
    """One weight in an embedding and a head, called as a module, a function, or by its transpose."""

    def __init__(self, way: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.body, self.head, self.way = (
            nn.Embedding(100, 64),
            nn.Linear(64, 64),
            nn.Linear(64, 100, bias=False),
            way,
        )
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        h = self.body(self.embedding(x))
        if self.way == "module":
            return self.head(h)
        return functional.linear(h, self.embedding.weight) if self.way == "function" else h @ self.embedding.weight.T


class Product(torch.autograd.Function):
    """A product that saves its weight, and stashes it too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return grad @ weight.T, x.T @ grad


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight, self.last = nn.Parameter(torch.randn(64, 64)), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(Product.apply(x, self.weight))


def tokens() -> Tensor:
    return torch.randint(0, 100, (4, 17), generator=torch.Generator().manual_seed(1))


CASES: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "mlp": lambda: (mlp(), rows(97)),
    "mlp of three dimensions": lambda: (mlp(), rows(96).view(2, 48, 64)),
    "convolutions": lambda: (pictures_net(), pictures()),
    "channels last": lambda: (
        pictures_net().to(memory_format=torch.channels_last),
        pictures().to(memory_format=torch.channels_last),
    ),
    "lstm": lambda: (Lstm(), tokens()),
    "attention": lambda: (Attention(), rows(32).view(2, 16, 64)),
    "tied modules": lambda: (Tied("module"), tokens()),
    "tied by a function": lambda: (Tied("function"), tokens()),
    "tied by a transpose": lambda: (Tied("transpose"), tokens()),
    "custom function": lambda: (Custom(), rows(97)),
    "twice in a pass": lambda: (Net(lambda net, x: net.b(net.a(net.a(x)))), rows(97)),
    "transposed parameter": lambda: (transposed(mlp()), rows(97)),
    "parametrized": lambda: (nn.utils.parametrizations.weight_norm(mlp()[0], dim=None), rows(97)),
    "without a gradient for the first": lambda: (frozen(mlp()), rows(97)),
    "bfloat16": lambda: (mlp().bfloat16(), rows(97).bfloat16()),
}


def transposed(net: nn.Sequential) -> nn.Sequential:
    for layer in (net[0], net[2]):
        layer.weight = nn.Parameter(layer.weight.detach().T.contiguous().T)
    return net


def frozen(net: nn.Sequential) -> nn.Sequential:
    net[2].weight.requires_grad_(False)
    return net


@pytest.mark.parametrize("name", CASES)
def test_steps_are_those_of_a_plain_model(name: str, decoded: list[StorageWeakRef]) -> None:
    net, x = CASES[name]()
    session = assert_equal(net, x)
    decoded.clear()
    y = net(x)
    assert alive(decoded) == 0, "somebody keeps decoded weights between forward and backward"
    assert not packed_sizes(net) & set(saved_sizes(y))
    weighted(y).backward()
    assert len(decoded) > 0
    assert alive(decoded) == 0
    assert not session.changes or all("fewer than" in row.slot for row in session.changes)


@FORMATS
def test_formats(format: str) -> None:
    net = mlp()
    before = parameter_bytes(net)
    session = assert_equal(net, rows(97), plan=Plan.uniform(weight=format, rounding="nearest_even"))
    assert session.weight_bytes == sum(w.packed.format.nbytes(w.size) for p in net.parameters() if (w := weight_of(p)) is not None)
    assert parameter_bytes(net) + session.weight_bytes < 0.6 * before
    assert parameter_bytes(net) == 4 * sum(p.numel() for p in net.parameters() if p.dim() < 2)


def _skip_if_not_supported(net: nn.Module, x: Any, around: AbstractContextManager[Any]) -> None:
    """Skip where torch cannot run the unmodified net: oneDNN has no bf16 LSTM for CPUs without AVX-512."""
    try:
        with around, torch.no_grad():
            copy.deepcopy(net)(x)
    except RuntimeError as error:
        if "primitive descriptor" not in str(error):
            raise
        pytest.skip("oneDNN has no bf16 LSTM for this CPU")


@pytest.mark.parametrize("name", ["mlp", "channels last", "tied modules", "tied by a function", "tied by a transpose", "lstm"])
@pytest.mark.parametrize("format", [LPMM, "bf16"])
def test_autocast_casts_are_decoded_in_backward(name: str, format: str, decoded: list[StorageWeakRef]) -> None:
    net, x = CASES[name]()

    def around() -> AbstractContextManager[Any]:
        return torch.autocast("cpu", torch.bfloat16)

    _skip_if_not_supported(net, x, around())
    assert_equal(net, x, plan=Plan.uniform(weight=format), around=around, loss=lambda y: weighted(y.float()))
    decoded.clear()
    with around():
        y = net(x)
    assert alive(decoded) == 0
    assert not packed_sizes(net) & set(saved_sizes(y)), "a cast of a weight is kept for backward"
    weighted(y.float()).backward()
    assert alive(decoded) == 0


def test_autocast_of_a_weight_that_is_used_twice() -> None:
    """Each call has a cast of its own here, so that gradients are added as float32, not as bfloat16."""
    net = Net(lambda net, x: net.b(net.a(net.a(x))))
    apply(PLAN, net)
    plain = copy.deepcopy(net)
    for model in (net, plain):
        with torch.autocast("cpu", torch.bfloat16):
            loss = weighted(model(rows(97)).float())
        loss.backward()
    for p, q in zip(net.parameters(), plain.parameters(), strict=True):
        assert p.grad is not None
        assert q.grad is not None
        assert (p.grad - q.grad).norm() < 0.01 * q.grad.norm()


def test_autocast_of_a_frozen_weight() -> None:
    net = frozen(mlp())
    assert_equal(net, rows(97), around=lambda: torch.autocast("cpu", torch.bfloat16), loss=lambda y: weighted(y.float()))


def test_a_cast_that_lies_otherwise_is_kept() -> None:
    """A user's own cast into another memory format is not taken for the weight's own."""

    def forward(net: Any, x: Tensor) -> Tensor:
        weight = net.more[0].weight.to(torch.bfloat16, memory_format=torch.channels_last)
        return functional.conv2d(net.more[1](x).bfloat16(), weight).float()

    for value in (None, 0.5):
        net = Net(forward, nn.Conv2d(16, 32, 3), nn.Conv2d(3, 16, 3))
        if value is not None:
            nn.init.constant_(net.more[0].weight, value)
        assert_equal(net, pictures())


@pytest.mark.parametrize("name", ["gpt", "resnet18"])
@pytest.mark.parametrize("plan", [PLAN, Plan.uniform(weight=LPMM, activation="fp32")], ids=["weights", "and activations"])
def test_models(name: str, plan: Plan) -> None:
    x, _ = random_batch(name, 2)
    session = assert_equal(MODELS[name](), x, plan=plan, loss=lambda y: y.square().mean())
    assert {row.given for row in session.changes} <= {"unmodified"}


def test_with_packed_activations(decoded: list[StorageWeakRef]) -> None:
    """The gradients of the same activations in int8 and plain weights."""
    net = mlp()
    apply(PLAN, net).close()  # values that int8 has
    plain = copy.deepcopy(net)
    session = apply(Plan.uniform(weight=LPMM, activation=INT8), net)
    other = apply(Plan.uniform(activation=INT8), plain)
    for _ in range(3):
        found, expected = (step(model, (rows(97),), weighted, nullcontext) for model in (net, plain))
        assert_same(found[1], expected[1])
    decoded.clear()
    kept = net(rows(97))
    assert session.stored_bytes > 0
    assert (session.stored_bytes, alive(decoded)) == (0 + other_bytes(other, plain), 0)
    assert kept.grad_fn is not None


def other_bytes(session: Session, model: nn.Module) -> int:
    kept = model(rows(97))
    assert kept.grad_fn is not None
    return session.stored_bytes


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(reentrant: bool, decoded: list[StorageWeakRef]) -> None:
    def forward(net: Any, x: Tensor) -> Tensor:
        return net.b(checkpoint(net.more[0], net.a(x), use_reentrant=reentrant))

    net = Net(forward, nn.Sequential(nn.Linear(64, 80), nn.Tanh(), nn.Linear(80, 64)))
    assert_equal(net, rows(97))
    decoded.clear()
    y = net(rows(97))
    assert alive(decoded) == 0
    weighted(y).backward()
    assert alive(decoded) == 0


def test_a_model_inside_a_checkpoint() -> None:
    for reentrant in (False, True):
        net = mlp()
        session = apply(PLAN, net)
        plain = copy.deepcopy(net)
        for model in (net, plain):
            weighted(checkpoint(model, rows(97).requires_grad_(), use_reentrant=reentrant)).backward()
        assert_same([p.grad for p in net.parameters()], [p.grad for p in plain.parameters()])
        assert parameter_bytes(net) < 2000
        session.close()


def test_two_backwards_accumulate() -> None:
    net = mlp()
    apply(PLAN, net)
    plain = copy.deepcopy(net)
    for model in (net, plain):
        losses = [weighted(model(rows(97, seed=seed))) for seed in (1, 2)]
        for loss in losses:
            loss.backward()
        loss = weighted(model(rows(97)))
        loss.backward(retain_graph=True)
        loss.backward()
    assert_same([p.grad for p in net.parameters()], [p.grad for p in plain.parameters()])
    assert parameter_bytes(net) < 2000


def test_second_derivatives() -> None:
    net = mlp()
    apply(PLAN, net)
    plain = copy.deepcopy(net)
    for model in (net, plain):
        x = rows(97).requires_grad_()
        (gradient,) = torch.autograd.grad(weighted(torch.tanh(model(x))), x, create_graph=True)
        gradient.square().sum().backward()
    assert_same([p.grad for p in net.parameters()], [p.grad for p in plain.parameters()])
    assert parameter_bytes(net) < 2000


def test_penalties_train(decoded: list[StorageWeakRef]) -> None:
    def loss(model: nn.Module) -> Tensor:
        norms = sum(p.norm() for p in model.parameters()) + sum((p.abs() ** 1.5).sum() for p in model.parameters())
        return weighted(model(rows(97))) + norms + (model[0].weight @ model[2].weight).trace()

    net = mlp()
    apply(PLAN, net)
    plain = copy.deepcopy(net)
    decoded.clear()
    for model in (net, plain):
        loss(model).backward()
    assert_same([p.grad for p in net.parameters()], [p.grad for p in plain.parameters()])
    assert alive(decoded) == 0


@pytest.mark.parametrize("around", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_evaluation(around: Make, decoded: list[StorageWeakRef]) -> None:
    for name in ("mlp", "tied by a transpose", "channels last"):
        net, x = CASES[name]()
        apply(PLAN, net)
        plain = copy.deepcopy(net).eval()
        decoded.clear()
        with around():
            assert torch.equal(net.eval()(x), plain(x))
        assert alive(decoded) == 0
        found, expected = (step(model.train(), (x,), weighted, nullcontext) for model in (net, plain))
        assert_same(found[1], expected[1])


def test_parts_of_a_model_called_by_themselves(decoded: list[StorageWeakRef]) -> None:
    net = mlp()
    apply(PLAN, net)
    plain = copy.deepcopy(net)
    for model in (net, plain):
        decoded.clear()
        y = model[2](model[1](model[0](rows(97))))
        assert alive(decoded) == 0
        weighted(y).backward()
    assert_same([p.grad for p in net[:3].parameters()], [p.grad for p in plain[:3].parameters()])


def test_a_weight_that_changed_since_is_said_to_have() -> None:
    net = mlp()
    apply(PLAN, net)
    loss = weighted(net(rows(97)))
    with torch.no_grad():
        net[2].weight.mul_(0.5)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    loss = weighted(net(rows(97)))
    weight = weight_of(net[4].weight)
    assert weight is not None
    weight.packed.codes.zero_()
    weight.changed()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.filterwarnings("ignore:torch.optim.SGD updates 3 weights")
def test_training_with_torch_optim_follows_the_loss_down() -> None:
    torch.manual_seed(0)
    net = mlp()
    x, target = rows(97), rows(97, 70, seed=5)
    apply(PLAN, net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    losses = []
    for _ in range(30):
        loss = functional.mse_loss(net(x), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]
    assert parameter_bytes(net) < 2000
