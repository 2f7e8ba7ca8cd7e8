"""Frozen weights of many experts that a session decodes one group at a time: a plain model with the rounded values is the oracle."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import paredown as pare
from paredown import Plan, apply
from paredown.errors import ApplyError
from paredown.optim.packed_parameter import PackedParameter
from paredown.optim.packed_weight import pack
from paredown.plan.explanation import explain_slots
from paredown.session.weights import packed_experts
from tests.models.test_lora import mixture_of_experts
from tests.session.nets import assert_same, frozen_peaks

NUM, WIDTH, INNER, RANK, TOKENS = 8, 256, 384, 2, 40
NF4 = Plan.uniform(frozen="nf4/64@bf16")
EXPERT_BYTES = INNER * WIDTH * 4
Forward = Callable[[Any, Tensor, Tensor], Tensor]


def grouped(experts: Any, x: Tensor, chosen: Tensor) -> Tensor:
    """As transformers' grouped_mm: rows sorted by expert, weights of (experts, outputs, inputs)."""
    ends = torch.cumsum(torch.bincount(chosen, minlength=NUM), 0, dtype=torch.int32)
    order = chosen.argsort(stable=True)
    hidden = functional.grouped_mm(x[order], experts.up.transpose(-2, -1), offs=ends)
    return functional.grouped_mm(functional.silu(hidden), experts.down.mT, offs=ends)[order.argsort()]


def grouped_inputs_first(experts: Any, x: Tensor, chosen: Tensor) -> Tensor:
    """As GPT-OSS: weights of (experts, inputs, outputs)."""
    ends = torch.cumsum(torch.bincount(chosen, minlength=NUM), 0, dtype=torch.int32)
    order = chosen.argsort(stable=True)
    hidden = torch._grouped_mm(x[order], experts.down, offs=ends)
    return torch._grouped_mm(functional.silu(hidden), experts.up, offs=ends)[order.argsort()]


def looped(experts: Any, x: Tensor, chosen: Tensor) -> Tensor:
    """As transformers' eager experts: a linear layer for each expert that has tokens."""
    out = torch.zeros_like(x)
    for expert in chosen.unique():
        (rows,) = torch.where(chosen == expert)
        hidden = functional.linear(x[rows], experts.up[expert])
        out = out.index_add(0, rows, functional.linear(functional.silu(hidden), experts.down[expert]))
    return out


def looped_inputs_first(experts: Any, x: Tensor, chosen: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for expert in range(NUM):
        (rows,) = torch.where(chosen == expert)
        out = out.index_add(0, rows, functional.silu(x[rows] @ experts.down[expert]) @ experts.up.select(0, expert))
    return out


def batched(experts: Any, x: Tensor, chosen: Tensor) -> Tensor:
    """As Llama 4: all experts get rows of equal number."""
    rows = x.view(NUM, -1, WIDTH)
    return torch.bmm(functional.silu(rows @ experts.up.mT), experts.down.transpose(1, 2)).view(x.shape)


FORWARDS = pytest.mark.parametrize("forward", [grouped, grouped_inputs_first, looped, looped_inputs_first, batched])


class Experts(nn.Module):
    def __init__(self, forward: Forward) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(NUM, INNER, WIDTH) / 6, requires_grad=False)
        self.down = nn.Parameter(torch.randn(NUM, WIDTH, INNER) / 6, requires_grad=False)
        self.run = (forward,)

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        return self.run[0](self, x, chosen)


class AdaptedExperts(nn.Module):
    """W + B A of `up`, as adapters of PEFT put it into the experts for one call."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base
        self.left, self.right = nn.Parameter(torch.randn(NUM, INNER, RANK)), nn.Parameter(torch.randn(NUM, RANK, WIDTH) / 9)

    def forward(self, *args: Tensor) -> Tensor:
        weight = self.base._parameters.pop("up")
        try:
            self.base.up = torch.baddbmm(weight, self.left, self.right, alpha=0.7)  # type: ignore[arg-type]
            return self.base(*args)
        finally:
            del self.base.up
            self.base.register_parameter("up", weight)


class Layers(nn.Module):
    """Two layers of experts behind a linear layer; tokens choose one expert each, and the last expert gets none."""

    def __init__(self, forward: Forward, *, is_adapted: bool, checkpoints: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        experts = [Experts(forward) for _ in range(2)]
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(AdaptedExperts(one) if is_adapted else one for one in experts)
        self.checkpoints = checkpoints

    def forward(self, x: Tensor) -> Tensor:
        x, chosen = torch.tanh(self.first(x)), torch.arange(len(x)) * 5 % (NUM - 1)
        for layer in self.layers:
            x = x + (checkpoint(layer, x, chosen, use_reentrant=False) if self.checkpoints else layer(x, chosen))
        return x


@pytest.fixture(params=[1, 3], ids=["one expert a group", "three"])
def group_bytes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(packed_experts, "GROUP_BYTES", request.param * EXPERT_BYTES)
    return request.param * EXPERT_BYTES


def rounded(model: nn.Module) -> nn.Module:
    """A copy of the model whose frozen weights went through the format."""
    plain = copy.deepcopy(model)
    for p in plain.parameters():
        if not p.requires_grad:
            p.data = pare.round_trip(p.data, "nf4/64@bf16")
    return plain


def step(model: nn.Module, x: Tensor) -> list[Tensor]:
    """Output, and the gradients of the input and of all trained parameters."""
    x = x.clone().requires_grad_()
    out = model(x)
    out.square().sum().backward()
    assert x.grad is not None
    gradients = [p.grad for p in model.parameters() if p.requires_grad]
    model.zero_grad()
    return [out.detach(), x.grad, *[g for g in gradients if g is not None]]


@FORWARDS
@pytest.mark.parametrize("checkpoints", [False, True])
@pytest.mark.parametrize("is_adapted", [False, True])
@pytest.mark.usefixtures("group_bytes")
def test_results_are_those_of_the_whole_weight(forward: Forward, is_adapted: bool, checkpoints: bool) -> None:
    model, x = Layers(forward, is_adapted=is_adapted, checkpoints=checkpoints), torch.randn(TOKENS, WIDTH)
    plain = rounded(model)
    expected = step(plain, x)
    with apply(NF4, model) as session:
        for _ in range(2):
            assert_same(step(model, x), expected)
        assert not session.changes
        assert sum(type(p) is PackedParameter for p in model.parameters()) == 4


PEAKS = [
    *((grouped, False, mode) for mode in ("whole", "checkpoints", "plan")),
    *((grouped, True, mode) for mode in ("whole", "plan")),
    (grouped_inputs_first, True, "checkpoints"),
    (batched, True, "plan"),
    (looped, True, "whole"),
    (looped_inputs_first, False, "plan"),
]


@pytest.mark.parametrize(("forward", "is_adapted", "mode"), PEAKS)
def test_peaks_are_those_of_one_group(
    forward: Forward, is_adapted: bool, mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nearly all bytes are those of weights: with all experts decoded, the peak would be several times as high."""
    monkeypatch.setattr(packed_experts, "GROUP_BYTES", 2 * EXPERT_BYTES)
    model, x = Layers(forward, is_adapted=is_adapted, checkpoints=mode == "checkpoints"), torch.randn(NUM, WIDTH)
    plan = NF4.recomputing("layers.*") if mode == "plan" else NF4
    predicted, measured = frozen_peaks(model, plan, x, tmp_path)
    assert measured < NUM * EXPERT_BYTES
    assert predicted == pytest.approx(measured, rel=0.05)


def summed(experts: Any, x: Tensor, chosen: Tensor) -> Tensor:
    """All experts together, with functions that are not computed by groups."""
    return x + torch.einsum("ni,eoi,ejo->nj", x, experts.up, experts.down)


@pytest.mark.parametrize("checkpoints", [False, True])
@pytest.mark.parametrize("is_adapted", [False, True])
@pytest.mark.usefixtures("group_bytes")
def test_a_function_that_reads_all_experts_gets_them(is_adapted: bool, checkpoints: bool) -> None:
    """It is a row of changes; another function that is not covered, outside of forward, is none."""
    model, x = Layers(summed, is_adapted=is_adapted, checkpoints=checkpoints), torch.randn(TOKENS, WIDTH)
    expected = step(rounded(model), x)
    with apply(NF4, model) as session:
        for p in model.parameters():
            assert torch.isfinite(p.norm())
        assert not session.changes
        for _ in range(2):
            assert_same(step(model, x), expected)
        rows = [change for change in session.changes if change.given == "packed, decoded as a whole"]
        assert [change.slot.rpartition(".")[2] for change in rows] == ["up", "down"] * 2
        assert all(change.reason.startswith("einsum reads all of it") for change in rows)
        assert sum(type(p) is PackedParameter for p in model.parameters()) == 4


@pytest.mark.usefixtures("group_bytes")
def test_a_trace_has_the_step_in_which_all_experts_are_decoded_too() -> None:
    """That is the step of a plan that leaves them unmodified, of fully_shard, and of functions that read all of them."""
    x = torch.randn(TOKENS, WIDTH)
    options: dict[str, Any] = {"loss": functional.mse_loss, "optimizer": "sgd", "device": "cpu"}
    whole = 2 * NUM * EXPERT_BYTES
    trace = pare.trace_step(Layers(grouped, is_adapted=False), (x, x), **options)
    assert pare.Trace.from_json(trace.to_json()) == trace and trace.by_groups is not None
    stored = pare.footprint(trace, NF4).by_role[pare.Role.WEIGHT]
    assert pare.footprint(trace, NF4).peak_bytes - stored < whole / 2
    sharded = pare.footprint(trace, NF4, world_size=1, strategy="fsdp2")
    assert sharded.peak_bytes - sharded.by_role[pare.Role.WEIGHT] > whole
    assert pare.footprint(trace).by_role[pare.Role.WEIGHT] == sum(p.nbytes for p in Layers(grouped, is_adapted=False).parameters())
    foot = pare.footprint(pare.trace_step(Layers(summed, is_adapted=False), (x, x), **options), NF4)
    assert foot.peak_bytes - stored > whole


@pytest.mark.usefixtures("group_bytes")
def test_inputs_of_adapted_experts_are_packed() -> None:
    """Autograd saves them, and not the sum of the weight and the adapter."""
    model, x = Layers(grouped, is_adapted=True), torch.randn(TOKENS, WIDTH)
    plan = NF4.set("activation", "int8/64@bf16")
    trace = pare.trace_step(model, (x, x), loss=functional.mse_loss, optimizer="sgd", device="cpu")
    expected = step(rounded(model), x)
    with apply(plan, model) as session:
        loss = functional.mse_loss(model(x), x)
        stored = pare.Format.parse("int8/64@bf16").nbytes
        rows = stored((TOKENS * WIDTH,)) + 2 * stored((TOKENS * INNER,)) + stored((TOKENS * WIDTH,))
        assert rows <= session.stored_bytes <= rows + stored((4 * TOKENS * INNER,))
        loss.backward()
        model.zero_grad()
        names = {slot.name for slot in trace.by_groups.activations if not slot.stays} if trace.by_groups is not None else set()
        assert {f"layers.{layer}.base:grouped_matmul.input" for layer in range(2)} <= names
        explained = {row.slot for row in explain_slots(trace, plan)}
        assert "layers.0.base:grouped_matmul.input" in explained
        assert "layers.0.base:grouped_matmul.weight" not in explained
        for found, wanted in zip(step(model, x), expected, strict=True):
            assert 0 <= (found - wanted).norm() < 0.05 * wanted.norm()


@FORWARDS
@pytest.mark.usefixtures("group_bytes")
def test_experts_run_without_gradients_and_train_later(forward: Forward) -> None:
    model, x = Layers(forward, is_adapted=False), torch.randn(TOKENS, WIDTH)
    plain = rounded(model)
    with apply(NF4, model):
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                assert torch.equal(model(x), plain(x))
        for one in (model, plain):
            one.get_submodule("layers.1").requires_grad_(True)
        assert_same(step(model, x), step(plain, x))
    assert type(model.get_parameter("layers.0.up")) is nn.Parameter


@pytest.mark.usefixtures("group_bytes")
def test_offsets_that_change_are_read_again() -> None:
    """A layer may write other ends into the same tensor."""
    ends = torch.full((NUM,), TOKENS, dtype=torch.int32)

    def shared(experts: Any, x: Tensor, chosen: Tensor) -> Tensor:
        first = functional.grouped_mm(x, experts.up.mT, offs=ends)
        ends.copy_(torch.arange(1, NUM + 1) * (TOKENS // NUM))
        second = functional.grouped_mm(first, experts.down.mT, offs=ends)
        ends.fill_(TOKENS)
        return second

    model, x = Layers(shared, is_adapted=False), torch.randn(TOKENS, WIDTH)
    plain = rounded(model)
    with torch.no_grad():
        expected = plain(x)
        with apply(NF4, model):
            assert torch.equal(model(x), expected)


def test_bfloat16_under_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of single experts and of batches are cast by autocast, grouped ones are not."""
    monkeypatch.setattr(packed_experts, "GROUP_BYTES", 2 * EXPERT_BYTES)
    x = torch.randn(TOKENS, WIDTH)
    for forward in (looped, looped_inputs_first, batched):
        model = Layers(forward, is_adapted=False)
        plain = rounded(model)
        with torch.autocast("cpu", torch.bfloat16):
            expected = step(plain, x)
            with apply(NF4, model) as session:
                assert_same(step(model, x), expected)
                assert not session.changes


@pytest.mark.parametrize("implementation", ["grouped_mm", "eager", "batched_mm"])
@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss"])
def test_experts_of_transformers_with_adapters_of_peft(kind: str, implementation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loss and gradients are those over the rounded base; only `batched_mm`, which copies weights for each token, needs all experts."""
    peft = pytest.importorskip("peft")
    monkeypatch.setattr(packed_experts, "GROUP_BYTES", 1 << 14)
    base = mixture_of_experts(kind)
    base.set_experts_implementation(implementation)
    base.gradient_checkpointing_enable({"use_reentrant": False})
    parameters = ["experts.gate_up_proj", "experts.down_proj"]
    options: dict[str, Any] = {"target_modules": ["o_proj"], "target_parameters": parameters, "init_lora_weights": False}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT looks for rank patterns in modules, and has parameters
        model = peft.get_peft_model(base, peft.LoraConfig(r=2, **options)).train()
    model.enable_input_require_grads()
    plain, ids = copy.deepcopy(model), torch.randint(256, (2, 16))
    with apply(NF4, model) as session:
        packed = {name for name, p in model.named_parameters() if type(p) is PackedParameter}
        for name, p in plain.named_parameters():
            if name in packed:
                p.data = pare.round_trip(p.data, "nf4/64@bf16")
        losses = [one(input_ids=ids, labels=ids).loss for one in (model, plain)]
        for loss in losses:
            loss.backward()
        found, expected = ([p.grad for p in one.parameters() if p.grad is not None] for one in (model, plain))
        assert torch.equal(*losses)
        assert_same(found, expected)
        whole = [change.slot for change in session.changes if change.given == "packed, decoded as a whole"]
        assert len(whole) == (4 if implementation == "batched_mm" else 0)


FORMATS = ["nf4/64@bf16", "int8/64@bf16", "e4m3fn/64@bf16", "uint4/64@bf16+fp32", "e2m1fn/16@e4m3fn", "nf4/128@fp32"]


@pytest.mark.parametrize("format", FORMATS)
def test_rows_of_a_weight_are_decoded_alone(format: str) -> None:
    """Also with ragged blocks, and where all scales have a scale."""
    parameter = nn.Parameter(torch.randn(5, 9, 37), requires_grad=False)
    values = pare.round_trip(parameter.data, format)
    weight = pack(parameter, pare.Format.parse(format), PackedParameter)
    for first, last in ((0, 2), (2, 5), (4, 5), (0, 2)):
        assert torch.equal(weight.decode_rows(first, last), values[first:last])
    weight.store(2 * values)
    assert torch.equal(weight.decode_rows(0, 2), weight.decode()[:2])


class Dense(torch.autograd.Function):
    """What a library of kernels does with the weights of experts: torch does not ask the class of its arguments."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return torch.einsum("ni,eio->no", x, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        return torch.einsum("no,eio->ni", grad, weight), torch.einsum("ni,no->io", x, grad).expand(weight.shape)


@pytest.mark.parametrize("is_adapted", [False, True])
@pytest.mark.usefixtures("group_bytes")
def test_autograd_functions_of_other_code_get_all_experts(is_adapted: bool) -> None:
    """Adapters have their gradients, also where the weight is transposed before, or one expert of it is taken."""

    def forward(experts: Any, x: Tensor, chosen: Tensor) -> Tensor:
        first = Dense.apply(Dense.apply(x, experts.up.mT), experts.up)
        return Dense.apply(first, experts.up[5].mT[None] if is_adapted else experts.down[3:])[:, :1]  # type: ignore[index]

    model, x = Layers(forward, is_adapted=is_adapted), torch.randn(TOKENS, WIDTH)
    expected = step(rounded(model), x)
    with apply(NF4, model):
        for found, wanted in zip(step(model, x), expected, strict=True):
            assert (found - wanted).norm() < 1e-5 * wanted.norm()  # sums over experts, in another order


def adapted_sum(run: Callable[[Any, Tensor, Tensor], None]) -> None:
    """Call run(W + B A or W, B, x) inside of the forward of packed experts with adapters."""
    torch.manual_seed(0)
    called: list[bool] = []

    def forward(experts: Any, x: Tensor, _: Tensor) -> Tensor:
        run(experts.up, model.left, x)
        called.append(True)
        return x

    model = AdaptedExperts(Experts(forward))
    with apply(NF4, model):
        model(torch.randn(4, WIDTH), torch.zeros(4))
    assert called


@pytest.mark.parametrize("write", ["mul_", "__imul__", "register_hook", "retain_grad"])
def test_what_would_have_no_effect_on_views_and_sums_is_refused(write: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their values exist only inside of products: a write to a decoded copy would be lost, and a hook never run."""
    monkeypatch.setattr(packed_experts, "GROUP_BYTES", EXPERT_BYTES)
    argument: tuple[Any, ...] = {"register_hook": (lambda grad: grad,), "retain_grad": ()}.get(write, (2,))

    def run(weight: Any, left: Tensor, x: Tensor) -> None:
        for view in (weight, weight[1], weight.mT):
            with torch.no_grad(), pytest.raises(ApplyError, match="was called on a view of packed experts"):
                getattr(view, write)(*argument)

    adapted_sum(run)


def test_an_adapter_that_is_written_to_after_it_was_added_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_experts, "GROUP_BYTES", EXPERT_BYTES)

    def run(weight: Any, left: Tensor, x: Tensor) -> None:
        view = weight[1].mT
        with torch.no_grad():
            left.mul_(2)
        for use in (lambda: x @ view, lambda: functional.linear(x, weight[1]), lambda: weight.sum()):
            with pytest.raises(ApplyError, match="an adapter of packed experts was written to after it was added"):
                use()

    adapted_sum(run)


def test_offsets_of_inference_mode_are_read_at_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """They have no version that tells whether they were written to."""
    monkeypatch.setattr(packed_experts, "GROUP_BYTES", EXPERT_BYTES)
    torch.manual_seed(0)
    offsets: list[Tensor] = []

    def forward(experts: Any, x: Tensor, ends: Tensor) -> Tensor:
        offsets[0].copy_(ends)
        return torch._grouped_mm(x, experts.up.mT, offs=offsets[0])

    x, ends = torch.randn(TOKENS, WIDTH), [torch.arange(5, 45, 5, dtype=torch.int32), torch.full((NUM,), 40, dtype=torch.int32)]
    model = Experts(forward)
    with apply(NF4, model) as session:
        with session.unpacked():
            plain = copy.deepcopy(model.up.detach())
        with torch.inference_mode():
            offsets.append(torch.zeros(NUM, dtype=torch.int32))
            found = [model(x, one) for one in ends]
    for one, result in zip(ends, found, strict=True):
        assert torch.allclose(result, torch._grouped_mm(x, plain.mT, offs=one), atol=1e-4)
