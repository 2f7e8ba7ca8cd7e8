"""What backward compares or counts is exact under any plan: signs, masks, bounds, indices; of shapes nothing is stored."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from paredown import apply
from paredown.codec.recompute import pack_mask
from paredown.session.eager import slot_decisions as stored
from paredown.session.eager.stored_tensors import StoredMask
from tests.session.nets import INT4, INT8, Net, activations, assert_exact, both, error_of, pictures, relative_error, rows

INF = float("inf")
SWITCHES: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": functional.relu,
    "relu in place": lambda x: functional.relu(x, inplace=True),
    "nn.ReLU": nn.ReLU(),
    "relu6": lambda x: functional.relu6(30 * x),
    "nn.ReLU6 in place": nn.Sequential(nn.Identity(), nn.ReLU6(inplace=True)),
    "leaky_relu": functional.leaky_relu,
    "leaky_relu in place": lambda x: functional.leaky_relu(x, 0.2, inplace=True),
    "hardtanh": lambda x: functional.hardtanh(x, -0.2, 0.3),
    "hardtanh above 0": lambda x: functional.hardtanh(x, 0.0, INF),
    "hardtanh below": lambda x: functional.hardtanh(x, -INF, -0.1),
    "hardtanh of nothing": lambda x: functional.hardtanh(x, -INF, INF),
    "hardtanh away from 0": lambda x: functional.hardtanh(x, 0.1, 0.4),
    "clamp": lambda x: x.clamp(-0.2, 0.2),
    "clamp(min)": lambda x: x.clamp(min=0),
    "clamp_max": lambda x: x.clamp_max(0.1),
    "threshold": lambda x: functional.threshold(x, 0.1, 0.0),
    "abs": torch.abs,
    "maximum": lambda x: torch.maximum(x, x.flip(0)),
    "amax": lambda x: x.view(2, 64, 64).amax(1).repeat(64, 1),
    "max": lambda x: x * x.max(),
    "softshrink": lambda x: functional.softshrink(x, 0.1),
    "hardsigmoid": lambda x: functional.hardsigmoid(10 * x),
    "prelu": nn.PReLU(),
    "where": lambda x: torch.where(x > 0.1, x, 0.5 * x),
    "masked_fill": lambda x: x.masked_fill(x > 0.1, 0.0),
}


def alone(switch: Callable[[Tensor], Tensor]) -> Net:
    """A net whose gradient depends on the switch and on nothing that may be rounded: a's input is the caller's, b's weight has none."""
    net = Net(lambda net, x: switch(net.a(x)) @ net.b.weight.detach())
    net.b.requires_grad_(False)
    return net


@pytest.mark.parametrize("name", SWITCHES)
@pytest.mark.parametrize("format", [None, INT4])
def test_switches_are_exact(name: str, format: str | None) -> None:
    plain, found, _ = both(alone(SWITCHES[name]), rows(), plan=activations(format))
    if name == "max":  # of a product: x itself may be rounded
        assert relative_error(found, plain) < 0.02
    else:
        assert all(torch.equal(a, b) for a, b in zip(found, plain, strict=True))


def test_the_check_sees_one_sign_that_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    def flipped(x: Tensor, low: float, high: float) -> Tensor:
        bits = pack_mask(x, low, high)
        bits[7] ^= 1
        return bits

    monkeypatch.setattr(stored, "pack_mask", flipped)
    plain, found, _ = both(alone(functional.relu), rows(), plan=activations(INT4))
    assert not torch.equal(found[0], plain[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_signs_of_narrow_types(dtype: torch.dtype) -> None:
    net = Net(lambda net, x: functional.relu6(functional.relu(net.a(x).to(dtype)) * 9).float())
    plain, found, _ = both(net, rows(), plan=activations(INT4))
    assert all(torch.equal(a, b) for a, b in zip(found, plain, strict=True))


@pytest.mark.parametrize(
    "drop",
    [
        nn.Dropout(0.3),
        nn.Dropout(0.3, inplace=True),
        nn.AlphaDropout(0.3),
        lambda x: functional.dropout(x, 0.3),
        nn.Dropout(0.0),
        nn.Dropout(1.0),
    ],
)
def test_dropout_masks_are_exact_and_one_bit(drop: Callable[[Tensor], Tensor]) -> None:
    net = alone(lambda x: drop(x))
    plain, found, _ = both(net, rows(), plan=activations(INT4))
    assert all(torch.equal(a, b) for a, b in zip(found, plain, strict=True))
    session = apply(activations(INT4), net)
    kept = net(rows())
    assert session.stored_bytes <= 8192 // 8
    assert kept.grad_fn is not None


class Gaussian(nn.Dropout):
    """Of the class, but not a mask of zeros and one other value."""

    def forward(self, x: Tensor) -> Tensor:
        return x * (1 + torch.randn_like(x))


FACTORS: dict[str, Tensor] = {
    "-1": torch.full((128, 64), -1.0),
    "0": torch.zeros(128, 64),
    "2": torch.full((128, 64), 2.0),
    "0 and -1": -(rows() > 0).float(),
    "0 and 3": 3 * (rows() > 0).float(),
    "-1 and 1": rows().sign(),
    "0, 1 and 2": (rows() > 0).float() + (rows() > 1).float(),
    "nan": torch.where(rows() > 0, torch.nan, 0.0),
}


@pytest.mark.parametrize("name", FACTORS)
def test_factors_of_few_values_are_not_taken_for_masks(name: str) -> None:
    """Made in the forward pass, as a mask is; those that are none may be rounded, and these values would not be."""
    plain, found, _ = both(alone(lambda x: x * FACTORS[name].clone()), rows(), plan=activations(INT8))
    for a, b in zip(found, plain, strict=True):
        torch.testing.assert_close(a, b, rtol=0.01, atol=0.01 * b.nan_to_num(0).abs().max().item(), equal_nan=True)


def test_a_dropout_of_another_kind_is_not_taken_for_a_mask() -> None:
    assert error_of(alone(Gaussian(0.1)), rows()) < 0.01


POOLS: dict[str, tuple[nn.Module, Tensor]] = {
    "1d": (nn.Sequential(nn.Conv1d(1, 4, 3), nn.MaxPool1d(2)), torch.randn(8, 1, 4098)),
    "2d": (nn.Sequential(nn.Conv2d(3, 8, 3), nn.MaxPool2d(2)), pictures(side=34)),
    "2d one picture": (nn.Sequential(nn.Conv2d(3, 64, 3), nn.MaxPool2d(2)), pictures(1, side=66)[0]),
    "2d larger than a byte": (nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.MaxPool2d(2)), pictures(2, side=64)),
    "2d channels_last": (
        nn.Sequential(nn.Conv2d(3, 8, 3), nn.MaxPool2d(2)),
        pictures(side=34).to(memory_format=torch.channels_last),
    ),
    "3d": (nn.Sequential(nn.Conv3d(1, 4, 3, padding=1), nn.MaxPool3d(2)), torch.randn(2, 1, 32, 16, 16)),
    "3d one volume": (nn.Sequential(nn.Conv3d(1, 16, 3, padding=1), nn.MaxPool3d(2)), torch.randn(1, 32, 16, 16)),
    "adaptive 2d": (nn.Sequential(nn.Conv2d(3, 8, 3), nn.AdaptiveMaxPool2d(16)), pictures(side=34)),
    "adaptive 3d": (nn.Sequential(nn.Conv3d(1, 8, 3, padding=1), nn.AdaptiveMaxPool3d(8)), torch.randn(2, 1, 32, 16, 16)),
    "average": (nn.Sequential(nn.Conv2d(3, 8, 3), nn.AvgPool2d(2)), pictures(side=34)),
    "adaptive average": (nn.Sequential(nn.Conv2d(3, 8, 3), nn.AdaptiveAvgPool2d(2)), pictures(side=34)),
}


@pytest.mark.parametrize("name", POOLS)
def test_pools_are_exact(name: str) -> None:
    model, x = POOLS[name]
    assert_exact(model, x)


def test_indices_take_the_smallest_width_and_inputs_of_pools_nothing() -> None:
    net = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.MaxPool2d(2, return_indices=False))
    session = apply(activations("fp32"), net)
    small = net(pictures(8, side=16))  # planes of 256 places: a byte each
    assert session.stored_bytes == 8 * 8 * 8 * 8
    del small
    large = net(pictures(8, side=18))
    assert session.stored_bytes == 2 * 8 * 8 * 9 * 9
    assert large.grad_fn is not None


def test_indices_of_two_tables_in_one_storage() -> None:
    def forward(net: Net, x: Tensor) -> Tensor:
        places = torch.arange(8192)
        ids = torch.stack([places % 10, places * 37 % 5000])
        return net.more[0](ids[0]) * net.more[1](ids[1]) + net.a(x).sum()

    assert_exact(Net(forward, nn.Embedding(10, 16), nn.Embedding(5000, 16)), rows())


@pytest.mark.parametrize(("classes", "ignored"), [(20, -100), (20, 255), (300, -100), (20, 40_000), (2, -1)])
def test_targets_that_are_ignored(classes: int, ignored: int) -> None:
    def forward(net: Net, x: Tensor) -> Tensor:
        target = torch.arange(len(x)) % classes
        return functional.cross_entropy(net.more[0](x), torch.where(target % 3 == 1, ignored, target), ignore_index=ignored).view(1)

    assert_exact(Net(forward, nn.Linear(8, classes)), rows(8192, 8), loss=lambda y: y.sum())


def stacked(values: list[float], pack: Callable[[list[Tensor]], list[Tensor]]) -> Net:
    """Products with two-valued views of one storage, whose values beside 0 are `values`."""

    def forward(net: Net, x: Tensor) -> Tensor:
        h = net.a(x)
        weights = pack([value * (x > 0.2 * number).float() for number, value in enumerate(values)])
        return sum((torch.sin(h * (number + 1)) * weight for number, weight in enumerate(weights)), torch.zeros(()))

    return Net(forward)


PACKS: dict[str, Callable[[list[Tensor]], list[Tensor]]] = {
    "stack": lambda masks: list(torch.stack(masks)),
    "cat": lambda masks: list(torch.cat(masks, 1).chunk(len(masks), 1)),
    "stack last": lambda masks: list(torch.stack(masks, -1).unbind(-1)),
    "apart": lambda masks: masks,
}


@pytest.mark.parametrize("pack", PACKS)
@pytest.mark.parametrize("values", [[1.0, 2.0], [1.0, 2.0, 3.0], [0.25, 0.25, 1.5], [2.0, 1.0]])
def test_two_valued_views_of_one_storage_keep_their_own_values(pack: str, values: list[float]) -> None:
    """Each view has one value beside 0, and another than the next: they are not one mask."""
    net = stacked(values, PACKS[pack])
    assert_exact(net, rows())
    assert error_of(net, rows(), format=INT8) < 0.02


def test_views_with_the_same_two_values_share_their_bits() -> None:
    net, x = stacked([2.0, 2.0], PACKS["stack"]), rows()
    with apply(activations(INT8), net) as session:
        kept = net(x)
        bits = [form for form in session._activations.stored_forms() if isinstance(form, StoredMask)]
        assert len(bits) == 1
        assert bits[0].nbytes == 2 * x.numel() // 8
    assert kept.grad_fn is not None


def test_a_negative_zero_is_no_mask() -> None:
    """One bit cannot encode 0.0, -0.0 and 1.0: the gradient's sign bits would change."""
    mask = (rows() > 0).float().where(rows(seed=2) > 0, torch.tensor(-0.0))
    net = Net(lambda net, x: net.a(x) * mask)
    plain, found, _ = both(net, rows(), plan=activations("fp32"))
    assert all(torch.equal(a.view(torch.int32), b.view(torch.int32)) for a, b in zip(found, plain, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_bounds_that_a_dtype_does_not_have_decide_as_in_torch(dtype: torch.dtype) -> None:
    """1.3 is 1.296875 in bfloat16, and backward of hardtanh compares with 1.3."""
    torch.manual_seed(0)
    weight, x = torch.randn(64, 64, dtype=dtype), torch.randn(128, 64, dtype=dtype)
    found: list[Tensor] = []
    for is_packed in (False, True):
        model = Net(lambda net, h: functional.hardtanh(h @ weight, -0.1, 1.3))
        source = x.clone().requires_grad_()
        session = apply(activations(INT8), model) if is_packed else None
        model(source).sum().backward()
        assert source.grad is not None
        found.append(source.grad)
        if session is not None:
            session.close()
    assert torch.equal(*found)
