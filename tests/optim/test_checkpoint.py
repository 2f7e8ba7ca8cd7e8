"""A saved and loaded run continues with the same bits; state of torch.optim and bitsandbytes can be loaded, and exported to torch.optim."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import paredown
from paredown import Plan
from paredown.errors import OptimError
from paredown.optim import SGD, AdamW, Lion
from tests.optim.test_optimizers import batch, losses, network

KINDS: list[tuple[Any, dict[str, Any]]] = [
    (SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-3}),
    (AdamW, {"lr": 3e-3}),
    (Lion, {"lr": 1e-3}),
    (SGD, {"lr": 0.1, "momentum": 0.9, "microbatches": 4}),  # saved between microbatches
]


def saved_and_loaded(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("tier", ["full", "safe", "half", "lpmm", "lpmm4"])
@pytest.mark.parametrize(("kind", "options"), KINDS)
def test_a_resumed_run_has_the_same_losses(kind: Any, options: dict[str, Any], tier: str) -> None:
    plan = Plan() if tier == "full" else Plan.preset(tier)
    model = network()
    paredown.apply(plan, model)
    optimizer = kind(model.parameters(), seed=5, **options)
    losses(model, optimizer, 5)
    states = saved_and_loaded((model.state_dict(), optimizer.state_dict()))
    expected = losses(model, optimizer, 5, first=5)

    again = network(seed=1)
    again.load_state_dict(states[0])
    paredown.apply(plan, again)
    other = kind(again.parameters(), **options)
    other.load_state_dict(states[1])
    assert losses(again, other, 5, first=5) == expected
    assert other.updates == 10 // options.get("microbatches", 1) and other.seed == 5


def test_the_models_state_stays_plain() -> None:
    model = network()
    keys = set(model.state_dict())
    paredown.apply(Plan.preset("lpmm"), model)
    optimizer = AdamW(model.parameters())
    losses(model, optimizer, 2)
    state = model.state_dict()
    assert set(state) == keys and all(
        type(t) is Tensor and t.dtype is torch.float32 and t.untyped_storage().nbytes() for t in state.values()
    )
    codes = optimizer.state_dict()["state"][0]
    assert codes["weight.codes"].shape == (128, 64) and codes["weight.scales"].shape == (128, 1)
    plain = network(seed=2)
    plain.load_state_dict(state)
    x, _ = batch(0)
    assert torch.equal(plain(x), model(x))


@pytest.mark.parametrize(("kind", "theirs", "options"), [
    (SGD, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}), (AdamW, torch.optim.AdamW, {"lr": 3e-3}),
])  # fmt: skip
def test_state_exported_to_torch_loads_back(kind: Any, theirs: Any, options: dict[str, Any]) -> None:
    model = network()
    formats = {"moment1": "int8/64@bf16", "gradient": "int8/64@bf16", **({"moment2": "uint8/64@bf16"} if kind is AdamW else {})}
    optimizer = kind(model.parameters(), **options, **formats)
    losses(model, optimizer, 4)
    exported = optimizer.export_state()
    plain = theirs(model.parameters(), **options)
    plain.load_state_dict(copy.deepcopy(exported))
    losses(model, plain, 1)  # it steps
    back = kind(model.parameters(), **options, **formats)
    back.load_state_dict(exported)
    again = back.export_state()["state"]
    for i, state in exported["state"].items():
        for name, value in state.items():
            if name == "exp_avg_sq":
                assert (again[i][name].sqrt() - value.sqrt()).abs().max() <= value.sqrt().max() / 255 * 1.01, name
            elif name != "step":
                assert (again[i][name] - value).abs().max() <= value.abs().max() / 127 * 0.51, name
    assert [e.step for e in back.entries] == ([4] * len(back.entries) if kind is AdamW else [1] * len(back.entries))


@pytest.mark.parametrize("is_nested", [True, False])
def test_bitsandbytes_state_comes_in(is_nested: bool) -> None:
    """Its layout: flat codes, a map of 256 values, one absmax for 256 codes; small tensors in float32."""
    torch.manual_seed(0)
    model = nn.Linear(128, 64)
    qmap1, qmap2 = torch.linspace(-1, 1, 256), torch.linspace(0, 1, 256)
    numel, blocks = 128 * 64, 128 * 64 // 256
    codes1, codes2 = (torch.randint(0, 256, (64, 128), dtype=torch.uint8) for _ in range(2))
    absmax1, absmax2 = torch.rand(blocks) + 0.5, torch.rand(blocks) + 0.5
    small = {"step": 7, "state1": torch.randn(64), "state2": torch.rand(64)}
    quantized = {"state1": codes1, "state2": codes2, "qmap1": qmap1, "qmap2": qmap2, "absmax1": absmax1, "absmax2": absmax2}
    nested = {"step": 7, "__bnb_optimizer_quant_state__": quantized}  # as its state_dict() has it
    state = {0: nested if is_nested else {"step": 7, **quantized}, 1: small}
    group = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01, "params": [0, 1]}
    optimizer = AdamW(model.parameters(), moment1="int8/64@bf16", moment2="uint8/64@bf16")
    optimizer.load_state_dict({"state": state, "param_groups": [group]})
    found = optimizer.export_state()["state"]
    value1 = torch.tensor([float(qmap1[c]) * float(absmax1[i // 256]) for i, c in enumerate(codes1.flatten().tolist())]).view(
        64, 128
    )
    value2 = torch.tensor([float(qmap2[c]) * float(absmax2[i // 256]) for i, c in enumerate(codes2.flatten().tolist())]).view(
        64, 128
    )
    assert numel == value1.numel() and found[0]["step"] == 7
    assert (found[0]["exp_avg"] - value1).abs().max() <= 1.5 / 127 * 0.52
    assert (found[0]["exp_avg_sq"].sqrt() - value2.sqrt()).abs().max() <= 1.5**0.5 / 255 * 1.02
    assert torch.equal(found[1]["exp_avg"], small["state1"]) and torch.equal(found[1]["exp_avg_sq"], small["state2"])


def test_states_of_others_are_refused_and_change_nothing() -> None:
    model = network()
    paredown.apply(Plan.preset("lpmm"), model)
    optimizer = AdamW(model.parameters())
    losses(model, optimizer, 2)
    before = saved_and_loaded(optimizer.state_dict())

    other = nn.Sequential(nn.Linear(96, 128), nn.ReLU(), nn.Linear(128, 64), nn.LayerNorm(64), nn.Linear(64, 10))
    paredown.apply(Plan.preset("lpmm"), other)
    wrong = AdamW(other.parameters())
    other(torch.randn(2, 96)).sum().backward()
    wrong.step()
    four = network()
    paredown.apply(Plan.preset("lpmm4"), four)
    tier = AdamW(four.parameters())
    losses(four, tier, 1)
    few = AdamW(nn.Linear(3, 3).parameters())
    strange = {"state": {0: {"square_avg": torch.zeros(128, 64)}}, "param_groups": before["param_groups"]}
    plain = AdamW(network().parameters())
    for target, state, message in (
        (optimizer, wrong.state_dict(), "another model"),
        (optimizer, tier.state_dict(), "another tier"),
        (optimizer, few.state_dict(), "2 parameters in 1 groups"),
        (optimizer, {"state": {}}, "param_groups"),
        (optimizer, strange, "another optimizer"),
        (plain, before, "tier 'full'"),
    ):
        with pytest.raises(OptimError, match=message):
            target.load_state_dict(state)
    after = optimizer.state_dict()
    for i, state in before["state"].items():
        assert all(torch.equal(after["state"][i][name], value) for name, value in state.items() if isinstance(value, Tensor))
