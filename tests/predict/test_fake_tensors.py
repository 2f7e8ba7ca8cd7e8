"""Traces of CUDA on fake CPU tensors: what kernels save there, what autocast casts, and devices that models name."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paredown.autograd.operations import Use
from paredown.errors import TraceError
from paredown.plan.footprint import footprint
from paredown.plan.trace import Trace
from paredown.predict.fake.device_ops import Flash
from paredown.predict.fake.fake_tensors import BANNED, CAST, FORMS, LOWER, PROMOTE, SET_DTYPE
from paredown.predict.trace_step import trace_step
from paredown.roles import Role
from tests.predict.test_trace import Parts

NUM, HEADS, LENGTH, WIDTH = 2, 4, 96, 32
BF16 = torch.bfloat16


def on_cuda(forward, *inputs: Tensor, autocast: torch.dtype | None = None, **parts: nn.Module) -> Trace:
    """The trace on CUDA of a model that is `forward`, whose first input is the output of a parameter's product."""

    def run(self, x: Tensor, *more: Tensor) -> Tensor:
        return forward(self, x * self.scale, *more).float().sum()

    model = Parts(run, **parts)
    model.scale = nn.Parameter(torch.ones((), dtype=inputs[0].dtype))
    return trace_step(model, inputs, device="cuda", autocast=autocast)


def saved(trace: Trace, op: str) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Operand -> dtype and shape of what an operation saves."""
    return {saver.operand: (slot.dtype, slot.shape) for slot in trace.activations for saver in slot.savers if saver.op == op}


# --- the tables ----------------------------------------------------------------------------------------------------------------


def test_every_operation_that_autocast_handles_on_cuda_is_in_one_table() -> None:
    tables = (LOWER, CAST, SET_DTYPE, PROMOTE, BANNED)
    registered = {
        name.removeprefix("aten::").partition(".")[0]
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("aten::") and torch._C._dispatch_has_kernel_for_dispatch_key(name, "AutocastCUDA")
    }
    assert len(registered) > 80
    assert not {name for name in registered if sum(name in table for table in tables) != 1}


def test_forms_that_stand_for_a_node_are_known_to_it() -> None:
    assert {"scaled_dot_product_attention", "dropout", "lstm", "gru"} <= set(FORMS)


# --- attention -----------------------------------------------------------------------------------------------------------------


def heads(x: Tensor) -> Tensor:
    return x.view(NUM, LENGTH, HEADS, -1).transpose(1, 2)


def attend(self, x: Tensor, **options) -> Tensor:
    query, key, value = (heads(part) for part in x.chunk(3, dim=-1))
    return F.scaled_dot_product_attention(query, key, value, **options)


X = torch.ones(NUM, LENGTH, 3 * HEADS * WIDTH)
SHAPE = (NUM, HEADS, LENGTH, WIDTH)


def test_flash_attention_saves_no_tensor_of_length_x_length() -> None:
    trace = on_cuda(lambda self, x: attend(self, x, is_causal=True), X.to(BF16))
    operands = saved(trace, "scaled_dot_product_attention")
    assert operands["output"] == ("bfloat16", SHAPE) and operands["logsumexp"] == ("float32", SHAPE[:3])
    slot = trace.slot(":scaled_dot_product_attention.key")  # query, key and value are views of one storage
    assert set(slot.names) >= {f":scaled_dot_product_attention.{operand}" for operand in ("query", "key", "value")}
    assert slot.pin is not None and slot.numel == X.numel()
    assert all(LENGTH * LENGTH not in (made.nbytes, made.nbytes // 2, made.nbytes // 4) for made in trace.outputs)


def test_float32_uses_the_memory_efficient_kernel_with_float_masks() -> None:
    mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool)
    trace = on_cuda(lambda self, x, mask: attend(self, x, attn_mask=mask), X, mask)
    operands = saved(trace, "scaled_dot_product_attention")
    assert operands["logsumexp"] == ("float32", SHAPE[:3])  # 96 is a multiple of 32
    assert operands["bias"] == ("float32", (NUM, HEADS, LENGTH, LENGTH))
    slot = trace.slot(":scaled_dot_product_attention.bias")
    assert slot.nbytes == LENGTH * LENGTH * 4 and slot.stays


def test_attention_without_a_fused_kernel_writes_its_logits() -> None:
    odd = torch.ones(NUM, LENGTH, 3 * HEADS * 5)  # heads of 5 values
    trace = on_cuda(attend, odd)
    assert not saved(trace, "scaled_dot_product_attention")
    assert any(slot.shape[-2:] == (LENGTH, LENGTH) for slot in trace.activations)


def test_attention_over_pixels_has_no_fused_kernel() -> None:
    """Heads of an image are (width, pixels): transposed, their last dimension is not contiguous, and the products are those of cuBLAS."""

    def attend_pixels(self, x: Tensor) -> Tensor:
        query, key, value = x.view(NUM, 3, HEADS, WIDTH, LENGTH).transpose(-1, -2).unbind(1)
        return F.scaled_dot_product_attention(query, key, value)

    x = torch.ones(NUM, 3 * HEADS * WIDTH, LENGTH, dtype=BF16)
    trace = on_cuda(attend_pixels, x)
    assert not saved(trace, "scaled_dot_product_attention")
    assert any(slot.shape[-2:] == (LENGTH, LENGTH) and slot.dtype == "float32" for slot in trace.activations)
    assert footprint(trace).workspace_bytes == 64 << 20
    assert footprint(on_cuda(attend, X.to(BF16))).workspace_bytes == 0, "flash attention calls no library"
    mask = torch.ones(LENGTH, 1).expand(LENGTH, LENGTH)  # last dimension of stride 0
    assert not saved(on_cuda(lambda self, x, mask: attend(self, x, attn_mask=mask), X, mask), "scaled_dot_product_attention")


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3), (2, 0, 1, 3), (2, 1, 0, 3)])
def test_the_output_of_flash_attention_has_the_layout_of_its_queries(order: tuple[int, ...]) -> None:
    """Oracle: torch's own description of the kernel."""
    sizes = [(NUM, HEADS, LENGTH, WIDTH)[axis] for axis in order]
    x = torch.empty(sizes, dtype=BF16).permute([order.index(axis) for axis in range(4)]).requires_grad_()
    out = Flash.apply(x, x, x, False)
    described = torch.ops.aten._scaled_dot_product_flash_attention(*[x.detach().to("meta")] * 3)[0]
    assert out.shape == SHAPE and out.stride() == described.stride()
    assert torch.autograd.grad(out.sum(), x)[0].stride() == x.stride()


def test_the_output_of_multihead_attention_is_not_copied_for_the_next_product() -> None:
    """nn.MultiheadAttention has queries in the order (length, num, heads, width), and makes its output contiguous in this order."""
    layer = nn.MultiheadAttention(HEADS * WIDTH, HEADS, batch_first=True)
    x = torch.ones(NUM, LENGTH, HEADS * WIDTH)
    trace = on_cuda(lambda self, x: self.layer(x, x, x, need_weights=False)[0], x, layer=layer, autocast=BF16)
    assert "linear" in {saver.op for saver in trace.slot("layer:scaled_dot_product_attention.output").savers}


def test_attention_inside_of_a_function_of_torch_has_its_form_too() -> None:
    layer = nn.TransformerEncoderLayer(HEADS * WIDTH, HEADS, 64, dropout=0.5, batch_first=True)
    trace = on_cuda(lambda self, x: self.layer(x), torch.ones(NUM, LENGTH, HEADS * WIDTH), layer=layer, autocast=BF16)
    assert saved(trace, "scaled_dot_product_attention")["key"] == ("bfloat16", SHAPE)
    assert not any(slot.shape[-2:] == (LENGTH, LENGTH) for slot in trace.activations)
    assert trace.slot("layer.dropout1:mask").dtype == "bool"


# --- other kernels -------------------------------------------------------------------------------------------------------------


def test_dropout_saves_a_byte_for_each_value() -> None:
    trace = on_cuda(lambda self, x: self.drop(x), X, drop=nn.Dropout(0.1))
    slot = trace.slot("drop:mask")
    assert (slot.dtype, slot.nbytes, slot.uses) == ("bool", X.numel(), {Use.MASK})
    assert not on_cuda(lambda self, x: F.dropout(x, 0.1, training=False), X).activations[1:]


def test_batch_norm_and_pooling_save_what_they_save_on_the_cpu() -> None:
    x = torch.ones(4, 8, 32, 32)
    parts = {"norm": nn.BatchNorm2d(8), "pool": nn.MaxPool2d(2)}
    trace = on_cuda(lambda self, x: self.pool(self.norm(x)), x, **parts)
    assert saved(trace, "batch_norm")["mean"] == ("float32", (8,))
    indices = trace.slot("pool:indices")
    assert indices.dtype == "int64" and indices.parts[0].bound == 32 * 32


@pytest.mark.parametrize(("kind", "gates"), [(nn.LSTM, 4), (nn.GRU, 3), (nn.RNN, 1)])
def test_recurrent_layers_are_one_operation(kind: type[nn.RNNBase], gates: int) -> None:
    layer = kind(64, 128, 2, batch_first=True, bidirectional=True)
    trace = on_cuda(lambda self, x: self.rnn(x)[0], torch.ones(8, 32, 64), rnn=layer)
    operands = saved(trace, "rnn")
    assert operands["output"] == ("float32", (32, 8, 256)) and operands["input"] == ("float32", (32, 8, 64))
    assert operands["reserve"][0] == "uint8"
    assert operands["reserve"][1][0] >= 32 * 8 * 2 * 2 * 128 * 4 * gates  # at least the gates of each position, layer and direction
    gradients = {slot.name: slot.shape for slot in trace.of(Role.GRADIENT)}
    assert gradients["rnn.weight_ih_l0"] == (gates * 128, 64) and len(gradients) == 17


def test_rms_norm_saves_its_input_and_one_rstd_for_each_row() -> None:
    trace = on_cuda(lambda self, x: self.norm(x), torch.ones(64, 128), norm=nn.RMSNorm(128))
    assert saved(trace, "rms_norm") == {"input": ("float32", (64, 128)), "inverse_deviation": ("float32", (64, 1))}


# --- autocast ------------------------------------------------------------------------------------------------------------------


def dtypes(forward, x: Tensor, **parts: nn.Module) -> set[str]:
    """The dtypes of what a forward pass returns and saves under autocast."""
    out: list[Tensor] = []

    def run(self, x: Tensor) -> Tensor:
        out.append(forward(self, x))
        return out[0].float()

    on_cuda(run, x, autocast=BF16, **parts)
    return str(out[0].dtype).removeprefix("torch.")


@pytest.mark.parametrize(
    ("forward", "dtype"),
    [
        (lambda self, x: x @ x.mT, "bfloat16"),
        (lambda self, x: F.linear(x, x), "bfloat16"),
        (lambda self, x: torch.einsum("ij,kj->ik", x, x), "bfloat16"),
        (lambda self, x: x.to(BF16).softmax(-1), "float32"),
        (lambda self, x: F.log_softmax(x.to(BF16), -1), "float32"),
        (lambda self, x: F.layer_norm(x.to(BF16), x.shape[-1:]), "float32"),
        (lambda self, x: x.to(BF16).pow(3), "float32"),
        (lambda self, x: x.to(BF16) ** 2, "float32"),
        (lambda self, x: x.to(BF16).sum(-1), "float32"),
        (lambda self, x: x.to(BF16).norm(), "float32"),
        (lambda self, x: 1 / x.to(BF16), "float32"),
        (lambda self, x: F.mse_loss(x.to(BF16), x.to(BF16)), "float32"),
        (lambda self, x: F.gelu(x.to(BF16)), "bfloat16"),
        (lambda self, x: x.to(BF16).mean(), "bfloat16"),
        (lambda self, x: F.avg_pool3d(x.to(BF16)[None, None], (1, 2, 2)), "bfloat16"),  # autocast on a CPU casts this one
    ],
)
def test_autocast_is_that_of_cuda(forward, dtype: str) -> None:
    assert dtypes(forward, torch.ones(64, 64)) == dtype


def test_autocast_inside_of_the_model_counts() -> None:
    def off(self, x: Tensor) -> Tensor:
        with torch.autocast("cuda", enabled=False):
            return x @ x

    def off_here(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            return x @ x

    assert dtypes(off, torch.ones(64, 64)) == dtypes(off_here, torch.ones(64, 64)) == "float32"

    def on(self, x: Tensor) -> Tensor:
        with torch.autocast("cuda", dtype=BF16):
            return self.fc(x)

    trace = on_cuda(on, torch.ones(64, 64), fc=nn.Linear(64, 64))
    assert trace.slot("fc:input").dtype == "bfloat16"
    assert not torch.is_autocast_enabled("cuda")


def test_a_weight_is_cast_once_a_step_and_its_cast_is_no_activation() -> None:
    trace = on_cuda(lambda self, x: self.fc(self.fc(x)), torch.ones(64, 64), fc=nn.Linear(64, 64), autocast=BF16)
    casts = trace.of(Role.TEMPORARY)
    assert [(slot.name, slot.dtype, slot.nbytes) for slot in casts] == [("fc:weight", "bfloat16", 64 * 64 * 2)]
    bias = next(made for made in trace.outputs if made.op == "_to_copy" and made.shape == (64,))
    assert bias.death < trace.backward_at <= casts[0].death  # the cast of the bias is freed at the end of autocast


def test_cross_entropy_of_16_bits_casts_between_its_two_operations() -> None:
    """As measured on a GPU: log-probabilities in 16 bits, and their cast, of which nll_loss needs the shape."""
    model = nn.Linear(64, 1000)
    batch = (torch.ones(32, 64), torch.zeros(32, dtype=torch.int64))
    trace = trace_step(model, batch, loss=F.cross_entropy, device="cuda", autocast=BF16)
    large = [(made.op, made.dtype) for made in trace.outputs if made.shape == (32, 1000) and made.phase == "loss"]
    assert large == [("_log_softmax", "bfloat16"), ("_to_copy", "float32")]
    assert trace.slot("loss:log_softmax.output").dtype == "bfloat16"
    assert trace.slot("loss:nll_loss.input").dtype == "float32"


# --- devices -------------------------------------------------------------------------------------------------------------------


def test_devices_that_the_model_names_are_the_cpu() -> None:
    def forward(self, x: Tensor) -> Tensor:
        steps = torch.arange(64, device="cuda") + torch.zeros(64, device=torch.device("cuda:0")) + torch.ones(64).to("cuda")
        return x.cuda() * steps.to(device="cuda", dtype=x.dtype).to(x)

    assert on_cuda(forward, torch.ones(64, 64)).device == "cuda"


def test_operations_that_autocast_forbids_on_cuda_raise() -> None:
    model, batch = nn.Sequential(nn.Linear(64, 64), nn.Sigmoid()), (torch.ones(32, 64), torch.ones(32, 64))
    with pytest.raises(TraceError, match="use binary_cross_entropy_with_logits"):
        trace_step(model, batch, loss=F.binary_cross_entropy, device="cuda", autocast=BF16)
    assert trace_step(model, batch, loss=F.binary_cross_entropy, device="cuda").activations
