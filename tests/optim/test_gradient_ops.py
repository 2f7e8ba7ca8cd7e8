"""What torch and its users do to p.grad works on packed gradients: clipping, scaling, reading, writing, saving."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from paredown.codec.packed import encode
from paredown.errors import OptimError
from paredown.formats.rounding import Seed
from paredown.optim.gradient_ops import PackedGradient
from tests.optim.nets import FORMAT, batches, grad_of, mlp, pack, pack_all, relative_error
from tests.support.compare import assert_same_bits

FOREACH = (None, True, False)


def gradient(*shape: int, format: str = FORMAT, dtype: torch.dtype = torch.float32, seed: int = 0) -> PackedGradient:
    """A gradient of normal values."""
    values = torch.randn(*(shape or (6, 100)), generator=torch.Generator().manual_seed(seed)).to(dtype)
    return PackedGradient(encode(values, format, order="logical"), Seed(0))


def model_with_gradients(count: int = 1) -> nn.Sequential:
    model = mlp()
    pack_all(model)
    for x in batches(count):
        model(x).square().sum().backward()
    return model


def decoded(model: nn.Module) -> list[Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def codes_of(model: nn.Module) -> list[Tensor]:
    return [t.clone() for p in model.parameters() if p.dim() > 1 for t in grad_of(p).packed.parts.tensors()]


# --- clipping ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("foreach", FOREACH)
@pytest.mark.parametrize("order", [2.0, 1.0, float("inf")])
def test_clip_grad_norm(foreach: bool | None, order: float) -> None:
    model = model_with_gradients()
    before, codes = decoded(model), codes_of(model)
    total = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g, order) for g in before]), order)
    found = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5, norm_type=order, foreach=foreach)
    assert_same_bits(found, total)
    after = decoded(model)
    clipped = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None], order)
    assert torch.isclose(clipped, torch.tensor(0.5), rtol=1e-4)
    for a, b in zip(after, before, strict=True):
        assert torch.allclose(a, b * (0.5 / (total + 1e-6)), rtol=1e-6, atol=0)
    for a, b in zip(codes_of(model), codes, strict=True):  # one number changed, no code
        assert_same_bits(a, b)
    assert_same_bits(torch.nn.utils.clip_grad_norm_(model.parameters(), 10.0, foreach=foreach, norm_type=order), clipped)
    for a, b in zip(decoded(model), after, strict=True):
        assert_same_bits(a, b)


@pytest.mark.parametrize("foreach", FOREACH)
def test_clip_grad_norm_of_nonfinite_gradients(foreach: bool | None) -> None:
    model = model_with_gradients()
    (model[0].weight * float("inf")).sum().backward()
    with pytest.raises(RuntimeError, match="non-finite"):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True, foreach=foreach)
    assert not torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=foreach).isfinite()


@pytest.mark.parametrize("foreach", FOREACH)
def test_clip_grad_value(foreach: bool | None) -> None:
    model = model_with_gradients()
    grad_of(model[0].weight).view(-1)[0] = 1e4  # an outlier: rounding before both bounds are there would drown its block
    before = decoded(model)
    limit = 0.1
    torch.nn.utils.clip_grad_value_(model.parameters(), limit, foreach=foreach)
    for a, b in zip(decoded(model), before, strict=True):
        step = limit / 127 * (1 + 2**-7)
        assert (a - b.clamp(-limit, limit)).abs().max() <= step
        assert a.abs().max() <= limit * (1 + 2**-7)


def test_a_deferred_lower_bound_applies_to_every_reader() -> None:
    readers: list[Callable[[PackedGradient], Tensor]] = [
        lambda g: g.decode(),
        lambda g: g.packed.decode() * g.factor,
        lambda g: g.mul_(1.0).clone(),
        lambda g: g.add_(torch.zeros(6, 100)).clone(),
        lambda g: g.total.copy().decode(torch.float32),
    ]
    for reader in readers:
        g = gradient()
        torch._foreach_clamp_min_([g], 0.0)
        assert reader(g).min() >= 0
    torch._foreach_clamp_min_([g], 1.0)
    assert g.zero_().decode().eq(0).all()


# --- scaling ----------------------------------------------------------------------------------------------------------


def test_factors_change_no_code() -> None:
    g = gradient()
    before, codes = g.clone(), g.packed.codes.clone()
    g.mul_(0.5).div_(4).mul_(torch.tensor(3.0)).div_(torch.tensor([[2.0]])).neg_().mul_(torch.tensor(2, dtype=torch.float64))
    g *= 2
    g /= 2
    torch._foreach_mul_([g, before.clone()], [2.0, 1.0])
    torch._foreach_div_([g], 2.0)
    torch._foreach_neg_([g])
    assert g.total.is_scaled and torch.equal(g.packed.codes, codes)
    assert torch.allclose(g.clone(), before * 0.375, rtol=1e-6)
    assert g.factor.item() == 0.375
    g.mul_(torch.full((6, 100), 2.0))  # by more than one number: encoded anew
    assert not g.total.is_scaled and relative_error(g.clone(), before * 0.75) < 0.01


def test_lists_of_packed_and_plain_gradients_keep_their_order() -> None:
    packed, plain = gradient(), torch.ones(3)
    torch._foreach_mul_([plain, packed], [5.0, 0.5])
    assert plain.eq(5).all() and packed.factor.item() == 0.5
    first, second = torch._foreach_norm([plain, packed])
    assert_same_bits(first, plain.norm())
    assert_same_bits(second, packed.decode().norm())
    torch._foreach_add_([plain, packed], 1.0)
    assert plain.eq(6).all() and not packed.total.is_scaled
    torch._foreach_zero_([plain, packed])
    assert plain.eq(0).all() and packed.decode().eq(0).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_norms_of_half_precision_gradients_are_taken_in_float32(dtype: torch.dtype) -> None:
    g = gradient(dtype=dtype)
    exact = g.packed.decode(torch.float32).norm()
    for found in (g.norm(), torch._foreach_norm([g])[0]):
        assert_same_bits(found, exact.to(dtype))
    assert_same_bits(torch.linalg.vector_norm(g, dtype=torch.float32), exact)


def scaler_step(scale: float, *, poison: bool) -> tuple[nn.Sequential, nn.Sequential, torch.amp.GradScaler]:
    model, plain = mlp(), mlp()
    hooks = pack_all(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=100)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = batches(1)[0]
    scaler.scale(model(x).square().sum()).backward()
    plain(x).square().sum().backward()
    if poison:
        grad_of(model[2].weight)[3, 5] = float("nan")
    scaler.unscale_(optimizer)
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        if p.dim() > 1 and not poison:
            assert q.grad is not None and grad_of(p).total.is_scaled
            assert relative_error(grad_of(p).clone(), q.grad) < 0.02
    scaler.step(optimizer)
    scaler.update()
    assert hooks[0].gradient.total.folds >= 1
    return model, plain, scaler


def test_grad_scaler_unscales_and_steps() -> None:
    model, plain, scaler = scaler_step(1024.0, poison=False)
    assert scaler.get_scale() == 1024.0
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    for p, q, start in zip(model.parameters(), plain.parameters(), mlp().parameters(), strict=True):
        assert relative_error(p.detach() - start.detach(), q.detach() - start.detach()) < 0.02


def test_grad_scaler_skips_a_step_with_nonfinite_blocks() -> None:
    model, _, scaler = scaler_step(1024.0, poison=True)
    assert scaler.get_scale() == 512.0
    for p, start in zip(model.parameters(), mlp().parameters(), strict=True):
        assert_same_bits(p.detach(), start.detach())


@pytest.mark.parametrize("format", [FORMAT, "int8/64@fp32", "e4m3fn/32@e8m0", "bf16"])
def test_found_inf_by_format(format: str) -> None:
    for value in (1.0, float("nan"), *([float("inf")] if "/" in format else [])):
        gradients = [gradient(format=format), gradient(format=format), torch.ones(2)]
        gradients[1].add_(torch.full((6, 100), value))
        found = torch.zeros(1)
        torch._amp_foreach_non_finite_check_and_unscale_(gradients, found, torch.tensor(0.5))
        assert found.item() == float(value != 1.0)
        assert gradients[0].factor.item() == 0.5 and gradients[2].eq(0.5).all()
    gradients[0].mul_(float("inf"))
    torch._amp_foreach_non_finite_check_and_unscale_(gradients[:1], found.zero_(), torch.tensor(0.5))
    assert found.item() == 1.0


# --- adding and writing -----------------------------------------------------------------------------------------------


def test_a_user_adds_what_is_meant() -> None:
    parameter = nn.Parameter(torch.zeros(2, 64))
    pack(parameter, weight=0.25)
    parameter.sum().mul(4 * 127).backward()
    g = grad_of(parameter)
    assert g.eq(127).all()
    g.add_(torch.full((2, 64), 127.0))  # not the gradient of a microbatch: weight 1
    assert g.eq(254).all()
    g.sub_(torch.full((2, 64), 127.0), alpha=2)
    assert g.eq(0).all()
    g += 127.0
    assert g.eq(127).all()
    g += torch.full((64,), 127.0)  # broadcast
    assert g.eq(254).all()
    g -= g
    assert g.eq(0).all()


def test_values_written_by_functions_are_encoded() -> None:
    g = gradient()
    values = g.clone()
    assert g.clamp_(min=0.0) is g
    assert relative_error(g.clone(), values.clamp(min=0)) < 0.01
    folds = g.total.folds
    g.copy_(values)
    assert g.total.folds == folds + 1 and relative_error(g.clone(), values) < 0.01
    torch.add(values, 1.0, out=g)
    assert relative_error(g.clone(), values + 1) < 0.01
    g.index_fill_(0, torch.tensor([1]), 0.0)
    assert g.decode()[1].eq(0).all() and g.decode()[2].ne(0).sum() > 90
    g.data = values
    assert relative_error(g.clone(), values) < 0.01
    with pytest.raises(OptimError, match=r"shape \(6, 100\) cannot become one of shape"):
        g.resize_(3, 2)


def test_writing_through_views_is_not_lost() -> None:
    g = gradient()
    g[0] = 0
    g[1:3, :64].zero_()
    g.view(-1)[-64:].fill_(0)
    g.T[:, 3].mul_(0)
    first, *_ = g.split(4, dim=1)
    first[5].zero_()
    g.data[4] *= 0
    g.detach()[5, 10:20] = 0
    values = g.decode()
    assert values[0].eq(0).all() and values[1:3, :64].eq(0).all() and values.view(-1)[-64:].eq(0).all()
    assert values[3].eq(0).all() and values[5, :4].eq(0).all() and values[4].eq(0).all() and values[5, 10:20].eq(0).all()
    assert values[1, 64:].ne(0).any() and values[5, 20:36].ne(0).any()
    torch._foreach_mul_([g[1], g], 2.0)  # a view in a list
    assert torch.allclose(g.decode()[2], values[2] * 2, rtol=0, atol=float(values.abs().max()) * 2 / 64)


# --- reading ----------------------------------------------------------------------------------------------------------


def test_results_are_plain_and_those_of_the_values() -> None:
    g = gradient().mul_(0.5)
    values = g.decode()
    functions: list[Callable[[Tensor], Tensor]] = [
        *(torch.clone, torch.sum, torch.isnan, torch.abs, torch.sign, torch.max, torch.zeros_like, Tensor.double, Tensor.bfloat16),
        *(lambda t: t + 1, lambda t: 2 * t, lambda t: t @ torch.ones(100), lambda t: t.to("cpu", copy=True), lambda t: t > 0),
        *(
            lambda t: torch.cat([t.view(-1), torch.ones(3)]),
            lambda t: torch.stack([t, t]),
            lambda t: t[2].norm(),
            lambda t: t.T.sum(1),
        ),
        *(lambda t: torch.ones(6, 100).add_(t), lambda t: torch.zeros(6, 100).copy_(t), lambda t: t.mean(0, keepdim=True)),
        *(
            lambda t: torch.lerp(torch.ones(6, 100), t, 0.5),
            lambda t: t.reshape(3, 200).sum(0),
            lambda t: t.var(),
            lambda t: t[t > 0],
        ),
    ]
    for function in functions:
        found = function(g)
        assert type(found) is Tensor
        assert_same_bits(found, function(values))
    assert g[1, 2].item() == values[1, 2].item() == float(g[1, 2])
    assert g.tolist() == values.tolist() and (g.numpy() == values.numpy()).all()
    assert torch.equal(g, values) and g.isfinite().all() and bool((g == values).all())
    assert g.shape == (6, 100) and g.dtype is torch.float32 and g.device == values.device and g.is_leaf and not g.requires_grad


def test_it_is_saved_and_copied_as_a_plain_tensor() -> None:
    g = gradient().mul_(2)
    file = io.BytesIO()
    torch.save({"grad": g}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)["grad"]
    leaf = torch.zeros(6, 100, requires_grad=True)
    leaf.grad = g
    for other in (loaded, copy.deepcopy(g), copy.copy(g), copy.deepcopy(leaf).grad):
        assert type(other) is Tensor
        assert_same_bits(other, g.decode())


def test_it_says_what_it_is() -> None:
    assert repr(gradient()) == "PackedGradient(int8/64@bf16, shape=(6, 100), float32 on cpu, 624 bytes)"
    assert str(gradient()[0]).endswith("shape=(100,), float32 on cpu, 624 bytes, a view)")
    assert f"{gradient()}".startswith("PackedGradient(")


def test_detach_is_the_same_gradient() -> None:
    g = gradient()
    other = g.detach()
    assert isinstance(other, PackedGradient) and other is not g and other.packed is g.packed
    other.mul_(2)
    assert g.total.is_scaled
    assert_same_bits(g.decode(), other.decode())


@pytest.mark.parametrize("format", [FORMAT, "nf4/64@bf16", "e4m3fn/32@e8m0", "uint8/64@bf16+bf16", "bf16"])
def test_zeros_in_any_format(format: str) -> None:
    g = gradient(format=format).mul_(2)
    assert g.zero_().decode().eq(0).all() and not g.total.is_scaled


def test_an_empty_gradient() -> None:
    g = gradient(0, 64)
    g.add_(torch.zeros(0, 64)).mul_(2)
    found = torch.zeros(1)
    torch._amp_foreach_non_finite_check_and_unscale_([g], found, torch.tensor(0.5))
    assert g.norm().item() == 0 and found.item() == 0 and g.decode().shape == (0, 64)
