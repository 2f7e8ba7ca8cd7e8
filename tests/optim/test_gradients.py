"""Gradients are folded when they are complete: the sum is that of the definition, bit for bit, and plain gradients are gone at once."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from paredown.codec.packed import PackedTensor, encode
from paredown.errors import OptimError
from paredown.formats.format import Format
from paredown.formats.rounding import Seed
from paredown.optim.gradient_hooks import Accumulator, clear_factors
from paredown.optim.gradient_ops import PackedGradient
from tests.optim.nets import FORMAT, batches, grad_of, mlp, pack, pack_all, relative_error
from tests.support.compare import assert_same_bits, assert_same_parts

EXACT = 127.0  # a block of it has scale 1, and nothing is rounded
FORMATS = (FORMAT, "int4/64@bf16", "e4m3fn/32@e8m0", "int8/64@fp32", "bf16")


def expected_sum(grads: list[Tensor], seed: Seed, *, weight: float = 1.0, format: str = FORMAT) -> PackedTensor:
    """The sum by its definition, fold by fold, from the codec alone."""
    packed: PackedTensor | None = None
    for n, grad in enumerate(grads, start=1):
        x = grad.float() * weight
        if packed is not None:
            x = packed.decode(torch.float32) + x
        packed = encode(x, format, rounding="stochastic", seed=replace(seed, step=n), order="logical")
    assert packed is not None
    return packed


def plain_grads(model: nn.Module, x: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(model(x).square().sum(), list(model.parameters())))


@pytest.mark.parametrize("format", FORMATS)
def test_the_sum_has_the_bits_of_its_definition(format: str) -> None:
    model, steps = mlp(), batches(4)
    hooks = pack_all(model, weight=0.25, format=format)
    for x in steps:
        model(x).square().sum().backward()
    for number, hook in zip((0, 2), hooks, strict=True):
        grads = [plain_grads(model, x)[number] for x in steps]
        expected = expected_sum(grads, Seed(0, 8 * number + 3), weight=0.25, format=format)
        assert_same_parts(hook.gradient.packed, expected)
        assert_same_bits(grad_of(list(model.parameters())[number]).decode(), expected.decode())
        assert hook.gradient.total.folds == 4


def test_a_factor_between_folds_has_the_bits_of_its_definition() -> None:
    model, (x, y) = mlp(), batches(2)
    pack_all(model)
    model(x).square().sum().backward()
    weight = model[0].weight
    first = grad_of(weight).packed
    scales, codes = first.scales, first.codes.view(torch.int8)
    assert scales is not None
    grad_of(weight).mul_(0.3)
    factor = torch.tensor(0.3)
    spread = (scales.float() * factor).repeat_interleave(64, 1)[:, :64]
    x2 = codes.float() * spread + plain_grads(model, y)[0]
    model(y).square().sum().backward()
    expected = encode(x2, FORMAT, rounding="stochastic", seed=Seed(0, 3, step=2), order="logical")
    assert_same_parts(grad_of(weight).packed, expected)
    assert not grad_of(weight).total.is_scaled and grad_of(weight).factor.item() == 1.0


def test_tied_weights_get_the_sum_of_both_uses_in_one_fold() -> None:
    torch.manual_seed(0)
    embedding, head = nn.Embedding(80, 64), nn.Linear(64, 80, bias=False)
    head.weight = embedding.weight
    hook = pack(embedding.weight)
    tokens = torch.arange(10)
    head(embedding(tokens)).square().sum().backward()
    (expected,) = torch.autograd.grad(head(embedding(tokens)).square().sum(), [embedding.weight])
    assert hook.gradient.total.folds == 1
    assert_same_parts(hook.gradient.packed, expected_sum([expected], Seed(0, 3)))


def test_two_losses_and_retain_graph_add_up() -> None:
    model, x = mlp(), batches(1)[0]
    hooks = pack_all(model)
    y = model(x)
    grads = [torch.autograd.grad(loss, [model[0].weight], retain_graph=True)[0] for loss in (y.square().sum(), y.sum(), y.sum())]
    y.square().sum().backward(retain_graph=True)
    y.sum().backward(retain_graph=True)
    y.sum().backward()
    assert_same_parts(hooks[0].gradient.packed, expected_sum(grads, Seed(0, 3)))


def test_zero_grad_starts_a_new_sum_with_new_random_bits() -> None:
    model, x = mlp(), batches(1)[0]
    hooks = pack_all(model)
    for set_to_none in (True, False, True):
        model(x).square().sum().backward()
        model.zero_grad(set_to_none=set_to_none)
    model(x).square().sum().backward()
    grad = plain_grads(model, x)[0]
    expected = encode(grad, FORMAT, rounding="stochastic", seed=Seed(0, 3, step=4), order="logical")
    assert_same_parts(hooks[0].gradient.packed, expected)
    model.zero_grad(set_to_none=False)
    assert grad_of(model[0].weight).count_nonzero() == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_gradients(dtype: torch.dtype) -> None:
    parameter = nn.Parameter(torch.zeros(3, 100, dtype=dtype))
    hook = pack(parameter)
    grads = [torch.randn(3, 100, generator=torch.Generator().manual_seed(n)).to(dtype) for n in range(3)]
    for grad in grads:
        (parameter * grad).sum().backward()
    assert grad_of(parameter).dtype is dtype
    assert_same_parts(hook.gradient.packed, expected_sum(grads, Seed(0, 3)))
    assert_same_bits(grad_of(parameter).decode(), hook.gradient.packed.decode(dtype))


def test_channels_last_and_expanded_gradients_are_packed_in_logical_order() -> None:
    torch.manual_seed(0)
    conv = nn.Conv2d(16, 8, 3).to(memory_format=torch.channels_last)
    hook = pack(conv.weight)
    x = torch.randn(2, 16, 6, 6).to(memory_format=torch.channels_last)
    (grad,) = torch.autograd.grad(conv(x).square().sum(), [conv.weight])
    conv(x).square().sum().backward()
    assert_same_parts(hook.gradient.packed, expected_sum([grad.contiguous()], Seed(0, 3)))
    parameter = nn.Parameter(torch.zeros(4, 64))
    hook = pack(parameter)
    for _ in range(2):
        (EXACT * parameter.sum()).backward()  # one number, expanded
    assert grad_of(parameter).eq(2 * EXACT).all() and hook.gradient.total.folds == 2


def test_gradients_take_a_byte_per_value_and_their_scales() -> None:
    model = mlp()
    hooks = pack_all(model)
    for x in batches(2):
        model(x).sum().backward()
    gradients = [h.gradient for h in hooks]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for g in gradients for t in g.packed.parts.tensors()}
    assert sum(storages.values()) == sum(Format.parse(FORMAT).nbytes(g.shape) for g in gradients)
    wide = nn.Parameter(torch.zeros(16, 1024))
    pack(wide)
    wide.sum().backward()
    assert grad_of(wide).packed.nbytes / wide.numel() == 1 + 2 / 64
    assert grad_of(wide).nbytes == grad_of(wide).packed.nbytes + 4  # the factor
    assert grad_of(wide).untyped_storage().nbytes() == grad_of(wide).packed.nbytes


def test_a_plain_gradient_is_gone_before_the_next_one_comes() -> None:
    model, seen = mlp(), []
    later: list[weakref.ref[Tensor]] = []
    model[2].weight.register_post_accumulate_grad_hook(lambda p: later.append(weakref.ref(p.grad)))
    pack_all(model)
    model[0].weight.register_post_accumulate_grad_hook(lambda p: seen.append(later[0]() is None))
    model(batches(1)[0]).sum().backward()
    assert seen == [True]


def test_a_referenced_old_gradient_keeps_its_values() -> None:
    model, (x, y) = mlp(), batches(2)
    hooks = pack_all(model)
    model(x).square().sum().backward()
    weight = model[0].weight
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    held, view, values = weight.grad, grad_of(weight)[0], grad_of(weight).clone()
    buffers = hooks[0].gradient.packed
    model.zero_grad()
    model(y).square().sum().backward()
    assert isinstance(held, PackedGradient)
    assert_same_bits(held.decode(), values)
    assert_same_bits(view.clone(), values[0])
    assert grad_of(weight).packed is buffers is hooks[0].gradient.packed
    assert hooks[0].gradient.lent(weight.grad) and not hooks[0].gradient.lent(held)
    weight.grad = held  # user code assigns it, and continues adding
    model(y).square().sum().backward()
    assert hooks[0].gradient.lent(weight.grad)
    assert relative_error(grad_of(weight).clone(), values + plain_grads(model, y)[0]) < 0.02


def test_an_unheld_gradient_is_not_copied() -> None:
    model, x = mlp(), batches(1)[0]
    hooks = pack_all(model)
    model(x).sum().backward()
    assert hooks[0].gradient.is_lent
    model.zero_grad()
    assert not hooks[0].gradient.is_lent


def test_assigned_gradients_are_taken_over() -> None:
    weight = mlp()[0].weight
    hook = pack(weight, weight=0.5)
    assert not hook.collect()
    weight.grad = torch.full_like(weight, EXACT)
    assert hook.collect() and hook.gradient.lent(weight.grad)
    assert grad_of(weight).eq(EXACT / 2).all()  # plain gradients are sums, the accumulator has their mean
    weight.grad = torch.full_like(weight, EXACT)
    (weight * 3 * EXACT).sum().backward()
    assert hook.gradient.lent(weight.grad) and grad_of(weight).eq(2 * EXACT).all()
    assert hook.collect() and grad_of(weight).eq(2 * EXACT).all()


def test_a_graph_over_gradients_is_kept_until_the_step() -> None:
    parameter = nn.Parameter(torch.linspace(0, 1, 128).view(2, 64))
    hook = pack(parameter, weight=0.5)
    (2 * EXACT * parameter).sum().backward()
    assert grad_of(parameter).eq(EXACT).all()
    with pytest.warns(UserWarning, match="create_graph"):
        parameter.square().sum().backward(create_graph=True)
    assert parameter.grad is not None and parameter.grad.grad_fn is not None
    assert torch.equal(parameter.grad, 2 * EXACT + 2 * parameter)
    (second,) = torch.autograd.grad(parameter.grad.sum(), [parameter])
    assert second.eq(2).all()
    assert hook.collect()
    assert torch.allclose(grad_of(parameter).clone(), EXACT + parameter.detach(), rtol=0, atol=1.1)
    parameter.grad = None


def test_autograd_grad_sees_nothing_of_it() -> None:
    model, x = mlp(), batches(1)[0]
    hooks = pack_all(model)
    grads = torch.autograd.grad(model(x).square().sum(), list(model.parameters()), create_graph=True)
    torch.autograd.grad(grads[0].square().sum(), list(model.parameters()), allow_unused=True)
    assert all(type(g) is Tensor for g in grads) and all(p.grad is None for p in model.parameters())
    assert all(h.gradient.total.folds == 0 for h in hooks)


def test_sparse_complex_and_misfit_gradients_are_refused() -> None:
    embedding = nn.Embedding(80, 64, sparse=True)
    hook = pack(embedding.weight, number=7)
    with pytest.raises(OptimError, match=r"parameter 7: a gradient is sparse.*sparse=False"):
        embedding(torch.arange(3)).sum().backward()
    embedding.weight.grad = None
    embedding.weight.sum().backward()
    before = grad_of(embedding.weight).clone()
    with pytest.raises(OptimError, match="sparse"):
        embedding(torch.arange(3)).sum().backward()
    assert_same_bits(grad_of(embedding.weight).clone(), before)
    with pytest.raises(OptimError, match="complex"):
        Accumulator(nn.Parameter(torch.zeros(2, 2, dtype=torch.complex64)), hook.gradient)
    embedding.weight.grad = None
    embedding.weight.data = torch.zeros(10, 64)
    with pytest.raises(OptimError, match=r"shape \(10, 64\).*\(80, 64\).*Make a new optimizer"):
        embedding.weight.sum().backward()
    with pytest.raises(OptimError, match="logical"):
        PackedGradient(encode(torch.zeros(64, 64).t(), FORMAT), Seed(0))


def test_a_removed_hook_leaves_gradients_to_torch() -> None:
    model, x = mlp(), batches(1)[0]
    hooks = pack_all(model)
    hooks[0].attach()  # a second time does nothing
    for hook in hooks:
        hook.remove()
        hook.remove()
    model(x).sum().backward()
    assert all(type(p.grad) is Tensor for p in model.parameters())


def test_hooks_keep_no_parameter_alive() -> None:
    model = mlp()
    hooks = pack_all(model)
    model(batches(1)[0]).sum().backward()
    gone = weakref.ref(model[0].weight)
    del model
    gc.collect()
    assert gone() is None
    with pytest.raises(OptimError, match="was deleted"):
        hooks[0].collect()


def test_copies_of_a_model_are_plain() -> None:
    model, x = mlp(), batches(1)[0]
    pack_all(model)
    model(x).square().sum().backward()
    other = copy.deepcopy(model)
    assert all(p.grad is None for p in other.parameters())
    other(x).sum().backward()
    assert all(type(p.grad) is Tensor for p in other.parameters())


def test_a_converted_model_gets_converted_gradients() -> None:
    model, x = mlp(), batches(1)[0]
    hooks = pack_all(model)
    model(x).square().sum().backward()
    before = grad_of(model[0].weight).clone()
    model.to(torch.bfloat16)
    assert model[0].weight.grad is not None and model[0].weight.grad.dtype is torch.bfloat16
    assert relative_error(model[0].weight.grad.clone(), before) < 0.02
    model(x.bfloat16()).sum().backward()
    model.zero_grad()
    model(x.bfloat16()).sum().backward()
    assert hooks[0].gradient.lent(model[0].weight.grad) and grad_of(model[0].weight).dtype is torch.bfloat16


def test_factors_are_cleared_together_unless_referenced() -> None:
    model, x = mlp(), batches(1)[0]
    gradients = [hook.gradient for hook in pack_all(model)]
    model(x).square().sum().backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    held = model[0].weight.grad
    model.zero_grad()
    clear_factors(gradients)
    assert [g.total.is_scaled for g in gradients] == [True, False]
    assert gradients[1].factor.item() == 1.0 and gradients[0].factor.item() < 1
    assert held is not None and held.norm() < 1e-3


def test_backward_on_another_thread() -> None:
    model, x = mlp(), batches(1)[0]
    hooks = pack_all(model)
    worker = threading.Thread(target=lambda: model(x).square().sum().backward())
    worker.start()
    worker.join()
    assert_same_parts(hooks[0].gradient.packed, expected_sum([plain_grads(model, x)[0]], Seed(0, 3)))


def test_torchs_own_optimizers_take_them() -> None:
    makers = {
        "sgd": lambda ps, foreach: torch.optim.SGD(ps, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1, foreach=foreach),
        "adamw": lambda ps, foreach: torch.optim.AdamW(ps, lr=0.01, foreach=foreach),
        "fused": lambda ps, foreach: torch.optim.Adam(ps, lr=0.01, fused=True),
    }
    for make in makers.values():
        for foreach in (False, True):
            model, plain = mlp(), mlp()
            pack_all(model)
            optimizers = [make(m.parameters(), foreach) for m in (model, plain)]
            for x in batches(2):
                model(x).square().sum().backward()
                for p, q in zip(model.parameters(), plain.parameters(), strict=True):
                    assert p.grad is not None
                    q.grad = p.grad.clone()
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
            for p, q in zip(model.parameters(), plain.parameters(), strict=True):
                assert_same_bits(p.detach(), q.detach())
