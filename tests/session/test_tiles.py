"""Modules that run over pieces of the sequence: gradients are those of the same step without tiles, up to the order of sums."""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from paredown import Plan, apply, round_trip, verify
from paredown.errors import ApplyError, PlanError
from paredown.models.lora import add_lora
from paredown.models.transformer import GPT, GPTConfig, token_loss
from paredown.session.tiles import TileRun
from tests.session.nets import assert_same, relative_error
from tests.support.processes import needs_gloo, run_on_two

WIDTH, TOKENS, BATCH = 32, 23, 2
CONFIG = GPTConfig(dim=WIDTH, num_layers=2, num_heads=2, vocabulary=50, context=TOKENS, tied=False)
IDS = torch.randint(50, (BATCH, TOKENS), generator=torch.Generator().manual_seed(1))
LAYERS = Plan().recomputing("layers.*")
LENGTHS = pytest.mark.parametrize("length", [1, 5, 8, TOKENS - 1])


def gpt(dtype: torch.dtype = torch.float64, **options: Any) -> GPT:
    torch.manual_seed(0)
    return GPT(GPTConfig(**{**vars(CONFIG), **options})).to(dtype)


def step(model: nn.Module, ids: Tensor = IDS) -> list[Tensor]:
    """The logits and the gradients of a step, after zeroing."""
    torch.manual_seed(3)
    model.zero_grad()
    logits = model(ids)
    token_loss(logits, ids).backward()
    return [logits.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def tiled(model: nn.Module, plan: Plan, run: Callable[[nn.Module], list[Tensor]] = step) -> list[Tensor]:
    """The same of the third step of a copy under `plan`, of which every module that is meant to be tiled is."""
    other = copy.deepcopy(model)
    with apply(plan, other) as session:
        run(other), run(other)
        found = run(other)
        rows = session.explain()
        assert any(row.now == row.asked and row.now.startswith("in tiles") for row in rows), rows
        assert not [row for row in session.changes if row.asked.startswith("in tiles")], session.changes
    assert all(module._compiled_call_impl is None for module in other.modules())
    return found


def close(found: list[Tensor], expected: list[Tensor], tolerance: float) -> None:
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        assert relative_error([a], [b]) <= tolerance or (b - a).abs().max() < tolerance


# --- the same gradients ---------------------------------------------------------------------------------------------------------------


@LENGTHS
@pytest.mark.parametrize("plan", [LAYERS, Plan()], ids=["checkpointed", "saved"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 1e-5)])
def test_gradients_are_those_without_tiles(length: int, plan: Plan, dtype: torch.dtype, tolerance: float) -> None:
    model = gpt(dtype)
    close(tiled(model, plan.tiling("layers.*", length=length)), step(copy.deepcopy(model)), tolerance)


@pytest.mark.parametrize("length", [TOKENS, 1000])
def test_a_piece_longer_than_the_sequence_changes_nothing(length: int) -> None:
    model, expected = gpt(torch.float32), step(gpt(torch.float32))
    with apply(LAYERS.tiling("layers.*", length=length), model) as session:
        step(model)
        assert_same(step(model), expected)
        assert {row.reason for row in session.changes} == {"its sequences had no more tokens than a piece"}


def test_every_tile_of_a_linear_layer_and_of_rows_without_a_batch() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8, bias=False)).double()
    x = torch.randn(TOKENS, 8, dtype=torch.float64, requires_grad=True)

    def run(model: nn.Module) -> list[Tensor]:
        model.zero_grad()
        out = model(x)
        return [out.detach(), *torch.autograd.grad(out.square().sum(), [x, *model.parameters()])]

    close(tiled(model, Plan().tiling("0", "2", length=4), run), run(model), 1e-13)


def test_inputs_without_a_gradient_and_frozen_weights() -> None:
    for trained in ("layers.0.mlp", "layers.1.norm2", "lora"):
        model = gpt()
        if trained == "lora":
            add_lora(model, 2, ("layers.*",))
        else:
            model.requires_grad_(False)
            model.get_submodule(trained).requires_grad_()
        for name, p in model.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(p, std=0.1)
        found = tiled(model, LAYERS.tiling("layers.*", length=6))
        expected = step(model)
        assert len(found) > 1
        close(found, expected, 1e-12)


@pytest.mark.parametrize("around", [True, False], ids=["autocast", "bfloat16"])
def test_sums_of_16_bit_gradients_are_float32(around: bool) -> None:
    """The sum of 23 pieces in bfloat16 would lose most of the last of them; each piece is rounded once."""
    model = gpt(torch.float32 if around else torch.bfloat16)

    def run(model: nn.Module) -> list[Tensor]:
        with torch.autocast("cpu", torch.bfloat16, enabled=around):
            return step(model)

    found, rounded = tiled(model, LAYERS.tiling("layers.*", length=1), run), run(copy.deepcopy(model))
    exact = step(copy.deepcopy(model).double())
    assert len(found) == len(exact)
    for mine, theirs, reference in zip(found, rounded, exact, strict=True):
        assert mine.dtype == theirs.dtype
        assert relative_error([mine], [reference]) < max(1.6 * relative_error([theirs], [reference]), 0.02)


def test_autocast_casts_of_tiles_are_not_found_by_other_modules() -> None:
    """A cast that is made without gradients in autocast's cache would cut the gradient of the next call of the same layer."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.first, self.second = nn.Sequential(nn.Linear(8, 8), nn.Tanh()), nn.Identity()
            self.again = [self.first[0]]

        def forward(self, x: Tensor) -> Tensor:
            return self.again[0](self.first(x))

    def run(model: nn.Module) -> list[Tensor]:
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            out = model(torch.ones(1, TOKENS, 8))
        out.float().sum().backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    model = Twice()
    assert relative_error(tiled(model, Plan().tiling("first", length=5), run), run(copy.deepcopy(model))) < 0.01


FROZEN = Plan.uniform(frozen="nf4/64@bf16")


def test_packed_frozen_weights() -> None:
    """Gradients of adapters are those of a base that went through the format and back."""
    model = gpt(torch.float32, dim=64)
    add_lora(model, 2, ("layers.*",))
    for name, p in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(p, std=0.1)
    rounded = copy.deepcopy(model)
    for p in rounded.parameters():
        if not p.requires_grad and p.ndim > 1 and p.numel() >= 4096:
            p.data.copy_(round_trip(p.detach(), "nf4/64@bf16", rounding="nearest_even"))
    plan = FROZEN.recomputing("layers.*").tiling("layers.*", length=6)
    close(tiled(model, plan), step(rounded), 1e-5)


@pytest.mark.parametrize("plan", [Plan.uniform(weight="int8/64@bf16"), Plan.preset("activations8")], ids=["weights", "activations"])
def test_packed_weights_and_activations_are_those_of_the_same_plan_without_tiles(plan: Plan) -> None:
    model = gpt(torch.float32, dim=64)
    plan = plan.recomputing("layers.*")
    other = copy.deepcopy(model)
    with apply(plan, other, seed=1):
        expected = step(other)
    another = copy.deepcopy(model)
    with apply(plan.tiling("layers.*", length=6), another, seed=1) as session:
        found = step(another)
        assert not [row for row in session.changes if row.asked.startswith("in tiles")]
    close(found, expected, 1e-5)


@pytest.mark.parametrize("is_reentrant", [True, False])
def test_layers_that_the_model_checkpoints_itself(is_reentrant: bool) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gpt = gpt()

        def forward(self, ids: Tensor) -> Tensor:
            x = self.gpt.embed(ids) if hasattr(self.gpt, "embed") else self.gpt.tokens(ids)
            for layer in self.gpt.layers:
                x = checkpoint(layer, x, use_reentrant=is_reentrant)
            return self.gpt.head(x)

    model = Checkpointed()
    for packed in (Plan(), Plan.preset("activations8")):
        plan = packed.tiling("gpt.layers.*", length=6)
        with apply(packed, other := copy.deepcopy(model), seed=1):
            step(other), step(other)
            expected = step(other)
        with apply(plan, another := copy.deepcopy(model), seed=1):
            step(another), step(another)
            close(step(another), expected, 1e-12)


# --- how often modules run, and what is stored ------------------------------------------------------------------------------------------


class Counted(nn.Module):
    """A module that counts its runs without and with gradients."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body, self.runs = body, [0, 0]

    def forward(self, x: Tensor) -> Tensor:
        self.runs[torch.is_grad_enabled()] += x.shape[-2]
        return self.body(x)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = (Counted(nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.first(x).sin()
        return x + self.last(x)


def test_the_last_module_of_a_checkpointed_layer_runs_twice_and_one_before_it_three_times() -> None:
    model = nn.Sequential(Residual())
    x = torch.randn(1, 20, 8, requires_grad=True)
    with apply(Plan().recomputing("0").tiling("0.*", length=6), model):
        model(x).sum().backward()
        layer: Any = model[0]
        for part in (layer.first, layer.last):
            part.runs = [0, 0]
        model(x).sum().backward()
    assert layer.last.runs == [20, 20] and layer.first.runs == [40, 20]


def test_autograd_keeps_the_input_alone() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(8, 512), nn.GELU(), nn.Linear(512, 8)))
    x = torch.randn(1, 40, 8, requires_grad=True)
    sizes: list[int] = []

    def count(tensor: Tensor) -> Tensor:
        sizes.append(tensor.numel())
        return tensor

    with apply(Plan().tiling("0", length=10), model):
        model(x)  # looks at the operations
        with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            model(x)
    assert sizes == [x.numel()]


def test_nothing_is_left_after_backward() -> None:
    model = gpt()
    with apply(LAYERS.tiling("layers.*", length=6), model):
        step(model)
        gc.collect()
        gc.disable()
        try:
            step(model)
            assert not [found for found in gc.get_objects() if type(found) is TileRun]
        finally:
            gc.enable()


def test_several_backwards_and_an_error_inside() -> None:
    model = gpt()
    expected = step(copy.deepcopy(model))[1:]
    with apply(LAYERS.tiling("layers.*", length=6), model):
        loss = token_loss(model(IDS), IDS)
        loss.backward(retain_graph=True)
        loss.backward()
        close([p.grad / 2 for p in model.parameters() if p.grad is not None], expected, 1e-12)
        part: Any = model.layers[1]
        handle = part.mlp[2].register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            step(model)
        handle.remove()
        assert torch.is_grad_enabled()
        close(step(model)[1:], expected, 1e-12)


def test_copies_and_pickles_have_no_tiles_and_close_removes_them() -> None:
    model = gpt()
    session = apply(LAYERS.tiling("layers.*", length=6), model)
    out = step(model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert all(module._compiled_call_impl is None for module in other.modules())
        close(step(other), out, 1e-12)
    loss = token_loss(model(IDS), IDS)
    session.close()
    model.zero_grad()
    loss.backward()
    close([p.grad for p in model.parameters() if p.grad is not None], out[1:], 1e-12)
    assert all(module._compiled_call_impl is None for module in model.modules())


def test_eval_without_gradients_and_verify_run_modules_whole() -> None:
    model = gpt(torch.float32)
    with apply(LAYERS.tiling("layers.*", length=6), model) as session:
        with torch.no_grad():
            model(IDS)
        assert not any(row.now.startswith("in tiles") for row in session.explain())
    report = verify(model, (IDS, IDS), LAYERS.tiling("layers.*", length=6), loss=token_loss)
    assert report.ok


# --- what is refused ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("names", "said"), [("layers.*.attention", "scaled_dot_product"), ("token_embedding", "floating-point")])
def test_modules_that_mix_tokens_are_refused_by_name(names: str, said: str) -> None:
    model = gpt()
    names = names if "." in names else next(path for path, module in model.named_modules() if isinstance(module, nn.Embedding))
    with apply(Plan().tiling(names, length=4), model), pytest.raises(ApplyError, match=f"tiles of .* has none, since .*{said}"):
        step(model)


def test_random_bits_stay_whole_and_are_listed() -> None:
    class Dropped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.mlp = nn.LayerNorm(8), nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8))

        def forward(self, x: Tensor) -> Tensor:
            return self.mlp(self.norm(x)) + x.cumsum(1)

    model, x = nn.Sequential(Dropped()), torch.randn(1, 9, 8)

    def run(model: nn.Module) -> list[Tensor]:
        torch.manual_seed(2)
        model.zero_grad()
        model(x).square().sum().backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    expected = run(copy.deepcopy(model))
    with apply(Plan().tiling("0", length=4), model) as session:
        close(run(model), expected, 1e-5)  # looking at the operations draws no random bits of the step
        rows = [row for row in session.changes if "random bits" in row.reason]
        assert [(row.slot, row.given) for row in rows] == [("0.mlp", "whole")]
        model.eval()
        run(model)
        assert {row.slot for row in session.explain() if row.now.startswith("in tiles")} == {"0.norm", "0.mlp"}


def test_second_derivatives_are_refused() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(8, 8), nn.Tanh()))
    x = torch.randn(1, 9, 8, requires_grad=True)
    with apply(Plan().tiling("0", length=4), model), pytest.raises(ApplyError, match="cannot be differentiated again"):
        torch.autograd.grad(model(x).sum(), x, create_graph=True)


def test_compiled_sessions_and_unknown_modules_are_refused() -> None:
    model = gpt()
    with pytest.raises(ApplyError, match=r"tile 'layer\.\*' is no module.*layers"):
        apply(Plan().tiling("layer.*", length=4), model)
    with (
        apply(LAYERS.tiling("layers.*", length=4), model) as session,
        pytest.raises(ApplyError, match="compiled sessions run no tiles"),
    ):
        session.compile()
    compiled = nn.Sequential(nn.LayerNorm(8))
    compiled[0].compile(backend="eager")
    with apply(Plan().tiling("0", length=4), compiled) as session:
        compiled(torch.randn(1, 9, 8, requires_grad=True)).sum().backward()
        assert [row.reason for row in session.changes] == ["module.compile() compiled it"]
    assert compiled[0]._compiled_call_impl is not None


@pytest.mark.parametrize("length", [0, -1, 2.5, True, "8"])
def test_wrong_lengths(length: Any) -> None:
    with pytest.raises(PlanError, match="a number of tokens above 0"):
        Plan().tiling("layers.*", length=length)


# --- several processes --------------------------------------------------------------------------------------------------------


class Norms(nn.Module):
    """A layer that mixes tokens, and a norm and an MLP that do not."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(16), nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x)) + x.cumsum(1)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Norms(), Norms())


def batch(rank: int) -> Tensor:
    return torch.randn(2, 11, 16, generator=torch.Generator().manual_seed(rank))


def replicated(model: nn.Sequential) -> nn.Module:
    return DistributedDataParallel(model)


def sharded(model: nn.Sequential) -> nn.Module:
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
    for layer in model:
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    return fully_shard(model, mesh=mesh, reshard_after_forward=True)


def unit_of_its_own(model: nn.Sequential) -> nn.Module:
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
    for layer in model:
        fully_shard(layer.mlp, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def worker(rank: int, folder: Path) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for wrap in (replicated, sharded, unit_of_its_own):
        for layers in ((), ("?",)):
            plain = net()
            model = wrap(plain)
            with apply(Plan(recompute=layers).tiling("?", length=4), plain) as session:
                for _ in range(2):
                    model.zero_grad()
                    model(batch(rank)).square().sum().backward()
                grads = [p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for p in model.parameters()]
                rows = {row.slot: row.reason for row in session.changes}
                results[f"{wrap.__name__} {layers}"] = [g.clone() for g in grads if g is not None], rows
    return results


@needs_gloo
@pytest.mark.filterwarnings("ignore")  # of the libraries below, about this machine
def test_several_processes(tmp_path: Path) -> None:
    model = net()
    for rank in range(2):
        (model(batch(rank)).square().sum() / 2).backward()
    expected = [p.grad for p in model.parameters() if p.grad is not None]
    for name, (found, rows) in run_on_two(worker, tmp_path)[0].items():
        close(found, expected, 1e-5)
        assert list(rows) == (["0.mlp", "1.mlp"] if name.startswith("unit") else []), name
        assert all("fully_shard" in reason for reason in rows.values())
