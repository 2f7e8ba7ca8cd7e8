"""SGD, AdamW and Lion as a user meets them: torch.optim's behaviour in tier "full", training in the others, and bad input."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import paredown
from paredown import Plan
from paredown.errors import OptimError
from paredown.optim import SGD, AdamW, Lion
from tests.optim.nets import take_step

TIERS = ("safe", "half", "lpmm", "lpmm4")
BYTES = {"safe": 6.09, "fine_tune": 6.02, "half": 5.09, "lpmm": 4.11, "lpmm4": 3.11}  # a parameter, with AdamW


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.LayerNorm(64), nn.Linear(64, 10))


def batch(seed: int, size: int = 32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, 64, generator=generator)
    return x, x[:, :10].argmax(1)


def losses(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, *, first: int = 0) -> list[float]:
    found: list[float] = []
    for i in range(first, first + steps):
        x, y = batch(i)
        loss = nn.functional.cross_entropy(model(x), y)
        take_step(optimizer, loss)
        found.append(loss.item())
    return found


# --- tier "full" is torch.optim ---------------------------------------------------------------------------------------

CASES: list[tuple[Callable[..., Any], Callable[..., Any], dict[str, Any]]] = [
    (SGD, torch.optim.SGD, {"lr": 0.1}),
    (SGD, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    (SGD, torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.01}),
    (SGD, torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    (SGD, torch.optim.SGD, {"lr": 0.1, "momentum": 0.5, "maximize": True}),
    (AdamW, torch.optim.AdamW, {}),
    (AdamW, torch.optim.AdamW, {"lr": 3e-3, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}),
    (AdamW, torch.optim.AdamW, {"amsgrad": True, "maximize": True}),
]


@pytest.mark.parametrize(("ours", "theirs", "options"), CASES)
def test_full_equals_torch_bit_for_bit(ours: Any, theirs: Any, options: dict[str, Any]) -> None:
    a, b = network(), network()
    mine, reference = ours(a.parameters(), **options), theirs(b.parameters(), foreach=False, **options)
    assert losses(a, mine, 12) == losses(b, reference, 12)
    for p, q in zip(a.parameters(), b.parameters(), strict=True):
        assert torch.equal(p, q)
    exported = mine.state_dict()["state"]
    for i, state in reference.state_dict()["state"].items():
        assert all(torch.equal(exported[i][name], value) for name, value in state.items() if isinstance(value, Tensor))


def test_the_defaults_are_torchs() -> None:
    for ours, theirs in ((SGD, torch.optim.SGD), (AdamW, torch.optim.AdamW)):
        mine, reference = ours(network().parameters()), theirs(network().parameters())
        assert {k: v for k, v in mine.defaults.items() if k in reference.defaults} == {
            k: v for k, v in reference.defaults.items() if k in mine.defaults
        }
        assert set(reference.defaults) - set(mine.defaults) <= {"decoupled_weight_decay"}


def test_lion_is_its_formula() -> None:
    model = network()
    lr, beta1, beta2, decay = 1e-3, 0.9, 0.99, 0.1
    optimizer = Lion(model.parameters(), lr=lr, betas=(beta1, beta2), weight_decay=decay)
    values = [p.detach().double().clone() for p in model.parameters()]
    means = [torch.zeros_like(v) for v in values]
    for i in range(5):
        x, y = batch(i)
        nn.functional.cross_entropy(model(x), y).backward()
        for k, p in enumerate(model.parameters()):
            g = p.grad.double()
            values[k] = values[k] * (1 - lr * decay) - lr * torch.sign(beta1 * means[k] + (1 - beta1) * g)
            means[k] = beta2 * means[k] + (1 - beta2) * g
        optimizer.step()
        optimizer.zero_grad()
    worst = max((p.double() - v).abs().max().item() for p, v in zip(model.parameters(), values, strict=True))
    assert worst < 2.1 * lr * 5  # a sign may differ where the mean is next to 0; nothing else may
    share = sum(((p.double() - v).abs() > 1e-6).sum().item() for p, v in zip(model.parameters(), values, strict=True))
    assert share <= 5


# --- the other tiers --------------------------------------------------------------------------------------------------


KINDS = [(SGD, 0.1), (AdamW, 3e-3), (Lion, 1e-3)]
TRAINED = [
    pytest.param(tier, release, *KINDS[k], marks=[pytest.mark.full] if (t + k + release) % 2 else [])
    for (t, tier), release, k in product(enumerate(TIERS), (False, True), range(len(KINDS)))
]  # half of them has every optimizer with every tier, and each of both with and without `release`


@pytest.mark.parametrize(("tier", "release", "kind", "lr"), TRAINED)
def test_tiers_train(tier: str, release: bool, kind: Any, lr: float) -> None:
    model = network()
    options = {"momentum": 0.9} if kind is SGD else {}
    session = paredown.apply(Plan.preset(tier), model)
    optimizer = kind(model.parameters(), lr=lr, release=release, **options)
    found = losses(model, optimizer, 60)
    assert sum(found[-5:]) / 5 < 0.75 * found[0], found
    session.close()


@pytest.mark.parametrize("tier", ["fine_tune", *TIERS])
def test_bytes_of_a_tier(tier: str) -> None:
    model = nn.Sequential(nn.Linear(512, 512, bias=False), nn.Linear(512, 512, bias=False))
    paredown.apply(Plan.preset(tier), model)
    optimizer = AdamW(model.parameters())
    model(torch.randn(4, 512)).sum().backward()
    optimizer.step()
    numel, held = 2 * 512 * 512, set[int]()
    tensors: list[Tensor] = []
    for entry in optimizer.entries:
        assert entry.gradient is not None and entry.gradient.lent(entry.parameter.grad)
        tensors += [
            *entry.gradient.packed.parts.tensors(),
            *(t for t in optimizer.state[entry.parameter].values() if isinstance(t, Tensor)),
        ]
    total = 0
    for tensor in tensors:
        storage = tensor.untyped_storage()
        total += storage.nbytes() if storage._cdata not in held else 0
        held.add(storage._cdata)
    assert total / numel == pytest.approx(BYTES[tier], abs=0.005)
    assert sum(p.untyped_storage().nbytes() for p in model.parameters()) == 0


@pytest.mark.parametrize("options", [{"release": True, "tier": "half"}, {"gradient": None, "tier": "half"}])
def test_plain_gradients_are_not_kept(options: dict[str, Any]) -> None:
    model = nn.Linear(131, 67, bias=False).bfloat16()  # sizes that occur nowhere else
    optimizer = SGD(model.parameters(), lr=0.1, **options)
    seen: list[weakref.ref[Tensor]] = []
    model.weight.register_hook(lambda grad: seen.append(weakref.ref(grad)))
    for _ in range(2):
        take_step(optimizer, (model.weight * 1.0).sum())
    gc.collect()
    held = [
        t
        for t in gc.get_objects()
        if type(t) is Tensor and t.shape == (67, 131) and t.dtype is torch.bfloat16 and t.device.type == "cpu"
    ]
    assert [t for t in held if t.data_ptr() != model.weight.data_ptr()] == [] and all(ref() is None for ref in seen)


def test_small_parameters_keep_float32() -> None:
    model = network()
    paredown.apply(Plan.preset("lpmm"), model)
    optimizer = AdamW(model.parameters())
    losses(model, optimizer, 1)
    for entry in optimizer.entries:
        state = optimizer.state[entry.parameter]
        is_small = entry.parameter.dim() < 2 or entry.parameter.numel() < 4096
        assert ("exp_avg" in state) == is_small and ("exp_avg.codes" in state) != is_small
        assert not is_small or state["exp_avg"].dtype is torch.float32


def test_bf16_parameters_need_no_session() -> None:
    model = network().bfloat16()
    optimizer = AdamW(model.parameters(), lr=3e-3, tier="half")
    found = []
    for i in range(40):
        x, y = batch(i)
        loss = nn.functional.cross_entropy(model(x.bfloat16()).float(), y)
        take_step(optimizer, loss)
        found.append(loss.item())
    assert sum(found[-5:]) / 5 < 0.75 * found[0]
    assert all(p.dtype is torch.bfloat16 for p in model.parameters())


def test_groups_have_their_own_tier_and_hyperparameters() -> None:
    model = network()
    paredown.apply(Plan.uniform(moment1="int8/64@bf16", moment2="uint8/64@bf16", gradient="int8/64@bf16"), model)
    first, rest = model[0].parameters(), [p for m in list(model)[1:] for p in m.parameters()]
    optimizer = AdamW([{"params": first, "tier": "full", "lr": 0.0}, {"params": rest, "weight_decay": 0.0}], lr=1e-2)
    before = [p.detach().clone() for p in model.parameters()]
    losses(model, optimizer, 2)
    same = [torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True)]
    assert same == [True, True, *[False] * 6]
    assert "exp_avg" in optimizer.state[model[0].weight] and "exp_avg.codes" in optimizer.state[model[2].weight]


def test_schedulers_and_closures() -> None:
    model = network()
    paredown.apply(Plan.preset("lpmm"), model)
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    x, y = batch(0)
    found: list[float] = []
    for _ in range(20):

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            return loss

        found.append(optimizer.step(closure).item())
        scheduler.step()
    assert found[-1] < 0.7 * found[0] and optimizer.param_groups[0]["lr"] == pytest.approx(0.0, abs=1e-6)


# --- microbatches -----------------------------------------------------------------------------------------------------


def test_microbatches_are_averaged_and_the_last_one_updates() -> None:
    model, plain = network(), network()
    optimizer = SGD(model.parameters(), lr=0.1, microbatches=4)
    reference = torch.optim.SGD(plain.parameters(), lr=0.1, foreach=False)
    x, y = batch(3, 32)
    seen: list[bool] = []
    for part in range(4):
        nn.functional.cross_entropy(model(x[8 * part : 8 * part + 8]), y[8 * part : 8 * part + 8]).backward()
        seen.append(optimizer.updates_next)
        before = model[0].weight.detach().clone()
        optimizer.step()
        optimizer.zero_grad()
        assert torch.equal(before, model[0].weight) == (part < 3)
    nn.functional.cross_entropy(plain(x), y).backward()
    reference.step()
    assert seen == [False, False, False, True]
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


def test_accumulators_use_the_rounding_of_the_keyword() -> None:
    model = nn.Linear(128, 64, bias=False)
    optimizer = SGD(model.parameters(), lr=0.1, gradient="int8/64@bf16", rounding={"gradient": "nearest_even"})
    grad = torch.randn(64, 128)
    (model.weight * grad).sum().backward()
    expected = paredown.encode(grad, "int8/64@bf16", order="logical").decode()
    assert torch.equal(optimizer.entries[0].gradient.decode(), expected)


def test_a_scaler_with_microbatches() -> None:
    """Unscaling is for whole sums; an infinite one is left out, and the next is begun."""
    model = nn.Linear(128, 64, bias=False)
    optimizer = SGD(model.parameters(), lr=0.1, microbatches=2, gradient="int8/64@bf16")
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    before = model.weight.detach().clone()

    def passes(*factors: float) -> None:
        for factor in factors:
            scaler.scale(model.weight.sum() * factor).backward()
            if optimizer.updates_next:
                scaler.step(optimizer)
                scaler.update()
            else:
                optimizer.step()
            optimizer.zero_grad()

    passes(1.0, float("inf"))
    assert torch.equal(before, model.weight) and scaler.get_scale() == 2.0 and optimizer.updates == 0
    passes(1.0, 3.0)
    torch.testing.assert_close(before - model.weight, torch.full((64, 128), 0.2), rtol=0.02, atol=0.0)
    scaler.scale(model.weight.sum()).backward()
    with pytest.raises(OptimError, match="updates_next"):
        scaler.step(optimizer)


# --- underflow, the paper's two remedies ------------------------------------------------------------------------------


def test_an_untouched_weight_keeps_its_bits() -> None:
    model = nn.Embedding(512, 64)
    session = paredown.apply(Plan.preset("lpmm"), model)
    optimizer = SGD(model.parameters(), lr=0.3, momentum=0.9)
    before = model.state_dict()["weight"].clone()
    for _ in range(5):
        take_step(optimizer, model(torch.arange(0, 256)).square().sum())
    after = model.state_dict()["weight"]
    assert torch.equal(before[256:], after[256:]) and not torch.equal(before[:256], after[:256])
    session.close()


def test_stochastic_rounding_moves_what_nearest_loses() -> None:
    moved: dict[str, float] = {}
    for rounding in ("nearest_even", "stochastic"):
        torch.manual_seed(0)
        model = nn.Linear(256, 256, bias=False)
        paredown.apply(Plan.preset("lpmm"), model)
        before = model.state_dict()["weight"].clone()
        optimizer = SGD(model.parameters(), lr=1e-5, rounding={"weight": rounding})
        for _ in range(50):
            take_step(optimizer, model(torch.ones(1, 256)).sum())
        moved[rounding] = (model.state_dict()["weight"] - before).mean().item()
    assert abs(moved["nearest_even"]) < 0.05 * 50 * 1e-5  # only blocks whose largest value left its range moved
    assert moved["stochastic"] == pytest.approx(-50 * 1e-5, rel=0.2)  # 65536 weights: the standard error of the mean is about 3 %


def test_diagnostics_say_so_and_warn() -> None:
    model = nn.Linear(256, 256, bias=False)
    paredown.apply(Plan.preset("lpmm"), model)
    optimizer = SGD(model.parameters(), lr=1e-5, rounding={"weight": "nearest_even"})

    def step() -> None:
        take_step(optimizer, model(torch.ones(1, 256)).sum())

    step()
    (row,) = optimizer.diagnostics()
    assert row.name == "weight" and row.dead_zone == 1.0 and row.underflow > 0.9 and row.flips < 0.1 and row.num_values == 4096
    assert "dead zone" in repr(optimizer.diagnostics())
    optimizer.updates = 511
    step()
    with pytest.warns(UserWarning, match="smaller than half a step of int8/64@e8m0"):
        step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.updates = 1023
        step()
        step()  # it warns once


# --- bad input --------------------------------------------------------------------------------------------------------


def test_refusals() -> None:
    model = network()
    for make, message in (
        (lambda: AdamW(model.parameters(), tier="lpm"), "'lpm' is unknown.*lpmm"),
        (lambda: AdamW(model.parameters(), tier="lpmm"), "needs the model.*apply"),
        (lambda: AdamW(model.parameters(), moment1="int8"), "has no scale"),
        (lambda: AdamW(model.parameters(), moment1="int9000"), "int9000"),
        (lambda: AdamW(model.parameters(), rounding={"weight": "up"}), "'up'.*stochastic"),
        (lambda: AdamW(model.parameters(), residue="int8"), "residue"),
        (lambda: AdamW(model.parameters(), microbatches=0), "at least 1"),
        (lambda: AdamW(model.parameters(), microbatches=2, release=True), "Choose one"),
        (lambda: AdamW([torch.zeros(4, dtype=torch.complex64, requires_grad=True)]), "complex"),
    ):
        with pytest.raises(OptimError, match=message):
            make()
    for wrong in ({"lr": -1.0}, {"betas": (1.0, 0.9)}, {"eps": -1.0}):
        with pytest.raises(ValueError, match="Invalid"):
            AdamW(model.parameters(), **wrong)
    with pytest.raises(TypeError):
        AdamW(model.parameters(), momentum=0.9)  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="empty"):
        AdamW([])


PACKED: dict[str, Any] = {"moment1": "int8/64@bf16", "moment2": "uint8/64@bf16", "gradient": "int8/64@bf16"}


def test_nothing_to_do() -> None:
    model = network()
    optimizer = AdamW([{"params": model.parameters()}, {"params": []}], **PACKED)
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.step()  # no parameter has a gradient
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    x, y = batch(0)
    nn.functional.cross_entropy(model(x), y).backward()
    model[0].weight.grad = None
    optimizer.param_groups[0]["lr"] = 0.0
    optimizer.step()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    assert not optimizer.state[model[0].weight]


def test_gradients_that_are_not_finite_leave_their_block() -> None:
    model = nn.Linear(128, 64, bias=False)
    optimizer = AdamW(model.parameters(), lr=0.1, **PACKED)
    before = model.weight.detach().clone()
    scale = torch.ones(64, 128)
    scale[3, 70] = float("nan")
    (model.weight * scale).sum().backward()
    optimizer.step()
    moved = model.weight.detach() != before
    assert not moved[3, 64:].any() and moved[3, :64].all() and moved[4].all() and model.weight.isfinite().all()
    assert optimizer.diagnostics()[0].num_not_finite == 1


def test_a_changed_shape_is_refused() -> None:
    model = nn.Linear(128, 64, bias=False)
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9, moment1="int8/64@bf16")
    take_step(optimizer, model.weight.sum())
    model.weight.data = torch.zeros(32, 128)
    model.weight.sum().backward()
    with pytest.raises(OptimError, match=r"\(64, 128\).*\(32, 128\)"):
        optimizer.step()


def test_memory_that_moved_is_found() -> None:
    """p.data = x puts the parameter elsewhere: the update follows it."""
    model, plain = nn.Linear(128, 64, bias=False), nn.Linear(128, 64, bias=False)
    plain.load_state_dict(model.state_dict())
    a, b = SGD(model.parameters(), lr=0.1, gradient="int8/64@bf16"), SGD(plain.parameters(), lr=0.1, gradient="int8/64@bf16")
    for _ in range(3):
        for m, opt in ((model, a), (plain, b)):
            take_step(opt, m(torch.ones(2, 128)).square().sum())
        model.weight.data = model.weight.data.clone()
    assert torch.equal(model.weight, plain.weight)


def test_channels_last_weights_are_updated_as_others() -> None:
    results: list[Tensor] = []
    for format in (torch.contiguous_format, torch.channels_last):
        torch.manual_seed(0)
        model = nn.Conv2d(32, 32, 3, bias=False).to(memory_format=format)  # type: ignore[call-overload]
        optimizer = AdamW(model.parameters(), lr=0.01, **PACKED)
        for _ in range(3):
            take_step(optimizer, (model.weight * torch.linspace(-1, 1, 32 * 32 * 9).view(32, 32, 3, 3)).sum())
        results.append(model.weight.detach().contiguous())
    assert torch.equal(*results)


def test_pickling_says_what_to_do() -> None:
    import copy

    with pytest.raises(OptimError, match="state_dict"):
        copy.deepcopy(AdamW(network().parameters()))


def test_options_without_a_packed_form_are_refused() -> None:
    for option in ("amsgrad", "differentiable", "capturable"):
        with pytest.raises(OptimError, match=f"{option}=True has no packed form"):
            AdamW(network().parameters(), **{option: True}, **PACKED)
