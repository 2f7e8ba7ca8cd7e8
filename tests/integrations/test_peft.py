"""PEFT's adapters under plans: slots that adapters share, frozen bases, and bases that bitsandbytes has quantized."""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import paredown as pare
from paredown.errors import TraceError
from tests.support.memory import saved_bytes

peft = pytest.importorskip("peft", reason="peft is not installed")
pytestmark = pytest.mark.filterwarnings("ignore")  # the libraries' own

BATCH = 64, 96  # rows and values of each


class Block(nn.Module):
    """Three layers with the same input, as queries, keys and values have, and one after them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.q, self.k, self.v, self.o = (nn.Linear(96, 96, bias=False) for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        return self.o(torch.sin(self.q(x)) + torch.cos(self.k(x)) + torch.exp(self.v(x)))


def adapted(base: nn.Module, dropout: float = 0.0, **options: Any) -> Any:
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["first", "q", "k", "v", "o"], lora_dropout=dropout)
    torch.manual_seed(1)
    model = peft.get_peft_model(base, config, **options)
    for name, p in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(p, std=0.1)
    return model.train()


def block() -> Block:
    torch.manual_seed(0)
    return Block()


def mean_square(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


@pytest.mark.parametrize("dropout", [0.0, 0.25])
def test_adapters_with_the_same_input_share_a_slot_unless_they_have_dropout(dropout: float) -> None:
    """The frozen layers save no input. Dropout gives each adapter an input of its own, and a mask of the input's size."""
    model = adapted(block(), dropout)
    trace = pare.trace_step(model, (torch.empty(BATCH), torch.empty(BATCH)), loss=mean_square, optimizer="adamw", device="cpu")
    inputs = {f"base_model.model.{name}.lora_A.default:input" for name in "qkv"}
    slots = [slot for slot in trace.activations if inputs & set(slot.names)]
    assert len(slots) == (3 if dropout else 1) and inputs <= {name for slot in slots for name in slot.names}
    assert not [slot.name for slot in trace.activations if "base_layer" in slot.name]
    of_loss = 2 * 64 * 96 * 4  # the difference, which the square saves, and the target, which is an input
    in_model = pare.footprint(trace).by_role[pare.Role.ACTIVATION]
    x = torch.randn(BATCH)
    assert saved_bytes(lambda: model(x), (*model.parameters(), x)) == in_model - of_loss // 2
    with pare.apply(pare.Plan.preset("activations8"), model) as session:
        output = model(torch.randn(BATCH))
        num_stored = session.stored_bytes / pare.Format.parse("int8/64@bf16").nbytes(BATCH)
        assert round(num_stored) == 5 if not dropout else num_stored > 5 + 3, "one input, and those of sin, cos, exp and o"
        output.sum().backward()


def test_a_frozen_base_is_stored_in_4_bits_also_without_its_adapters() -> None:
    """Outputs and gradients are those of PEFT over the rounded base; merged adapters have the values of the rounded base too."""
    rounded = block()
    for p in rounded.parameters():
        p.data.copy_(pare.round_trip(p.detach(), "nf4/64@bf16"))
    plain, model = adapted(rounded), adapted(block())
    x = torch.randn(BATCH)
    with pare.apply(pare.Plan.preset("frozen4"), model) as session:
        bases = [p for name, p in model.named_parameters() if "base_layer" in name]
        assert len(bases) == 5 and not any(p.untyped_storage().nbytes() for p in bases)
        for of in (plain, model):
            of(x).square().mean().backward()
        assert [
            torch.equal(a.grad, b.grad) for a, b in zip(plain.parameters(), model.parameters(), strict=True) if a.requires_grad
        ] == [True] * 10
        with model.disable_adapter(), plain.disable_adapter():
            assert torch.equal(model(x), plain(x))
        assert not session.changes
    merged, wanted = model.merge_and_unload(), plain.merge_and_unload()
    assert all(torch.equal(a, b) for a, b in zip(merged.parameters(), wanted.parameters(), strict=True))


def quantized(kind: str) -> tuple[nn.Module, int]:
    """A block with layers of bitsandbytes, and the bytes of their codes and scales."""
    bnb = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    model = block()
    storages: dict[int, int] = {}
    for name, layer in list(model.named_children()):
        if kind == "int8":
            new = bnb.nn.Linear8bitLt(96, 96, bias=False, has_fp16_weights=False)
            new.weight = bnb.nn.Int8Params(layer.weight.data, requires_grad=False, has_fp16_weights=False)
        else:
            new = bnb.nn.Linear4bit(96, 96, bias=False, quant_type="nf4", compute_dtype=torch.float32)
            options = {"quant_type": "nf4", "compress_statistics": kind == "nf4, scales in 8 bits"}
            new.weight = bnb.nn.Params4bit(layer.weight.data, requires_grad=False, **options)
        new = new.to("cpu")
        setattr(model, name, new)
        states = [getattr(new.weight, "quant_state", None), getattr(getattr(new.weight, "quant_state", None), "state2", None)]
        tensors = [new.weight.data, getattr(new.weight, "SCB", None)] + [
            v for s in states if s is not None for v in vars(s).values()
        ]
        storages |= {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if isinstance(t, Tensor)}
    return model, sum(storages.values())


@pytest.mark.parametrize("kind", ["nf4", "nf4, scales in 8 bits", "int8"])
def test_bases_of_bitsandbytes_are_left_and_counted(kind: str) -> None:
    base, base_bytes = quantized(kind)
    model = adapted(base)
    adapter_bytes = sum(p.untyped_storage().nbytes() for name, p in model.named_parameters() if "lora" in name)
    x = torch.randn(BATCH)
    wanted = model(x)  # moves the scales of 8 bits from the parameter to the layer
    for device in ("cpu", "cuda"):
        trace = pare.trace_step(model, (x, x), loss=mean_square, optimizer="adamw", device=device)
        held = pare.footprint(trace).by_role
        rest = (
            5 * (16 + 2) * 4
        )  # tables of 16 values, which the CPU's operations do not take, and numbers that adapters multiply by
        assert held[pare.Role.WEIGHT] + held[pare.Role.BUFFER] == pytest.approx(base_bytes + adapter_bytes, abs=rest), device
    codes = {name: p for name, p in model.named_parameters() if "base_layer" in name}
    with pare.apply(pare.Plan.preset("frozen4"), model) as session:
        assert torch.equal(model(x), wanted)
        rows = [row for row in session.changes if "base_layer" in row.slot]
        kinds = {type(p).__name__ for p in codes.values()}
        assert len(rows) == 5 and kinds <= {"Params4bit", "Int8Params"}
        assert all(row.given == "unmodified" and any(kind in row.reason for kind in kinds) for row in rows)
        assert all(dict(model.named_parameters())[name] is p for name, p in codes.items())


def test_a_base_of_torchao_is_left_and_counted() -> None:
    """Its tensors are made of codes, scales and zero points, each with a slot."""
    torchao = pytest.importorskip("torchao.quantization", reason="torchao is not installed")
    base = block()
    torchao.quantize_(base, torchao.Int8WeightOnlyConfig())
    model = adapted(base.requires_grad_(False))
    x = torch.randn(BATCH)
    wanted = model(x)
    num_bytes = 5 * (96 * 96 + 96 * 4 + 96) + sum(p.numel() * 4 for name, p in model.named_parameters() if "lora" in name)
    for device in ("cpu", "cuda"):
        trace = pare.trace_step(model, (x, x), loss=mean_square, optimizer="adamw", device=device)
        assert pare.footprint(trace).by_role[pare.Role.WEIGHT] == num_bytes
        with_plan = pare.footprint(trace, pare.Plan.preset("frozen4"))
        assert with_plan.by_role[pare.Role.WEIGHT] == num_bytes
    with pare.apply(pare.Plan.preset("frozen4"), model) as session:
        assert torch.equal(model(x), wanted)
        rows = [row for row in session.changes if "base_layer" in row.slot]
        assert len(rows) == 5 and all("it is a Int8Tensor" in row.reason for row in rows)


class Ternary(nn.Parameter):
    """A quantized parameter of an unknown library."""


def test_an_unknown_quantization_has_a_sentence() -> None:
    model = block()
    model.q.weight = Ternary(torch.zeros(96, 96), requires_grad=False)
    model = adapted(model)
    with pytest.raises(
        TraceError,
        match=r"'base_model.model.q.base_layer.weight' of 96 x 96 values is a Ternary.*bitsandbytes.*torchao.*before its tensors.*nf4",
    ):
        pare.trace_step(model, (torch.empty(BATCH), torch.empty(BATCH)), loss=mean_square)
    with pare.apply(pare.Plan.preset("frozen8"), model) as session:
        (row,) = [row for row in session.changes if "q.base_layer" in row.slot]
        assert row.given == "unmodified" and "it is a Ternary" in row.reason
        assert torch.equal(model(torch.ones(BATCH)), copy.deepcopy(model)(torch.ones(BATCH)))


class Head(nn.Module):
    """Embeddings, a layer and an output head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.q, self.head = nn.Embedding(8192, 16), nn.Linear(16, 16), nn.Linear(16, 8192, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.q(self.embed(ids))))


@pytest.mark.parametrize("options", [{"target_modules": ["q"], "modules_to_save": ["head"]}, {"target_modules": ["q", "head"]}])
def test_trained_and_adapted_heads_have_their_loss_in_chunks(options: dict[str, Any]) -> None:
    """PEFT's modules_to_save wraps a copy of the head; adapters add to its output."""
    ids = torch.randint(8192, (2, 8))
    found: list[list[Tensor]] = []
    for is_chunked in (False, True):
        torch.manual_seed(0)
        config = peft.LoraConfig(r=2, init_lora_weights=False, **options)
        model = peft.get_peft_model(Head(), config)
        with pare.apply(pare.Plan.uniform(frozen="int8/64@bf16"), model, chunked_loss=is_chunked) as session:
            nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten()).backward()
            assert session._head.use.num_losses == is_chunked
            assert not [row for row in session.changes if row.asked == "a chunked loss"]
        found.append([p.grad for p in model.parameters() if p.grad is not None])
    for mine, other in zip(*found, strict=True):
        torch.testing.assert_close(mine, other)
