"""Muon: torch.optim.Muon and AdamW bit for bit where state is float32, packed momentum, groups, memory of a step, checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import paredown
from paredown import Plan
from paredown.errors import OptimError
from paredown.optim import Muon, embeddings_and_head, reference
from paredown.optim.rules import RULES
from tests.optim.nets import take_step
from tests.support.memory import peak_bytes

Make = Callable[[nn.Module], Any]


class Tiny(nn.Module):
    """An embedding, two hidden matrices (one wide, one tall), a norm and an output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(70, 64)
        self.wide, self.tall = nn.Linear(64, 160), nn.Linear(160, 64, bias=False)
        self.norm, self.head = nn.LayerNorm(64), nn.Linear(64, 70)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        return self.head(self.norm(x + self.tall(nn.functional.gelu(self.wide(x)))))


def tiny(seed: int = 0) -> Tiny:
    torch.manual_seed(seed)
    return Tiny()


def train(model: nn.Module, optimizers: list[Any], steps: int, first: int = 0) -> list[float]:
    losses: list[float] = []
    for i in range(first, first + steps):
        x = torch.randint(0, 70, (16,), generator=torch.Generator().manual_seed(i % 4))
        loss = nn.functional.cross_entropy(model(x), (x + 1) % 70)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        for optimizer in optimizers:
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def assert_same(a: nn.Module, b: nn.Module) -> None:
    for (name, p), q in zip(a.named_parameters(), b.parameters(), strict=True):
        assert torch.equal(p, q), name


# --- the oracle -------------------------------------------------------------------------------------------------------

OPTIONS = [
    {"lr": 0.02},
    {"lr": 0.02, "nesterov": False, "momentum": 0.9, "weight_decay": 0.0},
    {"lr": 1e-3, "adjust_lr_fn": "match_rms_adamw", "ns_steps": 3, "ns_coefficients": (3.0, -3.2, 1.2), "eps": 1e-5},
    {"lr": 0.02, "adjust_lr_fn": "original", "weight_decay": 0.3},
]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("release", [False, True], ids=["full", "own arithmetic"])
def test_matrices_are_those_of_torch_bit_for_bit(options: dict[str, Any], release: bool) -> None:
    """With release=True updates are made by `reference.py` from unpacked float32 state; otherwise by torch.optim."""
    model, plain = (nn.Sequential(nn.Linear(70, 96, bias=False), nn.Tanh(), nn.Linear(96, 70, bias=False)) for _ in range(2))
    plain.load_state_dict(model.state_dict())
    ours, reference = Muon(model.parameters(), release=release, **options), torch.optim.Muon(plain.parameters(), **options)
    for i in range(4):
        x = torch.randn(8, 70, generator=torch.Generator().manual_seed(i))
        for m, optimizer in ((model, ours), (plain, reference)):
            take_step(optimizer, m(x).square().mean())
    assert_same(model, plain)
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.state[p]["momentum_buffer"], reference.state[q]["momentum_buffer"])


def test_the_others_are_those_of_adamw_bit_for_bit() -> None:
    model, plain = tiny(), tiny()
    ours = Muon(
        model.parameters(), lr=0.02, adamw_lr=3e-3, adamw_betas=(0.8, 0.9), adamw_weight_decay=0.2,
        adamw_params=embeddings_and_head(model),
    )  # fmt: skip
    hidden = [plain.wide.weight, plain.tall.weight]
    others = [p for p in plain.parameters() if all(p is not q for q in hidden)]
    assert len(others) == 6
    adamw = torch.optim.AdamW(others, lr=3e-3, betas=(0.8, 0.9), weight_decay=0.2)
    found = train(model, [ours], 5), train(plain, [torch.optim.Muon(hidden, lr=0.02), adamw], 5)
    assert found[0] == found[1]
    assert_same(model, plain)


def test_updates_are_orthogonal() -> None:
    """Singular values from 0.1 to 1 come near 1, for the same singular vectors."""
    numbers = RULES["muon"].numbers((1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 3.4445, -4.7750, 2.0315, 1e-7, 5))
    made = torch.Generator().manual_seed(0)
    for rows, cols in ((64, 96), (96, 64)):
        u, v = (torch.linalg.qr(torch.randn(n, 64, generator=made))[0] for n in (rows, cols))  # orthonormal columns
        g = u @ torch.diag(torch.linspace(0.1, 1, 64)) @ v.T
        p, (m,) = RULES["muon"].update(torch.zeros(rows, cols), g, (torch.zeros(rows, cols),), numbers)
        inside = u.T @ (-p / max(1, rows / cols) ** 0.5) @ v
        values = torch.diagonal(inside)
        assert torch.equal(m, g) and bool(((values > 0.6) & (values < 1.3)).all()), (values.min(), values.max())
        assert (inside - torch.diag(values)).abs().max() < 0.1


# --- packed memory ----------------------------------------------------------------------------------------------------


def muon(model: nn.Module, **options: Any) -> Muon:
    return Muon(model.parameters(), lr=0.02, adamw_lr=3e-3, adamw_params=embeddings_and_head(model), **options)


@pytest.mark.parametrize("tier", ["safe", "half", "lpmm", "lpmm4"])
@pytest.mark.parametrize("release", [False, True])
def test_tiers_train(tier: str, release: bool) -> None:
    model = tiny()
    session = paredown.apply(Plan.preset(tier), model)
    losses = train(model, [muon(model, release=release)], 30)
    assert sum(losses[-4:]) < 0.5 * sum(losses[:4]), losses
    session.close()


def test_a_packed_step_is_close_to_torchs() -> None:
    """int8 momentum and gradient: the first update of torch.optim.Muon, but for what 8 bits of the gradient change."""
    model, plain = tiny(), tiny()
    before = plain.tall.weight.detach().clone()
    train(model, [muon(model, moment1="int8/64@bf16", gradient="int8/64@bf16")], 1)
    train(plain, [torch.optim.Muon([plain.tall.weight], lr=0.02)], 1)
    step, expected = model.tall.weight - before, plain.tall.weight - before
    # the gradient of 16 examples has rank 16: of 64 singular values 48 are 0, and noise of rounding takes the place of their directions
    assert nn.functional.cosine_similarity(step.flatten(), expected.flatten(), 0) > 0.5
    assert not torch.equal(step, expected)


def test_state_is_one_moment_of_matrices_and_two_of_the_others() -> None:
    model = tiny()
    paredown.apply(Plan.preset("lpmm"), model)
    optimizer = muon(model)
    train(model, [optimizer], 1)
    names = {name: set(optimizer.state[p]) for name, p in model.named_parameters()}
    packed = {f"{name}.{part}" for name in ("momentum_buffer", "weight") for part in ("codes", "scales")}
    assert names["wide.weight"] == names["tall.weight"] == packed
    assert {"exp_avg.codes", "exp_avg_sq.codes"} <= names["embedding.weight"] & names["head.weight"]
    assert names["norm.weight"] == {"exp_avg", "exp_avg_sq"}


def test_a_step_decodes_some_rows_of_one_parameter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Peak of a step beside what is stored, as the allocator reports it: it does not grow with the number of layers."""
    side, piece, peaks = 256, 4096, list[int]()
    monkeypatch.setattr(reference, "update_rows", lambda rows, cols: piece // cols)
    for count in (1, 2):
        model = nn.Sequential(*(nn.Linear(side, side, bias=False) for _ in range(count))).bfloat16()
        optimizer = Muon(model.parameters(), tier="half")
        for is_first in (True, False):  # the first step allocates the state
            sum((p.float() * 2).sum() for p in model.parameters()).backward()
            peaks += [] if is_first else [peak_bytes(optimizer.step, tmp_path)]
            optimizer.step() if is_first else None
    work = 2 * 2 * side * side + 2 * 2 * side * side  # two bfloat16 matrices, two squares of the shorter side
    assert peaks[1] == pytest.approx(peaks[0], rel=0.02)
    assert 2 * 2 * side * side < peaks[1] < work + 80 * piece < work + 3 * 4 * side * side, (peaks, work)


def test_gradients_that_are_not_finite_leave_the_matrix() -> None:
    model = nn.Linear(128, 64, bias=False)
    optimizer = Muon(model.parameters(), lr=0.1, moment1="int8/64@bf16", gradient="int8/64@bf16")
    model.weight.grad = torch.ones_like(model.weight)
    optimizer.step()
    before, codes = model.weight.detach().clone(), optimizer.state[model.weight]["momentum_buffer.codes"].clone()
    model.weight.grad = torch.ones_like(model.weight)
    model.weight.grad[3, 70] = torch.nan
    optimizer.step()
    assert torch.equal(model.weight, before) and torch.equal(optimizer.state[model.weight]["momentum_buffer.codes"], codes)
    assert optimizer.diagnostics()[0].num_not_finite == 128


@pytest.mark.gpu
def test_on_a_gpu_updates_are_near_those_of_torch_and_tiers_train() -> None:
    model, plain = tiny().cuda(), tiny().cuda()
    made = torch.Generator().manual_seed(0)
    for p, q in zip((model.wide.weight, model.tall.weight), (plain.wide.weight, plain.tall.weight), strict=True):
        p.grad = torch.randn(p.shape, generator=made).cuda()
        q.grad = p.grad.clone()
    Muon([model.wide.weight, model.tall.weight], lr=0.02, moment1="bf16").step()
    torch.optim.Muon([plain.wide.weight, plain.tall.weight], lr=0.02).step()
    for p, q in ((model.wide.weight, plain.wide.weight), (model.tall.weight, plain.tall.weight)):
        torch.testing.assert_close(p, q, rtol=0.0, atol=0.02 * 0.05)  # values of an orthogonal matrix of this size are about 0.1
    for tier in ("fine_tune", "lpmm"):
        packed = tiny().cuda()
        paredown.apply(Plan.preset(tier), packed)
        optimizer = muon(packed)
        x = torch.arange(64, device="cuda")
        losses: list[float] = []
        for _ in range(20):
            loss = nn.functional.cross_entropy(packed(x), (x + 1) % 70)
            take_step(optimizer, loss)
            losses.append(loss.item())
        assert losses[-1] < 0.5 * losses[0], losses


# --- groups -----------------------------------------------------------------------------------------------------------


def test_groups_have_rules() -> None:
    model = tiny()
    optimizer = Muon(
        [
            {"params": [model.wide.weight, model.tall.weight], "weight_decay": 0.0},
            {"params": [model.embedding.weight, model.head.weight], "rule": "adamw", "lr": 1e-3, "betas": (0.5, 0.6)},
            {"params": [*model.norm.parameters(), model.wide.bias, model.head.bias]},
        ],
        lr=0.02, adamw_lr=1e-4, weight_decay=0.1,
    )  # fmt: skip
    found = [(g["rule"], g["lr"], g["weight_decay"], len(g["params"])) for g in optimizer.param_groups]
    assert found == [("muon", 0.02, 0.0, 2), ("adamw", 1e-3, 0.1, 2), ("adamw", 1e-4, 0.1, 4)]
    assert optimizer.param_groups[1]["betas"] == (0.5, 0.6) and optimizer.param_groups[2]["eps"] == 1e-8
    assert optimizer.param_groups[0]["eps"] == 1e-7
    train(model, [optimizer], 2)


def test_names_stay_beside_their_parameters() -> None:
    model = tiny()
    optimizer = Muon(model.named_parameters(), lr=1e-3, adjust_lr_fn="match_rms_adamw", adamw_params=embeddings_and_head(model))
    assert [group["param_names"] for group in optimizer.param_groups] == [
        ["wide.weight", "tall.weight"],
        ["embedding.weight", "wide.bias", "norm.weight", "norm.bias", "head.weight", "head.bias"],
    ]
    assert {group["lr"] for group in optimizer.param_groups} == {1e-3}
    groups = [{"params": model.wide.parameters(), "lr": 1e-4}, {"params": model.norm.parameters()}]
    optimizer = Muon(groups, lr=1e-3, adjust_lr_fn="match_rms_adamw")
    assert [group["lr"] for group in optimizer.param_groups] == [1e-4, 1e-4, 1e-3]


def test_embeddings_and_head() -> None:
    model = tiny()
    assert [p is q for p, q in zip(embeddings_and_head(model), (model.embedding.weight, model.head.weight), strict=True)] == [
        True
    ] * 2
    model.head.weight = model.embedding.weight
    assert len(embeddings_and_head(model)) == 1
    model.get_output_embeddings = lambda: model.tall  # type: ignore[assignment]
    assert embeddings_and_head(model)[1] is model.tall.weight
    assert embeddings_and_head(nn.ReLU()) == []


def test_refusals() -> None:
    model = tiny()
    for make, error, message in (
        (lambda: Muon(model.parameters(), lr=0.02), OptimError, "4 parameters .* lr=0.02 .*give adamw_lr.*match_rms_adamw"),
        (lambda: Muon([{"params": [model.norm.weight], "rule": "muon"}]), OptimError, r"shape \(64,\).*'rule': 'adamw'"),
        (lambda: Muon([{"params": model.parameters(), "rule": "sgd"}]), OptimError, "'sgd' of a group is unknown.*muon, adamw"),
        (lambda: Muon([model.wide.weight], adjust_lr_fn="rms"), ValueError, "Invalid adjust_lr_fn: 'rms'.*'match_rms_adamw'"),
        (lambda: Muon([model.wide.weight], ns_steps=100), ValueError, "fewer than 100"),
        (lambda: Muon([{"params": {model.wide.weight}}]), TypeError, "ordered"),
        (lambda: Muon([model.wide.weight], momentum=-0.1), ValueError, "Invalid momentum"),
        (lambda: Muon([model.norm.weight], adamw_lr=1e-3, adamw_betas=(1.0, 0.9)), ValueError, "Invalid betas"),
    ):
        with pytest.raises(error, match=message):
            make()
    optimizer = Muon([model.wide.weight, model.norm.weight], adamw_lr=1e-3)
    with pytest.raises(ValueError, match="some parameters appear in more than one"):
        optimizer.add_param_group({"params": [model.tall.weight, model.norm.weight]})
    assert len(optimizer.param_groups) == len(optimizer.entries) == 2, "the refused group left nothing"


# --- checkpoints ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tier", ["full", "half", "lpmm"])
def test_resumed_runs_have_the_same_bits(tier: str, tmp_path: Path) -> None:
    def start(seed: int) -> tuple[nn.Module, Muon]:
        model = tiny(seed)
        if tier != "full":
            paredown.apply(Plan.preset(tier), model)
        return model, muon(model, seed=3)

    model, optimizer = start(0)
    train(model, [optimizer], 3)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "saved.pt")
    again, resumed = start(1)
    saved = torch.load(tmp_path / "saved.pt", weights_only=True)
    again.load_state_dict(saved["model"])
    resumed.load_state_dict(saved["optimizer"])
    assert train(model, [optimizer], 3, first=3) == train(again, [resumed], 3, first=3)
    assert_same(model, again)


def test_state_from_and_to_torch() -> None:
    model, plain = (nn.Linear(96, 64, bias=False) for _ in range(2))
    torchs = torch.optim.Muon(plain.parameters(), lr=0.02)
    plain(torch.ones(2, 96)).square().sum().backward()
    torchs.step()
    ours = Muon(model.parameters(), lr=0.5, moment1="int8/64@bf16")
    ours.load_state_dict(torchs.state_dict())
    expected = torchs.state[plain.weight]["momentum_buffer"]
    exported = ours.export_state()
    assert ours.param_groups[0]["lr"] == 0.02
    assert (exported["state"][0]["momentum_buffer"] - expected).abs().max() <= expected.abs().max() / 127 / 2 * 1.01
    torchs.load_state_dict(exported)
    assert torch.equal(torchs.state[plain.weight]["momentum_buffer"], exported["state"][0]["momentum_buffer"])


def test_state_of_other_groups_is_refused() -> None:
    model = tiny()
    saved = Muon([{"params": [model.wide.weight], "rule": "adamw", "lr": 1e-3}]).state_dict()
    with pytest.raises(OptimError, match="group 0 of the state was updated by adamw, and here by muon"):
        Muon([model.wide.weight]).load_state_dict(saved)
