"""Frozen weights that a plan stores packed, under LoRA adapters: a plain model with the rounded values is the oracle."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import paredown as pare
from paredown import Plan, apply
from paredown.optim.packed_parameter import PackedParameter
from paredown.optim.packed_weight import Weight
from paredown.plan.explanation import explain_slots
from tests.session.nets import assert_same, frozen_peaks
from tests.session.test_weights import alive, saved_sizes

SIDE, RANK, TOKENS = 96, 4, 20
NUM = 16  # experts
FORMATS = pytest.mark.parametrize("format", ["nf4/64@bf16", "int4/64@bf16", "int8/64@bf16", "e4m3fn/64@bf16"])
NF4 = Plan.uniform(frozen="nf4/64@bf16")
BF16: Callable[[], AbstractContextManager[Any]] = lambda: torch.autocast("cpu", torch.bfloat16)  # noqa: E731


class LoraLinear(nn.Module):
    """base(x) + B(A(dropout(x))) * scale, with the modules that PEFT gives an adapted layer."""

    def __init__(self, base: nn.Linear, dropout: float) -> None:
        super().__init__()
        self.base_layer = base
        self.lora_dropout = nn.Dropout(dropout) if dropout else nn.Identity()
        self.lora_A, self.lora_B = (
            nn.Linear(base.in_features, RANK, bias=False),
            nn.Linear(RANK, base.out_features, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.lora_B(self.lora_A(self.lora_dropout(x))) * 2.0


class Functional(nn.Module):
    """A module whose forward is not that of a layer of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(SIDE, SIDE) / SIDE**0.5)

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("...i,ij->...j", x, self.weight)


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(SIDE)
        self.up, self.down = (
            LoraLinear(nn.Linear(SIDE, 2 * SIDE), dropout),
            LoraLinear(nn.Linear(2 * SIDE, SIDE, bias=False), dropout),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(functional.gelu(self.up(self.norm(x))))


class Tiny(nn.Module):
    """A frozen base with LoRA adapters in its blocks."""

    is_reentrant: bool | None = None  # mode of torch.utils.checkpoint; None: blocks are not checkpointed

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(100, SIDE)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(2))
        self.other = Functional()
        self.head = nn.Linear(SIDE, 100, bias=False)
        for name, p in self.named_parameters():
            p.requires_grad_("lora_" in name)
            if "lora_B" in name:
                nn.init.normal_(p, std=0.1)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        if self.is_reentrant:
            x.requires_grad_()  # as enable_input_require_grads() of Hugging Face
        for block in self.blocks:
            x = block(x) if self.is_reentrant is None else checkpoint(block, x, use_reentrant=self.is_reentrant)
        return self.head(self.other(x))


IDS = torch.arange(2 * TOKENS).remainder(37).view(2, TOKENS)


def made(dropout: float = 0.0) -> Tiny:
    torch.manual_seed(0)
    return Tiny(dropout)


def large(model: nn.Module) -> dict[str, nn.Parameter]:
    """The frozen weights that are large enough to be packed."""
    return {name: p for name, p in model.named_parameters() if not p.requires_grad and p.ndim > 1}


def rounded(model: nn.Module, format: str) -> nn.Module:
    """A plain copy whose frozen weights went through the format and back."""
    other = copy.deepcopy(model)
    for p in large(other).values():
        p.data.copy_(pare.round_trip(p.detach(), format, rounding="nearest_even"))
    return other


def step(model: nn.Module, around: Callable[[], AbstractContextManager[Any]] = nullcontext) -> list[Tensor]:
    """The loss, then the gradients of the trained parameters."""
    torch.manual_seed(1)
    model.zero_grad()
    with around():
        loss = functional.cross_entropy(model(IDS).float().flatten(0, 1), IDS.flatten())
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def weight_bytes(model: nn.Module) -> int:
    return sum(p.untyped_storage().nbytes() for p in model.parameters())


@FORMATS
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_losses_and_gradients_are_those_of_the_rounded_base(format: str, dropout: float) -> None:
    model = made(dropout)
    expected = step(rounded(model, format))
    before, names = weight_bytes(model), large(model)
    with apply(Plan.uniform(frozen=format), model) as session:
        assert all(type(p) is PackedParameter for p in names.values())
        assert weight_bytes(model) + session.weight_bytes < (0.45 if "4/" in format else 0.65) * before
        for _ in range(2):
            assert_same(step(model), expected)
        assert not [row for row in session.changes if "fewer than" not in row.slot]
    assert_same(step(model), expected)


def test_footprints_predict_the_bytes_of_the_weights() -> None:
    model, plan = made(), NF4.set("head.weight", None)
    trace = traced(model)
    foot = pare.footprint(trace, plan)
    with apply(plan, model) as session:
        assert foot.by_role[pare.Role.WEIGHT] == weight_bytes(model) + session.weight_bytes
    trained = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    assert foot.by_role[pare.Role.GRADIENT] == trained and foot.by_role[pare.Role.MOMENT1] == trained
    rows = {row.slot: row.what for row in explain_slots(trace, plan) if row.slot in ("head.weight", "embedding.weight")}
    assert rows == {"head.weight": "unmodified", "embedding.weight": "quantized"}
    assert pare.Trace.from_json(trace.to_json()) == trace


def traced(model: nn.Module) -> pare.Trace:
    return pare.trace_step(
        model, (IDS, IDS), loss=lambda y, ids: functional.cross_entropy(y.flatten(0, 1), ids.flatten()), optimizer="adamw"
    )


@pytest.mark.parametrize("around", [nullcontext, BF16], ids=["float32", "autocast"])
def test_no_decoded_copy_is_kept_for_backward(decoded: list[StorageWeakRef], around: Any) -> None:
    model = made()
    expected = step(rounded(model, "nf4/64@bf16"), around)
    with apply(NF4, model):
        for _ in range(2):
            with around():
                loss = functional.cross_entropy(model(IDS).float().flatten(0, 1), IDS.flatten())
            assert decoded and alive(decoded) == 0
            assert not {p.numel() for p in large(model).values()} & set(saved_sizes(loss))  # no cast either
            loss.backward()
            assert alive(decoded) == 0
        assert_same(step(model, around), expected)


@pytest.mark.parametrize("is_reentrant", [None, False, True], ids=["by the plan", "non-reentrant", "reentrant"])
@pytest.mark.parametrize("retains", [False, True])
def test_one_weight_of_a_checkpointed_block_is_decoded_at_a_time(
    monkeypatch: pytest.MonkeyPatch, is_reentrant: bool | None, retains: bool
) -> None:
    found: list[StorageWeakRef] = []
    alive: list[int] = []
    decode = Weight.decode

    def watched(self: Weight, dtype: torch.dtype | None = None) -> Tensor:
        out = decode(self, dtype)
        found.append(StorageWeakRef(out.untyped_storage()))
        alive.append(sum(not ref.expired() for ref in found))
        return out

    model = made()
    model.is_reentrant = is_reentrant
    expected = step(rounded(model, "nf4/64@bf16"))
    with apply(NF4.recomputing("blocks.*") if is_reentrant is None else NF4, model):
        step(model)  # the first calls also compare weights with their codes
        monkeypatch.setattr(Weight, "decode", watched)
        model.zero_grad()
        loss = functional.cross_entropy(model(IDS).flatten(0, 1), IDS.flatten())
        if retains:
            loss.backward(retain_graph=True)
            assert_same(gradients(model), expected[1:])
            model.zero_grad()
        loss.backward()
        assert_same(gradients(model), expected[1:])
        assert max(alive) == 1


def test_a_checkpointed_module_that_has_a_frozen_weight_itself() -> None:
    model = made()
    expected = step(rounded(model, "nf4/64@bf16"))
    with apply(NF4.recomputing("blocks.*.up.base_layer", "other"), model):
        for _ in range(2):
            assert_same(step(model), expected)
            assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]


def test_a_session_that_is_closed_before_backward_of_checkpointed_blocks() -> None:
    model = made()
    model.is_reentrant = False
    expected = step(rounded(model, "nf4/64@bf16"))
    session = apply(NF4, model)
    loss = functional.cross_entropy(model(IDS).flatten(0, 1), IDS.flatten())
    session.close()
    loss.backward()
    assert_same(gradients(model), expected[1:])


class Masked(nn.Module):
    """Multiplies by a frozen weight, and by a mask of the same size, which autograd saves in the same place."""

    def __init__(self, mask: Tensor) -> None:
        super().__init__()
        self.inner, self.weight = nn.Linear(SIDE, SIDE), nn.Parameter(torch.randn(SIDE, SIDE), requires_grad=False)
        self.register_buffer("mask", mask)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) @ self.weight @ self.mask


def test_another_tensor_of_the_size_of_a_cast_is_not_replaced() -> None:
    torch.manual_seed(0)
    model, inputs = Masked(torch.randn(SIDE, SIDE)), (torch.randn(8, SIDE), torch.randn(2, 4, SIDE))  # graphs of different nodes
    plain = copy.deepcopy(model)
    plain.weight.data.copy_(pare.round_trip(plain.weight.detach(), "nf4/64@bf16"))
    with apply(NF4, model):
        for x in inputs:
            for net in (model, plain):
                net.zero_grad()
                with BF16():
                    net(x).square().mean().backward()
            assert_same(gradients(model), gradients(plain))


def gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_bases_of_half_precision(dtype: torch.dtype) -> None:
    model = made().to(dtype)
    expected = step(rounded(model, "nf4/64@bf16"))
    with apply(NF4, model):
        assert_same(step(model), expected)


@pytest.mark.parametrize("is_reentrant", [None, False, True], ids=["by the plan", "non-reentrant", "reentrant"])
def test_checkpointed_blocks(is_reentrant: bool | None) -> None:
    model = made(dropout=0.1)
    model.is_reentrant = is_reentrant
    expected = step(rounded(model, "nf4/64@bf16"))
    with apply(NF4.recomputing("blocks.*") if is_reentrant is None else NF4, model):
        for _ in range(2):
            assert_same(step(model), expected)
            assert all(type(p) is PackedParameter for p in large(model).values())


def test_inputs_of_checkpointed_blocks_are_freed_without_a_garbage_collection() -> None:
    model = made()
    model.is_reentrant = False
    inputs: list[StorageWeakRef] = []
    model.blocks[0].register_forward_pre_hook(lambda _, args: inputs.append(StorageWeakRef(args[0].untyped_storage())))
    gc.collect()
    gc.disable()
    try:
        with apply(NF4, model):
            step(model)
            assert [ref.expired() for ref in inputs] == [True, True]  # of both forward passes
    finally:
        gc.enable()


def test_a_state_dict_has_plain_tensors_and_can_be_loaded() -> None:
    model, plain = made(), rounded(made(), "nf4/64@bf16")
    with apply(NF4, model):
        state = model.state_dict()
        assert {type(value) for value in state.values()} == {Tensor}
        assert all(torch.equal(value, plain.state_dict()[name]) for name, value in state.items())
        other = {name: value + 0.125 for name, value in state.items()}
        model.load_state_dict(other)
        plain.load_state_dict(other)
        assert_same(step(model), step(rounded(plain, "nf4/64@bf16")))


def test_rules_choose_among_frozen_weights() -> None:
    model = made()
    kinds = {"head.weight": nn.Parameter, "embedding.weight": PackedParameter, "blocks.0.up.lora_A.weight": nn.Parameter}
    with apply(NF4.set("head.weight", None), model):
        named = dict(model.named_parameters())
        assert {name: type(named[name]) for name in kinds} == kinds
    with pytest.raises(pare.errors.PlanError, match="frozen=nothing"):
        apply(NF4.set("frozen=nothing.*", "int8/64@bf16"), made())


def test_an_optimizer_of_any_kind_trains_the_adapters() -> None:
    for make in (torch.optim.AdamW, pare.optim.AdamW):
        model = made()
        with apply(NF4, model):
            optimizer = make([p for p in model.parameters() if p.requires_grad], lr=1e-2)
            losses = []
            for _ in range(3):
                losses.append(float(step(model)[0]))
                optimizer.step()
            assert losses[-1] < losses[0]


def test_weights_that_are_frozen_after_apply_are_reported() -> None:
    model = made()
    model.head.requires_grad_(True)
    with apply(NF4, model) as session:
        model.head.requires_grad_(False)
        rows = [row for row in session.changes if row.slot == "weight=head.weight"]
        assert len(rows) == 1 and "frozen after the plan was applied" in rows[0].reason


def rounded_layer(bias: bool) -> tuple[Any, Any]:
    """A frozen linear layer behind a trained one, and a plain copy of both with the rounded weight."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(SIDE, SIDE), nn.Linear(SIDE, 2 * SIDE, bias=bias).requires_grad_(False))
    return model, rounded(model, "nf4/64@bf16")


def double_backward(model: nn.Module, x: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    (grad,) = torch.autograd.grad(model(x).sin().sum(), x, create_graph=True)
    return list(torch.autograd.grad(grad.square().sum(), [x, *(p for p in model.parameters() if p.requires_grad and p.ndim > 1)]))


def backward(model: nn.Module, x: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    result = model(x)
    return [result.detach(), *torch.autograd.grad(result.sin().sum(), [x, *(p for p in model.parameters() if p.requires_grad)])]


def under_autocast(model: nn.Module, x: Tensor) -> list[Tensor]:
    with BF16():
        return backward(model, x)


def transformed(model: nn.Module, x: Tensor) -> list[Tensor]:
    with torch.no_grad():
        batched = torch.func.vmap(model)(x)
    with forward_ad.dual_level():
        result = forward_ad.unpack_dual(model(forward_ad.make_dual(x, torch.ones_like(x))))
        assert result.tangent is not None
        return [batched, result.primal.clone(), result.tangent.clone()]


def without_gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    with torch.no_grad():
        results = [model(x)]
    with torch.inference_mode():
        return [*results, model(x).clone()]


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")  # from torch's forward-mode rules
@pytest.mark.parametrize("shape", [(SIDE,), (8, SIDE), (2, 3, SIDE), (0, SIDE)], ids=str)
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize(
    "run", [backward, double_backward, under_autocast, transformed, without_gradients], ids=lambda run: run.__name__
)
def test_a_frozen_linear_layer_of_any_input(run: Any, bias: bool, shape: tuple[int, ...]) -> None:
    shape = (1, *shape) if run is transformed and len(shape) == 1 else shape
    model, plain = rounded_layer(bias)
    x = torch.randn(shape)
    expected = run(plain, x)
    with apply(NF4, model):
        for _ in range(2):
            assert_same(run(model, x), expected)


def test_autograd_saves_nothing_for_a_frozen_linear_layer(decoded: list[StorageWeakRef]) -> None:
    model, _ = rounded_layer(bias=True)
    with apply(NF4, model):
        for _ in range(2):
            decoded.clear()
            result = model(torch.randn(8, SIDE))
            assert len(decoded) == 1 and result.grad_fn is not None
            assert not [name for name in dir(result.grad_fn) if name.startswith("_saved")] and not result.grad_fn.saved_tensors
            result.sum().backward()
            assert len(decoded) == 2 and alive(decoded) == 0


@pytest.mark.parametrize("part", ["weight", "bias"])
def test_a_linear_layer_that_is_trained_again(part: str) -> None:
    model, plain = rounded_layer(bias=True)
    x = torch.randn(8, SIDE)
    with apply(NF4, model):
        backward(model, x)
        num_hooks = len(model[1]._forward_pre_hooks)
        for net in (model, plain):
            getattr(net[1], part).requires_grad_(True)
        for _ in range(2):  # the second one with hooks around the layer
            assert_same(backward(model, x), backward(plain, x))
            assert type(model[1].weight) is PackedParameter and len(model[1]._forward_pre_hooks) > num_hooks


def test_a_linear_layer_whose_forward_was_replaced() -> None:
    model, plain = rounded_layer(bias=True)
    x = torch.randn(8, SIDE)
    for net in (model, plain):
        net[1].forward = lambda x, layer=net[1]: functional.linear(x, layer.weight.t().contiguous().t(), layer.bias)
    with apply(NF4, model):
        assert_same(backward(model, x), backward(plain, x))


@pytest.mark.parametrize("change", ["in place", "loaded"])
def test_a_frozen_weight_that_changes_before_backward(change: str) -> None:
    model, _ = rounded_layer(bias=False)
    with apply(NF4, model):
        result = model(torch.randn(8, SIDE))
        if change == "in place":
            with torch.no_grad():
                model[1].weight.mul_(2)
        else:
            model.load_state_dict({name: value * 2 for name, value in model.state_dict().items()})
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            result.sum().backward()


class Params4bit(nn.Parameter):
    """Stands for the parameter of bitsandbytes of this name: packed codes, whose shape is not that of the weight."""


class Linear4bit(nn.Module):
    """A layer whose weight another library has quantized."""

    def __init__(self) -> None:
        super().__init__()
        codes = torch.randint(0, 255, (SIDE * SIDE // 2, 1), dtype=torch.uint8)
        self.weight = Params4bit(codes, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        codes = self.weight.flatten()
        return x @ (torch.stack([codes & 15, codes >> 4]).float().view(SIDE, SIDE) - 7.5).div(100)


def test_bases_quantized_by_other_libraries_stay_unmodified_and_are_counted() -> None:
    model = nn.Sequential(LoraLinear(nn.Linear(SIDE, SIDE).requires_grad_(False), 0.0), Linear4bit())
    x = torch.randn(8, SIDE)
    trace = pare.trace_step(model, (x, x), loss=functional.mse_loss, optimizer="adamw")
    assert pare.footprint(trace, NF4).trace.slot("1.weight").nbytes == SIDE * SIDE // 2
    codes = model[1].weight
    with apply(NF4, model) as session:
        functional.mse_loss(model(x), x).backward()
        assert model[1].weight is codes and type(codes) is Params4bit
        rows = [row for row in session.changes if row.slot == "weight=1.weight"]
        assert len(rows) == 1 and rows[0].given == "unmodified" and "Params4bit" in rows[0].reason


def test_the_input_of_an_adapter_and_of_its_frozen_layer_is_stored_once() -> None:
    """A frozen base saves no input. Without dropout, adapters of one input share one packed tensor."""
    torch.manual_seed(0)
    query, key = (LoraLinear(nn.Linear(SIDE, SIDE).requires_grad_(False), 0.0) for _ in range(2))

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.query, self.key = nn.LayerNorm(SIDE, elementwise_affine=False), query, key

        def forward(self, x: Tensor) -> Tensor:
            x = self.norm(x).sin()
            return self.query(x) + self.key(x)

    model, x = Attention(), torch.randn(64, SIDE)
    trace = pare.trace_step(model, (x, x), loss=functional.mse_loss)
    slots = [slot for slot in trace.activations if "query.lora_A:input" in slot.names]
    assert len(slots) == 1 and "key.lora_A:input" in slots[0].names
    assert not [name for slot in trace.activations for name in slot.names if "base_layer" in name]
    with apply(Plan.uniform(activation="int8/64@bf16", frozen="nf4/64@bf16"), model) as session:
        loss = model(x).square().mean()
        stored = session.stored_bytes
        loss.backward()
    assert stored == pare.Format.parse("int8/64@bf16").nbytes((64 * SIDE,))  # inputs of lora_B are too small to be packed


class TopKRouter(nn.Module):
    """The router of transformers, whose weight is its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, SIDE) / SIDE**0.5)

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight)


class MoeLayer(nn.Module):
    """An expert and a router, which is a module of its own or a linear layer named gate."""

    def __init__(self, gate: nn.Module) -> None:
        super().__init__()
        self.gate, self.gate_proj, self.adapter = gate, nn.Linear(SIDE, 64, bias=False), nn.Linear(SIDE, SIDE)
        self.requires_grad_(False).adapter.requires_grad_(True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.adapter(x)
        scores, chosen = self.gate(x).topk(2)
        return self.gate_proj(x).gather(1, chosen) * scores


@pytest.mark.parametrize("gate", [TopKRouter, lambda: nn.Linear(SIDE, 64, bias=False)], ids=["module", "linear"])
def test_routers_are_exact(gate: Callable[[], nn.Module], tmp_path: Path) -> None:
    """Rounded scores would send tokens to other experts: the router's weight stays plain, the layer beside it does not."""
    torch.manual_seed(0)
    model = nn.Sequential(MoeLayer(gate()))
    before, dense = model[0].gate.weight.clone(), copy.deepcopy(model)
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    x = torch.randn(TOKENS, SIDE)
    trace = pare.trace_step(model, (x, x[:, :2]), loss=functional.mse_loss, optimizer="adamw", device="cpu")
    session = apply(NF4, model)
    assert [(c.slot, c.given) for c in session.changes] == [("weight=0.gate.weight", "unmodified")]
    assert "scores experts" in session.changes[0].reason and torch.equal(model[0].gate.weight, before)
    session.compile()
    assert torch.equal(model[0].gate.weight, before) and type(model[0].gate.weight) is nn.Parameter
    assert [c.slot for c in session.changes if "scores experts" in c.reason] == ["weight=0.gate.weight"]
    packed = pare.Format.parse("nf4/64@bf16").nbytes((64, SIDE))
    plain = sum(p.nbytes for name, p in dense.named_parameters() if "gate_proj" not in name)
    assert pare.footprint(trace, NF4).by_role[pare.Role.WEIGHT] == packed + plain and session.weight_bytes == packed
    with torch.device("meta"):
        loaded = nn.Sequential(MoeLayer(gate()))
    pare.load_packed(loaded, tmp_path, NF4)
    assert torch.equal(loaded[0].gate.weight, before) and type(loaded[0].gate_proj.weight) is PackedParameter


class Experts(nn.Module):
    """Experts of two parameters, with which it runs, as those of transformers; adapters may replace them for a call."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(NUM, SIDE, 2 * SIDE) / SIDE, requires_grad=False)
        self.down = nn.Parameter(torch.randn(NUM, 2 * SIDE, SIDE) / SIDE, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.bmm(torch.tanh(torch.bmm(x.expand(NUM, *x.shape), self.up)), self.down).sum(0)


class ExpertLayer(nn.Module):
    """Trained and frozen weights: a linear layer, and experts, of which `is_adapted` adds A B to the first."""

    def __init__(self, is_adapted: bool) -> None:
        super().__init__()
        self.first, self.experts = nn.Linear(SIDE, SIDE), Experts()
        self.factors = nn.ParameterList(torch.randn(NUM, *shape) for shape in ((SIDE, RANK), (RANK, 2 * SIDE)) if is_adapted)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        if not len(self.factors):
            return self.experts(x)
        weight = self.experts._parameters.pop("up")
        try:
            self.experts.up = torch.baddbmm(weight, *self.factors)  # type: ignore[arg-type]
            return self.experts(x)
        finally:
            del self.experts.up
            self.experts.register_parameter("up", weight)


class ExpertLayers(nn.Module):
    """Three layers; `checkpoints`: by the model itself."""

    def __init__(self, is_adapted: bool, checkpoints: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers, self.checkpoints = nn.ModuleList(ExpertLayer(is_adapted) for _ in range(3)), checkpoints

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpoints else layer(x)
        return x


@pytest.mark.parametrize(("is_adapted", "mode"), [(False, "checkpoints"), (False, "plan"), (True, "whole"), (True, "checkpoints")])
def test_peaks_of_frozen_experts_are_predicted(is_adapted: bool, mode: str, tmp_path: Path) -> None:
    """Experts are decoded together while their module runs, and a weight that an adapter replaces while the sum is computed."""
    model, x = ExpertLayers(is_adapted, mode == "checkpoints"), torch.randn(4, SIDE)  # nearly all bytes are those of weights
    plan = NF4.recomputing("layers.*") if mode == "plan" else NF4
    predicted, measured = frozen_peaks(model, plan, x, tmp_path)
    assert predicted == pytest.approx(measured, rel=0.05)
