"""On a GPU: accumulators have the bits of the CPU, are filled on the thread of autograd without synchronizing, and move with the model."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.optim.nets import batches, grad_of, mlp, pack, pack_all, relative_error
from tests.support.compare import assert_same_bits

pytestmark = pytest.mark.gpu


def folded(device: str, dtype: torch.dtype) -> list[Tensor]:
    """Codes and scales after three backwards whose gradients are the same on every device; the factor is another than 1 in between."""
    parameter = nn.Parameter(torch.zeros(5, 1000, dtype=dtype, device=device))
    hook = pack(parameter, weight=1 / 3)
    for n in range(3):
        grad = torch.randn(5, 1000, generator=torch.Generator().manual_seed(n)).to(device, dtype)
        (parameter * grad).sum().backward()
        if n == 0:
            grad_of(parameter).mul_(torch.tensor(0.3, device=device))
    return [t.cpu() for t in hook.gradient.packed.parts.tensors()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_bits_are_the_cpus(dtype: torch.dtype) -> None:
    for ours, theirs in zip(folded("cuda", dtype), folded("cpu", dtype), strict=True):
        assert_same_bits(ours, theirs)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype feature")
def test_nothing_synchronizes_with_the_device() -> None:
    model = mlp().cuda()
    pack_all(model)
    x = batches(1)[0].cuda()
    scale, found = torch.full((), 0.5, device="cuda"), torch.zeros(1, device="cuda")
    model(x).sum().backward()  # kernels are compiled
    model.zero_grad()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(2):
            model(x).square().sum().backward()
        for foreach in (False, True):
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=foreach)
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        torch._amp_foreach_non_finite_check_and_unscale_(gradients, found, scale)
        model.zero_grad(set_to_none=False)
        model(x).square().sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert found.item() == 0


def test_grad_scaler_sees_nonfinite_blocks() -> None:
    model = mlp().cuda()
    pack_all(model)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cuda", init_scale=1024.0)
    scaler.scale(model(batches(1)[0].cuda()).sum()).backward()
    grad_of(model[2].weight)[0, 0] = float("inf")
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 512.0
    assert torch.equal(model[2].weight.cpu(), mlp()[2].weight)


def test_gradients_move_with_the_model() -> None:
    model = mlp()
    pack_all(model)
    model(batches(1)[0]).square().sum().backward()
    before = grad_of(model[0].weight).clone()
    model.cuda()
    assert grad_of(model[0].weight).device.type == grad_of(model[0].weight).packed.device.type == "cuda"
    assert relative_error(grad_of(model[0].weight).cpu(), before) < 0.01


def test_plain_gradients_are_freed_in_backward() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(8))).cuda()
    pack_all(model)
    x = torch.randn(4, 1024, device="cuda")
    model(x).sum().backward()
    model.zero_grad()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    model(x).sum().backward()
    layer = 1024 * 1024 * 4
    assert torch.cuda.max_memory_allocated() - before < 3.5 * layer  # of 8
