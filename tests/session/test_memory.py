"""One storage is packed once and never confused with another: reused addresses, views, aliases, layouts."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from paredown import Plan, Role, apply, footprint, trace_step
from paredown.formats.format import Format
from paredown.session.eager import stored_tensors
from tests.predict.steps import peak_bytes
from tests.session.nets import INT4, INT8, Net, activations, assert_exact, assert_same, both, error_of, pictures, rows, step

LIMIT = 0.03  # of the error of gradients with everything right
EIGHT = 8192 + 256  # bytes of 8192 values in INT8


class Wave(nn.Module):
    """A module, at whose end what it saved is packed and freed."""

    def forward(self, x: Tensor, number: int) -> Tensor:
        return torch.sin(3 * torch.sigmoid(number * x))


def many_of_one_size(net: Any, x: Tensor) -> Tensor:
    """The allocator uses the memory of what was freed again in the same forward pass."""
    total = h = net.a(x)
    for number in range(1, 9):
        total = total + net.more[0](h, number)
    return total


def worst_error() -> float:
    """Over several sizes, since it is up to the allocator which addresses it uses again."""
    return max(error_of(Net(many_of_one_size, Wave()), rows(num)) for num in (128, 512, 1024, 2048, 4096))


class ReusedAddresses:
    """The addresses of an allocator that gives a new storage the memory of a freed one of its size, whatever the process freed before."""

    def __init__(self) -> None:
        self._refs: dict[
            int, tuple[stored_tensors.StorageRef, tuple[int, int]]
        ] = {}  # a reference keeps a storage's number its own

    def of(self, tensor: Tensor) -> tuple[int, int]:
        """The bytes of the tensor's storage, and the first number that no live storage of so many bytes has."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._refs:
            taken = {address for ref, address in self._refs.values() if not ref.expired()}
            free = next(address for number in count() if (address := (storage.nbytes(), number)) not in taken)
            self._refs[storage._cdata] = stored_tensors.StorageRef(storage), free
        return self._refs[storage._cdata][1]


def test_reused_addresses() -> None:
    assert_exact(Net(many_of_one_size, Wave()), rows(1024))
    assert worst_error() < LIMIT


def test_a_cache_by_address_would_be_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """The naive variant, so that the test above is known to be able to fail: the key is where the data lies."""
    piece, addresses = stored_tensors.StoragePiece.__init__, ReusedAddresses()

    def naive(self: stored_tensors.StoragePiece, tensor: Tensor, known: Any = None) -> None:
        piece(self, tensor, known)
        self.key = (*addresses.of(tensor), tensor.storage_offset(), tensor.size(), tensor.stride())

    monkeypatch.setattr(stored_tensors.StoragePiece, "__init__", naive)
    assert worst_error() > 2 * LIMIT


def test_a_storage_is_packed_once() -> None:
    """A sigmoid's output: saved by the sigmoid, by two linear layers, by a product, and as a view by another."""

    def forward(net: Any, x: Tensor) -> Tensor:
        h = torch.sigmoid(net.a(x))
        return net.a(h) + net.b(h) + h * net.a.weight.sum() + net.b(h.view(2, 64, 64)).view(128, 64)

    net = Net(forward)
    session = apply(activations(INT8), net)
    kept = net(rows())
    assert session.stored_bytes == Format.parse("uint8/64@bf16+bf16").nbytes((128 * 64,))
    assert kept.grad_fn is not None


def relus(num_layers: int, width: int = 64) -> nn.Sequential:
    """Linear layers, and after each a ReLU, whose output the next layer saves too."""
    pairs = [part for _ in range(num_layers) for part in (nn.Linear(width, width, bias=False), nn.ReLU())]
    return nn.Sequential(*pairs, nn.Linear(width, 10))


def test_a_mask_is_dropped_as_soon_as_its_tensor_stays_unmodified() -> None:
    model, plan, seen = relus(4), Plan().set("activation", None), list[int]()
    plain, found, _ = both(relus(4), rows(), plan=plan)
    assert_same(found, plain)
    session = apply(plan, model)
    for part in model:
        part.register_forward_pre_hook(lambda part, args: seen.append(session.stored_bytes) if type(part) is nn.ReLU else None)
    for _ in range(2):
        kept = model(rows())
        assert kept.grad_fn is not None
    assert seen == 8 * [0]


def test_the_peak_of_a_step_whose_masks_are_not_needed_is_the_predicted_one() -> None:
    """It was higher by the masks of all unmodified tensors, which the session held until the forward pass ended."""
    model, batch, loss = relus(80), (rows(2048), torch.zeros(2048, dtype=torch.int64)), functional.cross_entropy
    foot = footprint(trace_step(model, batch, loss=loss, device="cpu"), plan := Plan().set("activation", None))
    apply(plan, model)
    existing = sum(foot.by_role.get(role, 0) for role in (Role.WEIGHT, Role.INPUT))
    assert peak_bytes(model, batch, loss) == foot.low_bytes - existing


VIEWS: dict[str, tuple[Callable[[Any, Tensor], Tensor], int]] = {  # what is done with net.a(x), which is (128, 64); bytes that wait
    "chunks": (lambda net, h: torch.cat([p * q for p, q in zip(h.chunk(2, 1), h.flip(0).chunk(2, 1), strict=True)], 1), 2 * EIGHT),
    "slice of a half": (lambda net, h: h[:, :32].sin(), EIGHT // 2),
    "strided slice": (lambda net, h: h[::2, ::2].repeat(2, 2).sin() + h[::3].sin().sum(), EIGHT),
    "expanded": (lambda net, h: h[:, :1].expand(128, 64) * h, EIGHT),
    "transposed": (lambda net, h: h.T.sin().T.cos(), 2 * EIGHT),
    "as_strided": (lambda net, h: h.as_strided((64, 100), (64, 1), 5).sin(), Format.parse(INT8).nbytes((6400,))),
    "unfold": (lambda net, h: h.unfold(1, 8, 4).sin(), EIGHT),
    "unbind": (lambda net, h: torch.stack([t.sin() for t in h.view(2, 64, 64).unbind(0)]), EIGHT),
    "small slice of a large one": (lambda net, h: h.repeat(10, 1)[128:256].sin(), EIGHT),
    "small transposed slice": (lambda net, h: h.repeat(10, 1)[128:256].T.sin(), EIGHT),
    "small strided slice": (lambda net, h: h.repeat(10, 1)[::10, 1::1].repeat(1, 2)[:, :64].sin(), EIGHT * 63 // 32),
}


@pytest.mark.parametrize("name", VIEWS)
def test_views_wait_with_their_base_and_come_back_in_place(name: str) -> None:
    use, _ = VIEWS[name]
    net = Net(lambda net, x: use(net, net.a(x)))
    assert_exact(net, rows())
    assert error_of(net, rows()) < 0.02


@pytest.mark.parametrize("name", [name for name in VIEWS if name != "small strided slice"])
def test_bytes_of_views(name: str) -> None:
    use, expected = VIEWS[name]
    net = Net(lambda net, x: use(net, net.a(x)))
    session = apply(activations(INT8), net)
    kept = net(rows())
    assert session.stored_bytes == expected
    assert kept.grad_fn is not None


def test_three_heads_of_one_projection_are_one_unit() -> None:
    def forward(net: Any, x: Tensor) -> Tensor:
        query, key, value = net.more[0](x).view(2, 64, 3, 1, 64).permute(2, 0, 3, 1, 4)
        return functional.scaled_dot_product_attention(query, key, value).sum(1)

    net = Net(forward, nn.Linear(64, 192))
    session = apply(activations(INT8), net)
    kept = net(rows())
    assert session.stored_bytes == 3 * EIGHT + 2 * 8192  # all three in one; the output in bf16
    assert kept.grad_fn is not None


@pytest.mark.parametrize("format", [INT8, INT4])
def test_channels_last(format: str) -> None:
    torch.manual_seed(0)
    layers = (
        nn.Conv2d(3, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.Conv2d(8, 8, 3),
        nn.GELU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 4, 1),
    )
    net = nn.Sequential(*layers).to(memory_format=torch.channels_last)
    x = pictures().to(memory_format=torch.channels_last)
    assert_exact(net, x)
    contiguous = error_of(nn.Sequential(*layers).to(memory_format=torch.contiguous_format), pictures(), format=format)
    assert error_of(net, x, format=format) < 1.5 * contiguous


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "unmodified": lambda h: h,
    ".to(channels_last)": lambda h: h.to(memory_format=torch.channels_last),
    ".contiguous(channels_last)": lambda h: h.contiguous(memory_format=torch.channels_last),
    ".to(contiguous)": lambda h: h.to(memory_format=torch.contiguous_format),
    "turned and copied": lambda h: h.transpose(2, 3).to(memory_format=torch.contiguous_format, copy=True),
    "turned": lambda h: h.transpose(2, 3),
    "cast": lambda h: h.bfloat16().float(),
    "channels last in front": lambda h: h.to(memory_format=torch.channels_last).permute(0, 2, 3, 1).reshape(h.shape),
}
BEFORE: dict[str, nn.Module] = {
    "gelu": nn.GELU(),
    "gelu tanh": nn.GELU("tanh"),
    "silu": nn.SiLU(),
    "silu in place": nn.SiLU(inplace=True),
    "layer norm": nn.LayerNorm([16, 16]),
    "norm and relu": nn.Sequential(nn.BatchNorm2d(8), nn.ReLU()),
    "norm and relu in place": nn.Sequential(nn.BatchNorm2d(8), nn.ReLU(inplace=True)),
    "norm without parameters": nn.Sequential(nn.BatchNorm2d(8, affine=False), nn.ReLU()),
}


@pytest.mark.parametrize("before", BEFORE)
@pytest.mark.parametrize("first", [torch.contiguous_format, torch.channels_last])
def test_recomputed_tensors_have_the_same_layout(before: str, first: torch.memory_format) -> None:
    """A convolution after a norm or an activation: its input is not stored, but must be recomputed with each value in its place."""
    for name, layout in LAYOUTS.items():
        torch.manual_seed(0)
        net = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), BEFORE[before], Then(layout), nn.Conv2d(8, 8, 3)).to(memory_format=first)
        x = pictures(side=16).to(memory_format=first)
        assert error_of(net, x) < 0.03, name


class Then(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def test_norm_and_relu_are_recomputed() -> None:
    """Of convolution, norm, ReLU, convolution the norm's input is stored, and a bit for each sign."""
    net = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Conv2d(8, 8, 3))
    session = apply(activations(INT8), net)
    kept = net(pictures(side=16))
    assert session.stored_bytes == EIGHT + 2 * 8192 // 64 + 8192 // 8  # codes, scales and minimums; bits
    assert kept.grad_fn is not None


KINDS = nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.1), nn.GELU()
FULL = pytest.mark.full


def live_bytes() -> int:
    """Of every storage that a tensor in this process refers to."""
    found = {
        t.untyped_storage()._cdata: t.untyped_storage().nbytes()
        for t in gc.get_objects()
        if type(t) in (Tensor, nn.Parameter) and t.layout is torch.strided
    }
    return sum(found.values())


@pytest.mark.parametrize(
    ("num_steps", "more"), [(300, ()), (90, KINDS), pytest.param(10_000, (), marks=FULL), pytest.param(300, KINDS, marks=FULL)]
)
def test_ten_thousand_steps_at_constant_bytes(num_steps: int, more: tuple[nn.Module, ...]) -> None:
    """Of a net with one unit to pack, and of one with all kinds; ten thousand in `make test-all`. A tensor that stays is seen at once."""
    net = nn.Sequential(nn.Linear(32, 32), *copy.deepcopy(more), nn.Linear(32, 4))
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    x = rows(128, 32)
    session = apply(activations(INT8), net)
    seen: set[tuple[int, int, int]] = set()
    sizes: set[int] = set()
    for number in range(num_steps):
        loss = net(x).square().mean()
        sizes.add(session.stored_bytes)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        del loss
        if number % (num_steps // 3) == num_steps // 3 - 1:
            gc.collect()
            seen.add((live_bytes(), session.stored_bytes, len(session._activations._decided)))
    assert len(seen) == 1
    assert len(sizes) == 1
    assert sizes.pop() > 0
    assert session.forwards == num_steps


def test_a_model_and_its_session_are_freed() -> None:
    net = Net(lambda net, x: net.b(net.a(x)))
    gone = weakref.ref(net)
    session = apply(activations(INT8), net)
    step(net, rows())
    del net, session
    gc.collect()
    assert gone() is None
