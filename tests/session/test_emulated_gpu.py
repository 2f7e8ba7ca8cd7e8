"""Sessions by the code for GPUs, emulated on a CPU: the gradients of the code for CPUs to the bit, one allocation for a packed tensor."""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from paredown import Plan, apply, trace_step
from paredown.autograd.operations import SMALL
from paredown.codec.recompute import pack_mask
from paredown.session.eager import activations, host_memory, stored_tensors
from paredown.session.eager.recomputed_values import RecomputedValues
from paredown.session.eager.stored_tensors import StoredMask, StoredValues

pytest.importorskip("triton")
from paredown.codec.kernels.flat import BufferCodec
from tests.support import emulated_gpu
from tests.support.emulated_gpu import LAUNCHED, emulate_gpu

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy warns in the interpreter
    pytest.mark.skipif(torch.cuda.is_available(), reason="emulates a GPU; this machine has one"),
]


def convolutions() -> tuple[nn.Module, Tensor]:
    def block(num_in: int, num_out: int, *, inplace: bool) -> nn.Module:
        return nn.Sequential(nn.Conv2d(num_in, num_out, 3, padding=1, bias=False), nn.BatchNorm2d(num_out), nn.ReLU(inplace))

    layers = (block(3, 16, inplace=True), block(16, 16, inplace=False), nn.MaxPool2d(2), nn.Conv2d(16, 8, 3))
    return nn.Sequential(*layers).to(memory_format=torch.channels_last), torch.randn(4, 3, 9, 9)  # type: ignore[call-overload]


class Gated(nn.Module):
    """A norm and a gated product, as in Llama; q, k and v are views of one tensor."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.gate, self.up = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(width, 2 * width)
        self.down, self.qkv = nn.Linear(2 * width, width), nn.Linear(width, 3 * width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        x = x + nn.functional.scaled_dot_product_attention(q, k, v)
        h = self.norm(x)
        return x + self.down(silu(self.gate(h)) * self.up(h))


def gated() -> tuple[nn.Module, Tensor]:
    return nn.Sequential(Gated(32), nn.GELU()), torch.randn(2, 65, 32)


def gradients(make: Callable[[], tuple[nn.Module, Tensor]], format: str, dtype: torch.dtype) -> list[Tensor]:
    torch.manual_seed(0)
    model, x = make()
    session = apply(Plan.uniform(activation=format), model)
    found: list[Tensor] = []
    for _ in range(3):
        with torch.autocast("cpu", dtype, enabled=dtype is not torch.float32):
            loss = model(x).float().square().mean()
        assert session.stored_bytes > 0, "nothing is packed: the test is empty"
        loss.backward()
        found.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
        model.zero_grad(set_to_none=True)
    session.close()
    return found


@pytest.mark.parametrize(
    ("make", "format", "dtype"),
    [
        (convolutions, "int8/64@bf16", torch.float32),
        (convolutions, "uint4/64@bf16+bf16", torch.bfloat16),
        (gated, "int8/64@bf16", torch.bfloat16),
    ],
)
def test_gradients_are_those_of_the_code_for_cpus(
    make: Callable[[], tuple[nn.Module, Tensor]], format: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = gradients(make, format, dtype)
    emulate_gpu(monkeypatch)
    LAUNCHED.clear()
    found = gradients(make, format, dtype)
    assert LAUNCHED, "no kernel was launched by address: the test is empty"
    for mine, theirs in zip(found, expected, strict=True):
        error = (mine - theirs).norm() / theirs.norm()
        assert error < 1e-5 if make is gated else torch.equal(mine, theirs), error  # GELU and SiLU are computed otherwise


def test_a_packed_tensor_is_one_allocation(monkeypatch: pytest.MonkeyPatch) -> None:
    emulate_gpu(monkeypatch)
    model, x = convolutions()
    session = apply(Plan.uniform(activation="uint4/64@bf16+bf16"), model)
    for _ in range(3):
        output = model(x)
        forms = session._activations.stored_forms()
        values = [form for form in forms if isinstance(form, StoredValues) and form.stored is not None]
        assert (
            values
            and any(isinstance(form, StoredMask) for form in forms)
            and any(isinstance(form, RecomputedValues) for form in forms)
        )
        for form in values:
            assert isinstance(form.stored, Tensor) and 0 <= form.stored.nbytes - form.nbytes < 48
            assert form.packed is not None and form.packed.nbytes == form.nbytes
        assert session.stored_bytes == sum(form.nbytes for form in forms)
        output.sum().backward()
    session.close()


def normed_convolution() -> nn.Module:
    return nn.Sequential(nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU())


def test_buffers_come_back_from_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is copied is the buffer of codes, scales and minimums, and what is recomputed reads its copy."""
    emulate_gpu(monkeypatch)
    monkeypatch.setattr(host_memory, "OFFLOADING_DEVICES", ("cpu",))
    to_device, num_copied, found = host_memory.HostCopies.to_device, list[int](), list[list[Tensor]]()

    def noted(self: host_memory.HostCopies, on_host: Any, device: torch.device) -> Any:
        assert all(isinstance(copy.like, Tensor) and len(copy.pieces) == 1 for copy in on_host), "one buffer for each tensor"
        num_copied.append(len(on_host))
        return to_device(self, on_host, device)

    monkeypatch.setattr(host_memory.HostCopies, "to_device", noted)
    for slots in ((), ("*",)):
        torch.manual_seed(0)
        model, x = nn.Sequential(*(normed_convolution() for _ in range(3))), torch.randn(4, 8, 12, 12)
        plan = Plan.uniform(activation="int8/64@bf16")
        with apply(plan.offloading(*slots) if slots else plan, model):
            for _ in range(2):
                loss = model(x).square().mean()
                found.append(list(torch.autograd.grad(loss, list(model.parameters()))))
    assert num_copied and all(map(torch.equal, found[1], found[3])) and all(map(torch.equal, found[0], found[2]))


def test_no_mask_is_packed_of_a_tensor_that_stays_unmodified(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the first pass the session does not know that the layer after a ReLU saves the same tensor, and leaves it unmodified."""
    emulate_gpu(monkeypatch)
    model = nn.Sequential(*(part for _ in range(3) for part in (nn.Linear(32, 32), nn.ReLU())), nn.Linear(32, 32))
    x, packed, counts = torch.randn(256, 32), list[Tensor](), list[int]()
    monkeypatch.setattr(activations, "pack_mask", lambda *args: packed.append(pack_mask(*args)) or packed[-1])
    loss = model(x).square().mean()
    expected = torch.autograd.grad(loss, list(model.parameters()))
    with apply(Plan().set("activation", None), model):
        for _ in range(3):
            loss = model(x).square().mean()
            torch.testing.assert_close(torch.autograd.grad(loss, list(model.parameters())), expected, rtol=0, atol=0)
            counts.append(len(packed))
    assert counts == [3, 3, 3]


class Branches(nn.Module):
    """Two branches that save the same input: one is shorter, as in a block with a downsampling shortcut."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.short, self.long = nn.Linear(32, 32), nn.Linear(32, 32), nn.Sequential(nn.Linear(32, 32), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x) * 2
        return self.long(h) + self.short(h)


@pytest.mark.parametrize(("room", "num_decoded"), [(1 << 40, 1), (0, 2)])
def test_two_branches_decode_their_input_once_where_memory_allows(
    room: int, num_decoded: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    emulate_gpu(monkeypatch)
    monkeypatch.setattr(stored_tensors, "memory_in_use", lambda index: (0, room))
    monkeypatch.setattr(stored_tensors, "MIN_HELD_BYTES", 0)
    decoded: list[tuple[int, weakref.ref[Tensor]]] = []
    decode = BufferCodec.decode

    def noted(codec: BufferCodec, stored: Tensor, *layout: tuple[int, ...]) -> Tensor:
        values = decode(codec, stored, *layout)
        decoded.append((stored.data_ptr(), weakref.ref(values)))
        return values

    monkeypatch.setattr(BufferCodec, "decode", noted)
    model, x = Branches(), torch.randn(256, 32)
    with apply(Plan.uniform(activation="int8/64@bf16"), model) as session:
        loss, parameters, found = model(x).square().mean(), list(model.parameters()), list[list[Tensor]]()
        (form,) = [form for form in session._activations.stored_forms() if form.num_views == 2]
        assert isinstance(form, StoredValues) and form.stored is not None
        address = form.stored.data_ptr()
        for retains in (True, True, False):
            decoded.clear()
            found.append(list(torch.autograd.grad(loss, parameters, retain_graph=retains)))
            copies = [values for at, values in decoded if at == address]
            assert len(copies) == num_decoded
            assert all(values() is None for values in copies), "it is held until its last use alone"
    for again in found[1:]:
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(again, found[0], strict=True))


class Positions(nn.Module):
    """Products with small tables beside large tensors, as rotary embeddings have them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
        self.table = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        table = self.table(x[0]).sin()  # 4,096 values
        for layer in self.layers:
            x = layer(x).tanh() * table
        return x


def test_the_smallest_tensors_stay_unmodified_as_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    emulate_gpu(monkeypatch)
    kept = emulated_gpu.Compiled(None, {})  # no kernel runs, which would take minutes
    monkeypatch.setattr(emulated_gpu.Emulated, "__getitem__", lambda *_: lambda *args, **constants: kept)
    monkeypatch.setattr(emulated_gpu.Launcher, "launch", lambda *args: None)
    model, plan = Positions(), Plan.uniform(activation="int8/64@bf16")

    def step(size: int) -> tuple[int, set[str]]:
        small = set(session._activations.small)
        loss = model(torch.randn(size, 64, 64)).square().mean()
        stored = session.stored_bytes
        loss.backward()
        return stored, small

    with apply(plan, model) as session:
        (first, nothing), (second, small), (third, same) = step(256), step(256), step(256)
        assert not nothing and small == same and second == third < first
        trace = trace_step(model, (torch.randn(256, 64, 64), torch.zeros(())), loss=lambda y, _: y.square().mean(), device="cuda")
        assert small == {saver.name for slot in trace.activations if slot.stays == SMALL for saver in slot.savers}
        assert {name for name in small if "mul.other" in name}
        (row,) = [row for row in session.changes if row.reason == SMALL]
        assert row.slot.startswith(f"{len(small)} of at most ")
        larger = [step(512) for _ in range(4)]  # all are packed in the second pass
        assert [names for _, names in larger] == [small, set(), small, small] and larger[1][0] > larger[0][0] == larger[2][0]
