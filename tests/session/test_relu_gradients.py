"""The backward of a ReLU whose mask is stored: torch's gradients to the bit, without unpacking the mask."""

# pyright: reportPrivateUsage=false

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paredown import Plan, apply
from paredown.codec import recompute
from paredown.codec.recompute import NO_BOUND, ReluOutput, pack_mask
from paredown.session.eager import activations, slot_decisions, stored_tensors
from paredown.session.eager.stored_tensors import StoragePiece, StoredMask, StoredView

pytest.importorskip("triton")
from tests.support.emulated_gpu import emulate_gpu

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
LAYOUTS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}


def values(layout: str = "contiguous") -> Tensor:
    x = torch.randn(4, 6, 5, 7, generator=torch.Generator().manual_seed(0))
    x[0, 0, 0, :4] = torch.tensor([0.0, -0.0, torch.nan, torch.inf])
    return x.to(memory_format=LAYOUTS[layout]).requires_grad_()


def relu_with_stored_mask(x: Tensor) -> Tensor:
    """relu(x), whose node has the stored mask in place of its output."""
    y = torch.relu(x)
    node: Any = y.grad_fn
    piece = StoragePiece(node._saved_result)
    view = StoredView(StoredMask(piece, pack_mask(piece.flat(), 0.0, NO_BOUND), (1.0, 0.0)), piece.layout())
    node._raw_saved_result.register_hooks(lambda _: view, StoredView.relu_output)
    return y


@pytest.fixture
def unpacked(monkeypatch: pytest.MonkeyPatch) -> list[ReluOutput]:
    """The masks that were unpacked."""
    found, unpack = list[ReluOutput](), ReluOutput._unpacked
    monkeypatch.setattr(ReluOutput, "_unpacked", lambda self: (found.append(self), unpack(self))[1])
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_gradient_is_that_of_torch(layout: str, unpacked: list[ReluOutput]) -> None:
    x, weight = values(layout), torch.randn_like(values(layout))
    (expected,) = torch.autograd.grad(torch.relu(x), x, weight)
    for grad in (weight, weight.bfloat16().float()):
        y = relu_with_stored_mask(x)
        (found,) = torch.autograd.grad(y, x, grad, retain_graph=True)
        assert found.stride() == x.stride()
        assert torch.equal(torch.autograd.grad(y, x, grad)[0], found), "the graph was retained"
    (found,) = torch.autograd.grad(relu_with_stored_mask(x), x, weight)
    assert torch.equal(found, expected)
    assert not unpacked


def test_gradients_of_other_layouts_take_an_unpacked_mask(unpacked: list[ReluOutput]) -> None:
    x = values("channels_last")
    for grad in (torch.randn(4, 6, 5, 7), torch.ones(()).expand(4, 6, 5, 7)):
        (expected,) = torch.autograd.grad(torch.relu(x), x, grad)
        assert torch.equal(torch.autograd.grad(relu_with_stored_mask(x), x, grad)[0], expected)
    assert len(unpacked) == 2


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_second_derivatives_batched_gradients_and_anomaly_detection() -> None:
    x, weight = values(), torch.randn(4, 6, 5, 7, requires_grad=True)
    expected: tuple[Tensor, ...] = ()
    for relu in (torch.relu, relu_with_stored_mask):
        with torch.autograd.detect_anomaly(check_nan=False):
            (first,) = torch.autograd.grad(relu(x), x, weight, create_graph=True)
            (second,) = torch.autograd.grad(first.square().sum(), weight)
        batched = torch.autograd.grad(relu(x), x, torch.stack([weight.detach(), -weight.detach()]), is_grads_batched=True)[0]
        if relu is torch.relu:
            expected = first, second, batched
        else:
            assert all(torch.equal(a, b) for a, b in zip((first, second, batched), expected, strict=True))


class Doubled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2.0


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_session_stores_masks_so(device: str, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, zeroed = list[Tensor](), recompute.apply_mask
    monkeypatch.setattr(recompute, "apply_mask", lambda grad, bits: (calls.append(bits), zeroed(grad, bits))[1])
    model = nn.Sequential(nn.ReLU(), Doubled()).to(device)
    x = torch.randn(8, 16, 12, 12, device=device).to(memory_format=LAYOUTS[layout]).requires_grad_()
    weight = torch.randn_like(x)
    (expected,) = torch.autograd.grad(model(x), x, weight)
    session = apply(Plan.preset("activations8"), model)
    for _ in range(3):
        (found,) = torch.autograd.grad(model(x), x, weight)
        assert torch.equal(found, expected) and found.stride() == expected.stride()
    assert len(calls) == (3 if device == "cuda" else 0)
    session.close()


# --- masks that the kernel packs which encodes the same tensor ---------------------------------------------------------------------


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Conv2d(4, 16, 3), nn.Conv2d(16, 16, 3), nn.Conv2d(16, 4, 1)
        self.relu, self.skips, self.modifies = nn.ReLU(), False, False

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.first(x))
        if self.modifies:
            y = y.add_(1.0)
        return self.last(y * 2.0 if self.skips else self.second(y))


class Run:
    """Gradients of passes under a session, and the number of masks that were packed on their own."""

    def __init__(self, device: str, devices: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_packed = 0
        if device == "cpu":
            emulate_gpu(monkeypatch)
        monkeypatch.setattr(slot_decisions, "IN_ONE_PASS", devices)
        monkeypatch.setattr(activations, "pack_mask", self._pack)
        monkeypatch.setattr(slot_decisions, "pack_mask", self._pack)
        monkeypatch.setattr(stored_tensors, "pack_mask", self._pack)
        torch.manual_seed(0)
        self.model = Layers().to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.x = torch.randn(6, 4, 11, 11, device=device).to(memory_format=torch.channels_last)
        self.session = apply(Plan.preset("activations4"), self.model)

    def _pack(self, x: Tensor, low: float, high: float) -> Tensor:
        self.num_packed += 1
        return pack_mask(x, low, high)

    def gradients(self) -> list[Tensor | None]:
        self.model.zero_grad(set_to_none=True)
        self.model(self.x).square().sum().backward()
        return [None if p.grad is None else p.grad.clone() for p in self.model.parameters()]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy warns in the interpreter
@pytest.mark.parametrize("device", DEVICES)
def test_a_mask_is_packed_with_the_codes_of_the_same_tensor(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    skips = (False, False, False, True, False, False)

    def gradients(devices: tuple[str, ...]) -> tuple[list[list[Tensor | None]], int]:
        run = Run(device, devices, monkeypatch)
        found: list[list[Tensor | None]] = []
        for run.model.skips in skips:
            found.append(run.gradients())
        run.session.close()
        return found, run.num_packed

    (expected, apart), (found, together) = gradients(()), gradients((device,))
    assert apart == len(skips)
    assert together == 3, "the first pass, the one that skips the layer (at its end), and the one after it"
    for mine, theirs in zip(found, expected, strict=True):
        assert all(
            a is b is None or (a is not None and b is not None and torch.equal(a, b)) for a, b in zip(mine, theirs, strict=True)
        )


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy warns in the interpreter
@pytest.mark.parametrize("device", DEVICES)
def test_a_tensor_that_is_modified_before_its_mask_is_packed(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(device, (device,), monkeypatch)
    for _ in range(2):
        run.gradients()
    run.model.modifies = True
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        run.gradients()
    run.session.close()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        run.gradients()
