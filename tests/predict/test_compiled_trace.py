"""`trace_step(compiled=True)`: what graphs of torch.compile save and allocate, before anything is compiled.

The oracle is a model that torch.compile or a session really compiled, on the CPU: what its autograd node holds, and `session.stored_bytes`.
Kernels are compiled without vector instructions, which takes half the time.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache, partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor_config
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, interpolate, mse_loss, scaled_dot_product_attention, silu

from paredown import Plan, Trace, apply, assign, footprint, trace_step
from paredown.autograd.operations import SMALL
from paredown.errors import BudgetError, TraceError
from paredown.plan.byte_intervals import part_bytes, slot_storages
from paredown.plan.planned_step import planned_step
from paredown.predict.compiled_trace import MASK_OF_SEVERAL
from paredown.roles import Role
from paredown.session.compiled.graph_packing import autograd_node_of, small_tensors
from tests.programs.compiling import compiles_quickly

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")  # torch's own
INT8, INT4 = "int8/64@bf16", "int4/64@bf16"


@pytest.fixture(scope="module", autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    with inductor_config.patch({"cpp.simdlen": 1, "compile_threads": 1}):
        yield
    torch._dynamo.reset()


class Pictures(nn.Module):
    """Convolutions, batch norms, ReLUs and a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm1 = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.conv, self.norm2, self.head = nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of 8 classes."""
        h = self.norm1(self.stem(x)).relu()
        h = (h + self.norm2(self.conv(h))).relu()
        return self.head(h.mean((2, 3)))


class Texts(nn.Module):
    """A layer of a Transformer and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.qkv, self.project = nn.LayerNorm(64), nn.Linear(64, 192), nn.Linear(64, 64)
        self.norm2, self.expand, self.shrink = nn.LayerNorm(64), nn.Linear(64, 256), nn.Linear(256, 64)
        self.head = nn.Linear(64, 8)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of 8 classes."""
        num, length, _ = x.shape
        query, key, value = self.qkv(self.norm1(x)).view(num, length, 3, 4, 16).permute(2, 0, 3, 1, 4)
        attended = scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project(attended.transpose(1, 2).reshape(num, length, 64))
        x = x + self.shrink(nn.functional.gelu(self.expand(self.norm2(x))))
        return self.head(x.mean(1))


class Blocks(nn.Module):
    """Four residual blocks: in 4 bits sessions save their outputs, which backward recomputes otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 16, 1), nn.Linear(16, 8)
        self.convs = nn.ModuleList(nn.Conv2d(16, 16, 3, padding=1) for _ in range(4))
        self.norms = nn.ModuleList(nn.BatchNorm2d(16) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        """Logits of 8 classes."""
        x = self.stem(x)
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = (x + norm(conv(x))).relu()
        return self.head(x.mean((2, 3)))


class Gated(nn.Module):
    """A convolution whose channels are multiplied by a function of their means, as squeeze and excitation does it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.squeeze, self.excite, self.head = (
            nn.Conv2d(3, 64, 3),
            nn.Linear(64, 64),
            nn.Linear(64, 64),
            nn.Linear(64, 8),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Logits of 8 classes."""
        h = silu(self.conv(x))
        gate = self.excite(silu(self.squeeze(h.mean((2, 3))))).sigmoid()
        return self.head((h * gate[:, :, None, None]).mean((2, 3)))


MAKES = {"pictures": (Pictures, (16, 3, 16, 16)), "texts": (Texts, (16, 32, 64))}
OTHERS = {"blocks": (Blocks, (16, 3, 16, 16))}


@lru_cache
def model_and_batch(name: str) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    make, shape = {**MAKES, **OTHERS}[name]
    return make(), (torch.randn(shape), torch.randint(8, shape[:1]))


@lru_cache
def trace_of(name: str, device: str = "cpu", autocast: torch.dtype | None = torch.bfloat16) -> Trace:
    model, batch = model_and_batch(name)
    return trace_step(model, batch, loss=cross_entropy, optimizer="adamw", device=device, autocast=autocast, compiled=True)


def saved_bytes(node: Any, *known: Tensor) -> int:
    """Bytes that an autograd node of a compiled graph holds, without the storages of `known` tensors."""
    others = {tensor.untyped_storage()._cdata for tensor in known}
    saved = [t for t in (*node.saved_tensors, *getattr(node, "_tensors_no_vc_check", ())) if isinstance(t, Tensor)]
    sizes = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in saved}
    return sum(nbytes for storage, nbytes in sizes.items() if storage not in others)


def in_graphs(trace: Trace) -> dict[Any, int]:
    """Bytes of what graphs save, each storage once: activations of the model, and casts of weights."""
    slots = [s for s in trace.slots if s.role in (Role.ACTIVATION, Role.TEMPORARY) and not s.name.startswith("loss")]
    return {slot.storage if slot.storage >= 0 else slot.name: slot.nbytes for slot in slots}


def packed_bytes(trace: Trace, plan: Plan) -> int:
    """Predicted bytes of codes, scales and masks."""
    storages = slot_storages(trace, plan)
    fixed = sum(slot.nbytes for slot in trace.activations if slot.stays == MASK_OF_SEVERAL)
    packed = [slot for slot in trace.activations if storages[slot.name].packs]
    return fixed + sum(part_bytes(slot, part, storages[slot.name]) for slot in packed for part in slot.parts)


@pytest.mark.parametrize("name", MAKES)
def test_saved_bytes_of_plain_compile(name: str) -> None:
    model, batch = model_and_batch(name)
    trace = trace_of(name)
    assert trace.without_packing is not None
    with torch.autocast("cpu", torch.bfloat16):
        output = torch.compile(model)(batch[0])
    held = saved_bytes(autograd_node_of(output), *model.parameters(), *model.buffers(), *batch)
    assert sum(in_graphs(trace.without_packing).values()) == held


@pytest.mark.parametrize("name", MAKES)
@pytest.mark.parametrize("format", [INT8, INT4])
def test_stored_bytes_of_sessions(name: str, format: str) -> None:
    model, batch = model_and_batch(name)
    plan = Plan.uniform(activation=format)
    with compiles_quickly(), apply(plan, model) as session, torch.autocast("cpu", torch.bfloat16):
        output = session.compile()(batch[0])
        assert packed_bytes(trace_of(name), plan) == session.stored_bytes > 0
        del output


@pytest.mark.parametrize(("format", "is_saved"), [(INT8, False), (INT4, True)])
def test_outputs_of_blocks_are_saved_in_few_bits(format: str, is_saved: bool) -> None:
    model, batch = model_and_batch("blocks")
    trace, plan = trace_of("blocks"), Plan.uniform(activation=format)
    assert trace.in_4_bits is not None
    of_plan = trace.in_4_bits if is_saved else trace
    outputs = {slot.name for slot in of_plan.activations} & {f"convs.{i}:input" for i in (1, 2, 3)}
    assert len(outputs) == (3 if is_saved else 0)
    assert footprint(trace, plan).peak_bytes == footprint(replace(of_plan, without_packing=None, in_4_bits=None), plan).peak_bytes
    assert footprint(trace, plan).baseline.peak_bytes == footprint(trace).peak_bytes
    with compiles_quickly(), apply(plan, model) as session, torch.autocast("cpu", torch.bfloat16):
        output = session.compile()(batch[0])
        assert packed_bytes(of_plan, plan) == session.stored_bytes > 0
        del output


@pytest.mark.parametrize("name", MAKES)
def test_a_budget_is_kept(name: str) -> None:
    model, batch = model_and_batch(name)
    trace = trace_of(name)
    least, most = (footprint(trace, Plan.uniform(activation=format)).peak_bytes for format in (INT4, None))
    budget = (least + most) // 2
    plan = assign(trace, budget)
    assert footprint(trace, plan).peak_bytes <= budget < footprint(trace).peak_bytes
    with compiles_quickly(), apply(plan, model) as session, torch.autocast("cpu", torch.bfloat16):
        output = session.compile()(batch[0])
        assert session.stored_bytes == packed_bytes(planned_step(trace, plan), plan)
        del output


def test_too_small_a_budget() -> None:
    with pytest.raises(BudgetError, match="no plan"):
        assign(trace_of("texts"), "5%")


def test_a_torch_compile_that_copies_its_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning replaces torch.compile by such a function."""
    compile_model, copied = torch.compile, list[Any]()

    def copying(model: Any, **keywords: Any) -> Any:
        copied.append(copy.deepcopy(keywords))
        return compile_model(model, **keywords)

    monkeypatch.setattr(torch, "compile", copying)
    model, batch = model_and_batch("texts")
    trace = trace_step(model, batch, loss=cross_entropy, optimizer="adamw", device="cpu", autocast=torch.bfloat16, compiled=True)
    assert copied and trace.slots == trace_of("texts").slots


def test_a_plan_without_activations_is_plain_compile() -> None:
    trace = trace_of("texts")
    moments = Plan.uniform(moment1=INT8, moment2=INT8)
    assert footprint(trace).by_role[Role.ACTIVATION] == footprint(trace, moments).by_role[Role.ACTIVATION]
    assert footprint(trace, moments).peak_bytes < footprint(trace).peak_bytes


def test_bounds() -> None:
    foot = footprint(trace_of("texts"))
    assert foot.low_bytes <= foot.peak_bytes <= foot.high_bytes - foot.low_bytes // 10


def test_weights_stay() -> None:
    trace = trace_of("texts")
    plan = Plan.uniform(weight="int8/64@bf16")
    assert footprint(trace, plan).by_role[Role.WEIGHT] == footprint(trace).by_role[Role.WEIGHT]
    rules = assign(trace, "70%").rules
    assert rules and not any(key.startswith("weight") for key, _ in rules)


def test_names_are_those_of_sessions() -> None:
    names = {name for slot in trace_of("texts").activations for name in slot.names}
    assert {"qkv:input", "expand:input", "head:input"} & names
    assert any(name.startswith(":scaled_dot_product_attention") for name in names)


def test_json_round_trip() -> None:
    trace = trace_of("pictures")
    again = Trace.from_json(json.loads(json.dumps(trace.to_json())))
    assert again == trace and again.is_compiled and again.without_packing is not None
    assert replace(again, without_packing=None) != trace


def test_the_model_is_unchanged() -> None:
    model, batch = model_and_batch("pictures")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = torch.get_rng_state()
    trace_step(model, batch, loss=cross_entropy, device="cpu", compiled=True)
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert not any(p.grad is not None for p in model.parameters())


def test_described_gpu() -> None:
    """Attention of CUDA saves query, key, value, output and one number for each row; products are in 16 bits under autocast."""
    saved = {slot.shape: slot.dtype for slot in trace_of("texts", "cuda").without_packing.activations}  # type: ignore[union-attr]
    assert saved[16, 4, 32, 16] == "bfloat16"
    assert saved[16, 4, 32] == "float32"
    assert not any(shape[-2:] == (32, 32) for shape in saved)


def test_backward_of_a_described_gpu_multiplies_in_16_bits() -> None:
    """The attention without a fused kernel, for a mask that is broadcast over keys, multiplies in float32 in forward.

    AOTAutograd traces backward under autocast, so that its products cast their operands, and forward saves the casts.
    """

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(64, 192)

        def forward(self, x: Tensor) -> Tensor:
            num, length, _ = x.shape
            query, key, value = self.qkv(x).view(num, length, 3, 4, 16).permute(2, 0, 3, 1, 4)
            mask = (torch.arange(length, device=x.device) >= 0)[:, None].expand(num, 1, length, length)
            return scaled_dot_product_attention(query, key, value, attn_mask=mask).transpose(1, 2)

    batch = torch.empty(16, 128, 64), torch.empty(16, 128, 4, 16)
    trace = trace_step(Masked(), batch, loss=mse_loss, device="cuda", autocast=torch.bfloat16, compiled=True)
    plain = trace.without_packing
    assert plain is not None
    saved = [slot for slot in plain.slots if slot.module != "loss" and slot.shape[-2:] in ((128, 16), (16, 128))]
    assert len(saved) == 3 and {slot.dtype for slot in saved} == {"bfloat16"}
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize(
    ("device", "num_classes", "is_padded"), [("cuda", 1001, True), ("cuda", 1002, False), ("cpu", 1001, False)]
)
def test_padded_products_of_a_described_gpu(device: str, num_classes: int, is_padded: bool) -> None:
    """Odd sizes are padded, even ones are not, as steps with 50,257 and 30,522 classes on one H200 show."""
    model, batch = nn.Linear(64, num_classes), (torch.empty(8192, 64), torch.empty(8192, dtype=torch.int64))
    trace = trace_step(model, batch, loss=cross_entropy, device=device, autocast=torch.bfloat16, compiled=True)
    assert any(1008 in output.shape for output in trace.outputs) is is_padded


def test_graph_breaks() -> None:
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)

        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x).sin()
            torch._dynamo.graph_break()
            return self.second(h)

    batch = torch.empty(256, 64), torch.empty(256, 64)
    trace = trace_step(Broken(), batch, loss=mse_loss, device="cpu", compiled=True)
    assert any("2 compiled graphs" in note for note in trace.notes)
    assert {slot.name for slot in trace.of(Role.GRADIENT)} == {"first.weight", "first.bias", "second.weight", "second.bias"}


def test_a_model_that_is_not_compiled() -> None:
    class Disabled(nn.Linear):
        @torch.compiler.disable
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input)

    batch = torch.empty(256, 64), torch.empty(256, 64)
    with pytest.raises(TraceError, match="makes no graph of Disabled"):
        trace_step(Disabled(64, 64), batch, loss=mse_loss, device="cpu", compiled=True)


def test_a_loss_inside_of_the_model() -> None:
    """The gradient of an output that the loss does not use is a tensor of zeros, which autograd allocates for the compiled graph."""

    class WithLoss(nn.Linear):
        def forward(self, input: Tensor, target: Tensor) -> Any:  # type: ignore[override]
            output = super().forward(input)
            return {"loss": mse_loss(output, target), "output": output}

    trace = trace_step(WithLoss(64, 512), (torch.empty(256, 64), torch.empty(256, 512)), device="cpu", compiled=True)
    zeros = [output for output in trace.outputs if output.shape == (256, 512) and output.phase == "backward" and not output.slot]
    assert any("zeros" in output.op for output in zeros)


class Enlarged(nn.Module):
    """A convolution, a larger picture of its output, and a SiLU, which saves its input."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(8, 16, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return silu(interpolate(self.conv(x), scale_factor=2)).float().mean()


@pytest.mark.parametrize(("compiled", "dtype"), [(False, "float32"), (True, "bfloat16")])
def test_interpolation_under_autocast_is_in_float32_unless_it_is_compiled(compiled: bool, dtype: str) -> None:
    """Autocast on CUDA runs it in float32; torch.compile decomposes it first: on one H200 its compiled code was in bf16."""
    batch = (torch.empty(8, 8, 32, 32, device="meta"),)
    trace = trace_step(Enlarged(), batch, device="cuda", autocast=torch.bfloat16, compiled=compiled)
    plain = trace.without_packing or trace
    assert {slot.dtype for slot in plain.activations if slot.shape == (8, 16, 64, 64)} == {dtype}


def test_the_smallest_tensors_stay_unmodified_on_a_gpu() -> None:
    """Means and gates of 64 x 64 values beside pictures of 62 x 62 in 64 channels: sessions and predictions, as in eager mode."""
    torch.manual_seed(0)
    batch = torch.randn(64, 3, 64, 64), torch.randint(8, (64,))
    traces = {
        device: trace_step(Gated(), batch, loss=cross_entropy, device=device, autocast=torch.bfloat16, compiled=True)
        for device in ("cuda", "cpu")
    }
    small = {device: [slot for slot in trace.activations if slot.numel == 4096] for device, trace in traces.items()}
    assert small["cuda"] and all(slot.stays for slot in small["cuda"])
    assert any(slot.stays == SMALL for slot in small["cuda"]) and not any(slot.stays == SMALL for slot in small["cpu"])
    large = [slot for slot in traces["cuda"].activations if slot.numel > 1 << 20]
    assert large and not any(slot.stays == SMALL for slot in large)
    sizes = [4096 * 2, 4096 * 2, 64 * 64 * 900 * 2]
    for is_cuda, expected in ((True, sizes[:2]), (False, [])):
        nodes = [SimpleNamespace(meta={"val": SimpleNamespace(is_cuda=is_cuda)}) for _ in sizes]
        chosen: Any = [(node, SimpleNamespace(unmodified_bytes=nbytes)) for node, nbytes in zip(nodes, sizes, strict=True)]
        assert [decision.unmodified_bytes for _, decision in small_tensors(chosen)] == expected


class Volumes(nn.Module):
    """Convolutions of volumes, each with an instance norm and a leaky ReLU in place, as medical segmentation has them."""

    def __init__(self) -> None:
        super().__init__()
        norm, relu = partial(nn.InstanceNorm3d, 16, affine=True), partial(nn.LeakyReLU, 0.01, inplace=True)
        parts = [module for n in (4, 16, 16) for module in (nn.Conv3d(n, 16, 3, padding=1), norm(), relu())]
        self.layers, self.head = nn.Sequential(*parts), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of 8 classes."""
        return self.head(self.layers(x).mean((2, 3, 4)))


def test_codes_of_volumes_are_not_held_beside_workspaces_of_their_convolutions() -> None:
    """On a described GPU, in volumes of 16 channels in bf16, by hand:

    The last convolution reads one, writes one, and copies both. Before it forward has stored two outputs of convolutions (8.5 bits a
    value), the input in bf16 (4 channels, 8.25 bits), and two comparisons of each leaky ReLU, of its input and its result, in bits.
    """
    model, x = Volumes(), torch.randn(2, 4, 40, 40, 40)
    batch = (x, torch.randint(8, (2,)))
    trace = trace_step(model, batch, loss=cross_entropy, optimizer="adamw", device="cuda", autocast=torch.bfloat16, compiled=True)
    found = footprint(trace, Plan.preset("activations8"))
    volumes = (found.peak_bytes - found.workspace_bytes - x.nbytes) / (2 * 2 * 16 * 40**3)
    assert volumes == pytest.approx(4 + (2 * 8.5 + 8.25 / 4 + 3 * 2) / 16, rel=0.02)
